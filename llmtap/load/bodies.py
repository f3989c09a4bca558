"""Make the JSON bodies of HTTP requests, and store all of them in a file before a run.

`BodyMaker` makes a body from a prompt and a number of output tokens, or adapts a captured body. `prepare`
makes the bodies of all rows of a workload and returns their places in the file (`Prepared`). `server_of` and
`model_ids` read the answer to `GET /v1/models`, because fields depend on the type of the server. Bodies of
WebSocket and gRPC targets are made in `prompt_sender.py`.

`ignore_eos` and `min_tokens` are sent only to servers that know them (vLLM, SGLang). The file has no name;
sending processes on this host inherit its descriptor.

Source: openai/openai-openapi; vllm/entrypoints/openai (its Responses have no min_tokens); sglang's
srt/entrypoints/openai/protocol.py.
"""

import contextlib
import os
import tempfile
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import IO, Annotated, Any, Final, Protocol, Self

import msgspec

from llmtap.errors import ConfigError
from llmtap.exchange.request import endpoint_of
from llmtap.json_types import JsonObject
from llmtap.load.options import BodyOptions, Server
from llmtap.load.sending import PATHS
from llmtap.workload.destinations import endpoint_of_body
from llmtap.workload.prompts.fitting import FittedPrompt, FittedSource, in_batches
from llmtap.workload.prompts.prompt import Prompt, PromptSource
from llmtap.workload.prompts.tokenizer import as_text
from llmtap.workload.requests import Requests

Decode = Callable[[Sequence[int]], str | None]
"""Text of token ids; None if the tokenizer cannot decode."""

_KNOW_MIN: Final = dict.fromkeys(("vllm", "sglang"), ("chat.completions", "completions"))
_KNOW_EOS: Final = {**_KNOW_MIN, "vllm": ("chat.completions", "completions", "responses")}
_STREAMED: Final = frozenset({"chat.completions", "completions", "responses", "messages"})
"""Endpoints whose answer is a stream if the body has `"stream": true`."""
_INCLUDE_USAGE: Final = frozenset({"chat.completions", "completions"})
"""Endpoints of `_STREAMED` whose streams report token usage only if `stream_options` requests it."""

_decode_fields = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_encode = msgspec.json.Encoder().encode


def output_control(limit: str | None, *, ignores_end: bool, stops: bool) -> str | None:
    """Return how requests limit answers: by a field, a stop sequence, or both (IETF draft, 4.3.1).

    `limit`: field with the largest number of tokens. `ignores_end`: the server generates up to the limit.
    `stops`: the requests have stop sequences.
    """
    if limit is not None and ignores_end:
        limit += " with ignore_eos"
    return " and ".join(filter(None, (limit, "stop sequence" if stops else None))) or None


def limit_of_body(body: bytes) -> int | None:
    """Return the largest number of output tokens for which a body asks; None if it names none."""
    try:
        fields = _decode_limits(body)
    except (ValueError, RecursionError):
        return None
    return fields.max_completion_tokens or fields.max_tokens or fields.max_output_tokens


_Limit = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)] | None


class _Limits(msgspec.Struct):
    max_completion_tokens: _Limit = None
    max_tokens: _Limit = None
    max_output_tokens: _Limit = None


_decode_limits: Final = msgspec.json.Decoder(_Limits).decode


class BodyMaker:
    def __init__(self, options: BodyOptions, *, decode: Decode | None = None) -> None:
        """`decode` converts prompts of token ids where the endpoint requires text."""
        self.options = options
        self.endpoint = options.endpoint
        self._decode = decode
        endpoint, server = options.endpoint, options.server
        self._limit = {
            "chat.completions": "max_completion_tokens" if server == "openai" else "max_tokens",
            "completions": "max_tokens",
            "responses": "max_output_tokens",
        }[endpoint]
        self._min_tokens = options.min_tokens and endpoint in _KNOW_MIN.get(server, ())
        self._constant: JsonObject = {}
        """Fields that are the same in every generated body; model, prompt and lengths differ."""
        if options.temperature is not None:
            self._constant["temperature"] = options.temperature
        if options.exact_output and endpoint in _KNOW_EOS.get(server, ()):
            self._constant["ignore_eos"] = True
        self._constant["stream"] = options.streams
        if options.streams and endpoint in _INCLUDE_USAGE:
            self._constant["stream_options"] = {"include_usage": True}
        self._constant.update(options.settings)
        self._constant.update(options.fields)

    @property
    def output_exact(self) -> bool:
        """Whether the answers to generated bodies will have exactly the requested number of tokens."""
        return self._limit not in self._constant and self._sent_value("ignore_eos") is True

    def describe(self, *, made: bool = True, streamed: bool = True) -> dict[str, object]:
        """Return the fields of the bodies as JSON, without values of the user's fields: they may be secret.

        `made`: at least one body was generated from a prompt. `streamed`: at least one body was generated or
        is a prompt of a data set, so it gets the streaming mode of the run; recorded bodies keep theirs. A
        field that no body has is None.
        """
        options = self._sent_value("stream_options")
        limit = None if self._limit in self._constant or not made else self._limit
        return {
            "endpoint": self.endpoint if streamed else None,
            "server": self.options.server,
            "model": self.options.model,
            "output_limit": limit,
            "output_control": output_control(
                limit or (None if self._sent_value(self._limit) is None else self._limit),
                ignores_end=self._sent_value("ignore_eos") is True,
                stops=self._sent_value("stop") not in (None, [], ""),
            )
            if made
            else None,
            "ignore_eos": made and self._sent_value("ignore_eos") is True,
            "min_tokens": made and self._min_tokens,
            "stream": self.options.streams if streamed else None,
            "include_usage": streamed and isinstance(options, dict) and options.get("include_usage") is True,
            "temperature": self._sent_value("temperature") if made else None,
            "settings": {
                name: value
                for name, value in (self.options.settings if made else {}).items()
                if name not in self.options.fields
            },
            "fields": sorted(self.options.fields),
        }

    def _sent_value(self, name: str) -> Any:
        value = self._constant.get(name)
        return _decode_json(value) if isinstance(value, msgspec.Raw) else value

    def body(self, prompt: Prompt, output: int) -> bytes:
        """Return the body of a request for `output` tokens; 0 becomes 1.

        Raises ConfigError for a prompt of token ids if the endpoint does not accept them.
        """
        output = max(1, output)
        value: JsonObject = {} if self.options.model is None else {"model": self.options.model}
        value |= self._prompt_fields(prompt)
        value[self._limit] = output
        if self._min_tokens:
            value["min_tokens"] = output
        value |= self._constant
        return _encode(value)

    def destination(self, body: bytes, path: str) -> str:
        """Return the path to which a body of a trace is sent; "" for the path of the run's endpoint."""
        endpoint = None if path else endpoint_of_body(body)
        return path if endpoint in (None, self.endpoint) else PATHS[endpoint]

    def adapt_recorded(self, body: bytes, path: str = "") -> bytes:
        """Return the body of a trace's row as it is sent.

        A recorded request, which has a path, changes only where the user gave an option. A prompt of a data
        set, which has no path, also gets the model and streaming mode of the run. The bytes of all other
        values stay unchanged, and so does a body that is no JSON object.
        """
        try:
            fields = _decode_fields(body)
        except (ValueError, RecursionError):
            return body
        endpoint = endpoint_of(path) if path else endpoint_of_body(body) or self.endpoint
        stream = self.options.stream if path else self.options.streams
        wanted: JsonObject = {}
        if self.options.model is not None and self._sets_model("model" in fields, bool(path)):
            wanted["model"] = self.options.model
        if stream and endpoint in _STREAMED:
            wanted["stream"] = True
            if endpoint in _INCLUDE_USAGE:
                recorded_options = (
                    _decode_json(fields["stream_options"]) if "stream_options" in fields else None
                )
                options = recorded_options if isinstance(recorded_options, dict) else {}
                wanted["stream_options"] = options | {"include_usage": True}
        elif stream is False and "stream" in fields:
            wanted["stream"] = False
        # Servers refuse a request with `stream_options` if it does not request a stream.
        drop = ("stream_options",) if stream is False else ()
        changed = {
            name: msgspec.Raw(_encode(value))
            for name, value in wanted.items()
            if name not in fields or _decode_json(fields[name]) != value
        }
        theirs = self.options.fields.items()
        changed |= {name: raw for name, raw in theirs if bytes(fields.get(name, b"")) != bytes(raw)}
        if not changed and not any(name in fields for name in drop):
            return body
        sent_fields = {name: raw for name, raw in fields.items() if name not in drop}
        return _encode(sent_fields | changed)

    def _sets_model(self, named: bool, recorded: bool) -> bool:
        """Return whether a body of a trace gets the model of the run. `named`: the body names a model.

        A recorded body that names no model gets none: the request names the model elsewhere, such as in its
        path.
        """
        return (named or not recorded) if self.options.replace_model else not (named or recorded)

    def _prompt_fields(self, prompt: Prompt) -> JsonObject:
        if self.endpoint == "completions":
            return {"prompt": list(prompt.ids) if prompt.ids else as_text(prompt)}
        text = self._text(prompt.ids) if prompt.ids else prompt.text
        messages = [{"role": role, "content": content} for role, content in prompt.history]
        messages.append({"role": "user", "content": text})
        if self.endpoint == "chat.completions":
            if prompt.system:
                messages.insert(0, {"role": "system", "content": prompt.system})
            return {"messages": messages}
        fields: JsonObject = {"instructions": prompt.system} if prompt.system else {}
        return fields | {"input": messages if prompt.history else text}

    def _text(self, ids: Sequence[int]) -> str:
        text = None if self._decode is None else self._decode(ids)
        if text is None:
            raise ConfigError(
                "--endpoint",
                f"the prompts are token ids, which {self.endpoint} does not accept",
                "use --endpoint completions, or give the --tokenizer whose ids they are",
            )
        return text


def server_of(models: bytes) -> Server:
    """Return the type of the server that answered `GET /v1/models`, by its `owned_by`; `auto` if unknown."""
    known: Mapping[str, Server] = {
        "vllm": "vllm",
        "sglang": "sglang",
        "llmtap": "vllm",
        "openai": "openai",
        "system": "openai",
        "openai-internal": "openai",
    }
    owners = {known.get(str(model.owned_by).lower(), "auto") for model in _models_in(models)}
    return owners.pop() if len(owners) == 1 else "auto"


def model_ids(models: bytes) -> list[str]:
    return [model.id for model in _models_in(models) if model.id]


class _Model(msgspec.Struct):
    id: str = ""
    owned_by: Any = ""


class _Models(msgspec.Struct):
    data: list[_Model] = []


def _models_in(raw: bytes) -> list[_Model]:
    try:
        return msgspec.json.decode(raw, type=_Models).data
    except (ValueError, RecursionError):
        return []


def _decode_json(raw: msgspec.Raw) -> Any:
    return msgspec.json.decode(raw)


class Maker(Protocol):
    def body(self, prompt: Prompt, output: int) -> bytes: ...

    def adapt_recorded(self, body: bytes, path: str = "") -> bytes: ...

    def destination(self, body: bytes, path: str) -> str: ...


@dataclass(slots=True)
class PromptLengths:
    """Comparison of the lengths of fitted prompts with the wanted lengths, in tokens."""

    n: int = 0
    exact: int = 0
    missed_min: int = 0
    """Largest number of tokens that a prompt is too short, as a negative number."""
    missed_max: int = 0
    ways: dict[str, int] = field(default_factory=dict)

    def add(self, fitted: FittedPrompt) -> None:
        self.n += 1
        self.exact += fitted.exact
        self.missed_min = min(self.missed_min, fitted.excess_tokens)
        self.missed_max = max(self.missed_max, fitted.excess_tokens)
        self.ways[fitted.way] = self.ways.get(fitted.way, 0) + 1

    def describe(self) -> dict[str, object]:
        return asdict(self)


class Prepared:
    """Bodies of all rows, in a file. Close it after the last read."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self.begins, self.ends = array("q"), array("q")
        self.tokens = array("q")
        """Counted prompt tokens of each row; -1 if not counted."""
        self.paths: list[str] = []
        """Path of each row. "" is the path of the run's endpoint, as is a missing entry at the end."""
        self.kinds: Counter[str] = Counter()
        """Number of bodies by origin: `made` (generated), `recorded`, or from a `data_set`."""
        self.lengths = PromptLengths()

    def add(self, body: bytes, tokens: int) -> None:
        self.begins.append(self.ends[-1] if self.ends else 0)
        self.ends.append(self.begins[-1] + self._file.write(body))
        self.tokens.append(tokens)

    def set_path(self, row: int, path: str) -> None:
        """Set the path of a row that is not sent to the run's endpoint."""
        self.paths += [""] * (row + 1 - len(self.paths))
        self.paths[row] = path

    def flush(self) -> None:
        self._file.flush()

    def __len__(self) -> int:
        return len(self.begins)

    @property
    def fd(self) -> int:
        return self._file.fileno()

    @property
    def bytes_total(self) -> int:
        return self.ends[-1] if self.ends else 0

    def body(self, row: int) -> bytes:
        begin = self.begins[row]
        return os.pread(self.fd, self.ends[row] - begin, begin)

    def close(self) -> None:
        with contextlib.suppress(
            OSError
        ):  # If the disk is full, `close` fails too; the failed write was reported.
            self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def prepare(
    requests: Requests,
    prompts: PromptSource | None,
    maker: Maker,
    progress: Callable[[int, int], None] | None = None,
) -> Prepared:
    """Prepare the bodies of all rows: from the trace, or generated from the prompt.

    Raises ConfigError if the disk of `TMPDIR` has no room, or if the endpoint does not accept a prompt.
    """
    try:
        # The file never has a name, so that nothing is left behind if this process is killed.
        file = tempfile.TemporaryFile()  # noqa: SIM115
    except OSError as exc:
        raise _disk_full_error(exc) from None
    prepared = Prepared(file)
    count = len(requests)
    try:
        for batch in in_batches(range(count), requests.input or array("q", bytes(8 * count))):
            for row, body, tokens in _bodies(requests, prompts, maker, batch, prepared.lengths):
                assert row == len(prepared)
                prepared.add(body, tokens)
                own = requests.bodies[row] if requests.bodies else b""
                recorded_path = requests.paths[row] if requests.paths else ""
                prepared.kinds["made" if not own else "recorded" if recorded_path else "data_set"] += 1
                if own and (path := maker.destination(own, recorded_path)):
                    prepared.set_path(row, path)
            if progress is not None:
                progress(len(prepared), count)
        if prepared.paths:
            prepared.paths += [""] * (count - len(prepared.paths))
        prepared.flush()
    except OSError as exc:
        prepared.close()
        raise _disk_full_error(exc) from None
    except BaseException:
        prepared.close()
        raise
    return prepared


def _bodies(
    requests: Requests, prompts: PromptSource | None, maker: Maker, rows: list[int], lengths: PromptLengths
) -> Iterable[tuple[int, bytes, int]]:
    own = {row: requests.bodies[row] for row in rows if requests.bodies and requests.bodies[row]}
    missing = [row for row in rows if row not in own]
    made: dict[int, tuple[Prompt, int]] = {}
    if missing:
        if prompts is None:
            raise ConfigError("the workload", f"row {missing[0]} has neither a body nor a prompt")
        if isinstance(prompts, FittedSource):
            for row, (prompt, fitted) in zip(missing, prompts.prompts(missing), strict=True):
                made[row] = (prompt, fitted.tokens)
                lengths.add(fitted)
        else:
            made = {row: (prompts.prompt(row), -1) for row in missing}
    for row in rows:
        if row in own:
            yield row, maker.adapt_recorded(own[row], requests.paths[row] if requests.paths else ""), -1
        else:
            prompt, tokens = made[row]
            yield row, maker.body(prompt, requests.output[row]), tokens


def _disk_full_error(exc: OSError) -> ConfigError:
    return ConfigError(
        "TMPDIR",
        f"cannot hold the prepared bodies in {tempfile.gettempdir()}: {exc.strerror or exc}",
        "set TMPDIR to a folder with more free space, or send fewer requests",
    )

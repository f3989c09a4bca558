"""Make the JSON bodies of HTTP requests, and store all of them in a file before a run.

`BodyMaker` makes a body from a prompt and a number of output tokens, or adapts a captured body. `prepare`
makes the bodies of all rows of a workload and returns their places in the file (`PreparedBodies`).
`server_of` and `model_ids` read the answer to `GET /v1/models`, because fields depend on the type of the
server. Bodies of WebSocket and gRPC targets are made in `prompt_sender.py`.

`ignore_eos` and `min_tokens` are sent only to servers that know them (vLLM, SGLang). The file of the bodies
has no name, so the sending processes on this host inherit its descriptor.

Source: openai/openai-openapi; vllm/entrypoints/openai (vLLM's Responses API has no min_tokens); sglang's
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
from llmtap.workload.prompts.fitting import FittedPrompt, FittedSource, row_batches
from llmtap.workload.prompts.prompt import Prompt, PromptSource
from llmtap.workload.prompts.tokenizer import as_text
from llmtap.workload.requests import Requests

Decode = Callable[[Sequence[int]], str | None]
"""Function that returns the text of token ids, or None if the tokenizer cannot decode."""

_MIN_TOKENS_ENDPOINTS: Final = dict.fromkeys(("vllm", "sglang"), ("chat.completions", "completions"))
"""Endpoints that accept `min_tokens`, by server; `_IGNORE_EOS_ENDPOINTS`: those that accept `ignore_eos`."""
_IGNORE_EOS_ENDPOINTS: Final = {
    **_MIN_TOKENS_ENDPOINTS,
    "vllm": ("chat.completions", "completions", "responses"),
}
_STREAMING_ENDPOINTS: Final = frozenset({"chat.completions", "completions", "responses", "messages"})
"""Endpoints whose answer is a stream if the body has `"stream": true`."""
_USAGE_ENDPOINTS: Final = frozenset({"chat.completions", "completions"})
"""Streaming endpoints whose streams report token usage only if `stream_options` requests it."""

_decode_fields = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_encode = msgspec.json.Encoder().encode


def output_control(limit: str | None, *, ignores_end: bool, stops: bool) -> str | None:
    """Return how requests limit answers: by a field, a stop sequence, or both (IETF draft, 4.3.1).

    `limit`: name of the field with the maximum number of tokens. `ignores_end`: the server ignores the end
    token of the model, so each answer reaches the limit. `stops`: the requests have stop sequences.
    """
    if limit is not None and ignores_end:
        limit += " with ignore_eos"
    return " and ".join(filter(None, (limit, "stop sequence" if stops else None))) or None


def limit_of_body(body: bytes) -> int | None:
    """Return the maximum number of output tokens that a body requests; None if the body sets no maximum."""
    try:
        fields = _decode_limits(body)
    except (ValueError, RecursionError):
        return None
    return fields.max_completion_tokens or fields.max_tokens or fields.max_output_tokens


_Limit = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)] | None


class _Limits(msgspec.Struct):
    """Fields of a recorded body that limit the output tokens."""

    max_completion_tokens: _Limit = None
    max_tokens: _Limit = None
    max_output_tokens: _Limit = None


_decode_limits: Final = msgspec.json.Decoder(_Limits).decode


class BodyMaker:
    """Makes the JSON bodies of requests to one endpoint."""

    def __init__(self, options: BodyOptions, *, decode: Decode | None = None) -> None:
        """`decode` converts prompts of token ids for an endpoint that accepts only text."""
        self.options = options
        self.endpoint = options.endpoint
        self._decode = decode
        """Returns the text of token ids; None: the tokenizer cannot."""
        endpoint, server = options.endpoint, options.server
        self._limit_field = {
            "chat.completions": "max_completion_tokens" if server == "openai" else "max_tokens",
            "completions": "max_tokens",
            "responses": "max_output_tokens",
        }[endpoint]
        """Field that limits the number of output tokens at this endpoint."""
        self._sends_min_tokens = options.min_tokens and endpoint in _MIN_TOKENS_ENDPOINTS.get(server, ())
        """Whether bodies demand a minimum number of output tokens."""
        self._constant_fields: JsonObject = {}
        """Fields that are the same in every generated body; model, prompt and lengths differ."""
        if options.temperature is not None:
            self._constant_fields["temperature"] = options.temperature
        if options.exact_output and endpoint in _IGNORE_EOS_ENDPOINTS.get(server, ()):
            self._constant_fields["ignore_eos"] = True
        self._constant_fields["stream"] = options.streams
        if options.streams and endpoint in _USAGE_ENDPOINTS:
            self._constant_fields["stream_options"] = {"include_usage": True}
        self._constant_fields.update(options.settings)
        self._constant_fields.update(options.fields)

    @property
    def output_exact(self) -> bool:
        """Whether the answers to generated bodies will have exactly the requested number of tokens."""
        return self._limit_field not in self._constant_fields and self._sent_value("ignore_eos") is True

    def describe(self, *, made: bool = True, streamed: bool = True) -> dict[str, object]:
        """Return the fields of the bodies as JSON, without values of the user's fields, which can be secret.

        `made`: at least one body was generated from a prompt. `streamed`: at least one body was generated or
        is a prompt of a data set, so it gets the streaming mode of the run; recorded bodies keep their own
        mode. A field that no body has is None.
        """
        options = self._sent_value("stream_options")
        limit = None if self._limit_field in self._constant_fields or not made else self._limit_field
        return {
            "endpoint": self.endpoint if streamed else None,
            "server": self.options.server,
            "model": self.options.model,
            "output_limit": limit,
            "output_control": output_control(
                limit or (None if self._sent_value(self._limit_field) is None else self._limit_field),
                ignores_end=self._sent_value("ignore_eos") is True,
                stops=self._sent_value("stop") not in (None, [], ""),
            )
            if made
            else None,
            "ignore_eos": made and self._sent_value("ignore_eos") is True,
            "min_tokens": made and self._sends_min_tokens,
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
        """Return the value of a member that every body has; None: none."""
        value = self._constant_fields.get(name)
        return _decode_json(value) if isinstance(value, msgspec.Raw) else value

    def body(self, prompt: Prompt, output: int) -> bytes:
        """Return the body of a request for `output` tokens, and for 1 token if `output` is 0.

        Raises ConfigError for a prompt of token ids if the endpoint does not accept them.
        """
        output = max(1, output)
        value: JsonObject = {} if self.options.model is None else {"model": self.options.model}
        value |= self._prompt_fields(prompt)
        value[self._limit_field] = output
        if self._sends_min_tokens:
            value["min_tokens"] = output
        value |= self._constant_fields
        return _encode(value)

    def destination(self, body: bytes, path: str) -> str:
        """Return the path to which a body of a trace is sent; "" means the path of the run's endpoint."""
        endpoint = None if path else endpoint_of_body(body)
        return path if endpoint in (None, self.endpoint) else PATHS[endpoint]

    def adapt_recorded(self, body: bytes, path: str = "") -> bytes:
        """Return the body of a trace's row as it is sent.

        A recorded request, which has a path, changes only where the user gave an option. A prompt of a data
        set, which has no path, also gets the model and streaming mode of the run. The bytes of all other
        values stay unchanged. A body that is not a JSON object is returned unchanged.
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
        if stream and endpoint in _STREAMING_ENDPOINTS:
            wanted["stream"] = True
            if endpoint in _USAGE_ENDPOINTS:
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
        user_fields = self.options.fields.items()
        changed |= {name: raw for name, raw in user_fields if bytes(fields.get(name, b"")) != bytes(raw)}
        if not changed and not any(name in fields for name in drop):
            return body
        sent_fields = {name: raw for name, raw in fields.items() if name not in drop}
        return _encode(sent_fields | changed)

    def _sets_model(self, named: bool, recorded: bool) -> bool:
        """Return whether a body of a trace gets the model of the run. `named`: the body names a model.

        A recorded body that names no model stays without one: the request names the model elsewhere, for
        example in its path.
        """
        return (named or not recorded) if self.options.replace_model else not (named or recorded)

    def _prompt_fields(self, prompt: Prompt) -> JsonObject:
        if self.endpoint == "completions":
            return {"prompt": list(prompt.ids) if prompt.ids else as_text(prompt)}
        text = self._decoded_text(prompt.ids) if prompt.ids else prompt.text
        messages = [{"role": role, "content": content} for role, content in prompt.history]
        messages.append({"role": "user", "content": text})
        if self.endpoint == "chat.completions":
            if prompt.system:
                messages.insert(0, {"role": "system", "content": prompt.system})
            return {"messages": messages}
        fields: JsonObject = {"instructions": prompt.system} if prompt.system else {}
        return fields | {"input": messages if prompt.history else text}

    def _decoded_text(self, ids: Sequence[int]) -> str:
        text = None if self._decode is None else self._decode(ids)
        if text is None:
            raise ConfigError(
                "--endpoint",
                f"the prompts are token ids, which {self.endpoint} does not accept",
                "use --endpoint completions, or set --tokenizer to the tokenizer of these ids",
            )
        return text


def server_of(models: bytes) -> Server:
    """Return the server type by the `owned_by` in an answer to `GET /v1/models`; `auto` if it is unknown."""
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
    """One model in the server's list."""

    id: str = ""
    owned_by: Any = ""


class _Models(msgspec.Struct):
    """Answer of the server to `GET /v1/models`."""

    data: list[_Model] = []


def _models_in(raw: bytes) -> list[_Model]:
    try:
        return msgspec.json.decode(raw, type=_Models).data
    except (ValueError, RecursionError):
        return []


def _decode_json(raw: msgspec.Raw) -> Any:
    return msgspec.json.decode(raw)


class Maker(Protocol):
    """Makes request bodies for one kind of target."""

    def body(self, prompt: Prompt, output: int) -> bytes:
        """Return a request body with a prompt. `output`: number of tokens to generate."""
        ...

    def adapt_recorded(self, body: bytes, path: str = "") -> bytes:
        """Return a recorded body as this target needs it."""
        ...

    def destination(self, body: bytes, path: str) -> str:
        """Return the path to which a body is sent."""
        ...


@dataclass(slots=True)
class PromptLengths:
    """Comparison of the lengths of fitted prompts with the wanted lengths, in tokens."""

    n: int = 0
    """Number of prompts."""
    exact: int = 0
    """Number of prompts of exactly the wanted length, out of `n` prompts."""
    missed_min: int = 0
    """Largest number of missing tokens of a prompt, as a negative number; `missed_max`: of excess tokens."""
    missed_max: int = 0
    """Largest difference above the wanted length."""
    ways: dict[str, int] = field(default_factory=dict)
    """Number of prompts by the method of counting their tokens (`FittedPrompt.method`)."""

    def add(self, fitted: FittedPrompt) -> None:
        self.n += 1
        self.exact += fitted.is_exact
        self.missed_min = min(self.missed_min, fitted.excess_tokens)
        self.missed_max = max(self.missed_max, fitted.excess_tokens)
        self.ways[fitted.method] = self.ways.get(fitted.method, 0) + 1

    def describe(self) -> dict[str, object]:
        return asdict(self)


class PreparedBodies:
    """Bodies of all rows, in a file. Close it after the last read."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self.begins, self.ends = array("q"), array("q")
        """Offsets in bytes at which the body of each row begins and ends in the file."""
        self.tokens = array("q")
        """Counted prompt tokens of each row; -1 if not counted."""
        self.paths: list[str] = []
        """Path of each row. "", or a missing entry at the end, means the path of the run's endpoint."""
        self.kinds: Counter[str] = Counter()
        """Number of bodies by origin: `made` (generated), `recorded`, or from a `data_set`."""
        self.lengths = PromptLengths()
        """How well the prompts have the wanted lengths."""

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
        # If the disk is full, closing fails too. Ignore this error: the failed write was reported.
        with contextlib.suppress(OSError):
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
) -> PreparedBodies:
    """Store the bodies of all rows in a file: bodies of the trace, or bodies generated from prompts.

    Raises ConfigError if the disk of `TMPDIR` has no room, or if the endpoint does not accept a prompt.
    """
    try:
        # The file never has a name, so that nothing is left behind if this process is killed.
        file = tempfile.TemporaryFile()  # noqa: SIM115
    except OSError as exc:
        raise _disk_full_error(exc) from None
    prepared = PreparedBodies(file)
    count = len(requests)
    try:
        for batch in row_batches(range(count), requests.input or array("q", bytes(8 * count))):
            for row, body, tokens in _make_bodies(requests, prompts, maker, batch, prepared.lengths):
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


def _make_bodies(
    requests: Requests, prompts: PromptSource | None, maker: Maker, rows: list[int], lengths: PromptLengths
) -> Iterable[tuple[int, bytes, int]]:
    own = {row: requests.bodies[row] for row in rows if requests.bodies and requests.bodies[row]}
    missing = [row for row in rows if row not in own]
    made: dict[int, tuple[Prompt, int]] = {}
    if missing:
        if prompts is None:
            problem = f"row {missing[0] + 1:,} has neither a body nor a prompt"
            raise ConfigError("the workload", problem, "add a body or a prompt to each row")
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
        f"cannot store the prepared request bodies in {tempfile.gettempdir()}: {exc.strerror or exc}",
        "set TMPDIR to a folder with more free space, or send fewer requests",
    )

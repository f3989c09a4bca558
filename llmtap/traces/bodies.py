"""Request bodies, answers and prompts: what the formats that hold text share.

Source: openai/openai-openapi openapi.yaml (chat, completions, responses); Anthropic's messages API.
"""

from collections.abc import Iterator, Mapping
from typing import Any, BinaryIO, Final

import msgspec
import pyarrow as pa

from llmtap.capture.schema import SCHEMA
from llmtap.exchange.outcome import EventClass
from llmtap.exchange.saved import Explained
from llmtap.traces.format import ROWS_PER_BATCH, FormatError, TraceWritten, batch_of
from llmtap.traces.text import BODY_BYTES_MAX

__all__ = [
    "ENDPOINTS",
    "JOINED",
    "PromptTexts",
    "TextRows",
    "answer_columns",
    "asked_columns",
    "compact",
    "endpoint_of",
    "messages_of",
    "prompt_columns",
    "read_elements",
    "read_object",
    "text_of",
    "text_said",
]

BATCH_BYTES: Final = 8 << 20
"""Text in one batch; a single row may have more."""

ENDPOINTS: Final = {
    "chat.completions": "/v1/chat/completions",
    "completions": "/v1/completions",
    "responses": "/v1/responses",
    "embeddings": "/v1/embeddings",
    "messages": "/v1/messages",
}
"""Paths of requests whose kind is known, but not their path."""
_MEDIA: Final = frozenset({
    "image", "image_url", "input_image", "input_audio", "audio_url", "video_url", "file", "input_file",
    "document",
})  # fmt: skip
"""Types of a message's parts that are no text."""
_ELEMENT_DEPTH_MAX: Final = 500
"""ijson has no bound of its own. Decoders of Python give up at about a thousand."""
_READ_BYTES: Final = 1 << 16


class TextRows:
    """Rows with text, collected into batches."""

    def __init__(self) -> None:
        self._rows: list[dict[str, Any]] = []
        self._bytes = 0

    def add(self, **row: Any) -> Iterator[pa.RecordBatch]:
        """Add a row; yield the batch that it fills."""
        self._rows.append(row)
        for name in ("request_body", "response_text"):
            self._bytes += len(row.get(name) or "")
        if self._bytes >= BATCH_BYTES or len(self._rows) >= ROWS_PER_BATCH:
            yield self._take()

    def rest(self) -> Iterator[pa.RecordBatch]:
        """Yield the last, smaller batch."""
        if self._rows:
            yield self._take()

    def _take(self) -> pa.RecordBatch:
        rows, self._rows, self._bytes = self._rows, [], 0
        names = dict.fromkeys(name for row in rows for name in row)
        columns: dict[str, pa.Array] = {}
        for name in names:
            try:
                columns[name] = pa.array([row.get(name) for row in rows], SCHEMA.field(name).type)
            except (pa.ArrowException, UnicodeError, OverflowError, TypeError, ValueError):
                # Never the value: it may be somebody's text.
                raise FormatError(f"{name}: a value does not fit the column") from None
        return batch_of(len(rows), columns)


_encode: Final = msgspec.json.Encoder(decimal_format="number").encode


def compact(value: Any) -> str:
    """Return a value as JSON text; decimals as numbers."""
    return _encode(value).decode()


def read_object(data: bytes | str, where: str) -> dict[str, Any]:
    """Decode a JSON object. Raises FormatError, which begins with `where`."""
    try:
        return msgspec.json.decode(data, type=dict[str, Any])
    except msgspec.ValidationError:
        raise FormatError(f"{where}: expected a JSON object") from None
    except (ValueError, RecursionError) as exc:
        raise FormatError(f"{where}: not valid JSON: {exc}") from None


def endpoint_of(path: str | None, body: Mapping[str, Any]) -> str | None:
    """Return the key of ENDPOINTS of a request, by its path or else by the members of its body."""
    bare = (path or "").rstrip("/")
    for name, url in ENDPOINTS.items():
        if bare.endswith(url.removeprefix("/v1")) and not (
            name == "completions" and bare.endswith("/chat/completions")
        ):
            return name
    if path:
        return None
    if "messages" in body:
        return "chat.completions"
    return "completions" if "prompt" in body else None


def messages_of(body: dict[str, Any]) -> list[tuple[str, str]] | None:
    """Return role and text of each message of a request; None if it has none."""
    out: list[tuple[str, str]] = []
    said_first = (body.get(name) for name in ("system", "instructions"))
    out += [("system", text_of(said)) for said in said_first if isinstance(said, str | list)]
    for name in ("messages", "input"):
        said = body.get(name)
        if isinstance(said, list) and all(isinstance(message, dict) for message in said):
            for message in said:
                role = message.get("role")
                kind = role if isinstance(role, str) else _role_of_item(message)
                content = message.get("content", message.get("output", message.get("arguments")))
                out.append((kind, text_of(content)))
            return out
        if name == "input" and isinstance(said, str):
            return [*out, ("user", said)]
    prompt = body.get("prompt")
    if isinstance(prompt, list) and len(prompt) == 1:
        prompt = prompt[0]
    return [*out, ("user", prompt)] if isinstance(prompt, str) else None


def _role_of_item(item: dict[str, Any]) -> str:
    """Return the role of an item of the Responses API that is a call or the result of one."""
    return "tool" if str(item.get("type")).endswith("_output") else "assistant"


def text_of(content: Any) -> str:
    """Return the text of a message's content: a string, or the text parts of a list of parts."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        return ""
    parts = (
        part if isinstance(part, str) else part.get("text")
        for part in content
        if isinstance(part, str | dict)
    )
    return "".join(part for part in parts if isinstance(part, str))


def asked_columns(body: dict[str, Any]) -> dict[str, Any]:
    """Return the parameters of a request, in the columns of a capture."""
    limits = (body.get(name) for name in ("max_completion_tokens", "max_tokens", "max_output_tokens"))
    tools, form = body.get("tools"), body.get("response_format")
    form = form.get("type") if isinstance(form, dict) else None
    row: dict[str, Any] = {
        "model": body["model"] if isinstance(body.get("model"), str) and body["model"] else None,
        "max_tokens": next((n for n in limits if _is_int(n)), None),
        "temperature": _number(body.get("temperature")),
        "top_p": _number(body.get("top_p")),
        "n": body["n"] if _is_int(body.get("n"), 31) else None,
        "tools": len(tools) if isinstance(tools, list) else None,
        "images": _media_in(body) or None,
        "response_format": form if isinstance(form, str) else None,
    }  # fmt: skip
    messages = messages_of(body)
    if messages is not None:
        sizes = [len(text.encode("utf-8", "replace")) for _, text in messages]
        row["message_roles"] = [role for role, _ in messages]
        row["message_bytes"], row["prompt_bytes"] = sizes, sum(sizes)
    return row


def _media_in(body: dict[str, Any]) -> int:
    """Count the parts of messages that are no text: pictures, sounds, files."""
    said = body.get("messages", body.get("input"))
    contents = [m.get("content") for m in said if isinstance(m, dict)] if isinstance(said, list) else []
    parts = [part for content in contents if isinstance(content, list) for part in content]
    return sum(isinstance(part, dict) and part.get("type") in _MEDIA for part in parts)


def _is_int(value: Any, bits: int = 63) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and abs(value) < 1 << bits


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


# ---------------------------------------------------------------- answers


def answer_columns(explained: Explained) -> dict[str, Any]:
    """Return end, kind and counts of an answer played through the observer, in the columns of a capture.

    Points in time are left to the caller: a saved answer has none of its own (`exchange/saved.py`).
    """
    x = explained.exchange
    refusal = x.refusal or {}
    return {
        "response_model": x.response_model, "endpoint": x.endpoint, "dialect": x.dialect, "stream": x.stream,
        "request_id": x.request_id, "status": x.status, "outcome": x.outcome.value,
        "finish_reason": x.finish_reason, "error": x.error, "retries": x.retries,
        "refusal_kind": _text(refusal.get("kind")), "refusal_source": _text(refusal.get("source")),
        "refusal_detail": _text(refusal.get("detail")),
        "refusal_confidence": _text(refusal.get("confidence")),
        "guardrail": _json(x.guardrail), "no_token_reason": x.no_token_reason,
        "input_tokens": x.tokens.input, "output_tokens": x.tokens.output,
        "input_token_source": None if x.tokens.input is None else "usage",
        "reasoning_tokens": x.tokens.reasoning, "cached_tokens": x.tokens.cached,
        "token_source": None if x.tokens.output is None else x.tokens.source.value,
        "usage": _json(x.usage), "server_timing": _json(x.server_timing),
        "unparsed_events": x.unparsed_events,
    }  # fmt: skip


def text_said(explained: Explained) -> str | None:
    """Return the text of the first choice; None if no event was recognised to have any."""
    parts = [
        event.delta.text
        for event in explained.events
        if event.delta.event_class in (EventClass.CONTENT, EventClass.REFUSAL)
        and event.delta.text
        and event.delta.choices[:1] in ((), (0,))
    ]
    return "".join(parts) if parts else None


def _text(value: object) -> str | None:
    return value if value is None or isinstance(value, str) else _json(value)


def _json(value: object) -> str | None:
    return None if value is None else compact(value)


# ---------------------------------------------------------------- arrays


def read_elements(file: BinaryIO, path: tuple[str, ...] = (), *, floats: bool = False) -> Iterator[Any]:
    """Yield the elements of the JSON array at `path` (keys of nested objects; none: the file is the array).

    Numbers with a point are Decimal, with `floats` float. Raises FormatError, also above BODY_BYTES_MAX.
    """
    import ijson
    from ijson.common import ObjectBuilder

    counted = _CountedReader(file)
    depth = matched = found = 0  # open containers, those of them on the path, and elements
    inside = done = False
    key = ""
    builder: ObjectBuilder | None = None
    try:
        for event, value in ijson.basic_parse(counted, buf_size=_READ_BYTES, use_float=floats):
            begins, ends = event.startswith("start"), event.startswith("end")
            depth -= ends
            if inside and ends and depth == len(path):
                inside, done = False, True
            elif inside:
                builder = builder or ObjectBuilder()
                builder.event(event, value)
                if depth == len(path) + 1 and not begins:
                    yield builder.value
                    builder, found = None, found + 1
                    counted.left = BODY_BYTES_MAX
            elif event == "map_key" and depth == matched:
                key = value
            elif begins and not done and depth == matched and (not depth or key == path[depth - 1]):
                # A path of two keys: the map of all, the map of the first key, the array of the second.
                inside = event == "start_array" and depth == len(path)
                matched += event == "start_map" and depth < len(path)
            matched = min(matched, depth) if ends else matched
            depth += begins
            if depth > _ELEMENT_DEPTH_MAX:
                raise FormatError(f"element {found}: nested too deeply")
    except ijson.JSONError as exc:
        # Without its second line, which repeats what was read: it may be somebody's text.
        what = str(exc).removeprefix("b'").partition("\n")[0].partition("\\n")[0]
        if not inside and not done:
            raise FormatError(f"there is no JSON array{_at(path)}: {what}") from None
        ended = "premature EOF" in what
        raise FormatError(f"element {found}: {'the file was cut off here' if ended else what}") from None
    if not done:
        raise FormatError(f"there is no JSON array{_at(path)}")


def _at(path: tuple[str, ...]) -> str:
    return f" at {'.'.join(path)}" if path else ""


class _CountedReader:
    """Reads a file without its byte order mark, until too much is read for one element."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._begun = False
        self.left = BODY_BYTES_MAX

    def read(self, n: int) -> bytes:
        data = self._file.read(n)
        if not self._begun and n:
            self._begun = True
            data = data.removeprefix(b"\xef\xbb\xbf") or self._file.read(n)
        self.left -= len(data)
        if self.left < 0:
            raise FormatError(f"an element is longer than {BODY_BYTES_MAX >> 20} MiB")
        return data


# ---------------------------------------------------------------- prompts

JOINED: Final = "one text: of several messages those of all, joined by empty lines, without roles"
"""`TraceFormat.why` of a body that is not kept whole."""


def prompt_columns(prompt: str) -> dict[str, Any]:
    """Return the columns of a request that is one message of a user."""
    body = {"messages": [{"role": "user", "content": prompt}]}
    return {"request_body": compact(body), "level": "full", **asked_columns(body)}


class PromptTexts:
    """Requests of one file as single prompts, for tools that take no messages.

    The texts of several messages are joined by empty lines, the earlier first: common beginnings stay common,
    and the length stays about right; roles, pictures, sounds and tools are lost.
    """

    def __init__(self) -> None:
        self.joined = 0
        """Prompts made of several messages."""
        self.silent = 0
        """Bodies without any text."""
        self.reduced = 0
        """Bodies with more than text: tools, pictures."""

    def of(self, body: str) -> str | None:
        """Return the prompt; None if the body has no text, which is counted."""
        try:
            request = read_object(body, "request")
        except FormatError:
            request = {}
        messages = messages_of(request)
        prompt = "\n\n".join(text for _, text in messages or () if text)
        if not prompt:
            self.silent += 1
            return None
        assert messages is not None
        self.joined += len(messages) > 1
        self.reduced += bool(request.get("tools")) or _has_media(request)
        return prompt

    def of_all(self, batch: pa.RecordBatch, written: TraceWritten) -> list[str | None]:
        """Return the prompts of a batch; rows without one are not counted as written."""
        prompts = [self.of(body) for body in batch.column("request_body").to_pylist()]
        if None in prompts:
            written.count(batch.filter(pa.array([prompt is None for prompt in prompts])), sign=-1)
        return prompts

    def report(self, written: TraceWritten) -> None:
        """Add the counts to the report."""
        if self.silent:
            written.drop("no text in the body", self.silent)
            written.rows -= self.silent
        written.note(self.joined, "prompts are several messages, joined by empty lines")
        written.note(self.reduced, "prompts lost tools, or parts that are not text")


def _has_media(request: Mapping[str, Any]) -> bool:
    messages = request.get("messages")
    if not isinstance(messages, list):
        return False
    contents = (m.get("content") for m in messages if isinstance(m, dict))
    parts = (part for content in contents if isinstance(content, list) for part in content)
    return any(isinstance(part, dict) and part.get("type") not in ("text", "input_text") for part in parts)

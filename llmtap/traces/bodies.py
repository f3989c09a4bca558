"""Shared code of trace formats with text: request bodies, and large JSON arrays.

`request_columns` returns the columns of a capture for a request body, and `messages_of` its messages.
`read_elements` streams the elements of a JSON array. Each format reads its answers itself. Code for lines,
CSV and numbers is in `text.py`.

Source: openai/openai-openapi openapi.yaml (chat, completions, responses); Anthropic's messages API.
"""

from collections.abc import Iterator
from typing import Any, BinaryIO, Final

import msgspec

from llmtap.json_types import JsonObject
from llmtap.traces.format import FormatError, TraceRow
from llmtap.traces.text import BODY_BYTES_MAX

_MEDIA: Final = frozenset(
    {
        "image",
        "image_url",
        "input_image",
        "input_audio",
        "audio_url",
        "video_url",
        "file",
        "input_file",
        "document",
    }
)
"""Types of message parts that are not text."""
_DEPTH_MAX: Final = 500
"""Maximum depth of nested JSON. ijson has no limit, but Python's decoders fail at about a thousand."""
_DEPTH_STEP: Final = {"start_map": 1, "start_array": 1, "end_map": -1, "end_array": -1}
_READ_BYTES: Final = 1 << 16


_encode: Final = msgspec.json.Encoder(decimal_format="number").encode


def compact_json(value: Any) -> str:
    return _encode(value).decode()


def read_object(data: bytes | str, where: str) -> JsonObject:
    """Decode a JSON object. Raises FormatError with a message that begins with `where`."""
    try:
        return msgspec.json.decode(data, type=JsonObject)
    except msgspec.ValidationError:
        raise FormatError(f"{where}: expected a JSON object") from None
    except (ValueError, RecursionError) as exc:
        raise FormatError(f"{where}: not valid JSON: {exc}") from None


def is_json_object(body: str) -> bool:
    try:
        read_object(body, "request")
    except FormatError:
        return False
    return True


def messages_of(body: JsonObject) -> list[tuple[str, str]] | None:
    """Return the role and the text of each message of a request; None if it has no messages."""
    out: list[tuple[str, str]] = []
    systems = (body.get(name) for name in ("system", "instructions"))
    out += [("system", text_of(value)) for value in systems if isinstance(value, str | list)]
    for name in ("messages", "input"):
        value = body.get(name)
        if isinstance(value, list) and all(isinstance(message, dict) for message in value):
            for message in value:
                role = message.get("role")
                # In the Responses API, an item without a role is a tool call, or the result of one.
                called = "tool" if str(message.get("type")).endswith("_output") else "assistant"
                kind = role if isinstance(role, str) else called
                content = message.get("content", message.get("output", message.get("arguments")))
                out.append((kind, text_of(content) or _calls_text(message.get("tool_calls"))))
            return out
        if name == "input" and isinstance(value, str):
            return [*out, ("user", value)]
    prompt = body.get("prompt")
    if isinstance(prompt, list) and len(prompt) == 1:
        prompt = prompt[0]
    return [*out, ("user", prompt)] if isinstance(prompt, str) else None


def _calls_text(calls: Any) -> str:
    """Return the functions of tool calls as JSON: an object for one call, else a list; "" without calls."""
    listed = calls if isinstance(calls, list) else []
    functions = [call.get("function") for call in listed if isinstance(call, dict)]
    named = [
        {name: value for name, value in function.items() if name in ("name", "arguments")}
        for function in functions
        if isinstance(function, dict)
    ]
    return compact_json(named[0] if len(named) == 1 else named) if named else ""


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


def request_columns(body: JsonObject) -> TraceRow:
    """Return the parameters of a request, in the columns of a capture."""
    limits = (body.get(name) for name in ("max_completion_tokens", "max_tokens", "max_output_tokens"))
    tools, form = body.get("tools"), body.get("response_format")
    form = form.get("type") if isinstance(form, dict) else None
    types = part_types(body.get("messages", body.get("input")))
    row: TraceRow = {
        "model": body["model"] if isinstance(body.get("model"), str) and body["model"] else None,
        "max_tokens": next((n for n in limits if _is_int(n)), None),
        "temperature": _number_of(body.get("temperature")),
        "top_p": _number_of(body.get("top_p")),
        "n": body["n"] if _is_int(body.get("n"), 31) else None,
        "tools": len(tools) if isinstance(tools, list) else None,
        "images": sum(kind in _MEDIA for kind in types) or None,
        "response_format": form if isinstance(form, str) else None,
    }
    messages = messages_of(body)
    if messages is not None:
        sizes = [len(text.encode("utf-8", "replace")) for _, text in messages]
        row["message_roles"] = [role for role, _ in messages]
        row["message_bytes"], row["prompt_bytes"] = sizes, sum(sizes)
    return row


def part_types(messages: Any) -> list[Any]:
    values = [m.get("content") for m in messages if isinstance(m, dict)] if isinstance(messages, list) else []
    parts = [part for content in values if isinstance(content, list) for part in content]
    return [part.get("type") for part in parts if isinstance(part, dict)]


def _is_int(value: Any, bits: int = 63) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and abs(value) < 1 << bits


def _number_of(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def read_elements(file: BinaryIO, path: str = "", *, floats: bool = False) -> Iterator[Any]:
    """Yield the elements of the JSON array at `path`, such as `log.entries` (empty: the file is the array).

    Numbers with a fraction are Decimal, or float if `floats` is true. Raises FormatError for a file without
    such an array, for invalid JSON, and for an element of more than BODY_BYTES_MAX.
    """
    import ijson

    counted, count_, inside = _CountedReader(file), 0, False

    def events_within_depth() -> Iterator[tuple[str, Any]]:
        # Check the depth before ijson.parse gets the event: it builds a path as long as the depth for every
        # event, so deep nesting would take quadratic time.
        depth = 0
        for one in ijson.basic_parse(counted, buf_size=_READ_BYTES, use_float=floats):
            depth += _DEPTH_STEP.get(one[0], 0)
            if depth > _DEPTH_MAX:
                raise FormatError(f"element {count_}: must have at most {_DEPTH_MAX} nested levels")
            yield one

    def events() -> Iterator[tuple[str, str, Any]]:
        nonlocal inside
        for one in ijson.parse(events_within_depth()):
            inside = inside or one[:2] == (path, "start_array")
            yield one

    missing = f"there is no JSON array{f' at {path}' if path else ''}"
    try:
        for element in ijson.items(events(), f"{path}.item".removeprefix(".")):
            yield element
            count_ += 1
            counted.bytes_left = BODY_BYTES_MAX
    except ijson.JSONError as exc:
        # Omit the second line of the message: it quotes the file, which can have a user's text.
        what = str(exc).removeprefix("b'").partition("\n")[0].partition("\\n")[0]
        what = "the file was cut off here" if inside and "premature EOF" in what else what
        raise FormatError(f"element {count_}: {what}" if inside else f"{missing}: {what}") from None
    if not inside:
        raise FormatError(missing)


class _CountedReader:
    """Reads a file without its byte order mark, and raises FormatError if an element is too long."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._has_begun = False
        """Whether the first bytes were read, which can be a byte order mark."""
        self.bytes_left = BODY_BYTES_MAX
        """Number of bytes that the current element can still have; reset for each element."""

    def read(self, n: int) -> bytes:
        data = self._file.read(n)
        if not self._has_begun and n:
            self._has_begun = True
            data = data.removeprefix(b"\xef\xbb\xbf") or self._file.read(n)
        self.bytes_left -= len(data)
        if self.bytes_left < 0:
            raise FormatError(f"an element of the JSON must have at most {BODY_BYTES_MAX >> 20} MiB")
        return data

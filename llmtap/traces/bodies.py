"""Request bodies and rows with text: what the formats that hold whole exchanges share.

Source: openai/openai-openapi openapi.yaml (chat, completions, responses); Anthropic's messages API.
"""

from collections.abc import Iterator, Mapping
from typing import Any, BinaryIO, Final

import msgspec
import pyarrow as pa

from llmtap.capture.schema import SCHEMA
from llmtap.traces.format import ROWS_PER_BATCH, FormatError, batch_of

__all__ = [
    "ENDPOINTS",
    "TextRows",
    "asked_columns",
    "compact",
    "endpoint_of",
    "messages_of",
    "read_lines",
    "read_object",
    "text_of",
]

BATCH_BYTES: Final = 8 << 20
"""Of text in one batch; a single row may have more."""
LINE_BYTES_MAX: Final = 256 << 20
"""As ELEMENT_BYTES_MAX of elements.py: one request body."""

ENDPOINTS: Final = {
    "chat.completions": "/v1/chat/completions",
    "completions": "/v1/completions",
    "responses": "/v1/responses",
    "embeddings": "/v1/embeddings",
    "messages": "/v1/messages",
}
"""Of requests that say what they are, but not where they went."""
_MEDIA: Final = frozenset({
    "image", "image_url", "input_image", "input_audio", "audio_url", "video_url", "file", "input_file",
    "document",
})  # fmt: skip
"""Types of a message's parts that are no text."""


class TextRows:
    """Rows in the making, until there are enough of them for a batch."""

    def __init__(self) -> None:
        self._rows: list[dict[str, Any]] = []
        self._bytes = 0

    def add(self, **row: Any) -> Iterator[pa.RecordBatch]:
        """Takes a row; gives the batch that it fills."""
        self._rows.append(row)
        for name in ("request_body", "response_text"):
            self._bytes += len(row.get(name) or "")
        if self._bytes >= BATCH_BYTES or len(self._rows) >= ROWS_PER_BATCH:
            yield self._take()

    def rest(self) -> Iterator[pa.RecordBatch]:
        """The last, smaller batch."""
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


def compact(value: Any) -> str:
    """A value as JSON text."""
    return msgspec.json.encode(value).decode()


def read_object(data: bytes | str, where: str) -> dict[str, Any]:
    """A JSON object. Raises FormatError, which begins with `where`."""
    try:
        return msgspec.json.decode(data, type=dict[str, Any])
    except msgspec.ValidationError:
        raise FormatError(f"{where}: expected a JSON object") from None
    except (ValueError, RecursionError) as exc:
        raise FormatError(f"{where}: not valid JSON: {exc}") from None


def read_lines(file: BinaryIO) -> Iterator[tuple[int, bytes]]:
    """The lines that are not blank, numbered from 1, without a byte order mark. Raises FormatError."""
    number = 0
    while line := file.readline(LINE_BYTES_MAX):
        number += 1
        if len(line) == LINE_BYTES_MAX and not line.endswith(b"\n"):
            raise FormatError(f"line {number} is longer than {LINE_BYTES_MAX >> 20} MiB")
        line = line.removeprefix(b"\xef\xbb\xbf").strip() if number == 1 else line.strip()
        if line:
            yield number, line


def endpoint_of(path: str | None, body: Mapping[str, Any]) -> str | None:
    """Which of ENDPOINTS a request is for, by its path or else by the members of its body."""
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
    """Role and text of each message of a chat, a completion or a response's input; None where it has none."""
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
    """Of an item of the Responses API that is no message: a call, or what came of it."""
    return "tool" if str(item.get("type")).endswith("_output") else "assistant"


def text_of(content: Any) -> str:
    """The text of a message's content: a string, or the text parts of a list of parts."""
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
    """What a request asks for, in the capture's columns."""
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
    """Parts of messages that are no text: pictures, sounds, files."""
    said = body.get("messages", body.get("input"))
    contents = [m.get("content") for m in said if isinstance(m, dict)] if isinstance(said, list) else []
    parts = [part for content in contents if isinstance(content, list) for part in content]
    return sum(isinstance(part, dict) and part.get("type") in _MEDIA for part in parts)


def _is_int(value: Any, bits: int = 63) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and abs(value) < 1 << bits


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None

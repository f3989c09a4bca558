"""Shared code of trace formats with text: request bodies, large JSON arrays, and files of prompts.

A request body is read into the columns of a capture (`asked_columns`), into messages (`messages_of`) or into
one prompt (`prompt_of`). `read_elements` streams the elements of a JSON array. `write_prompts` writes JSON
Lines of prompts. Answers are read by the formats themselves. Lines, CSV and numbers are in `text.py`.

Source: openai/openai-openapi openapi.yaml (chat, completions, responses); Anthropic's messages API.
"""

from collections.abc import Iterator, Mapping
from typing import Any, BinaryIO, Final

import msgspec
import pyarrow as pa

from llmtap.traces.format import FormatError, TraceWriter
from llmtap.traces.text import BODY_BYTES_MAX

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


_encode: Final = msgspec.json.Encoder(decimal_format="number").encode


def compact(value: Any) -> str:
    return _encode(value).decode()


def read_object(data: bytes | str, where: str) -> dict[str, Any]:
    """Decode a JSON object. Raises FormatError, which begins with `where`."""
    try:
        return msgspec.json.decode(data, type=dict[str, Any])
    except msgspec.ValidationError:
        raise FormatError(f"{where}: expected a JSON object") from None
    except (ValueError, RecursionError) as exc:
        raise FormatError(f"{where}: not valid JSON: {exc}") from None


def is_object(body: str) -> bool:
    try:
        read_object(body, "request")
    except FormatError:
        return False
    return True


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
                # Items of the Responses API without a role are calls, or their results.
                called = "tool" if str(message.get("type")).endswith("_output") else "assistant"
                kind = role if isinstance(role, str) else called
                content = message.get("content", message.get("output", message.get("arguments")))
                out.append((kind, text_of(content)))
            return out
        if name == "input" and isinstance(said, str):
            return [*out, ("user", said)]
    prompt = body.get("prompt")
    if isinstance(prompt, list) and len(prompt) == 1:
        prompt = prompt[0]
    return [*out, ("user", prompt)] if isinstance(prompt, str) else None


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
    types = _part_types(body.get("messages", body.get("input")))
    row: dict[str, Any] = {
        "model": body["model"] if isinstance(body.get("model"), str) and body["model"] else None,
        "max_tokens": next((n for n in limits if _is_int(n)), None),
        "temperature": _number(body.get("temperature")),
        "top_p": _number(body.get("top_p")),
        "n": body["n"] if _is_int(body.get("n"), 31) else None,
        "tools": len(tools) if isinstance(tools, list) else None,
        "images": sum(kind in _MEDIA for kind in types) or None,
        "response_format": form if isinstance(form, str) else None,
    }  # fmt: skip
    messages = messages_of(body)
    if messages is not None:
        sizes = [len(text.encode("utf-8", "replace")) for _, text in messages]
        row["message_roles"] = [role for role, _ in messages]
        row["message_bytes"], row["prompt_bytes"] = sizes, sum(sizes)
    return row


def _part_types(messages: Any) -> list[Any]:
    found = [m.get("content") for m in messages if isinstance(m, dict)] if isinstance(messages, list) else []
    parts = [part for content in found if isinstance(content, list) for part in content]
    return [part.get("type") for part in parts if isinstance(part, dict)]


def _is_int(value: Any, bits: int = 63) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and abs(value) < 1 << bits


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


# ---------------------------------------------------------------- arrays


def read_elements(file: BinaryIO, path: tuple[str, ...] = (), *, floats: bool = False) -> Iterator[Any]:
    """Yield the elements of the JSON array at `path` (keys of nested objects; none: the file is the array).
    Fractions are Decimal, with `floats` float. Raises FormatError, also above BODY_BYTES_MAX."""
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


def prompt_of(body: str) -> tuple[str, bool, bool]:
    """Return the texts of a request's messages, joined by empty lines, and two flags: several messages were
    joined; the request had more than text."""
    try:
        request = read_object(body, "request")
    except FormatError:
        request = {}
    messages = messages_of(request) or []
    types = _part_types(request.get("messages"))
    more = bool(request.get("tools")) or any(kind not in ("text", "input_text") for kind in types)
    return "\n\n".join(text for _, text in messages if text), len(messages) > 1, more


def write_prompts(writer: TraceWriter, names: Mapping[str, str]) -> None:
    """Write JSON Lines of a `prompt` and of the columns in `names`, under their names there."""
    joined = reduced = 0
    prompts: list[str] = []

    def reasons(batch: pa.RecordBatch) -> list[str | None]:
        nonlocal joined, reduced
        found = [prompt_of(body) for body in batch.column("request_body").to_pylist()]
        prompts[:] = [prompt for prompt, _, _ in found if prompt]
        joined += sum(several for prompt, several, _ in found if prompt)
        reduced += sum(more for prompt, _, more in found if prompt)
        return [None if prompt else "no text in the body" for prompt, _, _ in found]

    columns = ("request_body", *names)
    for batch in writer.outgoing(columns, ("request_body",), times="none", reasons=reasons):
        for row in zip(prompts, *(batch.column(name).to_pylist() for name in names), strict=True):
            fields = zip(("prompt", *names.values()), row, strict=True)
            line = compact({name: value for name, value in fields if value is not None})
            writer.out.write(line.encode() + b"\n")
    writer.note(joined, "prompts are several messages, joined by empty lines")
    writer.note(reduced, "prompts lost tools, or parts that are not text")

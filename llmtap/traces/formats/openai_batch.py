"""The trace format `openai-batch`: requests of OpenAI's Batch API, without times. Read and written.

JSON Lines, one request a line: `{"custom_id": str, "method": "POST", "url": "/v1/chat/completions", "body":
{...}}`. The values of a body are written unchanged. `stream` is removed, because a batch cannot stream.

Source: OpenAI, reference of the Batch API.
"""

from collections.abc import Iterator
from typing import BinaryIO, Final

import msgspec
import pyarrow as pa

from llmtap.protocol.target import split_target
from llmtap.traces.bodies import read_object, request_columns
from llmtap.traces.format import ASPECTS, TraceFormat, TraceRow, TraceWriter
from llmtap.traces.text import error_of, read_lines, start_of

_URLS: Final = {
    "chat.completions": "/v1/chat/completions",
    "completions": "/v1/completions",
    "responses": "/v1/responses",
    "embeddings": "/v1/embeddings",
    "messages": "/v1/messages",
}
"""URL by endpoint. Paths are matched by their end, so `chat.completions` must come before `completions`."""
_FALSE: Final = msgspec.Raw(b"false")
_HOLDS: Final = ("request body", "message roles and sizes", "max_tokens", "model")
_WRITTEN_COLUMNS: Final = ("id", "method", "path", "endpoint", "request_body")

Members = dict[str, msgspec.Raw]
"""Members of a JSON object, whose values are not decoded."""


class _Request(msgspec.Struct):
    """One line of a batch file."""

    custom_id: str
    body: msgspec.Raw
    url: str
    method: str = "POST"


_decode_request: Final = msgspec.json.Decoder(_Request).decode
_decode_members: Final = msgspec.json.Decoder(Members).decode


def _read(file: BinaryIO, notes: list[str]) -> Iterator[TraceRow]:
    for number, line in read_lines(file):
        try:
            request = _decode_request(line)
        except (ValueError, RecursionError) as exc:
            raise error_of(exc, number) from None
        text = bytes(request.body).decode()
        path = request.url
        if not path.startswith("/"):  # The URL has a scheme and a host.
            path, _ = split_target(path.encode())
        body = read_object(text, f"line {number}: body")
        yield {
            "id": request.custom_id,
            "method": request.method,
            "path": path,
            "stream": body.get("stream") is True,
            "level": "full",
            "request_body": text,
            "endpoint": next((name for name, url in _URLS.items() if path.endswith(url[3:])), None),
            **request_columns(body),
        }


def _write(writer: TraceWriter) -> None:
    requests: list[tuple[str, Members]] = []
    names: set[int] = set()  # Hashes of the ids, which need less memory: about 60 bytes per line.
    renamed = unstreamed = 0

    def reasons_to_drop(batch: pa.RecordBatch) -> list[str | None]:
        results = [_request_of(row) for row in batch.select(_WRITTEN_COLUMNS).to_pylist()]
        requests[:] = [result for result in results if not isinstance(result, str)]
        return [result if isinstance(result, str) else None for result in results]

    columns = (*_WRITTEN_COLUMNS, *(name for aspect in _HOLDS for name in ASPECTS[aspect]))
    for batch in writer.rows_to_write(
        columns, ("request_body",), times="none", failed=True, reasons=reasons_to_drop
    ):
        ids, methods = (batch.column(name).to_pylist() for name in ("id", "method"))
        first = writer.rows - batch.num_rows
        for n, (id_, method, (url, body)) in enumerate(zip(ids, methods, requests, strict=True), first):
            name = id_ or f"request-{n}"
            renamed += hash(name) in names
            while hash(name) in names:
                name = f"{name}-{n}"
            names.add(hash(name))
            unstreamed += body.pop("stream", _FALSE) != _FALSE
            body.pop("stream_options", None)
            # Remove white space from the body, because a line break in it would end the line.
            text = msgspec.Raw(msgspec.json.format(msgspec.json.encode(body), indent=-1))
            line = {"custom_id": name, "method": method or "POST", "url": url, "body": text}
            writer.out.write(msgspec.json.encode(line) + b"\n")
    writer.note(unstreamed, "requests asked for a stream: `stream` was taken out")
    writer.note(renamed, "ids were not unique, and got a number")


def _request_of(row: TraceRow) -> tuple[str, Members] | str:
    """Return the URL and the members of a row's request, or the reason why it cannot be written."""
    try:
        body = _decode_members(row["request_body"])
    except (ValueError, RecursionError):
        return "request body is no JSON object"
    kind = "chat.completions" if "messages" in body else "completions" if "prompt" in body else ""
    url = row["path"] or _URLS.get(row["endpoint"] or kind)
    return (url, body) if url else "the destination of the request is unknown"


def _sniff(head: bytes, name: str) -> bool:
    """Return whether the first line has the members of a request.

    If the line is longer than `head`, it cannot be decoded. Then search it for the names of the members.
    """
    text, members = start_of(head), ("custom_id", "url", "body")
    try:
        line = msgspec.json.decode(text.split(b"\n", 1)[0])
    except (ValueError, RecursionError):
        return text.startswith(b"{") and all(f'"{member}"'.encode() in text for member in members)
    return isinstance(line, dict) and set(members) <= line.keys()


FORMAT: Final = TraceFormat(
    name="openai-batch",
    title="OpenAI batch, requests (JSONL)",
    extensions=(".jsonl",),
    aspects=frozenset(_HOLDS),
    required_aspects=frozenset({"request body"}),
    remarks=dict.fromkeys(
        ("arrival", "think time", "end of the answer", "first token", "times of events"),
        "a batch has no times",
    )
    | {"session and turn": "its lines have no order"},
    sniff=_sniff,
    info={"level": "full"},
    rows=_read,
    write_rows=_write,
)

"""The trace format `openai-batch`: requests of OpenAI's Batch API, without times. Read and written.

JSON Lines, one request a line: `{"custom_id": str, "method": "POST", "url": "/v1/chat/completions", "body":
{...}}`.

Source: OpenAI, reference of the Batch API.
"""

from collections.abc import Iterator
from typing import Any, BinaryIO, Final

import msgspec
import pyarrow as pa

from llmtap.traces.bodies import ENDPOINTS, asked_columns, endpoint_of, read_object
from llmtap.traces.format import FormatError, TraceFormat, TraceWriter
from llmtap.traces.text import read_lines, start_of

LINES_MAX: Final = 50_000
"""Maximum of the providers for one file."""
BYTES_MAX: Final = 100_000_000
"""The smallest of the providers' limits; the largest is 200 MB."""
_FALSE: Final = msgspec.Raw(b"false")
_NULL: Final = msgspec.Raw(b"null")
_decode_members: Final = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_WANTED: Final = ("id", "method", "path", "endpoint", "request_body")


class _Question(msgspec.Struct):
    custom_id: str
    body: msgspec.Raw
    url: str
    method: str = "POST"


_decode_question: Final = msgspec.json.Decoder(_Question).decode


def _read(file: BinaryIO, notes: list[str]) -> Iterator[dict[str, Any]]:
    streams, models = 0, set[str]()
    for number, line in read_lines(file):
        try:
            asked = _decode_question(line)
        except (ValueError, RecursionError) as exc:
            raise FormatError(f"line {number}: {exc}") from None
        text = bytes(asked.body).decode()
        body = read_object(text, f"line {number}: body")
        columns = asked_columns(body)
        stream = body.get("stream") is True
        streams += stream
        if columns["model"] is not None and len(models) < 2:
            models.add(columns["model"])
        yield {
            "id": asked.custom_id, "method": asked.method, "path": asked.url, "stream": stream,
            "endpoint": endpoint_of(asked.url, body), "level": "full", "request_body": text, **columns,
        }  # fmt: skip
    if streams:
        notes.append(f"{streams:,} requests ask for a stream, which no batch can give")
    if len(models) > 1:
        notes.append("there is more than one model in it, which providers refuse")


class _Lines:
    """Writes the lines and counts their irregularities."""

    def __init__(self, writer: TraceWriter) -> None:
        self._writer = writer
        self._bytes = 0
        self._names: set[int] = set()
        """Hashes of the ids, about 60 bytes a line."""
        self._renamed = self._unstreamed = 0
        self._models: set[bytes] = set()

    def put(self, row: dict[str, Any]) -> bool:
        """Write a row; return False, and count the reason, if it cannot be written."""
        writer, options = self._writer, self._writer.options
        if row["request_body"] is None:
            writer.drop("no request body")
            return False
        # Members stay as they are spelled.
        try:
            body = _decode_members(row["request_body"])
        except (ValueError, RecursionError):
            writer.drop("request body is no JSON object")
            return False
        url = row["path"] or ENDPOINTS.get(row["endpoint"] or endpoint_of(None, body) or "")
        if url is None:
            writer.drop("the destination of the request is unknown")
            return False
        if body.get("stream", _FALSE) != _FALSE or "stream_options" in body:
            self._unstreamed += 1
            for name in ("stream", "stream_options"):
                body.pop(name, None)
        if options.model is not None and (options.override_model or body.get("model", _NULL) == _NULL):
            body["model"] = msgspec.Raw(msgspec.json.encode(options.model))
        if len(self._models) < 2:
            self._models.add(bytes(body.get("model", _NULL)))
        # Without white space: a body's own line breaks would end the line.
        text = msgspec.Raw(msgspec.json.format(msgspec.json.encode(body), indent=-1))
        name = self._unique(row["id"])
        line = {"custom_id": name, "method": row["method"] or "POST", "url": url, "body": text}
        data = msgspec.json.encode(line) + b"\n"
        writer.out.write(data)
        self._names.add(hash(name))
        self._bytes += len(data)
        writer.rows += 1
        return True

    def _unique(self, wanted: str | None) -> str:
        """Return the row's id, or another if it has none or an earlier row has the same."""
        n = self._writer.rows
        name = wanted or f"request-{n}"
        while hash(name) in self._names:
            self._renamed += bool(wanted)
            n += 1
            name = f"{wanted or 'request'}-{n}"
        return name

    def report(self) -> None:
        writer, options = self._writer, self._writer.options
        if options.override_model and options.model is not None:
            writer.changed["model"] = "--model in every row"
        writer.note(self._unstreamed, "requests asked for a stream: `stream` was taken out")
        if len(self._models) > 1:
            writer.notes.append(
                "there is more than one model in it, which providers refuse: filter first, or --model"
            )
        writer.note(self._renamed, "ids were not unique, and got a number")
        if writer.rows > LINES_MAX:
            writer.note(writer.rows, f"lines, where providers take {LINES_MAX:,} in a file: split it")
        if self._bytes > BYTES_MAX:
            size = f"{self._bytes / 1e6:,.0f} MB"
            writer.notes.append(f"{size}, where providers take 100 to 200 MB in a file: split it")


def _write(writer: TraceWriter) -> None:
    lines = _Lines(writer)
    for batch in writer.batches:
        good = [lines.put(row) for row in batch.select(_WANTED).to_pylist()]
        writer.count(batch.filter(pa.array(good, pa.bool_())))
    lines.report()


def _sniff(head: bytes, name: str) -> bool:
    """Whether the first line has the members of a request; a line longer than `head` is searched for them."""
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
    holds=frozenset({"request body", "message roles and sizes", "max_tokens", "model"}),
    needs=frozenset({"request body"}),
    why=dict.fromkeys(
        ("arrival", "think time", "end of the answer", "first token", "times of events"),
        "a batch has no times",
    )
    | {"session and turn": "lines come in any order"},
    sniff=_sniff,
    info={"level": "full"},
    rows=_read,
    writes=_write,
)

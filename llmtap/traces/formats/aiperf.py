"""The trace format `aiperf`: AIPerf's `mooncake_trace`, JSON Lines, read and written.

A line has exactly one of `input_length`, `payload` (a whole request body), `messages` (with `tools`) and
`text_input`. Optional are `output_length`, `hash_ids` (512-token blocks, only with a length), `timestamp` and
`delay` in ms, `session_id`, and `extra`, which is merged into the body. A row with a body is written as
`payload`, any other row with its length; all rows of a session must be of the same kind.

Source: aiperf 0.13.0.
"""

from collections.abc import Iterator
from itertools import chain
from typing import BinaryIO, Final

import msgspec
import pyarrow as pa
import pyarrow.compute as pc

from llmtap.capture.schema import CaptureInfo
from llmtap.json_types import JsonObject
from llmtap.traces import format
from llmtap.traces.bodies import compact_json, is_json_object, read_object, request_columns
from llmtap.traces.formats.mooncake import BLOCK_COLUMNS, BLOCK_TOKENS, BlockIds
from llmtap.traces.text import (
    BODY_BYTES_MAX,
    Id,
    Number,
    TokenCount,
    decimal_text,
    first_objects,
    json_rows,
    number_ns,
)

_MS_PLACES: Final = 6
"""Power of ten for `number_ns`, because a millisecond has 10**6 ns."""
_FIRST_ROWS: Final = 1_000
"""Number of first rows that are searched for a body. If none has a body, the privacy level is `shape`."""
_CONTENTS: Final = ("input_length", "payload", "messages", "text_input")
"""Fields of which a row must have exactly one."""
_WRITTEN_COLUMNS: Final = (
    "arrival_ns",
    "think_us",
    "session",
    "input_tokens",
    "output_tokens",
    "request_body",
)


class _Row(msgspec.Struct):
    """One line of a trace for AIPerf."""

    input_length: TokenCount | None = None
    payload: msgspec.Raw = msgspec.Raw()
    """Whole JSON body of the request."""
    messages: list[JsonObject] | None = None
    text_input: str | None = None
    output_length: TokenCount | None = None
    hash_ids: list[Id] | None = None
    timestamp: Number | None = None
    """Arrival in ms."""
    delay: Number | None = None
    """Pause after the previous answer, in ms."""
    session_id: str | None = None
    tools: list[JsonObject] | None = None
    extra: JsonObject | None = None


def _open(stream: BinaryIO) -> format.TraceSource:
    """Open a trace; read the first rows at once, to know what they contain."""
    notes: list[str] = []
    rows = _read(stream, notes)
    first: list[format.TraceRow] = []
    while len(first) < _FIRST_ROWS and not (first and "request_body" in first[-1]):
        if (row := next(rows, None)) is None:
            break
        first.append(row)
    info = CaptureInfo(
        source="aiperf",
        arrivals="trace",
        blocks="trace",
        block_unit="tokens",
        block_size=BLOCK_TOKENS,
        level="full" if first and "request_body" in first[-1] else "shape",
    )
    return format.TraceSource(info, format.text_batches(chain(first, rows)), notes)


def _read(stream: BinaryIO, notes: list[str]) -> Iterator[format.TraceRow]:
    extras = 0
    for row, number in json_rows(stream, _Row, notes, bytes_max=BODY_BYTES_MAX):
        text = bytes(row.payload).decode()
        payload = None if text in ("", "null") else text
        contents = (row.input_length, payload, row.messages, row.text_input)
        present = [name for name, value in zip(_CONTENTS, contents, strict=True) if value is not None]
        if len(present) != 1:
            expected, got = ", ".join(_CONTENTS), " and ".join(present) or "none"
            raise format.FormatError(f"line {number}: expected exactly one of {expected}; got {got}")
        columns: format.TraceRow = {
            "output_tokens": row.output_length,
            "session": row.session_id,
            "session_source": None if row.session_id is None else "explicit",
        }
        if row.timestamp is not None:
            columns["arrival_ns"] = number_ns(row.timestamp, _MS_PLACES, number, "timestamp")
        if row.delay is not None:
            columns["think_us"] = number_ns(row.delay, _MS_PLACES, number, "delay") // 1_000
        if row.input_length is not None:
            columns["input_tokens"] = row.input_length
            if row.hash_ids is not None:
                columns |= {"blocks": row.hash_ids, "block_size": BLOCK_TOKENS, "block_unit": "tokens"}
            extras += row.extra is not None
        else:
            columns |= _body_columns(row, payload, number)
        yield columns
    if extras:
        notes.append(f"{extras:,} rows have extra fields of a body that is not there: not kept")


def _body_columns(row: _Row, payload: str | None, number: int) -> format.TraceRow:
    if payload is not None:
        body = read_object(payload, f"line {number}: payload")
    else:
        body = {"messages": row.messages} if row.messages is not None else {"prompt": row.text_input}
        body |= {"tools": row.tools} if row.tools is not None else {}
        # AIPerf requests `output_length` tokens in a body that it builds, but it sends a payload unchanged.
        extra = row.extra or {}
        if row.output_length and "max_completion_tokens" not in extra:
            body["max_tokens"] = int(row.output_length)
        body |= extra
        payload = compact_json(body)
    return {"request_body": payload, "level": "full", **request_columns(body)}


def _write(writer: format.TraceWriter) -> None:
    ids = BlockIds(writer)
    with_bodies: dict[str, bool] = {}  # Whether the first row of each session has a body.

    def reason_to_drop(body: str | None, input_tokens: int | None, session: str | None) -> str | None:
        if body is None and input_tokens is None:
            return "neither a body nor a count of input tokens"
        if body is not None and not is_json_object(body):
            return "the body is no JSON object"
        if session is not None and with_bodies.setdefault(session, body is not None) != (body is not None):
            return "its session began with rows of the other kind, with or without bodies"
        return None

    def reasons_to_drop(batch: pa.RecordBatch) -> list[str | None]:
        names = ("request_body", "input_tokens", "session")
        return list(map(reason_to_drop, *(batch.column(name).to_pylist() for name in names)))

    for batch in writer.rows_to_write((*_WRITTEN_COLUMNS, *BLOCK_COLUMNS), (), reasons=reasons_to_drop):
        # Rows with a body are written without length and blocks. Remove their blocks before new ids are
        # assigned: otherwise the ids in the file would have gaps.
        has_body = pc.is_valid(batch.column("request_body"))
        writer.count(batch.filter(has_body).select(["input_tokens", "blocks"]), sign=-1)
        blocks = batch.column("blocks")
        batch = format.replace_column(
            batch, "blocks", pc.if_else(has_body, pa.scalar(None, blocks.type), blocks)
        )
        columns = [batch.column(name).to_pylist() for name in _WRITTEN_COLUMNS]
        for row in zip(*columns, ids.ids_of_rows(batch), strict=True):
            writer.out.write(_row_line(*row))
    ids.missing_rows = 0  # Do not report rows without ids, because AIPerf accepts them.
    ids.report()


def _row_line(
    arrival_ns: int | None,
    think_us: int | None,
    session: str | None,
    input_tokens: int | None,
    output_tokens: int | None,
    body: str | None,
    blocks: list[int] | None,
) -> bytes:
    # Put the body on one line. A line break in JSON is always outside of strings, so a space can replace it.
    payload = None if body is None else body.replace("\r", " ").replace("\n", " ")
    fields = {
        "session_id": None if session is None else compact_json(session),
        "timestamp": None if arrival_ns is None else decimal_text(arrival_ns, _MS_PLACES),
        "delay": None if think_us is None else decimal_text(think_us, 3),
        "input_length": input_tokens if body is None else None,
        "payload": payload,
        "output_length": output_tokens,
        "hash_ids": None if body is not None or blocks is None else f"[{','.join(map(str, blocks))}]",
    }
    parts = (f'"{name}":{value}' for name, value in fields.items() if value is not None)
    return f"{{{','.join(parts)}}}\n".encode()


def _sniff(head: bytes, name: str) -> bool:
    """Return whether the rows are in AIPerf's format.

    Such rows have a session, a delay or a body, or they lack a time or an output length, which only AIPerf
    allows. Rows with only a time and lengths are in Mooncake's format.
    """
    objects = first_objects(head)
    known = {f.name for f in msgspec.structs.fields(_Row)}
    own = {"payload", "text_input", "session_id", "delay"}
    return (
        bool(objects)
        and all(o.keys() <= known and len({*_CONTENTS} & o.keys()) == 1 for o in objects)
        and any(
            own & o.keys()
            or {"messages", "timestamp"} <= o.keys()
            or ("input_length" in o and not {"timestamp", "output_length"} <= o.keys())
            for o in objects
        )
    )


FORMAT: Final = format.TraceFormat(
    name="aiperf",
    title="AIPerf mooncake_trace (JSON Lines)",
    extensions=(".jsonl",),
    aspects=format.LENGTHS | {"session and turn", "think time", "prefix blocks", "request body"},
    remarks={
        "input tokens": "where there is a body, it takes the length from that",
        "prefix blocks": "blocks of 512 tokens, of rows without a body",
        **format.NO_FAILED,
    },
    sniff=_sniff,
    open_source=_open,
    write_rows=_write,
)

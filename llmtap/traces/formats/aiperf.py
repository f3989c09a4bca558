"""The trace formats `aiperf` (AIPerf's `mooncake_trace`) and `aiperf-inputs` (its `inputs_json`).

Both are read and written. `aiperf`: JSON Lines with exactly one of `input_length`, `payload` (a whole request
body), `messages` (with `tools`) and `text_input`; optional `output_length`, `hash_ids` (512-token blocks,
only with a length), `timestamp` and `delay` in ms, `session_id`, and `extra`, merged into the body. A row
with a body is written as `payload`, others with their length; a session has one kind only.

`aiperf-inputs`: `{"data": [{"session_id": str, "payloads": [body, ...]}, ...]}`, without times.

Source: aiperf 0.13.0.
"""

from collections.abc import Callable, Iterator
from itertools import chain, count
from typing import Any, BinaryIO, Final

import msgspec
import pyarrow as pa
import pyarrow.compute as pc

from llmtap.traces import format
from llmtap.traces.blocks import BLOCK_COLUMNS, BlockIds
from llmtap.traces.bodies import asked_columns, compact, is_object, read_elements, read_object
from llmtap.traces.sorting import grouped
from llmtap.traces.text import (
    BODY_BYTES_MAX,
    Count,
    Id,
    JsonLines,
    Number,
    decimal_text,
    first_objects,
    number_ns,
    start_of,
)  # fmt: skip

_SIZE: Final = 512
_MS: Final = 6
_CONTENTS: Final = ("payload", "messages", "text_input")
_WANTED: Final = (
    "arrival_ns", "think_us", "session", "input_tokens", "output_tokens", "request_body",
)  # fmt: skip

_NO_OBJECT: Final = "the body is no JSON object"

Json = dict[str, Any]


class _Row(msgspec.Struct):
    input_length: Count | None = None
    payload: msgspec.Raw = msgspec.Raw()
    messages: list[Json] | None = None
    text_input: str | None = None
    output_length: Count | None = None
    hash_ids: list[Id] | None = None
    timestamp: Number | None = None
    delay: Number | None = None
    session_id: str | None = None
    tools: list[Json] | None = None
    extra: Json | None = None

    def content(self) -> str | None:
        """Return which of the four it has; None for none or several."""
        payload = self.payload if bytes(self.payload) not in (b"", b"null") else None
        there = (self.input_length, payload, self.messages, self.text_input)
        names = [n for n, value in zip(("input_length", *_CONTENTS), there, strict=True) if value is not None]
        return names[0] if len(names) == 1 else None


# ---------------------------------------------------------------- mooncake_trace


def _open(stream: BinaryIO) -> format.TraceSource:
    lines = JsonLines(stream, _Row, bytes_max=BODY_BYTES_MAX)
    blocks = iter(lines)
    first = next(blocks, ([], []))
    bodies = any(row.content() in _CONTENTS for row in first[0])

    def rows(notes: list[str]) -> Iterator[Json]:
        extras = 0
        for row, number in chain.from_iterable(zip(*block, strict=True) for block in chain([first], blocks)):
            content = row.content()
            extras += content == "input_length" and row.extra is not None
            yield _columns(row, content, number)
        notes += lines.notes()
        if extras:
            notes.append(f"{extras:,} rows have extra fields of a body that is not there: not kept")

    return format.trace_source(
        lambda notes: format.text_batches(rows(notes)), "aiperf", blocks="trace", block_unit="tokens",
        block_size=_SIZE, level="full" if bodies else "shape",
    )  # fmt: skip


def _columns(row: _Row, content: str | None, number: int) -> Json:
    if content is None:
        names = ", ".join(("input_length", *_CONTENTS))
        raise format.FormatError(f"line {number}: input_length: exactly one of {names} must be there")
    columns: Json = {
        "output_tokens": row.output_length,
        "session": row.session_id,
        "session_source": None if row.session_id is None else "explicit",
    }
    if row.timestamp is not None:
        columns["arrival_ns"] = number_ns(row.timestamp, _MS, number, "timestamp")
    if row.delay is not None:
        columns["think_us"] = number_ns(row.delay, _MS, number, "delay") // 1_000
    if content == "input_length":
        columns["input_tokens"] = row.input_length
        if row.hash_ids is not None:
            columns |= {"blocks": row.hash_ids, "block_size": _SIZE, "block_unit": "tokens"}
        return columns
    if content == "payload":
        text = bytes(row.payload).decode()
        body = read_object(text, f"line {number}: payload")
    else:
        body = {"messages": row.messages} if row.messages is not None else {"prompt": row.text_input}
        body |= {"tools": row.tools} if row.tools is not None else {}
        body |= row.extra or {}
        text = compact(body)
    return columns | {"request_body": text, "level": "full", **asked_columns(body)}


def _write(writer: format.TraceWriter) -> None:
    ids = BlockIds(writer, _SIZE)
    for batch in writer.outgoing((*_WANTED, *BLOCK_COLUMNS), (), reasons=_misfits()):
        bodies = batch.filter(pc.is_valid(batch.column("request_body")))
        writer.count(bodies.select(["input_tokens", "blocks"]), sign=-1)
        columns = [batch.column(name).to_pylist() for name in _WANTED]
        lines = []
        for row, blocks in zip(zip(*columns, strict=True), ids.of(_lengths_only(batch)), strict=True):
            arrival_ns, think_us, session, read, made, body = row
            parts = []
            if session is not None:
                parts.append(f'"session_id":{compact(session)}')
            if arrival_ns is not None:
                parts.append(f'"timestamp":{decimal_text(arrival_ns, _MS)}')
            if think_us is not None:
                parts.append(f'"delay":{decimal_text(think_us, 3)}')
            parts.append(f'"input_length":{read}' if body is None else f'"payload":{_one_line(body)}')
            if made is not None:
                parts.append(f'"output_length":{made}')
            if body is None and blocks is not None:
                parts.append(f'"hash_ids":[{",".join(map(str, blocks))}]')
            lines.append(f"{{{','.join(parts)}}}\n")
        writer.out.write("".join(lines).encode())
    ids.missing = 0  # a row with a body needs none, and AIPerf takes the others as well
    ids.report()


def _lengths_only(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Remove the blocks of rows that are written without them, so that the ids have no gaps."""
    blocks = batch.column("blocks")
    bare = pc.is_valid(batch.column("request_body"))
    if bare.true_count:
        blocks = pc.if_else(bare, pa.scalar(None, blocks.type), blocks)
        batch = format.replaced(batch, "blocks", blocks)
    return batch


def _misfits() -> Callable[[pa.RecordBatch], list[str | None]]:
    """Return a function that says which rows AIPerf cannot read, and why."""
    with_bodies: dict[str, bool] = {}  # of the first row of each session

    def reason(body: str | None, read: int | None, session: str | None) -> str | None:
        if body is None and read is None:
            return "neither a body nor a count of input tokens"
        if body is not None and not is_object(body):
            return _NO_OBJECT
        if session is not None and with_bodies.setdefault(session, body is not None) != (body is not None):
            return "its session began with rows of the other kind, with or without bodies"
        return None

    def reasons(batch: pa.RecordBatch) -> list[str | None]:
        names = ("request_body", "input_tokens", "session")
        return list(map(reason, *(batch.column(name).to_pylist() for name in names)))

    return reasons


def _one_line(body: str) -> str:
    """Return the same JSON on one line: a line break in it is white space outside of strings."""
    return body.replace("\r", " ").replace("\n", " ")


def _sniff(head: bytes, name: str) -> bool:
    """Rows of lengths alone are Mooncake's; a session, a delay or a body is AIPerf's."""
    objects = first_objects(head)
    if not objects and head.count(b"\n") == 0:
        return False
    known = {f.name for f in msgspec.structs.fields(_Row)}
    own = {"payload", "text_input", "session_id", "delay"}
    contents = {"input_length", *_CONTENTS}
    return (
        bool(objects)
        and all(o.keys() <= known and len(contents & o.keys()) == 1 for o in objects)
        and any(own & o.keys() or {"messages", "timestamp"} <= o.keys() for o in objects)
    )


# ---------------------------------------------------------------- inputs_json


class _Session(msgspec.Struct):
    session_id: str
    payloads: list[Json]


def _read_inputs(stream: BinaryIO, notes: list[str]) -> Iterator[Json]:
    bare = 0
    for number, element in enumerate(read_elements(stream, ("data",))):
        try:
            session = msgspec.convert(element, _Session)
        except (ValueError, RecursionError) as exc:
            raise format.FormatError(f"session {number}: {exc}") from None
        bare += not session.payloads
        for turn, payload in enumerate(session.payloads):
            text = compact(payload)
            yield {
                "session": session.session_id, "session_source": "explicit", "turn": turn, "level": "full",
                "request_body": text,
                **asked_columns(read_object(text, f"session {number}, payload {turn}")),
            }  # fmt: skip
    if bare:
        notes.append(f"{bare:,} sessions have no payloads, and became no row")


def _write_inputs(writer: format.TraceWriter) -> None:
    loose, out = 0, writer.out
    columns = ("capture", "session", "id", "request_body")

    def reasons(batch: pa.RecordBatch) -> list[str | None]:
        return [None if is_object(body) else _NO_OBJECT for body in batch.column("request_body").to_pylist()]

    def turns() -> Iterator[tuple[object, int, bytes]]:
        nonlocal loose
        order = count()
        going = writer.outgoing(columns, ("request_body",), times="none", failed=True, reasons=reasons)
        for batch in going:
            rows = zip(*(batch.column(name).to_pylist() for name in columns), strict=True)
            for n, (capture, session, name, body) in zip(order, rows, strict=False):
                # Rows come in time order, which is that of the turns. One without a session is one by itself.
                loose += session is None
                key = n if session is None else (capture, session)
                yield key, n, msgspec.json.encode((session or name or "", body))

    decode = msgspec.json.Decoder(tuple[str, str]).decode
    used: set[str] = set()
    for n, group in enumerate(grouped(turns())):
        for turn, record in enumerate(group):
            name, body = decode(record)
            if turn == 0:
                named = name or f"session-{n}"
                while named in used:  # each must have a name of its own
                    named += f"-{n}"
                used.add(named)
                out.write(b'{"data":[\n' if n == 0 else b"]},\n")
                out.write(f'{{"session_id":{compact(named)},"payloads":['.encode())
            out.write((f",{body}" if turn else body).encode())
    out.write(b"]}\n]}\n" if used else b'{"data":[]}\n')
    writer.note(loose, "rows have no session: each became one of its own")


def _sniff_inputs(head: bytes, name: str) -> bool:
    text = start_of(head)
    return text.startswith(b"{") and b'"data"' in text and b'"payloads"' in text and b'"session_id"' in text


FORMATS: Final = (
    format.TraceFormat(
        name="aiperf",
        title="AIPerf mooncake_trace (JSON Lines)",
        extensions=(".jsonl",),
        holds=format.LENGTHS | {"session and turn", "think time", "prefix blocks", "request body"},
        why={
            "input tokens": "where there is a body, it takes the length from that",
            "prefix blocks": "blocks of 512 tokens, of rows without a body",
            **format.NO_FAILED,
        },
        sniff=_sniff,
        opens=_open,
        writes=_write,
    ),
    format.TraceFormat(
        name="aiperf-inputs",
        title="AIPerf inputs_json (JSON)",
        extensions=(".json",),
        holds=frozenset({"session and turn", "request body"}),
        needs=frozenset({"request body"}),
        why={
            "arrival": "its payloads have an order and no times",
            "outcome and status": "its payloads are requests: those that failed are written, too",
        },
        sniff=_sniff_inputs,
        info={"level": "full"},
        rows=_read_inputs,
        writes=_write_inputs,
    ),
)

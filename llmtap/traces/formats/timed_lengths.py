"""JSON Lines of `timestamp`, `input_length`, `output_length` and, mostly, `hash_ids`.

Several tools share these fields and differ in what they mean: the unit of the time, the tokens in a block. A
`LengthReading` says which. Exact in both directions: times are decimal numbers and never floats, and a file
that goes back into its own format comes out as it was, key by key.

Style: `timestamp` (a spelling of `decimals.py`), `keys` (their order), `json`, and those of `lines.py`.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Annotated, BinaryIO, Final

import msgspec
import pyarrow as pa
import pyarrow.compute as pc

from llmtap.capture.schema import CaptureInfo
from llmtap.traces.block_ids import BLOCK_COLUMNS, BlockIds
from llmtap.traces.format import FormatError, TraceSource, TraceWritten, WriteOptions, batch_of
from llmtap.traces.text.decimals import (
    NUMBER_STYLE,
    checked_spelling,
    decimal_text,
    spelling_of,
    units_of,
)
from llmtap.traces.text.jsonl import Count, Id, JsonLines, first_objects
from llmtap.traces.text.lines import LINE_STYLES, LineWriter, Style
from llmtap.traces.writer import Outgoing

__all__ = [
    "FIELDS",
    "STYLES",
    "LengthReading",
    "block_size",
    "json_texts",
    "looks",
    "number_ns",
    "read_lengths",
    "write_lengths",
]

FIELDS: Final = ("timestamp", "input_length", "output_length", "hash_ids")
_COLUMNS: Final = ("arrival_ns", "input_tokens", "output_tokens", "blocks", "response_end_us")

STYLES: Final = {
    "timestamp": NUMBER_STYLE,
    "keys": "order of the fields: " + ",".join(FIELDS),
    "json": "spaced or compact: whether a blank follows each comma and colon",
    **LINE_STYLES,
}

Number = int | Decimal


class _Row(msgspec.Struct):
    timestamp: Number
    input_length: Count
    output_length: Count
    hash_ids: Annotated[list[Id], msgspec.Meta(max_length=1 << 24)] | None = None


class _RowWithDuration(_Row):
    duration: Number | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LengthReading:
    """What one tool makes of the fields."""

    name: str
    places: int
    """Digits from the unit of `timestamp` down to nanoseconds: 6 of milliseconds, 9 of seconds."""
    spelling: str
    """Of times, where the source has none of its own."""
    sizes: tuple[int, ...]
    """Tokens in a block: the first that the first rows agree with, or else the first."""
    durations: bool = False
    """Has `duration`, of the whole answer, in the same unit."""
    any_size: bool = False
    """Its reader can be told the size: blocks are written as large as they are."""
    blocks_needed: bool = False
    """Its reader makes the prompt of the ids alone: a row without any would be an empty prompt."""


def read_lengths(stream: BinaryIO, reading: LengthReading) -> TraceSource:
    """Raises FormatError."""
    lines: JsonLines[_Row] = JsonLines(stream, _RowWithDuration if reading.durations else _Row)
    blocks = iter(lines)
    first = next(blocks, ([], ()))
    style = lines.style
    style["timestamp"] = spelling_of(str(row.timestamp) for row in first[0])
    if style["timestamp"] == "short" and reading.spelling == "0":
        style["timestamp"] = "0"
    size = _block_size(first[0], reading)
    info = CaptureInfo(
        source=reading.name,
        arrivals="trace",
        blocks="trace",
        block_unit="tokens",
        block_size=size,
        style=style,
    )
    source = TraceSource(info, iter(()))
    source.batches = _batches(lines, first, blocks, reading, source)
    return source


def _batches(
    lines: JsonLines[_Row],
    first: tuple[list[_Row], Sequence[int]],
    rest: Iterator[tuple[list[_Row], Sequence[int]]],
    reading: LengthReading,
    source: TraceSource,
) -> Iterator[pa.RecordBatch]:
    size = source.info.block_size
    rows_all = hashed = broken = 0
    pending: tuple[list[_Row], Sequence[int]] | None = first
    while pending is not None:
        rows, numbers = pending
        if rows:
            ids = [row.hash_ids for row in rows]
            known = [None if i is None else size for i in ids]
            columns = {
                "arrival_ns": _arrivals(rows, numbers, reading.places),
                "input_tokens": [row.input_length for row in rows],
                "output_tokens": [row.output_length for row in rows],
                "blocks": ids,
                "block_size": known,
                "block_unit": [None if i is None else "tokens" for i in ids],
            }
            if reading.durations:
                columns["response_end_us"] = _durations(rows, numbers, reading.places)
            rows_all += len(rows)
            hashed += sum(i is not None for i in ids)
            broken += sum(
                i is not None and len(i) != -(-row.input_length // size)
                for row, i in zip(rows, ids, strict=True)
            )
            yield batch_of(len(rows), columns)
        pending = next(rest, None)
    source.notes += lines.notes()
    if hashed < rows_all:
        source.notes.append(f"{rows_all - hashed:,} rows have no hash_ids")
    if broken:
        source.notes.append(f"{broken:,} rows have another number of hash_ids than blocks of {size} tokens")


def _arrivals(rows: list[_Row], numbers: Sequence[int], places: int) -> list[int]:
    times = [row.timestamp for row in rows]
    unit = 10**places
    # Whole numbers of a sensible size are what nearly all files have.
    if all(type(t) is int for t in times) and min(times) >= 0 and max(times) < 9 * 10**18 // unit:
        return [int(t) * unit for t in times]
    return [number_ns(t, places, n, "timestamp") for t, n in zip(times, numbers, strict=True)]


def _durations(rows: list[_Row], numbers: Sequence[int], places: int) -> list[int | None]:
    found = [getattr(row, "duration", None) for row in rows]
    return [
        None if d is None else number_ns(d, places, n, "duration") // 1_000
        for d, n in zip(found, numbers, strict=True)
    ]


def number_ns(number: Number, places: int, line: int, field: str) -> int:
    """A time as nanoseconds. Raises FormatError for what is negative or beyond 64 bits."""
    try:
        ns = units_of(Decimal(number), places)
    except ValueError as exc:
        raise FormatError(f"line {line}: {field}: {exc}") from None
    if ns < 0:
        raise FormatError(f"line {line}: {field}: is negative")
    return ns


def _block_size(rows: list[_Row], reading: LengthReading) -> int:
    for size in reading.sizes:
        if all(r.hash_ids is None or len(r.hash_ids) == -(-r.input_length // size) for r in rows):
            return size
    return reading.sizes[0]


def write_lengths(
    out: BinaryIO,
    info: CaptureInfo,
    batches: Iterable[pa.RecordBatch],
    options: WriteOptions,
    reading: LengthReading,
) -> TraceWritten:
    """Raises FormatError for a style that is none."""
    written, style = TraceWritten(), Style(reading.name, info, options)
    spelling = checked_spelling(style.get("timestamp", reading.spelling), "timestamp")
    keys, comma, colon = json_texts(style, FIELDS)
    size = block_size(info, reading)
    needs = {
        "arrival_ns": "no arrival time",
        "input_tokens": "no count of input tokens",
        "output_tokens": "no count of output tokens",
    }
    if reading.blocks_needed:
        needs["blocks"] = "no prefix blocks"
        batches = map(_empty_as_none, batches)
    going = Outgoing(
        reading.name, info, written, columns=(*_COLUMNS, *BLOCK_COLUMNS), needs=needs, times="zero"
    )
    ids, lines, cut = BlockIds(info, size), LineWriter(out, style), 0
    for batch in going.batches(batches):
        arrivals = batch.column("arrival_ns").to_pylist()
        texts = [decimal_text(t, reading.places, spelling) for t in arrivals]
        if spelling not in ("short", "float"):
            unit = 10 ** max(0, reading.places - int(spelling))
            cut += sum(t % unit > 0 for t in arrivals)
        fields = {
            "timestamp": texts,
            "input_length": batch.column("input_tokens").to_pylist(),
            "output_length": batch.column("output_tokens").to_pylist(),
            "hash_ids": [None if i is None else str(i) for i in ids.of(batch)],
        }
        if comma == ",":
            fields["hash_ids"] = [None if i is None else i.replace(" ", "") for i in fields["hash_ids"]]
        if reading.durations:
            ends = batch.column("response_end_us").to_pylist()
            fields["duration"] = [
                None if us is None else decimal_text(us * 1_000, reading.places, "float") for us in ends
            ]
        names = [*(key for key in keys if key in fields), *(key for key in fields if key not in keys)]
        rows = zip(*(fields[name] for name in names), strict=True)
        labels = [f'"{name}"{colon}' for name in names]
        whole = "{" + comma.join(f"{label}%s" for label in labels) + "}"
        lines.add(
            whole % row if None not in row else "{" + comma.join(
                f"{label}{value}" for label, value in zip(labels, row, strict=True) if value is not None
            ) + "}"
            for row in rows
        )  # fmt: skip
    lines.close()
    ids.report(written)
    if cut:
        written.notes.append(f"{cut:,} arrivals lost what is finer than the format's digits")
    return written


def block_size(info: CaptureInfo, reading: LengthReading) -> int:
    """Tokens in a block of the file to write."""
    known = info.block_unit == "tokens" and info.block_size
    return (
        info.block_size if known and (reading.any_size or info.source == reading.name) else reading.sizes[0]
    )


def _empty_as_none(batch: pa.RecordBatch) -> pa.RecordBatch:
    blocks = batch.column("blocks")
    bare = pc.and_(pc.equal(pc.list_value_length(blocks), 0), pc.greater(batch.column("input_tokens"), 0))
    blocks = pc.if_else(pc.fill_null(bare, False), pa.scalar(None, blocks.type), blocks)
    return batch.set_column(batch.schema.get_field_index("blocks"), "blocks", blocks)


def json_texts(style: Style, keys: tuple[str, ...]) -> tuple[list[str], str, str]:
    """Order of the keys, comma and colon, as the style has them."""
    spaced = style.choice("json", "spaced", ("spaced", "compact")) == "spaced"
    order = style.get("keys", ",".join(keys)).split(",")
    return order, ", " if spaced else ",", ": " if spaced else ":"


def looks(head: bytes) -> tuple[bool, bool]:
    """Whether the first rows have these fields and no other; whether their times have fractions."""
    objects = first_objects(head)
    if not objects or not all({*FIELDS[:3]} <= o.keys() <= {*FIELDS, "duration"} for o in objects):
        return False, False
    fractions = any("duration" in o or isinstance(o["timestamp"], float) for o in objects)
    return True, fractions

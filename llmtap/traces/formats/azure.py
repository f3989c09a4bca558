"""Azure's LLM inference traces: CSV of a date, the tokens read and the tokens generated.

2023: `2023-11-16 18:15:46.6805900`, seven digits (100 ns) and no zone, lines ended by CR LF. 2024: six digits
and `+00:00`. 2025: another column, `NumImages`, before the counts: columns are found by name. Dates without a
zone are UTC. Any fraction up to nine digits is kept exactly.

Style: `columns` (the header), `digits` (0 to 9, of the fraction), `zone` (`none` or `+00:00`), and those of
`lines.py`; what a 2023 file held comes back byte for byte.

Source: shared/traces/formats.md 1.2; Azure/AzurePublicDataset (CC-BY-4.0).
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import BinaryIO, Final

import pyarrow as pa
import pyarrow.compute as pc

from llmtap.capture.schema import CaptureInfo
from llmtap.traces.format import FormatError, TraceFormat, TraceSource, TraceWritten, WriteOptions, batch_of
from llmtap.traces.text.csv_text import COUNT, CsvColumn, CsvReader, csv_header
from llmtap.traces.text.lines import LINE_STYLES, LineWriter, Style, clipped
from llmtap.traces.writer import Outgoing

__all__ = ["FORMAT", "HEADER", "STYLES", "write_dated"]

HEADER: Final = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
_DATE: Final = r"\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d(?:\.\d{1,9})?(?:Z|[+-]\d\d:\d\d)?"
_COLUMNS: Final = (
    CsvColumn("TIMESTAMP", _DATE, "a date as 2023-11-16 18:15:46.6805900"),
    CsvColumn("ContextTokens", *COUNT),
    CsvColumn("GeneratedTokens", *COUNT),
    CsvColumn("NumImages", r"\d{1,9}", "a whole number of at most 9 digits", required=False),
)
_FIELDS: Final = {"ContextTokens": "input_tokens", "GeneratedTokens": "output_tokens", "NumImages": "images"}
STYLES: Final = {
    "columns": "the header: TIMESTAMP,ContextTokens,GeneratedTokens, in any order, and NumImages",
    "digits": "of a second's fraction, 0 to 9",
    "zone": "behind each date: none, +00:00 or Z",
    **LINE_STYLES,
}
_SECONDS_CHARS: Final = len("2023-11-16 18:15:46")
_ZONES: Final = {"none": "", "+00:00": "+00:00", "Z": "Z"}


def _read(stream: BinaryIO) -> TraceSource:
    reader = CsvReader(stream, _COLUMNS)
    blocks = iter(reader)
    first = next(blocks, None)
    style = reader.style
    shape = _shape(first.columns["TIMESTAMP"][0]) if first else (7, "")
    style["digits"] = str(shape[0])
    style["zone"] = shape[1] if shape[1] in _ZONES.values() and shape[1] else "none"
    source = TraceSource(CaptureInfo(source="azure", arrivals="wall", style=style), iter(()))

    def batches() -> Iterator[pa.RecordBatch]:
        block, odd = first, 0
        usual, has_zone = _SECONDS_CHARS + shape[0] + bool(shape[0]) + len(shape[1]), bool(shape[1])
        while block is not None:
            dates = block.columns["TIMESTAMP"]
            zoned = [date[-6] in "+-" or date[-1] == "Z" for date in dates]
            arrivals = _dates_ns(dates, zoned, block.numbers)
            odd += sum(
                len(date) != usual or zone != has_zone or date[10] != " " or not date.endswith(shape[1])
                for date, zone in zip(dates, zoned, strict=True)
            )
            columns: dict[str, Sequence[int] | pa.Array] = {
                ours: list(map(int, block.columns[theirs]))
                for theirs, ours in _FIELDS.items()
                if theirs in block.columns
            }
            yield batch_of(block.rows, {**columns, "arrival_ns": arrivals, "arrival": _micros(arrivals)})
            block = next(blocks, None)
        source.notes += reader.notes()
        if odd:
            source.notes.append(
                f"{odd:,} dates are spelled otherwise than the first: only their value is kept"
            )

    source.batches = batches()
    return source


def _shape(date: str) -> tuple[int, str]:
    """Digits of the fraction, and the zone."""
    rest = date[_SECONDS_CHARS:]
    digits = len(rest) - len(rest.lstrip(".0123456789"))
    return max(0, digits - 1), rest[digits:]


def _dates_ns(dates: Sequence[str], zoned: list[bool], numbers: Sequence[int]) -> pa.Int64Array:
    """Nanoseconds since 1970 UTC. Raises FormatError."""
    try:
        if all(zoned):
            return pa.array(dates, pa.string()).cast(pa.timestamp("ns", "UTC")).cast(pa.int64())
        if not any(zoned):
            return pa.array(dates, pa.string()).cast(pa.timestamp("ns")).cast(pa.int64())
    except pa.ArrowInvalid:
        pass
    found = []
    for date, zone, number in zip(dates, zoned, numbers, strict=True):
        kind = pa.timestamp("ns", "UTC" if zone else None)
        try:
            found.append(pa.array([date], pa.string()).cast(kind).cast(pa.int64())[0].as_py())
        except pa.ArrowInvalid:
            raise FormatError(f"line {number}: TIMESTAMP: there is no such date: {clipped(date)}") from None
    return pa.array(found, pa.int64())


def _micros(arrivals: pa.Int64Array) -> pa.TimestampArray:
    # Rounded down, as a clock that counts microseconds would have it.
    whole = pc.floor_temporal(arrivals.cast(pa.timestamp("ns", "UTC")), unit="microsecond")
    return whole.cast(pa.timestamp("us", "UTC"))


def _write(
    out: BinaryIO, info: CaptureInfo, batches: Iterable[pa.RecordBatch], options: WriteOptions
) -> TraceWritten:
    return write_dated(out, info, batches, options, "azure", digits="7", line_end="crlf")


def write_dated(
    out: BinaryIO, info: CaptureInfo, batches: Iterable[pa.RecordBatch], options: WriteOptions, name: str,
    **defaults: str,
) -> TraceWritten:  # fmt: skip
    """Writes an Azure CSV for the format `name`, whose own spellings are the defaults."""
    written, style = TraceWritten(), _Defaults(name, info, options, defaults)
    digits = style.choice("digits", "7", tuple("0123456789"))
    zone = _ZONES[style.choice("zone", "none", tuple(_ZONES))]
    header = [c for c in style.get("columns", ",".join(HEADER)).split(",") if c == HEADER[0] or c in _FIELDS]
    if not {*HEADER} <= {*header}:
        raise FormatError(f"style columns={','.join(header)}: needs {','.join(HEADER)}")
    columns = ("arrival_ns", *_FIELDS.values())
    needs = {
        "arrival_ns": "no arrival time",
        "input_tokens": "no count of input tokens",
        "output_tokens": "no count of output tokens",
    }
    going = Outgoing(name, info, written, columns=columns, needs=needs, times="date")
    lines, cut = LineWriter(out, style), 0
    lines.add([",".join(header)])
    for batch in going.batches(batches):
        arrivals = batch.column("arrival_ns")
        cut += _cut_off(arrivals, int(digits))
        fields = {HEADER[0]: _dates(arrivals, int(digits), zone)}
        for theirs, ours in _FIELDS.items():
            fields[theirs] = ["" if n is None else str(n) for n in batch.column(ours).to_pylist()]
        lines.add(map(",".join, zip(*(fields[name] for name in header), strict=True)))
    lines.close()
    if cut:
        written.notes.append(f"{cut:,} arrivals lost what is finer than {digits} digits of a second")
    return written


class _Defaults(Style):
    """A style whose defaults are another format's."""

    __slots__ = ("_defaults",)

    def __init__(
        self, name: str, info: CaptureInfo, options: WriteOptions, defaults: Mapping[str, str]
    ) -> None:
        super().__init__(name, info, options)
        self._defaults = defaults

    def get(self, key: str, default: str) -> str:
        return super().get(key, self._defaults.get(key, default))


def _dates(arrivals: pa.Int64Array, digits: int, zone: str) -> list[str]:
    texts = arrivals.cast(pa.timestamp("ns")).cast(pa.string())
    cut: list[str] = pc.utf8_slice_codeunits(
        texts, 0, _SECONDS_CHARS + (digits + 1 if digits else 0)
    ).to_pylist()
    return [text + zone for text in cut] if zone else cut


def _cut_off(arrivals: pa.Int64Array, digits: int) -> int:
    unit = 10 ** (9 - digits)
    whole = pc.multiply(pc.divide(arrivals, unit), unit)
    count: int = pc.not_equal(whole, arrivals).true_count
    return count


def _sniff(head: bytes, name: str) -> bool:
    return {*HEADER} <= {*csv_header(head)}


FORMAT: Final = TraceFormat(
    name="azure",
    title="Azure LLM inference trace (CSV)",
    extensions=(".csv",),
    holds=frozenset({"arrival", "input tokens", "output tokens"}),
    needs=frozenset({"arrival", "input tokens", "output tokens"}),
    why={
        "arrival": "to 100 ns",
        "model": "it has three columns: when, tokens read, tokens generated",
        "outcome and status": "a failed request has no place: it is left out, and counted",
    },
    styles=STYLES,
    sniff=_sniff,
    read=_read,
    write=_write,
)

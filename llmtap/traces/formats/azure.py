"""The trace formats `azure` (Azure's LLM inference traces) and `inference-perf` (its trace replay).

Both are CSV files of arrival, input tokens and output tokens, read and written. They differ in the form of
dates and in line ends. Dates in Azure's trace of 2023 are `2023-11-16 18:15:46.6805900`; in the trace of 2024
they have six decimal places and `+00:00`. Dates without a zone are UTC. inference-perf reads the columns by
position, reads six decimal places of a second, and uses the time of the first row as time zero.

Source: Azure/AzurePublicDataset (CC-BY-4.0); inference-perf 0.7.0.
"""

from collections.abc import Iterator
from functools import partial
from typing import BinaryIO, Final

import pyarrow as pa
import pyarrow.compute as pc

from llmtap.traces.format import LENGTHS, NO_FAILED, TraceFormat, TraceWriter, batch_of
from llmtap.traces.text import COUNT, CsvColumn, CsvKind, csv_header, read_csv, write_csv


def _dates_ns(dates: pa.StringArray) -> pa.Int64Array:
    zoned = pc.match_substring_regex(dates, r"(Z|[+-]\d\d(:?\d\d)?)$")
    utc = pc.binary_join_element_wise(dates, "Z", "")
    return pc.if_else(zoned, dates, utc).cast(pa.timestamp("ns", "UTC")).cast(pa.int64())


_DATE: Final = CsvKind(
    r"\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d(\.\d{1,9})?(Z|[+-]\d\d(:?\d\d)?)?",
    "a date such as 2023-11-16 18:15:46.6805900",
    _dates_ns,
    str,
)
_COLUMNS: Final = (
    CsvColumn("TIMESTAMP", _DATE, "arrival_ns"),
    CsvColumn("ContextTokens", COUNT, "input_tokens"),
    CsvColumn("GeneratedTokens", COUNT, "output_tokens"),
)
_SECONDS_CHARS: Final = len("2023-11-16 18:15:46")


def _batches(stream: BinaryIO, notes: list[str]) -> Iterator[pa.RecordBatch]:
    for rows, columns in read_csv(stream, _COLUMNS, notes):
        # Round down to microseconds, the resolution of the column in a capture.
        moment = pc.floor_temporal(columns["arrival_ns"].cast(pa.timestamp("ns", "UTC")), unit="microsecond")
        yield batch_of(rows, columns | {"arrival": moment.cast(pa.timestamp("us", "UTC"))})


def _write(digits: int, line_end: str, writer: TraceWriter) -> None:
    """Write a file. `digits`: decimal places of the seconds."""
    cut = 0

    def fields() -> Iterator[dict[str, list[object]]]:
        nonlocal cut
        for batch in writer.rows_to_write([c.column for c in _COLUMNS], times="date"):
            ns = batch.column("arrival_ns")
            unit = 10 ** (9 - digits)
            cut += pc.not_equal(pc.multiply(pc.divide(ns, unit), unit), ns).true_count
            dates = ns.cast(pa.timestamp("ns")).cast(pa.string())
            values = {c.column: batch.column(c.column).to_pylist() for c in _COLUMNS}
            yield values | {
                "arrival_ns": pc.utf8_slice_codeunits(dates, 0, _SECONDS_CHARS + 1 + digits).to_pylist()
            }

    write_csv(writer.out, _COLUMNS, fields(), line_end)
    writer.note(cut, f"arrivals lost what is finer than {digits} digits of a second")


_WHY: Final = {"model": "it has three columns: when, tokens read, tokens generated", **NO_FAILED}

FORMATS: Final = (
    TraceFormat(
        name="azure",
        title="Azure LLM inference trace (CSV)",
        extensions=(".csv",),
        aspects=LENGTHS,
        required_aspects=LENGTHS,
        remarks={"arrival": "to 100 ns", **_WHY},
        sniff=lambda head, name: {c.name for c in _COLUMNS} <= csv_header(head),
        info={"arrivals": "wall"},
        batches=_batches,
        write_rows=partial(_write, 7, "\r\n"),
    ),
    # This format has no `sniff`, because its files look like Azure's. The user must select it with --from.
    TraceFormat(
        name="inference-perf",
        title="inference-perf trace replay (Azure CSV)",
        extensions=(".csv",),
        aspects=LENGTHS,
        required_aspects=LENGTHS,
        remarks={"arrival": "to the microsecond; it takes the first row as its zero", **_WHY},
        info={"arrivals": "wall"},
        batches=_batches,
        write_rows=partial(_write, 6, "\n"),
    ),
)

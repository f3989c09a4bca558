"""Lengths for vidur and etalon: CSV of prefill and decode tokens, with or without arrivals in seconds.

`[arrived_at,]num_prefill_tokens,num_decode_tokens[,num_total_tokens,pd_ratio]`. The last two follow from the
others and are not written. Nor is `arrived_at` where the first rows have no arrival.

Source: shared/traces/formats.md 1.13; project-etalon/etalon, data/processed_traces (Apache-2.0).
"""

from collections.abc import Iterable, Iterator
from functools import partial
from typing import BinaryIO, Final

import pyarrow as pa
import pyarrow.compute as pc

from llmtap.capture.schema import CaptureInfo
from llmtap.traces.format import (
    LENGTHS,
    NO_FAILED,
    TraceFormat,
    TraceSource,
    TraceWritten,
    WriteOptions,
    batch_of,
    trace_source,
)
from llmtap.traces.text import COUNT, SECONDS, CsvColumn, CsvKind, csv_header, read_csv, write_csv
from llmtap.traces.writer import Outgoing, peeked

__all__ = ["FORMAT"]

_RATIO: Final = CsvKind(
    r"\d{1,18}(\.\d{1,30})?(e[+-]?\d{1,3})?|inf|nan", "a number", lambda texts: texts, str
)
_COLUMNS: Final = (
    CsvColumn("arrived_at", SECONDS, "arrival_ns", required=False),
    CsvColumn("num_prefill_tokens", COUNT, "input_tokens"),
    CsvColumn("num_decode_tokens", COUNT, "output_tokens"),
    CsvColumn("num_total_tokens", COUNT, "total", required=False),
    CsvColumn("pd_ratio", _RATIO, "ratio", required=False, empty=True),
)


def _read(stream: BinaryIO) -> TraceSource:
    return trace_source(partial(_batches, stream), "vidur")


def _batches(stream: BinaryIO, notes: list[str]) -> Iterator[pa.RecordBatch]:
    wrong = 0
    for rows, columns in read_csv(stream, _COLUMNS, notes):
        if "total" in columns:
            total = pc.add(columns["input_tokens"], columns["output_tokens"])
            wrong += pc.not_equal(columns["total"], total).true_count
        yield batch_of(rows, columns)
    if wrong:
        notes.append(f"{wrong:,} rows have another total than the sum, which is not kept")


def _write(
    out: BinaryIO, info: CaptureInfo, batches: Iterable[pa.RecordBatch], options: WriteOptions
) -> TraceWritten:
    written = TraceWritten()
    first, batches = peeked(batches)
    timed = first is None or first["arrival_ns"].null_count < first.num_rows
    columns = _COLUMNS[0 if timed else 1 : 3]
    names = [c.column for c in columns]
    going = Outgoing("vidur", info, written, columns=names, needs=names, times="zero" if timed else "none")
    rows = ({name: batch.column(name).to_pylist() for name in names} for batch in going.batches(batches))
    write_csv(out, columns, rows)
    if not timed:
        written.told.pop("arrival", None)
    return written


FORMAT: Final = TraceFormat(
    name="vidur",
    title="vidur and etalon lengths (CSV)",
    extensions=(".csv",),
    holds=LENGTHS,
    needs=frozenset({"input tokens", "output tokens"}),
    why={"arrival": "left out where the first rows have none", **NO_FAILED},
    sniff=lambda head, name: {"num_prefill_tokens", "num_decode_tokens"} <= csv_header(head),
    read=_read,
    write=_write,
)

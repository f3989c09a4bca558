"""Lengths for vidur and etalon: CSV of prefill and decode tokens, with or without arrivals in seconds.

`[arrived_at,]num_prefill_tokens,num_decode_tokens[,num_total_tokens,pd_ratio]`. The last two follow from the
others and are not written. Nor is `arrived_at` where the first rows have no arrival.

Source: project-etalon/etalon, data/processed_traces (Apache-2.0).
"""

from collections.abc import Iterator
from typing import BinaryIO, Final

import pyarrow as pa
import pyarrow.compute as pc

from llmtap.traces.format import LENGTHS, NO_FAILED, TraceFormat, TraceWriter, batch_of, peeked
from llmtap.traces.text import COUNT, SECONDS, CsvColumn, CsvKind, csv_header, read_csv, write_csv

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


def _batches(stream: BinaryIO, notes: list[str]) -> Iterator[pa.RecordBatch]:
    wrong = 0
    for rows, columns in read_csv(stream, _COLUMNS, notes):
        if "total" in columns:
            total = pc.add(columns["input_tokens"], columns["output_tokens"])
            wrong += pc.not_equal(columns["total"], total).true_count
        yield batch_of(rows, columns)
    if wrong:
        notes.append(f"{wrong:,} rows have another total than the sum, which is not kept")


def _write(writer: TraceWriter) -> None:
    first, writer.batches = peeked(writer.batches)
    timed = first is None or first["arrival_ns"].null_count < first.num_rows
    columns = _COLUMNS[0 if timed else 1 : 3]
    names = [c.column for c in columns]
    batches = writer.outgoing(names, names, times="zero" if timed else "none")
    write_csv(
        writer.out, columns, ({name: batch.column(name).to_pylist() for name in names} for batch in batches)
    )
    if not timed:
        writer.told.pop("arrival", None)


FORMAT: Final = TraceFormat(
    name="vidur",
    title="vidur and etalon lengths (CSV)",
    extensions=(".csv",),
    holds=LENGTHS,
    needs=frozenset({"input tokens", "output tokens"}),
    why={"arrival": "left out where the first rows have none", **NO_FAILED},
    sniff=lambda head, name: {"num_prefill_tokens", "num_decode_tokens"} <= csv_header(head),
    batches=_batches,
    writes=_write,
)

"""The trace format `burstgpt`: CSV of seconds, model, token counts and the kind of log. Read and written.

Files 1 and 2 of the data set have six columns, file 3 has eight; all eight are written. The fields become
these columns of a capture:

- `Timestamp`: `arrival_ns`, from the trace's own zero. `Elapsed time`: `response_end_us`.
- `Session ID`: `session`; empty on `API log` rows. `Log Type`: `route`.
- `Response tokens` is 0 or empty for a failed request, whose `outcome` is upstream_error. `Total tokens` is
  the sum of request and response tokens.

Source: HPMLL/BurstGPT (CC-BY-4.0).
"""

from collections.abc import Iterator
from operator import add
from typing import Any, BinaryIO, Final

import pyarrow as pa
import pyarrow.compute as pc

from llmtap.traces.format import FAILED, LENGTHS, TraceFormat, TraceWriter, batch_of, replace_column
from llmtap.traces.text import COUNT, SECONDS, SECONDS_US, TEXT, CsvColumn, csv_header, read_csv, write_csv

_COLUMNS: Final = (
    CsvColumn("Timestamp", SECONDS, "arrival_ns"),
    CsvColumn("Session ID", TEXT, "session", required=False),
    CsvColumn("Elapsed time", SECONDS_US, "response_end_us", required=False, allows_empty=True),
    CsvColumn("Model", TEXT, "model", required=False),
    CsvColumn("Request tokens", COUNT, "input_tokens"),
    CsvColumn("Response tokens", COUNT, "output_tokens", allows_empty=True),
    CsvColumn("Total tokens", COUNT, "total", required=False, allows_empty=True),
    CsvColumn("Log Type", TEXT, "route", required=False),
)
_CAPTURE_COLUMNS: Final = tuple(c.column for c in _COLUMNS if c.column != "total")


def _batches(stream: BinaryIO, notes: list[str]) -> Iterator[pa.RecordBatch]:
    failed = others = 0
    for rows, columns in read_csv(stream, _COLUMNS, notes):
        output_tokens = columns["output_tokens"] = columns["output_tokens"].fill_null(0)
        is_complete = pc.greater(output_tokens, 0)
        columns["outcome"] = pc.if_else(is_complete, "complete", "upstream_error")
        failed += rows - is_complete.true_count
        if "session" in columns:
            explicit = pa.scalar("explicit"), pa.scalar(None, pa.string())
            columns["session_source"] = pc.if_else(pc.is_valid(columns["session"]), *explicit)
        if "total" in columns:
            others += (
                rows - pc.equal(columns["total"], pc.add(columns["input_tokens"], output_tokens)).true_count
            )
        yield batch_of(rows, columns)
    if failed:
        notes.append(f"{failed:,} rows have no response tokens: failed requests")
    if others:
        notes.append(f"{others:,} rows have another total than the sum: it is not kept")


def _write(writer: TraceWriter) -> None:
    writer.batches = map(_with_zero_for_failed, writer.batches)

    def fields() -> Iterator[dict[str, list[Any]]]:
        for batch in writer.rows_to_write(_CAPTURE_COLUMNS, failed=True):
            column = {name: batch.column(name).to_pylist() for name in _CAPTURE_COLUMNS}
            column["total"] = list(map(add, column["input_tokens"], column["output_tokens"]))
            if not writer.is_own_format:
                column["route"] = ["API log" if s is None else "Conversation log" for s in column["session"]]
            yield column

    write_csv(writer.out, _COLUMNS, fields())


def _with_zero_for_failed(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Return the batch with 0 in place of the unknown token counts of failed requests."""
    failed = pc.is_in(batch.column("outcome"), pa.array(FAILED))
    for name in ("input_tokens", "output_tokens"):
        column = batch.column(name)
        batch = replace_column(batch, name, pc.if_else(pc.and_(failed, pc.is_null(column)), 0, column))
    return batch


FORMAT: Final = TraceFormat(
    name="burstgpt",
    title="BurstGPT trace (CSV)",
    extensions=(".csv",),
    aspects=LENGTHS | {"model", "session and turn", "end of the answer", "outcome and status"},
    required_aspects=LENGTHS,
    remarks={
        "outcome and status": "only whether it failed: such a row has no response tokens",
        "session and turn": "the session; its turns are in the order of their times",
        "tenant": "its Log Type says only whether a request is part of a conversation",
    },
    sniff=lambda head, name: {c.name for c in _COLUMNS if c.required} <= csv_header(head),
    batches=_batches,
    write_rows=_write,
)

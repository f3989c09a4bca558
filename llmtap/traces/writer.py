"""Rows on their way into a trace: in time order, counted from a zero, without those it has no place for.

- A trace that goes back into its own format keeps the order and the zero that it came with. All else is
  sorted by arrival, and the smallest arrival, then the first, becomes the zero; the notes say which it was.
- A row that lacks what the format needs is dropped and counted, and so is a failed request: it has no output
  whose length would mean anything.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import Final

import pyarrow as pa
import pyarrow.compute as pc

from llmtap.capture.schema import CaptureInfo
from llmtap.traces.format import TraceWritten
from llmtap.traces.text.order import sorted_by_arrival

__all__ = ["FAILED", "Outgoing", "from_first", "int_lists"]

FAILED: Final = ("upstream_error", "upstream_reset", "upstream_timeout", "truncated", "rejected")
"""Outcomes of requests that got no whole answer, by no will of the client's."""


class Outgoing:
    """Prepares the rows for one file; counts in `written`."""

    __slots__ = ("_columns", "_failed", "_info", "_name", "_needs", "_times", "_written", "zero_ns")

    def __init__(
        self, name: str, info: CaptureInfo, written: TraceWritten, *, columns: Sequence[str],
        needs: Mapping[str, str], times: str, failed: bool = False,
    ) -> None:  # fmt: skip
        """`needs`: by column, the reason to give for rows without it. `times`: `zero`, `date` or `none`.
        `failed`: the format has a place for failed requests."""
        self._name = name
        self._info = info
        self._written = written
        self._columns = list(dict.fromkeys([*columns, "arrival_ns", "outcome"]))
        self._needs = needs
        self._times = times
        self._failed = failed
        self.zero_ns: int | None = None
        """What was subtracted of each arrival; None before the first row."""

    def batches(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """The rows to write; the notes are complete when they are through."""
        info = self._info
        own = info.source == self._name
        kept = (self._kept(batch.select(self._columns)) for batch in batches)
        for batch in kept if own else sorted_by_arrival(kept):
            if not batch.num_rows:
                continue
            if self._times == "zero":
                batch = self._from_zero(batch, keep=own and info.arrivals == "trace")
            self._written.rows += batch.num_rows
            self._written.count(batch)
            yield batch
        if self._times == "date" and info.arrivals == "trace" and self._written.rows:
            self._written.notes.append("arrivals have no date: written as if the trace began with 1970")

    def _kept(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        if not self._failed and batch.column("outcome").null_count < batch.num_rows:
            good = pc.invert(pc.is_in(batch.column("outcome"), pa.array(FAILED)))
            batch = self._without(batch, good, "failed request")
        for column, reason in self._needs.items():
            batch = self._without(batch, pc.is_valid(batch.column(column)), reason)
        return batch

    def _without(self, batch: pa.RecordBatch, good: pa.BooleanArray, reason: str) -> pa.RecordBatch:
        n = len(good) - good.true_count
        if not n:
            return batch
        self._written.drop(reason, n)
        return batch.filter(good)

    def _from_zero(self, batch: pa.RecordBatch, *, keep: bool) -> pa.RecordBatch:
        arrivals = batch.column("arrival_ns")
        if self.zero_ns is None and len(arrivals) > arrivals.null_count:
            self.zero_ns = 0 if keep else pc.min(arrivals).as_py()
            if self.zero_ns:
                self._written.notes.append(from_first(self._info, self.zero_ns))
        if not self.zero_ns:
            return batch
        at = batch.schema.get_field_index("arrival_ns")
        return batch.set_column(at, "arrival_ns", pc.subtract(arrivals, self.zero_ns))


def from_first(info: CaptureInfo, zero_ns: int) -> str:
    """A note on the zero."""
    if info.arrivals == "wall":
        at = datetime.fromtimestamp(zero_ns // 1_000_000_000, UTC).isoformat().removesuffix("+00:00")
        told = f"{at}.{zero_ns % 1_000_000_000:09}Z"
    else:
        told = f"{zero_ns / 1e9:.9g} s of the source's own time"
    return f"arrivals count from the smallest one, {told}"


def int_lists(column: pa.ListArray) -> list[list[int] | None]:
    """The lists of a column; faster than its own way."""
    flat = column.flatten().to_pylist()
    lists: list[list[int] | None] = []
    at = 0
    for n in pc.list_value_length(column).to_pylist():
        if n is None:
            lists.append(None)
        else:
            lists.append(flat[at : at + n])
            at += n
    return lists

"""Preparation of rows for a trace file: selection, order and zero of the rows, and ids of prefix blocks."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from datetime import UTC, datetime
from itertools import chain
from typing import Final

import pyarrow as pa
import pyarrow.compute as pc

from llmtap.capture.schema import CaptureInfo
from llmtap.traces.format import TraceWritten, WriteOptions
from llmtap.traces.sorting import sorted_by

__all__ = ["BLOCK_COLUMNS", "FAILED", "BlockIds", "Outgoing", "int_lists", "peeked", "replaced", "with_model"]

FAILED: Final = (
    "client_error", "upstream_error", "upstream_reset", "upstream_timeout", "truncated", "rejected",
)  # fmt: skip
"""Outcomes of requests that got no complete answer, by no decision of the client."""
_REASONS: Final = {
    "arrival_ns": "no arrival time",
    "input_tokens": "no count of input tokens",
    "output_tokens": "no count of output tokens",
    "blocks": "no prefix blocks",
    "request_body": "no request body",
}
"""Why a row is dropped that has a null in the column."""


class Outgoing:
    """Rows of one file, in time order and counted from a zero, without those that the format cannot hold.

    - A trace that is written in the format that it came from keeps its order and its zero. Others are sorted
      by arrival, and the smallest arrival becomes the zero; a note says which it was.
    - A row that lacks what the format needs is dropped and counted, and so is a failed request: the length of
      its output means nothing.
    """

    def __init__(
        self, name: str, info: CaptureInfo, written: TraceWritten, *, columns: Sequence[str],
        needs: Sequence[str] = ("arrival_ns", "input_tokens", "output_tokens"), times: str = "zero",
        failed: bool = False,
    ) -> None:  # fmt: skip
        """`needs`: columns without which a row is dropped. `times`: `zero`, `date` or `none`.
        `failed`: the format can hold failed requests."""
        self.own = info.source == name
        """The trace came from this format."""
        self._info = info
        self._written = written
        self._columns = list(dict.fromkeys([*columns, "arrival_ns", "outcome"]))
        self._needs = needs
        self._times = times
        self._failed = failed
        self._zero_ns: int | None = None
        """Subtracted from each arrival; None before the first row."""

    def batches(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Yield the rows to write; the notes are complete after the last."""
        kept = (self._kept(batch.select(self._columns)) for batch in batches)
        for batch in kept if self.own else sorted_by("arrival_ns", kept):
            if not batch.num_rows:
                continue
            if self._times == "zero":
                batch = self._from_zero(batch)
            self._written.rows += batch.num_rows
            self._written.count(batch)
            yield batch
        if self._times == "date" and self._info.arrivals == "trace" and self._written.rows:
            self._written.notes.append("arrivals have no date: written as if the trace began with 1970")

    def _kept(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        if not self._failed and batch.column("outcome").null_count < batch.num_rows:
            good = pc.invert(pc.is_in(batch.column("outcome"), pa.array(FAILED)))
            batch = self._without(batch, good, "failed request")
        for column in self._needs:
            batch = self._without(batch, pc.is_valid(batch.column(column)), _REASONS[column])
        return batch

    def _without(self, batch: pa.RecordBatch, good: pa.BooleanArray, reason: str) -> pa.RecordBatch:
        n = len(good) - good.true_count
        if not n:
            return batch
        self._written.drop(reason, n)
        return batch.filter(good)

    def _from_zero(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        arrivals = batch.column("arrival_ns")
        if self._zero_ns is None and len(arrivals) > arrivals.null_count:
            keep = self.own and self._info.arrivals == "trace"
            self._zero_ns = 0 if keep else pc.min(arrivals).as_py()
            if self._zero_ns:
                self._written.notes.append(_zero_note(self._info, self._zero_ns))
        if not self._zero_ns:
            return batch
        return replaced(batch, "arrival_ns", pc.subtract(arrivals, self._zero_ns))


def _zero_note(info: CaptureInfo, zero_ns: int) -> str:
    if info.arrivals == "wall":
        at = datetime.fromtimestamp(zero_ns // 1_000_000_000, UTC).isoformat().removesuffix("+00:00")
        told = f"{at}.{zero_ns % 1_000_000_000:09}Z"
    else:
        told = f"{zero_ns / 1e9:.9g} s of the source's own time"
    return f"arrivals count from the smallest one, {told}"


def peeked(batches: Iterable[pa.RecordBatch]) -> tuple[pa.RecordBatch | None, Iterable[pa.RecordBatch]]:
    """Return the first batch, and all batches."""
    rest = iter(batches)
    first = next(rest, None)
    return first, rest if first is None else chain([first], rest)


def replaced(batch: pa.RecordBatch, name: str, values: pa.Array) -> pa.RecordBatch:
    """Return the batch with another column of that name."""
    at = batch.schema.get_field_index(name)
    return batch.set_column(at, batch.schema.field(at), values.cast(batch.schema.field(at).type))


def with_model(
    batches: Iterable[pa.RecordBatch], options: WriteOptions, written: TraceWritten
) -> Iterator[pa.RecordBatch]:
    """Yield the batches with the model of the options."""
    if options.model is not None and options.override_model:
        written.changed["model"] = "--model in every row"
    for batch in batches:
        if options.model is not None:
            models = batch.column("model")
            if options.override_model:
                models = pa.nulls(len(models), pa.string())
            batch = replaced(batch, "model", models.fill_null(options.model))
        yield batch


# ---------------------------------------------------------------- prefix blocks

BLOCK_COLUMNS: Final = ("blocks", "block_size", "block_unit", "input_tokens")
"""Columns that `BlockIds` reads."""


class BlockIds:
    """Ids of the prefix blocks of one file. Prompts begin alike as far as their leading ids agree.
    - Salted hashes become small numbers in the order of their first use, as in public traces. The map of all
      ids is in memory while a file is written: some 100 bytes for each block of 512 tokens.
    - Blocks of a size that divides the wanted one are joined: every n-th id, and the last.
    - Other sizes are written unchanged, and the report counts the rows that break the rule that readers
    check: a
      prompt of n tokens has ceil(n / size) ids.

    Source: shared/traces/formats.md 0 and 2 (rules 3 and 4).
    """

    def __init__(self, info: CaptureInfo, size: int) -> None:
        """`size`: tokens in a block, as the readers of the file expect them."""
        self._info = info
        self._size = size
        self._numbers: defaultdict[int, int] = defaultdict()
        self._numbers.default_factory = self._numbers.__len__
        self.missing = 0
        """Rows without known blocks."""
        self.broken = 0
        """Rows with another number of ids than readers expect."""
        self.coarser = 0
        self.other = 0
        """Rows whose blocks are of another size, or of bytes."""
        self._foreign: dict[tuple[int | None, str | None], None] = {}
        """These sizes, with their units."""

    def of(self, batch: pa.RecordBatch) -> list[list[int] | None]:
        """Return the ids of each row; None where the blocks are not known."""
        lists = int_lists(batch.column("blocks"))
        self._resize(batch, lists)
        if self._info.blocks == "salted":
            numbers = self._numbers
            lists = [None if ids is None else [numbers[i] for i in ids] for ids in lists]
        size = self._size
        for ids, tokens in zip(lists, batch.column("input_tokens").to_pylist(), strict=True):
            if ids is None:
                self.missing += 1
            elif tokens is not None and len(ids) != -(-tokens // size):
                self.broken += 1
        return lists

    def _resize(self, batch: pa.RecordBatch, lists: list[list[int] | None]) -> None:
        sizes, units = batch.column("block_size"), batch.column("block_unit")
        fits = pc.and_(pc.equal(sizes, self._size), pc.equal(units, "tokens"))
        if fits.null_count == 0 and fits.true_count == len(fits):
            return
        known = zip(lists, sizes.to_pylist(), units.to_pylist(), strict=True)
        for row, (ids, size, unit) in enumerate(known):
            if ids is None or (size == self._size and unit == "tokens"):
                continue
            if unit == "tokens" and size and self._size % size == 0:
                every = self._size // size
                lists[row] = ids[every - 1 :: every] + (ids[-1:] if len(ids) % every else [])
                self.coarser += 1
            else:
                self.other += 1
                self._foreign[size, unit] = None

    def report(self, written: TraceWritten) -> None:
        """Add the counts to the report."""
        size, ways = self._size, []
        broken = f"rows have another number of ids than ceil(input_length / {size})"
        if self.coarser:
            ways.append(f"{self.coarser:,} rows had smaller blocks: of their ids every n-th, and the last")
        if self.other:
            sizes = " or ".join(f"{n or 0:,} {unit}" for n, unit in self._foreign)
            ways.append(f"blocks of {sizes} go out as ids of {size} tokens: {self.broken:,} {broken}")
        if any(unit == "bytes" for _, unit in self._foreign):
            ways.append("with meter.tokenizer set, a capture's blocks are of tokens")
        if ways:
            written.changed["prefix blocks"] = "; ".join(ways)
        written.note(self.missing, "rows have no prefix blocks, and are written without them")
        if not self.other:
            written.note(self.broken, broken)


def int_lists(column: pa.ListArray) -> list[list[int] | None]:
    """Return the lists of a column; faster than `to_pylist`."""
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

"""Prefix blocks as other tools write them: ids of blocks of a given size.

Two prompts begin alike as far as their leading ids agree, since an id names its block and all before it. So:

- salted hashes become small numbers in the order of their first use, as in public traces, and tell nothing.
  The map of all ids is kept in memory while a file is written: some 100 bytes for each block of 512 tokens;
- blocks of a size that divides the wanted one are made larger: every n-th id, and the last;
- other sizes are written as they are, and the report says how many rows break the rule that readers check:
  a prompt of n tokens has ceil(n / size) ids.

Source: shared/traces/formats.md 0 and 2 (rules 3 and 4).
"""

from collections import defaultdict
from typing import Final

import pyarrow as pa
import pyarrow.compute as pc

from llmtap.capture.schema import CaptureInfo
from llmtap.traces.format import TraceWritten
from llmtap.traces.writer import int_lists

__all__ = ["BLOCK_COLUMNS", "BlockIds"]

BLOCK_COLUMNS: Final = ("blocks", "block_size", "block_unit", "input_tokens")
"""What it looks at."""


class BlockIds:
    """Makes the ids of one file, and counts what is odd about them."""

    __slots__ = ("_foreign", "_info", "_numbers", "_size", "broken", "coarser", "empty", "missing", "other")

    def __init__(self, info: CaptureInfo, size: int) -> None:
        """`size`: tokens in a block, as the readers of the file expect them."""
        self._info = info
        self._size = size
        self._numbers: defaultdict[int, int] = defaultdict()
        self._numbers.default_factory = self._numbers.__len__
        self.missing = 0
        """Rows of which no blocks are known."""
        self.empty = 0
        """Rows with a prompt and no block."""
        self.broken = 0
        """Rows that have another number of ids than the readers expect."""
        self.coarser = 0
        self.other = 0
        """Rows whose blocks are of another size, or of bytes."""
        self._foreign: dict[tuple[int | None, str | None], None] = {}
        """These sizes, with their units."""

    def of(self, batch: pa.RecordBatch) -> list[list[int] | None]:
        """The ids of each row; None where the blocks are not known."""
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
                self.empty += not ids
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
        """Tells what was odd, and what became of blocks of another size."""
        size, ways = self._size, []
        broken = f"{self.broken:,} rows have another number of ids than ceil(input_length / {size})"
        if self.coarser:
            ways.append(f"{self.coarser:,} rows had smaller blocks: of their ids every n-th, and the last")
        if self.other:
            sizes = " or ".join(f"{n or 0:,} {unit}" for n, unit in self._foreign)
            ways.append(f"blocks of {sizes} go out as ids of {size} tokens: {broken}")
        if any(unit == "bytes" for _, unit in self._foreign):
            ways.append("with meter.tokenizer set, a capture's blocks are of tokens")
        if ways:
            written.changed["prefix blocks"] = "; ".join(ways)
        if self.missing:
            written.notes.append(f"{self.missing:,} rows have no prefix blocks, and are written without them")
        if self.broken and not self.other:
            written.notes.append(broken)

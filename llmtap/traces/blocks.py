"""Ids of prefix blocks (equal ids: equal beginnings of prompts) in trace files, read and written.

Used by `aiperf.py`, `bailian.py` and `mooncake.py` (which also serves guidellm and vLLM): `block_columns`
returns the columns of a capture for ids that were read; `BlockIds` returns the ids to write for the rows of a
batch, and reports what did not fit.
"""

from collections import defaultdict
from collections.abc import Sequence
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc

from llmtap.traces.format import TraceWriter

BLOCK_COLUMNS: Final = ("blocks", "block_size", "block_unit", "input_tokens")


def block_columns(ids: Sequence[Sequence[int] | None], size: int) -> dict[str, list[Any]]:
    """Return the columns of rows with these ids of blocks of `size` tokens."""
    return {
        "blocks": list(ids),
        "block_size": [None if i is None else size for i in ids],
        "block_unit": [None if i is None else "tokens" for i in ids],
    }


class BlockIds:
    """Ids of the prefix blocks of one file, as its readers expect them.

    Salted hashes become small numbers by first use; the map of all ids is in memory. Blocks of a size that
    divides the wanted one are joined: every n-th id, and the last. Other sizes are written unchanged; rows
    with another number of ids than ceil(tokens / size) are counted.
    """

    def __init__(self, writer: TraceWriter, size: int) -> None:
        """`size`: tokens in a block, as the readers of the file expect them."""
        self._writer = writer
        self._size = size
        self._numbers: defaultdict[int, int] = defaultdict()
        self._numbers.default_factory = self._numbers.__len__
        self.missing = 0
        self.broken = 0
        self.coarser = 0
        self.other = 0
        """Rows whose blocks are of another size, or of bytes."""
        self._foreign: dict[tuple[int | None, str | None], None] = {}

    def of(self, batch: pa.RecordBatch) -> list[list[int] | None]:
        """Return the ids of each row; None where the blocks are not known."""
        lists = int_lists(batch.column("blocks"))
        self._resize(batch, lists)
        if self._writer.info.blocks == "salted":
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

    def report(self) -> None:
        size, ways, writer = self._size, [], self._writer
        broken = f"rows have another number of ids than ceil(input_length / {size})"
        if self.coarser:
            ways.append(f"{self.coarser:,} rows had smaller blocks: of their ids every n-th, and the last")
        if self.other:
            sizes = " or ".join(f"{n or 0:,} {unit}" for n, unit in self._foreign)
            ways.append(f"blocks of {sizes} go out as ids of {size} tokens: {self.broken:,} {broken}")
        if any(unit == "bytes" for _, unit in self._foreign):
            ways.append("with meter.tokenizer set, a capture's blocks are of tokens")
        if ways:
            writer.changed["prefix blocks"] = "; ".join(ways)
        writer.note(self.missing, "rows have no prefix blocks, and are written without them")
        if not self.other:
            writer.note(self.broken, broken)


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

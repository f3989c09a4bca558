"""Requests as columns: a request is a number, the row where its arrival and its lengths stand.

A million requests are four arrays of 8 MB.
"""

from array import array
from collections.abc import Iterable
from dataclasses import dataclass, field

__all__ = ["Requests"]


def _column() -> "array[int]":
    return array("q")


@dataclass(slots=True)
class Requests:
    """Columns of one length, but for `predicted`, which is empty until somebody predicts, and `blocks`,
    which is empty where nobody knows what prompts share."""

    arrival_ns: "array[int]" = field(default_factory=_column)
    input: "array[int]" = field(default_factory=_column)
    """Tokens of the prompt."""
    output: "array[int]" = field(default_factory=_column)
    """Tokens that will be generated: known to the engine, not to a scheduler."""
    predicted: "array[int]" = field(default_factory=_column)
    """Tokens that a scheduler is told it will be."""
    blocks: list[tuple[int, ...]] = field(default_factory=list)
    """Of each prompt a number for each of its whole blocks from the beginning; prompts that begin alike have
    the same numbers as far as they are alike (as a trace's `hash_ids`)."""
    block_tokens: int = 0
    """How many tokens such a block has; 0 where there are none."""
    epoch_ns: int = 0
    """The wall clock at time 0 of `arrival_ns`: ns since 1970 UTC; 0 where the workload has no dates."""

    def __len__(self) -> int:
        return len(self.arrival_ns)

    def taken(self, rows: Iterable[int]) -> "Requests":
        """These rows, in this order."""
        rows = list(rows)
        columns = (self.arrival_ns, self.input, self.output, self.predicted)
        arrivals, given, made, told = (array("q", [c[row] for row in rows] if c else []) for c in columns)
        blocks = [self.blocks[row] for row in rows] if self.blocks else []
        return Requests(arrivals, given, made, told, blocks, self.block_tokens, self.epoch_ns)

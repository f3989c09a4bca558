"""Requests as columns: a request is a number, the row where its arrival and its lengths stand.

A million requests are four arrays of 8 MB. Who serves for as long as it runs adds rows as requests come.
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

    def __len__(self) -> int:
        return len(self.arrival_ns)

    def add(
        self,
        arrival_ns: int,
        input_tokens: int,
        output_tokens: int,
        predicted: int,
        blocks: tuple[int, ...] | None = None,
    ) -> int:
        """Adds a row, and gives its number."""
        if blocks is not None:
            self.blocks.append(blocks)
        self.arrival_ns.append(arrival_ns)
        self.input.append(input_tokens)
        self.output.append(output_tokens)
        self.predicted.append(predicted)
        return len(self.arrival_ns) - 1

    def taken(self, rows: Iterable[int]) -> "Requests":
        """These rows, in this order."""
        rows = list(rows)
        columns = (self.arrival_ns, self.input, self.output, self.predicted)
        arrivals, given, made, told = (array("q", [c[row] for row in rows] if c else []) for c in columns)
        blocks = [self.blocks[row] for row in rows] if self.blocks else []
        return Requests(arrivals, given, made, told, blocks, self.block_tokens)

"""Requests as columns: a request is a number, the row where its arrival and its lengths stand.

A million requests are four arrays of 8 MB. What a workload does not tell is an empty column.
"""

from array import array
from collections.abc import Iterable
from dataclasses import dataclass, field

__all__ = ["Requests"]


def _column() -> "array[int]":
    return array("q")


@dataclass(slots=True)
class Requests:
    """Columns of one length, or empty: `predicted` until somebody predicts, the others where nobody knows."""

    arrival_ns: "array[int]" = field(default_factory=_column)
    input: "array[int]" = field(default_factory=_column)
    """Tokens of the prompt."""
    output: "array[int]" = field(default_factory=_column)
    """Tokens that will be generated: known to the engine, not to a scheduler."""
    predicted: "array[int]" = field(default_factory=_column)
    """Tokens that a scheduler is told it will be."""
    blocks: list[tuple[int, ...]] = field(default_factory=list)
    """Of each prompt a number for each of its blocks, the last maybe only begun; prompts that begin alike
    have the same numbers as far as they are alike (as a trace's `hash_ids`)."""
    block_tokens: int = 0
    """How many tokens such a block has; 0 where there are none."""
    epoch_ns: int = 0
    """The wall clock at time 0 of `arrival_ns`: ns since 1970 UTC; 0 where the workload has no dates."""
    after: "array[int]" = field(default_factory=_column)
    """The row of the conversation's turn before, always a smaller one; -1 for a conversation's first."""
    think_ns: "array[int]" = field(default_factory=_column)
    """From the end of that turn's answer to this request; 0 where `after` is -1. With `after`, or empty."""
    tenants: list[str] = field(default_factory=list)
    bodies: list[bytes] = field(default_factory=list)
    """The request's own JSON body, where a trace has it; b"" where it does not."""
    models: list[str] = field(default_factory=list)
    """The model that was asked; "" where a trace does not tell."""

    def __len__(self) -> int:
        return len(self.arrival_ns)

    def taken(self, rows: Iterable[int]) -> "Requests":
        """These rows, in this order, in which a conversation's turns keep theirs.

        Who follows a row that is not taken begins a conversation.
        """
        rows = list(rows)
        columns = (self.arrival_ns, self.input, self.output, self.predicted)
        arrivals, given, made, told = (array("q", [c[row] for row in rows] if c else []) for c in columns)
        after, think_ns = _column(), _column()
        if self.after:
            places = {row: place for place, row in enumerate(rows)}
            after.extend(places.get(self.after[row], -1) for row in rows)
            think_ns.extend(
                self.think_ns[row] if place >= 0 else 0 for row, place in zip(rows, after, strict=True)
            )
        return Requests(
            arrivals, given, made, told,
            [self.blocks[row] for row in rows] if self.blocks else [], self.block_tokens, self.epoch_ns,
            after, think_ns,
            [self.tenants[row] for row in rows] if self.tenants else [],
            [self.bodies[row] for row in rows] if self.bodies else [],
            [self.models[row] for row in rows] if self.models else [],
        )  # fmt: skip

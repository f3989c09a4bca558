"""Requests of a workload as columns: arrivals, lengths, turns, prefix blocks, bodies, tenants.

`Requests` is what workloads and traces return, and what the load generator and the simulated engine take.
Prompts are made later, row by row (`prompts/prompt.py`).
"""

from array import array
from collections.abc import Iterable
from dataclasses import dataclass, field


def int_column() -> "array[int]":
    return array("q")


@dataclass(slots=True)
class Requests:
    """Columns of equal length, or empty if unknown."""

    arrival_ns: "array[int]" = field(default_factory=int_column)
    input: "array[int]" = field(default_factory=int_column)
    """Number of prompt tokens."""
    output: "array[int]" = field(default_factory=int_column)
    """Number of tokens to generate; the engine knows it, schedulers do not."""
    predicted: "array[int]" = field(default_factory=int_column)
    """Predicted number of output tokens, for schedulers."""
    blocks: list[tuple[int, ...]] = field(default_factory=list)
    """Block numbers of each prompt, the last block possibly partial; equal beginnings have equal numbers (as
    a trace's `hash_ids`)."""
    block_tokens: int = 0
    """Number of tokens in a block; 0: no blocks."""
    epoch_ns: int = 0
    """Wall clock at time 0 of `arrival_ns`: ns since 1970 UTC; 0 without dates."""
    after: "array[int]" = field(default_factory=int_column)
    """Row of the preceding turn, always a smaller one; -1 for the first of a conversation."""
    think_ns: "array[int]" = field(default_factory=int_column)
    """Time from the end of that turn's answer to this request; 0 if `after` is -1."""
    joins: dict[int, tuple[int, ...]] = field(default_factory=dict)
    """Further rows (all smaller) whose answers a row waits for, such as those of subagents. The think time
    then counts from the last of these ends."""
    tenants: list[str] = field(default_factory=list)
    bodies: list[bytes] = field(default_factory=list)
    """JSON body of the request in a trace; b"" if it has none."""
    paths: list[str] = field(default_factory=list)
    """Path of the recorded request; "" for a prompt of a data set, or without a body."""
    models: list[str] = field(default_factory=list)
    """Requested model; "" if it is unknown."""

    def __len__(self) -> int:
        return len(self.arrival_ns)

    def taken(self, rows: Iterable[int]) -> "Requests":
        """Return these rows in this order. Turns keep their order; a row whose preceding turn is not taken
        begins a conversation."""
        rows = list(rows)
        numbers = (self.arrival_ns, self.input, self.output, self.predicted)
        arrivals, inputs, outputs, predicted = (
            array("q", [c[row] for row in rows] if c else []) for c in numbers
        )
        after, think_ns, joins = int_column(), int_column(), dict[int, tuple[int, ...]]()
        if self.after:
            places = {row: place for place, row in enumerate(rows)}
            after.extend(places.get(self.after[row], -1) for row in rows)
            think_ns.extend(
                self.think_ns[row] if place >= 0 else 0 for row, place in zip(rows, after, strict=True)
            )
            for place, row in enumerate(rows):
                if joined := tuple(places[other] for other in self.joins.get(row, ()) if other in places):
                    joins[place] = joined
        return Requests(
            arrivals, inputs, outputs, predicted, [self.blocks[row] for row in rows] if self.blocks else [],
            self.block_tokens, self.epoch_ns, after, think_ns, joins,
            [self.tenants[row] for row in rows] if self.tenants else [],
            [self.bodies[row] for row in rows] if self.bodies else [],
            [self.paths[row] for row in rows] if self.paths else [],
            [self.models[row] for row in rows] if self.models else [],
        )  # fmt: skip

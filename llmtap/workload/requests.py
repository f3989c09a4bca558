"""Requests of a workload as columns: arrivals, lengths, turns, prefix blocks, bodies, tenants.

Workloads and traces return `Requests`, which the load generator and the simulated engine use.
Prompts are made later, row by row (`prompts/prompt.py`).
"""

from array import array
from collections.abc import Iterable
from dataclasses import dataclass, field


def int_column() -> "array[int]":
    return array("q")


@dataclass(slots=True)
class Requests:
    """Requests as columns of equal length. A column is empty if its values are unknown."""

    arrival_ns: "array[int]" = field(default_factory=int_column)
    input: "array[int]" = field(default_factory=int_column)
    """Number of prompt tokens."""
    output: "array[int]" = field(default_factory=int_column)
    """Number of tokens to generate. The simulated engine uses it, but hides it from its schedulers."""
    predicted: "array[int]" = field(default_factory=int_column)
    """Predicted number of output tokens, for schedulers."""
    blocks: list[tuple[int, ...]] = field(default_factory=list)
    """Block numbers of each prompt, as `hash_ids` of a trace: prompts with equal beginnings have equal
    numbers. The last block can be partial."""
    block_tokens: int = 0
    """Number of tokens in a block; 0: no blocks."""
    epoch_ns: int = 0
    """Wall-clock time at time 0 of `arrival_ns`, in ns since 1970 UTC; 0 without dates."""
    after: "array[int]" = field(default_factory=int_column)
    """Row of the previous turn, always a smaller number; -1 for the first turn of a conversation."""
    think_ns: "array[int]" = field(default_factory=int_column)
    """Time from the end of the previous turn's answer to this request; 0 if `after` is -1."""
    joins: dict[int, tuple[int, ...]] = field(default_factory=dict)
    """By row: further rows (all smaller) for whose answers the row waits, such as those of subagents. The
    think time then counts from the latest end of these answers."""
    tenants: list[str] = field(default_factory=list)
    bodies: list[bytes] = field(default_factory=list)
    """JSON body of each request in a trace; b"" if it has none."""
    paths: list[str] = field(default_factory=list)
    """Path of each recorded request; "" for a prompt of a data set, or a request without a body."""
    models: list[str] = field(default_factory=list)
    """Requested model; "" if it is unknown."""
    labels: list[str | None] = field(default_factory=list)
    """Label of each request, a word of `exchange/label.py`: what its sender expects; None: no label."""

    def __len__(self) -> int:
        return len(self.arrival_ns)

    def select_rows(self, rows: Iterable[int]) -> "Requests":
        """Return these rows in this order, in which turns of a conversation must keep their order.

        A row begins a conversation if its previous turn is not among the rows.
        """
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
            arrivals,
            inputs,
            outputs,
            predicted,
            [self.blocks[row] for row in rows] if self.blocks else [],
            self.block_tokens,
            self.epoch_ns,
            after,
            think_ns,
            joins,
            [self.tenants[row] for row in rows] if self.tenants else [],
            [self.bodies[row] for row in rows] if self.bodies else [],
            [self.paths[row] for row in rows] if self.paths else [],
            [self.models[row] for row in rows] if self.models else [],
            [self.labels[row] for row in rows] if self.labels else [],
        )

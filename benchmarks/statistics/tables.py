"""What the simulations share: how often they draw, and tables in Markdown."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class Table:
    """As Markdown."""

    title: str
    heads: Sequence[str]
    rows: Sequence[Sequence[str]]

    def __str__(self) -> str:
        lines = [self.heads, ["---"] * len(self.heads), *self.rows]
        return "\n".join([f"**{self.title}**", "", *(f"| {' | '.join(line)} |" for line in lines)])


@dataclass(frozen=True, slots=True)
class Effort:
    """How often samples are drawn."""

    scale: float
    random: np.random.Generator

    def times(self, full: int) -> int:
        return max(20, round(full * self.scale))


def percent(hits: float, of: float) -> str:
    return f"{100 * hits / of:.1f}"

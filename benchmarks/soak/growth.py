"""Does a figure grow? Medians of thirds, and a Theil-Sen slope with its interval.

Samples of one second depend on each other, so that an interval over them would be far too narrow. They are
put into blocks, whose medians are what slope and interval are reckoned from; what blocks still share is not
allowed for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import median

from scipy.stats import theilslopes

BLOCKS = 30
BLOCKS_MIN = 6
CONFIDENCE = 0.95


@dataclass(frozen=True, slots=True)
class Growth:
    """Of one figure of one process, in the figure's own unit; slopes are per minute."""

    first: float
    """Median of the first third of the time, and so on."""
    middle: float
    last: float
    slope: float
    low: float
    """Ends of the slope's interval."""
    high: float
    samples: int

    @property
    def grown(self) -> float:
        return self.last - self.first

    def to_dict(self) -> dict[str, float]:
        return asdict(self) | {"grown": self.grown}


def growth(times_s: Sequence[float], values: Sequence[float]) -> Growth | None:
    """How `values` went, which were read at `times_s` (ascending); None where there is too little to tell."""
    if len(values) < 2 or times_s[-1] <= times_s[0]:
        return None
    blocks = _parts(times_s, values, BLOCKS)
    thirds = _parts(times_s, values, 3)
    if len(blocks) < BLOCKS_MIN or len(thirds) < 3:
        return None
    minutes, medians = zip(*((at / 60, value) for at, value in blocks), strict=True)
    slope, _, low, high = theilslopes(medians, minutes, alpha=CONFIDENCE)
    first, middle, last = (value for _, value in thirds)
    return Growth(first, middle, last, float(slope), float(low), float(high), len(values))


def _parts(times_s: Sequence[float], values: Sequence[float], n: int) -> list[tuple[float, float]]:
    """The time cut into `n` equal parts: middle (s) and median of each that has a sample."""
    begin, span = times_s[0], times_s[-1] - times_s[0]
    found: list[list[float]] = [[] for _ in range(n)]
    for at, value in zip(times_s, values, strict=True):
        found[min(n - 1, int((at - begin) / span * n))].append(value)
    return [(begin + (i + 0.5) * span / n, median(part)) for i, part in enumerate(found) if part]

"""Choose the levels of a search for the highest level that holds: double until one fails, then bisect.

The throughput and capacity tests send each level that `RateSearch.next` names, and tell it whether the level
holds (meets the test's criteria). Levels are whole numbers above 0: concurrencies, or multiples of a step in
rate. The next level depends on the verdicts alone, so an interrupted search that gets the same verdicts asks
for the same levels.

Source: IETF draft, 5.2.3 (4) and 5.5.3 (4).
"""

from dataclasses import dataclass

__all__ = ["RateSearch"]


@dataclass(slots=True)
class RateSearch:
    low: int
    high: int
    start: int
    resolution: int = 1
    """Difference of `best` and `limit` at which the search ends."""
    best: int | None = None
    """Highest level that holds, or None."""
    limit: int | None = None
    """Lowest level that does not hold, or None."""

    def __post_init__(self) -> None:
        assert 0 < self.low <= self.start <= self.high
        assert self.resolution > 0

    def tell(self, level: int, holds: bool) -> None:
        if holds:
            self.best = level
        else:
            self.limit = level

    @property
    def next(self) -> int | None:
        """Next level to try; None at the end of the search."""
        if self.limit is not None:
            near = self.limit - self._floor <= self._nearest
            return None if near else (self._floor + self.limit) // 2
        if self.best is None:
            return self.start
        return min(self.high, 2 * self.best) if self.best < self.high else None

    @property
    def left(self) -> int:
        """Largest possible number of further tries."""
        if self.limit is not None:
            return _halvings(self.limit - self._floor, self._nearest)
        steps, worst, best = 0, 0, self.best
        if best is None:
            steps, best = 1, self.start
            worst = 1 + _halvings(self.start - self.low + 1, 1)
        while best < self.high:
            following = min(self.high, 2 * best)
            steps += 1
            worst = max(worst, steps + _halvings(following - best, self.resolution))
            best = following
        return max(worst, steps)

    @property
    def _floor(self) -> int:
        """Highest level known to hold, or the level below the lowest."""
        return self.low - 1 if self.best is None else self.best

    @property
    def _nearest(self) -> int:
        # If no level holds, the lowest one is tried at any resolution.
        return 1 if self.best is None else self.resolution


def _halvings(gap: int, resolution: int) -> int:
    steps = 0
    while gap > resolution:
        gap -= gap // 2
        steps += 1
    return steps

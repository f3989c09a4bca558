"""Search for the highest level that holds: double until one fails, then bisect.

Levels are whole numbers above 0: concurrencies, or multiples of a step in rate. The next level depends on the
verdicts alone, so an interrupted search that gets the same verdicts asks for the same levels.

With `votes` above 1 the two levels at the limit are tried until further verdicts could not change the
majority. If a level is overturned, the search continues from there.

Source: IETF draft, 5.2.3 (4) and 5.5.3 (4).
"""

from collections import Counter
from dataclasses import dataclass, field

__all__ = ["RateSearch"]


@dataclass(slots=True)
class RateSearch:
    """Ask for `next`, `tell` what came of it, until there is none."""

    low: int
    high: int
    start: int
    resolution: int = 1
    """It ends when the highest that held and the lowest that broke are so near."""
    votes: int = 1
    """How many verdicts decide over the two levels at the limit, by majority; odd."""
    _held: Counter[int] = field(default_factory=Counter)
    _broke: Counter[int] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        assert 0 < self.low <= self.start <= self.high
        assert self.resolution > 0
        assert self.votes % 2 == 1

    def tell(self, level: int, holds: bool) -> None:
        (self._held if holds else self._broke)[level] += 1

    def tries(self, level: int) -> int:
        return self._held[level] + self._broke[level]

    def holds(self, level: int) -> bool | None:
        """By majority; None where it was not tried. As often the one as the other: no."""
        return self._held[level] > self._broke[level] if self.tries(level) else None

    @property
    def best(self) -> int | None:
        """The highest level that holds, of those below `limit`; None where none does."""
        limit = self.limit
        below = (level for level in self._levels() if limit is None or level < limit)
        return max((level for level in below if self.holds(level)), default=None)

    @property
    def limit(self) -> int | None:
        """The lowest level that does not hold; None where all do."""
        return min((level for level in self._levels() if not self.holds(level)), default=None)

    @property
    def contradictions(self) -> list[int]:
        """Levels that hold although a lower one does not: the verdicts are not those of one limit."""
        limit = self.limit
        return sorted(x for x in self._levels() if limit is not None and x > limit and self.holds(x))

    @property
    def next(self) -> int | None:
        """The level to be tried next; None when the answer is found."""
        best, limit = self.best, self.limit
        if limit is not None and self._held[limit] == self._broke[limit]:
            return limit
        if limit is None:
            if best is None:
                return self.start
            if best < self.high:
                return min(self.high, 2 * best)
        elif limit - self._floor(best) > self._nearest(best):
            return (self._floor(best) + limit) // 2
        return next((x for x in (best, limit) if x is not None and self._is_open(x)), None)

    @property
    def left(self) -> int:
        """How many tries there still are, at most, if the verdicts do not contradict each other."""
        best, limit = self.best, self.limit
        if limit is not None:
            levels = _halvings(limit - self._floor(best), self._nearest(best))
        else:
            levels = self._doublings(best)
        votes = sum(self._missing(x) for x in (best, limit) if x is not None)
        if levels:  # other levels will be those at the limit
            votes = 2 * (self.votes // 2)
        return levels + votes

    def _levels(self) -> set[int]:
        return self._held.keys() | self._broke.keys()

    def _floor(self, best: int | None) -> int:
        """The level from which the limit is counted: one that holds, or where nothing is asked for."""
        return self.low - 1 if best is None else best

    def _nearest(self, best: int | None) -> int:
        # Where nothing has held yet, the lowest level is to be tried, however coarse the resolution.
        return 1 if best is None else self.resolution

    def _missing(self, level: int) -> int:
        """Verdicts until the majority could not be turned over, if they agree with it."""
        return max(0, self.votes // 2 + 1 - max(self._held[level], self._broke[level]))

    def _is_open(self, level: int) -> bool:
        return self._missing(level) > 0

    def _doublings(self, best: int | None) -> int:
        """At most, while everything has held."""
        steps, worst = 0, 0
        if best is None:
            steps, best = 1, self.start
            worst = 1 + _halvings(self.start - self.low + 1, 1)
        while best < self.high:
            following = min(self.high, 2 * best)
            steps += 1
            worst = max(worst, steps + _halvings(following - best, self.resolution))
            best = following
        return max(worst, steps)


def _halvings(gap: int, resolution: int) -> int:
    """How often a gap is halved at most until it is at most so wide."""
    steps = 0
    while gap > resolution:
        gap -= gap // 2
        steps += 1
    return steps

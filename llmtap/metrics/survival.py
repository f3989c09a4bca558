"""Survival of durations that may be cut off: the Kaplan-Meier estimate from counts on a fixed grid.

`SurvivalCounts` counts the durations that ended by the event of interest, and the censored ones, which ended
for another reason: of these it is only known that the event did not come before. `survival_curve` estimates
the share of durations that last as long as each edge of the grid; `ended_share` the share that ends by the
event, of those that have lasted for a given time. Memory is constant, and a duration costs one bisection. A
duration counts as the lower edge of its cell, and at equal times events come before censoring.

Source: Kaplan and Meier 1958; Greenwood 1926 (variance); Kalbfleisch and Prentice (log-log limits); Nair 1984
(equal-precision band).
"""

from array import array
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import exp, inf, log, sqrt
from operator import add
from statistics import NormalDist
from typing import Final

AT_RISK_MIN: Final = 10
"""Minimum number of durations that reached an edge for which an estimate is made: one event of fewer would
change it by more than 10 %."""
LEVEL: Final = 0.95
_CRITICAL_MAX: Final = 10.0
"""Critical value above which Nair's tail probability is below any level in use."""
_HALVINGS: Final = 60


class SurvivalCounts:
    """Numbers of durations by cell of a grid; the last cell has no upper edge.

    `edges`: lower edges of the cells, ascending. Shorter durations are not counted.
    """

    __slots__ = ("censored", "edges", "ended")

    def __init__(self, edges: Sequence[int]) -> None:
        self.edges = edges
        self.ended = array("q", bytes(8 * len(edges)))
        self.censored = array("q", bytes(8 * len(edges)))

    def add(self, duration: int, *, ended: bool) -> None:
        """Count a duration; `ended`: by the event of interest, else it is censored."""
        cell = bisect_right(self.edges, duration) - 1
        if cell >= 0:
            (self.ended if ended else self.censored)[cell] += 1

    def merge(self, ended: Iterable[int], censored: Iterable[int]) -> None:
        """Add other counts with the same edges."""
        self.ended = array("q", map(add, self.ended, ended))
        self.censored = array("q", map(add, self.censored, censored))

    def copy(self) -> "SurvivalCounts":
        copied = SurvivalCounts(self.edges)
        copied.ended, copied.censored = self.ended[:], self.censored[:]
        return copied

    @property
    def n(self) -> int:
        return sum(self.ended) + sum(self.censored)

    def at_risk(self) -> list[int]:
        """Return for each edge the number of durations that reached it."""
        cells = [ended + censored for ended, censored in zip(self.ended, self.censored, strict=True)]
        return list(accumulate(reversed(cells)))[::-1]


@dataclass(frozen=True, slots=True)
class SurvivalPoint:
    duration: int
    n: int
    """Number of durations that are at least as long as this edge."""
    share: float
    """Share of the durations that last at least until this edge."""
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class EndedShare:
    """Estimate of the share that ends by the event, of the durations that have lasted for `since`.

    `until`, `share`, `low` and `high` are None if fewer than AT_RISK_MIN durations reached the next edge: it
    is then not known what would have followed.
    """

    since: int
    n: int
    """Number of durations that reached `since`."""
    ended: int
    """Number of these that ended by the event, at any time."""
    until: int | None = None
    """The share is that of events before this edge: the longest one that at least AT_RISK_MIN durations
    reached, or the next one if events are between both."""
    share: float | None = None
    """Estimated share of these durations that end by the event before `until`, from `low` to `high`."""
    low: float | None = None
    high: float | None = None


def survival_curve(counts: SurvivalCounts) -> list[SurvivalPoint]:
    """Return the Kaplan-Meier estimate at each edge that at least AT_RISK_MIN durations reached.

    The band from `low` to `high` contains the whole true curve with probability LEVEL: its limits are wider
    than those of a single point (equal-precision band by Nair, on the scale log(-log S)). Before the first
    event, the lower limit is the exact binomial one.
    """
    at_risk = counts.at_risk()
    cells = sum(n >= AT_RISK_MIN for n in at_risk)
    shares, variances = _product_limit(counts, at_risk, 0, cells)
    known = [variance for variance in variances if variance]
    critical = _band_critical(known[-1] / known[0]) if known else 0.0
    return [
        SurvivalPoint(edge, n, share, *_limits(share, variance, n, critical))
        for edge, n, share, variance in zip(counts.edges, at_risk, shares, variances, strict=False)
    ]


def ended_share(counts: SurvivalCounts, since: int) -> EndedShare:
    """Return the share that ends by the event, of the durations that lasted for `since`.

    `since` is rounded down to an edge, and up to the first one. The interval holds for this one point.
    """
    cell = max(0, bisect_right(counts.edges, since) - 1)
    return _ended_share(counts, counts.at_risk(), cell)


def first_share_below(
    counts: SurvivalCounts, share_max: float, n_min: int, follow_up: int
) -> EndedShare | None:
    """Return the first edge from which on a share of less than `share_max` ends by the event.

    Only edges count that at least `n_min` durations reached, and from which durations are known until
    `follow_up` times the edge; None if there is none. If the share is not below `share_max` at the last of
    these edges, that edge is returned.
    """
    at_risk = counts.at_risk()
    first: EndedShare | None = None
    for cell in reversed(range(sum(n >= n_min for n in at_risk))):
        at = _ended_share(counts, at_risk, cell)
        if at.share is None or at.until is None or at.until < follow_up * at.since:
            continue
        if first is None or at.share < share_max:
            first = at
        if at.share >= share_max:
            break
    return first


def _ended_share(counts: SurvivalCounts, at_risk: Sequence[int], cell: int) -> EndedShare:
    since, ended = counts.edges[cell], sum(counts.ended[cell:])
    last = sum(n >= AT_RISK_MIN for n in at_risk) - 1
    # Enough durations reached the last edge to estimate the share that ends in the cell behind it, if not all
    # of them were cut off there.
    end = last + (0 <= last < len(counts.edges) - 1 and counts.ended[last] > 0)
    if cell >= end:
        return EndedShare(since, at_risk[cell], ended)
    shares, variances = _product_limit(counts, at_risk, cell, end + 1)
    z = NormalDist().inv_cdf((1 + LEVEL) / 2)
    low, high = _limits(shares[-1], variances[-1], at_risk[last], z)
    return EndedShare(since, at_risk[cell], ended, counts.edges[end], 1 - shares[-1], 1 - high, 1 - low)


def _product_limit(
    counts: SurvivalCounts, at_risk: Sequence[int], first: int, end: int
) -> tuple[list[float], list[float]]:
    """Return the survival at the edges from `first` to `end` - 1, of durations that reached `first`, and the
    variance of its logarithm by Greenwood's formula."""
    share, variance = 1.0, 0.0
    shares, variances = [], []
    for cell in range(first, end):
        shares.append(share)
        variances.append(variance)
        n, ended = at_risk[cell], counts.ended[cell]
        if ended and cell + 1 < end:
            share *= 1 - ended / n
            variance += ended / (n * (n - ended)) if n > ended else inf
    return shares, variances


def _limits(share: float, variance: float, n: int, critical: float) -> tuple[float, float]:
    if not variance:
        # No event among n durations, so the variance is 0. Use the exact limit: the smallest survival s with
        # s^n >= (1 - LEVEL) / 2.
        return ((1 - LEVEL) / 2) ** (1 / n), 1.0
    if not share:
        return 0.0, 1 - ((1 - LEVEL) / 2) ** (1 / n)  # the same limit, as all n durations ended by the event
    reach = exp(critical * sqrt(variance) / -log(share))
    return share**reach, share ** (1 / reach)


def _band_critical(ratio: float) -> float:
    """Return Nair's critical value c for a band whose variance grows by this ratio.

    It solves 4 phi(c) / c + phi(c) (c - 1 / c) log(ratio) = 1 - LEVEL, where phi is the normal density.
    """
    density = NormalDist().pdf
    low, high = 1.0, _CRITICAL_MAX
    for _ in range(_HALVINGS):
        c = (low + high) / 2
        if 4 * density(c) / c + density(c) * (c - 1 / c) * log(ratio) > 1 - LEVEL:
            low = c
        else:
            high = c
    return high

"""Kaplan-Meier estimate of the survival of durations, some of them censored, from counts on a fixed grid.

`SurvivalCounts` counts the durations that ended by the event of interest, and the censored durations, which
ended for another reason: the event had not occurred until then. `survival_curve` estimates for each edge of
the grid the share of durations that reach it. `ended_share` estimates the share that ends by the event, among
the durations that have lasted for a given time. Memory is constant, and counting takes one bisection. A
duration counts as the lower edge of its cell. At equal times, events are assumed to precede censoring.

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
"""Minimum number of durations that reached an edge, to estimate the survival there: with fewer, a single
event would change the estimate by more than 10 %."""
LEVEL: Final = 0.95
"""Confidence level of the intervals and of the band."""
_CRITICAL_MAX: Final = 10.0
"""Upper end of the search for a critical value (`_band_critical`): the value for LEVEL is always below it."""
_HALVINGS: Final = 60
"""Number of bisections in the search of `_band_critical`: enough for the precision of a float."""


class SurvivalCounts:
    """Number of durations in each cell of a grid: `ended` by the event, and `censored` durations.

    `edges`: lower edges of the cells, ascending; the last cell has no upper edge. Durations below the first
    edge are not counted.
    """

    __slots__ = ("censored", "edges", "ended")

    def __init__(self, edges: Sequence[int]) -> None:
        self.edges = edges
        """Lower edges of the cells, ascending."""
        self.ended = array("q", bytes(8 * len(edges)))
        """Number of durations in each cell that ended by the event."""
        self.censored = array("q", bytes(8 * len(edges)))
        """Durations of which only a lower bound is known, because the observation ended."""

    def add(self, duration: int, *, ended: bool) -> None:
        """Count a duration. `ended`: whether the event of interest ended it; otherwise it is censored."""
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
        """Return the number of durations that reached each edge."""
        cells = [ended + censored for ended, censored in zip(self.ended, self.censored, strict=True)]
        return list(accumulate(reversed(cells)))[::-1]


@dataclass(frozen=True, slots=True)
class SurvivalPoint:
    """Estimated survival at one edge of the grid, with the limits `low` and `high` of the confidence band."""

    duration: int
    """Duration at this edge of the grid."""
    n: int
    """Number of durations that reached this edge."""
    share: float
    """Estimated share of all durations that reach this edge."""
    low: float
    """Lower limit of the confidence interval."""
    high: float


@dataclass(frozen=True, slots=True)
class EndedShare:
    """Estimated share that ends by the event, among the durations that have lasted for `since`.

    `until`, `share`, `low` and `high` are None if fewer than AT_RISK_MIN durations reached the edge after
    `since`: these are too few for an estimate.
    """

    since: int
    """Edge of the grid that the durations have reached."""
    n: int
    """Number of durations that reached `since`."""
    ended: int
    """Number of durations that reached `since` and ended by the event, at any later time."""
    until: int | None = None
    """Edge before which events count for `share`: the last edge that at least AT_RISK_MIN durations reached,
    or the edge after it, if events occurred between the two edges."""
    share: float | None = None
    """Estimated share of the durations that reached `since` which end by the event before `until`."""
    low: float | None = None
    """Limits of the confidence interval of `share`: `low` and `high`."""
    high: float | None = None
    """Upper limit of the confidence interval."""


def survival_curve(counts: SurvivalCounts) -> list[SurvivalPoint]:
    """Return the Kaplan-Meier estimate at each edge that at least AT_RISK_MIN durations reached.

    The band from `low` to `high` contains the whole true curve with probability LEVEL, so it is wider than
    the interval of a single point (Nair's equal-precision band, on the scale log(-log S)). Before the first
    event, the lower limit is the exact binomial limit.
    """
    at_risk = counts.at_risk()
    cells = sum(n >= AT_RISK_MIN for n in at_risk)
    shares, variances = _product_limit(counts, at_risk, 0, cells)
    positive = [variance for variance in variances if variance]
    critical = _band_critical(positive[-1] / positive[0]) if positive else 0.0
    return [
        SurvivalPoint(edge, n, share, *_limits(share, variance, n, critical))
        for edge, n, share, variance in zip(counts.edges, at_risk, shares, variances, strict=False)
    ]


def ended_share(counts: SurvivalCounts, since: int) -> EndedShare:
    """Return the share that ended with the event, among the durations of at least `since`.

    `since` is rounded down to an edge; below the first edge, it is rounded up. The interval is valid for this
    single estimate, unlike the band of `survival_curve`.
    """
    cell = max(0, bisect_right(counts.edges, since) - 1)
    return _ended_share(counts, counts.at_risk(), cell)


def first_share_below(
    counts: SurvivalCounts, share_max: float, n_min: int, follow_up: int
) -> EndedShare | None:
    """Return the share at the first edge after which less than `share_max` of the durations end by the event.

    An edge is considered if at least `n_min` durations reached it, and its share covers events until
    `follow_up` times the edge. None if there is no such edge. If the share is `share_max` or more at the last
    of these edges, the share at that edge is returned.
    """
    at_risk = counts.at_risk()
    first: EndedShare | None = None
    for cell in reversed(range(sum(n >= n_min for n in at_risk))):
        estimate = _ended_share(counts, at_risk, cell)
        if estimate.share is None or estimate.until is None or estimate.until < follow_up * estimate.since:
            continue
        if first is None or estimate.share < share_max:
            first = estimate
        if estimate.share >= share_max:
            break
    return first


def _ended_share(counts: SurvivalCounts, at_risk: Sequence[int], cell: int) -> EndedShare:
    """Return how many durations reached `cell` and how many of them ended, with the Kaplan-Meier estimate."""
    since, ended = counts.edges[cell], sum(counts.ended[cell:])
    last = sum(n >= AT_RISK_MIN for n in at_risk) - 1
    # If an event ended one of the durations in the cell after edge `last`, the share can be estimated up to
    # the end of this cell; if all of them were censored there, only up to `last`.
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
    """Return the survival of durations that reached edge `first`, at each edge from `first` to `end` - 1, and
    the variance of the logarithm of each survival, by Greenwood's formula."""
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
    """Return the ends of the confidence interval of a survival."""
    if not variance:
        # No event ended any of the n durations, so the variance is 0. Use the exact binomial limit: the
        # smallest survival s with s^n >= (1 - LEVEL) / 2.
        return ((1 - LEVEL) / 2) ** (1 / n), 1.0
    if not share:  # The event ended all n durations: again the exact limit.
        return 0.0, 1 - ((1 - LEVEL) / 2) ** (1 / n)
    reach = exp(critical * sqrt(variance) / -log(share))
    return share**reach, share ** (1 / reach)


def _band_critical(ratio: float) -> float:
    """Return Nair's critical value c for a band; `ratio`: largest variance in the band / smallest one.

    c solves 4 phi(c) / c + phi(c) (c - 1 / c) log(ratio) = 1 - LEVEL, where phi is the normal density.
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

"""How far one sample lies from another: the shift of Hodges and Lehmann, with its interval.

It is the median of all pairwise steps: of the averages (d_i + d_j) / 2, i <= j, of paired differences, or of
all b_j - a_i. That goes with the rank tests as the mean goes with Student's: outliers do not move it. Ten
thousand values have fifty or a hundred million such steps, so none is listed: those up to a value can be
counted quickly, and the k-th is found by halving.

Source: Hodges and Lehmann 1963; Hollander, Wolfe and Chicken 2014, 3.2, 3.3 and 4.2; for samples of unequal
spread, Brunner and Munzel 2000, whose variance takes the place of that of equal distributions.
"""

from dataclasses import dataclass
from functools import lru_cache
from math import ceil, floor, sqrt
from typing import Final

import numpy as np
from numpy.typing import NDArray
from scipy import stats

__all__ = ["Shift", "paired_shift", "placements", "unpaired_shift"]

Values = NDArray[np.float64]

EXACT_MAX: Final = 50
"""Pairs up to which the signed ranks' distribution is counted out, as SciPy does; beyond it is normal."""
HALVINGS: Final = 60
"""Of the range of all steps: finer than a float can tell two of them apart."""


@dataclass(frozen=True, slots=True)
class Shift:
    """By how much the second lies above the first, in the unit of the values."""

    value: float
    low: float
    high: float


def paired_shift(differences: Values, level: float) -> Shift | None:
    """Of pairs, by their differences; None where there are too few for `level` (6 pairs for 95 %).

    The interval holds the shifts that the signed-rank test would not reject.
    """
    n = len(differences)
    outside = _signed_rank_outside(n, (1 - level) / 2)
    if outside < 0:
        return None
    x = np.sort(differences)
    steps = _Steps(x, x, once=True)
    return Shift(steps.median() / 2, steps.kth(outside + 1) / 2, steps.kth(steps.total - outside) / 2)


def unpaired_shift(a: Values, b: Values, level: float) -> Shift:
    """Of independent samples, of two values at least each.

    The share of steps below the true shift is a half, give or take the standard error of "b lies above a"
    (after b was moved back); the interval is between the steps at the ends of that, with Student's t. Equal
    spread of both samples is not assumed.
    """
    x, y = np.sort(a), np.sort(b)
    steps = _Steps(y, -x[::-1], once=False)
    middle = steps.median()
    above, below = placements(x, y - middle)
    va, vb = float(above.var(ddof=1)) / len(x), float(below.var(ddof=1)) / len(y)
    error = sqrt(va + vb)
    if error == 0:  # within each sample all values are alike
        return Shift(middle, middle, middle)
    df = (va + vb) ** 2 / (va**2 / (len(x) - 1) + vb**2 / (len(y) - 1))
    reach = float(stats.t.ppf((1 + level) / 2, df)) * error
    low = max(1, floor(steps.total * (0.5 - reach)))
    high = min(steps.total, ceil(steps.total * (0.5 + reach)) + 1)
    return Shift(middle, steps.kth(low), steps.kth(high))


def placements(a: Values, b: Values) -> tuple[Values, Values]:
    """For each value of `a` the share of `b` above it, for each of `b` the share of `a` below it; ties count
    half.

    Both samples ascending. The mean of either is the probability that b exceeds a.
    """

    def below(values: Values, of: Values) -> Values:
        left, right = np.searchsorted(of, values, "left"), np.searchsorted(of, values, "right")
        share: Values = (left + right) / (2 * len(of))
        return share

    return 1 - below(a, b), below(b, a)


class _Steps:
    """All sums x_i + y_j of two ascending arrays, by rank; with `once` (x is y), those of i <= j only."""

    def __init__(self, x: Values, y: Values, *, once: bool) -> None:
        self._x, self._y, self._once = x, y, once
        n = len(x)
        self.total = n * (n + 1) // 2 if once else n * len(y)

    def median(self) -> float:
        """Of all of them."""
        upper = self.kth(self.total // 2 + 1)
        return upper if self.total % 2 else (self.kth(self.total // 2) + upper) / 2

    def kth(self, k: int) -> float:
        """The k-th smallest, from 1."""
        low, high = float(self._x[0] + self._y[0]), float(self._x[-1] + self._y[-1])
        if self._count(low) >= k:
            return low
        for _ in range(HALVINGS):
            middle = (low + high) / 2
            if self._count(middle) >= k:
                high = middle
            else:
                low = middle
        # What it closes in on is one of the sums, and a difference of 0 should be 0 and not nearly.
        places = np.searchsorted(self._y, high - self._x, "right") - 1
        found = places >= 0
        return float((self._x[found] + self._y[places[found]]).max())

    def _count(self, most: float) -> int:
        """How many are at most so much."""
        rest = most - self._x
        count = int(np.searchsorted(self._y, rest, "right").sum())
        return (count + int((self._x <= rest).sum())) // 2 if self._once else count


@lru_cache(1_024)
def _signed_rank_outside(n: int, tail: float) -> int:
    """The largest sum of positive ranks that n pairs without a shift stay at or below with probability `tail`
    at most; -1 where even 0 is more likely."""
    if n > EXACT_MAX:
        spread = sqrt(n * (n + 1) * (2 * n + 1) / 24)
        return floor(n * (n + 1) / 4 + float(stats.norm.ppf(tail)) * spread - 0.5)
    chances = np.ones(1)
    for rank in range(1, n + 1):  # each rank is positive or not
        chances = (np.pad(chances, (0, rank)) + np.pad(chances, (rank, 0))) / 2
    return int(np.searchsorted(np.cumsum(chances), tail, "right")) - 1

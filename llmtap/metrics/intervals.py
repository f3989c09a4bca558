"""Confidence intervals of quantiles, means and shares of one run, for other requests of the same kind.

Functions from all values of a run, or counts, to an `Interval`, for benchmarks and comparisons of replays.
Values are taken as independent; `clustered_quantile_interval` draws whole requests instead. No interval here
covers the difference between runs (`comparison.compare_runs`). Intervals that are updated while traffic runs
are in `experiment.py`.

Source: IETF draft, 5.1.4.3 and 6.3; Hahn and Meeker 1991 (order statistics); Wilson 1927.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from statistics import NormalDist
from typing import Final

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from llmtap.metrics.statistics import percentile, share_range

Values = NDArray[np.float64]

RANKS_ABOUT: Final = 3
"""Ranks to either side of those of equal tails among which the interval's ends are chosen."""
TAIL_MAX: Final = 0.8
"""Largest part of 1 - level on one side: 4 % and 1 % for 95 %."""
ROUNDING: Final = 1e-12
CHECKPOINTS: Final = 128
"""Places in the sorted pool at which each request's values are counted in advance."""


@dataclass(frozen=True, slots=True)
class Interval:
    value: float
    low: float
    high: float
    n: int
    level: float
    """Confidence level: fraction of repeated runs whose interval contains the true value."""
    method: str
    open_below: bool = False
    """`low` is the least value there is, and no bound."""
    open_above: bool = False

    def to_dict(self) -> dict[str, float | int | str | None]:
        return {
            "value": self.value, "low": None if self.open_below else self.low,
            "high": None if self.open_above else self.high, "n": self.n, "level": self.level,
            "method": self.method,
        }  # fmt: skip


def quantile_interval(ordered: Sequence[float], p: float, level: float = 0.95) -> Interval | None:
    """Return the interval of the p-th quantile of ascending values, by order statistics; None without values.

    Holds for any distribution, with at least `level`. An end that too few values determine is the least or
    greatest value, and is marked open (both ends are closed from 368 values on for P99). Source: Hahn and
    Meeker 1991, 5.2.
    """
    value = percentile(ordered, p)
    if value is None:
        return None
    n = len(ordered)
    low, high = _ranks(n, p, level)
    missing = [side for side, gone in (("below", low == 0), ("above", high > n)) if gone]
    method = "order statistics" + (f", open {' and '.join(missing)}" if missing else "")
    # Of two or three values the interpolated quantile may lie beyond an end.
    least, most = min(ordered[max(low, 1) - 1], value), max(ordered[min(high, n) - 1], value)
    return Interval(
        float(value), float(least), float(most), n, level, method, "below" in missing, "above" in missing
    )


@lru_cache(4_096)
def _ranks(n: int, p: float, level: float) -> tuple[int, int]:
    """Return the ranks, from 1, of the order statistics that enclose the quantile; 0 and n + 1 are no bounds.

    With B ~ Bin(n, p) values below the quantile it is enclosed if low <= B < high. Among ranks near those of
    equal tails, those are chosen that cover least and still `level`, with at most `TAIL_MAX` of the rest on
    one side; of equals the higher, because a stated latency should rather be too high.
    """
    spare = 1 - level
    low, high = int(stats.binom.ppf(spare / 2, n, p)), int(stats.binom.ppf(1 - spare / 2, n, p)) + 1
    about = np.arange(-RANKS_ABOUT, RANKS_ABOUT + 1)
    lows = np.array([0]) if low == 0 else np.clip(low + about, 1, n)
    highs = np.array([n + 1]) if high > n else np.clip(high + about, 1, n)
    below, above = stats.binom.cdf(lows - 1, n, p), stats.binom.sf(highs - 1, n, p)
    most = TAIL_MAX * spare if low and high <= n else spare
    left = below[:, None] + above[None, :]
    left[below > most, :] = left[:, above > most] = np.inf
    left[left > spare + ROUNDING] = -1
    i, j = divmod(int(np.round(left, 12)[::-1, ::-1].argmax()), len(highs))
    return int(lows[::-1][i]), int(highs[::-1][j])


def mean_interval(values: Sequence[float], level: float = 0.95) -> Interval | None:
    """Return the interval around the mean, by Student's t; None below two values.

    Exact for normal values; skewed values need more samples.
    """
    n = len(values)
    if n < 2:
        return None
    data = np.asarray(values, dtype=float)
    mean = float(data.mean())
    reach = float(stats.t.ppf((1 + level) / 2, n - 1)) * float(data.std(ddof=1)) / n**0.5
    return Interval(mean, mean - reach, mean + reach, n, level, "Student's t")


def share_interval(k: int, n: int, level: float = 0.95) -> Interval | None:
    """Return Wilson's interval of a share of k in n; None for n = 0."""
    if not n:
        return None
    return Interval(
        k / n, *share_range(k / n, n, NormalDist().inv_cdf((1 + level) / 2)), n, level, "Wilson's score"
    )


def clustered_quantile_interval(
    groups: Sequence[Sequence[float]],
    p: float,
    level: float = 0.95,
    resamples: int = 1_000,
    seed: int = 0,
) -> Interval | None:
    """Return the interval of the p-th quantile of values that are similar within a group.

    None below two groups. Whole groups are resampled. `n` counts values. Source: Davison and Hinkley 1997,
    3.8.
    """
    parts = [np.asarray(group, dtype=float) for group in groups if len(group)]
    k = len(parts)
    if k < 2:
        return None
    pool = _Pool(parts)
    drawn = np.random.default_rng(seed).multinomial(k, np.full(k, 1 / k), size=resamples)
    found = [pool.quantile(times, p) for times in drawn]
    low, high = np.quantile(found, [(1 - level) / 2, (1 + level) / 2])
    value = pool.quantile(np.ones(k, dtype=int), p)
    return Interval(value, float(low), float(high), len(pool.values), level, "bootstrap of whole requests")


class _Pool:
    """Values of all groups, ascending; gives quantiles if each group counts a number of times."""

    def __init__(self, parts: Sequence[Values]) -> None:
        k = len(parts)
        values = np.concatenate(parts)
        order = np.argsort(values, kind="stable")
        self.values: Values = values[order]
        self._owner = np.repeat(np.arange(k), [len(part) for part in parts])[order]
        self._edges = np.linspace(0, len(values), CHECKPOINTS + 1).astype(int)
        counts = [np.bincount(self._owner[a:b], minlength=k) for a, b in pairwise(self._edges)]
        self._below: Values = np.cumsum([np.zeros(k), *counts], axis=0)

    def quantile(self, times: NDArray[np.int_], p: float) -> float:
        """Return the quantile, by the rule of `percentile`, of the pool with group i `times[i]` times."""
        reached: Values = self._below @ times
        last = int(reached[-1]) - 1
        rank = last * p
        low, high = (self._at(i, times, reached) for i in (int(rank), min(int(rank) + 1, last)))
        return low + (high - low) * (rank - int(rank))

    def _at(self, rank: int, times: NDArray[np.int_], reached: Values) -> float:
        piece = int(np.searchsorted(reached, rank, side="right")) - 1
        start, end = self._edges[piece], self._edges[piece + 1]
        inside = np.cumsum(times[self._owner[start:end]])
        place = np.searchsorted(inside, rank - reached[piece], side="right")
        return float(self.values[start + place])

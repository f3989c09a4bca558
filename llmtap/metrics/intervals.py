"""Confidence intervals of quantiles, means and shares of one run, and the shape of its values: modes, tail.

The functions take all values of a run, or counts, and return an `Interval`. Benchmarks and comparisons of
replays call them; the ITL test of `llmtap bench` also calls `modes` and `tail`. The values are assumed to be
independent, except by `clustered_quantile_interval`, for values that are similar within a request. These
intervals do not include the variation between runs, which `comparison.compare_runs` covers. Intervals that
are updated while traffic runs are in `experiment.py`.

Source: IETF draft, 5.1.4.3, 5.4.4.3 and 6.3; Hahn and Meeker 1991 (order statistics); Wilson 1927.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from math import sqrt
from statistics import NormalDist
from typing import Final, Literal

import numpy as np
from numpy.typing import NDArray
from scipy import ndimage, signal, stats

from llmtap.metrics.statistics import percentile, share_range, tail_ratio

Values = NDArray[np.float64]

RANKS_NEARBY: Final = 3
"""Number of ranks to try on each side of the rank with equal error probabilities (`_enclosing_ranks`)."""
TAIL_MAX: Final = 0.8
"""Maximum share of the error probability (1 - level) on one side of an interval: 4 % for a level of 95 %."""
ROUNDING: Final = 1e-12
"""Tolerance in comparisons of probabilities, for rounding errors."""
CHECKPOINTS: Final = 128
"""Number of positions in the sorted values of a `_Pool`. The values of each group before each position are
counted in advance, so that a quantile needs no search over all values."""


@dataclass(frozen=True, slots=True)
class Interval:
    """Estimate `value` from a sample of `n` values, with its confidence limits `low` and `high`."""

    value: float
    low: float
    high: float
    n: int
    level: float
    """Confidence level: fraction of repeated runs whose interval contains the true value."""
    method: str
    """How the interval was computed, as reports name it."""
    open_below: bool = False
    """Whether `low` is no confidence limit, but only the smallest value of the sample."""
    open_above: bool = False
    """Whether `high` is no confidence limit, but only the largest value of the sample."""

    def to_dict(self) -> dict[str, float | int | str | None]:
        return {
            "value": self.value,
            "low": None if self.open_below else self.low,
            "high": None if self.open_above else self.high,
            "n": self.n,
            "level": self.level,
            "method": self.method,
        }


def quantile_interval(ordered: Sequence[float], p: float, level: float = 0.95) -> Interval | None:
    """Return the interval of the p-th quantile of ascending values, by order statistics; None without values.

    Its confidence is at least `level` for any distribution. If there are too few values for a limit on one
    side, the smallest or largest value is returned for it, and the side is marked as open (for P99, this is
    the case with fewer than 368 values). Source: Hahn and Meeker 1991, 5.2.
    """
    value = percentile(ordered, p)
    if value is None:
        return None
    n = len(ordered)
    low, high = _enclosing_ranks(n, p, level)
    missing = [side for side, gone in (("below", low == 0), ("above", high > n)) if gone]
    method = "order statistics" + (f", open {' and '.join(missing)}" if missing else "")
    # Extend the interval to the value: with two or three values, the interpolated quantile can lie outside.
    lower, upper = min(ordered[max(low, 1) - 1], value), max(ordered[min(high, n) - 1], value)
    return Interval(
        float(value), float(lower), float(upper), n, level, method, "below" in missing, "above" in missing
    )


@lru_cache(4_096)
def _enclosing_ranks(n: int, p: float, level: float) -> tuple[int, int]:
    """Return the ranks, counted from 1, of the two values that enclose the quantile; 0 or n + 1 means that
    there are too few values for a limit on that side.

    The number B of values below the quantile is binomial, B ~ Bin(n, p). The values enclose the quantile if
    low <= B < high. Among the ranks near those with equal error on both sides, choose the pair with the
    smallest coverage that is at least `level`, and at most `TAIL_MAX` of the error on one side. Of equal
    pairs choose the higher ranks, because a reported latency should be too high rather than too low.
    """
    error = 1 - level
    low, high = int(stats.binom.ppf(error / 2, n, p)), int(stats.binom.ppf(1 - error / 2, n, p)) + 1
    offsets = np.arange(-RANKS_NEARBY, RANKS_NEARBY + 1)
    lows = np.array([0]) if low == 0 else np.clip(low + offsets, 1, n)
    highs = np.array([n + 1]) if high > n else np.clip(high + offsets, 1, n)
    below, above = stats.binom.cdf(lows - 1, n, p), stats.binom.sf(highs - 1, n, p)
    tail_max = TAIL_MAX * error if low and high <= n else error
    uncovered = below[:, None] + above[None, :]
    uncovered[below > tail_max, :] = uncovered[:, above > tail_max] = np.inf
    uncovered[uncovered > error + ROUNDING] = -1
    i, j = divmod(int(np.round(uncovered, 12)[::-1, ::-1].argmax()), len(highs))
    return int(lows[::-1][i]), int(highs[::-1][j])


def mean_interval(values: Sequence[float], level: float = 0.95) -> Interval | None:
    """Return the confidence interval of the mean, by Student's t; None with fewer than two values.

    It is exact for normally distributed values, and needs more values if their distribution is skewed.
    """
    n = len(values)
    if n < 2:
        return None
    data = np.asarray(values, dtype=float)
    mean = float(data.mean())
    reach = float(stats.t.ppf((1 + level) / 2, n - 1)) * float(data.std(ddof=1)) / n**0.5
    return Interval(mean, mean - reach, mean + reach, n, level, "Student's t")


def share_interval(k: int, n: int, level: float = 0.95) -> Interval | None:
    """Return Wilson's interval of the share k / n; None if n is 0."""
    if not n:
        return None
    return Interval(
        k / n, *share_range(k / n, n, NormalDist().inv_cdf((1 + level) / 2)), n, level, "Wilson's score"
    )


def clustered_quantile_interval(
    groups: Sequence[Sequence[float]], p: float, level: float = 0.95, resamples: int = 1_000, seed: int = 0
) -> Interval | None:
    """Return the interval of the p-th quantile of values that are similar within a group, such as a request.

    It is a bootstrap that resamples whole groups; `Interval.n` is the number of values. None with fewer than
    two groups. Source: Davison and Hinkley 1997, 3.8.
    """
    parts = [np.asarray(group, dtype=float) for group in groups if len(group)]
    k = len(parts)
    if k < 2:
        return None
    pool = _Pool(parts)
    drawn = np.random.default_rng(seed).multinomial(k, np.full(k, 1 / k), size=resamples)
    quantiles = [pool.quantile(times, p) for times in drawn]
    low, high = np.quantile(quantiles, [(1 - level) / 2, (1 + level) / 2])
    value = pool.quantile(np.ones(k, dtype=int), p)
    return Interval(value, float(low), float(high), len(pool.values), level, "bootstrap of whole requests")


class _Pool:
    """Values of all groups, ascending, for quantiles of samples that repeat or omit whole groups."""

    def __init__(self, parts: Sequence[Values]) -> None:
        k = len(parts)
        values = np.concatenate(parts)
        order = np.argsort(values, kind="stable")
        self.values: Values = values[order]
        self._groups = np.repeat(np.arange(k), [len(part) for part in parts])[order]
        """By rank of a value: index of its group."""
        self._edges = np.linspace(0, len(values), CHECKPOINTS + 1).astype(int)
        """Ranks at which the pool is cut into pieces."""
        counts = [np.bincount(self._groups[a:b], minlength=k) for a, b in pairwise(self._edges)]
        self._counts_below: Values = np.cumsum([np.zeros(k), *counts], axis=0)
        """By edge and group: number of values below the edge."""

    def quantile(self, times: NDArray[np.int_], p: float) -> float:
        """Return the p-th quantile (as `percentile`) of the sample that has group i `times[i]` times."""
        reached: Values = self._counts_below @ times
        last = int(reached[-1]) - 1
        rank = last * p
        low, high = (self._value_at(i, times, reached) for i in (int(rank), min(int(rank) + 1, last)))
        return low + (high - low) * (rank - int(rank))

    def _value_at(self, rank: int, times: NDArray[np.int_], reached: Values) -> float:
        """Return the value at a rank of a resample. `times`: how often each group of values is in it."""
        piece = int(np.searchsorted(reached, rank, side="right")) - 1
        start, end = self._edges[piece], self._edges[piece + 1]
        inside = np.cumsum(times[self._groups[start:end]])
        place = np.searchsorted(inside, rank - reached[piece], side="right")
        return float(self.values[start + place])


GRID: Final = 2_048
"""Number of points at which the density of the values is computed, to find its modes."""
LOG_SCALE_RATIO: Final = 10.0
"""Ratio of the largest to the smallest value, above which modes are searched on a logarithmic scale."""
OUTLIER_SHARE: Final = 0.002
"""Share of the values that the search for modes leaves out as outliers on each side."""
MODE_SHARE_MIN: Final = 0.01
"""Minimum share of all values by which a mode must exceed the level of its neighbouring valleys."""
MODE_VALUES_MIN: Final = 10
"""Minimum number of values by which a mode must exceed the level of its neighbouring valleys."""
MODE_ERRORS_MIN: Final = 4.0
"""Number of standard errors by which the values of a mode must exceed the level of its neighbouring valleys:
a smaller excess can be random."""
_ALMOST: Final = 1 - 1e-9
"""Factor slightly below 1 for the depth of a valley, so that rounding does not change a comparison."""
TAIL_SHARE: Final = 0.1
"""Share of the values that form the tail: the largest values."""
TAIL_VALUES_MIN: Final = 50
"""Minimum number of values in the tail: with fewer values, every shape fits."""
TAIL_VALUES_MAX: Final = 2_000
"""Maximum number of values in the tail; if the tail has more, only the largest ones are used."""


def modes(values: Sequence[float]) -> list[float]:
    """Return the peaks of the density of the values, ascending: one for a unimodal distribution.

    The density is estimated with a Gaussian kernel of Silverman's width, on a logarithmic scale if all values
    are above 0 and differ by more than a factor of 10. Zeros, if there are enough of them, are a separate
    peak. A peak has at least 1 % of the values above the level of its valleys. Source: IETF draft, 5.4.4.3.
    """
    data = np.asarray(values, dtype=float)
    if not len(data):
        return []
    enough = max(MODE_VALUES_MIN, MODE_SHARE_MIN * len(data))
    positive = data[data > 0]
    if len(positive) and (data == 0).sum() >= enough:
        return [0.0, *_mode_places(positive, enough)]
    return _mode_places(data, enough)


def _mode_places(data: Values, enough: float) -> list[float]:
    """Return the peaks of the density; each has at least `enough` values."""
    low, high = (
        np.quantile(data, OUTLIER_SHARE, method="lower"),
        np.quantile(data, 1 - OUTLIER_SHARE, method="higher"),
    )
    inner = data[(data >= low) & (data <= high)]
    if low > 0 and high > LOG_SCALE_RATIO * low:
        return [float(np.exp(x)) for x in _peaks(np.log(inner), enough)]
    return _peaks(inner, enough)


def _peaks(data: Values, enough: float) -> list[float]:
    """Return the places of the peaks of a smoothed density; each has at least `enough` values."""
    spread = min(float(data.std()), float(stats.iqr(data)) / 1.349) or float(data.std())
    low, high = float(data.min()), float(data.max())
    if not spread or low == high:
        return [low]
    width = 0.9 * spread * len(data) ** -0.2
    low, high = low - 4 * width, high + 4 * width
    cell = max((high - low) / GRID, width / 20)
    cells = int((high - low) / cell) + 1
    counts, edges = np.histogram(data, bins=cells, range=(low, low + cells * cell))
    density = ndimage.gaussian_filter1d(counts.astype(float), width / cell, mode="constant", truncate=4)
    places, about = signal.find_peaks(density, prominence=0)
    centres = []
    for place, depth in zip(places, about["prominences"], strict=True):
        # Subtract slightly less than the depth, so that rounding does not put the level below the valley.
        level = density[place] - depth * _ALMOST
        down = np.flatnonzero(density <= level)
        after = int(np.searchsorted(down, place))
        left = down[after - 1] + 1 if after else 0
        right = down[after] if after < len(down) else len(density)
        mass = float(density[left:right].sum())
        if mass - level * (right - left) >= max(enough, MODE_ERRORS_MIN * sqrt(mass)):
            centres.append(float((edges[place] + edges[place + 1]) / 2))
    return centres or [float(np.median(data))]


@dataclass(frozen=True, slots=True)
class Tail:
    """Tail of a distribution: its `n` largest values, which are above `threshold`."""

    ratio: float | None
    """P99 / P50 (IETF draft, 5.4.4.3); None without values, or if P50 is 0."""
    kind: Literal["light", "exponential", "heavy"] | None
    """Comparison with an exponential tail, by the interval of `shape`: light if it is below 0, exponential if
    it contains 0, heavy if it is above 0. None with fewer than 50 values in the tail (500 values in all)."""
    shape: float | None
    """Shape parameter of the generalised Pareto distribution fitted to the values above `threshold`. 0: an
    exponential tail; above 0: a power law with exponent 1 / shape; below 0: a tail with a maximum."""
    low: float | None
    """`low` and `high`: limits of the 95 % interval of `shape`."""
    high: float | None
    threshold: float | None
    """Smallest value of the tail; None without a tail."""
    n: int


def tail(values: Sequence[float]) -> Tail:
    """Return the tail of values in any order: the largest tenth of them, at most 2,000 values.

    `Tail.shape` is the maximum likelihood estimate for independent values. Source: Pickands 1975; Smith 1987
    (the interval).
    """
    data = np.sort(np.asarray(values, dtype=float))
    if not len(data):
        return Tail(None, None, None, None, None, None, 0)
    p50, p99 = np.quantile(data, (0.5, 0.99))
    ratio = tail_ratio(float(p50), float(p99))
    n = min(int(len(data) * TAIL_SHARE), TAIL_VALUES_MAX)
    if n < TAIL_VALUES_MIN:
        return Tail(ratio, None, None, None, None, None, n)
    threshold = float(data[-n - 1])
    beyond = data[-n:] - threshold
    if beyond[0] == beyond[-1]:  # Equal values have no shape that can be fitted.
        return Tail(ratio, "light", None, None, None, threshold, n)
    shape, _, _ = stats.genpareto.fit(beyond / beyond.mean(), 0.1, floc=0)
    reach = float(stats.norm.ppf(0.975)) * max(0.0, 1 + shape) / sqrt(n)
    low, high = float(shape - reach), float(shape + reach)
    kind: Literal["light", "exponential", "heavy"] = (
        "heavy" if low > 0 else "light" if high < 0 else "exponential"
    )
    return Tail(ratio, kind, float(shape), low, high, threshold, n)

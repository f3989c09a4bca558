"""Statistical tests of two samples of latencies, with the size of the difference and its interval.

For `llmtap bench`: the functions compare the values of two systems, a (the base) and b, and return a
`Comparison`; a difference is b - a. `compare_paired` is for the same requests to both systems, and
`compare_unpaired` for one run of each system with different requests; `compare_quantile` is for both cases.
`compare_runs` is for at least three runs of each system (IETF 6.3). `adjusted_p_values` corrects the p-values
of many comparisons. `reduction`, `increase` and `cache_hit_rate` are ratios of two figures. Arms of a running
experiment are compared in `experiment.py`. The Hodges-Lehmann shift is found by counting pairs of values
instead of listing them, because 10,000 values have 50 to 100 million pairs.

Source: IETF draft, 5.7.4, 5.10.4 and 6.3; Hodges and Lehmann 1963; Hollander, Wolfe and Chicken 2014, 3.2,
3.3 and 4.2; Brunner and Munzel 2000.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from math import ceil, floor, inf, isfinite, sqrt
from typing import Final, Literal
from warnings import catch_warnings, simplefilter

import numpy as np
from numpy.typing import NDArray
from scipy import stats

Values = NDArray[np.float64]


def reduction(base: float | None, other: float | None) -> float | None:
    """Return (base - other) / base, such as the relative reduction of TTFT by a cache. None if a figure is
    None, or if the base is 0."""
    if base is None or other is None or not base:
        return None
    return (base - other) / base


def increase(base: float | None, other: float | None) -> float | None:
    """Return (other - base) / base, such as the relative increase of throughput by a cache."""
    less = reduction(base, other)
    return None if less is None else -less


def difference(base: float | None, other: float | None) -> float | None:
    """Return other - base, such as the time that an input filter adds to TTFT; None if a figure is None."""
    return None if base is None or other is None else other - base


def overhead(base: Sequence[float | None], other: Sequence[float | None]) -> list[float | None]:
    """Return the `difference` of each pair of figures in two rows, such as rows of percentiles."""
    return [difference(b, o) for b, o in zip(base, other, strict=True)]


def cache_hit_rate(cached_tokens: int, prefix_tokens: int) -> float | None:
    """Return the share of prefix tokens that came from the cache; None without a prefix."""
    return cached_tokens / prefix_tokens if prefix_tokens else None


EXACT_MAX: Final = 50
"""Maximum number of pairs for which the distribution of signed ranks is computed exactly, as in SciPy. For
more pairs, the normal approximation is used."""
HALVINGS: Final = 60
"""Number of bisections of the range of all sums (`_PairSums.kth`): enough for the precision of a float."""


@dataclass(frozen=True, slots=True)
class Shift:
    """Distance of the second sample from the first, in the unit of the values, with its interval."""

    value: float
    low: float
    """Lower limit of the confidence interval."""
    high: float


def paired_shift(differences: Values, level: float) -> Shift | None:
    """Return the shift of pairs from their differences; None with too few pairs for `level` (6 for 95 %).

    The interval contains the shifts that the signed-rank test would not reject.
    """
    n = len(differences)
    outside = _signed_rank_outside(n, (1 - level) / 2)
    if outside < 0:
        return None
    x = np.sort(differences)
    sums = _PairSums(x, x, once=True)
    return Shift(sums.median() / 2, sums.kth(outside + 1) / 2, sums.kth(sums.total - outside) / 2)


def unpaired_shift(a: Values, b: Values, level: float) -> Shift:
    """Return the shift of two independent samples of at least two values each; their spreads can differ.

    The ends of the shift's interval are two of all differences b_i - a_j. Their ranks follow from the
    interval of P(b > a), by Student's t.
    """
    x, y = np.sort(a), np.sort(b)
    differences = _PairSums(y, -x[::-1], once=False)
    middle = differences.median()
    above, below = placements(x, y - middle)
    va, vb = float(above.var(ddof=1)) / len(x), float(below.var(ddof=1)) / len(y)
    error = sqrt(va + vb)
    if error == 0:  # The estimate has no variance, so the interval is one point.
        return Shift(middle, middle, middle)
    df = (va + vb) ** 2 / (va**2 / (len(x) - 1) + vb**2 / (len(y) - 1))
    reach = float(stats.t.ppf((1 + level) / 2, df)) * error
    low = max(1, floor(differences.total * (0.5 - reach)))
    high = min(differences.total, ceil(differences.total * (0.5 + reach)) + 1)
    return Shift(middle, differences.kth(low), differences.kth(high))


def placements(a: Values, b: Values) -> tuple[Values, Values]:
    """Return the share of `b` above each value of `a`, and the share of `a` below each value of `b`.

    Both samples must ascend; equal values count half. The mean of either result is the probability that b
    exceeds a.
    """

    def share_below(values: Values, others: Values) -> Values:
        ranks_below, ranks_upto = (
            np.searchsorted(others, values, "left"),
            np.searchsorted(others, values, "right"),
        )
        share: Values = (ranks_below + ranks_upto) / (2 * len(others))
        return share

    return 1 - share_below(a, b), share_below(b, a)


class _PairSums:
    """All sums x_i + y_j of two ascending arrays, by rank; with `once` (if x is y), only sums with i <= j."""

    def __init__(self, x: Values, y: Values, *, once: bool) -> None:
        self._x, self._y, self._counts_pairs_once = x, y, once
        """Both ascending arrays; `_counts_pairs_once`: they are the same, so each pair counts once."""
        n = len(x)
        self.total = n * (n + 1) // 2 if once else n * len(y)
        """Number of sums."""

    def median(self) -> float:
        upper = self.kth(self.total // 2 + 1)
        return upper if self.total % 2 else (self.kth(self.total // 2) + upper) / 2

    def kth(self, k: int) -> float:
        """Return the k-th smallest sum (k counts from 1), by bisection."""
        low, high = float(self._x[0] + self._y[0]), float(self._x[-1] + self._y[-1])
        if self._count(low) >= k:
            return low
        for _ in range(HALVINGS):
            middle = (low + high) / 2
            if self._count(middle) >= k:
                high = middle
            else:
                low = middle
        # Return the largest sum up to `high`, not `high` itself, so that a difference of 0 is exactly 0.
        places = np.searchsorted(self._y, high - self._x, "right") - 1
        in_range = places >= 0
        return float((self._x[in_range] + self._y[places[in_range]]).max())

    def _count(self, limit: float) -> int:
        """Return the number of sums up to `limit`."""
        rest = limit - self._x
        count = int(np.searchsorted(self._y, rest, "right").sum())
        return (count + int((self._x <= rest).sum())) // 2 if self._counts_pairs_once else count


@lru_cache(1_024)
def _signed_rank_outside(n: int, tail: float) -> int:
    """Return the largest s with P(sum of positive ranks <= s) of at most `tail`, for n pairs without shift.

    -1 if even P(sum = 0) is above `tail`.
    """
    if n > EXACT_MAX:
        spread = sqrt(n * (n + 1) * (2 * n + 1) / 24)
        return floor(n * (n + 1) / 4 + float(stats.norm.ppf(tail)) * spread - 0.5)
    chances = np.ones(1)
    for rank in range(1, n + 1):  # With probability 1/2, a rank adds itself to the sum, else 0.
        chances = (np.pad(chances, (0, rank)) + np.pad(chances, (rank, 0))) / 2
    return int(np.searchsorted(np.cumsum(chances), tail, "right")) - 1


BATCH_VALUES_MAX: Final = 1 << 20
"""Maximum number of values that are resampled at a time, to limit the memory to 8 MB."""
UNPAIRED_VALUES_MIN: Final = 10
"""Minimum number of values in each sample of an unpaired test, so that its approximation is valid."""
BEYOND_MIN: Final = 5
"""Minimum number of values on each side of a quantile, in each sample, for a bootstrap. So P50 needs 10
values, and P99 needs 500."""
RUNS_MIN: Final = 3
"""Minimum number of independent runs of each system to compare them by runs (IETF draft, 6.3)."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """Result of a comparison, in the unit of the values."""

    n: int
    m: int
    """`n` and `m`: number of values in the samples a and b; in `compare_runs`, number of runs."""
    a: float
    """Value of the base, with which the other system is compared."""
    b: float
    """`a` and `b`: figure of each sample: its median, its quantile, or the mean over its runs."""
    difference: float
    """Difference b - a; for rank tests the shift, which can differ from the difference of the medians."""
    low: float
    high: float
    """`low` and `high`: limits of the confidence interval of `difference`."""
    p: float
    """Probability of at least this difference, if the systems do not differ."""
    effect: float
    """Effect size without a unit, above 0 if b is greater; `effect_name` is the name of the statistic."""
    effect_name: str
    """Name of the measure of the difference without unit."""
    paired: bool
    """Whether values were compared pair by pair."""
    method: str
    """How the interval was computed, as reports name it."""

    def to_dict(self) -> dict[str, object]:
        return {
            name: None if isinstance(value, float) and not isfinite(value) else value
            for name, value in asdict(self).items()
        }


def compare_paired(
    a: Sequence[float], b: Sequence[float], *, level: float = 0.95, seed: int = 0
) -> Comparison | None:
    """Compare pairs a_i, b_i by signed-rank test, Hodges-Lehmann shift and rank-biserial correlation.

    None with too few pairs for `level` (6 for 95 %). Pairs with a_i = b_i count for neither side (Pratt). For
    up to 50 pairs, p is exact; with ties, it is computed from 9,999 random signs. Source: Wilcoxon 1945;
    Pratt 1959; Kerby 2014.
    """
    assert len(a) == len(b)
    x, y = _sample_array(a), _sample_array(b)
    differences = y - x
    shift = paired_shift(differences, level)
    if shift is None:
        return None
    p, effect = 1.0, 0.0
    if differences.any():
        # Pairs without a difference get ranks, as Pratt proposes, but their sign is 0.
        signed = np.sign(differences) * stats.rankdata(np.abs(differences))
        effect = float(signed.sum() / np.abs(signed).sum())
        if len(x) <= EXACT_MAX and len(np.unique(np.abs(differences))) < len(x):
            p = _sign_flips_p(signed, seed)
        else:
            p = float(stats.wilcoxon(differences, zero_method="pratt").pvalue)
    method = "Wilcoxon's signed ranks, Hodges-Lehmann shift"
    return _rank_comparison(x, y, shift, p, effect, "rank-biserial correlation", True, method)


def _rank_comparison(
    x: Values, y: Values, shift: Shift, p: float, effect: float, effect_name: str, paired: bool, method: str
) -> Comparison:
    """Return the result of a rank test; its difference is the shift."""
    medians = float(np.median(x)), float(np.median(y))
    ends = shift.value, shift.low, shift.high
    return Comparison(len(x), len(y), *medians, *ends, p, effect, effect_name, paired, method)


def _sign_flips_p(signed: Values, seed: int) -> float:
    """Return the p-value of signed ranks with ties, from all combinations of signs, or 9,999 random ones."""

    def total(values: Values, axis: int) -> Values:
        summed: Values = values.sum(axis=axis)
        return summed

    result = stats.permutation_test(
        (signed,),
        total,
        permutation_type="samples",
        vectorized=True,
        n_resamples=9_999,
        rng=np.random.default_rng(seed),
    )
    return float(result.pvalue)


def compare_unpaired(a: Sequence[float], b: Sequence[float], *, level: float = 0.95) -> Comparison | None:
    """Compare independent samples by Brunner-Munzel test, Hodges-Lehmann shift and Cliff's delta.

    None if a sample has fewer than 10 values. Mann and Whitney's test is used only for samples that do not
    overlap, since it can report a system with a larger variance as a slower one. Source: Brunner and Munzel
    2000; Cliff 1993.
    """
    if min(len(a), len(b)) < UNPAIRED_VALUES_MIN:
        return None
    x, y = _sample_array(a), _sample_array(b)
    shift = unpaired_shift(x, y, level)
    _, below = placements(np.sort(x), np.sort(y))
    delta = 2 * float(below.mean()) - 1
    method = "Brunner and Munzel, Hodges-Lehmann shift"
    if x.min() == y.max() and x.max() == y.min():
        p = 1.0  # All values are equal, for which the test is not defined.
    else:
        with catch_warnings(), np.errstate(all="ignore"):
            simplefilter("ignore")  # SciPy warns about samples without overlap; the code below handles these.
            p = float(stats.brunnermunzel(x, y).pvalue)
        if abs(delta) == 1 or not isfinite(p):
            p = float(stats.mannwhitneyu(x, y, method="asymptotic").pvalue)
            method = "Mann and Whitney (no overlap), Hodges-Lehmann shift"
    return _rank_comparison(x, y, shift, p, delta, "Cliff's delta", False, method)


def compare_quantile(
    a: Sequence[float],
    b: Sequence[float],
    p: float,
    *,
    paired: bool,
    level: float = 0.95,
    resamples: int = 2_000,
    seed: int = 0,
) -> Comparison | None:
    """Compare the p-th quantiles of two samples by bootstrap; with `paired`, pairs are resampled together.

    None if a sample has fewer than 5 values beyond the quantile. `Comparison.p` is 1 minus the level at which
    the interval would end at 0, and at least 2 / (resamples + 1). Source: Efron and Tibshirani 1993, 13;
    Wilcox 1995.
    """
    assert not paired or len(a) == len(b)
    fewest = min(len(a), len(b))
    if round(fewest * min(p, 1 - p), 6) < BEYOND_MIN:
        return None
    x, y = _sample_array(a), _sample_array(b)

    def quantile_difference(base: Values, other: Values, axis: int = -1) -> Values:
        difference: Values = np.quantile(other, p, axis=axis) - np.quantile(base, p, axis=axis)
        return difference

    with catch_warnings():
        simplefilter("ignore")  # SciPy warns about samples without variance, but their interval is one point.
        drawn = stats.bootstrap(
            (x, y),
            quantile_difference,
            vectorized=True,
            paired=paired,
            n_resamples=resamples,
            method="percentile",
            confidence_level=level,
            batch=max(1, BATCH_VALUES_MAX // max(len(x), len(y))),
            rng=np.random.default_rng(seed),
        )
    differences = drawn.bootstrap_distribution
    rarer = min(int((differences <= 0).sum()), int((differences >= 0).sum()))
    quantile_a, quantile_b = float(np.quantile(x, p)), float(np.quantile(y, p))
    ends = drawn.confidence_interval
    return Comparison(
        len(x),
        len(y),
        quantile_a,
        quantile_b,
        quantile_b - quantile_a,
        float(ends.low),
        float(ends.high),
        min(1.0, 2 * (rarer + 1) / (resamples + 1)),
        _ratio_of(quantile_b - quantile_a, quantile_a),
        "share of a",
        paired,
        f"bootstrap of the difference of P{100 * p:g}",
    )


def compare_runs(
    a_runs: Sequence[float], b_runs: Sequence[float], *, level: float = 0.95
) -> Comparison | None:
    """Compare one figure of each run by Welch's t and Hedges' g; None with fewer than three runs of a system.

    If the runs of each system are equal (an engine in virtual time), p is 0 or 1. Source: Welch 1947; Hedges
    1981.
    """
    n, m = len(a_runs), len(b_runs)
    if min(n, m) < RUNS_MIN:
        return None
    x, y = _sample_array(a_runs), _sample_array(b_runs)
    mean_a, mean_b = float(x.mean()), float(y.mean())
    difference = mean_b - mean_a
    spread = sqrt(((n - 1) * x.var(ddof=1) + (m - 1) * y.var(ddof=1)) / (n + m - 2))
    if np.ptp(x) == np.ptp(y) == 0:
        difference = float(y[0] - x[0])
        low = high = difference
        p = 1.0 if difference == 0 else 0.0
        spread = 0.0
    else:
        test = stats.ttest_ind(y, x, equal_var=False)
        p, ends = float(test.pvalue), test.confidence_interval(level)
        low, high = float(ends.low), float(ends.high)
    hedges = (1 - 3 / (4 * (n + m) - 9)) * _ratio_of(difference, spread)
    return Comparison(
        n, m, mean_a, mean_b, difference, low, high, p, hedges, "Hedges' g", False, "Welch's t over runs"
    )


def adjusted_p_values(ps: Sequence[float], method: Literal["holm", "bh"] = "holm") -> list[float]:
    """Return the p-values of several comparisons, corrected for their number, in the same order.

    `holm` limits the probability of any false finding, `bh` the expected share of false findings. Source:
    Holm 1979; Benjamini and Hochberg 1995.
    """
    if not ps:
        return []
    if method == "bh":
        return [float(p) for p in stats.false_discovery_control(ps, method="bh")]
    corrected = [0.0] * len(ps)
    lower_bound = 0.0
    for place, i in enumerate(sorted(range(len(ps)), key=ps.__getitem__)):
        lower_bound = max(lower_bound, min(1.0, (len(ps) - place) * ps[i]))
        corrected[i] = lower_bound
    return corrected


def _sample_array(values: Sequence[float]) -> Values:
    return np.asarray(values, dtype=float)


def _ratio_of(part: float, whole: float) -> float:
    if whole:
        return part / whole
    return 0.0 if not part else inf if part > 0 else -inf

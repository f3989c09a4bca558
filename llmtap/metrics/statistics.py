"""Basic statistics: percentiles and means, few samples, Student's t, sequential tests, arrival times.

Functions of lists of values or of a `Histogram`, used by the meter, benchmarks and reports. Tests of two
samples are in `comparison.py`, intervals of one run in `intervals.py`, experiments in `experiment.py`.

Percentiles interpolate linearly at rank (n - 1) p (numpy's default) everywhere. The summary of nothing is
None. A confidence sequence (interval valid at every look) is wrong at any moment with probability alpha at
most; 1 / e of an e-value is a p-value at any stopping time (Ville). Student's t is computed here, because
importing SciPy takes as long as the meter's start.

`arrival_figures` takes times in ns, `punctuality` planned and actual send times; the result of a replay has
both. The gaps of a Poisson process are exponential and independent: coefficient of variation 1, small
Kolmogorov-Smirnov distance and autocorrelations. Each figure comes with its limit under pure chance.

Source: Waudby-Smith, Arbour, Sinha, Kennedy, Ramdas 2021, theorem 2.2; Lindon and Malek 2020, "Anytime-valid
inference for multinomial count data".
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from math import ceil, exp, lgamma, log, pi, sqrt, tan
from operator import mul
from statistics import NormalDist
from typing import Final

from llmtap.errors import ConfigError
from llmtap.metrics.histogram import Histogram

SHARES: Final = {"p50": 0.50, "p90": 0.90, "p95": 0.95, "p99": 0.99, "p999": 0.999}
BEYOND_MIN: Final = 10
"""Samples required beyond a percentile: 1,000 in all for P99, 10,000 for P99.9, as in the draft (5.1.4.3); by
the same rule 20 for P50 and 100 for P90, for which it has no number."""


def percentile(ordered: Sequence[float], p: float) -> float | None:
    """Return the value at rank (n - 1) p of ascending values, interpolated; None without values."""
    if not ordered:
        return None
    rank = (len(ordered) - 1) * p
    lower = int(rank)
    low, high = ordered[lower], ordered[min(lower + 1, len(ordered) - 1)]
    return low + (high - low) * (rank - lower)


PERCENTILE_RULES: Final = (
    "linear", "nearest_rank", "hazen", "weibull", "median_unbiased", "lower", "higher", "nearest",
)  # fmt: skip
"""Rules of `percentile_by`: types 7, 1, 5, 6 and 8 of Hyndman and Fan, and numpy's three others."""

_ROUNDING: Final = 1e-9
"""Tolerance of a rank: in binary, 0.07 x 100 is slightly above 7, but rank 7 is meant."""


def percentile_by(rule: str, ordered: Sequence[float], p: float) -> float | None:
    """Return the percentile by another rule of `PERCENTILE_RULES`, to check figures of other tools.

    Source: Hyndman and Fan 1996, "Sample quantiles in statistical packages"; numpy's names.
    """
    assert rule in PERCENTILE_RULES
    n = len(ordered)
    if not n:
        return None
    rank = (n - 1) * p
    match rule:
        case "linear":
            return percentile(ordered, p)
        case "lower":
            return ordered[int(rank + _ROUNDING)]
        case "higher":
            return ordered[ceil(rank - _ROUNDING)]
        case "nearest":
            return ordered[round(rank)]  # halves go to the even rank, as in numpy
        case "nearest_rank":
            return ordered[max(0, ceil(n * p - _ROUNDING) - 1)]
    shift, grow = {"hazen": (0.5, 0.0), "weibull": (0.0, 1.0), "median_unbiased": (1 / 3, 1 / 3)}[rule]
    place = min(max((n + grow) * p + shift, 1.0), n) - 1
    lower = int(place)
    low, high = ordered[lower], ordered[min(lower + 1, n - 1)]
    return low + (high - low) * (place - lower)


def mean(values: Sequence[float]) -> float | None:
    """Return the arithmetic mean; None without values."""
    return sum(values) / len(values) if values else None


def deviation(values: Sequence[float], *, sample: bool = False) -> float | None:
    """Return the standard deviation of a population (over n) or sample (over n - 1); None with too few
    values.
    """
    n = len(values)
    if n < (2 if sample else 1):
        return None
    middle = sum(values) / n
    return sqrt(sum((value - middle) ** 2 for value in values) / (n - 1 if sample else n))


def tail_ratio(p50: float | None, p99: float | None) -> float | None:
    """Return P99 / P50; None if either is missing or the median is 0. Source: IETF draft, 5.4.4.3."""
    return None if p99 is None or not p50 else p99 / p50


def samples_needed(p: float) -> int:
    """Return the samples that a report of the p-th percentile needs: 1,000 for P99 (IETF draft, 5.1.4.3)."""
    assert 0 < p < 1
    # Round first: in binary, 1 - 0.9 is a little less than 0.1, so ceil() would return one sample too many.
    return ceil(round(BEYOND_MIN / (1 - p), 6))


def is_enough(n: int, p: float) -> bool:
    """Return whether `n` samples are enough for the p-th percentile."""
    return n >= samples_needed(p)


def marks(n: int, shares: Mapping[str, float] = SHARES) -> list[str]:
    """Return the names of the percentiles for which `n` samples are too few."""
    return [name for name, p in shares.items() if not is_enough(n, p)]


def parse_percentiles(text: str, place: str) -> dict[str, float]:
    """Return the shares of `25,75,99.5` by name: `p25`, `p75`, `p995`. Raises ConfigError."""
    shares = {}
    for word in text.replace(",", " ").split():
        number = float(word) if re.fullmatch(r"\d+(\.\d+)?", word) else 0.0
        if not 0 < number < 100:
            raise ConfigError(
                place, f"expected a percentile above 0 and below 100, got {word!r}", "such as 25,75,99.5"
            )
        # Write two digits before the point, so that the names of 9.95 and 99.5 differ: `p0995` and `p995`.
        whole, point, rest = f"{number:g}".partition(".")
        shares[f"p{whole.zfill(2) if point else whole}{rest}"] = number / 100
    return shares


def summarise_ns(histogram: Histogram, more: Mapping[str, float] | None = None) -> dict[str, object]:
    """Return the summary of a histogram of nanoseconds, in seconds.

    `n, mean, min, max, p50, p90, p95, p99, p999` and `marks`, the names of the percentiles from too few
    samples. Without samples every figure is None and `marks` is empty. `more`: further percentiles, as from
    `parse_percentiles`.
    """
    n = histogram.n
    shares = {**SHARES, **(more or {})}
    values = histogram.percentiles(tuple(shares.values()))
    figures = {"mean": histogram.mean, "min": histogram.min, "max": histogram.max}
    figures.update(zip(shares, values, strict=True))
    seconds = {name: None if value is None else value / 1e9 for name, value in figures.items()}
    return {"n": n, **seconds, "marks": marks(n, shares) if n else []}


Interval = tuple[float, float]

_COUNT_EXACT: Final = 0.01
"""Precision to which `count_range` finds the bound of a count."""
_DEVIATIONS: Final = 12.0
"""Number of standard deviations up to which `t_quantile` sums. This cuts only distributions with many degrees
of freedom, which have no weight beyond it, like the normal one."""
_ANGLES: Final = 20_001


def share_range(p: float, n: float, z: float | None = None) -> Interval:
    """Return Wilson's interval of a share p of n; z: quantile of the distribution (default: for 95 %)."""
    z = NormalDist().inv_cdf(0.975) if z is None else z
    middle = (p + z * z / (2 * n)) / (1 + z * z / n)
    reach = z * sqrt(p * (1 - p) / n + z * z / (4 * n * n)) / (1 + z * z / n)
    return (middle - reach if p else 0.0), (middle + reach if p < 1 else 1.0)


@lru_cache(1_024)
def t_quantile(alpha: float, df: float) -> float:
    """Return the t that |T| exceeds with probability `alpha` in (0, 1); `df` is 1 or more.

    The angle atan(t / sqrt(df)) has a density proportional to cos^(df - 1), which is summed by trapezoids:
    5 digits, fewer with `df` between 1 and 2.
    """
    import numpy as np  # slow to import, and needed by experiments only

    angles = np.linspace(0, min(pi / 2, _DEVIATIONS / sqrt(df)), _ANGLES)
    density = np.cos(angles) ** (df - 1)
    reached = np.concatenate(([0.0], np.cumsum(density[1:] + density[:-1])))
    return sqrt(df) * tan(np.interp((1 - alpha) * reached[-1], reached, angles))


TIGHTEST_AT: Final = 5_000
"""Number of units in both arms together at which the interval of means is as narrow as possible."""
PRIOR_WEIGHT: Final = 100.0
"""Weight of the Dirichlet prior, as a number of units. With this weight, the test is most sensitive to
deviations of about a tenth of a share, and the first ten units cannot show a mismatch."""
EVENT_PRIOR_WEIGHTS: Final = (2.0, PRIOR_WEIGHT)
"""Prior weights for the units of an event. One arm may cause almost all of them: the smaller weight, which
makes the prior of two equal shares uniform, shows that after few units."""


def _mixture_variance(alpha: float) -> float:
    """Return rho^2, the mixture's variance for the narrowest interval at TIGHTEST_AT.

    In units of one observation's variance. Source: Waudby-Smith et al., the closed form below their equation
    for rho(t*).
    """
    a = -2 * log(alpha)
    return (a + log(a + 1)) / TIGHTEST_AT


def mixture_width(n: int, alpha: float) -> float:
    """Return the number of standard errors that the confidence sequence of a mean of `n` units reaches to
    each side.

    sqrt(2 (n rho^2 + 1) / (n rho^2) log(sqrt(n rho^2 + 1) / alpha)).
    """
    v = n * _mixture_variance(alpha)
    return sqrt(2 * (v + 1) / v * log(sqrt(v + 1) / alpha))


def mixture_e_log(z: float, n: int, alpha: float) -> float:
    """Return the logarithm of the e-value against "the mean is 0", from an estimate `z` standard errors off.

    z^2 n rho^2 / (2 (n rho^2 + 1)) - log(n rho^2 + 1) / 2. It passes log(1 / alpha) exactly when the
    sequence of `mixture_width` leaves 0 out. `alpha` is only the level for which the mixture is tuned.
    """
    v = n * _mixture_variance(alpha)
    return z * z * v / (2 * (v + 1)) - log(v + 1) / 2


def multinomial_e_log(
    counts: Sequence[float], shares: Sequence[float], prior_weight: float = PRIOR_WEIGHT
) -> float:
    """Return the logarithm of the e-value against "each unit falls into cell i with probability shares[i]".

    The Bayes factor of a Dirichlet(prior_weight shares) mixture over the shares themselves. It depends
    on the counts alone, not on their order.
    """
    n = sum(counts)
    e = lgamma(prior_weight) - lgamma(prior_weight + n)
    for count, share in zip(counts, shares, strict=True):
        prior = prior_weight * share
        e += lgamma(prior + count) - lgamma(prior) - count * log(share)
    return e


def events_e_log(counts: Sequence[float], shares: Sequence[float]) -> float:
    """Return the logarithm of the e-value of the mean of `multinomial_e_log`'s e-values, one for each of
    EVENT_PRIOR_WEIGHTS."""
    logs = [multinomial_e_log(counts, shares, weight) for weight in EVENT_PRIOR_WEIGHTS]
    largest = max(logs)
    return largest + log(sum(exp(e - largest) for e in logs) / len(logs))


def count_range(n: float, share: float, alpha: float) -> Interval:
    """Return the range that a count out of `n` units leaves with a probability of at most `alpha`, over all
    looks.

    A unit counts with probability `share`. Inside, the e-value of `multinomial_e_log` is below 1 / alpha.
    """
    limit, expected = log(1 / alpha), n * share

    def end(far: float) -> float:
        inside, outside = expected, far
        if multinomial_e_log((far, n - far), (share, 1 - share)) <= limit:
            return far
        while abs(outside - inside) > _COUNT_EXACT:
            middle = (inside + outside) / 2
            if multinomial_e_log((middle, n - middle), (share, 1 - share)) <= limit:
                inside = middle
            else:
                outside = middle
        return outside

    return end(0.0), end(n)


def anytime_p(e_log: float) -> float:
    """Return the p-value of an e-value given by its logarithm: min(1, 1 / e)."""
    return 1.0 if e_log <= 0 else exp(-e_log)


KS_95: Final = 1.358
"""Limit of Kolmogorov's distance times sqrt(n), which chance exceeds once in twenty times. It is valid if the
rate of the exponential distribution is known in advance."""
KS_95_OWN_MEAN: Final = 1.094
"""Limit as KS_95, if the mean of the exponential is estimated from the values, so that it is nearer to them:
Stephens 1974, "EDF statistics for goodness of fit", for large n."""
LAGS: Final = 20
_SHARES: Final = {"p50": 0.50, "p90": 0.90, "p99": 0.99}


@dataclass(frozen=True, slots=True)
class Autocorrelation:
    value: float
    """Value of largest magnitude, from -1 to 1."""
    lag: int
    limit: float
    """Magnitude that independent gaps exceed once in twenty times."""


@dataclass(frozen=True, slots=True)
class ArrivalFigures:
    """Figures of a sequence of times. A figure that does not apply is None: a single arrival has no gaps."""

    n: int
    span_ns: int
    rate_rps: float | None
    """Number of gaps divided by the span, in 1/s; None if all times are equal."""
    gap_mean_ns: float | None
    gap_min_ns: int | None
    gap_cv: float | None
    """Standard deviation (of the population) of the gaps / their mean; None if all times are equal."""
    ties: float | None
    """Share of the gaps that are 0."""
    ks: float | None
    """Distance of the gaps' distribution to the exponential."""
    ks_limit: float | None
    """Value of `ks` that chance exceeds once in twenty times."""
    ks_rate_rps: float | None
    """Rate of the exponential to which the gaps are compared: the rate that the caller gave, or the rate of
    the gaps."""
    ks_own_mean: bool
    """Whether `ks_rate_rps` is the rate of the gaps; the limit is then KS_95_OWN_MEAN."""
    autocorrelation: Autocorrelation | None

    def to_dict(self) -> dict[str, object]:
        correlation = self.autocorrelation
        return {
            "n": self.n, "span": self.span_ns / 1e9, "rate_rps": self.rate_rps,
            "gap_mean": _seconds(self.gap_mean_ns), "gap_min": _seconds(self.gap_min_ns),
            "gap_cv": self.gap_cv, "ties": self.ties,
            "ks": None if self.ks is None else {
                "distance": self.ks, "limit_95": self.ks_limit, "rate_rps": self.ks_rate_rps,
                "rate_from": "the gaps' mean" if self.ks_own_mean else "what was asked",
            },
            "autocorrelation": None if correlation is None else {
                "value": correlation.value, "lag": correlation.lag, "limit_95": correlation.limit,
            },
        }  # fmt: skip


@dataclass(frozen=True, slots=True)
class Punctuality:
    """Actual send times compared with a plan."""

    planned: int
    sent: int
    planned_rps: float | None
    """Planned gaps divided by the span of the planned times, in 1/s."""
    achieved_rps: float | None
    """Gaps between sent requests divided by the span of their send times, in 1/s."""
    ratio: float | None
    """Achieved / planned rate, below 1 if requests were late or omitted; None if either rate is None."""
    late_ns: Mapping[str, float]
    """Send minus planned time of sent requests: mean, min, max, p50, p90, p99; empty if none was sent."""
    early: int
    """Number of requests that were sent before their time."""


def arrival_figures(times_ns: Sequence[int], *, rate_rps: float | None = None) -> ArrivalFigures:
    """Return the figures of arrivals at these times, in any order.

    `rate_rps`: rate of the exponential to compare with; None: that of the gaps.
    """
    ordered = sorted(times_ns)
    gaps = [b - a for a, b in pairwise(ordered)]
    n, span_ns = len(gaps), ordered[-1] - ordered[0] if ordered else 0
    own_rps = _rate_of(ordered)
    law_rps = own_rps if rate_rps is None else rate_rps
    spread = deviation(gaps)
    known = n > 0 and law_rps is not None
    return ArrivalFigures(
        n=len(ordered),
        span_ns=span_ns,
        rate_rps=own_rps,
        gap_mean_ns=span_ns / n if n else None,
        gap_min_ns=min(gaps) if n else None,
        gap_cv=None if spread is None or not span_ns else spread * n / span_ns,
        ties=gaps.count(0) / n if n else None,
        ks=ks_exponential(gaps, law_rps) if law_rps is not None else None,
        ks_limit=(KS_95 if rate_rps is not None else KS_95_OWN_MEAN) / sqrt(n) if known else None,
        ks_rate_rps=law_rps if known else None,
        ks_own_mean=rate_rps is None,
        autocorrelation=strongest_autocorrelation(gaps),
    )


def ks_exponential(gaps_ns: Sequence[int], rate_rps: float) -> float | None:
    """Return the largest distance between the share of gaps up to x and 1 - exp(-rate x); None without gaps.

    Gaps of 0 count fully: if a third are 0, the distance is at least a third.
    """
    n = len(gaps_ns)
    if not n:
        return None
    far = 0.0
    for i, gap_ns in enumerate(sorted(gaps_ns)):
        law = 1 - exp(-rate_rps * gap_ns / 1e9)
        # Take the distance just before this gap, and at it. Of equal gaps the first and the last decide.
        far = max(far, law - i / n, (i + 1) / n - law)
    return far


def strongest_autocorrelation(gaps_ns: Sequence[int], lags: int = LAGS) -> Autocorrelation | None:
    """Return the most significant autocorrelation of the lags 1 to `lags`; None with too few or equal gaps.

    r(k) = sum of d(i) d(i + k) / sum of d(i)^2, d being distances from the mean. Gaps that differ by 1 ns are
    equal.
    """
    n = len(gaps_ns)
    if n <= lags:
        return None
    middle = sum(gaps_ns) / n
    d = [gap - middle for gap in gaps_ns]
    whole = sum(map(mul, d, d))
    if max(gaps_ns) - min(gaps_ns) <= 1:
        return None
    correlations = [sum(map(mul, d, d[lag:])) / whole for lag in range(1, lags + 1)]
    value = max(correlations, key=abs)
    # The r of independent gaps is about normal with deviation 1 / sqrt(n). Bonferroni's correction allows for
    # the choice of the largest of `lags` values.
    limit = NormalDist().inv_cdf(1 - 0.05 / (2 * lags)) / sqrt(n)
    return Autocorrelation(value, correlations.index(value) + 1, limit)


def punctuality(planned_ns: Sequence[int], sent_ns: Sequence[int | None]) -> Punctuality:
    """Compare send times with the plan, row by row; None is a row that was not sent.

    Both count from one moment. Raises ValueError for different numbers of rows.
    """
    late = sorted(s - p for p, s in zip(planned_ns, sent_ns, strict=True) if s is not None)
    planned_rps = _rate_of(planned_ns)
    achieved_rps = _rate_of([t for t in sent_ns if t is not None])
    figures: dict[str, float] = {}
    if late:
        figures = {"mean": sum(late) / len(late), "min": late[0], "max": late[-1]}
        for name, p in _SHARES.items():
            value = percentile(late, p)
            assert value is not None
            figures[name] = value
    return Punctuality(
        planned=len(planned_ns), sent=len(late), planned_rps=planned_rps, achieved_rps=achieved_rps,
        ratio=achieved_rps / planned_rps if planned_rps and achieved_rps else None,
        late_ns=figures, early=sum(ns < 0 for ns in late),
    )  # fmt: skip


def rate_rps(n: int, span_ns: int) -> float | None:
    """Return the rate of `n` events whose first and last are `span_ns` apart: gaps / span.

    Not n / span: n events at a constant rate have n - 1 gaps between them. None without a gap.
    """
    return (n - 1) * 1e9 / span_ns if n > 1 and span_ns > 0 else None


def _rate_of(times_ns: Sequence[int]) -> float | None:
    return rate_rps(len(times_ns), max(times_ns) - min(times_ns)) if times_ns else None


def _seconds(ns: float | None) -> float | None:
    return None if ns is None else ns / 1e9

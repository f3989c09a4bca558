"""Basic statistics: percentiles, means, minimum sample sizes, Student's t, sequential tests, arrival times.

The meter, benchmarks and reports call these functions with lists of values or a `Histogram`. Tests of two
samples are in `comparison.py`, intervals of one run in `intervals.py`, experiments in `experiment.py`.

All percentiles interpolate linearly at rank (n - 1) p, as numpy does by default. Statistics of an empty list
are None. A look is one evaluation of running data. A confidence sequence is an interval for every look: the
probability that any of these intervals is wrong is at most alpha. If e is an e-value, 1 / e is a p-value at
every look (Ville). Student's t is computed here, because the import of SciPy takes as long as the meter's
start.

`arrival_figures` describes the times of arrivals, and `punctuality` compares planned with actual send times;
the result of a replay has both. The gaps between the arrivals of a Poisson process are exponential and
independent: their coefficient of variation is 1, and their Kolmogorov-Smirnov distance and autocorrelations
are small. Each of these figures has a limit, which chance exceeds once in twenty times.

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
"""Minimum number of samples beyond a percentile. So P99 needs 1,000 samples and P99.9 10,000, as in the IETF
draft (5.1.4.3). By the same rule, P50 needs 20 and P90 100; the draft has no limits for these."""


def percentile(ordered: Sequence[float], p: float) -> float | None:
    """Return the value at rank (n - 1) p of ascending values, interpolated; None without values."""
    if not ordered:
        return None
    rank = (len(ordered) - 1) * p
    lower = int(rank)
    low, high = ordered[lower], ordered[min(lower + 1, len(ordered) - 1)]
    return low + (high - low) * (rank - lower)


PERCENTILE_RULES: Final = (
    "linear",
    "nearest_rank",
    "hazen",
    "weibull",
    "median_unbiased",
    "lower",
    "higher",
    "nearest",
)
"""Rules of `percentile_by`: types 7, 1, 5, 6 and 8 of Hyndman and Fan, and three more of numpy."""

_ROUNDING: Final = 1e-9
"""Tolerance of a rank, for rounding errors: with floats, 0.07 x 100 is slightly above 7."""


def percentile_by(rule: str, ordered: Sequence[float], p: float) -> float | None:
    """Return the percentile by a rule of `PERCENTILE_RULES`, to reproduce the figures of other tools.

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
            return ordered[round(rank)]  # A rank of k + 0.5 is rounded to the even number, as in numpy.
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
    """Return the standard deviation of a population (divisor n) or sample (n - 1); None if n is too small."""
    n = len(values)
    if n < (2 if sample else 1):
        return None
    middle = sum(values) / n
    return sqrt(sum((value - middle) ** 2 for value in values) / (n - 1 if sample else n))


def tail_ratio(p50: float | None, p99: float | None) -> float | None:
    """Return P99 / P50; None if either is None, or if P50 is 0. Source: IETF draft, 5.4.4.3."""
    return None if p99 is None or not p50 else p99 / p50


def samples_needed(p: float) -> int:
    """Return the minimum number of samples for the p-th percentile: 1,000 for P99 (IETF draft, 5.1.4.3)."""
    assert 0 < p < 1
    # Round first: in floats, 1 - 0.9 is slightly less than 0.1, so ceil() would return one sample too many.
    return ceil(round(BEYOND_MIN / (1 - p), 6))


def is_enough(n: int, p: float) -> bool:
    """Return whether `n` samples are enough for the p-th percentile."""
    return n >= samples_needed(p)


def marks(n: int, shares: Mapping[str, float] = SHARES) -> list[str]:
    """Return the names of the percentiles that need more than `n` samples; reports mark these figures."""
    return [name for name, p in shares.items() if not is_enough(n, p)]


def parse_percentiles(text: str, place: str) -> dict[str, float]:
    """Parse percentiles such as `25,75,99.5`. Return their shares (0.25) by name (`p25`, `p75`, `p995`).
    Raises ConfigError naming `place`."""
    shares = {}
    for word in text.replace(",", " ").split():
        number = float(word) if re.fullmatch(r"\d+(\.\d+)?", word) else 0.0
        if not 0 < number < 100:
            raise ConfigError(
                place, f"expected a percentile above 0 and below 100, got {word!r}", "such as 25,75,99.5"
            )
        # Write two digits for the integer part, so that 9.95 and 99.5 get different names: `p0995` and
        # `p995`.
        whole, point, rest = f"{number:g}".partition(".")
        shares[f"p{whole.zfill(2) if point else whole}{rest}"] = number / 100
    return shares


def summarise_ns(histogram: Histogram, more: Mapping[str, float] | None = None) -> dict[str, object]:
    """Return the summary of a histogram of nanoseconds, in seconds.

    Its fields are `n`, `mean`, `min`, `max`, `p50`, `p90`, `p95`, `p99`, `p999`, and `marks` (names of the
    percentiles with too few samples). Without samples, every figure is None and `marks` is empty.

    Args:
        more: shares of further percentiles, by name, as `parse_percentiles` returns them.
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
"""Precision with which `count_range` computes the ends of a range, as a number of units."""
_DEVIATIONS: Final = 12.0
"""Number of standard deviations up to which `t_quantile` integrates. With few degrees of
freedom, the whole distribution is within this limit; with more, the rest is too small to matter."""
_ANGLES: Final = 20_001
"""Number of points at which `t_quantile` computes the density: enough for five exact digits."""


def share_range(p: float, n: float, z: float | None = None) -> Interval:
    """Return Wilson's interval of a share `p` of `n` values; `z`: quantile for its level (default: 95 %)."""
    z = NormalDist().inv_cdf(0.975) if z is None else z
    middle = (p + z * z / (2 * n)) / (1 + z * z / n)
    reach = z * sqrt(p * (1 - p) / n + z * z / (4 * n * n)) / (1 + z * z / n)
    return (middle - reach if p else 0.0), (middle + reach if p < 1 else 1.0)


@lru_cache(1_024)
def t_quantile(alpha: float, df: float) -> float:
    """Return the value t that |T| exceeds with probability `alpha`, for Student's T with `df` >= 1 degrees.

    The density of the angle atan(t / sqrt(df)) is proportional to cos^(df - 1), and is integrated by
    trapezoids. The result has 5 exact digits, or fewer if `df` is between 1 and 2.
    """
    import numpy as np  # Imported here, because the import is slow and only experiments need it.

    angles = np.linspace(0, min(pi / 2, _DEVIATIONS / sqrt(df)), _ANGLES)
    density = np.cos(angles) ** (df - 1)
    reached = np.concatenate(([0.0], np.cumsum(density[1:] + density[:-1])))
    return sqrt(df) * tan(np.interp((1 - alpha) * reached[-1], reached, angles))


TIGHTEST_AT: Final = 5_000
"""Number of units in both arms together for which the anytime interval of means is narrowest."""
PRIOR_WEIGHT: Final = 100.0
"""Weight of the Dirichlet prior, as a number of units. With this weight, the test is most sensitive to
deviations of about a tenth of a share, and the first ten units cannot show a mismatch."""
EVENT_PRIOR_WEIGHTS: Final = (2.0, PRIOR_WEIGHT)
"""Prior weights in the test of the units in which an event occurred. If almost all of these units are in one
arm, the smaller weight shows this after few units: with it, the prior of two equal shares is uniform."""


def _mixture_variance(alpha: float) -> float:
    """Return rho^2, the variance of the mixture, for which the interval is narrowest at TIGHTEST_AT units.

    It is a multiple of the variance of one observation. Source: Waudby-Smith et al., closed form below the
    equation of rho(t*).
    """
    a = -2 * log(alpha)
    return (a + log(a + 1)) / TIGHTEST_AT


def mixture_width(n: int, alpha: float) -> float:
    """Return half the width of the confidence sequence of a mean of `n` units, in standard errors.

    It is sqrt(2 (n rho^2 + 1) / (n rho^2) log(sqrt(n rho^2 + 1) / alpha)).
    """
    v = n * _mixture_variance(alpha)
    return sqrt(2 * (v + 1) / v * log(sqrt(v + 1) / alpha))


def mixture_e_log(z: float, n: int, alpha: float) -> float:
    """Return the logarithm of the e-value against "the mean is 0", for an estimate of `z` standard errors.

    It is z^2 n rho^2 / (2 (n rho^2 + 1)) - log(n rho^2 + 1) / 2, and exceeds log(1 / alpha) exactly when the
    interval of `mixture_width` excludes 0. `alpha` is only the level for which the mixture is tuned.
    """
    v = n * _mixture_variance(alpha)
    return z * z * v / (2 * (v + 1)) - log(v + 1) / 2


def multinomial_e_log(
    counts: Sequence[float], shares: Sequence[float], prior_weight: float = PRIOR_WEIGHT
) -> float:
    """Return the logarithm of the e-value against "each unit falls into cell i with probability shares[i]".

    It is the Bayes factor of a Dirichlet mixture with the parameters `prior_weight * shares` over these fixed
    shares. It depends only on the counts of units in the cells, not on the order of the units.
    """
    n = sum(counts)
    e = lgamma(prior_weight) - lgamma(prior_weight + n)
    for count, share in zip(counts, shares, strict=True):
        prior = prior_weight * share
        e += lgamma(prior + count) - lgamma(prior) - count * log(share)
    return e


def events_e_log(counts: Sequence[float], shares: Sequence[float]) -> float:
    """Return the logarithm of the mean of the e-values of `multinomial_e_log` for EVENT_PRIOR_WEIGHTS: the
    mean of e-values is an e-value, too."""
    logs = [multinomial_e_log(counts, shares, weight) for weight in EVENT_PRIOR_WEIGHTS]
    largest = max(logs)
    return largest + log(sum(exp(e - largest) for e in logs) / len(logs))


def count_range(n: float, share: float, alpha: float) -> Interval:
    """Return the range of a count out of `n` units, if each unit counts with probability `share`.

    The probability that the count is outside its range at any look is at most `alpha`. Inside the range, the
    e-value of `multinomial_e_log` is at most 1 / alpha.
    """
    limit, expected = log(1 / alpha), n * share

    def end_towards(extreme: float) -> float:
        """Return the end of the range on the side of `extreme`, the smallest or the largest count."""
        inside, outside = expected, extreme
        if multinomial_e_log((extreme, n - extreme), (share, 1 - share)) <= limit:
            return extreme
        while abs(outside - inside) > _COUNT_EXACT:
            middle = (inside + outside) / 2
            if multinomial_e_log((middle, n - middle), (share, 1 - share)) <= limit:
                inside = middle
            else:
                outside = middle
        return outside

    return end_towards(0.0), end_towards(n)


def anytime_p(e_log: float) -> float:
    """Return the p-value min(1, 1 / e) of an e-value e, of which `e_log` is the logarithm."""
    return 1.0 if e_log <= 0 else exp(-e_log)


KS_95: Final = 1.358
"""Value of sqrt(n) times Kolmogorov's distance that chance exceeds once in twenty times, if the rate of the
exponential distribution is known in advance."""
KS_95_OWN_MEAN: Final = 1.094
"""As KS_95, if the rate of the exponential distribution is estimated from the values themselves, which makes
the distance smaller. Source: Stephens 1974, "EDF statistics for goodness of fit", for large n."""
LAGS: Final = 20
"""Number of lags for which autocorrelations are computed; the strongest one is reported."""
_LATENESS_SHARES: Final = {"p50": 0.50, "p90": 0.90, "p99": 0.99}


@dataclass(frozen=True, slots=True)
class Autocorrelation:
    """Autocorrelation of the gaps between arrivals at the lag at which its magnitude is largest."""

    value: float
    """Largest correlation, with its sign."""
    lag: int
    """Distance between two gaps, as a number of gaps."""
    limit: float
    """Magnitude that independent gaps exceed once in twenty times."""


@dataclass(frozen=True, slots=True)
class ArrivalFigures:
    """Figures of `n` arrival times. A figure that does not apply is None: a single arrival has no gaps."""

    n: int
    span_ns: int
    """Time from the first to the last arrival."""
    rate_rps: float | None
    """Number of gaps divided by the span, in 1/s; None if all times are equal."""
    gap_mean_ns: float | None
    gap_min_ns: int | None
    """Smallest gap between two arrivals."""
    gap_cv: float | None
    """Standard deviation (of the population) of the gaps / their mean; None if all times are equal."""
    ties: float | None
    """Share of the gaps that are 0, between requests that arrive at the same time."""
    ks: float | None
    """Kolmogorov-Smirnov distance between the distribution of the gaps and an exponential distribution."""
    ks_limit: float | None
    """Value of `ks` that chance exceeds once in twenty times."""
    ks_rate_rps: float | None
    """Rate of the exponential distribution: the rate that the caller gave, or else the rate of the gaps."""
    ks_own_mean: bool
    """Whether `ks_rate_rps` is the rate of the gaps; the limit is then KS_95_OWN_MEAN."""
    autocorrelation: Autocorrelation | None

    def to_dict(self) -> dict[str, object]:
        correlation = self.autocorrelation
        return {
            "n": self.n,
            "span": self.span_ns / 1e9,
            "rate_rps": self.rate_rps,
            "gap_mean": _seconds(self.gap_mean_ns),
            "gap_min": _seconds(self.gap_min_ns),
            "gap_cv": self.gap_cv,
            "ties": self.ties,
            "ks": None
            if self.ks is None
            else {
                "distance": self.ks,
                "limit_95": self.ks_limit,
                "rate_rps": self.ks_rate_rps,
                "rate_from": "the gaps' mean" if self.ks_own_mean else "what was asked",
            },
            "autocorrelation": None
            if correlation is None
            else {
                "value": correlation.value,
                "lag": correlation.lag,
                "limit_95": correlation.limit,
            },
        }


@dataclass(frozen=True, slots=True)
class Punctuality:
    """Send times of requests, compared with their plan. `planned`, `sent`, `early`: numbers of requests."""

    planned: int
    """Number of planned requests."""
    sent: int
    planned_rps: float | None
    """Number of gaps between planned times, divided by the span of these times, in 1/s."""
    achieved_rps: float | None
    """Number of gaps between send times, divided by the span of these times, in 1/s."""
    ratio: float | None
    """Achieved / planned rate: below 1 if requests were late or not sent; None if either rate is None."""
    late_ns: Mapping[str, float]
    """Statistics of send time - planned time: mean, min, max, p50, p90, p99; empty if no request was sent."""
    early: int
    """Number of requests that were sent before their planned time."""


def arrival_figures(times_ns: Sequence[int], *, rate_rps: float | None = None) -> ArrivalFigures:
    """Return the figures of arrivals at these times, which can be in any order.

    `rate_rps`: rate of the exponential distribution to which the gaps are compared; None: rate of the gaps.
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
    """Return the Kolmogorov-Smirnov distance of gaps to the exponential distribution; None without gaps.

    It is the largest difference between the share of gaps up to x and 1 - exp(-rate x). If a third of the
    gaps are 0, the distance is at least a third.
    """
    n = len(gaps_ns)
    if not n:
        return None
    distance = 0.0
    for i, gap_ns in enumerate(sorted(gaps_ns)):
        law = 1 - exp(-rate_rps * gap_ns / 1e9)
        # The observed share jumps from i / n to (i + 1) / n at each gap: compare both values with the law.
        distance = max(distance, law - i / n, (i + 1) / n - law)
    return distance


def strongest_autocorrelation(gaps_ns: Sequence[int], lags: int = LAGS) -> Autocorrelation | None:
    """Return the autocorrelation of largest magnitude at the lags 1 to `lags`.

    At lag k, it is the sum of d(i) d(i + k) / the sum of d(i)^2, where d(i) is gap i minus the mean gap. None
    with too few gaps, or if all gaps are equal to within 1 ns.
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
    # An autocorrelation of independent gaps is nearly normal with deviation 1 / sqrt(n). Bonferroni's
    # correction is needed, because the largest of `lags` values is chosen.
    limit = NormalDist().inv_cdf(1 - 0.05 / (2 * lags)) / sqrt(n)
    return Autocorrelation(value, correlations.index(value) + 1, limit)


def punctuality(planned_ns: Sequence[int], sent_ns: Sequence[int | None]) -> Punctuality:
    """Compare the send time of each request with its planned time; None: the request was not sent.

    Both sequences have one origin of time. Raises ValueError if their lengths differ.
    """
    late = sorted(s - p for p, s in zip(planned_ns, sent_ns, strict=True) if s is not None)
    planned_rps = _rate_of(planned_ns)
    achieved_rps = _rate_of([t for t in sent_ns if t is not None])
    figures: dict[str, float] = {}
    if late:
        figures = {"mean": sum(late) / len(late), "min": late[0], "max": late[-1]}
        for name, p in _LATENESS_SHARES.items():
            value = percentile(late, p)
            assert value is not None
            figures[name] = value
    return Punctuality(
        planned=len(planned_ns),
        sent=len(late),
        planned_rps=planned_rps,
        achieved_rps=achieved_rps,
        ratio=achieved_rps / planned_rps if planned_rps and achieved_rps else None,
        late_ns=figures,
        early=sum(ns < 0 for ns in late),
    )


def rate_rps(n: int, span_ns: int) -> float | None:
    """Return the rate of `n` events, with `span_ns` from the first to the last event: (n - 1) / span.

    It is not n / span, because n events have n - 1 gaps between them. None without a gap.
    """
    return (n - 1) * 1e9 / span_ns if n > 1 and span_ns > 0 else None


def _rate_of(times_ns: Sequence[int]) -> float | None:
    return rate_rps(len(times_ns), max(times_ns) - min(times_ns)) if times_ns else None


def _seconds(ns: float | None) -> float | None:
    return None if ns is None else ns / 1e9

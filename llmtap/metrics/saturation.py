"""Find the load at which a server saturates, fit the growth of latency with length, and judge fairness.

For `llmtap bench`. The rules for saturation (`knee`, `saturation_point`, `peak`, ...) differ; each returns a
load, from measurements at several offered loads (`SaturationLevel`) in ascending order. The `fit_` functions
fit latencies to prompt lengths: by a power k of the length (TTFT ~ L^k, least squares of ln TTFT on ln L),
linearly, and quadratically. The fairness between classes of requests is judged by Jain's index, by the growth
of latency when classes share a server (`inflation`), and by starvation.

Source: IETF draft, 5.2.3.1, 5.3.4, 5.5.3, 5.6.4, 5.9.4.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise
from math import exp, nan
from typing import Final

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from llmtap.metrics.statistics import percentile

Values = NDArray[np.float64]
TAIL_TIMES: Final = 10.0
"""Multiple of the lowest load's P50 above which the P99 of a load is a heavy tail (IETF draft, 5.2.3.1)."""


@dataclass(frozen=True, slots=True)
class SaturationLevel:
    """Measurements at one offered load: tokens/s, latencies in any unit, share of completed requests."""

    offered_rps: float
    """Planned requests per second."""
    achieved_tps: float
    """Output tokens per second."""
    p50: float
    p99: float
    success: float = 1.0
    """Share of the requests that completed."""


def knee(levels: Sequence[SaturationLevel], times: float = 2.0) -> float | None:
    """Return the first load whose P99 exceeds `times` x the smallest P99, if any (IETF draft, 5.3.4)."""
    if not levels:
        return None
    limit = times * min(level.p99 for level in levels)
    return _first_level(levels, lambda level: level.p99 > limit)


def saturation_point(levels: Sequence[SaturationLevel]) -> float | None:
    """Return the first load with less throughput than the load before it, if any (IETF draft, 5.3.4)."""
    for before, level in pairwise(levels):
        if level.achieved_tps < before.achieved_tps:
            return level.offered_rps
    return None


def peak(levels: Sequence[SaturationLevel]) -> float | None:
    """Return the load with the highest throughput (the first of several), as in Table 5 of the IETF draft."""
    return max(levels, key=lambda level: level.achieved_tps).offered_rps if levels else None


def incomplete(levels: Sequence[SaturationLevel], share: float = 0.9) -> float | None:
    """Return the first load at which less than `share` of the requests completed (IETF draft, 5.2.3.1)."""
    return _first_level(levels, lambda level: level.success < share)


def heavy_tail(levels: Sequence[SaturationLevel]) -> float | None:
    """Return the first load whose P99 exceeds TAIL_TIMES x the lowest load's P50 (IETF draft, 5.2.3.1)."""
    return _first_level(levels[1:], lambda level: level.p99 > TAIL_TIMES * levels[0].p50)


def operating_point(
    levels: Sequence[SaturationLevel], meets: Callable[[SaturationLevel], bool]
) -> float | None:
    """Return the load of the highest throughput whose level meets the objectives (IETF draft, 5.3.4)."""
    return peak([level for level in levels if meets(level)])


def capacity(completion: Sequence[tuple[float, float]], share: float = 0.99) -> float | None:
    """Return the highest load at which at least `share` of the requests completed (IETF draft, 5.5.3).

    `completion`: pairs of a load and the share of its requests that completed.
    """
    return max((load for load, completed in completion if completed >= share), default=None)


def _first_level(
    levels: Sequence[SaturationLevel], is_match: Callable[[SaturationLevel], bool]
) -> float | None:
    return next((level.offered_rps for level in levels if is_match(level)), None)


@dataclass(frozen=True, slots=True)
class PowerFit:
    """Fit of y = a x^k."""

    k: float
    """Exponent."""
    a: float
    """Factor of y = a x^k."""
    r2_log: float
    """R^2 of the straight line through the logarithms, in contrast to `r2` of the values themselves."""
    r2: float
    """Share of the variance that the fit explains (R^2)."""
    k_error: float | None
    """Standard error of `k`; None with too few points."""
    k_interval: tuple[float, float] | None
    """95 % interval of k, by Student's t with n - 2 degrees of freedom; None for two points."""


@dataclass(frozen=True, slots=True)
class LinearFit:
    """Two fits: y = slope x + intercept, and y = origin_slope x, a line through the origin."""

    slope: float
    intercept: float
    r2: float
    origin_slope: float
    """Slope of the line through the origin."""
    origin_r2: float
    """R^2 of the line through the origin; like `r2`, relative to the variance about the mean of y."""
    origin_r2_uncentred: float
    """As `origin_r2`, but relative to the squares of y, which makes R^2 too high."""


@dataclass(frozen=True, slots=True)
class QuadraticFit:
    """Fit of y = c2 x^2 + c1 x + c0."""

    c2: float
    c1: float
    c0: float
    r2: float


def fit_power(xs: Sequence[float], ys: Sequence[float]) -> PowerFit:
    """Fit y = a x^k to two or more points with coordinates above 0 and at least two different x."""
    lx, ly = np.log(xs), np.log(ys)
    fit = stats.linregress(lx, ly)
    k, fitted = float(fit.slope), fit.slope * lx + fit.intercept
    error = interval = None
    if len(xs) > 2:
        error = float(fit.stderr)
        half = float(stats.t.ppf(0.975, len(xs) - 2)) * error
        interval = (k - half, k + half)
    return PowerFit(
        k, exp(fit.intercept), r_squared(ly, fitted), r_squared(ys, np.exp(fitted)), error, interval
    )


def fit_linear(xs: Sequence[float], ys: Sequence[float]) -> LinearFit:
    """Fit straight lines, with and without an intercept, to points with at least two different x."""
    x, y = np.asarray(xs, dtype=float), np.asarray(ys, dtype=float)
    fit = stats.linregress(x, y)
    origin = float(x @ y / (x @ x))
    residuals = y - origin * x
    return LinearFit(
        float(fit.slope),
        float(fit.intercept),
        r_squared(y, fit.slope * x + fit.intercept),
        origin,
        r_squared(y, origin * x),
        float(1 - residuals @ residuals / (y @ y)),
    )


def fit_quadratic(xs: Sequence[float], ys: Sequence[float]) -> QuadraticFit:
    """Fit a parabola to points with at least three different x. NumPy scales x, so large x lose no digits."""
    fit = np.polynomial.Polynomial.fit(xs, ys, 2)
    c0, c1, c2 = (float(c) for c in fit.convert().coef)
    return QuadraticFit(c2, c1, c0, r_squared(ys, fit(np.asarray(xs, dtype=float))))


def per_thousand_tokens(
    lengths: Sequence[float], latencies: Sequence[float], thousand: int = 1000
) -> list[float]:
    """Return the latency per 1,000 tokens of context (per 1,024 tokens with `thousand=1024`)."""
    return [latency / length * thousand for length, latency in zip(lengths, latencies, strict=True)]


def r_squared(ys: Sequence[float] | Values, fitted: Sequence[float] | Values) -> float:
    """Return the share of the variance of y about its mean that the fit explains.

    It is below 0 if the mean fits better than `fitted`, and nan if all y are equal.
    """
    y = np.asarray(ys, dtype=float)
    residuals, distances = y - fitted, y - y.mean()
    total = float(distances @ distances)
    return 1 - float(residuals @ residuals) / total if total else nan


UNFAIR_BELOW: Final = 0.9
"""Jain's index below which a server is significantly unfair (IETF draft, 5.6.4)."""
STARVED_MEDIANS: Final = 5.0
"""Multiple of the median wait of a class above which a request was starved (IETF draft, 5.6.4)."""


def jain(values: Sequence[float]) -> float | None:
    """Return Jain's fairness index of the values: (sum x)^2 / (n sum x^2).

    It is 1 if all values are equal, and 1/n if only one is above 0; None without values, or if all are 0.
    """
    squares = sum(x * x for x in values)
    return sum(values) ** 2 / (len(values) * squares) if squares else None


def inflation(mixed: float, isolated: float) -> float | None:
    """Return the latency of a class in mixed traffic / its latency alone; None if the latter is 0."""
    return mixed / isolated if isolated else None


@dataclass(frozen=True, slots=True)
class JainReadings:
    """Jain's index for three definitions of x_i: the draft does not define its "normalized latency" x_i."""

    per_request: float | None
    """With x_i: latency of request i / median latency of its class in isolation."""
    per_class: float | None
    """With x_i: mean latency of class i / median latency of the class in isolation."""
    raw: float | None
    """With x_i: latency of request i. Long requests then make a fair server look unfair."""
    inflation: Mapping[str, float]
    """For each class, its mean latency in mixed traffic / its median latency in isolation."""


def jain_readings(latencies: Mapping[str, Sequence[float]], isolated: Mapping[str, float]) -> JainReadings:
    """Return the indexes from the latencies of each class; `isolated`: its median latency alone, above 0."""
    normal = [value / isolated[name] for name, values in latencies.items() for value in values]
    per_class = {
        name: sum(values) / len(values) / isolated[name] for name, values in latencies.items() if values
    }
    raw = list(chain.from_iterable(latencies.values()))
    return JainReadings(jain(normal), jain(list(per_class.values())), jain(raw), per_class)


@dataclass(frozen=True, slots=True)
class Starvation:
    """Number of starved requests of a class of `n` requests: those that waited longer than `threshold`.

    Report `n` and `median` together with the rate: with a median of 0, every wait counts as starvation.
    """

    n: int
    median: float
    """Median wait of the class."""
    threshold: float
    """Wait above which a request counts as starved."""
    starved_requests: int

    @property
    def rate(self) -> float:
        return self.starved_requests / self.n


def starvation(
    waits: Sequence[float], median: float | None = None, *, medians: float = STARVED_MEDIANS
) -> Starvation | None:
    """Count the requests of a class that waited more than `medians` times the median; None without waits.

    `median`: median to compare with, such as that of all classes; None: the median of `waits`.
    """
    if not waits:
        return None
    if median is None:
        median = percentile(sorted(waits), 0.5)
    assert median is not None
    threshold = medians * median
    return Starvation(len(waits), median, threshold, sum(wait > threshold for wait in waits))

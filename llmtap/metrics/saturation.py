"""Find the load at which a server saturates, fit the growth of latency with length, and judge fairness.

For `llmtap bench`: each rule (`knee`, `saturation_point`, ...) takes the measurements at several offered
loads (`SaturationLevel`), in ascending order, and gives its own answer. The `fit_` functions take lengths and
latencies; the exponent k of TTFT ~ L^k is fitted by least squares of ln TTFT on ln L, and linear and
quadratic fits are added.

Fairness between classes of requests: Jain's index, growth of latency by sharing (`inflation`), starvation.

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


@dataclass(frozen=True, slots=True)
class SaturationLevel:
    """Measurements at one offered load; latencies in any one unit."""

    offered_rps: float
    achieved_tps: float
    p50: float
    p99: float
    success: float = 1.0


def knee(levels: Sequence[SaturationLevel], times: float = 2.0) -> float | None:
    """Return the first load whose P99 exceeds `times` the smallest P99; None if none does (5.3.4)."""
    if not levels:
        return None
    limit = times * min(level.p99 for level in levels)
    return _first_level(levels, lambda level: level.p99 > limit)


def saturation_point(levels: Sequence[SaturationLevel]) -> float | None:
    """Return the first load that achieved less than the previous level; None while throughput grows
    (5.3.4)."""
    for before, level in pairwise(levels):
        if level.achieved_tps < before.achieved_tps:
            return level.offered_rps
    return None


def peak(levels: Sequence[SaturationLevel]) -> float | None:
    """Return the load of the highest throughput (if several loads have it, the first): the point that Table 5
    prints."""
    return max(levels, key=lambda level: level.achieved_tps).offered_rps if levels else None


def incomplete(levels: Sequence[SaturationLevel], share: float = 0.9) -> float | None:
    """Return the first load at which fewer than `share` of the requests completed (5.2.3.1)."""
    return _first_level(levels, lambda level: level.success < share)


def heavy_tail(levels: Sequence[SaturationLevel]) -> float | None:
    """Return the first load whose P99 exceeds TAIL_TIMES the P50 of the lowest load (5.2.3.1)."""
    return _first_level(levels[1:], lambda level: level.p99 > TAIL_TIMES * levels[0].p50)


def operating_point(
    levels: Sequence[SaturationLevel], meets: Callable[[SaturationLevel], bool]
) -> float | None:
    """Return the load of the highest throughput among the levels that meet the objectives (5.3.4)."""
    return peak([level for level in levels if meets(level)])


def capacity(completion: Sequence[tuple[float, float]], share: float = 0.99) -> float | None:
    """Return the highest load, of `(load, share completed)`, at which at least `share` completed (5.5.3)."""
    return max((load for load, completed in completion if completed >= share), default=None)


def _first_level(
    levels: Sequence[SaturationLevel], broken: Callable[[SaturationLevel], bool]
) -> float | None:
    return next((level.offered_rps for level in levels if broken(level)), None)


@dataclass(frozen=True, slots=True)
class PowerFit:
    k: float
    a: float
    r2_log: float
    r2: float
    k_error: float | None
    k_interval: tuple[float, float] | None
    """95 % interval, by Student's t with n - 2 degrees of freedom."""


@dataclass(frozen=True, slots=True)
class LinearFit:
    """y = slope x + intercept, and y = origin_slope x."""

    slope: float
    intercept: float
    r2: float
    origin_slope: float
    origin_r2: float
    """R^2 about the mean, as `r2`. `origin_r2_uncentred` is about 0, which is too favourable."""
    origin_r2_uncentred: float


@dataclass(frozen=True, slots=True)
class QuadraticFit:
    """y = c2 x^2 + c1 x + c0."""

    c2: float
    c1: float
    c0: float
    r2: float


def fit_power(xs: Sequence[float], ys: Sequence[float]) -> PowerFit:
    """Fit the exponent k of y proportional to x^k; two points at least, all above 0, not all x equal."""
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
    """Fit a straight line, with and without an intercept; two points at least, not all x equal."""
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
    """Fit a parabola; three different x at least. NumPy scales x, so no digits are lost from 1 K to 1 M."""
    fit = np.polynomial.Polynomial.fit(xs, ys, 2)
    c0, c1, c2 = (float(c) for c in fit.convert().coef)
    return QuadraticFit(c2, c1, c0, r_squared(ys, fit(np.asarray(xs, dtype=float))))


def per_thousand_tokens(
    lengths: Sequence[float], latencies: Sequence[float], thousand: int = 1000
) -> list[float]:
    """Return latency per 1,000 (with `thousand=1024`, per 1,024) tokens of context."""
    return [latency / length * thousand for length, latency in zip(lengths, latencies, strict=True)]


def r_squared(ys: Sequence[float] | Values, fitted: Sequence[float] | Values) -> float:
    """Return the share of the variance of y about its mean that the fit explains.

    Below 0 if the mean is the better fit; nan if all y are equal.
    """
    y = np.asarray(ys, dtype=float)
    residuals, distances = y - fitted, y - y.mean()
    total = float(distances @ distances)
    return 1 - float(residuals @ residuals) / total if total else nan


UNFAIR_BELOW: Final = 0.9
"""Index below which there is significant unfairness (IETF draft, 5.6.4)."""
STARVED_MEDIANS: Final = 5.0
"""Multiple of its class's median wait from which a request was starved (IETF draft, 5.6.4)."""


def jain(values: Sequence[float]) -> float | None:
    """Return Jain's index (sum x)^2 / (n sum x^2):

    1 if all are equal, 1/n if one has everything; None without values, or if all are 0.
    """
    squares = sum(x * x for x in values)
    return sum(values) ** 2 / (len(values) * squares) if squares else None


def inflation(mixed: float, isolated: float) -> float | None:
    """Return the growth of a class's latency by sharing, mixed / isolated; None if the isolated one is 0."""
    return mixed / isolated if isolated else None


@dataclass(frozen=True, slots=True)
class JainReadings:
    """Jain's index by each meaning of x_i, because the draft does not define its "normalized latency"."""

    per_request: float | None
    """x_i: a request's latency / the isolated median of its class."""
    per_class: float | None
    """x_i: a class's mean latency / its isolated median, one for each class."""
    raw: float | None
    """x_i: a request's latency unchanged; long requests then look unfair by being long."""
    inflation: Mapping[str, float]
    """Mean latency / isolated median, by class."""


def jain_readings(latencies: Mapping[str, Sequence[float]], isolated: Mapping[str, float]) -> JainReadings:
    """Return the readings, from latencies by class and each class's median latency in isolation (above 0)."""
    normal = [value / isolated[name] for name, values in latencies.items() for value in values]
    per_class = {
        name: sum(values) / len(values) / isolated[name] for name, values in latencies.items() if values
    }
    raw = list(chain.from_iterable(latencies.values()))
    return JainReadings(jain(normal), jain(list(per_class.values())), jain(raw), per_class)


@dataclass(frozen=True, slots=True)
class Starvation:
    """Starved requests of a class.

    Report `n` and `median` together with the rate: with a median of 0, any wait counts as starved.
    """

    n: int
    median: float
    threshold: float
    starved: int

    @property
    def rate(self) -> float:
        return self.starved / self.n


def starvation(
    waits: Sequence[float], median: float | None = None, *, medians: float = STARVED_MEDIANS
) -> Starvation | None:
    """Count the requests of a class that waited more than `medians` times the median; None without waits.

    `median` replaces the class's own, for example by that of all classes.
    """
    if not waits:
        return None
    if median is None:
        median = percentile(sorted(waits), 0.5)
    assert median is not None
    threshold = medians * median
    return Starvation(len(waits), median, threshold, sum(wait > threshold for wait in waits))

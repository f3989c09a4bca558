"""Where a service stops keeping up, from measurements at rising load.

Levels are given in ascending order of offered load. Every rule is answered by itself, because the draft's
own example (Table 5) calls the level of highest throughput its saturation point, as none of its rules does.

Source: IETF seed 000, 5.2.3.1 (saturation), 5.3.4 (knee, saturation and operating point), 5.5.3 (capacity).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import exp, log, nan, sqrt

from llmtap.metrics.experiment import t_quantile

__all__ = [
    "LinearFit", "PowerFit", "QuadraticFit", "SaturationLevel", "capacity", "delivered_shares", "fit_linear",
    "fit_power", "fit_quadratic", "heavy_tail", "incomplete", "knee", "local_exponents", "operating_point",
    "peak", "per_thousand_tokens", "r_squared", "saturation_point", "undelivered",
]  # fmt: skip


@dataclass(frozen=True, slots=True)
class SaturationLevel:
    """What was measured at one offered load. Latencies in any one unit."""

    offered_rps: float
    achieved_tps: float
    """Output tokens per second."""
    p50: float
    p99: float
    success: float = 1.0
    """Share of requests that completed, 0 to 1."""


def knee(levels: Sequence[SaturationLevel], times: float = 2.0) -> float | None:
    """The first load whose P99 exceeds `times` the smallest P99 of all levels; None if none does (5.3.4)."""
    if not levels:
        return None
    limit = times * min(level.p99 for level in levels)
    return _first(levels, lambda level: level.p99 > limit)


def saturation_point(levels: Sequence[SaturationLevel]) -> float | None:
    """The first load that achieved less than the level before; None while throughput only grows (5.3.4)."""
    for before, level in pairwise(levels):
        if level.achieved_tps < before.achieved_tps:
            return level.offered_rps
    return None


def peak(levels: Sequence[SaturationLevel]) -> float | None:
    """The load of the highest throughput, the first if several share it: the point that Table 5 prints."""
    return max(levels, key=lambda level: level.achieved_tps).offered_rps if levels else None


def incomplete(levels: Sequence[SaturationLevel], share: float = 0.9) -> float | None:
    """The first load at which fewer than `share` of the requests completed (5.2.3.1)."""
    return _first(levels, lambda level: level.success < share)


def delivered_shares(levels: Sequence[SaturationLevel]) -> list[float]:
    """Tokens achieved / tokens that the load asks for, at the first level's tokens per request."""
    if not levels:
        return []
    per_request = levels[0].achieved_tps / levels[0].offered_rps
    return [level.achieved_tps / (level.offered_rps * per_request) for level in levels]


def undelivered(levels: Sequence[SaturationLevel], share: float = 0.9) -> float | None:
    """The first load whose tokens fall below `share` of what it asks for (5.2.3.1, counted in tokens)."""
    shares = zip(levels, delivered_shares(levels), strict=True)
    return next((level.offered_rps for level, delivered in shares if delivered < share), None)


def heavy_tail(levels: Sequence[SaturationLevel], times: float = 10.0, *, of: str = "lowest") -> float | None:
    """The first load whose P99 exceeds `times` the P50 "at lower load" (5.2.3.1).

    `of="lowest"` compares with the lowest level, `of="previous"` with the one before.
    """
    assert of in ("lowest", "previous")
    for before, level in pairwise(levels):
        p50 = levels[0].p50 if of == "lowest" else before.p50
        if level.p99 > times * p50:
            return level.offered_rps
    return None


def operating_point(
    levels: Sequence[SaturationLevel], meets: Callable[[SaturationLevel], bool]
) -> float | None:
    """The load of the highest throughput among the levels that meet the objectives (5.3.4)."""
    return peak([level for level in levels if meets(level)])


def capacity(completion: Sequence[tuple[float, float]], share: float = 0.99) -> float | None:
    """The highest load, of `(load, share completed)`, at which at least `share` completed (5.5.3)."""
    return max((load for load, completed in completion if completed >= share), default=None)


def _first(levels: Sequence[SaturationLevel], broken: Callable[[SaturationLevel], bool]) -> float | None:
    return next((level.offered_rps for level in levels if broken(level)), None)


@dataclass(frozen=True, slots=True)
class PowerFit:
    """y = A x^k."""

    k: float
    a: float
    r2_log: float
    """Of ln y, in which the fit was made."""
    r2: float
    """Of y itself."""
    k_error: float | None
    """Standard error of k; None with two points."""
    k_interval: tuple[float, float] | None
    """95 % of Student's t with n - 2 degrees of freedom."""


@dataclass(frozen=True, slots=True)
class LinearFit:
    """y = slope x + intercept, and y = origin_slope x."""

    slope: float
    intercept: float
    r2: float
    origin_slope: float
    origin_r2: float
    """Against the mean, as `r2` is; `origin_r2_uncentred` is against 0, which flatters."""
    origin_r2_uncentred: float


@dataclass(frozen=True, slots=True)
class QuadraticFit:
    """y = c2 x^2 + c1 x + c0."""

    c2: float
    c1: float
    c0: float
    r2: float


def fit_power(xs: Sequence[float], ys: Sequence[float]) -> PowerFit:
    """The exponent k of y proportional to x^k; two points at least, all above 0, not all x equal."""
    lx, ly = [log(x) for x in xs], [log(y) for y in ys]
    k, ln_a = _line(lx, ly)
    n = len(xs)
    fitted = [k * x + ln_a for x in lx]
    error = interval = None
    if n > 2:
        mean = sum(lx) / n
        residual = sum((y - f) ** 2 for y, f in zip(ly, fitted, strict=True))
        error = sqrt(residual / (n - 2) / sum((x - mean) ** 2 for x in lx))
        half = t_quantile(0.05, n - 2) * error
        interval = (k - half, k + half)
    return PowerFit(
        k, exp(ln_a), r_squared(ly, fitted), r_squared(ys, [exp(f) for f in fitted]), error, interval
    )


def fit_linear(xs: Sequence[float], ys: Sequence[float]) -> LinearFit:
    """A straight line, with and without an intercept; two points at least, not all x equal."""
    slope, intercept = _line(xs, ys)
    origin = sum(x * y for x, y in zip(xs, ys, strict=True)) / sum(x * x for x in xs)
    through = [origin * x for x in xs]
    left = sum((y - f) ** 2 for y, f in zip(ys, through, strict=True))
    return LinearFit(
        slope, intercept, r_squared(ys, [slope * x + intercept for x in xs]),
        origin, r_squared(ys, through), 1 - left / sum(y * y for y in ys),
    )  # fmt: skip


def fit_quadratic(xs: Sequence[float], ys: Sequence[float]) -> QuadraticFit:
    """A parabola; three different x at least.

    By polynomials orthogonal on the given points, so that lengths from 1 K to 1 M cost no digits.
    """
    n = len(xs)
    scale = max(xs)
    us = [x / scale for x in xs]
    mean = sum(us) / n
    p1 = [u - mean for u in us]
    s1 = sum(p * p for p in p1)
    bend = sum(u * p * p for u, p in zip(us, p1, strict=True)) / s1
    # p2 = (u - bend) p1 - s1 / n
    p2 = [(u - bend) * p - s1 / n for u, p in zip(us, p1, strict=True)]
    a0 = sum(ys) / n
    a1 = sum(y * p for y, p in zip(ys, p1, strict=True)) / s1
    a2 = sum(y * p for y, p in zip(ys, p2, strict=True)) / sum(p * p for p in p2)
    c2 = a2
    c1 = a1 - a2 * (bend + mean)
    c0 = a0 - a1 * mean + a2 * (bend * mean - s1 / n)
    fitted = [a0 + a1 * p + a2 * q for p, q in zip(p1, p2, strict=True)]
    return QuadraticFit(c2 / scale**2, c1 / scale, c0, r_squared(ys, fitted))


def local_exponents(xs: Sequence[float], ys: Sequence[float]) -> list[float]:
    """The exponent between each two neighbours: where it grows, one exponent does not describe it."""
    points = zip(xs, ys, strict=True)
    return [log(y2 / y1) / log(x2 / x1) for (x1, y1), (x2, y2) in pairwise(points)]


def per_thousand_tokens(
    lengths: Sequence[float], latencies: Sequence[float], thousand: int = 1000
) -> list[float]:
    """Latency per 1,000 (or, with `thousand=1024`, per 1,024) tokens of context."""
    return [latency / length * thousand for length, latency in zip(lengths, latencies, strict=True)]


def r_squared(ys: Sequence[float], fitted: Sequence[float]) -> float:
    """Share of the variance of y about its mean that the fit explains; below 0 when the mean does better."""
    mean = sum(ys) / len(ys)
    left = sum((y - f) ** 2 for y, f in zip(ys, fitted, strict=True))
    total = sum((y - mean) ** 2 for y in ys)
    return 1 - left / total if total else nan


def _line(xs: Sequence[float], ys: Sequence[float]) -> tuple[float, float]:
    """Slope and intercept by least squares."""
    n = len(xs)
    mx, my = sum(xs) / n, sum(ys) / n
    slope = sum((x - mx) * (y - my) for x, y in zip(xs, ys, strict=True)) / sum((x - mx) ** 2 for x in xs)
    return slope, my - slope * mx

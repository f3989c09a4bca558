"""How latency grows with the length of the context: fits by least squares. Source: IETF seed 000, 5.9.4.

The draft asks for k in TTFT proportional to L^k and does not say how to fit it: here by least squares of
ln TTFT on ln L, with the interval, and the linear and quadratic fits beside it, because a constant part
bends the exponent.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import exp, log, nan, sqrt

from llmtap.metrics.student import t_quantile

__all__ = [
    "LinearFit",
    "PowerFit",
    "QuadraticFit",
    "fit_linear",
    "fit_power",
    "fit_quadratic",
    "local_exponents",
    "per_thousand_tokens",
    "r_squared",
]


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

"""What theory says of arrival processes, worked out apart from the code that makes them.

Bounds are those that chance leaves once in a thousand times (99.9 %), of the normal distribution where counts
are large.
"""

import math
from collections.abc import Callable, Sequence
from itertools import pairwise

Z_999 = 3.2905267314919255
"""Deviations of a normal distribution, up or down."""
KS_999 = 1.9495
"""Kolmogorov's distance times sqrt(n): 2 exp(-2 x^2) = 0.001."""


def gaps_of(times: Sequence[float]) -> list[float]:
    return [b - a for a, b in pairwise(times)]


def cv_deviation(shape: float, n: int) -> float:
    """Of the coefficient of variation of n gamma values, about; by the delta method."""
    return math.sqrt((shape + 1) / (2 * n)) / shape


def gamma_cdf(shape: float, x: float) -> float:
    """Of scale 1, for shape 1/2 and whole ones."""
    if shape == 0.5:
        return math.erf(math.sqrt(x))
    assert shape == int(shape)
    return 1 - math.exp(-x) * sum(x**i / math.factorial(i) for i in range(int(shape)))


def ks_distance(values: Sequence[float], law: Callable[[float], float]) -> float:
    """The largest distance between the share of values up to x, or below x, and the law at x."""
    ordered, n = sorted(values), len(values)
    return max(max((i + 1) / n - law(x), law(x) - i / n) for i, x in enumerate(ordered))


def cumulated_on_off(on_rps: float, off_rps: float, on_s: float, off_s: float) -> Callable[[float], float]:
    def expected(t_s: float) -> float:
        cycles, rest = divmod(t_s, on_s + off_s)
        whole = cycles * (on_rps * on_s + off_rps * off_s)
        return whole + on_rps * min(rest, on_s) + off_rps * max(0.0, rest - on_s)

    return expected


def cumulated_ramp(from_rps: float, to_rps: float, over_s: float) -> Callable[[float], float]:
    def expected(t_s: float) -> float:
        inside = min(t_s, over_s)
        grown = from_rps * inside + (to_rps - from_rps) * inside**2 / (2 * over_s)
        return grown + to_rps * max(0.0, t_s - over_s)

    return expected


def cumulated_steps(*steps: tuple[float, float]) -> Callable[[float], float]:
    def expected(t_s: float) -> float:
        total = 0.0
        for rate, length_s in steps:
            total += rate * min(t_s, length_s)
            t_s -= min(t_s, length_s)
        return total + steps[-1][0] * t_s

    return expected


def cumulated_diurnal(mean_rps: float, amplitude: float, period_s: float) -> Callable[[float], float]:
    turn = 2 * math.pi / period_s
    return lambda t_s: mean_rps * (t_s + amplitude / turn * (1 - math.cos(turn * t_s)))

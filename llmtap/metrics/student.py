"""Student's t distribution, as far as intervals and tests of means need it.

Source: Abramowitz and Stegun 26.7.1 (by the incomplete beta function, 26.5.8 for its continued fraction).
"""

from functools import lru_cache
from math import exp, lgamma, log, log1p
from statistics import NormalDist
from typing import Final

__all__ = ["t_quantile", "t_tail"]

_TINY: Final = 1e-300
_NEAR: Final = 1e-15
_STEPS_MAX: Final = 10_000


def t_tail(t: float, df: float) -> float:
    """Probability that |T| exceeds |t|, with `df` > 0 degrees of freedom."""
    return _beta_share(df / (df + t * t), df / 2, 0.5)


@lru_cache(1_024)
def t_quantile(alpha: float, df: float) -> float:
    """The t that |T| exceeds with probability `alpha`: by bisection, to 12 digits; alpha in (0, 1)."""
    # The normal distribution has the shorter tails: its quantile is a lower bound.
    low = NormalDist().inv_cdf(1 - alpha / 2)
    high = 1.1 * low + 0.1
    while t_tail(high, df) > alpha:
        low, high = high, high * 2
    while high - low > 1e-12 * high:
        middle = (low + high) / 2
        if t_tail(middle, df) > alpha:
            low = middle
        else:
            high = middle
    return (low + high) / 2


def _beta_share(x: float, a: float, b: float) -> float:
    """I_x(a, b), the regularised incomplete beta function."""
    if x <= 0 or x >= 1:
        return min(1.0, max(0.0, x))
    front = exp(lgamma(a + b) - lgamma(a) - lgamma(b) + a * log(x) + b * log1p(-x))
    # The fraction converges quickly below the mean; above it, the symmetry helps.
    if x < (a + 1) / (a + b + 2):
        return front * _fraction(x, a, b) / a
    return 1 - front * _fraction(1 - x, b, a) / b


def _fraction(x: float, a: float, b: float) -> float:
    """The continued fraction, by Lentz's method."""
    c, d = 1.0, 1 - (a + b) * x / (a + 1)
    d = 1 / (d if abs(d) > _TINY else _TINY)
    value = d
    for m in range(1, _STEPS_MAX):
        for term in (
            m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m)),
            -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1)),
        ):
            d = 1 + term * d
            d = 1 / (d if abs(d) > _TINY else _TINY)
            c = 1 + term / c
            c = c if abs(c) > _TINY else _TINY
            value *= c * d
        if abs(c * d - 1) < _NEAR:
            break
    return value

"""Tests and intervals that stay valid however often one looks, and Student's t distribution.

A confidence sequence is wrong at any moment with probability alpha at most; 1 / e of an e-value is a p-value
at any stopping time (Ville's inequality). Student's t is computed here, because the meter imports this
module and SciPy takes as long as its start.

Source: Waudby-Smith, Arbour, Sinha, Kennedy, Ramdas 2021, "Time-uniform central limit theory and asymptotic
confidence sequences", theorem 2.2; Lindon and Malek 2020, "Anytime-valid inference for multinomial count
data"; Abramowitz and Stegun 26.7.1 and 26.5.8 (Student's t by the incomplete beta function).
"""

from collections.abc import Sequence
from functools import lru_cache
from math import exp, lgamma, log, log1p, sqrt
from statistics import NormalDist
from typing import Final

__all__ = [
    "TIGHTEST_AT", "Interval", "anytime_p", "count_range", "mixture_e_log", "mixture_width",
    "multinomial_e_log", "t_quantile", "t_tail",
]  # fmt: skip

Interval = tuple[float, float]

_COUNT_EXACT: Final = 0.01
"""Units by which a bound of a count may be too wide."""
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


TIGHTEST_AT: Final = 5_000
"""Units of both arms together for which the interval of means is as narrow as it can be made."""
PRIOR_WEIGHT: Final = 100.0
"""Counts that the Dirichlet prior is worth: it looks for deviations of about a tenth of a share. Small
next to any experiment, and large enough not to believe in a mismatch after the first ten."""


def _spread(alpha: float) -> float:
    """rho^2: the mixture's variance in units of one observation's, for the narrowest at TIGHTEST_AT.

    Source: Waudby-Smith et al., the closed form below their equation for rho(t*).
    """
    a = -2 * log(alpha)
    return (a + log(a + 1)) / TIGHTEST_AT


def mixture_width(n: int, alpha: float) -> float:
    """How many standard errors the confidence sequence of a mean of `n` units reaches to each side.

    sqrt(2 (n rho^2 + 1) / (n rho^2) log(sqrt(n rho^2 + 1) / alpha)).
    """
    v = n * _spread(alpha)
    return sqrt(2 * (v + 1) / v * log(sqrt(v + 1) / alpha))


def mixture_e_log(z: float, n: int, alpha: float) -> float:
    """Logarithm of the e-value against "the mean is 0", from an estimate `z` standard errors off.

    z^2 n rho^2 / (2 (n rho^2 + 1)) - log(n rho^2 + 1) / 2. It passes log(1 / alpha) exactly when the
    sequence of `mixture_width` leaves 0 out. `alpha` only says for which level it is tuned.
    """
    v = n * _spread(alpha)
    return z * z * v / (2 * (v + 1)) - log(v + 1) / 2


def multinomial_e_log(counts: Sequence[float], shares: Sequence[float]) -> float:
    """Logarithm of the e-value against "each unit falls into cell i with probability shares[i]".

    The Bayes factor of a Dirichlet(PRIOR_WEIGHT shares) mixture over the shares themselves. It depends
    on the counts alone, not on their order.
    """
    n = sum(counts)
    e = lgamma(PRIOR_WEIGHT) - lgamma(PRIOR_WEIGHT + n)
    for count, share in zip(counts, shares, strict=True):
        prior = PRIOR_WEIGHT * share
        e += lgamma(prior + count) - lgamma(prior) - count * log(share)
    return e


def count_range(n: float, share: float, alpha: float) -> Interval:
    """Range of the counts of `n` units that, at any number of units, leave it only with probability `alpha`.

    A unit counts with probability `share`. The e-value of `multinomial_e_log` stays below 1 / alpha in it.
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
    """The p-value of an e-value given by its logarithm: min(1, 1 / e)."""
    return 1.0 if e_log <= 0 else exp(-e_log)

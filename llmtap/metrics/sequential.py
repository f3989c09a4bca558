"""Tests and intervals that stay valid however often one looks: for numbers that are watched live.

An interval made for one look is wrong more often than it says when it is looked at until it shows
something. A confidence sequence is wrong at any of all its moments with probability alpha at most; an e-value
has an expectation of at most 1 under the null hypothesis at any stopping time, so 1 / e is a p-value
there (Ville's inequality).

Means: asymptotic confidence sequences, that is Robbins' normal mixture with the variance estimated
(Waudby-Smith, Arbour, Sinha, Kennedy, Ramdas 2021, "Time-uniform central limit theory and asymptotic
confidence sequences", theorem 2.2). Like any central limit theorem they need a sample before they hold:
`FIRST_LOOK`.

Counts: the Dirichlet mixture for multinomial counts (Lindon and Malek 2020, "Anytime-valid inference for
multinomial count data"); exact, from the first count on.
"""

from collections.abc import Sequence
from math import exp, lgamma, log, sqrt
from typing import Final

__all__ = ["FIRST_LOOK", "TIGHTEST_AT", "anytime_p", "mixture_e_log", "mixture_width", "multinomial_e_log"]

FIRST_LOOK: Final = 50
"""Units in each arm before a mean's variance is trusted. With log-normal times of shape 1, looked at for
2,000 units each, the simulation in the tests raises fewer false alarms than alpha from here on."""
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


def multinomial_e_log(counts: Sequence[int], shares: Sequence[float]) -> float:
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


def anytime_p(e_log: float) -> float:
    """The p-value of an e-value given by its logarithm: min(1, 1 / e)."""
    return 1.0 if e_log <= 0 else exp(-e_log)

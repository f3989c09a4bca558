"""What is watched all the time raises false alarms no more often than it says."""

import random
from math import comb, exp, log, sqrt

import pytest

from llmtap.metrics.experiment import (
    PRIOR_WEIGHT,
    TIGHTEST_AT,
    anytime_p,
    mixture_e_log,
    mixture_width,
    multinomial_e_log,
)

ALPHA = 0.05


@pytest.mark.parametrize("alpha", [0.1, 0.05, 0.001])
@pytest.mark.parametrize("n", [1, 50, 5_000, 10**7])
def test_interval_and_e_value_say_the_same(alpha: float, n: int) -> None:
    assert mixture_e_log(mixture_width(n, alpha), n, alpha) == pytest.approx(log(1 / alpha))
    assert mixture_e_log(-mixture_width(n, alpha), n, alpha) == pytest.approx(log(1 / alpha))


def test_the_interval_of_a_mean_is_narrowest_for_the_size_it_was_tuned_for() -> None:
    """In units of sqrt(n): the tuning is Waudby-Smith et al.'s approximation, right within a few percent."""
    widths = {n: mixture_width(n, ALPHA) for n in range(1_000, 40_000, 250)}
    best = min(widths.values())
    assert widths[TIGHTEST_AT] < 1.06 * best
    assert best > 1.96, "never narrower than for a single look"


def test_the_e_value_is_the_mixture_it_claims_to_be() -> None:
    """Against numerical integration of the likelihood ratio over a normal prior of the effect."""
    n, z = 400, 2.5
    spread = (2 * mixture_e_log_spread(n, z)) ** 0.5
    step = spread / 500
    total = 0.0
    for i in range(-4_000, 4_001):
        delta = i * step  # the effect in standard deviations; S_n = z sqrt(n)
        prior = exp(-(delta**2) / (2 * spread**2)) / (spread * sqrt(2 * 3.141592653589793))
        total += prior * exp(delta * z * sqrt(n) - n * delta**2 / 2) * step
    assert log(total) == pytest.approx(mixture_e_log(z, n, ALPHA), rel=1e-6)


def mixture_e_log_spread(n: int, z: float) -> float:
    """rho^2 / 2, found from the e-value at z = 0: -log(n rho^2 + 1) / 2."""
    return (exp(-2 * mixture_e_log(0, n, ALPHA)) - 1) / n / 2


@pytest.mark.parametrize("shares", [(0.5, 0.5), (0.9, 0.1), (0.2, 0.3, 0.5)])
def test_the_multinomial_e_value_is_fair_after_any_number_of_units(shares: tuple[float, ...]) -> None:
    """Its expectation under the null hypothesis is 1, by adding up every outcome."""
    for n in (1, 2, 7):
        total = 0.0
        for counts in compositions(n, len(shares)):
            ways, left = 1, n
            for c in counts:
                ways *= comb(left, c)
                left -= c
            p = ways * exp(sum(c * log(s) for c, s in zip(counts, shares, strict=True)))
            total += p * exp(multinomial_e_log(counts, shares))
        assert total == pytest.approx(1)


def compositions(n: int, parts: int) -> list[tuple[int, ...]]:
    if parts == 1:
        return [(n,)]
    return [(i, *rest) for i in range(n + 1) for rest in compositions(n - i, parts - 1)]


def test_the_multinomial_e_value_is_the_product_of_predictions() -> None:
    """A second way: each unit's predicted share by Laplace's rule, over its share under the null."""
    r = random.Random(1)
    counts, e = [0, 0, 0], 0.0
    shares = (0.2, 0.3, 0.5)
    for n in range(500):
        cell = r.randrange(3)
        e += log((PRIOR_WEIGHT * shares[cell] + counts[cell]) / (PRIOR_WEIGHT + n) / shares[cell])
        counts[cell] += 1
    assert multinomial_e_log(counts, shares) == pytest.approx(e)


def test_nothing_seen_says_nothing() -> None:
    assert anytime_p(multinomial_e_log((0, 0), (0.5, 0.5))) == 1
    assert anytime_p(-3.0) == 1
    assert anytime_p(log(20)) == pytest.approx(0.05)


def test_a_ratio_that_is_watched_all_the_time() -> None:
    """1,000 fair splits watched unit by unit: seldom an alarm, where a chi-square test has many."""
    r = random.Random(20_240)
    runs, alarms, naive = 1_000, 0, 0
    for _ in range(runs):
        a = rang = chi = 0
        for n in range(1, 1_001):
            a += r.random() < 0.5
            if n % 10 == 0:
                rang |= anytime_p(multinomial_e_log((a, n - a), (0.5, 0.5))) <= ALPHA
                chi |= (2 * a - n) ** 2 / n > 3.841459
        alarms += rang
        naive += chi
    assert alarms <= ALPHA * runs
    assert naive > 5 * ALPHA * runs


@pytest.mark.parametrize(("share", "by"), [(0.55, 6_000), (0.7, 300)])
def test_a_split_that_is_not_as_said_is_found(share: float, by: int) -> None:
    r = random.Random(7)
    a = sum(r.random() < share for _ in range(by))
    assert anytime_p(multinomial_e_log((a, by - a), (0.5, 0.5))) < 0.001

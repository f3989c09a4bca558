"""A sample has its distribution's quantiles: of n values, n p are below the p-th, within 4 sigma."""

import math
from random import Random
from statistics import NormalDist

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmtap.workload.lengths import (
    Empirical,
    ExponentialLengths,
    Fixed,
    Lengths,
    LogNormal,
    Normal,
    Percentiles,
    UniformLengths,
    correlated_draw,
    describe_lengths,
    draw_length,
    mean_of,
    recorded_lengths,
)

N = 20_000
KINDS = {
    "fixed": Fixed(tokens=512),
    "uniform": UniformLengths(min=128, max=512),
    "uniform of few": UniformLengths(min=1, max=3),
    "normal": Normal(mean=300, std=80, min=16),
    "exponential": ExponentialLengths(mean=300, max=4_096),
    "lognormal": LogNormal(mu=5.5, sigma=1.0, min=32, max=4_096),
    "lognormal by percentiles": LogNormal(median=156, p95=892),
    "percentiles": Percentiles(points=((50, 156), (95, 892), (99, 2_134)), max=8_192),
    "empirical": Empirical(values=(7, 7, 7, 9, 1_000)),
}


@pytest.mark.parametrize("name", KINDS)
def test_a_sample_has_its_quantiles_and_its_mean(name: str) -> None:
    lengths = KINDS[name]
    random = Random(name)
    values = [draw_length(lengths, random) for _ in range(N)]
    for p in (0.01, 0.05, 0.25, 0.5, 0.75, 0.95, 0.99):
        at, slack = lengths.quantile(p), 4 * math.sqrt(N * p * (1 - p))
        assert sum(value <= at for value in values) >= N * p - slack, p
        assert sum(value < at for value in values) <= N * p + slack, p
    mean = sum(values) / N
    sigma = math.sqrt(sum((value - mean) ** 2 for value in values) / N)
    assert mean == pytest.approx(mean_of(lengths), abs=4 * sigma / math.sqrt(N) + 1e-6)


@pytest.mark.parametrize(
    ("lengths", "points"),
    [
        (LogNormal(mu=5.5, sigma=1.0), {0.5: math.exp(5.5), 0.95: math.exp(5.5 + 1.6448536)}),
        (LogNormal(median=156, p95=892), {0.5: 156, 0.95: 892}),
        (KINDS["percentiles"], {0.5: 156, 0.95: 892, 0.99: 2_134, 1 - 1e-12: 8_192, 1e-12: 1}),
        (ExponentialLengths(mean=1_000), {0.5: 1_000 * math.log(2), 0.99: 1_000 * math.log(100)}),
        (Normal(mean=300, std=80), {0.5: 300, 0.8413447: 380}),
        (UniformLengths(min=128, max=512), {1e-12: 128, 0.5: 320, 1 - 1e-12: 512}),
        (Empirical(values=(9, 1, 5)), {0.1: 1, 0.5: 5, 0.9: 9}),
    ],
)
def test_quantiles_are_those_that_were_told(lengths: Lengths, points: dict[float, float]) -> None:
    assert {p: lengths.quantile(p) for p in points} == {p: round(value) for p, value in points.items()}


def test_the_means_of_the_clipped_lognormals_are_those_of_an_independent_sum() -> None:
    """Floor, cap and the density between them, summed by the normal distribution's own functions."""
    for mu, sigma, low, high in ((5.5, 1.0, 32, 4_096), (4.5, 1.2, 16, 2_048)):
        below, above = ((math.log(x) - mu) / sigma for x in (low, high))
        cdf = NormalDist().cdf
        inside = math.exp(mu + sigma**2 / 2) * (cdf(above - sigma) - cdf(below - sigma))
        mean = low * cdf(below) + inside + high * (1 - cdf(above))
        assert mean_of(LogNormal(mu=mu, sigma=sigma, min=low, max=high)) == pytest.approx(mean, rel=2e-4)


@given(st.sampled_from(sorted(KINDS)), st.floats(1e-9, 1 - 1e-9), st.floats(1e-9, 1 - 1e-9))
def test_quantiles_ascend_and_are_at_least_one_token(name: str, p: float, q: float) -> None:
    lengths = KINDS[name]
    low, high = sorted((p, q))
    assert 1 <= lengths.quantile(low) <= lengths.quantile(high)


@given(st.sampled_from(sorted(KINDS)), st.integers())
def test_a_draw_takes_one_number_whatever_the_distribution_is(name: str, seed: int) -> None:
    one, other = Random(seed), Random(seed)
    draw_length(KINDS[name], one)
    other.random()
    assert one.getstate() == other.getstate()


@pytest.mark.parametrize(
    ("result", "problem"),
    [
        ({"distribution": "uniform", "min": 3, "max": 1}, "min: expected at most max"),
        ({"distribution": "lognormal", "mu": 5.5}, "mu and sigma, or median and p95"),
        ({"distribution": "fixed", "tokens": 0}, "Expected `int` >= 1"),
        ({"distribution": "lognormal", "median": 90.0, "p95": 60.0}, "p95: expected at least the median"),
        ({"distribution": "percentiles", "points": [[50, 9]]}, "expected at least two"),
        ({"distribution": "percentiles", "points": [[50, 9], [40, 10]]}, "percents must ascend"),
        ({"distribution": "percentiles", "points": [[50, 9], [100, 10]]}, "between 0 and 100"),
        ({"distribution": "percentiles", "points": [[50, 9], [60, 8]]}, "must not decrease"),
        ({"distribution": "empirical", "values": []}, "length >= 1"),
    ],
)
def test_what_is_no_distribution_says_why(result: dict[str, object], problem: str) -> None:
    with pytest.raises(msgspec.ValidationError, match=problem):
        msgspec.convert(result, Lengths)  # type: ignore[call-overload]


def test_a_description_has_type_parameters_and_unit_and_makes_it_again() -> None:
    uniform = {"distribution": "uniform", "min": 128, "max": 512, "unit": "tokens"}
    assert describe_lengths(KINDS["uniform"]) == uniform
    for lengths in KINDS.values():
        result = {name: value for name, value in describe_lengths(lengths).items() if name != "unit"}
        assert msgspec.convert(result, Lengths) == lengths  # type: ignore[call-overload]
    many = describe_lengths(Empirical(values=tuple(range(1, 1_001))))
    assert many["values"] == 1_000
    assert [50, 501] in many["percentiles"]


def test_lengths_that_were_recorded_are_told_by_their_parameters() -> None:
    """Of 2, 4, 4, 4, 5, 5, 7, 9 the mean is 5 and the standard deviation 2."""
    assert recorded_lengths([9, 4, 2, 4, 7, 5, 4, 5]) == {
        "distribution": "empirical",
        "unit": "tokens",
        "n": 8,
        "mean": 5.0,
        "std": 2.0,
        "min": 2,
        "max": 9,
        "p50": 4.5,
        "p95": pytest.approx(8.3),
        "p99": pytest.approx(8.86),
    }
    assert recorded_lengths([]) == {}


def test_correlated_numbers_are_uniform_and_have_their_correlation() -> None:
    random, normal = Random(7), NormalDist()
    pairs = [(p, correlated_draw(p, random.random(), 0.5)) for p in (random.random() for _ in range(N))]
    for share in (0.1, 0.5, 0.9):
        assert sum(q < share for _, q in pairs) == pytest.approx(
            N * share, abs=4 * math.sqrt(N * share * (1 - share))
        )
    products = [normal.inv_cdf(p) * normal.inv_cdf(q) for p, q in pairs]
    # The variance of a product is 1 + 0.5^2.
    assert sum(products) / N == pytest.approx(0.5, abs=4 * math.sqrt(1.25 / N))
    assert correlated_draw(0.3, 0.7, 0.0) == pytest.approx(0.7)
    assert 0 < correlated_draw(2**-54, 2**-54, 0.5) < correlated_draw(1 - 2**-53, 1 - 2**-53, 0.5) < 1

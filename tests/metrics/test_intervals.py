"""Intervals: exact where it can be worked out, and covering what they say where it is simulated."""

from collections.abc import Callable
from math import comb, exp, log, sqrt
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmtap.metrics.intervals import (
    Interval,
    Tail,
    _Pool,
    clustered_quantile_interval,
    mean_interval,
    modes,
    quantile_interval,
    share_interval,
    tail,
)
from llmtap.metrics.statistics import is_enough, percentile, samples_needed, t_quantile

LATENCIES = st.lists(st.floats(0, 1e4, allow_nan=False), min_size=1, max_size=60)


def binomial(n: int, p: float, low: int, high: int) -> float:
    """P(low <= B < high), by the definition."""
    return sum(comb(n, k) * p**k * (1 - p) ** (n - k) for k in range(low, high))


# ---------------------------------------------------------------- quantiles


@pytest.mark.parametrize(
    ("n", "p", "low", "high"),
    # The median of 10 lies between the 2nd and the 9th with 97.9 %: one rank less would be 93.5 %. Of 100,
    # between the 40th and the 61st with 96.5 %, so one can be spared (the lower).
    [(10, 0.5, 2, 9), (100, 0.5, 41, 61), (20, 0.5, 6, 15)],
)
def test_medians_lie_between_the_ranks_of_the_tables(n: int, p: float, low: int, high: int) -> None:
    found = quantile_interval(range(1, n + 1), p)
    assert (found.low, found.high, found.method) == (low, high, "order statistics")
    assert found.value == percentile(range(1, n + 1), p)


@pytest.mark.parametrize("p", [0.5, 0.9, 0.95, 0.99])
@pytest.mark.parametrize("n", [400, 777, 1_000])
def test_ranks_cover_what_they_say_and_little_more(n: int, p: float) -> None:
    found = quantile_interval(range(1, n + 1), p)
    low, high = int(found.low), int(found.high)
    assert binomial(n, p, low, high) >= 0.95
    assert max(binomial(n, p, 0, low), binomial(n, p, high, n + 1)) <= 0.04
    assert binomial(n, p, low, high) <= 0.962


@pytest.mark.parametrize(
    ("n", "p", "open_at"),
    [
        (367, 0.99, "above"),
        (368, 0.99, ""),
        (3_687, 0.999, "above"),
        (3_688, 0.999, ""),
        (35, 0.9, "above"),
        (36, 0.9, ""),
        (36, 0.1, ""),
        (35, 0.1, "below"),
        (5, 0.5, "below and above"),
        (6, 0.5, ""),
    ],
)
def test_an_end_of_which_nothing_is_known_is_open(n: int, p: float, open_at: str) -> None:
    found = quantile_interval(range(1, n + 1), p)
    assert found.method == "order statistics" + (f", open {open_at}" if open_at else "")
    assert ("above" in open_at) <= (found.high == n)
    assert ("below" in open_at) <= (found.low == 1)


def test_of_nothing_there_is_nothing_and_of_one_value_both_ends_are_open() -> None:
    assert quantile_interval([], 0.5) is None
    assert quantile_interval([7.0], 0.5) == Interval(
        7.0, 7.0, 7.0, 1, 0.95, "order statistics, open below and above", True, True
    )


@given(LATENCIES, st.sampled_from([0.1, 0.5, 0.9, 0.99]), st.sampled_from([0.8, 0.95, 0.99]))
@settings(max_examples=60)
def test_the_figure_lies_within_its_interval_in_any_unit(values: list[float], p: float, level: float) -> None:
    ordered = sorted(values)
    found = quantile_interval(ordered, p, level)
    assert found.low <= found.value <= found.high
    doubled = quantile_interval([2 * value for value in ordered], p, level)
    assert (doubled.low, doubled.high) == (2 * found.low, 2 * found.high)


# ---------------------------------------------------------------- means and shares


def test_a_mean_is_students() -> None:
    found = mean_interval([2, 4, 4, 4, 5, 5, 7, 9])
    reach = t_quantile(0.05, 7) * sqrt(32 / 7 / 8)
    assert (found.value, found.low, found.high) == pytest.approx((5, 5 - reach, 5 + reach))
    assert mean_interval([3.0]) is None
    assert mean_interval([3.0, 3.0, 3.0]) == Interval(3.0, 3.0, 3.0, 3, 0.95, "Student's t")


@pytest.mark.parametrize(
    ("k", "n", "low", "high"),
    # Newcombe 1998, table I, the score method.
    [(81, 263, 0.2553, 0.3662), (15, 148, 0.0624, 0.1605), (0, 20, 0.0, 0.1611), (1, 29, 0.0061, 0.1718)],
)
def test_a_share_is_wilsons(k: int, n: int, low: float, high: float) -> None:
    found = share_interval(k, n)
    assert (found.low, found.high) == pytest.approx((low, high), abs=6e-5)
    assert found.value == k / n


def test_a_share_of_nothing_is_unknown_and_a_full_one_ends_at_1() -> None:
    assert share_interval(0, 0) is None
    found = share_interval(1_000, 1_000)
    assert (found.value, found.high) == (1.0, 1.0)
    assert 0.996 < found.low < 0.9965


# ---------------------------------------------------------------- by drawing again


@given(
    st.lists(st.lists(st.integers(0, 50), min_size=1, max_size=9), min_size=2, max_size=12),
    st.sampled_from([0.0, 0.3, 0.5, 0.99, 1.0]),
    st.randoms(use_true_random=False),
)
@settings(max_examples=60)
def test_a_pool_of_groups_counted_several_times_has_the_quantile_of_that_list(
    groups: list[list[int]], p: float, random: Random
) -> None:
    """The fast way of the clustered bootstrap, against writing the list out."""
    times = [random.randrange(4) for _ in groups]
    times[random.randrange(len(times))] += 1
    written = sorted(float(v) for group, k in zip(groups, times, strict=True) for v in group * k)
    pool = _Pool([np.array(group, dtype=float) for group in groups])
    assert pool.quantile(np.array(times), p) == pytest.approx(percentile(written, p))


def test_groups_that_are_alike_within_make_it_wider() -> None:
    random = np.random.default_rng(8)
    alike = [list(random.normal(random.normal(40, 5), 1, 50)) for _ in range(60)]
    mixed = list(np.random.default_rng(9).permutation(np.concatenate(alike)).reshape(60, 50))
    wide, narrow = clustered_quantile_interval(alike, 0.5), clustered_quantile_interval(mixed, 0.5)
    single = quantile_interval(sorted(np.concatenate(alike).tolist()), 0.5)
    assert wide.n == narrow.n == 3_000
    assert wide.value == pytest.approx(single.value)
    assert wide.high - wide.low > 4 * (narrow.high - narrow.low)
    assert narrow.high - narrow.low == pytest.approx(single.high - single.low, rel=0.35)


def test_one_group_says_nothing_of_others() -> None:
    assert clustered_quantile_interval([[1.0, 2.0, 3.0], []], 0.5) is None
    assert clustered_quantile_interval([], 0.5) is None
    found = clustered_quantile_interval([[4.0], [4.0, 4.0]], 0.9)
    assert (found.value, found.low, found.high) == (4.0, 4.0, 4.0)


# ---------------------------------------------------------------- how many


@pytest.mark.parametrize(("p", "n"), [(0.5, 20), (0.9, 100), (0.95, 200), (0.99, 1_000), (0.999, 10_000)])
def test_the_drafts_numbers_of_samples(p: float, n: int) -> None:
    assert samples_needed(p) == n
    assert (is_enough(n - 1, p), is_enough(n, p)) == (False, True)


# ---------------------------------------------------------------- coverage; in full in benchmarks/statistics

Z_999 = 3.29


def bimodal(random: np.random.Generator) -> "np.ndarray":
    """Four of five about 20, the others about 60, which is then the 90th percentile."""
    return np.where(random.random(1_000) < 0.8, random.normal(20, 2, 1_000), random.normal(60, 6, 1_000))


def covered(repeats: int, sample: Callable[[np.random.Generator], Interval | None], truth: float) -> float:
    random = np.random.default_rng(20)
    hits = 0
    for _ in range(repeats):
        found = sample(random)
        hits += found.low <= truth <= found.high
    return hits / repeats


@pytest.mark.parametrize(
    ("draw", "p", "truth"),
    [
        (lambda random: random.exponential(1, 1_000), 0.5, log(2)),
        (lambda random: random.exponential(1, 1_000), 0.99, log(100)),
        (lambda random: random.lognormal(0, 1, 1_000), 0.9, exp(1.2815515655446004)),
        (bimodal, 0.9, 60.0),
    ],
)
def test_quantiles_are_covered_as_often_as_is_said(
    draw: Callable[[np.random.Generator], "np.ndarray"], p: float, truth: float
) -> None:
    repeats = 1_500
    share = covered(repeats, lambda random: quantile_interval(np.sort(draw(random)).tolist(), p), truth)
    chance = Z_999 * sqrt(0.95 * 0.05 / repeats)
    assert 0.95 - chance <= share <= 0.96 + chance


Draw = Callable[[np.random.Generator, int], "np.ndarray"]

ONE_MODE: dict[str, Draw] = {
    "normal": lambda random, n: random.normal(30, 2, n),
    "exponential": lambda random, n: random.exponential(0.03, n),
    "constant and exponential": lambda random, n: 0.02 + random.exponential(0.005, n),
    "lognormal": lambda random, n: random.lognormal(-3, 0.5, n),
    "wide lognormal": lambda random, n: random.lognormal(0, 1.5, n),
}


def decoding(random: np.random.Generator, n: int, share: float = 0.2) -> "np.ndarray":
    """Gaps of 20 ms, and of 60 ms beside a prefill."""
    return np.where(random.random(n) < share, random.normal(60, 4, n), random.normal(20, 1.5, n))


# ---------------------------------------------------------------- where


@pytest.mark.parametrize("draw", ONE_MODE.values(), ids=ONE_MODE)
def test_one_mode_is_in_one_place(draw: Draw) -> None:
    for seed in range(3):
        assert len(modes(draw(np.random.default_rng(seed), 1_000))) == 1


@pytest.mark.parametrize("share", [0.5, 0.2, 0.05])
def test_two_planted_modes_are_where_they_were_planted(share: float) -> None:
    assert modes(decoding(np.random.default_rng(3), 4_000, share)) == [
        pytest.approx(20, abs=1),
        pytest.approx(60, abs=4),
    ]


def test_modes_far_apart_are_found_on_a_logarithmic_scale() -> None:
    random = np.random.default_rng(9)
    values = [*random.lognormal(log(0.01), 0.2, 3_000), *random.lognormal(log(1.0), 0.2, 150)]
    assert modes(values) == [pytest.approx(0.01, rel=0.15), pytest.approx(1.0, rel=0.15)]


def test_a_stall_does_not_hide_the_modes() -> None:
    values = [*decoding(np.random.default_rng(11), 3_000), 40_000.0, 90_000.0]
    assert modes(values) == [pytest.approx(20, abs=1), pytest.approx(60, abs=2)]


def test_gaps_of_nothing_are_a_place_of_their_own() -> None:
    random = np.random.default_rng(10)
    values = [0.0] * 500 + list(random.normal(0.040, 0.002, 1_500))
    assert modes(values) == [0.0, pytest.approx(0.040, abs=0.001)]
    found = [modes(values) for values in ([], [3.0], [3.0, 3.0, 3.0], [0.0] * 20)]
    assert found == [[], [3.0], [3.0], [0.0]]


@given(st.lists(st.floats(0, 1e3, allow_nan=False, allow_subnormal=False), min_size=1, max_size=60))
@settings(max_examples=80)
def test_modes_lie_within_the_values(values: list[float]) -> None:
    found = modes(values)
    assert found == sorted(found)
    assert found
    width = max(values) - min(values)
    assert all(min(values) - width <= mode <= max(values) + width for mode in found)


# ---------------------------------------------------------------- tails


@pytest.mark.parametrize(
    ("kind", "draw"),
    [
        ("light", lambda random, n: random.uniform(20, 40, n)),
        ("exponential", lambda random, n: random.exponential(5, n)),
        ("exponential", lambda random, n: 20 + random.exponential(5, n)),
        ("heavy", lambda random, n: 1 + random.pareto(1.5, n)),
        ("heavy", lambda random, n: random.lognormal(0, 1.5, n)),
    ],
)
def test_tails_of_known_laws(kind: str, draw: Draw) -> None:
    found = tail(draw(np.random.default_rng(1), 10_000))
    assert found.kind == kind
    assert found.low < found.shape < found.high
    assert found.n == 1_000


def test_shape_and_ratio_of_known_tails() -> None:
    power = tail((1 + np.random.default_rng(2).pareto(2, 20_000)).tolist())
    assert (power.shape, power.n) == (pytest.approx(0.5, abs=0.08), 2_000)  # the exponent's inverse
    exponential = tail(np.random.default_rng(3).exponential(1, 200_000))
    assert exponential.ratio == pytest.approx(log(100) / log(2), rel=0.02)
    constant = tail([0.02] * 1_000)
    assert (constant.kind, constant.ratio, constant.shape) == ("light", 1.0, None)


def test_too_few_values_have_a_ratio_and_no_kind() -> None:
    found = tail([1.0, 2.0, 3.0])
    assert (found.kind, found.shape, found.ratio) == (None, None, pytest.approx(1.49))
    assert tail([]) == Tail(None, None, None, None, None, None, 0)
    assert tail([0.0] * 600).ratio is None

"""The draft's Tables 10, 13 and 14."""

from itertools import product
from math import inf, sqrt
from random import Random
from statistics import median

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from llmtap.metrics.comparison import (
    Comparison,
    _signed_rank_outside,
    adjusted_p_values,
    cache_hit_rate,
    compare_paired,
    compare_quantile,
    compare_runs,
    compare_unpaired,
    difference,
    increase,
    overhead,
    paired_shift,
    placements,
    reduction,
    unpaired_shift,
)
from llmtap.metrics.statistics import t_quantile


def test_changes_and_overheads_of_the_draft() -> None:
    assert reduction(312, 98) == pytest.approx(0.685897435897)
    assert reduction(312, 400) == pytest.approx(-0.282051282051)
    changes = [increase(2867, throughput) for throughput in (2756, 2412, 2289)]
    assert [round(100 * change, 1) for change in changes if change is not None] == [-3.9, -15.9, -20.2]
    assert difference(98, 112) == 14  # input filter, TTFT P50
    assert overhead([98, 234, 4200, 8700], [118, 289, 5000, 10200]) == [20, 55, 800, 1500]
    assert overhead([98, None], [112, 3]) == [14, None]
    assert (cache_hit_rate(300, 400), cache_hit_rate(0, 0)) == (0.75, None)
    assert (reduction(0, 5), increase(0, 5), reduction(None, 5), increase(5, None)) == (None,) * 4


# Depression scores at two visits (Hollander, Wolfe and Chicken, table 3.1).
FIRST = [1.83, 0.50, 1.62, 2.48, 1.68, 1.88, 1.55, 3.06, 1.30]
SECOND = [0.878, 0.647, 0.598, 2.05, 1.06, 1.29, 1.06, 3.14, 1.29]


def sample(seed: int, n: int, factor: float = 1.0) -> list[float]:
    random = Random(seed)
    return [factor * random.lognormvariate(0, 0.5) for _ in range(n)]


def known(found: Comparison | None) -> Comparison:
    assert found is not None
    return found


# ---------------------------------------------------------------- pairs


def test_the_books_example_of_pairs() -> None:
    found = known(compare_paired(FIRST, SECOND))
    assert found.p == pytest.approx(0.0390625)  # 5 of 45 ranks up; R says the same
    assert (found.difference, found.low, found.high) == pytest.approx((-0.46, -0.786, -0.010))
    assert found.effect == pytest.approx((5 - 40) / 45)
    assert (found.n, found.m, found.paired, found.effect_name) == (9, 9, True, "rank-biserial correlation")


def test_ties_among_few_pairs_are_tested_by_all_signs() -> None:
    """Two pairs of twelve are equal, so there are 2^10 signs; zeros have their ranks (Pratt)."""
    a, b = [5.0] * 12, [6.0, 6.0, 6.0, 6.0, 5.0, 7.0, 7.0, 4.0, 6.0, 6.0, 5.0, 7.0]
    d = np.array(b) - 5
    ranks = stats.rankdata(np.abs(d))[d != 0]
    signs = 1 - 2 * ((np.arange(1 << 10)[:, None] >> np.arange(10)) & 1)
    seen = (np.sign(d[d != 0]) * ranks).sum()
    assert known(compare_paired(a, b)).p == pytest.approx((np.abs(signs @ ranks) >= seen).mean())


# ---------------------------------------------------------------- two samples


def test_brunner_and_munzels_example() -> None:
    """Pain scores after surgery under two treatments, from their paper by way of SciPy's documentation."""
    x = [1, 2, 1, 1, 1, 1, 1, 1, 1, 1, 2, 4, 1, 1]
    y = [3, 3, 4, 3, 1, 2, 3, 1, 1, 5, 4]
    found = known(compare_unpaired(x, y))
    assert found.p == pytest.approx(0.005786208, abs=1e-8)
    assert found.effect == pytest.approx(2 * 0.788961 - 1, abs=1e-6)
    assert (found.n, found.m, found.paired) == (14, 11, False)
    assert found.low <= found.difference <= found.high


def test_extreme_samples() -> None:
    far = known(compare_unpaired(sample(1, 40), [value + 100 for value in sample(2, 40)]))
    assert (far.effect, far.method[:16], far.p < 1e-10) == (1, "Mann and Whitney", True)
    assert 99 < far.low < 100 < far.high < 101
    apart = known(compare_unpaired([3.0] * 12, [4.0] * 15))
    assert (apart.difference, apart.effect, apart.p < 1e-5) == (1, 1, True)
    values = sample(1, 30)
    for same in (compare_unpaired([3.0] * 12, [3.0] * 15), compare_paired(values, values)):
        found = known(same)
        assert (found.difference, found.low, found.high, found.p, found.effect) == (0, 0, 0, 1, 0)


def test_few_values_say_nothing() -> None:
    assert compare_unpaired(sample(1, 9), sample(2, 500)) is None
    assert compare_unpaired(sample(1, 10), sample(2, 10)) is not None
    assert compare_paired([1.0] * 5, [2.0] * 5) is None
    assert compare_runs([1, 2], [1, 2, 3]) is None


@given(
    st.lists(st.integers(0, 9), min_size=10, max_size=25),
    st.lists(st.integers(0, 9), min_size=10, max_size=25),
)
@settings(max_examples=60)
def test_exchanging_the_samples_changes_the_sign_only(a: list[int], b: list[int]) -> None:
    one, other = known(compare_unpaired(a, b)), known(compare_unpaired(b, a))
    assert one.difference == -other.difference
    assert one.effect == pytest.approx(-other.effect)
    assert one.p == pytest.approx(other.p)
    assert 0 <= one.p <= 1


# ---------------------------------------------------------------- quantiles


@pytest.mark.parametrize(("p", "fewest"), [(0.5, 10), (0.9, 50), (0.99, 500)])
def test_a_quantile_needs_five_values_beyond_it(p: float, fewest: int) -> None:
    assert compare_quantile(sample(1, fewest - 1), sample(2, fewest), p, paired=False, resamples=50) is None
    assert compare_quantile(sample(1, fewest), sample(2, fewest), p, paired=False, resamples=50) is not None


def test_a_planted_difference_of_quantiles_is_enclosed() -> None:
    a = sample(3, 2_000)
    b = [1.2 * value for value in sample(4, 2_000)]
    for p in (0.5, 0.99):
        found = known(compare_quantile(a, b, p, paired=False, resamples=500))
        truth = 0.2 * float(stats.lognorm.ppf(p, 0.5))
        assert found.low <= truth <= found.high
        assert (found.a, found.b) == pytest.approx((np.quantile(a, p), np.quantile(b, p)))
        assert found.difference == pytest.approx(found.b - found.a)
        assert found.effect == pytest.approx(found.b / found.a - 1)
    assert known(compare_quantile(a, b, 0.5, paired=False, resamples=500)).p == pytest.approx(2 / 501)


def test_pairs_find_what_samples_do_not() -> None:
    a = sample(5, 200)
    random = Random(6)
    b = [value * random.uniform(1.01, 1.05) for value in a]
    paired = known(compare_quantile(a, b, 0.5, paired=True, resamples=500))
    apart = known(compare_quantile(a, b, 0.5, paired=False, resamples=500))
    assert paired.p < 0.05 < apart.p
    assert paired.high - paired.low < (apart.high - apart.low) / 4


# ---------------------------------------------------------------- runs


def test_runs_are_compared_by_welch() -> None:
    found = known(compare_runs([1, 2, 3], [4, 6, 8]))
    error, df = sqrt(5 / 3), (5 / 3) ** 2 / ((1 / 3) ** 2 / 2 + (4 / 3) ** 2 / 2)
    assert (found.a, found.b, found.difference) == (2, 6, 4)
    assert found.p == pytest.approx(2 * stats.t.sf(4 / error, df))
    reach = t_quantile(0.05, df) * error
    assert (found.low, found.high) == pytest.approx((4 - reach, 4 + reach), rel=1e-4)
    assert found.effect == pytest.approx((1 - 3 / 15) * 4 / sqrt(2.5))
    assert (found.n, found.m, found.effect_name) == (3, 3, "Hedges' g")


def test_runs_without_spread_leave_no_doubt() -> None:
    same, other = known(compare_runs([2.0] * 3, [2.0] * 3)), known(compare_runs([2.0] * 3, [2.5] * 3))
    assert (same.difference, same.low, same.high, same.p, same.effect) == (0, 0, 0, 1, 0)
    assert (other.difference, other.low, other.high, other.p, other.effect) == (0.5, 0.5, 0.5, 0, inf)
    assert other.to_dict()["effect"] is None
    assert other.to_dict()["p"] == 0


# ---------------------------------------------------------------- many at once


def test_worked_examples_of_adjusting() -> None:
    ps = [0.01, 0.04, 0.03, 0.005]
    assert adjusted_p_values(ps) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert adjusted_p_values(ps, "bh") == pytest.approx([0.02, 0.04, 0.04, 0.02])
    assert adjusted_p_values([]) == adjusted_p_values([], "bh") == []
    assert adjusted_p_values([0.4]) == [0.4]
    assert adjusted_p_values([0.6, 0.9]) == [1.0, 1.0]


@given(st.lists(st.floats(0, 1), min_size=1, max_size=20))
def test_adjusting_keeps_the_order_and_never_helps(ps: list[float]) -> None:
    for found in (adjusted_p_values(ps), adjusted_p_values(ps, "bh")):
        assert all(p <= after + 1e-12 <= 1 + 1e-9 for p, after in zip(ps, found, strict=True))
        by_p = [after for _, after in sorted(zip(ps, found, strict=True))]
        assert by_p == sorted(by_p)


WHOLE = st.integers(-20, 20)
"""Small, so that there are ties."""


def walsh(values: list[float]) -> list[float]:
    return sorted((x + y) / 2 for i, x in enumerate(values) for y in values[i:])


@given(st.lists(WHOLE, min_size=6, max_size=40))
@settings(max_examples=80)
def test_paired_shifts_are_order_statistics_of_averages(values: list[int]) -> None:
    found = paired_shift(np.array(values, dtype=float), 0.95)
    steps = walsh([float(v) for v in values])
    outside = _signed_rank_outside(len(values), 0.025)
    assert (found.value, found.low, found.high) == (median(steps), steps[outside], steps[-1 - outside])


@given(st.lists(WHOLE, min_size=2, max_size=30), st.lists(WHOLE, min_size=2, max_size=30))
@settings(max_examples=80)
def test_unpaired_shifts_are_the_median_of_all_steps(a: list[int], b: list[int]) -> None:
    found = unpaired_shift(np.array(a, dtype=float), np.array(b, dtype=float), 0.95)
    steps = [float(y - x) for x, y in product(a, b)]
    assert found.value == median(steps)
    assert found.low in steps or found.low == found.value
    assert found.high in steps or found.high == found.value
    assert found.low <= found.value <= found.high


def test_the_distribution_of_signed_ranks_is_that_of_all_signs() -> None:
    """Of 12 pairs there are 4,096 signs. Tables of the test, two-sided 5 %: 434 of 50 pairs, 1,955 of 100."""
    n = 12
    sums = sorted(sum(r for r, on in enumerate(signs, 1) if on) for signs in product((0, 1), repeat=n))
    for tail in (0.0001, 0.025, 0.2):
        outside = _signed_rank_outside(n, tail)
        assert sum(s <= outside for s in sums) <= tail * 2**n < sum(s <= outside + 1 for s in sums)
    assert _signed_rank_outside(50, 0.025) == 434
    assert _signed_rank_outside(100, 0.025) == pytest.approx(1_955, abs=2)


def test_too_few_pairs_for_the_level_have_no_interval() -> None:
    five, six = np.arange(1.0, 6), np.arange(1.0, 7)
    assert (paired_shift(five, 0.95), paired_shift(six, 0.99)) == (None, None)
    found = paired_shift(six, 0.95)
    assert (found.value, found.low, found.high) == (3.5, 1.0, 6.0)


def test_placements_count_ties_by_half() -> None:
    above, below = placements(np.array([1.0, 2.0, 3.0]), np.array([2.0, 4.0]))
    assert (above.tolist(), below.tolist()) == ([1.0, 0.75, 0.5], [0.5, 1.0])


def test_ten_thousand_pairs_take_no_list_of_fifty_million() -> None:
    random = np.random.default_rng(1)
    found = paired_shift(random.normal(3, 1, 10_000), 0.95)
    assert found.low < 3 < found.high
    assert found.high - found.low == pytest.approx(2 * 1.96 / 100 / (3 / np.pi) ** 0.5, rel=0.05)

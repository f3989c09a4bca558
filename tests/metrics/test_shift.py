"""Shifts and their intervals are those of the list of all steps, written out."""

from itertools import product
from random import Random
from statistics import median

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmtap.metrics.comparison import _signed_rank_outside, paired_shift, placements, unpaired_shift

WHOLE = st.integers(-20, 20)
"""Small, so that there are ties."""


def walsh(values: list[float]) -> list[float]:
    return sorted((x + y) / 2 for i, x in enumerate(values) for y in values[i:])


@given(st.lists(WHOLE, min_size=6, max_size=40))
@settings(max_examples=80, deadline=None)
def test_paired_shifts_are_order_statistics_of_averages(values: list[int]) -> None:
    found = paired_shift(np.array(values, dtype=float), 0.95)
    assert found is not None
    steps = walsh([float(v) for v in values])
    outside = _signed_rank_outside(len(values), 0.025)
    assert (found.value, found.low, found.high) == (median(steps), steps[outside], steps[-1 - outside])


@given(st.lists(WHOLE, min_size=2, max_size=30), st.lists(WHOLE, min_size=2, max_size=30))
@settings(max_examples=80, deadline=None)
def test_unpaired_shifts_are_the_median_of_all_steps(a: list[int], b: list[int]) -> None:
    found = unpaired_shift(np.array(a, dtype=float), np.array(b, dtype=float), 0.95)
    steps = [float(y - x) for x, y in product(a, b)]
    assert found.value == median(steps)
    assert found.low in steps or found.low == found.value
    assert found.high in steps or found.high == found.value
    assert found.low <= found.value <= found.high


def test_fractions_are_found_as_exactly() -> None:
    random = Random(4)
    values = [random.expovariate(30) for _ in range(301)]
    found = paired_shift(np.array(values), 0.95)
    steps = walsh(values)
    assert found is not None
    assert found.value == pytest.approx(median(steps), rel=1e-12)
    assert min(abs(found.low - step) for step in steps) < 1e-15


def test_the_distribution_of_signed_ranks_is_that_of_all_signs() -> None:
    """Of 12 pairs there are 4,096 signs."""
    n = 12
    sums = sorted(sum(r for r, on in enumerate(signs, 1) if on) for signs in product((0, 1), repeat=n))
    for tail in (0.0001, 0.005, 0.025, 0.05, 0.2):
        outside = _signed_rank_outside(n, tail)
        assert sum(s <= outside for s in sums) <= tail * 2**n < sum(s <= outside + 1 for s in sums)


def test_beyond_50_pairs_the_normal_distribution_goes_on_where_the_exact_one_ends() -> None:
    # Tables of the signed-rank test, two-sided 5 %: 434 of 50 pairs, 1,955 of 100.
    assert _signed_rank_outside(50, 0.025) == 434
    assert _signed_rank_outside(100, 0.025) == pytest.approx(1_955, abs=2)


def test_too_few_pairs_for_the_level_have_no_interval() -> None:
    five, six = np.arange(1.0, 6), np.arange(1.0, 7)
    assert paired_shift(five, 0.95) is None
    found = paired_shift(six, 0.95)
    assert found is not None
    assert (found.value, found.low, found.high) == (3.5, 1.0, 6.0)
    assert paired_shift(six, 0.99) is None


def test_pairs_mostly_alike_are_apart_by_exactly_nothing() -> None:
    found = paired_shift(np.array([0.0] * 80 + [0.1, -0.3, 0.7]), 0.95)
    assert found is not None
    assert (found.value, found.low, found.high) == (0.0, 0.0, 0.0)


def test_samples_without_any_spread_are_apart_by_a_number() -> None:
    found = unpaired_shift(np.full(10, 2.0), np.full(12, 5.0), 0.95)
    assert (found.value, found.low, found.high) == (3.0, 3.0, 3.0)


def test_placements_count_ties_by_half() -> None:
    above, below = placements(np.array([1.0, 2.0, 3.0]), np.array([2.0, 4.0]))
    assert above.tolist() == [1.0, 0.75, 0.5]
    assert below.tolist() == [0.5, 1.0]
    assert above.mean() == below.mean() == 0.75


def test_ten_thousand_pairs_take_no_list_of_fifty_million() -> None:
    random = np.random.default_rng(1)
    found = paired_shift(random.normal(3, 1, 10_000), 0.95)
    assert found is not None
    assert found.low < 3 < found.high
    assert found.high - found.low == pytest.approx(2 * 1.96 / 100 / (3 / np.pi) ** 0.5, rel=0.05)

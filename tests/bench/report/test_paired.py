"""Turns and pairs: every block once, in an order of the seed; a row is compared with itself or not at all."""

from itertools import pairwise
from statistics import mean

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmtap.bench.tests.paired import Block, blocks, over_repeats, pairs, quantile_ratio, values_by_row
from tests.bench.support import measured

names = st.lists(st.sampled_from("abcdef"), min_size=1, max_size=5, unique=True)
levels = st.lists(st.sampled_from([25.0, 50.0, 75.0]), min_size=1, unique=True)


@given(names, levels, st.integers(1, 6), st.integers(0, 1 << 40), st.booleans())
def test_every_block_comes_once_and_repeats_one_after_the_other(
    arms: list[str], loads: list[float], repeats: int, seed: int, together: bool
) -> None:
    order = blocks(arms, loads, repeats, seed, together=together)
    every = {Block(arm, level, r) for arm in arms for level in loads for r in range(repeats)}
    assert len(order) == len(every)
    assert set(order) == every
    assert [block.repeat for block in order] == sorted(block.repeat for block in order)
    assert order == blocks(arms, loads, repeats, seed, together=together)


@given(names, levels, st.integers(0, 1 << 40))
def test_arms_of_a_level_are_neighbours_and_levels_of_an_arm_that_has_to_be_started(
    arms: list[str], loads: list[float], seed: int
) -> None:
    apart = [block.level for block in blocks(arms, loads, 1, seed)]
    together = [block.arm for block in blocks(arms, loads, 1, seed, together=True)]
    assert changes(apart) == len(loads) - 1
    assert changes(together) == len(arms) - 1


def changes(values: list[object]) -> int:
    return sum(a != b for a, b in pairwise(values))


def test_drift_is_no_difference_between_arms() -> None:
    """A machine that gets 1 ms slower with each block: in turns that cancels out over seeds, one after the
    other it is 30 ms."""
    found = []
    for seed in range(400):
        order = blocks(["a", "b"], [50.0], 30, seed)
        at = {arm: mean(i for i, block in enumerate(order) if block.arm == arm) for arm in "ab"}
        found.append(at["b"] - at["a"])
    # A pair is one apart, in either direction: a difference of one seed has a deviation of 1 / sqrt(30).
    assert abs(mean(found)) < 4 / (30 * 400) ** 0.5
    assert max(map(abs, found)) < 1


def test_orders_differ_by_seed() -> None:
    assert len({tuple(blocks("abcd", [25.0, 50.0], 3, seed)) for seed in range(20)}) == 20


def test_only_rows_that_both_answered_completely_are_pairs() -> None:
    ms = 1_000_000
    a = measured("a", [
        {"row": 3, "ttft_ns": 10 * ms}, {"row": 1, "ttft_ns": 20 * ms}, {"row": 2, "ttft_ns": 30 * ms},
        {"row": 4, "ttft_ns": 40 * ms},
    ])  # fmt: skip
    b = measured("b", [
        {"row": 1, "ttft_ns": 25 * ms}, {"row": 2, "ttft_ns": 1 * ms, "outcome": "refused"},
        {"row": 3, "ttft_ns": 17 * ms}, {"row": 4}, {"row": 5, "ttft_ns": 50 * ms},
    ])  # fmt: skip
    assert pairs([(a, b)], "ttft_ns") == ([0.02, 0.01], [0.025, 0.017])
    assert pairs([(a, b), (b, a)], "ttft_ns") == ([0.02, 0.01, 0.025, 0.017], [0.025, 0.017, 0.02, 0.01])
    assert values_by_row(b, "ttft_ns") == {1: 0.025, 3: 0.017, 5: 0.05}


def test_a_ratio_is_that_of_the_quantiles_with_its_interval() -> None:
    base = [0.01 * i for i in range(1, 201)]
    exact = quantile_ratio(base, [2 * x for x in base], 0.5, paired=True)
    assert exact is not None
    assert [exact[name] for name in ("value", "low", "high")] == pytest.approx([2, 2, 2])
    loose = quantile_ratio(base, [2 * x for x in base], 0.5, paired=False)
    assert loose is not None
    assert loose["low"] < 2 < loose["high"]
    # So few values say where a quantile is, and not how sure that is.
    few = quantile_ratio([1.0, 2.0], [3.0, 6.0], 0.99, paired=False)
    assert few is not None
    assert (few["value"], few["low"], few["high"]) == (pytest.approx(3), None, None)
    assert quantile_ratio([], [1.0], 0.5, paired=False) is None
    assert quantile_ratio([0.0, 1.0], [1.0, 2.0], 0.5, paired=True) is None


def test_repeats_have_student_s_interval() -> None:
    """40, 41 and 42: 41 +- 4.303 / sqrt(3); against 0, t = 41 sqrt(3)."""
    found = over_repeats([40.0, 41.0, 42.0])
    assert found is not None
    assert found["value"] == pytest.approx(41)
    assert found["high"] - found["value"] == pytest.approx(4.3027 / 3**0.5, rel=1e-4)
    # Of Student's t with two degrees of freedom, in closed form.
    t = 41 * 3**0.5
    assert found["p"] == pytest.approx(1 - t / (2 + t * t) ** 0.5, rel=1e-4)
    assert over_repeats([1.0, 2.0]) is None
    same = over_repeats([2.0] * 3)
    assert same is not None
    assert same["p"] == 0.0

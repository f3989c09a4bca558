"""Invariant: worst_since(t) is the greatest lag noted at or after t, and never below the floor."""

from bisect import bisect_left
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmtap.channel.frames import LAG_EDGES_NS
from llmtap.net.lag import PEAKS_MAX, LagMeter, PythonLagMeter, make_lag_meter

FLOOR_NS = 1_000

LAG = st.one_of(st.integers(0, 5_000), st.integers(FLOOR_NS - 2, FLOOR_NS + 4))
NOTES = st.lists(st.tuples(st.integers(0, 50), LAG), max_size=60)
"""(time since the note before, lag)"""


Make = Callable[..., LagMeter]
EACH = pytest.mark.parametrize("make", [PythonLagMeter, make_lag_meter])
"""The Python implementation, and the one that runs."""


def noted(make: Make, steps: list[tuple[int, int]]) -> tuple[LagMeter, list[tuple[int, int]]]:
    meter = make(FLOOR_NS)
    t = 0
    notes = []
    for step, lag in steps:
        t += step
        meter.note(t, lag)
        notes.append((t, lag))
    return meter, notes


def brute_force(notes: list[tuple[int, int]], since: int) -> int:
    return max([FLOOR_NS, *(lag for t, lag in notes if t >= since)])


@EACH
@given(NOTES)
def test_the_worst_since_a_moment(make: Make, steps: list[tuple[int, int]]) -> None:
    meter, notes = noted(make, steps)
    last = notes[-1][0] if notes else 0
    for since in range(-1, last + 2):
        assert meter.worst_since(since) == brute_force(notes, since)


@EACH
@given(NOTES, st.integers(0, 1_500))
def test_forgetting_the_past_changes_nothing_after_it(
    make: Make, steps: list[tuple[int, int]], before: int
) -> None:
    meter, notes = noted(make, steps)
    meter.forget_before(before)
    for since in range(before, before + 60):
        assert meter.worst_since(since) == brute_force(notes, since)


@EACH
@given(NOTES)
def test_sums_buckets_and_maximum(make: Make, steps: list[tuple[int, int]]) -> None:
    meter, notes = noted(make, steps)
    lags = [lag for _, lag in notes]
    assert meter.sum_ns == sum(lags)
    assert sum(meter.buckets) == len(lags)
    assert meter.take_max() == max(lags, default=0)
    assert meter.take_max() == 0


@EACH
@pytest.mark.parametrize("lag", [0, *LAG_EDGES_NS, *(e + 1 for e in LAG_EDGES_NS)])
def test_a_lag_falls_into_the_bucket_of_its_upper_bound(make: Make, lag: int) -> None:
    meter = make(FLOOR_NS)
    meter.note(1, lag)
    assert meter.buckets[bisect_left(LAG_EDGES_NS, lag)] == 1
    assert len(meter.buckets) == len(LAG_EDGES_NS) + 1


@EACH
def test_memory_is_bounded_and_what_is_forgotten_never_makes_an_exchange_look_better(make: Make) -> None:
    """More falling peaks than are kept: the answer may be too wide, but not too narrow."""
    count = PEAKS_MAX + 500
    meter, notes = noted(make, [(1, 2_000_000 - i) for i in range(count)])
    for since in (0, 1, 2, 3, 400, 501, 502, 700, count - 1, count, count + 1):
        assert meter.worst_since(since) >= brute_force(notes, since), f"since {since}"


@EACH
def test_a_byte_may_wait_for_two_turns_of_which_a_timer_sees_one(make: Make) -> None:
    meter = make(FLOOR_NS, blind_ns=7, turns=2)
    assert meter.worst_since(0) == FLOOR_NS + 7
    meter.note(10, 3 * FLOOR_NS)
    assert meter.worst_since(0) == 6 * FLOOR_NS + 7
    assert meter.max_ns == 3 * FLOOR_NS, "what was seen stays what it was"

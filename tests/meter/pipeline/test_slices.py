"""Invariants: a window holds all of its length less one step and nothing older than its length; nothing is
lost or held twice; what a reader was given does not change."""

import random
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmtap.meter.pipeline.windows import SLICES_MAX, Merging, SliceLevel, Slices

LEVELS = (SliceLevel(10, 1), SliceLevel(60, 5), SliceLevel(300, 30), SliceLevel(3_600, 300))
EVENTS = st.lists(
    st.tuples(
        st.one_of(st.integers(0, 3), st.integers(0, 400), st.integers(0, 5_000)), st.sampled_from("rstn")
    ),
    max_size=60,
)


def merge(data: Sequence[list[int]], level: int) -> Merging[list[int]]:
    out: list[int] = []
    for part in data:
        out += part
        yield
    return out


def row(*, past: bool = True, start: int = 0) -> Slices[list[int]]:
    return Slices(LEVELS, start, list, merge, past=past)


def check(slices: Slices[list[int]], now: int, ends: list[int], start: int) -> None:
    """Against a plain list of everything that ever happened."""
    for i, level in enumerate(LEVELS):
        since = start + max(
            0, (now - start) // level.step_ns * level.step_ns - level.window_ns + level.step_ns
        )
        assert slices.window_start_ns(i, now) == since
        assert now - since < level.window_ns
        assert now - since >= min(now - start, level.window_ns - level.step_ns)
        held = [t for part in slices.window(i, now) for t in part]
        assert sorted(held) == sorted(t for t in ends if t >= since)
    held = [t for part in slices.everything(now) for t in part]
    assert sorted(held) == sorted(ends)


@given(EVENTS, st.integers(0, 10**6))
def test_windows_hold_exactly_what_they_must(events: list[tuple[int, str]], start: int) -> None:
    slices, now, ends = row(start=start), start, []
    for gap, what in events:
        now += gap
        slices.current(now).append(now)
        ends.append(now)
        if what == "s":
            slices.seal(now)
        elif what != "n":
            while slices.tidy() and what == "t":
                pass
        check(slices, now, ends, start)


def test_an_hour_second_by_second() -> None:
    rng = random.Random(7)
    slices, now, ends = row(), 0, []
    while now < 3 * 3_600:
        now += rng.choice((0, 0, 1, 1, 1, 2, 7))
        slices.current(now).append(now)
        ends.append(now)
        slices.tidy()
        slices.tidy()
        if rng.random() < 0.02:
            check(slices, now, ends, 0)
    while slices.tidy():
        pass
    check(slices, now, ends, 0)
    # 10 of a second, 10 of 5 s, 9 of 30 s, 11 of 5 minutes, and what is not yet a whole step of each.
    assert len(slices) <= 10 + 11 + 10 + 12 + 5 + 6 + 10


def test_without_a_past_what_left_the_longest_window_is_gone() -> None:
    slices = row(past=False)
    for now in range(0, 20_000, 100):
        slices.current(now).append(now)
        while slices.tidy():
            pass
    held = [t for part in slices.everything(19_900) for t in part]
    assert min(held) == 16_500
    assert len(slices) < 40


def test_what_a_reader_has_stays_as_it_was() -> None:
    slices = row()
    for now in range(50):
        slices.current(now).append(now)
    slices.seal(49)
    *given_out, still_written = slices.window(3, 49)
    assert still_written == []
    before = [list(part) for part in given_out]
    for now in range(49, 5_000):
        slices.current(now).append(now)
        slices.tidy()
    assert given_out == before


def test_slices_that_nobody_tidies_are_tidied_by_the_one_who_makes_them() -> None:
    slices = row()
    for now in range(4 * SLICES_MAX):
        slices.current(now).append(now)
        assert len(slices) <= SLICES_MAX + 2
    check(slices, now, list(range(4 * SLICES_MAX)), 0)


@pytest.mark.parametrize("levels", [(SliceLevel(10, 3),), (SliceLevel(10, 2), SliceLevel(60, 5))])
def test_steps_divide_windows_and_longer_steps(levels: tuple[SliceLevel, ...]) -> None:
    with pytest.raises(AssertionError):
        Slices(levels, 0, list, merge, past=True)

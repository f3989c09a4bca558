"""A buffer that holds tokens back: q_1 = t_1, q_i = max(t_i, q_(i-1) + p), and what follows from it."""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from llmtap.sim.engine import EngineOutput, GivenUp, IterationState
from llmtap.sim.schedulers.iterating import OutputDelay
from tests.support.iterating import MS, Row, serve


class Told:
    """Makes the tokens that it is told to make."""

    def __init__(self) -> None:
        self.state = IterationState()
        self.gone: dict[int, GivenUp] = {}
        self.asked: list[str] = []

    def arrived(self, now_ns: int, request: int) -> None:
        self.asked.append(f"arrived {now_ns} {request}")

    def closed(self, now_ns: int) -> None:
        self.asked.append(f"closed {now_ns}")

    def form(self, now_ns: int) -> Any | None:
        return f"work at {now_ns}"

    def done(self, now_ns: int, work: EngineOutput) -> EngineOutput:
        return work

    def left(self, now_ns: int, request: int) -> None:
        self.asked.append(f"left {now_ns} {request}")

    def given_up(self) -> Mapping[int, GivenUp]:
        return self.gone


def delayed(token_times: Sequence[int], gap: int) -> list[int]:
    """When the tokens of one request leave."""
    buffer = OutputDelay(Told(), gap)
    leaving: list[int] = []
    for t in token_times:
        leaving += buffer.done(t, EngineOutput(tokens=[0])).due_ns or ()
    return leaving


# Case S5 of the oracle of smooth goodput: one stall of half a second. ms.
_STALLED = [100, 110, 120, 130, 140, 150, 160, 170, 670, 680, 690, 700]


@pytest.mark.parametrize(
    ("gap", "leaving"),
    [
        (50, [100, 150, 200, 250, 300, 350, 400, 450, 670, 720, 770, 820]),
        (60, [100, 160, 220, 280, 340, 400, 460, 520, 670, 730, 790, 850]),
        (100, [100, 200, 300, 400, 500, 600, 700, 800, 900, 1000, 1100, 1200]),
        (10, _STALLED),
    ],
)
def test_a_stall_is_spread(gap: int, leaving: list[int]) -> None:
    assert delayed(_STALLED, gap) == leaving


_TIMES = st.lists(st.integers(0, 400), min_size=2, max_size=40).map(
    lambda gaps: [sum(gaps[: i + 1]) for i in range(len(gaps))]
)


def idle(times: Sequence[int], reader: int) -> int:
    """How long a reader who needs so much per token waits: the largest t_i - V (i - 1), from arrival at 0."""
    return max(t - reader * i for i, t in enumerate(times))


@given(_TIMES, st.integers(1, 200), st.integers(0, 200))
def test_a_reader_who_is_no_faster_does_not_notice(times: list[int], gap: int, slower: int) -> None:
    assert idle(delayed(times, gap), gap + slower) == idle(times, gap + slower)


@given(_TIMES, st.integers(1, 200), st.integers(1, 200))
def test_a_faster_reader_waits_longer_by_no_more_than_the_difference(
    times: list[int], reader: int, more: int
) -> None:
    waited = idle(delayed(times, reader + more), reader)
    assert idle(times, reader) <= waited <= idle(times, reader) + (len(times) - 1) * more


@given(_TIMES, st.integers(1, 400))
def test_the_largest_gap_does_not_grow(times: list[int], gap: int) -> None:
    largest = max(b - a for a, b in pairwise(times))
    assume(gap <= largest)
    assert max(b - a for a, b in pairwise(delayed(times, gap))) <= largest


@pytest.mark.parametrize("scheduler", ["continuous_batching", "chunked_prefill", "shortest_predicted_first"])
def test_every_scheduler_can_have_it(scheduler: str) -> None:
    rows: list[Row] = [(0, 80, 12), (170, 280, 6), (175, 40, 3)]
    plain, paced = serve(scheduler, rows), serve(scheduler, rows, output_delay="50ms")
    assert paced.iterations == plain.iterations
    assert paced.tokens == [delayed([int(t) for t in times], 50) for times in plain.tokens]
    assert paced.state == plain.state
    assert paced.end_ns == {r: times[-1] * MS for r, times in enumerate(paced.tokens)}


def test_tokens_that_are_late_already_are_held_from_when_they_would_have_left() -> None:
    # Decode prepone releases two at 300 and 420, and then goes on every 20 ms from 540.
    paced = serve("decode_prepone", [(0, 80, 9), (170, 280, 1)], output_delay="130ms")
    assert paced.tokens[0] == [100, 230, 360, 490, 620, 750, 880, 1010, 1140]


@pytest.mark.parametrize(
    ("options", "gap"), [({}, 50), ({"output_delay": "30ms"}, 30), ({"output_delay": "0"}, 0)]
)
def test_by_name_it_is_continuous_batching_for_a_reader(options: dict[str, str], gap: int) -> None:
    rows: list[Row] = [(0, 80, 12), (170, 280, 6)]
    plain = serve("continuous_batching", rows)
    paced = serve("output_delay", rows, **options)
    assert paced.tokens == [delayed([int(t) for t in times], gap) for times in plain.tokens]


def test_tokens_are_told_in_the_order_in_which_they_leave() -> None:
    buffer = OutputDelay(Told(), 50)
    buffer.done(0, EngineOutput(tokens=[0, 1]))
    buffer.done(60, EngineOutput(tokens=[1]))
    assert buffer.done(70, EngineOutput(tokens=[1, 2, 0])) == EngineOutput((), [0, 2, 1], [70, 70, 110])
    assert buffer.done(80, EngineOutput(tokens=[0, 2], due_ns=[200, 90])) == EngineOutput(
        (), [2, 0], [120, 200]
    )


def test_it_remembers_those_under_way_only() -> None:
    told = Told()
    buffer = OutputDelay(told, 50)
    buffer.done(0, EngineOutput(tokens=[0, 1, 2, 3]))
    assert buffer.done(10, EngineOutput(finished=[0], tokens=[0])).finished == [0]
    buffer.left(11, 1)
    told.gone = {2: GivenUp.LATE}
    assert buffer.given_up() == {2: GivenUp.LATE}
    told.gone = {}
    # As if they had never been, but for the last.
    assert buffer.done(20, EngineOutput(tokens=[0, 1, 2, 3])).due_ns == [20, 20, 20, 50]


def test_all_else_passes_through() -> None:
    told = Told()
    buffer = OutputDelay(told, 50)
    buffer.arrived(1, 7)
    buffer.left(2, 7)
    buffer.closed(3)
    assert told.asked == ["arrived 1 7", "left 2 7", "closed 3"]
    assert buffer.form(4) == "work at 4"
    assert buffer.state is told.state

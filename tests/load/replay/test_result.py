"""What a distribution is drawn from is the distribution: its quantiles by the rule that holds everywhere."""

from array import array
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmtap.exchange.outcome import Outcome
from llmtap.load.replay.result import (
    PERIODS_MAX,
    QUANTILES,
    TURNS_MAX,
    ObservedLengths,
    RunObservations,
    TaskTimes,
    timeline_of,
)
from llmtap.metrics.histogram import RELATIVE_ERROR
from llmtap.metrics.statistics import percentile
from llmtap.units import NS_PER_S
from llmtap.workload.requests import Requests
from tests.support.results.replay_results import BEGAN_NS, replay_result
from tests.support.traffic.exchanges import streamed


def test_quantiles_are_those_of_the_exchanges() -> None:
    quantiles = replay_result(60, late_ms=7)["quantiles"]
    assert quantiles["shares"] == list(QUANTILES)
    # `streamed` submits after 1 ms and has its first word after 100 ms; a gap is of 10 to 14 ms.
    assert quantiles["submit"]["ttft"] == pytest.approx([0.099] * len(QUANTILES), rel=RELATIVE_ERROR)
    gaps = sorted((10 + i % 5) / 1_000 for i in range(60) for _ in range(2 + i % 7))
    expected = [percentile(gaps, share) for share in QUANTILES]
    assert quantiles["submit"]["tbc"] == pytest.approx(expected, rel=2 * RELATIVE_ERROR)
    # Dispatched 7 ms late, and submitted 1 ms after that.
    assert quantiles["dispatch_lateness"] == pytest.approx([0.007] * len(QUANTILES))
    assert quantiles["schedule"]["ttft"][-1] == pytest.approx(0.099 + 0.008)


def test_without_a_schedule_nothing_counts_from_there() -> None:
    result = replay_result(5, closed=True)
    assert result["quantiles"]["schedule"] == {"ttft": None, "e2e": None}
    assert result["quantiles"]["dispatch_lateness"] is None
    assert result["timeline"]["asked"] is None
    assert result["timeline"]["sent"] == [5, 0]


def test_the_timeline_tells_what_was_asked_beside_what_was_sent() -> None:
    timeline = replay_result(60, late_ms=500)["timeline"]
    assert timeline["asked"] == [20, 20, 20, 0]
    assert timeline["sent"] == [10, 20, 20, 10]


def test_rates_are_what_they_are_said_to_be() -> None:
    # One each 50 ms, the last after 2.95 s: 59 gaps.
    result = replay_result(60, late_ms=500)
    load, arrivals = result["load"], result["arrivals"]
    assert load["planned_rps"] == pytest.approx(20)
    # All half a second late: the last ten are not there by then, and the eleventh is just in time.
    assert load["offered_rps"] == pytest.approx(49 / 2.95)
    assert load["sent_share"] == pytest.approx(50 / 60)
    assert (load["due"], load["in_time"]) == (60, 50)
    assert load["achieved_rps"] == pytest.approx(60 / 3.95)
    # The last request was sent at 3.45 s, and answers take 0.12 s or more: three came later.
    assert load["sending_rps"] == pytest.approx(57 / 3.45)
    assert arrivals["planned"]["rate_rps"] == arrivals["sent"]["rate_rps"] == pytest.approx(20)
    assert arrivals["punctuality"]["rate_ratio"] == 1
    assert arrivals["punctuality"]["lateness"]["p50"] == 0.5
    assert "sent_rps" not in load and "asked_rps" not in load


@pytest.mark.parametrize(
    ("counted", "given", "usage", "sums"),
    [
        (-1, [10, 20], [12, 19], (30, 31, 3)),  # by the trace
        (15, [10, 20], [15, 16], (30, 31, 1)),  # by our count, which a template made longer
        (15, [0, 20], [15, 16], (15, 16, 1)),
        (15, [10, 20], [None, 16], (15, 16, 1)),
    ],
)
def test_prompts_by_our_count_and_the_server_s(
    counted: int, given: list[int], usage: list[int | None], sums: tuple[int, int, int]
) -> None:
    lengths = ObservedLengths()
    for row, told in zip(given, usage, strict=True):
        x = streamed(1, 3)
        x.tokens.input = told
        lengths.add(x, row, counted, 3)
    assert (lengths.input_counted, lengths.input_usage, lengths.input_apart) == sums


def test_who_was_sent_again_is_as_late_as_the_first_time() -> None:
    """Sent at its time, refused, and sent again three seconds later: the plan was kept."""
    again_ns = 3 * NS_PER_S
    offsets = array("q", (i * NS_PER_S // 20 for i in range(4)))
    seen = RunObservations(
        Requests(offsets, array("q", [100] * 4), array("q", [3] * 4)), array("q", [100] * 4)
    )
    for row, offset_ns in enumerate(offsets):
        x = streamed(row + 1, 3, at_ms=offset_ns // 1_000_000 + again_ns // 1_000_000)
        x.scheduled_ns, x.dispatch_late_ns = BEGAN_NS + offset_ns, 1_000_000
        assert x.timeline.arrival_ns == x.scheduled_ns + again_ns
        seen.add(row, x)
    first_ns = [BEGAN_NS + offset_ns + 1_000_000 for offset_ns in offsets]
    assert list(seen.sent_ns) == first_ns
    arrivals = seen.arrivals(BEGAN_NS)
    assert isinstance(arrivals["punctuality"], dict)
    assert arrivals["punctuality"]["lateness"]["max"] == 0.001
    assert seen.count_sent_by(BEGAN_NS, offsets[-1] + 10_000_000) == 4


def test_a_task_is_measured_from_its_first_submit_to_its_last_end() -> None:
    """Two conversations, the second with a fork and a turn that failed."""
    after = array("q", [-1, 0, -1, 2, 2])
    zeros = array("q", [0] * 5)
    requests = Requests(zeros, zeros, zeros, after=after, think_ns=zeros)
    seen = RunObservations(requests, zeros)
    for row, (at_ms, words) in enumerate([(0, 2), (500, 4), (100, 3), (600, 3), (700, 5)]):
        x = streamed(row + 1, words, at_ms=at_ms, gap_ms=10)
        if row == 3:
            x.outcome = Outcome.TRUNCATED
        seen.add(row, x)
    told: dict[str, Any] = seen.tasks.to_dict()
    # `streamed` submits after 1 ms, has its first word after 100 ms, and ends 1 ms after its last word.
    last_ms = 500 + 100 + 3 * 10 + 1
    assert (told["n"], told["duration"]["n"]) == (2, 1)
    assert told["duration"]["p50"] == pytest.approx((last_ms - 1) / 1e3, rel=RELATIVE_ERROR)
    assert [(t["turn"], t["ttft"]["n"], t["e2e"]["n"], t["and_later"]) for t in told["turns"]] == [
        (0, 2, 2, False),
        (1, 3, 2, False),
    ]
    assert told["turns"][1]["ttft"]["p50"] == pytest.approx(0.099, rel=RELATIVE_ERROR)


def test_late_turns_share_a_row() -> None:
    after = array("q", [-1, *range(TURNS_MAX + 2)])
    tasks = TaskTimes(after)
    for row in range(len(after)):
        tasks.add(row, streamed(row + 1, 3, at_ms=1_000 * row))
    turns: Any = tasks.to_dict()["turns"]
    assert [turn["e2e"]["n"] for turn in turns] == [1] * (TURNS_MAX - 1) + [4]
    assert turns[-1]["and_later"]


S = NS_PER_S
START_NS = 7 * S


def test_what_was_planned_behind_the_end_was_not_asked() -> None:
    planned = [0, S // 2, 3 * S // 2, 9 * S]
    told = timeline_of([], [], began_ns=START_NS, until_ns=START_NS + 2 * S, planned_ns=planned)
    assert told.planned == [2, 1]
    # The last of a plan is due at its end, and a run has no end before that.
    told = timeline_of([], [], began_ns=START_NS, until_ns=START_NS + 2 * S, planned_ns=[0, 2 * S])
    assert told.planned == [1, 1]


def test_a_long_run_has_longer_periods() -> None:
    hours = 12 * 3_600
    sent = [START_NS + s * S for s in range(0, hours, 100)]
    told = timeline_of(sent, sent, began_ns=START_NS, until_ns=START_NS + hours * S)
    assert told.period == 5
    assert len(told.t) == len(told.sent) <= PERIODS_MAX
    assert told.t[-1] == hours - 5
    assert sum(told.sent) == len(sent)


@given(st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40)), max_size=30), st.integers(0, 80))
def test_as_if_looked_at_every_moment(requests: list[tuple[int, int]], more: int) -> None:
    """A request is in flight from its sending to its end, both included."""
    tenth = S // 10
    sent = [START_NS + at * tenth for at, _ in requests]
    ended = [START_NS + (at + lasts) * tenth for at, lasts in requests]
    until_ns = max([*ended, START_NS]) + more * tenth
    told = timeline_of(sent, ended, began_ns=START_NS, until_ns=until_ns)
    periods = len(told.t)
    for name, times in (("sent", sent), ("ended", ended)):
        counted = [min((ns - START_NS) // S, periods - 1) for ns in times]
        assert getattr(told, name) == [counted.count(period) for period in range(periods)]
    for period in range(periods):
        last = period == periods - 1
        ticks = range(period * 10, 10**3 if last else period * 10 + 10)
        flying = [
            sum(s <= START_NS + k * tenth <= e for s, e in zip(sent, ended, strict=True)) for k in ticks
        ]
        assert told.in_flight[period] == max(flying)

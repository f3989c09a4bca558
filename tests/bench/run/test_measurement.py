"""What a load came to without its ramp-up, worked out by hand; and queues of known kind are told apart."""

from collections.abc import Iterator
from heapq import heapreplace
from pathlib import Path
from random import Random
from typing import Any

import pytest

from llmtap.bench.run.measurement import (
    Measurement,
    MeasurementRecorder,
    SteadyPart,
    steady_part_of,
    tail_is_heavy,
)
from llmtap.exchange.outcome import Reading
from llmtap.metrics.deadlines import Benefit
from llmtap.metrics.objectives import Objectives
from tests.bench.support import answered, measured
from tests.support.traffic.exchanges import streamed

S = 1_000_000_000
OVER = {"stopped": "the time was up"}


def answer(sent_s: float, first_s: float, end_s: float, **more: Any) -> dict[str, Any]:
    """A request by its times since the load's start."""
    tokens = {"input_tokens": 100, "output_tokens": 10}
    return answered(sent_s, first_s - sent_s, end_s - sent_s, **tokens | more)


def served(
    arrivals_s: list[float], servers: int, service_s: float, *, rate_of_failure: float = 0.0
) -> Measurement:
    """First come, first served, by so many servers; an answer's first token comes when its service begins."""
    free = [0.0] * servers
    random, rows = Random(1), []
    for at in arrivals_s:
        if random.random() < rate_of_failure:
            rows.append(answer(at, at, at, outcome="upstream_error", ttft_ns=None, ttft_any_ns=None))
            continue
        begin = max(at, free[0])
        heapreplace(free, begin + service_s)
        rows.append(answer(at, begin, begin + service_s))
    return measured("level", rows, load=OVER)


def evenly(rate: float, seconds: float) -> list[float]:
    return [i / rate for i in range(round(rate * seconds))]


def poisson(rate: float, seconds: float, seed: int) -> list[float]:
    def times() -> Iterator[float]:
        random, t = Random(seed), 0.0
        while (t := t + random.expovariate(rate)) < seconds:
            yield t

    return list(times())


def test_counts_by_hand() -> None:
    """Ten seconds, of which the first is dropped."""
    rows = [
        answer(0.0, 0.5, 2.0),  # 10 tokens in 1.5 s, of which 1 s counts: 6.67
        answer(2.0, 3.0, 7.0),  # all of them
        answer(5.0, 6.0, 8.0, outcome="truncated"),  # sent, and no answer
        answer(8.0, 9.0, 13.0),  # a quarter: 2.5
    ]
    steady = steady_part_of(measured("x", rows, load=OVER), 10.0)
    assert (steady.from_s, steady.to_s, steady.seconds) == (1.0, 10.0, 9.0)
    assert (steady.arrivals, steady.completed) == (3, 2)
    assert steady.output_tokens == pytest.approx(10 / 1.5 + 10 + 2.5)
    assert steady.output_tps == pytest.approx((10 / 1.5 + 12.5) / 9)
    assert steady.input_tokens == 200, "of the second and the last: the first token of the first came before"
    assert (steady.completed_rps, steady.arrival_rps) == (2 / 9, 3 / 9)
    # Answers take 5 s (the median): those sent before 5 s should have come, which are two, and they did.
    assert (steady.expected, steady.delivered_share) == (2, 1.0)
    assert steady.success_share == pytest.approx(2 / 3)
    assert (steady.in_flight_begin, steady.in_flight_end) == (1, 1)
    # Fifths of 1.8 s: 1 s of the first's answer and 0.8 s of the second; then the second, and so on.
    assert steady.in_flight == pytest.approx(
        [1.8 / 1.8, 1.0, (1.8 + 1.4) / 1.8, (0.6 + 1.6 + 0.2) / 1.8, 1.0]
    )
    assert steady.halves == pytest.approx((10 / 1.5 + 10 * 2.5 / 4, 10 * 1.5 / 4 + 2.5))
    assert steady.latency("ttft_ns", 0.5) == 1.0


def test_tokens_held_by_hand() -> None:
    """From 1 s to 10 s: one prompt of 100 all the time, its answer of 10 growing evenly from 0 to 20 s."""
    steady = steady_part_of(measured("x", [answer(0.0, 0.0, 20.0), answer(9.9, 19.0, 20.0)], load=OVER), 10.0)
    mean_of_answer = (0.5 + 5.0) / 2
    assert steady.held_tokens == pytest.approx(100 + mean_of_answer + 100 * 0.1 / 9)


def test_a_plan_that_is_over_sooner_counts_until_its_last_request() -> None:
    rows = [answer(t, t, t + 3) for t in range(6)]
    assert steady_part_of(measured("x", rows, load={"stopped": None}), 60.0).to_s == 5.0
    assert steady_part_of(measured("x", rows, load=OVER), 60.0).to_s == 60.0
    assert steady_part_of(measured("x", rows, load={"stopped": None})).to_s == 5.0


def test_what_broke_off_was_in_flight_until_the_last_that_is_known_of_it() -> None:
    rows = [
        answer(1.0, 2.0, 0.0, end_ns=None, outcome="upstream_reset", gaps_ns=[S, S]),
        {"scheduled_ns": 5 * S, "outcome": "upstream_error"},
    ]
    steady = steady_part_of(measured("x", rows, load=OVER), 10.0)
    assert steady.in_flight[0] == pytest.approx(1.0), "1 s to 4 s, of 1 s to 2.8 s"
    assert steady.in_flight[1] == pytest.approx(1.2 / 1.8)
    assert steady.arrivals == 2, "one never got a connection, and came all the same"


@pytest.mark.parametrize("seconds", [60.0, 300.0])
@pytest.mark.parametrize("over", [1.15, 1.5, 3.0])
def test_beyond_capacity_the_queue_grows(seconds: float, over: float) -> None:
    """8 servers of 1 s: 8 requests a second. 15 % more than that can be less in a minute, by chance."""
    loads = [steady_part_of(served(poisson(8 * over, seconds, seed), 8, 1.0), seconds) for seed in range(10)]
    seen = sum(steady.queue_grows or steady.falls_short for steady in loads)
    assert seen >= (8 if seconds == 60 and over < 1.2 else 10)
    if over > 1.2:
        assert all(steady.queue_grows and steady.falls_short for steady in loads)


def test_below_capacity_it_does_not_but_for_chance() -> None:
    """Half and three quarters of capacity, of 100 loads each: one in fifty may be taken for more."""
    for rate in (4.0, 6.0):
        wrong = 0
        for seed in range(100):
            steady = steady_part_of(served(poisson(rate, 60.0, seed), 8, 1.0), 60.0)
            wrong += steady.queue_grows or steady.falls_short
        assert wrong <= 2


def test_long_answers_ramp_up_is_no_queue() -> None:
    """Answers of 15 s in a load of 60 s: what is in flight rises for a quarter of it, and stays. One in ten
    may be taken for more: a load that lasts four answers says no better."""
    wrong = 0
    for seed in range(50):
        steady = steady_part_of(served(poisson(4.0, 60.0, seed), 1_000, 15.0), 60.0)
        wrong += steady.queue_grows
    assert wrong <= 5
    even = steady_part_of(served(evenly(4.0, 60.0), 1_000, 15.0), 60.0)
    assert not even.queue_grows
    assert even.delivered_share == pytest.approx(1.0, abs=0.01), (
        "nothing is missing but the time that answers take"
    )


def test_a_small_overload_is_seen_where_arrivals_are_even() -> None:
    """A twentieth more than capacity, and no chance in it."""
    steady = steady_part_of(served(evenly(8.4, 300.0), 8, 1.0), 300.0)
    assert steady.queue_grows
    assert not steady.falls_short, "95 % complete"


def test_failures_count_as_not_completed() -> None:
    steady = steady_part_of(served(evenly(8.0, 60.0), 16, 1.0, rate_of_failure=0.3), 60.0)
    assert not steady.queue_grows
    assert steady.falls_short
    assert steady.success_share == pytest.approx(0.7, abs=0.06)


def test_throughput_that_falls_is_not_stable() -> None:
    """After 30 s each answer takes three times as long; nothing waits."""
    rows = [answer(t, t, t + 1.0) for t in evenly(20.0, 30.0)]
    rows += [answer(30 + t, 30 + t, 33 + t) for t in evenly(20.0 / 3, 30.0)]
    steady = steady_part_of(measured("x", rows, load=OVER), 60.0)
    assert not steady.throughput_is_stable
    assert not steady.is_sustained
    even = steady_part_of(served(evenly(8.0, 60.0), 16, 1.0), 60.0)
    assert even.throughput_is_stable


def test_stability_allows_for_chance() -> None:
    """One request a second: halves of 27 differ by more than a tenth, and mean nothing by it."""
    stable = sum(
        steady_part_of(served(poisson(1.0, 60.0, seed), 8, 1.0), 60.0).throughput_is_stable
        for seed in range(50)
    )
    assert stable >= 49


def of_e2e(*seconds: float) -> SteadyPart:
    rows = [answer(1.0 + i / 100, 2.0, 2.0, e2e_ns=round(s * S)) for i, s in enumerate(seconds)]
    return steady_part_of(measured("x", rows, load=OVER), 10.0)


def test_the_tail_is_held_against_the_lowest_load() -> None:
    lowest = of_e2e(*[1.0] * 99, 1.5)
    assert not tail_is_heavy(of_e2e(*[9.0] * 100), lowest)
    assert tail_is_heavy(of_e2e(*[10.1] * 100), lowest)
    assert tail_is_heavy(of_e2e(*[1.0] * 90, *[20.0] * 10), lowest)


def test_lengths_that_vary_as_much_at_the_lowest_load_are_no_tail_of_load() -> None:
    lowest = of_e2e(*[1.0] * 90, *[20.0] * 10)
    assert not tail_is_heavy(of_e2e(*[1.0] * 90, *[20.0] * 10), lowest)
    assert not tail_is_heavy(of_e2e(), lowest), "nobody was answered"


def test_times_of_an_exchange_count_from_the_start_of_the_load() -> None:
    x = streamed(1, 3, at_ms=7, gap_ms=10)
    began_ns = x.timeline.arrival_ns - S
    x.scheduled_ns = began_ns + S // 2
    objectives = Objectives.parse("ttft:1s tbc_max:5ms")
    recorder = MeasurementRecorder(began_ns, lambda row: f"class {row}", objectives, Benefit(alpha=0.0))
    recorder.add(4, x)
    (row,) = recorder.table().to_pylist()
    assert (row["met"], row["smooth_benefit"]) == (False, row["output_tokens"]), "gaps of 10 ms; alpha is 0"
    t = x.timeline
    assert t.submit_ns is not None and t.response_end_ns is not None
    assert (row["row"], row["request_class"], row["scheduled_ns"]) == (4, "class 4", S // 2)
    assert (row["sent_ns"], row["end_ns"]) == (t.submit_ns - began_ns, t.response_end_ns - began_ns)
    assert (row["gaps_ns"], row["server_gaps_ns"], row["outcome"]) == ([10_000_000] * 2, None, "complete")


def test_a_request_whose_answer_was_not_understood_is_not_judged(tmp_path: Path) -> None:
    """A table of a version that did not record it is read as unknown."""
    x, unread = streamed(1, 3, at_ms=7, gap_ms=10), streamed(2, 3, at_ms=7, gap_ms=10)
    unread.reading = Reading.NONE
    recorder = MeasurementRecorder(x.timeline.arrival_ns, objectives=Objectives.parse("ttft:1s"))
    recorder.add(0, x)
    recorder.add(1, unread)
    table = recorder.table().sort_by("row")
    assert table["met"].to_pylist() == [True, None]
    assert table["not_judged"].to_pylist() == [False, True]
    Measurement("x", "", {}, table.drop_columns("not_judged")).save(tmp_path)
    assert Measurement.load(tmp_path, "x", "", {}).table["not_judged"].to_pylist() == [None, None]

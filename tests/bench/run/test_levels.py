"""Load levels: texts, bounds and sizes of closed loops; the search for capacity; overloaded loads."""

import asyncio
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmtap.bench.run.levels import (
    ROWS_MAX,
    Bounds,
    LevelAttempt,
    RateSearch,
    completion_ratio_if_overloaded,
    find_capacity,
    incomplete_by_outcome,
    known_capacity,
    level_figures,
    memory_errors,
    rows_for,
    server_mean,
    server_total,
    share_text,
    verdict_text,
)
from llmtap.bench.run.measurement import Measurement, steady_part_of
from llmtap.bench.run.session import Folder, Load, make_load
from llmtap.bench.sut.sut import TokenCounting
from llmtap.errors import ConfigError
from llmtap.metrics.objectives import Objectives
from llmtap.units import Duration
from tests.bench.support import Planted, answered, measured
from tests.support.servers.peer import play

MS = 1_000_000
S = 1_000 * MS
OVER = {"stopped": "the time was up"}


def rows_of(ttft_ms: list[float], failed: int = 0) -> list[dict[str, Any]]:
    """From second 1 on; the last `failed` of them failed."""
    n = len(ttft_ms)
    return [
        {
            "sent_ns": S + i,
            "end_ns": 2 * S,
            "ttft_ns": round(ttft * MS),
            "ttft_any_ns": round(ttft * MS),
            "tpot_ns": 10.0 * MS,
            "outcome": "complete" if i < n - failed else "upstream_reset",
        }
        for i, ttft in enumerate(ttft_ms)
    ]


def test_any_objective_can_bound_a_level() -> None:
    """Of 100 requests one does not count and two miss; a tenth of the tokens is lost to waiting."""
    rows = rows_of([100.0] * 100)
    for i, row in enumerate(rows):
        row |= {"met": None if i == 0 else i > 2, "output_tokens": 10, "smooth_benefit": 9.0}
    steady = steady_part_of(measured("x", rows, load=OVER), 10.0)
    assert (steady.attainment, steady.smooth_share) == (97 / 99, pytest.approx(0.9))
    for attainment, smooth, broken in ((0.97, 0.89, 0), (0.98, 0.89, 1), (0.97, 0.91, 1), (0.98, 0.91, 2)):
        bounds = Bounds(objectives="user_idle:1s", attainment=attainment, smooth=smooth)
        assert len(bounds.violations(steady)) == broken
        assert bounds.slo == "user_idle:1s"
    failing = steady_part_of(measured("x", rows_of([100.0] * 100, 50), load=OVER), 10.0)
    assert failing.attainment is failing.smooth_share is None
    assert len(Bounds(objectives="e2e:9s", smooth=0.5).violations(failing)) == 2


def test_requests_that_are_not_judged_stand_beside_the_attainment() -> None:
    """Of 10 requests 4 are good and 5 not judged; one does not count."""
    rows = rows_of([100.0] * 10)
    for i, row in enumerate(rows):
        row |= {"met": True if i < 4 else None, "not_judged": 4 <= i < 9}
    tried = LevelAttempt(
        1.0, measured("x", rows, load=OVER), steady_part_of(measured("x", rows, load=OVER), 10.0), True, ""
    )
    report = level_figures(tried)
    assert (report.attainment, report.not_judged) == (1.0, 5)
    assert verdict_text(tried.steady_part, [], "sustained").startswith("sustained; 5 not judged")
    assert verdict_text(tried.steady_part, ["slow", "full"]).startswith("slow; full; 5 not judged")
    without = steady_part_of(measured("x", rows_of([100.0] * 10), load=OVER), 10.0)
    assert (without.not_judged, verdict_text(without, [], "sustained")) == (None, "sustained")


def test_bounds_are_met_or_named() -> None:
    bounds = Bounds(ttft=Duration(100 * MS), tpot=Duration(20 * MS))
    assert bounds.text == "TTFT P99 <= 100 ms, TPOT P99 <= 20.0 ms"
    bound = bounds.report()
    assert bound is not None
    assert (bound.ttft_p99, bound.tpot_p99, bound.objectives) == (0.1, 0.02, None)
    assert Objectives.parse(bounds.slo or "").text == "ttft:100ms tpot:20ms"
    assert not Bounds()
    assert Bounds().slo is None

    def broken(ttft_ms: list[float], failed: int = 0) -> list[str]:
        return bounds.violations(steady_part_of(measured("x", rows_of(ttft_ms, failed), load=OVER), 10.0))

    assert broken([100.0] * 200) == []
    assert broken([100.0] * 195 + [101.0] * 5) == ["TTFT P99 101 ms > 100 ms"]
    assert broken([50.0] * 200, 2) == [], "1 % is what a P99 leaves"
    assert broken([50.0] * 200, 3) == ["1.5% of the requests failed: a P99 leaves 1%"]
    assert broken([50.0] * 2, 2)[0] == "no answer has a TTFT"


def test_rows_for_a_closed_loop() -> None:
    # 8 slots had 10 answers a second: 16 have 20 at most, half as many again are made, and two for each slot.
    assert rows_for(16, 60, (8, 10.0)) == 20 * 60 * 1.5 + 32
    assert rows_for(4, 60, (8, 10.0)) == 10 * 60 * 1.5 + 8, "fewer may be as quick together"
    assert rows_for(8, 60, None) == 8 * 5 * 60 + 16
    assert rows_for(512, 3_600, None) == ROWS_MAX


def test_errors_of_memory_and_endings() -> None:
    errors = {
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB": 2,
        "worker killed (OOM)": 1,
        "the room was empty": 5,
        "connection reset": 7,
    }
    result = measured("x", rows_of([1.0] * 4, 3), errors=errors)
    assert memory_errors(result) == 3
    assert incomplete_by_outcome(result) == {"upstream_reset": 3}
    assert memory_errors(measured("x", [])) == 0


def test_what_a_server_said_of_itself() -> None:
    """Samples of the ramp-up and of the time after the load do not count, nor those without a value."""
    series = {"t": [0.5, 2.0, 5.0, 8.0, 11.0], "series": {"running": {"values": [1.0, 4.0, None, 6.0, 99.0]}}}
    system = {"series": {"server": series}, "summary": {"server": {"preemptions": {"total": 3.0}}}}
    result = measured("x", rows_of([1.0]), load=OVER, system=system)
    steady = steady_part_of(result, 10.0)
    assert server_mean(result, "running", steady) == 5.0
    assert server_mean(result, "waiting", steady) is None
    assert server_total(result, "preemptions") == 3.0
    silent = measured("x", rows_of([1.0]), load=OVER, system={"series": {"server": None}, "summary": {}})
    assert server_mean(silent, "running", steady) is None
    assert server_total(silent, "preemptions") is None


def slots_of(limit: int, e2e_s: float = 1.0, tokens: int | None = 10) -> Any:
    """A server that serves `limit` at a time, each in a second; more take turns."""

    def answer(name: str, load: Load) -> Measurement:
        assert load.slots is not None
        each = e2e_s * max(1.0, load.slots / limit)
        rows = []
        for i in range(len(load.plan.requests)):
            # Slots begin one after the other, and go on so.
            sent = (i // load.slots + i % load.slots / load.slots) * each
            rows.append(answered(sent, 0, each, output_tokens=tokens, input_tokens=1))
        return measured(name, rows)

    return answer


def closed(slots: int, requests: int) -> Load:
    return make_load(
        "synthetic-uniform", slots=slots, requests=requests, seed=slots, counting=TokenCounting(chat=False)
    )


@pytest.mark.parametrize(("limit", "rps", "slots"), [(20, 20.0, 32), (8, 8.0, 8), (64, 64.0, 64)])
def test_the_capacity_is_where_more_bring_no_more(tmp_path: Path, limit: int, rps: float, slots: int) -> None:
    session = Planted(tmp_path, slots_of(limit))
    result = asyncio.run(find_capacity(session, closed, 256))
    assert result.rps == pytest.approx(rps, rel=0.06)
    assert result.tps == pytest.approx(10 * rps, rel=0.06)
    assert result.saturated
    assert result.how == f"closed loop of {slots} at a time: more bring no more"
    # Doubled until one brought nothing, and no further.
    assert session.loads[-1][1].slots == 2 * slots
    assert [name for name, _ in session.loads][:2] == ["capacity/0008-at-a-time", "capacity/0016-at-a-time"]


def test_a_search_that_meets_its_bound_says_so(tmp_path: Path) -> None:
    session = Planted(tmp_path, slots_of(1_000, tokens=None))
    result = asyncio.run(find_capacity(session, closed, 24))
    assert not result.saturated
    assert result.how.endswith("more than 24 were not tried")
    assert [load.slots for _, load in session.loads] == [8, 16, 24]
    assert result.tps is None
    # Nothing ends in the first second, of which the ramp-up is 0.6: by answers it is a little less.
    assert result.rps == pytest.approx(24 * 5 / 5.4, rel=0.03)


def test_a_capacity_is_taken_of_the_same_workload_only(tmp_path: Path) -> None:
    session = Planted(tmp_path, slots_of(1))
    assert known_capacity(session, None, "conversation") is None
    known = known_capacity(session, 7.5, "conversation")
    assert known is not None
    assert (known.rps, known.how) == (7.5, "given as max_rate")
    throughput = Folder(tmp_path).subfolder("throughput")
    result = {"measurements": {"sustainable_load_rps": 12.0}, "params": {"workload": "conversation"}}
    throughput.write_json("result.json", result)
    report = known_capacity(session, None, "conversation")
    assert report is not None
    assert report.rps == 12.0
    assert known_capacity(session, None, "code-completion") is None
    assert known_capacity(session, None) is None


def queued(rate: float, per_s: float, seconds: float, seed: int) -> Measurement:
    """A single server of a fixed time per request, Poisson arrivals."""
    random, at, free = Random(seed), 0.0, 0.0
    rows = []
    while True:
        at += random.expovariate(rate)
        if at > seconds:
            return measured("load", rows)
        free = max(at, free) + 1 / per_s
        rows.append(answered(at, free - at, free - at, output_tokens=1))


def test_what_does_not_keep_up_is_told_and_what_does_is_not() -> None:
    for seed in range(10):
        assert completion_ratio_if_overloaded(queued(8.0, 10.0, 60.0, seed)) is None
        stored = completion_ratio_if_overloaded(queued(20.0, 10.0, 60.0, seed))
        assert stored is not None
        assert stored == pytest.approx(0.5, abs=0.1)


def test_a_load_that_is_no_longer_than_its_answers_says_nothing() -> None:
    """24 requests in 2.4 s, each of 2 s: none is answered in the first half, and nothing is wrong."""
    rows = [answered(i / 10, 0.1, 2, output_tokens=10) for i in range(24)]
    assert completion_ratio_if_overloaded(measured("short", rows)) is None


def test_what_is_not_all_is_not_called_all() -> None:
    values = (1.0, 0.998, 0.99999, 0.00001, 0.0, None)
    assert [share_text(value) for value in values] == ["100%", "99.8%", "99.9%", "0.1%", "0%", "-"]


def played(search: RateSearch, limit: int) -> list[int]:
    """Tries levels, of which those above `limit` break, until the search is over; the levels in order."""
    request = []
    while (level := search.next_level) is not None:
        request.append(level)
        search.record(level, level <= limit)
    return request


def test_doubling_then_halving_by_hand() -> None:
    """Table 7's shape: 8 to 128 doubled, then between 64 and 128 to the last one."""
    search = RateSearch(low=1, high=512, start=8)
    assert played(search, 70) == [8, 16, 32, 64, 128, 96, 80, 72, 68, 70, 71]
    assert (search.best, search.limit) == (70, 71)


@given(
    low=st.integers(1, 20),
    above=st.integers(0, 300),
    begin=st.integers(0, 300),
    limit=st.integers(0, 400),
    resolution=st.integers(1, 9),
)
def test_a_planted_limit_is_found(low: int, above: int, begin: int, limit: int, resolution: int) -> None:
    high = low + above
    search = RateSearch(low=low, high=high, start=min(high, low + begin), resolution=resolution)
    remaining = []
    while (level := search.next_level) is not None:
        assert low <= level <= high
        remaining.append(search.attempts_max)
        search.record(level, level <= limit)
    tries = len(remaining)
    for done, left in enumerate(remaining):
        assert left >= tries - done, "no more is left than it said"
    assert search.attempts_max == 0
    if limit < low:
        assert (search.best, search.limit) == (None, low)
    elif limit >= high:
        assert (search.best, search.limit) == (high, None)
    else:
        assert search.best is not None
        assert search.best <= limit < search.best + resolution


@given(highest=st.integers(0, 400), start=st.integers(1, 40), wrong=st.integers(0, 400))
def test_the_expected_levels_are_those_of_the_search(highest: int, start: int, wrong: int) -> None:
    """With the right limit they are exact; with a wrong one, they agree with the verdicts so far."""
    search = RateSearch(low=1, high=300, start=start)
    expected = search.expected_levels(highest)
    while (level := search.next_level) is not None:
        assert search.expected_levels(highest) == expected
        for levels in (search.expected_levels(wrong), search.expected_levels(None)):
            assert levels[0] == level
            assert search.best is None or min(levels) > search.best
            assert search.limit is None or max(levels) < search.limit
        search.record(expected.pop(0), level <= highest)
    assert expected == search.expected_levels(wrong) == []


def test_a_search_for_capacity_without_an_answer_says_so(tmp_path: Path) -> None:
    """Not an error about a rate of 0 that nobody gave."""

    def answer(name: str, load: Load) -> Measurement:
        failed = {"sent_ns": 0, "end_ns": 1_000_000, "outcome": "upstream_error"}
        return measured(name, [failed] * len(load.plan.requests))

    def load_of(slots: int, requests: int) -> Load:
        return make_load("synthetic-uniform", seed=1, slots=slots, requests=requests)

    with pytest.raises(ConfigError, match="upstream_error") as caught:
        play(find_capacity(Planted(tmp_path, answer), load_of, 16))
    assert caught.value.place == "target.url"

"""Capacity: given, known of the same workload, or found by closed loops; and loads that were too much."""

import asyncio
from pathlib import Path
from random import Random
from typing import Any

import pytest

from llmtap.bench.run.folder import Folder
from llmtap.bench.run.levels import capacity_told, find_capacity, is_long, overload
from llmtap.bench.run.loads import Load, closed_load
from llmtap.bench.run.measurement import Measurement
from tests.bench.support import Planted, measured

S = 1_000_000_000


def slots_of(limit: int, e2e_s: float = 1.0, tokens: int | None = 10) -> Any:
    """A server that serves `limit` at a time, each in a second; more take turns."""

    def answer(name: str, load: Load) -> Measurement:
        assert load.closed is not None
        each = e2e_s * max(1.0, load.closed / limit)
        rows = []
        for i in range(len(load.plan.requests)):
            # Slots begin one after the other, and go on so.
            sent = (i // load.closed + i % load.closed / load.closed) * each
            rows.append({
                "sent_ns": round(sent * S), "end_ns": round((sent + each) * S), "ttft_ns": 1,
                "ttft_any_ns": 1, "e2e_ns": round(each * S), "output_tokens": tokens, "input_tokens": 1,
            })  # fmt: skip
        return measured(name, rows)

    return answer


def closed(slots: int, requests: int) -> Load:
    return closed_load("synthetic-uniform", slots=slots, requests=requests, seed=slots, chat=False)


@pytest.mark.parametrize(("limit", "rps", "slots"), [(20, 20.0, 32), (8, 8.0, 8), (64, 64.0, 64)])
def test_the_capacity_is_where_more_bring_no_more(tmp_path: Path, limit: int, rps: float, slots: int) -> None:
    session = Planted(tmp_path, slots_of(limit))
    found = asyncio.run(find_capacity(session, closed, 256))
    assert found.rps == pytest.approx(rps, rel=0.06)
    assert found.tps == pytest.approx(10 * rps, rel=0.06)
    assert found.saturated
    assert found.how == f"closed loop of {slots} at a time: more bring no more"
    # Doubled until one brought nothing, and no further.
    assert session.asked[-1][1].closed == 2 * slots
    assert [name for name, _ in session.asked][:2] == ["capacity/0008-at-a-time", "capacity/0016-at-a-time"]


def test_a_search_that_meets_its_bound_says_so(tmp_path: Path) -> None:
    session = Planted(tmp_path, slots_of(1_000, tokens=None))
    found = asyncio.run(find_capacity(session, closed, 24))
    assert not found.saturated
    assert found.how.endswith("more than 24 were not tried")
    assert [load.closed for _, load in session.asked] == [8, 16, 24]
    assert found.tps is None
    # Nothing ends in the first second, of which the ramp-up is 0.6: by answers it is a little less.
    assert found.rps == pytest.approx(24 * 5 / 5.4, rel=0.03)


def test_a_gain_of_a_few_percent_is_the_end(tmp_path: Path) -> None:
    """Above 8 at a time each doubling brings 2 % more, and would for ever."""

    def answer(name: str, load: Load) -> Measurement:
        assert load.closed is not None
        found: Measurement = slots_of(8, 1 / 1.02 ** (load.closed / 8))(name, load)
        return found

    session = Planted(tmp_path, answer)
    found = asyncio.run(find_capacity(session, closed, 256))
    assert found.saturated
    assert [load.closed for _, load in session.asked] == [8, 16]
    assert found.rps == pytest.approx(8 * 1.02**2, rel=0.06)


def test_a_capacity_is_taken_of_the_same_workload_only(tmp_path: Path) -> None:
    session = Planted(tmp_path, slots_of(1))
    assert capacity_told(session, None, "conversation") is None
    given = capacity_told(session, 7.5, "conversation")
    assert given is not None
    assert (given.rps, given.how) == (7.5, "given as max_rate")
    throughput = Folder(tmp_path).within("throughput")
    result = {"measurements": {"sustainable_load_rps": 12.0}, "params": {"workload": "conversation"}}
    throughput.write_json("result.json", result)
    told = capacity_told(session, None, "conversation")
    assert told is not None
    assert told.rps == 12.0
    assert capacity_told(session, None, "code-completion") is None
    assert capacity_told(session, None) is None
    result["measurements"]["sustainable_load_rps"] = {"value": 3.0}  # type: ignore[assignment]
    throughput.write_json("result.json", result)
    told = capacity_told(session, None, "conversation")
    assert told is not None
    assert told.rps == 3.0


def queued(rate: float, per_s: float, seconds: float, seed: int) -> Measurement:
    """A single server of a fixed time per request, Poisson arrivals."""
    random, at, free = Random(seed), 0.0, 0.0
    rows = []
    while True:
        at += random.expovariate(rate)
        if at > seconds:
            return measured("load", rows)
        free = max(at, free) + 1 / per_s
        rows.append({
            "sent_ns": round(at * S), "end_ns": round(free * S), "e2e_ns": round((free - at) * S),
            "ttft_ns": round((free - at) * S), "ttft_any_ns": round((free - at) * S), "output_tokens": 1,
        })  # fmt: skip


def test_what_does_not_keep_up_is_told_and_what_does_is_not() -> None:
    for seed in range(10):
        assert overload(queued(8.0, 10.0, 60.0, seed)) is None
        kept = overload(queued(20.0, 10.0, 60.0, seed))
        assert kept is not None
        assert kept == pytest.approx(0.5, abs=0.1)


def test_a_load_that_is_no_longer_than_its_answers_says_nothing() -> None:
    """24 requests in 2.4 s, each of 2 s: none is answered in the first half, and nothing is wrong."""
    rows = [
        {"sent_ns": i * S // 10, "ttft_ns": S // 10, "ttft_any_ns": S // 10, "e2e_ns": 2 * S,
         "end_ns": i * S // 10 + 2 * S, "output_tokens": 10}
        for i in range(24)
    ]  # fmt: skip
    assert not is_long(measured("short", rows))
    assert overload(measured("short", rows)) is None
    assert is_long(queued(8.0, 10.0, 60.0, 1))

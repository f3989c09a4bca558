"""Each request is compared with the very row it was made of, and what both sides say is added up rightly."""

import asyncio
import json
import os
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmtap import __version__
from llmtap.capture.read.reader import read
from llmtap.capture.schema import CaptureInfo
from llmtap.exchange.exchange import Exchange
from llmtap.exchange.outcome import Outcome
from llmtap.load.options import ScheduleOptions, Window
from llmtap.load.replay.baseline import FIGURES, SHARES, Baseline, find_recorded_answers, read_recorded
from llmtap.load.replay.plan import ReplayPlan, make_plan
from llmtap.metrics.histogram import RELATIVE_ERROR
from llmtap.metrics.latency import measure
from llmtap.metrics.statistics import percentile
from llmtap.sim.server.options import SimOptions
from llmtap.units import Duration
from llmtap.workload.requests import Requests
from llmtap.workload.trace import Trace
from tests.load.replay.support import replayed
from tests.support.results.baselines import MS, answer, both, captured
from tests.support.servers.sim_engine import engine
from tests.support.storage.captures import write_capture

ARRIVALS_MS = (500, 100, 900, 300, 300, 700, 0, 1_100, 1_300, 1_200)
"""Rows of a capture are in the order of their ends, not of their arrivals."""


def told(baseline: Baseline) -> dict[str, Any]:
    result = baseline.to_dict()
    assert result is not None
    json.dumps(result, allow_nan=False)
    return result


def close_to(expected: float | Sequence[float | None]) -> Any:
    """Within what histograms are wrong by, of seconds."""
    return pytest.approx(expected, rel=2 * RELATIVE_ERROR, abs=1e-12)


def shares_of(values: Sequence[float]) -> list[float | None]:
    return [percentile(sorted(values), share) for share in SHARES.values()]


# ---------------------------------------------------------------- which row is which


@pytest.mark.parametrize(
    ("asked", "rows"),
    [
        ({}, [6, 1, 3, 4, 0, 5, 2, 7, 9, 8]),
        ({"requests": 4}, [1, 3, 0, 2]),  # the first four of the file, in the order of their arrivals
        ({"requests": 25}, [6, 1, 3, 4, 0, 5, 2, 7, 9, 8]),
        ({"window": Window(300 * MS, 500 * MS), "requests": 7}, [3, 4, 0, 5]),
        ({"arrivals": "poisson", "rate": 100.0}, [6, 1, 3, 4, 0, 5, 2, 7, 9, 8]),
        ({"share": 0.5, "window": Window(100 * MS), "requests": 20}, None),
    ],
)
def test_a_request_is_compared_with_the_row_it_was_made_of(
    asked: dict[str, Any], rows: list[int] | None, tmp_path: Path
) -> None:
    place = captured(tmp_path / "c.parquet", ARRIVALS_MS)
    plan = make_plan(ScheduleOptions(source=place, **asked))
    places = list(plan.baseline.source_rows)
    # Each row's prompt has a length of its own.
    assert places == [n - 10 for n in plan.requests.input][: len(places)]
    assert rows is None or places == rows
    assert len(set(places)) == len(places) > 0
    baseline = Baseline(plan.baseline)
    for row, n in enumerate(plan.requests.input):
        # Later by as much as only this row is.
        baseline.add_replayed(row, answer(n - 10, 60 + n, n - 7))
    assert read_recorded(baseline, plan.requests).arrivals == "wall"
    result = told(baseline)
    more = [(60 + place + 10 - 20) / 1e3 for place in places]
    assert list(result["pairs"]["ttft"]["difference"].values()) == close_to(shares_of(more))
    assert result["pairs"]["ttft"]["slower"] == 1
    assert result["requests"] == {
        "compared": len(places),
        "not_found": 0,
        "repeated": len(plan.requests) - len(places),
    }
    assert result["output_tokens"]["equal"] == result["output_tokens"]["n"] == len(places)


@pytest.mark.parametrize(
    ("model", "version", "notes"), [("tiny", __version__, 1), ("large", __version__, 2), ("tiny", "0.0.1", 2)]
)
def test_notes_say_what_differs_between_the_places(model: str, version: str, notes: int) -> None:
    then, now = answer(0, 20), answer(0, 60)
    then.model = model
    baseline = both([(then, now)])
    result = baseline.to_dict(CaptureInfo(tap_version=version))
    found = result["notes"]
    assert isinstance(found, list)
    assert len(found) == notes
    assert (model in found[0], version in found[0]) == (model == "large", version == "0.0.1")


def test_a_row_that_has_other_lengths_is_another_one(tmp_path: Path) -> None:
    path = tmp_path / "c.parquet"
    plan = make_plan(ScheduleOptions(source=captured(path, ARRIVALS_MS)))
    assert plan.baseline is not None
    captured(path, (*ARRIVALS_MS[:4], 1, 2, 3, 4))  # two are gone
    baseline = Baseline(plan.baseline)
    for row, n in enumerate(plan.requests.input):
        baseline.add_replayed(row, answer(n - 10, 60, n - 7))
    changed = Requests(**{f: getattr(plan.requests, f) for f in ("arrival_ns", "output")})
    changed.input = array("q", plan.requests.input)
    changed.input[0] += 1
    read_recorded(baseline, changed)
    result = told(baseline)
    assert result["requests"] == {"compared": 7, "not_found": 3, "repeated": 0}
    assert result["notes"][:-1] == ["3 rows were not found again: the source has changed meanwhile"]


# ---------------------------------------------------------------- what is made of them

TIMES = st.lists(st.tuples(st.integers(1, 5_000), st.integers(1, 5_000)), min_size=1, max_size=40)


@given(TIMES)
def test_differences_are_those_of_pairs(times: list[tuple[int, int]]) -> None:
    result = told(both([(answer(0, then), answer(0, now)) for then, now in times]))
    more = [(now - then) / 1e3 for then, now in times]
    for name, wait_s in (("ttft", 0.0), ("e2e", 0.041)):
        pair = result["pairs"][name]
        assert pair["n"] == len(times)
        for side, values in (("then", [t for t, _ in times]), ("now", [n for _, n in times])):
            expected = shares_of([v / 1e3 + wait_s for v in values])
            assert list(pair[side].values()) == close_to(expected)
        # Between two order statistics far apart the error is that of the larger.
        largest = max(map(abs, more))
        assert list(pair["difference"].values()) == pytest.approx(
            shares_of(more), abs=RELATIVE_ERROR * largest + 1e-12
        )
        assert pair["slower"] == sum(m > 0 for m in more) / len(more)
    for name in ("tpot", "tbc_max"):
        assert list(result["pairs"][name]["difference"].values()) == [0, 0, 0]
        assert result["pairs"][name]["slower"] == 0


def ended(x: Exchange, outcome: Outcome) -> Exchange:
    x.outcome = outcome
    return x


def test_a_pair_ended_well_on_both_sides() -> None:
    kinds = (Outcome.COMPLETE, Outcome.REFUSED, Outcome.TRUNCATED, Outcome.UPSTREAM_RESET)
    pairs = [(ended(answer(0, 20), then), ended(answer(0, 60), now)) for then in kinds for now in kinds]
    result = told(both(pairs))
    assert result["ended_well"] == {"both": 4, "then": 4, "now": 4, "neither": 4}
    assert {result["pairs"][name]["n"] for name in ("ttft", "tpot", "tbc_max", "e2e")} == {4}


@pytest.mark.parametrize(
    ("lengths", "expected", "said"),
    [
        ([(100, 95)] * 20, (20, 0, 20, True), None),
        ([(100, 94)] * 1 + [(100, 100)] * 19, (20, 19, 19, True), None),
        ([(100, 106)] * 2 + [(100, 100)] * 18, (20, 18, 18, False), "2 of 20 answers are longer or shorter"),
    ],
)
def test_where_lengths_differ_e2e_cannot_be_compared_and_that_is_said(
    lengths: list[tuple[int, int]], expected: tuple[int, int, int, bool], said: str | None
) -> None:
    result = told(both([(answer(0, 20, then), answer(0, 20, now)) for then, now in lengths]))
    figures = result["output_tokens"]
    assert tuple(figures[name] for name in ("n", "equal", "near", "comparable")) == expected
    assert result["pairs"]["e2e"]["n"] == len(lengths)
    assert result["pairs"]["e2e_same_length"]["n"] == expected[1]
    notes = [note for note in result["notes"] if "E2E" in note]
    assert (said is None and not notes) or (said is not None and notes[0].startswith(said))


# ---------------------------------------------------------------- formats of others

AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.6805900,374,44\n"
ELAPSED = (
    "Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
    "5,,0.25,m,3,4,7,API log\n6,,0.5,m,9,4,13,API log\n7,,,m,9,0,9,API log\n"
)


def test_a_format_without_latencies_has_no_baseline(tmp_path: Path) -> None:
    path = tmp_path / "b.csv"
    path.write_text(AZURE)
    plan = make_plan(ScheduleOptions(source=str(path)))
    assert plan.baseline is None
    assert not [note for note in plan.notes if "comparison" in note]


def compared(plan: ReplayPlan, answers: Sequence[Exchange]) -> dict[str, Any]:
    assert plan.baseline is not None
    baseline = Baseline(plan.baseline)
    for row, x in enumerate(answers):
        baseline.add_replayed(row, x)
    result = baseline.to_dict(read_recorded(baseline, plan.requests))
    assert result is not None
    return result


def test_who_tells_how_long_an_answer_took_but_not_when_it_was_submitted_has_elapsed(tmp_path: Path) -> None:
    path = tmp_path / "b.csv"
    path.write_text(ELAPSED)
    # From arrival to the end: 1 ms to submit, then the first token, three gaps of 20 ms, and 1 ms.
    answers = [answer(0, ttft_ms, 4) for ttft_ms in (100, 200, 300)]
    result = compared(make_plan(ScheduleOptions(source=str(path))), answers)
    pairs = result["pairs"]
    assert {name: pairs[name]["n"] for name in FIGURES if pairs[name]["n"]} == {"elapsed": 2}
    assert list(pairs["elapsed"]["then"].values()) == close_to(shares_of([0.25, 0.5]))
    assert list(pairs["elapsed"]["now"].values()) == close_to(shares_of([0.162, 0.262]))
    assert pairs["elapsed"]["slower"] == 0
    assert result["ended_well"] == {"both": 2, "then": 0, "now": 1, "neither": 0}
    assert result["uncertainty"] is None
    assert result["notes"][:-1] == [
        "the source does not say when requests were submitted: elapsed counts from arrival",
        "the model was m then, and is tiny now",
    ]


def test_a_pipe_is_not_opened_again(tmp_path: Path) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    trace = Trace(Requests(), "har", has_answer_times=True, source_rows=array("q", [0]))
    for place in ("-", str(fifo), "/dev/stdin"):
        assert find_recorded_answers(trace, place, 1) is None
    assert find_recorded_answers(trace, str(tmp_path), 1) is not None


# ---------------------------------------------------------------- end to end


def test_a_capture_is_compared_with_its_replay(tmp_path: Path) -> None:
    """Server A needs 20 ms to the first token, B 60; the baseline agrees with both captures."""
    lines = [{"timestamp": 12 * i, "input_length": 20 + i, "output_length": 5 + i % 4} for i in range(40)]
    source = tmp_path / "trace.jsonl"
    source.write_text("".join(json.dumps(line) + "\n" for line in lines))
    places = (source, tmp_path / "first", tmp_path / "again")

    async def run() -> list[dict[str, Any]]:
        results = []
        for ttft_ms, place, capture in zip((20, 60), places, places[1:], strict=False):
            options = SimOptions(ttft=Duration(ttft_ms * MS), itl=Duration(2 * MS))
            async with engine(options) as server:
                plan = make_plan(ScheduleOptions(source=str(place), requests=len(results) * 50 or None))
                results.append(await replayed(plan, server.url, capture=capture, scrape="none"))
        return results

    was, result = asyncio.run(run())
    assert was["baseline"] is None
    baseline = result["baseline"]
    assert baseline["requests"] == {"compared": 40, "not_found": 0, "repeated": 10}
    # The same by the two captures alone, which hold microseconds.
    then, now = (
        {int((x.request_id or "").rpartition("-")[2]): x for x in read(place).exchanges()}
        for place in places[1:]
    )
    for name in ("ttft", "tpot", "e2e"):
        then_ns, now_ns = (
            [getattr(measure(side[row]), f"{name}_ns") for row in range(40)] for side in (then, now)
        )
        more = [(n - t) / 1e9 for t, n in zip(then_ns, now_ns, strict=True)]
        pair = baseline["pairs"][name]
        assert pair["n"] == 40, "all ended well"
        assert list(pair["difference"].values()) == pytest.approx(
            shares_of(more), rel=2 * RELATIVE_ERROR, abs=2e-6
        ), name
    assert (baseline["output_tokens"]["equal"], baseline["uncertainty"]["n"]) == (40, 40)
    sure = max(then[row].uncertainty_ns + now[row].uncertainty_ns for row in range(40)) / 1e9
    assert baseline["uncertainty"]["max"] == pytest.approx(sure, rel=RELATIVE_ERROR, abs=3e-6)


@pytest.mark.parametrize(
    ("other", "said"),
    [(False, "cannot be read: No such file or directory"), (True, "no row that was sent was found again")],
)
def test_what_cannot_be_read_again_costs_the_comparison_and_not_the_result(
    other: bool, said: str, tmp_path: Path
) -> None:
    path = tmp_path / "c.parquet"
    plan = make_plan(ScheduleOptions(source=captured(path, ARRIVALS_MS), speed=10.0))
    path.unlink()
    if other:
        write_capture(path, [answer(99, 20, at_ms=i) for i in range(20)])

    async def run() -> dict[str, Any]:
        async with engine() as server:
            return await replayed(plan, server.url, scrape="none")

    result = asyncio.run(run())
    assert result["baseline"] is None
    assert result["load"]["sent"] == len(ARRIVALS_MS)
    (note,) = [note for note in result["plan"]["notes"] if "comparison" in note]
    assert note == f"no comparison with the recorded answers: {said}"

"""Regressions between two results: tolerances, the interval that decides, and the exit codes."""

from collections.abc import Mapping
from functools import partial
from typing import Any

import msgspec
import pytest

from llmtap.errors import ConfigError, ExitCode
from llmtap.gates.regression import Tolerances, judge_replays, judge_tests, regression_code
from llmtap.load.replay.comparison import compare_replays
from llmtap.metrics import hdr
from llmtap.metrics.histogram import Histogram
from llmtap.metrics.statistics import summarise_ns
from llmtap.report.gates import JudgedChange
from tests.support.results.replay_results import saved


def result(ttft_ms: list[float], *, complete: int | None = None, **more: Any) -> dict[str, Any]:
    """Return a replay's result with these TTFTs; `complete`: number of complete answers."""
    histogram = Histogram()
    for ms in ttft_ms:
        histogram.record(round(ms * 1e6))
    n = len(ttft_ms)
    good = n if complete is None else complete
    return {
        "n": n,
        "metrics": {"ttft": summarise_ns(histogram), "itl": {"n": 0, "option": None}},
        "hdr_histograms": {"ttft": hdr.encode(histogram)},
        "outcomes": {"complete": good, "truncated": n - good},
        "load": {"stopped": None},
        "tokens": {"source": {}},
        "plan": {},
        "warmup": {"requests": 0},
        "sender": {"llmtap": "0", "clocks": [], "processes": [], "clock": "kernel"},
        "verdict": {},
        **more,
    }


BEFORE = [100 + i % 20 for i in range(1_000)]


def judge(text: str, results: Mapping[str, dict[str, Any]]) -> list[JudgedChange]:
    return judge_replays(Tolerances.parse([text]), results, partial(compare_replays, saved(results)))


def judged(text: str, after: list[float], **more: Any) -> dict[str, str]:
    results = {"a": result(BEFORE), "b": result(after, **more)}
    return {row.figure: row.state for row in judge(text, results)}


@pytest.mark.parametrize(
    ("text", "plus_ms", "state"),
    [
        ("ttft_p50:5%", 30, "worse"),
        ("ttft_p50:5", 0, "not_worse"),
        ("ttft_p99:50%", 30, "not_worse"),
        ("ttft_p50:5%", -30, "not_worse"),
        ("all", 30, "worse"),
        ("40%", 30, "not_worse"),
    ],
)
def test_a_figure_is_worse_beyond_its_tolerance(text: str, plus_ms: float, state: str) -> None:
    states = judged(text, [ms + plus_ms for ms in BEFORE])
    assert states["ttft_p99" if "p99" in text else "ttft_p50"] == state


def test_the_interval_decides_and_not_the_values() -> None:
    few = [90, 95, 100, 108, 112, 118, 125, 130, 140, 150, 160, 170] * 2
    results = {"a": result([ms - 8 for ms in few]), "b": result(few)}
    (row,) = judge("ttft_p50:5%", results)
    assert row.difference / row.a > 0.05
    assert row.low < 0 < row.high
    assert row.state == "not_worse"


def test_intervals_of_several_figures_hold_together() -> None:
    results = {"a": result(BEFORE), "b": result(BEFORE)}
    (one,) = judge("ttft_p50:5%", results)
    two = judge("ttft_p50:5% ttft_p99:5%", results)
    assert one.level == 0.95
    assert [row.level for row in two] == [0.975, 0.975]


def test_a_named_figure_that_cannot_be_decided_is_not_valid() -> None:
    results = {"a": result(BEFORE[:50]), "b": result(BEFORE)}
    named, every = (judge(text, results) for text in ("ttft_p99:5% complete_share:5%", "all"))
    assert {row.figure: row.state for row in named} == {
        "ttft_p99": "not_valid",
        "complete_share": "not_worse",
    }
    assert {row.figure for row in every} == {"ttft_p50", "error_rate"}


def test_failed_requests_are_judged_by_their_share() -> None:
    assert judged("error_rate:100%", BEFORE, complete=900)["error_rate"] == "worse"
    assert judged("error_rate:100%", BEFORE, complete=999)["error_rate"] == "not_worse"


def test_a_figure_that_is_not_valid_in_a_result_is_not_judged() -> None:
    verdict = {
        "figures": {"ttft": {"state": "not_valid", "error": None, "findings": ["late"]}},
        "findings": [{"what": "late", "says": "sent late"}],
    }
    assert judged("ttft_p50:5%", [ms + 30 for ms in BEFORE], verdict=verdict) == {"ttft_p50": "not_valid"}


@pytest.mark.parametrize("text", ["ttft_p99", "ttft_p99:x", "nothing:5%", "tbc_mean:5%", "5%%", ":5"])
def test_a_tolerance_that_cannot_be_read_is_refused(text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        judged(text, BEFORE)
    assert caught.value.place == "--fail-if-worse"


def test_the_main_figures_of_benchmarks_are_judged() -> None:
    row = {
        "b_system": "b",
        "step": "load",
        "unit": "s",
        "better": "lower",
        "a": 0.1,
        "b": 0.13,
        "difference": 0.03,
        "low": 0.02,
        "high": 0.04,
        "level": 0.975,
    }
    told = {
        "tests": [
            {
                "test": "ttft",
                "invalid": [],
                "unlike": [],
                "comparisons": [
                    {**row, "figure": "TTFT P50", "key": True},
                    {**row, "figure": "E2E P50", "key": False},
                ],
            },
            {
                "test": "throughput",
                "invalid": ["b: not valid"],
                "unlike": [],
                "comparisons": [
                    {**row, "figure": "maximum output rate", "unit": "tok/s", "better": "higher", "key": True}
                ],
            },
        ]
    }
    rows = judge_tests(Tolerances(), told)
    assert [(one.of, one.figure, one.state) for one in rows] == [
        ("b ttft load", "ttft_p50", "worse"),
        ("b throughput load", "maximum_output_rate", "not_valid"),
    ]
    (named,) = judge_tests(Tolerances.parse(["e2e_p50:50%"]), told)
    assert named.state == "not_worse"


def test_exit_codes_of_a_comparison() -> None:
    same = JudgedChange("b", "ttft_p50", "ms", "lower", "", 0.1, 0.1, 0.0, 0.0, 0.0, 0.95, 0.05, "not_worse")
    worse, open_end = (msgspec.structs.replace(same, state=state) for state in ("worse", "not_valid"))
    assert regression_code([{}], [same], loads_differ=False) == ExitCode.OK
    assert regression_code([{}], [same, worse, open_end], loads_differ=False) == ExitCode.MISSED
    assert regression_code([{}], [same, open_end], loads_differ=False) == ExitCode.NOT_VALID
    assert regression_code([{}], [same], loads_differ=True) == ExitCode.NOT_VALID
    assert regression_code([{}], [], loads_differ=False) == ExitCode.NOT_VALID
    failed = {"findings": [{"what": "lost", "figure": 1, "failed": True}]}
    assert regression_code([failed], [worse], loads_differ=False) == ExitCode.FAILED

"""A figure has the worst state of all loads; a test is judged by the figures that it reports."""

from collections.abc import Sequence
from typing import Any

import msgspec
import pytest

from llmtap.bench.report.documents import BenchRepeat, BenchStep, NotRun, ReportVerdict
from llmtap.bench.report.validity import contradictions, document_verdict, verdict_of_test
from llmtap.bench.run import test
from llmtap.cli.bench import exit_code_of
from llmtap.errors import ExitCode

VALID: dict[str, Any] = {"state": "valid", "requested": True, "error": None, "findings": []}


def load(name: str, *findings: dict[str, Any], **figures: dict[str, Any]) -> BenchStep:
    """A load with these findings; its figures are valid but these."""
    report = dict.fromkeys(("load", "ttft", "tpot", "e2e", "tbc", "tokens"), VALID) | figures
    verdict = {"findings": list(findings), "figures": report}
    return BenchStep(name=name, result={"outcomes": {"complete": 9}, "verdict": verdict})


def finding(what: str, *spoils: str, **more: Any) -> dict[str, Any]:
    return {"what": what, "says": what, "spoils": list(spoils), "failed": False, **more}


LATE = finding("uncertainty", "tbc")
BAD_TBC = VALID | {"state": "not_valid", "error": 0.0121}
FAILED = finding("failed", failed=True)


def verdict(name: str, *loads: BenchStep, missed: tuple[str, ...] = ()) -> dict[str, Any]:
    public: dict[str, Any] = msgspec.to_builtins(verdict_of_test(test.test_named(name), loads, {}, missed))
    return public


def code(*verdicts: dict[str, Any], not_run: Sequence[NotRun] = ()) -> ExitCode:
    reports = [
        BenchRepeat(test=f"t{i}", seed=1, began="", ended="", verdict=msgspec.convert(one, ReportVerdict))
        for i, one in enumerate(verdicts)
    ]
    return exit_code_of(document_verdict(reports), not_run)


def test_a_spoiled_figure_counts_in_the_tests_that_report_it() -> None:
    """Times between chunks are what the ITL test is about, and not what the TTFT test is about."""
    loads = load("1", tbc=VALID), load("2", LATE, tbc=BAD_TBC)
    itl, ttft = verdict("itl", *loads), verdict("ttft", *loads)
    assert (itl["valid"], ttft["valid"]) == (False, True)
    assert [one["step"] for one in itl["findings"]] == ["2"]
    assert [one["step"] for one in ttft["cautions"]] == ["2"]
    figure = ttft["figures"]["tbc"]
    assert (figure["state"], figure["requested"], figure["error"]) == ("not_valid", False, 0.0121)
    assert figure["loads"] == {"not_valid": ["2"], "doubtful": []}
    assert "TBC" in itl["says"] and "TBC" not in ttft["says"]
    assert (code(ttft), code(itl), code(ttft, itl)) == (
        ExitCode.OK,
        ExitCode.NOT_VALID,
        ExitCode.NOT_VALID,
    )


def test_failed_requests_fail_a_load_but_not_a_search_for_limits() -> None:
    assert code(verdict("ttft", load("1", FAILED))) is ExitCode.FAILED
    search = verdict("throughput", load("1"), load("2", FAILED))
    assert search["valid"] and not search["failed"]
    assert [one["step"] for one in search["failures"]] == ["2"]
    assert code(search) is ExitCode.OK
    limit = finding("host_limit", "load", failed=True)
    assert code(verdict("throughput", load("1", limit))) is ExitCode.FAILED
    nothing = {"outcomes": {"upstream_error": 9}}
    assert code(verdict("throughput", BenchStep(name="1", result=nothing))) is ExitCode.FAILED


def test_objectives_that_no_level_meets_are_missed() -> None:
    missed = verdict("capacity", load("1"), missed=("not even one request at a time",))
    assert code(missed) is ExitCode.MISSED
    assert missed["says"].startswith("not even one request at a time")
    begun = NotRun(test="itl", reason="", hint=None, begun=True)
    assert code(verdict("capacity", load("1")), not_run=[begun]) is ExitCode.FAILED


def level(tps: float, **more: Any) -> dict[str, Any]:
    rates = {"output_tps": tps, "completed_rps": tps / 100, "input_tps": None}
    return {"step": "search/1rps", "holds": True, "sustained": True, **rates, **more}


RIGHT: dict[str, Any] = {
    "max_output_tps": 400.0,
    "max_request_rps": 4.0,
    "sustainable_load_rps": 4.1,
    "completed_rps": 4.0,
    "levels": [level(200.0), level(400.0), level(900.0, holds=False, sustained=False)],
}


@pytest.mark.parametrize(
    ("wrong", "kinds"),
    [
        ({}, []),
        ({"max_output_tps": 900.0}, [("contradiction", "tokens")]),
        ({"max_request_rps": 3.0}, [("contradiction", "load")]),
        ({"sustainable_load_rps": 11.0}, [("too_short", "load")]),
        ({"levels": [level(400.0), level(500.0, sustained=False)]}, [("contradiction", "load")]),
        (
            {"levels": [level(400.0, ttft={"p50": {"value": 0.2}, "p95": None, "p99": {"value": 0.1}})]},
            [("contradiction", "ttft")],
        ),
    ],
)
def test_figures_that_cannot_both_be_right_are_found(wrong: dict[str, Any], kinds: list[Any]) -> None:
    assert [result[:2] for result in contradictions(RIGHT | wrong)] == kinds


def test_a_contradiction_makes_its_figure_not_valid() -> None:
    steps = [load("search/1rps")]
    throughput = test.test_named("throughput")
    bad = msgspec.to_builtins(verdict_of_test(throughput, steps, RIGHT | {"max_output_tps": 900.0}))
    assert (bad["figures"]["tokens"]["state"], code(bad)) == ("not_valid", ExitCode.NOT_VALID)
    short = msgspec.to_builtins(verdict_of_test(throughput, steps, RIGHT | {"sustainable_load_rps": 11.0}))
    assert (short["figures"]["load"]["state"], code(short)) == ("doubtful", ExitCode.OK)

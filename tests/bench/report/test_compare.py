"""Differences that were planted between systems are found, those that were not are not, and what makes a
comparison unfair is said."""

from pathlib import Path
from shutil import rmtree
from typing import Any

import msgspec
import pytest

from llmtap.bench.report.compare import compare_results
from llmtap.errors import ConfigError
from llmtap.report.bench import compare_html, compare_markdown
from tests.support.results.bench_results import results_folder

QUICK = {"quick": True, "params.requests": 200}


def compared(base: Path, others: list[Path]) -> dict[str, Any]:
    """The comparison as public JSON."""
    report: dict[str, Any] = msgspec.to_builtins(compare_results(base, others))
    return report


def one(report: dict[str, Any], figure: str, step: str | None = "load", other: str = "b") -> dict[str, Any]:
    (row,) = [
        row
        for row in report["tests"][0]["comparisons"]
        if (row["figure"], row["step"], row["b_system"]) == (figure, step, other)
    ]
    return row


def check(report: dict[str, Any], demand: str) -> dict[str, Any]:
    row: dict[str, Any] = next(row for row in report["tests"][0]["checklist"]["rows"] if row["id"] == demand)
    return row


def notes(report: dict[str, Any]) -> str:
    return "\n".join(report["tests"][0]["notes"])


def pair(tmp_path: Path, **of_b: Any) -> dict[str, Any]:
    a = results_folder(tmp_path / "a")
    return compared(a, [results_folder(tmp_path / "b", place_in_turn=1, **of_b)])


def test_ten_percent_more_are_found_where_they_were_planted_and_nowhere_else(tmp_path: Path) -> None:
    report = pair(tmp_path, slower=1.1)
    row = one(report, "TTFT P50")
    assert (row["finding"], row["samples"], row["key"], row["n"], row["m"]) == ("worse", "runs", True, 3, 3)
    assert row["low"] < 0.01 < row["high"]
    assert row["share"] == pytest.approx(0.1, abs=0.04)
    assert row["p"] <= row["p_adjusted"] < 0.05
    assert one(report, "TPOT P50")["finding"] == "no difference shown"
    assert not one(report, "TPOT P50")["key"]
    assert one(report, "output rate, mean of runs")["finding"] == "no difference shown"


def test_intervals_of_what_the_test_is_about_hold_for_all_of_them_together(tmp_path: Path) -> None:
    a, b, c = (results_folder(tmp_path / name, place_in_turn=i) for i, name in enumerate("abc"))
    two, three = compared(a, [b]), compared(a, [b, c])
    keys, more = one(two, "TTFT P50"), one(three, "TTFT P50")
    assert (keys["level"], more["level"]) == (1 - 0.05 / 2, 1 - 0.05 / 4)
    assert more["low"] < keys["low"] < keys["high"] < more["high"]
    others = one(two, "TPOT P50"), one(three, "TPOT P50")
    assert others[0]["level"] == others[1]["level"] == 0.95
    assert others[0]["low"] == others[1]["low"]


def test_gaps_are_what_the_itl_test_is_about(tmp_path: Path) -> None:
    a = results_folder(tmp_path / "a", test="itl")
    b = results_folder(tmp_path / "b", test="itl", gaps_slower=1.2, place_in_turn=1)
    report = compared(a, [b])
    for step in ("25-percent", "90-percent"):
        row = one(report, "TBC P50", step)
        assert (row["key"], row["finding"]) == (True, "worse")
        assert row["share"] == pytest.approx(0.2, abs=0.05)
        assert one(report, "TTFT P50", step)["finding"] == "no difference shown"
    assert report["tests"][0]["charts"][0]["title"] == "TBC, 25-percent"


def test_gaps_of_a_system_whose_chunks_come_in_bursts_are_not_tested(tmp_path: Path) -> None:
    a = results_folder(tmp_path / "a", test="itl")
    bursty = {"steps.0.result.chunking.events_per_read": 8.0}
    b = results_folder(tmp_path / "b", test="itl", gaps_slower=0.5, place_in_turn=1, changes=bursty)
    report = compared(a, [b])
    assert report["tests"][0]["cautions"] == [
        {
            "system": "b",
            "against": "a",
            "steps": ["25-percent"],
            "metrics": ("tpot", "tbc", "itl"),
            "events_per_read": 8.0,
        }
    ]
    for figure in ("TBC P50", "TBC P99", "TPOT P50"):
        row = one(report, figure, "25-percent")
        assert (row["finding"], row["difference"], row["p_adjusted"]) == ("not tested", None, None)
    assert one(report, "TBC P50", "90-percent")["finding"] == "better"
    assert one(report, "E2E P50", "25-percent")["finding"] == "better"
    says = "b: 8 chunks come at a time, so its time per token looks too short."
    assert says in compare_markdown(report)
    assert says in compare_html(report)


def test_the_same_system_twice_seldom_differs(tmp_path: Path) -> None:
    """Of 20 comparisons one is expected to have a finding among what the test is about, at 5 %."""
    wrong = 0
    for i in range(20):
        a = results_folder(tmp_path / f"a{i}", requests=40)
        b = results_folder(tmp_path / f"b{i}", requests=40)
        result = compared(a, [b])["tests"][0]["comparisons"]
        assert len(result) == 9
        wrong += any(row["finding"] in ("better", "worse") for row in result if row["key"])
    assert wrong <= 4


def test_one_run_compares_requests_and_supports_no_claim(tmp_path: Path) -> None:
    a = results_folder(tmp_path / "a", runs=1, requests=1_000)
    b = results_folder(tmp_path / "b", runs=1, requests=1_000, slower=1.1, spread=0.0)
    report = compared(a, [b])
    row = one(report, "TTFT P50")
    assert (row["samples"], row["n"], row["m"], row["finding"]) == ("requests", 1_000, 1_000, "worse")
    assert "bootstrap" in row["method"]
    assert {row["figure"] for row in report["tests"][0]["comparisons"]}.isdisjoint(
        {"TBC P50", "output rate, mean of runs"}
    )
    assert "a has 1 of the 3 independent runs" in notes(report)
    assert "b has 1 of the 3 independent runs" in notes(report)
    assert (check(report, "6.3-p2")["status"], check(report, "6.3-p3")["status"]) == ("not met", "met")


def test_further_runs_of_one_system_are_left_out_and_the_others_are_fair(tmp_path: Path) -> None:
    report = pair(tmp_path, runs=5)
    assert check(report, "6.1-1a")["status"] == "met"
    assert check(report, "6.3-p2")["evidence"].startswith("3 and 3 runs")
    assert one(report, "TTFT P50")["m"] == 3
    assert "not sent to all systems (6.1): run 4, 5 of b" in notes(report)
    assert [len(system["seeds"]) for system in report["tests"][0]["systems"]] == [3, 3]


def test_runs_with_too_few_requests_in_common_are_all_compared_and_called_unfair(tmp_path: Path) -> None:
    report = pair(tmp_path, runs=4, changes={"seed": 7})
    assert check(report, "6.1-1a")["status"] == "not met"
    assert check(report, "6.3-p2")["evidence"].startswith("3 and 4 runs")
    assert "left out" not in notes(report)


def test_other_parameters_are_named_and_nothing_is_tested(tmp_path: Path) -> None:
    report = pair(tmp_path, changes=QUICK | {"params.rate": 8.0}, slower=1.5)
    test = report["tests"][0]
    assert "requests 10000 of a, 200 of b" in test["unlike"]
    assert any(message.startswith("rate ") and message.endswith("8.0 of b") for message in test["unlike"])
    assert test["comparisons"]
    for row in test["comparisons"]:
        assert (row["p"], row["p_adjusted"], row["low"], row["finding"]) == (None, None, None, "not tested")
        assert row["a"]
        assert row["b"]
    assert check(report, "6.3-p3")["status"] == "not met"
    assert "a difference counts as one" not in notes(report)


def test_a_load_of_other_requests_is_not_tested_and_others_are(tmp_path: Path) -> None:
    a = results_folder(tmp_path / "a", test="itl")
    b = results_folder(
        tmp_path / "b",
        test="itl",
        place_in_turn=1,
        changes={"steps.0.result.plan.workload.sha256": "0" * 64},
    )
    report = compared(a, [b])
    (message,) = report["tests"][0]["unlike"]
    assert message.startswith("25-percent: ")
    assert "000000000000" in message
    assert one(report, "TBC P50", "25-percent")["finding"] == "not tested"
    assert one(report, "TBC P50", "90-percent")["finding"] == "no difference shown"


def test_runs_that_are_not_valid_are_named_once(tmp_path: Path) -> None:
    late = {"step": "load", "what": "late", "says": "requests left late"}
    report = pair(tmp_path, changes={"verdict": {"valid": False, "findings": [late]}})
    assert report["tests"][0]["invalid"] == ["b: not valid are its runs 1, 2, 3 of 3: requests left late"]
    assert [system["valid"] for system in report["tests"][0]["systems"]] == [True, False]


def test_loads_that_only_one_has_are_left_out_and_said(tmp_path: Path) -> None:
    a = results_folder(tmp_path / "a", test="throughput")
    b = results_folder(tmp_path / "b", test="throughput", changes={"steps.2.name": "search/3rps"})
    report = compared(a, [b])
    steps = {row["step"] for row in report["tests"][0]["comparisons"]}
    assert steps == {"search/1rps", "search/2rps"}
    assert "all systems has them: search/4rps of a" in notes(report)
    assert "all systems has them: search/3rps of b" in notes(report)


def test_what_a_search_found_is_compared_and_more_is_better(tmp_path: Path) -> None:
    result = {"measurements.max_output_tps": 1_000.0, "measurements.max_request_rps": None}
    a = results_folder(tmp_path / "a", test="throughput", changes=result)
    more = result | {"measurements.max_output_tps": 1_200.0}
    b = results_folder(tmp_path / "b", test="throughput", changes=more)
    report = compared(a, [b])
    row = one(report, "maximum output rate", None)
    assert (row["finding"], row["key"], row["unit"], row["difference"]) == ("better", True, "tok/s", 200.0)
    assert "maximum request rate" not in {row["figure"] for row in report["tests"][0]["comparisons"]}
    single = compared(
        results_folder(tmp_path / "c", test="throughput", changes=result, runs=1),
        [results_folder(tmp_path / "d", test="throughput", changes=more, runs=1)],
    )
    row = one(single, "maximum output rate", None, "d")
    assert (row["a"], row["b"], row["finding"], row["p"]) == (1_000.0, 1_200.0, "not tested", None)


def test_other_hardware_is_normalised(tmp_path: Path) -> None:
    report = pair(tmp_path, changes={"sut.hardware.count": 4, "sut.hardware.price_per_hour": 10.0})
    first, second = report["tests"][0]["normalised"]
    assert second["output_tps_max"] == pytest.approx(300 * 11 / 60)
    assert second["tokens_per_gpu_second"] == pytest.approx(2 * first["tokens_per_gpu_second"])
    assert second["tokens_per_currency"] == pytest.approx(2 * first["tokens_per_currency"])
    assert check(report, "6.1-1c")["status"] == "met"
    assert "sut.hardware.count: 8 / 4" in check(report, "6.4-p7")["evidence"]


def test_what_cannot_be_compared_is_refused(tmp_path: Path) -> None:
    a = results_folder(tmp_path / "a", runs=1)
    with pytest.raises(ConfigError, match="is not a results folder"):
        compared(a, [tmp_path])
    with pytest.raises(ConfigError, match="is given twice"):
        compared(a, [tmp_path / "a/../a"])
    with pytest.raises(ConfigError, match="no test in common: a has ttft; b has itl"):
        compared(a, [results_folder(tmp_path / "b", test="itl", runs=1)])
    rmtree(a / "ttft/steps/load")
    with pytest.raises(ConfigError, match=r"has no requests\.parquet"):
        compared(a, [results_folder(tmp_path / "c", runs=1)])

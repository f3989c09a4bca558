"""What verdicts make of a report's compliance, and of a comparison's."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmtap.bench.compliance.evidence import (
    MUSTS,
    SHOULDS,
    ComplianceVerdict,
    Level,
    Requirement,
    Status,
    cannot_tell,
    met,
    not_applicable,
    not_met,
    worst_verdict,
)
from llmtap.bench.compliance.judge import (
    COMPARISON,
    JudgedRequirement,
    Matrix,
    judge,
    judge_comparison,
)
from llmtap.bench.report.texts import full_markdown, minimum_text
from llmtap.bench.run.test import TESTS
from llmtap.bench.tests.mixes import LONG, SHORT, ClassMix
from llmtap.workload.registry import workload_named
from tests.support.results.bench_documents import bench_document
from tests.support.results.compliance_reports import GONE, changed, report_of_test

GRPC = {"target.url": "grpc://127.0.0.1:9000", "sut.protocol": "gRPC"}
"""Recommended for a model engine (4.6.1); all else is as recommended."""


def matrix(*levels: tuple[Level, Status]) -> Matrix:
    rows = []
    for i, (level, status) in enumerate(levels, 1):
        demand = Requirement(f"1-{i}", "1", level, "Something.", (), "report", lambda report: met("said"))
        rows.append(JudgedRequirement(demand, ComplianceVerdict(status, "seen")))
    return Matrix("ttft", tuple(rows))


@pytest.mark.parametrize("must", sorted(MUSTS))
@pytest.mark.parametrize("should", sorted(SHOULDS))
@pytest.mark.parametrize(
    ("first", "second", "status", "why"),
    [
        ("met", "met", "unconditionally compliant", ()),
        ("not applicable", "not applicable", "unconditionally compliant", ()),
        ("met", "not met", "conditionally compliant", ("1-2",)),
        ("met", "cannot tell", "conditionally compliant", ("1-2",)),
        ("not met", "met", "not compliant", ("1-1",)),
        ("cannot tell", "met", "not compliant", ("1-1",)),
        ("not met", "not met", "not compliant", ("1-1",)),
    ],
)
def test_compliance_is_that_of_section_2(
    must: Level, should: Level, first: Status, second: Status, status: str, why: tuple[str, ...]
) -> None:
    result = matrix((must, first), (should, second), ("MAY", "not met"), ("procedure", "met"))
    assert (result.status, result.blocking_ids) == (status, why)


def test_a_procedure_that_was_left_is_a_deviation_and_costs_nothing() -> None:
    result = matrix(("MUST", "met"), ("procedure", "not met"), ("procedure", "cannot tell"))
    assert result.status == "unconditionally compliant"
    assert [one.requirement.id for one in result.deviations] == ["1-2", "1-3"]


def test_a_condition_counts_as_a_must() -> None:
    result = matrix(("MUST", "met"), ("condition", "not met"), ("SHOULD", "not met"), ("condition", "met"))
    assert (result.status, result.blocking_ids) == ("not compliant", ("1-2",))
    counts = result.to_dict()
    assert counts["must"] == {"n": 1, "satisfied": 1, "not_applicable": 0}
    assert counts["conditions"] == {"n": 2, "satisfied": 1, "not_applicable": 0}


@pytest.mark.parametrize(
    ("test", "violation", "unmet"),
    [
        ("ttft", {"verdict.valid": False}, "2-p1"),
        ("throughput", {"measurements.levels.1.window.to": 59.0}, "5.2.2.1-p1"),
        ("tradeoff", {"measurements.levels.2.window.to": 59.0}, "5.3.2-p1"),
        ("tradeoff", {"measurements.levels": [{"percent": 10}, {"percent": 100}]}, "5.3.2-p2"),
        ("itl", {"steps.2.result.n": 99}, "5.4.2-p1"),
        ("itl", {"steps.2.result.metrics.tbc.n": 4_999}, "5.4.2-p2"),
        ("capacity", {"steps.1.result.outcomes.complete": 1_599}, "5.5.3-p1"),
        ("fairness", {"measurements.classes.long.sent": 499}, "5.6.2-p2"),
        ("fairness", {"steps.3.result.arrivals.sent.span": 290.0}, "5.6.3-p2"),
        ("memory-pressure", {"steps.2.result.window.seconds": 118.0}, "5.8.3-p2"),
        ("long-context", {"steps.2.result.n": 19}, "5.9.2-p3"),
    ],
)
def test_without_a_stated_minimum_or_validity_nothing_is_compliant(
    test: str, violation: dict[str, Any], unmet: str
) -> None:
    result = judge(changed(report_of_test(test), {**GRPC, **violation}))
    assert result.status == "not compliant"
    assert unmet in result.blocking_ids


def test_the_gravest_of_several_verdicts_counts_its_like() -> None:
    verdicts = [met("a"), not_met("b"), cannot_tell("c"), not_met("d"), not_applicable("e")]
    assert worst_verdict(verdicts, "") == ComplianceVerdict("not met", "b (2 of 5)")
    assert worst_verdict(verdicts[2:3], "") == verdicts[2]
    assert worst_verdict([], "no loads") == ComplianceVerdict("cannot tell", "no loads")


@pytest.mark.parametrize("test", TESTS)
def test_a_report_by_the_book_is_unconditionally_compliant(test: str) -> None:
    result = judge(changed(report_of_test(test), GRPC))
    assert result.status == "unconditionally compliant", result.blocking_ids
    assert not result.deviations


def test_a_cold_start_needs_no_warm_up_to_be_compliant() -> None:
    cold = {**GRPC, "warmups": [], "notes": ["cold start: the SUT was not warmed up"]}
    assert judge(changed(report_of_test("ttft"), cold)).status == "unconditionally compliant"
    unlabelled = judge(changed(report_of_test("ttft"), {**GRPC, "warmups": [], "notes": []}))
    assert {"4.5.1-1b", "4.5.3-2", "5.1.5-1f"} <= set(unlabelled.blocking_ids)


def test_a_quick_run_forfeits_what_its_figures_say() -> None:
    quick = changed(
        report_of_test("ttft"),
        {**GRPC, "quick": True, "steps.0.result.n": 100, "steps.0.result.capture.rows": 100},
    )
    result = judge(quick)
    assert result.status == "not compliant"
    assert result.blocking_ids == ("5.1.2.1-1a", "5.1.2.1-1b")
    assert result.rows[[one.requirement.id for one in result.rows].index("5.1.2.1-1a")].verdict.evidence == (
        "100 requests, 1,000 needed for P99"
    )
    # That it is called quick is no evidence of anything.
    enough = changed(report_of_test("ttft"), {**GRPC, "quick": True})
    assert judge(enough).status == "unconditionally compliant"


CLASSES = ClassMix((SHORT, LONG)).describe()
WITHOUT_FILE = {
    name: workload_named(name, "tests").describe() for name in ("conversation", "code-completion")
}
W = "steps.*.result.plan.workload"
NA = "not applicable"


@pytest.mark.parametrize(
    ("test", "violation", "unmet"),
    [
        ("fairness", {W: {**CLASSES, "name": "synthetic-skewed"}}, "5.6.2-1"),
        ("guardrail-overhead", {W: WITHOUT_FILE["conversation"]}, "5.10.2-1"),
        ("prefix-cache", {W: WITHOUT_FILE["code-completion"]}, "5.7.2-1"),
        ("ttft", {"steps.*.result.plan.body.stream": False}, "4.2.2-1"),
        ("tradeoff", {"steps.*.result.load.mode": "closed"}, "5.3.2-1"),
        ("memory-pressure", {"params.levels": [50, 100]}, "5.8.2-p1"),
    ],
)
def test_a_planted_violation_is_not_met_and_stands_in_both_reports(
    test: str, violation: dict[str, Any], unmet: str
) -> None:
    sound, planted = (changed(report_of_test(test), one) for one in ({}, violation))
    for report in (sound, planted):
        report["compliance"] = judge(report).to_dict()
    before, after = ({row["id"]: row for row in report["compliance"]["rows"]} for report in (sound, planted))
    assert (before[unmet]["status"], after[unmet]["status"]) in (("met", "not met"), (NA, "not met"))
    message = f"{unmet} not met ({after[unmet]['level']}): {after[unmet]['says']} Found: "
    for text in (minimum_text(bench_document(planted)), full_markdown(bench_document(planted))):
        assert message in text
        assert "No deviation" not in text
    assert message not in minimum_text(bench_document(sound))


def places(tree: Any, before: str = "") -> list[str]:
    """Paths of all that has a name: what stands in a list is whole, as it was measured."""
    result = []
    if isinstance(tree, dict):
        for name, held in tree.items():
            result += [f"{before}{name}", *places(held, f"{before}{name}.")]
    elif isinstance(tree, list):
        for i, held in enumerate(tree):
            result += places(held, f"{before}{i}.")
    return result


LACKING = {test: report_of_test(test) for test in ("ttft", "throughput", "fairness", "prefix-cache")}
PLACES = {
    test: [path for path in places(report) if "." not in path or "quantiles" not in path]
    for test, report in LACKING.items()
}


@given(st.data())
@settings(max_examples=150)
def test_whatever_a_report_lacks_it_can_be_judged(data: st.DataObject) -> None:
    """Invariant: a report without some of its parts raises nothing."""
    test = data.draw(st.sampled_from(sorted(LACKING)))
    path = data.draw(st.sampled_from(PLACES[test]))
    judge(changed(LACKING[test], {path: data.draw(st.sampled_from([GONE, None]))}))


def runs(**changes: Any) -> list[dict[str, Any]]:
    """Three runs of a system, ten minutes apart."""
    result = []
    for hour in ("10:00", "10:10", "10:20"):
        report = changed(report_of_test("ttft"), {name.replace("__", "."): v for name, v in changes.items()})
        for one in report["steps"]:
            if window := one["result"]["window"]:
                window["start"], window["end"] = f"2026-11-22T{hour}:00.000Z", f"2026-11-22T{hour}:50.000Z"
        result.append(report)
    return result


ONE = runs()
OTHER = runs(sut__software="another engine")
COMPARED: dict[str, Any] = {
    "systems": [{"label": "a", "runs": 3}, {"label": "b", "runs": 3}],
    "comparisons": [{"a": 1, "b": 2, "low": 0.5, "high": 1.5, "p": 0.01, "method": "Welch"}],
    "normalised": [
        {"label": "a", "tokens_per_gpu_second": 10.0, "tokens_per_currency": 5.0, "method": "by GPUs"},
        {"label": "b", "tokens_per_gpu_second": 11.0, "tokens_per_currency": 6.0, "method": "by GPUs"},
    ],
}


def verdicts(other: list[dict[str, Any]], comparison: Any = COMPARED) -> dict[str, ComplianceVerdict]:
    result = judge_comparison([*ONE, *other], comparison)
    return {one.requirement.id: one.verdict for one in result.rows}


def test_a_fair_comparison_is_compliant() -> None:
    result = judge_comparison([*ONE, *OTHER], COMPARED)
    assert result.test == COMPARISON
    assert result.status == "unconditionally compliant", result.blocking_ids
    assert not result.deviations
    assert {one.requirement.section.split(".")[0] for one in result.rows} == {"4", "6"}
    evidence = {one.requirement.id: one.verdict.evidence for one in result.rows}
    assert evidence["6.4-p7"] == "sut.software: engine 2.0 / another engine"
    assert evidence["6.3-p2"].startswith("3 and 3 runs")
    assert evidence["6.1-1a"].startswith("1 of 1 loads in common")


@pytest.mark.parametrize(
    ("id", "changes", "status", "words"),
    [
        ("6.1-1a", {"steps__0__result__plan__seed": 7}, "not met", "other requests in load"),
        ("6.1-1a", {"steps__0__result__plan__texts": 7}, "not met", "other requests in load"),
        ("6.1-1a", {"steps__0__name": "another"}, "not met", "no load in common"),
        ("6.1-1a", {"steps": []}, "not met", "no load in common"),
        ("6.1-1b", {"sut__boundary": "compound system"}, "not met", "compound system / model engine"),
        ("6.1-1b", {"sut__boundary": None}, "cannot tell", "sut.boundary"),
        ("6.1-1c", {"sut__hardware__accelerator": "A100"}, "met", "normalised"),
        ("6.1-1c", {"sut__hardware__accelerator": None}, "cannot tell", "accelerator"),
        ("6.1-1d", {"params__rate": 5.0}, "not met", "rate 20 / workload"),
        ("6.2-p1", {"sut__hardware__count": 4}, "met", "a 10 tokens per GPU-second, b 11"),
        ("6.2-p2", {"sut__hardware__count": 4}, "met", "a 5 tokens"),
        ("6.2-p3", {"sut__hardware__count": 4}, "met", "by GPUs"),
        ("6.2-p1", {}, "not applicable", "equal hardware"),
        ("6.4-p1", {"steps__0__result__plan__workload__input__max": 9}, "not met", "described differently"),
        ("6.4-p2", {"params__requests": 500}, "not met", "10,000 / 500"),
        ("6.4-p3", {"warmup": "none"}, "not met", "auto / none"),
        ("6.4-p4", {"params__ttft_p99": 2.0}, "not met", "ttft_p99 2"),
        ("6.4-p5", {"steps__0__result__window": {}}, "cannot tell", "when"),
        ("6.4-p6", {"sut__notes": []}, "cannot tell", "production"),
        ("6.4-p6", {"sut__notes": ["a sample of production traffic"]}, "cannot tell", "production"),
        ("4.4.2-2", {"sut__tokenizer__name": "other"}, "not met", "other, tiny-bpe 3"),
        ("4.4.2-2", {}, "not applicable", "one tokenizer"),
    ],
)
def test_what_makes_a_comparison_unfair(id: str, changes: dict[str, Any], status: Status, words: str) -> None:
    verdict = verdicts(runs(**changes))[id]
    assert verdict.status == status, verdict
    assert words in verdict.evidence


def test_a_comparison_without_tests_or_runs() -> None:
    alone = verdicts(OTHER[:1], {"systems": [{"runs": 3}, {"runs": 1}]})
    assert alone["6.3-p2"].status == "not met"
    assert alone["6.3-p2"].evidence.startswith("3 and 1 runs")
    assert alone["6.3-p1"].status == alone["6.3-p3"].status == "not met"
    other = runs(sut__hardware__count=4)
    assert verdicts(other, None)["6.2-p1"].status == "not met"
    assert verdicts(other, None)["6.1-1c"].status == "not met"


def test_one_reference_tokenizer_for_all() -> None:
    reference = {"sut.tokenizer.counting": "reference", "sut.tokenizer.name": "cl100k_base"}
    result = judge_comparison([changed(one, reference) for one in (*ONE, *OTHER)], COMPARED)
    assert result.rows[0].requirement.id == "4.4.2-2"
    assert result.rows[0].verdict == met("option B with cl100k_base for all")

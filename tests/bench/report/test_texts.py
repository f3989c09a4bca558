"""The minimum report follows C.1 to the letter; each test has a main load; Markdown is safe."""

import re
from typing import Any

import pytest

from llmtap.bench.report.texts import full_markdown, main_load, minimum_text, throughputs
from tests.support.results.bench_documents import bench_document, bench_report, load_step


def test_a_test_has_the_load_that_it_is_about() -> None:
    """Else the largest of those that measure, without a configuration."""
    pilot = load_step("capacity/0064-at-a-time", n=9_999)
    loads = [pilot, load_step("0/cold", n=400), load_step("0/off", n=300), load_step("1/on", n=900, arm="on")]
    named, other = (main_load(bench_report("prefix-cache", steps=loads, main=main)) for main in ("0/off", ""))
    assert named is not None and other is not None
    assert (named["name"], other["name"]) == ("0/off", "0/cold")
    assert main_load(bench_report(steps=[pilot])) is None


LABELS = [
    "Model",
    "Hardware",
    "Software",
    "SUT Boundary",
    "Workload",
    "Load Model",
    "Request Count",
    "Test Duration",
    "TTFT P50",
    "TTFT P99",
    "TPOT P50",
    "TPOT P99",
    "Max Throughput",
    "Throughput at P99 TTFT < 500ms",
]


def lines_of(document: dict[str, Any]) -> dict[str, str]:
    result = re.findall(r"^- ([A-Z][^:]*): (.*)$", minimum_text(document), re.MULTILINE)
    return dict(result[: len(LABELS)])


def test_nothing_known_leaves_every_line_of_the_template() -> None:
    report = lines_of({"tests": []})
    assert list(report) == LABELS
    assert set(report.values()) == {"not declared", "not measured"}


def level(tps: float, ttft_p99: float, **more: Any) -> dict[str, Any]:
    return {"output_tps": tps, "holds": True, "ttft": {"p99": {"value": ttft_p99}}, **more}


def test_throughput_is_what_was_sustained_and_what_was_within_the_bound() -> None:
    levels = [
        level(1_000.0, 0.2),
        level(1_900.0, 0.499),
        level(2_400.0, 0.501),
        level(2_500.0, 0.1, holds=False),
    ]
    throughput = bench_report("throughput", measurements={"max_output_tps": 2_400.0, "levels": levels})
    report = lines_of(bench_document(throughput))
    assert report["Max Throughput"] == "2,400 tok/s"
    assert report["Throughput at P99 TTFT < 500ms"] == "1,900 tok/s"


def test_throughput_within_the_bound_is_never_above_the_maximum() -> None:
    """The trade-off test saw a higher rate at the same capacity; one headline does not mix two tests."""
    curve = [level(1_600.0, 0.3, sustained=True, holds=None), level(1_650.0, 0.9, sustained=True, holds=None)]
    search = [
        level(1_179.0, 0.3, sustained=True),
        level(1_150.0, 0.45, sustained=True),
        level(1_700.0, 0.1, sustained=False),
    ]
    both = bench_document(
        bench_report("throughput", measurements={"levels": search}),
        bench_report("tradeoff", measurements={"levels": curve}),
    )
    assert throughputs(both) == ((1_179.0, ""), (1_179.0, ""))
    alone = bench_document(bench_report("tradeoff", measurements={"levels": curve}))
    assert throughputs(alone) == ((1_650.0, ""), (1_600.0, ""))


def row(n: int, p50: float) -> dict[str, Any]:
    return {"n": n, "p50": {"value": p50}, "p99": {"value": 0.9}}


@pytest.mark.parametrize(
    ("test", "name", "level"),
    [
        ("throughput", "search/4rps", {"step": "search/4rps", "window": {"from": 0.6, "to": 6}}),
        ("guardrail-overhead", "75-percent/0/baseline", {"level": 75.0}),
    ],
)
def test_key_results_are_those_of_the_tables_of_the_test(test: str, name: str, level: dict[str, Any]) -> None:
    """Not those of the load's histograms, which have its first 10 %, and one block of a configuration."""
    rows = {"ttft": row(18, 0.4), "tpot": row(18, 0.05)}
    if test == "throughput":
        level |= {"planned_rps": 4.0, "holds": True, "output_tps": 477.2, **rows}
    else:
        level |= {"arms": {"baseline": rows}}
    step = load_step(name, n=24, arm="" if test == "throughput" else "baseline")
    document = bench_document(bench_report(test, steps=[step], measurements={"levels": [level]}))
    report = lines_of(document)
    assert (report["TTFT P50"], report["TPOT P50"], report["Request Count"]) == ("400 ms", "50.0 ms", "24")
    assert "P99 rests on 18 samples" in minimum_text(document)


def test_without_objectives_a_level_of_the_curve_is_sustained_while_its_queue_is_stable() -> None:
    levels = [
        level(tps, ttft, holds=None, queue=queue)
        for tps, ttft, queue in (
            (1_000.0, 0.2, "stable"),
            (1_500.0, 0.8, "stable"),
            (1_600.0, 0.3, "growing"),
        )
    ]
    report = lines_of(bench_document(bench_report("tradeoff", measurements={"levels": levels})))
    assert (report["Max Throughput"], report["Throughput at P99 TTFT < 500ms"]) == (
        "1,500 tok/s",
        "1,000 tok/s",
    )


def test_notes_name_deviations_few_samples_and_figures_not_to_be_believed() -> None:
    report = bench_report(steps=[load_step(n=200)], deviations=["only 200 requests"])
    finding = {"test": "ttft", "step": "load", "what": "rate", "says": "too few left"}
    text = minimum_text(bench_document(report, verdict={"valid": False, "findings": [finding]}, quick=True))
    assert "P99 rests on 200 samples; 1,000 are needed" in text
    assert "- Deviation (ttft): only 200 requests" in text
    assert "--quick" in text
    assert "- Not to be relied on: ttft, load: too few left" in text
    assert "No deviation" not in text


def test_what_others_named_breaks_no_table_and_begins_no_tag() -> None:
    report = bench_report(
        tables=[{"caption": "T", "heads": ["a|b"], "rows": [["<script>x</script>\nnext"]]}], charts=[]
    )
    text = full_markdown(bench_document(report))
    assert "| a\\|b |" in text
    assert "| &lt;script>x&lt;/script> next |" in text

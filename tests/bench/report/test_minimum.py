"""The minimum report has the lines of IETF seed 000, C.1, no more and no less; the full one its six parts."""

import re
from typing import Any

from llmtap.bench.report.texts import full_markdown, hardware_said, minimum_text
from tests.support.bench_documents import CHARTS, bench_document, bench_report, load_step

EXPECTED = """\
=== LLM Benchmark Report (Minimum) ===

System Identification:
- Model: tiny, bf16
- Hardware: H100 SXM x 8 (80 GB)
- Software: vLLM 0.9.1
- SUT Boundary: Model Engine

Test Configuration:
- Workload: synthetic-uniform
- Load Model: open-loop 10 requests/s, poisson
- Request Count: 1000
- Test Duration: 100.5 seconds

Key Results:
- TTFT P50: 127 ms
- TTFT P99: 400 ms
- TPOT P50: 42.0 ms
- TPOT P99: 81.2 ms
- Max Throughput: not measured
- Throughput at P99 TTFT < 500ms: not measured

Notes:
- Configuration, TTFT and TPOT are of 5.1 Time to First Token, load load
- Deviation (ttft): not compliant (1 of 2 MUST, 0 of 1 SHOULD); lacking: 4.4.1-1a
- Guardrails: input filter off, output filter not declared
- Requests refused by guardrails: 2

=== End Report ===
"""
LABELS = [
    "Model", "Hardware", "Software", "SUT Boundary", "Workload", "Load Model", "Request Count",
    "Test Duration", "TTFT P50", "TTFT P99", "TPOT P50", "TPOT P99", "Max Throughput",
    "Throughput at P99 TTFT < 500ms",
]  # fmt: skip


def lines_of(document: dict[str, Any]) -> dict[str, str]:
    found = re.findall(r"^- ([A-Z][^:]*): (.*)$", minimum_text(document), re.MULTILINE)
    return dict(found[: len(LABELS)])


def test_it_is_the_template_with_its_blanks_filled_in() -> None:
    assert minimum_text(bench_document()) == EXPECTED


def test_nothing_known_leaves_every_line_of_the_template() -> None:
    told = lines_of({"tests": []})
    assert list(told) == LABELS
    assert set(told.values()) == {"not declared", "not measured"}


def level(tps: float, ttft_p99: float, *, holds: bool = True) -> dict[str, Any]:
    return {"output_tps": tps, "holds": holds, "ttft": {"p99": {"value": ttft_p99}}}


def test_throughput_is_what_was_sustained_and_what_was_within_the_bound() -> None:
    levels = [
        level(1_000.0, 0.2),
        level(1_900.0, 0.499),
        level(2_400.0, 0.501),
        level(2_500.0, 0.1, holds=False),
    ]
    throughput = bench_report("throughput", measurements={"max_output_tps": 2_400.0, "levels": levels})
    told = lines_of(bench_document(throughput))
    assert told["Max Throughput"] == "2,400 tok/s"
    assert told["Throughput at P99 TTFT < 500ms"] == "1,900 tok/s"


def test_without_the_throughput_test_the_curve_says_how_much_was_sustained() -> None:
    levels = [level(1_000.0, 0.2), level(1_200.0, 0.9), level(9_000.0, 0.1, holds=False)]
    told = lines_of(bench_document(bench_report("tradeoff", measurements={"levels": levels})))
    assert (told["Max Throughput"], told["Throughput at P99 TTFT < 500ms"]) == ("1,200 tok/s", "1,000 tok/s")


def test_a_closed_loop_says_how_many_there_were() -> None:
    report = bench_report(steps=[load_step(closed=8, rate=None)])
    assert lines_of(bench_document(report))["Load Model"] == "closed-loop 8 concurrent"


def test_notes_name_deviations_few_samples_and_figures_not_to_be_believed() -> None:
    report = bench_report(steps=[load_step(n=200)], deviations=["only 200 requests"])
    finding = {"test": "ttft", "step": "load", "what": "rate", "says": "too few left"}
    text = minimum_text(bench_document(report, verdict={"valid": False, "findings": [finding]}, quick=True))
    assert "P99 rests on 200 samples; 1,000 are needed" in text
    assert "- Deviation (ttft): only 200 requests" in text
    assert "--quick" in text
    assert "- Not to be relied on: ttft, load: too few left" in text
    assert "No deviation" not in text


def test_hardware_without_an_accelerator_is_its_host() -> None:
    assert hardware_said({"hardware": {"cpu": "2 CPUs"}}) == "not declared (host: 2 CPUs)"
    assert hardware_said({"hardware": {"accelerator": "none", "count": 0}}) == "no accelerator"
    hardware = {"accelerator": "none", "count": 0, "cpu": "2 CPUs"}
    assert hardware_said({"hardware": hardware}) == "no accelerator (2 CPUs)"


def test_the_full_report_has_the_six_parts_in_order() -> None:
    headings = re.findall(r"^## (.*)$", full_markdown(bench_document()), re.MULTILINE)
    assert headings == [
        "1. System identification", "2. Test configuration", "3. Results", "4. Detailed results",
        "5. Methodology compliance", "6. Reproduction information", "Data of the charts",
    ]  # fmt: skip


def test_the_data_of_charts_come_last_without_streams_and_empty_columns() -> None:
    text = full_markdown(bench_document(bench_report(charts=CHARTS)))
    before, _, data = text.partition("\n## Data of the charts\n")
    assert "## 6. Reproduction information" in before
    assert "| TTFT (ms) |" not in before
    assert "|  | TTFT (ms) | share of requests |\n" in data  # no intervals, and no column for them
    assert "|  | offered (req/s) | TTFT P99 (ms) | interval |\n" in data
    assert "*tokens so far*" not in text  # a stream
    assert "Data of the charts" not in full_markdown(bench_document(bench_report(charts=[])))


def test_the_full_report_has_tables_notes_demands_and_how_to_do_it_again() -> None:
    text = full_markdown(bench_document(bench_report(charts=CHARTS)))
    for said in (
        "| TTFT P50 | 127 ms |", "- intervals are of 95 %",
        "| 4.4.1-1a | MUST | Which tokenizer. | not met |",
        "not compliant (1 of 2 MUST, 0 of 1 SHOULD)", "llmtap bench ttft --config bench.toml --results r",
        "| python | 3.11.2 |", "- knee: 2", "| P50 | 1 | 50 | 48 to 52 |", "| P50 | 2 | 55 | 50 or more |",
    ):  # fmt: skip
        assert said in text


def test_what_others_named_breaks_no_table_and_begins_no_tag() -> None:
    report = bench_report(
        tables=[{"caption": "T", "heads": ["a|b"], "rows": [["<script>x</script>\nnext"]]}], charts=[]
    )
    text = full_markdown(bench_document(report))
    assert "| a\\|b |" in text
    assert "| &lt;script>x&lt;/script> next |" in text


def test_every_table_row_has_as_many_cells_as_its_head() -> None:
    text = full_markdown(bench_document(bench_report(charts=CHARTS)))
    for block in text.split("\n\n"):
        rows = [line for line in block.splitlines() if line.startswith("|")]
        cells = {len(re.findall(r"(?<!\\)\|", line)) for line in rows}
        assert len(cells) <= 1, block


def test_what_could_not_run_is_told() -> None:
    not_run = [{"test": "prefix-cache", "why": "[arms.cache_off] is missing", "hint": None, "begun": False}]
    assert "- prefix-cache: [arms.cache_off] is missing" in full_markdown(bench_document(not_run=not_run))

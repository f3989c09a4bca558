"""Render a benchmark's document as text: the minimum report (IETF draft, C.1) and the full report (C.2).

Input: the JSON document of `report.py`. Output: plain text (`minimum_text`) and Markdown (`full_markdown`)
for `llmtap bench` and `llmtap report`. The minimum report shows one load: the main load of the TTFT test or,
without this test, of the first test.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

from llmtap.bench.compliance.evidence import MODEL_LOAD, Report, Step, at, measured_steps, name_of
from llmtap.bench.run.levels import is_sustained
from llmtap.metrics.statistics import samples_needed
from llmtap.report.bench import (
    BOUNDARIES,
    NOT_DECLARED,
    compliance_text,
    configuration_blocks,
    deviation_texts,
    finding_texts,
    guardrails_text,
    hardware_text,
    headline_notes,
    identification_blocks,
    load_tables,
    validity_suffix,
    validity_table,
)
from llmtap.report.document import (
    Block,
    Compliance,
    ItemList,
    Note,
    Preformatted,
    ReportDocument,
    Section,
    Table,
)
from llmtap.report.gates import requirement_rows, requirements_blocks
from llmtap.report.render import markdown
from llmtap.report.values import milliseconds, number


def main_load(report: Report) -> Step | None:
    """Return the load that represents a test; by default, the one with most requests. None without loads."""
    loads = measured_steps(report)
    main = next((load for load in loads if name_of(load) == report.get("main")), None)
    without_arm = [load for load in loads if not load.get("arm")] or loads
    return main or max(without_arm, key=lambda load: at(load, "result.n") or 0, default=None)


NOT_MEASURED: Final = "not measured"
TTFT_P99_MAX: Final = 0.5
_FOR_LATENCY: Final = ("ttft", "tradeoff", "throughput", "itl", "capacity")
_FOR_THROUGHPUT: Final = ("throughput", "tradeoff")
_MainLoad = tuple[Mapping[str, Any], Mapping[str, Any]]


class Rate(NamedTuple):
    """Rate in output tokens per second, and a text on its validity (see `validity_suffix`)."""

    tps: float
    mark: str
    """Text that is shown after the rate if it is doubtful; else empty."""


def minimum_text(document: Mapping[str, Any]) -> str:
    """Return the minimum report of a document (`bench/report/report.py`) as plain text."""
    return "\n".join(_minimum_lines(document)) + "\n"


def _minimum_lines(document: Mapping[str, Any]) -> Iterator[str]:
    sut = document.get("sut") or {}
    main = _main_load(document)
    result: Mapping[str, Any] = {} if main is None else main[1]["result"]
    yield "=== LLM Benchmark Report (Minimum) ==="
    yield ""
    yield "System Identification:"
    yield f"- Model: {sut.get('model') or (document.get('target') or {}).get('model') or NOT_DECLARED}"
    yield f"- Hardware: {hardware_text(sut)}"
    yield f"- Software: {sut.get('software') or NOT_DECLARED}"
    yield f"- SUT Boundary: {BOUNDARIES.get(sut.get('boundary') or '', NOT_DECLARED)}"
    yield ""
    yield "Test Configuration:"
    yield f"- Workload: {workload_text(result)}"
    yield f"- Load Model: {NOT_DECLARED if main is None else load_text(main[1])}"
    yield f"- Request Count: {result.get('n', NOT_MEASURED)}"
    seconds = (result.get("window") or {}).get("seconds")
    yield f"- Test Duration: {NOT_MEASURED if seconds is None else f'{number(seconds)} seconds'}"
    yield ""
    yield "Key Results:"
    for title, metric in (("TTFT", "ttft"), ("TPOT", "tpot")):
        row = {} if main is None else _latencies_of(*main)[0].get(metric) or {}
        for name in ("p50", "p99"):
            mark = "" if main is None else validity_suffix(main[1], metric)
            yield f"- {title} {name.upper()}: {_ms_text(_figure_value(row, name))}{mark}"
    highest, within_bound = throughputs(document)
    yield f"- Max Throughput: {_tps_text(highest)}"
    yield f"- Throughput at P99 TTFT < 500ms: {_tps_text(within_bound)}"
    yield ""
    yield "Notes:"
    yield from (f"- {note}" for note in _notes(document, main))
    yield ""
    yield "=== End Report ==="


def workload_text(result: Mapping[str, Any]) -> str:
    plan = result.get("plan") or {}
    return str((plan.get("workload") or {}).get("name") or plan.get("trace") or NOT_DECLARED)


def load_text(step: Mapping[str, Any]) -> str:
    """Return the load model, such as `open-loop 10 requests/s, poisson` or `closed-loop 8 concurrent`."""
    load, plan = step.get("load") or {}, step["result"].get("plan") or {}
    if load.get("closed") is not None:
        return f"closed-loop {load['closed']:,} concurrent"
    load_result = step["result"].get("load") or {}
    rate = load.get("rate_rps") or load_result.get("planned_rps") or load_result.get("offered_rps")
    process = (plan.get("arrivals") or {}).get("arrivals")
    mode = "open-loop" if rate is None else f"open-loop {number(rate)} requests/s"
    return f"{mode}, {process}" if process else mode


def _main_load(document: Mapping[str, Any]) -> _MainLoad | None:
    """Return the load that shows the latency best, with the report of its test; None: there is none."""
    reports = {report["test"]: report for report in document.get("tests") or ()}
    for name in (*_FOR_LATENCY, *reports):
        load = main_load(reports[name]) if name in reports else None
        if load is not None:
            return reports[name], load
    return None


def _latencies_of(report: Report, step: Step) -> tuple[Mapping[str, Any], str]:
    """Return the latencies of a main load as its test's tables show them, and which requests they cover."""
    level_name, arm = name_of(step).partition("/")[0], str(step.get("arm"))
    for level in at(report, "measurements.levels") or ():
        if level.get("step") == name_of(step) and "window" in level:
            return level, "requests, without those of the first 10 % of the load"
        if arm in (level.get("arms") or {}) and level_name == f"{level['level']:g}-percent":
            return level["arms"][arm], "requests, of all blocks with this load"
    description = "requests of this load, percentiles by histograms (error at most 0.1 %)"
    return at(step, "result.metrics") or {}, description


def throughputs(document: Mapping[str, Any]) -> tuple[Rate | None, Rate | None]:
    """Return two maxima of the output rate (IETF C.1): of all sustained levels, and with TTFT P99 < 500 ms.

    Both rates are from the same test, so that the second is never above the first.
    """
    reports = {report["test"]: report for report in document.get("tests") or ()}
    for name in (name for name in _FOR_THROUGHPUT if name in reports):
        steps = {name_of(step): step for step in reports[name].get("steps") or ()}
        levels = [
            (
                Rate(level["output_tps"], validity_suffix(steps.get(level.get("step"), {}), "tokens")),
                level["ttft"],
            )
            for level in at(reports[name], "measurements.levels") or ()
            if is_sustained(level) and level.get("output_tps") is not None
        ]
        if levels:
            within_bound = [
                rate
                for rate, ttft in levels
                if (p99 := _figure_value(ttft, "p99")) is not None and p99 < TTFT_P99_MAX
            ]
            return max(rate for rate, _ in levels), max(within_bound, default=None)
    return None, None


def _figure_value(row: Mapping[str, Any], name: str) -> float | None:
    figure = row.get(name)
    value: float | None = figure["value"] if isinstance(figure, Mapping) else figure
    return value


def _notes(document: Mapping[str, Any], main: _MainLoad | None) -> Iterator[str]:
    reports: Sequence[Mapping[str, Any]] = document.get("tests") or ()
    verdict = document.get("verdict") or {}
    if sentence := verdict.get("says"):
        yield f"Verdict: {sentence}"
    leads = {"findings": "Not to be relied on", "cautions": "Caution", "unchecked": "Not checked"}
    for kind, lead in leads.items():
        yield from (f"{lead}: {text}" for text in finding_texts(verdict.get(kind) or ()))
    if main is not None:
        report, step = main
        arm = f" ({step['arm']})" if step["arm"] else ""
        # Do not show the name "load": it is the name of a test's only load, so it does not help the reader.
        load = "" if step["name"] == "load" else f", load {step['name']}"
        name = f"{report['section']} {report['title']}{load}{arm}"
        rows, description = _latencies_of(report, step)
        n, needed = (rows.get("ttft") or {}).get("n"), samples_needed(0.99)
        yield f"Configuration, TTFT and TPOT are of {name}" + (f": {n:,} {description}" if n else "")
        if n and n < needed:
            yield f"P99 rests on {n:,} samples; {needed:,} are needed for 10 % accuracy (5.1.4.3)"
    deviations = deviation_texts(document)
    yield from deviations
    if reports and not deviations and all(report.get("compliance") for report in reports):
        yield "No deviation from the methodology is known to the tests that were run"
    yield f"Guardrails: {guardrails_text(document.get('sut') or {})}"
    loads = [text for one in reports if (text := (one.get("configuration") or {}).get(MODEL_LOAD))]
    yield from (f"{MODEL_LOAD}: {text}" for text in loads[:1])
    refused = sum(report.get("refused") or 0 for report in reports)
    yield f"Requests refused by guardrails: {refused}"


def _ms_text(seconds: float | None) -> str:
    return NOT_MEASURED if seconds is None else f"{milliseconds(seconds)} ms"


def _tps_text(rate: Rate | None) -> str:
    return NOT_MEASURED if rate is None else f"{number(rate.tps)} tok/s{rate.mark}"


NAMED_MAX: Final = 3


def full_markdown(document: Mapping[str, Any]) -> str:
    """Return the full report of a document (`bench/report/report.py`) as Markdown."""
    reports: Sequence[Mapping[str, Any]] = document.get("tests") or ()
    titles = [f"{report['section']} {report['title']}" for report in reports]
    tests_text = f"{len(reports)} tests" if len(reports) > NAMED_MAX else ", ".join(titles)
    titled_reports = list(zip(titles, reports, strict=True))
    seed = f"Seed {document.get('seed')}; warm-up {document.get('warmup')}"
    sections = [
        Section("", "1. System identification", identification_blocks(document)),
        Section(
            "",
            "2. Test configuration",
            [Note(f"{seed}; shortened by --quick." if document.get("quick") else f"{seed}.")],
        ),
        *(Section("", title, configuration_blocks(report), 3) for title, report in titled_reports),
        Section(
            "",
            "3. Results",
            [
                *load_tables(reports),
                Note("The minimum report (C.1):"),
                Preformatted(minimum_text(document).rstrip("\n")),
            ],
        ),
        Section("", "4. Detailed results", []),
        *(Section("", title, list(_detail_blocks(report)), 3) for title, report in titled_reports),
        Section("", "5. Methodology compliance", list(_compliance_blocks(document))),
        Section("", "6. Reproduction information", list(_reproduction_blocks(document))),
    ]
    title = f"LLM benchmark: {tests_text or 'no test was run'}"
    return (
        markdown(ReportDocument(title, list(_summary_blocks(document)), sections=sections), special="|")
        + "\n"
    )


def _summary_blocks(document: Mapping[str, Any]) -> Iterator[Block]:
    version = (document.get("versions") or {}).get("llmtap", "?")
    yield Note(f"By the methodology of the IETF draft, with llmtap {version}, {document.get('made', '?')}.")
    verdict = document.get("verdict") or {}
    if sentence := verdict.get("says"):
        yield Note(f"{sentence}.", lead="Verdict:")
    for report in document.get("tests") or ():
        yield from headline_notes(report)
    leads = {
        "findings": "Some figures are not to be relied on:",
        "cautions": "Caution:",
        "unchecked": "Not checked:",
    }
    findings = {lead: finding_texts(verdict.get(kind) or ()) for kind, lead in leads.items()}
    for lead, items in findings.items():
        if items:
            yield from (Note("", lead=lead), ItemList(items))
    if not any(findings.values()):
        yield Note(
            "The load was sent as asked and on time: nothing that is checked speaks against the figures."
        )
    yield from requirements_blocks(requirement_rows(document))


def _detail_blocks(report: Mapping[str, Any]) -> Iterator[Block]:
    for table in report.get("tables") or ():
        yield Table(table["heads"], table["rows"], table["caption"])
    if validity := validity_table(report):
        yield validity
    if notes := report.get("notes"):
        yield ItemList(notes)


def _compliance_blocks(document: Mapping[str, Any]) -> Iterator[Block]:
    reports: Sequence[Mapping[str, Any]] = document.get("tests") or ()
    limits = [
        f"{r['test']}: shortened by --quick, which gives up {', '.join(r['forfeits'])}"
        for r in reports
        if r.get("forfeits")
    ]
    limits += [
        f"{r['test']}, {one['step']}: {one['says']}"
        for r in reports
        for one in (r.get("verdict") or {}).get("failures") or ()
    ]
    listed = {
        "Tests performed:": [f"{r['section']} {r['title']}: {compliance_text(r)}" for r in reports],
        "Tests that could not run:": [f"{r['test']}: {r['why']}" for r in document.get("not_run") or ()],
        "Deviations:": deviation_texts(document) or ["none that the tests know of"],
        "Limitations:": limits or ["none that are known beside the notes of each test"],
    }
    for head, items in listed.items():
        if items:
            yield from (Note(head), ItemList(items))
    for report in reports:
        if rows := at(report, "compliance.rows"):
            yield Compliance(rows, f"Requirements on {report['section']} {report['title']}")


def _reproduction_blocks(document: Mapping[str, Any]) -> Iterator[Block]:
    if document.get("command"):
        yield Preformatted(document["command"])
    versions = document.get("versions") or {}
    rows = [[name, value] for name, value in versions.items()]
    yield Table(["Part", "Version"], [*rows, ["seed", str(document.get("seed"))]])
    yield Note(
        f"Results folder: `{document.get('results', '?')}`. In it are `bench.json` (all that was asked,"
        " without keys), for each test `result.json`, and for each load `step.json` (the result),"
        " `requests.parquet` (a row for each request, with the time of each token), `capture/` (exchanges,"
        " as `llmtap report` and `llmtap replay` read them) and `requests.jsonl.gz` (what was sent)."
    )
    for report in document.get("tests") or ():
        if report.get("exact_requests"):
            yield Note(f"Exact requests of {report['test']}: {report['exact_requests']}.")

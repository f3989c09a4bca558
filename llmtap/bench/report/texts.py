"""Render a benchmark's document as text: the minimum report (IETF draft, C.1) and the full report (C.2).

Input: the JSON document of `report.py`. Output: plain text (`minimum_text`) and Markdown (`full_markdown`)
for `llmtap bench` and `llmtap report`. The minimum report shows one load: the main load of the TTFT test,
else of the first test.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from llmtap.bench.compliance.evidence import MODEL_LOAD, Report, Step, at, measured, name_of
from llmtap.metrics.statistics import samples_needed
from llmtap.report.bench import (
    BOUNDARIES,
    NOT_SAID,
    compliance_said,
    configuration,
    deviations_said,
    findings_said,
    guardrails_said,
    hardware_said,
    identification,
    load_tables,
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
from llmtap.report.render import markdown
from llmtap.report.values import milliseconds, number


def main_load(report: Report) -> Step | None:
    """Return the load that represents a test, by default the one with the most requests, or None."""
    loads = measured(report)
    chosen = next((load for load in loads if name_of(load) == report.get("main")), None)
    plain = [load for load in loads if not load.get("arm")] or loads
    return chosen or max(plain, key=lambda load: at(load, "result.n") or 0, default=None)


def _holds(one: Mapping[str, Any]) -> bool:
    """Return whether a level met its objectives, or, without objectives, had a stable queue."""
    holds = one.get("holds")
    return bool(one.get("queue") == "stable" if holds is None else holds)


NOT_MEASURED: Final = "not measured"
TTFT_P99_MAX: Final = 0.5
_FOR_LATENCY: Final = ("ttft", "tradeoff", "throughput", "itl", "capacity")
_FOR_THROUGHPUT: Final = ("throughput", "tradeoff")
_Found = tuple[Mapping[str, Any], Mapping[str, Any]]


def minimum_text(document: Mapping[str, Any]) -> str:
    """Return the minimum report of a document (`bench/report/report.py`) as plain text."""
    return "\n".join(_lines(document)) + "\n"


def _lines(document: Mapping[str, Any]) -> Iterator[str]:
    sut = document.get("sut") or {}
    main = _main_load(document)
    result: Mapping[str, Any] = {} if main is None else main[1]["result"]
    yield "=== LLM Benchmark Report (Minimum) ==="
    yield ""
    yield "System Identification:"
    yield f"- Model: {sut.get('model') or (document.get('target') or {}).get('model') or NOT_SAID}"
    yield f"- Hardware: {hardware_said(sut)}"
    yield f"- Software: {sut.get('software') or NOT_SAID}"
    yield f"- SUT Boundary: {BOUNDARIES.get(sut.get('boundary') or '', NOT_SAID)}"
    yield ""
    yield "Test Configuration:"
    yield f"- Workload: {workload_said(result)}"
    yield f"- Load Model: {NOT_SAID if main is None else load_said(main[1])}"
    yield f"- Request Count: {result.get('n', NOT_MEASURED)}"
    seconds = (result.get("window") or {}).get("seconds")
    yield f"- Test Duration: {NOT_MEASURED if seconds is None else f'{number(seconds)} seconds'}"
    yield ""
    yield "Key Results:"
    for title, metric in (("TTFT", "ttft"), ("TPOT", "tpot")):
        row = {} if main is None else _rows_of(*main)[0].get(metric) or {}
        for name in ("p50", "p99"):
            yield f"- {title} {name.upper()}: {_ms(_figure(row, name))}"
    most, held = _throughputs(document)
    yield f"- Max Throughput: {_tps(most)}"
    yield f"- Throughput at P99 TTFT < 500ms: {_tps(held)}"
    yield ""
    yield "Notes:"
    yield from (f"- {note}" for note in _notes(document, main))
    yield ""
    yield "=== End Report ==="


def workload_said(result: Mapping[str, Any]) -> str:
    plan = result.get("plan") or {}
    return str((plan.get("workload") or {}).get("name") or plan.get("trace") or NOT_SAID)


def load_said(step: Mapping[str, Any]) -> str:
    """`open-loop 10 requests/s, poisson` or `closed-loop 8 concurrent`, of one load."""
    load, plan = step.get("load") or {}, step["result"].get("plan") or {}
    if load.get("closed") is not None:
        return f"closed-loop {load['closed']:,} concurrent"
    told = step["result"].get("load") or {}
    rate = load.get("rate_rps") or told.get("planned_rps") or told.get("offered_rps")
    process = (plan.get("arrivals") or {}).get("arrivals")
    said = "open-loop" if rate is None else f"open-loop {number(rate)} requests/s"
    return f"{said}, {process}" if process else said


def _main_load(document: Mapping[str, Any]) -> _Found | None:
    reports = {report["test"]: report for report in document.get("tests") or ()}
    for name in (*_FOR_LATENCY, *reports):
        load = main_load(reports[name]) if name in reports else None
        if load is not None:
            return reports[name], load
    return None


def _rows_of(report: Report, step: Step) -> tuple[Mapping[str, Any], str]:
    """Return the latencies of a main load by the tables of its test, and their requests in words."""
    of_level, arm = name_of(step).partition("/")[0], str(step.get("arm"))
    for level in at(report, "measurements.levels") or ():
        if level.get("step") == name_of(step) and "window" in level:
            return level, "requests, without those of the first 10 % of the load"
        if arm in (level.get("arms") or {}) and of_level == f"{level['level']:g}-percent":
            return level["arms"][arm], "requests, of all blocks with this load"
    of = "requests of this load, percentiles by histograms (error at most 0.1 %)"
    return at(step, "result.metrics") or {}, of


def _throughputs(document: Mapping[str, Any]) -> tuple[float | None, float | None]:
    """Return the highest sustained output rate, and the highest one within C.1's bound of TTFT P99."""
    reports = {report["test"]: report.get("measurements") or {} for report in document.get("tests") or ()}
    levels = [level for name in _FOR_THROUGHPUT for level in (reports.get(name) or {}).get("levels") or ()]
    sustained = [level for level in levels if _holds(level) and level.get("output_tps") is not None]
    held = [
        level["output_tps"]
        for level in sustained
        if (p99 := _figure(level["ttft"], "p99")) is not None and p99 < TTFT_P99_MAX
    ]
    most = (reports.get("throughput") or {}).get("max_output_tps")
    if most is None:
        most = max((level["output_tps"] for level in sustained), default=None)
    return most, max(held, default=None)


def _figure(row: Mapping[str, Any], name: str) -> float | None:
    figure = row.get(name)
    value: float | None = figure["value"] if isinstance(figure, Mapping) else figure
    return value


def _notes(document: Mapping[str, Any], main: _Found | None) -> Iterator[str]:
    reports: Sequence[Mapping[str, Any]] = document.get("tests") or ()
    verdict = document.get("verdict") or {}
    leads = {"findings": "Not to be relied on", "cautions": "Caution", "unchecked": "Not checked"}
    for kind, lead in leads.items():
        yield from (f"{lead}: {said}" for said in findings_said(verdict.get(kind) or ()))
    if main is not None:
        report, step = main
        arm = f" ({step['arm']})" if step["arm"] else ""
        load = "" if step["name"] == "load" else f", load {step['name']}"  # a test of one load calls it so
        name = f"{report['section']} {report['title']}{load}{arm}"
        rows, of = _rows_of(report, step)
        n, least = (rows.get("ttft") or {}).get("n"), samples_needed(0.99)
        yield f"Configuration, TTFT and TPOT are of {name}" + (f": {n:,} {of}" if n else "")
        if n and n < least:
            yield f"P99 rests on {n:,} samples; {least:,} are needed for 10 % accuracy (5.1.4.3)"
    deviations = deviations_said(document)
    yield from deviations
    if reports and not deviations and all(report.get("compliance") for report in reports):
        yield "No deviation from the methodology is known to the tests that were run"
    yield f"Guardrails: {guardrails_said(document.get('sut') or {})}"
    loads = [said for one in reports if (said := (one.get("configuration") or {}).get(MODEL_LOAD))]
    yield from (f"{MODEL_LOAD}: {said}" for said in loads[:1])
    refused = sum(report.get("refused") or 0 for report in reports)
    yield f"Requests refused by guardrails: {refused}"


def _ms(seconds: float | None) -> str:
    return NOT_MEASURED if seconds is None else f"{milliseconds(seconds)} ms"


def _tps(rate: float | None) -> str:
    return NOT_MEASURED if rate is None else f"{number(rate)} tok/s"


NAMED_MAX: Final = 3


def full_markdown(document: Mapping[str, Any]) -> str:
    """Return the full report of a document (`bench/report/report.py`) as Markdown."""
    reports: Sequence[Mapping[str, Any]] = document.get("tests") or ()
    titles = [f"{report['section']} {report['title']}" for report in reports]
    named = f"{len(reports)} tests" if len(reports) > NAMED_MAX else ", ".join(titles)
    each = list(zip(titles, reports, strict=True))
    seed = f"Seed {document.get('seed')}; warm-up {document.get('warmup')}"
    sections = [
        Section("", "1. System identification", identification(document)),
        Section("", "2. Test configuration", [
            Note(f"{seed}; shortened by --quick." if document.get("quick") else f"{seed}.")
        ]),
        *(Section("", title, configuration(report), 3) for title, report in each),
        Section("", "3. Results", [
            *load_tables(reports), Note("The minimum report (C.1):"),
            Preformatted(minimum_text(document).rstrip("\n")),
        ]),
        Section("", "4. Detailed results", []),
        *(Section("", title, list(_details(report)), 3) for title, report in each),
        Section("", "5. Methodology compliance", list(_compliance(document))),
        Section("", "6. Reproduction information", list(_reproduction(document))),
    ]  # fmt: skip
    title = f"LLM benchmark: {named or 'no test was run'}"
    return markdown(ReportDocument(title, list(_summary(document)), sections=sections), special="|") + "\n"


def _summary(document: Mapping[str, Any]) -> Iterator[Block]:
    version = (document.get("versions") or {}).get("llmtap", "?")
    yield Note(f"By the methodology of the IETF draft, with llmtap {version}, {document.get('made', '?')}.")
    verdict = document.get("verdict") or {}
    leads = {
        "findings": "Some figures are not to be relied on:", "cautions": "Caution:",
        "unchecked": "Not checked:",
    }  # fmt: skip
    said = {lead: findings_said(verdict.get(kind) or ()) for kind, lead in leads.items()}
    for lead, items in said.items():
        if items:
            yield from (Note("", lead=lead), ItemList(items))
    if not any(said.values()):
        yield Note(
            "The load was sent as asked and on time: nothing that is checked speaks against the figures."
        )


def _details(report: Mapping[str, Any]) -> Iterator[Block]:
    for table in report.get("tables") or ():
        yield Table(table["heads"], table["rows"], table["caption"])
    if notes := report.get("notes"):
        yield ItemList(notes)


def _compliance(document: Mapping[str, Any]) -> Iterator[Block]:
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
        "Tests performed:": [f"{r['section']} {r['title']}: {compliance_said(r)}" for r in reports],
        "Tests that could not run:": [f"{r['test']}: {r['why']}" for r in document.get("not_run") or ()],
        "Deviations:": deviations_said(document) or ["none that the tests know of"],
        "Limitations:": limits or ["none that are known beside the notes of each test"],
    }
    for head, items in listed.items():
        if items:
            yield from (Note(head), ItemList(items))
    for report in reports:
        if rows := at(report, "compliance.rows"):
            yield Compliance(rows, f"Requirements on {report['section']} {report['title']}")


def _reproduction(document: Mapping[str, Any]) -> Iterator[Block]:
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

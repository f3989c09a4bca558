"""The full report as Markdown, in the six parts of IETF seed 000, C.2, and behind them the data of charts.

What a chart shows is a table here: of many points, some in even steps and the last. Streams are on the page.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from llmtap.bench.report.minimum import (
    BOUNDARIES,
    NOT_SAID,
    guardrails_said,
    hardware_said,
    load_said,
    minimum_text,
    workload_said,
)
from llmtap.metrics.summary import ENDED_WELL
from llmtap.report.bench import compliance_said, findings_said
from llmtap.report.plots import interval_said
from llmtap.report.values import milliseconds, number

__all__ = ["full_markdown"]

POINTS_MAX: Final = 12
"""Rows of a table that stands for a chart."""
NAMED_MAX: Final = 3
"""Of tests in a heading."""
_METRICS: Final = {"ttft": "TTFT", "tpot": "TPOT", "itl": "ITL", "e2e": "E2E"}
_STREAM: Final = "steps"
"""The kind of chart that shows one answer token by token."""


def full_markdown(document: Mapping[str, Any]) -> str:
    """The report of a benchmark's document (`bench/report.py`)."""
    reports: Sequence[Mapping[str, Any]] = document.get("tests") or ()
    names = ", ".join(f"{report['section']} {report['title']}" for report in reports)
    if len(reports) > NAMED_MAX:
        names = f"{len(reports)} tests"
    parts = [
        f"# LLM benchmark: {names or 'no test was run'}",
        _made(document),
        _verdict(document),
        "## 1. System identification", _identification(document),
        "## 2. Test configuration", *_configurations(document),
        "## 3. Results", *_results(document),
        "## 4. Detailed results", *(part for report in reports for part in _details(report)),
        "## 5. Methodology compliance", *_compliance(document),
        "## 6. Reproduction information", *_reproduction(document),
        *_data(reports),
    ]  # fmt: skip
    return "\n\n".join(part for part in parts if part) + "\n"


def _made(document: Mapping[str, Any]) -> str:
    version = (document.get("versions") or {}).get("llmtap", "?")
    return f"By the methodology of IETF seed 000, with llmtap {version}, {document.get('made', '?')}."


def _verdict(document: Mapping[str, Any]) -> str:
    verdict = document.get("verdict") or {}
    if verdict.get("valid", True):
        return "The load was sent as asked and on time: nothing that is checked speaks against the figures."
    said = "\n".join(f"- {one}" for one in findings_said(verdict.get("findings") or ()))
    return f"**Some figures are not to be relied on:**\n\n{said}"


def _identification(document: Mapping[str, Any]) -> str:
    sut, target = document.get("sut") or {}, document.get("target") or {}
    tokenizer, clock = sut.get("tokenizer") or {}, sut.get("clock") or {}
    told = {
        "Model": sut.get("model") or target.get("model"),
        "Hardware": hardware_said(sut),
        "Software": sut.get("software"),
        "SUT boundary": BOUNDARIES.get(sut.get("boundary") or ""),
        "Address": target.get("url"),
        "Tokenizer": _said(tokenizer, ("name", "vocabulary", "source")),
        "Token counting": _said(tokenizer, ("counting", "special", "system_prompt", "tools")),
        "Streaming": _said(sut, ("protocol", "chunking")),
        "Prefix caching": {True: "on", False: "off"}.get(sut.get("prefix_cache")),  # type: ignore[arg-type]
        "Largest batch": sut.get("max_batch"),
        "Guardrails": guardrails_said(sut),
        "Clocks": _said(clock, ("placement", "synchronization", "accuracy")),
    }
    table = _table(["", ""], [[name, str(value or NOT_SAID)] for name, value in told.items()])
    notes = "\n".join(f"- {note}" for note in sut.get("notes") or ())
    return f"{table}\n\n{notes}" if notes else table


def _said(told: Mapping[str, Any], names: Sequence[str]) -> str:
    return ", ".join(
        f"{name.replace('_', ' ')}: {told[name]}" for name in names if told.get(name) is not None
    )


def _configurations(document: Mapping[str, Any]) -> Iterator[str]:
    yield f"Seed {document.get('seed')}; warm-up {document.get('warmup')}" + (
        "; shortened by --quick." if document.get("quick") else "."
    )
    for report in document.get("tests") or ():
        yield f"### {report['section']} {report['title']}"
        rows = [[name, str(value)] for name, value in (report.get("configuration") or {}).items()]
        rows += [[f"`{name}`", _value(value)] for name, value in (report.get("params") or {}).items()]
        yield _table(["", ""], rows)
        arms = [[name, arm.get("about") or "-"] for name, arm in (report.get("arms") or {}).items()]
        if arms:
            yield _table(["Arm", "What it is"], arms)


def _results(document: Mapping[str, Any]) -> Iterator[str]:
    """Latency, throughput and success of every load; then the minimum report."""
    rows = []
    for report in document.get("tests") or ():
        for step in report["steps"]:
            result = step["result"]
            outcomes = result.get("outcomes") or {}
            well, n = sum(outcomes.get(name, 0) for name in ENDED_WELL), sum(outcomes.values())
            figures = [
                milliseconds(((result.get("metrics") or {}).get(metric) or {}).get(share))
                for metric in _METRICS
                for share in ("p50", "p99")
            ]
            rows.append([
                report["test"], step["name"], step["arm"] or "-", workload_said(result), load_said(step),
                f"{result.get('n', 0):,}", *figures,
                number((result.get("tokens") or {}).get("output_per_second")),
                f"{well / n:.1%}" if n else "-",
            ])  # fmt: skip
    latencies = [f"{title} {share} (ms)" for title in _METRICS.values() for share in ("P50", "P99")]
    heads = ["Test", "Load", "Arm", "Workload", "Load model", "n", *latencies, "Output tok/s", "Success"]
    yield "Each load, as its requests were measured:"
    yield _table(heads, rows)
    yield f"The minimum report (C.1):\n\n```\n{minimum_text(document)}```"


def _details(report: Mapping[str, Any]) -> Iterator[str]:
    yield f"### {report['section']} {report['title']}"
    for table in report.get("tables") or ():
        yield f"**{_cell(table['caption'])}**\n\n{_table(table['heads'], table['rows'])}"
    yield "\n".join(f"- {note}" for note in report.get("notes") or ())


def _data(reports: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """The section of what is drawn on the page, if there is anything."""
    parts = []
    for report in reports:
        charts = [part for chart in report.get("charts") or () for part in _chart(chart)]
        if charts:
            parts += [f"### {report['section']} {report['title']}: charts", *charts]
    if parts:
        yield "## Data of the charts"
        yield from parts


def _chart(chart: Mapping[str, Any]) -> Iterator[str]:
    if chart["kind"] == _STREAM:
        return
    rows = list(_points(chart))
    if rows:
        heads = ["", _cell(chart["x_title"]), _cell(chart["y_title"]), "interval"]
        if not any(row[-1] for row in rows):
            heads, rows = heads[:-1], [row[:-1] for row in rows]
        yield f"*{_cell(chart['title'])}*\n\n{_table(heads, rows)}"
    marks = [f"{mark['says']}: {number(mark['x'])}" for mark in chart.get("marks") or ()]
    yield "\n".join(f"- {mark}" for mark in marks)


def _points(chart: Mapping[str, Any]) -> Iterator[list[str]]:
    for series in chart.get("series") or ():
        n = len(series["x"])
        chosen = range(n) if n <= POINTS_MAX else [i * (n - 1) // (POINTS_MAX - 1) for i in range(POINTS_MAX)]
        low, high = series.get("low") or [None] * n, series.get("high") or [None] * n
        for i in chosen:
            x = series["x"][i]
            between = interval_said(low[i], high[i])
            yield [series["name"], x if isinstance(x, str) else number(x), number(series["y"][i]), between]


def _compliance(document: Mapping[str, Any]) -> Iterator[str]:
    reports: Sequence[Mapping[str, Any]] = document.get("tests") or ()
    yield "Tests performed:\n\n" + "\n".join(
        f"- {report['section']} {report['title']}: {compliance_said(report)}" for report in reports
    )
    if document.get("not_run"):
        yield "Tests that could not run:\n\n" + "\n".join(
            f"- {one['test']}: {one['why']}" for one in document["not_run"]
        )
    deviations = [f"- {r['test']}: {said}" for r in reports for said in r.get("deviations") or ()]
    yield "Deviations:\n\n" + ("\n".join(deviations) or "- none that the tests know of")
    limits = [f"- {r['test']}: shortened by --quick, which gives up {', '.join(r['forfeits'])}"
              for r in reports if r.get("forfeits")]  # fmt: skip
    limits += [f"- {r['test']}, {one['step']}: {one['says']}"
               for r in reports for one in (r.get("verdict") or {}).get("failures") or ()]  # fmt: skip
    yield "Limitations:\n\n" + ("\n".join(limits) or "- none that are known beside the notes of each test")
    for report in reports:
        rows = [
            [row["id"], row["level"], row["says"], row["status"], row["evidence"]]
            for row in (report.get("compliance") or {}).get("rows") or ()
        ]
        if rows:
            yield f"Requirements on {report['section']} {report['title']}:"
            yield _table(["Id", "Level", "What is demanded", "Status", "Evidence"], rows)


def _reproduction(document: Mapping[str, Any]) -> Iterator[str]:
    if document.get("command"):
        yield f"```\n{document['command']}\n```"
    rows = [[name, value] for name, value in (document.get("versions") or {}).items()]
    yield _table(["Part", "Version"], [*rows, ["seed", str(document.get("seed"))]])
    yield (
        f"Results folder: `{document.get('results', '?')}`. In it are `bench.json` (all that was asked,"
        " without keys), for each test `result.json`, and for each load `step.json` (the result),"
        " `requests.parquet` (a row for each request, with the time of each token), `capture/` (exchanges,"
        " as `llmtap report` and `llmtap replay` read them) and `requests.jsonl.gz` (what was sent)."
    )
    for report in document.get("tests") or ():
        if report.get("exact_requests"):
            yield f"Exact requests of {report['test']}: {report['exact_requests']}."


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = ["| " + " | ".join(map(_cell, heads)) + " |", "|" + " --- |" * len(heads)]
    lines += ["| " + " | ".join(map(_cell, row)) + " |" for row in rows]
    return "\n".join(lines)


def _cell(text: object) -> str:
    """Nothing in it ends the cell, or begins a tag."""
    said = " ".join(str(text).split())
    return said.replace("|", "\\|").replace("<", "&lt;")


def _value(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list):
        return ", ".join(_value(one) for one in value)
    return number(value) if isinstance(value, int | float) else str(value)

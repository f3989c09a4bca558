"""A benchmark as one page: what it came to, each test with its tables and charts, and the demands on it.

Takes the public JSON (`llmtap bench --json`); parts that are missing are left out. Every chart has a table of
its figures. Names in it were given by others: escaped for HTML, and for plotly, which reads tags, too.
"""

from collections.abc import Iterator, Mapping, Sequence
from html import escape
from typing import Any, Final

from llmtap.metrics.summary import ENDED_WELL
from llmtap.report.bench import findings_said
from llmtap.report.bench_charts import chart_plots, charts_html
from llmtap.report.figures import COLOURS
from llmtap.report.page import contents_html, page_html, scrolled_html, table_html, terms_html
from llmtap.report.sweep import number
from llmtap.report.terminal import milliseconds

__all__ = ["bench_html"]

_METRICS: Final = {"ttft": "TTFT", "tpot": "TPOT", "e2e": "E2E"}
_STATUSES: Final = ("not met", "cannot tell", "met", "not applicable")
_FILTERS: Final = {"test": "Test", "level": "Level", "status": "Status"}
_NAMED_MAX: Final = 3
"""Of tests in a heading."""


def bench_html(document: Mapping[str, Any]) -> str:
    """The page."""
    reports: Sequence[Mapping[str, Any]] = document.get("tests") or ()
    headings: dict[str, str] = {}
    sections: list[str] = []
    plots: dict[str, dict[str, Any]] = {}

    def add(key: str, heading: str, html: str) -> None:
        headings[key] = heading
        sections.append(f'<section id="{key}"><h2>{escape(heading)}</h2>{html}</section>')

    for report in reports:
        key = report["test"]
        add(key, f"{report['section']} {report['title']}", _test(report))
        plots |= chart_plots(key, report.get("charts") or ())
    if reports:
        add("loads", "Every load", _loads(reports))
        add("compliance", "Compliance", _compliance(reports))
        add("again", "To do it again", _again(document))
    names = ", ".join(report["title"] for report in reports)
    if len(reports) > _NAMED_MAX:
        names = f"{len(reports)} tests"
    model = (document.get("sut") or {}).get("model") or (document.get("target") or {}).get("model")
    return page_html(
        f"Benchmark of {model or 'a server'}: {names or 'no test was run'}",
        summary=_summary(document),
        settings=_settings(document),
        contents=contents_html({"settings": "What was run", **headings}),
        sections=sections,
        plots=plots,
        lines=[{"of": {}, "colour": i} for i in range(COLOURS)],
        style="replay_page.css bench_page.css",
        script="bench_page.js",
    )


def _summary(document: Mapping[str, Any]) -> str:
    verdict = document.get("verdict") or {}
    if verdict.get("valid"):
        html = (
            "<div class=verdict><p><strong>Valid.</strong> Loads were sent as asked and on time, the sender"
            " had room: nothing that is checked speaks against the figures.</p></div>"
        )
    else:
        findings = findings_said(verdict.get("findings") or ())
        said = "".join(f"<li>{escape(one)}</li>" for one in findings)
        html = f'<div class="verdict bad"><p><strong>Not valid.</strong></p><ul>{said}</ul></div>'
    if document.get("quick"):
        html += (
            "<p>Note: tests were shortened (--quick); the demands that this gives up are not met below.</p>"
        )
    for one in document.get("not_run") or ():
        html += f"<p>Not run: {escape(one['test'])}, because {escape(one['why'])}.</p>"
    return html + _tiles(document.get("tests") or ())


def _tiles(reports: Sequence[Mapping[str, Any]]) -> str:
    """How each test stands with the demands."""
    tiles = []
    for report in reports:
        told = report.get("compliance")
        if told:
            must, should = told["must"], told["should"]
            counts = f"{must['satisfied']} of {must['n']} MUST, {should['satisfied']} of {should['n']} SHOULD"
            title, status = escape(report["title"]), escape(told["level"])
            tiles.append(
                f'<div><dt><a href="#{report["test"]}">{title}</a></dt><dd><b class=status>{status}</b>'
                f"<small>{counts}</small></dd></div>"
            )
    return f"<dl class=tiles>{''.join(tiles)}</dl>" if tiles else ""


def _settings(document: Mapping[str, Any]) -> str:
    sut, target = document.get("sut") or {}, document.get("target") or {}
    rows = [("address", str(target.get("url", "-")))]
    # With spaces, where a narrow page can break them.
    rows += [(path.replace(".", " ").replace("_", " "), text) for path, text in _flat(_priced(sut))]
    for name in ("seed", "warmup", "quick", "made"):
        rows.append((name, _text(document.get(name))))
    whole = [
        *_flat({"target": target, "arms": document.get("arms") or {}, "params": document.get("params") or {}})
    ]
    details = f"<details><summary>All of it ({len(whole):,} values)</summary>{terms_html(whole)}</details>"
    return terms_html(rows) + details


def _priced(sut: Mapping[str, Any]) -> dict[str, Any]:
    """A currency says nothing without a price."""
    hardware = dict(sut.get("hardware") or {})
    if hardware.get("price_per_hour") is None:
        hardware.pop("currency", None)
    return {**sut, "hardware": hardware}


def _test(report: Mapping[str, Any]) -> str:
    parts = [terms_html([(name, str(text)) for name, text in (report.get("configuration") or {}).items()])]
    tables = []
    for table in report.get("tables") or ():
        rows = [(row[0], row[1:]) for row in table["rows"]]
        tables.append(
            scrolled_html(table["caption"], table_html(table["caption"], table["heads"], rows, breaks=True))
        )
    if tables:
        parts.append(f"<div class=tables>{''.join(tables)}</div>")
    charts = report.get("charts") or ()
    if charts:
        parts.append(charts_html(report["test"], charts))
    notes = [*(report.get("notes") or ()), *(f"Deviation: {one}" for one in report.get("deviations") or ())]
    if notes:
        parts.append("<ul class=notes>" + "".join(f"<li>{escape(note)}</li>" for note in notes) + "</ul>")
    return "".join(parts)


def _loads(reports: Sequence[Mapping[str, Any]]) -> str:
    heads = ["load", "n", "requests/s", "output tok/s"]
    heads += [f"{title} {share}" for title in _METRICS.values() for share in ("p50", "p99")]
    heads += ["ended well", "late p99"]
    html = "<p>As its requests were measured, in ms. Each is a folder of the results.</p>"
    for report in reports:
        rows = []
        for step in report.get("steps") or ():
            result = step["result"]
            outcomes = result.get("outcomes") or {}
            n, well = sum(outcomes.values()), sum(outcomes.get(name, 0) for name in ENDED_WELL)
            metrics = result.get("metrics") or {}
            cells = [
                f"{result.get('n', 0):,}", number((result.get("load") or {}).get("offered_rps")),
                number((result.get("tokens") or {}).get("output_per_second")),
                *(milliseconds((metrics.get(m) or {}).get(s)) for m in _METRICS for s in ("p50", "p99")),
                f"{well / n:.1%}" if n else "-",
                milliseconds((result.get("dispatch_lateness") or {}).get("p99")),
            ]  # fmt: skip
            arm = f" ({step['arm']})" if step.get("arm") else ""
            rows.append((f"{step['name']}{arm}", cells))
        title = f"{report['section']} {report['title']}"
        html += scrolled_html(title, table_html(title, heads, rows))
    return html


def _compliance(reports: Sequence[Mapping[str, Any]]) -> str:
    """One table of all demands on all tests, with a choice of them."""
    found = [
        (report["test"], row)
        for report in reports
        for row in (report.get("compliance") or {}).get("rows") or ()
    ]
    choices: dict[str, list[str]] = {
        "test": list(dict.fromkeys(test for test, _ in found)),
        "level": list(dict.fromkeys(row["level"] for _, row in found)),
        "status": [status for status in _STATUSES if any(row["status"] == status for _, row in found)],
    }
    selects = "".join(_select(name, choices[name]) for name in _FILTERS)
    body = "".join(_demand(test, row) for test, row in found)
    heads = "".join(
        f"<th scope=col>{head}</th>" for head in ("Demand", "Test", "Level", "Status", "What and evidence")
    )
    return (
        "<p>Every demand of the methodology that binds these tests, and what shows whether it was met. A test"
        " that meets all MUST is conditionally compliant, one that meets all SHOULD as well unconditionally."
        " What a report cannot show counts as not met; procedures without a key word count for nothing.</p>"
        f"<fieldset class=filters><legend>Show</legend><div class=choices>{selects}"
        "<label>Words <input type=search id=demand-words></label></div>"
        f"<div id=demands-shown role=status>{len(found):,} of {len(found):,} demands</div></fieldset>"
        '<div class=scroll tabindex=0 role=region aria-label="Demands, table">'
        f"<table class=demands id=demands><thead><tr>{heads}</tr></thead><tbody>{body}</tbody></table></div>"
    )


def _select(name: str, values: Sequence[str]) -> str:
    options = "".join(f"<option>{escape(value)}</option>" for value in values)
    every = "<option value=''>all</option>"
    return f"<label>{_FILTERS[name]} <select data-filter={name}>{every}{options}</select></label>"


def _demand(test: str, row: Mapping[str, Any]) -> str:
    status = row["status"]
    data = " ".join(
        f'data-{name}="{escape(value)}"'
        for name, value in (("test", test), ("level", row["level"]), ("status", status))
    )
    kind = {"met": "good", "not met": "bad"}.get(status, "unsure")
    if status == "not met" and row["level"] in ("MAY", "OPTIONAL", "procedure"):
        kind = "unsure"
    return (
        f"<tr {data}><th scope=row>{escape(row['id'])}</th><td>{escape(test)}</td>"
        f"<td>{escape(row['level'])}</td>"
        f'<td class="{kind}">{escape(status)}</td><td>{escape(row["says"])}'
        f"<small>{escape(row['evidence'])}</small></td></tr>"
    )


def _again(document: Mapping[str, Any]) -> str:
    command = document.get("command")
    html = f"<pre>{escape(command)}</pre>" if command else ""
    rows = [(name, str(value)) for name, value in (document.get("versions") or {}).items()]
    rows.append(("results folder", str(document.get("results", "-"))))
    rows += [
        (f"requests of {report['test']}", str(report["exact_requests"]))
        for report in document.get("tests") or ()
        if report.get("exact_requests")
    ]
    return html + terms_html(rows)


def _flat(tree: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, str]]:
    """Leaves by their path, as text; nothing that is empty."""
    for name, value in tree.items():
        path = f"{before}.{name}" if before else name
        if isinstance(value, Mapping):
            yield from _flat(value, path)
        elif value not in (None, [], ""):
            yield path, _text(value)


def _text(value: object) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list):
        return ", ".join(_text(one) for one in value)
    return number(value) if isinstance(value, float) else str(value)

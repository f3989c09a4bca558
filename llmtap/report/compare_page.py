"""Systems held against each other, as one page: what differs, whether that is fair, and distributions.

Takes the public JSON (`llmtap report RESULTS --compare OTHER --json`). Every chart has a table of its
figures. Names in it were given by others: escaped for HTML, and for plotly, which reads tags, too.
"""

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any, Final

from llmtap.report.bench_charts import chart_plots, charts_html
from llmtap.report.compare import fairness_said, left_out_said, normalised_rows, unlike_said, unmet_rows
from llmtap.report.figures import COLOURS
from llmtap.report.page import contents_html, page_html, scrolled_html, table_html

__all__ = ["compare_html"]

_KINDS: Final = {"met": "good", "not met": "bad"}


def compare_html(told: Mapping[str, Any]) -> str:
    """The page."""
    headings, sections = {}, []
    plots: dict[str, dict[str, Any]] = {}
    for test in told["tests"]:
        key, heading = test["test"], f"{test['section']} {test['title']}"
        headings[key] = heading
        sections.append(f'<section id="{key}"><h2>{escape(heading)}</h2>{_test(test)}</section>')
        plots |= chart_plots(key, test["charts"])
    base, *others = (one["label"] for one in told["systems"])
    return page_html(
        f"{', '.join(others)} against {base}",
        summary=_summary(told),
        settings=_settings(told),
        contents=contents_html({"settings": "What was run", **headings}),
        sections=sections,
        plots=plots,
        lines=[{"of": {}, "colour": i} for i in range(COLOURS)],
        style="replay_page.css bench_page.css",
    )


def _summary(told: Mapping[str, Any]) -> str:
    """What the tests are about, and whether the comparison may be published."""
    valid = all(one["valid"] for test in told["tests"] for one in test["systems"])
    fair = valid and not any(unmet_rows(test) for test in told["tests"])
    said = "".join(
        f"<li>{escape(test['title'])}: {escape(' '.join((*unlike_said(test), fairness_said(test))))}</li>"
        for test in told["tests"]
    )
    if not valid:
        said += "<li>Some runs are not valid: what speaks against them is in the notes.</li>"
    kind, verdict = ("verdict", "Fair.") if fair else ("verdict bad", "Not to be published as it is.")
    html = (
        f'<div class="{kind}"><p><strong>{verdict}</strong> The checklist of section 6:</p>'
        f"<ul>{said}</ul></div>"
    )
    tiles = []
    for test in told["tests"]:
        for other in test["systems"][1:]:
            rows = [row for row in test["comparisons"] if row["key"] and row["b_system"] == other["label"]]
            counts = {
                finding: sum(row["finding"] == finding for row in rows)
                for finding in ("worse", "better", "no difference shown", "not tested")
            }
            shown = ", ".join(f"{n} {finding}" for finding, n in counts.items() if n) or "nothing in common"
            name, title = escape(other["label"]), escape(test["title"])
            tiles.append(
                f'<div><dt><a href="#{test["test"]}">{name}: {title}</a></dt><dd><b class=status>{shown}</b>'
                f"<small>of the {len(rows)} figures that the test is about</small></dd></div>"
            )
    out = "".join(f"<p>{escape(one)}.</p>" for one in left_out_said(told))
    return f"{html}<dl class=tiles>{''.join(tiles)}</dl>{out}"


def _settings(told: Mapping[str, Any]) -> str:
    """The systems, side by side."""
    by_label: dict[str, Mapping[str, Any]] = {}
    for test in told["tests"]:
        for one in test["systems"]:
            by_label.setdefault(one["label"], one)
    rows = []
    for one in told["systems"]:
        system = by_label[one["label"]]
        sut, target = system["sut"], system["target"]
        hardware = sut.get("hardware") or {}
        rows.append((one["label"], [
            str(target.get("url", "-")), str(sut.get("model") or target.get("model") or "-"),
            str(sut.get("software") or "-"), str(hardware.get("accelerator") or "-"),
            str(hardware.get("count") or "-"), str(one["results"]),
        ]))  # fmt: skip
    heads = ["system", "address", "model", "software", "accelerator", "count", "results"]
    table = scrolled_html("Systems", table_html("Systems", heads, rows))
    runs = []
    for test in told["tests"]:
        for one in test["systems"]:
            for i, (seed, began) in enumerate(zip(one["seeds"], one["began"], strict=True), 1):
                runs.append((test["title"], [one["label"], str(i), str(seed), str(began)]))
    every = scrolled_html("Runs", table_html("Runs", ["test", "system", "run", "seed", "began"], runs))
    return f"{table}<details><summary>Every run ({len(runs)})</summary>{every}</details>"


def _test(test: Mapping[str, Any]) -> str:
    parts = []
    for table in test["tables"]:
        rows = [(row[0], row[1:]) for row in table["rows"]]
        parts.append(
            scrolled_html(table["caption"], table_html(table["caption"], table["heads"], rows, breaks=True))
        )
    if not parts:
        parts.append("<p>Nothing could be compared: no load in common, or too few requests.</p>")
    parts.append("<ul class=notes>" + "".join(f"<li>{escape(note)}</li>" for note in test["notes"]) + "</ul>")
    if test["charts"]:
        parts.append(charts_html(test["test"], test["charts"]))
    heads, normalised = normalised_rows(test)
    if normalised:
        caption = "Output rates, normalised (6.2)"
        rates = [(row[0], row[1:]) for row in normalised]
        parts.append(scrolled_html(caption, table_html(caption, heads, rates)))
        parts.append(f"<p class=words>{escape(test['normalised'][0]['method'])}</p>")
    return "".join([*parts, _checklist(test["checklist"]["rows"])])


def _checklist(rows: Sequence[Mapping[str, Any]]) -> str:
    body = "".join(
        f"<tr><th scope=row>{escape(row['id'])}</th><td>{escape(row['level'])}</td>"
        f'<td class="{_KINDS.get(row["status"], "unsure")}">{escape(row["status"])}</td>'
        f"<td>{escape(row['says'])}<small>{escape(row['evidence'])}</small></td></tr>"
        for row in rows
    )
    heads = "".join(
        f"<th scope=col>{head}</th>" for head in ("Demand", "Level", "Status", "What and evidence")
    )
    table = (
        "<table class=demands><caption>Fair comparison checklist (6)</caption>"
        f"<thead><tr>{heads}</tr></thead><tbody>{body}</tbody></table>"
    )
    return f'<div class=scroll tabindex=0 role=region aria-label="Checklist, table">{table}</div>'

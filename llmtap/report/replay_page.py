"""A replay as one page: the verdict first, then the figures, their distributions, and the run over time.

Takes the public JSON (`llmtap replay --json`); parts that are missing are left out. Every chart has a table
of its figures, and a caption that says what they rest on. Names in it were given by others: escaped for HTML,
and for plotly, which reads tags in texts, too.
"""

from collections.abc import Iterator, Mapping, Sequence
from html import escape
from typing import Any, Final

from llmtap.report.baseline import ABOUT, HEADS, baseline_distributions, baseline_rows, pairs_said
from llmtap.report.distributions import Distribution, distributions_of, panels_of, table_of
from llmtap.report.figures import COLOURS, MARK, Panel
from llmtap.report.page import (
    contents_html,
    legend_html,
    page_html,
    scrolled_html,
    table_html,
    terms_html,
)
from llmtap.report.replay_figures import (
    FEW,
    FIGURE_HEADS,
    Row,
    at,
    experience_rows,
    latency_rows,
    outcome_rows,
)
from llmtap.report.replay_terms import RATES, all_of, heading_of, plan_rows, rests_on
from llmtap.report.replay_verdict import UNJUDGED, finding_said, judged
from llmtap.report.sweep import number
from llmtap.report.system import system_warnings
from llmtap.report.time_charts import TimeChart, legend_of, system_table, time_charts_of, timeline_rows
from llmtap.units import format_share

__all__ = ["replay_html"]

_TILES: Final = (
    ("TTFT", ("metrics", "ttft")), ("ITL", ("metrics", "itl")), ("E2E", ("metrics", "e2e")),
    ("Dispatch lateness", ("dispatch_lateness",)),
)  # fmt: skip
_WHOLE: Final = ("plan", "load", "lengths", "warmup", "sender")
_Table = tuple[Sequence[str], Sequence[tuple[str, Sequence[str]]]]


def replay_html(result: Mapping[str, Any]) -> str:
    """The page."""
    headings: dict[str, str] = {}
    sections: list[str] = []
    plots: dict[str, dict[str, Any]] = {}

    def add(key: str, heading: str, html: str) -> None:
        headings[key] = heading
        sections.append(f'<section id="{key}"><h2>{escape(heading)}</h2>{html}</section>')

    def draw(key: str, panels: Sequence[Panel]) -> None:
        plots.update({f"{key}-{i}": {"data": p.data, "layout": p.layout} for i, p in enumerate(panels)})

    add("figures-table", "Figures", _figures(result))
    for distribution in distributions_of(result):
        panels = panels_of(distribution)
        draw(distribution.key, panels)
        add(distribution.key, distribution.heading, _distribution(result, distribution, panels))
    if result.get("baseline"):
        add("baseline", "Then and now", _baseline(result))
    for distribution in baseline_distributions(result.get("baseline") or {}):
        panels = panels_of(distribution)
        draw(distribution.key, panels)
        add(distribution.key, distribution.heading, _distribution(result, distribution, panels))
    for chart in time_charts_of(result):
        draw(chart.key, chart.panels)
        add(chart.key, chart.heading, _time_chart(result, chart))
    if result.get("outcomes"):
        add("outcomes", "Outcomes", _outcomes(result))
    return page_html(
        heading_of(result),
        summary=_verdict(result.get("verdict")) + _notes(result) + _tiles(result),
        settings=_settings(result),
        contents=contents_html({"settings": "What was run", **headings}),
        sections=sections,
        plots=plots,
        lines=[{"of": {}, "colour": i} for i in range(COLOURS)],
        style="replay_page.css",
        script="replay_page.js",
    )


def _verdict(verdict: Mapping[str, Any] | None) -> str:
    if verdict is None:
        return f"<p>{UNJUDGED}</p>"
    word, more = judged(verdict)
    said = "".join(f"<li>{escape(finding_said(one))}</li>" for one in verdict.get("findings") or ())
    style = "verdict" if verdict["valid"] else '"verdict bad"'
    findings = f"<ul>{said}</ul>" if said else ""
    return f"<div class={style}><p><strong>{word}</strong> {more}</p>{findings}</div>"


def _notes(result: Mapping[str, Any]) -> str:
    notes = list((result.get("plan") or {}).get("notes") or ())
    notes += system_warnings((result.get("system") or {}).get("summary") or {})
    return "".join(f"<p>Note: {escape(str(note))}</p>" for note in notes)


def _tiles(result: Mapping[str, Any]) -> str:
    tiles = "".join(
        f"<div><dt>{escape(term)}</dt><dd><b>{escape(text)}</b><small>{escape(more)}</small></dd></div>"
        for term, text, more in _tile_texts(result)
    )
    return f"<dl class=tiles>{tiles}</dl>" if tiles else ""


def _tile_texts(result: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    load = result.get("load") or {}
    if load.get("planned_rps") is not None:
        planned = f"of {number(load['planned_rps'])} planned"
        if load.get("due"):
            planned += f", {format_share(load['in_time'], load['due'])} in time"
        yield "Requests sent", f"{number(load['offered_rps'])}/s", planned
    elif load.get("offered_rps") is not None:
        yield "Requests sent", f"{number(load['offered_rps'])}/s", f"{load.get('sent', 0):,} in all"
    for title, place in _TILES:
        figures = at(result, place)
        if figures.get("n"):
            in_s = figures["p99"] >= 1
            p50, p99 = (number(figures[p] * (1 if in_s else 1e3), 3) for p in ("p50", "p99"))
            mark = MARK if "p99" in (figures.get("marks") or ()) else ""
            option = f", option {figures['option']}" if figures.get("option") else ""
            of = f"p50 / p99 of {figures['n']:,}{option}"
            yield title, f"{p50} / {p99}{mark} {'s' if in_s else 'ms'}", of
    tokens = result.get("tokens") or {}
    if tokens.get("output_per_second") is not None:
        sources = ", ".join(tokens.get("source") or ())
        yield "Output", f"{number(tokens['output_per_second'])}/s", f"tokens, by {sources}"
    goodput = result.get("goodput") or {}
    if goodput.get("attainment") is not None:
        met = f"{goodput['met']:,} of {goodput['counted']:,} met {goodput['objectives']}"
        yield "Goodput", f"{number(goodput['requests_per_second'])}/s", met
    smooth = result.get("smooth_goodput") or {}
    if smooth.get("tokens_per_second") is not None:
        yield (
            "Smooth goodput",
            f"{number(smooth['tokens_per_second'])}/s",
            f"tokens, of {smooth['n']:,} answers",
        )


def _settings(result: Mapping[str, Any]) -> str:
    rows = all_of(result, *_WHOLE)
    whole = (
        f"<details><summary>All of it ({len(rows):,} values)</summary>{terms_html(rows)}</details>"
        if rows
        else ""
    )
    rates = f"<p>{escape(RATES)}</p>" if result.get("load") else ""
    return terms_html(plan_rows(result)) + rates + whole


def _figures(result: Mapping[str, Any]) -> str:
    rows, shares = latency_rows(result), experience_rows(result)
    html = scrolled_html("Figures", table_html("Latencies, ms", FIGURE_HEADS, rows))
    if shares:
        about = "What readers had of the answers"
        html += scrolled_html(about, table_html(about, FIGURE_HEADS, shares))
    marked = any(cell.endswith(MARK) for _, cells in (*rows, *shares) for cell in cells)
    html += f"<p class=few>{FEW}</p>" if marked else ""
    return html + _rests(rests_on(result, "", ("ITL", "tokens", "smooth goodput", "sender")))


def _distribution(result: Mapping[str, Any], distribution: Distribution, panels: Sequence[Panel]) -> str:
    keys = [(curve.name, curve.colour, curve.dash) for curve in distribution.curves]
    table = table_of(distribution)
    marked = any(cell.endswith(MARK) for _, cells in table[1] for cell in cells)
    samples = "; ".join(f"{curve.name}: n {curve.n:,}" for curve in distribution.curves)
    return _figure(
        distribution.key, distribution.heading, distribution.about, panels,
        legend=[*keys, *([(f"too few samples ({MARK})", None, "dot")] if marked else [])],
        rests=rests_on(result, samples, distribution.says), words=panels[0].words, table=table,
        below=f"<p class=few>{FEW}</p>" if marked else "",
    )  # fmt: skip


def _baseline(result: Mapping[str, Any]) -> str:
    baseline = result["baseline"]
    rows = baseline_rows(baseline)
    table = scrolled_html("Then and now", table_html("Then and now, ms", ["", *HEADS], rows)) if rows else ""
    notes = "".join(f"<p>Note: {escape(str(note))}</p>" for note in baseline.get("notes") or ())
    rests = rests_on(result, " · ".join(pairs_said(baseline)), ("warm-up",))
    return f"<p>{escape(ABOUT)}</p>{table}{notes}{_rests(rests)}"


def _time_chart(result: Mapping[str, Any], chart: TimeChart) -> str:
    table: _Table
    if chart.key == "load":
        timeline = result.get("timeline")
        table = timeline_rows(timeline) if timeline else ((), ())
    else:
        table = system_table((result.get("system") or {}).get("summary") or {}, chart.key)
    return _figure(
        chart.key, chart.heading, chart.about, chart.panels,
        legends=[legend_of(lines) for lines in chart.lines], rests=rests_on(result, _sampled(result, chart)),
        words=" ".join(panel.words for panel in chart.panels), table=table,
    )  # fmt: skip


def _sampled(result: Mapping[str, Any], chart: TimeChart) -> str:
    if chart.key == "load":
        period = (result.get("timeline") or {}).get("period")
        return f"counts of each {'second' if period == 1 else f'{number(period)} s'}" if period else ""
    series = (result.get("system") or {}).get("series") or {}
    part = series.get("server" if chart.key.endswith("server") else "system") or {}
    said = f"{len(part.get('t') or ()):,} samples, one in {number(series.get('period'))} s"
    dropped = part.get("dropped")
    return said + (f", {dropped:,} not kept" if dropped else "")


def _outcomes(result: Mapping[str, Any]) -> str:
    outcomes, load = result["outcomes"], result.get("load") or {}
    whole = sum(outcomes.values())

    heads = ["", "requests", "share of those that ended"]
    html = table_html("How requests ended", heads, outcome_rows(outcomes, whole))
    for caption, counts in (
        ("Refusals, by kind", (result.get("refusals") or {}).get("kinds")),
        ("Answers without a token, by reason", (result.get("no_token") or {}).get("reasons")),
        ("Objectives that were broken", (result.get("goodput") or {}).get("broken")),
    ):
        html += table_html(caption, heads, outcome_rows(counts, whole)) if counts else ""
    unsent = {name: load[name] for name in ("skipped", "dropped", "unsent") if load.get(name)}
    if unsent:
        rows: list[Row] = [(name, [f"{n:,}"]) for name, n in unsent.items()]
        html += table_html(f"Of {load.get('planned', 0):,} planned, never sent", ["", "requests"], rows)
    return scrolled_html("Outcomes", html) + _rests(rests_on(result, f"n {whole:,}"))


def _figure(
    key: str, heading: str, about: str, panels: Sequence[Panel], *,
    rests: Sequence[str], words: str, table: _Table, below: str = "",
    legend: Sequence[tuple[str, int | None, str]] = (),
    legends: Sequence[Sequence[tuple[str, int | None, str]]] = (),
) -> str:  # fmt: skip
    """What it is about, plots, caption and table. A legend is of all panels, or each has its own."""
    plots = "".join(
        f"<div class=panel><h3>{escape(panel.title)}</h3>{legend_html(legends[i]) if legends else ''}"
        f'<div class=plot id="{key}-{i}" role=img aria-label="{escape(panel.words)}"></div></div>'
        for i, panel in enumerate(panels)
    )
    heads, rows = table
    below = scrolled_html(heading, table_html(heading, heads, rows)) + below
    details = f"<details><summary>The same figures as a table</summary>{below}</details>" if rows else ""
    return (
        f"<p>{escape(about)}</p><figure>{legend_html(legend)}<div class=panels>{plots}</div>"
        f"<figcaption><p>{escape(words)}</p>{_rests(rests)}</figcaption></figure>{details}"
    )


def _rests(parts: Sequence[str]) -> str:
    return f"<p class=rests>{escape(' · '.join(parts))}</p>" if parts else ""

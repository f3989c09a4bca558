"""A replay as one page: the verdict first, then the figures, their distributions, and the run over time.

Takes the public JSON (`llmtap replay --json`); parts that are missing are left out. Every chart has a table
of its figures, and a caption that says what they rest on. Names in it were given by others: escaped for HTML,
and for plotly, which reads tags in texts, too.
"""

from collections.abc import Iterator, Mapping, Sequence
from html import escape
from typing import Any, Final

from llmtap.metrics.statistics import SAMPLES_MIN
from llmtap.report.baseline import ABOUT, HEADS, baseline_distributions, baseline_rows, pairs_said
from llmtap.report.distributions import Distribution, distributions_of, panels_of, table_of
from llmtap.report.figures import COLOURS, MARK, Panel
from llmtap.report.page import contents_html, page_html, table_html
from llmtap.report.replay_terms import RATES, all_of, heading_of, plan_rows, rests_on
from llmtap.report.sweep import number
from llmtap.report.system import system_warnings
from llmtap.report.terminal import milliseconds
from llmtap.report.time_charts import TimeChart, legend_of, system_table, time_charts_of, timeline_rows

__all__ = ["replay_html"]

_FEW: Final = (
    f"{MARK} p99 of fewer than {SAMPLES_MIN['p99']:,} samples, or p99.9 of fewer than"
    f" {SAMPLES_MIN['p999']:,} (IETF 5.1.4.3)"
)
_FIGURES: Final = {
    "mean": "mean", "p50": "p50", "p90": "p90", "p95": "p95", "p99": "p99", "p999": "p99.9", "max": "max",
}  # fmt: skip
_ROWS: Final = (
    ("TTFT", ("metrics", "ttft")), ("TTFT, from schedule", ("corrected", "ttft")),
    ("TTFT, any token", ("metrics", "ttft_any")), ("TTFT, reasoning", ("metrics", "ttft_reasoning")),
    ("TTFT, tool call", ("metrics", "ttft_tool_call")), ("TTFB", ("metrics", "ttfb")),
    ("TBC", ("metrics", "tbc")), ("ITL", ("metrics", "itl")), ("ITL, server", ("metrics", "itl_server")),
    ("TPOT", ("metrics", "tpot")), ("E2E", ("metrics", "e2e")),
    ("E2E, from schedule", ("corrected", "e2e")), ("user idle", ("metrics", "user_idle")),
    ("user idle, from schedule", ("corrected", "user_idle")), ("longest pause", ("metrics", "tbc_max")),
    ("jitter", ("metrics", "jitter")), ("dispatch lateness", ("dispatch_lateness",)),
)  # fmt: skip
_TILES: Final = (
    ("TTFT", ("metrics", "ttft")), ("ITL", ("metrics", "itl")), ("E2E", ("metrics", "e2e")),
    ("Dispatch lateness", ("dispatch_lateness",)),
)  # fmt: skip
_SHARES: Final = {
    "fluidity_index_doc": "fluidity index, document", "fluidity_index_code": "fluidity index, code",
    "qoe_area_step": "area ratio", "smooth_benefit": "smooth benefit, tokens",
}  # fmt: skip
_IN_MS: Final = frozenset({"clocks", "dispatch_lateness", "uncertainty"})
_IN_SHARES: Final = frozenset({"rate", "sender_cpu", "failed", "prompt_tokens"})
_DASH_ARRAYS: Final = {
    "solid": "", "dash": "7 4", "dot": "2 3", "dashdot": "7 3 2 3", "longdash": "11 4",
    "longdashdot": "11 3 2 3",
}  # fmt: skip
_WHOLE: Final = ("plan", "load", "lengths", "warmup", "sender")
_Table = tuple[Sequence[str], Sequence[tuple[str, Sequence[str]]]]


def replay_html(result: Mapping[str, Any]) -> str:
    """The page. Raises ConfigError where plotly is not installed."""
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
        return "<p>Nobody has judged whether these figures may be believed.</p>"
    said = "".join(
        f"<li>{escape(str(one['says']))}{escape(_limit(one))}</li>" for one in verdict.get("findings") or ()
    )
    if not verdict["valid"]:
        return f'<div class="verdict bad"><p><strong>Not valid.</strong></p><ul>{said}</ul></div>'
    if said:
        return f"<div class=verdict><p><strong>Valid.</strong> But mind:</p><ul>{said}</ul></div>"
    return (
        "<div class=verdict><p><strong>Valid.</strong> Nothing that is checked speaks against the"
        " figures: the load was sent as asked and on time, the sender had room, requests ended well."
        "</p></div>"
    )


def _limit(finding: Mapping[str, Any]) -> str:
    limit, what = finding.get("limit"), finding.get("what")
    if not isinstance(limit, int | float):
        return ""
    if what in _IN_MS:
        return f" (limit {milliseconds(limit)} ms)"
    return f" (limit {number(limit * 100)} %)" if what in _IN_SHARES else f" (limit {number(limit)})"


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
        planned = f"of {number(load['planned_rps'])} planned, {number(load['sent_share'] * 100)} % in time"
        yield "Requests sent", f"{number(load['offered_rps'])}/s", planned
    elif load.get("offered_rps") is not None:
        yield "Requests sent", f"{number(load['offered_rps'])}/s", f"{load.get('sent', 0):,} in all"
    for title, place in _TILES:
        figures = _at(result, place)
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
        met = f"{number(goodput['attainment'] * 100)} % of {goodput['counted']:,} met {goodput['objectives']}"
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
        f"<details><summary>All of it ({len(rows):,} values)</summary>{_terms(rows)}</details>"
        if rows
        else ""
    )
    rates = f"<p>{escape(RATES)}</p>" if result.get("load") else ""
    return _terms(plan_rows(result)) + rates + whole


def _terms(rows: Sequence[tuple[str, str]]) -> str:
    cells = "".join(
        f"<tr><th scope=row>{escape(term)}</th><td>{escape(text)}</td></tr>" for term, text in rows
    )
    return f"<table class=terms><tbody>{cells}</tbody></table>"


def _figures(result: Mapping[str, Any]) -> str:
    rows, marked = [], False
    for title, place in _ROWS:
        figures = _at(result, place)
        if figures.get("n"):
            option = figures.get("option")
            cells = [_cell(figures, name) for name in _FIGURES]
            marked |= any(cell.endswith(MARK) for cell in cells)
            rows.append((f"{title} (option {option})" if option else title, [f"{figures['n']:,}", *cells]))
    html = _scrolled("Figures", table_html("Latencies, ms", ["", "n", *_FIGURES.values()], rows))
    shares = []
    for name, title in _SHARES.items():
        figures = _at(result, ("metrics", name))
        if figures.get("n"):
            marks = figures.get("marks") or ()
            cells = [number(figures.get(f)) + (MARK if f in marks else "") for f in _FIGURES]
            shares.append((title, [f"{figures['n']:,}", *cells]))
    if shares:
        table = table_html("What readers had of the answers", ["", "n", *_FIGURES.values()], shares)
        html += _scrolled("What readers had of the answers", table)
    html += f"<p class=few>{_FEW}</p>" if marked else ""
    return html + _rests(rests_on(result, "", ("ITL", "tokens", "smooth goodput", "sender")))


def _cell(figures: Mapping[str, Any], name: str) -> str:
    text = milliseconds(figures.get(name))
    return text + (MARK if name in (figures.get("marks") or ()) and text != "-" else "")


def _distribution(result: Mapping[str, Any], distribution: Distribution, panels: Sequence[Panel]) -> str:
    keys = [(curve.name, curve.colour, curve.dash) for curve in distribution.curves]
    table = table_of(distribution)
    marked = any(cell.endswith(MARK) for _, cells in table[1] for cell in cells)
    samples = "; ".join(f"{curve.name}: n {curve.n:,}" for curve in distribution.curves)
    return _figure(
        distribution.key, distribution.heading, distribution.about, panels,
        legend=[*keys, *([(f"too few samples ({MARK})", None, "dot")] if marked else [])],
        rests=rests_on(result, samples, distribution.says), words=panels[0].words, table=table,
        below=f"<p class=few>{_FEW}</p>" if marked else "",
    )  # fmt: skip


def _baseline(result: Mapping[str, Any]) -> str:
    baseline = result["baseline"]
    rows = baseline_rows(baseline)
    table = _scrolled("Then and now", table_html("Then and now, ms", ["", *HEADS], rows)) if rows else ""
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

    def rows_of(counts: Mapping[str, int]) -> list[tuple[str, list[str]]]:
        return [
            (name, [f"{n:,}", f"{number(n / whole * 100)} %" if whole else "-"]) for name, n in counts.items()
        ]

    heads = ["", "requests", "share of those that ended"]
    html = table_html("How requests ended", heads, rows_of(outcomes))
    for caption, counts in (
        ("Refusals, by kind", (result.get("refusals") or {}).get("kinds")),
        ("Answers without a token, by reason", (result.get("no_token") or {}).get("reasons")),
        ("Objectives that were broken", (result.get("goodput") or {}).get("broken")),
    ):
        html += table_html(caption, heads, rows_of(counts)) if counts else ""
    unsent = {name: load[name] for name in ("skipped", "dropped", "unsent") if load.get(name)}
    if unsent:
        rows = [(name, [f"{n:,}"]) for name, n in unsent.items()]
        html += table_html(f"Of {load.get('planned', 0):,} planned, never sent", ["", "requests"], rows)
    return _scrolled("Outcomes", html) + _rests(rests_on(result, f"n {whole:,}"))


def _figure(
    key: str, heading: str, about: str, panels: Sequence[Panel], *,
    rests: Sequence[str], words: str, table: _Table, below: str = "",
    legend: Sequence[tuple[str, int | None, str]] = (),
    legends: Sequence[Sequence[tuple[str, int | None, str]]] = (),
) -> str:  # fmt: skip
    """What it is about, plots, caption and table. A legend is of all panels, or each has its own."""
    plots = "".join(
        f"<div class=panel><h3>{escape(panel.title)}</h3>{_legend(legends[i]) if legends else ''}"
        f'<div class=plot id="{key}-{i}" role=img aria-label="{escape(panel.words)}"></div></div>'
        for i, panel in enumerate(panels)
    )
    heads, rows = table
    below = _scrolled(heading, table_html(heading, heads, rows)) + below
    details = f"<details><summary>The same figures as a table</summary>{below}</details>" if rows else ""
    return (
        f"<p>{escape(about)}</p><figure>{_legend(legend)}<div class=panels>{plots}</div>"
        f"<figcaption><p>{escape(words)}</p>{_rests(rests)}</figcaption></figure>{details}"
    )


def _legend(keys: Sequence[tuple[str, int | None, str]]) -> str:
    shown = "".join(f"<span>{_key(colour, dash)}{escape(name)}</span>" for name, colour, dash in keys)
    return f"<div class=legend aria-hidden=true>{shown}</div>" if shown else ""


def _key(colour: int | None, dash: str) -> str:
    stroke = "soft" if colour is None else f"c{colour}"
    return (
        '<svg class=key width=40 height=14 viewBox="0 0 40 14" aria-hidden=true><path d="M0 7h40"'
        f' style="stroke:var(--{stroke})" stroke-width=2 stroke-dasharray="{_DASH_ARRAYS[dash]}"/></svg>'
    )


def _rests(parts: Sequence[str]) -> str:
    return f"<p class=rests>{escape(' · '.join(parts))}</p>" if parts else ""


def _scrolled(name: str, html: str) -> str:
    return f'<div class="scroll wide" tabindex=0 role=region aria-label="{escape(name)}, table">{html}</div>'


def _at(result: Mapping[str, Any], place: Sequence[str]) -> Mapping[str, Any]:
    at: Any = result
    for name in place:
        at = at.get(name) if isinstance(at, Mapping) else None
    return at if isinstance(at, Mapping) else {}

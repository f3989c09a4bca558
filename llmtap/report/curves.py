"""A sweep of simulated runs as one page: curves, heat maps and tables, with all that makes them believable.

Every chart has a table of the same figures, and a caption that says what they rest on. Names of
schedulers and files are users' text: escaped for HTML, and for plotly, which reads tags in texts, too.

Source: seed 001, Fig. 5 (throughput, TTFT, TBT and TPOT by request rate; goodput beside smooth goodput); seed
004, sections 7 and 9.
"""

from collections.abc import Sequence
from html import escape
from typing import Final

from llmtap.metrics.statistics import SAMPLES_MIN
from llmtap.report.captions import NOT_MEASURED, Defaults, options_rows, rests_on, settings_rows
from llmtap.report.figures import (
    MARK,
    OFFERED,
    Chart,
    Look,
    Panel,
    Quantity,
    charts_of,
    looks_of,
    value_text,
)
from llmtap.report.heat_maps import heat_maps_of
from llmtap.report.page import DASH_ARRAYS, contents_html, page_html, script_json, table_html
from llmtap.report.sweep import Result, Sweep, number, read_sweep, values_text

__all__ = ["sweep_html"]

_FEW: Final = f"{MARK} p99 of fewer than {SAMPLES_MIN['p99']:,} samples (IETF 5.1.4.3); hollow in curves."
_LINES_SHOWN: Final = 16
"""As many lines as one can tell apart; of more, the page begins with a choice."""
_SHAPES: Final = {
    "circle": '<circle cx="20" cy="7" r="4.5"/>',
    "square": '<path d="M16 3h8v8h-8z"/>',
    "diamond": '<path d="M20 1.5 25.5 7 20 12.5 14.5 7z"/>',
    "triangle-up": '<path d="M20 1.5 25.5 11.5h-11z"/>',
    "cross": '<path d="M18 2h4v3h3v4h-3v3h-4v-3h-3v-4h3z"/>',
    "x": '<path d="m17 2 3 3 3-3 2.5 2.5L22.5 7.5l3 3L23 13l-3-3-3 3-2.5-2.5 3-3-3-3z"/>',
}
_OFFERED_KEY: Final = (
    '<svg class=key width=40 height=14 viewBox="0 0 40 14" aria-hidden=true>'
    '<path d="M0 7h40" stroke="var(--soft)" stroke-dasharray="2 3"/></svg>'
)


def sweep_html(
    results: Sequence[Result], title: str = "Simulated sweep", *, defaults: Defaults | None = None
) -> str:
    """The page. `results` are runs as public JSON; with `defaults` it says which options are not at theirs.

    Raises ValueError where there are no results.
    """
    sweep = read_sweep(results)
    curves, grids = list(charts_of(sweep)), list(heat_maps_of(sweep, results))
    looks = looks_of(sweep)
    sections = []
    for chart, panels in curves:
        legend = _legend(sweep, panels)
        sections.append(_section(chart, panels, legend, _curve_table(sweep, chart), results, defaults))
    for chart, panels in grids:
        sections.append(_section(chart, panels, "", _grid_tables(sweep, chart, panels), results, defaults))
    plots = {
        _plot_id(chart, i): {"data": panel.data, "layout": panel.layout}
        for chart, panels in (*curves, *grids)
        for i, panel in enumerate(panels)
    }
    lines = [{"of": line.of, "colour": look.colour} for line, look in zip(sweep.lines, looks, strict=True)]
    return page_html(
        title,
        summary=_summary(sweep, results),
        settings=_settings(results, defaults),
        contents=contents_html({chart.key: chart.heading for chart, _ in (*curves, *grids)}),
        controls=_controls(sweep),
        sections=sections,
        symbols="".join(_symbol(i, look) for i, look in enumerate(looks)),
        plots=plots,
        lines=lines,
    )


def _plot_id(chart: Chart, i: int) -> str:
    return f"{chart.key}-{i}"


def _summary(sweep: Sweep, results: Sequence[Result]) -> str:
    n = len(results)
    said = [f"{n:,} run{'' if n == 1 else 's'}"]
    if sweep.axis is not None:
        said.append(f"along {escape(sweep.axis.title)} ({len(sweep.axis.texts):,} values)")
    if len(sweep.lines) > 1:
        said.append(f"{len(sweep.lines):,} lines by {escape(', '.join(d.name for d in sweep.by))}")
    if sweep.along:
        said.append(f"{escape(', '.join(d.name for d in sweep.along))} change along the axis")
    return f"<p><strong>{escape(NOT_MEASURED)}</strong> {'; '.join(said)}.</p>"


def _settings(results: Sequence[Result], defaults: Defaults | None) -> str:
    rows = "".join(
        f"<tr><th scope=row>{escape(term)}</th><td>{escape(text)}</td></tr>"
        for term, text in settings_rows(results, defaults)
    )
    options = options_rows(results, defaults)
    table = f"<table class=terms><tbody>{rows}</tbody></table>"
    if not options:
        return table
    cells = "".join(
        f"<tr{' class=set' if row.changed else ''}><th scope=row>{escape(row.name)}</th>"
        f"<td>{escape(row.values)}</td><td>{escape(row.default)}</td></tr>"
        for row in options
    )
    return (
        f"{table}<details><summary>All {len(options)} options</summary>"
        "<table class=terms><thead><tr><th scope=col>option</th><th scope=col>value</th>"
        f"<th scope=col>default</th></tr></thead><tbody>{cells}</tbody></table></details>"
    )


def _controls(sweep: Sweep) -> str:
    """A box to tick for each line, and a choice for each of several dimensions."""
    if len(sweep.lines) < 2:
        return ""
    boxes = "".join(
        f'<label data-box={i}><input type=checkbox id="line-{i}" checked>{_key(i)}'
        f"<span>{escape(line.label)}</span></label>"
        for i, line in enumerate(sweep.lines)
    )
    return (
        f"<fieldset id=controls><legend>Lines</legend>{_choices(sweep)}<div class=lines>{boxes}</div>"
        "<p id=shown aria-live=polite></p></fieldset>"
    )


def _choices(sweep: Sweep) -> str:
    if len(sweep.by) < 2:
        return ""
    left, chosen = len(sweep.lines), {}
    for d in reversed(sweep.by[1:]):
        if left > _LINES_SHOWN:
            chosen[d.name] = list(d.texts.values())[-1]
            left = -(-left // len(d.texts))
    choices = []
    for d in sweep.by:
        options = "".join(
            f'<option value="{escape(text)}"{" selected" if chosen.get(d.name) == text else ""}>'
            f"{escape(text)}</option>"
            for text in d.texts.values()
        )
        choices.append(
            f'<label>{escape(d.title)} <select data-dimension="{escape(d.name)}">'
            f'<option value="">all</option>{options}</select></label>'
        )
    return f"<div class=choices>{''.join(choices)}</div>"


def _symbol(i: int, look: Look) -> str:
    dashes = DASH_ARRAYS[look.dash]
    return (
        f'<symbol id="key-{i}" viewBox="0 0 40 14"><g style="stroke:var(--c{look.colour});'
        f'fill:var(--c{look.colour})"><path d="M0 7h40" stroke-width="2" stroke-dasharray="{dashes}"/>'
        f"<g stroke=none>{_SHAPES[look.symbol]}</g></g></symbol>"
    )


def _key(i: int) -> str:
    return f'<svg class=key width=40 height=14 aria-hidden=true><use href="#key-{i}"/></svg>'


def _legend(sweep: Sweep, panels: list[Panel]) -> str:
    """For each chart, so that it can be read alone; a click is one on the line's box."""
    keys = [
        f'<label for="line-{i}" data-line={i}>{_key(i)}<span>{escape(line.label)}</span></label>'
        for i, line in enumerate(sweep.lines)
        if len(sweep.lines) > 1
    ]
    if any(one["name"] == OFFERED for panel in panels for one in panel.data):
        keys.append(f"<span class=offered>{_OFFERED_KEY}<span>{OFFERED}</span></span>")
    return f"<div class=legend aria-hidden=true>{''.join(keys)}</div>" if keys else ""


def _section(
    chart: Chart, panels: list[Panel], legend: str, tables: str, results: Sequence[Result],
    defaults: Defaults | None,
) -> str:  # fmt: skip
    heading = escape(chart.heading)
    plots = "".join(
        f'<div class=panel data-of="{escape(script_json(panel.of))}"><h3>{escape(panel.title)}</h3>'
        f'<div class=plot id="{_plot_id(chart, i)}" role=img aria-label="{escape(panel.words)}"></div></div>'
        for i, panel in enumerate(panels)
    )
    words = " ".join(panel.words for panel in panels)
    rests = rests_on(results, _samples(chart.quantities, results), chart.says, defaults)
    about = f"<p>{escape(chart.about)}</p>" if chart.about else ""
    return (
        f'<section id="{chart.key}"><h2>{heading}</h2>{about}<figure>{legend}<div class=panels>{plots}</div>'
        f"<figcaption><p>{escape(words)}</p><p class=rests>{escape(' · '.join(rests))}</p></figcaption>"
        "</figure><details><summary>The same figures as a table</summary>"
        f'<div class=scroll tabindex=0 role=region aria-label="{heading}, table">{tables}</div></details>'
        "</section>"
    )


def _samples(quantities: Sequence[Quantity], results: Sequence[Result]) -> str:
    """Said once where all rest on the same samples."""
    by_text: dict[str, list[str]] = {}
    for q in quantities:
        text = values_text(q.n(result) for result in results if q.of(result) is not None)
        by_text.setdefault(text, []).append(q.name)
    if len(by_text) == 1:
        return f"n {next(iter(by_text))}"
    return "n " + "; ".join(f"{text} ({', '.join(names)})" for text, names in by_text.items())


def _curve_table(sweep: Sweep, chart: Chart) -> str:
    """A row for each run: what it rests on before what it is."""
    columns = []
    samples = list(dict.fromkeys(q.samples for q in chart.quantities))
    for q in chart.quantities:
        if q.samples in samples:
            samples.remove(q.samples)
            columns.append((f"n of {q.name}", q, True))
        columns.append((q.title, q, False))
    heads = ["line"] if sweep.axis is None else ["line", sweep.axis.title]
    heads += [head for head, _, _ in columns] + [d.title for d in sweep.along]
    rows, marked = [], False
    for line in sweep.lines:
        # A level line is one run.
        for place, result in line.points[: 1 if line.level else None]:
            if all(q.of(result) is None for q in chart.quantities):
                continue
            cells = [] if sweep.axis is None else ["any" if line.level else number(place)]
            for _, q, counts in columns:
                if counts:
                    cells.append(_count(q.n(result)))
                else:
                    doubt = q.of(result) is not None and q.doubtful(result)
                    marked |= doubt
                    cells.append(value_text(q, q.of(result), unit=False) + (MARK if doubt else ""))
            cells += [d.text_at(result) or "-" for d in sweep.along]
            rows.append((line.label, cells))
    return table_html(chart.heading, heads, rows) + (f"<p>{_FEW}</p>" if marked else "")


def _count(n: int | None) -> str:
    return "-" if n is None else f"{n:,}"


def _grid_tables(sweep: Sweep, chart: Chart, panels: list[Panel]) -> str:
    assert sweep.grid is not None
    across, up = sweep.grid
    (quantity,) = chart.quantities
    tables = []
    for panel in panels:
        (data,) = panel.data
        rows = [
            (y, [
                value_text(quantity, z, unit=False) + (MARK if text.endswith(MARK) else "")
                for z, text in zip(values, texts, strict=True)
            ])
            for y, values, texts in zip(data["y"], data["z"], data["text"], strict=True)
        ]  # fmt: skip
        tables.append(table_html(panel.title, [f"{up.name} \\ {across.name}", *data["x"]], rows))
    marked = any(text.endswith(MARK) for panel in panels for row in panel.data[0]["text"] for text in row)
    return "".join(tables) + (f"<p>{_FEW}</p>" if marked else "")

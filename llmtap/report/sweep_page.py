"""Turn the JSON of simulated runs into an HTML page: curves, a table, and the basis of their figures.

`llmtap sim run --html` calls `sweep_html`; `sweep.py` finds the axis, the lines and the table. A chart has a
panel for each quantity, and in it one curve for each line of the sweep. Quantities that no run has are left
out. Lines differ by colour, dash and marker.

Source: smooth goodput paper, Fig. 5 (throughput, TTFT, TBT and TPOT by request rate; goodput and smooth
goodput); multi-bin paper, sections 7 and 9.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Final

from llmtap.report.document import (
    DASHES,
    SYMBOLS,
    Axis,
    Block,
    DetailsBlock,
    FigureBlock,
    LegendKey,
    LineChoice,
    Look,
    Note,
    Panel,
    Plot,
    PlotSeries,
    ReportDocument,
    Section,
    Table,
    TermTable,
    colour_name,
    is_wide,
)
from llmtap.report.render import page_html
from llmtap.report.sweep import (
    Dimension,
    Line,
    Result,
    Sweep,
    best_runs_text,
    caution_texts,
    followed_figures,
    followed_requests,
    model_text,
    read_sweep,
    reader_text,
    sweep_table,
    unreliable_texts,
)
from llmtap.report.sweep_figures import SweepFigure
from llmtap.report.values import at, count_with_noun, number, option_text, values_text

NOT_MEASURED: Final = "Simulated in virtual time by a latency model; no GPU was measured."
_SLA: Final = frozenset({"request_sla_violation", "token_sla_violation"})
"""Figures that are shown only on request (`sla` of `sweep_html`)."""
_LINES_SHOWN: Final = 16
"""Number of lines that a reader can distinguish. If a sweep has more, its page first shows some of them."""
_OFFERED: Final = LegendKey("offered load", Look("soft", "dot"))


@dataclass(frozen=True, slots=True)
class Quantity:
    """A figure of a run that a panel shows, with its path in the JSON."""

    name: str
    unit: str
    path: tuple[str, ...]
    samples_path: tuple[str, ...] = ("n",)
    """Path of the number of samples of the figure."""
    shows_offered_load: bool = False
    """Whether to draw the offered load as an additional curve."""

    def value_of(self, result: Result) -> float | None:
        value = at(result, *self.path)
        return value if isinstance(value, int | float) else None

    def sample_count(self, result: Result) -> int | None:
        value = at(result, *self.samples_path)
        return value if isinstance(value, int) else None

    def is_doubtful(self, result: Result) -> bool:
        """Return whether a run has too few samples for this percentile."""
        return self.path[-1] in (at(result, *self.path[:-1], "marks") or ())

    @property
    def title(self) -> str:
        return f"{self.name}, {self.unit}" if self.unit else self.name

    def value_text(self, value: float | None) -> str:
        """Return a value with its unit. Times below 0.1 s are shown in ms, shares in percent."""
        if value is None:
            return "-"
        if self.unit == "share":
            return f"{number(value * 100)} %"
        if self.unit == "s" and 0 < abs(value) < 0.1:
            return f"{number(value * 1e3)} ms"
        return f"{number(value)} {self.unit}".rstrip()


@dataclass(frozen=True, slots=True)
class SweepChart:
    """A section of the page with a panel for each quantity. `about`: note below the heading."""

    key: str
    """Id of the section on a page, for links."""
    heading: str
    about: str
    quantities: tuple[Quantity, ...]


def _time_quantities(title: str, metric: str, *shares: str) -> tuple[Quantity, ...]:
    place = (metric,) if metric == "queueing" else ("metrics", metric)
    return tuple(Quantity(f"{title} {share}", "s", (*place, share), (*place, "n")) for share in shares)


_CHARTS: Final = (
    SweepChart(
        "throughput",
        "Throughput",
        "What was completed in a second.",
        (
            Quantity("Completed requests", "req/s", ("throughput_rps",), shows_offered_load=True),
            Quantity("Tokens", "tokens/s", ("throughput_tps",)),
        ),
    ),
    SweepChart(
        "goodput",
        "Goodput and smooth goodput",
        "Goodput counts requests that met every objective, and nothing of the others. Smooth goodput is"
        " the sum of every answer's benefit: its tokens, less what its reader waited.",
        (
            Quantity("Goodput", "req/s", ("goodput", "requests_per_second"), ("goodput", "counted"), True),
            Quantity(
                "Smooth goodput", "tokens/s", ("smooth_goodput", "tokens_per_second"), ("smooth_goodput", "n")
            ),
        ),
    ),
    SweepChart("first-token", "Time to first token", "", _time_quantities("TTFT", "ttft", "p50", "p99")),
    SweepChart(
        "between-tokens",
        "Time between tokens",
        "ITL is each time between two tokens of an answer, TPOT an answer's mean.",
        (*_time_quantities("ITL", "itl", "p99"), *_time_quantities("TPOT", "tpot", "p50", "p99")),
    ),
    SweepChart(
        "user-idle",
        "User idle latency",
        "How long a reader waits with nothing to read.",
        (
            *_time_quantities("User idle", "user_idle", "p50", "p99"),
            *_time_quantities("User idle, d_i = V i,", "user_idle_eq4", "p99"),
        ),
    ),
    SweepChart(
        "end-to-end",
        "End to end latency",
        "From arrival to completion, of completed requests.",
        _time_quantities("E2E", "e2e", "p50", "p99"),
    ),
    SweepChart(
        "violations",
        "Requests outside their bounds",
        "",
        (
            Quantity("Outside the request SLA", "share", ("request_sla_violation",)),
            Quantity("Outside the token SLA", "share", ("token_sla_violation",)),
            Quantity("SLO attainment", "share", ("goodput", "attainment"), ("goodput", "counted")),
        ),
    ),
    SweepChart(
        "use",
        "Utilisation and batches",
        "Share of time that servers were busy; requests in a batch, on average.",
        (
            Quantity("Utilisation", "share", ("utilization",)),
            Quantity("Batch size, mean", "", ("batch_mean",), ("batches",)),
        ),
    ),
    SweepChart(
        "queueing",
        "Queueing",
        "From arrival until a server took the request up.",
        _time_quantities("Queueing", "queueing", "p50", "p99"),
    ),
    SweepChart(
        "memory",
        "Memory",
        "Requests thrown out of a full KV memory; blocks of prompts found in it.",
        (
            Quantity("Preempted requests", "share", ("engine", "preempted_share")),
            Quantity("Prefix hits", "share", ("engine", "prefix_hit_rate"), ("engine", "prefix_queries")),
        ),
    ),
    SweepChart(
        "capacity",
        "Capacity",
        "The highest rate at which no more than the allowed share of requests is late.",
        (Quantity("Capacity", "req/s", ("capacity", "rps")),),
    ),
)


def sweep_html(
    results: Sequence[Result],
    title: str = "Simulated sweep",
    *,
    sla: bool = False,
    figure: SweepFigure | None = None,
) -> str:
    """Return the HTML page of a sweep. `results`: runs as public JSON.

    `sla`: whether to add the shares of requests outside their SLA. `figure`: figure to show before the
    charts. Raises ValueError if there are no results.
    """
    sweep = read_sweep(results)
    lines = _line_choices(sweep)
    sections = [] if figure is None else [figure.section(results)]
    for chart in _CHARTS:
        quantities = [
            q
            for q in chart.quantities
            if any(q.value_of(result) is not None for result in results) and (sla or q.path[-1] not in _SLA)
        ]
        if not quantities:
            continue
        panels = [_curves_panel(sweep, lines, quantity) for quantity in quantities]
        offered = any(one.line is None for panel in panels for one in panel.plot.series)
        block = FigureBlock(
            chart.key,
            chart.heading,
            panels,
            [],
            [_samples_text(quantities, results)],
            [_OFFERED] if offered else [],
            lines_legend=True,
        )
        about: list[Block] = [Note(chart.about)] if chart.about else []
        sections.append(Section(chart.key, chart.heading, [*about, block]))
    if followed := followed_requests(results):
        sections.append(_followed_section(sweep, followed))
    page = ReportDocument(
        title,
        _summary_blocks(sweep, results, sla=sla),
        _settings_blocks(results, sla=sla),
        sections,
        settings_linked=False,
        lines=lines,
        choices=_menus(sweep),
    )
    return page_html(page)


def _followed_section(sweep: Sweep, followed: Sequence[tuple[str, Result]]) -> Section:
    """Return charts of the followed request, by run: the times of its tokens, and the gaps between them."""
    lines = {id(result): i for i, line in enumerate(sweep.lines) for _, result in line.points}
    counts, gaps = [], []
    for label, result in followed:
        times, i = result["followed"]["token_seconds"], lines.get(id(result))
        look: dict[str, Any] = {"name": label, "line": i, "ink": "soft" if i is None else colour_name(i)}
        counts.append(PlotSeries(x=times, y=list(range(1, len(times) + 1)), **look))
        gaps.append(
            PlotSeries(x=list(range(2, len(times) + 1)), y=[b - a for a, b in pairwise(times)], **look)
        )
    figures = {label: followed_figures(result["followed"]) for label, result in followed}
    words = [
        f"{title}: {', '.join(f'{label} {one[name]} ms' for label, one in figures.items())}."
        for title, name in (("Last token", "E2E"), ("Longest gap", "longest gap"))
    ]
    seconds, tokens = (Axis(text, zero=True) for text in ("s after arrival", "token"))
    axis = Axis(zero=True)
    panels = [
        Panel("Tokens generated", words[0], Plot(counts, seconds, axis, "token {y} at {x} s")),
        Panel("Gap before a token, s", words[1], Plot(gaps, tokens, axis, "{y} s before token {x}")),
    ]
    one = followed[0][1]["followed"]
    basis = f"row {one['row']}, {one['input']:,} input and {one['output']:,} output tokens; times in ms"
    rows = [[label, *row.values()] for label, row in figures.items()]
    table = Table(["run", *next(iter(figures.values()))], rows, "One request")
    return Section(
        "followed",
        "One request",
        [FigureBlock("followed", "One request", panels, [table], [basis], lines_legend=True)],
    )


def _summary_blocks(sweep: Sweep, results: Sequence[Result], *, sla: bool) -> list[Block]:
    parts = [count_with_noun(len(results), "run")]
    if sweep.axis is not None:
        parts.append(f"along {sweep.axis.title} ({len(sweep.axis.texts):,} values)")
    if len(sweep.lines) > 1:
        parts.append(f"{len(sweep.lines):,} lines by {', '.join(d.name for d in sweep.line_dimensions)}")
    blocks: list[Block] = [Note(f"{'; '.join(parts)}.", lead=NOT_MEASURED)]
    blocks += [Note(text, "yellow") for text in caution_texts(results)]
    if best := best_runs_text(results, sla=sla):
        blocks.append(Note(best, css="lead"))
    blocks += [Note(text.capitalize()) for text in dict.fromkeys(unreliable_texts(results))]
    table = replace(sweep_table(results, sla=sla), label="All runs")
    return [*blocks, table, Note("Times in ms.")]


def _settings_blocks(results: Sequence[Result], *, sla: bool) -> list[Block]:
    """Return the settings of the runs, with the options that at least one of their schedulers reads."""
    sources = [source for r in results for source in at(r, "tokens", "source") or ()]
    rows = {
        "scheduler": values_text((r.get("scheduler") for r in results), limit=99),
        "trace": values_text((r.get("trace") for r in results), limit=99),
        "requests": _values_text(results, "n"),
        "load": _values_text(results, "load", "offered_rps", before="open loop, offered ", after=" req/s"),
        "window": _values_text(results, "window", "name"),
        "duration": _values_text(results, "window", "seconds", after=" s"),
        "servers": _values_text(results, "servers"),
        "seed": _values_text(results, "seed"),
        "model": _joined_alternatives(map(model_text, results)),
        "ITL": _values_text(results, "metrics", "itl", "option", before="option "),
        "tokens": f"counted by {values_text(sources)}" if sources else "",
        "smooth goodput": _joined_alternatives(map(reader_text, results)),
        "user idle": _joined_alternatives(at(r, "smooth_goodput", "idle") for r in results),
        "objectives": _joined_alternatives(at(r, "goodput", "objectives") for r in results),
        "request SLA": _values_text(results, "readings", "request_sla", after=" s") if sla else "",
        "token SLA": _values_text(results, "readings", "token_sla", after=" s") if sla else "",
        "capacity": _values_text(results, "capacity", "allowed", before="share of late requests at most "),
        "uncertainty": _values_text(results, "uncertainty", after=" s"),
    }
    blocks: list[Block] = [TermTable([(name, text) for name, text in rows.items() if text])]
    options = []
    for group in ("readings", "serving"):
        for name in dict.fromkeys(name for r in results for name in r.get(group) or {}):
            values = [value for r in results if (value := at(r, group, name)) is not None]
            if text := ", ".join(dict.fromkeys(option_text(name, value) for value in values)):
                options.append((name, text))
    if options:
        blocks.append(DetailsBlock(f"All {len(options)} options", [TermTable(options, ("option", "value"))]))
    return blocks


def _values_text(results: Iterable[Result], *path: str, before: str = "", after: str = "") -> str:
    """Return the runs' values at a path, between `before` and `after`; empty if no run has a value."""
    values = (at(r, *path) for r in results)
    text = values_text(float(f"{v:.4g}") if isinstance(v, float) else v for v in values)
    return f"{before}{text}{after}" if text else ""


def _joined_alternatives(texts: Iterable[str | None]) -> str:
    return "; or ".join(dict.fromkeys(text for text in texts if text))


def _samples_text(quantities: Sequence[Quantity], results: Sequence[Result]) -> str:
    by_text: dict[str, list[str]] = {}
    for q in quantities:
        text = values_text(q.sample_count(result) for result in results if q.value_of(result) is not None)
        by_text.setdefault(text, []).append(q.name)
    if len(by_text) == 1:
        return f"n {next(iter(by_text))}"
    return "n " + "; ".join(f"{text} ({', '.join(names)})" for text, names in by_text.items())


def _menus(sweep: Sweep) -> list[tuple[str, str, list[tuple[str, bool]]]]:
    """Return a menu for each dimension of the lines, or no menu if the lines have only one dimension.

    A menu has a title, the name of the dimension, and its values, each with whether it is selected at first.
    Values are selected at first only if there are more lines than _LINES_SHOWN.
    """
    if len(sweep.line_dimensions) < 2:
        return []
    remaining, chosen = len(sweep.lines), {}
    for d in reversed(sweep.line_dimensions[1:]):
        if remaining > _LINES_SHOWN:
            chosen[d.name] = list(d.texts.values())[-1]
            remaining = -(-remaining // len(d.texts))
    return [
        (d.title, d.name, [(text, chosen.get(d.name) == text) for text in d.texts.values()])
        for d in sweep.line_dimensions
    ]


def _line_choices(sweep: Sweep) -> list[LineChoice]:
    """Return the lines with their styles, which differ in colour and also in dash and symbol."""
    looks = []
    for i, line in enumerate(sweep.lines):
        symbol = SYMBOLS[(i + i // len(DASHES)) % len(SYMBOLS)]
        looks.append(
            LineChoice(line.label, line.settings, Look(colour_name(i), DASHES[i % len(DASHES)], symbol))
        )
    return looks


def _curves_panel(sweep: Sweep, looks: Sequence[LineChoice], quantity: Quantity) -> Panel:
    """Return the chart of one quantity with the curve of each line of the sweep."""
    series = []
    points: list[tuple[float, Line, Any]] = []
    for i, (line, choice) in enumerate(zip(sweep.lines, looks, strict=True)):
        values, look = [quantity.value_of(result) for _, result in line.points], choice.look
        if all(value is None for value in values):
            continue
        points += [(v, line, x) for v, (x, _) in zip(values, line.points, strict=True) if v is not None]
        shape: dict[str, Any] = {"bars": True, "x": [line.label] * len(values)}
        if sweep.axis is not None:
            symbols = [
                look.symbol + "-open" * (quantity.is_doubtful(result) or bool(at(result, "fit", "caution")))
                for _, result in line.points
            ]
            shape = {"dash": look.dash, "symbols": symbols, "x": [x for x, _ in line.points]}
        texts = [_hover_text(sweep, quantity, line, x, result) for x, result in line.points]
        series.append(PlotSeries(name=line.label, line=i, ink=look.ink, y=values, texts=texts, **shape))
    places = sorted({x for _, _, x in points})
    low, high = min(points, key=lambda one: one[0]), max(points, key=lambda one: one[0])
    title = quantity.title
    share = quantity.unit == "share"
    y_axis = Axis(zero=True, share=share)
    if (
        quantity.shows_offered_load
        and sweep.axis is not None
        and sweep.axis.name == "load"
        and len(places) > 1
    ):
        look = _OFFERED.look
        series.append(
            PlotSeries(name=_OFFERED.name, ink=look.ink, dash=look.dash, x=places, y=places, silent=True)
        )
        # Scale the axis to the completed rate, not to the offered rate, which can be far higher: it would
        # make the curves of the completed rate flat.
        y_axis = Axis(range=(0, high[0] * 1.1 or 1))
    elif quantity.unit == "s" and sweep.axis is not None and is_wide([v for v, _, _ in points]):
        y_axis = Axis(kind="log")
        title += " (log)"
    words = f"{quantity.name}: {_point_text(sweep, quantity, low)} to {_point_text(sweep, quantity, high)}."
    if low[0] == high[0]:
        words = f"{quantity.name}: {quantity.value_text(low[0])}{' throughout' if len(points) > 1 else ''}."
    return Panel(title, words, Plot(series, _x_axis(sweep, places), y_axis), common_settings={})


def _place_text(axis: Dimension, place: Any) -> str:
    if axis.name == "load":
        return f"{number(place, 3)} req/s offered"
    return axis.texts.get(place, number(place))


def _point_text(sweep: Sweep, quantity: Quantity, point: tuple[float, Line, Any]) -> str:
    value, line, x = point
    place = [] if sweep.axis is None else [_place_text(sweep.axis, x)]
    label = [line.label] if len(sweep.lines) > 1 else []
    return f"{quantity.value_text(value)} ({', '.join([*label, *place]) or line.label})"


def _hover_text(sweep: Sweep, quantity: Quantity, line: Line, x: Any, result: Result) -> str:
    n = quantity.sample_count(result)
    rows = [
        line.label,
        "" if sweep.axis is None else _place_text(sweep.axis, x),
        f"{quantity.name} {quantity.value_text(quantity.value_of(result))}",
        "" if n is None else f"n {n:,}" + " (too few)" * quantity.is_doubtful(result),
    ]
    return "\n".join(row for row in rows if row)


def _x_axis(sweep: Sweep, places: list[Any]) -> Axis:
    if sweep.axis is None:
        return Axis(kind="category")
    title = sweep.axis.title
    return Axis(f"{title} (log)", "log") if is_wide(places) else Axis(title, zero=True)

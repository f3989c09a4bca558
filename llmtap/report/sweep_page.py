"""Turn the JSON of simulated runs into an HTML page: curves, tables, and the basis of their figures.

`llmtap sim run --html` calls `sweep_html`; `sweep.py` finds the axis, the lines and the table. A chart has a
panel for each quantity, and in it one curve for each line of the sweep. Quantities that no run has are left
out. Lines differ by colour, dash and marker. Names of schedulers and files are users' text: escaped for
plotly, which reads tags.

Source: smooth goodput paper, Fig. 5 (throughput, TTFT, TBT and TPOT by request rate; goodput beside smooth
goodput); multi-bin paper, sections 7 and 9.

Long because the charts, their tables and the settings are one page.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from html import escape
from itertools import pairwise
from math import log
from typing import Any, Final

from llmtap.report.document import (
    COLOURS,
    DASHES,
    SYMBOLS,
    Block,
    DetailsBlock,
    FigureBlock,
    LineChoice,
    Note,
    Panel,
    ReportDocument,
    Section,
    Table,
    TermTable,
    is_wide,
)
from llmtap.report.render import page_html
from llmtap.report.sweep import (
    Dimension,
    Line,
    Result,
    Sweep,
    best_said,
    followed_figures,
    followed_requests,
    read_sweep,
    sweep_table,
    unreliable_said,
)  # fmt: skip
from llmtap.report.values import FEW, MARK, at, counted, number, option_text, values_text

Defaults = Mapping[str, Mapping[str, Mapping[str, Any]]]
"""By scheduler: options as public JSON by their group, `readings` and `serving`, as they are by default."""
NOT_MEASURED: Final = "Simulated in virtual time by a latency model; no GPU was measured."
_SLA: Final = frozenset({"request_sla_violation", "token_sla_violation"})
_FEW: Final = f"{FEW}; hollow in curves."
_LINES_SHOWN: Final = 16
"""As many lines as a reader can tell apart; of more, the page begins with a choice."""
_TICKS_MAX: Final = 8
"""Of labels that fit beside each other on a phone."""
_OFFERED: Final = "offered load"
_MODES: Final = {"open": "open loop", "closed": "closed loop"}


@dataclass(frozen=True, slots=True)
class Quantity:
    """A figure of a run, by where it stands in the JSON."""

    name: str
    unit: str
    path: tuple[str, ...]
    samples: tuple[str, ...] = ("n",)
    offered: bool = False

    def of(self, result: Result) -> float | None:
        value = at(result, *self.path)
        return value if isinstance(value, int | float) else None

    def n(self, result: Result) -> int | None:
        value = at(result, *self.samples)
        return value if isinstance(value, int) else None

    def doubtful(self, result: Result) -> bool:
        """Whether the samples are too few for this percentile."""
        return self.path[-1] in (at(result, *self.path[:-1], "marks") or ())

    @property
    def title(self) -> str:
        return f"{self.name}, {self.unit}" if self.unit else self.name

    def text(self, value: float | None, *, unit: bool = True) -> str:
        """With its unit: seconds below a tenth as ms, shares in percent."""
        if value is None:
            return "-"
        if self.unit == "share":
            return f"{number(value * 100)} %"
        if not unit:
            return number(value)
        if self.unit == "s" and 0 < abs(value) < 0.1:
            return f"{number(value * 1e3)} ms"
        return f"{number(value)} {self.unit}".rstrip()


@dataclass(frozen=True, slots=True)
class SweepChart:
    key: str
    heading: str
    about: str
    quantities: tuple[Quantity, ...]


def _of_times(title: str, metric: str, *shares: str) -> tuple[Quantity, ...]:
    place = (metric,) if metric == "queueing" else ("metrics", metric)
    return tuple(Quantity(f"{title} {share}", "s", (*place, share), (*place, "n")) for share in shares)


_CHARTS: Final = (
    SweepChart("throughput", "Throughput", "What was completed in a second.",
        (Quantity("Completed requests", "req/s", ("throughput_rps",), offered=True),
         Quantity("Tokens", "tokens/s", ("throughput_tps",)))),
    SweepChart("goodput", "Goodput and smooth goodput",
        "Goodput counts requests that met every objective, and nothing of the others. Smooth goodput is"
        " the sum of every answer's benefit: its tokens, less what its reader waited.",
        (Quantity("Goodput", "req/s", ("goodput", "requests_per_second"), ("goodput", "counted"), True),
         Quantity("Smooth goodput", "tokens/s", ("smooth_goodput", "tokens_per_second"),
                  ("smooth_goodput", "n")))),
    SweepChart("first-token", "Time to first token", "", _of_times("TTFT", "ttft", "p50", "p99")),
    SweepChart("between-tokens", "Time between tokens",
        "ITL is each time between two tokens of an answer, TPOT an answer's mean.",
        (*_of_times("ITL", "itl", "p99"), *_of_times("TPOT", "tpot", "p50", "p99"))),
    SweepChart("user-idle", "User idle latency", "How long a reader waits with nothing to read.",
        _of_times("User idle", "user_idle", "p50", "p99")),
    SweepChart("end-to-end", "End to end latency", "From arrival to completion, of completed requests.",
        _of_times("E2E", "e2e", "p50", "p99")),
    SweepChart("violations", "Requests outside their bounds", "",
        (Quantity("Outside the request SLA", "share", ("request_sla_violation",)),
         Quantity("Outside the token SLA", "share", ("token_sla_violation",)),
         Quantity("SLO attainment", "share", ("goodput", "attainment"), ("goodput", "counted")))),
    SweepChart("use", "Utilisation and batches",
        "Share of time that servers were busy; requests in a batch, on average.",
        (Quantity("Utilisation", "share", ("utilization",)),
         Quantity("Batch size, mean", "", ("batch_mean",), ("batches",)))),
    SweepChart("queueing", "Queueing", "From arrival until a server took the request up.",
        _of_times("Queueing", "queueing", "p50", "p99")),
    SweepChart("memory", "Memory", "Requests thrown out of a full KV memory; blocks of prompts found in it.",
        (Quantity("Preempted requests", "share", ("engine", "preempted_share")),
         Quantity("Prefix hits", "share", ("engine", "prefix_hit_rate"), ("engine", "prefix_queries")))),
    SweepChart("capacity", "Capacity",
        "The highest rate at which no more than the allowed share of requests is late.",
        (Quantity("Capacity", "req/s", ("capacity", "rps")),)),
)  # fmt: skip


def sweep_html(
    results: Sequence[Result], title: str = "Simulated sweep", *, defaults: Defaults | None = None,
    sla: bool = False,
) -> str:  # fmt: skip
    """The page. `results` are runs as public JSON; with `defaults` it says which options are not at theirs.

    `sla`: with requests outside the SLA. Raises ValueError where there are no results.
    """
    sweep = read_sweep(results)
    lines = _line_choices(sweep)
    sections = []
    for chart in _CHARTS:
        held = tuple(
            q for q in chart.quantities
            if any(q.of(result) is not None for result in results) and (sla or q.path[-1] not in _SLA)
        )  # fmt: skip
        if not held:
            continue
        chart = replace(chart, quantities=held)
        panels = [_curves(sweep, lines, quantity) for quantity in held]
        offered = any(one["name"] == _OFFERED for panel in panels for one in panel.data)
        figure = FigureBlock(
            chart.key,
            chart.heading,
            panels,
            [_table(sweep, chart)],
            [_samples(held, results)],
            lines_legend=True,
            offered=offered,
        )
        about: list[Block] = [Note(chart.about)] if chart.about else []
        sections.append(Section(chart.key, chart.heading, [*about, figure]))
    if followed := followed_requests(results):
        sections.append(_followed_section(sweep, followed))
    page = ReportDocument(
        title, _summary(sweep, results, sla=sla), _settings(results, defaults, sla=sla), sections,
        settings_linked=False, lines=lines, choices=_choices(sweep),
    )  # fmt: skip
    return page_html(page)


def _followed_section(sweep: Sweep, followed: Sequence[tuple[str, Result]]) -> Section:
    """Return when the tokens of one request came, and the gaps between them, a curve for each run."""
    lines = {id(result): i for i, line in enumerate(sweep.lines) for _, result in line.points}
    counts: list[dict[str, Any]] = []
    gaps: list[dict[str, Any]] = []
    for label, result in followed:
        times = result["followed"]["token_seconds"]
        look = {"type": "scatter", "name": escape(label), "meta": {"line": lines.get(id(result))},
                "mode": "lines", "line": {"width": 2}}  # fmt: skip
        counts.append({**look, "x": times, "y": list(range(1, len(times) + 1))})
        gaps.append({**look, "x": list(range(2, len(times) + 1)), "y": [b - a for a, b in pairwise(times)]})
    figures = {label: followed_figures(result["followed"]) for label, result in followed}
    words = [
        f"{said}: {', '.join(f'{label} {one[name]} ms' for label, one in figures.items())}."
        for said, name in (("Last token", "E2E"), ("Longest gap", "longest gap"))
    ]
    axis = {"rangemode": "tozero"}
    seconds, tokens = (axis | {"title": {"text": text}} for text in ("s after arrival", "token"))
    panels = [
        Panel("Tokens generated", words[0], counts, {"xaxis": seconds, "yaxis": axis}),
        Panel("Gap before a token, s", words[1], gaps, {"xaxis": tokens, "yaxis": axis}),
    ]
    one = followed[0][1]["followed"]
    said = f"row {one['row']}, {one['input']:,} input and {one['output']:,} output tokens; times in ms"
    rows = [[label, *found.values()] for label, found in figures.items()]
    table = Table(["run", *next(iter(figures.values()))], rows, "One request")
    return Section(
        "followed",
        "One request",
        [FigureBlock("followed", "One request", panels, [table], [said], lines_legend=True)],
    )


def _summary(sweep: Sweep, results: Sequence[Result], *, sla: bool) -> list[Block]:
    said = [counted(len(results), "run")]
    if sweep.axis is not None:
        said.append(f"along {sweep.axis.title} ({len(sweep.axis.texts):,} values)")
    if len(sweep.lines) > 1:
        said.append(f"{len(sweep.lines):,} lines by {', '.join(d.name for d in sweep.by)}")
    if sweep.along:
        said.append(f"{', '.join(d.name for d in sweep.along)} change along the axis")
    blocks: list[Block] = [Note(f"{'; '.join(said)}.", lead=NOT_MEASURED)]
    if best := best_said(results, sla=sla):
        blocks.append(Note(best, css="lead"))
    blocks += [Note(said.capitalize()) for said in dict.fromkeys(unreliable_said(results))]
    table = replace(sweep_table(results, sla=sla), label="All runs")
    return [*blocks, table, Note("Times in ms.")]


def _settings(results: Sequence[Result], defaults: Defaults | None, *, sla: bool) -> list[Block]:
    rows = settings_rows(results, defaults)
    blocks: list[Block] = [TermTable([row for row in rows if sla or row[0] != "SLA"])]
    if options := options_rows(results, defaults):
        changed = frozenset(i for i, row in enumerate(options) if row.changed)
        cells = [(row.name, row.values, row.default) for row in options]
        table = TermTable(cells, ("option", "value", "default"), changed)
        blocks.append(DetailsBlock(f"All {len(options)} options", [table]))
    return blocks


def _choices(sweep: Sweep) -> list[tuple[str, str, list[tuple[str, bool]]]]:
    """A choice for each of several dimensions; of too many lines some are chosen at first."""
    if len(sweep.by) < 2:
        return []
    left, chosen = len(sweep.lines), {}
    for d in reversed(sweep.by[1:]):
        if left > _LINES_SHOWN:
            chosen[d.name] = list(d.texts.values())[-1]
            left = -(-left // len(d.texts))
    return [
        (d.title, d.name, [(text, chosen.get(d.name) == text) for text in d.texts.values()]) for d in sweep.by
    ]


def _line_choices(sweep: Sweep) -> list[LineChoice]:
    """The lines with their looks: the colour by what tells lines apart first, the dash by the rest."""
    first = [line.of.get(sweep.by[0].name) if sweep.by else None for line in sweep.lines]
    rest = [tuple(line.of.get(d.name) for d in sweep.by[1:]) for line in sweep.lines]
    colours, others = list(dict.fromkeys(first)), list(dict.fromkeys(rest))
    lines = []
    for line, one, other in zip(sweep.lines, first, rest, strict=True):
        colour, dash = colours.index(one), others.index(other)
        symbol = colour + dash
        if len(others) == 1:
            dash = colour
        symbol += dash // len(DASHES)  # where dashes come again, they come with other symbols
        look = (colour % COLOURS, DASHES[dash % len(DASHES)], SYMBOLS[symbol % len(SYMBOLS)])
        lines.append(LineChoice(line.label, line.of, *look))
    return lines


def _curves(sweep: Sweep, looks: Sequence[LineChoice], quantity: Quantity) -> Panel:
    data: list[dict[str, Any]] = []
    found: list[tuple[float, Line, Any]] = []
    for i, (line, look) in enumerate(zip(sweep.lines, looks, strict=True)):
        values = [quantity.of(result) for _, result in line.points]
        if all(value is None for value in values):
            continue
        found += [(v, line, x) for v, (x, _) in zip(values, line.points, strict=True) if v is not None]
        shape: dict[str, Any] = {"type": "bar", "x": [escape(line.label)] * len(values)}
        if sweep.axis is not None:
            symbols = [look.symbol + "-open" * quantity.doubtful(result) for _, result in line.points]
            shape = {
                "type": "scatter", "mode": "lines+markers", "x": [x for x, _ in line.points],
                "line": {"dash": look.dash, "width": 2}, "marker": {"size": 8, "symbol": symbols},
                "cliponaxis": False,
            }  # fmt: skip
        data.append({
            **shape, "name": escape(line.label), "meta": {"line": i}, "y": values, "hoverinfo": "text",
            "hovertext": [_hover(sweep, quantity, line, x, result) for x, result in line.points],
        })  # fmt: skip
    places = sorted({x for _, _, x in found})
    low, high = min(found, key=lambda one: one[0]), max(found, key=lambda one: one[0])
    title = quantity.title
    y_axis: dict[str, Any] = {"rangemode": "tozero"}
    if quantity.offered and sweep.axis is not None and sweep.axis.name == "load" and len(places) > 1:
        data.append({
            "type": "scatter", "mode": "lines", "name": _OFFERED, "meta": {"line": None}, "x": places,
            "y": places, "line": {"dash": "dot", "width": 1}, "hoverinfo": "skip",
        })  # fmt: skip
        # Far more may be offered than was done; the curves must stay visible.
        y_axis = {"range": [0, high[0] * 1.1 or 1]}
    if quantity.unit == "share":
        y_axis |= {"tickformat": ".0%"} if high[0] > 0.05 else {"tickformat": ".2~%"}
    elif quantity.unit == "s" and sweep.axis is not None and is_wide([v for v, _, _ in found]):
        y_axis = {"type": "log"}
        title += " (log)"
    words = f"{quantity.name}: {_where(sweep, quantity, low)} to {_where(sweep, quantity, high)}."
    if low[0] == high[0]:
        words = f"{quantity.name}: {quantity.text(low[0])}{' throughout' if len(found) > 1 else ''}."
    layout = {"xaxis": _x_axis(sweep, places), "yaxis": y_axis, "barmode": "overlay"}
    return Panel(title, words, data, layout, of={})


def _place_text(axis: Dimension, place: Any) -> str:
    if axis.name == "load":
        return f"{number(place, 3)} req/s offered"
    return axis.texts.get(place, number(place))


def _where(sweep: Sweep, quantity: Quantity, found: tuple[float, Line, Any]) -> str:
    value, line, x = found
    place = [] if sweep.axis is None or line.level else [_place_text(sweep.axis, x)]
    label = [line.label] if len(sweep.lines) > 1 else []
    return f"{quantity.text(value)} ({', '.join([*label, *place]) or line.label})"


def _hover(sweep: Sweep, quantity: Quantity, line: Line, x: Any, result: Result) -> str:
    n = quantity.n(result)
    rows = [
        line.label,
        "" if sweep.axis is None or line.level else _place_text(sweep.axis, x),
        f"{quantity.name} {quantity.text(quantity.of(result))}",
        "" if n is None else f"n {n:,}" + " (too few)" * quantity.doubtful(result),
        *(text for d in sweep.along if (text := d.text_at(result)) is not None),
    ]
    return "<br>".join(escape(row) for row in rows if row)


def _x_axis(sweep: Sweep, places: list[Any]) -> dict[str, Any]:
    if sweep.axis is None:
        return {"type": "category"}
    title = sweep.axis.title
    axis: dict[str, Any] = {"rangemode": "tozero"}
    if is_wide(places):
        axis = {"type": "log"}
        title += " (log)"
    if _are_apart(places):
        axis |= {"tickvals": places, "ticktext": [number(place, 3) for place in places]}
    return {**axis, "title": {"text": escape(title)}}


def _are_apart(places: list[Any]) -> bool:
    if not 1 < len(places) <= _TICKS_MAX:
        return len(places) == 1
    ticks = [log(place) for place in places] if is_wide(places) else places
    return bool(min(b - a for a, b in pairwise(ticks)) >= 0.5 * (ticks[-1] - ticks[0]) / _TICKS_MAX)


def _table(sweep: Sweep, chart: SweepChart) -> Table:
    """A row for each run: what it rests on before what it is."""
    columns: list[tuple[str, Quantity, bool]] = []
    samples = list(dict.fromkeys(q.samples for q in chart.quantities))
    for q in chart.quantities:
        if q.samples in samples:
            samples.remove(q.samples)
            columns.append((f"n of {q.name}", q, True))
        columns.append((q.title, q, False))
    rows, marked = [], False
    for line in sweep.lines:
        for place, result in line.points[: 1 if line.level else None]:  # a level line is one run
            if all(q.of(result) is None for q in chart.quantities):
                continue
            cells = [line.label]
            if sweep.axis is not None:
                cells.append("any" if line.level else number(place))
            for _, q, counts in columns:
                n, value = q.n(result), q.of(result)
                if counts:
                    cells.append("-" if n is None else f"{n:,}")
                else:
                    doubt = value is not None and q.doubtful(result)
                    marked |= doubt
                    cells.append(q.text(value, unit=False) + MARK * doubt)
            rows.append([*cells, *(d.text_at(result) or "-" for d in sweep.along)])
    heads = ["line", *([] if sweep.axis is None else [sweep.axis.title])]
    heads += [head for head, _, _ in columns] + [d.title for d in sweep.along]
    return Table(heads, rows, chart.heading, footnote=_FEW if marked else "")


def settings_rows(results: Sequence[Result], defaults: Defaults | None) -> list[tuple[str, str]]:
    """Return name and text of the settings shared by all results; settings without a text are omitted."""
    rows = [
        ("scheduler", values_text((r.get("scheduler") for r in results), limit=99)),
        ("trace", values_text((r.get("trace") for r in results), limit=99)),
        ("requests", values_text(r.get("n") for r in results)),
        ("load", _load(results)),
        ("window", _window(results)),
        ("servers", values_text(r.get("servers") for r in results)),
        ("seed", values_text(r.get("seed") for r in results)),
        ("model", _model(results)),
        ("options", _changed(results, defaults)),
        ("ITL", _prefixed("ITL option", values_text(at(r, "metrics", "itl", "option") for r in results))),
        ("tokens", _prefixed("counted by", values_text(
            source for r in results for source in at(r, "tokens", "source") or ()))),
        ("smooth goodput", _smooth(results)),
        ("objectives", _either(at(r, "goodput", "objectives") for r in results)),
        ("SLA", _sla(results)),
        ("capacity", _allowed(results)),
        ("uncertainty", _prefixed("", values_text(r.get("uncertainty") for r in results), " s")),
    ]  # fmt: skip
    return [(term, text) for term, text in rows if text]


def _samples(quantities: Sequence[Quantity], results: Sequence[Result]) -> str:
    by_text: dict[str, list[str]] = {}
    for q in quantities:
        text = values_text(q.n(result) for result in results if q.of(result) is not None)
        by_text.setdefault(text, []).append(q.name)
    if len(by_text) == 1:
        return f"n {next(iter(by_text))}"
    return "n " + "; ".join(f"{text} ({', '.join(names)})" for text, names in by_text.items())


@dataclass(frozen=True, slots=True)
class OptionRow:
    """An option among the runs whose schedulers read it."""

    name: str
    values: str
    default: str
    changed: bool


def options_rows(results: Sequence[Result], defaults: Defaults | None) -> list[OptionRow]:
    """Each option that any of the schedulers reads; `changed`: in some run it differs from its default."""
    rows = []
    for group in ("readings", "serving"):
        for name in dict.fromkeys(name for r in results for name in r.get(group) or {}):
            read = [r for r in results if at(r, group, name) is not None]
            usual = []
            for r in read:
                of_scheduler = (defaults or {}).get(r.get("scheduler") or "", {}).get(group, {})
                usual.append(option_text(name, of_scheduler[name]) if name in of_scheduler else "")
            values = [option_text(name, r[group][name]) for r in read]
            changed = any(default and value != default for value, default in zip(values, usual, strict=True))
            if read:
                shown, default = (", ".join(dict.fromkeys(filter(None, texts))) for texts in (values, usual))
                rows.append(OptionRow(name, shown, default, changed))
    return rows


def _prefixed(before: str, text: str, after: str = "") -> str:
    return f"{before} {text}{after}".strip() if text else ""


def _either(texts: Iterator[str | None]) -> str:
    return "; or ".join(dict.fromkeys(text for text in texts if text))


def _load(results: Sequence[Result]) -> str:
    modes = (at(r, "load", "mode") for r in results)
    said = values_text(_MODES.get(mode, mode) for mode in modes if mode)
    offered = values_text((_rounded(at(r, "load", "offered_rps")) for r in results), limit=3)
    return ", ".join(filter(None, (said, _prefixed("offered", offered, " req/s"))))


def _window(results: Sequence[Result]) -> str:
    names = values_text(at(r, "window", "name") for r in results)
    seconds = values_text((_rounded(at(r, "window", "seconds")) for r in results), limit=2)
    return ", ".join(filter(None, (names, _prefixed("", seconds, " s"))))


def _model(results: Sequence[Result]) -> str:
    told = []
    for r in results:
        text = ", ".join(f"{name} {number(value, 6)}" for name, value in (r.get("model") or {}).items())
        if fit := r.get("fit"):
            text += f" (fitted to {fit.get('grid', 'measurements')}, R^2 {number(fit.get('r2'), 5)})"
        told.append(text)
    return _prefixed("", _either(iter(told)), " (in seconds but for gamma)")


def _changed(results: Sequence[Result], defaults: Defaults | None) -> str:
    if defaults is None:
        return ""
    said = [f"{row.name} {row.values}" for row in options_rows(results, defaults) if row.changed]
    return f"set: {', '.join(said)}" if said else "options at their defaults"


def _smooth(results: Sequence[Result]) -> str:
    told = []
    for r in results:
        smooth, text = r.get("smooth_goodput") or {}, ""
        if smooth.get("alpha") is not None:
            speed = number(smooth["speed_tokens_per_second"])
            text = f"alpha {number(smooth['alpha'])}, reader of {speed} tokens/s"
        elif smooth.get("readers"):
            text = f"{len(smooth['readers'])} readers of different speed"
        told.append(text + (f", idle {smooth['idle']}" if text and smooth.get("idle") else ""))
    return _either(iter(told))


def _sla(results: Sequence[Result]) -> str:
    told = []
    for name in ("request", "token"):
        values = (at(r, "readings", f"{name}_sla") for r in results)
        if text := values_text(values_text((value,)) for value in values if value is not None):
            told.append(f"{name} SLA {text} s")
    return ", ".join(told)


def _allowed(results: Sequence[Result]) -> str:
    shares = values_text(r["capacity"]["allowed"] * 100 for r in results if r.get("capacity"))
    return _prefixed("with at most", shares, " % late")


def _rounded(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.4g}")

"""Turn the JSON of a replay into sections of charts: latency distributions, and the run over time.

`replay.py` puts the sections into its page; each has a figure of `Panel`s with a table, and a caption.
Distributions are drawn from `quantiles` of the public JSON; percentiles of too few samples (IETF draft,
5.1.4.3) are marked in their tables. If a line over time has very many points, only its extreme values are
drawn.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any, Final

from msgspec.structs import replace

from llmtap.metrics.statistics import SHARES, is_enough
from llmtap.report.document import (
    DASHES,
    SHARES_RANGE,
    Axis,
    FigureBlock,
    LegendKey,
    Look,
    Note,
    Panel,
    Plot,
    PlotSeries,
    Section,
    Table,
    colour_name,
)
from llmtap.report.replay_terms import basis_texts
from llmtap.report.summary import series_title, system_table
from llmtap.report.values import FEW, MARK, at, is_marked, milliseconds, number

_TABLE_SHARES: Final = (0.01, 0.05, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 0.99, 0.995, 0.999, 1.0)
_SECONDS_AXIS_MIN_S: Final = 10.0
"""An axis is in s instead of ms if its largest value is at least this number of seconds."""
_LOG_AXIS_RATIO: Final = 20
"""An axis is logarithmic from this ratio of the largest value to the median: on a linear axis, all common
values would be at the left end."""
_DISTRIBUTIONS: Final[tuple[tuple[str, str, str, tuple[tuple[str, str, str], ...], tuple[str, ...]], ...]] = (
    (
        "first-token",
        "Time to first token",
        (
            "To the first content. From submit, it is the server's time. From schedule, it is the wait of a"
            " user, who asks at the scheduled time even if sender or server are slow. If the two differ, the"
            " sender was late."
        ),
        (("TTFT from submit", "submit", "ttft"), ("TTFT from schedule", "schedule", "ttft")),
        (),
    ),
    (
        "between-tokens",
        "Time between tokens",
        (
            "TBC is each gap between chunks that carry output; 0: two chunks came in one read. ITL is each"
            " gap between tokens, by the named option."
        ),
        (("TBC", "submit", "tbc"), ("ITL", "submit", "itl")),
        ("ITL", "tokens"),
    ),
    (
        "end-to-end",
        "End to end latency",
        "To the last byte, of answers that ended well.",
        (("E2E from submit", "submit", "e2e"), ("E2E from schedule", "schedule", "e2e")),
        (),
    ),
    (
        "user-idle",
        "User idle latency",
        "How long a reader waits with nothing to read, in an answer.",
        (("User idle", "submit", "user_idle"),),
        ("smooth goodput", "tokens"),
    ),
    (
        "lateness",
        "Dispatch lateness",
        "How long after its time a request left: the sender's own error, and not the server's.",
        (("Dispatch lateness", "", "dispatch_lateness"),),
        ("sender",),
    ),
)
"""Sections: key, heading and text; title, group and metric of each curve; terms to add to the caption."""
_Json = Mapping[str, Any]


def distribution_sections(result: _Json) -> Iterator[Section]:
    """Yield a section for each distribution that the result has. Omit curves without samples."""
    quantiles = result["quantiles"]
    shares = quantiles["shares"]
    figures = {"submit": result["metrics"], "schedule": result["corrected"], "": result}
    for key, heading, text, declared, terms in _DISTRIBUTIONS:
        curves = {
            title: (figures[group][metric]["n"], seconds)
            for title, group, metric in declared
            if (seconds := (quantiles[group] if group else quantiles)[metric])
        }
        if curves:
            legend = [LegendKey(title, Look(colour_name(i), DASHES[i])) for i, title in enumerate(curves)]
            samples = "; ".join(f"{title}: n {n:,}" for title, (n, _) in curves.items())
            rests = basis_texts(result, *terms, samples=samples)
            tables = [_quantile_table(heading, shares, curves)]
            panel = _quantile_panel(shares, curves)
            yield Section(
                key, heading, [Note(text), FigureBlock(key, heading, [panel], tables, rests, legend)]
            )


_Curves = Mapping[str, tuple[int, Sequence[float]]]
"""Curves by title: number of samples, and quantiles in seconds."""


def _quantile_table(heading: str, shares: Sequence[float], curves: _Curves) -> Table:
    rows = [["n", *(f"{n:,}" for n, _ in curves.values())]]
    for share in _TABLE_SHARES:
        at_share = shares.index(share)
        cells = [
            milliseconds(seconds[at_share]) + MARK * (share < 1 and not is_enough(n, share))
            for n, seconds in curves.values()
        ]
        rows.append(["max" if share == 1 else f"p{share * 100:.4g}", *cells])
    heads = ["", *(f"{title}, ms" for title in curves)]
    return Table(heads, rows, heading, footnote=FEW if is_marked(rows) else "")


def _quantile_panel(shares: Sequence[float], curves: _Curves) -> Panel:
    """Return the chart of the cumulative share of values by latency."""
    median = shares.index(0.5)
    largest = max(seconds[-1] for _, seconds in curves.values())
    factor, unit = (1e3, "ms") if largest < _SECONDS_AXIS_MIN_S else (1.0, "s")
    wide = any(seconds[-1] >= _LOG_AXIS_RATIO * seconds[median] > 0 for _, seconds in curves.values())
    series, words = [], []
    for i, (title, (n, seconds)) in enumerate(curves.items()):
        points = [(s * factor, share) for share, s in zip(shares, seconds, strict=True) if s > 0 or not wide]
        x, y = [x for x, _ in points], [share for _, share in points]
        series.append(PlotSeries(name=title, x=x, y=y, ink=colour_name(i), dash=DASHES[i]))
        figures = [
            f"{name} {milliseconds(seconds[shares.index(SHARES[name])])} ms"
            + ("" if is_enough(n, SHARES[name]) else " (too few)")
            for name in ("p50", "p99")
        ]
        words.append(f"{title}: {', '.join(figures)}, n {n:,}.")
    x_axis = Axis(f"{unit} (log)", "log") if wide else Axis(unit, zero=True)
    y_axis = Axis("share of all", share=True, range=SHARES_RANGE)
    plot = Plot(series, x_axis, y_axis, f"{{y}} within {{x}} {unit}")
    return Panel("Share by latency", " ".join(words), plot)


_POINTS_MAX: Final = 4_000
"""Maximum number of points of a line; longer lines are thinned. A chart has fewer pixels in its width."""
_ROWS_MAX: Final = 60
_HEADINGS: Final = {
    "host": ("This host over time", "Of the sender's processes, the server's where it runs here, and all."),
    "server": ("The server over time", "As the server reports on its /metrics."),
    "gpu": ("GPUs over time", "Of this host, whoever used them."),
}
_FORMS: Final[dict[tuple[str, bool], tuple[str, str, float]]] = {
    ("cpus", False): ("CPUs busy", "CPUs", 1),
    ("share", False): ("Shares", "share", 1),
    ("bytes", False): ("Memory, GiB", "GiB", 2**-30),
    ("celsius", False): ("Temperature, °C", "°C", 1),
    ("watts", False): ("Power, W", "W", 1),
    ("requests", False): ("Requests", "requests", 1),
    ("requests", True): ("Requests per second", "per second", 1),
    ("tokens", True): ("Tokens per second", "per second", 1),
}
"""Title and unit of a panel, and the factor of its values, by the unit of a series and whether the series is
a counter."""


def time_sections(result: _Json) -> Iterator[Section]:
    """Yield the section of requests over time, then the sections of sampled series. Omit empty series."""
    timeline, end = result["timeline"], result["window"]["seconds"]
    series = at(result, "system", "series") or {}
    period = timeline["period"]
    yield _time_section(
        result,
        "load",
        "Requests over time",
        "Asked: requests that the plan has in each second. Sent: requests that left in it. In an open loop"
        " both are the same, also if the server is slow. In flight: the largest number at one moment.",
        [_lines_panel(title, unit, lines, end) for title, unit, lines in _load_lines(result, series)],
        _timeline_table(timeline),
        f"counts of each {'second' if period == 1 else f'{number(period)} s'}",
    )
    groups = _panel_lines(series, end)
    for owner, (heading, about) in _HEADINGS.items():
        panels = [
            _lines_panel(lines[0].name if len(lines) == 1 else title, unit, lines, end)
            for (panel_owner, title, unit), lines in groups.items()
            if panel_owner == owner
        ]
        if panels:
            part = series["server" if owner == "server" else "system"]
            sampled = f"{len(part['t']):,} samples, one in {number(series['period'])} s"
            sampled += f", {part['dropped']:,} not kept" if part.get("dropped") else ""
            table = system_table(at(result, "system", "summary") or {}, owner, heading)
            yield _time_section(result, f"over-time-{owner}", heading, about, panels, table, sampled)


def _time_section(
    result: _Json, key: str, heading: str, about: str, panels: list[Panel], table: Table, sampled: str
) -> Section:
    tables = [table] if table.rows else []
    figure = FigureBlock(key, heading, panels, tables, basis_texts(result, samples=sampled))
    return Section(key, heading, [Note(about), figure])


def _timeline_table(timeline: _Json) -> Table:
    """Return the table of counts over time. If there are many periods, a row sums several of them."""
    names = [name for name in ("asked", "sent", "ended", "in_flight") if timeline[name] is not None]
    t, period = timeline["t"], timeline["period"]
    step = -(-len(t) // _ROWS_MAX)
    rows = []
    for i in range(0, len(t), step):
        parts = {name: timeline[name][i : i + step] for name in names}
        cells = [f"{max(v) if name == 'in_flight' else sum(v):,}" for name, v in parts.items()]
        rows.append([number(t[i]), *cells])
    heads = [f"{number(period * step)} s from, s", *(name.replace("_", " ") for name in names)]
    return Table(heads, rows, "Requests over time")


def _load_lines(result: _Json, series: _Json) -> Iterator[tuple[str, str, list[PlotSeries]]]:
    """Yield the title, the unit and the lines of each panel on requests."""
    timeline, load, end = result["timeline"], result["load"], result["window"]["seconds"]
    period, t = timeline["period"], timeline["t"]
    ends = [*t, t[-1] + period]
    rates = []
    # The planned requests (`asked` in the result) are the last line, so that their thin dots are drawn over
    # the line "sent".
    for name, colour, dash in (("sent", "c0", "solid"), ("ended", "c1", "dash"), ("asked", "soft", "dot")):
        if counts := timeline[name]:
            y = [count / period for count in counts]
            title = "planned" if name == "asked" else name
            if name == "asked" and load["stopped"] is None and sum(counts) < load["planned"]:
                title = "planned, first turns only"  # Later turns of a conversation have no planned time.
            rates.append(PlotSeries(name=title, x=ends, y=[*y, y[-1]], ink=colour, dash=dash, step="hv"))
    yield "Requests per second", "per second", rates
    lines = []
    if counts_in_flight := timeline["in_flight"]:
        lines.append(
            PlotSeries(
                name="in flight",
                x=ends,
                y=[*counts_in_flight, counts_in_flight[-1]],
                ink=colour_name(0),
                step="hv",
            )
        )
    server = series.get("server") or {}
    for i, name in enumerate(("running", "waiting"), 1):
        if values := at(server, "series", name, "values"):
            times, values = _samples_within(server["t"], values, end)
            if any(v is not None for v in values):
                title = f"{name}, says the server"
                lines.append(PlotSeries(name=title, x=times, y=values, ink=colour_name(i), dash=DASHES[i]))
    if lines:
        yield "In flight", "requests", lines


def _panel_lines(series: _Json, end: float) -> dict[tuple[str, str, str], list[PlotSeries]]:
    """Return the lines of each panel, by owner (host, server or gpu), title and unit."""
    groups: dict[tuple[str, str, str], list[PlotSeries]] = {}
    for part in ("system", "server"):
        samples = series.get(part) or {"series": {}}
        for name, metric in samples["series"].items():
            is_counter, times, values = metric["kind"] == "counter", samples["t"], metric["values"]
            title, unit, factor = _FORMS.get(
                (metric["unit"], is_counter), (metric["unit"], metric["unit"], 1)
            )
            if name == "host_memory":
                title = "Memory of this host, GiB"  # its own panel, for its much larger values
            if is_counter:
                times, values = _growth_per_second(times, values)
            averaged = metric["kind"] != "gauge"
            times, values = _samples_within(times, values, end, averaged=averaged)
            if any(v is not None for v in values):
                owner = "server" if part == "server" else "gpu" if name.startswith("gpu") else "host"
                lines = groups.setdefault((owner, title, unit), [])
                y, i = [None if v is None else v * factor for v in values], len(lines)
                lines.append(
                    PlotSeries(
                        name=series_title(name),
                        x=times,
                        y=y,
                        ink=colour_name(i),
                        dash=DASHES[i % len(DASHES)],
                        step="vh" if averaged else "",
                    )
                )
    return groups


def _samples_within(
    t: Sequence[float], y: Sequence[float | None], end: float, *, averaged: bool = False
) -> tuple[Sequence[float], Sequence[float | None]]:
    """Return the samples in the run. `averaged`: a sample is a mean up to its time, so include one more."""
    first, last = bisect_left(t, 0), bisect_right(t, end) + averaged
    return t[first:last], y[first:last]


def _growth_per_second(
    t: Sequence[float], values: Sequence[float | None]
) -> tuple[list[float], list[float | None]]:
    """Return the end of each period between samples of a counter, and its growth per second in the period.

    A counter that became smaller was reset to 0. A sample less than half of the usual period after the
    previous sample, such as the final one, is omitted: its rate would be inaccurate.
    """
    usual = sorted(b - a for a, b in pairwise(t))[(len(t) - 1) // 2] if len(t) > 1 else 0
    times, rates = list(t[:1]), list[float | None]([None] * len(t[:1]))
    for i in range(1, len(t)):
        previous, current, seconds = values[i - 1], values[i], t[i] - t[i - 1]
        if seconds > 0 and seconds >= usual / 2:
            times.append(t[i])
            rate = None
            if previous is not None and current is not None:
                rate = (current - previous if current >= previous else current) / seconds
            rates.append(rate)
    return times, rates


def _lines_panel(title: str, unit: str, lines: Sequence[PlotSeries], end: float) -> Panel:
    words, largest = [], 0.0
    for line in lines:
        values = [v for v in line.y if v is not None]
        largest = max(largest, *values)
        factor, shown = (100.0, "%") if unit == "share" else (1.0, unit)
        low, high = number(min(values) * factor, 3), number(max(values) * factor, 3)
        words.append(f"{line.name}: {low if low == high else f'{low} to {high}'} {shown}.")
    share = unit == "share"
    y_axis = Axis(zero=True, share=share, range=SHARES_RANGE if share and largest > 0.5 else None)
    hover = "{y} at {x} s" if share else f"{{y}} {unit} at {{x}} s"
    plot = Plot(list(map(_thinned_line, lines)), Axis("s", range=(0, end)), y_axis, hover, timed=True)
    legend = [LegendKey(line.name, Look(line.ink, line.dash)) for line in lines] if len(lines) > 1 else []
    return Panel(title, " ".join(words), plot, legend)


def _thinned_line(line: PlotSeries) -> PlotSeries:
    """Return a line with at most _POINTS_MAX points: the lowest and the highest value of each part."""
    n, y = len(line.x), line.y
    if n <= _POINTS_MAX:
        return line
    step = -(-2 * n // _POINTS_MAX)
    indices: list[int] = []
    for begin in range(0, n, step):
        known = [(v, i) for i in range(begin, min(begin + step, n)) if (v := y[i]) is not None]
        indices += sorted({min(known)[1], max(known)[1]}) if known else [begin]
    return replace(line, x=[line.x[i] for i in indices], y=[y[i] for i in indices])

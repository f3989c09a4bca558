"""What a replay's second by second figures and samples look like: charts on one axis of time.

Seconds count from the start of the run. Averages and rates are drawn over the time that they are of; a sample
speaks for its own moment. Of very many samples the lowest and the highest of each stretch are drawn.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise
from typing import Any, Final

from llmtap.report.figures import COLOURS, DASHES, Panel
from llmtap.report.sweep import number
from llmtap.report.system import series_title, series_value

__all__ = ["TimeChart", "TimeLine", "legend_of", "system_table", "time_charts_of", "timeline_rows"]

_POINTS_MAX: Final = 4_000
"""More than there are pixels."""
_ROWS_MAX: Final = 60
_HOST, _SERVER, _GPU = "host", "server", "gpu"
_HEADINGS: Final = {
    _HOST: ("This host over time", "Of the sender's processes, the server's where it runs here, and all."),
    _SERVER: ("The server over time", "As it said of itself, on its /metrics."),
    _GPU: ("GPUs over time", "Of this host, whoever used them."),
}
_FORMS: Final[dict[tuple[str, bool], tuple[str, str, float]]] = {
    ("cpus", False): ("CPUs busy", "CPUs", 1), ("share", False): ("Shares", "share", 1),
    ("bytes", False): ("Memory, GiB", "GiB", 2**-30), ("celsius", False): ("Temperature, °C", "°C", 1),
    ("watts", False): ("Power, W", "W", 1), ("requests", False): ("Requests", "requests", 1),
    ("requests", True): ("Requests per second", "per second", 1),
    ("tokens", True): ("Tokens per second", "per second", 1),
    ("joules", True): ("Power by its own count, W", "W", 1),
}  # fmt: skip
"""Title, unit and factor, by the unit of the series and whether it is a counter."""
_HITS: Final = ("prefix_queries", "prefix_hits")


@dataclass(frozen=True, slots=True)
class TimeLine:
    """A line of a panel."""

    name: str
    t: Sequence[float]
    y: Sequence[float | None]
    colour: int | None
    dash: str = "solid"
    shape: str = "linear"
    """`hv`: a value is of the time that follows; `vh`: of the time before."""


@dataclass(frozen=True, slots=True)
class TimeChart:
    """Panels that are read together, and the lines that each has."""

    key: str
    heading: str
    about: str
    panels: list[Panel]
    lines: list[list[TimeLine]]


def time_charts_of(result: Mapping[str, Any]) -> Iterator[TimeChart]:
    """Requests, then what was sampled; what there is nothing of is left out."""
    series = (result.get("system") or {}).get("series") or {}
    end = (result.get("window") or {}).get("seconds")
    load = _load_lines(result, series, end)
    if load:
        yield TimeChart(
            "load", "Requests over time",
            "Asked is what the plan wanted in each second, sent what left in it: in an open loop they are the"
            " same, whatever the server does. In flight are the most at one moment.",
            [_panel(title, unit, lines, end) for title, unit, lines in load],
            [lines for _, _, lines in load],
        )  # fmt: skip
    groups = _groups(series, end)
    for who, (heading, about) in _HEADINGS.items():
        held = [(title, unit, lines) for (of, title, unit), lines in groups.items() if of == who]
        if held:
            yield TimeChart(
                f"over-time-{who}", heading, about,
                [_panel(_title(title, unit, lines), unit, lines, end) for title, unit, lines in held],
                [lines for _, _, lines in held],
            )  # fmt: skip


def legend_of(lines: Sequence[TimeLine]) -> list[tuple[str, int | None, str]]:
    """Name, colour and dash of each; nothing where the one that there is names its panel."""
    return [(line.name, line.colour, line.dash) for line in lines] if len(lines) > 1 else []


def timeline_rows(timeline: Mapping[str, Any]) -> tuple[list[str], list[tuple[str, list[str]]]]:
    """Heads and rows of the timeline: counts, added up over several periods where those are many."""
    names = [name for name in ("asked", "sent", "ended", "in_flight") if timeline.get(name) is not None]
    t, period = timeline["t"], timeline["period"]
    step = -(-len(t) // _ROWS_MAX)
    heads = [f"{number(period * step)} s from, s", *(name.replace("_", " ") for name in names)]
    rows = []
    for i in range(0, len(t), step):
        parts = {name: timeline[name][i : i + step] for name in names}
        cells = [f"{max(v) if name == 'in_flight' else sum(v):,}" for name, v in parts.items()]
        rows.append((number(t[i]), cells))
    return heads, rows


def system_table(summary: Mapping[str, Any], who: str) -> tuple[list[str], list[tuple[str, list[str]]]]:
    """Heads and rows of what was sampled in the window of the run; of counters how much they grew."""
    rows = []
    for part in ("system", "server"):
        for name, figures in (summary.get(part) or {}).items():
            nothing = not figures.get("n") and figures.get("total") is None
            if f"over-time-{_who(part, name)}" != who or nothing:
                continue
            unit = figures["unit"]
            cells = [f"{figures['n']:,}" if figures.get("n") else "-"]
            if figures["kind"] in ("counter", "ratio"):
                rate = figures.get("per_second")
                cells += ["-" if rate is None else f"{number(rate)}/s", "-", "-", "-"]
                cells.append(series_value(figures.get("total"), unit))
            else:
                cells += [series_value(figures.get(f), unit) for f in ("mean", "p50", "p95", "max")] + ["-"]
            rows.append((series_title(name), cells))
    return ["", "n", "mean", "p50", "p95", "max", "in all"], rows


def _load_lines(
    result: Mapping[str, Any], series: Mapping[str, Any], end: float | None
) -> list[tuple[str, str, list[TimeLine]]]:
    timeline, load = result.get("timeline") or {}, result.get("load") or {}
    period, t = timeline.get("period"), timeline.get("t")
    panels = []
    if period and t:
        ends = [*t, t[-1] + period]
        rates = []
        for name, colour, dash in (("asked", None, "dot"), ("sent", 0, "solid"), ("ended", 1, "dash")):
            counts = timeline.get(name)
            if counts:
                y = [count / period for count in counts]
                title = name
                if name == "asked" and load.get("stopped") is None and sum(counts) < load.get("planned", 0):
                    title = "asked, of first turns"  # when the others are due, answers decide
                rates.append(TimeLine(title, ends, [*y, y[-1]], colour, dash, "hv"))
        # What was asked is the finer line, and is to be seen on what was sent.
        rates = [*rates[1:], *rates[:1]] if timeline.get("asked") else rates
        panels.append(("Requests per second", "per second", rates))
    flying = []
    if period and t and timeline.get("in_flight"):
        y = timeline["in_flight"]
        flying.append(TimeLine("in flight", [*t, t[-1] + period], [*y, y[-1]], 0, "solid", "hv"))
    server = series.get("server") or {}
    for i, name in enumerate(("running", "waiting")):
        values = ((server.get("series") or {}).get(name) or {}).get("values")
        if values and any(v is not None for v in values):
            title = f"{name}, says the server"
            times, values = _within(server["t"], values, end, "linear")
            flying.append(TimeLine(title, times, values, i + 1, DASHES[i + 1]))
    if flying:
        panels.append(("In flight", "requests", flying))
    return panels


def _groups(series: Mapping[str, Any], end: float | None) -> dict[tuple[str, str, str], list[TimeLine]]:
    """Lines by whose they are, title and unit."""
    groups: dict[tuple[str, str, str], list[TimeLine]] = {}
    for part in ("system", "server"):
        told = series.get(part) or {}
        t, columns = told.get("t") or [], dict(told.get("series") or {})
        if all(name in columns for name in _HITS):
            queries, hits = (_growth(columns.pop(name)["values"]) for name in _HITS)
            shares = [h / q if q and h is not None else None for q, h in zip(queries, hits, strict=True)]
            if any(share is not None for share in shares):
                columns["prefix_hit_share"] = {"unit": "share", "kind": "interval", "values": shares}
        for name, one in columns.items():
            counts = one["kind"] == "counter"
            other = "per second" if counts else one["unit"]
            title, unit, factor = _FORMS.get((one["unit"], counts), (f"{one['unit']}, {other}", other, 1))
            if name == "host_memory":
                title = "Memory of this host, GiB"  # others would be flat beside it
            times, values = _rates(t, one["values"]) if counts else (t, one["values"])
            shape = "linear" if one["kind"] == "gauge" else "vh"
            times, values = _within(times, values, end, shape)
            if all(v is None for v in values):
                continue
            lines = groups.setdefault((_who(part, name), title, unit), [])
            lines.append(
                TimeLine(
                    series_title(name),
                    times,
                    [None if v is None else v * factor for v in values],
                    len(lines) % COLOURS,
                    DASHES[len(lines) % len(DASHES)],
                    shape,
                )
            )
    return groups


def _within(
    t: Sequence[float], y: Sequence[float | None], end: float | None, shape: str
) -> tuple[Sequence[float], Sequence[float | None]]:
    """The samples of the run; of averages the one, too, that it ended in."""
    if end is None:
        return t, y
    first, last = bisect_left(t, 0), bisect_right(t, end)
    last += shape == "vh"
    return t[first:last], y[first:last]


def _title(title: str, unit: str, lines: Sequence[TimeLine]) -> str:
    """A panel of one line has its name."""
    if len(lines) > 1:
        return title
    return lines[0].name if unit == "share" else f"{lines[0].name}, {unit}"


def _who(part: str, name: str) -> str:
    if part == "server":
        return _SERVER
    return _GPU if name.startswith("gpu") else _HOST


def _growth(values: Sequence[float | None]) -> list[float | None]:
    """Of a counter since the sample before; one that fell was started anew."""
    grown: list[float | None] = [None]
    for before, after in pairwise(values):
        if before is None or after is None:
            grown.append(None)
        else:
            grown.append(after - before if after >= before else after)
    return grown[: len(values)]


def _rates(t: Sequence[float], values: Sequence[float | None]) -> tuple[list[float], list[float | None]]:
    """How fast a counter grew, with the moment up to which it did.

    The last sample may come soon after the one before, and what grew in so short a time says little: such
    samples count as one.
    """
    usual = sorted(b - a for a, b in pairwise(t))[(len(t) - 1) // 2] if len(t) > 1 else 0
    kept: list[int] = []
    for i in range(len(t)):
        if len(kept) > 1 and t[i] - t[kept[-1]] < usual / 2:
            kept.pop()
        kept.append(i)
    times, grown = [t[i] for i in kept], _growth([values[i] for i in kept])
    return times, [
        None if g is None or not i or times[i] <= times[i - 1] else g / (times[i] - times[i - 1])
        for i, g in enumerate(grown)
    ]


def _panel(title: str, unit: str, lines: Sequence[TimeLine], end: float | None) -> Panel:
    data = []
    for line in lines:
        t, y = _thinned(line.t, line.y)
        value = "%{y:.1%}" if unit == "share" else "%{y:.4~r} " + escape(unit)
        data.append({
            "type": "scatter", "mode": "lines", "name": escape(line.name), "meta": {"line": line.colour},
            "x": t, "y": y, "line": {"dash": line.dash, "width": 2, "shape": line.shape},
            "hovertemplate": "%{fullData.name}<br>" + value + " at %{x:.4~r} s<extra></extra>",
        })  # fmt: skip
    x_axis: dict[str, Any] = {"title": {"text": "s"}}
    if end:
        x_axis["range"] = [0, end]
    y_axis: dict[str, Any] = {"rangemode": "tozero"}
    if unit == "share":
        y_axis["tickformat"] = ".0%"
        most = max((v for line in lines for v in line.y if v is not None), default=0)
        y_axis |= {"range": [0, 1.02]} if most > 0.5 else {}
    words = " ".join(_words(line, unit) for line in lines)
    return Panel(title, words, data, {"xaxis": x_axis, "yaxis": y_axis, "meta": {"time": True}}, {})


def _words(line: TimeLine, unit: str) -> str:
    known = [v for v in line.y if v is not None]
    if not known:
        return f"{line.name}: nothing known."
    factor, unit = (100.0, "%") if unit == "share" else (1.0, unit)
    low, high = number(min(known) * factor, 3), number(max(known) * factor, 3)
    return f"{line.name}: {low if low == high else f'{low} to {high}'} {unit}."


def _thinned(t: Sequence[float], y: Sequence[float | None]) -> tuple[Sequence[float], Sequence[float | None]]:
    """As they are, or of each stretch its lowest and its highest, in their order."""
    if len(t) <= _POINTS_MAX:
        return t, y
    step = -(-2 * len(t) // _POINTS_MAX)
    kept: list[int] = []
    for begin in range(0, len(t), step):
        known = [(v, i) for i in range(begin, min(begin + step, len(t))) if (v := y[i]) is not None]
        kept += sorted({min(known)[1], max(known)[1]}) if known else [begin]
    return [t[i] for i in kept], [y[i] for i in kept]

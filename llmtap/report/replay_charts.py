"""Turn the JSON of a replay into data of charts: latency distributions, and the run over time.

`replay.py` puts the result into its page: `Distribution` and `TimeChart` have the `Panel`s (for plotly) and
tables of `document.py`; `render.py` renders them. Distributions are made of `quantiles` of the public JSON,
each as a whole and as the share of requests that exceed a latency. Parts of too few samples (IETF draft,
5.1.4.3) are dotted. Of very many samples over time only the lowest and the highest of each stretch are kept.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise
from typing import Any, Final

from llmtap.metrics.statistics import SHARES, is_enough
from llmtap.report.document import COLOURS, DASHES, LegendKey, Panel, Table
from llmtap.report.summary import series_title, series_value
from llmtap.report.values import FEW, MARK, METRIC_TITLES, at, milliseconds, number

_TABLE_SHARES: Final = (0.01, 0.05, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 0.99, 0.995, 0.999, 1.0)
_IN_SECONDS: Final = 10.0
"""From here on an axis is in seconds and not in ms."""
_WIDE: Final = 20
"""From this ratio of p99 to p10, or of the largest to the median, an axis is logarithmic: common values
would be a wall at its left."""
_TAIL_TICKS: Final = {1.0: "all", 0.1: "10 %", 0.01: "1 %", 0.001: "0.1 %", 0.0001: "0.01 %"}
_Json = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Curve:
    name: str
    n: int
    shares: Sequence[float]
    seconds: Sequence[float]
    colour: int
    dash: str

    def at(self, share: float) -> float | None:
        return self.seconds[self.shares.index(share)] if share in self.shares else None


@dataclass(frozen=True, slots=True)
class Distribution:
    key: str
    heading: str
    about: str
    curves: list[Curve]
    says: tuple[str, ...] = ()
    """Terms of its caption beside those of every caption."""

    @property
    def legend(self) -> list[LegendKey]:
        keys = [LegendKey(curve.name, curve.colour, curve.dash) for curve in self.curves]
        return keys + ([LegendKey(f"too few samples ({MARK})", None, "dot")] if self.table.footnote else [])

    @property
    def table(self) -> Table:
        """The figures in ms."""
        rows = [["n", *(f"{curve.n:,}" for curve in self.curves)]]
        for share in _TABLE_SHARES:
            cells = [
                milliseconds(curve.at(share)) + MARK * _is_doubtful(curve.n, share) for curve in self.curves
            ]
            rows.append(["max" if share == 1 else f"p{share * 100:.4g}", *cells])
        marked = any(cell.endswith(MARK) for row in rows for cell in row)
        heads = ["", *(f"{curve.name}, ms" for curve in self.curves)]
        return Table(heads, rows, self.heading, footnote=FEW if marked else "")

    @property
    def panels(self) -> list[Panel]:
        in_ms = max(curve.seconds[-1] for curve in self.curves) < _IN_SECONDS
        factor, unit = (1e3, "ms") if in_ms else (1.0, "s")
        wide = any(_is_wide(curve) for curve in self.curves)
        x_axis: dict[str, Any] = {"type": "log"} if wide else {"rangemode": "tozero"}
        x_axis["title"] = {"text": unit + (" (log)" if wide else "")}
        words = " ".join(_curve_words(curve, wide=wide) for curve in self.curves)
        whole: list[dict[str, Any]] = []
        tail: list[dict[str, Any]] = []
        for curve in self.curves:
            points = [
                (share, seconds * factor)
                for share, seconds in zip(curve.shares, curve.seconds, strict=True)
                if seconds > 0 or not wide
            ]
            hover = "%{fullData.name}<br>%{y:.2%} within %{x:.4~r} " + unit
            whole += _traces(curve, points, hover)
            # Beyond the largest but one of the samples there is only a line to the largest.
            rare = [(share, x) for share, x in points if 1 - share >= 1 / curve.n]
            hover = "%{fullData.name}<br>%{customdata:.4~r} % take %{x:.4~r} " + unit + " or longer"
            tail += _traces(curve, rare, hover, tail=True)
        y_axis = {"title": {"text": "share of all"}, "tickformat": ".0%", "range": [0, 1.02]}
        tail_axis = {
            "type": "log", "title": {"text": "share that takes longer (log)"}, "tickvals": list(_TAIL_TICKS),
            "ticktext": list(_TAIL_TICKS.values()),
        }  # fmt: skip
        return [
            Panel("Share by latency", words, whole, {"xaxis": x_axis, "yaxis": y_axis}),
            Panel("How many take longer", words, tail, {"xaxis": x_axis, "yaxis": tail_axis}),
        ]


_DISTRIBUTIONS: Final[tuple[tuple[str, str, str, tuple[str, ...], tuple[str, ...]], ...]] = (
    ("first-token", "Time to first token",
     ("To the first content. From submit it is the server's time; from schedule it is what a user waits, whom"
      " neither a slow sender nor a slow server keeps from asking. Where the two part, the sender was late."),
     ("ttft", "ttft from schedule"), ()),
    ("between-tokens", "Time between tokens",
     ("TBC is each gap between chunks that carry output; 0 means that two came in one read. ITL is each gap"
      " between tokens, by the option named."), ("tbc", "itl"), ("ITL", "tokens")),
    ("end-to-end", "End to end latency", "To the last byte, of answers that ended well.",
     ("e2e", "e2e from schedule"), ()),
    ("user-idle", "User idle latency", "How long a reader waits with nothing to read, in an answer.",
     ("user_idle",), ("smooth goodput", "tokens")),
    ("lateness", "Dispatch lateness",
     "How long after its time a request left: the sender's own error, and not the server's.",
     ("dispatch_lateness",), ("sender",)),
)  # fmt: skip
_BASELINE_SIDES: Final = {"then": "dash", "now": "solid"}
_BASELINE: Final = ("ttft", "tpot", "tbc_max", "e2e", "elapsed")


def distributions_of(result: _Json) -> Iterator[Distribution]:
    """Those that the result has; empty curves are left out."""
    shares = at(result, "quantiles", "shares") or ()
    option = at(result, "metrics", "itl", "option")
    for key, heading, about, drawn, says in _DISTRIBUTIONS:
        curves = []
        for i, wanted in enumerate(drawn):
            metric, from_schedule, _ = wanted.partition(" from schedule")
            title = METRIC_TITLES.get(metric, "Dispatch lateness").replace("user", "User")
            figures: tuple[str, ...] = ("corrected" if from_schedule else "metrics", metric)
            place: tuple[str, ...] = ("quantiles", "schedule" if from_schedule else "submit", metric)
            if metric == "dispatch_lateness":
                figures, place = (metric,), ("quantiles", metric)
            elif f"{metric} from schedule" in drawn:
                title += " from schedule" if from_schedule else " from submit"
            elif metric == "itl" and option:
                title += f" ({option})"
            seconds, n = at(result, *place), at(result, *figures, "n") or 0
            if seconds and n and len(seconds) == len(shares):
                curves.append(Curve(title, n, shares, seconds, i, DASHES[i]))
        if curves:
            yield Distribution(key, heading, about, curves, says)


def baseline_distributions(baseline: _Json) -> Iterator[Distribution]:
    """Curves of rows when they were captured and now, of each figure that has pairs."""
    shares = at(baseline, "quantiles", "shares") or ()
    for name in _BASELINE:
        n, title = at(baseline, "pairs", name, "n") or 0, METRIC_TITLES[name]
        curves = []
        for colour, (side, dash) in enumerate(_BASELINE_SIDES.items()):
            seconds = at(baseline, "quantiles", side, name)
            if n and seconds and len(seconds) == len(shares):
                curves.append(Curve(f"{title} {side}", n, shares, seconds, colour, dash))
        if len(curves) == len(_BASELINE_SIDES):
            about = f"{title} of the same rows, as they were captured and as they were sent again."
            yield Distribution(f"baseline-{name.replace('_', '-')}", f"{title}, then and now", about, curves)


def _is_doubtful(n: int, share: float) -> bool:
    """Whether `n` samples are too few for a percentile; the largest value needs but one."""
    return 0 < share < 1 and not is_enough(n, share)


def _traces(
    curve: Curve, points: Sequence[tuple[float, float]], hover: str, *, tail: bool = False
) -> Iterator[dict[str, Any]]:
    """The line, and its part of too few samples as one of its own."""
    known = sum(not _is_doubtful(curve.n, share) for share, _ in points if share < 1)
    # The largest value is certain, the line to it is not.
    certain = points if known == sum(share < 1 for share, _ in points) else points[:known]
    parts = [(certain, curve.dash, 2.0)]
    if len(certain) < len(points):
        parts.append((points[max(0, known - 1) :], "dot", 1.5))
    for part, dash, width in parts:
        if part:
            # Rounded, without the noise of 1 - 0.999.
            trace: dict[str, Any] = {
                "type": "scatter", "mode": "lines", "name": escape(curve.name),
                "meta": {"line": curve.colour}, "x": [x for _, x in part],
                "y": [round(1 - share, 9) if tail else share for share, _ in part],
                "line": {"dash": dash, "width": width}, "hovertemplate": hover + "<extra></extra>",
            }  # fmt: skip
            if tail:
                trace["customdata"] = [round(100 * (1 - share), 9) for share, _ in part]
            yield trace


def _is_wide(curve: Curve) -> bool:
    pairs = ((curve.at(0.1), curve.at(0.99)), (curve.at(0.5), curve.seconds[-1]))
    return any(bool(low and high and high >= _WIDE * low > 0) for low, high in pairs)


def _curve_words(curve: Curve, *, wide: bool) -> str:
    figures = []
    for name in ("p50", "p99"):
        mark = " (too few)" if _is_doubtful(curve.n, SHARES[name]) else ""
        figures.append(f"{name} {milliseconds(curve.at(SHARES[name]))} ms{mark}")
    none = max((share for share, s in zip(curve.shares, curve.seconds, strict=True) if s <= 0), default=0)
    if wide and none:
        figures.append(f"{none * 100:.3g} % at 0, left of the axis")
    return f"{curve.name}: {', '.join(figures)}, n {curve.n:,}."


_POINTS_MAX: Final = 4_000
"""More than there are pixels."""
_ROWS_MAX: Final = 60
_HEADINGS: Final = {
    "host": ("This host over time", "Of the sender's processes, the server's where it runs here, and all."),
    "server": ("The server over time", "As the server reports on its /metrics."),
    "gpu": ("GPUs over time", "Of this host, whoever used them."),
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
    name: str
    t: Sequence[float]
    y: Sequence[float | None]
    colour: int | None
    dash: str = "solid"
    shape: str = "linear"
    """`hv`: a value is of the time that follows; `vh`: of the time before."""


@dataclass(frozen=True, slots=True)
class TimeChart:
    key: str
    heading: str
    about: str
    panels: list[Panel]
    table: Table | None
    sampled: str
    """How often, for its caption."""


def time_charts_of(result: _Json) -> Iterator[TimeChart]:
    """Requests, then what was sampled; empty series are left out."""
    series, timeline = at(result, "system", "series") or {}, result.get("timeline")
    end = at(result, "window", "seconds")
    load = _load_lines(result, series, end)
    if load:
        period = at(timeline, "period")
        sampled = f"counts of each {'second' if period == 1 else f'{number(period)} s'}" if period else ""
        yield TimeChart(
            "load", "Requests over time",
            "Asked is what the plan wanted in each second, sent what left in it: in an open loop they are the"
            " same, whatever the server does. In flight are the most at one moment.",
            [_panel(title, unit, lines, end) for title, unit, lines in load],
            _timeline_table("Requests over time", timeline) if timeline else None, sampled,
        )  # fmt: skip
    groups = _groups(series, end)
    for who, (heading, about) in _HEADINGS.items():
        held = [(title, unit, lines) for (of, title, unit), lines in groups.items() if of == who]
        if held:
            part = series.get("server" if who == "server" else "system") or {}
            sampled = f"{len(part.get('t') or ()):,} samples, one in {number(series.get('period'))} s"
            sampled += f", {part['dropped']:,} not kept" if part.get("dropped") else ""
            yield TimeChart(
                f"over-time-{who}", heading, about,
                [_panel(_panel_title(title, unit, lines), unit, lines, end) for title, unit, lines in held],
                _system_table(heading, at(result, "system", "summary") or {}, who), sampled,
            )  # fmt: skip


def _timeline_table(heading: str, timeline: _Json) -> Table:
    """Counts, added up over several periods where those are many."""
    names = [name for name in ("asked", "sent", "ended", "in_flight") if timeline.get(name) is not None]
    t, period = timeline["t"], timeline["period"]
    step = -(-len(t) // _ROWS_MAX)
    rows = []
    for i in range(0, len(t), step):
        parts = {name: timeline[name][i : i + step] for name in names}
        cells = [f"{max(v) if name == 'in_flight' else sum(v):,}" for name, v in parts.items()]
        rows.append([number(t[i]), *cells])
    heads = [f"{number(period * step)} s from, s", *(name.replace("_", " ") for name in names)]
    return Table(heads, rows, heading)


def _system_table(heading: str, summary: _Json, who: str) -> Table:
    """What was sampled in the window of the run; of counters how much they grew."""
    rows = []
    for part in ("system", "server"):
        for name, figures in (summary.get(part) or {}).items():
            if _who(part, name) != who or (not figures.get("n") and figures.get("total") is None):
                continue
            unit = figures["unit"]
            cells = [series_title(name), f"{figures['n']:,}" if figures.get("n") else "-"]
            if figures["kind"] in ("counter", "ratio"):
                rate = figures.get("per_second")
                cells += ["-" if rate is None else f"{number(rate)}/s", "-", "-", "-"]
                cells.append(series_value(figures.get("total"), unit))
            else:
                cells += [series_value(figures.get(f), unit) for f in ("mean", "p50", "p95", "max")] + ["-"]
            rows.append(cells)
    return Table(["", "n", "mean", "p50", "p95", "max", "in all"], rows, heading)


def _load_lines(result: _Json, series: _Json, end: float | None) -> list[tuple[str, str, list[TimeLine]]]:
    timeline, load = result.get("timeline") or {}, result.get("load") or {}
    period, t = timeline.get("period"), timeline.get("t")
    panels = []
    flying = []
    if period and t:
        ends = [*t, t[-1] + period]
        rates = []
        for name, colour, dash in (("asked", None, "dot"), ("sent", 0, "solid"), ("ended", 1, "dash")):
            if counts := timeline.get(name):
                y = [count / period for count in counts]
                title = name
                if name == "asked" and load.get("stopped") is None and sum(counts) < load.get("planned", 0):
                    title = "asked, of first turns"  # answers decide when the others are due
                rates.append(TimeLine(title, ends, [*y, y[-1]], colour, dash, "hv"))
        # The finer line of what was asked is drawn on top of what was sent.
        rates = [*rates[1:], *rates[:1]] if timeline.get("asked") else rates
        panels.append(("Requests per second", "per second", rates))
        if most := timeline.get("in_flight"):
            flying.append(TimeLine("in flight", ends, [*most, most[-1]], 0, "solid", "hv"))
    server = series.get("server") or {}
    for i, name in enumerate(("running", "waiting")):
        values = at(server, "series", name, "values")
        if values and any(v is not None for v in values):
            times, values = _within(server["t"], values, end, "linear")
            flying.append(TimeLine(f"{name}, says the server", times, values, i + 1, DASHES[i + 1]))
    if flying:
        panels.append(("In flight", "requests", flying))
    return panels


def _groups(series: _Json, end: float | None) -> dict[tuple[str, str, str], list[TimeLine]]:
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
            if any(v is not None for v in values):
                lines = groups.setdefault((_who(part, name), title, unit), [])
                y = [None if v is None else v * factor for v in values]
                i = len(lines)
                lines.append(
                    TimeLine(series_title(name), times, y, i % COLOURS, DASHES[i % len(DASHES)], shape)
                )
    return groups


def _within(
    t: Sequence[float], y: Sequence[float | None], end: float | None, shape: str
) -> tuple[Sequence[float], Sequence[float | None]]:
    """The samples of the run; of averages the one, too, that it ended in."""
    if end is None:
        return t, y
    first, last = bisect_left(t, 0), bisect_right(t, end) + (shape == "vh")
    return t[first:last], y[first:last]


def _panel_title(title: str, unit: str, lines: Sequence[TimeLine]) -> str:
    """A panel of one line has its name."""
    if len(lines) > 1:
        return title
    return lines[0].name if unit == "share" or unit in lines[0].name else f"{lines[0].name}, {unit}"


def _who(part: str, name: str) -> str:
    return "server" if part == "server" else "gpu" if name.startswith("gpu") else "host"


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
    """Return the growth of a counter per second, and the end of each period.

    A last sample soon after the one before it is merged with it: growth in so short a time says little.
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
    value = "%{y:.1%}" if unit == "share" else "%{y:.4~r} " + escape(unit)
    for line in lines:
        t, y = _thinned(line.t, line.y)
        data.append({
            "type": "scatter", "mode": "lines", "name": escape(line.name), "meta": {"line": line.colour},
            "x": t, "y": y, "line": {"dash": line.dash, "width": 2, "shape": line.shape},
            "hovertemplate": "%{fullData.name}<br>" + value + " at %{x:.4~r} s<extra></extra>",
        })  # fmt: skip
    x_axis: dict[str, Any] = {"title": {"text": "s"}} | ({"range": [0, end]} if end else {})
    y_axis: dict[str, Any] = {"rangemode": "tozero"}
    if unit == "share":
        y_axis["tickformat"] = ".0%"
        most = max((v for line in lines for v in line.y if v is not None), default=0)
        y_axis |= {"range": [0, 1.02]} if most > 0.5 else {}
    words = " ".join(_line_words(line, unit) for line in lines)
    legend = [LegendKey(line.name, line.colour, line.dash) for line in lines] if len(lines) > 1 else []
    return Panel(title, words, data, {"xaxis": x_axis, "yaxis": y_axis, "meta": {"time": True}}, legend)


def _line_words(line: TimeLine, unit: str) -> str:
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

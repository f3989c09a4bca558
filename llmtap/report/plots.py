"""Turn chart declarations in public JSON into plotly charts, and tables with the same figures.

For benchmarks and comparisons: `chart_figure` returns a `FigureBlock` of `document.py`, `chart_table` a
`Table`. Charts of replays and sweeps are made in `replay_charts.py` and `sweep_page.py`, with the dashes and
symbols from here.

A chart is `title`, `kind`, `x_title`, `y_title`, `series` (`name`, `x`, `y`, and `low` and `high` where there
are intervals), `marks` (places on the x axis that have a name), `log_x`, `log_y`. Series differ by colour and
by dash or pattern, for readers who cannot tell colours apart. Names were given by others, and plotly reads
tags, so they are escaped.
"""

from collections.abc import Iterator, Mapping, Sequence
from html import escape
from typing import Any, Final

from llmtap.report.document import FigureBlock, LegendKey, Panel, Table
from llmtap.report.page import COLOURS
from llmtap.report.values import number, plain_text

DASHES: Final = ("solid", "dash", "dot", "dashdot", "longdash", "longdashdot")
SYMBOLS: Final = ("circle", "square", "diamond", "triangle-up", "cross", "x")
ROWS_MAX: Final = 25
"""Of the table of a series; more are taken in even steps."""
_WIDE: Final = 20
"""From this ratio of largest to smallest an axis is logarithmic."""
_PATTERNS: Final = ("", "/", ".", "x", "-", "|", "+")
_BARS: Final = frozenset({"bars", "histogram"})
_Chart = Mapping[str, Any]


def is_wide(values: Sequence[Any]) -> bool:
    """Whether values are better told apart by their ratios than by their differences."""
    return bool(values) and all(v > 0 for v in values) and max(values) >= _WIDE * min(values)


def chart_figure(key: str, charts: Sequence[_Chart]) -> FigureBlock:
    """Charts beside each other, and all their figures as tables."""
    return FigureBlock(
        key, "", list(map(chart_panel, charts)), list(map(chart_table, charts)), captioned=False
    )


def chart_panel(chart: _Chart) -> Panel:
    data = [_trace(chart, one, i) for i, one in enumerate(chart["series"])]
    layout: dict[str, Any] = {"xaxis": _x_axis(chart), "yaxis": _y_axis(chart)}
    if chart["kind"] == "histogram":
        layout |= {"barmode": "overlay", "bargap": 0}
    elif chart["kind"] == "bars":
        layout |= {"barmode": "group", "bargap": 0.25}
    return Panel(chart["title"], _words(chart), [*data, *_marks(chart)], layout, _legend(chart))


def _legend(chart: _Chart) -> list[LegendKey]:
    """None where there is but one series."""
    series, bar = chart["series"], chart["kind"] in _BARS
    if len(series) < 2:
        return []
    return [
        LegendKey(one["name"], i % COLOURS, "solid" if bar else DASHES[i % len(DASHES)], bar)
        for i, one in enumerate(series)
    ]


def chart_table(chart: _Chart, rows_max: int = ROWS_MAX) -> Table:
    ends = [end for one in chart["series"] for end in (*(one.get("low") or ()), *(one.get("high") or ()))]
    intervals = any(end is not None for end in ends)
    rows = []
    for one in chart["series"]:
        low, high, n = one.get("low") or [], one.get("high") or [], len(one["x"])
        chosen = range(n) if n <= rows_max else [i * (n - 1) // (rows_max - 1) for i in range(rows_max)]
        for i in chosen:
            cells = [one["name"], plain_text(one["x"][i]), plain_text(one["y"][i])]
            if intervals:
                cells.append((interval_said(low[i], high[i]) if i < len(low) else "") or "-")
            rows.append(cells)
    heads = ["", chart["x_title"], chart["y_title"], *(["interval"] if intervals else [])]
    return Table(heads, rows, chart["title"])


def interval_said(low: float | None, high: float | None) -> str:
    """`48 to 52`; `48 or more` where an end is open, and nothing where both are."""
    if low is not None and high is not None:
        return f"{number(low)} to {number(high)}"
    if low is not None:
        return f"{number(low)} or more"
    return "" if high is None else f"{number(high)} or less"


def _trace(chart: _Chart, one: Mapping[str, Any], i: int) -> dict[str, Any]:
    kind = chart["kind"]
    trace: dict[str, Any] = {
        "name": escape(one["name"]), "meta": {"line": i % COLOURS}, "y": one["y"],
        "x": [escape(x) if isinstance(x, str) else x for x in one["x"]],
        "hovertemplate": _hover(chart, one),
    }  # fmt: skip
    if kind in _BARS:
        pattern = _PATTERNS[i % len(_PATTERNS)]
        trace |= {"type": "bar", "marker": {"pattern": {"shape": pattern}} if pattern else {}}
        if kind == "histogram" and len(chart["series"]) > 1:
            trace["opacity"] = 0.55
    else:
        mode = {"cdf": "lines", "steps": "lines", "points": "markers"}.get(kind, "lines+markers")
        line: dict[str, Any] = {"dash": DASHES[i % len(DASHES)], "width": 2}
        if kind == "steps":
            line["shape"] = "hv"
        trace |= {
            "type": "scatter", "mode": mode, "line": line, "cliponaxis": False,
            "marker": {"size": 7, "symbol": SYMBOLS[i % len(SYMBOLS)]},
        }  # fmt: skip
    if one.get("low"):
        trace["error_y"] = _interval(one)
    return trace


def _interval(one: Mapping[str, Any]) -> dict[str, Any]:
    """Bars from low to high; none to an end that is not known."""

    def off(ends: Sequence[float | None], sign: int) -> list[float]:
        pairs = zip(one["y"], ends, strict=True)
        return [0.0 if y is None or end is None else max(0.0, sign * (end - y)) for y, end in pairs]

    return {
        "type": "data", "symmetric": False, "array": off(one["high"], 1), "arrayminus": off(one["low"], -1),
        "thickness": 1.2, "width": 4,
    }  # fmt: skip


def _marks(chart: _Chart) -> Iterator[dict[str, Any]]:
    """A line across for each, its name beside it; names of several stand below each other."""
    marks = chart.get("marks") or ()
    ys = [y for one in chart["series"] for y in (*one["y"], *(one.get("high") or ())) if y is not None]
    xs = [x for one in chart["series"] for x in one["x"] if not isinstance(x, str)]
    if not marks or not ys or not xs:
        return
    log = chart.get("log_y") and min(ys) > 0
    low, high = (min(ys), max(ys)) if log else (min(0.0, *ys), max(ys))
    middle = (min(xs) * max(xs)) ** 0.5 if chart.get("log_x") and min(xs) > 0 else (min(xs) + max(xs)) / 2
    for i, mark in enumerate(marks):
        share = 1 - 0.09 * (i % 6)
        y = low * (high / low) ** share if log else low + (high - low) * share
        yield {
            "type": "scatter", "mode": "lines+text", "name": escape(mark["says"]), "meta": {"line": None},
            "x": [mark["x"]] * 3, "y": [low, y, high], "text": ["", escape(mark["says"]), ""],
            "textposition": "middle right" if mark["x"] <= middle else "middle left",
            "line": {"dash": "dot", "width": 1.5}, "hoverinfo": "skip", "cliponaxis": False,
        }  # fmt: skip


def _x_axis(chart: _Chart) -> dict[str, Any]:
    title = escape(chart["x_title"])
    xs = [x for one in chart["series"] for x in one["x"]]
    if any(isinstance(x, str) for x in xs):
        return {"type": "category", "title": {"text": title}}
    if chart.get("log_x") and all(x > 0 for x in xs):
        return {"type": "log", "title": {"text": f"{title} (log)"}}
    axis: dict[str, Any] = {"title": {"text": title}}
    # Values far from 0 and close together would be a wall at the right.
    if xs and chart["kind"] != "histogram" and min(xs) >= 0 and min(xs) < 0.5 * max(xs):
        axis["rangemode"] = "tozero"
    return axis


def _y_axis(chart: _Chart) -> dict[str, Any]:
    title = escape(chart["y_title"])
    ys = [y for one in chart["series"] for y in one["y"] if y is not None]
    if chart.get("log_y") and ys and min(ys) > 0:
        return {"type": "log", "title": {"text": f"{title} (log)"}}
    axis: dict[str, Any] = {"title": {"text": title}, "rangemode": "tozero"}
    if _in_shares(chart):
        axis["tickformat"] = ".0%" if max(ys, default=1.0) > 0.05 else ".2~%"
    if chart["kind"] == "cdf":
        axis["range"] = [0, 1.02]
    return axis


def _in_shares(chart: _Chart) -> bool:
    return bool(chart["kind"] == "cdf" or chart["y_title"].startswith("share"))


def _hover(chart: _Chart, one: Mapping[str, Any]) -> str:
    x = "%{x}" if any(isinstance(x, str) for x in one["x"]) else "%{x:.4~r}"
    y = "%{y:.2%}" if _in_shares(chart) else "%{y:.4~r}"
    x_title, y_title = escape(chart["x_title"]), escape(chart["y_title"])
    return f"{escape(one['name'])}<br>{x_title}: {x}<br>{y_title}: {y}<extra></extra>"


def _words(chart: _Chart) -> str:
    said = []
    for one in chart["series"]:
        points = [(y, x) for x, y in zip(one["x"], one["y"], strict=True) if y is not None]
        if not points:
            said.append(f"{one['name']}: nothing was measured.")
            continue
        (low, low_x), (high, high_x) = (pick(points, key=lambda point: point[0]) for pick in (min, max))
        if chart["kind"] == "cdf":
            said.append(f"{one['name']}: {', '.join(_reached(points))}.")
        elif chart["kind"] == "histogram":
            said.append(f"{one['name']}: most often about {plain_text(high_x)} ({high:.1%}).")
        else:
            lowest, highest = (
                f"{number(low)} (at {plain_text(low_x)})",
                f"{number(high)} (at {plain_text(high_x)})",
            )
            said.append(f"{one['name']}: {lowest} to {highest}.")
    said += [f"{mark['says']} at {number(mark['x'])}." for mark in chart.get("marks") or ()]
    return " ".join(said)


def _reached(points: Sequence[tuple[float, Any]]) -> Iterator[str]:
    """Where a rising share reaches a half, and 99 %."""
    for share, words in ((0.5, "half by"), (0.99, "99 % by")):
        reached = [x for y, x in points if y >= share]
        if reached:
            yield f"{words} {plain_text(reached[0])}"

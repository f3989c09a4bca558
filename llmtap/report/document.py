"""Document model of reports: blocks such as notes, tables and charts, sections, and a whole document.

Modules that report on a result (`replay.py`, `bench.py`, `sweep_page.py` and others) make them of public
JSON. `render.py` renders notes and tables for a terminal, and documents as Markdown and HTML. Texts are
plain, and renderers escape them, except texts for plotly (`Panel`), which are escaped before.

`chart_figure` and `chart_table` make a plotly chart and a table of a chart declared in public JSON, for
benchmarks and comparisons; charts of replays and sweeps are made in `replay_charts.py` and `sweep_page.py`. A
declaration has `title`, `kind`, `x_title`, `y_title`, `series` (`name`, `x`, `y`, and `low` and `high` where
there are intervals), `marks` (places on the x axis that have a name), `log_x`, `log_y`. Series differ by
colour and by dash or pattern, for readers who cannot tell colours apart.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from itertools import zip_longest
from typing import Any, ClassVar, Final

from llmtap.report.values import is_words, number, plain_text

_SENTENCE_CHARS_MIN: Final = 40
"""A longer cell with a space is a sentence and no figure."""
COLOURS: Final = 7
"""Number of colours in the style sheet, --c0 and on."""
DASHES: Final = ("solid", "dash", "dot", "dashdot", "longdash", "longdashdot")
SYMBOLS: Final = ("circle", "square", "diamond", "triangle-up", "cross", "x")
ROWS_MAX: Final = 25
"""Of the table of a series; more are taken in even steps."""
_WIDE: Final = 20
"""From this ratio of largest to smallest an axis is logarithmic."""
_PATTERNS: Final = ("", "/", ".", "x", "-", "|", "+")
_BARS: Final = frozenset({"bars", "histogram"})
_Chart = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Note:
    """A paragraph; in a terminal a line."""

    kind: ClassVar = "note"
    text: str
    style: str = ""
    """Of the terminal, as rich names styles."""
    lead: str = ""
    """Emphasized words before the text."""
    css: str = ""


@dataclass(frozen=True, slots=True)
class ItemList:
    kind: ClassVar = "items"
    items: Sequence[str]
    css: str = ""


@dataclass(frozen=True, slots=True)
class Table:
    """Rows of texts under heads; the first cell of a row names it."""

    kind: ClassVar = "table"
    heads: Sequence[str]
    rows: Sequence[Sequence[str]]
    caption: str = ""
    breaks: bool = False
    """Sentences in cells may be broken into lines on a page."""
    footnote: str = ""
    nowrap: bool = False
    """In a terminal lines are cut rather than wrapped."""
    label: str = ""
    """Of the region on a page that scrolls; default: the caption."""
    keys: int = 0
    """Number of leading columns that a terminal repeats if it has to divide the table."""
    styles: Mapping[str, str] = field(default_factory=dict)
    """Style of a terminal by the text of a cell, as rich names styles."""

    @property
    def classes(self) -> list[str]:
        """Attributes of each column on a page."""
        columns = list(zip_longest(*self.rows, fillvalue=""))
        found = [
            " class=said"
            if self.breaks and any(len(cell) >= _SENTENCE_CHARS_MIN and " " in cell for cell in column)
            else " class=words"
            if is_words(column)
            else ""
            for column in columns
        ]
        return found + [""] * (len(self.heads) - len(found))


@dataclass(frozen=True, slots=True)
class TableGroup:
    """Tables that scroll together, or stand below each other with `label` empty."""

    kind: ClassVar = "tables"
    tables: Sequence[Table]
    label: str = ""


@dataclass(frozen=True, slots=True)
class TermTable:
    kind: ClassVar = "terms"
    rows: Sequence[Sequence[str]]
    heads: Sequence[str] = ()
    marked: frozenset[int] = frozenset()
    """Rows that stand out."""


@dataclass(frozen=True, slots=True)
class Tile:
    title: str
    value: str
    about: str
    href: str = ""


@dataclass(frozen=True, slots=True)
class Tiles:
    kind: ClassVar = "tiles"
    tiles: Sequence[Tile]


@dataclass(frozen=True, slots=True)
class VerdictBox:
    kind: ClassVar = "verdict"
    good: bool
    lead: str
    text: str = ""
    items: Sequence[str] = ()
    caution: bool = False


@dataclass(frozen=True, slots=True)
class DetailsBlock:
    """Blocks that a page shows when asked."""

    kind: ClassVar = "details"
    summary: str
    blocks: "Sequence[Block]"


@dataclass(frozen=True, slots=True)
class Preformatted:
    kind: ClassVar = "pre"
    text: str


@dataclass(frozen=True, slots=True)
class Compliance:
    """Requirements, each with its status and evidence; with `tests`, those of several tests and a filter."""

    kind: ClassVar = "compliance"
    rows: Sequence[Mapping[str, Any]]
    caption: str = ""
    tests: Sequence[str] = ()

    @property
    def choices(self) -> dict[str, tuple[str, list[str]]]:
        """Title and values of each filter."""
        statuses = ("not met", "cannot tell", "met", "not applicable")
        found = {row["status"] for row in self.rows}
        return {
            "test": ("Test", list(dict.fromkeys(self.tests))),
            "level": ("Level", list(dict.fromkeys(row["level"] for row in self.rows))),
            "status": ("Status", [status for status in statuses if status in found]),
        }

    def css(self, row: Mapping[str, Any]) -> str:
        """Class of a status; an optional requirement that is not met is no failure."""
        optional = self.tests and row["level"] in ("MAY", "OPTIONAL", "procedure")
        bad = "unsure" if optional else "bad"
        return {"met": "good", "not met": bad}.get(row["status"], "unsure")


@dataclass(frozen=True, slots=True)
class LegendKey:
    """A name behind its line as it is drawn, or behind a piece of its bars."""

    name: str
    colour: int | None
    """Number in the page's palette; None: a line that belongs to no series."""
    dash: str = "solid"
    bar: bool = False


@dataclass(frozen=True, slots=True)
class Panel:
    """One plot: what plotly is given, and the same in words. Texts for plotly are escaped: it reads tags."""

    title: str
    words: str
    data: list[dict[str, Any]]
    layout: dict[str, Any]
    legend: Sequence[LegendKey] = ()
    of: Mapping[str, str] | None = None
    """Dimensions of a sweep that the whole panel is of, for the page's choices."""


@dataclass(frozen=True, slots=True)
class FigureBlock:
    kind: ClassVar = "figure"
    key: str
    heading: str
    panels: Sequence[Panel]
    tables: Sequence[Table]
    rests: Sequence[str] = ()
    """What the figures rest on: samples, load, window."""
    legend: Sequence[LegendKey] = ()
    captioned: bool = True
    """One caption for all panels; else each has its words below it."""
    lines_legend: bool = False
    """The legend has the lines of the sweep."""
    offered: bool = False
    """The legend has the line of the offered load."""

    @property
    def words(self) -> str:
        return " ".join(dict.fromkeys(panel.words for panel in self.panels))


Block = (
    Note | ItemList | Table | TableGroup | TermTable | Tiles | VerdictBox | DetailsBlock | Preformatted
    | Compliance | FigureBlock
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Section:
    key: str
    heading: str
    blocks: list[Block]
    level: int = 2
    """Of its heading in Markdown."""


@dataclass(frozen=True, slots=True)
class LineChoice:
    """A line of a sweep, which the reader of a page can hide."""

    label: str
    of: Mapping[str, str]
    colour: int
    dash: str
    symbol: str


@dataclass(frozen=True, slots=True)
class ReportDocument:
    title: str
    summary: Sequence[Block] = ()
    settings: Sequence[Block] = ()
    sections: Sequence[Section] = ()
    settings_linked: bool = True
    lines: Sequence[LineChoice] = ()
    choices: Sequence[tuple[str, str, Sequence[tuple[str, bool]]]] = field(default=())
    """Title, dimension, and its values with whether each is chosen at first."""

    def figures(self) -> Iterator[FigureBlock]:
        for section in self.sections:
            yield from (block for block in section.blocks if isinstance(block, FigureBlock))


def terms(rows: Sequence[Sequence[str]]) -> list[Block]:
    """A table of terms; nothing where there are none."""
    return [TermTable(rows)] if rows else []


# ---------------------------------------------------------------- charts declared in JSON


def is_wide(values: Sequence[Any]) -> bool:
    """Whether values are better told apart by their ratios than by their differences."""
    return bool(values) and all(v > 0 for v in values) and max(values) >= _WIDE * min(values)


def chart_figure(key: str, charts: Sequence[_Chart]) -> FigureBlock:
    """Charts beside each other, and all their figures as tables."""
    return FigureBlock(
        key, "", list(map(chart_panel, charts)), list(map(chart_table, charts)), captioned=False
    )


def chart_panel(chart: _Chart) -> Panel:
    kind, series = chart["kind"], chart["series"]
    layout: dict[str, Any] = {"xaxis": _x_axis(chart), "yaxis": _y_axis(chart)}
    if kind in _BARS:
        layout |= (
            {"barmode": "overlay", "bargap": 0}
            if kind == "histogram"
            else {"barmode": "group", "bargap": 0.25}
        )
    legend = [
        LegendKey(
            one["name"], i % COLOURS, "solid" if kind in _BARS else DASHES[i % len(DASHES)], kind in _BARS
        )
        for i, one in enumerate(series)
    ]
    data = [*(_trace(chart, one, i) for i, one in enumerate(series)), *_marks(chart)]
    return Panel(chart["title"], _words(chart), data, layout, legend if len(series) > 1 else [])


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
    above, below = (
        [
            0.0 if None in (y, end) else max(0.0, sign * (end - y))
            for y, end in zip(one["y"], ends, strict=True)
        ]
        for ends, sign in ((one["high"], 1), (one["low"], -1))
    )
    return {
        "type": "data", "symmetric": False, "array": above, "arrayminus": below, "thickness": 1.2, "width": 4,
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
        points = [(y, plain_text(x)) for x, y in zip(one["x"], one["y"], strict=True) if y is not None]
        if not points:
            said.append(f"{one['name']}: nothing was measured.")
            continue
        (low, low_x), (high, high_x) = (pick(points, key=lambda point: point[0]) for pick in (min, max))
        if chart["kind"] == "cdf":
            shares = ((0.5, "half by"), (0.99, "99 % by"))
            reached = [(words, [x for y, x in points if y >= share]) for share, words in shares]
            what = ", ".join(f"{words} {xs[0]}" for words, xs in reached if xs)
        elif chart["kind"] == "histogram":
            what = f"most often about {high_x} ({high:.1%})"
        else:
            what = f"{number(low)} (at {low_x}) to {number(high)} (at {high_x})"
        said.append(f"{one['name']}: {what}.")
    said += [f"{mark['says']} at {number(mark['x'])}." for mark in chart.get("marks") or ()]
    return " ".join(said)

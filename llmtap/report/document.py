"""Document model of reports: blocks such as notes, tables and charts, sections, and a whole document.

Modules that report on a result (`replay.py`, `bench.py`, `sweep_page.py` and others) make these blocks from
public JSON. `render.py` renders notes and tables for a terminal, and documents as Markdown and HTML. Texts
are plain, and renderers escape them. `plot.js` draws each `Plot` on a page.

The public JSON of benchmarks and comparisons declares charts; `chart_figure` and `chart_table` make plots and
tables from them. `replay_charts.py` and `sweep_page.py` make the charts of replays and sweeps. A declaration
has `title`, `kind`, `x_title`, `y_title`, `series` (`name`, `x`, `y`, and `low` and `high` if it has
intervals), `marks` (named places on the x axis), `log_x`, `log_y`. Series differ by colour and also by dash
or pattern, for readers who cannot distinguish the colours.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any, ClassVar, Final, Literal

import msgspec

from llmtap.report.values import is_words, number, plain_text

_SENTENCE_CHARS_MIN: Final = 40
"""Length from which a cell with a space counts as a sentence, which a page can break into lines."""
COLOURS: Final = 7
"""Number of colours for series in the style sheet (--c0, --c1, ...); more series repeat the colours."""
DASHES: Final = ("solid", "dash", "dot", "dashdot", "longdash", "longdashdot")
SYMBOLS: Final = ("circle", "square", "diamond", "triangle", "cross", "x")
ROWS_MAX: Final = 25
"""Maximum number of rows of a series in a table. If there are more points, evenly spaced ones are shown."""
_LOG_AXIS_RATIO: Final = 20
"""An axis is logarithmic from this ratio of its largest to its smallest value, so that both are visible."""
_HATCHES: Final = ("", "/", ".", "x", "-", "|", "+")
SHARES_RANGE: Final = (0, 1.02)
"""Range of an axis of shares. It ends above 1, so that a line at 1 is visible."""
_BARS: Final = frozenset({"bars", "histogram"})
"""Kinds of charts that have bars instead of lines."""
_Chart = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Note:
    """A paragraph of text. In a terminal it is one line."""

    kind: ClassVar = "note"
    text: str
    style: str = ""
    """Style of the line in a terminal, as a name of the package rich."""
    lead: str = ""
    """Emphasized words before the text."""
    css: str = ""
    """CSS class of the paragraph on a page."""


@dataclass(frozen=True, slots=True)
class ItemList:
    """A list of texts with a bullet before each."""

    kind: ClassVar = "items"
    items: Sequence[str]
    css: str = ""
    """CSS class of the list on a page."""


@dataclass(frozen=True, slots=True)
class Table:
    """Rows of texts under heads; the first cell of a row names it."""

    kind: ClassVar = "table"
    heads: Sequence[str]
    rows: Sequence[Sequence[str]]
    caption: str = ""
    breaks: bool = False
    """Whether a page can break sentences in cells into lines."""
    footnote: str = ""
    nowrap: bool = False
    """Whether a terminal cuts long lines instead of wrapping them."""
    label: str = ""
    """Accessible name of the table's region on a page, which scrolls; default: the caption."""
    key_columns: int = 0
    """Number of leading columns that each part repeats, if the table is divided for a narrow terminal."""
    styles: Mapping[str, str] = field(default_factory=dict)
    """Style of a cell in a terminal (a name of the package rich), by the text of the cell."""

    @property
    def classes(self) -> list[str]:
        """The `class` attribute of each column on a page, with a leading space; empty for figures."""
        columns = list(zip_longest(*self.rows, fillvalue=""))
        attributes = [
            " class=text"
            if self.breaks and any(len(cell) >= _SENTENCE_CHARS_MIN and " " in cell for cell in column)
            else " class=words"
            if is_words(column)
            else ""
            for column in columns
        ]
        return attributes + [""] * (len(self.heads) - len(attributes))


@dataclass(frozen=True, slots=True)
class TableGroup:
    """Tables in one region of a page that scrolls, or in separate regions if `label` is empty."""

    kind: ClassVar = "tables"
    tables: Sequence[Table]
    label: str = ""


@dataclass(frozen=True, slots=True)
class TermTable:
    """Rows of a term and its meaning or value."""

    kind: ClassVar = "terms"
    rows: Sequence[Sequence[str]]
    heads: Sequence[str] = ()
    bold_rows: frozenset[int] = frozenset()
    """Indices of rows that are set in bold."""


@dataclass(frozen=True, slots=True)
class Tile:
    """A main figure with its title."""

    title: str
    value: str
    about: str
    """Small text below the value."""
    href: str = ""
    """Key of the section to which the title is a link."""


@dataclass(frozen=True, slots=True)
class Tiles:
    """Main figures, side by side. A terminal does not show them."""

    kind: ClassVar = "tiles"
    tiles: Sequence[Tile]


@dataclass(frozen=True, slots=True)
class VerdictBox:
    """The verdict on a result, with reasons. Its colour depends on `good` and `caution`."""

    kind: ClassVar = "verdict"
    good: bool
    """Whether the result is valid, which sets the colour."""
    lead: str
    """Emphasized words before the text."""
    text: str = ""
    items: Sequence[str] = ()
    """Reasons for the verdict."""
    caution: bool = False
    """Whether the result is good with reservations."""


@dataclass(frozen=True, slots=True)
class DetailsBlock:
    """Blocks that a page shows after a click on their summary."""

    kind: ClassVar = "details"
    summary: str
    blocks: "Sequence[Block]"


@dataclass(frozen=True, slots=True)
class Preformatted:
    """Text that is shown unchanged, such as a command line."""

    kind: ClassVar = "pre"
    text: str


@dataclass(frozen=True, slots=True)
class Compliance:
    """Requirements, each with its status and evidence.

    `tests`: the test of each row, if there are several tests; the page then has filters.
    """

    kind: ClassVar = "compliance"
    rows: Sequence[Mapping[str, Any]]
    caption: str = ""
    tests: Sequence[str] = ()

    @property
    def choices(self) -> dict[str, tuple[str, list[str]]]:
        """Title and values of each filter of the page, by the filter's name."""
        statuses = ("not met", "cannot tell", "met", "not applicable")
        present = {row["status"] for row in self.rows}
        return {
            "test": ("Test", list(dict.fromkeys(self.tests))),
            "level": ("Level", list(dict.fromkeys(row["level"] for row in self.rows))),
            "status": ("Status", [status for status in statuses if status in present]),
        }

    def css(self, row: Mapping[str, Any]) -> str:
        """Return the CSS class of a row's status. An optional requirement that is not met is not "bad"."""
        optional = self.tests and row["level"] in ("MAY", "OPTIONAL", "procedure")
        bad = "unsure" if optional else "bad"
        return {"met": "good", "not met": bad}.get(row["status"], "unsure")


def colour_name(i: int) -> str:
    """Return the name of the i-th colour in the page's style sheet."""
    return f"c{i % COLOURS}"


class Look(msgspec.Struct, frozen=True, omit_defaults=True):
    """Style of a line or of bars, in the plot and in its legend."""

    ink: str
    """Name of a colour in the page's style sheet."""
    dash: str = "solid"
    symbol: str = ""
    """Symbol of the points of the line, one of SYMBOLS; empty: none."""
    bar: bool = False
    hatch: str = ""
    """Pattern of bars, as Plotly names it; empty: none."""


class LegendKey(msgspec.Struct, frozen=True):
    """A series in the legend of a plot."""

    name: str
    look: Look


class Axis(msgspec.Struct, frozen=True, omit_defaults=True):
    """An axis of a plot."""

    title: str = ""
    kind: Literal["linear", "log", "category"] = "linear"
    zero: bool = False
    """Whether the axis begins at 0."""
    range: tuple[float, float] | None = None
    """Ends of the axis; None: the smallest and the largest value."""
    share: bool = False
    """Whether values are shares, which are shown in percent."""


class PlotSeries(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """A line, points or bars of a plot."""

    name: str
    x: Sequence[Any]
    y: Sequence[float | None]
    ink: str
    """Name of a colour in the page's style sheet."""
    line: int | None = None
    """Index of the line of a sweep to which the series belongs. A reader of the page can hide the line."""
    dash: str = "solid"
    step: Literal["", "hv", "vh"] = ""
    """Form of steps, if any. `hv`: a value applies from its x to the next x; `vh`: from the previous x."""
    symbols: Sequence[str] | None = None
    """Symbol of each point, or one symbol for all points."""
    scattered: bool = False
    """Whether to draw points without a line."""
    bars: bool = False
    """Whether the points are drawn as bars."""
    hatch: str = ""
    """Pattern that fills the bars; empty: none."""
    low: Sequence[float | None] | None = None
    """Lower ends of intervals around `y`; None: there are none."""
    high: Sequence[float | None] | None = None
    """Upper ends of the intervals."""
    texts: Sequence[str] | None = None
    """Text next to the mouse pointer for each point; default: the name, and `hover` of the plot."""
    silent: bool = False
    """Whether no text is shown next to the mouse pointer."""


class Mark(msgspec.Struct, frozen=True):
    """A named place on the x axis."""

    x: float
    text: str


class Plot(msgspec.Struct, frozen=True, omit_defaults=True):
    """Data of a chart, which `plot.js` draws."""

    series: list[PlotSeries]
    x: Axis
    y: Axis
    hover: str = ""
    """Template of the text next to the mouse pointer for a point, with `{x}` and `{y}`."""
    marks: list[Mark] = []
    overlay: bool = False
    """Whether the bars of several series are drawn over each other; default: next to each other."""
    timed: bool = False
    """Whether the x axis is the time of the run. If a reader zooms into one such plot, all of them zoom."""


@dataclass(frozen=True, slots=True)
class Panel:
    """A plot with its title, and the same figures in words for screen readers and captions."""

    title: str
    words: str
    """The figures in words, for screen readers."""
    plot: Plot
    legend: Sequence[LegendKey] = ()
    common_settings: Mapping[str, str] | None = None
    """Settings of a sweep that all lines of the panel have in common. The page hides the panel if the reader
    chooses another value of such a setting."""


@dataclass(frozen=True, slots=True)
class FigureBlock:
    """Plots next to each other with a caption, and their values as tables."""

    kind: ClassVar = "figure"
    key: str
    """Id of the figure on a page. The id of a plot is this key and the index of its panel."""
    heading: str
    panels: Sequence[Panel]
    tables: Sequence[Table]
    basis: Sequence[str] = ()
    """Parts of the caption that name the basis of the figures: samples, load, window."""
    legend: Sequence[LegendKey] = ()
    captioned: bool = True
    """Whether all panels have one caption; if False, the words of each panel are written below it."""
    lines_legend: bool = False
    """Whether the lines of the sweep are added to the legend."""

    @property
    def words(self) -> str:
        """The texts of all panels, each once, for the common caption."""
        return " ".join(dict.fromkeys(panel.words for panel in self.panels))


Block = (
    Note
    | ItemList
    | Table
    | TableGroup
    | TermTable
    | Tiles
    | VerdictBox
    | DetailsBlock
    | Preformatted
    | Compliance
    | FigureBlock
)


@dataclass(frozen=True, slots=True)
class Section:
    """A part of a report under a heading. `key` is its id on a page."""

    key: str
    """Id of the section on a page, for links."""
    heading: str
    blocks: list[Block]
    level: int = 2
    """Level of the heading in Markdown; 2 is `##`."""


@dataclass(frozen=True, slots=True)
class LineChoice:
    """A line of a sweep, which the reader of a page can hide."""

    name: str
    settings: Mapping[str, str]
    """Values of the settings in which the lines of the sweep differ, by name."""
    look: Look


@dataclass(frozen=True, slots=True)
class ReportDocument:
    """A whole report, which `render.py` renders as Markdown or as an HTML page."""

    title: str
    summary: Sequence[Block] = ()
    settings: Sequence[Block] = ()
    """Blocks about the load and the software; they are a separate section of a page."""
    sections: Sequence[Section] = ()
    """Parts of the page, each with a heading."""
    settings_linked: bool = True
    """Whether the navigation of the page has a link to `settings`."""
    lines: Sequence[LineChoice] = ()
    """Lines of a sweep, which all its plots have."""
    choices: Sequence[tuple[str, str, Sequence[tuple[str, bool]]]] = field(default=())
    """Menus of a sweep's page: title, name of the dimension, and its values, each with whether it is selected
    at first."""

    def figures(self) -> Iterator[FigureBlock]:
        """Yield all figures of the sections."""
        for section in self.sections:
            yield from (block for block in section.blocks if isinstance(block, FigureBlock))


def term_blocks(rows: Sequence[Sequence[str]]) -> list[Block]:
    """Return a table of terms, or no block if there are no rows."""
    return [TermTable(rows)] if rows else []


# ---------------------------------------------------------------- charts declared in JSON


def is_wide(values: Sequence[Any]) -> bool:
    """Return whether the values need a logarithmic axis: all are positive, and largest / smallest >= 20."""
    return bool(values) and all(v > 0 for v in values) and max(values) >= _LOG_AXIS_RATIO * min(values)


def chart_figure(key: str, charts: Sequence[_Chart]) -> FigureBlock:
    """Return a figure with the declared charts next to each other, and their values as tables."""
    return FigureBlock(
        key, "", list(map(chart_panel, charts)), list(map(chart_table, charts)), captioned=False
    )


def chart_panel(chart: _Chart) -> Panel:
    """Return the panel of a declared chart, with a legend if it has several series."""
    series = [_chart_series(chart, one, i) for i, one in enumerate(chart["series"])]
    legend = [LegendKey(one.name, Look(one.ink, one.dash, bar=one.bars, hatch=one.hatch)) for one in series]
    hover = f"{chart['x_title']}: {{x}}\n{chart['y_title']}: {{y}}".removeprefix(": ")
    plot = Plot(
        series,
        _x_axis(chart),
        _y_axis(chart),
        hover,
        [Mark(mark["x"], mark["says"]) for mark in chart.get("marks") or ()],
        overlay=chart["kind"] == "histogram",
    )
    return Panel(chart["title"], _chart_text(chart), plot, legend if len(series) > 1 else [])


def chart_table(chart: _Chart, rows_max: int = ROWS_MAX) -> Table:
    """Return the values of a declared chart, with at most `rows_max` points of each series."""
    ends = [end for one in chart["series"] for end in (*(one.get("low") or ()), *(one.get("high") or ()))]
    intervals = any(end is not None for end in ends)
    rows = []
    for series in chart["series"]:
        low, high, n = series.get("low") or [], series.get("high") or [], len(series["x"])
        chosen = range(n) if n <= rows_max else [i * (n - 1) // (rows_max - 1) for i in range(rows_max)]
        for i in chosen:
            cells = [series["name"], plain_text(series["x"][i]), plain_text(series["y"][i])]
            if intervals:
                cells.append((interval_text(low[i], high[i]) if i < len(low) else "") or "-")
            rows.append(cells)
    heads = ["", chart["x_title"], chart["y_title"], *(["interval"] if intervals else [])]
    return Table(heads, rows, chart["title"])


def interval_text(low: float | None, high: float | None) -> str:
    """Return `48 to 52`, `48 or more` if one end is unknown (None), or "" if both ends are unknown."""
    if low is not None and high is not None:
        return f"{number(low)} to {number(high)}"
    if low is not None:
        return f"{number(low)} or more"
    return "" if high is None else f"{number(high)} or less"


def _chart_series(chart: _Chart, series: Mapping[str, Any], i: int) -> PlotSeries:
    kind = chart["kind"]
    look: dict[str, Any] = {"dash": DASHES[i % len(DASHES)], "symbols": [SYMBOLS[i % len(SYMBOLS)]]}
    if kind in _BARS:
        look = {"bars": True, "hatch": _HATCHES[i % len(_HATCHES)]}
    elif kind in ("cdf", "steps"):
        look["symbols"] = None
    return PlotSeries(
        name=series["name"],
        x=series["x"],
        y=series["y"],
        ink=colour_name(i),
        step="hv" if kind == "steps" else "",
        scattered=kind == "points",
        low=series.get("low") or None,
        high=series.get("high") or None,
        **look,
    )


def _x_axis(chart: _Chart) -> Axis:
    """Return the x axis that fits the values of a chart."""
    title = chart["x_title"]
    xs = [x for one in chart["series"] for x in one["x"]]
    if any(isinstance(x, str) for x in xs):
        return Axis(title, "category")
    if chart.get("log_x") and all(x > 0 for x in xs):
        return Axis(f"{title} (log)", "log")
    # Begin the axis at 0, unless this would draw all values at its right edge.
    zero = bool(xs) and chart["kind"] != "histogram" and min(xs) >= 0 and min(xs) < 0.5 * max(xs)
    return Axis(title, zero=zero)


def _y_axis(chart: _Chart) -> Axis:
    title = chart["y_title"]
    ys = [y for one in chart["series"] for y in one["y"] if y is not None]
    share = chart["kind"] == "cdf" or chart["y_title"].startswith("share")
    if chart.get("log_y") and ys and min(ys) > 0:
        return Axis(f"{title} (log)", "log", share=share)
    return Axis(title, zero=True, share=share, range=SHARES_RANGE if chart["kind"] == "cdf" else None)


def _chart_text(chart: _Chart) -> str:
    sentences = []
    for series in chart["series"]:
        points = [(y, plain_text(x)) for x, y in zip(series["x"], series["y"], strict=True) if y is not None]
        if not points:
            sentences.append(f"{series['name']}: nothing was measured.")
            continue
        (low, low_x), (high, high_x) = (pick(points, key=lambda point: point[0]) for pick in (min, max))
        if chart["kind"] == "cdf":
            shares = ((0.5, "half by"), (0.99, "99 % by"))
            reached = [(words, [x for y, x in points if y >= share]) for share, words in shares]
            text = ", ".join(f"{words} {xs[0]}" for words, xs in reached if xs)
        elif chart["kind"] == "histogram":
            text = f"most often about {high_x} ({high:.1%})"
        else:
            text = f"{number(low)} (at {low_x}) to {number(high)} (at {high_x})"
        sentences.append(f"{series['name']}: {text}.")
    sentences += [f"{mark['says']} at {number(mark['x'])}." for mark in chart.get("marks") or ()]
    return " ".join(sentences)

"""Document model of reports: blocks such as notes, tables and charts, sections, and a whole document.

Modules that report on a result (`replay.py`, `bench.py`, `sweep_page.py` and others) make them of public
JSON. `render.py` renders notes and tables for a terminal and documents as Markdown, `page.py` renders
documents as HTML. Texts are plain, and renderers escape them, except texts for plotly (`Panel`), which are
escaped before.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any, ClassVar

from llmtap.report.values import is_words

_SENTENCE_CHARS_MIN = 40
"""A longer cell with a space is a sentence and no figure."""


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

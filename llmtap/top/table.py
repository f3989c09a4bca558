"""A table as text: columns, rows, what they sort by. Pure: what a terminal makes of it is somebody else's.

Names, models and all else that passed with traffic was written by others: `shown` makes it harmless, and what
draws a Table draws its texts as they are, never as markup.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Final

from llmtap.report.values import figure_text, harmless, milliseconds, number

__all__ = [
    "NOTHING", "Cell", "Column", "Row", "Table", "at", "clock_time", "count_cell", "figure_cell", "filtered",
    "fitting", "ms_cell", "name_cell", "name_chars", "number_cell", "ordered", "share_cell", "shown",
    "text_cell", "unique",
]  # fmt: skip

NOTHING: Final = "-"
NAME_CHARS: Final = (14, 32)
"""Of a name in a table, by the width of the screen."""
TEXT_CELLS_MIN: Final = 12
"""A text may be shown in part where so much of it is seen."""


@dataclass(frozen=True, slots=True)
class Column:
    """`title` may have two lines."""

    key: str
    title: str
    number: bool = True
    """Stands right, and sorts from the largest."""


@dataclass(frozen=True, slots=True)
class Cell:
    text: str
    value: float | str | None = None
    """What it sorts by; None is last either way."""


@dataclass(frozen=True, slots=True)
class Row:
    key: str
    """Of this row in this table, to find it again in the next one."""
    cells: tuple[Cell, ...]


@dataclass(frozen=True, slots=True)
class Table:
    columns: tuple[Column, ...]
    rows: list[Row] = field(default_factory=list)
    notes: tuple[str, ...] = ()
    """What has to be known to read it."""


def ordered(rows: Iterable[Row], column: int, *, largest_first: bool) -> list[Row]:
    """By one column; what has no value is last, and equals keep their order."""
    known = [row for row in rows if row.cells[column].value is not None]
    rest = [row for row in rows if row.cells[column].value is None]
    known.sort(key=lambda row: _rank(row.cells[column].value), reverse=largest_first)
    return known + rest


def _rank(value: float | str | None) -> tuple[float, str]:
    return (0.0, value.casefold()) if isinstance(value, str) else (value or 0.0, "")


def filtered(rows: Iterable[Row], text: str) -> list[Row]:
    """Those that have the text in some cell, capitals or not."""
    wanted = text.casefold()
    return [row for row in rows if any(wanted in cell.text.casefold() for cell in row.cells)]


def unique(rows: Iterable[Row]) -> list[Row]:
    """The first of each key."""
    found: dict[str, Row] = {}
    for row in rows:
        found.setdefault(row.key, row)
    return list(found.values())


def fitting(columns: Sequence[Column], widths: Sequence[int], room: int, first: int = 1) -> dict[int, int]:
    """By place the width of each column that fits: the one that names the rows, and those from `first` on.

    A column of figures is shown whole or not at all; one of texts, as the last, also in part.
    """
    found = {0: min(widths[0], room)} if columns else {}
    left = room - sum(found.values())
    for place in range(max(1, first), len(columns)):
        if widths[place] > left:
            if not columns[place].number and left >= TEXT_CELLS_MIN:
                found[place] = left
            break
        found[place] = widths[place]
        left -= widths[place]
    return found


# ---------------------------------------------------------------- texts


def shown(value: object, chars: int = NAME_CHARS[1]) -> str:
    """A text of others: nothing in it moves a cursor, and it is no longer than `chars`."""
    if value is None or value == "":
        return NOTHING
    text = harmless(str(value)[: 4 * chars])
    return text if len(text) <= chars else text[: chars - 1] + "…"


def name_chars(width: int) -> int:
    """How much of a name fits, on a screen that wide."""
    return min(NAME_CHARS[1], max(NAME_CHARS[0], width // 6))


def clock_time(wall_s: float) -> str:
    """A moment of the wall clock, as the clock on the wall shows it."""
    return datetime.fromtimestamp(wall_s, UTC).astimezone().strftime("%H:%M:%S")


def name_cell(value: object, chars: int = NAME_CHARS[1]) -> Cell:
    return Cell(shown(value, chars), None if value is None else str(value))


def text_cell(text: str) -> Cell:
    """A text of our own."""
    return Cell(text, text)


def count_cell(value: object) -> Cell:
    return Cell(f"{value:,.0f}", value) if isinstance(value, int | float) else Cell(NOTHING)


def number_cell(value: object) -> Cell:
    """Three significant digits."""
    return Cell(number(value, 3), value) if isinstance(value, int | float) else Cell(NOTHING)


def share_cell(value: object) -> Cell:
    return Cell(f"{value:.1%}", value) if isinstance(value, int | float) else Cell(NOTHING)


def ms_cell(seconds: object) -> Cell:
    """Seconds as milliseconds."""
    return Cell(milliseconds(seconds), seconds) if isinstance(seconds, int | float) else Cell(NOTHING)


def figure_cell(figures: object, statistic: str) -> Cell:
    """A percentile in ms, marked where it rests on too few samples."""
    value = at(figures, statistic)
    if not isinstance(figures, Mapping) or not isinstance(value, int | float):
        return Cell(NOTHING)
    return Cell(figure_text(figures, statistic), value)


def at(document: object, *path: str) -> Any:
    """What a document holds there; None where it does not, as of an older tap."""
    for name in path:
        if not isinstance(document, Mapping):
            return None
        document = document.get(name)
    return document

"""A Table in a DataTable of textual: its texts as they are, its cursor on the row where it was."""

from collections.abc import Sequence
from typing import Final

from rich.cells import cell_len
from rich.text import Text
from textual.coordinate import Coordinate
from textual.widgets import DataTable

from llmtap.top.table import Column, Row, Table, filtered, ordered

__all__ = ["ROWS_MAX", "TextTable"]

ROWS_MAX: Final = 200
"""Drawn at once: many screens; what is beyond is counted, and the filter finds it."""


class TextTable(DataTable[Text]):
    """Shows a Table by the order and filter that were chosen; keeps both while tables come and go."""

    DEFAULT_CSS = """
    TextTable { height: 1fr; overflow-x: auto; }
    TextTable > .datatable--cursor { text-style: reverse; }
    TextTable > .datatable--header { text-style: bold; }
    """

    def __init__(self, id_: str, rows_max: int = ROWS_MAX) -> None:
        super().__init__(
            id=id_,
            cursor_type="row",
            header_height=2,
            cell_padding=0,
            show_row_labels=False,
            zebra_stripes=True,
        )
        self.rows_max = rows_max
        self.table = Table(())
        self._titles: tuple[str, ...] = ()
        self._widths: tuple[int, ...] = ()
        self._drawn: list[Row] = []
        self.order: str | None = None
        """Key of the column that rows are sorted by; None: as they come."""
        self.largest_first = True
        self.wanted = ""
        """What some cell of each row has in it."""
        self.matching = 0

    def show(self, table: Table) -> None:
        """A newer table."""
        self.table = table
        self.redraw()

    def redraw(self) -> None:
        """The same table, after order or filter changed."""
        columns, rows = self.table.columns, filtered(self.table.rows, self.wanted)
        place = next((i for i, column in enumerate(columns) if column.key == self.order), None)
        if place is not None:
            rows = ordered(rows, place, largest_first=self.largest_first)
        self.matching = len(rows)
        rows = rows[: self.rows_max]
        titles = tuple(self._title(column) for column in columns)
        widths = self._widths_of(titles, rows)
        if titles == self._titles:
            # What has become shorter leaves its room: columns that breathe can't be read.
            widths = tuple(map(max, widths, self._widths))
        alike = (titles, widths) == (self._titles, self._widths)
        if alike and [row.key for row in rows] == [row.key for row in self._drawn]:
            self._renew(rows)
        else:
            self._draw_anew(titles, widths, rows)
        self._titles, self._widths, self._drawn = titles, widths, rows

    def _widths_of(self, titles: Sequence[str], rows: Sequence[Row]) -> tuple[int, ...]:
        """Of each column, in cells of the terminal, with the space that keeps it apart."""
        widths = []
        for place, title in enumerate(titles):
            texts = [*title.split("\n"), *(row.cells[place].text for row in rows)]
            widths.append(max(map(cell_len, texts)) + bool(place))
        return tuple(widths)

    def _renew(self, rows: list[Row]) -> None:
        """The same lines: only what changed is drawn, and nothing moves."""
        for line, (row, drawn) in enumerate(zip(rows, self._drawn, strict=True)):
            for place, (cell, before) in enumerate(zip(row.cells, drawn.cells, strict=True)):
                if cell.text != before.text:
                    text = _text(cell.text, self.table.columns[place], place)
                    self.update_cell_at(Coordinate(line, place), text)

    def _draw_anew(self, titles: Sequence[str], widths: Sequence[int], rows: Sequence[Row]) -> None:
        columns = self.table.columns
        at_key, scroll_x, scroll_y = self.key_under_cursor(), self.scroll_x, self.scroll_y
        self.clear(columns=True)
        for i, column in enumerate(columns):
            self.add_column(_text(titles[i], column, i), width=widths[i], key=column.key)
        for row in rows:
            texts = [_text(cell.text, columns[i], i) for i, cell in enumerate(row.cells)]
            self.add_row(*texts, key=row.key)
        place = next((i for i, row in enumerate(rows) if row.key == at_key), None)
        if place is not None:
            self.move_cursor(row=place, animate=False, scroll=False)
            self.scroll_to(scroll_x, scroll_y, animate=False)

    def next_order(self) -> None:
        """Sorts by the next column; behind the last one as rows come."""
        keys: list[str | None] = [None, *(column.key for column in self.table.columns)]
        at = keys.index(self.order) if self.order in keys else 0
        self.sort_by(keys[(at + 1) % len(keys)])

    def sort_by(self, key: str | None) -> None:
        """By that column: numbers from the largest, texts from their beginning; again: the other way."""
        if key is not None and key == self.order:
            self.largest_first = not self.largest_first
        else:
            column = next((c for c in self.table.columns if c.key == key), None)
            self.order, self.largest_first = key, column is None or column.number
        self.redraw()

    def turn(self) -> None:
        """The other way round."""
        self.largest_first = not self.largest_first
        self.redraw()

    def key_under_cursor(self) -> str | None:
        """Of the row where the cursor is; None without rows."""
        if not self.row_count or not 0 <= self.cursor_row < self.row_count:
            return None
        return self.ordered_rows[self.cursor_row].key.value

    def _title(self, column: Column) -> str:
        if column.key != self.order:
            return column.title
        return f"{column.title}{'▼' if self.largest_first else '▲'}"


def _text(text: str, column: Column, place: int) -> Text:
    """With the space that keeps columns apart; never markup."""
    apart = " " if place else ""
    lines = "\n".join(apart + line for line in text.split("\n"))
    return Text(lines, justify="right" if column.number else "left", no_wrap=True, end="")

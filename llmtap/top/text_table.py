"""Table widget: shows a ViewTable in textual's DataTable, sorted and filtered.

The cursor stays on its row when the table changes; on the first line it follows the newest row.
"""

from collections.abc import Sequence
from typing import ClassVar, Final

from rich.cells import cell_len, set_cell_size
from rich.text import Text
from textual import events
from textual.binding import Binding, BindingType
from textual.coordinate import Coordinate
from textual.widgets import DataTable

from llmtap.top.table import Cell, Column, Row, ViewTable, filtered, fitting, ordered

ROWS_MAX: Final = 200
"""Maximum number of rows drawn; further ones are counted, and the filter finds them."""
_ASIDE: Final = ("←", "→")


class TextTable(DataTable[Text]):
    """Table in the chosen order and filter, which stay while tables change.

    On the first row the cursor follows the newest row; elsewhere it stays on its row.
    """

    DEFAULT_CSS = """
    TextTable { height: 1fr; overflow-x: hidden; scrollbar-size-vertical: 1; scrollbar-gutter: stable; }
    TextTable > .datatable--cursor { text-style: reverse; }
    TextTable > .datatable--header { text-style: bold; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("home", "first", "First line", show=False),
        Binding("left", "aside(-1)", "Columns before", show=False),
        Binding("right", "aside(1)", "Columns behind", show=False),
    ]

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
        self.table = ViewTable(())
        self._titles: tuple[str, ...] = ()
        self._widths: tuple[int, ...] = ()
        self._places: dict[int, int] = {}
        self._drawn: list[Row] = []
        self._first = 1
        self.order: str | None = None
        self.largest_first = True
        self.wanted = ""
        self.matching = 0

    def show(self, table: ViewTable) -> None:
        if table.columns != self.table.columns:
            self._first = 1
        self.table = table
        self.redraw()

    def redraw(self) -> None:
        columns, rows = self.table.columns, filtered(self.table.rows, self.wanted)
        place = next((i for i, column in enumerate(columns) if column.key == self.order), None)
        if place is not None:
            rows = ordered(rows, place, largest_first=self.largest_first)
        self.matching = len(rows)
        rows = rows[: self.rows_max]
        titles = tuple(self._title(column) for column in columns)
        widths = self._widths_of(titles, rows)
        if titles == self._titles:
            # A column keeps its largest width, so that columns do not move.
            widths = tuple(map(max, widths, self._widths))
        places = fitting(columns, widths, self._room, self._first)
        alike = (titles, places) == (self._titles, self._places)
        if alike and [row.key for row in rows] == [row.key for row in self._drawn]:
            self._renew(rows)
        else:
            self._draw_anew(titles, places, rows, bool(self._behind(places, widths)))
        self._titles, self._widths, self._places, self._drawn = titles, widths, places, rows

    @property
    def _room(self) -> int:
        return max(1, self.scrollable_content_region.width - 1)

    @property
    def aside(self) -> tuple[int, int]:
        return self._first - 1, self._behind(self._places, self._widths)

    def _behind(self, places: dict[int, int], widths: Sequence[int]) -> int:
        if not places:
            return 0
        last = max(places)
        in_part = last > self._first and places[last] < widths[last]
        return len(self.table.columns) - 1 - last + in_part

    def _widths_of(self, titles: Sequence[str], rows: Sequence[Row]) -> tuple[int, ...]:
        widths = []
        for place, title in enumerate(titles):
            texts = [*title.split("\n"), *(row.cells[place].text for row in rows)]
            widths.append(max(map(cell_len, texts)) + bool(place))
        return tuple(widths)

    def _renew(self, rows: list[Row]) -> None:
        for line, (row, drawn) in enumerate(zip(rows, self._drawn, strict=True)):
            for i, (place, width) in enumerate(self._places.items()):
                if row.cells[place].text != drawn.cells[place].text:
                    self.update_cell_at(Coordinate(line, i), self._cell(row.cells[place], place, width))

    def _draw_anew(
        self, titles: Sequence[str], places: dict[int, int], rows: Sequence[Row], behind: bool
    ) -> None:
        at_key, at_line, scroll_y = self.key_under_cursor(), self.cursor_row, self.scroll_y
        self.clear(columns=True)
        for place, width in places.items():
            self.add_column(_text(titles[place], self.table.columns[place], place), width=width)
        before = self._first > 1
        if before or behind:
            # Marks of hidden columns.
            marks = "\n".join(mark for mark, is_so in zip(_ASIDE, (before, behind), strict=True) if is_so)
            self.add_column(Text(marks), width=1)
        for row in rows:
            texts = [self._cell(row.cells[place], place, width) for place, width in places.items()]
            self.add_row(*texts, key=row.key)
        if at_line and rows:
            # The row under the cursor, or the one that is now in its place.
            line = next((i for i, row in enumerate(rows) if row.key == at_key), min(at_line, len(rows) - 1))
            self.move_cursor(row=line, animate=False, scroll=False)
            scroll_y = max(0, scroll_y + line - at_line)
        self.scroll_to(0, scroll_y, animate=False)

    def _cell(self, cell: Cell, place: int, width: int) -> Text:
        column, room = self.table.columns[place], width - bool(place)
        text = cell.text
        if cell_len(text) > room:
            text = set_cell_size(text, room - 1) + "…"
        return _text(text, column, place)

    def next_order(self) -> None:
        keys: list[str | None] = [None, *(column.key for column in self.table.columns)]
        at = keys.index(self.order) if self.order in keys else 0
        self.sort_by(keys[(at + 1) % len(keys)])

    def sort_by(self, key: str | None) -> None:
        if key is not None and key == self.order:
            self.largest_first = not self.largest_first
        else:
            column = next((c for c in self.table.columns if c.key == key), None)
            self.order, self.largest_first = key, column is None or column.number
        self.redraw()

    def sort_by_drawn(self, drawn: int) -> None:
        places = list(self._places)
        if drawn < len(places):
            self.sort_by(self.table.columns[places[drawn]].key)
        else:
            self.action_aside(1)

    def turn(self) -> None:
        self.largest_first = not self.largest_first
        self.redraw()

    def action_first(self) -> None:
        self.move_cursor(row=0, animate=False)
        self.scroll_to(0, 0, animate=False, immediate=True)

    def action_aside(self, step: int) -> None:
        before, behind = self.aside
        if (step > 0 and behind) or (step < 0 and before):
            self._first += step
            self.redraw()

    def on_resize(self, event: events.Resize) -> None:
        self.redraw()

    def key_under_cursor(self) -> str | None:
        if not self.row_count or not 0 <= self.cursor_row < self.row_count:
            return None
        return self.ordered_rows[self.cursor_row].key.value

    def _title(self, column: Column) -> str:
        if column.key != self.order:
            return column.title
        return f"{column.title}{'▼' if self.largest_first else '▲'}"


def _text(text: str, column: Column, place: int) -> Text:
    apart = " " if place else ""
    lines = "\n".join(apart + line for line in text.split("\n"))
    return Text(lines, justify="right" if column.number else "left", no_wrap=True, end="")

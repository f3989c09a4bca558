"""`llmtap top`: the terminal application (textual) with header, tabs, table and keys.

`TopApp` shows the tables of `views.py` in a `TextTable`, filled from the answers that `Feed` (`client.py`)
polls. `HelpScreen` and `EventScreen` (the events of one exchange) are screens on top of it. Everything
that is shown by a colour is also shown by a word; textual handles NO_COLOR.
"""

import asyncio
import signal
import threading
from typing import ClassVar, Final

from rich.text import Text
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.screen import Screen
from textual.widgets import DataTable, Footer, Input, Static, Tab, Tabs
from textual.worker import Worker

from llmtap.clock import SystemClock
from llmtap.report.first_token import first_token_lines
from llmtap.top.client import WINDOWS, Admin, Feed, FeedLink, TopOptions, Trouble
from llmtap.top.table import (
    Column,
    ViewTable,
    facts,
    filter_rows,
    firing_sentences,
    flow_lines,
    sort_rows,
    unique_rows,
    visible_text,
    warnings_of,
)
from llmtap.top.views import EVENTS_MAX, VIEWS, View, event_table, fact_lines, reader_ns_per_token

_HELP: Final = """\
1 to 9, tab   select a view
up, down      move the cursor; on the first line it follows the newest
home          go to the first line
left, right   scroll to hidden columns
enter         in view 5: show the events of an exchange
escape        go back; in a view: clear the filter
s, S          sort by the next column; reverse the order
/             filter by text in any column; enter keeps, escape clears it
w             next window: 10s, 1m, 5m, 1h, all since the meter's start
p             pause or resume
r             refresh now; after a disconnection: try now
q, ctrl+c     quit

LIVE          figures of the time beside it
STALE         no answer lately: the figures are old
DISCONNECTED  the last request failed, with reason; the last figures stay
*             after a percentile: fewer than ten samples beyond it
-             unknown or not applicable
~1            number of tokens unknown: counts as one
·             in tokens over time: no token"""


class HelpScreen(Screen[None]):
    """Screen that explains the keys and signs."""

    CSS = "#help { height: auto; padding: 0 1; }"
    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape,question_mark,f1", "back", "Back")]

    def compose(self) -> ComposeResult:
        with VerticalScroll():
            yield Static(Text(_HELP), id="help")
        yield Footer()

    def action_back(self) -> None:
        self.dismiss()


ROWS_MAX: Final = 200
"""Maximum number of rows that are drawn. Further rows are only counted, but the filter searches them too."""


class TextTable(DataTable[Text]):
    """Table whose order and filter the user chooses. Both stay when the figures change.

    A cursor on the first row stays on the first row, which is the newest; any other cursor stays on its row.
    """

    DEFAULT_CSS = """
    TextTable { height: 1fr; scrollbar-size: 1 1; }
    TextTable > .datatable--cursor { text-style: reverse; }
    TextTable > .datatable--header { text-style: bold; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [Binding("home", "first", "First line", show=False)]

    def __init__(self, id_: str, rows_max: int = ROWS_MAX) -> None:
        super().__init__(
            id=id_,
            cursor_type="row",
            header_height=2,
            fixed_columns=1,
            show_row_labels=False,
            zebra_stripes=True,
        )
        self.rows_max = rows_max
        self.table = ViewTable(())
        self._titles: list[str] = []
        self.sort_column: str | None = None
        """Key of the column that decides the order; None: order of the document."""
        self.largest_first = True
        """Direction of the order."""
        self.filter_text = ""
        self.matching_count = 0
        """Number of rows that match the filter, also those that are not shown."""

    def show(self, table: ViewTable) -> None:
        self.table = table
        self.redraw()

    def redraw(self) -> None:
        # Remove rows with a repeated key: they would raise DuplicateKey.
        columns, rows = self.table.columns, filter_rows(unique_rows(self.table.rows), self.filter_text)
        keys = [column.key for column in columns]
        if self.sort_column in keys:
            rows = sort_rows(rows, keys.index(self.sort_column), largest_first=self.largest_first)
        self.matching_count = len(rows)
        at_key, at_line, x, y = self.key_under_cursor(), self.cursor_row, self.scroll_x, self.scroll_y
        titles = [self._title(column) for column in columns]
        self.clear(columns=titles != self._titles)
        if titles != self._titles:
            self._titles = titles
            for title, column in zip(titles, columns, strict=True):
                self.add_column(_cell_text(title, column))
        rows = rows[: self.rows_max]
        for row in rows:
            cells = zip(row.cells, columns, strict=True)
            self.add_row(*(_cell_text(cell.text, column) for cell, column in cells), key=row.key)
        if at_line and rows:
            # Keep the cursor on the same row; if this row has gone, put it on the row at the same place.
            line = next((i for i, row in enumerate(rows) if row.key == at_key), min(at_line, len(rows) - 1))
            self.move_cursor(row=line, animate=False, scroll=False)
            y = max(0, y + line - at_line)
        self.scroll_to(x, y, animate=False)

    def sort_by_next_column(self) -> None:
        keys: list[str | None] = [None, *(column.key for column in self.table.columns)]
        at = keys.index(self.sort_column) if self.sort_column in keys else 0
        self.sort_by(keys[(at + 1) % len(keys)])

    def sort_by(self, key: str | None) -> None:
        if key is not None and key == self.sort_column:
            self.largest_first = not self.largest_first
        else:
            column = next((c for c in self.table.columns if c.key == key), None)
            self.sort_column, self.largest_first = key, column is None or column.is_number
        self.redraw()

    def reverse_order(self) -> None:
        self.largest_first = not self.largest_first
        self.redraw()

    def action_first(self) -> None:
        """Move the cursor to the first row."""
        self.move_cursor(row=0, animate=False)
        self.scroll_to(0, 0, animate=False, immediate=True)

    def key_under_cursor(self) -> str | None:
        if not self.row_count or not 0 <= self.cursor_row < self.row_count:
            return None
        return self.ordered_rows[self.cursor_row].key.value

    def _title(self, column: Column) -> str:
        if column.key != self.sort_column:
            return column.title
        return f"{column.title}{'▼' if self.largest_first else '▲'}"


def _cell_text(text: str, column: Column) -> Text:
    return Text(text, justify="right" if column.is_number else "left", no_wrap=True, end="")


RETRY_S: Final = 1.0
"""Pause before an exchange is requested again after an error."""


class EventScreen(Screen[None]):
    """Screen with the events of one exchange. `v_ns`: time in ns that the reader needs for a token."""

    CSS = """
    #story { height: auto; max-height: 50%; padding: 0 1; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape", "back", "Back"),
        Binding("backspace", "back", "Back", show=False),
        Binding("s", "sort", "Sort"),
        Binding("S", "reverse", "Reverse", key_display="S"),
    ]

    def __init__(self, feed: Feed, id_: str, v_ns: int) -> None:
        super().__init__()
        self._feed = feed
        self._exchange_id = id_
        self._token_reading_ns = v_ns
        """Time that the assumed reader needs for a token."""

    def compose(self) -> ComposeResult:
        yield Static(id="story", markup=False)
        yield TextTable("events", EVENTS_MAX)
        yield Footer()

    def on_mount(self) -> None:
        self._show_notes([f"{visible_text(self._exchange_id)}: requesting"])
        self.query_one("#events", TextTable).focus()
        self.run_worker(self._load(), name="ask")

    async def _load(self) -> None:
        """Fetch the exchange, and try again until the meter answers."""
        while True:
            try:
                x = await self._feed.exchange(self._exchange_id)
                break
            except Trouble as exc:
                self._show_notes([f"{visible_text(self._exchange_id)}: {visible_text(str(exc), 200)}"])
                await asyncio.sleep(RETRY_S)
        if x is None:
            self._show_notes([f"{visible_text(self._exchange_id)} is not kept any more"])
            return
        table = self.query_one("#events", TextTable)
        table.show(event_table(x, self._token_reading_ns))
        facts_ = flow_lines(fact_lines(x), self.size.width - 2)
        self._show_notes([*facts_, *table.table.notes])
        try:
            first_token = await self._feed.first_token(self._exchange_id)
        except Trouble:
            return  # A meter of an older version does not know the parts of the wait: leave them out.
        parts = [] if first_token is None else first_token_lines(first_token)
        self._show_notes([*facts_, *parts, *table.table.notes])

    def _show_notes(self, lines: list[str]) -> None:
        self.query_one("#story", Static).update(Text("\n".join(lines)))

    def action_back(self) -> None:
        self.dismiss()

    def action_sort(self) -> None:
        self.query_one("#events", TextTable).sort_by_next_column()

    def action_reverse(self) -> None:
        self.query_one("#events", TextTable).reverse_order()

    def on_data_table_header_selected(self, event: DataTable.HeaderSelected) -> None:
        event.stop()
        table = self.query_one("#events", TextTable)
        table.sort_by(table.table.columns[event.column_index].key)


TICK_S: Final = 0.5
"""Time between two updates of the header, which shows the age of the figures."""
_TAB_ACTIONS: Final = frozenset(
    {"filter", "no_filter", "sort", "reverse", "window", "pause", "refresh_now", "open", "next_tab"}
)
_LETTER_ACTIONS: Final = frozenset(
    {"leave", "filter", "sort", "reverse", "window", "pause", "refresh_now", "help"}
)
_LINK_STYLES: Final = {
    FeedLink.DISCONNECTED: "reverse bold",
    FeedLink.STALE: "reverse",
    FeedLink.PAUSED: "reverse",
}


class FilterLine(Input):
    """Line in which the user types the filter."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("enter", "submit", "Keep the filter"),
        Binding("escape", "app.no_filter", "Clear the filter", key_display="esc"),
    ]


class TopApp(App[None]):
    """Application with one tab for each view."""

    TITLE = "llmtap top"
    ENABLE_COMMAND_PALETTE = False
    CSS = """
    #head { height: auto; max-height: 8; padding: 0 1; }
    #tabs { height: 2; }
    #notes { height: auto; max-height: 50%; padding: 0 1; }
    #filter { display: none; height: 1; border: none; padding: 0 1; }
    #filter.open { display: block; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("q", "leave", "Quit"),
        Binding("ctrl+c", "quit", "Quit", show=False, priority=True),
        Binding("slash", "filter", "Filter", key_display="/"),
        Binding("s", "sort", "Sort"),
        Binding("S", "reverse", "Reverse", key_display="S"),
        Binding("w", "window", "Window"),
        Binding("p", "pause", "Pause"),
        Binding("r", "refresh_now", "Refresh", show=False),
        Binding("question_mark,f1", "help", "Help", key_display="?"),
        Binding("escape", "no_filter", "No filter", show=False),
        Binding("tab", "next_tab(1)", "Next", key_display="tab", priority=True),
        Binding("shift+tab", "next_tab(-1)", "Previous", show=False, priority=True),
        *(Binding(str(i), f"open('{view.name}')", view.title, show=False) for i, view in enumerate(VIEWS, 1)),
    ]

    def __init__(self, options: TopOptions) -> None:
        super().__init__()
        self._options = options
        self.view = VIEWS[0]
        self._wake_event = asyncio.Event()
        """Set to send the next request at once, without the rest of the wait."""
        self._wants_refresh = True
        """Whether the user requested new figures, which `_poll_views` then requests even during a pause."""
        self._loaded_view: View | None = None
        """View of the latest answer. While another view is open, that view's table can still be empty."""
        self._sort_orders: dict[str, tuple[str | None, bool]] = {}
        """By view: column and direction of its order, which it gets again when it is opened."""
        self._admin: Admin | None = None
        self._feed: Feed | None = None
        """Answers of the admin port; None before the start."""
        self._poll_worker: Worker[None] | None = None
        """Task that polls the admin port."""
        self._head = Static(id="head", markup=False)
        self._notes = Static(id="notes", markup=False)
        """Line below the table."""
        self.grid = TextTable("grid")
        """Table of the open view."""

    def compose(self) -> ComposeResult:
        yield self._head
        yield Tabs(*(Tab(f"{i} {view.title}", id=view.name) for i, view in enumerate(VIEWS, 1)), id="tabs")
        yield self._notes
        yield self.grid
        yield FilterLine(id="filter", placeholder="filter: text in any column")
        yield Footer()

    async def on_mount(self) -> None:
        options = self._options
        self._admin = Admin(options.url, options.token, options.tls())
        self._feed = Feed(self._admin, SystemClock(), window=options.window, interval_ns=options.interval_ns)
        self.query_one("#tabs", Tabs).can_focus = False
        self.grid.focus()
        if threading.current_thread() is threading.main_thread():
            # Handle SIGTERM, so that the terminal is restored if another process ends this one.
            asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, self.exit)
        self.set_interval(TICK_S, self._show_head)
        self._poll_worker = self.run_worker(self._poll_views(), name="watch")

    async def on_unmount(self) -> None:
        if self._poll_worker is not None:
            self._poll_worker.cancel()
        if self._admin is not None:
            await self._admin.close()

    @property
    def feed(self) -> Feed:
        assert self._feed is not None
        return self._feed

    async def _poll_views(self) -> None:
        while True:
            self._wake_event.clear()
            if self._wants_refresh or not self.feed.is_paused:
                self._wants_refresh, view = False, self.view
                await self.feed.poll(view)
                self._loaded_view = view
                self._show()
            await self.feed.wait(self._wake_event)

    def _wake(self) -> None:
        """Request the documents of the open view now."""
        self._wants_refresh = True
        self._wake_event.set()

    def _show(self) -> None:
        self._show_head()
        self._show_table()

    def _show_head(self) -> None:
        if self._feed is None or not self.grid.is_attached:
            return  # The application is starting or ending.
        link, width = self.feed.link, self.size.width - 2
        state = visible_text(self.feed.status(), 400)
        head = Text(no_wrap=False)
        head.append(f"llmtap top {visible_text(self._options.url, 60)}  ")
        head.append(state, style=_LINK_STYLES.get(link, "bold"))
        summary = self.feed.documents.summary
        for trouble in [*warnings_of(summary), *firing_sentences(summary)]:
            head.append(f"\n{trouble}", style="reverse")
        for line in flow_lines(facts(summary), width):
            head.append(f"\n{line}")
        self._head.update(head)

    def _show_table(self) -> None:
        grid = self.grid
        if not grid.is_attached:
            return
        grid.show(self.view.table(self.feed.documents))
        notes, count = list(grid.table.notes), len(grid.table.rows)
        if self.view.shows_exchanges and count:
            notes.append("enter: events")
        if grid.filter_text:
            notes.append(
                f"filter {visible_text(grid.filter_text)!r}: {grid.matching_count:,} of {count:,};"
                " escape clears it"
            )
        if grid.matching_count > ROWS_MAX:
            notes.append(f"the first {ROWS_MAX:,} of {grid.matching_count:,} lines")
        if not count and self.feed.trouble is None:
            notes.append(
                "no data in this window yet" if self._loaded_view is self.view else "requesting data"
            )
        self._notes.update(Text("\n".join(flow_lines(notes, self.size.width - 2))))

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """Disable the keys of tabs while another screen is open, and letter keys while text is typed."""
        if isinstance(self.focused, Input) and action in _LETTER_ACTIONS:
            return False
        return len(self.screen_stack) == 1 or action not in _TAB_ACTIONS

    def action_leave(self) -> None:
        self.exit()

    def action_help(self) -> None:
        self.push_screen(HelpScreen())

    def action_refresh_now(self) -> None:
        self._wake()

    def action_open(self, name: str) -> None:
        self.query_one("#tabs", Tabs).active = name

    def action_next_tab(self, step: int) -> None:
        names = [view.name for view in VIEWS]
        self.action_open(names[(names.index(self.view.name) + step) % len(names)])

    def on_tabs_tab_activated(self, event: Tabs.TabActivated) -> None:
        view = next(view for view in VIEWS if view.name == event.tab.id)
        if view is self.view:
            return
        grid = self.grid
        self._sort_orders[self.view.name] = grid.sort_column, grid.largest_first
        self.view = view
        grid.sort_column, grid.largest_first = self._sort_orders.get(view.name, (None, True))
        grid.action_first()
        if self._feed is not None:
            self._show()
        grid.focus()
        self._wake()

    def action_sort(self) -> None:
        self.grid.sort_by_next_column()

    def action_reverse(self) -> None:
        self.grid.reverse_order()

    def on_data_table_header_selected(self, event: DataTable.HeaderSelected) -> None:
        self.grid.sort_by(self.grid.table.columns[event.column_index].key)

    def action_window(self) -> None:
        self.feed.window = WINDOWS[(WINDOWS.index(self.feed.window) + 1) % len(WINDOWS)]
        self._wake()

    def action_pause(self) -> None:
        self.feed.is_paused = not self.feed.is_paused
        self._show_head()
        if not self.feed.is_paused:
            self._wake()

    def action_filter(self) -> None:
        line = self.query_one("#filter", Input)
        line.add_class("open")
        line.focus()

    def action_no_filter(self) -> None:
        line = self.query_one("#filter", Input)
        line.value = ""
        self._close_filter()

    def on_input_changed(self, event: Input.Changed) -> None:
        self.grid.filter_text = event.value.strip()
        if self._feed is not None:
            self._show_table()

    def on_input_submitted(self, event: Input.Submitted) -> None:
        self._close_filter()

    def _close_filter(self) -> None:
        self.query_one("#filter", Input).remove_class("open")
        self.grid.focus()

    def on_data_table_row_selected(self, event: DataTable.RowSelected) -> None:
        id_ = event.row_key.value
        if self.view.shows_exchanges and id_ is not None and event.data_table is self.grid:
            self.push_screen(EventScreen(self.feed, id_, reader_ns_per_token(self.feed.documents.summary)))

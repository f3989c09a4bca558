"""Screens of `llmtap top` above the views: help, and the events of one exchange (from `inspector.py`)."""

import asyncio
from typing import ClassVar, Final

from rich.text import Text
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.screen import Screen
from textual.widgets import DataTable, Footer, Static

from llmtap.top.client import Trouble
from llmtap.top.feed import Feed
from llmtap.top.inspector import EVENTS_MAX, inspected, story, story_so_far, watched
from llmtap.top.table import flowed, shown
from llmtap.top.text_table import TextTable

__all__ = ["EventScreen", "HelpScreen"]


_HELP: Final = """\
1 to 8, tab   select a view
up, down      move the cursor; on the first line it follows the newest
home          go to the first line
left, right   show hidden columns, marked ← and → at the right edge
enter         in views 4 and 5: show the events of an exchange
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
    CSS = "#help { height: auto; padding: 0 1; }"
    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape,question_mark,f1", "back", "Back")]

    def compose(self) -> ComposeResult:
        with VerticalScroll():
            yield Static(Text(_HELP), id="help")
        yield Footer()

    def action_back(self) -> None:
        self.dismiss()


FOLLOW_S: Final = 1.0


class EventScreen(Screen[None]):
    """Events of one exchange, requested until it is over. `v_ns`: ns per token of the reader."""

    CSS = """
    #story { height: auto; max-height: 9; padding: 0 1; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape", "back", "Back"),
        Binding("backspace", "back", "Back", show=False),
        Binding("s", "sort", "Sort"),
        Binding("S", "turn", "Turn", key_display="S"),
    ]

    def __init__(self, feed: Feed, id_: str, v_ns: int) -> None:
        super().__init__()
        self._feed = feed
        self._wanted = id_
        self._v_ns = v_ns

    def compose(self) -> ComposeResult:
        yield Static(id="story", markup=False)
        yield TextTable("events", EVENTS_MAX)
        yield Footer()

    def on_mount(self) -> None:
        self.query_one("#story", Static).update(Text(f"{shown(self._wanted)}: requesting"))
        self.query_one("#events", TextTable).focus()
        self.run_worker(self._follow(), name="follow")

    async def _follow(self) -> None:
        while not await self._ask():
            await asyncio.sleep(FOLLOW_S)

    async def _ask(self) -> bool:
        table, width = self.query_one("#events", TextTable), self.size.width - 2
        try:
            x, told = await self._feed.exchange(self._wanted), None
            if x is None:
                told = await self._feed.stream(self._wanted)
            if x is None and told is None:
                x = await self._feed.exchange(self._wanted)  # it may have ended between the two
        except Trouble as exc:
            self._say([f"{shown(self._wanted)}: {shown(str(exc), 200)}"])
            return not table.row_count
        if x is not None:
            table.show(inspected(x, self._v_ns))
            self._say([*flowed(story(x), width), *table.table.notes])
        elif told is not None:
            table.show(watched(told, self._v_ns))
            self._say([*flowed(story_so_far(told, self._v_ns), width), *table.table.notes])
        else:
            self._say([f"{shown(self._wanted)} is neither running nor kept any more"])
        return told is None

    def _say(self, lines: list[str]) -> None:
        self.query_one("#story", Static).update(Text("\n".join(lines)))

    def action_back(self) -> None:
        self.dismiss()

    def action_sort(self) -> None:
        self.query_one("#events", TextTable).next_order()

    def action_turn(self) -> None:
        self.query_one("#events", TextTable).turn()

    def on_data_table_header_selected(self, event: DataTable.HeaderSelected) -> None:
        event.stop()
        self.query_one("#events", TextTable).sort_by_drawn(event.column_index)

"""One exchange, event by event, above the tabs; one that is under way is followed to its end."""

import asyncio
from typing import ClassVar, Final

from rich.text import Text
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.screen import Screen
from textual.widgets import DataTable, Footer, Static

from llmtap.top.client import Trouble
from llmtap.top.feed import Feed
from llmtap.top.header import flowed
from llmtap.top.inspector import EVENTS_MAX, inspected, story, story_so_far, watched
from llmtap.top.table import shown
from llmtap.top.text_table import TextTable

__all__ = ["EventScreen"]

FOLLOW_S: Final = 1.0
"""Between an answer about a stream under way and the next question."""


class EventScreen(Screen[None]):
    """Asks until the exchange is over: then it does not change any more.

    Args:
        v_ns: what the reader needs for a token.
    """

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
        self.query_one("#story", Static).update(Text(f"{shown(self._wanted)}: asking"))
        self.query_one("#events", TextTable).focus()
        self.run_worker(self._follow(), name="follow")

    async def _follow(self) -> None:
        while not await self._ask():
            await asyncio.sleep(FOLLOW_S)

    async def _ask(self) -> bool:
        """Whether it is over, or there is nothing to follow."""
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
            self._say([f"{shown(self._wanted)} is neither under way nor kept any more"])
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

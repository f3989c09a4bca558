"""One exchange, event by event, above the tabs."""

from typing import ClassVar

from rich.text import Text
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.screen import Screen
from textual.widgets import DataTable, Footer, Static

from llmtap.top.client import Trouble
from llmtap.top.feed import Feed
from llmtap.top.header import flowed
from llmtap.top.inspector import EVENTS_MAX, inspected, story
from llmtap.top.table import shown
from llmtap.top.text_table import TextTable

__all__ = ["EventScreen"]


class EventScreen(Screen[None]):
    """Asks for the exchange once: what is over does not change.

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
        self.run_worker(self._ask(), name="ask")

    async def _ask(self) -> None:
        try:
            x = await self._feed.exchange(self._wanted)
        except Trouble as exc:
            self._say([f"{shown(self._wanted)}: {shown(str(exc), 200)}"])
            return
        if x is None:
            self._say([f"{shown(self._wanted)} is not kept any more"])
            return
        table = inspected(x, self._v_ns)
        self.query_one("#events", TextTable).show(table)
        self._say([*flowed(story(x), self.size.width - 2), *table.notes])

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
        self.query_one("#events", TextTable).sort_by(event.column_key.value)

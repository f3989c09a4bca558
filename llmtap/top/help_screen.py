"""All keys of `llmtap top`, and what its marks mean."""

from typing import ClassVar, Final

from rich.text import Text
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.screen import Screen
from textual.widgets import Footer, Static

__all__ = ["HelpScreen"]

_HELP: Final = """\
1 to 7, tab   the views
up, down      the cursor: on the first line the newest is followed
home          back to the first line
left, right   columns that don't fit, marked ← and → at the right edge
enter         in views 4 and 5: an exchange, ended or not, event by event
escape        back; in a view: drops the filter
s, S          sorts by the next column; the other way round
/             filter: text in any column; enter keeps it, escape drops it
w             the next window: 10s, 1m, 5m, 1h, all since the meter's start
p             pause: nothing is asked until p again
r             asks now; after a disconnection: tries now
q, ctrl+c     leave

LIVE          the figures are of the time beside it
STALE         no answer for a while: the figures are old
DISCONNECTED  the last question failed, and why; the last figures stay
HELD          the cursor is in the list of exchanges, which stands still
*             behind a p99: of fewer than 1,000 samples
-             not known, or it does not apply
~1            nobody declares the event's tokens: it counts as one
·             in tokens over time: no token came"""


class HelpScreen(Screen[None]):
    """Above the tabs, until it is left."""

    CSS = "#help { height: auto; padding: 0 1; }"
    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape,question_mark,f1", "back", "Back")]

    def compose(self) -> ComposeResult:
        with VerticalScroll():
            yield Static(Text(_HELP), id="help")
        yield Footer()

    def action_back(self) -> None:
        self.dismiss()

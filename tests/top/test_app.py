"""The screen, driven by keys, in front of an admin port with recorded documents.

Long because all tests play on one stage.
"""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

pytest.importorskip("textual", reason="the extra `top` is not installed")

from textual.pilot import Pilot
from textual.widgets import Static

from llmtap.exchange.outcome import Outcome
from llmtap.top.app import TextTable, TopApp
from llmtap.top.client import FeedLink, TopOptions
from llmtap.top.views import VIEWS
from tests.support.servers.fake_admin import FakeAdmin, a_silent_stream, a_stream, fake_admin, recorded
from tests.support.servers.peer import wait_still
from tests.support.traffic.exchanges import streamed
from tests.support.traffic.experiments import an_experiment
from tests.support.waiting import wait_until

SMALL, LARGE = (80, 24), (120, 40)


def some() -> dict[str, Any]:
    documents = recorded(
        [
            streamed(1, 5, tenant="acme", model="tiny"),
            streamed(2, 5, tenant="acme", model="big", gap_ms=80),
            streamed(3, 40, tenant="globex", model="tiny", outcome=Outcome.TRUNCATED),
            streamed(4, 3, tenant="initech", model="tiny", arm="marked", unit="7"),
        ],
        experiment=an_experiment(),
    )
    documents["streams"] = {
        "count": 2,
        "window": 10.0,
        "streams": [a_stream(8), a_stream(7, tenant="globex")],
    }
    documents["silences"] |= {"running": 2, "count": 1, "streams": [a_silent_stream(3)]}
    return documents


class Stage:
    """An app in front of a fake admin port, and what its screen says."""

    def __init__(self, app: TopApp, pilot: Pilot[None], fake: FakeAdmin) -> None:
        self.app = app
        self.pilot = pilot
        self.fake = fake

    def text(self, id_: str) -> str:
        return str(self.app.screen.query_one(f"#{id_}", Static).content)

    def table(self, id_: str = "grid") -> TextTable:
        return self.app.screen.query_one(f"#{id_}", TextTable)

    def row_keys(self, id_: str = "grid") -> list[str | None]:
        """Of the rows, from above."""
        return [row.key.value for row in self.table(id_).ordered_rows]

    def lines(self) -> list[str]:
        """What is on the screen, as text."""
        width = self.app.size.width
        rows = self.app.screen._compositor.render_strips()
        return ["".join(segment.text for segment in row)[:width].rstrip() for row in rows]

    async def until(self, condition: Callable[[], Any]) -> None:
        """Wait until the app has handled keys and answers so far that a condition holds."""

        async def settled() -> Any:
            await self.pilot.pause()
            return condition()

        await wait_until(settled, hint=lambda: "\n".join(self.lines()))

    async def press(self, *keys: str) -> None:
        await self.pilot.press(*keys)
        await self.pilot.pause()

    async def open(self, name: str) -> None:
        """A tab, with what it needs."""
        number = [view.name for view in VIEWS].index(name) + 1
        view = VIEWS[number - 1]
        await self.press(str(number))
        await self.until(lambda: self.app.view is view)
        if view.path is not None:
            await self.until(lambda: view.path in self.app.feed.documents.details)
        await self.until(
            lambda: self.app.feed.documents.summary.get("by", {}).keys() and self.table().table.columns
        )
        await self.pilot.pause()


@asynccontextmanager
async def running_app(
    documents: dict[str, Any] | None = None, size: tuple[int, int] = SMALL
) -> AsyncIterator[Stage]:
    async with fake_admin(some() if documents is None else documents) as fake:
        app = TopApp(TopOptions(admin=fake.url, interval="200ms"))
        async with app.run_test(size=size) as pilot:
            stage = Stage(app, pilot, fake)
            await stage.until(lambda: app.feed.link is FeedLink.LIVE)
            yield stage


async def test_every_tab_shows_its_table_and_the_header_its_figures() -> None:
    wanted = {
        "tenants": ["acme", "globex", "initech"],
        "models": ["tiny", "big"],
        "arms": ["marked"],
        "streams": ["r0-8", "r0-7"],
        "exchanges": [f"run.0.1-{seq}" for seq in (4, 3, 2, 1)],
        "refusals": ["", "tenant acme", "tenant globex", "tenant initech"],
        "silences": ["r0-3"],
    }

    async with running_app() as stage:
        await stage.until(lambda: stage.row_keys() == wanted["tenants"])
        # Textual widens the columns only after it has drawn new rows once.
        parts = ("acme", "p99", "99.0*", "smooth", "1 Tenants", "7 Tap")
        await stage.until(lambda: all(part in "\n".join(stage.lines()) for part in parts))
        for name, keys in wanted.items():
            await stage.open(name)
            await stage.until(lambda keys=keys: stage.row_keys() == keys)
        await stage.open("tap")
        await stage.until(lambda: "relay r0/measured" in stage.row_keys())
        parts = (
            "LIVE",
            "req/s",
            "n 4",
            "TTFT p50",
            "ITL (B-even)",
            "goodput",
            "smooth goodput",
            "uncertainty",
        )
        await stage.until(lambda: all(part in stage.text("head") for part in parts))
        lines = stage.lines()
        assert len(lines) == SMALL[1]
        assert all(len(line) <= SMALL[0] for line in lines)
        assert "Quit" in lines[-1]


async def test_sorting_goes_through_the_columns_and_turns() -> None:
    async with running_app() as stage:
        await stage.until(lambda: stage.row_keys() == ["acme", "globex", "initech"])
        await stage.press("s")
        assert (stage.table().sort_column, stage.row_keys()) == ("name", ["acme", "globex", "initech"])
        await stage.press("S")
        assert stage.row_keys() == ["initech", "globex", "acme"]
        await stage.press("s")
        assert (stage.table().sort_column, stage.row_keys()[0]) == ("n", "acme")
        await stage.until(lambda: "▼" in "\n".join(stage.lines()))
        # It holds for the figures that come, and is kept by the tab.
        request = len(stage.fake.asked)
        await stage.until(lambda: len(stage.fake.asked) > request + 1)
        assert stage.row_keys()[0] == "acme"
        await stage.open("models")
        assert stage.table().sort_column is None
        await stage.open("tenants")
        assert stage.table().sort_column == "n"


async def test_an_exchange_is_inspected_event_by_event() -> None:
    async with running_app() as stage:
        await stage.open("exchanges")
        await stage.until(lambda: len(stage.row_keys()) == 4)
        await stage.press("down", "down", "down", "enter")
        await stage.until(lambda: len(stage.app.screen_stack) == 2)
        await stage.until(lambda: len(stage.row_keys("events")) == 6)
        await stage.until(lambda: "run.0.1-1: complete" in stage.text("story"))
        await stage.until(lambda: "a reader of 20 tokens/s" in stage.text("story"))
        await stage.until(
            lambda: "The longest part is 'response head': 89.0 of 100 ms" in stage.text("story")
        )
        await stage.until(lambda: "WAITS 99.0 ms" in "\n".join(stage.lines()))
        # Keys of the tabs do nothing here, and its own sort.
        await stage.press("w", "slash", "p", "tab", "s", "s", "s")
        assert stage.app.feed.window == "1m"
        assert not stage.app.feed.is_paused
        assert stage.table("events").sort_column == "gap"
        await stage.press("escape")
        assert len(stage.app.screen_stack) == 1
        assert stage.table().sort_column is None


async def test_events_are_requested_again_after_a_failure() -> None:
    async with running_app() as stage:
        await stage.open("exchanges")
        await stage.until(lambda: len(stage.row_keys()) == 4)
        stage.fake.status = 503
        await stage.press("enter")
        await stage.until(lambda: len(stage.app.screen_stack) == 2)
        await stage.until(lambda: "status 503" in stage.text("story"))
        stage.fake.status = None
        await stage.until(lambda: len(stage.row_keys("events")) > 0)


async def test_rows_with_the_same_id_are_drawn_once() -> None:
    documents = some()
    documents["streams"]["streams"].append(a_stream(8))

    async with running_app(documents) as stage:
        await stage.open("streams")
        await stage.until(lambda: stage.row_keys() == ["r0-8", "r0-7"])


async def test_a_row_that_is_held_stays_on_its_line_while_others_come_above() -> None:
    documents = some()

    def tell(newest: int) -> None:
        streams = [a_stream(i) for i in range(newest, newest - 40, -1)]
        documents["streams"] = {"count": 40, "window": 10.0, "streams": streams}

    tell(40)

    async with running_app(documents) as stage:

        def line() -> int:
            return next(i for i, text in enumerate(stage.lines()) if "…-35" in text or "r0-35" in text)

        await stage.open("streams")
        stage.table().scroll_to(x=stage.table().max_scroll_x, animate=False)
        await stage.press(*["down"] * 5)
        assert stage.table().key_under_cursor() == "r0-35"
        before = line()
        tell(52)
        await stage.until(lambda: stage.row_keys()[0] == "r0-52")
        assert stage.table().key_under_cursor() == "r0-35"
        await stage.until(lambda: line() == before)


async def test_windows_change_and_a_pause_holds_everything_until_r_asks() -> None:
    async with running_app() as stage:
        await stage.press("w")
        await stage.until(lambda: "window 5m" in stage.text("head"))
        await stage.press("p")
        assert stage.text("head").startswith(f"llmtap top {stage.fake.url}  PAUSED")
        await wait_still(lambda: len(stage.fake.asked))  # a request may have been under way
        request = len(stage.fake.asked)
        await stage.pilot.pause(0.6)  # three intervals, in which nothing may be requested
        assert len(stage.fake.asked) == request
        await stage.press("r")
        await stage.until(lambda: len(stage.fake.asked) > request)
        # Another tab is asked for all the same.
        await stage.press("3")
        await stage.until(lambda: "experiment" in stage.app.feed.documents.details)
        await stage.press("p")
        await stage.until(lambda: stage.app.feed.link is FeedLink.LIVE)


async def test_a_tap_that_goes_away_and_comes_back() -> None:
    async with running_app() as stage:
        await stage.until(lambda: len(stage.row_keys()) == 3)
        await stage.fake.stop()
        await stage.until(lambda: "DISCONNECTED" in stage.text("head"))
        await stage.until(lambda: "connection refused" in stage.text("head"))
        await stage.until(lambda: "figures of" in stage.text("head"))
        assert stage.row_keys() == ["acme", "globex", "initech"], "the last figures stay"
        await stage.fake.start()
        await stage.until(lambda: "LIVE" in stage.text("head"))

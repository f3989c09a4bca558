"""What is shown while nobody answers: the last figures, their age, and when it is tried again."""

from unittest import mock

from aiohttp.test_utils import TestServer

from llmtap.clock import ManualClock
from llmtap.meter.admin.server import admin_app
from llmtap.meter.options import MeterOptions
from llmtap.meter.pipeline import recent_exchanges as kept
from llmtap.meter.pipeline.pipeline import ExchangePipeline
from llmtap.top.client import Admin
from llmtap.top.feed import RETRY_NS, Feed, FeedLink
from llmtap.top.views import VIEWS
from tests.support.servers.fake_admin import fake_admin, recorded
from tests.support.servers.peer import scene
from tests.support.traffic.exchanges import streamed

S = 1_000_000_000
BY_NAME = {view.name: view for view in VIEWS}


@scene
async def test_a_view_asks_for_what_it_shows_and_no_more() -> None:
    async with fake_admin(recorded([streamed()])) as fake, Admin(fake.url) as admin:
        feed = Feed(admin, ManualClock(), window="5m", interval_ns=S)
        asked = {}
        for name, view in BY_NAME.items():
            fake.asked.clear()
            await feed.poll(view)
            assert fake.asked[0][0] == "summary"
            assert fake.asked[0][1]["window"] == "5m"
            asked[name] = (fake.asked[0][1]["by"], *(path for path, _ in fake.asked[1:]))
        assert asked == {
            "tenants": ("tenant",), "models": ("model",), "arms": ("arm", "experiment"),
            "streams": ("none", "streams"), "exchanges": ("none", "exchanges"), "refusals": ("tenant",),
            "tap": ("none",), "slo": ("none",),
        }  # fmt: skip
        assert feed.link is FeedLink.LIVE


@scene
async def test_tries_grow_rarer_and_figures_stay() -> None:
    clock = ManualClock(now_ns=S)
    async with fake_admin(recorded([streamed()])) as fake, Admin(fake.url) as admin:
        feed = Feed(admin, clock, window="1m", interval_ns=S)
        assert (feed.link, feed.said()) == (FeedLink.CONNECTING, "CONNECTING")
        await feed.poll(VIEWS[0])
        assert feed.said().startswith("LIVE ")
        fake.status = 503
        pauses = []
        for _ in range(len(RETRY_NS) + 2):
            await feed.poll(VIEWS[0])
            before = clock.now_ns
            said = feed.said()
            assert said.startswith("DISCONNECTED ")
            assert "the answer is status 503: said so" in said
            assert "figures of " in said
            pauses.append(int(said.split("again in ")[1].split(" s")[0]) * S)
            clock.advance(pauses[-1])
            assert clock.now_ns - before == pauses[-1]
        assert pauses == [*RETRY_NS, RETRY_NS[-1], RETRY_NS[-1]]
        assert feed.said().startswith(f"DISCONNECTED {sum(pauses) // S} s")
        assert feed.shown.summary["n"] == 1
        fake.status = None
        await feed.poll(VIEWS[0])
        assert feed.link is FeedLink.LIVE


@scene
async def test_figures_that_nobody_renewed_are_stale() -> None:
    clock = ManualClock(now_ns=S)
    async with fake_admin(recorded([streamed()])) as fake, Admin(fake.url) as admin:
        feed = Feed(admin, clock, window="1m", interval_ns=2 * S)
        await feed.poll(VIEWS[0])
        clock.advance(6 * S)
        assert feed.link is FeedLink.LIVE
        clock.advance(1)
        assert feed.link is FeedLink.STALE
        assert feed.said().startswith("STALE: no answer for 6 s")
        feed.paused = True
        assert feed.link is FeedLink.PAUSED


@scene
async def test_an_exchange_that_comes_in_several_answers_is_whole() -> None:
    tally = ExchangePipeline(MeterOptions(), ManualClock(now_ns=S))
    for seq in (4, 5):
        tally.ended(streamed(seq=seq))
    with mock.patch.multiple(kept, PAGE_BYTES_MAX=1, EVENTS_SLICE=1):
        async with (
            TestServer(admin_app(tally)) as server,
            Admin(str(server.make_url("")).rstrip("/")) as admin,
        ):
            feed = Feed(admin, ManualClock(), window="1m", interval_ns=S)
            x = await feed.exchange("run.0.1-4")
            assert x is not None
            assert [event["t"] for event in x["events"]] == sorted({event["t"] for event in x["events"]})
            assert len(x["events"]) == 4

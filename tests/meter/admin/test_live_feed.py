import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import ClientResponse, web
from aiohttp.test_utils import TestClient, TestServer

from llmtap.clock import ManualClock
from llmtap.meter.admin import live_feed as live
from llmtap.meter.admin.live_feed import LiveFeed
from llmtap.meter.options import MeterOptions
from llmtap.meter.pipeline.exchanges import weight_bytes
from llmtap.meter.pipeline.pipeline import ExchangePipeline
from tests.support.servers.peer import wait_until
from tests.support.servers.raw_client import RawClient, request
from tests.support.traffic.streams import streamed

S = 1_000_000_000
Client = TestClient[Any, Any]
QUIET = "/api/v1/live?summary=0"


@asynccontextmanager
async def live_feed() -> AsyncIterator[tuple[ExchangePipeline, LiveFeed, Client]]:
    tally = ExchangePipeline(MeterOptions(), ManualClock(now_ns=S))
    app, feed = web.Application(), LiveFeed(tally)
    feed.add_to(app)
    async with TestClient(TestServer(app)) as client:
        yield tally, feed, client


class Stream:
    """A subscription, read event by event."""

    def __init__(self, answer: ClientResponse) -> None:
        self.answer = answer

    async def next(self) -> tuple[str, Any]:
        """Name and data of the next event; comments and `retry` are passed over. Raises at the end."""
        name = ""
        async for raw in self.answer.content:
            line = raw.decode().rstrip("\n")
            if line.startswith("event: "):
                name = line.removeprefix("event: ")
            elif line.startswith("data: "):
                return name, json.loads(line.removeprefix("data: "))
        raise EOFError

    async def is_over(self) -> bool:
        try:
            while True:
                await self.next()
        except EOFError:
            return True


@asynccontextmanager
async def subscribed(feed: LiveFeed, client: Client, path: str = QUIET) -> AsyncIterator[Stream]:
    async with client.get(path) as answer:
        assert (answer.status, answer.content_type) == (200, "text/event-stream")
        yield Stream(answer)


async def test_an_exchange_is_told_when_it_ends() -> None:
    async with live_feed() as (tally, feed, client):
        async with subscribed(feed, client) as stream:
            tally.on_end(streamed(100, 140, seq=7))
            name, x = await stream.next()
            assert (name, x["seq"], x["metrics"]["ttft"]) == ("exchange", 7, 0.1)
            assert "events" not in x
        async with subscribed(feed, client, QUIET + "&events=1") as stream:
            tally.on_end(streamed(100, 140, seq=8))
            _, x = await stream.next()
            assert [event["t"] for event in x["events"]] == [0.1, 0.14]


async def test_a_summary_comes_at_once_and_again_and_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "SUMMARY_S", 0.1)

    async with live_feed() as (tally, feed, client):
        tally.on_open()
        tally.on_open()
        tally.on_end(streamed(100, 140))
        async with subscribed(feed, client, "/api/v1/live") as stream:
            for _ in range(3):
                name, result = await stream.next()
                assert (name, result["open"], result["n"], result["subscribers"]) == ("summary", 1, 1, 1)
                assert result["metrics"]["ttft"]["p50"] == pytest.approx(0.1, rel=1e-3)
                assert result["outcomes"] == {"complete": 1}


async def test_a_slow_subscriber_loses_whole_exchanges_and_is_told_how_many() -> None:
    async with (
        live_feed() as (tally, feed, client),
        subscribed(feed, client) as slow,
        subscribed(feed, client, QUIET + "&tenant=acme") as other,
    ):
        # No turn of the loop between them: nothing can be taken from the queue.
        for seq in range(live.QUEUE_MAX + 3):
            tally.on_end(streamed(100, seq=seq))
        tally.on_end(streamed(100, seq=9_999, tenant="acme"))
        result = [await slow.next() for _ in range(live.QUEUE_MAX + 1)]
        exchanges = [x["seq"] for name, x in result if name == "exchange"]
        assert exchanges == list(range(live.QUEUE_MAX))
        assert [x for name, x in result if name == "missed"] == [{"n": 4, "total": 4}]
        assert (await other.next())[1]["seq"] == 9_999
        assert (tally.live_missed, tally.subscribers) == (4, 2)
        tally.on_end(streamed(100, seq=5))
        assert (await slow.next())[1]["seq"] == 5


async def test_who_leaves_is_forgotten_although_nothing_is_said_to_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(live, "DISCONNECT_CHECK_S", 0.02)

    app, feed = web.Application(), LiveFeed(ExchangePipeline(MeterOptions(), ManualClock(now_ns=S)))
    feed.add_to(app)
    # As the meter runs it; aiohttp's test server would cancel the handler.
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    client = await RawClient.connect(runner.addresses[0][1])
    await client.send(request("GET", QUIET))
    await wait_until(lambda: len(feed) == 1)
    client.close()
    await wait_until(lambda: len(feed) == 0)
    await runner.cleanup()


async def test_who_takes_nothing_is_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "STALLED_S", 0.3)

    async with live_feed() as (tally, feed, client):
        assert client.port is not None
        raw = await RawClient.connect(client.port, receive_buffer=4_096)
        await raw.send(request("GET", QUIET + "&events=1", host="localhost"))
        await wait_until(lambda: len(feed) == 1)
        # Each is some megabytes of JSON: more than the sockets between us take.
        for seq in range(4):
            tally.on_end(streamed(*range(1, 30_001), seq=seq))
        await wait_until(lambda: len(feed) == 0)
        raw.close()


async def test_the_end_of_the_meter_ends_the_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "CLOSING_S", 60)  # a busy machine needs longer to end a stream in order
    tally = ExchangePipeline(MeterOptions(), ManualClock(now_ns=S))
    app, feed = web.Application(), LiveFeed(tally)
    feed.add_to(app)
    server = TestServer(app)
    async with TestClient(server) as client, subscribed(feed, client, "/api/v1/live") as stream:
        closing = asyncio.ensure_future(app.shutdown())
        assert await stream.is_over()
        await closing
        assert (len(feed), feed in tally.sinks) == (0, False)
        assert (await client.get(QUIET)).status == 503


async def test_a_queue_is_bounded_by_bytes_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "QUEUE_BYTES_MAX", 2 * weight_bytes(streamed(100, 140)))

    async with live_feed() as (tally, feed, client), subscribed(feed, client) as stream:
        for seq in range(4):
            tally.on_end(streamed(100, 140, seq=seq))
        assert [(await stream.next())[1].get("seq") for _ in range(2)] == [0, 1]
        assert await stream.next() == ("missed", {"n": 2, "total": 2})


async def test_there_is_room_for_so_many_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "SUBSCRIBERS_MAX", 1)

    async with live_feed() as (_, feed, client):
        async with subscribed(feed, client):
            assert (await client.get(QUIET)).status == 503
        await wait_until(lambda: len(feed) == 0)
        async with subscribed(feed, client):
            pass


async def test_the_oldest_subscriber_gives_its_place_to_a_new_one_after_a_while(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(live, "SUBSCRIBERS_MAX", 1)
    monkeypatch.setattr(live, "TENURE_S", 0.0)

    async with live_feed() as (tally, feed, client):
        async with subscribed(feed, client):
            response = await client.get(QUIET)
            assert response.status == 200
            await wait_until(lambda: len(feed) == 1)
            assert tally.admin_limits["subscribers"] == 1
            response.close()
        await wait_until(lambda: len(feed) == 0)


async def test_a_feed_without_places_refuses_a_subscriber(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "SUBSCRIBERS_MAX", 0)

    async with live_feed() as (_, _, client):
        assert (await client.get(QUIET)).status == 503

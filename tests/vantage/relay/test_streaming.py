"""Nothing is held back: the other side speaks its next word only when this one has been heard."""

import asyncio

import pytest

from llmtap.channel.frames import FrameKind
from tests.support.servers.peer import Payload, chunk, scene
from tests.support.servers.proxy import Tapped, stage
from tests.support.servers.raw_client import RawClient, request
from tests.support.servers.upstream import CLOSE, Call, Upstream

CLOCKS = pytest.mark.parametrize("clock", ["mono", "kernel"])


def event(i: int, size: int) -> bytes:
    return (b"data: %d " % i).ljust(size - 2, b".") + b"\n\n"


HEADS = {
    "chunked": b"Transfer-Encoding: chunked\r\n",
    "length": b"Content-Length: %d\r\n",
    "close": b"",
}


class LockStep:
    """One stream whose upstream sends event i + 1 only when its client has event i."""

    def __init__(self, framing: str, events: list[bytes]) -> None:
        self.framing = framing
        self.events = events
        self._heard = asyncio.Semaphore(0)

    def _coded(self, data: bytes) -> bytes:
        return chunk(data) if self.framing == "chunked" else data

    async def script(self, call: Call) -> str | None:
        await call.body()
        fields = HEADS[self.framing]
        if self.framing == "length":
            fields = fields % sum(map(len, self.events))
        await call.say(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n" + fields + b"\r\n")
        await self._heard.acquire()
        for data in self.events:
            await call.say(self._coded(data))
            await self._heard.acquire()
        if self.framing == "chunked":
            await call.say(b"0\r\n\r\n")
        return CLOSE if self.framing == "close" else None

    async def listen(self, client: RawClient, path: str) -> None:
        await client.send(request("GET", path))
        await client.head()
        self._heard.release()
        for data in self.events:
            assert await client.exactly(len(self._coded(data))) == self._coded(data)
            self._heard.release()
        if self.framing == "chunked":
            assert await client.exactly(5) == b"0\r\n\r\n"


async def in_step(up: Upstream, tap: Tapped, framing: str, events: list[bytes]) -> None:
    stream = LockStep(framing, events)
    await stream.listen(await tap.client(), up.on(stream.script))


@CLOCKS
@pytest.mark.parametrize("framing", ["chunked", "length", "close"])
@scene
async def test_one_event_in_is_one_event_out(framing: str, clock: str) -> None:
    async with stage(clock=clock) as (up, tap):
        events = [event(i, 180) for i in range(50)]
        await in_step(up, tap, framing, events)
        reads = (await tap.meter.closed(1)).of(FrameKind.RESPONSE_DATA)
        assert len(reads) >= 50, "each has a stamp of its own"


@pytest.mark.parametrize("framing", ["chunked", "length", "close"])
@scene
async def test_the_tiniest_events_are_not_gathered(framing: str) -> None:
    async with stage() as (up, tap):
        await in_step(up, tap, framing, [b"%d" % (i % 10) for i in range(200)])


@scene
async def test_events_larger_than_a_read() -> None:
    async with stage() as (up, tap):
        await in_step(up, tap, "chunked", [event(i, 100_000) for i in range(5)])


@scene
async def test_a_head_is_passed_before_its_body_exists() -> None:
    async with stage() as (up, tap):
        for framing in HEADS:
            await in_step(up, tap, framing, [b"x"])


@scene
async def test_an_http10_client_gets_each_event_at_once_too() -> None:
    """Its chunks are taken off; that must not make them wait."""
    async with stage() as (up, tap):
        heard = asyncio.Semaphore(0)

        async def script(call: Call) -> None:
            await call.say(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
            for i in range(30):
                await heard.acquire()
                await call.say(chunk(event(i, 50)))
            await heard.acquire()
            await call.say(b"0\r\n\r\n")

        client = await tap.client()
        await client.send(request("GET", up.on(script), version="1.0"))
        await client.head()
        heard.release()
        for i in range(30):
            assert await client.exactly(50) == event(i, 50)
            heard.release()
        assert (await client.to_end())[0] == b""


@pytest.mark.parametrize("framing", ["length", "chunked"])
@scene
async def test_each_piece_of_an_upload_arrives_before_the_next_is_sent(framing: str) -> None:
    pieces = [b"%03d" % i + b"u" * 997 for i in range(20)]
    arrived = asyncio.Semaphore(0)

    async def script(call: Call) -> None:
        arrived.release()  # the head alone
        for piece in pieces:
            coded = chunk(piece) if framing == "chunked" else piece
            assert await call.peer.exactly(len(coded)) == coded
            arrived.release()
        if framing == "chunked":
            assert await call.peer.exactly(5) == b"0\r\n\r\n"
        call.payload = Payload()
        await call.say(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")

    async with stage() as (up, tap):
        client = await tap.client()
        how = "Transfer-Encoding: chunked" if framing == "chunked" else "Content-Length: 20000"
        await client.send(request("POST", up.on(script), how))
        await arrived.acquire()
        for piece in pieces:
            await client.send(chunk(piece) if framing == "chunked" else piece)
            await arrived.acquire()
        if framing == "chunked":
            await client.send(b"0\r\n\r\n")
        assert (await client.answer()).data == b"ok"


@scene
async def test_both_directions_at_once() -> None:
    """An upstream that answers each piece of a request while the request goes on."""
    async with stage() as (up, tap):

        async def echo(call: Call) -> None:
            await call.say(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
            while piece := await call.peer.chunk():
                await call.say(chunk(piece.upper()))
            await call.peer.until(b"\r\n")
            call.payload = Payload()
            await call.say(b"0\r\n\r\n")

        client = await tap.client()
        await client.send(request("POST", up.on(echo), "Transfer-Encoding: chunked"))
        await client.head()
        for i in range(20):
            await client.send(chunk(b"piece %d" % i))
            assert await client.chunk() == b"PIECE %d" % i
        await client.send(b"0\r\n\r\n")
        assert await client.exactly(5) == b"0\r\n\r\n"
        assert (await tap.meter.closed(1)).closing.outcome == "complete"

"""Invariant: a body leaves the relay as the very bytes that came in at once, whatever its framing."""

import asyncio
import random
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmtap.channel.frames import FrameKind
from tests.support.data import CORPUS
from tests.support.servers.peer import Ending, Payload, chunk, chunked, play, scene
from tests.support.servers.proxy import stage
from tests.support.servers.raw_client import RawClient, request
from tests.support.servers.upstream import CLOSE, Call, answers, says

FIXTURES = sorted(CORPUS.glob("*.sse"))

SIZES = [0, 1, 2, 1_000, 65_535, 65_536, 65_537, 1_000_000]
CLOCKS = pytest.mark.parametrize("clock", ["mono", "kernel"])


def random_bytes(n: int, seed: int = 7) -> bytes:
    return random.Random(seed).randbytes(n)


def cut(data: bytes, cuts: list[int]) -> list[bytes]:
    edges = [0, *sorted(c % (len(data) + 1) for c in cuts), len(data)]
    return [data[a:b] for a, b in pairwise(edges)]


def in_random_pieces(data: bytes, seed: int, sizes: tuple[int, ...]) -> list[bytes]:
    dice = random.Random(seed)
    pieces, at = [], 0
    while at < len(data):
        n = dice.choice(sizes)
        pieces.append(data[at : at + n])
        at += n
    return pieces


# ---------------------------------------------------------------- answers


@CLOCKS
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("framing", ["length", "chunked", "close"])
@scene
async def test_an_answer_of_any_framing_and_size(framing: str, size: int, clock: str) -> None:
    data = random_bytes(size)
    fields = {
        "length": b"Content-Length: %d\r\n" % size,
        "chunked": b"Transfer-Encoding: chunked\r\n",
        "close": b"",
    }
    coded = chunked(*in_random_pieces(data, 3, (1, 7, 100, 4096, 70_000))) if framing == "chunked" else data
    async with stage(clock=clock) as (up, tap):
        head = b"HTTP/1.1 200 OK\r\n" + fields[framing] + b"\r\n"
        path = up.on(says(head + coded, then=CLOSE if framing == "close" else None))
        client = await tap.client()
        answer = await client.get(path)
        assert answer.whole
        assert answer.data == data
        assert answer.body.raw == coded, "the framing itself is passed, chunk by chunk"
        assert answer.ending is (Ending.FIN if framing == "close" else None)
        recorded = await tap.meter.closed(1)
        assert recorded.answer == head + coded
        assert recorded.closing.response_bytes == len(head + coded)


# ---------------------------------------------------------------- requests


@CLOCKS
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("framing", ["length", "chunked"])
@scene
async def test_a_request_of_any_framing_and_size(framing: str, size: int, clock: str) -> None:
    data = random_bytes(size)
    async with stage(clock=clock) as (up, tap):
        path = up.on(answers(b"got"))
        if framing == "length":
            raw, coded = request("POST", path, body=data), data
        else:
            coded = chunked(*in_random_pieces(data, 5, (1, 100, 5_000, 70_000)), trailers=b"X-T: 1\r\n")
            raw = request("POST", path, "Transfer-Encoding: chunked") + coded
        client = await tap.client()
        assert (await client.ask(raw)).data == b"got"
        payload = up.call(path).payload
        assert payload is not None
        assert payload.data == data
        assert payload.raw == coded
        recorded = await tap.meter.closed(1)
        assert recorded.request == raw
        assert recorded.closing.request_bytes == len(raw)


@settings(max_examples=25)
@given(
    data=st.binary(max_size=3_000),
    up_cuts=st.lists(st.integers(0), max_size=5),
    down_cuts=st.lists(st.integers(0), max_size=5),
    chunk_sizes=st.lists(st.integers(1, 700), min_size=1, max_size=5),
    chunks_up=st.booleans(),
    chunks_down=st.booleans(),
)
def test_random_bodies_cut_at_random_places(
    data: bytes,
    up_cuts: list[int],
    down_cuts: list[int],
    chunk_sizes: list[int],
    chunks_up: bool,
    chunks_down: bool,
) -> None:
    """The same bytes up and down, the writes cut anywhere: also within heads, sizes and line ends."""
    pieces, at = [], 0
    while at < len(data):
        size = chunk_sizes[len(pieces) % len(chunk_sizes)]
        pieces.append(data[at : at + size])
        at += size
    coded = chunked(*pieces)

    async def one() -> None:
        async with stage() as (up, tap):

            async def echo(call: Call) -> None:
                assert await call.body() == data
                if chunks_down:
                    raw = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + coded
                else:
                    raw = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(data) + data
                for piece in cut(raw, down_cuts):
                    await call.say(piece)
                    await asyncio.sleep(0)

            path = up.on(echo)
            if chunks_up:
                raw = request("PUT", path, "Transfer-Encoding: chunked") + coded
            else:
                raw = request("PUT", path, body=data)
            client = await tap.client()
            for _ in range(2):  # on a fresh connection to the upstream, and on a kept one
                for piece in cut(raw, up_cuts):
                    await client.send(piece)
                    await asyncio.sleep(0)
                answer = await client.answer(b"PUT")
                assert (answer.status, answer.data, answer.whole) == (200, data, True)
            assert up.connections == 1

    play(one())


@settings(max_examples=20)
@given(
    bodies=st.lists(st.binary(max_size=200), min_size=2, max_size=6),
    cuts=st.lists(st.integers(0), max_size=8),
    coded=st.booleans(),
)
def test_a_pipeline_cut_anywhere_is_answered_in_order(
    bodies: list[bytes], cuts: list[int], coded: bool
) -> None:
    async def one() -> None:
        async with stage() as (up, tap):

            async def echo(call: Call) -> None:
                body = await call.body()
                await call.say(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(body) + body)

            path = up.on(echo)
            raw = b""
            for body in bodies:
                if coded:
                    raw += request("POST", path, "Transfer-Encoding: chunked") + chunked(body)
                else:
                    raw += request("POST", path, body=body)
            client = await tap.client()
            for piece in cut(raw, cuts):
                await client.send(piece)
                await asyncio.sleep(0)
            assert [(await client.answer(b"POST")).data for _ in bodies] == bodies

    play(one())


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


EVENTS = {
    "small": [event(i, 180) for i in range(50)],
    "tiny": [b"%d" % (i % 10) for i in range(100)],
    "larger than a read": [event(i, 100_000) for i in range(5)],
}


@CLOCKS
@pytest.mark.parametrize("framing", HEADS)
@pytest.mark.parametrize("size", EVENTS)
@scene
async def test_one_event_in_is_one_event_out(size: str, framing: str, clock: str) -> None:
    """The head comes before there is any event; no event is held back for a later one."""
    events = EVENTS[size]
    async with stage(clock=clock) as (up, tap):
        stream = LockStep(framing, events)
        await stream.listen(await tap.client(), up.on(stream.script))
        reads = (await tap.meter.closed(1)).of(FrameKind.RESPONSE_DATA)
        assert len(reads) >= len(events), "each has a stamp of its own"


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

"""Invariant: a body leaves the relay as the very bytes that came in at once, whatever its framing."""

import asyncio
import random
from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmtap.channel.frames import FrameKind
from tests.support.servers.peer import Ending, Payload, chunk, chunked, play
from tests.support.servers.proxy import stage
from tests.support.servers.raw_client import request
from tests.support.servers.upstream import CHUNKED, CLOSE, OK, Call, says

HEADS = {
    "chunked": CHUNKED,
    "length": b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n",
    "close": b"HTTP/1.1 200 OK\r\n\r\n",
}
FRAMING = pytest.mark.parametrize("framing", HEADS)
SIZES = [0, 1, 65_535, 65_536, 65_537, 1_000_000]
CLOCKS = pytest.mark.parametrize("clock", ["mono", "kernel"])


def head_of(framing: str, size: int) -> bytes:
    return HEADS[framing] % size if framing == "length" else HEADS[framing]


def cut(data: bytes, cuts: list[int]) -> list[bytes]:
    edges = [0, *sorted(c % (len(data) + 1) for c in cuts), len(data)]
    return [data[a:b] for a, b in pairwise(edges)]


def in_chunks(data: bytes, sizes: Sequence[int], trailers: bytes = b"") -> bytes:
    """A chunked body whose chunks have these sizes in random order, the same each time."""
    dice = random.Random(3)
    pieces, at = [], 0
    while at < len(data):
        n = dice.choice(sizes)
        pieces.append(data[at : at + n])
        at += n
    return chunked(*pieces, trailers=trailers)


@CLOCKS
@pytest.mark.parametrize("size", SIZES)
@FRAMING
async def test_bodies_of_any_framing_and_size(framing: str, size: int, clock: str) -> None:
    """An answer, and a request unless it would end with the connection."""
    data = random.Random(7).randbytes(size)
    head, coded, up_coded = head_of(framing, size), data, data
    if framing == "chunked":
        coded = in_chunks(data, (1, 7, 100, 4_096, 70_000))
        up_coded = in_chunks(data, (1, 100, 5_000, 70_000), b"X-T: 1\r\n")
    async with stage(clock=clock) as (up, tap):
        path = up.on(says(head + coded, then=CLOSE if framing == "close" else None))
        if framing == "chunked":
            raw = request("POST", path, "Transfer-Encoding: chunked") + up_coded
        else:
            raw = request("POST", path, body=data)
        answer = await tap.ask(raw)
        assert (answer.whole, answer.data == data) == (True, True)
        assert answer.body.raw == coded, "the framing itself is passed, chunk by chunk"
        assert answer.ending is (Ending.FIN if framing == "close" else None)
        payload = up.call(path).payload
        assert payload is not None and payload.raw == up_coded
        recorded = await tap.meter.closed(1)
        assert (recorded.request == raw, recorded.answer == head + coded) == (True, True)
        closing = recorded.closing
        assert (closing.request_bytes, closing.response_bytes) == (len(raw), len(head + coded))


@settings(max_examples=25)
@given(
    data=st.binary(max_size=3_000),
    up_cuts=st.lists(st.integers(0), max_size=5),
    down_cuts=st.lists(st.integers(0), max_size=5),
    sizes=st.lists(st.integers(1, 700), min_size=1, max_size=5),
    up_coded=st.booleans(),
    down_coded=st.booleans(),
)
def test_random_bodies_cut_at_random_places(
    data: bytes,
    up_cuts: list[int],
    down_cuts: list[int],
    sizes: list[int],
    up_coded: bool,
    down_coded: bool,
) -> None:
    """The same bytes up and down, the writes cut anywhere: also within heads, sizes and line ends."""
    coded = in_chunks(data, sizes)

    async def one() -> None:
        async with stage() as (up, tap):

            async def echo(call: Call) -> None:
                assert await call.body() == data
                down = CHUNKED + coded if down_coded else head_of("length", len(data)) + data
                for piece in cut(down, down_cuts):
                    await call.say(piece)
                    await asyncio.sleep(0)

            path = up.on(echo)
            raw = request("PUT", path, body=data)
            if up_coded:
                raw = request("PUT", path, "Transfer-Encoding: chunked") + coded
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
                await call.say(head_of("length", len(body)) + body)

            path = up.on(echo)
            if coded:
                head = request("POST", path, "Transfer-Encoding: chunked")
                raw = b"".join(head + chunked(body) for body in bodies)
            else:
                raw = b"".join(request("POST", path, body=body) for body in bodies)
            client = await tap.client()
            for piece in cut(raw, cuts):
                await client.send(piece)
                await asyncio.sleep(0)
            assert [(await client.answer(b"POST")).data for _ in bodies] == bodies

    play(one())


EVENTS = {
    "small": [b"data: %03d\n\n" % i for i in range(50)],
    "tiny": [b"%d" % (i % 10) for i in range(100)],
    "larger than a read": [b"%d" % i * 100_000 for i in range(5)],
}


@CLOCKS
@pytest.mark.parametrize("framing", [*HEADS, "http10"])
@pytest.mark.parametrize("size", EVENTS)
async def test_one_event_in_is_one_event_out(size: str, framing: str, clock: str) -> None:
    """The upstream sends the first event when its client has the head, and each event when it has the last.

    An HTTP/1.0 client has the chunks taken off; that must not make them wait.
    """
    events = EVENTS[size]
    coded = [chunk(e) if framing in ("chunked", "http10") else e for e in events]
    heard = asyncio.Semaphore(0)

    async def script(call: Call) -> str | None:
        await call.say(head_of("chunked" if framing == "http10" else framing, sum(map(len, events))))
        for data in coded:
            await heard.acquire()
            await call.say(data)
        await heard.acquire()
        if framing in ("chunked", "http10"):
            await call.say(b"0\r\n\r\n")
        return CLOSE if framing == "close" else None

    async with stage(clock=clock) as (up, tap):
        client = await tap.client()
        await client.send(request("GET", up.on(script), version="1.0" if framing == "http10" else "1.1"))
        await client.head()
        heard.release()
        for data in events if framing == "http10" else coded:
            assert await client.exactly(len(data)) == data
            heard.release()
        if framing == "chunked":
            assert await client.exactly(5) == b"0\r\n\r\n"
        reads = (await tap.meter.closed(1)).of(FrameKind.RESPONSE_DATA)
        assert len(reads) >= len(events), "each has a stamp of its own"


@pytest.mark.parametrize("framing", ["length", "chunked"])
async def test_each_piece_of_an_upload_arrives_before_the_next_is_sent(framing: str) -> None:
    pieces = [b"%03d" % i + b"u" * 997 for i in range(20)]
    how = "Content-Length: 20000"
    if framing == "chunked":
        pieces, how = [*map(chunk, pieces), b"0\r\n\r\n"], "Transfer-Encoding: chunked"
    arrived = asyncio.Semaphore(0)

    async def script(call: Call) -> None:
        arrived.release()  # the head alone
        for piece in pieces:
            assert await call.peer.exactly(len(piece)) == piece
            arrived.release()
        call.payload = Payload()
        await call.say(OK)

    async with stage() as (up, tap):
        client = await tap.client()
        await client.send(request("POST", up.on(script), how))
        for piece in pieces:
            await arrived.acquire()
            await client.send(piece)
        assert (await client.answer()).data == b"ok"
        reads = (await tap.meter.closed(1)).of(FrameKind.REQUEST_DATA)
        assert [f.data for f in reads] == pieces

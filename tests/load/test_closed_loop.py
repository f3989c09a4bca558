"""The demo's client: so many streams, so many at a time, and a cut stream is not a completed one."""

import asyncio

import pytest

from llmtap.load.closed_loop import ClosedLoop, stream_all
from tests.support.peer import chunk, chunked, scene
from tests.support.upstream import CLOSE, Call, Script, Upstream, upstream

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
DONE = b"data: [DONE]\n\n"


async def run(up: Upstream, script: Script, streams: int = 1, concurrency: int = 1) -> tuple[ClosedLoop, int]:
    """What the clients saw, and how often they said that one was done."""
    dones = 0

    def done() -> None:
        nonlocal dones
        dones += 1

    url = up.url + up.on(script)
    seen = await stream_all(
        url, streams=streams, concurrency=concurrency, headers=lambda i: {"x-request-id": f"n-{i}"}, done=done
    )
    return seen, dones


@scene
async def test_so_many_streams_so_many_at_a_time() -> None:
    async with upstream() as up:
        now = most = 0

        async def script(call: Call) -> None:
            nonlocal now, most
            now += 1
            most = max(most, now)
            await call.body()
            await call.say(HEAD, chunk(b"data: {}\n\n"))
            await asyncio.sleep(0.01)
            now -= 1
            await call.say(chunked(DONE))

        seen, dones = await run(up, script, streams=23, concurrency=5)
        assert (seen.completed, seen.failed, seen.first_error, dones) == (23, 0, None, 23)
        assert most == 5
        assert len(seen.ttft_ns) == 23
        assert len(seen.gaps_ns) >= 23
        assert all(t > 0 for t in seen.ttft_ns)
        names = sorted((c.head.get("x-request-id") or b"").decode() for c in up.calls)
        assert names == sorted(f"n-{i}" for i in range(23))
        assert b'"stream":true' in (up.calls[0].payload.data if up.calls[0].payload else b"").replace(
            b" ", b""
        )


@pytest.mark.parametrize(
    "pieces",
    [
        [b"HTTP/1.1 503 Busy\r\nContent-Length: 0\r\n\r\n"],
        [HEAD, chunk(b"data: {}\n\n")],  # cut
        [HEAD, chunked(b"data: {}\n\n")],  # in order, but without its end marker
        [b"garbage\r\n\r\n"],
        [],
    ],
)
@scene
async def test_what_fails_is_counted_and_the_first_reason_kept(pieces: list[bytes]) -> None:
    async with upstream() as up:

        async def script(call: Call) -> str:
            await call.body()
            await call.say(*pieces)
            return CLOSE

        seen, dones = await run(up, script, streams=3, concurrency=2)
        assert (seen.completed, seen.failed, dones) == (0, 3, 3)
        assert seen.first_error
        assert seen.ttft_ns == []


@scene
async def test_more_clients_than_streams_is_no_harm() -> None:
    async with upstream() as up:

        async def script(call: Call) -> None:
            await call.body()
            await call.say(HEAD + chunked(DONE))

        seen, dones = await run(up, script, streams=2, concurrency=10)
        assert (seen.completed, dones) == (2, 2)


@scene
async def test_the_time_to_the_first_event_is_the_clients() -> None:
    async with upstream() as up:

        async def script(call: Call) -> None:
            await call.body()
            await call.say(HEAD)
            await asyncio.sleep(0.05)
            await call.say(chunk(b"data: {}\n\n"))
            await asyncio.sleep(0.03)
            await call.say(chunked(DONE))

        seen, _ = await run(up, script)
        assert seen.ttft_ns[0] >= 49_000_000
        assert max(seen.gaps_ns) >= 29_000_000

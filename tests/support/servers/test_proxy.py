"""The stage itself: its upstream says what it is told to, its meter hears what was said."""

import asyncio

import pytest

from llmtap.channel.frames import FrameKind
from tests.support.servers.peer import Gone, scene, wait_until
from tests.support.servers.proxy import Frame, spelled_out, stage
from tests.support.servers.raw_client import RawClient, request
from tests.support.servers.upstream import CLOSE, Call, answers, says, unanswered_port, upstream

HEAD = b"POST / HTTP/1.1\r\n\r\n"


@pytest.mark.parametrize(
    ("frame", "plain"),
    [
        (Frame(FrameKind.OPEN, 1, 5, 0, HEAD), [(FrameKind.OPEN, 5, 0, HEAD)]),
        (
            Frame(FrameKind.OPEN, 1, 5, 7, HEAD + b"body"),
            [
                (FrameKind.OPEN, 5, 0, HEAD),
                (FrameKind.REQUEST_DATA, 7, 0, b"body"),
                (FrameKind.REQUEST_END, 7, 0, b""),
            ],
        ),
        (
            Frame(FrameKind.SENT, 1, 5, 9, HEAD),
            [(FrameKind.OPEN, 5, 0, HEAD), (FrameKind.REQUEST_END, 5, 0, b""), (FrameKind.SUBMIT, 9, 4, b"")],
        ),
        (
            Frame(FrameKind.ANSWER, 1, 5, 2, HEAD + b"body"),
            [
                (FrameKind.RESPONSE_HEAD, 5, 2, HEAD),
                (FrameKind.RESPONSE_DATA, 5, 2, b"body"),
                (FrameKind.RESPONSE_END, 5, 0, b""),
            ],
        ),
        (Frame(FrameKind.CLOSE, 1, 5, 2, b"{}"), [(FrameKind.CLOSE, 5, 2, b"{}")]),
    ],
)
def test_a_shorthand_is_spelled_out(frame: Frame, plain: list[tuple[FrameKind, int, int, bytes]]) -> None:
    assert [(f.kind, f.t_ns, f.extra_ns, f.data) for f in spelled_out(frame)] == plain


@scene
async def test_an_upstream_plays_the_script_of_each_path() -> None:
    async with upstream() as up:
        one, two = up.on(answers(b"1")), up.on(says(b"HTTP/1.1 200 OK\r\n\r\nto the close", then=CLOSE))
        client = await RawClient.connect(up.port)
        assert (await client.post(one + "/more?x", b"abc")).data == b"1"
        assert (await client.get("/nobody")).status == 404
        assert (await client.get(two)).data == b"to the close"
        assert [c.payload.data for c in up.calls_to(one) if c.payload] == [b"abc"]
        assert len(up.strays) == 1
        assert (up.connections, up.call(two).connection) == (1, 1)
        await wait_until(lambda: not up.open)
        client.close()


@scene
async def test_an_upstream_that_stops_resets_and_may_come_back() -> None:
    async with upstream() as up:
        begun = asyncio.Event()

        async def waits(call: Call) -> None:
            begun.set()
            await asyncio.sleep(10)

        path = up.on(waits)
        client = await RawClient.connect(up.port)
        await client.send(request("GET", path))
        await begun.wait()
        await up.stop()
        with pytest.raises((Gone, ConnectionError)):
            await client.answer()
        with pytest.raises(ConnectionRefusedError):
            await RawClient.connect(up.port)
        up.start()
        (await RawClient.connect(up.port)).close()
        client.close()


@scene
async def test_an_error_in_a_script_fails_the_test() -> None:
    async def broken(call: Call) -> None:
        raise ValueError("in the script")

    with pytest.raises(ValueError, match="in the script"):
        async with upstream() as up:
            client = await RawClient.connect(up.port)
            await client.send(request("GET", up.on(broken)))
            await client.to_end()
            client.close()


@scene
async def test_nobody_is_let_into_the_unanswered_port() -> None:
    async with unanswered_port() as port:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.1):
                await RawClient.connect(port)


@scene
async def test_the_meter_can_be_slow_dead_and_back() -> None:
    async with stage() as (up, tap):
        path = up.on(answers())
        client = await tap.client()
        await client.get(path)
        assert (await tap.meter.closed(1)).closing.outcome == "complete"
        tap.meter.pause()
        await client.get(path)
        await asyncio.sleep(0.05)
        assert tap.meter.exchange(2).kinds == []
        tap.meter.resume()
        await tap.meter.closed(2)
        tap.meter.stop()
        await wait_until(lambda: not tap.relay.tap.connected)
        await tap.meter.start()
        await wait_until(lambda: len(tap.meter.hellos) == 2)

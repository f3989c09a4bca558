"""A WebSocket handshake passes, and from there on two connections are one: both ways, to the last byte."""

import asyncio
import random

import pytest

from llmtap.channel.frames import FrameKind
from llmtap.clock import SystemClock
from tests.support.servers.peer import PATIENCE_S, Ending, Peer, wait_still, wait_until
from tests.support.servers.proxy import Tapped, ms, stage
from tests.support.servers.raw_client import RawClient, request
from tests.support.servers.upstream import CLOSE, RESET, Call, Script, Upstream, answers, says

ASKS = (
    "Connection: keep-alive, Upgrade",
    "Upgrade: websocket",
    "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==",
    "Sec-WebSocket-Version: 13",
)
SWEEPS_S = 0.6
"""Long enough for the relay to have looked at its connections now and then."""
SWITCH = (
    b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
    b"Sec-WebSocket-Accept: s3pPLMBiTxaQ9kYGzzhZRbK+xOo=\r\n\r\n"
)


async def tunnel(
    up: Upstream, tap: Tapped, talk: Script, *, ahead: bytes = b"", early: bytes = b""
) -> RawClient:
    """A client behind its handshake; `early` goes out in the same write as the upstream's head."""

    async def script(call: Call) -> str | None:
        fields = {name.lower(): value for name, value in call.head.fields}
        assert fields[b"upgrade"] == b"websocket"
        assert fields[b"connection"] == b"Upgrade"
        assert fields[b"sec-websocket-key"] == b"dGhlIHNhbXBsZSBub25jZQ=="
        await call.say(SWITCH + early)
        return await talk(call) or CLOSE

    client = await tap.client()
    await client.send(request("GET", up.on(script), *ASKS) + ahead)
    head = await client.head()
    assert head.line == b"HTTP/1.1 101 Switching Protocols"
    # RFC 6455 4.1: a client fails the connection unless it finds exactly these.
    assert (head.get("upgrade") or b"").lower() == b"websocket"
    assert (head.get("connection") or b"").lower() == b"upgrade"
    assert head.get("sec-websocket-accept") == b"s3pPLMBiTxaQ9kYGzzhZRbK+xOo="
    return client


async def echo(call: Call) -> None:
    while data := await call.peer.read():
        await call.say(data)


@pytest.mark.parametrize("clock", ["mono", "kernel"])
async def test_every_message_passes_at_once_and_is_stamped(clock: str) -> None:
    async with stage(clock=clock) as (up, tap):
        client = await tunnel(up, tap, echo)
        messages = [b"\x81\x05" + b"%05d" % i for i in range(50)]
        for message in messages:
            await client.send(message)
            assert await client.exactly(7) == message
        client.half_close()
        assert await client.to_end() == (b"", Ending.FIN)
        recorded = await tap.meter.closed(1)
        kinds = recorded.kinds
        assert kinds.index(FrameKind.RESPONSE_HEAD) < kinds.index(FrameKind.UPGRADED)
        assert kinds.index(FrameKind.UPGRADED) < kinds.index(FrameKind.TUNNEL_UP)
        ups, downs = recorded.of(FrameKind.TUNNEL_UP), recorded.of(FrameKind.TUNNEL_DOWN)
        for frames in (ups, downs):
            assert [f.data for f in frames] == messages
            assert [f.t_ns for f in frames] == sorted(f.t_ns for f in frames)
        assert all(u.t_ns < d.t_ns for u, d in zip(ups, downs, strict=True))
        assert (recorded.closing.outcome, recorded.closing.status) == ("complete", 101)
        assert min(recorded.closing.request_bytes, recorded.closing.response_bytes) >= 350


async def test_what_is_sent_ahead_of_the_switch_is_not_lost() -> None:
    """More than a client may pipeline: reading stops, and must go on in the tunnel."""
    data = random.Random(3).randbytes(500_000)
    async with stage(pipelined_bytes=4_096) as (up, tap):
        got: list[bytes] = []

        async def late(call: Call) -> str:
            await wait_still(lambda: client.sent_bytes)
            await call.say(SWITCH + b"welcome")
            got.append(await call.peer.exactly(len(data)))
            return CLOSE

        client = await tap.client()
        await client.send(request("GET", up.on(late), *ASKS) + data[:100], data[100:])
        assert (await client.head()).line.startswith(b"HTTP/1.1 101 ")
        assert (await client.to_end())[0] == b"welcome"
        assert got == [data]
        client.close()
        recorded = await tap.meter.closed(1)
        assert recorded.data(FrameKind.TUNNEL_UP) == data
        assert recorded.data(FrameKind.TUNNEL_DOWN) == b"welcome"


async def test_random_bytes_both_ways_at_once() -> None:
    dice = random.Random(11)
    down, up_data = dice.randbytes(3_000_000), dice.randbytes(3_000_000)
    async with stage() as (up, tap):
        got: list[bytes] = []

        async def talk(call: Call) -> str:
            pieces = [down[i : i + 70_001] for i in range(0, len(down), 70_001)]
            sending = asyncio.ensure_future(call.say(*pieces))
            got.append(await call.peer.exactly(len(up_data)))
            await sending
            return CLOSE

        client = await tunnel(up, tap, talk)
        pieces = [up_data[i : i + 9_001] for i in range(0, len(up_data), 9_001)]
        sending = asyncio.ensure_future(client.send(*pieces))
        data, how = await client.to_end()
        await sending
        assert (data == down, how) == (True, Ending.FIN)
        assert got == [up_data]


async def test_a_client_that_has_said_all_still_hears() -> None:
    async with stage() as (up, tap):

        async def talk(call: Call) -> str:
            assert await call.peer.to_end() == (b"that is all", Ending.FIN)
            await asyncio.sleep(SWEEPS_S)
            await call.say(b"and this ", b"is the answer")
            return CLOSE

        client = await tunnel(up, tap, talk)
        await client.send(b"that is all")
        client.half_close()
        assert await client.to_end() == (b"and this is the answer", Ending.FIN)
        assert (await tap.closing()).outcome == "complete"


@pytest.mark.parametrize("who", ["client", "upstream"])
async def test_a_reset_on_one_side_ends_the_other(who: str) -> None:
    async with stage() as (up, tap):
        ended = asyncio.Event()

        async def talk(call: Call) -> str | None:
            if who == "upstream":
                return RESET
            assert await call.left()
            ended.set()
            return CLOSE

        client = await tunnel(up, tap, talk)
        async with asyncio.timeout(PATIENCE_S):
            if who == "client":
                client.reset()
                await ended.wait()
            else:
                await client.to_end()
        outcome = (await tap.closing()).outcome
        assert outcome == ("client_cancelled" if who == "client" else "upstream_reset")
        await wait_until(lambda: not tap.relay.connections)


@pytest.mark.parametrize("who", ["client", "upstream"])
async def test_a_tunnel_has_back_pressure_in_both_directions(who: str) -> None:
    total = 30_000_000
    async with stage() as (up, tap):
        go = asyncio.Event()
        source: list[Peer] = []
        got: list[int] = []

        async def send_all(peer: Peer) -> None:
            source.append(peer)
            await peer.send(*[b"z" * 100_000] * (total // 100_000))

        async def take_all(peer: Peer) -> None:
            await go.wait()
            left = total
            while left:
                left -= len(await peer.read())
            got.append(total)

        async def talk(call: Call) -> str:
            await (take_all(call.peer) if who == "client" else send_all(call.peer))
            return CLOSE

        client = await tunnel(up, tap, talk)
        acting = asyncio.ensure_future(send_all(client) if who == "client" else take_all(client))
        await wait_until(lambda: source)
        assert await wait_still(lambda: source[0].sent_bytes) < total / 2
        go.set()
        await acting
        await wait_until(lambda: got)


@pytest.mark.parametrize(
    ("who", "outcome", "error"),
    [
        ("nobody", "truncated", "both sides of the tunnel sent nothing for relay.idle_timeout"),
        ("the client", "upstream_timeout", "the upstream sent nothing for relay.idle_timeout"),
        ("the upstream", "complete", None),
    ],
)
async def test_a_silent_tunnel_ends_after_the_idle_limit(who: str, outcome: str, error: str | None) -> None:
    """Whose silence it was is known only where the other side, `who`, has said all."""
    async with stage(idle_timeout=ms(200)) as (up, tap):
        ended = asyncio.Event()

        async def talk(call: Call) -> str:
            if who == "the upstream":
                call.peer.half_close()
            await call.left()
            await wait_until(lambda: not tap.relay.flows)  # the client's end came before
            ended.set()
            return CLOSE

        client = await tunnel(up, tap, talk)
        if who == "the client":
            client.half_close()
        async with asyncio.timeout(PATIENCE_S):
            await client.to_end()
            await ended.wait()
        closing = await tap.closing()
        assert (closing.outcome, closing.error) == (outcome, error)


async def test_a_tunnel_with_a_word_now_and_then_lives_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("llmtap.vantage.relay.relay.SWEEP_S", 3_600.0)  # the test looks by itself
    async with stage(clock="mono") as (up, tap):
        client = await tunnel(up, tap, echo)
        (flow,) = tap.relay.flows
        limit_ns = tap.relay.options.idle_timeout
        for _ in range(3):
            await client.send(b"ping")
            assert await client.exactly(4) == b"ping"
            flow.check(SystemClock.mono_ns() + limit_ns - 1_000_000_000)
            assert not flow.over
        flow.check(SystemClock.mono_ns() + limit_ns + 1)
        assert flow.over


async def test_an_upstream_may_decline() -> None:
    async with stage() as (up, tap):
        path = up.on(answers(b"no", status=b"426 Upgrade Required"))
        client = await tap.client()
        for _ in range(2):
            answer = await client.get(path, *ASKS)
            assert (answer.head.line, answer.data) == (b"HTTP/1.1 426 Upgrade Required", b"no")
        assert up.connections == 1, "an ordinary answer: both connections live on"


@pytest.mark.parametrize(
    ("options", "protocol"), [({"websocket": False}, "websocket"), ({}, "websocket, h2c")]
)
async def test_a_protocol_that_cannot_be_followed_is_not_offered_to_the_upstream(
    options: dict[str, bool], protocol: str
) -> None:
    """Switched off, or another one than WebSocket (RFC 9110 7.8: an upgrade is for one hop)."""
    async with stage(**options) as (up, tap):
        path, forced = up.on(answers(b"plain")), up.on(says(SWITCH, then=CLOSE))
        asks = ("Connection: Upgrade, HTTP2-Settings", f"Upgrade: {protocol}", "HTTP2-Settings: AAMAAABk")
        client = await tap.client()
        assert (await client.get(path, *asks)).data == b"plain"
        for name in ("upgrade", "connection", "http2-settings"):
            assert up.call(path).head.get(name) is None
        assert (await client.get(forced, *asks)).status == 502


async def test_a_tunnels_connection_is_never_used_again() -> None:
    async with stage() as (up, tap):
        ordinary = up.on(answers(b"next"))
        assert (await tap.get(ordinary)).status == 200
        client = await tunnel(up, tap, echo)  # over the kept connection
        assert up.connections == 1
        assert (await tap.get(ordinary)).status == 200
        assert up.connections == 2
        client.half_close()
        await client.to_end()
        await wait_until(lambda: up.open == 1)
        assert tap.relay.pool.idle == 1

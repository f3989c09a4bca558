"""A WebSocket handshake passes, and from there on two connections are one: both ways, to the last byte."""

import asyncio
import random
import socket

import pytest

from llmtap.channel.frames import FrameKind
from llmtap.clock import SystemClock
from llmtap.net.stream import PlainStream
from tests.support.servers.peer import PATIENCE_S, Ending, Peer, scene, wait_still, wait_until
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


def switches(talk: Script, early: bytes = b"") -> Script:
    """Accept the handshake, then `talk`; `early` goes out in the same write as the head."""

    async def script(call: Call) -> str | None:
        await call.say(SWITCH + early)
        return await talk(call) or CLOSE

    return script


async def tunnel(
    up: Upstream, tap: Tapped, talk: Script, *, ahead: bytes = b"", early: bytes = b""
) -> RawClient:
    """A client behind its handshake."""
    client = await tap.client()
    await client.send(request("GET", up.on(switches(talk, early)), *ASKS) + ahead)
    head = await client.head()
    assert head.line == b"HTTP/1.1 101 Switching Protocols"
    # RFC 6455 4.1: a client fails the connection unless it finds exactly these.
    assert (head.get("upgrade") or b"").lower() == b"websocket"
    assert (head.get("connection") or b"").lower() == b"upgrade"
    assert head.get("sec-websocket-accept") == b"s3pPLMBiTxaQ9kYGzzhZRbK+xOo="
    return client


def narrow(tap: Tapped) -> None:
    """Leave the sockets to clients next to no buffer."""
    for connection in tap.relay.connections:
        assert isinstance(connection._stream, PlainStream)
        connection._stream._sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4_096)


async def echo(call: Call) -> None:
    while data := await call.peer.read():
        await call.say(data)


@scene
async def test_the_handshake_reaches_the_upstream_as_one() -> None:
    async with stage() as (up, tap):
        client = await tunnel(up, tap, echo)
        head = up.calls[0].head
        assert head.get("upgrade") == b"websocket"
        assert head.get("connection") == b"Upgrade"
        assert head.get("sec-websocket-key") == b"dGhlIHNhbXBsZSBub25jZQ=="
        assert head.get("sec-websocket-version") == b"13"
        client.close()


@pytest.mark.parametrize("clock", ["mono", "kernel"])
@scene
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
        for kind in (FrameKind.TUNNEL_UP, FrameKind.TUNNEL_DOWN):
            frames = recorded.of(kind)
            assert [f.data for f in frames] == messages
            assert [f.t_ns for f in frames] == sorted(f.t_ns for f in frames)
        ups, downs = recorded.of(FrameKind.TUNNEL_UP), recorded.of(FrameKind.TUNNEL_DOWN)
        assert all(u.t_ns < d.t_ns for u, d in zip(ups, downs, strict=True))
        assert recorded.closing.outcome == "complete"
        assert recorded.closing.status == 101
        assert recorded.closing.request_bytes >= 350
        assert recorded.closing.response_bytes >= 350


@scene
async def test_what_is_sent_ahead_of_the_switch_is_not_lost() -> None:
    async with stage() as (up, tap):
        client = await tunnel(up, tap, echo, ahead=b"eager", early=b"welcome")
        assert await client.exactly(12) == b"welcomeeager"
        client.half_close()
        assert await client.to_end() == (b"", Ending.FIN)
        recorded = await tap.meter.closed(1)
        assert recorded.data(FrameKind.TUNNEL_UP) == b"eager"
        assert recorded.data(FrameKind.TUNNEL_DOWN) == b"welcomeeager"


@scene
async def test_much_sent_ahead_of_the_switch_is_not_lost() -> None:
    """More than a client may pipeline: reading stops, and must go on in the tunnel."""
    data = random.Random(3).randbytes(500_000)
    async with stage(pipelined_bytes=4_096) as (up, tap):
        got: list[bytes] = []

        async def late(call: Call) -> str:
            await asyncio.sleep(0.1)
            await call.say(SWITCH)
            got.append(await call.peer.exactly(len(data)))
            return CLOSE

        client = await tap.client()
        await client.send(request("GET", up.on(late), *ASKS) + data[:100], data[100:])
        assert (await client.head()).line.startswith(b"HTTP/1.1 101 ")
        await client.to_end()
        assert got == [data]


@scene
async def test_random_bytes_both_ways_at_once() -> None:
    dice = random.Random(11)
    down, up_data = dice.randbytes(3_000_000), dice.randbytes(3_000_000)
    async with stage() as (up, tap):
        got: list[bytes] = []

        async def talk(call: Call) -> str:
            sending = asyncio.ensure_future(
                call.say(*[down[i : i + 70_001] for i in range(0, len(down), 70_001)])
            )
            got.append(await call.peer.exactly(len(up_data)))
            await sending
            return CLOSE

        client = await tunnel(up, tap, talk)
        sending = asyncio.ensure_future(
            client.send(*[up_data[i : i + 9_001] for i in range(0, len(up_data), 9_001)])
        )
        data, how = await client.to_end()
        await sending
        assert (data == down, how) == (True, Ending.FIN)
        assert got == [up_data]


@scene
async def test_a_client_that_has_said_all_still_hears() -> None:
    async with stage() as (up, tap):

        async def talk(call: Call) -> str:
            said, how = await call.peer.to_end()
            assert (said, how) == (b"that is all", Ending.FIN)
            await asyncio.sleep(SWEEPS_S)
            await call.say(b"and this ", b"is the answer")
            return CLOSE

        client = await tunnel(up, tap, talk)
        await client.send(b"that is all")
        client.half_close()
        assert await client.to_end() == (b"and this is the answer", Ending.FIN)
        assert (await tap.meter.closed(1)).closing.outcome == "complete"


@scene
async def test_an_upstream_that_has_said_all_still_hears() -> None:
    async with stage() as (up, tap):
        heard: list[tuple[bytes, Ending]] = []

        async def talk(call: Call) -> str:
            await call.say(b"bye")
            call.peer.half_close()
            heard.append(await call.peer.to_end())
            return CLOSE

        client = await tunnel(up, tap, talk)
        assert await client.to_end() == (b"bye", Ending.FIN)
        await asyncio.sleep(SWEEPS_S)
        await client.send(b"one more thing")
        client.close()
        await wait_until(lambda: heard)
        assert heard == [(b"one more thing", Ending.FIN)]


@scene
async def test_a_clients_end_waits_for_an_upstream_that_does_not_keep_up() -> None:
    """The relay no longer reads a client that has said all: what it said must arrive, and then its end."""
    size = 16_000_000
    async with stage() as (up, tap):
        got: list[tuple[int, Ending]] = []

        async def reads_slowly(call: Call) -> str:
            total = 0
            await asyncio.sleep(0.3)
            while True:
                try:
                    data = await call.peer.read()
                except ConnectionError:
                    got.append((total, Ending.RST))
                    return CLOSE
                if not data:
                    got.append((total, Ending.FIN))
                    return CLOSE
                total += len(data)
                await asyncio.sleep(0.015)

        client = await tunnel(up, tap, reads_slowly)
        await client.send(b"z" * size)
        client.half_close()
        await wait_until(lambda: got)
        assert got == [(size, Ending.FIN)]
        assert (await tap.meter.closed(1)).closing.outcome == "complete"


@scene
async def test_what_came_before_an_upstreams_reset_reaches_a_slow_client() -> None:
    async with stage() as (up, tap):
        go = asyncio.Event()

        async def talk(call: Call) -> str:
            await call.say(b"z" * 60_000)
            await call.peer.taken()
            await go.wait()
            return RESET

        client = await tap.client(receive_buffer=4_096)
        narrow(tap)
        await client.send(request("GET", up.on(switches(talk)), *ASKS))
        await client.head()
        (flow,) = tap.relay.flows
        await wait_until(lambda: flow._stream.pending)
        assert flow.upload.upstream is not None
        flow.upload.upstream.resume()  # as it would be a moment before the client's socket is full
        go.set()
        await wait_until(lambda: flow.upload.upstream is not None and flow.upload.upstream.closed)
        data, _ = await client.to_end()
        assert len(data) == 60_000
        closing = (await tap.meter.closed(1)).closing
        assert closing.outcome == "upstream_reset"


@scene
async def test_a_pause_before_the_switch_ends_with_it() -> None:
    """It is the exchange's; the tunnel may last for hours."""
    async with stage() as (up, tap):
        interim = b"HTTP/1.1 103 Early Hints\r\nLink: <" + b"x" * 4_000 + b">\r\n\r\n"

        async def script(call: Call) -> str:
            await call.say(interim * 12 + SWITCH)
            await echo(call)
            return CLOSE

        client = await tap.client(receive_buffer=4_096)
        narrow(tap)
        await client.send(request("GET", up.on(script), *ASKS))
        await wait_until(lambda: any(flow.status == 101 for flow in tap.relay.flows))
        (flow,) = tap.relay.flows
        before_ns = flow.paused_ns
        assert before_ns
        while not (await client.head()).line.startswith(b"HTTP/1.1 101 "):
            pass
        await client.send(b"ping")
        assert await client.exactly(4) == b"ping"
        client.half_close()
        await client.to_end()
        assert (await tap.meter.closed(1)).closing.paused_ns == before_ns


@pytest.mark.parametrize("who", ["client", "upstream"])
@scene
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
        if who == "client":
            client.reset()
            await asyncio.wait_for(ended.wait(), PATIENCE_S)
        else:
            async with asyncio.timeout(PATIENCE_S):
                await client.to_end()
        recorded = await tap.meter.closed(1)
        assert recorded.closing.outcome == ("client_cancelled" if who == "client" else "upstream_reset")
        await wait_until(lambda: not tap.relay.connections)


@pytest.mark.parametrize("who", ["client", "upstream"])
@scene
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


@pytest.mark.parametrize("who", ["nobody", "the client", "the upstream"])
@scene
async def test_a_silent_tunnel_ends_after_the_idle_limit(who: str) -> None:
    """Whose silence it was is known only where the other side has said all."""
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
        closing = (await tap.meter.closed(1)).closing
        assert (closing.outcome, closing.error) == {
            "nobody": ("truncated", "both sides of the tunnel were silent for too long"),
            "the client": ("upstream_timeout", "the upstream was silent for too long"),
            "the upstream": ("complete", None),
        }[who]


@scene
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


@pytest.mark.parametrize("status", [b"200 OK", b"401 Unauthorized", b"426 Upgrade Required", b"500 Oops"])
@scene
async def test_an_upstream_may_decline(status: bytes) -> None:
    async with stage() as (up, tap):
        path = up.on(answers(b"no", status=status))
        client = await tap.client()
        for _ in range(2):
            answer = await client.get(path, *ASKS)
            assert (answer.head.line, answer.data) == (b"HTTP/1.1 " + status, b"no")
        assert up.connections == 1, "an ordinary answer: both connections live on"


@scene
async def test_upgrades_may_be_switched_off() -> None:
    async with stage(websocket=False) as (up, tap):
        path, forced = up.on(answers(b"plain")), up.on(says(SWITCH, then=CLOSE))
        client = await tap.client()
        assert (await client.get(path, *ASKS)).data == b"plain"
        assert up.call(path).head.get("upgrade") is None
        assert up.call(path).head.get("connection") is None
        assert (await client.get(forced, *ASKS)).status == 502


@pytest.mark.parametrize("protocol", ["h2c", "websocket, h2c", "TLS/1.0", "x"])
@scene
async def test_other_protocols_are_not_offered_to_the_upstream(protocol: str) -> None:
    """RFC 9110 7.8: an upgrade is for one hop; the relay could not follow into these."""
    async with stage() as (up, tap):
        path = up.on(answers(b"plain"))
        asks = ("Connection: Upgrade, HTTP2-Settings", f"Upgrade: {protocol}", "HTTP2-Settings: AAMAAABk")
        answer = await (await tap.client()).get(path, *asks)
        assert answer.data == b"plain"
        for name in ("upgrade", "connection", "http2-settings"):
            assert up.call(path).head.get(name) is None


@scene
async def test_a_tunnels_connection_is_never_used_again() -> None:
    async with stage() as (up, tap):
        ordinary = up.on(answers(b"next"))
        assert (await (await tap.client()).get(ordinary)).status == 200
        client = await tunnel(up, tap, echo)  # over the kept connection
        assert up.connections == 1
        assert (await (await tap.client()).get(ordinary)).status == 200
        assert up.connections == 2
        client.half_close()
        await client.to_end()
        await wait_until(lambda: up.open == 1)
        assert tap.relay.pool.idle == 1

"""Back-pressure both ways, and answers that do not wait for the request: what a slow side costs the relay."""

import asyncio
import contextlib
import socket
from itertools import pairwise

import pytest

from llmtap.channel.frames import FrameKind
from llmtap.clock import SystemClock
from llmtap.net.stream import PlainStream
from tests.support.servers.peer import Ending, chunk, chunked, wait_still, wait_until
from tests.support.servers.proxy import Tapped, stage, tapped
from tests.support.servers.raw_client import request
from tests.support.servers.upstream import CHUNKED, CLOSE, OK, RESET, Call, answers, says, unanswered_port


def kept_by(tap: Tapped) -> int:
    """Bytes of bodies the relay holds in its own memory."""
    total = 0
    for connection in tap.relay.connections:
        stream = connection._stream
        total += stream.pending if stream is not None else 0
        total += len(connection._buffer)
    for flow in tap.relay.flows:
        upstream = flow.upload.upstream
        total += upstream.pending if upstream is not None else 0
        total += len(flow.upload._waiting_data)
    return total


async def test_an_upload_behind_a_complete_answer_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """The client reads nothing and goes on sending what nobody wants any more."""
    monkeypatch.setattr("llmtap.vantage.relay.relay.SWEEP_S", 3_600.0)  # the test looks by itself
    async with stage() as (up, tap):
        done = asyncio.Event()

        async def refuses(call: Call) -> str:
            await call.say(b"HTTP/1.1 401 Unauthorized\r\nContent-Length: 50000\r\n\r\n" + b"x" * 50_000)
            await done.wait()
            return CLOSE

        client = await tap.client(receive_buffer=4_096)
        (connection,) = tap.relay.connections
        assert isinstance(connection._stream, PlainStream)
        connection._stream._sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4_096)
        await client.send(request("POST", up.on(refuses), "Content-Length: 10000000000"))
        await wait_until(lambda: any(flow.finishing for flow in tap.relay.flows))
        (flow,) = tap.relay.flows
        before_ns = flow.last_ns
        await client.send(*[b"y" * 100_000] * 100)
        await wait_until(lambda: flow.upload.request_bytes > 10_000_000)
        assert kept_by(tap) < 100_000
        assert flow.last_ns == before_ns, "it kept the exchange alive"
        done.set()


@pytest.mark.parametrize("who", ["client", "upstream"])
async def test_one_that_takes_little_at_a_time_is_not_idle(who: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel's buffers hide it for long: nothing more fits into them until a third is free."""
    monkeypatch.setattr("llmtap.vantage.relay.relay.SWEEP_S", 3_600.0)  # the test looks by itself
    async with stage() as (up, tap):
        takes, over = asyncio.Event(), asyncio.Event()

        async def script(call: Call) -> str:
            if who == "client":
                await call.say(b"HTTP/1.1 200 OK\r\nContent-Length: 60000000\r\n\r\n")
                with contextlib.suppress(ConnectionError):
                    await call.say(*[b"z" * 100_000] * 600)
            else:
                await takes.wait()
                await call.peer.exactly(400_000)
                await over.wait()
            return CLOSE

        client = await tap.client(receive_buffer=65_536)
        path = up.on(script)
        body = [] if who == "client" else [b"q" * 100_000] * 600
        length = f"Content-Length: {sum(map(len, body))}"
        sending = asyncio.ensure_future(client.send(request("POST", path, length), *body))
        await wait_until(lambda: up.calls)
        (flow,) = tap.relay.flows
        slow = flow._stream if who == "client" else flow.upload.upstream
        assert slow is not None
        await wait_until(lambda: slow.pending)
        await wait_still(lambda: slow.acked_bytes)
        limit_ns = tap.relay.options.idle_timeout
        now_ns = flow.last_ns + limit_ns // 2
        flow.check(now_ns)
        acked = slow.acked_bytes
        if who == "client":
            await client.exactly(400_000)
        else:
            takes.set()
        await wait_until(lambda: slow.acked_bytes > acked)
        await wait_still(lambda: slow.acked_bytes)
        now_ns += limit_ns + 1
        flow.check(now_ns)
        assert not flow.over, "it took something"
        now_ns += limit_ns + 1
        flow.check(now_ns)
        assert flow.over, "it took nothing"
        over.set()
        sending.cancel()
        await asyncio.gather(sending, return_exceptions=True)
        closing = await tap.closing()
        assert closing.outcome == ("client_cancelled" if who == "client" else "upstream_timeout")


@pytest.mark.parametrize("clock", ["mono", "kernel"])
@pytest.mark.parametrize("framing", ["length", "chunked", "http10"])
async def test_a_slow_client_slows_the_upstream(framing: str, clock: str) -> None:
    total, piece = 30_000_000, b"z" * 100_000
    async with stage(clock=clock) as (up, tap):
        peers = []

        async def flood(call: Call) -> None:
            peers.append(call.peer)
            if framing == "length":
                await call.say(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % total, *[piece] * 300)
            else:
                await call.say(CHUNKED, *[chunk(piece)] * 300, b"0\r\n\r\n")

        client = await tap.client(receive_buffer=65_536)
        await client.send(request("GET", up.on(flood), version="1.0" if framing == "http10" else "1.1"))
        await wait_until(lambda: peers)
        assert await wait_still(lambda: peers[0].sent_bytes) < total / 2
        assert kept_by(tap) <= 2 * 65_536 + 1_000, "what one read took is all the relay holds"
        answer = await client.answer()
        assert (len(answer.data), answer.whole, kept_by(tap)) == (total, True, 0)
        closing = await tap.closing()
        assert (closing.outcome, closing.paused_ns > 0) == ("complete", True)
        holds = (await tap.meter.closed(1)).of(FrameKind.HELD)
        assert sum(frame.extra_ns for frame in holds) == closing.paused_ns
        spans = [(frame.t_ns - frame.extra_ns, frame.t_ns) for frame in holds]
        assert all(end <= begin for (_, end), (begin, _) in pairwise(spans))


@pytest.mark.parametrize("framing", ["length", "chunked"])
async def test_a_slow_upstream_slows_the_client(framing: str) -> None:
    total, piece = 30_000_000, b"q" * 100_000
    async with stage() as (up, tap):
        go = asyncio.Event()

        async def late(call: Call) -> None:
            await go.wait()
            assert len(await call.body()) == total
            await call.say(OK)

        path = up.on(late)
        client = await tap.client()
        if framing == "length":
            pieces = [request("POST", path, f"Content-Length: {total}"), *[piece] * 300]
        else:
            head = request("POST", path, "Transfer-Encoding: chunked")
            pieces = [head, *[chunk(piece)] * 300, b"0\r\n\r\n"]
        sending = asyncio.ensure_future(client.send(*pieces))
        assert await wait_still(lambda: client.sent_bytes) < total / 2
        assert kept_by(tap) <= 2 * 65_536 + 1_000
        blocked_ns = SystemClock.mono_ns()
        await wait_until(lambda: SystemClock.mono_ns() - blocked_ns > 5_000_000)
        go.set()
        await sending
        assert (await client.answer()).data == b"ok"
        assert kept_by(tap) == 0
        assert (await tap.closing()).send_wait_ns > 5_000_000


async def test_an_upload_waits_in_the_kernel_while_the_upstream_is_called() -> None:
    async with unanswered_port() as port, tapped(f"http://127.0.0.1:{port}") as tap:
        client = await tap.client()
        sending = asyncio.ensure_future(
            client.send(request("POST", "/x", "Content-Length: 60000000"), *[b"q" * 1_000_000] * 60)
        )
        await wait_still(lambda: client.sent_bytes)
        assert kept_by(tap) <= 65_536 + 1_000
        assert not sending.done()
        tap.relay.pool.sweep(SystemClock.mono_ns() + 601 * 10**9)
        assert (await client.answer()).status == 504
        sending.cancel()
        await asyncio.gather(sending, return_exceptions=True)


async def test_an_endless_prelude_of_interim_answers_is_back_pressure_too() -> None:
    """1xx heads are bytes like any other to a client that reads nothing."""
    interim = b"HTTP/1.1 103 Early Hints\r\nLink: " + b"x" * 8_000 + b"\r\n\r\n"
    async with stage() as (up, tap):
        client = await tap.client(receive_buffer=65_536)
        await client.send(request("GET", up.on(says(*[interim] * 7_000, then=CLOSE))))
        await wait_until(lambda: up.calls)
        assert await wait_still(lambda: up.calls[0].peer.sent_bytes) < 30_000_000
        assert kept_by(tap) <= 1_000_000


# ---------------------------------------------------------------- answers that do not wait for the request


@pytest.mark.parametrize("then", [CLOSE, RESET, None])
async def test_an_answer_during_an_upload_reaches_the_client(then: str | None) -> None:
    """RFC 9112 9.3 and 9.6: a client that still sends must be able to read the final answer."""
    async with stage() as (up, tap):

        async def too_large(call: Call) -> str | None:
            await call.say(b"HTTP/1.1 413 Content Too Large\r\nContent-Length: 3\r\n\r\nbig")
            await asyncio.sleep(0.05)
            if then is None:
                await call.left()
                return CLOSE
            return then

        client = await tap.client()
        path = up.on(too_large)
        pieces = [b"x" * 100_000] * 30

        async def upload() -> None:
            await client.send(request("POST", path, "Content-Length: 8000000"))
            for piece in pieces:
                await client.send(piece)
                await asyncio.sleep(0.002)

        uploading = asyncio.ensure_future(upload())
        answer = await client.answer()
        assert (answer.status, answer.data) == (413, b"big")
        assert answer.head.get("connection") == b"close"
        await uploading  # the rest of the upload is still taken
        assert (await client.to_end())[1] is Ending.FIN
        await wait_until(lambda: not up.open)
        assert tap.relay.pool.idle == 0
        assert len(up.calls_to(path)) == 1
        assert (await tap.closing()).status == 413


async def test_an_answer_behind_a_broken_pipe_is_found() -> None:
    """The upstream answers and goes while its kernel still refuses the upload: the answer counts."""
    full = b"HTTP/1.1 507 Insufficient Storage\r\nContent-Length: 4\r\n\r\nfull"
    async with stage() as (up, tap):
        may_answer = asyncio.Event()
        # The upload is unread at the close: the kernel resets.
        path = up.on(says(full, after=may_answer.wait, read=False, then=CLOSE))
        client = await tap.client()
        head = request("POST", path, "Content-Length: 60000000")
        sending = asyncio.ensure_future(client.send(head, *[b"q" * 1_000_000] * 60))
        await wait_still(lambda: client.sent_bytes)
        may_answer.set()
        answer = await client.answer()
        assert (answer.status, answer.data) == (507, b"full")
        sending.cancel()
        await asyncio.gather(sending, return_exceptions=True)


async def test_an_answer_that_began_during_the_upload_may_go_on() -> None:
    async with stage() as (up, tap):

        async def eager(call: Call) -> None:
            await call.say(CHUNKED + chunk(b"reading"))
            body = await call.body()
            await call.say(chunked(b" %d bytes" % len(body)))

        client = await tap.client()
        await client.send(request("POST", up.on(eager), "Content-Length: 1000") + b"x" * 10)
        await client.head()
        assert await client.chunk() == b"reading"
        await client.send(b"x" * 990)
        assert await client.chunk() == b" 1000 bytes"
        assert await client.exactly(5) == b"0\r\n\r\n"
        assert (await client.get(up.on(answers(b"next")))).data == b"next"

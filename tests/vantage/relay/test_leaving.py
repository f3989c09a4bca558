"""Who ends first: a client that leaves at any moment; and SIGTERM, without a lost exchange and in time."""

import asyncio
import socket

import pytest

from llmtap.vantage.relay import relay as relay_module
from tests.support.servers.peer import PATIENCE_S, Ending, Gone, chunk, wait_still, wait_until
from tests.support.servers.proxy import Tapped, ms, stage, tapped
from tests.support.servers.raw_client import RawClient, request
from tests.support.servers.upstream import CHUNKED, CLOSE, OK, Call, answers, says, unanswered_port

AT_ONCE_S = 60.0
"""Far more than it takes on the busiest machine, far less than any limit that would end it, too."""
LEAVES = pytest.mark.parametrize("how", list(Ending))


class Watched:
    """A script that notices when the relay hangs up on it."""

    def __init__(self, *says: bytes) -> None:
        self._says = says
        self.begun = asyncio.Event()
        self.gone = asyncio.Event()

    async def __call__(self, call: Call) -> str:
        try:
            await call.body()
            await call.say(*self._says)
            self.begun.set()
            if await call.left():
                self.gone.set()
        except (Gone, ConnectionError):
            self.gone.set()
        return CLOSE


def leave(client: RawClient, how: Ending) -> None:
    client.reset() if how is Ending.RST else client.close()


@LEAVES
@pytest.mark.parametrize(
    "says_first", [(), (CHUNKED,), (CHUNKED, chunk(b"hello")), (b"HTTP/1.1 200 OK\r\n\r\nhello",)]
)
async def test_a_client_that_leaves_closes_the_upstream_at_once(
    says_first: tuple[bytes, ...], how: Ending
) -> None:
    async with stage() as (up, tap):
        watched = Watched(*says_first)
        client = await tap.client()
        await client.send(request("POST", up.on(watched), body=b"{}"))
        await watched.begun.wait()
        if says_first:
            await client.head()
        leave(client, how)
        await asyncio.wait_for(watched.gone.wait(), AT_ONCE_S)
        assert (await tap.closing()).outcome == "client_cancelled"
        await wait_until(lambda: not tap.relay.connections)


async def test_a_client_that_is_killed_right_behind_its_request() -> None:
    """Its request and its reset are read in the same turn: the upstream must not be left working for it."""
    async with stage() as (up, tap):
        for path in (up.on(Watched()), up.on(Watched(CHUNKED))):
            client = await tap.client()
            client.sock.send(request("POST", path, body=b"{}"))
            client.reset()
            await wait_until(lambda: not tap.relay.flows and not up.open, AT_ONCE_S)
            await wait_until(lambda: not tap.relay.connections, AT_ONCE_S)


@LEAVES
@pytest.mark.parametrize(
    "part",
    ["Content-Length: 10\r\n\r\n12345", "Transfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\nX: 1\r\n"],
)
async def test_a_client_that_leaves_while_uploading(part: str, how: Ending) -> None:
    async with stage() as (up, tap):
        watched = Watched()
        path = up.on(watched)
        client = await tap.client()
        await client.send(f"POST {path} HTTP/1.1\r\nHost: a\r\n{part}".encode())
        await wait_until(lambda: up.calls)
        leave(client, how)
        await asyncio.wait_for(watched.gone.wait(), AT_ONCE_S)
        assert up.call(path).payload is None, "half a request was taken for a whole one"
        assert (await tap.closing()).outcome == "client_cancelled"


async def test_a_client_that_leaves_while_the_upstream_does_not_keep_up() -> None:
    """The relay has stopped reading the upload; it must still notice that nobody sends it any more."""
    async with stage() as (up, tap):
        open_until = asyncio.Event()
        deaf = up.on(says(after=open_until.wait, read=False, then=CLOSE))
        client = await tap.client()
        head = request("POST", deaf, "Content-Length: 60000000")
        sending = asyncio.ensure_future(client.send(head, *[b"q" * 1_000_000] * 60))
        await wait_still(lambda: client.sent_bytes)
        sending.cancel()
        await asyncio.gather(sending, return_exceptions=True)
        client.reset()
        try:
            await wait_until(lambda: not tap.relay.flows, AT_ONCE_S)
        finally:
            open_until.set()


@LEAVES
async def test_a_client_that_leaves_with_an_answer_it_never_read(how: Ending) -> None:
    async with stage() as (up, tap):
        watched = Watched(b"HTTP/1.1 200 OK\r\nContent-Length: 60000000\r\n\r\n", *[b"z" * 1_000_000] * 60)
        client = await tap.client(receive_buffer=65_536)
        await client.send(request("GET", up.on(watched)))
        await wait_until(lambda: up.calls)
        await wait_still(lambda: up.calls[0].peer.sent_bytes)
        leave(client, how)
        await asyncio.wait_for(watched.gone.wait(), AT_ONCE_S)
        closing = await tap.closing()
        assert closing.outcome == "client_cancelled"
        assert closing.paused_ns > 100_000_000


@LEAVES
@pytest.mark.parametrize("body", [b"whole", b"half"])
async def test_a_client_that_leaves_while_the_upstream_is_being_called(body: bytes, how: Ending) -> None:
    async with unanswered_port() as port, tapped(f"http://127.0.0.1:{port}") as tap:
        client = await tap.client()
        await client.send(request("POST", "/x", "Content-Length: 5") + body)
        pool = tap.relay.pool
        await wait_until(lambda: pool.attempts and not pool.unresolved)
        leave(client, how)
        await wait_until(lambda: not tap.relay.flows, AT_ONCE_S)


# ---------------------------------------------------------------- draining

PATIENT = {"drain_timeout": ms(200_000)}
"""Far beyond the time that a test waits for a drain."""


class Stream:
    """A stream that goes on until it is told to end."""

    def __init__(self) -> None:
        self.go = asyncio.Event()

    async def __call__(self, call: Call) -> None:
        await call.body()
        await call.say(CHUNKED, chunk(b"begun"))
        await self.go.wait()
        for _ in range(10):
            await call.say(chunk(b"hello"))
            await asyncio.sleep(0.002)
        await call.say(b"0\r\n\r\n")


async def draining(tap: Tapped) -> "asyncio.Task[None]":
    """A drain that has begun."""
    drain = asyncio.ensure_future(tap.drain())
    await wait_until(lambda: tap.relay.reporter.draining)
    return drain


async def test_streams_under_way_end_in_order_and_nobody_new_comes_in() -> None:
    """Idle connections are closed at once; a pipelined request that has come is answered."""
    async with stage(**PATIENT) as (up, tap):
        stream, after = Stream(), up.on(answers(b"after"))
        used, fresh, client = [await tap.client() for _ in range(3)]
        assert (await used.get(up.on(answers()))).status == 200
        await client.send(request("GET", up.on(stream)) + request("GET", after) * 2)
        await client.head()
        assert await client.chunk() == b"begun"
        await wait_until(lambda: len(tap.relay.connections) == 3)
        drain = await draining(tap)
        for idle in (used, fresh):
            assert await idle.to_end() == (b"", Ending.FIN)
        with pytest.raises(ConnectionRefusedError):
            await RawClient.connect(tap.port)
        stream.go.set()
        assert (await client.chunked_payload()).data == b"hello" * 10
        first = await client.answer()
        assert (first.data, first.head.get("connection")) == (b"after", b"close")
        assert await client.to_end() == (b"", Ending.FIN)
        await asyncio.wait_for(drain, PATIENCE_S)
        assert (await tap.closing(2)).outcome == "complete"
        assert (tap.relay.tap.ledger.measured, tap.meter.statuses[-1].opened) == (3, 3)
        await wait_until(lambda: up.open == 0)


async def test_a_relay_that_others_replaced_answers_one_more_request_of_each_client() -> None:
    """An idle client, one whose running response did not say that it is the last, and a new one."""
    async with stage(**PATIENT) as (up, tap):
        path, stream = up.on(answers(b"last")), Stream()
        idle, busy, fresh = [await tap.client() for _ in range(3)]
        assert (await idle.get(path)).head.get("connection") is None
        await busy.send(request("GET", up.on(stream)))
        assert (await busy.head()).get("connection") is None
        await wait_until(lambda: len(tap.relay.connections) == 3)
        tap.relay.let_idle_clients_wait(True)
        drain = asyncio.ensure_future(tap.drain())
        stream.go.set()
        assert (await busy.chunked_payload()).data.endswith(b"hello")
        for client in (idle, busy, fresh):
            answer = await client.get(path)
            assert (answer.data, answer.head.get("connection")) == (b"last", b"close")
            assert await client.to_end() == (b"", Ending.FIN)
        await asyncio.wait_for(drain, PATIENCE_S)


@pytest.mark.parametrize("sigterm", [True, False])
async def test_an_idle_client_does_not_hold_a_replaced_relay(
    sigterm: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ends after its time, and on SIGTERM at once."""
    monkeypatch.setattr(relay_module, "LAST_REQUEST_NS", ms(3_600_000 if sigterm else 300))
    async with stage(**PATIENT) as (up, tap):
        client = await tap.client()
        assert (await client.get(up.on(answers()))).status == 200
        tap.relay.let_idle_clients_wait(True)
        drain = asyncio.ensure_future(tap.drain())
        await asyncio.sleep(0)
        if sigterm:
            assert tap.relay.connections
            tap.relay.let_idle_clients_wait(False)
        await asyncio.wait_for(drain, PATIENCE_S)
        assert await client.to_end() == (b"", Ending.FIN)


@pytest.mark.parametrize("when", ["answer not begun", "head half here"])
async def test_a_request_under_way_is_answered_while_draining_and_told_to_close(when: str) -> None:
    async with stage(**PATIENT) as (up, tap):
        go = asyncio.Event()
        raw = request("GET", up.on(says(OK, after=go.wait)))
        client = await tap.client()
        begun = len(raw) if when == "answer not begun" else 10
        await client.send(raw[:begun])
        await client.taken()
        if when == "answer not begun":
            await wait_until(lambda: up.calls)
        drain = await draining(tap)
        await client.send(raw[begun:])
        go.set()
        answer = await client.answer()
        assert (answer.data, answer.head.get("connection")) == (b"ok", b"close")
        assert await client.to_end() == (b"", Ending.FIN)
        await asyncio.wait_for(drain, PATIENCE_S)


@pytest.mark.parametrize("kept", [False, True])
async def test_a_request_that_already_lies_in_the_kernel_is_answered(kept: bool) -> None:
    """On a connection in the queue, or one that is kept: closing it unread would be a reset."""
    async with stage(**PATIENT) as (up, tap):
        path = up.on(answers(b"answered"))
        if kept:
            client = await tap.client()
            assert (await client.get(path)).data == b"answered"
        else:  # the loop has no turn in between
            client = RawClient(socket.create_connection(("127.0.0.1", tap.port)))
            tap.clients.append(client)
        client.sock.send(request("GET", path))
        await tap.drain()  # begins before the loop has had a turn
        assert (await client.answer()).data == b"answered"


async def test_the_end_comes_in_time_and_what_is_cut_looks_cut() -> None:
    async with stage(drain_timeout=ms(150)) as (up, tap):
        stream = Stream()

        async def goes_on(call: Call) -> str:
            upgrade = call.head.get("upgrade") is not None
            await call.say(SWITCH if upgrade else b"HTTP/1.1 200 OK\r\n\r\nbegun")
            await call.left()
            return CLOSE

        path = up.on(goes_on)
        chunks, closes, tunnel = [await tap.client() for _ in range(3)]
        await chunks.send(request("GET", up.on(stream)))
        await closes.send(request("GET", path))
        await tunnel.send(request("GET", path, "Connection: upgrade", "Upgrade: websocket"))
        for client in (chunks, closes, tunnel):
            await client.head()
        assert await chunks.chunk() == b"begun"
        await asyncio.wait_for(tap.drain(), PATIENCE_S)
        assert (await chunks.to_end())[0] == b""
        assert await closes.to_end() == (b"begun", Ending.RST)
        await tunnel.to_end()
        stream.go.set()
        await wait_until(lambda: not up.open)
        for seq in (1, 2, 3):  # the tap ended them
            assert (await tap.closing(seq)).outcome != "client_cancelled"


SWITCH = b"HTTP/1.1 101 Switching Protocols\r\nConnection: upgrade\r\nUpgrade: websocket\r\n\r\n"


@pytest.mark.parametrize("early", [True, False])
async def test_a_drain_can_be_cut_short_before_it_begins_and_while_it_runs(early: bool) -> None:
    """Nobody waits for the end of a drain whose supervisor has died."""
    async with stage(drain_timeout=ms(3_600_000)) as (up, tap):
        client = await tap.client()
        await client.send(request("GET", up.on(Stream())))
        await client.head()
        if early:
            tap.relay.end_drain()
        else:
            asyncio.get_running_loop().call_later(0.05, tap.relay.end_drain)
        await asyncio.wait_for(tap.drain(), PATIENCE_S)
        assert (await client.to_end())[0] == chunk(b"begun")
        assert (await tap.closing()).outcome != "client_cancelled"

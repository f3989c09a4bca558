"""Who ends first: a client that leaves at any moment; and SIGTERM, without a lost exchange and in time."""

import asyncio
import socket

import pytest

from llmtap.channel.frames import FrameKind
from llmtap.vantage.relay import relay as relay_module
from tests.support.servers.peer import PATIENCE_S, Ending, Gone, chunk, chunked, scene, wait_still, wait_until
from tests.support.servers.proxy import Tapped, ms, stage, tapped
from tests.support.servers.raw_client import RawClient, request
from tests.support.servers.upstream import CLOSE, Call, answers, unanswered_port

AT_ONCE_S = 60.0
"""Far more than it takes on the busiest machine, far less than any limit that would end it, too."""
CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"


class Watched:
    """A script that notices when the relay hangs up on it."""

    def __init__(self, *says: bytes, reads: bool = True) -> None:
        self._says = says
        self._reads = reads
        self.begun = asyncio.Event()
        self.gone = asyncio.Event()

    async def __call__(self, call: Call) -> str:
        try:
            if self._reads:
                await call.body()
            await call.say(*self._says)
            self.begun.set()
            if await call.left():
                self.gone.set()
        except (Gone, ConnectionError):
            self.gone.set()
        return CLOSE


async def leave(client: RawClient, how: Ending) -> None:
    client.reset() if how is Ending.RST else client.close()


LEAVES = pytest.mark.parametrize("how", list(Ending))


@LEAVES
@pytest.mark.parametrize(
    "says_first", [(), (CHUNKED,), (CHUNKED, chunk(b"hello")), (b"HTTP/1.1 200 OK\r\n\r\nhello",)]
)
@scene
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
        await leave(client, how)
        await asyncio.wait_for(watched.gone.wait(), AT_ONCE_S)
        assert (await tap.meter.closed(1)).closing.outcome == "client_cancelled"
        await wait_until(lambda: not tap.relay.connections)


@scene
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
@scene
async def test_a_client_that_leaves_in_a_busy_stream(how: Ending) -> None:
    async with stage() as (up, tap):
        gone = asyncio.Event()

        async def busy(call: Call) -> str:
            try:
                await call.say(CHUNKED)
                while True:
                    await call.say(chunk(b"hello"))
                    await asyncio.sleep(0.005)
            except ConnectionError:
                gone.set()
            return CLOSE

        client = await tap.client()
        await client.send(request("GET", up.on(busy)))
        await client.head()
        await asyncio.sleep(0.05)
        await leave(client, how)
        await asyncio.wait_for(gone.wait(), AT_ONCE_S)


@LEAVES
@scene
async def test_a_client_that_leaves_while_uploading(how: Ending) -> None:
    async with stage() as (up, tap):
        watched = Watched()
        path = up.on(watched)
        client = await tap.client()
        await client.send(request("POST", path, "Content-Length: 100000") + b"x" * 500)
        await wait_until(lambda: up.calls)
        await leave(client, how)
        await asyncio.wait_for(watched.gone.wait(), AT_ONCE_S)
        assert up.call(path).payload is None, "half a request was taken for a whole one"
        assert (await tap.meter.closed(1)).closing.outcome == "client_cancelled"


@pytest.mark.parametrize("how", [Ending.RST])  # a FIN waits in the client's kernel behind what it cannot send
@scene
async def test_a_client_that_leaves_while_the_upstream_does_not_keep_up(how: Ending) -> None:
    """The relay has stopped reading the upload; it must still notice that nobody sends it any more."""
    async with stage() as (up, tap):
        open_until = asyncio.Event()

        async def deaf(call: Call) -> str:
            await open_until.wait()
            return CLOSE

        client = await tap.client()
        head = request("POST", up.on(deaf), "Content-Length: 60000000")
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
@scene
async def test_a_client_that_leaves_with_an_answer_it_never_read(how: Ending) -> None:
    async with stage() as (up, tap):
        gone = asyncio.Event()

        async def flood(call: Call) -> str:
            try:
                await call.say(
                    b"HTTP/1.1 200 OK\r\nContent-Length: 60000000\r\n\r\n", *[b"z" * 1_000_000] * 60
                )
            except ConnectionError:
                gone.set()
            return CLOSE

        client = await tap.client(receive_buffer=65_536)
        await client.send(request("GET", up.on(flood)))
        await wait_until(lambda: any(flow._paused_since_ns for flow in tap.relay.flows))
        await asyncio.sleep(0.15)  # what is then held at least
        await leave(client, how)
        await asyncio.wait_for(gone.wait(), AT_ONCE_S)
        recorded = await tap.meter.closed(1)
        assert recorded.closing.outcome == "client_cancelled"
        assert recorded.closing.paused_ns > 100_000_000


@LEAVES
@pytest.mark.parametrize("complete", [True, False])
@scene
async def test_a_client_that_leaves_while_the_upstream_is_being_called(complete: bool, how: Ending) -> None:
    async with (
        unanswered_port() as port,
        tapped(f"http://127.0.0.1:{port}") as tap,
    ):
        client = await tap.client()
        raw = (
            request("POST", "/x", body=b"whole")
            if complete
            else request("POST", "/x", "Content-Length: 9") + b"half"
        )
        await client.send(raw)
        await wait_until(lambda: tap.relay.flows)
        await asyncio.sleep(0.02)
        await leave(client, how)
        await wait_until(lambda: not tap.relay.flows, AT_ONCE_S)


@scene
async def test_a_client_that_leaves_with_requests_in_its_pipeline() -> None:
    async with stage() as (up, tap):
        watched = Watched()
        never = up.on(answers())
        client = await tap.client()
        await client.send(request("GET", up.on(watched)) + request("GET", never) * 5)
        await watched.begun.wait()
        client.reset()
        await asyncio.wait_for(watched.gone.wait(), AT_ONCE_S)
        await asyncio.sleep(0.02)
        assert up.calls_to(never) == []


PATIENT = {"drain_timeout": ms(200_000)}
"""Far beyond the time that a test waits for a drain."""


class Stream:
    """A stream that goes on until it is told to end."""

    def __init__(self, count: int = 10) -> None:
        self._count = count
        self.go = asyncio.Event()

    async def __call__(self, call: Call) -> None:
        await call.body()
        await call.say(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n", chunk(b"begun"))
        await self.go.wait()
        for _ in range(self._count):
            await call.say(chunk(b"hello"))
            await asyncio.sleep(0.002)
        await call.say(b"0\r\n\r\n")


def draining(tap: Tapped) -> "asyncio.Task[None]":
    return asyncio.ensure_future(tap.drain())


@scene
async def test_streams_under_way_end_in_order_and_nobody_new_comes_in() -> None:
    async with stage(**PATIENT) as (up, tap):
        stream = Stream()
        client = await tap.client()
        await client.send(request("GET", up.on(stream)))
        await client.head()
        assert await client.chunk() == b"begun"
        drain = draining(tap)
        await asyncio.sleep(0.02)
        with pytest.raises(ConnectionRefusedError):
            await RawClient.connect(tap.port)
        stream.go.set()
        payload = await client.chunked_payload()
        assert payload.data == b"hello" * 10
        assert await client.to_end() == (b"", Ending.FIN)
        await asyncio.wait_for(drain, PATIENCE_S)
        assert (await tap.meter.closed(1)).closing.outcome == "complete"
        assert tap.relay.tap.ledger.measured == 1
        await wait_until(lambda: up.open == 0)


@scene
async def test_idle_connections_are_closed_at_once() -> None:
    async with stage(**PATIENT) as (up, tap):
        used = await tap.client()
        assert (await used.get(up.on(answers()))).status == 200
        fresh = await tap.client()
        await wait_until(lambda: len(tap.relay.connections) == 2)
        await asyncio.wait_for(tap.drain(), PATIENCE_S)
        assert await used.to_end() == (b"", Ending.FIN)
        assert await fresh.to_end() == (b"", Ending.FIN)


@scene
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
        drain = draining(tap)
        stream.go.set()
        assert (await busy.chunked_payload()).data.endswith(b"hello")
        for client in (idle, busy, fresh):
            answer = await client.get(path)
            assert (answer.data, answer.head.get("connection")) == (b"last", b"close")
            assert await client.to_end() == (b"", Ending.FIN)
        await asyncio.wait_for(drain, PATIENCE_S)


@pytest.mark.parametrize("sigterm", [True, False])
@scene
async def test_an_idle_client_does_not_hold_a_replaced_relay(
    sigterm: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ends after its time, and on SIGTERM at once."""
    monkeypatch.setattr(relay_module, "LAST_REQUEST_NS", ms(3_600_000 if sigterm else 300))
    async with stage(**PATIENT) as (up, tap):
        client = await tap.client()
        assert (await client.get(up.on(answers()))).status == 200
        tap.relay.let_idle_clients_wait(True)
        drain = draining(tap)
        await asyncio.sleep(0)
        if sigterm:
            assert tap.relay.connections
            tap.relay.let_idle_clients_wait(False)
        await asyncio.wait_for(drain, PATIENCE_S)
        assert await client.to_end() == (b"", Ending.FIN)


@scene
async def test_an_answer_that_begins_while_draining_says_close() -> None:
    async with stage(**PATIENT) as (up, tap):
        go = asyncio.Event()

        async def late(call: Call) -> None:
            await go.wait()
            await call.say(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")

        client = await tap.client()
        await client.send(request("GET", up.on(late)))
        await wait_until(lambda: up.calls)
        drain = draining(tap)
        await asyncio.sleep(0.02)
        go.set()
        answer = await client.answer()
        assert (answer.data, answer.head.get("connection")) == (b"ok", b"close")
        assert await client.to_end() == (b"", Ending.FIN)
        await asyncio.wait_for(drain, PATIENCE_S)


@scene
async def test_an_upload_under_way_may_finish() -> None:
    async with stage(**PATIENT) as (up, tap):
        path = up.on(answers(b"thanks"))
        client = await tap.client()
        await client.send(request("POST", path, "Transfer-Encoding: chunked") + chunk(b"first"))
        await wait_until(lambda: up.calls)
        drain = draining(tap)
        await asyncio.sleep(0.02)
        await client.send(chunked(b"second"))
        assert (await client.answer()).data == b"thanks"
        payload = up.call(path).payload
        assert payload is not None
        assert payload.data == b"firstsecond"
        await asyncio.wait_for(drain, PATIENCE_S)


@scene
async def test_a_head_that_has_begun_to_arrive_is_waited_for() -> None:
    async with stage(**PATIENT) as (up, tap):
        raw = request("GET", up.on(answers(b"in time")))
        client = await tap.client()
        await client.send(raw[:10])
        await client.taken()
        drain = draining(tap)
        await asyncio.sleep(0.02)
        await client.send(raw[10:])
        assert (await client.answer()).data == b"in time"
        await asyncio.wait_for(drain, PATIENCE_S)


@scene
async def test_a_connection_in_the_queue_is_let_in_and_answered() -> None:
    """Its client was told by the kernel that it is connected, and has sent its request."""
    async with stage(**PATIENT) as (up, tap):
        raw = request("GET", up.on(answers(b"let in")))
        sock = socket.create_connection(("127.0.0.1", tap.port))  # the loop has no turn in between
        sock.sendall(raw)
        client = RawClient(sock)
        tap.clients.append(client)
        await tap.drain()
        assert (await client.answer()).data == b"let in"


@scene
async def test_a_request_that_already_lies_in_the_kernel_is_answered() -> None:
    """It came before the drain began: closing its connection unread would lose it to a reset."""
    async with stage(**PATIENT) as (up, tap):
        path = up.on(answers(b"answered"))
        client = await tap.client()
        assert (await client.get(path)).data == b"answered"
        client.sock.send(request("GET", path))
        await tap.drain()  # begins before the loop has had a turn
        assert (await client.answer()).data == b"answered"


@scene
async def test_the_end_comes_in_time_and_what_is_cut_looks_cut() -> None:
    async with stage(drain_timeout=ms(150)) as (up, tap):
        stream = Stream()

        async def to_the_close(call: Call) -> str:
            await call.say(b"HTTP/1.1 200 OK\r\n\r\nbegun")
            await call.left()
            return CLOSE

        chunks, closes = await tap.client(), await tap.client()
        await chunks.send(request("GET", up.on(stream)))
        await closes.send(request("GET", up.on(to_the_close)))
        await chunks.head()
        await closes.head()
        assert await chunks.chunk() == b"begun"
        await asyncio.wait_for(tap.drain(), PATIENCE_S)
        assert (await chunks.to_end())[0] == b""
        assert await closes.to_end() == (b"begun", Ending.RST)
        stream.go.set()
        await wait_until(lambda: not up.open)
        for seq in (1, 2):  # the tap ended them
            assert (await tap.meter.closed(seq)).closing.outcome != "client_cancelled"


@scene
async def test_a_drain_can_be_cut_short_before_it_begins_and_while_it_runs() -> None:
    """Nobody waits for the end of a drain whose supervisor has died."""
    for early in (True, False):
        async with stage(drain_timeout=ms(3_600_000)) as (up, tap):
            client = await tap.client()
            await client.send(request("GET", up.on(Stream())))
            await client.head()
            if early:
                tap.relay.hurry()
            else:
                asyncio.get_running_loop().call_later(0.05, tap.relay.hurry)
            await asyncio.wait_for(tap.drain(), PATIENCE_S)
            assert (await client.to_end())[0] == chunk(b"begun")
            assert (await tap.meter.closed(1)).closing.outcome != "client_cancelled"


@scene
async def test_the_meter_gets_everything_before_the_end() -> None:
    async with stage(**PATIENT) as (up, tap):
        path = up.on(answers(b"ok"))
        client = await tap.client()
        for _ in range(20):
            await client.get(path)
        await tap.drain()
        assert tap.relay.tap.ledger.measured == 20
        assert sum(f.kind is FrameKind.CLOSE for f in tap.meter.frames) == 20
        assert tap.meter.statuses[-1].opened == 20


@scene
async def test_a_dead_meter_does_not_hold_up_the_end() -> None:
    async with stage() as (up, tap):
        assert (await (await tap.client()).get(up.on(answers()))).status == 200
        tap.meter.stop()
        await asyncio.wait_for(tap.drain(), PATIENCE_S)


@scene
async def test_pipelined_requests_already_here_are_answered() -> None:
    async with stage(**PATIENT) as (up, tap):
        stream = Stream(1)
        after = up.on(answers(b"after"))
        client = await tap.client()
        await client.send(request("GET", up.on(stream)) + request("GET", after) * 2)
        await client.head()
        assert await client.chunk() == b"begun"
        drain = draining(tap)
        await asyncio.sleep(0.02)
        stream.go.set()
        await client.chunked_payload()
        first = await client.answer()
        assert first.data == b"after"
        assert first.head.get("connection") == b"close"
        await asyncio.wait_for(drain, PATIENCE_S)


@scene
async def test_a_tunnel_is_cut_at_the_limit() -> None:
    async with stage(drain_timeout=ms(100)) as (up, tap):
        gone = asyncio.Event()

        async def tunnel(call: Call) -> str:
            await call.say(
                b"HTTP/1.1 101 Switching Protocols\r\nConnection: upgrade\r\nUpgrade: websocket\r\n\r\n"
            )
            await call.left()
            gone.set()
            return CLOSE

        client = await tap.client()
        await client.send(request("GET", up.on(tunnel), "Connection: upgrade", "Upgrade: websocket"))
        await client.head()
        await asyncio.wait_for(tap.drain(), PATIENCE_S)
        await client.to_end()
        await asyncio.wait_for(gone.wait(), PATIENCE_S)

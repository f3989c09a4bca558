"""A client that leaves, at any moment: the upstream hears of it at once."""

import asyncio

import pytest

from tests.support.servers.peer import Ending, Gone, chunk, scene, wait_still, wait_until
from tests.support.servers.proxy import stage, tapped
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


@scene
async def test_heads_followed_by_silence_can_be_left() -> None:
    async with stage() as (up, tap):
        path = up.on(Watched(CHUNKED))
        clients = [await tap.client() for _ in range(50)]
        for client in clients:
            await client.send(request("GET", path))
        for client in clients:
            assert (await client.head()).line == b"HTTP/1.1 200 OK"
        for client in clients:
            client.close()
        await wait_until(lambda: not up.open, AT_ONCE_S)
        assert (await (await tap.client()).get(up.on(answers(b"z")))).data == b"z"

"""Things that go wrong in the world: seen by whoever has to know, at once, and paid for by nobody else."""

import asyncio
import contextlib
import json
import socket
from itertools import pairwise

import pytest

from llmtap.clock import SystemClock
from llmtap.net.stream import PlainStream
from tests.support.peer import Ending, Gone, chunk, chunked, scene, wait_still, wait_until
from tests.support.proxy import Tapped, ms, stage, tapped
from tests.support.raw_client import RawClient, request
from tests.support.upstream import CLOSE, RESET, Call, answers, says, unanswered_port

AT_ONCE_S = 60.0
"""Far more than it takes on the busiest machine, far less than any limit that would end it, too."""

CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"


def kept_by(tap: Tapped) -> int:
    """Bytes of bodies the relay holds in its own memory."""
    total = 0
    for connection in tap.relay.connections:
        stream = connection._stream
        total += stream.pending if stream is not None else 0
        total += len(connection._buffer)
    for flow in tap.relay.flows:
        upstream = flow._upstream
        total += upstream.pending if upstream is not None else 0
        total += len(flow._held)
    return total


async def stalled(peer_bytes: list[int]) -> int:
    """Wait until a sender's count (kept in a list of one) no longer grows."""
    return await wait_still(lambda: peer_bytes[0])


# ---------------------------------------------------------------- answers that are cut


CUTS = {
    "a length": b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\nonly this",
    "a length without any of its body": b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n",
    "between chunks": CHUNKED + chunk(b"only this"),
    "before the first chunk": CHUNKED,
    "within a chunk": CHUNKED + b"40\r\nonly this",
    "within a size": CHUNKED + chunk(b"only this") + b"4",
    "behind a size": CHUNKED + chunk(b"only this") + b"4\r\n",
    "before a chunk's line end": CHUNKED + b"9\r\nonly this",
    "within the last chunk": CHUNKED + chunk(b"only this") + b"0\r\n",
    "within the trailers": CHUNKED + chunk(b"only this") + b"0\r\nX-T: 1\r\n",
}


@pytest.mark.parametrize("then", [CLOSE, RESET])
@pytest.mark.parametrize("name", CUTS)
@scene
async def test_a_cut_answer_looks_cut(name: str, then: str) -> None:
    """RFC 9112 8: an incomplete message must be recognisable as one."""
    async with stage() as (up, tap):

        async def script(call: Call) -> str:
            await call.say(CUTS[name])
            await call.peer.taken()  # or a reset would overtake the bytes
            return then

        client = await tap.client()
        answer = await client.get(up.on(script))
        assert answer.status == 200
        assert not answer.whole
        recorded = await tap.meter.closed(1)
        assert recorded.closing.outcome == ("upstream_reset" if then == RESET else "truncated")
        assert CUTS[name].endswith(recorded.answer[-20:])


@pytest.mark.parametrize(
    "answer", [CHUNKED + chunk(b"x"), CHUNKED + chunk(b"x" * 100_000), b"HTTP/1.1 200 OK\r\n\r\nx"]
)
@scene
async def test_a_reset_right_behind_the_bytes_is_seen_at_once(answer: bytes) -> None:
    """An upstream that is killed: its last words and its reset are there when the loop looks.

    libuv stops watching a socket that shows an error (uv__poll_io): whoever reads the bytes then, and waits
    to be called again for the error, waits for ever.
    """
    async with stage() as (up, tap):

        async def script(call: Call) -> str:
            call.peer.sock.send(answer)
            return RESET

        client = await tap.client()
        await client.send(request("GET", up.on(script)))
        async with asyncio.timeout(AT_ONCE_S):
            seen = await client.answer()
        assert seen.status == 502 or not seen.whole  # the reset may overtake the bytes
        recorded = await tap.meter.closed(1, AT_ONCE_S)
        assert recorded.closing.outcome == "upstream_reset"


@scene
async def test_an_answer_to_the_close_that_is_reset_looks_cut() -> None:
    async with stage() as (up, tap):

        async def script(call: Call) -> str:
            await call.say(b"HTTP/1.1 200 OK\r\n\r\nonly this")
            await call.peer.taken()
            return RESET

        answer = await (await tap.client()).get(up.on(script))
        assert (answer.data, answer.ending, answer.whole) == (b"only this", Ending.RST, False)
        assert (await tap.meter.closed(1)).closing.outcome == "upstream_reset"


@pytest.mark.parametrize("then", [CLOSE, RESET])
@scene
async def test_a_cut_answer_looks_cut_to_an_http10_client(then: str) -> None:
    """It was promised the end by the close: an orderly one would be a lie."""
    async with stage() as (up, tap):

        async def script(call: Call) -> str:
            await call.say(CHUNKED + chunk(b"only this"))
            await call.peer.taken()
            return then

        client = await tap.client()
        answer = await client.ask(request("GET", up.on(script), version="1.0"))
        assert (answer.data, answer.ending) == (b"only this", Ending.RST)


@scene
async def test_malformed_chunks_in_the_middle_of_an_answer_cut_it() -> None:
    async with stage() as (up, tap):

        async def script(call: Call) -> str:
            await call.say(CHUNKED + chunk(b"good"))
            await call.peer.taken()
            await call.say(b"zz\r\nbad\r\n0\r\n\r\n")
            await call.left()
            return CLOSE

        answer = await (await tap.client()).get(up.on(script))
        assert (answer.data, answer.whole) == (b"good", False)
        assert (await tap.meter.closed(1)).closing.outcome == "upstream_error"
        await wait_until(lambda: not up.open)


@scene
async def test_a_slow_client_gets_all_there_was_before_it_sees_the_cut() -> None:
    size = 12_000_000
    async with stage() as (up, tap):

        async def script(call: Call) -> str:
            await call.say(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % (size + 1))
            await call.say(b"z" * size)
            return CLOSE

        client = await tap.client(receive_buffer=65_536)
        await client.send(request("GET", up.on(script)))
        await asyncio.sleep(0.2)
        answer = await client.answer()
        assert (len(answer.data), answer.whole) == (size, False)
        assert (await tap.meter.closed(1)).closing.outcome == "truncated"


@scene
async def test_an_upstream_that_dies_under_many_streams_and_returns() -> None:
    async with stage() as (up, tap):

        async def endless(call: Call) -> str:
            await call.say(CHUNKED)
            while True:
                await call.say(chunk(b"hello"))
                await asyncio.sleep(0.02)

        path, after = up.on(endless), up.on(answers(b"back"))
        clients = [await tap.client() for _ in range(100)]
        for client in clients:
            await client.send(request("GET", path))
        for client in clients:
            await client.head()
        await up.stop()
        async with asyncio.timeout(AT_ONCE_S):
            for client in clients:
                with pytest.raises(Gone):
                    await client.chunked_payload()
        assert (await (await tap.client()).get(after)).status == 502
        up.start()
        assert (await (await tap.client()).get(after)).data == b"back"


# ---------------------------------------------------------------- asked once, or once more


class Fickle:
    """Answers the first request of each connection, and ends at the second without a word."""

    def __init__(self, then: str = CLOSE) -> None:
        self._then = then
        self._seen: set[int] = set()
        self.bodies: list[bytes] = []

    async def __call__(self, call: Call) -> str | None:
        self.bodies.append(await call.body())
        if call.connection in self._seen:
            return self._then
        self._seen.add(call.connection)
        await call.say(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")
        return None


@pytest.mark.parametrize("then", [CLOSE, RESET])
@pytest.mark.parametrize("method", ["POST", "PATCH", "PROPFIND", "LOCK"])
@scene
async def test_what_may_not_be_repeated_is_sent_once(method: str, then: str) -> None:
    """RFC 9110 9.2.2: no automatic retry of a request that is not idempotent and may have been read."""
    async with stage() as (up, tap):
        fickle = Fickle(then)
        path = up.on(fickle)
        client = await tap.client()
        assert (await client.get(path)).status == 200
        await wait_until(lambda: tap.relay.pool.idle == 1)
        answer = await client.ask(request(method, path, body=b'{"charge":1}'))
        assert answer.status == 502
        assert answer.head.get("x-llmtap-error") == b"upstream_closed"
        assert fickle.bodies == [b"", b'{"charge":1}']
        assert (await client.get(path)).status == 200
        assert (await tap.meter.closed(2)).closing.retries == 0


@pytest.mark.parametrize("then", [CLOSE, RESET])
@pytest.mark.parametrize("method", ["GET", "HEAD", "OPTIONS", "PUT", "DELETE", "TRACE"])
@scene
async def test_what_may_be_repeated_is_sent_once_more_over_a_fresh_connection(method: str, then: str) -> None:
    async with stage() as (up, tap):
        fickle = Fickle(then)
        path = up.on(fickle)
        client = await tap.client()
        assert (await client.get(path)).status == 200
        await wait_until(lambda: tap.relay.pool.idle == 1)
        body = b"same bytes" if method == "PUT" else None
        assert (await client.ask(request(method, path, body=body))).status == 200
        assert fickle.bodies == [b"", body or b"", body or b""]
        first, second = up.calls_to(path)[1:]
        assert first.head.raw == second.head.raw
        assert up.connections == 2
        recorded = await tap.meter.closed(2)
        assert (recorded.closing.retries, recorded.closing.outcome) == (1, "complete")


@scene
async def test_nothing_is_repeated_more_than_once() -> None:
    async with stage() as (up, tap):
        count = 0

        async def script(call: Call) -> str | None:
            nonlocal count
            count += 1
            if count > 1:
                return CLOSE
            await call.say(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")
            return None

        path = up.on(script)
        client = await tap.client()
        assert (await client.get(path)).status == 200
        await wait_until(lambda: tap.relay.pool.idle == 1)
        assert (await client.get(path)).status == 502
        assert count == 3


@scene
async def test_a_fresh_connection_that_fails_is_no_reason_to_repeat() -> None:
    async with stage() as (up, tap):
        path = up.on(says(then=CLOSE))
        assert (await (await tap.client()).get(path)).status == 502
        assert len(up.calls_to(path)) == 1


@pytest.mark.parametrize("begun", [b"H", b"HTTP/1.1 200 OK\r\n", b"HTTP/1.1 100 Continue\r\n\r\n"])
@scene
async def test_an_upstream_that_began_to_answer_is_not_asked_again(begun: bytes) -> None:
    async with stage() as (up, tap):
        first = True

        async def script(call: Call) -> str | None:
            nonlocal first
            if first:
                first = False
                await call.say(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")
                return None
            await call.say(begun)
            await asyncio.sleep(0.02)
            return CLOSE

        path = up.on(script)
        client = await tap.client()
        assert (await client.get(path)).status == 200
        await wait_until(lambda: tap.relay.pool.idle == 1)
        assert (await client.get(path)).status == 502
        assert len(up.calls_to(path)) == 2


@scene
async def test_a_request_still_being_sent_is_not_repeated() -> None:
    async with stage() as (up, tap):
        path = up.on(answers())

        async def leaves(call: Call) -> str:
            return CLOSE

        gone = up.on(leaves)
        client = await tap.client()
        assert (await client.get(path)).status == 200
        await wait_until(lambda: tap.relay.pool.idle == 1)
        await client.send(request("PUT", gone, "Content-Length: 10") + b"12345")
        assert (await client.answer()).status == 502
        assert len(up.calls_to(gone)) == 1


@pytest.mark.parametrize("how", [CLOSE, RESET])
@scene
async def test_a_kept_connection_that_the_upstream_closed_costs_no_request(how: str) -> None:
    async with stage() as (up, tap):

        async def once(call: Call) -> str:
            await call.body()
            await call.say(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")
            # The connection has come back, then its other side goes.
            await wait_until(lambda: tap.relay.pool.idle)
            return how

        path = up.on(once)
        client = await tap.client()
        for _ in range(20):
            assert (await client.post(path, b"abc")).status == 200
            await wait_until(lambda: not up.open)
            await asyncio.sleep(0.002)
        assert len(up.calls_to(path)) == 20


@scene
async def test_a_connection_closed_in_a_race_never_doubles_a_post() -> None:
    async with stage() as (up, tap):

        async def once(call: Call) -> str:
            await call.body()
            await call.say(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")
            await asyncio.sleep(len(up.calls) % 4 * 0.0003)
            return CLOSE

        path = up.on(once)
        client = await tap.client()
        for i in range(60):
            before = len(up.calls)
            answer = await client.post(f"{path}?{i}", b"abc")
            assert answer.status in (200, 502)
            assert len(up.calls) - before <= 1
            assert (answer.status == 200) == (len(up.calls) - before == 1)


# ---------------------------------------------------------------- silence


def error_of(data: bytes) -> str:
    code: str = json.loads(data)["error"]["code"]
    return code


@scene
async def test_an_upstream_that_never_answers_is_a_504() -> None:
    async with stage(idle_timeout=ms(200)) as (up, tap):

        async def mute(call: Call) -> str:
            await call.body()
            await call.left()
            return CLOSE

        path, after = up.on(mute), up.on(answers(b"next"))
        client = await tap.client()
        answer = await client.post(path, b"{}")
        assert (answer.status, error_of(answer.data)) == (504, "upstream_timeout")
        assert (await client.get(after)).data == b"next"
        assert len(up.calls_to(path)) == 1
        await wait_until(lambda: up.open == 1)
        assert (await tap.meter.closed(1)).closing.outcome == "upstream_timeout"


@pytest.mark.parametrize("framing", [b"Transfer-Encoding: chunked\r\n", b"Content-Length: 100\r\n", b""])
@scene
async def test_an_upstream_that_falls_silent_is_cut_visibly(framing: bytes) -> None:
    async with stage(idle_timeout=ms(200)) as (up, tap):

        async def fades(call: Call) -> str:
            await call.say(b"HTTP/1.1 200 OK\r\n" + framing + b"\r\n")
            await call.say(chunk(b"hello") if b"chunked" in framing else b"hello")
            await call.left()
            return CLOSE

        answer = await (await tap.client()).get(up.on(fades))
        assert (answer.status, answer.data, answer.whole) == (200, b"hello", False)
        await wait_until(lambda: not up.open)
        assert (await tap.meter.closed(1)).closing.outcome == "upstream_timeout"


@scene
async def test_one_that_speaks_now_and_then_is_not_silent() -> None:
    loop = asyncio.get_running_loop()
    for limit_s in (0.3, 1.5, 7.5):
        async with stage(idle_timeout=ms(limit_s * 1_000)) as (up, tap):
            spoke = []

            async def slow(call: Call) -> None:
                await call.say(CHUNKED)
                for _ in range(10):
                    spoke.append(loop.time())  # noqa: B023
                    await asyncio.sleep(limit_s / 3)  # noqa: B023
                    await call.say(chunk(b"."))
                await call.say(b"0\r\n\r\n")

            answer = await (await tap.client()).get(up.on(slow))
            if (answer.data, answer.whole) == (b"." * 10, True):
                return
            spoke.append(loop.time())
            assert max(b - a for a, b in pairwise(spoke)) > limit_s / 2, "it was cut though it spoke"
    pytest.skip("this machine stood still, again and again, for longer than an upstream may be silent")


@scene
async def test_an_upstream_that_reads_nothing_of_an_upload_is_the_one_to_blame() -> None:
    """The client did send: telling it 408 would blame the wrong side (STYLE.md, Errors)."""
    async with stage(idle_timeout=ms(300)) as (up, tap):

        async def deaf(call: Call) -> str:
            await asyncio.sleep(10)
            return CLOSE

        client = await tap.client()
        sending = asyncio.ensure_future(
            client.send(request("POST", up.on(deaf), "Content-Length: 60000000"), *[b"q" * 1_000_000] * 60)
        )
        answer = await client.answer()
        sending.cancel()
        await asyncio.gather(sending, return_exceptions=True)
        assert (answer.status, error_of(answer.data)) == (504, "upstream_timeout")
        assert (await tap.meter.closed(1)).closing.outcome == "upstream_timeout"


@pytest.mark.parametrize(("method", "body"), [("GET", None), ("POST", b"{}")])
@scene
async def test_an_upstream_that_accepts_nobody_is_a_504(method: str, body: bytes | None) -> None:
    async with (
        unanswered_port() as port,
        tapped(f"http://127.0.0.1:{port}", connect_timeout=ms(200)) as tap,
    ):
        client = await tap.client()
        for _ in range(2):
            answer = await client.ask(request(method, "/x", body=body))
            assert (answer.status, error_of(answer.data)) == (504, "upstream_connect_timeout")
        assert (await tap.meter.closed(1)).closing.outcome == "upstream_timeout"


@scene
async def test_an_upstream_whose_name_nobody_can_have_does_not_hang_its_clients() -> None:
    async with tapped("http://a..b:80") as tap:
        async with asyncio.timeout(AT_ONCE_S):
            assert (await (await tap.client()).get("/x")).status == 502


# ---------------------------------------------------------------- a client that leaves


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


# ---------------------------------------------------------------- back-pressure


@scene
async def test_an_upload_behind_a_complete_answer_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """The client reads nothing and goes on sending what nobody wants any more."""
    monkeypatch.setattr("llmtap.relay.relay.SWEEP_S", 3_600.0)  # the test looks by itself
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
        await wait_until(lambda: any(flow._finishing for flow in tap.relay.flows))
        (flow,) = tap.relay.flows
        before_ns = flow.last_ns
        await client.send(*[b"y" * 100_000] * 100)
        await wait_until(lambda: flow.request_bytes > 10_000_000)
        assert kept_by(tap) < 100_000
        assert flow.last_ns == before_ns, "it kept the exchange alive"
        done.set()


@pytest.mark.parametrize("who", ["client", "upstream"])
@scene
async def test_one_that_takes_little_at_a_time_is_not_idle(who: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel's buffers hide it for long: nothing more fits into them until a third is free."""
    monkeypatch.setattr("llmtap.relay.relay.SWEEP_S", 3_600.0)  # the test looks by itself
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
        slow = flow._stream if who == "client" else flow._upstream
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
        closing = (await tap.meter.closed(1)).closing
        assert closing.outcome == ("client_cancelled" if who == "client" else "upstream_timeout")


@pytest.mark.parametrize("clock", ["mono", "kernel"])
@pytest.mark.parametrize("framing", ["length", "chunked", "http10"])
@scene
async def test_a_slow_client_slows_the_upstream(framing: str, clock: str) -> None:
    total = 60_000_000
    async with stage(clock=clock) as (up, tap):
        pushed = [0]
        piece = b"z" * 100_000

        async def flood(call: Call) -> None:
            head = (
                b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % total if framing == "length" else CHUNKED
            )
            await call.say(head)
            for _ in range(total // len(piece)):
                await call.say(piece if framing == "length" else chunk(piece))
                pushed[0] += len(piece)
            if framing != "length":
                await call.say(b"0\r\n\r\n")

        client = await tap.client(receive_buffer=65_536)
        version = "1.0" if framing == "http10" else "1.1"
        await client.send(request("GET", up.on(flood), version=version))
        assert await stalled(pushed) < total / 2
        assert kept_by(tap) <= 2 * 65_536 + 1_000, "what one read took is all the relay holds"
        answer = await client.answer()
        assert (len(answer.data), answer.whole) == (total, True)
        assert kept_by(tap) == 0
        recorded = await tap.meter.closed(1)
        assert recorded.closing.paused_ns > 0
        assert recorded.closing.outcome == "complete"


@pytest.mark.parametrize("framing", ["length", "chunked"])
@scene
async def test_a_slow_upstream_slows_the_client(framing: str) -> None:
    total = 60_000_000
    async with stage() as (up, tap):
        go = asyncio.Event()

        async def late(call: Call) -> None:
            await go.wait()
            assert len(await call.body()) == total
            await call.say(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")

        client = await tap.client()
        piece = b"q" * 100_000
        if framing == "length":
            head, pieces = (
                request("POST", up.on(late), f"Content-Length: {total}"),
                [piece] * (total // len(piece)),
            )
        else:
            head = request("POST", up.on(late), "Transfer-Encoding: chunked")
            pieces = [*[chunk(piece)] * (total // len(piece)), b"0\r\n\r\n"]
        sending = asyncio.ensure_future(client.send(head, *pieces))
        await wait_still(lambda: client.sent_bytes)
        assert client.sent_bytes < total / 2
        assert kept_by(tap) <= 2 * 65_536 + 1_000
        go.set()
        await sending
        assert (await client.answer()).data == b"ok"
        assert kept_by(tap) == 0


@scene
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


@scene
async def test_an_endless_prelude_of_interim_answers_is_back_pressure_too() -> None:
    """1xx heads are bytes like any other to a client that reads nothing."""
    interim = b"HTTP/1.1 103 Early Hints\r\nLink: " + b"x" * 8_000 + b"\r\n\r\n"
    async with stage() as (up, tap):
        pushed = [0]

        async def chatter(call: Call) -> str:
            while pushed[0] < 60_000_000:
                await call.say(interim)
                pushed[0] += len(interim)
            return CLOSE

        client = await tap.client(receive_buffer=65_536)
        await client.send(request("GET", up.on(chatter)))
        sent = await stalled(pushed)
        assert kept_by(tap) <= 1_000_000, f"{kept_by(tap)} bytes held of {sent}"
        assert sent < 30_000_000


# ---------------------------------------------------------------- answers that do not wait for the request


@pytest.mark.parametrize("then", [CLOSE, RESET, None])
@scene
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
        assert (await tap.meter.closed(1)).closing.status == 413


@scene
async def test_an_answer_behind_a_broken_pipe_is_found() -> None:
    """The upstream answers and goes while its kernel still refuses the upload: the answer counts."""
    async with stage() as (up, tap):
        may_answer = asyncio.Event()

        async def deaf(call: Call) -> str:
            await may_answer.wait()
            await call.say(b"HTTP/1.1 507 Insufficient Storage\r\nContent-Length: 4\r\n\r\nfull")
            return CLOSE  # with the upload unread: the kernel resets

        client = await tap.client()
        head = request("POST", up.on(deaf), "Content-Length: 60000000")
        sending = asyncio.ensure_future(client.send(head, *[b"q" * 1_000_000] * 60))
        await wait_still(lambda: client.sent_bytes)
        may_answer.set()
        answer = await client.answer()
        assert (answer.status, answer.data) == (507, b"full")
        sending.cancel()
        await asyncio.gather(sending, return_exceptions=True)


@scene
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

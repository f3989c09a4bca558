"""Things that go wrong in the world: seen by whoever has to know, at once, and paid for by nobody else."""

import asyncio
import json

import pytest

from tests.support.servers.peer import Ending, Gone, chunk, scene, wait_until
from tests.support.servers.proxy import ms, stage, tapped
from tests.support.servers.raw_client import request
from tests.support.servers.upstream import CLOSE, RESET, Call, answers, unanswered_port

AT_ONCE_S = 60.0
"""Far more than it takes on the busiest machine, far less than any limit that would end it, too."""

CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"


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
async def test_one_that_speaks_now_and_then_is_not_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("llmtap.vantage.relay.relay.SWEEP_S", 3_600.0)  # the test looks by itself
    async with stage(clock="mono") as (up, tap):
        go_on = asyncio.Semaphore(0)

        async def slow(call: Call) -> str:
            await call.say(CHUNKED)
            for _ in range(3):
                await go_on.acquire()
                await call.say(chunk(b"."))
            await call.left()
            return CLOSE

        client = await tap.client()
        await client.send(request("GET", up.on(slow)))
        await client.head()
        (flow,) = tap.relay.flows
        limit_ns = tap.relay.options.idle_timeout
        for _ in range(3):
            before_ns = flow.last_ns
            go_on.release()
            assert await client.chunk() == b"."
            assert flow.last_ns > before_ns
            flow.check(flow.last_ns + limit_ns - 1)
            assert not flow.over
        flow.check(flow.last_ns + limit_ns + 1)
        assert flow.over


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

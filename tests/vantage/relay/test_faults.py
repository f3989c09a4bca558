"""Faults of the upstream: recognised at once, reported with the right outcome, and never answered twice."""

import asyncio
import json

import pytest

from tests.support.servers.peer import Ending, chunk, wait_still, wait_until
from tests.support.servers.proxy import Tapped, ms, stage, tapped
from tests.support.servers.raw_client import RawClient, request
from tests.support.servers.upstream import (
    CHUNKED,
    CLOSE,
    OK,
    RESET,
    Call,
    Upstream,
    answers,
    says,
    unanswered_port,
)

AT_ONCE_S = 60.0
"""Far more than it takes on the busiest machine, far less than any limit that would end it, too."""
THEN = pytest.mark.parametrize("then", [CLOSE, RESET])

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


@THEN
@pytest.mark.parametrize("name", CUTS)
async def test_a_cut_answer_looks_cut(name: str, then: str) -> None:
    """RFC 9112 8: an incomplete message must be recognisable as one."""
    async with stage() as (up, tap):
        answer = await tap.get(up.on(says(CUTS[name], then=then, taken=True)))
        assert (answer.status, answer.whole) == (200, False)
        recorded = await tap.meter.closed(1)
        assert recorded.closing.outcome == ("upstream_reset" if then == RESET else "truncated")
        assert CUTS[name].endswith(recorded.answer[-20:])


@pytest.mark.parametrize(
    ("version", "head", "then"),
    [
        ("1.1", b"HTTP/1.1 200 OK\r\n\r\nonly this", RESET),
        ("1.0", CHUNKED + chunk(b"only this"), CLOSE),
        ("1.0", CHUNKED + chunk(b"only this"), RESET),
    ],
)
async def test_an_answer_to_the_close_that_is_cut_ends_with_a_reset(
    version: str, head: bytes, then: str
) -> None:
    """An HTTP/1.0 client was promised the end by the close: an orderly one would be a lie."""
    async with stage() as (up, tap):
        answer = await tap.ask(request("GET", up.on(says(head, then=then, taken=True)), version=version))
        assert (answer.data, answer.ending) == (b"only this", Ending.RST)
        assert (await tap.closing()).outcome == ("upstream_reset" if then == RESET else "truncated")


@pytest.mark.parametrize("answer", [CHUNKED + chunk(b"x" * 100_000), b"HTTP/1.1 200 OK\r\n\r\nx"])
async def test_a_reset_right_behind_the_bytes_is_seen_at_once(answer: bytes) -> None:
    """libuv stops watching a socket that shows an error: whoever waits to be called again waits for ever."""
    async with stage() as (up, tap):

        async def script(call: Call) -> str:
            call.peer.sock.send(answer)
            return RESET

        async with asyncio.timeout(AT_ONCE_S):
            seen = await tap.get(up.on(script))
        assert seen.status == 502 or not seen.whole  # the reset may overtake the bytes
        assert (await tap.closing()).outcome == "upstream_reset"


async def test_a_slow_client_gets_all_there_was_before_it_sees_the_cut() -> None:
    size = 12_000_000
    async with stage() as (up, tap):
        head = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % (size + 1)
        client = await tap.client(receive_buffer=65_536)
        await client.send(request("GET", up.on(says(head, b"z" * size, then=CLOSE))))
        await wait_until(lambda: up.calls)
        await wait_still(lambda: up.calls[0].peer.sent_bytes)
        answer = await client.answer()
        assert (len(answer.data), answer.whole) == (size, False)
        assert (await tap.closing()).outcome == "truncated"


# ---------------------------------------------------------------- asked once, or once more


class Fickle:
    """Answers the first request of each connection, and ends at the second after a few bytes or none."""

    def __init__(self, then: str = CLOSE, begun: bytes = b"", connections: int = 9) -> None:
        self._then = then
        self._begun = begun
        self._connections = connections
        """Number of connections that get an answer."""
        self._seen: set[int] = set()
        self.bodies: list[bytes] = []

    async def __call__(self, call: Call) -> str | None:
        self.bodies.append(await call.body())
        if call.connection in self._seen or call.connection > self._connections:
            if self._begun:
                await call.say(self._begun)
                await call.peer.taken()
            return self._then
        self._seen.add(call.connection)
        await call.say(OK)
        return None


async def with_a_kept_connection(up: Upstream, tap: Tapped, fickle: Fickle) -> tuple[RawClient, str]:
    """A client, and a path whose next request goes out on a connection that answered before."""
    path, client = up.on(fickle), await tap.client()
    assert (await client.get(path)).status == 200
    await wait_until(lambda: tap.relay.pool.idle == 1)
    return client, path


@THEN
@pytest.mark.parametrize("method", ["POST", "PATCH", "PROPFIND", "LOCK"])
async def test_what_may_not_be_repeated_is_sent_once(method: str, then: str) -> None:
    """RFC 9110 9.2.2: no automatic retry of a request that is not idempotent and may have been read."""
    async with stage() as (up, tap):
        fickle = Fickle(then)
        client, path = await with_a_kept_connection(up, tap, fickle)
        answer = await client.ask(request(method, path, body=b'{"charge":1}'))
        assert (answer.status, answer.head.get("x-llmtap-error")) == (502, b"upstream_closed")
        assert fickle.bodies == [b"", b'{"charge":1}']
        assert (await client.get(path)).status == 200
        assert (await tap.closing(2)).retries == 0


@THEN
@pytest.mark.parametrize("method", ["GET", "HEAD", "OPTIONS", "PUT", "DELETE", "TRACE"])
async def test_what_may_be_repeated_is_sent_once_more_over_a_fresh_connection(method: str, then: str) -> None:
    async with stage() as (up, tap):
        fickle = Fickle(then)
        client, path = await with_a_kept_connection(up, tap, fickle)
        body = b"same bytes" if method == "PUT" else None
        assert (await client.ask(request(method, path, body=body))).status == 200
        assert fickle.bodies == [b"", body or b"", body or b""]
        first, second = up.calls_to(path)[1:]
        assert first.head.raw == second.head.raw
        assert up.connections == 2
        closing = await tap.closing(2)
        assert (closing.retries, closing.outcome) == (1, "complete")


@pytest.mark.parametrize(
    ("begun", "calls"),
    [(b"", 3), (b"H", 2), (b"HTTP/1.1 200 OK\r\n", 2), (b"HTTP/1.1 100 Continue\r\n\r\n", 2)],
)
async def test_no_second_retry_and_none_after_the_first_byte_of_an_answer(begun: bytes, calls: int) -> None:
    async with stage() as (up, tap):
        client, path = await with_a_kept_connection(up, tap, Fickle(begun=begun, connections=1))
        assert (await client.get(path)).status == 502
        assert len(up.calls_to(path)) == calls


async def test_a_request_still_being_sent_is_not_repeated() -> None:
    async with stage() as (up, tap):
        client, _ = await with_a_kept_connection(up, tap, Fickle())
        gone = up.on(says(then=CLOSE, read=False))
        await client.send(request("PUT", gone, "Content-Length: 10") + b"12345")
        assert (await client.answer()).status == 502
        assert len(up.calls_to(gone)) == 1


# ---------------------------------------------------------------- silence


async def deaf(call: Call) -> str:
    await call.left()
    return CLOSE


def error_of(data: bytes) -> str:
    code: str = json.loads(data)["error"]["code"]
    return code


async def test_an_upstream_that_never_answers_is_a_504() -> None:
    async with stage(idle_timeout=ms(200)) as (up, tap):

        async def mute(call: Call) -> str:
            await call.body()
            return await deaf(call)

        path = up.on(mute)
        client = await tap.client()
        answer = await client.post(path, b"{}")
        assert (answer.status, error_of(answer.data)) == (504, "upstream_timeout")
        assert (await client.get(up.on(answers(b"next")))).data == b"next"
        assert len(up.calls_to(path)) == 1
        await wait_until(lambda: up.open == 1)
        assert (await tap.closing()).outcome == "upstream_timeout"


@pytest.mark.parametrize("framing", [b"Transfer-Encoding: chunked\r\n", b"Content-Length: 100\r\n", b""])
async def test_an_upstream_that_falls_silent_is_cut_visibly(framing: bytes) -> None:
    async with stage(idle_timeout=ms(200)) as (up, tap):

        async def fades(call: Call) -> str:
            await call.say(b"HTTP/1.1 200 OK\r\n" + framing + b"\r\n")
            await call.say(chunk(b"hello") if b"chunked" in framing else b"hello")
            return await deaf(call)

        answer = await tap.get(up.on(fades))
        assert (answer.status, answer.data, answer.whole) == (200, b"hello", False)
        await wait_until(lambda: not up.open)
        assert (await tap.closing()).outcome == "upstream_timeout"


async def test_one_that_speaks_now_and_then_is_not_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("llmtap.vantage.relay.relay.SWEEP_S", 3_600.0)  # the test looks by itself
    async with stage(clock="mono") as (up, tap):
        go_on = asyncio.Semaphore(0)

        async def slow(call: Call) -> str:
            await call.say(CHUNKED)
            for _ in range(3):
                await go_on.acquire()
                await call.say(chunk(b"."))
            return await deaf(call)

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


async def test_an_upstream_that_reads_nothing_of_an_upload_is_the_one_to_blame() -> None:
    async with stage(idle_timeout=ms(300)) as (up, tap):
        reads_nothing = up.on(says(after=lambda: asyncio.sleep(10), read=False, then=CLOSE))
        client = await tap.client()
        raw = request("POST", reads_nothing, "Content-Length: 60000000")
        sending = asyncio.ensure_future(client.send(raw, *[b"q" * 1_000_000] * 60))
        answer = await client.answer()
        sending.cancel()
        await asyncio.gather(sending, return_exceptions=True)
        assert (answer.status, error_of(answer.data)) == (504, "upstream_timeout")
        assert (await tap.closing()).outcome == "upstream_timeout"


@pytest.mark.parametrize(("method", "body"), [("GET", None), ("POST", b"{}")])
async def test_an_upstream_that_accepts_nobody_is_a_504(method: str, body: bytes | None) -> None:
    async with (
        unanswered_port() as port,
        tapped(f"http://127.0.0.1:{port}", connect_timeout=ms(200)) as tap,
    ):
        client = await tap.client()
        for _ in range(2):
            answer = await client.ask(request(method, "/x", body=body))
            assert (answer.status, error_of(answer.data)) == (504, "upstream_connect_timeout")
        assert (await tap.closing()).outcome == "upstream_timeout"


async def test_an_upstream_whose_name_nobody_can_have_does_not_hang_its_clients() -> None:
    async with tapped("http://a..b:80") as tap, asyncio.timeout(AT_ONCE_S):
        assert (await tap.get("/x")).status == 502

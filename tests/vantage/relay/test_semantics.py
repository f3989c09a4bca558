"""What RFC 9110 and 9112 ask of whoever stands between a client and a gateway."""

import asyncio

import pytest

from llmtap.channel.frames import FrameKind
from tests.support.servers.peer import Ending, chunk, chunked, wait_until
from tests.support.servers.proxy import stage
from tests.support.servers.raw_client import request
from tests.support.servers.upstream import CHUNKED, CLOSE, OK, Call, answers, says

CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
EVIL = b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\nevil"


# ---------------------------------------------------------------- answers without a body


@pytest.mark.parametrize(
    ("method", "head"),
    [
        ("HEAD", b"HTTP/1.1 200 OK\r\nContent-Length: 1234\r\n\r\n"),
        ("HEAD", CHUNKED),
        ("HEAD", b"HTTP/1.1 404 Not Found\r\n\r\n"),
        ("DELETE", b"HTTP/1.1 204 No Content\r\nX: 1\r\n\r\n"),
        ("GET", b'HTTP/1.1 304 Not Modified\r\nContent-Length: 99\r\nETag: "x"\r\n\r\n'),
        ("GET", b"HTTP/1.1 304 Not Modified\r\nTransfer-Encoding: chunked\r\n\r\n"),
        ("GET", b"HTTP/1.1 205 Reset Content\r\nContent-Length: 0\r\n\r\n"),
    ],
)
async def test_an_answer_without_a_body_leaves_both_connections_usable(method: str, head: bytes) -> None:
    """RFC 9112 6.3 rule 1; its fields are passed as they are."""
    async with stage() as (up, tap):
        path, after = up.on(says(head)), up.on(answers(b"next"))
        client = await tap.client()
        for _ in range(2):
            assert (await client.ask(request(method, path))).head.raw == head
            assert (await client.get(after)).data == b"next"
        assert up.connections == 1


@pytest.mark.parametrize("fields", [b"Content-Length: 5\r\n", b"Transfer-Encoding: chunked\r\n"])
async def test_a_204_announces_no_body(fields: bytes) -> None:
    """RFC 9110 8.6, RFC 9112 6.1: a server MUST NOT send Content-Length or Transfer-Encoding in a 204."""
    async with stage() as (up, tap):
        answer = await tap.get(up.on(says(b"HTTP/1.1 204 No Content\r\n" + fields + b"\r\n", then=CLOSE)))
        assert (answer.status, answer.head.fields) == (204, [])


# ---------------------------------------------------------------- interim answers


async def test_interim_answers_are_passed_on_as_they_come() -> None:
    """RFC 9110 15.2: a proxy MUST forward 1xx."""
    early = b"HTTP/1.1 103 Early Hints\r\nLink: </a>\r\nLink: </b>\r\n\r\n"
    async with stage() as (up, tap):
        heard = asyncio.Event()

        async def script(call: Call) -> None:
            await call.say(early)
            await heard.wait()
            await call.say(b"HTTP/1.1 102 Processing\r\n\r\nHTTP/1.1 103 Early Hints\r\n\r\n", OK)

        client = await tap.client()
        await client.send(request("GET", up.on(script)))
        assert (await client.head()).raw == early
        heard.set()
        answer = await client.answer()
        assert [h.line for h in answer.interim] == [b"HTTP/1.1 102 Processing", b"HTTP/1.1 103 Early Hints"]
        assert (answer.status, answer.data) == (200, b"ok")
        recorded = await tap.meter.closed(1)
        assert (len(recorded.of(FrameKind.INTERIM)), recorded.closing.status) == (3, 200)


@pytest.mark.parametrize(
    "said", [CONTINUE, b"", b"HTTP/1.1 417 Expectation Failed\r\nContent-Length: 0\r\n\r\n"]
)
async def test_expect_is_the_upstreams_to_answer(said: bytes) -> None:
    """RFC 9110 10.1.1. After a final answer the body may or may not follow: the connection has to end."""
    async with stage() as (up, tap):
        go = asyncio.Event()

        async def script(call: Call) -> str | None:
            await call.say(said)
            if b"417" in said:
                return CLOSE
            await go.wait()
            await call.body()
            await call.say(OK)
            return None

        path = up.on(script)
        client = await tap.client()
        await client.send(request("POST", path, "Content-Length: 5", "Expect: 100-continue"))
        await wait_until(lambda: up.calls)
        assert up.call(path).head.get("expect") == b"100-continue"
        if not said:
            assert await client.silent_for(0.1), "the relay makes no 100 of its own"
        elif said == CONTINUE:
            assert (await client.head()).raw == CONTINUE
        else:
            answer = await client.answer()
            assert (answer.status, answer.head.get("connection")) == (417, b"close")
            assert (await client.to_end())[0] == b""
            return
        await client.send(b"hello")
        go.set()
        answer = await client.answer()
        assert (answer.interim, answer.data) == ([], b"ok")


async def test_trailers_pass_both_ways_and_leave_the_connections_usable() -> None:
    async with stage() as (up, tap):
        body = chunked(b"hello", trailers=b"X-Sum: 1\r\nServer-Timing: a;dur=3\r\n")
        path = up.on(says(b"HTTP/1.1 200 OK\r\nTrailer: X-Sum\r\nTransfer-Encoding: chunked\r\n\r\n" + body))
        client = await tap.client()
        for _ in range(2):
            head = request("POST", path, "TE: trailers", "Trailer: X-Up", "Transfer-Encoding: chunked")
            answer = await client.ask(head + chunked(b"up", trailers=b"X-Up: 2\r\n"))
            assert (answer.body.raw, answer.head.get("trailer")) == (body, b"X-Sum")
        for call in up.calls_to(path):
            assert call.payload is not None and call.payload.trailers == [(b"X-Up", b"2")]
            assert (call.head.get("te"), call.head.get("connection")) == (b"trailers", b"TE")
        assert up.connections == 1


# ---------------------------------------------------------------- HTTP/1.0


async def test_an_http10_client_gets_no_chunks() -> None:
    """RFC 9112 6.1: no Transfer-Encoding to a client that did not say HTTP/1.1; the close tells the end."""
    async with stage() as (up, tap):
        data = b"x" * 50_000
        path = up.on(answers(data, chunks=9, fields=b"Trailer: X-T\r\n"))
        answer = await tap.ask(
            request("GET", path, "Connection: keep-alive, Upgrade", "Upgrade: websocket", version="1.0")
        )
        assert (answer.data, answer.ending) == (data, Ending.FIN)
        assert answer.head.fields == [(b"Connection", b"close")]
        head = up.call(path).head
        assert head.line.endswith(b" HTTP/1.1"), "towards the upstream it is HTTP/1.1"
        assert head.get("upgrade") is None, "RFC 9110 7.8: a server MUST ignore it"
        recorded = await tap.meter.closed(1)
        assert chunked(*[data[i : i + 5556] for i in range(0, 50_000, 5556)]) in recorded.answer, (
            "the tap sees what the upstream sent"
        )


async def test_an_http10_client_may_keep_its_connection_where_the_length_is_told() -> None:
    async with stage() as (up, tap):
        path = up.on(answers(b"ok"))
        client = await tap.client()
        for _ in range(3):
            answer = await client.ask(request("GET", path, "Connection: Keep-Alive", version="1.0"))
            assert (answer.data, answer.head.get("connection")) == (b"ok", b"keep-alive")
        answer = await client.ask(request("GET", path, version="1.0"))
        assert answer.head.get("connection") == b"close"
        assert await client.to_end() == (b"", Ending.FIN)
        assert up.connections == 1


async def test_words_behind_a_chunked_answer_spoil_the_connection_for_an_http10_client_too() -> None:
    """What an upstream says beyond its answer must never become part of the next one (RFC 9112 9.2)."""

    async def says_too_much(call: Call) -> None:
        await call.say(CHUNKED)
        await call.peer.taken()
        await call.say(chunked(b"good") + EVIL[:20])

    async with stage() as (up, tap):
        path, after = up.on(says_too_much), up.on(answers(b"mine"))
        for version in ("1.1", "1.0"):
            assert (await tap.ask(request("GET", path, version=version))).data == b"good"
            assert tap.relay.pool.idle == 0, f"kept after words out of turn (HTTP/{version})"
            assert (await tap.get(after)).data == b"mine"
            await wait_until(lambda: tap.relay.pool.idle == 1)


@pytest.mark.parametrize(
    ("head", "kept"),
    [
        (b"HTTP/1.0 200 OK\r\nContent-Length: 2\r\n\r\n", False),
        (b"HTTP/1.0 200 OK\r\nContent-Length: 2\r\nConnection: keep-alive\r\n\r\n", True),
        (b"HTTP/1.0 200 OK\r\nConnection: keep-alive\r\n\r\n", False),
    ],
)
async def test_an_http10_upstream(head: bytes, kept: bool) -> None:
    async with stage() as (up, tap):
        answer = await tap.get(up.on(says(head + b"ok", then=None if kept else CLOSE)))
        assert (answer.data, answer.whole) == (b"ok", True)
        assert answer.head.line == b"HTTP/1.1 200 OK", "RFC 9110 6.2: the version is the sender's own"
        await wait_until(lambda: not tap.relay.flows)
        assert tap.relay.pool.idle == int(kept)


# ---------------------------------------------------------------- persistence and pipelining


@pytest.mark.parametrize("option", ["close", "x, Close"])
async def test_after_close_a_client_is_closed_and_no_further_request_is_answered(option: str) -> None:
    """RFC 9112 9.6."""
    async with stage() as (up, tap):
        first, second = up.on(answers(b"bye")), up.on(answers())
        client = await tap.client()
        await client.send(request("GET", first, f"Connection: {option}") + request("GET", second))
        answer = await client.answer()
        assert (answer.data, answer.head.get("connection")) == (b"bye", b"close")
        assert await client.to_end() == (b"", Ending.FIN)
        assert up.calls_to(second) == []


async def test_an_upstream_that_closes_closes_the_client_only_where_the_close_ends_the_answer() -> None:
    async with stage() as (up, tap):
        path = up.on(says(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nConnection: close\r\n\r\nok", then=CLOSE))
        client = await tap.client()
        for _ in range(3):
            answer = await client.get(path)
            assert (answer.data, answer.head.get("connection")) == (b"ok", None)
        assert up.connections == 3
        answer = await client.get(up.on(says(b"HTTP/1.1 200 OK\r\n\r\nall of it", then=CLOSE)))
        assert (answer.data, answer.ending) == (b"all of it", Ending.FIN)
        assert answer.head.get("connection") == b"close"
        assert (await tap.closing(4)).outcome == "complete"


async def test_each_pipelined_request_is_stamped_when_it_was_read() -> None:
    """`arrival` is the first byte of the request read, not the moment its turn came."""
    async with stage(clock="mono") as (up, tap):
        path = up.on(says(OK, after=lambda: asyncio.sleep(0.01)))
        client = await tap.client()
        await client.send(request("GET", path) * 4)
        for _ in range(4):
            await client.answer()
        opened = [(await tap.meter.closed(seq)).one(FrameKind.OPEN).t_ns for seq in range(1, 5)]
        assert len(set(opened)) == 1, "one read brought them all"


@pytest.mark.parametrize("interim", [b"", CONTINUE])
async def test_stray_words_of_the_upstream_never_answer_the_next_pipelined_request(interim: bytes) -> None:
    """RFC 9112 9.2: what comes outside of a request's turn is no answer to the next one.

    The answer ends exactly with a read, so that the words behind it still lie in the socket when the next
    request, already here, takes its connection.
    """
    head = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n"
    body = b"g" * (65_536 - len(interim + head % 65_000))
    answer = interim + head % len(body) + body
    assert len(answer) == 65_536
    async with stage() as (up, tap):
        warm, mine = up.on(answers(b"w" * 3_000_000)), up.on(answers(b"mine"))
        path = up.on(says(answer + EVIL))
        client = await tap.client()
        for _ in range(3):  # so that the kernel's window takes the answer and the words in one go
            assert (await client.get(warm)).status == 200
        for _ in range(5):
            await client.send(request("GET", path) + request("GET", mine))
            assert (await client.answer()).data == body
            assert (await client.answer()).data == b"mine"
        assert tap.relay.reporter.status().upstream_unsolicited


async def test_no_answer_of_one_client_reaches_another() -> None:
    """Clients come, ask, and some leave at the worst moment; connections to the upstream are shared."""
    async with stage() as (up, tap):

        async def named(call: Call) -> None:
            name = call.target.rpartition(b"=")[2]
            await asyncio.sleep(int(name) % 7 * 0.001)
            await call.say(CHUNKED, chunk(name), chunked(name))

        path = up.on(named)

        async def one(i: int) -> None:
            client = await tap.client()
            await client.send(request("GET", f"{path}?n={i}"))
            if i % 5 == 0:
                await asyncio.sleep(i % 3 * 0.002)
                client.reset()
                return
            assert (await client.answer()).data == b"%d" % i * 2
            assert (await client.get(f"{path}?n={i + 1000}")).data == b"%d" % (i + 1000) * 2

        for _ in range(3):
            await asyncio.gather(*(one(i) for i in range(100)))

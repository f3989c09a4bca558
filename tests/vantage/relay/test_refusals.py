"""Refusals of the relay: in plain words, marked as its own, and never half forwarded.

Long because each way to be refused is checked with the same helpers.
"""

import asyncio
import errno
import json
import os
import resource
import socket
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from llmtap.channel.experiment import Experiment
from llmtap.vantage.relay.flow import READ_ON_NS
from tests.net.test_pool import sockets_fail
from tests.support.servers.peer import PATIENCE_S, Gone, scene, wait_still, wait_until
from tests.support.servers.proxy import Tapped, ms, stage
from tests.support.servers.raw_client import Answer, RawClient, request
from tests.support.servers.upstream import CLOSE, RESET, Call, answers, says
from tests.support.traffic.experiments import an_experiment


def check_own(answer: Answer, *statuses: int) -> str:
    """The answer is the relay's own, in OpenAI's form; gives its code."""
    assert answer.status in statuses, answer.head.line
    assert answer.whole
    error = json.loads(answer.data)["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == ("api_error" if answer.status >= 500 else "invalid_request_error")
    assert error["message"].startswith("llmtap: ")
    assert answer.head.get("x-llmtap-error") == error["code"].encode()
    assert answer.head.get("content-type") == b"application/json"
    code: str = error["code"]
    return code


async def refused(tap: Tapped, raw: bytes, *statuses: int) -> str:
    """Send it, expect the relay's refusal and the connection's end."""
    client = await tap.client()
    await client.send(raw)
    answer = await client.answer(raw.split(b" ")[0])
    code = check_own(answer, *statuses)
    assert answer.head.get("connection") == b"close"
    assert (await client.to_end())[0] == b"", "something followed a refusal"
    return code


# ---------------------------------------------------------------- ambiguous framing


HIDDEN = b"GET %b HTTP/1.1\r\nHost: a\r\n\r\n"

AMBIGUOUS = {
    "length and chunked": (b"Content-Length: 4\r\nTransfer-Encoding: chunked\r\n", b"0\r\n\r\n" + HIDDEN),
    "two lengths": (b"Content-Length: 3\r\nContent-Length: 50\r\n", b"abc" + HIDDEN),
    "an unknown coding": (b"Transfer-Encoding: xchunked\r\n", b"0\r\n\r\n" + HIDDEN),
    "a NUL in a value": (b"X: a\x00b\r\nContent-Length: 0\r\n", HIDDEN),
}


@scene
async def test_a_request_that_could_be_read_in_two_ways_is_not_forwarded() -> None:
    async with stage() as (up, tap):
        path, hidden = up.on(answers(b"seen")), up.on(answers(b"hidden"))
        for name, (fields, body) in AMBIGUOUS.items():
            body = body.replace(b"%b", hidden.encode())
            for method in (b"POST", b"GET", b"TELEPORT"):
                raw = method + b" " + path.encode() + b" HTTP/1.1\r\nHost: a\r\n" + fields + b"\r\n" + body
                client = await tap.client()
                await client.send(raw)
                answer = await client.answer()
                assert check_own(answer, 400, 501) == "malformed_request", name
                assert (await client.to_end())[0] == b"", name
                client.close()
        assert up.calls == []
        assert up.connections == 0
        assert tap.relay.reporter.status().refused == {"malformed_request": 3 * len(AMBIGUOUS)}


@pytest.mark.parametrize(
    "raw",
    [
        b"GET /x HTTP/1.1\r\n\r\n",  # no Host
        b"GET ftp://a/x HTTP/1.1\r\nHost: a\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",  # a TLS hello waits for an answer: it gets one
        b"\xff\xff",
        b"GET /x HTTP/1.1\nHost: a\n\n",  # its sender waits for an answer
    ],
)
@scene
async def test_a_malformed_start_is_refused(raw: bytes) -> None:
    async with stage() as (up, tap):
        await refused(tap, raw, 400, 501, 505)
        assert up.connections == 0
        recorded = await tap.meter.closed(1)
        assert recorded.closing.outcome == "client_error"
        assert recorded.closing.status in (400, 501, 505)


@pytest.mark.parametrize(
    "version", [b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b"GET /x HTTP/9.9\r\nHost: a\r\n\r\n"]
)
@scene
async def test_another_version_of_http_is_refused_and_counted(version: bytes) -> None:
    async with stage() as (up, tap):
        assert await refused(tap, b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 505) == "http_version"
        assert up.connections == 0
        assert tap.relay.reporter.status().refused == {"http_version": 1}


@scene
async def test_every_refusal_is_json_whatever_the_parser_minded() -> None:
    """The reason is a sentence in a JSON string: no quote or backslash of anybody's may break it."""
    bad = [b'"', b"\\", b"\x01", b"\x7f", b"'", b"\xff", b"\r", b"\n", b"\x00", b"\t"]
    async with stage() as (_, tap):
        for c in bad:
            for raw in (
                b"GET /" + c + b" HTTP/1.1" + c + b"\r\nHost: a\r\n\r\n",
                b"GET / HTTP/1.1\r\nHost: a" + c + b"b c\r\n\r\n",
                b"GET / HTTP/1.1\r\nHost: a\r\nX" + c + b"y z: 1\r\n\r\n",
                b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: " + c + b"x\r\n\r\n",
                b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: " + c + b"x\r\n\r\n",
            ):
                client = await tap.client()
                answer = await client.ask(raw)
                check_own(answer, 400, 501, 505)
                client.close()


BAD_CHUNKS = {
    "too long": b"3\r\nabcXX0\r\n\r\n",
    "bad trailer": b"3\r\nabc\r\n0\r\nX : 1\r\n\r\n",
}


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("name", BAD_CHUNKS)
@scene
async def test_malformed_chunks_never_make_a_complete_request(name: str, late: bool) -> None:
    async with stage() as (up, tap):
        cut = asyncio.Event()

        async def script(call: Call) -> str:
            try:
                await call.body()
            except (Gone, ValueError):
                cut.set()
            return CLOSE

        path = up.on(script)
        raw = request("POST", path, "Transfer-Encoding: chunked")
        client = await tap.client()
        if late:  # the head, and a good chunk, are on their way when the fault shows
            await client.send(raw + b"2\r\nok\r\n")
            await wait_until(lambda: up.calls)
            await client.send(BAD_CHUNKS[name])
        else:
            await client.send(raw + BAD_CHUNKS[name])
        answer = await client.answer()
        assert check_own(answer, 400) == "malformed_request"
        assert (await client.to_end())[0] == b""
        if late:
            await asyncio.wait_for(cut.wait(), PATIENCE_S)
        assert all(c.payload is None for c in up.calls)
        assert (await tap.meter.closed(1)).closing.outcome == "client_error"


@scene
async def test_a_head_beyond_the_limit_is_431() -> None:
    async with stage(head_bytes=4_096) as (up, tap):
        path = up.on(answers())
        assert await refused(tap, request("GET", path, "X: " + "b" * 200_000), 431) == "head_too_large"
        assert await refused(tap, b"GET " + path.encode() + b"?" + b"a" * 5_000, 431) == "head_too_large"
        assert (await tap.meter.closed(1)).closing.outcome == "rejected"
        assert up.calls == []
        room = 4_096 - len(request("GET", path, "X: "))
        client = await tap.client()
        assert (await client.ask(request("GET", path, "X: " + "b" * room))).status == 200
        assert await refused(tap, request("GET", path, "X: " + "b" * (room + 1)), 431) == "head_too_large"


@scene
async def test_too_many_fields_are_431() -> None:
    async with stage(head_fields=50) as (up, tap):
        path = up.on(answers())
        fields = [f"X-{i}: y" for i in range(50)]
        client = await tap.client()
        assert (await client.get(path, *fields[:49])).status == 200  # and Host
        assert await refused(tap, request("GET", path, *fields), 431) == "head_too_large"
        assert len(up.calls) == 1


@scene
async def test_too_many_exchanges_at_a_time_are_503_with_a_hint() -> None:
    async with stage(streams=2) as (up, tap):
        go = asyncio.Event()

        async def waits(call: Call) -> None:
            await go.wait()
            await call.say(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")

        path = up.on(waits)
        running = [await tap.client() for _ in range(2)]
        for client in running:
            await client.send(request("GET", path))
        await wait_until(lambda: len(up.calls) == 2)
        client = await tap.client()
        answer = await client.post(path, b"x" * 100_000)
        assert check_own(answer, 503) == "tap_overloaded"
        assert answer.head.get("retry-after") == b"1"
        go.set()
        for client in running:
            assert (await client.answer()).data == b"ok"
        assert (await (await tap.client()).get(path)).data == b"ok", "there is room again"
        assert len(up.calls) == 3
        assert sum(tap.relay.reporter.status().refused.values()) == 1, "one refusal is counted once"


@scene
async def test_too_many_connections_are_closed_and_counted() -> None:
    async with stage(connections=3) as (up, tap):
        path = up.on(answers())
        held = [await tap.client() for _ in range(3)]
        for client in held:
            assert (await client.get(path)).status == 200
        surplus = await tap.client()
        await surplus.to_end()
        assert tap.relay.reporter.status().refused == {"connections": 1}
        held[0].close()
        await wait_until(lambda: len(tap.relay.connections) == 2)
        assert (await (await tap.client()).get(path)).status == 200


@scene
async def test_a_slow_head_is_408() -> None:
    async with stage(head_timeout=ms(200)) as (up, tap):
        path = up.on(answers())
        client = await tap.client()
        raw = request("GET", path, *[f"X-{i}: y" for i in range(500)])

        async def dribble() -> None:
            for i in range(len(raw)):
                await client.send(raw[i : i + 1])
                await asyncio.sleep(0.01)

        dribbling = asyncio.ensure_future(dribble())
        assert check_own(await client.answer(), 408) == "head_timeout"
        dribbling.cancel()
        await asyncio.gather(dribbling, return_exceptions=True)
        assert up.connections == 0


@scene
async def test_an_idle_connection_is_closed_without_a_word() -> None:
    async with stage(keepalive_timeout=ms(200)) as (up, tap):
        silent = await tap.client()
        used = await tap.client()
        assert (await used.get(up.on(answers()))).status == 200
        assert (await silent.to_end())[0] == b""
        assert (await used.to_end())[0] == b""


@scene
async def test_a_request_body_that_stops_coming_is_408() -> None:
    async with stage(idle_timeout=ms(200)) as (up, tap):

        async def reads(call: Call) -> str:
            await call.body()
            return CLOSE

        client = await tap.client()
        await client.send(request("POST", up.on(reads), "Content-Length: 100") + b"x" * 10)
        assert check_own(await client.answer(), 408) == "request_timeout"
        await wait_until(lambda: not up.open)


@scene
async def test_what_is_sent_ahead_is_bounded() -> None:
    """A client that pipelines without end is read no further than the limit, and still served."""
    async with stage(pipelined_bytes=8_192) as (up, tap):
        go = asyncio.Event()

        async def waits(call: Call) -> None:
            await go.wait()
            await call.say(b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\n\r\n.")

        path = up.on(waits)
        one = request("GET", path, "X: " + "x" * 1_000)
        count = 30_000_000 // len(one)
        client = await tap.client(send_buffer=65_536)
        sending = asyncio.ensure_future(client.send(*[one * 100] * (count // 100)))
        await wait_still(lambda: client.sent_bytes)
        assert not sending.done(), "30 MB of requests were taken in advance"
        (connection,) = tap.relay.connections
        assert len(connection._buffer) <= 8_192 + 65_536
        go.set()
        for _ in range(500):
            assert (await client.answer()).data == b"."
        client.reset()
        await asyncio.gather(sending, return_exceptions=True)


# ---------------------------------------------------------------- the upstream's faults


BAD_ANSWERS = {
    "two lengths": b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\nContent-Length: 5\r\n\r\nabcde",
    "a line of text": b"sorry\n",
    "binary": b"\x15\x03\x01\x00\x02\x02\x46",
    "an unasked switch": b"HTTP/1.1 101 Switching Protocols\r\nConnection: upgrade\r\nUpgrade: x\r\n\r\n",
    "a bad first chunk": b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\nabc\r\n0\r\n\r\n",
    "an endless head": b"HTTP/1.1 200 OK\r\nX: " + b"x" * 70_000,
    "a large head": b"HTTP/1.1 200 OK\r\nX: " + b"x" * 70_000 + b"\r\nContent-Length: 0\r\n\r\n",
    "too many fields": b"HTTP/1.1 200 OK\r\n" + b"X: y\r\n" * 300 + b"Content-Length: 0\r\n\r\n",
}


@pytest.mark.parametrize("name", BAD_ANSWERS)
@scene
async def test_an_answer_that_breaks_http_is_a_502(name: str) -> None:
    async with stage() as (up, tap):

        async def script(call: Call) -> str:
            await call.body()
            await call.say(BAD_ANSWERS[name])
            await call.left()
            return CLOSE

        client = await tap.client()
        path, after = up.on(script), up.on(answers(b"next"))
        answer = await client.post(path, b"{}")
        assert check_own(answer, 502) == "upstream_protocol"
        assert len(up.calls_to(path)) == 1
        await wait_until(lambda: not up.open)  # never used again
        assert (await client.get(after)).data == b"next", "the client's connection lives on"
        assert (await tap.meter.closed(1)).closing.outcome == "upstream_error"


@pytest.mark.parametrize(("method", "ask"), [("GET", {}), ("HEAD", {}), ("POST", {"body": b"{}"})])
@scene
async def test_an_upstream_that_is_away_is_a_502_and_the_connection_stays(
    method: str, ask: dict[str, bytes]
) -> None:
    async with stage() as (up, tap):
        path = up.on(answers(b"back"))
        await up.stop()
        client = await tap.client()
        answer = await client.ask(request(method, path, **ask))
        assert answer.status == 502
        assert answer.head.get("x-llmtap-error") == b"upstream_connect"
        if method != "HEAD":
            check_own(answer, 502)
        up.start()
        assert (await client.get(path)).data == b"back"
        assert (await tap.meter.closed(1)).closing.outcome == "upstream_error"


ARMS = ({"name": "a"}, {"name": "b", "headers": {"x": "1"}})


@pytest.mark.parametrize("experiment", [None, an_experiment(*ARMS)])
@pytest.mark.parametrize("whole", [True, False])
@scene
async def test_a_request_in_two_parts_is_reported_whole_if_the_upstream_is_away(
    experiment: Experiment | None, whole: bool
) -> None:
    """Most clients send the head first: the connection fails before the body, with the model, is there."""
    async with stage(experiment=experiment) as (up, tap):
        await up.stop()
        client = await tap.client()
        asked = request("POST", "/v1/chat/completions", body=b'{"model": "tiny"}')
        head = asked.index(b"{")
        await client.send(asked[:head])
        answer = await client.answer(b"POST")
        check_own(answer, 502)
        (flow,) = tap.relay.flows
        if whole:
            await client.send(asked[head:])
        else:
            flow.check(flow.last_ns + READ_ON_NS + 1)
        recorded = await tap.meter.closed(1)
        assert recorded.request == (asked if whole else asked[:head])
        assert (recorded.closing.outcome, recorded.closing.status) == ("upstream_error", 502)


@pytest.mark.parametrize("at_once", [False, True])
@scene
async def test_a_pipeline_is_answered_to_its_end_while_the_upstream_is_away(at_once: bool) -> None:
    """Also when the kernel says no (no route, no port left) before the call for a connection returns."""
    async with stage(upstream_keepalive=ms(0)) as (up, tap):
        path = up.on(answers(b"here"))
        client = await tap.client()
        assert (await client.get(path)).data == b"here"
        await up.stop()
        if at_once:
            tap.relay.pool._addresses = [(socket.AF_INET, ("255.255.255.255", 9))]
        await client.send(request("GET", path) * 3 + request("POST", path, body=b"x" * 10) * 2)
        async with asyncio.timeout(PATIENCE_S):
            assert [(await client.answer()).status for _ in range(5)] == [502] * 5
        up.start()
        assert (await client.get(path)).data == b"here"


@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize(("method", "ask"), [("GET", {}), ("POST", {"body": b"{}"}), ("HEAD", {})])
@scene
async def test_no_file_descriptor_left_is_a_503_at_once_and_the_taps_own(
    method: str,
    ask: dict[str, bytes],
    first: bool,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The upstream was never asked: neither its address nor its name is to blame."""
    async with stage(upstream_keepalive=ms(0)) as (up, tap):
        path = up.on(answers(b"ok"))
        if not first:  # the upstream's name is known
            assert (await (await tap.client()).get(path)).data == b"ok"
        sockets_fail(monkeypatch, errno.EMFILE)
        client = await tap.client()
        async with asyncio.timeout(PATIENCE_S):  # connect_timeout is ten times that
            answer = await client.ask(request(method, path, **ask))
            await client.to_end()  # a connection that is kept would hold on to what is short
        assert answer.status == 503
        assert answer.head.get("x-llmtap-error") == b"tap_overloaded"
        assert answer.head.get("retry-after") == b"1"
        if method != "HEAD":
            check_own(answer, 503)
        recorded = await tap.meter.closed(1 if first else 2)
        assert (recorded.closing.outcome, recorded.closing.status) == ("rejected", 503)
        assert recorded.closing.error is not None
        assert "too many open files" in recorded.closing.error
        assert tap.relay.reporter.status().refused == {"tap_overloaded": 1}
        assert f"event=tap_overloaded relay=test.0.1 error='[Errno {errno.EMFILE}]" in caplog.text
        assert (await (await tap.client()).get(path)).data == b"ok", "there is room again"


@contextmanager
def no_descriptor_left() -> Iterator[None]:
    """For this process no file, and no socket, can be opened."""
    free = os.dup(0)  # the lowest there is
    os.close(free)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (free, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@scene
async def test_no_file_descriptor_left_to_accept_is_told_meanwhile() -> None:
    """Who connects then waits in the kernel's queue, and is let in as soon as there is one."""
    async with stage() as (up, tap):
        sock = socket.socket()
        with no_descriptor_left():
            sock.connect(("127.0.0.1", tap.port))
            await wait_until(lambda: tap.meter.statuses and "accept_failed" in tap.meter.statuses[-1].refused)
            assert not tap.relay.connections
        client = RawClient(sock)
        tap.clients.append(client)
        assert (await client.get(up.on(answers(b"ok")))).data == b"ok"
        assert not tap.relay.broken.done()


@pytest.mark.parametrize(
    ("said", "then"), [((), CLOSE), ((), RESET), ((b"HTTP/1.1 200 OK\r\nContent-Le",), CLOSE)]
)
@scene
async def test_an_upstream_that_hangs_up_without_an_answer_is_a_502(
    said: tuple[bytes, ...], then: str
) -> None:
    """Half a head is no answer."""
    async with stage() as (up, tap):
        path = up.on(says(*said, then=then))
        client = await tap.client()
        assert check_own(await client.post(path, b"{}"), 502) == "upstream_closed"
        assert len(up.calls_to(path)) == 1
        assert (await tap.meter.closed(1)).closing.outcome == "upstream_reset"


@scene
async def test_an_error_tells_nothing_of_what_a_peer_sent() -> None:
    """STYLE.md: nothing of a prompt or a key; an error page is no exception."""
    secret = "sk-very-secret"
    async with stage() as (up, tap):
        path = up.on(says(f"HTTP/1.1 200 {secret}\r\nX: {secret}\x00\r\n\r\n".encode(), then=CLOSE))
        client = await tap.client()
        answer = await client.post(path, secret.encode(), f"Authorization: Bearer {secret}")
        assert answer.status == 502
        assert secret.encode() not in answer.head.raw + answer.data
        broken = await client.ask(request("POST", path, f"X: {secret}\x00", "Content-Length: 0"))
        assert broken.status == 400
        assert secret.encode() not in broken.head.raw + broken.data

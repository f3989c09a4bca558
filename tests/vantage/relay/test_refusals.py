"""Refusals of the relay: in plain words, marked as its own, and never half forwarded."""

import asyncio
import errno
import json
import socket

import pytest

from llmtap.channel.experiment import Experiment
from llmtap.vantage.relay.flow import READ_ON_NS
from tests.net.test_pool import sockets_fail
from tests.support.servers.peer import PATIENCE_S, wait_still, wait_until
from tests.support.servers.proxy import Tapped, ms, stage
from tests.support.servers.raw_client import Answer, request
from tests.support.servers.upstream import CLOSE, OK, RESET, Call, answers, says
from tests.support.traffic.experiments import an_experiment


def check_own(answer: Answer, status: int) -> str:
    """The answer is the relay's own, in OpenAI's form; gives its code."""
    assert (answer.status, answer.whole) == (status, True), answer.head.line
    code = answer.head.get("x-llmtap-error")
    assert code is not None
    if answer.data:  # else to HEAD
        error = json.loads(answer.data)["error"]
        assert (error["code"], error["param"]) == (code.decode(), None)
        assert error["type"] == ("api_error" if status >= 500 else "invalid_request_error")
        assert error["message"].startswith("llmtap: ")
    return code.decode()


async def refused(tap: Tapped, raw: bytes, status: int) -> str:
    """Send it, expect the relay's refusal and the connection's end."""
    client = await tap.client()
    await client.send(raw)
    answer = await client.answer()
    code = check_own(answer, status)
    assert answer.head.get("connection") == b"close"
    assert (await client.to_end())[0] == b"", "something followed a refusal"
    return code


# ---------------------------------------------------------------- requests

HIDDEN = b"GET /hidden HTTP/1.1\r\nHost: a\r\n\r\n"


@pytest.mark.parametrize(
    ("raw", "status", "code"),
    [
        # Framing that could be read in two ways.
        (
            b"Content-Length: 4\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n" + HIDDEN,
            400,
            "malformed_request",
        ),
        (b"Content-Length: 3\r\nContent-Length: 50\r\n\r\nabc" + HIDDEN, 400, "malformed_request"),
        (b"Transfer-Encoding: xchunked\r\n\r\n0\r\n\r\n" + HIDDEN, 400, "malformed_request"),
        (b"X: a\x00b\r\nContent-Length: 0\r\n\r\n" + HIDDEN, 400, "malformed_request"),
        # Whole requests.
        (b"GET /x HTTP/1.1\r\n\r\n", 400, "malformed_request"),  # no Host
        (b"GET ftp://a/x HTTP/1.1\r\nHost: a\r\n\r\n", 400, "malformed_request"),
        (b"GET / HTTP/1.1\r\nHost: a\r\nX\"\\'y z: 1\r\n\r\n", 400, "malformed_request"),
        (
            b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
            400,
            "malformed_request",
        ),  # TLS waits for an answer
        (b"\xff\xff", 400, "malformed_request"),
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 505, "http_version"),
        (b"GET /x HTTP/9.9\r\nHost: a\r\n\r\n", 400, "malformed_request"),
        (b"GET /x HTTP/1.1\nHost: a\n\n", 400, "malformed_request"),  # its sender waits for an answer
    ],
)
async def test_a_malformed_request_is_refused_and_not_forwarded(raw: bytes, status: int, code: str) -> None:
    async with stage() as (up, tap):
        if raw.endswith(HIDDEN):
            raw = b"POST /x HTTP/1.1\r\nHost: a\r\n" + raw
        assert await refused(tap, raw, status) == code
        closing = await tap.closing()
        assert (closing.outcome, closing.status) == ("client_error", status)
        assert up.connections == 0
        assert tap.relay.reporter.status().refused == {code: 1}


async def test_a_head_beyond_a_limit_is_431() -> None:
    async with stage(head_bytes=4_096, head_fields=50) as (up, tap):
        path = up.on(answers())
        fields = [f"X-{i}: y" for i in range(50)]
        room = "X: " + "b" * (4_096 - len(request("GET", path, "X: ")))
        for raw in (
            request("GET", path, room + "b"),
            request("GET", path, "X: " + "b" * 200_000),
            b"GET " + path.encode() + b"?" + b"a" * 5_000,
            request("GET", path, *fields),
        ):
            assert await refused(tap, raw, 431) == "head_too_large"
        assert (await tap.closing()).outcome == "rejected"
        assert up.calls == []
        assert (await tap.get(path, room)).status == 200
        assert (await tap.get(path, *fields[:49])).status == 200  # and Host


async def test_too_many_exchanges_at_a_time_are_503_with_a_hint() -> None:
    async with stage(streams=2) as (up, tap):
        go = asyncio.Event()
        path = up.on(says(OK, after=go.wait))
        running = [await tap.client() for _ in range(2)]
        for client in running:
            await client.send(request("GET", path))
        await wait_until(lambda: len(up.calls) == 2)
        answer = await tap.post(path, b"x" * 100_000)
        assert check_own(answer, 503) == "tap_overloaded"
        assert answer.head.get("retry-after") == b"1"
        go.set()
        for client in running:
            assert (await client.answer()).data == b"ok"
        assert (await tap.get(path)).data == b"ok", "there is room again"
        assert (len(up.calls), tap.relay.reporter.status().refused) == (3, {"tap_overloaded": 1})


async def test_too_many_connections_are_closed_and_counted() -> None:
    async with stage(connections=3) as (up, tap):
        path = up.on(answers())
        held = [await tap.client() for _ in range(3)]
        for client in held:
            assert (await client.get(path)).status == 200
        await (await tap.client()).to_end()
        assert tap.relay.reporter.status().refused == {"connections": 1}
        held[0].close()
        await wait_until(lambda: len(tap.relay.connections) == 2)
        assert (await tap.get(path)).status == 200


async def test_a_slow_head_is_408() -> None:
    async with stage(head_timeout=ms(200)) as (up, tap):
        client = await tap.client()
        raw = request("GET", up.on(answers()), *[f"X-{i}: y" for i in range(500)])

        async def dribble() -> None:
            for i in range(len(raw)):
                await client.send(raw[i : i + 1])
                await asyncio.sleep(0.01)

        dribbling = asyncio.ensure_future(dribble())
        assert check_own(await client.answer(), 408) == "head_timeout"
        dribbling.cancel()
        await asyncio.gather(dribbling, return_exceptions=True)
        assert up.connections == 0


async def test_an_idle_connection_is_closed_without_a_word() -> None:
    async with stage(keepalive_timeout=ms(200)) as (up, tap):
        silent, used = await tap.client(), await tap.client()
        assert (await used.get(up.on(answers()))).status == 200
        for client in (silent, used):
            assert (await client.to_end())[0] == b""


async def test_a_request_body_that_stops_coming_is_408() -> None:
    async with stage(idle_timeout=ms(200)) as (up, tap):
        client = await tap.client()
        await client.send(request("POST", up.on(says(then=CLOSE)), "Content-Length: 100") + b"x" * 10)
        assert check_own(await client.answer(), 408) == "request_timeout"
        await wait_until(lambda: not up.open)


async def test_what_is_sent_ahead_is_bounded() -> None:
    """A client that pipelines without end is read no further than the limit, and still served."""
    async with stage(pipelined_bytes=8_192) as (up, tap):
        go = asyncio.Event()
        one = request("GET", up.on(says(OK, after=go.wait)), "X: " + "x" * 1_000)
        client = await tap.client(send_buffer=65_536)
        sending = asyncio.ensure_future(client.send(*[one * 100] * (300_000 // len(one))))
        await wait_still(lambda: client.sent_bytes)
        assert not sending.done(), "30 MB of requests were taken in advance"
        (connection,) = tap.relay.connections
        assert len(connection._buffer) <= 8_192 + 65_536
        go.set()
        for _ in range(500):
            assert (await client.answer()).data == b"ok"
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
async def test_an_answer_that_breaks_http_is_a_502(name: str) -> None:
    async with stage() as (up, tap):

        async def script(call: Call) -> str:
            await call.body()
            await call.say(BAD_ANSWERS[name])
            await call.left()
            return CLOSE

        client, path = await tap.client(), up.on(script)
        assert check_own(await client.post(path, b"{}"), 502) == "upstream_protocol"
        assert len(up.calls_to(path)) == 1
        await wait_until(lambda: not up.open)  # never used again
        assert (await client.get(up.on(answers(b"next")))).data == b"next", "the client's connection lives on"
        assert (await tap.closing()).outcome == "upstream_error"


@pytest.mark.parametrize(
    ("said", "then"), [((), CLOSE), ((), RESET), ((b"HTTP/1.1 200 OK\r\nContent-Le",), CLOSE)]
)
async def test_an_upstream_that_hangs_up_without_an_answer_is_a_502(
    said: tuple[bytes, ...], then: str
) -> None:
    async with stage() as (up, tap):
        path = up.on(says(*said, then=then))
        assert check_own(await tap.post(path, b"{}"), 502) == "upstream_closed"
        assert len(up.calls_to(path)) == 1
        assert (await tap.closing()).outcome == "upstream_reset"


@pytest.mark.parametrize("at_once", [False, True])
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
            assert [check_own(await client.answer(), 502) for _ in range(5)] == ["upstream_connect"] * 5
        up.start()
        assert (await client.get(path)).data == b"here"
        assert (await tap.closing(2)).outcome == "upstream_error"


@pytest.mark.parametrize(
    "experiment", [None, an_experiment({"name": "a"}, {"name": "b", "headers": {"x": "1"}})]
)
@pytest.mark.parametrize("whole", [True, False])
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
        check_own(await client.answer(b"POST"), 502)
        (flow,) = tap.relay.flows
        if whole:
            await client.send(asked[head:])
        else:
            flow.check(flow.last_ns + READ_ON_NS + 1)
        recorded = await tap.meter.closed(1)
        assert recorded.request == (asked if whole else asked[:head])
        assert (recorded.closing.outcome, recorded.closing.status) == ("upstream_error", 502)


@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize(("method", "body"), [("POST", b"{}"), ("HEAD", None)])
async def test_no_file_descriptor_left_is_a_503_at_once_and_the_taps_own(
    method: str,
    body: bytes | None,
    first: bool,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The upstream was never asked: neither its address nor its name is to blame."""
    async with stage(upstream_keepalive=ms(0)) as (up, tap):
        path = up.on(answers(b"ok"))
        if not first:  # the upstream's name is known
            assert (await tap.get(path)).data == b"ok"
        sockets_fail(monkeypatch, errno.EMFILE)
        client = await tap.client()
        async with asyncio.timeout(PATIENCE_S):  # connect_timeout is ten times that
            answer = await client.ask(request(method, path, body=body))
            await client.to_end()  # a connection that is kept would hold on to what is short
        assert (check_own(answer, 503), answer.head.get("retry-after")) == ("tap_overloaded", b"1")
        closing = await tap.closing(1 if first else 2)
        assert (closing.outcome, closing.status) == ("rejected", 503)
        assert "too many open files" in (closing.error or "")
        assert tap.relay.reporter.status().refused == {"tap_overloaded": 1}
        assert f"event=tap_overloaded relay=test.0.1 error='[Errno {errno.EMFILE}]" in caplog.text
        assert (await tap.get(path)).data == b"ok", "there is room again"


async def test_an_error_tells_nothing_of_what_a_peer_sent() -> None:
    secret = "sk-very-secret"
    async with stage() as (up, tap):
        path = up.on(says(f"HTTP/1.1 200 {secret}\r\nX: {secret}\x00\r\n\r\n".encode(), then=CLOSE))
        for raw, status in (
            (request("POST", path, f"Authorization: Bearer {secret}", body=secret.encode()), 502),
            (request("POST", path, f"X: {secret}\x00", "Content-Length: 0"), 400),
        ):
            answer = await tap.ask(raw)
            assert answer.status == status
            assert secret.encode() not in answer.head.raw + answer.data


async def test_tls_on_a_plain_port_and_a_doubled_path_are_hints_in_the_log(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with stage() as (server, tap):
        await refused(tap, b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", 400)
        for path, hints in (("/v1/models", 0), ("/v1/v1/models", 1)):
            server.at(path, answers(status=b"404 Not Found"))
            client = await tap.client()
            await client.send(request("GET", path))
            assert (await client.answer()).status == 404
            told = [r for r in caplog.records if "event=doubled_path" in r.getMessage()]
            assert len(told) == hints
    assert sum("event=tls_on_plain_port" in r.getMessage() for r in caplog.records) == 1

"""Malformed bytes that attacks on the relay found, each as it was sent; and the record in docs/peers.md."""

import json
import socket
from contextlib import suppress
from pathlib import Path

import pytest

from llmtap.protocol.http1_response import INTERIM_HEADS_MAX
from llmtap.protocol.inference import NOT_INFERENCE
from tests.support.servers.peer import chunk, chunked, wait_until
from tests.support.servers.proxy import stage, tapped
from tests.support.servers.raw_client import request
from tests.support.servers.upstream import CHUNKED, OK, Call, answers, says
from tests.support.traffic.experiments import an_experiment
from tests.vantage.relay.fault_cases import CASES, RECORD, Case, outcome_of, table

# ---------------------------------------------------------------- before the request line


BYTE_BY_BYTE = pytest.mark.parametrize("byte_by_byte", [False, True])


@pytest.mark.parametrize("before", [b"\n", b"\r", b"\r\n\r\n", b"\n" * 5_000, b" ", b"\x00"])
@BYTE_BY_BYTE
@pytest.mark.parametrize("kept_alive", [False, True])
async def test_nothing_but_one_empty_line_comes_before_a_request(
    before: bytes, byte_by_byte: bool, kept_alive: bool
) -> None:
    """RFC 9112 2.2: at least one empty line (CRLF) should be ignored; anything else is no request line."""
    async with stage() as (up, tap):
        path = up.on(answers(b"ok"))
        client = await tap.client()
        if kept_alive:
            assert (await client.get(path)).data == b"ok"
        raw = before + request("HEAD", path)
        with suppress(ConnectionError):
            await client.send(*([raw[i : i + 1] for i in range(len(raw))] if byte_by_byte else [raw]))
        assert b" 400 " in (await client.head()).line
        await client.to_end()
        assert len(up.calls) == int(kept_alive)


async def test_one_empty_line_before_each_request_is_skipped() -> None:
    async with stage() as (up, tap):
        path = up.on(answers(b"ok"))
        client = await tap.client()
        for pieces in ([b"\r\n"], [b"\r", b"\n"]):
            await client.send(*pieces, request("GET", path))
            assert (await client.answer()).data == b"ok"
        assert [call.head.line for call in up.calls] == [b"GET %s HTTP/1.1" % path.encode()] * 2


# ---------------------------------------------------------------- statuses


@pytest.mark.parametrize("framing", [b"content-length: 0", b"Transfer-Encoding: chunked"])
async def test_interim_answers_carry_no_framing_fields(framing: bytes) -> None:
    """RFC 9110 8.6 and RFC 9112 6.1: no Content-Length and no Transfer-Encoding in a 1xx."""
    async with stage() as (up, tap):
        interim = b"HTTP/1.1 103 Early Hints\r\n" + framing + b"\r\nX: 1\r\n\r\n"
        answer = await tap.get(up.on(says(interim + OK)))
        assert [head.fields for head in answer.interim] == [[(b"X", b"1")]]
        assert answer.data == b"ok"


# ---------------------------------------------------------------- chunk-size lines and trailers

PARTS = pytest.mark.parametrize(
    ("part", "wrong"),
    [
        (b"5;\x00", b"\x00"),
        (b"0x5", b"x"),
        (b"0\r\nX\x00", b"\x00"),
        (b"0\r\n X: folded", b" X"),
        (b"1" + b"0" * 15, b"1" + b"0" * 15),
        (b'5;a="\x00', b"\x00"),
        (b"5;a=b=", b"b="),
        (b"5 x", b" x"),
        (b"3\r\nabcXX", b"XX"),
    ],
)


class Keeps:
    """A script that keeps all that comes."""

    got = b""

    async def __call__(self, call: Call) -> None:
        while data := await call.peer.read():
            self.got += data


@PARTS
async def test_a_part_of_a_wrong_line_never_reaches_the_upstream(part: bytes, wrong: bytes) -> None:
    """RFC 9112 7.1: the line is refused when its first wrong byte comes, before that byte is forwarded."""
    async with stage() as (up, tap):
        keeps = Keeps()
        client = await tap.client()
        await client.send(request("POST", up.on(keeps), "Transfer-Encoding: chunked") + chunk(b"good"))
        await wait_until(lambda: keeps.got == chunk(b"good"))
        await client.send(part)
        assert b" 400 " in (await client.head()).line
        await client.to_end()
        assert wrong not in keeps.got.removeprefix(chunk(b"good"))
        assert (await tap.closing()).outcome == "client_error"


@PARTS
async def test_a_part_of_a_wrong_line_never_reaches_the_client(part: bytes, wrong: bytes) -> None:
    async with stage() as (up, tap):

        async def script(call: Call) -> None:
            await call.say(CHUNKED, chunk(b"good"))
            await call.peer.taken()
            await call.say(part)
            await call.left()

        client = await tap.client()
        await client.send(request("GET", up.on(script)))
        got, _ = await client.to_end()
        assert got.startswith(CHUNKED + chunk(b"good"))
        assert wrong not in got.removeprefix(CHUNKED + chunk(b"good"))
        assert (await tap.closing()).outcome == "upstream_error"


@pytest.mark.parametrize(
    "name",
    [
        "Content-Length",
        "host",
        "Authorization",
        "Transfer-Encoding",
        "Cookie",
        "CONNECTION",
        "X-Api-Key",
        "x-litellm-api-key",
        "X-Auth-Token",
        "X-Forwarded-For",
        "X_Forwarded_Proto",
        "Forwarded",
        "api_key",
        "x-llm-d-inference-fairness-id",
        "Mcp-Session-Id",
    ],
)
@BYTE_BY_BYTE
async def test_a_client_cannot_add_such_a_field_behind_its_body(name: str, byte_by_byte: bool) -> None:
    """RFC 9110 6.5.1: fields for framing, routing, authentication and content are no trailers."""
    async with stage() as (up, tap):
        keeps = Keeps()
        body = chunked(b"good", trailers=b"X-Fine: 1\r\n%b: 5\r\n" % name.encode())
        client = await tap.client()
        await client.send(request("POST", up.on(keeps), "Transfer-Encoding: chunked"))
        with suppress(ConnectionError):
            await client.send(*([body[i : i + 1] for i in range(len(body))] if byte_by_byte else [body]))
        assert b" 400 " in (await client.head()).line
        assert b"%b:" % name.encode() not in keeps.got


@pytest.mark.parametrize("trailer", [b"Content-Length: 5", b"TRANSFER-encoding: chunked"])
async def test_an_upstream_cannot_add_framing_behind_its_body(trailer: bytes) -> None:
    """RFC 9110 6.5.1. llhttp refuses the first and h11 the second."""
    async with stage() as (up, tap):
        body = chunked(b"good", trailers=trailer + b"\r\n")
        answer = await tap.get(up.on(says(CHUNKED + body)))  # in one read: the relay answers by itself
        assert (answer.status, answer.whole) == (502, True)
        assert trailer not in answer.head.raw + answer.data


ANSWERS: dict[str, dict[str, str]] = json.loads(RECORD.read_text())
PEERS = Path(__file__).parents[3] / "docs/peers.md"


@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
async def test_the_answer_is_the_recorded_one(case: Case) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        async with tapped(f"http://127.0.0.1:{listener.getsockname()[1]}") as tap:
            assert await outcome_of(case, tap.port, listener) == ANSWERS["llmtap"][case.name]


def test_the_page_about_peers_shows_the_record() -> None:
    assert "\n".join(table(ANSWERS)) in PEERS.read_text()


@pytest.mark.parametrize("together", [True, False])
async def test_an_answer_too_many_is_never_the_next_clients(together: bool) -> None:
    """RFC 9112 9.2: bytes behind an answer are no answer to a later request on that connection."""
    async with stage() as (up, tap):
        right = b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nright"
        wrong = b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nwrong"
        path, after = (
            up.on(says(*([right + wrong] if together else [right, wrong]))),
            up.on(answers(b"after")),
        )
        client, other = await tap.client(), await tap.client()
        for _ in range(30):
            await client.send(request("GET", path))
            answer = await client.answer()
            assert answer.data == b"right"
            # As soon as can be: the wrong answer may have come just now.
            assert (await other.get(after)).data == b"after"
        await wait_until(lambda: tap.relay.reporter.status().upstream_unsolicited == 30)


# ---------------------------------------------------------------- heads of answers


@pytest.mark.parametrize("version", ["1.1", "1.0"])
async def test_interim_answers_have_a_bound(version: str) -> None:
    async with stage() as (up, tap):
        hints = b"HTTP/1.1 103 Early Hints\r\n\r\n"
        enough, too_many = (up.on(says(hints * n + OK)) for n in (INTERIM_HEADS_MAX, 2_500))
        raw = request("GET", enough, version=version)
        assert (await (await tap.client()).ask(raw)).data == b"ok"
        answer = await (await tap.client()).ask(request("GET", too_many, version=version))
        assert answer.status == 502
        # One more for each second that the test has waited.
        passed = range(INTERIM_HEADS_MAX + 1, 1_000) if version == "1.1" else (0,)
        assert len(answer.interim) in passed
        assert tap.relay.reporter.status().refused == {"interim_heads": 1}


@pytest.mark.parametrize("cut", [False, True])
async def test_one_empty_line_may_follow_an_interim_answer(cut: bool) -> None:
    """Some servers send it. Before any other answer it is malformed (RFC 9112 2.2 is for requests only)."""
    async with stage() as (up, tap):
        hints = b"HTTP/1.1 100 Continue\r\n\r\n"
        pieces = [hints, b"\r", b"\n", OK] if cut else [hints + b"\r\n" + OK]
        answer = await tap.get(up.on(says(*pieces)))
        assert (answer.data, len(answer.interim)) == (b"ok", 1)
        for wrong in (hints + b"\r\n\r\n" + OK, b"\r\n" + OK):
            assert (await tap.get(up.on(says(wrong)))).status == 502


@pytest.mark.parametrize(
    ("head", "reason"),
    [
        (b"HTTP/1.1 200 OK\nContent-Length: 0\n\n", "line feed"),
        (b"HTTP/1.1 200 OK\r\nA: b\nContent-Length: 0\r\n\r\n", "CR"),
        (b"HTTP/1.1 101 Switching\r\nUpgrade: websocket\r\n\r\n", "Connection: Upgrade"),
    ],
)
async def test_the_error_names_what_the_upstream_sent(head: bytes, reason: str) -> None:
    async with stage() as (up, tap):
        answer = await tap.get(up.on(says(head)))
        assert answer.status == 502
        assert reason in json.loads(answer.data)["error"]["message"]


# ---------------------------------------------------------------- heads as forwarded


async def test_a_field_that_connection_names_decides_nothing() -> None:
    """RFC 9110 7.6.1: it ends at this hop, so it does not decide whether a request is measured."""
    arm = {"name": "guarded", "weight": 1e9, "headers": {"X-Guard": "on"}}
    async with stage(experiment=an_experiment({"name": "control"}, arm), skip=("GET",)) as (up, tap):
        path = up.on(answers())
        raw = request("GET", path, "Accept: text/event-stream", "Connection: Accept")
        assert (await tap.ask(raw)).status == 200
        assert up.call(path).head.get("accept") is None
        assert tap.relay.reporter.status().skipped == {"GET": 1}


@pytest.mark.parametrize(
    "target",
    ["/v1/files/..{}", "/tokenize/%2E%2e{}", "/v1/files/%2e%2e%2f{}", "//v1/files{}", "/v1/files;x/..{}"],
)
async def test_no_path_with_two_readings_leaves_the_experiment(target: str) -> None:
    arm = {"name": "guarded", "weight": 1e9, "headers": {"X-Guard": "on"}}
    async with stage(experiment=an_experiment({"name": "control"}, arm), skip=NOT_INFERENCE) as (up, tap):
        path = target.format("/v1/chat/completions")
        up.at(path, answers())
        assert (await tap.ask(request("POST", path, body=b"{}"))).status == 200
        (call,) = up.calls
        assert call.head.line == f"POST {path} HTTP/1.1".encode()  # forwarded byte for byte
        assert call.head.get("x-guard") == b"on"

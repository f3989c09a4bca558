"""The compiled parser and writer of plain heads against their Python twins.

Invariant: where the compiled code gives an answer, it is the Python code's answer. It may always give none.
"""

import random

import pytest

from llmtap.errors import PeerProtocolError
from llmtap.native import REASON, compiled
from llmtap.relay import heads
from llmtap.wire import http1

pytestmark = pytest.mark.skipif(compiled is None, reason=f"the compiled path does not run: {REASON}")

OPENAI = (
    b"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1:8080\r\nAccept-Encoding: gzip, deflate, br\r\n"
    b"Connection: keep-alive\r\nAccept: application/json\r\nContent-Type: application/json\r\n"
    b"User-Agent: OpenAI/Python 2.8.0\r\nX-Stainless-Lang: python\r\nAuthorization: Bearer k\r\n"
    b"Content-Length: 123\r\n\r\n"
)
UVICORN = (
    b"HTTP/1.1 200 OK\r\ndate: Mon, 23 Nov 2026 08:00:00 GMT\r\nserver: uvicorn\r\n"
    b"content-type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
)
REQUESTS = [
    OPENAI,
    b"GET /v1/models?limit=3&after=a%20b HTTP/1.1\r\nhost:gateway\r\nuser-agent: curl/8.5.0\r\n\r\n",
    b"POST /x HTTP/1.1\r\nHost: [::1]:80\r\nTransfer-Encoding: chunked\r\nKeep-Alive: timeout=5\r\n\r\n",
    b"GET / HTTP/1.1\r\nHost: a\r\nProxy-Connection: keep-alive\r\nHTTP2-Settings: AAMAAABk\r\n\r\n",
]
RESPONSES = [
    UVICORN,
    b"HTTP/1.1 429 Too Many\r\nContent-Length: 17\r\nConnection: keep-alive\r\nKeep-Alive: timeout=5\r\n\r\n",
    b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n",
    b"HTTP/1.1 500 Internal Server Error\r\nx: y\r\n\r\n",
]
UNUSUAL = [
    b"GET / HTTP/1.0\r\nHost: a\r\n\r\n",
    b"PUT / HTTP/1.1\r\nHost: a\r\n\r\n",
    b"GET http://a/ HTTP/1.1\r\nHost: a\r\n\r\n",
    b"GET / HTTP/1.1\r\nHost: a\r\nHost: a\r\n\r\n",
    b"GET / HTTP/1.1\r\n\r\n",
    b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n",
    b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 1\r\nContent-Length: 1\r\n\r\n",
    b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: +1\r\n\r\n",
    b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: gzip, chunked\r\n\r\n",
    b"GET / HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n",
    b"GET / HTTP/1.1\r\nHost: a\r\nTE: trailers\r\n\r\n",
    b"GET / HTTP/1.1\r\nHost: a\r\nExpect: 100-continue\r\n\r\n",
    b"GET / HTTP/1.1\r\nHost: a\r\nX : y\r\n\r\n",
    b"GET / HTTP/1.1\r\nHost: a\r\nX: y\r\n z\r\n\r\n",
    b"GET / HTTP/1.1\r\nHost: a\r\nX: \xe9\r\n\r\n",
    b"GET / HTTP/1.1\r\nHost: a\nX: y\r\n\r\n",
    b"GET /a#b HTTP/1.1\r\nHost: a\r\n\r\n",
    b"HTTP/1.1 204 No Content\r\nContent-Length: 3\r\n\r\n",
    b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\n\r\n",
    b"HTTP/1.1 099 Odd\r\n\r\n",
    b"HTTP/1.1 200\r\nx: y\r\n\r\n",
    b"",
    b"\r\n\r\n",
]
PIECES = [
    b"\r\n", b"\n", b"\r", b" ", b"\t", b":", b": ", b"\x00", b"\x7f", b"\x80", b"Host: b\r\n",
    b"Connection: x-a\r\n", b"Content-Length: 5\r\n", b"Content-Length: 05\r\n",
    b"Transfer-Encoding: chunked\r\n", b"TE: trailers\r\n", b"Upgrade: websocket\r\n",
    b"Connection: keep-alive\r\n", b"Connection: Upgrade\r\n", b"X:\r\n", b"x:  y\r\n",
    b"Max-Forwards: 1\r\n", b"#", b"%", b"|", b"HTTP/1.1", b"HTTP/1.0", b"a", b"0",
    b"18446744073709551616", b"Trailer: x\r\n", b"Expect: 100-continue\r\n", b"Keep-Alive: max=1\r\n",
    b"Proxy-Connection: close\r\n",
]  # fmt: skip


def request_twins(raw: bytes) -> bool:
    """Compare both parsers on a request head; whether the compiled one gave an answer."""
    assert compiled is not None
    if compiled.plain_request(raw) is None:
        return False
    try:
        expected = http1._parse_request_head(raw)
    except PeerProtocolError as error:
        with pytest.raises(PeerProtocolError) as caught:
            http1.parse_request_head(raw)
        assert (caught.value.status, str(caught.value)) == (error.status, str(error))
        return True
    head = http1.parse_request_head(raw)
    assert head == expected
    for authority in (b"up:1", None):
        args = {"prefix": b"/p", "authority": authority, "upgrade": False, "extra": []}
        assert heads.request_lines(head, **args) == heads._request_lines(head, **args)
    return True


def response_twins(raw: bytes, method: bytes = b"POST") -> bool:
    """Compare both parsers on a response head; whether the compiled one gave an answer."""
    assert compiled is not None
    if compiled.plain_response(raw) is None:
        return False
    head = http1.parse_response_head(raw, method)
    assert head == http1._parse_response_head(raw, method)
    for keep_alive in (True, False):
        args = {"keep_alive": keep_alive, "client_11": True, "dechunk": False}
        assert heads.response_lines(head, **args) == heads._response_lines(head, **args)
    return True


def mutated(rng: random.Random, seeds: list[bytes]) -> bytes:
    """A head with one to three bytes or pieces inserted, removed, replaced or doubled."""
    raw = rng.choice(seeds)
    for _ in range(rng.randint(1, 3)):
        at = rng.randrange(len(raw) + 1)
        end = min(len(raw), at + rng.choice((0, 0, 1, 2, 9)))
        piece = rng.choice((b"", bytes([rng.randrange(256)]), rng.choice(PIECES), raw[at:end] * 2))
        raw = raw[:at] + piece + raw[end:]
    return raw


@pytest.mark.parametrize("raw", REQUESTS)
def test_heads_of_usual_clients_are_plain(raw: bytes) -> None:
    assert request_twins(raw)


@pytest.mark.parametrize("raw", RESPONSES)
@pytest.mark.parametrize("method", [b"POST", b"GET", b"HEAD"])
def test_heads_of_usual_servers_are_plain(raw: bytes, method: bytes) -> None:
    assert response_twins(raw, method)


@pytest.mark.parametrize("raw", UNUSUAL)
def test_python_reads_what_is_unusual(raw: bytes) -> None:
    assert not request_twins(raw)
    assert not response_twins(raw)


def test_more_fields_than_the_compiled_parser_holds_go_to_python() -> None:
    raw = b"GET / HTTP/1.1\r\nHost: a\r\n" + b"x: y\r\n" * 64 + b"\r\n"
    assert not request_twins(raw)
    assert len(http1.parse_request_head(raw).headers) == 65


@pytest.mark.parametrize("seed", range(4))
def test_mutated_heads_read_alike(seed: int) -> None:
    rng = random.Random(seed)
    plain = sum(request_twins(mutated(rng, REQUESTS)) for _ in range(5_000))
    plain += sum(response_twins(mutated(rng, RESPONSES)) for _ in range(5_000))
    assert plain > 500  # enough of them are still plain for the comparison to mean something


def test_a_writer_refuses_what_is_no_list_of_pairs() -> None:
    assert compiled is not None
    for fields in ([b"x"], [(b"x", "y")], [("x", b"y")]):
        with pytest.raises(TypeError):
            compiled.write_head(b"", fields, None, b"")

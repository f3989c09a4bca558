"""Fuzz targets of whole HTTP messages: heads with bodies.

`heads` compares the compiled parser and writer of plain heads with their Python twins. `requests` and
`responses` take what the relay would forward and give it to h11 and llhttp: each must read exactly one
message, the one that the relay read, and nothing behind it. Another reading is how requests are smuggled.
"""

import re
from random import Random
from typing import Any, Final

import h11
import httptools

from llmtap.errors import PeerProtocolError
from llmtap.native import compiled
from llmtap.protocol import http1
from llmtap.protocol.http1 import (
    FRAMING_TRAILERS,
    NO_TRAILERS,
    ChunkedDecoder,
    Framing,
    RequestHead,
    ResponseHead,
    scanner_for,
)
from llmtap.vantage.relay import heads
from tests.native.cases import ChunkedBodies

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
    b"POST /v1/x HTTP/1.1\r\nHost: a\r\nX-Llmtap-Label: should-refuse\r\nContent-Length: 0\r\n\r\n",
]
RESPONSES = [
    UVICORN,
    b"HTTP/1.1 429 Too Many\r\nContent-Length: 17\r\nConnection: keep-alive\r\nKeep-Alive: timeout=5\r\n\r\n",
    b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n",
    b"HTTP/1.1 500 Internal Server Error\r\nx: y\r\n\r\n",
]
ODD_REQUESTS = [
    b"DELETE /v1/files/a HTTP/1.1\r\nHost: a\r\n\r\n",
    b"OPTIONS * HTTP/1.1\r\nHost: a\r\n\r\n",
    b"GET http://a.test/x?y HTTP/1.1\r\nHost: a.test\r\n\r\n",
    b"POST / HTTP/1.0\r\nContent-Length: 5\r\nConnection: keep-alive\r\n\r\n",
    b"POST / HTTP/1.1\r\nHost: a\r\nConnection: X-A,TE\r\nX-A:1\r\nTE:trailers\r\nContent-Length:5\r\n\r\n",
    b"GET /ws HTTP/1.1\r\nHost: a\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n",
]
ODD_RESPONSES = [
    b"HTTP/1.1 204 No Content\r\nx: y\r\n\r\n",
    b"HTTP/1.1 304 Not Modified\r\nContent-Length: 5\r\n\r\n",
    b"HTTP/1.0 200 OK\r\nContent-Length: 5\r\n\r\n",
    b"HTTP/1.1 200 OK\r\nConnection: close, x\r\nx: 1\r\n\r\n",
]
PIECES = [
    b"\r\n",
    b"\n",
    b"\r",
    b" ",
    b"\t",
    b":",
    b": ",
    b"\x00",
    b"\x7f",
    b"\x80",
    b"Host: b\r\n",
    b"Connection: x-a\r\n",
    b"Content-Length: 5\r\n",
    b"Content-Length: 05\r\n",
    b"Transfer-Encoding: chunked\r\n",
    b"TE: trailers\r\n",
    b"Upgrade: websocket\r\n",
    b"Connection: keep-alive\r\n",
    b"Connection: Upgrade\r\n",
    b"X:\r\n",
    b"x:  y\r\n",
    b"Max-Forwards: 1\r\n",
    b"#",
    b"%",
    b"|",
    b"HTTP/1.1",
    b"HTTP/1.0",
    b"a",
    b"0",
    b"18446744073709551616",
    b"Trailer: x\r\n",
    b"Expect: 100-continue\r\n",
    b"Keep-Alive: max=1\r\n",
    b"Proxy-Connection: close\r\n",
]


def request_twins(raw: bytes) -> bool:
    """Compare both parsers on a request head; whether the compiled one gave an answer."""
    assert compiled is not None
    if compiled.plain_request(raw) is None:
        return False
    try:
        expected = http1._parse_request_head(raw)
    except PeerProtocolError as error:
        try:
            http1.parse_request_head(raw)
        except PeerProtocolError as found:
            assert (found.status, str(found)) == (error.status, str(error))
            return True
        raise AssertionError("the compiled parser accepts what Python refuses") from error
    head = http1.parse_request_head(raw)
    assert head == expected
    args = {"prefix": b"/p", "authority": b"up:1", "upgrade": False, "extra": []}
    assert heads.request_lines(head, **args) == heads._request_lines_in_python(head, **args)
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
        assert heads.response_lines(head, **args) == heads._response_lines_in_python(head, **args)
    return True


def mutated(rng: Random, seeds: list[bytes]) -> bytes:
    """A head with one to three bytes or pieces inserted, removed, replaced or doubled."""
    raw = rng.choice(seeds)
    for _ in range(rng.randint(1, 3)):
        at = rng.randrange(len(raw) + 1)
        end = min(len(raw), at + rng.choice((0, 0, 1, 2, 9)))
        piece = rng.choice((b"", bytes([rng.randrange(256)]), rng.choice(PIECES), raw[at:end] * 2))
        raw = raw[:at] + piece + raw[end:]
    return raw


class Heads:
    """The compiled parser and writer against their Python twins, on requests and responses in turn."""

    def __init__(self, rng: Random) -> None:
        self._rng = rng
        self.plain = 0

    def case(self) -> tuple[bool, bytes]:
        request = bool(self._rng.getrandbits(1))
        return request, mutated(self._rng, REQUESTS if request else RESPONSES)

    def check(self, case: tuple[bool, bytes]) -> None:
        request, raw = case
        if compiled is not None:
            self.plain += request_twins(raw) if request else response_twins(raw)


_STRICTER: Final = (
    "nvalid method",  # it knows a fixed list, HTTP does not (RFC 9110 9.1)
    "in chunk extensions",  # white space around `;` and `=` (RFC 9112 7.1.1, BWS), bytes above 0x7f
)
"""What llhttp refuses and we forward."""
_spaced_extension: Final = re.compile(rb"(?m)^[0-9A-Fa-f]+[ \t]+;").search
"""White space before an extension (RFC 9112 7.1.1): llhttp and h11 refuse it."""
_H11_DIGITS: Final = 20
_many_digits: Final = re.compile(rb"(?m)^0[0-9A-Fa-f]{%d}" % _H11_DIGITS).search
Message = tuple[bytes, bytes]
"""A head, and bytes behind it."""


def _split(raw: bytes) -> bytes | None:
    """The head as the relay's connection cuts it out; None: it is not complete."""
    end = raw.find(b"\r\n\r\n")
    return raw[: end + 4] if end >= 0 else None


def _body(head: RequestHead | ResponseHead, rest: bytes, *, request: bool) -> tuple[bytes, bytes] | None:
    """The body as forwarded and its payload; None where it is malformed or not complete."""
    if head.framing is Framing.NONE:
        return b"", b""
    try:
        end = scanner_for(
            head.framing, head.length, refused_trailers=NO_TRAILERS if request else FRAMING_TRAILERS
        ).feed(rest)
        if head.framing is Framing.CLOSE:
            return rest, rest
        if end < 0:
            return None
        body = rest[:end]
        return body, ChunkedDecoder().feed(body) if head.framing is Framing.CHUNKED else body
    except PeerProtocolError:
        return None


class _Messages:
    def __init__(self, rng: Random) -> None:
        self._rng = rng
        self._bodies = ChunkedBodies(rng)
        self.forwarded = self.refused = 0

    def _case(self, seeds: list[bytes]) -> Message:
        head = mutated(self._rng, seeds) if self._rng.random() < 0.9 else self._rng.choice(seeds)
        return head, b"".join(self._bodies.case())


class _Heard:
    """What llhttp reads."""

    def __init__(self) -> None:
        self.url = self.body = b""
        self.complete = 0

    def on_url(self, url: bytes) -> None:
        self.url += url

    def on_body(self, body: bytes) -> None:
        self.body += body

    def on_message_complete(self) -> None:
        self.complete += 1


class Requests(_Messages):
    """A forwarded request is one request to h11 and llhttp, and the same one."""

    def case(self) -> Message:
        return self._case(REQUESTS + ODD_REQUESTS)

    def check(self, case: Message) -> None:
        raw, rest = case
        first = _split(raw)
        if first is None:
            return
        try:
            head = http1.parse_request_head(first)
        except PeerProtocolError:
            self.refused += 1
            return
        target = heads.target_of(head)
        if not target:  # the connection answers 400
            self.refused += 1
            return
        found = _body(head, raw[len(first) :] + rest, request=True)
        if found is None:
            return
        body, payload = found
        self.forwarded += 1
        lines = heads.request_lines(head, prefix=b"", authority=b"up:1", upgrade=False, extra=[])
        said = _h11_reads(h11.Connection(h11.SERVER), lines + body)
        assert said in (None, (head.method, target, payload, b"")), f"h11 reads {said}"
        heard = _Heard()
        parser = httptools.HttpRequestParser(heard)
        if _llhttp_refuses(parser, lines + body):
            return
        told = (parser.get_method(), heard.url, heard.body, heard.complete)
        assert told == (head.method, target, payload, 1), f"llhttp reads {told}"


class Responses(_Messages):
    """The same of responses."""

    def case(self) -> Message:
        return self._case(RESPONSES + ODD_RESPONSES)

    def check(self, case: Message) -> None:
        raw, rest = case
        first = _split(raw)
        if first is None:
            return
        try:
            head = http1.parse_response_head(first, b"POST")
        except PeerProtocolError:
            self.refused += 1
            return
        if head.status < 200:
            return
        found = _body(head, raw[len(first) :] + rest, request=False)
        if found is None:
            return
        body, payload = found
        self.forwarded += 1
        closes = head.framing is Framing.CLOSE
        lines = heads.response_lines(head, keep_alive=not closes, client_11=True)
        client = h11.Connection(h11.CLIENT)
        client.send(h11.Request(method="POST", target="/", headers=[("Host", "a"), ("Content-Length", "0")]))
        client.send(h11.EndOfMessage())
        said = _h11_reads(client, lines + body, closes=closes)
        assert said is None or (said[0], *said[2:]) == (head.status, payload, b""), f"h11 reads {said}"
        heard = _Heard()
        parser = httptools.HttpResponseParser(heard)
        if _llhttp_refuses(parser, lines + body):
            return
        told = (parser.get_status_code(), heard.body, heard.complete)
        assert told == (head.status, payload, 0 if closes else 1), f"llhttp reads {told}"


def _llhttp_refuses(parser: Any, data: bytes) -> bool:
    """Let it read the data; True where it refuses what RFC 9110 and 9112 allow."""
    try:
        parser.feed_data(data)
    except httptools.HttpParserError as error:
        spaced = "in chunk size" in str(error) and _spaced_extension(data)
        if not spaced and not any(known in str(error) for known in _STRICTER):
            raise
        return True
    return False


def _h11_reads(
    peer: h11.Connection, data: bytes, *, closes: bool = False
) -> tuple[Any, bytes, bytes, bytes] | None:
    """Start line (two parts), payload, and what stands behind the message; None: it refuses a chunk-size line
    that RFC 9112 allows."""
    start: tuple[Any, bytes] | None = None
    payload = b""
    peer.receive_data(data)
    if closes:
        peer.receive_data(b"")
    while True:
        try:
            event = peer.next_event()
        except h11.RemoteProtocolError as error:
            if "illegal chunk header" in str(error) and (_spaced_extension(data) or _many_digits(data)):
                return None
            raise
        if isinstance(event, h11.Request):
            start = event.method, event.target
        elif isinstance(event, h11.Response):
            start = event.status_code, event.reason
        elif isinstance(event, h11.Data):
            payload += event.data
        elif isinstance(event, h11.EndOfMessage):
            assert start is not None
            return *start, payload, peer.trailing_data[0]
        else:
            raise AssertionError(f"no whole message: {event!r}")

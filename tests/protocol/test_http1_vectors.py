"""Short HTTP/1.1 messages with the clause that decides each; llhttp in strict mode reads the same.

`ok`: read; `no`: refused. Where llhttp decides otherwise, the row says so, and why.
"""

from typing import Any

import httptools
import pytest

from llmtap.errors import PeerProtocolError
from llmtap.protocol.http1 import (
    EXTENSION_BYTES_MAX,
    ChunkedScanner,
    parse_request_head,
    parse_response_head,
)
from llmtap.protocol.http1_response import INTERIM_HEADS_MAX, next_response_head

Row = tuple[str, str, bytes, str]
"""Clause of RFC 9112 unless it says RFC 9110, verdict, input, what llhttp does otherwise."""

STRICTER = "llhttp refuses"
LAXER = "llhttp reads"

# Heads of requests: each line is followed by `Host: a` and the empty line, unless it ends with one.
REQUESTS: list[Row] = [
    ("3", "ok", b"GET / HTTP/1.1\r\n", ""),
    ("3", "ok", b"POST /v1/chat/completions?a=b HTTP/1.1\r\n", ""),
    ("3", "ok", b"HEAD /x HTTP/1.1\r\n", ""),
    ("3.2.1", "ok", b"GET /%2e%2e//;a=b/%00 HTTP/1.1\r\n", ""),
    ("3.2.2", "ok", b"GET http://a/x HTTP/1.1\r\n", ""),
    ("3.2.4", "ok", b"OPTIONS * HTTP/1.1\r\n", ""),
    ("2.3", "ok", b"GET / HTTP/1.0\r\n", ""),
    ("RFC 9110 9.1", "ok", b"FROB / HTTP/1.1\r\n", "llhttp refuses: its list of methods is fixed"),
    ("RFC 9110 9.1", "no", b"GE(T / HTTP/1.1\r\n", ""),
    ("RFC 9110 9.1", "ok", b"get / HTTP/1.1\r\n", "llhttp refuses: as above"),
    ("3", "no", b" GET / HTTP/1.1\r\n", ""),
    ("3", "no", b"GET  HTTP/1.1\r\n", ""),
    ("3", "no", b"GET / HTTP/1.1 \r\n", ""),
    ("3", "no", b"GET / a HTTP/1.1\r\n", ""),
    ("3", "no", b"GET\t/ HTTP/1.1\r\n", ""),
    ("3", "no", b"GET /\r\n", "llhttp reads: HTTP/0.9"),
    ("3.2", "no", b"GET /a#b HTTP/1.1\r\n", "llhttp reads: a fragment is for the caller"),
    ("3.2", "no", b"GET /\x01 HTTP/1.1\r\n", ""),
    ("2.3", "no", b"GET / HTTP/2.0\r\n", "llhttp reads: other versions are for the caller"),
    ("2.3", "no", b"GET / HTTP/1.2\r\n", ""),
    ("2.3", "no", b"GET / HTTP/0.9\r\n", "llhttp reads: other versions are for the caller"),
    ("2.3", "no", b"GET / http/1.1\r\n", ""),
    ("2.3", "no", b"GET / HTTPS/1.1\r\n", ""),
    ("2.3", "no", b"GET / ICE/1.0\r\n", ""),
    ("2.2", "no", b"GET / HTTP/1.1\n", ""),
    ("2.2", "no", b"GET / HTTP/1.1\r", ""),
    ("RFC 9113 3.4", "no", b"PRI * HTTP/2.0\r\n", ""),
    ("RFC 9110 9.3.6", "no", b"CONNECT a:1 HTTP/1.1\r\n", "llhttp reads: it is for the caller"),
    ("5", "ok", b"GET / HTTP/1.1\r\nA: b\r\n", ""),
    ("5", "ok", b"GET / HTTP/1.1\r\nA:b\r\n", ""),
    ("5", "ok", b"GET / HTTP/1.1\r\nA:\r\n", ""),
    ("5", "ok", b"GET / HTTP/1.1\r\nA: \t b \t\r\n", ""),
    ("RFC 9110 5.5", "ok", b"GET / HTTP/1.1\r\nA: \xe9\xff\r\n", ""),
    ("RFC 9110 5.1", "ok", b"GET / HTTP/1.1\r\n!#$%&'*+-.^_`|~9z: b\r\n", ""),
    ("5.1", "no", b"GET / HTTP/1.1\r\nA : b\r\n", ""),
    ("5.1", "no", b"GET / HTTP/1.1\r\nA\t: b\r\n", ""),
    ("5.1", "no", b"GET / HTTP/1.1\r\n A: b\r\n", ""),
    ("5.1", "no", b"GET / HTTP/1.1\r\n: b\r\n", ""),
    ("5.1", "no", b"GET / HTTP/1.1\r\nA\r\n", ""),
    ("5.1", "no", b"GET / HTTP/1.1\r\nA(b): c\r\n", ""),
    ("5.2", "no", b"GET / HTTP/1.1\r\nA: b\r\n c\r\n", ""),
    ("RFC 9110 5.5", "no", b"GET / HTTP/1.1\r\nA: b\x00c\r\n", ""),
    ("RFC 9110 5.5", "no", b"GET / HTTP/1.1\r\nA: b\rc\r\n", ""),
    ("RFC 9110 5.5", "no", b"GET / HTTP/1.1\r\nA: b\x7fc\r\n", ""),
    ("2.2", "no", b"GET / HTTP/1.1\r\nA: b\nB: c\r\n", ""),
    ("2.2", "no", b"GET / HTTP/1.1\r\nA: b\r\r\n", ""),
    ("3.2", "no", b"GET / HTTP/1.1\r\nB: c\r\n\r\n", "llhttp reads: Host is for the caller"),
    ("3.2", "no", b"GET / HTTP/1.1\r\nHost: b\r\n", "llhttp reads: Host is for the caller"),
    ("3.2", "ok", b"GET / HTTP/1.0\r\nB: c\r\n\r\n", ""),
    ("6.2", "ok", b"POST / HTTP/1.1\r\nContent-Length: 5\r\n", ""),
    ("6.2", "ok", b"POST / HTTP/1.1\r\nContent-Length: 0005\r\n", ""),
    ("6.2", "no", b"POST / HTTP/1.1\r\nContent-Length: +5\r\n", ""),
    ("6.2", "no", b"POST / HTTP/1.1\r\nContent-Length: -5\r\n", ""),
    ("6.2", "no", b"POST / HTTP/1.1\r\nContent-Length: 5 5\r\n", ""),
    ("6.2", "no", b"POST / HTTP/1.1\r\nContent-Length: 0x5\r\n", ""),
    ("6.2", "no", b"POST / HTTP/1.1\r\nContent-Length: 5,5\r\n", ""),
    ("6.2", "no", b"POST / HTTP/1.1\r\nContent-Length:\r\n", ""),
    ("6.2", "no", b"POST / HTTP/1.1\r\nContent-Length: 99999999999999999999\r\n", ""),
    ("6.3", "no", b"POST / HTTP/1.1\r\nContent-Length: 5\r\nContent-Length: 5\r\n", ""),
    ("6.3", "no", b"POST / HTTP/1.1\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n", ""),
    ("6.1", "ok", b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n", ""),
    ("7", "ok", b"POST / HTTP/1.1\r\nTransfer-Encoding: Chunked\r\n", ""),
    ("6.1", "no", b"POST / HTTP/1.1\r\nTransfer-Encoding: gzip, chunked\r\n", "llhttp reads: for the caller"),
    ("6.1", "no", b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked, gzip\r\n", ""),
    ("6.1", "no", b"POST / HTTP/1.1\r\nTransfer-Encoding: identity\r\n", ""),
    ("6.1", "no", b"POST / HTTP/1.1\r\nTransfer-Encoding: xchunked\r\n", ""),
    ("6.1", "no", b"POST / HTTP/1.0\r\nTransfer-Encoding: chunked\r\n", "llhttp reads: for the caller"),
    ("6.1", "no", b"POST / HTTP/1.1\r\nTransfer-Encoding : chunked\r\n", ""),
    ("5.1", "no", b"POST / HTTP/1.1\r\nTransfer-Encoding\r\n", ""),
    ("9.6", "ok", b"GET / HTTP/1.1\r\nConnection: close\r\n", ""),
    ("RFC 9110 7.8", "ok", b"GET / HTTP/1.1\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n", ""),
]

RESPONSES: list[Row] = [
    ("4", "ok", b"HTTP/1.1 200 OK\r\n", ""),
    ("4", "ok", b"HTTP/1.0 200 OK\r\n", ""),
    ("4", "ok", b"HTTP/1.1 200 \r\n", ""),
    ("4", "ok", b"HTTP/1.1 200 \xe9 x\ty\r\n", ""),
    ("4", "ok", b"HTTP/1.1 599 Odd\r\n", ""),
    ("4", "ok", b"HTTP/1.1 204 No Content\r\n", ""),
    ("4", "ok", b"HTTP/1.1 304 Not Modified\r\nContent-Length: 5\r\n", ""),
    ("4", "ok", b"HTTP/1.1 100 Continue\r\n", ""),
    ("4", "no", b"HTTP/1.1 20 OK\r\n", ""),
    ("4", "no", b"HTTP/1.1 2000 OK\r\n", ""),
    ("4", "no", b"HTTP/1.1 2x0 OK\r\n", ""),
    ("4", "no", b"HTTP/1.1  200 OK\r\n", ""),
    ("4", "no", b"HTTP/1.1\t200 OK\r\n", ""),
    ("4", "no", b" HTTP/1.1 200 OK\r\n", ""),
    ("4", "no", b"200 OK\r\n", ""),
    ("4", "no", b"HTTP/1.1 200 O\x00K\r\n", "llhttp reads: any byte in the reason"),
    ("RFC 9110 15", "no", b"HTTP/1.1 099 Low\r\n", "llhttp reads: any three digits"),
    ("2.3", "no", b"HTTP/2.0 200 OK\r\n", "llhttp reads: other versions are for the caller"),
    ("2.3", "no", b"HTTP/1.2 200 OK\r\n", ""),
    ("2.3", "no", b"ICY 200 OK\r\n", ""),
    ("2.2", "no", b"HTTP/1.1 200 OK\n", ""),
    ("2.2", "no", b"HTTP/1.1 200 OK\r\nA: b\n", ""),
    ("5.1", "no", b"HTTP/1.1 200 OK\r\nA : b\r\n", ""),
    ("5.2", "no", b"HTTP/1.1 200 OK\r\nA: b\r\n c\r\n", ""),
    ("6.3", "ok", b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n", ""),
    ("6.3", "ok", b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n", ""),
    ("6.3", "no", b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n", ""),
    ("6.3", "no", b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nContent-Length: 6\r\n", ""),
    ("6.3", "no", b"HTTP/1.1 200 OK\r\nContent-Length: 5a\r\n", ""),
    ("6.1", "no", b"HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip\r\n", "llhttp reads: until the close"),
    ("6.1", "no", b"HTTP/1.0 200 OK\r\nTransfer-Encoding: chunked\r\n", "llhttp reads: for the caller"),
    ("RFC 9110 7.8", "ok", b"HTTP/1.1 101 S\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n", ""),
    ("RFC 9110 7.8", "no", b"HTTP/1.1 101 S\r\nUpgrade: websocket\r\n", ""),
    ("RFC 9110 7.8", "no", b"HTTP/1.1 101 S\r\nConnection: Upgrade\r\n", ""),
]

# Chunk-size lines with what stands behind the size `5`; the chunk `hello` and the last one follow.
SPACED = "llhttp refuses: white space (BWS) before or in an extension"
EXTENSIONS: list[Row] = [
    ("7.1", "ok", b"5", ""),
    ("7.1", "ok", b"05", ""),
    ("7.1", "ok", b"0000000000000005", ""),
    ("7.1", "ok", b"0" * 40 + b"5", ""),
    ("7.1", "no", b"", ""),
    ("7.1", "no", b"0x5", ""),
    ("7.1", "no", b"+5", ""),
    ("7.1", "no", b"-5", ""),
    ("7.1", "no", b"5_0", ""),
    ("7.1", "no", b" 5", ""),
    ("7.1", "no", b"5 ", ""),
    ("7.1", "no", b"5\t", ""),
    ("7.1", "no", b"5 5", ""),
    ("7.1", "no", b"g", ""),
    ("7.1", "no", b"ffffffffffffffff5", ""),
    ("7.1.1", "ok", b"5;a", ""),
    ("7.1.1", "ok", b"5;a=b", ""),
    ("7.1.1", "ok", b'5;a="b"', ""),
    ("7.1.1", "ok", b'5;a=""', ""),
    ("7.1.1", "ok", b'5;a="b;c=d"', ""),
    ("7.1.1", "ok", b"5;a=b;c;d=e", ""),
    ("7.1.1", "ok", b"5;chunk-signature=" + b"0" * 64, ""),
    ("RFC 9110 5.6.3", "ok", b"5 ;a=b", SPACED),
    ("RFC 9110 5.6.3", "ok", b"5\t;a=b", SPACED),
    ("RFC 9110 5.6.3", "ok", b"5; a=b", SPACED),
    ("RFC 9110 5.6.3", "ok", b"5;a =b", SPACED),
    ("RFC 9110 5.6.3", "ok", b"5;a= b", SPACED),
    ("RFC 9110 5.6.3", "ok", b'5 \t; a \t=\t "b c" ; d', SPACED),
    ("RFC 9110 5.6.4", "ok", b'5;a="b\\"c"', ""),
    ("RFC 9110 5.6.4", "ok", b'5;a="b\\\\"', ""),
    ("RFC 9110 5.6.4", "ok", b'5;a="\xe9"', ""),
    ("7.1.1", "no", b"5;", ""),
    ("7.1.1", "no", b"5;;", ""),
    ("7.1.1", "no", b"5;a;", ""),
    ("7.1.1", "no", b"5;=b", "llhttp reads: an empty name"),
    ("7.1.1", "no", b"5;a=", "llhttp reads: an empty value"),
    ("7.1.1", "no", b"5;a=b=c", ""),
    ("7.1.1", "no", b"5;a b", ""),
    ("7.1.1", "no", b"5;a ", ""),
    ("7.1.1", "no", b'5;"a"', ""),
    ("7.1.1", "no", b'5;a="x', "llhttp refuses at the line's end"),
    ("7.1.1", "no", b'5;a="x"y', ""),
    ("7.1.1", "no", b'5;a=x"y"', "llhttp reads: quotes within a token"),
    ("7.1.1", "no", b'5;a="x\\', ""),
    ("7.1.1", "no", b"5;a(b", ""),
    ("RFC 9110 5.6.4", "no", b'5;a="\x00"', ""),
    ("RFC 9110 5.6.4", "no", b'5;a="\x7f"', ""),
    ("RFC 9110 5.6.4", "no", b'5;a="\r"', ""),
    ("2.2", "no", b"5;a\nb", ""),
    ("2.2", "no", b"5;a\rb", ""),
    ("2.2", "no", b"5\n", ""),
]

# Whole chunked bodies.
BODIES: list[Row] = [
    ("7.1", "ok", b"0\r\n\r\n", ""),
    ("7.1", "ok", b"1\r\na\r\n000\r\n\r\n", ""),
    ("7.1", "ok", b"A\r\n0123456789\r\na\r\n0123456789\r\n0\r\n\r\n", ""),
    ("7.1", "no", b"1\r\nab\r\n0\r\n\r\n", ""),
    ("7.1", "no", b"2\r\na\r\n0\r\n\r\n", ""),
    ("7.1", "no", b"1\r\na\n0\r\n\r\n", ""),
    ("7.1", "no", b"1\na\r\n0\r\n\r\n", ""),
    ("7.1", "no", b"1\r\na0\r\n\r\n", ""),
    ("7.1", "no", b"1\r\na\r\n\r\n0\r\n\r\n", ""),
    ("7.1", "no", b"0\r\n\n", ""),
    ("7.1.2", "ok", b"0\r\nA: b\r\nC:\r\n\r\n", ""),
    ("7.1.2", "no", b"0\r\nA : b\r\n\r\n", ""),
    ("7.1.2", "no", b"0\r\nA\r\n\r\n", ""),
    ("7.1.2", "no", b"0\r\n A: b\r\n\r\n", ""),
    ("7.1.2", "no", b"0\r\nA: b\r\n c\r\n\r\n", ""),
    ("7.1.2", "no", b"0\r\nA: b\n\r\n", ""),
    ("7.1.2", "no", b"0\r\n: b\r\n\r\n", ""),
    ("7.1.1", "ok", b"0 ;a=b\r\n\r\n", SPACED),
    ("7.1.1", "no", b"0;\r\n\r\n", ""),
]


def _id(row: Row) -> str:
    return f"{row[0]}-{row[2][:40]!r}"


def _whole(line: bytes) -> bytes:
    return line if line.endswith(b"\r\n\r\n") else line + b"Host: a\r\n\r\n"


class _Reading:
    """Whether llhttp read a whole message, and its body."""

    def __init__(self) -> None:
        self.body = b""
        self.headed = self.complete = False

    def on_headers_complete(self) -> None:
        self.headed = True

    def on_body(self, data: bytes) -> None:
        self.body += data

    def on_message_complete(self) -> None:
        self.complete = True


def _llhttp(kind: Any, data: bytes) -> _Reading | None:
    reading = _Reading()
    try:
        kind(reading).feed_data(data)
    except httptools.HttpParserUpgrade:
        pass
    except httptools.HttpParserError:
        return None
    return reading


def _agrees(row: Row, *, read: bool) -> bool:
    """Whether llhttp decided as we do, or otherwise as the row says."""
    _, verdict, _, otherwise = row
    if otherwise.startswith(LAXER):
        return read
    if otherwise.startswith(STRICTER):
        return not read
    return read == (verdict == "ok")


@pytest.mark.parametrize("row", REQUESTS, ids=_id)
def test_heads_of_requests(row: Row) -> None:
    raw = _whole(row[2])
    try:
        parse_request_head(raw)
        verdict = "ok"
    except PeerProtocolError:
        verdict = "no"
    assert verdict == row[1]
    reading = _llhttp(httptools.HttpRequestParser, raw)
    assert _agrees(row, read=reading is not None and reading.headed)


@pytest.mark.parametrize("row", RESPONSES, ids=_id)
def test_heads_of_responses(row: Row) -> None:
    raw = _whole(row[2])
    try:
        parse_response_head(raw, b"GET")
        verdict = "ok"
    except PeerProtocolError:
        verdict = "no"
    assert verdict == row[1]
    reading = _llhttp(httptools.HttpResponseParser, raw)
    assert _agrees(row, read=reading is not None and reading.headed)


def _scan(pieces: list[bytes]) -> tuple[str, bytes, int]:
    """Verdict, payload, and the bytes that were taken before a refusal."""
    scanner, payload, taken = ChunkedScanner(), list[bytes](), 0
    for piece in pieces:
        try:
            end = scanner.feed(piece, payload)
        except PeerProtocolError:
            return "no", b"".join(payload), taken
        if end >= 0:
            return "ok", b"".join(payload), taken + end
        taken += len(piece)
    return "open", b"".join(payload), taken


def _check_body(row: Row, body: bytes) -> None:
    verdict, payload, _ = _scan([body])
    bytewise = _scan([body[i : i + 1] for i in range(len(body))])
    assert verdict == bytewise[0] == row[1]
    head = b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n"
    reading = _llhttp(httptools.HttpRequestParser, head + body)
    assert _agrees(row, read=reading is not None and reading.complete)
    if verdict == "ok":
        assert payload == bytewise[1]
        assert reading is None or reading.body == payload


@pytest.mark.parametrize("row", EXTENSIONS, ids=_id)
def test_chunk_size_lines(row: Row) -> None:
    _check_body(row, row[2] + b"\r\nhello\r\n0\r\n\r\n")


@pytest.mark.parametrize("row", BODIES, ids=_id)
def test_chunked_bodies(row: Row) -> None:
    _check_body(row, row[2])


@pytest.mark.parametrize("row", [row for row in EXTENSIONS if row[1] == "no" and row[2]], ids=_id)
def test_no_byte_of_a_malformed_line_is_taken_once_it_is_malformed(row: Row) -> None:
    """A prefix that a valid line may have is taken; the first byte that none may have is refused."""
    line = row[2] + b"\r\n"
    taken = _scan([line[i : i + 1] for i in range(len(line))])[2]
    assert taken < len(line)
    endings = [b"\r\n", b"\n", b"5\r\n", b"a\r\n", b'"\r\n', b'a"\r\n', b";a\r\n", b"=a\r\n"]
    valid = [end for end in endings if _scan([line[:taken] + end])[0] == "open"]
    assert valid or not taken


def test_extensions_may_exceed_their_payload_by_a_bound() -> None:
    extension = b";a=" + b"x" * 1_000
    chunk = b"1" + extension + b"\r\nx\r\n"
    allowed = EXTENSION_BYTES_MAX // (len(extension) - 1)
    assert _scan([chunk * allowed])[0] == "open"
    assert _scan([chunk * (allowed + 1)])[0] == "no"
    # A signed upload has one of 85 bytes for each chunk of 8 KiB.
    signed = b"2000;chunk-signature=" + b"0" * 64 + b"\r\n" + b"x" * 0x2000 + b"\r\n"
    assert _scan([signed] * 500)[0] == "open"


@pytest.mark.parametrize(
    ("interims", "waited_s", "refused"),
    [
        (INTERIM_HEADS_MAX, 0, False),
        (INTERIM_HEADS_MAX + 1, 0.9, True),
        (INTERIM_HEADS_MAX + 1, 1, False),
        (600, 600, False),
        (600, 500, True),
    ],
)
def test_interim_heads_may_come_once_a_second(interims: int, waited_s: float, refused: bool) -> None:
    """RFC 9110 15.2 has no limit. A server may keep a connection open with a 102 every second."""

    def read() -> object:
        return next_response_head(
            b"HTTP/1.1 200 OK\r\n\r\n",
            b"GET",
            bytes_max=100,
            fields_max=9,
            interims=interims,
            waited_ns=int(waited_s * 1e9),
        )

    if refused:
        with pytest.raises(PeerProtocolError):
            read()
    else:
        assert read() is not None

"""Invariant: a body ends at the same byte with the same payload however its bytes are cut, which is where
llhttp sees it end."""

from itertools import pairwise

import httptools
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmtap.errors import PeerProtocolError
from llmtap.protocol.http1 import (
    LINE_BYTES_MAX,
    TRAILER_LINES_MAX,
    ChunkedDecoder,
    ChunkedScanner,
    CloseScanner,
    Framing,
    LengthScanner,
    scanner_for,
)

# ---------------------------------------------------------------- bodies: cutting


def pieces_of(data: bytes, cuts: list[int]) -> list[bytes]:
    """`data` cut at `cuts`; equal cuts give empty pieces."""
    edges = [0, *sorted(c % (len(data) + 1) for c in cuts), len(data)]
    return [data[a:b] for a, b in pairwise(edges)]


Verdict = tuple[bytes, int] | str


def scan(pieces: list[bytes]) -> Verdict:
    """(payload, offset of the first byte behind the body), `open` or `refused`, of a chunked body."""
    scanner = ChunkedScanner()
    payload: list[bytes] = []
    passed = 0
    for piece in pieces:
        try:
            end = scanner.feed(piece, payload)
        except PeerProtocolError:
            return "refused"
        if end >= 0:
            return b"".join(payload), passed + end
        passed += len(piece)
    return "open"


VALID = {
    "nothing": (b"0\r\n\r\n", b""),
    "one chunk": (b"5\r\nhello\r\n0\r\n\r\n", b"hello"),
    "upper and lower hex": (b"a\r\n0123456789\r\nA\r\n0123456789\r\n0\r\n\r\n", b"0123456789" * 2),
    "leading zeros": (b"0005\r\nhello\r\n000\r\n\r\n", b"hello"),
    "payload of line ends": (b"4\r\n\r\n\r\n\r\n3\r\n\r\n\n\r\n0\r\n\r\n", b"\r\n\r\n\r\n\n"),
    "payload like framing": (b"5\r\n0\r\n\r\n\r\n0\r\n\r\n", b"0\r\n\r\n"),
    # RFC 9112 7.1.1: a recipient ignores extensions it does not know.
    "an extension": (b"5;a=b\r\nhello\r\n0;z\r\n\r\n", b"hello"),
    "a quoted extension": (b'5;a="b c;d"\r\nhello\r\n0\r\n\r\n', b"hello"),
    # 7.1.2
    "trailers": (b"5\r\nhello\r\n0\r\nX-T: 1\r\nServer-Timing: a;dur=3\r\n\r\n", b"hello"),
    "a longer one": (b"fff\r\n" + b"x" * 4095 + b"\r\n0\r\n\r\n", b"x" * 4095),
}

INVALID = {
    "no size": b"\r\nhello\r\n0\r\n\r\n",
    "not hex": b"zz\r\nhello\r\n0\r\n\r\n",
    "hex prefix": b"0x5\r\nhello\r\n0\r\n\r\n",
    "plus": b"+5\r\nhello\r\n0\r\n\r\n",
    "space behind": b"5 \r\nhello\r\n0\r\n\r\n",
    "too many digits": b"1000000000000005\r\nhello\r\n0\r\n\r\n",
    "overflow": b"fffffffffffffffff5\r\nhello\r\n0\r\n\r\n",
    "bare LF behind the size": b"5\nhello\r\n0\r\n\r\n",
    "bare LF behind the data": b"5\r\nhello\n0\r\n\r\n",
    "bare LF at the end": b"5\r\nhello\r\n0\r\n\n",
    "two CRs": b"5\r\r\nhello\r\n0\r\n\r\n",
    "CR in an extension": b"5;a\rb\r\nhello\r\n0\r\n\r\n",
    "LF in an extension": b"5;a\nb\r\nhello\r\n0\r\n\r\n",
    "NUL in an extension": b"5;a\x00\r\nhello\r\n0\r\n\r\n",
    "data longer than its size": b"5\r\nhelloX\r\n0\r\n\r\n",
    "data longer by a CR": b"5\r\nhello\rX0\r\n\r\n",
    "data shorter than its size": b"6\r\nhello\r\n0\r\n\r\n",
    "a trailer without a colon": b"0\r\nnonsense\r\n\r\n",
    "a trailer with white space before the colon": b"0\r\nX : 1\r\n\r\n",
    "a folded trailer": b"0\r\nX: 1\r\n 2\r\n\r\n",
    "a trailer with a NUL": b"0\r\nX: \x00\r\n\r\n",
    "a trailer with a bare CR": b"0\r\nX: a\rb\r\n\r\n",
    "a trailer with a bare LF": b"0\r\nX: 1\n\r\n",
}


@pytest.mark.parametrize("name", VALID)
def test_every_slicing_ends_at_the_same_byte(name: str) -> None:
    body, payload = VALID[name]
    behind = b"GET /next HTTP/1.1\r\n"
    data = body + behind
    expected = (payload, len(body))
    assert scan([data]) == expected
    assert scan([data[i : i + 1] for i in range(len(data))]) == expected
    assert scan([x for i in range(len(data)) for x in (b"", data[i : i + 1])]) == expected
    for cut in range(min(len(data), 300)):
        assert scan(pieces_of(data, [cut])) == expected, f"cut at {cut}"
    for size in (2, 3, 5, 7):
        assert scan([data[i : i + size] for i in range(0, len(data), size)]) == expected, f"by {size}"


@pytest.mark.parametrize("name", INVALID)
def test_every_slicing_refuses_what_is_malformed(name: str) -> None:
    body = INVALID[name]
    assert scan([body]) == "refused"
    assert scan([body[i : i + 1] for i in range(len(body))]) == "refused"
    for cut in range(len(body)):
        assert scan(pieces_of(body, [cut, cut])) == "refused", f"cut at {cut}"


@pytest.mark.parametrize("start", [b"5;", b"0\r\nX: "])
def test_the_longest_line_is_the_same_for_every_slicing(start: bytes) -> None:
    room = LINE_BYTES_MAX - len(start.split(b"\r\n")[-1]) - 2
    for extra, verdict in ((0, "open"), (1, "refused")):
        line = start + b"x" * (room + extra) + b"\r\n"
        assert scan([line]) == verdict
        assert scan([line[i : i + 1] for i in range(len(line))]) == verdict


def test_trailers_are_counted() -> None:
    lines = [b"T%d: x\r\n" % i for i in range(TRAILER_LINES_MAX)]
    assert scan([b"0\r\n" + b"".join(lines) + b"\r\n"]) != "refused"
    assert scan([b"0\r\n" + b"".join([*lines, b"One: more\r\n"]) + b"\r\n"]) == "refused"


def test_a_refused_size_line_is_refused_again() -> None:
    """Sizes are remembered between scanners: a bad one must not be."""
    for _ in range(2):
        assert scan([b"0x5\r\nhello\r\n0\r\n\r\n"]) == "refused"
        assert scan([b"5\r\nhello\r\n0\r\n\r\n"]) == (b"hello", 15)


# ---------------------------------------------------------------- bodies: llhttp as the oracle


class LlhttpBody:
    """What llhttp makes of a chunked body."""

    def __init__(self, coded: bytes) -> None:
        self.payload = b""
        self.complete = False
        parser = httptools.HttpResponseParser(self)
        parser.feed_data(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
        parser.feed_data(coded)

    def on_body(self, data: bytes) -> None:
        self.payload += data

    def on_message_complete(self) -> None:
        self.complete = True


CHUNK = st.tuples(
    st.binary(min_size=1, max_size=40),
    st.sampled_from(["", ";a", ";a=1", ';q="x y"']),
    st.sampled_from(["%x", "%X", "0%x", "000%X"]),
)
TRAILERS = st.lists(st.sampled_from([b"X-T: 1\r\n", b"Server-Timing: a;dur=1\r\n", b"E:\r\n"]), max_size=3)


def coded_body(chunks: list[tuple[bytes, str, str]], trailers: list[bytes]) -> bytes:
    out = [(how % len(data)).encode() + ext.encode() + b"\r\n" + data + b"\r\n" for data, ext, how in chunks]
    return b"".join([*out, b"0\r\n", *trailers, b"\r\n"])


@settings(max_examples=300)
@given(st.lists(CHUNK, max_size=6), TRAILERS, st.lists(st.integers(0), max_size=12), st.binary(max_size=10))
def test_the_decoder_agrees_with_llhttp(
    chunks: list[tuple[bytes, str, str]], trailers: list[bytes], cuts: list[int], behind: bytes
) -> None:
    coded = coded_body(chunks, trailers)
    decoder = ChunkedDecoder()
    got = b"".join(decoder.feed(piece) for piece in pieces_of(coded + behind, cuts))
    oracle = LlhttpBody(coded)
    assert decoder.done
    assert oracle.complete
    assert got == oracle.payload == b"".join(data for data, _, _ in chunks)
    assert scan(pieces_of(coded + behind, cuts)) == (got, len(coded))


@settings(max_examples=600)
@given(
    st.lists(CHUNK, min_size=1, max_size=3),
    st.integers(0),
    st.sampled_from(
        [b"", b"\r", b"\n", b"\r\n", b"0", b"5", b"x", b" ", b"\t", b"+", b"\x00", b":", b"0\r\n\r\n"]
    ),
    st.integers(0, 3),
    st.lists(st.integers(0), max_size=4),
)
def test_one_broken_place_never_gives_another_body_than_llhttp_sees(
    chunks: list[tuple[bytes, str, str]], at: int, put: bytes, cut_out: int, cuts: list[int]
) -> None:
    chunks = [(data, "", how) for data, _, how in chunks]  # llhttp is the stricter one about extensions
    good = coded_body(chunks, [])
    at %= len(good)
    coded = good[:at] + put + good[at + cut_out :]
    verdict = scan(pieces_of(coded, cuts))
    if isinstance(verdict, str):
        return
    payload, end = verdict
    oracle = LlhttpBody(coded[:end])
    assert oracle.complete
    assert oracle.payload == payload


# ---------------------------------------------------------------- the other scanners


@given(st.integers(1, 500), st.lists(st.integers(0, 60), max_size=30))
def test_a_length_ends_at_its_byte_however_it_is_cut(length: int, sizes: list[int]) -> None:
    scanner = LengthScanner(length)
    left = length
    for size in [*sizes, *[60] * 10]:
        end = scanner.feed(b"x" * size)
        if size < left:
            assert end == -1
            left -= size
        else:
            assert end == left
            assert scanner.left == 0
            return
    raise AssertionError("the body never ended")


def test_each_framing_has_its_scanner() -> None:
    kinds = [type(scanner_for(framing, 7)) for framing in (Framing.CHUNKED, Framing.CLOSE, Framing.LENGTH)]
    assert kinds == [ChunkedScanner, CloseScanner, LengthScanner]
    assert [CloseScanner().feed(d) for d in (b"", b"0\r\n\r\n", b"x" * 100_000)] == [-1] * 3

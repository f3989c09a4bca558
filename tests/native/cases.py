"""Seeded inputs for differential fuzzing: chunked bodies in any cuts, token events in any spelling.

A case costs a few microseconds, because a full run makes 10 million of them.
"""

import json
from collections.abc import Sequence
from random import Random
from typing import Final

_SPECIAL: Final = b'\r\n0123456789abcdefABCDEF;:=",\\ \t{}[]u\x00\x7f\x80\xc3\xed\xff'


_USES: Final = 16
"""Cases made of one body: to make it costs more than to change and to cut it."""


def mutated(rng: Random, data: bytes) -> bytes:
    """One byte changed, deleted, inserted or doubled; or a piece removed."""
    if not data:
        return data
    kind, at = rng.getrandbits(3), int(rng.random() * len(data))
    special = _SPECIAL[int(rng.random() * len(_SPECIAL))]
    if kind < 3:
        return b"%b%c%b" % (data[:at], special, data[at + 1 :])
    if kind == 3:
        return data[:at] + data[at + 1 :]
    if kind < 6:
        return b"%b%c%b" % (data[:at], special, data[at:])
    if kind == 6:
        return data[: at + 1] + data[at:]
    return data[:at] + data[at + 1 + int(rng.random() * 8) :]


_BYTE_BY_BYTE_MAX: Final = 2_048
"""A read takes some microseconds."""


def cut_at_random(rng: Random, body: bytes) -> list[bytes]:
    """The reads of a body: one, one for each byte, or some."""
    how = rng.random()
    if how < 0.3 or not body:
        return [body]
    if how < 0.35 and len(body) <= _BYTE_BY_BYTE_MAX:
        return [body[at : at + 1] for at in range(len(body))]
    cuts = sorted({int(rng.random() * len(body)) for _ in range(1 + rng.getrandbits(2))} | {0})
    return [body[a:b] for a, b in zip(cuts, [*cuts[1:], len(body)], strict=True)]


_EXTENSIONS: Final = (
    b"",
    b";a",
    b";a=b",
    b';a="b;c"',
    b" ;x",
    b"; y=1",
    b"\t;\tx\t=\ty",
    b';a="q\\"r" ;b',
    b';a=""',
    b';a="\xe9"',
    b";",
    b" ",
    b";a=",
    b';a="x',
    b';a="\\',
    b";a b",
    b";=b",
    b';"a"',
    b';a=b"c"',
    b';a="b"c',
    b";a=b=c",
    b";a;;b",
)
"""Of chunks: the first ten are well formed (RFC 9112 7.1.1), the others are not."""


class ChunkedBodies:
    """Chunked bodies (RFC 9112 7.1), well formed and not, as the reads in which they arrive."""

    def __init__(self, rng: Random) -> None:
        self._rng = rng
        # Payloads hold line ends and digits, so that a scanner that looks into them goes wrong.
        line = b"\r\n0a;x"
        payload = [rng.choice(line) if rng.random() < 0.4 else rng.getrandbits(8) for _ in range(16_384)]
        self._payload = bytes(payload)
        self._body, self._uses = b"", 0

    def case(self) -> list[bytes]:
        """The reads of one body, perhaps with bytes behind its end."""
        rng = self._rng
        if self._uses == 0:
            self._body, self._uses = self._make_body(), _USES
        self._uses -= 1
        body = self._body
        while rng.random() < 0.4:
            body = mutated(rng, body)
        return cut_at_random(rng, body)

    def _make_body(self) -> bytes:
        rng = self._rng
        parts = []
        for _ in range(1 + rng.getrandbits(2)):
            size = 1 + rng.getrandbits(5)
            if rng.random() < 0.03:
                size = 1 + rng.getrandbits(12)
            at = rng.getrandbits(13)
            parts.append(b"%b%b\r\n" % (self._size_line(size), self._payload[at : at + size]))
        if rng.random() < 0.8:
            parts.append(self._size_line(0))
            while rng.random() < 0.2:
                parts.append(rng.choice((b"Digest: abc\r\n", b"x:\r\n", b"bad\r\n", b" : x\r\n", b"a: b\n")))
            parts.append(b"\r\n")
            if rng.random() < 0.2:
                parts.append(b"HTTP/1.1 200 OK\r\n")
        return b"".join(parts)

    def _size_line(self, size: int) -> bytes:
        rng = self._rng
        if rng.random() < 0.8:
            return b"%x\r\n" % size
        digits = rng.choice((b"%X", b"0%x", b"%08x", b"%020x")) % size
        more = rng.choice(_EXTENSIONS) + rng.choice((b"", b"", b";" + b"z" * (1 + rng.getrandbits(7))))
        return digits + more + b"\r\n"


_TEXTS: Final = (
    "a",
    "the",
    " of",
    "word",
    "ünï",
    "日本",
    "😀",
    "\n",
    "\t",
    '"',
    "\\",
    "",
    "\x7f",
    "\u2028",
    "12",
    " ",
    "/",
)
_SPELT: Final = tuple(json.dumps(text)[1:-1].encode() for text in _TEXTS)
_SPELT_UTF8: Final = tuple(json.dumps(text, ensure_ascii=False)[1:-1].encode() for text in _TEXTS)
_WRONG: Final = (
    b'"',
    b"\\",
    b"\\u",
    b"\\u12",
    b"\\ud83d",
    b"\\ude00",
    b"\\ud83d\\u0041",
    b"\\x",
    b"\n",
    b"\x00",
    b"\x1f",
    b"\xff",
    b"\xc3",
    b"\xed\xa0\x80",
    b"\xf0\x9f\x98",
    b'","x":"',
    b'"}',
    b"\r\n",
    b'\\"',
    b"\\/",
    b"\\u0000",
)


class TokenEvents:
    """Events that differ only in their text, and ones that only seem to.

    `heads` are what may stand before the text, equally often; `tail` is what stands behind it.
    """

    def __init__(self, rng: Random, heads: Sequence[bytes], tail: bytes) -> None:
        self._rng = rng
        self._heads, self._tail = heads, tail

    def case(self) -> bytes:
        """The block of one event."""
        rng = self._rng
        spelt = _SPELT if rng.getrandbits(1) else _SPELT_UTF8
        text = b"".join([spelt[int(rng.random() * len(spelt))] for _ in range(rng.getrandbits(2))])
        if rng.random() < 0.25:
            at = int(rng.random() * (len(text) + 1))
            text = text[:at] + _WRONG[int(rng.random() * len(_WRONG))] + text[at:]
        elif rng.random() < 0.005:
            text *= 1 << rng.getrandbits(3) * 2
        block = b"%b%b%b" % (self._heads[int(rng.random() * len(self._heads))], text, self._tail)
        while rng.random() < 0.2:
            block = mutated(rng, block)
        return block


def in_a_chunk(rng: Random, block: bytes) -> bytes:
    """The block as one chunk, whose size is sometimes spelt otherwise, or wrong."""
    kind = rng.random()
    if kind < 0.7:
        return b"%x\r\n%b\r\n" % (len(block), block)
    if kind < 0.9:
        return rng.choice((b"%X\r\n%b\r\n", b"0%x\r\n%b\r\n", b"%x;a\r\n%b\r\n", b"%x\n%b\r\n")) % (
            len(block),
            block,
        )
    return b"%x\r\n%b\r\n" % (max(0, len(block) + rng.getrandbits(2) - 1), block)

"""Fuzz target: bodies with layers of content codings, broken, cut, and longer than allowed.

The decoder gets each body in reads of any length. The oracle decodes all bytes up to a read at once, layer by
layer, with plain calls of the libraries. So it knows after which read the decoder must refuse the body.
"""

import re
import time
import zlib
from collections.abc import Callable
from random import Random
from typing import Any, Final, NamedTuple

import brotli
import zstandard

from llmtap.protocol.encoding import (
    CODINGS_MAX,
    DECODED_BYTES_MAX,
    PIECE_BYTES,
    RATIO_FREE_BYTES,
    RATIO_MAX,
    DecodeError,
    Decoder,
)
from tests.native.cases import cut_at_random, mutated

CPU_NS_MAX: Final = 1_000_000_000
"""CPU time of one body, which has at most some kilobytes: the promise is 1 s + 1 us per byte."""
_CASES_PER_TIMING: Final = 8
"""Reading the clock of a thread is a system call."""
_PIECE_BYTES_MAX: Final = 2 * PIECE_BYTES
"""The smallest output buffer of brotli is 32 KiB."""
_WINDOW_BYTES_MAX: Final = CODINGS_MAX * (16 << 20)
_ZSTD_WINDOW_BYTES: Final = 8 << 20
_FRAME_IN_HEADER: Final = re.compile(rb"\x28\xb5\x2f\xfd.{0,14}\x28\xb5\x2f\xfd", re.DOTALL)
_USES: Final = 12
"""Cases made of one body: encoding a body costs more than changing and cutting it."""
Case = tuple[bytes, list[bytes]]
"""Value of Content-Encoding, and the reads of the body."""


class Expected(NamedTuple):
    """What a decoder must make of bytes: `state` is `ok`, `broken`, `too long`, or `unclear`."""

    state: str
    output: bytes
    decoded: int
    """Bytes of all layers."""


class _Broken(Exception):
    """The bytes are not in the coding."""


class _Unclear(Exception):
    """The library's own answer depends on the cuts."""


def decode_at_once(encoding: bytes, body: bytes) -> Expected:
    """The oracle: decode whole layers, the outermost first. The body may be incomplete."""
    decoded, data = 0, body
    try:
        for name in reversed(encoding.split(b", ")):
            if name != b"identity":
                data = _DECODE[name](data)
                decoded += len(data)
    except _Broken:
        return Expected("broken", b"", decoded)
    except _Unclear:
        return Expected("unclear", b"", decoded)
    is_long = decoded > min(DECODED_BYTES_MAX, max(RATIO_FREE_BYTES, RATIO_MAX * len(body)))
    return Expected("too long" if is_long else "ok", data, decoded)


def _gunzip(data: bytes) -> bytes:
    members: list[bytes] = []
    # RFC 1952 2.2: members follow each other. gzip ignores other bytes behind a member.
    while data and (not members or data.startswith(b"\x1f\x8b")):
        inflater = zlib.decompressobj(31)
        try:
            members.append(inflater.decompress(data))
        except zlib.error as exc:
            raise _Broken from exc
        data = inflater.unused_data
    return b"".join(members)


def _inflate(data: bytes) -> bytes:
    if len(data) < 2:
        return b""
    # RFC 1950 2.2, or raw deflate (RFC 1951), which some servers send.
    wrapped = data[0] & 15 == 8 and not int.from_bytes(data[:2], "big") % 31
    try:
        return zlib.decompressobj(15 if wrapped else -15).decompress(data)
    except zlib.error as exc:
        raise _Broken from exc


def _unbrotli(data: bytes) -> bytes:
    decompressor = brotli.Decompressor()
    pieces = [b""]
    try:
        # One call may leave output behind (brotli 1.2).
        while piece := decompressor.process(data):
            pieces.append(piece)
            data = b""
        return b"".join(pieces)
    except brotli.error as exc:
        raise _Broken from exc


def _unzstd(data: bytes) -> bytes:
    try:
        return _zstd_decompressor().decompress(data)
    except zstandard.ZstdError as exc:
        raise (_Unclear if _is_unclear(data) else _Broken) from exc


def _zstd_decompressor() -> Any:
    library = zstandard.ZstdDecompressor(max_window_size=_ZSTD_WINDOW_BYTES)
    return library.decompressobj(read_across_frames=True)


def _is_unclear(data: bytes) -> bool:
    """Return whether libzstd 1.5.7 finds a fault in a frame's header or not, depending on the reads.

    It may find it with the next bytes only; and it takes a read that begins within a header, with what could
    be a frame of its own, for that frame.
    """
    if _FRAME_IN_HEADER.search(data):
        return True
    decompressor = _zstd_decompressor()
    try:
        for at in range(len(data)):
            decompressor.decompress(data[at : at + 1])
    except zstandard.ZstdError:
        return False
    return True


_DECODE: Final[dict[bytes, Callable[[bytes], bytes]]] = {
    b"gzip": _gunzip,
    b"x-gzip": _gunzip,
    b"deflate": _inflate,
    b"br": _unbrotli,
    b"zstd": _unzstd,
}


class Codings:
    """Bodies in one to four codings: what comes out does not depend on the reads, and the bounds hold."""

    def __init__(self, rng: Random) -> None:
        self._rng = rng
        self._encoding, self._body, self._uses = b"", b"", 0
        self.seen: dict[str, int] = {}
        """Cases by state."""
        self._cases = 0
        self.cpu_ns_max = 0
        """Most CPU time of one case, of those that are timed, without the oracle's."""
        line = b'data: {"choices":[{"index":0,"delta":{"content":"%s"}}]}\n\n'
        self._text = b"".join(line % bytes(rng.choices(b"abcdefgh ", k=6)) for _ in range(40))
        self._noise = rng.randbytes(4_096)
        self._zeros = bytes(1 << 20)

    def case(self) -> Case:
        rng = self._rng
        if not self._uses:
            self._make_body()
            self._uses = _USES
        self._uses -= 1
        body = self._body
        while rng.random() < 0.4:
            body = mutated(rng, body)
        return self._encoding, cut_at_random(rng, body)

    # ---------------------------------------------------------------- bodies

    def _make_body(self) -> None:
        rng = self._rng
        body = self._plain()
        names: list[bytes] = []
        for _ in range(rng.choice((1, 1, 2, 2, 2, 3, 4))):
            name = rng.choice((b"gzip", b"gzip", b"x-gzip", b"deflate", b"br", b"zstd", b"zstd", b"identity"))
            names.append(name)
            body = self._encode(name, body)
            if rng.random() < 0.1:  # broken inside whole outer layers
                body = mutated(rng, body)
        if rng.random() < 0.02:
            names[rng.randrange(len(names))] = rng.choice((b"gzip", b"deflate", b"br", b"zstd"))
        self._encoding, self._body = b", ".join(names), body

    def _plain(self) -> bytes:
        rng = self._rng
        kind = rng.random()
        if kind < 0.55:
            at = rng.randrange(len(self._text))
            return self._text[at : at + rng.getrandbits(11)]
        if kind < 0.7:
            return self._noise[: rng.getrandbits(rng.randrange(1, 12))]
        if kind < 0.93:
            return self._zeros[: rng.getrandbits(16)]
        size = rng.randrange(200 << 10, 400 << 10) if kind < 0.985 else rng.getrandbits(20)
        # Noise before zeros makes a body whose ratio is too high in its middle, or only at its end.
        return self._noise[: rng.getrandbits(11)] + self._zeros[:size] + self._noise[: rng.getrandbits(12)]

    def _encode(self, name: bytes, data: bytes) -> bytes:
        rng = self._rng
        if name == b"identity":
            return data
        if name == b"br":
            return self._in_parts(brotli.Compressor(quality=1), data)
        if name == b"zstd":
            return self._frames(data)
        if name == b"deflate":
            return self._deflate(data, rng.choice((15, -15)))
        members = [self._deflate(part, 31) for part in self._parts(data)]
        if rng.random() < 0.1:
            members += [self._deflate(b"", 31)] * rng.getrandbits(4)
        if rng.random() < 0.1:
            members.append(
                rng.choice((b"\0" * 9, b"rest", b"\x1f", b"\x1f\x8b", b"\x1f\x8b\x08\0\0\0\0\0\0"))
            )
        return b"".join(members)

    def _parts(self, data: bytes) -> list[bytes]:
        """The data, whole or in up to four parts."""
        rng = self._rng
        if rng.random() < 0.6 or not data:
            return [data]
        step = 1 + len(data) // (1 + rng.getrandbits(2))
        return [data[at : at + step] for at in range(0, len(data), step)]

    def _deflate(self, data: bytes, window: int) -> bytes:
        rng = self._rng
        coder = zlib.compressobj(rng.choice((0, 1, 6)), zlib.DEFLATED, window)
        parts = [coder.compress(part) + coder.flush(zlib.Z_SYNC_FLUSH) for part in self._parts(data)[:-1]]
        if parts:
            return b"".join([*parts, coder.compress(self._parts(data)[-1]), coder.flush()])
        return coder.compress(data) + coder.flush()

    def _in_parts(self, coder: "brotli.Compressor", data: bytes) -> bytes:
        parts = [coder.process(part) + coder.flush() for part in self._parts(data)]
        return b"".join([*parts, coder.finish()])

    def _frames(self, data: bytes) -> bytes:
        rng = self._rng
        frames = []
        for part in self._parts(data):
            coder = zstandard.ZstdCompressor(
                level=1, write_checksum=rng.random() < 0.3, write_content_size=rng.random() < 0.5
            ).compressobj()
            half = len(part) // 2 if rng.random() < 0.3 else 0
            frames.append(coder.compress(part[:half]))
            if half:
                frames.append(coder.flush(zstandard.COMPRESSOBJ_FLUSH_BLOCK))
            frames.append(coder.compress(part[half:]) + coder.flush())
        if rng.random() < 0.1:  # a skippable frame (RFC 8878 3.1.2)
            frames.insert(rng.randrange(len(frames) + 1), b"\x50\x2a\x4d\x18\x03\0\0\0abc")
        return b"".join(frames)

    # ---------------------------------------------------------------- the check

    def check(self, case: Case) -> None:
        encoding, reads = case
        decoder = Decoder(encoding)
        output: list[bytes] = []
        fed, before, problem = 0, 0, ""
        self._cases += 1
        is_timed = not self._cases % _CASES_PER_TIMING
        began_ns = time.thread_time_ns() if is_timed else 0
        try:
            for read in reads:
                fed += 1
                before = len(output)
                if decoder.identity:
                    output.append(decoder.feed(read))
                    continue
                for piece in decoder.pieces(read):
                    assert len(piece) <= _PIECE_BYTES_MAX, f"a piece of {len(piece)} bytes"
                    output.append(piece)
        except DecodeError as exc:
            problem = "too long" if "decodes to more than" in str(exc) else "broken"
        if is_timed:
            cpu_ns = time.thread_time_ns() - began_ns
            self.cpu_ns_max = max(self.cpu_ns_max, cpu_ns)
            assert cpu_ns < CPU_NS_MAX, f"{cpu_ns} ns of CPU time"
        assert decoder.kept_bytes <= _WINDOW_BYTES_MAX
        expected = decode_at_once(encoding, b"".join(reads[:fed]))
        if problem:
            assert expected.state != "ok", f"{problem} after read {fed}, without a reason"
            if expected.state == "too long":
                assert problem == "too long"
            # All that came before the read with the fault came out.
            whole = decode_at_once(encoding, b"".join(reads[: fed - 1]))
            if "unclear" in (expected.state, whole.state):
                return
            assert whole.state == "ok", f"not refused at read {fed - 1}, which was {whole.state}"
            assert b"".join(output[:before]) == whole.output
        elif expected.state != "unclear":
            assert expected.state == "ok", f"accepted what is {expected.state}"
            assert b"".join(output) == expected.output
        if expected.decoded > RATIO_FREE_BYTES and not problem:
            # The ratio counts from end to end, after each read.
            half = b"".join(reads[: len(reads) // 2])
            assert decode_at_once(encoding, half).state == "ok"
        state = problem or "whole"
        self.seen[state] = self.seen.get(state, 0) + 1
        layers = f"{encoding.count(b',') + 1} layers"
        self.seen[layers] = self.seen.get(layers, 0) + 1

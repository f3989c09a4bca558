"""Decode content-encodings of measured copies of bodies: gzip, deflate, br, zstd, incremental and bounded.

`Decoder` takes a body read by read, so that flushed output has the time of its read. Total output and its
ratio to the input are bounded. Forwarded bodies are never decoded.

Source: RFC 9110 8.4.1, RFC 1952 2.2 (members), RFC 9659 (zstd window).
"""

import zlib
from typing import Final, Protocol

import brotli
import zstandard

from llmtap.errors import PeerProtocolError

DECODED_BYTES_MAX: Final = 256 << 20
"""Of one body. A million tokens, streamed at 250 bytes each, are this much."""
RATIO_MAX: Final = 250
"""Decoded to coded bytes. Streams of near-identical chunks reach about 50; deflate ends at 1,032."""
RATIO_FREE_BYTES: Final = 1 << 20
"""Below this much output the ratio says nothing: the first flush of a stream may be a few bytes."""
CODINGS_MAX: Final = 4
_PIECE: Final = 64 << 10
_INPUT_BYTES: Final = 4 << 10
"""Coded bytes that a stage is given at once. The libraries copy the rest of their input at the end of each
gzip member and of each piece of output; for a whole body at once that takes quadratic time."""
_ZSTD_WINDOW_MAX: Final = 8 << 20  # RFC 9659: a zstd content coding uses a window of at most 8 MB


class DecodeError(PeerProtocolError):
    """A body is not what its Content-Encoding says, or decodes to more than is allowed."""

    def __init__(self, problem: str) -> None:
        super().__init__(problem, 502)


class _Stage(Protocol):
    def decode(self, data: bytes, room: "_Room") -> bytes: ...


class _Room:
    """How much a stage may still put out: less with every piece, more with every coded byte."""

    __slots__ = ("_coded", "_decoded", "_decoded_bytes_max", "_ratio_max")

    def __init__(self, decoded_bytes_max: int, ratio_max: int) -> None:
        self._decoded_bytes_max = decoded_bytes_max
        self._ratio_max = ratio_max
        self._coded = 0
        self._decoded = 0

    def coded(self, size: int) -> None:
        self._coded += size

    def take(self, size: int) -> None:
        self._decoded += size
        if self._decoded > self._decoded_bytes_max:
            raise DecodeError(f"the body decodes to more than {self._decoded_bytes_max} bytes")
        if self._decoded > max(RATIO_FREE_BYTES, self._ratio_max * self._coded):
            raise DecodeError(f"the body decodes to more than {self._ratio_max} times its size")


class Decoder:
    """Decoder of one Content-Encoding value, such as `gzip, br`. `decoded_bytes_max` bounds the body,
    `ratio_max` decoded / coded bytes beyond 1 MiB. Raises DecodeError for unknown or too many codings."""

    __slots__ = ("_stages",)

    def __init__(
        self,
        encoding: bytes | None,
        *,
        decoded_bytes_max: int = DECODED_BYTES_MAX,
        ratio_max: int = RATIO_MAX,
    ) -> None:
        names = [n for part in (encoding or b"").lower().split(b",") if (n := part.strip(b" \t"))]
        names = [n for n in names if n != b"identity"]
        if len(names) > CODINGS_MAX:
            raise DecodeError(f"{len(names)} content codings on one body (limit {CODINGS_MAX})")
        # RFC 9110 8.4: codings are listed in the order they were applied; the last comes off first.
        self._stages = [(_stage(n), _Room(decoded_bytes_max, ratio_max)) for n in reversed(names)]

    @property
    def identity(self) -> bool:
        return not self._stages

    def feed(self, data: bytes) -> bytes:
        for stage, room in self._stages:
            size = len(data)
            room.coded(size)
            if size <= _INPUT_BYTES:
                data = stage.decode(data, room)
            else:
                pieces = (data[i : i + _INPUT_BYTES] for i in range(0, size, _INPUT_BYTES))
                data = b"".join([stage.decode(piece, room) for piece in pieces])
        return data


def _stage(name: bytes) -> _Stage:
    if name in (b"gzip", b"x-gzip"):  # RFC 9110 8.4.1.3: a recipient treats them as one
        return _Gzip()
    if name == b"deflate":
        return _Deflate()
    if name == b"br":
        return _Brotli()
    if name == b"zstd":
        return _Zstd()
    raise DecodeError(f"unknown content coding {name[:32].decode('latin-1')!r}")


def _inflate(inflate: "zlib._Decompress", data: bytes, room: _Room) -> bytes:
    """All that `data` yields, up to the end of a member. Raises zlib.error."""
    pieces: list[bytes] = []
    while True:
        piece = inflate.decompress(data, _PIECE)
        if piece:
            room.take(len(piece))
            pieces.append(piece)
        data = inflate.unconsumed_tail
        # A full piece may leave output behind although all input is used.
        if inflate.eof or (not data and len(piece) < _PIECE):
            return b"".join(pieces)


class _Gzip:
    __slots__ = ("_first", "_inflate", "_over")

    def __init__(self) -> None:
        self._inflate = zlib.decompressobj(31)
        self._first = True
        self._over = False

    def decode(self, data: bytes, room: _Room) -> bytes:
        members: list[bytes] = []
        while data and not self._over:
            try:
                members.append(_inflate(self._inflate, data, room))
            except zlib.error:
                if self._first:
                    raise DecodeError("the body is not valid gzip") from None
                # As gzip itself does: what follows a whole member and is none is left out.
                self._over = True
                break
            if not self._inflate.eof:
                break
            data = self._inflate.unused_data
            self._inflate = zlib.decompressobj(31)
            self._first = False
        return b"".join(members)


class _Deflate:
    """deflate: the zlib format, or raw deflate, which some servers send under that name."""

    __slots__ = ("_head", "_inflate")

    def __init__(self) -> None:
        self._head = b""
        self._inflate: zlib._Decompress | None = None

    def decode(self, data: bytes, room: _Room) -> bytes:
        if self._inflate is None:
            self._head += data
            if len(self._head) < 2:
                return b""
            data = self._head
            # RFC 1950 2.2: method 8, and the two bytes as a number are a multiple of 31.
            wrapped = data[0] & 0x0F == 8 and (data[0] << 8 | data[1]) % 31 == 0
            self._inflate = zlib.decompressobj(15 if wrapped else -15)
        if self._inflate.eof:
            return b""
        try:
            return _inflate(self._inflate, data, room)
        except zlib.error:
            raise DecodeError("the body is not valid deflate") from None


class _Brotli:
    __slots__ = ("_decompressor",)

    def __init__(self) -> None:
        self._decompressor = brotli.Decompressor()

    def decode(self, data: bytes, room: _Room) -> bytes:
        decompressor = self._decompressor
        pieces: list[bytes] = []
        try:
            piece: bytes = decompressor.process(data, output_buffer_limit=_PIECE)
            while True:
                room.take(len(piece))
                pieces.append(piece)
                if decompressor.can_accept_more_data() or not piece:
                    return b"".join(pieces)
                piece = decompressor.process(b"", output_buffer_limit=_PIECE)
        except brotli.error:
            raise DecodeError("the body is not valid brotli") from None


class _Zstd:
    """zstd, frame after frame. The library writes output piece by piece: `write` refuses when there is no
    room."""

    __slots__ = ("_pieces", "_room", "_writer")

    def __init__(self) -> None:
        self._pieces: list[bytes] = []
        self._room: _Room | None = None
        self._writer = zstandard.ZstdDecompressor(max_window_size=_ZSTD_WINDOW_MAX).stream_writer(
            self,  # type: ignore[arg-type]  # it only needs our write
            write_size=_PIECE,
            closefd=False,
        )

    def write(self, piece: bytes) -> int:
        assert self._room is not None
        self._room.take(len(piece))
        self._pieces.append(bytes(piece))
        return len(piece)

    def decode(self, data: bytes, room: _Room) -> bytes:
        self._room = room
        try:
            self._writer.write(data)
        except zstandard.ZstdError:
            raise DecodeError("the body is not valid zstd, or needs a window of more than 8 MiB") from None
        out = b"".join(self._pieces)
        self._pieces.clear()
        return out

"""Decode content-encodings of measured copies of bodies: gzip, deflate, br, zstd, incremental and bounded.

`Decoder` takes a body read by read, so that output has the time of the read that completed it. The total
output and its ratio to the input are bounded. Forwarded bodies are never decoded.

Source: RFC 9110 8.4.1, RFC 1952 2.2 (members), RFC 9659 (zstd window).
"""

import zlib
from collections.abc import Iterator
from typing import Final, Protocol

import brotli
import zstandard

from llmtap.errors import PeerProtocolError

DECODED_BYTES_MAX: Final = 256 << 20
"""Maximum decoded size of one body: a million tokens, streamed at 250 bytes each."""
RATIO_MAX: Final = 250
"""Maximum ratio of decoded to coded bytes. Streams of similar chunks reach 50, deflate at most 1,032."""
RATIO_FREE_BYTES: Final = 256 << 10
"""Decoded size up to which the ratio is not limited, because it can be high by chance at the start."""
CODINGS_MAX: Final = 4
PIECE_BYTES: Final = 16 << 10
"""Maximum number of decoded bytes that are returned at once, so that parsing them takes only a few ms."""
_INPUT_BYTES: Final = 4 << 10
"""Maximum number of coded bytes passed to a library in one call. A library copies the rest of its input after
each gzip member and each piece of output; with a whole body as input that would take quadratic time."""
_ZSTD_INPUT_BYTES: Final = 64
"""Maximum number of coded bytes passed to zstd in one call. It returns all output at the end of a call, and a
block of 4 bytes can decode to 128 KiB (RFC 8878 3.1.1.2), so 64 bytes give at most 2 MiB."""
_ZSTD_WINDOW_MAX: Final = 8 << 20  # RFC 9659: a zstd content coding uses a window of at most 8 MB
_BROTLI_WINDOW_MAX: Final = 16 << 20  # RFC 7932 9.1: a brotli window is smaller than 16 MiB
_DEFLATE_WINDOW_MAX: Final = 32 << 10  # RFC 1951 2: deflate refers back by at most 32 KiB
_GZIP_MAGIC: Final = b"\x1f\x8b"  # RFC 1952 2.3.1: first bytes of a member


class DecodeError(PeerProtocolError):
    """A body is not what its Content-Encoding says, or decodes to more than is allowed."""

    def __init__(self, problem: str) -> None:
        super().__init__(problem, 502)


class DecodingBudget:
    """Limit of the decoded bytes of a body, in all its layers of coding together.

    The ratio is that of all decoded bytes to the bytes of the outermost layer. A ratio of 250 for each layer
    would allow a ratio of 62,500 for two layers.
    """

    __slots__ = ("_coded_bytes", "_decoded_bytes_max", "_ratio_max", "decoded_bytes")

    def __init__(self, decoded_bytes_max: int = DECODED_BYTES_MAX, ratio_max: int = RATIO_MAX) -> None:
        self._decoded_bytes_max = decoded_bytes_max
        self._ratio_max = ratio_max
        """Largest allowed decoded size per coded byte, against decompression bombs."""
        self._coded_bytes = 0
        """Size of the coded body so far."""
        self.decoded_bytes = 0
        """Number of decoded bytes so far, including those of inner layers."""

    def add_coded(self, size: int) -> None:
        self._coded_bytes += size

    @property
    def bytes_left(self) -> int:
        ratio_bytes_max = max(RATIO_FREE_BYTES, self._ratio_max * self._coded_bytes)
        return min(self._decoded_bytes_max, ratio_bytes_max) - self.decoded_bytes

    def add_decoded(self, size: int) -> None:
        """Count `size` decoded bytes. Raises DecodeError if the body has too many now."""
        self.decoded_bytes += size
        if self.decoded_bytes > self._decoded_bytes_max:
            raise DecodeError(
                f"the body decodes to more than {self._decoded_bytes_max} bytes: its rest is not read"
            )
        if self.decoded_bytes > max(RATIO_FREE_BYTES, self._ratio_max * self._coded_bytes):
            raise DecodeError(
                f"the body decodes to more than {self._ratio_max} times its size: its rest is not read"
            )


class _Stage(Protocol):
    """Decoder of one coding."""

    window_bytes_max: int
    """Maximum size of the window, in which the library stores output for back references."""

    def decode(self, data: bytes, budget: DecodingBudget) -> Iterator[bytes]:
        """Yield the decoded bytes of `data` (at most _INPUT_BYTES), piece by piece."""
        ...


class Decoder:
    """Decoder of one Content-Encoding value, such as `gzip, br`. `decoded_bytes_max`: maximum size of the
    decoded body, including its inner layers. `ratio_max`: maximum ratio of decoded to coded bytes. Raises
    DecodeError for unknown or too many codings."""

    __slots__ = ("_budget", "_stages", "_window_bytes_max")

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
            raise DecodeError(
                f"the body has {len(names)} content codings, and at most {CODINGS_MAX} are allowed"
            )
        # RFC 9110 8.4: codings stand in the order in which they were applied, so decode the last one first.
        self._stages = [_stage_of(n) for n in reversed(names)]
        """Decoders of the codings, the outermost first."""
        self._window_bytes_max = sum(stage.window_bytes_max for stage in self._stages)
        """Largest memory of the decoders' windows."""
        self._budget = DecodingBudget(decoded_bytes_max, ratio_max)

    @property
    def identity(self) -> bool:
        """Whether the body has no content coding."""
        return not self._stages

    @property
    def kept_bytes(self) -> int:
        """Memory of the windows of all stages. A window grows with the output, up to its maximum size."""
        return min(self._window_bytes_max, self._budget.decoded_bytes)

    def feed(self, data: bytes) -> bytes:
        return b"".join(self.pieces(data)) if self._stages else data

    def pieces(self, data: bytes) -> Iterator[bytes]:
        """Yield the decoded bytes of `data` (up to 250 times its size) in pieces of about PIECE_BYTES.

        Some pieces are empty, so that the caller can do other work between long steps.
        """
        self._budget.add_coded(len(data))
        return self._decode(data, 0)

    def _decode(self, data: bytes, layer: int) -> Iterator[bytes]:
        """Decode data by one coding, and the result by the codings after it."""
        stage = self._stages[layer]
        inner = layer + 1
        for i in range(0, len(data), _INPUT_BYTES):
            pieces = stage.decode(data[i : i + _INPUT_BYTES], self._budget)
            if inner == len(self._stages):
                yield from pieces
            else:
                for piece in pieces:
                    yield from self._decode(piece, inner)
            if layer or i:
                yield b""


def _stage_of(name: bytes) -> _Stage:
    """Return a decoder for a content coding. Raises DecodeError if it is unknown."""
    if name in (b"gzip", b"x-gzip"):  # RFC 9110 8.4.1.3: both names mean the same coding
        return _Gzip()
    if name == b"deflate":
        return _Deflate()
    if name == b"br":
        return _Brotli()
    if name == b"zstd":
        return _Zstd()
    raise DecodeError("the body has an unknown content coding; expected gzip, deflate, br or zstd")


def inflate(inflater: "zlib._Decompress", data: bytes, budget: DecodingBudget) -> Iterator[bytes]:
    """Yield the decoded bytes of `data`, up to the end of a member. Raises zlib.error."""
    while True:
        piece = inflater.decompress(data, PIECE_BYTES)
        if piece:
            budget.add_decoded(len(piece))
            yield piece
        data = inflater.unconsumed_tail
        # After a full piece, more output can follow although all input is used.
        if inflater.eof or (not data and len(piece) < PIECE_BYTES):
            return


class _Gzip:
    """Decoder of `gzip`, member after member."""

    __slots__ = ("_has_ended", "_head", "_inflater")
    window_bytes_max = _DEFLATE_WINDOW_MAX

    def __init__(self) -> None:
        self._inflater: zlib._Decompress | None = zlib.decompressobj(31)
        self._head = b""
        """First bytes of a further gzip member, whose rest has not arrived."""
        self._has_ended = False
        """Whether other bytes follow the last member, which are ignored."""

    def decode(self, data: bytes, budget: DecodingBudget) -> Iterator[bytes]:
        while data and not self._has_ended:
            if self._inflater is None:
                data = self._head + data
                if len(data) < len(_GZIP_MAGIC):
                    self._head = data
                    return
                # Ignore bytes after a member that do not begin another member, as the program gzip does.
                if not data.startswith(_GZIP_MAGIC):
                    self._has_ended = True
                    return
                self._inflater, self._head = zlib.decompressobj(31), b""
            try:
                yield from inflate(self._inflater, data, budget)
            except zlib.error:
                raise DecodeError("the body is not valid gzip, as its Content-Encoding says") from None
            if not self._inflater.eof:
                return
            data = self._inflater.unused_data
            self._inflater = None


class _Deflate:
    """Decoder of `deflate`: the zlib format, or raw deflate, which some servers send under the same name."""

    __slots__ = ("_head", "_inflater")
    window_bytes_max = _DEFLATE_WINDOW_MAX

    def __init__(self) -> None:
        self._head = b""
        """First bytes, until they show which of both formats the body has."""
        self._inflater: zlib._Decompress | None = None

    def decode(self, data: bytes, budget: DecodingBudget) -> Iterator[bytes]:
        if self._inflater is None:
            self._head += data
            if len(self._head) < 2:
                return
            data = self._head
            # Some servers send deflate without the zlib header (RFC 9110 8.4.1.2). In a zlib header, the
            # method is 8, and the two bytes as one number are a multiple of 31 (RFC 1950 2.2).
            wrapped = data[0] & 0x0F == 8 and (data[0] << 8 | data[1]) % 31 == 0
            self._inflater = zlib.decompressobj(15 if wrapped else -15)
        if self._inflater.eof:
            return
        try:
            yield from inflate(self._inflater, data, budget)
        except zlib.error:
            raise DecodeError("the body is not valid deflate, as its Content-Encoding says") from None


class _Brotli:
    """Decoder of `br`."""

    __slots__ = ("_decompressor",)
    window_bytes_max = _BROTLI_WINDOW_MAX

    def __init__(self) -> None:
        self._decompressor = brotli.Decompressor()

    def decode(self, data: bytes, budget: DecodingBudget) -> Iterator[bytes]:
        decompressor = self._decompressor
        try:
            # In brotli 1.2, output can remain even if `can_accept_more_data`, so read until a piece is empty.
            while piece := decompressor.process(data, output_buffer_limit=PIECE_BYTES):
                budget.add_decoded(len(piece))
                yield piece
                if decompressor.is_finished():
                    return
                data = b""
        except brotli.error:
            raise DecodeError("the body is not valid brotli, as its Content-Encoding says") from None


class _Zstd:
    """Decoder of `zstd`, frame after frame.

    The library's `stream_writer` is not used: it keeps output if its buffer is full when the input ends.
    """

    __slots__ = ("_decompressor",)
    window_bytes_max = _ZSTD_WINDOW_MAX

    def __init__(self) -> None:
        library = zstandard.ZstdDecompressor(max_window_size=_ZSTD_WINDOW_MAX)
        self._decompressor = library.decompressobj(write_size=PIECE_BYTES, read_across_frames=True)

    def decode(self, data: bytes, budget: DecodingBudget) -> Iterator[bytes]:
        for i in range(0, len(data), _ZSTD_INPUT_BYTES):
            try:
                output = self._decompressor.decompress(data[i : i + _ZSTD_INPUT_BYTES])
            except zstandard.ZstdError:
                raise DecodeError("the body is not valid zstd with a window of at most 8 MiB") from None
            budget.add_decoded(len(output))
            for start in range(0, len(output), PIECE_BYTES):
                yield output[start : start + PIECE_BYTES]

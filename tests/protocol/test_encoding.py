"""Invariant: whatever the coding and however the bytes are cut, feed() gives the plain bytes back, or
DecodeError, and never holds more than the bounds allow."""

import tracemalloc
import zlib
from collections.abc import Callable
from itertools import pairwise

import brotli
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from llmtap.protocol.encoding import PIECE_BYTES, RATIO_FREE_BYTES, RATIO_MAX, DecodeError, Decoder

Coder = Callable[[bytes], bytes]


def gzip(data: bytes) -> bytes:
    c = zlib.compressobj(9, zlib.DEFLATED, 31)
    return c.compress(data) + c.flush()


def raw_deflate(data: bytes) -> bytes:
    c = zlib.compressobj(9, zlib.DEFLATED, -15)
    return c.compress(data) + c.flush()


CODERS: dict[str, tuple[bytes, Coder]] = {
    "gzip": (b"gzip", gzip),
    "x-gzip": (b"X-GZip", gzip),
    "deflate": (b"deflate", zlib.compress),
    "raw deflate": (b"deflate", raw_deflate),
    "br": (b"br", brotli.compress),
    "zstd": (b"zstd", zstandard.ZstdCompressor().compress),
    "gzip then br": (b"gzip, br", lambda d: brotli.compress(gzip(d))),
    "identity": (b"identity", bytes),
}


def decode_cut(encoding: bytes | None, coded: bytes, cuts: list[int]) -> bytes:
    decoder = Decoder(encoding)
    edges = [0, *sorted(c % (len(coded) + 1) for c in cuts), len(coded)]
    return b"".join(decoder.feed(coded[a:b]) for a, b in pairwise(edges))


@pytest.mark.parametrize("name", CODERS)
@given(data=st.binary(max_size=4000), cuts=st.lists(st.integers(0, 10_000), max_size=8))
def test_every_cut_gives_the_plain_bytes_back(name: str, data: bytes, cuts: list[int]) -> None:
    encoding, code = CODERS[name]
    assert decode_cut(encoding, code(data), cuts) == data


@pytest.mark.parametrize(
    "flushed",
    [
        ("gzip", zlib.compressobj(6, zlib.DEFLATED, 31), (zlib.Z_SYNC_FLUSH,)),
        ("br", brotli.Compressor(), ()),
        ("zstd", zstandard.ZstdCompressor().compressobj(), (zstandard.COMPRESSOBJ_FLUSH_BLOCK,)),
    ],
    ids=["gzip", "br", "zstd"],
)
def test_what_the_server_flushed_comes_out_at_that_read(flushed: tuple[str, object, tuple[int, ...]]) -> None:
    name, coder, how = flushed
    compress = coder.process if name == "br" else coder.compress  # type: ignore[attr-defined]
    decoder = Decoder(name.encode())
    for i in range(5):
        # The second is longer than a piece and takes many bytes.
        chunk = b"".join(b"data: %d\n\n" % (i * n) for n in range(1 if i != 1 else 20_000))
        assert decoder.feed(compress(chunk) + coder.flush(*how)) == chunk  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("encoding", "code"),
    [(b"gzip", gzip), (b"zstd", zstandard.ZstdCompressor().compress)],
    ids=["gzip", "zstd"],
)
def test_members_follow_each_other(encoding: bytes, code: Coder) -> None:
    coded = code(b"one ") + code(b"") + code(b"two")
    for cuts in ([], list(range(len(coded)))):
        assert decode_cut(encoding, coded, cuts) == b"one two"


@pytest.mark.parametrize(
    ("encoding", "coded"),
    [(b"gzip", gzip(b"body") + b"\0\0\0trailing"), (b"deflate", zlib.compress(b"body") + b"x")],
)
def test_other_bytes_behind_the_end_are_left_out(encoding: bytes, coded: bytes) -> None:
    decoder = Decoder(encoding)
    assert decoder.feed(coded) == b"body"
    assert decoder.feed(b"more") == b""


@pytest.mark.parametrize("cuts", [[], [30], list(range(100))], ids=["whole", "two reads", "byte by byte"])
@pytest.mark.parametrize(
    "member",
    [gzip(b"one ")[:-9] + b"\0" * 9, b"\x1f\x8b\x09\0", gzip(b"x")[:-1] + b"x"],
    ids=["content", "head", "length"],
)
def test_a_broken_member_behind_a_whole_one_is_an_error_in_any_cut(member: bytes, cuts: list[int]) -> None:
    with pytest.raises(DecodeError, match="not valid gzip"):
        decode_cut(b"gzip", gzip(b"one ") + member, cuts)


@pytest.mark.parametrize("cut", [0, 1])
def test_bytes_behind_a_brotli_stream_are_an_error(cut: int) -> None:
    decoder = Decoder(b"br")
    coded = brotli.compress(b"body")
    with pytest.raises(DecodeError, match="not valid brotli"):
        decoder.feed(coded + b"more"[:cut])
        decoder.feed(b"more"[cut:])


def test_nothing_stays_behind_in_the_library_when_all_input_is_used() -> None:
    # A raw stream has no trailer: its last bits may hold more output than one bounded call gives.
    for size in range(65_500, 66_600, 7):
        assert Decoder(b"deflate").feed(raw_deflate(b"\0" * size)) == b"\0" * size


@pytest.mark.parametrize("encoding", [b"gzip", b"deflate", b"br", b"zstd"])
def test_bytes_that_are_not_in_the_coding_are_an_error(encoding: bytes) -> None:
    with pytest.raises(DecodeError, match="not valid"):
        Decoder(encoding).feed(b"\xff\xfe" + b"plain text, no coding at all" * 20)


@pytest.mark.parametrize("encoding", [b"compress", b"gzip, gzip, gzip, gzip, gzip"])
def test_unknown_or_too_many_codings_are_refused(encoding: bytes) -> None:
    with pytest.raises(DecodeError, match="content coding"):
        Decoder(encoding)


BOMB = b"\0" * (64 << 20)
BOMBS = {
    "gzip": (b"gzip", gzip(BOMB)),
    "deflate": (b"deflate", zlib.compress(BOMB)),
    "br": (b"br", brotli.compress(BOMB, quality=1)),
    "zstd": (b"zstd", zstandard.ZstdCompressor().compress(BOMB)),
}


@pytest.mark.parametrize("name", BOMBS)
def test_a_bomb_is_refused_before_it_fills_the_memory(name: str) -> None:
    encoding, coded = BOMBS[name]
    tracemalloc.start()
    try:
        with pytest.raises(DecodeError, match="250 times its size"):
            Decoder(encoding).feed(coded)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 250 * len(coded) + (8 << 20)
    assert peak < len(BOMB) // 2


@pytest.mark.parametrize("name", BOMBS)
def test_the_absolute_bound_holds_without_a_ratio(name: str) -> None:
    encoding, coded = BOMBS[name]
    decoder = Decoder(encoding, decoded_bytes_max=3 << 20, ratio_max=1 << 30)
    with pytest.raises(DecodeError, match="more than 3145728 bytes"):
        decoder.feed(coded)


def test_a_high_ratio_within_the_first_bytes_is_fine() -> None:
    data = b"\0" * RATIO_FREE_BYTES
    assert Decoder(b"gzip").feed(gzip(data)) == data


def padded_gzip(data: bytes, ratio: int = 200) -> bytes:
    """gzip with empty stored blocks in between, so that this layer alone stays below the ratio."""
    c = zlib.compressobj(9, zlib.DEFLATED, -15)
    blocks = b"\x00\x00\x00\xff\xff" * (len(data) // ratio // 5) + c.compress(data) + c.flush()
    end = zlib.crc32(data).to_bytes(4, "little") + len(data).to_bytes(4, "little")
    return b"\x1f\x8b\x08\0\0\0\0\0\0\xff" + blocks + end


LAYERS: dict[str, tuple[bytes, Coder]] = {
    "gzip in gzip": (b"gzip, gzip", gzip),
    "gzip in br": (b"gzip, br", brotli.compress),
    "gzip in zstd": (b"gzip, zstd", zstandard.ZstdCompressor().compress),
    "gzip in gzip in gzip": (b"gzip, gzip, gzip", lambda d: gzip(padded_gzip(d))),
}


@pytest.mark.parametrize("name", LAYERS)
def test_the_ratio_is_bounded_from_end_to_end(name: str) -> None:
    encoding, code = LAYERS[name]
    inner = padded_gzip(b"{}," * 4_000_000)
    coded = code(inner)
    assert len(inner) * RATIO_MAX > 12_000_000, "the inner layer alone is within the ratio"
    decoded = 0
    with pytest.raises(DecodeError, match="250 times its size"):
        for piece in Decoder(encoding).pieces(coded):
            decoded += len(piece)
    assert decoded <= max(RATIO_FREE_BYTES, RATIO_MAX * len(coded))


@pytest.mark.parametrize("name", [name for name in CODERS if name != "identity"])
def test_the_output_comes_in_pieces_of_a_bounded_length(name: str) -> None:
    encoding, code = CODERS[name]
    data = b"".join(b"%d," % i for i in range(50_000))
    pieces = list(Decoder(encoding).pieces(code(data)))
    assert b"".join(pieces) == data
    assert max(map(len, pieces)) <= 2 * PIECE_BYTES, "the least output buffer of brotli is 32 KiB"


def test_a_caller_has_its_turn_while_an_inner_layer_yields_nothing() -> None:
    empty_members = gzip(b"") * (RATIO_FREE_BYTES // 20)
    steps = list(Decoder(b"gzip, gzip").pieces(gzip(empty_members)))
    assert len(steps) > len(empty_members) // PIECE_BYTES
    assert set(steps) == {b""}


def test_no_part_of_an_unknown_coding_is_in_the_error() -> None:
    with pytest.raises(DecodeError) as caught:
        Decoder(b"gzip, sk-0123456789abcdef0123456789abc")
    assert "sk-" not in str(caught.value)

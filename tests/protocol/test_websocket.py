"""Invariant: messages do not depend on how the bytes were cut, nor on how the messages were framed."""

import zlib
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmtap.protocol.websocket import (
    MessageParser,
    Opcode,
    WebSocketMessage,
    accept_key,
    frame,
    negotiates_deflate,
)

TEXT, BINARY, CLOSE, PING, PONG = Opcode.TEXT, Opcode.BINARY, Opcode.CLOSE, Opcode.PING, Opcode.PONG
KEY = b"\x37\xfa\x21\x3d"


def websocket_frame(
    code: int, payload: bytes, *, fin: bool = True, rsv1: bool = False, key: bytes = b""
) -> bytes:
    size = len(payload)
    length = bytes([size]) if size < 126 else b"\x7f" + size.to_bytes(8, "big")
    if 126 <= size <= 0xFFFF:
        length = b"\x7e" + size.to_bytes(2, "big")
    if key:
        length = bytes([length[0] | 0x80]) + length[1:]
        payload = bytes(c ^ key[i % 4] for i, c in enumerate(payload))
    return bytes([code | (0x80 if fin else 0) | (0x40 if rsv1 else 0)]) + length + key + payload


def parse(
    data: bytes, edges: list[int], *, masked: bool = False, limit: int = 1 << 20, deflates: bool = True
) -> tuple[list[WebSocketMessage], str | None]:
    parser = MessageParser("upstream", masked=masked, deflates=deflates, message_bytes_max=limit)
    cuts = [0, *sorted(e % (len(data) + 1) for e in edges), len(data)]
    out = [m for a, b in pairwise(cuts) for m in parser.feed(data[a:b])]
    return out, parser.broken


def payloads(data: bytes, limit: int = 1 << 20) -> list[tuple[Opcode, bytes | None]]:
    messages, broken = parse(data, [], limit=limit)
    assert broken is None
    assert parse(data, list(range(len(data))), limit=limit)[0] == messages
    return [(m.opcode, m.payload) for m in messages]


def test_the_examples_of_the_standard() -> None:
    """RFC 6455 5.7."""
    assert payloads(bytes.fromhex("810548656c6c6f")) == [(TEXT, b"Hello")]
    assert payloads(bytes.fromhex("010348656c 80026c6f")) == [(TEXT, b"Hello")]
    assert payloads(bytes.fromhex("890548656c6c6f")) == [(PING, b"Hello")]
    masked = bytes.fromhex("818537fa213d7f9f4d5158")
    assert parse(masked, [7, 9], masked=True)[0] == [WebSocketMessage(TEXT, 11, b"Hello")]


def test_the_examples_of_compression() -> None:
    """RFC 7692 7.2.3: plain, with the window kept, stored, with a final block, in two blocks."""
    hello, again = "c107f248cdc9c90700", "c105f200110000"
    assert payloads(bytes.fromhex(hello + again)) == [(TEXT, b"Hello")] * 2
    assert payloads(bytes.fromhex("4103f248cd 8004c9c90700")) == [(TEXT, b"Hello")]
    assert payloads(bytes.fromhex("c10b000500faff48656c6c6f00")) == [(TEXT, b"Hello")]
    assert payloads(bytes.fromhex("c108f348cdc9c9070000" + hello)) == [(TEXT, b"Hello")] * 2
    assert payloads(bytes.fromhex("c10df248050000 00ffffcac9c90700")) == [(TEXT, b"Hello")]


VECTORS = [
    # RFC 6455 5.2: the minimal number of bytes must be used for the length.
    ("5.2 length 5 in 16 bits", "817e000548656c6c6f", False, [], False),
    ("5.2 length 125 in 16 bits", "817e007d" + "78" * 125, False, [], False),
    ("5.2 length 126 in 16 bits", "817e007e" + "78" * 126, False, [b"x" * 126], True),
    ("5.2 length 126 in 64 bits", "817f000000000000007e" + "78" * 126, False, [], False),
    ("5.2 length 65,535 in 64 bits", "817f000000000000ffff", False, [], False),
    ("5.2 length 65,536 in 64 bits", "817f0000000000010000" + "78" * 65536, False, [b"x" * 65536], True),
    ("5.2 most significant bit of the length", "817f8000000000000000", False, [], False),
    # RFC 6455 5.2: RSV bits must be 0 unless an extension is negotiated that defines them.
    ("5.2 RSV1, nothing negotiated", "c105f200110000", False, [], False),
    ("5.2 RSV2", "a10548656c6c6f", True, [], False),
    ("5.2 RSV3", "910548656c6c6f", True, [], False),
    ("5.2 reserved opcode 3", "830548656c6c6f", True, [], False),
    ("5.2 reserved opcode 11", "8b0548656c6c6f", True, [], False),
    # RFC 6455 5.4 and 5.5: fragments, control frames.
    ("5.4 control frame between fragments", "010348656c 8900 80026c6f", False, [b"", b"Hello"], True),
    ("5.4 continuation of nothing", "80026c6f", False, [], False),
    ("5.4 message inside another", "010348656c 810548656c6c6f", False, [], False),
    ("5.5 fragmented control frame", "090548656c6c6f", False, [], False),
    ("5.5 control frame of 126 bytes", "897e007e" + "78" * 126, False, [], False),
    # RFC 7692 6 and 7.2.3: compressed messages.
    ("7692 7.2.3.1 one block", "c107f248cdc9c90700", True, [b"Hello"], True),
    ("7692 7.2.3.1 fragments", "4103f248cd 8004c9c90700", True, [b"Hello"], True),
    ("7692 7.2.3.2 window kept", "c107f248cdc9c90700 c105f200110000", True, [b"Hello"] * 2, True),
    ("7692 7.2.3.3 stored block", "c10b000500faff48656c6c6f00", True, [b"Hello"], True),
    ("7692 7.2.3.4 BFINAL", "c108f348cdc9c9070000", True, [b"Hello"], True),
    ("7692 7.2.2 BFINAL, window kept", "c108f348cdc9c9070000 c105f200110000", True, [b"Hello"] * 2, True),
    ("7692 7.2.3.5 two blocks", "c10df24805000000ffffcac9c90700", True, [b"Hello"], True),
    ("7692 6.1 RSV1 on a continuation", "4103f248cd c004c9c90700", True, [], False),
    ("7692 6.1 compressed control frame", "c90548656c6c6f", True, [], False),
    ("7692 6 plain message as well", "810548656c6c6f c107f248cdc9c90700", True, [b"Hello"] * 2, True),
]
"""Clause and case, bytes, whether permessage-deflate is negotiated, payloads, whether all is understood."""


@pytest.mark.parametrize(
    ("data", "deflates", "found", "understood"), [v[1:] for v in VECTORS], ids=[v[0] for v in VECTORS]
)
def test_the_clauses_of_the_standards(
    data: str, deflates: bool, found: list[bytes], understood: bool
) -> None:
    for edges in ([], list(range(40))):
        messages, broken = parse(bytes.fromhex(data), edges, deflates=deflates)
        assert [m.payload for m in messages] == found
        assert (broken is None) is understood


@pytest.mark.parametrize(
    ("values", "deflates"),
    [
        ([], False),
        ([b"permessage-deflate"], True),
        ([b"x-other", b"foo, Permessage-Deflate; server_no_context_takeover"], True),
        ([b"permessage-deflate2"], False),
        ([b"foo; permessage-deflate"], False),
    ],
)
def test_an_extension_is_negotiated_by_its_name(values: list[bytes], deflates: bool) -> None:
    assert negotiates_deflate(values) is deflates


def test_final_blocks_of_a_message_are_limited() -> None:
    blocks = lambda n: websocket_frame(TEXT, b"\x03\x00" * n + b"\x00", rsv1=True)  # noqa: E731
    assert payloads(blocks(16)) == [(TEXT, b"")]
    assert payloads(blocks(100_000)) == [(TEXT, None)]


messages = st.lists(st.tuples(st.binary(max_size=300), st.integers(1, 4), st.booleans()), max_size=6)


@given(messages, st.booleans(), st.booleans(), st.lists(st.integers(0, 4_000), max_size=8))
def test_every_cut_and_framing_gives_the_same_messages(
    sent: list[tuple[bytes, int, bool]], masked: bool, compressed: bool, edges: list[int]
) -> None:
    deflater = zlib.compressobj(wbits=-15)
    key = KEY if masked else b""
    data = b""
    for payload, parts, pinged in sent:
        coded = payload
        if compressed:
            coded = deflater.compress(payload) + deflater.flush(zlib.Z_SYNC_FLUSH)
            coded = coded.removesuffix(b"\x00\x00\xff\xff")
        step = -(-len(coded) // parts) or 1
        pieces = [coded[i : i + step] for i in range(0, len(coded), step)] or [b""]
        for i, part in enumerate(pieces):
            first, last = i == 0, i == len(pieces) - 1
            data += websocket_frame(TEXT if first else 0, part, fin=last, rsv1=compressed and first, key=key)
            if pinged and not last:
                data += websocket_frame(PING, b"?", key=key)
    found, broken = parse(data, edges, masked=masked)
    assert [m.payload for m in found if m.opcode is TEXT] == [payload for payload, _, _ in sent]
    assert (broken, found) == (None, parse(data, [], masked=masked)[0])


def test_a_message_that_is_too_long_comes_without_its_payload() -> None:
    data = (
        websocket_frame(TEXT, b"x" * 40, fin=False)
        + websocket_frame(0, b"y" * 40)
        + websocket_frame(TEXT, b"ok")
    )
    assert payloads(data, limit=60) == [(TEXT, None), (TEXT, b"ok")]
    assert [m.size for m in parse(data, [], limit=60)[0]] == [84, 4]


def deflated(*texts: bytes, keep: bool) -> list[bytes]:
    """Compressed frames, with one window for all or a new one for each."""
    deflater, out = zlib.compressobj(wbits=-15), []
    for text in texts:
        coded = deflater.compress(text) + deflater.flush(zlib.Z_SYNC_FLUSH)
        out.append(websocket_frame(TEXT, coded.removesuffix(b"\x00\x00\xff\xff"), rsv1=True))
        if not keep:
            deflater = zlib.compressobj(wbits=-15)
    return out


def test_a_compressed_message_that_grows_too_long_is_given_up() -> None:
    long, text = b"z" * 5_000_000, b"a text that is like no other text"
    for keep in (True, False):
        first, second, third = deflated(text, long, text, keep=keep)
        assert payloads(first + second, limit=1_000) == [(TEXT, text), (TEXT, None)]
        after = payloads(first + second + third, limit=1_000)[2]
        assert after[1] in ((None, text) if keep else (text,)), "never anything wrong"


def test_what_is_no_deflate_is_given_up_and_the_next_is_read() -> None:
    (good,) = deflated(b"hello", keep=False)
    data = websocket_frame(TEXT, b"\xff\xff\xff", rsv1=True) + websocket_frame(TEXT, b"plain") + good
    assert payloads(data) == [(TEXT, None), (TEXT, b"plain"), (TEXT, b"hello")]


@pytest.mark.parametrize(
    "data",
    [
        b"down",
        b"HTTP/1.1",
        bytes([0x83, 0]),
        bytes([0xA1, 0]),
        websocket_frame(TEXT, b"a", key=KEY),
        websocket_frame(PING, b"", fin=False),
        websocket_frame(PING, b"x" * 126),
        websocket_frame(PONG, b"", rsv1=True),
        websocket_frame(0, b"a"),
        websocket_frame(TEXT, b"a", fin=False) + websocket_frame(TEXT, b"b"),
        websocket_frame(TEXT, b"a", fin=False) + websocket_frame(0, b"b", rsv1=True),
        b"\x81\x7f" + b"\xff" * 8,
    ],
)
def test_what_is_no_frame_ends_it(data: bytes) -> None:
    whole = websocket_frame(TEXT, b"before") + data + websocket_frame(TEXT, b"behind")
    for edges in ([], list(range(99))):
        found, broken = parse(whole, edges)
        assert [m.payload for m in found] == [b"before"]
        assert broken is not None and broken.startswith("upstream sent ")
    assert parse(websocket_frame(TEXT, b"a"), [], masked=True)[1] is not None


@given(st.binary(max_size=80), st.lists(st.integers(0, 80), max_size=4), st.booleans())
def test_no_bytes_raise(data: bytes, edges: list[int], masked: bool) -> None:
    assert parse(data, edges, masked=masked, limit=20) == parse(data, [], masked=masked, limit=20)


def test_memory_is_bounded_by_the_limit() -> None:
    parser = MessageParser("upstream", masked=False, message_bytes_max=1_000)
    parser.feed(b"\x81\x7f" + (1 << 40).to_bytes(8, "big"))
    for _ in range(50):
        assert parser.feed(b"x" * 100_000) == []
    assert sum(len(part) for part in parser._parts.values()) <= 1_000


@pytest.mark.parametrize("size", [0, 125, 126, 65_535, 65_536])
@pytest.mark.parametrize("key", [b"", b"\x01\x80\xff\x00"])
def test_every_length_is_read_back(size: int, key: bytes) -> None:
    payload = bytes(i * 7 % 256 for i in range(size))
    written = frame(payload, key=key)
    parser = MessageParser("peer", masked=bool(key))
    (message,) = parser.feed(written)
    assert (message.opcode, message.payload, message.size) == (Opcode.TEXT, payload, len(written))
    assert parser.broken is None


def test_written_frames_are_those_of_the_standard() -> None:
    """RFC 6455 5.7 and 1.3."""
    assert frame(b"Hello") == bytes.fromhex("810548656c6c6f")
    assert frame(b"Hello", key=bytes.fromhex("37fa213d")) == bytes.fromhex("818537fa213d7f9f4d5158")
    assert frame(b"Hello", Opcode.PING) == bytes.fromhex("890548656c6c6f")
    assert accept_key(b"dGhlIHNhbXBsZSBub25jZQ==") == b"s3pPLMBiTxaQ9kYGzzhZRbK+xOo="

"""A frame that is written is read back as the message it was, by the reader of measured copies."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmtap.protocol.websocket import MessageParser, Opcode, accept_key, frame


@pytest.mark.parametrize("size", [0, 1, 125, 126, 127, 65_535, 65_536, 70_001])
@pytest.mark.parametrize("key", [b"", b"\x01\x80\xff\x00"])
def test_every_length_is_read_back(size: int, key: bytes) -> None:
    payload = bytes(i * 7 % 256 for i in range(size))
    written = frame(payload, key=key)
    parser = MessageParser("peer", masked=bool(key))
    (message,) = parser.feed(written)
    assert (message.opcode, message.payload, message.size) == (Opcode.TEXT, payload, len(written))
    assert parser.broken is None


@given(st.binary(max_size=300), st.binary(min_size=4, max_size=4), st.sampled_from(sorted(Opcode)[1:3]))
def test_masking_undoes_itself(payload: bytes, key: bytes, opcode: Opcode) -> None:
    (message,) = MessageParser("client", masked=True).feed(frame(payload, opcode, key=key))
    assert (message.opcode, message.payload) == (opcode, payload)


def test_the_examples_of_the_rfc() -> None:
    """RFC 6455 5.7 and 1.3."""
    assert frame(b"Hello") == bytes.fromhex("810548656c6c6f")
    assert frame(b"Hello", key=bytes.fromhex("37fa213d")) == bytes.fromhex("818537fa213d7f9f4d5158")
    assert frame(b"Hello", Opcode.PING) == bytes.fromhex("890548656c6c6f")
    assert frame(bytes(256), Opcode.BINARY)[:4] == bytes.fromhex("827e0100")
    assert frame(bytes(65_536), Opcode.BINARY)[:10] == bytes.fromhex("827f0000000000010000")
    assert accept_key(b"dGhlIHNhbXBsZSBub25jZQ==") == b"s3pPLMBiTxaQ9kYGzzhZRbK+xOo="

"""One WebSocket frame as bytes, and the two lines of the opening handshake that depend on each other.

Source: RFC 6455 sections 4.2.2 and 5.2.
"""

import base64
import hashlib
import struct
from typing import Final

from llmtap.protocol.websocket import Opcode

__all__ = ["accept_key", "frame"]

_FIN: Final = 0x80
_MASKED: Final = 0x80
_GUID: Final = b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11"
"""RFC 6455 1.3."""


def frame(payload: bytes, opcode: Opcode = Opcode.TEXT, *, key: bytes = b"") -> bytes:
    """A whole message in one frame. A client has to mask, with four bytes that nobody can foretell; a server
    must not, and has no key."""
    size, mask = len(payload), _MASKED if key else 0
    first = _FIN | opcode
    if size < 126:
        head = struct.pack("!BB", first, mask | size)
    elif size < 1 << 16:
        head = struct.pack("!BBH", first, mask | 126, size)
    else:
        head = struct.pack("!BBQ", first, mask | 127, size)
    if not key:
        return head + payload
    # RFC 6455 5.3: each byte XOR the one of the key at its place, modulo 4.
    keys = (key * (size // 4 + 1))[:size]
    masked = int.from_bytes(payload, "big") ^ int.from_bytes(keys, "big")
    return head + key + masked.to_bytes(size, "big")


def accept_key(key: bytes) -> bytes:
    """What the server's Sec-WebSocket-Accept has to say to a Sec-WebSocket-Key."""
    return base64.b64encode(hashlib.sha1(key + _GUID, usedforsecurity=False).digest())

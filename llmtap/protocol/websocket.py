"""Parse WebSocket messages from bytes that are cut at any place, and make frames to send. No IO.

`MessageParser` reads measured copies and the answers to the load generator: it sends nothing, and checks only
the framing. Compressed messages are inflated, up to a bound, if permessage-deflate was negotiated
(`negotiates_deflate`); otherwise they are an error. `frame` makes the messages that the load generator and
the simulated server send. `accept_key` returns the value for the handshake of a server.

Source: RFC 6455 sections 4.2.2 and 5; RFC 7692 section 7.2.2.
"""

import base64
import hashlib
import re
import struct
import zlib
from collections.abc import Iterable
from enum import IntEnum
from typing import Final

import msgspec

from llmtap.errors import PeerProtocolError
from llmtap.protocol.encoding import DecodingBudget
from llmtap.protocol.sse import EVENT_BYTES_MAX


class Opcode(IntEnum):
    """Kinds of frames. RFC 6455 5.2 reserves all other opcodes."""

    CONTINUATION = 0
    TEXT = 1
    BINARY = 2
    CLOSE = 8
    PING = 9
    PONG = 10


class WebSocketMessage(msgspec.Struct, gc=False):
    """One message, or one control frame."""

    opcode: Opcode
    size: int
    """Number of bytes of all its frames, heads included."""
    payload: bytes | None
    """Payload of the message; None if it was too long or could not be inflated."""


_FIN: Final = 0x80
_RSV1: Final = 0x40
_RSV23: Final = 0x30
_MASKED: Final = 0x80
_CONTROL: Final = 0x08
_CONTROL_BYTES_MAX: Final = 125
_OPCODES: Final = frozenset(Opcode)
_match_zeros: Final = re.compile(rb"\x00+").match
_FLUSHED: Final = b"\x00\x00\xff\xff"
"""Bytes that the sender omits at the end of each compressed message (RFC 7692 7.2.1)."""
_WINDOW_BYTES: Final = 1 << 15
_FINAL_BLOCKS_MAX: Final = 16
"""Maximum number of final deflate blocks in one message, which take 20 us each. Known senders use 0 or 1."""
_TEXTS_MAX: Final = 64
_EXTENSION: Final = b"permessage-deflate"


class MessageParser:
    """Splits one direction of a tunnel into messages; any cut of the bytes gives the same messages. `sender`:
    name of the sender in errors. `masked`: the sender is a client, so its frames are masked. `deflates`:
    permessage-deflate was negotiated. Payloads of more than `message_bytes_max` bytes are dropped."""

    __slots__ = (
        "_head",
        "_inflater",
        "_is_compressed",
        "_is_final",
        "_mask_key",
        "_masked",
        "_message_bytes_max",
        "_message_opcode",
        "_opcode",
        "_parts",
        "_payload_left",
        "_payload_taken",
        "_sender",
        "_sizes",
        "_too_long",
        "broken",
    )

    def __init__(
        self, sender: str, *, masked: bool, deflates: bool = False, message_bytes_max: int = EVENT_BYTES_MAX
    ) -> None:
        self.broken: str | None = None
        """Error in the framing after which no more messages are read; None if there was no error."""
        self._sender = sender
        """Name of the sender, for error messages."""
        self._masked = masked
        """Whether frames must be masked, as those of clients are."""
        self._message_bytes_max = message_bytes_max
        # State of the frame that is being read.
        self._head = bytearray()
        self._payload_left = -1  # Remaining bytes of the payload; -1 while the head is incomplete.
        self._payload_taken = 0  # Bytes of the payload read so far.
        self._is_final = False
        """Whether the frame is the last one of its message."""
        self._opcode = Opcode.CONTINUATION
        """Opcode of the present frame."""
        self._mask_key = b""
        """Key of the frame's mask; empty without a mask."""
        # State of the message that is being read, and of a control frame, which can interrupt the message.
        self._message_opcode: Opcode | None = None
        """Opcode of the message whose frames arrive; None between messages."""
        self._is_compressed = False
        # `_parts` and `_sizes` have the key True for the control frame, and False for the message.
        self._parts: dict[bool, bytearray] = {False: bytearray(), True: bytearray()}
        self._sizes: dict[bool, int] = {False: 0, True: 0}
        self._too_long = False
        """Whether the message is longer than allowed, so its content is dropped."""
        self._inflater = _Inflater() if deflates else None

    @property
    def kept_bytes(self) -> int:
        """Memory of the unfinished message, and of the window of compressed messages."""
        kept_bytes = len(self._parts[False])
        return kept_bytes if self._inflater is None else kept_bytes + self._inflater.kept_bytes

    def drop(self) -> None:
        """Release the memory of the unfinished message, which is then returned without its payload."""
        self._too_long = self._message_opcode is not None
        self._parts[False].clear()

    def feed(self, data: bytes) -> list[WebSocketMessage]:
        """Return the messages that these bytes complete. An error sets `broken` and raises nothing."""
        out: list[WebSocketMessage] = []
        at = 0
        try:
            while at < len(data) and self.broken is None:
                if self._payload_left < 0:
                    if self._message_opcode is not None and not (self._masked or self._head):
                        at = self._skip_empty(data, at)
                    at = self._read_head(data, at)
                else:
                    part = data[at : at + self._payload_left]
                    at += len(part)
                    self._add_payload(part)
                if self._payload_left == 0:
                    self._end_frame(out)
        except PeerProtocolError as exc:
            self.broken = str(exc)
        return out

    def _error(self, what: str) -> PeerProtocolError:
        return PeerProtocolError(f"{self._sender} sent {what}")

    def _skip_empty(self, data: bytes, at: int) -> int:
        """Skip empty continuation frames (two zero bytes each) together, and return the offset after them. A
        million of these frames would take too long one by one."""
        zeros = _match_zeros(data, at)
        size = 0 if zeros is None else (zeros.end() - at) & ~1
        self._sizes[False] += size
        return at + size

    def _read_head(self, data: bytes, at: int) -> int:
        """Read a frame's head, which can arrive in parts. Return the offset after it."""
        head = self._head
        while True:
            needed = 2
            if len(head) >= 2:
                short = head[1] & 0x7F
                needed += {126: 2, 127: 8}.get(short, 0) + (4 if head[1] & _MASKED else 0)
            missing = needed - len(head)
            if missing == 0 and len(head) > 1:
                break
            part = data[at : at + missing]
            head += part
            at += len(part)
            if len(part) < missing:
                return at
        self._begin_frame(bytes(head))
        head.clear()
        return at

    def _begin_frame(self, head: bytes) -> None:
        first, second = head[0], head[1]
        code = first & 0x0F
        if first & _RSV23 or code not in _OPCODES or (first & _RSV1 and self._inflater is None):
            problem = "a WebSocket frame with reserved bits or an unknown opcode (RFC 6455 5.2)"
            raise self._error(f"{problem}: its first byte is 0x{first:02x}")
        if bool(second & _MASKED) is not self._masked:
            raise self._error(
                f"{'an unmasked' if self._masked else 'a masked'} WebSocket frame: only clients must mask"
                " (RFC 6455 5.1)"
            )
        end = len(head) - (4 if self._masked else 0)
        length = int.from_bytes(head[2:end], "big") if end > 2 else second & 0x7F
        opcode, fin = Opcode(code), bool(first & _FIN)
        control = bool(code & _CONTROL)
        if control and not fin:
            raise self._error("a fragmented WebSocket control frame, expected a whole one (RFC 6455 5.5)")
        if control and length > _CONTROL_BYTES_MAX:
            raise self._error(
                f"a WebSocket control frame of more than {_CONTROL_BYTES_MAX} bytes, the maximum"
            )
        if control and first & _RSV1:
            raise self._error("a WebSocket control frame that must not be compressed (RFC 7692 6.1)")
        if length >> 63:
            raise self._error("a WebSocket frame with a length above 63 bits, the maximum (RFC 6455 5.2)")
        if (end == 4 and length < 126) or (end == 10 and length < 1 << 16):
            raise self._error("a WebSocket frame with a length that must be shorter (RFC 6455 5.2)")
        if not control:
            continues = opcode is Opcode.CONTINUATION
            if continues is (self._message_opcode is None):
                what = "continuation without a message" if continues else "message in the middle of another"
                raise self._error(f"a WebSocket {what} (RFC 6455 5.4)")
            if continues and first & _RSV1:
                raise self._error(
                    "a continuation frame with RSV1, only allowed in a first frame (RFC 7692 6.1)"
                )
            if not continues:
                self._message_opcode, self._is_compressed = opcode, bool(first & _RSV1)
        self._opcode, self._is_final, self._mask_key = opcode, fin, head[end:]
        self._payload_left, self._payload_taken = length, 0
        self._sizes[control] += len(head)

    def _add_payload(self, part: bytes) -> None:
        """Add a part of a frame's payload to its message."""
        control = bool(self._opcode & _CONTROL)
        self._payload_left -= len(part)
        self._sizes[control] += len(part)
        kept = self._parts[control]
        if not control and (self._too_long or len(kept) + len(part) > self._message_bytes_max):
            self._too_long = True
            kept.clear()
        else:
            kept += _unmask(part, self._mask_key, self._payload_taken) if self._mask_key else part
        self._payload_taken += len(part)

    def _end_frame(self, out: list[WebSocketMessage]) -> None:
        self._payload_left = -1
        control = bool(self._opcode & _CONTROL)
        if not (self._is_final or control):
            return
        payload: bytes | None = bytes(self._parts[control])
        opcode = self._opcode
        if not control and self._message_opcode is not None:
            opcode = self._message_opcode
            if self._too_long:
                payload = None
            if self._is_compressed and self._inflater is not None:
                payload = self._inflater.inflate_message(payload, self._message_bytes_max)
            self._message_opcode, self._too_long = None, False
        out.append(WebSocketMessage(opcode, self._sizes[control], payload))
        self._parts[control].clear()
        self._sizes[control] = 0


class _Inflater:
    """Inflates the messages of one direction, which have one window and one budget in common."""

    __slots__ = ("_budget", "_history", "_history_bytes", "_inflater")

    def __init__(self) -> None:
        # A session can last for days, so limit only the ratio, not the total size.
        self._budget = DecodingBudget(decoded_bytes_max=1 << 62)
        self._history: list[bytes] = []
        """Latest decoded texts, which later messages can refer to."""
        self._history_bytes = 0
        """Size of `_history`."""
        self._inflater = zlib.decompressobj(-zlib.MAX_WBITS)

    @property
    def kept_bytes(self) -> int:
        return self._history_bytes + min(self._budget.decoded_bytes, _WINDOW_BYTES)

    def inflate_message(self, payload: bytes | None, bytes_max: int) -> bytes | None:
        """Return the inflated payload of a message; None if the payload was dropped (None), is invalid, or is
        too long. Then the window is emptied, so later messages that refer to it fail, too."""
        text = None
        if payload is not None:
            self._budget.add_coded(len(payload))
            try:
                text = self._inflate(payload + _FLUSHED, max(0, min(bytes_max, self._budget.bytes_left)))
            except zlib.error:
                pass
        if text is None:
            self._reset()
        else:
            self._add_to_window(text)
        return text

    def _inflate(self, data: bytes, bytes_max: int) -> bytes | None:
        """Return the decompressed data; None: too many bytes or final blocks."""
        pieces: list[bytes] = []
        left = bytes_max
        for _ in range(_FINAL_BLOCKS_MAX + 1):
            piece = self._inflater.decompress(data, left + 1)
            left -= len(piece)
            pieces.append(piece)
            self._budget.decoded_bytes += len(piece)
            if left < 0 or self._inflater.unconsumed_tail:
                return None
            if not self._inflater.eof:
                return b"".join(pieces)
            # The final block of a deflate stream does not end the message (RFC 7692 7.2.3.4), and the window
            # must continue (7.2.2). The library drops its window here, so begin a new stream with the last
            # output as the window.
            data = self._inflater.unused_data
            window = b"".join([*self._history, *pieces])[-_WINDOW_BYTES:]
            self._inflater = zlib.decompressobj(-zlib.MAX_WBITS, zdict=window)
        return None

    def _add_to_window(self, text: bytes) -> None:
        """Store the last bytes of this direction, as pieces: joining them every time would take long."""
        text = text[-_WINDOW_BYTES:]
        self._history.append(text)
        self._history_bytes += len(text)
        if len(self._history) > _TEXTS_MAX:
            self._history = [b"".join(self._history)[-_WINDOW_BYTES:]]
            self._history_bytes = len(self._history[0])

    def _reset(self) -> None:
        self._inflater = zlib.decompressobj(-zlib.MAX_WBITS)
        self._history.clear()
        self._history_bytes = 0


def negotiates_deflate(values: Iterable[bytes]) -> bool:
    """Return whether these values of Sec-WebSocket-Extensions name permessage-deflate (RFC 7692 7)."""
    names = (one.partition(b";")[0].strip().lower() for value in values for one in value.split(b","))
    return _EXTENSION in names


def _unmask(part: bytes, key: bytes, taken: int) -> bytes:
    """Mask or unmask a part of a payload: each byte XOR one byte of the key in turn (RFC 6455 5.3). `taken`:
    number of bytes of the payload before this part."""
    size = len(part)
    turn = taken % 4
    keys = (key[turn:] + key[:turn]) * (size // 4 + 1)
    mixed = int.from_bytes(part, "big") ^ int.from_bytes(keys[:size], "big")
    return mixed.to_bytes(size, "big")


_GUID: Final = b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11"
"""Constant of RFC 6455 1.3: a server appends it to the client's key and returns the hash of both."""


def frame(payload: bytes, opcode: Opcode = Opcode.TEXT, *, key: bytes = b"") -> bytes:
    """Return a message as one frame. A client must mask it with an unpredictable `key` of four bytes (RFC
    6455 5.3). A server must not mask it, and passes no key."""
    size, mask = len(payload), _MASKED if key else 0
    first = _FIN | opcode
    if size < 126:
        head = struct.pack("!BB", first, mask | size)
    elif size < 1 << 16:
        head = struct.pack("!BBH", first, mask | 126, size)
    else:
        head = struct.pack("!BBQ", first, mask | 127, size)
    return head + key + (_unmask(payload, key, 0) if key else payload)


def accept_key(key: bytes) -> bytes:
    """Return the Sec-WebSocket-Accept with which a server answers a Sec-WebSocket-Key (RFC 6455 4.2.2)."""
    return base64.b64encode(hashlib.sha1(key + _GUID, usedforsecurity=False).digest())

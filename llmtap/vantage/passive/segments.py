"""TCP of captured packets, without IO: parse the headers, and put the segments of one direction in order.

`network_offset` finds the IP header in a link-layer frame, `parse_segment` the TCP segment; checksums are not
checked. `TcpDirection` keeps early segments, within bounds, until the bytes before them arrive. Bytes that
arrive twice are returned once. It raises LostSyncError if there are more early bytes than the bounds allow,
and if two copies of the same bytes differ, because it is unknown which copy the receiver got. Copies are
compared only with the latest piece that was returned.

Source: RFC 791, RFC 8200, RFC 9293; link types: tcpdump.org/linktypes.html.
"""

import struct
from dataclasses import dataclass
from heapq import heappop, heappush
from mmap import mmap
from typing import Final

from llmtap.errors import LlmtapError

FIN: Final = 0x01
SYN: Final = 0x02
RST: Final = 0x04
ACK: Final = 0x10
CUT_OFF: Final = 0x100
"""Flag, added to TCP's flags, of a segment whose payload is incomplete: the capture has only the beginning of
each packet (snapshot length)."""

Segment = tuple[bytes, int, int, int, int, int, int]
"""`(flow, seq, ack, flags, window, start, stop)`.

flow: addresses and ports as in the packet, source first: 12 or 36 bytes, one value for each direction.
start, stop: position of the payload in the buffer.
"""

# Fields of the IP header: version, total length, fragment, protocol, addresses. Fields of the TCP header:
# ports, seq, ack, data offset, flags, window.
_V4: Final = struct.Struct("!BxHxxHxBxx12sIIBBH")
_V6: Final = struct.Struct("!BxxxHBx36sIIBBH")
_TCP: Final = struct.Struct("!4sIIBBH")
_EXTENSION: Final = struct.Struct("!BB")
_ETHERTYPE: Final = struct.Struct("!H")
_TCP_PROTOCOL: Final = 6
_EXTENSIONS: Final = frozenset({0, 43, 60})
"""Types of IPv6 extension headers that can precede TCP: hop-by-hop options, routing, destination options.
Fragments (44) are not reassembled, so their packets are ignored."""
_EXTENSIONS_MAX: Final = 4
_VLAN: Final = frozenset({0x8100, 0x88A8, 0x9100})
_IP: Final = frozenset({0x0800, 0x86DD})
_RAW_LINKS: Final = frozenset({12, 14, 101, 228, 229})  # link types whose packets begin with the IP header
_ETHERTYPE_OFFSET: Final = {1: 12, 113: 14}
"""By link type (Ethernet, Linux cooked capture): offset of the EtherType."""


def parse_segment(buf: bytes | mmap, at: int, end: int) -> Segment | None:
    """Return the TCP segment of the IP packet at `at`; None for anything else, a fragment or a cut header."""
    if end - at < 40:
        return None
    first, total, fragment, protocol, flow, seq, ack, offset, flags, window = _V4.unpack_from(buf, at)
    if first >> 4 == 4:
        direct, tcp, addresses = at + 20, at + (first & 15) * 4, 8
        if fragment & 0x3FFF or tcp < direct:
            return None
    elif first >> 4 == 6 and end - at >= 60:
        _, length, protocol, flow, seq, ack, offset, flags, window = _V6.unpack_from(buf, at)
        total = length + 40 if length else 0
        direct = tcp = at + 40
        addresses, extensions = 32, 0
        while protocol in _EXTENSIONS and extensions < _EXTENSIONS_MAX and end - tcp >= 28:
            protocol, size = _EXTENSION.unpack_from(buf, tcp)
            tcp += 8 * (size + 1)
            extensions += 1
    else:
        return None
    if protocol != _TCP_PROTOCOL or end - tcp < 20:
        return None
    if tcp != direct:  # IP options or extension headers precede the TCP header, so read it where it is
        ports, seq, ack, offset, flags, window = _TCP.unpack_from(buf, tcp)
        flow = flow[:addresses] + ports
    if offset < 0x50:
        return None
    start = tcp + (offset >> 4) * 4
    # A total length of 0 means more than 64 KiB (BIG TCP): the packet ends with the captured bytes. In other
    # packets, bytes after the total length are padding of the link layer.
    stop = at + total if total else end
    if stop > end:
        flags |= CUT_OFF
        stop = end
    return flow, seq, ack, flags, window, start, max(start, stop)


def network_offset(link: int, frame: bytes) -> int:
    """Return the offset of the IP header in a frame of this link type; -1 if the frame is no IP packet."""
    if link in _RAW_LINKS:
        return 0
    if link in (0, 108):  # BSD loopback
        return 4
    if link == 276:  # Linux cooked, version 2
        return 20 if _ETHERTYPE.unpack_from(frame.ljust(2, b"\0"))[0] in _IP else -1
    at = _ETHERTYPE_OFFSET.get(link, -1)
    while 0 <= at <= len(frame) - 2:
        (kind,) = _ETHERTYPE.unpack_from(frame, at)
        if kind not in _VLAN:
            return at + 2 if kind in _IP else -1
        at += 4
    return -1


def reverse_flow(flow: bytes) -> bytes:
    """Return the flow of the other direction."""
    n = (len(flow) - 4) // 2
    return flow[n : 2 * n] + flow[:n] + flow[-2:] + flow[-4:-2]


EARLY_SEGMENTS_MAX: Final = 1_024
EARLY_BYTES_MAX: Final = 1 << 20
"""Limits of early segments in one direction: several times as much as is in flight on a fast connection in a
cluster."""
HALF: Final = 1 << 31
MASK: Final = 0xFFFFFFFF


class LostSyncError(LlmtapError):
    """The bytes cannot be put in order. `reason`: name under which the dropped exchanges are counted."""

    def __init__(self, reason: str) -> None:
        super().__init__(f"the bytes of a TCP connection cannot be put in order: {reason}")
        self.reason = reason
        """Reason, by which dropped exchanges are counted."""


@dataclass(slots=True)
class EarlyBytes:
    """Number of bytes in early segments of all connections together, and the maximum of this number."""

    bytes_max: int = 64 << 20
    bytes_now: int = 0
    """Present size of all early segments."""


class TcpDirection:
    """Byte stream of one side of a connection.

    Args:
        early: count of early bytes that all connections share; this direction adds its bytes to it.
        is_up: whether the stream is from client to server.
    """

    __slots__ = (
        "_early",
        "_early_bytes",
        "_early_segments",
        "_position",
        "hole_ns",
        "is_up",
        "last_payload",
        "next_seq",
        "peer",
    )

    def __init__(self, early: EarlyBytes, *, is_up: bool) -> None:
        self.is_up = is_up
        """Whether the bytes go from the client to the server."""
        self.peer: TcpDirection = self  # direction of the peer; TcpConnection sets it
        self.next_seq: int | None = None
        """Sequence number of the next byte; None while it is unknown."""
        self.last_payload = b""
        """The latest bytes before `next_seq`, with which retransmissions are compared."""
        self.hole_ns = 0
        """Time when the first of the early segments was captured; 0: there are no early segments."""
        self._early = early
        self._early_bytes = 0
        """Size of `_early_segments`."""
        self._early_segments: list[tuple[int, int, bytes, int]] = []  # heap: (position, t_ns, payload, flags)
        self._position = 0  # position of `next_seq` in the stream; unlike `next_seq`, it does not wrap

    def begin(self, seq: int) -> None:
        """Expect the byte with this sequence number next; forget all earlier data."""
        self.forget()
        self.next_seq = seq & MASK

    def forget(self) -> None:
        """Forget the position in the stream and all early segments."""
        self.next_seq = None
        self.last_payload = b""
        self.hole_ns = 0
        self._early.bytes_now -= self._early_bytes
        self._early_bytes = 0
        self._early_segments.clear()

    def distance(self, seq: int) -> int:
        """Return how many bytes `seq` is ahead of the next byte; negative if it is behind."""
        assert self.next_seq is not None
        return ((seq - self.next_seq + HALF) & MASK) - HALF

    def add(self, seq: int, flags: int, payload: bytes, t_ns: int) -> list[tuple[bytes, int, int]]:
        """Add a segment. Return the pieces that are in order now, as `(payload, t_ns, flags)`; `next_seq` is
        then the byte after them.

        A piece that waited for this segment has the later of the two times. Raises LostSyncError.
        """
        ahead = self.distance(seq)
        if ahead > 0:
            self._store_early(self._position + ahead, flags, payload, t_ns)
            return []
        pieces: list[tuple[bytes, int, int]] = []
        self._append_piece(pieces, ahead, payload, t_ns, flags)
        while self._early_segments and self._early_segments[0][0] <= self._position:
            position, kept_ns, payload, flags = heappop(self._early_segments)
            self._early.bytes_now -= len(payload)
            self._early_bytes -= len(payload)
            self._append_piece(pieces, position - self._position, payload, max(t_ns, kept_ns), flags)
        if not self._early_segments:
            self.hole_ns = 0
        return pieces

    def _append_piece(
        self, pieces: list[tuple[bytes, int, int]], behind: int, payload: bytes, t_ns: int, flags: int
    ) -> None:
        """Append to `pieces` the new bytes of a segment that begins `-behind` bytes before `next_seq`."""
        if behind < 0:
            # A single byte just before `next_seq` is a keep-alive probe, whose content must not be compared.
            if len(payload) > 1 or behind != -1:
                self._check_copy(-behind, payload)
            n = len(payload)
            payload = payload[-behind:]
            if not payload and n < -behind:
                return  # all bytes, and a FIN if there is one, are a retransmission
        assert self.next_seq is not None
        self.next_seq = (self.next_seq + len(payload)) & MASK
        self._position += len(payload)
        if payload:
            self.last_payload = payload
        pieces.append((payload, t_ns, flags))

    def _check_copy(self, behind: int, payload: bytes) -> None:
        """Raise LostSyncError if bytes before `next_seq` differ from those that were returned for them."""
        last = self.last_payload
        n = min(behind, len(last))
        mine = payload[behind - n : behind]  # the bytes that overlap `last`
        start = len(last) - n
        if mine != last[start : start + len(mine)]:
            raise LostSyncError("contradicting")  # two packets have different values for the same position

    def _store_early(self, position: int, flags: int, payload: bytes, t_ns: int) -> None:
        """Keep a segment that arrived before earlier bytes of the stream."""
        if not self._early_segments:
            self.hole_ns = t_ns
        early = self._early
        early.bytes_now += len(payload)
        self._early_bytes += len(payload)
        heappush(self._early_segments, (position, t_ns, payload, flags))
        if (
            len(self._early_segments) > EARLY_SEGMENTS_MAX
            or self._early_bytes > EARLY_BYTES_MAX
            or early.bytes_now > early.bytes_max
        ):
            # Too many bytes wait for the bytes before them, so the missing packets count as lost.
            raise LostSyncError("packets_lost")

"""Parse packet headers (pure): place of the IP header in a frame, and TCP segment of an IP packet.

Checksums are not checked. Source: RFC 791, RFC 8200, RFC 9293; link types: tcpdump.org/linktypes.html.
"""

import struct
from mmap import mmap
from typing import Final

__all__ = [
    "ACK",
    "CUT_OFF",
    "FIN",
    "RST",
    "SYN",
    "Segment",
    "network_offset",
    "parse_segment",
    "reverse_flow",
]

FIN: Final = 0x01
SYN: Final = 0x02
RST: Final = 0x04
ACK: Final = 0x10
CUT_OFF: Final = 0x100
"""Added to the flags of a segment whose payload was cut off by a short snapshot length."""

Segment = tuple[bytes, int, int, int, int, int, int]
"""`(flow, seq, ack, flags, window, start, stop)`.

flow: addresses and ports as in the packet, source first: 12 or 36 bytes, one value for each direction.
start, stop: the payload's place in the buffer.
"""

# Version, total length, fragment, protocol, addresses and ports; seq, ack, data offset, flags, window.
_V4: Final = struct.Struct("!BxHxxHxBxx12sIIBBH")
_V6: Final = struct.Struct("!BxxxHBx36sIIBBH")
_TCP: Final = struct.Struct("!4sIIBBH")
_EXTENSION: Final = struct.Struct("!BB")
_ETHERTYPE: Final = struct.Struct("!H")
_TCP_PROTOCOL: Final = 6
_EXTENSIONS: Final = frozenset({0, 43, 60})
"""IPv6 hop-by-hop, routing and destination options. A fragment (44) is not reassembled."""
_EXTENSIONS_MAX: Final = 4
_VLAN: Final = frozenset({0x8100, 0x88A8, 0x9100})
_IP: Final = frozenset({0x0800, 0x86DD})
_RAW_LINKS: Final = frozenset({12, 14, 101, 228, 229})
_ETHERTYPE_OFFSET: Final = {1: 12, 113: 14}
"""Ethernet, Linux cooked."""


def parse_segment(buf: bytes | mmap, at: int, end: int) -> Segment | None:
    """Return the TCP segment of the IP packet at `at`; None for anything else, a fragment or a cut header."""
    if end - at < 40:
        return None
    first, total, fragment, protocol, flow, seq, ack, offset, flags, window = _V4.unpack_from(buf, at)
    if first == 0x45:
        if protocol != _TCP_PROTOCOL or fragment & 0x3FFF:
            return None
        start = at + 20 + (offset >> 4) * 4
    elif first >> 4 == 4:
        tcp = at + (first & 15) * 4
        if protocol != _TCP_PROTOCOL or fragment & 0x3FFF or first & 15 < 5 or end - tcp < 20:
            return None
        ports, seq, ack, offset, flags, window = _TCP.unpack_from(buf, tcp)
        flow, start = flow[:8] + ports, tcp + (offset >> 4) * 4
    elif first >> 4 == 6 and end - at >= 60:
        _, length, protocol, flow, seq, ack, offset, flags, window = _V6.unpack_from(buf, at)
        tcp, extensions = at + 40, 0
        while protocol in _EXTENSIONS and extensions < _EXTENSIONS_MAX and end - tcp >= 28:
            protocol, size = _EXTENSION.unpack_from(buf, tcp)
            tcp += 8 * (size + 1)
            extensions += 1
        if protocol != _TCP_PROTOCOL or end - tcp < 20:
            return None
        if extensions:
            ports, seq, ack, offset, flags, window = _TCP.unpack_from(buf, tcp)
            flow = flow[:32] + ports
        total, start = (length + 40 if length else 0), tcp + (offset >> 4) * 4
    else:
        return None
    if offset < 0x50:
        return None
    # A total of 0 is a packet of more than 64 KiB (BIG TCP). What follows the packet is padding of the link.
    stop = at + total if total else end
    if stop > end:
        flags |= CUT_OFF
        stop = end
    return flow, seq, ack, flags, window, start, max(start, stop)


def network_offset(link: int, frame: bytes) -> int:
    """Return the offset of the IP header in a frame of this link type; -1 if it has none."""
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

"""Read what the kernel knows about a TCP connection: its state, and counts of bytes and segments.

Linux returns all of it as a `tcp_info` (linux/tcp.h); `getsockopt` needs about 1 us. Older kernels have fewer
fields.
"""

import re
import socket
import struct
from typing import Final

_TCP_LEFT: Final = frozenset({7, 8, 9})
"""TCP states in which the peer has left (tcp_states.h): CLOSE (a reset came), CLOSE_WAIT and LAST_ACK (the
peer's FIN came)."""
_TCPI_BYTES_ACKED: Final = struct.Struct("=120xQ")
"""Format that reads the field tcpi_bytes_acked of Linux's tcp_info (linux/tcp.h)."""
_TCPI_RCV_OOOPACK: Final = struct.Struct("=224xI")
"""Format that reads the field tcpi_rcv_ooopack (since Linux 5.4) of tcp_info."""
_TCPI_BYTES_RECEIVED: Final = struct.Struct("=128xQ")
"""Format that reads the field tcpi_bytes_received (since Linux 4.1) of tcp_info."""
_TCPI_SEGMENTS: Final = struct.Struct("=128xQ16xI")
"""Format that reads the fields tcpi_bytes_received and tcpi_data_segs_in (since Linux 4.6) of tcp_info."""
_CHUNK_END_BYTES: Final = len(b"\r\n")
_BLANK_LINE: Final = re.compile(rb"\n\r?\n")


def _tcp_info(sock: socket.socket, field: struct.Struct, missing: int) -> int:
    """Return a field of the kernel's tcp_info; `missing` if the kernel does not have it or the connection."""
    try:
        return int(field.unpack(sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, field.size))[0])
    except (OSError, struct.error):
        return missing


def acked_bytes_of(sock: socket.socket) -> int:
    """Return the bytes that the peer's kernel has acknowledged; 0 if the connection is gone."""
    return _tcp_info(sock, _TCPI_BYTES_ACKED, 0)


def received_bytes_of(sock: socket.socket) -> int:
    """Return the bytes that have arrived on a connection, read or not; -1 if it is gone."""
    return _tcp_info(sock, _TCPI_BYTES_RECEIVED, -1)


def has_left(sock: socket.socket) -> bool:
    """Return whether the peer has closed its side, even if bytes are unread."""
    try:
        return sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] in _TCP_LEFT
    except OSError:
        return True


def out_of_order(sock: socket.socket) -> bool:
    """Return whether a packet of this connection arrived before an earlier one; also True if this is unknown.

    A read then has the timestamp of its last packet, which is earlier than that of the packet it waited for.
    """
    return bool(_tcp_info(sock, _TCPI_RCV_OOOPACK, 1))


class ReceivedSegments:
    """Counts of a connection's reads and bytes; reference of `struct llmtap_received` (native/reading.h)."""

    def __init__(self) -> None:
        self._bytes = self._reads = 0
        """Number of bytes and of reads so far."""
        self._compared_reads = self._compared_segments = 0
        """Number of reads, and of TCP segments, at the latest comparison."""
        self._at_once = self._is_unsure = False
        """`_at_once`: in the latest comparison, each read had one segment. `_is_unsure`: a read since then
        filled its buffer, so it was perhaps cut."""

    def add(self, size: int, size_max: int) -> None:
        """Add a read of `size` bytes, and at most `size_max`."""
        self._bytes += size
        self._reads += 1
        self._is_unsure |= size == size_max

    def came_at_once(self, sock: socket.socket) -> bool:
        """Return whether all bytes of the last read arrived in one TCP segment; False if that is unknown.

        The kernel's count of segments shows it: if it grew by one for each read, no read had two segments.
        """
        if self._reads == self._compared_reads:
            return self._at_once
        try:
            info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCPI_SEGMENTS.size)
            received_bytes, segments = _TCPI_SEGMENTS.unpack(info)
        except (OSError, struct.error):
            return False
        if received_bytes != self._bytes:
            return False  # More bytes have arrived since: their segments would be counted, too.
        grown = (segments - self._compared_segments) & 0xFFFF_FFFF
        self._at_once = not self._is_unsure and grown == self._reads - self._compared_reads
        self._compared_segments, self._compared_reads, self._is_unsure = segments, self._reads, False
        return self._at_once


def has_several_events(data: bytes) -> bool:
    """Return whether bytes of a body possibly belong to several events: if more than the line end of an HTTP
    chunk follows a blank line, or if no blank line ends an event."""
    blank = _BLANK_LINE.search(data)
    return blank is None or len(data) - blank.end() > _CHUNK_END_BYTES

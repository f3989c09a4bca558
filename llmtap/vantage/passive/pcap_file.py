"""Read packets from pcap and pcapng files: any byte order, microseconds or nanoseconds, several interfaces.

A `PacketFile` yields wall time, link type and frame of each packet; `segments.py` parses the frame. Source:
draft-ietf-opsawg-pcap, draft-ietf-opsawg-pcapng.
"""

import struct
from collections.abc import Iterator
from typing import BinaryIO, Final

from llmtap.errors import LlmtapError

SNIFF_BYTES: Final = 4
BLOCK_BYTES_MAX: Final = 16 << 20
"""Longest packet or block; larger lengths are taken as damage."""
WALL_NS_MAX: Final = 1 << 62
"""Year 2116; larger stamps would not fit the frames."""
INTERFACES_MAX: Final = 4_096
_UNITS_NS: Final = {0xA1B2C3D4: 1_000, 0xA1B23C4D: 1}
"""Nanoseconds of a fraction's unit, by magic number of a pcap file."""
_NG_MAGIC: Final = b"\n\r\r\n"
_SECTION, _INTERFACE, _SIMPLE, _ENHANCED = 0x0A0D0D0A, 1, 3, 6
_TS_RESOLUTION, _TS_OFFSET = 9, 14
_MAGICS: Final = frozenset(
    {_NG_MAGIC, *(struct.pack(order + "I", magic) for order in "<>" for magic in _UNITS_NS)}
)


class PcapError(LlmtapError):
    """The file is no packet capture, or it is damaged."""


def is_packet_file(head: bytes) -> bool:
    """Whether a file that begins with `head` (SNIFF_BYTES) is a packet capture."""
    return head[:SNIFF_BYTES] in _MAGICS


class PacketFile:
    """A packet capture; iterate over `(wall_ns, link type, frame)` once. The file need not be seekable.

    A file that was cut off ends with its last whole packet, and `truncated` is set.
    """

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.truncated = False
        self.read_bytes = 0
        self.unit_ns = 1
        """Resolution of the latest packet's timestamp."""

    def __iter__(self) -> Iterator[tuple[int, int, bytes]]:
        """Raises PcapError."""
        magic = self._read(SNIFF_BYTES)
        if magic == _NG_MAGIC:
            return self._pcapng()
        for order in "<>":
            unit_ns = _UNITS_NS.get(int.from_bytes(magic, "little" if order == "<" else "big"))
            if unit_ns is not None:
                return self._pcap(order, unit_ns)
        raise PcapError("it is neither a pcap nor a pcapng file")

    def _read(self, n: int) -> bytes:
        """Return `n` bytes, or fewer at the end of the file."""
        data = self._file.read(n)
        while len(data) < n and (more := self._file.read(n - len(data))):  # a pipe gives what it has
            data += more
        self.read_bytes += len(data)
        if 0 < len(data) < n:
            self.truncated = True
        return data

    def _body(self, n: int) -> bytes:
        body = self._read(n)
        if len(body) < n:
            self.truncated = True
        return body

    def _damaged(self, what: str) -> PcapError:
        return PcapError(f"damaged before byte {self.read_bytes:,}: {what}")

    def _pcap(self, order: str, unit_ns: int) -> Iterator[tuple[int, int, bytes]]:
        head = self._body(20)
        if len(head) < 20:
            return
        link = struct.unpack_from(order + "I", head, 16)[0] & 0xFFFF
        record = struct.Struct(order + "IIII")
        self.unit_ns = unit_ns
        while len(head := self._read(16)) == 16:
            seconds, fraction, captured, _ = record.unpack(head)
            if captured > BLOCK_BYTES_MAX:
                raise self._damaged(f"a packet of {captured:,} bytes")
            if len(frame := self._body(captured)) < captured:
                return
            yield seconds * 1_000_000_000 + fraction * unit_ns, link, frame

    def _pcapng(self) -> Iterator[tuple[int, int, bytes]]:
        order = "<"
        interfaces: list[tuple[int, int, int]] = []  # link type, ticks per second, offset in s
        head = _NG_MAGIC + self._body(4)
        while len(head) == 8:
            kind, length = struct.unpack(order + "II", head)
            read = 8
            if kind == _SECTION:
                order_magic = self._body(4)
                order, interfaces = ("<" if order_magic == b"\x4d\x3c\x2b\x1a" else ">"), []
                (length,) = struct.unpack(order + "I", head[4:])
                read = 12
            if not 12 <= length <= BLOCK_BYTES_MAX or length % 4 or length < read + 4:
                raise self._damaged(f"a block of {length:,} bytes")
            if len(body := self._body(length - read)) < length - read:
                return
            try:
                if kind == _ENHANCED:
                    number, high, low, captured, _ = struct.unpack_from(order + "IIIII", body)
                    if captured > len(body) - 24:
                        raise self._damaged("a packet longer than its block")
                    link, ticks_per_s, offset_s = interfaces[number]
                    wall_ns = offset_s * 10**9 + (high << 32 | low) * 10**9 // ticks_per_s
                    if not 0 <= wall_ns < WALL_NS_MAX:
                        raise self._damaged("a timestamp out of range")
                    self.unit_ns = max(1, 10**9 // ticks_per_s)
                    yield wall_ns, link, body[20 : 20 + captured]
                elif kind == _INTERFACE and len(interfaces) < INTERFACES_MAX:
                    (link,) = struct.unpack_from(order + "H", body)
                    interfaces.append((link, *_clock_of(body[8:-4], order)))
                elif kind == _SIMPLE:
                    raise PcapError("its packets have no timestamps (simple packet blocks)")
            except (struct.error, IndexError):
                raise self._damaged("a block that is too short") from None
            head = self._read(8)


def _clock_of(options: bytes, order: str) -> tuple[int, int]:
    """Return the ticks per second and the offset in seconds of an interface's timestamps."""
    ticks_per_s, offset_s, at = 1_000_000, 0, 0
    while at + 4 <= len(options):
        code, length = struct.unpack_from(order + "HH", options, at)
        value = options[at + 4 : at + 4 + length]
        if code == _TS_RESOLUTION and value:
            exponent = value[0] & 127
            ticks_per_s = 2**exponent if value[0] & 128 else 10**exponent
        elif code == _TS_OFFSET and len(value) == 8:
            (offset_s,) = struct.unpack(order + "q", value)
        at += 4 + (length + 3) // 4 * 4
    return ticks_per_s, offset_s

"""Read pcap and pcapng files, and convert their packets to a relay's frames, as the live watcher does.

A `PacketFile` yields wall time, link type and bytes of each packet. It reads files of any byte order, with
microseconds or nanoseconds, and with several interfaces. `llmtap watch --read` and `llmtap inspect` call
`FileVantage.read`, which passes the frames in batches to a function, the `digest` of `meter/process.py`. Wall
time and monotonic time are the same here: a frame has the time that the file gives its packet.

Source: draft-ietf-opsawg-pcap, draft-ietf-opsawg-pcapng.
"""

import struct
from collections.abc import Callable, Iterator, Sequence
from typing import BinaryIO, Final

import msgspec

from llmtap.channel import Ledger
from llmtap.channel.frames import Closing, Frame, FrameKind, Hello
from llmtap.channel.status import RelayStatus
from llmtap.errors import LlmtapError
from llmtap.protocol.http1 import RequestHead
from llmtap.protocol.inference import SkipRules
from llmtap.vantage.passive.connection import ConnectionTable, pack_addresses
from llmtap.vantage.passive.options import WatchOptions
from llmtap.vantage.passive.segments import network_offset

SNIFF_BYTES: Final = 4
BLOCK_BYTES_MAX: Final = 16 << 20
"""Maximum length of a packet or block. If a file declares a greater length, it is damaged."""
WALL_NS_MAX: Final = 1 << 62
"""Latest allowed timestamp (in the year 2116), because later ones do not fit into frames."""
INTERFACES_MAX: Final = 4_096
_UNITS_NS: Final = {0xA1B2C3D4: 1_000, 0xA1B23C4D: 1}
"""By magic number of a pcap file: unit, in ns, of the fraction of a timestamp."""
_NG_MAGIC: Final = b"\n\r\r\n"
_SECTION, _INTERFACE, _SIMPLE, _ENHANCED = 0x0A0D0D0A, 1, 3, 6
_TS_RESOLUTION, _TS_OFFSET = 9, 14
_MAGICS: Final = frozenset(
    {_NG_MAGIC, *(struct.pack(order + "I", magic) for order in "<>" for magic in _UNITS_NS)}
)
BATCH_FRAMES: Final = 1_000
SWEEP_NS: Final = 1_000_000_000
NAME: Final = "file"


class PcapError(LlmtapError):
    """The file is not a packet capture, or it is damaged."""


def is_packet_file(head: bytes) -> bool:
    """Return whether a file that begins with `head` (SNIFF_BYTES) is a packet capture."""
    return head[:SNIFF_BYTES] in _MAGICS


class PacketFile:
    """A packet capture file or pipe. Iterate over it once, to get `(wall_ns, link type, packet bytes)`.

    A file that was cut off ends with its last whole packet, and `truncated` is set.
    """

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.truncated = False
        """Whether the file ends in the middle of a packet."""
        self.read_bytes = 0
        self.unit_ns = 1
        """Resolution of the latest packet's timestamp."""

    def __iter__(self) -> Iterator[tuple[int, int, bytes]]:
        """Yield `(wall_ns, link type, packet bytes)` of each packet. Raises PcapError."""
        magic = self._read(SNIFF_BYTES)
        if magic == _NG_MAGIC:
            return self._read_pcapng()
        for order in "<>":
            unit_ns = _UNITS_NS.get(int.from_bytes(magic, "little" if order == "<" else "big"))
            if unit_ns is not None:
                return self._read_pcap(order, unit_ns)
        raise PcapError("the file is not a pcap or pcapng file, which `tcpdump -w` writes")

    def _read(self, n: int) -> bytes:
        """Return `n` bytes, or fewer at the end of the file."""
        data = self._file.read(n)
        while len(data) < n and (more := self._file.read(n - len(data))):  # a pipe can return fewer bytes
            data += more
        self.read_bytes += len(data)
        if 0 < len(data) < n:
            self.truncated = True
        return data

    def _read_rest(self, n: int) -> bytes:
        """Return the remaining `n` bytes of a packet or block; fewer, even none, if the file was cut off."""
        body = self._read(n)
        if len(body) < n:
            self.truncated = True
        return body

    def _damage_error(self, what: str) -> PcapError:
        return PcapError(f"the file is damaged before byte {self.read_bytes:,}, so capture it again: {what}")

    def _read_pcap(self, order: str, unit_ns: int) -> Iterator[tuple[int, int, bytes]]:
        head = self._read_rest(20)
        if len(head) < 20:
            return
        link = struct.unpack_from(order + "I", head, 16)[0] & 0xFFFF
        record = struct.Struct(order + "IIII")
        self.unit_ns = unit_ns
        while len(head := self._read(16)) == 16:
            seconds, fraction, captured, _ = record.unpack(head)
            if captured > BLOCK_BYTES_MAX:
                limit = f"more than the maximum of {BLOCK_BYTES_MAX:,}"
                raise self._damage_error(f"a packet has a declared length of {captured:,} bytes, {limit}")
            if len(frame := self._read_rest(captured)) < captured:
                return
            yield seconds * 1_000_000_000 + fraction * unit_ns, link, frame

    def _read_pcapng(self) -> Iterator[tuple[int, int, bytes]]:
        order = "<"
        interfaces: list[tuple[int, int, int]] = []  # link type, ticks per second, offset in s
        head = _NG_MAGIC + self._read_rest(4)
        while len(head) == 8:
            kind, length = struct.unpack(order + "II", head)
            read = 8
            if kind == _SECTION:
                order_magic = self._read_rest(4)
                order, interfaces = ("<" if order_magic == b"\x4d\x3c\x2b\x1a" else ">"), []
                (length,) = struct.unpack(order + "I", head[4:])
                read = 12
            if not 12 <= length <= BLOCK_BYTES_MAX or length % 4 or length < read + 4:
                raise self._damage_error(f"a block of type {kind} has the invalid length {length:,}")
            if len(body := self._read_rest(length - read)) < length - read:
                return
            try:
                if kind == _ENHANCED:
                    number, high, low, captured, _ = struct.unpack_from(order + "IIIII", body)
                    if captured > len(body) - 24:
                        raise self._damage_error(f"a packet of {captured:,} bytes is longer than its block")
                    link, ticks_per_s, offset_s = interfaces[number]
                    wall_ns = offset_s * 10**9 + (high << 32 | low) * 10**9 // ticks_per_s
                    if not 0 <= wall_ns < WALL_NS_MAX:
                        raise self._damage_error(f"a timestamp is not between 1970 and 2116: {wall_ns} ns")
                    self.unit_ns = max(1, 10**9 // ticks_per_s)
                    yield wall_ns, link, body[20 : 20 + captured]
                elif kind == _INTERFACE and len(interfaces) < INTERFACES_MAX:
                    (link,) = struct.unpack_from(order + "H", body)
                    interfaces.append((link, *_clock_of(body[8:-4], order)))
                elif kind == _SIMPLE:
                    raise PcapError(
                        "the packets have no timestamps (simple packet blocks): use a file of `tcpdump -w`"
                    )
            except (struct.error, IndexError):
                what = (
                    f"a block of type {kind} is too short, or of an interface that the file does not declare"
                )
                raise self._damage_error(what) from None
            head = self._read(8)


def _clock_of(options: bytes, order: str) -> tuple[int, int]:
    """Return for the timestamps of a pcapng interface: ticks per second, and the seconds to add."""
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


class FileVantage:
    """FrameSink that passes frames in batches to `digest(frames, time of the newest packet)`.

    The counts in `status` are exact after `read` has returned.
    """

    def __init__(self, options: WatchOptions, digest: Callable[[Sequence[Frame], int], None]) -> None:
        self.hello = Hello(
            relay=NAME, pid=0, clock="packet", vantage="passive", anchor_mono_ns=0, anchor_wall_ns=0
        )
        self.cut_at: int | None = None
        """Position in bytes at which the file ends within a packet; None: the file ends after a packet."""
        self.damage = ""
        """Description and place of the damage at which `read` ended; empty: no damage."""
        self.stopped = False
        """Whether a signal stopped the reading."""
        self.packets = 0  # number of packets read
        self.began_ns = 0  # time of the first packet
        self.now_ns = 0  # time of the newest packet
        self._digest = digest
        """Function that gets each batch of frames."""
        self._ledger = Ledger()
        """Counts of the exchanges, as a relay has them."""
        self._skip_rules = SkipRules(options.skip, "watch.skip")
        self._skip_counts: dict[str, int] = {}  # number of requests that are not measured, by rule
        """By rule: number of requests that it excludes."""
        self._frames: list[Frame] = []
        self._table = ConnectionTable(self, options.ports, pack_addresses(options.upstream_hosts))
        self._unit_ns = 1
        """Resolution of the timestamps in the file."""

    def read(self, file: BinaryIO) -> None:
        """Read packets until the end of the file, until damage, or until `stop` is called.

        Raises PcapError if no packet can be read.
        """
        packets = PacketFile(file)
        try:
            self._read(packets)
        except PcapError as exc:
            if not self.packets:
                raise
            self.damage = str(exc)
        self.cut_at = packets.read_bytes if packets.truncated else None
        self._table.close(self._table.now_ns)
        self._flush()

    def _read(self, packets: PacketFile) -> None:
        """Pass the packets to their connections; their timestamps are the clock."""
        swept_ns = 0
        for t_ns, link, frame in packets:
            self.packets += 1
            if t_ns > self.now_ns:
                self.now_ns = t_ns
                self.began_ns = self.began_ns or t_ns
            at = network_offset(link, frame)
            if at >= 0:
                self._unit_ns = packets.unit_ns
                self._table.add_packet(frame, at, len(frame), t_ns)
            if abs(t_ns - swept_ns) > SWEEP_NS:
                swept_ns = t_ns
                self._table.sweep(t_ns)
            if len(self._frames) >= BATCH_FRAMES:
                self._flush()
            if self.stopped:
                break

    def stop(self) -> bool:
        """Make `read` end after the current packet; the packets so far are measured."""
        self.stopped = True
        return True

    def status(self) -> RelayStatus:
        """Return the counts as the status of a relay."""
        ledger, counts = self._ledger, self._table.counts
        return RelayStatus(
            t_ns=self.now_ns,
            **ledger.counts(),
            skipped=self._skip_counts,
            connections=len(self._table),
            draining=True,
            packets={"captured": self.packets},
            watched=dict(counts.connections),
            missing_bytes=counts.missing_bytes,
        )

    def _flush(self) -> None:
        """Pass on the collected frames."""
        frames, self._frames = self._frames, []
        self._digest(frames, self.now_ns)
        self._ledger.acknowledge(1)

    # ---------------------------------------------------------------- methods of FrameSink

    def count_if_skipped(self, head: RequestHead) -> bool:
        rule = self._skip_rules.rule_of_head(head.method, head.target, head.headers)
        if rule is not None:
            self._skip_counts[rule] = self._skip_counts.get(rule, 0) + 1
        return rule is not None

    def open(self, t_ns: int, data: bytes, extra_ns: int = 0, kind: int = FrameKind.OPEN) -> tuple[int, bool]:
        seq = self._ledger.open()
        self._ledger.begin(seq)
        self._frames.append((kind, seq, t_ns, extra_ns, data))
        return seq, True

    def offer(self, kind: int, seq: int, t_ns: int, extra_ns: int, data: bytes = b"") -> bool:
        self._frames.append((kind, seq, t_ns, extra_ns, data))
        return True

    def close_exchange(self, seq: int, t_ns: int, closing: Closing) -> None:
        closing.lag_ns = max(closing.lag_ns, self._unit_ns)
        self._frames.append((FrameKind.CLOSE, seq, t_ns, 0, msgspec.json.encode(closing)))
        self._ledger.close(seq, 1)

    def drop(self, seq: int, t_ns: int, reason: str) -> None:
        self._ledger.drop(seq, reason)
        self._frames.append((FrameKind.DROP, seq, t_ns, 0, b""))

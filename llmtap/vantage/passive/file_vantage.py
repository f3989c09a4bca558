"""Convert the packets of a pcap or pcapng file to frames, with the code for live packets (`FileVantage`).

`llmtap watch --read` and `llmtap inspect` call `read`; the frames go, batch by batch, to a function, the
`digest` of `meter/process.py`. Wall time and monotonic time are the same here: a frame has the time that the
file gives its packet.
"""

from collections.abc import Callable, Sequence
from typing import BinaryIO, Final

import msgspec

from llmtap.channel.channel import Ledger
from llmtap.channel.frames import Closing, Frame, FrameKind, Hello, RelayStatus
from llmtap.protocol.http1 import RequestHead
from llmtap.protocol.inference import SkipRules
from llmtap.vantage.passive.options import WatchOptions
from llmtap.vantage.passive.pcap_file import PacketFile, PcapError
from llmtap.vantage.passive.segments import network_offset
from llmtap.vantage.passive.table import ConnectionTable, pack_addresses

BATCH_FRAMES: Final = 1_000
SWEEP_NS: Final = 1_000_000_000
TOLD_EVERY: Final = 2_000
"""Packets between two calls of `progress`."""
NAME: Final = "file"


class FileVantage:
    """A FrameSink that passes on frames in batches, as `(frames, time of the newest packet)`.

    The counts of the ledger are exact once `read` has returned.
    """

    def __init__(self, options: WatchOptions, digest: Callable[[Sequence[Frame], int], None]) -> None:
        self.hello = Hello(
            relay=NAME, pid=0, clock="packet", vantage="passive", anchor_mono_ns=0, anchor_wall_ns=0
        )
        self.cut_at: int | None = None
        """Byte at which the file ends within a packet."""
        self.damage = ""
        """What is wrong with the file, and where, if `read` ended at damage behind the first packet."""
        self.stopped = False
        self.packets = 0
        self.began_ns = 0
        self.now_ns = 0
        self._digest = digest
        self._ledger = Ledger()
        self._skips = SkipRules(options.skip, "watch.skip")
        self._skipped: dict[str, int] = {}
        self._frames: list[Frame] = []
        self._table = ConnectionTable(self, options.ports, pack_addresses(options.upstream_hosts))
        self._unit_ns = 1

    def read(self, file: BinaryIO, progress: Callable[[int], None] | None = None) -> None:
        """Read all packets, or until `stop` or damage; `progress` is called with the bytes read.

        Raises PcapError if no packet can be read.
        """
        packets = PacketFile(file)
        try:
            self._read(packets, progress)
        except PcapError as exc:
            if not self.packets:
                raise
            self.damage = str(exc)
        self.cut_at = packets.read_bytes if packets.truncated else None
        self._table.close(self.now_ns)
        self._flush()

    def _read(self, packets: PacketFile, progress: Callable[[int], None] | None) -> None:
        swept_ns = 0
        for t_ns, link, frame in packets:
            self.packets += 1
            if t_ns > self.now_ns:
                self.now_ns = t_ns
                self.began_ns = self.began_ns or t_ns
            at = network_offset(link, frame)
            if at >= 0:
                self._unit_ns = packets.unit_ns
                self._table.packet(frame, at, len(frame), t_ns)
            if t_ns - swept_ns > SWEEP_NS:
                swept_ns = t_ns
                self._table.sweep(t_ns)
            if len(self._frames) >= BATCH_FRAMES:
                self._flush()
            if progress is not None and self.packets % TOLD_EVERY == 0:
                progress(packets.read_bytes)
            if self.stopped:
                break

    def stop(self) -> bool:
        """End `read` at the next packet: what was read is measured."""
        self.stopped = True
        return True

    def status(self) -> RelayStatus:
        """Return the counts as of a relay."""
        ledger, counts = self._ledger, self._table.counts
        return RelayStatus(
            t_ns=self.now_ns, opened=ledger.opened, measured=ledger.measured, dropped=dict(ledger.dropped),
            unsettled=ledger.unsettled, skipped=self._skipped, connections=len(self._table), draining=True,
            packets={"captured": self.packets}, watched=dict(counts.connections),
            missing_bytes=counts.missing_bytes,
        )  # fmt: skip

    def _flush(self) -> None:
        frames, self._frames = self._frames, []
        self._digest(frames, self.now_ns)
        self._ledger.acknowledge(1)

    # ---------------------------------------------------------------- FrameSink

    def skips(self, head: RequestHead) -> bool:
        rule = self._skips.rule_of_head(head.method, head.target, head.headers)
        if rule is not None:
            self._skipped[rule] = self._skipped.get(rule, 0) + 1
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
        closing.lag_ns = self._unit_ns
        self._frames.append((FrameKind.CLOSE, seq, t_ns, 0, msgspec.json.encode(closing)))
        self._ledger.close(seq, 1)

    def drop(self, seq: int, t_ns: int, reason: str) -> None:
        self._ledger.drop(seq, reason)
        self._frames.append((FrameKind.DROP, seq, t_ns, 0, b""))

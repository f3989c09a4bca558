"""The process of `llmtap watch` that reads packets from the ring buffers and sends frames to the meter.

The supervisor runs it as `python -m llmtap.vantage.passive` without privileges; it inherits the packet
sockets, and reads a WatchSetup as JSON from stdin. The time of a packet is its timestamp by the clock of the
kernel or of the network card, converted to the monotonic clock. The uncertainty of an exchange is the error
of this conversion, and does not depend on the time when this process read the packets.
"""

import asyncio
import logging
import signal
import socket
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final

import psutil
import uvloop

from llmtap.channel.frames import Closing, FrameKind
from llmtap.clock import AdapterClock, Clock, SystemClock
from llmtap.net.lag import make_lag_meter
from llmtap.net.stream import Timebase
from llmtap.protocol.http1 import RequestHead
from llmtap.protocol.inference import SkipRules
from llmtap.vantage.passive.connection import ConnectionTable, WatchCounts, pack_addresses
from llmtap.vantage.passive.options import WatchOptions
from llmtap.vantage.passive.ring import PacketRing
from llmtap.vantage.reporter import STATUS_S, ChildSetup, Reporter, begin_child, on_orphaned

LOSS_AFTERMATH_NS: Final = 2_000_000_000
"""Time after an overflow of the ring in which packets that are missing (holes) count as lost. Later, missing
packets are possibly only late."""
RING_AGE_NS_MAX: Final = 1_000_000_000
"""Maximum age of packets in the ring: after this time, all packets stamped before a clock step were read."""
LAST_PACKETS_S: Final = 0.06
"""Time to wait at the end for the last packets: a little longer than the kernel keeps a block (RETIRE_MS)."""
DRAIN_S: Final = 2.0
"""Maximum time to wait at the end until the meter has acknowledged all frames."""
SWEEP_NS: Final = 1_000_000_000
UNFOLLOWED_HINTS: Final = {  # by kind of connection (WatchCounts) that is not measured
    "encrypted": "TLS cannot be read from packets: watch behind the TLS termination, or use `llmtap proxy`",
    "http2": "HTTP/2 is not followed: use `llmtap proxy` or the middleware",
    "not_http": "the connection does not carry HTTP/1.1: check watch.ports",
    "overflow": "the table of connections is full: limit the servers by watch.ports or watch.upstream_hosts",
}

log = logging.getLogger(__name__)


class WatchSetup(ChildSetup, kw_only=True):
    """Setup of a watcher process."""

    options: WatchOptions
    packet_fds: list[int]
    """Descriptors of the packet sockets, one for each of `options.interfaces`, in the same order."""
    adapter_fds: list[int] = []
    """Descriptors of the adapters' clocks, one for each interface; empty without `--timestamps adapter`."""


class _ChannelSink:
    """FrameSink that sends the frames to the meter, and adds the uncertainty of each exchange."""

    def __init__(self, reporter: Reporter, skip_rules: SkipRules, clock_error_ns: Callable[[], int]) -> None:
        self._skip_rules = skip_rules
        self._clock_error_ns = clock_error_ns
        """Returns the largest error of a packet's timestamp."""
        self._reporter = reporter
        self._tap = reporter.tap
        self.offer = reporter.tap.offer

    def count_if_skipped(self, head: RequestHead) -> bool:
        rule = self._skip_rules.rule_of_head(head.method, head.target, head.headers)
        if rule is not None:
            self._reporter.skip(rule)
        return rule is not None

    def open(self, t_ns: int, data: bytes, extra_ns: int = 0, kind: int = FrameKind.OPEN) -> tuple[int, bool]:
        """Begin an exchange. Return its number, and whether the channel accepts its frames."""
        seq, tapped = self._tap.open(t_ns, data, extra_ns, kind)
        if tapped:
            self._reporter.arrivals[seq] = t_ns
        return seq, tapped

    def close_exchange(self, seq: int, t_ns: int, closing: Closing) -> None:
        reporter = self._reporter
        arrival_ns = reporter.arrivals.get(seq, t_ns)
        closing.lag_ns = max(closing.lag_ns, self._clock_error_ns(), reporter.lag.worst_since(arrival_ns))
        reporter.on_end(seq, closing.request_bytes, closing.response_bytes)
        self._tap.close_exchange(seq, t_ns, closing)

    def drop(self, seq: int, t_ns: int, reason: str) -> None:
        self._reporter.arrivals.pop(seq, None)
        self._tap.drop(seq, t_ns, reason)


class Watcher:
    """Reads all packet rings on one event loop, and reports to the meter.

    Args:
        adapters: clock of the adapter that stamps the packets of each ring; empty: the kernel stamps them.
        local: packed addresses of this host, by which each table determines its `sides`.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        options: WatchOptions,
        rings: list[PacketRing],
        *,
        name: str,
        tap_path: str,
        clock: Clock | None = None,
        adapters: Sequence[Clock] = (),
        local: frozenset[bytes] = frozenset(),
    ) -> None:
        self._loop = loop
        self._clock = clock or SystemClock()
        self.reporter = Reporter(
            loop,
            tap_path,
            options.tap_bytes,
            make_lag_meter(0),
            self._clock,
            name=name,
            clock_name="packet",
            vantage="passive",
            live_counts=self._live_counts,
        )
        self.counts = WatchCounts()
        self._adapters = {
            ring.fd: Timebase(adapter, self.reporter.lag)
            for ring, adapter in zip(rings, adapters, strict=False)
        }
        """By ring: clock of the network adapter that stamps its packets."""
        self._timebases = [self.reporter.timebase, *self._adapters.values()]
        """The system's clock and all adapters' clocks, each checked before packets are read."""
        sink = _ChannelSink(self.reporter, SkipRules(options.skip, "watch.skip"), self._clock_error_ns)
        hosts = pack_addresses(options.upstream_hosts)
        self._tables = [
            (ring, ConnectionTable(sink, options.ports, hosts, local=local, counts=self.counts))
            for ring in rings
        ]
        self._timer: asyncio.TimerHandle | None = None
        self._clock_steps = 0
        """How often a clock was set, all clocks together."""
        self._old_stamps_until_ns = 0
        """Time until which a ring can still have packets that were stamped before the latest clock step."""
        self._overflow_ns = 0
        """Time of the latest overflow of a ring; 0: none recently."""
        self._logged_losses = 0  # number of lost packets that the log has reported
        self._swept_ns = 0  # time of the latest sweep
        self._logged_kinds: set[str] = set()
        """Kinds of connections that the log has reported, each once."""

    def start(self) -> None:
        self.reporter.tap.connect()
        for ring, table in self._tables:
            self._loop.add_reader(ring.fd, partial(self._on_readable, ring, table))
        self._on_timer()

    async def close(self) -> None:
        """Process the last packets, send a final status, and disconnect."""
        await asyncio.sleep(LAST_PACKETS_S)
        now_ns = self._clock.mono_ns()
        for ring, table in self._tables:
            self._loop.remove_reader(ring.fd)
            table.close(now_ns)
            ring.close()
        if self._timer is not None:
            self._timer.cancel()
        reporter = self.reporter
        reporter.draining = True
        reporter.tap.status(reporter.status())
        await reporter.tap.drain(DRAIN_S)
        reporter.tap.close()

    def _clock_error_ns(self) -> int:
        """Return the largest error of converting a timestamp to the monotonic clock."""
        return max(timebase.width_ns for timebase in self._timebases)

    def _on_readable(self, ring: PacketRing, table: ConnectionTable) -> None:
        """Process the packets that the kernel has put into the ring."""
        for timebase in self._timebases:
            timebase.check()
        now_ns = self._clock.mono_ns()
        steps = sum(timebase.steps for timebase in self._timebases)
        if steps != self._clock_steps:
            self._clock_steps = steps
            self._old_stamps_until_ns = now_ns + RING_AGE_NS_MAX
        if ring.count_new_losses():
            self._overflow_ns = now_ns
            table.on_ring_loss(now_ns, now=True)
        add_packet, buffer = table.add_packet, ring.buffer
        timebases = (self.reporter.timebase, self._adapters.get(ring.fd, self.reporter.timebase))
        if now_ns < self._old_stamps_until_ns:
            for stamp_ns, which, start, stop in ring.take():
                add_packet(buffer, start, stop, timebases[which].place(self._clock.mono_ns(), stamp_ns))
            return
        offsets_ns = (timebases[0].offset_ns, timebases[1].offset_ns)
        for stamp_ns, which, start, stop in ring.take():
            add_packet(buffer, start, stop, stamp_ns + offsets_ns[which])

    def _on_timer(self) -> None:
        """Sweep the connections, report to the meter, and sample the clocks. Called twice a second."""
        self._timer = self._loop.call_later(STATUS_S, self._on_timer)
        try:
            now_ns = self._clock.mono_ns()
            if self._overflow_ns and now_ns - self._overflow_ns > LOSS_AFTERMATH_NS:
                self._overflow_ns = 0
                for _, table in self._tables:
                    table.on_ring_loss(now_ns, now=False)
            if now_ns - self._swept_ns > SWEEP_NS:
                self._swept_ns = now_ns
                for _, table in self._tables:
                    table.sweep(now_ns)
            self._log_losses()
            reporter = self.reporter
            live = reporter.tap.ledger.live
            for seq in [seq for seq in reporter.arrivals if seq not in live]:
                del reporter.arrivals[seq]
            reporter.report()
            for timebase in self._timebases[1:]:
                timebase.resample()
            reporter.lag.note(now_ns, self._clock_error_ns())
        except Exception as exc:
            log.exception("event=watch_failed error=%r", str(exc))

    def _log_losses(self) -> None:
        """Log new losses of packets and, once per kind, connections that cannot be measured."""
        lost = sum(ring.lost for ring, _ in self._tables)
        if lost > self._logged_losses:
            log.warning(
                "event=packets_lost packets=%d hint=%r", lost - self._logged_losses, "raise watch.ring_bytes"
            )
            self._logged_losses = lost
        for kind, hint in UNFOLLOWED_HINTS.items():
            if kind in self.counts.connections and kind not in self._logged_kinds:
                self._logged_kinds.add(kind)
                log.warning("event=connection_not_followed kind=%s hint=%r further=counted", kind, hint)

    def _live_counts(self) -> dict[str, Any]:
        """Return the fields of RelayStatus whose values are determined only when the watcher reports."""
        sides = set().union(*(table.sides for _, table in self._tables))
        return {
            "connections": sum(len(table) for _, table in self._tables),
            "packets": {
                "captured": sum(ring.packets for ring, _ in self._tables),
                "lost": sum(ring.lost for ring, _ in self._tables),
            },
            "watched": dict(self.counts.connections),
            "missing_bytes": self.counts.missing_bytes,
            "side": sides.pop() if len(sides) == 1 else "mixed" if sides else "",
        }


def local_addresses() -> frozenset[bytes]:
    """Return the IPv4 and IPv6 addresses of this host, as the bytes in packets."""
    families = (socket.AF_INET, socket.AF_INET6)
    addresses = [a.address for known in psutil.net_if_addrs().values() for a in known if a.family in families]
    return pack_addresses(addresses)


def main() -> int:
    """Run until SIGTERM, or until the supervisor has died. Return the exit status."""
    uvloop.run(_run(begin_child(WatchSetup)))
    return 0


async def _run(setup: WatchSetup) -> None:
    loop = asyncio.get_running_loop()
    options = setup.options
    rings = [PacketRing(socket.socket(fileno=fd), options.ring_bytes) for fd in setup.packet_fds]
    watcher = Watcher(
        loop,
        options,
        rings,
        name=setup.name,
        tap_path=setup.tap_path,
        adapters=[AdapterClock(fd) for fd in setup.adapter_fds],
        local=local_addresses(),
    )
    watcher.reporter.side = setup.side
    stop = asyncio.Event()

    loop.add_signal_handler(signal.SIGTERM, stop.set)
    # Ctrl-C and a hang-up of the terminal reach the whole process group. Ignore them here: the supervisor
    # decides when this process ends.
    for number in (signal.SIGINT, signal.SIGHUP):
        loop.add_signal_handler(number, lambda: None)
    on_orphaned(loop, setup, stop.set)
    watcher.start()
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    log.info(
        "event=watch_ready name=%s interfaces=%s ports=%s",
        setup.name,
        ",".join(options.interfaces),
        ",".join(map(str, options.ports)),
    )
    await stop.wait()
    await watcher.close()

"""Channel of a vantage to the meter, with reports of its state: counters, event-loop lag, CPU, memory.

A `Reporter` holds the channel (`Tap`) of one event loop, on which the vantage sends its frames; the vantage
calls `report` twice a second. A relay process and a watcher have one each, and an application with the
middleware has one for each event loop.
"""

import asyncio
import gc
import logging
import os
import resource
import sys
from collections.abc import Callable
from typing import Any, Final, TypeVar

import msgspec

from llmtap import native
from llmtap.channel import Tap
from llmtap.channel.frames import Anchored, Frame, FrameKind, Hello
from llmtap.channel.status import RelayStatus
from llmtap.clock import Clock, resident_bytes
from llmtap.log import LogSetup, set_up
from llmtap.net.lag import PythonLagMeter
from llmtap.net.stream import Timebase
from llmtap.units import decode_special

STATUS_S: Final = 0.5
PROBE_NS: Final = 10_000_000
"""Time between two probes of the loop's lag while exchanges run. With 2 ms, a relay used 2 us more CPU time
for each chunk (paced load, 7 rounds)."""
SAMPLE_NS: Final = 50_000_000
"""Time between two samples of the clocks while exchanges run."""
PROBE_GRAIN_NS: Final = 1_000_000
"""Resolution of uvloop's timers, which may also fire early by this time. Only a longer delay is lag."""

log = logging.getLogger(__name__)


class ChildSetup(msgspec.Struct, kw_only=True):
    """Setup of a process, sent by the supervisor."""

    name: str
    tap_path: str
    log: LogSetup
    side: str = ""
    """Side of the gateway, as in `Hello.side`."""


S = TypeVar("S", bound=ChildSetup)


def begin_child(kind: type[S]) -> S:
    """Read the setup of this process from stdin, and prepare log and garbage collector."""
    setup = msgspec.json.decode(sys.stdin.buffer.readline(), type=kind, dec_hook=decode_special)
    set_up(setup.log)
    # Objects that exist now stay until the end, and the hot path makes no cycles, so collections can be rare.
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 50)
    return setup


def on_orphaned(loop: asyncio.AbstractEventLoop, setup: ChildSetup, end: Callable[[], None]) -> None:
    """Arrange that `end` is called when stdin closes, because the supervisor is then gone."""

    def on_supervisor_lost() -> None:
        loop.remove_reader(sys.stdin.fileno())
        log.error(
            "event=supervisor_lost child=%s hint='it ends after its exchanges: start llmtap again'",
            setup.name,
        )
        end()

    loop.add_reader(sys.stdin.fileno(), on_supervisor_lost)


class Reporter:
    """Channel of one event loop to the meter, and status reports about the process.

    Args:
        clock_name: `kernel`, `mono` or `packet`: source of the timestamps of reads.
        vantage: kind of vantage, as in Hello.
        live_counts: returns the fields of RelayStatus whose values are determined only at a report.
        on_word: called with each control word that the meter sends (a switch of the experiment).
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        path: str,
        tap_bytes: int,
        lag: PythonLagMeter,
        clock: Clock,
        *,
        name: str,
        clock_name: str = "mono",
        vantage: str = "relay",
        listen: str = "",
        guest: bool = False,
        live_counts: Callable[[], dict[str, Any]] = dict,
        on_word: Callable[[int], None] | None = None,
    ) -> None:
        self.name = name
        self.lag = lag
        """Meter of the event loop's delays."""
        self.now_ns = clock.mono_ns
        self.timebase = Timebase(clock, lag)
        self.tap = Tap(loop, path, tap_bytes, self._hello, on_word, self._new_anchor_frame)
        self.arrivals: dict[Any, int] = {}
        """By exchange under way: its arrival time."""
        self.counts = RelayStatus()
        """Counters since the start. `status` adds the other fields of a report to them."""
        self.draining = False
        """Whether the process accepts no more requests."""
        self.side = ""
        """Side of the gateway, as in `Hello.side`."""
        self.switch = 0
        """Latest switch word that the meter sent; 0: none. A restarted meter learns it from the relay."""
        self.turns = 0
        """Rounds of the event loop, counted by probes while exchanges run."""
        self._loop = loop
        self._sample_due_ns = 0
        """Time of the next comparison of the monotonic clock with the clock of kernel timestamps."""
        self._clock_name = clock_name
        self._vantage = vantage
        self._listen = listen
        self._guest = guest
        """Whether the process is an application with the middleware, not part of llmtap."""
        self._live_counts = live_counts
        """Returns counts that the status reports, such as open connections."""
        self._reported_anchor = self.timebase.anchor
        """Latest reading of both clocks that the meter has."""
        self._probe: asyncio.TimerHandle | None = None
        """Timer of the next probe of the event loop's delay."""
        self._probe_due_ns = 0
        """Time at which the probe of the event loop should run; later: the loop was busy."""

    def skip(self, rule: str) -> None:
        """Count a request that is not measured because it meets a rule."""
        skipped = self.counts.skipped
        skipped[rule] = skipped.get(rule, 0) + 1

    def on_begin(self, exchange: object, arrival_ns: int) -> None:
        """Register a running exchange, and start the probes of the loop's lag."""
        self.arrivals[exchange] = arrival_ns
        if self._probe is None:
            self.start_probe()

    def on_end(self, exchange: object, request_bytes: int, response_bytes: int) -> None:
        """Remove an exchange, and add its bytes to the totals."""
        self.arrivals.pop(exchange, None)
        self.counts.bytes_up += request_bytes
        self.counts.bytes_down += response_bytes

    def report(self) -> None:
        """Send the status; the caller calls it every STATUS_S."""
        self.timebase.resample()
        self.lag.forget_before(min(self.arrivals.values(), default=self.now_ns()))
        self.tap.status(self.status())

    def status(self) -> RelayStatus:
        """Return the status: gauges, and counters since the start. CPU and memory: of the whole process."""
        usage = resource.getrusage(resource.RUSAGE_SELF)
        tap = self.tap
        return msgspec.structs.replace(
            self.counts,
            t_ns=self.now_ns(),
            **tap.ledger.counts(),
            streams=len(self.arrivals),
            tap_pending_bytes=tap.pending_bytes,
            cpu_ns=int((usage.ru_utime + usage.ru_stime) * 1e9),
            rss_bytes=resident_bytes(),
            lag_ns_max=self.lag.take_max(),
            lag_buckets=self.lag.buckets,
            lag_sum_ns=self.lag.sum_ns,
            draining=self.draining,
            **self._live_counts(),
        )

    def stamp_error_since(self, t_ns: int) -> int:
        """Return the largest error since `t_ns` of the conversion of kernel timestamps; 0 without them."""
        return self.timebase.error_since(t_ns) if self._clock_name == "kernel" else 0

    # ---------------------------------------------------------------- the loop's lag

    def start_probe(self) -> None:
        """Probe the loop's lag after PROBE_NS, and again every PROBE_NS while exchanges run."""
        if self._probe is None:
            self._probe_due_ns = self.now_ns() + PROBE_NS
            self._probe = self._loop.call_later(PROBE_NS / 1e9, self._on_probe)

    def stop_probe(self) -> None:
        if self._probe is not None:
            self._probe.cancel()

    def _on_probe(self) -> None:
        """Note how late the event loop called this, and set the next probe."""
        now_ns = self.now_ns()
        self.turns += 1
        late_ns = max(0, now_ns - self._probe_due_ns - PROBE_GRAIN_NS)
        # With kernel timestamps, reads note their own lag, so a probe without delay adds no information.
        if late_ns or self._clock_name == "mono":
            self.lag.note(now_ns, late_ns)
        if self._clock_name == "kernel" and now_ns >= self._sample_due_ns:
            self._sample_due_ns = now_ns + SAMPLE_NS
            self.timebase.resample()
        self._probe = None
        if self.arrivals:
            self.start_probe()

    # ---------------------------------------------------------------- called by the channel

    def _hello(self) -> Hello:
        self.timebase.check()
        anchor = self._reported_anchor = self.timebase.anchor
        return Hello(
            relay=self.name,
            pid=os.getpid(),
            clock=self._clock_name,
            vantage=self._vantage,
            side=self.side,
            listen=self._listen,
            anchor_mono_ns=anchor.mono_ns,
            anchor_wall_ns=anchor.wall_ns,
            anchor_steps=self.timebase.steps,
            switch=self.switch,
            skipped=sum(self.counts.skipped.values()),
            guest=self._guest,
            implementation=native.NAME,
            implementation_reason=native.REASON,
        )

    def _new_anchor_frame(self) -> Frame | None:
        """Return a frame with the clock anchor if it has changed, else None. The caller must send it before
        the frames to which the new anchor applies."""
        timebase = self.timebase
        timebase.check()
        anchor, reported = timebase.anchor, self._reported_anchor
        if anchor is reported:
            return None
        self._reported_anchor = anchor
        if not self._guest:
            moved_ns = anchor.wall_ns - reported.to_wall_ns(anchor.mono_ns)
            log.warning(
                "event=wall_clock_moved relay=%s by_ms=%.3f steps=%d",
                self.name,
                moved_ns / 1e6,
                timebase.steps,
            )
        about = msgspec.json.encode(Anchored(steps=timebase.steps, since_ns=timebase.since_ns))
        return (FrameKind.ANCHOR, 0, anchor.mono_ns, anchor.wall_ns, about)

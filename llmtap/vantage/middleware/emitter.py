"""What the middleware of one process says to the meter: a relay's channel and ledger, without the relay.

An app that carries the middleware is one more relay to the meter: it says hello, numbers its exchanges
without gaps, and tells its counts twice a second. The channel is the relay's own (`tap/channel.py`):
bounded, and never waited for; what does not fit, or finds no meter, is dropped as whole exchanges, and
counted.

Nothing here raises into the app. What goes wrong in our own code costs the exchange (`middleware_error`), and
is logged once for each kind, without the error's text: that could quote a header.
"""

import asyncio
import logging
import os
import resource
import secrets
import traceback
from typing import Final

import msgspec

from llmtap import native
from llmtap.channel.channel import SOCKET_PATH_BYTES_MAX, Tap
from llmtap.channel.frames import Anchored, Frame, FrameKind, Hello, RelayStatus
from llmtap.clock import Clock, SystemClock
from llmtap.errors import ConfigError
from llmtap.memory import resident_bytes
from llmtap.net.lag import make_lag_meter
from llmtap.net.stream import Timebase

__all__ = ["TAP_BYTES", "Emitter", "Emitters", "mono_ns"]

TAP_BYTES: Final = 32 << 20
"""Most bytes of frames waiting for the meter, as for a relay (`relay.tap_bytes`)."""
TAP_BYTES_MIN: Final = 64 << 10
"""Half of it is for exchanges that run already, and a request head alone may have 64 KiB in most servers."""
STATUS_S: Final = 0.5
PROBE_S: Final = 0.01
"""How often the loop's lateness is looked for while exchanges run, as in a relay."""
PROBE_GRAIN_NS: Final = 1_000_000
DRAIN_S: Final = 2.0
"""How long the end of an app may wait for the meter's last acknowledgement, as a relay's does."""

log = logging.getLogger(__name__)
mono_ns = SystemClock.mono_ns


class Emitter:
    """One event loop's voice. `start` it on that loop; `close` it there, or never."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, path: str, tap_bytes: int, clock: Clock | None = None
    ) -> None:
        self.name = f"app-{secrets.token_hex(3)}-{os.getpid()}"
        self.closed = False
        self.bytes_up = 0
        self.bytes_down = 0
        self.turns = 0
        """Grows while exchanges run and the loop turns: what was awaited meanwhile had to be waited for."""
        # Stamps are of calls, not of reads: what a stalled loop makes late is the app's own answer. Only the
        # call itself may have waited, so there is nothing to be added for what two looks may overlook.
        self.lag = make_lag_meter(PROBE_GRAIN_NS)
        self._loop = loop
        self._timebase = Timebase(SystemClock() if clock is None else clock, self.lag)
        self._told_anchor = self._timebase.anchor
        self.tap = Tap(loop, path, tap_bytes, self._hello, news=self._anchor_news)
        self._arrivals: dict[object, int] = {}
        """Of the exchanges that run."""
        self._failures: dict[str, int] = {}
        self._draining = False
        self._report: asyncio.TimerHandle | None = None
        self._probe: asyncio.TimerHandle | None = None
        self._probe_due_ns = 0

    def start(self) -> None:
        """Looks for the meter, now and until it is there, and begins to report."""
        self.tap.connect()
        self._report = self._loop.call_later(STATUS_S, self._on_report)

    def began(self, exchange: object, arrival_ns: int) -> None:
        """An exchange runs."""
        self._arrivals[exchange] = arrival_ns
        if self._probe is None:
            self._start_probe()

    def ended(self, exchange: object, request_bytes: int, response_bytes: int) -> None:
        """An exchange is over."""
        self._arrivals.pop(exchange, None)
        self.bytes_up += request_bytes
        self.bytes_down += response_bytes

    def pass_unmeasured(self, reason: str) -> None:
        """Something passes that is not measured: it has a number all the same, and is counted."""
        ledger = self.tap.ledger
        ledger.drop(ledger.open(), reason)

    def drop(self, seq: int, reason: str) -> None:
        """Takes back an exchange that has begun."""
        self.tap.drop(seq, mono_ns(), reason)

    def failed(self, error: BaseException) -> None:
        """Our own code went wrong: counted, told once for each kind."""
        kind = type(error).__name__
        seen = self._failures.get(kind, 0)
        self._failures[kind] = seen + 1
        if not seen:
            told_failure(kind, error)

    async def close(self) -> None:
        """Says what is left, waits a moment for the meter to have it, and hangs up."""
        self.closed = self._draining = True
        for timer in (self._report, self._probe):
            if timer is not None:
                timer.cancel()
        self.tap.status(self.status())
        await self.tap.drain(DRAIN_S)
        self.tap.close()

    def status(self) -> RelayStatus:
        """This process now, and since it began to measure. CPU and memory are the whole app's."""
        usage = resource.getrusage(resource.RUSAGE_SELF)
        ledger = self.tap.ledger
        return RelayStatus(
            t_ns=mono_ns(),
            opened=ledger.opened,
            measured=ledger.measured,
            dropped=ledger.dropped,
            unsettled=ledger.unsettled,
            # Connections are the server's, and an app has no upstream that we know of.
            connections=0,
            streams=len(self._arrivals),
            upstream_idle=0,
            upstream_connects=0,
            upstream_reuses=0,
            accepted=0,
            refused={},
            tap_pending_bytes=self.tap.pending_bytes,
            cpu_ns=int((usage.ru_utime + usage.ru_stime) * 1e9),
            rss_bytes=resident_bytes(),
            lag_ns_max=self.lag.take_max(),
            lag_buckets=self.lag.buckets,
            lag_sum_ns=self.lag.sum_ns,
            bytes_up=self.bytes_up,
            bytes_down=self.bytes_down,
            draining=self._draining,
        )

    # ---------------------------------------------------------------- timers

    def _on_report(self) -> None:
        self._report = self._loop.call_later(STATUS_S, self._on_report)
        try:
            self._timebase.resample()
            self.lag.forget_before(min(self._arrivals.values(), default=mono_ns()))
            self.tap.status(self.status())
        except Exception as exc:
            self.failed(exc)

    def _start_probe(self) -> None:
        self._probe_due_ns = mono_ns() + int(PROBE_S * 1e9)
        self._probe = self._loop.call_later(PROBE_S, self._on_probe)

    def _on_probe(self) -> None:
        now_ns = mono_ns()
        self.turns += 1
        # Timers have a grain of 1 ms and may be early by it: only what exceeds it is known to be lateness.
        self.lag.note(now_ns, max(0, now_ns - self._probe_due_ns - PROBE_GRAIN_NS))
        if self._arrivals:
            self._start_probe()
        else:
            self._probe = None

    # ---------------------------------------------------------------- what the channel asks for

    def _hello(self) -> Hello:
        self._timebase.check()
        anchor = self._told_anchor = self._timebase.anchor
        return Hello(
            relay=self.name,
            pid=os.getpid(),
            clock="mono",
            anchor_mono_ns=anchor.mono_ns,
            anchor_wall_ns=anchor.wall_ns,
            anchor_steps=self._timebase.steps,
            guest=True,
            implementation=native.NAME,
            implementation_reason=native.REASON,
        )

    def _anchor_news(self) -> Frame | None:
        """The frame of a new anchor, once the wall clock was set."""
        timebase = self._timebase
        timebase.check()
        if timebase.anchor is self._told_anchor:
            return None
        anchor = self._told_anchor = timebase.anchor
        about = msgspec.json.encode(Anchored(steps=timebase.steps, since_ns=timebase.since_ns))
        return (int(FrameKind.ANCHOR), 0, anchor.mono_ns, anchor.wall_ns, about)


class Emitters:
    """An emitter for each event loop that the app runs on: nearly always one.

    Made where the app is put together, before there is a loop; the first request of a loop makes its emitter.
    """

    def __init__(self, socket: str, tap_bytes: int) -> None:
        """Raises ConfigError: what a user has set wrong is told at the start, and never later."""
        if not socket:
            raise ConfigError("socket", "is empty", "the path given to `llmtap meter --listen-socket`")
        if len(os.fsencode(socket)) > SOCKET_PATH_BYTES_MAX:
            raise ConfigError("socket", f"is longer than {SOCKET_PATH_BYTES_MAX} bytes, the system's limit")
        if tap_bytes < TAP_BYTES_MIN:
            raise ConfigError("tap_bytes", f"must be at least {TAP_BYTES_MIN}")
        self._socket = socket
        self._tap_bytes = tap_bytes
        self._by_loop: dict[asyncio.AbstractEventLoop, Emitter] = {}
        self._failed = False

    def here(self) -> Emitter | None:
        """The running loop's; None where none can be had, which is logged once. Never raises."""
        try:
            loop = asyncio.get_running_loop()
            emitter = self._by_loop.get(loop)
            if emitter is None or emitter.closed:
                emitter = Emitter(loop, self._socket, self._tap_bytes)
                emitter.start()
                self._by_loop = {
                    **{known: one for known, one in self._by_loop.items() if not known.is_closed()},
                    loop: emitter,
                }
            return emitter
        except Exception as exc:
            if not self._failed:
                self._failed = True
                told_failure(type(exc).__name__, exc)
            return None

    async def close(self) -> None:
        """The running loop's emitter says its last words. Never raises."""
        try:
            emitter = self._by_loop.pop(asyncio.get_running_loop(), None)
            if emitter is not None:
                await emitter.close()
        except Exception as exc:
            told_failure(type(exc).__name__, exc)


def told_failure(kind: str, error: BaseException) -> None:
    """One line in the app's log: what and where, and nothing of the error's own text."""
    frames = traceback.extract_tb(error.__traceback__)
    where = f"{os.path.basename(frames[-1].filename)}:{frames[-1].lineno}" if frames else "?"
    log.warning("event=middleware_error kind=%s where=%s further=counted", kind, where)

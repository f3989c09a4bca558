"""How late this process reads what it is sent: the uncertainty of the stamps of its exchanges.

A timer says how late the loop is; with kernel stamps, each read says for itself how long it waited, and the
timer only what a read cannot tell. See `net/lag.py`.
"""

import asyncio
from collections.abc import Callable
from typing import Final

from llmtap.clock import SystemClock
from llmtap.net.lag import make_lag_meter
from llmtap.net.stream import Timebase

__all__ = ["Lateness"]

PROBE_NS: Final = 10_000_000
GRAIN_NS: Final = 1_100_000
"""The loop's timers have a grain of 1 ms: only what exceeds it is known to be lateness."""
KERNEL_FLOOR_NS: Final = 50_000
"""How well the kernel's clock is mapped to ours, and to spare."""
CHECKS: Final = 5
"""Probes between two looks at the wall clock: each 50 ms."""

mono_ns = SystemClock.mono_ns


class Lateness:
    """Of one loop, from now to `close`."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        *,
        kernel: bool,
        each: Callable[[int], None] | None = None,
    ) -> None:
        """`kernel`: its connections carry the kernel's stamps. `each` is called with the time at each probe,
        every 10 ms."""
        self._loop = loop
        self._kernel = kernel
        self._each = each
        blind_ns = PROBE_NS + GRAIN_NS
        self.meter = (
            make_lag_meter(KERNEL_FLOOR_NS, blind_ns=blind_ns, blind_from_ns=blind_ns)
            if kernel
            else make_lag_meter(GRAIN_NS, blind_ns=blind_ns, turns=2)
        )
        self.timebase = Timebase(SystemClock(), self.meter)
        self._count = 0
        self._start()

    def worst_since(self, t_ns: int) -> int:
        """The longest that a byte may have waited unread since then."""
        now_ns = mono_ns()
        # The loop reads its sockets before it looks at its timers: after a stall the probe is still to come.
        late_ns = now_ns - self._due_ns - GRAIN_NS
        if late_ns > 0:
            self.meter.note(now_ns, late_ns)
        return self.meter.worst_since(t_ns)

    def close(self) -> None:
        self._timer.cancel()

    def _start(self) -> None:
        self._due_ns = mono_ns() + PROBE_NS
        self._timer = self._loop.call_later(PROBE_NS / 1e9, self._probe)

    def _probe(self) -> None:
        now_ns = mono_ns()
        late_ns = now_ns - self._due_ns
        if not self._kernel or late_ns > GRAIN_NS:
            self.meter.note(now_ns, max(0, late_ns - GRAIN_NS))
        self._count += 1
        if self._count % CHECKS == 0:
            self.timebase.resample()
        if self._each is not None:
            self._each(now_ns)
        self._start()

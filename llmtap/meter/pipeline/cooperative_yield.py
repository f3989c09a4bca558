"""Interrupt the meter's work on a batch, so that relays on the same CPU and the event loop can run."""

import os
from collections.abc import Callable, Iterable, Iterator
from typing import Final

from llmtap.channel.frames import Frame

TURN_NS: Final = 50_000
"""Time between two yields, about as long as a relay works on an event: its events then wait no longer."""
LONG_YIELD_NS: Final = 2_000_000
"""If a yield takes longer, a process that never sleeps uses the CPU: do not yield again for NO_YIELD_NS."""
NO_YIELD_NS: Final = 100_000_000
"""Time without yields after a long yield, or after a batch that had waited for longer than BEHIND_NS."""
BEHIND_NS: Final = 50_000_000
"""Age of a batch above which the meter is behind. Relays send a batch every 10 ms (`llmtap/channel/`)."""
LOOP_TURN_NS: Final = 10_000_000
"""Time of work on a batch before the event loop runs again. An answer of the admin port takes five rounds."""
CPU_EVERY_NS: Final = 1_000_000
"""Minimum time between two readings of the thread's CPU clock, a system call of about 0.5 us."""


class CooperativeYield:
    """Offers the CPU to the relays between short turns of work, and measures the CPU time of long frames.

    On the same CPU, Linux (EEVDF) often runs a relay only at the next tick, up to 4 ms later. A nice value
    of the meter does not change this. So the meter calls `sched_yield` between frames. If a yield took long,
    or the meter is behind, it does not yield for NO_YIELD_NS.
    """

    __slots__ = (
        "_cpu_at_read_ns",
        "_cpu_read_ns",
        "_loop_due_ns",
        "_mono_ns",
        "_no_yield_until_ns",
        "_turn_start_ns",
        "_yield_cpu",
        "cpu_ns",
        "is_behind",
        "loop_is_due",
    )

    def __init__(
        self,
        mono_ns: Callable[[], int],
        give: Callable[[], None] = os.sched_yield,
        cpu_ns: Callable[[], int] = lambda: 0,
    ) -> None:
        self._mono_ns = mono_ns
        """Monotonic clock."""
        self.cpu_ns = cpu_ns
        """CPU time of this process."""
        self._cpu_read_ns = 0  # time of the latest reading of the CPU clock
        self._cpu_at_read_ns = 0  # CPU time at the latest reading
        self._yield_cpu = give
        """Function that offers the CPU to other processes."""
        self._turn_start_ns = 0
        self._no_yield_until_ns = 0
        """No yield before this time, because one costs CPU time itself."""
        self._loop_due_ns = 0
        """Time at which the event loop must run, so the turn ends."""
        self.loop_is_due = False
        """Whether the work in this round of the event loop has taken LOOP_TURN_NS."""
        self.is_behind = False
        """Whether the latest batch waited for longer than BEHIND_NS."""

    def begin_turn(self) -> None:
        """Begin a round of the event loop, in which work can take LOOP_TURN_NS."""
        self.loop_is_due = False
        self.restart()
        self._loop_due_ns = self._turn_start_ns + LOOP_TURN_NS

    def restart(self) -> None:
        """Begin a new measurement; CPU time until now is not charged to any frame."""
        self._turn_start_ns = self._cpu_read_ns = self._mono_ns()
        self._cpu_at_read_ns = self.cpu_ns()

    def pace(
        self, frames: Iterable[Frame], last_ns: int | None, charge: Callable[[Frame, int], None] | None = None
    ) -> Iterator[Frame]:
        """Yield the frames of a batch, and offer the CPU to relays in between. `last_ns`: time of the last
        frame of the batch; None if it is not known.

        `charge` is called with a frame that took longer than CPU_EVERY_NS, and its CPU time, which can
        include up to CPU_EVERY_NS of earlier frames.
        """
        self.restart()
        now_ns = self._turn_start_ns
        self.is_behind = last_ns is not None and now_ns - last_ns > BEHIND_NS
        if self.is_behind:
            self._no_yield_until_ns = now_ns + NO_YIELD_NS
        for frame in frames:
            yield frame
            now_ns = self.pause()
            if now_ns - self._cpu_read_ns > CPU_EVERY_NS:
                cpu_ns = self.cpu_ns()
                used_ns = cpu_ns - self._cpu_at_read_ns
                self._cpu_read_ns, self._cpu_at_read_ns = now_ns, cpu_ns
                if charge is not None:
                    charge(frame, used_ns)

    def pause(self) -> int:
        """Yield the CPU if the turn has taken TURN_NS. Return the monotonic time before the yield."""
        now_ns = self._mono_ns()
        if now_ns > self._loop_due_ns:
            self.loop_is_due = True
        if now_ns - self._turn_start_ns > TURN_NS and now_ns >= self._no_yield_until_ns:
            self._yield_cpu()
            self._turn_start_ns = back_ns = self._mono_ns()
            if back_ns - now_ns > LONG_YIELD_NS:
                self._no_yield_until_ns = back_ns + NO_YIELD_NS
        return now_ns

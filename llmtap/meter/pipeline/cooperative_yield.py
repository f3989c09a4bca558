"""Short turns on the CPU: the meter offers it to the relays while it works.

A relay that shares our CPU, and wakes just after it went to sleep, does not always get the CPU from us at
once: it has had more than its share, if only by microseconds, and Linux (EEVDF) looks again at the next tick,
up to 4 ms later, whatever our niceness. So we ask it to look: between frames, and between the steps of an
exchange's end.

Whoever yields gives up what is left of its slice, and beside a relay that never sleeps that would be
everything. So a meter that was kept waiting for long, or is behind with its frames, offers nothing for a
while, and takes the share that its niceness leaves it.
"""

import os
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final, TypeAlias

__all__ = ["Charge", "CooperativeYield"]

_Frame: TypeAlias = tuple[int, int, int, int, Any]
Charge = Callable[[_Frame, int], None]
"""`(frame, cpu_ns)`: CPU time of the thread from the last reading of that clock to the end of this frame."""

TURN_NS: Final = 50_000
"""About as long as a relay takes for an event, so that it waits for us no longer than for itself."""
AWAY_NS: Final = 2_000_000
"""Who offers the CPU and gets it back later than this shares it with one that has no end of work."""
INSIST_NS: Final = 100_000_000
"""For so long it is not offered then."""
BEHIND_NS: Final = 50_000_000
"""Frames come every 10 ms (`tap/channel.py`); a batch as old as five of those has waited for the CPU."""


CPU_EVERY_NS: Final = 1_000_000
"""The thread's CPU clock is read at most so often: a reading is a system call of about 0.5 us."""


class CooperativeYield:
    """Cuts the work of one thread into turns, and measures the CPU time of frames that take long."""

    __slots__ = (
        "_cpu_ns", "_cpu_since_ns", "_give", "_insist_until_ns", "_mono_ns", "_read_ns", "_since_ns",
        "behind",
    )  # fmt: skip

    def __init__(
        self,
        mono_ns: Callable[[], int],
        give: Callable[[], None] = os.sched_yield,
        cpu_ns: Callable[[], int] = lambda: 0,
    ) -> None:
        self._mono_ns = mono_ns
        self._cpu_ns = cpu_ns
        self._read_ns = 0  # when the CPU clock was read
        self._cpu_since_ns = 0  # its reading then
        self._give = give
        self._since_ns = 0
        self._insist_until_ns = 0
        self.behind = False
        """Whether the last batch was old."""

    def over(
        self, frames: Iterable[_Frame], last_ns: int | None, charge: Charge | None = None
    ) -> Iterator[_Frame]:
        """Yield the frames of a batch, which the caller works on as they come.

        `charge` is called with a frame that took longer than CPU_EVERY_NS, and the CPU time that it used. The
        time may include frames that were worked on up to CPU_EVERY_NS before, and token events that the
        compiled `FrameBatch` recognised: at most 256 of them, or 64 KiB.

        Args:
            last_ns: the stamp of the batch's last frame; None for an empty one.
        """
        now_ns = self._since_ns = self._read_ns = self._mono_ns()
        self._cpu_since_ns = self._cpu_ns()
        self.behind = last_ns is not None and now_ns - last_ns > BEHIND_NS
        if self.behind:
            self._insist_until_ns = now_ns + INSIST_NS
        for frame in frames:
            yield frame
            now_ns = self.pause()
            if now_ns - self._read_ns > CPU_EVERY_NS:
                cpu_ns = self._cpu_ns()
                used_ns = cpu_ns - self._cpu_since_ns
                self._read_ns, self._cpu_since_ns = now_ns, cpu_ns
                if charge is not None:
                    charge(frame, used_ns)

    def pause(self) -> int:
        """Let others run if the turn is over. Returns the time."""
        now_ns = self._mono_ns()
        if now_ns - self._since_ns > TURN_NS and now_ns >= self._insist_until_ns:
            self._give()
            self._since_ns = back_ns = self._mono_ns()
            if back_ns - now_ns > AWAY_NS:
                self._insist_until_ns = back_ns + INSIST_NS
        return now_ns

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
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

__all__ = ["Turns"]

TURN_NS: Final = 50_000
"""About as long as a relay takes for an event, so that it waits for us no longer than for itself."""
AWAY_NS: Final = 2_000_000
"""Who offers the CPU and gets it back later than this shares it with one that has no end of work."""
INSIST_NS: Final = 100_000_000
"""For so long it is not offered then."""
BEHIND_NS: Final = 50_000_000
"""Frames come every 10 ms (`tap/channel.py`); a batch as old as five of those has waited for the CPU."""


class Turns:
    """Cuts the work of one thread into turns."""

    __slots__ = ("_give", "_insist_until_ns", "_mono_ns", "_since_ns", "behind")

    def __init__(self, mono_ns: Callable[[], int], give: Callable[[], None] = os.sched_yield) -> None:
        self._mono_ns = mono_ns
        self._give = give
        self._since_ns = 0
        self._insist_until_ns = 0
        self.behind = False
        """Whether the last batch was old."""

    def over(
        self, frames: Sequence[tuple[int, int, int, int, Any]]
    ) -> Iterator[tuple[int, int, int, int, Any]]:
        """The frames of a batch, which the caller works on as they come."""
        now_ns = self._since_ns = self._mono_ns()
        self.behind = bool(frames) and now_ns - frames[-1][2] > BEHIND_NS
        if self.behind:
            self._insist_until_ns = now_ns + INSIST_NS
        for frame in frames:
            yield frame
            self.pause()

    def pause(self) -> None:
        """A good moment to let others run; they do where the turn is over."""
        now_ns = self._mono_ns()
        if now_ns - self._since_ns > TURN_NS and now_ns >= self._insist_until_ns:
            self._give()
            self._since_ns = back_ns = self._mono_ns()
            if back_ns - now_ns > AWAY_NS:
                self._insist_until_ns = back_ns + INSIST_NS

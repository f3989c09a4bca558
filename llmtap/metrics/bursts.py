"""Bursts: events that were held back and came together. The mark of an output filter, or of a buffer.

A burst is at least `EVENTS_MIN` events that carry output, the first of them after a hold, the rest within
`SPREAD_NS` of the first. A hold is a gap of at least `HOLD_NS` that is also at least `HOLD_MEDIANS` times the
median gap of the same answer, so that a slow but steady stream holds nothing. The wait before the first
event is TTFT and no hold; what comes in one piece at the end shows in the events per read.

The numbers are ours: no source defines the term.
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

__all__ = ["EVENTS_MIN", "HOLD_MEDIANS", "HOLD_NS", "NO_BURSTS", "SPREAD_NS", "Bursts", "bursts_of"]

EVENTS_MIN: Final = 3
"""Fewer than that come together by chance, in one segment of TCP."""
SPREAD_NS: Final = 1_000_000
"""No engine makes tokens this fast; a write of many events takes less."""
HOLD_NS: Final = 50_000_000
"""A shorter wait is no more than one token of a slow engine, or a 20 tokens/s reader's time for one."""
HOLD_MEDIANS: Final = 5


@dataclass(frozen=True, slots=True)
class Bursts:
    """The bursts of one answer."""

    count: int
    events: int
    """Events in them."""
    hold_max_ns: int | None
    """The longest hold before a burst."""


NO_BURSTS: Final = Bursts(0, 0, None)


def bursts_of(times_ns: Sequence[int], gaps_ns: Sequence[int], gap_max_ns: int) -> Bursts:
    """The bursts among the events that carry output.

    Args:
        times_ns: their stamps, ascending. gaps_ns: the n - 1 gaps between them; gap_max_ns: the longest.
    """
    if gap_max_ns < HOLD_NS or len(times_ns) <= EVENTS_MIN:
        return NO_BURSTS
    least_ns = max(HOLD_NS, HOLD_MEDIANS * sorted(gaps_ns)[(len(gaps_ns) - 1) // 2])
    count = events = hold_max_ns = 0
    for i, gap_ns in enumerate(gaps_ns, 1):
        if gap_ns >= least_ns:
            together = bisect_right(times_ns, times_ns[i] + SPREAD_NS, i) - i
            if together >= EVENTS_MIN:
                count += 1
                events += together
                hold_max_ns = max(hold_max_ns, gap_ns)
    return Bursts(count, events, hold_max_ns) if count else NO_BURSTS

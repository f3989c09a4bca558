"""Convert the times of two vantages to one clock, or bound the offset between their clocks.

Captures of one host both have times of the host's monotonic clock (`use_monotonic_clock`). For two hosts, the
traffic bounds the offset (`offset_from_traffic`): a request cannot reach the back before the front has sent
it, and a token cannot reach the front before the back has it.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from typing import Final

import numpy as np

from llmtap.exchange.exchange import Exchange, Timeline

SAME_HOST_NS: Final = 5_000_000
"""Largest difference between the boot times (wall clock minus monotonic clock) that two relays of one host
report. It is not 0, because a relay corrects its wall clock only if it is 1 ms off. Two hosts do not boot
within 5 ms of each other."""
_TIME_FIELDS: Final = tuple(
    field.name for field in fields(Timeline) if field.name.endswith("_ns") and field.name != "paused_ns"
)
"""Fields of a timeline that are times, not durations."""


@dataclass(frozen=True, slots=True)
class VantageOffset:
    """Clock of the back vantage minus clock of the front vantage. The true offset differs from `offset_ns` by
    at most `uncertainty_ns`."""

    offset_ns: int = 0
    uncertainty_ns: int = 0


SAME_CLOCK: Final = VantageOffset()


def use_monotonic_clock(fronts: Sequence[Exchange], backs: Sequence[Exchange]) -> bool:
    """Convert the timelines of exchanges that were read from captures to the host's monotonic clock.

    Return False, and change nothing, if the two captures are not of one host.
    """
    if not fronts or not backs:
        return False
    boot_times_ns: list[set[int]] = []
    for exchanges in (fronts, backs):
        times_ns = {
            None if x.arrival_mono_ns is None else x.arrival_wall_ns - x.arrival_mono_ns for x in exchanges
        }
        if None in times_ns:
            return False
        boot_times_ns.append({time_ns for time_ns in times_ns if time_ns is not None})
    front_boots_ns, back_boots_ns = boot_times_ns
    if not any(abs(a - b) <= SAME_HOST_NS for a in front_boots_ns for b in back_boots_ns):
        return False
    for x in (*fronts, *backs):
        if x.arrival_mono_ns is not None:
            _shift(x, x.arrival_mono_ns - x.timeline.arrival_ns)
    return True


def _shift(x: Exchange, by_ns: int) -> None:
    """Add `by_ns` to all times of the exchange."""
    t = x.timeline
    for name in _TIME_FIELDS:
        time_ns = getattr(t, name)
        if time_ns is not None:
            setattr(t, name, time_ns + by_ns)
    if t.events.t_ns:
        times_ns = np.frombuffer(t.events.t_ns, np.int64)
        times_ns += by_ns  # This changes the event log itself, because frombuffer() does not copy it.


def offset_from_traffic(pairs: Iterable[tuple[Exchange, Exchange]]) -> VantageOffset | None:
    """Return the offset between the clocks, bounded by pairs (front, delivered attempt at the back).

    No event can precede its cause, so each pair bounds the offset. The result is the middle of the interval
    of possible offsets; None if the interval has no lower or no upper bound. If no offset satisfies all
    pairs, for example because a clock drifted, the uncertainty includes all bounds.
    """
    lows: list[int] = []
    highs: list[int] = []
    for front, back in pairs:
        error_ns = front.uncertainty_ns + back.uncertainty_ns
        sent_ns = front.timeline.submit_ns
        if sent_ns is not None:
            highs.append(back.timeline.arrival_ns - sent_ns + error_ns)
        for name in ("first_content_ns", "response_end_ns"):
            back_ns, front_ns = getattr(back.timeline, name), getattr(front.timeline, name)
            if back_ns is not None and front_ns is not None:
                lows.append(back_ns - front_ns - error_ns)
    if not lows or not highs:
        return None
    low_ns, high_ns = max(lows), min(highs)
    return VantageOffset((low_ns + high_ns) // 2, (abs(high_ns - low_ns) + 1) // 2)

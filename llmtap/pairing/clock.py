"""Bring the exchanges of two vantages to one clock, or bound the offset between their clocks.

Captures of one host have the host's monotonic clock in common (`use_monotonic_clock`). For two hosts, the
traffic itself bounds the offset (`offset_from_traffic`): a request cannot reach the back before the front has
sent it, and a token cannot reach the front before the back has it.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from typing import Final

import numpy as np

from llmtap.exchange.exchange import Exchange, Timeline

SAME_HOST_NS: Final = 5_000_000
"""Largest difference between the boot times (wall clock minus monotonic clock) of two relays of one host,
since a relay corrects its wall clock only if it is 1 ms off. Two hosts do not boot within 5 ms of each
other."""
_POINTS: Final = tuple(
    field.name for field in fields(Timeline) if field.name.endswith("_ns") and field.name != "paused_ns"
)
"""Fields of a timeline that are times, not durations."""


@dataclass(frozen=True, slots=True)
class VantageOffset:
    """Clock of the back vantage minus clock of the front vantage. The true offset is at most
    `uncertainty_ns` away."""

    offset_ns: int = 0
    uncertainty_ns: int = 0


SAME_CLOCK: Final = VantageOffset()


def use_monotonic_clock(fronts: Sequence[Exchange], backs: Sequence[Exchange]) -> bool:
    """Change the timelines of exchanges read from captures to the monotonic clock, if all are of one host.

    Return whether they are of one host; if not, nothing is changed.
    """
    if not fronts or not backs:
        return False
    booted_ns: list[set[int]] = []
    for exchanges in (fronts, backs):
        dates = {
            None if x.arrival_mono_ns is None else x.arrival_wall_ns - x.arrival_mono_ns for x in exchanges
        }
        if None in dates:
            return False
        booted_ns.append({date for date in dates if date is not None})
    front_dates, back_dates = map(sorted, booted_ns)
    if not any(abs(a - b) <= SAME_HOST_NS for a in front_dates for b in back_dates):
        return False
    for x in (*fronts, *backs):
        if x.arrival_mono_ns is not None:
            _shift(x, x.arrival_mono_ns - x.timeline.arrival_ns)
    return True


def _shift(x: Exchange, by_ns: int) -> None:
    """Add `by_ns` to all times of the exchange."""
    t = x.timeline
    for name in _POINTS:
        at_ns = getattr(t, name)
        if at_ns is not None:
            setattr(t, name, at_ns + by_ns)
    if t.events.t_ns:
        stamps = np.frombuffer(t.events.t_ns, np.int64)
        stamps += by_ns


def offset_from_traffic(pairs: Iterable[tuple[Exchange, Exchange]]) -> VantageOffset | None:
    """Return the offset between the clocks, bounded by pairs of a front and its delivered back: no event may
    precede its cause. It is the middle of the possible interval; None if the pairs do not bound both sides.

    If no offset fits all pairs, for example because a clock drifted, the uncertainty includes all bounds.
    """
    lows: list[int] = []
    highs: list[int] = []
    for front, back in pairs:
        error_ns = front.uncertainty_ns + back.uncertainty_ns
        sent_ns = front.timeline.submit_ns
        if sent_ns is not None:
            highs.append(back.timeline.arrival_ns - sent_ns + error_ns)
        for name in ("first_content_ns", "response_end_ns"):
            there_ns, here_ns = getattr(back.timeline, name), getattr(front.timeline, name)
            if there_ns is not None and here_ns is not None:
                lows.append(there_ns - here_ns - error_ns)
    if not lows or not highs:
        return None
    low_ns, high_ns = max(lows), min(highs)
    return VantageOffset((low_ns + high_ns) // 2, (abs(high_ns - low_ns) + 1) // 2)

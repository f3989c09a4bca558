"""Energy from samples of power, over a window of time.

Between two samples power is taken to go in a straight line (the trapezoid rule), unless they are so far
apart that nobody knows what it did. Before the first and after the last it is held, for as long as two
samples may be apart. What no sample speaks for is left out of the energy and of the time that averages
divide by, and is told.

Source: seed 003, "System Metrics": power at 1 Hz, trapezoids over the window of each request or batch;
average power is total joules / total seconds.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

__all__ = ["GAP_NS_MAX", "Energy", "average_power_w", "energy_of", "joules_per_token"]

GAP_NS_MAX: Final = 3_000_000_000
"""Three samples at 1 Hz: one may fail and one be late, and power is still known."""


@dataclass(frozen=True, slots=True)
class Energy:
    """What was used in a window."""

    joules: float
    known_ns: int
    """The part of the window that samples speak for."""
    missing_ns: int = 0
    """The rest of it: above 0, `joules` is too small."""


def energy_of(
    times_ns: Sequence[int],
    power_w: Sequence[float | None],
    *,
    from_ns: int | None = None,
    to_ns: int | None = None,
    gap_ns_max: int = GAP_NS_MAX,
) -> Energy | None:
    """Energy between two moments, by default those of the first and the last sample.

    `times_ns` rises; a sample of None is one that failed, as if it were not there. A single sample is held on
    both sides of it. None when no sample is near enough to the window to say anything.
    """
    assert len(times_ns) == len(power_w), "a power for each time"
    known = [(t_ns, power) for t_ns, power in zip(times_ns, power_w, strict=True) if power is not None]
    if not known:
        return None
    (first_ns, first_w), (last_ns, last_w) = known[0], known[-1]
    from_ns = first_ns if from_ns is None else from_ns
    to_ns = last_ns if to_ns is None else to_ns
    lines = [
        (first_ns - gap_ns_max, first_w, first_ns, first_w),
        *((t_ns, watt, u_ns, next_w) for (t_ns, watt), (u_ns, next_w) in pairwise(known)),
        (last_ns, last_w, last_ns + gap_ns_max, last_w),
    ]
    joules, known_ns = 0.0, 0
    for t_ns, watt, u_ns, next_w in lines:
        assert t_ns <= u_ns, "samples are in order of time"
        begin_ns, end_ns = max(t_ns, from_ns), min(u_ns, to_ns)
        if begin_ns >= end_ns or u_ns - t_ns > gap_ns_max:
            continue
        slope = (next_w - watt) / (u_ns - t_ns)
        middle_ns = (begin_ns + end_ns) / 2
        joules += (watt + slope * (middle_ns - t_ns)) * (end_ns - begin_ns) / 1e9
        known_ns += end_ns - begin_ns
    if not known_ns:
        return None
    return Energy(joules, known_ns, to_ns - from_ns - known_ns)


def average_power_w(windows: Iterable[Energy]) -> float | None:
    """All joules / all seconds known of, in W; None when there are none. Windows do not weigh the same."""
    joules, known_ns = 0.0, 0
    for window in windows:
        joules += window.joules
        known_ns += window.known_ns
    return joules / (known_ns / 1e9) if known_ns else None


def joules_per_token(joules: float | None, tokens: int | None) -> float | None:
    """Energy / tokens of the same window; None when either is unknown or there was no token."""
    return None if joules is None or not tokens else joules / tokens

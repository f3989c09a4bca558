"""A run second by second: requests that were asked for, sent and ended, and how many were in flight.

Pure. The last second is a part of one as a rule; its counts are what they are, and not scaled up.
"""

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from typing import Any, Final

from llmtap.units import NS_PER_S, to_seconds

__all__ = ["PERIODS_MAX", "timeline_of"]

PERIODS_MAX: Final = 10_000
"""Nearly three hours of seconds, some 200 KB of JSON. Of a longer run a period is several seconds."""


def timeline_of(
    sent_ns: Sequence[int],
    ended_ns: Sequence[int] | None,
    *,
    began_ns: int,
    until_ns: int,
    planned_ns: Sequence[int] = (),
) -> dict[str, Any]:
    """The run from `began_ns` to `until_ns` as public JSON: `period` in seconds, and a value for each.

    Args:
        sent_ns: when each request was sent, in any order, on the clock of `began_ns`.
        ended_ns: when each of these ended; None where that is not known, and then `ended` and `in_flight`
            are null.
        planned_ns: offsets, ascending, at which requests were to be sent; none: `asked` is null.

    `in_flight` is the most that were under way at one moment of the period.
    """
    span_ns = max(0, until_ns - began_ns)
    period_ns = NS_PER_S * max(1, -(-span_ns // (PERIODS_MAX * NS_PER_S)))
    n = max(1, -(-span_ns // period_ns))

    def counted(times_ns: Iterable[int]) -> list[int]:
        counts = [0] * n
        for t_ns in times_ns:
            counts[min(n - 1, max(0, (t_ns - began_ns) // period_ns))] += 1
        return counts

    told: dict[str, Any] = {
        "period": to_seconds(period_ns),
        "t": [to_seconds(i * period_ns) for i in range(n)],
        "asked": None,
        "sent": counted(sent_ns),
        "ended": None,
        "in_flight": None,
    }
    if planned_ns:
        # What was planned behind the end of a run that was stopped was asked of nobody.
        within = planned_ns[: bisect_left(planned_ns, span_ns)] if span_ns < planned_ns[-1] else planned_ns
        told["asked"] = counted(began_ns + offset_ns for offset_ns in within)
    if ended_ns is not None:
        ended = sorted(ended_ns)
        told["ended"] = counted(ended)
        told["in_flight"] = _most(sorted(sent_ns), ended, began_ns, period_ns, n)
    return told


def _most(
    sent_ns: Sequence[int], ended_ns: Sequence[int], began_ns: int, period_ns: int, periods: int
) -> list[int]:
    """The most under way in each period. Both columns ascend; one that ends as another begins overlaps it."""
    most, level, begun, over = [], 0, 0, 0
    for period in range(periods):
        until_ns = began_ns + (period + 1) * period_ns
        last = period == periods - 1
        top = level
        while begun < len(sent_ns) and (last or sent_ns[begun] < until_ns):
            while over < len(ended_ns) and ended_ns[over] < sent_ns[begun]:
                level, over = level - 1, over + 1
            level, begun = level + 1, begun + 1
            top = max(top, level)
        while over < len(ended_ns) and ended_ns[over] < until_ns:
            level, over = level - 1, over + 1
        most.append(top)
    return most

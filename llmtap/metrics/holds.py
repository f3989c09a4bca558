"""Figures of a stream whose client reads slowly: as delivered to the client, and of the server alone.

While the client's socket takes no bytes, the relay does not read from the upstream: it holds the stream
(`Timeline.holds`). So the times of later chunks, `tbc_max` and `tpot` include time that the client caused.
The figures as delivered use the end of a hold as the time of a chunk that arrived during the hold. The
figures of the server do not include the holds. They are lower bounds, because it is unknown which chunks the
server would have sent during a hold.
"""

from collections.abc import Sequence
from itertools import pairwise

from llmtap.exchange.exchange import Exchange
from llmtap.metrics.latency import Measured, output_times_ns


def held_figures(x: Exchange, m: Measured) -> dict[str, object] | None:
    """Return public JSON on a stream whose client read slowly, in seconds; None if the stream was not held.

    A figure is None if it does not apply, or if the times of some holds are unknown.
    """
    t = x.timeline
    if not t.paused_ns:
        return None
    holds = t.holds
    delivered: list[int] = []
    gap_max_ns: int | None = None
    tpot_delivered: float | None = None
    tpot_server: float | None = None
    times = output_times_ns(t.events)
    if len(times) > 1 and sum(holds[1::2]) - sum(holds[::2]) == t.paused_ns:
        delivered = delivered_times_ns(times, holds)
        gaps = server_gaps_ns(times, holds)
        gap_max_ns, span_ns = max(gaps), times[-1] - times[0]
        if m.tpot_ns is not None and span_ns:
            # The number of tokens is the same, so TPOT is proportional to the time from first to last token.
            tpot_delivered = m.tpot_ns * (delivered[-1] - delivered[0]) / span_ns
            tpot_server = m.tpot_ns * sum(gaps) / span_ns
    return {
        "pauses": len(holds) // 2,
        "tbc_max_delivered": _seconds(max((b - a for a, b in pairwise(delivered)), default=None)),
        "tbc_max_server": _seconds(gap_max_ns),
        "tpot_delivered": _seconds(tpot_delivered),
        "tpot_server": _seconds(tpot_server),
    }


def delivered_times_ns(times_ns: Sequence[int], holds: Sequence[int]) -> list[int]:
    """Return the times at which chunks could be delivered: if a chunk came during a hold, the hold's end.

    `times_ns`: times of the chunks, ascending. `holds`: start and end of each hold in turn, ascending.
    """
    out, hold = [], 0
    for t_ns in times_ns:
        while hold < len(holds) and holds[hold + 1] <= t_ns:
            hold += 2
        out.append(holds[hold + 1] if hold < len(holds) and holds[hold] < t_ns else t_ns)
    return out


def server_gaps_ns(times_ns: Sequence[int], holds: Sequence[int]) -> list[int]:
    """Return the gaps between chunks, less the holds within them (arguments as in `delivered_times_ns`)."""
    gaps, hold = [], 0
    for from_ns, to_ns in pairwise(times_ns):
        while hold < len(holds) and holds[hold + 1] <= from_ns:
            hold += 2
        gap_ns, inner_hold = to_ns - from_ns, hold
        while inner_hold < len(holds) and holds[inner_hold] < to_ns:
            gap_ns -= min(holds[inner_hold + 1], to_ns) - max(holds[inner_hold], from_ns)
            inner_hold += 2
        gaps.append(gap_ns)
    return gaps


def _seconds(ns: float | None) -> float | None:
    return None if ns is None else ns / 1e9

"""Figures of a stream whose client reads slowly: as delivered to the client, and without the client's time.

While the client's socket takes no bytes, the relay does not read from the upstream: it holds the stream
(`Timeline.holds`). The stamps of later chunks then contain time of the client: `tbc_max` and `tpot` do, too.
The figures as delivered move a chunk that arrived during a hold to its end. The figures of the server leave
the holds out. They are lower bounds, because the chunks that the server would have sent during a hold are
unknown.
"""

from collections.abc import Sequence
from itertools import pairwise

from llmtap.exchange.exchange import Exchange
from llmtap.metrics.latency import Measured, output_times_ns


def held_figures(x: Exchange, m: Measured) -> dict[str, object] | None:
    """Return public JSON on a stream that its client held, in seconds; None if it was not held.

    The figures are None if they do not apply, or if the holds are not known one by one.
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
            # Each span has the same tokens, so TPOT is proportional to the length of the span.
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
    """Return the times at which chunks could be delivered: the end of the hold, for a chunk that came during
    a hold.

    `times_ns`: ascending stamps. `holds`: begin and end of each hold, ascending.
    """
    out, at = [], 0
    for t_ns in times_ns:
        while at < len(holds) and holds[at + 1] <= t_ns:
            at += 2
        out.append(holds[at + 1] if at < len(holds) and holds[at] < t_ns else t_ns)
    return out


def server_gaps_ns(times_ns: Sequence[int], holds: Sequence[int]) -> list[int]:
    """Return the gaps between chunks without the holds in them (arguments as in `delivered_times_ns`)."""
    gaps, at = [], 0
    for from_ns, to_ns in pairwise(times_ns):
        while at < len(holds) and holds[at + 1] <= from_ns:
            at += 2
        gap_ns, within = to_ns - from_ns, at
        while within < len(holds) and holds[within] < to_ns:
            gap_ns -= min(holds[within + 1], to_ns) - max(holds[within], from_ns)
            within += 2
        gaps.append(gap_ns)
    return gaps


def _seconds(ns: float | None) -> float | None:
    return None if ns is None else ns / 1e9

"""Counts of a load run, updated with each exchange: a Summary, dispatch lateness, and corrected latencies.

Each sending process has a `LoadTally`; the parent merges those of all processes and hosts (`merge_bytes`),
and `replay/result.py` reads the sum. Latency counts from `submit`, corrected latency from the scheduled time,
which avoids coordinated omission (Tene; the IETF draft, 4.3.1).
"""

from array import array
from collections import Counter
from collections.abc import Callable
from typing import Final

import msgspec

from llmtap.exchange.exchange import Exchange
from llmtap.metrics.deadlines import Benefit
from llmtap.metrics.histogram import Histogram
from llmtap.metrics.latency import DEFAULT_BENEFIT, Measured, measure
from llmtap.metrics.objectives import Objectives
from llmtap.metrics.statistics import summarise_ns
from llmtap.metrics.summary import ENDED_WELL, Summary

CORRECTED: Final = ("ttft", "ttft_any", "e2e", "user_idle")
"""Metrics that are also measured from the scheduled time."""


class _PackedTally(msgspec.Struct, array_like=True):
    """A `LoadTally` in packed form."""

    summary: bytes
    lateness: bytes
    ttft_uncertainties: bytes
    corrected: dict[str, bytes]
    """Packed histograms of the latencies since the scheduled time, by metric."""
    sent_ns: bytes
    planned: int
    """Number of rows that were to be sent."""
    dropped: int
    """Number of planned rows that were not sent."""
    retries: dict[str, int]


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(_PackedTally).decode


class LoadTally:
    """Counts of one sending process, or of all of them after `merge`."""

    def __init__(self, objectives: Objectives | None = None, reader: Benefit = DEFAULT_BENEFIT) -> None:
        self.summary = Summary(objectives, reader)
        self._reader = reader
        self.lateness = Histogram()
        """Delay of each request after its scheduled time."""
        self.ttft_uncertainties = Histogram()
        """Largest possible error of each TTFT."""
        self.corrected = {name: Histogram() for name in CORRECTED}
        """By metric: latencies from the scheduled time instead of the submission."""
        self.sent_ns = array("q")
        """Dispatch times, in the order in which the exchanges ended."""
        self.planned = 0
        """Number of requests in the plan."""
        self.dropped = 0
        """Number of turns that were not sent because an earlier turn failed."""
        self.retries: Counter[str] = Counter()
        """By reason: number of retries."""

    def add(self, x: Exchange) -> Measured:
        m = measure(x, self._reader)
        self.summary.add(x, m)
        self.ttft_uncertainties.record(x.ttft_uncertainty_ns)
        sent_ns = x.timeline.arrival_ns
        if x.scheduled_ns is not None and x.dispatch_late_ns is not None:
            # Use the first attempt of a retried request; `arrival_ns` belongs to its last attempt.
            sent_ns = x.scheduled_ns + x.dispatch_late_ns
            self.lateness.record(max(0, x.dispatch_late_ns))
            if x.timeline.submit_ns is not None:
                self._record_corrected(x, m, x.timeline.submit_ns - x.scheduled_ns)
        self.sent_ns.append(sent_ns)
        return m

    def _record_corrected(self, x: Exchange, m: Measured, late_ns: int) -> None:
        """Record the latencies since the scheduled time; this corrects coordinated omission."""
        for name, ns in (("ttft", m.ttft_ns), ("ttft_any", m.ttft_any_ns), ("user_idle", m.user_idle_ns)):
            if ns is not None and x.stream:
                self.corrected[name].record(ns + late_ns)
        if m.e2e_ns is not None and x.outcome in ENDED_WELL:
            self.corrected["e2e"].record(m.e2e_ns + late_ns)

    def merge(self, other: "LoadTally") -> None:
        self.merge_bytes(other.to_bytes())

    def to_bytes(self) -> bytes:
        return _encode(
            _PackedTally(
                self.summary.to_bytes(),
                self.lateness.to_bytes(),
                self.ttft_uncertainties.to_bytes(),
                {name: histogram.to_bytes() for name, histogram in self.corrected.items()},
                self.sent_ns.tobytes(),
                self.planned,
                self.dropped,
                dict(self.retries),
            )
        )

    def merge_bytes(self, packed: bytes, to_local_ns: Callable[[int], int] = int) -> None:
        """Add the counts of `to_bytes`. `to_local_ns`: converts times of the other host to this host's."""
        p = _decode(packed)
        self.summary.merge_bytes(p.summary)
        self.lateness.merge_bytes(p.lateness)
        self.ttft_uncertainties.merge_bytes(p.ttft_uncertainties)
        for name, histogram in p.corrected.items():
            self.corrected[name].merge_bytes(histogram)
        sent_ns = array("q")
        sent_ns.frombytes(p.sent_ns)
        self.sent_ns.extend(map(to_local_ns, sent_ns))
        self.planned += p.planned
        self.dropped += p.dropped
        self.retries.update(p.retries)

    def corrected_dict(self) -> dict[str, object] | None:
        if not self.lateness.n:
            return None
        return {name: summarise_ns(histogram) for name, histogram in self.corrected.items()}

    def plan_dict(self) -> dict[str, object]:
        """Return the numbers of sent and unsent requests, and the lateness in seconds, as JSON.

        `planned = sent + dropped + unsent`. Requests are unsent after an early stop or the loss of a process.
        """
        sent = self.summary.opened or 0
        return {
            "planned": self.planned,
            "sent": sent,
            "dropped": self.dropped,
            "unsent": self.planned - sent - self.dropped,
            "retries": {"n": self.retries.total(), "reasons": dict(sorted(self.retries.items()))},
            "lateness": summarise_ns(self.lateness) if self.lateness.n else None,
        }

"""Parts of the wait for the first token (`PHASES`), their durations, and the detection of unusual durations.

`phases_ns` divides the time from the arrival of a request to the first text into the parts of the table
`PHASES`, without gaps. `PhaseTimes` has histograms of the parts of many streams, and `judge_phases` compares
the parts of one exchange with them. The meter (`meter/first_token.py`), `llmtap top`, `llmtap inspect`, the
dashboard and the report of a capture show the parts of the table.

A part is unusual if it is longer than in 90 % of the streams of the same model, and exceeds the median by at
least a tenth of the whole wait. This rule is our choice, since no source defines one. Like every P90, it
needs 100 streams.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from llmtap.exchange.exchange import Exchange
from llmtap.metrics.histogram import Histogram
from llmtap.metrics.statistics import samples_needed, summarise_ns

USUAL_SHARE: Final = 0.9
"""Share of the streams in which a part is at most as long as its usual duration."""
EXCESS_SHARE: Final = 0.1
"""Minimum excess of an unusual part over the median, as a share of the whole wait: one of eight parts is
often above its P90, but by a negligible time."""
STREAMS_NEEDED: Final = samples_needed(USUAL_SHARE)
"""Minimum number of streams to estimate the usual duration of a part; with fewer, no part is unusual."""


@dataclass(frozen=True, slots=True)
class Phase:
    """A part of the wait for the first token."""

    name: str
    title: str
    meaning: str
    """Noun phrase: the work or wait in this part."""


PHASES: Final = (
    Phase(
        "client",
        "client to llmtap",
        "first to last byte of the request from the client: its size, the network and the client",
    ),
    Phase(
        "queue",
        "wait in llmtap",
        "request complete until llmtap connects or sends: load of this host, or a repeated attempt",
    ),
    Phase("connect", "connect", "name resolution, TCP and TLS to the upstream; 0 on an open connection"),
    Phase(
        "send",
        "send",
        "waits until the socket of the upstream took the request: an upstream that reads slowly",
    ),
    Phase(
        "head",
        "response head",
        "request sent until the head of the response; of most engines with the queue and the prompt",
    ),
    Phase("first_byte", "first byte", "head until the first byte of the body"),
    Phase(
        "first_token",
        "first token",
        "first byte until the first token of any kind: queue and prompt, if the head came early",
    ),
    Phase("first_content", "first content", "first token until the first text that a user reads: reasoning"),
)
"""All parts, in their order."""


def phases_ns(x: Exchange) -> tuple[int | None, ...]:
    """Return the duration of each part in PHASES; None for a part whose end was not reached, or is unknown.

    A part after an unknown one begins at the last known end, so that the sum of the parts is the whole wait.
    While llmtap reads the request, it can already connect, or wait until the upstream takes the bytes read so
    far: this time is in `connect` and `send`, not in `client`.
    """
    t = x.timeline
    at_ns = t.arrival_ns
    client_ns = queue_ns = connect_ns = send_ns = None
    if t.request_end_ns is not None:
        client_ns = max(0, t.request_end_ns - at_ns)
        at_ns += client_ns
    if t.submit_ns is not None:
        read_ns, ended_ns, sent_ns = client_ns or 0, at_ns, max(0, t.submit_ns - at_ns)
        at_ns += sent_ns
        connects_early = t.connected_ns is not None and t.connected_ns <= ended_ns
        connect_ns = min(x.added.connect_ns or 0, read_ns if connects_early else sent_ns)
        read_ns, sent_ns = (
            (read_ns - connect_ns, sent_ns) if connects_early else (read_ns, sent_ns - connect_ns)
        )
        late_ns = min(t.send_wait_ns, sent_ns)
        early_ns = min(t.send_wait_ns - late_ns, read_ns)
        send_ns, queue_ns = late_ns + early_ns, sent_ns - late_ns
        client_ns = client_ns if client_ns is None else read_ns - early_ns
    out: list[int | None] = [client_ns, queue_ns, connect_ns, send_ns]
    for end_ns in (t.head_ns, t.first_byte_ns, t.first_token_ns, t.first_content_ns):
        if end_ns is None:
            out.append(None)
        elif end_ns > at_ns:
            out.append(end_ns - at_ns)
            at_ns = end_ns
        else:
            out.append(0)
    return tuple(out)


def waited_ns(durations_ns: Sequence[int | None]) -> int:
    """Return the sum of the known parts of the wait."""
    return sum(ns for ns in durations_ns if ns is not None)


class PhaseTimes:
    """Histograms of the durations of each part of the wait, over many streams."""

    __slots__ = ("histograms", "n")

    def __init__(self) -> None:
        self.n = 0
        """Number of streams."""
        self.histograms = tuple(Histogram() for _ in PHASES)

    def add(self, x: Exchange) -> None:
        """Add the parts of an exchange, if it is a stream with a token."""
        if not x.stream or x.timeline.first_token_ns is None or x.timeline.submit_ns is None:
            return
        self.n += 1
        for histogram, ns in zip(self.histograms, phases_ns(x), strict=True):
            if ns is not None:
                histogram.record(ns)

    def to_dict(self) -> dict[str, object]:
        """Return public JSON: the statistics of each part, in seconds."""
        return {
            phase.name: summarise_ns(histogram)
            for phase, histogram in zip(PHASES, self.histograms, strict=True)
        }

    def merge(self, other: "PhaseTimes") -> None:
        """Add all counts of `other`, which stays unchanged."""
        self.n += other.n
        for histogram, other_histogram in zip(self.histograms, other.histograms, strict=True):
            histogram.merge(other_histogram)


@dataclass(frozen=True, slots=True)
class PhaseVerdict:
    """Comparison of one part of a wait with the same part of other streams."""

    phase: Phase
    start_ns: int
    """Start of the part, in ns since the arrival of the request."""
    duration_ns: int | None
    n: int
    """Number of other streams with this part."""
    median_ns: float | None
    """Median duration of the same part in other streams; None if too few."""
    usual_ns: float | None
    """Duration that USUAL_SHARE of the other streams do not exceed; None for fewer than STREAMS_NEEDED."""
    is_unusual: bool
    """Whether the part took much longer than in other streams."""


def judge_phases(durations_ns: Sequence[int | None], others: PhaseTimes) -> Iterator[PhaseVerdict]:
    """Yield the verdict on each part of a wait, in the order of PHASES (rule: see the module docstring)."""
    whole_ns, start_ns = waited_ns(durations_ns), 0
    for phase, ns, histogram in zip(PHASES, durations_ns, others.histograms, strict=True):
        n = histogram.n
        median_ns, usual_ns = histogram.percentiles((0.5, USUAL_SHARE)) if n else (None, None)
        if n < STREAMS_NEEDED:
            usual_ns = None
        is_unusual = (
            ns is not None
            and median_ns is not None
            and usual_ns is not None
            and ns > usual_ns
            and ns - median_ns >= EXCESS_SHARE * whole_ns
        )
        yield PhaseVerdict(phase, start_ns, ns, n, median_ns, usual_ns, is_unusual)
        start_ns += ns or 0

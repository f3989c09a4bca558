"""Histogram buckets with fixed edges, as Prometheus and OpenTelemetry have them, counted cheaply.

`prometheus_client.Histogram.observe` costs 0.7 us a value and a gap passes for every token, so the gaps of
an exchange are counted together: sort once, then one binary search for each edge (0.1 us a value). Nothing
is set aside for later, because there are tens of thousands of these. Counting is exact: a bucket holds every
value up to and including its edge.
"""

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from operator import add
from typing import Final

from llmtap import native
from llmtap.errors import ConfigError

__all__ = [
    "ADDED_EDGES_NS",
    "DURATION_EDGES_NS",
    "GAP_EDGES_NS",
    "TOKEN_EDGES",
    "TTFT_EDGES_NS",
    "Buckets",
    "check_edges",
    "edges_as",
    "edges_ns",
]


def check_edges(kind: str, seconds: Sequence[float], place: str) -> None:
    """Raise ConfigError of edges that no kind of histogram can have."""
    if kind not in _KINDS:
        raise ConfigError(place, f"no kind of histogram is called {kind!r}", f"there are {', '.join(_KINDS)}")
    ns = edges_ns(*seconds)
    if not 1 <= len(ns) <= EDGES_MAX or ns[0] < 1 or list(ns) != sorted(set(ns)):
        raise ConfigError(place, f"expected 1 to {EDGES_MAX} ascending numbers of seconds above 0")


def edges_as(edges: tuple[int, ...], given: Mapping[str, Sequence[float]]) -> tuple[int, ...]:
    """Return the edges that are `given` in place of these: seconds, by kind."""
    kind = next((name for name, own in _KINDS.items() if own is edges), "")
    return edges_ns(*given[kind]) if kind in given else edges


def edges_ns(*seconds: float) -> tuple[int, ...]:
    return tuple(round(s * 1e9) for s in seconds)


TTFT_EDGES_NS: Final = edges_ns(
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.15, 0.2, 0.25, 0.3, 0.4, 0.5, 0.75, 1, 1.5, 2, 2.5, 3,
    4, 5, 7.5, 10, 15, 20, 30, 40, 60, 80, 120, 160, 640, 2560,
)  # fmt: skip
"""The edges of vLLM, with those of OpenTelemetry's server metric and llm-d that SLOs are set at. The tail of
TTFT has the wait in a queue, which has no bound (seed 002)."""
GAP_EDGES_NS: Final = edges_ns(
    0.0005, 0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.025, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15,
    0.2, 0.3, 0.5, 0.75, 1, 2.5, 5, 10, 20, 40, 80,
)  # fmt: skip
"""From half a millisecond: the common sets start at 10 ms and cannot see a model of 100 tokens/s."""
DURATION_EDGES_NS: Final = edges_ns(
    0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 3, 4, 5, 7.5, 10, 15, 20, 30, 40, 60, 120, 240,
    480, 960, 1920, 2560, 7680,
)  # fmt: skip
_KINDS: Final = {"ttft": TTFT_EDGES_NS, "gap": GAP_EDGES_NS, "duration": DURATION_EDGES_NS}
EDGES_MAX: Final = 100
"""Of a histogram: each is a series for every tenant and model."""
ADDED_EDGES_NS: Final = edges_ns(
    0.00001, 0.00002, 0.00003, 0.00005, 0.000075, 0.0001, 0.00015, 0.0002, 0.0003, 0.0005, 0.00075, 0.001,
    0.002, 0.005, 0.01, 0.02, 0.05,
)  # fmt: skip
"""What the tap adds: 10 us to 50 ms."""
TOKEN_EDGES: Final = (1, 2, 3, 4, 6, 8, 16, 32, 64, 128, 256)

_SORT_MIN: Final = 24
"""So many values are counted faster by one sort and one search for each edge than one by one (measured)."""


class Buckets:
    """Counts of integers by fixed upper edges, and their sum; without edges: of all together."""

    __slots__ = ("_counts", "_edges", "_total")

    def __init__(self, edges: Sequence[int]) -> None:
        self._edges = edges
        self._counts = array("Q", bytes(8 * (len(edges) + 1)))
        self._total = 0

    def record(self, value: int) -> None:
        self._counts[bisect_left(self._edges, value)] += 1
        self._total += value

    def record_many(self, values: Sequence[int]) -> None:
        counts, edges = self._counts, self._edges
        if native.compiled is not None:
            total = native.compiled.count_by_edge(values, edges, counts)
            if total is not None:
                self._total += total
                return
        self._total += sum(values)
        if len(values) < _SORT_MIN:
            for value in values:
                counts[bisect_left(edges, value)] += 1
            return
        ordered = sorted(values)
        below, n = 0, len(ordered)
        for i, edge in enumerate(edges):
            upto = bisect_right(ordered, edge, below)
            counts[i] += upto - below
            below = upto
            if upto == n:
                return
        counts[-1] += n - below

    def merge(self, other: "Buckets") -> None:
        """Add the counts of another one with the same edges."""
        self._total += other._total
        self._counts = array("Q", map(add, self._counts, other._counts))

    def read(self) -> tuple["array[int]", int]:
        """Counts per bucket (not cumulative, the last without upper edge) and the sum; a copy."""
        return self._counts[:], self._total

"""Classic Prometheus buckets, counted cheaply.

`prometheus_client.Histogram.observe` costs 0.7 us a value and a gap passes for every token, so values
are set aside and counted by the hundred: sort once, then one binary search for each edge (0.1 us a
value). Counting is exact: a bucket `le` holds every value up to and including its edge.
"""

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from typing import Final

__all__ = [
    "ADDED_EDGES_NS",
    "DURATION_EDGES_NS",
    "GAP_EDGES_NS",
    "TOKEN_EDGES",
    "TTFT_EDGES_NS",
    "Buckets",
]


def _ns(*seconds: float) -> tuple[int, ...]:
    return tuple(round(s * 1e9) for s in seconds)


TTFT_EDGES_NS: Final = _ns(
    0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.15, 0.2, 0.25, 0.3, 0.4, 0.5, 0.75, 1, 1.5, 2, 2.5, 3, 4, 5,
    7.5, 10, 15, 20, 30, 60, 120,
)  # fmt: skip
"""The edges of OpenTelemetry's server metric, vLLM and llm-d that matter, with those SLOs are set at."""
GAP_EDGES_NS: Final = _ns(
    0.0005, 0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.025, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15,
    0.2, 0.3, 0.5, 0.75, 1, 2.5, 5, 10,
)  # fmt: skip
"""From half a millisecond: the common sets start at 10 ms and cannot see a model of 100 tokens/s."""
DURATION_EDGES_NS: Final = _ns(
    0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 3, 4, 5, 7.5, 10, 15, 20, 30, 40, 60, 120, 240,
    480, 960,
)  # fmt: skip
ADDED_EDGES_NS: Final = _ns(
    0.00001, 0.00002, 0.00003, 0.00005, 0.000075, 0.0001, 0.00015, 0.0002, 0.0003, 0.0005, 0.00075, 0.001,
    0.002, 0.005, 0.01, 0.02, 0.05,
)  # fmt: skip
"""What the tap adds: 10 us to 50 ms."""
TOKEN_EDGES: Final = (1, 2, 3, 4, 6, 8, 16, 32, 64, 128, 256)

_PENDING_MAX: Final = 512
"""Values set aside before they are counted: where sorting is cheapest for each (measured), 16 KB at most."""


class Buckets:
    """Counts of integers by fixed upper edges, and their sum."""

    __slots__ = ("_counts", "_edges", "_pending", "_total")

    def __init__(self, edges: Sequence[int]) -> None:
        self._edges = edges
        self._counts = [0] * (len(edges) + 1)
        self._pending: list[int] = []
        self._total = 0

    def record(self, value: int) -> None:
        self._pending.append(value)
        if len(self._pending) >= _PENDING_MAX:
            self._fold()

    def record_many(self, values: Iterable[int]) -> None:
        self._pending += values
        if len(self._pending) >= _PENDING_MAX:
            self._fold()

    def _fold(self) -> None:
        values, counts = sorted(self._pending), self._counts
        self._pending = []
        self._total += sum(values)
        below = 0
        for i, edge in enumerate(self._edges):
            upto = bisect_right(values, edge, below)
            counts[i] += upto - below
            below = upto
        counts[-1] += len(values) - below

    def read(self) -> tuple[list[int], int]:
        """Counts per bucket (not cumulative, the last without upper edge) and the sum; a copy."""
        if self._pending:
            self._fold()
        return self._counts.copy(), self._total

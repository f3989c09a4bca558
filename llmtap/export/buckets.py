"""Histogram buckets for Prometheus and OpenTelemetry: with fixed edges, exponential edges, or both.

`Buckets`, `ExponentialBuckets` and `DualBuckets` count integers (ns, tokens). A bucket counts the values up
to and including its upper edge. All values of an exchange are counted in one call (0.1 us per value; with
prometheus_client 0.7 us). This module also has the default edges of each kind of histogram, and `check_edges`
checks the edges that an operator sets.
"""

import math
from array import array
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from operator import add
from typing import Final

from llmtap import native
from llmtap.errors import ConfigError


def check_edges(kind: str, seconds: Sequence[float], place: str) -> None:
    """Raise ConfigError, with the option `place`, if the kind of histogram or its edges are invalid."""
    if kind not in KINDS:
        raise ConfigError(
            place, f"no kind of histogram is called {kind!r}", f"the kinds are {', '.join(KINDS)}"
        )
    ns = edges_ns(*seconds)
    if not 1 <= len(ns) <= EDGES_MAX or ns[0] < 1 or list(ns) != sorted(set(ns)):
        raise ConfigError(
            place,
            f"expected 1 to {EDGES_MAX} ascending numbers of seconds above 0, got {list(seconds)}",
            "write a list such as [0.1, 0.5, 1]",
        )


def configured_edges(edges: tuple[int, ...], configured: Mapping[str, Sequence[float]]) -> tuple[int, ...]:
    """Return the edges in ns that an operator configured for the kind of `edges`, or else `edges`.

    `edges`: default edges of a kind (a value of KINDS). `configured`: edges in seconds, by kind.
    """
    kind = next((name for name, own in KINDS.items() if own is edges), "")
    return edges_ns(*configured[kind]) if kind in configured else edges


def edges_ns(*seconds: float) -> tuple[int, ...]:
    """Convert edges from seconds to ns."""
    return tuple(round(s * 1e9) for s in seconds)


CLOSE_RATIO: Final = 1.12
"""Largest ratio of two neighbouring edges near objectives, so that a quantile there is at most 12 % wrong."""
_OBJECTIVES_S: Final = (
    0.05,
    0.055,
    0.06,
    0.067,
    0.074,
    0.08,
    0.086,
    0.093,
    0.1,
    0.112,
    0.125,
    0.138,
    0.15,
    0.165,
    0.182,
    0.2,
    0.224,
    0.25,
    0.275,
    0.3,
    0.33,
    0.365,
    0.4,
    0.448,
    0.5,
    0.55,
    0.61,
    0.675,
    0.75,
    0.825,
    0.91,
    1,
    1.1,
    1.22,
    1.35,
    1.5,
    1.65,
    1.82,
    2,
)
"""Edges in the range of most objectives, which all kinds of histograms have. Each edge is at most
`CLOSE_RATIO` times the edge before it."""
TTFT_EDGES_NS: Final = edges_ns(
    0.001,
    0.005,
    0.01,
    0.02,
    0.04,
    *_OBJECTIVES_S,
    2.5,
    3,
    4,
    5,
    7.5,
    10,
    15,
    20,
    30,
    40,
    60,
    80,
    120,
    160,
    640,
    2560,
)
"""Edges of TTFT, up to 2,560 s as in vLLM: TTFT contains the wait in a queue, which can be very long."""
GAP_EDGES_NS: Final = edges_ns(
    0.0005,
    0.001,
    0.002,
    0.003,
    0.005,
    0.0075,
    0.01,
    0.015,
    0.02,
    0.025,
    0.03,
    0.04,
    *_OBJECTIVES_S,
    2.5,
    5,
    10,
    20,
    40,
    80,
)
"""Edges of gaps between tokens. They start at 0.5 ms. The edges of other tools start at 10 ms, and so cannot
show the gaps of a model with more than 100 tokens/s."""
DURATION_EDGES_NS: Final = edges_ns(
    0.01,
    0.02,
    *_OBJECTIVES_S,
    2.5,
    3,
    4,
    5,
    7.5,
    10,
    15,
    20,
    30,
    40,
    60,
    120,
    240,
    480,
    960,
    1920,
    2560,
    7680,
)
KINDS: Final = {"ttft": TTFT_EDGES_NS, "gap": GAP_EDGES_NS, "duration": DURATION_EDGES_NS}
EDGES_MAX: Final = 100
ADDED_EDGES_NS: Final = edges_ns(
    0.00001,
    0.00002,
    0.00003,
    0.00005,
    0.000075,
    0.0001,
    0.00015,
    0.0002,
    0.0003,
    0.0005,
    0.00075,
    0.001,
    0.002,
    0.005,
    0.01,
    0.02,
    0.05,
)
"""Edges of the latency that llmtap adds: 10 us to 50 ms."""
TOKEN_EDGES: Final = (1, 2, 3, 4, 6, 8, 16, 32, 64, 128, 256)
"""Edges of the histogram of the number of tokens in an event."""


class Buckets:
    """Counts of integers in buckets with fixed upper edges, and their sum. No edges: there is one bucket."""

    __slots__ = ("_counts", "_edges", "_total")

    def __init__(self, edges: Sequence[int]) -> None:
        self._edges = edges
        """Upper edges, ascending; the last bucket has none."""
        self._counts = array("Q", bytes(8 * (len(edges) + 1)))
        self._total = 0
        """Sum of all values."""

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
        for value in values:
            counts[bisect_left(edges, value)] += 1

    def merge(self, other: "Buckets") -> None:
        self._total += other._total
        self._counts = array("Q", map(add, self._counts, other._counts))

    def read(self) -> tuple["array[int]", int]:
        """Return a copy of the counts of the buckets (the last one has no edge), and the sum of values."""
        return self._counts[:], self._total


EXPONENTIAL_SCALE: Final = 6
"""Scale of exponential buckets: 2^6 = 64 buckets for each power of two, each 1.1 % wide."""
_PER_OCTAVE: Final = 1 << EXPONENTIAL_SCALE
_UPPER_EDGES: Final = [2.0 ** (i / _PER_OCTAVE - 1) for i in range(_PER_OCTAVE)]
"""Upper edges of the buckets within [0.5, 1)."""


class ExponentialBuckets:
    """Counts of integers in buckets with the upper edges 2^(i/64), in units of `unit`.

    Prometheus and OpenTelemetry have the same buckets, but number them differently: the bucket that ends at
    2^(i/64) is bucket `i` of Prometheus and bucket `i - 1` of OpenTelemetry. (OpenTelemetry's scale is called
    a schema in Prometheus.)
    """

    __slots__ = ("_unit", "counts", "value_count", "value_sum", "zero_count")

    def __init__(self, unit: float = 1.0) -> None:
        self._unit = unit
        self.counts: dict[int, int] = {}
        """Number of values above 0 in each bucket, by Prometheus' number of the bucket."""
        self.zero_count = self.value_count = self.value_sum = 0
        """Number of values up to 0, number of all values, and their sum."""

    def record(self, value: int) -> None:
        self.record_many((value,))

    def record_many(self, values: Sequence[int]) -> None:
        counts, unit = self.counts, self._unit
        for value in values:
            if value <= 0:
                self.zero_count += 1
                continue
            mantissa, exponent = math.frexp(value / unit)
            i = (exponent - 1) * _PER_OCTAVE + bisect_left(_UPPER_EDGES, mantissa)
            counts[i] = counts.get(i, 0) + 1
        self.value_count += len(values)
        self.value_sum += sum(values)

    def copy(self) -> "ExponentialBuckets":
        copied = ExponentialBuckets(self._unit)
        copied.merge(self)
        return copied

    def merge(self, other: "ExponentialBuckets") -> None:
        for i, n in other.counts.items():
            self.counts[i] = self.counts.get(i, 0) + n
        self.zero_count += other.zero_count
        self.value_count += other.value_count
        self.value_sum += other.value_sum

    def dense_counts(self, buckets_max: int) -> tuple[int, int, list[int]]:
        """Return the scale, OpenTelemetry's number of the first bucket, and the counts from this bucket on.

        The scale is reduced, which merges buckets, until at most `buckets_max` (at least 2) remain.
        """
        if not self.counts:
            return EXPONENTIAL_SCALE, 0, []
        low, high, shift = min(self.counts) - 1, max(self.counts) - 1, 0
        while (high >> shift) - (low >> shift) >= buckets_max:
            shift += 1
        counts = [0] * ((high >> shift) - (low >> shift) + 1)
        for i, n in self.counts.items():
            counts[((i - 1) >> shift) - (low >> shift)] += n
        return EXPONENTIAL_SCALE - shift, low >> shift, counts


class DualBuckets(Buckets):
    """Buckets with fixed edges, and buckets with exponential edges for the same values."""

    __slots__ = ("exponential",)

    def __init__(self, edges: Sequence[int], unit: float) -> None:
        super().__init__(edges)
        self.exponential = ExponentialBuckets(unit)

    def record(self, value: int) -> None:
        super().record(value)
        self.exponential.record(value)

    def record_many(self, values: Sequence[int]) -> None:
        super().record_many(values)
        self.exponential.record_many(values)

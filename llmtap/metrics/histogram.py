"""Mergeable log-linear histogram of durations with a fixed relative error, fed value by value.

`Histogram` returns count, sum, mean, extremes and percentiles, merges with others, and packs itself to bytes;
`hdr.py` writes and reads the HdrHistogram format. Summaries, experiments and load tallies hold one for each
metric.

A bucket is the upper 18 bits of the value's 32-bit float: 512 buckets for every power of two, an error of at
most 0.1 % (`RELATIVE_ERROR`); whole numbers below 1,024 are exact. `n`, `total`, `min` and `max` are exact.
Percentiles follow `statistics.py`. A merged histogram equals the histogram of all values. `to_bytes` is
lossless, with 3 or 4 bytes a bucket.

Own code, because `hdrhistogram` takes 0.9 us a value and 36 KB an instance; this takes 0.15 us and a few KB.
"""

from array import array
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, pairwise, repeat
from struct import Struct
from sys import byteorder
from typing import Final

from llmtap import native

RELATIVE_ERROR: Final = 1 / 1_024 + 2**-23
"""Half the width of a bucket, plus the rounding of an integer to a 32-bit float."""

_DROPPED: Final = 14
"""Number of mantissa bits that are dropped: 23, less the 9 bits of a bucket."""
_SIGN: Final = 1 << (31 - _DROPPED)
_BITS: Final = Struct("=I")
_MASK: Final = _BITS.pack((1 << 32 - _DROPPED) - 1)
"""Mask of the bits that a bucket may have in a 32-bit number."""
_FLOAT: Final = Struct("=f")
_PACKED: Final = Struct("=ccqqq16sI")
"""Type of the counts, type of the steps between buckets, n, min, max, total, number of buckets."""
_VALUES: Final = ord("v")
_VALUES_MAX: Final = 16
"""A histogram of up to this many values is packed as a list."""
_PENDING_MAX: Final = 512
"""Number of values that wait to be sorted into buckets together: 16 KB at most."""


class Histogram:
    """Counts of integers by size; the integers are usually nanoseconds."""

    __slots__ = ("_counts", "_max", "_min", "_n", "_pending", "_total")

    def __init__(self, values: Iterable[int] = ()) -> None:
        self._counts: Counter[int] | None = None
        self._pending: list[int] = []
        self._n = 0
        self._total = 0
        self._min: int | None = None
        self._max: int | None = None
        self.record_many(values)

    def record(self, value: int) -> None:
        pending = self._pending
        pending.append(value)
        if len(pending) >= _PENDING_MAX:
            self.fold()

    def record_times(self, value: int, n: int) -> None:
        """Count one value `n` times, in the same time as once."""
        if n <= _VALUES_MAX:
            self.record_many(repeat(value, n))
        else:
            self._add(_buckets([value]), (n,), n, n * value, value, value)

    def record_many(self, values: Iterable[int]) -> None:
        """Count each of the values, much faster than one by one."""
        pending = self._pending
        pending += values
        if len(pending) >= _PENDING_MAX:
            self.fold()

    def fold(self) -> None:
        """Sort the values that wait in `_pending` into buckets; every method that reads does this first."""
        values = self._pending
        if not values:
            return
        self._pending = []
        self._add_sums(len(values), *_count_by_bucket(values, self._make_counts()))

    def _add_sums(self, n: int, total: int, low: int, high: int) -> None:
        self._n += n
        self._total += total
        self._min = low if self._min is None else min(low, self._min)
        self._max = high if self._max is None else max(high, self._max)

    def _make_counts(self) -> Counter[int]:
        if self._counts is None:
            self._counts = Counter()
        return self._counts

    def merge(self, other: "Histogram") -> None:
        """Add all counts of `other`, which stays unchanged, so that threads may share it."""
        counts = other._counts
        if counts is not None and other._min is not None and other._max is not None:
            self._add(counts.keys(), counts.values(), other._n, other._total, other._min, other._max)
        self.record_many(other._pending)

    def _add(
        self, indices: Iterable[int], counts: Iterable[int], n: int, total: int, low: int, high: int
    ) -> None:
        mine = self._make_counts()
        if mine:
            get = mine.get
            for index, count in zip(indices, counts, strict=True):
                mine[index] = get(index, 0) + count
        else:
            mine.update(dict(zip(indices, counts, strict=True)))
        self._add_sums(n, total, low, high)

    def to_bytes(self) -> bytes:
        """Return the packed counts: few values as they are, many values in 3 to 4 bytes for each bucket."""
        if self._min is None and len(self._pending) <= _VALUES_MAX:
            return b"v" + array("q", self._pending).tobytes()
        self.fold()
        assert self._min is not None
        assert self._max is not None
        counts = self._make_counts()
        indices = sorted(counts)
        steps, step_code = _pack_numbers([indices[0], *(b - a for a, b in pairwise(indices))])
        sizes, size_code = _pack_numbers([counts[i] for i in indices])
        total = self._total.to_bytes(16, "little", signed=True)
        head = _PACKED.pack(size_code, step_code, self._n, self._min, self._max, total, len(indices))
        return head + steps + sizes

    def merge_bytes(self, packed: bytes) -> None:
        """Add counts that `to_bytes` has packed."""
        if packed[0] == _VALUES:
            self.record_many(array("q", packed[1:]))
            return
        size_code, step_code, n, low, high, total, size = _PACKED.unpack_from(packed)
        steps = array(step_code.decode())
        end = _PACKED.size + steps.itemsize * size
        steps.frombytes(packed[_PACKED.size : end])
        counts = array(size_code.decode(), packed[end:])
        self._add(accumulate(steps), counts, n, int.from_bytes(total, "little", signed=True), low, high)

    def buckets(self) -> Iterator[tuple[float, int]]:
        """Yield the middle of each bucket and its count, ascending, within the smallest and largest value."""
        self.fold()
        if self._min is not None and self._max is not None:
            counts = self._make_counts()
            for index in sorted(counts, key=_by_value):
                yield min(max(_bucket_middle(index), self._min), self._max), counts[index]

    def copy(self) -> "Histogram":
        twin = Histogram()
        twin.merge(self)
        return twin

    @property
    def n(self) -> int:
        return self._n + len(self._pending)

    @property
    def total(self) -> int:
        """Sum of all values, exact."""
        self.fold()
        return self._total

    @property
    def min(self) -> int | None:
        self.fold()
        return self._min

    @property
    def max(self) -> int | None:
        self.fold()
        return self._max

    @property
    def mean(self) -> float | None:
        self.fold()
        return self._total / self._n if self._n else None

    def count(self, value: int) -> int:
        """Return the number of values in the bucket of `value`: exact for whole numbers below 1,024."""
        self.fold()
        return self._make_counts()[_BITS.unpack(_FLOAT.pack(value))[0] >> _DROPPED]

    def count_above(self, value: float) -> int:
        """Return the number of values in higher buckets than that of `value`, which is not negative."""
        self.fold()
        edge = _BITS.unpack(_FLOAT.pack(value))[0] >> _DROPPED
        return sum(n for index, n in self._make_counts().items() if index > edge)

    def percentile(self, p: float) -> float | None:
        """Return the value below which the share `p` (0 to 1) lies; None if nothing was recorded."""
        return self.percentiles((p,))[0]

    def percentiles(self, shares: Sequence[float]) -> list[float | None]:
        """Return several percentiles in one pass over the buckets."""
        self.fold()
        if self._min is None or self._max is None:
            return [None] * len(shares)
        counts = self._make_counts()
        indices = sorted(counts, key=_by_value)
        ends = list(accumulate(counts[i] for i in indices))
        out: list[float | None] = []
        for p in shares:
            rank = (self._n - 1) * p
            lower = int(rank)
            low = self._order_statistic(lower, indices, ends)
            high = self._order_statistic(min(lower + 1, self._n - 1), indices, ends)
            out.append(low + (high - low) * (rank - lower))
        return out

    def _order_statistic(self, k: int, indices: list[int], ends: list[int]) -> float:
        """Return the k-th smallest value, from 0, within the histogram's error."""
        assert self._min is not None and self._max is not None
        if k == 0:
            return self._min
        if k == self._n - 1:
            return self._max
        return min(max(_bucket_middle(indices[bisect_right(ends, k)]), self._min), self._max)


def _count_by_bucket(values: list[int], counts: Counter[int]) -> tuple[int, int, int]:
    """Count values by bucket. Return their sum, the smallest and the largest."""
    figures: tuple[int, int, int] | None = None
    if native.compiled is not None:
        figures = native.compiled.count_by_float(values, counts)
    if figures is None:
        counts.update(_buckets(values))
        figures = sum(values), min(values), max(values)
    return figures


def _buckets(values: list[int]) -> Sequence[int]:
    """Return the bucket of each value: the upper bits of its 32-bit float."""
    floats = array("f", values).tobytes()
    # Shift all floats at once, as one long number; the mask removes the bits that came from the neighbour.
    mask = int.from_bytes(_MASK * len(values), byteorder)
    shifted = int.from_bytes(floats, byteorder) >> _DROPPED & mask
    return memoryview(shifted.to_bytes(len(floats), byteorder)).cast("I")


def _pack_numbers(values: list[int]) -> tuple[bytes, bytes]:
    """Pack whole numbers, 0 or more, in as few bytes each as the largest needs. Return bytes and type."""
    largest = max(values)
    code = next(code for code in "BHIQ" if largest < 1 << 8 * array(code).itemsize)
    return array(code, values).tobytes(), code.encode()


def _by_value(index: int) -> int:
    """Return the key that sorts buckets by value. A negative float has the sign bit set, and a larger index
    then means a smaller value."""
    return index if index < _SIGN else _SIGN - 1 - index


def _bucket_middle(index: int) -> float:
    """Return the middle of the whole numbers that belong to the bucket."""
    if index >= _SIGN:
        return -_bucket_middle(index - _SIGN)
    lower = _bucket_edge(index)
    width = _bucket_edge(index + 1) - lower
    return lower + max(0.0, (width - 1) / 2)


def _bucket_edge(index: int) -> float:
    value: float = _FLOAT.unpack(_BITS.pack(index << _DROPPED))[0]
    return value

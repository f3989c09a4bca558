"""Mergeable log-linear histogram of durations with a fixed relative error.

A `Histogram` has count, sum, mean, extremes and percentiles, can be merged with others, and can be packed
into bytes; `hdr.py` writes and reads the HdrHistogram format. Summaries, experiments and tallies of the load
generator have one for each metric.

The bucket of a value is given by the upper 18 bits of its 32-bit float. So there are 512 buckets for every
power of two, and the error is at most 0.1 % (`RELATIVE_ERROR`); whole numbers below 1,024 are exact. `n`,
`total`, `min` and `max` are exact. Percentiles interpolate as in `statistics.py`. A merged histogram equals
the histogram of all values. `to_bytes` loses nothing and needs 3 or 4 bytes for each bucket.

The package `hdrhistogram` is not used, because it takes 0.9 us for a value and 36 KB for an instance; this
class takes 0.15 us and a few KB.
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
"""Number of lower bits of a float that are dropped: of its 23 mantissa bits, a bucket has the upper 9."""
_SIGN: Final = 1 << (31 - _DROPPED)
"""Sign bit in the index of a bucket."""
_BITS: Final = Struct("=I")
_MASK: Final = _BITS.pack((1 << 32 - _DROPPED) - 1)
"""Mask of the bits of a 32-bit number that the index of a bucket can have."""
_FLOAT: Final = Struct("=f")
_PACKED: Final = Struct("=ccqqq16sI")
"""Head of a packed histogram: array type of the counts, array type of the steps between bucket indexes, n,
min, max, total, number of buckets."""
_VALUES: Final = ord("v")
"""First byte of a packed list of values."""
_VALUES_MAX: Final = 16
"""A histogram with at most this number of values is packed as a list of them, which is shorter."""
_PENDING_MAX: Final = 512
"""Maximum number of values (16 KB) that wait to be sorted into buckets together, which is faster."""


class Histogram:
    """Number of integers in each bucket; the integers are usually nanoseconds."""

    __slots__ = ("_counts", "_max", "_min", "_n", "_pending", "_total")

    def __init__(self, values: Iterable[int] = ()) -> None:
        self._counts: Counter[int] | None = None
        """By index of a bucket: number of values; None: no values yet, to save memory."""
        self._pending: list[int] = []
        """Values that are not sorted into buckets yet, because many at once are faster."""
        self._n = 0
        self._total = 0
        """Sum of all values."""
        self._min: int | None = None
        self._max: int | None = None
        self.record_many(values)

    def record(self, value: int) -> None:
        pending = self._pending
        pending.append(value)
        if len(pending) >= _PENDING_MAX:
            self.fold()

    def record_copies(self, value: int, n: int) -> None:
        """Record a value `n` times, as fast as once."""
        if n <= _VALUES_MAX:
            self.record_many(repeat(value, n))
        else:
            self._add((_bucket(value),), (n,), n, n * value, value, value)

    def record_many(self, values: Iterable[int]) -> None:
        """Record several values, much faster than by a call of `record` for each."""
        pending = self._pending
        pending += values
        if len(pending) >= _PENDING_MAX:
            self.fold()

    def fold(self) -> None:
        """Sort the values that wait in `_pending` into buckets. Every method that reads buckets calls it."""
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
        """Add all counts of `other`. It stays unchanged, so several threads can merge it at the same time."""
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
        """Pack the histogram: as a list of up to _VALUES_MAX values, or in 3 to 4 bytes for each bucket."""
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
        """Add all counts of a histogram that `to_bytes` packed."""
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
        """Yield the middle of each bucket (limited to `min` and `max`) and its count, ascending."""
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
        """Return the number of values in the bucket of `value`; exact if it is a whole number below 1,024."""
        self.fold()
        return self._make_counts()[_bucket(value)]

    def count_above(self, value: float) -> int:
        """Return the number of values in higher buckets than the bucket of `value`, for a `value` >= 0."""
        self.fold()
        edge = _bucket(value)
        return sum(n for index, n in self._make_counts().items() if index > edge)

    def percentile(self, p: float) -> float | None:
        """Return the percentile of the share `p` (0 to 1); None without values."""
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
        """Return the k-th smallest value (k counts from 0), to within RELATIVE_ERROR."""
        assert self._min is not None and self._max is not None
        if k == 0:
            return self._min
        if k == self._n - 1:
            return self._max
        return min(max(_bucket_middle(indices[bisect_right(ends, k)]), self._min), self._max)


def _count_by_bucket(values: list[int], counts: Counter[int]) -> tuple[int, int, int]:
    """Add the values to `counts`, by bucket. Return their sum, their minimum and their maximum."""
    figures: tuple[int, int, int] | None = None
    if native.compiled is not None:
        figures = native.compiled.count_by_float(values, counts)
    if figures is None:
        counts.update(_buckets(values))
        figures = sum(values), min(values), max(values)
    return figures


def _bucket(value: float) -> int:
    """Return the index of the bucket of a value."""
    index: int = _BITS.unpack(_FLOAT.pack(value))[0] >> _DROPPED
    return index


def _buckets(values: list[int]) -> Sequence[int]:
    """Return the index of each value's bucket: the upper bits of its 32-bit float."""
    floats = array("f", values).tobytes()
    # Shift all floats at once, as one long integer. The mask removes the bits shifted in from the next float.
    mask = int.from_bytes(_MASK * len(values), byteorder)
    shifted = int.from_bytes(floats, byteorder) >> _DROPPED & mask
    return memoryview(shifted.to_bytes(len(floats), byteorder)).cast("I")


def _pack_numbers(values: list[int]) -> tuple[bytes, bytes]:
    """Pack integers >= 0 as an array of the smallest possible type. Return its bytes and its type code."""
    largest = max(values)
    code = next(code for code in "BHIQ" if largest < 1 << 8 * array(code).itemsize)
    return array(code, values).tobytes(), code.encode()


def _by_value(index: int) -> int:
    """Return the key that sorts bucket indexes by value. Of negative values (the sign bit is set), a larger
    index means a smaller value."""
    return index if index < _SIGN else _SIGN - 1 - index


def _bucket_middle(index: int) -> float:
    """Return the mean of the smallest and the largest whole number in the bucket."""
    if index >= _SIGN:
        return -_bucket_middle(index - _SIGN)
    lower = _bucket_edge(index)
    width = _bucket_edge(index + 1) - lower
    return lower + max(0.0, (width - 1) / 2)


def _bucket_edge(index: int) -> float:
    value: float = _FLOAT.unpack(_BITS.pack(index << _DROPPED))[0]
    return value

"""Invariants: a percentile is within RELATIVE_ERROR of the exact one; merging equals recording together."""

from itertools import chain
from struct import pack, unpack

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmtap.metrics import histogram as module
from llmtap.metrics.histogram import RELATIVE_ERROR, Histogram
from llmtap.metrics.statistics import percentile

values = st.lists(
    st.one_of(st.integers(0, 300), st.integers(0, 10**7), st.integers(10**6, 10**13)),
    min_size=1, max_size=700,
)  # fmt: skip
signed = st.lists(st.integers(-(10**13), 10**13), min_size=1, max_size=300)
SHARES = (0.0, 0.01, 0.25, 0.5, 0.9, 0.99, 0.999, 1.0)


def check_against_sort(histogram: Histogram, recorded: list[int]) -> None:
    ordered = sorted(recorded)
    assert (histogram.n, histogram.total) == (len(ordered), sum(ordered))
    assert (histogram.min, histogram.max) == (ordered[0], ordered[-1])
    assert histogram.mean == sum(ordered) / len(ordered)
    for share, found in zip(SHARES, histogram.percentiles(SHARES), strict=True):
        rank = (len(ordered) - 1) * share
        around = ordered[int(rank)], ordered[min(int(rank) + 1, len(ordered) - 1)]
        exact = percentile(ordered, share)
        assert found is not None
        assert exact is not None
        # Interpolating between two order statistics errs by no more than the worse of them.
        assert abs(found - exact) <= RELATIVE_ERROR * max(map(abs, around)) + 1e-6, share


@given(values)
def test_percentiles_are_within_the_relative_error(recorded: list[int]) -> None:
    check_against_sort(Histogram(recorded), recorded)


@given(signed)
def test_negative_values_keep_their_order(recorded: list[int]) -> None:
    check_against_sort(Histogram(recorded), recorded)


@given(signed, values)
def test_packing_loses_nothing(recorded: list[int], later: list[int]) -> None:
    histogram = Histogram(recorded)
    unread = histogram.to_bytes()
    loose = histogram.percentiles(SHARES)
    for packed in (unread, histogram.to_bytes()):
        twin = Histogram()
        twin.merge_bytes(packed)
        assert twin.percentiles(SHARES) == loose
        check_against_sort(twin, recorded)
        assert twin.count(recorded[0]) == Histogram(recorded).count(recorded[0])
        merged = Histogram(later)
        merged.merge_bytes(packed)
        check_against_sort(merged, recorded + later)
    check_against_sort(histogram, recorded)


def test_large_counts_and_sums_are_packed_too() -> None:
    histogram = Histogram([5] * 300 + [2**62] * 70_000)
    twin = Histogram()
    twin.merge_bytes(histogram.to_bytes())
    assert (twin.n, twin.total, twin.count(5)) == (70_300, 1_500 + 70_000 * 2**62, 300)
    assert len(histogram.to_bytes()) < 70


def test_what_is_merged_stays_as_it_was() -> None:
    source = Histogram(range(700))
    source.record(3)
    before = source.n, source._pending.copy()
    Histogram([1]).merge(source)
    assert (source.n, source._pending) == before


def test_packing_nothing_is_nothing() -> None:
    histogram = Histogram()
    histogram.merge_bytes(Histogram().to_bytes())
    assert (histogram.n, histogram.percentile(0.5), histogram.count(5)) == (0, None, 0)


@given(st.lists(values, max_size=5))
def test_merging_equals_recording_together(parts: list[list[int]]) -> None:
    merged = Histogram()
    for part in parts:
        merged.merge(Histogram(part))
    together = Histogram(chain.from_iterable(parts))
    assert merged.percentiles(SHARES) == together.percentiles(SHARES)
    assert (merged.n, merged.total, merged.min, merged.max) == (
        together.n, together.total, together.min, together.max,
    )  # fmt: skip


@given(values)
def test_one_by_one_equals_all_at_once(recorded: list[int]) -> None:
    single = Histogram()
    for value in recorded:
        single.record(value)
    assert single.percentiles(SHARES) == Histogram(recorded).percentiles(SHARES)


@given(values, st.integers(-(10**13), 10**13), st.integers(0, 40))
def test_one_value_many_times_equals_as_many_values(recorded: list[int], value: int, n: int) -> None:
    at_once = Histogram(recorded)
    at_once.record_times(value, n)
    one_by_one = Histogram([*recorded, *[value] * n])
    assert at_once.percentiles(SHARES) == one_by_one.percentiles(SHARES)
    assert (at_once.n, at_once.total, at_once.count(value)) == (
        one_by_one.n, one_by_one.total, one_by_one.count(value),
    )  # fmt: skip
    assert at_once.to_bytes() == one_by_one.to_bytes()


@given(signed)
def test_a_bucket_is_the_upper_bits_of_the_float(recorded: list[int]) -> None:
    floats = [unpack("=I", pack("=f", value))[0] for value in recorded]
    assert list(module._buckets(recorded)) == [bits >> 14 for bits in floats]


def test_nothing_recorded_is_none_everywhere() -> None:
    empty = Histogram()
    assert (empty.n, empty.total, empty.min, empty.max, empty.mean) == (0, 0, None, None, None)
    assert empty.percentiles((0.5, 1.0)) == [None, None]


@pytest.mark.parametrize("value", [0, 1, 127, 128, 255])
def test_small_whole_numbers_are_exact(value: int) -> None:
    # Two other values around it, so that neither the exact minimum nor the exact maximum answers.
    assert Histogram([0, value, 10**9]).percentile(0.5) == value


def test_count_of_a_small_number_counts_it_alone() -> None:
    histogram = Histogram([1, 1, 2, 3, 255])
    assert [histogram.count(v) for v in (1, 2, 4, 255)] == [2, 1, 0, 1]


def test_merging_leaves_the_other_as_it_is() -> None:
    first, second = Histogram([1]), Histogram([5])
    first.merge(second)
    second.record(7)
    assert (first.n, second.n, second.max) == (2, 2, 7)


def test_a_copy_goes_its_own_way() -> None:
    first = Histogram([1, 2])
    twin = first.copy()
    first.record(3)
    assert (first.n, twin.n, twin.max) == (3, 2, 2)

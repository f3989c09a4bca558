from itertools import chain
from struct import pack, unpack

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmtap.metrics import histogram as module
from llmtap.metrics.histogram import RELATIVE_ERROR, Histogram
from llmtap.metrics.saturation import starvation
from llmtap.metrics.statistics import (
    marks,
    percentile,
    percentile_by,
    summarise_ns,
)


def test_the_nearest_rank_is_not_moved_by_rounding() -> None:
    hundred = list(range(1, 101))
    assert [percentile_by("nearest_rank", hundred, p / 100) for p in hundred] == hundred


@pytest.mark.parametrize(
    ("n", "expected"),
    [
        (1, ["p50", "p90", "p95", "p99", "p999"]),
        (19, ["p50", "p90", "p95", "p99", "p999"]),
        (20, ["p90", "p95", "p99", "p999"]),
        (100, ["p95", "p99", "p999"]),
        (199, ["p95", "p99", "p999"]),
        (200, ["p99", "p999"]),
        (999, ["p99", "p999"]),
        (1_000, ["p999"]),
        (9_999, ["p999"]),
        (10_000, []),
    ],
)
def test_percentiles_from_too_few_samples_are_marked(n: int, expected: list[str]) -> None:
    assert marks(n) == expected
    assert summarise_ns(Histogram([5] * n))["marks"] == expected
    more = summarise_ns(Histogram([5] * n), {"p75": 0.75})["marks"]
    assert more == expected + ["p75"] * (n < 40)


def test_a_summary_is_in_seconds() -> None:
    summary = summarise_ns(Histogram([1_000_000_000, 3_000_000_000]))
    assert summary == {
        "n": 2,
        "mean": 2.0,
        "min": 1.0,
        "max": 3.0,
        "p50": 2.0,
        "p90": pytest.approx(2.8),
        "p95": pytest.approx(2.9),
        "p99": pytest.approx(2.98),
        "p999": pytest.approx(2.998),
        "marks": ["p50", "p90", "p95", "p99", "p999"],
    }


def test_a_summary_of_nothing_is_none_and_never_zero() -> None:
    summary = summarise_ns(Histogram())
    assert summary.pop("n") == 0
    assert summary.pop("marks") == []
    assert set(summary.values()) == {None}


@pytest.mark.parametrize(
    ("waits", "options", "starved"),
    [([10, 60], {"median": 100}, 0), ([10, 60], {"medians": 1}, 1), ([0, 0, 0, 1], {}, 1)],
    ids=["another median", "one median", "a median of zero"],
)
def test_who_waits_longer_than_medians_starves(
    waits: list[int], options: dict[str, int], starved: int
) -> None:
    found = starvation(waits, **options)
    assert found is not None and found.starved_requests == starved
    assert starvation([]) is None


values = st.lists(
    st.one_of(st.integers(0, 300), st.integers(0, 10**7), st.integers(10**6, 10**13)),
    min_size=1,
    max_size=700,
)
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


@given(st.lists(values, max_size=5))
def test_merging_equals_recording_together(parts: list[list[int]]) -> None:
    merged = Histogram()
    for part in parts:
        merged.merge(Histogram(part))
    together = Histogram(chain.from_iterable(parts))
    assert merged.percentiles(SHARES) == together.percentiles(SHARES)
    assert (merged.n, merged.total, merged.min, merged.max) == (
        together.n,
        together.total,
        together.min,
        together.max,
    )


@given(values, st.integers(-(10**13), 10**13), st.integers(0, 40))
def test_one_value_many_times_equals_as_many_values(recorded: list[int], value: int, n: int) -> None:
    at_once = Histogram(recorded)
    at_once.record_copies(value, n)
    one_by_one = Histogram([*recorded, *[value] * n])
    assert at_once.percentiles(SHARES) == one_by_one.percentiles(SHARES)
    assert (at_once.n, at_once.total, at_once.count(value)) == (
        one_by_one.n,
        one_by_one.total,
        one_by_one.count(value),
    )
    assert at_once.to_bytes() == one_by_one.to_bytes()


@given(signed)
def test_a_bucket_is_the_upper_bits_of_the_float(recorded: list[int]) -> None:
    floats = [unpack("=I", pack("=f", value))[0] for value in recorded]
    assert list(module._buckets(recorded)) == [bits >> 14 for bits in floats]


@given(st.lists(st.integers(0, 1_023)), st.integers(0, 1_023))
def test_values_above_a_limit_are_counted(values: list[int], limit: int) -> None:
    assert Histogram(values).count_above(limit) == sum(value > limit for value in values)

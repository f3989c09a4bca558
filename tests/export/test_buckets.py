"""Invariant: a bucket counts exactly the values above the edge before it, up to and including its own."""

from bisect import bisect_left
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmtap.export.buckets import CLOSE_RATIO, EXPONENTIAL_SCALE, KINDS, Buckets, ExponentialBuckets

EDGES = (10, 20, 50)


@pytest.mark.parametrize("kind", KINDS)
def test_edges_are_close_to_each_other_where_objectives_are(kind: str) -> None:
    near = [edge for edge in KINDS[kind] if 50_000_000 <= edge <= 2_000_000_000]
    assert (near[0], near[-1]) == (50_000_000, 2_000_000_000)
    assert all(below < above <= below * CLOSE_RATIO + 1 for below, above in pairwise(near))


@given(st.lists(st.integers(-5, 60), max_size=1_500))
def test_counts_are_exact(values: list[int]) -> None:
    expected = [0] * 4
    for value in values:
        expected[bisect_left(EDGES, value)] += 1
    together, single = Buckets(EDGES), Buckets(EDGES)
    together.record_many(values)
    for value in values:
        single.record(value)
    merged, rest = Buckets(EDGES), Buckets(EDGES)
    merged.record_many(values[: len(values) // 2])
    rest.record_many(values[len(values) // 2 :])
    merged.merge(rest)
    for buckets in (together, single, merged):
        counts, total = buckets.read()
        assert (list(counts), total) == (expected, sum(values))


@given(st.lists(st.integers(0, 10**14), max_size=300), st.integers(2, 40))
def test_exponential_buckets_end_at_powers_of_the_64th_root_of_2(values: list[int], most: int) -> None:
    one_by_one, together = ExponentialBuckets(), ExponentialBuckets()
    for value in values:
        one_by_one.record(value)
    together.record_many(values)
    found = sorted(together.counts.items())
    assert found == sorted(one_by_one.counts.items())
    for value, i in zip(sorted(filter(None, values)), (i for i, n in found for _ in range(n)), strict=True):
        assert 2 ** (i - 1) < value**64 <= 2**i or (i, value) == (0, 1)
    assert (together.value_count, together.value_sum, together.zero_count) == (
        len(values),
        sum(values),
        values.count(0),
    )
    scale, offset, dense = together.dense_counts(most)
    assert len(dense) <= most
    merged = 2 ** (EXPONENTIAL_SCALE - scale)
    told = [offset + i for i, n in enumerate(dense) for _ in range(n)]
    assert told == [(i - 1) // merged for i, n in found for _ in range(n)]

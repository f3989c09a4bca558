from bisect import bisect_left

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmtap.sim.model_options import ModelOptions, read_model_options
from llmtap.sim.schedulers.batching import Bins, batch_limits, equal_mass


@pytest.mark.parametrize(
    ("lengths", "count", "edges"),
    [
        ([5, 7, 10, 20, 30, 50, 60, 80, 150, 200, 300, 400], 4, [5, 17, 55, 162]),
        ([1, 2, 3, 4], 1, [1]),
        ([9], 3, [9, 9, 9]),
        ([1, 1, 1, 1, 8], 4, [1, 1, 1, 1]),
        ([3, 1, 2], 2, [1, 2]),
        # The quantile is 10 + 1/3 x 10 to the last digit, which no double is: floored, 13.
        ([10, 20], 3, [10, 13, 16]),
    ],
)
def test_edges_are_floored_linear_quantiles(lengths: list[int], count: int, edges: list[int]) -> None:
    assert equal_mass(lengths, count, ModelOptions()).edges == edges


def test_who_cannot_see_the_future_knows_the_first_thousand() -> None:
    lengths = [*range(1_000), *[10**6] * 1_000]
    readings = read_model_options({"edges": "first-1000"})
    assert equal_mass(lengths, 2, readings).edges == [0, 499]
    assert equal_mass(lengths, 2, ModelOptions()).edges == [0, 500_499]


@pytest.mark.parametrize(
    ("edges", "below", "length", "found"),
    [
        ([5, 17, 55], "last", 5, 0),
        ([5, 17, 55], "last", 16, 0),
        ([5, 17, 55], "last", 17, 1),
        ([5, 17, 55], "last", 55, 2),
        ([5, 17, 55], "last", 10**6, 2),
        ([5, 17, 55], "last", 4, 2),
        ([5, 17, 55], "first", 4, 0),
        ([1, 1, 1, 9], "last", 1, 2),  # bins between equal edges stay empty
        ([1, 1, 1, 1], "last", 1, 3),
    ],
)
def test_a_length_is_in_the_bin_whose_edges_are_around_it(
    edges: list[int], below: str, length: int, found: int
) -> None:
    assert Bins(edges, below=below).find(length) == found


@given(st.lists(st.integers(0, 300), min_size=1, max_size=200), st.integers(1, 12), st.integers(0, 400))
def test_a_bin_is_the_first_whose_span_has_the_length_as_the_seed_searches_it(
    lengths: list[int], count: int, length: int
) -> None:
    bins = equal_mass(lengths, count, ModelOptions())
    spans = [(low, 10**9 if high is None else high) for low, high in bins.spans]
    wanted = next((i for i, (low, high) in enumerate(spans) if low <= length < high), count - 1)
    assert bins.find(length) == wanted
    assert bins.edges[0] == min(lengths)
    # Of each bin's mass: no more of the lengths lie below its edge than there should.
    ordered = sorted(lengths)
    assert all(
        bisect_left(ordered, edge) <= -(-(len(ordered) - 1) * i // count) for i, edge in enumerate(bins.edges)
    )


@pytest.mark.parametrize(
    ("setting", "limits"),
    [
        # The seed's own table of 8.2 has 83 and 8 for the last two.
        ("7gb", [128, 128, 128, 128, 128, 128, 83, 8]),
        ("8gb", [128, 128, 128, 128, 128, 128, 95, 9]),
        ("none", [128] * 8),
    ],
)
def test_long_bins_have_smaller_batches(setting: str, limits: list[int]) -> None:
    bins = Bins([1, 30, 42, 56, 80, 117, 167, 281])
    assert batch_limits(bins, read_model_options({"bin_limit": setting})) == limits


def test_a_bin_of_nothing_has_no_limit_of_its_own() -> None:
    assert batch_limits(Bins([0, 0]), ModelOptions())[0] == 128

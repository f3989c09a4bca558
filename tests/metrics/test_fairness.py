import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmtap.metrics.fairness import inflation, jain, starvation


@pytest.mark.parametrize("values", [[], [0, 0]])
def test_jain_of_nothing_is_none(values: list[float]) -> None:
    assert jain(values) is None


@given(st.lists(st.integers(1, 10**9), min_size=1, max_size=30), st.integers(1, 1000))
def test_jain_lies_between_one_nth_and_one_and_knows_no_unit(values: list[int], unit: int) -> None:
    index = jain(values)
    assert index is not None
    assert 1 / len(values) - 1e-12 <= index <= 1 + 1e-12
    assert jain([v * unit for v in values]) == pytest.approx(index)


def test_inflation_is_mixed_over_isolated() -> None:
    assert inflation(130, 100) == 1.3
    assert inflation(130, 0) is None


def test_another_median_may_be_the_measure() -> None:
    found = starvation([10, 60], median=100)
    assert found is not None
    assert found.starved == 0
    found = starvation([10, 60], medians=1)
    assert found is not None
    assert found.starved == 1


def test_a_median_of_zero_starves_whoever_waits() -> None:
    found = starvation([0, 0, 0, 1])
    assert found is not None
    assert (found.median, found.rate) == (0.0, 0.25)
    assert starvation([]) is None

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmtap.metrics.fairness import inflation, jain, jain_readings, starvation


@pytest.mark.parametrize(
    ("values", "index"),
    [([3, 3, 3, 3], 1.0), ([1, 0, 0, 0], 0.25), ([1, 2, 3, 4], 100 / 120), ([1, 9], 100 / 164), ([7], 1.0)],
)
def test_jain(values: list[float], index: float) -> None:
    assert jain(values) == pytest.approx(index, abs=1e-12)


@pytest.mark.parametrize("values", [[], [0, 0]])
def test_jain_of_nothing_is_none(values: list[float]) -> None:
    assert jain(values) is None


@given(st.lists(st.integers(1, 10**9), min_size=1, max_size=30), st.integers(1, 1000))
def test_jain_lies_between_one_nth_and_one_and_knows_no_unit(values: list[int], unit: int) -> None:
    index = jain(values)
    assert index is not None
    assert 1 / len(values) - 1e-12 <= index <= 1 + 1e-12
    assert jain([v * unit for v in values]) == pytest.approx(index)


def test_readings_of_normalised_latency_differ() -> None:
    # Oracle S2_jain.
    mixed = {"short": [100, 110, 90, 120, 80], "long": [400, 500, 450, 900, 350]}
    readings = jain_readings(mixed, {"short": 80, "long": 320})
    assert readings.per_request == pytest.approx(0.896230410843, abs=1e-12)
    assert readings.per_class == pytest.approx(0.983271375465, abs=1e-12)
    assert readings.raw == pytest.approx(0.602130325815, abs=1e-12)
    assert readings.inflation == {"short": 1.25, "long": 1.625}


def test_inflation_is_mixed_over_isolated() -> None:
    assert inflation(130, 100) == 1.3
    assert inflation(130, 0) is None


def test_who_waits_more_than_five_medians_is_starved() -> None:
    # Oracle S3: 50 is exactly five medians, and not starved.
    found = starvation([10, 10, 10, 11, 50, 51, 55, 10, 9, 10])
    assert found is not None
    assert (found.n, found.median, found.threshold, found.starved, found.rate) == (10, 10.0, 50.0, 2, 0.2)


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

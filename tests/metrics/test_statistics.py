import pytest

from llmtap.metrics.histogram import Histogram
from llmtap.metrics.statistics import (
    EXPONENTIAL_TAIL_RATIO,
    PERCENTILE_RULES,
    deviation,
    lognormal_sigma,
    lognormal_tail_ratio,
    marks,
    mean,
    percentile,
    percentile_by,
    summarise_ns,
    tail_ratio,
)


@pytest.mark.parametrize(
    ("ordered", "share", "expected"),
    [([42.0], 0.5, 42.0), ([42.0], 0.999, 42.0), ([10.0, 20.0], 0.5, 15.0), ([10.0, 20.0], 0.99, 19.9),
     ([1, 2, 3, 4, 5], 0.0, 1), ([1, 2, 3, 4, 5], 1.0, 5), ([], 0.5, None)],
)  # fmt: skip
def test_percentiles_interpolate_between_order_statistics(
    ordered: list[float], share: float, expected: float | None
) -> None:
    assert percentile(ordered, share) == (None if expected is None else pytest.approx(expected))


# Oracle S1: ten TTFTs in ms.
TEN = [95, 97, 99, 101, 108, 120, 133, 142, 310, 2050]


@pytest.mark.parametrize("rule", PERCENTILE_RULES)
def test_every_rule_has_its_ends(rule: str) -> None:
    assert percentile_by(rule, [], 0.5) is None
    assert percentile_by(rule, [42.0], 0.99) == 42.0
    assert (percentile_by(rule, TEN, 0.0), percentile_by(rule, TEN, 1.0)) == (95, 2050)


def test_the_nearest_rank_is_not_moved_by_rounding() -> None:
    hundred = list(range(1, 101))
    assert [percentile_by("nearest_rank", hundred, p / 100) for p in hundred] == hundred


def test_deviations_of_a_population_and_of_a_sample() -> None:
    assert (deviation([2, 4, 4, 4, 5, 5, 7, 9]), mean([1, 2, 6])) == (2.0, 3.0)
    assert deviation([2, 4, 4, 4, 5, 5, 7, 9], sample=True) == pytest.approx((32 / 7) ** 0.5)
    assert (deviation([5]), deviation([5], sample=True), deviation([]), mean([])) == (0.0, None, None, None)


def test_tails_have_reference_points() -> None:
    assert tail_ratio(38, 124) == pytest.approx(3.26315789474, abs=1e-11)  # Table 6 prints 3.26
    assert pytest.approx(6.64385618977, abs=1e-11) == EXPONENTIAL_TAIL_RATIO
    assert lognormal_sigma(3.26315789474) == pytest.approx(0.508391465901, abs=1e-12)
    assert lognormal_tail_ratio(lognormal_sigma(5.0)) == pytest.approx(5.0)
    assert (tail_ratio(None, 1), tail_ratio(1, None), tail_ratio(0, 1)) == (None, None, None)


@pytest.mark.parametrize(
    ("n", "expected"),
    [(1, ["p99", "p999"]), (999, ["p99", "p999"]), (1_000, ["p999"]), (9_999, ["p999"]), (10_000, [])],
)
def test_percentiles_from_too_few_samples_are_marked(n: int, expected: list[str]) -> None:
    assert marks(n) == expected
    assert summarise_ns(Histogram([5] * n))["marks"] == expected


def test_a_summary_is_in_seconds() -> None:
    summary = summarise_ns(Histogram([1_000_000_000, 3_000_000_000]))
    assert summary == {
        "n": 2, "mean": 2.0, "min": 1.0, "max": 3.0, "p50": 2.0, "p90": pytest.approx(2.8),
        "p95": pytest.approx(2.9), "p99": pytest.approx(2.98), "p999": pytest.approx(2.998),
        "marks": ["p99", "p999"],
    }  # fmt: skip


def test_a_summary_of_nothing_is_none_and_never_zero() -> None:
    summary = summarise_ns(Histogram())
    assert summary.pop("n") == 0
    assert summary.pop("marks") == []
    assert set(summary.values()) == {None}

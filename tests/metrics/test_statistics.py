import json
from pathlib import Path

import pytest

from llmtap.metrics.histogram import Histogram
from llmtap.metrics.statistics import marks, percentile, summarise_ns

ORACLE = Path(__file__).resolve().parents[3] / "shared" / "oracle" / "ietf_cases.json"


@pytest.mark.parametrize(
    ("ordered", "share", "expected"),
    [([42.0], 0.5, 42.0), ([42.0], 0.999, 42.0), ([10.0, 20.0], 0.5, 15.0), ([10.0, 20.0], 0.99, 19.9),
     ([1, 2, 3, 4, 5], 0.0, 1), ([1, 2, 3, 4, 5], 1.0, 5), ([], 0.5, None)],
)  # fmt: skip
def test_percentiles_interpolate_between_order_statistics(
    ordered: list[float], share: float, expected: float | None
) -> None:
    assert percentile(ordered, share) == (None if expected is None else pytest.approx(expected))


@pytest.mark.skipif(not ORACLE.exists(), reason="the oracle is not at hand")
def test_the_rule_is_the_oracles_linear_one() -> None:
    case = json.loads(ORACLE.read_text())["cases"][0]
    ordered = sorted(case["input"]["ttft_ms"])
    linear = case["expected"]["by_method"]["linear (numpy default, type 7)"]
    for name, expected in linear.items():
        assert percentile(ordered, float(name[1:]) / 100) == pytest.approx(expected)


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

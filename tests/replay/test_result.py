"""What a distribution is drawn from is the distribution: its quantiles by the rule that holds everywhere."""

import pytest

from llmtap.metrics.histogram import RELATIVE_ERROR
from llmtap.metrics.statistics import percentile
from llmtap.replay.result import QUANTILES
from tests.support.replay_results import replay_result


def test_quantiles_are_those_of_the_exchanges() -> None:
    quantiles = replay_result(60, late_ms=7)["quantiles"]
    assert quantiles["shares"] == list(QUANTILES)
    # `streamed` submits after 1 ms and has its first word after 100 ms; a gap is of 10 to 14 ms.
    assert quantiles["submit"]["ttft"] == pytest.approx([0.099] * len(QUANTILES), rel=RELATIVE_ERROR)
    gaps = sorted((10 + i % 5) / 1_000 for i in range(60) for _ in range(2 + i % 7))
    expected = [percentile(gaps, share) for share in QUANTILES]
    assert quantiles["submit"]["tbc"] == pytest.approx(expected, rel=2 * RELATIVE_ERROR)
    # Dispatched 7 ms late, and submitted 1 ms after that.
    assert quantiles["dispatch_lateness"] == pytest.approx([0.007] * len(QUANTILES))
    assert quantiles["schedule"]["ttft"][-1] == pytest.approx(0.099 + 0.008)


def test_quantiles_agree_with_the_summary() -> None:
    result = replay_result(300)
    shares = result["quantiles"]["shares"]
    for name in ("ttft", "tbc", "itl", "e2e", "user_idle"):
        for title, share in (("min", 0.0), ("p50", 0.5), ("p95", 0.95), ("p99", 0.99), ("p999", 0.999),
                             ("max", 1.0)):  # fmt: skip
            at = result["quantiles"]["submit"][name][shares.index(share)]
            assert at == result["metrics"][name][title], (name, title)


def test_the_grid_is_fine_where_the_tail_is() -> None:
    assert list(QUANTILES) == sorted(set(QUANTILES))
    assert {0.0, 0.5, 0.9, 0.99, 0.995, 0.999, 0.9999, 1.0} <= set(QUANTILES)


def test_without_a_schedule_nothing_counts_from_there() -> None:
    result = replay_result(5, closed=True)
    assert result["quantiles"]["schedule"] == {"ttft": None, "e2e": None}
    assert result["quantiles"]["dispatch_lateness"] is None
    assert result["timeline"]["asked"] is None
    assert result["timeline"]["sent"] == [5, 0]


def test_the_timeline_tells_what_was_asked_beside_what_was_sent() -> None:
    timeline = replay_result(60, late_ms=500)["timeline"]
    assert timeline["asked"] == [20, 20, 20, 0]
    assert timeline["sent"] == [10, 20, 20, 10]

"""The draft's Tables 10, 13 and 14."""

import pytest

from llmtap.metrics.comparison import cache_hit_rate, difference, increase, overhead, reduction


def test_a_cache_reduces_ttft() -> None:
    assert reduction(312, 98) == pytest.approx(0.685897435897)
    assert reduction(312, 400) == pytest.approx(-0.282051282051)


@pytest.mark.parametrize(("throughput", "printed"), [(2756, -3.9), (2412, -15.9), (2289, -20.2)])
def test_guardrails_reduce_throughput_as_printed(throughput: float, printed: float) -> None:
    change = increase(2867, throughput)
    assert change is not None
    assert round(100 * change, 1) == printed


def test_overheads_are_differences_of_the_same_percentile() -> None:
    assert difference(98, 112) == 14  # input filter, TTFT P50
    assert overhead([98, 234, 4200, 8700], [118, 289, 5000, 10200]) == [20, 55, 800, 1500]
    assert overhead([98, None], [112, 3]) == [14, None]


def test_hits_are_counted_in_tokens() -> None:
    assert cache_hit_rate(300, 400) == 0.75
    assert cache_hit_rate(0, 0) is None


def test_a_change_of_nothing_is_not_known() -> None:
    assert (reduction(0, 5), increase(0, 5), reduction(None, 5), increase(5, None)) == (None,) * 4

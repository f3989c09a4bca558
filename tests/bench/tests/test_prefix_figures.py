"""Reductions, hit rates and improvements of planted repeats."""

import pytest

from llmtap.bench.tests.paired import PrefixRun, hot_firsts, prefix_figures, ttfts
from llmtap.workload.sharing import NO_CONTEXT
from tests.bench.support import measured

MS = 1_000_000
CONTEXTS = [0, 1, NO_CONTEXT, 0, 1, 0]
LENGTHS = [100, 200]


def repeat(cold: list[int | None], ttft_ms: int = 30) -> PrefixRun:
    """Off takes 100 ms; cold and warm `ttft_ms`; the cold run tells so many cached tokens."""
    states = {
        state: measured(state, [
            {"row": row, "ttft_ns": (100 if state == "off" else ttft_ms) * MS, "e2e_ns": 200 * MS,
             "cached_tokens": {"cold": cold[row], "warm": 96 * (1 + context), "off": None}[state]}
            for row, context in enumerate(CONTEXTS)
        ])
        for state in ("off", "cold", "warm")
    }  # fmt: skip
    return PrefixRun(CONTEXTS, LENGTHS, states)


def test_a_reduction_by_hand() -> None:
    told = prefix_figures([repeat([None] * 6)] * 4, 2.0, None, None)
    for state in ("cold", "warm"):
        assert told["reduction"][state]["p50"]["value"] == pytest.approx(0.7)
        assert told["reduction"][state]["pairs"] == 24
        assert told["reduction"][state]["shift"]["difference"] == pytest.approx(-0.07)
        assert told["reduction"][state]["by_repeats"]["value"] == pytest.approx(0.7)
        low, high = (told["reduction"][state]["p50"][end] for end in ("low", "high"))
        assert low == pytest.approx(0.7)
        assert high == pytest.approx(0.7)
    assert told["by_sharing"]["warm"]["not_shared"]["n"] == 4
    assert told["by_sharing"]["warm"]["shared"]["n"] == 20
    assert len(ttfts([repeat([None] * 6)], "off", True)) == 5


def test_hits_are_of_the_prefix_s_tokens_and_never_more() -> None:
    """700 tokens of prefixes; what the server has of a message behind one does not count."""
    told = prefix_figures([repeat([None, None, 0, 96, 192, 500])], 2.0, None, None)["hit_rate"]
    assert told["off"] is None
    # 96 of 100, 192 of 200, and all 100 of the one that tells 500.
    assert told["cold"]["value"] == pytest.approx((96 + 192 + 100) / 700)
    assert told["cold"]["answers_that_tell"] == 4
    assert told["warm"]["value"] == pytest.approx((3 * 96 + 2 * 192) / 700)


def test_a_first_request_that_finds_its_prefix_was_not_cold() -> None:
    assert hot_firsts([repeat([None, None, None, 96, 192, 96])]) == 0
    assert hot_firsts([repeat([96, 48, None, 96, 192, 96])]) == 1
    assert hot_firsts([repeat([96, 192, None, 0, 0, 0]), repeat([0, 192, None, 0, 0, 0])]) == 3


def test_an_improvement_has_an_interval_from_three_runs_on() -> None:
    rates = {
        "off": [(1.0, 100.0), (1.0, 110.0), (1.0, 90.0)],
        "on": [(2.0, 150.0), (2.0, 160.0), (2.0, 140.0)],
    }
    told = prefix_figures([repeat([None] * 6)], 2.0, None, rates)["throughput"]
    assert told["unit"] == "output tokens/s"
    # 150 of 100, 160 of 110, 140 of 90, each repeat against itself.
    assert told["improvement"]["value"] == pytest.approx((0.5 + 5 / 11 + 5 / 9) / 3)
    assert told["improvement"]["low"] < 0.5 < told["improvement"]["high"]
    rates["on"][0] = (2.0, None)  # type: ignore[call-overload]
    told = prefix_figures([repeat([None] * 6)], 2.0, None, {name: runs[:2] for name, runs in rates.items()})
    assert told["throughput"]["unit"] == "requests/s"
    assert told["throughput"]["improvement"]["value"] == 1.0
    assert told["throughput"]["improvement"]["low"] is None

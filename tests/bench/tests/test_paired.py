"""Blocks, pairs, and planted reductions, hit rates and overheads."""

from random import Random
from typing import Any

import pyarrow.compute as pc
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmtap.bench.run.levels import Capacity
from llmtap.bench.run.measurement import Measurement
from llmtap.bench.tests.paired import (
    AGAIN,
    BASELINE,
    Block,
    GuardrailCell,
    PrefixRun,
    blocks,
    cached_share,
    guardrail_figures,
    hot_firsts,
    over_repeats,
    pairs,
    prefix_figures,
    quantile_ratio,
    values_by_row,
)
from llmtap.workload.plan import NO_CONTEXT
from tests.bench.support import answered, measured

names = st.lists(st.sampled_from("abcdef"), min_size=1, max_size=5, unique=True)
levels = st.lists(st.sampled_from([25.0, 50.0, 75.0]), min_size=1, unique=True)


@given(names, levels, st.integers(1, 6), st.integers(0, 1 << 40), st.booleans())
def test_every_block_comes_once_and_repeats_one_after_the_other(
    arms: list[str], loads: list[float], repeats: int, seed: int, together: bool
) -> None:
    order = blocks(arms, loads, repeats, seed, together=together)
    every = {Block(arm, level, r) for arm in arms for level in loads for r in range(repeats)}
    assert len(order) == len(every)
    assert set(order) == every
    assert [block.repeat for block in order] == sorted(block.repeat for block in order)
    assert order == blocks(arms, loads, repeats, seed, together=together)


def test_only_rows_that_both_answered_completely_are_pairs() -> None:
    ms = 1_000_000
    a = measured("a", [
        {"row": 3, "ttft_ns": 10 * ms}, {"row": 1, "ttft_ns": 20 * ms}, {"row": 2, "ttft_ns": 30 * ms},
        {"row": 4, "ttft_ns": 40 * ms},
    ])  # fmt: skip
    b = measured("b", [
        {"row": 1, "ttft_ns": 25 * ms}, {"row": 2, "ttft_ns": 1 * ms, "outcome": "refused"},
        {"row": 3, "ttft_ns": 17 * ms}, {"row": 4}, {"row": 5, "ttft_ns": 50 * ms},
    ])  # fmt: skip
    assert pairs([(a, b)], "ttft_ns") == ([0.02, 0.01], [0.025, 0.017])
    assert pairs([(a, b), (b, a)], "ttft_ns") == ([0.02, 0.01, 0.025, 0.017], [0.025, 0.017, 0.02, 0.01])
    assert values_by_row(b, "ttft_ns") == {1: 0.025, 3: 0.017, 5: 0.05}


def test_a_ratio_is_that_of_the_quantiles_with_its_interval() -> None:
    base = [0.01 * i for i in range(1, 201)]
    exact = quantile_ratio(base, [2 * x for x in base], 0.5, paired=True)
    assert exact is not None
    assert [exact[name] for name in ("value", "low", "high")] == pytest.approx([2, 2, 2])
    loose = quantile_ratio(base, [2 * x for x in base], 0.5, paired=False)
    assert loose is not None
    assert loose["low"] < 2 < loose["high"]
    # So few values say where a quantile is, and not how sure that is.
    few = quantile_ratio([1.0, 2.0], [3.0, 6.0], 0.99, paired=False)
    assert few is not None
    assert (few["value"], few["low"], few["high"]) == (pytest.approx(3), None, None)
    assert quantile_ratio([], [1.0], 0.5, paired=False) is None
    assert quantile_ratio([0.0, 1.0], [1.0, 2.0], 0.5, paired=True) is None


def test_repeats_have_student_s_interval() -> None:
    """40, 41 and 42: 41 +- 4.303 / sqrt(3); against 0, t = 41 sqrt(3)."""
    found = over_repeats([40.0, 41.0, 42.0])
    assert found is not None
    assert found["value"] == pytest.approx(41)
    assert found["high"] - found["value"] == pytest.approx(4.3027 / 3**0.5, rel=1e-4)
    # Of Student's t with two degrees of freedom, in closed form.
    t = 41 * 3**0.5
    assert found["p"] == pytest.approx(1 - t / (2 + t * t) ** 0.5, rel=1e-4)
    assert over_repeats([1.0, 2.0]) is None
    same = over_repeats([2.0] * 3)
    assert same is not None
    assert same["p"] == 0.0


CONTEXTS = [0, 1, NO_CONTEXT, 0, 1, 0]
LENGTHS = [100, 200]


def repeat(cold: list[int | None], ttft_ms: int = 30) -> PrefixRun:
    """Off takes 100 ms; cold and warm `ttft_ms`; the cold run tells so many cached tokens."""
    states = {
        state: measured(state, [
            {"row": row, "ttft_ns": (100 if state == "off" else ttft_ms) * 1_000_000, "e2e_ns": S // 5,
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


S = 1_000_000_000
CAPACITY = Capacity(rps=20.0, tps=1_000.0, how="given")
COSTS_MS = {BASELINE: (0, 0), "input_filter": (40, 40), "output_filter": (16, 90), AGAIN: (0, 0)}


def block(arm: str, repeat: int, rows: int, *, refused: int = 0, noise_ms: float = 3.0) -> Measurement:
    """TTFT and E2E of a row are the row's own, the same in all arms, and the arm's cost, and noise."""
    random, out = Random(f"{arm}/{repeat}"), []
    ttft_cost, e2e_cost = COSTS_MS[arm]
    for row in range(rows):
        own = Random(f"row/{repeat}/{row}")
        ttft_ms = own.lognormvariate(4.6, 0.5)
        e2e_ms = ttft_ms + own.lognormvariate(6, 0.8)
        ttft = (ttft_ms + ttft_cost + random.gauss(0, noise_ms)) / 1e3
        e2e = (e2e_ms + e2e_cost + random.gauss(0, noise_ms)) / 1e3
        out.append(answered(row / 10, ttft, e2e, row=row, outcome="refused" if row < refused else "complete"))
    return measured(f"{arm}/{repeat}", out)


def cells(
    levels: tuple[float, ...] = (50.0,), rows: int = 200, **more: Any
) -> dict[tuple[str, float], GuardrailCell]:
    return {
        (arm, level): GuardrailCell({repeat: block(arm, repeat, rows, **more) for repeat in range(3)})
        for arm in COSTS_MS
        for level in levels
    }


def test_planted_costs_lie_in_the_intervals_and_a_baseline_costs_nothing() -> None:
    told = guardrail_figures(cells(), list(COSTS_MS), [50.0], CAPACITY, None)
    arms = told["levels"][0]["arms"]
    assert told["levels"][0]["rate_rps"] == 10.0
    for arm, costs in COSTS_MS.items():
        if arm == BASELINE:
            assert arms[arm]["overhead"] is None
            continue
        for metric, cost_ms in zip(("ttft", "e2e"), costs, strict=True):
            found = arms[arm]["overhead"][metric]
            overall, shift = found["overall"], found["shift"]
            assert found["pairs"] == 600
            assert overall["value"] == pytest.approx(sum(found["by_repeat"]) / 3)
            assert overall["low"] < cost_ms / 1e3 < overall["high"]
            assert overall["high"] - overall["low"] < 0.005
            # Of ten intervals of 95 % one may well miss, by a little.
            assert shift["low"] - 0.0003 < cost_ms / 1e3 < shift["high"] + 0.0003
            assert shift["high"] - shift["low"] < 0.001
            assert found["p50"]["low"] - 0.003 < cost_ms / 1e3 < found["p50"]["high"] + 0.003
            assert found["p50"]["n"] == 600
            # Medians of samples of 600 apart would be known to 20 ms.
            assert found["p50"]["high"] - found["p50"]["low"] < 0.012
            if arm == AGAIN:
                assert "p_adjusted" not in overall
                assert overall["p"] > 0.05
            else:
                assert overall["p_adjusted"] < 0.01
            assert overall["n"] == 3


def test_blocks_that_differ_among_themselves_widen_the_interval() -> None:
    """Whole blocks are 0, 8 or 16 ms late, whatever the arm: pairs would be sure of a difference between two
    baselines that repeats show to be none."""

    def late(measurement: Measurement, ms: int) -> Measurement:
        column = pc.add(measurement.table["ttft_ns"], ms * 1_000_000)
        place = measurement.table.schema.get_field_index("ttft_ns")
        return Measurement(
            "x", "", measurement.result, measurement.table.set_column(place, "ttft_ns", column)
        )

    both = {
        (BASELINE, 50.0): GuardrailCell(
            {r: late(block(BASELINE, r, 200), ms) for r, ms in enumerate((0, 16, 0))}
        ),
        (AGAIN, 50.0): GuardrailCell({r: late(block(AGAIN, r, 200), ms) for r, ms in enumerate((8, 8, 8))}),
    }
    told = guardrail_figures(both, [BASELINE, AGAIN], [50.0], CAPACITY, None)
    found = told["levels"][0]["arms"][AGAIN]["overhead"]["ttft"]
    assert found["shift"]["p"] < 1e-6
    assert found["overall"]["p"] > 0.3
    assert found["overall"]["low"] < 0 < found["overall"]["high"]


def test_p_values_are_adjusted_over_arms_and_loads() -> None:
    """Holm's over 2 filters x 3 loads: the smallest counts six times."""
    told = guardrail_figures(
        cells((25.0, 50.0, 75.0), 40), list(COSTS_MS), [25.0, 50.0, 75.0], CAPACITY, None
    )
    shifts = [
        one["arms"][arm]["overhead"]["ttft"]["overall"]
        for one in told["levels"]
        for arm in ("input_filter", "output_filter")
    ]
    smallest = min(shifts, key=lambda shift: shift["p"])
    assert smallest["p_adjusted"] == pytest.approx(6 * smallest["p"])
    assert all(shift["p"] <= shift["p_adjusted"] for shift in shifts)


def test_refused_answers_are_counted_and_no_latency() -> None:
    told = guardrail_figures(cells(refused=20), list(COSTS_MS), [50.0], CAPACITY, None)
    one = told["levels"][0]["arms"]["input_filter"]
    assert (one["sent"], one["complete"], one["refused"]) == (600, 540, 60)
    assert one["ttft"]["n"] == 540
    assert one["overhead"]["ttft"]["pairs"] == 540


def test_what_came_from_a_cache_is_counted_where_it_is_told() -> None:
    rows = [{"cached_tokens": 30, "input_tokens": 100}, {"input_tokens": 100}]
    told = {("baseline", 50.0): GuardrailCell({0: measured("a", rows)})}
    assert cached_share(told) == pytest.approx(0.15)
    assert (
        cached_share({("baseline", 50.0): GuardrailCell({0: measured("a", [{"input_tokens": 5}])})}) is None
    )

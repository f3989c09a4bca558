"""Overheads of planted cells: what was planted lies in the intervals; where nothing was, nothing is found."""

from random import Random

import pyarrow.compute as pc
import pytest

from llmtap.bench.run.levels import Capacity
from llmtap.bench.run.measurement import Measurement
from llmtap.bench.tests.paired import (
    AGAIN,
    BASELINE,
    GuardrailCell,
    cached_share,
    guardrail_figures,
)
from tests.bench.support import measured

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
        ttft_ns = round((ttft_ms + ttft_cost + random.gauss(0, noise_ms)) * 1e6)
        e2e_ns = round((e2e_ms + e2e_cost + random.gauss(0, noise_ms)) * 1e6)
        at_ns = row * S // 10
        out.append({
            "row": row, "sent_ns": at_ns, "ttft_ns": ttft_ns, "ttft_any_ns": ttft_ns, "e2e_ns": e2e_ns,
            "end_ns": at_ns + e2e_ns, "output_tokens": 50, "input_tokens": 100,
            "outcome": "refused" if row < refused else "complete",
        })  # fmt: skip
    return measured(f"{arm}/{repeat}", out)


def cells(
    levels: tuple[float, ...] = (50.0,), rows: int = 200, **more: float
) -> dict[tuple[str, float], GuardrailCell]:
    return {
        (arm, level): GuardrailCell({repeat: block(arm, repeat, rows, **more) for repeat in range(3)})  # type: ignore[arg-type]
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


def test_with_fewer_than_three_repeats_there_are_pairs_alone() -> None:
    both = {(arm, 50.0): GuardrailCell({0: block(arm, 0, 200)}) for arm in (BASELINE, "input_filter")}
    told = guardrail_figures(both, [BASELINE, "input_filter"], [50.0], CAPACITY, None)
    found = told["levels"][0]["arms"]["input_filter"]["overhead"]["ttft"]
    assert found["overall"]["value"] == found["shift"]["difference"]
    assert found["overall"]["method"] == found["shift"]["method"]


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


def test_throughput_of_an_open_loop_is_what_was_sent() -> None:
    told = guardrail_figures(cells(), list(COSTS_MS), [50.0], CAPACITY, None)
    for arm in ("input_filter", AGAIN):
        found = told["levels"][0]["arms"][arm]["throughput"]
        assert found["value"] == pytest.approx(500, rel=0.05)
        assert abs(found["reduction"]["value"]) < 0.02
        assert len(found["runs"]) == 3
        assert found["reduction"]["low"] <= found["reduction"]["value"] <= found["reduction"]["high"]


def test_a_lower_throughput_is_a_reduction_with_its_interval() -> None:
    """Answers of 48, 50 and 52 tokens against 38, 40 and 42, at one rate: a fifth less."""

    def cell(*tokens: int) -> GuardrailCell:
        rows = [
            {"row": i, "sent_ns": i * S // 10, "end_ns": i * S // 10 + S, "ttft_ns": S // 2}
            for i in range(200)
        ]
        return GuardrailCell(
            {r: measured("x", [{**row, "output_tokens": n} for row in rows]) for r, n in enumerate(tokens)}
        )

    both = {(BASELINE, 50.0): cell(48, 50, 52), ("full", 50.0): cell(38, 40, 42)}
    told = guardrail_figures(both, [BASELINE, "full"], [50.0], CAPACITY, None)
    reduction = told["levels"][0]["arms"]["full"]["throughput"]["reduction"]
    assert reduction["value"] == pytest.approx(0.2, abs=0.002)
    assert 0.05 < reduction["low"] < 0.2 < reduction["high"] < 0.35


def test_blocks_of_three_answers_and_less_tell_no_throughput() -> None:
    """Answers take half a second and more, the block a tenth of a second."""
    both = {
        (arm, 50.0): GuardrailCell({r: block(arm, r, 2) for r in range(3)})
        for arm in (BASELINE, "input_filter")
    }
    told = guardrail_figures(both, [BASELINE, "input_filter"], [50.0], CAPACITY, None)["levels"][0]["arms"]
    assert told[BASELINE]["throughput"] is None
    assert told["input_filter"]["throughput"] is None
    assert told["input_filter"]["overload"] == []


def test_maximum_throughput_is_reduced_by_a_share() -> None:
    peaks = {BASELINE: CAPACITY, "input_filter": Capacity(rps=19.0, tps=950.0, how="a search")}
    told = guardrail_figures(cells(), list(COSTS_MS), [50.0], CAPACITY, peaks)["max_throughput"]
    assert told[BASELINE]["reduction"] is None
    assert told["input_filter"]["reduction"] == pytest.approx(0.05)


def test_what_came_from_a_cache_is_counted_where_it_is_told() -> None:
    rows = [{"cached_tokens": 30, "input_tokens": 100}, {"input_tokens": 100}]
    told = {("baseline", 50.0): GuardrailCell({0: measured("a", rows)})}
    assert cached_share(told) == pytest.approx(0.15)
    assert (
        cached_share({("baseline", 50.0): GuardrailCell({0: measured("a", [{"input_tokens": 5}])})}) is None
    )

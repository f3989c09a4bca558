"""Overheads of planted cells: what was planted lies in the intervals; where nothing was, nothing is found."""

from random import Random

import pytest

from llmtap.bench.guardrail_figures import AGAIN, BASELINE, Cell, cached_share, figures
from llmtap.bench.load_level import Capacity
from llmtap.bench.measurement import Measurement
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


def cells(levels: tuple[float, ...] = (50.0,), **more: float) -> dict[tuple[str, float], Cell]:
    return {
        (arm, level): Cell({repeat: block(arm, repeat, 200, **more) for repeat in range(3)})  # type: ignore[arg-type]
        for arm in COSTS_MS
        for level in levels
    }


def test_planted_costs_lie_in_the_intervals_and_a_baseline_costs_nothing() -> None:
    told = figures(cells(), list(COSTS_MS), [50.0], CAPACITY, None)
    arms = told["levels"][0]["arms"]
    assert told["levels"][0]["rate_rps"] == 10.0
    for arm, costs in COSTS_MS.items():
        if arm == BASELINE:
            assert arms[arm]["overhead"] is None
            continue
        for metric, cost_ms in zip(("ttft", "e2e"), costs, strict=True):
            found = arms[arm]["overhead"][metric]
            shift = found["shift"]
            assert found["pairs"] == 600
            # Of ten intervals of 95 % one may well miss, by a little.
            assert shift["low"] - 0.0003 < cost_ms / 1e3 < shift["high"] + 0.0003
            assert shift["high"] - shift["low"] < 0.001
            assert found["p50"]["low"] - 0.003 < cost_ms / 1e3 < found["p50"]["high"] + 0.003
            assert found["p50"]["n"] == 600
            if arm == AGAIN:
                assert "p_adjusted" not in shift
                assert shift["p"] > 0.01
            else:
                assert shift["p_adjusted"] < 1e-9
            assert found["runs"]["n"] == 3


def test_pairs_see_what_samples_do_not() -> None:
    """600 pairs tell 40 ms to a third of a millisecond; the runs, each with rows of its own, do not."""
    found = figures(cells(), list(COSTS_MS), [50.0], CAPACITY, None)["levels"][0]["arms"]["input_filter"]
    ttft = found["overhead"]["ttft"]
    assert ttft["runs"]["high"] - ttft["runs"]["low"] > 5 * (ttft["shift"]["high"] - ttft["shift"]["low"])


def test_p_values_are_adjusted_over_arms_and_loads() -> None:
    """Holm's over 2 filters x 3 loads: the smallest counts six times."""
    told = figures(cells((25.0, 50.0, 75.0)), list(COSTS_MS), [25.0, 50.0, 75.0], CAPACITY, None)
    shifts = [
        one["arms"][arm]["overhead"]["ttft"]["shift"]
        for one in told["levels"]
        for arm in ("input_filter", "output_filter")
    ]
    smallest = min(shifts, key=lambda shift: shift["p"])
    assert smallest["p_adjusted"] == pytest.approx(6 * smallest["p"])
    assert all(shift["p"] <= shift["p_adjusted"] for shift in shifts)


def test_refused_answers_are_counted_and_no_latency() -> None:
    told = figures(cells(refused=20), list(COSTS_MS), [50.0], CAPACITY, None)
    one = told["levels"][0]["arms"]["input_filter"]
    assert (one["sent"], one["complete"], one["refused"]) == (600, 540, 60)
    assert one["ttft"]["n"] == 540
    assert one["overhead"]["ttft"]["pairs"] == 540


def test_throughput_of_an_open_loop_is_what_was_sent() -> None:
    told = figures(cells(), list(COSTS_MS), [50.0], CAPACITY, None)
    for arm in ("input_filter", AGAIN):
        found = told["levels"][0]["arms"][arm]["throughput"]
        assert found["value"] == pytest.approx(500, rel=0.05)
        assert abs(found["reduction"]["value"]) < 0.02
        assert found["reduction"]["low"] <= found["reduction"]["value"] <= found["reduction"]["high"]


def test_maximum_throughput_is_reduced_by_a_share() -> None:
    peaks = {BASELINE: CAPACITY, "input_filter": Capacity(rps=19.0, tps=950.0, how="a search")}
    told = figures(cells(), list(COSTS_MS), [50.0], CAPACITY, peaks)["max_throughput"]
    assert told[BASELINE]["reduction"] is None
    assert told["input_filter"]["reduction"] == pytest.approx(0.05)


def test_what_came_from_a_cache_is_counted_where_it_is_told() -> None:
    rows = [{"cached_tokens": 30, "input_tokens": 100}, {"input_tokens": 100}]
    told = {("baseline", 50.0): Cell({0: measured("a", rows)})}
    assert cached_share(told) == pytest.approx(0.15)
    assert cached_share({("baseline", 50.0): Cell({0: measured("a", [{"input_tokens": 5}])})}) is None

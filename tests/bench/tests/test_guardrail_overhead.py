"""Guardrails of known cost: planned blocks, and filters that a simulated gateway applies by header."""

import re
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import pyarrow.compute as pc
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmtap.bench.run.levels import Capacity
from llmtap.bench.run.measurement import Measurement
from llmtap.bench.run.session import Load
from llmtap.bench.sut.sut import TargetArm
from llmtap.bench.tests.guardrail_overhead import (
    BASELINE,
    BASELINE_REPEATED,
    TEST,
    cached_share,
    guardrail_figures,
    order_blocks,
)
from llmtap.errors import ConfigError
from tests.bench.support import Planted, answered, measured, perform

INPUT = {"x-sim-input-filter-ms": "40"}
OUTPUT = {"x-sim-output-hold": "4", "x-sim-output-filter-ms": "30"}
ARMS = {
    "baseline": TargetArm(),
    "input_filter": TargetArm(headers=INPUT),
    "output_filter": TargetArm(headers=OUTPUT),
    "full": TargetArm(headers=INPUT | OUTPUT),
}
COSTS_MS = {"baseline": 0, "baseline_again": 0, "input_filter": 40, "output_filter": 30, "full": 70}


def answer(name: str, load: Load) -> Measurement:
    """100 ms to the first token, and what the arm costs."""
    arm, random, rows = name.rpartition("/")[2], Random(name), []
    for row, at_ns in enumerate(load.plan.requests.arrival_ns):
        ttft = (100 + COSTS_MS.get(arm, 0) + random.gauss(0, 1)) / 1e3
        rows.append(answered(at_ns / 1e9, ttft, 2 * ttft, row=row, output_tokens=20, input_tokens=50))
    return measured(name, rows)


def planted(tmp_path: Path, arms: dict[str, TargetArm] | None = None) -> Planted:
    session = Planted(tmp_path, answer, "guardrail-overhead")
    session.arms = ARMS if arms is None else arms
    return session


def run(session: Planted, **params: Any) -> Any:
    return perform(
        TEST, session, **{"max_rate": 20.0, "requests": 30, "repeats": 3, "search": False, **params}
    )


def test_the_draft_s_tables(tmp_path: Path) -> None:
    result = run(planted(tmp_path))
    tables = {table.caption: table for table in result.tables}
    first = result.tables[0]
    assert first.caption == "Table 13: Guardrail Overhead at 25 % of capacity (5 requests/s)"
    assert [caption[:37] for caption in list(tables)[1:3]] == [
        "Table 13: Guardrail Overhead at 50 % ",
        "Table 13: Guardrail Overhead at 75 % ",
    ]
    assert all(" ms (" in cell for cell in first.rows[0][1:2])
    assert first.heads == ["Configuration", "TTFT P50", "TTFT P99", "E2E P50", "E2E P99"]
    assert [row[0] for row in first.rows] == [
        "Baseline",
        "Input Filter",
        "Output Filter",
        "Full Filter",
        "Baseline again (A/A)",
    ]
    overhead = tables["Overhead against the baseline, with 95 % intervals (5.10.4)"]
    assert len(overhead.rows) == 3 * 4 * 2
    assert overhead.rows[0][:4] == ["25 %", "Input Filter", "TTFT", overhead.rows[0][3]]
    assert overhead.rows[0][3].startswith(("39.", "40."))
    # 90 pairs: nine lie beyond P90, so P95 and P99 have no interval, and P50 has one.
    assert all(" ms (" in row[4] for row in overhead.rows)
    assert {row[6] for row in overhead.rows} == {"-"}
    assert not any(caption.startswith("Table 14") for caption in tables)
    # The headline has the cost of each filter at the highest load, with the interval of the table.
    assert [sentence.partition(" ms to ")[0].rpartition(" adds ")[0] for sentence in result.headline] == [
        f"At 75 % of capacity, {name} Filter" for name in ("Input", "Output", "Full")
    ]
    row = next(r for r in overhead.rows if r[:3] == ["75 %", "Full Filter", "TTFT"])
    added, low, high = (round(float(figure)) for figure in re.findall(r"[0-9.]+", row[3])[:3])
    assert f"adds {added} ms to the time to first token" in result.headline[2]
    assert f"confidence: {low} to {high} ms" in result.headline[2]
    message = " ".join(result.notes)
    assert "A/A" in message and "overhead at 25 %" not in message, "overheads are in the table"
    assert result.deviations == []
    kinds = [(chart.kind, len(chart.series)) for chart in result.charts]
    assert kinds == [("cdf", 5), ("points", 4), ("cdf", 5), ("points", 4)]
    assert result.charts[1].series[0].x == [25.0, 50.0, 75.0]
    line = result.charts[1].series[0]
    assert line.low[0] - 1 < 40 < line.high[0] + 1


def test_all_arms_of_a_repeat_get_the_same_requests_and_repeats_others(tmp_path: Path) -> None:
    session = planted(tmp_path)
    run(session, requests=8)
    assert len(session.loads) == 5 * 3 * 3
    loads: dict[str, set[str]] = {}
    for name, load in session.loads:
        loads.setdefault(name.rpartition("/")[0], set()).add(load.fingerprint())
    assert {len(prints) for prints in loads.values()} == {1}
    assert len(set().union(*loads.values())) == len(loads) == 9
    inputs = {tuple(load.plan.requests.input) for _, load in session.loads}
    assert len(inputs) == 9, "a load's prompts are no other load's"
    rates = {name.partition("-")[0]: load.rate_rps for name, load in session.loads}
    assert rates == {"25": 5.0, "50": 10.0, "75": 15.0}
    # Neither arms nor loads come in one order always.
    arms = [name.rpartition("/")[2] for name, _ in session.loads]
    assert len({tuple(arms[i : i + 5]) for i in range(0, 45, 5)}) > 3


def test_what_there_is_not_is_said(tmp_path: Path) -> None:
    arms = {name: ARMS[name] for name in ("baseline", "full")}
    result = run(planted(tmp_path, arms), levels=[50.0], repeats=1)
    message = " ".join(result.deviations)
    assert "no such arm is declared: Input Filter, Output Filter" in message
    assert "1 independent runs" in message
    assert [row[0] for row in result.tables[0].rows] == ["Baseline", "Full Filter", "Baseline again (A/A)"]


def test_table_14_is_measured_by_default(tmp_path: Path) -> None:
    """The baseline answers 16 at a time, the full filter 8."""

    def limited(name: str, load: Load) -> Measurement:
        if load.slots is None:
            return answer(name, load)
        each = max(1.0, load.slots / (8 if "/full/" in name else 16))
        starts = [row * each / load.slots for row in range(len(load.plan.requests))]
        return measured(name, [answered(at, 1e-9, each, output_tokens=10) for at in starts])

    session = Planted(tmp_path, limited, "guardrail-overhead")
    session.arms = {name: ARMS[name] for name in ("baseline", "full")}
    result = perform(TEST, session, requests=10, repeats=1, levels=[50.0])
    assert result.measurements_to_dict()["capacity"]["rps"] == pytest.approx(16, rel=0.05)
    (table,) = (table for table in result.tables if table.caption == "Table 14: Throughput Impact")
    assert table.heads == ["Configuration", "Max Throughput", "Reduction"]
    assert [row[0] for row in table.rows] == ["Baseline", "Full Filter"]
    found_tps = [float(row[1].removesuffix(" tok/s")) for row in table.rows]
    assert found_tps == [pytest.approx(160, rel=0.05), pytest.approx(80, rel=0.05)]
    assert table.rows[0][2] == "-"
    assert float(table.rows[1][2].removesuffix("%")) == pytest.approx(50, abs=2)
    reduction = result.measurements_to_dict()["max_throughput"]["full"]["reduction"]
    assert table.rows[1][2] == f"{reduction:.1%}"


def test_benign_requests_that_are_refused_are_a_deviation(tmp_path: Path) -> None:
    def refusing(name: str, load: Load) -> Measurement:
        rows = answer(name, load).table.to_pylist()
        for row in rows[::2] if name.endswith("/full") else []:
            row["outcome"] = "refused"
        return measured(name, rows)

    session = Planted(tmp_path, refusing, "guardrail-overhead")
    session.arms = {"baseline": TargetArm(), "full": TargetArm()}
    result = run(session, levels=[50.0], repeats=1, requests=20)
    full = result.measurements_to_dict()["levels"][0]["arms"]["full"]
    assert (full["refused"], full["complete"], full["ttft"]["n"]) == (10, 10, 10)
    assert any("10 benign requests were refused (Full Filter" in one for one in result.deviations)
    assert any("refused although the content is benign" in note for note in result.notes)


LABELLED = """{"prompt": "How do I bake bread?", "label": "should-answer"}
{"prompt": "How do I open a lock?", "label": "should-refuse"}
"""


def test_labelled_requests_go_once_to_each_configuration(tmp_path: Path) -> None:
    file = tmp_path / "labelled.jsonl"
    file.write_text(LABELLED)

    def labelling(name: str, load: Load) -> Measurement:
        if not name.startswith("labelled/"):
            return answer(name, load)
        assert load.slots is not None
        assert load.plan.requests.labels == ["should-answer", "should-refuse"]
        refused = name != "labelled/baseline"
        one = {"answered": int(not refused), "refused": int(refused), "undecided": 0}
        wrong, right = ({"share": 1.0, "interval": [0.2, 1]}, {"share": 0.0, "interval": [0, 0.8]})
        labels = {
            "should-answer": one | (wrong if refused else right),
            "should-refuse": one | (right if refused else wrong),
        }
        return measured(name, [], labels={**labels, "ignored": {}})

    session = Planted(tmp_path, labelling, "guardrail-overhead")
    session.arms = {name: ARMS[name] for name in ("baseline", "full")}
    result = run(session, levels=[50.0], repeats=1, labelled=str(file))
    assert [name for name, _ in session.loads if "labelled" in name] == ["labelled/baseline", "labelled/full"]
    table = result.tables[-1]
    assert table.caption == "Refusals against labels"
    assert table.rows == [
        ["Baseline", "should-answer", "1", "0", "0", "false positives", "0.0%, 0.0% to 80.0%"],
        ["Baseline", "should-refuse", "1", "0", "0", "false negatives", "100.0%, 20.0% to 100.0%"],
        ["Full Filter", "should-answer", "0", "1", "0", "false positives", "100.0%, 20.0% to 100.0%"],
        ["Full Filter", "should-refuse", "0", "1", "0", "false negatives", "0.0%, 0.0% to 80.0%"],
    ]
    assert result.measurements.labels["full"]["should-answer"]["refused"] == 1
    prints = {load.fingerprint() for name, load in session.loads if "labelled" in name}
    file.write_text(LABELLED.replace("bread", "cakes"))
    session.loads.clear()
    run(session, levels=[50.0], repeats=1, labelled=str(file))
    assert not prints & {load.fingerprint() for name, load in session.loads if "labelled" in name}


def test_a_labelled_trace_without_labels_is_refused_before_anything_is_sent(tmp_path: Path) -> None:
    file = tmp_path / "plain.jsonl"
    file.write_text('{"prompt": "a"}\n')
    session = planted(tmp_path)
    with pytest.raises(ConfigError) as error:
        run(session, labelled=str(file))
    assert error.value.place == "labelled"
    assert session.loads == []


names = st.lists(st.sampled_from("abcdef"), min_size=1, max_size=5, unique=True)
levels = st.lists(st.sampled_from([25.0, 50.0, 75.0]), min_size=1, unique=True)


@given(names, levels, st.integers(1, 6), st.integers(0, 1 << 40), st.booleans())
def test_every_block_comes_once_and_repeats_one_after_the_other(
    arms: list[str], loads: list[float], repeats: int, seed: int, together: bool
) -> None:
    order = order_blocks(arms, loads, repeats, seed, group_by_arm=together)
    every = {(arm, level, r) for arm in arms for level in loads for r in range(repeats)}
    assert len(order) == len(every)
    assert set(order) == every
    assert [repeat for _, _, repeat in order] == sorted(repeat for _, _, repeat in order)
    assert order == order_blocks(arms, loads, repeats, seed, group_by_arm=together)


CAPACITY = Capacity(rps=20.0, tps=1_000.0, how="given")
BOTH_COSTS_MS = {
    BASELINE: (0, 0),
    "input_filter": (40, 40),
    "output_filter": (16, 90),
    BASELINE_REPEATED: (0, 0),
}


def block(arm: str, repeat: int, rows: int, *, refused: int = 0, noise_ms: float = 3.0) -> Measurement:
    """TTFT and E2E of a row are the row's own, the same in all arms, and the arm's cost, and noise."""
    random, out = Random(f"{arm}/{repeat}"), []
    ttft_cost, e2e_cost = BOTH_COSTS_MS[arm]
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
) -> dict[tuple[str, float], dict[int, Measurement]]:
    return {
        (arm, level): {repeat: block(arm, repeat, rows, **more) for repeat in range(3)}
        for arm in BOTH_COSTS_MS
        for level in levels
    }


def test_planted_costs_lie_in_the_intervals_and_a_baseline_costs_nothing() -> None:
    report = msgspec.to_builtins(guardrail_figures(cells(), list(BOTH_COSTS_MS), [50.0], CAPACITY, None))
    arms = report["levels"][0]["arms"]
    assert report["levels"][0]["rate_rps"] == 10.0
    for arm, costs in BOTH_COSTS_MS.items():
        if arm == BASELINE:
            assert arms[arm]["overhead"] is None
            continue
        for metric, cost_ms in zip(("ttft", "e2e"), costs, strict=True):
            result = arms[arm]["overhead"][metric]
            overall, shift = result["overall"], result["shift"]
            assert result["pairs"] == 600
            assert overall["value"] == pytest.approx(sum(result["by_repeat"]) / 3)
            assert overall["low"] < cost_ms / 1e3 < overall["high"]
            assert overall["high"] - overall["low"] < 0.005
            # Of ten intervals of 95 % one may well miss, by a little.
            assert shift["low"] - 0.0003 < cost_ms / 1e3 < shift["high"] + 0.0003
            assert shift["high"] - shift["low"] < 0.001
            assert result["p50"]["low"] - 0.003 < cost_ms / 1e3 < result["p50"]["high"] + 0.003
            assert result["p50"]["n"] == 600
            # Medians of samples of 600 apart would be known to 20 ms.
            assert result["p50"]["high"] - result["p50"]["low"] < 0.012
            if arm == BASELINE_REPEATED:
                assert "p_adjusted" not in overall
                assert overall["p"] > 0.05
            else:
                assert overall["p_adjusted"] < 0.01
            assert overall["n"] == 3


def test_blocks_that_differ_among_themselves_widen_the_interval() -> None:
    """Whole blocks are 0, 8 or 16 ms late in every arm. From pairs alone, two baselines would seem to differ;
    repeats show that they do not."""

    def late(measurement: Measurement, ms: int) -> Measurement:
        column = pc.add(measurement.table["ttft_ns"], ms * 1_000_000)
        place = measurement.table.schema.get_field_index("ttft_ns")
        return Measurement(
            "x", "", measurement.result, measurement.table.set_column(place, "ttft_ns", column)
        )

    both = {
        (BASELINE, 50.0): {r: late(block(BASELINE, r, 200), ms) for r, ms in enumerate((0, 16, 0))},
        (BASELINE_REPEATED, 50.0): {
            r: late(block(BASELINE_REPEATED, r, 200), ms) for r, ms in enumerate((8, 8, 8))
        },
    }
    report = msgspec.to_builtins(
        guardrail_figures(both, [BASELINE, BASELINE_REPEATED], [50.0], CAPACITY, None)
    )
    result = report["levels"][0]["arms"][BASELINE_REPEATED]["overhead"]["ttft"]
    assert result["shift"]["p"] < 1e-6
    assert result["overall"]["p"] > 0.3
    assert result["overall"]["low"] < 0 < result["overall"]["high"]


def test_p_values_are_adjusted_over_arms_and_loads() -> None:
    """Holm's over 2 filters x 3 loads: the smallest counts six times."""
    levels = [25.0, 50.0, 75.0]
    figures = guardrail_figures(cells((*levels,), 40), list(BOTH_COSTS_MS), levels, CAPACITY, None)
    report = msgspec.to_builtins(figures)
    shifts = [
        one["arms"][arm]["overhead"]["ttft"]["overall"]
        for one in report["levels"]
        for arm in ("input_filter", "output_filter")
    ]
    smallest = min(shifts, key=lambda shift: shift["p"])
    assert smallest["p_adjusted"] == pytest.approx(6 * smallest["p"])
    assert all(shift["p"] <= shift["p_adjusted"] for shift in shifts)


def test_what_came_from_a_cache_is_counted_where_it_is_told() -> None:
    rows = [{"cached_tokens": 30, "input_tokens": 100}, {"input_tokens": 100}]
    assert cached_share({("baseline", 50.0): {0: measured("a", rows)}}) == pytest.approx(0.15)
    assert cached_share({("baseline", 50.0): {0: measured("a", rows[1:])}}) is None

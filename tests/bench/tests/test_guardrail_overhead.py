"""Guardrails of known cost: planned blocks, and filters that a simulated gateway applies by header."""

from pathlib import Path
from random import Random
from typing import Any

import pytest

from llmtap.bench.run.loads import Load
from llmtap.bench.run.measurement import Measurement
from llmtap.bench.sut.sut import TargetArm
from llmtap.bench.tests.guardrail_overhead import TEST
from tests.bench.support import Planted, answered, measured, perform

INPUT = {"x-sim-input-filter-ms": "40"}
OUTPUT = {"x-sim-output-hold": "4", "x-sim-output-filter-ms": "30"}
ARMS = {
    "baseline": TargetArm(), "input_filter": TargetArm(headers=INPUT),
    "output_filter": TargetArm(headers=OUTPUT),
    "full": TargetArm(headers=INPUT | OUTPUT),
}  # fmt: skip
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
    found = run(planted(tmp_path))
    tables = {table.caption: table for table in found.tables}
    first = found.tables[0]
    assert first.caption == "Table 13: Guardrail Overhead at 25 % of capacity (5 requests/s)"
    assert [caption[:37] for caption in list(tables)[1:3]] == [
        "Table 13: Guardrail Overhead at 50 % ", "Table 13: Guardrail Overhead at 75 % ",
    ]  # fmt: skip
    assert all(" ms (" in cell for cell in first.rows[0][1:2])
    assert first.heads == ["Configuration", "TTFT P50", "TTFT P99", "E2E P50", "E2E P99"]
    assert [row[0] for row in first.rows] == [
        "Baseline", "Input Filter", "Output Filter", "Full Filter", "Baseline again (A/A)",
    ]  # fmt: skip
    overhead = tables["Overhead against the baseline, with 95 % intervals (5.10.4)"]
    assert len(overhead.rows) == 3 * 4 * 2
    assert overhead.rows[0][:4] == ["25 %", "Input Filter", "TTFT", overhead.rows[0][3]]
    assert overhead.rows[0][3].startswith(("39.", "40."))
    # 90 pairs: nine lie beyond P90, so P95 and P99 have no interval, and P50 has one.
    assert all(" ms (" in row[4] for row in overhead.rows)
    assert {row[6] for row in overhead.rows} == {"-"}
    assert any("fewer than five pairs lie beyond" in note for note in found.notes)
    assert not any(caption.startswith("Table 14") for caption in tables)
    said = " ".join(found.notes)
    assert "maximum throughput was not measured" in said
    assert "no request was refused" in said
    assert "A/A" in said and "overhead at 25 %" not in said, "overheads are in the table"
    assert found.deviations == []
    kinds = [(chart.kind, len(chart.series)) for chart in found.charts]
    assert kinds == [("cdf", 5), ("points", 4), ("cdf", 5), ("points", 4)]
    assert found.charts[1].series[0].x == [25.0, 50.0, 75.0]
    line = found.charts[1].series[0]
    assert line.low[0] - 1 < 40 < line.high[0] + 1


def test_all_arms_of_a_repeat_get_the_same_requests_and_repeats_others(tmp_path: Path) -> None:
    session = planted(tmp_path)
    run(session, requests=8)
    assert len(session.asked) == 5 * 3 * 3
    loads: dict[str, set[str]] = {}
    for name, load in session.asked:
        loads.setdefault(name.rpartition("/")[0], set()).add(load.fingerprint())
    assert {len(prints) for prints in loads.values()} == {1}
    assert len(set().union(*loads.values())) == len(loads) == 9
    inputs = {tuple(load.plan.requests.input) for _, load in session.asked}
    assert len(inputs) == 9, "a load's prompts are no other load's"
    rates = {name.partition("-")[0]: load.rate_rps for name, load in session.asked}
    assert rates == {"25": 5.0, "50": 10.0, "75": 15.0}
    # Neither arms nor loads come in one order always.
    arms = [name.rpartition("/")[2] for name, _ in session.asked]
    assert len({tuple(arms[i : i + 5]) for i in range(0, 45, 5)}) > 3


def test_what_there_is_not_is_said(tmp_path: Path) -> None:
    arms = {name: ARMS[name] for name in ("baseline", "full")}
    found = run(planted(tmp_path, arms), levels=[50.0], repeats=1)
    said = " ".join(found.deviations)
    assert "no such arm is declared: Input Filter, Output Filter" in said
    assert "1 independent runs" in said
    assert [row[0] for row in found.tables[0].rows] == ["Baseline", "Full Filter", "Baseline again (A/A)"]


def test_table_14_is_measured_by_default(tmp_path: Path) -> None:
    """The baseline answers 16 at a time, the full filter 8."""

    def limited(name: str, load: Load) -> Measurement:
        if load.closed is None:
            return answer(name, load)
        each = max(1.0, load.closed / (8 if "/full/" in name else 16))
        starts = [row * each / load.closed for row in range(len(load.plan.requests))]
        return measured(name, [answered(at, 1e-9, each, output_tokens=10) for at in starts])

    session = Planted(tmp_path, limited, "guardrail-overhead")
    session.arms = {name: ARMS[name] for name in ("baseline", "full")}
    found = perform(TEST, session, requests=10, repeats=1, levels=[50.0])
    assert found.measurements["capacity"]["rps"] == pytest.approx(16, rel=0.05)
    (table,) = (table for table in found.tables if table.caption == "Table 14: Throughput Impact")
    assert table.heads == ["Configuration", "Max Throughput", "Reduction"]
    assert [row[0] for row in table.rows] == ["Baseline", "Full Filter"]
    found_tps = [float(row[1].removesuffix(" tok/s")) for row in table.rows]
    assert found_tps == [pytest.approx(160, rel=0.05), pytest.approx(80, rel=0.05)]
    assert table.rows[0][2] == "-"
    assert float(table.rows[1][2].removesuffix("%")) == pytest.approx(-50, abs=2)


def test_benign_requests_that_are_refused_are_a_deviation(tmp_path: Path) -> None:
    def refusing(name: str, load: Load) -> Measurement:
        rows = answer(name, load).table.to_pylist()
        for row in rows[::2] if name.endswith("/full") else []:
            row["outcome"] = "refused"
        return measured(name, rows)

    session = Planted(tmp_path, refusing, "guardrail-overhead")
    session.arms = {"baseline": TargetArm(), "full": TargetArm()}
    found = run(session, levels=[50.0], repeats=1, requests=20)
    full = found.measurements["levels"][0]["arms"]["full"]
    assert (full["refused"], full["complete"], full["ttft"]["n"]) == (10, 10, 10)
    assert any("10 benign requests were refused (Full Filter" in one for one in found.deviations)
    assert any("refused although the content is benign" in note for note in found.notes)

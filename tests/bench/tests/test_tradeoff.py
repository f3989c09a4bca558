"""5.3's points are those of curves that were planted: of rows worked out here, and of an engine's."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from llmtap.bench.run.measurement import Measurement
from llmtap.bench.run.session import Load
from llmtap.bench.tests.tradeoff import TEST
from llmtap.units import Duration
from tests.bench.support import Planted, answered, measured, perform

S = 1_000_000_000
OVER = {"stopped": "the time was up"}
Curve = Callable[[float], tuple[float, float]]


def rows_of(load: Load, ttft_s: float, served_rps: float) -> list[dict[str, Any]]:
    """A request each time one was planned; the answers end one after the other at `served_rps` at most, and
    have 20 tokens."""
    assert load.duration_ns is not None
    rows, end_s = [], 0.0
    for row, arrival_ns in enumerate(load.plan.requests.arrival_ns):
        if arrival_ns >= load.duration_ns:
            break
        at = arrival_ns / S
        end_s = max(at + 0.5, end_s + 1 / served_rps)
        more = {"ttft_any_ns": round(min(ttft_s, end_s - at) * S), "tpot_ns": 0.01 * S}
        rows.append(answered(at, ttft_s, end_s - at, row=row, input_tokens=10, output_tokens=20, **more))
    return rows


def planted(results: Path, curve: Curve) -> Planted:
    """By the offered rate: TTFT, and how many answers a second there are at most."""

    def answer(name: str, load: Load) -> Measurement:
        assert load.rate_rps is not None
        return measured(name, rows_of(load, *curve(load.rate_rps)), load=OVER)

    return Planted(results, answer, "tradeoff")


def table_5(rate: float) -> tuple[float, float]:
    """TTFT is 0.1 s / (1 - rate / 20), and 10 s from there on; never more than 20 answers a second."""
    return (0.1 / (1 - rate / 20) if rate < 19.9 else 10.0), 20.0


def test_the_points_of_a_planted_curve(tmp_path: Path) -> None:
    """TTFT is 2 x the smallest (0.111 s, at 2 a second) at 11 a second: so the knee is the level of 12."""
    session = planted(tmp_path, table_5)
    result = perform(
        TEST, session, max_rate=20.0, arrivals="uniform", ttft_p99=Duration(S // 4), tpot_p99=Duration(S)
    )
    report = result.measurements_to_dict()
    assert [name for name, _ in session.loads] == [f"levels/{p:03d}.0" for p in range(10, 121, 10)]
    assert [load.rate_rps for _, load in session.loads] == [pytest.approx(2.0 * i) for i in range(1, 13)]
    assert report["knee_rps"] == pytest.approx(12.0)
    assert report["queue_grows_from_rps"] == pytest.approx(22.0)
    assert report["operating_point_rps"] == pytest.approx(12.0), "at 14 it is 0.333 s"
    assert report["peak_rps"] in (pytest.approx(20.0), pytest.approx(22.0), pytest.approx(24.0))
    achieved = [level["output_tps"] for level in report["levels"]]
    assert achieved[:10] == [pytest.approx(20 * 2 * i, rel=0.05) for i in range(1, 11)]
    assert achieved[10:] == [pytest.approx(400, rel=0.03)] * 2
    assert [level["queue"] for level in report["levels"]] == ["stable"] * 10 + ["growing"] * 2
    assert [level["holds"] for level in report["levels"]] == [True] * 6 + [False] * 6
    table = result.tables[0]
    assert table.caption.startswith("Table 5")
    assert table.heads[:7] == [
        "Offered (r/s)",
        "Achieved (tok/s)",
        "TTFT P50",
        "TTFT P99",
        "TPOT P50",
        "TPOT P99",
        "Success",
    ]
    assert (table.rows[0][0], table.rows[0][6]) == ("2.00", "100%")
    assert table.rows[0][2].startswith("111 ms (111 to 111)")
    marks = {mark.says: mark.x for mark in result.charts[3].marks}
    assert marks["knee"] == pytest.approx(12.0)

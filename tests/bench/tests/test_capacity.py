"""5.5 finds the concurrency that was planted: by TTFT, by failures, by memory; and of an engine with so many
seats."""

from heapq import heapreplace
from pathlib import Path
from typing import Any

import pytest

from llmtap.bench.run.measurement import Measurement
from llmtap.bench.run.session import Load
from llmtap.bench.tests.capacity import TEST
from llmtap.units import Duration
from tests.bench.support import Planted, answered, measured, perform

S = 1_000_000_000
SECOND = Duration(S)


def rows_of(load: Load, seats: int, service_s: float, broken: float = 0.0) -> list[dict[str, Any]]:
    """A closed loop on so many seats: who finds none waits. Above them the last `broken` of all fail."""
    assert load.slots is not None
    n, rows = len(load.plan.requests), []
    slots, free = [0.0] * load.slots, [0.0] * seats
    fail_from = n - round(broken * n) if load.slots > seats else n
    for row in range(n):
        at = slots[0]
        begin = max(at, free[0])
        heapreplace(free, begin + service_s)
        heapreplace(slots, begin + service_s)
        more = {"tpot_ns": (service_s - 0.05) / 255 * S, "input_tokens": 44, "output_tokens": 256}
        outcome = "complete" if row < fail_from else "upstream_error"
        rows.append(answered(at, begin + 0.05 - at, begin + service_s - at, row=row, outcome=outcome, **more))
    return rows


def planted(results: Path, seats: int, service_s: float = 1.0, **more: Any) -> Planted:
    broken = more.pop("broken", 0.0)

    def answer(name: str, load: Load) -> Measurement:
        assert load.slots is not None
        full = load.slots > seats
        rows = rows_of(load, 10_000 if more else seats, service_s)
        if broken:
            rows = rows_of(load, seats, service_s, broken)
        return measured(name, rows, load={"stopped": None}, **(more if full else {}))

    return Planted(results, answer, "capacity")


def test_capacity_by_ttft(tmp_path: Path) -> None:
    """19 seats for answers of 1 s: the 20th waits for one."""
    session = planted(tmp_path, 19)
    result = perform(TEST, session, ttft_p99=Duration(S // 2))
    levels = [name.removeprefix("search/") for name, _ in session.loads]
    assert levels == ["0008", "0016", "0032", "0024", "0020", "0018", "0019"]
    report = result.measurements_to_dict()
    assert (report["max_concurrency"], report["limit"]) == (19, 20)
    assert report["output_tps"] == pytest.approx(19 * 256, rel=0.02)
    # A prompt of 44 all the time, and an answer that is at half on average, but for its first 50 ms.
    assert report["tokens_in_flight"] == pytest.approx(19 * (44 + 0.95 * 128), rel=0.02)
    table = result.tables[0]
    assert table.caption.startswith("Table 7")
    assert table.heads == ["Concurrency", "Completion", "TTFT P99", "TPOT P99", "Errors", "Status"]
    assert [(row[0], row[5]) for row in table.rows] == [
        ("8", "Pass"),
        ("16", "Pass"),
        ("18", "Pass"),
        ("19", "Pass"),
        ("20", "Fail"),
        ("24", "Fail"),
        ("32", "Fail"),
    ]
    assert table.rows[0][1:5] == ["100%", "50.0 ms * (50.0 to 50.0)", "3.73 ms * (3.73 to 3.73)", "0"]
    assert result.tables[1].rows[0] == ["Maximum concurrent requests", "19"]


def test_capacity_by_completion(tmp_path: Path) -> None:
    """Above 10 at a time 2 % of the requests fail: 98 % complete, and 99 % are needed."""
    session = planted(tmp_path, 10, broken=0.02)
    result = perform(TEST, session, ttft_p99=Duration(60 * S), maximum=64)
    report = result.measurements_to_dict()
    assert report["max_concurrency"] == 10
    beyond = next(level for level in report["levels"] if level["concurrency"] == 16)
    assert beyond["completion"]["value"] == pytest.approx(0.98, abs=0.001)
    assert beyond["endings"] == {"upstream_error": beyond["failed"]}
    assert "completed, 99.0% needed" in beyond["why"]


def test_one_out_of_memory_error_is_one_too_many(tmp_path: Path) -> None:
    """Above 12 the server says so once, in a thousand answers."""
    errors = {"CUDA error: out of memory": 1, "the upstream ended early": 2}
    session = planted(tmp_path, 12, errors=errors)
    result = perform(TEST, session, ttft_p99=SECOND)
    assert result.measurements_to_dict()["max_concurrency"] == 12
    levels = result.measurements_to_dict()["levels"]
    assert {level["concurrency"]: level["memory_errors"] for level in levels}[16] == 1


def test_where_nothing_meets_the_criteria_it_goes_down_to_one_and_says_so(tmp_path: Path) -> None:
    session = planted(tmp_path, 8)
    result = perform(TEST, session, ttft_p99=Duration(S // 100))
    assert [load.slots for _, load in session.loads] == [8, 4, 2, 1]
    assert result.measurements_to_dict()["max_concurrency"] is None
    assert result.measurements_to_dict()["output_tps"] is None
    assert "not even one request at a time" in result.notes[0]

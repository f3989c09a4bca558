"""5.2 finds the load that was planted: of queues worked out here, and of an engine whose capacity follows
from its latency model."""

from heapq import heapreplace
from pathlib import Path
from typing import Any

import pytest

from llmtap.bench.run.measurement import Measurement
from llmtap.bench.run.session import Load
from llmtap.bench.sut.sut import Hardware, Sut
from llmtap.bench.tests.throughput import TEST
from llmtap.errors import ConfigError
from llmtap.units import Duration
from tests.bench.support import Planted, answered, measured, perform

S = 1_000_000_000


def queued(load: Load, *, servers: int = 8, service_s: float = 1.0, failing: int = 0) -> list[dict[str, Any]]:
    """What came of a load where so many are served at a time for so long each, first come, first served.

    The first token comes 0.1 s after the service begins; each `failing`-th request fails at once.
    """
    assert load.duration_ns is not None
    rows: list[dict[str, Any]] = []
    free = [0.0] * servers

    def serve(at: float, row: int) -> float:
        begin = max(at, free[0])
        heapreplace(free, begin + service_s)
        ttft, e2e = begin + 0.1 - at, begin + service_s - at
        more = {"row": row, "tpot_ns": (e2e - ttft) / 49 * S, "input_tokens": 100, "output_tokens": 50}
        rows.append(answered(at, ttft, e2e, **more))
        return at + e2e

    requests = load.plan.requests
    if load.slots is None:
        for row, arrival_ns in enumerate(requests.arrival_ns):
            if arrival_ns < load.duration_ns:
                if failing and row % failing == failing - 1:
                    at = {"sent_ns": arrival_ns, "end_ns": arrival_ns, "outcome": "upstream_error"}
                    rows.append({"row": row, **at})
                else:
                    serve(arrival_ns / S, row)
        return rows
    slots = [0.0] * load.slots
    for row in range(len(requests)):
        if slots[0] >= load.duration_ns / S:
            break
        heapreplace(slots, serve(slots[0], row))
    return rows


def planted(results: Path, **queue: Any) -> Planted:
    def answer(name: str, load: Load) -> Measurement:
        rows = queued(load, **queue)
        over = len(rows) < len(load.plan.requests)
        return measured(name, rows, load={"stopped": "the time was up" if over else None})

    return Planted(results, answer, "throughput")


def test_without_a_constraint_the_limit_is_where_the_queue_grows(tmp_path: Path) -> None:
    """8 servers of 1 s: 8 requests a second. Beginning with 1, doubled to 16, and halved to a step of 1."""
    session = planted(tmp_path)
    session.sut = Sut(hardware=Hardware(count=2), max_batch=2)
    result = perform(TEST, session, arrivals="uniform")
    assert [name for name, _ in session.loads] == [
        f"search/{rate}rps" for rate in (1, 2, 4, 8, 16, 12, 10, 9)
    ]
    report = result.measurements_to_dict()
    assert (report["sustainable_load_rps"], report["limit"]) == (8.0, 9.0)
    assert report["max_request_rps"] == pytest.approx(8.0, abs=0.1)
    assert report["max_output_tps"] == pytest.approx(400, rel=0.01)
    assert report["max_input_tps"] == pytest.approx(800, rel=0.02)
    assert report["tokens_per_gpu_second"] == pytest.approx(report["max_output_tps"] / 2, rel=0.01)
    assert [level["sustained"] for level in report["levels"]] == [True] * 4 + [False] * 4
    assert report["levels"][3]["e2e"]["p99"]["value"] == pytest.approx(1.0, abs=0.01)
    summary, latency, levels = result.tables
    shown = dict(row for row in summary.rows)
    # Arrivals at 1/8 s, 2/8 s ... of 60 s: 432 are sent from 6 s on.
    assert (report["sent"], report["planned_rps"]) == (432, 8.0)
    assert shown["Sustainable Load"] == "8.00 req/s (n 432; planned 8.00 req/s)"
    assert levels.rows[3][:2] == ["8", "8.00 (n 432)"]
    assert [row[0] for row in latency.rows] == ["TTFT", "TPOT", "End-to-End"]
    assert [row[0] for row in levels.rows] == ["1", "2", "4", "8", "9", "10", "12", "16"], "ascending"
    assert [row[-2] for row in levels.rows] == ["Pass"] * 4 + ["Fail"] * 4
    assert all("the queue grows" in row[-1] for row in levels.rows[4:])
    assert result.charts[0].marks[0].x == 8.0


def test_with_an_slo_the_limit_is_where_it_is_broken(tmp_path: Path) -> None:
    """In a closed loop of n on 8 servers of 1 s, who waits has its first token 1.1 s after it asked."""
    session = planted(tmp_path)
    result = perform(
        TEST, session, mode="closed", ttft_p99=Duration(S), concurrency_max=64, workload="synthetic-uniform"
    )
    report = result.measurements_to_dict()
    assert report["sustainable_concurrency"] == 8
    assert report["sustainable_load_rps"] == pytest.approx(8.0, abs=0.2)
    assert {name: value for name, value in report["constraint"].items() if value} == {"ttft_p99": 1.0}
    assert [round(level["concurrency"]) for level in report["levels"]] == [1, 2, 4, 8, 16, 12, 10, 9]
    assert "TTFT P99 1,100 ms > 1,000 ms" in report["levels"][-1]["why"]
    assert any("closed loop" in message for message in result.deviations)


def test_a_level_whose_throughput_is_not_stable_is_not_sustained(tmp_path: Path) -> None:
    """From 4/s on the server makes a third of the tokens in the second half of each level (5.2.3.2)."""

    def answer(name: str, load: Load) -> Measurement:
        rows = queued(load, servers=512)
        assert load.rate_rps is not None and load.duration_ns is not None
        for row in rows if load.rate_rps >= 4 else ():
            if row["sent_ns"] > load.duration_ns / 2:
                row["output_tokens"] = 17
        return measured(name, rows, load={"stopped": "the time was up"})

    result = perform(TEST, Planted(tmp_path, answer, "throughput"), arrivals="uniform")
    report = result.measurements_to_dict()
    assert (report["sustainable_load_rps"], report["limit"]) == (3.0, 4.0)
    level = next(level for level in report["levels"] if level["planned_rps"] == 4)
    assert (level["sustained"], level["holds"], level["queue"]) == (False, False, "stable")
    columns = result.tables[-1].heads
    shown = [dict(zip(columns, row, strict=True)) for row in result.tables[-1].rows]
    assert [(row["Steady"], row["Status"]) for row in shown] == [("yes", "Pass")] * 3 + [("no", "Fail")]


def test_maxima_are_of_all_sustained_levels_and_the_load_is_what_was_sent(tmp_path: Path) -> None:
    """At 8/s the server makes 30 tokens of each answer, else 50, and only two of three requests are sent."""

    def answer(name: str, load: Load) -> Measurement:
        rows = [row for row in queued(load, servers=512) if row["row"] % 3 or name != "search/8rps"]
        for row in rows:
            row["output_tokens"] = 30 if name == "search/8rps" else 50
        return measured(name, rows, load={"stopped": "the time was up"})

    result = perform(TEST, Planted(tmp_path, answer, "throughput"), arrivals="uniform", rate_max=8.0)
    report = result.measurements_to_dict()
    assert (report["planned_rps"], report["sustainable_load_rps"]) == (8.0, pytest.approx(16 / 3, rel=0.01))
    assert report["completed_rps"] == pytest.approx(16 / 3, rel=0.03)
    assert report["max_output_tps"] == pytest.approx(200, rel=0.01), "4/s of 50 tokens, not 5.3/s of 30"
    assert report["max_request_rps"] == report["completed_rps"], "the highest of all sustained levels"


def test_failures_end_a_search_and_an_slo(tmp_path: Path) -> None:
    """Every fifth request fails, at any rate: fewer than 90 % complete, which is what saturation is, too."""
    result = perform(TEST, planted(tmp_path / "a", failing=5), arrivals="uniform", duration=Duration(200 * S))
    assert result.measurements_to_dict()["sustainable_load_rps"] is None
    assert any("not even the lowest level is sustained" in note for note in result.notes)
    assert [table.caption[:8] for table in result.tables] == ["Table 3:", "All load"]
    # Every twentieth is 5 %: no saturation, but an SLO on a P99 leaves 1 %.
    few = planted(tmp_path / "b", failing=20)
    result = perform(TEST, few, arrivals="uniform", rate_max=1.0, ttft_p99=Duration(5 * S))
    assert "of the requests failed" in result.measurements_to_dict()["levels"][0]["why"]


def test_a_closed_loop_is_sent_again_where_its_requests_were_over(tmp_path: Path) -> None:
    """Answers of 20 ms: 50 a second and slot, of which nobody knew beforehand."""
    session = planted(tmp_path, service_s=0.02, servers=512)
    perform(TEST, session, mode="closed", concurrency_max=2)
    names = [name for name, _ in session.loads]
    assert names[:2] == ["search/1slots", "search/1slots-longer"]
    assert "search/2slots-longer" not in names, "by then it was known"
    result = session.steps[-1]
    assert result.table["sent_ns"][-1].as_py() > 59 * S


def test_capacity_is_searched_by_any_objective(tmp_path: Path) -> None:
    """Of n at a time on 8 servers of 1 s, the first token comes after n/8 - 0.9 s, a token is lost for each
    second, and every tenth misses anyway: 90 % are within 1 s up to 8, 97 % of 50 tokens are kept up to 19.
    """

    def answer(name: str, load: Load) -> Measurement:
        rows = queued(load)
        for row in rows:
            waited_s = row["ttft_ns"] / S
            row |= {"met": row["row"] % 10 > 0 and waited_s < 1, "smooth_benefit": 50 - waited_s}
        return measured(name, rows, load={"stopped": "the time was up"})

    def capacity(folder: str, **bounds: Any) -> Any:
        session = Planted(tmp_path / folder, answer, "throughput")
        report = perform(TEST, session, mode="closed", concurrency_max=64, **bounds).measurements_to_dict()
        return report["sustainable_concurrency"], report["constraint"]

    assert capacity("a", slo="ttft:1s", attainment=0.85)[0] == 8
    assert capacity("b", slo="ttft:1s")[0] is None
    slots, bounds = capacity("c", smooth=0.97)
    assert (slots, bounds["smooth"], bounds["objectives"]) == (19, 0.97, None)
    with pytest.raises(ConfigError) as caught:
        capacity("d", slo="patience:1s")
    assert "unknown objective 'patience'" in caught.value.problem

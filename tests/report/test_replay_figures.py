"""Rows of a replay's figures: those that are there, in ms, marked where too few samples carry them."""

from llmtap.report.replay_figures import FIGURE_HEADS, at, experience_rows, latency_rows, outcome_rows
from llmtap.report.terminal import milliseconds
from tests.support.replay_results import replay_result

GOOD = replay_result()


def test_latencies_are_in_ms_and_marked() -> None:
    rows = dict(latency_rows(GOOD))
    ttft = GOOD["metrics"]["ttft"]
    cells = [milliseconds(ttft[name]) for name in ("mean", "p50", "p90", "p95", "p99", "p999", "max")]
    cells[4] += "*"
    cells[5] += "*"
    assert rows["TTFT"] == ["120", *cells]
    assert all(len(cells) == len(FIGURE_HEADS) - 1 for cells in rows.values())
    assert "TTFT, reasoning" not in rows, "of nothing"
    assert f"ITL (option {GOOD['metrics']['itl']['option']})" in rows
    assert list(rows)[-1] == "dispatch lateness"


def test_what_is_missing_is_left_out() -> None:
    assert latency_rows({}) == experience_rows({}) == []
    assert at({"a": {"b": 3}}, ("a", "b")) == at({"a": None}, ("a", "b")) == {}
    assert at({"a": {"b": {"n": 1}}}, ("a", "b")) == {"n": 1}


def test_outcomes_are_parts_of_a_whole() -> None:
    assert outcome_rows({"complete": 2, "truncated": 1}, 3) == [
        ("complete", ["2", "2 of 3"]), ("truncated", ["1", "1 of 3"]),
    ]  # fmt: skip
    assert outcome_rows({"complete": 1_985}, 2_000) == [("complete", ["1,985", "99.2 %"])]
    assert outcome_rows({"complete": 0}, 0) == [("complete", ["0", "-"])]

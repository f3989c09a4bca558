"""5.8 tells what the server counts, and no more: preemptions of an engine whose memory is too small, and what
becomes of requests that are planted."""

from pathlib import Path
from typing import Any

import pytest

from llmtap.bench.run.measurement import Measurement
from llmtap.bench.run.session import Load
from llmtap.bench.tests.memory_pressure import TEST, WARNING
from llmtap.errors import ConfigError
from tests.bench.support import Planted, Silent, answered, measured, perform

S = 1_000_000_000


def rows_of(n: int, ttft_s: float, failing: int, seconds: float) -> list[dict[str, Any]]:
    more = {"tpot_ns": 0.01 * S, "input_tokens": 100, "output_tokens": 50, "gaps_ns": [10_000_000] * 49}
    outcomes = ["upstream_error"] * failing + ["complete"] * (n - failing)
    return [
        answered(row * seconds / n, ttft_s, 1, row=row, outcome=outcome, **more)
        for row, outcome in enumerate(outcomes)
    ]


Level = tuple[float, int, int | None]
"""TTFT in s, requests that fail of 1,000, preemptions that the server counts."""


def planted(results: Path, levels: dict[int, Level], lost_at: str = "") -> Planted:
    """By slots."""

    def answer(name: str, load: Load) -> Measurement:
        if name == lost_at:
            raise ConfigError("--target", "http://127.0.0.1:9 cannot be reached: refused")
        if name in ("before", "after"):
            return measured(name, rows_of(5, 0.2, 0, 5.0), seconds=5.0, load={"stopped": None})
        assert load.slots is not None
        ttft_s, failing, events = levels[load.slots]
        server = {} if events is None else {"preemptions": {"total": events}}
        return measured(
            name,
            rows_of(1_000, ttft_s, failing, 120.0),
            seconds=130.0,
            load={"stopped": "the time was up"},
            system={"summary": {"server": server}},
            errors={"CUDA out of memory": failing // 2},
        )

    return Planted(results, answer, "memory-pressure")


DRAFT: dict[int, Level] = {
    100: (0.523, 3, 0),
    110: (0.789, 18, 52),
    125: (1.456, 55, 187),
    150: (3.234, 177, 2_000),
}
"""Table 11, with a capacity of 100; at 150 % twice as many preemptions as requests."""


def test_table_11_is_told_as_it_was_planted(tmp_path: Path) -> None:
    session = planted(tmp_path, DRAFT)
    result = perform(TEST, session, capacity=100)
    assert [(name, load.slots) for name, load in session.loads] == [
        ("before", 1),
        ("levels/100", 100),
        ("levels/110", 110),
        ("levels/125", 125),
        ("levels/150", 150),
        ("after", 1),
    ]
    table = result.tables[0]
    assert table.caption.startswith("Table 11")
    assert table.heads == ["Oversub Level", "Complete", "Preempt", "Fail Rate", "TTFT P99"]
    assert all(" to " in row[-1] for row in table.rows)
    assert [[*row[:-1], row[-1].partition(" ms")[0]] for row in table.rows] == [
        ["100% (base)", "99.7%", "0%", "0.3%", "523"],
        ["110%", "98.2%", "5.2% at most", "1.8%", "789"],
        ["125%", "94.5%", "18.7% at most", "5.5%", "1,456"],
        ["150%", "82.3%", "100% at most", "17.7%", "3,234"],
    ]
    report = result.measurements_to_dict()
    assert [level["pattern"] for level in report["levels"]] == ["base"] + ["requests fail"] * 3
    assert [level["memory_errors"] for level in report["levels"]] == [1, 9, 27, 88]
    assert report["levels"][0]["drain"] == pytest.approx(10.0)
    assert report["recovered"] is True
    assert isinstance(session.watcher, Silent)
    assert session.watcher.remaining[0] == WARNING
    # Who failed may have been preempted before: of recovery nothing is known.
    assert [level["preemption_recovery_rate"] for level in report["levels"]] == [None] * 4
    assert [level["preemption_loss_tokens"] for level in report["levels"]] == [None] * 4


def test_what_the_server_does_not_tell_is_not_measurable_and_not_0(tmp_path: Path) -> None:
    silent: dict[int, Level] = {slots: (ttft, 0, None) for slots, (ttft, _, _) in DRAFT.items()}
    result = perform(TEST, planted(tmp_path, silent), capacity=100)
    assert [row[2] for row in result.tables[0].rows] == ["not measurable"] * 4
    assert all(level["preemption_events"] is None for level in result.measurements_to_dict()["levels"])
    assert any("preemption is not measurable" in note for note in result.notes)
    assert [level["pattern"] for level in result.measurements_to_dict()["levels"]] == [
        "base",
        "as at the base",
        "requests wait",
        "requests wait",
    ]


def test_an_engine_that_tells_of_its_requests_gives_rates_and_losses(tmp_path: Path) -> None:
    """12 of 1,000 requests are preempted in 20 events, of which 9 recover; 600 tokens are computed again."""
    report = {
        "preemptions": 20,
        "preempted": 12,
        "recovered": 9,
        "preempted_tokens": 600,
        "swapped_tokens": 0,
    }
    session = planted(tmp_path, {100: (0.5, 3, 0)})
    plain = session.answer

    def answer(name: str, load: Load) -> Measurement:
        result = plain(name, load)
        totals = {key: {"total": value} for key, value in report.items()}
        return Measurement(
            name, "", result.result | {"system": {"summary": {"server": totals}}}, result.table
        )

    session.answer = answer
    result = perform(TEST, session, capacity=100, levels=[100])
    assert result.tables[0].rows[0][2] == "1.2%"
    assert result.tables[1].rows[0][1:] == ["20", "75.0%", "30", "0", "not measurable", "10.0 s"]


@pytest.mark.parametrize("at", ["levels/125", "after"])
def test_a_system_that_is_lost_is_a_finding(tmp_path: Path, at: str) -> None:
    session = planted(tmp_path, DRAFT, lost_at=at)
    result = perform(TEST, session, capacity=100)
    report = result.measurements_to_dict()
    assert "cannot be reached" in report["system_lost"]
    assert report["recovered"] is False
    assert len(report["levels"]) == (2 if at == "levels/125" else 4)
    assert any("could not be reached" in note for note in result.notes)

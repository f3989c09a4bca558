"""The truth log: what is remembered is bounded, what is written down is all of it."""

import json
from pathlib import Path

from llmtap.clock import ManualClock
from llmtap.sim.server.truth import Truth, TruthAnchor, TruthLog


def truth(name: str, tokens: int = 1) -> Truth:
    return Truth(
        id=name,
        path="/",
        model="m",
        stream=True,
        accepted_ns=1,
        prompt_tokens=1,
        made_ns=[[5] * tokens],
        due_ns=[[5] * tokens],
        sent_ns=[[6] * tokens],
    )


def ids(log: TruthLog, since: int = 0) -> list[str]:
    return [t.id for t in log.page_since(since).truths]


def test_it_tells_what_ended_since() -> None:
    log = TruthLog(ManualClock(7))
    for name in "abc":
        log.begin(name)
        log.end(truth(name))
    assert ids(log) == ["a", "b", "c"]
    assert ids(log, 2) == ["c"]
    assert log.page_since(2).next == 3 == log.page_since(3).next
    assert log.page_since(0).anchor == TruthAnchor(7, ManualClock(7).wall_ns(), 0)


def test_the_file_has_every_request_and_the_anchor_first(tmp_path: Path) -> None:
    file = tmp_path / "truth.jsonl"
    for run in range(2):
        log = TruthLog(ManualClock(run), file)
        log.end(truth(f"r{run}", 2))
        log.close()
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert [line.get("id") for line in lines] == [None, "r0", None, "r1"], "a second run goes on behind it"
    assert lines[2]["anchor"]["mono_ns"] == 1
    assert (lines[1]["due_ns"], lines[1]["sent_ns"]) == ([[5, 5]], [[6, 6]])

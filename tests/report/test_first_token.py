"""Bars, sentence and table of the parts of a wait."""

from typing import Any

from llmtap.metrics.phases import PHASES, PhaseTimes
from llmtap.report.first_token import BAR_CELLS, first_token_lines, first_token_sentence, phase_table
from tests.support.traffic.exchanges import streamed

SECONDS = {"client": 0.001, "queue": 0.0, "connect": 0.2, "send": 0.0, "head": 0.5, "first_byte": 0.0}


def answer(n: int = 200, unusual: tuple[str, ...] = ()) -> dict[str, Any]:
    parts, start = [], 0.0
    for phase in PHASES:
        seconds = SECONDS.get(phase.name)
        parts.append(
            {
                "name": phase.name,
                "title": phase.title,
                "meaning": phase.meaning,
                "start": start,
                "seconds": seconds,
                "n": n,
                "median": 0.01,
                "usual": 0.02,
                "unusual": phase.name in unusual,
            }
        )
        start += seconds or 0.0
    about = {"waited": start, "n": n, "n_needed": 100, "same_model": True, "window": 3_500.0, "rule": "rule"}
    return {"id": "a", "model": "m", "parts": parts, "sentence": "sentence", **about}


def test_the_sentence_names_the_largest_excess_first_or_what_is_missing() -> None:
    named = first_token_sentence(answer(unusual=("connect", "head")))
    assert named.index("'response head' took 500 ms") < named.index("'connect' took 200 ms")
    for n, unusual, words in (
        (200, (), "No part is unusual beside 200 streams"),
        (99, (), "99 streams of the same model in the last hour, 100 are needed"),
        (1, (), "1 stream of the same model"),
    ):
        sentence = first_token_sentence(answer(n, unusual))
        assert words in sentence
        assert "'response head': 500 of 701 ms" in sentence
    young = answer() | {"window": 60.0, "same_model": False}
    assert "of the models counted as other since the start" in first_token_sentence(young)
    nothing = answer() | {"parts": [part | {"seconds": None} for part in answer()["parts"]]}
    assert "was not sent" in first_token_sentence(nothing)


def test_bars_are_on_one_scale_and_follow_each_other() -> None:
    lines = list(first_token_lines(answer(unusual=("head",))))
    bars = {phase.name: line for phase, line in zip(PHASES, lines[1:], strict=False)}
    connect, head = bars["connect"], bars["head"]
    assert connect.count("█") == round(0.201 / 0.701 * BAR_CELLS)
    assert connect.index("█") + connect.count("█") == head.index("█")
    assert head.endswith("UNUSUAL")
    assert "█" not in bars["queue"]
    assert bars["client"].count("▏") == 1, "too short for a cell"
    assert lines[-2:] == ["sentence", "rule"]


def test_the_table_of_many_streams_has_the_parts_that_they_have() -> None:
    times = PhaseTimes()
    assert phase_table({"phases": times.to_dict()}) is None
    assert phase_table({}) is None
    times.add(streamed())
    table = phase_table({"phases": times.to_dict()})
    assert table is not None
    assert [row[0] for row in table.rows] == [phase.title for phase in PHASES]
    assert {row[1] for row in table.rows} == {"1"}

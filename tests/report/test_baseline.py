"""Then and now, as a table and as curves: the figures of the result, and nothing where there are none."""

import html
from typing import Any

import pytest
from rich.console import Console

from llmtap.report.baseline import HEADS, baseline_distributions, baseline_rows
from llmtap.report.replay import render_replay
from llmtap.report.replay_page import replay_html
from llmtap.report.terminal import milliseconds
from tests.support.baselines import answer, both
from tests.support.pages import Page
from tests.support.replay_results import replay_result

CURVES = {"baseline-ttft", "baseline-tpot", "baseline-tbc-max", "baseline-e2e"}


def compared(lengths: tuple[int, int] = (5, 5)) -> dict[str, Any]:
    """21 rows that took 20 ms to the first token, and 60 to 80 now."""
    told = both([(answer(0, 20, lengths[0]), answer(0, 60 + i, lengths[1])) for i in range(21)]).to_dict()
    assert told is not None
    return told


def shown(result: dict[str, Any], width: int = 80) -> str:
    console = Console(width=width, no_color=True, force_terminal=False, highlight=False)
    with console.capture() as capture:
        console.print(render_replay(result))
    return capture.get()


def test_a_row_has_both_sides_and_the_difference() -> None:
    baseline = compared()
    rows = dict(baseline_rows(baseline))
    now = [milliseconds(baseline["pairs"]["ttft"]["now"][p]) for p in ("p50", "p95")]
    # The second of the differences, the middle one and the last but one.
    assert rows["TTFT"] == ["21", "20.0", now[0], "20.0", now[1], "+41.0", "+50.0", "+59.0", "21 of 21"]
    assert rows["TPOT"] == ["21", "20.0", "20.0", "20.0", "20.0", "0", "0", "0", "0 of 21"]
    assert rows.keys() == {"TTFT", "TPOT", "longest pause", "E2E"}, "all answers have one length"
    assert all(len(cells) == len(HEADS) for cells in rows.values())
    shorter = compared((9, 3))
    assert all(cell.startswith("-") for cell in dict(baseline_rows(shorter))["E2E"][5:8])
    assert [round(v, 3) for v in shorter["pairs"]["e2e"]["difference"].values()] == [-0.079, -0.07, -0.061]


def test_a_terminal_of_80_columns_holds_the_table() -> None:
    text = shown(replay_result() | {"baseline": compared((9, 3))})
    (head,) = [line for line in text.splitlines() if line.startswith("then and now, ms")]
    assert " ".join(head.split()) == "then and now, ms pairs then p50 now p50 diff p5 p50 p95 slower"
    (line,) = [line for line in text.splitlines() if line.startswith("TTFT ") and "+" in line]
    now = milliseconds(compared()["pairs"]["ttft"]["now"]["p50"])
    assert " ".join(line.split()) == f"TTFT 21 20.0 {now} +41.0 +50.0 +59.0 21 of 21"
    joined = " ".join(text.split())
    assert "baseline 21 of 21 rows ended well then and now · 0 of 21 answers as long as they were" in joined
    assert "uncertainty of a difference p50 0.101 ms, max 0.101 ms" in joined
    assert "21 of 21 answers are longer or shorter than they were by more than 5%" in joined


@pytest.mark.parametrize("result", [replay_result(), replay_result() | {"baseline": None}])
def test_without_a_baseline_nothing_is_said_of_one(result: dict[str, Any]) -> None:
    assert "then and now" not in shown(result).lower()
    made = Page(replay_html(result))
    assert "baseline" not in made.tables
    assert not [plot for plot in made.figures["plots"] if plot.startswith("baseline")]


def test_the_page_has_the_table_and_curves_of_both() -> None:
    baseline = compared()
    made = Page(replay_html(replay_result() | {"baseline": baseline}))
    head, *rows = made.tables["baseline"]
    assert head == ["", *HEADS]
    assert rows == [[title, *cells] for title, cells in baseline_rows(baseline)]
    assert "rows of one load are not independent" in made.words
    plots = made.figures["plots"]
    assert {plot.rsplit("-", 1)[0] for plot in plots if plot.startswith("baseline")} == CURVES
    drawn = {one["name"]: one for one in plots["baseline-ttft-0"]["data"] if one["line"]["dash"] != "dot"}
    assert drawn.keys() == {"TTFT then", "TTFT now"}
    for side in ("then", "now"):
        expected = [v * 1e3 for v in baseline["quantiles"][side]["ttft"]]
        assert drawn[f"TTFT {side}"]["x"] == expected[: len(drawn[f"TTFT {side}"]["x"])]
    assert "n 21" in made.captions["baseline-ttft"]


def test_figures_of_no_pair_have_no_curve() -> None:
    baseline = compared()
    baseline["pairs"]["ttft"]["n"] = 0
    assert {one.key for one in baseline_distributions(baseline)} == CURVES - {"baseline-ttft"}
    assert not list(baseline_distributions({}))
    assert baseline_rows({}) == []


def test_notes_are_text() -> None:
    evil = "<img src=x onerror=alert(1)>"
    result = replay_result() | {"baseline": compared() | {"notes": [evil, "an \x1b[31mescape"]}}
    text = replay_html(result)
    assert html.escape(evil) in text
    assert evil not in text
    assert "an \\u001b[31mescape" in shown(result, 200)

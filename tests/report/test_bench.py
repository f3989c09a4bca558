"""A benchmark's charts, page and terminal tables, and comparisons, say what the JSON says."""

from typing import Any

from llmtap.report.document import Table
from llmtap.report.plots import chart_panel, chart_table
from llmtap.report.render import rich_table
from tests.support.results.bench_documents import CHARTS


def chart(kind: str) -> dict[str, Any]:
    return next(one for one in CHARTS if one["kind"] == kind)


def test_every_figure_of_a_chart_is_in_its_table() -> None:
    for one in CHARTS:
        table = chart_table(one)
        assert len(table.rows) == sum(len(series["x"]) for series in one["series"])
        assert {len(row) for row in table.rows} == {len(table.heads)}
    long = {"name": "n", "x": list(range(1_000)), "y": list(range(1_000)), "low": [], "high": []}
    rows = chart_table(chart("line") | {"series": [long]}).rows
    assert (rows[0][1], rows[-1][1], len(rows)) == ("0", "999", 25)


def test_intervals_are_as_long_as_they_are_known_to_be() -> None:
    panel = chart_panel(chart("line"))
    error = panel.data[0]["error_y"]
    assert (error["arrayminus"], error["array"]) == ([2, 5, 10], [2, 0.0, 15])
    assert "error_y" not in panel.data[1]
    cells = [row[-1] for row in chart_table(chart("line")).rows[:3]]
    assert cells == ["48 to 52", "50 or more", "70 to 95"]
    bare = chart("line")["series"][0] | {"low": [None] * 3, "high": [None] * 3}
    assert "interval" not in chart_table(chart("line") | {"series": [bare]}).heads


def test_columns_of_sentences_are_aligned_left_and_figures_right() -> None:
    why = "the queue grows: 1.0 to 8.3 in flight, from the first to the last fifth"
    table = Table(["Load", "TTFT", "Why"], [["1", "12 ms", "sustained"], ["2", "14 ms", why]], breaks=True)
    assert table.classes == ["", "", " class=said"]
    rows = [
        ["1", "3.2 to 12 requests/s", "yes", "2 of 19 failed"],
        ["10", "4 req/s (3 req/s or more of these)", "no", "TTFT P99 is above 1 s"],
    ]
    shown = rich_table(Table(["Level", "Load", "Steady", "Why"], rows))
    assert [column.justify for column in shown.columns] == ["left", "right", "left", "left"]

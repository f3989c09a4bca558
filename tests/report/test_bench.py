"""A benchmark's charts, page and terminal tables, and comparisons, say what the JSON says."""

from typing import Any

from llmtap.report.document import chart_table
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

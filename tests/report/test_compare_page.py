"""A comparison's page and Markdown say what the JSON says, and names in it are text."""

from typing import Any

import plotly.graph_objects as plotly
import pytest

from llmtap.bench.report.compare import compare_results
from llmtap.report.compare import compare_markdown
from llmtap.report.compare_page import compare_html
from tests.support.bench_results import results_folder
from tests.support.pages import Page

EVIL = "<img src=x onerror=alert(1)>|"


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    place = tmp_path_factory.mktemp("results")
    a = results_folder(place / "a", test="itl")
    b = results_folder(place / "b", test="itl", gaps_slower=1.1, changes={"sut.software": EVIL})
    return compare_results(a, [b])


def test_a_page_has_what_differs_the_checklist_and_every_chart_with_its_table(told: dict[str, Any]) -> None:
    made = Page(compare_html(told))
    assert made.headings[:3] == ["b against a", "What was run", "5.4 Inter-Token Latency Distribution"]
    rows = made.tables["itl"]
    demands = [row[0] for row in rows if row[0].startswith(("4.", "6."))]
    assert demands == [row["id"] for row in told["tests"][0]["checklist"]["rows"]]
    assert ["TBC P50", "25-percent"] in [row[:2] for row in rows]
    plots = made.figures["plots"]
    assert len(plots) == len(told["tests"][0]["charts"]) == 5
    for plot in plots.values():
        plotly.Figure(data=plot["data"], layout=plot["layout"])
    links = [given["href"] for tag, given in made.elements if tag == "a"]
    ids = {given.get("id") for _, given in made.elements}
    assert {str(link).removeprefix("#") for link in links} <= ids


def test_what_the_checklist_lacks_is_the_first_thing_said(told: dict[str, Any]) -> None:
    made = Page(compare_html(told))
    fair = "4 of 4 MUST, 13 of 13 procedures"
    assert f"Inter-Token Latency Distribution: {fair}" in made.words
    assert made.words.index("Fair.") < made.words.index("What was run")
    rows = [dict(row, status="cannot tell") if row["id"] == "6.4-p6" else row for row in _rows(told)]
    test = dict(told["tests"][0], checklist=told["tests"][0]["checklist"] | {"rows": rows})
    lacking = Page(compare_html({**told, "tests": [test]}))
    assert "Not to be published as it is." in lacking.words
    assert "12 of 13 procedures; lacking: 6.4-p6" in lacking.words


def test_names_are_text(told: dict[str, Any]) -> None:
    made = Page(compare_html(told))
    assert "img" not in {tag for tag, _ in made.elements}
    assert EVIL in made.words
    assert "<img" not in "".join(made.scripts[1:])
    markdown = compare_markdown(told)
    assert "<img" not in markdown
    assert "&lt;img src=x onerror=alert(1)>\\|" in markdown


def test_nothing_in_common_is_said(told: dict[str, Any]) -> None:
    test = dict(told["tests"][0], tables=[], charts=[], comparisons=[], notes=[])
    out = {"test": "ttft", "only": ["a"]}
    made = Page(compare_html({**told, "tests": [test], "left_out": [out]}))
    assert "Nothing could be compared" in made.words
    assert "left out: ttft, of which only a has results" in made.words


def _rows(told: dict[str, Any]) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = told["tests"][0]["checklist"]["rows"]
    return rows

"""A benchmark's charts, page and terminal tables, and comparisons, say what the JSON says."""

from typing import Any

import pytest
from rich.console import Console

from llmtap.bench.report.compare import compare_results
from llmtap.report.bench import bench_html, compare_html, render_bench
from llmtap.report.document import Table
from llmtap.report.plots import chart_panel, chart_table
from llmtap.report.render import rich_table
from tests.support.results.bench_documents import CHARTS, bench_document, bench_report
from tests.support.results.bench_results import results_folder
from tests.support.results.pages import Page


def page(document: dict[str, Any]) -> Page:
    return Page(bench_html(document))


def told(document: dict[str, Any], **options: Any) -> str:
    console = Console(width=200, no_color=True, highlight=False)
    with console.capture() as capture:
        console.print(render_bench(document, **options))
    return capture.get()


def chart(kind: str) -> dict[str, Any]:
    return next(one for one in CHARTS if one["kind"] == kind)


def test_a_page_has_the_verdict_then_every_test_and_what_it_was_held_to() -> None:
    itl = bench_report("itl", section="5.4", title="Inter-Token Latency Distribution", charts=CHARTS[:3])
    made = page(bench_document(bench_report(), itl))
    assert made.words.index("Valid.") < made.words.index("What was run")
    titles = ["5.1 Time to First Token", "5.4 Inter-Token Latency Distribution"]
    assert [heading for heading in made.headings if heading in titles] == titles
    assert made.headings[-3:] == ["Every load", "Compliance", "To do it again"]
    assert set(made.figures["plots"]) == {"ttft-0", "itl-0", "itl-1", "itl-2"}
    finding = {"test": "ttft", "step": "load", "what": "rate", "says": "too few left"}
    bad = page(bench_document(verdict={"valid": False, "findings": [finding]}, quick=True))
    places = [bad.words.index(words) for words in ("Not valid.", "ttft, load: too few left", "What was run")]
    assert places == sorted(places)
    assert [given for _, given in bad.elements if given.get("class") == "verdict bad"]
    least = page({"tests": [], "verdict": {"valid": True}})
    assert least.headings[0] == "Benchmark of a server: no test was run"


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


def test_marks_stand_at_their_place_with_their_name() -> None:
    marks = chart_panel(chart("line")).data[2:]
    assert [(mark["x"], mark["text"]) for mark in marks] == [
        ([2, 2, 2], ["", "knee", ""]), ([4, 4, 4], ["", "saturation", ""]),
    ]  # fmt: skip
    assert all(min(mark["y"]) > 0 for mark in marks), "the axis is logarithmic"


def test_a_chart_in_words_says_where_its_figures_lie() -> None:
    assert chart_panel(chart("cdf")).words == "TTFT: half by 60, 99 % by 90."
    assert chart_panel(chart("histogram")).words.startswith("25 %: most often about 1 (70.0%).")
    assert chart_panel(chart("bars")).words == "P50: 40 (at on) to 80 (at off)."
    empty = chart("cdf") | {"series": [{"name": "none", "x": [], "y": [], "low": [], "high": []}]}
    assert chart_panel(empty).words == "none: nothing was measured."


def test_several_series_have_a_legend_and_differ_by_more_than_colour() -> None:
    assert not chart_panel(chart("cdf")).legend
    legend = chart_panel(chart("line")).legend
    assert [(key.name, key.colour, key.dash) for key in legend] == [("P50", 0, "solid"), ("P99", 1, "dash")]
    first, second = chart_panel(chart("histogram")).data
    assert first["marker"] != second["marker"]
    series = chart("bars")["series"]
    bars = chart("bars") | {"series": [*series, dict(series[0], name="P99")]}
    made = page(bench_document(bench_report(charts=[bars, chart("line")])))
    panels = [panel.partition("class=plot")[0] for panel in made.text.split("<div class=panel>")[1:]]
    assert [panel.count("<rect ") for panel in panels] == [2, 0]
    assert [panel.count('<path d="M0 7h40"') for panel in panels] == [0, 2]


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


def test_the_demands_can_be_chosen_by_test_level_and_status() -> None:
    made = page(bench_document())
    rows = [given for tag, given in made.elements if tag == "tr" and "data-status" in given]
    assert [(row["data-test"], row["data-level"], row["data-status"]) for row in rows] == [
        ("ttft", "MUST", "met"), ("ttft", "MUST", "not met"), ("ttft", "SHOULD", "cannot tell"),
    ]  # fmt: skip
    chosen = {given["data-filter"] for tag, given in made.elements if tag == "select"}
    assert {name.removeprefix("data-") for name in rows[0]} == chosen


def test_the_terminal_has_tables_notes_and_what_is_in_the_way() -> None:
    report = bench_report(deviations=["too short"], forfeits=["5.1.2.1-1"])
    findings = [
        {"test": "ttft", "step": "load", "what": "late", "says": "late"},
        {"test": "ttft", "step": "other", "what": "late", "says": "late, too"},
    ]
    not_run = [{"test": "fairness", "why": "[arms.x] is missing", "hint": "add it", "begun": False}]
    document = bench_document(report, not_run=not_run, verdict={"valid": False, "findings": findings})
    for line in (
        "TTFT P50  127 ms", "deviation: too short", "--quick gives up: 5.1.2.1-1",
        "not compliant (1 of 2 MUST, 0 of 1 SHOULD)",
        "not run    fairness: [arms.x] is missing\n           add it",
        "  4.4.1-1a MUST, not met: Which tokenizer. it is not stated",
        "NOT VALID: ttft, load and 1 other load: late",
    ):  # fmt: skip
        assert line in told(document)
    followed = told(document, minimum_follows=True)
    assert followed.count("NOT VALID") == 1 and "1 other load" not in followed
    assert "NOT VALID" not in told(bench_document(), minimum_follows=True)


def test_a_currency_without_a_price_is_left_out() -> None:
    document = bench_document()
    for price, shown in ((None, False), (2.5, True)):
        document["sut"]["hardware"] |= {"currency": "USD", "price_per_hour": price}
        assert ("hardware currency" in page(document).words) is shown


# ---------------------------------------------------------------- systems compared


@pytest.fixture(scope="module")
def compared(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    place = tmp_path_factory.mktemp("results")
    a = results_folder(place / "a", test="itl")
    return compare_results(a, [results_folder(place / "b", test="itl", gaps_slower=1.1)])


def test_a_comparison_has_what_differs_the_checklist_and_every_chart(compared: dict[str, Any]) -> None:
    made = Page(compare_html(compared))
    rows, test = made.tables["itl"], compared["tests"][0]
    demands = [row[0] for row in rows if row[0].startswith(("4.", "6."))]
    assert demands == [row["id"] for row in test["checklist"]["rows"]]
    assert ["TBC P50", "25-percent"] in [row[:2] for row in rows]
    assert len(made.figures["plots"]) == len(test["charts"]) == 5
    assert made.words.index("Fair.") < made.words.index("What was run")


def test_what_the_checklist_lacks_is_the_first_thing_said(compared: dict[str, Any]) -> None:
    test = compared["tests"][0]
    rows = [
        dict(row, status="cannot tell") if row["id"] == "6.4-p6" else row for row in test["checklist"]["rows"]
    ]
    test = dict(test, checklist=test["checklist"] | {"rows": rows})
    words = Page(compare_html({**compared, "tests": [test]})).words
    assert "Not to be published as it is." in words
    assert "12 of 13 procedures; lacking: 6.4-p6" in words


def test_nothing_in_common_is_said(compared: dict[str, Any]) -> None:
    test = dict(compared["tests"][0], tables=[], charts=[], comparisons=[], notes=[])
    out = {"test": "ttft", "only": ["a"]}
    words = Page(compare_html({**compared, "tests": [test], "left_out": [out]})).words
    assert "Nothing could be compared" in words
    assert "left out: ttft, of which only a has results" in words

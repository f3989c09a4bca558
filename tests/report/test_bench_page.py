"""A benchmark's page and its terminal tables say what the JSON says, and names in it are text."""

import html
import re
from importlib.resources import files
from typing import Any

import plotly.graph_objects as plotly
from rich.console import Console

from llmtap.report.bench import render_bench, render_table
from llmtap.report.bench_charts import chart_keys, chart_panel, chart_rows
from llmtap.report.bench_page import bench_html
from tests.support.bench_documents import CHARTS, bench_document, bench_report, load_step
from tests.support.pages import Page, contrast

EVIL = "<img src=x onerror=alert(1)>"


def page(document: dict[str, Any]) -> Page:
    return Page(bench_html(document))


def plots(made: Page) -> dict[str, Any]:
    found: dict[str, Any] = made.figures["plots"]
    return found


def told(document: dict[str, Any]) -> str:
    console = Console(width=200, no_color=True, highlight=False)
    with console.capture() as capture:
        console.print(render_bench(document))
    return capture.get()


def chart(kind: str) -> dict[str, Any]:
    return next(one for one in CHARTS if one["kind"] == kind)


def test_a_page_has_the_verdict_then_every_test_and_what_it_was_held_to() -> None:
    itl = bench_report("itl", section="5.4", title="Inter-Token Latency Distribution", charts=CHARTS[:3])
    made = page(bench_document(bench_report(), itl))
    assert made.headings[0].startswith("Benchmark of tiny, bf16: Time to First Token, Inter-Token")
    assert made.words.index("Valid.") < made.words.index("What was run")
    titles = ["5.1 Time to First Token", "5.4 Inter-Token Latency Distribution"]
    assert [heading for heading in made.headings if heading in titles] == titles
    assert made.headings[-3:] == ["Every load", "Compliance", "To do it again"]
    assert set(plots(made)) == {"ttft-0", "itl-0", "itl-1", "itl-2"}
    links = [given["href"] for tag, given in made.elements if tag == "a"]
    ids = {given.get("id") for _, given in made.elements}
    assert {str(link).removeprefix("#") for link in links} <= ids


def test_every_kind_of_chart_is_one_that_plotly_knows() -> None:
    made = page(bench_document(bench_report(charts=CHARTS)))
    for plot in plots(made).values():
        plotly.Figure(data=plot["data"], layout=plot["layout"])
    kinds = [plots(made)[f"ttft-{i}"]["data"][0]["type"] for i in range(len(CHARTS))]
    assert kinds == ["scatter", "scatter", "bar", "bar", "scatter", "scatter", "heatmap"]


def test_every_figure_of_a_chart_is_in_its_table() -> None:
    for one in CHARTS:
        heads, rows = chart_rows(one)
        assert len(rows) == sum(len(series["x"]) for series in one["series"])
        assert all(len(cells) == len(heads) - 1 for _, cells in rows)
    long = {"name": "n", "x": list(range(1_000)), "y": list(range(1_000)), "low": [], "high": []}
    _, rows = chart_rows(chart("line") | {"series": [long]})
    assert (rows[0][1][0], rows[-1][1][0], len(rows)) == ("0", "999", 25)


def test_intervals_are_as_long_as_they_are_known_to_be() -> None:
    panel = chart_panel(chart("line"))
    error = panel.data[0]["error_y"]
    assert (error["arrayminus"], error["array"]) == ([2, 5, 10], [2, 0.0, 15])
    assert "error_y" not in panel.data[1]
    assert chart_rows(chart("line"))[1][:2] == [
        ("P50", ["1", "50", "48 to 52"]), ("P50", ["2", "55", "50 or more"]),
    ]  # fmt: skip


def test_marks_stand_at_their_place_with_their_name() -> None:
    marks = chart_panel(chart("line")).data[2:]
    assert [(mark["x"], mark["text"]) for mark in marks] == [
        ([2, 2, 2], ["", "knee", ""]), ([4, 4, 4], ["", "saturation", ""]),
    ]  # fmt: skip
    assert all(min(mark["y"]) > 0 for mark in marks), "the axis is logarithmic"
    assert "knee at 2." in chart_panel(chart("line")).words


def test_a_chart_in_words_says_where_its_figures_lie() -> None:
    assert chart_panel(chart("cdf")).words == "TTFT: half by 60, 99 % by 90."
    assert chart_panel(chart("histogram")).words.startswith("25 %: most often about 1 (70.0%).")
    assert chart_panel(chart("bars")).words == "P50: 40 (at on) to 80 (at off)."
    empty = chart("cdf") | {"series": [{"name": "none", "x": [], "y": [], "low": [], "high": []}]}
    assert chart_panel(empty).words == "none: nothing was measured."


def test_several_series_have_a_legend_and_differ_by_more_than_colour() -> None:
    assert chart_keys(chart("cdf")) == []
    assert chart_keys(chart("line")) == [("P50", 0, "solid"), ("P99", 1, "dash")]
    first, second = chart_panel(chart("histogram")).data
    assert first["marker"] != second["marker"]


def test_names_are_text_for_html_and_for_plotly() -> None:
    series = [{"name": EVIL, "x": [EVIL], "y": [1.0], "low": [], "high": []}]
    bad = chart("bars") | {"title": EVIL, "x_title": EVIL, "series": series * 2}
    table = {"caption": EVIL, "heads": ["", EVIL], "rows": [[EVIL, EVIL]]}
    rows = [row | {"says": EVIL, "evidence": EVIL} for row in bench_report()["compliance"]["rows"]]
    report = bench_report(
        charts=[
            bad, chart("heat map") | {"series": series},
            chart("line") | {"marks": [{"x": 2, "says": EVIL}]},
        ],
        tables=[table], notes=[EVIL], configuration={EVIL: EVIL}, steps=[load_step(EVIL)],
        compliance=bench_report()["compliance"] | {"rows": rows}, exact_requests=EVIL,
    )  # fmt: skip
    finding = {"test": "ttft", "step": EVIL, "what": "x", "says": EVIL}
    made = page(bench_document(
        report, verdict={"valid": False, "findings": [finding]}, command=EVIL, sut={"model": EVIL},
        not_run=[{"test": EVIL, "why": EVIL}],
    ))  # fmt: skip
    assert not [tag for tag, _ in made.elements if tag == "img"]
    assert "<img" not in str(made.figures).replace("&lt;img", "")
    assert html.escape(EVIL) in made.text
    assert EVIL in told(bench_document(report))


def test_a_column_of_sentences_breaks_its_lines_and_one_of_figures_does_not() -> None:
    why = "the queue grows: 1.0 to 8.3 in flight, from the first to the last fifth"
    rows = [["1", "12 ms", "sustained"], ["2", "14 ms", why]]
    text = page(bench_document(bench_report(tables=[
        {"caption": "Levels", "heads": ["Load", "TTFT", "Why"], "rows": rows}
    ]))).text  # fmt: skip
    for cell in (
        "<th scope=col class=said>Why</th>", "<td class=said>sustained</td>", f"<td class=said>{why}</td>",
        "<th scope=col>TTFT</th>", "<td>14 ms</td>", "<th scope=row>2</th>",
    ):  # fmt: skip
        assert cell in text
    assert ".wide td.said, .wide th.said { white-space: normal;" in text


def test_bars_have_a_legend_of_bars_and_lines_one_of_lines() -> None:
    series = chart("bars")["series"]
    bars = chart("bars") | {"series": [*series, dict(series[0], name="P99")]}
    made = page(bench_document(bench_report(charts=[bars, chart("line")])))
    panels = [panel.partition("class=plot")[0] for panel in made.text.split("<div class=panel>")[1:]]
    assert [panel.count("<rect ") for panel in panels] == [2, 0]
    assert [panel.count('<path d="M0 7h40"') for panel in panels] == [0, 2]


def test_the_demands_can_be_chosen_by_test_level_and_status() -> None:
    made = page(bench_document())
    rows = [given for tag, given in made.elements if tag == "tr" and "data-status" in given]
    assert [(row["data-test"], row["data-level"], row["data-status"]) for row in rows] == [
        ("ttft", "MUST", "met"), ("ttft", "MUST", "not met"), ("ttft", "SHOULD", "cannot tell"),
    ]  # fmt: skip
    chosen = {given["data-filter"] for tag, given in made.elements if tag == "select"}
    assert {name.removeprefix("data-") for name in rows[0]} == chosen
    script = made.scripts[2]
    for given in ("select[data-filter]", "demand-words", "demands-shown", "dataset[dataset.filter]"):
        assert given in script


def test_what_is_not_valid_comes_first_and_in_red() -> None:
    finding = {"test": "ttft", "step": "load", "what": "rate", "says": "too few left"}
    made = page(bench_document(verdict={"valid": False, "findings": [finding]}, quick=True))
    places = [made.words.index(words) for words in ("Not valid.", "ttft, load: too few left", "What was run")]
    assert places == sorted(places)
    assert [given for _, given in made.elements if given.get("class") == "verdict bad"]
    assert "--quick" in made.words


def test_a_page_asks_nobody_for_anything() -> None:
    made = page(bench_document())
    (policy,) = [given["content"] for tag, given in made.elements if "http-equiv" in given]
    assert "default-src 'none'" in str(policy)
    links = [given.get("src") or given.get("href") or "#" for _, given in made.elements]
    assert all(link.startswith("#") for link in links)


def test_colours_of_statuses_can_be_read_on_light_and_dark() -> None:
    style = files("llmtap.report").joinpath("replay_page.css").read_text()
    grounds = re.findall(r"--ground: (#\w+)", files("llmtap.report").joinpath("curves.css").read_text())
    for name in ("bad", "good"):
        colours = re.findall(rf"--{name}: (#\w+)", style)
        for colour, ground in zip(colours[:2], grounds[:2], strict=True):
            assert contrast(colour, ground) >= 4.5


def test_a_document_of_nothing_is_a_page() -> None:
    made = page({"tests": [], "verdict": {"valid": True}})
    assert made.headings[0] == "Benchmark of a server: no test was run"


def test_the_terminal_has_tables_notes_and_what_is_in_the_way() -> None:
    report = bench_report(deviations=["too short"], forfeits=["5.1.2.1-1"])
    said = told(bench_document(
        report,
        not_run=[{"test": "fairness", "why": "[arms.x] is missing", "hint": "add it", "begun": False}],
        verdict={"valid": False, "findings": [
            {"test": "ttft", "step": "load", "what": "late", "says": "late"},
            {"test": "ttft", "step": "other", "what": "late", "says": "late, too"},
        ]},
    ))  # fmt: skip
    for line in (
        "5.1 Time to First Token", "Table 1: TTFT Results", "TTFT P50  127 ms", "note: intervals are of 95 %",
        "deviation: too short", "--quick gives up: 5.1.2.1-1", "not compliant (1 of 2 MUST, 0 of 1 SHOULD)",
        "  4.4.1-1a MUST, not met: Which tokenizer. it is not stated",
        "not run    fairness: [arms.x] is missing",
        "NOT VALID: ttft, load and 1 other load: late",
    ):  # fmt: skip
        assert line in said


def test_where_the_minimum_report_follows_findings_are_left_to_it() -> None:
    finding = {"test": "ttft", "step": "load", "what": "late", "says": "too late"}
    document = bench_document(verdict={"valid": False, "findings": [finding]})
    console = Console(width=200, no_color=True, highlight=False)
    with console.capture() as capture:
        console.print(render_bench(document, minimum_follows=True))
    assert capture.get().count("NOT VALID") == 1
    assert "too late" not in capture.get()
    valid = bench_document()
    with console.capture() as capture:
        console.print(render_bench(valid, minimum_follows=True))
    assert "NOT VALID" not in capture.get()


def test_a_currency_without_a_price_is_left_out() -> None:
    document = bench_document()
    for price, shown in ((None, False), (2.5, True)):
        document["sut"]["hardware"] |= {"currency": "USD", "price_per_hour": price}
        assert ("hardware currency" in page(document).words) is shown


def test_an_open_end_of_an_interval_is_told_and_has_no_bar() -> None:
    one = chart("line")
    heads, rows = chart_rows(one)
    assert heads[-1] == "interval"
    assert [cells[-1] for _, cells in rows[:3]] == ["48 to 52", "50 or more", "70 to 95"]
    assert chart_panel(one).data[0]["error_y"]["array"] == [2, 0.0, 15]
    bare = {**one, "series": [{**one["series"][0], "low": [None] * 3, "high": [None] * 3}]}
    assert "interval" not in chart_rows(bare)[0]


def test_a_terminal_table_has_sentences_on_the_left_and_figures_on_the_right() -> None:
    rows = [
        ["1", "3.2 to 12 requests/s", "yes", "2 of 19 failed"],
        ["10", "4 req/s (3 req/s or more of these)", "no", "TTFT P99 is above 1 s"],
    ]
    shown = render_table({"heads": ["Level", "Load", "Steady", "Why"], "rows": rows})
    assert [column.justify for column in shown.columns] == ["left", "right", "left", "left"]

"""`llmtap report RESULTS --compare OTHER`, as one types it."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

import llmtap.cli.report  # noqa: F401  it adds the command
from llmtap.cli.main import app
from llmtap.errors import ConfigError
from tests.support.bench_results import results_folder
from tests.support.pages import Page


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders `a`, `b` (slower by 10 %) and `c` (one run)."""
    place = tmp_path_factory.mktemp("results")
    results_folder(place / "a")
    results_folder(place / "b", slower=1.1, place_in_turn=1)
    results_folder(place / "c", runs=1)
    return place


def said(results: Path, *args: str) -> str:
    done = CliRunner().invoke(app, ["report", str(results / "a"), "--compare", str(results / "b"), *args])
    assert done.exit_code == 0, done.exception
    return done.output


def test_a_table_says_what_differs_and_whether_that_is_fair(results: Path) -> None:
    lines = said(results).splitlines()
    assert lines[0] == "5.1 Time to First Token: b (3 runs) against a (3 runs)"
    assert lines[1] == "fair comparison: 4 of 4 MUST, 13 of 13 procedures"
    (row,) = [line for line in lines if line.startswith("TTFT P50")]
    assert row.rstrip().endswith("worse")
    assert "b against a: what the test is about, p by Holm" in lines


def test_of_three_each_is_held_against_the_first(results: Path) -> None:
    told = json.loads(said(results, "--compare", str(results / "c"), "--json"))
    (test,) = told["tests"]
    assert [one["runs"] for one in test["systems"]] == [3, 3, 1]
    assert {row["b_system"] for row in test["comparisons"]} == {"b", "c"}
    assert {row["samples"] for row in test["comparisons"] if row["b_system"] == "c"} == {"requests"}


def test_a_page_and_markdown_are_written(results: Path, tmp_path: Path) -> None:
    page, text = tmp_path / "c.html", tmp_path / "c.md"
    said(results, "--html", str(page), "--markdown", str(text))
    assert "b against a" in Page(page.read_text()).headings[0]
    markdown = text.read_text()
    assert markdown.startswith("# a and b, compared\n")
    assert "| 6.1-1a | MUST |" in markdown
    assert said(results, "--markdown", "-").rstrip() == markdown.rstrip()


def test_what_is_lacking_is_named_in_the_table(results: Path) -> None:
    done = CliRunner().invoke(app, ["report", str(results / "a"), "--compare", str(results / "c")])
    assert "lacking: " in done.output
    assert "6.3-p2 not met" in done.output
    assert "note: c has 1 of the 3 independent runs" in done.output


def test_other_loads_are_named_at_the_top_and_are_exit_1(results: Path, tmp_path: Path) -> None:
    other = results_folder(tmp_path / "d", changes={"params.rate": 8.0}, place_in_turn=1)
    args = ["report", str(results / "a"), "--compare", str(other)]
    page, text = tmp_path / "d.html", tmp_path / "d.md"
    done = CliRunner().invoke(app, [*args, "--html", str(page), "--markdown", str(text)])
    assert done.exit_code == 1
    assert not isinstance(done.exception, ConfigError)
    lines = done.output.splitlines()
    assert lines[1] == "loads differ, and figures of them are not tested:"
    assert lines[2].startswith("  rate ")
    assert lines[2].endswith(" 8.0 of d")
    (row,) = [line for line in lines if line.startswith("TTFT P50")]
    assert row.rstrip().endswith("not tested")
    for written in (page, text):
        assert "loads differ" in written.read_text()
    assert CliRunner().invoke(app, [*args, "--json"]).exit_code == 1
    assert CliRunner().invoke(app, [*args, "--html", "-"]).exit_code == 1


def test_rates_are_named_for_what_they_are(results: Path) -> None:
    assert "output rate, mean of runs" in said(results)
    assert "| System | Output tok/s, highest load, median of runs |" in said(results, "--markdown", "-")


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (("a", "b", "--compare", "c"), "2 results to compare with"),
        (("a", "b"), "these are bench results\nhint: llmtap report a --compare b"),
        (("a", "b", "c", "--json"), "llmtap report a --compare b --compare c"),
        (("[ab]",), "llmtap report a --compare b"),
        (("a", "capture"), "a is bench results, and capture is none"),
        (("capture", "b"), "b is bench results, and capture is none"),
        ((".",), "llmtap report a --compare b --compare c"),
        (("one",), "one/a is bench results\nhint: llmtap report one/a"),
        (("a", "--compare", "none"), "none is no results folder"),
        (("a", "--compare", "a"), "is named twice"),
        (("a", "--compare", "b", "--html", "no/where.html"), "--html: there is no folder no"),
        (("a", "--compare", "b", "--json", "--markdown", "-"), "is written to stdout"),
    ],
)
def test_what_does_not_fit_is_named(
    results: Path, monkeypatch: pytest.MonkeyPatch, args: tuple[str, ...], says: str
) -> None:
    monkeypatch.chdir(results)
    (results / "capture").mkdir(exist_ok=True)
    (results / "one/a").mkdir(parents=True, exist_ok=True)
    (results / "one/a/bench.json").write_text("{}")
    done = CliRunner().invoke(app, ["report", *args])
    assert isinstance(done.exception, ConfigError), done.output
    assert says in str(done.exception)


def test_results_of_one_benchmark_are_told_as_markdown_too() -> None:
    done = CliRunner().invoke(app, ["report", "somewhere", "--markdown", "-"])
    assert "is of a results folder" in str(done.exception)

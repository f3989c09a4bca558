"""Every page loads nothing, can be used without seeing it, and takes names of others as text."""

import html
import re
from collections.abc import Callable
from importlib.resources import files
from typing import Any

import msgspec
import pytest

from llmtap.bench.report.compare import compare_results
from llmtap.bench.report.texts import full_markdown
from llmtap.load.replay.comparison import compare_replays, comparison_document
from llmtap.report.bench import bench_html, compare_html, compare_markdown, render_bench
from llmtap.report.document import COLOURS, Note, ReportDocument, Section, chart_figure, chart_table
from llmtap.report.experiment_page import experiment_html
from llmtap.report.pairs import pairs_html
from llmtap.report.render import page_html
from llmtap.report.replay import replay_html
from llmtap.report.sweep_page import sweep_html
from tests.report.simulated_runs import run
from tests.report.test_experiment_page import measured as compared_arms
from tests.report.test_pairs import summary as pair_summary
from tests.support.results.bench_documents import CHARTS, bench_document, bench_report, load_step
from tests.support.results.bench_results import results_folder
from tests.support.results.pages import Page, contrast
from tests.support.results.replay_results import replay_result, saved

SVG = "http://www.w3.org/2000/svg"
PAGE_BYTES_MAX = 1_000_000
EVIL = "<img src=x onerror=alert(1)>\"'&</script><script>alert(2)</script>|"


@pytest.fixture(scope="module")
def compared(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    place = tmp_path_factory.mktemp("results")
    a = results_folder(place / "a", test="itl")
    b = results_folder(place / "b", test="itl", gaps_slower=1.1, changes={"sut.software": EVIL})
    return msgspec.to_builtins(compare_results(a, [b]))


def spoilt(value: Any) -> Any:
    """Replace every text that somebody else can choose."""
    if isinstance(value, dict):
        return {k: spoilt(v) for k, v in value.items()}
    if isinstance(value, list):
        return [spoilt(v) for v in value]
    return EVIL if isinstance(value, str) else value


def evil_replay() -> dict[str, Any]:
    plain = replay_result(failed=1)
    evil = plain | {
        "plan": spoilt(plain["plan"]) | {EVIL: EVIL},
        "outcomes": {EVIL: 119, "complete": 1},
        "refusals": {"n": 1, "kinds": {EVIL: 1}},
        "tokens": plain["tokens"] | {"source": {EVIL: 3}},
        "warmup": {"requests": 0, "skipped": None, "problem": EVIL},
        "verdict": plain["verdict"]
        | {"valid": False, "findings": [{"what": EVIL, "limit": 1, "says": EVIL}]},
        "window": plain["window"] | {"start": EVIL, "end": EVIL},
    }
    evil["metrics"] = plain["metrics"] | {
        "itl": plain["metrics"]["itl"] | {"option": EVIL, "policy": {EVIL: 1}}
    }
    evil["system"]["series"]["server"]["series"][EVIL] = {"unit": EVIL, "kind": "gauge", "values": [1.0] * 9}
    return evil


def evil_bench() -> dict[str, Any]:
    def chart(kind: str, **changes: Any) -> dict[str, Any]:
        return next(one for one in CHARTS if one["kind"] == kind) | changes

    series = [{"name": EVIL, "x": [EVIL], "y": [1.0], "low": [], "high": []}]
    rows = [row | {"says": EVIL, "evidence": EVIL} for row in bench_report()["compliance"]["rows"]]
    report = bench_report(
        charts=[
            chart("bars", title=EVIL, x_title=EVIL, series=series * 2),
            chart("histogram", series=series),
            chart("line", marks=[{"x": 2, "says": EVIL}]),
        ],
        tables=[{"caption": EVIL, "heads": ["", EVIL], "rows": [[EVIL, EVIL]]}],
        notes=[EVIL],
        configuration={EVIL: EVIL},
        steps=[load_step(EVIL)],
        compliance=bench_report()["compliance"] | {"rows": rows},
        exact_requests=EVIL,
    )
    finding = {"test": "ttft", "step": EVIL, "what": "x", "says": EVIL}
    return bench_document(
        report,
        verdict={"valid": False, "findings": [finding]},
        command=EVIL,
        sut={"model": EVIL},
        not_run=[{"test": EVIL, "why": EVIL}],
    )


def evil_sweep() -> list[dict[str, Any]]:
    plain = [run(s, r, servers=k) for s in ("b", "a") for r in (1, 2, 3) for k in (1, 2)]
    scheduler = {"a": "a", "b": EVIL}
    return [
        r
        | {
            "scheduler": scheduler[r["scheduler"]],
            "trace": f"{EVIL}{r['load']['offered_rps']}",
            "fit": {"grid": EVIL, "r2": 1},
        }
        for r in plain
    ]


PAGES: dict[str, tuple[Callable[[], str], Callable[[], str]]] = {
    "replay": (lambda: replay_html(replay_result()), lambda: replay_html(evil_replay())),
    "bench": (
        lambda: bench_html(bench_document(bench_report(charts=CHARTS))),
        lambda: bench_html(evil_bench()),
    ),
    "sweep": (
        lambda: sweep_html([run(s, r) for s in "ab" for r in (3, 1, 9)]),
        lambda: sweep_html(evil_sweep()),
    ),
}
"""A plain page, and one of evil names."""


def replays_compared() -> str:
    comparison = compare_replays(saved({"a": replay_result(), "b": replay_result(failed=1)}))
    return page_html(comparison_document(comparison), "replay_page.css")


OTHERS: dict[str, Callable[[], str]] = {
    "pairs": lambda: pairs_html(pair_summary(group=4)),
    "experiment": lambda: experiment_html(compared_arms(units=60, added_ms=200, labels=True)),
    "replays compared": replays_compared,
}
"""Plain pages of the other reports."""


@pytest.mark.parametrize("name", [*PAGES, *OTHERS, "compare"])
def test_a_page_loads_nothing_and_can_be_used_without_seeing_it(name: str, compared: dict[str, Any]) -> None:
    makers = {name: plain for name, (plain, _) in PAGES.items()} | OTHERS
    made = Page(compare_html(compared) if name == "compare" else makers[name]())
    assert len(made.scripts) == 2
    own = re.sub(r"http://[\w.]+:\d+", "", made.text.replace(SVG, ""))
    assert not re.search(r"https?:|//\S+\.\w", own)
    assert not re.search(r"@import|url\((?!#)|fetch\(|XMLHttpRequest|import\(", own)
    for tag, given in made.elements:
        assert not given.keys() & {"src", "srcset", "data", "action", "poster", "background"}, tag
        assert tag not in ("link", "iframe", "object", "embed", "base", "form", "img"), tag
    (policy,) = [given["content"] or "" for _, given in made.elements if given.get("http-equiv")]
    assert policy.startswith("default-src 'none'")

    ids = [given["id"] for _, given in made.elements if given.get("id")]
    assert len(ids) == len(set(ids))
    links = {given["href"] or "" for tag, given in made.elements if tag == "a"}
    assert links and {link.removeprefix("#") for link in links} <= set(ids)
    drawn = [given for _, given in made.elements if given.get("class") == "plot"]
    assert {given["id"] for given in drawn} == made.figures["plots"].keys()
    assert all(given["role"] == "img" and given["aria-label"] for given in drawn)
    targets = {given["for"] for tag, given in made.elements if tag == "label" and given.get("for")}
    assert targets <= set(ids)
    assert len(made.text) < PAGE_BYTES_MAX


def test_the_page_of_a_benchmark_begins_with_the_headline_of_its_test() -> None:
    sentence = "Full Filter adds 191 ms"
    document = bench_document(bench_report(headline=[sentence]))
    words = Page(bench_html(document)).words
    assert 0 < words.index(sentence) < words.index("Valid.")
    assert sentence in _printed(document) and f"**{sentence}**" in full_markdown(document)


@pytest.mark.parametrize(
    "sections",
    [
        [Section("a", "A", []), Section("a", "B", [])],
        [Section("a-0", "A", [chart_figure("a", CHARTS)])],
        [Section("a", "A", [chart_figure("b", CHARTS)]), Section("c", "C", [chart_figure("b", CHARTS)])],
        [Section("settings", "A", [])],
        [Section("page-data", "A", [])],
        [Section("", "A", [])],
    ],
)
def test_a_page_with_missing_or_repeated_ids_is_not_made(sections: list[Section]) -> None:
    with pytest.raises(ValueError, match="must be unique"):
        page_html(ReportDocument("a page", settings=[Note("a setting")], sections=sections))


@pytest.mark.parametrize("name", [*PAGES, "compare"])
def test_names_of_others_are_text(name: str, compared: dict[str, Any]) -> None:
    made = Page(compare_html(compared) if name == "compare" else PAGES[name][1]())
    assert EVIL in made.words
    assert html.escape(EVIL) in made.text
    assert not [tag for tag, _ in made.elements if tag == "img"]
    assert sum(tag == "script" for tag, _ in made.elements) == 2
    assert not [given for _, given in made.elements if any(one.startswith("on") for one in given)]
    assert not re.search("innerHTML|outerHTML|insertAdjacentHTML|document.write", made.scripts[1])


def test_names_of_others_are_text_in_markdown_and_in_the_terminal(compared: dict[str, Any]) -> None:
    markdown = compare_markdown(compared)
    assert "<img" not in markdown
    assert "&lt;img src=x onerror=alert(1)>" in markdown and "\\|" in markdown
    document = evil_bench() | {"not_run": [{"test": "a\x1b[2J", "why": "b", "hint": "c\x1b"}]}
    assert EVIL in _printed(document)
    assert "\x1b" not in _printed(document)


def _printed(document: dict[str, Any]) -> str:
    from rich.console import Console

    console = Console(width=400, no_color=True, highlight=False)
    with console.capture() as capture:
        console.print(render_bench(document))
    return capture.get()


def test_every_colour_stands_out_from_its_ground_in_light_in_dark_and_on_paper() -> None:
    def themes(name: str) -> list[dict[str, str]]:
        style = files("llmtap.report").joinpath(name).read_text()
        found = re.findall(r":root {(.*?)}", style, re.S)
        return [dict(re.findall(r"--(\w+): (#\w{6});", block)) for block in found]

    common, verdicts = themes("curves.css"), themes("replay_page.css")
    assert len(common) == len(verdicts) == 3
    # WCAG 2.2, 1.4.11: 3 to 1 for what has to be seen; 1.4.3: 4.5 to 1 for what has to be read.
    least = {f"c{i}": 3.0 for i in range(COLOURS)}
    least |= dict.fromkeys(("ink", "soft", "link", "bad", "good"), 4.5)
    for colours, more in zip(common, verdicts, strict=True):
        for name, ratio in least.items():
            assert contrast((colours | more)[name], colours["ground"]) >= ratio, name


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

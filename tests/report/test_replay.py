"""A replay in the terminal, as Markdown and as a page: the verdict first, and missing parts left out."""

import re
from collections.abc import Callable
from typing import Any

import plotly.graph_objects as plotly
import pytest
from rich.console import Console

from llmtap.load.replay.result import timeline_of
from llmtap.report.replay import render_replay, render_verdicts, replay_html, replay_markdown
from llmtap.report.replay_terms import plan_rows
from llmtap.report.values import milliseconds
from llmtap.units import NS_PER_S
from tests.support.results.baselines import answer, both
from tests.support.results.pages import Page
from tests.support.results.replay_results import BEGAN_NS, replay_result

GOOD = replay_result()
CHARTS = {
    "first-token", "between-tokens", "end-to-end", "user-idle", "lateness", "load", "over-time-host",
    "over-time-server", "over-time-gpu",
}  # fmt: skip
BASELINE_CHARTS = {"baseline-ttft", "baseline-tpot", "baseline-tbc-max", "baseline-e2e"}


def shown(result: dict[str, Any], render: Callable[[Any], Any] = render_replay, width: int = 200) -> str:
    console = Console(width=width, no_color=True, force_terminal=False, highlight=False)
    with console.capture() as capture:
        console.print(render(result), soft_wrap=width > 80)
    return capture.get()


def page(result: dict[str, Any]) -> Page:
    return Page(replay_html(result))


def charts(made: Page) -> set[str]:
    return {plot.rsplit("-", 1)[0] for plot in made.figures["plots"]}


def finding(says: str, **more: Any) -> dict[str, Any]:
    return {"what": "x", "figure": 1, "limit": 0, "says": says, **more}


def compared(lengths: tuple[int, int] = (5, 5)) -> dict[str, Any]:
    """21 rows that took 20 ms to the first token, and 60 to 80 now."""
    told = both([(answer(0, 20, lengths[0]), answer(0, 60 + i, lengths[1])) for i in range(21)]).to_dict()
    assert told is not None
    return told


# ---------------------------------------------------------------- the verdict


def test_the_verdict_comes_first_on_the_page_and_in_markdown_and_last_in_the_terminal() -> None:
    for result, said in ((GOOD, "Valid."), (replay_result(failed=3), "Not valid.")):
        made = page(result)
        assert made.words.index(said) < made.words.index("Requests sent") < made.words.index("What was run")
        bad = [given for _, given in made.elements if given.get("class") == "verdict bad"]
        assert bool(bad) is (said == "Not valid.")
        text = replay_markdown(result)
        assert text.index(f"**{said}**") < text.index("## Latencies, ms") < text.index("## What was run")
    said_last = [finding("it was\x1b late"), finding("tokens differ", invalidates=False)]
    lines = shown(GOOD | {"verdict": {"valid": False, "findings": said_last}}).splitlines()
    assert lines[-2:] == ["NOT VALID: it was\\u001b late", "mind: tokens differ"]
    unjudged = {name: part for name, part in GOOD.items() if name != "verdict"}
    for text in (page(unjudged).words, replay_markdown(unjudged), shown(unjudged)):
        assert "Nobody has judged" in text


def test_findings_have_the_limit_in_the_unit_of_their_figure() -> None:
    findings = [
        {"what": "dispatch_lateness", "limit": 0.002, "says": "all was late"},
        {"what": "rate", "limit": 0.995, "says": "too few left"},
        {"what": "lost", "limit": 0, "says": "one died"},
        {"what": "of another version", "says": "so it is"},
    ]
    words = page(GOOD | {"verdict": {"valid": False, "findings": findings}}).words
    for said in ("all was late (limit 2.00 ms)", "too few left (limit 99.5 %)", "one died (limit 0)so it is"):
        assert said in words


def test_verdicts_of_several_replays_are_told_by_their_names() -> None:
    bad = {"valid": False, "findings": [finding("it was late")]}
    lines = shown({"replay-1.json": GOOD["verdict"], "replay-2\x1b.json": bad}, render_verdicts).splitlines()
    assert [lines[0], lines[2], lines[4]] == [
        "replay     replay-1.json", "replay     replay-2\\u001b.json", "NOT VALID: it was late",
    ]  # fmt: skip


# ---------------------------------------------------------------- figures


def test_every_chart_is_there_with_a_table_and_a_caption() -> None:
    made = page(GOOD)
    assert charts(made) == CHARTS == made.captions.keys()
    assert made.tables.keys() == CHARTS | {"settings", "figures-table", "outcomes"}
    for plot in made.figures["plots"].values():
        plotly.Figure(data=plot["data"], layout=plot["layout"])
    seconds = f"{GOOD['window']['seconds']:.4g} s"
    for key, caption in made.captions.items():
        for said in ("open loop, 20", "req/s asked", f"window {seconds}", "uncertainty 0.0500 ms",
                     "arrivals recorded, 20 req/s", "sent to http://host:8000"):  # fmt: skip
            assert said in caption, (key, said)
    for key, said in (("first-token", "n 120"), ("between-tokens", "ITL option B-even"),
                      ("between-tokens", "counted by usage (120)"), ("lateness", "1 process")):  # fmt: skip
        assert said in made.captions[key]


def test_tables_have_the_figures_with_marks_for_too_few() -> None:
    head, *rows = page(GOOD).tables["figures-table"]
    assert head == ["", "n", "mean", "p50", "p90", "p95", "p99", "p99.9", "max"]
    by_name = {row[0]: row[1:] for row in rows}
    ttft = GOOD["metrics"]["ttft"]
    cells = [milliseconds(ttft[name]) for name in ("mean", "p50", "p90", "p95", "p99", "p999", "max")]
    cells[4:6] = [f"{cell}*" for cell in cells[4:6]]
    assert by_name["TTFT"] == ["120", *cells]
    assert {"TTFT, from schedule", "E2E, from schedule", "ITL (option B-even)"} <= by_name.keys()
    assert "TTFT, reasoning" not in by_name, "of nothing"
    assert by_name["dispatch lateness"][-1] == "0"
    assert [cell.endswith("*") for cell in by_name["smooth benefit, tokens"][-3:]] == [True, True, False]
    many = page(replay_result(2_000, failed=30))
    assert ["truncated", "30", "1.5 %"] in many.tables["outcomes"]
    ttft_row = next(row for row in many.tables["figures-table"] if row[0] == "TTFT")
    assert [cell.endswith("*") for cell in ttft_row[-3:]] == [False, True, False]
    result = replay_result(failed=30)
    lines = [
        line.strip("| ").split(" | ") for line in replay_markdown(result).splitlines() if line[:2] == "| "
    ]
    in_markdown = {line[0]: line[1:] for line in lines}
    assert in_markdown["TTFT"][:3] == ["120", "99.0", "99.0"]
    assert in_markdown["truncated"] == ["30", "30 of 120"]
    for term, text in plan_rows(result):
        assert in_markdown[term] == [text.replace("_", "\\_").replace("*", "\\*")]


def test_ttft_from_submit_and_from_schedule_are_in_one_plot() -> None:
    result = replay_result(late_ms=40)
    drawn = page(result).figures["plots"]["first-token-0"]["data"]
    by_name: dict[str, list[tuple[float, float]]] = {}
    for one in drawn:
        by_name.setdefault(one["name"], []).extend(zip(one["x"], one["y"], strict=True))
    quantiles = result["quantiles"]
    for name, place in (("TTFT from submit", "submit"), ("TTFT from schedule", "schedule")):
        expected = list(zip((v * 1e3 for v in quantiles[place]["ttft"]), quantiles["shares"], strict=True))
        # Where the dotted part begins a point is in both.
        assert list(dict.fromkeys(by_name[name])) == list(dict.fromkeys(expected))
    assert {one["meta"]["line"] for one in drawn} == {0, 1}


def test_over_time_what_was_asked_sent_ended_and_in_flight() -> None:
    result = replay_result()
    sent = [BEGAN_NS + i * NS_PER_S // 20 for i in range(result["n"])]
    timeline = timeline_of(
        sent, [t + NS_PER_S // 10 for t in sent], began_ns=BEGAN_NS, until_ns=sent[-1] + NS_PER_S
    )
    result |= {"timeline": timeline | {"asked": result["timeline"]["asked"]}}
    made = page(result)
    plots = made.figures["plots"]
    lines = {one["name"]: one for one in plots["load-0"]["data"]}
    assert lines.keys() == {"asked", "sent", "ended"}
    assert lines["sent"]["y"][:-1] == result["timeline"]["sent"]
    flying = {one["name"]: one["y"] for one in plots["load-1"]["data"]}
    assert flying["in flight"][:-1] == result["timeline"]["in_flight"]
    assert flying["running, says the server"] == [5, 6, 7, 8, 9, 10, 11]
    columns = [result["timeline"][name] for name in ("t", "asked", "sent", "ended", "in_flight")]
    assert made.tables["load"][1:] == [[f"{v:g}" for v in row] for row in zip(*columns, strict=True)]
    timed = {name: plot["layout"] for name, plot in plots.items() if plot["layout"].get("meta")}
    assert {name.rsplit("-", 1)[0] for name in timed} == {
        "load", "over-time-host", "over-time-server", "over-time-gpu",
    }  # fmt: skip
    seconds = result["window"]["seconds"]
    assert {tuple(layout["xaxis"]["range"]) for layout in timed.values()} == {(0, seconds)}
    without = page(GOOD | {"timeline": GOOD["timeline"] | {"ended": None, "in_flight": None}})
    assert [one["name"] for one in without.figures["plots"]["load-0"]["data"]] == ["sent", "asked"]


def test_rows_are_compared_with_their_captures() -> None:
    baseline = compared()
    made = page(replay_result() | {"baseline": baseline})
    rows = {row[0]: row[1:] for row in made.tables["baseline"][1:]}
    now = [milliseconds(baseline["pairs"]["ttft"]["now"][p]) for p in ("p50", "p95")]
    # The second of the differences, the middle one and the last but one.
    assert rows["TTFT"] == ["21", "20.0", now[0], "20.0", now[1], "+41.0", "+50.0", "+59.0", "21 of 21"]
    assert rows["TPOT"] == ["21", "20.0", "20.0", "20.0", "20.0", "0", "0", "0", "0 of 21"]
    assert rows.keys() == {"TTFT", "TPOT", "longest pause", "E2E"}, "all answers have one length"
    assert charts(made) - CHARTS == BASELINE_CHARTS
    drawn = {one["name"]: one for one in made.figures["plots"]["baseline-ttft-0"]["data"]
             if one["line"]["dash"] != "dot"}  # fmt: skip
    for side in ("then", "now"):
        expected = [v * 1e3 for v in baseline["quantiles"][side]["ttft"]]
        assert drawn[f"TTFT {side}"]["x"] == expected[: len(drawn[f"TTFT {side}"]["x"])]
    baseline["pairs"]["ttft"]["n"] = 0
    assert "baseline-ttft" not in charts(page(replay_result() | {"baseline": baseline}))


def test_a_terminal_of_80_columns_holds_the_comparison() -> None:
    text = shown(replay_result() | {"baseline": compared((9, 3))}, width=80)
    (head,) = [line for line in text.splitlines() if line.startswith("then and now, ms")]
    assert " ".join(head.split()) == "then and now, ms pairs then p50 now p50 diff p5 p50 p95 slower"
    (line,) = [line for line in text.splitlines() if line.startswith("TTFT ") and "+" in line]
    now = milliseconds(compared()["pairs"]["ttft"]["now"]["p50"])
    assert " ".join(line.split()) == f"TTFT 21 20.0 {now} +41.0 +50.0 +59.0 21 of 21"
    assert "0 of 21 answers as long as they were" in " ".join(text.split())


def test_a_closed_loop_asks_for_no_rate() -> None:
    made = page(replay_result(closed=True))
    assert "arrivals whenever an answer has ended" in made.captions["first-token"]
    assert {one["name"] for one in made.figures["plots"]["first-token-0"]["data"]} == {"TTFT from submit"}
    assert "lateness" not in charts(made)
    assert "req/s planned" not in shown(replay_result(5, closed=True))


def test_the_whole_plan_is_there() -> None:
    rows = dict(row for row in page(GOOD).tables["settings"] if len(row) == 2)
    assert (rows["plan.arrivals.scale"], rows["plan.body.stream"], rows["plan.conversations"]) == (
        "2",
        "yes",
        "-",
    )
    words = page(replay_result(60, late_ms=500)).words
    assert "planned, 50 of 60 in time" in words


# ---------------------------------------------------------------- robustness


@pytest.mark.parametrize("part", [
    "plan", "load", "metrics", "corrected", "quantiles", "timeline", "system", "sender", "tokens", "goodput",
    "smooth_goodput", "dispatch_lateness", "outcomes", "warmup", "window", "uncertainty", "verdict",
    "baseline",
])  # fmt: skip
def test_a_part_that_is_missing_or_null_is_left_out(part: str) -> None:
    for result in ({k: v for k, v in GOOD.items() if k != part}, GOOD | {part: None}):
        made = page(result)
        assert made.headings[0].startswith("Replay of ")
        assert replay_markdown(result).startswith("# Replay of ")
        if part == "quantiles":
            assert charts(made) == {key for key in CHARTS if key.startswith(("load", "over-time"))}
        if part == "system":
            assert not [key for key in charts(made) if key.startswith("over-time")]


def test_the_least_is_a_report_too() -> None:
    least = {"n": 0, "verdict": {"valid": True, "findings": []}}
    assert not page(least).figures["plots"]
    assert replay_markdown(least).startswith("# Replay of ? to ?\n\n**Valid.**")


def test_names_of_others_are_text_in_markdown_and_in_the_terminal() -> None:
    evil_name = "<img src=x>|**bold** `code` _it_\n\x1b[2J"
    evil: dict[str, Any] = GOOD | {
        "plan": GOOD["plan"] | {"trace": evil_name, "notes": [evil_name]},
        "outcomes": {evil_name: 3},
        "errors": {evil_name: 1},
        "verdict": {"valid": False, "findings": [{"what": evil_name, "limit": 1, "says": evil_name}]},
        "sender": GOOD["sender"] | {"clocks": [
            {"host": "n1\x1b", "shared": False, "rtt": 0.001, "offset": 0.0025, "drift": 0.0},
        ]},
    }  # fmt: skip
    text = replay_markdown(evil)
    assert "<" not in text and "\x1b" not in text
    assert not re.search(r"(?<!\\)\*\*bold|(?<!\\)`", text)
    for line in text.splitlines():
        if line.startswith("| ") and "img" in line:
            assert len(re.findall(r"(?<!\\)\|", line)) in (3, 4)
    assert "\x1b" not in shown(evil)
    assert "clocks     n1\\u001b within 0.500 ms, 2.50 ms ahead (allowed for)" in shown(evil)

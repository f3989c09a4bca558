"""A replay in the terminal, as Markdown and as a page: the verdict first, and missing parts left out."""

import re
from collections import Counter
from typing import Any

import msgspec
import pytest
from rich.console import Console

from llmtap.load.replay.result import timeline_of
from llmtap.metrics.refusals import labels_document
from llmtap.report.replay import render_replay, replay_html, replay_markdown
from llmtap.units import NS_PER_S
from tests.support.results.pages import Page
from tests.support.results.replay_results import BEGAN_NS, replay_result

GOOD = replay_result()


def shown(result: dict[str, Any]) -> str:
    console = Console(width=200, no_color=True, force_terminal=False, highlight=False)
    with console.capture() as capture:
        console.print(render_replay(result), soft_wrap=True)
    return capture.get()


def page(result: dict[str, Any]) -> Page:
    return Page(replay_html(result))


def test_over_time_what_was_asked_sent_ended_and_in_flight() -> None:
    result = replay_result()
    sent = [BEGAN_NS + i * NS_PER_S // 20 for i in range(result["n"])]
    timeline = timeline_of(
        sent, [t + NS_PER_S // 10 for t in sent], began_ns=BEGAN_NS, until_ns=sent[-1] + NS_PER_S
    )
    result["timeline"] = msgspec.to_builtins(timeline) | {"asked": result["timeline"]["asked"]}
    made = page(result)
    plots = made.figures["plots"]
    lines = {one["name"]: one for one in plots["load-0"]["series"]}
    assert lines.keys() == {"planned", "sent", "ended"}
    assert lines["sent"]["y"][:-1] == result["timeline"]["sent"]
    flying = {one["name"]: one["y"] for one in plots["load-1"]["series"]}
    assert flying["in flight"][:-1] == result["timeline"]["in_flight"]
    assert flying["running, says the server"] == [5, 6, 7, 8, 9, 10, 11]
    columns = [result["timeline"][name] for name in ("t", "asked", "sent", "ended", "in_flight")]
    assert made.tables["load"][1:] == [[f"{v:g}" for v in row] for row in zip(*columns, strict=True)]
    timed = {name: plot for name, plot in plots.items() if plot.get("timed")}
    assert {name.rsplit("-", 1)[0] for name in timed} == {
        "load",
        "over-time-host",
        "over-time-server",
        "over-time-gpu",
    }
    seconds = result["window"]["seconds"]
    assert {tuple(plot["x"]["range"]) for plot in timed.values()} == {(0, seconds)}
    without = page(GOOD | {"timeline": GOOD["timeline"] | {"ended": None, "in_flight": None}})
    assert [one["name"] for one in without.figures["plots"]["load-0"]["series"]] == ["sent", "planned"]


def test_names_of_others_are_text_in_markdown_and_in_the_terminal() -> None:
    evil_name = "<img src=x>|**bold** `code` _it_\n\x1b[2J"
    evil: dict[str, Any] = GOOD | {
        "plan": GOOD["plan"] | {"trace": evil_name, "notes": [evil_name]},
        "outcomes": {evil_name: 3},
        "errors": {evil_name: 1},
        "verdict": GOOD["verdict"]
        | {"valid": False, "findings": [{"what": evil_name, "limit": 1, "says": evil_name}]},
        "sender": GOOD["sender"]
        | {"clocks": [{"host": "n1\x1b", "shared": False, "rtt": 0.001, "offset": 0.0025}]},
    }
    text = replay_markdown(evil)
    assert "<" not in text and "\x1b" not in text
    assert not re.search(r"(?<!\\)\*\*bold|(?<!\\)`", text)
    for line in text.splitlines():
        if line.startswith("| ") and "img" in line:
            assert len(re.findall(r"(?<!\\)\|", line)) in (3, 4)
    assert "\x1b" not in shown(evil)
    assert "clocks         n1\\u001b within 0.500 ms, 2.50 ms ahead (allowed for)" in shown(evil)


@pytest.mark.parametrize(
    ("gap", "events", "bursty"),
    [(0.0, 8.04, True), (0.001, 8.04, True), (0.0011, 8.04, False), (0.0, 1.99, False)],
)
def test_chunks_that_come_in_bursts_are_a_caution(gap: float, events: float, bursty: bool) -> None:
    told = replay_result()
    told["metrics"]["tbc"]["p50"], told["chunking"]["events_per_read"] = gap, events
    says = "8 chunks come at a time, so the time per token looks too short."
    texts = (shown(told), replay_markdown(told), replay_html(told))
    assert [says in text for text in texts] == [bursty] * 3
    assert f"{events:.3g} events a read" in texts[0]


def test_refusals_against_labels_are_a_table_in_every_form() -> None:
    assert "false positives" not in shown(GOOD) + replay_markdown(GOOD) + replay_html(GOOD)
    counts = Counter(
        {
            "should-answer answered": 81,
            "should-answer refused": 7,
            "should-refuse answered": 7,
            "should-refuse refused": 25,
            "unknown": 2,
        }
    )
    result = GOOD | {"labels": labels_document(counts)}
    row = ["all", "should-answer", "81", "7", "0", "false positives", "8.0%, 3.9% to 15.5%"]
    assert row in page(result).tables["outcomes"]
    assert f"| {' | '.join(row)} |" in replay_markdown(result)
    text = " ".join(shown(result).split())
    assert " ".join(row) in text
    assert "all should-refuse 7 25 0 false negatives 21.9%, 11.0% to 38.8%" in text
    assert "Labels that do not count: all: unknown 2." in text


def test_a_share_has_the_three_digits_of_a_histogram() -> None:
    told = replay_result()
    told["metrics"]["qoe_area_step"] |= {"p50": 0.9998, "p90": 0.9876}
    [row] = [line for line in replay_markdown(told).splitlines() if line.startswith("| area ratio |")]
    assert [cell.strip(" *") for cell in row.split("|")][4:6] == ["1", "0.988"]

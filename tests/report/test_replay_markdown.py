"""A replay as Markdown says what its JSON says, the verdict first; names of others are text."""

import re
from typing import Any

import pytest

from llmtap.report.replay_markdown import replay_markdown
from llmtap.report.replay_terms import plan_rows
from tests.support.replay_results import replay_result

GOOD = replay_result()
EVIL = "<img src=x>|**bold** `code` _it_\n\x1b[2J"


def cells_of(text: str) -> dict[str, list[str]]:
    """Rows of all tables, by what stands before them."""
    rows = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| ")]
    return {row[0]: row[1:] for row in rows}


def test_the_verdict_is_said_before_any_figure() -> None:
    text = replay_markdown(GOOD)
    lines = text.splitlines()
    assert lines[0] == "# Replay of trace.csv to http://host:8000"
    assert lines[2].startswith("**Valid.** Nothing that is checked speaks against the figures")
    assert text.index("**Valid.**") < text.index("## Latencies, ms") < text.index("## What was run")
    bad = replay_markdown(replay_result(failed=3))
    assert "**Not valid.** What speaks against the figures:\n\n- 3 of 120 requests did not end well" in bad
    assert "Nobody has judged" in replay_markdown({k: v for k, v in GOOD.items() if k != "verdict"})


def test_figures_outcomes_and_the_plan_are_tables() -> None:
    result = replay_result(failed=30)
    rows = cells_of(replay_markdown(result))
    assert rows["TTFT"][:3] == ["120", "99.0", "99.0"]
    assert rows["complete"] == ["90", "90 of 120"]
    assert rows["truncated"] == ["30", "30 of 120"]
    for term, text in plan_rows(result):
        assert rows[term] == [text.replace("_", "\\_").replace("*", "\\*")]
    assert "\\* p99 of fewer than 1,000 samples" in replay_markdown(result)


@pytest.mark.parametrize("part", ["plan", "load", "metrics", "corrected", "outcomes", "sender", "baseline"])
def test_a_part_that_is_missing_or_null_is_left_out(part: str) -> None:
    for result in ({k: v for k, v in GOOD.items() if k != part}, GOOD | {part: None}):
        assert replay_markdown(result).startswith("# Replay of ")


def test_the_least_is_a_report_too() -> None:
    least = replay_markdown({"verdict": {"valid": True, "findings": []}})
    assert least.startswith("# Replay of ? to ?\n\n**Valid.**")


def test_names_of_others_are_text() -> None:
    evil: dict[str, Any] = GOOD | {
        "plan": GOOD["plan"] | {"trace": EVIL, "notes": [EVIL]},
        "outcomes": {EVIL: 3},
        "errors": {EVIL: 1},
        "verdict": {"valid": False, "findings": [{"what": EVIL, "limit": 1, "says": EVIL}]},
    }
    text = replay_markdown(evil)
    assert "<" not in text and "\x1b" not in text
    assert not re.search(r"(?<!\\)\*\*bold|(?<!\\)`", text)
    for line in text.splitlines():
        if line.startswith("| ") and "img" in line:
            assert len(re.findall(r"(?<!\\)\|", line)) in (3, 4)

from typing import Any

import pytest
from rich.console import Console

from llmtap.report.integrity import headline, render_integrity


def relay(**told: Any) -> dict[str, Any]:
    return {
        "relay": "run.0.1", "opened": 9, "present": 9, "duplicates": 0, "missing": 0, "ranges": [],
        "dropped": {}, "unsettled": 0, "since": 0, "unexplained": 0, "exact": True, "clock_set": [], **told,
    }  # fmt: skip


def capture(*relays: dict[str, Any], **told: Any) -> dict[str, Any]:
    relays = relays or (relay(),)
    return {
        "capture": "c1", "present": sum(r["present"] for r in relays),
        "missing": sum(r["missing"] for r in relays), "duplicates": 0, "unexplained": 0, "exact": True,
        "not_kept": {}, "damaged": {}, "meters": 1, "closed": True, "relays": list(relays), **told,
    }  # fmt: skip


def checked(*captures: dict[str, Any], **told: Any) -> dict[str, Any]:
    return {"ok": True, "unnumbered": 0, "broken": [], "captures": list(captures), **told}


def text(integrity: dict[str, Any]) -> str:
    console = Console(width=100, no_color=True, highlight=False)
    with console.capture() as out:
        console.print(render_integrity(integrity))
    return out.get()


MISSING = relay(present=5, missing=4, ranges=[(2, 2), (4, 6)])

BIAS = " · figures may be biased: these are not in them"
OPEN = ": runs still, or was killed; what began after its last word is not known"

CASES = [
    (checked(capture()), "9 present · none missing"),
    (checked(capture(MISSING)), f"5 present · 4 missing (44.4%), why is known of all{BIAS}"),
    (checked(capture(MISSING, unexplained=3)),
     f"5 present · 4 missing (44.4%), 3 of them unexplained{BIAS}"),
    (checked(capture(MISSING, unexplained=3, exact=False)),
     f"5 present · 4 missing (44.4%), at least 3 of them unexplained{BIAS}"),
    (checked(capture(present=99, missing=1)), "99 present · 1 missing (1.0%), why is known of all"),
    (checked(capture(present=98, missing=1)),
     f"98 present · 1 missing (1.0%), why is known of all{BIAS}"),
    (checked(capture(present=9_999, missing=1)),
     "9,999 present · 1 missing (under 0.1%), why is known of all"),
    (checked(capture(present=0, missing=7)), f"0 present · 7 missing (all), why is known of all{BIAS}"),
    (checked(capture(duplicates=2)), "9 present · none missing · 2 there twice"),
    (checked(capture(), capture(closed=False)),
     f"18 present · none missing · not closed: c1{OPEN}"),
    (checked(capture(), *(capture(closed=False, capture=f"c{i}") for i in range(2, 7))),
     f"54 present · none missing · not closed: c2, c3, c4 and 2 more{OPEN}"),
    (checked(capture(), broken=[{"file": "a", "problem": "b"}]),
     "9 present · none missing · 1 file could not be read"),
    (checked(unnumbered=7), "7 exchanges without numbers: nothing can be said of missing ones"),
]  # fmt: skip


@pytest.mark.parametrize(("integrity", "line"), CASES)
def test_one_line_says_it(integrity: dict[str, Any], line: str) -> None:
    assert headline(integrity) == line


def test_everything_that_is_known_is_listed() -> None:
    told = relay(
        present=5, missing=4, ranges=[(2, 2), (4, 6)], dropped={"overflow": 1, "no_meter": 1}, unsettled=1,
        since=1, duplicates=3, clock_set=[{"seq": 7, "arrival_ns": 1, "anchor": 1}],
    )  # fmt: skip
    one = capture(
        told, unexplained=1, exact=False, not_kept={"disk": 2}, damaged={"batches": 1, "bytes": 70}, meters=2
    )
    said = text(checked(one, ok=False, broken=[{"file": "x.parquet", "problem": "is damaged"}]))
    for line in (
        "broken     x.parquet: is damaged",
        "capture    c1: 5 present, 4 missing",
        "  measured and not kept: disk 2",
        "  damaged in the spool: batches 1, bytes 70",
        "  2 runs of the meter wrote it",
        "  unexplained: at least 1",
        "  relay run.0.1: 9 begun, 5 present",
        "    missing 4: 2, 4-6",
        "    accounted for: dropped overflow 1, no_meter 1, under way at its last word 1, begun after it 1",
        "    there twice: 3",
        "    its wall clock had been set before 7",
    ):
        assert line in said.splitlines()


def test_which_capture_was_not_closed_is_told() -> None:
    lines = text(checked(capture(), capture(capture="c2", closed=False))).splitlines()
    assert "capture    c1: 9 present, 0 missing" in lines
    assert "capture    c2: 9 present, 0 missing, not closed" in lines


def test_what_nobody_accounts_for_is_said_to_be_so() -> None:
    assert "    accounted for: nothing" in text(checked(capture(MISSING))).splitlines()

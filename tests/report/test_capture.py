from typing import Any

import pytest
from rich.console import Console

from llmtap.metrics.summary import Summary
from llmtap.report.capture import _duration, render_capture, render_integrity
from tests.support.traffic.exchanges import streamed


def summary(n: int = 3, **told: Any) -> dict[str, Any]:
    s = Summary()
    for i in range(n):
        s.add(streamed(i))
    window = {
        "name": "capture",
        "seconds": 2.0,
        "start": "2026-01-01T00:00:00Z",
        "end": "2026-01-01T00:00:02Z",
    }
    return {**s.to_dict(window, 2.0), **told}


def text(told: dict[str, Any], width: int = 200) -> str:
    console = Console(width=width, no_color=True, highlight=False)
    with console.capture() as out:
        console.print(render_capture(told))
    return out.get()


def listed(integrity: dict[str, Any]) -> str:
    console = Console(width=200, no_color=True, highlight=False)
    with console.capture() as out:
        console.print(render_integrity(integrity))
    return out.get()


FIGURES = {"n": 5, "mean": 7.5, "min": 1, "max": 9_000, "p50": 5, "p90": 8, "p95": 8, "p99": 8_999}
WORKLOAD: dict[str, Any] = {
    "arrivals": {"n": 5, "seconds": 7_500.0, "rate_rps": 12.345, "gap_cv": 1.234, "ties": 0.25},
    "input_tokens": {**FIGURES, "total": 40, "source": {"usage": 4, "tokenizer": 1}},
    "output_tokens": {"n": 0, "source": {}},
    "elapsed": FIGURES,
    "before_submit": {"first_byte": 4, "response_end": 3},
    "prefix": [{"capture": "c1", "unit": "tokens", "block_size": 512, "blocks": 4_000, "hits": 1_000,
                "share": 0.25, "units_hit_max": 512_000}],
    "sessions": {
        "n": 2, "exchanges": 5, "turns": FIGURES, "single_turn_share": 0.5, "source": {"prefix": 5},
        "think": {"all": FIGURES, "human": FIGURES, "tool": {"n": 0}}, "tool_turn_share": 0.125,
    },
}  # fmt: skip


def test_the_heading_says_what_was_read() -> None:
    about = {"rows": 1_234, "files": 2, "bytes": 3 << 20, "captures": ["a", "b"], "level": ["shape"],
             "source": [], "tap_version": ["0.1.0"]}  # fmt: skip
    first, second, *_ = text(summary(capture=about)).splitlines()
    captures = "2 captures, summed up as one"
    assert first == f"1,234 exchanges · 2 files, 3.0 MiB · {captures} · level shape · llmtap 0.1.0"
    assert second == "2026-01-01T00:00:00Z to 2026-01-01T00:00:02Z"


def test_the_workload_is_told_in_lines() -> None:
    lines = text(summary(workload=WORKLOAD)).splitlines()
    sessions = "sessions   2 conversations · turns mean 7.5, p90 8, max 9,000 · 50.0% of one turn"
    sessions += " · 12.5% of turns by tools"
    arrivals = "arrivals   12.3 req/s arrived in 2 h 5 min, first to last · CV of gaps 1.23"
    arrivals += " · 25.0% at the moment of the one before"
    elapsed = "elapsed    p50 5 s, p90 8 s, p99 2 h 30 min, max 2 h 30 min from arrival to end, n 5"
    elapsed += " (no E2E: `submit` is not known)"
    early = "left out   before their request was all sent, 4 answers had begun (no TTFB, no TTFT)"
    early += " and 3 had ended (no E2E)"
    for line in (
        arrivals,
        elapsed,
        early,
        "input      8 tokens mean · p50 5 · p90 8 · p99 8,999 · max 9,000 · by usage 4, tokenizer 1",
        "prefixes   25.0% shared, in a cache without end: 1,000 of 4,000 blocks of 512 tokens",
        sessions,
        "think time people: p50 5 s, p90 8 s, p99 2 h 30 min (n 5)",
    ):  # fmt: skip
        assert line in lines
    assert not any(line.startswith(("output ", "think time tools")) for line in lines)


def test_spools_and_files_that_were_passed_over_are_told() -> None:
    broken = [{"file": f"llmtap-{i}.parquet", "problem": "is damaged\x1b"} for i in range(22)]
    about = {"rows": 1, "files": 2, "bytes": 9, "spools": 1, "broken": broken}
    lines = text(summary(capture=about)).splitlines()
    assert lines[0] == "1 exchanges · 2 files (1 still in the spool), 9 B"
    assert "broken     llmtap-19.parquet: is damaged\\u001b" in lines
    assert "broken     and 2 more (--json names all)" in lines
    assert not any("llmtap-20." in line for line in lines)


def test_what_a_trace_does_not_tell_takes_no_room() -> None:
    told = summary(0)
    told["uncertainty"], told["load"]["achieved_rps"] = None, None
    said = text(told)
    assert "uncertainty" not in said
    assert "req/s" not in said
    assert "p50" not in said
    assert "req/s ended (recorded)" in text(summary(load={"mode": "recorded", "achieved_rps": 2.0}))
    assert "uncertainty 0.0500 ms" in text(summary())


def test_groups_are_a_table_and_their_names_move_no_cursor() -> None:
    groups = {f"t{i:02}": summary(2) for i in range(20)} | {"last": summary(1)}
    groups = {"evil\x1b[2J" + "x" * 90: summary(3), **groups}
    said = text(summary(by={"tenant": groups}))
    assert "\x1b" not in said
    rows = said.splitlines()
    head = next(i for i, row in enumerate(rows) if row.startswith("tenant "))
    assert rows[head + 1].startswith("evil\\u001b[2Jxxx")
    assert rows[head + 2].split()[:2] == ["t00", "2"]
    assert not any(row.startswith("last") for row in rows)
    assert "and 2 more (--json has up to 1,000)" in rows


@pytest.mark.parametrize(
    ("seconds", "said"),
    [(None, "-"), (0.0, "0 ms"), (0.01234, "12.3 ms"), (1.0, "1 s"), (119.6, "120 s"), (125, "2 min"),
     (3_600 * 3 + 60 * 20, "3 h 20 min"), (86_400 * 14 + 3_600, "14 d 1 h")],
)  # fmt: skip
def test_durations_are_for_people(seconds: float | None, said: str) -> None:
    assert _duration(seconds) == said


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
    assert listed(integrity).splitlines()[0] == line


def test_everything_that_is_known_is_listed() -> None:
    told = relay(
        present=5, missing=4, ranges=[(2, 2), (4, 6)], dropped={"overflow": 1, "no_meter": 1}, unsettled=1,
        since=1, duplicates=3, clock_set=[{"seq": 7, "arrival_ns": 1, "anchor": 1}],
    )  # fmt: skip
    one = capture(
        told, unexplained=1, exact=False, not_kept={"disk": 2}, damaged={"batches": 1, "bytes": 70}, meters=2
    )
    said = listed(checked(one, ok=False, broken=[{"file": "x.parquet", "problem": "is damaged"}]))
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
    lines = listed(checked(capture(), capture(capture="c2", closed=False))).splitlines()
    assert "capture    c1: 9 present, 0 missing" in lines
    assert "capture    c2: 9 present, 0 missing, not closed" in lines


def test_what_nobody_accounts_for_is_said_to_be_so() -> None:
    assert "    accounted for: nothing" in listed(checked(capture(MISSING))).splitlines()

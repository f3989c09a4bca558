from typing import Any

import pytest
from rich.console import Console

from llmtap.metrics.summary import Summary
from llmtap.report.capture import _duration, render_capture
from tests.report.test_integrity import capture as integrity_of
from tests.report.test_integrity import checked
from tests.support.exchanges import streamed


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


def test_the_summary_and_the_integrity_are_told() -> None:
    said = text(summary(integrity=checked(integrity_of())))
    assert "integrity  9 present · none missing" in said.splitlines()
    assert any(line.startswith("TTFT ") for line in said.splitlines())


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


def test_parts_that_are_missing_are_left_out() -> None:
    said = text(summary(0))
    assert "n 0" in said
    assert not any(line.startswith(("arrivals", "sessions", "integrity")) for line in said.splitlines())


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

"""Summaries and resources in the terminal: figures with their units, marked where samples are too few."""

from typing import Any

import pytest

from llmtap.exchange.exchange import OUTPUT, EventLog, Exchange, Timeline, Tokens
from llmtap.exchange.outcome import EventClass, TokenSource
from llmtap.metrics.summary import Summary
from llmtap.report.render import terminal_text
from llmtap.report.summary import series_value, summary_blocks, system_blocks
from llmtap.report.values import milliseconds, number

MS = 1_000_000


def summary(n: int) -> dict[str, object]:
    s = Summary()
    for i in range(n):
        log = EventLog()
        for t in (100 + i % 7, 140, 181):
            log.add(t * MS, EventClass.CONTENT, 10, 1, OUTPUT)
        t = Timeline(
            arrival_ns=0, submit_ns=0, first_byte_ns=log.t_ns[0], first_token_ns=log.t_ns[0],
            first_content_ns=log.t_ns[0], last_token_ns=log.t_ns[-1], response_end_ns=1_234 * MS, events=log,
        )  # fmt: skip
        x = Exchange(relay="r", seq=1, arrival_wall_ns=0, timeline=t, stream=True, uncertainty_ns=350_000)
        x.tokens = Tokens(output=3, source=TokenSource.TOKEN_IDS)
        x.added.chunks_ns.extend([12_345] * 3)
        s.add(x)
    return s.to_dict({"name": "1m", "seconds": 10.0}, 10.0)


def summary_text(told: dict[str, Any], width: int = 80) -> str:
    return terminal_text(summary_blocks(told), width)


def system_text(told: dict[str, Any], width: int = 80) -> str:
    return terminal_text(system_blocks(told), width)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(None, "-"), (0.0, "0"), (0.000012345, "0.0123"), (0.00012345, "0.123"), (0.0012345, "1.23"),
     (0.0099951, "10.0"), (0.012345, "12.3"), (0.12345, "123"), (1.2345, "1,234"), (0.0009996, "1.00"),
     (-0.05, "-50.0")],
)  # fmt: skip
def test_milliseconds_have_three_significant_digits(seconds: float | None, text: str) -> None:
    assert milliseconds(seconds) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [(None, "-"), (0, "0"), (0.0, "0"), (12, "12"), (1_234_567, "1,234,567"), (26.0, "26"),
     (0.1722254, "0.1722"), (0.000012345, "0.00001234"), (12_345.6, "12,346"), (99_999.5, "100,000"),
     (-0.05, "-0.05"), (float("inf"), "-"), (float("nan"), "-")],
)  # fmt: skip
def test_numbers_have_four_digits_and_no_powers_of_ten(value: float | None, text: str) -> None:
    assert number(value) == text


def test_percentiles_of_too_few_samples_are_marked() -> None:
    assert "106*" in summary_text(summary(20))
    assert "fewer than 1,000 samples" in summary_text(summary(20))
    full = summary(1_000)
    full["added"] = {}
    assert "*" not in summary_text(full)


def test_eighty_columns_and_no_colour_are_enough() -> None:
    text = summary_text(summary(1_000), width=80)
    assert "\x1b" not in text
    assert max(map(len, text.splitlines())) <= 80
    assert "…" not in text


def test_an_empty_summary_prints() -> None:
    text = summary_text(Summary().to_dict({"name": "1m", "seconds": 0.0}, 0.0))
    assert "n 0" in text
    assert "*" not in text


def test_relays_show_what_was_not_measured() -> None:
    shown = summary(1)
    shown["relays"] = {
        "r0": {"connected": True, "opened": 10, "measured": 7, "dropped": {"tap_full": 2}, "lag_max": 0.0021},
        "r1": {"connected": False},
    }
    text = summary_text(shown)
    assert "r0: opened 10 · measured 7 · not measured 2 · lag max 2.10 ms" in text
    assert "r1: no status yet" in text


def counter(unit: str, total: float, per_second: float) -> dict[str, Any]:
    return {"unit": unit, "kind": "counter", "n": 61, "total": total, "per_second": per_second, "restarts": 0}


def gauge(unit: str, mean: float, top: float, n: int = 60) -> dict[str, Any]:
    return {"unit": unit, "kind": "gauge", "n": n, "mean": mean, "p50": mean, "p95": top, "max": top}


TOLD: dict[str, Any] = {
    "period": 1.0, "skipped": 0, "window": [0.0, 60.0],
    "processes": {
        "sender": [{"pid": 1, "name": "python"}, {"pid": 2, "name": "python"}],
        "server": [{"pid": 3, "name": "vllm\x1b[31m"}],
    },
    "gpu": {"devices": ["NVIDIA H100"], "unread": 0},
    "why_not": {},
    "scrape": {"scrapes": 61, "failed": 0, "failures": {}, "skipped": 0, "period": 1.0},
    "system": {
        "sender_cpu": {**gauge("cpus", 0.4321, 1.0), "kind": "interval"},
        "server_memory": gauge("bytes", 3 << 30, 4 << 30),
        "host_stolen": {**gauge("share", 0.002, 0.01), "kind": "interval"},
        "gpu0_power": gauge("watts", 412.3, 698.0),
        "gpu0_temperature": gauge("celsius", 61.4, 70),
        "gpu0_energy": counter("joules", 5, 5),
    },
    "server": {
        "running": gauge("requests", 7.25, 16),
        "kv_use": gauge("share", 0.313, 0.875),
        "generation_tokens": counter("tokens", 123_456, 2_057.6),
        "prefix_queries": counter("tokens", 10, 1),
        "prefix_hit_share": {"unit": "share", "kind": "ratio", "total": 0.42},
        "preemptions": counter("requests", 0, 0),
    },
    "energy": {
        "joules": 24_738.0, "seconds": 60.0, "seconds_missing": 0.0, "power": 412.3, "tokens": 123_456,
        "joules_per_token": 0.2004, "counted_joules": 24_000.0, "counted_power": 405.0, "devices": {},
    },
}  # fmt: skip


def test_each_figure_has_its_unit() -> None:
    rows = {row.split("  ")[0]: row.split() for row in system_text(TOLD, 120).splitlines()}
    assert rows["sender, CPU"][2:] == ["60", "0.43", "0.43", "1.00", "1.00"]
    assert rows["server, memory"][2:4] == ["60", "3.0"] and "GiB" in rows["server, memory"]
    assert rows["GPU 0, power"][3:] == ["60", "412", "W", "412", "W", "698", "W", "698", "W"]
    assert rows["GPU 0, temperature"][3:6] == ["60", "61", "°C"]
    assert rows["running"][1:] == ["60", "7.25", "7.25", "16", "16"]
    assert rows["KV use"][2:] == ["60", "31.3%", "31.3%", "87.5%", "87.5%"]
    assert "GPU 0, energy" not in rows, "a counter has no percentiles"


def test_what_was_counted_and_used_stands_below() -> None:
    text = system_text(TOLD, 140)
    for said in (
        "server     output tokens 123,456 (2,058/s) · prefix hits 42.0% · preemptions 0",
        "energy     24,738 J in 60 s · 412 W on average · 0.2 J per token of 123,456 ·",
        "· by the GPUs' own count 405 W",
        "sender     2 processes: python",
        "server     1 process: vllm\\u001b[31m",
        "GPUs       NVIDIA H100",
    ):
        assert said in text
    assert "\x1b" not in text
    assert "not sampled" not in text and "failed" not in text and "hypervisor" not in text


def test_what_makes_the_figures_doubtful_is_said() -> None:
    told = {
        **TOLD,
        "scrape": {"scrapes": 60, "failed": 3, "failures": {"status 503": 2, "no answer in time": 1}},
        "system": {"host_stolen": {**gauge("share", 0.034, 0.2), "kind": "interval"}},
        "energy": {**TOLD["energy"], "seconds_missing": 7.5, "joules_per_token": None, "counted_power": None},
        "gpu": None,
        "why_not": {"gpu": "no NVML: Driver Not Loaded", "server": "10.0.0.1 is not a loopback address"},
    }
    text = system_text(told, 140)
    for said in (
        "power is not known of 7.5 s: more energy was used than is said",
        "the hypervisor gave 3.4% of this host's CPU time to others",
        "3 of 60 scrapes of the server failed: status 503 2, no answer in time 1",
        "gpu        not sampled: no NVML: Driver Not Loaded",
        "server     not sampled: 10.0.0.1 is not a loopback address",
    ):
        assert said in text
    assert "per token" not in text and "own count" not in text and "GPUs " not in text


@pytest.mark.parametrize("told", [{}, {"system": {}, "server": None, "energy": None}])
def test_parts_that_are_missing_are_left_out(told: dict[str, Any]) -> None:
    assert system_text(told).strip() == ""


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [(None, "cpus", "-"), (0, "cpus", "0.00"), (0.004, "share", "0.4%"), (0, "requests", "0"),
     (1_234.5, "tokens", "1,234"), (1536, "bytes", "1.5 KiB"), (0.0004, "joules", "0.0004")],
)  # fmt: skip
def test_values(value: float | None, unit: str, text: str) -> None:
    assert series_value(value, unit) == text

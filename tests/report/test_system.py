"""The table of what a run took: figures with their units, and what was not sampled with its reason."""

from typing import Any

import pytest

from llmtap.report.system import _number, series_value, system_text


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


def test_a_series_without_a_sample_in_the_window_has_no_row() -> None:
    assert "running" not in system_text({"server": {"running": gauge("requests", 0, 0, n=0)}})


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [(None, "cpus", "-"), (0, "cpus", "0.00"), (0.004, "share", "0.4%"), (0, "requests", "0"),
     (1_234.5, "tokens", "1,234"), (1536, "bytes", "1.5 KiB"), (0.0004, "joules", "0.000400")],
)  # fmt: skip
def test_values(value: float | None, unit: str, text: str) -> None:
    assert series_value(value, unit) == text
    assert "e" not in _number(1e9)

"""What the tests of load levels share: texts, bounds, and how many requests a closed loop needs."""

from typing import Any

import pytest

from llmtap.bench.run.levels import (
    ROWS_MAX,
    Bounds,
    endings,
    lasts,
    memory_errors,
    number,
    rows_for,
    server_mean,
    server_total,
    share,
)
from llmtap.bench.run.measurement import steady_of
from llmtap.metrics.objectives import Objectives
from llmtap.units import Duration
from tests.bench.support import measured

MS = 1_000_000
S = 1_000 * MS
OVER = {"stopped": "the time was up"}


def rows_of(ttft_ms: list[float], failed: int = 0) -> list[dict[str, Any]]:
    """From second 1 on; the last `failed` of them failed."""
    n = len(ttft_ms)
    return [
        {
            "sent_ns": S + i, "end_ns": 2 * S, "ttft_ns": round(ttft * MS), "ttft_any_ns": round(ttft * MS),
            "tpot_ns": 10.0 * MS, "outcome": "complete" if i < n - failed else "upstream_reset",
        }
        for i, ttft in enumerate(ttft_ms)
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("value", "says"),
    [
        (2847.4, "2,847"),
        (999.96, "1,000.0"),
        (18.24, "18.2"),
        (0.456, "0.46"),
        (0, "0.00"),
        (None, "-"),
    ],
)
def test_numbers(value: float | None, says: str) -> None:
    assert number(value) == says
    assert number(value, "req/s") == (says if value is None else f"{says} req/s")


@pytest.mark.parametrize(
    ("value", "says"),
    [(1.0, "100%"), (0.998, "99.8%"), (0.99999, "99.9%"), (0.00001, "0.1%"), (0.0, "0%"), (None, "-")],
)
def test_what_is_not_all_is_not_called_all(value: float | None, says: str) -> None:
    assert share(value) == says


def test_bounds_are_met_or_named() -> None:
    bounds = Bounds(ttft=Duration(100 * MS), tpot=Duration(20 * MS))
    assert bounds.says == "TTFT P99 <= 100 ms, TPOT P99 <= 20.0 ms"
    assert bounds.to_dict() == {"ttft_p99": 0.1, "tpot_p99": 0.02}
    assert Objectives.parse(bounds.slo or "").text == "ttft:100ms tpot:20ms"
    assert not Bounds()
    assert Bounds().slo is None

    def broken(ttft_ms: list[float], failed: int = 0) -> list[str]:
        return bounds.broken(steady_of(measured("x", rows_of(ttft_ms, failed), load=OVER), 10.0))

    assert broken([100.0] * 200) == []
    assert broken([100.0] * 195 + [101.0] * 5) == ["TTFT P99 101 ms > 100 ms"]
    assert broken([50.0] * 200, 2) == [], "1 % is what a P99 leaves"
    assert broken([50.0] * 200, 3) == ["1.5% of the requests failed: a P99 leaves 1%"]
    assert broken([50.0] * 2, 2)[0] == "no answer has a TTFT"


def test_rows_for_a_closed_loop() -> None:
    # 8 slots had 10 answers a second: 16 have 20 at most, half as many again are made, and two for each slot.
    assert rows_for(16, 60, (8, 10.0)) == 20 * 60 * 1.5 + 32
    assert rows_for(4, 60, (8, 10.0)) == 10 * 60 * 1.5 + 8, "fewer may be as quick together"
    assert rows_for(8, 60, None) == 8 * 5 * 60 + 16
    assert rows_for(512, 3_600, None) == ROWS_MAX


def test_errors_of_memory_and_endings() -> None:
    errors = {
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB": 2, "worker killed (OOM)": 1,
        "the room was empty": 5, "connection reset": 7,
    }  # fmt: skip
    found = measured("x", rows_of([1.0] * 4, 3), errors=errors)
    assert memory_errors(found) == 3
    assert endings(found) == {"upstream_reset": 3}
    assert memory_errors(measured("x", [])) == 0


def test_what_a_server_said_of_itself() -> None:
    """Samples of the ramp-up and of the time after the load do not count, nor those without a value."""
    series = {"t": [0.5, 2.0, 5.0, 8.0, 11.0], "series": {"running": {"values": [1.0, 4.0, None, 6.0, 99.0]}}}
    system = {"series": {"server": series}, "summary": {"server": {"preemptions": {"total": 3.0}}}}
    found = measured("x", rows_of([1.0]), load=OVER, system=system)
    steady = steady_of(found, 10.0)
    assert server_mean(found, "running", steady) == 5.0
    assert server_mean(found, "waiting", steady) is None
    assert server_total(found, "preemptions") == 3.0
    silent = measured("x", rows_of([1.0]), load=OVER, system={"series": {"server": None}, "summary": {}})
    assert server_mean(silent, "running", steady) is None
    assert server_total(silent, "preemptions") is None


def test_what_is_left_is_told_in_time_too() -> None:
    assert lasts(7, 60) == "at most 7 levels, 7 min and the time to drain"
    assert lasts(1, 60) == "at most 1 level, 60 s and the time to drain"

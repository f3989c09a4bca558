"""Invariant: an exchange is in the window for at least 11/12 of its length and at most all of it, and in
the totals for ever; nothing is counted twice."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmtap.clock import ManualClock
from llmtap.meter.windows import Windows, window_name
from llmtap.metrics.latency import measure
from tests.support.streams import streamed

S = 1_000_000_000
MINUTE = 60 * S


def add(windows: Windows, tenant: str = "t", model: str = "m", **about: Any) -> None:
    x = streamed(100, 140, **about)
    windows.add(x, measure(x), tenant, model)


def n(windows: Windows, *, everything: bool = False) -> object:
    return windows.freeze(everything).to_dict()["n"]


def test_an_exchange_leaves_the_window_and_stays_in_the_totals() -> None:
    clock = ManualClock()
    windows = Windows(MINUTE, clock)
    add(windows)
    for _ in range(11):
        clock.advance(5 * S)
        assert (n(windows), n(windows, everything=True)) == (1, 1)
    clock.advance(5 * S)
    assert (n(windows), n(windows, everything=True)) == (0, 1)


def test_a_quiet_hour_empties_the_window() -> None:
    clock = ManualClock()
    windows = Windows(MINUTE, clock)
    add(windows)
    clock.advance(3_601 * S)
    add(windows)
    out = windows.freeze().to_dict()
    assert out["n"] == 1
    assert isinstance(out["window"], dict)
    assert out["window"]["seconds"] == pytest.approx(56.0)
    assert n(windows, everything=True) == 2


@given(st.lists(st.integers(0, 20 * S), max_size=40))
def test_window_and_totals_count_each_once(gaps: list[int]) -> None:
    clock = ManualClock()
    windows = Windows(MINUTE, clock)
    ends = []
    for gap in gaps:
        clock.advance(gap)
        add(windows)
        ends.append(clock.now_ns)
        inside = sum(t > clock.now_ns - 55 * S for t in ends)
        possible = sum(t > clock.now_ns - MINUTE for t in ends)
        count = n(windows)
        assert isinstance(count, int)
        assert inside <= count <= possible
        assert n(windows, everything=True) == len(ends)


def test_the_window_says_what_time_it_is_of() -> None:
    clock = ManualClock(now_ns=100 * S, wall_offset_ns=1_700_000_000 * S)
    windows = Windows(MINUTE, clock)
    clock.advance(2 * S)
    assert windows.freeze().to_dict()["window"] == {
        "name": "1m", "seconds": 2.0, "start": "2023-11-14T22:15:00Z", "end": "2023-11-14T22:15:02Z",
    }  # fmt: skip
    clock.advance(200 * S)
    frozen = windows.freeze(everything=True)
    assert (frozen.name, frozen.seconds) == ("all", 202.0)


def test_load_counts_what_began_and_what_ended() -> None:
    clock = ManualClock()
    windows = Windows(MINUTE, clock)
    for _ in range(4):
        windows.opened()
    add(windows)
    clock.advance(2 * S)
    expected = {"mode": "live", "offered_rps": 2.0, "achieved_rps": 0.5}
    assert windows.freeze().to_dict()["load"] == expected
    assert windows.freeze(everything=True).to_dict()["load"] == expected


def test_the_lag_of_a_relay_widens_the_uncertainty() -> None:
    clock = ManualClock()
    windows = Windows(MINUTE, clock)
    windows.lagged(3_000_000)
    windows.lagged(2_000_000)
    assert windows.freeze().to_dict()["uncertainty"] == 0.003
    clock.advance(MINUTE)
    assert windows.freeze().to_dict()["uncertainty"] is None
    assert windows.freeze(everything=True).to_dict()["uncertainty"] == 0.003


def test_by_gives_the_same_for_each_tenant_model_and_arm() -> None:
    clock = ManualClock()
    windows = Windows(MINUTE, clock)
    add(windows, "a", "m1")
    clock.advance(5 * S)
    add(windows, "a", "m2")
    add(windows, "b", "m1")
    out = windows.freeze().to_dict()
    by = out["by"]
    assert isinstance(by, dict)
    assert {label: {name: part["n"] for name, part in parts.items()} for label, parts in by.items()} == {
        "tenant": {"a": 2, "b": 1}, "model": {"m1": 2, "m2": 1}, "arm": {},
    }  # fmt: skip
    assert by["tenant"]["a"].keys() == out.keys() - {"by"}
    assert by["tenant"]["a"]["load"] == {"mode": "live", "offered_rps": None, "achieved_rps": 0.4}


def test_smooth_goodput_is_that_of_the_window() -> None:
    clock = ManualClock()
    windows = Windows(MINUTE, clock)
    assert windows.smooth_goodput() is None
    add(windows, tokens=10)  # 20 tokens, the reader waits 0.1 s: 19.5
    clock.advance(5 * S)
    assert windows.smooth_goodput() == pytest.approx(3.9)
    out = windows.freeze().to_dict()
    assert isinstance(out["smooth_goodput"], dict)
    assert out["smooth_goodput"]["tokens_per_second"] == pytest.approx(3.9)


def test_what_is_frozen_does_not_change() -> None:
    clock = ManualClock()
    windows = Windows(MINUTE, clock)
    add(windows)
    clock.advance(6 * S)
    add(windows)
    frozen = windows.freeze(everything=True)
    before = frozen.to_dict()
    for _ in range(30):
        add(windows)
        clock.advance(4 * S)
    assert frozen.to_dict() == before


@pytest.mark.parametrize(("s", "name"), [(60, "1m"), (3_600, "1h"), (90, "90s"), (300, "5m"), (1.5, "1.5s")])
def test_a_window_is_named_by_its_length(s: float, name: str) -> None:
    assert window_name(round(s * S)) == name

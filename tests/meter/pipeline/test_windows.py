"""Invariant: whatever was merged and packed meanwhile, a window's figures are those of exactly the exchanges
that ended in it, worked out anew; and nothing is counted twice."""

import random
from collections.abc import Iterable, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmtap.clock import ManualClock
from llmtap.exchange.exchange import Exchange
from llmtap.exchange.outcome import Outcome
from llmtap.export.sinks import SeriesKey
from llmtap.meter.options import WINDOWS
from llmtap.meter.pipeline.windows import (
    BY,
    LEVELS,
    SLICES_MAX,
    Merging,
    SliceLevel,
    Slices,
    Windows,
    window_name,
)
from llmtap.meter.tenants import Labels
from llmtap.metrics.cost import Price
from llmtap.metrics.latency import measure
from llmtap.metrics.objectives import Objectives
from llmtap.metrics.summary import Summary
from tests.support.traffic.streams import streamed

S = 1_000_000_000
MINUTE = 60 * S
ANYONE = SeriesKey("t", "m")


def add(windows: Windows, who: SeriesKey = ANYONE, **about: Any) -> None:
    x = streamed(100, 140, **about)
    windows.on_end(x, measure(x), who, None)


def n(windows: Windows, window: str = "1m") -> object:
    return windows.freeze(window).to_dict()["n"]


def within(result: Any, expected: Any, place: str = "") -> None:
    """Equal, but for the rounding of sums in another order."""
    if isinstance(expected, dict):
        assert isinstance(result, dict) and result.keys() == expected.keys(), place
        for key, value in expected.items():
            within(result[key], value, f"{place}.{key}")
    elif isinstance(expected, float):
        assert result == pytest.approx(expected, rel=1e-9, abs=1e-12), place
    else:
        assert result == expected, place


def summed(exchanges: Iterable[Exchange]) -> Summary:
    total = Summary(Objectives.parse("ttft:150ms"))
    for x in exchanges:
        total.add(x, measure(x))
    return total


@pytest.mark.once
def test_an_hour_and_more_of_compressed_time_against_everything_kept() -> None:
    """An hour and a half of bursts and silences; every window against a plain list, at random moments."""
    rng = random.Random(3)
    clock = ManualClock(now_ns=17 * S)
    objectives = Objectives.parse("ttft:150ms")
    windows = Windows(clock, {"gold": objectives})
    pairs = [SeriesKey(t, m, a, "gold") for t in ("a", "b", "c") for m in ("x", "y") for a in ("", "left")]
    kept: list[tuple[int, SeriesKey, Exchange]] = []
    checked = 0
    while clock.now_ns < 5_500 * S:
        quiet = rng.random() < 0.02
        clock.advance(round((rng.uniform(60, 700) if quiet else rng.expovariate(0.4)) * S))
        who = rng.choice(pairs)
        gaps = [rng.randint(1, 90) for _ in range(rng.randint(1, 12))]
        times = [rng.randint(50, 400)]
        for gap in gaps:
            times.append(times[-1] + gap)
        outcome = rng.choice([Outcome.COMPLETE, Outcome.COMPLETE, Outcome.TRUNCATED])
        x = streamed(*times, tokens=rng.randint(1, 3), outcome=outcome)
        m = measure(x)
        windows.count_opened()
        windows.on_end(x, m, who, objectives.meets(m, x))
        kept.append((clock.now_ns, who, x))
        if rng.random() < 0.03:
            checked += 1
            for (name, window_ns), level in zip(WINDOWS.items(), LEVELS, strict=True):
                since = clock.now_ns - 17 * S
                start = 17 * S + max(0, since // level.step_ns * level.step_ns - window_ns + level.step_ns)
                check(windows, name, [row for row in kept if row[0] >= start])
            check(windows, "all", kept)
    assert checked > 8
    assert len(windows) < 100


def check(windows: Windows, name: str, rows: list[tuple[int, SeriesKey, Exchange]]) -> None:
    result: Any = windows.freeze(name).to_dict(BY)
    seconds = result["window"]["seconds"]
    expected = summed(x for _, _, x in rows)
    expected.opened = len(rows)
    by = result.pop("by")
    assert result.pop("not_inference") == 0
    assert result.pop("uncertain") == {"n": 0, "included": True}
    within(result, expected.to_dict(result["window"], seconds), name)
    for label, index in (("tenant", 0), ("model", 1), ("arm", 2), ("class", 3)):
        names = {who[index] for _, who, _ in rows if who[index]}
        assert by[label].keys() == names
        for part in names:
            mine = summed(x for _, who, x in rows if who[index] == part)
            within(by[label][part], mine.to_dict(result["window"], seconds), f"{name} {label} {part}")
    rates = windows.rates()
    if name in rates:
        assert rates[name].n == len(rows)
        within(rates[name].goodput_rps, result["goodput"] and result["goodput"]["requests_per_second"])
        within(rates[name].smooth_goodput_tps, result["smooth_goodput"]["tokens_per_second"])


def test_the_window_says_what_time_it_is_of_and_how_late_relays_ran() -> None:
    clock = ManualClock(now_ns=100 * S, wall_offset_ns=1_700_000_000 * S)
    windows = Windows(clock)
    windows.record_lag(3_000_000)
    clock.advance(2 * S)
    windows.record_lag(2_000_000)
    windows.count_skipped(3)
    out: Any = windows.freeze("1m").to_dict()
    assert out["window"] == {
        "name": "1m",
        "seconds": 2.0,
        "start": "2023-11-14T22:15:00Z",
        "end": "2023-11-14T22:15:02Z",
        "lag_max": 0.003,
    }
    assert out["uncertainty"] is None, "a late relay is not an error of a timestamp"
    assert out["not_inference"] == 3
    assert windows.rates()["10s"].lag_ns == 3_000_000
    clock.advance(MINUTE)
    out = windows.freeze("1m").to_dict()
    assert out["uncertainty"] is None and out["not_inference"] == 0
    frozen = windows.freeze("all")
    assert (frozen.name, frozen.seconds, frozen.to_dict()["window"]["lag_max"]) == ("all", 62.0, 0.003)


def test_what_is_frozen_does_not_change() -> None:
    clock = ManualClock()
    windows = Windows(clock)
    add(windows)
    clock.advance(6 * S)
    add(windows)
    frozen = windows.freeze("all")
    before = frozen.to_dict()
    for _ in range(30):
        windows.count_opened()
        windows.record_lag(9_000_000)
        add(windows)
        clock.advance(4 * S)
    assert frozen.to_dict() == before


def test_a_window_is_named_or_given_by_its_length() -> None:
    assert [window_name(text) for text in ("1m", "60", "3600s", "all", "90s", "", "-1", "soon")] == [
        "1m",
        "1m",
        "1h",
        "all",
        None,
        None,
        None,
        None,
    ]


ROW = (SliceLevel(10, 1), SliceLevel(60, 5), SliceLevel(300, 30), SliceLevel(3_600, 300))
EVENTS = st.lists(
    st.tuples(
        st.one_of(st.integers(0, 3), st.integers(0, 400), st.integers(0, 5_000)), st.sampled_from("rstn")
    ),
    max_size=60,
)


def merge(data: Sequence[list[int]], level: int) -> Merging[list[int]]:
    out: list[int] = []
    for part in data:
        out += part
        yield
    return out


def row(*, past: bool = True, start: int = 0) -> Slices[list[int]]:
    return Slices(ROW, start, list, merge, past=past)


def check_row(slices: Slices[list[int]], now: int, ends: list[int], start: int) -> None:
    """Against a plain list of everything that ever happened."""
    for i, level in enumerate(ROW):
        since = start + max(
            0, (now - start) // level.step_ns * level.step_ns - level.window_ns + level.step_ns
        )
        assert slices.window_start_ns(i, now) == since
        assert now - since < level.window_ns
        assert now - since >= min(now - start, level.window_ns - level.step_ns)
        held = [t for part in slices.window(i, now) for t in part]
        assert sorted(held) == sorted(t for t in ends if t >= since)
    held = [t for part in slices.all_data(now) for t in part]
    assert sorted(held) == sorted(ends)


@given(EVENTS, st.integers(0, 10**6))
def test_windows_hold_exactly_what_they_must(events: list[tuple[int, str]], start: int) -> None:
    slices, now, ends = row(start=start), start, []
    for gap, what in events:
        now += gap
        slices.open_data(now).append(now)
        ends.append(now)
        if what == "s":
            slices.seal(now)
        elif what != "n":
            while slices.tidy() and what == "t":
                pass
        check_row(slices, now, ends, start)


def test_without_a_past_what_left_the_longest_window_is_gone() -> None:
    slices = row(past=False)
    for now in range(0, 20_000, 100):
        slices.open_data(now).append(now)
        while slices.tidy():
            pass
    held = [t for part in slices.all_data(19_900) for t in part]
    assert min(held) == 16_500
    assert len(slices) < 40


def test_slices_that_nobody_tidies_are_tidied_by_the_one_who_makes_them() -> None:
    slices = row()
    for now in range(4 * SLICES_MAX):
        slices.open_data(now).append(now)
        assert len(slices) <= SLICES_MAX + 2
    check_row(slices, now, list(range(4 * SLICES_MAX)), 0)


def test_by_gives_the_same_for_each_tenant_model_arm_and_class() -> None:
    clock = ManualClock()
    windows = Windows(clock)
    add(windows, SeriesKey("a", "m1", "left", "gold"))
    clock.advance(5 * S)
    add(windows, SeriesKey("a", "m2", "right", "gold"))
    add(windows, SeriesKey("b", "m1", service_tier="flex"))
    out: Any = windows.freeze("1m").to_dict(BY)
    by = out["by"]
    assert {label: {name: part["n"] for name, part in parts.items()} for label, parts in by.items()} == {
        "tenant": {"a": 2, "b": 1},
        "model": {"m1": 2, "m2": 1},
        "arm": {"left": 1, "right": 1},
        "class": {"gold": 2},
        "reading": {"dialect": 3},
        "service_tier": {"flex": 1},
    }
    assert by["tenant"]["a"].keys() == out.keys() - {"by", "uncertain", "not_inference"}
    assert windows.freeze("1m").to_dict(("model",))["by"].keys() == {"model"}  # type: ignore[attr-defined]


def judged(windows: Windows, slo: str, objectives: Objectives) -> None:
    x = streamed(100, 140)
    m = measure(x)
    windows.on_end(x, m, SeriesKey("t", "m", "", slo), objectives.meets(m, x))


def test_rates_leave_out_the_time_that_a_killed_meter_had_not_saved() -> None:
    """One exchange a second. The state is 10 s old when the meter is killed. The next begins 2 s later."""
    clock = ManualClock()
    objectives = Objectives.parse("ttft:1s")

    def of_seconds(windows: Windows, seconds: int) -> None:
        for _ in range(seconds):
            clock.advance(S)
            judged(windows, "gold", objectives)

    old = Windows(clock, {"gold": objectives}, terms="1")
    of_seconds(old, 20)
    packed, saved_ns = old.export()(), clock.mono_ns()
    of_seconds(old, 10)
    clock.advance(2 * S)
    new = Windows(clock, {"gold": objectives}, terms="1")
    new.absorb(packed, 0, Labels(9, 9, 9))
    new.on_crash(saved_ns)
    of_seconds(new, 8)
    newest = Windows(clock, {"gold": objectives}, terms="1")
    newest.absorb(new.export()(), 0, Labels(9, 9, 9))
    for windows in (new, newest):
        out: Any = windows.freeze("1m").to_dict(BY)
        assert (out["n"], out["window"]["seconds"]) == (28, 28.0)
        assert out["load"]["achieved_rps"] == out["goodput"]["requests_per_second"] == 1.0
        rates = windows.rates()["1m"]
        assert (rates.seconds, rates.goodput_rps) == (28.0, 1.0)
    clock.advance(2 * MINUTE)
    assert newest.rates()["1m"].seconds == pytest.approx(60, abs=5), "the gap has left the window"


def test_after_a_change_of_objectives_goodput_is_a_rate_of_the_time_since_then() -> None:
    """One good exchange a second of each class; after 30 s a reload changes the objectives of one class."""
    clock = ManualClock()
    first, second, same = (Objectives.parse(text) for text in ("ttft:1s", "ttft:2s", "e2e:9s"))
    old = Windows(clock, {"gold": first, "rest": same}, terms="1")
    for _ in range(30):
        clock.advance(S)
        judged(old, "gold", first)
        judged(old, "rest", same)
    new = Windows(clock, {"gold": second, "rest": same}, terms="2")
    new.absorb(old.export()(), 0, Labels(9, 9, 9))
    for _ in range(10):
        clock.advance(S)
        judged(new, "gold", second)
        judged(new, "rest", same)
    newest = Windows(clock, {"gold": second, "rest": same}, terms="2")
    newest.absorb(new.export()(), 0, Labels(9, 9, 9))
    for windows in (new, newest):
        out: Any = windows.freeze("1m").to_dict(BY, price=Price(gpus=1, per_gpu_hour=1.0))
        goodput = out["goodput"]
        assert (out["n"], out["window"]["seconds"]) == (80, 40.0)
        assert {name: (one["met"], one["requests_per_second"]) for name, one in goodput["by"].items()} == {
            "ttft:2s": (10, 1.0),
            "e2e:9s": (40, 1.0),
        }
        assert goodput["requests_per_second"] == 2.0
        assert goodput["tokens_per_second"] == sum(one["tokens_per_second"] for one in goodput["by"].values())
        assert out["cost"]["per_good_token"] is None
        rates = windows.rates()["1m"]
        assert (rates.seconds, rates.goodput_rps) == (40.0, 2.0)
        assert rates.smooth_goodput_tps == pytest.approx(out["smooth_goodput"]["tokens_per_second"])
    clock.advance(MINUTE)
    out = newest.freeze("1m").to_dict(BY, price=Price(gpus=1, per_gpu_hour=1.0))
    assert out["goodput"] is None

"""The history of all traffic in steps, worked out by hand."""

from typing import Any

import pytest

from llmtap.clock import ManualClock
from llmtap.exchange.outcome import Reading
from llmtap.export.sinks import SeriesKey
from llmtap.meter.pipeline.history import FIGURES, STEPS, History
from llmtap.metrics.latency import measure
from tests.support.traffic.streams import streamed

S = 1_000_000_000


def ended(history: History, *times_ms: int, met: bool | None = None, reading: Reading | None = None) -> None:
    x = streamed(*times_ms)
    if reading is not None:
        x.reading = reading
    history.on_end(x, measure(x), SeriesKey("t", "m"), met)


def points(history: History, step: str) -> list[dict[str, Any]]:
    document: Any = history.to_dict(step)()
    assert document["step"] == STEPS[step].step_ns / S
    assert list(document["figures"]) == list(FIGURES)
    return [dict(zip(FIGURES, row, strict=True)) for row in zip(*document["figures"].values(), strict=True)]


def test_a_point_has_the_figures_of_the_exchanges_that_ended_in_its_step() -> None:
    clock = ManualClock(now_ns=600 * S)
    history = History(clock)
    ended(history, 100, 140, met=True)
    clock.advance(9 * S)
    ended(history, 300, 320, met=False)
    assert points(history, "10s") == [], "the step is not over"
    clock.advance(S)
    ended(history, 500)
    (point,) = points(history, "10s")
    assert (point["ttft_p50"], point["ttft_p99"]) == (pytest.approx(0.2), pytest.approx(0.298))
    assert (point["itl_p50"], point["itl_p99"]) == (pytest.approx(0.03), pytest.approx(0.0398))
    assert (point["achieved_rps"], point["goodput_rps"]) == (0.2, 0.1)
    clock.advance(30 * S)
    assert [one["achieved_rps"] for one in points(history, "10s")] == [0.2, 0.1, 0, 0]
    assert [one["ttft_p50"] for one in points(history, "10s")][1:] == [pytest.approx(0.5), None, None]
    end = history.to_dict("10s")()["end"]
    assert end == clock.wall_ns() / S


def test_a_longer_step_has_the_exchanges_of_all_its_shorter_ones() -> None:
    clock = ManualClock(now_ns=600 * S)
    history = History(clock)
    for at in range(30):
        ended(history, 100 + at, met=None)
        clock.advance(10 * S)
    (point,) = points(history, "5m")
    assert point["achieved_rps"] == 30 / 300
    assert point["ttft_p50"] == pytest.approx(0.1145, rel=2e-3)  # a histogram keeps 0.1 %
    assert (point["goodput_rps"], point["itl_p50"]) == (None, None)
    ended(history, 900)
    clock.advance(3_000 * S)
    rates = [one["achieved_rps"] for one in points(history, "5m")]
    assert rates == [30 / 300, 1 / 300, *[0] * 9]


def test_the_step_in_which_the_meter_began_is_left_out() -> None:
    clock = ManualClock(now_ns=604 * S)
    history = History(clock)
    ended(history, 100)
    clock.advance(6 * S)
    ended(history, 200)
    clock.advance(10 * S)
    assert [one["ttft_p50"] for one in points(history, "10s")] == [pytest.approx(0.2)]


def test_only_a_day_is_kept_however_long_nothing_happens() -> None:
    clock = ManualClock(now_ns=600 * S)
    history = History(clock)
    ended(history, 100)
    clock.advance(86_400 * S)
    assert len(points(history, "10s")) == 360
    assert len(points(history, "5m")) == 288
    assert points(history, "5m")[0]["achieved_rps"] == 1 / 300
    clock.advance(7 * 86_400 * S)
    assert {one["achieved_rps"] for one in points(history, "5m")} == {0}


def test_times_that_were_inferred_are_in_no_percentile() -> None:
    clock = ManualClock(now_ns=600 * S)
    history = History(clock)
    ended(history, 100, 140, reading=Reading.INFERRED)
    clock.advance(10 * S)
    (point,) = points(history, "10s")
    assert (point["achieved_rps"], point["ttft_p50"], point["smooth_goodput_tps"]) == (0.1, None, None)

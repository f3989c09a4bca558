"""Samples in columns: what stands in the JSON, and what a window of them is summed up by."""

import json
from collections.abc import Mapping

import msgspec
import pytest

import llmtap.load.monitor.timeseries as module
from llmtap.load.monitor.timeseries import Columns, SamplingReport, TimeSeries
from llmtap.net.server_metrics import SERIES, MonitorSeries

S = 1_000_000_000
SPEC = {
    "busy": MonitorSeries("cpus", "interval"),
    "memory": MonitorSeries("bytes"),
    "made": MonitorSeries("tokens", "counter"),
    "never": MonitorSeries("share"),
}


def columns(
    *samples: tuple[float, Mapping[str, float | None]], spec: Mapping[str, MonitorSeries] = SPEC
) -> Columns:
    """Samples at seconds since the start, which is at 100 s."""
    found = Columns(spec)
    for t_s, values in samples:
        found.add(round((100 + t_s) * S), 2_000_000, values)
    return found


RUN = columns(
    (-1, {"memory": 10, "made": 5}),
    (0, {"busy": 1.0, "memory": 20, "made": 10}),
    (1, {"busy": 0.5, "memory": 30, "made": None}),
    (4, {"busy": 0.1, "memory": 60, "made": 40}),
)


def test_the_json_has_arrays_of_one_length_in_seconds_since_the_start() -> None:
    samples = TimeSeries(100 * S, RUN, sampling=SamplingReport(period=1.0)).samples()
    series = {
        "busy": ("cpus", "interval", [None, 1.0, 0.5, 0.1]),
        "memory": ("bytes", "gauge", [10.0, 20.0, 30.0, 60.0]),
        "made": ("tokens", "counter", [5.0, 10.0, None, 40.0]),
    }
    told = json.loads(msgspec.json.encode(samples))
    assert {name: told[name] for name in ("period", "server", "system")} == {
        "period": 1.0,
        "server": None,
        "system": {
            "t": [-1.0, 0.0, 1.0, 4.0],
            "took": [0.002] * 4,
            "dropped": 0,
            "series": {
                name: {"unit": unit, "kind": kind, "values": values}
                for name, (unit, kind, values) in series.items()
            },
        },
    }


def test_a_summary_weighs_averages_by_their_time_and_counts_what_grew() -> None:
    told = msgspec.to_builtins(TimeSeries(100 * S, RUN).summary())
    assert told["system"]["busy"] == {
        "unit": "cpus",
        "kind": "interval",
        "n": 3,
        "p50": 0.5,
        "p95": pytest.approx(0.95),
        "max": 1.0,
        "mean": pytest.approx((1.0 * 1 + 0.5 * 1 + 0.1 * 3) / 5),
    }
    assert told["system"]["memory"] == {
        "unit": "bytes",
        "kind": "gauge",
        "n": 4,
        "mean": 30,
        "p50": 25,
        "max": 60,
        "p95": pytest.approx(55.5),
    }
    assert told["system"]["made"] == {
        "unit": "tokens",
        "kind": "counter",
        "n": 3,
        "total": 35,
        "per_second": 7,
        "restarts": 0,
    }
    assert "never" not in told["system"]
    assert (told["window"], told["server"], told["energy"]) == ((None, None), None, None)


def test_a_window_takes_the_samples_in_it_with_the_time_they_speak_for() -> None:
    told = msgspec.to_builtins(TimeSeries(100 * S, RUN).summary(from_ns=101 * S, to_ns=104 * S))
    assert told["window"] == (1.0, 4.0)
    assert told["system"]["busy"]["mean"] == pytest.approx((0.5 * 1 + 0.1 * 3) / 4)
    assert (told["system"]["memory"]["n"], told["system"]["memory"]["mean"]) == (2, 45)
    # One known value of a counter says nothing about growth.
    assert told["system"]["made"] == {
        "unit": "tokens",
        "kind": "counter",
        "n": 1,
        "total": None,
        "per_second": None,
        "restarts": 0,
    }


def test_a_counter_that_was_started_anew_counts_from_0_again() -> None:
    run = columns((0, {"made": 100}), (1, {"made": 130}), (2, {"made": 7}), (3, {"made": 10}))
    told = msgspec.to_builtins(TimeSeries(100 * S, run).summary())["system"]["made"]
    assert (told["total"], told["restarts"], told["per_second"]) == (40, 1, pytest.approx(40 / 3))


GPUS = {f"gpu{i}_power": MonitorSeries("watts") for i in range(2)}
POWERED = columns(
    (0, {"gpu0_power": 100, "gpu1_power": 200}),
    (1, {"gpu0_power": 300, "gpu1_power": 200}),
    (2, {"gpu0_power": 100, "gpu1_power": 200}),
    spec=GPUS,
)


def test_energy_is_that_of_all_gpus_over_the_window() -> None:
    told = msgspec.to_builtins(
        TimeSeries(100 * S, POWERED).summary(from_ns=100 * S, to_ns=102 * S, tokens=1_600)
    )["energy"]
    assert told == {
        "joules": 800.0,
        "seconds": 2.0,
        "seconds_missing": 0.0,
        "power": 400.0,
        "tokens": 1_600,
        "joules_per_token": 0.5,
        "devices": {"gpu0": {"joules": 400.0}, "gpu1": {"joules": 400.0}},
    }


def test_energy_says_what_is_missing() -> None:
    run = columns((0, {"gpu0_power": 100}), (1, {"gpu0_power": 100}), spec=GPUS)
    told = msgspec.to_builtins(TimeSeries(100 * S, run).summary(from_ns=100 * S, to_ns=110 * S).energy)
    assert (told["joules"], told["seconds"], told["seconds_missing"]) == (400.0, 4.0, 6.0)
    wide = msgspec.to_builtins(
        TimeSeries(100 * S, run).summary(from_ns=100 * S, to_ns=110 * S, gap_ns_max=20 * S)
    )["energy"]
    assert (wide["joules"], wide["seconds_missing"]) == (1_000.0, 0.0)


def test_ratios_of_counters_are_those_of_the_window() -> None:
    server = columns(
        (0, {"prefix_queries": 1_000, "prefix_hits": 900, "itl_seconds": 5, "itl_values": 100}),
        (1, {"prefix_queries": 1_500, "prefix_hits": 1_000, "itl_seconds": 7, "itl_values": 200}),
        spec=SERIES,
    )
    told = msgspec.to_builtins(TimeSeries(100 * S, RUN, server).summary())["server"]
    assert told["prefix_hit_share"]["total"] == pytest.approx(0.2)
    assert told["itl_mean"] == {"unit": "seconds", "kind": "ratio", "total": pytest.approx(0.02)}
    assert "ttft_mean" not in told
    still = columns((0, {"prefix_queries": 5, "prefix_hits": 5}), spec=SERIES)
    assert "prefix_hit_share" not in (TimeSeries(100 * S, RUN, still).summary().server or {})


def test_the_bound_is_kept_and_what_came_after_it_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SAMPLES_MAX", 3)
    run = columns(*((i, {"memory": i}) for i in range(5)))
    assert (len(run), run.samples(0).dropped, run.column("memory")) == (3, 2, [0.0, 1.0, 2.0])
    run = columns((0, {"memory": 1}))
    run.close()
    run.add(200 * S, 0, {"memory": 2})
    assert (len(run), run.dropped) == (1, 0)

"""Samples over time: rates are of the time before them, peaks are not lost, units are those of people."""

from typing import Any

import pytest

from llmtap.report.time_charts import system_table, time_charts_of, timeline_rows
from tests.support.replay_results import replay_result

GOOD = replay_result()


def lines_of(result: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """What plotly is given, by chart, panel and name."""
    return {
        f"{chart.key}/{panel.title}/{one['name']}": one
        for chart in time_charts_of(result)
        for panel in chart.panels
        for one in panel.data
    }


def told(columns: dict[str, Any], t: list[float], *, end: float | None = None) -> dict[str, Any]:
    series = {name: {"unit": unit, "kind": kind, "values": v} for name, (unit, kind, v) in columns.items()}
    return {
        "window": {"seconds": end},
        "system": {"series": {"period": 1.0, "server": {"t": t, "series": series, "dropped": 0}}},
    }


def test_panels_have_what_is_of_one_unit() -> None:
    assert set(lines_of(GOOD)) == {
        "load/Requests per second/sent", "load/Requests per second/asked", "load/Requests per second/ended",
        "load/In flight/in flight",
        "load/In flight/running, says the server", "load/In flight/waiting, says the server",
        "over-time-host/CPUs busy/sender, CPU", "over-time-host/CPUs busy/server, CPU",
        "over-time-host/host, CPU/host, CPU", "over-time-host/sender, memory, GiB/sender, memory",
        "over-time-host/host, memory, GiB/host, memory",
        "over-time-server/Requests/running", "over-time-server/Requests/waiting",
        "over-time-server/Shares/KV use", "over-time-server/Shares/prefix hits",
        "over-time-server/output tokens, per second/output tokens",
        "over-time-gpu/Power, W/GPU 0, power", "over-time-gpu/Power, W/GPU 1, power",
        "over-time-gpu/GPU 0, utilization/GPU 0, utilization",
        "over-time-gpu/GPU 0, energy, W/GPU 0, energy",
    }  # fmt: skip


def test_bytes_become_gibibytes_and_averages_are_of_the_time_before() -> None:
    lines = lines_of(GOOD)
    assert lines["over-time-host/host, memory, GiB/host, memory"]["y"][0] == 5
    assert lines["over-time-host/CPUs busy/sender, CPU"]["line"]["shape"] == "vh"
    assert lines["over-time-gpu/Power, W/GPU 0, power"]["line"]["shape"] == "linear"


def test_a_counter_is_drawn_as_its_rate() -> None:
    columns = {"generation_tokens": ("tokens", "counter", [5.0, 25.0, None, 30.0, 40.0, 10.0])}
    (line,) = lines_of(told(columns, [0.0, 2.0, 3.0, 4.0, 5.0, 6.0])).values()
    # It grew by 20 in two seconds; one that fell was started anew.
    assert line["y"] == [None, 10.0, None, None, 10.0, 10.0]
    assert line["line"]["shape"] == "vh"


def test_a_last_sample_soon_after_the_one_before_makes_no_peak() -> None:
    columns = {"generation_tokens": ("tokens", "counter", [0.0, 10.0, 20.0, 50.0])}
    (line,) = lines_of(told(columns, [0.0, 1.0, 2.0, 2.01])).values()
    assert list(line["x"]) == [0.0, 1.0, 2.01]
    assert line["y"] == [None, 10.0, pytest.approx(40 / 1.01)]


def test_prefix_hits_are_a_share_of_each_period() -> None:
    columns = {
        "prefix_queries": ("tokens", "counter", [0.0, 10.0, 10.0, 30.0]),
        "prefix_hits": ("tokens", "counter", [0.0, 4.0, 4.0, 5.0]),
    }
    (line,) = lines_of(told(columns, [0.0, 1.0, 2.0, 3.0])).values()
    assert line["name"] == "prefix hits"
    assert line["y"] == [None, 0.4, None, 0.05]


def test_samples_outside_of_the_run_are_left_out() -> None:
    t = [-1.0, 0.0, 1.0, 2.0, 3.0]
    columns = {
        "running": ("requests", "gauge", [9.0, 1.0, 2.0, 3.0, 9.0]),
        "kv_use": ("share", "interval", [0.9, 0.1, 0.2, 0.3, 0.9]),
    }
    lines = lines_of(told(columns, t, end=1.5))
    assert lines["over-time-server/running, requests/running"]["y"] == [1.0, 2.0]
    # An average is of the time before it: the run ended within.
    assert lines["over-time-server/KV use/KV use"]["y"] == [0.1, 0.2, 0.3]


def test_of_very_many_samples_no_peak_is_lost() -> None:
    n = 50_000
    values = [1.0] * n
    values[12_345], values[33_333] = 77.0, -5.0
    (line,) = (
        one
        for name, one in lines_of(
            told({"running": ("requests", "gauge", values)}, list(map(float, range(n))))
        ).items()
        if name.startswith("over-time")
    )
    assert len(line["x"]) <= 4_000
    assert list(line["x"]) == sorted(set(line["x"]))
    at = dict(zip(line["x"], line["y"], strict=True))
    assert (at[12_345.0], at[33_333.0]) == (77.0, -5.0)


def test_what_is_known_of_no_moment_is_no_line() -> None:
    assert not lines_of(told({"running": ("requests", "gauge", [None, None])}, [0.0, 1.0]))


def test_a_series_nobody_knows_is_drawn_by_its_own_name() -> None:
    (line,) = lines_of(told({"odd_thing": ("furlongs", "gauge", [1.0, 2.0])}, [0.0, 1.0])).items()
    assert line[0] == "over-time-server/odd_thing, furlongs/odd_thing"


def test_first_turns_are_named_where_others_wait() -> None:
    load = GOOD["load"] | {"planned": 500}
    names = {name.rpartition("/")[2] for name in lines_of(GOOD | {"load": load})}
    assert "asked, of first turns" in names
    stopped = GOOD["load"] | {"planned": 500, "stopped": "the time was up"}
    assert "asked" in {name.rpartition("/")[2] for name in lines_of(GOOD | {"load": stopped})}


def test_a_long_timeline_is_added_up_for_its_table() -> None:
    n = 130
    timeline = {"period": 2.0, "t": [2.0 * i for i in range(n)], "asked": None, "sent": list(range(n)),
                "ended": [1] * n, "in_flight": list(range(n))}  # fmt: skip
    heads, rows = timeline_rows(timeline)
    assert heads == ["6 s from, s", "sent", "ended", "in flight"]
    assert rows[:2] == [("0", ["3", "3", "2"]), ("6", ["12", "3", "5"])]
    assert len(rows) == 44
    assert sum(int(cells[0].replace(",", "")) for _, cells in rows) == sum(range(n))


def test_the_table_of_samples_has_units_and_what_counters_came_to() -> None:
    summary = GOOD["system"]["summary"]
    rows = dict(system_table(summary, "over-time-server")[1])
    assert rows["KV use"][1:] == ["12.5%", "12.5%", "12.5%", "12.5%", "-"]
    assert rows["output tokens"] == ["7", "100/s", "-", "-", "-", "600"]
    assert rows["prefix hits"][-1] == "40.0%"
    assert "sender, CPU" in dict(system_table(summary, "over-time-host")[1])
    assert "GPU 1, power" in dict(system_table(summary, "over-time-gpu")[1])

"""Charts of a replay: what is drawn solid rests on enough samples; rates are of the time before them."""

from typing import Any

import pytest

from llmtap.report.replay_charts import Curve, Distribution, time_charts_of

SHARES = [0.0, 0.1, 0.5, 0.9, 0.98, 0.99, 0.995, 0.999, 0.9995, 1.0]


def drawn(n: int, seconds: list[float], panel: int = 0) -> list[dict[str, Any]]:
    curve = Curve("x", n, SHARES, seconds, 0, "solid")
    return Distribution("k", "h", "a", [curve]).panels[panel].data


@pytest.mark.parametrize(("n", "solid_until"), [(999, 0.98), (1_000, 0.99), (10_000, 0.999), (20_000, 1.0)])
def test_what_rests_on_too_few_is_dotted(n: int, solid_until: float) -> None:
    solid, *dotted = drawn(n, [s + 1 for s in SHARES])
    assert solid["line"]["dash"] == "solid"
    assert solid["y"][-1] == solid_until
    assert [one["line"]["dash"] for one in dotted] == ["dot"] * (solid_until < 1)
    for one in dotted:
        # It goes on where the other ends.
        assert (one["x"][0], one["y"][0]) == (solid["x"][-1], solid["y"][-1])
        assert one["y"][-1] == 1.0


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


def test_a_counter_is_drawn_as_its_rate() -> None:
    columns = {"generation_tokens": ("tokens", "counter", [5.0, 25.0, None, 30.0, 40.0, 10.0])}
    (line,) = lines_of(told(columns, [0.0, 2.0, 3.0, 4.0, 5.0, 6.0])).values()
    # It grew by 20 in two seconds; one that fell was started anew.
    assert line["y"] == [None, 10.0, None, None, 10.0, 10.0]
    assert line["line"]["shape"] == "vh"


def test_prefix_hits_are_a_share_of_each_period() -> None:
    columns = {
        "prefix_queries": ("tokens", "counter", [0.0, 10.0, 10.0, 30.0]),
        "prefix_hits": ("tokens", "counter", [0.0, 4.0, 4.0, 5.0]),
    }
    (line,) = lines_of(told(columns, [0.0, 1.0, 2.0, 3.0])).values()
    assert line["name"] == "prefix cache hit rate"
    assert line["y"] == [None, 0.4, None, 0.05]


def test_samples_outside_of_the_run_are_left_out() -> None:
    t = [-1.0, 0.0, 1.0, 2.0, 3.0]
    columns = {
        "running": ("requests", "gauge", [9.0, 1.0, 2.0, 3.0, 9.0]),
        "kv_use": ("share", "interval", [0.9, 0.1, 0.2, 0.3, 0.9]),
    }
    lines = lines_of(told(columns, t, end=1.5))
    assert lines["over-time-server/requests running/requests running"]["y"] == [1.0, 2.0]
    # An average is of the time before it: the run ended within.
    assert lines["over-time-server/KV cache use/KV cache use"]["y"] == [0.1, 0.2, 0.3]


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

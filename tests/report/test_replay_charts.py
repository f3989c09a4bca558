"""Charts of a replay over time: rates are of the time before them, and samples of the run."""

from typing import Any

from llmtap.report.document import FigureBlock, PlotSeries
from llmtap.report.replay_charts import time_sections
from tests.support.results.replay_results import replay_result

GOOD = replay_result()


def lines_of(result: dict[str, Any]) -> dict[str, PlotSeries]:
    """What is drawn of the samples, by chart, panel and name."""
    return {
        f"{section.key}/{panel.title}/{one.name}": one
        for section in time_sections(result)
        for block in section.blocks
        if isinstance(block, FigureBlock) and section.key != "load"
        for panel in block.panels
        for one in panel.plot.series
    }


def told(columns: dict[str, Any], t: list[float], *, end: float = 9.0) -> dict[str, Any]:
    series = {name: {"unit": unit, "kind": kind, "values": v} for name, (unit, kind, v) in columns.items()}
    sampled = {"period": 1.0, "server": {"t": t, "series": series}}
    return GOOD | {"window": GOOD["window"] | {"seconds": end}, "system": {"series": sampled}}


def test_a_counter_is_drawn_as_its_rate() -> None:
    columns = {"generation_tokens": ("tokens", "counter", [5.0, 25.0, None, 30.0, 40.0, 10.0])}
    (line,) = lines_of(told(columns, [0.0, 2.0, 3.0, 4.0, 5.0, 6.0])).values()
    # It grew by 20 in two seconds; one that fell was started anew.
    assert line.y == [None, 10.0, None, None, 10.0, 10.0]
    assert line.step == "vh"


def test_samples_outside_of_the_run_are_left_out() -> None:
    t = [-1.0, 0.0, 1.0, 2.0, 3.0]
    columns = {
        "running": ("requests", "gauge", [9.0, 1.0, 2.0, 3.0, 9.0]),
        "kv_use": ("share", "interval", [0.9, 0.1, 0.2, 0.3, 0.9]),
    }
    lines = lines_of(told(columns, t, end=1.5))
    assert lines["over-time-server/requests running/requests running"].y == [1.0, 2.0]
    # An average is of the time before it: the run ended within.
    assert lines["over-time-server/KV cache use/KV cache use"].y == [0.1, 0.2, 0.3]


def test_what_is_known_of_no_moment_is_no_line() -> None:
    assert not lines_of(told({"running": ("requests", "gauge", [None, None])}, [0.0, 1.0]))

"""The figures of presets: against their formulas, and only of runs that are one line."""

from typing import Any

import pytest

from llmtap.report.sweep_figures import FIGURES, batch_sizes, figure_of, mm1_wait, queue_waits
from llmtap.report.sweep_page import sweep_html
from tests.report.simulated_runs import run
from tests.support.results.pages import Page


def queued(
    load_rps: float, wait: float, *, servers: int = 1, scheduler: str = "static_fifo"
) -> dict[str, Any]:
    """A run whose requests are served for 2 s each."""
    return run(scheduler, load_rps, servers=servers) | {
        "load": {"offered_rps": load_rps},
        "queueing": {"mean": wait},
        "latency": {"mean": wait + 2.0},
        "asked_load": load_rps,
    }


def test_the_wait_of_an_mm1_queue() -> None:
    assert [mm1_wait(rho) for rho in (0.0, 0.5, 0.75, 1.0, 1.5)] == [0, 1, 3, None, None]


def test_the_knee_by_hand() -> None:
    runs = [queued(0.45, 30.0), queued(0.25, 1.5), queued(0.5, 900.0)]
    # 0.25 req/s x 2 s = 50 %: M/M/1 waits one service time; at 90 % nine.
    assert queue_waits(runs) == [(0.5, 1.5, 2.0), (0.9, 30.0, pytest.approx(18.0)), (1.0, 900.0, None)]
    assert queue_waits([queued(0.5, 1.5, servers=2)])[0][0] == 0.5
    rows = FIGURES["knee"].table(runs).rows
    assert rows[0] == ["50%", "1,500", "2,000", "-25.0%"]
    assert rows[2][2:] == ["-", "-"]


def batch(size: int, rate: float, tpot: float) -> dict[str, Any]:
    return run("continuous_batching", 1.0) | {
        "serving": {"seqs_max": size},
        "tokens": {"output_per_second": rate},
        "metrics": {"tpot": {"mean": tpot}},
    }


def test_batch_sizes_are_in_order() -> None:
    runs = [batch(8, 500.0, 0.016), batch(1, 100.0, 0.01), batch(2, 190.0, 0.011)]
    assert batch_sizes(runs) == [(1, 100.0, 0.01), (2, 190.0, 0.011), (8, 500.0, 0.016)]
    [throughput, itl] = FIGURES["batch-size"].panels(runs)
    assert [list(throughput.plot.series[0].x), list(itl.plot.series[0].y)] == [
        [1, 2, 8],
        [0.01, 0.011, 0.016],
    ]
    # 90 tokens/s from 1 to 2, and 310 by six more.
    assert "adds 90 tokens/s at first and 51.67 at the end" in throughput.words


def test_other_runs_have_no_figure() -> None:
    line = [queued(0.25, 1.0), queued(0.4, 5.0)]
    assert figure_of("knee", line) is FIGURES["knee"]
    assert figure_of("knee", line[:1]) is None
    assert figure_of("knee", [*line, queued(0.4, 5.0, servers=2), queued(0.3, 1.0, servers=2)]) is None
    assert figure_of("grid", line) is figure_of(None, line) is figure_of("knee", []) is None


def test_the_page_begins_with_the_figure() -> None:
    runs = [queued(0.25, 1.5), queued(0.45, 30.0)]
    [simulated, mm1] = Page(sweep_html(runs, figure=FIGURES["knee"])).figures["plots"]["figure-0"]["series"]
    assert (simulated["x"], simulated["y"]) == ([0.5, 0.9], [1.5, 30.0])
    assert (mm1["x"], mm1["y"]) == ([0.5, 0.9], [2.0, pytest.approx(18.0)])

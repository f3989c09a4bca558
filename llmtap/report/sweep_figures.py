"""Figures that presets of `llmtap sim run` reproduce from the chapter on SLO metrics: queue, batch sizes.

A figure is made from the public JSON of the preset's runs. `sweep_page.py` shows it before its own charts,
and the terminal shows its table. Options of the command line can replace a preset's axes: `figure_of` returns
the figure only if the runs are still one line along its axis.

Source: chapter on SLO metrics. M/M/1 is a queue with exponential times between arrivals and of service.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final

from llmtap.report.document import (
    Axis,
    FigureBlock,
    LegendKey,
    Look,
    Note,
    Panel,
    Plot,
    PlotSeries,
    Section,
    Table,
)
from llmtap.report.sweep import Result, read_sweep
from llmtap.report.values import milliseconds, number

_SIMULATED: Final = LegendKey("simulated", Look("c0", symbol="circle"))
_MM1: Final = LegendKey("M/M/1", Look("soft", "dash"))


@dataclass(frozen=True, slots=True)
class SweepFigure:
    """A figure of a preset, with the functions that make its panels and its table from the runs."""

    heading: str
    about: str
    """Note below the heading."""
    axis: str
    """Name of the axis. The figure needs runs that are one line along this axis."""
    panels: Callable[[Sequence[Result]], list[Panel]]
    table: Callable[[Sequence[Result]], Table]
    legend: Sequence[LegendKey] = ()

    def section(self, results: Sequence[Result]) -> Section:
        """Return the section of the page with this figure."""
        basis = [f"n {min(result['n'] for result in results):,} at each point"]
        tables = [self.table(results)]
        figure = FigureBlock(
            "figure", self.heading, self.panels(results), tables, basis, self.legend, captioned=False
        )
        return Section("figure", self.heading, [Note(self.about), figure])


def mm1_wait(utilisation: float) -> float | None:
    """Return the mean wait of an M/M/1 queue, as a multiple of the service time; None if it is infinite."""
    return utilisation / (1 - utilisation) if utilisation < 1 else None


def queue_waits(results: Sequence[Result]) -> list[tuple[float, float, float | None]]:
    """Return, for each run, its utilisation, its mean wait, and an M/M/1 queue's mean wait, in seconds."""
    rows = []
    for result in results:
        wait = result["queueing"]["mean"]
        service = result["latency"]["mean"] - wait
        utilisation = result["load"]["offered_rps"] * service / result["servers"]
        expected = mm1_wait(utilisation)
        rows.append((utilisation, wait, None if expected is None else expected * service))
    return sorted(rows, key=lambda row: row[0])


def _knee_table(results: Sequence[Result]) -> Table:
    rows = [
        [
            f"{utilisation:.0%}",
            milliseconds(wait),
            milliseconds(expected),
            f"{wait / expected - 1:+.1%}" if expected else "-",
        ]
        for utilisation, wait, expected in queue_waits(results)
    ]
    return Table(["utilisation", "mean wait", "M/M/1", "difference"], rows, "Mean wait in ms")


def _knee_panels(results: Sequence[Result]) -> list[Panel]:
    loads, simulated, expected = zip(*queue_waits(results), strict=True)
    series = [_figure_series(_SIMULATED, loads, simulated), _figure_series(_MM1, loads, expected)]
    words = f"{number(simulated[0])} s at {loads[0]:.0%}, {number(simulated[-1])} s at {loads[-1]:.0%}."
    plot = Plot(series, Axis("utilisation", share=True), Axis(zero=True), "{y} s at {x}")
    return [Panel("Mean wait, s", words, plot)]


def batch_sizes(results: Sequence[Result]) -> list[tuple[int, float, float]]:
    """Return for each run the batch size, output tokens/s, and mean time between the tokens of an answer."""
    return sorted(
        (one["serving"]["seqs_max"], one["tokens"]["output_per_second"], one["metrics"]["tpot"]["mean"])
        for one in results
    )


def _batch_table(results: Sequence[Result]) -> Table:
    rows = [[str(size), number(rate), milliseconds(itl)] for size, rate, itl in batch_sizes(results)]
    return Table(["batch size", "output tok/s", "ITL"], rows, "Output tokens/s, and mean ITL in ms")


def _batch_panels(results: Sequence[Result]) -> list[Panel]:
    sizes, rates, itls = zip(*batch_sizes(results), strict=True)
    added = [(b - a) / (k - j) for (j, k), (a, b) in zip(pairwise(sizes), pairwise(rates), strict=True)]
    words = f"A further request adds {number(added[0])} tokens/s at first and {number(added[-1])} at the end."
    axis = Axis("batch size", zero=True)
    return [
        Panel(
            "Output tokens/s",
            words,
            Plot([_figure_series(_SIMULATED, sizes, rates)], axis, Axis(zero=True), "{y} tokens/s at {x}"),
        ),
        Panel(
            "ITL, s",
            f"From {milliseconds(itls[0])} to {milliseconds(itls[-1])} ms.",
            Plot([_figure_series(_SIMULATED, sizes, itls)], axis, Axis(zero=True), "{y} s at {x}"),
        ),
    ]


def _figure_series(key: LegendKey, x: Sequence[float], y: Sequence[float | None]) -> PlotSeries:
    look = key.look
    symbols = [look.symbol] * len(x) if look.symbol else None
    return PlotSeries(name=key.name, x=list(x), y=list(y), ink=look.ink, dash=look.dash, symbols=symbols)


FIGURES: Final[Mapping[str, SweepFigure]] = {
    "knee": SweepFigure(
        "The knee",
        "Mean wait by utilisation: nearly flat, then vertical. M/M/1: rho / (1 - rho) service times.",
        "load",
        _knee_panels,
        _knee_table,
        (_SIMULATED, _MM1),
    ),
    "batch-size": SweepFigure(
        "Throughput and ITL by batch size",
        "A larger batch gives more throughput, but less with each request, and a longer time between tokens.",
        "seqs_max",
        _batch_panels,
        _batch_table,
    ),
}
"""Figures by the name of the preset."""


def figure_of(preset: str | None, results: Sequence[Mapping[str, Any]]) -> SweepFigure | None:
    """Return the figure of a preset; None if it has none, or if the runs are not one line along its axis."""
    figure = FIGURES.get(preset or "")
    if figure is None or not results:
        return None
    sweep = read_sweep(results)
    fits = sweep.axis is not None and sweep.axis.name == figure.axis and len(sweep.lines) == 1
    return figure if fits else None

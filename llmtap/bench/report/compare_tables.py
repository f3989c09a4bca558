"""What a comparison of systems is shown as: tables and charts of differences, and charts of distributions."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from llmtap.bench.run.figures import cdf_series, ms
from llmtap.bench.run.measurement import Measurement
from llmtap.bench.run.test import ChartSeries, ChartSpec, ReportTable
from llmtap.report.values import MARK

__all__ = ["charts_of", "tables_of"]

DISTRIBUTIONS_MAX: Final = 6
"""Of loads whose distributions are drawn."""
_ABSENT: Final = "-"
_Row = Mapping[str, Any]


def tables_of(base: str, found: Sequence[_Row]) -> list[ReportTable]:
    """For each system the figures that the test is about, then all others."""
    tables = []
    for other in dict.fromkeys(row["b_system"] for row in found):
        for key, what in (
            (True, "what the test is about, p by Holm"),
            (False, "other figures, p by Benjamini-Hochberg"),
        ):
            rows = [row for row in found if row["b_system"] == other and row["key"] is key]
            if rows:
                heads = ["Figure", "Load", base, other, "Difference", "95 % interval", "p", "Finding"]
                tables.append(
                    ReportTable(
                        caption=f"{other} against {base}: {what}",
                        heads=heads,
                        rows=[_cells(row) for row in rows],
                    )
                )
    return tables


def _cells(row: _Row) -> list[str]:
    unit, share, p = row["unit"], row["share"], row["p_adjusted"]
    by = "" if share is None else f" ({share:+.1%})"
    interval = _ABSENT if row["low"] is None else f"{_said(row['low'], unit)} to {_said(row['high'], unit)}"
    return [
        row["figure"] + f" {MARK}" * row["doubtful"], row["step"] or "all", _said(row["a"], unit),
        _said(row["b"], unit), _said(row["difference"], unit) + by, interval,
        _ABSENT if p is None else "<0.001" if p < 0.001 else f"{p:.3f}", row["finding"],
    ]  # fmt: skip


def _said(value: float | None, unit: str) -> str:
    if value is None:
        return _ABSENT
    return ms(value) if unit == "s" else f"{value:,.4g} {unit}"


def charts_of(
    test: str, loads: Mapping[str, Mapping[str, Sequence[Measurement]]], found: Sequence[_Row]
) -> list[ChartSpec]:
    """How far each system is from the base in what the test is about, then distributions of loads, all runs
    of a system together. `loads` has the runs by load and system."""
    return [*_differences(found), *_distributions(test, loads)]


def _differences(found: Sequence[_Row]) -> Iterator[ChartSpec]:
    series = []
    for other in dict.fromkeys(row["b_system"] for row in found):
        rows = [
            row
            for row in found
            if row["b_system"] == other and row["key"] and row["a"] and row["low"] is not None
        ]
        if rows:
            series.append(
                ChartSeries(
                    name=other,
                    x=[f"{row['figure']}, {row['step']}" if row["step"] else row["figure"] for row in rows],
                    y=[100 * row["difference"] / row["a"] for row in rows],
                    low=[100 * row["low"] / row["a"] for row in rows],
                    high=[100 * row["high"] / row["a"] for row in rows],
                )
            )
    if series:
        yield ChartSpec(
            title=f"Difference from {found[0]['a_system']}, with its 95 % interval", kind="bars",
            x_title="", y_title="difference (% of the base)", series=series,
        )  # fmt: skip


def _distributions(
    test: str, loads: Mapping[str, Mapping[str, Sequence[Measurement]]]
) -> Iterator[ChartSpec]:
    gaps = test == "itl"
    what = "TBC" if gaps else "TTFT"
    for name in _spread(list(loads)):
        series = []
        for label, runs in loads[name].items():
            values = [v for run in runs for v in (run.gaps() if gaps else run.values("ttft_ns"))]
            if values:
                told = f"{label} ({len(runs)} runs)" if len(runs) > 1 else label
                series.append(cdf_series(told, values))
        if series:
            yield ChartSpec(
                title=f"{what}, {name}", kind="cdf", x_title=f"{what} (ms)",
                y_title=f"share of {'gaps' if gaps else 'requests'}", series=series,
            )  # fmt: skip


def _spread(names: Sequence[str]) -> list[str]:
    """As many as are drawn, the first and the last among them."""
    n = len(names)
    if n <= DISTRIBUTIONS_MAX:
        return list(names)
    return [names[i * (n - 1) // (DISTRIBUTIONS_MAX - 1)] for i in range(DISTRIBUTIONS_MAX)]

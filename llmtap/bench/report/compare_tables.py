"""Tables and charts of a comparison of systems: differences from the first one, distributions of loads.

Input: the compared figures and the measurements of `compare.py`. Output: the `ReportTable` and `ChartSpec`
objects that it puts into its JSON.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from llmtap.bench.run.figures import Cell, cdf_series, ms, table_of
from llmtap.bench.run.measurement import Measurement
from llmtap.bench.run.test import ChartSeries, ChartSpec, ReportTable
from llmtap.report.values import MARK

DISTRIBUTIONS_MAX: Final = 6
_ABSENT: Final = "-"
_FAMILIES: Final = {
    True: "what the test is about, p by Holm, intervals of 95 % for all of them together",
    False: "other figures, p by Benjamini-Hochberg, each interval of 95 % by itself",
}
_Row = Mapping[str, Any]


def tables_of(base: str, found: Sequence[_Row]) -> list[ReportTable]:
    tables = []
    for other in dict.fromkeys(row["b_system"] for row in found):
        columns = {base if head == "a" else other if head == "b" else head: c for head, c in COLUMNS.items()}
        for key, what in _FAMILIES.items():
            rows = [row for row in found if row["b_system"] == other and row["key"] is key]
            if rows:
                tables.append(table_of(f"{other} against {base}: {what}", rows, columns))
    return tables


def _interval(row: _Row) -> str:
    if row["low"] is None:
        return _ABSENT
    return f"{_said(row['low'], row['unit'])} to {_said(row['high'], row['unit'])}"


def _difference(row: _Row) -> str:
    by = "" if row["share"] is None else f" ({row['share']:+.1%})"
    return _said(row["difference"], row["unit"]) + by


def _p(row: _Row) -> str:
    p = row["p_adjusted"]
    return _ABSENT if p is None else "<0.001" if p < 0.001 else f"{p:.3f}"


def _said(value: float | None, unit: str) -> str:
    if value is None:
        return _ABSENT
    return ms(value) if unit == "s" else f"{value:,.4g} {unit}"


COLUMNS: Final[Mapping[str, Cell]] = {
    "Figure": lambda row: row["figure"] + f" {MARK}" * row["doubtful"],
    "Load": lambda row: row["step"] or "all",
    "a": lambda row: _said(row["a"], row["unit"]),
    "b": lambda row: _said(row["b"], row["unit"]),
    "Difference": _difference,
    "Interval": _interval,
    "p": _p,
    "Finding": lambda row: row["finding"],
}


def charts_of(
    test: str, loads: Mapping[str, Mapping[str, Sequence[Measurement]]], found: Sequence[_Row]
) -> list[ChartSpec]:
    """Return charts of the differences from the base and of distributions; `loads`: by load and system."""
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
            xs = [f"{row['figure']}, {row['step']}" if row["step"] else row["figure"] for row in rows]
            ends = ([100 * row[end] / row["a"] for row in rows] for end in ("difference", "low", "high"))
            series.append(ChartSeries(other, xs, *ends))
    if series:
        title = f"Difference from {found[0]['a_system']}, with intervals of 95 % for all together"
        yield ChartSpec(title, "bars", "", "difference (% of the base)", series)


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
            y_title = f"share of {'gaps' if gaps else 'requests'}"
            yield ChartSpec(f"{what}, {name}", "cdf", f"{what} (ms)", y_title, series)


def _spread(names: Sequence[str]) -> list[str]:
    n = len(names)
    if n <= DISTRIBUTIONS_MAX:
        return list(names)
    return [names[i * (n - 1) // (DISTRIBUTIONS_MAX - 1)] for i in range(DISTRIBUTIONS_MAX)]

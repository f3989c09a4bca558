"""The heat maps of a sweep: quantities over two numbers that vary, such as servers and bins (seed 004, 7.1).

A map has a panel for each grid of runs: for each size of the workload, say.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from html import escape
from typing import Any, Final

from llmtap.report.figures import (
    E2E,
    GOODPUT,
    LATE,
    MARK,
    REQUESTS,
    SMOOTH,
    Chart,
    Panel,
    Quantity,
    is_wide,
    samples_text,
    value_text,
)
from llmtap.report.sweep import Dimension, Result, Sweep, number

__all__ = ["heat_maps_of"]

_BLUES: Final = ("#f4f8fc", "#d9e8f5", "#b7d5ec", "#8abde0", "#57a1d4")
"""One hue, told apart by anybody, and light enough everywhere for figures in ink."""
_INK: Final = "#14181d"
_HEAT: Final[tuple[tuple[Quantity, tuple[str, ...]], ...]] = (
    (GOODPUT, ("objectives",)), (SMOOTH, ("smooth goodput",)), (REQUESTS, ()), (E2E[1], ()),
    (LATE, ("SLA",)),
)  # fmt: skip


def heat_maps_of(sweep: Sweep, results: Sequence[Result]) -> Iterator[tuple[Chart, list[Panel]]]:
    """Where two numbers apart from the load vary: each quantity over them, a panel for each of the rest."""
    if sweep.grid is None:
        return
    across, up = sweep.grid
    varied = [d for d in (sweep.axis, *sweep.by) if d is not None and d not in sweep.grid]
    panels: dict[tuple[str, ...], list[Result]] = defaultdict(list)
    for result in results:
        if across.at(result) is not None and up.at(result) is not None:
            panels[tuple(text for d in varied if (text := d.text_at(result)) is not None)].append(result)
    grids = {key: runs for key, runs in panels.items() if _is_grid(runs, across, up)}
    for quantity, says in _HEAT:
        found = [v for runs in grids.values() for run in runs if (v := quantity.of(run)) is not None]
        if found:
            unit = "%" if quantity.unit == "share" else quantity.unit
            chart = Chart(
                "-".join(("grid", *quantity.path)).replace("_", "-"),
                f"{quantity.name} by {across.name} and {up.name}",
                f"In {unit}; all panels have one scale, and deep blue is most.",
                (quantity,),
                says,
            )
            yield chart, [
                _heat(quantity, across, up, runs, ", ".join(key) or quantity.name, (min(found), max(found)),
                      {d.name: text for d in varied if (text := d.text_at(runs[0])) is not None})
                for key, runs in grids.items()
                if any(quantity.of(run) is not None for run in runs)
            ]  # fmt: skip


def _heat(
    quantity: Quantity, across: Dimension, up: Dimension, runs: list[Result], title: str,
    span: tuple[float, float], of: dict[str, str],
) -> Panel:  # fmt: skip
    cells = {(across.at(run), up.at(run)): run for run in runs}
    columns = [value for value in across.texts if any(key[0] == value for key in cells)]
    rows = [value for value in up.texts if any(key[1] == value for key in cells)]
    table = [[cells.get((column, row)) for column in columns] for row in rows]
    found = [(v, run) for run in runs if (v := quantity.of(run)) is not None]
    low, high = min(found, key=lambda one: one[0]), max(found, key=lambda one: one[0])

    def told(run: Result) -> str:
        at = f"{across.text_at(run)}, {up.text_at(run)}"
        value = f"{quantity.name} {value_text(quantity, quantity.of(run))}"
        return "<br>".join(escape(row) for row in (at, value, samples_text(quantity, run)) if row)

    data = {
        "type": "heatmap",
        "x": [escape(number(c) if isinstance(c, int | float) else str(c)) for c in columns],
        "y": [escape(number(r) if isinstance(r, int | float) else str(r)) for r in rows],
        "z": [[None if run is None else quantity.of(run) for run in row] for row in table],
        "text": [["" if run is None else _short(quantity, run) for run in row] for row in table],
        "texttemplate": "%{text}",
        "textfont": {"color": _INK},
        "hoverinfo": "text",
        "hovertext": [["" if run is None else told(run) for run in row] for row in table],
        "zmin": span[0],
        "zmax": span[1],
        "colorscale": _colours(*span),
        "showscale": False,
        "xgap": 1,
        "ygap": 1,
    }
    words = (
        f"{title}: {value_text(quantity, low[0])} ({across.text_at(low[1])}, {up.text_at(low[1])})"
        f" to {value_text(quantity, high[0])} ({across.text_at(high[1])}, {up.text_at(high[1])})."
    )
    layout = {
        "xaxis": {"type": "category", "title": {"text": escape(across.title)}},
        "yaxis": {"type": "category", "title": {"text": escape(up.title)}},
    }
    return Panel(title, words, [data], layout, of)


def _colours(low: float, high: float) -> list[list[Any]]:
    """A scale of colours, stretched by the logarithm where that helps."""
    last = len(_BLUES) - 1
    shares = [i / last for i in range(last + 1)]
    if is_wide([low, high]):
        # The ends have to be 0 and 1 to the last digit.
        shares[1:last] = [(low * (high / low) ** share - low) / (high - low) for share in shares[1:last]]
    return [[share, colour] for share, colour in zip(shares, _BLUES, strict=True)]


def _short(quantity: Quantity, run: Result) -> str:
    """For a cell: three digits, no unit."""
    value = quantity.of(run)
    if value is None:
        return ""
    text = number(value * 100 if quantity.unit == "share" else value, 3)
    return text + (MARK if quantity.doubtful(run) else "")


def _is_grid(runs: list[Result], across: Dimension, up: Dimension) -> bool:
    """Two rows and columns at least, and more than a row and a column that cross."""
    cells = {(across.at(run), up.at(run)) for run in runs}
    columns, rows = ({key[i] for key in cells} for i in (0, 1))
    return len(columns) > 1 and len(rows) > 1 and len(cells) > len(columns) + len(rows) - 1

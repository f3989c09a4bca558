"""What varies among the runs of a sweep: the axis to draw them along, and the lines that they make.

A run is the public JSON of one result. Of all its settings, those that differ between runs are dimensions.
The axis is the numeric one with the most values. What it and the scheduler do not decide tells the lines
apart; what they do decide (a fixed time makes more requests at a higher rate) runs along the axis.

An option that a run's scheduler does not read is None among its `readings` and `serving`. Along such an axis
the run is the same everywhere: a level line.
"""

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from math import floor, isfinite, log10
from operator import itemgetter
from typing import Any, Final

__all__ = [
    "Dimension", "Line", "Result", "Sweep", "number", "option_text", "read_sweep", "setting_text",
    "settings_of", "values_text",
]  # fmt: skip

Result = Mapping[str, Any]

_SCHEDULER: Final = "scheduler"
_LOAD: Final = "load"
_RANKED: Final = (_LOAD, "servers", "bins", "requests")
"""Numeric dimensions in the order in which they become the axis, where they have as many values."""
_OPTIONS: Final = ("readings", "serving", "model")
_SAME_RATE: Final = 0.01
_TIMES: Final = frozenset((
    "eps", "token_sla", "request_sla", "swap_token", "attention", "output_delay", "ttft", "tbt",
))  # fmt: skip
"""Options that are seconds."""
_NAMED: Final = "output_delay"
"""An option that is set by a scheduler's name: it need not be said beside that."""
_UNITS: Final = (("s", 1.0), ("ms", 1e-3), ("us", 1e-6), ("ns", 1e-9))


@dataclass(frozen=True, slots=True)
class Dimension:
    """A setting that differs between runs."""

    name: str
    texts: dict[Hashable, str]
    """Each value with how it reads in a line's name, such as `8 servers`; ascending, if they are numbers."""

    @property
    def numeric(self) -> bool:
        return all(_is_number(value) for value in self.texts)

    @property
    def title(self) -> str:
        """For an axis or the head of a column."""
        if self.name == _LOAD:
            return "offered load, requests/s"
        return f"{self.name}, s" if self.name in _TIMES else self.name

    def at(self, result: Result) -> Hashable:
        """The run's value; None where it has no such setting."""
        return settings_of(result).get(self.name)

    def text_at(self, result: Result) -> str | None:
        value = self.at(result)
        return None if value is None else self.texts[value]

    def place(self, result: Result) -> Any:
        """Where on the axis the run lies: for a load, the rate that was offered."""
        if self.name == _LOAD:
            return (result.get("load") or {}).get("offered_rps")
        return self.at(result)

    def unread(self, result: Result) -> bool:
        """Whether it is an option that the run's scheduler does not read."""
        groups = [result.get(group) or {} for group in _OPTIONS]
        known = self.name in result or any(self.name in group for group in groups)
        return self.name != _LOAD and known and self.at(result) is None


@dataclass(frozen=True, slots=True)
class Line:
    """Runs that differ by their place on the axis alone, in its order."""

    label: str
    of: dict[str, str]
    """Text by dimension."""
    points: list[tuple[Any, Result]]
    level: bool = False
    """The axis is nothing to them: one run, at each of its places."""


@dataclass(frozen=True, slots=True)
class Sweep:
    """Runs, ordered for drawing."""

    axis: Dimension | None
    """None where no number varies: the runs stand side by side, by scheduler."""
    by: list[Dimension]
    """What tells lines apart, beside the axis."""
    along: list[Dimension]
    """What the axis (and the scheduler) decides."""
    lines: list[Line]
    grid: tuple[Dimension, Dimension] | None
    """Two numbers apart from the load and the size of the workload, that with more values first."""


def read_sweep(results: Sequence[Result]) -> Sweep:
    """The sweep that the runs are. Raises ValueError where there is none."""
    if not results:
        raise ValueError("no results: there is nothing to draw")
    varied = _varied(results)
    numbers = [
        d for d in varied.values() if d.numeric and d.name != "seed" and not _is_scheduler_s(d, results)
    ]
    axis = max(numbers, key=lambda d: len(d.texts), default=None)
    along = [] if axis is None else [d for d in varied.values() if _is_decided(d, axis, results)]
    by = [d for d in varied.values() if d is not axis and d not in along]
    by = [d for d in by if d.name != _NAMED or not _is_scheduler_s(d, results)]
    grid = [d for d in numbers if d.name not in (_LOAD, "requests") and d not in along]
    grid.sort(key=lambda d: -len(d.texts))
    return Sweep(axis, by, along, _lines(results, axis, by), (grid[0], grid[1]) if len(grid) > 1 else None)


def settings_of(result: Result) -> dict[str, Hashable]:
    """All that was set about a run, by name."""
    told: dict[str, Hashable] = {_SCHEDULER: result.get(_SCHEDULER), "trace": result.get("trace")}
    told[_LOAD] = _load_key(result)
    told |= {"servers": result.get("servers"), "requests": result.get("n"), "seed": result.get("seed")}
    for group in _OPTIONS:
        for name, value in (result.get(group) or {}).items():
            key = f"model {name}" if group == "model" else name
            told[key] = ", ".join(map(str, value)) if isinstance(value, list | tuple) else value
    if "bins" in result:
        # Edges, where they are given, decide how many; a scheduler without bins has no such setting.
        told["bins"] = len(result["bins"]) if result["bins"] else None
    goodput = result.get("goodput") or {}
    told["objectives"] = goodput.get("objectives")
    return told


def number(value: float | None, digits: int = 4) -> str:
    """So many significant digits, never in powers of ten; `-` for None."""
    if value is None or not isfinite(value):
        return "-"
    if not value or isinstance(value, int):
        return f"{value:,.0f}"
    places = max(0, digits - 1 - floor(log10(abs(value))))
    text = f"{value:,.{places}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def option_text(name: str, value: Any) -> str:
    """An option's value as public JSON has it; seconds with the unit that suits, `-` for None."""
    if value is None:
        return "-"
    if isinstance(value, list | tuple):
        return ", ".join(map(str, value)) or "none"
    if name not in _TIMES:
        return _plain(value)
    unit, scale = next((one for one in _UNITS if value >= one[1]), _UNITS[0])
    return f"{number(value / scale, 6)} {unit}"


def setting_text(name: str, value: Any) -> str:
    """The same after its name."""
    return f"{name} {option_text(name, value)}"


def values_text(values: Iterable[Hashable], limit: int = 4) -> str:
    """Each value once, numbers ascending, or the range of many; empty where there are none."""
    distinct = list(dict.fromkeys(value for value in values if value is not None))
    if all(_is_number(value) for value in distinct):
        distinct = sorted(distinct)  # type: ignore[type-var]
        if len(distinct) > limit:
            return f"{_plain(distinct[0])} to {_plain(distinct[-1])}"
    return ", ".join(_plain(value) for value in distinct)


def _varied(results: Sequence[Result]) -> dict[str, Dimension]:
    """What has two values or more. That a scheduler has no such setting is no value."""
    found: dict[str, dict[Hashable, list[Result]]] = defaultdict(lambda: defaultdict(list))
    for result in results:
        for name, value in settings_of(result).items():
            if value is not None:
                found[name][value].append(result)
    ranked = (_SCHEDULER, "trace", *_RANKED)
    names = [name for name in ranked if name in found] + [name for name in found if name not in ranked]
    varied = {}
    for name in names:
        values = found[name]
        if len(values) > 1:
            order = sorted(values) if all(_is_number(v) for v in values) else list(values)  # type: ignore[type-var]
            varied[name] = Dimension(name, {v: _named(name, v, values[v]) for v in order})
    return varied


def _load_key(result: Result) -> Hashable:
    """What was asked for, where that is told: at one scale, more rows of a trace are no other load."""
    offered = (result.get("load") or {}).get("offered_rps")
    if result.get("scale") is not None:
        return float(result["scale"])
    return None if offered is None else float(f"{offered:.4g}")


def _is_scheduler_s(dimension: Dimension, results: Sequence[Result]) -> bool:
    """Whether the scheduler alone tells its value: a setting of its own, as it were."""
    return _tells(lambda result: result.get(_SCHEDULER), dimension, results)


def _is_decided(dimension: Dimension, axis: Dimension, results: Sequence[Result]) -> bool:
    """Whether axis and scheduler together tell its value, and the scheduler alone does not."""
    if dimension is axis or _is_scheduler_s(dimension, results):
        return False
    return _tells(lambda result: (result.get(_SCHEDULER), axis.at(result)), dimension, results)


def _tells(key: Callable[[Result], Hashable], dimension: Dimension, results: Sequence[Result]) -> bool:
    """Whether runs of one key have one value."""
    values: dict[Hashable, Hashable] = {}
    return all(values.setdefault(key(r), dimension.at(r)) == dimension.at(r) for r in results)


def _lines(results: Sequence[Result], axis: Dimension | None, by: list[Dimension]) -> list[Line]:
    def texts(result: Result) -> dict[str, str]:
        return {d.name: text for d in by if (text := d.text_at(result)) is not None}

    ranks = [list(d.texts) for d in by]

    def rank(result: Result) -> list[int]:
        values = (d.at(result) for d in by)
        return [-1 if v is None else order.index(v) for v, order in zip(values, ranks, strict=True)]

    lines = []
    for _, group in groupby(sorted(results, key=rank), key=rank):
        runs = list(group)
        of = texts(runs[0])
        label = ", ".join(of.values()) or str(runs[0].get(_SCHEDULER) or "all runs")
        level = axis is not None and all(axis.unread(run) for run in runs)
        points = [(x, run) for x in axis.texts for run in runs] if axis and level else _points(runs, axis)
        lines.append(Line(label, of, points, level))
    return lines


def _points(runs: list[Result], axis: Dimension | None) -> list[tuple[Any, Result]]:
    if axis is None:
        return [(str(run.get(_SCHEDULER) or "all runs"), run) for run in runs]
    placed: list[tuple[Any, Result]] = [(axis.place(run), run) for run in runs]
    return sorted((point for point in placed if point[0] is not None), key=itemgetter(0))


def _named(name: str, value: Hashable, runs: list[Result]) -> str:
    if name in (_SCHEDULER, "trace"):
        return str(value)
    if name == _LOAD:
        rates = [(run.get("load") or {}).get("offered_rps") for run in runs]
        told = [rate for rate in rates if rate is not None]
        if told and max(told) - min(told) <= _SAME_RATE * max(told):
            return f"{number(told[0], 3)} req/s"
        return f"scale {_plain(value)}"
    if name in ("servers", "bins", "requests"):
        return f"{_plain(value)} {name.removesuffix('s') if value == 1 else name}"
    return setting_text(name, value)


def _plain(value: Hashable) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    return number(value) if isinstance(value, int | float) else str(value)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)

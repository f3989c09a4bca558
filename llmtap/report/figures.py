"""The charts of a sweep, as plotly reads them, with the figures that they show.

A chart has a panel for each quantity, and in it one curve for each line of the sweep. What no run has is left
out. Colours are numbers here: the page has a palette for light and one for dark, and lines differ by dash and
marker as well.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise
from math import log
from typing import Any, Final

from llmtap.report.sweep import Dimension, Line, Result, Sweep, number

__all__ = [
    "COLOURS", "DASHES", "E2E", "GOODPUT", "LATE", "MARK", "OFFERED", "REQUESTS", "SMOOTH", "SYMBOLS",
    "Chart", "Look", "Panel", "Quantity", "charts_of", "is_wide", "looks_of", "samples_text", "value_text",
]  # fmt: skip

COLOURS: Final = 7
"""As many as the style sheet has, --c0 and on."""
DASHES: Final = ("solid", "dash", "dot", "dashdot", "longdash", "longdashdot")
SYMBOLS: Final = ("circle", "square", "diamond", "triangle-up", "cross", "x")
MARK: Final = "*"
"""Beside a percentile that rests on too few samples."""
OFFERED: Final = "offered load"
"""What the dotted line beside throughput is."""
_LOG_AXIS: Final = 20
"""From this ratio of largest to smallest an axis is logarithmic."""
_TICKS_MAX: Final = 8
"""Of labels that fit beside each other on a phone."""


@dataclass(frozen=True, slots=True)
class Quantity:
    """A figure of a run, by where it stands in the JSON."""

    name: str
    unit: str
    path: tuple[str, ...]
    samples: tuple[str, ...] = ("n",)
    offered: bool = False
    """The offered load is in the same unit, and is drawn beside it."""

    def of(self, result: Result) -> float | None:
        value = _at(result, self.path)
        return value if isinstance(value, int | float) else None

    def n(self, result: Result) -> int | None:
        """How many samples it rests on."""
        value = _at(result, self.samples)
        return value if isinstance(value, int) else None

    def doubtful(self, result: Result) -> bool:
        """Whether they are too few for this percentile."""
        return self.path[-1] in (_at(result, (*self.path[:-1], "marks")) or ())

    @property
    def title(self) -> str:
        return f"{self.name}, {self.unit}" if self.unit else self.name


@dataclass(frozen=True, slots=True)
class Chart:
    """Quantities that are read together."""

    key: str
    heading: str
    about: str
    quantities: tuple[Quantity, ...]
    says: tuple[str, ...] = ()
    """What its caption tells beside what every caption does."""


@dataclass(frozen=True, slots=True)
class Panel:
    """One plot: what plotly is given, and in words."""

    title: str
    words: str
    data: list[dict[str, Any]]
    layout: dict[str, Any]
    of: dict[str, str]
    """Text by dimension, for what holds of the whole panel."""


@dataclass(frozen=True, slots=True)
class Look:
    """How a line is told from others."""

    colour: int
    dash: str
    symbol: str


def _of_times(title: str, metric: str, *shares: str) -> tuple[Quantity, ...]:
    place = (metric,) if metric == "queueing" else ("metrics", metric)
    return tuple(Quantity(f"{title} {share}", "s", (*place, share), (*place, "n")) for share in shares)


REQUESTS: Final = Quantity("Completed requests", "req/s", ("throughput_rps",), offered=True)
GOODPUT: Final = Quantity(
    "Goodput", "req/s", ("goodput", "requests_per_second"), ("goodput", "counted"), offered=True
)
SMOOTH: Final = Quantity(
    "Smooth goodput", "tokens/s", ("smooth_goodput", "tokens_per_second"), ("smooth_goodput", "n")
)
LATE: Final = Quantity("Outside the request SLA", "share", ("request_sla_violation",))
E2E: Final = _of_times("E2E", "e2e", "p50", "p99")

_CHARTS: Final = (
    Chart("throughput", "Throughput", "What was completed in a second.",
          (REQUESTS, Quantity("Tokens", "tokens/s", ("throughput_tps",)))),
    Chart("goodput", "Goodput and smooth goodput",
          "Goodput counts requests that met every objective, and nothing of the others. Smooth goodput is the"
          " sum of every answer's benefit: its tokens, less what its reader waited.",
          (GOODPUT, SMOOTH), ("objectives", "smooth goodput", "tokens")),
    Chart("first-token", "Time to first token", "", _of_times("TTFT", "ttft", "p50", "p99")),
    Chart("between-tokens", "Time between tokens",
          "TBT is each gap between two tokens of an answer, TPOT an answer's mean gap.",
          (*_of_times("TBT", "itl", "p99"), *_of_times("TPOT", "tpot", "p50", "p99")), ("ITL", "tokens")),
    Chart("user-idle", "User idle latency", "How long a reader waits with nothing to read.",
          _of_times("User idle", "user_idle", "p50", "p99"), ("smooth goodput",)),
    Chart("end-to-end", "End to end latency", "From arrival to completion, of completed requests.", E2E),
    Chart("violations", "Requests outside their bounds", "",
          (LATE, Quantity("Outside the token SLA", "share", ("token_sla_violation",)),
           Quantity("SLO attainment", "share", ("goodput", "attainment"), ("goodput", "counted"))),
          ("SLA", "objectives")),
    Chart("use", "Utilisation and batches",
          "Share of time that servers were busy; requests in a batch, on average.",
          (Quantity("Utilisation", "share", ("utilization",)),
           Quantity("Batch size, mean", "", ("batch_mean",), ("batches",)))),
    Chart("queueing", "Queueing", "From arrival until a server took the request up.",
          _of_times("Queueing", "queueing", "p50", "p99")),
    Chart("memory", "Memory", "Requests thrown out of a full KV memory; blocks of prompts found in it.",
          (Quantity("Preempted requests", "share", ("engine", "preempted_share")),
           Quantity("Prefix hits", "share", ("engine", "prefix_hit_rate"), ("engine", "prefix_queries")))),
    Chart("capacity", "Capacity",
          "The highest rate at which no more than the allowed share of requests is late.",
          (Quantity("Capacity", "req/s", ("capacity", "rps")),), ("capacity", "SLA")),
)  # fmt: skip


def looks_of(sweep: Sweep) -> list[Look]:
    """A look for each line: the colour by what tells lines apart first, the dash by the rest."""
    first = [line.of.get(sweep.by[0].name) if sweep.by else None for line in sweep.lines]
    rest = [tuple(line.of.get(d.name) for d in sweep.by[1:]) for line in sweep.lines]
    colours, others = list(dict.fromkeys(first)), list(dict.fromkeys(rest))
    looks = []
    for one, other in zip(first, rest, strict=True):
        colour, dash = colours.index(one), others.index(other)
        symbol = colour + dash
        if len(others) == 1:
            dash = colour
        # Where dashes come again, they come with other symbols.
        symbol += dash // len(DASHES)
        looks.append(Look(colour % COLOURS, DASHES[dash % len(DASHES)], SYMBOLS[symbol % len(SYMBOLS)]))
    return looks


def charts_of(sweep: Sweep) -> Iterator[tuple[Chart, list[Panel]]]:
    """The charts that any run has figures for, without the quantities that none has."""
    looks = looks_of(sweep)
    results = [result for line in sweep.lines for _, result in line.points]
    for chart in _CHARTS:
        held = tuple(q for q in chart.quantities if any(q.of(result) is not None for result in results))
        if held:
            yield (
                Chart(chart.key, chart.heading, chart.about, held, chart.says),
                [_curves(sweep, looks, quantity) for quantity in held],
            )


def value_text(quantity: Quantity, value: float | None, *, unit: bool = True) -> str:
    """With its unit: seconds below a tenth as ms, shares in percent."""
    if value is None:
        return "-"
    if quantity.unit == "share":
        return f"{number(value * 100)} %"
    if not unit:
        return number(value)
    if quantity.unit == "s" and 0 < abs(value) < 0.1:
        return f"{number(value * 1e3)} ms"
    return f"{number(value)} {quantity.unit}".rstrip()


def _place_text(axis: Dimension | None, place: Any) -> str:
    """A place on the axis in words."""
    if axis is None:
        return str(place)
    if axis.name == "load":
        return f"{number(place, 3)} req/s offered"
    return axis.texts.get(place, number(place))


def _curves(sweep: Sweep, looks: list[Look], quantity: Quantity) -> Panel:
    data: list[dict[str, Any]] = []
    found: list[tuple[float, Line, Any]] = []
    for i, (line, look) in enumerate(zip(sweep.lines, looks, strict=True)):
        values = [quantity.of(result) for _, result in line.points]
        if all(value is None for value in values):
            continue
        found += [(v, line, x) for v, (x, _) in zip(values, line.points, strict=True) if v is not None]
        data.append({
            "type": "scatter",
            "mode": "markers" if sweep.axis is None else "lines+markers",
            "name": escape(line.label),
            "meta": {"line": i},
            "x": [escape(x) if isinstance(x, str) else x for x, _ in line.points],
            "y": values,
            "line": {"dash": look.dash, "width": 2},
            "marker": {"size": 8, "symbol": [
                look.symbol + ("-open" if quantity.doubtful(result) else "") for _, result in line.points
            ]},
            "cliponaxis": False,
            "hoverinfo": "text",
            "hovertext": [_hover(sweep, quantity, line, x, result) for x, result in line.points],
        })  # fmt: skip
    places = sorted({x for _, _, x in found})
    low, high = min(found, key=lambda one: one[0]), max(found, key=lambda one: one[0])
    title = quantity.title
    y_axis: dict[str, Any] = {"rangemode": "tozero"}
    if quantity.offered and sweep.axis is not None and sweep.axis.name == "load" and len(places) > 1:
        data.append({
            "type": "scatter", "mode": "lines", "name": OFFERED, "meta": {"line": None}, "x": places,
            "y": places, "line": {"dash": "dot", "width": 1}, "hoverinfo": "skip",
        })  # fmt: skip
        # Far more may be offered than was done; the curves are what is to be seen.
        y_axis = {"range": [0, high[0] * 1.1 or 1]}
    if quantity.unit == "share":
        y_axis |= {"tickformat": ".0%"} if high[0] > 0.05 else {"tickformat": ".2~%"}
    elif quantity.unit == "s" and is_wide([v for v, _, _ in found]):
        y_axis = {"type": "log"}
        title += " (log)"
    words = f"{quantity.name}: {_where(sweep, quantity, low)} to {_where(sweep, quantity, high)}."
    if low[0] == high[0]:
        words = f"{quantity.name}: {value_text(quantity, low[0])}{' throughout' if len(found) > 1 else ''}."
    return Panel(title, words, data, {"xaxis": _x_axis(sweep, places), "yaxis": y_axis}, {})


def _where(sweep: Sweep, quantity: Quantity, found: tuple[float, Line, Any]) -> str:
    value, line, x = found
    place = [] if sweep.axis is None or line.level else [_place_text(sweep.axis, x)]
    label = [line.label] if len(sweep.lines) > 1 else []
    return f"{value_text(quantity, value)} ({', '.join([*label, *place]) or line.label})"


def _hover(sweep: Sweep, quantity: Quantity, line: Line, x: Any, result: Result) -> str:
    rows = [
        line.label,
        "" if sweep.axis is None or line.level else _place_text(sweep.axis, x),
        f"{quantity.name} {value_text(quantity, quantity.of(result))}",
        samples_text(quantity, result),
        *(text for d in sweep.along if (text := d.text_at(result)) is not None),
    ]
    return "<br>".join(escape(row) for row in rows if row)


def samples_text(quantity: Quantity, result: Result) -> str:
    n = quantity.n(result)
    return "" if n is None else f"n {n:,}" + (" (too few)" if quantity.doubtful(result) else "")


def _x_axis(sweep: Sweep, places: list[Any]) -> dict[str, Any]:
    if sweep.axis is None:
        return {"type": "category"}
    title = sweep.axis.title
    axis: dict[str, Any] = {"rangemode": "tozero"}
    if is_wide(places):
        axis = {"type": "log"}
        title += " (log)"
    if _are_apart(places):
        axis |= {"tickvals": places, "ticktext": [number(place, 3) for place in places]}
    return {**axis, "title": {"text": escape(title)}}


def _are_apart(places: list[Any]) -> bool:
    """Whether each can have a label of its own."""
    if not 1 < len(places) <= _TICKS_MAX:
        return len(places) == 1
    at = [log(place) for place in places] if is_wide(places) else places
    return bool(min(b - a for a, b in pairwise(at)) >= 0.5 * (at[-1] - at[0]) / _TICKS_MAX)


def is_wide(values: list[Any]) -> bool:
    """Whether they are better told apart by their ratios than by their differences."""
    return bool(values) and all(v > 0 for v in values) and max(values) >= _LOG_AXIS * min(values)


def _at(result: Mapping[str, Any], path: Sequence[str]) -> Any:
    at: Any = result
    for name in path:
        if not isinstance(at, Mapping):
            return None
        at = at.get(name)
    return at

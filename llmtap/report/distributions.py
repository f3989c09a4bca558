"""Distributions of a replay as charts: the share of requests by latency, and its tail on a scale of its own.

Drawn from `quantiles` of the public JSON. Each chart has two panels: the whole, and by how many a latency is
exceeded, so that a p99.9 can be read. What rests on too few samples (IETF seed 000, 5.1.4.3) is dotted.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any, Final

from llmtap.metrics.statistics import SAMPLES_MIN, SHARES
from llmtap.report.figures import MARK, Panel
from llmtap.report.terminal import milliseconds

__all__ = ["Curve", "Distribution", "distributions_of", "is_doubtful", "panels_of", "table_of"]

_TABLE_SHARES: Final = (0.01, 0.05, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 0.99, 0.995, 0.999, 1.0)
_IN_SECONDS: Final = 10.0
"""From here on an axis is in seconds and not in ms."""
_WIDE: Final = 20
"""From this ratio of p99 to p10, or of the largest to the median, an axis is logarithmic: what is common
would be a wall at its left."""
_TAIL_TICKS: Final = {1.0: "all", 0.1: "10 %", 0.01: "1 %", 0.001: "0.1 %", 0.0001: "0.01 %"}
_DASHES: Final = ("solid", "dash")


@dataclass(frozen=True, slots=True)
class Curve:
    """One distribution."""

    name: str
    n: int
    shares: Sequence[float]
    seconds: Sequence[float]
    colour: int
    dash: str

    def at(self, share: float) -> float | None:
        return self.seconds[self.shares.index(share)] if share in self.shares else None


@dataclass(frozen=True, slots=True)
class Distribution:
    """Curves that are read together."""

    key: str
    heading: str
    about: str
    curves: list[Curve]
    says: tuple[str, ...] = ()
    """What its caption tells beside what every caption does."""


_Place = tuple[str, ...]
_Drawn = tuple[str, _Place, _Place]
"""Name, place of its quantiles, and of its figures."""
_TTFT: Final[tuple[_Drawn, ...]] = (
    ("TTFT from submit", ("submit", "ttft"), ("metrics", "ttft")),
    ("TTFT from schedule", ("schedule", "ttft"), ("corrected", "ttft")),
)
_GAPS: Final[tuple[_Drawn, ...]] = (
    ("TBC", ("submit", "tbc"), ("metrics", "tbc")),
    ("ITL", ("submit", "itl"), ("metrics", "itl")),
)
_E2E: Final[tuple[_Drawn, ...]] = (
    ("E2E from submit", ("submit", "e2e"), ("metrics", "e2e")),
    ("E2E from schedule", ("schedule", "e2e"), ("corrected", "e2e")),
)
_IDLE: Final[tuple[_Drawn, ...]] = (("User idle", ("submit", "user_idle"), ("metrics", "user_idle")),)
_LATE: Final[tuple[_Drawn, ...]] = (("Dispatch lateness", ("dispatch_lateness",), ("dispatch_lateness",)),)
_TTFT_ABOUT: Final = (
    "To the first content. From submit it is the server's time; from schedule it is what a user waits, whom"
    " neither a slow sender nor a slow server keeps from asking. Where the two part, the sender was late."
)
_GAPS_ABOUT: Final = (
    "TBC is each gap between chunks that carry output; 0 means that two came in one read. ITL is each gap"
    " between tokens, by the option named."
)
_LATE_ABOUT: Final = "How long after its time a request left: the sender's own error, and not the server's."
_CHARTS: Final[tuple[tuple[str, str, str, tuple[_Drawn, ...], tuple[str, ...]], ...]] = (
    ("first-token", "Time to first token", _TTFT_ABOUT, _TTFT, ()),
    ("between-tokens", "Time between tokens", _GAPS_ABOUT, _GAPS, ("ITL", "tokens")),
    ("end-to-end", "End to end latency", "To the last byte, of answers that ended well.", _E2E, ()),
    ("user-idle", "User idle latency", "How long a reader waits with nothing to read, in an answer.", _IDLE,
     ("smooth goodput", "tokens")),
    ("lateness", "Dispatch lateness", _LATE_ABOUT, _LATE, ("sender",)),
)  # fmt: skip


def distributions_of(result: Mapping[str, Any]) -> Iterator[Distribution]:
    """Those that the result has; curves of nothing are left out."""
    quantiles = result.get("quantiles") or {}
    shares = quantiles.get("shares") or ()
    option = ((result.get("metrics") or {}).get("itl") or {}).get("option")
    for key, heading, about, drawn, says in _CHARTS:
        curves = []
        for i, (name, place, figures) in enumerate(drawn):
            seconds, n = _at(quantiles, place), (_at(result, figures) or {}).get("n") or 0
            if seconds and n and len(seconds) == len(shares):
                title = f"{name} (option {option})" if name == "ITL" and option else name
                curves.append(Curve(title, n, shares, seconds, i, _DASHES[i]))
        if curves:
            yield Distribution(key, heading, about, curves, says)


def is_doubtful(n: int, share: float) -> bool:
    """Whether `n` samples are too few for a percentile; the largest value is what it is."""
    return any(SHARES[name] <= share < 1 and n < least for name, least in SAMPLES_MIN.items())


def panels_of(distribution: Distribution) -> list[Panel]:
    """The whole, and the tail."""
    curves = distribution.curves
    in_ms = max(curve.seconds[-1] for curve in curves) < _IN_SECONDS
    factor, unit = (1e3, "ms") if in_ms else (1.0, "s")
    wide = any(_is_wide(curve) for curve in curves)
    x_axis: dict[str, Any] = {"type": "log"} if wide else {"rangemode": "tozero"}
    x_axis["title"] = {"text": unit + (" (log)" if wide else "")}
    words = " ".join(_words(curve, wide=wide) for curve in curves)
    whole: list[dict[str, Any]] = []
    tail: list[dict[str, Any]] = []
    for curve in curves:
        points = [
            (share, seconds * factor)
            for share, seconds in zip(curve.shares, curve.seconds, strict=True)
            if seconds > 0 or not wide
        ]
        hover = "%{fullData.name}<br>%{y:.2%} within %{x:.4~r} " + unit
        whole += _traces(curve, points, hover)
        # Beyond the largest but one of the samples there is nothing but a line to the largest.
        rare = [(share, x) for share, x in points if 1 - share >= 1 / curve.n]
        hover = "%{fullData.name}<br>%{customdata:.4~r} % take %{x:.4~r} " + unit + " or longer"
        tail += _traces(curve, rare, hover, tail=True)
    tail_axis = {
        "type": "log", "title": {"text": "share that takes longer (log)"}, "tickvals": list(_TAIL_TICKS),
        "ticktext": list(_TAIL_TICKS.values()),
    }  # fmt: skip
    return [
        Panel("Share by latency", words, whole, {"xaxis": x_axis, "yaxis": {
            "title": {"text": "share of all"}, "tickformat": ".0%", "range": [0, 1.02],
        }}, {}),
        Panel("How many take longer", words, tail, {"xaxis": x_axis, "yaxis": tail_axis}, {}),
    ]  # fmt: skip


def table_of(distribution: Distribution) -> tuple[list[str], list[tuple[str, list[str]]]]:
    """Heads and rows of the same figures, in ms."""
    curves = distribution.curves
    rows = [("n", [f"{curve.n:,}" for curve in curves])]
    for share in _TABLE_SHARES:
        cells = [
            milliseconds(curve.at(share)) + (MARK if is_doubtful(curve.n, share) else "") for curve in curves
        ]
        rows.append(("max" if share == 1 else f"p{share * 100:.4g}", cells))
    return ["", *(f"{curve.name}, ms" for curve in curves)], rows


def _traces(
    curve: Curve, points: Sequence[tuple[float, float]], hover: str, *, tail: bool = False
) -> Iterator[dict[str, Any]]:
    """The line, and what of it is of too few samples as one of its own."""
    known = sum(not is_doubtful(curve.n, share) for share, _ in points if share < 1)
    # The largest value is certain, the line to it is not.
    certain = points if known == sum(share < 1 for share, _ in points) else points[:known]
    parts = [(certain, curve.dash, 2.0)]
    if len(certain) < len(points):
        parts.append((points[max(0, known - 1) :], "dot", 1.5))
    for part, dash, width in parts:
        if part:
            trace: dict[str, Any] = {
                "type": "scatter", "mode": "lines", "name": escape(curve.name),
                "meta": {"line": curve.colour},
                "x": [x for _, x in part], "y": [_exact(1 - share) if tail else share for share, _ in part],
                "line": {"dash": dash, "width": width}, "hovertemplate": hover + "<extra></extra>",
            }  # fmt: skip
            if tail:
                trace["customdata"] = [_exact(100 * (1 - share)) for share, _ in part]
            yield trace


def _exact(value: float) -> float:
    """Without the noise of 1 - 0.999."""
    return round(value, 9)


def _is_wide(curve: Curve) -> bool:
    pairs = ((curve.at(0.1), curve.at(0.99)), (curve.at(0.5), curve.seconds[-1]))
    return any(bool(low and high and high >= _WIDE * low > 0) for low, high in pairs)


def _words(curve: Curve, *, wide: bool) -> str:
    figures = []
    for name in ("p50", "p99"):
        mark = " (too few)" if is_doubtful(curve.n, SHARES[name]) else ""
        figures.append(f"{name} {milliseconds(curve.at(SHARES[name]))} ms{mark}")
    none = max((share for share, s in zip(curve.shares, curve.seconds, strict=True) if s <= 0), default=0)
    if wide and none:
        figures.append(f"{none * 100:.3g} % at 0, left of the axis")
    return f"{curve.name}: {', '.join(figures)}, n {curve.n:,}."


def _at(told: Mapping[str, Any], place: _Place) -> Any:
    at: Any = told
    for name in place:
        at = at.get(name) if isinstance(at, Mapping) else None
    return at

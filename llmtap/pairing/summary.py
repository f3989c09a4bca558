"""Summarise the pairs of two vantages as public JSON: seconds, tokens, counts.

An interval of a percentile covers both the choice of the requests (by ranks, with Wilson's interval of the
share) and the uncertainty of every value: its ends are percentiles of the lowest and of the highest possible
values. Tokens of one answer are not independent, so the number of pairs counts for them, too.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from llmtap.exchange.exchange import Exchange
from llmtap.metrics.catalogue import Unit
from llmtap.metrics.statistics import marks, share_range
from llmtap.pairing.alignment import TextRelation
from llmtap.pairing.attempts import Role, attempts_of
from llmtap.pairing.clock import VantageOffset, offset_from_traffic, use_monotonic_clock
from llmtap.pairing.figures import FIGURES, MeasuredPair, PairFigure, figures_of
from llmtap.pairing.matching import Evidence, Matching, match

VERSION: Final = 1
PERCENTILES: Final = {"p50": 0.5, "p90": 0.9, "p99": 0.99}
EXAMPLES_MAX: Final = 10
"""Maximum number of pairs in a list of examples."""
_Values = NDArray[np.float64]
_CHART_POINTS: Final = 101
_DIFFERENT: Final = (TextRelation.CUT, TextRelation.EXTENDED, TextRelation.CHANGED)


WALL_CLOCKS_NS: Final = 1_000_000_000
"""Largest difference between the wall clocks of two hosts that is assumed before the traffic bounds it."""


def pair_captures(
    fronts: Sequence[Exchange],
    backs: Sequence[Exchange],
    *,
    comparable: bool,
    clock: VantageOffset | None = None,
) -> dict[str, Any]:
    """Pair the exchanges of two captures, and return the summary of the pairs.

    The timelines of captures of one host are changed to its monotonic clock.

    Args:
        comparable: as for `match`.
        clock: offset of the back's clock; None: 0 if both captures are of one host, else computed from the
        traffic.
    """
    source = "stated"
    if clock is None and use_monotonic_clock(fronts, backs):
        clock, source = VantageOffset(), "monotonic"
    elif clock is None:
        wide = VantageOffset(0, WALL_CLOCKS_NS)
        pairs = match(fronts, backs, wide, comparable=comparable).pairs
        delivered = [
            (pair.front, one.exchange)
            for pair in pairs
            for one in attempts_of(pair)
            if one.role is Role.DELIVERED
        ]
        bounded = offset_from_traffic(delivered)
        clock, source = (wide, "wall") if bounded is None else (bounded, "traffic")
    matching = match(fronts, backs, clock, comparable=comparable)
    return summarise(matching, clock, clock_source=source, comparable=comparable)


def summarise(
    matching: Matching,
    clock: VantageOffset,
    *,
    clock_source: str = "stated",
    comparable: bool = True,
) -> dict[str, Any]:
    """Return the summary of all pairs.

    Args:
        clock_source: source of `clock`. `monotonic`: both sides have one clock; `traffic`: computed from the
        pairs; `wall`: assumed, within `WALL_CLOCKS_NS`; `stated`: given by the user.
        comparable: as for `match`.
    """
    all_figures = [figures_of(pair, clock) for pair in matching.pairs]
    counts = PairCounts()
    for figures in all_figures:
        counts.add(figures)
    counts.left.update(
        unpaired_front=len(matching.unpaired_front),
        unpaired_back=len(matching.unpaired_back),
        ambiguous_front=len(matching.ambiguous_front),
        ambiguous_back=len(matching.ambiguous_back),
    )
    return summarise_figures(all_figures, counts, clock, clock_source=clock_source, comparable=comparable)


@dataclass(slots=True)
class PairCounts:
    """Number of exchanges and pairs."""

    pairs: int = 0
    evidence: Counter[Evidence] = field(default_factory=Counter)
    """Exchanges of the back in pairs, by the decisive evidence."""
    attempts: Counter[Role] = field(default_factory=Counter)
    text: Counter[TextRelation] = field(default_factory=Counter)
    left: Counter[str] = field(default_factory=Counter)
    """Exchanges in no pair, by reason and side, such as `unpaired_front`."""

    def add(self, figures: MeasuredPair) -> None:
        self.pairs += 1
        self.evidence.update(one.evidence[0] for one in figures.pair.matches)
        self.attempts.update(one.role for one in figures.attempts)
        self.text[figures.text] += 1

    def to_dict(self) -> dict[str, Any]:
        def total(side: str) -> int:
            return sum(n for reason, n in self.left.items() if reason.endswith(side))

        return {
            "counts": {
                "front": self.pairs + total("_front"),
                "back": self.evidence.total() + total("_back"),
                "pairs": self.pairs,
                **self.left,
            },
            "evidence": {kind.value: self.evidence[kind] for kind in Evidence if self.evidence[kind]},
            "attempts": {role.value: self.attempts[role] for role in Role if self.attempts[role]},
            "text": {relation.value: self.text[relation] for relation in TextRelation if self.text[relation]},
        }


def summarise_figures(
    all_figures: Sequence[MeasuredPair],
    counts: PairCounts,
    clock: VantageOffset,
    *,
    clock_source: str,
    comparable: bool,
) -> dict[str, Any]:
    """Return the summary of measured pairs, with these counts; the other arguments are those of
    `summarise`."""
    return {
        "version": VERSION,
        **counts.to_dict(),
        "comparable": comparable,
        "clock": {
            "source": clock_source, "offset": clock.offset_ns / 1e9, "uncertainty": clock.uncertainty_ns / 1e9
        },
        "figures": {figure.name: _summarise_figure(figure, all_figures) for figure in FIGURES},
        "slowest": _slowest(all_figures),
        "differences": _differences(all_figures),
        "charts": _charts(all_figures),
    }  # fmt: skip


def _summarise_figure(figure: PairFigure, all_figures: Sequence[MeasuredPair]) -> dict[str, Any]:
    if figure.name == "token":
        values, lows, highs, n_pairs = _token_delays(all_figures)
    else:
        bounded = [one for figures in all_figures for one in figures.values.get(figure.name, ())]
        values, lows, highs = (np.array([one[i] for one in bounded], np.float64) for i in range(3))
        n_pairs = sum(figure.name in figures.values for figures in all_figures)
    scale = 1e9 if figure.unit is Unit.SECONDS else 1.0
    out: dict[str, Any] = {
        "title": figure.title, "definition": figure.definition, "unit": figure.unit.value, "n": len(values),
        "pairs": n_pairs, "marks": marks(n_pairs, PERCENTILES) if n_pairs else [],
    }  # fmt: skip
    if figure.unit is Unit.TOKENS:
        out["total"] = float(values.sum())
    for name, p in PERCENTILES.items():
        out[name] = None
        if len(values):
            below, above = share_range(p, n_pairs)
            ends = np.quantile(values, p), np.quantile(lows, below), np.quantile(highs, above)
            value, low, high = (float(end) / scale for end in ends)
            out[name] = {"value": value, "low": min(low, value), "high": max(high, value)}
    return out


def _token_delays(all_figures: Sequence[MeasuredPair]) -> tuple[_Values, _Values, _Values, int]:
    """Return the delays of all tokens with their lowest and highest possible values, and the number of
    pairs."""
    known = [(one.token_delays_ns, one.token_range_ns) for one in all_figures]
    delays = [(ns.astype(np.float64), below, above) for ns, (below, above) in known if ns is not None]
    none: _Values = np.array([], np.float64)
    values = np.concatenate([none, *(ns for ns, _, _ in delays)])
    lows = np.concatenate([none, *(ns - below for ns, below, _ in delays)])
    highs = np.concatenate([none, *(ns + above for ns, _, above in delays)])
    return values, lows, highs, len(delays)


def _slowest(all_figures: Iterable[MeasuredPair]) -> list[dict[str, Any]]:
    """Return the names of the pairs for which the gateway added most to the time to the first token, in
    seconds."""
    timed = [
        (figures.values["ttft"][0].value, figures) for figures in all_figures if "ttft" in figures.values
    ]
    timed.sort(key=lambda one: -one[0])
    return [{**_names(figures), "ttft": ns / 1e9} for ns, figures in timed[:EXAMPLES_MAX]]


def _differences(all_figures: Iterable[MeasuredPair]) -> list[dict[str, Any]]:
    """Return the pairs whose texts differ, with the position of the difference and the lengths in
    characters."""
    out: list[dict[str, Any]] = []
    for figures in all_figures:
        delivered = figures.delivered
        if delivered is not None and figures.text in _DIFFERENT and len(out) < EXAMPLES_MAX:
            text = delivered.text
            out.append(
                {
                    **_names(figures), "relation": text.relation.value, "equal_chars": text.common_chars,
                    "front_chars": text.front_chars, "back_chars": text.back_chars,
                }
            )  # fmt: skip
    return out


def _names(figures: MeasuredPair) -> dict[str, Any]:
    """Return the exchange ids of a pair."""
    return {"front": figures.pair.front.id, "back": [back.id for back in figures.pair.backs]}


def _charts(all_figures: Sequence[MeasuredPair]) -> list[Mapping[str, Any]]:
    """Return a chart of the shares of first tokens and of tokens that were delayed by less than a time."""
    first = [one.value for figures in all_figures for one in figures.values.get("first_token", ())]
    tokens, _, _, _ = _token_delays(all_figures)
    shares = np.linspace(0, 1, _CHART_POINTS)
    series = [
        {"name": name, "x": (np.quantile(values, shares) / 1e6).round(4).tolist(), "y": shares.tolist()}
        for name, values in (("first token", np.array(first)), ("each token", tokens))
        if len(values)
    ]
    if not series:
        return []
    return [
        {
            "title": "Delay from the back to the front", "kind": "cdf", "x_title": "delay, ms",
            "y_title": "share of tokens", "series": series,
        }
    ]  # fmt: skip

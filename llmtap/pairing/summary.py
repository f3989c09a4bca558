"""Summarise the pairs of two vantages: seconds, tokens and counts, in structs that become public JSON.

The interval of a percentile covers the chance in the choice of the requests (by ranks, with Wilson's interval
of the share), and the uncertainty of every value: its ends are percentiles of the lowest and of the highest
possible values. Tokens of one answer are not independent, so an interval of tokens, too, has the width that
follows from the number of pairs.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal

import numpy as np
from msgspec import UNSET, Struct, UnsetType
from numpy.typing import NDArray

from llmtap.exchange.exchange import Exchange
from llmtap.metrics.catalogue import Unit
from llmtap.metrics.statistics import marks, share_range
from llmtap.pairing.alignment import TextRelation
from llmtap.pairing.attempts import Role, attempts_of
from llmtap.pairing.clock import VantageOffset, offset_from_traffic, use_monotonic_clock
from llmtap.pairing.figures import FIGURES, BoundedValue, MeasuredPair, PairFigure, figures_of
from llmtap.pairing.matching import Evidence, Matching, match

VERSION: Final = 1
"""Version of the JSON format."""
PERCENTILES: Final = {"p50": 0.5, "p90": 0.9, "p99": 0.99}
EXAMPLES_MAX: Final = 10
"""Maximum number of pairs in a list of examples."""
_Values = NDArray[np.float64]
_CHART_POINTS: Final = 101
_DIFFERENT: Final = (TextRelation.CUT, TextRelation.EXTENDED, TextRelation.CHANGED)


WALL_CLOCKS_NS: Final = 1_000_000_000
"""Assumed largest difference between the wall clocks of two hosts, until the traffic bounds the offset."""
ClockSource = Literal["monotonic", "traffic", "wall", "stated"]
"""Source of a clock offset. `monotonic`: both sides have one clock; `traffic`: computed from the pairs;
`wall`: assumed, within `WALL_CLOCKS_NS`; `stated`: given by the user."""


class ExchangeCounts(Struct, frozen=True, kw_only=True):
    """Number of exchanges of each side, of pairs, and of exchanges in no pair by reason (`Leftover`)."""

    front: int
    back: int
    pairs: int
    unpaired_front: int
    unpaired_back: int
    ambiguous_front: int
    """Exchanges that fit several exchanges of the other side equally well."""
    ambiguous_back: int
    left_out_front: int | UnsetType = UNSET
    """Exchanges of the front that were left out (`Leftover`). Live traffic only, like `left_out_back`."""
    left_out_back: int | UnsetType = UNSET


class ClockSummary(Struct, frozen=True):
    """Clock of the back minus clock of the front, with its uncertainty."""

    source: ClockSource
    """How the offset of the clocks was found."""
    offset: float
    """Offset in seconds, like `uncertainty`."""
    uncertainty: float
    """Largest difference between the true offset and `offset`, in seconds."""


class FigureSummary(Struct, frozen=True, kw_only=True):
    """Percentiles of the values of a figure over all pairs, each with its interval."""

    title: str
    definition: str
    unit: Unit
    n: int
    """Number of values."""
    pairs: int
    """Number of pairs that have the figure."""
    marks: list[str]
    """Names of percentiles for which there are too few pairs."""
    total: float | UnsetType = UNSET
    """Sum of the values, if the unit is tokens."""
    p50: BoundedValue | None
    p90: BoundedValue | None
    p99: BoundedValue | None


class SlowPair(Struct, frozen=True):
    """A pair in which the gateway added much to the time to the first token."""

    front: str
    """Id of the exchange of the front."""
    back: list[str]
    """Ids of the exchanges of the back."""
    ttft: float
    """Time in seconds that the gateway added to the time to the first token."""


class TextDifference(Struct, frozen=True):
    """A pair whose texts at the front and at the back differ."""

    front: str
    """Id of the exchange of the front."""
    back: list[str]
    """Ids of the exchanges of the back."""
    relation: TextRelation
    """How the texts differ."""
    equal_chars: int
    """Length of the equal beginning of both texts, in whole blocks."""
    front_chars: int
    back_chars: int


class PairSummary(Struct, frozen=True, kw_only=True):
    """Summary of all pairs of two vantages."""

    version: int = VERSION
    counts: ExchangeCounts
    """Numbers of exchanges and pairs."""
    evidence: dict[str, int]
    """Number of exchanges of the back in pairs, by `Evidence`."""
    attempts: dict[str, int]
    """Number of requests of the gateway, by `Role`."""
    text: dict[str, int]
    """Number of pairs, by `TextRelation`."""
    comparable: bool
    """Whether both captures made their hashes with the same key."""
    clock: ClockSummary
    figures: dict[str, FigureSummary]
    """Summaries by the name of the figure in `FIGURES`."""
    arms: dict[str, dict[str, FigureSummary]]
    """Figures of each arm of an experiment, if there are several arms. If arms differ, the median of all
    pairs can be a value that no arm has."""
    slowest: list[SlowPair]
    """Pairs in which the gateway added most to the time to the first token, at most EXAMPLES_MAX."""
    differences: list[TextDifference]
    """Pairs whose texts differ, at most EXAMPLES_MAX."""
    charts: list[Mapping[str, object]]
    """Declarations of charts for `chart_figure` in `report/document.py`."""


def pair_captures(
    fronts: Sequence[Exchange],
    backs: Sequence[Exchange],
    *,
    comparable: bool,
    clock: VantageOffset | None = None,
) -> PairSummary:
    """Pair the exchanges of two captures, and return the summary of the pairs.

    If both captures are of one host, their timelines are converted to its monotonic clock.

    Args:
        comparable: whether both captures made their hashes with the same key.
        clock: offset of the back's clock. If it is None, the offset is 0 for captures of one host, and
            computed from the traffic for captures of two hosts.
    """
    source: ClockSource = "stated"
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
    clock_source: ClockSource = "stated",
    comparable: bool = True,
) -> PairSummary:
    """Return the summary of all pairs. `comparable`: both sides made their hashes with the same key."""
    all_figures = [figures_of(pair, clock) for pair in matching.pairs]
    counts = PairCounts()
    for figures in all_figures:
        counts.add(figures)
    counts.leftovers.update(
        unpaired_front=len(matching.unpaired_front),
        unpaired_back=len(matching.unpaired_back),
        ambiguous_front=len(matching.ambiguous_front),
        ambiguous_back=len(matching.ambiguous_back),
    )
    return summarise_figures(all_figures, counts, clock, clock_source=clock_source, comparable=comparable)


@dataclass(slots=True)
class PairCounts:
    """Counts of pairs, and of exchanges with and without a pair."""

    pairs: int = 0
    evidence: Counter[Evidence] = field(default_factory=Counter)
    """Exchanges of the back in pairs, by the kind of the key that found the pair."""
    attempts: Counter[Role] = field(default_factory=Counter)
    """Exchanges of the back in pairs, by their role."""
    text: Counter[TextRelation] = field(default_factory=Counter)
    """Pairs, by the relation of their texts."""
    leftovers: Counter[str] = field(default_factory=Counter)
    """Exchanges in no pair, by reason and side, such as `unpaired_front`."""

    def add(self, figures: MeasuredPair) -> None:
        self.pairs += 1
        self.evidence.update(one.evidence[0] for one in figures.pair.matches)
        self.attempts.update(one.role for one in figures.attempts)
        self.text[figures.text] += 1

    def totals(self) -> ExchangeCounts:
        left_front = sum(n for reason, n in self.leftovers.items() if reason.endswith("_front"))
        front, back = self.pairs + left_front, self.evidence.total() + self.leftovers.total() - left_front
        return ExchangeCounts(front=front, back=back, pairs=self.pairs, **self.leftovers)


def summarise_figures(
    all_figures: Sequence[MeasuredPair],
    counts: PairCounts,
    clock: VantageOffset,
    *,
    clock_source: ClockSource,
    comparable: bool,
) -> PairSummary:
    """Return the summary of measured pairs with given counts. Other arguments: as in `summarise`."""
    return PairSummary(
        counts=counts.totals(),
        evidence={kind.value: n for kind in Evidence if (n := counts.evidence[kind])},
        attempts={role.value: n for role in Role if (n := counts.attempts[role])},
        text={relation.value: n for relation in TextRelation if (n := counts.text[relation])},
        comparable=comparable,
        clock=ClockSummary(clock_source, clock.offset_ns / 1e9, clock.uncertainty_ns / 1e9),
        figures=_summarise_all(all_figures),
        arms=_figures_by_arm(all_figures),
        slowest=_slowest(all_figures),
        differences=_differences(all_figures),
        charts=_charts(all_figures),
    )


def _figures_by_arm(all_figures: Sequence[MeasuredPair]) -> dict[str, dict[str, FigureSummary]]:
    by_arm: dict[str, list[MeasuredPair]] = {}
    for figures in all_figures:
        if (arm := figures.pair.front.arm) is not None:
            by_arm.setdefault(arm, []).append(figures)
    if len(by_arm) < 2:
        return {}
    return {arm: _summarise_all(of_arm) for arm, of_arm in sorted(by_arm.items())}


def _summarise_all(all_figures: Sequence[MeasuredPair]) -> dict[str, FigureSummary]:
    return {figure.name: _summarise_figure(figure, all_figures) for figure in FIGURES}


def _summarise_figure(figure: PairFigure, all_figures: Sequence[MeasuredPair]) -> FigureSummary:
    if figure.name == "token":
        values, lows, highs, n_pairs = _token_delays(all_figures)
    else:
        bounded = [one for figures in all_figures for one in figures.values.get(figure.name, ())]
        values, lows, highs = np.array([(one.value, one.low, one.high) for one in bounded]).reshape(-1, 3).T
        n_pairs = sum(figure.name in figures.values for figures in all_figures)
    scale = 1e9 if figure.unit is Unit.SECONDS else 1.0

    def percentile(p: float) -> BoundedValue | None:
        if not len(values):
            return None
        below, above = share_range(p, n_pairs)
        ends = np.quantile(values, p), np.quantile(lows, below), np.quantile(highs, above)
        value, low, high = (float(end) / scale for end in ends)
        return BoundedValue(value, min(low, value), max(high, value))

    return FigureSummary(
        title=figure.title,
        definition=figure.definition,
        unit=figure.unit,
        n=len(values),
        pairs=n_pairs,
        marks=marks(n_pairs, PERCENTILES) if n_pairs else [],
        total=float(values.sum()) if figure.unit is Unit.TOKENS else UNSET,
        **{name: percentile(p) for name, p in PERCENTILES.items()},
    )


def _token_delays(all_figures: Sequence[MeasuredPair]) -> tuple[_Values, _Values, _Values, int]:
    """Return all tokens' delays in ns, their lowest and highest possible values, and the number of pairs."""
    known = [(one.token_delays_ns, one.token_range_ns) for one in all_figures]
    delays = [(ns.astype(np.float64), below, above) for ns, (below, above) in known if ns is not None]
    none: _Values = np.array([], np.float64)
    values = np.concatenate([none, *(ns for ns, _, _ in delays)])
    lows = np.concatenate([none, *(ns - below for ns, below, _ in delays)])
    highs = np.concatenate([none, *(ns + above for ns, _, above in delays)])
    return values, lows, highs, len(delays)


def _slowest(all_figures: Iterable[MeasuredPair]) -> list[SlowPair]:
    """Return the pairs with the most time that the gateway added to the first token."""
    timed = [
        SlowPair(*_ids(figures), figures.values["ttft"][0].value / 1e9)
        for figures in all_figures
        if "ttft" in figures.values
    ]
    return sorted(timed, key=lambda one: -one.ttft)[:EXAMPLES_MAX]


def _differences(all_figures: Iterable[MeasuredPair]) -> list[TextDifference]:
    return [
        TextDifference(*_ids(figures), text.relation, text.common_chars, text.front_chars, text.back_chars)
        for figures in all_figures
        if figures.delivered_attempt is not None
        and (text := figures.delivered_attempt.text).relation in _DIFFERENT
    ][:EXAMPLES_MAX]


def _ids(figures: MeasuredPair) -> tuple[str, list[str]]:
    """Return the id of the front's exchange, and the ids of the back's exchanges."""
    return figures.pair.front.id, [back.id for back in figures.pair.backs]


def _charts(all_figures: Sequence[MeasuredPair]) -> list[Mapping[str, object]]:
    """Return a chart of two distributions: the delays of first tokens, and the delays of all tokens."""
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
            "title": "Delay from the back to the front",
            "kind": "cdf",
            "x_title": "delay, ms",
            "y_title": "share of tokens",
            "series": series,
        }
    ]

"""Compare results of replays: differences of figures, most with an interval, and how the set-ups differ.

Used by `llmtap report --compare`: takes results of replays (`SavedReplay`) by label, and returns a
`ReplayComparison`, which it renders as a document. A difference is b - a. Its interval of 95 % is computed
from the intervals of both figures: order statistics for a quantile, Wilson's score for a share. The interval
covers the variation of the requests within the two runs, not the variation from run to run. Rates, TBC and
ITL have no interval. A replay is compared with its own source in `baseline.py`.

Source: Zou and Donner 2008 (MOVER); for shares Newcombe 1998, method 10.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from math import hypot
from typing import Any, Final

from msgspec import UNSET
from rich.console import RenderableType

from llmtap.errors import ConfigError
from llmtap.gates.comparison import (
    BurstCaution,
    ComparedFigure,
    ComparedResult,
    PairComparison,
    ReplayComparison,
    SetUpDifference,
)
from llmtap.gates.figures import failed_and_counted
from llmtap.load.replay.saved_replay import SavedMetric, SavedReplay
from llmtap.metrics import hdr
from llmtap.metrics.catalogue import Surface, shown_on
from llmtap.metrics.intervals import Interval, quantile_interval, share_interval
from llmtap.metrics.latency import BURST_SENSITIVE, arrives_in_bursts, chunks_at_a_time
from llmtap.metrics.statistics import is_enough
from llmtap.report.document import Note, ReportDocument, Section, Table
from llmtap.report.gates import regression_blocks
from llmtap.report.render import terminal
from llmtap.report.values import (
    FEW,
    MARK,
    METRIC_TITLES,
    at,
    burst_sentences,
    is_marked,
    leaves,
    milliseconds,
    number,
    plain_text,
)
from llmtap.units import NS_PER_S

QUANTILES: Final = {"p50": 0.5, "p99": 0.99}
VALUES_MAX: Final = 20_000_000
"""Maximum number of values of a histogram: the computation of an interval needs all values in a list."""
GAPS: Final = frozenset({"tbc", "itl"})
"""Metrics with several values for each request. These depend on each other, so they have no interval."""
_RATES: Final[Mapping[str, tuple[str, str, Callable[[SavedReplay], float | None]]]] = {
    "offered_rps": ("requests sent", "req/s", lambda result: result.load.offered_rps),
    "achieved_rps": ("requests ended", "req/s", lambda result: result.load.achieved_rps),
    "output_tokens_per_second": ("output", "tokens/s", lambda result: result.tokens.output_per_second),
    "goodput": ("goodput", "req/s", lambda result: result.goodput.requests_per_second),
}
"""By the name of a figure (`gates/figures.py`): its title, unit, and a function that returns its value."""
_SHARES: Final[Mapping[str, tuple[str, Callable[[SavedReplay], tuple[int, int]]]]] = {
    "complete_share": ("answers complete", lambda result: (result.outcomes.get("complete", 0), result.n)),
    "error_rate": ("requests failed", lambda result: failed_and_counted(result.outcomes, is_live=False)),
    "attainment": ("objectives met", lambda result: (result.goodput.met, result.goodput.counted)),
}
"""By the name of a figure: its title, and a function that returns the counts of the part and of the whole."""
_LOAD_PARTS: Final = (
    "arrivals",
    "body",
    "conversations",
    "data",
    "requests",
    "rows",
    "seed",
    "trace",
    "window",
    "workload",
)
"""Parts of a plan that decide which requests are sent and when, except their `_OTHER_SETTINGS`."""
_OTHER_SETTINGS: Final = frozenset({"body.endpoint", "body.model", "body.server", "arrivals.recorded_rps"})
_IGNORED_PARTS: Final = ("notes", "prompts")


def compare_replays(results: Mapping[str, SavedReplay], level: float = 0.95) -> ReplayComparison:
    """Compare results of replays, by label, with the first. `level`: confidence level of each interval."""
    (first, base), *others = results.items()
    compared = [
        ComparedResult(label, result.plan.get("target"), result.window.start, result.verdict)
        for label, result in results.items()
    ]
    return ReplayComparison(compared, [_compare_pair(first, base, *other, level) for other in others])


def _compare_pair(a: str, base: SavedReplay, b: str, other: SavedReplay, level: float) -> PairComparison:
    cautions = list(_cautions({a: base, b: other}))
    figures = list(_figures(base, other, level, in_bursts=bool(cautions)))
    return PairComparison(a, b, figures, cautions, _set_up_differences(base, other))


def difference_interval(a: Interval, b: Interval) -> tuple[float | None, float | None]:
    """Return the ends of the interval of b - a; None for an open end. The samples must be independent."""
    difference = b.value - a.value
    low = difference - hypot(b.value - b.low, a.high - a.value)
    high = difference + hypot(b.high - b.value, a.value - a.low)
    return (None if b.open_below or a.open_above else low, None if b.open_above or a.open_below else high)


def _cautions(results: Mapping[str, SavedReplay]) -> Iterator[BurstCaution]:
    """Yield the replays whose chunks arrive in bursts, which makes gaps between tokens unreliable."""
    numbers = [chunks_at_a_time(result.chunking) for result in results.values()]
    for label, n, usual in zip(results, numbers, reversed(numbers), strict=True):
        if n is not None and arrives_in_bursts(n, usual):
            yield BurstCaution(label, BURST_SENSITIVE, n)


@dataclass(frozen=True, slots=True)
class _FigureOfPair:
    """A figure to compare: its name, and its values, counts and intervals in both results."""

    key: str
    """Name of the figure in public JSON."""
    name: str
    figure: str
    """Statistic of the metric `name`, such as `p50`."""
    unit: str
    counts: Sequence[int]
    """Number of samples in each result."""
    sides: Sequence[float | None]
    """Value of each result; None: unknown."""
    intervals: Sequence[Interval | None] = (None, None)
    option: str | None = None
    """ITL option of the values; None for other metrics."""
    is_compared: bool = True
    """Whether the values may be compared; they are shown anyway."""


def _figures(a: SavedReplay, b: SavedReplay, level: float, *, in_bursts: bool) -> Iterator[ComparedFigure]:
    """Yield the figures of both results.

    `in_bursts`: in one result the chunks come in bursts, so the metrics of BURST_SENSITIVE are not compared.
    """
    for figure in chain(_quantile_figures(a, b, level, in_bursts=in_bursts), _scalar_figures(a, b, level)):
        if figure.sides[0] is not None or figure.sides[1] is not None:
            yield _compare_figure(figure, level)


def _quantile_figures(
    a: SavedReplay, b: SavedReplay, level: float, *, in_bursts: bool
) -> Iterator[_FigureOfPair]:
    for metric in (one.name for one in shown_on(Surface.COMPARISON)):
        both = [(result.metric(metric), _values(result, metric)) for result in (a, b)]
        for option in dict.fromkeys(one.option for one, _ in both):
            pair = [(one, values) if one.option == option else (SavedMetric(), ()) for one, values in both]
            counts = [one.n for one, _ in pair]
            is_compared = not (in_bursts and metric in BURST_SENSITIVE) and "+" not in (option or "")
            for name, share in QUANTILES.items():
                sides = [getattr(one, name) for one, _ in pair]
                intervals = [quantile_interval(values, share, level) for _, values in pair]
                key = f"{metric}_{name}"
                yield _FigureOfPair(key, metric, name, "s", counts, sides, intervals, option, is_compared)


def _scalar_figures(a: SavedReplay, b: SavedReplay, level: float) -> Iterator[_FigureOfPair]:
    for key, (name, counts_of) in _SHARES.items():
        pairs = [counts_of(result) for result in (a, b)]
        intervals = [share_interval(k, n, level) for k, n in pairs]
        shares = [None if one is None else one.value for one in intervals]
        yield _FigureOfPair(key, name, "share", "share", [n for _, n in pairs], shares, intervals)
    counts = [result.n for result in (a, b)]
    not_judged = [result.goodput.not_judged for result in (a, b)]
    if any(not_judged):
        yield _FigureOfPair("not_judged", "not judged", "count", "requests", counts, not_judged)
    for key, (name, unit, rate_of) in _RATES.items():
        rates = [rate_of(result) for result in (a, b)]
        yield _FigureOfPair(key, name, "rate", unit, counts, rates)


def _values(result: SavedReplay, metric: str) -> Sequence[float]:
    """Return the values of a metric in seconds, ascending, with an error of 0.1 %; none for `GAPS`."""
    histogram = result.hdr_histograms.get(metric)
    if metric in GAPS or histogram is None:
        return []
    return ordered_values(metric, list(hdr.values(histogram)))


def ordered_values(name: str, buckets: Sequence[tuple[float, int]]) -> list[float]:
    """Return the values of a histogram in seconds, from values in ns with their counts."""
    n = sum(count for _, count in buckets)
    if n > VALUES_MAX:
        problem = f"{name} has {n:,} values, and at most {VALUES_MAX:,} can be compared"
        raise ConfigError("--compare", problem, "compare shorter replays")
    return [value_ns / NS_PER_S for value_ns, count in buckets for _ in range(count)]


def _compare_figure(figure: _FigureOfPair, level: float) -> ComparedFigure:
    (a, b), intervals = figure.sides, figure.intervals
    few = [
        value is not None and figure.figure in QUANTILES and not is_enough(n, QUANTILES[figure.figure])
        for value, n in zip(figure.sides, figure.counts, strict=True)
    ]
    difference = None if a is None or b is None or not figure.is_compared else b - a
    low = high = None
    if difference is not None and intervals[0] is not None and intervals[1] is not None:
        # The interval comes from a histogram, which rounds by 0.1 %: shift it to fit the exact difference.
        moved = difference - (intervals[1].value - intervals[0].value)
        low, high = difference_interval(intervals[0], intervals[1])
        low, high = (None if low is None else low + moved, None if high is None else high + moved)
    return ComparedFigure(
        key=figure.key,
        name=figure.name,
        option=figure.option,
        figure=figure.figure,
        unit=figure.unit,
        n_a=figure.counts[0],
        a=a,
        n_b=figure.counts[1],
        b=b,
        few_a=few[0],
        few_b=few[1],
        difference=difference,
        low=low,
        high=high,
        level=level,
        share=difference / a if a and difference is not None else None,
    )


def _set_up_differences(a: SavedReplay, b: SavedReplay) -> list[SetUpDifference]:
    """Return the settings of plan, sender and server that differ; settings of the load come first."""
    settings_a, settings_b = dict(_settings(a)), dict(_settings(b))
    rows = [
        SetUpDifference(name, settings_a.get(name), settings_b.get(name), _is_load_setting(name))
        for name in dict.fromkeys((*settings_a, *settings_b))
        if settings_a.get(name) != settings_b.get(name)
    ]
    return sorted(rows, key=lambda row: not row.load)


def _settings(result: SavedReplay) -> Iterator[tuple[str, Any]]:
    """Yield the settings of a replay by name, to find those in which two replays differ."""
    yield from leaves({k: v for k, v in result.plan.items() if k not in _IGNORED_PARTS})
    sender = result.sender
    yield "sender.llmtap", sender.llmtap
    yield "sender.hosts", sorted({clock.host for clock in sender.clocks})
    yield "sender.processes", len(sender.processes)
    yield "sender.clock", sender.clock
    yield "warm-up.requests", result.warmup.requests
    yield "objectives", result.goodput.objectives
    yield "gpu", at(result.system, "summary", "gpu", "devices")
    yield "ITL option", result.metric("itl").option
    yield "stopped", result.load.stopped


def _is_load_setting(name: str) -> bool:
    return name == "stopped" or (name.partition(".")[0] in _LOAD_PARTS and name not in _OTHER_SETTINGS)


_ABOUT: Final = (
    "Interval: 95 % for each difference by itself; it describes the requests of these two runs. Runs differ"
    " by more: repeat both, in turn. An end without a number: too few samples. TBC, ITL and"
    " rates have no interval. The rates of requests ended and of output are over the whole window, with the"
    " wait for the last answers."
)
_OTHER_LOAD: Final = "The loads differ: differences are those of the load and of the server together."
_OTHER_OPTION: Final = "ITL is of different options, and not compared; TBC is the same quantity in both."
_IN_BURSTS: Final = "TBC, ITL and TPOT are not compared."


def comparison_document(comparison: ReplayComparison) -> ReportDocument:
    sections = [
        Section(f"against-{i}", f"{pair.b} against {pair.a}", list(_pair_blocks(pair)))
        for i, pair in enumerate(comparison.comparisons)
    ]
    title = f"Replays compared: {', '.join(result.label for result in comparison.results)}"
    judged = None if comparison.regression is UNSET else comparison.regression
    summary = [*_verdict_notes(comparison), *regression_blocks(judged)]
    return ReportDocument(title, summary, sections=sections)


def render_replay_comparison(comparison: ReplayComparison) -> RenderableType:
    report = comparison_document(comparison)
    sections = ((Note(section.heading, "bold"), *section.blocks) for section in report.sections)
    return terminal([*report.summary, *chain.from_iterable(sections)])


def _verdict_notes(comparison: ReplayComparison) -> Iterator[Note]:
    for result in comparison.results:
        verdict = result.verdict
        valid = verdict["valid"]
        says = [] if valid else [finding["says"] for finding in verdict["findings"]][:1]
        state = "partial" if valid and verdict.get("partial") else "valid" if valid else "NOT VALID"
        text = f"{result.label}: to {result.target or '?'}, {result.start or 'at an unknown time'}, {state}"
        yield Note(": ".join([text, *says]), "none" if valid else "red")


def _pair_blocks(pair: PairComparison) -> Iterator[Note | Table]:
    if any(row.load for row in pair.set_up):
        yield Note(_OTHER_LOAD, "bold red", lead="warning:")
    if any(row.name == "ITL option" for row in pair.set_up):
        yield Note(_OTHER_OPTION, lead="warning:")
    for caution in pair.cautions:
        says = " ".join(burst_sentences(caution.events_per_read, caution.label))
        yield Note(f"caution: {says} {_IN_BURSTS}", "yellow")
    rows = [_row_cells(row) for row in pair.figures]
    heads = ["", "n", pair.a, "n", pair.b, "difference", "95 % interval", "relative"]
    yield Table(heads, rows, nowrap=True, label="Figures")
    yield Note(_ABOUT)
    if is_marked(rows):
        yield Note(FEW)
    if pair.set_up:
        cells = [[row.name, plain_text(row.a), plain_text(row.b)] for row in pair.set_up]
        yield Table(["differs in the set-up", pair.a, pair.b], cells, label="Set-up")
    else:
        yield Note("The set-ups do not differ.")


def _row_cells(row: ComparedFigure) -> list[str]:
    unit, ends = row.unit, (row.low, row.high)

    def text(value: float | None) -> str:
        if unit == "s":
            return milliseconds(value)
        return number(None if value is None else value * (100 if unit == "share" else 1))

    def signed(value: float | None) -> str:
        return f"+{text(value)}" if value is not None and value > 0 else text(value)

    shown = {"s": "ms", "share": "%"}.get(unit, unit)
    title = str(METRIC_TITLES.get(row.name, row.name))
    title += f" ({row.option})" if row.option else ""
    figure = f" {row.figure}" if unit == "s" else ""
    interval = "-" if ends == (None, None) else " to ".join("…" if e is None else signed(e) for e in ends)
    relative = "-" if row.share is None or unit == "share" else f"{row.share * 100:+.1f} %"
    return [
        f"{title}{figure}, {shown}",
        f"{row.n_a:,}",
        text(row.a) + MARK * row.few_a,
        f"{row.n_b:,}",
        text(row.b) + MARK * row.few_b,
        signed(row.difference),
        interval,
        relative,
    ]

"""Percentiles with confidence intervals for benchmark results, and their table cells and chart series.

Used by the ten tests and by comparisons. Input: measured values in seconds. Output: figures in seconds
(`IntervalFigure`, `LatencyRow`), cells and tables, and chart series in milliseconds. `metrics/intervals.py`
calculates the intervals.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from math import exp, floor, log, log10
from typing import Any, Final

from msgspec import UNSET, Struct, UnsetType
from scipy import stats

from llmtap.bench.run.measurement import Measurement
from llmtap.bench.run.session import Load
from llmtap.bench.run.test import ChartSeries, ReportTable
from llmtap.metrics.comparison import compare_quantile
from llmtap.metrics.intervals import Interval, clustered_quantile_interval, mean_interval, quantile_interval
from llmtap.metrics.statistics import SHARES, is_enough, mean, percentile
from llmtap.report.values import FEW, MARK

KEY_SHARES: Final = {"p50": 0.50, "p95": 0.95, "p99": 0.99}
METRICS: Final = {"ttft": "TTFT", "tpot": "TPOT", "e2e": "E2E"}
MS: Final = 1e3
_ABSENT: Final = "-"
Cell = Callable[[Any], str]
"""Function that returns the text of a cell for a row."""
INTERVAL_NOTE: Final = "in brackets after a figure: its interval of 95 %, where it has one"
_LEVEL: Final = 0.95
RUNS_MIN: Final = 3
"""Minimum number of independent runs for a claim about a difference (IETF 6.3)."""
_PLACES_MAX: Final = 2
_POINTS_MAX: Final = 500
_TAIL_POINTS: Final = 100
"""Number of highest values that a distribution chart always shows: in 100,000 samples, all above P99.9."""


class IntervalFigure(Struct, frozen=True, kw_only=True):
    """A figure with its interval."""

    value: float | None
    low: float | None
    """Lower end of the interval; None if it is open, or if there is no interval."""
    high: float | None
    """Upper end of the interval, as `low`."""
    n: int
    """Number of samples."""
    level: float = _LEVEL
    """Confidence level of the interval."""
    method: str | UnsetType | None = UNSET
    """Name of the method by which the interval was computed."""
    p: float | UnsetType | None = UNSET
    """p-value of a test against 0."""
    p_adjusted: float | UnsetType = UNSET
    """p-value adjusted for all tests of the same metric (Holm)."""
    reading: str | UnsetType = UNSET
    """Meaning that the figure gives to a term which the draft does not define, such as `per_request`."""
    r2_log: float | UnsetType = UNSET
    """If the figure is the exponent of a power law: R^2 of the line that was fitted to the logarithms."""


def interval_figure(interval: Interval) -> IntervalFigure:
    return IntervalFigure(
        value=interval.value,
        low=None if interval.open_below else interval.low,
        high=None if interval.open_above else interval.high,
        n=interval.n,
        level=interval.level,
        method=interval.method,
    )


class LatencyRow(Struct, frozen=True, kw_only=True):
    """Statistics of a metric. A percentile is absent if it was not requested, and None without values."""

    n: int
    mean: float | None
    min: float | None
    max: float | None
    p50: IntervalFigure | UnsetType | None = UNSET
    p90: IntervalFigure | UnsetType | None = UNSET
    p95: IntervalFigure | UnsetType | None = UNSET
    p99: IntervalFigure | UnsetType | None = UNSET
    p999: IntervalFigure | UnsetType | None = UNSET
    marks: list[str]
    """Names of the percentiles with too few values (IETF 5.1.4.3)."""

    def percentile(self, name: str) -> IntervalFigure | None:
        """Return the figure of a percentile, by its name: `p50`."""
        figure: IntervalFigure | UnsetType | None = getattr(self, name)
        assert figure is not UNSET, f"{name} was not requested"
        return figure


def latency_row(values: Sequence[float], shares: Mapping[str, float] = SHARES) -> LatencyRow:
    """Return the statistics of values in any order; percentiles have intervals (`metrics/intervals.py`)."""
    ordered = sorted(values)
    return _make_row(ordered, {name: (p, quantile_interval(ordered, p)) for name, p in shares.items()})


def clustered_row(groups: Sequence[Sequence[float]]) -> LatencyRow:
    """Return the statistics of groups of dependent values, such as the gaps of each request.

    In the intervals, each group counts as one sample.
    """
    ordered = sorted(value for group in groups for value in group)
    return _make_row(
        ordered, {name: (p, clustered_quantile_interval(groups, p)) for name, p in SHARES.items()}
    )


def _make_row(ordered: Sequence[float], estimates: Mapping[str, tuple[float, Interval | None]]) -> LatencyRow:
    n = len(ordered)
    percentiles: dict[str, IntervalFigure | None] = {}
    for name, (p, interval) in estimates.items():
        if not n:
            percentiles[name] = None
        elif interval is None:
            percentiles[name] = IntervalFigure(value=percentile(ordered, p), low=None, high=None, n=n)
        else:
            percentiles[name] = interval_figure(interval)
    return LatencyRow(
        n=n,
        mean=mean(ordered),
        min=ordered[0] if n else None,
        max=ordered[-1] if n else None,
        **percentiles,
        marks=[name for name, (p, _) in estimates.items() if n and not is_enough(n, p)],
    )


def paired_values(
    measurements: Iterable[tuple[Measurement, Measurement]], column: str
) -> tuple[list[float], list[float]]:
    """Return two lists of equal length: a column's values in the first and in the second of each pair.

    Only rows that completed in both measurements of a pair are used. Values are in seconds if the column's
    name ends in `_ns`.
    """
    first: list[float] = []
    second: list[float] = []
    for ours, theirs in ((a.values_by_row(column), b.values_by_row(column)) for a, b in measurements):
        rows = sorted(ours.keys() & theirs.keys())
        first += [ours[row] for row in rows]
        second += [theirs[row] for row in rows]
    return first, second


def mean_over_repeats(values: Sequence[float]) -> IntervalFigure | None:
    """Return the mean of differences, one from each repeat, with Student's interval and p-value.

    None if there are fewer than three repeats.
    """
    interval = mean_interval(values)
    if len(values) < RUNS_MIN or interval is None:
        return None
    if min(values) == max(values):
        p = 1.0 if values[0] == 0 else 0.0
    else:
        p = float(stats.ttest_1samp(values, 0.0).pvalue)
    return IntervalFigure(
        value=interval.value,
        low=interval.low,
        high=interval.high,
        n=interval.n,
        p=p,
        method="Student's t over repeats",
    )


def quantile_ratio(
    base: Sequence[float], other: Sequence[float], p: float, *, paired: bool
) -> IntervalFigure | None:
    """Return p-quantile of `other` / p-quantile of `base`, with interval; None if a value is not above 0."""
    if not base or not other or min(base) <= 0 or min(other) <= 0:
        return None
    first, second = percentile(sorted(base), p), percentile(sorted(other), p)
    assert first is not None and second is not None
    comparison = compare_quantile([log(x) for x in base], [log(x) for x in other], p, paired=paired)
    if comparison is None:
        return IntervalFigure(value=second / first, low=None, high=None, n=len(other), method=None)
    return IntervalFigure(
        value=second / first,
        low=exp(comparison.low),
        high=exp(comparison.high),
        n=len(other),
        method=comparison.method,
    )


def ms(seconds: float | None, *, doubtful: bool = False, unit: bool = True) -> str:
    """Format a time as `127 ms` or `3.42 ms`; `doubtful` adds a mark for too few samples."""
    if seconds is None:
        return _ABSENT
    return _ms_text(seconds, _decimal_places(seconds)) + " ms" * unit + f" {MARK}" * doubtful


def ms_with_interval(figure: IntervalFigure | None, *, doubtful: bool = False, unit: bool = True) -> str:
    """Return a figure with its interval: `200.9 ms (200.5 to 201.6)`, or `240 ms * (233 ms or more)`."""
    if figure is None or figure.value is None:
        return _ABSENT
    low, high = figure.low, figure.high
    places = _decimal_places(figure.value)
    if low is not None and high is not None:
        if high > low:
            places = max(places, min(_PLACES_MAX, 1 - floor(log10((high - low) * MS))))
        span = f" ({_ms_text(low, places)} to {_ms_text(high, places)})"
    elif low is not None:
        span = f" ({ms(low, unit=unit)} or more)"
    else:
        span = "" if high is None else f" ({ms(high, unit=unit)} or less)"
    return _ms_text(figure.value, places) + " ms" * unit + f" {MARK}" * doubtful + span


def with_interval(figure: IntervalFigure | None, form: str) -> str:
    """Format a figure and its interval with the format `form`: `1.25 (1.20 to 1.31)`."""
    if figure is None or figure.value is None:
        return _ABSENT
    ends = (figure.low, figure.high)
    low, high = (None if end is None else format(end, form) for end in ends)
    return format(figure.value, form) + ("" if low is None else f" ({low} to {high})")


def _decimal_places(seconds: float) -> int:
    value = abs(seconds) * MS
    return 0 if value >= 99.95 else 1 if value >= 9.995 else _PLACES_MAX


def _ms_text(seconds: float, places: int) -> str:
    return f"{seconds * MS:,.{places}f}"


def ms_of(row: LatencyRow, name: str, *, unit: bool = True) -> str:
    """Format a percentile, or `mean`, `min` or `max`, of a row; with its interval if it has one."""
    figure, doubtful = getattr(row, name), name in row.marks
    if isinstance(figure, IntervalFigure):
        return ms_with_interval(figure, doubtful=doubtful, unit=unit)
    return ms(figure, doubtful=doubtful, unit=unit)


def table_of(caption: str, rows: Iterable[Any], columns: Mapping[str, Cell]) -> ReportTable:
    return ReportTable(caption, list(columns), [[cell(row) for cell in columns.values()] for row in rows])


def metric_table(caption: str, metrics: Mapping[str, str]) -> ReportTable:
    return ReportTable(caption, ["Metric", "Value"], [[name, value] for name, value in metrics.items()])


def latency_columns(*figures: str) -> dict[str, Cell]:
    """Return table columns for rows that have a `LatencyRow` by metric: `ttft p99` becomes `TTFT P99`."""

    def cell(metric: str, share: str) -> Cell:
        return lambda row: ms_of(getattr(row, metric), share)

    named = [figure.split() for figure in figures]
    return {f"{METRICS[metric]} {share.upper()}": cell(metric, share) for metric, share in named}


def attribute_cell(name: str, form: str = "") -> Cell:
    """Return a function that formats the attribute `name` of a row with the format `form`."""
    return lambda row: format(getattr(row, name), form)


def legend(rows: Iterable[object], *metrics: str, share: str | None = None) -> list[str]:
    """Return the notes below a table: on intervals, and on the mark of figures with too few samples, if any.

    `share`: the only percentile that the table shows, such as `p99`; default: all percentiles of `metrics`.
    """
    marks = {mark for row in rows for metric in metrics for mark in getattr(row, metric).marks}
    return [INTERVAL_NOTE] + [FEW] * (bool(marks) if share is None else share in marks)


def cdf_series(name: str, values: Sequence[float]) -> ChartSeries:
    """Return the cumulative distribution in ms, with at most 500 points."""
    ordered = sorted(values)
    n = len(ordered)
    ranks: Sequence[int] = range(n)
    if n > _POINTS_MAX:
        even = _POINTS_MAX - _TAIL_POINTS
        body = n - _TAIL_POINTS
        ranks = [*(i * (body - 1) // (even - 1) for i in range(even)), *range(body, n)]
    return ChartSeries(name, [ordered[i] * MS for i in ranks], [(i + 1) / n for i in ranks])


def histogram_series(
    name: str, values: Sequence[float], *, bins: int = 60, span: tuple[float, float] | None = None
) -> ChartSeries:
    """Return the share of values in bins of equal width, with the bin centres in ms as x.

    `span`: range in seconds; default: the range of the values.
    """
    if not values:
        return ChartSeries(name, [], [])
    low, high = span or (min(values), max(values))
    width = (high - low) / bins or 1e-9  # If all values are equal: avoid a division by 0.
    counts = [0] * bins
    for value in values:
        if low <= value <= high:
            counts[min(int((value - low) / width), bins - 1)] += 1
    centres: list[float | str] = [(low + (i + 0.5) * width) * MS for i in range(bins)]
    return ChartSeries(name, centres, [count / len(values) for count in counts])


def line_series(
    name: str, xs: Sequence[float | str], figures: Sequence[IntervalFigure | None]
) -> ChartSeries:
    """Return a line of figures, converted from seconds to ms, with their intervals."""

    def in_ms(values: Iterable[float | None]) -> list[float | None]:
        return [None if value is None else value * MS for value in values]

    return ChartSeries(
        name,
        list(xs),
        in_ms(None if figure is None else figure.value for figure in figures),
        in_ms(None if figure is None else figure.low for figure in figures),
        in_ms(None if figure is None else figure.high for figure in figures),
    )


def load_lines(load: Load, measured: Measurement) -> dict[str, str]:
    """Return a load's configuration lines: workload, load model, requests, duration (IETF 5.1.5.1)."""
    description = load.plan.describe()
    workload: Any = description.get("workload") or {}
    arrivals: Any = description.get("arrivals") or {}
    if load.slots is not None:
        model = f"closed loop, {load.slots:,} at a time"
    else:
        kind = arrivals.get("arrivals") or arrivals.get("process") or "as planned"
        rate = "" if load.rate_rps is None else f", {load.rate_rps:g} requests/s"
        model = f"open loop{rate}, arrivals {kind}"
    completed = len(measured.successful_rows())
    name = workload.get("name") or description.get("trace") or "custom"
    return {
        "Workload": f"{name}, seed {description.get('seed')}",
        "Load model": model,
        "Request count": f"{measured.n:,} sent, {completed:,} answered whole",
        "Test duration": f"{measured.seconds:.1f} s",
    }

"""Guardrail Overhead (IETF draft, 5.10): the cost of safety systems in latency and throughput.

Configurations are arms of the bench file: `baseline`, and any of `input_filter`, `output_filter` and `full`.
At each load and repeat, `run` sends the same rows to all configurations, and twice to the baseline (A/A). The
order is random, so that a drift of the server adds noise but no bias. It returns Tables 13, 14 and charts. An
overhead is the mean over repeats of the shift between paired requests (Hodges and Lehmann), with Student's
interval (6.3). The overhead at a percentile is the difference of both percentiles (5.10.4), with an interval
from the pairs. Holm's method corrects the p-values of each metric over all configurations and loads. The
parameter `search` adds the maximum throughput of each configuration (Table 14); the parameter `labelled` adds
its false positives and false negatives (`guardrail_labels.py`).
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from random import Random
from typing import Annotated, Any, Final, NamedTuple

import msgspec
import pyarrow.compute as pc
from msgspec import UNSET, Meta, UnsetType

from llmtap.bench.run import figures, test
from llmtap.bench.run.levels import (
    WARM_TOKENS,
    Capacity,
    Latencies,
    completion_ratio_if_overloaded,
    expected_search,
    find_capacity,
    known_capacity,
)
from llmtap.bench.run.measurement import Measurement
from llmtap.bench.run.pace import ExpectedLoad, ExpectedLoads, open_loops
from llmtap.bench.run.session import BenchSession, Load, OpenLoop, make_load
from llmtap.bench.tests.guardrail_labels import (
    expected_labelled,
    labelled_load,
    labelled_table,
    send_labelled,
)
from llmtap.errors import ConfigError
from llmtap.metrics.comparison import adjusted_p_values, compare_paired, compare_quantile, reduction
from llmtap.metrics.statistics import is_enough, percentile
from llmtap.options.fields import opt
from llmtap.report.experiment import change_sentence
from llmtap.report.values import p_text

BASELINE: Final = "baseline"
BASELINE_REPEATED: Final = "baseline_again"
ARMS: Final = {
    BASELINE: "Baseline",
    "input_filter": "Input Filter",
    "output_filter": "Output Filter",
    "full": "Full Filter",
}
"""By arm: name in the draft's tables."""
NAMES: Final = {**ARMS, BASELINE_REPEATED: "Baseline again (A/A)"}
METRICS: Final = {"ttft": "TTFT", "e2e": "E2E"}
_SPOKEN: Final = {"ttft": "the time to first token", "e2e": "the time to the end of the answer"}
Cell = dict[int, Measurement]
"""By repeat: measurement of one configuration at one load."""
Cells = Mapping[tuple[str, float], Cell]
_SEED_STEP: Final = 1_000
"""Difference between the seeds of two successive repeats. Levels and searches use the seeds in between."""
CACHED_SHARE: Final = 0.01
"""Largest share of cached input tokens without a note: a larger one favours configurations measured later."""

Level = Annotated[float, Meta(gt=0, le=100)]


class OverheadFigures(msgspec.Struct, frozen=True, kw_only=True):
    """Overhead of a configuration in seconds: its metric minus that of the baseline."""

    overall: figures.IntervalFigure | None
    """Mean overhead over repeats, or over pairs if there are fewer than three repeats."""
    by_repeat: list[float]
    """Overhead in each repeat."""
    pairs: int
    """Number of pairs of equal requests."""
    shift: dict[str, object] | None
    """Comparison over all pairs (`compare_paired`)."""
    p50: figures.IntervalFigure | None
    """Difference of the medians."""
    p95: figures.IntervalFigure | None
    p99: figures.IntervalFigure | None

    def with_adjusted_p(self, p: float) -> "OverheadFigures":
        """Return a copy with the p-value adjusted for the number of comparisons."""
        assert self.overall is not None
        overall = msgspec.structs.replace(self.overall, p_adjusted=p)
        return msgspec.structs.replace(self, overall=overall)


class ArmFigures(Latencies, frozen=True, kw_only=True):
    """Figures of a configuration at one load."""

    sent: int
    """Number of requests that were sent."""
    complete: int
    """Number of requests with a complete response."""
    refused: int
    """Number of requests that the guardrail refused."""
    overhead: dict[str, OverheadFigures] | None
    """By metric: overhead compared with the baseline; None for the baseline itself."""
    overload: list[float]
    """For each block of requests that was sent faster than the server can answer: completions / arrivals."""


class GuardrailLevel(msgspec.Struct, frozen=True):
    """Figures of all configurations at one load."""

    level: float
    """Load in % of the capacity."""
    rate_rps: float
    arms: dict[str, ArmFigures]
    """By configuration: its figures at this load."""


class PeakThroughput(Capacity, frozen=True, kw_only=True):
    """Highest throughput of a configuration."""

    reduction: float | None
    """Share of the baseline's throughput that is lost; None for the baseline itself."""


class GuardrailMeasurements(msgspec.Struct, frozen=True):
    """Public JSON of the test's figures."""

    capacity: Capacity
    """Capacity of the baseline, from which the loads are computed."""
    levels: list[GuardrailLevel]
    max_throughput: dict[str, PeakThroughput] | None
    """By configuration: its highest throughput; None if not measured."""
    labels: dict[str, Any] | UnsetType = UNSET
    """By configuration: refusals compared with the labels; absent if no labelled trace was sent."""


class _ArmRow(NamedTuple):
    """Row of a table: one configuration at one load."""

    load: str
    arm: str
    name: str
    figures: ArmFigures


class _OverheadRow(NamedTuple):
    """Row of a table: overhead of one configuration in one metric at one load."""

    load: str
    name: str
    metric: str
    overhead: OverheadFigures


class GuardrailParams(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Setup of the test (IETF 5.10.2)."""

    workload: Annotated[str, opt("benign workload; conversation is recommended")] = "conversation"
    output_tokens: test.OutputTokens = None
    levels: Annotated[tuple[Level, ...], opt("loads in % of max_rate", min_length=1)] = (
        25.0,
        50.0,
        75.0,
    )
    max_rate: Annotated[
        test.Rate | None,
        opt("capacity of the baseline, requests/s; default: as measured"),
    ] = None
    requests: Annotated[int, opt("requests per block; percentiles are over all repeats", ge=1)] = 200
    repeats: Annotated[int, opt("blocks of each configuration and load; 6.3 demands 3", ge=1)] = 5
    arrivals: test.ArrivalProcess = "poisson"
    search: Annotated[bool, opt("measurement of maximum throughputs (Table 14)")] = True
    slots_max: test.SlotsMax = 128
    labelled: Annotated[
        str | None,
        opt("trace of labelled requests, for a table of refusals against labels"),
    ] = None


def check(session: BenchSession, params: GuardrailParams) -> None:
    """Raise ConfigError if the arm `baseline` or all filter arms are missing, or a trace has no labels."""
    hint = "add it to the file of --config, with keys that differ from [target] (url, headers, body, apply)"
    filter_arms = "[arms.input_filter], [arms.output_filter] or [arms.full]"
    if BASELINE not in session.arms:
        problem = f"is missing: the arm without guardrails, with which {filter_arms} are compared"
        raise ConfigError(f"[arms.{BASELINE}]", problem, hint)
    if not _filter_arms(session):
        raise ConfigError(
            filter_arms,
            f"one of these tables is required, to compare it with [arms.{BASELINE}]",
            hint,
        )
    if params.labelled is not None:
        labelled_load(session, params.labelled)


async def run(session: BenchSession, params: GuardrailParams) -> test.TestResult:
    """Send equal blocks of requests to all configurations, and return the overheads (IETF 5.10.3, 5.10.4)."""
    longer = msgspec.structs.replace(params, output_tokens=WARM_TOKENS)
    warm_by = _closed_load(session, longer, slots=8, requests=32, seed=session.seed - 1)
    capacity = known_capacity(
        session, params.max_rate, params.workload if params.output_tokens is None else None
    )
    if capacity is None:
        capacity = await _capacity(session, params, BASELINE, warm_by)
    arms = [BASELINE, *_filter_arms(session), BASELINE_REPEATED]
    levels = sorted(params.levels)
    needs_switch = any(session.arms[name].has_switch for name in arms if name != BASELINE_REPEATED)
    order = order_blocks(arms, levels, params.repeats, session.seed, group_by_arm=needs_switch)
    cells: Cells = {(arm, level): {} for level in levels for arm in arms}
    for i, (arm, level, repeat) in enumerate(order):
        session.report_remaining(f"{len(order) - i} of {len(order)} blocks")
        # The seed does not depend on the arm, so that all configurations get the same requests.
        load = make_load(
            params.workload,
            open_loop=OpenLoop(capacity.rps * level / 100, params.arrivals),
            requests=params.requests,
            seed=session.seed + _SEED_STEP * repeat + levels.index(level),
            output_tokens=params.output_tokens,
            counting=session.target.counting,
        )
        cells[arm, level][repeat] = await session.measure(
            f"{level:g}-percent/{repeat}/{arm}",
            load,
            arm=BASELINE if arm == BASELINE_REPEATED else arm,
            warm_by=warm_by,
        )
    peaks = await _peak_capacities(session, params, capacity, warm_by) if params.search else None
    result = test.TestResult(configuration=figures.load_lines(load, session.steps[-1]))
    result.main = f"{levels[-1]:g}-percent/0/{BASELINE}"
    measurements = result.measurements = guardrail_figures(cells, arms, levels, capacity, peaks)
    rates = ", ".join(f"{one.level:g} % ({one.rate_rps:.3g}/s)" for one in measurements.levels)
    order_text = "all loads of one, then the next: it takes a command to switch"
    seconds = sum(one.seconds for one in session.steps if "-percent/" in one.name)
    result.configuration |= {
        "Workload": f"{params.workload}, seeds from {session.seed}, one for each repeat and load",
        "Test duration": f"{seconds:.0f} s in all",
        "Load model": f"open loop, arrivals {params.arrivals}; of {capacity.rps:.4g} requests/s: {rates}",
        "Configurations": ", ".join(NAMES[arm] for arm in arms),
        "Request count": f"{params.requests:,} in each of {len(order)} blocks",
        "Order of blocks": f"drawn from the seed; {order_text if needs_switch else 'at each load in turn'}",
    }
    result.headline = list(_headline(measurements.levels[-1]))
    result.tables = _tables(measurements)
    if params.labelled is not None:
        filtered = [BASELINE, *_filter_arms(session)]
        labels = await send_labelled(session, params.labelled, filtered, warm_by)
        measurements = result.measurements = msgspec.structs.replace(measurements, labels=labels)
        if (table := labelled_table(labels, NAMES)) is not None:
            result.tables.append(table)
    result.charts = _charts(cells, measurements)
    _add_notes(result, session, params, cells, measurements)
    return result


def order_blocks(
    arms: Sequence[str], levels: Sequence[float], repeats: int, seed: int, *, group_by_arm: bool = False
) -> list[tuple[str, float, int]]:
    """Return the order of blocks: each arm at each level, `repeats` times, random within a level and repeat.

    `group_by_arm`: send all levels of an arm in succession instead, because switching arms needs a command.
    """
    random = Random(f"{seed}/blocks")
    order: list[tuple[str, float, int]] = []
    for repeat in range(repeats):
        if group_by_arm:
            for arm in random.sample(arms, len(arms)):
                order += [(arm, level, repeat) for level in random.sample(levels, len(levels))]
        else:
            for level in random.sample(levels, len(levels)):
                order += [(arm, level, repeat) for arm in random.sample(arms, len(arms))]
    return order


def _filter_arms(session: BenchSession) -> list[str]:
    """Return the configured arms with a filter."""
    return [name for name in ARMS if name != BASELINE and name in session.arms]


def _closed_load(
    session: BenchSession, params: GuardrailParams, *, slots: int, requests: int, seed: int
) -> Load:
    return make_load(
        params.workload,
        slots=slots,
        requests=requests,
        seed=seed,
        output_tokens=params.output_tokens,
        counting=session.target.counting,
    )


async def _capacity(session: BenchSession, params: GuardrailParams, arm: str, warm_by: Load) -> Capacity:
    first = session.seed + _SEED_STEP // 2

    def load_of(slots: int, requests: int) -> Load:
        return _closed_load(session, params, slots=slots, requests=requests, seed=first + slots)

    name = f"capacity/{arm}"
    return await find_capacity(session, load_of, params.slots_max, arm=arm, name=name, warm_by=warm_by)


async def _peak_capacities(
    session: BenchSession, params: GuardrailParams, capacity: Capacity, warm_by: Load
) -> dict[str, Capacity]:
    """Return the greatest throughput of each arm; measure those that are not known."""
    peaks = {}
    for arm in (BASELINE, *_filter_arms(session)):
        is_known = arm == BASELINE and capacity.tps is not None
        peaks[arm] = capacity if is_known else await _capacity(session, params, arm, warm_by)
    return peaks


def guardrail_figures(
    cells: Cells,
    arms: Sequence[str],
    levels: Sequence[float],
    capacity: Capacity,
    peaks: Mapping[str, Capacity] | None,
) -> GuardrailMeasurements:
    """Return the measurements of IETF 5.10.4; `peaks`: maximum throughputs by configuration, if measured."""
    overheads = _overheads_of(cells, arms, levels)
    return GuardrailMeasurements(
        capacity,
        [
            GuardrailLevel(
                level,
                capacity.rps * level / 100,
                {arm: _arm_figures(cells[arm, level], overheads.get((arm, level))) for arm in arms},
            )
            for level in levels
        ],
        None if peaks is None else {arm: _peak_throughput(peaks, arm) for arm in peaks},
    )


def _peak_throughput(peaks: Mapping[str, Capacity], arm: str) -> PeakThroughput:
    rates = _output_rate(peaks[BASELINE]), _output_rate(peaks[arm])
    return PeakThroughput(
        **msgspec.structs.asdict(peaks[arm]), reduction=None if arm == BASELINE else reduction(*rates)
    )


def _overheads_of(
    cells: Cells, arms: Sequence[str], levels: Sequence[float]
) -> dict[tuple[str, float], dict[str, OverheadFigures]]:
    """Return for each arm except the baseline, and each level, the overheads by metric.

    The p-values are adjusted for all tests of the same metric.
    """
    overheads = {
        (arm, level): {
            metric: _overhead(cells[BASELINE, level], cells[arm, level], f"{metric}_ns") for metric in METRICS
        }
        for level in levels
        for arm in arms
        if arm != BASELINE
    }
    tests = {place: one for place, one in overheads.items() if place[0] != BASELINE_REPEATED}
    for metric in METRICS:
        known = [one for one in tests.values() if one[metric].overall is not None]
        p_values = [overall.p for one in known if (overall := one[metric].overall) is not None]
        for one, p in zip(
            known, adjusted_p_values([p for p in p_values if isinstance(p, float)]), strict=True
        ):
            one[metric] = one[metric].with_adjusted_p(p)
    return overheads


def _output_rate(peak: Capacity) -> float:
    return peak.rps if peak.tps is None else peak.tps


def _latency_values(cell: Cell, metric: str) -> list[float]:
    return [value for one in cell.values() for value in one.values_by_row(f"{metric}_ns").values()]


def _arm_figures(cell: Cell, overhead: dict[str, OverheadFigures] | None) -> ArmFigures:
    outcomes = Counter(outcome for one in cell.values() for outcome in one.table["outcome"].to_pylist())
    rows = {
        metric: figures.latency_row(_latency_values(cell, metric), figures.KEY_SHARES)
        for metric in (*METRICS, "tpot")
    }
    return ArmFigures(
        sent=outcomes.total(),
        complete=outcomes["complete"],
        refused=outcomes["refused"],
        overhead=overhead,
        overload=[
            delivered
            for one in cell.values()
            if (delivered := completion_ratio_if_overloaded(one)) is not None
        ],
        **rows,
    )


def _overhead(base: Cell, other: Cell, column: str) -> OverheadFigures:
    """Return the overhead of `other` over `base` in one latency column (see `OverheadFigures`)."""
    blocks_compared = [(base[repeat], other[repeat]) for repeat in sorted(base)]
    ours, theirs = figures.paired_values(blocks_compared, column)
    shift = compare_paired(ours, theirs)
    shifts = [
        value
        for one in blocks_compared
        if (value := _median_shift(*figures.paired_values([one], column))) is not None
    ]
    overall = figures.mean_over_repeats(shifts)
    if overall is None and shift is not None:
        overall = figures.IntervalFigure(
            value=shift.difference,
            low=shift.low,
            high=shift.high,
            n=shift.n,
            p=shift.p,
            method=shift.method,
        )
    quantiles: dict[str, figures.IntervalFigure | None] = {}
    for name, p in figures.KEY_SHARES.items():
        comparison = compare_quantile(ours, theirs, p, paired=True) if ours else None
        first, second = percentile(sorted(ours), p), percentile(sorted(theirs), p)
        low, high = (None, None) if comparison is None else (comparison.low, comparison.high)
        quantiles[name] = None
        if first is not None and second is not None:
            quantiles[name] = figures.IntervalFigure(value=second - first, low=low, high=high, n=len(ours))
    return OverheadFigures(
        overall=overall,
        by_repeat=shifts,
        pairs=len(ours),
        shift=None if shift is None else shift.to_dict(),
        **quantiles,
    )


def _median_shift(ours: Sequence[float], theirs: Sequence[float]) -> float | None:
    """Return the shift between two blocks: Hodges and Lehmann's estimate, or the median of very few pairs."""
    comparison = compare_paired(ours, theirs)
    if comparison is not None:
        return comparison.difference
    return percentile(sorted(b - a for a, b in zip(ours, theirs, strict=True)), 0.5)


def cached_share(cells: Cells) -> float | None:
    """Return the share of input tokens that were cached; None if it is unknown."""
    tables = [one.table for cell in cells.values() for one in cell.values()]
    cached, input_tokens = (
        sum(pc.sum(table[name]).as_py() or 0 for table in tables)
        for name in ("cached_tokens", "input_tokens")
    )
    known = any(table["cached_tokens"].null_count < len(table) for table in tables)
    return cached / input_tokens if known and input_tokens else None


def _arm_rows(levels: Sequence[GuardrailLevel]) -> Iterator[_ArmRow]:
    for one in levels:
        for arm, arm_figures in one.arms.items():
            yield _ArmRow(f"{one.level:g} %", arm, NAMES[arm], arm_figures)


def _overhead_rows(levels: Sequence[GuardrailLevel]) -> Iterator[_OverheadRow]:
    for row in _arm_rows(levels):
        for metric, overhead in (row.figures.overhead or {}).items():
            yield _OverheadRow(row.load, row.name, METRICS[metric], overhead)


def _percentile_cell(share: str) -> figures.Cell:
    """Return a function that formats the overhead at a percentile; a dash if it has no interval."""

    def cell(row: _OverheadRow) -> str:
        figure: figures.IntervalFigure | None = getattr(row.overhead, share)
        if figure is None or figure.low is None:
            return "-"
        return figures.ms_with_interval(figure, doubtful=not is_enough(figure.n, figures.KEY_SHARES[share]))

    return cell


def _p_value_text(row: _OverheadRow) -> str:
    overall = row.overhead.overall
    if overall is None:
        return "-"
    adjusted_p = overall.p_adjusted
    if adjusted_p is not UNSET:
        return p_text(adjusted_p)
    return f"{p_text(overall.p)} (unadjusted)" if isinstance(overall.p, float) else "-"


def _arm_cell(cell: figures.Cell) -> figures.Cell:
    return lambda row: cell(row.figures)


def _latency_columns(*names: str) -> dict[str, figures.Cell]:
    return {name: _arm_cell(cell) for name, cell in figures.latency_columns(*names).items()}


TABLE_13: Final[Mapping[str, figures.Cell]] = {
    "Configuration": figures.attribute_cell("name"),
    **_latency_columns("ttft p50", "ttft p99", "e2e p50", "e2e p99"),
}
OVERHEAD_COLUMNS: Final[Mapping[str, figures.Cell]] = {
    "Load": figures.attribute_cell("load"),
    "Configuration": figures.attribute_cell("name"),
    "Metric": figures.attribute_cell("metric"),
    "Overhead": lambda row: figures.ms_with_interval(row.overhead.overall),
    **{f"at {share.upper()}": _percentile_cell(share) for share in figures.KEY_SHARES},
    "p (Holm)": _p_value_text,
}
TABLE_14: Final[Mapping[str, figures.Cell]] = {
    "Configuration": lambda row: NAMES[row[0]],
    "Max Throughput": lambda row: (
        f"{row[1].rps:.3g} req/s" if row[1].tps is None else f"{row[1].tps:.0f} tok/s"
    ),
    "Reduction": lambda row: "-" if row[1].reduction is None else f"{row[1].reduction:.1%}",
}
ANSWER_COLUMNS: Final[Mapping[str, figures.Cell]] = {
    "Load": figures.attribute_cell("load"),
    "Configuration": figures.attribute_cell("name"),
    **_latency_columns("ttft p95", "e2e p95"),
    "Sent": _arm_cell(figures.attribute_cell("sent", ",")),
    "Complete": _arm_cell(figures.attribute_cell("complete", ",")),
    "Refused": _arm_cell(figures.attribute_cell("refused", ",")),
}


def _headline(highest: GuardrailLevel) -> Iterator[str]:
    """Yield a sentence on each filter's overhead at the highest load: of TTFT or, without it, of E2E."""
    load = f"At {highest.level:g} % of capacity, "
    for arm, arm_figures in highest.arms.items():
        if arm in (BASELINE, BASELINE_REPEATED):
            continue
        for metric, spoken in _SPOKEN.items():
            overall = (arm_figures.overhead or {})[metric].overall
            if overall is None or overall.value is None or overall.low is None or overall.high is None:
                continue
            interval = overall.low, overall.high
            yield load + change_sentence(NAMES[arm], spoken, overall.value, interval, overall.level)
            break
        else:
            yield f"{load}{NAMES[arm]} has too few answers for a comparison."


def _tables(measurements: GuardrailMeasurements) -> list[test.ReportTable]:
    levels = measurements.levels
    rows = (measurements.max_throughput or {}).items()
    return [
        # The draft's Table 13 shows one load, so make a table for each load.
        *(
            figures.table_of(
                f"Table 13: Guardrail Overhead at {one.level:g} % of capacity"
                f" ({one.rate_rps:.3g} requests/s)",
                _arm_rows([one]),
                TABLE_13,
            )
            for one in levels
        ),
        figures.table_of(
            "Overhead against the baseline, with 95 % intervals (5.10.4)",
            _overhead_rows(levels),
            OVERHEAD_COLUMNS,
        ),
        *([figures.table_of("Table 14: Throughput Impact", rows, TABLE_14)] if rows else []),
        figures.table_of(
            "Answers of each configuration, and P95 (5.10.4)", _arm_rows(levels), ANSWER_COLUMNS
        ),
    ]


def _charts(cells: Cells, measurements: GuardrailMeasurements) -> list[test.ChartSpec]:
    charts, levels = [], measurements.levels
    highest = max(level for _, level in cells)
    for metric, label in METRICS.items():
        curves = [
            figures.cdf_series(NAMES[arm], values)
            for (arm, level), cell in cells.items()
            if level == highest and (values := _latency_values(cell, metric))
        ]
        if curves:
            title = f"{label} of each configuration at {highest:g} % of capacity"
            charts.append(test.ChartSpec(title, "cdf", f"{label} (ms)", "share of requests", curves))
        lines = [
            figures.line_series(
                NAMES[arm],
                [one.level for one in levels],
                [(one.arms[arm].overhead or {})[metric].overall for one in levels],
            )
            for arm in levels[0].arms
            if arm != BASELINE
        ]
        title = f"Overhead of {label} by load, with 95 % intervals"
        y_title = f"{label} over the baseline's (ms)"
        charts.append(test.ChartSpec(title, "points", "load (% of capacity)", y_title, lines))
    return charts


def _add_notes(
    result: test.TestResult,
    session: BenchSession,
    params: GuardrailParams,
    cells: Cells,
    measurements: GuardrailMeasurements,
) -> None:
    capacity, rows = measurements.capacity, list(_arm_rows(measurements.levels))
    result.notes.append(f"capacity of the baseline: {capacity.rps:.4g} requests/s ({capacity.how})")
    missing = [NAMES[name] for name in ARMS if name not in session.arms]
    if missing:
        result.deviations.append(f"5.10.2: not compared, as no such arm is declared: {', '.join(missing)}")
    result.notes += [
        "the baseline was measured twice (A/A): what the two differ by is found where there is no difference",
        'intervals of "Overhead" hold what changes from block to block; those at P50 only these requests',
        *figures.legend([row.figures for row in rows], *METRICS),
    ]
    refused: Counter[str] = Counter()
    for row in rows:
        refused[row.arm] += row.figures.refused
    if counted := ", ".join(f"{NAMES[arm]} {n:,}" for arm, n in refused.items() if n):
        result.notes.append(
            f"refused although the content is benign: {counted}. Refused answers are in no latency"
        )
    result.deviations += _shortfalls(measurements, params)
    cached = cached_share(cells)
    if cached is not None and cached > CACHED_SHARE:
        result.deviations.append(
            f"{cached:.1%} of the input tokens came from a prefix cache: all configurations get the same"
            " requests, so whoever comes later finds them there, and who that is was drawn: turn it off"
        )


def _shortfalls(measurements: GuardrailMeasurements, params: GuardrailParams) -> Iterator[str]:
    """Yield the deviations from the draft that follow from the parameters and the measured figures."""
    runs_min = figures.RUNS_MIN
    if params.repeats < runs_min:
        yield f"6.3: {params.repeats} independent runs of each configuration and load, {runs_min} wanted"
    if not measurements.capacity.saturated:
        yield "5.10.2: capacity was not reached: loads are shares of the most that was tried"
    for row in _arm_rows(measurements.levels):
        if row.figures.refused:
            yield f"5.10.2: {row.figures.refused} benign requests were refused ({row.name}, {row.load})"
        if row.figures.overload:
            yield (
                f"{row.name} did not keep up at {row.load}: answers came at"
                f" {min(row.figures.overload):.0%} of the rate of requests"
            )


def _expected_loads(session: BenchSession, params: GuardrailParams) -> ExpectedLoads:
    arms = [BASELINE, *_filter_arms(session)]
    # Add one arm, because the baseline is measured twice (A/A).
    shares = [level / 100 for level in params.levels] * params.repeats * (len(arms) + 1)
    capacity = known_capacity(
        session, params.max_rate, params.workload if params.output_tokens is None else None
    )
    loads = open_loops(params.requests, shares, None if capacity is None else capacity.rps)

    def search(arm: str) -> list[ExpectedLoad]:
        return expected_search(session, params.slots_max, name=f"capacity/{arm}")

    if capacity is None:
        loads = [*search(BASELINE), *loads]
    if params.search:
        is_measured = capacity is None or capacity.tps is not None
        loads += [load for arm in arms if not (is_measured and arm == BASELINE) for load in search(arm)]
    if params.labelled is not None:
        loads += expected_labelled(session, params.labelled, len(arms))
    return ExpectedLoads(loads, warmups=len(arms))


TEST: Final = test.BenchTest(
    name="guardrail-overhead",
    params=GuardrailParams,
    run=run,
    expected=_expected_loads,
    figures=("load", "tokens", "ttft", "tpot", "e2e"),
    quick={
        "levels": (25.0, 75.0),
        "requests": 24,
        "repeats": 3,
        "output_tokens": 32,
        "slots_max": 32,
    },
    forfeits=("5.10.2-p2",),
    check=check,
    arms=(BASELINE,),
    arms_any=tuple(name for name in ARMS if name != BASELINE),
)

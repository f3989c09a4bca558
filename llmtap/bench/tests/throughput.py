"""Output Token Throughput (IETF draft, 5.2): the highest sustained load, and its token rate.

`run` sends open loops at rising rates or closed loops of rising concurrency, and returns the maximum (Table
3), the latency there (Table 4), all levels, and charts. Other tests use the result as the capacity. The
search doubles the load until it is not sustained, then bisects down to one increment. A load is not sustained
if its queue grows, if fewer than 90 % of its arrivals complete, if its throughput is not stable (5.2.3.2), or
if it violates the SLO; without an SLO, also if its E2E P99 is 10 times the lowest level's P50 (5.2.3.1). The
sustainable load is the rate that was sent at the highest sustained level; the maximum of any other rate is
its highest value over all sustained levels (DEFINITIONS.md, "Load and length").
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Final, Literal, NamedTuple

import msgspec
from msgspec import UNSET, Meta, UnsetType

from llmtap.bench.run import figures, test
from llmtap.bench.run.levels import (
    Bounds,
    BoundsReport,
    Latencies,
    LevelAttempt,
    LevelFigures,
    RateSearch,
    check_duration,
    latency_rows,
    latency_table,
    level_figures,
    level_load,
    measure_closed,
    p99_chart,
    rate_text,
    remaining_text,
    saturation_signs,
    server_mean,
    share_text,
    throughput_chart,
    verdict_text,
)
from llmtap.bench.run.measurement import SteadyPart, steady_part_of, tail_is_heavy
from llmtap.bench.run.pace import ExpectedLoad, ExpectedLoads
from llmtap.bench.run.session import BenchSession, OpenLoop
from llmtap.errors import ConfigError
from llmtap.metrics.cost import tokens_per_gpu_second
from llmtap.metrics.objectives import Objectives
from llmtap.metrics.saturation import TAIL_TIMES
from llmtap.options.fields import opt
from llmtap.units import NS_PER_S, Duration, to_seconds

DURATION_MIN: Final = Duration(60 * NS_PER_S)
DURATION_STABLE: Final = Duration(300 * NS_PER_S)


class ThroughputParams(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Setup of the test (IETF 5.2.2)."""

    workload: test.Workload = "synthetic-uniform"
    duration: Annotated[
        Duration, opt("duration of each level; at least 60s, 300s for stable figures (5.2.2.1)")
    ] = DURATION_MIN
    mode: Annotated[
        Literal["open", "closed"],
        opt("load model: at a rate (open), or with fixed concurrency (closed)"),
    ] = "open"
    arrivals: test.ArrivalProcess = "poisson"
    rate_min: Annotated[float, opt("open loop: lowest rate, requests/s", gt=0)] = 1.0
    rate_max: Annotated[float, opt("open loop: highest rate", gt=0)] = 1_024.0
    rate_step: Annotated[float, opt("open loop: increment of the rate", gt=0)] = 1.0
    concurrency_min: Annotated[int, opt("closed loop: lowest concurrency", ge=1)] = 1
    concurrency_max: Annotated[int, opt("closed loop: highest concurrency", ge=1)] = 512
    concurrency_step: Annotated[int, opt("closed loop: increment of the concurrency", ge=1)] = 1
    ttft_p99: test.TtftBound = None
    tpot_p99: test.TpotBound = None
    slo: Annotated[
        str | None,
        opt("SLO: objectives of each request, such as ttft:1s user_idle:2s e2e:20s"),
    ] = None
    attainment: Annotated[float, opt("SLO: smallest share of requests that meet all of slo", gt=0, le=1)] = (
        0.99
    )
    smooth: Annotated[
        Annotated[float, Meta(gt=0, le=1)] | None,
        opt("SLO: smallest smooth goodput, as a share of the output tokens"),
    ] = None

    @property
    def bounds(self) -> Bounds:
        return Bounds(self.ttft_p99, self.tpot_p99, self.slo, self.attainment, self.smooth)

    @property
    def unit(self) -> str:
        return "req/s" if self.mode == "open" else "at a time"


@dataclass(slots=True)
class SearchResult:
    """State of the search, and the levels that were sent."""

    search: RateSearch
    step: float
    """Increment of the search, as rate or concurrency: `search` counts levels in multiples of it."""
    attempts: list[LevelAttempt] = field(default_factory=list)
    """Levels that were sent, in order of time."""
    ended_early: list[str] = field(default_factory=list)
    """Names of loads whose requests ended before the planned duration."""

    @property
    def best(self) -> LevelAttempt | None:
        """Attempt at the highest level that was sustained; None if none was."""
        level = None if self.search.best is None else self.search.best * self.step
        return next((t for t in reversed(self.attempts) if t.holds and t.level == level), None)

    @property
    def limit(self) -> float | None:
        """Rate or concurrency of the lowest level that was not sustained; None if all were."""
        return None if self.search.limit is None else self.search.limit * self.step


def check(session: BenchSession, params: ThroughputParams) -> None:
    """Raise ConfigError if levels are too short, the SLO is wrong, or the range contradicts the increment."""
    check_duration(session, params.duration, DURATION_MIN, "5.2.2.1")
    if params.slo is not None:
        Objectives.parse(params.slo, "slo")
    if params.mode == "closed":
        _check_range("concurrency", params.concurrency_min, params.concurrency_max, params.concurrency_step)
    else:
        _check_range("rate", params.rate_min, params.rate_max, params.rate_step)


def _check_range(name: str, low: float, high: float, step: float) -> None:
    steps = low / step
    if round(steps) < 1 or abs(steps - round(steps)) > 1e-6:
        raise ConfigError(
            f"{name}_min",
            f"is {low:g}, which is not a multiple of {name}_step ({step:g})",
            f"such as {max(1, round(steps)) * step:g}",
        )
    if high < low:
        raise ConfigError(
            f"{name}_max", f"is {high:g}, below {name}_min ({low:g})", f"set it to {low:g} or more"
        )


def _new_search(params: ThroughputParams) -> SearchResult:
    if params.mode == "open":
        step, low, high = params.rate_step, params.rate_min, params.rate_max
    else:
        step, low, high = params.concurrency_step, params.concurrency_min, params.concurrency_max
    first = round(low / step)
    return SearchResult(RateSearch(low=first, high=max(first, int(high / step + 1e-6)), start=first), step)


async def search_limit(session: BenchSession, params: ThroughputParams) -> SearchResult:
    """Send loads (named `search/16rps`, for example) until the limit is known to within one increment."""
    result = _new_search(params)
    search, seconds = result.search, to_seconds(params.duration)
    while (index := search.next_level) is not None:
        session.expected.replace_search("search", _expected_levels(session, params, result))
        session.report_remaining(remaining_text(search.attempts_max, seconds))
        level = index * result.step
        if params.mode == "open":
            name = f"search/{level:g}rps"
            load = level_load(
                session,
                name,
                params.workload,
                open_loop=OpenLoop(level, params.arrivals),
                duration_s=seconds,
            )
            measured = await session.measure(name, load, slo=params.bounds.slo)
            steady = steady_part_of(measured, seconds)
        else:
            previous = result.attempts[-1] if result.attempts else None
            measured, steady, ended_early = await measure_closed(
                session,
                f"search/{level:g}slots",
                params.workload,
                round(level),
                params.duration,
                None if previous is None else (previous.level, previous.steady_part.completed_rps),
                slo=params.bounds.slo,
            )
            result.ended_early += [measured.name] * ended_early
        violations = _violations(
            steady, result.attempts[0].steady_part if result.attempts else steady, params
        )
        reason = verdict_text(steady, violations, "sustained")
        result.attempts.append(LevelAttempt(level, measured, steady, not violations, reason))
        search.record(index, not violations)
    return result


def _violations(steady: SteadyPart, lowest: SteadyPart, params: ThroughputParams) -> list[str]:
    violations = saturation_signs(steady)
    if params.bounds:
        return violations + params.bounds.violations(steady)
    if steady is not lowest and tail_is_heavy(steady, lowest):
        p99, p50 = steady.latency("e2e_ns", 0.99), lowest.latency("e2e_ns", 0.5)
        violations.append(
            f"E2E P99 {figures.ms(p99)} exceeds 10 x the P50 of the lowest level ({figures.ms(p50)})"
        )
    return violations


class ThroughputLevel(LevelFigures, frozen=True, kw_only=True):
    """Figures of one level of load."""

    planned_rps: float | UnsetType = UNSET
    """Planned load of an open loop."""
    concurrency: float | UnsetType = UNSET
    """Load of a closed loop."""


class ThroughputMeasurements(msgspec.Struct, frozen=True, kw_only=True):
    """Maxima over all sustained levels, and figures of the highest level; None if no level is sustained."""

    load_model: str
    """`open` (requests by time) or `closed` (a fixed number in flight)."""
    constraint: BoundsReport | None
    """Bounds of the SLO."""
    limit: float | None
    """Load of the lowest level that is not sustained, as rate or concurrency."""
    levels: list[ThroughputLevel]
    sustainable_load_rps: float | None = None
    """Arrival rate of the highest sustained level."""
    planned_rps: float | None = None
    """Planned rate of the highest sustained level; absent in a closed loop."""
    sustainable_concurrency: int | None = None
    """Highest sustained number of concurrent requests."""
    max_output_tps: float | None = None
    max_request_rps: float | None = None
    max_input_tps: float | None = None
    tokens_per_gpu_second: float | None = None
    batch_utilization: float | None = None
    """Mean number of running requests / maximum number (`sut.max_batch`)."""
    sent: int | None = None
    """Number of requests that were sent in the steady part of the highest sustained level."""
    completed_rps: float | None = None
    """Completion rate of the highest sustained level."""
    completed: int | None = None
    """Number of complete responses of the highest sustained level."""


class _LevelRow(NamedTuple):
    """Row of a table: one level of load."""

    attempt: LevelAttempt
    level: ThroughputLevel


async def run(session: BenchSession, params: ThroughputParams) -> test.TestResult:
    """Search for the highest sustained load; return it with rates and latencies (IETF 5.2.3, 5.2.4)."""
    search = await search_limit(session, params)
    best, measurements = search.best, _measurements(session, params, search)
    result = test.TestResult(
        measurements, configuration=_configuration(params), main=(best or search.attempts[0]).measurement.name
    )
    result.tables = [_summary_table(measurements)]
    if best is not None:
        result.tables.append(
            latency_table("Table 4: Latency at Maximum Throughput", best.steady_part.sent_requests)
        )
    rows = map(_LevelRow, search.attempts, measurements.levels)
    result.tables.append(
        figures.table_of(
            "All load levels, without their first 10 %",
            sorted(rows, key=lambda row: row.attempt.level),
            {f"Planned load ({params.unit})": lambda row: f"{row.attempt.level:g}"}
            | {name: _level_cell(cell) for name, cell in LEVEL_COLUMNS.items()}
            | {
                "Status": lambda row: row.attempt.status,
                "Why": lambda row: row.level.why,
            },
        )
    )
    result.charts = _charts(params, search)
    if best is None and params.bounds:
        result.missed_objectives.append(f"no level meets the objectives ({params.bounds.text})")
    _add_notes(result, params, search, measurements)
    return result


def _level_cell(cell: figures.Cell) -> figures.Cell:
    return lambda row: cell(row.level)


LEVEL_COLUMNS: Final[Mapping[str, figures.Cell]] = {
    "Sent (req/s)": lambda level: f"{rate_text(level.arrival_rps)} (n {level.arrivals:,})",
    "Completed (req/s)": lambda level: f"{rate_text(level.completed_rps)} (n {level.completed:,})",
    "Output (tok/s)": lambda level: rate_text(level.output_tps),
    **figures.latency_columns("ttft p99", "tpot p99"),
    "Success": lambda level: share_text(level.success),
    "In flight, first to last fifth": lambda level: f"{level.in_flight[0]:.1f} to {level.in_flight[-1]:.1f}",
    "Steady": lambda level: "yes" if level.sustained else "no",
}


def _configuration(params: ThroughputParams) -> dict[str, str]:
    if params.mode == "open":
        model = f"open loop, arrivals {params.arrivals}"
        range_ = f"{params.rate_min:g} to {params.rate_max:g} requests/s, increment {params.rate_step:g}"
    else:
        model = "closed loop"
        range_ = f"{params.concurrency_min} to {params.concurrency_max} at a time"
        range_ += f", increment {params.concurrency_step}"
    return {
        "Workload": params.workload,
        "Load model": model,
        "Load range": range_,
        "Test duration": f"{to_seconds(params.duration):g} s per level, the first 10 % dropped",
        "Latency constraint": params.bounds.text or "none: the highest load that does not saturate",
    }


def _measurements(
    session: BenchSession, params: ThroughputParams, search: SearchResult
) -> ThroughputMeasurements:
    best, is_open = search.best, params.mode == "open"
    measurements = ThroughputMeasurements(
        load_model=params.mode,
        constraint=params.bounds.report(),
        limit=search.limit,
        levels=[_throughput_level(t, is_open=is_open) for t in search.attempts],
    )
    if best is None:
        return measurements
    steady, gpus = best.steady_part, session.sut.hardware.count
    sustained = [t.steady_part for t in search.attempts if t.holds]
    output_tps, request_rps, input_tps = (
        max((rate for t in sustained if (rate := getattr(t, name)) is not None), default=None)
        for name in ("output_tps", "completed_rps", "input_tps")
    )
    running, batch = server_mean(best.measurement, "running", steady), session.sut.max_batch
    per_gpu = None
    if gpus and output_tps is not None:
        per_gpu = tokens_per_gpu_second(round(output_tps * steady.seconds), steady.seconds, gpus)
    return msgspec.structs.replace(
        measurements,
        sustainable_load_rps=steady.arrival_rps,
        planned_rps=best.level if is_open else None,
        sustainable_concurrency=None if is_open else round(best.level),
        max_output_tps=output_tps,
        max_request_rps=request_rps,
        max_input_tps=input_tps,
        tokens_per_gpu_second=per_gpu,
        batch_utilization=None if running is None or batch is None else running / batch,
        sent=steady.arrivals,
        completed_rps=steady.completed_rps,
        completed=steady.completed,
    )


def _throughput_level(attempt: LevelAttempt, *, is_open: bool) -> ThroughputLevel:
    return ThroughputLevel(
        **msgspec.structs.asdict(level_figures(attempt)),
        planned_rps=attempt.level if is_open else UNSET,
        concurrency=UNSET if is_open else attempt.level,
    )


def _summary_table(measurements: ThroughputMeasurements) -> test.ReportTable:
    sustained = rate_text(measurements.sustainable_load_rps, "req/s")
    if measurements.sent is not None:
        planned = rate_text(measurements.planned_rps, "req/s")
        level = (
            f"planned {planned}"
            if measurements.planned_rps
            else f"{measurements.sustainable_concurrency} at a time"
        )
        sustained += f" (n {measurements.sent:,}; {level})"
    completed = rate_text(measurements.completed_rps, "req/s")
    if measurements.completed is not None:
        completed += f" (n {measurements.completed:,})"
    return figures.metric_table(
        "Table 3: Throughput Summary",
        {
            "Max Output Throughput": rate_text(measurements.max_output_tps, "tok/s"),
            "Max Request Throughput": rate_text(measurements.max_request_rps, "req/s"),
            "Max Input Throughput": rate_text(measurements.max_input_tps, "tok/s"),
            "Sustainable Load": sustained,
            "Completed at This Load": completed,
            "Tokens per GPU-second": rate_text(measurements.tokens_per_gpu_second, "tok/s/GPU"),
            "Batch Utilization": share_text(measurements.batch_utilization),
        },
    )


def _charts(params: ThroughputParams, search: SearchResult) -> list[test.ChartSpec]:
    by_load = {t.level: t for t in search.attempts}
    xs = sorted(by_load)
    levels = [by_load[level] for level in xs]
    x_title = "planned load (requests/s)" if params.mode == "open" else "requests at a time"
    best = search.best
    marks = [] if best is None else [test.ChartMark(best.level, "highest that is sustained")]
    rows = [Latencies(**latency_rows(t.steady_part.sent_requests)) for t in levels]
    return [
        throughput_chart("load", x_title, xs, levels, marks),
        p99_chart("Latency P99 by load", x_title, xs, rows, marks),
    ]


def _add_notes(
    result: test.TestResult,
    params: ThroughputParams,
    search: SearchResult,
    measurements: ThroughputMeasurements,
) -> None:
    best, notes = search.best, result.notes
    notes.append(
        "throughput: output tokens made in the last 90 % of a level's time, by that time; an answer's tokens"
        " count evenly from its first token to its end; latencies are of the requests sent in that time"
    )
    if best is None:
        notes.append(f"not even the lowest level is sustained: {search.attempts[-1].reason}")
    elif search.limit is None:
        notes.append(f"the highest level of the range is sustained: {best.level:g} {params.unit} is no limit")
    else:
        notes.append(
            f"the limit lies between {best.level:g} and {search.limit:g} {params.unit}, the increment of the"
            " search; rates have no confidence interval: each level was sent once, and --runs repeats it"
        )
    notes.append(
        "the sustainable load is the rate that was sent at the highest level that is sustained; each maximum"
        " is the highest rate of all levels that are sustained"
    )
    if params.duration < DURATION_STABLE:
        notes.append(
            f"each level lasted {to_seconds(params.duration):g} s; 300 s are recommended for stable figures"
            " (5.2.2.1)"
        )
    lowest = [search.attempts[0].steady_part.latency("e2e_ns", share) for share in (0.50, 0.99)]
    if params.bounds:
        notes.append(
            "with an SLO the rule of 5.2.3.1 that P99 exceeds 10 x the P50 at lower load decides nothing: the"
            " SLO bounds latency"
        )
    elif lowest[0] is not None and lowest[1] is not None and lowest[1] > 10 * lowest[0]:
        notes.append(
            "at the lowest level itself P99 exceeds 10 x P50: that rule of 5.2.3.1 says nothing of load and"
            " was not applied"
        )
    notes += figures.legend(measurements.levels, "ttft", "tpot", share="p99")
    if params.mode == "closed":
        result.deviations.append(
            "5.2.3.1: in a closed loop no queue grows, so saturation shows in failures and the tail alone"
        )
    if search.ended_early:
        result.deviations.append(
            f"5.2.2.1: requests were over before the time was: {', '.join(search.ended_early)}; these levels"
            " count until then"
        )


def _expected_loads(session: BenchSession, params: ThroughputParams) -> ExpectedLoads:
    return ExpectedLoads(_expected_levels(session, params, _new_search(params)))


def _expected_levels(
    session: BenchSession, params: ThroughputParams, state: SearchResult
) -> list[ExpectedLoad]:
    """Return the levels that the search is still expected to send, from its state so far."""
    pace, kind = session.pace, session.kind
    seconds, is_open = to_seconds(params.duration), params.mode == "open"
    highest = capacity = pace.capacity_rps(kind)
    if not is_open and capacity is not None:
        # Estimate the highest level that passes: there, the wait in the queue reaches the bound of TTFT or,
        # without a bound, makes the P99 of the responses TAIL_TIMES times as long as without a queue.
        response_s = (pace.saturation_slots(kind) or 0.0) / capacity
        bound_s = (TAIL_TIMES - 1) * response_s if params.ttft_p99 is None else to_seconds(params.ttft_p99)
        highest = pace.slots_within(kind, bound_s)
    indexes = state.search.expected_levels(None if highest is None else highest / state.step)
    return [
        ExpectedLoad(
            seconds=seconds,
            rate_rps=index * state.step if is_open else None,
            slots=None if is_open else index * state.step,
            search="search",
        )
        for index in indexes
    ]


TEST: Final = test.BenchTest(
    name="throughput",
    params=ThroughputParams,
    run=run,
    figures=("load", "tokens", "ttft", "tpot", "e2e", "goodput"),
    overloads=True,
    expected=_expected_loads,
    quick={"duration": Duration(6 * NS_PER_S)},
    forfeits=("5.2.2.1-1", "5.2.2.1-p1"),
    check=check,
)

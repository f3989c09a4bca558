"""Memory Pressure Behavior (IETF draft, 5.8): more requests than memory has room for.

`run` sends a closed loop at capacity (set by the user, or measured by the capacity test), then above it, and
returns failures, preemptions and slowdown by level (Table 11) and charts. The test shows a warning before it
starts (7.4), waits after each level until every response has ended, and finally checks whether the system
recovered. Preemptions are read from the server's counters. vLLM and SGLang count events, which give an upper
bound for the share of preempted requests; the simulated engine also counts requests, recoveries and tokens. A
figure that the server does not count is reported as not measurable, not as 0.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from math import ceil
from typing import Annotated, Final, NamedTuple

import msgspec

from llmtap.bench.run.figures import (
    Cell,
    IntervalFigure,
    attribute_cell,
    interval_figure,
    latency_columns,
    legend,
    ms,
    table_of,
)
from llmtap.bench.run.levels import (
    Latencies,
    check_duration,
    latency_rows,
    level_load,
    measure_closed,
    memory_errors,
    p99_chart,
    rate_text,
    remaining_text,
    server_mean,
    server_total,
    share_text,
)
from llmtap.bench.run.measurement import Measurement, SteadyPart
from llmtap.bench.run.pace import SLOTS_DEFAULT, ExpectedLoad, ExpectedLoads
from llmtap.bench.run.session import BenchSession
from llmtap.bench.run.test import BenchTest, ChartSeries, ChartSpec, Count, OutputTokens, TestResult
from llmtap.errors import ConfigError
from llmtap.metrics.comparison import increase
from llmtap.metrics.intervals import share_interval
from llmtap.metrics.statistics import percentile
from llmtap.options.fields import opt
from llmtap.report.values import at
from llmtap.units import NS_PER_S, Duration, to_seconds

DURATION_MIN: Final = Duration(120 * NS_PER_S)
PROBES: Final = 5
"""Number of requests that are sent one at a time before the first and after the last level."""
RECOVERY_SHARE_MAX: Final = 0.5
RECOVERY_MAX_S: Final = 0.05
"""A system has recovered if the probes' median TTFT grew by at most this share, or at most these seconds."""
FAILURE_SHARE_MAX: Final = 0.01
THROUGHPUT_FALL_MAX: Final = 0.10
TTFT_FACTOR_MAX: Final = 2.0
"""Thresholds used in `_degradation_pattern`: share of failures, fall of throughput, factor of TTFT."""
WARNING: Final = "this pushes the SUT past its memory (7.4): only on an isolated system that can be restarted"
_NOT_MEASURABLE: Final = "not measurable"


class MemoryPressureParams(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Setup of the test (IETF 5.8.2)."""

    workload: Annotated[
        str,
        opt("workload of 4.3.2 (long-context is recommended, 5.8.2), or FILE.toml of your own"),
    ] = "long-context"
    capacity: Annotated[
        Count | None,
        opt("concurrent capacity (5.5); default: from the capacity test"),
    ] = None
    levels: Annotated[
        tuple[int, ...],
        opt("loads in % of capacity; the first is the base of comparison"),
    ] = (100, 110, 125, 150)
    duration: Annotated[Duration, opt("duration of a level, at least 120s (5.8.3)")] = DURATION_MIN
    output_tokens: OutputTokens = None


class PressureLevel(Latencies, frozen=True, kw_only=True):
    """Figures of a level. Unknown values are None."""

    percent: int
    """Number of concurrent requests in % of the capacity."""
    concurrency: int
    step: str
    """Name of the load."""
    requests: int
    completion: IntervalFigure | None
    """Share of the requests that completed."""
    fail_rate: float
    """Share of the requests that did not complete."""
    memory_errors: int
    """Number of answers that report a lack of memory."""
    preemption_events: int | None
    """How often the server interrupted a request to free memory."""
    preempted_requests: float | None
    """Number of requests that the server interrupted to free memory."""
    preemption_rate_max: float | None
    """Largest possible share of preempted requests. If the server counts preemptions instead of requests, the
    real share is smaller whenever it preempted a request several times."""
    preemption_recovery_rate: float | None
    """Share of the preempted requests that the server resumed."""
    preemption_loss_tokens: float | None
    """Number of tokens that the server had to compute again, per preemption."""
    swapped_tokens: float | None
    """Number of tokens whose cache was moved out of the GPU."""
    swapped_mean: float | None
    """Mean number of requests that were swapped out."""
    completed_rps: float
    """Completed requests per second."""
    output_tps: float | None
    drain: float
    """Seconds from the end of the level until its last answer."""
    pattern: str
    """Name of the most severe degradation compared with the first level (`_degradation_pattern`)."""

    @property
    def name(self) -> str:
        return f"{self.percent}%" + " (base)" * (self.percent == 100)


class PressureMeasurements(msgspec.Struct, frozen=True, kw_only=True):
    """Public JSON of the test's figures."""

    capacity: int
    """Number of concurrent requests that the server can hold: 100 %."""
    capacity_source: str
    """Source of the capacity, as text."""
    workload: str
    levels: list[PressureLevel]
    preemption_is_told: bool
    """Whether the server counts preemptions."""
    system_lost: str | None
    """When and why the system could no longer be reached."""
    recovered: bool
    """Whether single requests complete after the last level, nearly as fast as before the first level."""
    ttft_p50_before: float | None
    """Median TTFT of single requests before the first level."""
    ttft_p50_after: float | None
    """Median TTFT of single requests after the last level."""


class _Level(NamedTuple):
    """One measured level of load."""

    percent: int
    """Number of concurrent requests in % of the capacity."""
    slots: int
    """Number of concurrent requests."""
    measurement: Measurement
    steady_part: SteadyPart


@dataclass(slots=True)
class _PressureRun:
    """Measured levels of the test, with the single requests (probes) before and after them."""

    capacity: int
    """Number of concurrent requests that the server can hold: 100 %."""
    source: str
    """Source of the capacity, as text."""
    workload: str
    """Workload with which the capacity was measured."""
    probe_before: Measurement
    """Single requests before the first level."""
    levels: list[_Level] = field(default_factory=list)
    probe_after: Measurement | None = None
    ended_early: list[str] = field(default_factory=list)
    """Names of the loads whose requests ended before the planned duration."""
    failure: str | None = None
    """When and why the server could no longer be reached."""


def check(session: BenchSession, params: MemoryPressureParams) -> None:
    """Raise ConfigError if the levels do not rise from 100 %, or the capacity is unknown."""
    check_duration(session, params.duration, DURATION_MIN, "5.8.3")
    levels = params.levels
    if not levels or levels[0] != 100 or any(low >= high for low, high in pairwise(levels)):
        raise ConfigError(
            "levels",
            f"expected rising percentages of the capacity, the first of them 100, got {list(levels)}",
            "such as 100,110,125,150",
        )
    if _capacity(session, params) is None:
        raise ConfigError(
            "capacity",
            "is not given, and the results folder has no result of the capacity test",
            "run `llmtap bench capacity` with the same --results first, or set it, such as capacity = 64",
        )


def _capacity(session: BenchSession, params: MemoryPressureParams) -> tuple[int, str, str] | None:
    """Return the capacity, its source, and the workload with which it was measured; None if it is unknown.

    The parameter `capacity` sets it, or the capacity test has measured it in the same results folder.
    """
    if params.capacity is not None:
        return params.capacity, "given (capacity)", params.workload
    measurements = at(session.results.read_json("capacity/result.json"), "measurements") or {}
    if measurements.get("max_concurrency") is None:
        return None
    workload = measurements["workload"]
    return (
        measurements["max_concurrency"],
        f"the capacity test (5.5) in these results, with {workload}",
        workload,
    )


async def run(session: BenchSession, params: MemoryPressureParams) -> TestResult:
    """Send more requests at a time than the capacity; return how the server degrades (IETF 5.8.3, 5.8.4)."""
    pressure = await _apply_pressure(session, params)
    result = TestResult(
        configuration={
            "Workload": params.workload,
            "Load model": "closed loop",
            "Capacity": f"{pressure.capacity} at a time: {pressure.source}",
            "Oversubscription": ", ".join(f"{percent} %" for percent in params.levels),
            "Test duration": f"{to_seconds(params.duration):g} s per level, and until every answer has ended",
        }
    )
    result.main = f"levels/{params.levels[0]:03d}"
    measurements = result.measurements = _measurements(params, pressure)
    levels = measurements.levels
    result.tables = [
        table_of("Table 11: Memory Pressure Degradation", levels, TABLE_11),
        table_of("Preemption (5.8.4)", levels, PREEMPTION_COLUMNS),
        table_of("How it degrades", levels, DEGRADATION_COLUMNS),
    ]
    result.charts = _charts(levels)
    _add_notes(result, params, pressure, measurements)
    return result


async def _apply_pressure(session: BenchSession, params: MemoryPressureParams) -> _PressureRun:
    """Send the load of each level, with a probe before and after all of them."""
    capacity = _capacity(session, params)
    assert capacity is not None  # `check` has refused the value None.
    seconds = to_seconds(params.duration)
    session.report_remaining(WARNING)
    before = await _send_probe(session, params, "before")
    pressure = _PressureRun(*capacity, before)
    rate = (1.0, before.n / before.seconds if before.seconds else 0.0)
    for done, percent in enumerate(params.levels):
        session.report_remaining(remaining_text(len(params.levels) - done, seconds))
        slots = ceil(pressure.capacity * percent / 100)
        try:
            measured, steady, ended_early = await measure_closed(
                session,
                f"levels/{percent:03d}",
                params.workload,
                slots,
                params.duration,
                rate,
                output_tokens=params.output_tokens,
            )
        except ConfigError as exc:
            # End the test: the same request succeeded before, so the server has failed in the meantime.
            pressure.failure = f"before {percent} %: {exc.problem}"
            return pressure
        pressure.levels.append(_Level(percent, slots, measured, steady))
        if ended_early:
            pressure.ended_early.append(measured.name)
        rate = (slots, steady.completed_rps)
    try:
        pressure.probe_after = await _send_probe(session, params, "after")
    except ConfigError as exc:
        pressure.failure = f"after the last level: {exc.problem}"
    return pressure


async def _send_probe(session: BenchSession, params: MemoryPressureParams, name: str) -> Measurement:
    load = level_load(
        session, name, params.workload, slots=1, requests=PROBES, output_tokens=params.output_tokens
    )
    return await session.measure(name, load)


def _measurements(params: MemoryPressureParams, pressure: _PressureRun) -> PressureMeasurements:
    probe = pressure.probe_after
    before = percentile(pressure.probe_before.values("ttft_ns"), 0.5)
    after = None if probe is None else percentile(probe.values("ttft_ns"), 0.5)
    recovered = False
    if probe is not None and before is not None and after is not None:
        whole = len(probe.successful_rows()) == probe.n
        recovered = whole and after - before <= max(RECOVERY_SHARE_MAX * before, RECOVERY_MAX_S)
    return PressureMeasurements(
        capacity=pressure.capacity,
        capacity_source=pressure.source,
        workload=params.workload,
        levels=[_level_figures(level, pressure.levels[0]) for level in pressure.levels],
        preemption_is_told=any(
            server_total(level.measurement, "preemptions") is not None for level in pressure.levels
        ),
        system_lost=pressure.failure,
        recovered=recovered,
        ttft_p50_before=before,
        ttft_p50_after=after,
    )


def _level_figures(level: _Level, base: _Level) -> PressureLevel:
    measured, steady, n = level.measurement, level.steady_part, level.measurement.n
    completed = len(measured.successful_rows())
    interval = share_interval(completed, n)
    names = ("preemptions", "preempted", "recovered", "preempted_tokens")
    events, preempted, recovered, lost = (server_total(measured, name) for name in names)
    # If the server does not count preempted requests, its number of preemptions is an upper bound for them.
    most = events if preempted is None else preempted
    recovery = 1.0 if events and completed == n else None
    if preempted and recovered is not None:
        recovery = recovered / preempted
    return PressureLevel(
        percent=level.percent,
        concurrency=level.slots,
        step=measured.name,
        requests=n,
        completion=None if interval is None else interval_figure(interval),
        fail_rate=1 - completed / n if n else 1.0,
        memory_errors=memory_errors(measured),
        preemption_events=None if events is None else round(events),
        preempted_requests=preempted,
        preemption_rate_max=None if most is None else min(1.0, most / max(1, n)),
        preemption_recovery_rate=recovery,
        preemption_loss_tokens=lost / events if lost is not None and events else None,
        swapped_tokens=server_total(measured, "swapped_tokens"),
        swapped_mean=server_mean(measured, "swapped", steady),
        completed_rps=steady.completed_rps,
        output_tps=steady.output_tps,
        drain=max(0.0, measured.seconds - steady.to_s),
        pattern=_degradation_pattern(level, base, 1 - completed / max(1, n)),
        **latency_rows(measured),
    )


def _degradation_pattern(level: _Level, base: _Level, failed: float) -> str:
    """Return the name of a level's worst degradation compared with `base`. `failed`: share of failures."""
    if failed > FAILURE_SHARE_MAX:
        return "requests fail"
    if level is base:
        return "base"
    output = increase(base.steady_part.output_tps, level.steady_part.output_tps)
    ttft = increase(*(percentile(one.measurement.values("ttft_ns"), 0.99) for one in (base, level)))
    if output is not None and output < -THROUGHPUT_FALL_MAX:
        return "throughput falls"
    return "requests wait" if ttft is not None and ttft > TTFT_FACTOR_MAX - 1 else "as at the base"


def _preempted_text(level: PressureLevel) -> str:
    most = level.preemption_rate_max
    if most is None:
        return _NOT_MEASURABLE
    return share_text(most) + " at most" * bool(most and level.preempted_requests is None)


def _amount_text(value: float | None) -> str:
    if value is None:
        return _NOT_MEASURABLE
    return f"{value:,.0f}" if value >= 100 or value == int(value) else f"{value:.3g}"


def _recovery_text(level: PressureLevel) -> str:
    if level.preemption_events == 0:
        return "nothing to recover"
    rate = level.preemption_recovery_rate
    return _NOT_MEASURABLE if rate is None else share_text(rate)


TABLE_11: Final[Mapping[str, Cell]] = {
    "Oversub Level": attribute_cell("name"),
    "Complete": lambda level: share_text(1 - level.fail_rate),
    "Preempt": _preempted_text,
    "Fail Rate": lambda level: share_text(level.fail_rate),
    **latency_columns("ttft p99"),
}
PREEMPTION_COLUMNS: Final[Mapping[str, Cell]] = {
    "Oversub Level": attribute_cell("name"),
    "Events": lambda level: _amount_text(level.preemption_events),
    "Recovery": _recovery_text,
    "Tokens lost per event": lambda level: _amount_text(level.preemption_loss_tokens),
    "Tokens swapped out": lambda level: _amount_text(level.swapped_tokens),
    "Requests swapped out, mean": lambda level: _amount_text(level.swapped_mean),
    "Recovery time": lambda level: f"{level.drain:.1f} s",
}
DEGRADATION_COLUMNS: Final[Mapping[str, Cell]] = {
    "Oversub Level": attribute_cell("name"),
    "Concurrency": attribute_cell("concurrency"),
    "Completed (req/s)": lambda level: rate_text(level.completed_rps),
    "Output (tok/s)": lambda level: rate_text(level.output_tps),
    **latency_columns("tpot p99"),
    "OOM errors": attribute_cell("memory_errors"),
    "Pattern": attribute_cell("pattern"),
}


def _charts(levels: Sequence[PressureLevel]) -> list[ChartSpec]:
    xs = [level.percent for level in levels]
    x_title = "requests at a time (% of capacity)"
    shares = [
        ChartSeries("complete", [*xs], [1 - level.fail_rate for level in levels]),
        ChartSeries("preempted, at most", [*xs], [level.preemption_rate_max for level in levels]),
    ]
    return [
        ChartSpec("Completion and preemption", "line", x_title, "share of requests", shares),
        p99_chart("Latency P99", x_title, xs, levels),
    ]


def _add_notes(
    result: TestResult,
    params: MemoryPressureParams,
    pressure: _PressureRun,
    measurements: PressureMeasurements,
) -> None:
    notes = result.notes
    notes.append(WARNING)
    if measurements.preemption_is_told:
        notes.append(
            "preemptions are the server's own count; if it counts events alone, the share of requests is that"
            " at most, as one may be preempted more than once, and recovery is known where nobody failed;"
            " recovery time is from the end of a level until its last answer"
        )
    else:
        notes.append(
            "preemption is not measurable: the server counts none on its metrics, or they were not to be had"
            " (target.metrics)"
        )
    if pressure.failure is not None:
        notes.append(f"the system could not be reached {pressure.failure}")
    else:
        outcome, extra = (
            ("recovered", "") if measurements.recovered else ("did not recover", ", or answers failed")
        )
        notes.append(
            f"it {outcome}: TTFT P50 of single requests is {ms(measurements.ttft_p50_after)} after and"
            f" {ms(measurements.ttft_p50_before)} before{extra}"
        )
    notes += legend(measurements.levels, "ttft", "tpot", share="p99")
    if pressure.workload != params.workload:
        result.deviations.append(
            f"5.8.3, 1: capacity was determined with {pressure.workload}, and memory is pressed with"
            f" {params.workload}: the percentages are not of what memory has room for"
        )
    if pressure.ended_early:
        result.deviations.append(
            f"5.8.3, 3b: requests were over before {to_seconds(params.duration):g} s were:"
            f" {', '.join(pressure.ended_early)}; who is turned away at once comes again at once"
        )


def _expected_loads(session: BenchSession, params: MemoryPressureParams) -> ExpectedLoads:
    capacity, seconds = _capacity(session, params), to_seconds(params.duration)
    slots = session.pace.saturation_slots(session.kind) if capacity is None else capacity[0]
    # Include the single requests before and after the levels, which show the latency without pressure.
    probe = ExpectedLoad(PROBES, slots=1)
    levels = [
        ExpectedLoad(seconds=seconds, slots=ceil((slots or SLOTS_DEFAULT) * percent / 100))
        for percent in params.levels
    ]
    return ExpectedLoads([probe, *levels, probe])


TEST: Final = BenchTest(
    name="memory-pressure",
    params=MemoryPressureParams,
    run=run,
    figures=("tokens", "ttft", "tpot", "e2e"),
    overloads=True,
    expected=_expected_loads,
    quick={"workload": "synthetic-uniform", "duration": Duration(5 * NS_PER_S), "output_tokens": 64},
    forfeits=("5.8.2-1", "5.8.3-p2"),
    check=check,
)

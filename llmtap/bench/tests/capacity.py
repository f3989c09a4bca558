"""Concurrent Request Capacity (IETF draft, 5.5): the highest number of concurrent requests within the SLO.

`run` sends closed loops without a ramp-up, doubles and then bisects the concurrency, and returns Table 7, the
maximum with its throughput, and charts. The SLO has three parts: P99 of TTFT, share of completions, and no
out-of-memory errors. A level lasts for 100 completions per slot or 60 s, whichever is longer. The number of
requests is estimated from the previous level; a level that ended too soon is sent again with more requests.
"""

from collections.abc import Mapping, Sequence
from math import ceil
from typing import Annotated, Final

import msgspec

from llmtap.bench.run import figures
from llmtap.bench.run.levels import (
    ROWS_MAX,
    LevelAttempt,
    LevelFigures,
    RateSearch,
    check_duration,
    incomplete_by_outcome,
    latency_rows,
    level_figures,
    level_load,
    memory_errors,
    rate_text,
    remaining_text,
    share_text,
    throughput_chart,
    verdict_text,
)
from llmtap.bench.run.measurement import Measurement, steady_part_of
from llmtap.bench.run.pace import ExpectedLoad, ExpectedLoads
from llmtap.bench.run.session import BenchSession
from llmtap.bench.run.test import BenchTest, ChartMark, ChartSeries, ChartSpec, TestResult
from llmtap.bench.tests.throughput import DURATION_MIN
from llmtap.errors import ConfigError
from llmtap.metrics.intervals import share_interval
from llmtap.metrics.statistics import percentile
from llmtap.options.fields import opt
from llmtap.units import NS_PER_S, Duration, to_seconds

COMPLETION_MIN: Final = 0.99
PER_SLOT_MIN: Final = 100
RATE_SPARE: Final = 1.1


class CapacityParams(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Setup of the test (IETF 5.5.2)."""

    ttft_p99: Annotated[Duration | None, opt("success criterion (required): largest P99 of TTFT")] = None
    workload: Annotated[
        str,
        opt("workload of 4.3.2 (synthetic-uniform is recommended), or FILE.toml of your own"),
    ] = "synthetic-uniform"
    output_tokens: Annotated[int, opt("tokens of each response", ge=1)] = 256
    initial: Annotated[int, opt("first concurrency", ge=1)] = 8
    maximum: Annotated[int, opt("highest concurrency to try", ge=1)] = 512
    resolution: Annotated[int, opt("resolution of the result", ge=1)] = 1
    duration: Annotated[Duration, opt("duration of a level, at least 60s (5.5.3)")] = DURATION_MIN
    per_slot: Annotated[int, opt("completions per slot, at least 100 (5.5.3)", ge=1)] = PER_SLOT_MIN
    completion: Annotated[float, opt("success criterion: fraction completed", gt=0, le=1)] = COMPLETION_MIN


class CapacityLevel(LevelFigures, frozen=True, kw_only=True):
    """Figures of a level; latencies and counts are of all its requests, including the ramp-up."""

    concurrency: int
    """Number of concurrent requests."""
    completion: figures.IntervalFigure | None
    """Share of the requests that completed."""
    failed: int
    """Number of requests that did not complete."""
    endings: dict[str, int]
    """Number of incomplete responses by outcome."""
    memory_errors: int
    """Number of answers that report a lack of memory."""


class CapacityCriteria(msgspec.Struct, frozen=True):
    """Largest P99 of TTFT, smallest share of completed requests, largest number of out-of-memory errors."""

    ttft_p99: float
    completion: float
    """Smallest allowed share of completed requests."""
    memory_errors: int
    """Largest allowed number of answers that report a lack of memory."""


class CapacityMeasurements(msgspec.Struct, frozen=True, kw_only=True):
    """Public JSON of the test's figures."""

    max_concurrency: int | None
    """Highest concurrency that meets the criteria; None if not even one request at a time meets them."""
    limit: int | None
    """Lowest concurrency that was found not to meet the criteria; None if all met them."""
    workload: str
    output_tokens: int | None
    """Length of all responses; None: the lengths of the workload."""
    criteria: CapacityCriteria
    output_tps: float | None
    """Output tokens per second at the maximum."""
    request_rps: float | None
    """Completed requests per second at the maximum."""
    tokens_in_flight: float | None
    """Mean number of tokens in the server's memory at the maximum."""
    levels: list[CapacityLevel]


def check(session: BenchSession, params: CapacityParams) -> None:
    """Raise ConfigError if the threshold of TTFT is missing, or the levels are too short for IETF 5.5.3."""
    if params.ttft_p99 is None:
        raise ConfigError(
            "ttft_p99",
            "is not given, but the IETF draft (section 5.5.2) defines the capacity by a limit of TTFT",
            "such as ttft_p99 = 2s",
        )
    if params.maximum < params.initial:
        raise ConfigError(
            "maximum",
            f"is {params.maximum}, below initial ({params.initial})",
            "increase maximum, or reduce initial",
        )
    check_duration(session, params.duration, DURATION_MIN, "5.5.3")
    if params.per_slot < PER_SLOT_MIN and not session.quick:
        raise ConfigError(
            "per_slot",
            f"is {params.per_slot}; the IETF draft (section 5.5.3) requires at least {PER_SLOT_MIN}",
            "increase it, or use --quick: the report then lists the deviation",
        )


async def run(session: BenchSession, params: CapacityParams) -> TestResult:
    """Search for the highest concurrency that meets the success criteria (IETF 5.5.3), and return it."""
    search = _new_search(params)
    attempts: list[LevelAttempt] = []
    while (slots := search.next_level) is not None:
        previous = round(attempts[-1].level) if attempts else None
        session.expected.replace_search("search", _expected_levels(session, params, search, previous))
        session.report_remaining(remaining_text(search.attempts_max, to_seconds(params.duration)))
        attempts.append(await _attempt_level(session, params, attempts, slots))
        search.record(slots, attempts[-1].holds)
    return _result(params, search, attempts)


def _new_search(params: CapacityParams) -> RateSearch:
    return RateSearch(1, params.maximum, params.initial, params.resolution)


async def _attempt_level(
    session: BenchSession, params: CapacityParams, attempts: Sequence[LevelAttempt], slots: int
) -> LevelAttempt:
    """Send a level. If it meets the criteria but is too short, send it once more, with more requests."""
    seconds = to_seconds(params.duration)
    rate = 0.0
    if attempts:
        rate = attempts[-1].steady_part.completed_rps * max(1.0, slots / attempts[-1].level)
    for name in (f"search/{slots:04d}", f"search/{slots:04d}-longer"):
        if name.endswith("-longer"):
            session.expected.loads.insert(0, ExpectedLoad(seconds=seconds, slots=slots, search="search"))
        # Add one request per slot, which keeps all slots busy until the required number has completed.
        rows = min(ROWS_MAX, max(params.per_slot * slots, ceil(rate * RATE_SPARE * seconds)) + slots)
        load = level_load(
            session, name, params.workload, slots=slots, requests=rows, output_tokens=params.output_tokens
        )
        measured = await session.measure(name, load, slo=f"ttft:{params.ttft_p99:d}ns")
        steady = steady_part_of(measured)
        violations = _violations(params, measured)
        attempt = LevelAttempt(
            slots, measured, steady, not violations, verdict_text(steady, violations, "meets all criteria")
        )
        if violations or not _is_too_short(params, attempt):
            break
        rate = measured.n / max(steady.to_s, 1e-3)
    return attempt


def _is_too_short(params: CapacityParams, attempt: LevelAttempt) -> bool:
    """Return whether a level meets the criteria but has too few requests, or time, for IETF 5.5.3."""
    too_few = attempt.measurement.n < params.per_slot * attempt.level
    return attempt.holds and (too_few or attempt.steady_part.to_s < to_seconds(params.duration))


def _violations(params: CapacityParams, measured: Measurement) -> list[str]:
    """Return the criteria of the capacity that a load has not met, as texts."""
    texts = []
    completed, bound = _completed_share(measured), _bound_s(params)
    if completed < params.completion:
        texts.append(f"{share_text(completed)} completed, {share_text(params.completion)} needed")
    p99 = percentile(measured.values("ttft_ns"), 0.99)
    if p99 is None or p99 > bound:
        texts.append(f"TTFT P99 {figures.ms(p99)} > {figures.ms(bound)}")
    if errors := memory_errors(measured):
        texts.append(f"{errors} out-of-memory errors")
    return texts


def _bound_s(params: CapacityParams) -> float:
    """Return the bound of the 99th percentile of TTFT."""
    assert params.ttft_p99 is not None  # `check` has refused the value None.
    return to_seconds(params.ttft_p99)


def _completed_share(measured: Measurement) -> float:
    return len(measured.successful_rows()) / measured.n if measured.n else 0.0


def _result(params: CapacityParams, search: RateSearch, attempts: Sequence[LevelAttempt]) -> TestResult:
    bound, best = figures.ms(_bound_s(params)), search.best
    result = TestResult(
        configuration={
            "Workload": f"{params.workload}, answers of {params.output_tokens} tokens",
            "Load model": "closed loop",
            "Concurrency": f"from {params.initial} to at most {params.maximum}, within {params.resolution}",
            "Test duration": f"per level {to_seconds(params.duration):g} s or {params.per_slot} completions"
            " per slot, whichever is longer",
            "Success criteria": f"{share_text(params.completion)} complete, TTFT P99 <= {bound}, no"
            " out-of-memory errors",
        }
    )
    result.main = next(
        (t for t in reversed(attempts) if t.holds and t.level == best), attempts[-1]
    ).measurement.name
    measurements = result.measurements = _measurements(params, search, attempts)
    result.tables = [
        figures.table_of("Table 7: Capacity Search Results", measurements.levels, TABLE_7),
        figures.metric_table(
            "Capacity (5.5.4)",
            {
                "Maximum concurrent requests": "-" if best is None else f"{best}",
                "Throughput at maximum": rate_text(measurements.output_tps, "tok/s"),
                "Tokens in flight at maximum (approximately)": rate_text(measurements.tokens_in_flight),
            },
        ),
        figures.table_of("Each level, and what decided it", measurements.levels, WHY_COLUMNS),
    ]
    result.charts = _charts(params, attempts, best)
    if best is None:
        result.missed_objectives.append("not even one request at a time meets the success criteria")
    _add_notes(result, params, search, attempts, measurements.levels)
    return result


TABLE_7: Final[Mapping[str, figures.Cell]] = {
    "Concurrency": figures.attribute_cell("concurrency"),
    "Completion": lambda level: share_text(1 - level.failed / level.requests if level.requests else 0.0),
    **figures.latency_columns("ttft p99", "tpot p99"),
    "Errors": figures.attribute_cell("failed"),
    "Status": lambda level: "Pass" if level.holds else "Fail",
}
WHY_COLUMNS: Final[Mapping[str, figures.Cell]] = {
    "Concurrency": figures.attribute_cell("concurrency"),
    "Requests": figures.attribute_cell("requests"),
    "Time": lambda level: f"{level.window.end:.1f} s",
    "Completed (req/s)": lambda level: rate_text(level.completed_rps),
    "Output (tok/s)": lambda level: rate_text(level.output_tps),
    "Why": figures.attribute_cell("why"),
}


def _measurements(
    params: CapacityParams, search: RateSearch, attempts: Sequence[LevelAttempt]
) -> CapacityMeasurements:
    steady = next((t.steady_part for t in reversed(attempts) if t.holds and t.level == search.best), None)
    return CapacityMeasurements(
        max_concurrency=search.best,
        limit=search.limit,
        workload=params.workload,
        output_tokens=params.output_tokens,
        criteria=CapacityCriteria(_bound_s(params), params.completion, memory_errors=0),
        output_tps=None if steady is None else steady.output_tps,
        request_rps=None if steady is None else steady.completed_rps,
        tokens_in_flight=None if steady is None else steady.held_tokens,
        levels=[_capacity_level(t) for t in sorted(attempts, key=lambda t: t.level)],
    )


def _capacity_level(attempt: LevelAttempt) -> CapacityLevel:
    measured = attempt.measurement
    completed = len(measured.successful_rows())
    interval = share_interval(completed, measured.n)
    return CapacityLevel(
        **msgspec.structs.asdict(level_figures(attempt)) | latency_rows(measured),
        concurrency=round(attempt.level),
        completion=None if interval is None else figures.interval_figure(interval),
        failed=measured.n - completed,
        endings=incomplete_by_outcome(measured),
        memory_errors=memory_errors(measured),
    )


def _charts(params: CapacityParams, attempts: Sequence[LevelAttempt], best: int | None) -> list[ChartSpec]:
    by_concurrency = {t.level: t for t in sorted(attempts, key=lambda t: t.level)}
    xs, levels = [*by_concurrency], [*by_concurrency.values()]
    marks = [] if best is None else [ChartMark(best, "capacity")]
    x_title = "requests at a time"
    bound = ChartSeries("threshold", [*xs], [_bound_s(params) * 1e3] * len(xs))
    ttft = figures.line_series(
        "TTFT P99", xs, [latency_rows(t.measurement)["ttft"].percentile("p99") for t in levels]
    )
    return [
        ChartSpec(
            "TTFT P99 by concurrency", "line", x_title, "ms", [ttft, bound], marks, log_x=True, log_y=True
        ),
        throughput_chart("concurrency", x_title, xs, levels, marks, log_x=True),
    ]


def _add_notes(
    result: TestResult,
    params: CapacityParams,
    search: RateSearch,
    attempts: Sequence[LevelAttempt],
    levels: Sequence[CapacityLevel],
) -> None:
    notes = result.notes
    if search.best is None:
        notes.append(f"not even one request at a time meets the criteria: {attempts[-1].reason}")
    elif search.limit is None:
        notes.append(f"the highest concurrency of the search meets the criteria: {search.best} is no limit")
    else:
        notes.append(f"capacity lies between {search.best} and {search.limit}")
    notes.append(
        "tokens in flight are the mean over time of prompts that were sent and of answers as far as they had"
        " come, from their lengths: what waits in the server's queue is among them"
    )
    notes += figures.legend(levels, "ttft", "tpot", share="p99")
    if short := [t.measurement.name for t in attempts if _is_too_short(params, t)]:
        result.deviations.append(
            f"5.5.3: less than {to_seconds(params.duration):g} s or {params.per_slot} completions per slot:"
            f" {', '.join(short)}"
        )


def _expected_loads(session: BenchSession, params: CapacityParams) -> ExpectedLoads:
    return ExpectedLoads(_expected_levels(session, params, _new_search(params), None))


def _expected_levels(
    session: BenchSession, params: CapacityParams, search: RateSearch, previous: int | None
) -> list[ExpectedLoad]:
    """Return the levels that the search is expected to send.

    `previous`: concurrency of the level that was sent before; None before the first level.
    """
    pace, kind, seconds = session.pace, session.kind, to_seconds(params.duration)
    loads = []
    for level in search.expected_levels(pace.slots_within(kind, _bound_s(params))):
        # Estimate the number of requests as in `_attempt_level`: from the rate of the previous level.
        rate = pace.rate_rps(kind, previous or level) or 0.0
        rows = rate * max(1.0, level / (previous or level)) * RATE_SPARE * seconds
        loads.append(
            ExpectedLoad(max(params.per_slot * level, rows) + level, 0.0 if rate else seconds, slots=level)
        )
        previous = level
    return [load._replace(search="search") for load in loads]


TEST: Final = BenchTest(
    name="capacity",
    params=CapacityParams,
    run=run,
    figures=("tokens", "ttft", "tpot"),
    overloads=True,
    expected=_expected_loads,
    quick={
        "ttft_p99": Duration(2 * NS_PER_S),
        "output_tokens": 64,
        "maximum": 128,
        "resolution": 4,
        "duration": Duration(5 * NS_PER_S),
        "per_slot": 2,
    },
    forfeits=("5.5.3-p1",),
    check=check,
)

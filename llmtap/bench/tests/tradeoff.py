"""Throughput-Latency Tradeoff (IETF draft, 5.3): latency and throughput at 10 to 120 % of capacity.

`run` sends an open loop at each percentage of the capacity, which the user sets, the throughput test has
measured, or closed loops find. It returns Table 5, points of the curve (knee, saturation, operating point)
and charts. The draft defines saturation in two ways, and both are reported: the first level that achieves
less than the level before it (5.3.4), and the level of the highest throughput (example in 5.3.5).
"""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Annotated, Final

import msgspec

from llmtap.bench.run import figures, test
from llmtap.bench.run.levels import (
    COLUMNS,
    Bounds,
    BoundsReport,
    Capacity,
    LevelAttempt,
    LevelFigures,
    check_duration,
    expected_search,
    find_capacity,
    known_capacity,
    level_figures,
    level_load,
    p99_chart,
    rate_text,
    remaining_text,
    saturation_level,
    share_text,
    verdict_text,
)
from llmtap.bench.run.measurement import steady_part_of
from llmtap.bench.run.pace import ExpectedLoad, ExpectedLoads
from llmtap.bench.run.session import BenchSession, Load, OpenLoop
from llmtap.bench.tests.throughput import DURATION_MIN
from llmtap.errors import ConfigError
from llmtap.metrics.saturation import SaturationLevel, knee, operating_point, peak, saturation_point
from llmtap.options.fields import opt
from llmtap.units import NS_PER_S, Duration, to_seconds

LEVELS_MIN: Final = 10


class TradeoffParams(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Setup of the test (IETF 5.3.2)."""

    workload: test.Workload = "synthetic-uniform"
    duration: Annotated[Duration, opt("duration of a level, at least 60s (5.3.2)")] = DURATION_MIN
    levels: Annotated[
        tuple[float, ...],
        opt("loads in % of capacity; at least 10, from 10 % to saturation (5.3.2)"),
    ] = (10, 20, 30, 40, 50, 60, 70, 80, 90, 100, 110, 120)
    max_rate: Annotated[
        test.Rate | None,
        opt("capacity, requests/s; default: as measured"),
    ] = None
    slots_max: test.SlotsMax = 128
    arrivals: test.ArrivalProcess = "poisson"
    ttft_p99: test.TtftBound = None
    tpot_p99: test.TpotBound = None

    @property
    def bounds(self) -> Bounds:
        return Bounds(self.ttft_p99, self.tpot_p99)


class TradeoffLevel(LevelFigures, frozen=True, kw_only=True):
    """Figures of one level of load."""

    percent: float
    """Share of the capacity in %."""
    offered_rps: float
    """Planned rate of the requests."""


class TradeoffMeasurements(msgspec.Struct, frozen=True, kw_only=True):
    """Points of the curve as rates, by the rules in `_point_rows`; None if no level meets a point's rule."""

    capacity_rps: float
    """Estimated capacity, from which the loads are computed."""
    capacity_source: str
    """Source of the capacity, as text."""
    objectives: BoundsReport | None
    knee_rps: float | None
    """First rate with a TTFT P99 of more than twice the smallest one."""
    saturation_rps: float | None
    """First rate with less throughput than the level before."""
    peak_rps: float | None
    """Rate with the highest throughput."""
    queue_grows_from_rps: float | None
    """Rate of the lowest level at which the queue grows."""
    operating_point_rps: float | None
    """Rate with the highest throughput of the sustained levels within the bounds."""
    levels: list[TradeoffLevel]


def check(session: BenchSession, params: TradeoffParams) -> None:
    """Raise ConfigError if the levels or their duration do not meet IETF 5.3.2."""
    check_duration(session, params.duration, DURATION_MIN, "5.3.2")
    levels = params.levels
    if len(levels) < LEVELS_MIN and not session.quick:
        raise ConfigError(
            "levels",
            f"has {len(levels)} values; the IETF draft (section 5.3.2) requires at least {LEVELS_MIN}",
            "add levels, or use --quick: the report then lists the deviation",
        )
    if len(levels) < 2 or levels[0] <= 0 or any(low >= high for low, high in pairwise(levels)):
        raise ConfigError(
            "levels",
            f"expected at least 2 percentages above 0 in rising order, got {list(levels)}",
            "such as 10,20,30",
        )
    if not session.quick and (levels[0] > 10 or levels[-1] < 100):
        raise ConfigError(
            "levels",
            f"got {list(levels)}; the IETF draft (section 5.3.2) requires a first level of at most 10 % of"
            " the capacity, and a last level of at least 100 %",
            "such as 10,20,30,40,50,60,70,80,90,100, or use --quick",
        )


async def run(session: BenchSession, params: TradeoffParams) -> test.TestResult:
    """Send a load at each percentage of the capacity, and return the curve (IETF 5.3.3, 5.3.4)."""
    capacity = await _capacity(session, params)
    attempts = []
    for done, percent in enumerate(params.levels):
        session.report_remaining(remaining_text(len(params.levels) - done, to_seconds(params.duration)))
        name = f"levels/{percent:05.1f}"
        rate_rps = capacity.rps * percent / 100
        load = level_load(
            session,
            name,
            params.workload,
            open_loop=OpenLoop(rate_rps, params.arrivals),
            duration_s=to_seconds(params.duration),
        )
        measured = await session.measure(name, load, slo=params.bounds.slo)
        steady = steady_part_of(measured, to_seconds(params.duration))
        violations = params.bounds.violations(steady)
        reason = verdict_text(steady, violations)
        attempts.append(LevelAttempt(rate_rps, measured, steady, not violations, reason))
    measurements = _measurements(params, capacity, attempts)
    sustained = [t for t in attempts if t.holds and t.steady_part.is_sustained] or attempts[:1]
    result = test.TestResult(
        measurements, configuration=_configuration(params, capacity), main=sustained[-1].measurement.name
    )
    result.tables = [
        figures.table_of("Table 5: Throughput-Latency Table", measurements.levels, TABLE_5),
        figures.table_of("What else 5.3.4 has recorded at each level", measurements.levels, MORE_COLUMNS),
        test.ReportTable(
            "Points of the curve (5.3.4)",
            ["Point", "Load", "By which rule"],
            _point_rows(params, measurements),
        ),
    ]
    result.charts = _charts(measurements)
    if params.bounds and measurements.operating_point_rps is None:
        result.missed_objectives.append(f"no level meets the objectives ({params.bounds.text})")
    _add_notes(result, params, attempts, measurements)
    return result


TABLE_5: Final[Mapping[str, figures.Cell]] = {
    "Offered (r/s)": lambda level: rate_text(level.offered_rps),
    "Achieved (tok/s)": lambda level: rate_text(level.output_tps),
    **figures.latency_columns("ttft p50", "ttft p99", "tpot p50", "tpot p99"),
    "Success": lambda level: share_text(level.success),
    "Queue": figures.attribute_cell("queue"),
    "Sustained": lambda level: "yes" if level.sustained else "no",
}
MORE_COLUMNS: Final[Mapping[str, figures.Cell]] = {
    "Of capacity": lambda level: f"{level.percent:g}%",
    "Offered (r/s)": TABLE_5["Offered (r/s)"],
    "Completed (r/s)": lambda level: rate_text(level.completed_rps),
    **figures.latency_columns("ttft p95", "tpot p95", "e2e p50", "e2e p95", "e2e p99"),
}


async def _capacity(session: BenchSession, params: TradeoffParams) -> Capacity:
    """Return the capacity (IETF 5.3.3, 1) that the user set, or that a test or closed loops measured."""
    known = known_capacity(session, params.max_rate, params.workload)
    if known is not None:
        return known

    def load_of(slots: int, requests: int) -> Load:
        return level_load(session, f"capacity/{slots}", params.workload, slots=slots, requests=requests)

    return await find_capacity(session, load_of, params.slots_max)


def _configuration(params: TradeoffParams, capacity: Capacity) -> dict[str, str]:
    return {
        "Workload": params.workload,
        "Load model": f"open loop, arrivals {params.arrivals}",
        "Estimated capacity": f"{capacity.rps:.4g} requests/s: {capacity.how}",
        "Load levels": ", ".join(f"{percent:g} %" for percent in params.levels) + " of it",
        "Test duration": f"{to_seconds(params.duration):g} s per level, the first 10 % dropped",
        "Objectives": params.bounds.text or "none",
    }


def _measurements(
    params: TradeoffParams, capacity: Capacity, attempts: Sequence[LevelAttempt]
) -> TradeoffMeasurements:
    levels = [saturation_level(t) for t in attempts]
    by_rate = {t.level: t for t in attempts}

    def holds(level: SaturationLevel) -> bool:
        attempt = by_rate[level.offered_rps]
        return attempt.holds and attempt.steady_part.is_sustained

    return TradeoffMeasurements(
        capacity_rps=capacity.rps,
        capacity_source=capacity.how,
        objectives=params.bounds.report(),
        knee_rps=knee(levels),
        saturation_rps=saturation_point(levels),
        peak_rps=peak(levels),
        queue_grows_from_rps=next((t.level for t in attempts if t.steady_part.queue_grows), None),
        operating_point_rps=operating_point(levels, holds) if params.bounds else None,
        levels=[
            TradeoffLevel(
                **msgspec.structs.asdict(level_figures(t)) | {"holds": t.holds if params.bounds else None},
                percent=percent,
                offered_rps=t.level,
            )
            for percent, t in zip(params.levels, attempts, strict=True)
        ],
    )


def _point_rows(params: TradeoffParams, measurements: TradeoffMeasurements) -> list[list[str]]:
    rules = {
        "knee_rps": ("Knee point", "TTFT P99 exceeds 2 x the smallest of all levels"),
        "saturation_rps": ("Saturation point (rule)", "throughput falls below that of the level before"),
        "peak_rps": ("Saturation point (peak)", "throughput is highest, as the draft's Table 5 prints it"),
        "queue_grows_from_rps": ("Queue grows", "what is in flight grows through the whole level"),
    }
    if params.bounds:
        rule = f"highest throughput of the sustained levels with {params.bounds.text}"
        rules["operating_point_rps"] = ("Optimal operating point", rule)
    return [
        [
            point,
            "none of these levels" if rate is None else rate_text(rate, "req/s"),
            rule,
        ]
        for name, (point, rule) in rules.items()
        for rate in [getattr(measurements, name)]
    ]


def _charts(measurements: TradeoffMeasurements) -> list[test.ChartSpec]:
    levels = measurements.levels
    rates = [level.offered_rps for level in levels]
    output: list[float | str] = [level.output_tps or 0.0 for level in levels]
    named = {
        "knee_rps": "knee",
        "saturation_rps": "saturation (throughput falls)",
        "peak_rps": "highest throughput",
        "operating_point_rps": "operating point",
    }
    marks = [
        test.ChartMark(rate, label)
        for name, label in named.items()
        if (rate := getattr(measurements, name)) is not None
    ]
    offered, achieved = "offered load (requests/s)", "achieved output tokens/s"
    charts = [
        test.ChartSpec(
            f"{title} by throughput",
            "line",
            achieved,
            f"{title} (ms)",
            [
                figures.line_series(
                    p.upper(), output, [getattr(level, name).percentile(p) for level in levels]
                )
                for p in figures.KEY_SHARES
            ],
            log_y=True,
        )
        for name, title in COLUMNS.items()
    ]
    line = test.ChartSeries("achieved", [*rates], [level.output_tps for level in levels])
    return [
        *charts,
        p99_chart("Latency P99 by offered load", offered, rates, levels, marks),
        test.ChartSpec("Achieved throughput by offered load", "line", offered, achieved, [line], marks),
    ]


def _add_notes(
    result: test.TestResult,
    params: TradeoffParams,
    attempts: Sequence[LevelAttempt],
    measurements: TradeoffMeasurements,
) -> None:
    notes = result.notes
    notes.append(
        "the knee is of TTFT P99, as in the draft's example; throughput is of tokens made in the last 90 % of"
        " a level's time"
    )
    if measurements.saturation_rps is None:
        notes.append(
            "throughput falls at none of these levels, so the rule of 5.3.4 finds no saturation; the draft's"
            " own example calls the level of the highest throughput by that name"
        )
    if not params.bounds:
        notes.append("no SLO is given (ttft_p99, tpot_p99): no optimal operating point")
    if not any(t.steady_part.queue_grows or t.steady_part.falls_short for t in attempts):
        notes.append("no level saturates: capacity was estimated too low, and the curve ends before it")
    if attempts[0].steady_part.queue_grows or attempts[0].steady_part.falls_short:
        notes.append("even the lowest level saturates: capacity was estimated too high")
    notes += figures.legend(measurements.levels, "ttft")


def _expected_loads(session: BenchSession, params: TradeoffParams) -> ExpectedLoads:
    known = known_capacity(session, params.max_rate, params.workload)
    seconds = to_seconds(params.duration)
    shares = [percent / 100 for percent in params.levels]
    if known is None:
        levels = [ExpectedLoad(seconds=seconds, share=share) for share in shares]
        return ExpectedLoads([*expected_search(session, params.slots_max), *levels])
    return ExpectedLoads([ExpectedLoad(seconds=seconds, rate_rps=share * known.rps) for share in shares])


TEST: Final = test.BenchTest(
    name="tradeoff",
    params=TradeoffParams,
    run=run,
    figures=("load", "tokens", "ttft", "tpot", "e2e"),
    overloads=True,
    expected=_expected_loads,
    quick={
        "duration": Duration(5 * NS_PER_S),
        "levels": (10, 40, 70, 90, 100, 120),
    },
    forfeits=("5.3.2-p1", "5.3.2-p2", "5.3.3-p1"),
    check=check,
)

"""Concurrent Request Capacity (IETF draft, 5.5): the highest number of concurrent requests within the SLO.

`run` sends closed loops without a ramp-up, doubles and then bisects the concurrency, and returns Table 7, the
maximum with its throughput, and charts. The SLO is a P99 of TTFT, a share of completions, and no
out-of-memory errors. A level lasts for 100 completions per slot or 60 s, whichever is longer. The number of
requests follows from the previous level; a level that ended too soon is sent again with more.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import ceil
from typing import Annotated, Any, Final

import msgspec
from msgspec import Meta

from llmtap.bench.run import figures
from llmtap.bench.run.levels import (
    RateSearch,
    Tried,
    check_duration,
    endings,
    lasts,
    latency_rows,
    latency_table,
    level_json,
    level_load,
    memory_errors,
    number,
    rows_for,
    server_total,
    share,
    throughput_chart,
)
from llmtap.bench.run.measurement import Measurement, steady_of
from llmtap.bench.run.session import BenchSession
from llmtap.bench.run.test import BenchTest, ChartSeries, ChartSpec, Mark, TestResult
from llmtap.bench.tests.throughput import DURATION_MIN
from llmtap.errors import ConfigError
from llmtap.metrics.intervals import share_interval
from llmtap.metrics.saturation import capacity
from llmtap.metrics.statistics import percentile
from llmtap.units import NS_PER_S, Duration, to_seconds

COMPLETION_MIN: Final = 0.99
PER_SLOT_MIN: Final = 100
RATE_SPARE: Final = 1.1


class CapacityParams(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    ttft_p99: Annotated[
        Duration | None, Meta(description="success criterion (required): largest P99 of TTFT")
    ] = None
    workload: Annotated[
        str,
        Meta(description="workload of 4.3.2 (synthetic-uniform is recommended), or FILE.toml of your own"),
    ] = "synthetic-uniform"
    output_tokens: Annotated[int, Meta(ge=1, description="tokens of each response")] = 256
    initial: Annotated[int, Meta(ge=1, description="first concurrency")] = 8
    maximum: Annotated[int, Meta(ge=1, description="highest concurrency to try")] = 512
    resolution: Annotated[int, Meta(ge=1, description="resolution of the result")] = 1
    duration: Annotated[Duration, Meta(description="duration of a level, at least 60s (5.5.3)")] = (
        DURATION_MIN
    )
    per_slot: Annotated[int, Meta(ge=1, description="completions per slot, at least 100 (5.5.3)")] = (
        PER_SLOT_MIN
    )
    completion: Annotated[float, Meta(gt=0, le=1, description="success criterion: fraction completed")] = (
        COMPLETION_MIN
    )


@dataclass(slots=True)
class _Levels:
    tried: list[Tried] = field(default_factory=list)
    short: list[str] = field(default_factory=list)


def check(session: BenchSession, params: CapacityParams) -> None:
    if params.ttft_p99 is None:
        raise ConfigError(
            "ttft_p99",
            "is not given: capacity is what meets a threshold of TTFT (5.5.2)",
            "such as ttft_p99 = 2s",
        )
    if params.ttft_p99 <= 0 or params.duration <= 0:
        raise ConfigError("ttft_p99" if params.ttft_p99 <= 0 else "duration", "is nothing")
    if params.maximum < params.initial:
        raise ConfigError("maximum", f"is {params.maximum}, below initial ({params.initial})")
    check_duration(session, params.duration, DURATION_MIN, "5.5.3", None)
    if params.per_slot < PER_SLOT_MIN and not session.quick:
        raise ConfigError("per_slot", f"is {params.per_slot}, and 5.5.3 asks for {PER_SLOT_MIN} at least")


async def run(session: BenchSession, params: CapacityParams) -> TestResult:
    search = RateSearch(1, params.maximum, params.initial, params.resolution)
    levels = _Levels()
    while (slots := search.next) is not None:
        session.watcher.left(lasts(search.left, _level_s(params, levels, slots)))
        one = await _try(session, params, levels, slots)
        levels.tried.append(one)
        search.tell(slots, one.holds)
    return _found(params, search, levels)


def _level_s(params: CapacityParams, levels: _Levels, slots: int) -> float:
    seconds = to_seconds(params.duration)
    if not levels.tried or not levels.tried[-1].steady.completed_rps:
        return seconds
    last = levels.tried[-1]
    return max(seconds, params.per_slot * slots / last.steady.completed_rps * min(1.0, last.level / slots))


async def _try(session: BenchSession, params: CapacityParams, levels: _Levels, slots: int) -> Tried:
    """Send a level, and again with more requests if it ended too soon."""
    assert params.ttft_p99 is not None
    seconds = to_seconds(params.duration)
    base = f"search/{slots:04d}"
    least = most = 0.0
    if levels.tried:
        last = levels.tried[-1]
        least, most = _rates(last.level, last.steady.completed_rps, slots)
    for name in (base, f"{base}-longer"):
        duration = params.duration if params.per_slot * slots <= least * seconds else None
        # One more per slot, so that all slots are busy until the last is sent.
        rows = max(params.per_slot * slots, ceil(most * seconds)) + slots
        if duration is not None:
            rows = rows_for(slots, seconds, (slots, most))
        load = level_load(
            session, name, params.workload, slots=slots, requests=rows,
            duration_s=None if duration is None else seconds, output_tokens=params.output_tokens,
        )  # fmt: skip
        measured = await session.measure(name, load, slo=f"ttft:{params.ttft_p99:d}ns")
        steady = steady_of(measured, None if duration is None else seconds)
        broken = _broken(params, measured)
        one = Tried(slots, measured, steady, not broken, "; ".join(broken) or "meets all criteria")
        if broken or (steady.to_s >= seconds and measured.n >= params.per_slot * slots):
            return one
        least, most = _rates(slots, measured.n / max(steady.to_s, 1e-3), slots)
    levels.short.append(one.measured.name)
    return one


def _rates(before: float, rate_rps: float, slots: int) -> tuple[float, float]:
    """Return the lowest and highest rate of completion with `slots`, if `before` slots had `rate_rps`."""
    times = slots / before
    return rate_rps * min(1.0, times) / RATE_SPARE, rate_rps * max(1.0, times) * RATE_SPARE


def _broken(params: CapacityParams, measured: Measurement) -> list[str]:
    assert params.ttft_p99 is not None
    found = []
    completed, bound = _completion(measured), to_seconds(params.ttft_p99)
    if completed < params.completion:
        found.append(f"{share(completed)} completed, {share(params.completion)} needed")
    p99 = percentile(measured.values("ttft_ns"), 0.99)
    if p99 is None or p99 > bound:
        found.append(f"TTFT P99 {figures.ms(p99)} > {figures.ms(bound)}")
    if errors := memory_errors(measured):
        found.append(f"{errors} out-of-memory errors")
    return found


def _completion(measured: Measurement) -> float:
    return len(measured.ended_well()) / measured.n if measured.n else 0.0


def _found(params: CapacityParams, search: RateSearch, levels: _Levels) -> TestResult:
    assert params.ttft_p99 is not None
    bound, seconds = to_seconds(params.ttft_p99), to_seconds(params.duration)
    found = TestResult(
        configuration={
            "Workload": f"{params.workload}, answers of {params.output_tokens} tokens",
            "Load model": "closed loop",
            "Concurrency": f"from {params.initial} to at most {params.maximum}, told to {params.resolution}",
            "Test duration": f"per level {seconds:g} s or {params.per_slot} completions per slot, whichever"
            " is longer",
            "Success criteria": f"{share(params.completion)} complete, TTFT P99 <= {figures.ms(bound)}, no"
            " out-of-memory errors",
        }
    )  # fmt: skip
    best = search.best
    at_best = next((t for t in reversed(levels.tried) if t.holds and t.level == best), None)
    told = found.measurements = _measurements(params, search, levels, at_best)
    found.tables = [
        figures.table_of("Table 7: Capacity Search Results", told["levels"], TABLE_7),
        figures.metric_table(
            "Capacity (5.5.4)",
            {
                "Maximum concurrent requests": "-" if best is None else f"{best}",
                "Throughput at maximum": number(told["output_tps"], "tok/s"),
                "Tokens in flight at maximum (approximately)": number(told["tokens_in_flight"]),
            },
        ),
        figures.table_of("Each level, and what decided it", told["levels"], WHY_COLUMNS),
    ]
    if at_best is not None:
        found.tables.append(latency_table("Latency at maximum concurrency", at_best.measured))
    found.charts = _charts(params, levels.tried, best)
    _remark(found, params, search, levels, at_best)
    return found


TABLE_7: Final[Mapping[str, figures.Cell]] = {
    "Concurrency": figures.text("concurrency"),
    "Completion": lambda level: share(1 - level["failed"] / level["requests"] if level["requests"] else 0.0),
    **figures.latency_columns("ttft p99", "tpot p99"),
    "Errors": figures.text("failed"),
    "Status": lambda level: "Pass" if level["holds"] else "Fail",
}
WHY_COLUMNS: Final[Mapping[str, figures.Cell]] = {
    "Concurrency": figures.text("concurrency"),
    "Requests": figures.text("requests"),
    "Time": lambda level: f"{level['window']['to']:.1f} s",
    "Completed (req/s)": lambda level: number(level["completed_rps"]),
    "Output (tok/s)": lambda level: number(level["output_tps"]),
    "Why": figures.text("why"),
}


def _measurements(
    params: CapacityParams, search: RateSearch, levels: _Levels, at_best: Tried | None
) -> dict[str, Any]:
    steady = None if at_best is None else at_best.steady
    tried = sorted(levels.tried, key=lambda t: t.level)
    return {
        "max_concurrency": search.best,
        "max_concurrency_by_completion": capacity(
            [(t.level, _completion(t.measured)) for t in tried], params.completion
        ),
        "limit": search.limit,
        "workload": params.workload,
        "output_tokens": params.output_tokens,
        "criteria": {
            "ttft_p99": None if params.ttft_p99 is None else to_seconds(params.ttft_p99),
            "completion": params.completion, "memory_errors": 0,
        },
        "output_tps": None if steady is None else steady.output_tps,
        "request_rps": None if steady is None else steady.completed_rps,
        "tokens_in_flight": None if steady is None else steady.held_tokens,
        "latency": None if at_best is None else latency_rows(at_best.measured),
        "levels": [
            {"concurrency": round(t.level), **level_json(t), **_own(t.measured)} for t in tried
        ],
    }  # fmt: skip


def _own(measured: Measurement) -> dict[str, Any]:
    """Return figures over all requests of a level, including the ramp-up."""
    well = len(measured.ended_well())
    interval = share_interval(well, measured.n)
    return {
        "completion": None if interval is None else interval.to_dict(),
        "failed": measured.n - well,
        "endings": endings(measured),
        "memory_errors": memory_errors(measured),
        "preemptions": server_total(measured, "preemptions"),
        **latency_rows(measured),
    }


def _charts(params: CapacityParams, tried: Sequence[Tried], best: int | None) -> list[ChartSpec]:
    assert params.ttft_p99 is not None
    last = {t.level: t for t in tried}
    xs: list[float | str] = [*sorted(last)]
    levels = [last[level] for level in sorted(last)]
    marks = [] if best is None else [Mark(best, "capacity")]
    x_title = "requests at a time"
    bound = ChartSeries("threshold", xs, [to_seconds(params.ttft_p99) * 1e3] * len(xs))
    ttft = figures.line_series("TTFT P99", xs, [latency_rows(t.measured)["ttft"]["p99"] for t in levels])
    return [
        ChartSpec(
            "TTFT P99 by concurrency", "line", x_title, "ms", [ttft, bound], marks, log_x=True, log_y=True
        ),
        throughput_chart("concurrency", x_title, sorted(last), levels, marks, log_x=True),
    ]


def _remark(
    found: TestResult, params: CapacityParams, search: RateSearch, levels: _Levels, at_best: Tried | None
) -> None:
    notes = found.notes
    if search.best is None:
        notes.append(f"not even one request at a time meets the criteria: {levels.tried[-1].why}")
    elif search.limit is None:
        notes.append(f"the highest concurrency of the search meets the criteria: {search.best} is no limit")
    else:
        notes.append(f"capacity lies between {search.best} and {search.limit}")
    notes.append(
        "tokens in flight are the mean over time of prompts that were sent and of answers as far as they had"
        " come, from their lengths: what waits in the server's queue is among them"
    )
    notes.append("out-of-memory errors are those that an answer's error tells")
    notes.append(figures.SPANS)
    if figures.marked(found.measurements["levels"], "ttft", "tpot", share="p99"):
        notes.append(figures.FEW)
    uneven = at_best is not None and len(set(at_best.measured.values("output_tokens"))) > 1
    if uneven:
        notes.append(
            f"not every answer had {params.output_tokens} tokens: the server ends them when it likes"
        )
    if levels.short:
        found.deviations.append(
            f"5.5.3: less than {to_seconds(params.duration):g} s or {params.per_slot} completions per slot:"
            f" {', '.join(levels.short)}"
        )


TEST: Final = BenchTest(
    name="capacity",
    params=CapacityParams,
    run=run,
    seconds=lambda session, params: (
        RateSearch(1, params.maximum, params.initial, params.resolution).left * to_seconds(params.duration)
    ),
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

"""Concurrent Request Capacity (IETF draft, 5.5): the highest number of concurrent requests within the SLO.

`run` sends closed loops without a ramp-up, doubles and then bisects the concurrency, and returns Table 7, the
maximum with its throughput, and charts. The SLO is a P99 of TTFT, a share of completions, and no
out-of-memory errors. A level lasts for 100 completions per slot or 60 s, whichever is longer. The number of
requests follows from the previous level; a level that ended too soon is sent again with more.
"""

from collections.abc import Mapping, Sequence
from math import ceil
from typing import Annotated, Any, Final

import msgspec
from msgspec import Meta

from llmtap.bench.run import figures
from llmtap.bench.run.levels import (
    ROWS_MAX,
    RateSearch,
    Tried,
    check_duration,
    endings,
    lasts,
    latency_rows,
    level_json,
    level_load,
    memory_errors,
    number,
    share,
    throughput_chart,
)
from llmtap.bench.run.measurement import Measurement, steady_of
from llmtap.bench.run.session import BenchSession
from llmtap.bench.run.test import BenchTest, ChartSeries, ChartSpec, Mark, TestResult
from llmtap.bench.tests.throughput import DURATION_MIN
from llmtap.errors import ConfigError
from llmtap.metrics.intervals import share_interval
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


def check(session: BenchSession, params: CapacityParams) -> None:
    if params.ttft_p99 is None:
        raise ConfigError(
            "ttft_p99",
            "is not given: capacity is what meets a threshold of TTFT (5.5.2)",
            "such as ttft_p99 = 2s",
        )
    if params.maximum < params.initial:
        raise ConfigError("maximum", f"is {params.maximum}, below initial ({params.initial})")
    check_duration(session, params.duration, DURATION_MIN, "5.5.3")
    if params.per_slot < PER_SLOT_MIN and not session.quick:
        raise ConfigError("per_slot", f"is {params.per_slot}, and 5.5.3 asks for {PER_SLOT_MIN} at least")


async def run(session: BenchSession, params: CapacityParams) -> TestResult:
    search = _search(params)
    tried: list[Tried] = []
    while (slots := search.next) is not None:
        session.watcher.left(lasts(search.left, to_seconds(params.duration)))
        tried.append(await _try(session, params, tried, slots))
        search.tell(slots, tried[-1].holds)
    return _found(params, search, tried)


def _search(params: CapacityParams) -> RateSearch:
    return RateSearch(1, params.maximum, params.initial, params.resolution)


async def _try(session: BenchSession, params: CapacityParams, tried: Sequence[Tried], slots: int) -> Tried:
    """Send a level, and again with more requests if it ended too soon."""
    seconds = to_seconds(params.duration)
    rate = 0.0
    if tried:
        rate = tried[-1].steady.completed_rps * max(1.0, slots / tried[-1].level)
    for name in (f"search/{slots:04d}", f"search/{slots:04d}-longer"):
        # One more per slot, so that all slots are busy until the last is sent.
        rows = min(ROWS_MAX, max(params.per_slot * slots, ceil(rate * RATE_SPARE * seconds)) + slots)
        load = level_load(
            session, name, params.workload, slots=slots, requests=rows, output_tokens=params.output_tokens
        )
        measured = await session.measure(name, load, slo=f"ttft:{params.ttft_p99:d}ns")
        steady = steady_of(measured)
        broken = _broken(params, measured)
        one = Tried(slots, measured, steady, not broken, "; ".join(broken) or "meets all criteria")
        if broken or not _is_short(params, one):
            break
        rate = measured.n / max(steady.to_s, 1e-3)
    return one


def _is_short(params: CapacityParams, one: Tried) -> bool:
    too_few = one.measured.n < params.per_slot * one.level
    return one.holds and (too_few or one.steady.to_s < to_seconds(params.duration))


def _broken(params: CapacityParams, measured: Measurement) -> list[str]:
    found = []
    completed, bound = _completion(measured), _bound_s(params)
    if completed < params.completion:
        found.append(f"{share(completed)} completed, {share(params.completion)} needed")
    p99 = percentile(measured.values("ttft_ns"), 0.99)
    if p99 is None or p99 > bound:
        found.append(f"TTFT P99 {figures.ms(p99)} > {figures.ms(bound)}")
    if errors := memory_errors(measured):
        found.append(f"{errors} out-of-memory errors")
    return found


def _bound_s(params: CapacityParams) -> float:
    assert params.ttft_p99 is not None  # checked by `check`
    return to_seconds(params.ttft_p99)


def _completion(measured: Measurement) -> float:
    return len(measured.ended_well()) / measured.n if measured.n else 0.0


def _found(params: CapacityParams, search: RateSearch, tried: Sequence[Tried]) -> TestResult:
    bound, best = figures.ms(_bound_s(params)), search.best
    found = TestResult(
        configuration={
            "Workload": f"{params.workload}, answers of {params.output_tokens} tokens",
            "Load model": "closed loop",
            "Concurrency": f"from {params.initial} to at most {params.maximum}, told to {params.resolution}",
            "Test duration": f"per level {to_seconds(params.duration):g} s or {params.per_slot} completions"
            " per slot, whichever is longer",
            "Success criteria": f"{share(params.completion)} complete, TTFT P99 <= {bound}, no out-of-memory"
            " errors",
        }
    )  # fmt: skip
    found.main = next((t for t in reversed(tried) if t.holds and t.level == best), tried[-1]).measured.name
    told = found.measurements = _measurements(params, search, tried)
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
    found.charts = _charts(params, tried, best)
    _remark(found, params, search, tried)
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


def _measurements(params: CapacityParams, search: RateSearch, tried: Sequence[Tried]) -> dict[str, Any]:
    steady = next((t.steady for t in reversed(tried) if t.holds and t.level == search.best), None)
    return {
        "max_concurrency": search.best,
        "limit": search.limit,
        "workload": params.workload,
        "output_tokens": params.output_tokens,
        "criteria": {
            "ttft_p99": _bound_s(params), "completion": params.completion, "memory_errors": 0,
        },
        "output_tps": None if steady is None else steady.output_tps,
        "request_rps": None if steady is None else steady.completed_rps,
        "tokens_in_flight": None if steady is None else steady.held_tokens,
        "levels": [
            {"concurrency": round(t.level), **level_json(t), **_own(t.measured)}
            for t in sorted(tried, key=lambda t: t.level)
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
        **latency_rows(measured),
    }


def _charts(params: CapacityParams, tried: Sequence[Tried], best: int | None) -> list[ChartSpec]:
    last = {t.level: t for t in sorted(tried, key=lambda t: t.level)}
    xs, levels = [*last], [*last.values()]
    marks = [] if best is None else [Mark(best, "capacity")]
    x_title = "requests at a time"
    bound = ChartSeries("threshold", [*xs], [_bound_s(params) * 1e3] * len(xs))
    ttft = figures.line_series("TTFT P99", xs, [latency_rows(t.measured)["ttft"]["p99"] for t in levels])
    return [
        ChartSpec(
            "TTFT P99 by concurrency", "line", x_title, "ms", [ttft, bound], marks, log_x=True, log_y=True
        ),
        throughput_chart("concurrency", x_title, xs, levels, marks, log_x=True),
    ]


def _remark(found: TestResult, params: CapacityParams, search: RateSearch, tried: Sequence[Tried]) -> None:
    notes = found.notes
    if search.best is None:
        notes.append(f"not even one request at a time meets the criteria: {tried[-1].why}")
    elif search.limit is None:
        notes.append(f"the highest concurrency of the search meets the criteria: {search.best} is no limit")
    else:
        notes.append(f"capacity lies between {search.best} and {search.limit}")
    notes.append(
        "tokens in flight are the mean over time of prompts that were sent and of answers as far as they had"
        " come, from their lengths: what waits in the server's queue is among them"
    )
    notes += figures.legend(found.measurements["levels"], "ttft", "tpot", share="p99")
    if short := [t.measured.name for t in tried if _is_short(params, t)]:
        found.deviations.append(
            f"5.5.3: less than {to_seconds(params.duration):g} s or {params.per_slot} completions per slot:"
            f" {', '.join(short)}"
        )


TEST: Final = BenchTest(
    name="capacity",
    params=CapacityParams,
    run=run,
    seconds=lambda session, params: _search(params).left * to_seconds(params.duration),
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

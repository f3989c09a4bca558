"""Output Token Throughput (IETF draft, 5.2): the highest sustained load, and its token rate.

`run` sends open loops at rising rates or closed loops of rising concurrency, and returns the maximum (Table
3), the latency there (Table 4), all levels, and charts. Other tests use the result as the capacity. The
search doubles the load until it is not sustained, then bisects down to one increment. A load is not
sustained if its queue grows (open loop), if fewer than 90 % of its arrivals complete, or if it breaks the
SLO; without an SLO, also if its E2E P99 is 10 times the lowest level's P50 (5.2.3.1).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import Meta

from llmtap.bench.run import figures, test
from llmtap.bench.run.levels import (
    Bounds,
    RateSearch,
    Tried,
    check_duration,
    lasts,
    latency_rows,
    latency_table,
    level_json,
    level_load,
    measure_closed,
    number,
    p99_chart,
    server_mean,
    share,
    throughput_chart,
)
from llmtap.bench.run.measurement import Steady, steady_of, tail_is_heavy
from llmtap.bench.run.session import BenchSession
from llmtap.errors import ConfigError
from llmtap.metrics.cost import tokens_per_gpu_second
from llmtap.metrics.objectives import Objectives
from llmtap.units import NS_PER_S, Duration, to_seconds

DURATION_MIN: Final = Duration(60 * NS_PER_S)
DURATION_STABLE: Final = Duration(300 * NS_PER_S)


class ThroughputParams(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    workload: test.Workload = "synthetic-uniform"
    duration: Annotated[
        Duration, Meta(description="duration of each level; at least 60s, 300s for stable figures (5.2.2.1)")
    ] = DURATION_MIN
    mode: Annotated[
        Literal["open", "closed"],
        Meta(description="load model: at a rate (open), or with fixed concurrency (closed)"),
    ] = "open"
    arrivals: test.ArrivalProcess = "poisson"
    rate_min: Annotated[float, Meta(gt=0, description="open loop: lowest rate, requests/s")] = 1.0
    rate_max: Annotated[float, Meta(gt=0, description="open loop: highest rate")] = 1_024.0
    rate_step: Annotated[float, Meta(gt=0, description="open loop: increment of the rate")] = 1.0
    concurrency_min: Annotated[int, Meta(ge=1, description="closed loop: lowest concurrency")] = 1
    concurrency_max: Annotated[int, Meta(ge=1, description="closed loop: highest concurrency")] = 512
    concurrency_step: Annotated[int, Meta(ge=1, description="closed loop: increment of the concurrency")] = 1
    ttft_p99: test.TtftBound = None
    tpot_p99: test.TpotBound = None
    slo: Annotated[
        str | None,
        Meta(description="SLO: objectives of each request, such as ttft:1s user_idle:2s e2e:20s"),
    ] = None
    attainment: Annotated[
        float, Meta(gt=0, le=1, description="SLO: smallest share of requests that meet all of slo")
    ] = 0.99
    smooth: Annotated[
        Annotated[float, Meta(gt=0, le=1)] | None,
        Meta(description="SLO: smallest smooth goodput, as a share of the output tokens"),
    ] = None

    @property
    def bounds(self) -> Bounds:
        return Bounds(self.ttft_p99, self.tpot_p99, self.slo, self.attainment, self.smooth)

    @property
    def unit(self) -> str:
        return "req/s" if self.mode == "open" else "at a time"


@dataclass(slots=True)
class Sought:
    search: RateSearch
    step: float
    """Load per level of the search."""
    tried: list[Tried] = field(default_factory=list)
    short: list[str] = field(default_factory=list)
    """Loads that ran out of requests before their time ended."""

    @property
    def best(self) -> Tried | None:
        """The last successful try of the highest level that holds."""
        level = None if self.search.best is None else self.search.best * self.step
        return next((t for t in reversed(self.tried) if t.holds and t.level == level), None)

    @property
    def limit(self) -> float | None:
        return None if self.search.limit is None else self.search.limit * self.step


def check(session: BenchSession, params: ThroughputParams) -> None:
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
            f"{name}_min", f"is {low:g}, which is no multiple of {name}_step ({step:g})",
            f"such as {max(1, round(steps)) * step:g}",
        )  # fmt: skip
    if high < low:
        raise ConfigError(f"{name}_max", f"is {high:g}, below {name}_min ({low:g})")


def _search(params: ThroughputParams) -> Sought:
    if params.mode == "open":
        step, low, high = params.rate_step, params.rate_min, params.rate_max
    else:
        step, low, high = params.concurrency_step, params.concurrency_min, params.concurrency_max
    first = round(low / step)
    return Sought(RateSearch(low=first, high=max(first, int(high / step + 1e-6)), start=first), step)


async def seek(session: BenchSession, params: ThroughputParams) -> Sought:
    """Search, with steps `search/16rps`, until the limit is known to one increment."""
    sought = _search(params)
    search, seconds = sought.search, to_seconds(params.duration)
    while (at := search.next) is not None:
        session.watcher.left(lasts(search.left, seconds))
        level = at * sought.step
        if params.mode == "open":
            name = f"search/{level:g}rps"
            load = level_load(
                session, name, params.workload, rate_rps=level, duration_s=seconds, arrivals=params.arrivals
            )
            measured = await session.measure(name, load, slo=params.bounds.slo)
            steady = steady_of(measured, seconds)
        else:
            last = sought.tried[-1] if sought.tried else None
            measured, steady, short = await measure_closed(
                session, f"search/{level:g}slots", params.workload, round(level), params.duration,
                None if last is None else (last.level, last.steady.completed_rps), slo=params.bounds.slo,
            )  # fmt: skip
            sought.short += [measured.name] * short
        broken = _broken(steady, sought.tried[0].steady if sought.tried else steady, params)
        why = "; ".join(broken) or "sustained"
        sought.tried.append(Tried(level, measured, steady, not broken, why))
        search.tell(at, not broken)
    return sought


def _broken(steady: Steady, lowest: Steady, params: ThroughputParams) -> list[str]:
    found = []
    if params.mode == "open" and steady.queue_grows:
        first, last = steady.in_flight[0], steady.in_flight[-1]
        found.append(f"the queue grows: {first:.1f} to {last:.1f} in flight")
    if steady.falls_short:
        found.append(f"completes {share(steady.delivered)} of the arrival rate")
    if params.bounds:
        return found + params.bounds.broken(steady)
    if steady is not lowest and tail_is_heavy(steady, lowest):
        p99, p50 = steady.latency("e2e_ns", 0.99), lowest.latency("e2e_ns", 0.5)
        found.append(
            f"E2E P99 {figures.ms(p99)} exceeds 10 x the P50 of the lowest level ({figures.ms(p50)})"
        )
    return found


async def run(session: BenchSession, params: ThroughputParams) -> test.TestResult:
    sought = await seek(session, params)
    best, told = sought.best, _measurements(session, params, sought)
    found = test.TestResult(
        told, configuration=_configuration(params), main=(best or sought.tried[0]).measured.name
    )
    found.tables = [_summary(told)]
    if best is not None:
        found.tables.append(latency_table("Table 4: Latency at Maximum Throughput", best.steady.sent))
    levels = sorted(zip(sought.tried, told["levels"], strict=True), key=lambda both: both[0].level)
    found.tables.append(
        figures.table_of(
            "All load levels, without their first 10 %",
            [{**level, "load": tried.level, "tried": tried} for tried, level in levels],
            {f"Planned load ({params.unit})": figures.text("load", "g"), **LEVEL_COLUMNS},
        )
    )
    found.charts = _charts(params, sought)
    _remark(found, params, sought)
    return found


LEVEL_COLUMNS: Final[Mapping[str, figures.Cell]] = {
    "Sent (req/s)": lambda level: f"{number(level['arrival_rps'])} (n {level['arrivals']:,})",
    "Completed (req/s)": lambda level: f"{number(level['completed_rps'])} (n {level['completed']:,})",
    "Output (tok/s)": lambda level: number(level["output_tps"]),
    **figures.latency_columns("ttft p99", "tpot p99"),
    "Success": lambda level: share(level["success"]),
    "In flight, first to last fifth": lambda level: (
        f"{level['in_flight'][0]:.1f} to {level['in_flight'][-1]:.1f}"
    ),
    "Steady": lambda level: "yes" if level["tried"].steady.is_steady else "no",
    "Status": lambda level: level["tried"].status,
    "Why": figures.text("why"),
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
        "Latency constraint": params.bounds.says or "none: the highest load that does not saturate",
    }


def _measurements(session: BenchSession, params: ThroughputParams, sought: Sought) -> dict[str, Any]:
    best, is_open = sought.best, params.mode == "open"
    unit = "planned_rps" if is_open else "concurrency"
    told: dict[str, Any] = {
        "load_model": params.mode, "constraint": params.bounds.to_dict(), "limit": sought.limit,
        "levels": [{unit: t.level, **level_json(t)} for t in sought.tried], **dict.fromkeys(_FOUND),
    }  # fmt: skip
    if best is None:
        return told
    steady, gpus, tokens = best.steady, session.sut.hardware.count, best.steady.output_tokens
    running, batch = server_mean(best.measured, "running", steady), session.sut.max_batch
    per_gpu = None
    if gpus and tokens is not None:
        per_gpu = tokens_per_gpu_second(round(tokens), steady.seconds, gpus)
    found = (
        best.level if is_open else steady.completed_rps, None if is_open else round(best.level),
        steady.output_tps, steady.completed_rps, steady.input_tps, per_gpu,
        None if running is None or batch is None else running / batch, steady.is_steady,
        steady.arrival_rps, steady.arrivals, steady.completed,
    )  # fmt: skip
    return told | dict(zip(_FOUND, found, strict=True))


_FOUND: Final = (
    "sustainable_load_rps", "sustainable_concurrency", "max_output_tps", "max_request_rps", "max_input_tps",
    "tokens_per_gpu_second", "batch_utilization", "steady", "sent_rps", "sent", "completed",
)  # fmt: skip
"""Figures of the highest level that is sustained; None without one."""


def _summary(told: Mapping[str, Any]) -> test.ReportTable:
    names = ("sustainable_load_rps", "sent_rps", "max_request_rps")
    sustained, sent, completed = (number(told[name], "req/s") for name in names)
    if told["sent"] is not None:
        sent += f" (n {told['sent']:,})"
        completed += f" (n {told['completed']:,})"
    if told["sustainable_concurrency"] is not None:
        sustained = f"{told['sustainable_concurrency']} at a time ({sustained})"
    return figures.metric_table(
        "Table 3: Throughput Summary",
        {
            "Max Output Throughput": number(told["max_output_tps"], "tok/s"),
            "Max Request Throughput": completed,
            "Max Input Throughput": number(told["max_input_tps"], "tok/s"),
            "Sustainable Load": sustained,
            "Sent at This Load": sent,
            "Tokens per GPU-second": number(told["tokens_per_gpu_second"], "tok/s/GPU"),
            "Batch Utilization": share(told["batch_utilization"]),
        },
    )


def _charts(params: ThroughputParams, sought: Sought) -> list[test.ChartSpec]:
    last = {t.level: t for t in sought.tried}
    xs = sorted(last)
    levels = [last[level] for level in xs]
    x_title = "planned load (requests/s)" if params.mode == "open" else "requests at a time"
    best = sought.best
    marks = [] if best is None else [test.Mark(best.level, "highest that is sustained")]
    rows = [latency_rows(t.steady.sent) for t in levels]
    return [
        throughput_chart("load", x_title, xs, levels, marks),
        p99_chart("Latency P99 by load", x_title, xs, rows, marks),
    ]


def _remark(found: test.TestResult, params: ThroughputParams, sought: Sought) -> None:
    best, notes = sought.best, found.notes
    notes.append(
        "throughput: output tokens made in the last 90 % of a level's time, by that time; an answer's tokens"
        " count evenly from its first token to its end; latencies are of the requests sent in that time"
    )
    if best is None:
        notes.append(f"not even the lowest level is sustained: {sought.tried[-1].why}")
    elif sought.limit is None:
        notes.append(f"the highest level of the range is sustained: {best.level:g} {params.unit} is no limit")
    else:
        notes.append(
            f"the limit lies between {best.level:g} and {sought.limit:g} {params.unit}, the increment of the"
            " search; rates have no confidence interval: each level was sent once, and --runs repeats it"
        )
    if best is not None and not best.steady.is_steady:
        notes.append("at the highest load that was sustained the throughput was not steady: measure longer")
    if params.duration < DURATION_STABLE:
        notes.append(
            f"each level lasted {to_seconds(params.duration):g} s; 300 s are recommended for stable figures"
            " (5.2.2.1)"
        )
    lowest = [sought.tried[0].steady.latency("e2e_ns", share) for share in (0.50, 0.99)]
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
    notes += figures.legend(found.measurements["levels"], "ttft", "tpot", share="p99")
    if params.mode == "closed":
        found.deviations.append(
            "5.2.3.1: in a closed loop no queue grows, so saturation shows in failures and the tail alone"
        )
    if sought.short:
        found.deviations.append(
            f"5.2.2.1: requests were over before the time was: {', '.join(sought.short)}; these levels count"
            " until then"
        )


TEST: Final = test.BenchTest(
    name="throughput",
    params=ThroughputParams,
    run=run,
    seconds=lambda session, params: _search(params).search.left * to_seconds(params.duration),
    quick={"duration": Duration(6 * NS_PER_S)},
    forfeits=("5.2.2.1-1", "5.2.2.1-p1"),
    check=check,
)

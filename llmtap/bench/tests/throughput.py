"""Output Token Throughput (seed 000, 5.2): the highest load that is sustained, and what is made at it.

The search doubles the load until it is not sustained, then halves the distance to the last that was, down to
one increment. A load is not sustained when the system is saturated (5.2.3.1) or, where there is an SLO, when
the SLO is not met. An SLO that is met while the queue grows would not be met for long, so those two signs of
saturation count in that case as well; the third compares latencies, which is the SLO's part.

In a closed loop nothing is sent before something has ended: no queue can grow, and what remains of the three
signs is failures and the tail.
"""

from dataclasses import dataclass, field
from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import Meta

from llmtap.bench.run.figures import DOUBT, SPANS, line_series, ms, ms_of
from llmtap.bench.run.levels import (
    Bounds,
    Tried,
    lasts,
    latency_rows,
    latency_table,
    level_json,
    measure_closed,
    number,
    open_level,
    server_mean,
    share,
)
from llmtap.bench.run.measurement import Measurement, Steady, steady_of, tail_is_heavy
from llmtap.bench.run.search import RateSearch
from llmtap.bench.run.session import BenchSession
from llmtap.bench.run.test import BenchTest, ChartSeries, ChartSpec, Mark, ReportTable, TestResult
from llmtap.errors import ConfigError
from llmtap.metrics.cost import tokens_per_gpu_second
from llmtap.units import NS_PER_S, Duration, to_seconds
from llmtap.workload.arrivals.arrivals import parse_arrivals

__all__ = ["TEST", "Sought", "ThroughputParams", "seek"]

DURATION_MIN: Final = Duration(60 * NS_PER_S)


class ThroughputParams(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Setup (5.2.2)."""

    workload: Annotated[str, Meta(description="a reference workload (4.3.2), or FILE.toml of your own")] = (
        "synthetic-uniform"
    )
    duration: Annotated[
        Duration, Meta(description="of each level: 60s at least, 300s for stable figures (5.2.2.1)")
    ] = DURATION_MIN
    mode: Annotated[
        Literal["open", "closed"], Meta(description="load model: at a rate, or so many at a time")
    ] = "open"
    arrivals: Annotated[
        str, Meta(description="open loop: poisson, uniform, gamma:cv=2 (bursty) or another arrival process")
    ] = "poisson"
    rate_min: Annotated[float, Meta(gt=0, description="open loop: lowest rate, requests/s")] = 1.0
    rate_max: Annotated[
        float, Meta(gt=0, description="open loop: highest rate; where the limit is, doubling finds")
    ] = 1_024.0
    rate_step: Annotated[float, Meta(gt=0, description="open loop: increment; rates are multiples of it")] = (
        1.0
    )
    concurrency_min: Annotated[int, Meta(ge=1, description="closed loop: fewest at a time")] = 1
    concurrency_max: Annotated[int, Meta(ge=1, description="closed loop: most at a time")] = 512
    concurrency_step: Annotated[int, Meta(ge=1, description="closed loop: increment, as of the rate")] = 1
    ttft_p99: Annotated[Duration | None, Meta(description="SLO: largest P99 of TTFT")] = None
    tpot_p99: Annotated[Duration | None, Meta(description="SLO: largest P99 of TPOT")] = None
    votes: Annotated[
        int, Meta(ge=1, le=9, description="verdicts that decide over the two levels at the limit; odd")
    ] = 1

    @property
    def bounds(self) -> Bounds:
        return Bounds(self.ttft_p99, self.tpot_p99)

    @property
    def unit(self) -> str:
        return "req/s" if self.mode == "open" else "at a time"


@dataclass(slots=True)
class Sought:
    """A search that is over."""

    search: RateSearch
    step: float
    """The increment, by which its numbers are multiplied."""
    tried: list[Tried] = field(default_factory=list)
    """In the order in which they were measured."""
    short: list[str] = field(default_factory=list)
    """Steps whose requests were over before their time was."""

    @property
    def best(self) -> Tried | None:
        """The last try of the highest level that holds, of those that held."""
        best = self.search.best
        if best is None:
            return None
        return next(t for t in reversed(self.tried) if t.holds and t.level == best * self.step)

    @property
    def limit(self) -> float | None:
        """The lowest level that does not hold."""
        return None if self.search.limit is None else self.search.limit * self.step


def check(session: BenchSession, params: ThroughputParams) -> None:
    """Raises ConfigError: durations below the draft's, ranges that are none."""
    if params.duration < DURATION_MIN and not session.quick:
        raise ConfigError(
            "duration", f"is {to_seconds(params.duration):g} s, and 5.2.2.1 asks for 60 s at least",
            "--quick gives that up, and the report says so",
        )  # fmt: skip
    if params.duration <= 0:
        raise ConfigError("duration", "is nothing")
    if params.votes % 2 == 0:
        raise ConfigError("votes", f"is {params.votes}, which can be a draw", "an odd number")
    if params.mode == "closed":
        _check_range("concurrency", params.concurrency_min, params.concurrency_max, params.concurrency_step)
    else:
        parse_arrivals(params.arrivals, rate_rps=params.rate_min, seed=0, place="arrivals")
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


async def seek(
    session: BenchSession, params: ThroughputParams, prefix: str = "search", *, resolution: int = 1
) -> Sought:
    """The search. Its steps are called by their level, `PREFIX/16rps`; one tried again has a number.

    It ends when the limit is known to so many increments (`resolution`).
    """
    if params.mode == "open":
        step, low, high = params.rate_step, params.rate_min, params.rate_max
    else:
        step, low, high = params.concurrency_step, params.concurrency_min, params.concurrency_max
    first, last = round(low / step), max(round(low / step), int(high / step + 1e-6))
    search = RateSearch(low=first, high=last, start=first, resolution=resolution, votes=params.votes)
    sought = Sought(search, step)
    sender = _Sender(session, params, sought)
    send = sender.open if params.mode == "open" else sender.closed
    lowest: Steady | None = None
    while (at := search.next) is not None:
        session.watcher.left(lasts(search.left, to_seconds(params.duration)))
        again = search.tries(at) + 1
        unit = "rps" if params.mode == "open" else "slots"
        name = f"{prefix}/{at * step:g}{unit}" + f"-{again}" * (again > 1)
        measured, steady = await send(at, name)
        lowest = lowest or steady
        broken = _broken(steady, lowest, params)
        why = "; ".join(broken) or "sustained"
        sought.tried.append(Tried(at * step, measured, steady, not broken, why))
        search.tell(at, not broken)
    return sought


@dataclass(slots=True)
class _Sender:
    """Sends a level."""

    session: BenchSession
    params: ThroughputParams
    sought: Sought

    async def open(self, at: int, name: str) -> tuple[Measurement, Steady]:
        params = self.params
        rate_rps = at * self.sought.step
        load = open_level(
            self.session, name, params.workload, rate_rps, params.duration, arrivals=params.arrivals
        )
        measured = await self.session.measure(name, load, slo=params.bounds.slo)
        return measured, steady_of(measured, to_seconds(params.duration))

    async def closed(self, at: int, name: str) -> tuple[Measurement, Steady]:
        params, tried = self.params, self.sought.tried
        before = (tried[-1].level, tried[-1].steady.completed_rps) if tried else None
        measured, steady, short = await measure_closed(
            self.session, name, params.workload, round(at * self.sought.step), params.duration, before,
            slo=params.bounds.slo,
        )  # fmt: skip
        if short:
            self.sought.short.append(measured.name)
        return measured, steady


def _broken(steady: Steady, lowest: Steady, params: ThroughputParams) -> list[str]:
    """Why a level is not sustained, in words; empty where it is."""
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
        found.append(f"E2E P99 {ms(p99)} exceeds 10 x the P50 of the lowest level ({ms(p50)})")
    return found


async def run(session: BenchSession, params: ThroughputParams) -> TestResult:
    """5.2.3: search, and report the highest load that was sustained."""
    sought = await seek(session, params)
    found = TestResult(configuration=_configuration(params))
    best = sought.best
    found.measurements = _measurements(session, params, sought)
    found.tables = [_summary(params, found.measurements)]
    if best is not None:
        found.tables.append(latency_table("Table 4: Latency at Maximum Throughput", best.steady.sent))
    found.tables.append(_levels_table(params, sought))
    found.charts = _charts(params, sought)
    _remark(found, params, sought)
    return found


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
    best = sought.best
    unit = "offered_rps" if params.mode == "open" else "concurrency"
    told: dict[str, Any] = {
        "load_model": params.mode,
        "constraint": params.bounds.to_dict(),
        "sustainable_load_rps": None, "sustainable_concurrency": None, "limit": sought.limit,
        "max_output_tps": None, "max_request_rps": None, "max_input_tps": None,
        "tokens_per_gpu_second": None, "batch_utilization": None, "latency": None, "steady": None,
        "levels": [{unit: t.level, **level_json(t)} for t in sought.tried],
        "contradictions": [at * sought.step for at in sought.search.contradictions],
    }  # fmt: skip
    if best is None:
        return told
    steady, gpus = best.steady, session.sut.hardware.count
    running, batch = server_mean(best.measured, "running", steady), session.sut.max_batch
    is_open = params.mode == "open"
    return told | {
        "sustainable_load_rps": best.level if is_open else steady.completed_rps,
        "sustainable_concurrency": None if is_open else round(best.level),
        "max_output_tps": steady.output_tps,
        "max_request_rps": steady.completed_rps,
        "max_input_tps": steady.input_tps,
        "tokens_per_gpu_second": tokens_per_gpu_second(round(steady.output_tokens), steady.seconds, gpus)
        if gpus and steady.output_tokens is not None
        else None,
        "batch_utilization": None if running is None or batch is None else running / batch,
        "latency": latency_rows(steady.sent),
        "steady": steady.is_steady,
    }


def _summary(params: ThroughputParams, told: dict[str, Any]) -> ReportTable:
    load = told["sustainable_load_rps"]
    sustained = number(load, "req/s")
    if told["sustainable_concurrency"] is not None:
        sustained = f"{told['sustainable_concurrency']} at a time ({sustained})"
    rows = [
        ["Max Output Throughput", number(told["max_output_tps"], "tok/s")],
        ["Max Request Throughput", number(told["max_request_rps"], "req/s")],
        ["Max Input Throughput", number(told["max_input_tps"], "tok/s")],
        ["Sustainable Load", sustained],
        ["Tokens per GPU-second", number(told["tokens_per_gpu_second"], "tok/s/GPU")],
        ["Batch Utilization", share(told["batch_utilization"])],
    ]
    return ReportTable(caption="Table 3: Throughput Summary", heads=["Metric", "Value"], rows=rows)


def _levels_table(params: ThroughputParams, sought: Sought) -> ReportTable:
    rows = []
    for t in sorted(sought.tried, key=lambda t: t.level):
        steady = t.steady
        latency = latency_rows(steady.sent)
        queue = f"{steady.in_flight[0]:.1f} to {steady.in_flight[-1]:.1f}"
        rows.append(
            [
                f"{t.level:g}", number(steady.completed_rps), number(steady.output_tps),
                ms_of(latency["ttft"], "p99"), ms_of(latency["tpot"], "p99"),
                share(steady.success), queue, "yes" if steady.is_steady else "no", t.status, t.why,
            ]
        )  # fmt: skip
    heads = [
        f"Load ({params.unit})", "Completed (req/s)", "Output (tok/s)", "TTFT P99", "TPOT P99", "Success",
        "In flight, first to last fifth", "Steady", "Status", "Why",
    ]  # fmt: skip
    return ReportTable(caption="All load levels, without their first 10 %", heads=heads, rows=rows)


def _charts(params: ThroughputParams, sought: Sought) -> list[ChartSpec]:
    last = {t.level: t for t in sought.tried}
    levels = [last[level] for level in sorted(last)]
    xs: list[float | str] = [t.level for t in levels]
    x_title = "offered load (requests/s)" if params.mode == "open" else "requests at a time"
    best = sought.best
    marks = [] if best is None else [Mark(x=best.level, says="highest that is sustained")]
    rows = [latency_rows(t.steady.sent) for t in levels]
    return [
        ChartSpec(
            title="Output throughput by load", kind="line", x_title=x_title, y_title="output tokens/s",
            series=[ChartSeries(name="throughput", x=xs, y=[t.steady.output_tps for t in levels])],
            marks=marks,
        ),
        ChartSpec(
            title="Latency P99 by load", kind="line", x_title=x_title, y_title="ms", log_y=True, marks=marks,
            series=[
                line_series(f"{name} P99", xs, [row[key]["p99"] for row in rows])
                for key, name in (("ttft", "TTFT"), ("tpot", "TPOT"), ("e2e", "E2E"))
            ],
        ),
    ]  # fmt: skip


def _remark(found: TestResult, params: ThroughputParams, sought: Sought) -> None:
    told, best, notes = found.measurements, sought.best, found.notes
    constrained = f"with the constraint {params.bounds.says}" if params.bounds else "without constraint"
    notes.append(
        f"throughput {constrained}: output tokens made in the last 90 % of a level's time, by that time; an"
        " answer's tokens count evenly from its first token to its end"
    )
    if best is None:
        notes.append(f"not even the lowest level is sustained: {sought.tried[-1].why}")
    elif sought.limit is None:
        notes.append(f"the highest level of the range is sustained: {best.level:g} {params.unit} is no limit")
    else:
        notes.append(
            f"the limit lies between {best.level:g} and {sought.limit:g} {params.unit}, the increment of the"
            " search"
        )
    if best is not None and not best.steady.is_steady:
        notes.append("at the highest load that was sustained the throughput was not steady: measure longer")
    if told["contradictions"]:
        levels = ", ".join(f"{level:g}" for level in told["contradictions"])
        notes.append(
            f"sustained although a lower level was not: {levels}; votes above 1 settle what is noise"
        )
    notes.append(SPANS)
    if any("p99" in level[name]["marks"] for level in told["levels"] for name in ("ttft", "tpot")):
        notes.append(DOUBT)
    if told["batch_utilization"] is None:
        notes.append("batch utilization needs a server that tells what runs, and sut.max_batch")
    if told["tokens_per_gpu_second"] is None:
        notes.append("tokens per GPU-second need sut.hardware.count")
    if params.mode == "closed":
        found.deviations.append(
            "5.2.3.1: in a closed loop no queue grows, so saturation shows in failures and the tail alone"
        )
    if sought.short:
        found.deviations.append(
            f"5.2.2.1: requests were over before the time was: {', '.join(sought.short)}; these levels count"
            " until then"
        )


TEST: Final = BenchTest(
    name="throughput",
    section="5.2",
    title="Output Token Throughput",
    params=ThroughputParams,
    run=run,
    quick={"duration": Duration(6 * NS_PER_S)},
    forfeits=("5.2.2.1-1", "5.2.2.1-p1"),
    check=check,
)

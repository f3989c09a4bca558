"""Scheduling Fairness (IETF draft, 5.6): whether short and long requests slow each other down.

`run` measures each class of requests alone, then in the mix, and returns by class the latencies, their
increase and starvation, Jain's index, tables and charts. The draft is interpreted as follows:

- Synthetic-Skewed and classes: see `mixes.py`. `workload = "synthetic-skewed"` is as the draft demands; the
  default has the draft's ratio of classes, and needs fewer requests.
- Isolation "at same total load": the same tokens per second.
- Jain's index of "normalized latency": for each request, TTFT in the mix divided by the median TTFT of its
  class alone. Any spread of the waits lowers this index, so the index over class means is reported as well.
- Wait time: TTFT, because a client cannot distinguish queueing from prefill.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Final, Literal, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from llmtap.bench.run import figures
from llmtap.bench.run.levels import (
    Capacity,
    Latencies,
    completion_ratio_if_overloaded,
    expected_search,
    find_capacity,
    known_capacity,
    latency_rows,
)
from llmtap.bench.run.measurement import Measurement
from llmtap.bench.run.pace import ExpectedLoad, ExpectedLoads
from llmtap.bench.run.session import BenchSession, Load
from llmtap.bench.run.test import BenchTest, ChartSpec, Rate, ReportTable, SlotsMax, TestResult
from llmtap.bench.tests import mixes
from llmtap.metrics.intervals import share_interval
from llmtap.metrics.saturation import STARVED_MEDIANS, UNFAIR_BELOW, jain_readings, starvation
from llmtap.metrics.statistics import mean, percentile
from llmtap.options.fields import opt
from llmtap.units import NS_PER_S, Duration
from llmtap.workload.plan import RandomIds
from llmtap.workload.prompts.prompt import CL100K_IDS
from llmtap.workload.prompts.prose import ProseWords

RESAMPLES: Final = 2_000
_SEEDS: Final = {"warm-up": 1_000_001, "capacity": 2_000_003, "alone": 3_000_017}
"""By kind of load: offset of its seed, so that a prefix cache never contains a later load's prompts."""


class FairnessParams(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Setup of the test (IETF 5.6.2)."""

    workload: Annotated[
        Literal["request-classes", "synthetic-skewed"],
        opt(
            "request-classes, the classes in their ratio; synthetic-skewed, as 5.6.2 demands: a"
            " request is of the class whose ranges have its lengths, or of none, and fractions are the"
            " workload's"
        ),
    ] = "request-classes"
    classes: Annotated[
        tuple[mixes.RequestClass, ...],
        opt("classes: name, fraction, ranges of input and output tokens"),
    ] = (mixes.SHORT, mixes.LONG)
    rate: Annotated[
        Rate | None,
        opt("rate, requests/s; default: `share` of max_rate"),
    ] = None
    max_rate: Annotated[
        Rate | None,
        opt("saturation rate, requests/s; default: as measured"),
    ] = None
    share: Annotated[
        float,
        opt("fraction of saturation; 0.7 to 0.9 is recommended", gt=0, le=2),
    ] = 0.8
    requests_per_class: Annotated[int, opt("at least; the draft demands 500", ge=2)] = 500
    duration: Annotated[Duration, opt("duration of a load, at least; the draft: 300s")] = Duration(
        300 * NS_PER_S
    )
    slots_max: SlotsMax = 256


def check(session: BenchSession, params: FairnessParams) -> None:
    """Raise ConfigError if the classes are wrong, or one is so rare that the mix needs too many requests."""
    mixes.check_classes(params.classes)
    _mix(session, params)


class StarvationFigure(figures.IntervalFigure, frozen=True, kw_only=True):
    """Share of the requests that wait much longer than the median."""

    starved: int
    """Number of requests whose wait exceeds `threshold`."""
    median: float
    """Median wait of all requests."""
    threshold: float
    """Wait above which a request counts as starved: `medians` x `median`."""
    medians: float
    """Factor by which a wait must exceed the median."""


class LatencyInflation(msgspec.Struct, frozen=True):
    """TTFT in the mix divided by TTFT alone, by percentile and for the mean."""

    p50: figures.IntervalFigure | None
    p95: figures.IntervalFigure | None
    p99: figures.IntervalFigure | None
    mean: float | None


class ClassAlone(Latencies, frozen=True, kw_only=True):
    """Figures of a class in a load without the other classes."""

    rate_rps: float
    """Rate at which the requests were sent."""
    sent: int
    """Number of requests of the class that were sent."""


class ClassFigures(Latencies, frozen=True, kw_only=True):
    """Figures of a class in the mix with other classes, and of the same class alone."""

    sent: int
    """Number of requests of the class in the mix."""
    alone: ClassAlone
    """Figures of the class without the other classes."""
    inflation: LatencyInflation
    """How much longer than alone the requests of the class wait in the mix."""
    starvation: StarvationFigure | None
    """Requests that wait much longer than the median; None without TTFT."""


class JainFigures(msgspec.Struct, frozen=True, kw_only=True):
    """Jain's index for each meaning of "normalized latency", which the draft does not define."""

    headline: figures.IntervalFigure
    """Index of one value per request: its TTFT in the mix / median TTFT of its class alone."""
    by_class: figures.IntervalFigure
    """Index of one value per class: mean TTFT in the mix / median TTFT of the class alone."""
    per_class: float | None
    """Value of `by_class`."""
    per_request: float | None
    """Value of `headline`."""
    raw: float | None
    """Index of one value per request: its TTFT in the mix, not normalised."""
    slowdown: dict[str, float]
    """By class: mean TTFT in the mix / median TTFT of the class alone."""
    unfair_below: float
    """Index below which the server is called unfair."""


class FairnessMeasurements(msgspec.Struct, frozen=True, kw_only=True):
    """Public JSON of the test's figures."""

    rate_rps: float
    """Rate of the mix."""
    capacity: Capacity | None
    """Saturation rate of the mix; None if the user set the rate."""
    load_share: float | None
    """Rate of the mix as a share of the saturation rate."""
    tokens_per_second: float
    """Rate of input and output tokens in the mix."""
    isolation: str
    """Quantity whose rate is the same in the load of a class alone as in the mix: always `tokens`."""
    classes: dict[str, ClassFigures]
    jain: JainFigures | None
    """Jain's indexes; None if a class has no TTFT in the mix or alone."""


class _ClassRow(NamedTuple):
    """Row of a table: one request class."""

    name: str
    figures: ClassFigures


@dataclass(frozen=True, slots=True)
class _Class:
    """Measurements of a request class in the mix and alone."""

    name: str
    mixed: Measurement
    """Its requests in the mix with other classes."""
    alone: Measurement
    """Its requests in a load without other classes."""
    alone_rps: float
    """Rate of the load with this class alone."""


async def run(session: BenchSession, params: FairnessParams) -> TestResult:
    """Send each class alone, then the mix, and return the fairness figures (IETF 5.6.3, 5.6.4)."""
    mix = _mix(session, params)
    warm = mixes.closed_mix(
        mix, slots=8, requests=32, seed=session.seed + _SEEDS["warm-up"], counting=session.target.counting
    )
    capacity = None if params.rate is not None else await _capacity(session, params, mix, warm)
    rate = params.rate
    if rate is None:
        assert capacity is not None
        rate = params.share * capacity.rps

    def open_load(classes: mixes.ClassMix, rate_rps: float, seed: int) -> Load:
        return mixes.open_mix(
            classes,
            rate_rps=rate_rps,
            seed=seed,
            duration_s=params.duration / NS_PER_S,
            per_class=params.requests_per_class,
            counting=session.target.counting,
        )

    alone: dict[str, tuple[Measurement, float]] = {}
    for i, one in enumerate(mix.classes):
        session.report_remaining(f"{len(mix.classes) - i} classes alone, then the mix")
        single = mix.only_class(one.name)
        alone_rps = rate * mix.mean_tokens() / single.mean_tokens()
        load = open_load(single, alone_rps, session.seed + _SEEDS["alone"] + i)
        alone[one.name] = (await session.measure(f"alone/{one.name}", load, warm_by=warm), alone_rps)
    session.report_remaining("the mix")
    load = open_load(mix, rate, session.seed)
    mixed = await session.measure("mix", load, warm_by=warm)
    classes = [_Class(one.name, mixed.select_class(one.name), *alone[one.name]) for one in mix.classes]
    result = TestResult(configuration=figures.load_lines(load, mixed), main=mixed.name)
    measurements = result.measurements = FairnessMeasurements(
        rate_rps=rate,
        capacity=capacity,
        load_share=None if capacity is None else rate / capacity.rps,
        tokens_per_second=rate * mix.mean_tokens(),
        isolation="tokens",
        classes={one.name: _class_figures(one) for one in classes},
        jain=_jain(classes, session.seed),
    )
    result.configuration |= _configuration(mix, measurements)
    result.tables = _tables(measurements)
    result.charts = _charts(classes)
    _add_notes(result, mixed, classes, measurements)
    return result


def _mix(session: BenchSession, params: FairnessParams) -> mixes.ClassMix:
    content: ProseWords | RandomIds = ProseWords()
    if session.target.endpoint == "completions":
        content = RandomIds(min(CL100K_IDS, session.sut.tokenizer.vocabulary or CL100K_IDS))
    if params.workload == "synthetic-skewed":
        return mixes.skewed_classes(params.classes, content, per_class=params.requests_per_class)
    return mixes.ClassMix(params.classes, content)


async def _capacity(
    session: BenchSession, params: FairnessParams, mix: mixes.ClassMix, warm: Any
) -> Capacity:
    """Return the known capacity; if there is none, measure it with the mix of classes."""
    known = known_capacity(session, params.max_rate)
    if known is not None:
        return known
    return await find_capacity(
        session,
        lambda slots, requests: mixes.closed_mix(
            mix,
            slots=slots,
            requests=requests,
            seed=session.seed + _SEEDS["capacity"] + slots,
            counting=session.target.counting,
        ),
        params.slots_max,
        warm_by=warm,
    )


def _class_figures(one: _Class) -> ClassFigures:
    mixed, alone = one.mixed, one.alone
    ttft, ttft_alone = mixed.values("ttft_ns"), alone.values("ttft_ns")
    p50, p95, p99 = (
        figures.quantile_ratio(ttft_alone, ttft, p, paired=False) for p in figures.KEY_SHARES.values()
    )
    mean_mixed, mean_alone = mean(ttft), mean(ttft_alone)
    means = None if mean_mixed is None or not mean_alone else mean_mixed / mean_alone
    return ClassFigures(
        sent=mixed.n,
        **latency_rows(mixed),
        alone=ClassAlone(rate_rps=one.alone_rps, sent=alone.n, **latency_rows(alone)),
        inflation=LatencyInflation(p50, p95, p99, means),
        starvation=_starvation(ttft),
    )


def _starvation(ttft: Sequence[float]) -> StarvationFigure | None:
    waits = starvation(ttft)
    rate = None if waits is None else share_interval(waits.starved_requests, waits.n)
    if waits is None or rate is None:
        return None
    return StarvationFigure(
        **msgspec.structs.asdict(figures.interval_figure(rate)),
        starved=waits.starved_requests,
        median=waits.median,
        threshold=waits.threshold,
        medians=STARVED_MEDIANS,
    )


def _jain(classes: Sequence[_Class], seed: int) -> JainFigures | None:
    """Return Jain's index over requests and over classes; None if a class has no TTFT in the mix or alone."""
    latencies = {one.name: one.mixed.values("ttft_ns") for one in classes}
    alone = {one.name: one.alone.values("ttft_ns") for one in classes}
    medians = {name: percentile(values, 0.5) for name, values in alone.items()}
    isolated = {name: median for name, median in medians.items() if median}
    if len(isolated) < len(classes) or not all(latencies.values()):
        return None
    readings = jain_readings(latencies, isolated)
    intervals = _jain_intervals(latencies, alone, seed)
    count = sum(map(len, latencies.values()))
    method = "bootstrap of each class's requests, percentiles"
    by_reading = {
        name: figures.IntervalFigure(
            value=getattr(readings, name), low=low, high=high, n=count, method=method, reading=name
        )
        for name, (low, high) in intervals.items()
    }
    return JainFigures(
        headline=by_reading["per_request"],
        by_class=by_reading["per_class"],
        per_class=readings.per_class,
        per_request=readings.per_request,
        raw=readings.raw,
        slowdown=dict(readings.inflation),
        unfair_below=UNFAIR_BELOW,
    )


def _jain_intervals(
    mixed: Mapping[str, Sequence[float]], alone: Mapping[str, Sequence[float]], seed: int
) -> dict[str, tuple[float | None, float | None]]:
    """Return bootstrap intervals of Jain's index over requests (`per_request`) and classes (`per_class`)."""
    if min(map(len, (*mixed.values(), *alone.values()))) < 2:
        return dict.fromkeys(("per_request", "per_class"), (None, None))
    random = np.random.default_rng(seed)
    class_samples = [(np.asarray(mixed[name]), np.asarray(alone[name])) for name in mixed]
    samples: dict[str, list[float]] = {"per_request": [], "per_class": []}
    for _ in range(RESAMPLES):
        normal = [random.choice(a, len(a)) / np.median(random.choice(b, len(b))) for a, b in class_samples]
        samples["per_request"].append(_jain_index(np.concatenate(normal)))
        samples["per_class"].append(_jain_index(np.array([one.mean() for one in normal])))
    ends = {name: np.percentile(values, (2.5, 97.5)) for name, values in samples.items()}
    return {name: (float(low), float(high)) for name, (low, high) in ends.items()}


def _jain_index(x: NDArray[np.float64]) -> float:
    return float(x.sum() ** 2 / (len(x) * (x**2).sum()))


def _configuration(mix: mixes.ClassMix, measurements: FairnessMeasurements) -> dict[str, str]:
    classes = "; ".join(
        f"{one.name} {one.share * 100:.3g}%, input {one.input[0]:,}-{one.input[1]:,}, output"
        f" {one.output[0]:,}-{one.output[1]:,}"
        for one in mix.classes
    )
    by_class = measurements.classes.items()
    alone = ", ".join(f"{name} {one.alone.rate_rps:.3g}/s" for name, one in by_class)
    counts = ", ".join(f"{name} {one.sent:,}" for name, one in by_class)
    share = measurements.load_share
    level = "as given" if share is None else f"{share:.0%} of saturation"
    return {
        "Request classes": classes,
        "Load level": f"{measurements.rate_rps:.3g} requests/s, {level}",
        "Isolation baseline": f"each class alone at as many tokens per second as the mix: {alone}",
        "Requests by class": counts,
    }


def _tables(measurements: FairnessMeasurements) -> list[ReportTable]:
    classes = [_ClassRow(name.title(), one) for name, one in measurements.classes.items()]
    jain = measurements.jain
    metrics = {"Jain's Fairness Index": "-" if jain is None else f"{jain.headline.value:.2f}"}
    metrics["Jain's index of class means"] = "-" if jain is None else f"{jain.per_class:.2f}"
    metrics |= {
        f"{name} Class Starvation": figures.with_interval(one.starvation, ".1%") for name, one in classes
    }
    rows = []
    for name, one in classes:
        for state, row in (("alone", one.alone.ttft), ("mixed", one.ttft)):
            cells = (figures.ms_of(row, share) for share in figures.KEY_SHARES)
            rows.append([f"{name}, {state}", *cells])
        growth = (figures.with_interval(getattr(one.inflation, share), ".2f") for share in figures.KEY_SHARES)
        rows.append([f"{name}, inflation", *growth])
    heads = ["Class", "TTFT P50", "TTFT P95", "TTFT P99"]
    return [
        figures.table_of("Table 8: Per-Class Results", classes, TABLE_8),
        figures.metric_table("Table 9: Fairness Metrics", metrics),
        ReportTable("TTFT alone and in the mix, and latency inflation (5.6.4)", heads, rows),
        *([] if jain is None else [_readings_table(jain)]),
    ]


def _figures_cell(cell: figures.Cell) -> figures.Cell:
    return lambda row: cell(row.figures)


TABLE_8: Final[Mapping[str, figures.Cell]] = {
    "Class": figures.attribute_cell("name"),
    "Count": lambda row: f"{row.figures.ttft.n}",
    **{
        name: _figures_cell(cell)
        for name, cell in figures.latency_columns("ttft p50", "ttft p99", "tpot p50", "tpot p99").items()
    },
}


def _readings_table(jain: JainFigures) -> ReportTable:
    slowdown = ", ".join(f"{name} {x:.2f}" for name, x in jain.slowdown.items())
    rows = [
        ["by request: TTFT / median of its class alone", figures.with_interval(jain.headline, ".3f")],
        [f"by class: mean TTFT / median alone ({slowdown})", figures.with_interval(jain.by_class, ".3f")],
        ["by request: TTFT as it is", f"{jain.raw:.3f}"],
    ]
    return ReportTable("Jain's index by the meaning of normalized latency", ["x", "Index"], rows)


def _charts(classes: Sequence[_Class]) -> list[ChartSpec]:
    series = [
        figures.cdf_series(f"{one.name}, {state}", values)
        for one in classes
        for state, values in (("mixed", one.mixed.values("ttft_ns")), ("alone", one.alone.values("ttft_ns")))
        if values
    ]
    title = "TTFT of each class, alone and in the mix"
    chart = ChartSpec(title, "cdf", "TTFT (ms)", "share of requests", series, log_x=True)
    return [chart] if series else []


def _add_notes(
    result: TestResult,
    mixed: Measurement,
    classes: Sequence[_Class],
    measurements: FairnessMeasurements,
) -> None:
    capacity = measurements.capacity
    result.notes += [
        "Jain's index is of requests: TTFT in the mix / the median of the class alone; any spread lowers it",
        *figures.legend(measurements.classes.values(), "ttft", "tpot"),
        "intervals take requests for independent; those of a queue are not quite, so they are rather narrow",
    ]
    if capacity is not None:
        result.notes.append(f"saturation: {capacity.rps:.4g} requests/s of the mix ({capacity.how})")
        if not capacity.saturated:
            result.deviations.append(
                "5.6.2: saturation was not found, so the load is a share of the most that was tried"
            )
    else:
        result.deviations.append("5.6.2: the rate was given; what share of saturation it is was not measured")
    for name, load in (("the mix", mixed), *((f"{one.name} alone", one.alone) for one in classes)):
        delivered = completion_ratio_if_overloaded(load)
        if delivered is not None:
            result.deviations.append(
                f"5.6.2: {name} was above saturation: answers came at {delivered:.0%} of the rate of"
                " requests, and latencies are those of a queue that grows"
            )
    failed = mixed.n - len(mixed.successful_rows())
    if failed:
        result.notes.append(f"{failed:,} of {mixed.n:,} answers of the mix did not come whole: in no figure")
    jain = measurements.jain
    if jain is None:
        result.notes.append("no Jain's index: a class has no TTFT")
        return
    low = [
        of
        for of, index in (("requests", jain.per_request), ("class means", jain.per_class))
        if index is not None and index < UNFAIR_BELOW
    ]
    if low:
        statement = f"Jain's index of {' and of '.join(low)} is below {UNFAIR_BELOW}"
        result.notes.append(f"{statement}: significant unfairness (5.6.4)")


def _expected_loads(session: BenchSession, params: FairnessParams) -> ExpectedLoads:
    mix, n = _mix(session, params), params.requests_per_class
    # A load of one class has the same token rate as the mix. Convert its number of requests to the number of
    # requests of the mix that have as many tokens, because `rate` and `share` count requests of the mix.
    requests = [n * mix.only_class(one.name).mean_tokens() / mix.mean_tokens() for one in mix.classes]
    requests.append(n / min(one.share for one in mix.classes))
    loads = [
        ExpectedLoad(number, params.duration / NS_PER_S, rate_rps=params.rate, share=params.share)
        for number in requests
    ]
    is_known = params.rate is not None or known_capacity(session, params.max_rate) is not None
    return ExpectedLoads(loads if is_known else [*expected_search(session, params.slots_max), *loads])


TEST: Final = BenchTest(
    name="fairness",
    params=FairnessParams,
    run=run,
    figures=("load", "ttft", "tpot", "e2e"),
    expected=_expected_loads,
    quick={"requests_per_class": 20, "duration": Duration(15 * NS_PER_S), "slots_max": 32},
    forfeits=("5.6.2-p2", "5.6.3-p2"),
    check=check,
)

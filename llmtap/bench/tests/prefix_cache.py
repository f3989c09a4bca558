"""Prefix Cache Effectiveness (IETF draft, 5.7): the effect of a cache of shared prefixes.

`run` sends loads of `mixes.py` to the arms `cache_off` and `cache_on` of the bench file, and compares each
request with the same request in the other arm. Repeats have different requests and are independent runs (6.1,
6.3). A repeat measures three states:

- Off: the same requests as cold, with the cache off. If both arms share one running server (they differ only
  in headers or body), cold is measured first, so that the requests of off cannot be in its cache; otherwise
  the order is random.
- Cold: the cache is on, but contains none of the prompts, because all words of prompts and warm-ups are new
  (`texts` sets their seed).
- Warm: the cache is on, and each prefix was sent once before. The words differ from those of cold.

If servers report cached tokens, `run` measures the hit rate, and checks that off and cold have no hits.
"""

import secrets
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import exp, log
from random import Random
from typing import Annotated, Final, NamedTuple

import msgspec
from msgspec import Meta

from llmtap.bench.run import figures, levels, test
from llmtap.bench.run.measurement import Measurement, SteadyPart, steady_part_of
from llmtap.bench.run.pace import ExpectedLoad, ExpectedLoads, open_loops
from llmtap.bench.run.session import BenchSession, Load
from llmtap.bench.tests.mixes import Prefixes, prefixes_of
from llmtap.errors import ConfigError
from llmtap.metrics.comparison import cache_hit_rate, increase
from llmtap.metrics.statistics import mean
from llmtap.options.fields import opt
from llmtap.workload.plan import NO_CONTEXT

OFF: Final = "cache_off"
ON: Final = "cache_on"
STATES: Final = {"off": "Cache Disabled", "cold": "Cache (Cold)", "warm": "Cache (Warm)"}
TEXTS_FILE: Final = "texts.json"
_SEED_STEP: Final = 1_000
"""Difference between the seeds of two repeats, so that no two loads have the same seed."""


class StateRows(msgspec.Struct, frozen=True):
    """TTFT in each state of the cache."""

    off: figures.LatencyRow
    """Cache switched off."""
    cold: figures.LatencyRow
    """Cache on, but without the prefixes of the requests."""
    warm: figures.LatencyRow
    """Cache on, with the prefixes of the requests."""


class TtftReduction(msgspec.Struct, frozen=True, kw_only=True):
    """Reduction of TTFT by the cache, as a share of TTFT with the cache off."""

    p50: figures.IntervalFigure | None
    """Reduction of P50 (below: of P95, P99), computed from the pairs of all repeats together."""
    p95: figures.IntervalFigure | None
    p99: figures.IntervalFigure | None
    by_repeats: figures.IntervalFigure | None
    """Reduction of P50, as a geometric mean of one value per repeat."""
    pairs: int
    """Number of requests that completed both with the cache off and on."""


class Reductions(msgspec.Struct, frozen=True):
    """Reduction of TTFT with a cold and with a warm cache."""

    cold: TtftReduction
    """Reduction with a cache that has none of the prefixes."""
    warm: TtftReduction
    """Reduction with a cache that has all prefixes."""


class HitRate(msgspec.Struct, frozen=True):
    """Share of prefix tokens that came from the cache."""

    value: float
    cached_tokens: int
    """Number of prefix tokens that came from the cache."""
    prefix_tokens: int
    """Number of prefix tokens in the prompts."""
    answers_that_tell: int
    """Number of responses that report cached tokens."""


class HitRates(msgspec.Struct, frozen=True):
    """Hit rate in each state of the cache; None if the server never reports cached tokens."""

    off: HitRate | None
    cold: HitRate | None
    """Cache on, but without the prefixes of the requests."""
    warm: HitRate | None


class StateRate(msgspec.Struct, frozen=True):
    """Rate in each repeat (`runs`), and the mean of these rates."""

    mean: float | None
    runs: list[float]
    """Rate in each repeat."""


class CacheThroughput(msgspec.Struct, frozen=True):
    """Rate of closed loops with the cache off and with a warm cache."""

    unit: str
    off: StateRate
    """Rates with the cache off."""
    on: StateRate
    """Rates with a warm cache."""
    improvement: figures.IntervalFigure
    """Increase of the rate by the cache, as a share of the rate without."""


class PrefixMeasurements(msgspec.Struct, frozen=True, kw_only=True):
    """Measurements of IETF 5.7.4: the states cold and warm compared with off."""

    rate_rps: float
    capacity: levels.Capacity | None
    """Capacity from which the rate was computed; None if the user set the rate."""
    ttft: StateRows
    reduction: Reductions
    """How much the cache shortens TTFT."""
    hit_rate: HitRates
    throughput: CacheThroughput | None


class _StateRow(NamedTuple):
    """Row of a table: TTFT in one state of the cache."""

    name: str
    ttft: figures.LatencyRow


class _EffectRow(NamedTuple):
    """Row of a table: reduction of TTFT in one state of the cache."""

    state: str
    reduction: TtftReduction


class PrefixCacheParams(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Setup (IETF 5.7.2). Sharing and prefix lengths are the workload's by default."""

    workload: Annotated[
        str, opt("workload: code-completion, conversation, or FILE.toml with generated texts")
    ] = "code-completion"
    sharing: Annotated[
        Annotated[float, Meta(ge=0, le=1)] | None,
        opt("fraction of the requests with a shared prefix"),
    ] = None
    prefix_tokens: Annotated[tuple[int, int] | None, opt("range of prefix lengths, tokens")] = None
    prefixes: Annotated[test.Count | None, opt("number of different prefixes")] = None
    output_tokens: test.OutputTokens = None
    requests: Annotated[int, opt("requests per run; percentiles are over all repeats", ge=1)] = 400
    repeats: Annotated[int, opt("independent runs of each configuration; 6.3 demands 3", ge=1)] = 3
    rate: Annotated[test.Rate | None, opt("rate, requests/s; default: `share` of max_rate")] = None
    max_rate: Annotated[
        test.Rate | None,
        opt("capacity without the cache, requests/s; default: as measured"),
    ] = None
    share: Annotated[float, opt("load as a fraction of max_rate", gt=0, le=1)] = 0.5
    concurrency: Annotated[int, opt("concurrent requests in throughput runs; 0: no such runs", ge=0)] = 16
    throughput_requests: Annotated[int, opt("requests per throughput run", ge=1)] = 200
    slots_max: test.SlotsMax = 128
    texts: Annotated[
        Annotated[int, Meta(ge=0)] | None,
        opt("random seed of the words, to repeat another run's requests; default: random"),
    ] = None


@dataclass(slots=True)
class PrefixRun:
    """Repeat of the test: one measurement per state of the cache."""

    contexts: Sequence[int]
    """For each row, the index of its shared prefix, or NO_CONTEXT."""
    lengths: Sequence[int]
    """Number of tokens of each prefix, by index."""
    states: dict[str, Measurement] = field(default_factory=dict)
    """By state of the cache: measurement of the load."""

    def prefix_tokens(self, row: int) -> int:
        """Return the number of tokens of a row's shared prefix."""
        context = self.contexts[row]
        return 0 if context == NO_CONTEXT else self.lengths[context]


def check(session: BenchSession, params: PrefixCacheParams) -> None:
    """Raise ConfigError if the arms are missing or equal, or the workload shares no prefix."""
    for name, verb in ((OFF, "disables"), (ON, "enables")):
        if name not in session.arms:
            raise ConfigError(
                f"[arms.{name}]",
                "is missing: the test compares the cache switched off and on (IETF draft, section 5.7.2)",
                f"add it to the file of --config, with headers, body, url or an apply command that {verb}"
                " prefix caching",
            )
    off, on = (msgspec.structs.replace(session.arms[name], about="") for name in (OFF, ON))
    if off == on:
        problem = f"equals [arms.{ON}], so nothing disables the cache"
        raise ConfigError(f"[arms.{OFF}]", problem, "add headers, body, url or apply that disables it")
    if params.prefix_tokens is not None and not 1 <= params.prefix_tokens[0] <= params.prefix_tokens[1]:
        raise ConfigError(
            "prefix_tokens",
            f"expected [LOW, HIGH] with 1 <= LOW <= HIGH, got {list(params.prefix_tokens)}",
            "such as prefix_tokens = [512, 1024]",
        )
    _prefixes(session, params)


async def run(session: BenchSession, params: PrefixCacheParams) -> test.TestResult:
    """Send the same loads without and with a cache, and return its effect on TTFT (IETF 5.7.3, 5.7.4)."""
    prefixes = _prefixes(session, params)
    texts = _TextSeeds(session, params.texts)
    warm_by = replace(prefixes, output_tokens=levels.WARM_TOKENS).closed_load(
        32, session.seed - 1, texts.new_seed(), 8
    )
    capacity = None if params.rate is not None else await _capacity(session, params, prefixes, texts, warm_by)
    rate = params.rate
    if rate is None:
        assert capacity is not None
        rate = params.share * capacity.rps
    order = Random(f"{session.seed}/arms")
    cold_first = [not _has_separate_caches(session) or order.random() < 0.5 for _ in range(params.repeats)]
    runs: list[PrefixRun] = []
    last: Load | None = None
    for repeat in range(params.repeats):
        session.report_remaining(f"{params.repeats - repeat} of {params.repeats} repeats")
        seed = session.seed + _SEED_STEP * repeat
        shape = prefixes.open_load(params.requests, seed, 0, rate)
        cold, warm = (
            prefixes.open_load(params.requests, seed, texts.seed_for(f"{repeat}/{state}", shape), rate)
            for state in ("cold", "warm")
        )
        primer = prefixes.primer(seed, texts.seed_by_step[f"{repeat}/warm"])
        prefix_run = PrefixRun(*prefixes.row_prefixes(params.requests, seed))
        for state in ("cold", "warm", "off") if cold_first[repeat] else ("off", "cold", "warm"):
            prefix_run.states[state] = await session.measure(
                f"{repeat}/{state}",
                warm if state == "warm" else cold,
                arm=OFF if state == "off" else ON,
                warm_by=warm_by,
                prime=primer if state == "warm" else None,
            )
        runs.append(prefix_run)
        last = cold
    assert last is not None
    rates = await _throughput(session, params, prefixes, texts, warm_by, cold_first)
    result = test.TestResult(configuration=figures.load_lines(last, runs[-1].states["off"]))
    result.main = "0/off"
    measurements = result.measurements = prefix_figures(runs, rate, capacity, rates)
    result.configuration |= _configuration(params, prefixes, runs, rate, texts)
    result.tables = _tables(measurements)
    result.charts = _charts(runs)
    _add_notes(result, params, runs, measurements, cold_first)
    return result


def _prefixes(session: BenchSession, params: PrefixCacheParams) -> Prefixes:
    return prefixes_of(
        params.workload,
        fraction=params.sharing,
        tokens=params.prefix_tokens,
        contexts=params.prefixes,
        output_tokens=params.output_tokens,
        counting=session.target.counting,
    )


def _has_separate_caches(session: BenchSession) -> bool:
    """Return whether the two arms have separate caches: two servers, or one that a command switches."""
    off, on = session.arms[OFF], session.arms[ON]
    if off.has_switch or on.has_switch:
        return True
    return (off.url or session.target.url) != (on.url or session.target.url)


class _TextSeeds:
    """Seeds of the words of each load: a load measured before keeps its seed, other loads get a new one."""

    def __init__(self, session: BenchSession, first_seed: int | None) -> None:
        """`first_seed`: seed of the first load (parameter `texts`), + 1 for each later load; None: random."""
        self._folder = session.folder
        self._first_seed = first_seed
        """Seed of the first new load, and the next numbers of later ones; None: seeds are random."""
        self._seeds: dict[str, int] = self._folder.read_json(TEXTS_FILE) or {}
        """By load of an earlier command: its seed."""
        self.seed_by_step: dict[str, int] = {}
        """By load of this command: its seed, for the report."""

    def seed_for(self, step: str, shape: Load) -> int:
        """Return the seed of a load. An interrupted load gets a new one: a cache can have its prompts.

        `shape`: load with the same lengths and arrivals; a stored seed is used only if these are unchanged.
        """
        if step not in self.seed_by_step:
            key = f"{step} {shape.fingerprint()}"
            if self._first_seed is not None:
                self._seeds[key] = self._first_seed + len(self.seed_by_step)
            elif key not in self._seeds or self._folder.step(step).read_json("step.json") is None:
                self._seeds[key] = self.new_seed()
            self._folder.write_json(TEXTS_FILE, self._seeds)
            self.seed_by_step[step] = self._seeds[key]
        return self.seed_by_step[step]

    def new_seed(self) -> int:
        return secrets.randbits(48)


async def _capacity(
    session: BenchSession, params: PrefixCacheParams, prefixes: Prefixes, texts: _TextSeeds, warm_by: Load
) -> levels.Capacity:
    is_default = params.sharing is None and params.prefix_tokens is None and params.output_tokens is None
    known = levels.known_capacity(session, params.max_rate, params.workload if is_default else None)
    if known is not None:
        return known

    def load_of(slots: int, requests: int) -> Load:
        seed = session.seed + 7 * _SEED_STEP + slots
        words = texts.seed_for(
            f"capacity/{slots:04d}-at-a-time", prefixes.closed_load(requests, seed, 0, slots)
        )
        return prefixes.closed_load(requests, seed, words, slots)

    return await levels.find_capacity(session, load_of, params.slots_max, arm=OFF, warm_by=warm_by)


async def _throughput(
    session: BenchSession,
    params: PrefixCacheParams,
    prefixes: Prefixes,
    texts: _TextSeeds,
    warm_by: Load,
    cold_first: Sequence[bool],
) -> CacheThroughput | None:
    """Return the rate of closed loops with the cache off and with a warm cache; None if `concurrency` is 0.

    The rate is output tokens per second or, without token counts, requests per second.
    """
    if not params.concurrency:
        return None
    by_state: dict[str, list[SteadyPart]] = {"off": [], "on": []}
    for repeat, first in enumerate(cold_first):
        session.report_remaining(f"throughput: {len(cold_first) - repeat} of {len(cold_first)} repeats")
        seed = session.seed + _SEED_STEP * repeat + 1
        count = params.throughput_requests
        words = texts.seed_for(
            f"{repeat}/throughput-on", prefixes.closed_load(count, seed, 0, params.concurrency)
        )
        load = prefixes.closed_load(count, seed, words, params.concurrency)
        for state in ("on", "off") if first else ("off", "on"):
            measured = await session.measure(
                f"{repeat}/throughput-{state}",
                load,
                arm=OFF if state == "off" else ON,
                warm_by=warm_by,
                prime=prefixes.primer(seed, words) if state == "on" else None,
            )
            by_state[state].append(steady_part_of(measured))
    known = all(one.output_tps is not None for runs in by_state.values() for one in runs)
    off, on = (
        [(one.output_tps if known else one.completed_rps) or 0.0 for one in by_state[s]] for s in by_state
    )
    gains = [gain for a, b in zip(off, on, strict=True) if (gain := increase(a, b)) is not None]
    interval = figures.mean_over_repeats(gains)
    return CacheThroughput(
        "output tokens/s" if known else "requests/s",
        StateRate(mean(off), off),
        StateRate(mean(on), on),
        figures.IntervalFigure(
            value=mean(gains),
            low=None if interval is None else interval.low,
            high=None if interval is None else interval.high,
            n=len(off),
            p=None if interval is None else interval.p,
        ),
    )


def prefix_figures(
    runs: Sequence[PrefixRun], rate: float, capacity: levels.Capacity | None, rates: CacheThroughput | None
) -> PrefixMeasurements:
    return PrefixMeasurements(
        rate_rps=rate,
        capacity=capacity,
        ttft=StateRows(*(figures.latency_row(_ttfts(runs, state), figures.KEY_SHARES) for state in STATES)),
        reduction=Reductions(_reduction(runs, "cold"), _reduction(runs, "warm")),
        hit_rate=HitRates(*(_hit_rate(runs, state) for state in STATES)),
        throughput=rates,
    )


def _ttfts(runs: Iterable[PrefixRun], state: str) -> list[float]:
    return [value for one in runs for value in one.states[state].values_by_row("ttft_ns").values()]


def _reduction(runs: Sequence[PrefixRun], state: str) -> TtftReduction:
    """Return by how much a state of the cache reduces the TTFT, compared with the cache off."""
    pairs = [(one.states["off"], one.states[state]) for one in runs]
    off, on = figures.paired_values(pairs, "ttft_ns")
    p50, p95, p99 = (
        _reduction_of_ratio(figures.quantile_ratio(off, on, p, paired=True))
        for p in figures.KEY_SHARES.values()
    )
    single = [
        figures.quantile_ratio(*figures.paired_values([one], "ttft_ns"), 0.5, paired=True) for one in pairs
    ]
    logs = figures.mean_over_repeats([log(one.value) for one in single if one is not None and one.value])
    if logs is not None:
        value, low, high = (None if end is None else exp(end) for end in (logs.value, logs.low, logs.high))
        logs = msgspec.structs.replace(logs, value=value, low=low, high=high)
    return TtftReduction(p50=p50, p95=p95, p99=p99, by_repeats=_reduction_of_ratio(logs), pairs=len(off))


def _reduction_of_ratio(ratio: figures.IntervalFigure | None) -> figures.IntervalFigure | None:
    """Convert the ratio of times with cache on / off to the reduction (off - on) / off, with its interval."""
    if ratio is None:
        return None
    ends = (ratio.value, ratio.high, ratio.low)
    value, low, high = (None if end is None else 1 - end for end in ends)
    return msgspec.structs.replace(ratio, value=value, low=low, high=high)


def _hit_rate(runs: Sequence[PrefixRun], state: str) -> HitRate | None:
    cached = prefix = reported = 0
    for prefix_run in runs:
        hits = prefix_run.states[state].values_by_row("cached_tokens")
        reported += len(hits)
        for row in prefix_run.states[state].values_by_row("e2e_ns"):
            cached += min(int(hits.get(row, 0)), prefix_run.prefix_tokens(row))
            prefix += prefix_run.prefix_tokens(row)
    rate = cache_hit_rate(cached, prefix)
    if not reported or rate is None:
        return None
    return HitRate(rate, cached, prefix, reported)


def hot_prefix_count(runs: Sequence[PrefixRun]) -> int:
    """Return the number of prefixes that were mostly cached when a cold run sent them for the first time.

    A number above 0 means that the cache was not empty.
    """
    hot = 0
    for prefix_run in runs:
        hits = prefix_run.states["cold"].values_by_row("cached_tokens")
        first = {context: row for row, context in reversed([*enumerate(prefix_run.contexts)])}
        first.pop(NO_CONTEXT, None)
        hot += sum(hits.get(row, 0) > prefix_run.prefix_tokens(row) / 2 for row in first.values())
    return hot


def _configuration(
    params: PrefixCacheParams,
    prefixes: Prefixes,
    runs: Sequence[PrefixRun],
    rate: float,
    texts: _TextSeeds,
) -> dict[str, str]:
    rows = [one.prefix_tokens(row) for one in runs for row in range(len(one.contexts))]
    shared = [tokens for tokens in rows if tokens]
    lengths = f"{min(shared):,}-{max(shared):,} tokens" if shared else "none"
    seconds = sum(one.seconds for run in runs for one in run.states.values())
    return {
        "Request count": f"{params.requests:,} in each of {3 * len(runs)} runs",
        "Test duration": f"{seconds:.0f} s in all",
        "Shared prefix": f"{prefixes.sharing.contexts} different ones, {lengths}",
        "Sharing fraction": f"{len(shared) / len(rows):.1%} of the requests"
        f" ({prefixes.sharing.fraction:.0%} requested)",
        "Load level": f"{rate:.3g} requests/s",
        "Seeds of the words": ", ".join(f"{step} {seed}" for step, seed in texts.seed_by_step.items()),
    }


def _tables(measurements: PrefixMeasurements) -> list[test.ReportTable]:
    states = [_StateRow(label, getattr(measurements.ttft, state)) for state, label in STATES.items()]
    reduction = measurements.reduction
    effects = [_EffectRow("cold", reduction.cold), _EffectRow("warm", reduction.warm)]
    metrics = {}
    for state, hits in (("cold", measurements.hit_rate.cold), ("warm", measurements.hit_rate.warm)):
        metrics[f"Cache hit rate, {state}"] = "not measurable" if hits is None else f"{hits.value:.1%}"
    rates = measurements.throughput
    if rates is not None:
        for name, rate in (("off", rates.off), ("on", rates.on)):
            metrics[f"Throughput, cache {name}"] = f"{rate.mean:.4g} {rates.unit}"
    improvement = "not measured" if rates is None else figures.with_interval(rates.improvement, ".1%")
    metrics["Throughput improvement"] = improvement
    return [
        figures.table_of("Table 10: Cache Effectiveness", states, TABLE_10),
        figures.table_of(
            "TTFT reduction on identical rows, with 95 % intervals (5.7.4)", effects, REDUCTION_COLUMNS
        ),
        figures.metric_table("Hit rate and throughput (5.7.4)", metrics),
    ]


def _reduction_cell(name: str) -> figures.Cell:
    return lambda one: figures.with_interval(getattr(one.reduction, name), ".1%")


TABLE_10: Final[Mapping[str, figures.Cell]] = {
    "Configuration": figures.attribute_cell("name"),
    **figures.latency_columns("ttft p50", "ttft p95", "ttft p99"),
}
REDUCTION_COLUMNS: Final[Mapping[str, figures.Cell]] = {
    "": lambda one: f"TTFT reduction, {one.state}",
    **{f"at {share.upper()}": _reduction_cell(share) for share in figures.KEY_SHARES},
    "at P50, over repeats": _reduction_cell("by_repeats"),
}


def _charts(runs: Sequence[PrefixRun]) -> list[test.ChartSpec]:
    series = [
        figures.cdf_series(label, values)
        for state, label in STATES.items()
        if (values := _ttfts(runs, state))
    ]
    title = "TTFT without the cache, with an empty one, and with the prefixes in it"
    chart = test.ChartSpec(title, "cdf", "TTFT (ms)", "share of requests", series, log_x=True)
    return [chart] if series else []


def _add_notes(
    result: test.TestResult,
    params: PrefixCacheParams,
    runs: Sequence[PrefixRun],
    measurements: PrefixMeasurements,
    cold_first: Sequence[bool],
) -> None:
    capacity, hit_rate = measurements.capacity, measurements.hit_rate
    result.notes.append(
        "off and cold have the same requests; warm has the same lengths and arrivals, and different text"
    )
    result.notes.append(f"cold ran before off in {sum(cold_first)} of {len(cold_first)} repeats")
    result.notes += figures.legend([measurements.ttft], *STATES)
    if hit_rate.warm is None and hit_rate.cold is None:
        result.notes.append("the server does not tell how many tokens came from its cache: no hit rate")
    if capacity is not None:
        result.notes.append(f"capacity without the cache: {capacity.rps:.4g} requests/s ({capacity.how})")
    off = hit_rate.off
    if off is not None and off.cached_tokens:
        result.deviations.append(
            f"5.7.2: with the cache disabled, {off.value:.1%} of prefix tokens came from it: it is on"
        )
    hot = hot_prefix_count(runs)
    if hot:
        result.deviations.append(
            f"5.7.3: {hot} prefixes were in the cache before the cold run sent them: it was not cold"
        )
    if len(runs) < figures.RUNS_MIN:
        result.deviations.append(
            f"6.3: {len(runs)} independent runs of each configuration, {figures.RUNS_MIN} wanted"
        )
    for one in runs:
        for measured in one.states.values():
            delivered = levels.completion_ratio_if_overloaded(measured)
            if delivered is not None:
                result.deviations.append(
                    f"{measured.name} was above saturation: answers came at {delivered:.0%} of the rate of"
                    " requests, and the reduction is that of a queue"
                )


def _expected_loads(session: BenchSession, params: PrefixCacheParams) -> ExpectedLoads:
    share, rate = (params.share, params.max_rate) if params.rate is None else (1.0, params.rate)
    loads = open_loops(params.requests, [share] * 3 * params.repeats, rate)
    if rate is None:
        loads = [*levels.expected_search(session, params.slots_max), *loads]
    if params.concurrency:
        closed = ExpectedLoad(params.throughput_requests, slots=params.concurrency)
        loads += [closed] * 2 * params.repeats
    return ExpectedLoads(loads, warmups=2)


TEST: Final = test.BenchTest(
    name="prefix-cache",
    params=PrefixCacheParams,
    run=run,
    expected=_expected_loads,
    figures=("load", "ttft", "tokens"),
    quick={
        "requests": 24,
        "repeats": 1,
        "output_tokens": 16,
        "concurrency": 8,
        "throughput_requests": 32,
        "slots_max": 8,
    },
    check=check,
    arms=(OFF, ON),
)

"""Prefix Cache Effectiveness (IETF draft, 5.7): the effect of a cache of shared prefixes.

`run` compares the arms `cache_off` and `cache_on` of the bench file, each row with itself, with loads of
`mixes.py`. Repeats have rows of their own and are independent runs (6.1, 6.3). A repeat measures three
states:

- Off: with the cache off, the requests of cold. Cold comes first if both share one running server (arms that
  differ only by headers or body); otherwise the order is random.
- Cold: with an empty cache: words of prompts and warm-ups are new each time (`texts` sets their seed).
- Warm: with words of its own, after each of its prefixes was sent once.

If servers report cached tokens, the hit rate is measured, and off and cold are checked.
"""

import secrets
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import exp, log
from random import Random
from typing import Annotated, Any, Final

import msgspec
from msgspec import Meta

from llmtap.bench.run import figures, levels, test
from llmtap.bench.run.measurement import Measurement, Steady, steady_of
from llmtap.bench.run.session import BenchSession, Load
from llmtap.bench.tests.mixes import Prefixes, prefixes_of
from llmtap.errors import ConfigError
from llmtap.metrics.comparison import cache_hit_rate, increase
from llmtap.metrics.statistics import mean
from llmtap.workload.plan import NO_CONTEXT

OFF: Final = "cache_off"
ON: Final = "cache_on"
STATES: Final = {"off": "Cache Disabled", "cold": "Cache (Cold)", "warm": "Cache (Warm)"}
KEPT: Final = "texts.json"
_APART: Final = 1_000
"""Difference between seeds of repeats, so that no two loads share a seed."""


class PrefixCacheParams(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Setup (5.7.2). Sharing and prefix lengths are the workload's by default."""

    workload: Annotated[
        str, Meta(description="workload: code-completion, conversation, or FILE.toml with generated texts")
    ] = "code-completion"
    sharing: Annotated[
        Annotated[float, Meta(ge=0, le=1)] | None,
        Meta(description="fraction of the requests with a shared prefix"),
    ] = None
    prefix_tokens: Annotated[tuple[int, int] | None, Meta(description="range of prefix lengths, tokens")] = (
        None
    )
    prefixes: Annotated[test.Count | None, Meta(description="number of different prefixes")] = None
    output_tokens: test.OutputTokens = None
    requests: Annotated[int, Meta(ge=1, description="requests per run; percentiles are over all repeats")] = (
        400
    )
    repeats: Annotated[
        int, Meta(ge=1, description="independent runs of each configuration; 6.3 demands 3")
    ] = 3
    rate: Annotated[test.Rate | None, Meta(description="rate, requests/s; default: `share` of max_rate")] = (
        None
    )
    max_rate: Annotated[
        test.Rate | None,
        Meta(
            description="capacity without the cache, requests/s; default: as measured",
        ),
    ] = None
    share: Annotated[float, Meta(gt=0, le=1, description="load as a fraction of max_rate")] = 0.5
    concurrency: Annotated[
        int, Meta(ge=0, description="concurrent requests in throughput runs; 0: no such runs")
    ] = 16
    throughput_requests: Annotated[int, Meta(ge=1, description="requests per throughput run")] = 200
    slots_max: test.SlotsMax = 128
    texts: Annotated[
        Annotated[int, Meta(ge=0)] | None,
        Meta(description="random seed of the words, to repeat another run's requests; default: random"),
    ] = None


@dataclass(slots=True)
class PrefixRun:
    """Repeat of the test: one measurement per state of the cache."""

    contexts: Sequence[int]
    """Number of the shared prefix by row, or NO_CONTEXT."""
    lengths: Sequence[int]
    states: dict[str, Measurement] = field(default_factory=dict)

    def prefix(self, row: int) -> int:
        context = self.contexts[row]
        return 0 if context == NO_CONTEXT else self.lengths[context]


def check(session: BenchSession, params: PrefixCacheParams) -> None:
    for name, does in ((OFF, "disables"), (ON, "enables")):
        if name not in session.arms:
            raise ConfigError(
                f"[arms.{name}]", "is missing: the test has to run with the cache off, and on (5.7.2)",
                f"in the file of --config: headers, body, another url or an apply command that {does} prefix"
                " caching",
            )  # fmt: skip
    off, on = (msgspec.structs.replace(session.arms[name], about="") for name in (OFF, ON))
    if off == on:
        raise ConfigError(f"[arms.{OFF}]", f"is what [arms.{ON}] is: nothing disables the cache")
    if params.prefix_tokens is not None and not 1 <= params.prefix_tokens[0] <= params.prefix_tokens[1]:
        raise ConfigError("prefix_tokens", f"is from {params.prefix_tokens[0]} to {params.prefix_tokens[1]}")
    _prefixes(session, params)


async def run(session: BenchSession, params: PrefixCacheParams) -> test.TestResult:
    work = _prefixes(session, params)
    texts = _Texts(session, params.texts)
    warm_by = replace(work, output_tokens=levels.WARM_TOKENS).closed(32, session.seed - 1, texts.new(), 8)
    capacity = None if params.rate is not None else await _capacity(session, params, work, texts, warm_by)
    rate = params.rate
    if rate is None:
        assert capacity is not None
        rate = params.share * capacity.rps
    order = Random(f"{session.seed}/arms")
    cold_first = [not _apart(session) or order.random() < 0.5 for _ in range(params.repeats)]
    runs: list[PrefixRun] = []
    last: Load | None = None
    for repeat in range(params.repeats):
        session.watcher.left(f"{params.repeats - repeat} of {params.repeats} repeats")
        seed = session.seed + _APART * repeat
        shape = work.open(params.requests, seed, 0, rate)
        cold, warm = (
            work.open(params.requests, seed, texts.of(f"{repeat}/{state}", shape), rate)
            for state in ("cold", "warm")
        )
        primer = work.primer(seed, texts.used[f"{repeat}/warm"])
        one = PrefixRun(*work.shared(params.requests, seed))
        for state in ("cold", "warm", "off") if cold_first[repeat] else ("off", "cold", "warm"):
            one.states[state] = await session.measure(
                f"{repeat}/{state}", warm if state == "warm" else cold, arm=OFF if state == "off" else ON,
                warm_by=warm_by, prime=primer if state == "warm" else None,
            )  # fmt: skip
        runs.append(one)
        last = cold
    assert last is not None
    rates = await _throughput(session, params, work, texts, warm_by, cold_first)
    found = test.TestResult(configuration=figures.load_lines(last, runs[-1].states["off"]))
    found.main = "0/off"
    found.measurements = prefix_figures(runs, rate, capacity, rates)
    found.configuration |= _configuration(params, work, runs, found.measurements, texts)
    found.tables = _tables(found.measurements)
    found.charts = _charts(runs)
    _remark(found, params, runs, capacity, cold_first)
    return found


def _prefixes(session: BenchSession, params: PrefixCacheParams) -> Prefixes:
    return prefixes_of(
        params.workload, fraction=params.sharing, tokens=params.prefix_tokens, contexts=params.prefixes,
        output_tokens=params.output_tokens, **session.target.counting,
    )  # fmt: skip


def _apart(session: BenchSession) -> bool:
    """Return whether off and on are two servers, or one that is restarted, with separate caches."""
    off, on = session.arms[OFF], session.arms[ON]
    return off.switches or on.switches or (off.url or session.target.url) != (on.url or session.target.url)


class _Texts:
    """Seeds of words: new ones for a load to send, stored ones for a load measured before."""

    def __init__(self, session: BenchSession, given: int | None) -> None:
        self._folder = session.folder
        self._given = given
        self._kept: dict[str, int] = self._folder.read_json(KEPT) or {}
        self.used: dict[str, int] = {}

    def of(self, step: str, shape: Load) -> int:
        """Return the seed of a load; one that was interrupted, or has another shape now, gets a new one."""
        if step not in self.used:
            key = f"{step} {shape.fingerprint()}"
            if self._given is not None:
                self._kept[key] = self._given + len(self.used)
            elif key not in self._kept or self._folder.step(step).read_json("step.json") is None:
                self._kept[key] = self.new()
            self._folder.write_json(KEPT, self._kept)
            self.used[step] = self._kept[key]
        return self.used[step]

    def new(self) -> int:
        return secrets.randbits(48)


async def _capacity(
    session: BenchSession, params: PrefixCacheParams, work: Prefixes, texts: _Texts, warm_by: Load
) -> levels.Capacity:
    own = params.sharing is None and params.prefix_tokens is None and params.output_tokens is None
    told = levels.capacity_told(session, params.max_rate, params.workload if own else None)
    if told is not None:
        return told

    def load_of(slots: int, requests: int) -> Load:
        seed = session.seed + 7 * _APART + slots
        words = texts.of(f"capacity/{slots:04d}-at-a-time", work.closed(requests, seed, 0, slots))
        return work.closed(requests, seed, words, slots)

    return await levels.find_capacity(session, load_of, params.slots_max, arm=OFF, warm_by=warm_by)


async def _throughput(
    session: BenchSession, params: PrefixCacheParams, work: Prefixes, texts: _Texts, warm_by: Load,
    cold_first: Sequence[bool],
) -> dict[str, Any] | None:  # fmt: skip
    """Return output tokens (or requests) per second of closed loops, off and with a warm cache; or None."""
    if not params.concurrency:
        return None
    found: dict[str, list[Steady]] = {"off": [], "on": []}
    for repeat, first in enumerate(cold_first):
        session.watcher.left(f"throughput: {len(cold_first) - repeat} of {len(cold_first)} repeats")
        seed = session.seed + _APART * repeat + 1
        count = params.throughput_requests
        words = texts.of(f"{repeat}/throughput-on", work.closed(count, seed, 0, params.concurrency))
        load = work.closed(count, seed, words, params.concurrency)
        for state in ("on", "off") if first else ("off", "on"):
            measured = await session.measure(
                f"{repeat}/throughput-{state}", load, arm=OFF if state == "off" else ON,
                warm_by=warm_by, prime=work.primer(seed, words) if state == "on" else None,
            )  # fmt: skip
            found[state].append(steady_of(measured))
    known = all(one.output_tps is not None for runs in found.values() for one in runs)
    off, on = ([(one.output_tps if known else one.completed_rps) or 0.0 for one in found[s]] for s in found)
    more = [gain for a, b in zip(off, on, strict=True) if (gain := increase(a, b)) is not None]
    compared = figures.over_repeats(more) or dict.fromkeys(("low", "high", "p"))
    return {
        "unit": "output tokens/s" if known else "requests/s",
        "off": {"mean": mean(off), "runs": off},
        "on": {"mean": mean(on), "runs": on},
        "improvement": figures.figure(
            mean(more), compared["low"], compared["high"], len(off), p=compared["p"]
        ),
    }  # fmt: skip


def prefix_figures(
    runs: Sequence[PrefixRun], rate: float, capacity: levels.Capacity | None, rates: dict[str, Any] | None
) -> dict[str, Any]:
    """Return the measurements of 5.7.4, of cold and warm compared with off."""
    return {
        "rate_rps": rate,
        "capacity": None if capacity is None else msgspec.to_builtins(capacity),
        "ttft": {state: figures.latency_row(_ttfts(runs, state), figures.KEY_SHARES) for state in STATES},
        "reduction": {state: _reductions(runs, state) for state in ("cold", "warm")},
        "hit_rate": {state: _hits(runs, state) for state in STATES},
        "throughput": rates,
    }  # fmt: skip


def _ttfts(runs: Iterable[PrefixRun], state: str) -> list[float]:
    return [value for one in runs for value in one.states[state].by_row("ttft_ns").values()]


def _reductions(runs: Sequence[PrefixRun], state: str) -> dict[str, Any]:
    """Return the reductions of percentiles over all pairs, and of P50 as the geometric mean of repeats."""
    both = [(one.states["off"], one.states[state]) for one in runs]
    off, on = figures.pairs(both, "ttft_ns")
    ratios = {name: figures.quantile_ratio(off, on, p, paired=True) for name, p in figures.KEY_SHARES.items()}
    single = [figures.quantile_ratio(*figures.pairs([one], "ttft_ns"), 0.5, paired=True) for one in both]
    logs = figures.over_repeats([log(one["value"]) for one in single if one is not None])
    if logs is not None:
        logs |= {end: exp(logs[end]) for end in ("value", "low", "high")}
    return {name: _less(ratio) for name, ratio in {**ratios, "by_repeats": logs}.items()} | {
        "pairs": len(off)
    }  # fmt: skip


def _less(ratio: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """Convert the ratio on / off to the reduction (off - on) / off."""
    if ratio is None:
        return None
    ends = {"value": "value", "low": "high", "high": "low"}
    return {**ratio, **{to: None if ratio[end] is None else 1 - ratio[end] for to, end in ends.items()}}


def _hits(runs: Sequence[PrefixRun], state: str) -> dict[str, Any] | None:
    """Return the share of prefix tokens from the cache; None if the server never reports any."""
    cached = prefix = told = 0
    for one in runs:
        hits = one.states[state].by_row("cached_tokens")
        told += len(hits)
        for row in one.states[state].by_row("e2e_ns"):
            cached += min(int(hits.get(row, 0)), one.prefix(row))
            prefix += one.prefix(row)
    rate = cache_hit_rate(cached, prefix)
    if not told or rate is None:
        return None
    return {"value": rate, "cached_tokens": cached, "prefix_tokens": prefix, "answers_that_tell": told}


def hot_firsts(runs: Sequence[PrefixRun]) -> int:
    """Return the number of first requests of a prefix in cold runs whose prefix was mostly cached."""
    hot = 0
    for one in runs:
        hits = one.states["cold"].by_row("cached_tokens")
        first = {context: row for row, context in reversed([*enumerate(one.contexts)])}
        first.pop(NO_CONTEXT, None)
        hot += sum(hits.get(row, 0) > one.prefix(row) / 2 for row in first.values())
    return hot


def _configuration(
    params: PrefixCacheParams, work: Prefixes, runs: Sequence[PrefixRun], told: Mapping[str, Any],
    texts: _Texts,
) -> dict[str, str]:  # fmt: skip
    rows = [one.prefix(row) for one in runs for row in range(len(one.contexts))]
    shared = [tokens for tokens in rows if tokens]
    lengths = f"{min(shared):,}-{max(shared):,} tokens" if shared else "none"
    seconds = sum(one.seconds for run in runs for one in run.states.values())
    return {
        "Request count": f"{params.requests:,} in each of {3 * len(runs)} runs",
        "Test duration": f"{seconds:.0f} s in all",
        "Shared prefix": f"{work.sharing.contexts} different ones, {lengths}",
        "Sharing fraction": f"{len(shared) / len(rows):.1%} of the requests"
        f" ({work.sharing.fraction:.0%} asked for)",
        "Load level": f"{told['rate_rps']:.3g} requests/s",
        "Seeds of the words": ", ".join(f"{step} {seed}" for step, seed in texts.used.items()),
    }


def _tables(told: Mapping[str, Any]) -> list[test.ReportTable]:
    states = [{"says": says, "ttft": told["ttft"][state]} for state, says in STATES.items()]
    effects = [{"state": state, **told["reduction"][state]} for state in ("cold", "warm")]
    more = {}
    for state in ("cold", "warm"):
        hits = told["hit_rate"][state]
        more[f"Cache hit rate, {state}"] = "not measurable" if hits is None else f"{hits['value']:.1%}"
    rates = told["throughput"]
    if rates is not None:
        for state in ("off", "on"):
            more[f"Throughput, cache {state}"] = f"{rates[state]['mean']:.4g} {rates['unit']}"
    improved = "not measured" if rates is None else figures.with_interval(rates["improvement"], ".1%")
    more["Throughput improvement"] = improved
    return [
        figures.table_of("Table 10: Cache Effectiveness", states, TABLE_10),
        figures.table_of(
            "TTFT reduction on identical rows, with 95 % intervals (5.7.4)", effects, REDUCTION_COLUMNS
        ),
        figures.metric_table("Hit rate and throughput (5.7.4)", more),
    ]


def _reduction(at: str) -> figures.Cell:
    return lambda one: figures.with_interval(one[at], ".1%")


TABLE_10: Final[Mapping[str, figures.Cell]] = {
    "Configuration": figures.text("says"),
    **figures.latency_columns("ttft p50", "ttft p95", "ttft p99"),
}
REDUCTION_COLUMNS: Final[Mapping[str, figures.Cell]] = {
    "": lambda one: f"TTFT reduction, {one['state']}",
    **{f"at {share.upper()}": _reduction(share) for share in figures.KEY_SHARES},
    "at P50, over repeats": _reduction("by_repeats"),
}


def _charts(runs: Sequence[PrefixRun]) -> list[test.ChartSpec]:
    series = [
        figures.cdf_series(says, values) for state, says in STATES.items() if (values := _ttfts(runs, state))
    ]
    title = "TTFT without the cache, with an empty one, and with the prefixes in it"
    chart = test.ChartSpec(title, "cdf", "TTFT (ms)", "share of requests", series, log_x=True)
    return [chart] if series else []


def _remark(
    found: test.TestResult,
    params: PrefixCacheParams,
    runs: Sequence[PrefixRun],
    capacity: levels.Capacity | None,
    cold_first: Sequence[bool],
) -> None:
    told = found.measurements
    found.notes.append(
        "off and cold have the same requests; warm has the same lengths and arrivals, and different text"
    )
    found.notes.append(f"cold ran before off in {sum(cold_first)} of {len(cold_first)} repeats")
    found.notes += figures.legend([told["ttft"]], *STATES)
    if told["hit_rate"]["warm"] is None and told["hit_rate"]["cold"] is None:
        found.notes.append("the server does not tell how many tokens came from its cache: no hit rate")
    if capacity is not None:
        found.notes.append(f"capacity without the cache: {capacity.rps:.4g} requests/s ({capacity.how})")
    off = told["hit_rate"]["off"]
    if off is not None and off["cached_tokens"]:
        found.deviations.append(
            f"5.7.2: with the cache disabled, {off['value']:.1%} of prefix tokens came from it: it is on"
        )
    warmed = hot_firsts(runs)
    if warmed:
        found.deviations.append(
            f"5.7.3: {warmed} prefixes were in the cache before the cold run sent them: it was not cold"
        )
    if len(runs) < figures.RUNS_MIN:
        found.deviations.append(
            f"6.3: {len(runs)} independent runs of each configuration, {figures.RUNS_MIN} wanted"
        )
    for one in runs:
        for measured in one.states.values():
            kept = levels.overload(measured)
            if kept is not None:
                found.deviations.append(
                    f"{measured.name} was above saturation: answers came at {kept:.0%} of the rate of"
                    " requests, and the reduction is that of a queue"
                )


TEST: Final = test.BenchTest(
    name="prefix-cache",
    params=PrefixCacheParams,
    run=run,
    quick={
        "requests": 24, "repeats": 1, "output_tokens": 16, "concurrency": 8, "throughput_requests": 32,
        "slots_max": 8,
    },
    check=check,
    arms=(OFF, ON),
)  # fmt: skip

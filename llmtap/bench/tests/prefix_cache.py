"""Prefix Cache Effectiveness (IETF draft, 5.7): the effect of a cache of shared prefixes.

`run` compares the arms `cache_off` and `cache_on` of the bench file. `mixes.py` makes the loads, `paired.py`
calculates the figures; this module has parameters, order, Table 10 and charts. A repeat measures three
states:

- Off: with the cache off, the requests of cold. Cold comes first if both share one running server (arms that
  differ only by headers or body); otherwise the order is random.
- Cold: with an empty cache: words of prompts and warm-ups are new each time (`texts` sets their seed).
- Warm: with words of its own, after each of its prefixes was sent once.

If servers report cached tokens, the hit rate is measured, and off and cold are checked.
"""

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import replace
from random import Random
from typing import Annotated, Any, Final

import msgspec
from msgspec import Meta

from llmtap.bench.run import figures, levels, test
from llmtap.bench.run.loads import Load
from llmtap.bench.run.measurement import steady_of
from llmtap.bench.run.session import BenchSession
from llmtap.bench.tests.mixes import Prefixes, prefixes_of
from llmtap.bench.tests.paired import STATES, PrefixRun, hot_firsts, prefix_figures, ttfts
from llmtap.errors import ConfigError

OFF: Final = "cache_off"
ON: Final = "cache_on"
RUNS_MIN: Final = 3
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
        self._session = session
        self._given = given
        self._kept: dict[str, int] = session.folder.read_json(KEPT) or {}
        self.used: dict[str, int] = {}

    def of(self, step: str, shape: Load) -> int:
        """Return the seed of a load; an interrupted load gets a new one."""
        if step in self.used:
            return self.used[step]
        key = f"{step} {shape.fingerprint()}"
        whole = (self._session.folder.path / "steps" / step / "step.json").is_file()
        if self._given is not None:
            self.used[step] = self._given + len(self.used)
        elif whole and key in self._kept:
            self.used[step] = self._kept[key]
        else:
            self.used[step] = self._kept[key] = self.new()
            self._session.folder.write_json(KEPT, self._kept)
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
    session: BenchSession,
    params: PrefixCacheParams,
    work: Prefixes,
    texts: _Texts,
    warm_by: Load,
    cold_first: Sequence[bool],
) -> dict[str, list[tuple[float, float | None]]] | None:
    """Return requests and output tokens per second of closed loops, off and with a warm cache; or None."""
    if not params.concurrency:
        return None
    found: dict[str, list[tuple[float, float | None]]] = {"off": [], "on": []}
    for repeat, first in enumerate(cold_first):
        session.watcher.left(f"throughput: {len(cold_first) - repeat} of {len(cold_first)} repeats")
        seed = session.seed + _APART * repeat + 1
        name, count = f"{repeat}/throughput", params.throughput_requests
        words = texts.of(f"{name}-on", work.closed(count, seed, 0, params.concurrency))
        load = work.closed(count, seed, words, params.concurrency)
        for state in ("on", "off") if first else ("off", "on"):
            measured = await session.measure(
                f"{name}-{state}", load, arm=OFF if state == "off" else ON,
                warm_by=warm_by, prime=work.primer(seed, words) if state == "on" else None,
            )  # fmt: skip
            steady = steady_of(measured)
            found[state].append((steady.completed_rps, steady.output_tps))
    return found


def _configuration(
    params: PrefixCacheParams,
    work: Prefixes,
    runs: Sequence[PrefixRun],
    told: Mapping[str, Any],
    texts: _Texts,
) -> dict[str, str]:
    rows = [one.prefix(row) for one in runs for row in range(len(one.contexts))]
    shared = [tokens for tokens in rows if tokens]
    asked = work.sharing.fraction
    lengths = f"{min(shared):,}-{max(shared):,} tokens" if shared else "none"
    seconds = sum(one.seconds for run in runs for one in run.states.values())
    return {
        "Request count": f"{params.requests:,} in each of {3 * len(runs)} runs",
        "Test duration": f"{seconds:.0f} s in all",
        "Shared prefix": f"{work.sharing.contexts} different ones, {lengths}",
        "Sharing fraction": f"{len(shared) / len(rows):.1%} of the requests ({asked:.0%} asked for)",
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
        figures.cdf_series(says, values) for state, says in STATES.items() if (values := ttfts(runs, state))
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
    found.notes += [
        (
            "off and cold were sent the same requests; warm has the same lengths, arrivals and sharing in"
            " other words, and only its prefixes were sent before: a cold run leaves whole prompts behind"
        ),
        (
            "a reduction is of the percentile, off to on, over all repeats, its interval by pairs; over"
            " repeats, it is the mean of what each of them found, with Student's interval"
        ),
        f"cold ran before off in {sum(cold_first)} of {len(cold_first)} repeats",
        figures.SPANS,
    ]
    if any(row["marks"] for row in told["ttft"].values()):
        found.notes.append(figures.FEW)
    if told["hit_rate"]["warm"] is None and told["hit_rate"]["cold"] is None:
        found.notes.append("the server does not tell how many tokens came from its cache: no hit rate")
    if told["throughput"] is not None:
        found.notes.append(
            f"throughput is of closed loops of {params.concurrency} at a time, the prefixes in the cache"
        )
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
    if len(runs) < RUNS_MIN:
        found.deviations.append(f"6.3: {len(runs)} independent runs of each configuration, {RUNS_MIN} wanted")
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

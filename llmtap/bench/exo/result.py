"""Results of an exo benchmark: rates, batches and energy, as JSON with the keys of exo-bench's output.

`mode.py` keeps the exchanges of each batch in a `Sent`; `Telling` converts them to runs. `rows_of` summarises
the repeats for the table of `llmtap bench exo`.

A run is one request. Prefill rate: uncached prompt tokens / prefill time; if the whole prompt was cached, the
rate of its earlier run. Generation rate: gaps / time from the first to the last token. `timing` names the
clock: the server's if it reports both times (without streaming, the generation time suffices), else the
client's, whose prefill time is TTFT and contains network and queue. `agg_gen_tps` is the rate of the fastest
request times their number (exo-bench's), `wall_gen_tps` is all tokens / wall time of the batch. Power is that
of exo's nodes or of this host's GPUs; energy is integrated by the trapezoidal rule over samples a second
apart.

Source: exo-bench's methodology, "Timing", "Concurrency", "Prefix Cache Mode", "Output Format", "System
Metrics".
"""

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any, Final, Literal, get_args

import msgspec

from llmtap.bench.exo.server import ExoServed
from llmtap.exchange.exchange import Exchange, Timeline
from llmtap.exchange.outcome import Outcome as Ended
from llmtap.load.monitor.timeseries import Columns
from llmtap.load.workers.worker_pool import LoadResult
from llmtap.metrics.cost import Energy, average_power_w, energy_of
from llmtap.metrics.latency import tpot_ns, ttft_any_ns
from llmtap.metrics.summary import ENDED_WELL
from llmtap.units import NS_PER_S
from llmtap.workload.prompts.fitting import Fitted
from llmtap.workload.prompts.prompt import Prompt

Hit = Literal["none", "partial", "exact"]
LAST_TOKENS: Final = 16
"""Last tokens of a prompt that a server computes even on an exact hit: a block of vLLM's cache."""


class Timing(msgspec.Struct, frozen=True):
    """Prefill and generation time of one request; None if unknown."""

    by: Literal["server", "client"]
    prefill_s: float | None
    decode_s: float | None
    source: str
    """Place of the server's times as in `Exchange.server_timing`, or the kind of client timestamps."""


class Stats(msgspec.Struct, frozen=True, kw_only=True):
    prompt_tps: float | None
    generation_tps: float | None
    prompt_tokens: int | None
    """As counted by the server, else by llmtap."""
    generation_tokens: int | None
    peak_memory_usage: dict[str, int] | None


class BatchEnergy(msgspec.Struct, frozen=True, kw_only=True):
    joules: float
    seconds: float
    """Part of the window that samples cover."""
    seconds_missing: float
    average_power_w: float | None


class ExoBatch(msgspec.Struct, frozen=True, kw_only=True):
    """Requests sent together; one request at concurrency 1."""

    start_s: float
    wall_s: float | None
    """From the common start to the end of the last response."""
    per_req_tps: float | None
    agg_gen_tps: float | None
    """`per_req_tps` times concurrency; None if a response is incomplete."""
    wall_gen_tps: float | None
    """All generated tokens / `wall_s`."""
    start_spread_s: float | None
    """Time between the first bytes sent of the first and of the last request."""
    energy: BatchEnergy | None
    findings: list[dict[str, Any]]
    """Reasons against the figures, such as late requests, as in the verdict of a replay."""


class ExoRun(msgspec.Struct, frozen=True, kw_only=True):
    elapsed_s: float | None
    """From the common start of the batch to the end of this response."""
    output_text_preview: str | None
    stats: Stats
    model_id: str
    placement_sharding: str | None
    placement_instance_meta: str | None
    placement_nodes: int | None
    pp_tokens: int
    """Prompt tokens by the tokenizer, including the chat template."""
    tg: int
    repeat_index: int
    concurrency: int
    concurrent_index: int
    prefix_cache_hit: Hit | None
    """None if the server does not report cached tokens."""
    # Fields below are not in exo-bench's output.
    pp: int
    """Requested prompt tokens; `pp_tokens` may differ if no text has exactly that length."""
    cached_tokens: int | None
    prompt_tps_stored: bool
    """`prompt_tps` is the rate of an earlier run, since the whole prompt was in the cache."""
    timing: Literal["server", "client"]
    timing_source: str
    ttft_s: float | None
    dispatch_late_s: float | None
    uncertainty_s: float | None
    eos_banned: bool
    peak_memory_source: str | None
    outcome: str
    finish_reason: str | None
    error: str | None
    batch: ExoBatch
    download_duration_s: float | msgspec.UnsetType = msgspec.UNSET
    """Download time of the model, if this benchmark started the download."""


class ExoResult(msgspec.Struct, frozen=True, kw_only=True):
    runs: list[ExoRun]
    cluster: dict[str, Any]
    system_metrics: dict[str, Any]

    def to_json(self) -> str:
        return msgspec.json.format(msgspec.json.encode(self)).decode()


def prefill_tps(prompt_tokens: int | None, cached_tokens: int | None, seconds: float | None) -> float | None:
    """Return uncached prompt tokens / prefill time."""
    if prompt_tokens is None or not seconds:
        return None
    computed = prompt_tokens - (cached_tokens or 0)
    return computed / seconds if computed > 0 else None


def generation_tps(tokens: int | None, seconds: float | None) -> float | None:
    """Return (tokens - 1) / (last token - first token)."""
    return (tokens - 1) / seconds if tokens is not None and tokens > 1 and seconds else None


def timing_of(x: Exchange) -> Timing:
    """Return the server's times if it reports both, or if the answer came in one piece; else ours."""
    told: dict[str, tuple[float, str]] = {}
    for entry in x.server_timing or ():
        name, ms = entry.get("name"), entry.get("ms")
        if isinstance(name, str) and isinstance(ms, int | float):
            told.setdefault(name, (ms / 1e3, str(entry.get("where"))))
    # vLLM's TTFT counts from when the request was scheduled, so it has no queue wait.
    prefill = told.get("prefill") or told.get("ttft_from_schedule")
    decode = told.get("decode")
    if decode is not None and (prefill is not None or not x.stream):
        return Timing("server", None if prefill is None else prefill[0], decode[0], decode[1])
    if not x.stream:
        return Timing("client", None, None, "none: no stream")
    t = x.timeline
    ttft_ns, gap_ns = ttft_any_ns(t), tpot_ns(t, x.tokens.output)
    decode_s = None
    if gap_ns is not None and t.last_token_ns is not None and t.first_token_ns is not None:
        decode_s = (t.last_token_ns - t.first_token_ns) / NS_PER_S
    return Timing("client", None if ttft_ns is None else ttft_ns / NS_PER_S, decode_s, f"stamps by {x.clock}")


def prefix_hit(prompt_tokens: int | None, cached_tokens: int | None, *, known: bool) -> Hit | None:
    """Return how much of a prompt was in the cache. `known`: the same prompt was sent before."""
    if cached_tokens is None or prompt_tokens is None:
        return None
    if cached_tokens <= 0:
        return "none"
    left = prompt_tokens - cached_tokens
    return "exact" if left <= (LAST_TOKENS if known else 0) else "partial"


def batch_of(
    exchanges: Sequence[Exchange],
    rates: Sequence[float | None],
    *,
    began_ns: int,
    start_s: float,
    energy: BatchEnergy | None,
    findings: list[dict[str, Any]],
) -> ExoBatch:
    """Return the result of requests sent together at `began_ns`; `rates` are their generation_tps."""
    n = len(exchanges)
    whole = [x for x in exchanges if x.outcome in ENDED_WELL]
    ends_ns = [x.timeline.response_end_ns for x in whole if x.timeline.response_end_ns is not None]
    late_ns = [x.dispatch_late_ns for x in exchanges if x.dispatch_late_ns is not None]
    known = [rate for rate in rates if rate is not None]
    wall_s = (max(ends_ns) - began_ns) / NS_PER_S if len(ends_ns) == n else None
    fastest = max(known, default=None)
    tokens = [x.tokens.output for x in whole if x.tokens.output is not None]
    complete = len(whole) == n
    return ExoBatch(
        start_s=start_s,
        wall_s=wall_s,
        per_req_tps=fastest,
        agg_gen_tps=fastest * n if fastest is not None and complete else None,
        wall_gen_tps=sum(tokens) / wall_s if wall_s and len(tokens) == n else None,
        start_spread_s=(max(late_ns) - min(late_ns)) / NS_PER_S if len(late_ns) == n else None,
        energy=energy,
        findings=findings,
    )


@dataclass(frozen=True, slots=True)
class Spread:
    n: int
    median: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class ExoRow:
    """One point of the grid, for the table; None if no repeat has the figure."""

    pp_tokens: int
    tg: int
    concurrency: int
    repeats: int
    failed: int
    prompt_tps: Spread | None
    """Of the medians of repeats, without stored rates."""
    per_req_tps: Spread | None
    agg_gen_tps: Spread | None
    wall_gen_tps: Spread | None
    wall_s: Spread | None
    joules: Spread | None
    memory_bytes: int | None
    hits: Mapping[str, int]
    timing: str
    """`server`, `client`, or both."""


def rows_of(runs: Iterable[ExoRun]) -> list[ExoRow]:
    points: dict[tuple[int, int, int], dict[int, list[ExoRun]]] = {}
    for run in runs:
        repeats = points.setdefault((run.pp_tokens, run.tg, run.concurrency), {})
        repeats.setdefault(run.repeat_index, []).append(run)
    return [_row(*point, list(repeats.values())) for point, repeats in points.items()]


def _row(pp_tokens: int, tg: int, concurrency: int, repeats: Sequence[Sequence[ExoRun]]) -> ExoRow:
    runs = [run for repeat in repeats for run in repeat]
    batches = [repeat[0].batch for repeat in repeats]
    hits: dict[str, int] = {}
    for run in runs:
        if run.prefix_cache_hit is not None:
            hits[run.prefix_cache_hit] = hits.get(run.prefix_cache_hit, 0) + 1
    return ExoRow(
        pp_tokens, tg, concurrency, len(repeats),
        failed=sum(run.outcome not in ENDED_WELL for run in runs),
        prompt_tps=_spread(_prefill(repeat) for repeat in repeats),
        per_req_tps=_spread(batch.per_req_tps for batch in batches),
        agg_gen_tps=_spread(batch.agg_gen_tps for batch in batches),
        wall_gen_tps=_spread(batch.wall_gen_tps for batch in batches),
        wall_s=_spread(batch.wall_s for batch in batches),
        joules=_spread(None if batch.energy is None else batch.energy.joules for batch in batches),
        memory_bytes=max((m["inBytes"] for run in runs if (m := run.stats.peak_memory_usage)), default=None),
        hits=hits,
        timing=", ".join(sorted({run.timing for run in runs})),
    )  # fmt: skip


def _prefill(repeat: Sequence[ExoRun]) -> float | None:
    rates = [run.stats.prompt_tps for run in repeat if not run.prompt_tps_stored]
    known = [rate for rate in rates if rate is not None]
    return median(known) if known else None


def _spread(values: Iterable[float | None]) -> Spread | None:
    known = [value for value in values if value is not None]
    return Spread(len(known), median(known), min(known), max(known)) if known else None


_NODE_POWER: Final = "power"


class Power:
    """Power and memory samples of this host, if the server is on it, and of exo's nodes by id."""

    def __init__(self, local: Columns | None, nodes: Mapping[str, Columns]) -> None:
        told = [(columns, _NODE_POWER) for columns in nodes.values() if _NODE_POWER in columns.known()]
        self._local = local
        self._known = [] if local is None else local.known()
        # The power of a machine includes its GPUs.
        self._sources = told or [
            (local, name) for name in self._known if local is not None and name.endswith("_power")
        ]

    def energy(self, from_ns: int, to_ns: int) -> Energy | None:
        found: list[Energy] = []
        for columns, name in self._sources:
            one = energy_of(columns.times_ns(), columns.column(name), from_ns=from_ns, to_ns=to_ns)
            if one is None:
                return None
            found.append(one)
        if not found:
            return None
        return Energy(
            sum(one.joules for one in found), min(one.known_ns for one in found),
            max(one.missing_ns for one in found),
        )  # fmt: skip

    def peak_memory(self, from_ns: int, to_ns: int) -> tuple[int, str] | None:
        """Return the most bytes in use, and the node, including the samples beside the window."""
        if self._local is None:
            return None
        gpus = [name for name in self._known if name.startswith("gpu") and name.endswith("_memory")]
        names, whose = (gpus, "this host's GPUs") if gpus else (["server_memory"], "the server's processes")
        times_ns = self._local.times_ns()
        within = slice(max(0, bisect_right(times_ns, from_ns) - 1), bisect_left(times_ns, to_ns) + 1)
        columns = [self._local.column(name)[within] for name in names]
        sums = [sum(row) for row in zip(*columns, strict=True) if None not in row]
        return (int(max(sums)), whose) if sums else None


def total_of(windows: Iterable[Energy | None]) -> dict[str, Any] | None:
    """Return joules, seconds of inference and average power of all windows, or None without samples."""
    known = [window for window in windows if window is not None]
    if not known:
        return None
    return {
        "joules": sum(window.joules for window in known),
        "inference_seconds": sum(window.known_ns for window in known) / NS_PER_S,
        "average_power_w": average_power_w(known),
    }


PREVIEW_CHARS: Final = 200


@dataclass(frozen=True, slots=True)
class ExoCell:
    pp: int
    tg: int
    concurrency: int

    def __str__(self) -> str:
        return f"pp {self.pp:,} tg {self.tg:,} x {self.concurrency:,}"


@dataclass(slots=True)
class Sent:
    cell: ExoCell
    repeat: int
    prompts: Sequence[tuple[Prompt, Fitted]]
    known: bool
    """The same prompt was sent before, or several times in this batch."""
    began_ns: int = 0
    exchanges: dict[int, Exchange] = field(default_factory=dict)
    findings: list[dict[str, Any]] = field(default_factory=list)

    def keep(self, outcome: LoadResult) -> Callable[[int, Exchange], None]:
        self.began_ns = outcome.began_ns
        return self.exchanges.__setitem__

    @property
    def window_ns(self) -> tuple[int, int]:
        """Times of the common start and of the last token or end of a response."""
        points = (x.timeline for x in self.exchanges.values())
        ends = [t.response_end_ns or t.last_token_ns for t in points]
        return self.began_ns, max((end for end in ends if end is not None), default=self.began_ns)


class Telling:
    """Converter of batches to runs. Warm-up batches must pass, too, since their prompts are in the cache."""

    def __init__(
        self, served: ExoServed, power: Power, *, start_ns: int, download_s: float | None = None
    ) -> None:
        self._served = served
        self._download_s = download_s
        self._power = power
        self._start_ns = start_ns
        self._stored: dict[int, float] = {}
        """By pp: the prefill rate of the prompt that is in the cache."""

    def runs(self, sent: Sent) -> Iterator[ExoRun]:
        energy = self._power.energy(*sent.window_ns)
        memory = self._power.peak_memory(*sent.window_ns)
        exchanges = [sent.exchanges.get(row) or _lost() for row in range(sent.cell.concurrency)]
        timings = [timing_of(x) for x in exchanges]
        rates = [
            generation_tps(x.tokens.output, timing.decode_s) if x.outcome in ENDED_WELL else None
            for x, timing in zip(exchanges, timings, strict=True)
        ]
        batch = batch_of(
            exchanges, rates, began_ns=sent.began_ns, start_s=(sent.began_ns - self._start_ns) / NS_PER_S,
            energy=None if energy is None else BatchEnergy(
                joules=energy.joules, seconds=energy.known_ns / NS_PER_S,
                seconds_missing=energy.missing_ns / NS_PER_S, average_power_w=average_power_w([energy]),
            ),
            findings=sent.findings,
        )  # fmt: skip
        for index, (x, timing, rate) in enumerate(zip(exchanges, timings, rates, strict=True)):
            yield self._run(sent, index, x, timing, rate, batch, memory)

    def _run(
        self, sent: Sent, index: int, x: Exchange, timing: Timing, rate: float | None, batch: ExoBatch,
        memory: tuple[int, str] | None,
    ) -> ExoRun:  # fmt: skip
        served, cell, tokens = self._served, sent.cell, x.tokens
        pp_tokens = sent.prompts[index][1].tokens
        prompt = pp_tokens if tokens.input is None else tokens.input
        hit = prefix_hit(prompt, tokens.cached, known=sent.known)
        prompt_tps = prefill_tps(prompt, tokens.cached, timing.prefill_s)
        if hit == "exact":
            prompt_tps = self._stored.get(cell.pp)
        elif prompt_tps is not None:
            self._stored[cell.pp] = prompt_tps
        own = (x.usage or {}).get("generation_stats") if served.kind == "exo" else None
        if isinstance(own, dict):
            # exo reports the stored rate of an exact hit itself.
            hit = own["prefix_cache_hit"] if own.get("prefix_cache_hit") in get_args(Hit) else hit
            rate_told = own.get("prompt_tps")
            prompt_tps = float(rate_told) if isinstance(rate_told, int | float) else prompt_tps
            peak = own.get("peak_memory_usage")
            if isinstance(peak, dict) and isinstance(peak.get("inBytes"), int):
                memory = peak["inBytes"], "the server's generation_stats"
        ttft_ns = ttft_any_ns(x.timeline) if x.stream else None
        end_ns = x.timeline.response_end_ns
        text = None if x.said is None else x.said.response_text
        return ExoRun(
            elapsed_s=None if end_ns is None else (end_ns - sent.began_ns) / NS_PER_S,
            output_text_preview=None if text is None else text[:PREVIEW_CHARS],
            stats=Stats(
                prompt_tps=prompt_tps, generation_tps=rate, prompt_tokens=prompt,
                generation_tokens=tokens.output,
                peak_memory_usage=None if memory is None else {"inBytes": memory[0]},
            ),
            model_id=served.model, placement_sharding=served.placement.sharding,
            placement_instance_meta=served.placement.instance_meta, placement_nodes=served.placement.nodes,
            pp_tokens=pp_tokens, tg=cell.tg, repeat_index=sent.repeat, concurrency=cell.concurrency,
            concurrent_index=index, prefix_cache_hit=hit, pp=cell.pp, cached_tokens=tokens.cached,
            prompt_tps_stored=hit == "exact" and prompt_tps is not None, timing=timing.by,
            timing_source=timing.source, ttft_s=_seconds(ttft_ns),
            dispatch_late_s=_seconds(x.dispatch_late_ns), uncertainty_s=x.uncertainty_ns / NS_PER_S,
            eos_banned=served.bans_eos is not None, peak_memory_source=None if memory is None else memory[1],
            download_duration_s=msgspec.UNSET if self._download_s is None else self._download_s,
            outcome=x.outcome.value, finish_reason=x.finish_reason, error=x.error, batch=batch,
        )  # fmt: skip


def _lost() -> Exchange:
    error = "its sending process was lost"
    return Exchange("", 0, 0, Timeline(0), outcome=Ended.TAP_ERROR, error=error)


def _seconds(ns: int | None) -> float | None:
    return None if ns is None else ns / NS_PER_S

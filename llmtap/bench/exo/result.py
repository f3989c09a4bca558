"""Results of an exo benchmark: rates, batches and energy as JSON with the field names of exo-bench's output.

`mode.py` keeps the exchanges of each batch in a `SentBatch`; `RunBuilder` converts them to runs. `table_rows`
summarises the repeats for the table of `llmtap bench exo`.

A run is one request. Prefill rate: uncached prompt tokens / prefill time; if the whole prompt was cached, the
rate of an earlier run of this prompt. Generation rate: (tokens - 1) / time from the first to the last token.
`timing` names the clock: the server's if the server reports both times (without streaming, the generation
time is enough), else the client's. The client's prefill time is TTFT, with network and queue. `agg_gen_tps`
is the rate of the fastest request of a batch times the number of requests. Power is that of exo's nodes or of
this host's GPUs; energy is integrated by the trapezoidal rule over samples a second apart.

Sources: exo-bench's methodology, "Timing", "Concurrency", "Prefix Cache Mode", "Output Format", "System
Metrics".
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any, Final, Literal, NamedTuple, get_args

import msgspec

from llmtap.bench.exo.server import ExoServer, Power, TotalEnergy
from llmtap.exchange.exchange import Exchange, Timeline
from llmtap.exchange.outcome import Outcome as ExchangeOutcome
from llmtap.load.replay.findings import JudgedFinding
from llmtap.load.workers.worker_pool import LoadResult
from llmtap.metrics.latency import tpot_ns, ttft_any_ns
from llmtap.metrics.summary import ENDED_WELL
from llmtap.units import NS_PER_S, to_seconds
from llmtap.workload.prompts.fitting import FittedPrompt
from llmtap.workload.prompts.prompt import Prompt

SizedPrompt = tuple[Prompt, FittedPrompt]
Hit = Literal["none", "partial", "exact"]
LAST_TOKENS: Final = 16
"""Maximum number of tokens at the end of a prompt that a server computes although the whole prompt is cached:
one block of vLLM's cache."""
PREVIEW_CHARS: Final = 200


class Timing(NamedTuple):
    """Prefill and generation time of one request (None: unknown), and whose clock measured them (`by`)."""

    by: Literal["server", "client"]
    """Whose clock measured the times."""
    prefill_s: float | None
    """Time in which the server processed the prompt."""
    decode_s: float | None
    """Time in which the server generated the tokens after the first."""


class Stats(msgspec.Struct, frozen=True, kw_only=True):
    """Rates (tokens/s), numbers of tokens, and memory of one run, with the field names of exo-bench."""

    prompt_tps: float | None
    """Tokens of the prompt per second of prefill."""
    generation_tps: float | None
    """Output tokens per second after the first token."""
    prompt_tokens: int | None
    """Number of prompt tokens, counted by the server or, if it reports none, by llmtap."""
    generation_tokens: int | None
    peak_memory_usage: dict[str, int] | None
    """Largest memory of the server during the run, in bytes."""


class ExoBatch(msgspec.Struct, frozen=True, kw_only=True):
    """Result of the requests that were sent together; at concurrency 1 this is one request."""

    start_s: float
    """Common start of the requests, in seconds after the start of the benchmark."""
    wall_s: float | None
    """Time from the common start to the end of the last response."""
    per_req_tps: float | None
    """Generation rate of the fastest request, in tokens per second."""
    agg_gen_tps: float | None
    """`per_req_tps` times concurrency; None if a response is incomplete."""
    start_spread_s: float | None
    """Time between the first bytes sent of the first and of the last request."""
    joules: float | None
    """Energy used from the start of the batch to its end, from all power sources; None if it is not known."""
    findings: list[JudgedFinding]
    """Findings of the replay's verdict that limit the validity of the figures, such as late requests."""


class ExoRun(msgspec.Struct, frozen=True, kw_only=True):
    """Result of one request. Values that are not known are None."""

    elapsed_s: float | None
    """Time from the common start of the batch to the end of this response."""
    output_text_preview: str | None
    """Beginning of the answer's text."""
    stats: Stats
    model_id: str
    placement_sharding: str | None
    """How the model is split among the nodes: by layers or by tensors."""
    placement_instance_meta: str | None
    """Transport between the nodes."""
    placement_nodes: int | None
    """Number of nodes that share the model."""
    pp_tokens: int
    """Number of prompt tokens counted by the tokenizer, including the chat template."""
    tg: int
    """Number of output tokens requested (exo-bench: tokens generated)."""
    repeat_index: int
    """Index of the batch among the equal batches of the cell."""
    concurrency: int
    """Number of requests in the batch."""
    concurrent_index: int
    """Index of the request in its batch."""
    prefix_cache_hit: Hit | None
    """How much of the prompt was cached; None if the server does not report cached tokens."""
    # The fields below are llmtap's own: the output of exo-bench does not have them.
    pp: int
    """Requested number of prompt tokens; `pp_tokens` differs if no text has exactly this length."""
    cached_tokens: int | None
    """Number of prompt tokens that the server had in its prefix cache."""
    prompt_tps_stored: bool
    """Whether `prompt_tps` is the rate of an earlier run, because the whole prompt was in the cache."""
    timing: Literal["server", "client"]
    """Whose clock measured prefill and generation."""
    ttft_s: float | None
    dispatch_late_s: float | None
    """Delay of the first byte sent after the common start of the batch."""
    uncertainty_s: float | None
    """Largest possible error of the times."""
    outcome: str
    finish_reason: str | None
    error: str | None
    batch: ExoBatch
    not_valid: list[str] = []
    """Figures of this run that are missing or not valid: `prefill`, `generation`, `wall`."""
    download_duration_s: float | msgspec.UnsetType = msgspec.UNSET
    """Download time of the model, if this benchmark started the download."""


class SystemMetrics(msgspec.Struct, frozen=True, kw_only=True):
    """Samples of this host and of exo's nodes, and the energy of all batches."""

    local: Mapping[str, Any]
    """Samples of this host."""
    nodes: Mapping[str, Any]
    """By node of the cluster: its samples."""
    nodes_failed: int | None
    """Number of samples of exo's nodes that could not be read."""
    energy: TotalEnergy | None


class ExoResult(msgspec.Struct, frozen=True, kw_only=True):
    """Public JSON of the benchmark, with the field names of exo-bench."""

    runs: list[ExoRun]
    cluster: Mapping[str, Any]
    """State of the server, and with the key `bench` the settings of the benchmark."""
    system_metrics: SystemMetrics

    def to_json(self) -> str:
        return msgspec.json.format(msgspec.json.encode(self)).decode()


class ExoCell(NamedTuple):
    """One cell of the grid: requests of equal lengths that are sent together."""

    pp: int
    """Number of prompt tokens (exo-bench: prompt processing)."""
    tg: int
    """Number of output tokens (exo-bench: token generation)."""
    concurrency: int
    """Number of requests that are sent together as a batch."""

    def __str__(self) -> str:
        return f"pp {self.pp:,} tg {self.tg:,} x {self.concurrency:,}"


# ---------------------------------------------------------------- rates of one run, result of one batch


def prefill_tps(prompt_tokens: int | None, cached_tokens: int | None, seconds: float | None) -> float | None:
    """Return the prefill rate: uncached prompt tokens / prefill time; None if it is unknown."""
    if prompt_tokens is None or not seconds:
        return None
    computed = prompt_tokens - (cached_tokens or 0)
    return computed / seconds if computed > 0 else None


def generation_tps(tokens: int | None, seconds: float | None) -> float | None:
    """Return the generation rate: (tokens - 1) / seconds from the first to the last token."""
    return (tokens - 1) / seconds if tokens is not None and tokens > 1 and seconds else None


def timing_of(x: Exchange) -> Timing:
    """Return the times that the server reports or, if they are incomplete, those that the client measured.

    The server must report both times, or only the generation time for a response without streaming.
    """
    times_s: dict[str, float] = {}
    for entry in x.server_timing or ():
        name, ms = entry.get("name"), entry.get("ms")
        if isinstance(name, str) and isinstance(ms, int | float):
            times_s.setdefault(name, ms / 1e3)
    # vLLM counts `ttft_from_schedule` from the scheduling of the request. It can serve as the prefill time,
    # because it does not include the wait in the queue.
    prefill = times_s.get("prefill", times_s.get("ttft_from_schedule"))
    if "decode" in times_s and (prefill is not None or not x.stream):
        return Timing("server", prefill, times_s["decode"])
    if not x.stream:
        return Timing("client", None, None)
    t = x.timeline
    decode_ns = None
    if tpot_ns(t, x.tokens.output) is not None and None not in (t.last_token_ns, t.first_token_ns):
        decode_ns = t.last_token_ns - t.first_token_ns  # type: ignore[operator]
    return Timing("client", _seconds(ttft_any_ns(t)), _seconds(decode_ns))


def prefix_hit(prompt_tokens: int | None, cached_tokens: int | None, *, is_repeat: bool) -> Hit | None:
    """Return how much of a prompt was in the cache. `is_repeat`: the same prompt was sent before."""
    if cached_tokens is None or prompt_tokens is None:
        return None
    if cached_tokens <= 0:
        return "none"
    return "exact" if prompt_tokens - cached_tokens <= (LAST_TOKENS if is_repeat else 0) else "partial"


def batch_of(
    exchanges: Sequence[Exchange],
    rates: Sequence[float | None],
    *,
    began_ns: int,
    start_s: float,
    joules: float | None,
    findings: list[JudgedFinding],
) -> ExoBatch:
    """Return the result of requests sent together at `began_ns`; `rates` are their generation rates."""
    n = len(exchanges)
    complete = all(x.outcome in ENDED_WELL for x in exchanges)
    ends_ns = [ns for x in exchanges if (ns := x.timeline.response_end_ns) is not None]
    late_ns = [x.dispatch_late_ns for x in exchanges if x.dispatch_late_ns is not None]
    fastest = max((rate for rate in rates if rate is not None), default=None)
    return ExoBatch(
        start_s=start_s,
        wall_s=(max(ends_ns) - began_ns) / NS_PER_S if complete and len(ends_ns) == n else None,
        per_req_tps=fastest,
        agg_gen_tps=fastest * n if fastest is not None and complete else None,
        start_spread_s=(max(late_ns) - min(late_ns)) / NS_PER_S if len(late_ns) == n else None,
        joules=joules,
        findings=findings,
    )


# ---------------------------------------------------------------- conversion of batches to runs


_BASES: Final[Mapping[str, tuple[str, ...]]] = {
    "prefill": ("ttft", "ttft_any"),
    "generation": ("tpot", "tokens"),
    "wall": ("e2e",),
}
"""By column of the table: names (as in a load's verdict) of the figures from which the client computes it."""


def invalid_columns(batch: ExoBatch, timing: Timing) -> list[str]:
    """Return the columns of the table in which this batch's figures are not valid.

    Figures from the server's clock stay valid even if the client was late. The wall time is always from the
    client's clock.
    """
    invalid = {figure for finding in batch.findings for figure in finding.invalid_figures}
    return [
        column
        for column, figures in _BASES.items()
        if invalid.intersection(figures) and (timing.by == "client" or column == "wall")
    ]


@dataclass(slots=True)
class SentBatch:
    """Requests that were sent together, and their exchanges by row."""

    cell: ExoCell
    repeat: int
    """Index of this batch among the batches of its cell."""
    prompts: Sequence[SizedPrompt]
    is_repeat: bool
    """Whether the same prompt was sent before, or is sent several times in this batch."""
    began_ns: int = 0
    """Common start of the requests."""
    exchanges: dict[int, Exchange] = field(default_factory=dict)
    findings: list[JudgedFinding] = field(default_factory=list)
    """Findings of the replay that limit the validity of the batch's figures."""

    def start_recording(self, outcome: LoadResult) -> Callable[[int, Exchange], None]:
        """Return a function that stores an exchange by its row; called by the replay that sends the batch."""
        self.began_ns = outcome.began_ns
        return self.exchanges.__setitem__

    @property
    def window_ns(self) -> tuple[int, int]:
        """Start and end of the batch: the common start, and the end or last token of its last response."""
        points = (x.timeline for x in self.exchanges.values())
        ends = [t.response_end_ns or t.last_token_ns for t in points]
        return self.began_ns, max((end for end in ends if end is not None), default=self.began_ns)


class RunBuilder:
    """Converts batches to runs. It also needs the warm-up batches: the cache contains their prompts."""

    def __init__(self, server: ExoServer, power: Power, start_ns: int, download_s: float | None) -> None:
        self._server = server
        self._download_s = download_s
        """Download time of the model, if this benchmark started the download."""
        self._power = power
        """Samples from which the energy of each batch is computed."""
        self._start_ns = start_ns
        self._cached_prompt_tps: dict[int, float] = {}
        """By prompt length (`pp`): newest prefill rate of a run whose prompt was not wholly cached."""

    def runs(self, batch: SentBatch) -> list[ExoRun]:
        """Return a run for each request of a batch. Call once for each batch, in order of sending."""
        lost = Exchange(
            "", 0, 0, Timeline(0), outcome=ExchangeOutcome.TAP_ERROR, error="its sending process was lost"
        )
        exchanges = [batch.exchanges.get(row, lost) for row in range(batch.cell.concurrency)]
        timings = [timing_of(x) for x in exchanges]
        rates = [
            generation_tps(x.tokens.output, timing.decode_s) if x.outcome in ENDED_WELL else None
            for x, timing in zip(exchanges, timings, strict=True)
        ]
        energy = self._power.energy(*batch.window_ns)
        exo_batch = batch_of(
            exchanges,
            rates,
            began_ns=batch.began_ns,
            start_s=to_seconds(batch.began_ns - self._start_ns),
            joules=None if energy is None else energy.joules,
            findings=batch.findings,
        )
        parts = zip(exchanges, timings, rates, strict=True)
        return [self._make_run(batch, index, *part, exo_batch) for index, part in enumerate(parts)]

    def _make_run(
        self,
        batch: SentBatch,
        index: int,
        x: Exchange,
        timing: Timing,
        rate: float | None,
        exo_batch: ExoBatch,
    ) -> ExoRun:
        server, cell, tokens = self._server, batch.cell, x.tokens
        pp_tokens = batch.prompts[index][1].tokens
        prompt = pp_tokens if tokens.input is None else tokens.input
        memory = self._power.peak_memory(*batch.window_ns)
        hit = prefix_hit(prompt, tokens.cached, is_repeat=batch.is_repeat)
        prompt_tps = prefill_tps(prompt, tokens.cached, timing.prefill_s)
        if hit == "exact":
            prompt_tps = self._cached_prompt_tps.get(cell.pp)
        elif prompt_tps is not None:
            self._cached_prompt_tps[cell.pp] = prompt_tps
        generation_stats = (x.usage or {}).get("generation_stats") if server.kind == "exo" else None
        if isinstance(generation_stats, dict):
            # exo itself reports the kind of hit and, for an exact hit, the stored rate: prefer these values.
            hit = (
                generation_stats["prefix_cache_hit"]
                if generation_stats.get("prefix_cache_hit") in get_args(Hit)
                else hit
            )
            reported_rate, peak = (
                generation_stats.get("prompt_tps"),
                generation_stats.get("peak_memory_usage"),
            )
            prompt_tps = float(reported_rate) if isinstance(reported_rate, int | float) else prompt_tps
            if isinstance(peak, dict) and isinstance(peak.get("inBytes"), int):
                memory = peak["inBytes"]
        values = {"prefill": prompt_tps, "generation": rate, "wall": exo_batch.wall_s}
        invalid = invalid_columns(exo_batch, timing)
        text = None if x.text is None else x.text.response_text
        end_ns = x.timeline.response_end_ns
        return ExoRun(
            elapsed_s=None if end_ns is None else to_seconds(end_ns - batch.began_ns),
            output_text_preview=None if text is None else text[:PREVIEW_CHARS],
            stats=Stats(
                prompt_tps=prompt_tps,
                generation_tps=rate,
                prompt_tokens=prompt,
                generation_tokens=tokens.output,
                peak_memory_usage=None if memory is None else {"inBytes": memory},
            ),
            model_id=server.model,
            placement_sharding=server.placement.sharding,
            placement_instance_meta=server.placement.instance_meta,
            placement_nodes=server.placement.nodes,
            pp_tokens=pp_tokens,
            tg=cell.tg,
            repeat_index=batch.repeat,
            concurrency=cell.concurrency,
            concurrent_index=index,
            prefix_cache_hit=hit,
            pp=cell.pp,
            cached_tokens=tokens.cached,
            prompt_tps_stored=hit == "exact" and prompt_tps is not None,
            timing=timing.by,
            ttft_s=_seconds(ttft_any_ns(x.timeline) if x.stream else None),
            dispatch_late_s=_seconds(x.dispatch_late_ns),
            uncertainty_s=to_seconds(x.uncertainty_ns),
            download_duration_s=msgspec.UNSET if self._download_s is None else self._download_s,
            outcome=x.outcome.value,
            finish_reason=x.finish_reason,
            error=x.error,
            batch=exo_batch,
            not_valid=[name for name, value in values.items() if value is None or name in invalid],
        )


def _seconds(ns: int | None) -> float | None:
    return None if ns is None else to_seconds(ns)


# ---------------------------------------------------------------- rows of the printed table


def group_by_cell(runs: Iterable[ExoRun]) -> dict[ExoCell, list[list[ExoRun]]]:
    """Return for each cell of the grid its batches, each as the list of its runs."""
    by_repeat: dict[ExoCell, dict[int, list[ExoRun]]] = {}
    for run in runs:
        batches = by_repeat.setdefault(ExoCell(run.pp, run.tg, run.concurrency), {})
        batches.setdefault(run.repeat_index, []).append(run)
    return {cell: list(batches.values()) for cell, batches in by_repeat.items()}


class Spread(NamedTuple):
    """Median, minimum and maximum of `n` values."""

    n: int
    median: float
    low: float
    """Smallest value."""
    high: float


@dataclass(frozen=True, slots=True)
class ExoRow:
    """Row of the printed table: the results of one cell of the grid."""

    pp_tokens: int
    """Largest number of prompt tokens, as counted by the tokenizer."""
    tg: int
    """Number of output tokens requested."""
    concurrency: int
    repeats: int
    """Number of batches of the cell."""
    failed: int
    """Number of requests that did not end well."""
    figures: Mapping[str, Spread | None]
    """Spread over the repeats, by field; None without values. `prompt_tps` excludes stored rates."""
    memory_bytes: int | None
    """Largest memory of the server in any run."""
    hits: Mapping[str, int]
    """Number of runs by kind of prefix cache hit."""
    timing: str
    """Clocks of the figures: `server`, `client`, or `client, server` if the runs differ."""


def table_rows(runs: Iterable[ExoRun]) -> list[ExoRow]:
    return [_row_of_cell(cell, repeats) for cell, repeats in group_by_cell(runs).items()]


def _row_of_cell(cell: ExoCell, repeats: Sequence[Sequence[ExoRun]]) -> ExoRow:
    runs = [run for repeat in repeats for run in repeat]
    prefill = [
        [run.stats.prompt_tps for run in repeat if run.stats.prompt_tps and not run.prompt_tps_stored]
        for repeat in repeats
    ]
    figure_names = ("per_req_tps", "agg_gen_tps", "wall_s", "joules")
    return ExoRow(
        max(run.pp_tokens for run in runs),
        cell.tg,
        cell.concurrency,
        len(repeats),
        failed=sum(run.outcome not in ENDED_WELL for run in runs),
        figures={
            "prompt_tps": _spread(median(rates) for rates in prefill if rates),
            **{name: _spread(getattr(repeat[0].batch, name) for repeat in repeats) for name in figure_names},
        },
        memory_bytes=max((m["inBytes"] for run in runs if (m := run.stats.peak_memory_usage)), default=None),
        hits=Counter(run.prefix_cache_hit for run in runs if run.prefix_cache_hit is not None),
        timing=", ".join(sorted({run.timing for run in runs})),
    )


def _spread(values: Iterable[float | None]) -> Spread | None:
    known = [value for value in values if value is not None]
    return Spread(len(known), median(known), min(known), max(known)) if known else None

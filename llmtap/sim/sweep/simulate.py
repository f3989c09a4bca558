"""Run one scheduler on one workload in virtual time, and report the result as public JSON.

`simulate` runs a scheduler (by name) on `Requests` with options, and returns a `SimulationResult`.
`capacity_rps` searches the highest rate at which the share of late requests is small enough. `sweep.py` calls
`simulate` for each job, and `capacity_rps` for `--capacity`. The figures are those of the multi-bin paper,
section 9; `ModelOptions` has a choice for each point that the paper leaves open. A measured run also has the
figures of a `Summary`, like live traffic.

Requests that the scheduler gave up count in the outcomes and as outside the request SLA, but not in latencies
and throughput. Tokens that they received count in `tokens`. `unserved` has the number of these requests by
reason: `too_large`, `late` (before their first token), `late_midway`.

`ExchangeMaker` makes the Exchange of a request from its token times. All timestamps are exact virtual times
in ns (`uncertainty_ns` 0). Arrival, end of the request, submission and `scheduled` have the same time; head,
first byte and first token have the same time. Each token is one event, without bytes. The relay is called
`sim-<scheduler>`, its rows count from 1, and the arm is the scheduler (`report --by arm`). A request that was
given up has the status 503 (`upstream_error`) if it had no token, else the outcome `truncated`. Both miss all
objectives, and `error` has the reason.
"""

import math
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, cast

import msgspec
import numpy as np

from llmtap.exchange.exchange import OUTPUT, EventLog, Exchange, RequestShape, Timeline, Tokens
from llmtap.exchange.outcome import EventClass, Outcome, TokenSource
from llmtap.metrics.deadlines import Benefit
from llmtap.metrics.latency import DEFAULT_BENEFIT, measure, output_times_ns
from llmtap.metrics.objectives import Objectives
from llmtap.metrics.statistics import SHARES, marks, percentile, percentile_by, rate_rps
from llmtap.metrics.summary import Summary
from llmtap.sim.engine import AnyEngine, Engine, GivenUp, Iterating, IterationState, RunRecord, run_virtual
from llmtap.sim.model_options import ServingSetup, predict
from llmtap.sim.routing import DEFAULT_ROUTER, ROUTERS, RoutedEngine
from llmtap.sim.schedulers.batching import MultiBinDynamic
from llmtap.sim.schedulers.registry import SCHEDULERS, SchedulerKind
from llmtap.sim.sweep.run_figures import (
    BatchOutputs,
    EngineFigures,
    ExactFigures,
    FollowedRequest,
    LongestOutputs,
    ServerShares,
    SimulatedLoad,
    SimulatedRun,
    SimulatedTokens,
    SimulatedWindow,
)
from llmtap.units import encode_seconds, to_seconds
from llmtap.workload.requests import Requests

if TYPE_CHECKING:
    from llmtap.capture.store.parquet import RunWriter


_MODEL: Final = "sim"
_CONTENT: Final = bytes((EventClass.CONTENT,))
_OUTPUT: Final = bytes((OUTPUT,))
_ONE: Final = array("l", (1,))
_NO_BYTES: Final = array("l", (0,))
_ERRORS_BEFORE_TOKENS: Final = {
    None: "given up by the scheduler",
    GivenUp.TOO_LARGE: "refused: it needs more than the KV memory holds",
    GivenUp.LATE: "given up before its first token: late",
}
"""Errors of requests that were given up without a token; `_ERRORS_MIDWAY`: after a token."""
_ERRORS_MIDWAY: Final = {None: "given up by the scheduler", GivenUp.LATE: "given up midway: a token was late"}


@dataclass(frozen=True, slots=True)
class SimulationResult:
    """Result of a run of the scheduler `name`."""

    name: str
    requests: Requests
    record: RunRecord
    """Times of all requests."""
    kind: SchedulerKind
    setup: ServingSetup
    """Latency models and options of the scheduler."""
    servers: int
    seed: int | None
    state: IterationState | None = None
    """State of the engine at the end; None for schedulers of whole batches."""
    summary: Summary | None = None
    slow_requests: int | None = None
    """Number of requests with a gap between tokens above the token SLA; None: not measured."""
    bins: list[tuple[int, int | None]] | None = None
    """Lower and upper edge of each bin of output lengths; None: the scheduler has no bins."""
    bin_limits: list[int] | None = None
    """Maximum batch size of each bin."""
    followed_exchange: Exchange | None = None
    """Exchange of the request whose token times are reported (`ExchangeMeasuring.follow`)."""
    router: str | None = None
    """Name of the router; None: the servers share one queue, or there is only one server."""

    def latencies_ns(self) -> list[int]:
        """Return the times from arrival to completion of completed requests, ascending."""
        ends, arrivals, given_up = self.record.end_ns, self.requests.arrival_ns, self.record.given_up
        pairs = enumerate(zip(ends, arrivals, strict=True))
        return sorted([end - arrival for i, (end, arrival) in pairs if i not in given_up])

    def ttfts_ns(self) -> list[int]:
        """Return the TTFTs of all requests with tokens, ascending, for schedulers of whole batches.

        Their TTFT is the wait for the start of the batch, plus alpha (multi-bin paper, 4.3).
        """
        first_ns = round(self.setup.model.alpha_ns)
        rows = zip(self.record.start_ns, self.requests.arrival_ns, self.requests.output, strict=True)
        return sorted([start + first_ns - arrival for start, arrival, made in rows if made])

    def decode_tbts_ns(self) -> list[int]:
        """Return the time between tokens of each request, ascending, for schedulers of whole batches.

        It is beta h(b), where b is the size of the request's batch (multi-bin paper, 6.2 and 8.4).
        """
        steps = ([round(self.setup.model.step_ns(b))] * (b * k) for b, k in self.record.run_sizes.items())
        return sorted(chain.from_iterable(steps))

    def late_share(self, latencies_ns: Sequence[int]) -> float:
        """Return the share of requests outside the request SLA: those that ended late or were given up."""
        limit_ns = self.setup.readings.request_sla
        late = sum(t > limit_ns for t in latencies_ns) + len(self.record.given_up)
        return late / len(self.requests)

    def slow_share(self) -> float | None:
        """Return the share of requests outside the token SLA; None if it was not measured.

        With whole batches, these are the requests in batches whose time between tokens is above the SLA;
        otherwise, they are the requests with any gap between two tokens above the SLA.
        """
        if self.kind.iterates:
            return None if self.slow_requests is None else self.slow_requests / len(self.requests)
        limit_ns, step_ns = self.setup.readings.token_sla, self.setup.model.step_ns
        slow = sum(b * n for b, n in self.record.run_sizes.items() if step_ns(b) > limit_ns)
        return slow / len(self.requests)

    def missed_share(self) -> float:
        """Return the share of requests that missed an objective; needs a run measured with objectives."""
        assert self.summary is not None
        met = sum(count.met for count in self.summary.goodput.by_objectives.values())
        return 1 - met / len(self.requests)

    def to_dict(self) -> dict[str, Any]:
        """Return public JSON in seconds: the fields of `SimulatedRun` and, if measured, of a `Summary`.

        `metrics.e2e`, and for whole batches `metrics.ttft`, are computed from exact values, not from
        histograms.
        """
        run = self.run()
        out: dict[str, Any] = msgspec.to_builtins(run)
        if self.summary is not None:
            measured = self.summary.to_dict(out["window"], run.window.seconds, "open")
            for name in ("metrics", "tokens"):
                out[name] = measured[name] | out[name]
            out = measured | out
        return out

    def run(self) -> SimulatedRun:
        """Return the figures of the run, except those of the `Summary`."""
        requests, record, readings = self.requests, self.record, self.setup.readings
        n, arrivals, given_up = len(requests), requests.arrival_ns, record.given_up
        span_ns, offered_ns = max(record.end_ns) - arrivals[0], arrivals[-1] - arrivals[0]
        completed = [r for r in range(n) if r not in given_up]
        window_ns = offered_ns
        if readings.window == "completion":
            window_ns = max((record.end_ns[r] for r in completed), default=arrivals[0]) - arrivals[0]
        input_tokens, output_completed = (
            sum([column[r] for r in completed]) for column in (requests.input, requests.output)
        )
        counted = output_completed if readings.tokens == "output" else input_tokens + output_completed
        truncated = [r for r, tokens in given_up.items() if tokens]
        # Include the tokens that left before their requests were given up.
        output_tokens = output_completed + sum(given_up.values())
        latencies_ns = self.latencies_ns()
        latency = _exact_figures(latencies_ns, readings.percentile)
        waits_ns = [at_ns - arrivals[r] for r, at_ns in enumerate(record.start_ns) if at_ns >= 0]
        busy_ns, batches = sum(record.busy_ns), record.run_sizes.total()
        step_ns: float = busy_ns
        if not self.kind.iterates:
            step_ns = sum(self.setup.model.step_ns(b) * k for b, k in record.run_sizes.items())
        outcomes = {
            Outcome.COMPLETE.value: record.finished,
            Outcome.TRUNCATED.value: len(truncated),
            Outcome.UPSTREAM_ERROR.value: len(given_up) - len(truncated),
        }
        unserved = Counter(
            reason.value + "_midway" * bool(given_up[r]) for r, reason in record.reasons.items()
        )
        metrics, rule = {"e2e": latency}, readings.percentile
        if not self.kind.iterates:
            metrics["ttft"] = _exact_figures(self.ttfts_ns(), rule)
        return SimulatedRun(
            scheduler=self.name,
            n=n,
            window=SimulatedWindow(
                f"first arrival to last {readings.window.removesuffix('s')}", to_seconds(window_ns)
            ),
            load=SimulatedLoad(offered_rps=rate_rps(n, offered_ns), achieved_rps=_rate_of(n, span_ns)),
            metrics=metrics,
            outcomes={outcome: k for outcome, k in outcomes.items() if k},
            unserved=dict(sorted(unserved.items())),
            tokens=SimulatedTokens(
                input_tokens + sum(requests.input[r] for r in truncated),
                output_tokens,
                _rate_of(output_tokens, window_ns),
            ),
            throughput_rps=_rate_of(record.finished, window_ns),
            throughput_tps=_rate_of(counted, window_ns),
            latency=latency,
            request_sla_violation=self.late_share(latencies_ns),
            token_sla_violation=self.slow_share(),
            utilization=busy_ns / (span_ns * self.servers) if span_ns else None,
            batch_mean=sum(b * k for b, k in record.run_sizes.items()) / batches if batches else None,
            batches=batches,
            batch_sizes={str(b): k for b, k in sorted(record.run_sizes.items())},
            queueing=_exact_figures(sorted(waits_ns), rule),
            decode_tbt=None if self.kind.iterates else _exact_figures(self.decode_tbts_ns(), rule),
            longest_output=None if self.kind.iterates else self._longest_outputs(),
            seconds_per_output_token=to_seconds(busy_ns) / output_tokens if output_tokens else None,
            decode_step_mean=to_seconds(step_ns / batches) if batches else None,
            bins=self.bins,
            bin_limits=self.bin_limits,
            servers=self.servers,
            router=self.router,
            by_server=self._by_server(span_ns),
            seed=self.seed,
            model=(self.setup.iterations if self.kind.iterates else self.setup.model).to_dict(),
            readings=self._options_json(readings),
            serving=self._options_json(self.setup.serving) if self.kind.iterates else msgspec.UNSET,
            engine=self._engine_figures(n) if self.kind.iterates else msgspec.UNSET,
            followed=(
                msgspec.UNSET if self.followed_exchange is None else _followed_request(self.followed_exchange)
            ),
        )

    def _by_server(self, span_ns: int) -> ServerShares | None:
        if self.router is None:
            return None
        requests = Counter(self.record.server)
        return ServerShares(
            [requests[server] for server in range(self.servers)],
            [busy_ns / span_ns if span_ns else None for busy_ns in self.record.busy_ns],
        )

    def _longest_outputs(self) -> LongestOutputs:
        """Return the mean of the longest output of each batch, and the mean expected for random batches."""
        record = self.record
        sizes = {size for _, size in record.batches}
        expected = expected_longest(self.requests.output, sizes)

        def means(queue: int | None) -> BatchOutputs:
            batches = {key: n for key, n in record.batches.items() if queue is None or key[0] == queue}
            n = sum(batches.values())
            return BatchOutputs(
                n,
                sum(record.longest_output_tokens[key] for key in batches) / n if n else None,
                sum(expected[size] * k for (_, size), k in batches.items()) / n if n else None,
            )

        by_bin = None if self.bins is None else [means(queue) for queue in range(len(self.bins))]
        return LongestOutputs(**msgspec.structs.asdict(means(None)), by_bin=by_bin)

    def _engine_figures(self, n: int) -> EngineFigures | None:
        """Return the figures of the engine's state. `n`: number of requests."""
        state = self.state
        if state is None:
            return None
        return EngineFigures(
            preemptions=state.preemptions,
            preempted=state.preempted,
            preempted_share=state.preempted / n,
            recovery=state.recovered / state.preempted if state.preempted else None,
            preempted_tokens=state.preempted_tokens,
            preemption_loss=state.preempted_tokens / state.preemptions if state.preemptions else None,
            kv_peak=state.kv_peak,
            prefix_queries=state.prefix_queries,
            prefix_hits=state.prefix_hits,
            prefix_hit_rate=state.prefix_hits / state.prefix_queries if state.prefix_queries else None,
        )

    def _options_json(self, options: msgspec.Struct) -> dict[str, object]:
        """Return the options as JSON; null for an option that the scheduler does not read."""
        out = msgspec.to_builtins(options, enc_hook=encode_seconds)
        return {name: value if name in self.kind.options_read else None for name, value in out.items()}


def _followed_request(x: Exchange) -> FollowedRequest:
    """Return the token counts and the token times of a request that the user selected."""
    times = [to_seconds(at_ns - x.timeline.arrival_ns) for at_ns in output_times_ns(x.timeline.events)]
    return FollowedRequest(x.seq, x.tokens.input, x.tokens.output, times)


def _exact_figures(ordered_ns: list[int], rule: str) -> ExactFigures:
    n = len(ordered_ns)
    if not n:
        return ExactFigures(n=0, marks=marks(0))
    return ExactFigures(
        n=n,
        # The sum of integers is exact, so the mean is the nearest double.
        mean=sum(ordered_ns) / (n * 10**9),
        min=to_seconds(ordered_ns[0]),
        max=to_seconds(ordered_ns[-1]),
        **{name: _percentile_s(ordered_ns, p, rule) for name, p in SHARES.items()},
        marks=marks(n),
    )


def _percentile_s(ordered_ns: list[int], p: float, rule: str) -> float | None:
    if rule != "linear":
        value = percentile_by(rule, ordered_ns, p)
        return None if value is None else to_seconds(value)
    # Convert to seconds before interpolation, to get the same rounding as implementations that store seconds.
    rank = (len(ordered_ns) - 1) * p
    neighbours = [to_seconds(t) for t in ordered_ns[int(rank) : int(rank) + 2]]
    return percentile(neighbours, rank - int(rank)) if len(neighbours) > 1 else neighbours[0]


def _rate_of(count: int, ns: int) -> float | None:
    return count * 10**9 / ns if ns else None


class ExchangeMaker:
    """Makes Exchanges from the token times of simulated requests."""

    def __init__(self, scheduler: str, requests: Requests, record: RunRecord | None = None) -> None:
        """`record`: record of the run, which has servers, cached tokens, and reasons of failure."""
        self._arm = scheduler
        """Name of the scheduler, which is the arm of each exchange."""
        self._relay = f"sim-{scheduler}"
        self._requests = requests
        self._record = RunRecord.for_requests(0, 0) if record is None else record

    def exchange(self, request: int, token_ns: Sequence[int], end_ns: int, *, served: bool) -> Exchange:
        """Return the Exchange of an ended request. If not `served`, it was given up."""
        requests, n = self._requests, len(token_ns)
        arrival_ns = requests.arrival_ns[request]
        stamps = array("q", token_ns)
        log = EventLog(stamps, bytearray(_CONTENT * n), _NO_BYTES * n, _ONE * n, bytearray(_OUTPUT * n))
        t = Timeline(arrival_ns, request_end_ns=arrival_ns, submit_ns=arrival_ns, events=log)
        t.response_end_ns = t.delivered_ns = end_ns
        x = Exchange(self._relay, request + 1, requests.epoch_ns + arrival_ns, t)
        x.method, x.path, x.endpoint = "POST", "/v1/chat/completions", "chat.completions"
        x.model = model = (requests.models[request] if requests.models else "") or _MODEL
        x.arm, x.clock = self._arm, "virtual"
        x.scheduled_ns, x.dispatch_late_ns = arrival_ns, 0
        if requests.blocks:
            blocks = array("q", requests.blocks[request])
            x.shape = RequestShape(blocks=blocks, block_size=requests.block_tokens, block_unit="tokens")
        if self._record.server and self._record.server[request] >= 0:
            x.route = f"gpu-{self._record.server[request]}"
        reason = self._record.reasons.get(request)
        if not served and not n:
            x.status, x.outcome, x.error = 503, Outcome.UPSTREAM_ERROR, _ERRORS_BEFORE_TOKENS[reason]
            t.head_ns = t.first_byte_ns = end_ns
            return x
        x.status, x.stream, x.dialect, x.response_model = 200, True, "openai.chat", model
        input_tokens, column = requests.input[request], self._record.cached
        x.usage = {"prompt_tokens": input_tokens, "completion_tokens": n, "total_tokens": input_tokens + n}
        cached = column[request] if column and column[request] >= 0 else None
        if cached is not None:
            x.usage["prompt_tokens_details"] = {"cached_tokens": cached}
        if served:
            x.tokens = Tokens(input_tokens, n, cached=cached, source=TokenSource.USAGE)
            x.finish_reason = "stop"
        else:
            # A truncated answer has no final usage, so its counts are those of the last event.
            x.tokens = Tokens(input_tokens, n, cached=cached, source=TokenSource.RUNNING_USAGE)
            x.outcome, x.error = Outcome.TRUNCATED, _ERRORS_MIDWAY[reason]
        if n:
            first_ns = stamps[0]
            t.head_ns = t.first_byte_ns = t.first_any_ns = first_ns
            t.first_token_ns = t.first_content_ns = first_ns
            t.last_token_ns = stamps[-1]
        else:
            x.no_token_reason = "empty"
            t.head_ns = t.first_byte_ns = end_ns
        return x


class VirtualMeter:
    """`RequestWatcher` that adds the exchange of each ended request to a summary, and passes it to `keep`."""

    def __init__(
        self,
        maker: ExchangeMaker,
        summary: Summary,
        reader: Benefit,
        gap_max_ns: int,
        keep: Callable[[Exchange], None],
    ) -> None:
        """`gap_max_ns`: time between two tokens above which a request is slow."""
        self.summary = summary
        self.slow_requests = 0
        """Number of requests with a gap longer than the limit."""
        self._reader = reader
        self._make_exchange = maker.exchange
        self._gap_max_ns = gap_max_ns
        """Longest allowed time between chunks."""
        self._keep_exchange = keep

    def on_ended(self, request: int, token_ns: Sequence[int], end_ns: int, *, served: bool) -> None:
        x = self._make_exchange(request, token_ns, end_ns, served=served)
        measured = measure(x, self._reader)
        self.summary.add(x, measured)
        if measured.tbc_max_ns is not None and measured.tbc_max_ns > self._gap_max_ns:
            self.slow_requests += 1
        self._keep_exchange(x)


def open_run_writer(to: str | Path, scheduler: str, requests: Requests) -> "RunWriter":
    """Return a writer of a run's capture to a folder or a URL. Raises ConfigError naming `to`.

    If the workload has no dates, its arrival times count from 1970 UTC (`CaptureInfo.arrivals`).
    """
    # Imported here, because the import of Arrow takes a third of a second, and few runs are captured.
    from llmtap.capture.schema import CaptureInfo
    from llmtap.capture.store.parquet import RunWriter

    info = CaptureInfo(
        level="shape",
        block_unit="tokens" if requests.blocks else "",
        block_size=requests.block_tokens,
        arrivals="wall" if requests.epoch_ns else "trace",
        blocks="trace" if requests.blocks else "salted",
    )
    return RunWriter(to, {f"sim-{scheduler}": len(requests)}, info, meter="sim")


@dataclass(frozen=True, slots=True)
class ExchangeMeasuring:
    """Options for the exchanges that a simulation makes and measures."""

    enabled: bool | None = None
    """Whether to make Exchanges and a summary of them, which takes ten times as long for whole batches. None:
    only if the scheduler iterates, or if another of these options needs them."""
    objectives: Objectives | None = None
    reader: Benefit = DEFAULT_BENEFIT
    """Reading speed of the assumed user, for smooth goodput."""
    follow: int | None = None
    """Row (from 1) of a request whose token times are reported; 0: the request with the longest answer."""
    capture: str | Path | None = None
    """Folder or URL for a capture of the exchanges; None: no capture."""


def simulate(
    name: str,
    requests: Requests,
    setup: ServingSetup,
    *,
    servers: int = 1,
    router: str | None = None,
    seed: int | None = 42,
    measuring: ExchangeMeasuring | None = None,
    progress: Callable[[int], None] | None = None,
) -> SimulationResult:
    """Run the scheduler `name` of `SCHEDULERS` on requests, whose output lengths are predicted first.

    With the reading `failed=dropped`, requests without output tokens in the trace are removed.

    Args:
        router: name in `ROUTERS`, for several servers of a scheduler that iterates; None: the default router.
            With whole batches, all servers share their queues, so there is no router.
        seed: random seed; None if nothing is random.
        progress: function that is called from time to time with the number of arrivals.

    Raises ValueError for invalid combinations, and ConfigError for a capture that cannot be written.
    """
    kind, readings, measuring = SCHEDULERS[name], setup.readings, measuring or ExchangeMeasuring()
    objectives, capture, follow = measuring.objectives, measuring.capture, measuring.follow
    router = (router or DEFAULT_ROUTER) if kind.iterates and servers > 1 else None
    exchanges_needed = objectives is not None or capture is not None or follow is not None
    is_measured = measuring.enabled
    if is_measured is None:
        is_measured = kind.iterates or exchanges_needed
    elif not is_measured and exchanges_needed:
        raise ValueError(
            "measuring.enabled: expected true, because objectives, a capture or a followed request are set"
        )
    if readings.failed == "dropped":
        requests = requests.select_rows([row for row, made in enumerate(requests.output) if made])
        if not requests:
            raise ValueError("no requests are left: none has output tokens; leave out failed=dropped")
    requests = replace(requests, predicted=predict(requests, readings.predictor, seed))
    engine: AnyEngine
    if router is None:
        scheduler = kind.build(requests, setup)
        engine = Engine(scheduler, servers)
    else:
        schedulers = [cast(Iterating, kind.build(requests, setup)) for _ in range(servers)]
        scheduler = schedulers[0]
        engine = RoutedEngine(schedulers, ROUTERS[router](requests, servers, setup.serving.kv_tokens))
    record = RunRecord.for_requests(len(requests), servers)
    writer: RunWriter | None = None
    meter = None
    followed: list[Exchange] = []
    if follow == 0:
        follow = 1 + max(range(len(requests)), key=requests.output.__getitem__)

    def keep(x: Exchange) -> None:
        if writer is not None:
            writer.add(x)
        if x.seq == follow:
            followed.append(x)

    if is_measured:
        writer = None if capture is None else open_run_writer(capture, name, requests)
        meter = VirtualMeter(
            ExchangeMaker(name, requests, record),
            Summary(objectives, measuring.reader),
            measuring.reader,
            readings.token_sla,
            keep,
        )
    run_virtual(
        requests,
        engine,
        servers=servers,
        all_first=readings.same_instant == "all-first",
        gpu_first=readings.tie == "gpu-first",
        watch=meter,
        record=record,
        progress=progress,
    )
    if writer is not None:
        writer.close()
    binned = scheduler if isinstance(scheduler, MultiBinDynamic) else None
    return SimulationResult(
        name,
        requests,
        record,
        kind,
        setup,
        servers,
        seed,
        state=getattr(scheduler if router is None else engine, "state", None) if kind.iterates else None,
        summary=None if meter is None else meter.summary,
        slow_requests=None if meter is None else meter.slow_requests,
        bins=None if binned is None else binned.bins.spans,
        bin_limits=None if binned is None else binned.limits,
        followed_exchange=next(iter(followed), None),
        router=router,
    )


def expected_longest(lengths: Sequence[int], sizes: Iterable[int]) -> dict[int, float]:
    """Return for each size k the expected maximum of k lengths that are drawn at random with replacement."""
    values, counts = np.unique(np.asarray(lengths), return_counts=True)
    below = np.concatenate(([0.0], np.cumsum(counts) / len(lengths)))
    return {size: float(np.sum(values * np.diff(below**size))) for size in sizes}


def capacity_rps(
    late_share: Callable[[float], float], allowed: float, start_rps: float, *, precision: float = 0.01
) -> float | None:
    """Return the highest rate at which at most the share `allowed` of the requests is late.

    `late_share`: function that returns the share of late requests at a rate; it must increase with the rate.
    `precision`: maximum relative error of the result. The result is 0 if even a thousandth of `start_rps` is
    too high, and None if the share is small enough at any rate.
    """
    if late_share(math.inf) <= allowed:
        return None
    low = high = start_rps
    if late_share(start_rps) <= allowed:
        while late_share(high := high * 2) <= allowed:
            low = high
    else:
        while late_share(low := low / 2) > allowed:
            high = low
            if low < start_rps / 1_000:
                return 0.0
    while high / low > 1 + precision:
        middle = (low * high) ** 0.5
        if late_share(middle) <= allowed:
            low = middle
        else:
            high = middle
    return low

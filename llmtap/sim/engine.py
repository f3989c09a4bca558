"""The simulated inference engine, the interface of its schedulers, and a driver in virtual time.

A driver reports events to an `Engine` in order of time (`arrive`, `on_done`, `leave`, `close`). Each call
returns a `Step`: the tokens made, the requests given up, and the runs that start, each with the time at which
the driver must call `on_done`. `run_virtual` is the driver in virtual time: it serves a whole workload
(`Requests`), jumps from each event to the next, and returns the times of all requests (`RunRecord`). The
driver in real time is `server/live.py`.

A run is the work of a server without a pause: a whole batch, or one iteration of a scheduler that composes a
new batch for each iteration. The engine calls the scheduler's `form_work` when a server is free after an
event. At the end of a run, the scheduler returns the tokens made, the times at which they leave the engine,
and the finished requests. Times are whole ns of any clock; requests are numbers. This module reads no clock,
does no IO, and has no randomness. The schedulers are in `schedulers/`.
"""

from array import array
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from heapq import heappop, heappush
from typing import Any, Final, Protocol

from llmtap.workload.requests import Requests

_NEVER: Final = (1 << 63) - 1
_PROGRESS_ARRIVALS: Final = 1 << 14
"""Number of arrivals between two calls of `progress` by `run_virtual`, so that they take little time."""


class GivenUp(Enum):
    """Reason why a scheduler gave a request up."""

    TOO_LARGE = "too_large"
    """The request needs more than the whole KV memory."""
    LATE = "late"
    """A token of the request was later than its limit."""


NO_REQUESTS: Final[Mapping[int, GivenUp]] = {}
"""Result of `Scheduler.take_given_up` if no request was given up."""


@dataclass(frozen=True, slots=True)
class Batch:
    """Requests (`members`) that one server processes together, until the longest one ends."""

    members: Sequence[int]
    """Requests in the batch."""
    duration_ns: int
    first_ns: int
    """Time from the start of the batch to the first token of each request: alpha (multi-bin paper, 4.3)."""
    step_ns: float
    """Time between two tokens of a request: beta h(b) (multi-bin paper, 4.3)."""
    queue: int = 0
    """Number of the queue (bin) from which the requests come."""

    def token_times(self, start_ns: int, tokens: int) -> range:
        """Return the times of a request's tokens, if its batch began at `start_ns` (multi-bin paper, 4.3).

        The first token is made after alpha, and one token after each further beta h(b), in whole ns.
        """
        first_ns = start_ns + self.first_ns
        step_ns = max(1, round(self.step_ns))
        return range(first_ns, first_ns + tokens * step_ns, step_ns)


@dataclass(frozen=True, slots=True)
class Iteration:
    """One forward pass of a server, as composed by a scheduler."""

    duration_ns: int
    prefill: Sequence[tuple[int, int]] = ()
    """Requests whose prompts are processed, each with the number of prompt tokens. If these complete the
    prompt, the first token of the answer is made, too."""
    decode: Sequence[int] = ()
    """Requests that make their next token."""


@dataclass(frozen=True, slots=True)
class EngineOutput:
    """Output of a run at its end: the tokens made, and the requests that have finished."""

    finished: Sequence[int] = ()
    """Requests that have all their tokens."""
    tokens: Sequence[int] = ()
    """For each token, the request to which it belongs, in the order in which the tokens leave the engine.
    Empty for a `Batch`: its `token_times` are known from the start."""
    due_ns: Sequence[int] | None = None
    """For each token, the time at which it leaves the engine; None: all leave at the end of the run."""
    cached: Mapping[int, int] | None = None
    """For each request whose prompt was completed, its cached prompt tokens; None without a prefix cache."""


def with_departure_times(output: EngineOutput, due_ns: Sequence[int]) -> EngineOutput:
    """Return a copy of the output whose tokens leave at `due_ns`, sorted by these times."""
    leaving = sorted(zip(due_ns, output.tokens, strict=True))
    return replace(output, tokens=[request for _, request in leaving], due_ns=[due for due, _ in leaving])


class Scheduler(Protocol):
    """Decides which requests a server processes next."""

    def on_arrival(self, now_ns: int, request: int) -> None:
        """Add a new request."""

    def on_close(self, now_ns: int) -> None:
        """Record that no other request will arrive, so that no batch waits for more requests."""

    def form_work(self, now_ns: int) -> Any | None:
        """Return the next batch or iteration of a free server, or None to wait."""

    def on_done(self, now_ns: int, work: Any) -> EngineOutput:
        """Return the output of a batch or iteration that has finished."""

    def on_left(self, now_ns: int, request: int) -> None:
        """Remove an open request whose client has disconnected."""

    def take_given_up(self) -> Mapping[int, GivenUp]:
        """Return the requests that were given up since the previous call, each with the reason."""


@dataclass(slots=True)
class IterationState:
    """Current state of an engine, and counts since its start, as in vLLM's `/metrics`."""

    running: int = 0
    """Number of running requests; `waiting`: number of waiting requests."""
    waiting: int = 0
    """Number of requests in the queue."""
    kv_used: float = 0.0
    """Share of the KV memory in use; `kv_peak`: its maximum since the start."""
    kv_peak: float = 0.0
    """Largest share of the KV memory in use since the start."""
    preemptions: int = 0
    """Number of preemptions: a request can be preempted several times."""
    preempted: int = 0
    """Number of requests preempted at least once; `recovered`: number of these served to the end."""
    recovered: int = 0
    """Number of preempted requests that were served to the end."""
    preempted_tokens: int = 0
    """Number of tokens whose KV was discarded by preemption; `swapped_tokens`: swapped out by preemption."""
    swapped_tokens: int = 0
    """Number of tokens whose KV was swapped out by preemption."""
    prefix_queries: int = 0
    """Number of prompt tokens searched in the prefix cache; `prefix_hits`: number of tokens found."""
    prefix_hits: int = 0
    """Number of prompt tokens that were found in the prefix cache."""


class Iterating(Scheduler, Protocol):
    """A scheduler that composes a new batch at every iteration, and reports its state."""

    state: IterationState


@dataclass(slots=True)
class EngineRun:
    """Work of one server (a `Batch` or an `Iteration`), with its start and end."""

    server: int
    """Index of the server."""
    work: Any
    """The `Batch` or `Iteration` that the server processes."""
    start_ns: int
    end_ns: int


@dataclass(frozen=True, slots=True)
class Step:
    """Result of an event: the runs that start, the output of a run that ended, the requests given up."""

    started: Sequence[EngineRun] = ()
    """Runs that begin now."""
    output: EngineOutput = EngineOutput()
    given_up: Mapping[int, GivenUp] = field(default_factory=dict)
    """By request: why it will not be served."""


_NOTHING: Final = Step()


class AnyEngine(Protocol):
    """Engine that `run_virtual` drives: an `Engine`, or several behind a router."""

    def arrive(self, now_ns: int, request: int, *, more: bool = False) -> Step:
        """A request arrives. `more`: others arrive at the same time. Return what the engine does next."""
        ...

    def on_done(self, now_ns: int, run: EngineRun) -> Step:
        """A run (a batch or an iteration) ends. Return its results, and what the engine does next."""
        ...

    def close(self, now_ns: int) -> Step:
        """No further request arrives, so batches need not wait for more."""
        ...


class Engine:
    """Servers of one scheduler."""

    def __init__(self, scheduler: Scheduler, servers: int = 1, *, first: int = 0) -> None:
        """`first`: number of the first server; engines behind one router have different numbers."""
        assert servers >= 1
        self._scheduler = scheduler
        self._free_servers = list(range(first, first + servers))
        """Heap of the numbers of free servers: the lowest number is used next."""
        self._now_ns: int | None = None
        """Time of the previous event."""

    def arrive(self, now_ns: int, request: int, *, more: bool = False) -> Step:
        """Add a request. `more`: whether servers must wait for another arrival at the same time."""
        self._set_time(now_ns)
        self._scheduler.on_arrival(now_ns, request)
        return _NOTHING if more else self.dispatch(now_ns)

    def on_done(self, now_ns: int, run: EngineRun) -> Step:
        self._set_time(now_ns)
        assert now_ns >= run.end_ns
        output = self._scheduler.on_done(now_ns, run.work)
        heappush(self._free_servers, run.server)
        step = self.dispatch(now_ns)
        return Step(step.started, output, step.given_up)

    def leave(self, now_ns: int, request: int) -> Step:
        """End a request whose client has left."""
        self._set_time(now_ns)
        self._scheduler.on_left(now_ns, request)
        return self.dispatch(now_ns)

    def close(self, now_ns: int) -> Step:
        """No further request arrives, so batches need not wait for more."""
        self._set_time(now_ns)
        self._scheduler.on_close(now_ns)
        return self.dispatch(now_ns)

    def dispatch(self, now_ns: int) -> Step:
        """Start work on the free servers. Must be called at the time of an event."""
        started = []
        while self._free_servers:
            work = self._scheduler.form_work(now_ns)
            if work is None:
                break
            started.append(EngineRun(heappop(self._free_servers), work, now_ns, now_ns + work.duration_ns))
        given_up = self._scheduler.take_given_up()
        return Step(started, given_up=given_up) if started or given_up else _NOTHING

    def _set_time(self, now_ns: int) -> None:
        assert self._now_ns is None or now_ns >= self._now_ns, "an event is earlier than the event before it"
        self._now_ns = now_ns


class RequestWatcher(Protocol):
    """Listener for the end of each request."""

    def on_ended(self, request: int, token_ns: Sequence[int], end_ns: int, *, served: bool) -> None:
        """Receive the times at which a request's tokens left, in order, and the end of its answer.

        The end is at or after the last token. If not `served`, the request was given up after these tokens.
        """


@dataclass(slots=True)
class RunRecord:
    """Times and servers of all requests of a workload as columns, and counts of runs. Times are in ns."""

    start_ns: "array[int]"
    """Time at which a server began to process each request; -1: never."""
    end_ns: "array[int]"
    """Time at which the last token left, the whole batch ended, or the request was given up."""
    server: "array[int]"
    """Server that first processed each request; -1: none."""
    size: "array[int]"
    """Number of requests in the run in which each request was first processed."""
    busy_ns: list[int]
    """Sum of the durations of each server's runs."""
    run_sizes: Counter[int] = field(default_factory=Counter)
    """Number of runs, by the number of their requests."""
    batches: Counter[tuple[int, int]] = field(default_factory=Counter)
    """Number of whole batches, by queue and batch size."""
    longest_output_tokens: Counter[tuple[int, int]] = field(default_factory=Counter)
    """Sum, over these batches, of the tokens of the longest answer; by queue and batch size."""
    finished: int = 0
    """Number of requests that were served to the end."""
    given_up: dict[int, int] = field(default_factory=dict)
    """Requests that were not served to the end, with the number of tokens that had left."""
    reasons: dict[int, GivenUp] = field(default_factory=dict)
    """Reason why each request in `given_up` was given up."""
    cached: "array[int]" = field(default_factory=lambda: array("q"))
    """Cached prompt tokens of each request; -1: its prompt was never completed. Empty without a cache."""

    @classmethod
    def for_requests(cls, requests: int, servers: int) -> "RunRecord":
        n = requests
        starts, ends, size = array("q", [-1]) * n, array("q", bytes(8 * n)), array("q", bytes(8 * n))
        return cls(starts, ends, array("q", [-1]) * n, size, [0] * servers)


class _Recorder:
    """Fills a `RunRecord` from steps, and has the current runs."""

    def __init__(self, requests: Requests, record: RunRecord, watcher: RequestWatcher | None) -> None:
        self.runs: list[tuple[int, int, EngineRun]] = []
        """Heap of the current runs, each with its end and its number; the run that ends first is first."""
        self._record = record
        self._outputs = requests.output
        """By request: number of its output tokens."""
        self._watcher = watcher
        self._token_times: dict[int, list[int]] = {}
        """Times at which the tokens of each open request left, for schedulers that iterate."""
        self._runs_started = 0
        """Number of runs so far, which orders runs that end at the same time."""

    def record_step(self, now_ns: int, step: Step, run: EngineRun | None = None) -> None:
        """Record what a step of the engine has done. `run`: the work that ended; None: none ended."""
        if run is not None:
            if isinstance(run.work, Batch):
                self._record_batch(now_ns, run)
            else:
                self._record_iteration(now_ns, step.output)
        for request, reason in step.given_up.items():
            self._record.reasons[request] = reason
            self._end(now_ns, request, served=False)
        for started in step.started:
            self._runs_started += 1
            heappush(self.runs, (started.end_ns, self._runs_started, started))
            self._record_start(started)

    def _record_start(self, run: EngineRun) -> None:
        """Record the batch or the iteration that the engine begins."""
        record, now_ns, work = self._record, run.start_ns, run.work
        if isinstance(work, Batch):
            requests, size = work.members, len(work.members)
            outputs, key = self._outputs, (work.queue, size)
            record.batches[key] += 1
            record.longest_output_tokens[key] += max([outputs[request] for request in requests])
        else:
            assert isinstance(work, Iteration)
            requests = [request for request, _ in work.prefill]
            size = len(work.prefill) + len(work.decode)
        for request in requests:
            if record.start_ns[request] < 0:
                record.start_ns[request] = now_ns
                record.server[request] = run.server
                record.size[request] = size
        record.run_sizes[size] += 1
        record.busy_ns[run.server] += run.end_ns - now_ns

    def _record_batch(self, now_ns: int, run: EngineRun) -> None:
        """Record the end of a batch: all its requests end."""
        batch: Batch = run.work
        record, watcher = self._record, self._watcher
        for request in batch.members:
            record.end_ns[request] = now_ns
        record.finished += len(batch.members)
        if watcher is not None:
            for request in batch.members:
                times = batch.token_times(run.start_ns, self._outputs[request])
                watcher.on_ended(request, times, now_ns, served=True)

    def _record_iteration(self, now_ns: int, output: EngineOutput) -> None:
        """Record the tokens of an iteration."""
        record, token_times = self._record, self._token_times
        if output.cached is not None:
            if not record.cached:
                record.cached = array("q", [-1]) * len(record.start_ns)
            for request, count in output.cached.items():
                record.cached[request] = count
        if output.due_ns is None:
            for request in output.tokens:
                token_times.setdefault(request, []).append(now_ns)
        else:
            for request, due_ns in zip(output.tokens, output.due_ns, strict=True):
                token_times.setdefault(request, []).append(due_ns)
        for request in output.finished:
            self._end(now_ns, request, served=True)

    def _end(self, now_ns: int, request: int, *, served: bool) -> None:
        """Record the end of a request. `served`: it was complete, and not given up."""
        record, times = self._record, self._token_times.pop(request, ())
        # Tokens that were already made leave at their due times, so the answer does not end before the last
        # one.
        record.end_ns[request] = end_ns = max(now_ns, times[-1]) if times else now_ns
        if served:
            record.finished += 1
        else:
            record.given_up[request] = len(times)
        if self._watcher is not None:
            self._watcher.on_ended(request, times, end_ns, served=served)


def run_virtual(
    requests: Requests,
    engine: AnyEngine,
    *,
    servers: int = 1,
    all_first: bool = False,
    gpu_first: bool = False,
    watch: RequestWatcher | None = None,
    record: RunRecord | None = None,
    progress: Callable[[int], None] | None = None,
) -> RunRecord:
    """Serve all requests in virtual time. The requests must be in the order of their arrivals.

    Args:
        all_first: whether servers wait for the last of several requests that arrive at the same time (point
            18 of `ModelOptions`).
        gpu_first: whether the end of a run is processed before an arrival at the same time (point 19).
        watch: listener for the end of each request.
        record: record to fill, if `watch` reads it during the run; None: a new record.
        progress: function that is called from time to time with the number of arrivals.
    """
    n = len(requests)
    if record is None:
        record = RunRecord.for_requests(n, servers)
    recorder = _Recorder(requests, record, watch)
    runs, record_step = recorder.runs, recorder.record_step
    arrivals = requests.arrival_ns
    lead = 1 if gpu_first else 0
    arrive, on_done = engine.arrive, engine.on_done
    closed = n == 0
    now_ns = i = 0
    while i < n or runs:
        if i < n and arrivals[i] + lead <= (runs[0][0] if runs else _NEVER):
            now_ns = arrivals[i]
            more = all_first and i + 1 < n and arrivals[i + 1] == now_ns
            step = arrive(now_ns, i, more=more)
            i += 1
            if progress is not None and not i % _PROGRESS_ARRIVALS:
                progress(i)
            if step.started or step.given_up:
                record_step(now_ns, step)
        else:
            now_ns, _, run = heappop(runs)
            record_step(now_ns, on_done(now_ns, run), run)
        if i == n and not closed:
            closed = True
            record_step(now_ns, engine.close(now_ns))
    lost = n - record.finished - len(record.given_up)
    assert not lost, f"{lost} of {n} requests were neither served nor given up"
    return record

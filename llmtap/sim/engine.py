"""The simulated inference engine, the interface of its schedulers, and a driver in virtual time.

A driver reports events to an `Engine` in order of time (`arrive`, `on_done`, `leave`, `close`). Each call
returns a `Step`: the tokens made, the requests given up, and the runs that start, each with the time at which
the driver must call `on_done`. `run_virtual` serves a whole workload (`Requests`): it jumps from one run's
end to the next and returns the times of all requests (`RunRecord`). The driver in real time is
`server/live.py`.

A run is the work of a server without a pause: a whole batch, or one iteration of a scheduler that composes a
new batch for each iteration. The engine calls the scheduler's `form_work` when a server is free and something
changed. At the end of a run the scheduler reports the tokens made, when each leaves, and the finished
requests. Times are whole ns of any clock; requests are numbers. There is no clock, no IO and no randomness
here; the schedulers are in `schedulers/`.
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
_PROGRESS_EVERY: Final = 1 << 14


class GivenUp(Enum):
    TOO_LARGE = "too_large"
    LATE = "late"


NO_REQUESTS: Final[Mapping[int, GivenUp]] = {}


@dataclass(frozen=True, slots=True)
class Batch:
    """Requests that one server processes together, until the longest one ends."""

    members: Sequence[int]
    duration_ns: int
    first_ns: int
    """Time from the start of the batch to the first token of each request: alpha (multi-bin paper, 4.3)."""
    step_ns: float
    queue: int = 0

    def token_times(self, start_ns: int, tokens: int) -> range:
        """Return the times of the tokens of a request in a batch that began at `start_ns` (multi-bin paper,
        4.3).

        The first token is made after alpha, then one every beta h(b), in whole ns. The batch may last longer.
        """
        first_ns = start_ns + self.first_ns
        step_ns = max(1, round(self.step_ns))
        return range(first_ns, first_ns + tokens * step_ns, step_ns)


@dataclass(frozen=True, slots=True)
class Iteration:
    """One forward pass of a server, as composed by a scheduler."""

    duration_ns: int
    prefill: Sequence[tuple[int, int]] = ()
    """Requests, each with the number of tokens of its prompt that are processed. If this completes the
    prompt, the first token of the answer is made as well."""
    decode: Sequence[int] = ()


@dataclass(frozen=True, slots=True)
class EngineOutput:
    finished: Sequence[int] = ()
    tokens: Sequence[int] = ()
    """For each token, the request to which it belongs, in the order in which the tokens leave. Empty for a
    `Batch`: its `token_times` are known from the start."""
    due_ns: Sequence[int] | None = None
    cached: Mapping[int, int] | None = None


def with_departure_times(output: EngineOutput, due_ns: Sequence[int]) -> EngineOutput:
    """Return this output with the tokens in the order of `due_ns`, the times at which they leave."""
    leaving = sorted(zip(due_ns, output.tokens, strict=True))
    return replace(output, tokens=[request for _, request in leaving], due_ns=[due for due, _ in leaving])


class Scheduler(Protocol):
    def on_arrival(self, now_ns: int, request: int) -> None:
        """Add a new request."""

    def on_close(self, now_ns: int) -> None:
        """Record that no other request will arrive, so that batches need not wait for more."""

    def form_work(self, now_ns: int) -> Any | None:
        """Return the next batch or iteration of a free server, or None to wait."""

    def on_done(self, now_ns: int, work: Any) -> EngineOutput:
        """Return the output of a batch or iteration that has finished."""

    def on_left(self, now_ns: int, request: int) -> None:
        """Drop an open request whose client has disconnected."""

    def take_given_up(self) -> Mapping[int, GivenUp]:
        """Return the requests that were given up since the last call, each with the reason."""


@dataclass(slots=True)
class IterationState:
    """Current state of an engine, and counts since its start, as in vLLM's `/metrics`."""

    running: int = 0
    waiting: int = 0
    kv_used: float = 0.0
    kv_peak: float = 0.0
    preemptions: int = 0
    preempted: int = 0
    recovered: int = 0
    """Number of preempted requests that were served to the end."""
    preempted_tokens: int = 0
    swapped_tokens: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0


class Iterating(Scheduler, Protocol):
    """A scheduler that composes a new batch at every iteration, and reports its state."""

    state: IterationState


@dataclass(slots=True)
class EngineRun:
    """Work of one server (a `Batch` or an `Iteration`), with its start and end."""

    server: int
    work: Any
    start_ns: int
    end_ns: int


@dataclass(frozen=True, slots=True)
class Step:
    started: Sequence[EngineRun] = ()
    output: EngineOutput = EngineOutput()
    given_up: Mapping[int, GivenUp] = field(default_factory=dict)


_NOTHING: Final = Step()


class EngineDriver(Protocol):
    """Receiver of the events of `run_virtual`: an `Engine`, or several behind a router."""

    def arrive(self, now_ns: int, request: int, *, more: bool = False) -> Step: ...

    def on_done(self, now_ns: int, run: EngineRun) -> Step: ...

    def close(self, now_ns: int) -> Step: ...


class Engine:
    def __init__(self, scheduler: Scheduler, servers: int = 1, *, first: int = 0) -> None:
        """`first`: number of the first server."""
        assert servers >= 1
        self._scheduler = scheduler
        self._free_servers = list(
            range(first, first + servers)
        )  # A heap, so that the lowest number is used next.
        self._now_ns: int | None = None

    def arrive(self, now_ns: int, request: int, *, more: bool = False) -> Step:
        """Add a request. `more`: other requests arrive at the same time, so do not start work before them."""
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
        self._set_time(now_ns)
        self._scheduler.on_left(now_ns, request)
        return self.dispatch(now_ns)

    def close(self, now_ns: int) -> Step:
        self._set_time(now_ns)
        self._scheduler.on_close(now_ns)
        return self.dispatch(now_ns)

    def dispatch(self, now_ns: int) -> Step:
        """Start work on the free servers, at the time of an arrival or of a completed run."""
        started = []
        while self._free_servers:
            work = self._scheduler.form_work(now_ns)
            if work is None:
                break
            started.append(EngineRun(heappop(self._free_servers), work, now_ns, now_ns + work.duration_ns))
        given_up = self._scheduler.take_given_up()
        return Step(started, given_up=given_up) if started or given_up else _NOTHING

    def _set_time(self, now_ns: int) -> None:
        assert self._now_ns is None or now_ns >= self._now_ns, "time went back"
        self._now_ns = now_ns


class RequestWatcher(Protocol):
    """Listener for the end of each request."""

    def on_ended(self, request: int, token_ns: Sequence[int], end_ns: int, *, served: bool) -> None:
        """Receive the departure times of a request's tokens, in order, and the end of its answer.

        The end is not before the last token. If not `served`, the request was given up after these tokens.
        """


@dataclass(slots=True)
class RunRecord:
    """Record of a run: times of each request as columns, and counts of the servers. Times are in ns."""

    start_ns: "array[int]"
    end_ns: "array[int]"
    """Time at which the last token left, the whole batch ended, or the request was given up."""
    server: "array[int]"
    size: "array[int]"
    busy_ns: list[int]
    sizes: Counter[int] = field(default_factory=Counter)
    batches: Counter[tuple[int, int]] = field(default_factory=Counter)
    """Number of whole batches, by queue and batch size."""
    longest: Counter[tuple[int, int]] = field(default_factory=Counter)
    """Sum of the tokens of the longest answer of each of these batches, by queue and batch size."""
    finished: int = 0
    given_up: dict[int, int] = field(default_factory=dict)
    """Requests that were not served to the end, with the number of tokens that had left."""
    reasons: dict[int, GivenUp] = field(default_factory=dict)
    cached: "array[int]" = field(default_factory=lambda: array("q"))
    """Number of prompt tokens of each request found in the prefix cache; -1 if it was never searched. Empty
    without a cache."""

    @classmethod
    def for_requests(cls, requests: int, servers: int) -> "RunRecord":
        n = requests
        starts, ends, size = array("q", [-1]) * n, array("q", bytes(8 * n)), array("q", bytes(8 * n))
        return cls(starts, ends, array("q", [-1]) * n, size, [0] * servers)


class _Recorder:
    def __init__(self, requests: Requests, record: RunRecord, watch: RequestWatcher | None) -> None:
        self.runs: list[tuple[int, int, EngineRun]] = []
        self._record = record
        self._outputs = requests.output
        self._watch = watch
        self._tokens: dict[int, list[int]] = {}
        """Departure times of the tokens of each open request, for schedulers that iterate."""
        self._begin_ns = 0

    def record_step(self, now_ns: int, step: Step, run: EngineRun | None = None) -> None:
        if run is not None:
            if isinstance(run.work, Batch):
                self._record_batch(now_ns, run)
            else:
                self._record_iteration(now_ns, step.output)
        for request, reason in step.given_up.items():
            self._record.reasons[request] = reason
            self._end(now_ns, request, served=False)
        for started in step.started:
            self._begin_ns += 1
            heappush(self.runs, (started.end_ns, self._begin_ns, started))
            self._start(started)

    def _start(self, run: EngineRun) -> None:
        record, now_ns, work = self._record, run.start_ns, run.work
        if isinstance(work, Batch):
            taken_up, size = work.members, len(work.members)
            outputs, key = self._outputs, (work.queue, size)
            record.batches[key] += 1
            record.longest[key] += max([outputs[request] for request in taken_up])
        else:
            assert isinstance(work, Iteration)
            taken_up = [request for request, _ in work.prefill]
            size = len(work.prefill) + len(work.decode)
        for request in taken_up:
            if record.start_ns[request] < 0:
                record.start_ns[request] = now_ns
                record.server[request] = run.server
                record.size[request] = size
        record.sizes[size] += 1
        record.busy_ns[run.server] += run.end_ns - now_ns

    def _record_batch(self, now_ns: int, run: EngineRun) -> None:
        batch: Batch = run.work
        record, watch = self._record, self._watch
        for request in batch.members:
            record.end_ns[request] = now_ns
        record.finished += len(batch.members)
        if watch is not None:
            for request in batch.members:
                times = batch.token_times(run.start_ns, self._outputs[request])
                watch.on_ended(request, times, now_ns, served=True)

    def _record_iteration(self, now_ns: int, output: EngineOutput) -> None:
        record, tokens = self._record, self._tokens
        if output.cached is not None:
            if not record.cached:
                record.cached = array("q", [-1]) * len(record.start_ns)
            for request, count in output.cached.items():
                record.cached[request] = count
        if output.due_ns is None:
            for request in output.tokens:
                tokens.setdefault(request, []).append(now_ns)
        else:
            for request, due_ns in zip(output.tokens, output.due_ns, strict=True):
                tokens.setdefault(request, []).append(due_ns)
        for request in output.finished:
            self._end(now_ns, request, served=True)

    def _end(self, now_ns: int, request: int, *, served: bool) -> None:
        record, times = self._record, self._tokens.pop(request, ())
        # Tokens that were already made still leave at their due times, so the answer ends with the last of
        # them.
        record.end_ns[request] = end_ns = max(now_ns, times[-1]) if times else now_ns
        if served:
            record.finished += 1
        else:
            record.given_up[request] = len(times)
        if self._watch is not None:
            self._watch.on_ended(request, times, end_ns, served=served)


def run_virtual(
    requests: Requests,
    engine: EngineDriver,
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
        all_first: if several requests arrive at one time, servers wait for the last of them (choice 18 of the
            multi-bin paper).
        gpu_first: if a run ends at the time of an arrival, its end is processed first (choice 19).
        watch: listener for the end of each request.
        record: record to fill, if `watch` reads it during the run.
        progress: function called from time to time with the number of arrivals.
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
            if progress is not None and not i % _PROGRESS_EVERY:
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
    assert not lost, f"{lost} requests were never served"
    return record

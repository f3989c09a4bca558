"""The driver in virtual time: jumps from event to event, and writes down what became of every request.

Arrivals are a sorted column, so only runs are in the heap: one for each busy server.
"""

from array import array
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import Final, Protocol

from llmtap.sim.engine import Engine, EngineRun, GivenUp, Step
from llmtap.sim.schedulers.batches import Batch
from llmtap.sim.schedulers.iterations import Iteration
from llmtap.workload.requests import Requests

__all__ = ["Played", "RequestWatcher", "play"]

_NEVER: Final = (1 << 63) - 1
_TOLD_EVERY: Final = 1 << 14


class RequestWatcher(Protocol):
    """Whoever wants to know when each token left."""

    def ended(self, request: int, token_ns: Sequence[int], end_ns: int, *, served: bool) -> None:
        """A request is over: when each of its tokens left, never falling, and when the answer ended, which
        is not before the last of them. Where it was not `served`, it was given up after these tokens."""


@dataclass(slots=True)
class Played:
    """What became of requests, as columns, and of servers. ns."""

    start_ns: "array[int]"
    """When a server first took it up; -1 where none did."""
    end_ns: "array[int]"
    """When its last token left, or its batch was done, or it was given up."""
    size: "array[int]"
    """Of the batch it was in, or of the iteration that took it up."""
    busy_ns: list[int]
    """Of each server."""
    sizes: Counter[int] = field(default_factory=Counter)
    """Batches, or iterations, by how many requests were in them."""
    queues: Counter[int] = field(default_factory=Counter)
    """Batches by the queue they were from."""
    finished: int = 0
    given_up: dict[int, int] = field(default_factory=dict)
    """Requests that were not served to the end, and how many tokens of each had left."""
    reasons: dict[int, GivenUp] = field(default_factory=dict)
    """Why each of these was not."""
    cached: "array[int]" = field(default_factory=lambda: array("q"))
    """Tokens of its prompt that were in the prefix cache, -1 where it was not taken in; empty without one."""

    @classmethod
    def begun(cls, requests: int, servers: int) -> "Played":
        """Of so many, when nothing has happened yet."""
        n = requests
        starts, ends, size = array("q", [-1]) * n, array("q", bytes(8 * n)), array("q", bytes(8 * n))
        return cls(starts, ends, size, [0] * servers)


class _Player:
    """Writes down what steps say."""

    def __init__(self, requests: Requests, played: Played, watch: RequestWatcher | None) -> None:
        self.played = played
        self.runs: list[tuple[int, int, EngineRun]] = []
        self._outputs = requests.output
        self._watch = watch
        self._tokens: dict[int, list[int]] = {}
        """Of requests that make tokens one by one, as long as they are not over: when each left."""
        self._began = 0

    def note(self, now_ns: int, step: Step, run: EngineRun | None = None) -> None:
        """`run` is what was done, if something was."""
        if run is not None:
            if isinstance(run.work, Batch):
                self._batch_done(now_ns, run)
            else:
                self._iteration_done(now_ns, step)
        for request, reason in step.given_up.items():
            self.played.reasons[request] = reason
            times = self._tokens.pop(request, ())
            # What was made leaves when it is due.
            self._end(request, times, max(now_ns, times[-1]) if times else now_ns, served=False)
        for started in step.started:
            self._began += 1
            heappush(self.runs, (started.end_ns, self._began, started))
            self._start(started)

    def _start(self, run: EngineRun) -> None:
        played, now_ns = self.played, run.start_ns
        work = run.work
        if isinstance(work, Batch):
            size = len(work.members)
            for request in work.members:
                played.start_ns[request] = now_ns
                played.size[request] = size
            played.queues[work.queue] += 1
        else:
            assert isinstance(work, Iteration)
            size = len(work.prefill) + len(work.decode)
            for request, _ in work.prefill:
                if played.start_ns[request] < 0:
                    played.start_ns[request] = now_ns
                    played.size[request] = size
        played.sizes[size] += 1
        played.busy_ns[run.server] += run.end_ns - now_ns

    def _batch_done(self, now_ns: int, run: EngineRun) -> None:
        batch: Batch = run.work
        played, watch = self.played, self._watch
        for request in batch.members:
            played.end_ns[request] = now_ns
        played.finished += len(batch.members)
        if watch is not None:
            for request in batch.members:
                times = batch.token_times(run.start_ns, self._outputs[request])
                watch.ended(request, times, now_ns, served=True)

    def _iteration_done(self, now_ns: int, step: Step) -> None:
        made, tokens = step.made, self._tokens
        if made.cached is not None:
            self._note_cached(made.cached)
        if made.due_ns is None:
            for request in made.tokens:
                tokens.setdefault(request, []).append(now_ns)
        else:
            for request, due_ns in zip(made.tokens, made.due_ns, strict=True):
                tokens.setdefault(request, []).append(due_ns)
        for request in made.finished:
            times = tokens.pop(request, ())
            self._end(request, times, max(now_ns, times[-1]) if times else now_ns, served=True)

    def _note_cached(self, found: Mapping[int, int]) -> None:
        played = self.played
        if not played.cached:
            played.cached = array("q", [-1]) * len(played.start_ns)
        for request, tokens in found.items():
            played.cached[request] = tokens

    def _end(self, request: int, times: Sequence[int], end_ns: int, *, served: bool) -> None:
        played = self.played
        played.end_ns[request] = end_ns
        if served:
            played.finished += 1
        else:
            played.given_up[request] = len(times)
        if self._watch is not None:
            self._watch.ended(request, times, end_ns, served=served)


def play(
    requests: Requests,
    engine: Engine,
    *,
    servers: int = 1,
    all_first: bool = False,
    gpu_first: bool = False,
    watch: RequestWatcher | None = None,
    played: Played | None = None,
    progress: Callable[[int], None] | None = None,
) -> Played:
    """Serves all requests, whose arrivals are in order.

    `all_first`: of arrivals at one instant, servers wait for the last; `gpu_first`: what is done at the
    instant of an arrival comes before it (readings 18 and 19 of seed 004). `played` is what is written down
    in, for who looks at it while he watches. `progress` is told now and then how many arrived.
    """
    n = len(requests)
    if played is None:
        played = Played.begun(n, servers)
    player = _Player(requests, played, watch)
    runs, note = player.runs, player.note
    arrivals = requests.arrival_ns
    lead = 1 if gpu_first else 0
    arrive, done = engine.arrive, engine.done
    closed = n == 0
    now_ns = i = 0
    while i < n or runs:
        if i < n and arrivals[i] + lead <= (runs[0][0] if runs else _NEVER):
            now_ns = arrivals[i]
            more = all_first and i + 1 < n and arrivals[i + 1] == now_ns
            step = arrive(now_ns, i, more=more)
            i += 1
            if progress is not None and not i % _TOLD_EVERY:
                progress(i)
            if step.started or step.given_up:
                note(now_ns, step)
        else:
            now_ns, _, run = heappop(runs)
            note(now_ns, done(now_ns, run), run)
        if i == n and not closed:
            closed = True
            note(now_ns, engine.close(now_ns))
    lost = n - played.finished - len(played.given_up)
    assert not lost, f"{lost} requests were never served"
    return played

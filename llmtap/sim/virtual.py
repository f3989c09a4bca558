"""The driver in virtual time: jumps from event to event, and writes down what became of every request.

Arrivals are a sorted column, so only runs are in the heap: one for each busy server.
"""

from array import array
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import Final

from llmtap.sim.engine import Engine, Run
from llmtap.sim.readings import Readings
from llmtap.sim.requests import Requests
from llmtap.sim.schedulers.batches import Batch

__all__ = ["Played", "play"]

_NEVER: Final = (1 << 63) - 1
_TOLD_EVERY: Final = 1 << 14


@dataclass(slots=True)
class Played:
    """What became of requests, as columns, and of servers."""

    start_ns: "array[int]"
    end_ns: "array[int]"
    size: "array[int]"
    """Of the batch it was in."""
    busy_ns: list[int]
    """Of each server."""
    sizes: Counter[int] = field(default_factory=Counter)
    """Batches by size."""
    queues: Counter[int] = field(default_factory=Counter)
    """Batches by the queue they were from."""
    finished: int = 0


def play(
    requests: Requests,
    engine: Engine,
    readings: Readings,
    servers: int = 1,
    progress: Callable[[int], None] | None = None,
) -> Played:
    """Serves all requests, whose arrivals are in order. `progress` is told now and then how many arrived."""
    n = len(requests)
    start_ns, end_ns, size = (array("q", bytes(8 * n)) for _ in range(3))
    played = Played(start_ns, end_ns, size, [0] * servers)
    runs: list[tuple[int, int, Run]] = []
    arrivals = requests.arrival_ns
    together = readings.same_instant == "all-first"
    # What is due in the same nanosecond as an arrival comes before it, or after.
    lead = 1 if readings.tie == "gpu-first" else 0
    arrive, done = engine.arrive, engine.done
    began = 0
    closed = n == 0
    i = 0
    while i < n or runs:
        if i < n and arrivals[i] + lead <= (runs[0][0] if runs else _NEVER):
            now_ns = arrivals[i]
            more = together and i + 1 < n and arrivals[i + 1] == now_ns
            step = arrive(now_ns, i, more=more)
            i += 1
            if progress is not None and not i % _TOLD_EVERY:
                progress(i)
        else:
            now_ns, _, run = heappop(runs)
            step = done(now_ns, run)
            for request in step.finished:
                played.end_ns[request] = now_ns
            played.finished += len(step.finished)
        for run in step.started:
            began += 1
            heappush(runs, (run.end_ns, began, run))
            _note(played, run)
        if i == n and not closed:
            closed = True
            for run in engine.close(now_ns).started:
                began += 1
                heappush(runs, (run.end_ns, began, run))
                _note(played, run)
    assert played.finished == n, f"{n - played.finished} requests were never served"
    return played


def _note(played: Played, run: Run) -> None:
    batch: Batch = run.work
    size = len(batch.members)
    start_ns, sizes, now_ns = played.start_ns, played.size, run.start_ns
    for request in batch.members:
        start_ns[request] = now_ns
        sizes[request] = size
    played.sizes[size] += 1
    played.queues[batch.queue] += 1
    played.busy_ns[run.server] += run.end_ns - now_ns

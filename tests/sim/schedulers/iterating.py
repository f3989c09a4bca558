"""Small workloads for the schedulers that compose anew at every iteration; every time is worked out by hand.

In ms. A pass takes 20 ms however many decode, and a token of a prompt 1 ms: an iteration of d tokens of
answers and p of prompts takes 20 + p, as does one of prompts alone.
"""

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from llmtap.sim.engine import (
    Engine,
    EngineOutput,
    GivenUp,
    Iterating,
    Iteration,
    IterationState,
    RunRecord,
    run_virtual,
)
from llmtap.sim.model_options import IterationModel, ServingSetup, read_serving
from llmtap.sim.schedulers.iterating import OutputDelay
from llmtap.sim.schedulers.registry import SCHEDULERS
from llmtap.workload.requests import Requests

MS = 1_000_000
MODEL = IterationModel(beta_ns=20 * MS, gamma=0, prefill_ns=1 * MS)

Row = tuple[int, int, int]
"""Arrival in ms, tokens of the prompt, tokens of the answer."""


def workload(rows: Sequence[Row], blocks: Sequence[tuple[int, ...]] = (), block_tokens: int = 0) -> Requests:
    """Predictions are true."""
    arrivals, given, made = (array("q", [row[i] for row in rows]) for i in range(3))
    arrivals = array("q", [t * MS for t in arrivals])
    return Requests(arrivals, given, made, array("q", made), list(blocks), block_tokens)


def build(scheduler: str, requests: Requests, model: IterationModel = MODEL, **options: str) -> Any:
    return SCHEDULERS[scheduler].build(
        requests, ServingSetup(iterations=model, serving=read_serving(options))
    )


class Spy:
    """A scheduler that writes down what another one composes, and what comes of it."""

    def __init__(self, scheduler: Iterating) -> None:
        self.scheduler = scheduler
        self.composed: list[tuple[int, Iteration]] = []
        self.made: list[tuple[int, EngineOutput]] = []
        self.states: list[IterationState] = []
        """Copies, from when each iteration began."""

    def on_arrival(self, now_ns: int, request: int) -> None:
        self.scheduler.on_arrival(now_ns, request)

    def on_close(self, now_ns: int) -> None:
        self.scheduler.on_close(now_ns)

    def form_work(self, now_ns: int) -> Iteration | None:
        work: Iteration | None = self.scheduler.form_work(now_ns)
        if work is not None:
            self.composed.append((now_ns, work))
            self.states.append(replace(self.scheduler.state))
        return work

    def on_done(self, now_ns: int, work: Iteration) -> EngineOutput:
        made = self.scheduler.on_done(now_ns, work)
        self.made.append((now_ns, made))
        return made

    def on_left(self, now_ns: int, request: int) -> None:
        self.scheduler.on_left(now_ns, request)

    def take_given_up(self) -> Mapping[int, GivenUp]:
        return self.scheduler.take_given_up()


@dataclass
class Served:
    """What came of a workload."""

    requests: Requests
    spy: Spy
    state: IterationState
    played: RunRecord | None = None
    token_ns: dict[int, list[int]] = field(default_factory=dict)
    end_ns: dict[int, int] = field(default_factory=dict)
    complete: set[int] = field(default_factory=set)

    def on_ended(self, request: int, token_ns: Sequence[int], end_ns: int, *, served: bool) -> None:
        """As a `Watcher`."""
        assert request not in self.end_ns
        self.token_ns[request] = list(token_ns)
        self.end_ns[request] = end_ns
        if served:
            self.complete.add(request)

    @property
    def tokens(self) -> list[list[float]]:
        """When the tokens of each request left. ms."""
        return [[t / MS for t in self.token_ns[r]] for r in range(len(self.requests))]

    @property
    def iterations(self) -> list[tuple[float, float, list[tuple[int, int]], list[int]]]:
        """Beginning and end in ms, prompts, and who decodes."""
        return [
            (at / MS, (at + work.duration_ns) / MS, list(work.prefill), list(work.decode))
            for at, work in self.spy.composed
        ]


def serve(
    scheduler: str,
    rows: Sequence[Row] | Requests,
    model: IterationModel = MODEL,
    **options: str,
) -> Served:
    """Serves a workload in virtual time; `options` as on the command line.

    Requests of one instant are all there before an iteration is composed.
    """
    requests = rows if isinstance(rows, Requests) else workload(rows)
    built = build(scheduler, requests, model, **options)
    served = Served(requests, Spy(built), built.state)
    served.played = run_virtual(requests, Engine(served.spy), all_first=True, watch=served)
    return served


def _roster_of(scheduler: Any) -> Any:
    return (scheduler._scheduler if isinstance(scheduler, OutputDelay) else scheduler)._roster


def check_nobody(scheduler: Any) -> None:
    """When all are over nothing is remembered of anybody."""
    roster = _roster_of(scheduler)
    assert not (roster._seats or roster._made_tokens or roster._preempted_requests)
    assert not (roster._swapped_requests or roster._waiting)
    assert not any(roster._ending_requests.values())
    assert roster._context_tokens == 0
    if roster._deadlines is not None:
        assert not (roster._deadlines._next_ns or roster._deadlines._missed_requests)
    check_memory(scheduler)


def check_memory(scheduler: Any) -> None:
    """Counts anew what the roster keeps count of."""
    roster = _roster_of(scheduler)
    memory, seats = roster.memory, roster._seats
    held, names = 0, set()
    for seat in seats.values():
        tokens = seat.tokens + (roster._step - seat.start_step if seat.end_step else 0)
        held += memory.blocks_for(tokens - len(seat.names) * memory.named_tokens)
        names.update(seat.names)
    held += len(names) * memory.blocks_for(memory.named_tokens)
    assert memory.held_blocks == held
    assert memory.held_blocks + memory.cached_blocks <= memory.total_blocks
    assert roster.running == [r for r in roster.running if seats[r].end_step]
    assert sum(roster._growing_requests) == len(roster.running)
    assert roster.state.running == len(seats)

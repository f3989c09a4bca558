"""The core of the simulated engine: what happens next, and when. No clock, no IO, no randomness.

An engine has servers and a scheduler. Whoever drives it tells it what happened and at what time (`arrive`,
`done`, `close`), in order of time, and is told which runs began; a run has the time when it will be done,
and at that time the driver tells `done`. The virtual driver (`virtual.py`) keeps runs in a heap and jumps
from one to the next; a real one sleeps until then. Both see the same runs.

A run is what a server does without being asked again: a whole batch for the schedulers of seed 004, one
iteration for those that compose anew at every step. The engine does not know which. It asks `form` whenever
a server is free and something changed; the scheduler answers with a batch and how long that takes, or with
None. When it is done the scheduler says which tokens were made by it, when each is to leave, and who is
finished. Requests may leave (their client did), and a scheduler may give up on them, and says why.

Times are whole nanoseconds of any clock.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from heapq import heappop, heappush
from typing import Any, Final, Protocol

__all__ = ["NOBODY", "NOTHING", "Engine", "EngineRun", "EngineWork", "GivenUp", "Made", "Scheduler", "Step"]


class GivenUp(Enum):
    """Why a scheduler serves a request not at all, or not to the end."""

    TOO_LARGE = "too_large"
    """It needs more than the KV memory holds, whoever else is there."""
    QUEUE_FULL = "queue_full"
    """As many wait as may."""
    LATE = "late"
    """One of its tokens missed its deadline."""


NOBODY: Final[Mapping[int, GivenUp]] = {}
"""Is given up."""


class EngineWork(Protocol):
    """What a scheduler hands to a server; who watches may know more of its kind."""

    @property
    def duration_ns(self) -> int:
        """How long a server takes for it."""


@dataclass(frozen=True, slots=True)
class Made:
    """What came of work that is done."""

    finished: Sequence[int] = ()
    """Requests whose last token was made."""
    tokens: Sequence[int] = ()
    """The request of each token that was made, in the order in which they leave. Whole batches leave it
    empty: the times of their tokens are known from the start (`Batch.token_times`)."""
    due_ns: Sequence[int] | None = None
    """When each of these tokens is to leave, now or later; None where all leave now."""
    cached: Mapping[int, int] | None = None
    """Of requests whose prompt is whole now: how many of its tokens were in the prefix cache; None without
    one."""


class Scheduler(Protocol):
    """Decides who is served next. Requests are numbers."""

    def arrived(self, now_ns: int, request: int) -> None:
        """A request is there."""

    def closed(self, now_ns: int) -> None:
        """No other request will come: waiting for more is over."""

    def form(self, now_ns: int) -> Any | None:
        """What a free server is to do now, an `EngineWork`; None where it is to wait."""

    def done(self, now_ns: int, work: Any) -> Made:
        """It is done."""

    def left(self, now_ns: int, request: int) -> None:
        """Nobody waits any longer for a request that is neither finished nor given up."""

    def given_up(self) -> Mapping[int, GivenUp]:
        """Requests that it has decided, since it was asked last, not to serve or not to serve any further."""


@dataclass(slots=True)
class EngineRun:
    """A stretch of a server's time."""

    server: int
    work: Any
    start_ns: int
    end_ns: int


@dataclass(frozen=True, slots=True)
class Step:
    """What came of an event."""

    started: Sequence[EngineRun] = ()
    made: Made = Made()
    given_up: Mapping[int, GivenUp] = field(default_factory=dict)


NOTHING: Final = Step()


class Engine:
    """Servers of one kind, and their scheduler."""

    def __init__(self, scheduler: Scheduler, servers: int = 1) -> None:
        assert servers >= 1
        self._scheduler = scheduler
        self._free = list(range(servers))  # a heap: the free one with the lowest number is next
        self._now_ns: int | None = None

    @property
    def idle(self) -> bool:
        """Whether some server has nothing to do."""
        return bool(self._free)

    def arrive(self, now_ns: int, request: int, *, more: bool = False) -> Step:
        """A request arrives; `more` do at this same moment, and servers are to wait for them."""
        self._at(now_ns)
        self._scheduler.arrived(now_ns, request)
        if more:
            return NOTHING
        return self._dispatch(now_ns)

    def done(self, now_ns: int, run: EngineRun) -> Step:
        """A run is over, at its time or, where clocks are real, some time after."""
        self._at(now_ns)
        assert now_ns >= run.end_ns
        made = self._scheduler.done(now_ns, run.work)
        heappush(self._free, run.server)
        step = self._dispatch(now_ns)
        return Step(step.started, made, step.given_up)

    def leave(self, now_ns: int, request: int) -> Step:
        """The client of a request has gone. What runs goes on: servers are not interrupted."""
        self._at(now_ns)
        self._scheduler.left(now_ns, request)
        return self._dispatch(now_ns)

    def close(self, now_ns: int) -> Step:
        """No other request will come."""
        self._at(now_ns)
        self._scheduler.closed(now_ns)
        return self._dispatch(now_ns)

    def _dispatch(self, now_ns: int) -> Step:
        started = []
        while self._free:
            work = self._scheduler.form(now_ns)
            if work is None:
                break
            started.append(EngineRun(heappop(self._free), work, now_ns, now_ns + work.duration_ns))
        given_up = self._scheduler.given_up()
        return Step(started, given_up=given_up) if started or given_up else NOTHING

    def _at(self, now_ns: int) -> None:
        assert self._now_ns is None or now_ns >= self._now_ns, "time went back"
        self._now_ns = now_ns

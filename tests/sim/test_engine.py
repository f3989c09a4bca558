"""The engine knows nothing of batches or clocks: toys of both kinds of schedulers, both kinds of drivers."""

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

import pytest

from llmtap.sim.engine import Engine, EngineOutput, EngineRun, GivenUp, Step


@dataclass(frozen=True)
class Iteration:
    """One step of all that run: some take their prompt in, the others make a token."""

    begun: list[int]
    duration_ns: int


class Continuous:
    """A toy that composes anew at every iteration: at most two requests, a token an iteration, 10 ns each."""

    def __init__(self, outputs: dict[int, int]) -> None:
        self.left = outputs
        self.waiting: deque[int] = deque()
        self.running: list[int] = []

    def arrived(self, now_ns: int, request: int) -> None:
        self.waiting.append(request)

    def closed(self, now_ns: int) -> None:
        pass

    def form(self, now_ns: int) -> Iteration | None:
        begun = []
        while self.waiting and len(self.running) < 2:
            begun.append(self.waiting.popleft())
            self.running.append(begun[-1])
        return Iteration(begun, 10) if self.running else None

    def done(self, now_ns: int, work: Iteration) -> EngineOutput:
        for request in self.running:
            self.left[request] -= 1
        finished = [r for r in self.running if not self.left[r]]
        self.running = [r for r in self.running if self.left[r]]
        return EngineOutput(finished=finished)

    def left(self, now_ns: int, request: int) -> None:
        self.waiting.remove(request)

    def given_up(self) -> Mapping[int, GivenUp]:
        return {}


class Pairs:
    """A toy that wants two, and takes one only when no more will come."""

    def __init__(self) -> None:
        self.waiting: list[int] = []
        self.refused: dict[int, GivenUp] = {}
        self.last = False

    def arrived(self, now_ns: int, request: int) -> None:
        if len(self.waiting) == 3:
            self.refused[request] = GivenUp.QUEUE_FULL
        else:
            self.waiting.append(request)

    def closed(self, now_ns: int) -> None:
        self.last = True

    def form(self, now_ns: int) -> Iteration | None:
        if len(self.waiting) < 2 and not (self.last and self.waiting):
            return None
        taken, self.waiting = self.waiting[:2], self.waiting[2:]
        return Iteration(taken, 100)

    def done(self, now_ns: int, work: Iteration) -> EngineOutput:
        return EngineOutput(finished=work.begun)

    def left(self, now_ns: int, request: int) -> None:
        self.waiting.remove(request)

    def given_up(self) -> Mapping[int, GivenUp]:
        gone, self.refused = self.refused, {}
        return gone


def test_a_request_joins_at_the_next_iteration_and_leaves_when_its_last_token_is_out() -> None:
    engine = Engine(Continuous({7: 3, 8: 1, 9: 1}))
    [run] = engine.arrive(100, 7).started
    assert (run.work.begun, run.start_ns, run.end_ns) == ([7], 100, 110)
    assert engine.arrive(104, 8) == engine.arrive(105, 9) == Step()  # the server is busy
    step = engine.done(110, run)
    assert (step.made.finished, step.started[0].work.begun) == ([], [8])
    step = engine.done(120, step.started[0])
    assert (step.made.finished, step.started[0].work.begun) == ([8], [9])
    step = engine.done(130, step.started[0])
    assert (step.made.finished, step.started, engine.idle) == ([7, 9], (), True)


def test_a_driver_with_a_real_clock_may_be_late_and_the_next_run_begins_when_it_was_told() -> None:
    engine = Engine(Continuous({1: 2}))
    [run] = engine.arrive(0, 1).started
    [run] = engine.done(17, run).started  # due at 10
    assert (run.start_ns, run.end_ns) == (17, 27)


def test_arrivals_of_one_moment_can_wait_for_each_other() -> None:
    engine = Engine(Continuous({1: 1, 2: 1}))
    assert engine.arrive(5, 1, more=True) == Step()
    [run] = engine.arrive(5, 2).started
    assert run.work.begun == [1, 2]


def test_the_free_server_with_the_lowest_number_is_next_and_none_does_two_things() -> None:
    engine = Engine(Pairs(), servers=2)
    runs: list[EngineRun] = []
    for i in range(6):
        runs += engine.arrive(i, i).started
    assert [(r.server, r.work.begun) for r in runs] == [(0, [0, 1]), (1, [2, 3])]
    step = engine.done(103, runs[1])
    assert [(r.server, r.work.begun) for r in step.started] == [(1, [4, 5])]


def test_who_waits_for_more_is_told_that_none_will_come() -> None:
    engine = Engine(Pairs())
    assert engine.arrive(0, 4) == Step()
    [run] = engine.close(3).started
    assert (run.work.begun, run.start_ns) == ([4], 3)


def test_who_left_is_not_served_and_who_is_given_up_is_told_even_while_all_servers_are_busy() -> None:
    engine = Engine(Pairs())
    engine.arrive(0, 0)
    [run] = engine.arrive(0, 1).started
    for request in (2, 3, 4):
        assert engine.arrive(1, request) == Step()
    step = engine.arrive(2, 5)
    assert (list(step.started), step.given_up) == ([], {5: GivenUp.QUEUE_FULL})
    assert engine.leave(3, 2) == Step()
    assert engine.done(100, run).started[0].work.begun == [3, 4]


def test_time_does_not_go_back_and_nothing_is_done_before_it_is_due() -> None:
    engine = Engine(Continuous({1: 1, 2: 1}))
    [run] = engine.arrive(50, 1).started
    with pytest.raises(AssertionError, match="time went back"):
        engine.arrive(49, 2)
    with pytest.raises(AssertionError):
        engine.done(59, run)

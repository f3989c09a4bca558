"""The engine knows nothing of batches or clocks: toys of both kinds of schedulers, both kinds of drivers."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmtap.sim.engine import Engine, EngineOutput, EngineRun, GivenUp, Step, run_virtual
from llmtap.sim.model_options import ServingSetup, read_model_options
from llmtap.sim.schedulers.registry import SCHEDULERS
from tests.support.workloads.batch_runs import MODEL, Row, served, simulated, workload


@dataclass(frozen=True)
class Iteration:
    """One step of all that run: some take their prompt in, the others make a token."""

    begun: list[int]
    duration_ns: int


class Pairs:
    """A toy that wants two, and takes one only when no more will come."""

    def __init__(self) -> None:
        self.waiting: list[int] = []
        self.refused: dict[int, GivenUp] = {}
        self.last = False

    def on_arrival(self, now_ns: int, request: int) -> None:
        if len(self.waiting) == 3:
            self.refused[request] = GivenUp.TOO_LARGE
        else:
            self.waiting.append(request)

    def on_close(self, now_ns: int) -> None:
        self.last = True

    def form_work(self, now_ns: int) -> Iteration | None:
        if len(self.waiting) < 2 and not (self.last and self.waiting):
            return None
        taken, self.waiting = self.waiting[:2], self.waiting[2:]
        return Iteration(taken, 100)

    def on_done(self, now_ns: int, work: Iteration) -> EngineOutput:
        return EngineOutput(finished=work.begun)

    def on_left(self, now_ns: int, request: int) -> None:
        self.waiting.remove(request)

    def take_given_up(self) -> Mapping[int, GivenUp]:
        gone, self.refused = self.refused, {}
        return gone


def test_the_free_server_with_the_lowest_number_is_next_and_none_does_two_things() -> None:
    engine = Engine(Pairs(), servers=2)
    runs: list[EngineRun] = []
    for i in range(6):
        runs += engine.arrive(i, i).started
    assert [(r.server, r.work.begun) for r in runs] == [(0, [0, 1]), (1, [2, 3])]
    step = engine.on_done(103, runs[1])
    assert [(r.server, r.work.begun) for r in step.started] == [(1, [4, 5])]


def test_who_left_is_not_served_and_who_is_given_up_is_told_even_while_all_servers_are_busy() -> None:
    engine = Engine(Pairs())
    engine.arrive(0, 0)
    [run] = engine.arrive(0, 1).started
    for request in (2, 3, 4):
        assert engine.arrive(1, request) == Step()
    step = engine.arrive(2, 5)
    assert (list(step.started), step.given_up) == ([], {5: GivenUp.TOO_LARGE})
    assert engine.leave(3, 2) == Step()
    assert engine.on_done(100, run).started[0].work.begun == [3, 4]


def test_time_does_not_go_back_and_nothing_is_done_before_it_is_due() -> None:
    engine = Engine(Pairs())
    engine.arrive(50, 1)
    [run] = engine.arrive(50, 2).started
    with pytest.raises(AssertionError, match="earlier than the event before it"):
        engine.arrive(49, 3)
    with pytest.raises(AssertionError):
        engine.on_done(149, run)


class Watched(Engine):
    """Remembers every run."""

    runs: list[EngineRun]

    def dispatch(self, now_ns: int) -> Step:
        step = super().dispatch(now_ns)
        self.runs = [*getattr(self, "runs", ()), *step.started]
        return step


_WHOLE_BATCHES = sorted(name for name, kind in SCHEDULERS.items() if not kind.iterates)
_CHOICES = {
    "bin_choice": ("round-robin", "longest-queue", "oldest-head"),
    "bin_limit": ("7gb", "8gb", "none"),
    "controller_limit": ("global", "bin"),
    "b_start": ("middle", "one", "first-batch"),
    "band": ("alpha", "delta"),
    "tau_start": ("zero", "beta"),
    "guards": ("none", "authors"),
    "memory_check": ("none", "hard"),
    "lengths_start": ("500", "limit"),
    "same_instant": ("one-by-one", "all-first"),
    "tie": ("arrival-first", "gpu-first"),
    "sla_step": ("batch", "update"),
    "partial": ("run", "wait"),
    "edges": ("workload", "first-1000"),
    "below_first": ("last", "first"),
    "length": ("prompt+output", "output"),
    "candidates": ("1", "5", "128"),
    "bins": ("1", "3", "8"),
    "token_sla": ("1ms", "120ms", "10s"),
    "eps": ("0s", "5ms"),
}
_SETTINGS = st.fixed_dictionaries({}, optional={k: st.sampled_from(v) for k, v in _CHOICES.items()})
# Half seconds, so that arrivals meet each other and the ends of batches.
_ROWS = st.lists(
    st.tuples(
        st.integers(0, 40).map(lambda t: t / 2),
        st.sampled_from([0, 5, 10, 20_000]),
        st.sampled_from([0, 5, 10, 900]),
    ),
    min_size=1,
    max_size=60,
)


@given(_ROWS, st.sampled_from(_WHOLE_BATCHES), _SETTINGS, st.integers(1, 3))
def test_requests_are_conserved(
    rows: list[Row], scheduler: str, settings: dict[str, str], servers: int
) -> None:
    requests = workload(sorted(rows))
    readings = read_model_options(settings)
    engine = Watched(SCHEDULERS[scheduler].build(requests, ServingSetup(MODEL, readings)), servers)
    played = run_virtual(
        requests,
        engine,
        servers=servers,
        all_first=readings.same_instant == "all-first",
        gpu_first=readings.tie == "gpu-first",
    )
    runs = engine.runs
    assert Counter(r for run in runs for r in run.work.members) == Counter(range(len(rows)))
    assert played.finished == len(rows)
    limit = 8 if scheduler == "static_fifo" else min(128, readings.candidates)
    for run in runs:
        members = run.work.members
        assert 1 <= len(members) <= limit
        assert run.end_ns - run.start_ns == MODEL.batch_ns(
            len(members), _longest(requests, members, settings)
        )
        for r in members:
            assert requests.arrival_ns[r] <= run.start_ns
            assert (played.start_ns[r], played.end_ns[r], played.size[r]) == (
                run.start_ns,
                run.end_ns,
                len(members),
            )
        if settings.get("memory_check") == "hard":
            tokens = sum(requests.input[r] + requests.output[r] for r in members)
            assert len(members) == 1 or tokens * readings.kv_gb_per_token <= 7
    for server in range(servers):
        own = [run for run in runs if run.server == server]
        assert all(a.end_ns <= b.start_ns for a, b in pairwise(own))
        assert played.busy_ns[server] == sum(run.end_ns - run.start_ns for run in own)
    assert played.run_sizes == Counter(len(run.work.members) for run in runs)


def _longest(requests, members, settings) -> int:  # type: ignore[no-untyped-def]
    whole = settings.get("length") != "output"
    return max(requests.output[r] + whole * requests.input[r] for r in members)


@given(_ROWS, st.sampled_from(_WHOLE_BATCHES), _SETTINGS)
def test_a_queue_is_served_in_the_order_in_which_it_came(
    rows: list[Row], scheduler: str, settings: dict[str, str]
) -> None:
    rows = sorted(rows)
    result = simulated(scheduler, rows, **settings)
    queue_of = {}
    if result.bins is not None:
        edges = [low for low, _ in result.bins]
        queue_of = {i: sum(made >= edge for edge in edges) for i, (_, _, made) in enumerate(rows)}
    starts = [start for start, _, _ in served(result)]
    for queue in {queue_of.get(i, 0) for i in range(len(rows))}:
        own = [starts[i] for i in range(len(rows)) if queue_of.get(i, 0) == queue]
        assert own == sorted(own)

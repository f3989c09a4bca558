"""Whatever the requests, the scheduler and the reading: no request is lost or served twice or before it came,
no batch is larger than it may be, and no server does two things at once."""

from collections import Counter
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmtap.sim.engine import Engine, EngineRun, Step, run_virtual
from llmtap.sim.model_options import ServingSetup, read_model_options
from llmtap.sim.schedulers.registry import SCHEDULERS
from tests.support.flights import MODEL, Row, flown, served, workload


class Watched(Engine):
    """Remembers every run."""

    runs: list[EngineRun]

    def _dispatch(self, now_ns: int) -> Step:
        step = super()._dispatch(now_ns)
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
        requests, engine, servers=servers, all_first=readings.same_instant == "all-first",
        gpu_first=readings.tie == "gpu-first",
    )  # fmt: skip
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
                run.start_ns, run.end_ns, len(members),
            )  # fmt: skip
        if settings.get("memory_check") == "hard":
            tokens = sum(requests.input[r] + requests.output[r] for r in members)
            assert len(members) == 1 or tokens * readings.kv_gb_per_token <= 7
    for server in range(servers):
        own = [run for run in runs if run.server == server]
        assert all(a.end_ns <= b.start_ns for a, b in pairwise(own))
        assert played.busy_ns[server] == sum(run.end_ns - run.start_ns for run in own)
    assert played.sizes == Counter(len(run.work.members) for run in runs)


def _longest(requests, members, settings) -> int:  # type: ignore[no-untyped-def]
    whole = settings.get("length") != "output"
    return max(requests.output[r] + whole * requests.input[r] for r in members)


@given(_ROWS, st.sampled_from(_WHOLE_BATCHES), _SETTINGS)
def test_a_queue_is_served_in_the_order_in_which_it_came(
    rows: list[Row], scheduler: str, settings: dict[str, str]
) -> None:
    rows = sorted(rows)
    result = flown(scheduler, rows, **settings)
    queue_of = {}
    if result.bins is not None:
        edges = [low for low, _ in result.bins]
        queue_of = {i: sum(made >= edge for edge in edges) for i, (_, _, made) in enumerate(rows)}
    starts = [start for start, _, _ in served(result)]
    for queue in {queue_of.get(i, 0) for i in range(len(rows))}:
        own = [starts[i] for i in range(len(rows)) if queue_of.get(i, 0) == queue]
        assert own == sorted(own)


@pytest.mark.parametrize("scheduler", _WHOLE_BATCHES)
def test_the_same_run_twice_is_the_same(scheduler: str) -> None:
    rows: list[Row] = [(i * 0.37, i * 7 % 50, i * 13 % 90) for i in range(200)]
    assert served(flown(scheduler, rows)) == served(flown(scheduler, rows))


def test_progress_is_told_of_arrivals() -> None:
    requests = workload([(i, 0, 1) for i in range(40_000)])
    told: list[int] = []
    run_virtual(
        requests, Engine(SCHEDULERS["static_fifo"].build(requests, ServingSetup())), progress=told.append
    )
    assert told == [16_384, 32_768]


def test_no_requests_are_served_in_no_time() -> None:
    requests = workload([])
    played = run_virtual(requests, Engine(SCHEDULERS["static_fifo"].build(requests, ServingSetup())))
    assert (played.finished, played.busy_ns) == (0, [0])

"""Whatever the requests, the scheduler and its options: nobody is lost or served twice, no token is made
twice or before its time, and memory is never over its capacity and is what those that are seated need."""

from collections import Counter
from collections.abc import Sequence
from itertools import pairwise

from hypothesis import example, given
from hypothesis import strategies as st

from llmtap.sim.engine import Engine, EngineRun, Iteration, IterationState, Step, run_virtual
from llmtap.sim.model_options import IterationModel
from llmtap.sim.schedulers.registry import SCHEDULERS
from llmtap.workload.requests import Requests
from tests.sim.schedulers.iterating import (
    MODEL,
    MS,
    Row,
    Served,
    Spy,
    build,
    check_memory,
    check_nobody,
    workload,
)

_ITERATING = sorted(name for name, kind in SCHEDULERS.items() if kind.iterates)
_CHOICES = {
    "seqs_max": ("1", "3", "256"),
    "tokens_max": ("1", "30", "2048"),
    "chunk": ("1", "7", "512"),
    "kv_tokens": ("60", "100", "5000"),
    "block": ("1", "4", "16"),
    "preemption": ("recompute", "swap"),
    "swap_token": ("0s", "1ms"),
    "attention": ("0s", "2s"),
    "prefix_cache": ("false", "true"),
    "prepone": ("1", "2", "5"),
    "output_delay": ("0s", "50ms"),
    "give_up": ("never", "late"),
    "ttft": ("100ms", "1s"),
    "tbt": ("30ms", "200ms"),
}
_OPTIONS = st.fixed_dictionaries({}, optional={k: st.sampled_from(v) for k, v in _CHOICES.items()})
_ROWS = st.lists(
    # Tens of ms, so that arrivals meet each other and the ends of iterations.
    st.tuples(
        st.integers(0, 60).map(lambda t: t * 10), st.sampled_from([0, 1, 5, 16, 40]), st.integers(0, 30)
    ),
    min_size=1,
    max_size=20,
)
_NAMED = 4
_MODELS = st.sampled_from(
    [
        MODEL,
        IterationModel(beta_ns=5 * MS, gamma=0.3, prefill_ns=0.1 * MS, context_ns=1_000),
        IterationModel(beta_ns=5 * MS, gamma=20, prefill_ns=0.1 * MS),
    ]
)


def requests_of(rows: Sequence[Row]) -> Requests:
    """Prompts begin alike, but for their last block: with one of two texts."""
    rows = sorted(rows)
    blocks = []
    for i, (_, tokens, made) in enumerate(rows):
        names = [made % 2 * 100 + k for k in range(tokens // _NAMED)]
        blocks.append((*names[:-1], 1_000 + i) if names else ())
    return workload(rows, blocks, _NAMED)


class Checked(Spy):
    """Checks the memory whenever an iteration was composed."""

    def form_work(self, now_ns: int) -> Iteration | None:
        work = super().form_work(now_ns)
        check_memory(self.scheduler)
        return work


def simulated(scheduler: str, rows: Sequence[Row], model: IterationModel, options: dict[str, str]) -> Served:
    requests = requests_of(rows)
    built = build(scheduler, requests, model, **options)
    served = Served(requests, Checked(built), built.state)
    served.played = run_virtual(requests, Engine(served.spy), watch=served)
    check_nobody(built)
    return served


@given(_ROWS, st.sampled_from(_ITERATING), _OPTIONS, _MODELS)
# Thrown out and seated again until the same step as before.
@example([(0, 5, 30)] * 6, "continuous_batching", {"kv_tokens": "60", "block": "1"}, MODEL)
@example([(0, 5, 30)] * 6, "chunked_prefill", {"kv_tokens": "60", "preemption": "swap"}, MODEL)
@example(
    [(0, 40, 22), (430, 40, 0)],
    "chunked_prefill",
    {"chunk": "7", "kv_tokens": "100", "block": "1", "preemption": "swap"},
    MODEL,
)
def test_requests_are_conserved(
    rows: list[Row], scheduler: str, options: dict[str, str], model: IterationModel
) -> None:
    served = simulated(scheduler, rows, model, options)
    requests, made, works = served.requests, served.spy.made, [work for _, work in served.spy.composed]
    everybody = set(range(len(requests)))
    assert served.played is not None
    given_up = set(served.played.given_up)
    assert served.complete | given_up == everybody
    assert not served.complete & given_up
    assert set(served.end_ns) == everybody
    if options.get("give_up") != "late":
        # Nobody but those for whom there was no room in the memory, and they at once.
        block, blocks = int(options.get("block", 16)), int(options.get("kv_tokens", 37_333))
        for r in given_up:
            assert served.end_ns[r] == requests.arrival_ns[r]
            too_large = requests.input[r] + requests.output[r] + 2 * block > blocks // block * block
            assert too_large or options.get("prefix_cache") == "true"
    for r in everybody:
        times = served.token_ns[r]
        assert len(times) == requests.output[r] if r in served.complete else len(times) <= requests.output[r]
        assert all(a <= b for a, b in pairwise(times))
        if times:
            fewest = 1 if options.get("prefix_cache") == "true" else max(1, requests.input[r])
            assert times[0] >= requests.arrival_ns[r] + model.duration_ns(fewest, 0)
            assert times[-1] <= served.end_ns[r]
    # One after the other, none of nothing.
    begins = [at for at, _ in served.spy.composed]
    ends = [at + work.duration_ns for at, work in served.spy.composed]
    assert [at for at, _ in made] == ends
    assert all(end <= begin for end, begin in zip(ends, begins[1:], strict=False))
    assert served.played.busy_ns == [sum(work.duration_ns for work in works)]
    for at, one in made:
        assert one.due_ns is None or all(at <= due for due in one.due_ns)
        assert one.due_ns is None or list(one.due_ns) == sorted(one.due_ns)
    finished = Counter(r for _, one in made for r in one.finished)
    assert finished == Counter(served.complete)
    assert served.state == IterationState(
        kv_peak=served.state.kv_peak,
        recovered=served.state.recovered,
        preemptions=served.state.preemptions,
        preempted=served.state.preempted,
        preempted_tokens=served.state.preempted_tokens,
        prefix_queries=served.state.prefix_queries,
        prefix_hits=served.state.prefix_hits,
        swapped_tokens=served.state.swapped_tokens,
    )
    # A request that is preempted before its first token has nothing to swap: its prompt is read again.
    swaps = served.state.preempted > 0 and options.get("preemption") == "swap"
    assert served.state.swapped_tokens == 0 or swaps
    assert (served.state.preempted > 0) == (served.state.preemptions > 0)
    assert served.state.recovered == served.state.preempted or options.get("give_up") == "late"
    assert 0 <= served.state.recovered <= served.state.preempted
    assert 0 <= served.state.kv_peak <= 1
    assert served.state.prefix_hits <= served.state.prefix_queries


@given(_ROWS, st.sampled_from(_ITERATING), _OPTIONS)
def test_iterations_are_within_their_limits(rows: list[Row], scheduler: str, options: dict[str, str]) -> None:
    served = simulated(scheduler, rows, MODEL, options)
    requests, swapped = served.requests, False
    seats = int(options.get("seqs_max", 256))
    taken, made = Counter[int](), Counter[int]()
    for (_, work), state in zip(served.spy.composed, served.spy.states, strict=True):
        prompts = [r for r, _ in work.prefill]
        assert prompts or work.decode
        assert len({*prompts, *work.decode}) == len(prompts) + len(work.decode)
        assert len(prompts) + len(work.decode) <= state.running <= seats
        assert 0 <= state.kv_used <= 1
        assert all(n >= 1 for _, n in work.prefill)
        tokens = sum(n for _, n in work.prefill)
        if scheduler == "chunked_prefill":
            assert not prompts or tokens + len(work.decode) <= int(options.get("chunk", 512))
        else:
            assert not (prompts and work.decode)
            assert len(prompts) <= 1 or tokens <= int(options.get("tokens_max", 2_048))
        least_ns = MODEL.duration_ns(tokens, len(work.decode))
        swapped = swapped or work.duration_ns > least_ns
        assert work.duration_ns >= least_ns
        taken.update(dict(work.prefill))
        made.update(work.decode)
    if swapped and options.get("attention", "0s") == "0s":
        assert options["preemption"] == "swap" and served.state.preemptions
    if not served.state.preemptions and options.get("prefix_cache") != "true":
        assert all(taken[r] == max(1, requests.input[r]) for r in served.complete)
    if options.get("preemption") == "swap" or not served.state.preemptions:
        # Every token but the first is made by a step of its own.
        assert scheduler == "chunked_prefill" or all(
            made[r] == max(0, requests.output[r] - 1) for r in served.complete
        )


@given(_ROWS, st.sampled_from(_ITERATING), _OPTIONS, st.lists(st.integers(0, 1_500), max_size=20))
def test_whoever_leaves_leaves_nothing_behind(
    rows: list[Row], scheduler: str, options: dict[str, str], leaving_ms: list[int]
) -> None:
    requests = requests_of(rows)
    spy = Checked(build(scheduler, requests, MODEL, **options))
    engine = Engine(spy)
    # Times to leave are of the requests in turn. What ends at an instant goes first, and then who arrives.
    events = [(at, 1, r) for r, at in enumerate(requests.arrival_ns)]
    events += [(at * MS, 2, i % len(requests)) for i, at in enumerate(leaving_ms)]
    events.sort(reverse=True)
    under_way: set[int] = set()
    gone: set[int] = set()
    over: set[int] = set()
    run: EngineRun | None = None
    while events or run is not None:
        if run is not None and (not events or run.end_ns <= events[-1][0]):
            now_ns, step = run.end_ns, engine.on_done(run.end_ns, run)
            run = None
            assert not gone & {*step.output.tokens, *step.output.finished}
            assert {*step.output.tokens, *step.output.finished} <= under_way
            under_way -= {*step.output.finished}
            over |= {*step.output.finished}
        else:
            now_ns, kind, r = events.pop()
            step = Step()
            if kind == 1:
                under_way.add(r)
                step = engine.arrive(now_ns, r)
            elif r in under_way:
                under_way.remove(r)
                gone.add(r)
                step = engine.leave(now_ns, r)
        assert {*step.given_up} <= under_way
        under_way -= {*step.given_up}
        over |= {*step.given_up}
        for run in step.started:
            assert not gone & {*run.work.decode, *dict(run.work.prefill)}
    assert not under_way
    assert gone | over == set(range(len(requests)))
    state = spy.scheduler.state
    assert (state.running, state.waiting, state.kv_used) == (0, 0, 0.0)
    check_nobody(spy.scheduler)

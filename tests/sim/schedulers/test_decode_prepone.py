"""Some tokens are made before a prefill, and leave during it at equal gaps. By hand, in ms."""

import pytest

from llmtap.sim.engine import Engine
from llmtap.sim.latency import IterationModel
from tests.support.iterating import MODEL, MS, Row, Spy, build, serve, workload

_A: Row = (0, 80, 12)
"""Has five tokens at 180."""


def test_tokens_made_ahead_leave_at_equal_gaps_during_the_prefill() -> None:
    # Seed 001, figure 4: two tokens ahead, at 200 and 220; the prompt is whole at 520, the next token at 540.
    served = serve("decode_prepone", [_A, (170, 280, 1)])
    assert served.tokens == [
        [100, 120, 140, 160, 180, 300, 420, 540, 560, 580, 600, 620],
        [520],
    ]
    made = [at / MS for at, made in served.spy.made if 0 in made.tokens]
    assert made == [100, 120, 140, 160, 180, 200, 220, 540, 560, 580, 600, 620]


@pytest.mark.parametrize(
    ("prepone", "rows", "tokens"),
    [
        # One and three ahead: (180 + 20 n + 300 + 20 - 180) / (n + 1) apart.
        (1, [(0, 80, 7), (170, 280, 1)], [[100, 120, 140, 160, 180, 350, 520], [500]]),
        (3, [(0, 80, 9), (170, 280, 1)], [[100, 120, 140, 160, 180, 275, 370, 465, 560], [540]]),
        # Nobody runs: nothing is made ahead.
        (2, [(0, 80, 1), (1, 80, 1)], [[100], [200]]),
        # An answer that ends on the way: the prompt follows at once, at 120, and is whole at 210. A token
        # after it would be there at 230: the last one leaves a third of the way to it.
        (2, [(0, 80, 2), (90, 70, 1)], [[100, 143.333333], [210]]),
        # The one that is taken in has its first token with it, and then runs along.
        (2, [(0, 80, 6), (90, 40, 3)], [[100, 140, 180, 220, 240, 260], [200, 220, 240]]),
        # From the token that left last, which was made ahead of the prefill before: 286 2/3 to 480.
        (
            2,
            [(0, 80, 12), (170, 80, 1), (230, 80, 1)],
            [[100, 120, 140, 160, 180, 233.333333, 286.666666, 351.11111, 415.555555, 480, 500, 520],
             [320], [460]],
        ),
        # One that came in between is taken in after the tokens that were planned, and made ahead again.
        (
            2,
            [(0, 80, 8), (110, 80, 1), (130, 80, 1)],
            [[100, 120, 173.333333, 226.666666, 291.11111, 355.555555, 420, 440], [260], [400]],
        ),
    ],
)  # fmt: skip
def test_when_tokens_leave(prepone: int, rows: list[Row], tokens: list[list[float]]) -> None:
    assert serve("decode_prepone", rows, prepone=str(prepone)).tokens == tokens


def test_none_leaves_after_the_prompts_are_whole() -> None:
    # With two of them a pass takes 220 ms: the token after the prefill comes long after it.
    model = IterationModel(beta_ns=20 * MS, gamma=20, prefill_ns=MS)
    served = serve("decode_prepone", [(0, 80, 5), (90, 10, 2)], model)
    # The prompt is whole at 100 + 40 + 30, the next token there at 390; even gaps would be of 290 / 3.
    assert served.tokens == [[100, 170, 170, 390, 410], [170, 390]]


def test_it_needs_memory_for_the_tokens_ahead() -> None:
    # Six blocks of four. The first has made its second token and holds two blocks, full after three more.
    # Three tokens ahead of a prefill fit in them; for four it needs a third block, and the second needs four.
    rows: list[Row] = [(0, 4, 9), (30, 13, 1)]
    served = serve("decode_prepone", rows, kv_tokens="24", block="4", prepone="3")
    assert [at for at, _, prompts, _ in served.iterations if prompts] == [0, 44 + 60]
    assert served.state.preemptions == 0
    served = serve("decode_prepone", rows, kv_tokens="24", block="4", prepone="4")
    assert [at for at, _, prompts, _ in served.iterations if prompts] == [0, 24 + 160]
    assert served.state.preemptions == 0


def test_who_is_given_up_is_judged_by_when_tokens_leave() -> None:
    rows: list[Row] = [_A, (170, 280, 1)]
    assert serve("decode_prepone", rows, give_up="late", tbt="120ms").complete == {0, 1}
    assert serve("decode_prepone", rows, give_up="late", tbt="119ms").complete == {1}
    assert serve("continuous_batching", rows, give_up="late", tbt="120ms").complete == {1}


def test_what_is_planned_is_what_comes() -> None:
    # Five run, and end one by one; passes take longer the more decode, and the more these have in memory.
    model = IterationModel(beta_ns=20 * MS, gamma=1.5, prefill_ns=MS, context_ns=10_000)
    rows: list[Row] = [(0, 10 * i, 2 * i) for i in range(1, 6)]
    rows += [(500 + 40 * i, 30 + i, i % 3 + 1) for i in range(6)]
    built = build("decode_prepone", workload(rows), model, prepone="3")
    spy = Spy(built)
    engine = Engine(spy)
    arrivals, run, planned, met = list(enumerate(rows)), None, (0, 0), 0
    while arrivals or run is not None:
        if run is None or (arrivals and arrivals[0][1][0] * MS <= run.end_ns):
            request, row = arrivals.pop(0)
            step = engine.arrive(row[0] * MS, request)
        else:
            if run.work.prefill and built._from_ns:
                planned, met = (built._whole_ns, built._next_ns), met + 1
                assert run.end_ns == planned[0]
            elif run.start_ns == planned[0] and run.work.decode:
                assert run.end_ns == planned[1]
            step, run = engine.done(run.end_ns, run), None
        run = step.started[0] if step.started else run
    assert met >= 3


def left_alone(prompt: int, *, prefix_cache: str) -> Spy:
    """One decodes and two are seated to be taken in next, of which the first leaves: at 110."""
    requests = workload([_A, (90, prompt, 1), (95, 80, 1)], [(), (1, 2), (1, 2)], 40)
    built = build("decode_prepone", requests, MODEL, prefix_cache=prefix_cache)
    spy = Spy(built)
    engine = Engine(spy)
    run = engine.arrive(0, 0).started[0]
    engine.arrive(90 * MS, 1)
    engine.arrive(95 * MS, 2)
    run = engine.done(100 * MS, run).started[0]
    assert (built.state.running, built.state.waiting) == (3, 0)
    engine.leave(110 * MS, 1)
    for _ in range(5):
        run = engine.done(run.end_ns, run).started[0]
    engine.leave(run.start_ns, 0)
    assert built.state.running == 0
    assert built.state.kv_used == 0
    return spy


def test_if_somebody_leaves_whom_the_tokens_are_made_for_it_begins_again() -> None:
    spy = left_alone(280, prefix_cache="false")
    assert [(at // MS, list(work.prefill), list(work.decode)) for at, work in spy.composed[1:6]] == [
        (100, [], [0]), (120, [], [0]), (140, [], [0]), (160, [(2, 80)], []), (260, [], [0]),
    ]  # fmt: skip
    # The first by the plan for both, (100 + 40 + 380 + 20 - 100) / 3. That was said; the next two leave
    # between it and 280, and not after 260.
    dues = [(due - 100 * MS) / MS for _, made in spy.made for due in made.due_ns or ()]
    first = 440 / 3
    assert dues == pytest.approx([first, first + (180 - first) / 3, 160], abs=1e-5)


def test_no_token_leaves_before_the_one_before_it() -> None:
    # As above, but so much was to be taken in that the first token leaves after the next prefill.
    spy = left_alone(1_900, prefix_cache="false")
    dues = [due / MS for _, made in spy.made for due in made.due_ns or ()]
    assert dues == pytest.approx([100 + 2_060 / 3] * 4, abs=1e-5)


def test_what_was_to_be_found_is_not_there_if_its_maker_leaves() -> None:
    spy = left_alone(280, prefix_cache="true")
    assert [list(work.prefill) for _, work in spy.composed if work.prefill] == [[(0, 80)], [(2, 80)]]

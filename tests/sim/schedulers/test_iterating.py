"""Whole prompts first, then tokens. All times are worked out by hand, in ms (`iterating.py`)."""

from array import array
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmtap.sim.engine import Engine, EngineOutput, GivenUp, IterationState
from llmtap.sim.model_options import IterationModel
from llmtap.sim.schedulers.iterating import OutputDelay
from tests.sim.schedulers.iterating import MS, Row, Spy, build, serve, workload


@pytest.mark.parametrize(
    ("rows", "options", "tokens"),
    [
        # Seed 001, figure 4: a prompt stalls the first, which has five tokens when it comes.
        (
            [(0, 80, 12), (170, 280, 1)],
            {},
            [[100, 120, 140, 160, 180, 500, 520, 540, 560, 580, 600, 620], [480]],
        ),
        # Alone: the first token with the prompt, 20 ms each.
        ([(0, 80, 3)], {}, [[100, 120, 140]]),
        ([(7, 80, 1)], {}, [[107]]),
        # Those that are there when an iteration begins are taken in together: 20 + 10 + 30 ms.
        ([(0, 5, 1), (1, 10, 2), (2, 30, 1)], {}, [[25], [85, 105], [85]]),
        # As many tokens as fit, in the order of arrival: nobody goes before another that does not fit.
        (
            [(0, 5, 1), (1, 60, 1), (1, 50, 1), (1, 40, 1)],
            {"tokens_max": "100"},
            [[25], [105], [215], [215]],
        ),
        ([(0, 5, 1), (1, 60, 1), (1, 40, 1)], {"tokens_max": "100"}, [[25], [145], [145]]),
        # A longer prompt is taken in alone, whole.
        ([(0, 150, 1), (0, 1, 1)], {"tokens_max": "100"}, [[170], [191]]),
        ([(0, 1, 1), (0, 150, 1)], {"tokens_max": "100"}, [[21], [191]]),
        # Prompts go first as long as there are any, and all that run pause: 20 + 80 twice.
        (
            [(0, 10, 2), (1, 80, 2), (1, 80, 1)],
            {"tokens_max": "100"},
            [[30, 250], [130, 250], [230]],
        ),
        # No more than two run; the third has a place when the first is done.
        ([(0, 10, 3), (0, 10, 4), (0, 10, 1)], {"seqs_max": "2"}, [[40, 60, 80], [40, 60, 80, 130], [110]]),
        # Nothing to take in is taken in as one token; who failed makes none, and ends with its prompt.
        ([(0, 0, 2)], {}, [[21, 41]]),
        ([(0, 10, 0), (0, 10, 2)], {}, [[], [40, 60]]),
        ([(0, 0, 0)], {}, [[]]),
        # The engine sleeps until somebody comes.
        ([(0, 10, 1), (500, 10, 2)], {}, [[30], [530, 550]]),
    ],
)
def test_when_tokens_leave(rows: list[Row], options: dict[str, str], tokens: list[list[float]]) -> None:
    served = serve("continuous_batching", rows, **options)
    assert served.tokens == tokens
    assert served.complete == set(range(len(rows)))


@pytest.mark.parametrize(
    ("rows", "chunk", "iterations"),
    [
        # Pieces of a prompt, one of them with the first token.
        (
            [(0, 100, 2)],
            40,
            [
                (0, 60, [(0, 40)], []),
                (60, 120, [(0, 40)], []),
                (120, 160, [(0, 20)], []),
                (160, 180, [], [0]),
            ],
        ),
        # What one leaves of an iteration is the next one's.
        ([(0, 30, 1), (0, 30, 1)], 40, [(0, 60, [(0, 30), (1, 10)], []), (60, 100, [(1, 20)], [])]),
        ([(0, 10, 1), (0, 10, 1), (0, 10, 1)], 40, [(0, 50, [(0, 10), (1, 10), (2, 10)], [])]),
        # Tokens count as well: of three, two are for prompts, then one.
        (
            [(0, 2, 5), (0, 3, 3)],
            3,
            [
                (0, 23, [(0, 2), (1, 1)], []),
                (23, 45, [(1, 2)], [0]),
                (45, 65, [], [0, 1]),
                (65, 85, [], [0, 1]),
                (85, 105, [], [0]),
            ],
        ),
        # Where tokens fill an iteration, prompts wait.
        (
            [(0, 1, 3), (21, 1, 1)],
            1,
            [(0, 21, [(0, 1)], []), (21, 41, [], [0]), (41, 61, [], [0]), (61, 82, [(1, 1)], [])],
        ),
        # An empty prompt is a token, and who failed makes none.
        ([(0, 0, 1), (0, 5, 0)], 4, [(0, 24, [(0, 1), (1, 3)], []), (24, 46, [(1, 2)], [])]),
    ],
)
def test_iterations(
    rows: list[Row], chunk: int, iterations: list[tuple[float, float, list[tuple[int, int]], list[int]]]
) -> None:
    served = serve("chunked_prefill", rows, chunk=str(chunk))
    assert served.iterations == iterations
    assert [len(tokens) for tokens in served.tokens] == [made for _, _, made in rows]


@pytest.mark.parametrize("preemption", ["recompute", "swap"])
def test_a_prompt_that_is_not_whole_gives_its_memory_to_those_that_decode(preemption: str) -> None:
    # Five blocks of four: three for the prompt of the second, a third one for the first at 112.
    served = serve(
        "chunked_prefill",
        [(0, 4, 9), (50, 12, 3)],
        chunk="5",
        kv_tokens="20",
        block="4",
        preemption=preemption,
    )
    assert served.iterations[3:6] == [
        (64, 88, [(1, 4)], [0]),
        (88, 112, [(1, 4)], [0]),
        (112, 132, [], [0]),
    ]
    # Taken in anew, in pieces of five, five and two.
    assert served.tokens == [
        [24, 44, 64, 88, 112, 132, 152, 172, 192],
        [264, 284, 304],
    ]
    assert served.state == IterationState(
        kv_peak=1, preemptions=1, preempted=1, recovered=1, preempted_tokens=8
    )


_A: Row = (0, 80, 12)
"""Has five tokens at 180."""


@pytest.mark.parametrize(
    ("prepone", "rows", "tokens"),
    [
        # Seed 001, figure 4: made at 200 and 220; the prompt is whole at 520, the next token at 540.
        (2, [_A, (170, 280, 1)], [[100, 120, 140, 160, 180, 300, 420, 540, 560, 580, 600, 620], [520]]),
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
            [
                [100, 120, 140, 160, 180, 233.333333, 286.666666, 351.11111, 415.555555, 480, 500, 520],
                [320],
                [460],
            ],
        ),
        # One that came in between is taken in after the tokens that were planned, and made ahead again.
        (
            2,
            [(0, 80, 8), (110, 80, 1), (130, 80, 1)],
            [[100, 120, 173.333333, 226.666666, 291.11111, 355.555555, 420, 440], [260], [400]],
        ),
    ],
)
def test_when_preponed_tokens_leave(prepone: int, rows: list[Row], tokens: list[list[float]]) -> None:
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


def test_who_waits_is_served_by_prediction_then_as_it_came() -> None:
    rows: list[Row] = [(0, 10, 1), (1, 10, 5), (2, 10, 2), (3, 10, 5), (4, 10, 1)]
    served = serve("shortest_predicted_first", rows, tokens_max="10", seqs_max="1")
    order = [prompts[0][0] for _, _, prompts, _ in served.iterations if prompts]
    assert order == [0, 4, 2, 1, 3]


def test_predictions_count_and_not_truth() -> None:
    requests = workload([(0, 10, 1), (1, 10, 1), (2, 10, 9)])
    requests.predicted = array("q", [0, 8, 2])
    served = serve("shortest_predicted_first", requests, tokens_max="10")
    assert [prompts[0][0] for _, _, prompts, _ in served.iterations if prompts] == [0, 2, 1]


class Result:
    """Makes the tokens that it is told to make."""

    def __init__(self) -> None:
        self.state = IterationState()
        self.gone: dict[int, GivenUp] = {}

    def on_arrival(self, now_ns: int, request: int) -> None: ...

    def on_close(self, now_ns: int) -> None: ...

    def form_work(self, now_ns: int) -> Any | None:
        return f"work at {now_ns}"

    def on_done(self, now_ns: int, work: EngineOutput) -> EngineOutput:
        return work

    def on_left(self, now_ns: int, request: int) -> None: ...

    def take_given_up(self) -> Mapping[int, GivenUp]:
        return self.gone


def delayed(token_times: Sequence[int], gap: int) -> list[int]:
    """When the tokens of one request leave."""
    buffer = OutputDelay(Result(), gap)
    leaving: list[int] = []
    for t in token_times:
        leaving += buffer.on_done(t, EngineOutput(tokens=[0])).due_ns or ()
    return leaving


# Case S5 of the oracle of smooth goodput: one stall of half a second. ms.
_STALLED = [100, 110, 120, 130, 140, 150, 160, 170, 670, 680, 690, 700]


@pytest.mark.parametrize(
    ("gap", "leaving"),
    [
        (50, [100, 150, 200, 250, 300, 350, 400, 450, 670, 720, 770, 820]),
        (60, [100, 160, 220, 280, 340, 400, 460, 520, 670, 730, 790, 850]),
        (100, [100, 200, 300, 400, 500, 600, 700, 800, 900, 1000, 1100, 1200]),
        (10, _STALLED),
    ],
)
def test_a_stall_is_spread(gap: int, leaving: list[int]) -> None:
    assert delayed(_STALLED, gap) == leaving


_TIMES = st.lists(st.integers(0, 400), min_size=2, max_size=40).map(
    lambda gaps: [sum(gaps[: i + 1]) for i in range(len(gaps))]
)


def idle(times: Sequence[int], reader: int) -> int:
    """How long a reader who needs so much per token waits: the largest t_i - V (i - 1), from arrival at 0."""
    return max(t - reader * i for i, t in enumerate(times))


@given(_TIMES, st.integers(1, 200), st.integers(0, 200))
def test_a_reader_who_is_no_faster_does_not_notice(times: list[int], gap: int, slower: int) -> None:
    assert idle(delayed(times, gap), gap + slower) == idle(times, gap + slower)


@given(_TIMES, st.integers(1, 200), st.integers(1, 200))
def test_a_faster_reader_waits_longer_by_no_more_than_the_difference(
    times: list[int], reader: int, more: int
) -> None:
    waited = idle(delayed(times, reader + more), reader)
    assert idle(times, reader) <= waited <= idle(times, reader) + (len(times) - 1) * more


def test_tokens_are_told_in_the_order_in_which_they_leave() -> None:
    buffer = OutputDelay(Result(), 50)
    buffer.on_done(0, EngineOutput(tokens=[0, 1]))
    buffer.on_done(60, EngineOutput(tokens=[1]))
    assert buffer.on_done(70, EngineOutput(tokens=[1, 2, 0])) == EngineOutput((), [0, 2, 1], [70, 70, 110])
    assert buffer.on_done(80, EngineOutput(tokens=[0, 2], due_ns=[200, 90])) == EngineOutput(
        (), [2, 0], [120, 200]
    )


def test_it_remembers_those_under_way_only() -> None:
    result = Result()
    buffer = OutputDelay(result, 50)
    buffer.on_done(0, EngineOutput(tokens=[0, 1, 2, 3]))
    assert buffer.on_done(10, EngineOutput(finished=[0], tokens=[0])).finished == [0]
    buffer.on_left(11, 1)
    result.gone = {2: GivenUp.LATE}
    assert buffer.take_given_up() == {2: GivenUp.LATE}
    result.gone = {}
    # As if they had never been, but for the last.
    assert buffer.on_done(20, EngineOutput(tokens=[0, 1, 2, 3])).due_ns == [20, 20, 20, 50]


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
                planned, met = (built._prefill_end_ns, built._next_token_ns), met + 1
                assert run.end_ns == planned[0]
            elif run.start_ns == planned[0] and run.work.decode:
                assert run.end_ns == planned[1]
            step, run = engine.on_done(run.end_ns, run), None
        run = step.started[0] if step.started else run
    assert met >= 3

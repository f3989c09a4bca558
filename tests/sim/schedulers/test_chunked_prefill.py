"""All that run decode in every iteration, and prompts fill it up. By hand, in ms."""

import pytest

from llmtap.sim.engine import IterationState
from tests.support.iterating import Row, serve


def test_nobody_pauses_while_a_prompt_is_taken_in() -> None:
    # Seed 001, figure 4. The prompt has 300 tokens and not 280 as where it is taken in alone: there a pass of
    # 20 ms is its own, here it is shared with the token beside each of its three pieces.
    served = serve("chunked_prefill", [(0, 80, 12), (170, 300, 1)], chunk="101")
    assert served.tokens == [
        [100, 120, 140, 160, 180, 300, 420, 540, 560, 580, 600, 620],
        [540],
    ]


@pytest.mark.parametrize(
    ("rows", "chunk", "iterations"),
    [
        # Pieces of a prompt, one of them with the first token.
        ([(0, 100, 2)], 40, [(0, 60, [(0, 40)], []), (60, 120, [(0, 40)], []), (120, 160, [(0, 20)], []),
                             (160, 180, [], [0])]),
        # What one leaves of an iteration is the next one's.
        ([(0, 30, 1), (0, 30, 1)], 40, [(0, 60, [(0, 30), (1, 10)], []), (60, 100, [(1, 20)], [])]),
        ([(0, 10, 1), (0, 10, 1), (0, 10, 1)], 40, [(0, 50, [(0, 10), (1, 10), (2, 10)], [])]),
        # Tokens count as well: of three, two are for prompts, then one.
        ([(0, 2, 5), (0, 3, 3)], 3, [(0, 23, [(0, 2), (1, 1)], []), (23, 45, [(1, 2)], [0]),
                                     (45, 65, [], [0, 1]), (65, 85, [], [0, 1]), (85, 105, [], [0])]),
        # Where tokens fill an iteration, prompts wait.
        ([(0, 1, 3), (21, 1, 1)], 1, [(0, 21, [(0, 1)], []), (21, 41, [], [0]), (41, 61, [], [0]),
                                      (61, 82, [(1, 1)], [])]),
        # An empty prompt is a token, and who failed makes none.
        ([(0, 0, 1), (0, 5, 0)], 4, [(0, 24, [(0, 1), (1, 3)], []), (24, 46, [(1, 2)], [])]),
    ],
)  # fmt: skip
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
        "chunked_prefill", [(0, 4, 9), (50, 12, 3)], chunk="5", kv_tokens="20", block="4",
        preemption=preemption,
    )  # fmt: skip
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

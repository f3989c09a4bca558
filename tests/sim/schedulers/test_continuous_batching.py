"""Whole prompts first, then tokens. Times are worked out by hand, in ms (`tests/support/iterating.py`)."""

import pytest

from tests.support.iterating import Row, serve


def test_a_prompt_stalls_those_that_decode() -> None:
    # Seed 001, figure 4: the first of two has five tokens when the other comes.
    served = serve("continuous_batching", [(0, 80, 12), (170, 280, 1)])
    assert served.tokens == [
        [100, 120, 140, 160, 180, 500, 520, 540, 560, 580, 600, 620],
        [480],
    ]


@pytest.mark.parametrize(
    ("rows", "options", "tokens"),
    [
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


def test_a_failed_request_ends_with_its_prompt() -> None:
    served = serve("continuous_batching", [(0, 10, 0), (0, 10, 2)])
    assert served.end_ns == {0: 40_000_000, 1: 60_000_000}


def test_an_iteration_of_tokens_has_all_that_run_and_nothing_else() -> None:
    served = serve("continuous_batching", [(0, 10, 3), (0, 10, 2), (41, 10, 2)])
    assert served.iterations == [
        (0, 40, [(0, 10), (1, 10)], []),
        # The third is there a moment after this began.
        (40, 60, [], [0, 1]),
        (60, 90, [(2, 10)], []),
        (90, 110, [], [0, 2]),
    ]

"""Worked by hand; the model is in tests/support/flights.py."""

import pytest

from tests.support.flights import Row, flown, served

ROWS: list[Row] = [(0, 5, 5), (0, 0, 20), (0, 0, 5), (0, 0, 30), (1, 0, 8)]
QUEUED: list[Row] = [
    (0, 0, 5),  # alone, until 1.5
    (0.5, 0, 6), (0.6, 0, 20), (0.7, 0, 25), (0.8, 0, 15),
]  # fmt: skip


def test_a_batch_is_of_one_bin_and_bins_take_turns() -> None:
    result = flown("multi_bin_dynamic", ROWS, bin_edges="0,10", same_instant="all-first")
    # 1 + 10 x 0.125 for the two short ones, 1 + 30 x 0.125 for the long ones, then what came meanwhile.
    assert served(result) == [(0, 2.25, 2), (2.25, 7, 2), (0, 2.25, 2), (2.25, 7, 2), (7, 8.8, 1)]
    assert result.bins == [(0, 10), (10, None)]
    assert result.record.queues == {0: 2, 1: 1}


@pytest.mark.parametrize(
    ("choice", "starts"),
    [
        # Bins from 0, 10 and 20: the turn is the second's, the longest queue the third, the oldest the first.
        ("round-robin", [0, 8.125, 4, 4, 1.5]),
        ("longest-queue", [0, 5.625, 1.5, 1.5, 7.225]),
        ("oldest-head", [0, 1.5, 3.1, 3.1, 7.225]),
    ],
)
def test_which_bin_is_next(choice: str, starts: list[float]) -> None:
    result = flown("multi_bin_dynamic", QUEUED, bin_edges="0,10,20", bin_choice=choice)
    assert [start for start, _, _ in served(result)] == starts


def test_a_wrong_prediction_only_costs_time() -> None:
    rows: list[Row] = [(0, 1, 30), (0, 100, 2), (0, 2, 30), (0, 120, 2)]
    edges = {"bin_edges": "0,10", "same_instant": "all-first", "length": "output"}
    perfect = flown("multi_bin_dynamic", rows, **edges)
    by_prompt = flown("multi_bin_dynamic", rows, predictor="prompt", **edges)
    # By prompts of 1 and 2 the long ones are short, and they are served first; the same batches.
    assert served(perfect) == [(1.25, 6, 2), (0, 1.25, 2), (1.25, 6, 2), (0, 1.25, 2)]
    assert served(by_prompt) == [(0, 4.75, 2), (4.75, 6, 2), (0, 4.75, 2), (4.75, 6, 2)]


def test_a_bins_limit_holds_and_its_controller_learns_by_itself() -> None:
    rows: list[Row] = [(0, 0, 5)] * 12 + [(0, 0, 4_000)] * 12
    settings = {"bin_edges": "0,4000", "same_instant": "all-first", "tau_start": "beta"}
    result = flown("multi_bin_dynamic", rows, **settings)
    # 7 GB hold 9 of 4,000 tokens and 4 of 8,096, however many the controllers would take.
    assert result.bin_limits == [9, 4]
    assert [n for _, _, n in served(result)] == [9] * 9 + [3] * 3 + [4] * 12


def test_the_shorter_than_all_bins_are_in_the_last_or_in_the_first() -> None:
    rows: list[Row] = [(0, 0, 1), (0, 0, 12), (0, 0, 30)]
    for below, sizes in (("last", [2, 1, 2]), ("first", [2, 2, 1])):
        result = flown(
            "multi_bin_dynamic", rows, bin_edges="10,20", below_first=below, same_instant="all-first"
        )
        assert [n for _, _, n in served(result)] == sizes

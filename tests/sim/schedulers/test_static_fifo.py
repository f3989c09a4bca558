"""Worked by hand; the model is in tests/support/flights.py."""

import pytest

from tests.support.flights import Row, flown, served

ROWS: list[Row] = [(0, 5, 5), (1, 10, 10), (1, 2, 3), (2, 20, 10), (100, 0, 0)]


@pytest.mark.parametrize(
    ("settings", "starts_ends_sizes"),
    [
        (
            # The first leaves alone and takes 1 + 10 x 0.1; then two by two, the longest decides.
            {"static_batch": "2"},
            [(0, 2, 1), (2, 5.5, 2), (2, 5.5, 2), (5.5, 9.5, 1), (100, 101, 1)],
        ),
        (
            # The request of the second 2 is there before the server is free.
            {"static_batch": "3"},
            [(0, 2, 1), (2, 7, 3), (2, 7, 3), (2, 7, 3), (100, 101, 1)],
        ),
        (
            # It is not: the server takes two, then it.
            {"static_batch": "3", "tie": "gpu-first"},
            [(0, 2, 1), (2, 5.5, 2), (2, 5.5, 2), (5.5, 9.5, 1), (100, 101, 1)],
        ),
        (
            # Two are waited for; the last one goes when no more will come.
            {"static_batch": "2", "partial": "wait"},
            [(1, 4.5, 2), (1, 4.5, 2), (4.5, 9.25, 2), (4.5, 9.25, 2), (100, 101, 1)],
        ),
        (
            # Only outputs count as length: 5, then 10 in a batch of three.
            {"static_batch": "3", "length": "output"},
            [(0, 1.5, 1), (1.5, 3.75, 2), (1.5, 3.75, 2), (3.75, 5.75, 1), (100, 101, 1)],
        ),
    ],
)
def test_the_oldest_are_served_so_many_at_a_time(
    settings: dict[str, str], starts_ends_sizes: list[tuple[float, float, int]]
) -> None:
    assert served(flown("static_fifo", ROWS, **settings)) == starts_ends_sizes


def test_arrivals_of_one_moment_leave_one_by_one_or_together() -> None:
    rows: list[Row] = [(0, 0, 10)] * 4
    one_by_one = served(flown("static_fifo", rows))
    assert one_by_one == [(0, 2, 1), *[(2, pytest.approx(2 + 1 + 4 / 3), 3)] * 3]
    assert served(flown("static_fifo", rows, same_instant="all-first")) == [(0, 2.375, 4)] * 4


def test_more_servers_share_a_queue() -> None:
    result = flown("static_fifo", ROWS, servers=2, static_batch="2")
    # The second server takes the first that comes at 1 s; the other of that moment waits for the first.
    assert served(result) == [(0, 2, 1), (1, 4, 1), (2, 6.75, 2), (2, 6.75, 2), (100, 101, 1)]
    assert result.record.busy_ns == [7_750_000_000, 3_000_000_000]

"""Who waits is served by rank, then as it came, and after all that wait again."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmtap.sim.schedulers.roster import Waiting


def drained(waiting: Waiting) -> list[int]:
    order = []
    while (request := waiting.head()) is not None:
        assert request in waiting
        waiting.remove(request)
        order.append(request)
    assert len(waiting) == 0
    return order


@pytest.mark.parametrize(
    ("ranks", "added", "again", "removed", "order"),
    [
        (None, [0, 1, 2], [], [], [0, 1, 2]),
        (None, [0, 1, 2], [], [0, 1], [2]),
        (None, [0, 1, 2], [], [1], [0, 2]),
        (None, [4, 5], [3, 1], [], [1, 3, 4, 5]),
        ([7, 3, 7, 5], [0, 1, 2, 3], [], [], [1, 3, 0, 2]),
        ([7, 3, 7, 5], [0, 1, 3], [2], [], [2, 1, 3, 0]),
        ([7, 3, 7, 5], [0, 1, 2, 3], [], [1, 0], [3, 2]),
        ([0, 0, 0], [0, 1], [2], [], [2, 0, 1]),
        (None, [], [], [], []),
    ],
)
def test_who_is_next(
    ranks: Sequence[int] | None, added: list[int], again: list[int], removed: list[int], order: list[int]
) -> None:
    waiting = Waiting(ranks)
    for request in added:
        waiting.add(request)
    for request in again:
        waiting.add(request, again=True)
    for request in removed:
        waiting.remove(request)
    assert len(waiting) == len(order)
    assert drained(waiting) == order


@given(st.lists(st.integers(0, 5), max_size=30), st.data())
def test_nobody_is_lost(ranks: list[int], data: st.DataObject) -> None:
    waiting = Waiting(ranks)
    for request in range(len(ranks)):
        waiting.add(request)
    gone = data.draw(st.sets(st.integers(0, len(ranks) - 1))) if ranks else set()
    for request in gone:
        waiting.remove(request)
    left = set(range(len(ranks))) - gone
    assert drained(waiting) == sorted(left, key=lambda request: (ranks[request], request))

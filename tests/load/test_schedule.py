"""Every row is taken or dropped, once; none before its time; a turn waits for the one before it."""

from array import array
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmtap.load.run import Schedule
from llmtap.load.workers.worker_pool import assign_rows
from llmtap.units import NEVER
from llmtap.workload.requests import Requests

LATER = 1 << 60


def requests(arrivals: Sequence[int], after: Sequence[int] = (), think: Sequence[int] = ()) -> Requests:
    return Requests(array("q", arrivals), after=array("q", after), think_ns=array("q", think))


def taken(schedule: Schedule, now_ns: int) -> list[tuple[int, int | None]]:
    out = []
    while (item := schedule.take_due_row(now_ns)) is not None:
        out.append(item)
    return out


@pytest.mark.parametrize("served", [True, False])
def test_a_row_that_joins_others_waits_for_the_last_of_their_ends(served: bool) -> None:
    # 0 starts 1 - 2 and 3; 4 follows 0 and joins 2 and 3.
    r = requests([0] * 5, after=[-1, 0, 1, 0, 0], think=[0, 0, 0, 0, 7])
    r.joins = {4: (2, 3)}
    schedule = Schedule(r, range(len(r)))
    assert taken(schedule, 0) == [(0, 0)]
    schedule.on_ended(0, 10, served=True)
    assert [row for row, _ in taken(schedule, 10)] == [1, 3]
    schedule.on_ended(3, 20, served=True)
    schedule.on_ended(1, 30, served=served)  # if it failed, 2 is never sent
    if served:
        assert [row for row, _ in taken(schedule, LATER)] == [2]
        assert schedule.has_followers(2)
        schedule.on_ended(2, 30, served=False)
    assert (taken(schedule, 36), taken(schedule, 37)) == ([], [(4, 37)])
    assert (schedule.rows_left, schedule.dropped) == (0, 0 if served else 1)


@st.composite
def plans(draw: st.DrawFn) -> Requests:
    n = draw(st.integers(0, 30))
    arrivals = sorted(draw(st.lists(st.integers(0, 200), min_size=n, max_size=n)))
    if not draw(st.booleans()):
        return requests(arrivals)
    after = [draw(st.integers(-1, row - 1)) if row and draw(st.booleans()) else -1 for row in range(n)]
    think = [draw(st.integers(0, 50)) if before >= 0 else 0 for before in after]
    return requests(arrivals, after, think)


def roots(r: Requests) -> list[int]:
    out: list[int] = []
    for row in range(len(r)):
        before = r.after[row] if r.after else -1
        out.append(row if before < 0 else out[before])
    return out


def played(r: Requests, rows: Sequence[int], draw: st.DataObject, slots: int) -> None:
    """Play a schedule with answers that take any time and may fail; check what holds at each step."""
    schedule = Schedule(r, rows, slots or None)
    root = roots(r)
    now, under_way, times, ends = 0, {}, {}, {}
    while schedule.rows_left or under_way:
        for row, due_ns in taken(schedule, now):
            assert row not in times, "taken once"
            times[row] = now
            before = r.after[row] if r.after else -1
            if before >= 0:
                end_ns, served = ends[before]
                assert served, "nobody follows a failure"
                assert due_ns == end_ns + r.think_ns[row] <= now
            elif slots:
                assert due_ns is None
            else:
                assert due_ns == r.arrival_ns[row] <= now
            under_way[row] = now + draw.draw(st.integers(0, 80))
        if slots:
            begun = {root[row] for row in times}
            over = {c for c in begun if all(row in ends or root[row] != c for row in times)}
            alive = begun - over | {root[row] for row in under_way}
            assert len(alive) <= slots
        next_ns = min([schedule.next_due_ns, *under_way.values()])
        assert next_ns < NEVER, "somebody is waited for, for ever"
        now = max(now, next_ns)
        for row in [row for row, end_ns in under_way.items() if end_ns <= now]:
            ends[row] = under_way.pop(row), draw.draw(st.booleans())
            schedule.on_ended(row, *ends[row][:1], served=ends[row][1])
    assert len(times) + schedule.dropped == len(rows)
    assert set(times) <= set(rows)
    lost = {row for row in rows if row not in times}
    for row in lost:
        before = r.after[row]
        assert before in lost or not ends[before][1], "dropped with reason"


@given(plans(), st.integers(1, 4), st.integers(0, 5), st.data())
def test_any_plan(r: Requests, processes: int, slots: int, data: st.DataObject) -> None:
    """Without slots an open loop, with slots a closed one."""
    for rows in assign_rows(r, processes):
        played(r, rows, data, slots)


@given(plans(), st.integers(1, 5))
def test_rows_are_dealt_once_conversations_whole_in_their_order(r: Requests, processes: int) -> None:
    root = roots(r)
    shares = assign_rows(r, processes)
    assert len(shares) == processes
    assert sorted(row for share in shares for row in share) == list(range(len(r)))
    assert all(share == sorted(share) for share in shares)
    owners = [{i for i, share in enumerate(shares) for row in share if root[row] == c} for c in set(root)]
    assert all(len(owner) == 1 for owner in owners)
    begun = [sum(root[row] == row for row in share) for share in shares]
    assert max(begun) - min(begun) <= 1, "as many conversations each"

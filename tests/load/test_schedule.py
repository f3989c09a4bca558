"""Every row is taken or dropped, once; none before its time; a turn waits for the one before it."""

from array import array
from collections.abc import Callable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmtap.errors import ConfigError
from llmtap.load.run import ErrorWatch, Schedule, StopErrors, parse_stop_errors
from llmtap.load.workers.worker_pool import dealt
from llmtap.units import NEVER
from llmtap.workload.requests import Requests

LATER = 1 << 60


def requests(arrivals: Sequence[int], after: Sequence[int] = (), think: Sequence[int] = ()) -> Requests:
    return Requests(array("q", arrivals), after=array("q", after), think_ns=array("q", think))


def opened(r: Requests, rows: Sequence[int] | None = None) -> Schedule:
    return Schedule(r, range(len(r)) if rows is None else rows)


def taken(schedule: Schedule, now_ns: int) -> list[tuple[int, int | None]]:
    out = []
    while (item := schedule.take(now_ns)) is not None:
        out.append(item)
    return out


# ---------------------------------------------------------------- open loop


def test_rows_are_due_at_their_arrivals_whatever_becomes_of_them() -> None:
    schedule = opened(requests([0, 10, 10, 30]))
    assert (schedule.left, schedule.next_ns) == (4, 0)
    assert taken(schedule, 9) == [(0, 0)]
    assert schedule.next_ns == 10
    assert taken(schedule, 29) == [(1, 10), (2, 10)], "ties in the order of the rows"
    assert taken(schedule, 1_000) == [(3, 30)], "late, and its time stays what it was"
    assert (schedule.left, schedule.next_ns, schedule.take(LATER)) == (0, NEVER, None)


@pytest.mark.parametrize("served", [True, False])
def test_a_row_that_joins_others_waits_for_the_last_of_their_ends(served: bool) -> None:
    # 0 starts 1 - 2 and 3; 4 follows 0 and joins 2 and 3.
    r = requests([0] * 5, after=[-1, 0, 1, 0, 0], think=[0, 0, 0, 0, 7])
    r.joins = {4: (2, 3)}
    schedule = opened(r)
    assert taken(schedule, 0) == [(0, 0)]
    schedule.ended(0, 10, served=True)
    assert [row for row, _ in taken(schedule, 10)] == [1, 3]
    schedule.ended(3, 20, served=True)
    schedule.ended(1, 30, served=served)  # if it failed, 2 is never sent
    if served:
        assert [row for row, _ in taken(schedule, LATER)] == [2]
        assert schedule.followed(2)
        schedule.ended(2, 30, served=False)
    assert (taken(schedule, 36), taken(schedule, 37)) == ([], [(4, 37)])
    assert (schedule.left, schedule.dropped) == (0, 0 if served else 1)


def test_what_follows_a_failed_row_is_dropped_although_it_joins_others() -> None:
    r = requests([0] * 3, after=[-1, 0, 0], think=[0, 0, 7])
    r.joins = {2: (1,)}
    schedule = opened(r)
    taken(schedule, 0)
    schedule.ended(0, 10, served=False)
    assert (schedule.left, schedule.dropped, taken(schedule, LATER)) == (0, 2, [])


def test_a_turn_waits_for_the_end_before_it_and_its_reader() -> None:
    # 0 - 2 - 3 is a conversation; what stands in arrival_ns of its later turns is of no account.
    schedule = opened(requests([0, 5, 0, 0], after=[-1, -1, 0, 2], think=[0, 0, 7, 100]))
    assert taken(schedule, 1_000) == [(0, 0), (1, 5)]
    assert (schedule.next_ns, schedule.left) == (NEVER, 2)
    schedule.ended(1, 40, served=True)
    assert schedule.next_ns == NEVER, "another conversation's end is not waited for"
    schedule.ended(0, 50, served=True)
    assert schedule.next_ns == 57
    assert schedule.take(56) is None
    assert taken(schedule, 57) == [(2, 57)]
    schedule.ended(2, 60, served=True)
    assert taken(schedule, 159) == []
    assert taken(schedule, 160) == [(3, 160)]
    assert (schedule.left, schedule.dropped) == (0, 0)


# ---------------------------------------------------------------- closed loop


def test_a_slot_belongs_to_its_conversation_while_it_thinks() -> None:
    schedule = Schedule(requests([0, 0, 0], after=[-1, 0, -1], think=[0, 100, 0]), range(3), 1)
    assert taken(schedule, 0) == [(0, None)]
    schedule.ended(0, 5, served=True)
    assert taken(schedule, 104) == []
    assert taken(schedule, 105) == [(1, 105)], "the time of a later turn was planned"
    schedule.ended(1, 110, served=True)
    assert taken(schedule, 110) == [(2, None)]


def test_a_conversation_that_branches_holds_others_back() -> None:
    schedule = Schedule(requests([0] * 5, after=[-1, 0, 0, -1, -1], think=[0] * 5), range(5), 1)
    taken(schedule, 0)
    schedule.ended(0, 1, served=True)
    assert taken(schedule, 1) == [(1, 1), (2, 1)]
    schedule.ended(1, 2, served=True)
    assert taken(schedule, 2) == [], "one branch is over, the other is not"
    schedule.ended(2, 3, served=True)
    assert taken(schedule, 3) == [(3, None)], "one slot, one conversation"


# ---------------------------------------------------------------- any plan


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


def played(
    r: Requests,
    make: Callable[[Sequence[int]], Schedule],
    rows: Sequence[int],
    draw: st.DataObject,
    slots: int = 0,
) -> None:
    """Plays a schedule with answers that take any time and may fail, and checks what holds at each step."""
    schedule = make(rows)
    root = roots(r)
    now, under_way, times, ends = 0, {}, {}, {}
    while schedule.left or under_way:
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
        next_ns = min([schedule.next_ns, *under_way.values()])
        assert next_ns < NEVER, "somebody is waited for, for ever"
        now = max(now, next_ns)
        for row in [row for row, end_ns in under_way.items() if end_ns <= now]:
            ends[row] = under_way.pop(row), draw.draw(st.booleans())
            schedule.ended(row, *ends[row][:1], served=ends[row][1])
    assert len(times) + schedule.dropped == len(rows)
    assert set(times) <= set(rows)
    lost = {row for row in rows if row not in times}
    for row in lost:
        before = r.after[row]
        assert before in lost or not ends[before][1], "dropped with reason"


@given(plans(), st.integers(1, 4), st.data())
def test_any_open_plan(r: Requests, hands: int, data: st.DataObject) -> None:
    for rows in dealt(r, hands):
        played(r, lambda rows: Schedule(r, rows), rows, data)


@given(plans(), st.integers(1, 4), st.integers(1, 5), st.data())
def test_any_closed_plan(r: Requests, hands: int, slots: int, data: st.DataObject) -> None:
    for rows in dealt(r, hands):
        played(r, lambda rows: Schedule(r, rows, slots), rows, data, slots)


@given(plans(), st.integers(1, 5))
def test_rows_are_dealt_once_conversations_whole_in_their_order(r: Requests, hands: int) -> None:
    root = roots(r)
    shares = dealt(r, hands)
    assert len(shares) == hands
    assert sorted(row for share in shares for row in share) == list(range(len(r)))
    assert all(share == sorted(share) for share in shares)
    owners = [{i for i, share in enumerate(shares) for row in share if root[row] == c} for c in set(root)]
    assert all(len(owner) == 1 for owner in owners)
    begun = [sum(root[row] == row for row in share) for share in shares]
    assert max(begun) - min(begun) <= 1, "as many conversations each"


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("50%", StopErrors(0.5, 100)),
        (" 0.25 ", StopErrors(0.25, 100)),
        ("0%", StopErrors(0.0, 100)),
        ("0", StopErrors(0.0, 100)),
        ("99.9%/200", StopErrors(0.999, 200)),
        ("5% / 1", StopErrors(0.05, 1)),
    ],
)
def test_a_rule(text: str, rule: StopErrors) -> None:
    found = parse_stop_errors(text)
    assert found.share == pytest.approx(rule.share)
    assert found.latest == rule.latest


@pytest.mark.parametrize(
    "text",
    ["", "%", "half", "50", "100%", "1", "-1%", "-0.1", "50%%", "50%/", "50%/0", "50%/x", "50%/-3", "nan",
     "nan%", "inf", "50%/1.5", "50%/9999999999"],
)  # fmt: skip
def test_no_rule_names_the_option(text: str) -> None:
    with pytest.raises(ConfigError) as refused:
        parse_stop_errors(text)
    assert refused.value.place == "--stop-errors"
    assert refused.value.hint


def test_nobody_judges_before_there_are_enough() -> None:
    watch = ErrorWatch(StopErrors(0.0, 3))
    assert [watch.ended(failed=True) for _ in range(2)] == [None, None]
    assert watch.ended(failed=False) == "2 of the latest 3 answers failed"


def test_a_server_that_dies_late_is_noticed_soon() -> None:
    watch = ErrorWatch(StopErrors(0.5, 10))
    assert all(watch.ended(failed=False) is None for _ in range(10_000))
    assert [watch.ended(failed=True) is not None for _ in range(6)] == [False] * 5 + [True]


@given(st.lists(st.booleans()), st.floats(0, 0.99), st.integers(1, 12))
def test_it_is_the_share_of_the_latest(answers: list[bool], share: float, latest: int) -> None:
    watch = ErrorWatch(StopErrors(share, latest))
    for i, failed in enumerate(answers, 1):
        window = answers[max(0, i - latest) : i]
        broken = len(window) == latest and sum(window) > share * latest
        assert (watch.ended(failed=failed) is not None) is broken

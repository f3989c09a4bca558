"""Parts of the wait for the first token, against waits worked out by hand."""

import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmtap.exchange.exchange import Added, Exchange, Timeline
from llmtap.metrics.phases import PHASES, STREAMS_NEEDED, PhaseTimes, judge_phases, phases_ns, waited_ns

MS = 1_000_000
NAMES = [phase.name for phase in PHASES]


def waiting(connect_ms: int | None = None, send_wait_ms: int = 0, **points_ms: int | None) -> Exchange:
    points = {f"{name}_ns": None if ms is None else ms * MS for name, ms in points_ms.items()}
    connect_ns = None if connect_ms is None else connect_ms * MS
    timeline = Timeline(arrival_ns=0, send_wait_ns=send_wait_ms * MS)
    for name, ns in points.items():
        setattr(timeline, name, ns)
    return Exchange(
        relay="r",
        seq=1,
        arrival_wall_ns=0,
        stream=True,
        timeline=timeline,
        added=Added(connect_ns=connect_ns),
    )


ANSWER: dict[str, int | None] = {"head": 60, "first_byte": 65, "first_token": 100, "first_content": 150}


@pytest.mark.parametrize(
    ("connect", "send_wait", "points", "expected"),
    [
        # An open connection takes the request at once.
        (None, 0, {"request_end": 3, "submit": 5}, [3, 2, 0, 0, 55, 5, 35, 50]),
        # An open connection takes a part of it, and the rest after 9 ms.
        (None, 9, {"request_end": 3, "submit": 14}, [3, 2, 0, 9, 46, 5, 35, 50]),
        # The upstream reads slowly: llmtap reads no more of the request for 30 ms, and then not for 2 ms.
        (None, 32, {"request_end": 40, "submit": 42}, [10, 0, 0, 32, 18, 5, 35, 50]),
        # A new connection, after the request was read.
        (20, 0, {"request_end": 3, "connected": 24, "submit": 25}, [3, 2, 20, 0, 35, 5, 35, 50]),
        # A new connection while the request was read: it is not the client's time.
        (20, 3, {"request_end": 40, "connected": 22, "submit": 44}, [20, 1, 20, 3, 16, 5, 35, 50]),
        # A capture of an older version: the end of connecting is not known.
        (20, 0, {"request_end": 3, "submit": 25}, [3, 2, 20, 0, 35, 5, 35, 50]),
        # No time of the head: the next part has its time.
        (None, 0, {"request_end": 3, "submit": 5, "head": None}, [3, 2, 0, 0, None, 60, 35, 50]),
        # Only reasoning so far.
        (None, 0, {"request_end": 3, "submit": 5, "first_content": None}, [3, 2, 0, 0, 55, 5, 35, None]),
    ],
)
def test_the_parts_of_a_wait(
    connect: int | None, send_wait: int, points: dict[str, int | None], expected: list[int | None]
) -> None:
    found = phases_ns(waiting(connect, send_wait, **{**ANSWER, **points}))
    assert [None if ns is None else ns / MS for ns in found] == expected


def test_a_request_that_was_never_sent_has_only_its_own_part() -> None:
    assert phases_ns(waiting(request_end=3)) == (3 * MS, *[None] * 7)


_point = st.none() | st.integers(0, 1_000)


POINTS = ("request_end", "submit", "head", "first_byte", "first_token", "first_content")


@given(
    connect=_point,
    connected=_point,
    send_wait=st.integers(0, 1_000),
    points=st.fixed_dictionaries(dict.fromkeys(POINTS, _point)),
)
def test_parts_are_never_negative_and_add_up_to_the_last_known_point(
    connect: int | None, connected: int | None, send_wait: int, points: dict[str, int | None]
) -> None:
    durations = phases_ns(waiting(connect, send_wait, connected=connected, **points))
    assert all(ns is None or ns >= 0 for ns in durations)
    assert waited_ns(durations) == max((ms or 0 for ms in points.values()), default=0) * MS


def usual(n: int, **more: Any) -> PhaseTimes:
    times = PhaseTimes()
    rng = random.Random(1)
    for _ in range(n):
        first = 100 + rng.randrange(20)
        times.add(waiting(request_end=1, submit=2, head=50, first_byte=51, first_token=first, **more))
    return times


def verdicts(times: PhaseTimes, **points: int | None) -> dict[str, bool]:
    connect = points.pop("connect", None)
    durations = phases_ns(waiting(connect, **points))
    return {verdict.phase.name: verdict.is_unusual for verdict in judge_phases(durations, times)}


SLOW: dict[str, int | None] = {
    "request_end": 1,
    "submit": 2,
    "head": 400,
    "first_byte": 401,
    "first_token": 455,
}


def test_the_part_that_is_longer_than_usual_is_named_and_the_others_are_not() -> None:
    assert [name for name, unusual in verdicts(usual(STREAMS_NEEDED), **SLOW).items() if unusual] == ["head"]


def test_with_fewer_streams_nothing_is_unusual() -> None:
    assert not any(verdicts(usual(STREAMS_NEEDED - 1), **SLOW).values())


def test_a_part_that_is_longer_than_usual_by_little_is_not_unusual() -> None:
    """`queue` is 8 ms instead of 1 ms, of a wait of 110 ms."""
    points = {"request_end": 1, "submit": 9, "head": 57, "first_byte": 58, "first_token": 110}
    assert not any(verdicts(usual(STREAMS_NEEDED), **points).values())


def test_a_new_connection_is_compared_with_open_ones() -> None:
    points = {
        "connect": 90,
        "connected": 91,
        **SLOW,
        "submit": 92,
        "head": 140,
        "first_byte": 141,
        "first_token": 195,
    }
    assert [name for name, unusual in verdicts(usual(STREAMS_NEEDED), **points).items() if unusual] == [
        "connect"
    ]


def test_only_streams_with_a_token_are_counted_and_merged_times_are_those_of_all() -> None:
    times = usual(30)
    whole, silent = waiting(request_end=1, submit=2, first_token=9), waiting(request_end=1, submit=2)
    whole.stream = False
    for x in (whole, silent):
        times.add(x)
    assert times.n == 30
    merged = PhaseTimes()
    for part in (usual(10), usual(20)):
        merged.merge(part)
    assert merged.n == 30
    assert merged.to_dict()["client"] == times.to_dict()["client"]
    assert set(merged.to_dict()) == set(NAMES)

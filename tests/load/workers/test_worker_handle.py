"""Invariant: whatever another host's clock shows, its times come back to our axis, within the round trip."""

import select
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmtap.clock import ManualClock
from llmtap.load.workers.worker_handle import (
    _TIMES,
    ClockReading,
    FrameDecoder,
    HostClock,
    Progress,
    WorkerDone,
    WorkerReady,
    frame,
)
from llmtap.metrics.latency import measure
from llmtap.units import NEVER
from tests.support.traffic.exchanges import streamed

US = 1_000
HOUR_NS = 3_600_000_000_000
times = st.integers(0, 1 << 60)
aheads = st.integers(-HOUR_NS, HOUR_NS)


def reading(mono_ns: int, wall_ns: int = 0, *, boot: str = "b", host: str = "there") -> ClockReading:
    return ClockReading(host, boot, mono_ns, wall_ns)


@given(times, aheads, aheads, st.lists(st.tuples(*[st.integers(0, 10**8)] * 2), min_size=1, max_size=8))
def test_the_quickest_trip_is_right_within_half_of_it(
    at_ns: int, ahead_ns: int, wall_ahead_ns: int, ways: list[tuple[int, int]]
) -> None:
    ours = ManualClock(at_ns)
    trips = []
    for out_ns, back_ns in ways:
        asked_ns = ours.mono_ns()
        ours.advance(out_ns)
        there = reading(ours.mono_ns() + ahead_ns, ours.wall_ns() + wall_ahead_ns)
        ours.advance(back_ns)
        trips.append((asked_ns, ours.mono_ns(), there))
    found = HostClock.from_trips(reading(ours.mono_ns(), ours.wall_ns(), boot="other"), trips)
    assert found.rtt_ns == min(out_ns + back_ns for out_ns, back_ns in ways)
    assert abs(found.mono_ahead_ns - ahead_ns) <= (found.rtt_ns + 1) / 2
    assert abs(found.wall_ahead_ns - wall_ahead_ns) <= (found.rtt_ns + 1) / 2
    assert found.to_local_ns(found.to_host_ns(at_ns)) == at_ns
    assert found.to_host_ns(at_ns) == at_ns + found.mono_ahead_ns


@pytest.mark.parametrize(
    ("ours", "theirs", "ahead_ns", "shared"),
    [
        ("b", "b", 400 * US, True),
        ("b", "b", 1_100 * US, False),  # one kernel, and two views of its clock
        ("b", "c", 0, False),
        ("", "", 0, False),
    ],
)
def test_processes_of_one_host_share_their_clock_to_the_ns(
    ours: str, theirs: str, ahead_ns: int, shared: bool
) -> None:
    trip = (0, 1_000 * US, reading(500 * US + ahead_ns, boot=theirs))
    clock = HostClock.from_trips(reading(0, boot=ours), [trip])
    assert clock.shared == shared
    assert clock.to_host_ns(5) == (5 if shared else 5 + ahead_ns)
    assert clock.host == "there"


def test_an_exchange_moves_as_a_whole() -> None:
    x, same = streamed(1, 5), streamed(1, 5)
    x.scheduled_ns = x.timeline.arrival_ns - 7
    same.scheduled_ns = same.timeline.arrival_ns - 7
    x.dispatch_late_ns, x.timeline.paused_ns = 7, 9
    clock = HostClock("there", False, HOUR_NS, -5_000_000_000)
    clock.convert(x)
    t, before = x.timeline, same.timeline
    for name in _TIMES:
        ns = getattr(before, name)
        assert getattr(t, name) == (None if ns is None else ns - HOUR_NS)
    assert [a - b for a, b in zip(before.events.t_ns, t.events.t_ns, strict=True)] == [HOUR_NS] * len(
        t.events
    )
    assert x.scheduled_ns == before.arrival_ns - 7 - HOUR_NS
    assert x.dispatch_late_ns == t.arrival_ns - x.scheduled_ns
    assert t.paused_ns == 9, "a duration"
    assert x.arrival_wall_ns == same.arrival_wall_ns + 5_000_000_000
    assert measure(x) == measure(same), "no latency changes"


def test_what_is_told() -> None:
    clock = HostClock("n1", False, HOUR_NS, 2_500_000, 900_000)
    assert clock.to_dict() == {"host": "n1", "shared": False, "offset": 0.0025, "rtt": 0.0009}


MESSAGES: list[WorkerReady | Progress | WorkerDone] = [
    WorkerReady(3),
    Progress(1, 2, 3, 4, 5, 6, 1.5, None, 2.5, None, 0.0, 8, "too many errors"),
    Progress(0, 0, 0, 0, 0, 0, None, None, None, None, None),
    WorkerDone(b"\x00tally" * 30_000, None, 1, 2, 3, 4, 5, 6, 7),
    WorkerDone(b"", "somebody stopped it", 0, 0, 0, 0, 0, 0, 0, "No space left on device"),
]
WHOLE = b"".join(frame(message) for message in MESSAGES)


def heard(pieces: list[bytes]) -> list[WorkerReady | Progress | WorkerDone]:
    frames = FrameDecoder()
    return [message for piece in pieces for message in frames.feed(piece)]


@given(st.lists(st.integers(0, len(WHOLE)), max_size=12))
def test_cut_anywhere(cuts: list[int]) -> None:
    edges = [0, *sorted(cuts), len(WHOLE)]
    assert heard([WHOLE[a:b] for a, b in pairwise(edges)]) == MESSAGES


def test_progress_fits_into_a_pipe_at_once() -> None:
    """Else it could be written in part, where nobody reads (pipe(7))."""
    most = Progress(*[NEVER] * 6, *[1.7e308] * 5, NEVER, "100 of the latest 100 answers failed")
    assert len(frame(most)) < select.PIPE_BUF

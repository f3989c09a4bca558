"""A wall clock that is set: noticed, told apart from drift, and never in a duration."""

import asyncio
import socket
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmtap.channel.status import LAG_EDGES_NS
from llmtap.clock import ManualClock, SystemClock
from llmtap.exchange import observer
from llmtap.exchange.observer import STALL_MISSED_NS
from llmtap.net.lag import PEAKS_MAX, PythonLagMeter, make_lag_meter
from llmtap.net.stream import (
    KERNEL_FLOOR_NS,
    LAG_ABSURD_NS,
    READ_BYTES_MAX,
    STEP_NS,
    KernelStream,
    Timebase,
)
from llmtap.net.tcp_info import out_of_order
from llmtap.vantage import reporter
from tests.support.clocks import STEPS_NS, KernelStamps, SettableClock, kernel_stamps
from tests.support.servers.peer import Peer, wait_until

MS = 1_000_000
S = 1_000_000_000
SET_BY = pytest.mark.parametrize("step_ns", STEPS_NS)


def timebase(clock: ManualClock) -> Timebase:
    return Timebase(clock, make_lag_meter(1_000))


@SET_BY
def test_a_clock_that_is_set_is_noticed_at_the_next_look(step_ns: int) -> None:
    clock = ManualClock(now_ns=10 * S)
    base = timebase(clock)
    first = base.anchor
    for _ in range(5):
        clock.advance(10 * MS)
        base.check()
    assert (base.steps, base.anchor) == (0, first)
    clock.advance(4 * MS)
    clock.wall_offset_ns += step_ns
    clock.advance(6 * MS)
    base.check()
    assert base.steps == 1
    assert base.anchor.to_wall_ns(clock.now_ns) == clock.wall_ns()
    assert base.since_ns == 10 * S + 50 * MS, "the last moment at which it was still right"
    base.check()
    base.resample()
    assert base.steps == 1, "once"
    clock.wall_offset_ns -= step_ns
    clock.advance(500 * MS)
    base.resample()
    assert base.steps == 2, "the sampling of twice a second notices, too"


def test_drift_between_two_samples_is_an_error_of_the_timestamps() -> None:
    clock = ManualClock(now_ns=S)
    base = timebase(clock)
    clock.advance(S)
    clock.wall_offset_ns += 500_000  # at the 500 ppm at which NTP slews
    base.resample()
    began_ns = clock.now_ns - 20 * MS
    clock.advance(50 * MS)
    base.resample()
    assert base.error_since(began_ns) == 500_000
    assert base.error_since(began_ns + 2 * S) == KERNEL_FLOOR_NS


def test_packets_out_of_order_are_known_of_a_connection_that_is_open() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        sock = socket.create_connection(server.getsockname())
        assert not out_of_order(sock)
        sock.close()
    assert out_of_order(sock), "unknown"


def test_drift_renews_the_anchor_and_is_no_step() -> None:
    clock = ManualClock(now_ns=S)
    base = timebase(clock)
    first = base.anchor
    for n in range(1, 8):
        clock.advance(500 * MS)
        clock.wall_offset_ns += STEP_NS // 3
        base.check()
        base.resample()
        assert base.anchor is first or n >= 4
        assert base.width_ns == STEP_NS // 3, "the clocks moved apart by so much since the last sample"
        assert abs(base.anchor.to_wall_ns(clock.now_ns) - clock.wall_ns()) <= STEP_NS
    assert base.anchor is not first
    assert base.steps == 0


@dataclass
class HeldClock(ManualClock):
    """Whose reader is held for a while between its two readings."""

    held_ns: list[int] = field(default_factory=list)

    def wall_ns(self) -> int:
        if self.held_ns:
            self.advance(self.held_ns.pop(0))
        return super().wall_ns()


@pytest.mark.parametrize("times", [1, 3, 6])
def test_a_process_held_between_two_readings_sees_no_step(times: int) -> None:
    clock = HeldClock(now_ns=S)
    base = timebase(clock)
    clock.held_ns = [50 * MS] * times
    base.check()
    clock.held_ns = []
    base.resample()
    assert base.steps == 0


@SET_BY
def test_stamps_around_the_step_are_placed_where_they_belong(step_ns: int) -> None:
    """Taken before or after it and read after it: each lands on its own moment."""
    clock = ManualClock(now_ns=10 * S)
    base = timebase(clock)
    clock.advance(3 * MS)
    base.check()
    before, before_wall = clock.mono_ns(), clock.wall_ns()
    clock.advance(1 * MS)
    clock.wall_offset_ns += step_ns
    clock.advance(1 * MS)
    after, after_wall = clock.mono_ns(), clock.wall_ns()
    clock.advance(2 * MS)
    read = clock.mono_ns()
    assert base.place(read, after_wall) == after
    assert base.steps == 1, "the read itself has looked"
    assert base.place(read, before_wall) == before
    assert base.lag.max_ns == read - before, "both were late by what they were late"
    clock.advance(100 * MS)
    base.check()
    late, late_wall = clock.mono_ns(), clock.wall_ns()
    clock.advance(90 * MS)
    assert base.place(clock.mono_ns(), late_wall) == late, "and a loop that was busy is still seen to be"
    assert base.lag.max_ns == 90 * MS


def test_a_stamp_that_cannot_be_is_the_reads_own_moment() -> None:
    clock = ManualClock(now_ns=500 * S)
    base = timebase(clock)
    for off_ns in (-LAG_ABSURD_NS, -2 * LAG_ABSURD_NS, 10 * MS, S):
        assert base.place(clock.mono_ns(), clock.wall_ns() + off_ns) == clock.mono_ns()
    assert (base.steps, base.lag.max_ns) == (0, 0)


class Stamps:
    """A handler that keeps the stamps of what came, and when it was told."""

    def __init__(self) -> None:
        self.t_ns: list[int] = []
        self.read_ns: list[int] = []

    def on_data(self, data: bytes, t_ns: int) -> None:
        self.read_ns.append(SystemClock.mono_ns())
        self.t_ns.append(t_ns)

    def on_eof(self) -> None: ...

    def on_lost(self, error: OSError | None) -> None: ...

    def on_drained(self) -> None: ...


@SET_BY
async def test_the_kernels_stamps_survive_a_step(step_ns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    with kernel_stamps():
        clock = SettableClock()
        monkeypatch.setattr("llmtap.net.stream._TIMESPEC", KernelStamps(clock))
        base = Timebase(clock, make_lag_meter(1_000))
        with socket.create_server(("127.0.0.1", 0)) as server:
            far = socket.create_connection(server.getsockname())
            near, _ = server.accept()
        near.setblocking(False)
        stamps = Stamps()
        stream = KernelStream(asyncio.get_running_loop(), near, stamps, base)
        peer = Peer(far)
        try:
            clock.ahead_ns = step_ns
            for _ in range(5):
                base.lag.take_max()
                sent = SystemClock.mono_ns()
                count = len(stamps.t_ns)
                await peer.send(b"event")
                await wait_until(lambda n=count: len(stamps.t_ns) > n)
                assert sent - MS <= stamps.t_ns[-1] <= stamps.read_ns[-1] + MS
                assert base.lag.max_ns <= stamps.read_ns[-1] - sent + MS, "the step is no lag of ours"
            assert base.steps == 1
        finally:
            stream.close()
            peer.close()


FLOOR_NS = 1_000

LAG = st.one_of(st.integers(0, 5_000), st.integers(FLOOR_NS - 2, FLOOR_NS + 4))
NOTES = st.lists(st.tuples(st.integers(0, 50), LAG), max_size=60)
"""(time since the note before, lag)"""


Make = Callable[..., PythonLagMeter]
EACH = pytest.mark.parametrize("make", [PythonLagMeter, make_lag_meter])
"""The Python implementation, and the one that runs."""


def noted(make: Make, steps: list[tuple[int, int]]) -> tuple[PythonLagMeter, list[tuple[int, int]]]:
    meter = make(FLOOR_NS)
    t = 0
    notes = []
    for step, lag in steps:
        t += step
        meter.note(t, lag)
        notes.append((t, lag))
    return meter, notes


def brute_force(notes: list[tuple[int, int]], since: int) -> int:
    return max([FLOOR_NS, *(lag for t, lag in notes if t >= since)])


@EACH
@given(NOTES)
def test_the_worst_since_a_moment(make: Make, steps: list[tuple[int, int]]) -> None:
    meter, notes = noted(make, steps)
    last = notes[-1][0] if notes else 0
    for since in range(-1, last + 2):
        assert meter.worst_since(since) == brute_force(notes, since)


@EACH
@given(NOTES, st.integers(0, 1_500))
def test_forgetting_the_past_changes_nothing_after_it(
    make: Make, steps: list[tuple[int, int]], before: int
) -> None:
    meter, notes = noted(make, steps)
    meter.forget_before(before)
    for since in range(before, before + 60):
        assert meter.worst_since(since) == brute_force(notes, since)


@EACH
@given(NOTES)
def test_sums_buckets_and_maximum(make: Make, steps: list[tuple[int, int]]) -> None:
    meter, notes = noted(make, steps)
    lags = [lag for _, lag in notes]
    assert meter.sum_ns == sum(lags)
    assert sum(meter.buckets) == len(lags)
    assert meter.take_max() == max(lags, default=0)
    assert meter.take_max() == 0


@EACH
@pytest.mark.parametrize("lag", [0, *LAG_EDGES_NS, *(e + 1 for e in LAG_EDGES_NS)])
def test_a_lag_falls_into_the_bucket_of_its_upper_bound(make: Make, lag: int) -> None:
    meter = make(FLOOR_NS)
    meter.note(1, lag)
    assert meter.buckets[bisect_left(LAG_EDGES_NS, lag)] == 1
    assert len(meter.buckets) == len(LAG_EDGES_NS) + 1


@EACH
def test_memory_is_bounded_and_what_is_forgotten_never_makes_an_exchange_look_better(make: Make) -> None:
    """More falling peaks than are kept: the answer may be too wide, but not too narrow."""
    count = PEAKS_MAX + 500
    meter, notes = noted(make, [(1, 2_000_000 - i) for i in range(count)])
    for since in (0, 1, 2, 3, 400, 501, 502, 700, count - 1, count, count + 1):
        assert meter.worst_since(since) >= brute_force(notes, since), f"since {since}"


@EACH
def test_a_byte_may_wait_for_two_turns_of_which_a_timer_sees_one(make: Make) -> None:
    meter = make(FLOOR_NS, blind_ns=7, turns=2)
    assert meter.worst_since(0) == FLOOR_NS + 7
    meter.note(10, 3 * FLOOR_NS)
    assert meter.worst_since(0) == 6 * FLOOR_NS + 7
    assert meter.max_ns == 3 * FLOOR_NS, "what was seen stays what it was"


def test_no_stall_that_goes_unseen_is_longer_than_exchanges_allow_for() -> None:
    assert reporter.PROBE_NS + reporter.PROBE_GRAIN_NS <= STALL_MISSED_NS
    assert observer.READ_BYTES_MAX == READ_BYTES_MAX

"""What waits while there is something to send or to read, and for how long."""

import asyncio
import socket
import time
from typing import Any

import pytest

from llmtap.clock import SystemClock
from llmtap.load import sending as module
from llmtap.load.sending import (
    BEHIND_NS,
    GATHER_NS,
    GRAIN_NS,
    KERNEL_FLOOR_NS,
    PROBE_NS,
    WAITING_MAX,
    WAKING_NS,
    DeferredWork,
    Lateness,
)
from llmtap.net.pacing import Pacer, Waker
from llmtap.units import NEVER, NS_PER_S
from tests.support.servers.peer import wait_until

MS = 1_000_000


def busy(ns: int) -> None:
    end_ns = SystemClock.mono_ns() + ns
    while SystemClock.mono_ns() < end_ns:
        pass


async def test_urgent_work_goes_first_and_each_in_its_order() -> None:
    done: list[str] = []
    later = DeferredWork(asyncio.get_running_loop())
    for name in ("a", "b"):
        later.add(lambda name=name: done.append(name))
    for name in ("1", "2"):
        later.add(lambda name=name: done.append(name), urgent=True)
    assert not done, "whoever adds goes on first"
    await wait_until(lambda: len(done) == 4)
    assert done == ["1", "2", "a", "b"]


async def test_a_socket_is_read_before_all_work_is_done() -> None:
    loop = asyncio.get_running_loop()
    later = DeferredWork(loop)
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    done = 0
    when: list[int] = []

    def read() -> None:
        ours.recv(10)
        when.append(done)

    def work() -> None:
        nonlocal done
        busy(MS)
        done += 1

    loop.add_reader(ours, read)
    for _ in range(50):
        later.add(work)
    theirs.send(b"x")
    await wait_until(lambda: done == 50)
    loop.remove_reader(ours)
    ours.close()
    theirs.close()
    assert when
    assert when[0] < 5


async def test_too_much_is_done_at_once() -> None:
    done: list[int] = []
    later = DeferredWork(asyncio.get_running_loop())
    for i in range(WAITING_MAX + 3):
        later.add(lambda i=i: done.append(i))
    assert done == [0, 1, 2]
    later.finish()
    assert len(done) == WAITING_MAX + 3


async def test_who_is_due_does_not_wait_for_work() -> None:
    later = DeferredWork(asyncio.get_running_loop())
    pacer = later.pacer = Pacer(SystemClock(), pause_ns=0)
    done, when = 0, []

    def work() -> None:
        nonlocal done
        if not done:  # due before this piece is done, and not before it has begun
            Waker(pacer, act).call_at(SystemClock.mono_ns() + MS)
        busy(2 * MS)
        done += 1

    def act(now_ns: int) -> int:
        when.append(done)
        return NEVER

    for _ in range(5):
        later.add(work)
    later._run_slice()
    assert when == [1], "the first piece was under way; before the second it was called"
    later.finish()
    pacer.close()


async def test_behind_in_reading_work_waits_a_turn() -> None:
    done: list[int] = []
    later = DeferredWork(asyncio.get_running_loop())
    later.add(lambda: done.append(1))
    assert not later.is_behind(SystemClock.mono_ns())
    assert later.is_behind(SystemClock.mono_ns() - 2 * BEHIND_NS)
    later._schedule_turn()
    assert not done
    later._schedule_turn()
    assert done == [1]


@pytest.mark.parametrize(
    ("kernel", "reads", "streams", "gathers"),
    [
        (True, 2_000, 50, True),
        (True, 1_999, 50, False),  # few: a sleep would be one more wake-up
        (True, 5_000, 50, True),
        (True, 5_001, 50, False),  # each stream so fast that two pieces would be read together
        (True, 0, 0, False),
        (False, 3_000, 50, False),  # our own stamps age while they wait
    ],
)
async def test_when_it_pays_to_gather(
    kernel: bool, reads: int, streams: int, gathers: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_ns = 0
    monkeypatch.setattr(module, "mono_ns", lambda: now_ns)
    later = DeferredWork(asyncio.get_running_loop(), gathers=kernel)
    for _ in range(reads):
        later.is_behind(now_ns)
    now_ns = NS_PER_S
    later.judge(streams)
    assert later._is_gathering is gathers


@pytest.mark.parametrize(
    ("due_in_ns", "slept_ns"),
    [
        (None, GATHER_NS),
        (10 * MS, GATHER_NS),
        (GATHER_NS, GATHER_NS - WAKING_NS),
        (WAKING_NS, None),
        (-MS, None),
    ],
)
async def test_no_sleep_makes_a_request_late(
    due_in_ns: int | None, slept_ns: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    slept: list[float] = []
    monkeypatch.setattr(module, "mono_ns", lambda: 0)
    monkeypatch.setattr(module.time, "sleep", slept.append)
    later = DeferredWork(asyncio.get_running_loop(), gathers=True)

    class Due:
        next_ns = due_in_ns

        def catch_up(self) -> None:
            pass

    if due_in_ns is not None:
        pacer: Any = Due()
        later.pacer = pacer
    later._sleep()
    assert slept == ([] if slept_ns is None else [pytest.approx(slept_ns / NS_PER_S)])


@pytest.mark.parametrize("kernel", [False, True])
async def test_a_stall_is_told_before_its_probe_has_come(kernel: bool) -> None:
    probes: list[int] = []
    lateness = Lateness(asyncio.get_running_loop(), kernel=kernel, each=probes.append)
    floor_ns = KERNEL_FLOOR_NS if kernel else GRAIN_NS
    before_ns = SystemClock.mono_ns()
    assert lateness.worst_since(before_ns) >= floor_ns
    time.sleep(0.08)  # noqa: ASYNC251 (which is what is to be seen)
    held_ns = 80 * MS - PROBE_NS - GRAIN_NS
    assert lateness.worst_since(before_ns) >= held_ns
    await wait_until(lambda: probes)
    assert lateness.worst_since(before_ns) >= held_ns, "and of all that was under way then, ever after"
    assert lateness.meter.take_max() >= held_ns
    lateness.close()


async def test_a_byte_waits_no_longer_than_since_the_probe_before_the_last() -> None:
    lateness = Lateness(asyncio.get_running_loop(), kernel=True)
    lateness.close()
    now_ns = SystemClock.mono_ns()
    lateness._due_ns = NEVER
    lateness._probe_times_ns.extend(now_ns + ms * MS for ms in (1, 3, 50))
    assert lateness.longest_wait(now_ns, now_ns + 52 * MS) == KERNEL_FLOOR_NS + PROBE_NS + GRAIN_NS
    lateness.meter.note(now_ns + 50 * MS, 45 * MS)
    assert lateness.longest_wait(now_ns, now_ns + 49 * MS) == 48 * MS
    assert lateness.longest_wait(now_ns, now_ns + 60 * MS) == 45 * MS + PROBE_NS + GRAIN_NS
    assert lateness.longest_wait(now_ns, now_ns + 2 * MS) == 2 * MS, "one probe says nothing"
    assert lateness.error_since(now_ns) == KERNEL_FLOOR_NS, "a stall does not move the kernel's timestamps"


async def test_whoever_wants_it_is_called_at_each_probe_until_it_is_closed() -> None:
    seen: list[int] = []
    lateness = Lateness(asyncio.get_running_loop(), kernel=True, each=seen.append)
    await wait_until(lambda: len(seen) >= 3)
    lateness.close()
    n = len(seen)
    await asyncio.sleep(0.03)
    assert len(seen) == n

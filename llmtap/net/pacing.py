"""Precise timers for sending at planned times: one heap, and one kernel timer for all callbacks of a `Pacer`.

The load generator uses it to wait for the time of each request, the simulated server for that of each token.
The event loop's own timers have a resolution of 1 ms, so the kernel's `timerfd_create(2)` (Linux) is used.
A `Pacer` calls a `Waker` at the earliest requested time, never before it. A requested time is never
cancelled, so a callback can find that it has nothing to do; it returns the time of its next call.
"""

import asyncio
import ctypes
import heapq
import os
from collections.abc import Callable
from itertools import count
from typing import Final

from llmtap.clock import Clock
from llmtap.units import NEVER, NS_PER_S

TURN_NS_MAX: Final = 2_000_000
"""Maximum duration of a turn, in which due callbacks are called. After it, the event loop reads its sockets.
"""
PAUSE_NS: Final = 200_000
"""Minimum time between two turns, so that callbacks share system calls under load; 0: best precision."""


class Pacer:
    """Calls each Waker when it is due, until `close()`."""

    def __init__(self, clock: Clock, *, pause_ns: int = PAUSE_NS) -> None:
        self._mono_ns = clock.mono_ns
        self._pause_ns = pause_ns
        """Smallest time between two turns, to save CPU time."""
        self._heap: list[tuple[int, int, Waker]] = []  # (due time, order, waker)
        """Due times and wakers, the earliest first."""
        self._order = count()  # decides between wakers with the same due time
        self._alarm: _Alarm | None = None
        self._armed_ns = 0
        """Time for which the alarm is set; 0: it is not set."""
        self._is_in_turn = False
        """Whether callbacks are running. Then the alarm is set only at the end of the turn."""
        self._closed = False

    async def wait_until(self, due_ns: int) -> None:
        """Wait until the monotonic time `due_ns`; never returns early."""
        done = asyncio.get_running_loop().create_future()

        def act(now_ns: int) -> int:
            if not done.done():
                done.set_result(None)
            return NEVER

        Waker(self, act).call_at(due_ns)
        await done

    @property
    def next_ns(self) -> int:
        """Time of the next callback, or `NEVER`."""
        return self._armed_ns or NEVER

    def catch_up(self) -> None:
        """Call the due wakers now; for a caller that does long work without returning to the event loop."""
        if 0 < self._armed_ns <= self._mono_ns() and not self._is_in_turn:
            self._run_turn()

    def close(self) -> None:
        """Stop: call no waker any more."""
        self._closed = True
        self._heap.clear()
        if self._alarm is not None:
            self._alarm.close()
            self._alarm = None

    def add(self, due_ns: int, waker: "Waker") -> None:
        """Schedule a call of `waker`; called by Waker only."""
        if self._closed:
            return
        heapq.heappush(self._heap, (due_ns, next(self._order), waker))
        if not self._is_in_turn and (not self._armed_ns or due_ns < self._armed_ns):
            self._set_timer(due_ns)

    def _set_timer(self, at_ns: int) -> None:
        """Set the kernel's timer to a time; the first call creates the timer."""
        if self._alarm is None:
            self._alarm = _Alarm(self._run_turn)
        self._armed_ns = at_ns
        self._alarm.set_time(at_ns)

    def _run_turn(self) -> None:
        self._armed_ns = 0
        heap = self._heap
        self._is_in_turn = True
        try:
            now_ns = self._call_due()
        finally:
            self._is_in_turn = False
        if heap:
            # Callbacks that are due now run after the event loop has read its sockets. Later ones run at
            # their time, but not before the pause has passed.
            self._set_timer(now_ns if heap[0][0] <= now_ns else max(heap[0][0], now_ns + self._pause_ns))

    def _call_due(self) -> int:
        """Call due wakers for at most TURN_NS_MAX. Return the time at the end."""
        heap, mono_ns = self._heap, self._mono_ns
        now_ns = mono_ns()
        end_ns = now_ns + TURN_NS_MAX
        while heap and heap[0][0] <= now_ns <= end_ns:
            _, order, waker = heapq.heappop(heap)
            waiting_ns = waker.waiting_ns
            waiting_ns.pop()
            next_ns = waker.act(now_ns)
            if next_ns < NEVER and (not waiting_ns or next_ns < waiting_ns[-1]):
                waiting_ns.append(next_ns)
                heapq.heappush(heap, (next_ns, order, waker))
            now_ns = mono_ns()
        return now_ns


class Waker:
    """Reschedulable callback for `Pacer`. After it was rescheduled to a later time, it is also called at the
    earlier time.

    `waiting_ns`: times of its requests to the pacer, which are never cancelled; the earliest is last.
    """

    __slots__ = ("_pacer", "act", "waiting_ns")

    def __init__(self, pacer: Pacer, act: Callable[[int], int]) -> None:
        """`act` is called with the time, and returns the time of its next call, or `NEVER`."""
        self._pacer = pacer
        self.act = act
        """Function that is called when the waker is due."""
        self.waiting_ns: list[int] = []

    def call_at(self, due_ns: int) -> None:
        """Call `act` at `due_ns`, or as soon as possible afterwards."""
        waiting_ns = self.waiting_ns
        if due_ns < NEVER and (not waiting_ns or due_ns < waiting_ns[-1]):
            waiting_ns.append(due_ns)
            self._pacer.add(due_ns, self)

    def close(self) -> None:
        """Do not call `act` any more, and break the reference cycle."""
        self.act = _do_nothing


def _do_nothing(now_ns: int) -> int:
    return NEVER


class _Alarm:
    """Kernel timer that calls `on_alarm` at a time of CLOCK_MONOTONIC, never before it."""

    def __init__(self, on_alarm: Callable[[], None]) -> None:
        self._on_alarm = on_alarm
        self._loop = asyncio.get_running_loop()
        self._fd = _libc.timerfd_create(_CLOCK_MONOTONIC, os.O_NONBLOCK | os.O_CLOEXEC)
        if self._fd < 0:
            number = ctypes.get_errno()
            raise OSError(
                number, f"cannot create a timer (timerfd_create): {os.strerror(number)}; check `ulimit -n`"
            )
        self._loop.add_reader(self._fd, self._on_timer)

    def set_time(self, at_ns: int) -> None:
        """Set the time of the call, which replaces the previous one."""
        # (interval in s, ns; value in s, ns). A value of 0 would switch the timer off, so use at least 1 ns.
        spec = _Timespecs(0, 0, *divmod(max(1, at_ns), NS_PER_S))
        _libc.timerfd_settime(self._fd, _TFD_TIMER_ABSTIME, spec, None)

    def close(self) -> None:
        self._loop.remove_reader(self._fd)
        os.close(self._fd)

    def _on_timer(self) -> None:
        try:
            os.read(self._fd, 8)
        except BlockingIOError:
            return  # the timer was set to a later time after it had expired
        self._on_alarm()


# From Python 3.13 on, os.timerfd_create and os.timerfd_settime_ns replace these calls of the C library.
_libc: Final = ctypes.CDLL(None, use_errno=True)
_Timespecs: Final = ctypes.c_long * 4
_CLOCK_MONOTONIC: Final = 1
_TFD_TIMER_ABSTIME: Final = 1

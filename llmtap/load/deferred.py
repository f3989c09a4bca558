"""What a sender does between two looks at its sockets: send what is due, then understand what it has seen.

Where many answers end at one moment, the next requests are due at that moment, too, and their first tokens
come soon after. Whoever counted each answer as it ended would read those late; so requests are sent and
sockets read first, and what can wait is done in slices when there is time.

A kernel's stamp does not age, so reading need not be prompt either. Waking up for each token costs more than
reading it; with many streams the loop sleeps for a moment, and reads together what has come.
"""

import asyncio
import time
from collections import deque
from collections.abc import Callable
from typing import Final

from llmtap.clock import SystemClock
from llmtap.net.pacing import Pacer
from llmtap.units import NS_PER_S

__all__ = ["Later"]

SLICE_NS: Final = 200_000
"""After so long the loop looks at its sockets again; a piece of work takes some 100 us."""
WAITING_MAX: Final = 8_192
"""Pieces kept waiting, some 10 KB each where an exchange hangs on it; what is more is done at once."""
GATHER_NS: Final = 1_000_000
"""The longest sleep."""
WAKING_NS: Final = 100_000
"""A sleep may end so late; an alarm does not."""
BEHIND_NS: Final = 2 * GATHER_NS
"""What is read so late has not only slept."""
READS_MIN: Final = 2_000
"""A second: with fewer, a sleep is one more wake-up and gathers nothing."""
READS_OF_STREAM_MAX: Final = 100
"""A second: pieces of one stream that come closer than ten sleeps would be read, and stamped, together."""

mono_ns = SystemClock.mono_ns


class Later:
    """Of one loop. Pieces of work are done in the order in which they came, urgent ones before others."""

    def __init__(self, loop: asyncio.AbstractEventLoop, *, gathers: bool = False) -> None:
        """`gathers`: who reads late reads right, because the kernel stamps."""
        self._loop = loop
        self._may_gather = gathers
        self._gathers = False
        self._reads = 0
        self._judged_ns = mono_ns()
        self._urgent: deque[Callable[[], None]] = deque()
        self._waiting: deque[Callable[[], None]] = deque()
        self._called = False
        self._behind = False
        """What was read had come a while before: there is more to read."""
        self.pacer: Pacer | None = None
        """Of the run: whoever is due to be sent to waits neither for a slice's end nor for a sleep's."""

    def add(self, work: Callable[[], None], *, urgent: bool = False) -> None:
        """Do it soon, or at once where too much waits already."""
        if urgent:
            self._urgent.append(work)
        else:
            self._waiting.append(work)
            if len(self._waiting) > WAITING_MAX:
                self._waiting.popleft()()
        self._call()

    def is_behind(self, t_ns: int) -> bool:
        """Whether what is read now, and came at `t_ns`, is to be understood later: there is more to read."""
        self._reads += 1
        if mono_ns() - t_ns > BEHIND_NS:
            self._behind = True
        return self._behind

    def after_read(self) -> None:
        """A socket was read: others may have something, too, and somebody may be due."""
        if self._gathers and not self._called:
            self._call()
        if self.pacer is not None:
            self.pacer.catch_up()

    def judge(self, streams: int) -> None:
        """Decide whether it pays to gather, from what was read since this was asked last."""
        now_ns = mono_ns()
        rate = self._reads * NS_PER_S / max(1, now_ns - self._judged_ns)
        self._reads, self._judged_ns = 0, now_ns
        self._gathers = self._may_gather and READS_MIN <= rate <= READS_OF_STREAM_MAX * streams

    def finish(self) -> None:
        """Do all that waits now."""
        urgent, waiting = self._urgent, self._waiting
        while urgent or waiting:
            (urgent or waiting).popleft()()

    def _call(self) -> None:
        if not self._called:
            self._called = True
            self._loop.call_soon(self._turn)

    def _turn(self) -> None:
        self._called = False
        if self._urgent or self._waiting:
            if self._behind:
                self._behind = False
                self._call()
            else:
                self._work()
        elif self._gathers:
            self._sleep()

    def _work(self) -> None:
        urgent, waiting, pacer = self._urgent, self._waiting, self.pacer
        end_ns = mono_ns() + SLICE_NS
        while urgent or waiting:
            (urgent or waiting).popleft()()
            if pacer is not None:
                pacer.catch_up()
            if mono_ns() >= end_ns:
                break
        if urgent or waiting:
            self._call()  # the loop polls before it comes back to us

    def _sleep(self) -> None:
        wait_ns = GATHER_NS
        if self.pacer is not None:
            wait_ns = min(wait_ns, self.pacer.next_ns - mono_ns() - WAKING_NS)
        if wait_ns > 0:
            time.sleep(wait_ns / NS_PER_S)  # the loop has nothing to do that could not wait so long

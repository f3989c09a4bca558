"""What a run needs of whoever sends for it: `sender.py` over HTTP, `asking.py` over anything else."""

import asyncio
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from typing import Final, Protocol

from llmtap.clock import SystemClock
from llmtap.exchange.exchange import Exchange
from llmtap.net.lag import make_lag_meter
from llmtap.net.pacing import Pacer
from llmtap.net.stream import Timebase
from llmtap.units import NS_PER_S

__all__ = ["Done", "Lateness", "Later", "OnAnswer", "Sending", "Underway"]


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


PROBE_NS: Final = 10_000_000
GRAIN_NS: Final = 1_100_000
"""The loop's timers have a grain of 1 ms: only what exceeds it is known to be lateness."""
KERNEL_FLOOR_NS: Final = 50_000
"""How well the kernel's clock is mapped to ours, and to spare."""
CHECKS: Final = 5
"""Probes between two looks at the wall clock: each 50 ms."""


class Lateness:
    """Of one loop, from now to `close`."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, *, kernel: bool, each: Callable[[int], None] | None = None
    ) -> None:
        """`kernel`: its connections carry the kernel's stamps. `each` is called with the time at each probe,
        every 10 ms."""
        self._loop = loop
        self._kernel = kernel
        self._each = each
        blind_ns = PROBE_NS + GRAIN_NS
        self.meter = (
            make_lag_meter(KERNEL_FLOOR_NS, blind_ns=blind_ns, blind_from_ns=blind_ns)
            if kernel
            else make_lag_meter(GRAIN_NS, blind_ns=blind_ns, turns=2)
        )
        self.timebase = Timebase(SystemClock(), self.meter)
        self._count = 0
        self._start()

    def worst_since(self, t_ns: int) -> int:
        """The longest that a byte may have waited unread since then."""
        now_ns = mono_ns()
        # The loop reads its sockets before it looks at its timers: after a stall the probe is still to come.
        late_ns = now_ns - self._due_ns - GRAIN_NS
        if late_ns > 0:
            self.meter.note(now_ns, late_ns)
        return self.meter.worst_since(t_ns)

    def close(self) -> None:
        self._timer.cancel()

    def _start(self) -> None:
        self._due_ns = mono_ns() + PROBE_NS
        self._timer = self._loop.call_later(PROBE_NS / 1e9, self._probe)

    def _probe(self) -> None:
        now_ns = mono_ns()
        late_ns = now_ns - self._due_ns
        if not self._kernel or late_ns > GRAIN_NS:
            self.meter.note(now_ns, max(0, late_ns - GRAIN_NS))
        self._count += 1
        if self._count % CHECKS == 0:
            self.timebase.resample()
        if self._each is not None:
            self._each(now_ns)
        self._start()


class Underway(Protocol):
    """A request on its way."""

    row: int

    def cancel(self, why: str) -> None:
        """We want no more of it; its Exchange comes, now or in a moment."""
        ...


Done = Callable[[Underway, Exchange], None]
OnAnswer = Callable[[Underway, int], None]


class _Calls(Protocol):
    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[Underway]: ...


class Sending(Protocol):
    """Sends to one target from one loop."""

    loop: asyncio.AbstractEventLoop
    sent: int
    """Requests begun."""
    retries: Counter[str]
    lateness: Lateness
    later: Later
    """Where work is put that can wait, and who sees to it that no request does."""

    @property
    def calls(self) -> _Calls:
        """Those under way."""
        ...

    @property
    def connects(self) -> int: ...

    @property
    def reuses(self) -> int: ...

    def send(
        self,
        body: bytes,
        done: Done,
        *,
        row: int = 0,
        scheduled_ns: int | None = None,
        headers: Sequence[tuple[bytes, bytes]] = (),
        on_answer: OnAnswer | None = None,
    ) -> Underway:
        """Begin a request now.

        `done` is called with its Exchange, once, and never before this returns. `on_answer` may be called
        before, with the time (mono), when all of an answer is there and nobody has read what it says.
        """
        ...

    async def open(self, connections: int) -> int:
        """Open so many connections beforehand; how many there are now."""
        ...

    def stop_retrying(self) -> None: ...

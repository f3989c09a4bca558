"""Requests onto the wire, each when it is told to: connections, options, and what calls share.

Stamps are the kernel's where it gives them, so our own queueing stays out of the answer's times; how late we
were is told as `uncertainty_ns` and as `dispatch_late_ns`. Nothing waits for anything here: who decides when
to send is `load/run.py`. A single request is `load/call.py`.

Source: IETF seed 000, B.1.1 (T_submit: the last byte of the request is with the kernel).
"""

import asyncio
import ssl
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Final

import msgspec

from llmtap.clock import SystemClock
from llmtap.exchange.exchange import Exchange
from llmtap.load.deferred import Later
from llmtap.load.http.call import Call
from llmtap.load.lateness import Lateness
from llmtap.load.target import LoadTarget
from llmtap.net.pool import Pool
from llmtap.net.stream import Stream, keep_stamps_on
from llmtap.units import NS_PER_S, Duration

__all__ = ["Call", "LoadSender", "SenderOptions"]

SWEEP_S: Final = 0.05
"""How often time-outs are looked for, and streams that fell silent; with thousands under way, less often."""
LOOKS_MAX: Final = 128
"""Calls looked at in one go: together some 50 us, in which nothing is sent."""
OPENED_AT_ONCE: Final = 128
"""Connections asked for at a time before a run: the queue of a listener has room for so many."""

mono_ns = SystemClock.mono_ns


class SenderOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How requests are sent."""

    name: str = "load"
    """Of the sender in its exchanges' ids."""
    clock: str = "kernel"
    """`kernel` or `mono`: who stamps what is read."""
    fresh: bool = False
    """A connection of its own for each request; else they are kept and used again."""
    connect_timeout: Duration = Duration(10 * NS_PER_S)
    timeout: Duration = Duration(600 * NS_PER_S)
    """From dispatch to the last byte; of each attempt."""
    retries: int = 0
    """How often a request is sent again that came to nothing (`load/retries.py`)."""
    retry_wait: Duration = Duration(30 * NS_PER_S)
    """The longest wait before that; a server that asks for a longer one is not asked again."""
    model: str | None = None
    """The model that every body names, where that is known, with `stream`: bodies are then not read again to
    find out, which takes 0.5 ms a MB."""
    stream: bool = True
    texts: bool = False
    """Keep what the answers say, in `Exchange.said`."""


class LoadSender:
    """Sends to one target from one loop. `close` when done."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        target: LoadTarget,
        options: SenderOptions,
        *,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self.loop = loop
        self.target = target
        self.options = options
        kernel = options.clock == "kernel" and tls is None
        self.clock = "kernel" if kernel else "mono"
        self._unseen: list[Call] = []
        self.lateness = Lateness(loop, kernel=kernel, each=self._look)
        self.timebase = self.lateness.timebase
        self.pool = Pool(
            loop, target.origin, self.timebase, clock=self.clock,
            idle_max=0 if options.fresh else 1 << 20, idle_ns=60 * NS_PER_S,
            connect_ns=options.connect_timeout, tls=tls, server_name=None,
        )  # fmt: skip
        self.later = Later(loop, gathers=kernel)
        """What need not be done between two requests."""
        self.calls: dict[Call, None] = {}
        """Under way, in the order of their dispatch."""
        self.sent = 0
        """Requests begun; a retry is no other request."""
        self.retries: Counter[str] = Counter()
        """Sent again, by reason: `refused`, `closed`, `429`, `503`."""
        self.retrying = True
        self.told = b""
        """What stands for each body where the observer would read it; empty: it reads the body."""
        if options.model is not None:
            self.told = msgspec.json.encode({"model": options.model, "stream": options.stream})
        self._stamped = keep_stamps_on() if kernel else None
        self._timer = loop.call_later(SWEEP_S, self._sweep)

    def send(
        self,
        body: bytes,
        done: "Callable[[Call, Exchange], None]",
        *,
        row: int = 0,
        scheduled_ns: int | None = None,
        headers: Sequence[tuple[bytes, bytes]] = (),
        on_answer: "Callable[[Call, int], None] | None" = None,
    ) -> "Call":
        """Begin a request now. See `Sending.send`."""
        self.sent += 1
        call = Call(self, self.sent, row, scheduled_ns, done, on_answer)
        self.calls[call] = None
        call.start(self.target.head(len(body), headers, close=self.options.fresh) + body)
        return call

    async def open(self, connections: int) -> int:
        """Open so many connections beforehand; how many there are now."""
        left = connections - self.pool.idle
        while left > 0:
            waiting = [_Opening(self) for _ in range(min(left, OPENED_AT_ONCE))]
            left -= len(waiting)
            for opening in waiting:
                self.pool.connect(opening)
            for opening in waiting:
                await opening.settled
        return self.pool.idle

    @property
    def connects(self) -> int:
        """Connections that were opened."""
        return self.pool.connects

    @property
    def reuses(self) -> int:
        """Requests on one that had served another before."""
        return self.pool.reuses

    def stop_retrying(self) -> None:
        """Nothing is sent again from now on; what waits for it ends as its last attempt did."""
        self.retrying = False
        for call in [call for call in self.calls if call.waiting]:
            call.cancel("")

    def close(self) -> None:
        """Cut what is under way, each with its Exchange, and give all connections back."""
        for call in list(self.calls):
            call.cancel("the run was over")
        self.later.finish()
        self._timer.cancel()
        self.lateness.close()
        self.pool.close()
        if self._stamped is not None:
            self._stamped.close()

    # ---------------------------------------------------------------- time-outs

    def _look(self, now_ns: int) -> None:
        """Looks for time-outs and silent streams among some of those that the last sweep found."""
        unseen, timeout_ns = self._unseen, self.options.timeout
        for _ in range(min(LOOKS_MAX, len(unseen))):
            call = unseen.pop()
            if call.waiting or call.over:
                continue
            if now_ns - call.began_ns > timeout_ns:
                call.time_out()
            else:
                call.look_again(now_ns)

    def _sweep(self) -> None:
        now_ns = mono_ns()
        self._timer = self.loop.call_later(SWEEP_S, self._sweep)
        self.pool.sweep(now_ns)
        self.later.judge(len(self.calls))
        oldest = next(iter(self.calls), None)
        self.lateness.meter.forget_before(now_ns if oldest is None else oldest.first_ns)
        if not self._unseen:
            self._unseen = list(self.calls)


class _Opening:
    """Waits for one connection and leaves it in the pool."""

    def __init__(self, sender: LoadSender) -> None:
        self._pool = sender.pool
        self.settled: asyncio.Future[None] = sender.loop.create_future()

    def on_connected(self, stream: Stream, took_ns: int) -> None:
        self._pool.give_back(stream, mono_ns(), used=False)
        self._settle()

    def on_connect_failed(self, error: OSError) -> None:
        self._settle()  # each request will find out for itself, and say so

    def on_data(self, data: bytes, t_ns: int) -> None:
        """Not ours any more by then."""

    def on_eof(self) -> None:
        """As above."""

    def on_lost(self, error: OSError | None) -> None:
        """As above."""

    def on_drained(self) -> None:
        """As above."""

    def _settle(self) -> None:
        if not self.settled.done():
            self.settled.set_result(None)

"""One request after another onto the wire, each when it is told to, and each observed as the tap observes.

A Call is one request: it takes a connection, writes, and feeds what comes back to the same Observer that the
meter has, so that a request we send becomes the same Exchange as one that passes the tap. Stamps are the
kernel's where it gives them, so our own queueing stays out of the answer's times; how late we were is told as
`uncertainty_ns` and as `dispatch_late_ns`.

Nothing waits for anything here: who decides when to send is `load/run.py`.

Source: IETF seed 000, B.1.1 (T_submit: the last byte of the request is with the kernel).
"""

import asyncio
import ssl
from collections.abc import Callable, Sequence
from typing import Final

import msgspec

from llmtap.clock import SystemClock
from llmtap.errors import PeerProtocolError
from llmtap.load.target import Target
from llmtap.net.lag import LagMeter
from llmtap.net.pool import Attempt, Pool
from llmtap.net.stream import READ_BYTES_MAX, Stream, Timebase
from llmtap.record.exchange import Exchange
from llmtap.record.observer import Observer
from llmtap.record.outcome import Outcome
from llmtap.units import NS_PER_S, Duration
from llmtap.wire.http1 import (
    BodyScanner,
    CloseScanner,
    Framing,
    parse_response_head,
    scanner_for,
)

__all__ = ["Call", "Sender", "SenderOptions"]

SWEEP_S: Final = 0.05
"""How often time-outs are looked for, and streams that fell silent."""
PROBE_S: Final = 0.01
PROBE_GRAIN_NS: Final = 1_100_000
"""The loop's timers have a grain of 1 ms: only what exceeds it is known to be lateness."""
KERNEL_FLOOR_NS: Final = 50_000
HEAD_BYTES_MAX: Final = 1 << 18
QUIET_NS: Final = 200_000_000
"""After this long without a byte a stream is asked whether the loop has stopped watching it."""

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
    """From dispatch to the last byte."""


class Sender:
    """Sends to one target from one loop. `close` when done."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        target: Target,
        options: SenderOptions,
        *,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self.loop = loop
        self.target = target
        self.options = options
        kernel = options.clock == "kernel" and tls is None
        self.clock = "kernel" if kernel else "mono"
        probe_ns = int(PROBE_S * 1e9) + PROBE_GRAIN_NS
        self.lag = (
            LagMeter(KERNEL_FLOOR_NS, blind_ns=probe_ns, blind_from_ns=probe_ns)
            if kernel
            else LagMeter(PROBE_GRAIN_NS, blind_ns=probe_ns)
        )
        self.timebase = Timebase(SystemClock(), self.lag)
        self.pool = Pool(
            loop, target.origin, self.timebase, clock=self.clock,
            idle_max=0 if options.fresh else 1 << 20, idle_ns=60 * NS_PER_S,
            connect_ns=options.connect_timeout, tls=tls, server_name=None,
        )  # fmt: skip
        self.calls: dict[Call, None] = {}
        """Under way, in the order of their dispatch."""
        self.sent = 0
        self._timer: asyncio.TimerHandle | None = loop.call_later(SWEEP_S, self._sweep)
        self._probe: asyncio.TimerHandle | None = None
        self._probe_due_ns = 0
        self._start_probe()

    def send(
        self,
        body: bytes,
        done: "Callable[[Call, Exchange], None]",
        *,
        row: int = 0,
        scheduled_ns: int | None = None,
        headers: Sequence[tuple[bytes, bytes]] = (),
    ) -> "Call":
        """Begin a request now. `done` is called with its Exchange, once, and never before this returns."""
        self.sent += 1
        call = Call(self, self.sent, row, scheduled_ns, done)
        self.calls[call] = None
        call.start(self.target.head(len(body), headers, close=self.options.fresh) + body)
        return call

    async def open(self, connections: int) -> int:
        """Open so many connections beforehand; how many there are now."""
        waiting = [_Opening(self) for _ in range(connections - self.pool.idle)]
        for opening in waiting:
            self.pool.connect(opening)
        for opening in waiting:
            await opening.settled
        return self.pool.idle

    def close(self) -> None:
        """Cut what is under way, each with its Exchange, and give all connections back."""
        for call in list(self.calls):
            call.cancel("the run was over")
        for timer in (self._timer, self._probe):
            if timer is not None:
                timer.cancel()
        self.pool.close()

    # ---------------------------------------------------------------- our own lateness, and time-outs

    def _start_probe(self) -> None:
        self._probe_due_ns = mono_ns() + int(PROBE_S * 1e9)
        self._probe = self.loop.call_later(PROBE_S, self._on_probe)

    def _on_probe(self) -> None:
        now_ns = mono_ns()
        late_ns = now_ns - self._probe_due_ns
        if self.clock == "mono" or late_ns > PROBE_GRAIN_NS:
            self.lag.note(now_ns, max(0, late_ns - PROBE_GRAIN_NS))
        self._start_probe()

    def _sweep(self) -> None:
        now_ns = mono_ns()
        self._timer = self.loop.call_later(SWEEP_S, self._sweep)
        self.pool.sweep(now_ns)
        self.timebase.resample()
        oldest_ns = now_ns
        for call in list(self.calls):
            oldest_ns = min(oldest_ns, call.began_ns)
            if now_ns - call.began_ns > self.options.timeout:
                call.time_out()
            elif now_ns - call.last_ns > QUIET_NS:
                call.look_again()
        self.lag.forget_before(oldest_ns)


class Call:
    """One request on its way: the handler of its connection, and the waiter for one."""

    __slots__ = (
        "_answer_began", "_attempt", "_done", "_head_part", "_held", "_keep", "_observer", "_pending_bytes",
        "_scanner", "_sender", "_seq", "_status", "_stream", "began_ns", "connect_ns", "last_ns", "over",
        "request_bytes", "response_bytes", "row", "scheduled_ns",
    )  # fmt: skip

    def __init__(
        self,
        sender: Sender,
        seq: int,
        row: int,
        scheduled_ns: int | None,
        done: "Callable[[Call, Exchange], None]",
    ) -> None:
        self._sender = sender
        self._seq = seq
        self._done = done
        self._observer: Observer | None = None
        self._stream: Stream | None = None
        self._attempt: Attempt | None = None
        self._scanner: BodyScanner | None = None
        self._held = b""
        self._head_part = b""
        self._answer_began = False
        self._keep = False
        self._status: int | None = None
        self._pending_bytes = 0
        self.row = row
        self.scheduled_ns = scheduled_ns
        self.began_ns = 0
        """Dispatch: we began to connect, or to write."""
        self.connect_ns: int | None = None
        """How long a fresh connection took."""
        self.last_ns = 0
        self.request_bytes = 0
        self.response_bytes = 0
        self.over = False

    def start(self, request: bytes) -> None:
        """Write the request, or connect first. The write comes before anything else that takes time."""
        sender = self._sender
        now_ns = mono_ns()
        self.began_ns = self.last_ns = now_ns
        self.request_bytes = len(request)
        stream = sender.pool.take(self, now_ns)
        if stream is None:
            self._observe(request)
            self._held = request
            self._attempt = sender.pool.connect(self)
            if self._stream is not None or self.over:
                self._attempt = None
            return
        self._stream = stream
        try:
            taken = stream.write(request)
        except OSError as exc:
            self._observe(request)
            self._later(Outcome.UPSTREAM_RESET, f"a kept connection broke as we wrote ({type(exc).__name__})")
            return
        submit_ns = mono_ns()
        observer = self._observe(request)
        if taken:
            observer.submitted(submit_ns, submit_ns - now_ns)

    def _observe(self, request: bytes) -> Observer:
        sender, now_ns = self._sender, self.began_ns
        end = request.index(b"\r\n\r\n") + 4
        observer = self._observer = Observer(
            sender.options.name, self._seq, now_ns, sender.timebase.anchor.to_wall_ns(now_ns), request[:end],
            sender.clock,
        )  # fmt: skip
        observer.request_data(request[end:], now_ns)
        observer.request_end(now_ns)
        return observer

    def _submitted(self) -> None:
        t_ns = mono_ns()
        self.last_ns = t_ns
        assert self._observer is not None
        self._observer.submitted(t_ns, t_ns - self.began_ns)

    # The waiter.

    def on_connected(self, stream: Stream, took_ns: int) -> None:
        self._attempt = None
        if self.over:
            stream.close()
            return
        self._stream = stream
        self.connect_ns = took_ns
        request, self._held = self._held, b""
        try:
            if stream.write(request):
                self._submitted()
        except OSError as exc:
            self._later(Outcome.UPSTREAM_RESET, f"the connection broke as we wrote ({type(exc).__name__})")

    def on_connect_failed(self, error: OSError) -> None:
        self._attempt = None
        if isinstance(error, TimeoutError):
            self._later(Outcome.UPSTREAM_TIMEOUT, "no connection in time")
        else:
            self._later(Outcome.UPSTREAM_ERROR, f"cannot connect ({error.strerror or type(error).__name__})")

    # The handler.

    def on_data(self, data: bytes, t_ns: int) -> None:
        self.last_ns = t_ns
        self.response_bytes += len(data)
        scanner = self._scanner
        if scanner is None:
            self._on_head_data(data, t_ns)
            return
        try:
            end = scanner.feed(data)
        except PeerProtocolError as exc:
            self._broke(exc)
            return
        if end < 0:
            self._observer.response_data(data, t_ns, 0)  # type: ignore[union-attr]
            return
        if end < len(data):
            self._keep = False  # it said more than it announced
        self._complete(data[:end], t_ns, len(data))

    def _on_head_data(self, data: bytes, t_ns: int) -> None:
        read_bytes = len(data)
        observer = self._observer
        assert observer is not None
        self._answer_began = True
        data = self._head_part + data
        while True:
            end = data.find(b"\r\n\r\n") + 4
            if end < 4:
                if len(data) > HEAD_BYTES_MAX or not data.startswith(b"HTTP/1."[: len(data)]):
                    self._broke(PeerProtocolError("the answer's head is malformed or too long", 502))
                else:
                    self._head_part = data
                return
            raw, data = data[:end], data[end:]
            try:
                head = parse_response_head(raw, b"POST")
                if head.status == 101:
                    raise PeerProtocolError("the server switched protocols unasked", 502)
            except PeerProtocolError as exc:
                self._broke(exc)
                return
            observer.response_head(raw, t_ns, 0)
            if head.status >= 200:
                break
            if not data:
                self._head_part = b""
                return
        self._head_part = b""
        self._status = head.status
        self._keep = head.keep_alive and not self._sender.options.fresh
        if head.framing is Framing.NONE:
            self._complete(b"", t_ns, read_bytes)
            return
        self._scanner = scanner_for(head.framing, head.length)
        if not data:
            return
        try:
            at = self._scanner.feed(data)
        except PeerProtocolError as exc:
            self._broke(exc)
            return
        if at < 0:
            observer.response_data(data, t_ns, 0)
            return
        if at < len(data):
            self._keep = False
        self._complete(data[:at], t_ns, read_bytes)

    def _complete(self, data: bytes, t_ns: int, read_bytes: int) -> None:
        """The answer ends with `data`; the connection is free before anybody looks at numbers."""
        stream, self._stream = self._stream, None
        assert stream is not None and self._observer is not None
        if self._keep and not stream.pending:
            self._sender.pool.give_back(stream, t_ns, emptied=read_bytes < READ_BYTES_MAX)
        else:
            stream.close()
        if data:
            self._observer.response_data(data, t_ns, 0)
        self._observer.response_end(t_ns)
        self._end(Outcome.COMPLETE, None)

    def on_eof(self) -> None:
        if isinstance(self._scanner, CloseScanner):
            self._complete(b"", mono_ns(), 0)
        else:
            self.on_lost(None)

    def on_lost(self, error: OSError | None) -> None:
        if self.over:
            return
        how = "reset" if error is not None else "closed"
        if self._answer_began:
            outcome = Outcome.UPSTREAM_RESET if error is not None else Outcome.TRUNCATED
            self._end(outcome, f"the server {how} the connection within its answer")
        else:
            self._end(Outcome.UPSTREAM_RESET, f"the server {how} the connection without an answer")

    def on_drained(self) -> None:
        self._submitted()

    # Ends.

    def cancel(self, why: str) -> None:
        """We want no more of it."""
        self._end(Outcome.CLIENT_CANCELLED, why)

    def time_out(self) -> None:
        if self._stream is None:
            self._end(Outcome.UPSTREAM_TIMEOUT, "no connection in time")
        else:
            self._end(Outcome.UPSTREAM_TIMEOUT, "no end of the answer in time")

    def look_again(self) -> None:
        """The loop may have stopped watching a socket that was reset."""
        self.last_ns = mono_ns()
        if self._stream is not None:
            self._stream.look_again()

    def _broke(self, exc: PeerProtocolError) -> None:
        self._end(Outcome.UPSTREAM_ERROR, f"the server broke HTTP: {exc}")

    def _later(self, outcome: Outcome, error: str) -> None:
        """As `_end`, but not from within `send`: who sent does not expect the end yet."""
        self._sender.loop.call_soon(self._end, outcome, error)

    def _end(self, outcome: Outcome, error: str | None) -> None:
        if self.over:
            return
        self.over = True
        sender, observer = self._sender, self._observer
        assert observer is not None
        if self._attempt is not None:
            self._attempt.cancel()
            self._attempt = None
        if self._stream is not None:
            self._stream.abort()
            self._stream = None
        sender.calls.pop(self, None)
        x = observer.finish(
            None, outcome.value, None, error, 0, sender.lag.worst_since(self.began_ns), self.request_bytes,
            self.response_bytes,
        )  # fmt: skip
        x.anchor = sender.timebase.steps
        if self.scheduled_ns is not None:
            x.scheduled_ns = self.scheduled_ns
            x.dispatch_late_ns = self.began_ns - self.scheduled_ns
        self._observer = None
        self._done(self, x)


class _Opening:
    """Waits for one connection and leaves it in the pool."""

    def __init__(self, sender: Sender) -> None:
        self._pool = sender.pool
        self.settled: asyncio.Future[None] = sender.loop.create_future()

    def on_connected(self, stream: Stream, took_ns: int) -> None:
        self._pool.give_back(stream, mono_ns(), emptied=True)
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

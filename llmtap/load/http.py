"""HTTP/1.1 load sender: sends each request at once, reads its answer, and retries if allowed.

`LoadSender.send` takes a complete body. A `Call` makes the attempts of one request and calls back once with
its Exchange. Connections are kept and reused. `run.py` decides when to send; the sender of WebSocket and gRPC
targets is `prompt_sender.py`.

This module is long because `Call` and `LoadSender` share state on the time-critical path. Timestamps are the
kernel's where available; remaining lateness is reported as `uncertainty_ns` and `dispatch_late_ns`.

Source: IETF draft, B.1.1 (T_submit: the kernel has the last byte of the request).
"""

import asyncio
import errno
import os
import ssl
from collections import Counter
from collections.abc import Callable, Sequence
from email.utils import parsedate_to_datetime
from typing import Final

import msgspec

from llmtap.clock import SystemClock
from llmtap.errors import PeerProtocolError
from llmtap.exchange.exchange import Exchange
from llmtap.exchange.observer import Observer
from llmtap.exchange.outcome import Outcome
from llmtap.load.host_limits import connections_max, host_limit
from llmtap.load.options import BodyOptions, SendingOptions
from llmtap.load.sending import ANSWER_BYTES_MAX, TOO_LONG, DeferredWork, Lateness, LoadTarget, token_counter
from llmtap.net.pool import Attempt, Pool
from llmtap.net.stream import Stream, keep_stamps_on
from llmtap.protocol.dialects.registry import BUILT_IN, Dialects
from llmtap.protocol.http1 import (
    BodyScanner,
    CloseScanner,
    header_value,
)
from llmtap.protocol.http1_response import begin_response_body, next_response_head
from llmtap.units import NS_PER_S

SWEEP_S: Final = 0.05
"""Interval of checks for time-outs and silent streams; longer with thousands of calls."""
LOOKS_MAX: Final = 128
"""Maximum number of calls checked without a break. This takes about 50 us, in which nothing is sent."""
EARLY_BYTES_MAX: Final = 64 << 20
"""Maximum number of bytes that all calls of a sender together have read and not yet parsed."""
OPENED_AT_ONCE: Final = 128
"""Connections opened at the same time before a run: more might not fit in the server's listen queue."""


_WITHOUT_MODEL: Final = BodyOptions()


class LoadSender:
    """Sends HTTP requests to one target from one event loop. Close it when done."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        target: LoadTarget,
        options: SendingOptions,
        bodies: BodyOptions = _WITHOUT_MODEL,
        *,
        name: str = "load",
        tls: ssl.SSLContext | None = None,
    ) -> None:
        """`bodies`: if these options name a model, every body has it, and the sender does not parse the
        bodies again to find it. That would take 0.5 ms per MB."""
        self.loop = loop
        self.target = target
        self.options = options
        self.name = name
        self.dialects = Dialects(options.dialects) if options.dialects else BUILT_IN
        kernel = options.clock == "kernel" and tls is None
        self.clock = "kernel" if kernel else "mono"
        self._unchecked_calls: list[Call] = []
        """Calls whose connection is not checked yet in this round of checks."""
        self.lateness = Lateness(loop, kernel=kernel, each=self._check_calls)
        """Lateness of the event loop, which bounds the error of timestamps."""
        self.timebase = self.lateness.timebase
        self.pool = Pool(
            loop,
            target.origin,
            self.timebase,
            clock=self.clock,
            idle_max=0 if options.fresh else 1 << 20,
            idle_ns=60 * NS_PER_S,
            connect_ns=options.connect_timeout,
            tls=tls,
        )
        self.deferred = DeferredWork(loop, gathers=kernel)
        """Parsing of answers, which is delayed while requests are due."""
        self.calls: dict[Call, None] = {}
        """Calls in progress, in dispatch order."""
        self.early_bytes = 0
        """Bytes that were read and not yet parsed."""
        self.sent = 0
        """Number of requests so far, without retries."""
        self.retries: Counter[str] = Counter()
        """Retries by reason: `refused`, `closed`, `429`, `503`."""
        self.retrying = True
        """Whether failed requests are tried again; False near the end of the run."""
        self.observer_body = b""
        """Short body that the observer reads instead of the real one; empty: it reads the real one."""
        if bodies.model is not None:
            self.observer_body = msgspec.json.encode({"model": bodies.model, "stream": bodies.streams})
        self.count_tokens = None if bodies.tokenizer is None else token_counter(bodies.tokenizer)
        self._stamp_socket = keep_stamps_on() if kernel else None
        """Socket that keeps the kernel's timestamps switched on; None: they are not used."""
        self._connections_max = connections_max()
        """Number of connections that the system allows."""
        self._timer = loop.call_later(SWEEP_S, self._sweep)

    def send(
        self,
        body: bytes,
        done: "Callable[[Call, Exchange], None]",
        *,
        row: int = 0,
        scheduled_ns: int | None = None,
        headers: Sequence[tuple[bytes, bytes]] = (),
        path: bytes = b"",
        on_answer: "Callable[[Call, int], None] | None" = None,
    ) -> "Call":
        """Send a request now, to `path` on the target (b"": the target's own path).

        `done` is called once with the Exchange, after this method has returned. `on_answer` may be called
        before `done`, with the monotonic time at which the whole answer had arrived.
        """
        self.sent += 1
        call = Call(self, self.sent, row, scheduled_ns, done, on_answer)
        self.calls[call] = None
        call.start(self.target.head(len(body), headers, close=self.options.fresh, path=path) + body)
        return call

    @property
    def is_full(self) -> bool:
        """Whether one more connection would use a file descriptor that timers or name look-ups need."""
        return len(self.calls) + self.pool.idle > self._connections_max

    async def open(self, connections: int) -> int:
        remaining = min(connections, self._connections_max) - self.pool.idle
        while remaining > 0:
            waiting = [_Opening(self) for _ in range(min(remaining, OPENED_AT_ONCE))]
            remaining -= len(waiting)
            for opening in waiting:
                self.pool.connect(opening)
            for opening in waiting:
                await opening.finished
        return self.pool.idle

    @property
    def connects(self) -> int:
        return self.pool.connects

    @property
    def reuses(self) -> int:
        return self.pool.reuses

    def stop_retrying(self) -> None:
        """Do not retry any more; calls that wait for a retry end with the result of their last attempt."""
        self.retrying = False
        for call in [call for call in self.calls if call.is_waiting]:
            call.cancel("")

    def close(self) -> None:
        for call in list(self.calls):
            call.cancel("the run ended before the answer")
        self.deferred.finish()
        self._timer.cancel()
        self.lateness.close()
        self.pool.close()
        if self._stamp_socket is not None:
            self._stamp_socket.close()

    # ---------------------------------------------------------------- time-outs

    def _check_calls(self, now_ns: int) -> None:
        """Check the next calls of the current sweep for time-outs and silent streams."""
        unseen, timeout_ns = self._unchecked_calls, self.options.timeout
        for _ in range(min(LOOKS_MAX, len(unseen))):
            call = unseen.pop()
            if call.is_waiting or call.over:
                continue
            if now_ns - call.began_ns > timeout_ns:
                call.on_timeout()
            else:
                call.check_socket(now_ns)

    def _sweep(self) -> None:
        """Regularly close idle connections and forget old measurements of lateness."""
        now_ns = mono_ns()
        self._timer = self.loop.call_later(SWEEP_S, self._sweep)
        self.pool.sweep(now_ns)
        self.deferred.judge(len(self.calls))
        oldest = next(iter(self.calls), None)
        self.lateness.meter.forget_before(now_ns if oldest is None else oldest.first_ns)
        if not self._unchecked_calls:
            self._unchecked_calls = list(self.calls)


class _Opening:
    """Connection that is opened before a run and then given to the pool."""

    def __init__(self, sender: LoadSender) -> None:
        self._pool = sender.pool
        self.finished: asyncio.Future[None] = sender.loop.create_future()
        """Done when the connection was opened or has failed."""

    def on_connected(self, stream: Stream, took_ns: int) -> None:
        self._pool.give_back(stream, mono_ns(), used=False)
        self.finished.set_result(None)

    def on_connect_failed(self, error: OSError) -> None:
        self.finished.set_result(None)  # A request will connect again, and report the error.

    def on_data(self, data: bytes, t_ns: int) -> None: ...

    def on_eof(self) -> None: ...

    def on_lost(self, error: OSError | None) -> None: ...

    def on_drained(self) -> None: ...


STATUSES: Final = frozenset({429, 503})
FIRST_NS: Final = 100_000_000
"""Wait before the first retry if the answer has no Retry-After; doubled for each further retry."""
_RETRY_WAIT_MAX_NS: Final = 30 * NS_PER_S
"""Longest wait before a retry; if Retry-After is longer, the request is not retried."""


def wait_ns(retries: int, retry_after: bytes | None = None, date: bytes | None = None) -> int | None:
    """Return the wait before the next retry, or None for no retry.

    `retry_after`, `date`: Retry-After and Date of the answer. A Retry-After that cannot be parsed is ignored.
    """
    retry_after_ns = None if retry_after is None else _retry_after_ns(retry_after.strip(), date)
    if retry_after_ns is None:
        return min(FIRST_NS << min(retries, 32), _RETRY_WAIT_MAX_NS)
    return retry_after_ns if retry_after_ns <= _RETRY_WAIT_MAX_NS else None


def _retry_after_ns(retry_after: bytes, date: bytes | None) -> int | None:
    """Parse the seconds or the date of a Retry-After (RFC 9110 10.2.3); None for a date that has passed."""
    if retry_after.isdigit():
        return int(retry_after[:10]) * NS_PER_S
    until_ns = _date_ns(retry_after)
    if until_ns is None:
        return None
    # Subtract the `Date` of the server if there is one: its clock can differ from the clock of this host.
    now_ns = _date_ns(date or b"") or SystemClock.wall_ns()
    return until_ns - now_ns if until_ns > now_ns else None


def _date_ns(text: bytes) -> int | None:
    """Return the wall-clock time of an HTTP date; None if it is not one."""
    try:
        return round(parsedate_to_datetime(text.decode("ascii")).timestamp()) * NS_PER_S
    except (ValueError, OverflowError):
        return None


HEAD_BYTES_MAX: Final = 1 << 18
"""Maximum size of a response head together with interim ones; servers and proxies send at most 64 KiB."""
HEAD_FIELDS_MAX: Final = HEAD_BYTES_MAX // 4
"""Maximum number of header fields. The shortest field takes 4 bytes, so HEAD_BYTES_MAX is reached first."""
QUIET_NS: Final = 200_000_000
"""A socket is checked after this time without a byte: after a reset, the loop possibly does not watch it."""
QUIET_NS_MAX: Final = 5_000_000_000
"""Maximum of the time that begins at QUIET_NS for each call and doubles with each check."""

mono_ns = SystemClock.mono_ns


class Call:
    """One request with all its attempts. `on_answer` is called when the whole answer has arrived, then `done`
    once with the Exchange."""

    __slots__ = (
        "_accepted",
        "_answer_began",
        "_at_once",
        "_connect_attempt",
        "_head_bytes_left",
        "_incomplete_head",
        "_interims",
        "_keep",
        "_lag_ns",
        "_observer",
        "_on_answer",
        "_on_end",
        "_quiet_ns",
        "_redirect",
        "_request",
        "_rest_of_answer",
        "_retry_plan",
        "_scanner",
        "_sender",
        "_seq",
        "_stamped",
        "_stream",
        "_submit_ns",
        "_submit_width_ns",
        "_surplus",
        "_timer",
        "_unobserved_request",
        "_unparsed_reads",
        "_unsent",
        "_verdict",
        "began_ns",
        "connect_ns",
        "first_ns",
        "last_ns",
        "over",
        "request_bytes",
        "response_bytes",
        "retries",
        "row",
        "scheduled_ns",
    )

    def __init__(
        self,
        sender: "LoadSender",
        seq: int,
        row: int,
        scheduled_ns: int | None,
        done: "Callable[[Call, Exchange], None]",
        on_answer: "Callable[[Call, int], None] | None" = None,
    ) -> None:
        self._sender = sender
        self._on_answer = on_answer
        """Function that is called when the whole answer has arrived, before it is parsed."""
        self._seq = seq
        """Number of the request in its sender."""
        self._on_end = done
        """Function that is called with the finished exchange."""
        self._request = b""
        """Bytes of the whole request if retries are allowed; else empty."""
        self._unsent = b""
        """Request that is written when the connection is open."""
        self._rest_of_answer = b""
        """Bytes of the last read, which are parsed later."""
        self._lag_ns = 0
        """Largest error, in ns, of the timestamp of an event at the end of its read."""
        self._stamped = False
        """Whether the timestamps of the answer are the kernel's."""
        self._verdict: tuple[Outcome, str | None] | None = None
        """Outcome and error of the failed attempt, in case the run ends before the retry."""
        self._retry_plan: tuple[str, int] | None = None
        """Reason of a retry and the wait before it; None: the answer is final."""
        self._timer: asyncio.TimerHandle | None = None
        """Timer of the next attempt; None: no retry waits."""
        self.row = row
        """Row of the plan."""
        self.scheduled_ns = scheduled_ns
        """Planned send time; None in a closed loop."""
        self.first_ns = 0
        """Time at which the first attempt began to connect or to write."""
        self.retries = 0
        self.over = False
        """Whether the request has ended, so that later events are ignored."""
        self._reset_attempt()

    def _reset_attempt(self) -> None:
        """Set the state of a request's attempt to that of one not yet begun."""
        self._retry_plan = self._verdict = None
        self._observer: Observer | None = None
        self._unobserved_request = b""
        self._unparsed_reads: list[tuple[bytes, int, bool]] = []
        """Reads that are not parsed yet: the arguments of `_parse_data`."""
        self._at_once = False
        """Whether the bytes of the read that is being parsed arrived in one TCP segment, as in `Observer`."""
        self._surplus = False
        """Whether more data was read after the piece that is now parsed."""
        self._stream: Stream | None = None
        self._connect_attempt: Attempt | None = None
        self._scanner: BodyScanner | None = None
        self._incomplete_head = b""
        self._head_bytes_left = HEAD_BYTES_MAX
        self._interims = 0
        self._accepted = self._answer_began = False
        self._keep = False
        self._redirect: str | None = None
        """Error text for a redirect; None: no redirect. A redirect is not the answer of a model."""
        self._submit_ns = self._submit_width_ns = 0
        self._quiet_ns = QUIET_NS
        self.began_ns = 0
        """Time at which this attempt began to connect or to write."""
        self.connect_ns: int | None = None
        """Time that this attempt took to connect; None: it uses a kept connection."""
        self.last_ns = 0
        self.request_bytes = 0
        self.response_bytes = 0

    @property
    def has_token(self) -> bool:
        """Whether a token of the answer was read and parsed."""
        return self._observer is not None and self._observer.exchange.timeline.first_token_ns is not None

    def start(self, request: bytes) -> None:
        """Write the request, or connect first. All other work comes after the write."""
        if self._sender.options.retries:
            self._request = request
        self._begin_attempt(request)

    def _begin_attempt(self, request: bytes) -> None:
        """Send the request on a kept connection; if there is none, open one."""
        sender = self._sender
        now_ns = mono_ns()
        self.began_ns = self.last_ns = now_ns
        self.first_ns = self.first_ns or now_ns
        self.request_bytes = len(request)
        while (stream := sender.pool.take(self)) is not None:
            try:
                before_ns = mono_ns()
                if stream.write(request):
                    self._record_submit(before_ns)
            except OSError:
                stream.close()  # Nothing was sent, so do not count an attempt.
                continue
            self._stream = stream
            self._defer_observer(request)
            return
        self._unsent = request
        if sender.is_full:
            sender.loop.call_soon(self.on_connect_failed, OSError(errno.EMFILE, os.strerror(errno.EMFILE)))
        else:
            attempt = sender.pool.connect(self)
            if self._unsent:
                self._connect_attempt = attempt
        self._defer_observer(request)

    def _defer_observer(self, request: bytes) -> None:
        """Create the observer later, when there is time: the next request is possibly due now."""
        self._unobserved_request = request
        self._sender.deferred.add(self._create_observer, urgent=True)

    def _create_observer(self) -> None:
        request, self._unobserved_request = self._unobserved_request, b""
        if not request:
            return
        sender, now_ns = self._sender, self.began_ns
        end = request.index(b"\r\n\r\n") + 4
        observer = self._observer = Observer(
            sender.name,
            self._seq,
            now_ns,
            sender.timebase.anchor.to_wall_ns(now_ns),
            request[:end],
            sender.clock,
            count_tokens=sender.count_tokens,
            on_request=(lambda x, head, body: True) if sender.options.texts else None,
            longest_wait=sender.lateness.longest_wait,
            dialects=sender.dialects,
        )
        observer.request_data(sender.observer_body or request[end:], now_ns)
        observer.request_end(now_ns)
        if self._submit_ns:
            observer.on_submit(self._submit_ns, self._submit_ns - now_ns)
        self._parse_early_data()

    def _record_submit(self, before_ns: int) -> None:
        """Record that the kernel took the last byte between `before_ns` and now.

        Use `before_ns` as the time of submission: a local server can answer before this process runs again,
        and a later time could then be after the answer.
        """
        self.last_ns = mono_ns()
        self._submit_ns = before_ns
        self._submit_width_ns = self.last_ns - before_ns
        if self._observer is not None:
            self._observer.on_submit(before_ns, before_ns - self.began_ns)

    # Methods of the protocol `Waiter`: they report on the connection that is being opened.

    def on_connected(self, stream: Stream, took_ns: int) -> None:
        self._connect_attempt = None
        if self.over:
            stream.close()
            return
        self._stream = stream
        self.connect_ns = took_ns
        request, self._unsent = self._unsent, b""
        try:
            before_ns = mono_ns()
            if stream.write(request):
                self._record_submit(before_ns)
        except OSError as exc:
            stream.close()
            self._stream = None
            message = f"the connection broke while the request was sent ({type(exc).__name__})"
            self._fail_soon(Outcome.UPSTREAM_RESET, message, "closed")

    def on_connect_failed(self, error: OSError) -> None:
        self._connect_attempt = None
        self._unsent = b""
        if (limit := host_limit(error)) is not None:
            self._fail_soon(Outcome.TAP_ERROR, limit, None)
            return
        if isinstance(error, TimeoutError):
            self._fail_soon(Outcome.UPSTREAM_TIMEOUT, "the server did not accept a connection in time", None)
            return
        reason = "refused" if isinstance(error, ConnectionError) else None
        message = f"cannot connect ({error.strerror or type(error).__name__})"
        self._fail_soon(Outcome.UPSTREAM_ERROR, message, reason)

    # Methods of the protocol `Handler`: they report on the open connection.

    def on_data(self, data: bytes, t_ns: int) -> None:
        """Take a part of the answer that arrived at `t_ns`; parse it now, or later if other answers wait."""
        sender = self._sender
        later = sender.deferred
        stream = self._stream
        at_once = stream is not None and stream.came_at_once(data)
        self.response_bytes += len(data)
        if self.response_bytes > ANSWER_BYTES_MAX:
            self._end(Outcome.UPSTREAM_ERROR, TOO_LONG)
            return
        if later.is_behind(t_ns) or self._observer is None or self._unparsed_reads:
            # If other data waits in the sockets, read it first and parse later: a late read is a late
            # timestamp.
            if not self._unparsed_reads and self._observer is not None:
                later.add(self._parse_early_data, urgent=True)
            self._unparsed_reads.append((data, t_ns, at_once))
            sender.early_bytes += len(data)
            if sender.early_bytes > EARLY_BYTES_MAX:
                self._create_observer()
                self._parse_early_data()
        else:
            self._parse_data(data, t_ns, at_once)
        later.after_read()

    def _parse_early_data(self) -> None:
        """Parse the reads that came before there was an observer."""
        early, self._unparsed_reads = self._unparsed_reads, []
        self._sender.early_bytes -= sum(len(data) for data, _, _ in early)
        for number, (data, t_ns, at_once) in enumerate(early, 1):
            if self._stream is None:
                break  # The answer is complete, so the rest belongs to no request.
            self._surplus = number < len(early)
            self._parse_data(data, t_ns, at_once)

    def _parse_data(self, data: bytes, t_ns: int, at_once: bool) -> None:
        self.last_ns = t_ns
        self._at_once = at_once
        scanner = self._scanner
        if scanner is None:
            self._on_head_data(data, t_ns)
            return
        try:
            end = scanner.feed(data)
        except PeerProtocolError as exc:
            self._on_protocol_error(exc)
            return
        if end < 0:
            self._observer.response_data(data, t_ns, 0, at_once=self._at_once)  # type: ignore[union-attr]
            return
        if end < len(data):
            self._keep = False  # The body is longer than the head announced: do not reuse the connection.
        self._on_complete(data[:end], t_ns)

    def _on_head_data(self, data: bytes, t_ns: int) -> None:
        observer, data = self._observer, self._incomplete_head + data
        assert observer is not None
        self._incomplete_head = b""
        self._answer_began = True
        try:
            while True:
                next_head = next_response_head(
                    data,
                    b"POST",
                    bytes_max=self._head_bytes_left,
                    fields_max=HEAD_FIELDS_MAX,
                    interims=self._interims,
                    waited_ns=t_ns - self.began_ns,
                )
                if next_head is None:
                    self._incomplete_head = data
                    return
                head, start, end = next_head
                if head.status == 101:
                    raise PeerProtocolError(
                        "the server answered 101 (Switching Protocols) to a plain request: check its URL",
                        502,
                    )
                observer.response_head(data[start:end], t_ns, 0)
                if head.status >= 200:
                    break
                self._interims += 1
                self._head_bytes_left -= end
                data = data[end:]
                if not data:
                    self._answer_began = False  # RFC 9110 15.2: an interim response is not yet the answer.
                    return
            body_end, self._scanner = begin_response_body(head, data, end)
        except PeerProtocolError as exc:
            self._on_protocol_error(exc)
            return
        self._keep = head.keep_alive and not self._sender.options.fresh
        self._accepted = head.status < 300
        if 300 <= head.status < 400:
            self._redirect = f"status {head.status}, a redirect, which is not followed"
        if head.status in STATUSES:
            retry_wait_ns = self._retry_wait_ns(
                header_value(head.headers, b"retry-after"), header_value(head.headers, b"date")
            )
            self._retry_plan = None if retry_wait_ns is None else (str(head.status), retry_wait_ns)
        if body_end >= 0:
            # The body is longer than the head announced: do not reuse the connection.
            self._keep = self._keep and body_end == len(data)
            self._on_complete(data[end:body_end], t_ns)
        elif len(data) > end:
            observer.response_data(data[end:], t_ns, 0, at_once=self._at_once)

    def _on_complete(self, data: bytes, t_ns: int, *, stamped: bool = True) -> None:
        """Return the connection to the pool and end the answer, or retry. `data`: rest of the answer."""
        stream, self._stream = self._stream, None
        assert stream is not None and self._observer is not None
        self._stamped = stamped and not stream.out_of_order
        if self._keep and not self._surplus and not stream.pending:
            self._sender.pool.give_back(stream, t_ns)
        else:
            stream.close()
        if self._accepted:
            self._end_answered(data, t_ns)
            return
        if data:
            self._observer.response_data(data, t_ns, 0, at_once=self._at_once)
        self._observer.response_end(t_ns)
        if self._redirect is not None:
            self._end(Outcome.UPSTREAM_ERROR, self._redirect)
        elif self._retry_plan is None:
            self._end(Outcome.COMPLETE, None)
        else:
            self._wait_for_retry(*self._retry_plan, Outcome.COMPLETE, None)

    def _end_answered(self, data: bytes, t_ns: int) -> None:
        """End the call after a complete answer. Parse its last piece later, when there is time."""
        self.over = True
        self.last_ns, self._rest_of_answer = t_ns, data
        sender = self._sender
        self._lag_ns = self._timestamp_error_ns()
        sender.calls.pop(self, None)
        if self._on_answer is not None:
            self._on_answer(self, t_ns)
        sender.deferred.add(self._finish_answer)

    def _finish_answer(self) -> None:
        """Parse the last piece of the answer, and pass on the exchange."""
        observer, data = self._observer, self._rest_of_answer
        assert observer is not None
        self._rest_of_answer = b""
        if data:
            observer.response_data(data, self.last_ns, 0, at_once=self._at_once)
        observer.response_end(self.last_ns)
        self._finish(Outcome.COMPLETE, None)

    def on_eof(self) -> None:
        self._create_observer()
        self._parse_early_data()
        if self.over:
            return
        if isinstance(self._scanner, CloseScanner):
            self._on_complete(b"", mono_ns(), stamped=False)
        else:
            self.on_lost(None)

    def on_lost(self, error: OSError | None) -> None:
        self._create_observer()
        self._parse_early_data()
        if self.over:
            return
        how = "reset" if error is not None else "closed"
        if self._answer_began:
            outcome = Outcome.UPSTREAM_RESET if error is not None else Outcome.TRUNCATED
            self._fail(outcome, f"the server {how} the connection in the middle of its answer", None)
        else:
            message = f"the server {how} the connection without an answer"
            self._fail(Outcome.UPSTREAM_RESET, message, "closed")

    def on_drained(self) -> None:
        self._record_submit(mono_ns())

    # ---------------------------------------------------------------- retries of a failed request

    @property
    def is_waiting(self) -> bool:
        """Whether the call waits before its next attempt."""
        return self._timer is not None

    def _retry_wait_ns(self, retry_after: bytes | None = None, date: bytes | None = None) -> int | None:
        sender = self._sender
        if self.retries >= sender.options.retries or not sender.retrying:
            return None
        return wait_ns(self.retries, retry_after, date)

    def _wait_for_retry(self, reason: str, wait_ns: int, outcome: Outcome, error: str | None) -> None:
        self._release_connection()
        self._verdict = outcome, error
        self._timer = self._sender.loop.call_later(wait_ns / 1e9, self._retry, reason)

    def _retry(self, reason: str) -> None:
        self._timer = None
        self.retries += 1
        self._sender.retries[reason] += 1
        self._reset_attempt()
        self._begin_attempt(self._request)

    # ---------------------------------------------------------------- end of the request

    def cancel(self, reason: str) -> None:
        """Cancel the call. If it waits for a retry, it ends with the result of its last attempt."""
        if self._verdict is not None:
            self._end(*self._verdict)
        else:
            self._end(Outcome.CLIENT_CANCELLED, reason)

    def on_timeout(self) -> None:
        if self._stream is None:
            self._end(Outcome.UPSTREAM_TIMEOUT, "the server did not accept a connection in time")
        else:
            self._end(Outcome.UPSTREAM_TIMEOUT, "no end of the answer in time")

    def check_socket(self, now_ns: int) -> None:
        """Check the socket of a quiet stream: after a reset, the loop possibly does not watch it any more."""
        if self._stream is not None and now_ns - self.last_ns > self._quiet_ns:
            self.last_ns = now_ns
            self._quiet_ns = min(2 * self._quiet_ns, QUIET_NS_MAX)
            self._stream.look_again()

    def _on_protocol_error(self, exc: PeerProtocolError) -> None:
        self._end(Outcome.UPSTREAM_ERROR, f"the server sent invalid HTTP: {exc}")

    def _fail_soon(self, outcome: Outcome, error: str, reason: str | None) -> None:
        """Call `_fail` in the next iteration of the loop: `send` must return before `done` is called."""
        self._sender.loop.call_soon(self._fail, outcome, error, reason)

    def _fail(self, outcome: Outcome, error: str, reason: str | None) -> None:
        """End a failed attempt. `reason`: counter of retries to increment; None if a retry is not allowed."""
        if self.over:
            return
        wait_ns = None if reason is None else self._retry_wait_ns()
        if reason is None or wait_ns is None:
            self._end(outcome, error)
        else:
            self._wait_for_retry(reason, wait_ns, outcome, error)

    def _release_connection(self) -> None:
        if self._connect_attempt is not None:
            self._connect_attempt.cancel()
            self._connect_attempt = None
        if self._stream is not None:
            self._stream.abort()
            self._stream = None

    def _end(self, outcome: Outcome, error: str | None) -> None:
        """End the request: release its connection, and finish its exchange."""
        self._create_observer()
        self._parse_early_data()
        if self.over:
            return
        self.over = True
        self._release_connection()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._lag_ns = self._timestamp_error_ns()
        self._sender.calls.pop(self, None)
        self._finish(outcome, error)

    def _timestamp_error_ns(self) -> int:
        lateness = self._sender.lateness
        return (lateness.error_since if self._stamped else lateness.worst_since)(self.began_ns)

    def _finish(self, outcome: Outcome, error: str | None) -> None:
        """Pass on the exchange with the times of the sender."""
        sender, observer = self._sender, self._observer
        assert observer is not None
        x = observer.finish(
            None, outcome.value, None, error, 0, self._lag_ns, self.request_bytes, self.response_bytes
        )
        x.uncertainty_ns = max(x.uncertainty_ns, self._submit_width_ns)
        x.ttft_uncertainty_ns = max(x.ttft_uncertainty_ns, self._submit_width_ns)
        x.anchor = sender.timebase.steps
        if self.scheduled_ns is not None:
            x.scheduled_ns = self.scheduled_ns
            x.dispatch_late_ns = self.first_ns - self.scheduled_ns
        elif self.retries:
            x.scheduled_ns = self.first_ns  # A closed loop has no schedule: count from the first attempt.
        self._observer = None
        self._request = self._unsent = b""
        self._on_end(self, x)

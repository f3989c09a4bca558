"""Send one request of a client to the upstream, on a kept or a new connection, and report its frames.

A Flow (`flow.py`), which handles the response, has one `Upload` and passes the head and each read of the body
to it. A request is sent a second time, never a third, if the first connection was kept alive from an earlier
request and closed before it returned a byte. In addition, either no byte of the request must have left this
process, or its method must be idempotent (RFC 9110 9.2.2) and the whole request in memory. A POST that the
upstream has possibly read is never repeated. All connections and exchanges of a relay share its
`RelayContext`.
"""

import asyncio
import logging
from typing import Any, Final, Protocol

from llmtap.channel.frames import FrameKind
from llmtap.clock import SystemClock
from llmtap.errors import PeerProtocolError
from llmtap.exchange.outcome import Outcome
from llmtap.net.listener import failure_text, is_own_shortage
from llmtap.net.pool import Attempt, Route, Waiter
from llmtap.net.stream import Stream
from llmtap.protocol.http1 import (
    NO_TRAILER_WORDS,
    NO_TRAILERS,
    BodyScanner,
    Framing,
    Headers,
    RequestHead,
    scanner_for,
)
from llmtap.protocol.inference import SkipRules
from llmtap.vantage.relay.experiment_router import Assignment, ExperimentRouter
from llmtap.vantage.relay.heads import added_fields, make_request_id, measured_head, request_lines
from llmtap.vantage.relay.options import RelayOptions
from llmtap.vantage.reporter import Reporter

WARN_EVERY_NS: Final = 1_000_000_000

# Module constants: otherwise, each would be looked up in its class for every request.
OPEN, SENT, REQUEST_DATA = FrameKind.OPEN, FrameKind.SENT, FrameKind.REQUEST_DATA
NONE, LENGTH = Framing.NONE, Framing.LENGTH
IDEMPOTENT: Final = frozenset({b"GET", b"HEAD", b"OPTIONS", b"PUT", b"DELETE", b"TRACE"})

log = logging.getLogger(__name__)


class RelayContext:
    """Options of a relay, its route to the upstream, and its channel to the meter."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, options: RelayOptions, reporter: Reporter, route: Route
    ) -> None:
        self.loop = loop
        self.options = options
        self.reporter = reporter
        self.tap = reporter.tap
        self.now_ns = reporter.now_ns
        self.running = reporter.arrivals  # arrival time of each exchange that has not ended
        self.route = route
        self.makes_request_ids = options.request_id == "make"
        self.adds_fields = self.makes_request_ids or options.forwarded_for or options.via
        """Whether the relay adds header fields to requests."""
        self.router: ExperimentRouter | None = None
        self.forwarder: Any = None
        """The compiled Forwarder (forwarding thread); None: the event loop forwards all bodies."""
        self.skip_rules = SkipRules(options.skip, "relay.skip")
        self.last_request_ns = 0
        """Time in ns for which an idle client connection can send one more request while the relay drains."""
        self._warned_ns: dict[str, int] = {}
        """By kind of warning: time of the latest one, to limit their number."""

    def refuse(self, limit: str) -> None:
        """Count a request or connection that was refused because of a limit."""
        refused = self.reporter.counts.refused
        refused[limit] = refused.get(limit, 0) + 1

    def warn(self, kind: str, what: str, error: Exception | None = None) -> None:
        """Log a fault of a peer or of the system: at most one line per second and kind.

        `error`: exception in llmtap's own code, which is logged with its traceback.
        """
        now_ns = self.now_ns()
        if now_ns - self._warned_ns.get(kind, -WARN_EVERY_NS) >= WARN_EVERY_NS:
            self._warned_ns[kind] = now_ns
            log.warning("event=%s relay=%s error=%r", kind, self.reporter.name, what, exc_info=error)


mono_ns = SystemClock.mono_ns


class ExchangeClient(Protocol):
    """Methods of the client connection (`ClientConnection`) that an exchange uses."""

    address: bytes
    is_11: bool  # whether the request is HTTP/1.1, and not 1.0

    def request_complete(self) -> None:
        """Record that the current request has been read to its end."""
        ...

    def hand_over(self) -> bytes:
        """Become a tunnel, and return the bytes that the client has already sent into it."""
        ...

    def flow_over(self, now_ns: int, *, keep: bool, linger: bool, abort: bool) -> None:
        """Continue after the end of an exchange: read the next request, or close the connection."""
        ...


class UploadOwner(Waiter, Protocol):
    """Methods of the exchange (`Flow`) that its `Upload` uses; it also handles the upstream's stream."""

    arrival_ns: int
    seq: int
    tapped: bool  # whether the exchange is measured
    last_ns: int  # time of the latest read or write
    over: bool
    finishing: bool  # whether the answer is complete, but the client's socket has not taken all of it
    reads_on: bool  # whether the rest of the request is still read after an error answer

    def client_drained(self) -> None:
        """Continue after the client's socket has taken all bytes."""
        ...

    def fail(
        self, status: int, code: str, what: str, outcome: Outcome, fields: Headers | None = None
    ) -> None:
        """End the exchange with an error response, or cut a response that has begun."""
        ...


class Upload:
    """One request on its way to the upstream."""

    __slots__ = (
        "_client",
        "_connect_attempt",
        "_context",
        "_flow",
        "_is_detached",
        "_made_request_id",
        "_maybe_sent",
        "_route",
        "_scanner",
        "_send_began_ns",
        "_stream",
        "_target",
        "_waiting_data",
        "assignment",
        "broken",
        "connect_ns",
        "connected_ns",
        "end_ns",
        "has_exact_stamps",
        "repeatable_request",
        "request_bytes",
        "retries",
        "reused",
        "send_ns",
        "send_wait_ns",
        "upgrade",
        "upstream",
    )

    def __init__(
        self, context: RelayContext, flow: UploadOwner, client: ExchangeClient, stream: Stream
    ) -> None:
        self._context = context
        self._flow = flow
        self._client = client
        self._stream = stream  # stream of the client
        self._route = context.route
        self.assignment: Assignment | None = None
        """Arm of an experiment; None without an experiment."""
        self._scanner: BodyScanner | None = None
        self._connect_attempt: Attempt | None = None
        self._waiting_data = b""  # request bytes that wait for a connection or an assignment
        self._is_detached = False  # whether the exchange has ended
        self._maybe_sent = False  # whether the upstream has possibly received a part of the request
        self._target = b""
        """Target of the request line, for a hint about a wrong path."""
        self._made_request_id = b""
        """Request id that the relay added; empty: the client sent one."""
        self.upgrade = False
        """Whether the request asks for a WebSocket, and the options allow it."""
        self.upstream: Stream | None = None
        """Connection to which the request is sent; None before and after."""
        self.reused = False
        """Whether `upstream` was kept alive from an earlier request."""
        self.repeatable_request = b""
        """The whole request, as long as it can be sent again; b"": it must not be."""
        self.broken = False
        """Whether the upstream's socket takes no more of the request."""
        self.end_ns = 0
        """Time of the read with the request's last byte; 0 before."""
        self.request_bytes = 0
        """Number of bytes read from the client for this request, or up to the end of its tunnel."""
        self.connect_ns: int | None = None
        """Duration of connecting; None with a kept-alive connection."""
        self.connected_ns: int | None = None
        """Time when the new connection was ready; None with a kept-alive connection."""
        self.send_ns = 0
        """Duration of the last send to the upstream, which is the error of the time of submission."""
        self.send_wait_ns = 0
        """Total time in which the upstream's socket did not take bytes of the request."""
        self.has_exact_stamps = False
        """Whether the kernel stamped all bytes of the answer; False until the upstream's connection is
        released."""
        self._send_began_ns = 0
        """Time at which the latest send to the upstream began."""
        self.retries = 0

    # ---------------------------------------------------------------- read the request from the client

    def start(self, head: RequestHead, data: bytes, head_end: int, arrival_ns: int, t_ns: int) -> bytes:
        """Forward the request whose head ends at `head_end` of `data`; return the bytes after its end."""
        context, flow = self._context, self._flow
        if head.upgrade is not None:
            # RFC 9110 7.8: ignore Upgrade in HTTP/1.0.
            wanted = context.options.websocket and head.version == (1, 1)
            self.upgrade = wanted and head.upgrade.lower() == b"websocket"
        rule = context.skip_rules.rule_of_head(head.method, head.target, head.headers)
        if rule is not None:
            context.reporter.skip(rule)
        skipped = rule is not None
        assignment = None
        if context.router is not None and not skipped:
            self.assignment = assignment = context.router.assign(head, context.tap.ledger.opened + 1)
        holds = assignment is not None and assignment.holds_body
        if assignment is not None and not holds:
            self._route = assignment.route
        if context.makes_request_ids:
            self._made_request_id = make_request_id(head if assignment is None or holds else assignment.head)
        if not holds:
            # Fast path: nearly every request is complete in the first read. It needs no scanner, and only one
            # send and one frame.
            if head.framing is NONE:
                return self._start_whole(head, data, head_end, head_end, arrival_ns, t_ns, skipped)
            if head.framing is LENGTH and len(data) - head_end >= head.length:
                end = head_end + head.length
                return self._start_whole(head, data, head_end, end, arrival_ns, t_ns, skipped)
        if not skipped:
            arm_data = None if assignment is None else assignment.arm_data
            measured = measured_head(data[:head_end], self._made_request_id)
            flow.seq, flow.tapped = context.tap.open(arrival_ns, measured, arm=arm_data)
        self.request_bytes = head_end
        refused = NO_TRAILERS if assignment is None else assignment.refused_trailers
        self._scanner = scanner_for(
            head.framing, head.length, refused_trailers=refused, refused_words=NO_TRAILER_WORDS
        )
        body, rest = self._scan(data[head_end:], t_ns) if len(data) > head_end else (b"", b"")
        if flow.over:
            return b""
        if holds:
            assert assignment is not None
            assignment.on_memory_lost = self._on_memory_lost
            self._waiting_data = body
            self._forward_held()
        else:
            self._forward(head, body)
        return rest

    def _start_whole(
        self,
        head: RequestHead,
        data: bytes,
        head_end: int,
        end: int,
        arrival_ns: int,
        t_ns: int,
        skipped: bool,
    ) -> bytes:
        """Begin an exchange whose request has arrived completely. Return the bytes after it."""
        flow, tap = self._flow, self._context.tap
        whole, rest = (data, b"") if end == len(data) else (data[:end], data[end:])
        self.request_bytes = end
        self.end_ns = t_ns
        self._client.request_complete()
        request = self._head_lines(head) + whole[head_end:]
        self.upstream = upstream = self._route.pool.take(flow)
        if upstream is not None:
            self.reused = True
            if head.method in IDEMPOTENT:
                self.repeatable_request = request
        kind, extra_ns, tried = OPEN, t_ns, False
        if upstream is not None and arrival_ns == t_ns:
            tried = True
            # Read the clock before the send: on loopback, the answer can arrive before the call returns.
            submit_ns = mono_ns()
            try:
                if upstream.write(request):  # if False, `on_drained` reports when the rest is taken
                    kind, extra_ns = SENT, submit_ns
                    self.send_ns = mono_ns() - submit_ns
                else:
                    self._send_began_ns = submit_ns
                self._maybe_sent = True
            except OSError:
                pass
        if not skipped:
            arm_data = None if self.assignment is None else self.assignment.arm_data
            if self._made_request_id:
                whole = measured_head(whole[:head_end], self._made_request_id) + whole[head_end:]
            flow.seq, flow.tapped = tap.open(arrival_ns, whole, extra_ns, kind, arm_data)
        if not tried and upstream is not None:
            self._send(request)
        elif upstream is None:
            self._connect_for(request)
        elif not self._maybe_sent:
            self._retry(request)
        return rest

    def feed(self, data: bytes, t_ns: int) -> bytes:
        """Forward more of the request body; return the bytes after its end."""
        flow = self._flow
        if flow.finishing:
            # The answer is complete, so the rest of the request is not forwarded; only its end is looked for.
            rest = self._scan(data, t_ns)[1]
            if self.end_ns and flow.reads_on:
                flow.client_drained()
            return rest
        flow.last_ns = t_ns
        data, rest = self._scan(data, t_ns)
        if not flow.over and not self.broken:
            if self.upstream is None:
                self._waiting_data += data
                if self.assignment is not None and self.assignment.holds_body:
                    self._forward_held()
            else:
                self._send(data)
        return rest

    def _scan(self, data: bytes, t_ns: int) -> tuple[bytes, bytes]:
        """Split `data` at the end of the request, if it contains the end. Report the part before the end."""
        assert self._scanner is not None
        flow, tap = self._flow, self._context.tap
        try:
            end = self._scanner.feed(data)
        except PeerProtocolError as exc:
            # Close the upstream connection, so that the upstream does not process the incomplete request.
            self.drop_upstream()
            flow.fail(exc.status, "malformed_request", str(exc), Outcome.CLIENT_ERROR)
            return b"", b""
        rest = b""
        if end >= 0:
            data, rest = data[:end], data[end:]
        self.request_bytes += len(data)
        tap.offer(REQUEST_DATA, flow.seq, t_ns, 0, data)
        if end >= 0:
            self._scanner = None
            self.end_ns = t_ns
            self._client.request_complete()
            tap.offer(FrameKind.REQUEST_END, flow.seq, t_ns, 0)
        return data, rest

    def _forward_held(self) -> None:
        """Forward the held request, if its arm is known or no more of its body can be held."""
        flow, assignment = self._flow, self.assignment
        assert assignment is not None
        reported = assignment.arm_data
        body = assignment.settle(self._waiting_data, flow.seq, complete=self.end_ns > 0)
        if body is None:
            return
        self._waiting_data = b""
        self._route = assignment.route
        if assignment.arm_data is not reported:
            self._context.tap.offer(FrameKind.ARM, flow.seq, flow.last_ns, 0, assignment.arm_data or b"")
        self._forward(assignment.head, body)

    def _on_memory_lost(self) -> None:
        # Use call_soon, because the caller is just taking the memory for another request.
        self._context.loop.call_soon(self._settle_without_memory)

    def _settle_without_memory(self) -> None:
        """Forward a held request without its arm, because another request needs the memory."""
        holds = self.assignment is not None and self.assignment.holds_body
        if holds and not self._is_detached and not self._flow.over:
            self._forward_held()

    # ---------------------------------------------------------------- send the request to the upstream

    def _head_lines(self, head: RequestHead) -> bytes:
        """Return the request head for the upstream."""
        route, context = self._route, self._context
        self._target = head.target
        extra: Headers = []
        if context.adds_fields:
            extra = added_fields(head, context.options, self._client.address, self._made_request_id)
        return request_lines(
            head, prefix=route.origin.prefix, authority=route.authority, upgrade=self.upgrade, extra=extra
        )

    def _forward(self, head: RequestHead, body: bytes) -> None:
        """Send the head and the body bytes read so far, on a kept-alive connection or a new one."""
        request = self._head_lines(head) + body
        self.upstream = self._route.pool.take(self._flow)
        if self.upstream is None:
            self._connect_for(request)
            return
        self.reused = True
        if self.end_ns and head.method in IDEMPOTENT:
            self.repeatable_request = request
        self._send(request)

    def _send(self, data: bytes) -> None:
        """Write a part of the request to the upstream; retry on another connection if that is safe."""
        upstream = self.upstream
        assert upstream is not None
        submit_ns = mono_ns()
        try:
            sent = upstream.write(data)
        except OSError:
            if self.reused and not self._maybe_sent:
                # The kernel took no byte, so the upstream has not seen the request: retry with any method.
                self._retry(data)
            else:
                # Do not fail yet: the upstream has possibly sent an answer (such as 413) before it closed.
                # The next read of this connection finds that answer, or the end of the connection.
                self.broken = True
            return
        self._maybe_sent = True
        if sent:
            self.send_ns = mono_ns() - submit_ns
            if self.end_ns or self.assignment is not None:
                self._on_all_taken(submit_ns)
        else:
            self._send_began_ns = submit_ns
            if not self.end_ns:
                self._stream.pause()

    def _on_all_taken(self, t_ns: int) -> None:
        """Record that the upstream's socket took all bytes, in a send that began at `t_ns`."""
        if self.assignment is not None:
            self.assignment.release_memory()
        if self.end_ns:
            self._context.tap.offer(FrameKind.SUBMIT, self._flow.seq, t_ns, t_ns - self.end_ns)

    def on_drained(self) -> None:
        """Record that the upstream's socket has taken the bytes that it did not take at the first send."""
        now_ns = mono_ns()
        waited_ns = now_ns - self._send_began_ns
        self.send_wait_ns += waited_ns
        # `now_ns` is the end of the last send. Its start is unknown, so estimate its duration by the lag.
        self.send_ns = min(waited_ns, self._context.reporter.lag.worst_since(self._send_began_ns))
        self._on_all_taken(now_ns)
        if not self.end_ns:
            self._stream.resume()

    def _connect_for(self, request: bytes) -> None:
        """Connect to the upstream; `request` is sent when this succeeds."""
        self._waiting_data = request
        if not self.end_ns:
            self._stream.pause()
        flow = self._flow
        self._connect_attempt = self._route.pool.connect(flow)
        if self.upstream is not None or flow.over:
            # The attempt ended before connect() returned, so it must not be cancelled.
            self._connect_attempt = None

    def on_connected(self, stream: Stream, took_ns: int) -> None:
        """Send the waiting request on the new connection."""
        self._connect_attempt = None
        self.connect_ns = took_ns
        self.connected_ns = mono_ns()
        self.upstream = stream
        request, self._waiting_data = self._waiting_data, b""
        if not self.end_ns:
            self._stream.resume()
        self._send(request)

    def on_connect_failed(self, error: OSError) -> None:
        """End the exchange with an error answer, because no connection could be opened."""
        self._connect_attempt = None
        flow, context = self._flow, self._context
        # If the exchange is measured, read the request to its end, because its body names the model.
        flow.reads_on = not self.end_ns and flow.tapped
        if isinstance(error, TimeoutError):
            what = "the upstream did not accept a connection within relay.connect_timeout"
            flow.fail(504, "upstream_connect_timeout", what, Outcome.UPSTREAM_TIMEOUT)
        elif is_own_shortage(error):
            # This is a limit of llmtap and not of the upstream, so answer 503 and ask for a retry.
            context.refuse("tap_overloaded")
            context.warn("tap_overloaded", str(error))
            what = f"llmtap cannot open another connection: {failure_text(error)}; try again"
            flow.fail(503, "tap_overloaded", what, Outcome.REJECTED, [(b"Retry-After", b"1")])
        else:
            context.warn("upstream_connect", str(error))
            what = f"the upstream cannot be reached: {failure_text(error)}; check that it runs"
            flow.fail(502, "upstream_connect", what, Outcome.UPSTREAM_ERROR)

    def retry(self) -> bool:
        """Send the request again on a new connection. Return False if it must not be sent again."""
        if not self.repeatable_request or not self.reused:
            return False
        self._retry(self.repeatable_request)
        return True

    def _retry(self, request: bytes) -> None:
        self.drop_upstream()
        self.retries += 1
        self.reused = False
        self.repeatable_request = b""
        self._connect_for(request)

    # ---------------------------------------------------------------- the end of the upload

    def give_back(self, last_ns: int, *, keep: bool) -> None:
        """Return the upstream connection to the pool after the answer, if `keep` and if the request was sent
        completely; otherwise close it."""
        upstream = self._release_upstream()
        if upstream is None:
            return
        if keep and self.end_ns and not upstream.pending and not self.broken:
            self._route.pool.give_back(upstream, last_ns)
        else:
            upstream.close()

    def detach(self) -> None:
        """Drop the reference to the finished exchange, because a reference cycle would keep memory longer."""
        del self._flow
        self._is_detached = True
        if self.assignment is not None:
            self.assignment.on_memory_lost = None

    def note_unsolicited(self) -> None:
        """Count an answer after which bytes came that belong to no request."""
        self._route.pool.unsolicited += 1

    def note_not_found(self) -> None:
        """Log a hint if the upstream answered 404 to a path with `/v1/v1`."""
        if b"/v1/v1/" in self._route.origin.prefix + self._target:
            what = "the upstream answered 404 to a path with /v1/v1"
            hint = "remove /v1 from relay.upstream, or one /v1 from the base URL of the client"
            self._context.warn("doubled_path", f"{what}: {hint}")

    def drop_upstream(self) -> None:
        """Close the upstream connection, if there is one."""
        upstream = self._release_upstream()
        if upstream is not None:
            upstream.close()

    def _release_upstream(self) -> Stream | None:
        """Return the connection to the upstream, which this object no longer uses."""
        upstream, self.upstream = self.upstream, None
        if upstream is not None and not self._is_detached:
            self.has_exact_stamps = upstream.stamped_since(self._flow.arrival_ns)
        return upstream

    def cancel(self) -> None:
        """Close the upstream connection, or stop the attempt to open it."""
        self.drop_upstream()
        if self._connect_attempt is not None:
            self._connect_attempt.cancel()
            self._connect_attempt = None

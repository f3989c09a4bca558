"""One exchange on its way: the request up, the answer down, and a frame to the tap for each read.

The order of things at a read of the answer is the heart of the relay (`Flow.on_data`): the stamp is there
already; find out whether the answer ends in these bytes; hand them to the client's socket; only then tell
the tap. Nothing here looks into a body.

Who may be asked twice: a request is sent again, once, only when a kept-alive connection turned out to be
closed before it answered a single byte, and either nothing of the request had left this process or its
method is idempotent (RFC 9110 9.2.2) and all of it is at hand. A POST that may have been read is never
repeated.

One class and one file, though long: its methods are the transitions of one state, which all of them share.
"""

import os
from typing import TYPE_CHECKING, Final

from llmtap import native
from llmtap.channel.frames import Closing, FrameKind
from llmtap.clock import SystemClock
from llmtap.errors import PeerProtocolError
from llmtap.exchange.outcome import Outcome
from llmtap.net.failures import failure_said, is_own_shortage
from llmtap.net.pool import Attempt
from llmtap.net.stream import CompiledStream, Stream
from llmtap.protocol.http1 import (
    FRAMING_TRAILERS,
    NO_TRAILERS,
    BodyScanner,
    CloseScanner,
    Framing,
    Headers,
    RequestHead,
    ResponseHead,
    parse_response_head,
    scanner_for,
)
from llmtap.vantage.relay.heads import own_answer, request_lines, response_lines
from llmtap.vantage.relay.tunnel import Tunnel

if TYPE_CHECKING:
    from llmtap.vantage.relay.arms import Assignment
    from llmtap.vantage.relay.connection import ClientConnection
    from llmtap.vantage.relay.relay import Relay

__all__ = ["RESPONSE_DATA", "Flow"]

QUIET_NS: Final = 200_000_000
"""After this long without a byte, a stream is asked whether the loop has stopped watching it."""
IDEMPOTENT: Final = frozenset({b"GET", b"HEAD", b"OPTIONS", b"PUT", b"DELETE", b"TRACE"})
# By name: an enum's member would be looked up in its class, and its value in the member, for every token.
RESPONSE_DATA: Final = int(FrameKind.RESPONSE_DATA)
REQUEST_DATA: Final = int(FrameKind.REQUEST_DATA)
RESPONSE_END: Final = int(FrameKind.RESPONSE_END)
SUBMIT: Final = int(FrameKind.SUBMIT)
ANSWER: Final = int(FrameKind.ANSWER)
SENT: Final = int(FrameKind.SENT)
NONE, LENGTH, _, CLOSE = Framing
COMPLETE: Final = Outcome.COMPLETE

mono_ns = SystemClock.mono_ns


class PythonFlowState:
    """What compiled code changes, too (native/relay.pxi), and so a part of its own."""

    __slots__ = ("last_ns", "response_bytes", "seq", "tapped")

    def __init__(self) -> None:
        self.seq = 0
        self.tapped = False
        self.last_ns = 0
        self.response_bytes = 0


if TYPE_CHECKING:
    FlowState = PythonFlowState
else:
    FlowState = PythonFlowState if native.compiled is None else native.compiled.FlowState


class Flow(FlowState):
    """An exchange between a client's connection and the upstream; the upstream stream's handler."""

    __slots__ = (
        "_acked_bytes", "_again", "_answered", "_attempt", "_client", "_connect_ns", "_dealt", "_error",
        "_finishing", "_head_part", "_held", "_keep_client", "_keep_upstream", "_method", "_note", "_outcome",
        "_paused_since_ns", "_relay", "_request_end_ns", "_request_scanner", "_retries", "_reused",
        "_room", "_route", "_scanner", "_sent", "_stream", "_tap", "_tunnel", "_upgrade",
        "_upload_broken", "_upstream", "_withheld", "arrival_ns", "over", "paused_ns",
        "request_bytes", "status",
    )  # fmt: skip

    # Only while an experiment runs: see relay/arms.py.
    _withheld: RequestHead | None
    _room: int

    def __init__(self, relay: "Relay", client: "ClientConnection", stream: Stream) -> None:
        super().__init__()
        self._relay = relay
        self._client = client
        self._stream = stream
        self._tap = relay.tap
        self._route = relay.route
        self._dealt: Assignment | None = None  # its place in an experiment
        self._note: bytes | None = None  # the same, for the tap
        self._upstream: Stream | None = None
        self._scanner: BodyScanner | None = None
        self._request_scanner: BodyScanner | None = None
        self._head_part = b""
        self._held = b""  # request bytes waiting for a connection: of one read, as no more is read meanwhile
        self._again = b""  # the whole request, while it may still be sent again
        self._attempt: Attempt | None = None
        self._method = b""
        self._upgrade = False
        self._tunnel: Tunnel | None = None
        self._reused = False
        self._retries = 0
        self._sent = False  # the upstream may have seen something of the request
        self._upload_broken = False
        self._answered = False  # the client has got a byte of a final answer
        self._finishing = False  # the answer is complete, the client's socket has yet to take it
        self._keep_client = True
        self._keep_upstream = False
        self._connect_ns: int | None = None
        self._request_end_ns = 0
        self._paused_since_ns = 0
        self._acked_bytes = 0  # by whoever did not take all at once, at the last look
        self._outcome = COMPLETE
        self._error: str | None = None
        self.over = False
        self.status: int | None = None
        self.arrival_ns = 0
        self.paused_ns = 0
        self.request_bytes = 0

    # ---------------------------------------------------------------- the request

    def start(self, head: RequestHead, data: bytes, head_end: int, arrival_ns: int, t_ns: int) -> bytes:
        """Send on the request whose head ends at `head_end` of `data`; returns what stands behind its end."""
        relay = self._relay
        options = relay.options
        self._method = head.method
        self._keep_client = head.keep_alive
        if head.upgrade is not None:
            # RFC 9110 7.8: HTTP/1.0 has no upgrades.
            wanted = options.websocket and head.version == (1, 1)
            self._upgrade = wanted and head.upgrade.lower() == b"websocket"
        self.arrival_ns = arrival_ns
        self.last_ns = t_ns
        relay.flows.add(self)
        route = self._route
        lines = request_lines(
            head,
            prefix=route.origin.prefix,
            authority=route.authority,
            upgrade=self._upgrade,
            extra=self._extra_fields(head) if relay.adds_fields else [],
        )
        # Nearly every request is complete by now: then it is one send, one frame, and no scanner.
        end = -1
        if head.framing is NONE:
            end = head_end
        elif head.framing is LENGTH and len(data) - head_end >= head.length:
            end = head_end + head.length
        upstream = route.pool.take(self)
        self._upstream = upstream
        self._reused = upstream is not None
        if end >= 0:
            whole, rest = (data, b"") if end == len(data) else (data[:end], data[end:])
            request = lines + whole[head_end:]
            self.request_bytes = end
            self._request_end_ns = t_ns
            self._client.request_complete()
            if upstream is not None and head.method in IDEMPOTENT:
                self._again = request
            self._send_whole(request, whole, arrival_ns, t_ns)
            return rest
        self.seq, self.tapped = self._tap.open(arrival_ns, data[:head_end], arm=self._note)
        self.request_bytes = head_end
        self._request_scanner = self._scanner_of(head)
        body, rest = self._scan_request(data[head_end:], t_ns) if len(data) > head_end else (b"", b"")
        if self.over:
            return b""
        if upstream is not None:
            if self._request_end_ns and head.method in IDEMPOTENT:
                self._again = lines + body
            self._send_up(lines + body)
        else:
            self._connect_for(lines + body)
        return rest

    def _send_whole(self, request: bytes, whole: bytes, arrival_ns: int, t_ns: int) -> None:
        """A request that is complete: as far as can be, on its way before the tap hears of it."""
        upstream = self._upstream
        if upstream is not None and arrival_ns == t_ns:
            try:
                if upstream.write(request):
                    self._sent = True
                    self.seq, self.tapped = self._tap.open(arrival_ns, whole, mono_ns(), SENT, self._note)
                    return
            except OSError:
                upstream.close()
                self._upstream = upstream = None
                self.seq, self.tapped = self._tap.open(arrival_ns, whole, t_ns, arm=self._note)
                self._retry(request)
                return
            self._sent = True
            self.seq, self.tapped = self._tap.open(arrival_ns, whole, t_ns, arm=self._note)
            return  # `on_drained` will say when the rest was taken
        self.seq, self.tapped = self._tap.open(arrival_ns, whole, t_ns, arm=self._note)
        if upstream is not None:
            self._send_up(request)
        else:
            self._connect_for(request)

    def _extra_fields(self, head: RequestHead) -> list[tuple[bytes, bytes]]:
        options = self._relay.options
        extra: list[tuple[bytes, bytes]] = []
        if options.request_id == "make" and (
            b"x-request-id" in head.connection  # then the client's own ends at this hop
            or not any(n.lower() == b"x-request-id" for n, _ in head.headers)
        ):
            extra.append((b"X-Request-Id", os.urandom(16).hex().encode()))
        if options.forwarded_for:
            extra.append((b"X-Forwarded-For", self._client.address))
        if options.via:
            extra.append((b"Via", b"1.%d llmtap" % head.version[1]))
        return extra

    def _scanner_of(self, head: RequestHead) -> BodyScanner:
        """The scanner of the request's body."""
        return scanner_for(head.framing, head.length, refused_trailers=NO_TRAILERS)

    def _scan_request(self, data: bytes, t_ns: int) -> tuple[bytes, bytes]:
        """Split `data` at the request's end, if it is in there, and tell the tap."""
        assert self._request_scanner is not None
        try:
            end = self._request_scanner.feed(data)
        except PeerProtocolError as exc:
            # The upstream has part of a request that can never be completed: it must not take it for one.
            self._drop_upstream()
            self.fail(exc.status, "malformed_request", str(exc), Outcome.REJECTED)
            return b"", b""
        rest = b""
        if end >= 0:
            data, rest = data[:end], data[end:]
        self.request_bytes += len(data)
        if self.tapped:
            self.tapped = self._tap.offer(REQUEST_DATA, self.seq, t_ns, 0, data)
        if end >= 0:
            self._request_scanner = None
            self._request_complete(t_ns)
        return data, rest

    def _request_complete(self, t_ns: int) -> None:
        self._request_end_ns = t_ns
        self._client.request_complete()
        if self.tapped:
            self.tapped = self._tap.offer(FrameKind.REQUEST_END, self.seq, t_ns, 0)

    def request_data(self, data: bytes, t_ns: int) -> bytes:
        """More of the request's body; returns what stands behind its end."""
        if self._finishing:
            # Nobody is there to take it: it neither waits for a connection nor keeps the exchange alive.
            return self._scan_request(data, t_ns)[1]
        self.last_ns = t_ns
        data, rest = self._scan_request(data, t_ns)
        if not self.over and not self._upload_broken:
            if self._upstream is None:
                self._held += data
            else:
                self._send_up(data)
        return rest

    def _send_up(self, data: bytes) -> None:
        upstream = self._upstream
        assert upstream is not None
        try:
            sent = upstream.write(data)
        except OSError:
            self._upload_failed(data)
            return
        self._sent = True
        if self._request_end_ns:
            if sent:
                self._note_submit()
        elif not sent:
            self._stream.pause()

    def _note_submit(self) -> None:
        if self.tapped:
            t_ns = mono_ns()
            added_ns = t_ns - self._request_end_ns
            self.tapped = self._tap.offer(SUBMIT, self.seq, t_ns, added_ns)

    def _upload_failed(self, data: bytes) -> None:
        upstream = self._upstream
        assert upstream is not None
        if self._reused and not self._sent:
            # The kernel took nothing of it, so the upstream cannot have seen it: any method may go again.
            upstream.close()
            self._upstream = None
            self._retry(data)
        else:
            # An answer may be waiting behind the broken pipe (413, say): the reader will find it, or the end.
            self._upload_broken = True

    def _connect_for(self, request: bytes) -> None:
        self._held = request
        if not self._request_end_ns:
            self._stream.pause()
        self._attempt = self._route.pool.connect(self)
        if self._upstream is not None or self.over:
            self._attempt = None  # it was all over before the call returned

    def on_connected(self, stream: Stream, took_ns: int) -> None:
        """The connection that was asked for."""
        self._attempt = None
        if self.over:
            stream.close()
            return
        self._connect_ns = took_ns
        self._upstream = stream
        request, self._held = self._held, b""
        if not self._request_end_ns:
            self._stream.resume()
        self._send_up(request)

    def on_connect_failed(self, error: OSError) -> None:
        """There is no connection to be had."""
        self._attempt = None
        if self.over:
            return
        if isinstance(error, TimeoutError):
            what = "the upstream did not accept a connection in time"
            self.fail(504, "upstream_connect_timeout", what, Outcome.UPSTREAM_TIMEOUT)
        elif is_own_shortage(error):
            # The upstream was not asked: this is a limit of the tap, like too many requests at a time.
            self._relay.refuse("tap_overloaded")
            self._relay.warn("tap_overloaded", str(error))
            what = f"no connection can be opened here: {failure_said(error)}"
            self.fail(503, "tap_overloaded", what, Outcome.REJECTED, [(b"Retry-After", b"1")])
        else:
            self._relay.warn("upstream_connect", str(error))
            what = f"the upstream cannot be reached: {failure_said(error)}"
            self.fail(502, "upstream_connect", what, Outcome.UPSTREAM_ERROR)

    def _retry(self, request: bytes) -> None:
        self._retries += 1
        self._reused = False
        self._again = b""
        self._connect_for(request)

    # ---------------------------------------------------------------- the answer: the upstream's handler

    def on_data(self, data: bytes, t_ns: int) -> None:
        scanner = self._scanner
        if scanner is None:
            self._on_head_data(data, t_ns)
            return
        try:
            end = scanner.feed(data)
        except PeerProtocolError as exc:
            self._upstream_broke(exc)
            return
        if end >= 0 and end < len(data):
            data = data[:end]
            self._said_too_much()
        try:
            sent = self._stream.write(data)
        except OSError:
            self.client_gone()
            return
        self.last_ns = t_ns
        self.response_bytes += len(data)
        if self.tapped:
            self.tapped = self._tap.offer(RESPONSE_DATA, self.seq, t_ns, mono_ns() - t_ns, data)
        if end >= 0:
            self._body_complete(t_ns)
        elif not sent:
            self.pause_upstream()

    def offer_data(self, t_ns: int, added_ns: int, data: bytes) -> None:
        """Add a frame of the body, where `Passage` could not."""
        self.tapped = self._tap.offer(RESPONSE_DATA, self.seq, t_ns, added_ns, data)

    def _pass_body(self, framing: Framing) -> None:
        """Let compiled code pass the rest of the body on, if there is any: `on_data` for plain reads."""
        upstream, client = self._upstream, self._stream
        if isinstance(upstream, CompiledStream) and isinstance(client, CompiledStream):
            assert native.compiled is not None
            upstream.reader.passage = native.compiled.Passage(
                self, client.reader, framing.value, self._scanner, self._tap.rows
            )

    def _on_head_data(self, data: bytes, t_ns: int) -> None:
        self.last_ns = t_ns
        self._again = b""  # it has begun to answer: what it was asked, it was asked
        if self._head_part:
            data = self._head_part + data
        if self._finishing or self.over:
            return
        end = self._head_end(data)
        if end < 0:
            return
        self._head_part = b""
        while True:
            raw = data[:end]
            try:
                head = parse_response_head(raw, self._method)
                if len(head.headers) > self._relay.options.head_fields:
                    raise PeerProtocolError("the response head has too many fields", 502)
                if head.status == 101 and not self._upgrade:
                    raise PeerProtocolError("the upstream switched protocols unasked", 502)
            except PeerProtocolError as exc:
                self._upstream_broke(exc)
                return
            if head.status == 101:
                self._switch(head, raw, data[end:], t_ns)
                return
            if head.status >= 200:
                self._answer(head, data, end, t_ns)
                return
            self._interim(head, raw, t_ns)
            data = data[end:]
            if not data or self.over:
                return
            end = self._head_end(data)
            if end < 0:
                return

    def _head_end(self, data: bytes) -> int:
        """Where the head at the start of `data` ends; -1 when it does not yet, or never will."""
        limit = self._relay.options.head_bytes
        end = data.find(b"\r\n\r\n") + 4
        if 4 <= end <= limit:
            return end
        if len(data) > limit or not data.startswith(b"HTTP/1."[: len(data)]):
            self._upstream_broke(PeerProtocolError("the response head is malformed or too long", 502))
        else:
            self._head_part = data
        return -1

    def _interim(self, head: ResponseHead, raw: bytes, t_ns: int) -> None:
        # RFC 9110 15.2: 1xx are forwarded, but not to HTTP/1.0, which does not know them.
        if self._client.is_11:
            try:
                sent = self._stream.write(response_lines(head, keep_alive=True, client_11=True))
            except OSError:
                self.client_gone()
                return
            if not sent:
                self.pause_upstream()
        if self.tapped:
            self.tapped = self._tap.offer(FrameKind.INTERIM, self.seq, t_ns, 0, raw)

    def _answer(self, head: ResponseHead, data: bytes, head_end: int, t_ns: int) -> None:
        """The final head, and whatever of the body came with it."""
        self.status = head.status
        self._keep_upstream = head.keep_alive
        end = -1
        if head.framing is NONE:
            end = head_end
        else:
            if not self._frame_answer(head):
                self._keep_client = False
            if head.framing is LENGTH and len(data) - head_end >= head.length:
                end = head_end + head.length
            else:
                self._scanner = scanner_for(head.framing, head.length, refused_trailers=FRAMING_TRAILERS)
                try:
                    found = self._scanner.feed(data[head_end:]) if len(data) > head_end else -1
                except PeerProtocolError as exc:
                    self._upstream_broke(exc)
                    return
                end = head_end + found if found >= 0 else -1
        if end >= 0:
            if len(data) > end:
                self._said_too_much()
                data = data[:end]
            if not self._request_end_ns:
                self._keep_client = False  # answered before it had asked: the rest is not awaited
        if self._relay.draining:
            self._keep_client = False
        lines = response_lines(
            head,
            keep_alive=self._keep_client,
            client_11=self._client.is_11,
            dechunk=self._dechunks(),
        )
        self._answered = True
        try:
            sent = self._stream.write(lines + self._reframed(data[head_end:]))
        except OSError:
            self.client_gone()
            return
        self.response_bytes += len(data)
        if self.tapped:
            tap, added_ns = self._tap, mono_ns() - t_ns
            if end >= 0:
                self.tapped = tap.offer(ANSWER, self.seq, t_ns, added_ns, data)
            else:
                self.tapped = tap.offer(FrameKind.RESPONSE_HEAD, self.seq, t_ns, added_ns, data[:head_end])
                if len(data) > head_end:
                    self.tapped = tap.offer(RESPONSE_DATA, self.seq, t_ns, added_ns, data[head_end:])
        if end >= 0:
            self._answer_complete()
        else:
            self._pass_body(head.framing)
            if not sent:
                self.pause_upstream()

    # What a client of HTTP/1.0 needs otherwise: relay/flow_http10.py.

    def _frame_answer(self, head: ResponseHead) -> bool:
        """False when the client can only be told the end by closing its connection."""
        return head.framing is not CLOSE

    def _dechunks(self) -> bool:
        return False

    def _reframed(self, body: bytes) -> bytes:
        return body

    def _said_too_much(self) -> None:
        """Drop the bytes that the upstream sent behind the end of its answer, and do not reuse it."""
        self._keep_upstream = False
        self._error = "the upstream sent more than its answer"
        self._route.pool.unsolicited += 1
        self._relay.warn("upstream_unsolicited", self._error)

    def pause_upstream(self) -> None:
        """The client is slow: read no more from the upstream until its socket has taken what we hold."""
        if self._upstream is not None and not self._paused_since_ns:
            self._paused_since_ns = mono_ns()
            self._upstream.pause()

    def _end_pause(self, now_ns: int) -> None:
        if self._paused_since_ns:
            self.paused_ns += now_ns - self._paused_since_ns
            self._paused_since_ns = 0

    def client_drained(self) -> None:
        """The client's socket has taken all we held."""
        now_ns = mono_ns()
        self.last_ns = now_ns
        if self._paused_since_ns:
            self._end_pause(now_ns)
            if self._upstream is not None:
                self._upstream.resume()
        if self._finishing:
            self._finish()

    def on_drained(self) -> None:
        """The upstream's socket has taken all we held."""
        self.last_ns = mono_ns()
        if self._request_end_ns:
            self._note_submit()
        else:
            self._stream.resume()

    def on_eof(self) -> None:
        if self._scanner is not None and self._client_sees_close():
            self._body_complete(mono_ns())
        else:
            self.on_lost(None)

    def _client_sees_close(self) -> bool:
        """The answer ends with the upstream's connection."""
        return isinstance(self._scanner, CloseScanner)

    def on_lost(self, error: OSError | None) -> None:
        self._drop_upstream()
        if self.over or self._finishing:
            return
        if self._again and self._reused and not self._head_part and not self._answered:
            self._retry(self._again)
            return
        how = "reset" if error is not None else "closed"
        outcome = Outcome.UPSTREAM_RESET if error is not None else Outcome.TRUNCATED
        if not self._answered:
            outcome = Outcome.UPSTREAM_RESET
            what = f"the upstream {how} the connection without an answer"
            self.fail(502, "upstream_closed", what, outcome)
        else:
            self.fail(
                502, "upstream_cut", f"the upstream {how} the connection in the middle of its answer", outcome
            )

    def _upstream_broke(self, exc: PeerProtocolError) -> None:
        self._relay.warn("upstream_protocol", str(exc))
        self._drop_upstream()
        self.fail(502, "upstream_protocol", f"the upstream broke HTTP: {exc}", Outcome.UPSTREAM_ERROR)

    def _switch(self, head: ResponseHead, raw: bytes, rest: bytes, t_ns: int) -> None:
        """101: from here on the two connections are one."""
        upstream = self._upstream
        assert upstream is not None
        self.status = 101
        self._answered = True
        self._keep_client = self._keep_upstream = False
        self.response_bytes += len(raw)
        try:
            self._stream.write(response_lines(head, keep_alive=True, client_11=True))
        except OSError:
            self.client_gone()
            return
        if self.tapped:
            added_ns = mono_ns() - t_ns
            self.tapped = self._tap.offer(FrameKind.RESPONSE_HEAD, self.seq, t_ns, added_ns, raw)
        if self.tapped:
            self.tapped = self._tap.offer(FrameKind.UPGRADED, self.seq, t_ns, 0)
        self._end_pause(mono_ns())  # from here on back-pressure is the tunnel's
        self._tunnel = tunnel = Tunnel(self, self._stream, upstream)
        early = self._client.hand_over()
        if rest:
            tunnel.down.on_data(rest, t_ns)
        if early and not self.over:
            tunnel.up.on_data(early, t_ns)

    def tunnelled(self, kind: int, data: bytes, t_ns: int) -> None:
        """The tunnel passed `data`."""
        self.last_ns = t_ns
        if kind == FrameKind.TUNNEL_UP:
            self.request_bytes += len(data)
        else:
            self.response_bytes += len(data)
        if self.tapped:
            self.tapped = self._tap.offer(kind, self.seq, t_ns, mono_ns() - t_ns, data)

    def tunnel_over(self, outcome: Outcome, error: str | None) -> None:
        """Both sides are closed."""
        self._outcome, self._error = outcome, error
        self._finish()

    # ---------------------------------------------------------------- the end

    def _body_complete(self, t_ns: int) -> None:
        if self.tapped:
            self.tapped = self._tap.offer(RESPONSE_END, self.seq, t_ns, 0)
        self._answer_complete()

    def _answer_complete(self) -> None:
        """All of the answer has been forwarded."""
        upstream = self._upstream
        self._upstream = None
        if upstream is not None:
            if isinstance(upstream, CompiledStream):
                upstream.reader.passage = None
            if (
                self._keep_upstream
                and self._request_end_ns
                and not upstream.pending
                and not self._upload_broken
            ):
                self._route.pool.give_back(upstream, self.last_ns)
            else:
                upstream.close()
        if not self._request_end_ns:
            self._keep_client = False
        if self._stream.pending:
            self._finishing = True
        else:
            self._finish()

    def fail(
        self, status: int, code: str, what: str, outcome: Outcome, fields: Headers | None = None
    ) -> None:
        """End the exchange badly: with an answer of our own, or by cutting one that has begun."""
        if self.over:
            return
        self._outcome, self._error = outcome, what
        self._drop_upstream()
        self._cancel_attempt()
        if self._answered:
            # Whatever is cut must look cut (RFC 9112 8): no last chunk, and no orderly close where only
            # the close tells the end.
            self._keep_client = False
            if self._stream.pending and not self._client_sees_close():
                self._finishing = True
            else:
                self._finish(cut=True)
            return
        self._answered = True
        self.status = status
        if not self._request_end_ns or self._relay.draining or outcome is Outcome.REJECTED:
            self._keep_client = False
        answer = own_answer(
            status, code, what, fields or [], close=not self._keep_client, body=self._method != b"HEAD"
        )
        try:
            sent = self._stream.write(answer)
        except OSError:
            self.client_gone()
            return
        if sent:
            self._finish()
        else:
            self._finishing = True

    def client_gone(self) -> None:
        """The client has left: the upstream must not go on working for nobody."""
        if self.over:
            return
        self._cancel_attempt()
        self._drop_upstream()
        if self._outcome is COMPLETE:
            self._outcome, self._error = Outcome.CLIENT_CANCELLED, "the client closed the connection"
        self._keep_client = False
        self._finish(cut=True)

    def check(self, now_ns: int) -> None:
        """Called now and then: end what does not move any more."""
        idle_ns = now_ns - self.last_ns
        if idle_ns > QUIET_NS:
            if self._upstream is not None:
                self._upstream.look_again()
                if self.over:
                    return
            if self._is_draining():
                self.last_ns = now_ns
                return
        if idle_ns < self._relay.options.idle_timeout:
            return
        if self._stream.pending:
            self._error = "the client accepted nothing for too long"
            self._outcome = Outcome.CLIENT_CANCELLED
            self.client_gone()
        elif self._tunnel is not None:
            self._tunnel.silent()
        elif not self._request_end_ns and not self._answered and not self._is_upstream_deaf():
            self._drop_upstream()
            self.fail(408, "request_timeout", "the request body did not arrive in time", Outcome.REJECTED)
        else:
            self.fail(
                504, "upstream_timeout", "the upstream was silent for too long", Outcome.UPSTREAM_TIMEOUT
            )

    def _is_draining(self) -> bool:
        """A side that did not take all at once has taken some of it since this was asked last."""
        acked_bytes = self._stream.acked_bytes if self._stream.pending else 0
        if self._upstream is not None and self._upstream.pending:
            acked_bytes += self._upstream.acked_bytes
        before, self._acked_bytes = self._acked_bytes, acked_bytes
        return acked_bytes != before

    def _is_upstream_deaf(self) -> bool:
        """It takes no more of the request."""
        return self._upstream is not None and self._upstream.pending > 0

    def cut_short(self) -> None:
        """The time to finish is up: ended by the tap, and neither side is to blame."""
        what = "the tap was stopped and its drain limit is over"
        self.fail(503, "tap_stopped", what, Outcome.TRUNCATED if self._answered else Outcome.REJECTED)
        if not self.over:
            self._finish(cut=True)  # a client that does not take what it is sent is not waited for

    def _cancel_attempt(self) -> None:
        if self._attempt is not None:
            self._attempt.cancel()
            self._attempt = None

    def _drop_upstream(self) -> None:
        if self._upstream is not None:
            self._upstream.close()
            self._upstream = None

    def _finish(self, *, cut: bool = False) -> None:
        """Over: tell the tap, and give the client's connection back."""
        if self.over:
            return
        self.over = True
        relay = self._relay
        relay.flows.discard(self)
        now_ns = mono_ns()
        self._end_pause(now_ns)
        relay.bytes_up += self.request_bytes
        relay.bytes_down += self.response_bytes
        if self.tapped:
            closing = Closing(
                outcome=self._outcome.value,
                status=self.status,
                error=self._error,
                paused_ns=self.paused_ns,
                lag_ns=relay.lag.worst_since(self.arrival_ns),
                connect_ns=self._connect_ns,
                request_bytes=self.request_bytes,
                response_bytes=self.response_bytes,
                retries=self._retries,
            )
            if self._dealt is not None:
                self._dealt.sign(closing)
            self._tap.close_exchange(self.seq, now_ns, closing)
        self._client.flow_over(
            now_ns,
            keep=self._keep_client,
            linger=not self._request_end_ns,
            abort=cut and self._client_sees_close(),
        )

"""Forward one exchange through the relay: request (`upload.py`), response, and a frame for each read.

For each read of the response, `Flow.on_data` finds whether the response ends in these bytes, sends them to
the client, and then reports them with their timestamp. Bodies are not parsed. With the compiled code,
`native/relay.pxi` does this for most reads of a body. An exchange that is not measured sends no frames.
"""

from typing import TYPE_CHECKING, Any, Final

from llmtap import native
from llmtap.channel.frames import Closing, FrameKind
from llmtap.clock import SystemClock
from llmtap.errors import PeerProtocolError
from llmtap.exchange.outcome import Outcome
from llmtap.net.stream import CompiledStream, Stream
from llmtap.protocol import http1
from llmtap.protocol.http1_response import begin_response_body, is_interim_flood, next_response_head
from llmtap.vantage.relay.heads import own_answer, response_lines
from llmtap.vantage.relay.tunnel import Tunnel
from llmtap.vantage.relay.upload import ExchangeClient, RelayContext, Upload

QUIET_NS: Final = 200_000_000
"""Time without a byte after which the relay checks for a reset: if a reset comes together with bytes, the
event loop stops watching the socket and does not report the reset (`PlainStream.look_again`)."""
READ_ON_NS: Final = 2_000_000_000
"""Time that a client has to send the rest of a request that has already been answered."""
# Module constants, since a lookup in the class would cost time at every read.
RESPONSE_DATA: Final = FrameKind.RESPONSE_DATA
RESPONSE_AT_ONCE: Final = FrameKind.RESPONSE_AT_ONCE
ANSWER: Final = FrameKind.ANSWER
COMPLETE: Final = Outcome.COMPLETE
CHUNKED, CLOSE = http1.Framing.CHUNKED, http1.Framing.CLOSE

mono_ns = SystemClock.mono_ns


class PythonFlowState:
    """State of a Flow that the compiled code (native/relay.pxi) also changes.

    `tapped`: reads of the answer's body are reported. `loan`: the forwarding thread has both sockets.
    """

    __slots__ = ("last_ns", "loan", "response_bytes", "seq", "tapped")

    def __init__(self) -> None:
        self.seq = 0
        self.tapped = False
        """Whether reads of the answer's body are reported to the meter."""
        self.last_ns = 0
        """Time of the latest read or write."""
        self.response_bytes = 0
        self.loan: Any = None
        """Record of the sockets that the forwarding thread has; None: this thread has them."""


if TYPE_CHECKING:
    FlowState = PythonFlowState
else:
    FlowState = PythonFlowState if native.compiled is None else native.compiled.FlowState


class Flow(FlowState):
    """One exchange between client and upstream. It is the handler of the upstream's stream."""

    __slots__ = (
        "_acked_bytes",
        "_answered",
        "_client",
        "_context",
        "_dechunker",
        "_error",
        "_head_part",
        "_interims",
        "_keep_client",
        "_keep_upstream",
        "_method",
        "_outcome",
        "_paused_since_ns",
        "_scanner",
        "_stream",
        "_tap",
        "_tunnel",
        "arrival_ns",
        "finishing",
        "over",
        "paused_ns",
        "reads_on",
        "status",
        "upload",
    )

    def __init__(self, context: RelayContext, client: ExchangeClient, stream: Stream) -> None:
        super().__init__()
        self._context = context
        self._client = client
        self._stream = stream  # stream of the client
        self._tap = context.tap
        self.upload = Upload(context, self, client, stream)
        self._scanner: http1.BodyScanner | None = None
        self._dechunker: http1.ChunkedScanner | None = None
        """Decodes the chunked coding for an HTTP/1.0 client; None: the coding is not removed."""
        self._head_part = b""
        """First bytes of the answer's head, whose rest has not arrived."""
        self._interims = 0
        """Number of interim (1xx) responses so far."""
        self._method = b""
        self._tunnel: Tunnel | None = None
        self._answered = False  # whether a byte of a final answer has been sent to the client
        self.reads_on = False  # whether to read the rest of the request after a failure, for the meter
        self.finishing = False  # whether the answer is complete, but not yet taken by the client's socket
        self._keep_client = True
        """Whether the client's connection can carry another request."""
        self._keep_upstream = False
        """Whether the upstream's connection can carry another request."""
        self._paused_since_ns = 0
        """Start of the present pause by a slow client; 0: no pause."""
        self._acked_bytes = 0  # bytes that slow sides have acknowledged, at the last check
        self._outcome = COMPLETE
        self._error: str | None = None
        self.over = False
        """Whether the exchange has ended."""
        self.status: int | None = None
        self.arrival_ns = 0
        self.paused_ns = 0
        """Total time in which a slow client paused the answer."""

    def start(self, head: http1.RequestHead, data: bytes, head_end: int, arrival_ns: int, t_ns: int) -> bytes:
        """Forward the request whose head ends at `head_end` of `data`; return the bytes behind its end."""
        self._method = head.method
        self._keep_client = head.keep_alive
        self.arrival_ns = arrival_ns
        self.last_ns = t_ns
        self._context.reporter.on_begin(self, arrival_ns)
        return self.upload.start(head, data, head_end, arrival_ns, t_ns)

    # ---------------------------------------------------------------- called by the upstream's stream

    def on_connected(self, stream: Stream, took_ns: int) -> None:
        if self.over:
            stream.close()
        else:
            self.upload.on_connected(stream, took_ns)

    def on_connect_failed(self, error: OSError) -> None:
        if not self.over:
            self.upload.on_connect_failed(error)

    def on_drained(self) -> None:
        self.last_ns = mono_ns()
        if not self.over:
            self.upload.on_drained()

    def on_data(self, data: bytes, t_ns: int) -> None:
        """Forward bytes of the response, read at `t_ns`, to the client, and report them to the meter.

        The scanner first finds the end of the body, so that no byte after it reaches the client. If the
        client's socket does not take all bytes, reading from the upstream pauses."""
        scanner = self._scanner
        if scanner is None:
            self._on_head_data(data, t_ns)
            return
        try:
            end = scanner.feed(data)
        except PeerProtocolError as exc:
            self._on_protocol_error(exc)
            return
        if end >= 0 and end < len(data):
            data = data[:end]
            self._drop_excess()
        try:
            sent = self._stream.write(data if self._dechunker is None else self._dechunk(data))
        except OSError:
            self.client_gone()
            return
        self.last_ns = t_ns
        self.response_bytes += len(data)
        if self.tapped:
            self.offer_data(t_ns, mono_ns() - t_ns, data)
        if end >= 0:
            self._body_complete(t_ns)
        elif not sent:
            self.pause_upstream()

    def offer_data(self, t_ns: int, added_ns: int, data: bytes) -> None:
        """Add a frame with bytes of the body. `added_ns`: time from their read (`t_ns`) to their sending."""
        upstream = self.upload.upstream
        if upstream is not None and upstream.resumed_ns > t_ns:
            # Subtract the time by which the client delayed the read; `paused_ns` reports it.
            added_ns -= upstream.resumed_ns - t_ns
        self.tapped = self._tap.offer(self._data_kind(data), self.seq, t_ns, added_ns, data)

    def _data_kind(self, body: bytes) -> int:
        """Return the kind of the frame for body bytes of the last read."""
        upstream = self.upload.upstream
        at_once = upstream is not None and upstream.came_at_once(body)
        return RESPONSE_AT_ONCE if at_once else RESPONSE_DATA

    def _dechunk(self, body: bytes) -> bytes:
        pieces: list[bytes] = []
        assert self._dechunker is not None
        self._dechunker.feed(body, pieces)
        return b"".join(pieces)

    def _pass_body(self, framing: http1.Framing) -> None:
        """Let compiled code forward the rest of the body, if it is available: it then replaces `on_data` for
        reads without special cases."""
        upstream, client = self.upload.upstream, self._stream
        if isinstance(upstream, CompiledStream) and isinstance(client, CompiledStream):
            assert native.compiled is not None
            upstream.reader.passage = native.compiled.Passage(
                self, client.reader, framing.value, self._scanner, self._tap.rows, self._context.forwarder
            )

    def may_be_lent(self) -> bool:
        """Return whether the forwarding thread can take over: only the body is left, and no side is slow."""
        upload, client = self.upload, self._stream
        upstream = upload.upstream
        return (
            upstream is not None
            and upload.end_ns > 0
            and not (self.over or self.finishing or upload.broken)
            and not (upstream.pending or upstream.paused or client.pending or client.paused)
        )

    def collect_frames(self) -> None:
        """Take the frames of the forwarding thread before later ones of this exchange are added."""
        self._tap.collect()

    def drop_measurement(self) -> None:
        """Count the exchange as dropped, because the forwarding thread had no room for a frame."""
        self._tap.drop(self.seq, self.last_ns, "overflow")

    def _on_head_data(self, data: bytes, t_ns: int) -> None:
        """Parse response heads; bytes after the last one are body."""
        self.last_ns = t_ns
        self.upload.repeatable_request = b""  # the server has answered, so the request must not be sent again
        if self.finishing or self.over:
            return
        data = self._head_part + data
        options = self._context.options
        while data and not self.over:
            try:
                match = next_response_head(
                    data,
                    self._method,
                    bytes_max=options.head_bytes,
                    fields_max=options.head_fields,
                    interims=self._interims,
                    waited_ns=t_ns - self.arrival_ns,
                )
                if match is not None and match[0].status == 101 and not self.upload.upgrade:
                    raise PeerProtocolError(
                        "it answered 101 (Switching Protocols) to a plain request: check its URL", 502
                    )
            except PeerProtocolError as exc:
                if is_interim_flood(self._interims, t_ns - self.arrival_ns):
                    self._context.refuse("interim_heads")
                self._on_protocol_error(exc)
                return
            if match is None:
                break
            head, start, end = match
            if head.status == 101:
                self._switch(head, data[start:end], data[end:], t_ns)
                return
            if start:
                data, end = data[start:], end - start
            if head.status >= 200:
                self._head_part = b""
                self._forward_head(head, data, end, t_ns)
                return
            self._interims += 1
            self._forward_interim(head, data[:end], t_ns)
            data = data[end:]
        self._head_part = data

    def _forward_interim(self, head: http1.ResponseHead, raw: bytes, t_ns: int) -> None:
        """Forward an interim (1xx) response, which HTTP/1.0 clients do not understand."""
        # RFC 9110 15.2: forward 1xx responses, except to HTTP/1.0 clients, which do not know them.
        if self._client.is_11:
            sent = self._send(response_lines(head, keep_alive=True, client_11=True))
            if sent is None:
                return
            if not sent:
                self.pause_upstream()
        self._tap.offer(FrameKind.INTERIM, self.seq, t_ns, 0, raw)

    def _send(self, data: bytes) -> bool | None:
        """Send bytes to the client, and return whether the kernel took all; None: the client has left."""
        try:
            return self._stream.write(data)
        except OSError:
            self.client_gone()
            return None

    def _forward_head(self, head: http1.ResponseHead, data: bytes, head_end: int, t_ns: int) -> None:
        """Forward the final response head and the body bytes that came with it."""
        self.status = head.status
        if head.status == 404:
            self.upload.note_not_found()
        self._keep_upstream = head.keep_alive
        is_11 = self._client.is_11
        try:
            end, self._scanner = begin_response_body(head, data, head_end)
        except PeerProtocolError as exc:
            self._on_protocol_error(exc)
            return
        if head.framing is CHUNKED and not is_11:
            self._dechunker = http1.ChunkedScanner()
        if self._dechunker is not None or head.framing is CLOSE:
            self._keep_client = False  # the close is the only sign of the answer's end for the client
        if end >= 0:
            if len(data) > end:
                self._drop_excess()
                data = data[:end]
            if not self.upload.end_ns:
                self._keep_client = False  # the rest of the request is still to come: do not wait for it
        if self._context.reporter.draining:
            self._keep_client = False
        lines = response_lines(head, keep_alive=self._keep_client, client_11=is_11, dechunk=not is_11)
        body = data[head_end:]
        self._answered = True
        sent = self._send(lines + (body if self._dechunker is None else self._dechunk(body)))
        if sent is None:
            return
        self.response_bytes += len(data)
        tap, added_ns = self._tap, mono_ns() - t_ns
        if end >= 0:
            if b"\n\n" in body and (kind := self._data_kind(body)) == RESPONSE_AT_ONCE:
                tap.offer(FrameKind.RESPONSE_HEAD, self.seq, t_ns, added_ns, data[:head_end])
                tap.offer(kind, self.seq, t_ns, added_ns, body)
                self._body_complete(t_ns)
            else:
                tap.offer(ANSWER, self.seq, t_ns, added_ns, data)
                self._answer_complete()
            return
        self.tapped = tap.offer(FrameKind.RESPONSE_HEAD, self.seq, t_ns, added_ns, data[:head_end])
        if body:
            self.tapped = tap.offer(self._data_kind(body), self.seq, t_ns, added_ns, body)
        if self._dechunker is None:
            self._pass_body(head.framing)
        if not sent:
            self.pause_upstream()

    def _drop_excess(self) -> None:
        """Record that the upstream sent bytes after its answer, so that its connection is not reused."""
        self._keep_upstream = False
        self._error = "the upstream sent more than its answer"
        self.upload.note_unsolicited()
        self._context.warn("upstream_unsolicited", self._error)

    def pause_upstream(self) -> None:
        """Stop reading from the upstream until the client's socket has taken all bytes that wait for it."""
        upstream = self.upload.upstream
        if upstream is not None and not self._paused_since_ns:
            self._paused_since_ns = mono_ns()
            upstream.pause()

    def _end_pause(self, now_ns: int) -> None:
        """Report for how long the client could take no more data."""
        if self._paused_since_ns:
            held_ns = now_ns - self._paused_since_ns
            self.paused_ns += held_ns
            self._paused_since_ns = 0
            self._tap.offer(FrameKind.HELD, self.seq, now_ns, held_ns)

    def client_drained(self) -> None:
        """Continue after the client's socket has taken all bytes or, if the answer is complete, after the
        rest of the request has arrived."""
        now_ns = mono_ns()
        self.last_ns = now_ns
        if self._paused_since_ns:
            self._end_pause(now_ns)
            if self.upload.upstream is not None:
                self.upload.upstream.resume()
        if self.finishing:
            self._finish()

    def on_eof(self) -> None:
        # The end of the connection completes a body only if the upstream gave neither a length nor chunks.
        # The same is true if chunks are removed for an HTTP/1.0 client: the last chunk must have arrived.
        if isinstance(self._scanner, http1.CloseScanner):
            self._body_complete(mono_ns())
        else:
            self.on_lost(None)

    def _client_sees_close(self) -> bool:
        """Whether the end of the connection is the only sign of the answer's end for the client."""
        return self._dechunker is not None or isinstance(self._scanner, http1.CloseScanner)

    def on_lost(self, error: OSError | None) -> None:
        self.upload.drop_upstream()
        if self.over or self.finishing:
            return
        how = "reset" if error is not None else "closed"
        if self._answered:
            outcome = Outcome.UPSTREAM_RESET if error is not None else Outcome.TRUNCATED
            what = f"the upstream {how} the connection in the middle of its answer: see its log"
            self.fail(502, "upstream_cut", what, outcome)
        elif self._head_part or not self.upload.retry():
            where = "in the middle of the head of its answer" if self._head_part else "without an answer"
            what = f"the upstream {how} the connection {where}: see its log"
            self.fail(502, "upstream_closed", what, Outcome.UPSTREAM_RESET)

    def _on_protocol_error(self, exc: PeerProtocolError) -> None:
        self._context.warn("upstream_protocol", str(exc))
        self.upload.drop_upstream()
        self.fail(502, "upstream_protocol", f"the upstream sent invalid HTTP: {exc}", Outcome.UPSTREAM_ERROR)

    # ---------------------------------------------------------------- after an upgrade

    def _switch(self, head: http1.ResponseHead, raw: bytes, rest: bytes, t_ns: int) -> None:
        """Handle status 101: make both connections a tunnel."""
        upstream = self.upload.upstream
        assert upstream is not None
        self.status = 101
        self._answered = True
        self._keep_client = self._keep_upstream = False
        self.response_bytes += len(raw)
        if self._send(response_lines(head, keep_alive=True, client_11=True)) is None:
            return
        self._tap.offer(FrameKind.RESPONSE_HEAD, self.seq, t_ns, mono_ns() - t_ns, raw)
        self._tap.offer(FrameKind.UPGRADED, self.seq, t_ns, 0)
        self._end_pause(mono_ns())  # the tunnel handles back-pressure from now on
        self._tunnel = tunnel = Tunnel(self._stream, upstream, self._on_tunnel_data, self._on_tunnel_end)
        early = self._client.hand_over()
        if rest:
            tunnel.down.on_data(rest, t_ns)
        if early and not self.over:
            tunnel.up.on_data(early, t_ns)

    def _on_tunnel_data(self, kind: int, data: bytes, t_ns: int) -> None:
        """Count and report bytes of a tunnel, such as those of a WebSocket. `kind`: their direction."""
        tunnel = self._tunnel
        assert tunnel is not None
        self.last_ns = t_ns
        source = (tunnel.up if kind == FrameKind.TUNNEL_UP else tunnel.down).source
        if kind == FrameKind.TUNNEL_UP:
            self.upload.request_bytes += len(data)
        else:
            self.response_bytes += len(data)
        if self.tapped:
            added_ns = mono_ns() - max(t_ns, source.resumed_ns)
            self.tapped = self._tap.offer(kind, self.seq, t_ns, added_ns, data)

    def _on_tunnel_end(self, outcome: Outcome, error: str | None) -> None:
        self._outcome, self._error = outcome, error
        self._finish()

    # ---------------------------------------------------------------- the end of the exchange

    def _body_complete(self, t_ns: int) -> None:
        """Report that the answer's body has ended."""
        self._tap.offer(FrameKind.RESPONSE_END, self.seq, t_ns, 0)
        self._answer_complete()

    def _answer_complete(self) -> None:
        """Handle the end of the response, which has been forwarded completely."""
        upload = self.upload
        if isinstance(upload.upstream, CompiledStream):
            upload.upstream.reader.passage = None
        upload.give_back(self.last_ns, keep=self._keep_upstream)
        if not upload.end_ns:
            self._keep_client = False
        if self._stream.pending:
            self.finishing = True
        else:
            self._finish()

    def fail(
        self, status: int, code: str, what: str, outcome: Outcome, fields: http1.Headers | None = None
    ) -> None:
        """End the exchange with an error response, or cut a response that has begun."""
        if self.over:
            return
        self._outcome, self._error = outcome, what
        self.upload.cancel()
        if self._answered:
            # RFC 9112 8: the client must see that the answer is incomplete. So send no last chunk, and reset
            # the connection if the close is the only sign of the end.
            self._keep_client = False
            if self._stream.pending and not self._client_sees_close():
                self.finishing = True
            else:
                self._finish(cut=True)
            return
        self._answered = True
        self.status = status
        if not self.upload.end_ns or self._context.reporter.draining or outcome is Outcome.REJECTED:
            self._keep_client = False
        answer = own_answer(
            status, code, what, fields or [], close=not self._keep_client, body=self._method != b"HEAD"
        )
        sent = self._send(answer)
        if sent is None:
            return
        self.finishing, self.reads_on = True, self.reads_on and sent
        if self.reads_on:
            self.last_ns = mono_ns()
            self._stream.resume()
        elif sent:
            self._finish()

    def client_gone(self) -> None:
        """Close the upstream connection after the client has disconnected, to stop the generation."""
        if self.over:
            return
        self.upload.cancel()
        if self._outcome is COMPLETE:
            self._outcome, self._error = Outcome.CLIENT_CANCELLED, "the client closed the connection"
        self._keep_client = False
        self._finish(cut=True)

    def check(self, now_ns: int) -> None:
        """End the exchange if an idle limit is exceeded. Called several times a second."""
        loan = self.loan
        if loan is not None:
            self.last_ns = loan.last_ns
            if now_ns - self.last_ns < self._context.options.idle_timeout:
                return  # The forwarding thread handles everything but this limit.
            loan.reclaim()
            loan.handle()
            if self.over:
                return
        idle_ns = now_ns - self.last_ns
        upstream = self.upload.upstream
        if idle_ns > QUIET_NS:
            if upstream is not None:
                upstream.look_again()
                if self.over:
                    return
            if self._is_draining():
                self.last_ns = now_ns
                return
        if idle_ns < (READ_ON_NS if self.reads_on else self._context.options.idle_timeout):
            return
        is_upstream_deaf = upstream is not None and upstream.pending > 0
        if self.reads_on:
            self._finish()
        elif self._stream.pending:
            self._error = "the client accepted nothing for relay.idle_timeout"
            self._outcome = Outcome.CLIENT_CANCELLED
            self.client_gone()
        elif self._tunnel is not None:
            self._tunnel.on_idle_limit()
        elif not self.upload.end_ns and not self._answered and not is_upstream_deaf:
            self.upload.drop_upstream()
            what = "the request body stopped: the client sent nothing for relay.idle_timeout"
            self.fail(408, "request_timeout", what, Outcome.REJECTED)
        else:
            what = "the upstream sent nothing for relay.idle_timeout"
            self.fail(504, "upstream_timeout", what, Outcome.UPSTREAM_TIMEOUT)

    def _is_draining(self) -> bool:
        """Return whether a slow side has taken bytes since the last call."""
        acked_bytes = self._stream.acked_bytes if self._stream.pending else 0
        upstream = self.upload.upstream
        if upstream is not None and upstream.pending:
            acked_bytes += upstream.acked_bytes
        before, self._acked_bytes = self._acked_bytes, acked_bytes
        return acked_bytes != before

    def cut_short(self) -> None:
        """End the exchange as `tap_error`, because the time limit for draining is over."""
        what = "llmtap was stopped and its drain time has passed: send the request again"
        self.fail(503, "tap_stopped", what, Outcome.TRUNCATED if self._answered else Outcome.REJECTED)
        if not self.over:
            self._finish(cut=True)  # do not wait for a client that does not read

    def _finish(self, *, cut: bool = False) -> None:
        """Report the end of the exchange, and let the client connection continue."""
        if self.over:
            return
        self.over = True
        upload, reporter = self.upload, self._context.reporter
        now_ns = mono_ns()
        self._end_pause(now_ns)
        reporter.on_end(self, upload.request_bytes, self.response_bytes)
        assignment = upload.assignment
        if assignment is not None:
            assignment.release_memory()
        if self.tapped:
            stall_ns = reporter.lag.worst_since(self.arrival_ns)
            has_exact_stamps = upload.has_exact_stamps and (
                not reporter.side or self._stream.stamped_since(self.arrival_ns)
            )
            closing = Closing(
                outcome=self._outcome,
                status=self.status,
                error=self._error,
                paused_ns=self.paused_ns,
                lag_ns=max(
                    reporter.stamp_error_since(self.arrival_ns),
                    upload.send_ns if has_exact_stamps else stall_ns,
                ),
                stall_ns=stall_ns,
                connect_ns=upload.connect_ns,
                connected_ns=upload.connected_ns,
                send_wait_ns=upload.send_wait_ns,
                request_bytes=upload.request_bytes,
                response_bytes=self.response_bytes,
                retries=upload.retries,
            )
            if assignment is not None:
                assignment.add_to_closing(closing)
            self._tap.close_exchange(self.seq, now_ns, closing)
        upload.detach()
        self._tunnel = None
        self._client.flow_over(
            now_ns, keep=self._keep_client, linger=not upload.end_ns, abort=cut and self._client_sees_close()
        )

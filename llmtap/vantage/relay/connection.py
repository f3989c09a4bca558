"""One client connection of the relay: reads requests one after another, and refuses malformed heads.

`relay.py` makes a `ClientConnection` for each accepted socket. The connection starts a Flow (`flow.py`) for
each request, and passes the body to it. Bytes that a client sends before its response is complete
(pipelining) are kept up to a bound. The connection is also read during a response, so that the relay notices
at once when the client disconnects.
"""

from collections.abc import Callable
from typing import Final

from llmtap.channel.frames import Closing
from llmtap.errors import PeerProtocolError
from llmtap.exchange.outcome import Outcome
from llmtap.net.stream import Stream
from llmtap.protocol.http1 import Headers, RequestHead, header_value, parse_request_head
from llmtap.vantage.relay.flow import QUIET_NS, Flow
from llmtap.vantage.relay.heads import own_answer, target_of
from llmtap.vantage.relay.upload import RelayContext

LINGER_NS: Final = 2_000_000_000
"""Time for which the relay reads on from a client (state LINGER) after an early answer, before it closes."""
FRESH_NS: Final = 500_000_000
"""Minimum time that a new connection has to send its first request if the relay drains."""
LINGER_BYTES: Final = 16 << 20
"""Maximum number of bytes that are read and ignored in the state LINGER."""
REJECTED_HEAD_BYTES: Final = 4_096
"""Maximum number of bytes of a refused head that the meter gets."""
_REFUSALS: Final = {431: "head_too_large", 505: "http_version"}
"""By status of the answer: reason under which a refused head is counted; default: `malformed_request`."""
_TLS: Final = b"\x16\x03"
"""First bytes of a TLS handshake (RFC 8446 5.1: type handshake, legacy version 3.x)."""
_CLIENT_ERRORS: Final = frozenset({"malformed_request", "http_version"})
"""Reasons with the outcome CLIENT_ERROR. All others are limits of llmtap, with the outcome REJECTED."""


HEAD, BODY, AHEAD, LINGER, TUNNEL, GONE = range(6)
"""States of a connection, by which the next bytes from the client are handled. AHEAD: they are of a later
request; the current one is complete, and its answer is under way. LINGER: they are read and ignored, because
otherwise closing the connection could destroy the answer on its way."""


class ClientConnection:
    """One client connection with its state. It is the handler of the client's stream."""

    __slots__ = (
        "_ahead_ns",
        "_ahead_paused",
        "_arrival_ns",
        "_buffer",
        "_context",
        "_empty_line_skipped",
        "_flow",
        "_has_served",
        "_lingered_bytes",
        "_on_closed",
        "_state",
        "_stream",
        "_wait_start_ns",
        "address",
        "is_11",
    )

    def __init__(
        self, context: RelayContext, address: bytes, on_closed: Callable[["ClientConnection"], None]
    ) -> None:
        self._context = context
        self._on_closed = on_closed
        """Function that is called when the connection has ended."""
        self.address = address
        self._stream: Stream | None = None
        self._state = HEAD
        """State, by which the next bytes from the client are handled: HEAD, BODY and so on."""
        self._flow: Flow | None = None
        self._buffer = b""
        """Bytes that are not processed yet: part of a head, or of a request that the client sent ahead."""
        self._arrival_ns = 0  # time of the first byte of the head that is being read
        self._wait_start_ns = 0  # start of the present wait: for a request, or in the state LINGER
        self._lingered_bytes = 0
        """Number of bytes that were read and ignored after the last answer."""
        self._ahead_paused = False  # whether reading is paused because `_buffer` is full
        self._ahead_ns = 0  # time of the latest read of the bytes in `_buffer`
        self._has_served = False  # whether an exchange has ended on this connection
        self._empty_line_skipped = False  # whether an empty line in front of this head has been skipped
        self.is_11 = True  # whether the current request is HTTP/1.1, and not 1.0

    def attach(self, stream: Stream, now_ns: int) -> None:
        """Set the client's stream, once it is open."""
        self._stream = stream
        self._wait_start_ns = now_ns

    # ---------------------------------------------------------------- the client stream's handler

    def on_data(self, data: bytes, t_ns: int) -> None:
        state = self._state
        if state == HEAD:
            if not self._buffer:
                self._arrival_ns = t_ns
            self._read_head(self._buffer + data if self._buffer else data, t_ns)
        elif state == BODY:
            assert self._flow is not None
            rest = self._flow.upload.feed(data, t_ns)
            if rest:
                self._store_ahead(rest, t_ns)
        elif state == AHEAD:
            self._store_ahead(data, t_ns)
        else:
            self._lingered_bytes += len(data)
            if self._lingered_bytes > LINGER_BYTES:
                self._close()

    def on_eof(self) -> None:
        # Treat the end of the client's side as a disconnect: no HTTP client half-closes and waits.
        if self._flow is not None:
            self._flow.client_gone()
        else:
            self._close()

    def on_lost(self, error: OSError | None) -> None:
        if self._flow is not None:
            self._flow.client_gone()
        self._forget()

    def on_drained(self) -> None:
        if self._flow is not None:
            self._flow.client_drained()
        elif self._state == LINGER and self._stream is not None:
            self._stream.shutdown_write()

    # ---------------------------------------------------------------- request heads

    def _read_head(self, data: bytes, t_ns: int) -> None:
        options = self._context.options
        if not self._empty_line_skipped:
            # RFC 9112 2.2: one empty line before a request is ignored.
            if data == b"\r":
                self._buffer = data
                return
            if data.startswith(b"\r\n"):
                self._empty_line_skipped = True
                data = data[2:]
        if not data:
            self._buffer = data
            return
        end = data.find(b"\r\n\r\n") + 4
        if end < 4 or end > options.head_bytes:
            if len(data) > options.head_bytes:
                what = f"the request head is longer than relay.head_bytes ({options.head_bytes} bytes)"
                self._reject(431, "head_too_large", what, data, t_ns)
            elif data.startswith(_TLS):
                what = "the request is TLS, but this port speaks plain HTTP"
                self._context.warn("tls_on_plain_port", f"{what}: use http://, or set relay.tls_certificate")
                self._reject(400, "malformed_request", what, data, t_ns)
            elif data[0] <= 0x20 or data[0] >= 0x7F:
                self._reject(400, "malformed_request", "the request does not begin as HTTP", data, t_ns)
            elif b"\n\n" in data:  # for the client, the head ends here: without an answer it would wait
                what = "the lines of the request head must end with CRLF, not only with LF"
                self._reject(400, "malformed_request", what, data, t_ns)
            else:
                self._buffer = data
            return
        raw = data[:end]
        self._buffer = b""
        self._empty_line_skipped = False
        try:
            head = parse_request_head(raw)
            if len(head.headers) > options.head_fields:
                limit = f"relay.head_fields ({options.head_fields})"
                raise PeerProtocolError(f"the request head has more fields than {limit}", 431)
            if not target_of(head):
                raise PeerProtocolError("the request target must be a path, or an http(s) URL with a host")
        except PeerProtocolError as exc:
            code = _REFUSALS.get(exc.status, "malformed_request")
            self._reject(exc.status, code, str(exc), raw, t_ns)
            return
        self.is_11 = head.version == (1, 1)
        if head.method in (b"OPTIONS", b"TRACE") and not self._may_forward(head, raw, t_ns):
            return
        if len(self._context.running) >= options.streams:
            fields: Headers = [(b"Retry-After", b"1")]
            what = f"relay.streams ({options.streams}) requests are already in progress in this relay process"
            self._reject(503, "tap_overloaded", what, raw, t_ns, fields)
            return
        assert self._stream is not None
        flow = self._flow = Flow(self._context, self, self._stream)
        self._state = BODY
        rest = flow.start(head, data, end, self._arrival_ns, t_ns)
        if rest:
            self._store_ahead(rest, t_ns)
            if flow.over:
                # The exchange ended inside `start`, so its end did not trigger reading the bytes kept here.
                self._context.loop.call_soon(self._read_ahead)

    def _may_forward(self, head: RequestHead, raw: bytes, t_ns: int) -> bool:
        """Return whether a request can be forwarded, and reduce its Max-Forwards by 1 (OPTIONS and TRACE, RFC
        9110 7.6.2). If Max-Forwards is 0, answer the request and return False."""
        value = header_value(head.headers, b"max-forwards")
        if value is None or not value.isdigit() or len(value) > 9:
            return True
        left = int(value)
        if left == 0:
            if head.method == b"OPTIONS":
                self._reject(
                    200, "max_forwards", "Max-Forwards is 0, so the request was not forwarded", raw, t_ns
                )
            else:
                self._reject(405, "max_forwards", "the method TRACE is not supported", raw, t_ns)
            return False
        head.headers = [
            (n, b"%d" % (left - 1) if n.lower() == b"max-forwards" else v) for n, v in head.headers
        ]
        return True

    def _reject(
        self, status: int, code: str, what: str, raw: bytes, t_ns: int, fields: Headers | None = None
    ) -> None:
        """Answer a request that is not forwarded. Close the connection, because it is unclear where the next
        request begins."""
        assert self._stream is not None
        context = self._context
        self._buffer = b""
        if status >= 400:
            context.refuse(code)
        seq, _ = context.tap.open(self._arrival_ns, raw[:REJECTED_HEAD_BYTES])
        answer = own_answer(status, code, what, fields or [], close=True, body=not raw.startswith(b"HEAD "))
        try:
            self._stream.write(answer)
        except OSError:
            self._close()
        else:
            self._linger(t_ns)
        outcome = Outcome.CLIENT_ERROR if code in _CLIENT_ERRORS else Outcome.REJECTED
        closing = Closing(outcome=outcome.value, status=status, error=what, request_bytes=len(raw))
        context.tap.close_exchange(seq, context.now_ns(), closing)

    # ---------------------------------------------------------------- called by the flow

    def request_complete(self) -> None:
        """Record that the current request has been read to its end."""
        self._state = AHEAD

    def hand_over(self) -> bytes:
        """Become a tunnel. Return the bytes that the client had sent before its upgrade was answered."""
        self._state = TUNNEL
        early, self._buffer = self._buffer, b""
        if self._ahead_paused:
            self._ahead_paused = False
            assert self._stream is not None
            self._stream.resume()
        return early

    def flow_over(self, now_ns: int, *, keep: bool, linger: bool, abort: bool) -> None:
        """Continue after the end of an exchange: read the next request, or close the connection."""
        self._flow = None
        self._has_served = True
        stream = self._stream
        if stream is None or stream.closed:
            self._forget()
            return
        if abort:
            stream.abort()
            self._forget()
        elif not keep or (
            self._context.reporter.draining and not self._buffer and not self._context.last_request_ns
        ):
            if linger:
                self._linger(now_ns)
            else:
                self._close()
        else:
            self._state = HEAD
            self._wait_start_ns = now_ns
            if self._ahead_paused:
                self._ahead_paused = False
                stream.resume()
            if self._buffer:
                # Use call_soon: a thousand pipelined requests must not become a thousand nested calls.
                self._context.loop.call_soon(self._read_ahead)

    def _read_ahead(self) -> None:
        """Begin the request whose first bytes came during the previous one."""
        if self._state == HEAD and self._buffer and self._stream is not None:
            data, self._buffer = self._buffer, b""
            self._read_head(data, self._ahead_ns)
            if self._flow is not None:
                self._flow.last_ns = self._context.now_ns()

    def _store_ahead(self, data: bytes, t_ns: int) -> None:
        """Store bytes of a further request until the present one has ended."""
        if not self._buffer:
            self._arrival_ns = t_ns
        self._ahead_ns = t_ns
        self._buffer += data
        if len(self._buffer) > self._context.options.pipelined_bytes and self._stream is not None:
            self._ahead_paused = True
            self._stream.pause()

    # ---------------------------------------------------------------- time limits; end of the connection

    def check(self, now_ns: int) -> None:
        """Apply the time limits; called by the relay several times a second."""
        options = self._context.options
        if self._flow is not None:
            if self._flow.loan is not None:
                self._flow.check(now_ns)
                return
            stream = self._stream
            # While back-pressure stops reading, only this check notices that the client has disconnected. In
            # a tunnel, the end of the client's direction does not end the other, so the check does not apply.
            if self._state != TUNNEL and stream is not None and stream.paused and stream.peer_left():
                self._flow.client_gone()
                return
            if self._stream is not None and now_ns - self._flow.last_ns > QUIET_NS:
                self._stream.look_again()
            self._flow.check(now_ns)
        elif self._state == LINGER:
            if now_ns - self._wait_start_ns > LINGER_NS:
                self._close()
        elif self._state == HEAD:
            if self._buffer:
                if now_ns - self._arrival_ns > options.head_timeout:
                    what = "the request head did not arrive completely within relay.head_timeout"
                    self._reject(408, "head_timeout", what, self._buffer, now_ns)
            elif now_ns - self._wait_start_ns > (
                max(FRESH_NS, self._context.last_request_ns)
                if self._context.reporter.draining
                else options.keepalive_timeout
            ):
                self._close()

    def drain(self, now_ns: int) -> None:
        """Close an idle connection, now or after the time `last_request_ns`. A connection that has not had a
        request yet stays open for its first one."""
        if self._flow is not None or self._state != HEAD or self._buffer:
            return
        if self._context.last_request_ns:
            self._wait_start_ns = now_ns
        # is_alive() is False if a request is already in the socket. Such a connection stays open, so that the
        # request is answered.
        elif self._has_served and self._stream is not None and self._stream.is_alive():
            self._close()

    def kill(self) -> None:
        """Close the connection at once, because the time limit for draining is over."""
        if self._flow is not None:
            self._flow.cut_short()
        self._close()

    def _linger(self, now_ns: int) -> None:
        """Read and ignore what the client still sends, so that it gets the answer before a reset."""
        # RFC 9112 9.6: close in stages. Otherwise a TCP reset could destroy the answer before the client has
        # read it.
        assert self._stream is not None
        self._state = LINGER
        self._wait_start_ns = now_ns
        if not self._stream.pending:
            self._stream.shutdown_write()
        self._stream.resume()

    def _close(self) -> None:
        if self._stream is not None:
            self._stream.close()
        self._forget()

    def _forget(self) -> None:
        self._state = GONE
        self._stream = None
        self._buffer = b""
        self._on_closed(self)

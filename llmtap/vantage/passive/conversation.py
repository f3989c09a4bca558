"""Convert the HTTP/1.1 requests and responses of one connection to the frames of a relay. No IO.

`connection.py` feeds a `Conversation` with the ordered bytes of both directions; the frames go to a
`FrameSink`, the channel to the meter (`watcher.py`) or `file_vantage.py`. Differences from a relay: every
time is that of a packet; the added latency is always 0; SUBMIT has the time of the packet with the request's
last byte, and CLOSE that of the packet that ended the exchange. `lag_ns` of CLOSE is the error of these
times.
"""

import re
from typing import Final, Protocol

from llmtap.channel.frames import Closing, FrameKind
from llmtap.errors import LlmtapError, PeerProtocolError
from llmtap.exchange.outcome import Outcome
from llmtap.protocol import http1
from llmtap.protocol.http1_response import begin_response_body, next_response_head

HEAD_BYTES_MAX: Final = 64 << 10
PIPELINED_MAX: Final = 64
"""Maximum number of requests on a connection that wait for their answer."""
_METHOD: Final = re.compile(rb"[A-Z]{1,16}\Z|[A-Z]{3,16} (?:\Z|[/*h])")
"""Matches the beginning of a request: its method, which is possibly incomplete, and the target's."""
_METHOD_BYTES: Final = 18
_CHECKED_BYTES: Final = 16
"""Number of bytes of an answer that are checked for the beginning of an HTTP status line."""
LENGTH: Final = http1.Framing.LENGTH


class UnfollowableError(LlmtapError):
    """The connection does not carry HTTP/1.1; `kind` is `encrypted`, `http2` or `not_http`."""

    def __init__(self, kind: str) -> None:
        super().__init__(f"the connection does not carry HTTP/1.1: {kind}")
        self.kind = kind
        """Reason, by which ignored connections are counted."""


class FrameSink(Protocol):
    """Receiver of the frames of exchanges, with the same methods as a `Tap` (`llmtap/channel/`)."""

    def count_if_skipped(self, head: http1.RequestHead) -> bool:
        """Return whether a rule excludes the request from measurement. If so, count it as skipped."""

    def open(self, t_ns: int, data: bytes, extra_ns: int = 0, kind: int = FrameKind.OPEN) -> tuple[int, bool]:
        """Begin an exchange. Return its number, and whether its frames are taken."""
        ...

    def offer(self, kind: int, seq: int, t_ns: int, extra_ns: int, data: bytes = b"") -> bool:
        """Send a frame of an exchange; return False if there is no room."""
        ...

    def close_exchange(self, seq: int, t_ns: int, closing: Closing) -> None:
        """Send the last frame of an exchange."""
        ...

    def drop(self, seq: int, t_ns: int, reason: str) -> None:
        """Give up an exchange, and count it by the reason."""
        ...


class _Exchange:
    """A request on the connection, until its answer is complete."""

    __slots__ = (
        "began_ns",
        "error_ns",
        "interims",
        "method",
        "paused_ns",
        "request_bytes",
        "response_bytes",
        "seq",
        "status",
        "tapped",
    )

    def __init__(self, method: bytes, began_ns: int) -> None:
        self.method = method
        self.began_ns = began_ns
        self.seq = 0
        self.tapped = False
        """Whether the channel still accepts frames of the exchange."""
        self.status: int | None = None
        self.interims = 0  # number of 1xx responses so far
        self.request_bytes = self.response_bytes = 0
        self.paused_ns = 0  # total time in which the client's receive window was closed
        """Time in which the client's receive window was closed."""
        self.error_ns = 0
        """Longest time by which a packet was stamped before its predecessor, so the error of all times."""


class Conversation:
    """Requests and answers of a connection. Its methods get the bytes of each side in order, and raise
    PeerProtocolError for bytes that are not HTTP."""

    __slots__ = (
        "_client_left_ns",
        "_error_ns",
        "_pending",
        "_request_exchange",
        "_request_head",
        "_request_head_ns",
        "_request_scanner",
        "_response_exchange",
        "_response_head",
        "_response_scanner",
        "_server_ended",
        "_sink",
        "_tunnel",
        "_window_closed_ns",
        "began",
        "over",
    )

    def __init__(self, sink: FrameSink) -> None:
        self._sink = sink
        self.began = False  # whether the connection has had a complete request head
        self.over = False
        """Whether the server has closed its side of the connection; for a tunnel, whether both sides have."""
        self._pending: list[_Exchange] = []  # exchanges whose answer is not complete, the oldest first
        self._request_head = bytearray()  # bytes of an incomplete request head
        self._request_head_ns = 0  # time of the first byte in `_request_head`
        self._error_ns = 0  # error of the times of the request that begins next
        self._request_exchange: _Exchange | None = None  # exchange whose request body is under way
        self._request_scanner: http1.BodyScanner | None = None
        self._response_head = bytearray()  # bytes of an incomplete response head
        self._response_exchange: _Exchange | None = None  # exchange whose response body is under way
        self._response_scanner: http1.BodyScanner | None = None
        self._tunnel: _Exchange | None = None  # exchange that has become a tunnel
        self._client_left_ns = 0  # time of the client's FIN or RST; 0: none
        self._server_ended = False  # whether the server has sent a FIN
        self._window_closed_ns = 0  # start of the present pause of the client; 0: no pause

    @property
    def is_busy(self) -> bool:
        """Whether a request or its answer is under way."""
        return bool(self._pending or self._request_head)

    # ---------------------------------------------------------------- the request

    def feed_request(self, data: bytes, t_ns: int) -> None:
        """Process the next bytes from the client. Raises UnfollowableError if the connection's first bytes do
        not begin an HTTP/1.1 request."""
        while data:
            x, scanner = self._request_exchange, self._request_scanner
            if self._tunnel is not None:
                self._tunnel.request_bytes += len(data)
                self._offer(self._tunnel, FrameKind.TUNNEL_UP, t_ns, data)
                return
            if x is None or scanner is None:
                data = self._read_request_head(data, t_ns)
                continue
            end = scanner.feed(data)
            rest = b""
            if end >= 0:
                data, rest = data[:end], data[end:]
            x.request_bytes += len(data)
            self._offer(x, FrameKind.REQUEST_DATA, t_ns, data)
            if end >= 0:
                self._request_exchange = self._request_scanner = None
                self._offer(x, FrameKind.REQUEST_END, t_ns)
                self._offer(x, FrameKind.SUBMIT, t_ns)
            data = rest

    def _read_request_head(self, data: bytes, t_ns: int) -> bytes:
        """Process bytes that begin or continue a request head. Return the bytes after the head or, if `data`
        has the whole request, after the request."""
        buffer = self._request_head
        if not buffer:
            # RFC 9112 2.2: an empty line before a request is ignored.
            data = data.lstrip(b"\r\n")
            self._request_head_ns = t_ns
        searched = max(0, len(buffer) - 3)
        buffer += data
        if searched < _METHOD_BYTES and buffer and _METHOD.match(buffer) is None:
            raise self._unexpected_bytes_error(bytes(buffer[:8]))
        end = buffer.find(b"\r\n\r\n", searched) + 4
        if end < 4:
            if len(buffer) > HEAD_BYTES_MAX:
                raise PeerProtocolError(f"the request head must have at most {HEAD_BYTES_MAX} bytes")
            return b""
        whole = bytes(buffer)
        if whole.startswith(b"PRI * HTTP/2"):
            raise self._unexpected_bytes_error(whole)
        head = http1.parse_request_head(whole[:end])
        if len(self._pending) >= PIPELINED_MAX:
            raise PeerProtocolError(
                f"over {PIPELINED_MAX} requests of a connection wait for answers, the maximum"
            )
        buffer.clear()
        self.began = True
        x = _Exchange(head.method, self._request_head_ns)
        x.error_ns, self._error_ns = self._error_ns, 0
        skipped = self._sink.count_if_skipped(head)
        self._pending.append(x)
        stop = end
        if head.framing is LENGTH:
            stop += head.length
        if head.framing is http1.Framing.CHUNKED or stop > len(whole):
            x.request_bytes = end
            if not skipped:
                x.seq, x.tapped = self._sink.open(self._request_head_ns, whole[:end])
            self._request_exchange = x
            self._request_scanner = http1.scanner_for(head.framing, head.length)
            return whole[end:]
        x.request_bytes = stop
        if skipped:
            pass
        elif self._request_head_ns == t_ns:
            x.seq, x.tapped = self._sink.open(t_ns, whole[:stop], t_ns, FrameKind.SENT)
        else:
            x.seq, x.tapped = self._sink.open(self._request_head_ns, whole[:stop], t_ns)
            self._offer(x, FrameKind.SUBMIT, t_ns)
        return whole[stop:]

    def _unexpected_bytes_error(self, data: bytes) -> LlmtapError:
        """Return the error for bytes of the client that do not begin a request."""
        self._request_head.clear()
        if self.began:
            return PeerProtocolError("the client's bytes begin no request: were packets lost?")
        # The kind selects the hint of the log line: `UNFOLLOWED_HINTS` in watcher.py.
        if data.startswith(b"\x16\x03"):
            return UnfollowableError("encrypted")  # the bytes begin a TLS record
        return UnfollowableError("http2" if data.startswith(b"PRI * HTTP/2") else "not_http")

    # ---------------------------------------------------------------- the answer

    def feed_response(self, data: bytes, t_ns: int) -> None:
        """Process the next bytes from the server."""
        if self._window_closed_ns:
            self._end_pause(t_ns)
        while data:
            x, scanner = self._response_exchange, self._response_scanner
            if x is None or scanner is None:
                data = self._read_response_head(data, t_ns)
                continue
            end = scanner.feed(data)
            rest = b""
            if end >= 0:
                data, rest = data[:end], data[end:]
            x.response_bytes += len(data)
            if x.tapped:
                x.tapped = self._sink.offer(FrameKind.RESPONSE_DATA, x.seq, t_ns, 0, data)
            if end >= 0:
                self._offer(x, FrameKind.RESPONSE_END, t_ns)
                self._close(x, t_ns, Outcome.COMPLETE)
            data = rest

    def _read_response_head(self, data: bytes, t_ns: int) -> bytes:
        """Process bytes of an answer's head, or of a tunnel. Return the bytes after the head."""
        if self._tunnel is not None:
            self._tunnel.response_bytes += len(data)
            self._offer(self._tunnel, FrameKind.TUNNEL_DOWN, t_ns, data)
            return b""
        if not self._pending:
            raise PeerProtocolError("the server sent bytes without a request: were packets lost?")
        x, buffer = self._pending[0], self._response_head
        searched = max(0, len(buffer) - 3)
        buffer += data
        if (
            searched > _CHECKED_BYTES
            and buffer.find(b"\r\n\r\n", searched) < 0
            and len(buffer) <= HEAD_BYTES_MAX
        ):
            return b""  # do not copy and parse the head for each packet: packets can have one byte each
        whole = bytes(buffer)
        match = next_response_head(
            whole,
            x.method,
            bytes_max=HEAD_BYTES_MAX,
            fields_max=HEAD_BYTES_MAX,
            interims=x.interims,
            waited_ns=t_ns - x.began_ns,
        )
        if match is None:
            return b""
        buffer.clear()
        head, start, end = match
        x.response_bytes += start
        whole, end = whole[start:], end - start
        if head.status < 200 and head.status != 101:
            x.interims += 1
            x.response_bytes += end
            self._offer(x, FrameKind.INTERIM, t_ns, whole[:end])
            return whole[end:]
        x.status = head.status
        if head.status == 101:
            x.response_bytes += end
            self._offer(x, FrameKind.RESPONSE_HEAD, t_ns, whole[:end])
            self._offer(x, FrameKind.UPGRADED, t_ns)
            self._tunnel = x
            return whole[end:]
        stop, scanner = begin_response_body(head, whole, end)
        if stop >= 0:
            x.response_bytes += stop
            self._offer(x, FrameKind.ANSWER, t_ns, whole[:stop])
            self._close(x, t_ns, Outcome.COMPLETE)
            return whole[stop:]
        x.response_bytes += len(whole)
        self._response_exchange, self._response_scanner = x, scanner
        self._offer(x, FrameKind.RESPONSE_HEAD, t_ns, whole[:end])
        if len(whole) > end:
            self._offer(x, FrameKind.RESPONSE_DATA, t_ns, whole[end:])
        return b""

    def on_window_closed(self, t_ns: int) -> None:
        """Begin a pause, because the client's receive window is 0."""
        if self._response_exchange is not None and not self._window_closed_ns:
            self._window_closed_ns = t_ns

    def _end_pause(self, t_ns: int) -> None:
        """The client can take data again: add the pause to its exchange."""
        if self._response_exchange is not None:
            self._response_exchange.paused_ns += t_ns - self._window_closed_ns
        self._window_closed_ns = 0

    def on_time_step_back(self, by_ns: int) -> None:
        """Record that a packet was stamped `by_ns` before its predecessor. The times of the exchanges under
        way have at least this error."""
        if self._request_head or not self._pending:
            self._error_ns = max(self._error_ns, by_ns)
        for x in self._pending:
            x.error_ns = max(x.error_ns, by_ns)

    # ---------------------------------------------------------------- the end of exchanges

    def on_fin(self, t_ns: int, *, by_client: bool) -> None:
        """Handle a FIN. A client's FIN alone ends no exchange: the client can still wait for the answer."""
        if by_client:
            self._client_left_ns = t_ns
        else:
            self._server_ended = True
        if self._tunnel is not None:
            if self._client_left_ns and self._server_ended:
                self.over = True
                self._close(self._tunnel, t_ns, Outcome.COMPLETE)
            return
        if by_client:
            return
        self.over = True
        exchange = self._response_exchange
        if isinstance(self._response_scanner, http1.CloseScanner) and exchange is not None:
            self._offer(exchange, FrameKind.RESPONSE_END, t_ns)
            self._close(exchange, t_ns, Outcome.COMPLETE)
        self._end_all(t_ns, "closed")

    def on_rst(self, t_ns: int, *, by_client: bool) -> None:
        self.over = True
        if by_client and not self._client_left_ns:
            self._client_left_ns = t_ns
        self._end_all(t_ns, "reset")

    def give_up(self, t_ns: int, reason: str) -> None:
        """End the exchanges under way, because no more packets of the connection are processed."""
        if self._client_left_ns:
            self._end_all(t_ns, "closed")
        self.drop_exchanges(t_ns, reason)

    def _end_all(self, t_ns: int, how: str) -> None:
        """End all running exchanges, because the connection ended; `how`: "closed" or "reset"."""
        while self._pending:
            x = self._pending[0]
            if self._client_left_ns:
                self._close(x, t_ns, Outcome.CLIENT_CANCELLED, "the client closed the connection")
            elif x.status is None:
                error = f"the upstream {how} the connection without an answer"
                self._close(x, t_ns, Outcome.UPSTREAM_RESET, error)
            else:
                outcome = Outcome.UPSTREAM_RESET if how == "reset" else Outcome.TRUNCATED
                self._close(
                    x, t_ns, outcome, f"the upstream {how} the connection in the middle of its answer"
                )

    def drop_exchanges(self, t_ns: int, reason: str) -> None:
        """Drop all exchanges under way; the next bytes of the client must begin a request."""
        if self._request_head:  # the request has begun, so it counts as an exchange
            seq, _ = self._sink.open(self._request_head_ns, bytes(self._request_head))
            self._sink.drop(seq, t_ns, reason)
        for x in self._pending:
            if x.seq:  # 0: the exchange is not measured
                self._sink.drop(x.seq, t_ns, reason)
        self._pending.clear()
        self._request_head.clear()
        self._response_head.clear()
        self._request_exchange = self._request_scanner = None
        self._response_exchange = self._response_scanner = self._tunnel = None
        self._window_closed_ns = 0

    def _offer(self, x: _Exchange, kind: int, t_ns: int, data: bytes = b"") -> None:
        """Send a frame of an exchange, unless the channel has dropped the exchange."""
        if x.tapped:
            x.tapped = self._sink.offer(kind, x.seq, t_ns, 0, data)

    def _close(self, x: _Exchange, t_ns: int, outcome: Outcome, error: str | None = None) -> None:
        """End the oldest exchange of the connection."""
        del self._pending[0]
        self._response_exchange = self._response_scanner = self._tunnel = None
        self._response_head.clear()
        if self._window_closed_ns:
            x.paused_ns += t_ns - self._window_closed_ns
            self._window_closed_ns = 0
        if x.tapped:
            x.tapped = False
            closing = Closing(
                outcome=outcome.value,
                status=x.status,
                error=error,
                paused_ns=x.paused_ns,
                lag_ns=x.error_ns,
                request_bytes=x.request_bytes,
                response_bytes=x.response_bytes,
            )
            self._sink.close_exchange(x.seq, t_ns, closing)

"""Report one request and its response inside an application as the frames of a relay (`AppExchange`).

The two middlewares call it with heads and body bytes; it sends frames through the `Emitter`. `arrival` is the
time of the call of the app, `request_end` that at which the server had the last request bytes, `submit` that
at which the app received them. So TTFT includes the work of the app and its upstream, but no network. `added`
is the time that the middleware itself needed since the message before. Heads have no Transfer-Encoding,
because bodies have no chunks here.
"""

from collections.abc import Iterable
from typing import Final

from llmtap.channel.frames import Closing, FrameKind
from llmtap.exchange.outcome import Outcome
from llmtap.vantage.middleware.emitter import Emitter, mono_ns

Fields = Iterable[tuple[bytes, bytes]]

_CODING: Final = b"transfer-encoding"
_HOST: Final = b"host"
_BODILESS: Final = (204, 304)
# By name: an enum's member would be looked up in its class, and its value in the member, for every message.
OPEN: Final = FrameKind.OPEN
SENT: Final = FrameKind.SENT
REQUEST_DATA: Final = FrameKind.REQUEST_DATA
REQUEST_END: Final = FrameKind.REQUEST_END
SUBMIT: Final = FrameKind.SUBMIT
RESPONSE_HEAD: Final = FrameKind.RESPONSE_HEAD
RESPONSE_DATA: Final = FrameKind.RESPONSE_DATA
RESPONSE_END: Final = FrameKind.RESPONSE_END


class AppExchange:
    """One exchange in an application. No method raises: an internal error drops the exchange.

    `head`: by `request_head`; `arrival_ns`: when the app was called.
    """

    __slots__ = (
        "_bodiless", "_emitter", "_head", "_method", "_request_bytes", "_response_bytes", "_submitted",
        "_tap", "arrival_ns", "begun", "over", "own_ns", "paused_ns", "request_over", "seq",
        "status",
    )  # fmt: skip

    def __init__(self, emitter: Emitter, method: str, head: bytes, arrival_ns: int) -> None:
        self._emitter = emitter
        self._tap = emitter.tap
        self._method = method
        self._head = head
        self._bodiless = False
        self._request_bytes = len(head)
        self._response_bytes = 0
        self._submitted = False
        self.arrival_ns = arrival_ns
        self.begun = False
        self.over = False
        self.own_ns = 0
        """Time that the middleware itself used since the last frame that reported it."""
        self.paused_ns = 0
        self.request_over = False
        self.seq = 0
        self.status: int | None = None
        emitter.began(self, arrival_ns)

    # ---------------------------------------------------------------- the request

    def asked_whole(self) -> None:
        """The request has no body: it is complete at the call."""
        try:
            self.request_over = self._submitted = True
            self._begin(self._head, mono_ns(), SENT)
        except Exception as exc:
            self.give_up(exc)

    def asked(self, data: bytes, t_ns: int, *, last: bool, submit_ns: int | None = None) -> None:
        """The app gets `data` of the request's body, which the server had at `t_ns`.

        `submit_ns`: time at which the app got it; None: now.
        """
        if self.over or self.request_over:
            return
        try:
            self._request_bytes += len(data)
            if self.begun:
                if data:
                    self._tap.offer(REQUEST_DATA, self.seq, t_ns, 0, data)
                if last:
                    self._tap.offer(REQUEST_END, self.seq, t_ns, 0)
            elif last:
                self._begin(self._head + data, t_ns)
            else:
                self._begin(self._head)
                if data:
                    self._tap.offer(REQUEST_DATA, self.seq, t_ns, 0, data)
            if last:
                self.request_over = True
                if not self._submitted:
                    self._submitted = True
                    now_ns = mono_ns() if submit_ns is None else submit_ns
                    self._tap.offer(SUBMIT, self.seq, now_ns, now_ns - t_ns)
        except Exception as exc:
            self.give_up(exc)

    def _begin(self, data: bytes, whole_ns: int = 0, kind: int = OPEN) -> None:
        self.begun = True
        self.seq, _ = self._tap.open(self.arrival_ns, data, whole_ns, kind)

    # ---------------------------------------------------------------- the answer

    def answered(self, status: int, fields: Fields, t_ns: int) -> None:
        """The app sent the response head at `t_ns`."""
        if self.over:
            return
        try:
            if not self.begun:
                self._begin(self._head)
            if not self._submitted:
                # It answers before it has read all of the request.
                self._submitted = True
                self._tap.offer(SUBMIT, self.seq, self.arrival_ns, 0)
            self.status = status
            self._bodiless = self._method == "HEAD" or status < 200 or status in _BODILESS
            head = response_head(status, fields)
            self._response_bytes += len(head)
            own_ns, self.own_ns = self.own_ns, 0
            self._tap.offer(RESPONSE_HEAD, self.seq, t_ns, own_ns, head)
        except Exception as exc:
            self.give_up(exc)

    def said(self, data: bytes, t_ns: int) -> None:
        """The app sent `data` of the response body at `t_ns`."""
        if self.over or self._bodiless:
            return
        try:
            if type(data) is not bytes:
                data = bytes(data)
            self._response_bytes += len(data)
            own_ns, self.own_ns = self.own_ns, 0
            self._tap.offer(RESPONSE_DATA, self.seq, t_ns, own_ns, data)
        except Exception as exc:
            self.give_up(exc)

    @property
    def turns(self) -> int:
        """Turns of the loop so far, for `paused`."""
        return self._emitter.turns

    def paused(self, turns: int, wait_ns: int) -> None:
        """The server took `wait_ns` for a message passed to it at `turns`.

        It waited for a slow client if the loop turned meanwhile; waits of less than 10 ms may go unseen.
        """
        if self._emitter.turns != turns:
            self.paused_ns += wait_ns

    def handed_on(self, passed_ns: int) -> None:
        """Add the middleware's own time since the server took a message at `passed_ns`."""
        self.own_ns += mono_ns() - passed_ns

    # ---------------------------------------------------------------- ends

    def complete(self, t_ns: int, passed_ns: int) -> None:
        """The app sent the last of its answer at `t_ns`; the server had taken it at `passed_ns`."""
        if self.over:
            return
        try:
            self._tap.offer(RESPONSE_END, self.seq, t_ns, 0)
            self._close(Outcome.COMPLETE, passed_ns)
        except Exception as exc:
            self.give_up(exc)

    def client_gone(self) -> None:
        """The client left before the end of the response."""
        self._end(Outcome.CLIENT_CANCELLED, "the client closed the connection")

    def cut(self, how: str, status: int | None = None) -> None:
        """The app has ended, maybe before its answer; `how` completes "the app ...".

        `status`: the server's answer for an app that has not begun one.
        """
        if self.over:
            return
        if self.status is not None:
            self._end(Outcome.TRUNCATED, f"the app {how} in the middle of its answer")
        else:
            self.status = status
            self._end(Outcome.UPSTREAM_ERROR, f"the app {how} without an answer")

    def leave_unmeasured(self, reason: str) -> None:
        """Stop measuring the exchange; count it as dropped for `reason`."""
        if self.over:
            return
        try:
            if self.begun:
                self._emitter.tap.drop(self.seq, mono_ns(), reason)
            else:
                self._emitter.pass_unmeasured(reason)
        except Exception as exc:
            self._emitter.failed(exc)
        self._finish()

    def give_up(self, error: Exception) -> None:
        """Drop the exchange after an internal error."""
        self._emitter.failed(error)
        self.leave_unmeasured("middleware_error")

    def _end(self, outcome: Outcome, error: str) -> None:
        if self.over:
            return
        try:
            if not self.begun:
                self._begin(self._head)
            self._close(outcome, mono_ns(), error)
        except Exception as exc:
            self.give_up(exc)

    def _close(self, outcome: Outcome, t_ns: int, error: str | None = None) -> None:
        closing = Closing(
            outcome=outcome.value,
            status=self.status,
            error=error,
            paused_ns=self.paused_ns,
            lag_ns=self._emitter.lag.worst_since(self.arrival_ns),
            request_bytes=self._request_bytes,
            response_bytes=self._response_bytes,
        )
        self._tap.close_exchange(self.seq, t_ns, closing)
        self._finish()

    def _finish(self) -> None:
        self.over = True
        self._emitter.ended(self, self._request_bytes, self._response_bytes)


def request_head(method: str, target: bytes, version: str, fields: Fields) -> bytes:
    """Return the head of a request without chunks; `version` is `1.0`, or anything else for 1.1.

    HTTP/1.1, also in place of HTTP/2, must have a Host.
    """
    is_10 = version == "1.0"
    lines = [method.encode("latin-1"), b" ", target, b" HTTP/1.0\r\n" if is_10 else b" HTTP/1.1\r\n"]
    has_host = is_10
    for name, value in fields:
        bare = name.lower()
        if bare != _CODING:
            lines += (name, b": ", value, b"\r\n")
            has_host = has_host or bare == _HOST
    lines.append(b"\r\n" if has_host else b"host:\r\n\r\n")
    return b"".join(lines)


def response_head(status: int, fields: Fields) -> bytes:
    """Return the head of an answer without chunks."""
    lines = [b"HTTP/1.1 %d \r\n" % status]
    for name, value in fields:
        if name.lower() != _CODING:
            lines += (name, b": ", value, b"\r\n")
    lines.append(b"\r\n")
    return b"".join(lines)

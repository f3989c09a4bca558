"""Report an application's requests to a meter: `AppExchange` makes their frames, `Emitter` sends the frames.

The two middlewares call an AppExchange with heads and body bytes. Its timestamps: `arrival` is when the
server called the app, `request_end` when the server had received the request's last byte, `submit` when the
app received that byte. So TTFT includes the work of the app and its upstream, but no network. `added` is the
time that the middleware itself used since the previous message. Heads have no Transfer-Encoding, because
servers pass bodies to an app without chunk framing.

Each event loop has one Emitter (`Emitters`). It connects to the meter, reports the application's status, and
logs a warning if no meter listens. The meter treats an application as one more relay, with the same bounded
channel. Exchanges that do not fit into the channel, or that begin without a meter, are dropped and counted.

Only an invalid option raises an exception, in `Emitters(...)`; the requests of the application never get one.
An error in llmtap's code drops the exchange (`middleware_error`) and is logged once for each exception class,
without its text, which could quote a header.
"""

import asyncio
import logging
import os
import secrets
import traceback
from collections.abc import Callable, Iterable
from functools import wraps
from typing import Concatenate, Final, ParamSpec

from llmtap.channel import SOCKET_PATH_BYTES_MAX, is_socket_replaceable
from llmtap.channel.frames import Closing, FrameKind
from llmtap.clock import Clock, SystemClock
from llmtap.errors import ConfigError
from llmtap.exchange.outcome import Outcome
from llmtap.net.lag import make_lag_meter
from llmtap.vantage.reporter import PROBE_GRAIN_NS, STATUS_S, Reporter

TAP_BYTES: Final = 32 << 20
"""Default maximum size of all frames that wait for the meter, the same as of a relay (`relay.tap_bytes`)."""
TAP_BYTES_MIN: Final = 64 << 10
"""Minimum of `tap_bytes`: it must hold a request head, for which most servers allow 64 KiB."""
DRAIN_S: Final = 2.0
"""Maximum time that an app waits at its end for the meter to acknowledge the last frames, as in a relay."""
NO_METER_S: Final = 2.0
"""Time without a meter after which a warning is logged."""

_TRANSFER_ENCODING: Final = b"transfer-encoding"
_STATUSES_WITHOUT_BODY: Final = (204, 304)
P = ParamSpec("P")

log = logging.getLogger(__name__)
mono_ns = SystemClock.mono_ns


class Emitter(Reporter):
    """Reporter of one event loop of an app. Call `start` and `close` on that loop."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, path: str, tap_bytes: int, clock: Clock | None = None
    ) -> None:
        # The middleware takes timestamps when the app calls it, not when a socket is read. A stall of the
        # loop delays the app's answer as well: it is real latency, not an error, so `blind_ns` stays 0.
        lag = make_lag_meter(PROBE_GRAIN_NS)
        name = f"app-{secrets.token_hex(3)}-{os.getpid()}"
        super().__init__(
            loop, path, tap_bytes, lag, clock or SystemClock(), name=name, vantage="middleware", guest=True
        )
        self.closed = False
        self._path = path
        self._missing_timer: asyncio.TimerHandle | None = None
        """Timer of the warning that there is no meter."""
        self._was_connected = False  # whether the meter was connected at the previous report
        self._logged_errors: set[str] = set()  # names of the exception classes that have been logged
        """Errors that are logged already, to log each only once."""
        self._report_timer: asyncio.TimerHandle | None = None
        """Timer of the next status report."""

    def start(self) -> None:
        """Connect to the meter as soon as it listens, and begin to report."""
        if is_socket_replaceable(self._path):
            warn("event=meter_socket_exposed socket=%s hint=%r", self._path, "chmod 700 its directory")
        self.tap.connect()
        self._report_timer = self._loop.call_later(STATUS_S, self._on_report)
        self._missing_timer = self._loop.call_later(NO_METER_S, self._warn_without_meter)

    def pass_unmeasured(self, reason: str) -> None:
        """Count an exchange that is not measured: as opened, and as dropped for `reason`."""
        ledger = self.tap.ledger
        ledger.drop(ledger.open(), reason)

    def on_failure(self, error: BaseException) -> None:
        """Log an error of llmtap's code, once for each exception class."""
        kind = type(error).__name__
        if kind not in self._logged_errors:
            self._logged_errors.add(kind)
            log_failure(error)

    async def close(self) -> None:
        """Send a final status, wait up to DRAIN_S for the meter's acknowledgement, and disconnect."""
        self.closed = self.draining = True
        for timer in (self._report_timer, self._missing_timer):
            if timer is not None:
                timer.cancel()
        self.stop_probe()
        self.tap.status(self.status())
        await self.tap.drain(DRAIN_S)
        self.tap.close()

    def _warn_without_meter(self) -> None:
        if not self.tap.connected:
            event, hint = "no_meter", f"llmtap meter --listen-socket {self._path}"
            if _is_denied(self._path):
                event = "meter_denied"
                hint = f"run `llmtap meter` as the user of this application (uid {os.geteuid()})"
            warn("event=%s socket=%s exchanges=unmeasured hint=%r", event, self._path, hint)

    def _on_report(self) -> None:
        self._report_timer = self._loop.call_later(STATUS_S, self._on_report)
        if self._was_connected and not self.tap.connected:
            self._missing_timer = self._loop.call_later(NO_METER_S, self._warn_without_meter)
        self._was_connected = self.tap.connected
        try:
            self.report()
        except Exception as exc:
            self.on_failure(exc)


def _is_denied(path: str) -> bool:
    """Return whether this user cannot use a socket, because its permissions or its directory's deny it."""
    try:
        os.stat(path)
    except OSError as exc:
        return isinstance(exc, PermissionError)
    return not os.access(path, os.W_OK, effective_ids=True)


class Emitters:
    """The emitters of an app, one for each event loop; the first request of a loop creates it."""

    def __init__(self, socket: str, tap_bytes: int) -> None:
        """Raises ConfigError for an invalid setting. It is raised here, so that no request gets it."""
        if not socket:
            raise ConfigError("socket", "is empty", "set it to the path of `llmtap meter --listen-socket`")
        if len(os.fsencode(socket)) > SOCKET_PATH_BYTES_MAX:
            raise ConfigError(
                "socket",
                f"is longer than {SOCKET_PATH_BYTES_MAX} bytes, the system's limit",
                "use a shorter path",
            )
        if tap_bytes < TAP_BYTES_MIN:
            problem = f"must be at least {TAP_BYTES_MIN:,} bytes, got {tap_bytes:,}"
            raise ConfigError("tap_bytes", problem, "leave it out to use the default")
        self._socket = socket
        self._tap_bytes = tap_bytes
        self._emitters: dict[asyncio.AbstractEventLoop, Emitter] = {}
        """By event loop: its emitter."""
        self._is_failure_logged = False
        """Whether it is logged already that no emitter could be made."""

    def current(self) -> Emitter | None:
        """Return the running loop's emitter, or None if it cannot be made (logged once). Never raises."""
        try:
            loop = asyncio.get_running_loop()
            emitter = self._emitters.get(loop)
            if emitter is None or emitter.closed:
                emitter = Emitter(loop, self._socket, self._tap_bytes)
                emitter.start()
                self._emitters = {
                    **{known: one for known, one in self._emitters.items() if not known.is_closed()},
                    loop: emitter,
                }
            return emitter
        except Exception as exc:
            if not self._is_failure_logged:
                self._is_failure_logged = True
                log_failure(exc)
            return None

    async def close(self) -> None:
        """Close the running loop's emitter. Never raises."""
        try:
            emitter = self._emitters.pop(asyncio.get_running_loop(), None)
            if emitter is not None:
                await emitter.close()
        except Exception as exc:
            log_failure(exc)


def log_failure(error: BaseException) -> None:
    """Log the class and the place of an error, but not its text, which could quote a header."""
    frames = traceback.extract_tb(error.__traceback__)
    where = f"{os.path.basename(frames[-1].filename)}:{frames[-1].lineno}" if frames else "?"
    warn("event=middleware_error kind=%s where=%s further=counted", type(error).__name__, where)


def warn(text: str, *values: object) -> None:
    """Log a warning. If the application has no log handler, write it to stderr with a prefix and the time."""
    if not log.hasHandlers():
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("llmtap %(asctime)s %(levelname)s %(message)s"))
        logging.getLogger("llmtap").addHandler(handler)
    log.warning(text, *values)


Fields = Iterable[tuple[bytes, bytes]]


def _only_while_measured(method: Callable[Concatenate["AppExchange", P], None]) -> Callable[..., None]:
    """Make a method do nothing after the end of the exchange, and drop the exchange if the method fails."""

    @wraps(method)
    def call_guarded(self: "AppExchange", *args: P.args, **kwargs: P.kwargs) -> None:
        if not self.is_over:
            try:
                method(self, *args, **kwargs)
            except Exception as exc:
                self.give_up(exc)

    return call_guarded


class AppExchange:
    """One exchange in an application. No method raises: an internal error drops the exchange.

    `head`: result of `request_head`; `arrival_ns`: time when the app was called.
    """

    __slots__ = (
        "_emitter",
        "_has_no_body",
        "_head",
        "_is_submitted",
        "_method",
        "_request_bytes",
        "_response_bytes",
        "_tap",
        "arrival_ns",
        "has_begun",
        "is_over",
        "own_ns",
        "paused_ns",
        "request_over",
        "seq",
        "status",
    )

    def __init__(self, emitter: Emitter, method: str, head: bytes, arrival_ns: int) -> None:
        self._emitter = emitter
        self._tap = emitter.tap
        self._method = method
        self._head = head
        """Head of the request, which is sent with the first frame."""
        self._has_no_body = False  # whether the answer has no body, even if the app sends bytes
        self._request_bytes = len(head)
        self._response_bytes = 0
        self._is_submitted = False  # whether the time at which the app had the whole request is reported
        self.arrival_ns = arrival_ns
        self.has_begun = False  # whether the first frame has been sent
        self.is_over = False
        """Whether the exchange has ended or is no longer measured."""
        self.own_ns = 0  # time used by the middleware since the last frame that reported it
        self.paused_ns = 0  # total time in which the server waited for a slow client
        self.request_over = False  # whether the app has received the whole request
        self.seq = 0
        self.status: int | None = None
        emitter.on_begin(self, arrival_ns)

    # ---------------------------------------------------------------- the request

    @_only_while_measured
    def request_without_body(self) -> None:
        """Record that the request has no body, so that it is complete when the app is called."""
        self.request_over = self._is_submitted = True
        self._send_first_frame(self._head, mono_ns(), FrameKind.SENT)

    @_only_while_measured
    def request_data(self, data: bytes, t_ns: int, *, last: bool, submit_ns: int | None = None) -> None:
        """Report `data`, bytes of the request's body that the server received at `t_ns`.

        `last`: the body ends with them. `submit_ns`: time at which the app received them; None: now.
        """
        if self.request_over:
            return
        self._request_bytes += len(data)
        if last and not self.has_begun:
            self._send_first_frame(self._head + data, t_ns)
        else:
            if not self.has_begun:
                self._send_first_frame(self._head)
            if data:
                self._tap.offer(FrameKind.REQUEST_DATA, self.seq, t_ns, 0, data)
            if last:
                self._tap.offer(FrameKind.REQUEST_END, self.seq, t_ns, 0)
        if last:
            self.request_over = True
            if not self._is_submitted:
                self._is_submitted = True
                now_ns = mono_ns() if submit_ns is None else submit_ns
                self._tap.offer(FrameKind.SUBMIT, self.seq, now_ns, now_ns - t_ns)

    def _send_first_frame(self, data: bytes, whole_ns: int = 0, kind: int = FrameKind.OPEN) -> None:
        """Report the begin of the exchange. `whole_ns`: end of the request, if `data` has all of it."""
        self.has_begun = True
        self.seq, _ = self._tap.open(self.arrival_ns, data, whole_ns, kind)

    # ---------------------------------------------------------------- the answer

    @_only_while_measured
    def answer_head(self, status: int, fields: Fields, t_ns: int) -> None:
        """Report the response head, which the app sent at `t_ns`."""
        if not self.has_begun:
            self._send_first_frame(self._head)
        if not self._is_submitted:
            # The app answers before it has read the whole request, so the arrival stands for the submit time.
            self._is_submitted = True
            self._tap.offer(FrameKind.SUBMIT, self.seq, self.arrival_ns, 0)
        self.status = status
        self._has_no_body = self._method == "HEAD" or status < 200 or status in _STATUSES_WITHOUT_BODY
        self._send_frame(FrameKind.RESPONSE_HEAD, t_ns, response_head(status, fields))

    @_only_while_measured
    def answer_data(self, data: bytes, t_ns: int) -> None:
        """Report `data`, bytes of the response body that the app sent at `t_ns`."""
        if not self._has_no_body:
            self._send_frame(FrameKind.RESPONSE_DATA, t_ns, data if type(data) is bytes else bytes(data))

    def _send_frame(self, kind: int, t_ns: int, data: bytes) -> None:
        self._response_bytes += len(data)
        own_ns, self.own_ns = self.own_ns, 0
        self._tap.offer(kind, self.seq, t_ns, own_ns, data)

    @property
    def turns(self) -> int:
        """Number of rounds of the event loop so far, with which `add_pause` detects a wait."""
        return self._emitter.turns

    def add_pause(self, turns: int, wait_ns: int) -> None:
        """Add a pause if the server waited for a slow client before it took a message.

        `turns`: value of the property `turns` when the message was passed to the server; `wait_ns`: time
        until the server took it. If the event loop made a round in this time, the server waited. A wait of
        less than 10 ms can be missed.
        """
        if self._emitter.turns != turns:
            self.paused_ns += wait_ns
            self._tap.offer(FrameKind.HELD, self.seq, mono_ns(), wait_ns)

    def add_own_time(self, passed_ns: int) -> None:
        """Add the time that the middleware used since the server took a message at `passed_ns`."""
        self.own_ns += mono_ns() - passed_ns

    # ---------------------------------------------------------------- the end of the exchange

    @_only_while_measured
    def complete(self, t_ns: int, passed_ns: int) -> None:
        """Record that the app sent the end of its answer at `t_ns`, and the server took it at `passed_ns`."""
        self._tap.offer(FrameKind.RESPONSE_END, self.seq, t_ns, 0)
        self._close(Outcome.COMPLETE, passed_ns)

    def on_client_disconnect(self) -> None:
        """Record that the client disconnected before the end of the response."""
        self._end(Outcome.CLIENT_CANCELLED, "the client closed the connection")

    def on_app_end(self, how: str, status: int | None = None) -> None:
        """Record that the app has ended, possibly before its answer. `how`: rest of the sentence "the app
        ...".

        `status`: status with which the server answers if the app has not begun an answer.
        """
        if self.status is not None:
            self._end(Outcome.TRUNCATED, f"the app {how} in the middle of its answer")
        else:
            self.status = status
            self._end(Outcome.UPSTREAM_ERROR, f"the app {how} without an answer")

    def leave_unmeasured(self, reason: str) -> None:
        """Stop measuring the exchange; count it as dropped for `reason`."""
        if self.is_over:
            return
        try:
            if self.has_begun:
                self._emitter.tap.drop(self.seq, mono_ns(), reason)
            else:
                self._emitter.pass_unmeasured(reason)
        except Exception as exc:
            self._emitter.on_failure(exc)
        self._finish()

    def give_up(self, error: Exception) -> None:
        """Drop the exchange after an internal error."""
        self._emitter.on_failure(error)
        self.leave_unmeasured("middleware_error")

    @_only_while_measured
    def _end(self, outcome: Outcome, error: str) -> None:
        if not self.has_begun:
            self._send_first_frame(self._head)
        self._close(outcome, mono_ns(), error)

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
        self.is_over = True
        self._emitter.on_end(self, self._request_bytes, self._response_bytes)


def request_head(method: str, target: bytes, version: str, fields: Fields) -> bytes:
    """Return the request head as bytes, without Transfer-Encoding, because the body is reported without chunk
    framing.

    `version`: `1.0`; any other value counts as 1.1. HTTP/1.1 requires a Host, so an empty one is added to a
    head without it, such as that of an HTTP/2 request.
    """
    is_10 = version == "1.0"
    lines = [method.encode("latin-1"), b" ", target, b" HTTP/1.0\r\n" if is_10 else b" HTTP/1.1\r\n"]
    has_host = is_10
    for name, value in fields:
        lower = name.lower()
        if lower != _TRANSFER_ENCODING:
            lines += (name, b": ", value, b"\r\n")
            has_host = has_host or lower == b"host"
    lines.append(b"\r\n" if has_host else b"host:\r\n\r\n")
    return b"".join(lines)


def response_head(status: int, fields: Fields) -> bytes:
    """Return the response head as bytes, without Transfer-Encoding, because the body is reported without
    chunk framing."""
    lines = [b"HTTP/1.1 %d \r\n" % status]
    for name, value in fields:
        if name.lower() != _TRANSFER_ENCODING:
            lines += (name, b": ", value, b"\r\n")
    lines.append(b"\r\n")
    return b"".join(lines)

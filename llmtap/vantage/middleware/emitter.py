"""Connection of an application with the middleware to its meter: one Emitter for each event loop.

`Emitters` returns the one of the running loop. An `Emitter` connects, reports the application's status, and
warns where no meter is there.

To the meter an application is one more relay, with the same bounded channel. Exchanges that do not fit, or
find no meter, are dropped whole and counted.

Only a wrong option raises, in `Emitters(...)`; nothing raises into a request of the application. An error in
llmtap's code drops the exchange (`middleware_error`) and is logged once for each kind, without its text,
which could quote a header.
"""

import asyncio
import logging
import os
import secrets
import traceback
from typing import Final

from llmtap.channel.channel import SOCKET_PATH_BYTES_MAX, replaceable
from llmtap.clock import Clock, SystemClock
from llmtap.errors import ConfigError
from llmtap.net.lag import make_lag_meter
from llmtap.vantage.reporter import PROBE_GRAIN_NS, STATUS_S, Reporter

TAP_BYTES: Final = 32 << 20
"""Maximum bytes of frames waiting for the meter, as for a relay (`relay.tap_bytes`)."""
TAP_BYTES_MIN: Final = 64 << 10
"""Half of it is for exchanges that run already, and a request head alone may have 64 KiB in most servers."""
DRAIN_S: Final = 2.0
"""Maximum time that the end of an app waits for the meter's last acknowledgement, as in a relay."""
NO_METER_S: Final = 2.0

log = logging.getLogger(__name__)
mono_ns = SystemClock.mono_ns


class Emitter(Reporter):
    """The reporter of one event loop of an app. `start` and `close` it on that loop."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, path: str, tap_bytes: int, clock: Clock | None = None
    ) -> None:
        # Stamps are of calls, not of reads: what a stalled loop makes late is the app's own answer. Only the
        # call itself may have waited, so nothing is added for stalls between two probes.
        lag = make_lag_meter(PROBE_GRAIN_NS)
        name = f"app-{secrets.token_hex(3)}-{os.getpid()}"
        super().__init__(
            loop, path, tap_bytes, lag, clock or SystemClock(), name=name, vantage="middleware", guest=True
        )
        self.closed = False
        self._path = path
        self._missing: asyncio.TimerHandle | None = None
        self._had_meter = False
        self._failures: set[str] = set()
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Connect to the meter as soon as it is there, and begin to report."""
        if replaceable(self._path):
            warn("event=meter_socket_exposed socket=%s hint=%r", self._path, "chmod 700 its directory")
        self.tap.connect()
        self._timer = self._loop.call_later(STATUS_S, self._on_report)
        self._missing = self._loop.call_later(NO_METER_S, self._warn_without_meter)

    def pass_unmeasured(self, reason: str) -> None:
        """Number and count an exchange that is not measured."""
        ledger = self.tap.ledger
        ledger.drop(ledger.open(), reason)

    def failed(self, error: BaseException) -> None:
        """Log an error of our own code, once for each kind."""
        kind = type(error).__name__
        if kind not in self._failures:
            self._failures.add(kind)
            log_failure(error)

    async def close(self) -> None:
        """Send the last status, wait DRAIN_S at most for the meter to have everything, and disconnect."""
        self.closed = self.draining = True
        for timer in (self._timer, self._missing):
            if timer is not None:
                timer.cancel()
        self.stop_probe()
        self.tap.status(self.status())
        await self.tap.drain(DRAIN_S)
        self.tap.close()

    def _warn_without_meter(self) -> None:
        if not self.tap.connected:
            event, hint = "no_meter", f"llmtap meter --listen-socket {self._path}"
            if _denied(self._path):
                event = "meter_denied"
                hint = f"run `llmtap meter` as the user of this application (uid {os.geteuid()})"
            warn("event=%s socket=%s exchanges=unmeasured hint=%r", event, self._path, hint)

    def _on_report(self) -> None:
        self._timer = self._loop.call_later(STATUS_S, self._on_report)
        if self._had_meter and not self.tap.connected:
            self._missing = self._loop.call_later(NO_METER_S, self._warn_without_meter)
        self._had_meter = self.tap.connected
        try:
            self.report()
        except Exception as exc:
            self.failed(exc)


def _denied(path: str) -> bool:
    """Return whether permissions keep this user from a socket."""
    try:
        os.stat(path)
    except OSError as exc:
        return isinstance(exc, PermissionError)
    return not os.access(path, os.W_OK, effective_ids=True)


class Emitters:
    """An emitter for each event loop that the app runs on, made by the first request of the loop."""

    def __init__(self, socket: str, tap_bytes: int) -> None:
        """Raises ConfigError: wrong settings are reported at the start, and never later."""
        if not socket:
            raise ConfigError("socket", "is empty", "the path given to `llmtap meter --listen-socket`")
        if len(os.fsencode(socket)) > SOCKET_PATH_BYTES_MAX:
            raise ConfigError("socket", f"is longer than {SOCKET_PATH_BYTES_MAX} bytes, the system's limit")
        if tap_bytes < TAP_BYTES_MIN:
            raise ConfigError("tap_bytes", f"must be at least {TAP_BYTES_MIN}")
        self._socket = socket
        self._tap_bytes = tap_bytes
        self._by_loop: dict[asyncio.AbstractEventLoop, Emitter] = {}
        self._failed = False

    def here(self) -> Emitter | None:
        """Return the running loop's emitter, or None if there can be none, logged once. Never raises."""
        try:
            loop = asyncio.get_running_loop()
            emitter = self._by_loop.get(loop)
            if emitter is None or emitter.closed:
                emitter = Emitter(loop, self._socket, self._tap_bytes)
                emitter.start()
                self._by_loop = {
                    **{known: one for known, one in self._by_loop.items() if not known.is_closed()},
                    loop: emitter,
                }
            return emitter
        except Exception as exc:
            if not self._failed:
                self._failed = True
                log_failure(exc)
            return None

    async def close(self) -> None:
        """Close the running loop's emitter. Never raises."""
        try:
            emitter = self._by_loop.pop(asyncio.get_running_loop(), None)
            if emitter is not None:
                await emitter.close()
        except Exception as exc:
            log_failure(exc)


def log_failure(error: BaseException) -> None:
    """Log the kind and the place of an error, and nothing of its text."""
    frames = traceback.extract_tb(error.__traceback__)
    where = f"{os.path.basename(frames[-1].filename)}:{frames[-1].lineno}" if frames else "?"
    warn("event=middleware_error kind=%s where=%s further=counted", type(error).__name__, where)


def warn(text: str, *values: object) -> None:
    """Log a warning; in an application without log handlers, to stderr with prefix and time."""
    if not log.hasHandlers():
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("llmtap %(asctime)s %(levelname)s %(message)s"))
        logging.getLogger("llmtap").addHandler(handler)
    log.warning(text, *values)

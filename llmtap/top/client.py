"""HTTP client of the admin API (`Admin`), its polling for the open view (`Feed`), and the options of
`llmtap top`.

`Admin.get` returns the JSON of a path, or raises `Trouble` with the reason and a hint. `Feed` requests the
summary and the documents of the open view, and keeps the newest answers, their age, and the latest error.
After an error the pauses between attempts grow to 3 s; the earlier answers stay visible, with their age.

The token comes from an environment variable or a file (`TopOptions`). It must not be a flag, which is visible
in the process list and the shell's history, and not part of a URL, which is visible in logs.
"""

import asyncio
import os
import socket
import ssl
from collections.abc import Mapping
from enum import StrEnum
from errno import ECONNREFUSED
from ipaddress import ip_address
from pathlib import Path
from types import TracebackType
from typing import Final, Self
from urllib.parse import urlsplit

import aiohttp
import msgspec

from llmtap.clock import Clock
from llmtap.errors import ConfigError, LlmtapError
from llmtap.net.bounded_body import read_at_most
from llmtap.net.listener import failure_text
from llmtap.net.tls import client_context
from llmtap.top.table import clock_time
from llmtap.top.views import Document, Documents, View
from llmtap.units import NS_PER_S, parse_duration_ns
from llmtap.version import __version__

ANSWER_S: Final = 10.0
"""Time limit of one request."""
DOCUMENT_BYTES_MAX: Final = 64 << 20
"""Maximum size of an answer, which is enough for a summary of 5,000 tenants."""
MESSAGE_CHARS_MAX: Final = 200
START_HINT: Final = (
    "start the tap: llmtap proxy --upstream URL; or name its admin port: --admin http://HOST:9464"
)

PROXY_HINT: Final = (
    "the port for clients (relay.listen) forwards every request to the gateway; name the admin port"
    " (meter.admin), such as --admin http://HOST:9464"
)


class Trouble(LlmtapError):
    """The server gave no usable answer, for the reason in the message. `hint`: possible remedy, or None."""

    def __init__(self, message: str, hint: str | None = None) -> None:
        super().__init__(message)
        self.hint = hint


class Denied(Trouble):
    """The admin port requires a token, and none or a wrong one was given."""


class Untrusted(Trouble):
    """The certificate is not signed by a trusted CA, or is for another name."""


class Admin:
    """Client of one admin port. Use it with `async with` inside a running loop.

    `token` is sent as `Authorization: Bearer`. `tls`: context that verifies the certificate for https.
    Redirects are never followed, so that the token goes to no other server.
    """

    def __init__(self, url: str, token: str | None = None, tls: ssl.SSLContext | None = None) -> None:
        headers = {"User-Agent": f"llmtap-top/{__version__}", "Accept": "application/json"}
        if token is not None:
            headers["Authorization"] = f"Bearer {token}"
        self._url = url
        self._has_token = token is not None
        """Whether a token is sent, which decides the text of an error."""
        self._tls = tls or True
        self._session = aiohttp.ClientSession(headers=headers, timeout=aiohttp.ClientTimeout(total=ANSWER_S))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        await self._session.close()

    async def get(self, path: str, **query: str) -> Document:
        """Return the JSON object at a path of `/api/v1/`. Raises Trouble."""
        try:
            async with self._session.get(
                f"{self._url}/api/v1/{path}", params=query, ssl=self._tls, allow_redirects=False
            ) as response:
                body = await read_at_most(response, DOCUMENT_BYTES_MAX)
                if response.status != 200:
                    raise self._status_error(response.status, body)
        except aiohttp.ClientConnectorCertificateError as exc:
            raise Untrusted(failure_text(exc)) from None
        except (aiohttp.ClientError, TimeoutError, OSError) as exc:
            raise Trouble(failure_text(exc), _error_hint(exc, self._url)) from None
        try:
            document = msgspec.json.decode(body)
        except (ValueError, RecursionError):
            document = None
        if not isinstance(document, dict):
            raise Trouble(
                "the server is not an admin port of llmtap: its answer is not a JSON object", PROXY_HINT
            )
        return document

    async def summary(self, window: str, by: str) -> Document:
        """Return the summary of a window. Raises Trouble."""
        summary = await self.get("summary", window=window, by=by)
        if not isinstance(summary.get("metrics"), dict):
            raise Trouble(
                "the server is not an admin port of llmtap: its answer is not a summary", PROXY_HINT
            )
        return summary

    def _status_error(self, status: int, body: bytes) -> Trouble:
        match status:
            case 401 | 403 if self._has_token:
                return Denied("the token is wrong")
            case 401 | 403:
                # An admin port without a token answers 403 to unknown host names. Its message lists the
                # accepted names, so show it.
                return Denied((status == 403 and _message_in(body)) or "a token is required")
            case 404:
                return Trouble(
                    "the path does not exist: the server is not an admin port of this version of llmtap",
                    PROXY_HINT,
                )
        message = _message_in(body)
        return Trouble(f"the server answered status {status}" + (f": {message}" if message else ""))


def _error_hint(exc: Exception, url: str) -> str | None:
    scheme, _, rest = url.partition("://")
    inner = getattr(exc, "os_error", None) or exc
    match inner:
        case socket.gaierror():
            return "check the host name in --admin"
        case ssl.SSLError() if scheme == "https":
            return f"without TLS: --admin http://{rest}"
        case aiohttp.ServerDisconnectedError() | aiohttp.ClientOSError() if scheme == "http":
            return f"it closed the connection without an answer; with TLS: --admin https://{rest}"
        case TimeoutError():
            return "check that the host is reachable; a firewall possibly drops the packets"
    # Search the text for the number: a failure at several addresses of a host can be one error without errno.
    return START_HINT if f"[Errno {ECONNREFUSED}]" in str(inner) else None


def _message_in(body: bytes) -> str:
    class Inner(msgspec.Struct):
        message: str = ""

    class Outer(msgspec.Struct):
        error: Inner = msgspec.field(default_factory=Inner)

    try:
        return msgspec.json.decode(body, type=Outer).error.message[:MESSAGE_CHARS_MAX]
    except (ValueError, RecursionError):
        return ""


ADMIN: Final = "http://127.0.0.1:9464"
TOKEN_ENV: Final = "LLMTAP_ADMIN_TOKEN"
WINDOWS: Final = ("10s", "1m", "5m", "1h", "all")
"""Rolling windows of the meter. `all` is the time since its start."""
INTERVAL_NS_MIN: Final = 200_000_000
"""Minimum interval between requests: each costs the meter time, and a user cannot see faster changes."""
INTERVAL_NS_MAX: Final = 3_600 * NS_PER_S
TOKEN_BYTES_MAX: Final = 4_096


class TopOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Options of `llmtap top`. Raises ConfigError for a value that is not valid."""

    admin: str = ADMIN
    token: str | None = None
    ca: str | None = None
    window: str = "1m"
    interval: str = "1s"

    def __post_init__(self) -> None:
        if "@" in self.admin:
            raise ConfigError(
                "--admin", "must not contain a user or password", "for a token, use --token-env"
            )
        if "?" in self.admin or "#" in self.admin:
            raise ConfigError("--admin", "must not have a query or fragment", "use --token-env for a token")
        if not _is_url(self.admin):
            raise ConfigError(
                "--admin", f"expected an http:// or https:// URL, got {self.admin!r}", f"such as {ADMIN}"
            )
        if self.window not in WINDOWS:
            raise ConfigError(
                "--window", f"there is no window {self.window!r}", f"expected one of {', '.join(WINDOWS)}"
            )
        if not INTERVAL_NS_MIN <= self.interval_ns <= INTERVAL_NS_MAX:
            raise ConfigError(
                "--interval", f"expected a time from 200ms to 1h, got {self.interval}", "such as 2s"
            )
        if self.ca is not None:
            self._tls_context()

    @property
    def interval_ns(self) -> int:
        """Time between an answer and the next request. Raises ConfigError."""
        try:
            return parse_duration_ns(self.interval)
        except (ValueError, OverflowError) as exc:
            raise ConfigError("--interval", str(exc), "such as 2s") from None

    @property
    def url(self) -> str:
        return self.admin.rstrip("/")

    def tls(self) -> ssl.SSLContext | None:
        """Return the context for `--ca`; None for the CAs of the system."""
        return None if self.ca is None else self._tls_context()

    def is_unencrypted(self) -> bool:
        """Return whether the token would cross a network without TLS."""
        parts = urlsplit(self.admin)
        return self.token is not None and parts.scheme == "http" and not _is_loopback(parts.hostname or "")

    def _tls_context(self) -> ssl.SSLContext:
        try:
            return client_context(self.ca, True)
        except ConfigError as exc:
            raise ConfigError("--ca", exc.problem, exc.hint) from None


def read_token(
    environ: Mapping[str, str] = os.environ, *, name: str | None = None, file: Path | None = None
) -> str | None:
    """Return the token from the file or, without a file, from the environment variable; None without both.

    `name`: variable that the user named; None: the default variable, which can be unset. Raises ConfigError;
    its message never contains the token.
    """
    if file is not None:
        try:
            with file.open("rb") as opened:
                raw = opened.read(TOKEN_BYTES_MAX + 1)
        except OSError as exc:
            raise ConfigError(
                "--token-file", f"{file} cannot be read: {exc.strerror}", "check the path and its permissions"
            ) from None
        return _check_token(raw.decode("utf-8", "replace"), "--token-file", f"the content of {file}")
    token = environ.get(name or TOKEN_ENV, "")
    if not token.strip():
        if name is not None:
            problem = f"the environment variable {name} is not set, or is empty"
            raise ConfigError("--token-env", problem, "set it, or use --token-file")
        return None
    return _check_token(token, "--token-env", f"the value of ${name or TOKEN_ENV}")


def _check_token(text: str, option: str, subject: str) -> str:
    """Return the token without white space at its ends. Raises ConfigError."""
    token = text.strip()
    if not token or len(token) > TOKEN_BYTES_MAX or not token.isascii() or not token.isprintable():
        raise ConfigError(
            option, f"{subject} is not a token", "expected visible ASCII characters, in one line"
        )
    return token


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False


def _is_url(text: str) -> bool:
    try:
        parts = urlsplit(text)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        return False


RETRY_NS: Final = (1 * NS_PER_S, 2 * NS_PER_S, 3 * NS_PER_S)
"""Pauses before the next attempts after an error. The final pause repeats."""
STALE_NS: Final = 3 * NS_PER_S
"""Age from which figures are marked STALE: this time, or three intervals between requests if longer."""
PAGES_MAX: Final = 16
"""Maximum number of answers (pages) of the API that are requested for the events of one exchange."""


class FeedLink(StrEnum):
    """State of the connection to the admin port, as the header shows it."""

    CONNECTING = "CONNECTING"
    LIVE = "LIVE"
    STALE = "STALE"
    DISCONNECTED = "DISCONNECTED"
    PAUSED = "PAUSED"


class Feed:
    """Newest answers of one admin port. One task calls `poll`, and the screen reads the answers.

    `interval_ns`: time between an answer and the next request.
    """

    def __init__(self, admin: Admin, clock: Clock, *, window: str, interval_ns: int) -> None:
        self._admin = admin
        self._clock = clock
        self._interval_ns = interval_ns
        self.window = window
        """Name of the window whose figures are shown."""
        self.is_paused = False
        self.documents = Documents()
        self.trouble: str | None = None
        """Reason why the latest request failed; None if it succeeded."""
        self._failed_tries = 0
        """Number of failures since the latest answer."""
        self._answer_ns: int | None = None
        """Time of the latest complete answer; None before the first."""
        self._answer_wall_ns = 0
        self._first_failure_ns = 0
        """Time of the first of the failures since the latest answer."""
        self._next_request_ns = 0
        """Time of the next request."""

    async def poll(self, view: View) -> None:
        """Request the documents of a view. After an error, keep the earlier documents and set `trouble`."""
        now_ns = self._clock.mono_ns()
        try:
            summary = await self._admin.summary(self.window, view.by)
            details = None if view.path is None else await self._admin.get(view.path, **view.query)
        except Trouble as exc:
            if not self._failed_tries:
                self._first_failure_ns = now_ns
            self.trouble = str(exc)
            self._next_request_ns = (
                self._clock.mono_ns() + RETRY_NS[min(self._failed_tries, len(RETRY_NS) - 1)]
            )
            self._failed_tries += 1
            return
        self.documents.summary = summary
        if view.path is not None and details is not None:
            self.documents.details[view.path] = details
        self.trouble, self._failed_tries = None, 0
        self._answer_ns, self._answer_wall_ns = self._clock.mono_ns(), self._clock.wall_ns()
        self._next_request_ns = self._answer_ns + self._interval_ns

    async def exchange(self, id_: str) -> Document | None:
        """Return one exchange with its events; None if the meter has it no longer. Raises Trouble."""
        query = {"id": id_, "events": "1", "limit": "1"}
        whole: Document | None = None
        for _ in range(PAGES_MAX):
            page = await self._admin.get("exchanges", **query)
            exchanges, cursor = page.get("exchanges"), page.get("next")
            if not exchanges:
                break
            if whole is None:
                whole = exchanges[0]
            elif exchanges[0].get("events_start") == len(whole["events"]):
                whole["events"] += exchanges[0]["events"]
            else:
                break  # This is another exchange with the same id.
            if cursor is None:
                break
            query["next"] = cursor
        return whole

    async def first_token(self, id_: str) -> Document | None:
        """Return the parts of an exchange's wait for the first token; None if the meter has it no longer."""
        answer: Document | None = (await self._admin.get("first_token", id=id_)).get("first_token")
        return answer

    async def wait(self, wake_event: asyncio.Event) -> None:
        """Wait until the next request is due, or `wake_event` is set."""
        seconds = max(0, self._next_request_ns - self._clock.mono_ns()) / NS_PER_S
        try:
            async with asyncio.timeout(None if self.is_paused else seconds):
                await wake_event.wait()
        except TimeoutError:
            pass

    @property
    def link(self) -> FeedLink:
        """State of the connection to the admin port, as far as the latest request shows it."""
        if self.is_paused:
            return FeedLink.PAUSED
        if self.trouble is not None:
            return FeedLink.DISCONNECTED
        if self._answer_ns is None:
            return FeedLink.CONNECTING
        old_ns = self._clock.mono_ns() - self._answer_ns
        return FeedLink.STALE if old_ns > max(STALE_NS, 3 * self._interval_ns) else FeedLink.LIVE

    def status(self) -> str:
        """Return the state of the connection and the time of the figures, for the header."""
        now_ns, link = self._clock.mono_ns(), self.link
        figures_text = f"figures of {self.time_text()}" if self._answer_ns is not None else "no figures yet"
        match link:
            case FeedLink.DISCONNECTED:
                lost_s, left_s = (
                    (now_ns - self._first_failure_ns) // NS_PER_S,
                    (self._next_request_ns - now_ns) / NS_PER_S,
                )
                retry_text = f"again in {left_s:.0f} s" if left_s >= 0.5 else "trying"
                return f"{link} {lost_s} s: {self.trouble}; {retry_text}; {figures_text}"
            case FeedLink.STALE:
                silent_s = (now_ns - (self._answer_ns or now_ns)) // NS_PER_S
                return f"{link}: no answer for {silent_s} s; {figures_text}"
            case FeedLink.PAUSED if self.trouble is not None:
                return f"{link}; the latest request failed: {self.trouble}; {figures_text}"
            case FeedLink.CONNECTING:
                return f"{link}"
            case _:
                return f"{link} {self.time_text()}"

    def time_text(self) -> str:
        """Return the local time of the latest figures."""
        return clock_time(self._answer_wall_ns / NS_PER_S)

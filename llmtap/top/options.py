"""What `llmtap top` can be told, checked where it is told.

The token comes from a variable or a file: a flag's value would stand in the process list and in the shell's
history, a URL in logs.
"""

import os
import ssl
from collections.abc import Mapping
from ipaddress import ip_address
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

import msgspec

from llmtap.errors import ConfigError
from llmtap.net.tls import client_context
from llmtap.units import NS_PER_S, parse_duration_ns

__all__ = ["ADMIN", "TOKEN_ENV", "WINDOWS", "TopOptions", "read_token"]

ADMIN: Final = "http://127.0.0.1:9464"
TOKEN_ENV: Final = "LLMTAP_ADMIN_TOKEN"
WINDOWS: Final = ("10s", "1m", "5m", "1h", "all")
"""The tap's rolling windows, and all since its start."""
INTERVAL_NS_MIN: Final = 200_000_000
"""A summary is merged anew for each answer: more often would cost the meter more than anybody sees."""
INTERVAL_NS_MAX: Final = 3_600 * NS_PER_S
TOKEN_BYTES_MAX: Final = 4_096


class TopOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Where to look, and how often. Making one raises ConfigError that names the option."""

    admin: str = ADMIN
    token: str | None = None
    """Goes into a header of each request and nowhere else."""
    ca: str | None = None
    window: str = "1m"
    interval: str = "1s"

    def __post_init__(self) -> None:
        if "@" in self.admin:
            raise ConfigError("--admin", "has a user or a password in it", "a token: see --token-env")
        if "?" in self.admin or "#" in self.admin:
            raise ConfigError("--admin", "ends where the path ends", "a token: see --token-env")
        if not _is_url(self.admin):
            raise ConfigError("--admin", f"{self.admin!r} is no http or https URL", f"such as {ADMIN}")
        if self.window not in WINDOWS:
            raise ConfigError(
                "--window", f"there is no window {self.window!r}", f"one of {', '.join(WINDOWS)}"
            )
        if not INTERVAL_NS_MIN <= self.interval_ns <= INTERVAL_NS_MAX:
            raise ConfigError("--interval", f"{self.interval} is not between 200ms and 1h")
        if self.ca is not None:
            self._context()

    @property
    def interval_ns(self) -> int:
        """Between an answer and the next question."""
        try:
            return parse_duration_ns(self.interval)
        except (ValueError, OverflowError) as exc:
            raise ConfigError("--interval", str(exc)) from None

    @property
    def url(self) -> str:
        """What paths of the API are appended to."""
        return self.admin.rstrip("/")

    def tls(self) -> ssl.SSLContext | None:
        """What verifies https where it is not the system's trust."""
        return None if self.ca is None else self._context()

    def in_clear(self) -> bool:
        """The token travels where others may read it."""
        parts = urlsplit(self.admin)
        return self.token is not None and parts.scheme == "http" and not _is_loopback(parts.hostname or "")

    def _context(self) -> ssl.SSLContext:
        try:
            return client_context(self.ca, True)
        except ConfigError as exc:
            raise ConfigError("--ca", exc.problem) from None


def read_token(
    environ: Mapping[str, str] = os.environ, *, name: str | None = None, file: Path | None = None
) -> str | None:
    """The token of the file, else of the variable; None where nobody gives one.

    `name` is the variable that was named, None for the usual one, which need not be there. Raises
    ConfigError; its text never has a token in it.
    """
    if file is not None:
        try:
            with file.open("rb") as opened:
                raw = opened.read(TOKEN_BYTES_MAX + 1)
        except OSError as exc:
            raise ConfigError("--token-file", f"{file} cannot be read: {exc.strerror}") from None
        return _checked(raw.decode("utf-8", "replace"), "--token-file", f"what {file} holds")
    token = environ.get(name or TOKEN_ENV, "")
    if not token.strip():
        if name is not None:
            raise ConfigError("--token-env", f"the environment has no {name}")
        return None
    return _checked(token, "--token-env", f"what ${name or TOKEN_ENV} holds")


def _checked(text: str, option: str, what: str) -> str:
    token = text.strip()
    if not token or len(token) > TOKEN_BYTES_MAX or not token.isascii() or not token.isprintable():
        raise ConfigError(option, f"{what} is no token", "visible ASCII characters, in one line")
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

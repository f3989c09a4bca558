"""Listening TCP sockets, addresses (HOST:PORT), and reasons of failed connections.

The supervisor opens the sockets (`bind`). Relay processes inherit them, and accept connections (`Listener`).
While a relay restarts, new connections wait in the kernel's queue. The simulated server and the admin port
use these functions, too. `failure_text` describes a failed connection (refused, unknown name, TLS error) in a
few words; `is_own_shortage` distinguishes a lack of file descriptors or memory on this host from a fault of
the other side.
"""

import asyncio
import errno
import os
import re
import resource
import socket
import ssl
from collections.abc import Callable
from typing import Final

from llmtap.errors import ConfigError

ACCEPTS_PER_TURN: Final = 64
"""Maximum number of connections that are accepted before the event loop continues with running streams."""
BACKLOG: Final = 4_096
FULL_PAUSE_S: Final = 0.1
"""Time for which no connections are accepted after the process had no file descriptor left."""
_ERRNO: Final = re.compile(r"\[Errno (\d+)\]")
"""Finds the error number in the text of asyncio's error about several addresses, which has no `errno`."""
_NO_TLS: Final = frozenset({"WRONG_VERSION_NUMBER", "RECORD_LAYER_FAILURE", "HTTP_REQUEST"})
"""Reasons that OpenSSL gives if the peer answers in plain text."""
_SHORTAGES: Final = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})
"""Errors that mean that this host has no file descriptor or kernel memory left (socket(2), accept(2))."""


def raise_file_limit() -> None:
    """Raise the soft limit of open files of this process to the hard limit, because each connection counts as
    an open file."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def parse_address(text: str, place: str) -> tuple[str, int]:
    """Return host and port of `127.0.0.1:8080`, `[::1]:80` or `:80` (every interface).

    Raises ConfigError, which names `place`, the option with this text.
    """
    host, colon, port = text.rpartition(":")
    bracketed = host.startswith("[") and host.endswith("]")
    host = host[1:-1] if bracketed else host
    if not colon or (":" in host and not bracketed):
        raise ConfigError(place, f"expected HOST:PORT, got {text!r}", "for IPv6, write [::1]:80")
    if not (port.isascii() and port.isdigit() and int(port) <= 65_535):
        raise ConfigError(place, f"port {port!r} is not a number from 0 to 65535", "such as 127.0.0.1:8080")
    return host, int(port)


def bind(host: str, port: int, *, shared: bool) -> socket.socket:
    """Return a listening TCP socket; `shared`: other sockets of this user can share the port (SO_REUSEPORT).

    Raises OSError.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if shared:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        # Accepted sockets inherit the option, which saves one system call for each connection.
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.bind((host, port))
        sock.listen(BACKLOG)
        sock.setblocking(False)
    except OSError:
        sock.close()
        raise
    return sock


def keep_port() -> socket.socket:
    """Return a bound socket that reserves a free loopback port, until a server with SO_REUSEADDR takes it."""
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    sock.bind(("127.0.0.1", 0))
    return sock


def name_of(sock: socket.socket) -> str:
    """Return the local address of a socket as HOST:PORT: `127.0.0.1:8080`, `[::]:8443`."""
    host, port = sock.getsockname()[:2]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def check_free(host: str, port: int) -> None:
    """Raise OSError if the port is in use, even by a process that shares it (SO_REUSEPORT)."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((host, port))


class Listener:
    """Calls `on_accept` with each accepted, non-blocking socket.

    If there is no file descriptor or memory for a connection, calls `on_shortage`, and lets connections wait
    in the kernel for FULL_PAUSE_S.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        sock: socket.socket,
        on_accept: Callable[[socket.socket], None],
        on_shortage: Callable[[OSError], None],
    ) -> None:
        self._loop = loop
        self._sock = sock
        self._on_accept = on_accept
        """Function that is called with each accepted socket."""
        self._on_shortage = on_shortage
        """Function that is called when the system has no descriptor or memory for a connection."""
        self._timer: asyncio.TimerHandle | None = None
        """Timer that ends the pause after a shortage; None: no pause."""
        loop.add_reader(sock, self._on_readable)

    def _on_readable(self) -> None:
        for _ in range(ACCEPTS_PER_TURN):
            if not self._accept_one():
                return

    def _accept_one(self) -> bool:
        try:
            sock, _ = self._sock.accept()
        except (BlockingIOError, InterruptedError):
            return False
        except ConnectionAbortedError:
            return True
        except OSError as exc:
            if not is_own_shortage(exc):
                raise
            self._on_shortage(exc)
            self._loop.remove_reader(self._sock)
            if self._timer is None:  # a timer is already set if `close` calls this during a pause
                self._timer = self._loop.call_later(FULL_PAUSE_S, self._resume)
            return False
        sock.setblocking(False)
        self._on_accept(sock)
        return True

    def _resume(self) -> None:
        self._timer = None
        self._loop.add_reader(self._sock, self._on_readable)

    def close(self) -> None:
        """Accept the connections that wait in the queue, then stop accepting."""
        self._loop.remove_reader(self._sock)
        while self._accept_one():
            pass
        if self._timer is not None:  # check after the loop, because the last accept can begin a pause
            self._timer.cancel()
        self._sock.close()


ERROR_FIELD: Final = "X-Llmtap-Error"
"""Header field of answers that llmtap itself gives in place of a gateway; its value is the error's code."""
ADMIN_PORT: Final = "admin_port"
"""Code of the answer to a client that sent a request for the proxy to the admin port."""


def failure_text(error: BaseException) -> str:
    """Return a short text such as `connection refused` or `TLS: certificate not trusted`.

    If an error of aiohttp contains another one (`os_error`, `certificate_error`), the text is about that one.
    """
    inner = getattr(error, "certificate_error", None) or getattr(error, "os_error", None) or error
    match inner:
        case TimeoutError():
            return "timed out"
        case ssl.SSLCertVerificationError():
            reason = str(getattr(inner, "verify_message", "")).rstrip(".")
            return "TLS: certificate not trusted" + (f" ({reason})" if reason else "")
        case ssl.SSLError():
            reason = getattr(inner, "reason", None) or "it failed"
            reason_text = reason.replace("_", " ").lower()
            return (
                "TLS: the server does not speak it (its URL begins with http://)"
                if reason in _NO_TLS
                else f"TLS: {reason_text}"
            )
        case socket.gaierror():
            is_temporary = inner.errno == socket.EAI_AGAIN
            return "name cannot be looked up at the moment" if is_temporary else "name not known"
    number_text = _ERRNO.search(str(inner))
    number = getattr(inner, "errno", None) or (int(number_text[1]) if number_text is not None else None)
    if number:
        return _lower_first(os.strerror(number))
    # Prefer the `message` of aiohttp's errors about an answer, because their whole text repeats the URL.
    return _lower_first(str(getattr(inner, "message", "") or inner)) or type(inner).__name__


def is_own_shortage(error: OSError) -> bool:
    """Return whether this process or host has run out of file descriptors or memory for sockets."""
    return error.errno in _SHORTAGES


def _lower_first(text: str) -> str:
    """Return the first line of a text, with the first letter in lower case unless the word is in capitals."""
    line = text.strip().partition("\n")[0]
    return line[:1].lower() + line[1:] if line[1:2].islower() else line

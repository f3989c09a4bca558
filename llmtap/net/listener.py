"""Open listening TCP sockets, accept connections from them, and parse and print addresses (HOST:PORT).

The supervisor opens the sockets (`bind`) and relay processes inherit them, and accept (`Listener`). While a
relay restarts, new connections wait in the kernel's queue. Simulated server and admin port open theirs here,
too.
"""

import asyncio
import socket
from collections.abc import Callable
from typing import Final

from llmtap.errors import ConfigError
from llmtap.net.failures import is_own_shortage

ACCEPTS_PER_TURN: Final = 64
"""Bound of the time that running streams wait for new connections."""
BACKLOG: Final = 4_096
FULL_PAUSE_S: Final = 0.1
"""Pause of accepting when the process has no file descriptor left."""


def parse_address(text: str, place: str) -> tuple[str, int]:
    """Return host and port of `127.0.0.1:8080`, `[::1]:80` or `:80` (every interface).

    Raises ConfigError that names `place`, the option with this text.
    """
    host, colon, port = text.rpartition(":")
    bracketed = host.startswith("[") and host.endswith("]")
    host = host[1:-1] if bracketed else host
    if not colon or (":" in host and not bracketed):
        raise ConfigError(place, f"expected HOST:PORT, got {text!r}", "write [::1]:80 for IPv6")
    if not (port.isascii() and port.isdigit() and int(port) <= 65_535):
        raise ConfigError(place, f"port {port!r} is not a number from 0 to 65535")
    return host, int(port)


def bind(host: str, port: int, *, shared: bool) -> socket.socket:
    """Return a listening TCP socket; `shared`: sockets of this user may share the port (SO_REUSEPORT).

    Raises OSError.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if shared:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        # Accepted sockets inherit it: one system call saved per connection.
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.bind((host, port))
        sock.listen(BACKLOG)
        sock.setblocking(False)
    except OSError:
        sock.close()
        raise
    return sock


def keep_port() -> socket.socket:
    """Return a socket that reserves a free loopback port for a server that sets SO_REUSEADDR, as ours do."""
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    sock.bind(("127.0.0.1", 0))
    return sock


def name_of(sock: socket.socket) -> str:
    """Return the local address of a socket as HOST:PORT: `127.0.0.1:8080`, `[::]:8443`."""
    host, port = sock.getsockname()[:2]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def bound_url(sock: socket.socket, *, tls: bool) -> str:
    return f"http{'s' if tls else ''}://{name_of(sock)}"


def is_free(host: str, port: int) -> None:
    """Raise OSError when the port is in use, even by a process that would share it (SO_REUSEPORT)."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((host, port))


class Listener:
    """Calls `on_accept` with each accepted, non-blocking socket.

    Calls `on_shortage` when there is no file descriptor or memory for one; connections wait in the kernel
    then.
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
        self._on_shortage = on_shortage
        self._timer: asyncio.TimerHandle | None = None
        loop.add_reader(sock, self._acceptable)

    def _acceptable(self) -> None:
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
            if self._timer is None:  # or the pause has begun, and the door is being closed
                self._timer = self._loop.call_later(FULL_PAUSE_S, self._resume)
            return False
        sock.setblocking(False)
        self._on_accept(sock)
        return True

    def _resume(self) -> None:
        self._timer = None
        self._loop.add_reader(self._sock, self._acceptable)

    def close(self) -> None:
        """Accept the connections that are in the queue, then no more."""
        self._loop.remove_reader(self._sock)
        while self._accept_one():
            pass
        if self._timer is not None:  # not before: the last accept may have begun a pause
            self._timer.cancel()
        self._sock.close()

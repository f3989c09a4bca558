"""Pool of connections to an upstream server: opened when needed, kept while idle, checked before reuse.

The relay and the load generator take connections (`Pool.take`, `Pool.connect`) and give them back.
`parse_origin` reads the upstream's URL. An idle connection leaves the pool as soon as the upstream closes it
or sends anything. Over TLS, a part of a record that is not decrypted yet is enough. Two races remain. The
upstream can close the connection while a request is on its way; the relay decides whether to send the request
again. Or the upstream can send an unsolicited answer after the check, and HTTP/1.1 has no means to
distinguish it from the answer to the request.
"""

import asyncio
import errno
import os
import socket
import ssl
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Protocol
from urllib.parse import urlsplit

from llmtap.clock import SystemClock
from llmtap.errors import ConfigError
from llmtap.net.listener import is_own_shortage
from llmtap.net.stream import Handler, Stream, Timebase, open_stream
from llmtap.net.tls import TlsStream

RESOLUTION_NS: Final = 30_000_000_000
"""Time for which the addresses of a host name are used without a new look-up."""

Address = tuple[int, tuple[object, ...]]

mono_ns = SystemClock.mono_ns


@dataclass(frozen=True, slots=True)
class Origin:
    """Address of an upstream, parsed from its URL."""

    host: str
    port: int
    tls: bool
    authority: bytes
    """Value of the Host field: without the port if that is the default of the scheme."""
    prefix: bytes
    """Path put before every target; empty for most upstreams."""


def parse_origin(url: str, place: str) -> Origin:
    """Return the origin of `http://host:port[/prefix]` or `https://...`.

    Raises ConfigError, which names `place`, the option with this URL.
    """
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as exc:
        raise ConfigError(place, f"{url!r} is not a URL: {exc}", "such as http://127.0.0.1:8000") from None
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigError(
            place, f"expected http:// or https://, got {url!r}", "such as http://127.0.0.1:8000"
        )
    if parts.query or parts.fragment or parts.username:
        hint = "such as http://127.0.0.1:8000"
        raise ConfigError(place, "the URL must not have a query, a fragment or a user name", hint)
    tls = parts.scheme == "https"
    default = 443 if tls else 80
    host = parts.hostname
    host_text = f"[{host}]" if ":" in host else host
    authority = host_text if port in (None, default) else f"{host_text}:{port}"
    return Origin(host, port or default, tls, authority.encode(), parts.path.rstrip("/").encode())


class Waiter(Handler, Protocol):
    """Receiver of a connection that is being opened. It becomes the handler of the connection."""

    def on_connected(self, stream: Stream, took_ns: int) -> None:
        """Called when the connection is open."""

    def on_connect_failed(self, error: OSError) -> None:
        """Called if there is no connection: refused, timed out (TimeoutError), not trusted (SSLError), or no
        free file descriptor."""


class _IdleConnection:
    """Handler of an idle connection; any event removes it from the pool."""

    __slots__ = ("_pool", "_received_bytes", "has_served", "since_ns", "stream")

    def __init__(self, pool: "Pool", stream: Stream, now_ns: int, used: bool) -> None:
        self._pool = pool
        self._received_bytes = stream.received_bytes
        """Bytes received when the connection became idle; more show unexpected data."""
        self.stream = stream
        self.since_ns = now_ns  # time at which the connection became idle
        self.has_served = used  # whether a request was answered on the connection

    def is_usable(self) -> bool:
        """Return whether the upstream has neither closed the connection nor sent anything since it became
        idle."""
        stream = self.stream
        # A server can send TLS session tickets at any time, but usually before its first answer. So bytes
        # that arrive do not close a connection on which no request was answered.
        is_same = not self.has_served or stream.received_bytes == self._received_bytes
        return is_same and stream.is_alive()

    def on_data(self, data: bytes, t_ns: int) -> None:
        self._pool.unsolicited += 1
        self.on_eof()

    def on_eof(self) -> None:
        self._pool.discard(self)

    def on_lost(self, error: OSError | None) -> None:
        self.on_eof()

    def on_drained(self) -> None:
        """Do nothing: nothing is written to an idle connection."""


class Pool:
    """The connections of one process (relay or load generator) to one upstream."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        origin: Origin,
        timebase: Timebase,
        *,
        clock: str,
        idle_max: int,
        idle_ns: int,
        connect_ns: int,
        tls: ssl.SSLContext | None,
        server_name: str | None = None,
    ) -> None:
        self.loop = loop
        self.tls = tls
        self.timebase = timebase
        self.clock = clock
        self.attempts: set[Attempt] = set()
        """Connections that are being opened."""
        self.server_name = server_name or origin.host
        """Host name that the upstream's certificate must have."""
        self.host = origin.host
        self._port = origin.port
        self._connect_ns = connect_ns
        """Longest time to open a connection."""
        self._idle_max = idle_max
        self._idle_ns = idle_ns
        """Time after which an idle connection is closed."""
        self._idle_connections: list[_IdleConnection] = []
        """Idle connections, the latest one last. `take` uses the last one, because the upstream is least
        likely to close it."""
        self._addresses: list[Address] = []
        """Addresses of the host from the latest look-up."""
        self.resolved_ns = -RESOLUTION_NS
        """Time of the latest look-up of the host name."""
        self.unresolved: dict[Attempt, None] = {}
        """Attempts that wait for the look-up of the host name, in the order of their start."""
        self._lookup_task: asyncio.Task[None] | None = None
        """Task of the running look-up of the host name; None: none runs."""
        self.connects = 0
        """Number of connections that were opened."""
        self.up: bool | None = None
        """Whether the upstream accepted the latest connection; None before the first attempt."""
        self.tried_ns = 0
        """Monotonic time at which the latest attempt to connect ended."""
        self.on_change: Callable[[OSError | None], None] | None = None
        """Called at each change of `up`, except at a first success, with the error; None: up again."""
        self.reuses = 0
        """Number of requests sent on a connection that had already served another request."""
        self.unsolicited = 0
        """Number of connections closed because the upstream sent bytes without a request."""

    @property
    def idle(self) -> int:
        """Number of idle connections."""
        return len(self._idle_connections)

    def set_state(self, error: OSError | None) -> None:
        """Set `up` from the result of the latest attempt to connect: its error, or None if it succeeded."""
        was_up, self.up, self.tried_ns = self.up is not False, error is None, mono_ns()
        if self.up is not was_up and self.on_change is not None:
            self.on_change(error)

    def take(self, handler: Handler) -> Stream | None:
        """Return an idle connection that is still open and has nothing to read, or None."""
        while self._idle_connections:
            idle = self._idle_connections.pop()
            stream = idle.stream
            if idle.is_usable():
                stream.handler = handler
                self.reuses += idle.has_served
                return stream
            self.unsolicited += stream.has_unread()
            stream.close()
        return None

    def give_back(self, stream: Stream, now_ns: int, *, used: bool = True) -> None:
        """Keep a connection whose latest answer ended cleanly, or on which nothing was sent (`used` is
        False). Close it if the pool is full."""
        if len(self._idle_connections) >= self._idle_max or self._idle_ns == 0 or stream.closed:
            stream.close()
            return
        idle = _IdleConnection(self, stream, now_ns, used)
        stream.handler = idle
        self._idle_connections.append(idle)

    def discard(self, idle: _IdleConnection) -> None:
        """Close an idle connection, and remove it from the pool."""
        idle.stream.close()
        try:
            self._idle_connections.remove(idle)
        except ValueError:
            pass  # the connection was already taken from the pool in this round of the event loop

    def sweep(self, now_ns: int) -> None:
        """Close connections that were idle too long, and cancel attempts to connect that take too long."""
        for attempt in [a for a in self.attempts if now_ns - a.began_ns > self._connect_ns]:
            attempt.cancel()
            attempt.fail(
                TimeoutError(
                    f"the server accepted no connection in {self._connect_ns / 1e9:g} s: does it run?"
                )
            )
        while self._idle_connections and now_ns - self._idle_connections[0].since_ns > self._idle_ns:
            self._idle_connections.pop(0).stream.close()

    def close(self) -> None:
        """Close every idle connection and every attempt to connect."""
        for attempt in list(self.attempts):
            attempt.cancel()
        if self._lookup_task is not None:
            self._lookup_task.cancel()
        for idle in self._idle_connections:
            idle.stream.close()
        self._idle_connections.clear()

    def connect(self, waiter: Waiter) -> "Attempt":
        """Open a connection for `waiter`, which is called with the result, possibly before this method
        returns."""
        attempt = Attempt(self, waiter)
        self.attempts.add(attempt)
        if mono_ns() - self.resolved_ns < RESOLUTION_NS:
            attempt.on_resolved(self._addresses, None)
        else:
            self.unresolved[attempt] = None
            if self._lookup_task is None:
                self._lookup_task = self.loop.create_task(self._look_up())
        return attempt

    async def _look_up(self) -> None:
        """Resolve the host name once for all waiting attempts."""
        error: OSError | None = None
        try:
            infos = await self.loop.getaddrinfo(
                self.host, self._port, type=socket.SOCK_STREAM, proto=socket.IPPROTO_TCP
            )
        except OSError as exc:
            error = exc
        except ValueError as exc:  # UnicodeError, because the host name cannot be encoded
            error = OSError(f"the host name {self.host!r} is invalid: {exc}")
        else:
            self._addresses = [(family, address) for family, _, _, _, address in infos]
            self.resolved_ns = mono_ns()
        finally:
            self._lookup_task = None
        # Call each attempt in a callback of its own, so that an exception in one does not affect the others.
        for attempt in self.unresolved:
            self.loop.call_soon(attempt.on_resolved, self._addresses, error)
        self.unresolved.clear()


@dataclass(frozen=True, slots=True)
class Route:
    """Target of a request: origin of the upstream, its Host value, and its connection pool."""

    origin: Origin
    authority: bytes | None
    """Value of the Host field for the upstream; None: keep the client's."""
    pool: Pool


class Attempt:
    """One connection that is being opened. It works by callbacks, because a task would use more CPU."""

    __slots__ = ("_addresses", "_pool", "_sock", "_tls_task", "began_ns", "waiter")

    def __init__(self, pool: Pool, waiter: Waiter) -> None:
        self._pool = pool
        self._sock: socket.socket | None = None
        self._addresses: list[Address] = []
        """Addresses that are not tried yet."""
        self._tls_task: asyncio.Task[None] | None = None
        self.waiter = waiter
        """Receiver of the connection or of the error."""
        self.began_ns = mono_ns()

    def on_resolved(self, addresses: list[Address], error: OSError | None) -> None:
        """Connect to the first address that answers, unless the look-up failed."""
        if self not in self._pool.attempts:
            return  # the attempt was cancelled during the look-up
        if error is None:
            self._addresses = list(addresses)
            self._try_next_address(OSError(f"the host {self._pool.host!r} has no IP address: check the URL"))
        else:
            self.fail(error)

    def _try_next_address(self, error: OSError) -> None:
        """Begin to connect to the next address; if there is none, fail with the error of the previous one."""
        while self._addresses:
            family, address = self._addresses.pop(0)
            try:
                sock = socket.socket(family, socket.SOCK_STREAM)
            except OSError as exc:
                if is_own_shortage(exc):
                    # This host has no descriptor or memory left, so attempts at other addresses would fail.
                    self.fail(exc)
                    return
                error = exc
                continue
            sock.setblocking(False)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            status = sock.connect_ex(address)
            if status in (0, errno.EINPROGRESS):
                self._sock = sock
                if status == 0 or _is_connected(sock):
                    self._on_connect(sock)
                else:
                    self._pool.loop.add_writer(sock, self._on_writable, sock)
                return
            error = OSError(status, os.strerror(status))
            sock.close()
        self._pool.resolved_ns = -RESOLUTION_NS  # no address works, so look the name up again next time
        self.fail(error)

    def _on_writable(self, sock: socket.socket) -> None:
        self._pool.loop.remove_writer(sock)
        status = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if status == 0:
            self._on_connect(sock)
        else:
            self._sock = None
            sock.close()
            self._try_next_address(OSError(status, os.strerror(status)))

    def _on_connect(self, sock: socket.socket) -> None:
        pool = self._pool
        if pool.tls is not None:
            self._tls_task = pool.loop.create_task(self._start_tls(sock))
            return
        self._sock = None
        self._succeed(open_stream(pool.loop, sock, self.waiter, pool.timebase, pool.clock))

    async def _start_tls(self, sock: socket.socket) -> None:
        self._sock = None  # from here on, the event loop closes the socket
        pool = self._pool
        try:
            _, stream = await pool.loop.create_connection(
                lambda: TlsStream(self.waiter, sock),
                sock=sock,
                ssl=pool.tls,
                server_hostname=pool.server_name,
            )
        except OSError as exc:
            # Look the name up again next time, because the address possibly belongs to another host now.
            pool.resolved_ns = -RESOLUTION_NS
            self.fail(exc)
        except ValueError as exc:  # UnicodeError, because the host name cannot be encoded
            self.fail(OSError(str(exc)))
        else:
            self._succeed(stream)

    def _succeed(self, stream: Stream) -> None:
        """Give the open connection to the waiter."""
        pool = self._pool
        self._remove()
        pool.connects += 1
        pool.set_state(None)
        self.waiter.on_connected(stream, pool.tried_ns - self.began_ns)

    def fail(self, error: OSError) -> None:
        """End the attempt with an error."""
        self._remove()
        if not is_own_shortage(error):
            self._pool.set_state(error)
        self.waiter.on_connect_failed(error)

    def cancel(self) -> None:
        """Stop the attempt without calling the waiter."""
        self._remove()
        if self._tls_task is not None:
            self._tls_task.cancel()
        if self._sock is not None:
            self._pool.loop.remove_writer(self._sock)
            self._sock.close()
            self._sock = None

    def _remove(self) -> None:
        """Remove the attempt from the sets of the pool."""
        self._pool.attempts.discard(self)
        self._pool.unresolved.pop(self, None)


def _is_connected(sock: socket.socket) -> bool:
    # On the same host, the handshake is over when connect() returns. Then the attempt need not wait for the
    # next round of the event loop.
    try:
        sock.getpeername()
    except OSError:
        return False
    return True

"""Limits of the admin port: connections, time for heads, and memory of answers that clients read slowly.

`AdminRunner` runs the application of `server.py`, and `AdminSite` accepts its connections. Each one is an
`AdminConnection` between the socket and aiohttp; `AdminConnections` closes those that complete no TLS
handshake or no head in time, that are idle, or that read nothing while an answer waits.
`AdminConnections.middleware` sends every answer in slices, so that a large answer is in memory only as its
body, not also as a copy in the socket's buffer. `SharedWork` computes an answer once for all requests that
wait for the same answer.
"""

import asyncio
import resource
import socket
import ssl
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping
from typing import Any, Final, TypeVar, cast

from aiohttp import hdrs, web
from aiohttp.typedefs import Handler

from llmtap.net.listener import Listener, bind, name_of

CONNECTIONS_MAX: Final = 256
"""Maximum number of connections, or half of the limit of open files. A dashboard has six, a scraper one."""
HEAD_S: Final = 20.0
"""Time limit of a TLS handshake, and of a request's head from its first byte, as `relay.head_timeout`."""
IDLE_S: Final = 75.0
"""Time without a request after which a connection is closed, as `relay.keepalive_timeout`."""
SEND_S: Final = 60.0
"""Time after which sending an answer is aborted. Scrapers give up after 10 s, browsers wait longer."""
CLOSE_S: Final = 5.0
"""Time limit for the answers that are still being sent when the meter ends."""
SLICE_BYTES: Final = 64 << 10
ANSWERS_BYTES_MAX: Final = 128 << 20
"""Maximum number of bytes of all answers that are being sent. Above it, the oldest answer is aborted."""
SWEEP_S: Final = 1.0
T = TypeVar("T")


class AdminConnection(asyncio.Protocol):
    """Protocol that passes all events to that of aiohttp, and records what the connection waits for."""

    def __init__(self, protocol: Any, owner: "AdminConnections") -> None:
        self.protocol = protocol
        """aiohttp's protocol, which gets all events."""
        self._owner = owner
        self._opening_task: asyncio.Task[None] | None = None
        """Task of the TLS handshake; kept so that the garbage collector does not end it."""
        self.transport: asyncio.Transport | None = None
        """None before the TLS handshake has ended, and after the connection has ended."""
        self.wait_start_s = owner.now()
        """Start of the present wait: for the end of the handshake, a request, or the rest of its head."""
        self.head_has_begun = False
        """Whether a part of a request's head has arrived, and its answer has not begun."""
        self.open_requests = 0
        """Number of requests that are being answered."""

    def open(self, sock: socket.socket, tls: ssl.SSLContext | None) -> None:
        """Begin the TLS handshake, if there is one, on an accepted socket."""
        self._opening_task = asyncio.get_running_loop().create_task(self._open(sock, tls))

    async def _open(self, sock: socket.socket, tls: ssl.SSLContext | None) -> None:
        loop = asyncio.get_running_loop()
        # `_sweep` ends a handshake after HEAD_S and counts it, so the time limit of asyncio must be longer.
        limit_s = None if tls is None else 2 * HEAD_S
        try:
            await loop.connect_accepted_socket(lambda: self, sock, ssl=tls, ssl_handshake_timeout=limit_s)
        except OSError:  # also ssl.SSLError and TimeoutError, its subclasses
            self._owner.limit_counts["tls_handshake"] += 1
        finally:
            self._opening_task = None
            if self.transport is None:
                self._owner.forget(self)
                sock.close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # A cast, since uvloop's transports are not subclasses of asyncio's.
        self.transport = cast(asyncio.Transport, transport)
        self.wait_start_s = self._owner.now()
        self.protocol.connection_made(transport)

    def data_received(self, data: bytes) -> None:
        if not self.open_requests and not self.head_has_begun:
            self.head_has_begun, self.wait_start_s = True, self._owner.now()
        self.protocol.data_received(data)

    def eof_received(self) -> bool | None:
        done: bool | None = self.protocol.eof_received()
        return done

    def pause_writing(self) -> None:
        self.protocol.pause_writing()

    def resume_writing(self) -> None:
        self.protocol.resume_writing()

    def connection_lost(self, exc: BaseException | None) -> None:
        self._owner.forget(self)
        self.transport = None
        self.protocol.connection_lost(exc)

    def abort(self) -> None:
        """Close the connection at once, without sending the rest of an answer."""
        self._owner.forget(self)
        if self.transport is not None:
            self.transport.abort()
        elif self._opening_task is not None:
            self._opening_task.cancel()

    def begin_answer(self) -> None:
        self.open_requests += 1
        self.head_has_begun = False

    def end_answer(self) -> None:
        self.open_requests -= 1
        self.wait_start_s = self._owner.now()

    def exceeded_limit(self, now_s: float) -> str | None:
        """Return the name of the limit that the connection has exceeded, or None."""
        if self.open_requests:
            return None
        waited_s = now_s - self.wait_start_s
        if self.transport is None:
            return "handshake_timeout" if waited_s > HEAD_S else None
        if self.head_has_begun and waited_s > HEAD_S:
            return "head_timeout"
        return "idle_timeout" if waited_s > IDLE_S else None


class _UnsentAnswer:
    """An answer that the client has not taken as a whole."""

    __slots__ = ("body", "n_bytes", "transport")

    def __init__(self, body: object, size: int, transport: asyncio.Transport | None) -> None:
        self.body, self.n_bytes, self.transport = body, size, transport
        """Memory of the slices that wait to be sent, its size, and the connection that gets them."""


class AdminConnections:
    """All connections of an admin port, and the answers that are being sent."""

    def __init__(self, limit_counts: Counter[str]) -> None:
        """`limit_counts`: counts how often each limit was reached, by its name."""
        self.limit_counts = limit_counts
        """By name of a limit: how often it was reached."""
        self._open_connections: dict[object, AdminConnection] = {}
        """By object of aiohttp that handles a connection: the connection."""
        self._unsent_answers: dict[_UnsentAnswer, None] = {}
        """Keys: answers that are being sent, the oldest first. This is a dict because a set has no order."""
        self._timer: asyncio.TimerHandle | None = None
        files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        self.connections_max = max(1, min(CONNECTIONS_MAX, files // 2))

    def now(self) -> float:
        return asyncio.get_running_loop().time()

    def admit(self, connection: AdminConnection) -> bool:
        """Register a new connection. At the limit, close the longest idle one; return False if none is."""
        if len(self._open_connections) >= self.connections_max:
            idle = [one for one in self._open_connections.values() if not one.open_requests]
            self.limit_counts["connections"] += 1
            if not idle:
                return False
            min(idle, key=lambda one: one.wait_start_s).abort()
        self._open_connections[connection.protocol] = connection
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(SWEEP_S, self._sweep)
        return True

    def forget(self, connection: AdminConnection) -> None:
        self._open_connections.pop(connection.protocol, None)

    def abort_handshakes(self) -> None:
        """Close the connections whose TLS handshake has not ended: aiohttp does not know them yet."""
        for connection in list(self._open_connections.values()):
            if connection.transport is None:
                connection.abort()

    def _sweep(self) -> None:
        """Close the connections that have exceeded a limit; runs every SWEEP_S while any is open."""
        now_s = self.now()
        for connection in list(self._open_connections.values()):
            limit = connection.exceeded_limit(now_s)
            if limit is not None:
                self.limit_counts[limit] += 1
                connection.abort()
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(SWEEP_S, self._sweep) if self._open_connections else None

    @web.middleware
    async def middleware(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        connection = self._open_connections.get(request.protocol)
        if connection is None:
            return await self._send_sliced(request, await handler(request))
        connection.begin_answer()
        try:
            return await self._send_sliced(request, await handler(request))
        finally:
            connection.end_answer()

    async def _send_sliced(self, request: web.Request, response: web.StreamResponse) -> web.StreamResponse:
        """Send a large body in slices, so that a slow client takes little memory."""
        body = response.body if isinstance(response, web.Response) else None
        if not isinstance(body, bytes) or len(body) <= SLICE_BYTES or request.method == hdrs.METH_HEAD:
            return response
        headers = {name: value for name, value in response.headers.items() if name != hdrs.CONTENT_LENGTH}
        view = memoryview(body)
        slices = (view[at : at + SLICE_BYTES] for at in range(0, len(body), SLICE_BYTES))
        return await self.send(request, headers, body, slices, len(body), status=response.status)

    async def send(
        self,
        request: web.Request,
        headers: Mapping[str, str],
        body: bytes,
        slices: Iterable[bytes | memoryview],
        size: int,
        *,
        status: int = 200,
    ) -> web.StreamResponse:
        """Send an answer of `size` bytes within SEND_S. `body`: memory that the slices of the answer use."""
        response = web.StreamResponse(status=status, headers=headers)
        response.content_length = size
        one = _UnsentAnswer(body, len(body), request.transport)
        self._disconnect_until_memory_suffices(one)
        try:
            async with asyncio.timeout(SEND_S):
                await response.prepare(request)
                if request.method != hdrs.METH_HEAD:
                    for part in slices:
                        await response.write(part)
                await response.write_eof()
        except TimeoutError:
            self.limit_counts["send_timeout"] += 1
            if request.transport is not None:
                request.transport.abort()
        except ConnectionError:
            pass  # the client disconnected, or `_disconnect_until_memory_suffices` aborted the connection
        finally:
            self._unsent_answers.pop(one, None)
        return response

    def _disconnect_until_memory_suffices(self, one: _UnsentAnswer) -> None:
        self._unsent_answers[one] = None
        while len(self._unsent_answers) > 1 and self._unsent_bytes() > ANSWERS_BYTES_MAX:
            oldest = next(iter(self._unsent_answers))
            del self._unsent_answers[oldest]
            self.limit_counts["answer_bytes"] += 1
            if oldest.transport is not None:
                oldest.transport.abort()

    def _unsent_bytes(self) -> int:
        """Return the memory of all unsent answers; answers of `SharedWork` share one body."""
        return sum({id(one.body): one.n_bytes for one in self._unsent_answers}.values())


class AdminRunner(web.AppRunner):
    """aiohttp's runner, with the limits of its connections. Its sites are `AdminSite`s."""

    def __init__(
        self, app: web.Application, connections: AdminConnections, tls: ssl.SSLContext | None = None
    ) -> None:
        # aiohttp's default keep-alive time is longer than IDLE_S, so only `_sweep` closes idle connections.
        super().__init__(app, access_log=None, shutdown_timeout=CLOSE_S)
        self._connections = connections
        self.tls = tls

    def accept(self, sock: socket.socket) -> None:
        make_protocol = self.server
        if make_protocol is None:
            sock.close()
            return
        connection = AdminConnection(make_protocol(), self._connections)
        if self._connections.admit(connection):
            connection.open(sock, self.tls)
        else:
            sock.close()

    def note_shortage(self, error: OSError) -> None:
        """Count a failed accept: the system has no file descriptor or memory, so a connection waits."""
        self._connections.limit_counts["accept_failed"] += 1

    async def cleanup(self) -> None:
        await super().cleanup()
        self._connections.abort_handshakes()


class AdminSite(web.BaseSite):
    """Listening socket of an admin port.

    It replaces the sites of aiohttp, with which idle TLS handshakes could not be limited: they create the
    protocol of a connection only after the handshake.
    """

    def __init__(self, runner: AdminRunner, sock: socket.socket | tuple[str, int]) -> None:
        """`sock`: an inherited listening socket, or the address (host, port) to bind."""
        super().__init__(runner)
        self._admin_runner = runner
        self._sock = sock

    @property
    def name(self) -> str:
        scheme = "http" if self._admin_runner.tls is None else "https"
        sock = self._sock
        return f"{scheme}://{'{}:{}'.format(*sock) if isinstance(sock, tuple) else name_of(sock)}"

    async def start(self) -> None:
        if isinstance(self._sock, tuple):
            self._sock = bind(*self._sock, shared=False)
        await super().start()
        loop = asyncio.get_running_loop()
        self._sock.setblocking(False)
        listener = Listener(loop, self._sock, self._admin_runner.accept, self._admin_runner.note_shortage)
        self._server = cast(asyncio.AbstractServer, listener)  # the base class closes it


class SharedWork:
    """Runs one piece of work at a time, in a worker thread, and shares it between requests that wait for it.

    A request never gets a result whose computation began before the request arrived: it waits for the next
    computation.
    """

    def __init__(self) -> None:
        self._lock = asyncio.Lock()
        self._tasks: dict[Hashable, asyncio.Task[Any]] = {}
        """By key of a piece of work: its task, until the work begins, so that concurrent requests share
        it."""

    async def get(self, key: Hashable, prepare_work: Callable[[], Callable[[], T]]) -> T:
        """Return the result of the work for `key`, which concurrent calls share. `prepare_work` is called on
        the event loop; it returns the function that does the work in a thread."""
        task = self._tasks.get(key)
        if task is None:
            task = self._tasks[key] = asyncio.ensure_future(self._run(key, prepare_work))
        # A client that disconnects must not end the work for other clients.
        result: T = await asyncio.shield(task)
        return result

    async def _run(self, key: Hashable, prepare_work: Callable[[], Callable[[], T]]) -> T:
        async with self._lock:
            del self._tasks[key]
            return await asyncio.to_thread(prepare_work())

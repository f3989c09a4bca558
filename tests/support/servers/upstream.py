"""A scriptable upstream on loopback: a request path has a script that says what goes out and when."""

import asyncio
import contextlib
import itertools
import select
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

from tests.support.servers.peer import Gone, Head, Payload, Peer, chunked, wait_until

OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"
CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"

CLOSE = "close"
"""What a script returns to have its connection closed."""
RESET = "reset"
"""The same, with a reset."""

Script = Callable[["Call"], Awaitable[str | None]]


class Call:
    """One request that reached the upstream."""

    def __init__(self, connection: int, peer: Peer, head: Head) -> None:
        self.connection = connection
        """Which connection it came on, counted from 1."""
        self.peer = peer
        self.head = head
        self.payload: Payload | None = None
        """The body, once it has been read to its end."""

    @property
    def method(self) -> bytes:
        return self.head.line.split(b" ")[0]

    @property
    def target(self) -> bytes:
        return self.head.line.split(b" ")[1]

    async def body(self) -> bytes:
        """Read the request's body to its end. Raises Gone when it is cut."""
        if self.payload is None:
            if (self.head.get("transfer-encoding") or b"").lower() == b"chunked":
                self.payload = await self.peer.chunked_payload()
            else:
                data = await self.peer.exactly(int(self.head.get("content-length") or 0))
                self.payload = Payload(data, data)
        return self.payload.data

    async def say(self, *pieces: bytes) -> None:
        """Send each piece in a write of its own."""
        await self.peer.send(*pieces)

    async def left(self) -> bool:
        """Wait for the other side to end; False when it says something more instead."""
        try:
            return not await self.peer.read()
        except ConnectionError:
            return True


def says(
    *pieces: bytes,
    then: str | None = None,
    after: Callable[[], Awaitable[object]] | None = None,
    read: bool = True,
    taken: bool = False,
) -> Script:
    """Read the request, send these bytes, each piece in its own write.

    Args:
        after: awaited before the first piece.
        read: read the request's body first.
        taken: end only when the other side has read all, so that a reset overtakes no byte.
    """

    async def script(call: Call) -> str | None:
        if read:
            await call.body()
        if after is not None:
            await after()
        await call.say(*pieces)
        if taken:
            await call.peer.taken()
        return then

    return script


def answers(
    body: bytes = b"ok", *, status: bytes = b"200 OK", fields: bytes = b"", chunks: int = 0
) -> Script:
    """A plain answer with Content-Length, or chunked in `chunks` pieces."""
    if chunks:
        size = max(1, -(-len(body) // chunks))
        pieces = [body[i : i + size] for i in range(0, len(body), size)]
        framing, coded = b"Transfer-Encoding: chunked\r\n", chunked(*pieces)
    else:
        framing, coded = b"Content-Length: %d\r\n" % len(body), body
    return says(b"HTTP/1.1 " + status + b"\r\n" + framing + fields + b"\r\n" + coded)


class Upstream:
    """Listens on loopback and plays the script of each request's path."""

    def __init__(self) -> None:
        self.port = 0
        self.connections = 0
        """Connections accepted so far."""
        self.calls: list[Call] = []
        self.strays: list[Call] = []
        """Requests for which there was no script: somebody invented them."""
        self.errors: list[BaseException] = []
        self._scripts: dict[str, Script] = {}
        self._numbers = itertools.count(1)
        self._tasks: set[asyncio.Task[None]] = set()
        self._peers: dict[Peer, asyncio.Task[None]] = {}
        self._accepting: asyncio.Task[None] | None = None
        self._sock: socket.socket | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def open(self) -> int:
        """Connections open now."""
        return len(self._peers)

    def on(self, script: Script) -> str:
        """A path of its own for `script`."""
        path = f"/s{next(self._numbers)}"
        self._scripts[path] = script
        return path

    def at(self, path: str, script: Script) -> None:
        """A script for a path that matters."""
        self._scripts[path] = script

    def calls_to(self, path: str) -> list[Call]:
        """The requests that came for a path made by `on`."""
        return [c for c in self.calls if self._path_of(c.head) == path]

    def call(self, path: str) -> Call:
        """The one request that came for `path`."""
        calls = self.calls_to(path)
        assert len(calls) == 1, f"{path} was asked {len(calls)} times"
        return calls[0]

    def start(self, port: int = 0) -> None:
        """Listen; again on the same port after `stop`."""
        sock = socket.create_server(("127.0.0.1", port or self.port), backlog=1024)
        sock.setblocking(False)
        self._sock = sock
        self.port = sock.getsockname()[1]
        self._accepting = asyncio.get_running_loop().create_task(self._accept())

    async def take_over(self) -> Peer:
        """The one open connection, from now on in the test's own hand."""
        await wait_until(lambda: len(self._peers) == 1)
        ((peer, task),) = self._peers.items()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        return peer

    async def stop(self, *, reset: bool = True) -> None:
        """Go away like a killed process, or (`reset=False`) like one that was told to."""
        if self._accepting is not None:
            self._accepting.cancel()
            await asyncio.gather(self._accepting, return_exceptions=True)
            self._accepting = None
        if self._sock is not None:
            self._sock.close()
            self._sock = None
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for peer in list(self._peers):
            peer.reset() if reset else peer.close()
        self._peers.clear()

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        assert self._sock is not None
        while True:
            sock, _ = await loop.sock_accept(self._sock)
            self.connections += 1
            peer = Peer(sock)
            task = self._peers[peer] = loop.create_task(self._serve(self.connections, peer))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _serve(self, number: int, peer: Peer) -> None:
        try:
            while True:
                call = Call(number, peer, await peer.head())
                self.calls.append(call)
                script = self._scripts.get(call.target.decode("latin-1").partition("?")[0])
                script = script or self._scripts.get(self._path_of(call.head))
                if script is None:
                    self.strays.append(call)
                    script = answers(b"stray", status=b"404 Not Found")
                then = await script(call)
                if then == RESET:
                    peer.reset()
                    break
                if then == CLOSE:
                    break
                await call.body()
        except (Gone, ConnectionError):
            pass
        except asyncio.CancelledError:
            return  # `stop` closes what is left
        except Exception as exc:
            self.errors.append(exc)
        peer.close()
        self._peers.pop(peer, None)

    @staticmethod
    def _path_of(head: Head) -> str:
        parts = head.line.split(b" ")
        target = parts[1] if len(parts) > 1 else b""
        at = target.find(b"/s")
        if at < 0:
            return ""
        digits = itertools.takewhile(lambda c: c in b"0123456789", target[at + 2 :])
        return "/s" + bytes(digits).decode()


@asynccontextmanager
async def upstream() -> AsyncIterator[Upstream]:
    """A running upstream; what a script raised fails the test at the end."""
    server = Upstream()
    server.start()
    try:
        yield server
    finally:
        with contextlib.suppress(OSError):
            await server.stop()
    if server.errors:
        raise server.errors[0]


@asynccontextmanager
async def unanswered_port() -> AsyncIterator[int]:
    """A port whose queue is full: the kernel drops what comes, and a connect hangs."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        port = listener.getsockname()[1]
        fillers = []
        for _ in range(8):
            filler = socket.socket()
            filler.setblocking(False)
            filler.connect_ex(("127.0.0.1", port))
            fillers.append(filler)
        await wait_until(lambda: select.select([], fillers, [], 0)[1])  # one fills the queue
        try:
            yield port
        finally:
            for filler in fillers:
                filler.close()

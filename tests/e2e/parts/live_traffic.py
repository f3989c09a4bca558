"""The traffic of live_streams.py: a server of event streams whose every byte is known, and their clients.

A request says in its fields which events it wants: `X-Request-Id`, `X-Events` (how many; 0: an answer in one
piece) and `X-Every-Ms`. So both ends know what has to come, to the byte, chunk framing included.

    python tests/e2e/live_traffic.py     serves, and prints its port
"""

from __future__ import annotations

import asyncio
import resource
import socket
import sys
import time
from dataclasses import dataclass, field

import uvloop

__all__ = ["Newcomers", "Stream", "body_of", "open_files_raised", "open_streams"]

CONNECT_AT_ONCE = 50  # a hundred thousand connections a second would measure the kernel's queue
ANSWER_S_MAX = 90.0
FILES_NEEDED = 4_096  # a stream takes two in a relay, and one at each end


def event_of(name: str, i: int) -> bytes:
    """One event of a stream, as the chunk that it travels in."""
    word = f"{name}-{i} "
    data = f'data: {{"model":"known","choices":[{{"index":0,"delta":{{"content":"{word}"}}}}]}}\n\n'.encode()
    return b"%x\r\n%s\r\n" % (len(data), data)


def end_of() -> list[bytes]:
    done = b"data: [DONE]\n\n"
    return [b"%x\r\n%s\r\n" % (len(done), done), b"0\r\n\r\n"]


def body_of(name: str, events: int) -> bytes:
    """All that has to come after the head of the answer."""
    if not events:
        return b'{"id":"%s","object":"chat.completion","choices":[]}' % name.encode()
    return b"".join([*(event_of(name, i) for i in range(events)), *end_of()])


def open_files_raised() -> int:
    """The soft limit on open files, raised to the hard one."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return hard


# ---------------------------------------------------------------- the server


class _Server(asyncio.Protocol):
    """One connection: request after request."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._data = b""
        self._transport: asyncio.WriteTransport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport  # type: ignore[assignment]

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None

    def data_received(self, data: bytes) -> None:
        self._data += data
        head, mark, rest = self._data.partition(b"\r\n\r\n")
        if not mark:
            return
        fields = dict(line.lower().split(b": ", 1) for line in head.split(b"\r\n")[1:])
        length = int(fields.get(b"content-length", b"0"))
        if len(rest) < length:
            return
        self._data = rest[length:]
        name, events = fields[b"x-request-id"].decode(), int(fields[b"x-events"])
        if events:
            self._write(
                b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
            )
            self._send(name, 0, events, int(fields[b"x-every-ms"]) / 1e3, self._loop.time())
        else:
            body = body_of(name, 0)
            head = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
            self._write(head % len(body) + body)

    def _send(self, name: str, i: int, events: int, every_s: float, began: float) -> None:
        if self._transport is None:
            return
        if i < events:
            self._write(event_of(name, i))
            self._loop.call_at(began + (i + 1) * every_s, self._send, name, i + 1, events, every_s, began)
        else:
            for piece in end_of():
                self._write(piece)

    def _write(self, data: bytes) -> None:
        if self._transport is not None:
            self._transport.write(data)


async def _serve() -> None:
    server = await asyncio.get_running_loop().create_server(_Server, "127.0.0.1", 0, backlog=4_096)
    print(server.sockets[0].getsockname()[1], flush=True)
    await asyncio.to_thread(sys.stdin.read)  # until whoever started us is gone


# ---------------------------------------------------------------- the clients


@dataclass(eq=False)
class Stream(asyncio.Protocol):
    """One request of one client on a connection of its own."""

    name: str
    events: int
    every_s: float
    began: float = 0.0
    ended: float = 0.0
    problem: str | None = None
    got: bytearray = field(default_factory=bytearray)
    over: asyncio.Event = field(default_factory=asyncio.Event)
    _transport: asyncio.WriteTransport | None = None

    async def ask(self, port: int) -> None:
        """Connects and sends; `over` is set when the answer is whole, or what is wrong with it is known."""
        self.began = time.monotonic()
        try:
            await asyncio.get_running_loop().create_connection(lambda: self, "127.0.0.1", port)
        except OSError as exc:
            self._end("refused" if isinstance(exc, ConnectionRefusedError) else f"connect: {exc}")

    @property
    def live(self) -> bool:
        """Its first event is here, and its last is not."""
        return b"data: " in self.got and not self.over.is_set()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport  # type: ignore[assignment]
        assert self._transport is not None
        body = b'{"model":"known","stream":%s,"messages":[]}' % (b"true" if self.events else b"false")
        head = (
            f"POST /v1/chat/completions HTTP/1.1\r\nHost: tap\r\nContent-Type: application/json\r\n"
            f"X-Request-Id: {self.name}\r\nX-Events: {self.events}\r\n"
            f"X-Every-Ms: {round(self.every_s * 1e3)}\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        self._transport.write(head.encode() + body)

    def data_received(self, data: bytes) -> None:
        self.got += data
        end = b"0\r\n\r\n" if self.events else b"]}"
        if self.got.endswith(end):
            head, _, body = bytes(self.got).partition(b"\r\n\r\n")
            right = head.startswith(b"HTTP/1.1 200 ") and body == body_of(self.name, self.events)
            self._end(None if right else "other bytes than were sent")

    def connection_lost(self, exc: Exception | None) -> None:
        self._end(f"cut after {len(self.got)} bytes ({exc or 'closed'})")

    def _end(self, problem: str | None) -> None:
        if not self.over.is_set():
            self.problem, self.ended = problem, time.monotonic()
            self.over.set()
        if self._transport is not None:
            self._transport.close()


async def open_streams(port: int, n: int, events: int, every_s: float, prefix: str) -> list[Stream]:
    """So many streams, all of them begun: the first event of each is here."""
    streams = [Stream(f"{prefix}{i}", events, every_s) for i in range(n)]
    for i in range(0, n, CONNECT_AT_ONCE):
        await asyncio.gather(*(stream.ask(port) for stream in streams[i : i + CONNECT_AT_ONCE]))
    give_up = time.monotonic() + events * every_s
    while not all(stream.live or stream.over.is_set() for stream in streams):
        if time.monotonic() > give_up:
            break
        await asyncio.sleep(0.02)
    return streams


class Newcomers:
    """Clients that come one after the other at a steady pace, each for one answer in one piece."""

    def __init__(self, port: int, every_s: float, prefix: str) -> None:
        self.asked: list[Stream] = []
        self._port = port
        self._every_s = every_s
        self._prefix = prefix
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.get_running_loop().create_task(self._come())

    async def _come(self) -> None:
        loop = asyncio.get_running_loop()
        due = loop.time()
        pending: set[asyncio.Task[None]] = set()
        while True:
            stream = Stream(f"{self._prefix}{len(self.asked)}", 0, 0.0)
            self.asked.append(stream)
            task = loop.create_task(stream.ask(self._port))
            pending.add(task)
            task.add_done_callback(pending.discard)
            due += self._every_s
            await asyncio.sleep(max(0.0, due - loop.time()))

    def stop(self) -> None:
        """Nobody else comes."""
        if self._task is not None:
            self._task.cancel()


async def all_over(streams: list[Stream]) -> None:
    """Until each is over; what is not by then is a problem of its own."""
    try:
        async with asyncio.timeout(ANSWER_S_MAX):
            for stream in streams:
                await stream.over.wait()
    except TimeoutError:
        for stream in streams:
            stream._end(f"not whole after {ANSWER_S_MAX:.0f} s, {len(stream.got)} bytes")


def listening(backlog: int = 4_096) -> socket.socket:
    """A socket such as an init system holds for a service."""
    return socket.create_server(("127.0.0.1", 0), backlog=backlog)


if __name__ == "__main__":
    open_files_raised()
    uvloop.run(_serve())

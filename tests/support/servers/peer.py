"""One end of a TCP connection, spoken to in raw bytes: what the scripted upstream and the raw client share.

Messages are read by a reader of its own, written from RFC 9112 and kept apart from llmtap's, so that the
tests do not ask the code under test whether it was right.
"""

import asyncio
import gc
import socket
import struct
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

import uvloop

# Tests of connections import both from here.
from tests.support.waiting import PATIENCE_S, wait_until  # noqa: F401

READ_BYTES = 1 << 18
LIMIT_S = 150.0
"""For a test of seconds; half of what pytest allows it."""
STILL_TURNS = 15


class Ending(Enum):
    """How a peer ended its side."""

    FIN = "fin"
    RST = "rst"


class Gone(Exception):
    """The peer ended before what was awaited had come."""

    def __init__(self, how: Ending, got: bytes) -> None:
        super().__init__(f"the peer ended ({how.value}) after {got[-200:]!r}")
        self.how = how
        self.got = got


@dataclass(slots=True)
class Head:
    """A start line and its fields, as they came."""

    raw: bytes
    line: bytes
    fields: list[tuple[bytes, bytes]]

    @classmethod
    def parse(cls, raw: bytes) -> "Head":
        line, *rest = raw.removesuffix(b"\r\n\r\n").split(b"\r\n")
        return cls(raw, line, fields_of(rest))

    def all(self, name: str) -> list[bytes]:
        """Every value of a field, in order."""
        return [v for n, v in self.fields if n.lower() == name.lower().encode()]

    def get(self, name: str) -> bytes | None:
        """The only value of a field, or None; two are an error of the test."""
        values = self.all(name)
        assert len(values) < 2, f"{name} came {len(values)} times: {values}"
        return values[0] if values else None


def fields_of(lines: list[bytes]) -> list[tuple[bytes, bytes]]:
    """Field lines cut at their colon."""
    return [(name, value.strip(b" \t")) for name, _, value in (line.partition(b":") for line in lines)]


def chunk(data: bytes) -> bytes:
    """One chunk (RFC 9112 7.1)."""
    return b"%x\r\n%b\r\n" % (len(data), data)


def chunked(*pieces: bytes, trailers: bytes = b"") -> bytes:
    """A whole chunked body, one chunk for each piece."""
    return b"".join(chunk(p) for p in pieces if p) + b"0\r\n" + trailers + b"\r\n"


@dataclass(slots=True)
class Payload:
    """A body: what it says, and the bytes it said it in."""

    data: bytes = b""
    raw: bytes = b""
    trailers: list[tuple[bytes, bytes]] = field(default_factory=list)


class Peer:
    """A connected socket and what has been read from it but not yet used."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.sock = sock
        self.unread = b""
        self.sent_bytes = 0
        self._loop = asyncio.get_running_loop()

    # ---------------------------------------------------------------- saying

    async def send(self, *pieces: bytes) -> None:
        """Each piece in a system call of its own, as long as the kernel takes it whole."""
        for piece in pieces:
            view = memoryview(piece)
            while view:
                try:
                    n = self.sock.send(view)
                except (BlockingIOError, InterruptedError):
                    await self._writable()
                    continue
                self.sent_bytes += n
                view = view[n:]

    async def _writable(self) -> None:
        ready = self._loop.create_future()
        self._loop.add_writer(self.sock, lambda: ready.done() or ready.set_result(None))
        try:
            await ready
        finally:
            self._loop.remove_writer(self.sock)

    async def taken(self) -> None:
        """Until the other side, which has to be on this host, has read all that was said."""
        await wait_taken(self.sock.getsockname(), self.sock.getpeername())

    def half_close(self) -> None:
        """Say no more, still listen."""
        self.sock.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        """An orderly end."""
        self.sock.close()

    def reset(self) -> None:
        """The end of a process that was killed."""
        self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.sock.close()

    # ---------------------------------------------------------------- hearing

    async def read(self) -> bytes:
        """What comes next, in the pieces the kernel gives; empty at FIN. Raises ConnectionResetError."""
        if self.unread:
            data, self.unread = self.unread, b""
            return data
        return await self._loop.sock_recv(self.sock, READ_BYTES)

    async def _more(self, got: bytes) -> bytes:
        try:
            data = await self._loop.sock_recv(self.sock, READ_BYTES)
        except ConnectionError:
            raise Gone(Ending.RST, got) from None
        if not data:
            raise Gone(Ending.FIN, got)
        return data

    async def until(self, mark: bytes) -> bytes:
        """Everything up to and with `mark`."""
        got, self.unread = self.unread, b""
        at = 0
        while (end := got.find(mark, at)) < 0:
            at = max(0, len(got) - len(mark) + 1)
            got += await self._more(got)
        end += len(mark)
        self.unread = got[end:]
        return got[:end]

    async def exactly(self, n: int) -> bytes:
        """The next `n` bytes."""
        pieces, have = [self.unread], len(self.unread)
        self.unread = b""
        while have < n:
            try:
                data = await self._more(b"")
            except Gone as gone:
                raise Gone(gone.how, b"".join(pieces)) from None
            pieces.append(data)
            have += len(data)
        got = b"".join(pieces)
        self.unread = got[n:]
        return got[:n]

    async def to_end(self) -> tuple[bytes, Ending]:
        """Everything that still comes, and how it ends."""
        pieces = [self.unread]
        self.unread = b""
        while True:
            try:
                pieces.append(await self._more(b""))
            except Gone as gone:
                return b"".join(pieces), gone.how

    async def silent_for(self, seconds: float) -> bool:
        """True when nothing comes for so long: neither a byte nor an end."""
        if self.unread:
            return False
        try:
            async with asyncio.timeout(seconds):
                self.unread = await self.read()
        except TimeoutError:
            return True
        except ConnectionError:
            pass
        return False

    async def head(self) -> Head:
        """The next message's head."""
        return Head.parse(await self.until(b"\r\n\r\n"))

    async def chunk(self) -> bytes:
        """The next chunk's data; empty for the last one, whose trailers are not yet read."""
        line = await self.until(b"\r\n")
        size = int(line.split(b";")[0].strip(), 16)
        if size == 0:
            return b""
        data = await self.exactly(size + 2)
        assert data.endswith(b"\r\n"), f"a chunk of {size} ends with {data[-2:]!r}"
        return data[:-2]

    async def chunked_payload(self) -> Payload:
        """A chunked body to its end, trailers included. Raises Gone with the payload so far."""
        data: list[bytes] = []
        raw: list[bytes] = []
        lines = []
        try:
            while True:
                raw.append(await self.until(b"\r\n"))
                size = int(raw[-1].split(b";")[0].strip(), 16)
                if size == 0:
                    break
                piece = await self.exactly(size + 2)
                assert piece.endswith(b"\r\n"), f"a chunk of {size} ends with {piece[-2:]!r}"
                raw.append(piece)
                data.append(piece[:-2])
            while True:
                raw.append(await self.until(b"\r\n"))
                if raw[-1] == b"\r\n":
                    break
                lines.append(raw[-1].removesuffix(b"\r\n"))
        except Gone as gone:
            raise Gone(gone.how, b"".join(data)) from None
        return Payload(b"".join(data), b"".join(raw), fields_of(lines))


def _waiting(here: tuple[str, int], there: tuple[str, int]) -> int:
    """Bytes on their way from one end of a connection of this host to the other, and unread there."""
    ours, theirs = (f"{end[1]:04X}" for end in (here, there))
    columns = {(ours, theirs): 0, (theirs, ours): 1}  # tx_queue of ours, rx_queue of theirs
    waiting = 0
    for line in Path("/proc/self/net/tcp").read_text().splitlines()[1:]:
        fields = line.split()
        column = columns.get((fields[1].rpartition(":")[2], fields[2].rpartition(":")[2]))
        if column is not None:
            waiting += int(fields[4].split(":")[column], 16)
    return waiting


async def wait_taken(here: tuple[str, int], there: tuple[str, int]) -> None:
    """Until the far end of a connection of this host has read all that was said at its near end.

    The kernel's table of sockets knows. A reset from then on overtakes none of it.
    """
    await wait_until(lambda: _waiting(here, there) == 0)


async def wait_still(count: Callable[[], int]) -> int:
    """Until a count grows no more over some turns of the loop, and how far it came.

    Turns and not time: a process that is given no CPU stands still, too.
    """
    before, turns = -1, 0
    while turns < STILL_TURNS:
        await asyncio.sleep(0.01)
        now = count()
        turns = turns + 1 if now == before else 0
        before = now
    return before


_AT_END: list[Callable[[], None]] = []


def at_end(action: Callable[[], None]) -> None:
    """Call this at the end of the running scene, also of one that fails.

    For open TLS transports: with one of them, uvloop's `close` never returns, and no time-out ends it.
    """
    _AT_END.append(action)


def play(work: Awaitable[Any], limit_s: float = LIMIT_S) -> Any:
    """Run `work` on a fresh uvloop; what any callback raises fails the test."""
    faults: list[dict[str, Any]] = []

    async def main() -> Any:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _, context: faults.append(context))
        try:
            async with asyncio.timeout(limit_s):
                return await work
        finally:
            while _AT_END:
                _AT_END.pop()()

    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            result = runner.run(main())
            gc.collect(0)  # a task whose error nobody fetched says so when it goes
    except BaseException as exc:
        _raise_faults(faults, exc)
        raise
    _raise_faults(faults, None)
    return result


def _raise_faults(faults: list[dict[str, Any]], cause: BaseException | None) -> None:
    if faults:
        first = faults[0]
        error = first.get("exception")
        said = f"{len(faults)} unhandled in the loop; the first: {first['message']}: {error!r}"
        raise AssertionError(said) from error or cause

"""Receive batches of frames on a local socket, pass them to an Assembler, and acknowledge each processed one.

Each connection belongs to one vantage: a relay, a passive vantage, or an app with the middleware (`channel/`
sends the frames). If a vantage hangs up while exchanges are open, and does not connect again, it has died,
and its exchanges end as `tap_error`. If it has connected again, it counts these exchanges itself, and the
meter discards them. The receiver closes a connection that sends invalid bytes.
"""

import asyncio
import logging
import os
import socket
import stat
from collections import deque
from collections.abc import Iterator
from typing import Final, cast

import msgspec

from llmtap.channel.frames import ACK, BatchReader, FrameKind, Hello
from llmtap.meter.pipeline.assembler import Assembler
from llmtap.meter.pipeline.pipeline import ExchangePipeline

_DONE: Final = object()

log = logging.getLogger(__name__)


class Receiver:
    """Listener for the connections of relays and other vantages."""

    def __init__(self, pipeline: ExchangePipeline) -> None:
        self._pipeline = pipeline
        self._connections: set[_Connection] = set()
        self._server: asyncio.Server | None = None

    async def start(self, sock: socket.socket) -> None:
        """Accept connections on a listening unix socket."""
        loop = asyncio.get_running_loop()
        # Do not use create_unix_server: since Python 3.13, its server removes the file when it closes,
        # although it can be the file of another meter (`SocketFile`).
        self._server = await loop.create_server(
            lambda: _Connection(self._pipeline, self._connections), sock=sock
        )

    async def wait_for_relays(self) -> None:
        """Wait until no relay is connected; apps with the middleware do not count."""
        while (one := next((c for c in self._connections if not c.guest), None)) is not None:
            await one.lost_event.wait()

    async def close(self) -> None:
        """Close the socket and all connections, and wait for their end."""
        if self._server is not None:
            self._server.close()
        leaving = list(self._connections)
        for connection in leaving:
            connection.close()
        for connection in leaving:
            await connection.lost_event.wait()


class _Connection(asyncio.Protocol):
    """Connection of one relay or other vantage."""

    def __init__(self, pipeline: ExchangePipeline, connections: "set[_Connection]") -> None:
        self._pipeline = pipeline
        self._all_connections = connections
        """The receiver's set of connections, to which this one adds itself."""
        self._batches = BatchReader()
        """Parser of the received bytes."""
        self._transport: asyncio.Transport | None = None
        self._assembler: Assembler | None = None
        self._relay = ""
        self._epoch = 0
        """Number of this connection of the relay, by which RelayBook knows whether the relay has
        reconnected."""
        self._acks = bytearray()
        """Encoded confirmations of batches that are not sent yet."""
        self._closed_by_meter = self._connection_lost = self._reading_paused = False
        """Whether the meter closed the connection, whether it was lost, and whether reading is paused until
        the unread data are processed."""
        self._unread_data: deque[bytes] = deque()
        """Received bytes that are not processed yet, for the next turns."""
        self._work: Iterator[None] | None = None
        """Iterator that processes the bytes read so far; None if all are processed."""
        self.guest = False
        """Whether this vantage is an app or another meter's relay: the meter's end does not wait for it."""
        self.lost_event = asyncio.Event()
        """Set when the connection has ended and its data are processed."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # A cast, since uvloop's transports are not subclasses of asyncio's.
        self._transport = cast(asyncio.Transport, transport)
        self._all_connections.add(self)

    def data_received(self, data: bytes) -> None:
        self._unread_data.append(data)
        if self._work is None:
            self._work = self._process_unread()
            self._process_batches()

    def _process_batches(self) -> None:
        """Process the bytes read so far. If the event loop must run, stop and go on in its next round."""
        work, turns = self._work, self._pipeline.cpu_yield
        if work is None:
            return  # `close` has discarded the work
        turns.begin_turn()
        try:
            unfinished = next(work, _DONE) is not _DONE
        except (ValueError, msgspec.MsgspecError) as error:
            # After an invalid batch, the start of the next batch cannot be found. So hang up: the relay then
            # connects again.
            self._pipeline.on_error("bad_batch", error)
            self.close()
            return
        if unfinished:
            self._pause_reading()
            asyncio.get_running_loop().call_soon(self._process_batches)
            return
        self._work = None
        if turns.is_behind:
            # uvloop reads a socket up to 32 times in a round of the loop, and an answer of the admin port
            # takes several rounds: seconds, during a backlog. Pausing limits uvloop to one read a round.
            self._pause_reading()
        if self._reading_paused:
            asyncio.get_running_loop().call_soon(self._resume_reading)
        if self._connection_lost:
            self._leave()

    def _process_unread(self) -> Iterator[None]:
        """Process the unread bytes; yield when the event loop must run. Raises ValueError on invalid data."""
        turns = self._pipeline.cpu_yield
        while self._unread_data:
            for batch_no, frames in self._batches.feed(self._unread_data.popleft()):
                self._pipeline.frames += len(frames)
                if self._assembler is None and len(frames):
                    self._join(next(frames))
                if self._assembler is not None:
                    assembler = self._assembler
                    left = assembler.unrecognised(frames)
                    yield from assembler.work(turns.pace(left, frames.last_ns, assembler.charge), turns)
                if not self._acks:
                    asyncio.get_running_loop().call_soon(self._acknowledge)
                self._acks += ACK.pack(batch_no)

    def _pause_reading(self) -> None:
        if self._transport is not None and not self._reading_paused:
            self._reading_paused = True
            self._transport.pause_reading()

    def _resume_reading(self) -> None:
        is_ready = self._work is None and not self._connection_lost
        if self._transport is not None and self._reading_paused and is_ready:
            self._reading_paused = False
            self._transport.resume_reading()

    def _acknowledge(self) -> None:
        """Send the confirmations of processed batches."""
        # Write to the socket, not through the transport: after a failed write, the transport closes the
        # connection and discards unread bytes of a relay that has died. A write to the socket leaves them
        # readable.
        transport, acks = self._transport, bytes(self._acks)
        self._acks.clear()
        if transport is None or self.lost_event.is_set() or transport.is_closing():
            return
        sent = 0
        if not transport.get_write_buffer_size():
            try:
                sent = os.write(transport.get_extra_info("socket").fileno(), acks)
            except BlockingIOError:
                pass
            except OSError:
                return
        if sent < len(acks):
            transport.write(acks[sent:])

    def connection_lost(self, exc: Exception | None) -> None:
        self._connection_lost = True
        if self._closed_by_meter:
            # Discard the rest of the work: the relay counts the exchanges that were not acknowledged.
            self._work = None
        if self._work is None:
            self._leave()

    def _leave(self) -> None:
        """Remove the relay. End its open exchanges if it died, or discard them if it has connected again."""
        self._all_connections.discard(self)
        self.lost_event.set()
        if self._assembler is None:
            return
        self._pipeline.experiments.leave(self._send_control_word)
        self._pipeline.streams.leave(self._assembler)
        reckoning = self._assembler.reckoning
        open_exchanges, final = reckoning.running, None
        again = self._pipeline.relays.has_reconnected(self._relay, self._epoch)
        if self._closed_by_meter or again:
            self._assembler.discard()
        else:
            final = reckoning.final_status()
            self._assembler.lose()
            if final is not None:
                self._pipeline.on_relay_left(self._relay, final)
        now_ns = self._pipeline.clock.mono_ns()
        self._pipeline.relays.leave(self._relay, self._epoch, open_exchanges, now_ns, final)
        log.info("event=relay_left relay=%s open_exchanges=%d", self._relay, open_exchanges)

    def close(self) -> None:
        self._closed_by_meter = True
        self._work = None
        if self._transport is not None:
            self._transport.abort()

    def _send_control_word(self, word: int) -> None:
        if self._transport is not None:
            self._transport.write(ACK.pack(word))

    def _join(self, frame: tuple[int, int, int, int, bytes]) -> None:
        """Register the relay by its hello, the first frame."""
        if frame[0] != FrameKind.HELLO:
            problem = (
                f"the first frame of a connection has kind {frame[0]}, expected {FrameKind.HELLO} (hello)"
            )
            raise ValueError(f"{problem}: is the sender llmtap?")
        hello = msgspec.json.decode(frame[4], type=Hello)
        self._relay = hello.relay
        self.guest = hello.guest
        self._epoch = self._pipeline.relays.join(hello)
        self._pipeline.experiments.join(hello.switch, self._send_control_word)
        self._assembler = Assembler(hello, self._pipeline)
        self._pipeline.streams.join(self._assembler)
        log.info(
            "event=relay_joined relay=%s pid=%d clock=%s implementation=%s",
            hello.relay,
            hello.pid,
            hello.clock,
            hello.implementation or "unknown",
        )


class SocketFile:
    """File of a listening unix socket. Make this object, and call `remove`, only while the socket listens.

    The open socket keeps its inode number in use, so the file of another meter cannot have the same number.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._identity = _file_identity(path)
        """Device and inode, to remove only the own file."""

    def remove(self) -> None:
        """Remove the file, unless another meter has replaced it by its own file."""
        if self._identity is not None and _file_identity(self._path) == self._identity:
            os.unlink(self._path)


def _file_identity(path: str) -> tuple[int, int] | None:
    """Return device and inode of a file, or None if the file does not exist."""
    try:
        status = os.lstat(path)
    except FileNotFoundError:
        return None
    return status.st_dev, status.st_ino


def listen_on(path: str) -> socket.socket:
    """Return a listening unix socket at `path` that only this user can open (0600).

    The socket of a dead meter is replaced. Raises OSError if `path` is another kind of file, or is longer
    than the limit of the system (about 100 bytes).
    """
    try:
        if stat.S_ISSOCK(os.lstat(path).st_mode):
            os.unlink(path)
    except FileNotFoundError:
        pass
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    # Set the mask instead of calling chmod() after bind(): between these calls, other users could connect.
    mask = os.umask(0o177)
    try:
        sock.bind(path)
    except BaseException:
        sock.close()
        raise
    finally:
        os.umask(mask)
    sock.listen(64)
    sock.setblocking(False)
    return sock

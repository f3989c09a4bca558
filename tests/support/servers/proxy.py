"""A Relay in this very process and loop, on a port of its own, with a fake meter that keeps its frames."""

import asyncio
import os
import shutil
import socket
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any, Final, NamedTuple

import msgspec

from llmtap.channel.experiment import Experiment
from llmtap.channel.frames import ACK, BatchReader, Closing, FrameKind, Hello
from llmtap.channel.status import RelayStatus
from llmtap.clock import Clock
from llmtap.units import Duration
from llmtap.vantage.relay import forwarding
from llmtap.vantage.relay.options import RelayOptions
from llmtap.vantage.relay.relay import Relay
from tests.support.servers.peer import PATIENCE_S, wait_until
from tests.support.servers.raw_client import Answer, RawClient, request
from tests.support.servers.upstream import Upstream, upstream


def ms(n: float) -> Duration:
    """A duration of `n` milliseconds."""
    return Duration(round(n * 1_000_000))


PATIENT: Final = {"connect_timeout": ms(600_000), "upstream_keepalive": ms(600_000)}
"""Limits that a test which is not about them never meets, however long a busy machine lets it wait."""


THREADED: Final = os.environ.get("TEST_FORWARDING_THREAD") == "1"
"""Run all relays of the tests with the forwarding thread: `make test-thread`."""
if THREADED:
    forwarding.HAND_OVER_READS = 1  # type: ignore[misc]  # so that short bodies go to it, too


class Frame(NamedTuple):
    """One frame, as the meter gets it."""

    kind: int
    seq: int
    t_ns: int
    extra_ns: int
    data: bytes


def spelled_out(frame: Frame) -> Iterator[Frame]:
    """The frames that a shorthand stands for; any other frame as it is.

    A relay may say in one frame what it learnt in one read. The tests ask what was said, not how.
    """
    kind, seq, t_ns, extra_ns, data = frame
    head, mark, body = data.partition(b"\r\n\r\n")
    head += mark
    if kind is FrameKind.SENT or (kind is FrameKind.OPEN and extra_ns):
        end_ns = t_ns if kind is FrameKind.SENT else extra_ns
        yield Frame(FrameKind.OPEN, seq, t_ns, 0, head)
        if body:
            yield Frame(FrameKind.REQUEST_DATA, seq, end_ns, 0, body)
        yield Frame(FrameKind.REQUEST_END, seq, end_ns, 0, b"")
        if kind is FrameKind.SENT:
            yield Frame(FrameKind.SUBMIT, seq, extra_ns, extra_ns - t_ns, b"")
    elif kind is FrameKind.ANSWER:
        yield Frame(FrameKind.RESPONSE_HEAD, seq, t_ns, extra_ns, head)
        if body:
            yield Frame(FrameKind.RESPONSE_DATA, seq, t_ns, extra_ns, body)
        yield Frame(FrameKind.RESPONSE_END, seq, t_ns, 0, b"")
    elif kind is FrameKind.RESPONSE_AT_ONCE:
        yield frame._replace(kind=FrameKind.RESPONSE_DATA)
    else:
        yield frame


class Recording:
    """The frames of one exchange, in the order they came."""

    def __init__(self, frames: list[Frame]) -> None:
        self.frames = frames

    @property
    def kinds(self) -> list[int]:
        return [f.kind for f in self.frames]

    def of(self, kind: int) -> list[Frame]:
        return [f for f in self.frames if f.kind is kind]

    def one(self, kind: int) -> Frame:
        frames = self.of(kind)
        assert len(frames) == 1, f"{len(frames)} frames of {kind.name} in {[k.name for k in self.kinds]}"
        return frames[0]

    def data(self, kind: int) -> bytes:
        return b"".join(f.data for f in self.of(kind))

    @property
    def request(self) -> bytes:
        """The request as received: head, and body with its framing."""
        return b"".join(f.data for f in self.frames if f.kind in (FrameKind.OPEN, FrameKind.REQUEST_DATA))

    @property
    def answer(self) -> bytes:
        """The final answer as received: head, and body with its framing."""
        kinds = (FrameKind.RESPONSE_HEAD, FrameKind.RESPONSE_DATA)
        return b"".join(f.data for f in self.frames if f.kind in kinds)

    @property
    def closing(self) -> Closing:
        return msgspec.json.decode(self.one(FrameKind.CLOSE).data, type=Closing)


class FakeMeter:
    """Listens where the relay looks for its meter, keeps every frame and acknowledges every batch.

    `pause` makes it slow (it reads nothing), `stop` kills it.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self.frames: list[Frame] = []
        self.raw: list[Frame] = []
        """The same as they came: shorthands are not spelled out."""
        """Of exchanges, spelled out."""
        self.hellos: list[Hello] = []
        self.statuses: list[RelayStatus] = []
        self.batches: list[int] = []
        """Numbers of the batches that came, in order."""
        self.acknowledges = True
        self._server: asyncio.Server | None = None
        self.links: set[_Link] = set()
        self._paused = False

    async def start(self) -> None:
        """Listen; again after `stop`."""
        loop = asyncio.get_running_loop()
        self._server = await loop.create_unix_server(lambda: _Link(self), self.path)

    def stop(self) -> None:
        """Gone, like a killed process: connections end, the socket's file stays."""
        if self._server is not None:
            self._server.close()
            self._server = None
        for link in list(self.links):
            link.transport.abort()

    def pause(self) -> None:
        """Read nothing until `resume`."""
        self._paused = True
        for link in self.links:
            link.transport.pause_reading()

    def resume(self) -> None:
        self._paused = False
        for link in self.links:
            link.transport.resume_reading()

    def acknowledge(self) -> None:
        """Acknowledge all that came, for a meter that does not do so by itself."""
        for link in self.links:
            link.acknowledge(self.batches[-1])

    def say(self, word: int) -> None:
        """A word to every relay, among the acknowledgements."""
        for link in self.links:
            link.transport.write(ACK.pack(word))

    def exchange(self, seq: int) -> Recording:
        """What came of one exchange so far."""
        return Recording([f for f in self.frames if f.seq == seq])

    async def closed(self, seq: int, seconds: float = PATIENCE_S) -> Recording:
        """The exchange's frames, once it is over."""
        await wait_until(lambda: FrameKind.CLOSE in self.exchange(seq).kinds, seconds)
        return self.exchange(seq)

    def take(self, batch_no: int, rows: list[tuple[int, int, int, int, bytes]]) -> None:
        """A batch came."""
        self.batches.append(batch_no)
        for kind, seq, t_ns, extra_ns, data in rows:
            frame = Frame(kind, seq, t_ns, extra_ns, data)
            match frame.kind:
                case FrameKind.HELLO:
                    self.hellos.append(msgspec.json.decode(data, type=Hello))
                case FrameKind.STATUS:
                    self.statuses.append(msgspec.json.decode(data, type=RelayStatus))
                case _:
                    self.raw.append(frame)
                    self.frames += spelled_out(frame)


class _Link(asyncio.Protocol):
    """One relay's connection to the fake meter."""

    def __init__(self, meter: FakeMeter) -> None:
        self._meter = meter
        self._reader = BatchReader()
        self.transport: Any = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport
        self._meter.links.add(self)
        if self._meter._paused:
            self.transport.pause_reading()

    def data_received(self, data: bytes) -> None:
        for batch_no, rows in self._reader.feed(data):
            self._meter.take(batch_no, list(rows))
            if self._meter.acknowledges:
                self.acknowledge(batch_no)

    def acknowledge(self, batch_no: int) -> None:
        self.transport.write(ACK.pack(batch_no))

    def connection_lost(self, exc: Exception | None) -> None:
        self._meter.links.discard(self)


class Tapped:
    """A running relay, its fake meter and the clients that talk to it."""

    def __init__(self, relay: Relay, meter: FakeMeter, port: int) -> None:
        self.relay = relay
        self.meter = meter
        self.port = port
        self.clients: list[RawClient] = []
        self.drained = False

    async def client(self, **buffers: int) -> RawClient:
        """A new connection to the relay."""
        client = await RawClient.connect(self.port, **buffers)
        self.clients.append(client)
        return client

    async def ask(self, raw: bytes) -> Answer:
        """Send a request on a new connection, read its answer."""
        return await (await self.client()).ask(raw)

    async def get(self, path: str, *fields: str) -> Answer:
        return await self.ask(request("GET", path, *fields))

    async def post(self, path: str, body: bytes, *fields: str) -> Answer:
        return await self.ask(request("POST", path, *fields, body=body))

    async def closing(self, seq: int = 1) -> Closing:
        """How an exchange ended, once it has."""
        return (await self.meter.closed(seq)).closing

    async def drain(self) -> None:
        """What SIGTERM does to a relay process."""
        self.drained = True
        await self.relay.drain()


@asynccontextmanager
async def tapped(
    url: str,
    *,
    with_meter: bool = True,
    experiment: Experiment | None = None,
    name: str = "test.0.1",
    clocks: Clock | None = None,
    **options: Any,
) -> AsyncIterator[Tapped]:
    """A relay in front of `url`; at the end it drains, and must have lost count of nothing."""
    loop = asyncio.get_running_loop()
    folder = tempfile.mkdtemp(prefix="tap-")
    meter = FakeMeter(f"{folder}/tap.sock")
    if with_meter:
        await meter.start()
    sock = socket.create_server(("127.0.0.1", 0), backlog=1024)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setblocking(False)
    said: dict[str, Any] = {"drain_timeout": ms(200), "skip": (), "thread": THREADED, **PATIENT, **options}
    relay = Relay(
        loop,
        RelayOptions(upstream=url, **said),
        name=name,
        tap_path=meter.path,
        experiment=experiment,
        clock=clocks,
    )
    tap = Tapped(relay, meter, sock.getsockname()[1])
    try:
        relay.start([sock])
        if with_meter:
            await wait_until(lambda: meter.hellos)
        yield tap
    finally:
        for client in tap.clients:
            client.close()
        if not tap.drained:
            await tap.drain()
        meter.stop()
        shutil.rmtree(folder, ignore_errors=True)
    ledger = relay.tap.ledger
    assert ledger.opened == ledger.measured + sum(ledger.dropped.values()) + ledger.unsettled
    assert ledger.unsettled == 0
    assert not relay.flows, "an exchange outlived its relay"
    assert not relay.connections, "a connection outlived its relay"


@asynccontextmanager
async def stage(**options: Any) -> AsyncIterator[tuple[Upstream, Tapped]]:
    """A scripted upstream and a relay in front of it."""
    async with upstream() as server, tapped(server.url, **options) as tap:
        yield server, tap

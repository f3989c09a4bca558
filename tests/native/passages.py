"""Fuzz target: an answer's body on its way from the upstream to the client, with all that may go wrong.

The same reads go through a Flow with Python's streams and through one with compiled streams. Both must give
the client the same bytes, the tap the same frames, and end in the same way. The sockets are real, the loop is
a stub.
"""

import json
import socket
from collections.abc import Callable
from random import Random
from types import SimpleNamespace
from typing import Any, Final, cast

from llmtap import native
from llmtap.channel import Tap
from llmtap.channel.frames import BatchReader, FrameKind, Hello, PythonFrameRows
from llmtap.clock import SystemClock
from llmtap.net.lag import PythonLagMeter, make_lag_meter
from llmtap.net.stream import CompiledStream, PlainStream, Timebase
from llmtap.protocol.http1 import FRAMING_TRAILERS, Framing, scanner_for
from llmtap.vantage.relay.flow import Flow
from tests.native.cases import ChunkedBodies

_ROOM: Final = 4_608
"""Bytes of the client's send buffer: a body of some thousand bytes fills it."""
_TAP_BYTES: Final = 1 << 20
_TAP_BYTES_SMALL: Final = 4_000
_HELLO: Final = Hello(relay="r", pid=1, clock="mono", anchor_mono_ns=1, anchor_wall_ns=2)
_FAULTS: Final = ("slow", "drain", "gone", "lost", "dropped")
Step = tuple[str, bytes]
"""A read of the answer (`read`), or a fault."""
Case = tuple[Framing, int, bool, list[Step]]
"""How the body ends, its length, whether the tap has little room, and what happens."""


class _Loop:
    """Remembers the callbacks of the sockets, and calls nobody."""

    def __init__(self) -> None:
        self.writers: dict[int, Callable[[], None]] = {}

    def add_reader(self, sock: Any, callback: Any) -> None: ...

    def remove_reader(self, sock: Any) -> None: ...

    def add_writer(self, sock: Any, callback: Callable[[], None]) -> None:
        self.writers[sock] = callback

    def remove_writer(self, sock: Any) -> None:
        self.writers.pop(sock, None)

    def call_later(self, seconds: float, callback: Any) -> Any:
        return SimpleNamespace(cancel=lambda: None)


class _Meter:
    """The tap's socket: takes all, and acknowledges nothing."""

    def __init__(self) -> None:
        self.taken: list[bytes] = []

    def send(self, data: Any) -> int:
        self.taken.append(bytes(data))
        return len(data)

    def close(self) -> None: ...


class _World:
    """One implementation's exchange: two connections, a flow and a tap."""

    def __init__(self, case: Case, *, compiled: bool) -> None:
        framing, length, small, _ = case
        self.far_up, near_up = socket.socketpair()
        near_down, self.far_down = socket.socketpair()
        for sock in (self.far_up, near_up, near_down, self.far_down):
            sock.setblocking(False)
        near_down.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _ROOM)
        self.loop = loop = _Loop()
        self.got = b""
        self.calls: list[Any] = []
        self.meter = _Meter()
        self.tap = tap = Tap(cast(Any, loop), "", _TAP_BYTES_SMALL if small else _TAP_BYTES, lambda: _HELLO)
        if not compiled:
            tap.rows = PythonFrameRows()
        self._connect()
        lag = make_lag_meter(1_000) if compiled else PythonLagMeter(1_000)
        base = Timebase(SystemClock(), lag)
        reporter = SimpleNamespace(
            lag=lag, side="", stamp_error_since=lambda t_ns: 0, on_end=lambda *bytes_passed: None
        )
        relay = SimpleNamespace(
            tap=tap,
            route=SimpleNamespace(pool=self),
            reporter=reporter,
            draining=False,
            forwarder=None,
            warn=lambda kind, what: self.calls.append((kind, what)),
        )
        client = SimpleNamespace(flow_over=self._over)
        self.down = self._stream(near_down, base, compiled=compiled)
        self.flow = flow = Flow(cast(Any, relay), cast(Any, client), self.down)
        self.up = self._stream(near_up, base, compiled=compiled)
        self.up.handler = flow
        self.down.handler = cast(Any, SimpleNamespace(on_drained=flow.client_drained, on_lost=self._lost))
        flow.upload.upstream = self.up
        flow._scanner = scanner_for(framing, length, refused_trailers=FRAMING_TRAILERS)
        flow._answered = flow._keep_upstream = True
        flow.upload.end_ns = 1
        flow.seq, flow.tapped = tap.open(1, b"GET / HTTP/1.1\r\n\r\n")
        flow._pass_body(framing)
        self.unsolicited = 0

    def _stream(self, sock: socket.socket, base: Timebase, *, compiled: bool) -> PlainStream:
        loop, handler = cast(Any, self.loop), cast(Any, None)
        if compiled:
            return CompiledStream(loop, sock, handler, base, stamped=False)
        return PlainStream(loop, sock, handler, base)

    def _connect(self) -> None:
        self.tap._sock = cast(Any, self.meter)
        self.tap._append(FrameKind.HELLO, 0, 0, 0, b"{}")
        self.tap._flush()

    def give_back(self, stream: PlainStream, now_ns: int) -> None:
        """As a Pool."""
        self.calls.append("given back")
        stream.close()

    def _over(self, now_ns: int, *, keep: bool, linger: bool, abort: bool) -> None:
        self.calls.append(("over", keep, linger, abort))

    def _lost(self, error: OSError | None) -> None:
        self.calls.append(("client lost", type(error)))
        self.flow.client_gone()

    def do(self, what: str, data: bytes) -> None:
        if what == "read":
            if self.up.closed or self.up.paused:
                return
            self.far_up.send(data)
            if isinstance(self.up, CompiledStream):
                self.up.reader()
            else:
                self.up._readable()
        elif what == "drain":
            self.drain()
        elif what == "gone":
            self.far_down.close()
        elif what == "lost":
            self.tap._disconnect()
            self._connect()
        elif what == "dropped":
            self.tap.drop(self.flow.seq, 1, "other")

    def drain(self) -> None:
        """The client reads all there is, and what was held back follows."""
        while self.far_down.fileno() >= 0:
            try:
                data = self.far_down.recv(1 << 16)
            except BlockingIOError:
                data = b""
            self.got += data
            writers = list(self.loop.writers.values())
            for writer in writers:
                writer()
            if not data and not writers:
                return

    def state(self) -> tuple[Any, ...]:
        flow = self.flow
        return (
            flow.response_bytes,
            flow.tapped,
            flow.over,
            bool(flow._paused_since_ns),
            self.up.closed,
            self.up.paused,
            self.down.closed,
            self.down.pending,
            self.calls,
        )

    def frames(self) -> list[Any]:
        """All that the meter was told, without stamps."""
        self.tap._flush()
        told: list[Any] = []
        for _, frames in BatchReader().feed(b"".join(self.meter.taken)):
            last_ns = 0
            for kind, seq, t_ns, extra_ns, data in frames:
                if kind == FrameKind.RESPONSE_AT_ONCE:
                    kind = (
                        FrameKind.RESPONSE_DATA
                    )  # whether two pieces share a segment is the kernel's choice
                if kind == FrameKind.RESPONSE_DATA:
                    assert last_ns <= t_ns, "stamps do not go back"
                    assert extra_ns >= 0, "nothing leaves before it has come"
                    last_ns = t_ns
                if kind == FrameKind.CLOSE:
                    closing = json.loads(data)
                    told.append([closing.get(name) for name in ("outcome", "error", "response_bytes")])
                told.append((kind, seq, b"" if kind == FrameKind.CLOSE else data))
        return told

    def close(self) -> None:
        self.up.close()
        self.down.close()
        self.far_up.close()
        self.far_down.close()


class Passages:
    """Answers' bodies on their way: what the client gets, the meter hears, and how it ends."""

    def __init__(self, rng: Random) -> None:
        self._rng = rng
        self._bodies = ChunkedBodies(rng)
        self.seen: dict[str, int] = {}
        """Cases by what happened in them."""

    def case(self) -> Case:
        rng = self._rng
        framing = rng.choice((Framing.CHUNKED, Framing.CHUNKED, Framing.LENGTH, Framing.CLOSE))
        reads = self._bodies.case()
        length = max(1, sum(map(len, reads)) - rng.getrandbits(3)) if framing is Framing.LENGTH else 0
        steps: list[Step] = []
        faulty = rng.random() < 0.4
        for data in reads:
            if faulty and rng.random() < 0.5:
                steps.append((rng.choice(_FAULTS), b""))
            if data:
                steps.append(("read", data))
        if steps and steps[0][0] == "slow" and rng.random() < 0.5:
            steps *= 4  # enough to fill the client's socket
        return framing, length, rng.random() < 0.1, steps

    def check(self, case: Case) -> None:
        kinds = [False] if native.compiled is None else [False, True]
        worlds = [_World(case, compiled=compiled) for compiled in kinds]
        try:
            self._play(case, worlds)
        finally:
            for world in worlds:
                world.close()

    def _play(self, case: Case, worlds: list[_World]) -> None:
        reference = worlds[0]
        slow, sent = False, b""
        for what, data in case[3]:
            slow = (slow or what == "slow") and what != "drain"
            if what == "read" and not (reference.up.closed or reference.up.paused):
                sent += data
            for world in worlds:
                world.do(what, data)
                if not slow:
                    world.drain()
            self._compare(worlds, _World.state)
            if reference.up.paused:
                self._saw("paused")
            self._saw(what)
        for world in worlds:
            world.drain()
        self._compare(worlds, _World.state)
        self._compare(worlds, lambda world: world.got)
        assert sent.startswith(reference.got), "the client gets what the upstream sent, in order"
        if reference.flow.over:
            self._saw("over")
        if not reference.flow.tapped:
            self._saw("not measured")
        self._compare(worlds, _World.frames)

    def _compare(self, worlds: list[_World], figure: Callable[[_World], Any]) -> None:
        expected = figure(worlds[0])
        for world in worlds[1:]:
            found = figure(world)
            assert found == expected, f"{found} instead of {expected}"

    def _saw(self, what: str) -> None:
        self.seen[what] = self.seen.get(what, 0) + 1

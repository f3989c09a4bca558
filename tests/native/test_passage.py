"""The compiled path of the relay: what it leaves behind, and whom it tells of errors."""

import asyncio
import gc
import socket
from types import SimpleNamespace
from typing import Any, cast

import pytest
import uvloop

from llmtap import native
from llmtap.channel.frames import FrameKind, make_frame_rows
from llmtap.clock import SystemClock, resident_bytes
from llmtap.net.lag import make_lag_meter
from llmtap.net.stream import CompiledStream, Timebase
from llmtap.protocol.http1 import Framing, scanner_for
from llmtap.vantage.relay.flow import Flow
from tests.support.waiting import wait_until

pytestmark = pytest.mark.skipif(
    native.compiled is None, reason=f"the compiled path does not run: {native.REASON}"
)

CHUNK = b"100\r\n" + b"x" * 256 + b"\r\n"
EVENTS = 30_000
RUNS = 2
WARM = 20_000
"""Events after which allocators and sockets have what they need."""
GROWTH_BYTES = 1 << 20
"""10 bytes an event: less than any object, or any row, that each of them would leave."""


class _Idle:
    """A loop that calls nobody."""

    def add_reader(self, sock: Any, callback: Any) -> None: ...

    def remove_reader(self, sock: Any) -> None: ...


class _Exchange:
    """An answer that goes from one socket to another, and rows that are packed by hand."""

    def __init__(self) -> None:
        base = Timebase(SystemClock(), make_lag_meter(1_000))
        self.far_up, near_up = socket.socketpair()
        near_down, self.far_down = socket.socketpair()
        for sock in (self.far_up, near_up, near_down, self.far_down):
            sock.setblocking(False)
        self.rows = make_frame_rows()
        self.rows.bound = 1 << 20
        loop, nobody = cast(Any, _Idle()), cast(Any, None)
        self.down = CompiledStream(loop, near_down, nobody, base, stamped=False)
        relay = SimpleNamespace(tap=SimpleNamespace(rows=self.rows), route=None, forwarder=None)
        self.flow = Flow(cast(Any, relay), nobody, self.down)
        self.up = CompiledStream(loop, near_up, self.flow, base, stamped=False)
        self.flow.upload.upstream = self.up
        self.flow._scanner = scanner_for(Framing.CHUNKED, 0)
        self.flow.tapped = True
        self.flow.seq = 1
        self.flow._pass_body(Framing.CHUNKED)

    def run(self, events: int) -> None:
        for number in range(events):
            if not number % 300:
                self.rows.pack(number)
                self.rows.put(FrameKind.STATUS, 0, 0, 0, b"")
            self.far_up.send(CHUNK)
            self.up.reader()
            assert self.far_down.recv(1_024) == CHUNK

    def close(self) -> None:
        for end in (self.up, self.down, self.far_up, self.far_down):
            end.close()


def test_events_leave_nothing_behind() -> None:
    exchange = _Exchange()
    try:
        exchange.run(WARM)
        growths = []
        for _ in range(RUNS):
            before = resident_bytes()
            exchange.run(EVENTS)
            growths.append(resident_bytes() - before)
        # A leak grows in every run. An allocator may take a page in one of them, as a sanitizer's does.
        assert min(growths) < GROWTH_BYTES, growths
        assert exchange.flow.response_bytes == (WARM + RUNS * EVENTS) * len(CHUNK)
    finally:
        exchange.close()


def test_closed_streams_leave_no_objects_behind() -> None:
    assert native.compiled is not None
    kinds = (native.compiled.Reader, native.compiled.Passage, CompiledStream, Flow)

    def alive() -> list[object]:
        gc.collect()
        return [each for each in gc.get_objects() if isinstance(each, kinds)]

    # The objects of earlier tests are kept, so that none of the new ones has the address of an old one.
    before = alive()
    old = {id(each) for each in before}
    for _ in range(200):
        exchange = _Exchange()
        exchange.run(3)
        exchange.close()
        del exchange
    assert not [each for each in alive() if id(each) not in old]


@pytest.mark.parametrize("make_loop", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_an_exception_of_a_handler_reaches_the_loops_handler(make_loop: Any) -> None:
    async def scene() -> list[BaseException]:
        loop = asyncio.get_running_loop()
        told: list[BaseException] = []
        loop.set_exception_handler(lambda _, context: told.append(context["exception"]))
        far, near = socket.socketpair()
        near.setblocking(False)

        def fail(data: bytes, t_ns: int) -> None:
            raise LookupError("of the handler")

        base = Timebase(SystemClock(), make_lag_meter(1_000))
        stream = CompiledStream(loop, near, cast(Any, SimpleNamespace(on_data=fail)), base, stamped=False)
        far.send(b"x")
        await wait_until(lambda: told)
        stream.close()
        far.close()
        return told

    loop = make_loop()
    try:
        (error,) = loop.run_until_complete(asyncio.wait_for(scene(), 30))
    finally:
        loop.close()
    assert isinstance(error, LookupError)

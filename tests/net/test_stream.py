"""One socket under test, its peer in the test's own hand; the clock's two ways beside each other."""

import asyncio
import os
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from llmtap import native
from llmtap.clock import SystemClock
from llmtap.net.lag import make_lag_meter
from llmtap.net.stream import CompiledStream, KernelStream, PlainStream, Timebase, open_stream
from tests.support.clocks import kernel_stamps
from tests.support.servers.peer import Ending, Peer, wait_still, wait_until

IMPLEMENTATIONS = [None] if native.compiled is None else [native.compiled, None]
CLOCKS = pytest.mark.parametrize("clock", ["mono", "kernel"])
MARGIN_NS = 1_000_000
"""What a kernel stamp mapped through a wall-clock sample may be off by, and ten times more."""


@pytest.fixture(autouse=True, params=IMPLEMENTATIONS, ids=lambda module: "native" if module else "python")
def implementation(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The streams that are opened are compiled, or Python's."""
    monkeypatch.setattr(native, "compiled", request.param)


class Notes:
    """A handler that writes down what happens."""

    def __init__(self) -> None:
        self.data: list[bytes] = []
        self.stamps: list[int] = []
        self.read_at: list[int] = []
        self.eofs = 0
        self.lost: list[OSError | None] = []
        self.drains = 0

    def on_data(self, data: bytes, t_ns: int) -> None:
        self.read_at.append(SystemClock.mono_ns())
        self.data.append(data)
        self.stamps.append(t_ns)

    def on_eof(self) -> None:
        self.eofs += 1

    def on_lost(self, error: OSError | None) -> None:
        self.lost.append(error)

    def on_drained(self) -> None:
        self.drains += 1


@asynccontextmanager
async def pair(clock: str = "mono") -> AsyncIterator[tuple[PlainStream, Notes, Peer, Timebase]]:
    """A stream, its handler, and the other end of its connection."""
    loop = asyncio.get_running_loop()
    with socket.create_server(("127.0.0.1", 0)) as server:
        far = socket.create_connection(server.getsockname())
        near, _ = server.accept()
    near.setblocking(False)
    notes = Notes()
    timebase = Timebase(SystemClock(), make_lag_meter(1_000))
    stream = open_stream(loop, near, notes, timebase, clock)
    peer = Peer(far)
    try:
        yield stream, notes, peer, timebase
    finally:
        stream.close()
        peer.close()


@CLOCKS
async def test_bytes_come_with_a_stamp_between_send_and_read(clock: str) -> None:
    with kernel_stamps():
        async with pair(clock) as (stream, notes, peer, timebase):
            if native.compiled is not None:
                assert isinstance(stream, CompiledStream)
            else:
                assert isinstance(stream, KernelStream) == (clock == "kernel")
            for i in range(20):
                before = SystemClock.mono_ns()
                await peer.send(b"event %d" % i)
                await wait_until(lambda n=i: len(notes.data) == n + 1)
                assert before - MARGIN_NS <= notes.stamps[i] <= notes.read_at[i] + MARGIN_NS
            assert notes.data == [b"event %d" % i for i in range(20)]
            assert notes.stamps == sorted(notes.stamps)
            assert sum(timebase.lag.buckets) == (20 if clock == "kernel" else 0)


@CLOCKS
async def test_a_busy_loop_is_in_the_stamp_of_mono_and_not_in_the_kernels(clock: str) -> None:
    with kernel_stamps():
        held_ns = 60_000_000
        async with pair(clock) as (_, notes, peer, timebase):
            peer.sock.send(b"waits")
            sent = SystemClock.mono_ns()
            while SystemClock.mono_ns() - sent < held_ns:
                pass  # the loop is busy
            await wait_until(lambda: notes.data)
            late = notes.stamps[0] - sent
            if clock == "kernel":
                assert late < held_ns / 2
                assert timebase.lag.max_ns >= held_ns - MARGIN_NS, "our own lateness is noted instead"
            else:
                assert late >= held_ns - MARGIN_NS


@CLOCKS
async def test_what_the_kernel_does_not_take_follows_in_order(clock: str) -> None:
    async with pair(clock) as (stream, notes, peer, _):
        sent = [os.urandom(300_000)]
        while stream.write(sent[-1]):
            sent.append(os.urandom(300_000))
            assert len(sent) < 200, "the kernel takes everything"
        assert stream.pending > 0
        for i in range(60):  # far more than the kernel takes in one go once its buffer has room
            sent.append(os.urandom(1_000 if i % 2 else 400_000))
            assert not stream.write(sent[-1]), "nothing overtakes what is kept"
        assert stream.pending >= 12_000_000
        assert notes.drains == 0
        data = b"".join(sent)
        got = await peer.exactly(len(data))
        assert got == data
        await wait_until(lambda: notes.drains)
        assert (notes.drains, stream.pending) == (1, 0)
        assert stream.write(b"after")
        assert await peer.exactly(5) == b"after"


@CLOCKS
async def test_a_paused_stream_reads_nothing_and_loses_nothing(clock: str) -> None:
    async with pair(clock) as (stream, notes, peer, _):
        stream.pause()
        stream.pause()
        await peer.send(b"held")
        await asyncio.sleep(0.03)
        assert notes.data == []
        stream.resume()
        stream.resume()
        await wait_until(lambda: notes.data)
        assert b"".join(notes.data) == b"held"


async def test_bytes_that_waited_for_a_paused_stream_are_no_lag() -> None:
    with kernel_stamps():
        async with pair("kernel") as (stream, notes, peer, timebase):
            for held_s in (0.002, 0.05):
                stream.pause()
                before_ns = SystemClock.mono_ns()
                await peer.send(b"held")
                sent_ns = SystemClock.mono_ns()
                await asyncio.sleep(held_s)
                timebase.lag.take_max()
                resumed_ns = SystemClock.mono_ns()
                stream.resume()
                await wait_until(lambda: notes.data)
                assert before_ns - MARGIN_NS <= notes.stamps[0] <= sent_ns + MARGIN_NS, "the stamp stays"
                assert timebase.lag.max_ns <= notes.read_at[0] - resumed_ns
                for seen in (notes.data, notes.stamps, notes.read_at):
                    seen.clear()
            await peer.send(b"later")
            await wait_until(lambda: notes.data)
            sent_ns = SystemClock.mono_ns()
            peer.sock.send(b"waits")
            while SystemClock.mono_ns() - sent_ns < 60_000_000:
                pass  # the loop is busy
            await wait_until(lambda: len(notes.data) > 1)
            assert timebase.lag.max_ns >= 59_000_000, "after the bytes of the pause, lag is lag again"


@CLOCKS
async def test_the_end_is_told_once_and_writing_still_works(clock: str) -> None:
    async with pair(clock) as (stream, notes, peer, _):
        await peer.send(b"last words")
        peer.half_close()
        await wait_until(lambda: notes.eofs)
        assert notes.data == [b"last words"]
        await asyncio.sleep(0.02)
        assert (notes.eofs, notes.lost) == (1, []), "the end stays readable; it is told once"
        assert stream.write(b"reply")
        assert await peer.exactly(5) == b"reply"


@CLOCKS
async def test_a_reset_is_told_once_with_its_error(clock: str) -> None:
    async with pair(clock) as (stream, notes, peer, _):
        peer.reset()
        await wait_until(lambda: notes.lost)
        await asyncio.sleep(0.02)
        assert len(notes.lost) == 1
        assert isinstance(notes.lost[0], ConnectionResetError)
        assert stream.closed
        assert notes.eofs == 0


async def test_a_reset_while_bytes_are_kept_is_told_once() -> None:
    async with pair() as (stream, notes, peer, _):
        while stream.write(b"x" * 300_000):
            pass
        stream.pause()  # a paused reader must not hide it: the writer finds out
        peer.reset()
        await wait_until(lambda: notes.lost)
        assert len(notes.lost) == 1
        assert stream.closed
        assert stream.pending == 0


async def test_writing_to_a_broken_connection_raises() -> None:
    async with pair() as (stream, notes, peer, _):
        stream.pause()
        peer.reset()
        with pytest.raises(OSError):
            await wait_until(lambda: not stream.write(b"x"))
        assert notes.lost == []


async def test_what_the_peers_kernel_has_taken_is_known() -> None:
    """While the peer does not read it stands still, and grows when it reads, if only a little."""
    async with pair() as (stream, _, peer, _):
        while stream.write(b"x" * 300_000):
            pass
        before = await wait_still(lambda: stream.acked_bytes)
        assert 0 < before < 300_000_000
        await peer.exactly(400_000)
        await wait_until(lambda: stream.acked_bytes > before)
        stream.close()
        assert stream.acked_bytes == 0


async def test_close_is_an_orderly_end_and_silent_for_the_handler() -> None:
    async with pair() as (stream, notes, peer, _):
        stream.write(b"bye")
        stream.close()
        stream.close()
        assert await peer.to_end() == (b"bye", Ending.FIN)
        assert (notes.eofs, notes.lost) == (0, [])
        stream.resume()
        stream.abort()
        assert not stream.is_alive()


async def test_a_reader_that_is_called_too_late_reads_no_other_socket() -> None:
    """The loop may have collected the event of a socket before another one's callback closed it."""
    async with pair() as (stream, notes, _, _):
        if not isinstance(stream, CompiledStream):
            pytest.skip("of the compiled reader, which holds the number of the socket")
        number, reader = stream.fileno(), stream.reader
        ours, theirs = socket.socketpair()
        with ours, theirs:
            stream.close()
            os.dup2(ours.fileno(), number)
            theirs.send(b"of another one")
            reader()
            os.close(number)
            assert ours.recv(100) == b"of another one"
        assert (notes.data, notes.eofs, notes.lost) == ([], 0, [])


async def test_shutting_the_writing_side_leaves_the_reading_side_open() -> None:
    async with pair() as (stream, notes, peer, _):
        stream.write(b"done")
        stream.shutdown_write()
        assert await peer.to_end() == (b"done", Ending.FIN)
        await peer.send(b"more")
        await wait_until(lambda: notes.data)
        assert notes.data == [b"more"]
        peer.reset()
        await wait_until(lambda: notes.lost)
        stream.shutdown_write()  # the peer is gone: nothing to say about it


@CLOCKS
async def test_is_alive_sees_the_end_and_words_out_of_turn(clock: str) -> None:
    for act, alive in (
        (lambda peer: None, True),
        (lambda peer: peer.half_close(), False),
        (lambda peer: peer.reset(), False),
        (lambda peer: peer.sock.send(b"HTTP/1.1 408 bye\r\n\r\n"), False),
    ):
        async with pair(clock) as (stream, _, peer, _):
            stream.pause()
            act(peer)
            if not alive:
                await wait_until(lambda s=stream: not s.is_alive())
            assert stream.is_alive() is alive


async def test_a_handler_may_close_from_within_its_callback() -> None:
    async with pair() as (stream, notes, peer, _):

        class Closes(Notes):
            def on_data(self, data: bytes, t_ns: int) -> None:
                super().on_data(data, t_ns)
                stream.close()

        handler = Closes()
        assert stream.handler is notes
        stream.handler = handler
        await peer.send(b"x" * 200_000)
        assert (await peer.to_end())[0] == b""
        assert len(handler.data) == 1


async def test_closed_streams_leave_nothing_in_the_loop() -> None:
    """A stream that is closed with bytes kept must not wake its number's next owner."""
    async with pair() as (stream, notes, peer, _):
        while stream.write(b"x" * 300_000):
            pass
        stream.close()
        peer.reset()
        async with pair() as (other, other_notes, other_peer, _):
            await other_peer.send(b"mine")
            await wait_until(lambda: other_notes.data)
            assert other_notes.data == [b"mine"]
            assert other.write(b"yours")
        assert (notes.data, notes.lost, notes.drains) == ([], [], 0)


async def said(notes: Notes, stream: PlainStream, peer: Peer, *pieces: bytes) -> bool:
    """Send the pieces before the loop reads them; whether their read came at once."""
    before = len(notes.data)
    for piece in pieces:
        peer.sock.sendall(piece)
    await wait_until(lambda: len(notes.data) > before)
    assert notes.data[before:] == [b"".join(pieces)], "one read"
    return stream.came_at_once(notes.data[-1])


@pytest.mark.parametrize("end", [b"\n\n", b"\r\n\r\n"], ids=["lf", "crlf"])
async def test_events_of_one_segment_came_at_once(end: bytes) -> None:
    one = b"data: 1" + end
    with kernel_stamps():
        async with pair("kernel") as (stream, notes, peer, _):
            assert await said(notes, stream, peer, one * 2)
            assert not await said(notes, stream, peer, one), "one event has its own timestamp anyway"
            assert not await said(notes, stream, peer, one, one), "two segments in a read"
            assert not stream.came_at_once(notes.data[-1]), "the same read again"
            assert await said(notes, stream, peer, one * 3)
            assert not await said(notes, stream, peer, one, b"\r\n"), "not asked, but counted"
            assert not await said(notes, stream, peer, one * 2), (
                "an earlier read may have had the second segment"
            )
            assert await said(notes, stream, peer, one * 2)


async def test_a_read_of_a_part_of_a_segment_is_not_taken_for_a_whole_one() -> None:
    events = b"data: 1\n\n" * 10_000
    with kernel_stamps():
        async with pair("kernel") as (stream, notes, peer, _):
            peer.sock.sendall(events)
            at_once: list[bool] = []
            record = notes.on_data

            def on_data(data: bytes, t_ns: int) -> None:
                record(data, t_ns)
                at_once.append(stream.came_at_once(data))

            notes.on_data = on_data  # type: ignore[method-assign]
            await wait_until(lambda: sum(map(len, notes.data)) == len(events))
            assert not any(at_once)
            assert await said(notes, stream, peer, b"data: 1\n\n" * 2)


async def test_stamps_are_exact_only_where_the_kernel_gave_them() -> None:
    with kernel_stamps():
        async with pair("kernel") as (stream, notes, peer, _):
            began_ns = SystemClock.mono_ns()
            await said(notes, stream, peer, b"1")
            assert stream.stamped_since(began_ns)
            peer.sock.sendall(b"2")
            stream._sock.setsockopt(
                socket.SOL_SOCKET, 35, 0
            )  # SO_TIMESTAMPNS off: the next read has no stamp
            await wait_until(lambda: len(notes.data) == 2)
            assert not stream.stamped_since(began_ns)
            assert stream.stamped_since(SystemClock.mono_ns()), "that was before"
    async with pair("mono") as (stream, notes, peer, _):
        await said(notes, stream, peer, b"1")
        assert not stream.stamped_since(0)
        assert not stream.came_at_once(b"data: 1\n\n" * 2)

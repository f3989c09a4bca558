"""The receiver on a real unix socket: what is acknowledged has been accounted."""

import asyncio
import os
import stat
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
import uvloop

from llmtap.clock import ManualClock
from llmtap.meter.options import MeterOptions
from llmtap.meter.receiver import Receiver, listen_on
from llmtap.meter.tally import Tally
from llmtap.tap.frames import ACK
from tests.support.relay_status import relay_status
from tests.support.tap_frames import Script

S = 1_000_000_000


def play(
    tmp_path: Path, scene: Callable[[Tally, asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
) -> tuple[Tally, ManualClock]:
    """Runs a scene with one relay connected; closes the receiver after it."""
    clock = ManualClock(now_ns=S)
    tally = Tally(MeterOptions(), clock)

    async def run() -> None:
        receiver = Receiver(tally)
        await receiver.start(listen_on(str(tmp_path / "tap.sock")))
        reader, writer = await asyncio.open_unix_connection(str(tmp_path / "tap.sock"))
        try:
            await asyncio.wait_for(_run_scene(scene, tally, reader, writer), 10)
        finally:
            writer.close()
            await receiver.close()

    async def _run_scene(scene_, *args) -> None:  # type: ignore[no-untyped-def]
        await scene_(*args)

    uvloop.run(run())  # what the meter runs on; asyncio's own transports differ
    return tally, clock


async def ack(reader: asyncio.StreamReader) -> int:
    number: int = ACK.unpack(await reader.readexactly(ACK.size))[0]
    return number


def n(tally: Tally) -> object:
    return tally.summary("all")()["n"]


def test_an_acknowledged_batch_is_in_the_summary(tmp_path: Path) -> None:
    async def scene(tally: Tally, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(Script().hello().stream(1).request(2).pack(1))
        assert await ack(reader) == 1
        assert (n(tally), tally.live) == (1, 1)
        writer.write(Script().head(2, 5).word(2, 6).end(2, 7, 1).close(2, 8).pack(2))
        assert await ack(reader) == 2
        assert (n(tally), tally.live) == (2, 0)

    tally, _ = play(tmp_path, scene)
    assert tally.errors == {}


def test_batches_cut_at_any_byte_are_acknowledged_once_each(tmp_path: Path) -> None:
    async def scene(tally: Tally, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        data = Script().hello().pack(1) + Script().stream(1).pack(2) + Script().stream(2).pack(3)
        for i in range(0, len(data), 97):
            writer.write(data[i : i + 97])
            await writer.drain()
            await asyncio.sleep(0)
        assert [await ack(reader) for _ in range(3)] == [1, 2, 3]
        # Also when one read brings several.
        writer.write(Script().stream(3).pack(4) + Script().stream(4).pack(5))
        assert [await ack(reader) for _ in range(2)] == [4, 5]
        assert n(tally) == 4

    play(tmp_path, scene)


@pytest.mark.parametrize(
    "bad",
    [
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" * 4,
        Script().stream(1).pack(1),
        Script().frame(1, data=b"{}").pack(1),
    ],
    ids=["not a batch", "no hello", "half a hello"],
)
def test_who_does_not_speak_the_language_is_hung_up_on(tmp_path: Path, bad: bytes) -> None:
    async def scene(tally: Tally, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(bad)
        try:
            assert await reader.read() == b""
        except ConnectionResetError:
            pass

    tally, _ = play(tmp_path, scene)
    assert tally.errors == {"bad_batch": 1}
    assert n(tally) == 0


def test_what_a_relay_left_open_is_lost_unless_it_comes_back(tmp_path: Path) -> None:
    async def scene(tally: Tally, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(Script().hello().status(relay_status(opened=2)).request(1).request(2).pack(1))
        await ack(reader)
        assert tally.live == 2
        assert tally.relays.ready(tally.clock.mono_ns())
        writer.close()
        while tally.live:
            await asyncio.sleep(0.001)

    tally, clock = play(tmp_path, scene)
    clock.advance(6 * S)
    (state,) = tally.relays.states(clock.mono_ns())
    assert (state.connected, state.lost) == (False, 2)
    assert b'dropped_exchanges_total{reason="relay_lost",relay="r0"} 2.0' in tally.freeze().render()[0]


def test_a_relay_may_come_again_on_a_new_connection(tmp_path: Path) -> None:
    async def scene(tally: Tally, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(Script().hello().request(1).pack(1))
        await ack(reader)
        again_reader, again = await asyncio.open_unix_connection(str(tmp_path / "tap.sock"))
        again.write(Script().hello().stream(2).pack(9))
        assert await ack(again_reader) == 9
        writer.close()
        while tally.live:
            await asyncio.sleep(0.001)
        (state,) = tally.relays.states(tally.clock.mono_ns() + 60 * S)
        assert (state.connected, state.lost) == (True, 0)
        again.close()

    tally, _ = play(tmp_path, scene)
    assert n(tally) == 1


def test_only_this_user_may_open_the_socket(tmp_path: Path) -> None:
    path = str(tmp_path / "tap.sock")
    listen_on(path).close()
    assert stat.S_IMODE(os.stat(path).st_mode) == 0o600


def test_a_socket_left_by_a_dead_meter_is_replaced_and_a_file_is_not(tmp_path: Path) -> None:
    path = str(tmp_path / "tap.sock")
    listen_on(path).close()
    listen_on(path).close()
    (tmp_path / "file").write_text("precious")
    with pytest.raises(OSError, match="in use"):
        listen_on(str(tmp_path / "file"))
    assert (tmp_path / "file").read_text() == "precious"

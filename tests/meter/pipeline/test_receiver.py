"""The receiver on a real unix socket: what is acknowledged has been accounted."""

import asyncio
import contextlib
import os
import socket
import stat
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import cast

import pytest
import uvloop

from llmtap.channel.frames import ACK, FrameKind
from llmtap.clock import ManualClock
from llmtap.meter.admin.views import metrics_of, summary_of
from llmtap.meter.options import MeterOptions
from llmtap.meter.pipeline import cooperative_yield
from llmtap.meter.pipeline.pipeline import ExchangePipeline
from llmtap.meter.pipeline.receiver import Receiver, listen_on
from llmtap.meter.pipeline.recorder import Recorder
from tests.support.servers.peer import PATIENCE_S
from tests.support.traffic.relay_status import relay_status
from tests.support.traffic.tap_frames import Script
from tests.support.waiting import wait_until

S = 1_000_000_000
READ_BYTES = 256_000
"""The most that uvloop takes from a socket at once."""


def play(
    tmp_path: Path,
    scene: Callable[[ExchangePipeline, asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]],
) -> tuple[ExchangePipeline, ManualClock]:
    """Runs a scene with one relay connected; closes the receiver after it."""
    clock = ManualClock(now_ns=S)
    tally = ExchangePipeline(MeterOptions(), clock)

    async def run() -> None:
        receiver = Receiver(tally)
        await receiver.start(listen_on(str(tmp_path / "tap.sock")))
        reader, writer = await asyncio.open_unix_connection(str(tmp_path / "tap.sock"))
        try:
            await asyncio.wait_for(_run_scene(scene, tally, reader, writer), PATIENCE_S)
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


def n(tally: ExchangePipeline) -> object:
    return summary_of(tally, "all")()["n"]


def test_batches_cut_at_any_byte_are_acknowledged_once_each(tmp_path: Path) -> None:
    async def scene(
        tally: ExchangePipeline, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
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
    async def scene(
        tally: ExchangePipeline, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        writer.write(bad)
        try:
            assert await reader.read() == b""
        except ConnectionResetError:
            pass

    tally, _ = play(tmp_path, scene)
    assert tally.errors == {"bad_batch": 1}
    assert n(tally) == 0


def test_in_a_backlog_others_have_their_turn_after_each_read(tmp_path: Path) -> None:
    # Numbers of equal width, so that all batches are of one size.
    batches = [Script().stream(seq).pack(seq) for seq in range(1_000_000, 1_003_000)]
    frames_each = len(Script().stream(1).frames())
    assert len({len(batch) for batch in batches}) == 1

    def send() -> None:
        with socket.socket(socket.AF_UNIX) as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)  # as a relay's
            sock.connect(str(tmp_path / "tap.sock"))
            sock.sendall(b"".join([Script().hello().pack(1), *batches]))

    async def scene(
        tally: ExchangePipeline, _reader: asyncio.StreamReader, _writer: asyncio.StreamWriter
    ) -> None:
        sending = asyncio.create_task(asyncio.to_thread(send))
        most = 0
        while tally.frames < 1 + frames_each * len(batches):
            before = tally.frames
            await asyncio.sleep(0)
            most = max(most, tally.frames - before)
        await sending
        assert 0 < most <= (READ_BYTES // len(batches[0]) + 1) * frames_each

    play(tmp_path, scene)


def test_exchanges_of_a_relay_that_died_end_as_our_error_and_are_not_measured(tmp_path: Path) -> None:
    async def scene(
        tally: ExchangePipeline, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        script = Script().hello().stream(1).request(2).head(2, 5).word(2, 6).request(3)
        writer.write(script.status(relay_status(opened=3, measured=0, unsettled=3)).pack(1))
        await ack(reader)
        # Three more whole ones whose acknowledgement the dead never read, one given up, and a gap.
        script = Script().stream(4).stream(5).request(6).frame(FrameKind.DROP, 6).stream(9)
        writer.write(script.pack(2))
        writer.transport.abort()
        await wait_until(lambda: not tally.open_exchanges and n(tally) == 6)

    tally, clock = play(tmp_path, scene)
    assert summary_of(tally, "all")()["outcomes"] == {"complete": 4, "tap_error": 2}
    clock.advance(6 * S)
    about = tally.relays.to_dict(clock.mono_ns())["r0"]
    assert isinstance(about, dict)
    assert [about[k] for k in ("opened", "measured", "dropped", "unsettled", "lost")] == [
        9,
        4,
        {"overflow": 3},
        0,
        2,
    ]
    text = metrics_of(tally).render()[0].decode()
    result = [line for line in text.splitlines() if "_exchanges_total{re" in line]
    assert sorted(result) == [
        'llmtap_relay_exchanges_total{relay="r0"} 9.0',
        'llmtap_tap_dropped_exchanges_total{reason="overflow",relay="r0"} 3.0',
        'llmtap_tap_lost_exchanges_total{relay="r0"} 2.0',
        'llmtap_tap_measured_exchanges_total{relay="r0"} 4.0',
    ]


class _RelayNotes:
    """A recorder that only notes what relays said."""

    def __init__(self) -> None:
        self.last: dict[str, tuple[int, dict[str, int], int]] = {}

    def note_relay(
        self, relay: str, opened: int, dropped: dict[str, int], unsettled: int, *_: object
    ) -> None:
        self.last[relay] = (opened, dict(dropped), unsettled)

    def note_relay_left(self, relay: str, opened: int, dropped: dict[str, int]) -> None:
        self.note_relay(relay, opened, dropped, 0)

    def observe_request(self, *_: object) -> bool:
        return False


def test_a_capture_is_told_the_counts_of_a_relay_that_left_up_to_its_last_frame(tmp_path: Path) -> None:
    """What ended behind its last word is a row, and what died with it, too: nothing is under way."""
    notes = _RelayNotes()

    async def scene(
        tally: ExchangePipeline, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        tally.recorder = cast(Recorder, notes)
        script = Script().hello().stream(1).request(2)
        writer.write(script.status(relay_status(opened=2, measured=0, unsettled=2)).pack(1))
        await ack(reader)
        assert notes.last == {"r0": (2, {}, 2)}
        script = Script().head(2, 5).word(2, 6).stream(3).request(4).frame(FrameKind.DROP, 4).request(5)
        writer.write(script.pack(2))
        writer.transport.abort()
        await wait_until(lambda: not tally.open_exchanges)

    play(tmp_path, scene)
    assert notes.last == {"r0": (5, {"overflow": 1}, 0)}


def test_when_the_meter_ends_open_exchanges_are_nobodys_error(tmp_path: Path) -> None:
    tally = ExchangePipeline(MeterOptions(), ManualClock(now_ns=S))

    async def run() -> None:
        receiver = Receiver(tally)
        await receiver.start(listen_on(str(tmp_path / "tap.sock")))
        reader, writer = await asyncio.open_unix_connection(str(tmp_path / "tap.sock"))
        writer.write(Script().hello().stream(1).request(2).pack(1))
        await ack(reader)
        await asyncio.wait_for(receiver.close(), PATIENCE_S)
        writer.close()

    uvloop.run(run())
    assert (tally.open_exchanges, summary_of(tally, "all")()["outcomes"]) == (0, {"complete": 1})


LARGE = 300
"""Exchanges of a batch that is processed in many steps."""


def large_batch() -> bytes:
    script = Script()
    for seq in range(1, LARGE + 1):
        script.stream(seq)
    return script.pack(2)


async def half_processed(
    tally: ExchangePipeline, path: str
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A relay whose large batch is under way; each step of the work is a turn of the loop."""
    reader, writer = await asyncio.open_unix_connection(path)
    writer.write(Script().hello().pack(1))
    assert await ack(reader) == 1
    writer.write(large_batch())
    while n(tally) == 0:
        await asyncio.sleep(0)
    assert n(tally) != LARGE, "the batch is processed in one step"
    return reader, writer


def test_a_batch_that_is_half_processed_when_the_meter_ends_is_not_acknowledged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The relay counts it as lost; what was measured of it stays measured."""
    monkeypatch.setattr(cooperative_yield, "LOOP_TURN_NS", -1)
    tally = ExchangePipeline(MeterOptions(), ManualClock(now_ns=S))

    async def run() -> object:
        receiver = Receiver(tally)
        await receiver.start(listen_on(str(tmp_path / "tap.sock")))
        reader, writer = await half_processed(tally, str(tmp_path / "tap.sock"))
        await asyncio.wait_for(receiver.close(), PATIENCE_S)
        measured = n(tally)
        with contextlib.suppress(ConnectionResetError):
            assert await reader.read() == b""
        for _ in range(3 * LARGE):  # turns in which work that goes on would be seen
            await asyncio.sleep(0)
        assert n(tally) == measured
        writer.close()
        return measured

    assert uvloop.run(run()) != LARGE
    assert (tally.errors, tally.open_exchanges) == ({}, 0)


def test_a_batch_that_is_half_processed_when_its_relay_leaves_is_processed_to_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So does a meter end: it waits for its relays."""
    monkeypatch.setattr(cooperative_yield, "LOOP_TURN_NS", -1)
    tally = ExchangePipeline(MeterOptions(), ManualClock(now_ns=S))

    async def run() -> None:
        receiver = Receiver(tally)
        await receiver.start(listen_on(str(tmp_path / "tap.sock")))
        _, writer = await half_processed(tally, str(tmp_path / "tap.sock"))
        writer.close()
        await asyncio.wait_for(receiver.wait_for_relays(), PATIENCE_S)
        assert n(tally) == LARGE
        await receiver.close()

    uvloop.run(run())
    assert (tally.errors, tally.open_exchanges) == ({}, 0)


def test_all_that_a_dying_relay_had_said_is_heard(tmp_path: Path) -> None:
    """Its socket holds more than one read when it dies; acknowledging the first must not lose the rest."""
    count = 300

    async def scene(
        tally: ExchangePipeline, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        batches = [Script().stream(seq, words=20).pack(seq + 1) for seq in range(1, count + 1)]
        data = Script().hello().pack(1) + b"".join(batches)
        assert len(data) > 2 * 256_000, "more than one read's worth"
        with socket.socket(socket.AF_UNIX) as relay:
            relay.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 8 << 20)
            relay.setblocking(False)
            relay.connect(str(tmp_path / "tap.sock"))
            if relay.send(data) < len(data):
                pytest.skip("this machine's sockets take too little at once (net.core.wmem_max)")
        await wait_until(lambda: n(tally) == count)

    tally, _ = play(tmp_path, scene)
    assert (tally.errors, tally.open_exchanges) == ({}, 0)


def test_a_relay_may_come_again_on_a_new_connection(tmp_path: Path) -> None:
    async def scene(
        tally: ExchangePipeline, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        writer.write(Script().hello().request(1).pack(1))
        await ack(reader)
        again_reader, again = await asyncio.open_unix_connection(str(tmp_path / "tap.sock"))
        again.write(Script().hello().stream(2).pack(9))
        assert await ack(again_reader) == 9
        writer.close()
        await wait_until(lambda: not tally.open_exchanges)
        (state,) = tally.relays.states(tally.clock.mono_ns() + 60 * S)
        assert (state.connected, state.status) == (True, None), "nothing is lost"
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

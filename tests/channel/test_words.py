"""Words to the relay travel among the acknowledgements, however the bytes are cut."""

import asyncio
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from llmtap.channel.channel import Tap
from llmtap.channel.frames import ACK, CONTROL, Closing, FrameKind, Hello
from tests.support.peer import scene, wait_until
from tests.support.proxy import FakeMeter


@asynccontextmanager
async def listening() -> AsyncIterator[tuple[Tap, FakeMeter, list[int]]]:
    words: list[int] = []
    with tempfile.TemporaryDirectory(prefix="tap-") as folder:
        meter = FakeMeter(f"{folder}/tap.sock")
        meter.acknowledges = False
        await meter.start()
        hello = Hello(relay="r", pid=1, clock="mono", anchor_mono_ns=1, anchor_wall_ns=2)
        tap = Tap(asyncio.get_running_loop(), meter.path, 1 << 20, lambda: hello, words.append)
        tap.connect()
        try:
            await wait_until(lambda: meter.hellos)
            yield tap, meter, words
        finally:
            tap.close()
            meter.stop()


def whole(tap: Tap) -> None:
    seq, _ = tap.open(1, b"GET / HTTP/1.1\r\n\r\n", arm=b"{}")
    tap.close_exchange(seq, 3, Closing(outcome="complete"))


@pytest.mark.parametrize("step", [1, 3, 8, 13, 1_000])
@scene
async def test_words_and_acknowledgements_are_told_apart(step: int) -> None:
    async with listening() as (tap, meter, words):
        whole(tap)
        await wait_until(lambda: FrameKind.CLOSE in meter.exchange(1).kinds)
        last = meter.batches[-1]
        said = [CONTROL, last - 1, CONTROL | 5, last, CONTROL | 1 << 62 | 7]
        data = b"".join(ACK.pack(word) for word in said)
        (link,) = meter._links
        for at in range(0, len(data), step):
            link.transport.write(data[at : at + step])
            await asyncio.sleep(0.001)
        await wait_until(lambda: len(words) == 3)
        assert words == [said[0], said[2], said[4]]
        await wait_until(lambda: tap.ledger.measured == 1)
        assert tap.pending_bytes == 0


@scene
async def test_a_word_acknowledges_nothing() -> None:
    async with listening() as (tap, meter, words):
        whole(tap)
        await wait_until(lambda: FrameKind.CLOSE in meter.exchange(1).kinds)
        meter.say(CONTROL | 1)
        await wait_until(lambda: words)
        assert (tap.ledger.measured, tap.ledger.unsettled) == (0, 1)
        meter.acknowledge()
        await wait_until(lambda: tap.ledger.measured == 1)


@scene
async def test_the_arm_follows_the_exchanges_first_frame() -> None:
    async with listening() as (tap, meter, _):
        whole(tap)
        await wait_until(lambda: FrameKind.CLOSE in meter.exchange(1).kinds)
        assert meter.exchange(1).kinds == [FrameKind.OPEN, FrameKind.ARM, FrameKind.CLOSE]
        meter.stop()
        await wait_until(lambda: not tap.connected)
        assert tap.open(1, b"x", arm=b"{}") == (2, False)

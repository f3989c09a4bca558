"""The wall clock is set while streams run: dates follow it, durations do not, and each exchange says so."""

import asyncio

import pytest

from llmtap.channel.frames import FrameKind
from llmtap.exchange.exchange import Exchange
from llmtap.meter.pipeline.assembler import Assembler
from llmtap.metrics.latency import metrics_of
from tests.meter.pipeline.test_assembler import Ear
from tests.support.clocks import STEPS_NS, KernelStamps, SettableClock
from tests.support.servers.peer import chunk, scene, wait_until
from tests.support.servers.proxy import Tapped, stage
from tests.support.servers.raw_client import request
from tests.support.servers.upstream import Call, answers

MS = 1_000_000
WORDS = 20


def exchanges(tap: Tapped) -> dict[int, Exchange]:
    """What a meter makes of all that came, by number."""
    ear = Ear()
    Assembler(tap.meter.hellos[0], ear).digest(tap.meter.frames)
    assert ear.failures == []
    return {x.seq: x for x in ear.exchanges}


@pytest.mark.parametrize("clock", ["mono", "kernel"])
@pytest.mark.parametrize("step_ns", STEPS_NS)
@scene
async def test_dates_follow_the_clock_and_durations_do_not(
    step_ns: int, clock: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    clocks = SettableClock()
    monkeypatch.setattr("llmtap.net.stream._TIMESPEC", KernelStamps(clocks))
    async with stage(clock=clock, clocks=clocks) as (up, tap):
        half = asyncio.Event()
        go_on = asyncio.Event()
        came: list[int] = []

        async def script(call: Call) -> None:
            await call.body()
            came.append(clocks.wall_ns())
            await call.say(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n")
            await call.say(b"Transfer-Encoding: chunked\r\n\r\n")
            for i in range(WORDS):
                await call.say(chunk(b'data: {"choices":[{"index":0,"delta":{"content":"w"}}]}\n\n'))
                await asyncio.sleep(0.005)
                if i == WORDS // 2:
                    half.set()
                    await go_on.wait()
            await call.say(chunk(b"data: [DONE]\n\n"), b"0\r\n\r\n")

        path = up.on(script)
        loop = asyncio.get_running_loop()
        first_wall, began = clocks.wall_ns(), loop.time()
        across = asyncio.ensure_future((await tap.client()).ask(request("POST", path, body=b"{}")))
        await half.wait()
        await asyncio.sleep(0.03)  # what the relay has seen so far is on its way to the meter
        clocks.ahead_ns = step_ns
        go_on.set()
        second_wall = clocks.wall_ns()
        assert (await (await tap.client()).get(up.on(answers(b"after")))).data == b"after"
        second_done = clocks.wall_ns()
        assert (await across).whole
        took = loop.time() - began
        for seq in (1, 2):
            await tap.meter.closed(seq)
        await wait_until(lambda: tap.relay.tap.ledger.measured == 2)
        (news,) = (f for f in tap.meter.frames if f.kind is FrameKind.ANCHOR)
        assert abs((news.extra_ns - news.t_ns) - (clocks.wall_ns() - clocks.mono_ns())) < MS
        told = exchanges(tap)
        assert [told[seq].anchor for seq in (1, 2)] == [0, 1]
        for seq, (asked, answered) in {1: (first_wall, came[0]), 2: (second_wall, second_done)}.items():
            assert asked - MS <= told[seq].arrival_wall_ns <= answered + MS
        events = told[1].timeline.events
        assert len(events) == WORDS + 1
        assert list(events.t_ns) == sorted(events.t_ns)
        metrics = metrics_of(told[1])
        for name in ("ttft", "e2e", "tbc_max"):
            value = metrics[name]
            assert value is not None
            assert 0 <= value <= took + 0.001, name
        assert told[1].uncertainty_ns <= took * 1e9 + MS, "a step is no lag"


@scene
async def test_a_meter_that_comes_after_the_step_is_told_by_the_hello() -> None:
    clocks = SettableClock()
    async with stage(clock="mono", clocks=clocks) as (up, tap):
        clocks.ahead_ns = -STEPS_NS[0]
        await wait_until(lambda: any(f.kind is FrameKind.ANCHOR for f in tap.meter.frames))
        tap.meter.stop()
        await wait_until(lambda: not tap.relay.tap.connected)
        clocks.ahead_ns = 0
        await tap.meter.start()
        await wait_until(lambda: len(tap.meter.hellos) == 2)
        assert [hello.anchor_steps for hello in tap.meter.hellos] == [0, 2]
        hello = tap.meter.hellos[1]
        assert abs(hello.anchor_wall_ns - hello.anchor_mono_ns - (clocks.wall_ns() - clocks.mono_ns())) < MS
        path = up.on(answers())
        await (await tap.client()).get(path)
        await tap.meter.closed(1)
        assert sum(f.kind is FrameKind.ANCHOR for f in tap.meter.frames) == 1, "it knows already"

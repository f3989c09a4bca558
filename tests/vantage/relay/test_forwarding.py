"""The forwarding thread: which bodies go to it, why they come back, and that no byte or frame differs."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from llmtap import native
from llmtap.channel.frames import FrameKind
from llmtap.clock import SystemClock
from llmtap.vantage.relay import forwarding
from tests.support.servers.peer import Ending, chunk, wait_still, wait_until
from tests.support.servers.proxy import Tapped, ms, stage
from tests.support.servers.raw_client import RawClient, request
from tests.support.servers.upstream import CHUNKED, CLOSE, OK, RESET, Call, Upstream, answers

pytestmark = pytest.mark.skipif(
    native.compiled is None, reason=f"the forwarding thread is compiled code: {native.REASON}"
)

EVENT = b"data: 12345\n\n"
END = b"0\r\n\r\n"


class Stream:
    """A script whose answer is written piece by piece."""

    def __init__(self) -> None:
        self._pieces: asyncio.Queue[bytes | str] = asyncio.Queue()
        self.call: Call | None = None

    async def __call__(self, call: Call) -> str | None:
        await call.body()
        self.call = call
        while True:
            piece = await self._pieces.get()
            if isinstance(piece, str):
                return piece or None
            await call.say(piece)

    def say(self, piece: bytes) -> None:
        self._pieces.put_nowait(piece)

    def end(self, how: str = "") -> None:
        self._pieces.put_nowait(how)


@pytest.fixture(autouse=True)
def hand_over_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forwarding, "HAND_OVER_READS", 1)


def forwarder(tap: Tapped) -> Any:
    assert tap.relay.forwarding is not None
    return tap.relay.forwarding.forwarder


class Lent:
    """A body that the thread has, after two events in reads of their own."""

    def __init__(self, up: Upstream, tap: Tapped, stream: Stream, client: RawClient, head: bytes) -> None:
        self.up, self.tap, self.stream, self.client = up, tap, stream, client
        self.body = chunk(EVENT) * 2
        self.head = head

    async def pass_on(self, *pieces: bytes) -> None:
        """Each piece reaches the client before the next one is sent."""
        for piece in pieces:
            self.stream.say(piece)
            assert await self.client.exactly(len(piece)) == piece
            self.body += piece

    async def check_measured(self, outcome: str = "complete") -> None:
        """The frames hold the same bytes as the client got, in order."""
        recording = await self.tap.meter.closed(1)
        assert recording.closing.outcome == outcome
        frames = [f for f in recording.frames if f.kind == FrameKind.RESPONSE_DATA]
        assert b"".join(f.data for f in frames) == self.body
        assert [f.t_ns for f in frames] == sorted(f.t_ns for f in frames)
        assert all(f.extra_ns >= 0 for f in frames)


@asynccontextmanager
async def lent(head: bytes = CHUNKED, **options: Any) -> AsyncIterator[Lent]:
    async with stage(thread=True, **options) as (up, tap):
        stream = Stream()
        client = await tap.client()
        await client.send(request("POST", up.on(stream), body=b"{}"))
        stream.say(head)
        answer = await client.until(b"\r\n\r\n")
        body = Lent(up, tap, stream, client, answer)
        body.body = b""
        await body.pass_on(chunk(EVENT), chunk(EVENT))
        await wait_until(lambda: forwarder(tap).lent == 1)
        yield body


async def test_a_body_goes_through_the_thread_and_ends_in_the_loop() -> None:
    async with lent() as body:
        await body.pass_on(*[chunk(EVENT)] * 50, chunk(b"x" * 5_000))
        assert forwarder(body.tap).lent_total == 1
        await body.pass_on(END)
        body.stream.end()
        await body.check_measured()
        assert forwarder(body.tap).lent == 0
        # Both connections go on.
        path = body.up.on(answers(b"again"))
        assert (await body.client.get(path)).data == b"again"
        assert body.up.connections == 1


async def test_a_body_of_known_length_ends_in_the_loop() -> None:
    pieces = [chunk(EVENT)] * 10
    length = sum(map(len, pieces))
    async with lent(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % length) as body:
        await body.pass_on(*pieces[2:])
        body.stream.end()
        await body.check_measured()
        assert forwarder(body.tap).lent_total == 1


async def test_cut_and_odd_framing_comes_back_and_goes_on() -> None:
    """An extension, a size line in two reads, a chunk in two reads, trailers."""
    async with lent() as body:
        await body.pass_on(b"5;name=value\r\nhello\r\n", *[chunk(EVENT)] * 10)
        await wait_until(lambda: forwarder(body.tap).lent_total == 2)
        await body.pass_on(b"1", b"0\r\n0123456789", b"abcdef\r", b"\n", *[chunk(EVENT)] * 100)
        await body.pass_on(b"0\r\nX-Sum: 1\r\n\r\n")
        body.stream.end()
        await body.check_measured()


@pytest.mark.parametrize("framing", ["chunks", "length"])
async def test_a_blocked_client_slows_the_upstream_and_gets_every_byte(framing: str) -> None:
    piece = b"z" * 100_000
    total = 300 * len(piece)
    head = CHUNKED if framing == "chunks" else b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % total
    peers = []

    async def flood(call: Call) -> None:
        peers.append(call.peer)
        await call.say(head)
        for _ in range(300):
            await call.say(chunk(piece) if framing == "chunks" else piece)
        if framing == "chunks":
            await call.say(END)

    async with stage(thread=True) as (up, tap):
        client = await tap.client(receive_buffer=65_536)
        await client.send(request("GET", up.on(flood)))
        await wait_until(lambda: peers)
        assert await wait_still(lambda: peers[0].sent_bytes) < total / 2
        assert forwarder(tap).lent == 0, "a blocked client is the loop's"
        answer = await client.answer()
        assert (len(answer.data), answer.whole) == (total, True)
        closing = await tap.closing()
        assert (closing.outcome, closing.paused_ns > 0) == ("complete", True)
        assert forwarder(tap).lent_total > 1, "it goes back when the client reads"


@pytest.mark.parametrize("how", list(Ending))
async def test_a_client_that_leaves_closes_the_upstream(how: Ending) -> None:
    async with lent() as body:
        body.client.reset() if how is Ending.RST else body.client.close()
        assert body.stream.call is not None
        assert await body.stream.call.left()
        body.stream.end(CLOSE)
        await body.check_measured("client_cancelled")
        await wait_until(lambda: not body.tap.relay.connections)


@pytest.mark.parametrize(("how", "outcome"), [(CLOSE, "truncated"), (RESET, "upstream_reset")])
async def test_an_upstream_that_leaves_cuts_the_answer(how: str, outcome: str) -> None:
    async with lent() as body:
        body.stream.end(how)
        rest, _ = await body.client.to_end()
        assert rest == b""
        await body.check_measured(outcome)
        assert forwarder(body.tap).lent == 0


async def test_bytes_before_the_end_of_the_upstream_reach_the_client() -> None:
    async with lent() as body:
        body.stream.say(chunk(b"last"))
        body.stream.end(CLOSE)
        rest, _ = await body.client.to_end()
        assert rest == chunk(b"last")
        body.body += rest
        await body.check_measured("truncated")


async def test_a_pipelined_request_comes_back_and_is_answered_afterwards() -> None:
    async with lent() as body:
        path = body.up.on(answers(b"second"))
        await body.client.send(request("GET", path))
        await wait_until(lambda: forwarder(body.tap).lent == 0)
        await body.pass_on(*[chunk(EVENT)] * 20, END)
        body.stream.end()
        assert (await body.client.answer()).data == b"second"
        await body.check_measured()


async def test_a_silent_upstream_meets_the_idle_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("llmtap.vantage.relay.relay.SWEEP_S", 3_600.0)  # the test looks by itself
    async with lent() as body:
        (flow,) = body.tap.relay.flows
        # The thread notes the time of a read after it has sent the bytes.
        flow.check(SystemClock.mono_ns() + body.tap.relay.options.idle_timeout)
        rest, _ = await body.client.to_end()
        assert rest == b""
        await body.check_measured("upstream_timeout")


async def test_events_reset_the_idle_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("llmtap.vantage.relay.relay.SWEEP_S", 3_600.0)  # the test looks by itself
    async with lent() as body:
        (flow,) = body.tap.relay.flows
        before_ns = flow.last_ns
        await body.pass_on(chunk(EVENT))
        await wait_until(lambda: flow.loan.last_ns > before_ns)
        flow.check(before_ns + body.tap.relay.options.idle_timeout)
        assert not flow.over
        assert forwarder(body.tap).lent == 1
        await body.pass_on(END)
        body.stream.end()
        await body.check_measured()


async def test_a_drain_waits_for_a_lent_body() -> None:
    async with lent(drain_timeout=ms(600_000)) as body:
        draining = asyncio.ensure_future(body.tap.drain())
        await wait_until(lambda: body.tap.relay.reporter.draining)
        await body.pass_on(*[chunk(EVENT)] * 5, END)
        body.stream.end()
        await draining
        await body.check_measured()


async def test_the_end_of_a_drain_cuts_a_lent_body() -> None:
    async with lent(drain_timeout=ms(1)) as body:
        await body.tap.drain()
        rest, _ = await body.client.to_end()
        assert rest == b""
        await body.check_measured("truncated")


async def test_a_full_channel_drops_the_exchange_and_not_the_traffic() -> None:
    async with lent(tap_bytes=20_000) as body:
        body.tap.meter.acknowledges = False
        await body.pass_on(*[chunk(EVENT * 20)] * 200)
        await wait_until(lambda: body.tap.relay.tap.ledger.dropped == {"overflow": 1})
        assert forwarder(body.tap).lent == 1, "the thread goes on"
        await body.pass_on(*[chunk(EVENT)] * 20, END)
        body.stream.end()
        await wait_until(lambda: not body.tap.relay.flows)
        kinds = body.tap.meter.exchange(1).kinds
        assert kinds.count(FrameKind.DROP) == 1
        assert kinds[-1] == FrameKind.DROP
        body.tap.meter.acknowledges = True
        body.tap.meter.acknowledge()


async def test_a_lost_meter_does_not_stop_the_traffic() -> None:
    async with lent() as body:
        body.tap.meter.stop()
        await wait_until(lambda: not body.tap.relay.tap.connected)
        await body.pass_on(*[chunk(EVENT)] * 20)
        await body.tap.meter.start()
        await wait_until(lambda: body.tap.relay.tap.connected)
        await body.pass_on(*[chunk(EVENT)] * 20, END)
        body.stream.end()
        await wait_until(lambda: not body.tap.relay.flows)
        assert body.tap.relay.tap.ledger.dropped == {"meter_lost": 1}
        assert forwarder(body.tap).lent_total == 1


async def test_reads_of_the_thread_count_as_lag() -> None:
    async with lent() as body:
        lag = body.tap.relay.reporter.lag
        body.tap.relay.tap.collect()
        before = sum(lag.buckets)
        await body.pass_on(*[chunk(EVENT)] * 10)
        body.tap.relay.tap.collect()
        assert sum(lag.buckets) >= before + 10
        await body.pass_on(END)
        body.stream.end()
        await body.check_measured()


async def test_many_bodies_at_the_same_time_come_through_unchanged() -> None:
    async with stage(thread=True) as (up, tap):

        async def one(number: int) -> None:
            pieces = [chunk(b"%d:%d " % (number, i) * (1 + (number * i) % 40)) for i in range(60)]

            async def script(call: Call) -> None:
                await call.body()
                await call.say(CHUNKED)
                for i, piece in enumerate([*pieces, END]):
                    await call.say(piece)
                    if (number + i) % 7 == 0:
                        await asyncio.sleep(0)

            answer = await tap.post(up.on(script), b"{}")
            assert answer.whole
            assert answer.data == b"".join(p.split(b"\r\n", 1)[1][:-2] for p in pieces)

        await asyncio.gather(*(one(number) for number in range(30)))
        assert forwarder(tap).lent_total >= 1
        assert forwarder(tap).lent == 0


@pytest.mark.parametrize("options", [{"thread": False}, {"thread": True, "clock": "mono"}])
async def test_there_is_no_thread_without_the_option_or_kernel_stamps(options: dict[str, Any]) -> None:
    async with stage(**options) as (up, tap):
        assert tap.relay.forwarding is None
        assert (await tap.get(up.on(answers(b"x" * 1_000, chunks=20)))).whole


async def test_an_answer_in_one_read_stays_in_the_loop() -> None:
    async with stage(thread=True) as (up, tap):
        assert (await tap.get(up.on(lambda call: call.say(OK)))).data == b"ok"
        assert forwarder(tap).lent_total == 0

"""Frames of an exchange: everything that passed, in order, with stamps one can measure by."""

import asyncio
import time

import pytest

from llmtap.channel.frames import FrameKind
from llmtap.clock import Clock, SystemClock
from llmtap.net.listener import keep_port
from llmtap.net.stream import PlainStream
from llmtap.protocol.http1 import header_value, parse_request_head
from llmtap.protocol.inference import NOT_INFERENCE
from llmtap.vantage.relay import relay as relay_module
from tests.support.clocks import STEPS_NS, SettableClock
from tests.support.servers.peer import chunk, chunked, wait_until
from tests.support.servers.proxy import Recording, stage, tapped
from tests.support.servers.raw_client import request
from tests.support.servers.upstream import CHUNKED, Call, answers

MARGIN_NS = 1_000_000
"""A kernel stamp, mapped through a wall-clock sample, may be off by 20 us; this is far more."""
STALL_NS = 30_000_000
"""The least that the probes of the loop find of a stall of 50 ms."""
CLOCKS = pytest.mark.parametrize("clock", ["mono", "kernel"])


def check_order(recorded: Recording) -> None:
    """What holds for the frames of any exchange."""
    kinds = recorded.kinds
    assert kinds[0] is FrameKind.OPEN
    assert kinds[-1] is FrameKind.CLOSE
    assert kinds.count(FrameKind.OPEN) == kinds.count(FrameKind.CLOSE) == 1
    for down in (True, False):
        side = [f for f in recorded.frames if (f.kind in DOWN) is down and f.kind is not FrameKind.CLOSE]
        stamps = [f.t_ns for f in side]
        assert stamps == sorted(stamps), [(f.kind.name, f.t_ns) for f in side]
    first = recorded.frames[0].t_ns
    assert all(f.t_ns >= first - MARGIN_NS for f in recorded.frames)
    assert all(f.t_ns <= recorded.frames[-1].t_ns + MARGIN_NS for f in recorded.frames)


def check_offset(clock: Clock, told_ns: int) -> None:
    """From the monotonic to the wall clock: this process may be held between its readings of the two."""
    before_ns, wall_ns, after_ns = clock.mono_ns(), clock.wall_ns(), clock.mono_ns()
    assert wall_ns - after_ns - MARGIN_NS < told_ns < wall_ns - before_ns + MARGIN_NS


DOWN = {
    FrameKind.INTERIM,
    FrameKind.RESPONSE_HEAD,
    FrameKind.RESPONSE_DATA,
    FrameKind.RESPONSE_END,
    FrameKind.ANSWER,
}


@pytest.mark.parametrize("in_parts", [False, True])
@pytest.mark.parametrize("id_field", [(), ("X-Request-Id: theirs",)])
async def test_the_meter_reads_the_request_id_that_the_upstream_gets(
    in_parts: bool, id_field: tuple[str, ...]
) -> None:
    async with stage(request_id="make") as (up, tap):
        path = up.on(answers())
        raw = request("POST", path, *id_field, body=b"the request")
        client = await tap.client()
        if in_parts:
            await client.send(raw[:-4])
            await client.taken()
            await client.send(raw[-4:])
            await client.answer()
        else:
            await client.ask(raw)
        recorded = await tap.meter.closed(1)
        (forwarded,) = up.call(path).head.all("x-request-id")
        measured = parse_request_head(recorded.request.partition(b"\r\n\r\n")[0] + b"\r\n\r\n")
        assert header_value(measured.headers, b"x-request-id") == forwarded
        assert recorded.request.endswith(b"\r\n\r\nthe request")
        assert recorded.closing.request_bytes == len(raw)


@CLOCKS
async def test_a_stream_is_told_read_by_read(clock: str) -> None:
    async with stage(clock=clock) as (up, tap):
        events = [b"data: %d\n\n" % i for i in range(10)]
        sent: list[int] = []
        heard: list[int] = []
        may_go_on = asyncio.Semaphore(0)

        async def script(call: Call) -> None:
            await call.body()
            await asyncio.sleep(0.01)
            await call.say(CHUNKED)
            for data in events:
                await may_go_on.acquire()  # its client has all there was so far: no two come in one read
                sent.append(SystemClock.mono_ns())
                await call.say(chunk(data))
            await may_go_on.acquire()
            await call.say(b"0\r\n\r\n")

        raw = request("POST", up.on(script), "X-A: 1", body=b"the request")
        began = SystemClock.mono_ns()
        client = await tap.client()
        await client.send(raw)
        assert (await client.head()).raw == CHUNKED
        for data in events:
            may_go_on.release()
            assert await client.exactly(len(chunk(data))) == chunk(data)
            heard.append(SystemClock.mono_ns())
        may_go_on.release()
        assert await client.exactly(5) == b"0\r\n\r\n"
        ended = SystemClock.mono_ns()
        recorded = await tap.meter.closed(1)
        check_order(recorded)
        assert recorded.request == raw, "as received, not as sent on"
        head = recorded.one(FrameKind.RESPONSE_HEAD)
        assert head.data == CHUNKED
        reads = recorded.of(FrameKind.RESPONSE_DATA)
        assert [f.data for f in reads] == [*(chunk(e) for e in events), b"0\r\n\r\n"]
        for at, until, frame in zip(sent, heard, reads, strict=False):
            assert at - MARGIN_NS <= frame.t_ns <= until + MARGIN_NS
            # What is added lies between the read and the client's socket.
            assert 0 <= frame.extra_ns <= until - at + 2 * MARGIN_NS
        submit = recorded.one(FrameKind.SUBMIT)
        assert began - MARGIN_NS <= recorded.frames[0].t_ns <= recorded.one(FrameKind.REQUEST_END).t_ns
        assert recorded.one(FrameKind.REQUEST_END).t_ns - MARGIN_NS <= submit.t_ns <= head.t_ns
        assert submit.extra_ns == submit.t_ns - recorded.one(FrameKind.REQUEST_END).t_ns
        end = recorded.one(FrameKind.RESPONSE_END)
        assert end.t_ns == reads[-1].t_ns
        assert recorded.frames[-1].t_ns <= ended + MARGIN_NS
        closing = recorded.closing
        assert (closing.outcome, closing.status, closing.error, closing.retries) == ("complete", 200, None, 0)
        assert closing.request_bytes == len(raw)
        assert closing.response_bytes == len(CHUNKED) + sum(len(f.data) for f in reads)
        assert closing.connect_ns is not None
        assert closing.connect_ns > 0
        assert closing.connected_ns is not None
        assert recorded.frames[0].t_ns <= closing.connected_ns - closing.connect_ns + MARGIN_NS
        assert closing.connected_ns <= submit.t_ns
        assert closing.send_wait_ns == 0, "the socket took the request at once"
        assert closing.lag_ns > 0, "an uncertainty of nothing is not credible"
        assert closing.paused_ns == 0


@CLOCKS
async def test_a_late_loop_makes_only_the_stamps_of_the_loop_uncertain(clock: str) -> None:
    """The loop stands still while an answer is under way: the kernel's stamps of its reads stay right."""
    async with stage(clock=clock) as (up, tap):

        async def script(call: Call) -> None:
            await call.body()
            await call.say(CHUNKED + chunk(b"data: 1\n\n"))
            time.sleep(0.05)  # noqa: ASYNC251 - the loop is to stand still
            await wait_until(lambda: tap.relay.reporter.lag.max_ns >= STALL_NS)
            await call.say(chunk(b"data: 2\n\n") + b"0\r\n\r\n")

        await tap.get(up.on(script))
        closing = (await tap.meter.closed(1)).closing
        assert closing.stall_ns >= STALL_NS
        assert (closing.lag_ns < closing.stall_ns) == (clock == "kernel")


@CLOCKS
async def test_events_that_come_in_one_segment_are_told_so(clock: str) -> None:
    events = chunk(b"data: 1\n\n") + chunk(b"data: 2\n\n")
    async with stage(clock=clock) as (up, tap):

        async def script(call: Call) -> None:
            await call.body()
            await call.say(CHUNKED)
            await call.peer.taken()
            await call.say(events)
            await call.peer.taken()
            await call.say(events + b"0\r\n\r\n")

        async def whole(call: Call) -> None:
            await call.body()
            await call.say(CHUNKED + events + b"0\r\n\r\n")

        for say in (script, whole):
            await tap.get(up.on(say))
        await tap.meter.closed(2)
        came = [(frame.kind, frame.data) for frame in tap.meter.raw if frame.data.startswith(events)]
        kind = FrameKind.RESPONSE_AT_ONCE if clock == "kernel" else FrameKind.RESPONSE_DATA
        end = events + b"0\r\n\r\n"
        expected = [(kind, events), (kind, end), (kind, end)]
        assert came == (expected if clock == "kernel" else expected[:2]), "in mono, the last one is an ANSWER"


# ---------------------------------------------------------------- a meter in trouble


async def test_a_meter_killed_in_the_middle_of_streams_changes_no_byte() -> None:
    async with stage() as (up, tap):
        go = asyncio.Event()
        body = [b"data: %d\n\n" % i for i in range(40)]

        async def script(call: Call) -> None:
            await call.say(CHUNKED)
            for i, data in enumerate(body):
                if i == 20:
                    await go.wait()
                await call.say(chunk(data))
                await asyncio.sleep(0)
            await call.say(b"0\r\n\r\n")

        path = up.on(script)
        clients = [await tap.client() for _ in range(20)]
        asking = [asyncio.ensure_future(c.get(path)) for c in clients]
        await wait_until(
            lambda: len({f.seq for f in tap.meter.frames if f.kind is FrameKind.RESPONSE_DATA}) == 20
        )
        tap.meter.stop()
        await wait_until(lambda: not tap.relay.tap.connected)
        between = await tap.get(up.on(answers(b"unmeasured")))
        assert between.data == b"unmeasured"
        go.set()
        for answer in await asyncio.gather(*asking):
            assert (answer.whole, answer.body.raw) == (True, chunked(*body))
        assert tap.relay.tap.ledger.dropped == {"meter_lost": 20, "no_meter": 1}
        await tap.meter.start()
        await wait_until(lambda: len(tap.meter.hellos) == 2)
        assert (await clients[0].get(up.on(answers(b"again")))).data == b"again"
        recorded = await tap.meter.closed(22)
        check_order(recorded)
        await wait_until(lambda: tap.relay.tap.ledger.measured == 1)
        assert tap.relay.tap.ledger.opened == 22


async def test_a_stopped_meter_holds_up_nobody() -> None:
    """Fail-open: with a meter that reads nothing, whole exchanges go unmeasured and all of them pass."""
    async with stage(tap_bytes=256 << 10) as (up, tap):
        tap.meter.pause()
        path = up.on(answers(b"d" * 50_000, chunks=10))
        client = await tap.client()
        for _ in range(100):
            assert (await client.get(path)).data == b"d" * 50_000
            assert tap.relay.tap.pending_bytes < 2 * (256 << 10)
        ledger = tap.relay.tap.ledger
        lost = ledger.dropped["overflow"]
        assert 50 < lost < 100
        tap.meter.resume()
        await wait_until(lambda: ledger.unsettled == 0)
        assert (ledger.measured, ledger.opened) == (100 - lost, 100)
        seqs = {f.seq for f in tap.meter.frames if f.kind is FrameKind.CLOSE}
        assert len(seqs) == 100 - lost
        for seq in seqs:
            check_order(tap.meter.exchange(seq))
            body = tap.meter.exchange(seq).answer.partition(b"\r\n\r\n")[2]
            assert body == chunked(*[b"d" * 5_000] * 10)


# ---------------------------------------------------------------- the relay about itself


async def test_the_status_counts_what_happened() -> None:
    async with stage() as (up, tap):
        path = up.on(answers(b"x" * 1_000))
        client = await tap.client()
        for _ in range(4):
            await client.get(path)
        await tap.ask(b"nonsense\r\n\r\n")
        await wait_until(lambda: tap.relay.tap.ledger.measured == 5)
        status = tap.relay.reporter.status()
        assert (status.opened, status.measured, status.unsettled, status.dropped) == (5, 5, 0, {})
        assert (status.accepted, status.streams, status.upstream_idle) == (2, 0, 1)
        assert (status.upstream_connects, status.upstream_reuses) == (1, 3)
        assert status.refused == {"malformed_request": 1}
        assert status.bytes_down >= 4_000
        assert status.bytes_up >= 4 * len(request("GET", path))
        assert status.cpu_ns > 0
        assert status.rss_bytes > 1_000_000
        await wait_until(lambda: tap.meter.statuses)


async def test_requests_that_are_not_inference_pass_and_are_counted_by_rule() -> None:
    async with stage(skip=NOT_INFERENCE) as (up, tap):
        path = up.on(answers(b"model " * 3_000, chunks=3))
        tokenize = "/tokenize"
        up.at(tokenize, answers(b"[1,2]"))
        client = await tap.client()
        assert (await client.get(path)).data == b"model " * 3_000
        await client.send(request("POST", tokenize, "Content-Length: 2000") + b"t" * 500)
        await client.send(b"t" * 1_500)
        assert (await client.answer()).data == b"[1,2]"
        assert tap.relay.tap.ledger.opened == 0
        assert (await client.post(path, b"{}")).data == b"model " * 3_000
        await wait_until(lambda: tap.relay.tap.ledger.measured == 1)
        status = tap.relay.reporter.status()
        assert (status.opened, status.measured, status.dropped) == (1, 1, {})
        assert status.skipped == {"GET": 1, "/tokenize": 1}
        assert {f.seq for f in tap.meter.frames if f.kind not in (FrameKind.HELLO, FrameKind.STATUS)} == {1}


async def test_an_upstream_that_is_away_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    with keep_port() as away:
        async with tapped(f"http://127.0.0.1:{away.getsockname()[1]}", ready_needs_upstream=True) as tap:
            await wait_until(lambda: "event=upstream_unreachable" in caplog.text)
            assert tap.relay.reporter.status().upstream_up is False
            assert tap.relay.reporter.status().upstreams == {tap.relay.options.upstream: False}
    assert caplog.text.count("event=upstream_unreachable") == 1
    async with stage(ready_needs_upstream=True) as (_, tap):
        await wait_until(lambda: tap.relay.reporter.status().upstream_up)
    async with stage() as (up, tap):
        assert tap.relay.reporter.status().upstream_up is None
        before_ns = tap.relay.reporter.status().t_ns
        assert tap.relay.reporter.status().upstreams == {}, "no connection yet"
        path = up.on(answers(b"{}"))
        await tap.get(path)
        status = tap.relay.reporter.status()
        assert status.upstreams == {tap.relay.options.upstream: True}
        (tried_ns,) = status.upstreams_tried_ns.values()
        assert before_ns <= tried_ns <= status.t_ns


async def test_an_upstream_that_a_request_found_down_is_asked_until_it_is_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(relay_module, "UPSTREAM_CHECK_S", 0.02)
    with keep_port() as away:
        async with tapped(f"http://127.0.0.1:{away.getsockname()[1]}") as tap:
            assert (await tap.get("/v1/models")).status == 502
            assert list(tap.relay.reporter.status().upstreams.values()) == [False]
            away.listen()
            await wait_until(lambda: list(tap.relay.reporter.status().upstreams.values()) == [True])


async def test_submit_is_stamped_before_the_send_that_completes_the_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # The answer of an upstream on the same host can be stamped before the send returns: TTFT was negative.
    began: dict[bytes, int] = {}
    write = PlainStream.write

    def timed(stream: PlainStream, data: bytes) -> bool:
        began.setdefault(data[-5:], SystemClock.mono_ns())
        return write(stream, data)

    monkeypatch.setattr(PlainStream, "write", timed)
    async with stage() as (up, tap):
        client = await tap.client()
        for n, body in enumerate((b"fresh", b"again"), start=1):  # on a new connection, on a kept one
            await client.send(request("POST", up.on(answers(body)), body=body))
            assert (await client.answer()).status == 200
            recorded = await tap.meter.closed(n)
            read_ns = recorded.one(FrameKind.REQUEST_END).t_ns
            assert read_ns <= recorded.one(FrameKind.SUBMIT).t_ns <= began[body]


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
        check_offset(clocks, hello.anchor_wall_ns - hello.anchor_mono_ns)
        path = up.on(answers())
        await tap.get(path)
        await tap.meter.closed(1)
        assert sum(f.kind is FrameKind.ANCHOR for f in tap.meter.frames) == 1, "it knows already"

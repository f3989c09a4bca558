"""An exchange of the middleware with stamps that are chosen, its heads, and the paths that are skipped."""

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

from llmtap.channel.channel import FLUSH_BYTES
from llmtap.channel.frames import FrameKind
from llmtap.protocol.http1 import parse_request_head, parse_response_head
from llmtap.vantage.middleware import exchange as module
from llmtap.vantage.middleware.exchange import AppExchange, request_head, response_head
from tests.support.servers.peer import play, scene, wait_until
from tests.support.servers.proxy import Recording
from tests.vantage.middleware.asgi import watched

MS = 1_000_000


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """The exchange's clock: its last item is the time."""
    times = [0]
    monkeypatch.setattr(module, "mono_ns", lambda: times[-1])
    yield times


async def _nothing(*_: Any) -> None: ...


def told(work: Any) -> Recording:
    """The frames of one exchange on which `work` was done."""

    async def run() -> Recording:
        async with watched(_nothing) as of:
            exchange = AppExchange(of.emitter, "POST", request_head("POST", b"/x", "1.1", []), 100)
            work(exchange)
            return await of.seen()

    recording: Recording = play(run())
    return recording


def test_stamps_stand_as_they_were_given(now: list[int]) -> None:
    def work(exchange: AppExchange) -> None:
        now.append(250)
        exchange.asked(b"{}", 200, last=True)
        exchange.answered(200, [], 300)
        exchange.said(b"a", 400)
        exchange.complete(500, 600)

    seen = told(work)
    assert [(f.kind, f.t_ns, f.extra_ns) for f in seen.frames] == [
        (FrameKind.OPEN, 100, 0),
        (FrameKind.REQUEST_DATA, 200, 0),
        (FrameKind.REQUEST_END, 200, 0),
        (FrameKind.SUBMIT, 250, 50),
        (FrameKind.RESPONSE_HEAD, 300, 0),
        (FrameKind.RESPONSE_DATA, 400, 0),
        (FrameKind.RESPONSE_END, 500, 0),
        (FrameKind.CLOSE, 600, 0),
    ]
    sent = b"HTTP/1.1 200 \r\n\r\n"
    assert seen.closing.request_bytes == len(seen.request)
    assert seen.closing.response_bytes == len(sent + b"a")


def test_our_own_work_is_added_to_what_comes_after_it(now: list[int]) -> None:
    def work(exchange: AppExchange) -> None:
        exchange.asked(b"", 100, last=True)
        exchange.answered(200, [], 1_000)
        now.append(1_130)  # told by then; the server had the message at 1,100
        exchange.handed_on(1_100)
        exchange.said(b"a", 2_000)
        now.append(2_105)
        exchange.handed_on(2_100)
        exchange.said(b"b", 3_000)
        exchange.complete(3_000, 3_100)

    datas = told(work).of(FrameKind.RESPONSE_DATA)
    assert [f.extra_ns for f in datas] == [30, 5]


def test_a_server_that_waits_for_its_client_is_a_pause_and_one_that_is_slow_is_none(now: list[int]) -> None:
    def work(exchange: AppExchange) -> None:
        exchange.asked(b"", 100, last=True)
        exchange.answered(200, [], 1 * MS)
        exchange.paused(exchange.turns, 50 * MS)  # the loop stood still
        exchange.said(b"a", 60 * MS)
        turns = exchange.turns
        exchange._emitter.turns += 3
        exchange.paused(turns, 7 * MS)
        exchange.complete(70 * MS, 71 * MS)

    assert told(work).closing.paused_ns == 7 * MS


def test_nothing_is_told_after_the_end(now: list[int]) -> None:
    def work(exchange: AppExchange) -> None:
        exchange.asked(b"", 100, last=True)
        exchange.answered(200, [], 200)
        exchange.client_gone()
        exchange.said(b"a", 300)
        exchange.complete(400, 400)
        exchange.cut("raised")
        exchange.leave_unmeasured("websocket")

    seen = told(work)
    assert seen.closing.outcome == "client_cancelled"
    assert not seen.of(FrameKind.RESPONSE_DATA)


def test_a_head_is_what_a_parser_reads_again() -> None:
    fields = [(b"host", b"a.test"), (b"x-a", b"1"), (b"Transfer-Encoding", b"chunked"), (b"x-a", b"2")]
    head = parse_request_head(request_head("PATCH", b"/a?b=c", "1.1", fields))
    assert (head.method, head.target) == (b"PATCH", b"/a?b=c")
    assert head.headers == [(b"host", b"a.test"), (b"x-a", b"1"), (b"x-a", b"2")]
    answer = parse_response_head(response_head(429, [*fields[1:], (b"content-length", b"3")]), b"GET")
    assert (answer.status, answer.length) == (429, 3)
    assert answer.headers == [(b"x-a", b"1"), (b"x-a", b"2"), (b"content-length", b"3")]


@scene
async def test_what_is_taken_back_as_the_meter_goes_counts_once() -> None:
    async with watched(_nothing) as of:
        await wait_until(lambda: of.emitter.tap.connected and of.meter.hellos)
        # So much has gathered that the next frame is sent at once, and finds nobody.
        head = request_head("POST", b"/x", "1.1", [(b"a", b"x" * FLUSH_BYTES)])
        of.meter.stop()
        await asyncio.sleep(0)
        exchange = AppExchange(of.emitter, "POST", head, 100)
        exchange.asked(b"", 200, last=False)
        assert of.ledger.live == {1}
        exchange.leave_unmeasured("middleware_error")
        await wait_until(lambda: not of.emitter.tap.connected)
        assert (of.ledger.opened, sum(of.ledger.dropped.values())) == (1, 1)

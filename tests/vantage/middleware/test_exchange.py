"""An exchange of the middleware with stamps that are chosen, its heads, and the paths that are skipped."""

from collections.abc import Iterator
from typing import Any

import pytest

from llmtap.channel.frames import FrameKind
from llmtap.vantage.middleware import exchange as module
from llmtap.vantage.middleware.exchange import AppExchange, request_head
from tests.support.servers.peer import play
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
        exchange.request_data(b"{}", 200, last=True)
        exchange.answer_head(200, [], 300)
        exchange.answer_data(b"a", 400)
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
        exchange.request_data(b"", 100, last=True)
        exchange.answer_head(200, [], 1_000)
        now.append(1_130)  # told by then; the server had the message at 1,100
        exchange.add_own_time(1_100)
        exchange.answer_data(b"a", 2_000)
        now.append(2_105)
        exchange.add_own_time(2_100)
        exchange.answer_data(b"b", 3_000)
        exchange.complete(3_000, 3_100)

    datas = told(work).of(FrameKind.RESPONSE_DATA)
    assert [f.extra_ns for f in datas] == [30, 5]


def test_a_server_that_waits_for_its_client_is_a_pause_and_one_that_is_slow_is_none(now: list[int]) -> None:
    def work(exchange: AppExchange) -> None:
        exchange.request_data(b"", 100, last=True)
        exchange.answer_head(200, [], 1 * MS)
        exchange.add_pause(exchange.turns, 50 * MS)  # the loop stood still
        exchange.answer_data(b"a", 60 * MS)
        turns = exchange.turns
        exchange._emitter.turns += 3
        exchange.add_pause(turns, 7 * MS)
        exchange.complete(70 * MS, 71 * MS)

    assert told(work).closing.paused_ns == 7 * MS


def test_nothing_is_told_after_the_end(now: list[int]) -> None:
    def work(exchange: AppExchange) -> None:
        exchange.request_data(b"", 100, last=True)
        exchange.answer_head(200, [], 200)
        exchange.on_client_disconnect()
        exchange.answer_data(b"a", 300)
        exchange.complete(400, 400)
        exchange.on_app_end("raised")
        exchange.leave_unmeasured("websocket")

    seen = told(work)
    assert seen.closing.outcome == "client_cancelled"
    assert not seen.of(FrameKind.RESPONSE_DATA)

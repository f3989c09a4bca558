"""Nothing is sent twice unasked; what is sent again is counted, and its latency tells both stories."""

import time
from email.utils import formatdate

import pytest

from llmtap.exchange.outcome import Outcome
from llmtap.load.http import FIRST_NS, wait_ns
from llmtap.load.tally import LoadTally
from tests.support.servers.loading import sender_to, streamed_answer
from tests.support.servers.peer import chunked, wait_until
from tests.support.servers.upstream import CLOSE, RESET, Call, Script, upstream

S = 1_000_000_000


@pytest.mark.parametrize(
    ("retries", "asked", "waits_ns"),
    [
        (0, None, FIRST_NS),
        (4, None, 16 * FIRST_NS),
        (100_000, None, 30 * S),
        (0, b" 30 ", 30 * S),
        (7, b"0", 0),
        (0, b"007", 7 * S),
        (0, b"31", None),
        (0, b"9" * 5_000, None),
        (0, b"1.5", FIRST_NS),
        (0, b"Sun, 06 Nov 1994 08:49:37 GMT", FIRST_NS),
        (0, b"\xb2", FIRST_NS),
    ],
)
def test_the_wait(retries: int, asked: bytes | None, waits_ns: int | None) -> None:
    assert wait_ns(retries, asked) == waits_ns


@pytest.mark.parametrize(
    ("seconds", "waits_ns"), [(2, 2 * S), (30, 30 * S), (31, None), (0, FIRST_NS), (-5, FIRST_NS)]
)
def test_a_date_is_counted_from_the_date_of_the_answer(seconds: int, waits_ns: int | None) -> None:
    """The server's clock is years apart from ours."""
    answered_s = 784111777
    date, until = (formatdate(s, usegmt=True).encode() for s in (answered_s, answered_s + seconds))
    assert wait_ns(0, until, date) == waits_ns


def test_without_a_date_of_the_answer_our_clock_counts() -> None:
    until = formatdate(time.time() + 20, usegmt=True).encode()
    waits_ns = wait_ns(0, until)
    assert waits_ns is not None and 15 * S < waits_ns <= 20 * S
    assert wait_ns(0, until, b"no date") == pytest.approx(waits_ns, abs=5 * S)


def busy(status: bytes, *fields: bytes, close: bool = False) -> bytes:
    lines = [b"HTTP/1.1 " + status, b"Content-Length: 2", *fields, *([b"Connection: close"] if close else [])]
    return b"\r\n".join(lines) + b"\r\n\r\n{}"


def first(n: int, *said: bytes, then: str | None = None) -> Script:
    """The first `n` requests get this, the others an answer."""
    seen = 0

    async def script(call: Call) -> str | None:
        nonlocal seen
        await call.body()
        seen += 1
        if seen > n:
            await call.say(*streamed_answer(3))
            return None
        await call.say(*said)
        return then

    return script


AGAIN = b"Retry-After: 0"
FAILS: dict[str, tuple[str, Outcome, tuple[bytes, ...], str | None]] = {
    "429 and closes": (
        "429",
        Outcome.UPSTREAM_ERROR,
        (busy(b"429 Too Many Requests", AGAIN, close=True),),
        CLOSE,
    ),
    "503 in pieces": (
        "503",
        Outcome.UPSTREAM_ERROR,
        (b"HTTP/1.1 503 No\r\nRetry-After: 0\r\nTransfer-Encoding: chunked\r\n\r\n", chunked(b"{}")),
        None,
    ),
    "503 until the end": (
        "503",
        Outcome.UPSTREAM_ERROR,
        (b"HTTP/1.1 503 No\r\nRetry-After: 0\r\n\r\n", b"{}"),
        CLOSE,
    ),
    "resets": ("closed", Outcome.UPSTREAM_RESET, (), RESET),
    "100 and closes": ("closed", Outcome.UPSTREAM_RESET, (b"HTTP/1.1 100 Continue\r\n\r\n",), CLOSE),
}


@pytest.mark.parametrize("case", FAILS)
async def test_sent_again_as_often_as_asked_for(case: str) -> None:
    reason, outcome, said, then = FAILS[case]
    for retries in (0, 1, 3):
        script = first(2, *said, then=then)
        async with upstream() as server, sender_to(server.url + server.on(script), retries=retries) as to:
            call = to.send(scheduled_ns=1)
            x = await to.end_of(call)
            n = min(retries, 2)
            assert (len(server.calls), to.sender.sent, call.retries) == (1 + n, 1, n)
            assert to.sender.retries == ({reason: n} if n else {})
            assert x.outcome is (Outcome.COMPLETE if n == 2 else outcome)
            assert len({await c.body() for c in server.calls}) == 1, "the same bytes each time"
    assert (x.status, x.tokens.output, x.error) == (200, 3, None)


NEVER_AGAIN: dict[str, tuple[tuple[bytes, ...], str | None]] = {
    "500": ((busy(b"500 Oh", AGAIN),), None),
    "closes within its answer": (tuple(streamed_answer(3)[:2]), CLOSE),
    "closes within its head": ((b"HTTP/1.1 5",), CLOSE),
    "breaks HTTP": ((b"no\r\n\r\n",), None),
    "asks for too long": ((busy(b"429 Too Many Requests", b"Retry-After: 31"),), None),
}


@pytest.mark.parametrize("case", NEVER_AGAIN)
async def test_never_sent_again(case: str) -> None:
    said, then = NEVER_AGAIN[case]
    script = first(9, *said, then=then)
    async with upstream() as server, sender_to(server.url + server.on(script), retries=3) as to:
        assert (await to.ask()).outcome is not Outcome.COMPLETE
        assert len(server.calls) == 1


async def test_nobody_listens_for_a_while() -> None:
    async with upstream() as server:
        path, port = server.on(first(0)), server.port
        await server.stop()
        async with sender_to(f"http://127.0.0.1:{port}{path}", retries=9) as to:
            call = to.send()
            await wait_until(lambda: call.retries)
            server.start()
            assert (await to.end_of(call)).outcome is Outcome.COMPLETE
            assert to.sender.retries == {"refused": call.retries}


async def test_latency_counts_from_the_last_submit_and_from_the_schedule() -> None:
    """Corrected = uncorrected + (submit of the last attempt - scheduled): the waits between are in it."""
    async with upstream() as server:
        script = first(2, busy(b"429 Too Many Requests"))
        async with sender_to(server.url + server.on(script), retries=3) as to:
            scheduled_ns = 1
            call = to.send(scheduled_ns=scheduled_ns)
            first_ns = call.began_ns
            x = await to.end_of(call)
            t, m = x.timeline, (tally := LoadTally()).add(x)
            assert t.submit_ns and t.response_end_ns and m.ttft_ns and m.e2e_ns
            assert call.first_ns == first_ns
            assert x.dispatch_late_ns == first_ns - scheduled_ns, "waiting to ask again is not our lateness"
            # 0.1 s and 0.2 s; timers may be 1 ms early.
            assert t.submit_ns >= t.arrival_ns >= first_ns + 3 * FIRST_NS - 2_000_000
            assert m.e2e_ns == t.response_end_ns - t.submit_ns, "the waits are not in it"
            late_ns = t.submit_ns - scheduled_ns
            assert tally.corrected["ttft"].max == m.ttft_ns + late_ns
            assert tally.corrected["e2e"].max == m.e2e_ns + late_ns


async def test_a_wait_is_cut() -> None:
    """Nothing is under way then: it ends as its last attempt did."""
    async with upstream() as server:
        script = first(9, busy(b"429 Too Many Requests", b"Retry-After: 9"))
        async with sender_to(server.url + server.on(script), retries=3) as to:
            calls = [to.send() for _ in range(3)]
            await wait_until(lambda: all(call.is_waiting for call in calls))
            assert to.sender.pool.idle == 3
            calls[0].cancel("enough")
            assert (to.of(calls[0]).outcome, to.of(calls[0]).status) == (Outcome.UPSTREAM_ERROR, 429)
            to.sender.stop_retrying()
            assert all(to.of(call).status == 429 for call in calls)
            assert (await to.ask()).status == 429
            assert len(server.calls) == 4

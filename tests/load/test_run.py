"""One schedule, sent once, in its order and never early, whatever the server does."""

import asyncio
from array import array
from collections.abc import Sequence
from typing import Any

import pytest

from llmtap.clock import SystemClock
from llmtap.exchange.exchange import Exchange
from llmtap.exchange.outcome import Outcome
from llmtap.load.options import LoadPlan
from llmtap.load.run import LoadRun, RowRequest, Schedule
from llmtap.load.tally import LoadTally
from llmtap.units import Duration
from llmtap.workload.requests import Requests
from tests.support.servers.loading import Sending, body_of, sender_to, streamed_answer
from tests.support.servers.peer import wait_until
from tests.support.servers.upstream import CLOSE, Call, Upstream, answers, says, upstream

MS = 1_000_000
ANSWER = streamed_answer(2)


def requests(
    arrivals_ms: Sequence[float], after: Sequence[int] = (), think_ms: Sequence[int] = ()
) -> Requests:
    return Requests(
        array("q", [int(ms * MS) for ms in arrivals_ms]),
        after=array("q", after),
        think_ns=array("q", [ms * MS for ms in think_ms]),
    )


class Playing:
    """A run, what it kept, and what it counted."""

    def __init__(self, to: Sending, r: Requests, slots: int = 0, **more: Any) -> None:
        self.rows: list[int] = []
        self.exchanges: dict[int, Exchange] = {}
        self.tally = LoadTally()
        self.start_ns = SystemClock.mono_ns() + 20 * MS
        self.schedule = Schedule(r, range(len(r)), slots) if slots else Schedule(r, range(len(r)))
        load = LoadPlan.of(url="http://127.0.0.1:1", **more)
        self.run = LoadRun(
            to.sender,
            self.schedule,
            lambda row: RowRequest(body_of(row)),
            self._keep,
            load,
            start_ns=self.start_ns,
        )

    def _keep(self, row: int, x: Exchange) -> None:
        assert row not in self.exchanges, "kept once"
        self.rows.append(row)
        self.exchanges[row] = x
        self.tally.add(x)

    async def go(self) -> "Playing":
        await self.run.send_all()
        return self

    def outcomes(self) -> list[Outcome]:
        return [self.exchanges[row].outcome for row in sorted(self.exchanges)]


def rows_of(server: Upstream) -> list[int]:
    """Which rows came to the server, in their order; its scripts have read the bodies."""
    return [
        int((call.payload.data if call.payload else b"").partition(b"row-")[2].partition(b'"')[0])
        for call in server.calls
    ]


class Held:
    """Answers once it is told to."""

    def __init__(self) -> None:
        self.go = asyncio.Event()

    async def __call__(self, call: Call) -> str | None:
        await call.body()
        await self.go.wait()
        await call.say(*ANSWER)
        return None


async def test_each_row_once_at_its_time() -> None:
    arrivals = [0, 3, 3, 3, 10.5, 11, 40, 41, 60]
    async with upstream() as server, sender_to(server.url + server.on(says(*ANSWER))) as to:
        playing = await Playing(to, requests(arrivals)).go()
        assert sorted(rows_of(server)) == list(range(len(arrivals)))
        assert playing.outcomes() == [Outcome.COMPLETE] * len(arrivals)
        begun = []
        for row, ms in enumerate(arrivals):
            x = playing.exchanges[row]
            assert x.scheduled_ns == playing.start_ns + int(ms * MS)
            assert x.dispatch_late_ns >= 0, "never early"
            assert x.timeline.arrival_ns == x.scheduled_ns + x.dispatch_late_ns
            begun.append(x.timeline.arrival_ns)
        assert begun == sorted(begun)
        assert playing.run.stopped is None


async def test_a_server_that_stalls_changes_no_send_time() -> None:
    """Theory. Rows are due at P, submitted at S, answered at E. An open loop submits each at its time,
    however long the server stalls: all of them reach the server before it answers one. Latency from submit is
    E - S, from the schedule E - P = (E - S) + (S - P): the two differ by how late the sender was, and here
    that has nothing to do with the stall. (A closed loop would have sent one, and then waited.)"""
    n, held = 50, Held()
    async with upstream() as server, sender_to(server.url + server.on(held)) as to:
        playing = Playing(to, requests([2 * i for i in range(n)]))
        going = asyncio.ensure_future(playing.go())
        await wait_until(lambda: len(server.calls) == n)
        assert not playing.rows, "nobody was answered yet"
        stalled_until_ns = SystemClock.mono_ns()
        held.go.set()
        await going
        late_ns = []
        for row in range(n):
            x = playing.exchanges[row]
            assert x.scheduled_ns == playing.start_ns + 2 * row * MS
            assert x.timeline.submit_ns < stalled_until_ns
            late_ns.append(x.timeline.submit_ns - x.scheduled_ns)
        tally = playing.tally
        for name in ("ttft", "e2e"):
            plain, corrected = tally.summary.histogram(name), tally.corrected[name]
            assert plain.n == corrected.n == n
            assert (corrected.mean - plain.mean) * n == pytest.approx(sum(late_ns), abs=n)


async def test_one_closed_slot_waits_and_nothing_was_scheduled() -> None:
    async with upstream() as server, sender_to(server.url + server.on(says(*ANSWER))) as to:
        playing = await Playing(to, requests([0] * 10), slots=1).go()
        assert rows_of(server) == playing.rows == list(range(10))
        ends = [playing.exchanges[row].timeline.response_end_ns or 0 for row in range(10)]
        begins = [playing.exchanges[row].timeline.arrival_ns for row in range(10)]
        slack_ns = max(x.uncertainty_ns for x in playing.exchanges.values())
        assert all(end_ns <= begin_ns + slack_ns for end_ns, begin_ns in zip(ends, begins[1:], strict=False))
        assert all(x.scheduled_ns is None for x in playing.exchanges.values())


async def test_turns_wait_for_their_own_answer_and_their_reader() -> None:
    # Rows 0 - 2 - 3 and 1 - 4 are conversations.
    r = requests([0, 1, 0, 0, 0], after=[-1, -1, 0, 2, 1], think_ms=[0, 0, 15, 0, 30])
    async with upstream() as server, sender_to(server.url + server.on(says(*ANSWER))) as to:
        playing = await Playing(to, r).go()
        assert playing.outcomes() == [Outcome.COMPLETE] * 5
        for row, before, think_ms in ((2, 0, 15), (3, 2, 0), (4, 1, 30)):
            x, end_ns = playing.exchanges[row], playing.exchanges[before].timeline.response_end_ns
            assert x.scheduled_ns == end_ns + think_ms * MS, (
                "from the end of the answer, not from when we saw it"
            )
            assert x.timeline.arrival_ns >= x.scheduled_ns


@pytest.mark.parametrize("slots", [0, 2])
async def test_stopped_once_it_drains_and_twice_it_cuts(slots: int) -> None:
    held = Held()
    async with upstream() as server, sender_to(server.url + server.on(held)) as to:
        for cut in (False, True):
            held.go.clear()
            server.calls.clear()
            playing = Playing(to, requests([0, 0, 60_000]), slots=slots)
            going = asyncio.ensure_future(playing.go())
            await wait_until(lambda: len(server.calls) == 2)
            playing.run.stop("somebody stopped it")
            await asyncio.sleep(0.02)
            assert not going.done(), "answers may still come"
            if cut:
                playing.run.stop("somebody stopped it again", drain_ns=0)
            else:
                held.go.set()
            await going
            wanted = Outcome.CLIENT_CANCELLED if cut else Outcome.COMPLETE
            assert playing.outcomes() == [wanted] * 2
            assert (playing.run.stopped, playing.schedule.rows_left) == ("somebody stopped it", 1)


async def test_the_time_to_drain_begins_when_the_last_conversation_breaks_off() -> None:
    """Nothing is left to send from then on, though nothing was sent."""

    async def script(call: Call) -> str | None:
        if b"row-0" in await call.body():
            return CLOSE
        await call.left()
        return CLOSE

    async with upstream() as server, sender_to(server.url + server.on(script)) as to:
        r = requests([0, 0, 0], after=[-1, 0, -1], think_ms=[0, 0, 0])
        playing = await Playing(to, r, drain=Duration(50 * MS)).go()
        assert playing.outcomes() == [Outcome.UPSTREAM_RESET, Outcome.CLIENT_CANCELLED]


async def test_a_stop_ends_retries_too() -> None:
    async with upstream() as server:
        path = server.on(answers(b"{}", status=b"429 No", fields=b"Retry-After: 9\r\n"))
        async with sender_to(server.url + path, retries=5) as to:
            playing = Playing(to, requests([0, 0]))
            going = asyncio.ensure_future(playing.go())
            await wait_until(lambda: to.sender.calls and all(call.is_waiting for call in to.sender.calls))
            playing.run.stop("enough")
            await going
            assert playing.outcomes() == [Outcome.UPSTREAM_ERROR] * 2
            assert len(server.calls) == 2


async def test_the_next_request_does_not_wait_until_an_answer_is_understood() -> None:
    n = 6
    async with upstream() as server, sender_to(server.url + server.on(says(*ANSWER))) as to:
        later, put_off = to.sender.deferred, []
        add = later.add

        def never_time(work: Any, *, urgent: bool = False) -> None:
            if urgent:
                add(work, urgent=True)
            else:
                put_off.append(work)

        later.add = never_time  # type: ignore[method-assign]
        playing = Playing(to, requests([0] * n), slots=1)
        await playing.go()
        assert rows_of(server) == list(range(n)), "one after the other"
        assert not playing.rows, "and nobody has read what they were answered"
        for work in put_off:
            work()
        assert playing.outcomes() == [Outcome.COMPLETE] * n
        ends = [playing.exchanges[row].timeline.response_end_ns or 0 for row in range(n)]
        begins = [playing.exchanges[row].timeline.arrival_ns for row in range(n)]
        assert all(end <= begin for end, begin in zip(ends, begins[1:], strict=False)), "as they really were"

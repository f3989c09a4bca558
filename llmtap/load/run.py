"""Send the rows of one sending process on schedule, in an open or closed loop, and wait for their answers.

`LoadRun` takes row numbers with their times (`Schedule`), gives each body to a sender (`http.py`, or
`prompt_sender.py`) when it is due, and the sender calls it back when the answer has ended. It stops early
after too many errors (`--stop-when`). `workers/worker.py` runs it.

Open loop: a row is sent at its arrival time. A later turn of a conversation waits for the answer of the turn
before it and the think time, and is dropped if that turn failed. Closed loop: there is a fixed number of
slots, and each slot sends its next request when its previous one has ended.
"""

import asyncio
import heapq
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

from llmtap.clock import SystemClock
from llmtap.exchange.exchange import Exchange
from llmtap.exchange.outcome import Outcome
from llmtap.load.endpoint_check import FIRST, NO_ENDPOINT, is_unanswerable
from llmtap.load.http import Call, LoadSender
from llmtap.load.options import LoadPlan
from llmtap.load.prompt_sender import PromptCall, PromptSender
from llmtap.net.pacing import Pacer, Waker
from llmtap.units import NEVER, NS_PER_S
from llmtap.workload.requests import Requests

TIME_UP: Final = "the time was up"
"""Value of `load.stopped` if the maximum duration has passed."""

LATEST: Final = 100
"""Number of latest answers whose share of failures is compared with the limit of `--stop-when`."""


class Schedule:
    """Order and times of a sender's rows, as offsets in ns from the start of the run.

    Open loop (no `slots`): each row is sent at its arrival. Closed loop: `slots` rows at a time, in row
    order. A slot serves one conversation to its end, think times included. If several turns follow one turn,
    all of them are sent, and no new conversation starts until fewer than `slots` rows are in progress. A row
    that waits for several rows is sent after the last of them has ended, even if one of them failed.
    """

    def __init__(self, requests: Requests, rows: Sequence[int], slots: int | None = None) -> None:
        """`rows`: rows of this sender, ordered by arrival; conversations must be complete."""
        after = requests.after
        self._arrival_ns = requests.arrival_ns
        self._think_ns = requests.think_ns
        """Pause of each row after the previous turn of its conversation."""
        self._first_turns = deque(row for row in rows if not after or after[row] < 0)
        """Rows that wait for no other row, in order of their times."""
        self._free_slots = slots
        """None in an open loop; negative while more turns are in progress than slots exist."""
        self._followers: dict[int, list[int]] = {}
        """By row: the next turns of its conversation."""
        self._joiners: dict[int, list[int]] = {}
        """By row: the rows that wait for it but are not the next turn of its conversation."""
        self._awaited_ends: dict[int, tuple[int, int]] = {}
        """By row that waits for several rows: number of rows that have not ended, and latest end so far."""
        self._due_turns: list[tuple[int, int]] = []
        """Heap of send times and rows of later turns whose previous turn has ended."""
        self._rows_left = len(rows)
        """Number of rows that are not sent yet."""
        self.dropped = 0
        """Number of turns that were not sent because an earlier turn failed."""
        if after:
            ours = bytearray(len(requests))
            for row in rows:
                ours[row] = 1
                before = after[row]
                if before >= 0:
                    assert ours[before], "a turn must be of the same sender as the turn before it"
                    self._followers.setdefault(before, []).append(row)
                for other in requests.joins.get(row, ()):
                    self._joiners.setdefault(other, []).append(row)
                    self._awaited_ends[row] = len(requests.joins[row]) + 1, 0

    @property
    def next_due_ns(self) -> int:
        turn_ns = self._due_turns[0][0] if self._due_turns else NEVER
        if not self._first_turns or (self._free_slots is not None and self._free_slots <= 0):
            return turn_ns
        return min(turn_ns, self._arrival_ns[self._first_turns[0]] if self._free_slots is None else 0)

    @property
    def rows_left(self) -> int:
        return self._rows_left - self.dropped

    def take_due_row(self, now_ns: int) -> tuple[int, int | None] | None:
        """Take the next due row, if any, and return it with its scheduled time (None in a closed loop)."""
        due_ns = self.next_due_ns
        if due_ns > now_ns:
            return None
        self._rows_left -= 1
        heap = self._due_turns
        if heap and heap[0][0] <= (due_ns if self._free_slots is None else now_ns):
            due_ns, row = heapq.heappop(heap)
            return row, due_ns
        if self._free_slots is None:
            return self._first_turns.popleft(), due_ns
        self._free_slots -= 1
        return self._first_turns.popleft(), None

    def has_followers(self, row: int) -> bool:
        """Whether other rows depend on the result of this one."""
        return row in self._followers or row in self._joiners

    def on_ended(self, row: int, end_ns: int, *, served: bool) -> None:
        """Record the end of an answer. `served`: it was successful, so its conversation continues."""
        followers = self._followers.pop(row, [])
        if self._free_slots is not None:
            self._free_slots += 1 - (len(followers) if served else 0)
        ended = [row]
        for follower in followers if served else ():
            self._schedule_if_ready(follower, end_ns)
        while followers and not served:
            self.dropped += 1
            ended.append(followers.pop())
            followers += self._followers.pop(ended[-1], [])
        for joiner in (joiner for gone in ended for joiner in self._joiners.pop(gone, ())):
            self._schedule_if_ready(joiner, end_ns)

    def _schedule_if_ready(self, row: int, end_ns: int) -> None:
        """Schedule a row if all rows that it waits for have ended, one of them at `end_ns`."""
        left, latest_ns = self._awaited_ends.get(row, (1, end_ns))
        latest_ns = max(latest_ns, end_ns)
        if left > 1:
            self._awaited_ends[row] = left - 1, latest_ns
        else:
            heapq.heappush(self._due_turns, (latest_ns + self._think_ns[row], row))


TURN_NS_MAX: Final = 1_000_000
"""Longest time of sending without a break; then the loop reads its sockets."""
SPIN_NS: Final = 150_000
"""Time before the next row is due in which the sender spins instead of sleeping: even the shortest sleep
takes about as long, so it would lengthen shorter gaps between rows."""
_SERVED: Final = frozenset({Outcome.COMPLETE, Outcome.REFUSED})
"""Outcomes after which a conversation continues."""

mono_ns = SystemClock.mono_ns


class RowRequest(NamedTuple):
    """Request of a row. Its headers are added to those of the target."""

    body: bytes
    headers: Sequence[tuple[bytes, bytes]] = ()
    path: bytes = b""
    """Path on the target; empty: the target's own path."""


class LoadRun:
    """Sends the requests of one load on one event loop.

    Args:
        request: function that returns the request of a row.
        keep: function called with each exchange and its row.
        load: options of the load: its duration, time to drain, and the share of failures that stops it.
        start_ns: monotonic time of the schedule's time 0.
        check_endpoint: whether to stop if the first answers show that no request can be answered.
    """

    def __init__(
        self,
        sender: LoadSender | PromptSender,
        schedule: Schedule,
        request: Callable[[int], RowRequest],
        keep: Callable[[int, Exchange], None],
        load: LoadPlan,
        *,
        start_ns: int,
        check_endpoint: bool = False,
    ) -> None:
        self._sender = sender
        self._schedule = schedule
        self._read_request = request
        """Function that returns the request of a row."""
        self._keep_exchange = keep
        """Function that stores a row's finished exchange."""
        self.start_ns = start_ns
        duration_ns, drain_ns = load.schedule.duration, load.schedule.drain
        self._sending_end_ns = NEVER if duration_ns is None else start_ns + duration_ns
        """Time from which no request is sent."""
        self._drain_ns = NEVER if drain_ns is None else drain_ns
        """Time to wait for open requests after the last one was sent."""
        self._error_rate_max = load.sending.stop_when.error_rate
        """Share of failed requests above which the load ends; None: no limit."""
        self._latest_failures: deque[bool] = deque(maxlen=LATEST)
        """Whether each of the latest requests failed, for the limit on errors."""
        self._check_count = min(FIRST, schedule.rows_left) if check_endpoint else 0
        """Number of first requests that are checked: if all fail, the run stops. 0 after one succeeded."""
        self._check_results: dict[int, bool] = {}
        """For the row of each checked request: whether the answer shows that the endpoint is unusable."""
        self._pacer = Pacer(SystemClock(), pause_ns=0)
        """Makes requests punctual by waiting for the last microseconds in a loop."""
        self._waker = Waker(self._pacer, self._send_due_rows)
        """Calls `_send_due_rows` at the time of the next request."""
        self._end_future = sender.loop.create_future()
        """Done when all requests have ended."""
        self._drain_timer: asyncio.TimerHandle | None = None
        """Timer that cancels open requests at `_drain_end_ns`."""
        self._drain_end_ns = NEVER
        """Time at which open requests are cancelled."""
        self._freed_rows: set[int] = set()
        """Rows whose end was reported to the schedule before their answer was parsed."""
        self.give_up_reason: str | None = None
        """Reason to stop the whole load because of failed requests; None if there is none."""
        self.stopped: str | None = None
        """Reason why not all rows were sent or answered; None if all were."""

    async def send_all(self) -> None:
        """Send all rows on schedule; return when every request has ended, or when the run was stopped."""
        self._waker.call_at(self._next_due_ns())
        self._sender.deferred.pacer = self._pacer
        ending: asyncio.TimerHandle | None = None
        if self._sending_end_ns != NEVER:
            delay_s = max(0, self._sending_end_ns - mono_ns()) / NS_PER_S
            ending = self._sender.loop.call_later(delay_s, self.stop, TIME_UP)
        self._check_end()
        try:
            await self._end_future
            self._sender.deferred.finish()
        finally:
            self._sender.deferred.pacer = None
            self._pacer.close()
            for timer in (ending, self._drain_timer):
                if timer is not None:
                    timer.cancel()

    def stop(self, reason: str, *, drain_ns: int | None = None) -> None:
        """Send no more requests; wait up to `drain_ns`, which a second call can shorten, for the answers."""
        if self.stopped is None and self._schedule.rows_left:
            self.stopped = reason
        self._sending_end_ns = min(self._sending_end_ns, mono_ns())
        self._sender.stop_retrying()
        self._start_drain(self._drain_ns if drain_ns is None else drain_ns, reason)
        self._check_end()

    def _next_due_ns(self) -> int:
        due_ns = self._schedule.next_due_ns
        return NEVER if due_ns == NEVER else self.start_ns + due_ns

    def _send_due_rows(self, now_ns: int) -> int:
        """Send the rows that are due. Return the time at which the pacer must call this again."""
        schedule, sender, start_ns = self._schedule, self._sender, self.start_ns
        end_ns = now_ns + TURN_NS_MAX
        while now_ns <= end_ns:
            if now_ns >= self._sending_end_ns:
                return NEVER
            item = schedule.take_due_row(now_ns - start_ns)
            if item is None:
                if self._next_due_ns() - now_ns > SPIN_NS:
                    break
                now_ns = mono_ns()
                continue
            row, due_ns = item
            if len(self._check_results) < self._check_count:
                self._check_results[row] = False
            request = self._read_request(row)
            sender.send(
                request.body,
                self._on_done,
                row=row,
                scheduled_ns=None if due_ns is None else start_ns + due_ns,
                headers=request.headers,
                path=request.path,
                on_answer=self._on_answered,
            )
            now_ns = mono_ns()
        self._check_end()
        return self._next_due_ns()

    def _on_answered(self, call: Call | PromptCall, end_ns: int) -> None:
        """Free the slot of a request that no other row depends on as soon as its answer has arrived."""
        row = call.row
        if not self._schedule.has_followers(row):
            self._freed_rows.add(row)
            self._schedule.on_ended(row, end_ns - self.start_ns, served=True)
            self._waker.call_at(self._next_due_ns())
            self._check_end()

    def _on_done(self, call: Call | PromptCall, x: Exchange) -> None:
        """Keep an exchange, make the rows that waited for it due, and check the end of the run."""
        if call.row in self._freed_rows:
            self._freed_rows.remove(call.row)
        else:
            now_ns = mono_ns()
            # Count think time from the end of the answer, not from now: the answer is possibly parsed later.
            end_ns = min(now_ns, x.timeline.response_end_ns or now_ns)
            self._schedule.on_ended(call.row, end_ns - self.start_ns, served=x.outcome in _SERVED)
        self._keep_exchange(call.row, x)
        if self._check_count and call.row in self._check_results:
            self._check_endpoint(call.row, x)
        if self._end_future.done():
            return
        if self._error_rate_max is not None and x.outcome is not Outcome.CLIENT_CANCELLED:
            self._latest_failures.append(x.outcome not in _SERVED)
            failed = sum(self._latest_failures)
            full = len(self._latest_failures) == LATEST
            if full and failed > self._error_rate_max * LATEST and self.give_up_reason is None:
                self.give_up_reason = f"{failed} of the latest {LATEST} answers failed"
                self.stop(self.give_up_reason)
        self._waker.call_at(self._next_due_ns())
        self._check_end()

    def _check_endpoint(self, row: int, x: Exchange) -> None:
        """Stop if the first answers show that the target lacks the endpoint."""
        if not is_unanswerable(x):
            self._check_count = 0
            return
        self._check_results[row] = True
        if sum(self._check_results.values()) == self._check_count:
            # Set the reason even if nothing is left to send: the load must end with an error, not a report.
            self.give_up_reason = self.stopped = NO_ENDPOINT
            self.stop(NO_ENDPOINT, drain_ns=0)

    def _start_drain(self, drain_ns: int, reason: str) -> None:
        """Set the time at which open requests are cancelled."""
        if drain_ns == NEVER:
            return
        end_ns = mono_ns() + drain_ns
        if end_ns >= self._drain_end_ns:
            return
        self._drain_end_ns = end_ns
        if self._drain_timer is not None:
            self._drain_timer.cancel()
        self._drain_timer = self._sender.loop.call_later(drain_ns / NS_PER_S, self._cancel_requests, reason)

    def _cancel_requests(self, reason: str) -> None:
        if self._sender.calls and self.stopped is None:
            self.stopped = reason
        calls: list[Call | PromptCall] = [*self._sender.calls]
        for call in calls:
            call.cancel("the run ended before the answer")
        self._check_end()

    def _check_end(self) -> None:
        """End the run if no request is to be sent or in flight."""
        if self._end_future.done():
            return
        if self._schedule.rows_left and mono_ns() < self._sending_end_ns:
            return
        if not self._sender.calls:
            self._end_future.set_result(None)
        elif not self._schedule.rows_left:
            self._start_drain(self._drain_ns, "the time to drain was up")

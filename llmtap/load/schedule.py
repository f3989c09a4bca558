"""Which request is due when. Pure: offsets in, rows out; the clock is somebody else's.

Open loop: a row is due at its arrival, whatever became of the others, so a server that stalls changes no send
time. Only a conversation's later turns wait, for the end of the answer before them and then for as long as
their reader thinks; a turn whose predecessor failed is never asked, and counted as dropped, with all that
follow it. Closed loop: so many slots, each sending its next request as soon as its last one has ended.
"""

import heapq
from collections import deque
from collections.abc import Sequence
from typing import Protocol

from llmtap.units import NEVER
from llmtap.workload.requests import Requests

__all__ = ["ClosedSchedule", "OpenSchedule", "Schedule"]


class Schedule(Protocol):
    """What `load/run.py` asks. All times are offsets in ns from the run's start."""

    @property
    def next_ns(self) -> int:
        """When something is due next; `NEVER` while nothing is."""
        ...

    @property
    def left(self) -> int:
        """Rows that were neither taken nor dropped."""
        ...

    @property
    def dropped(self) -> int:
        """Rows that will not be asked: turns behind one that failed."""
        ...

    def take(self, now_ns: int) -> tuple[int, int | None] | None:
        """A row that is due, and when it was to be sent (None: nobody planned that). None: none is due."""
        ...

    def followed(self, row: int) -> bool:
        """What comes of it decides whether others are sent."""
        ...

    def ended(self, row: int, end_ns: int, *, served: bool) -> None:
        """The answer to a row was over at `end_ns`; `served`: its conversation goes on."""
        ...


class _Turns:
    """Later turns of conversations: by the row before, and those that are due at a known time."""

    def __init__(self, requests: Requests, rows: Sequence[int]) -> None:
        self._think_ns = requests.think_ns
        self._followers: dict[int, list[int]] = {}
        self.heap: list[tuple[int, int]] = []
        self.dropped = 0
        if requests.after:
            ours = bytearray(len(requests))
            for row in rows:
                ours[row] = 1
                before = requests.after[row]
                if before >= 0:
                    assert ours[before], "a turn is of the same sender as the one before it"
                    self._followers.setdefault(before, []).append(row)

    def followed(self, row: int) -> bool:
        return row in self._followers

    def ended(self, row: int, end_ns: int, *, served: bool) -> int:
        """How many follow."""
        followers = self._followers.pop(row, [])
        if served:
            for follower in followers:
                heapq.heappush(self.heap, (end_ns + self._think_ns[follower], follower))
            return len(followers)
        while followers:
            self.dropped += 1
            followers += self._followers.pop(followers.pop(), [])
        return 0


class OpenSchedule:
    """Rows at their arrivals. `rows` are this sender's, by arrival, conversations whole."""

    def __init__(self, requests: Requests, rows: Sequence[int]) -> None:
        self._arrival_ns = requests.arrival_ns
        after = requests.after
        self._firsts = deque(row for row in rows if not after or after[row] < 0)
        self._turns = _Turns(requests, rows)
        self._left = len(rows)

    @property
    def next_ns(self) -> int:
        first_ns = self._arrival_ns[self._firsts[0]] if self._firsts else NEVER
        heap = self._turns.heap
        return min(first_ns, heap[0][0]) if heap else first_ns

    @property
    def left(self) -> int:
        return self._left - self.dropped

    @property
    def dropped(self) -> int:
        return self._turns.dropped

    def take(self, now_ns: int) -> tuple[int, int | None] | None:
        due_ns = self.next_ns
        if due_ns > now_ns:
            return None
        self._left -= 1
        heap = self._turns.heap
        if heap and heap[0][0] == due_ns:
            return heapq.heappop(heap)[1], due_ns
        return self._firsts.popleft(), due_ns

    def followed(self, row: int) -> bool:
        return self._turns.followed(row)

    def ended(self, row: int, end_ns: int, *, served: bool) -> None:
        self._turns.ended(row, end_ns, served=served)


class ClosedSchedule:
    """`slots` at a time, in the order of the rows. A slot has one conversation until that is over, thinking
    included; a later turn's time to be sent is known, a first one's is not. Where several turns follow one,
    all are sent, and no conversation begins until there are fewer of them than slots."""

    def __init__(self, requests: Requests, rows: Sequence[int], slots: int) -> None:
        after = requests.after
        self._firsts = deque(row for row in rows if not after or after[row] < 0)
        self._turns = _Turns(requests, rows)
        self._left = len(rows)
        self._free = slots  # less than none while more turns follow than there are slots

    @property
    def next_ns(self) -> int:
        if self._free > 0 and self._firsts:
            return 0
        heap = self._turns.heap
        return heap[0][0] if heap else NEVER

    @property
    def left(self) -> int:
        return self._left - self.dropped

    @property
    def dropped(self) -> int:
        return self._turns.dropped

    def take(self, now_ns: int) -> tuple[int, int | None] | None:
        heap = self._turns.heap
        if heap and heap[0][0] <= now_ns:
            self._left -= 1
            due_ns, row = heapq.heappop(heap)
            return row, due_ns
        if self._free > 0 and self._firsts:
            self._left -= 1
            self._free -= 1
            return self._firsts.popleft(), None
        return None

    def followed(self, row: int) -> bool:
        return self._turns.followed(row)

    def ended(self, row: int, end_ns: int, *, served: bool) -> None:
        self._free += 1 - self._turns.ended(row, end_ns, served=served)

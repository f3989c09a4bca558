"""Durations of tasks and latencies by turn, of a load with conversations.

`TaskTimes` is fed with each exchange of a replay (by `result.py`) and returns public JSON. A task is a
conversation: each of its requests waits for the answer before it. Its duration is from its first submit to
its last end, if all its requests ended well.

Source: IETF draft 4.1.3 (compound systems are measured end to end).
"""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from llmtap.exchange.exchange import Exchange
from llmtap.metrics.histogram import Histogram
from llmtap.metrics.latency import e2e_ns, ttft_ns
from llmtap.metrics.statistics import summarise_ns
from llmtap.metrics.summary import ENDED_WELL

TURNS_MAX: Final = 20
"""Rows of a table; the last one has all later turns."""


@dataclass(slots=True)
class _Task:
    requests: int = 0
    ended_well: int = 0
    submit_ns: int = 1 << 62
    end_ns: int = 0


@dataclass(slots=True)
class _Turn:
    ttft: Histogram = field(default_factory=Histogram)
    e2e: Histogram = field(default_factory=Histogram)


class TaskTimes:
    def __init__(self, after: Sequence[int]) -> None:
        """`after`: preceding row of each row, always a smaller one; -1 for the first of a task."""
        self._first, self._number = array("q"), array("q")
        self._tasks: dict[int, _Task] = {}
        self._turns: list[_Turn] = []
        for row, before in enumerate(after):
            self._first.append(row if before < 0 else self._first[before])
            self._number.append(0 if before < 0 else self._number[before] + 1)
            self._tasks.setdefault(self._first[row], _Task()).requests += 1

    def add(self, row: int, x: Exchange) -> None:
        t, task = x.timeline, self._tasks[self._first[row]]
        number = min(self._number[row], TURNS_MAX - 1)
        self._turns += [_Turn() for _ in range(number + 1 - len(self._turns))]
        first_ns, whole_ns = ttft_ns(t), e2e_ns(t)
        if first_ns is not None and x.stream:
            self._turns[number].ttft.record(first_ns)
        if whole_ns is not None and x.outcome in ENDED_WELL:
            assert t.submit_ns is not None and t.response_end_ns is not None
            self._turns[number].e2e.record(whole_ns)
            task.ended_well += 1
            task.submit_ns = min(task.submit_ns, t.submit_ns)
            task.end_ns = max(task.end_ns, t.response_end_ns)

    def to_dict(self) -> dict[str, object]:
        """Return public JSON; durations in seconds. `turn` counts from 0, as in a capture."""
        duration = Histogram()
        for task in self._tasks.values():
            if task.ended_well == task.requests:
                duration.record(task.end_ns - task.submit_ns)
        turns = [
            {
                "turn": number,
                "and_later": number == TURNS_MAX - 1,
                "ttft": summarise_ns(turn.ttft),
                "e2e": summarise_ns(turn.e2e),
            }
            for number, turn in enumerate(self._turns)
        ]
        return {"n": len(self._tasks), "duration": summarise_ns(duration), "turns": turns}

"""Which row of a trace follows which: conversations, and the time that people took between turns.

- A row follows the one that it names as its parent. Where that one is not in the trace, or none is named, it
  follows the row of its session with the nearest smaller turn, of several the latest; a row whose turn nobody
  told follows its session's latest. Who follows comes later: rows are taken in the order of their arrivals.
- A turn 0, and a turn before which the session has nothing, begins a conversation.
- Think time is what the trace says (`think_us`), if that is from the same answer on. Else it is from the end
  of that answer to this arrival, and 0 for who did not wait for it. Where nobody knows when the answer ended,
  it is the whole distance between the two arrivals: longer than it was, by as long as the answer took.
- A row that has no arrival time, in a session that has one (AIPerf writes only a delay), arrives as long
  after the row before it in its session as that one's answer and its own think time take.

An answer ends where the client had it: `delivered_us`, else `response_end_us`, else `last_token_us`.
"""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

import pyarrow as pa

__all__ = ["COLUMNS", "Links", "TraceTurns"]

COLUMNS: Final = (
    "capture", "session", "turn", "id", "parent", "think_us", "delivered_us", "response_end_us",
    "last_token_us",
)  # fmt: skip
_Name = tuple[str | None, str]
"""Capture and session, or capture and id: neither means anything in another capture."""


def _column() -> "array[int]":
    return array("q")


@dataclass(slots=True)
class Links:
    """Columns of `Requests`, and a number for each row's session."""

    after: "array[int]" = field(default_factory=_column)
    think_ns: "array[int]" = field(default_factory=_column)
    session: "array[int]" = field(default_factory=_column)


@dataclass(slots=True)
class _Session:
    """What was seen of one so far."""

    number: int
    places: dict[int, int] = field(default_factory=dict)
    """By turn, where its latest row stands."""
    last: int = -1
    """The highest turn."""

    def before(self, turn: int) -> int:
        """The place of the nearest smaller turn; -1 where there is none."""
        if turn - 1 in self.places:
            return self.places[turn - 1]
        return self.places[max(smaller)] if (smaller := [t for t in self.places if t < turn]) else -1


class TraceTurns:
    """Takes COLUMNS off the batches of a trace, row by row; then links the rows."""

    def __init__(self) -> None:
        self._session: list[_Name | None] = []
        self._turn: list[int | None] = []
        self._id: list[_Name | None] = []
        self._parent: list[_Name | None] = []
        self._think_us: list[int | None] = []
        self._end_us: list[int | None] = []
        self._last: dict[_Name, tuple[int, int]] = {}
        """Of each session, arrival of the row read last, and its answer's end, in ns."""
        self._undated = 0
        self._orphans = self._overlapping = self._unended = 0

    def take(self, batch: pa.RecordBatch) -> None:
        """The next rows."""
        rows = [batch.column(name).to_pylist() for name in COLUMNS]
        for capture, session, turn, id_, parent, think_us, *ends in zip(*rows, strict=True):
            self._session.append(None if session is None else (capture, session))
            self._turn.append(turn)
            self._id.append(None if id_ is None else (capture, id_))
            self._parent.append(None if parent is None else (capture, parent))
            self._think_us.append(think_us)
            self._end_us.append(_end_us(ends))

    def arrivals_ns(self, batch: pa.RecordBatch) -> pa.Array:
        """The arrivals of a batch, which have to be asked for in order; None for whom nobody can date."""
        names = ("arrival_ns", "capture", "session", "think_us", *COLUMNS[-3:])
        found = []
        for arrival_ns, capture, session, think_us, *ends in zip(
            *(batch.column(name).to_pylist() for name in names), strict=True
        ):
            if session is not None:
                before = self._last.get((capture, session))
                if arrival_ns is None and before is not None:
                    arrival_ns = before[1] + (think_us or 0) * 1_000
                    self._undated += 1
                if arrival_ns is not None:
                    ended_ns = arrival_ns + (_end_us(ends) or 0) * 1_000
                    self._last[capture, session] = arrival_ns, ended_ns
            found.append(arrival_ns)
        return pa.array(found, pa.int64())

    def linked(self, order: Sequence[int], arrivals_ns: Sequence[int]) -> Links:
        """Of the rows in this order, which is that of their arrivals; `arrivals_ns` is in it already."""
        links = Links()
        by_id: dict[_Name, int] = {}
        sessions: dict[_Name, _Session] = {}
        numbers = 0
        for place, row in enumerate(order):
            name, parent, turn = self._session[row], self._parent[row], self._turn[row]
            session = None if name is None else sessions.get(name)
            if name is not None and session is None:
                session = sessions[name] = _Session(numbers)
                numbers += 1
            told = True
            found = -1 if parent is None else by_id.get(parent, -1)
            if session is not None:
                number = session.last + 1 if turn is None else turn
                if found < 0:
                    found = session.before(number)
                    told = parent is None and (turn is None or session.places.get(turn - 1) == found)
                session.places[number] = place
                session.last = max(session.last, number)
            self._orphans += found < 0 and (parent is not None or bool(turn))
            links.after.append(found)
            distance_ns = arrivals_ns[place] - arrivals_ns[found]
            links.think_ns.append(0 if found < 0 else self._think_ns(row, order[found], told, distance_ns))
            if found >= 0:
                links.session.append(links.session[found])
            elif session is not None:
                links.session.append(session.number)
            else:
                links.session.append(numbers)
                numbers += 1
            if (id_ := self._id[row]) is not None:
                by_id[id_] = place
        return links

    def notes(self) -> list[str]:
        told = (
            (self._undated, "rows have no arrival time: taken for when their conversation would go on"),
            (self._orphans, "turns go on from one that the trace does not have: each begins a conversation"),
            (self._overlapping, "turns did not wait for the answer before: think time 0"),
            (
                self._unended,
                "turns follow an answer whose end nobody knows: think time is from arrival to arrival",
            ),
        )
        return [f"{n:,} {what}" for n, what in told if n]

    def _think_ns(self, row: int, before: int, told: bool, distance_ns: int) -> int:
        """`told`: what the row says of its think time is of the answer that it is to follow."""
        think_us, end_us = self._think_us[row], self._end_us[before]
        if think_us is not None and (told or end_us is None):
            return think_us * 1_000
        if end_us is None:
            self._unended += distance_ns > 0
            return distance_ns
        self._overlapping += distance_ns < end_us * 1_000
        return max(0, distance_ns - end_us * 1_000)


def _end_us(ends: Sequence[int | None]) -> int | None:
    return next((us for us in ends if us is not None), None)

"""Pair exchanges while they end, by the rules of `matching.py`.

`LiveMatcher` gets each exchange at its end, and decides when nothing that is still under way can change the
result: an exchange of the back as soon as all exchanges of the front that may own it have ended, one of the
front as soon as all exchanges of the back that may belong to it are decided. So live traffic and a capture of
it give the same pairs. What waits is bounded: beyond the bound, the oldest is left out and counted.
"""

from bisect import bisect_left
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final, NamedTuple

from llmtap.exchange.bounds import memory_bytes
from llmtap.exchange.exchange import Exchange, RequestShape
from llmtap.pairing.matching import KEYS, Evidence, Finder, Key, Match, Pair, end_ns, keys_of, shape_key

SLACK_NS: Final = 1_000_000_000
"""Largest uncertainty of an exchange that is paired, and time by which all relays must have reported beyond
its end."""
WAITING_BYTES_MAX: Final = 128 << 20
"""Memory of all exchanges that wait for their partners."""


class Leftover(StrEnum):
    """Reason why an exchange is in no pair."""

    UNPAIRED = "unpaired"
    """It has no partner."""
    AMBIGUOUS = "ambiguous"
    """Several exchanges of the front may own it, or it is one of these."""
    LEFT_OUT = "left_out"
    """Too many exchanges waited for their partners, or its times are uncertain by more than a second, or the
    search for its partner failed."""


class Unpaired(NamedTuple):
    exchange: Exchange
    reason: Leftover
    error: Exception | None = None
    """Exception of a failed search."""


class OpenExchange(NamedTuple):
    """An exchange under way, with the keys that are known so far."""

    arrival_ns: int
    keys: frozenset[Key]
    complete: bool
    """The whole request is known, and so the key of its prompt."""


def open_exchange(x: Exchange, shape: RequestShape | None) -> OpenExchange:
    """Return an exchange under way; `shape`: that of its request, if the whole request is known."""
    keys: list[Key] = [(kind, key) for kind, keys in KEYS[:2] for key in keys(x)]
    if (prompt := shape_key(shape)) is not None:
        keys.append((Evidence.PROMPT, prompt))
    return OpenExchange(x.timeline.arrival_ns, frozenset(keys), shape is not None)


@dataclass(slots=True, eq=False)
class _Front:
    exchange: Exchange
    keys: frozenset[Key]
    size: int
    matches: list[Match] = field(default_factory=list)
    ambiguous: bool = False
    """An ambiguous exchange of the back may belong to it."""


@dataclass(slots=True, eq=False)
class _Back:
    exchange: Exchange
    keys: frozenset[Key]
    size: int


class _Open:
    """Exchanges of the front that are under way, by key."""

    def __init__(self, fronts: Iterable[OpenExchange]) -> None:
        self._first_ns: int | None = None
        self._first_incomplete_ns: int | None = None
        self._first_by_key: dict[Key, int] = {}
        for front in fronts:
            at_ns = front.arrival_ns
            self._first_ns = _earlier(self._first_ns, at_ns)
            if not front.complete:
                self._first_incomplete_ns = _earlier(self._first_incomplete_ns, at_ns)
            for key in front.keys:
                self._first_by_key[key] = _earlier(self._first_by_key.get(key), at_ns)

    def may_own(self, keys: Iterable[Key], kind: Evidence, began_ns: int) -> bool:
        """Return whether one of them may own an exchange of the back with these keys of a kind that began at
        this time."""
        first = [self._first_by_key.get(key) for key in keys]
        if kind is Evidence.TEXT:
            first.append(self._first_ns)
        elif kind is Evidence.PROMPT:
            first.append(self._first_incomplete_ns)
        return any(at_ns is not None and at_ns <= began_ns + SLACK_NS for at_ns in first)


def _earlier(a: int | None, b: int) -> int:
    return b if a is None else min(a, b)


class LiveMatcher:
    """Exchanges of both sides that have ended and wait for their partners. All have one clock.

    Args:
        exchanges_max: maximum number that wait.
    """

    def __init__(self, exchanges_max: int, bytes_max: int = WAITING_BYTES_MAX) -> None:
        self._exchanges_max = exchanges_max
        self._bytes_max = bytes_max
        self._bytes = 0
        self._waiting = 0
        self._fronts: dict[int, _Front] = {}
        self._finder = Finder()
        self._backs: dict[int, _Back] = {}
        self._left_out: deque[Unpaired] = deque()

    def __len__(self) -> int:
        return self._waiting

    def add_front(self, x: Exchange) -> None:
        front = _Front(x, keys_of(x), memory_bytes(x))
        if self._takes(x, front.size):
            self._fronts[id(x)] = front
            self._finder.add(x, front.keys)

    def add_back(self, x: Exchange) -> None:
        back = _Back(x, keys_of(x), memory_bytes(x))
        if self._takes(x, back.size):
            self._backs[id(x)] = back

    def left_out(self) -> Iterator[Unpaired]:
        """Yield what was left out since the last call."""
        while self._left_out:
            yield self._left_out.popleft()

    def advance(
        self, known_ns: int, open_fronts: Iterable[OpenExchange], open_backs: Sequence[OpenExchange]
    ) -> Iterator[Pair | Unpaired | None]:
        """Yield what can be decided now: each exchange that was added is once in a pair or unpaired.

        Yields None after each step without a result: the caller may add exchanges between two steps.

        Args:
            known_ns: time up to which all events of both sides are known.
            open_fronts, open_backs: exchanges that began and have not been added.
        """
        yield from self.left_out()
        before_ns = known_ns - SLACK_NS
        open_now = _Open(open_fronts)
        yield from self._decide_backs(before_ns, open_now)
        undecided: dict[Key | None, list[int]] = {}
        """By key: arrivals of exchanges of the back that may belong to one of the front with it, in ns. None:
        to any of them."""
        backs = [
            OpenExchange(b.exchange.timeline.arrival_ns, b.keys, True) for b in list(self._backs.values())
        ]
        for back in (*open_backs, *backs):
            for key in self._owners(back, open_now):
                undecided.setdefault(key, []).append(back.arrival_ns)
            yield None
        for arrivals_ns in undecided.values():
            arrivals_ns.sort()
        for front in list(self._fronts.values()):
            if (
                self._fronts.get(id(front.exchange)) is front
                and end_ns(front.exchange) <= before_ns
                and not any(
                    _is_met(front.exchange, undecided[key]) for key in (*front.keys, None) if key in undecided
                )
            ):
                yield self._finish(front)
            else:
                yield None

    def close(self) -> Iterator[Pair | Unpaired | None]:
        """Decide everything: no exchange is under way, and none will be added."""
        ended = [front.exchange for front in self._fronts.values()]
        ended += [back.exchange for back in self._backs.values()]
        last_ns = max(map(end_ns, ended), default=0)
        return self.advance(last_ns + SLACK_NS, (), ())

    def _takes(self, x: Exchange, size: int) -> bool:
        """Make room for an exchange; return False, and leave it out, if its times are too uncertain."""
        if x.uncertainty_ns > SLACK_NS:
            self._left_out.append(Unpaired(x, Leftover.LEFT_OUT))
            return False
        while (self._fronts or self._backs) and (
            self._waiting >= self._exchanges_max or self._bytes + size > self._bytes_max
        ):
            self._leave_out_oldest()
        self._bytes += size
        self._waiting += 1
        return True

    def _leave_out_oldest(self) -> None:
        front, back = next(iter(self._fronts.values()), None), next(iter(self._backs.values()), None)
        if back is not None and (front is None or end_ns(back.exchange) <= end_ns(front.exchange)):
            self._remove_back(back)
            self._waiting -= 1
            self._left_out.append(Unpaired(back.exchange, Leftover.LEFT_OUT))
        elif front is not None:
            self._remove_front(front)
            left = (front.exchange, *(match.back for match in front.matches))
            self._left_out += [Unpaired(x, Leftover.LEFT_OUT) for x in left]

    def _decide_backs(self, before_ns: int, open_now: _Open) -> Iterator[Unpaired | None]:
        for back in sorted(self._backs.values(), key=lambda one: one.exchange.timeline.arrival_ns):
            x = back.exchange
            if x.timeline.arrival_ns <= before_ns and self._backs.get(id(x)) is back:
                yield self._decide(back, open_now)
            else:
                yield None

    def _decide(self, back: _Back, open_now: _Open) -> Unpaired | None:
        """Find the owner of an exchange of the back, unless an exchange of the front under way may change
        the result."""
        x = back.exchange
        try:
            result = self._finder.find(
                x, lambda kind, keys: open_now.may_own(keys, kind, x.timeline.arrival_ns)
            )
        except Exception as error:  # it affects this exchange only
            self._remove_back(back)
            self._waiting -= 1
            return Unpaired(x, Leftover.LEFT_OUT, error)
        if result is None:
            return None
        self._remove_back(back)
        candidates, evidence = result
        fronts = [self._fronts[id(front)] for front in candidates]
        if evidence:
            fronts[0].matches.append(Match(x, evidence))
            self._bytes += back.size
            fronts[0].size += back.size
            return None
        self._waiting -= 1
        for front in fronts:
            front.ambiguous = True
        return Unpaired(x, Leftover.AMBIGUOUS if candidates else Leftover.UNPAIRED)

    def _owners(self, back: OpenExchange, open_now: _Open) -> list[Key] | tuple[None]:
        """Return the keys of the exchanges of the front to which an undecided one may belong; (None,) if any
        may own it."""
        for kind, _ in KEYS[:-1]:
            keys = [key for key in back.keys if key[0] is kind]
            if any(self._finder.any_at(key, back.arrival_ns, SLACK_NS) for key in keys) or (
                keys and open_now.may_own(keys, kind, back.arrival_ns)
            ):
                return keys
        return (None,)

    def _finish(self, front: _Front) -> Pair | Unpaired:
        self._remove_front(front)
        if front.matches:
            front.matches.sort(key=lambda match: match.back.timeline.arrival_ns)
            return Pair(front.exchange, front.matches)
        return Unpaired(front.exchange, Leftover.AMBIGUOUS if front.ambiguous else Leftover.UNPAIRED)

    def _remove_front(self, front: _Front) -> None:
        del self._fronts[id(front.exchange)]
        self._bytes -= front.size
        self._waiting -= 1 + len(front.matches)
        self._finder.remove(front.exchange, front.keys)

    def _remove_back(self, back: _Back) -> None:
        del self._backs[id(back.exchange)]
        self._bytes -= back.size


def _is_met(front: Exchange, arrivals_ns: Sequence[int]) -> bool:
    """Return whether one of these arrivals, in ascending order, may be during this exchange of the front."""
    place = bisect_left(arrivals_ns, front.timeline.arrival_ns - SLACK_NS)
    return place < len(arrivals_ns) and arrivals_ns[place] <= end_ns(front) + SLACK_NS

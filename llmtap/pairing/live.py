"""Pair the exchanges of live traffic, by the rules of `matching.py`.

`LiveMatcher` gets each exchange at its end. It decides about an exchange when no exchange under way can
change the result: about an exchange of the back after all exchanges of the front that can own it have ended,
and about an exchange of the front after all exchanges of the back that can belong to it are decided. So live
traffic and a capture of this traffic give the same pairs. The number and the memory of waiting exchanges are
bounded: above the bound, the oldest exchange is left out and counted.
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
"""Largest uncertainty of the times of an exchange that is paired. An exchange is decided only after all
relays have reported their events up to this time after its end."""
WAITING_BYTES_MAX: Final = 128 << 20
"""Memory of all exchanges that wait for their partners."""


class Leftover(StrEnum):
    """Reason why an exchange is in no pair."""

    UNPAIRED = "unpaired"
    """The exchange has no partner."""
    AMBIGUOUS = "ambiguous"
    """Several exchanges of the front can own the exchange, or the exchange is one of these several."""
    LEFT_OUT = "left_out"
    """Too many exchanges waited for their partners, or the times of the exchange are uncertain by more than a
    second, or the search for its partner failed."""


class Unpaired(NamedTuple):
    """An exchange that is in no pair."""

    exchange: Exchange
    reason: Leftover
    error: Exception | None = None
    """Exception of a failed search."""


class OpenExchange(NamedTuple):
    """An exchange under way, with the keys that are known so far."""

    arrival_ns: int
    keys: frozenset[Key]
    """Hashes and ids by which an exchange of the other side can fit."""
    complete: bool
    """Whether the whole request, and with it the key of the prompt, is known."""


def open_exchange(x: Exchange, shape: RequestShape | None) -> OpenExchange:
    """Return the known keys of an exchange under way. `shape`: None while its request is incomplete."""
    keys: list[Key] = [(kind, key) for kind, keys in KEYS[:2] for key in keys(x)]
    if (prompt := shape_key(shape)) is not None:
        keys.append((Evidence.PROMPT, prompt))
    return OpenExchange(x.timeline.arrival_ns, frozenset(keys), shape is not None)


@dataclass(slots=True, eq=False)
class _Front:
    """An ended exchange of the front that waits for its partners."""

    exchange: Exchange
    keys: frozenset[Key]
    memory_bytes: int
    """Memory of the exchange and of its matches."""
    matches: list[Match] = field(default_factory=list)
    """Exchanges of the back that belong to this one."""
    is_candidate: bool = False
    """Whether an ambiguous exchange of the back can belong to this exchange."""


@dataclass(slots=True, eq=False)
class _Back:
    """An ended exchange of the back that waits for its partner."""

    exchange: Exchange
    keys: frozenset[Key]
    """Hashes and ids by which an exchange of the front can fit."""
    memory_bytes: int


class _OpenFronts:
    """Earliest arrivals of exchanges of the front that are under way, by key."""

    def __init__(self, fronts: Iterable[OpenExchange]) -> None:
        self._first_ns: int | None = None
        """Earliest arrival of all."""
        self._first_incomplete_ns: int | None = None
        """Earliest arrival of a request that is not complete, so has no prompt hash."""
        self._first_by_key: dict[Key, int] = {}
        """By key: earliest arrival."""
        for front in fronts:
            arrival_ns = front.arrival_ns
            self._first_ns = _earlier_ns(self._first_ns, arrival_ns)
            if not front.complete:
                self._first_incomplete_ns = _earlier_ns(self._first_incomplete_ns, arrival_ns)
            for key in front.keys:
                self._first_by_key[key] = _earlier_ns(self._first_by_key.get(key), arrival_ns)

    def can_own(self, keys: Iterable[Key], kind: Evidence, began_ns: int) -> bool:
        """Return whether an open front can own an exchange of the back that has these keys of one kind and
        began at `began_ns`. A key of a front that is not known yet counts as equal."""
        arrivals_ns = [self._first_by_key.get(key) for key in keys]
        if kind is Evidence.TEXT:
            arrivals_ns.append(self._first_ns)
        elif kind is Evidence.PROMPT:
            arrivals_ns.append(self._first_incomplete_ns)
        return any(one is not None and one <= began_ns + SLACK_NS for one in arrivals_ns)


def _earlier_ns(a: int | None, b: int) -> int:
    return b if a is None else min(a, b)


class LiveMatcher:
    """Holds ended exchanges of both sides, with times of one clock, until their partners are found.

    Args:
        exchanges_max: maximum number of waiting exchanges.
        bytes_max: maximum memory of waiting exchanges.
    """

    def __init__(self, exchanges_max: int, bytes_max: int = WAITING_BYTES_MAX) -> None:
        self._exchanges_max = exchanges_max
        self._bytes_max = bytes_max
        self._waiting_bytes = 0
        """Memory of the exchanges that wait, for a limit."""
        self._waiting_exchanges = 0
        self._fronts: dict[int, _Front] = {}
        self._finder = Finder()
        self._backs: dict[int, _Back] = {}
        """By identity of an exchange of the back: data of it."""
        self._left_out: deque[Unpaired] = deque()
        """Exchanges without a pair, because too many waited."""

    def __len__(self) -> int:
        return self._waiting_exchanges

    def add_front(self, x: Exchange) -> None:
        front = _Front(x, keys_of(x), memory_bytes(x))
        if self._accept(x, front.memory_bytes):
            self._fronts[id(x)] = front
            self._finder.add(x, front.keys)

    def add_back(self, x: Exchange) -> None:
        back = _Back(x, keys_of(x), memory_bytes(x))
        if self._accept(x, back.memory_bytes):
            self._backs[id(x)] = back

    def take_left_out(self) -> Iterator[Unpaired]:
        """Yield the exchanges that were left out since the previous call."""
        while self._left_out:
            yield self._left_out.popleft()

    def advance(
        self, known_ns: int, open_fronts: Iterable[OpenExchange], open_backs: Sequence[OpenExchange]
    ) -> Iterator[Pair | Unpaired | None]:
        """Yield the results that can be decided now. Each added exchange is in exactly one pair or Unpaired.

        Yields None after each step without a result, so that the caller can add exchanges between two steps.

        Args:
            known_ns: time up to which all events of both sides are known.
            open_fronts, open_backs: exchanges that began and have not been added.
        """
        yield from self.take_left_out()
        before_ns = known_ns - SLACK_NS
        fronts_under_way = _OpenFronts(open_fronts)
        yield from self._decide_backs(before_ns, fronts_under_way)
        # Arrivals (ns) of the exchanges behind the gateway that have no partner yet, by the key of their
        # possible partners in front of it. Those under the key None can belong to any exchange in front.
        undecided: dict[Key | None, list[int]] = {}
        backs = [
            OpenExchange(b.exchange.timeline.arrival_ns, b.keys, True) for b in list(self._backs.values())
        ]
        for back in (*open_backs, *backs):
            for key in self._owner_keys(back, fronts_under_way):
                undecided.setdefault(key, []).append(back.arrival_ns)
            yield None
        for arrivals_ns in undecided.values():
            arrivals_ns.sort()
        for front in list(self._fronts.values()):
            if (
                self._fronts.get(id(front.exchange)) is front
                and end_ns(front.exchange) <= before_ns
                and not any(
                    _has_arrival_during(front.exchange, undecided[key])
                    for key in (*front.keys, None)
                    if key in undecided
                )
            ):
                yield self._result_of(front)
            else:
                yield None

    def close(self) -> Iterator[Pair | Unpaired | None]:
        """Yield the results of all waiting exchanges. Call this only after every exchange was added."""
        ended = [front.exchange for front in self._fronts.values()]
        ended += [back.exchange for back in self._backs.values()]
        last_ns = max(map(end_ns, ended), default=0)
        return self.advance(last_ns + SLACK_NS, (), ())

    def _accept(self, x: Exchange, size_bytes: int) -> bool:
        """Count an exchange, and leave out older ones above the bounds. If the times of the exchange are too
        uncertain, leave it out and return False."""
        if x.uncertainty_ns > SLACK_NS:
            self._left_out.append(Unpaired(x, Leftover.LEFT_OUT))
            return False
        while (self._fronts or self._backs) and (
            self._waiting_exchanges >= self._exchanges_max
            or self._waiting_bytes + size_bytes > self._bytes_max
        ):
            self._leave_out_oldest()
        self._waiting_bytes += size_bytes
        self._waiting_exchanges += 1
        return True

    def _leave_out_oldest(self) -> None:
        """Give up the exchange that has waited longest, to make room."""
        front, back = next(iter(self._fronts.values()), None), next(iter(self._backs.values()), None)
        if back is not None and (front is None or end_ns(back.exchange) <= end_ns(front.exchange)):
            self._remove_back(back)
            self._waiting_exchanges -= 1
            self._left_out.append(Unpaired(back.exchange, Leftover.LEFT_OUT))
        elif front is not None:
            self._remove_front(front)
            left = (front.exchange, *(match.back for match in front.matches))
            self._left_out += [Unpaired(x, Leftover.LEFT_OUT) for x in left]

    def _decide_backs(self, before_ns: int, fronts_under_way: _OpenFronts) -> Iterator[Unpaired | None]:
        """Decide about the exchanges of the back that arrived up to a time, the oldest first."""
        for back in sorted(self._backs.values(), key=lambda one: one.exchange.timeline.arrival_ns):
            x = back.exchange
            if x.timeline.arrival_ns <= before_ns and self._backs.get(id(x)) is back:
                yield self._decide_back(back, fronts_under_way)
            else:
                yield None

    def _decide_back(self, back: _Back, fronts_under_way: _OpenFronts) -> Unpaired | None:
        """Find the owner of an exchange of the back, unless a front under way can change the result."""
        x = back.exchange
        try:
            result = self._finder.find(
                x, lambda kind, keys: fronts_under_way.can_own(keys, kind, x.timeline.arrival_ns)
            )
        except Exception as error:  # A failed search affects this exchange only.
            self._remove_back(back)
            self._waiting_exchanges -= 1
            return Unpaired(x, Leftover.LEFT_OUT, error)
        if result is None:
            return None
        self._remove_back(back)
        candidates, evidence = result
        fronts = [self._fronts[id(front)] for front in candidates]
        if evidence:
            fronts[0].matches.append(Match(x, evidence))
            self._waiting_bytes += back.memory_bytes
            fronts[0].memory_bytes += back.memory_bytes
            return None
        self._waiting_exchanges -= 1
        for front in fronts:
            front.is_candidate = True
        return Unpaired(x, Leftover.AMBIGUOUS if candidates else Leftover.UNPAIRED)

    def _owner_keys(self, back: OpenExchange, fronts_under_way: _OpenFronts) -> list[Key] | tuple[None]:
        """Return the keys of the fronts that can own an undecided exchange of the back; (None,): all can."""
        for kind, _ in KEYS[:-1]:
            keys = [key for key in back.keys if key[0] is kind]
            if any(self._finder.any_under_way(key, back.arrival_ns, SLACK_NS) for key in keys) or (
                keys and fronts_under_way.can_own(keys, kind, back.arrival_ns)
            ):
                return keys
        return (None,)

    def _result_of(self, front: _Front) -> Pair | Unpaired:
        """Return the pair of a front exchange, or why it has none."""
        self._remove_front(front)
        if front.matches:
            front.matches.sort(key=lambda match: match.back.timeline.arrival_ns)
            return Pair(front.exchange, front.matches)
        return Unpaired(front.exchange, Leftover.AMBIGUOUS if front.is_candidate else Leftover.UNPAIRED)

    def _remove_front(self, front: _Front) -> None:
        del self._fronts[id(front.exchange)]
        self._waiting_bytes -= front.memory_bytes
        self._waiting_exchanges -= 1 + len(front.matches)
        self._finder.remove(front.exchange, front.keys)

    def _remove_back(self, back: _Back) -> None:
        del self._backs[id(back.exchange)]
        self._waiting_bytes -= back.memory_bytes


def _has_arrival_during(front: Exchange, arrivals_ns: Sequence[int]) -> bool:
    """Return whether one of the arrivals, in ascending order, can be during the exchange of the front."""
    index = bisect_left(arrivals_ns, front.timeline.arrival_ns - SLACK_NS)
    return index < len(arrivals_ns) and arrivals_ns[index] <= end_ns(front) + SLACK_NS

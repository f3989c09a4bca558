"""Find the exchanges of two vantages that belong together, each with its evidence.

An exchange of the back belongs to the exchange of the front during which it began and with which it shares,
in this order of preference: a request id, a trace id, the hash of the prompt's last block (which covers the
whole prompt), or the first hashes of the answer's text. If several exchanges of the front qualify, the
prompt, the text and the order of events can exclude all but one. If more than one remains, the exchange of
the back is ambiguous: it is counted, and never assigned by a guess. The models are not compared, because a
gateway can rename or replace them.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import islice
from typing import Final

from llmtap.exchange.exchange import TEXT_BLOCK_CHARS, Exchange, RequestShape
from llmtap.pairing.alignment import TextRelation, align, common_blocks, compare_text
from llmtap.pairing.clock import SAME_CLOCK, VantageOffset

CANDIDATES_MAX: Final = 1_000
"""Maximum number of exchanges of the front with the same key that are compared with one exchange of the back,
for example if a health probe sends the same prompt all day. If more of them can be under way, the exchange of
the back is ambiguous."""
TEXT_BLOCKS_MIN: Final = 4
"""Number of hashed blocks that two texts must have in common to be paired by text alone: 128 characters, more
than a fixed refusal has. If the texts are not equal, the pair must also have this many blocks more in common
than any other candidate, because two answers to one prompt often begin alike."""
ROUNDING_NS: Final = 1_000
"""Largest rounding error of a time in a capture: times are whole microseconds, rounded down."""


class Evidence(StrEnum):
    """Fact by which an exchange of the back was assigned to one of the front."""

    REQUEST_ID = "request_id"
    TRACE_ID = "trace_id"
    PROMPT = "prompt"
    TEXT = "text"
    ORDER = "order"
    """Every other candidate delivered the text before the back had it, so the candidate got it elsewhere."""


Key = tuple[Evidence, object]
"""Kind of evidence, and the value that both exchanges of a pair have."""


@dataclass(frozen=True, slots=True)
class Match:
    """An exchange of the back in a pair."""

    back: Exchange
    evidence: tuple[Evidence, ...]
    """Evidence for the pair: first the kind of the key that found it, then what excluded other candidates."""


@dataclass(slots=True)
class Pair:
    """An exchange of the front with its exchanges of the back, in the order of their arrival."""

    front: Exchange
    matches: list[Match] = field(default_factory=list)
    """Exchanges of the back, in order of arrival."""

    @property
    def backs(self) -> list[Exchange]:
        """Exchanges of the back, in the order of their arrival."""
        return [match.back for match in self.matches]


@dataclass(frozen=True, slots=True)
class Matching:
    """Result of `match`. Every exchange of both sides is in exactly one of these lists."""

    pairs: list[Pair]
    unpaired_front: list[Exchange]
    unpaired_back: list[Exchange]
    ambiguous_front: list[Exchange]
    """Exchanges without a pair to which an ambiguous exchange of the back can belong."""
    ambiguous_back: list[Exchange]
    """Exchanges of the back that fit several of the front equally well."""


def error_ns(front: Exchange, back: Exchange, clock: VantageOffset) -> int:
    """Return the largest error of a difference between a time of the front and a time of the back, in ns."""
    return front.uncertainty_ns + back.uncertainty_ns + clock.uncertainty_ns + 2 * ROUNDING_NS


def match(
    fronts: Sequence[Exchange],
    backs: Sequence[Exchange],
    clock: VantageOffset = SAME_CLOCK,
    *,
    comparable: bool = True,
) -> Matching:
    """Match the exchanges of two vantages.

    Args:
        clock: offset between the clocks of the vantages.
        comparable: whether both captures made their hashes with the same key. If not, only ids are evidence.
    """
    finder = Finder(fronts, clock, comparable=comparable)
    pairs: dict[int, Pair] = {}
    unpaired, ambiguous, candidates_of_ambiguous = [], [], set[int]()
    for back in sorted(backs, key=_arrival_ns):
        candidates, evidence = finder.find(back) or ([], ())
        if evidence:
            front = candidates[0]
            pairs.setdefault(id(front), Pair(front)).matches.append(Match(back, evidence))
        elif candidates:
            ambiguous.append(back)
            candidates_of_ambiguous |= set(map(id, candidates))
        else:
            unpaired.append(back)
    without_pair = [front for front in fronts if id(front) not in pairs]
    return Matching(
        list(pairs.values()),
        [front for front in without_pair if id(front) not in candidates_of_ambiguous],
        unpaired,
        [front for front in without_pair if id(front) in candidates_of_ambiguous],
        ambiguous,
    )


def prompt_key(x: Exchange) -> tuple[object, ...] | None:
    """Return the hash of the whole prompt with its unit; None if the prompt was not hashed."""
    return shape_key(x.shape)


def shape_key(shape: RequestShape | None) -> tuple[object, ...] | None:
    """Return the hash of the whole prompt with its unit (`prompt_key`), from the shape of a request."""
    if shape is None or not shape.blocks:
        return None
    return shape.block_unit, shape.block_size, shape.blocks[-1]


def _request_ids(x: Exchange) -> list[object]:
    return [one for one in dict.fromkeys((x.request_id, x.upstream_request_id)) if one and one != "*"]


def _trace_ids(x: Exchange) -> list[object]:
    return [x.trace_id] if x.trace_id else []


def _prompt_hashes(x: Exchange) -> list[object]:
    key = prompt_key(x)
    return [] if key is None else [key]


def _text_hashes(x: Exchange) -> list[object]:
    hashes = x.text_blocks or ()
    full_blocks = sum(x.timeline.events.chars) // TEXT_BLOCK_CHARS
    return [hashes[TEXT_BLOCKS_MIN - 1]] if min(full_blocks, len(hashes)) >= TEXT_BLOCKS_MIN else []


KEYS: Final[tuple[tuple[Evidence, Callable[[Exchange], list[object]]], ...]] = (
    (Evidence.REQUEST_ID, _request_ids),
    (Evidence.TRACE_ID, _trace_ids),
    (Evidence.PROMPT, _prompt_hashes),
    (Evidence.TEXT, _text_hashes),
)
"""Kinds of keys, with the functions that return the keys of an exchange, in order of preference."""


def keys_of(x: Exchange) -> frozenset[Key]:
    """Return all keys by which an exchange is found."""
    return frozenset((kind, key) for kind, keys in KEYS for key in keys(x))


_HASH_KINDS: Final = frozenset({Evidence.PROMPT, Evidence.TEXT})


def is_under_way(front: Exchange, back: Exchange, clock: VantageOffset = SAME_CLOCK) -> bool:
    """Return whether the exchange of the back can have begun during the exchange of the front."""
    began_ns = back.timeline.arrival_ns - clock.offset_ns
    within_ns = error_ns(front, back, clock)
    return front.timeline.arrival_ns - within_ns <= began_ns <= end_ns(front) + within_ns


class _FrontsOfKey:
    """Exchanges of the front with the same key, in the order of their arrival."""

    def __init__(self) -> None:
        self.fronts: list[Exchange] = []
        self._latest_ends_ns: list[int] = []
        """For the first exchanges in `fronts`: the latest end of each exchange and of all before it."""

    def add(self, front: Exchange) -> None:
        index = bisect_right(self.fronts, _arrival_ns(front), key=_arrival_ns)
        self.fronts.insert(index, front)
        del self._latest_ends_ns[index:]

    def remove(self, front: Exchange) -> None:
        index = bisect_left(self.fronts, _arrival_ns(front), key=_arrival_ns)
        while self.fronts[index] is not front:
            index += 1
        del self.fronts[index], self._latest_ends_ns[index:]

    def latest_ends_ns(self) -> list[int]:
        """Return, for each exchange in `fronts`, the latest end of it and of all exchanges before it."""
        ends_ns = self._latest_ends_ns
        for front in islice(self.fronts, len(ends_ns), None):
            ends_ns.append(max([end_ns(front), *ends_ns[-1:]]))
        return ends_ns

    def any_under_way(self, time_ns: int, within_ns: int) -> bool:
        """Return whether an exchange was under way at `time_ns`, or at most `within_ns` before or after."""
        n = bisect_right(self.fronts, time_ns + within_ns, key=_arrival_ns)
        return n > 0 and self.latest_ends_ns()[n - 1] >= time_ns - within_ns


class Finder:
    """Index of the exchanges of the front by their keys."""

    def __init__(
        self,
        fronts: Iterable[Exchange] = (),
        clock: VantageOffset = SAME_CLOCK,
        *,
        comparable: bool = True,
    ) -> None:
        self._clock = clock
        self._comparable = comparable
        """Whether both sides made their hashes with the same key."""
        self._keys = [(kind, keys) for kind, keys in KEYS if comparable or kind not in _HASH_KINDS]
        """By kind of evidence: function that returns the keys of an exchange."""
        self._by_key: dict[Key, _FrontsOfKey] = {}
        """By key: exchanges of the front that have it."""
        self._front_error_ns = 0
        """Largest uncertainty of an exchange of the front, in ns."""
        for front in sorted(fronts, key=_arrival_ns):
            self.add(front, keys_of(front))

    def add(self, front: Exchange, keys: Iterable[Key]) -> None:
        self._front_error_ns = max(self._front_error_ns, front.uncertainty_ns)
        for key in keys:
            self._by_key.setdefault(key, _FrontsOfKey()).add(front)

    def remove(self, front: Exchange, keys: Iterable[Key]) -> None:
        """Remove an exchange that was added with these keys."""
        for key in keys:
            of_key = self._by_key[key]
            of_key.remove(front)
            if not of_key.fronts:
                del self._by_key[key]

    def find(
        self, back: Exchange, can_change: Callable[[Evidence, list[Key]], bool] = lambda kind, keys: False
    ) -> tuple[list[Exchange], tuple[Evidence, ...]] | None:
        """Return the exchanges of the front to which `back` can belong, and the evidence if only one remains.

        Args:
            can_change: returns whether a front that is not in the index yet can match keys of a kind. If so,
                the result is None.
        """
        for kind, keys_of_kind in self._keys:
            keys = [(kind, key) for key in keys_of_kind(back)]
            if can_change(kind, keys):
                return None
            candidates: dict[int, Exchange] = {}
            searched_all = True
            for key in keys:
                fronts, is_complete = self._running_at_arrival(key, back)
                candidates |= {id(front): front for front in fronts}
                searched_all = searched_all and is_complete
            if candidates:
                chosen, evidence = self._exclude_candidates(list(candidates.values()), back, kind)
                return chosen, evidence if len(chosen) == 1 and searched_all else ()
        return [], ()

    def any_under_way(self, key: Key, time_ns: int, within_ns: int) -> bool:
        """Return whether an exchange with this key was under way within `within_ns` of `time_ns`."""
        of_key = self._by_key.get(key)
        return of_key is not None and of_key.any_under_way(time_ns, within_ns)

    def _running_at_arrival(self, key: Key, back: Exchange) -> tuple[list[Exchange], bool]:
        """Return the exchanges of the front with this key during which `back` began. Also return whether all
        exchanges were compared, which is false above `CANDIDATES_MAX`."""
        of_key = self._by_key.get(key)
        if of_key is None:
            return [], True
        fronts, latest_ends_ns = of_key.fronts, of_key.latest_ends_ns()
        began_ns = back.timeline.arrival_ns - self._clock.offset_ns
        slack_ns = back.uncertainty_ns + self._clock.uncertainty_ns + 2 * ROUNDING_NS + self._front_error_ns
        candidates: list[Exchange] = []
        n = bisect_right(fronts, began_ns + slack_ns, key=_arrival_ns)
        for i in range(n - 1, -1, -1):
            if latest_ends_ns[i] < began_ns - slack_ns:
                break  # This exchange and all earlier exchanges ended before `back` began.
            if n - i > CANDIDATES_MAX:
                return candidates, False
            front = fronts[i]
            if is_under_way(front, back, self._clock):
                candidates.append(front)
        return candidates, True

    def _exclude_candidates(
        self, candidates: list[Exchange], back: Exchange, kind: Evidence
    ) -> tuple[list[Exchange], tuple[Evidence, ...]]:
        """Exclude candidates by prompt, text and order. Return the remaining candidates and the evidence."""
        evidence = [kind]
        steps = ((Evidence.PROMPT, self._with_same_prompt), (Evidence.TEXT, _same_text))
        for step, choose in steps if self._comparable else ():
            chosen = choose(candidates, back)
            if chosen and (len(chosen) < len(candidates) or len(candidates) == 1):
                candidates = chosen
                evidence.append(step)
        if len(candidates) > 1:
            # Stop at the second possible candidate: `back` is then ambiguous, and no other candidate matters.
            possible = list(islice((one for one in candidates if self._fits_order(one, back)), 2))
            if len(possible) == 1:
                candidates = possible
                evidence.append(Evidence.ORDER)
        return candidates, tuple(dict.fromkeys(evidence))

    @staticmethod
    def _with_same_prompt(candidates: list[Exchange], back: Exchange) -> list[Exchange]:
        key = prompt_key(back)
        return [] if key is None else [front for front in candidates if prompt_key(front) == key]

    def _fits_order(self, front: Exchange, back: Exchange) -> bool:
        """Return whether every token of the common text reached the back before the front."""
        aligned = align(front, back, compare_text(front, back))
        if aligned is None or aligned.basis != "text":
            return True
        delays_ns = aligned.front_ns - aligned.back_ns + self._clock.offset_ns
        return int(delays_ns.min()) >= -error_ns(front, back, self._clock)


def _same_text(candidates: list[Exchange], back: Exchange) -> list[Exchange]:
    """Return the candidates with the same text as `back`. If there is none, return the candidate whose text
    has the longest common beginning, if it is `TEXT_BLOCKS_MIN` blocks longer than that of any other
    candidate."""
    equal = [
        front
        for front in candidates
        if front.text_blocks == back.text_blocks and compare_text(front, back).relation is TextRelation.EQUAL
    ]
    if equal:
        return equal
    lengths = [common_blocks(front, back) for front in candidates]
    *others, longest = sorted(lengths)
    needed = max(others) + TEXT_BLOCKS_MIN if others else 1
    return [candidates[lengths.index(longest)]] if longest >= needed else []


def _arrival_ns(x: Exchange) -> int:
    return x.timeline.arrival_ns


def end_ns(x: Exchange) -> int:
    """Return the latest known time of an exchange."""
    t = x.timeline
    ends = (t.arrival_ns, t.request_end_ns, t.last_token_ns, t.response_end_ns, t.delivered_ns)
    return max(end for end in ends if end is not None)

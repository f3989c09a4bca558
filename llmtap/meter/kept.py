"""The newest exchanges, kept whole in memory for whoever asks: bounded by number and by bytes."""

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import Final

import msgspec

from llmtap.metrics.deadlines import Benefit
from llmtap.metrics.latency import DEFAULT_BENEFIT, chunking_of, measure
from llmtap.record.bounds import memory_bytes
from llmtap.record.exchange import Exchange
from llmtap.record.outcome import Outcome

__all__ = ["FILTERS", "BadQuery", "Kept", "Query", "read_fields", "read_flag", "read_number", "weight_bytes"]

BYTES_MAX: Final = 80 << 20
"""Of all exchanges kept: 2 million events, or 20,000 exchanges without any."""
LIMIT_DEFAULT: Final = 100
LIMIT_MAX: Final = 1_000


class BadQuery(ValueError):
    """A query parameter that cannot be; `field` names it."""

    def __init__(self, field: str, problem: str) -> None:
        super().__init__(problem)
        self.field = field


def _text(field: str, value: str) -> object:
    return value


def _number(field: str, value: str) -> object:
    if not (value.isascii() and value.isdigit() and len(value) <= 18):
        raise BadQuery(field, f"expected a whole number, got {value!r}")
    return int(value)


def read_fields(query: Iterable[tuple[str, str]]) -> dict[str, str]:
    """The fields of a query, each once. Raises BadQuery for one that comes again."""
    fields: dict[str, str] = {}
    for field, value in query:
        if field in fields:
            raise BadQuery(field, "given more than once")
        fields[field] = value
    return fields


def read_number(field: str, value: str, most: int) -> int:
    """1 to `most`. Raises BadQuery."""
    number = _number(field, value)
    if not isinstance(number, int) or not 1 <= number <= most:
        raise BadQuery(field, f"expected 1 to {most}, got {value!r}")
    return number


def read_flag(field: str, value: str) -> bool:
    """`1` or `0` of a query parameter. Raises BadQuery."""
    known = {"1": True, "true": True, "0": False, "false": False}
    if value not in known:
        raise BadQuery(field, f"expected 1 or 0, got {value!r}")
    return known[value]


def _outcome(field: str, value: str) -> object:
    try:
        return Outcome(value)
    except ValueError:
        raise BadQuery(field, f"expected one of {', '.join(Outcome)}, got {value!r}") from None


FILTERS: Final[Mapping[str, Callable[[str, str], object]]] = {
    "id": _text, "relay": _text, "seq": _number, "tenant": _text, "model": _text, "route": _text,
    "arm": _text, "endpoint": _text, "dialect": _text, "method": _text, "path": _text, "request_id": _text,
    "status": _number, "stream": read_flag, "outcome": _outcome, "finish_reason": _text, "clock": _text,
    "uncertain": read_flag,
}  # fmt: skip
"""What an exchange can be asked for by: its own names, and how to read a value."""


class Query(msgspec.Struct, frozen=True, kw_only=True):
    """Which exchanges, and how much of each."""

    limit: int = LIMIT_DEFAULT
    events: bool = False
    before: int | None = None
    """Only exchanges kept before this one: the cursor."""
    wanted: dict[str, object] = {}
    """Attribute and value: all must match."""

    @classmethod
    def parse(cls, fields: Mapping[str, str]) -> "Query":
        """Reads `limit`, `events`, `next` (a cursor from an earlier answer) and filters by name.

        `certain=1` leaves out what is flagged `uncertain`.

        Raises BadQuery for an unknown name or a value that cannot be.
        """
        limit, events, before = LIMIT_DEFAULT, False, None
        wanted: dict[str, object] = {}
        for field, value in fields.items():
            if field == "limit":
                limit = read_number(field, value, LIMIT_MAX)
            elif field == "events":
                events = read_flag(field, value)
            elif field == "certain":
                if read_flag(field, value):
                    wanted["uncertain"] = False
            elif field in ("next", "cursor"):
                number = _number(field, value)
                before = number if isinstance(number, int) else None
            elif field in FILTERS:
                wanted[field] = FILTERS[field](field, value)
            else:
                raise BadQuery(
                    field, f"no such field; known: limit, events, next, certain, {', '.join(FILTERS)}"
                )
        return cls(limit=limit, events=events, before=before, wanted=wanted)

    def matches(self, x: Exchange) -> bool:
        return all(getattr(x, name) == value for name, value in self.wanted.items())


class Kept:
    """A ring of exchanges in the order in which they ended."""

    def __init__(
        self, exchanges_max: int, bytes_max: int = BYTES_MAX, *, benefit: Benefit = DEFAULT_BENEFIT
    ) -> None:
        self._ring: deque[tuple[int, int, Exchange]] = deque()
        """Number, weight when it was added, and exchange."""
        self._exchanges_max = exchanges_max
        self._bytes_max = bytes_max
        self._benefit = benefit
        self.weight_bytes = 0
        """Of all that are kept."""
        self._next = 1

    def __len__(self) -> int:
        return len(self._ring)

    def add(self, x: Exchange) -> None:
        """Keeps an exchange, and lets the oldest go that no longer fit."""
        ring = self._ring
        weight = weight_bytes(x)
        ring.append((self._next, weight, x))
        self._next += 1
        self.weight_bytes += weight
        while len(ring) > self._exchanges_max or (self.weight_bytes > self._bytes_max and ring):
            self.weight_bytes -= ring.popleft()[1]

    def find(self, query: Query) -> tuple[list[Exchange], str | None]:
        """The newest exchanges that match, and the cursor to the rest (None when there is none)."""
        found: list[Exchange] = []
        last = 0
        for number, _, x in reversed(self._ring):
            if (query.before is not None and number >= query.before) or not query.matches(x):
                continue
            if len(found) == query.limit:
                return found, str(last)
            found.append(x)
            last = number
        return found, None

    def to_json(self, found: list[Exchange], cursor: str | None, *, events: bool) -> bytes:
        """The answer of `/api/v1/exchanges`. Finished exchanges do not change: any thread may do this."""
        told = [x.to_dict(measure(x, self._benefit).metrics(), chunking_of(x), events=events) for x in found]
        return msgspec.json.encode({"exchanges": told, "next": cursor})


def weight_bytes(x: Exchange) -> int:
    """Memory of an exchange, except for the bodies that a capture counts itself and removes soon."""
    return memory_bytes(x) - memory_bytes(x.said) - memory_bytes(x.keeping)

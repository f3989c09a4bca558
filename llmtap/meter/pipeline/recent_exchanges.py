"""Keep the newest finished exchanges in memory, and answer queries of `/api/v1/exchanges` from them.

`RecentExchanges` is a sink of the pipeline, bounded by number and bytes. `Query` parses filters, limits and
cursors of a request; the readers of single query parameters (`read_*`, `FILTERS`, `BadQuery`) are used by the
other routes of the admin API, too.
"""

import re
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final

import msgspec

from llmtap.exchange.bounds import memory_bytes
from llmtap.exchange.exchange import Exchange
from llmtap.exchange.outcome import Outcome
from llmtap.export.sinks import SeriesKey
from llmtap.metrics.deadlines import Benefit
from llmtap.metrics.latency import Measured, chunking_of, measure
from llmtap.units import shown

BYTES_MAX: Final = 80 << 20
"""Of all exchanges kept: 2 million events, or 20,000 exchanges without any."""
LIMIT_DEFAULT: Final = 100
LIMIT_MAX: Final = 1_000
PAGE_BYTES_MAX: Final = 4 << 20
"""Bytes of one answer: the exchange, or the slice of events, that reaches it is the last."""
EVENTS_SLICE: Final = 1_000
"""Events converted to JSON at a time: about 60 kB."""

_encode: Final = msgspec.json.Encoder().encode
_cursor: Final = re.compile(r"([0-9]{1,18})(?:\.([0-9]{1,9}))?").fullmatch


class BadQuery(ValueError):
    def __init__(self, field: str, problem: str) -> None:
        super().__init__(problem)
        self.field = field


def read_text(field: str, value: str) -> str:
    return value


def read_count(field: str, value: str) -> int:
    if not (value.isascii() and value.isdigit() and len(value) <= 18):
        raise BadQuery(field, f"expected a whole number, got {shown(value)}")
    return int(value)


def read_fields(query: Iterable[tuple[str, str]]) -> dict[str, str]:
    """Return the fields of a query. Raises BadQuery for a repeated one."""
    fields: dict[str, str] = {}
    for field, value in query:
        if field in fields:
            raise BadQuery(field, "given more than once")
        fields[field] = value
    return fields


def read_number(field: str, value: str, most: int) -> int:
    number = read_count(field, value)
    if not 1 <= number <= most:
        raise BadQuery(field, f"expected 1 to {most}, got {shown(value)}")
    return number


def read_flag(field: str, value: str) -> bool:
    """`1` or `0` of a query parameter. Raises BadQuery."""
    known = {"1": True, "true": True, "0": False, "false": False}
    if value not in known:
        raise BadQuery(field, f"expected 1 or 0, got {shown(value)}")
    return known[value]


def _read_cursor(field: str, value: str) -> tuple[int, int]:
    """`before` and `events_start` of a cursor: `N`, or `N.EVENT` for the rest of the events of exchange N."""
    parts = _cursor(value)
    if parts is None:
        raise BadQuery(field, f"expected the `next` of an earlier answer, got {shown(value)}")
    number, event = int(parts[1]), int(parts[2] or 0)
    return (number + 1 if event else number), event


def read_outcome(field: str, value: str) -> Outcome:
    try:
        return Outcome(value)
    except ValueError:
        raise BadQuery(field, f"expected one of {', '.join(Outcome)}, got {shown(value)}") from None


FILTERS: Final[Mapping[str, Callable[[str, str], object]]] = {
    **dict.fromkeys(("id", "relay"), read_text),
    "seq": read_count,
    **dict.fromkeys(
        ("tenant", "model", "route", "arm", "endpoint", "dialect", "method", "path", "request_id"), read_text
    ),
    "status": read_count,
    "stream": read_flag,
    "outcome": read_outcome,
    **dict.fromkeys(("finish_reason", "clock"), read_text),
    "uncertain": read_flag,
}


class Query(msgspec.Struct, frozen=True, kw_only=True):
    """Filters and limits of one request."""

    limit: int = LIMIT_DEFAULT
    events: bool = False
    before: int | None = None
    events_start: int = 0
    """First event to return of exchange `before` - 1, in which the earlier answer ended; 0: none."""
    wanted: dict[str, object] = {}

    @classmethod
    def parse(cls, fields: Mapping[str, str]) -> "Query":
        """Parse `limit`, `events`, `next` (a cursor from an earlier answer) and filters by name.

        `certain=1` leaves out exchanges flagged `uncertain`. Raises BadQuery for an unknown name or an
        invalid value.
        """
        limit, events, before, events_start = LIMIT_DEFAULT, False, None, 0
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
                before, events_start = _read_cursor(field, value)
            elif field in FILTERS:
                wanted[field] = FILTERS[field](field, value)
            else:
                raise BadQuery(
                    field, f"no such field; known: limit, events, next, certain, {', '.join(FILTERS)}"
                )
        return cls(limit=limit, events=events, before=before, events_start=events_start, wanted=wanted)

    def matches(self, x: Exchange) -> bool:
        return all(getattr(x, name) == value for name, value in self.wanted.items())


class RecentExchanges:
    def __init__(self, exchanges_max: int, bytes_max: int = BYTES_MAX) -> None:
        self._ring: deque[tuple[int, int, Exchange, Benefit]] = deque()
        """Number, weight when it was added, exchange, and the reader that it was measured for."""
        self._exchanges_max = exchanges_max
        self._bytes_max = bytes_max
        self.weight_bytes = 0
        self._next = 1

    def __len__(self) -> int:
        return len(self._ring)

    def ended(self, x: Exchange, m: Measured, key: SeriesKey, met: bool | None) -> None:
        ring = self._ring
        weight = weight_bytes(x)
        ring.append((self._next, weight, x, m.benefit))
        self._next += 1
        self.weight_bytes += weight
        while len(ring) > self._exchanges_max or (self.weight_bytes > self._bytes_max and ring):
            self.weight_bytes -= ring.popleft()[1]

    def find(self, query: Query) -> list[tuple[int, Exchange, Benefit]]:
        """Return the newest matching exchanges with number and reader, up to one above the limit."""
        found: list[tuple[int, Exchange, Benefit]] = []
        for number, _, x, reader in reversed(self._ring):
            if (query.before is not None and number >= query.before) or not query.matches(x):
                continue
            found.append((number, x, reader))
            if len(found) > query.limit:
                break
        return found

    def to_json(self, found: Sequence[tuple[int, Exchange, Benefit]], query: Query) -> bytes:
        """Return the JSON of `/api/v1/exchanges`: as much of `found` as its limit and PAGE_BYTES_MAX allow.

        For any thread: finished exchanges do not change.
        """
        out: list[bytes] = []
        size, cursor = 0, None
        for i, (number, x, reader) in enumerate(found):
            if i == query.limit or size >= PAGE_BYTES_MAX:
                cursor = str(found[i - 1][0])
                break
            start = query.events_start if query.before == number + 1 else 0
            about = x.to_dict(measure(x, reader).metrics(), chunking_of(x))
            if start:
                about["events_start"] = start
            if not query.events:
                out.append(_encode(about))
                size += len(out[-1])
                continue
            body, left = encode_with_events(about, x, start, PAGE_BYTES_MAX - size)
            out.append(body)
            size += len(body)
            if left is not None:
                cursor = f"{number}.{left}"
                break
        return b'{"exchanges":[%s],"next":%s}' % (b",".join(out), _encode(cursor))


def encode_with_events(
    about: dict[str, object], x: Exchange, start: int = 0, bytes_max: int | None = None
) -> tuple[bytes, int | None]:
    """Return the JSON of an exchange (`about`) with events from `start` on, and the first omitted event.

    The events become JSON slice by slice, so that their dicts never exist all at once. The slice that reaches
    `bytes_max` is the last.
    """
    head = _encode(about)
    size, parts = len(head), list[bytes]()
    n = len(x.timeline.events)
    while start < n and (bytes_max is None or not parts or size < bytes_max):
        parts.append(_encode(x.events_to_dicts(start, start + EVENTS_SLICE))[1:-1])
        size += len(parts[-1])
        start += EVENTS_SLICE
    return b'%s,"events":[%s]}' % (head[:-1], b",".join(parts)), start if start < n else None


def weight_bytes(x: Exchange) -> int:
    """Return the memory of an exchange, except for bodies, which a capture counts and removes soon."""
    return memory_bytes(x) - memory_bytes(x.said) - memory_bytes(x.keeping)

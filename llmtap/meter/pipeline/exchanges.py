"""Answer `/api/v1/exchanges` and `/api/v1/streams`: the newest finished exchanges, and those under way.

`RecentExchanges` is a sink of the pipeline, bounded by number and bytes. `Streams` lists the open
observers of each assembler that joined, copied a few at a time, newest first. Frames come every 10 ms
(`llmtap/channel/`), so `since_last` can be 10 ms too long.

`Query` and `StreamsQuery` parse filters, limits and cursors of a request; the readers of single query
parameters (`read_*`, `FILTERS`, `BadQuery`) are used by the other routes of the admin API, too.
"""

import asyncio
import re
from array import array
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from heapq import merge
from itertools import compress
from typing import Final

import msgspec
from aiohttp import web

from llmtap.clock import Clock
from llmtap.exchange.bounds import memory_bytes
from llmtap.exchange.exchange import BACK, FRONT, OUTPUT, Exchange
from llmtap.exchange.observer import Observer
from llmtap.exchange.outcome import Outcome, Reading
from llmtap.export.sinks import SeriesKey
from llmtap.meter.options import TRACE_ID
from llmtap.meter.pipeline.assembler import Assembler
from llmtap.metrics.deadlines import Benefit
from llmtap.metrics.holds import held_figures
from llmtap.metrics.latency import Measured, chunking_of, measure, ttft_ns
from llmtap.metrics.refusals import is_refused
from llmtap.units import NS_PER_S, parse_duration_ns, short_repr

BYTES_MAX: Final = 80 << 20
"""Maximum memory of all recent exchanges: 2 million events, or 20,000 exchanges without events."""
LIMIT_DEFAULT: Final = 100
LIMIT_MAX: Final = 1_000
PAGE_BYTES_MAX: Final = 4 << 20
"""Size at which an answer ends: the exchange, or slice of events, that reaches it is the last in it."""
EVENTS_SLICE: Final = 1_000
"""Number of events that are converted to JSON at a time: about 60 kB."""

_encode: Final = msgspec.json.Encoder().encode
_match_cursor: Final = re.compile(r"([0-9]{1,18})(?:\.([0-9]{1,9}))?").fullmatch


class BadQuery(ValueError):
    """Invalid query parameter (`field`) of a request to the admin API."""

    def __init__(self, field: str, problem: str) -> None:
        super().__init__(problem)
        self.field = field


def read_text(field: str, value: str) -> str:
    return value


def read_count(field: str, value: str) -> int:
    """Return a query parameter that is a whole number. Raises BadQuery."""
    if not (value.isascii() and value.isdigit() and len(value) <= 18):
        raise BadQuery(field, f"expected a whole number of at most 18 digits, got {short_repr(value)}")
    return int(value)


def read_fields(query: Iterable[tuple[str, str]]) -> dict[str, str]:
    """Return the fields of a query by name. Raises BadQuery if a field is given more than once."""
    fields: dict[str, str] = {}
    for field, value in query:
        if field in fields:
            raise BadQuery(field, "is given more than once; give it once")
        fields[field] = value
    return fields


def read_number(field: str, value: str, maximum: int) -> int:
    """Return a query parameter from 1 to `maximum`. Raises BadQuery."""
    number = read_count(field, value)
    if not 1 <= number <= maximum:
        raise BadQuery(field, f"expected a number from 1 to {maximum}, got {short_repr(value)}")
    return number


def read_flag(field: str, value: str) -> bool:
    """Return a query parameter that is `1` or `0`. Raises BadQuery."""
    known = {"1": True, "true": True, "0": False, "false": False}
    if value not in known:
        raise BadQuery(field, f"expected 1 or 0, got {short_repr(value)}")
    return known[value]


def _read_cursor(field: str, value: str) -> tuple[int, int]:
    """Return the values of `Query.before` and `Query.events_start` for a cursor.

    The cursor is the number `N` of an exchange, or `N.EVENT` for the events of exchange N from EVENT on.
    """
    parts = _match_cursor(value)
    if parts is None:
        raise BadQuery(field, f"expected the value of `next` in an earlier answer, got {short_repr(value)}")
    number, event = int(parts[1]), int(parts[2] or 0)
    return (number + 1 if event else number), event


def read_outcome(field: str, value: str) -> Outcome:
    try:
        return Outcome(value)
    except ValueError:
        raise BadQuery(field, f"expected one of {', '.join(Outcome)}, got {short_repr(value)}") from None


def read_reading(field: str, value: str) -> Reading:
    try:
        return Reading(value)
    except ValueError:
        raise BadQuery(field, f"expected one of {', '.join(Reading)}, got {short_repr(value)}") from None


def read_side(field: str, value: str) -> str:
    """Return a query parameter that is a side of a gateway. Raises BadQuery."""
    if value not in (FRONT, BACK):
        raise BadQuery(field, f"expected {FRONT} or {BACK}, got {short_repr(value)}")
    return value


FILTERS: Final[Mapping[str, Callable[[str, str], object]]] = {
    **dict.fromkeys(("id", "relay"), read_text),
    "seq": read_count,
    "side": read_side,
    "pair_id": read_text,
    **dict.fromkeys(
        (
            "tenant",
            "model",
            "route",
            "arm",
            "label",
            "endpoint",
            "dialect",
            "content_type",
            "service_tier",
            "service_tier_requested",
            "method",
            "path",
            "request_id",
            "upstream_request_id",
            "trace_id",
        ),
        read_text,
    ),
    "status": read_count,
    "stream": read_flag,
    "outcome": read_outcome,
    "reading": read_reading,
    **dict.fromkeys(("finish_reason", "clock"), read_text),
    "uncertain": read_flag,
}
"""By field of an exchange that a query can filter by: function that parses the filter's value."""


class Query(msgspec.Struct, frozen=True, kw_only=True):
    """Filters and limits of one request."""

    limit: int = LIMIT_DEFAULT
    events: bool = False
    """Whether the answer has the events of each exchange."""
    before: int | None = None
    """Number of an exchange: only exchanges with a lower number are returned; None: all."""
    events_start: int = 0
    """Index of the first event to return of the exchange `before` - 1; an earlier answer had the others."""
    filters: dict[str, object] = {}
    """By name of a field of the exchange: value that it must have."""

    @classmethod
    def parse(cls, fields: Mapping[str, str]) -> "Query":
        """Parse `limit`, `events`, `next` (a cursor from an earlier answer) and filters by name.

        `certain=1` leaves out exchanges flagged as `uncertain`; `refused` selects by `is_refused`. Raises
        BadQuery for an unknown name or an invalid value.
        """
        limit, events, before, events_start = LIMIT_DEFAULT, False, None, 0
        filters: dict[str, object] = {}
        for field, value in fields.items():
            if field == "limit":
                limit = read_number(field, value, LIMIT_MAX)
            elif field == "events":
                events = read_flag(field, value)
            elif field == "certain":
                if read_flag(field, value):
                    filters["uncertain"] = False
            elif field == "refused":
                filters[field] = read_flag(field, value)
            elif field == "next":
                before, events_start = _read_cursor(field, value)
            elif field in FILTERS:
                filters[field] = FILTERS[field](field, value)
            else:
                raise BadQuery(
                    field,
                    f"is an unknown field; known fields: limit, events, next, certain, refused,"
                    f" {', '.join(FILTERS)}",
                )
        return cls(limit=limit, events=events, before=before, events_start=events_start, filters=filters)

    def matches(self, x: Exchange) -> bool:
        return all(
            (is_refused(x) if name == "refused" else getattr(x, name)) == value
            for name, value in self.filters.items()
        )


class RecentExchanges:
    """Newest finished exchanges, for the API."""

    def __init__(self, exchanges_max: int, bytes_max: int = BYTES_MAX, trace_url: str | None = None) -> None:
        self._trace_url = trace_url
        """Template of the address of a trace; None: exchanges have no link."""
        self._ring: deque[tuple[int, int, Exchange, Benefit]] = deque()
        """Entries: number, size in bytes when added, exchange, and settings of the reader (for benefits)."""
        self._exchanges_max = exchanges_max
        self._bytes_max = bytes_max
        self.weight_bytes = 0
        """Estimated memory of all kept exchanges."""
        self._next_number = 1
        """Number of the next exchange, by which the cursor `next` continues."""

    def __len__(self) -> int:
        return len(self._ring)

    def on_end(self, x: Exchange, m: Measured, key: SeriesKey, met: bool | None) -> None:
        ring = self._ring
        weight = weight_bytes(x)
        ring.append((self._next_number, weight, x, m.benefit))
        self._next_number += 1
        self.weight_bytes += weight
        while len(ring) > self._exchanges_max or (self.weight_bytes > self._bytes_max and ring):
            self.weight_bytes -= ring.popleft()[1]

    def describe(self, x: Exchange, m: Measured) -> dict[str, object]:
        """Return the public JSON of an exchange, without its events."""
        about = x.to_dict(m.metrics(), chunking_of(x), held_figures(x, m))
        trace_id, url = x.trace_id, self._trace_url
        about["trace_url"] = None if trace_id is None or url is None else url.replace(TRACE_ID, trace_id)
        return about

    def find(self, query: Query) -> list[tuple[int, Exchange, Benefit]]:
        """Return the newest matching exchanges, each with its number and the reader of its benefit: at most
        `query.limit` + 1. The extra one shows that there is a next page."""
        matches: list[tuple[int, Exchange, Benefit]] = []
        for number, _, x, reader in reversed(self._ring):
            if (query.before is not None and number >= query.before) or not query.matches(x):
                continue
            matches.append((number, x, reader))
            if len(matches) > query.limit:
                break
        return matches

    def to_json(self, matches: Sequence[tuple[int, Exchange, Benefit]], query: Query) -> bytes:
        """Return the JSON of `/api/v1/exchanges`: as many matches as the limit and PAGE_BYTES_MAX allow.

        This method is thread-safe, because finished exchanges do not change.
        """
        out: list[bytes] = []
        size, cursor = 0, None
        for i, (number, x, reader) in enumerate(matches):
            if i == query.limit or size >= PAGE_BYTES_MAX:
                cursor = str(matches[i - 1][0])
                break
            start = query.events_start if query.before == number + 1 else 0
            m = measure(x, reader)
            about = self.describe(x, m)
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
    """Return the JSON of an exchange (`about`) with events from `start` on, and the index of the first
    omitted event (None: all are included).

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
    """Return the memory of an exchange without bodies: a capture counts these, and soon removes them."""
    return memory_bytes(x) - memory_bytes(x.text) - memory_bytes(x.capture_data)


STREAMS_DEFAULT: Final = 200
STREAMS_MAX: Final = 1_000
WINDOW_DEFAULT_NS: Final = 10 * NS_PER_S
WINDOW_MAX_S: Final = 60
POINTS_MAX: Final = 200
STREAM_EVENTS_MAX: Final = 1_000_000
"""Maximum number of events copied for one answer (17 bytes each). Each stream gets an equal share of it."""
STREAMS_PER_ROUND: Final = 16
"""Number of streams copied between two rounds of the event loop, in about half a millisecond."""
OpenExchange = tuple[Observer, str | None]
"""Observer of an exchange under way, and its arm."""


@dataclass(frozen=True, slots=True)
class StreamsQuery:
    """Filters and limits of one request for running streams."""

    limit: int = STREAMS_DEFAULT
    window_ns: int = WINDOW_DEFAULT_NS
    id: str | None = None

    @classmethod
    def parse(cls, fields: Mapping[str, str]) -> "StreamsQuery":
        """Parse `limit`, `window` and `id`. Raises BadQuery for an unknown name or an invalid value."""
        for field in fields.keys() - {"limit", "window", "id"}:
            raise BadQuery(field, "is an unknown field; known fields: limit, window, id")
        return cls(
            read_number("limit", fields.get("limit", str(STREAMS_DEFAULT)), STREAMS_MAX),
            _window_ns(fields["window"]) if "window" in fields else WINDOW_DEFAULT_NS,
            fields.get("id"),
        )

    def matches(self, stream: OpenExchange) -> bool:
        x = stream[0].exchange
        return x.call is None and self.id in (None, x.id)


@dataclass(frozen=True, slots=True)
class _StreamCopy:
    """Copy of a running stream: its JSON without the timeline, and its events since `since_ns`."""

    document: dict[str, object]
    """JSON of the exchange without its timeline."""
    arrival_ns: int
    since_ns: int
    """Time from which events are copied."""
    now_ns: int
    t_ns: "array[int]"
    """Time of each event."""
    tokens: "array[int]"
    """Number of tokens of each event; negative if unknown."""
    flags: bytearray
    """Kinds of the events (content, reasoning and so on), one byte for each."""

    def to_dict(self) -> dict[str, object]:
        carries = [flags & OUTPUT for flags in self.flags]
        # A chunk that declares no number of tokens counts as one token, as in the token source `chunks`.
        points = [
            (t, n if n >= 0 else 1) for t, n in compress(zip(self.t_ns, self.tokens, strict=True), carries)
        ]
        points = thin_out(points, self.since_ns, self.now_ns)
        self.document["timeline"] = [(_seconds(t - self.arrival_ns), n) for t, n in points]
        return self.document


class Streams:
    """Exchanges under way of all relays, for the API."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._assemblers: list[Assembler] = []
        """One for each connected relay; they have the exchanges under way."""
        self._lock = asyncio.Lock()

    def __len__(self) -> int:
        """Number of open exchanges, including tunnels and the responses in them."""
        return sum(map(len, self._assemblers))

    def join(self, assembler: Assembler) -> None:
        """Add the exchanges under way of a relay."""
        self._assemblers.append(assembler)

    def leave(self, assembler: Assembler) -> None:
        """Remove the exchanges of a relay that has disconnected."""
        self._assemblers.remove(assembler)

    def add_to(self, app: web.Application) -> None:
        app.router.add_get("/api/v1/streams", self._handle_request)

    async def find(self, query: StreamsQuery) -> list[_StreamCopy]:
        copies: list[_StreamCopy] = []
        events_max = STREAM_EVENTS_MAX // query.limit
        for n_done, one in enumerate(self._newest_first(), 1):
            if query.matches(one):
                copies.append(_copy_stream(one, self._clock.mono_ns(), query.window_ns, events_max))
                if len(copies) == query.limit:
                    break
            if n_done % STREAMS_PER_ROUND == 0:
                await asyncio.sleep(0)
        # The copies are in the order in which the heads of their requests ended. Sort them by arrival, which
        # can differ.
        copies.sort(key=lambda copy: copy.arrival_ns, reverse=True)
        return copies

    def open_exchanges(self) -> Iterator[OpenExchange]:
        """Yield all open exchanges. The caller can let the event loop run in between."""
        for assembler in tuple(self._assemblers):
            yield from assembler.running_exchanges()

    def _newest_first(self) -> Iterator[OpenExchange]:
        return merge(
            *(assembler.running_exchanges() for assembler in self._assemblers),
            key=lambda one: -one[0].exchange.timeline.arrival_ns,
        )

    async def _handle_request(self, request: web.Request) -> web.Response:
        query = StreamsQuery.parse(read_fields(request.query.items()))
        async with self._lock:  # so that the copies of only one answer are in memory
            copies = await self.find(query)
            count = sum(map(len, self._assemblers))
            window_s = query.window_ns / NS_PER_S

            def encode_streams() -> bytes:
                streams = [copy.to_dict() for copy in copies]
                return msgspec.json.encode({"count": count, "window": window_s, "streams": streams})

            body = await asyncio.to_thread(encode_streams)
        return web.Response(body=body, content_type="application/json")


def thin_out(points: list[tuple[int, int]], since_ns: int, now_ns: int) -> list[tuple[int, int]]:
    """Return at most POINTS_MAX points of `(t_ns, tokens)` in order of time.

    If there are more, the time from `since_ns` to `now_ns` is cut into POINTS_MAX equal pieces. The points
    of a piece become one point, with the time of the first and the tokens of all. So no pause longer than a
    piece is hidden, and no token is lost.
    """
    if len(points) <= POINTS_MAX:
        return points
    span_ns = max(1, now_ns - since_ns)
    out: list[tuple[int, int]] = []
    last = -1
    for t_ns, tokens in points:
        piece = min(POINTS_MAX - 1, (t_ns - since_ns) * POINTS_MAX // span_ns)
        if piece == last:
            out[-1] = out[-1][0], out[-1][1] + tokens
        else:
            out.append((t_ns, tokens))
            last = piece
    return out


def _copy_stream(one: OpenExchange, now_ns: int, window_ns: int, events_max: int) -> _StreamCopy:
    observer, arm = one
    now = observer.running_state()
    x = now.exchange
    t = x.timeline
    log = t.events
    since_ns = max(t.arrival_ns, now_ns - window_ns)
    start = max(bisect_left(log.t_ns, since_ns), len(log) - events_max)
    ttft = ttft_ns(t)
    about: dict[str, object] = {
        "id": x.id,
        "tenant": x.tenant,
        "model": x.model,
        "route": x.route,
        "side": x.side,
        "arm": arm,
        "endpoint": x.endpoint,
        "dialect": now.dialect,
        "stream": now.stream,
        "age": _seconds(max(0, now_ns - t.arrival_ns)),
        "ttft": None if ttft is None else _seconds(ttft),
        "events": now.events,
        "tokens": now.tokens,
        "since_last": None if t.last_token_ns is None else _seconds(max(0, now_ns - t.last_token_ns)),
    }
    return _StreamCopy(
        about, t.arrival_ns, since_ns, now_ns, log.t_ns[start:], log.tokens[start:], log.flags[start:]
    )


def _window_ns(text: str) -> int:
    try:
        window_ns = parse_duration_ns(text)
    except ValueError:
        window_ns = 0
    if not 0 < window_ns <= WINDOW_MAX_S * NS_PER_S:
        raise BadQuery(
            "window", f"expected a duration up to {WINDOW_MAX_S}s such as 10s, got {short_repr(text)}"
        )
    return window_ns


def _seconds(ns: int) -> float:
    return round(ns / NS_PER_S, 6)

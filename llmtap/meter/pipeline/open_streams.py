"""Answer `/api/v1/streams`: list the exchanges under way, answered or not yet, newest first.

The source is the open observers of each assembler that joined (`Streams.join`), copied a few at a time.
Finished exchanges are in `recent_exchanges.py`. Frames come every 10 ms (`llmtap/channel/`), so
`since_last` is up to that much too long.
"""

import asyncio
from array import array
from bisect import bisect_left
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from heapq import merge
from itertools import compress
from typing import Final

import msgspec
from aiohttp import web

from llmtap.clock import Clock
from llmtap.exchange.exchange import OUTPUT
from llmtap.exchange.observer import Observer
from llmtap.meter.pipeline.assembler import Assembler
from llmtap.meter.pipeline.recent_exchanges import BadQuery, read_fields, read_number
from llmtap.metrics.latency import ttft_ns
from llmtap.units import NS_PER_S, parse_duration_ns, shown

LIMIT_DEFAULT: Final = 200
LIMIT_MAX: Final = 1_000
WINDOW_DEFAULT_NS: Final = 10 * NS_PER_S
WINDOW_MAX_S: Final = 60
POINTS_MAX: Final = 200
EVENTS_MAX: Final = 1_000_000
"""Events copied for one answer, at 17 bytes each; each stream gets an equal share, its newest events."""
SLICE: Final = 16
"""Streams processed before frames get their turn: about half a millisecond."""
_FILTERS: Final = ("id", "tenant", "model", "arm")

OpenExchange = tuple[Observer, str | None]


@dataclass(frozen=True, slots=True)
class StreamsQuery:
    limit: int = LIMIT_DEFAULT
    window_ns: int = WINDOW_DEFAULT_NS
    id: str | None = None
    tenant: str | None = None
    model: str | None = None
    arm: str | None = None

    @classmethod
    def parse(cls, fields: Mapping[str, str]) -> "StreamsQuery":
        """Parse `limit`, `window` and filters. Raises BadQuery for an unknown name or an invalid value."""
        limit, window_ns = LIMIT_DEFAULT, WINDOW_DEFAULT_NS
        for field, value in fields.items():
            if field == "limit":
                limit = read_number(field, value, LIMIT_MAX)
            elif field == "window":
                window_ns = _window_ns(value)
            elif field not in _FILTERS:
                raise BadQuery(field, f"no such field; known: limit, window, {', '.join(_FILTERS)}")
        return cls(limit, window_ns, **{name: fields[name] for name in _FILTERS if name in fields})

    def matches(self, found: OpenExchange) -> bool:
        """Return whether the stream matches; tenant and model are known once the request has been read."""
        observer, arm = found
        x = observer.exchange
        return (
            x.call is None
            and (self.id is None or x.id == self.id)
            and (self.tenant is None or x.tenant == self.tenant)
            and (self.model is None or x.model == self.model)
            and (self.arm is None or arm == self.arm)
        )


@dataclass(frozen=True, slots=True)
class _Copied:
    about: dict[str, object]
    arrival_ns: int
    since_ns: int
    now_ns: int
    t_ns: "array[int]"
    tokens: "array[int]"
    flags: bytearray

    def to_dict(self) -> dict[str, object]:
        carries = [flags & OUTPUT for flags in self.flags]
        # A chunk without a declared number of tokens counts as one, as in the token source `chunks`.
        points = [
            (t, n if n >= 0 else 1) for t, n in compress(zip(self.t_ns, self.tokens, strict=True), carries)
        ]
        points = thinned(points, self.since_ns, self.now_ns)
        self.about["timeline"] = [(_seconds(t - self.arrival_ns), n) for t, n in points]
        return self.about


class Streams:
    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._assemblers: list[Assembler] = []
        self._lock = asyncio.Lock()

    def join(self, assembler: Assembler) -> None:
        self._assemblers.append(assembler)

    def leave(self, assembler: Assembler) -> None:
        self._assemblers.remove(assembler)

    def add_to(self, app: web.Application) -> None:
        app.router.add_get("/api/v1/streams", self._answer)

    async def find(self, query: StreamsQuery) -> list[_Copied]:
        found: list[_Copied] = []
        events_max = EVENTS_MAX // query.limit
        for looked, one in enumerate(self._newest_first(), 1):
            if query.matches(one):
                found.append(_copy(one, self._clock.mono_ns(), query.window_ns, events_max))
                if len(found) == query.limit:
                    break
            if looked % SLICE == 0:
                await asyncio.sleep(0)
        # Relays report requests in the order of the ends of their heads, which is nearly that of arrivals.
        found.sort(key=lambda copied: copied.arrival_ns, reverse=True)
        return found

    def _newest_first(self) -> Iterator[OpenExchange]:
        return merge(
            *(assembler.under_way() for assembler in self._assemblers),
            key=lambda one: -one[0].exchange.timeline.arrival_ns,
        )

    async def _answer(self, request: web.Request) -> web.Response:
        query = StreamsQuery.parse(read_fields(request.query.items()))
        async with self._lock:  # one answer's copies at a time
            found = await self.find(query)
            count = sum(map(len, self._assemblers))
            window_s = query.window_ns / NS_PER_S

            def work() -> bytes:
                told = [copied.to_dict() for copied in found]
                return msgspec.json.encode({"count": count, "window": window_s, "streams": told})

            body = await asyncio.to_thread(work)
        return web.Response(body=body, content_type="application/json")


def thinned(points: list[tuple[int, int]], since_ns: int, now_ns: int) -> list[tuple[int, int]]:
    """Return at most POINTS_MAX points of `(t_ns, tokens)` in order of time.

    If there are more, the span is cut into POINTS_MAX equal pieces, and each becomes one point: the time of
    its first event, the tokens of all. So no pause longer than a piece is hidden, and no token is lost.
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


def _copy(one: OpenExchange, now_ns: int, window_ns: int, events_max: int) -> _Copied:
    observer, arm = one
    now = observer.under_way()
    x = now.exchange
    t = x.timeline
    log = t.events
    since_ns = max(t.arrival_ns, now_ns - window_ns)
    start = max(bisect_left(log.t_ns, since_ns), len(log) - events_max)
    ttft = ttft_ns(t)
    about: dict[str, object] = {
        "id": x.id, "tenant": x.tenant, "model": x.model, "route": x.route, "arm": arm,
        "endpoint": x.endpoint, "dialect": now.dialect, "stream": now.stream,
        "age": _seconds(max(0, now_ns - t.arrival_ns)),
        "ttft": None if ttft is None else _seconds(ttft),
        "events": now.events, "tokens": now.tokens,
        "since_last": None if t.last_token_ns is None else _seconds(max(0, now_ns - t.last_token_ns)),
    }  # fmt: skip
    return _Copied(
        about, t.arrival_ns, since_ns, now_ns, log.t_ns[start:], log.tokens[start:], log.flags[start:]
    )


def _window_ns(text: str) -> int:
    try:
        window_ns = parse_duration_ns(text)
    except ValueError:
        window_ns = 0
    if not 0 < window_ns <= WINDOW_MAX_S * NS_PER_S:
        raise BadQuery("window", f"expected a duration up to {WINDOW_MAX_S}s such as 10s, got {shown(text)}")
    return window_ns


def _seconds(ns: int) -> float:
    return round(ns / NS_PER_S, 6)

"""Serve `/api/v1/live`: server-sent events with each finished exchange, and a summary each second.

`LiveFeed` is a sink of `pipeline/pipeline.py`: its `on_end` gets each exchange, and puts it in the queue of
each subscriber (an HTTP client). Events: `exchange`, `summary`, and `missed` (number of exchanges that a slow
subscriber did not get). The meter never waits for a subscriber. JSON is written in a worker thread. Source:
WHATWG HTML, "Server-sent events".
"""

import asyncio
from collections import deque
from typing import Any, Final

import msgspec
from aiohttp import hdrs, web

from llmtap.exchange.exchange import Exchange
from llmtap.export.sinks import SeriesKey
from llmtap.meter.admin.views import summary_of
from llmtap.meter.options import WINDOWS
from llmtap.meter.pipeline import exchanges as recent_api
from llmtap.meter.pipeline.pipeline import ExchangePipeline
from llmtap.metrics.catalogue import Surface, shown_on
from llmtap.metrics.latency import Measured

SUBSCRIBERS_MAX: Final = 32
"""Maximum number of subscribers, because each needs a connection and a queue."""
QUEUE_MAX: Final = 1_000
"""Maximum number of exchanges in the queue of a subscriber: some seconds of a busy gateway."""
QUEUE_BYTES_MAX: Final = 10 << 20
BATCH_MAX: Final = 200
BATCH_BYTES_MAX: Final = 2 << 20
"""Maximum memory of exchanges that are written together: about 3 MB of JSON, unless one exchange has more."""
BATCH_S: Final = 0.05
"""Exchanges that end within this time are written together, to save calls of a thread."""
SUMMARY_S: Final = 1.0
SUMMARY_WINDOW: Final = next(iter(WINDOWS))
KEEPALIVE_S: Final = 15.0
"""Time without events after which a comment is sent, because proxies close connections silent for 30 s."""
TENURE_S: Final = 60.0
"""Time after which a new subscriber can replace the oldest subscriber, if there are SUBSCRIBERS_MAX. Browsers
subscribe again by themselves, so no client can occupy all places permanently."""
STALLED_S: Final = 30.0
"""Time after which a subscriber that has data to read, but reads nothing, is disconnected."""
DISCONNECT_CHECK_S: Final = 1.0
"""Interval at which a stream without events checks whether its client has disconnected."""
CLOSING_S: Final = 1.0
RETRY_FIELD: Final = b"retry: 2000\n\n"

_KEY_METRICS: Final = tuple(metric.name for metric in shown_on(Surface.LIVE))
_KEY_STATISTICS: Final = ("n", "mean", "p50", "p95", "p99")
_KEY_FIGURES: Final = ("n", "window", "load", "outcomes", "tokens", "goodput", "smooth_goodput", "refusals")


class _Subscriber:
    """One client of `/api/v1/live`, with what is to be sent to it."""

    __slots__ = (
        "is_closed",
        "missed_count",
        "missed_total",
        "query",
        "queue",
        "start_s",
        "task",
        "wake_event",
        "wants_exchanges",
        "wants_summaries",
        "weight_bytes",
    )

    def __init__(self, query: recent_api.Query, *, summaries: bool, exchanges: bool) -> None:
        self.query = query
        self.wants_summaries = summaries
        self.wants_exchanges = exchanges
        self.queue: deque[tuple[Exchange, Measured, int]] = deque()
        """Exchanges that are to be sent, with their metrics and estimated sizes in bytes."""
        self.weight_bytes = 0
        """Estimated size of the queue as JSON, in bytes, for the limit QUEUE_BYTES_MAX."""
        self.missed_count = 0
        """Number of exchanges that did not fit in the queue since the latest `missed` event."""
        self.missed_total = 0
        """Number of exchanges that did not fit in the queue since the stream began."""
        self.wake_event = asyncio.Event()
        """Set when there is something to send."""
        self.is_closed = False
        self.start_s = asyncio.get_running_loop().time()
        self.task = asyncio.current_task()
        """Task that answers the request; it is cancelled if the stream does not end in time."""

    def offer(self, x: Exchange, m: Measured, weight: int) -> bool:
        """Add an exchange to the queue; return False if the queue is full."""
        full = len(self.queue) >= QUEUE_MAX
        if full or (self.queue and self.weight_bytes + weight > QUEUE_BYTES_MAX):
            self.missed_count += 1
            self.missed_total += 1
            return False
        self.queue.append((x, m, weight))
        self.weight_bytes += weight
        self.wake_event.set()
        return True

    def take(self) -> list[tuple[Exchange, Measured, int]]:
        """Remove the exchanges of the next event from the queue."""
        batch: list[tuple[Exchange, Measured, int]] = []
        weight = 0
        while self.queue and len(batch) < BATCH_MAX and weight < BATCH_BYTES_MAX:
            batch.append(self.queue.popleft())
            weight += batch[-1][2]
        self.weight_bytes -= weight
        return batch


class LiveFeed:
    """Sink that sends finished exchanges and summaries to the subscribers of `/api/v1/live`."""

    def __init__(self, pipeline: ExchangePipeline) -> None:
        self._pipeline = pipeline
        self._subscribers: set[_Subscriber] = set()
        self._is_closing = False
        """Whether the meter ends, so that all subscribers are disconnected."""
        self._summary_event = b""
        """Encoded `summary` event, which all subscribers share until the next one is due."""
        self._summary_due_s = 0.0
        """Time of the event loop from which the next request makes a new summary."""
        self._summary_lock = asyncio.Lock()

    def __len__(self) -> int:
        return len(self._subscribers)

    def add_to(self, app: web.Application) -> None:
        app.router.add_get("/api/v1/live", self.stream, allow_head=False)
        app.on_shutdown.append(self._close)
        self._pipeline.sinks.append(self)

    def on_end(self, x: Exchange, m: Measured, key: SeriesKey, met: bool | None) -> None:
        """Put a finished exchange in the queue of each subscriber whose filters match."""
        wanted = [one for one in self._subscribers if one.wants_exchanges and one.query.matches(x)]
        if not wanted:
            return
        weight = recent_api.weight_bytes(x)
        for subscriber in wanted:
            if not subscriber.offer(x, m, weight):
                self._pipeline.live_missed += 1

    async def stream(self, request: web.Request) -> web.StreamResponse:
        """Answer `/api/v1/live`: send events to a new subscriber until one side ends the stream.

        Raises BadQuery; raises HTTPServiceUnavailable if the meter ends, or there are too many subscribers.
        """
        query, summaries, exchanges = _read_query(request)
        if self._is_closing:
            raise web.HTTPServiceUnavailable(reason="the meter is shutting down: connect again later")
        if len(self._subscribers) >= SUBSCRIBERS_MAX and not self._close_oldest():
            raise web.HTTPServiceUnavailable(
                reason=f"{SUBSCRIBERS_MAX} live streams are open, the maximum: close one"
            )
        subscriber = _Subscriber(query, summaries=summaries, exchanges=exchanges)
        self._subscribers.add(subscriber)
        self._pipeline.subscribers = len(self._subscribers)
        response = web.StreamResponse(
            headers={
                hdrs.CONTENT_TYPE: "text/event-stream; charset=utf-8",
                hdrs.CACHE_CONTROL: "no-store",
                "X-Accel-Buffering": "no",  # an nginx in front of the admin port must not buffer events
            }
        )
        try:
            await response.prepare(request)
            await self._serve(request, response, subscriber)
        except (ConnectionError, TimeoutError):
            if request.transport is not None:
                request.transport.abort()
        finally:
            self._subscribers.discard(subscriber)
            self._pipeline.subscribers = len(self._subscribers)
        return response

    def _close_oldest(self) -> bool:
        """Disconnect the oldest subscriber; return False if none has been connected for TENURE_S."""
        now_s = asyncio.get_running_loop().time()
        oldest = min(self._subscribers, key=lambda one: one.start_s, default=None)
        if oldest is None or now_s - oldest.start_s < TENURE_S:
            return False
        self._pipeline.admin_limits["subscribers"] += 1
        self._subscribers.discard(oldest)
        oldest.is_closed = True
        oldest.wake_event.set()
        return True

    async def _serve(
        self, request: web.Request, response: web.StreamResponse, subscriber: _Subscriber
    ) -> None:
        """Send events to a subscriber until the stream ends."""
        loop = asyncio.get_running_loop()
        period_s = SUMMARY_S if subscriber.wants_summaries else KEEPALIVE_S
        due = loop.time()
        pieces = [RETRY_FIELD]
        while not subscriber.is_closed and request.transport is not None:
            if loop.time() >= due:
                due = loop.time() + period_s
                pieces.append(await self._periodic_event(subscriber))
            if subscriber.queue:
                batch = subscriber.take()
                pieces.append(await asyncio.to_thread(self._events_of, batch, events=subscriber.query.events))
            if subscriber.missed_count:
                counts = {"n": subscriber.missed_count, "total": subscriber.missed_total}
                pieces.append(_event_bytes("missed", counts))
                subscriber.missed_count = 0
            if pieces:
                async with asyncio.timeout(STALLED_S):
                    await response.write(b"".join(pieces))
                pieces = []
                await asyncio.sleep(BATCH_S)
            if not subscriber.queue:
                subscriber.wake_event.clear()
                try:
                    async with asyncio.timeout(min(DISCONNECT_CHECK_S, max(0.0, due - loop.time()))):
                        await subscriber.wake_event.wait()
                except TimeoutError:
                    pass
        await response.write_eof()

    async def _periodic_event(self, subscriber: _Subscriber) -> bytes:
        """Return what a subscriber is sent regularly: a summary, or a comment that keeps the connection
        open."""
        if not subscriber.wants_summaries:
            return b": keep-alive\n\n"
        loop = asyncio.get_running_loop()
        async with self._summary_lock:  # so that a summary is computed once for all subscribers
            if loop.time() >= self._summary_due_s:
                self._summary_due_s = loop.time() + SUMMARY_S / 2
                p = self._pipeline
                about = {
                    "open": p.open_exchanges,
                    "subscribers": p.subscribers,
                    "missed": p.live_missed,
                    "listen": p.relays.listen_url(),
                }
                work = summary_of(p, SUMMARY_WINDOW, by=())
                self._summary_event = await asyncio.to_thread(
                    lambda: _event_bytes("summary", {**about, **_key_figures(work())})
                )
            return self._summary_event

    async def _close(self, app: web.Application) -> None:
        """Close all streams at the end of the meter, with a short time limit."""
        if self._is_closing:
            return
        self._is_closing = True
        self._pipeline.sinks.remove(self)
        tasks = [s.task for s in self._subscribers if s.task is not None]
        for subscriber in self._subscribers:
            subscriber.is_closed = True
            subscriber.wake_event.set()
        if tasks:
            _, late = await asyncio.wait(tasks, timeout=CLOSING_S)
            for task in late:
                task.cancel()

    def _events_of(self, batch: list[tuple[Exchange, Measured, int]], *, events: bool) -> bytes:
        out = []
        for x, m, _ in batch:
            about = self._pipeline.recent_exchanges.describe(x, m)
            data = recent_api.encode_with_events(about, x)[0] if events else msgspec.json.encode(about)
            out.append(_frame_event("exchange", data))
        return b"".join(out)


def _read_query(request: web.Request) -> tuple[recent_api.Query, bool, bool]:
    fields = recent_api.read_fields(request.query.items())
    for field in ("limit", "next"):
        if field in fields:
            raise recent_api.BadQuery(
                field, "cannot be used with a live stream, which has no pages: leave it out"
            )
    summaries = recent_api.read_flag("summary", fields.pop("summary", "1"))
    exchanges = recent_api.read_flag("exchanges", fields.pop("exchanges", "1"))
    return recent_api.Query.parse(fields), summaries, exchanges


def _event_bytes(name: str, data: object) -> bytes:
    return _frame_event(name, msgspec.json.encode(data))


def _frame_event(name: str, data: bytes) -> bytes:
    # The data are one line of JSON (line ends in strings are escaped), so one `data:` field is enough.
    return b"event: %s\ndata: %s\n\n" % (name.encode(), data)


def _key_figures(summary: dict[str, Any]) -> dict[str, object]:
    """Return the few figures of a summary that the feed sends."""
    metrics = summary["metrics"]
    return {
        **{name: summary[name] for name in _KEY_FIGURES},
        "metrics": {
            name: {statistic: metrics[name][statistic] for statistic in _KEY_STATISTICS}
            for name in _KEY_METRICS
        },
        "uncertainty": summary["uncertainty"],
    }

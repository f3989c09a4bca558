"""Poll the admin API for the open view; keep the newest answers, their age, and the last error.

`app.py` calls `Feed.poll` in a loop, and `exchange` and `stream` for the events of one exchange. Only the
summary and what the open view needs are requested. After an error the pauses between attempts grow to 3 s,
and the last answers stay, with their age.
"""

import asyncio
from enum import StrEnum
from typing import Final

from llmtap.clock import Clock
from llmtap.top.client import Admin, Document, NotThere, Trouble
from llmtap.top.table import clock_time
from llmtap.top.views import STREAMS, Shown, View
from llmtap.units import NS_PER_S

RETRY_NS: Final = (1 * NS_PER_S, 2 * NS_PER_S, 3 * NS_PER_S)
"""Pauses before the next attempts; the last one repeats."""
STALE_NS: Final = 3 * NS_PER_S
"""Age from which figures are marked, if it is also more than three intervals."""
STREAM_WINDOW: Final = "60s"
"""Time of a running stream that is shown chunk by chunk: the maximum of the API."""

PAGES_MAX: Final = 16
"""Maximum number of answers read for one exchange: 64 MiB."""


class FeedLink(StrEnum):
    CONNECTING = "CONNECTING"
    LIVE = "LIVE"
    STALE = "STALE"
    DISCONNECTED = "DISCONNECTED"
    PAUSED = "PAUSED"


class Feed:
    """Answers of one admin port: one task polls, the screen reads.

    `interval_ns`: time between an answer and the next request.
    """

    def __init__(self, admin: Admin, clock: Clock, *, window: str, interval_ns: int) -> None:
        self._admin = admin
        self._clock = clock
        self._interval_ns = interval_ns
        self.window = window
        self.paused = False
        self.shown = Shown()
        self.trouble: str | None = None
        self._tries = 0
        self._fetched_ns: int | None = None
        self._fetched_wall_ns = 0
        self._lost_ns = 0
        self._due_ns = 0

    async def poll(self, view: View) -> None:
        now_ns = self._clock.mono_ns()
        try:
            summary = await self._admin.get("summary", window=self.window, by=view.by)
            if not isinstance(summary.get("metrics"), dict):
                raise Trouble("the server is no admin port of llmtap: its answer is no summary")
            beside: Document | None = None
            if view.path is not None:
                try:
                    beside = await self._admin.get(view.path, **view.query)
                except NotThere:
                    beside = None
        except Trouble as exc:
            if not self._tries:
                self._lost_ns = now_ns
            self.trouble = str(exc)
            self._due_ns = self._clock.mono_ns() + RETRY_NS[min(self._tries, len(RETRY_NS) - 1)]
            self._tries += 1
            return
        self.shown.summary = summary
        if view.path is not None:
            self.shown.beside[view.path] = beside
        self.trouble, self._tries = None, 0
        self._fetched_ns, self._fetched_wall_ns = self._clock.mono_ns(), self._clock.wall_ns()
        self._due_ns = self._fetched_ns + self._interval_ns

    async def exchange(self, id_: str) -> Document | None:
        """Return one exchange with its events; None if it is not kept any more. Raises Trouble."""
        query = {"id": id_, "events": "1", "limit": "1"}
        whole: Document | None = None
        for _ in range(PAGES_MAX):
            told = await self._admin.get("exchanges", **query)
            found, cursor = told.get("exchanges"), told.get("next")
            part = found[0] if isinstance(found, list) and found else None
            if not isinstance(part, dict) or not isinstance(part.get("events"), list):
                break
            if whole is None:
                whole = part
            else:
                whole["events"] += part["events"]
            if not isinstance(cursor, str):
                break
            query["next"] = cursor
        return whole

    async def stream(self, id_: str) -> Document | None:
        """Return a running exchange; None if it does not run. Raises Trouble."""
        found = (await self._admin.get(STREAMS, id=id_, limit="1", window=STREAM_WINDOW)).get("streams")
        first = found[0] if isinstance(found, list) and found else None
        return first if isinstance(first, dict) and first.get("id") == id_ else None

    async def wait(self, woken: asyncio.Event) -> None:
        """Wait until the next request is due, or is wanted now."""
        seconds = max(0, self._due_ns - self._clock.mono_ns()) / NS_PER_S
        try:
            async with asyncio.timeout(None if self.paused else seconds):
                await woken.wait()
        except TimeoutError:
            pass

    @property
    def link(self) -> FeedLink:
        if self.paused:
            return FeedLink.PAUSED
        if self.trouble is not None:
            return FeedLink.DISCONNECTED
        if self._fetched_ns is None:
            return FeedLink.CONNECTING
        old_ns = self._clock.mono_ns() - self._fetched_ns
        return FeedLink.STALE if old_ns > max(STALE_NS, 3 * self._interval_ns) else FeedLink.LIVE

    def said(self) -> str:
        now_ns, link = self._clock.mono_ns(), self.link
        of = f"figures of {self.time()}" if self._fetched_ns is not None else "no figures yet"
        match link:
            case FeedLink.DISCONNECTED:
                lost_s, left_s = (now_ns - self._lost_ns) // NS_PER_S, (self._due_ns - now_ns) / NS_PER_S
                again = f"again in {left_s:.0f} s" if left_s >= 0.5 else "trying"
                return f"{link} {lost_s} s: {self.trouble}; {again}; {of}"
            case FeedLink.STALE:
                return f"{link}: no answer for {(now_ns - (self._fetched_ns or now_ns)) // NS_PER_S} s; {of}"
            case FeedLink.PAUSED if self.trouble is not None:
                return f"{link}; the last request failed: {self.trouble}; {of}"
            case FeedLink.CONNECTING:
                return f"{link}"
            case _:
                return f"{link} {self.time()}"

    def time(self) -> str:
        return clock_time(self._fetched_wall_ns / NS_PER_S)

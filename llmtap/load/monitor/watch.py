"""Monitor a load run: sample this host, and scrape the server's `/metrics` once per second.

`Replay` (and `llmtap bench exo`) starts `LoadMonitor` before the load and gets `TimeSeries` at its end; the
samples of the host are taken in `system.py`. The time of a scrape is the middle of its request. If the user
gave no URL (`optional`) and the first answer has no known metrics, scraping stops: the target is possibly a
relay, whose capture would contain all further scrapes.
"""

import asyncio
import os
import ssl
from collections import Counter
from collections.abc import Mapping
from typing import Any, Final
from urllib.parse import urlsplit

import aiohttp

from llmtap.clock import Clock
from llmtap.load.monitor.system import SystemSampler
from llmtap.load.monitor.timeseries import Columns, ScrapeReport, Ticks, TimeSeries
from llmtap.load.sending import shown_url
from llmtap.net.server_metrics import (
    ACCEPT,
    SCRAPE_ERRORS,
    SERIES,
    failure_reason,
    metrics_url,
    read_body,
    read_metrics_in_thread,
)
from llmtap.units import NS_PER_S, to_seconds

FAILURE_REASONS_MAX: Final = 8
"""Maximum number of different reasons that are counted; further reasons are counted as `other`."""
TIMEOUT_NS: Final = 5 * NS_PER_S


class ServerScraper:
    """Scrapes the server's metrics from `start()` to `close()`, on the running loop."""

    def __init__(
        self,
        url: str,
        clock: Clock,
        *,
        period_ns: int = NS_PER_S,
        timeout_ns: int = TIMEOUT_NS,
        headers: Mapping[str, str] | None = None,
        tls: ssl.SSLContext | None = None,
        optional: bool = False,
    ) -> None:
        """`headers` can contain an API key, so they are never reported. `tls` replaces the CAs of the system.
        `optional`: stop after an answer without known metrics."""
        assert period_ns > 0
        self._url = url
        self._clock = clock
        self._period_ns = period_ns
        self._timeout_ns = timeout_ns
        self._headers = {**ACCEPT, **(headers or {})}
        self._tls: ssl.SSLContext | bool = True if tls is None else tls
        self._is_optional = optional
        """Whether to give up without a finding if the server has no metrics."""
        self._is_answered = False
        """Whether the server answered the latest scrape, in any way."""
        self._has_given_up = False
        """Whether scraping ended because the server has no metrics."""
        self._skipped_scrapes = 0
        self._failures: Counter[str] = Counter()
        """By reason: number of failed scrapes."""
        self._scrape_task: asyncio.Task[None] | None = None
        self._session: aiohttp.ClientSession | None = None
        self.columns = Columns(SERIES)

    def start(self) -> None:
        assert self._scrape_task is None, "start() must be called only once"
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=1), timeout=aiohttp.ClientTimeout(total=None)
        )
        self._scrape_task = asyncio.create_task(self._run())

    async def close(self) -> None:
        """Scrape once more, so that the counters include the end of the run, and stop."""
        if self._scrape_task is None or self._session is None:
            return
        task, self._scrape_task = self._scrape_task, None
        task.cancel()
        try:
            await asyncio.gather(task, return_exceptions=True)
            # Limit the time of the final scrape: a server that hangs must not delay the end of the run.
            if not self._has_given_up:
                await self._scrape(min(self._timeout_ns, self._period_ns))
        finally:
            await self._session.close()
        self.columns.close()

    def report(self) -> ScrapeReport:
        return ScrapeReport(
            url=None if self._session is None else shown_url(self._url),
            gave_up=self._has_given_up,
            period=to_seconds(self._period_ns),
            scrapes=len(self.columns) + self.columns.dropped + self._failures.total(),
            skipped=self._skipped_scrapes,
            failed=self._failures.total(),
            failures=dict(self._failures),
            missing=sorted(SERIES.keys() - set(self.columns.known_series())) if len(self.columns) else [],
        )

    async def _run(self) -> None:
        ticks = Ticks(self._clock.mono_ns(), self._period_ns)
        while True:
            await self._scrape(self._timeout_ns)
            if self._is_optional and self._is_answered and not len(self.columns):
                self._has_given_up = True
                return
            wait_s, skipped = ticks.next_wait(self._clock.mono_ns())
            self._skipped_scrapes += skipped
            await asyncio.sleep(wait_s)

    async def _scrape(self, timeout_ns: int) -> None:
        assert self._session is not None
        self._is_answered = False
        before_ns = self._clock.mono_ns()
        try:
            async with asyncio.timeout(to_seconds(timeout_ns)):
                async with self._session.get(self._url, headers=self._headers, ssl=self._tls) as response:
                    self._is_answered = True
                    body = await read_body(response)
            after_ns = self._clock.mono_ns()
            values = await read_metrics_in_thread(body)
        except SCRAPE_ERRORS as exc:
            self._count_failure(failure_reason(exc))
            return
        if not values:
            self._count_failure("the page has no metric of vLLM, SGLang, TGI or llm-d")
            return
        self.columns.add((before_ns + after_ns) // 2, after_ns - before_ns, values)

    def _count_failure(self, reason: str) -> None:
        """Count a failed scrape by its reason; further reasons are counted as `other`."""
        is_listed = reason in self._failures or len(self._failures) < FAILURE_REASONS_MAX
        self._failures[reason if is_listed else "other"] += 1


class LoadMonitor:
    """Monitors host and server from `start()` to `close()`. A failure of the monitor never ends the run."""

    def __init__(
        self,
        clock: Clock,
        target: str,
        *,
        period_ns: int = NS_PER_S,
        metrics: str | None = None,
        scrape: bool = True,
        headers: Mapping[str, str] | None = None,
        tls: ssl.SSLContext | None = None,
        nvml: Any = None,
    ) -> None:
        """Monitor a load on the URL `target`.

        The sender is this process; the server is the process that listens at a loopback target. Opens NVML,
        which can take a second. `metrics`: URL to scrape with `headers` and `tls` (default: `/metrics` of the
        target).
        """
        url = urlsplit(target)
        port = url.port or (443 if url.scheme == "https" else 80)
        self._system = SystemSampler(
            clock, sender=[os.getpid()], target=(url.hostname or "", port), period_ns=period_ns, nvml=nvml
        )
        self._scrapes_server = scrape
        """Whether to read the server's metrics."""
        self._scraper = ServerScraper(
            metrics or metrics_url(target),
            clock,
            period_ns=period_ns,
            headers=headers,
            tls=tls,
            optional=metrics is None,
        )

    def start(self) -> None:
        self._system.start()
        if self._scrapes_server:
            self._scraper.start()

    def latest(self) -> dict[str, float]:
        return {**self._system.columns.latest(), **self._scraper.columns.latest()}

    async def close(self, start_ns: int) -> TimeSeries:
        """Take the final samples and stop. `start_ns`: start of the run on the monotonic clock."""
        await self._scraper.close()
        await asyncio.to_thread(self._system.close)  # This call can wait for a GPU driver.
        sampling = self._system.report(self._scraper.report())
        return TimeSeries(start_ns, self._system.columns, self._scraper.columns, sampling)

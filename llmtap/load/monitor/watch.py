"""A run watched while it lasts: samples of this host and the server's own metrics, as one result."""

import asyncio
import os
import ssl
from collections.abc import Iterable, Mapping
from typing import Any
from urllib.parse import urlsplit

from llmtap.clock import Clock
from llmtap.load.monitor.server_metrics import ServerScraper, metrics_url
from llmtap.load.monitor.system import SystemSampler
from llmtap.load.monitor.timeseries import TimeSeries
from llmtap.units import NS_PER_S

__all__ = ["Watch"]


class Watch:
    """Watches from `start()` to `close()`. Nothing that goes wrong in it ends a run."""

    def __init__(
        self,
        clock: Clock,
        target: str,
        *,
        sender: Iterable[int] | None = None,
        server: Iterable[int] = (),
        period_ns: int = NS_PER_S,
        metrics: str | None = None,
        scrape: bool = True,
        headers: Mapping[str, str] | None = None,
        tls: ssl.SSLContext | None = None,
        nvml: Any = None,
    ) -> None:
        """Of a load on the URL `target`. Opens NVML, which may take a second.

        `sender` are its processes, by default this one, and `server` those of the server; descendants count
        with both. Without `server` it is who listens at the target, where that is on loopback. `metrics` is
        the URL of the server's metrics, by default `/metrics` of the target's host and port, which is asked
        only once where it has none; `headers` go there, and `tls` verifies https; without `scrape`
        nobody is asked.
        """
        url = urlsplit(target)
        port = url.port or (443 if url.scheme == "https" else 80)
        self._system = SystemSampler(
            clock, sender=[os.getpid()] if sender is None else sender, server=server,
            target=(url.hostname or "", port), period_ns=period_ns, nvml=nvml,
        )  # fmt: skip
        self._scrape = scrape
        self._scraper = ServerScraper(
            metrics or metrics_url(target), clock, period_ns=period_ns, headers=headers, tls=tls,
            optional=metrics is None,
        )  # fmt: skip

    def start(self) -> None:
        """On the running loop; the first samples are taken at once."""
        self._system.start()
        if self._scrape:
            self._scraper.start()

    def latest(self) -> dict[str, float]:
        """The last sample of each kind, for a display; a series that is not known is left out."""
        return {**self._system.columns.latest(), **self._scraper.columns.latest()}

    async def close(self, start_ns: int) -> TimeSeries:
        """Take the last samples and end. `start_ns` is when the run began, on the monotonic clock."""
        await self._scraper.close()
        await asyncio.to_thread(self._system.close)  # it may wait for a GPU's driver
        about = {**self._system.about(), "scrape": self._scraper.about()}
        return TimeSeries(start_ns, self._system.columns, self._scraper.columns, about)

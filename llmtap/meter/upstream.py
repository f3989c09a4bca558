"""Scrape the `/metrics` of the inference server (vLLM, SGLang, TGI) or llm-d's router every 5 s.

`UpstreamLoad` keeps the values of the last scrape for the summary of the admin API and the meter's own
`/metrics`; `net/server_metrics.py` parses them. After a failed scrape there are no values. Counters restart
with the upstream.
"""

import asyncio
from typing import Any, Final

import aiohttp

from llmtap.net.server_metrics import ACCEPT, SCRAPE_ERRORS, failure_reason, read_body, read_metrics

PERIOD_S: Final = 5.0
TIMEOUT_S: Final = 4.0


class UpstreamLoad:
    def __init__(self, url: str) -> None:
        """`url`: of the metrics. It may hold a key: never reported."""
        self._url = url
        self.values: dict[str, float] = {}
        """By the names of `net.server_metrics.SERIES`; empty after a failure."""
        self.failures = 0
        self.problem: str | None = None

    async def run(self) -> None:
        timeout = aiohttp.ClientTimeout(total=TIMEOUT_S)
        async with aiohttp.ClientSession(timeout=timeout, headers=ACCEPT) as session:
            while True:
                await self._scrape(session)
                await asyncio.sleep(PERIOD_S)

    async def _scrape(self, session: aiohttp.ClientSession) -> None:
        try:
            async with session.get(self._url) as response:
                values = read_metrics(await read_body(response))
            problem = None if values else "no metric of vLLM, SGLang or TGI"
        except SCRAPE_ERRORS as exc:
            values, problem = {}, failure_reason(exc)
        self.values, self.problem = values, problem
        self.failures += problem is not None

    def to_dict(self) -> dict[str, Any]:
        return {"values": dict(self.values), "failures": self.failures, "problem": self.problem}

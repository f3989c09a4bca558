"""Monitor a run: samples of this host, and the server's own `/metrics` once per second.

The metric names of vLLM, SGLang, TGI and llm-d's router are mapped to ours, former ones too; other lines are
not parsed, so a scrape is cheap.
A sample is stamped with the middle of its request. A failed scrape is counted and never ends a run. Without
an explicit URL (`optional`), a target that answers without metrics is asked once: it may be a relay, and
further requests would be traffic in somebody's capture.

Meanings differ (metrics/DEFINITIONS.md, "Metrics of servers"): vLLM counts generated tokens as it makes them,
SGLang and `llmtap sim` at the end of an answer, so that their rates come in steps.

Sources: vLLM, vllm/v1/metrics/loggers.py, docs/usage/metrics.md, pull requests 29330 and 32661 (removed
names); SGLang, python/sglang/srt/metrics/collector.py and its "Production Metrics"; TGI, "Metrics" of its
reference; llm-d-router, docs of its metrics (prefix `llm_d_epp_`).
"""

import asyncio
import os
import ssl
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from math import inf
from typing import Any, Final
from urllib.parse import urlsplit, urlunsplit

import aiohttp
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from llmtap.clock import Clock
from llmtap.load.monitor.system import SystemSampler
from llmtap.load.monitor.timeseries import Columns, MonitorSeries, Ticks, TimeSeries
from llmtap.load.target import shown_url
from llmtap.net.failures import failure_said
from llmtap.units import NS_PER_S, to_seconds

__all__ = ["SERIES", "ServerScraper", "Watch", "metrics_url", "read_metrics"]


BODY_BYTES_MAX: Final = 16 << 20
"""A vLLM server with 8 engines sends about 2 MB."""
REASONS_MAX: Final = 8
TIMEOUT_NS: Final = 5 * NS_PER_S


_MAP: Final[dict[str, tuple[MonitorSeries, str, str]]] = {
    "running": (
        MonitorSeries("requests"),
        "vllm:num_requests_running sglang:num_running_reqs tgi_batch_current_size", "sum",
    ),
    "waiting": (
        MonitorSeries("requests"), "vllm:num_requests_waiting sglang:num_queue_reqs tgi_queue_size", "sum",
    ),
    # vLLM renamed its own in 0.9 and removed the former.
    "kv_use": (
        MonitorSeries("share"),
        ("vllm:kv_cache_usage_perc vllm:gpu_cache_usage_perc sglang:token_usage"
         " llm_d_epp_average_kv_cache_utilization"), "mean",
    ),
    # SGLang looks for all tokens of a prompt.
    "prefix_queries": (
        MonitorSeries("tokens", "counter"),
        "vllm:prefix_cache_queries_total vllm:gpu_prefix_cache_queries_total sglang:prompt_tokens_total",
        "sum",
    ),
    "prefix_hits": (
        MonitorSeries("tokens", "counter"),
        "vllm:prefix_cache_hits_total vllm:gpu_prefix_cache_hits_total sglang:cached_tokens_total", "sum",
    ),
    "preemptions": (
        MonitorSeries("requests", "counter"),
        "vllm:num_preemptions_total sglang:num_retracted_requests_total", "sum",
    ),
    # TGI and llm-d's router count tokens only as the sums of their histograms.
    "prompt_tokens": (
        MonitorSeries("tokens", "counter"),
        ("vllm:prompt_tokens_total sglang:prompt_tokens_total tgi_request_input_length_sum"
         " llm_d_epp_request_input_tokens_sum"), "sum",
    ),
    "generation_tokens": (
        MonitorSeries("tokens", "counter"),
        ("vllm:generation_tokens_total sglang:generation_tokens_total tgi_request_generated_tokens_sum"
         " llm_d_epp_request_output_tokens_sum"), "sum",
    ),
    # The server's own times: a mean is the growth of the first by that of the second.
    "ttft_seconds": (
        MonitorSeries("seconds", "counter"),
        ("vllm:time_to_first_token_seconds_sum sglang:time_to_first_token_seconds_sum"
         " llm_d_epp_request_ttft_seconds_sum"), "sum",
    ),
    "ttft_values": (
        MonitorSeries("requests", "counter"),
        ("vllm:time_to_first_token_seconds_count sglang:time_to_first_token_seconds_count"
         " llm_d_epp_request_ttft_seconds_count"), "sum",
    ),
    "itl_seconds": (
        MonitorSeries("seconds", "counter"),
        ("vllm:inter_token_latency_seconds_sum vllm:time_per_output_token_seconds_sum"
         " sglang:inter_token_latency_seconds_sum llm_d_epp_request_streaming_itl_seconds_sum"), "sum",
    ),
    "itl_values": (
        MonitorSeries("gaps", "counter"),
        ("vllm:inter_token_latency_seconds_count vllm:time_per_output_token_seconds_count"
         " sglang:inter_token_latency_seconds_count llm_d_epp_request_streaming_itl_seconds_count"), "sum",
    ),
}  # fmt: skip
"""Our series, the names it is read from (the first one present counts), and how engines are combined."""
SERIES: Final = {name: series for name, (series, _, _) in _MAP.items()}
_WANTED: Final = tuple({name.encode() for _, names, _ in _MAP.values() for name in names.split()})
_COPIES: Final = ("tp_rank", "pp_rank", "moe_ep_rank")
"""Labels of SGLang's ranks of one engine, which report the same value."""


def metrics_url(target: str) -> str:
    """Return the URL of the metrics of the server at `target`: at the root, as all three have it."""
    url = urlsplit(target)
    return urlunsplit((url.scheme, url.netloc, "/metrics", "", ""))


def read_metrics(body: bytes) -> dict[str, float]:
    """Read our series (names of `SERIES`) from an exposition. Raises ValueError if it cannot be parsed."""
    lines = [line for line in body.splitlines() if line.startswith(_WANTED)]
    text = b"\n".join([*lines, b""]).decode()
    found: dict[str, list[Sample]] = {}
    try:
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                found.setdefault(sample.name, []).append(sample)
    except IndexError as exc:  # so the parser says that a line ends too soon
        raise ValueError("a line is cut") from exc
    values = {}
    for ours, (_, names, how) in _MAP.items():
        name = next((name for name in names.split() if name in found), None)
        if name is not None:
            value = _over_engines(found[name], how)
            if 0 <= value < inf:  # NaN is neither
                values[ours] = value
    return values


class ServerScraper:
    """Scrapes from `start()` to `close()`, on the running loop."""

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
        """`headers` may hold a key: never reported. `tls` replaces the system's trust. `optional`: stop after
        an answer without known metrics."""
        assert period_ns > 0
        self._url = url
        self._clock = clock
        self._period_ns = period_ns
        self._timeout_ns = timeout_ns
        self._headers = {"Accept": "text/plain;version=0.0.4", **(headers or {})}
        self._tls: ssl.SSLContext | bool = True if tls is None else tls
        self._optional = optional
        self._answered = False
        """The latest scrape was answered."""
        self._gave_up = False
        self._skipped = 0
        self._failures: Counter[str] = Counter()
        self._task: asyncio.Task[None] | None = None
        self._session: aiohttp.ClientSession | None = None
        self.columns = Columns(SERIES)

    def start(self) -> None:
        """Scrape now, then each period."""
        assert self._task is None, "started once"
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=1), timeout=aiohttp.ClientTimeout(total=None)
        )
        self._task = asyncio.create_task(self._run())

    async def close(self) -> None:
        """Scrape once more, so that counters end with the run, and stop."""
        if self._task is None or self._session is None:
            return
        task, self._task = self._task, None
        task.cancel()
        try:
            await asyncio.gather(task, return_exceptions=True)
            # The end of a run does not wait for a server that hangs.
            if not self._gave_up:
                await self._scrape(min(self._timeout_ns, self._period_ns))
        finally:
            await self._session.close()
        self.columns.close()

    def about(self) -> dict[str, Any]:
        return {
            "url": None if self._session is None else shown_url(self._url),
            "gave_up": self._gave_up,
            "period": to_seconds(self._period_ns),
            "scrapes": len(self.columns) + self.columns.dropped + self._failures.total(),
            "skipped": self._skipped,
            "failed": self._failures.total(),
            "failures": dict(self._failures),
            "missing": sorted(SERIES.keys() - set(self.columns.known())) if len(self.columns) else [],
        }

    async def _run(self) -> None:
        ticks = Ticks(self._clock.mono_ns(), self._period_ns)
        while True:
            await self._scrape(self._timeout_ns)
            if self._optional and self._answered and not len(self.columns):
                self._gave_up = True
                return
            wait_s, skipped = ticks.next(self._clock.mono_ns())
            self._skipped += skipped
            await asyncio.sleep(wait_s)

    async def _scrape(self, timeout_ns: int) -> None:
        self._answered = False
        before_ns = self._clock.mono_ns()
        try:
            async with asyncio.timeout(to_seconds(timeout_ns)):
                body = await self._ask()
            after_ns = self._clock.mono_ns()
            values = read_metrics(body)
        except (aiohttp.ClientError, OSError, TimeoutError, ValueError) as exc:
            self._fail(_reason(exc))
            return
        if not values:
            self._fail("no metric of vLLM, SGLang, TGI or llm-d")
            return
        self.columns.add((before_ns + after_ns) // 2, after_ns - before_ns, values)

    async def _ask(self) -> bytes:
        assert self._session is not None
        async with self._session.get(self._url, headers=self._headers, ssl=self._tls) as response:
            self._answered = True
            if response.status != 200:
                raise ValueError(f"status {response.status}")
            body = bytearray()
            async for piece in response.content.iter_any():
                body += piece
                if len(body) > BODY_BYTES_MAX:
                    raise ValueError(f"more than {BODY_BYTES_MAX >> 20} MiB")
            return bytes(body)

    def _fail(self, reason: str) -> None:
        kept = reason in self._failures or len(self._failures) < REASONS_MAX
        self._failures[reason if kept else "other"] += 1


def _over_engines(samples: Sequence[Sample], how: str) -> float:
    """Combine the values of several engines (label `engine` or `dp_rank`) and models."""
    # With priorities, SGLang says the total under an empty one beside each priority's own.
    totals = [sample for sample in samples if sample.labels.get("priority") == ""]
    engines: dict[frozenset[tuple[str, str]], float] = {}
    for sample in totals or samples:
        at = frozenset((name, value) for name, value in sample.labels.items() if name not in _COPIES)
        engines[at] = max(engines.get(at, sample.value), sample.value)
    total = sum(engines.values())
    return total if how == "sum" else total / len(engines)


def _reason(exc: Exception) -> str:
    """Return the reason in words that repeat with the failure."""
    if isinstance(exc, TimeoutError):
        return "no answer in time"
    if isinstance(exc, aiohttp.InvalidURL):
        return "no URL"
    if isinstance(exc, aiohttp.ClientError):
        return failure_said(exc)
    if isinstance(exc, UnicodeDecodeError):
        return "not text"
    text = str(exc)
    return text if text.startswith(("status ", "more than ")) else "not Prometheus' text"


class Watch:
    """Monitors from `start()` to `close()`. No failure in it ends a run."""

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
        """Monitor a load on the URL `target`. Opens NVML, which may take a second.

        Args:
            sender, server: pids, including descendants; by default this process, and who listens at a
                loopback target.
            metrics: URL of the server's metrics; by default `/metrics` of the target, `optional`.
            scrape: False: no metrics.
            headers, tls: for the metrics' URL.
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
        """Start on the running loop; the first samples are taken at once."""
        self._system.start()
        if self._scrape:
            self._scraper.start()

    def latest(self) -> dict[str, float]:
        return {**self._system.columns.latest(), **self._scraper.columns.latest()}

    async def close(self, start_ns: int) -> TimeSeries:
        """Take the last samples and stop. `start_ns`: start of the run (mono)."""
        await self._scraper.close()
        await asyncio.to_thread(self._system.close)  # it may wait for a GPU's driver
        about = {**self._system.about(), "scrape": self._scraper.about()}
        return TimeSeries(start_ns, self._system.columns, self._scraper.columns, about)

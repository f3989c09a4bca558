"""Measure the error of llmtap's own TTFT and ITL on this host, with an embedded server of known send times.

The server in this process responds to the load generator's processes and logs the time of every write by the
same clock. The true ITL is the time between two writes; the true TTFT is the time from the submission of the
request to the first write. The time of submission is the load generator's timestamp, or the time at which the
server read the request if that is earlier. The self-test is used by `llmtap selftest`, and after `llmtap
replay` and each test of `llmtap bench` with a load of the same density. Source: IETF draft, 4.7.
"""

import math
from array import array
from collections.abc import Iterable, Mapping
from typing import Any, Final
from urllib.parse import urlsplit

import msgspec
from aiohttp import web

from llmtap.exchange.exchange import Exchange
from llmtap.load.options import LoadPlan
from llmtap.load.replay.perform import Replay
from llmtap.load.replay.plan import ReplayPlan
from llmtap.metrics.latency import output_times_ns, tbc_ns, ttft_ns
from llmtap.metrics.statistics import percentile
from llmtap.net.listener import bind
from llmtap.sim.server.options import SimOptions
from llmtap.sim.server.server import SimServer
from llmtap.sim.server.truth import Truth
from llmtap.units import NS_PER_S, Duration, to_seconds
from llmtap.workload.requests import Requests

STREAMS_MAX: Final = 256
EVENTS_MAX: Final = 4_000
"""Maximum number of events per second, so that the embedded server can send each of them on time."""
TTFT: Final = Duration(50_000_000)
SPREAD: Final = 0.3
"""Relative variation of TTFT and ITL between responses, so that streams do not write at the same time."""
ANSWER_NS: Final = NS_PER_S
"""Planned duration of a response."""
TIMEOUT: Final = Duration(30 * NS_PER_S)


class SelftestLoad(msgspec.Struct, frozen=True, kw_only=True):
    """Load of a self-test: number of concurrent streams, time between their tokens, approximate duration."""

    streams: int = 32
    itl: Duration = Duration(20_000_000)
    """Time between the tokens of a stream."""
    duration: Duration = Duration(3 * NS_PER_S)
    processes: int = 1
    """Number of processes of the load generator."""


class TimeErrors(msgspec.Struct, frozen=True):
    """Percentiles and maximum of the absolute errors of `n` measured times, in seconds; None if `n` is 0."""

    n: int
    p50: float | None
    p99: float | None
    max: float | None


class SelftestDensity(msgspec.Struct, frozen=True):
    """Load that a self-test sent, and its measured rate of output tokens; times in seconds."""

    streams: int
    itl: float
    """Time between the tokens of a stream, in seconds."""
    processes: int
    tokens_per_second: float | None
    duration: float
    """Time in which the load was sent, in seconds."""


class MeasurementErrors(msgspec.Struct, frozen=True, kw_only=True):
    """Errors of the times that llmtap measured, compared with the simulated server's own."""

    n: int
    """Number of exchanges."""
    unmatched: int
    """Number of exchanges that were not compared, because the server's log has no matching entry."""
    ttft: TimeErrors
    itl: TimeErrors


class SelftestResult(MeasurementErrors, frozen=True, kw_only=True):
    """Public JSON of a self-test of the load generator."""

    load: SelftestDensity
    uncertainty: float | None
    """Uncertainty of the times as the load generator itself reports it, in seconds."""
    server_late_max: float
    """Largest delay of a write of the embedded server after its planned time, in seconds."""


def selftest_load(result: Mapping[str, Any], target: str, *, processes: int = 1) -> SelftestLoad | None:
    """Return a self-test load with as many concurrent streams and the same ITL as a replay had on average.

    The number of streams follows from Little's law. None if the replay received no HTTP streams."""
    metrics, load = result["metrics"], result["load"]
    e2e, itl = metrics["e2e"]["mean"], metrics["tbc"]["mean"]
    if urlsplit(target).scheme not in ("http", "https") or not itl or e2e is None:
        return None
    streams = max(1, math.ceil((load["achieved_rps"] or 0) * e2e))
    return SelftestLoad(
        streams=min(streams, STREAMS_MAX, max(1, int(EVENTS_MAX * itl))),
        itl=Duration(max(1_000_000, min(ANSWER_NS // 4, round(itl * NS_PER_S)))),
        duration=Duration(NS_PER_S),
        processes=processes,
    )


async def run_selftest(load: SelftestLoad) -> SelftestResult:
    """Run the self-test. The caller must run nothing else in the event loop: it would delay the events."""
    tokens = max(2, round((ANSWER_NS - TTFT) / load.itl))
    server = SimServer(SimOptions(ttft=TTFT, itl=load.itl, tokens=tokens, spread=SPREAD))
    runner = web.AppRunner(server.app, access_log=None)
    await runner.setup()
    sock = bind("127.0.0.1", 0, shared=False)
    try:
        await web.SockSite(runner, sock).start()
        n = load.streams * max(1, round(load.duration / ANSWER_NS))
        body = {"model": "sim", "stream": True, "messages": [{"role": "user", "content": "self-test"}]}
        requests = Requests(
            array("q", bytes(8 * n)),
            array("q", bytes(8 * n)),
            array("q", bytes(8 * n)),
            bodies=[msgspec.json.encode(body)] * n,
        )
        plan = LoadPlan.of(
            closed=load.streams,
            url=f"http://127.0.0.1:{sock.getsockname()[1]}",
            server="openai",
            model="sim",
            timeout=TIMEOUT,
            connect_timeout=TIMEOUT,
            processes=load.processes,
            scrape="none",
        )
        exchanges: list[Exchange] = []
        listener: Any = _SilentListener()
        replay = Replay(ReplayPlan(requests, None, {}), plan, listener)
        replay.start_recording = lambda _: lambda row, x: exchanges.append(x)
        result = await replay.run()
        truths: list[Truth] = []
        while page := server.reception.truths.page_since(len(truths)).truths:
            truths += page
    finally:
        await runner.cleanup()
    return SelftestResult(
        **msgspec.structs.asdict(measurement_errors(exchanges, truths)),
        load=SelftestDensity(
            load.streams,
            to_seconds(load.itl),
            load.processes,
            result["tokens"]["output_per_second"],
            result["window"]["seconds"],
        ),
        uncertainty=result["uncertainty"],
        server_late_max=to_seconds(max((truth.late_ns_max for truth in truths), default=0)),
    )


def measurement_errors(exchanges: Iterable[Exchange], truths: Iterable[Truth]) -> MeasurementErrors:
    """Return the absolute errors of the exchanges' TTFT and ITL; `truths` are the server's send times."""
    by_id = {truth.id: truth for truth in truths}
    ttft: list[int] = []
    itl: list[int] = []
    n = 0
    for n, x in enumerate(exchanges, 1):  # noqa: B007
        truth, times = by_id.get(x.request_id or ""), output_times_ns(x.timeline.events)
        measured = ttft_ns(x.timeline)
        if truth is None or measured is None or len(truth.sent_ns[0]) != len(times):
            continue
        sent = truth.sent_ns[0]
        submitted_ns = min(x.timeline.submit_ns or x.timeline.arrival_ns, truth.accepted_ns)
        ttft.append(abs(measured - (sent[0] - submitted_ns)))
        itl += (abs(got - true) for got, true in zip(tbc_ns(times), tbc_ns(sent), strict=True))
    return MeasurementErrors(n=n, unmatched=n - len(ttft), ttft=_time_errors(ttft), itl=_time_errors(itl))


def _time_errors(errors_ns: list[int]) -> TimeErrors:
    errors_ns.sort()
    figures = (percentile(errors_ns, share) for share in (0.5, 0.99, 1.0))
    p50, p99, largest = (None if ns is None else ns / NS_PER_S for ns in figures)
    return TimeErrors(len(errors_ns), p50, p99, largest)


class _SilentListener:
    """Progress listener that ignores everything."""

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **options: None

"""Results of replays as public JSON: made by llmtap itself of exchanges made up, and of samples made up."""

from array import array
from collections.abc import Mapping
from typing import Any

import msgspec

from llmtap.clock import ManualClock, WallAnchor
from llmtap.exchange.outcome import Outcome as Ending
from llmtap.load.monitor.timeseries import Columns, SamplingReport, ScrapeReport, TimeSeries
from llmtap.load.replay.result import RunObservations, result_of
from llmtap.load.replay.saved_replay import SavedReplay
from llmtap.load.tally import LoadTally
from llmtap.load.workers.worker_handle import WorkerDone
from llmtap.load.workers.worker_pool import LoadResult
from llmtap.metrics.objectives import Objectives
from llmtap.net.server_metrics import MonitorSeries
from llmtap.units import NS_PER_S
from llmtap.workload.requests import Requests
from tests.support.traffic.exchanges import streamed

BEGAN_NS = 5 * NS_PER_S
"""Where the exchanges of `streamed` begin."""
MS = 1_000_000


def replay_result(n: int = 120, *, late_ms: int = 0, failed: int = 0, closed: bool = False) -> dict[str, Any]:
    """Of `n` requests, one each 50 ms, of 3 to 9 words, `late_ms` late; the last `failed` were cut off."""
    tally = LoadTally(Objectives.parse("ttft:200ms tpot:50ms", "here"))
    offsets = array("q", (i * 50 * MS for i in range(n)))
    lengths = array("q", [3] * n)
    prompts = array("q", [100] * n)  # as the usage of `streamed` says
    seen = RunObservations(Requests(offsets, prompts, lengths), prompts)
    for i, offset_ns in enumerate(offsets):
        at_ms = offset_ns // MS + late_ms
        x = streamed(i + 1, 3 + i % 7, at_ms=at_ms, gap_ms=10 + i % 5)
        if i >= n - failed:
            x.outcome = Ending.TRUNCATED
        if not closed:
            x.scheduled_ns, x.dispatch_late_ns = BEGAN_NS + offset_ns, late_ms * MS
        tally.add(x)
        seen.add(i, x)
    tally.planned = tally.summary.opened = n
    ended_ns = BEGAN_NS + offsets[-1] + NS_PER_S
    done = WorkerDone(b"", None, n, 0, NS_PER_S // 10, 100 << 20, MS, BEGAN_NS, ended_ns)
    outcome = LoadResult(tally, BEGAN_NS, ended_ns, [done])
    series = _series(ended_ns)
    summary = series.summary(from_ns=BEGAN_NS, to_ns=ended_ns, tokens=600)
    return result_of(
        outcome,
        seen,
        plan={
            "trace": "trace.csv",
            "format": "azure",
            "rows": n,
            "requests": n,
            "seed": 42,
            "arrivals": None
            if closed
            else {"arrivals": "recorded", "scale": 2.0, "speed": 2.0, "recorded_rps": 10.0, "rate_rps": 20.0},
            "conversations": None,
            "target": "http://host:8000",
            "connections": "kept",
            "body": {"endpoint": "chat.completions", "model": "tiny", "stream": True, "temperature": 0.0},
            "prompts": {"n": n, "exact": n, "missed_min": 0, "missed_max": 0, "ways": {"tokenizer": n}},
            "notes": ["a note"],
        },
        closed=closed,
        clock="kernel",
        anchor=WallAnchor.sample(ManualClock()),
        details={
            "warmup": {"skipped": "cold start", "requests": 0},
            "baseline": None,
            "unread": 0,
            "system": msgspec.to_builtins({"summary": summary, "series": series.samples()}),
        },
    )


def saved(results: Mapping[str, Mapping[str, Any]]) -> dict[str, SavedReplay]:
    """The parts of these results that a comparison reads."""
    return {label: SavedReplay.of(result, label) for label, result in results.items()}


def _series(ended_ns: int) -> TimeSeries:
    system = Columns(
        {
            "sender_cpu": MonitorSeries("cpus", "interval"),
            "server_cpu": MonitorSeries("cpus", "interval"),
            "host_cpu": MonitorSeries("share", "interval"),
            "sender_memory": MonitorSeries("bytes"),
            "host_memory": MonitorSeries("bytes"),
            "gpu0_power": MonitorSeries("watts"),
            "gpu0_utilization": MonitorSeries("share"),
            "gpu1_power": MonitorSeries("watts"),
        }
    )
    server = Columns(
        {
            "running": MonitorSeries("requests"),
            "waiting": MonitorSeries("requests"),
            "kv_use": MonitorSeries("share"),
            "generation_tokens": MonitorSeries("tokens", "counter"),
            "prefix_queries": MonitorSeries("tokens", "counter"),
            "prefix_hits": MonitorSeries("tokens", "counter"),
        }
    )
    times_ns = [*range(BEGAN_NS - NS_PER_S // 2, ended_ns, NS_PER_S), ended_ns + MS]
    for i, t_ns in enumerate(times_ns):
        average = None if i == 0 else 0.25 + i / 100
        system.add(
            t_ns,
            MS,
            {
                "sender_cpu": average,
                "server_cpu": average and 2 * average,
                "host_cpu": average,
                "sender_memory": (1 << 30) + i,
                "host_memory": 5 << 30,
                "gpu0_power": 300 + i,
                "gpu0_utilization": 0.5,
                "gpu1_power": 100 + i,
            },
        )
        server.add(
            t_ns,
            MS,
            {
                "running": 4 + i,
                "waiting": 0,
                "kv_use": 0.125,
                "generation_tokens": 100.0 * i,
                "prefix_queries": 10.0 * i,
                "prefix_hits": 4.0 * i,
            },
        )
    for columns in (system, server):
        columns.close()
    return TimeSeries(BEGAN_NS, system, server, SamplingReport(period=1.0, scrape=ScrapeReport(scrapes=9)))

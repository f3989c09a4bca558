"""What 1,000 tenants with 2 models each cost the meter: memory, a scrape, a summary, and time on the way.

An hour and a half of compressed time goes through a Tally: exchanges of every tenant and model at a steady
rate, with a relay's status every second, as a live meter gets them. Exchanges are made beforehand and used
again and again. Resident memory is read from /proc at the end, in a process that holds nothing else of size.

    .venv/bin/python benchmarks/meter/memory.py [--tenants 1000] [--rate 150] [--minutes 90] [--json FILE]
"""

import argparse
import gc
import gzip
import json
import random
import resource
import sys
import time
from pathlib import Path

from rich.console import Console

from llmtap.channel.frames import Hello
from llmtap.channel.status import LAG_EDGES_NS, RelayStatus
from llmtap.clock import ManualClock
from llmtap.exchange.exchange import OUTPUT, EventLog, Exchange, Timeline, Tokens
from llmtap.exchange.outcome import EventClass, TokenSource
from llmtap.meter.admin.views import metrics_of, summary_of
from llmtap.meter.options import WINDOWS, MeterOptions, TenantOptions
from llmtap.meter.pipeline.pipeline import ExchangePipeline
from llmtap.metrics.slo import SloOptions

MS = 1_000_000
S = 1_000_000_000
LOOK_S = 300
"""How often resident memory is read: as often as the window of an hour gets a slice."""
VARIANTS = 400
"""Different exchanges: enough that histograms fill as in life."""


def exchange(rng: random.Random) -> Exchange:
    """A stream of 100 tokens, one a chunk, with a log-normal TTFT and gaps of 20 to 40 ms."""
    log = EventLog()
    t_ns = first_ns = round(rng.lognormvariate(-1.2, 0.6) * S)
    pace = rng.uniform(0.02, 0.04)
    for _ in range(100):
        log.add(t_ns, EventClass.CONTENT, 180, 1, OUTPUT)
        t_ns += round(rng.lognormvariate(0, 0.3) * pace * S)
    timeline = Timeline(
        arrival_ns=-2 * MS,
        request_end_ns=-MS,
        submit_ns=0,
        head_ns=first_ns - MS,
        first_byte_ns=first_ns,
        first_any_ns=first_ns,
        first_token_ns=first_ns,
        first_content_ns=first_ns,
        last_token_ns=log.t_ns[-1],
        response_end_ns=log.t_ns[-1] + MS,
        delivered_ns=log.t_ns[-1] + MS,
        events=log,
    )
    x = Exchange(
        relay="r",
        seq=1,
        arrival_wall_ns=0,
        timeline=timeline,
        method="POST",
        path="/v1/chat/completions",
        status=200,
        stream=True,
        reads=100,
        uncertainty_ns=200_000,
        tokens=Tokens(input=rng.randint(20, 4_000), output=100, source=TokenSource.USAGE),
    )
    x.added.request_ns, x.added.first_chunk_ns, x.added.chunk_max_ns = 60_000, 40_000, 90_000
    x.added.chunks_ns.extend(rng.randint(20_000, 90_000) for _ in range(100))
    return x


def status() -> RelayStatus:
    return RelayStatus(
        t_ns=0,
        opened=1,
        measured=1,
        dropped={},
        unsettled=0,
        connections=1,
        streams=1,
        upstream_idle=1,
        upstream_connects=1,
        upstream_reuses=1,
        accepted=1,
        refused={},
        tap_pending_bytes=0,
        cpu_ns=1,
        rss_bytes=1,
        lag_ns_max=200_000,
        bytes_up=1,
        bytes_down=1,
        lag_sum_ns=1,
        lag_buckets=[0] * (len(LAG_EDGES_NS) + 1),
    )


def rss_mib() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / (1 << 20)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--tenants", type=int, default=1_000)
    parser.add_argument("--models", type=int, default=2)
    parser.add_argument("--rate", type=float, default=150.0, help="exchanges a second, of all together")
    parser.add_argument("--minutes", type=float, default=90.0)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    rng = random.Random(1)
    clock = ManualClock(now_ns=S)
    tally = ExchangePipeline(
        MeterOptions(),
        clock,
        tenants=TenantOptions(max=args.tenants),
        slos={"all": SloOptions(objectives="ttft:500ms tpot:50ms")},
    )
    tally.relays.join(Hello(relay="r", pid=1, clock="kernel", anchor_mono_ns=0, anchor_wall_ns=0))
    variants = [exchange(rng) for _ in range(VARIANTS)]
    pairs = [(f"tenant-{t}", f"model-{m}") for t in range(args.tenants) for m in range(args.models)]
    empty_mib = rss_mib()
    said = status()
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 4, 250)  # as the meter does

    n = round(args.rate * args.minutes * 60)
    step_ns = round(S / args.rate)
    worst_ns = 0
    spent_ns = 0
    second = clock.now_ns // S
    over_time: list[float] = []
    for i in range(n):
        clock.advance(step_ns)
        tenant, model = pairs[rng.randrange(len(pairs))]
        x = variants[i % VARIANTS]
        x.tenant, x.model = tenant, model
        before = time.thread_time_ns()
        if clock.now_ns // S != second:
            second = clock.now_ns // S
            tally.on_status("r", said)
        tally.on_open()
        tally.on_end(x)
        took = time.thread_time_ns() - before
        spent_ns += took
        worst_ns = max(worst_ns, took)
        if (i + 1) % round(args.rate * LOOK_S) == 0:
            over_time.append(rss_mib())

    peak_mib = max(over_time, default=rss_mib())
    result: dict[str, object] = {
        "tenants": args.tenants,
        "models": args.models,
        "exchanges": n,
        "rate": args.rate,
        "minutes": args.minutes,
        "empty_mib": empty_mib,
        "rss_mib": peak_mib,
        "slices": len(tally.windows),
        "us_per_exchange": spent_ns / 1e3 / n,
        "us_worst": worst_ns / 1e3,
    }
    begin = time.perf_counter()
    frozen = metrics_of(tally)
    result["scrape_freeze_s"] = time.perf_counter() - begin
    begin = time.perf_counter()
    body, _ = frozen.render("")
    result["scrape_render_s"] = time.perf_counter() - begin
    result["scrape_mib"] = len(body) / (1 << 20)
    result["scrape_series"] = body.count(b"\n") - body.count(b"\n#")
    begin = time.perf_counter()
    result["scrape_zipped_mib"] = len(gzip.compress(body, 1)) / (1 << 20)
    result["scrape_zip_s"] = time.perf_counter() - begin
    del body, frozen
    for window in (*WINDOWS, "all"):
        for by in ((), ("tenant", "model")):
            begin = time.perf_counter()
            work = summary_of(tally, window, by)
            loop_s = time.perf_counter() - begin
            begin = time.perf_counter()
            work()
            name = f"summary_{window}{'_by' if by else ''}"
            result[f"{name}_s"], result[f"{name}_on_loop_s"] = time.perf_counter() - begin, loop_s
    result["rss_after_reading_mib"] = rss_mib()
    console = Console()
    console.print("MiB each 5 minutes:", *(f"{mib:.0f}" for mib in over_time))
    result["rss_mib_over_time"] = over_time
    for key, value in result.items():
        if not isinstance(value, list):
            console.print(f"{key:28} {value:,.4g}" if isinstance(value, float) else f"{key:28} {value:,}")
    if args.json:
        args.json.write_text(json.dumps(result, indent=2) + "\n")
    return 0 if peak_mib < 1_024 else 1


if __name__ == "__main__":
    sys.exit(main())

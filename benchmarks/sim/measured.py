"""Requests that real GPUs served: what model of an iteration they tell, and how near a simulated run comes.

    .venv/bin/python benchmarks/sim/measured.py FOLDER

FOLDER has `NAME.requests.jsonl.gz` and `NAME.timeseries.csv` as LLMServingSim writes them of vLLM: the times
`queued_ts`, `scheduled_ts`, `first_token_ts` and `last_token_ts` are of one clock; `arrival_time` is of
another and is not used. Prints Markdown, which `MEASURED.md` here holds. Without FOLDER it says so, and ends.

What vLLM was told (`--chunk`, `--seqs-max`) is not in these files: the defaults are vLLM's, and the largest
number of requests that ran. The KV memory is what the requests held whenever its gauge said that it was full;
where the gauge said nothing, there is no limit.
"""

import argparse
import csv
import gzip
import json
from array import array
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, Final

from tables import table

from llmtap.exchange.exchange import Exchange, Timeline, Tokens
from llmtap.exchange.outcome import TokenSource
from llmtap.metrics.statistics import percentile
from llmtap.sim.model_options import Serving, ServingSetup
from llmtap.sim.sweep.fitting import IterationFit, fit_exchanges
from llmtap.sim.sweep.simulate import ExchangeMeasuring, simulate
from llmtap.workload.requests import Requests

SHARES: Final = {"p50": 0.5, "p90": 0.9, "p99": 0.99}
SCHEDULERS: Final = ("chunked_prefill", "continuous_batching")
FULL_PERCENT: Final = 95.0
NO_LIMIT: Final = 1 << 30


@dataclass(frozen=True, slots=True)
class Served:
    """A request; seconds from the first one's arrival, tokens."""

    queued: float
    scheduled: float
    first: float
    last: float
    given: int
    made: int

    def held(self, t: float) -> float:
        """Tokens in memory while it decoded, if nobody took it out."""
        return self.given + self.made * (t - self.first) / (self.last - self.first)


def load(path: Path) -> list[Served]:
    with gzip.open(path, "rt") as lines:
        rows = sorted(map(json.loads, lines), key=lambda row: row["queued_ts"])
    zero = rows[0]["queued_ts"]
    times = ("queued_ts", "scheduled_ts", "first_token_ts", "last_token_ts")
    return [Served(*(row[t] - zero for t in times), row["input_toks"], row["output_toks"]) for row in rows]


def exchanges(rows: list[Served]) -> list[Exchange]:
    """As the fit wants them; the time in the queue is what the server told."""
    found = []
    for seq, row in enumerate(rows, 1):
        queued, first, last = (round(t * 1e9) for t in (row.queued, row.first, row.last))
        t = Timeline(queued, submit_ns=queued, first_token_ns=first, last_token_ns=last, response_end_ns=last)
        x = Exchange("vllm", seq, queued, t, stream=True)
        x.tokens = Tokens(row.given, row.made, source=TokenSource.USAGE)
        x.server_timing = [{"name": "queue", "ms": (row.scheduled - row.queued) * 1e3}]
        found.append(x)
    return found


def gauges(path: Path) -> list[dict[str, float]]:
    with path.open(newline="") as file:
        return [{name: float(value) for name, value in row.items()} for row in csv.DictReader(file)]


def kv_tokens(rows: list[Served], told: list[dict[str, float]]) -> int:
    """What the memory holds: the median of what the requests held while it was full and nobody was out."""
    found = []
    for second in told:
        t = second["t"]
        running = [row for row in rows if row.first <= t < row.last]
        if second["kv_cache_pct"] >= FULL_PERCENT and len(running) == second["running"]:
            found.append(sum(row.held(t) for row in running) * 100 / second["kv_cache_pct"])
    return round(median(found)) if found else NO_LIMIT


def figures(values: list[float]) -> list[str]:
    ordered = sorted(values)
    shares = [percentile(ordered, share) or 0.0 for share in SHARES.values()]
    return [f"{value * 1e3:,.1f}" for value in (sum(values) / len(values), *shares)]


def simulated(told: dict[str, Any], name: str) -> list[str]:
    return [f"{told['metrics'][name][p] * 1e3:,.1f}" for p in ("mean", *SHARES)]


def fit_row(name: str, fitted: IterationFit) -> list[str]:
    model, part = fitted.model, fitted.decode
    return [
        name,
        part.source,
        f"{part.points:,}",
        f"{model.beta_ns / 1e6:.3f}",
        f"{model.gamma:.3f}",
        f"{model.prefill_ns / 1e3:.1f}",
        f"{model.context_ns:.1f}",
        f"{part.r2:.4f}",
        f"{part.error_max:.1%}",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", nargs="?", type=Path)
    parser.add_argument("--chunk", type=int, default=2_048, help="vLLM's max_num_batched_tokens")
    parser.add_argument("--seqs-max", type=int, default=128, help="vLLM's max_num_seqs")
    args = parser.parse_args()
    if args.folder is None:
        print("skipped: no folder of measured requests was given")
        return
    fits, runs = [], []
    for path in sorted(args.folder.glob("*.requests.jsonl.gz")):
        name = path.name.removesuffix(".requests.jsonl.gz")
        rows = load(path)
        fitted = fit_exchanges(exchanges(rows), chunk=args.chunk)
        fits.append(fit_row(name, fitted))
        kv = kv_tokens(rows, gauges(path.with_name(f"{name}.timeseries.csv")))
        ends = max(row.last for row in rows)
        runs.append(
            [
                name,
                f"measured ({'no limit seen' if kv == NO_LIMIT else f'{kv:,} tokens'})",
                *figures([row.first - row.queued for row in rows]),
                *figures([(row.last - row.first) / (row.made - 1) for row in rows]),
                f"{ends:.1f}",
                "-",
            ]
        )
        work = Requests(
            array("q", [round(row.queued * 1e9) for row in rows]),
            array("q", [row.given for row in rows]),
            array("q", [row.made for row in rows]),
        )
        serving = Serving(seqs_max=args.seqs_max, tokens_max=args.chunk, chunk=args.chunk, kv_tokens=kv)
        for scheduler in SCHEDULERS:
            setup = ServingSetup(iterations=fitted.model, serving=serving)
            told = simulate(scheduler, work, setup, measuring=ExchangeMeasuring(True)).to_dict()
            runs.append(
                [
                    name,
                    scheduler,
                    *simulated(told, "ttft"),
                    *simulated(told, "tpot"),
                    f"{told['window']['seconds']:.1f}",
                    f"{told['engine']['preemptions']:,}",
                ]
            )
    table(
        (
            "run",
            "fitted to",
            "points",
            "beta ms",
            "gamma",
            "prefill us/token",
            "context ns/token",
            "R^2",
            "off by at most",
        ),
        fits,
    )
    spread = ("mean", *SHARES)
    table(
        (
            "run",
            "engine",
            *(f"TTFT {p} ms" for p in spread),
            *(f"TPOT {p} ms" for p in spread),
            "all done s",
            "preemptions",
        ),
        runs,
    )


if __name__ == "__main__":
    main()

"""Compare the schedulers of the multi-bin batching paper under each reading of it; measure their cost.

Prints Markdown, which `README.md` here holds. Everything but the costs is the same on every machine.

    .venv/bin/python benchmarks/sim/schedulers.py TRACE [--azure TRACE] [--million] > tables.md

TRACE is a trace with BurstGPT's shape (mean rate 0.27/s); with --azure another, at the same three mean rates.
"""

import argparse
import json
import platform
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterable
from itertools import pairwise, product
from pathlib import Path
from typing import Any, Final

from tables import table

from llmtap.sim.model_options import SEED_MODEL, ModelOptions, ServingSetup, read_model_options
from llmtap.sim.sweep.simulate import SimulationResult, simulate
from llmtap.workload.requests import Requests
from llmtap.workload.trace import Trace, load_trace

LOADS: Final = {"100x": 100.0, "10x": 10.0, "1x": 1.0}
RATES: Final = (27.0, 2.7, 0.27)
SIZES: Final = (1_000, 10_000, 100_000)
SHORT: Final = {"static_fifo": "static", "dynamic_no_bins": "dynamic", "multi_bin_dynamic": "multi-bin"}
CLAIMED: Final = "multi-bin > dynamic > static"
EQUAL: Final = 0.001
"""Figures this near to each other are called equal."""

ALTERNATIVES: Final[tuple[dict[str, str], ...]] = (
    {},
    {"eps": "1ms"},
    {"predictor": "prompt"},
    {"predictor": "noisy"},
    {"predictor": "shuffled"},
    {"bin_limit": "8gb"},
    {"bin_limit": "none"},
    {"controller_limit": "bin"},
    {"length": "output"},
    {"window": "arrivals"},
    {"tokens": "output"},
    {"bins": "1"},
    {"bins": "2"},
    {"bins": "4"},
    {"bins": "16"},
    {"bins": "32"},
    {"bin_choice": "longest-queue"},
    {"bin_choice": "oldest-head"},
    {"b_start": "one"},
    {"b_start": "first-batch"},
    {"band": "delta"},
    {"tau_start": "beta"},
    {"guards": "authors"},
    {"guards": "authors", "eps": "1ms"},
    {"memory_check": "hard"},
    {"lengths_start": "limit"},
    {"candidates": "32"},
    {"failed": "dropped"},
    {"same_instant": "all-first"},
    {"tie": "gpu-first"},
    {"sla_step": "update"},
    {"partial": "wait"},
    {"edges": "first-1000"},
)
CROSSED: Final = {
    "eps": ("5ms", "1ms"),
    "predictor": ("perfect", "prompt", "noisy", "shuffled"),
    "window": ("completion", "arrivals"),
    "bin_limit": ("7gb", "8gb", "none"),
    "controller_limit": ("global", "bin"),
    "length": ("prompt+output", "output"),
}


def results(work: Requests, readings: ModelOptions) -> dict[str, dict[str, Any]]:
    """All schedulers on one workload."""
    return {name: simulate(name, work, ServingSetup(readings=readings)).to_dict() for name in SHORT}


def ranking(told: dict[str, dict[str, Any]], key: str, *, most: bool) -> str:
    """The schedulers from best to worst, with = between those within EQUAL of each other."""
    values = {
        SHORT[name]: one[key] if key != "mean" else one["latency"]["mean"] for name, one in told.items()
    }
    ordered = sorted(values, key=lambda name: values[name], reverse=most)
    text = ordered[0]
    for before, name in pairwise(ordered):
        a, b = values[before], values[name]
        text += (" = " if abs(a - b) <= EQUAL * max(abs(a), abs(b)) else " > ") + name
    return text


def figures(told: dict[str, Any]) -> list[str]:
    latency = told["latency"]
    return [
        f"{told['throughput_rps']:.4f}",
        f"{told['throughput_tps']:.1f}",
        *(f"{latency[name]:,.2f}" for name in ("mean", "p50", "p95", "p99")),
        f"{told['request_sla_violation']:.2%}",
        f"{told['token_sla_violation']:.0%}",
        f"{told['utilization']:.1%}",
        f"{told['batch_mean']:.2f}",
        f"{told['queueing']['mean']:,.2f}",
    ]


COLUMNS: Final = (
    "load",
    "requests",
    "eps",
    "scheduler",
    "req/s",
    "tok/s",
    "mean s",
    "p50 s",
    "p95 s",
    "p99 s",
    "late",
    "slow",
    "busy",
    "batch",
    "queue mean s",
)


def methods(trace: Trace, sizes: Iterable[int], loads: dict[str, float] | None = None) -> None:
    """The comparison of methods: loads x sizes x eps x schedulers."""
    rows = []
    for size in sizes:
        part = trace.first_rows(size)
        by_load = loads or {f"{rate:g}/s": rate / (part.rate_rps or 1) for rate in RATES}
        for load, scale in by_load.items():
            work = part.requests_at(count=size, scale=scale)
            for eps in ("5ms", "1ms"):
                for name, told in results(work, read_model_options({"eps": eps})).items():
                    if name == "static_fifo" and eps != "5ms":
                        continue  # it has no controller
                    rows.append(
                        [load, f"{size:,}", "" if name == "static_fifo" else eps, SHORT[name], *figures(told)]
                    )
    table(COLUMNS, rows)


def readings_one_by_one(trace: Trace, count: int) -> None:
    """The ranking with one reading changed."""
    for load, scale in LOADS.items():
        work = trace.first_rows(count).requests_at(count=count, scale=scale)
        rows = []
        for settings in ALTERNATIVES:
            told = results(work, read_model_options(settings))
            name = ", ".join(f"{k}={v}" for k, v in settings.items()) or "the defaults"
            rates = [f"{one['throughput_rps']:.4f}" for one in told.values()]
            late = [f"{one['request_sla_violation']:.2%}" for one in told.values()]
            rows.append(
                [
                    name,
                    *rates,
                    ranking(told, "throughput_rps", most=True),
                    ranking(told, "mean", most=False),
                    " / ".join(late),
                ]
            )
        print(f"### {load}, {count:,} requests\n")
        shares = "late (static / dynamic / multi-bin)"
        table(("reading", *SHORT.values(), "by throughput", "by mean latency", shares), rows)


def readings_crossed(trace: Trace, count: int) -> None:
    """How often each ranking comes out, over all combinations of the readings that matter."""
    combinations = [dict(zip(CROSSED, values, strict=True)) for values in product(*CROSSED.values())]
    rows: list[list[str]] = []
    for load, scale in LOADS.items():
        work = trace.first_rows(count).requests_at(count=count, scale=scale)
        seen: dict[str, Counter[str]] = {"throughput": Counter(), "mean latency": Counter()}
        for settings in combinations:
            told = results(work, read_model_options(settings))
            seen["throughput"][ranking(told, "throughput_rps", most=True)] += 1
            seen["mean latency"][ranking(told, "mean", most=False)] += 1
        rows += [
            [load, by, text, f"{n} of {len(combinations)}", "yes" if text == CLAIMED else ""]
            for by, counts in seen.items()
            for text, n in counts.most_common()
        ]
    table(("load", "by", "ranking", "combinations", "as the paper claims"), rows)


def band(trace: Trace, count: int) -> None:
    """What the controller's band does to batch sizes, tenth by tenth of a run."""
    rows = []
    for load, eps in product(LOADS, ("5ms", "1ms")):
        work = trace.first_rows(count).requests_at(count=count, scale=LOADS[load])
        setup = ServingSetup(readings=read_model_options({"eps": eps}))
        rows += [
            [load, eps, SHORT[name], *tenths(simulate(name, work, setup))]
            for name in ("dynamic_no_bins", "multi_bin_dynamic")
        ]
    table(("load", "eps", "scheduler", *(f"{i}0 %" for i in range(1, 11))), rows)


def tenths(result: SimulationResult) -> list[str]:
    """Mean batch size in each tenth of the batches, by when they began."""
    played = result.record
    # With one server each batch has a start of its own.
    sizes = [n for _, n in sorted(set(zip(played.start_ns, played.size, strict=True)))]
    edges = [len(sizes) * i // 10 for i in range(11)]
    means = [sum(sizes[a:b]) / max(1, b - a) for a, b in pairwise(edges)]
    return [f"{mean:.1f}" for mean in means]


def costs(place: str, sizes: Iterable[int]) -> None:
    """CPU and memory, each run in a process of its own."""
    rows = []
    for size, load in product(sizes, LOADS):
        for name in SHORT:
            command = [sys.executable, __file__, place, "--cost", f"{name},{size},{load}"]
            out = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
            rows.append(
                [
                    load,
                    f"{size:,}",
                    SHORT[name],
                    f"{out['batches']:,}",
                    f"{out['run_s']:.2f}",
                    f"{out['run_s'] / size * 1e6:.2f}",
                    f"{out['whole_s']:.2f}",
                    f"{out['rss_mb']:.0f}",
                    f"{out['rps']:.4f}",
                ]
            )
    columns = (
        "load",
        "requests",
        "scheduler",
        "batches",
        "CPU s, run",
        "us/request",
        "CPU s, all",
        "peak MB",
        "req/s",
    )
    table(columns, rows)


def cost(place: str, what: str) -> None:
    """One run, and what it took."""
    name, size, load = what.split(",")
    work = load_trace(place, count=int(size)).requests_at(count=int(size), scale=LOADS[load])
    began_s = time.process_time()
    result = simulate(name, work, ServingSetup())
    run_s = time.process_time() - began_s
    told = result.to_dict()
    print(
        json.dumps(
            {
                "batches": told["batches"],
                "rps": told["throughput_rps"],
                "run_s": run_s,
                "whole_s": time.process_time(),
                "rss_mb": peak_mb(),
            }
        )
    )


def peak_mb() -> float:
    """Of this program; `ru_maxrss` would count what its parent had when it was forked."""
    found = re.search(r"VmHWM:\s*(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) / 1024


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("trace", help="any that llmtap reads, of BurstGPT's shape and mean rate")
    parser.add_argument("--azure", metavar="TRACE", help="another trace, at mean rates of 27, 2.7 and 0.27/s")
    parser.add_argument(
        "--count",
        type=int,
        default=10_000,
        metavar="N",
        help="requests of the tables of readings; default 10,000",
    )
    parser.add_argument(
        "--million", action="store_true", help="1,000,000 requests too: the trace again and again"
    )
    parser.add_argument("--cost", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.cost:
        cost(args.trace, args.cost)
        return
    trace = load_trace(args.trace)
    steps_ms = [SEED_MODEL.step_ns(b) / 1e6 for b in (1, 8, 128)]
    print(f"Trace: {Path(args.trace).name}, {len(trace):,} rows, {trace.rate_rps:.4f} requests/s.")
    print(
        "Time between tokens of a batch of 1, 8, 128: " + ", ".join(f"{ms:.3f} ms" for ms in steps_ms) + ".\n"
    )
    print("## Methods\n")
    methods(trace, (*SIZES, *([1_000_000] if args.million else [])), LOADS)
    if args.azure:
        print(f"## {Path(args.azure).name}\n")
        methods(load_trace(args.azure), SIZES[:2])
    print("## One reading changed\n")
    readings_one_by_one(trace, args.count)
    print("## All combinations\n")
    readings_crossed(trace, args.count)
    print("## Batch size over a run\n")
    band(trace, args.count)
    print(f"## Cost\n\nCPython {platform.python_version()}, {platform.machine()}.\n")
    costs(args.trace, (*SIZES[1:], *([1_000_000] if args.million else [])))


if __name__ == "__main__":
    main()

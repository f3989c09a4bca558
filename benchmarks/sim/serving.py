"""The smooth goodput paper's two claims, in virtual time: what they say, and where they hold.

    .venv/bin/python benchmarks/sim/serving.py                 # five seeds, some minutes
    .venv/bin/python benchmarks/sim/serving.py --seeds 2 --requests 500

1. Chunked prefill, decode prepone and output delay improve tail TBT; user idle latency does not follow (3.2
   to 3.4, 5.3).
2. Serving late requests no further raises goodput; smooth goodput falls (4.1, 4.2).

Each cell is the median over seeds with the range; a seed is a workload, the same for all schedulers. Nothing
here depends on the machine.
"""

import argparse
from collections.abc import Callable, Iterable
from itertools import product
from statistics import median
from typing import Any

from tables import table

from llmtap.metrics.objectives import Objectives
from llmtap.sim.model_options import ServingSetup, read_serving
from llmtap.sim.sweep.simulate import ExchangeMeasuring, simulate
from llmtap.workload.registry import draw_requests
from llmtap.workload.trace import Trace

TTFT, TBT = "1s", "200ms"
SLO = Objectives.parse(f"ttft:{TTFT} tbc_max:{TBT}", "SLO")
SCHEDULERS = ("continuous_batching", "chunked_prefill", "decode_prepone", "output_delay")
LONG_RATES = (1.0, 2.0, 3.0)
RATES = (4.0, 8.0, 10.0, 12.0, 14.0, 16.0)

Told = dict[str, Any]


def flown(workload: str, rate: float, scheduler: str, seed: int, count: int, **settings: str) -> Told:
    trace = Trace(draw_requests(workload, count, seed, "workload"))
    assert trace.rate_rps is not None
    requests = trace.requests_at(count=count, scale=rate / trace.rate_rps)
    setup = ServingSetup(serving=read_serving(settings))
    return simulate(scheduler, requests, setup, measuring=ExchangeMeasuring(objectives=SLO)).to_dict()


def spread(values: Iterable[float], digits: int) -> str:
    values = list(values)
    low, high = min(values), max(values)
    middle = f"{median(values):,.{digits}f}"
    return middle if len(values) == 1 else f"{middle} ({low:,.{digits}f}-{high:,.{digits}f})"


def at(metric: str, point: str, scale: float = 1e3) -> Callable[[Told], float]:
    return lambda told: float(told["metrics"][metric][point]) * scale


def smoothing(seeds: range, count: int) -> None:
    """Claim 1."""
    figures: dict[str, tuple[Callable[[Told], float], int]] = {
        "TBT p99 ms": (at("tbc", "p99"), 0),
        "TBT max of a request, p50 ms": (at("tbc_max", "p50"), 0),
        "TTFT p50 ms": (at("ttft", "p50"), 0),
        "user idle p50 ms": (at("user_idle", "p50"), 0),
        "user idle p99 ms": (at("user_idle", "p99"), 0),
        "TPOT p50 ms": (at("tpot", "p50"), 1),
        "smooth goodput tok/s": (lambda told: told["smooth_goodput"]["tokens_per_second"], 0),
    }
    rows = []
    for rate, scheduler in product(LONG_RATES, SCHEDULERS):
        told = [flown("long-chat", rate, scheduler, seed, count) for seed in seeds]
        cells = [spread(map(value, told), digits) for value, digits in figures.values()]
        rows.append([f"{rate:g}", scheduler, *cells])
    table(("req/s", "scheduler", *figures), rows)


def dropping(seeds: range, count: int) -> None:
    """Claim 2."""
    rows = []
    for scheduler, rate in product(("continuous_batching", "chunked_prefill"), RATES):
        pairs = []
        for seed in seeds:
            kept, dropped = (
                flown("chat", rate, scheduler, seed, count, give_up=give_up, ttft=TTFT, tbt=TBT)
                for give_up in ("never", "late")
            )
            pairs.append((kept, dropped))

        def both(value: Callable[[Told], float], digits: int, pairs: Any = pairs) -> list[str]:
            return [spread((value(pair[i]) for pair in pairs), digits) for i in (0, 1)]

        held = sum(
            dropped["goodput"]["requests_per_second"] > kept["goodput"]["requests_per_second"]
            and dropped["smooth_goodput"]["tokens_per_second"] < kept["smooth_goodput"]["tokens_per_second"]
            for kept, dropped in pairs
        )
        ended = [1 - pair[1]["outcomes"].get("complete", 0) / count for pair in pairs]
        rows.append(
            [
                scheduler,
                f"{rate:g}",
                spread((100 * share for share in ended), 1),
                *both(lambda told: told["goodput"]["requests_per_second"], 2),
                *both(lambda told: told["smooth_goodput"]["tokens_per_second"], 0),
                *both(at("user_idle", "p50", 1), 2),
                f"{held} of {len(pairs)}",
            ]
        )
    columns = (
        "scheduler",
        "req/s",
        "given up %",
        "goodput, all served",
        "late given up",
        "smooth goodput, all served",
        "late given up",
        "user idle p50 s, all served",
        "late given up",
        "as claimed",
    )
    table(columns, rows)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--seeds", type=int, default=5, metavar="N", help="workloads that each cell is of; default 5"
    )
    parser.add_argument(
        "--requests", type=int, default=2_000, metavar="N", help="of each workload; default 2,000"
    )
    args = parser.parse_args()
    seeds = range(42, 42 + args.seeds)
    print(
        f"{args.requests:,} requests, seeds {seeds[0]} to {seeds[-1]}; "
        f"late: TTFT over {TTFT}, a gap over {TBT}.\n"
    )
    print("## Smoother gaps\n")
    smoothing(seeds, args.requests)
    print("## Dropping what is late\n")
    dropping(seeds, args.requests)


if __name__ == "__main__":
    main()

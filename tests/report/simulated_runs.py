"""Results of simulated runs as public JSON: made up, each figure another number, and real ones, small."""

from array import array
from typing import Any

from llmtap.metrics.objectives import Objectives
from llmtap.sim.model_options import ServingSetup, read_model_options
from llmtap.sim.sweep.simulate import ExchangeMeasuring, simulate
from llmtap.workload.requests import Requests


def run(scheduler: str, rate: float, **changes: Any) -> dict[str, Any]:
    """A run of whole batches; `changes` replace parts of it, and those of its `readings` by name."""
    n = changes.pop("n", 2_000)
    readings = {"eps": 0.005, "bins": 8, "request_sla": 20.0, "token_sla": 0.01, "bin_edges": []}
    readings |= {name: changes.pop(name) for name in list(changes) if name in readings and name != "bins"}
    bins = changes.pop("bins", None)
    if bins is not None:
        readings["bins"] = bins

    def figures(first: float) -> dict[str, Any]:
        return {"n": n, "p50": first, "p99": first * 3, "marks": [] if n >= 1_000 else ["p99", "p999"]}

    return {
        "scheduler": scheduler,
        "n": n,
        "window": {"name": "first arrival to last completion", "seconds": n / rate + 7},
        "load": {"mode": "open", "offered_rps": rate, "achieved_rps": rate * 0.97},
        "metrics": {"e2e": figures(rate * 1.1)},
        "latency": figures(rate * 1.1),
        "throughput_rps": rate * 0.9,
        "throughput_tps": rate * 123.4,
        "request_sla_violation": rate / 100,
        "token_sla_violation": rate / 1_000,
        "utilization": rate / 50,
        "batch_mean": rate * 2,
        "batches": 321,
        "queueing": figures(rate / 7),
        "servers": 1,
        "seed": 42,
        "trace": "trace.csv",
        "scale": rate / 0.27,
        "bins": None if bins is None else [[0, None]] * bins,
        "model": {"alpha": 0.059653, "beta": 0.005742, "gamma": 0.316},
        "readings": readings,
        "fit": None,
    } | changes


def flights(schedulers: tuple[str, ...], rates: tuple[float, ...], **settings: str) -> list[dict[str, Any]]:
    """Measured runs of 60 requests at each rate, as the simulation reports them."""
    results = []
    for rate in rates:
        arrivals = array("q", (round(i / rate * 1e9) for i in range(60)))
        lengths = array("q", (20 + 7 * i % 31 for i in range(60)))
        for name in schedulers:
            result = simulate(
                name,
                Requests(arrivals, lengths, lengths, array("q")),
                ServingSetup(readings=read_model_options(settings)),
                measuring=ExchangeMeasuring(True, Objectives.parse("ttft:200ms tpot:50ms", "here")),
            )
            results.append(result.to_dict() | {"trace": "made up", "scale": rate, "fit": None})
    return results

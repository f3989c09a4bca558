"""One run of one scheduler on one workload in virtual time, and its figures as public JSON.

Seed 004, section 9, says which: throughput, latency, shares of requests outside the SLAs, utilisation, batch
size, queueing delay. Where it leaves open how they are counted, `Readings` does not.
"""

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from llmtap.metrics.statistics import SHARES, marks, percentile, percentile_by
from llmtap.sim.engine import Engine
from llmtap.sim.latency import SEED_MODEL, LatencyModel
from llmtap.sim.predictors import predict
from llmtap.sim.readings import Readings
from llmtap.sim.requests import Requests
from llmtap.sim.schedulers.multi_bin_dynamic import MultiBinDynamic
from llmtap.sim.schedulers.registry import SCHEDULERS
from llmtap.sim.serving import Setup
from llmtap.sim.virtual import Played, play
from llmtap.units import Duration, to_seconds

__all__ = ["Flight", "capacity_rps", "fly"]


@dataclass(frozen=True, slots=True)
class Flight:
    """What was run, and what came of it."""

    name: str
    requests: Requests
    played: Played
    readings: Readings
    model: LatencyModel
    servers: int
    seed: int
    bins: list[tuple[int, int | None]] | None = None
    bin_limits: list[int] | None = None

    def latencies_ns(self) -> list[int]:
        """From arrival to completion, in ascending order."""
        return _sorted_differences(self.played.end_ns, self.requests.arrival_ns)

    def late_share(self, latencies_ns: Sequence[int]) -> float:
        """Share of requests outside the request SLA."""
        limit_ns = self.readings.request_sla
        return sum(t > limit_ns for t in latencies_ns) / len(latencies_ns)

    def slow_share(self) -> float:
        """Share of requests outside the token SLA: their batch's time between tokens was too long."""
        limit_ns, step_ns = self.readings.token_sla, self.model.step_ns
        slow = sum(b * n for b, n in self.played.sizes.items() if step_ns(b) > limit_ns)
        return slow / len(self.requests)

    def to_dict(self) -> dict[str, Any]:
        """As public JSON: a Summary's names, and those that only a simulated engine has. Seconds."""
        requests, played, readings = self.requests, self.played, self.readings
        n, arrivals = len(requests), requests.arrival_ns
        span_ns = max(played.end_ns) - arrivals[0]
        offered_ns = arrivals[-1] - arrivals[0]
        window_ns = span_ns if readings.window == "completion" else offered_ns
        given, made = sum(requests.input), sum(requests.output)
        counted = made if readings.tokens == "output" else given + made
        latencies_ns = self.latencies_ns()
        latency = _figures(latencies_ns, readings.percentile)
        busy_ns = sum(played.busy_ns)
        batches = played.sizes.total()
        steps_ns = sum(self.model.step_ns(b) * k for b, k in played.sizes.items())
        return {
            "scheduler": self.name,
            "n": n,
            "window": {"name": f"first arrival to last {readings.window.removesuffix('s')}",
                       "seconds": to_seconds(window_ns)},
            "load": {
                "mode": "open", "offered_rps": _rate(n - 1, offered_ns), "achieved_rps": _rate(n, span_ns),
            },
            "metrics": {"e2e": latency},
            "outcomes": {"complete": n},
            "tokens": {"input": given, "output": made, "output_per_second": _rate(made, window_ns)},
            "throughput_rps": _rate(n, window_ns),
            "throughput_tps": _rate(counted, window_ns),
            "latency": latency,
            "request_sla_violation": self.late_share(latencies_ns),
            "token_sla_violation": self.slow_share(),
            "utilization": busy_ns / (span_ns * self.servers) if span_ns else None,
            "batch_mean": n / batches,
            "batches": batches,
            "batch_sizes": {str(b): k for b, k in sorted(played.sizes.items())},
            "queueing": _figures(_sorted_differences(played.start_ns, arrivals), readings.percentile),
            "seconds_per_output_token": to_seconds(busy_ns) / made if made else None,
            "decode_step_mean": to_seconds(steps_ns / batches),
            "bins": self.bins,
            "bin_limits": self.bin_limits,
            "bin_batches": [played.queues[i] for i in range(len(self.bins))] if self.bins else None,
            "servers": self.servers,
            "seed": self.seed,
            "model": {"alpha": to_seconds(self.model.alpha_ns), "beta": to_seconds(self.model.beta_ns),
                      "gamma": self.model.gamma},
            "readings": msgspec.to_builtins(readings, enc_hook=_seconds),
        }  # fmt: skip


def fly(
    name: str,
    requests: Requests,
    readings: Readings,
    *,
    model: LatencyModel = SEED_MODEL,
    servers: int = 1,
    seed: int = 42,
    progress: Callable[[int], None] | None = None,
) -> Flight:
    """Runs a scheduler of `SCHEDULERS`; predicts first, and leaves out failed requests if they are to be."""
    if readings.failed == "dropped":
        requests = requests.taken([row for row, made in enumerate(requests.output) if made])
        if not requests:
            raise ValueError("all requests failed, and failed ones are dropped")
    predicted = predict(requests, readings.predictor, seed)
    requests = Requests(requests.arrival_ns, requests.input, requests.output, predicted)
    scheduler = SCHEDULERS[name].build(requests, Setup(model, readings))
    played = play(
        requests,
        Engine(scheduler, servers),
        servers=servers,
        all_first=readings.same_instant == "all-first",
        gpu_first=readings.tie == "gpu-first",
        progress=progress,
    )
    flight = Flight(name, requests, played, readings, model, servers, seed)
    if isinstance(scheduler, MultiBinDynamic):
        return replace(flight, bins=scheduler.bins.spans, bin_limits=scheduler.limits)
    return flight


def capacity_rps(
    late_share: Callable[[float], float], allowed: float, start_rps: float, *, precision: float = 0.01
) -> float:
    """The highest rate at which no more than `allowed` of the requests are late, to within `precision`.

    `late_share` runs the workload at a rate. The share is taken to rise with the rate. 0 where even a
    thousandth of `start_rps` is too much.
    """
    low = high = start_rps
    if late_share(start_rps) <= allowed:
        while late_share(high := high * 2) <= allowed:
            low = high
    else:
        while late_share(low := low / 2) > allowed:
            high = low
            if low < start_rps / 1_000:
                return 0.0
    while high / low > 1 + precision:
        middle = (low * high) ** 0.5
        if late_share(middle) <= allowed:
            low = middle
        else:
            high = middle
    return low


def _sorted_differences(ends: "array[int]", starts: "array[int]") -> list[int]:
    differences = [end - start for end, start in zip(ends, starts, strict=True)]
    differences.sort()
    return differences


def _figures(ordered_ns: list[int], rule: str) -> dict[str, Any]:
    n = len(ordered_ns)
    # Whole nanoseconds: the sum is exact, and the mean the double nearest to the truth.
    figures: dict[str, Any] = {
        "n": n, "mean": sum(ordered_ns) / (n * 10**9),
        "min": to_seconds(ordered_ns[0]), "max": to_seconds(ordered_ns[-1]),
    }  # fmt: skip
    for name, p in SHARES.items():
        figures[name] = _percentile_s(ordered_ns, p, rule)
    return {**figures, "marks": marks(n)}


def _percentile_s(ordered_ns: list[int], p: float, rule: str) -> float | None:
    if rule != "linear":
        value = percentile_by(rule, ordered_ns, p)
        return None if value is None else to_seconds(value)
    # The two neighbours become seconds before they are interpolated, not after: as who keeps seconds has it.
    at = int((len(ordered_ns) - 1) * p)
    near = [to_seconds(t) for t in ordered_ns[at : at + 2]]
    share = (len(ordered_ns) - 1) * p - at
    return percentile(near, share) if len(near) > 1 else near[0]


def _rate(count: int, ns: int) -> float | None:
    return count * 10**9 / ns if ns else None


def _seconds(value: object) -> object:
    if isinstance(value, Duration):
        return to_seconds(value)
    raise NotImplementedError(type(value).__name__)

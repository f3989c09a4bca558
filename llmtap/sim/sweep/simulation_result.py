"""What came of a run in virtual time: its figures as public JSON.

Seed 004, section 9, says which: throughput, latency, shares of requests outside the SLAs, utilisation, batch
size, queueing delay. Where it leaves open how they are counted, `ModelOptions` does not. A run that was
measured has all figures of a Summary beside them, because it made the same Exchanges as live traffic.

Requests that a scheduler gave up are among the outcomes and outside the request SLA. They are in no latency
and no throughput, which are of completed requests; what had left of them counts among `tokens`. `unserved`
says how many they were by the reason: `too_large`, `queue_full`, `late` (before their first token),
`late_midway`.

Options that the scheduler does not read are None among its `readings` and `serving`: they had no effect.
"""

from array import array
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from llmtap.exchange.outcome import Outcome
from llmtap.metrics.statistics import SHARES, marks, percentile, percentile_by
from llmtap.metrics.summary import Summary
from llmtap.sim.latency import SEED_ITERATIONS, IterationModel, LatencyModel
from llmtap.sim.model_options import ModelOptions
from llmtap.sim.schedulers.iterations import IterationState
from llmtap.sim.schedulers.registry import ALL_OPTIONS
from llmtap.sim.serving import Serving
from llmtap.sim.virtual import Played
from llmtap.units import encode_seconds, to_seconds
from llmtap.workload.requests import Requests

__all__ = ["SimulationResult"]


@dataclass(frozen=True, slots=True)
class SimulationResult:
    """What was run, and what came of it."""

    name: str
    requests: Requests
    played: Played
    readings: ModelOptions
    model: LatencyModel
    servers: int
    seed: int | None
    """None where nothing was drawn."""
    iterations: IterationModel = SEED_ITERATIONS
    serving: Serving = field(default_factory=Serving)
    iterates: bool = False
    """It was one of the schedulers that compose anew at every iteration."""
    reads: frozenset[str] = ALL_OPTIONS
    """Options that could have changed it."""
    state: IterationState | None = None
    """What such a scheduler tells of itself when all is done."""
    summary: Summary | None = None
    """Of its exchanges, where it was measured."""
    slow: int | None = None
    """Requests with any gap between tokens outside the token SLA, where it was measured."""
    bins: list[tuple[int, int | None]] | None = None
    bin_limits: list[int] | None = None

    def latencies_ns(self) -> list[int]:
        """From arrival to completion, in ascending order; of completed requests."""
        ends, arrivals, given_up = self.played.end_ns, self.requests.arrival_ns, self.played.given_up
        if not given_up:
            return _sorted_differences(ends, arrivals)
        return sorted(
            end - start
            for i, (end, start) in enumerate(zip(ends, arrivals, strict=True))
            if i not in given_up
        )

    def late_share(self, latencies_ns: Sequence[int]) -> float:
        """Share of requests outside the request SLA: too late, or given up."""
        limit_ns = self.readings.request_sla
        late = sum(t > limit_ns for t in latencies_ns) + len(self.played.given_up)
        return late / len(self.requests)

    def slow_share(self) -> float | None:
        """Share of requests outside the token SLA.

        Of whole batches: their batch's time between tokens was too long. Else: any of their gaps was; None
        where nobody measured.
        """
        if self.iterates:
            return None if self.slow is None else self.slow / len(self.requests)
        limit_ns, step_ns = self.readings.token_sla, self.model.step_ns
        slow = sum(b * n for b, n in self.played.sizes.items() if step_ns(b) > limit_ns)
        return slow / len(self.requests)

    def to_dict(self) -> dict[str, Any]:
        """As public JSON: a Summary's names, and those that only a simulated engine has. Seconds.

        Where it was measured, all that a Summary has; what is known to the nanosecond (`metrics.e2e`) stands
        in the place of a histogram's.
        """
        requests, played, readings = self.requests, self.played, self.readings
        n, arrivals = len(requests), requests.arrival_ns
        span_ns = max(played.end_ns) - arrivals[0]
        offered_ns = arrivals[-1] - arrivals[0]
        window_ns = self._completed_ns() if readings.window == "completion" else offered_ns
        given_up = played.given_up
        # Completed ones', and then what had left of others.
        given = sum(requests.input) - sum(requests.input[r] for r in given_up)
        made = sum(requests.output) - sum(requests.output[r] for r in given_up)
        given_cut, made_cut = sum(requests.input[r] for r, k in given_up.items() if k), sum(given_up.values())
        counted = made if readings.tokens == "output" else given + made
        latencies_ns = self.latencies_ns()
        latency = _figures(latencies_ns, readings.percentile)
        busy_ns = sum(played.busy_ns)
        batches = played.sizes.total()
        output = made + made_cut
        told: dict[str, Any] = {
            "scheduler": self.name,
            "n": n,
            "window": {"name": f"first arrival to last {readings.window.removesuffix('s')}",
                       "seconds": to_seconds(window_ns)},
            "load": {
                "mode": "open", "offered_rps": _rate(n - 1, offered_ns), "achieved_rps": _rate(n, span_ns),
            },
            "metrics": {"e2e": latency},
            "outcomes": self._outcomes(),
            "unserved": self._unserved(),
            "tokens": {"input": given + given_cut, "output": output,
                       "output_per_second": _rate(output, window_ns)},
            "throughput_rps": _rate(played.finished, window_ns),
            "throughput_tps": _rate(counted, window_ns),
            "latency": latency,
            "request_sla_violation": self.late_share(latencies_ns),
            "token_sla_violation": self.slow_share(),
            "utilization": busy_ns / (span_ns * self.servers) if span_ns else None,
            "batch_mean": sum(b * k for b, k in played.sizes.items()) / batches if batches else None,
            "batches": batches,
            "batch_sizes": {str(b): k for b, k in sorted(played.sizes.items())},
            "queueing": _figures(self._queueing_ns(), readings.percentile),
            "seconds_per_output_token": to_seconds(busy_ns) / output if output else None,
            "decode_step_mean": self._step_mean(),
            "bins": self.bins,
            "bin_limits": self.bin_limits,
            "bin_batches": [played.queues[i] for i in range(len(self.bins))] if self.bins else None,
            "servers": self.servers,
            "seed": self.seed,
            "model": self._model(),
            "readings": self._told(readings),
        }  # fmt: skip
        if self.iterates:
            told["serving"] = self._told(self.serving)
            told["engine"] = None if self.state is None else _engine(self.state, n)
        if self.summary is not None:
            measured = self.summary.to_dict(told["window"], to_seconds(window_ns), "open")
            for name in ("metrics", "tokens"):
                told[name] = measured[name] | told[name]
            told = measured | told
        return told

    def _completed_ns(self) -> int:
        """From the first arrival to the last completion."""
        ends, given_up = self.played.end_ns, self.played.given_up
        completed: Iterable[int] = ends
        if given_up:
            completed = (end for i, end in enumerate(ends) if i not in given_up)
        first_ns = self.requests.arrival_ns[0]
        return max(completed, default=first_ns) - first_ns

    def _queueing_ns(self) -> list[int]:
        """From arrival until a server took it up, in ascending order; of those for which one did."""
        starts, arrivals = self.played.start_ns, self.requests.arrival_ns
        if not self.played.given_up:
            return _sorted_differences(starts, arrivals)
        return sorted(start - at for start, at in zip(starts, arrivals, strict=True) if start >= 0)

    def _outcomes(self) -> dict[str, int]:
        """As the exchanges have them."""
        played = self.played
        cut = sum(1 for tokens in played.given_up.values() if tokens)
        told = {
            Outcome.COMPLETE: played.finished,
            Outcome.TRUNCATED: cut,
            Outcome.UPSTREAM_ERROR: len(played.given_up) - cut,
        }
        return {outcome.value: n for outcome, n in told.items() if n}

    def _unserved(self) -> dict[str, int]:
        """Requests that were given up, by the reason."""
        given_up = self.played.given_up
        told = Counter(
            reason.value + ("_midway" if given_up[request] else "")
            for request, reason in self.played.reasons.items()
        )
        return dict(sorted(told.items()))

    def _told(self, options: msgspec.Struct) -> dict[str, Any]:
        """What had an effect as public JSON has it; None for what had none."""
        told = msgspec.to_builtins(options, enc_hook=encode_seconds)
        return {name: value if name in self.reads else None for name, value in told.items()}

    def _step_mean(self) -> float | None:
        """Seconds between two tokens of a batch, averaged over batches; of iterations, their mean length."""
        played, n = self.played, self.played.sizes.total()
        if not n:
            return None
        if self.iterates:
            return to_seconds(sum(played.busy_ns) / n)
        return to_seconds(sum(self.model.step_ns(b) * k for b, k in played.sizes.items()) / n)

    def _model(self) -> dict[str, float]:
        if self.iterates:
            model = self.iterations
            return {
                "beta": to_seconds(model.beta_ns), "gamma": model.gamma,
                "prefill": to_seconds(model.prefill_ns), "context": to_seconds(model.context_ns),
            }  # fmt: skip
        return {"alpha": to_seconds(self.model.alpha_ns), "beta": to_seconds(self.model.beta_ns),
                "gamma": self.model.gamma}  # fmt: skip


def _engine(state: IterationState, n: int) -> dict[str, Any]:
    """What the engine did with its memory; of `n` requests (IETF seed 000, 5.7.4 and 5.8.4)."""
    return {
        "preemptions": state.preemptions,
        "preempted": state.preempted,
        "preempted_share": state.preempted / n,
        "recovery": state.recovered / state.preempted if state.preempted else None,
        "preempted_tokens": state.preempted_tokens,
        "preemption_loss": state.preempted_tokens / state.preemptions if state.preemptions else None,
        "kv_peak": state.kv_peak,
        "prefix_queries": state.prefix_queries,
        "prefix_hits": state.prefix_hits,
        "prefix_hit_rate": state.prefix_hits / state.prefix_queries if state.prefix_queries else None,
    }


def _sorted_differences(ends: "array[int]", starts: "array[int]") -> list[int]:
    differences = [end - start for end, start in zip(ends, starts, strict=True)]
    differences.sort()
    return differences


def _figures(ordered_ns: list[int], rule: str) -> dict[str, Any]:
    n = len(ordered_ns)
    if not n:
        return {"n": 0, **dict.fromkeys(("mean", "min", "max", *SHARES)), "marks": marks(0)}
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

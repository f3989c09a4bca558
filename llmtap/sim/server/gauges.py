"""The metrics of the simulated server at `/metrics`: vLLM's names and buckets, and details on preemption.

`reception.py`, `sender.py` and `server.py` report the start, first token, gaps and end of each request to
`EngineMetrics`, which counts them. The metrics of queue, KV memory, preemptions and prefix cache are read
from the engine's `state`. `text` returns all metrics in the Prometheus text format.

With a fixed schedule, no request waits, all open requests are running, and the metrics of KV memory,
preemption and the prefix cache are missing. With a scheduler of whole batches, these metrics are 0. As in
vLLM, prompt tokens are counted with the first output token, and the counters do not include requests that the
API server rejected before they reached the engine.

Source: vLLM's `v1/engine/__init__.py` for the finish reasons.
"""

from collections.abc import Callable
from typing import Any, Final, TypeVar

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from llmtap.sim.engine import IterationState
from llmtap.units import NS_PER_S

_TTFT_EDGES_S: Final = (
    0.001,
    0.005,
    0.01,
    0.02,
    0.04,
    0.06,
    0.08,
    0.1,
    0.25,
    0.5,
    0.75,
    1.0,
    2.5,
    5.0,
    7.5,
    10.0,
    20.0,
    40.0,
    80.0,
    160.0,
    640.0,
    2560.0,
)
_ITL_EDGES_S: Final = (
    0.01,
    0.025,
    0.05,
    0.075,
    0.1,
    0.15,
    0.2,
    0.3,
    0.4,
    0.5,
    0.75,
    1.0,
    2.5,
    5.0,
    7.5,
    10.0,
    20.0,
    40.0,
    80.0,
)
_E2E_EDGES_S: Final = (
    0.3,
    0.5,
    0.8,
    1.0,
    1.5,
    2.0,
    2.5,
    5.0,
    10.0,
    15.0,
    20.0,
    30.0,
    40.0,
    50.0,
    60.0,
    120.0,
    240.0,
    480.0,
    960.0,
    1920.0,
    7680.0,
)
_STATE_COUNTERS: Final = (
    ("preemptions", "vllm:num_preemptions", "Requests preempted, each time."),
    ("prefix_queries", "vllm:prefix_cache_queries", "Tokens looked for in the prefix cache."),
    ("prefix_hits", "vllm:prefix_cache_hits", "Tokens found there."),
    ("preempted", "llmtap_sim:preempted_requests", "Requests preempted at least once."),
    ("recovered", "llmtap_sim:recovered_requests", "Preempted requests that were served to the end."),
    ("preempted_tokens", "llmtap_sim:preempted_tokens", "Tokens whose KV was discarded by preemption."),
    ("swapped_tokens", "llmtap_sim:swapped_tokens", "Tokens whose KV was swapped out by preemption."),
)
"""Counters that are read from the engine's state: attribute, name of the metric, and help text."""
_LATENCIES: Final = (
    ("time_to_first_token", "From the request to its first token.", _TTFT_EDGES_S),
    ("inter_token_latency", "Between writes that carry tokens.", _ITL_EDGES_S),
    ("request_time_per_output_token", "Mean time per output token of a request.", _ITL_EDGES_S),
    ("e2e_request_latency", "From a request to the end of its answer.", _E2E_EDGES_S),
)
MetricT = TypeVar("MetricT", Gauge, Counter, Histogram)
_LABELS: Final = ("model_name", "engine")
_REASONS: Final = ("stop", "length", "abort", "error")
"""vLLM's finish reasons that occur here. `abort`: the client disconnected, or a fault ended the answer."""


class EngineMetrics:
    """Counters, gauges and histograms of the simulated server."""

    def __init__(self, model: str, state: Callable[[], IterationState] | None = None) -> None:
        """`state`: function that returns the engine's state; None: fixed schedule."""
        self._read_state = state
        """Returns the state of the simulated engine; None: answers have no engine."""
        self._open_requests = 0
        self._registry = registry = CollectorRegistry()
        self._label_values = (model, "0")

        def create(kind: type[MetricT], name: str, text: str, **more: Any) -> MetricT:
            metric: MetricT = kind(
                name if ":" in name else f"vllm:{name}", text, _LABELS, registry=registry, **more
            ).labels(*self._label_values)
            return metric

        self._running = create(Gauge, "num_requests_running", "Requests being answered.")
        self._waiting = create(Gauge, "num_requests_waiting", "Requests that wait for the engine.")
        if state is not None:
            self._kv_used = create(Gauge, "kv_cache_usage_perc", "Share of the KV memory in use.")
            self._counters = {field: create(Counter, name, text) for field, name, text in _STATE_COUNTERS}
            self._exported_counts = dict.fromkeys(self._counters, 0)
            """By name: count that the metric has, to add only the difference."""
        self._prompt_tokens = create(Counter, "prompt_tokens", "Tokens of prompts.")
        self._output_tokens = create(Counter, "generation_tokens", "Tokens of answers.")
        self._successes = Counter(
            "vllm:request_success",
            "Requests answered, by how they ended.",
            (*_LABELS, "finished_reason"),
            registry=registry,
        )
        for reason in _REASONS:  # Export 0 at the start, so that rate() includes the first request.
            self._successes.labels(*self._label_values, reason)
        self._ttft, self._itl, self._tpot, self._e2e = (
            create(Histogram, f"{name}_seconds", text, buckets=buckets) for name, text, buckets in _LATENCIES
        )

    def on_begin(self) -> None:
        self._open_requests += 1

    def on_prompt(self, prompt_tokens: int) -> None:
        """Count the tokens of a prompt. Must be called when its first output token is sent."""
        self._prompt_tokens.inc(prompt_tokens)

    def on_first_token(self, ns: int) -> None:
        self._ttft.observe(ns / NS_PER_S)

    def on_gap(self, ns: int) -> None:
        self._itl.observe(ns / NS_PER_S)

    def on_ended(
        self,
        tokens: int,
        first_to_last_ns: int | None,
        e2e_ns: int,
        reasons: list[str],
        *,
        whole: bool = True,
    ) -> None:
        """Count the end of a request with `tokens` output tokens.

        `reasons`: finish reasons of its choices; empty if the request did not reach the engine. `whole`:
        whether the answer was sent completely, so that its duration counts.
        """
        self._open_requests -= 1
        self._output_tokens.inc(tokens)
        if first_to_last_ns is not None and tokens > 1:
            self._tpot.observe(first_to_last_ns / NS_PER_S / (tokens - 1))
        for reason in reasons:
            self._successes.labels(*self._label_values, reason).inc()
        if reasons and whole:
            self._e2e.observe(e2e_ns / NS_PER_S)

    def text(self) -> bytes:
        if self._read_state is None:
            self._running.set(self._open_requests)
        else:
            state = self._read_state()
            self._running.set(state.running)
            self._waiting.set(state.waiting)
            self._kv_used.set(state.kv_used)
            for name, metric in self._counters.items():
                count = getattr(state, name)
                metric.inc(count - self._exported_counts[name])
                self._exported_counts[name] = count
        return generate_latest(self._registry)

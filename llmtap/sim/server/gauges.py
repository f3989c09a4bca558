"""The metrics of the simulated server at `/metrics`: vLLM's names and buckets, and preemption in detail.

`reception.py`, `sender.py` and `server.py` report each request, first token, gap and end to `EngineMetrics`,
which counts them in counters and histograms; queue, KV memory, preemptions and the prefix cache are read from
the engine's `state`. `text` returns all in the Prometheus text format.

With a fixed schedule, no request waits, all open requests are running, and the metrics of KV memory,
preemption and the prefix cache are missing. With an engine of whole batches, these metrics are 0. As in vLLM,
where the API server is in front of the engine, prompt tokens are counted with the first output token, and
requests that were rejected before the engine are not in its counters.

Source: vLLM's `v1/engine/__init__.py` for the reasons.
"""

from collections.abc import Callable
from typing import Any, Final, TypeVar

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from llmtap.sim.engine import IterationState
from llmtap.units import NS_PER_S

_TTFT_EDGES_S: Final = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0,
    80.0, 160.0, 640.0, 2560.0,
)  # fmt: skip
_ITL_EDGES_S: Final = (
    0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0,
    80.0,
)  # fmt: skip
_E2E_EDGES_S: Final = (
    0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0,
    960.0, 1920.0, 7680.0,
)  # fmt: skip
_COUNTED: Final = (
    ("preemptions", "vllm:num_preemptions", "Requests preempted, each time."),
    ("prefix_queries", "vllm:prefix_cache_queries", "Tokens looked for in the prefix cache."),
    ("prefix_hits", "vllm:prefix_cache_hits", "Tokens found there."),
    ("preempted", "llmtap_sim:preempted_requests", "Requests preempted at least once."),
    ("recovered", "llmtap_sim:recovered_requests", "Preempted requests that were served to the end."),
    ("preempted_tokens", "llmtap_sim:preempted_tokens", "Tokens whose KV was discarded by preemption."),
    ("swapped_tokens", "llmtap_sim:swapped_tokens", "Tokens whose KV was swapped out by preemption."),
)
"""Counters that are read from the engine's state: field, name of the metric, and help text."""
_LATENCIES: Final = (
    ("time_to_first_token", "From the request to its first token.", _TTFT_EDGES_S),
    ("inter_token_latency", "Between writes that carry tokens.", _ITL_EDGES_S),
    ("request_time_per_output_token", "Mean time per output token of a request.", _ITL_EDGES_S),
    ("e2e_request_latency", "From a request to the end of its answer.", _E2E_EDGES_S),
)
M = TypeVar("M", Gauge, Counter, Histogram)
_LABELS: Final = ("model_name", "engine")
_REASONS: Final = ("stop", "length", "abort", "error")
"""vLLM's finish reasons that occur here. `abort`: the client disconnected, or the answer broke off."""


class EngineMetrics:
    def __init__(self, model: str, state: Callable[[], IterationState] | None = None) -> None:
        self._state = state
        self._open_requests = 0
        self._registry = registry = CollectorRegistry()
        self._label_values = (model, "0")

        def create(kind: type[M], name: str, text: str, **more: Any) -> M:
            metric: M = kind(
                name if ":" in name else f"vllm:{name}", text, _LABELS, registry=registry, **more
            ).labels(*self._label_values)
            return metric

        self._running = create(Gauge, "num_requests_running", "Requests being answered.")
        self._waiting = create(Gauge, "num_requests_waiting", "Requests that wait for the engine.")
        if state is not None:
            self._kv = create(Gauge, "kv_cache_usage_perc", "Share of the KV memory in use.")
            self._counted = {field: create(Counter, name, text) for field, name, text in _COUNTED}
            self._exported = dict.fromkeys(self._counted, 0)
        self._prompt = create(Counter, "prompt_tokens", "Tokens of prompts.")
        self._output = create(Counter, "generation_tokens", "Tokens of answers.")
        self._success = Counter(
            "vllm:request_success",
            "Requests answered, by how they ended.",
            (*_LABELS, "finished_reason"),
            registry=registry,
        )
        for reason in _REASONS:  # Export 0 before the first request, so that rate() includes it.
            self._success.labels(*self._label_values, reason)
        self._ttft, self._itl, self._tpot, self._e2e = (
            create(Histogram, f"{name}_seconds", text, buckets=buckets) for name, text, buckets in _LATENCIES
        )

    def on_begin(self) -> None:
        self._open_requests += 1

    def on_prompt(self, prompt_tokens: int) -> None:
        """Count the tokens of a prompt; called when its first output token was create."""
        self._prompt.inc(prompt_tokens)

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
        """Count the end of a request.

        `reasons`: finish reasons of its choices; empty if the request did not reach the engine.
        """
        self._open_requests -= 1
        self._output.inc(tokens)
        if first_to_last_ns is not None and tokens > 1:
            self._tpot.observe(first_to_last_ns / NS_PER_S / (tokens - 1))
        for reason in reasons:
            self._success.labels(*self._label_values, reason).inc()
        if reasons and whole:
            self._e2e.observe(e2e_ns / NS_PER_S)

    def text(self) -> bytes:
        if self._state is None:
            self._running.set(self._open_requests)
        else:
            state = self._state()
            self._running.set(state.running)
            self._waiting.set(state.waiting)
            self._kv.set(state.kv_used)
            for name, metric in self._counted.items():
                now = getattr(state, name)
                metric.inc(now - self._exported[name])
                self._exported[name] = now
        return generate_latest(self._registry)

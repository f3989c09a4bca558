"""Catalogue of the metrics on `/metrics`: name, type, help, labels, histogram edges.

Metrics of exchanges are in `HISTOGRAMS` and `COUNTERS` (`exposition.py` counts them), those of llmtap
itself in `SELF` (`meter/admin/views.py` has the values; `collect` converts them for prometheus_client). A
counter's name gets `_total` in the exposition. `llmtap_capture_paused` is the metric to alert on:
exchanges are measured and not captured; the reason is in `llmtap_capture_problem`.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Final

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric

from llmtap.channel.frames import LAG_EDGES_NS
from llmtap.export.buckets import ADDED_EDGES_NS, DURATION_EDGES_NS, GAP_EDGES_NS, TOKEN_EDGES, TTFT_EDGES_NS

WHO: Final = ("tenant", "model", "arm")


@dataclass(frozen=True, slots=True)
class HistogramFamily:
    """A histogram metric; `unit` is the number of recorded units in one unit of the metric."""

    name: str
    help: str
    edges: tuple[int, ...]
    unit: float = 1e9
    labels: tuple[str, ...] = WHO

    def with_edges(self, more: Iterable[int]) -> "HistogramFamily":
        return replace(self, edges=tuple(sorted({*self.edges, *more})))


@dataclass(frozen=True, slots=True)
class CounterFamily:
    name: str
    help: str
    labels: tuple[str, ...] = WHO


@dataclass(frozen=True, slots=True)
class SelfMetric:
    """A metric of llmtap about itself, without the prefix `llmtap_`."""

    kind: type[CounterMetricFamily | GaugeMetricFamily]
    help: str
    labels: tuple[str, ...] = ()


Value = float | Mapping[str, float] | Mapping[tuple[str, str], float]
"""Value of a metric: by no label, by one, or by two."""
_C, _G = CounterMetricFamily, GaugeMetricFamily
_RELAY, _WINDOW, _EXPORTER = ("relay",), ("window",), ("exporter",)

_SPAN = "; of a younger meter, since its start"

HISTOGRAMS: Final[Mapping[str, HistogramFamily]] = {
    "ttft": HistogramFamily(
        "llmtap_time_to_first_token_seconds",
        "Submit to first token of a stream; kind=content: first content that is not blank, any: of any kind",
        TTFT_EDGES_NS,
        labels=(*WHO, "kind"),
    ),
    "ttfb": HistogramFamily(
        "llmtap_time_to_first_byte_seconds", "Submit to first byte of the response's body", TTFT_EDGES_NS
    ),
    "headers": HistogramFamily(
        "llmtap_time_to_headers_seconds", "Submit to the end of the response's head", TTFT_EDGES_NS
    ),
    "first_event": HistogramFamily(
        "llmtap_time_to_first_event_seconds",
        "Submit to the first event of a stream, a role or a keep-alive too",
        TTFT_EDGES_NS,
    ),
    "chunk_gap": HistogramFamily(
        "llmtap_inter_chunk_seconds", "Time between consecutive events that carry output", GAP_EDGES_NS
    ),
    "token_gap": HistogramFamily(
        "llmtap_inter_token_seconds",
        "Inter-token latency; option=A: gaps between chunks, B: all tokens of a chunk arrive with it,"
        " B-even: a gap is spread over the tokens of its chunk (both where tokens per chunk are known),"
        " C: by the server's own clock (where it tells)",
        GAP_EDGES_NS,
        labels=(*WHO, "option"),
    ),
    "tpot": HistogramFamily(
        "llmtap_time_per_output_token_seconds",
        "(last token - first token) / (output tokens - 1)",
        GAP_EDGES_NS,
    ),
    "duration": HistogramFamily(
        "llmtap_request_duration_seconds",
        "Submit to last byte, of answers that ended well",
        DURATION_EDGES_NS,
    ),
    "idle": HistogramFamily(
        "llmtap_user_idle_seconds",
        "User idle latency: how long a reader waits with nothing to read, from submit on",
        TTFT_EDGES_NS,
    ),
    "idle_reading": HistogramFamily(
        "llmtap_user_idle_after_first_token_seconds",
        "The same from the first token on: TTFT is forgiven",
        TTFT_EDGES_NS,
    ),
    "chunk_tokens": HistogramFamily(
        "llmtap_chunk_tokens", "Tokens in each event that carries output, where known", TOKEN_EDGES, unit=1
    ),
    "clock": HistogramFamily(
        "llmtap_server_clock_disagreement_seconds",
        "Difference between what we saw of a duration and the server's report of it;"
        " longer=ours: network and queues between the two, longer=server: a clock is wrong",
        TTFT_EDGES_NS,
        labels=(*WHO, "duration", "longer"),
    ),
}
ADDED: Final = HistogramFamily(
    "llmtap_tap_added_seconds",
    "What the tap itself added, from a read to the kernel's taking the bytes",
    ADDED_EDGES_NS,
    labels=("point",),
)
CALLS: Final = HistogramFamily(
    "llmtap_mcp_request_duration_seconds",
    "Submit to the end of the answer of a request to an MCP server; name: the tool or prompt",
    DURATION_EDGES_NS,
    labels=("tenant", "method", "name", "outcome"),
)
LAG: Final = HistogramFamily(
    "llmtap_tap_loop_lag_seconds", "How late the relay's event loop ran", LAG_EDGES_NS, labels=_RELAY
)
COUNTERS: Final[Mapping[str, CounterFamily]] = {
    "exchanges": CounterFamily("llmtap_exchanges", "Exchanges by outcome", (*WHO, "outcome")),
    "output": CounterFamily(
        "llmtap_output_tokens", "Output tokens by the source of the count", (*WHO, "source")
    ),
    "input": CounterFamily("llmtap_input_tokens", "Input tokens, if the provider reports them"),
    "cached": CounterFamily("llmtap_cached_input_tokens", "Those of the input tokens that were cached"),
    "reasoning": CounterFamily("llmtap_reasoning_tokens", "Those of the output tokens that were reasoning"),
    "after_cancel": CounterFamily(
        "llmtap_tokens_after_cancel",
        "Output tokens that an application with the middleware still sent when the client had left. A relay"
        " closes the upstream's connection then and cannot see more: see llmtap_upstream_output_tokens_total",
    ),
    "smooth_tokens": CounterFamily(
        "llmtap_smooth_output_tokens",
        "Output tokens of streams with a known user idle latency; the benefit is these minus the penalty",
    ),
    "smooth_penalty": CounterFamily(
        "llmtap_smooth_penalty_tokens",
        "Penalty of the user idle latency of these streams: alpha x f(l), in tokens",
    ),
    "deadlines": CounterFamily(
        "llmtap_token_deadlines",
        "Token deadlines of streams with bounds for the first token and the gaps; met / all is the fluidity"
        " index of Etalon's code",
        (*WHO, "result"),
    ),
    "no_token": CounterFamily(
        "llmtap_no_token", "Exchanges that never produced a token, by reason", (*WHO, "reason")
    ),
    "guardrail": CounterFamily(
        "llmtap_guardrail_events",
        "Refusals and interventions; kind: whose, or flagged and redacted for what went on",
        (*WHO, "kind", "source"),
    ),
    "events": CounterFamily("llmtap_stream_events", "Events of streams; over reads: events per read"),
    "reads": CounterFamily("llmtap_stream_reads", "Reads that the events of streams came in"),
    "bursts": CounterFamily("llmtap_bursts", "Bursts of events after a hold"),
    "burst_events": CounterFamily("llmtap_burst_events", "Events that came in bursts"),
    "uncertain": CounterFamily(
        "llmtap_uncertain_exchanges", "Exchanges whose stamps are wider than meter.uncertainty_limit"
    ),
}
SELF: Final[Mapping[str, SelfMetric]] = {
    "unparsed_events": SelfMetric(_C, "Events of a shape the dialect does not know"),
    "slo_events": SelfMetric(_C, "Exchanges that objectives applied to", ("slo", "tenant")),
    "slo_good": SelfMetric(_C, "Those that met every one of them", ("slo", "tenant")),
    "slo_target_ratio": SelfMetric(_G, "Share of the exchanges that must meet their objectives", ("slo",)),
    "slo_objective_seconds": SelfMetric(
        _G, "Bounds of the objectives, each an edge of the histogram that shows it", ("slo", "objective")
    ),
    "slo_burn_rate": SelfMetric(
        _G,
        f"How many times faster than allowed the error budget goes, over a window{_SPAN}",
        ("slo", "window"),
    ),
    "relay_exchanges": SelfMetric(_C, "Exchanges started", _RELAY),
    "tap_measured_exchanges": SelfMetric(_C, "Exchanges whose every frame was acknowledged", _RELAY),
    "relay_upstream_connects": SelfMetric(_C, "Connections made upstream", _RELAY),
    "relay_upstream_reuses": SelfMetric(_C, "Requests on a kept-alive connection", _RELAY),
    "relay_upstream_unsolicited": SelfMetric(
        _C, "Connections closed because the upstream sent bytes that no request had asked for", _RELAY
    ),
    "relay_cpu_seconds": SelfMetric(_C, "CPU time of the relay", _RELAY),
    "relay_connections": SelfMetric(_G, "Client connections now", _RELAY),
    "relay_streams": SelfMetric(_G, "Exchanges in progress", _RELAY),
    "relay_upstream_idle": SelfMetric(_G, "Idle upstream connections", _RELAY),
    "relay_tap_pending_bytes": SelfMetric(_G, "Bytes waiting to go to the meter", _RELAY),
    "relay_rss_bytes": SelfMetric(_G, "Resident memory of the relay", _RELAY),
    "relay_up": SelfMetric(_G, "1 while the relay reports to the meter", _RELAY),
    "relay_upstream_up": SelfMetric(
        _G,
        "1 if the upstream accepted the latest connection of the relay; its responses do not count",
        ("relay", "upstream"),
    ),
    "relay_info": SelfMetric(
        _G,
        "Implementation of the parts that can be compiled of each relay that reports to the meter",
        ("relay", "implementation"),
    ),
    "tap_dropped_exchanges": SelfMetric(_C, "Exchanges that passed unmeasured", ("relay", "reason")),
    "relay_skipped_requests": SelfMetric(
        _C,
        "Requests forwarded but not measured, as no inference: by rule of relay.skip",
        ("relay", "rule"),
    ),
    "relay_refused": SelfMetric(_C, "Connections and requests turned away, by limit", ("relay", "limit")),
    "relay_bytes": SelfMetric(
        _C, "Bytes passed on: up to the gateway, down to the clients", ("relay", "direction")
    ),
    "label_overflow": SelfMetric(
        _C, "Exchanges counted as `other` because the label (or the number of series) was full", ("label",)
    ),
    "meter_errors": SelfMetric(_C, "What the meter could not make sense of", ("kind",)),
    "meter_frames": SelfMetric(_C, "Frames read from relays"),
    "meter_cpu_seconds": SelfMetric(_C, "CPU time of the meter"),
    "meter_rss_bytes": SelfMetric(_G, "Resident memory of the meter"),
    "live_missed_exchanges": SelfMetric(_C, "Exchanges that a subscriber of the live feed was too slow for"),
    "smooth_goodput_tokens_per_second": SelfMetric(
        _G, f"Sum of output tokens - alpha x user idle latency, per second{_SPAN}", _WINDOW
    ),
    "goodput_requests_per_second": SelfMetric(
        _G, f"Requests that met all their objectives, per second{_SPAN}", _WINDOW
    ),
    "upstream_running_requests": SelfMetric(_G, "Requests that the upstream runs, by its own /metrics"),
    "upstream_waiting_requests": SelfMetric(_G, "Requests in the queue of the upstream"),
    "upstream_kv_cache_usage_ratio": SelfMetric(_G, "Share of the KV cache of the upstream in use"),
    "upstream_output_tokens": SelfMetric(
        _C,
        "Output tokens that the upstream counted; more than llmtap_output_tokens_total: generated for clients"
        " that had left, or that do not come through llmtap",
    ),
    "upstream_scrape_failures": SelfMetric(_C, "Scrapes of the upstream's metrics that failed"),
    "window_uncertainty_seconds": SelfMetric(
        _G, "Worst lag of a relay's event loop in a window: no figure of it is more exact", _WINDOW
    ),
    "export_sent": SelfMetric(_C, "Spans that receivers took", _EXPORTER),
    "watch_packets": SelfMetric(
        _C, "Packets that passed the filter: captured, or lost by the kernel", ("relay", "result")
    ),
    "watch_connections": SelfMetric(
        _C,
        "Connections of a passive vantage: with a request (followed, joined late); not measured, by kind",
        ("relay", "kind"),
    ),
    "watch_missing_bytes": SelfMetric(_C, "Bytes of streams that no packet brought", _RELAY),
    "export_dropped": SelfMetric(_C, "Spans that no receiver got", ("exporter", "reason")),
    "export_failures": SelfMetric(_C, "Requests to receivers that failed", _EXPORTER),
    "capture_exchanges": SelfMetric(_C, "Exchanges kept"),
    "capture_unshaped_exchanges": SelfMetric(_C, "Exchanges kept without the shape of their request"),
    "capture_written_bytes": SelfMetric(_C, "Bytes written to the spool"),
    "capture_files": SelfMetric(_C, "Files finished and delivered"),
    "capture_deleted_files": SelfMetric(_C, "Files deleted to stay below the bound"),
    "capture_failures": SelfMetric(_C, "Attempts to finish or deliver a file that failed"),
    "capture_recovered_exchanges": SelfMetric(_C, "Exchanges found in spools of an earlier run"),
    "capture_damaged_batches": SelfMetric(_C, "Batches of such spools that could not be read"),
    "capture_dropped_exchanges": SelfMetric(
        _C,
        "Exchanges that were measured and not kept; deleted: their file was deleted at the limit",
        ("reason",),
    ),
    "capture_paused": SelfMetric(
        _G, "1 while nothing can be written and exchanges are measured only; why: llmtap_capture_problem"
    ),
    "capture_problem": SelfMetric(
        _G,
        "1 for each thing that is wrong now: disk_full, folder or total_bytes pause the capture; "
        "files: finished ones do not get to their place, and wait",
        ("reason",),
    ),
    "capture_waiting_exchanges": SelfMetric(_G, "Exchanges in memory, to be written"),
    "capture_waiting_files": SelfMetric(_G, "Closed spools that are not Parquet yet"),
    "capture_spool_bytes": SelfMetric(_G, "Size of all spools, the open one too"),
    "capture_local_bytes": SelfMetric(_G, "Size of all spools and local files together"),
}


def collect(values: Mapping[str, Value], helps: Mapping[str, str]) -> Iterator[Metric]:
    """Yield the metrics of SELF that have a value. `helps` replaces the help of some."""
    for name, about in SELF.items():
        if name in values:
            value = values[name]
            metric = about.kind(f"llmtap_{name}", helps.get(name, about.help), labels=about.labels)
            for key, number in value.items() if isinstance(value, Mapping) else [((), value)]:
                metric.add_metric((key,) if isinstance(key, str) else key, number)
            yield metric

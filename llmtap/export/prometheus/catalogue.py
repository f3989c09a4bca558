"""Catalogue of the metrics on `/metrics`: name, type, help, labels, histogram edges.

Metrics of exchanges are in `HISTOGRAMS` (the metrics of `metrics/catalogue.py`, and a few more) and
`COUNTERS`; `exposition.py` counts them. Metrics about llmtap itself are in `SELF`: the counts that the
statuses of vantages, exporters and the capture declare (`counts.py`), and counts of the meter
(`meter/admin/views.py` has the values). `collect` converts the metrics of `SELF` for prometheus_client. A
counter's name gets the ending `_total` in the exposition. Alerts should use `llmtap_capture_paused`, which is
1 while exchanges are measured but not captured; `llmtap_capture_problem` has the reason.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric

from llmtap.channel.status import LAG_EDGES_NS, RelayStatus
from llmtap.counts import fields_of
from llmtap.export.buckets import (
    ADDED_EDGES_NS,
    CLOSE_RATIO,
    DURATION_EDGES_NS,
    GAP_EDGES_NS,
    KINDS,
    TOKEN_EDGES,
    TTFT_EDGES_NS,
)
from llmtap.export.sinks import CaptureState, ExporterState
from llmtap.metrics.catalogue import FAMILIES, Family

SERIES_LABELS: Final = ("tenant", "model", "arm")
TOKEN_LABELS: Final = (*SERIES_LABELS, "reading")
"""Labels of the metrics of tokens. `reading` is `dialect` for answers in a known dialect, and `inferred` for
answers in which llmtap infers the tokens from the structure."""


@dataclass(frozen=True, slots=True)
class HistogramFamily:
    """Declaration of a histogram metric."""

    name: str
    help: str
    edges: tuple[int, ...]
    """Upper edges of the buckets, in the recorded unit (ns or tokens)."""
    unit: float = 1e9
    """Number of recorded units in one unit of the metric: 1e9 ns in a second."""
    labels: tuple[str, ...] = SERIES_LABELS

    def with_bound(self, bound: int) -> "HistogramFamily":
        """Return a copy with an edge at `bound`, and with edges close to it if the family has none.

        The share of values within the bound is then exact, and a quantile near it is at most 12 % wrong.
        """
        new_edges = {bound}
        if not any(bound < edge <= bound * CLOSE_RATIO for edge in self.edges):
            new_edges.add(round(bound * CLOSE_RATIO))
        if not any(bound <= edge * CLOSE_RATIO < bound * CLOSE_RATIO for edge in self.edges):
            new_edges.add(round(bound / CLOSE_RATIO))
        return replace(self, edges=tuple(sorted({*self.edges, *new_edges})))


@dataclass(frozen=True, slots=True)
class CounterFamily:
    """Declaration of a counter metric of exchanges."""

    name: str
    help: str
    labels: tuple[str, ...] = SERIES_LABELS


@dataclass(frozen=True, slots=True)
class SelfMetric:
    """Declaration of a metric of llmtap about itself. Its name in `SELF` lacks the prefix `llmtap_`."""

    kind: type[CounterMetricFamily | GaugeMetricFamily]
    help: str
    labels: tuple[str, ...] = ()


Value = float | Mapping[Any, float]
"""Value of a metric, or its values by the value of one label (a text) or of several labels (a tuple)."""
_C, _G = CounterMetricFamily, GaugeMetricFamily
_RELAY, _WINDOW = ("relay",), ("window",)


def _label_names(family: Family) -> tuple[str, ...]:
    return (
        *(TOKEN_LABELS if family.reading else SERIES_LABELS),
        *(() if family.label is None else (family.label,)),
    )


def _counts_of(status: type, *labels: str) -> dict[str, SelfMetric]:
    """Return the metrics that the fields of a status declare (`counts.py`)."""
    return {
        count.metric: SelfMetric(
            _G if count.gauge else _C, count.help, labels if count.label is None else (*labels, count.label)
        )
        for _, _, count in fields_of(status)
        if count.metric is not None
    }


_SPAN = "; of a younger meter, since its start"

HISTOGRAMS: Final[Mapping[str, HistogramFamily]] = {
    **{
        one.key: HistogramFamily(one.name, one.help, KINDS[one.edges], labels=_label_names(one))
        for one in FAMILIES
    },
    "headers": HistogramFamily(
        "llmtap_time_to_headers_seconds", "Submit to the end of the response's head", TTFT_EDGES_NS
    ),
    "chunk_tokens": HistogramFamily(
        "llmtap_chunk_tokens", "Tokens in each event that carries output, where known", TOKEN_EDGES, unit=1
    ),
    "clock": HistogramFamily(
        "llmtap_server_clock_disagreement_seconds",
        "Difference between what we saw of a duration and the server's report of it;"
        " longer=ours: network and queues between the two, longer=server: a clock is wrong",
        TTFT_EDGES_NS,
        labels=(*SERIES_LABELS, "duration", "longer"),
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
PAIRS: Final[Mapping[str, HistogramFamily]] = {
    "request": HistogramFamily(
        "llmtap_pair_request_seconds",
        "Last byte of a request sent to the gateway until the gateway's own request; below 0 counts as 0",
        GAP_EDGES_NS,
        labels=("model",),
    ),
    "ttft": HistogramFamily(
        "llmtap_pair_first_token_seconds",
        "TTFT in front of the gateway minus TTFT behind it; below 0 counts as 0",
        GAP_EDGES_NS,
        labels=("model",),
    ),
    "token": HistogramFamily(
        "llmtap_pair_token_seconds",
        "Time from the arrival of a token at the back of the gateway until the front has it",
        GAP_EDGES_NS,
        labels=("model",),
    ),
    "tokens_held": HistogramFamily(
        "llmtap_pair_held_tokens",
        "Largest number of tokens of an answer that the gateway had and had not delivered, with those of the"
        " event that it delivered: 1 if it holds nothing back",
        TOKEN_EDGES,
        unit=1,
        labels=("model",),
    ),
}
"""Figures of the pairs of exchanges on both sides of a gateway, by their names in `pairing/figures.py`."""
COUNTERS: Final[Mapping[str, CounterFamily]] = {
    "exchanges": CounterFamily("llmtap_exchanges", "Exchanges by outcome", (*SERIES_LABELS, "outcome")),
    "output": CounterFamily(
        "llmtap_output_tokens", "Output tokens by the source of the count", (*SERIES_LABELS, "source")
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
        (*SERIES_LABELS, "result"),
    ),
    "no_token": CounterFamily(
        "llmtap_no_token", "Exchanges that never produced a token, by reason", (*SERIES_LABELS, "reason")
    ),
    "guardrail": CounterFamily(
        "llmtap_guardrail_events",
        "Refusals and interventions; kind: whose, or flagged and redacted for what went on",
        (*SERIES_LABELS, "kind", "source"),
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
    "answers_without_dialect": SelfMetric(
        _C,
        "Answers of no known dialect; reading=none: not understood, inferred: read by their structure",
        ("reading", "path", "content_type"),
    ),
    "slo_events": SelfMetric(_C, "Exchanges that objectives applied to", ("slo", "tenant")),
    "slo_good": SelfMetric(_C, "Those that met every one of them", ("slo", "tenant")),
    "slo_not_judged": SelfMetric(
        _C,
        "Exchanges that objectives could not judge, since their answers were not understood; no slo_events",
        ("slo", "tenant"),
    ),
    "slo_own_faults": SelfMetric(
        _C,
        "Exchanges that objectives left out, since llmtap itself failed (rejected, tap_error); no slo_events",
        ("slo", "tenant"),
    ),
    "slo_target_ratio": SelfMetric(_G, "Share of the exchanges that must meet their objectives", ("slo",)),
    "slo_objective_seconds": SelfMetric(
        _G, "Bounds of the objectives, each an edge of the histogram that shows it", ("slo", "objective")
    ),
    "slo_burn_rate": SelfMetric(
        _G,
        f"How many times faster than allowed the error budget goes, over a window{_SPAN}",
        ("slo", "window"),
    ),
    **_counts_of(RelayStatus, "relay"),
    "relay_up": SelfMetric(_G, "1 while the relay reports to the meter", _RELAY),
    "relay_info": SelfMetric(
        _G,
        "Implementation of the parts that can be compiled of each relay that reports to the meter",
        ("relay", "implementation"),
    ),
    "label_overflow": SelfMetric(
        _C, "Exchanges counted as `other` because the label (or the number of series) was full", ("label",)
    ),
    "meter_errors": SelfMetric(_C, "What the meter could not make sense of", ("kind",)),
    "meter_frames": SelfMetric(_C, "Frames read from relays"),
    "meter_crashes": SelfMetric(
        _C, "Meters that ended without writing their state: crashes, not reloads; it outlives the meter"
    ),
    "meter_cpu_seconds": SelfMetric(_C, "CPU time of the meter"),
    "meter_rss_bytes": SelfMetric(_G, "Resident memory of the meter"),
    "admin_limits": SelfMetric(
        _C, "Connections and answers of the admin port that were given up because of a limit", ("limit",)
    ),
    "reading_limits": SelfMetric(
        _C, "Answers whose reading reached a limit, so that less is known of them, by limit", ("limit",)
    ),
    "live_missed_exchanges": SelfMetric(_C, "Exchanges that a subscriber of the live feed was too slow for"),
    "silent_streams": SelfMetric(
        _G,
        "Running streams without a token for meter.silence_threshold or longer; kind: the token that they"
        " wait for",
        ("kind", "tenant"),
    ),
    "silence_not_judged_streams": SelfMetric(
        _G, "Running streams that may be silent, since their answers are not understood; no silent_streams"
    ),
    "ttft_step_ratio": SelfMetric(
        _G,
        "Geometric mean of TTFT since a step, divided by that of the days before at the same load and prompt"
        " length; only while the step goes on and enough streams end to judge it",
        ("model",),
    ),
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
    "pair_exchanges": SelfMetric(
        _C,
        "Exchanges of both sides of the gateway: paired, unpaired (no partner), ambiguous (several possible"
        " partners) or left_out (no memory, or uncertain times)",
        ("side", "result"),
    ),
    "pair_evidence": SelfMetric(
        _C, "Exchanges of the back in pairs, by the decisive evidence", ("evidence",)
    ),
    "pair_attempts": SelfMetric(_C, "Requests of the gateway in pairs, by their purpose", ("role",)),
    "pair_undelivered_tokens": SelfMetric(
        _C, "Output tokens that were generated for a request and never delivered to the client"
    ),
    "pair_waiting_exchanges": SelfMetric(_G, "Exchanges that have ended and wait for their partners"),
    "window_uncertainty_seconds": SelfMetric(
        _G,
        "Worst lag of a relay's event loop in a window: the error of timestamps without the kernel's",
        _WINDOW,
    ),
    **_counts_of(ExporterState, "exporter"),
    **_counts_of(CaptureState),
    "capture_paused": SelfMetric(
        _G, "1 while nothing can be written and exchanges are measured only; why: llmtap_capture_problem"
    ),
    "capture_problem": SelfMetric(
        _G,
        "1 for each thing that is wrong now: disk_full, folder or total_bytes pause the capture; "
        "files: finished ones do not get to their place, and wait",
        ("reason",),
    ),
}


def collect(values: Mapping[str, Value], helps: Mapping[str, str]) -> Iterator[Metric]:
    """Yield the metrics of SELF that have a value. `helps`: by name, help texts to use instead."""
    for name, declared in SELF.items():
        if name in values:
            value = values[name]
            metric = declared.kind(f"llmtap_{name}", helps.get(name, declared.help), labels=declared.labels)
            for key, number in value.items() if isinstance(value, Mapping) else [((), value)]:
                metric.add_metric((key,) if isinstance(key, str) else key, number)
            yield metric

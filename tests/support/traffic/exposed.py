"""What `/metrics` can show, by rendering it with something of everything; and what queries name of it."""

import re

from prometheus_client.parser import text_string_to_metric_families

from llmtap.exchange.exchange import EventLog, Exchange, Tokens
from llmtap.exchange.outcome import Outcome, Reading
from llmtap.export.buckets import Buckets
from llmtap.export.prometheus.catalogue import LAG, PAIRS, Value
from llmtap.export.prometheus.exposition import Exposition
from llmtap.export.sinks import CaptureState, ExporterState, SeriesKey
from llmtap.meter.admin.views import capture_values, exporter_values, lag_cells, relay_values, upstream_values
from llmtap.meter.relays import RelayState, UpstreamLoad
from llmtap.metrics.latency import measure
from llmtap.metrics.objectives import Objectives
from llmtap.net.server_metrics import SERIES
from tests.support.traffic.exchanges import streamed
from tests.support.traffic.relay_status import relay_status

OF_A_SCRAPE = {"job", "instance", "namespace", "pod"}
"""The labels that Prometheus adds to every sample; the last two with the Prometheus Operator."""
FUNCTIONS = frozenset(
    {
        "absent",
        "and",
        "by",
        "clamp_min",
        "count",
        "group_left",
        "histogram_quantile",
        "ignoring",
        "increase",
        "max",
        "on",
        "or",
        "rate",
        "resets",
        "sum",
        "sum_over_time",
        "unless",
        "vector",
        "without",
    }
)
"""All that may stand before a parenthesis in our queries."""
_NAME = r"llmtap_\w+|slo:[\w:]+|sloth_slo_info|ALERTS|scrape_\w+|up"
_SELECTOR = re.compile(rf"(?<![\w:\"])({_NAME})\b(?:\{{([^}}]*)\}})?")
_GROUPED = re.compile(r"\b(?:by|without|on|ignoring)\s*\(([^)]*)\)")
_MATCHER = re.compile(r"(\w+)\s*(?:=~|!~|!=|=)")


def exposition_text() -> str:
    """The text of `/metrics` with something of everything."""
    exposition = Exposition("1.0", {"gold": Objectives.parse("ttft:500ms tpot:50ms")})
    for x in _exchanges():
        exposition.on_end(x, measure(x), SeriesKey("acme", "tiny", "control", "gold"), None)
    status = relay_status(
        opened=9,
        measured=7,
        dropped={"overflow": 1},
        refused={"tap_overloaded": 1},
        upstreams={"http://127.0.0.1:8000": True},
    )
    relays = [RelayState("r0", True, status)]
    capture = CaptureState(dropped={"memory": 1}, problem="disk_full", files_problem="no such bucket")
    upstream = UpstreamLoad("http://127.0.0.1:9/metrics")
    upstream.values = dict.fromkeys(SERIES, 1.0)
    values: dict[str, Value] = {
        "slo_events": {("gold", "acme"): 2, ("gold", "default"): 0},
        "slo_good": {("gold", "acme"): 1, ("gold", "default"): 0},
        "slo_not_judged": {("gold", "acme"): 1, ("gold", "default"): 0},
        "slo_own_faults": {("gold", "acme"): 1, ("gold", "default"): 0},
        "slo_target_ratio": {"gold": 0.99},
        "slo_objective_seconds": {("gold", "ttft"): 0.5},
        "slo_burn_rate": {("gold", "5m"): 1.0},
        "label_overflow": {"tenant": 1},
        "meter_errors": {"x": 1},
        **dict.fromkeys(("meter_cpu_seconds", "meter_rss_bytes"), 0),
        "admin_limits": {"connections": 2},
        "reading_limits": {"kept_events": 1},
        "live_missed_exchanges": 0,
        "silent_streams": {("next_token", "acme"): 3},
        "silence_not_judged_streams": 1,
        "ttft_step_ratio": {"tiny": 1.5},
        "meter_frames": 1,
        "meter_crashes": 1,
        "pair_exchanges": {("back", "unpaired"): 1},
        "pair_evidence": {"prompt": 1},
        "pair_attempts": {"retry": 1},
        **dict.fromkeys(("pair_undelivered_tokens", "pair_waiting_exchanges"), 1),
        "smooth_goodput_tokens_per_second": {"1m": 1.0},
        "goodput_requests_per_second": {"1m": 1.0},
        "window_uncertainty_seconds": {"1m": 1e-9},
        **upstream_values(upstream),
        **relay_values(relays),
        **exporter_values([ExporterState("otlp", 1, 0, 1, {"queue_full": 1})]),
        **capture_values(capture),
    }
    pairs = [(family, [(("tiny",), *Buckets(family.edges).read())]) for family in PAIRS.values()]
    body, _ = exposition.freeze(values, [(LAG, lag_cells(relays)), *pairs]).render()
    return body.decode()


def exposed() -> dict[str, frozenset[str]]:
    """The labels of every sample that can be scraped, by its name."""
    found = {"up": OF_A_SCRAPE, "scrape_duration_seconds": OF_A_SCRAPE}
    for family in text_string_to_metric_families(exposition_text()):
        for sample in family.samples:
            found[sample.name] = found.get(sample.name, OF_A_SCRAPE) | set(sample.labels)
    return {name: frozenset(labels) for name, labels in found.items()}


def _exchanges() -> list[Exchange]:
    whole, refused, left = streamed(1), streamed(2), streamed(3)
    whole.uncertain = True
    whole.unparsed_events = 1
    whole.server_timing = [{"name": "ttft", "ms": 1.0}, {"name": "total", "ms": 10_000.0}]
    whole.tokens.cached, whole.tokens.reasoning = 1, 1
    refused.outcome = Outcome.REFUSED
    refused.refusal = {"kind": "output_guardrail", "source": "finish_reason"}
    left.outcome = Outcome.CLIENT_CANCELLED
    left.timeline.delivered_ns = left.timeline.first_token_ns
    unread = streamed(4)
    t = unread.timeline
    t.first_token_ns = t.first_content_ns = t.last_token_ns = None
    t.events, unread.tokens = EventLog(), Tokens()
    unread.reading, unread.content_type, unread.unparsed_events = Reading.NONE, "text/event-stream", 3
    return [whole, refused, left, unread]


def selectors(query: str) -> list[tuple[str, set[str]]]:
    """The metrics that a query names, each with the labels that it matches them by."""
    return [(m[1], set(_MATCHER.findall(m[2] or ""))) for m in _SELECTOR.finditer(query)]


def labels_grouped(query: str) -> set[str]:
    """The labels in `by (...)` and its like."""
    return {label.strip() for m in _GROUPED.finditer(query) for label in m[1].split(",") if label.strip()}

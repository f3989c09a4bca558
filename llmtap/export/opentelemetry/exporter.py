"""Export finished exchanges to an OpenTelemetry receiver: a span for each sampled exchange, and metrics.

`OtlpExporter` is a sink of the meter's pipeline. The SDK makes, batches and sends spans in its own thread,
configured by `OtlpOptions` (`export/options.py`) and the `OTEL_*` variables. `signals.py` counts the metrics,
because the SDK's instruments take 9 us per value, and a thread of this module sends them. While the receiver
is not available, the same batch of spans is sent again and again. Each span that the receiver did not accept
is counted by reason (`state().dropped`); the SDK's exporters (1.45) do not count these spans.
"""

import logging
import os
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import islice
from threading import Event, Thread
from typing import Any, Final, Literal

import grpc
import requests
from google.protobuf.message import DecodeError
from opentelemetry.exporter.otlp.proto.grpc import metric_exporter as grpc_metrics
from opentelemetry.exporter.otlp.proto.grpc import trace_exporter as grpc_traces
from opentelemetry.exporter.otlp.proto.http import metric_exporter as http_metrics
from opentelemetry.exporter.otlp.proto.http import trace_exporter as http_traces
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceResponse
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceResponse
from opentelemetry.sdk.metrics import Histogram
from opentelemetry.sdk.metrics.export import (
    AggregationTemporality,
    MetricsData,
    ResourceMetrics,
    ScopeMetrics,
)
from opentelemetry.sdk.metrics.view import ExponentialBucketHistogramAggregation
from opentelemetry.sdk.resources import SERVICE_NAME, Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.util.instrumentation import InstrumentationScope

from llmtap.clock import Clock
from llmtap.exchange.exchange import BACK, Exchange
from llmtap.exchange.trace_context import parse_trace_parent
from llmtap.export.opentelemetry.semconv import SERVICE_VERSION, VERSIONS
from llmtap.export.opentelemetry.signals import (
    ExchangeIds,
    MetricRecorder,
    Totals,
    common_values_of,
    metrics_of,
    start_span,
)
from llmtap.export.options import OtlpOptions
from llmtap.export.sinks import ExporterState, SeriesKey
from llmtap.metrics.deadlines import Benefit
from llmtap.metrics.latency import DEFAULT_BENEFIT, Measured

log = logging.getLogger(__name__)

BATCH_MAX: Final = 512
"""Maximum number of spans in one request (the SDK's default): at most 0.7 MB, and receivers accept 4 MiB."""
POINTS_MAX: Final = 2_000
"""Maximum number of metric points in one request: about 0.6 KB each, and receivers accept 4 MiB."""
QUEUE_MAX: Final = 2_048
RETRY_S: Final = 1.0
"""Pause between attempts to send a batch. Within an attempt, the SDK itself retries until its timeout."""
CLOSE_S: Final = 3.0
"""Time limit of the final flush, so that a meter ends before the supervisor would kill it."""

Answer = Literal["ok", "again", "refused"]
"""Answer to a request. `again`: it failed, and can be sent again; `refused`: it must not be sent again."""


class _Receiver(grpc.UnaryUnaryClientInterceptor):  # type: ignore[misc]  # grpcio has no type annotations.
    """Records the latest answer of a receiver, to a request over gRPC or HTTP.

    Source: OTLP specification 1.x, "OTLP/gRPC" and "OTLP/HTTP": failures, partial success.
    """

    def __init__(self) -> None:
        self.answer: Answer | None = None
        """Answer to the current request; None until it arrives."""
        self.rejected_spans = 0
        """Number of spans that the receiver rejected in its latest answer."""
        self._logged_events: set[str] = set()
        """Problems that are logged already, to log each only once."""

    def begin_request(self) -> None:
        """Forget the answer to the previous request."""
        self.answer, self.rejected_spans = None, 0

    def intercept_unary_unary(self, proceed: Any, details: Any, request: Any) -> Any:
        """Record the answer to a call; called by gRPC."""
        call, status = proceed(details, request), grpc.StatusCode
        code = call.code()
        if code is status.OK:
            self.on_success(call.result().partial_success)
        else:
            can_repeat = code in (
                status.CANCELLED,
                status.DEADLINE_EXCEEDED,
                status.ABORTED,
                status.OUT_OF_RANGE,
                status.UNAVAILABLE,
                status.DATA_LOSS,
            )
            self.on_failure("again" if can_repeat else "refused", f"{code.name}: {call.details()}")
        return call

    def on_success(self, partial_success: Any) -> None:
        """Record a successful request, with the number of spans that the receiver rejected nevertheless."""
        self.answer = "ok"
        self.rejected_spans = getattr(partial_success, "rejected_spans", 0)
        if partial_success.error_message:
            self.log("otlp_rejected", partial_success.error_message)

    def on_failure(self, answer: Answer, problem: str) -> None:
        """Record the answer to a failed request."""
        self.answer = answer
        self.log("otlp_failed", problem)

    def log(self, event: str, problem: str) -> None:
        """Log a problem if it is the first of its kind. Later problems of this kind are only counted."""
        if event not in self._logged_events:
            self._logged_events.add(event)
            log.warning("event=%s error=%r further=counted", event, problem)


class _Session(requests.Session):
    """HTTP session of the SDK's exporters that passes the receiver's answers to a `_Receiver`."""

    def __init__(self, receiver: _Receiver, response: Any) -> None:
        super().__init__()
        self._receiver, self._response = receiver, response

    def request(self, *args: Any, **options: Any) -> Any:
        receiver = self._receiver
        try:
            response = super().request(*args, **options)
        except requests.RequestException as exc:
            receiver.on_failure("again", f"{type(exc).__name__}: {exc}")
            raise
        if 200 <= response.status_code < 300:
            try:
                receiver.on_success(self._response.FromString(response.content).partial_success)
            except DecodeError:  # The status shows success, although the body is invalid.
                receiver.answer = "ok"
        else:
            can_repeat = response.status_code in (429, 502, 503, 504)
            receiver.on_failure("again" if can_repeat else "refused", f"HTTP {response.status_code}")
        return response


class _ReceiverMixin:
    """Mixin for the SDK's gRPC exporters that passes the receiver's answers to a `_Receiver`."""

    def __init__(self, receiver: _Receiver) -> None:
        self._receiver = receiver
        super().__init__()

    def _initialize_channel_and_stub(self: Any) -> None:  # The SDK also calls this when it reconnects.
        """Let the receiver's answers pass through `_receiver`; called by the SDK."""
        super()._initialize_channel_and_stub()  # type: ignore[misc]
        self._client = self._stub(grpc.intercept_channel(self._channel, self._receiver))


class _GrpcSpans(_ReceiverMixin, grpc_traces.OTLPSpanExporter):
    pass


class _GrpcMetrics(_ReceiverMixin, grpc_metrics.OTLPMetricExporter):
    pass


class _SpanDelivery(SpanExporter):
    """Delivers batches of spans, retries while the receiver is not available, and counts the spans."""

    def __init__(self, sdk_exporter: SpanExporter, receiver: _Receiver, closing: Event) -> None:
        self.sdk_exporter = sdk_exporter
        """Exporter of OpenTelemetry's SDK, which sends the spans."""
        self.sent = self.failures = 0
        """Number of spans that the receiver took, and of requests that failed."""
        self.dropped: dict[str, int] = {}
        """Number of spans that the receiver did not get, by reason."""
        self._receiver, self._closing = receiver, closing

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        receiver = self._receiver
        while True:
            answer = self._send_once(spans)
            if answer == "ok":
                self.sent += len(spans) - receiver.rejected_spans
                self.drop("rejected", receiver.rejected_spans)
                return SpanExportResult.SUCCESS
            self.failures += 1
            if answer == "again" and not self._closing.wait(RETRY_S):
                continue
            refused = answer == "refused" or not self._closing.is_set()
            self.drop("refused" if refused else "shutdown", len(spans))
            return SpanExportResult.FAILURE

    def _send_once(self, spans: Sequence[ReadableSpan]) -> Answer | None:
        """Send a batch once. Return the receiver's answer, or None if there was no answer."""
        self._receiver.begin_request()
        try:
            self.sdk_exporter.export(spans)
        except Exception as exc:  # A bug that affects one batch must not stop the export.
            self._receiver.log("otlp_bug", repr(exc))
        return self._receiver.answer

    def drop(self, reason: str, n: int) -> None:
        if n:
            self.dropped[reason] = self.dropped.get(reason, 0) + n

    def shutdown(self) -> None:
        """Do nothing, because `OtlpExporter.close` shuts the SDK's exporter down."""


class _MetricDelivery:
    """Exports the totals of the metrics at regular intervals, and once more at the end."""

    def __init__(
        self,
        sdk_exporter: Any,
        receiver: _Receiver,
        totals: Totals,
        origin: tuple[Resource, InstrumentationScope],
        clock: Clock,
        closing: Event,
    ) -> None:
        self.failures = 0
        """Number of deliveries that failed."""
        self.sdk_exporter = sdk_exporter
        """Exporter of OpenTelemetry's SDK, which sends the metrics."""
        self._receiver, self._totals, self._origin = receiver, totals, origin
        self._clock, self._closing = clock, closing
        self._is_delta = sdk_exporter._preferred_temporality[Histogram] is AggregationTemporality.DELTA
        """Whether the receiver wants the growth since the latest export, instead of totals."""
        self._interval_s = _number_of_variable("OTEL_METRIC_EXPORT_INTERVAL", 60_000.0) / 1e3
        """Time between two exports."""

    def run(self) -> None:
        """Export until `closing` is set. This is the main function of a thread."""
        is_last = False
        while not is_last:
            is_last = self._closing.wait(self._interval_s)
            try:
                self._export()
            except Exception as exc:  # A bug must not end the thread: the next export can succeed.
                self.failures += 1
                self._receiver.log("otlp_bug", repr(exc))

    def _export(self) -> None:
        resource, scope = self._origin
        now_ns = self._clock.wall_ns()
        gathered = self._totals.gather(now_ns)
        while points := list(islice(gathered, POINTS_MAX)):
            scoped = ScopeMetrics(scope, metrics_of(points, now_ns, self._is_delta), scope.schema_url or "")
            self._receiver.begin_request()
            self.sdk_exporter.export(MetricsData([ResourceMetrics(resource, [scoped], "")]))
            if self._receiver.answer != "ok":
                self.failures += 1
                return  # Do not repeat this export, because the next one sends newer totals.
            if self._is_delta:
                self._totals.forget(points)


class OtlpExporter:
    """Exports exchanges. One thread calls its methods; other threads send the data."""

    def __init__(
        self,
        options: OtlpOptions,
        clock: Clock,
        version: str,
        servers: Mapping[str, tuple[str, int]] | None = None,
        *,
        back_server: tuple[str, int] | None = None,
        reader: Benefit = DEFAULT_BENEFIT,
    ) -> None:
        """Start the threads that send spans and metrics.

        Args:
            servers: host and port of the upstream by arm; the key "" is for all other arms.
            back_server: host and port of the engine behind a gateway.
            reader: reading speed of a user and cost of waiting, which become resource attributes.
        """
        self._options = options
        self._servers = servers or {}
        """By arm: host and port of the upstream."""
        self._back_server = back_server
        """Host and port of the engine behind the gateway, for exchanges of the back."""
        self._names = VERSIONS[options.semconv]
        """Names of attributes in the configured version of the conventions."""
        self._closing = Event()
        """Set when the exporter must end, to cut waits short."""
        self._queued_spans = self._queue_full_drops = 0
        """Number of spans that were queued, and of spans for which the queue had no place."""
        # The SDK must not log failed requests, because `_Receiver` logs them.
        logging.getLogger("opentelemetry.exporter").setLevel(logging.CRITICAL)
        with _endpoint_in_environment(options.endpoint):
            resource = _resource_attributes(version, reader)
            self._exports_spans, self._exports_metrics = _is_configured("TRACES"), _is_configured("METRICS")
            spans, metrics, receivers = _sdk_exporters(options.protocol)
            self._ids = ExchangeIds()
            """Generator of the spans' ids."""
            self._provider = TracerProvider(resource=resource, shutdown_on_exit=False, id_generator=self._ids)
            self._tracer = self._provider.get_tracer("llmtap", version, schema_url=self._names.schema_url)
            self._span_delivery = _SpanDelivery(spans, receivers[0], self._closing)
            self._queue_max = max(1, round(_number_of_variable("OTEL_BSP_MAX_QUEUE_SIZE", QUEUE_MAX)))
            """Number of waiting spans above which new ones are dropped."""
            self._provider.add_span_processor(
                BatchSpanProcessor(
                    self._span_delivery,
                    self._queue_max + BATCH_MAX,
                    max_export_batch_size=min(BATCH_MAX, self._queue_max),
                )
            )
            aggregation = metrics._preferred_aggregation[Histogram]
            exponential = isinstance(aggregation, ExponentialBucketHistogramAggregation)
            self._recorder = MetricRecorder(self._names, options.series_max, exponential=exponential)
            """Counts of exchanges for metrics."""
            totals = Totals(self._recorder, self._servers, clock.wall_ns())
            origin = resource, InstrumentationScope("llmtap", version, self._names.schema_url)
            self._metric_delivery = _MetricDelivery(
                metrics, receivers[1], totals, origin, clock, self._closing
            )
            if self._exports_metrics:
                self._metric_thread = Thread(target=self._metric_delivery.run, name="otlp", daemon=True)
                self._metric_thread.start()

    def on_end(self, x: Exchange, m: Measured, key: SeriesKey, met: bool | None) -> None:
        is_back = x.side == BACK
        server = self._back_server if is_back else self._servers.get(x.arm or "") or self._servers.get("")
        common = common_values_of(x, m, None if server is None else server[0], self._options.provider)
        # Skip exchanges behind a gateway: their requests were already counted in front of the gateway.
        if self._exports_metrics and not is_back:
            self._recorder.record(x, m, common)
        if not self._exports_spans:
            return
        self._ids.next_ids = x.span_ids
        span = start_span(self._tracer, x, common, self._names, parse_trace_parent(x.trace_parent), server)
        if not span.is_recording():
            return
        if self._waiting_spans() >= self._queue_max:
            self._queue_full_drops += 1
            return
        self._queued_spans += 1
        # This puts the span into the queue.
        span.end(x.arrival_wall_ns + common.end_ns - x.timeline.arrival_ns)

    def _waiting_spans(self) -> int:
        return self._queued_spans - self._span_delivery.sent - sum(self._span_delivery.dropped.values())

    def state(self) -> ExporterState:
        """Return the counts of spans and failures."""
        delivery = self._span_delivery
        dropped = dict(delivery.dropped)
        if self._queue_full_drops:
            dropped["queue_full"] = self._queue_full_drops
        failures = delivery.failures + self._metric_delivery.failures
        return ExporterState("otlp", delivery.sent, max(0, self._waiting_spans()), failures, dropped)

    def close(self, limit_s: float = CLOSE_S) -> None:
        """Send the remaining data for at most `limit_s`, and count unsent spans as dropped. Blocks."""
        self._closing.set()
        until = time.monotonic() + limit_s
        flushes = [Thread(target=self._provider.shutdown, daemon=True)]
        flushes[0].start()
        if self._exports_metrics:
            flushes.append(self._metric_thread)
        for flush in flushes:
            flush.join(max(0.0, until - time.monotonic()))
        # Both calls end requests in progress, so that the threads end.
        self._span_delivery.sdk_exporter.shutdown()
        self._metric_delivery.sdk_exporter.shutdown()
        for flush in flushes:
            flush.join(1.0)
        self._span_delivery.drop("shutdown", self._waiting_spans())
        log.info("event=otlp_closed sent=%d dropped=%s", self._span_delivery.sent, self.state().dropped)


def _sdk_exporters(protocol: str) -> tuple[SpanExporter, Any, tuple[_Receiver, _Receiver]]:
    """Return the SDK's exporters of spans and of metrics, and a `_Receiver` for each of them."""
    receivers = _Receiver(), _Receiver()
    exporters: list[Any] = []
    for signal, receiver, by_grpc, by_http, response in (
        ("TRACES", receivers[0], _GrpcSpans, http_traces.OTLPSpanExporter, ExportTraceServiceResponse),
        (
            "METRICS",
            receivers[1],
            _GrpcMetrics,
            http_metrics.OTLPMetricExporter,
            ExportMetricsServiceResponse,
        ),
    ):
        if os.environ.get(f"OTEL_EXPORTER_OTLP_{signal}_PROTOCOL", protocol) == "grpc":
            exporters.append(by_grpc(receiver))
        else:
            exporters.append(by_http(session=_Session(receiver, response)))
    return exporters[0], exporters[1], receivers


def _resource_attributes(version: str, reader: Benefit) -> Resource:
    """Return the resource attributes of llmtap. Attributes that the operator sets take precedence."""
    configured = Resource.create()
    if str(configured.attributes[SERVICE_NAME]).startswith("unknown_service"):
        configured = configured.merge(Resource({SERVICE_NAME: "llmtap"}))
    own = {
        SERVICE_VERSION: version,
        "host.name": socket.gethostname(),
        "llmtap.reader.tokens_per_second": f"{reader.speed:g}",
        "llmtap.reader.due": reader.due_text,
        "llmtap.smooth_goodput.alpha": f"{reader.alpha:g}",
        "llmtap.smooth_goodput.idle_cost": reader.f,
    }
    return Resource(own).merge(configured)


def _is_configured(signal: str) -> bool:
    """Return whether the environment configures an export of this signal (TRACES or METRICS)."""
    environ = os.environ
    is_off = environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true"
    endpoint = environ.get(f"OTEL_EXPORTER_OTLP_{signal}_ENDPOINT") or environ.get(
        "OTEL_EXPORTER_OTLP_ENDPOINT"
    )
    return not is_off and bool(endpoint) and environ.get(f"OTEL_{signal}_EXPORTER", "otlp").strip() != "none"


def _number_of_variable(variable: str, default: float) -> float:
    """Return the positive number in an environment variable, else the default."""
    try:
        value = float(os.environ.get(variable) or default)
    except ValueError:
        return default
    return value if value > 0 else default


@contextmanager
def _endpoint_in_environment(endpoint: str | None) -> Iterator[None]:
    """Set the SDK's environment variable of the endpoint while the block runs; None: leave it unchanged."""
    name = "OTEL_EXPORTER_OTLP_ENDPOINT"
    before = os.environ.get(name)
    os.environ.update({} if endpoint is None else {name: endpoint})
    try:
        yield
    finally:
        os.environ.pop(name, None)
        os.environ.update({} if before is None else {name: before})

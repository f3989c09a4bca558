"""A small OTLP receiver: a real gRPC server that keeps what it gets, and answers as it is told."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
from opentelemetry.proto.collector.metrics.v1 import metrics_service_pb2, metrics_service_pb2_grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue
from opentelemetry.proto.metrics.v1.metrics_pb2 import Metric
from opentelemetry.proto.trace.v1.trace_pb2 import Span

GUARD_S = 60.0
"""No wait is longer: what has not come by then does not come."""


def plain(attributes: "list[KeyValue]") -> dict[str, Any]:
    """Attributes as a dict of Python's own."""
    return {pair.key: _value(pair.value) for pair in attributes}


def _value(value: AnyValue) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_value(item) for item in value.array_value.values]
    return None if kind is None else getattr(value, kind)


class OtlpReceiver:
    """Use as a context manager; `start` and `stop` may be repeated, and the port stays the same."""

    def __init__(self) -> None:
        self.port = 0
        self.traces: list[trace_service_pb2.ExportTraceServiceRequest] = []
        self.metrics: list[metrics_service_pb2.ExportMetricsServiceRequest] = []
        self.metadata: dict[str, str] = {}
        """Of the last request."""
        self.reject = 0
        """Spans or points to reject of each request."""
        self.refuse: grpc.StatusCode | None = None
        """Answer with this instead."""
        self.details: bytes | None = None
        """Sent along with `refuse` as the status' details."""
        self.refused = 0
        self.hold: threading.Event | None = None
        """Answer only once this is set."""
        self._changed = threading.Condition()
        self._server: grpc.Server | None = None

    def __enter__(self) -> "OtlpReceiver":
        self.start()
        return self

    def __exit__(self, *exc: object) -> None:
        if self.hold is not None:
            self.hold.set()
        self.stop()

    @property
    def endpoint(self) -> str:
        return f"http://localhost:{self.port}"

    def start(self) -> None:
        server = grpc.server(ThreadPoolExecutor(4), options=[("grpc.so_reuseport", 0)])
        trace_service_pb2_grpc.add_TraceServiceServicer_to_server(_Traces(self), server)
        metrics_service_pb2_grpc.add_MetricsServiceServicer_to_server(_Metrics(self), server)
        self.port = server.add_insecure_port(f"localhost:{self.port}")
        server.start()
        self._server = server

    def stop(self) -> None:
        if self._server is not None:
            self._server.stop(grace=None).wait(GUARD_S)
            self._server = None

    def wait(self, condition: Callable[[], bool]) -> None:
        """Until the condition holds, which is looked at whenever a request came."""
        with self._changed:
            assert self._changed.wait_for(condition, GUARD_S), "the receiver waited in vain"

    @property
    def spans(self) -> list[Span]:
        """All spans, in order."""
        return [
            span
            for request in self.traces
            for resource in request.resource_spans
            for scope in resource.scope_spans
            for span in scope.spans
        ]

    @property
    def last_metrics(self) -> dict[str, Metric]:
        """By name, as last sent."""
        return {
            metric.name: metric
            for request in self.metrics
            for resource in request.resource_metrics
            for scope in resource.scope_metrics
            for metric in scope.metrics
        }

    def _take(self, requests: list[Any], request: Any, context: grpc.ServicerContext) -> int:
        if self.hold is not None:
            self.hold.wait(GUARD_S)
        with self._changed:
            self.metadata = {key: str(value) for key, value in context.invocation_metadata()}
            refuse = self.refuse
            if refuse is None:
                requests.append(request)
            else:
                self.refused += 1
            self._changed.notify_all()
        if refuse is not None:
            if self.details is not None:
                context.set_trailing_metadata([("grpc-status-details-bin", self.details)])
            context.abort(refuse, "as told")
        return self.reject


class _Traces(trace_service_pb2_grpc.TraceServiceServicer):
    def __init__(self, receiver: OtlpReceiver) -> None:
        self._receiver = receiver

    def Export(self, request: Any, context: grpc.ServicerContext) -> Any:
        answer = trace_service_pb2.ExportTraceServiceResponse()
        rejected = self._receiver._take(self._receiver.traces, request, context)
        if rejected:
            answer.partial_success.rejected_spans = rejected
            answer.partial_success.error_message = "as told"
        return answer


class _Metrics(metrics_service_pb2_grpc.MetricsServiceServicer):
    def __init__(self, receiver: OtlpReceiver) -> None:
        self._receiver = receiver

    def Export(self, request: Any, context: grpc.ServicerContext) -> Any:
        self._receiver._take(self._receiver.metrics, request, context)
        return metrics_service_pb2.ExportMetricsServiceResponse()

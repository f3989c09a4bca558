"""OTLP: protobuf messages, and delivery to a receiver over gRPC or HTTP.

Built on the published messages (opentelemetry-proto) and grpcio. The SDK's exporters (1.45) are not used:
they ignore partial success, so the number of rejected spans would be lost; they retry within one call; they
only log that the file of authorities cannot be read; and finished histograms have no stable way in.

Source: OTLP specification 1.x, "OTLP/gRPC" and "OTLP/HTTP": paths, status codes, partial success.
"""

import http.client
import ssl
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from typing import TYPE_CHECKING, Any, Final, Protocol
from urllib.parse import urlsplit

from google.protobuf.message import DecodeError
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import (
    ExportMetricsServiceRequest,
    ExportMetricsServiceResponse,
)
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, ArrayValue, InstrumentationScope, KeyValue
from opentelemetry.proto.metrics.v1 import metrics_pb2 as metrics
from opentelemetry.proto.resource.v1.resource_pb2 import Resource
from opentelemetry.proto.trace.v1 import trace_pb2 as trace

from llmtap.errors import ConfigError
from llmtap.export.opentelemetry.metrics import Point
from llmtap.export.opentelemetry.spans import Span, Value
from llmtap.export.options import OtlpOptions, parse_pairs

if TYPE_CHECKING:
    import grpc

__all__ = [
    "METRICS",
    "TRACES",
    "OtlpLink",
    "OtlpOrigin",
    "OtlpResponse",
    "connect",
    "encode_metrics",
    "encode_spans",
]

TRACES: Final = "trace"
METRICS: Final = "metrics"
"""The signals."""

POINTS_MAX: Final = 2_000
"""In one request: 0.6 KB each, and gRPC servers take 4 MiB unless told otherwise."""
_RESPONSE_BYTES_MAX: Final = 1 << 20
"""More than a receiver has to say."""
_NONE, _HAS_IS_REMOTE, _IS_REMOTE = 0, 0x100, 0x200
"""Of a span's flags, beside those of W3C: whether its parent is another process's is known, and is so."""


@dataclass(frozen=True, slots=True)
class OtlpOrigin:
    """Who exports."""

    resource: tuple[tuple[str, str], ...]
    version: str
    schema_url: str = ""

    def scope(self) -> InstrumentationScope:
        return InstrumentationScope(name="llmtap", version=self.version)

    def to_resource(self) -> Resource:
        return Resource(attributes=[_pair(key, value) for key, value in self.resource])


def encode_spans(spans: Iterable[Span], origin: OtlpOrigin) -> bytes:
    """One request with these spans."""
    scoped = trace.ScopeSpans(
        scope=origin.scope(), spans=[_span(s) for s in spans], schema_url=origin.schema_url
    )
    body: bytes = ExportTraceServiceRequest(
        resource_spans=[trace.ResourceSpans(resource=origin.to_resource(), scope_spans=[scoped])]
    ).SerializeToString()
    return body


def encode_metrics(
    points: Iterable[Point], origin: OtlpOrigin, start_ns: int, now_ns: int
) -> Iterator[bytes]:
    """Requests with these points, at most POINTS_MAX in each. Times are ns since the epoch.

    Points of one instrument follow each other.
    """
    batch: list[Point] = []
    for point in points:
        batch.append(point)
        if len(batch) == POINTS_MAX:
            yield _metrics_request(batch, origin, start_ns, now_ns)
            batch = []
    if batch:
        yield _metrics_request(batch, origin, start_ns, now_ns)


def _metrics_request(points: list[Point], origin: OtlpOrigin, start_ns: int, now_ns: int) -> bytes:
    scoped = metrics.ScopeMetrics(scope=origin.scope(), schema_url=origin.schema_url)
    for instrument, group in groupby(points, key=lambda point: point.measure.instrument):
        metric = scoped.metrics.add(
            name=instrument.name, unit=instrument.unit, description=instrument.description
        )
        for point in group:
            attributes = [_pair(key, value) for key, value in point.attributes]
            counts, total = point.cell.read()
            if instrument.edges:
                metric.histogram.aggregation_temporality = metrics.AGGREGATION_TEMPORALITY_CUMULATIVE
                metric.histogram.data_points.add(
                    attributes=attributes, start_time_unix_nano=start_ns, time_unix_nano=now_ns,
                    count=sum(counts), sum=total / instrument.scale, bucket_counts=counts,
                    explicit_bounds=[edge / instrument.scale for edge in instrument.edges],
                )  # fmt: skip
            else:
                metric.sum.aggregation_temporality = metrics.AGGREGATION_TEMPORALITY_CUMULATIVE
                metric.sum.is_monotonic = True
                metric.sum.data_points.add(
                    attributes=attributes, start_time_unix_nano=start_ns, time_unix_nano=now_ns,
                    as_int=total,
                )  # fmt: skip
    body: bytes = ExportMetricsServiceRequest(
        resource_metrics=[metrics.ResourceMetrics(resource=origin.to_resource(), scope_metrics=[scoped])]
    ).SerializeToString()
    return body


def _span(s: Span) -> trace.Span:
    error = None
    if s.error is not None:
        error = trace.Status(code=trace.Status.STATUS_CODE_ERROR, message=_text(s.error))
    return trace.Span(
        trace_id=s.trace_id, span_id=s.span_id, parent_span_id=s.parent_id, name=_text(s.name),
        flags=s.flags | _HAS_IS_REMOTE | (_IS_REMOTE if s.parent_id else _NONE),
        kind=trace.Span.SPAN_KIND_CLIENT, start_time_unix_nano=s.start_ns, end_time_unix_nano=s.end_ns,
        attributes=[_pair(key, value) for key, value in s.attributes],
        events=[trace.Span.Event(name=name, time_unix_nano=t_ns) for name, t_ns in s.events],
        status=error,
    )  # fmt: skip


def _text(text: str) -> str:
    # Text of the world may hold what UTF-8 cannot: half a surrogate pair out of a JSON escape.
    return text if text.isascii() else text.encode("utf-8", "replace").decode()


def _pair(key: str, value: Value) -> KeyValue:
    return KeyValue(key=key, value=_any(value))


def _any(value: Value) -> AnyValue:
    if isinstance(value, str):
        return AnyValue(string_value=_text(value))
    if isinstance(value, bool):
        return AnyValue(bool_value=value)
    if isinstance(value, int):
        return AnyValue(int_value=value)
    if isinstance(value, float):
        return AnyValue(double_value=value)
    return AnyValue(array_value=ArrayValue(values=[_any(item) for item in value]))


@dataclass(frozen=True, slots=True)
class OtlpResponse:
    """What became of a request."""

    ok: bool
    again: bool = False
    """It may be sent again."""
    rejected: int = 0
    """Spans or points that the receiver did not take from a request it took."""
    problem: str = ""
    after_s: float = 0.0
    """The receiver asks not to be called again before."""


class OtlpLink(Protocol):
    """A way to a receiver. One thread sends; `close` may come from another, and ends what is under way."""

    def send(self, signal: str, body: bytes, timeout_s: float) -> OtlpResponse: ...
    def close(self) -> None: ...


def connect(options: OtlpOptions) -> OtlpLink:
    """The way that the options name; nothing is opened before the first `send`.

    Raises ConfigError when the file of authorities cannot be read.
    """
    assert options.endpoint
    url = urlsplit(options.endpoint)
    headers = parse_pairs(options.headers, "otlp.headers")
    tls = url.scheme == "https"
    assert url.hostname is not None
    if options.protocol == "grpc":
        return GrpcLink(url.hostname, url.port or 4317, tls, options.ca, headers)
    return HttpLink(url.hostname, url.port or 4318, url.path.rstrip("/"), tls, options.ca, headers)


class GrpcLink:
    """OTLP/gRPC."""

    def __init__(
        self, host: str, port: int, tls: bool, ca: str | None, headers: list[tuple[str, str]]
    ) -> None:
        import grpc  # 18 MB and 40 ms: only for who exports this way

        target = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        # A receiver that is back should be found within seconds, not the two minutes gRPC may take.
        settings = [("grpc.min_reconnect_backoff_ms", 100), ("grpc.initial_reconnect_backoff_ms", 100),
                    ("grpc.max_reconnect_backoff_ms", 5_000)]  # fmt: skip
        self._grpc = grpc
        if tls:
            roots = None if ca is None else _read(ca)
            credentials = grpc.ssl_channel_credentials(roots)
            self._channel = grpc.secure_channel(target, credentials, settings)
        else:
            self._channel = grpc.insecure_channel(target, settings)
        self._metadata = [(name.lower(), value) for name, value in headers]
        self._call = {
            TRACES: self._method("trace.v1.TraceService"), METRICS: self._method("metrics.v1.MetricsService")
        }  # fmt: skip

    def _method(self, service: str) -> Any:
        return self._channel.unary_unary(f"/opentelemetry.proto.collector.{service}/Export")

    def send(self, signal: str, body: bytes, timeout_s: float) -> OtlpResponse:
        try:
            said = self._call[signal](body, timeout=timeout_s, metadata=self._metadata)
        except self._grpc.RpcError as exc:
            return self._failed(exc)
        except ValueError as exc:  # the channel was closed under us
            return OtlpResponse(False, again=True, problem=str(exc))
        return _taken(signal, said)

    def _failed(self, exc: "grpc.RpcError") -> OtlpResponse:
        code, status = exc.code(), self._grpc.StatusCode
        again = code in (
            status.CANCELLED, status.DEADLINE_EXCEEDED, status.ABORTED, status.OUT_OF_RANGE,
            status.UNAVAILABLE, status.DATA_LOSS,
        )  # fmt: skip
        if code is status.RESOURCE_EXHAUSTED:
            # OTLP: worth another try only where the receiver says when; else the request is too large for it.
            again = any(b"google.rpc.RetryInfo" in value for key, value in exc.trailing_metadata() or ()
                        if key == "grpc-status-details-bin")  # fmt: skip
        return OtlpResponse(False, again=again, problem=f"{code.name}: {exc.details()}")

    def close(self) -> None:
        self._channel.close()


class HttpLink:
    """OTLP/HTTP with binary protobuf, on one kept-alive connection."""

    def __init__(
        self, host: str, port: int, path: str, tls: bool, ca: str | None, headers: list[tuple[str, str]]
    ) -> None:
        self._path = path
        self._headers = {"Content-Type": "application/x-protobuf", **dict(headers)}
        if tls:
            try:
                context = ssl.create_default_context(cafile=ca)
            except OSError as exc:
                raise ConfigError("otlp.ca", f"{ca} cannot be read: {exc}") from None
            self._open: Callable[[], http.client.HTTPConnection] = partial(
                http.client.HTTPSConnection, host, port, context=context
            )
        else:
            self._open = partial(http.client.HTTPConnection, host, port)
        self._connection: http.client.HTTPConnection | None = None

    def send(self, signal: str, body: bytes, timeout_s: float) -> OtlpResponse:
        paths = {TRACES: "/v1/traces", METRICS: "/v1/metrics"}
        try:
            if self._connection is None:
                self._connection = self._open()
            self._connection.timeout = timeout_s
            if self._connection.sock is not None:
                self._connection.sock.settimeout(timeout_s)
            self._connection.request("POST", self._path + paths[signal], body, self._headers)
            response = self._connection.getresponse()
            said = response.read(_RESPONSE_BYTES_MAX)
            if response.read(1):
                self.close()
        except (OSError, http.client.HTTPException) as exc:
            self.close()
            return OtlpResponse(False, again=True, problem=f"{type(exc).__name__}: {exc}")
        if 200 <= response.status < 300:
            return _taken(signal, said)
        return OtlpResponse(
            False, again=response.status in (429, 502, 503, 504), problem=f"HTTP {response.status}",
            after_s=_retry_after_s(response.getheader("Retry-After")),
        )  # fmt: skip

    def close(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()


def _retry_after_s(text: str | None) -> float:
    """Seconds of a Retry-After field; its other form, a date, counts as nothing said."""
    return float(text) if text is not None and text.isascii() and text.isdigit() and len(text) < 6 else 0.0


def _taken(signal: str, said: bytes) -> OtlpResponse:
    try:
        if signal == TRACES:
            spans = ExportTraceServiceResponse.FromString(said).partial_success
            return OtlpResponse(True, rejected=spans.rejected_spans, problem=spans.error_message)
        points = ExportMetricsServiceResponse.FromString(said).partial_success
        return OtlpResponse(True, rejected=points.rejected_data_points, problem=points.error_message)
    except DecodeError:
        return OtlpResponse(True)  # a 200 is a 200, whatever stands in it


def _read(file: str) -> bytes:
    try:
        with open(file, "rb") as f:
            return f.read()
    except OSError as exc:
        raise ConfigError("otlp.ca", f"{file} cannot be read: {exc.strerror}") from None

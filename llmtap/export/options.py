"""Options of the OpenTelemetry exporter (`[otlp]`), and the `OTEL_*` variables that set the same keys.

`config.py` reads both. A key that is None is left to OpenTelemetry's SDK, which reads all other `OTEL_*`
variables.
"""

from collections.abc import Mapping
from typing import Annotated, Final, Literal
from urllib.parse import unquote, urlsplit

from msgspec import Meta, Struct

from llmtap.errors import ConfigError
from llmtap.export.opentelemetry.semconv import Version
from llmtap.units import NS_PER_S, Duration

STANDARD_ENV: Final = {
    "OTEL_EXPORTER_OTLP_ENDPOINT": "otlp.endpoint",
    "OTEL_EXPORTER_OTLP_PROTOCOL": "otlp.protocol",
}
"""Variables of OpenTelemetry that are also keys of ours: they decide whether and how to export. The SDK reads
all others."""


class OtlpOptions(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Destination and content of the OTLP export.

    Raises ConfigError for invalid values. A key that is None is left to OpenTelemetry's SDK, which reads its
    own `OTEL_*` variables.
    """

    endpoint: Annotated[
        str | None,
        Meta(description="URL of an OTLP receiver, http:// (unencrypted) or https://; none: no export."),
    ] = None
    protocol: Annotated[
        Literal["grpc", "http/protobuf"],
        Meta(description="Protocol: grpc (usual port 4317) or http/protobuf (usual port 4318)."),
    ] = "grpc"
    headers: Annotated[
        str,
        Meta(description="Header fields of every export: `name=value,name=value`, values percent-encoded."),
    ] = ""
    ca: Annotated[str | None, Meta(description="PEM file of the CAs to trust for https://.")] = None
    traces: Annotated[bool, Meta(description="Export one span for each exchange.")] = True
    metrics: Annotated[bool, Meta(description="Export metrics.")] = True
    semconv: Annotated[
        Version,
        Meta(
            description="Version of OpenTelemetry's GenAI semantic "
            "conventions; `off`: only llmtap's own names."
        ),
    ] = "0.1.0"
    histograms: Annotated[
        Literal["explicit", "exponential"] | None,
        Meta(description="Buckets of histograms: explicit limits, or exponential histograms of base 2."),
    ] = None
    sampler: Annotated[
        Literal["parent", "always"] | None,
        Meta(description="Sampling; `parent`: no span for a request whose traceparent is not sampled."),
    ] = None
    sample_ratio: Annotated[
        float | None,
        Meta(description="Fraction of the requests without a parent span that get a span."),
    ] = None
    interval: Annotated[Duration | None, Meta(description="Interval between exports of metrics.")] = None
    timeout: Annotated[Duration | None, Meta(description="Maximum duration of one export.")] = None
    queue_max: Annotated[
        int | None,
        Meta(description="Maximum number of queued spans; spans above it are dropped and counted."),
    ] = None
    series_max: Annotated[
        int,
        Meta(
            ge=1,
            description="Maximum number of attribute sets per metric; the "
            "rest is one series, marked as overflow.",
        ),
    ] = 2_000
    provider: Annotated[
        str | None,
        Meta(description="Provider name of the upstream (default: detected from its host and dialect)."),
    ] = None
    service_name: Annotated[
        str | None, Meta(description="service.name of exported spans and metrics; default: llmtap.")
    ] = None
    resource: Annotated[
        str,
        Meta(description="Additional resource attributes: `name=value,name=value`, values percent-encoded."),
    ] = ""

    def __post_init__(self) -> None:
        if self.endpoint:
            _check_endpoint(self.endpoint)
        for key in ("headers", "resource"):
            _check_pairs(getattr(self, key), f"otlp.{key}")
        if self.sample_ratio is not None and not 0 <= self.sample_ratio <= 1:
            raise ConfigError("otlp.sample_ratio", "must be between 0 and 1")
        if self.queue_max is not None and self.queue_max < 1:
            raise ConfigError("otlp.queue_max", "must be at least 1")
        for key in ("interval", "timeout"):
            if (value := getattr(self, key)) is not None and value < NS_PER_S // 10:
                raise ConfigError(f"otlp.{key}", "must be at least 100ms")

    def exports(self, environ: Mapping[str, str]) -> bool:
        own = (environ.get(f"OTEL_EXPORTER_OTLP_{signal}_ENDPOINT") for signal in ("TRACES", "METRICS"))
        return any(own) if self.endpoint is None else bool(self.endpoint)

    def environment(self) -> dict[str, str]:
        named = {
            "EXPORTER_OTLP_ENDPOINT": self.endpoint,
            "EXPORTER_OTLP_HEADERS": self.headers,
            "EXPORTER_OTLP_CERTIFICATE": self.ca,
            "EXPORTER_OTLP_TIMEOUT": None if self.timeout is None else str(self.timeout / 1e9),
            "METRIC_EXPORT_INTERVAL": None if self.interval is None else str(self.interval / 1e6),
            "BSP_MAX_QUEUE_SIZE": self.queue_max and str(self.queue_max),
            "EXPORTER_OTLP_METRICS_DEFAULT_HISTOGRAM_AGGREGATION": self.histograms
            and _AGGREGATIONS[self.histograms],
            "SERVICE_NAME": self.service_name,
            "RESOURCE_ATTRIBUTES": self.resource,
        }
        if self.sampler is not None or self.sample_ratio is not None:
            named["TRACES_SAMPLER"] = "parentbased_traceidratio"
            named["TRACES_SAMPLER_ARG"] = str(1.0 if self.sample_ratio is None else self.sample_ratio)
        return {f"OTEL_{name}": value for name, value in named.items() if value}


_AGGREGATIONS: Final = {
    "explicit": "explicit_bucket_histogram",
    "exponential": "base2_exponential_bucket_histogram",
}


def _check_endpoint(url: str) -> None:
    try:
        parts = urlsplit(url)
        ok = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        ok = False
    if not ok:
        raise ConfigError(
            "otlp.endpoint", f"expected http://HOST:PORT or https://HOST:PORT, got {url!r}",
            "a collector listens on http://127.0.0.1:4317",
        )  # fmt: skip


def _check_pairs(text: str, place: str) -> None:
    """Raise ConfigError for what is not `name=value,name=value`; values may be secrets and are not named."""
    for i, item in enumerate(filter(None, (part.strip() for part in text.split(","))), 1):
        name, equals, value = item.partition("=")
        if not equals or not name.strip():
            raise ConfigError(place, f"item {i} is not name=value")
        shown = name + unquote(value)
        if place == "otlp.headers" and not (shown.isascii() and shown.isprintable()):
            raise ConfigError(place, f"{name!r} is not visible ASCII")

"""Options of the exporters, with the descriptions that flags, configuration and reference show."""

from typing import Annotated, Final, Literal
from urllib.parse import unquote, urlsplit

from msgspec import Meta, Struct

from llmtap.errors import ConfigError
from llmtap.export.opentelemetry.semconv import Version
from llmtap.units import NS_PER_S, Duration

__all__ = ["STANDARD_ENV", "OtlpOptions", "parse_pairs"]

STANDARD_ENV: Final = {
    "OTEL_EXPORTER_OTLP_ENDPOINT": "otlp.endpoint",
    "OTEL_EXPORTER_OTLP_PROTOCOL": "otlp.protocol",
    "OTEL_EXPORTER_OTLP_HEADERS": "otlp.headers",
    "OTEL_EXPORTER_OTLP_CERTIFICATE": "otlp.ca",
    "OTEL_SERVICE_NAME": "otlp.service_name",
    "OTEL_RESOURCE_ATTRIBUTES": "otlp.resource",
}
"""OpenTelemetry's own variables, which count as long as nothing of ours says otherwise.

Source: OpenTelemetry specification, "OpenTelemetry Protocol Exporter", "Environment Variable Specification".
"""


class OtlpOptions(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where spans and metrics go by OTLP. Raises ConfigError for what cannot be."""

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
    ] = "1.41"
    sampler: Annotated[
        Literal["parent", "always"],
        Meta(description="Sampling; `parent`: no span for a request whose traceparent is not sampled."),
    ] = "parent"
    sample_ratio: Annotated[
        float, Meta(ge=0, le=1, description="Fraction of the requests without a parent span that get a span.")
    ] = 1.0
    interval: Annotated[Duration, Meta(description="Interval between exports of metrics.")] = Duration(
        60 * NS_PER_S
    )
    timeout: Annotated[Duration, Meta(description="Maximum duration of one export.")] = Duration(
        10 * NS_PER_S
    )
    queue_max: Annotated[
        int,
        Meta(
            ge=1,
            description="Maximum number of queued spans (2.5 KB each); "
            "spans above it are dropped and counted.",
        ),
    ] = 4_096
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
    service_name: Annotated[str, Meta(description="service.name of exported spans and metrics.")] = "llmtap"
    resource: Annotated[
        str,
        Meta(description="Additional resource attributes: `name=value,name=value`, values percent-encoded."),
    ] = ""

    def __post_init__(self) -> None:
        if self.endpoint:
            _check_endpoint(self.endpoint)
        for key in ("headers", "resource"):
            parse_pairs(getattr(self, key), f"otlp.{key}")
        for name, value in parse_pairs(self.headers, "otlp.headers"):
            if not (name.isascii() and value.isascii() and (name + value).isprintable()):
                raise ConfigError("otlp.headers", f"{name!r} is not visible ASCII")
        for key in ("interval", "timeout"):
            if getattr(self, key) < NS_PER_S // 10:
                raise ConfigError(f"otlp.{key}", "must be at least 100ms")


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


def parse_pairs(text: str, place: str) -> list[tuple[str, str]]:
    """Names and values of `name=value,name=value`.

    Raises ConfigError, naming `place` and not the values: they may be secrets.
    """
    pairs = []
    for i, item in enumerate(filter(None, (part.strip() for part in text.split(","))), 1):
        name, equals, value = item.partition("=")
        if not equals or not name.strip():
            raise ConfigError(place, f"item {i} is not name=value")
        pairs.append((name.strip(), unquote(value.strip())))
    return pairs

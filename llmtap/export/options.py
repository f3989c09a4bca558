"""Options of the OpenTelemetry exporter (`[otlp]`), and the `OTEL_*` variables that set the same options.

`config.py` reads the options and these variables. OpenTelemetry's SDK reads all other `OTEL_*` variables.
"""

from collections.abc import Mapping
from typing import Annotated, Final, Literal

from msgspec import Struct

from llmtap.errors import ConfigError
from llmtap.export.opentelemetry.semconv import Version
from llmtap.options.fields import opt
from llmtap.options.values import is_http_url

STANDARD_ENV: Final = {
    "OTEL_EXPORTER_OTLP_ENDPOINT": "otlp.endpoint",
    "OTEL_EXPORTER_OTLP_PROTOCOL": "otlp.protocol",
}
"""Variables of OpenTelemetry that also set options of llmtap: they decide whether and how it exports."""


class OtlpOptions(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Options of the table `[otlp]`. The constructor raises ConfigError for invalid values."""

    endpoint: Annotated[
        str | None, opt("URL of an OTLP receiver, http:// (unencrypted) or https://; none: no export.")
    ] = None
    protocol: Annotated[
        Literal["grpc", "http/protobuf"],
        opt("Protocol: grpc (usual port 4317) or http/protobuf (usual port 4318)."),
    ] = "grpc"
    semconv: Annotated[
        Version, opt("Version of OpenTelemetry's GenAI semantic conventions; `off`: only llmtap's own names.")
    ] = "0.1.0"
    series_max: Annotated[
        int,
        opt("Maximum number of attribute sets per metric; the rest is one series, marked as overflow.", ge=1),
    ] = 2_000
    provider: Annotated[
        str | None, opt("Provider name of the upstream (default: detected from its host and dialect).")
    ] = None

    def __post_init__(self) -> None:
        if self.endpoint and not is_http_url(self.endpoint):
            raise ConfigError(
                "otlp.endpoint",
                f"expected http://HOST:PORT or https://HOST:PORT, got {self.endpoint!r}",
                "a collector listens on http://127.0.0.1:4317",
            )

    def is_enabled(self, environ: Mapping[str, str]) -> bool:
        """Return whether these options, or the environment, configure an export of spans or metrics."""
        own = (environ.get(f"OTEL_EXPORTER_OTLP_{signal}_ENDPOINT") for signal in ("TRACES", "METRICS"))
        return any(own) if self.endpoint is None else bool(self.endpoint)

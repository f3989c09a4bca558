"""Names of OpenTelemetry metrics and attributes, by version of the GenAI semantic conventions.

`VERSIONS` has a table (`Semconv`) for each version; `off` has only llmtap's own names. A table has a metric
of the conventions only if llmtap measures it exactly as it is defined. `operation_of` and `provider_of`
return the standard names of operations and providers.

The tables name the metrics of these quantities of an exchange:

- `duration`: time from the first byte of the request to the end of the exchange; the length of the span.
- `first_chunk`: time from the first byte of the request to a stream's first event, except keep-alives.
- `chunk_gap`: time between consecutive events that are neither keep-alives nor the end marker.
- `server_duration`: time from submit to the last byte of the answer.
- `server_first_token`: time from submit to the first token of any kind, for streams that ended well.
- `server_per_token`: (server_duration - server_first_token) / (output tokens - 1).
- Other quantities have the name of a metric of llmtap (metrics/catalogue.py).

Source: open-telemetry/semantic-conventions v1.41.0 and
open-telemetry/semantic-conventions-genai v0.1.0, docs/gen-ai.
"""

from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields
from typing import Final, Literal

from llmtap.export.buckets import KINDS, edges_ns
from llmtap.metrics.catalogue import METRICS

Version = Literal["0.1.0", "1.41", "off"]

ERROR_TYPE: Final = "error.type"
HTTP_METHOD: Final = "http.request.method"
HTTP_STATUS: Final = "http.response.status_code"
OVERFLOW: Final = "otel.metric.overflow"
"""Attribute that is true for the series that counts all values above the maximum number of series."""
SERVER_ADDRESS: Final = "server.address"
SERVER_PORT: Final = "server.port"
SERVICE_NAME: Final = "service.name"
SERVICE_VERSION: Final = "service.version"
URL_PATH: Final = "url.path"


# Names of llmtap's own attributes, which are the same for all versions of the conventions.
TENANT: Final = "llmtap.tenant"
ARM: Final = "llmtap.arm"
OUTCOME: Final = "llmtap.outcome"
EXCHANGE_ID: Final = "llmtap.exchange.id"
REQUEST_ID: Final = "llmtap.request.id"
DIALECT: Final = "llmtap.dialect"
READING: Final = "llmtap.reading"
REFUSAL_KIND: Final = "llmtap.refusal.kind"
TOKEN_SOURCE: Final = "llmtap.token.source"
SIDE: Final = "llmtap.side"
PAIR_ROLE: Final = "llmtap.pair.role"
UNCERTAINTY: Final = "llmtap.uncertainty"
"""Attribute with the uncertainty of each timestamp of the exchange, in seconds."""


_SECONDS: Final = edges_ns(
    0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92
)
_FIRST_TOKEN: Final = edges_ns(
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10
)
_PER_TOKEN: Final = edges_ns(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5)
_TOKENS: Final = tuple(4**i for i in range(14))


@dataclass(frozen=True, slots=True)
class Instrument:
    """Declaration of a metric of OpenTelemetry."""

    name: str
    description: str
    unit: str
    edges: tuple[int, ...] = ()
    """Upper edges of the buckets: in ns if the unit is `s`, else in the unit. Empty for a counter."""

    @property
    def scale(self) -> float:
        """Number of recorded units in one unit of the instrument: 1e9 ns in a second."""
        return 1e9 if self.unit == "s" else 1.0


@dataclass(frozen=True, slots=True)
class Measure:
    """Instrument that records a quantity, with constant attributes."""

    instrument: Instrument
    """Metric that the quantity is recorded with."""
    attributes: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Semconv:
    """Names of attributes and metrics in one version of the conventions."""

    version: str
    schema_url: str = ""
    """URL of the schema; empty if the version has no published schema."""
    # The following fields are names of attributes.
    operation: str = "gen_ai.operation.name"
    """Attribute of the kind of request, such as `chat`."""
    provider: str = "gen_ai.provider.name"
    """Attribute of the provider's name."""
    request_model: str = "gen_ai.request.model"
    request_stream: str = "gen_ai.request.stream"
    response_model: str = "gen_ai.response.model"
    finish_reasons: str = "gen_ai.response.finish_reasons"
    first_chunk: str = "gen_ai.response.time_to_first_chunk"
    """Attribute of the time to the first chunk."""
    input_tokens: str = "gen_ai.usage.input_tokens"
    output_tokens: str = "gen_ai.usage.output_tokens"
    cached_tokens: str = "gen_ai.usage.cache_read.input_tokens"
    cache_write_tokens: str = "gen_ai.usage.cache_write.input_tokens"
    reasoning_tokens: str = "gen_ai.usage.reasoning.output_tokens"
    measures: Mapping[str, tuple[Measure, ...]]
    """Measures of each quantity (see the module docstring)."""


def _time_measures(name: str, description: str, edges: tuple[int, ...] = _SECONDS) -> tuple[Measure, ...]:
    """Return a histogram of seconds."""
    return (Measure(Instrument(name, description, "s", edges)),)


_OWN_MEASURES: Final = {
    **{
        metric.name: _time_measures(metric.otlp.name, metric.otlp.description, KINDS[metric.family.edges])
        for metric in METRICS
        if metric.otlp is not None and metric.family is not None
    },
    "exchanges": (Measure(Instrument("llmtap.exchanges", "Exchanges by outcome.", "{exchange}")),),
}
_SERVER_MEASURES: Final = {
    "server_duration": _time_measures(
        "gen_ai.server.request.duration",
        "Generative AI server request duration such as time-to-last byte or last output token.",
    ),
    "server_first_token": _time_measures(
        "gen_ai.server.time_to_first_token",
        "Time to generate first token for successful responses.",
        _FIRST_TOKEN,
    ),
    "server_per_token": _time_measures(
        "gen_ai.server.time_per_output_token",
        "Time per output token generated after the first token for successful responses.",
        _PER_TOKEN,
    ),
}
"""Measures of the model server, which are equal in all versions. llmtap measures the durations outside of the
server, so they include the network."""


def _v1_41() -> Semconv:
    client = "gen_ai.client.operation."
    duration = _time_measures(client + "duration", "GenAI operation duration.")
    usage = Instrument(
        "gen_ai.client.token.usage", "Number of input and output tokens used.", "{token}", _TOKENS
    )
    input_measures = (Measure(usage, (("gen_ai.token.type", "input"),)),)
    return Semconv(
        version="1.41",
        schema_url="https://opentelemetry.io/schemas/1.41.0",
        cache_write_tokens="gen_ai.usage.cache_creation.input_tokens",
        measures={
            "duration": duration,
            "embeddings_duration": duration,
            "first_chunk": _time_measures(client + "time_to_first_chunk", "Time to receive the first chunk."),
            "chunk_gap": _time_measures(client + "time_per_output_chunk", "Time per output chunk."),
            "input_tokens": input_measures,
            "embeddings_tokens": input_measures,
            "output_tokens": (Measure(usage, (("gen_ai.token.type", "output"),)),),
            **_SERVER_MEASURES,
            **_OWN_MEASURES,
        },
    )


def _v0_1_0() -> Semconv:
    inference, embeddings = "gen_ai.client.inference.", "gen_ai.client.embeddings."
    # The modality is unknown, because few providers report tokens of text, images and sound separately.
    unknown_modality = (("gen_ai.token.modality", "unknown"),)

    def counter(name: str, description: str) -> Measure:
        return Measure(Instrument(f"{inference}usage.{name}", description, "{token}"), unknown_modality)

    def tokens(name: str, description: str) -> Measure:
        return Measure(Instrument(name, description, "{token}", _TOKENS))

    return Semconv(
        version="0.1.0",
        measures={
            "duration": _time_measures(inference + "duration", "GenAI client inference operation duration."),
            "first_chunk": _time_measures(
                inference + "time_to_first_chunk", "Time to receive the first chunk."
            ),
            "chunk_gap": _time_measures(inference + "time_per_output_chunk", "Time per output chunk."),
            "input_tokens": (
                counter("input_tokens", "Input tokens used, including cached tokens."),
                tokens(inference + "operation.input_tokens", "Input tokens used per inference operation."),
            ),
            "output_tokens": (
                counter("output_tokens", "Output tokens used, including reasoning tokens."),
                tokens(inference + "operation.output_tokens", "Output tokens used per inference operation."),
            ),
            "cached_tokens": (counter("cache_read.input_tokens", "Input tokens read from a cache."),),
            "cache_write_tokens": (counter("cache_write.input_tokens", "Input tokens written to a cache."),),
            "reasoning_tokens": (counter("reasoning.output_tokens", "Output tokens used for reasoning."),),
            "embeddings_duration": _time_measures(
                embeddings + "duration", "GenAI client embeddings operation duration."
            ),
            "embeddings_tokens": (
                tokens(embeddings + "operation.input_tokens", "Input tokens used per embeddings operation."),
            ),
            **_SERVER_MEASURES,
            **_OWN_MEASURES,
        },
    )


def _own_names() -> Semconv:
    """Return the table of the version `off`, in which all names begin with `llmtap.`."""
    attributes = {
        f.name: f.default.replace("gen_ai.", "llmtap.") for f in fields(Semconv) if f.default is not MISSING
    }
    return Semconv(version="off", **attributes, measures=_OWN_MEASURES)


VERSIONS: Final[Mapping[str, Semconv]] = {
    table.version: table for table in (_v0_1_0(), _v1_41(), _own_names())
}


_OPERATIONS: Final = {
    **dict.fromkeys(
        (
            "chat.completions",
            "responses",
            "messages",
            "realtime",
            "ollama.chat",
            "cohere.chat",
            "lmstudio.chat",
            "bedrock.converse",
            "bedrock.invoke",
        ),
        "chat",
    ),
    **dict.fromkeys(
        ("completions", "generate", "ollama.generate", "tgi.generate_stream", "llamacpp.completion"),
        "text_completion",
    ),
    "embeddings": "embeddings",
    "gemini.generate": "generate_content",
}
_PROVIDERS_OF_HOSTS: Final = (
    (".openai.azure.com", "azure.ai.openai"),
    (".services.ai.azure.com", "azure.ai.inference"),
    ("api.openai.com", "openai"),
    ("api.anthropic.com", "anthropic"),
    ("generativelanguage.googleapis.com", "gcp.gemini"),
    ("aiplatform.googleapis.com", "gcp.vertex_ai"),
    ("api.groq.com", "groq"),
    ("api.mistral.ai", "mistral_ai"),
    ("api.deepseek.com", "deepseek"),
    ("api.cohere.com", "cohere"),
    ("api.perplexity.ai", "perplexity"),
    ("api.x.ai", "x_ai"),
)
"""Well-known provider names of the conventions, by the end of the upstream's host name."""
_PROVIDERS_OF_DIALECTS: Final = (("anthropic", "anthropic"), ("cohere", "cohere"), ("bedrock", "aws.bedrock"))


def operation_of(endpoint: str | None) -> str | None:
    """Return the well-known operation name of an endpoint; None if the endpoint does not call a model."""
    return None if endpoint is None else _OPERATIONS.get(endpoint)


def provider_of(host: str | None, dialect: str | None) -> str:
    """Return the name of the provider by the upstream's host name, or else by the dialect of its answers."""
    if host is not None:
        for end, provider in _PROVIDERS_OF_HOSTS:
            if host.endswith(end):
                return provider
        if host.startswith("bedrock-runtime.") and host.endswith(".amazonaws.com"):
            return "aws.bedrock"
    if dialect is not None:
        for start, provider in _PROVIDERS_OF_DIALECTS:
            if dialect.startswith(start):
                return provider
    return "openai"

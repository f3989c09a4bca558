"""OpenTelemetry's names, in one place, by version of the GenAI conventions.

The conventions for generative AI are in development: version 1.41 of the semantic conventions is the last
that holds them, and their new repository (`genai-main` here: its main branch as of October 2026) renames
metrics without having released anything yet. So nothing else in llmtap spells such a name; it asks the table
of the version that is configured. `off` keeps to names of our own.

Names of HTTP, servers and errors are stable and the same in every version.

Source: semantic-conventions v1.41.0 and semantic-conventions-genai, docs/gen-ai: spans, metrics, token
metrics, client inference, client embeddings. A metric has its place here only where our measure is exactly
its definition.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum, auto
from typing import Final, Literal

from llmtap.export.buckets import GAP_EDGES_NS, TTFT_EDGES_NS

__all__ = [
    "ARM",
    "DIALECT",
    "ERROR_TYPE",
    "EXCHANGE_ID",
    "HTTP_METHOD",
    "HTTP_STATUS",
    "OUTCOME",
    "OVERFLOW",
    "REFUSAL_KIND",
    "REQUEST_ID",
    "SERVER_ADDRESS",
    "SERVER_PORT",
    "SERVICE_NAME",
    "SERVICE_VERSION",
    "TENANT",
    "TOKEN_SOURCE",
    "UNCERTAINTY",
    "URL_PATH",
    "VERSIONS",
    "Instrument",
    "Measure",
    "Semconv",
    "SemconvQuantity",
    "Version",
    "operation_of",
    "provider_of",
    "semconv",
]

Version = Literal["1.41", "genai-main", "off"]

ERROR_TYPE: Final = "error.type"
HTTP_METHOD: Final = "http.request.method"
HTTP_STATUS: Final = "http.response.status_code"
OVERFLOW: Final = "otel.metric.overflow"
"""True on the point that takes what has no room for a series of its own."""
SERVER_ADDRESS: Final = "server.address"
SERVER_PORT: Final = "server.port"
SERVICE_NAME: Final = "service.name"
SERVICE_VERSION: Final = "service.version"
URL_PATH: Final = "url.path"


# Ours, the same in every version.
TENANT: Final = "llmtap.tenant"
ARM: Final = "llmtap.arm"
OUTCOME: Final = "llmtap.outcome"
EXCHANGE_ID: Final = "llmtap.exchange.id"
REQUEST_ID: Final = "llmtap.request.id"
DIALECT: Final = "llmtap.dialect"
REFUSAL_KIND: Final = "llmtap.refusal.kind"
TOKEN_SOURCE: Final = "llmtap.token.source"
UNCERTAINTY: Final = "llmtap.uncertainty"
"""Seconds: the width of every stamp of the exchange."""


def _ns(*seconds: float) -> tuple[int, ...]:
    return tuple(round(s * 1e9) for s in seconds)


_SECONDS: Final = _ns(
    0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92
)  # fmt: skip
_FIRST_TOKEN: Final = _ns(
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10
)  # fmt: skip
_PER_TOKEN: Final = _ns(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5)
_TOKENS: Final = tuple(4**i for i in range(14))


class SemconvQuantity(Enum):
    """What is measured of an exchange; a version's table says under which metrics it goes out."""

    DURATION = auto()
    """First byte of the request to the end of the exchange: the span's own length."""
    FIRST_CHUNK = auto()
    """First byte of the request to the first event that is no keep-alive, of a stream."""
    CHUNK_GAP = auto()
    """Between consecutive events that are neither keep-alives nor the end marker."""
    SERVER_DURATION = auto()
    """Submit to the last byte of the answer."""
    SERVER_FIRST_TOKEN = auto()
    """Submit to the first token of any kind, of streams that ended well."""
    SERVER_PER_TOKEN = auto()
    """(SERVER_DURATION - SERVER_FIRST_TOKEN) / (output tokens - 1)."""
    INPUT_TOKENS = auto()
    OUTPUT_TOKENS = auto()
    CACHED_TOKENS = auto()
    REASONING_TOKENS = auto()
    EMBEDDINGS_DURATION = auto()
    EMBEDDINGS_TOKENS = auto()
    FIRST_CONTENT = auto()
    """TTFT as llmtap defines it (metrics/DEFINITIONS.md), of a stream."""
    TBC = auto()
    """Time between chunks as llmtap defines it: of events that carry output."""
    USER_IDLE = auto()
    EXCHANGES = auto()


@dataclass(frozen=True, slots=True)
class Instrument:
    """One metric. Without edges it is a counter."""

    name: str
    description: str
    unit: str
    edges: tuple[int, ...] = ()
    """Upper edges: ns where the unit is `s`, else in the unit."""

    @property
    def scale(self) -> float:
        """How many of what we count make one of the unit."""
        return 1e9 if self.unit == "s" else 1.0


@dataclass(frozen=True, slots=True)
class Measure:
    """A quantity's way into an instrument, with the attributes that tell it from others in there."""

    instrument: Instrument
    attributes: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Semconv:
    """The names of one version."""

    version: str
    schema_url: str
    """Empty where the version has no published schema."""
    # Attributes.
    operation: str
    provider: str
    request_model: str
    request_stream: str
    response_model: str
    finish_reasons: str
    first_chunk: str
    input_tokens: str
    output_tokens: str
    cached_tokens: str
    reasoning_tokens: str
    # Metrics.
    measures: Mapping[SemconvQuantity, tuple[Measure, ...]]


_ATTRIBUTES: Final = {
    "operation": "gen_ai.operation.name",
    "provider": "gen_ai.provider.name",
    "request_model": "gen_ai.request.model",
    "request_stream": "gen_ai.request.stream",
    "response_model": "gen_ai.response.model",
    "finish_reasons": "gen_ai.response.finish_reasons",
    "first_chunk": "gen_ai.response.time_to_first_chunk",
    "input_tokens": "gen_ai.usage.input_tokens",
    "output_tokens": "gen_ai.usage.output_tokens",
    "cached_tokens": "gen_ai.usage.cache_read.input_tokens",
    "reasoning_tokens": "gen_ai.usage.reasoning.output_tokens",
}
"""The same in both versions."""

_OWN: Final = {
    SemconvQuantity.FIRST_CONTENT: (
        Measure(
            Instrument(
                "llmtap.time_to_first_token",
                "Request handed on to first content that is not blank, of a stream.",
                "s",
                TTFT_EDGES_NS,
            )
        ),
    ),
    SemconvQuantity.TBC: (
        Measure(
            Instrument(
                "llmtap.inter_chunk",
                "Time between consecutive events that carry output.",
                "s",
                GAP_EDGES_NS,
            )
        ),
    ),
    SemconvQuantity.USER_IDLE: (
        Measure(
            Instrument(
                "llmtap.user_idle",
                "All waits of a reader of 20 tokens/s with nothing to read, added up.",
                "s",
                TTFT_EDGES_NS,
            )
        ),
    ),
    SemconvQuantity.EXCHANGES: (
        Measure(Instrument("llmtap.exchanges", "Exchanges by outcome.", "{exchange}")),
    ),
}  # fmt: skip


_SERVER: Final = {
    SemconvQuantity.SERVER_DURATION: (
        Measure(
            Instrument(
                "gen_ai.server.request.duration",
                "Generative AI server request duration such as time-to-last byte or last output token.",
                "s",
                _SECONDS,
            )
        ),
    ),
    SemconvQuantity.SERVER_FIRST_TOKEN: (
        Measure(
            Instrument(
                "gen_ai.server.time_to_first_token",
                "Time to generate first token for successful responses.",
                "s",
                _FIRST_TOKEN,
            )
        ),
    ),
    SemconvQuantity.SERVER_PER_TOKEN: (
        Measure(
            Instrument(
                "gen_ai.server.time_per_output_token",
                "Time per output token generated after the first token for successful responses.",
                "s",
                _PER_TOKEN,
            )
        ),
    ),
}
"""The model server's, which no version has renamed. We see it from its door: the way to it is included."""


def _v1_41() -> Semconv:
    duration = Instrument("gen_ai.client.operation.duration", "GenAI operation duration.", "s", _SECONDS)
    usage = Instrument(
        "gen_ai.client.token.usage", "Number of input and output tokens used.", "{token}", _TOKENS
    )
    first_chunk = Instrument(
        "gen_ai.client.operation.time_to_first_chunk", "Time to receive the first chunk.", "s", _SECONDS
    )
    chunk = Instrument(
        "gen_ai.client.operation.time_per_output_chunk", "Time per output chunk.", "s", _SECONDS
    )
    read = (("gen_ai.token.type", "input"),)
    written = (("gen_ai.token.type", "output"),)
    return Semconv(
        version="1.41",
        schema_url="https://opentelemetry.io/schemas/1.41.0",
        **_ATTRIBUTES,
        measures={
            SemconvQuantity.DURATION: (Measure(duration),),
            SemconvQuantity.EMBEDDINGS_DURATION: (Measure(duration),),
            SemconvQuantity.FIRST_CHUNK: (Measure(first_chunk),),
            SemconvQuantity.CHUNK_GAP: (Measure(chunk),),
            SemconvQuantity.INPUT_TOKENS: (Measure(usage, read),),
            SemconvQuantity.EMBEDDINGS_TOKENS: (Measure(usage, read),),
            SemconvQuantity.OUTPUT_TOKENS: (Measure(usage, written),),
            **_SERVER,
            **_OWN,
        },
    )


def _genai_main() -> Semconv:
    inference = "gen_ai.client.inference."
    spent = "gen_ai.client.inference.usage."
    # Providers tell tokens of text from those of images or sound too seldom to build on it.
    unknown = (("gen_ai.token.modality", "unknown"),)

    def counter(name: str, text: str) -> Measure:
        return Measure(Instrument(spent + name, text, "{token}"), unknown)

    def seconds(name: str, text: str) -> tuple[Measure, ...]:
        return (Measure(Instrument(name, text, "s", _SECONDS)),)

    def tokens(name: str, text: str) -> Measure:
        return Measure(Instrument(name, text, "{token}", _TOKENS))

    embeddings = "gen_ai.client.embeddings."
    return Semconv(
        version="genai-main",
        schema_url="",
        **_ATTRIBUTES,
        measures={
            SemconvQuantity.DURATION: seconds(
                inference + "duration", "GenAI client inference operation duration."
            ),
            SemconvQuantity.FIRST_CHUNK: seconds(
                inference + "time_to_first_chunk", "Time to receive the first chunk."
            ),
            SemconvQuantity.CHUNK_GAP: seconds(inference + "time_per_output_chunk", "Time per output chunk."),
            SemconvQuantity.INPUT_TOKENS: (
                counter("input_tokens", "Input tokens used, including cached tokens."),
                tokens(inference + "operation.input_tokens", "Input tokens used per inference operation."),
            ),
            SemconvQuantity.OUTPUT_TOKENS: (
                counter("output_tokens", "Output tokens used, including reasoning tokens."),
                tokens(inference + "operation.output_tokens", "Output tokens used per inference operation."),
            ),
            SemconvQuantity.CACHED_TOKENS: (
                counter("cache_read.input_tokens", "Input tokens read from a cache."),
            ),
            SemconvQuantity.REASONING_TOKENS: (
                counter("reasoning.output_tokens", "Output tokens used for reasoning."),
            ),
            SemconvQuantity.EMBEDDINGS_DURATION: seconds(
                embeddings + "duration", "GenAI client embeddings operation duration."
            ),
            SemconvQuantity.EMBEDDINGS_TOKENS: (
                tokens(embeddings + "operation.input_tokens", "Input tokens used per embeddings operation."),
            ),
            **_SERVER,
            **_OWN,
        },
    )


def _off() -> Semconv:
    own = {field: name.replace("gen_ai.", "llmtap.") for field, name in _ATTRIBUTES.items()}
    return Semconv(version="off", schema_url="", **own, measures=_OWN)


VERSIONS: Final[Mapping[str, Semconv]] = {table.version: table for table in (_v1_41(), _genai_main(), _off())}


def semconv(version: Version) -> Semconv:
    """The table of a version."""
    return VERSIONS[version]


_OPERATIONS: Final = {
    "chat.completions": "chat",
    "responses": "chat",
    "messages": "chat",
    "realtime": "chat",
    "ollama.chat": "chat",
    "cohere.chat": "chat",
    "lmstudio.chat": "chat",
    "completions": "text_completion",
    "generate": "text_completion",
    "ollama.generate": "text_completion",
    "tgi.generate_stream": "text_completion",
    "llamacpp.completion": "text_completion",
    "embeddings": "embeddings",
    "generate_content": "generate_content",
}

_HOSTS: Final = (
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
"""Well-known values of the conventions, by the end of the upstream's name."""
_FLAVOURS: Final = (("anthropic", "anthropic"), ("cohere", "cohere"), ("bedrock", "aws.bedrock"))


def operation_of(endpoint: str | None) -> str | None:
    """The operation's well-known name for an endpoint; None for what is no operation of a model."""
    return None if endpoint is None else _OPERATIONS.get(endpoint)


def provider_of(host: str | None, dialect: str | None) -> str:
    """The provider by best knowledge: the upstream's name, else the flavour its answers have.

    The attribute is required, and tells which provider's format the telemetry follows: an
    OpenAI-compatible server of no well-known name is `openai`.
    """
    if host is not None:
        for end, provider in _HOSTS:
            if host.endswith(end):
                return provider
        if host.startswith("bedrock-runtime.") and host.endswith(".amazonaws.com"):
            return "aws.bedrock"
    if dialect is not None:
        for start, provider in _FLAVOURS:
            if dialect.startswith(start):
                return provider
    return "openai"

"""The tables of names against the conventions' documents (November 2026); and that there is no other."""

import pytest

from llmtap.export.opentelemetry.semconv import (
    VERSIONS,
    Instrument,
    operation_of,
    provider_of,
)

SECONDS = [0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92]
TOKENS = [1, 4, 16, 64, 256, 1024, 4096, 16384, 65536, 262144, 1048576, 4194304, 16777216, 67108864]
FIRST_TOKEN = [0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0]
PER_TOKEN = [0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5]

SERVER = {
    "gen_ai.server.request.duration": ("s", SECONDS),
    "gen_ai.server.time_to_first_token": ("s", FIRST_TOKEN),
    "gen_ai.server.time_per_output_token": ("s", PER_TOKEN),
}
METRICS = {
    "1.41": {
        "gen_ai.client.operation.duration": ("s", SECONDS),
        "gen_ai.client.operation.time_to_first_chunk": ("s", SECONDS),
        "gen_ai.client.operation.time_per_output_chunk": ("s", SECONDS),
        "gen_ai.client.token.usage": ("{token}", TOKENS),
        **SERVER,
    },
    "0.1.0": {
        "gen_ai.client.inference.duration": ("s", SECONDS),
        "gen_ai.client.inference.time_to_first_chunk": ("s", SECONDS),
        "gen_ai.client.inference.time_per_output_chunk": ("s", SECONDS),
        "gen_ai.client.inference.usage.input_tokens": ("{token}", []),
        "gen_ai.client.inference.usage.output_tokens": ("{token}", []),
        "gen_ai.client.inference.usage.cache_read.input_tokens": ("{token}", []),
        "gen_ai.client.inference.usage.cache_write.input_tokens": ("{token}", []),
        "gen_ai.client.inference.usage.reasoning.output_tokens": ("{token}", []),
        "gen_ai.client.inference.operation.input_tokens": ("{token}", TOKENS),
        "gen_ai.client.inference.operation.output_tokens": ("{token}", TOKENS),
        "gen_ai.client.embeddings.duration": ("s", SECONDS),
        "gen_ai.client.embeddings.operation.input_tokens": ("{token}", TOKENS),
        **SERVER,
    },
    "off": {},
}


def instruments(version: str) -> dict[str, Instrument]:
    return {m.instrument.name: m.instrument for group in VERSIONS[version].measures.values() for m in group}


@pytest.mark.parametrize("version", METRICS)
def test_each_version_has_exactly_its_metrics_units_and_edges(version: str) -> None:
    found = {
        name: (i.unit, [edge / i.scale for edge in i.edges])
        for name, i in instruments(version).items()
        if not name.startswith("llmtap.")
    }
    assert found == METRICS[version]


@pytest.mark.parametrize(
    ("endpoint", "operation"),
    [
        ("chat.completions", "chat"),
        ("completions", "text_completion"),
        ("responses", "chat"),
        ("messages", "chat"),
        ("embeddings", "embeddings"),
        (None, None),
        ("models", None),
    ],
)
def test_an_endpoint_is_an_operation(endpoint: str | None, operation: str | None) -> None:
    assert operation_of(endpoint) == operation


@pytest.mark.parametrize(
    ("host", "dialect", "provider"),
    [
        ("api.openai.com", "openai.chat", "openai"),
        ("my-team.openai.azure.com", "openai.chat", "azure.ai.openai"),
        ("generativelanguage.googleapis.com", None, "gcp.gemini"),
        ("bedrock-runtime.eu-central-1.amazonaws.com", None, "aws.bedrock"),
        ("api.x.ai.example.com", None, "openai"),
        ("127.0.0.1", "anthropic.messages", "anthropic"),
        (None, None, "openai"),
    ],
)
def test_the_provider_by_best_knowledge(host: str | None, dialect: str | None, provider: str) -> None:
    assert provider_of(host, dialect) == provider

"""Which requests are measured: rules of methods and paths."""

import pytest

from llmtap.errors import ConfigError
from llmtap.protocol.inference import NOT_INFERENCE, SkipRules


@pytest.mark.parametrize(
    ("rules", "path", "skipped"),
    [
        (("/health",), "/health", True),
        (("/health/",), "/health/live", True),
        (("/health",), "/healthz", False),
        (("/health",), "/v1/health", False),
        (("/",), "/v1/models", False),
        (("/health",), "", False),
    ],
)
def test_a_path_holds_itself_and_what_is_below_it(rules: list[str], path: str, skipped: bool) -> None:
    assert (SkipRules(rules).rule_of("POST", path) is not None) == skipped


WEBSOCKET = [(b"Connection", b"Upgrade"), (b"Upgrade", b"WebSocket")]


@pytest.mark.parametrize(
    ("method", "target", "fields", "rule"),
    [
        (b"GET", b"/metrics", [], "GET"),
        (b"HEAD", b"/health?deep=1", [(b"Accept", b"*/*")], "HEAD"),
        (b"GET", b"/v1/responses/resp_1", [], "GET"),
        (b"GET", b"/v1/responses/resp_1?starting_after=5&stream=true", [], None),
        (b"GET", b"/mcp", [(b"accept", b"application/json, text/event-stream")], None),
        (b"GET", b"/v1/realtime", WEBSOCKET, None),
        (b"GET", b"/", [(b"Upgrade", b"h2c")], "GET"),
        (b"POST", b"/v1/chat/completions", [], None),
        (b"POST", b"/some/vendor/path", [], None),
        (b"POST", b"/v1/messages/count_tokens", [], "/v1/messages/count_tokens"),
        (b"POST", b"/v1/messages", [], None),
        (b"POST", b"/%74okenize", [], "/tokenize"),
        (b"POST", b"http://gateway/tokenize/x", [], "/tokenize"),
    ],
)
def test_the_default_rules_tell_inference_from_the_rest(
    method: bytes, target: bytes, fields: list[tuple[bytes, bytes]], rule: str | None
) -> None:
    assert SkipRules(NOT_INFERENCE).rule_of_head(method, target, fields) == rule
    assert SkipRules(()).rule_of_head(method, target, fields) is None


@pytest.mark.parametrize("rules", ["/health", ("health",), ("",), ("/health*",), ("/health?deep=1",)])
def test_what_cannot_be_meant_is_refused(rules: list[str]) -> None:
    with pytest.raises(ConfigError) as refused:
        SkipRules(rules, "relay.skip")
    assert refused.value.place == "relay.skip"

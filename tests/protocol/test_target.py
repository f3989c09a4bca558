"""Paths of request targets: the one that recognises, and the one that rules may match."""

import pytest

from llmtap.protocol.inference import NOT_INFERENCE, SkipRules
from llmtap.protocol.target import plain_path, routed_path, split_target


@pytest.mark.parametrize(
    ("target", "path", "query"),
    [
        (b"/a/b?c=d?e", "/a/b", "c=d?e"),
        (b"http://h:1/a?b", "/a", "b"),
        (b"http://h", "/", ""),
        (b"*", "*", ""),
        (b"/a%2Fb", "/a%2Fb", ""),
    ],
)
def test_a_target_has_a_path_and_a_query(target: bytes, path: str, query: str) -> None:
    assert split_target(target) == (path, query)


@pytest.mark.parametrize(
    ("path", "routed"),
    [
        ("/v1/chat/completions", "/v1/chat/completions"),
        # RFC 3986 5.2.4
        ("/v1/files/../chat/completions", "/v1/chat/completions"),
        ("/a/./b/", "/a/b/"),
        ("/../../a", "/a"),
        ("/a/b/..", "/a/"),
        # RFC 3986 6.2.2: a percent-encoded character is the same as the character.
        ("/v1/files/%2e%2E/chat/completions", "/v1/chat/completions"),
        ("/models/gemini%3AstreamGenerateContent", "/models/gemini:streamGenerateContent"),
        ("/t/acme%20corp/x", "/t/acme corp/x"),
        # An encoded slash separates no segments.
        ("/model/a%2fb/converse", "/model/a%2Fb/converse"),
        ("//v1///chat/completions", "/v1/chat/completions"),
        ("/v1/chat;a=b/completions;c", "/v1/chat/completions"),
    ],
)
def test_the_routed_path_is_decoded_and_without_dot_segments(path: str, routed: str) -> None:
    assert routed_path(path) == routed


@pytest.mark.parametrize("path", ["/v1/files", "/v1/f%69les", "/v1/files/", "/v1/files/a.b", "/v1/files/..x"])
def test_a_plain_path_has_one_reading(path: str) -> None:
    assert plain_path(path) == path.replace("%69", "i")


AMBIGUOUS = [
    "/v1/files/../chat/completions",
    "/v1/files/%2e%2e/chat/completions",
    "/v1/files/.%2E/x",
    "/v1/files/./x",
    "/v1/files/..",
    "//v1/files",
    "/v1/files//x",
    "/v1/files;a=b",
    "/v1/files/..;/chat",
    "/v1/files%2Fx",
    "/v1/files%2f..%2fchat",
    "/v1/files/..%5cchat",
    "/v1/files\\..\\chat",
    "/v1/files/%252e%252e/chat",
    "/v1/files/%00",
    "/v1/files/%c0%ae%c0%ae/chat",
    "/v1/files/.. /chat",
    "/v1/files/%3Fx",
    "/v1/files%23",
    "/v1/files/%09..",
    "/v1/files/...//chat",
]


@pytest.mark.parametrize("path", AMBIGUOUS)
def test_a_path_with_two_readings_meets_no_rule_of_a_path(path: str) -> None:
    assert plain_path(path) is None
    rules = SkipRules(NOT_INFERENCE)
    assert rules.rule_of_head(b"POST", path.encode(), []) is None
    assert rules.rule_of_head(b"POST", b"http://g" + path.encode(), []) is None
    assert rules.rule_of_head(b"GET", path.encode(), []) == "GET"  # a rule of a method looks at no path


def test_a_decoded_path_meets_no_rule_by_its_dot_segments() -> None:
    """As a middleware gets it from its server."""
    rules = SkipRules(NOT_INFERENCE)
    assert rules.rule_of("POST", "/v1/files/../chat/completions") is None
    assert rules.rule_of("POST", "/v1/files/a") == "/v1/files"


@pytest.mark.parametrize("query", ["stream=true", "a=b&stream=1", "stream=%74rue", "%73tream=TRUE"])
def test_a_get_for_a_stream_is_measured_however_it_is_spelt(query: str) -> None:
    assert SkipRules(NOT_INFERENCE).rule_of_head(b"GET", b"/v1/responses/r?" + query.encode(), []) is None

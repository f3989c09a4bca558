"""A path that is skipped takes those below it along, and no other."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmtap.errors import ConfigError
from llmtap.vantage.middleware.emitter import Paths

SEGMENTS = st.lists(st.text("ab*? é/", max_size=3), max_size=4)


@pytest.mark.parametrize(
    ("named", "path", "is_in"),
    [
        (("/health",), "/health", True),
        (("/health",), "/health/", True),
        (("/health",), "/health/live", True),
        (("/health",), "/healthz", False),
        (("/health",), "/v1/health", False),
        (("/health/",), "/health", True),
        (("/health/",), "/health/live", True),
        (["/health", "/metrics"], "/metrics", True),
        (["/health", "/metrics"], "/v1/chat/completions", False),
        (("/",), "/", True),
        (("/",), "/v1/models", False),
        ((), "/", False),
        ((), "", False),
        (("/health",), "", False),
        (("/health",), None, False),
        (("/health",), b"/health", False),
    ],
)
def test_a_path_holds_itself_and_what_is_below_it(named: list[str], path: object, is_in: bool) -> None:
    assert (path in Paths(named)) == is_in


@given(SEGMENTS)
def test_without_names_nothing_is_skipped(segments: list[str]) -> None:
    assert "/" + "/".join(segments) not in Paths(())


@pytest.mark.parametrize(
    ("named", "said"),
    [
        ("/health", r"wants a collection of paths.*skip=\('/health',\)"),
        (("health",), "'health' does not begin with /"),
        (("",), "'' does not begin with /"),
        (("/health*",), "is a pattern or has a query"),
        (("/health?deep=1",), "is a pattern or has a query"),
    ],
)
def test_what_cannot_be_meant_is_refused(named: list[str], said: str) -> None:
    with pytest.raises(ConfigError) as refused:
        Paths(named)
    assert refused.value.place == "skip"
    refused.match(f"(?s){said}")

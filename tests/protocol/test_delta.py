"""Invariant: the codes of classes are their order of precedence; timelines and captures keep them."""

from llmtap.protocol.delta import EventClass, TokenSource


def test_the_codes_are_the_order_of_precedence() -> None:
    assert [c.name.lower() for c in sorted(EventClass)] == [
        "guardrail", "error", "refusal", "content", "tool_call", "reasoning", "role", "done", "usage",
        "metadata", "keepalive",
    ]  # fmt: skip


def test_token_sources_come_best_first() -> None:
    assert [s.value for s in TokenSource][:4] == ["usage", "token_ids", "logprobs", "running_usage"]

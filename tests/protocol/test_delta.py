"""Invariant: the codes of classes are their order of precedence; timelines and captures keep them."""

from llmtap.exchange import outcome
from llmtap.protocol.delta import Delta, EventClass, TokenSource


def test_the_codes_are_the_order_of_precedence() -> None:
    assert [c.name.lower() for c in sorted(EventClass)] == [
        "guardrail", "error", "refusal", "content", "tool_call", "reasoning", "role", "done", "usage",
        "metadata", "keepalive",
    ]  # fmt: skip


def test_a_class_goes_into_a_byte() -> None:
    column = bytearray()
    for event_class in EventClass:
        column.append(event_class)
    assert list(column) == list(range(len(EventClass)))


def test_token_sources_come_best_first() -> None:
    assert [s.value for s in TokenSource][:4] == ["usage", "token_ids", "logprobs", "running_usage"]


def test_a_bare_delta_claims_nothing() -> None:
    delta = Delta(EventClass.METADATA)
    assert not (delta.output or delta.content or delta.blank or delta.reasoning or delta.done)
    assert (delta.tokens, delta.token_source, delta.parsed) == (-1, TokenSource.NONE, True)


def test_the_record_has_the_same_classes() -> None:
    assert outcome.EventClass is EventClass
    assert outcome.TokenSource is TokenSource

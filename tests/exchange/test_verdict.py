"""What the whole observer makes of it is in `test_observer.py`; here is the order in which signs count."""

from typing import Any

import pytest

from llmtap.exchange.exchange import Exchange, Timeline
from llmtap.exchange.outcome import EventClass, Outcome
from llmtap.exchange.verdict import figures_of, is_word, judge, no_token_reason
from llmtap.protocol.verdicts import MODEL_REFUSAL

CUT = "upstream ended the stream without a finish reason or an end marker"


def exchange(**told: Any) -> Exchange:
    x = Exchange("r", 1, 0, Timeline(0), status=200, stream=True, dialect="openai.chat", finish_reason="stop")
    for name, value in told.items():
        setattr(x, name, value)
    return x


def refused(confidence: str, kind: str = "guardrail") -> dict[str, object]:
    return {"kind": kind, "source": "status", "confidence": confidence}


@pytest.mark.parametrize(
    "told, signs, expected",
    [
        ({}, {}, (Outcome.COMPLETE, None)),
        ({"refusal": refused("high"), "status": 400}, {"error_type": "e"}, (Outcome.REFUSED, None)),
        ({"refusal": refused("low")}, {}, (Outcome.COMPLETE, None)),
        ({"status": 503}, {"error_type": "overloaded"},
         (Outcome.UPSTREAM_ERROR, "upstream answered 503 (overloaded)")),
        ({}, {"error_type": "text of somebody's"},
         (Outcome.UPSTREAM_ERROR, "upstream sent an error in its answer")),
        ({"finish_reason": None}, {"lost": "why"},
         (Outcome.COMPLETE, "upstream sent a body that cannot be read: why")),
        ({"finish_reason": None}, {}, (Outcome.TRUNCATED, CUT)),
        ({"finish_reason": None}, {"done": True}, (Outcome.COMPLETE, None)),
        ({"finish_reason": None, "stream": False}, {}, (Outcome.COMPLETE, None)),
        ({"finish_reason": None, "dialect": None}, {}, (Outcome.COMPLETE, None)),
    ],
)  # fmt: skip
def test_the_strongest_sign_decides(
    told: dict[str, Any], signs: dict[str, Any], expected: tuple[Outcome, str | None]
) -> None:
    signs = {"done": False, "lost": None, "error_type": None, **signs}
    assert judge(exchange(**told), Outcome.COMPLETE, **signs) == expected
    assert judge(exchange(**told), Outcome.CLIENT_CANCELLED, **signs) == (Outcome.CLIENT_CANCELLED, None)


@pytest.mark.parametrize(
    "outcome, refusal, classes, expected",
    [
        (Outcome.COMPLETE, None, (), "empty"),
        (Outcome.COMPLETE, None, (EventClass.KEEPALIVE, EventClass.DONE), "empty"),
        (Outcome.COMPLETE, None, (EventClass.KEEPALIVE, EventClass.METADATA), "only_metadata"),
        (Outcome.REFUSED, refused("high", MODEL_REFUSAL), (), "refusal"),
        (Outcome.REFUSED, refused("high"), (), "guardrail"),
        (Outcome.CLIENT_CANCELLED, None, (), "cancelled"),
        (Outcome.REJECTED, None, (), "rejected"),
        (Outcome.UPSTREAM_ERROR, None, (), "error"),
    ],
)
def test_why_no_token_came(
    outcome: Outcome, refusal: dict[str, object] | None, classes: tuple[EventClass, ...], expected: str
) -> None:
    x = exchange(outcome=outcome, refusal=refusal)
    for event_class in classes:
        x.timeline.events.add(0, event_class, 1, -1, 0)
    assert no_token_reason(x) == expected


def test_of_a_usage_figures_and_words_are_kept() -> None:
    usage = {
        "prompt_tokens": 9, "share": 0.5, "tier": "default", "none": None, "note": "a text of several words",
        "not a name": 1, "huge": 1 << 60, "nan": float("nan"), "list": [1],
        "a": {"b": {"c": {"d": 1, "n": 2}, "n": 1}},
    }  # fmt: skip
    assert figures_of(usage) == {
        "prompt_tokens": 9, "share": 0.5, "tier": "default", "none": None,
        "a": {"b": {"c": {"d": 1, "n": 2}, "n": 1}},
    }  # fmt: skip
    assert figures_of({"a": {"b": {"c": {"d": {"e": 1}}}}}) == {"a": {"b": {"c": {}}}}
    assert len(figures_of({f"n{i}": i for i in range(100)})) == 64


def test_words_are_short_and_of_one_piece() -> None:
    assert is_word("content_filter") and is_word("a" * 64)
    assert not any(map(is_word, ("", "a b", "a" * 65, "a\n")))

"""Invariant: the tokens there were count, not those that are billed."""

from typing import Any

import pytest

from llmtap.protocol.delta import TokenSource
from llmtap.protocol.dialects.registry import TABLES
from tests.protocol.dialects.events import encode, event, told

Cohere = TABLES["cohere.v2"]


def ev(kind: str, message: Any = None, **more: Any) -> dict[str, Any]:
    return {"type": kind, "index": 0, **({} if message is None else {"delta": {"message": message}}), **more}


TEXT = {"is": "content", "output": True, "content": True, "choices": (0,), "text": "Hi"}
CALL = {"is": "tool_call", "output": True, "tool_call": True, "choices": (0,)}
THOUGHT = {"is": "reasoning", "output": True, "reasoning": True, "choices": (0,), "text": "hm"}
METADATA = {"is": "metadata"}
USAGE = {
    "billed_units": {"input_tokens": 3, "output_tokens": 4},
    "tokens": {"input_tokens": 205.0, "output_tokens": 6.0},
    "cached_tokens": 2,
}
COUNTS = {"input": 205, "output": 6, "reasoning": None, "cached": 2}


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (ev("message-start", {"role": "assistant", "content": [], "tool_plan": ""}), {"is": "role"}),
        (ev("content-start", {"content": {"type": "text", "text": "Hi"}}), TEXT),
        (ev("content-delta", {"content": {"text": "Hi"}}), TEXT),
        (ev("content-delta", {"content": {"thinking": "hm"}}), THOUGHT),
        (ev("content-delta"), METADATA | {"parsed": False}),
        (
            ev("content-delta", {"content": {"text": "Hi"}}, logprobs={"token_ids": [4, 5], "text": "Hi"}),
            TEXT | {"tokens": 2, "token_source": TokenSource.TOKEN_IDS},
        ),
        (ev("tool-plan-delta", {"tool_plan": "hm"}), THOUGHT),
        (ev("tool-call-start", {"tool_calls": {"function": {"name": "tide", "arguments": ""}}}), CALL),
        (ev("tool-call-delta", {"tool_calls": {"function": {"arguments": '{"'}}}), CALL | {"text": '{"'}),
        (ev("tool-call-delta", {"tool_calls": {"function": {"arguments": ""}}}), {"is": "tool_call"}),
        (
            {"type": "message-end", "delta": {"finish_reason": "COMPLETE", "usage": USAGE}},
            {
                "is": "done",
                "also": ["usage"],
                "done": True,
                "finish_reason": "COMPLETE",
                "usage": USAGE,
                "counts": COUNTS,
            },
        ),
        (
            {"type": "message-end", "delta": {"finish_reason": "ERROR", "error": "it broke"}},
            {
                "is": "error",
                "also": ["done"],
                "done": True,
                "finish_reason": "ERROR",
                "error_type": "ERROR",
                "error_message": "it broke",
            },
        ),
        ({"type": "message-end"}, {"is": "done", "done": True}),
        ({"type": "vellichor"}, METADATA | {"parsed": False}),
        (b"[DONE]", {"is": "done", "done": True}),
        (b"{", METADATA | {"parsed": False}),
    ],
)
def test_what_an_event_says(value: Any, said: dict[str, Any]) -> None:
    assert told(Cohere().read_event(event(value))) == said


def test_a_whole_answer() -> None:
    body = {
        "id": "c",
        "finish_reason": "TOOL_CALL",
        "usage": USAGE,
        "message": {
            "role": "assistant",
            "tool_plan": "hm",
            "content": [{"type": "text", "text": "Hi"}],
            "tool_calls": [{"function": {"name": "tide", "arguments": "{}"}}],
        },
    }
    assert told(Cohere().read_body(encode(body))) == {
        "is": "content",
        "also": ["tool_call", "reasoning", "usage"],
        "output": True,
        "content": True,
        "reasoning": True,
        "tool_call": True,
        "choices": (0,),
        "text": "Hi",
        "finish_reason": "TOOL_CALL",
        "usage": USAGE,
        "counts": COUNTS,
    }
    failed = told(Cohere().read_body(b'{"id":"c","message":"no such model"}'))
    assert failed == {"is": "error", "error_type": "error", "error_message": "no such model"}
    assert not Cohere().read_body(b"[]").parsed

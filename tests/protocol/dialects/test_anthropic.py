"""Invariant: an event says the same with its `event:` line and without it."""

from typing import Any

import pytest

from llmtap.protocol.delta import Delta
from llmtap.protocol.dialects.anthropic import Anthropic
from tests.protocol.dialects.events import encode, event, told


def start(**message: Any) -> dict[str, Any]:
    return {"type": "message_start", "message": {"id": "m1", "role": "assistant", **message}}


def delta(**fields: Any) -> dict[str, Any]:
    return {"type": "content_block_delta", "index": 0, "delta": fields}


def block(kind: str, **fields: Any) -> dict[str, Any]:
    return {"type": "content_block_start", "index": 0, "content_block": {"type": kind, **fields}}


def end(reason: str | None, **more: Any) -> dict[str, Any]:
    return {"type": "message_delta", "delta": {"stop_reason": reason}, **more}


TEXT = {"is": "content", "output": True, "content": True, "choices": (0,)}
CALL = {"is": "tool_call", "output": True, "tool_call": True, "choices": (0,)}
THOUGHT = {"is": "reasoning", "output": True, "reasoning": True, "choices": (0,)}
METADATA = {"is": "metadata"}
USED = {"output_tokens": 9}
COUNTS = {"input": None, "output": 9, "reasoning": None, "cached": None}
REFUSED = {
    "signal": "stop_reason",
    "kind": "output_guardrail",
    "action": "blocked",
    "phase": "output",
    "confidence": "high",
    "value": "refusal",
    "category": "cyber",
    "path": None,
    "substituted": False,
    "detail": None,
}
INTERVENED = {"stage": "unknown", "why": "whether input or output was blocked is only in the trace"}

CASES = [
    (start(), {"is": "role"}),
    (start(model="c", usage={"input_tokens": 0, "output_tokens": 0}), {"is": "role", "model": "c"}),
    (
        start(model="c", usage={"input_tokens": 5, "cache_read_input_tokens": 3, "output_tokens": 1}),
        {
            "is": "role",
            "also": ["usage"],
            "model": "c",
            "usage_running": True,
            "counts": {"input": 5, "output": None, "reasoning": None, "cached": 3},
        },
    ),
    (block("text", text="Hi"), TEXT | {"text": "Hi"}),
    (block("thinking", thinking=""), METADATA),
    (block("thinking", thinking="hm"), THOUGHT | {"text": "hm"}),
    (block("tool_use", id="t", name="tide", input={}), CALL),
    (block("tool_use"), METADATA),
    (block("web_search_tool_result", content=[{"type": "text", "text": "found"}]), METADATA),
    ({"type": "content_block_start"}, METADATA | {"parsed": False}),
    (delta(type="text_delta", text="Hi"), TEXT | {"text": "Hi"}),
    (delta(text="Hi"), TEXT | {"text": "Hi"}),
    (
        delta(type="text_delta", text=" \n"),
        {"is": "content", "output": True, "blank": True, "text": " \n", "choices": (0,)},
    ),
    (delta(type="thinking_delta", thinking="hm"), THOUGHT | {"text": "hm"}),
    (delta(type="input_json_delta", partial_json=""), {"is": "tool_call"}),
    (delta(type="input_json_delta", partial_json='{"'), CALL | {"text": '{"'}),
    (delta(type="signature_delta", signature="x"), METADATA),
    ({"type": "content_block_delta"}, METADATA | {"parsed": False}),
    ({"type": "content_block_stop", "index": 0}, METADATA),
    (end("end_turn"), METADATA | {"finish_reason": "end_turn"}),
    (
        end("end_turn", usage=USED),
        {"is": "usage", "finish_reason": "end_turn", "usage": USED, "counts": COUNTS},
    ),
    (end(None, usage=USED), {"is": "usage", "usage": USED, "counts": COUNTS, "usage_running": True}),
    (end(None, usage={"output_tokens": 0}), METADATA),
    (
        {
            "type": "message_delta",
            "usage": USED,
            "delta": {"stop_reason": "refusal", "stop_details": {"type": "refusal", "category": "cyber"}},
        },
        {
            "is": "refusal",
            "also": ["usage"],
            "finish_reason": "refusal",
            "usage": USED,
            "counts": COUNTS,
            "verdict": REFUSED,
        },
    ),
    (
        end("guardrail_intervened"),
        {
            "is": "guardrail",
            "finish_reason": "guardrail_intervened",
            "verdict": REFUSED
            | {
                "kind": "guardrail",
                "phase": "unknown",
                "action": "replaced",
                "confidence": "medium",
                "value": "guardrail_intervened",
                "category": None,
                "substituted": True,
                "detail": INTERVENED,
            },
        },
    ),
    ({"type": "message_stop"}, {"is": "done", "done": True}),
    ({"type": "ping"}, {"is": "keepalive"}),
    (
        {"type": "error", "error": {"type": "overloaded_error", "message": "Overloaded"}},
        {"is": "error", "error_type": "overloaded_error", "error_message": "Overloaded"},
    ),
    ({"type": "vellichor"}, METADATA | {"parsed": False}),
    ({"x": 1}, METADATA | {"parsed": False}),
    (b"{", METADATA | {"parsed": False}),
    (b"", {"is": "keepalive"}),
]


@pytest.mark.parametrize(("value", "said"), CASES)
def test_what_an_event_says(value: Any, said: dict[str, Any]) -> None:
    assert told(Anthropic().read_event(event(value))) == said
    if isinstance(value, dict) and "type" in value:
        assert told(Anthropic().read_event(event(value, value["type"].encode()))) == said
        nameless = {k: v for k, v in value.items() if k != "type"}
        assert told(Anthropic().read_event(event(nameless, value["type"].encode()))) == said


def read(*values: Any) -> list[Delta]:
    dialect = Anthropic()
    return [dialect.read_event(event(v)) for v in values]


def test_a_gateway_that_begins_again_is_told_by_its_id_or_model() -> None:
    begun = start(model="a"), delta(text="Hi")
    again = (start(id="m2", model="a"), start(model="b"), start(model="a"))
    assert [read(*begun, one)[-1].retry for one in again] == [True, True, False]
    assert not read(start(), start(id="m2"))[-1].retry, "nothing had been said"


def test_a_whole_message() -> None:
    body = {
        "id": "m",
        "type": "message",
        "role": "assistant",
        "model": "c",
        "stop_reason": "tool_use",
        "content": [
            {"type": "thinking", "thinking": "hm", "signature": "s"},
            {"type": "text", "text": "Hi"},
            {"type": "tool_use", "name": "tide", "input": {"port": "Brest"}},
        ],
        "usage": {"input_tokens": 7, "output_tokens": 9},
    }
    assert told(Anthropic().read_body(encode(body))) == {
        "is": "content",
        "also": ["tool_call", "reasoning", "usage"],
        "output": True,
        "content": True,
        "reasoning": True,
        "tool_call": True,
        "text": "Hi",
        "choices": (0,),
        "model": "c",
        "finish_reason": "tool_use",
        "usage": body["usage"],
        "counts": {"input": 7, "output": 9, "reasoning": None, "cached": None},
    }
    refused = {
        "type": "message",
        "content": [],
        "stop_reason": "refusal",
        "stop_details": {"category": "cyber"},
    }
    assert told(Anthropic().read_body(encode(refused)))["verdict"] == REFUSED
    failed = {"type": "error", "error": {"type": "not_found_error", "message": "m"}}
    assert told(Anthropic().read_body(encode(failed)))["error_type"] == "not_found_error"
    assert not Anthropic().read_body(b"[]").parsed

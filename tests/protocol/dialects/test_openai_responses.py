"""Invariant: a text counts once, as deltas; what repeats it whole is metadata."""

from typing import Any

import pytest

from llmtap.protocol.delta import Delta, TokenSource
from llmtap.protocol.dialects.openai_responses import OpenAIRealtime, OpenAIResponses
from tests.protocol.dialects.events import encode, event, told


def ev(kind: str, **fields: Any) -> dict[str, Any]:
    return {"type": f"response.{kind}", "sequence_number": 1, **fields}


def over(kind: str, **response: Any) -> dict[str, Any]:
    return ev(kind, response={"id": "r1", "object": "response", **response})


def verdict(signal: str, kind: str | None, value: str | None, **more: Any) -> dict[str, Any]:
    return {
        "signal": signal,
        "kind": kind,
        "action": None,
        "phase": None,
        "confidence": "high",
        "value": value,
        "category": None,
        "path": None,
        "substituted": False,
        "detail": None,
        **more,
    }


TEXT = {"is": "content", "output": True, "content": True, "choices": (0,)}
CALL = {"is": "tool_call", "output": True, "tool_call": True, "choices": (0,)}
THOUGHT = {"is": "reasoning", "output": True, "reasoning": True, "choices": (0,), "text": "hm"}
METADATA = {"is": "metadata"}
USAGE = {
    "input_tokens": 7,
    "input_tokens_details": {"cached_tokens": 2},
    "output_tokens": 6,
    "output_tokens_details": {"reasoning_tokens": 4},
    "total_tokens": 13,
}
COUNTS = {"input": 7, "output": 6, "reasoning": 4, "cached": 2}
FILTERED = verdict(
    "incomplete_details.reason", "output_guardrail", "content_filter", action="blocked", phase="output"
)

CASES = [
    (over("created", model="g", usage=None), METADATA | {"model": "g"}),
    (ev("output_item.added", item={"type": "message", "role": "assistant"}), {"is": "role"}),
    (ev("output_item.added", item={"type": "reasoning", "summary": []}), METADATA),
    (ev("output_item.added", item={"type": "function_call", "name": "f", "arguments": ""}), CALL),
    (ev("output_item.added", item={"type": "web_search_call"}), {"is": "tool_call"}),
    (ev("output_item.added"), METADATA | {"parsed": False}),
    (ev("output_text.delta", delta="Hi", logprobs=[], obfuscation="xx"), TEXT | {"text": "Hi"}),
    (
        ev("output_text.delta", delta="\n"),
        {"is": "content", "output": True, "blank": True, "text": "\n", "choices": (0,)},
    ),
    (ev("output_text.delta", delta=""), METADATA),
    (ev("content_part.delta", delta={"type": "output_text", "text": "Hi"}), TEXT | {"text": "Hi"}),
    (
        ev("output_text.delta", delta="Hi all", logprobs=[{"token": "Hi"}, {"token": " all"}]),
        TEXT | {"text": "Hi all", "tokens": 2, "token_source": TokenSource.LOGPROBS},
    ),
    (ev("reasoning_summary_text.delta", delta="hm"), THOUGHT),
    (ev("reasoning.delta", delta={"text": "hm"}), THOUGHT),
    (
        ev("refusal.delta", delta="No"),
        {
            "is": "refusal",
            "output": True,
            "refusal": True,
            "text": "No",
            "choices": (0,),
            "verdict": verdict("response.refusal.delta", "model_refusal", None),
        },
    ),
    (ev("function_call_arguments.delta", delta='{"'), CALL | {"text": '{"'}),
    (ev("function_call_arguments.delta", delta=""), {"is": "tool_call"}),
    (ev("some_new_call_arguments.delta", delta="x"), CALL | {"text": "x"}),
    (ev("audio.transcript.delta", delta="Hi"), TEXT | {"text": "Hi"}),
    (ev("audio.delta", delta="UklGRg=="), TEXT),
    *(
        (ev(kind, text="Hi", part={"type": "output_text", "text": "Hi"}, item={"type": "message"}), METADATA)
        for kind in (
            "output_text.done",
            "content_part.added",
            "content_part.done",
            "output_item.done",
            "refusal.done",
            "reasoning_summary_text.done",
            "function_call_arguments.done",
            "output_text.annotation.added",
            "web_search_call.searching",
            "some.news",
        )
    ),
    (
        over(
            "completed",
            usage=USAGE,
            output=[{"type": "message", "content": [{"type": "output_text", "text": "Hi"}]}],
        ),
        {
            "is": "done",
            "also": ["usage"],
            "done": True,
            "finish_reason": "completed",
            "usage": USAGE,
            "counts": COUNTS,
        },
    ),
    (
        over("incomplete", incomplete_details={"reason": "max_output_tokens"}, usage=None),
        {"is": "done", "done": True, "finish_reason": "incomplete:max_output_tokens"},
    ),
    (
        over("incomplete", incomplete_details={"reason": "content_filter"}, usage=USAGE),
        {
            "is": "guardrail",
            "also": ["done", "usage"],
            "done": True,
            "usage": USAGE,
            "counts": COUNTS,
            "finish_reason": "incomplete:content_filter",
            "verdict": FILTERED,
        },
    ),
    (
        over("failed", error={"code": "server_error", "message": "m"}),
        {
            "is": "error",
            "also": ["done"],
            "done": True,
            "finish_reason": "failed",
            "error_type": "server_error",
            "error_message": "m",
        },
    ),
    (
        over("failed", error={"code": "invalid_prompt", "message": "m"}),
        {
            "is": "guardrail",
            "also": ["error", "done"],
            "done": True,
            "finish_reason": "failed",
            "error_type": "invalid_prompt",
            "error_message": "m",
            "verdict": verdict(
                "response.error.code", "input_guardrail", "invalid_prompt", action="blocked", phase="input"
            ),
        },
    ),
    (
        over("failed", error={"code": "bio_policy", "message": "m"}),
        {
            "is": "guardrail",
            "also": ["error", "done"],
            "done": True,
            "finish_reason": "failed",
            "error_type": "bio_policy",
            "error_message": "m",
            "verdict": verdict("response.error.code", None, "bio_policy", action="blocked"),
        },
    ),
    (
        over("failed", error={"code": "misalignment_policy_violation", "message": "m"}),
        {
            "is": "guardrail",
            "also": ["error", "done"],
            "done": True,
            "finish_reason": "failed",
            "error_type": "misalignment_policy_violation",
            "error_message": "m",
            "verdict": verdict(
                "response.error.code", None, "misalignment_policy_violation", action="blocked"
            ),
        },
    ),
    (
        over("completed", moderation={"input": {"flagged": False}, "output": {"flagged": True}}),
        {
            "is": "done",
            "done": True,
            "finish_reason": "completed",
            "verdict": verdict("moderation.output.flagged", None, None, action="flagged", phase="output"),
        },
    ),
    (
        ev("failed"),
        {"is": "error", "also": ["done"], "done": True, "finish_reason": "failed", "error_type": "error"},
    ),
    (over("cancelled"), {"is": "done", "done": True, "finish_reason": "cancelled"}),
    (
        {"type": "error", "error": {"type": "too_many_requests", "code": None, "message": "m"}},
        {"is": "error", "error_type": "too_many_requests", "error_message": "m"},
    ),
    (
        {"type": "error", "code": "server_error", "message": "m", "param": None, "sequence_number": 3},
        {"is": "error", "error_type": "server_error", "error_message": "m"},
    ),
    ({"type": "keepalive", "sequence_number": 3}, {"is": "keepalive"}),
    ({"type": "vellichor"}, METADATA | {"parsed": False}),
    (b"[DONE]", {"is": "done", "done": True}),
    (b"{", METADATA | {"parsed": False}),
]


@pytest.mark.parametrize(("value", "said"), CASES)
def test_what_an_event_says(value: Any, said: dict[str, Any]) -> None:
    assert told(OpenAIResponses().read_event(event(value))) == said
    if isinstance(value, dict):
        assert told(OpenAIResponses().read_event(event(value, value["type"].encode()))) == said


def read(*values: Any) -> list[Delta]:
    dialect = OpenAIResponses()
    return [dialect.read_event(event(v)) for v in values]


def test_a_gateway_that_begins_again_is_told_by_its_id() -> None:
    hi = ev("output_text.delta", delta="Hi")
    assert [d.retry for d in read(over("created"), hi, over("created", id="r2"))] == [False, False, True]
    assert not any(d.retry for d in read(over("created"), hi, over("created")))
    assert not any(d.retry for d in read(over("created"), over("created", id="r2")))


def whole(**fields: Any) -> dict[str, Any]:
    body = {
        "object": "response",
        "model": "g",
        "status": "completed",
        "error": None,
        "usage": USAGE,
        **fields,
    }
    return told(OpenAIResponses().read_body(encode(body)))


def test_a_whole_response() -> None:
    output = [
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "hm"}]},
        {"type": "function_call", "name": "f", "arguments": "{}"},
        {"type": "message", "content": [{"type": "output_text", "text": "Hi"}, {"type": "news"}, 3]},
        None,
    ]
    assert whole(output=output) == {
        "is": "content",
        "also": ["tool_call", "reasoning", "usage"],
        "output": True,
        "content": True,
        "reasoning": True,
        "tool_call": True,
        "text": "Hi",
        "choices": (0,),
        "model": "g",
        "finish_reason": "completed",
        "usage": USAGE,
        "counts": COUNTS,
    }
    refused = whole(output=[{"type": "message", "content": [{"type": "refusal", "refusal": "No"}]}])
    assert (refused["is"], refused["verdict"]["kind"]) == ("refusal", "model_refusal")
    cut = whole(status="incomplete", incomplete_details={"reason": "content_filter"})
    assert (cut["is"], cut["finish_reason"]) == ("guardrail", "incomplete:content_filter")
    assert whole(status="failed", error={"code": "invalid_prompt"})["also"] == ["error", "usage"]
    assert "finish_reason" not in whole(status="queued", usage=None)


SPENT = {
    "total_tokens": 12,
    "input_tokens": 5,
    "output_tokens": 7,
    "input_token_details": {"cached_tokens": 1},
}
SPENT_COUNTS = {"input": 5, "output": 7, "reasoning": None, "cached": 1}


def done(status: str, **response: Any) -> dict[str, Any]:
    return {
        "type": "response.done",
        "response": {"object": "realtime.response", "status": status, **response},
    }


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (
            {"type": "session.created", "session": {"model": "gpt-realtime"}},
            {"is": "metadata", "model": "gpt-realtime"},
        ),
        ({"type": "conversation.item.input_audio_transcription.delta", "delta": "Hi"}, {"is": "metadata"}),
        ({"type": "input_audio_buffer.speech_started"}, {"is": "metadata"}),
        ({"type": "response.output_item.added", "item": {"type": "message"}}, {"is": "role"}),
        (
            {"type": "response.output_item.added", "item": {"type": "function_call", "name": "f"}},
            {"is": "tool_call", "output": True, "tool_call": True, "choices": (0,)},
        ),
        ({"type": "response.text.delta", "delta": "Hi"}, TEXT | {"text": "Hi"}),
        ({"type": "response.output_audio.delta", "delta": "AAAA"}, TEXT),
        ({"type": "response.output_audio_transcript.delta", "delta": " "}, TEXT | {"text": " "}),
        ({"type": "response.output_text.done", "text": "Hi"}, {"is": "metadata"}),
        (
            done("completed", usage=SPENT),
            {
                "is": "done",
                "also": ["usage"],
                "done": True,
                "finish_reason": "completed",
                "usage": SPENT,
                "counts": SPENT_COUNTS,
            },
        ),
        (
            done("cancelled", status_details={"type": "cancelled", "reason": "turn_detected"}),
            {"is": "done", "done": True, "finish_reason": "cancelled"},
        ),
        (
            done("incomplete", status_details={"reason": "max_output_tokens"}),
            {"is": "done", "done": True, "finish_reason": "incomplete:max_output_tokens"},
        ),
        (
            done("failed", status_details={"error": {"type": "server_error", "code": None}}),
            {
                "is": "error",
                "also": ["done"],
                "done": True,
                "finish_reason": "failed",
                "error_type": "server_error",
            },
        ),
        (
            {"type": "error", "error": {"type": "server_error", "message": "m"}},
            {"is": "error", "error_type": "server_error", "error_message": "m"},
        ),
        (
            {"type": "error", "error": {"type": "invalid_request_error", "message": "m"}},
            {"is": "error", "error_message": "m"},
        ),
        ({"type": "vellichor"}, {"is": "metadata", "parsed": False}),
        (b"{", {"is": "metadata", "parsed": False}),
    ],
)
def test_what_a_message_says(value: Any, said: dict[str, Any]) -> None:
    assert told(OpenAIRealtime().read_event(event(value))) == said

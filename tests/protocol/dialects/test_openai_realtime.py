"""Invariant: responses of a session add up, and what is not of a response is metadata."""

from typing import Any

import pytest

from llmtap.protocol.dialects.openai_responses import OpenAIRealtime
from tests.support.events import encode, event, told

TEXT = {"is": "content", "output": True, "content": True, "choices": (0,)}
USAGE = {
    "total_tokens": 12,
    "input_tokens": 5,
    "output_tokens": 7,
    "input_token_details": {"cached_tokens": 1},
}
COUNTS = {"input": 5, "output": 7, "reasoning": None, "cached": 1}


def done(status: str, **response: Any) -> dict[str, Any]:
    return {
        "type": "response.done",
        "response": {"object": "realtime.response", "status": status, **response},
    }


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ({"type": "session.created", "session": {"model": "gpt-realtime"}},
         {"is": "metadata", "model": "gpt-realtime"}),
        ({"type": "session.updated", "session": 3}, {"is": "metadata"}),
        ({"type": "conversation.item.created", "item": {}}, {"is": "metadata"}),
        ({"type": "conversation.item.input_audio_transcription.delta", "delta": "Hi"}, {"is": "metadata"}),
        ({"type": "input_audio_buffer.speech_started"}, {"is": "metadata"}),
        ({"type": "rate_limits.updated"}, {"is": "metadata"}),
        ({"type": "response.created"}, {"is": "metadata"}),
        ({"type": "response.output_item.added", "item": {"type": "message"}}, {"is": "role"}),
        ({"type": "response.output_item.added", "item": {"type": "function_call", "name": "f"}},
         {"is": "tool_call", "output": True, "tool_call": True, "choices": (0,)}),
        ({"type": "response.text.delta", "delta": "Hi"}, TEXT | {"text": "Hi"}),
        ({"type": "response.output_text.delta", "delta": "Hi"}, TEXT | {"text": "Hi"}),
        ({"type": "response.output_audio.delta", "delta": "AAAA"}, TEXT),
        ({"type": "response.audio.delta", "delta": "AAAA"}, TEXT),
        ({"type": "response.output_audio_transcript.delta", "delta": " "}, TEXT | {"text": " "}),
        ({"type": "response.audio_transcript.delta", "delta": "Hi"}, TEXT | {"text": "Hi"}),
        ({"type": "response.output_audio.done"}, {"is": "metadata"}),
        ({"type": "response.output_text.done", "text": "Hi"}, {"is": "metadata"}),
        (done("completed", usage=USAGE),
         {"is": "done", "also": ["usage"], "done": True, "finish_reason": "completed", "usage": USAGE,
          "counts": COUNTS}),
        (done("cancelled", status_details={"type": "cancelled", "reason": "turn_detected"}),
         {"is": "done", "done": True, "finish_reason": "cancelled"}),
        (done("incomplete", status_details={"reason": "max_output_tokens"}),
         {"is": "done", "done": True, "finish_reason": "incomplete:max_output_tokens"}),
        (done("failed", status_details={"error": {"type": "server_error", "code": None}}),
         {"is": "error", "also": ["done"], "done": True, "finish_reason": "failed",
          "error_type": "server_error"}),
        ({"type": "error", "error": {"type": "server_error", "message": "m"}},
         {"is": "error", "error_type": "server_error", "error_message": "m"}),
        ({"type": "error", "error": {"type": "invalid_request_error", "message": "m"}},
         {"is": "error", "error_message": "m"}),
        ({"type": "vellichor"}, {"is": "metadata", "parsed": False}),
        (b"{", {"is": "metadata", "parsed": False}),
        (b"pong", {"is": "metadata", "parsed": False}),
    ],
)  # fmt: skip
def test_what_a_message_says(value: Any, said: dict[str, Any]) -> None:
    assert told(OpenAIRealtime().read_event(event(value))) == said


def test_a_filtered_response_is_a_guardrails() -> None:
    said = told(
        OpenAIRealtime().read_event(event(done("incomplete", status_details={"reason": "content_filter"})))
    )
    assert (said["is"], said["also"], said["finish_reason"]) == (
        "guardrail", ["done"], "incomplete:content_filter",
    )  # fmt: skip


def test_the_tokens_of_a_session_are_those_of_its_responses() -> None:
    dialect = OpenAIRealtime()
    read = [dialect.read_event(event(done("completed", usage=USAGE))) for _ in range(3)]
    assert [(d.counts.input, d.counts.output, d.counts.cached) for d in read if d.counts] == [
        (5, 7, 1), (10, 14, 2), (15, 21, 3),
    ]  # fmt: skip


def test_a_failure_in_place_of_a_session() -> None:
    body = encode({"error": {"type": "invalid_request_error", "message": "m"}})
    assert told(OpenAIRealtime().read_body(body))["error_type"] == "invalid_request_error"

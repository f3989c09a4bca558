"""Invariant: only deltas of the message and of the reasoning are text."""

from typing import Any

import pytest

from llmtap.protocol.dialects.lmstudio import LmStudio
from tests.protocol.dialects.events import encode, event, told

STATS = {"input_tokens": 9, "total_output_tokens": 6, "reasoning_output_tokens": 2,
         "time_to_first_token_seconds": 0.195}  # fmt: skip
COUNTS = {"input": 9, "output": 6, "reasoning": 2, "cached": None}
TEXT = {"is": "content", "output": True, "content": True, "choices": (0,), "text": "Hi"}
CALL = {"is": "tool_call", "output": True, "tool_call": True, "choices": (0,)}


@pytest.mark.parametrize(
    ("kind", "fields", "said"),
    [
        ("chat.start", {"model_instance_id": "m"}, {"is": "metadata", "model": "m"}),
        ("model_load.progress", {"progress": 0.5}, {"is": "metadata"}),
        ("reasoning.delta", {"content": "hm"},
         {"is": "reasoning", "output": True, "reasoning": True, "choices": (0,), "text": "hm"}),
        ("message.start", {}, {"is": "role"}),
        ("message.delta", {"content": "Hi"}, TEXT),
        ("message.delta", {"content": ""}, {"is": "metadata"}),
        ("tool_call.start", {"tool": "tide"}, CALL),
        ("tool_call.start", {}, {"is": "tool_call"}),
        ("tool_call.arguments", {"tool": "tide", "arguments": {"a": 1}}, CALL),
        ("message.news", {"content": "Hi"}, {"is": "metadata"}),
        ("vellichor", {}, {"is": "metadata", "parsed": False}),
        ("error", {"error": {"type": "model_error", "message": "m"}},
         {"is": "error", "error_type": "model_error", "error_message": "m"}),
        ("chat.end", {}, {"is": "done", "done": True}),
    ],
)  # fmt: skip
def test_what_an_event_says(kind: str, fields: dict[str, Any], said: dict[str, Any]) -> None:
    assert told(LmStudio().read_event(event({"type": kind, **fields}))) == said
    assert told(LmStudio().read_event(event(fields, kind.encode()))) == said


def test_a_whole_answer() -> None:
    output = [
        {"type": "reasoning", "content": "hm"}, {"type": "tool_call", "tool": "tide", "output": "3 m"},
        {"type": "message", "content": "Hi"}, {"type": "invalid_tool_call"}, 3,
    ]  # fmt: skip
    said = told(LmStudio().read_body(encode({"model_instance_id": "m", "output": output, "stats": STATS})))
    assert (said["is"], said["also"]) == ("content", ["tool_call", "reasoning", "usage"])
    assert (said["text"], said["counts"], said["model"]) == ("Hi", COUNTS, "m")
    failed = {"error": {"type": "invalid_request", "message": "m"}}
    assert told(LmStudio().read_body(encode(failed)))["error_type"] == "invalid_request"
    assert [LmStudio().read_body(b).parsed for b in (b"[]", b"{}", b"3")] == [False] * 3

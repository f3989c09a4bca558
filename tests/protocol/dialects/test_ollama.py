"""Invariant: a line says the same whether it chats or completes."""

from typing import Any

import pytest

from llmtap.protocol.delta import TokenSource
from llmtap.protocol.dialects.ollama import Ollama
from tests.protocol.dialects.events import encode, event, told


def chat(content: Any = "", **message: Any) -> dict[str, Any]:
    return {"created_at": "d", "message": {"role": "assistant", "content": content, **message}, "done": False}


TEXT = {"is": "content", "output": True, "content": True, "choices": (0,), "text": "Hi"}
THOUGHT = {"is": "reasoning", "output": True, "reasoning": True, "choices": (0,), "text": "hm"}
CALL = {"is": "tool_call", "output": True, "tool_call": True, "choices": (0,)}
COUNTED = {"prompt_eval_count": 11, "eval_count": 7}
COUNTS = {"input": 11, "output": 7, "reasoning": None, "cached": None}


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (chat("Hi"), TEXT),
        (chat("Hi") | {"model": "m"}, TEXT | {"model": "m"}),
        (chat("", thinking="hm"), THOUGHT),
        (chat("Hi", thinking="hm"), TEXT | {"also": ["reasoning"], "reasoning": True}),
        (chat("", tool_calls=[{"function": {"name": "tide", "arguments": {"port": "Brest"}}}]), CALL),
        (chat(), {"is": "role"}),
        ({"response": "Hi", "done": False}, TEXT),
        ({"response": "", "done": False}, {"is": "metadata"}),
        (
            chat("Hi") | {"logprobs": [{"token": "H"}, {"token": "i"}]},
            TEXT | {"tokens": 2, "token_source": TokenSource.LOGPROBS},
        ),
        (
            chat() | {"done": True, "done_reason": "stop", **COUNTED},
            {"is": "done", "also": ["usage"], "done": True, "finish_reason": "stop", "usage": COUNTED,
             "counts": COUNTS},
        ),
        (
            {"response": "Hi", "done": True, "done_reason": "length", "context": [1, 2], "eval_count": 1},
            TEXT | {"also": ["done", "usage"], "done": True, "finish_reason": "length",
                    "usage": {"eval_count": 1}, "counts": COUNTS | {"input": None, "output": 1}},
        ),
        ({"model": "m", "done": True, "done_reason": "load"},
         {"is": "done", "done": True, "finish_reason": "load", "model": "m"}),
        ({"error": "it broke"}, {"is": "error", "error_type": "error", "error_message": "it broke"}),
        ({"status": "pulling"}, {"is": "metadata", "parsed": False}),
        (b"{", {"is": "metadata", "parsed": False}),
    ],
)  # fmt: skip
def test_what_a_line_says(value: Any, said: dict[str, Any]) -> None:
    assert told(Ollama().read_event(event(value))) == said
    assert told(Ollama().read_body(encode(value))) == said or not encode(value)

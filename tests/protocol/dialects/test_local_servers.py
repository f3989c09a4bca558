"""Invariant: tokens come from the best sign that an event has, and only what the model wrote is text."""

from typing import Any

import pytest

from llmtap.protocol.delta import TokenSource
from llmtap.protocol.dialects.llamacpp import LlamaCpp
from llmtap.protocol.dialects.registry import TABLES
from tests.protocol.dialects.events import encode, event, told

LmStudio, Ollama = TABLES["lmstudio.native"], TABLES["ollama.native"]


def part(text: str, **more: Any) -> dict[str, Any]:
    return {"index": 0, "content": text, "stop": False, **more}


TEXT = {"is": "content", "output": True, "content": True, "choices": (0,), "text": "Hi"}
IDS = {"token_source": TokenSource.TOKEN_IDS}
TIMINGS = {
    "cache_n": 4,
    "prompt_ms": 20.5,
    "predicted_n": 5,
    "predicted_ms": 60.25,
    "predicted_per_token_ms": 12,
}
LAST = {"stop": True, "tokens_predicted": 5, "tokens_evaluated": 7, "model": "m"}
ENDED = {
    "is": "metadata",
    "also": ["usage"],
    "model": "m",
    "counts": {"input": 7, "output": 5, "reasoning": None, "cached": None},
    "usage": {"tokens_predicted": 5, "tokens_evaluated": 7},
}


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (part("Hi"), TEXT),
        (part("Hi", tokens=[1, 2]), TEXT | IDS | {"tokens": 2}),
        (part("Hi", tokens=[1], completion_probabilities=[{}, {}]), TEXT | IDS | {"tokens": 1}),
        (
            part("Hi", tokens=[], completion_probabilities=[{}, {}]),
            TEXT | {"tokens": 2, "token_source": TokenSource.LOGPROBS},
        ),
        (part("Hi", tokens_predicted=3), TEXT | {"tokens": 3, "token_source": TokenSource.RUNNING_USAGE}),
        (part("", tokens=[7]), {"is": "metadata", "output": True, "choices": (0,), "tokens": 1} | IDS),
        (part(""), {"is": "metadata"}),
        ({"prompt_progress": {"total": 9}}, {"is": "metadata"}),
        (part("", **LAST, stop_type="limit"), ENDED | {"finish_reason": "limit"}),
        (part("", **LAST, stopped_word=True), ENDED | {"finish_reason": "word"}),
        (part("Hi", stop=True, stop_type="eos"), TEXT | {"finish_reason": "eos"}),
        (
            {"error": {"code": 503, "type": "unavailable_error", "message": "m"}},
            {"is": "error", "error_type": "unavailable_error", "error_message": "m"},
        ),
        ({"x": 1}, {"is": "metadata", "parsed": False}),
        (b"{", {"is": "metadata", "parsed": False}),
    ],
)
def test_what_an_event_of_llamacpp_says(value: Any, said: dict[str, Any]) -> None:
    assert told(LlamaCpp().read_event(event(value))) == said


def test_a_running_clock_and_count() -> None:
    dialect = LlamaCpp()
    deltas = [
        dialect.read_event(event(part("x", timings={"predicted_n": n, "predicted_ms": n * 1.5}, index=i)))
        for n, i in ((1, 0), (2, 0), (2, 1), (4, 0))
    ]
    assert [d.tokens for d in deltas] == [1, 1, 2, 2]
    assert [d.server_clock_ns for d in deltas] == [1_500_000, 3_000_000, 3_000_000, 6_000_000]


def test_whole_answers_of_llamacpp() -> None:
    one = {"content": "Hi", "tokens": [], **LAST, "stop_type": "eos", "timings": TIMINGS}
    said = told(LlamaCpp().read_body(encode(one)))
    assert (said["is"], said["also"], said["text"], said["finish_reason"]) == (
        "content",
        ["usage"],
        "Hi",
        "eos",
    )
    said = told(LlamaCpp().read_body(encode([one | {"index": 0}, one | {"index": 1, "content": "you"}, 3])))
    assert (said["text"], said["choices"], said["model"]) == ("Hiyou", (0, 1), "m")
    assert (said["counts"]["input"], said["counts"]["output"]) == (14, 10)
    failed = encode({"error": {"code": 400, "type": "invalid_request_error", "message": "m"}})
    assert told(LlamaCpp().read_body(failed))["error_type"] == "invalid_request_error"
    assert [LlamaCpp().read_body(b).parsed for b in (b"[]", b"{}", b"3", b'{"content":3}')] == [False] * 4


def chat(content: Any = "", **message: Any) -> dict[str, Any]:
    return {"created_at": "d", "message": {"role": "assistant", "content": content, **message}, "done": False}


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
            {
                "is": "done",
                "also": ["usage"],
                "done": True,
                "finish_reason": "stop",
                "usage": COUNTED,
                "counts": COUNTS,
            },
        ),
        (
            {"response": "Hi", "done": True, "done_reason": "length", "context": [1, 2], "eval_count": 1},
            TEXT
            | {
                "also": ["done", "usage"],
                "done": True,
                "finish_reason": "length",
                "usage": {"eval_count": 1},
                "counts": COUNTS | {"input": None, "output": 1},
            },
        ),
        (
            {"model": "m", "done": True, "done_reason": "load"},
            {"is": "done", "done": True, "finish_reason": "load", "model": "m"},
        ),
        ({"error": "it broke"}, {"is": "error", "error_type": "error", "error_message": "it broke"}),
        ({"status": "pulling"}, {"is": "metadata", "parsed": False}),
        (b"{", {"is": "metadata", "parsed": False}),
    ],
)
def test_what_a_line_of_ollama_says(value: Any, said: dict[str, Any]) -> None:
    assert told(Ollama().read_event(event(value))) == said
    assert told(Ollama().read_body(encode(value))) == said or not encode(value)


STATS = {
    "input_tokens": 9,
    "total_output_tokens": 6,
    "reasoning_output_tokens": 2,
    "time_to_first_token_seconds": 0.195,
}
LMSTUDIO_COUNTS = {"input": 9, "output": 6, "reasoning": 2, "cached": None}


@pytest.mark.parametrize(
    ("kind", "fields", "said"),
    [
        ("chat.start", {"model_instance_id": "m"}, {"is": "metadata", "model": "m"}),
        ("model_load.progress", {"progress": 0.5}, {"is": "metadata"}),
        (
            "reasoning.delta",
            {"content": "hm"},
            {"is": "reasoning", "output": True, "reasoning": True, "choices": (0,), "text": "hm"},
        ),
        ("message.start", {}, {"is": "role"}),
        ("message.delta", {"content": "Hi"}, TEXT),
        ("message.delta", {"content": ""}, {"is": "metadata"}),
        ("tool_call.start", {"tool": "tide"}, CALL),
        ("tool_call.start", {}, {"is": "tool_call"}),
        ("tool_call.arguments", {"tool": "tide", "arguments": {"a": 1}}, CALL),
        ("message.news", {"content": "Hi"}, {"is": "metadata", "parsed": False}),
        ("vellichor", {}, {"is": "metadata", "parsed": False}),
        (
            "error",
            {"error": {"type": "model_error", "message": "m"}},
            {"is": "error", "error_type": "model_error", "error_message": "m"},
        ),
        ("chat.end", {}, {"is": "done", "done": True}),
    ],
)
def test_what_an_event_of_lmstudio_says(kind: str, fields: dict[str, Any], said: dict[str, Any]) -> None:
    assert told(LmStudio().read_event(event({"type": kind, **fields}))) == said
    assert told(LmStudio().read_event(event(fields, kind.encode()))) == said


def test_a_whole_answer_of_lmstudio() -> None:
    output = [
        {"type": "reasoning", "content": "hm"},
        {"type": "tool_call", "tool": "tide", "output": "3 m"},
        {"type": "message", "content": "Hi"},
        {"type": "invalid_tool_call"},
        3,
    ]
    said = told(LmStudio().read_body(encode({"model_instance_id": "m", "output": output, "stats": STATS})))
    assert (said["is"], said["also"]) == ("content", ["tool_call", "reasoning", "usage"])
    assert (said["text"], said["counts"], said["model"]) == ("Hi", LMSTUDIO_COUNTS, "m")
    failed = {"error": {"type": "invalid_request", "message": "m"}}
    assert told(LmStudio().read_body(encode(failed)))["error_type"] == "invalid_request"
    assert [LmStudio().read_body(b).parsed for b in (b"[]", b"{}", b"3")] == [False] * 3

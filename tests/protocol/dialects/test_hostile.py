"""Invariant: nothing in place of any field, and no bytes, make a dialect raise, and its Delta stays sane."""

import copy
import math
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from llmtap.protocol.delta import Delta, TokenSource
from llmtap.protocol.dialects.registry import DIALECTS, Undecided, choose
from tests.protocol.dialects.events import encode, event

USAGE = {
    "input_tokens": 3, "output_tokens": 4, "cache_read_input_tokens": 1, "total_tokens": 7,
    "output_tokens_details": {"reasoning_tokens": 2}, "input_tokens_details": {"cached_tokens": 1},
}  # fmt: skip
ITEM = {
    "type": "message",
    "content": [{"type": "output_text", "text": "a"}, {"type": "refusal", "refusal": "n"}],
}
RESPONSE = {
    "id": "r", "object": "response", "model": "m", "status": "completed", "usage": USAGE,
    "error": {"code": "server_error", "message": "m"}, "incomplete_details": {"reason": "content_filter"},
    "output": [ITEM, {"type": "function_call", "name": "f", "arguments": "{}"}],
    "content_filters": [{"blocked": True, "source_type": "prompt", "content_filter_results": {"a": {}}}],
}  # fmt: skip
META = {"finish_reason": {"type": "abort", "message": "m", "err_type": "e"}, "prompt_tokens": 1,
        "completion_tokens": 2, "cached_tokens": 1, "e2e_latency": 0.5}  # fmt: skip
BLOCKS = [
    {"type": "text", "text": "a"},
    {"type": "tool_use", "name": "f"},
    {"type": "thinking", "thinking": "b"},
]
SAMPLES: dict[str, list[dict[str, Any]]] = {
    "openai.chat": [
        {"object": "chat.completion.chunk", "model": "m", "choices": [
            {"index": 1, "finish_reason": "stop", "token_ids": [1], "logprobs": {"content": [{"token": "a"}]},
             "content_filter_results": {"hate": {"filtered": True}},
             "delta": {"content": "a", "role": "assistant", "reasoning_details": [{"text": "b"}],
                       "refusal": "n", "audio": {"transcript": "t"}, "token_id": 1,
                       "extra_content": {"google": {"thought": True}},
                       "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]}}]},
        {"choices": [{"delta": {"content": [{"type": "thinking", "thinking": [{"text": "b"}]},
                                            {"type": "text", "text": "a"}]}}], "timings": {"predicted_n": 1}},
        {"choices": [{"message": {"content": "a"}, "usage": {"completion_tokens": 1}}],
         "x_groq": {"usage": {"queue_time": 1}}, "moderation": {"output": {"results": [{"flagged": True}]}}},
        {"choices": [], "usage": {"prompt_tokens": 1, "completion_tokens": 2, "prompt_tokens_details": {
            "cached_tokens": 1}}, "amazon-bedrock-invocationMetrics": {"inputTokenCount": 1}},
    ],
    "openai.completions": [
        {"object": "text_completion", "model": "m", "choices": [
            {"index": 1, "text": "a", "finish_reason": "stop", "logprobs": {"tokens": ["a"]},
             "token_ids": [1], "stop_reason": "s", "content_filter_results": {"hate": {"filtered": True}}}]},
    ],
    "anthropic": [
        {"type": "message_start", "message": {"id": "1", "model": "m", "usage": USAGE}},
        {"type": "content_block_start", "content_block": {"type": "tool_use", "name": "f"}},
        {"type": "content_block_delta", "delta": {"text": "a", "thinking": "b", "partial_json": "c"}},
        {"type": "message_delta", "delta": {"stop_reason": "refusal", "stop_details": {"category": "c"}},
         "usage": USAGE, "amazon-bedrock-guardrailAction": "INTERVENED"},
        {"type": "message_stop", "amazon-bedrock-invocationMetrics": {"inputTokenCount": 3}},
        {"type": "error", "error": {"type": "overloaded_error", "message": "m"}},
        {"type": "message", "content": BLOCKS, "model": "m", "usage": USAGE, "stop_reason": "end_turn"},
        {"type": "completion", "completion": "a", "stop_reason": "stop", "model": "m"},
    ],
    "openai.responses": [
        {"type": "response.created", "response": RESPONSE},
        {"type": "response.output_item.added", "item": {"type": "function_call", "name": "f"}},
        {"type": "response.output_text.delta", "delta": "a", "logprobs": [{"token": "a"}]},
        {"type": "response.audio.delta", "delta": "a"},
        {"type": "response.failed", "response": RESPONSE},
        {"type": "error", "code": "c", "message": "m"},
        RESPONSE,
    ],
    "openai.realtime": [
        {"type": "session.created", "session": {"model": "m"}},
        {"type": "response.text.delta", "delta": "a"},
        {"type": "response.done", "response": {"status": "incomplete", "usage": USAGE,
                                               "status_details": {"reason": "r", "error": {"type": "t"}}}},
        {"type": "error", "error": {"type": "invalid_request_error", "message": "m"}},
    ],
    "cohere.v2": [
        {"type": "content-delta", "delta": {"message": {"content": {"text": "a", "thinking": "b"}}},
         "logprobs": {"token_ids": [1]}},
        {"type": "tool-call-start", "delta": {"message": {"tool_calls": {"function": {"name": "f"}}}}},
        {"type": "message-end", "delta": {"finish_reason": "ERROR", "error": "m", "usage": {
            "tokens": {"input_tokens": 3, "output_tokens": 4}, "billed_units": {}, "cached_tokens": 1}}},
        {"finish_reason": "COMPLETE", "usage": {"billed_units": {"output_tokens": 1}}, "message": {
            "content": [{"type": "text", "text": "a"}], "tool_plan": "b",
            "tool_calls": [{"function": {"arguments": "{}"}}]}},
    ],
    "tgi.native": [
        {"index": 1, "token": {"id": 1, "text": "a", "special": False}, "generated_text": "a",
         "details": {"finish_reason": "length", "generated_tokens": 1, "input_length": 2, "prefill": [1]}},
        {"error": "m", "error_type": "generation"},
    ],
    "llamacpp.native": [
        {"content": "a", "stop": False, "tokens": [1], "index": 1, "completion_probabilities": [{}],
         "timings": {"predicted_n": 1, "predicted_ms": 2.5}, "tokens_predicted": 1, "prompt_progress": {}},
        {"content": "", "stop": True, "stop_type": "eos", "timings": {"prompt_ms": 1, "cache_n": 1},
         "tokens_predicted": 3, "tokens_evaluated": 4, "model": "m"},
    ],
    "ollama.native": [
        {"model": "m", "created_at": "d", "done": False, "logprobs": [{}], "message": {
            "role": "assistant", "content": "a", "thinking": "b",
            "tool_calls": [{"function": {"name": "f"}}]}},
        {"response": "a", "thinking": "b", "done": True, "done_reason": "stop", "eval_count": 3,
         "prompt_eval_count": 4, "total_duration": 5, "eval_duration": 6},
        {"error": "m", "done": False},
    ],
    "sglang.native": [
        {"text": "a", "output_ids": [1], "index": 1, "meta_info": META},
        {"text": "ab", "output_ids": [1, 2], "index": 1, "meta_info": META | {"finish_reason": None}},
    ],
    "gemini": [
        {"candidates": [{"index": 1, "content": {"role": "model", "parts": [
            {"text": "a", "thought": True}, {"functionCall": {"name": "f", "args": {}}},
            {"executableCode": {"code": "c"}}, {"inlineData": {"mimeType": "audio/wav", "data": "d"}}]},
            "finishReason": "SAFETY"}], "modelVersion": "m",
         "usageMetadata": {"promptTokenCount": 1, "candidatesTokenCount": 2, "thoughtsTokenCount": 3}},
        {"promptFeedback": {"blockReason": "OTHER"}, "usageMetadata": {"promptTokenCount": 1}},
    ],
    "bedrock.converse": [
        {"stopReason": "guardrail_intervened", "metrics": {"latencyMs": 1}, "output": {"message": {
            "content": [{"text": "a"}, {"toolUse": {"name": "f"}},
                        {"reasoningContent": {"reasoningText": {"text": "b"}}}]}},
         "usage": {"inputTokens": 1, "outputTokens": 2, "cacheReadInputTokens": 1},
         "trace": {"guardrail": {"outputAssessments": {"g": [{"topicPolicy": {"action": "BLOCKED"}}]}}}},
    ],
    "bedrock.invoke": [
        {"outputText": "a", "completionReason": "FINISH", "inputTextTokenCount": 1,
         "totalOutputTextTokenCount": 2, "amazon-bedrock-guardrailAction": "INTERVENED",
         "amazon-bedrock-invocationMetrics": {"inputTokenCount": 1, "outputTokenCount": 2}},
        {"generation": "a", "prompt_token_count": 1, "generation_token_count": 2, "stop_reason": "stop"},
        {"outputs": [{"text": "a", "stop_reason": "stop"}]},
        {"results": [{"outputText": "a", "completionReason": "FINISH"}]},
    ],
    "lmstudio.native": [
        {"type": "message.delta", "content": "a"},
        {"type": "tool_call.start", "tool": "t", "arguments": {"a": 1}},
        {"type": "chat.end", "result": {"model_instance_id": "m", "stats": {
            "input_tokens": 3, "total_output_tokens": 4, "time_to_first_token_seconds": 0.5}}},
        {"output": [{"type": "message", "content": "a"}, {"type": "tool_call", "tool": "t"}], "stats": {},
         "model_instance_id": "m"},
    ],
}  # fmt: skip
BY_NAME = {dialect.name: dialect for dialect in DIALECTS}
ODD = [None, True, False, 0, -1, 1 << 70, -(1 << 70), 0.5, math.nan, math.inf, 1e308, "", " ", "a", "x" * 300,
       "\ud800", "error", [], [None], [[]], {}, {"a": None}, [{"a": []}], {"type": {"type": []}}]  # fmt: skip


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield path
    if isinstance(value, dict | list):
        for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
            yield from places(inner, (*path, key))


def put(value: Any, path: tuple[Any, ...], odd: Any) -> Any:
    if not path:
        return odd
    out = copy.deepcopy(value)
    holder = out
    for key in path[:-1]:
        holder = holder[key]
    holder[path[-1]] = odd
    return out


def check(delta: Delta) -> None:
    assert delta.output == bool(delta.choices)
    assert delta.output or not delta.text
    assert not (delta.content and delta.blank)
    assert delta.tokens == -1 or (delta.tokens > 0) == (delta.token_source is not TokenSource.NONE)
    assert isinstance(delta.finish_reason, str | None) and isinstance(delta.model, str | None)
    assert isinstance(delta.error_type, str | None) and isinstance(delta.error_message, str | None)
    assert (delta.usage is None or isinstance(delta.usage, dict)) and list(delta.also) == sorted(delta.also)
    if delta.counts is not None:
        assert all(n is None or 0 <= n <= 1 << 50 for n in msgspec.structs.astuple(delta.counts))
    assert all(type(t.ms) is float or type(t.ms) is int for t in delta.server_times)


def test_there_is_a_sample_of_each_dialect() -> None:
    assert BY_NAME.keys() == SAMPLES.keys()
    for name, samples in SAMPLES.items():
        chosen = choose(samples[0], "/x")
        assert chosen is not None and chosen.name == name


@pytest.mark.parametrize("name", SAMPLES)
def test_an_odd_value_in_any_place_raises_nothing(name: str) -> None:
    dialect = BY_NAME[name]()
    for sample in SAMPLES[name]:
        for path in places(sample):
            for odd in ODD:
                data = encode(put(sample, path, odd))
                check(dialect.read_event(event(data)))
                check(dialect.read_event(event(data, b"error")))
                check(BY_NAME[name]().read_body(data))
                check(BY_NAME[name]().read_body(b"[" + data + b"," + data + b"]"))
                check(Undecided("/v1/messages").read_event(event(data)))


BOMBS = [
    b"[" * 200_000,
    b'{"type":' + b"[" * 200_000,
    b'{"delta":' + b'{"a":' * 100_000 + b"1" + b"}" * 100_001,
    b'{"unknown":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    b'{"type":"\xff\xfe"}',
    b'{"index":1' + b"0" * 5_000 + b"}",
    b'{"type":"x","type":"y"',
    b"{" + b'"a":1,' * 50_000 + b'"b":2}',
    b"\x00",
    b"{\x00}",
]


@pytest.mark.parametrize("name", sorted(BY_NAME))
def test_bombs_raise_nothing(name: str) -> None:
    dialect = BY_NAME[name]()
    for bomb in BOMBS:
        check(dialect.read_event(event(bomb)))
        check(dialect.read_body(bomb))
        for sample in SAMPLES.get(name, []):
            key, rest = next(iter(sample)), encode(sample)[1:]
            check(dialect.read_event(event(b'{"%b":%b,%b' % (key.encode(), b"[" * 50_000, rest))))

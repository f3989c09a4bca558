"""Every endpoint, streamed and whole: llmtap's own reader finds in it just what was sent."""

import json
from typing import Any

import pytest

from llmtap.exchange.outcome import Outcome
from llmtap.protocol.delta import EventClass
from llmtap.workload.prompts.text import count_tokens, token_ids
from tests.support.servers.sim_engine import engine, explained, json_events

TEXT = "Tell me of the sea."
MESSAGES = [{"role": "user", "content": TEXT}]
TOKENS = count_tokens(TEXT)

# path, body, dialect as our reader names it, where the whole answer has its text
ENDPOINTS = [
    ("/v1/chat/completions", {"messages": MESSAGES}, "openai.chat", ("choices", 0, "message", "content")),
    ("/v1/completions", {"prompt": TEXT}, "openai.completions", ("choices", 0, "text")),
    ("/v1/responses", {"input": TEXT}, "openai.responses", ("output", 0, "content", 0, "text")),
    ("/v1/messages", {"messages": MESSAGES}, "anthropic", ("content", 0, "text")),
    ("/api/chat", {"messages": MESSAGES}, "ollama.native", ("message", "content")),
    ("/api/generate", {"prompt": TEXT}, "ollama.native", ("response",)),
]
LIMITS = {"/v1/responses": "max_output_tokens", "/api/chat": "options", "/api/generate": "options"}
REASONS = {
    "/v1/responses": ("completed", "incomplete:max_output_tokens"),
    "/v1/messages": ("end_turn", "max_tokens"),
}


def at(value: Any, path: tuple[Any, ...]) -> Any:
    for step in path:
        value = value[step]
    return value


def limited(path: str, body: dict[str, Any], tokens: int) -> dict[str, Any]:
    name = LIMITS.get(path, "max_tokens")
    return {**body, name: {"num_predict": tokens} if name == "options" else tokens}


def counts_of(path: str, whole: dict[str, Any]) -> tuple[int, int]:
    if path.startswith("/api/"):
        return whole["prompt_eval_count"], whole["eval_count"]
    usage = whole["usage"]
    if "input_tokens" in usage:
        return usage["input_tokens"], usage["output_tokens"]
    return usage["prompt_tokens"], usage["completion_tokens"]


@pytest.mark.parametrize(("path", "body", "dialect", "text_at"), ENDPOINTS)
async def test_streamed_and_whole_say_and_count_the_same(
    path: str, body: dict[str, Any], dialect: str, text_at: tuple[Any, ...]
) -> None:
    async with engine() as e:
        request = {"model": "m", **body}
        _, answer = await e.answer(path, {**request, "stream": False})
        whole = json.loads(answer)
        text = at(whole, text_at)
        assert count_tokens(text) == 5
        assert counts_of(path, whole) == (TOKENS, 5)
        streamed = {**request, "stream": True, "stream_options": {"include_usage": True}}
        status, stream = await e.answer(path, streamed)
        assert status == 200
    found = explained(stream, path)
    x = found.exchange
    assert x.dialect == dialect
    assert x.outcome is Outcome.COMPLETE
    assert x.response_model == "m"
    assert (x.tokens.input, x.tokens.output) == (TOKENS, 5)
    content = [event.delta for event in found.events if event.delta.event_class is EventClass.CONTENT]
    assert len(content) == 5
    assert "".join(delta.text or "" for delta in content) == text
    assert x.refusal is None
    assert x.finish_reason == REASONS.get(path, ("stop",))[0]
    assert explained(answer, path).exchange.tokens.output == 5


@pytest.mark.parametrize(("path", "body", "dialect", "text_at"), ENDPOINTS)
async def test_a_limit_on_tokens_is_kept_and_told(
    path: str, body: dict[str, Any], dialect: str, text_at: tuple[Any, ...]
) -> None:
    async with engine() as e:
        request = {"model": "m", "stream": True, **limited(path, body, 2)}
        _, stream = await e.answer(path, {**request, "stream_options": {"include_usage": True}})
        _, answer = await e.answer(path, {**request, "stream": False})
    x = explained(stream, path).exchange
    assert x.tokens.output == 2
    assert x.finish_reason == REASONS.get(path, ("stop", "length"))[1]
    assert count_tokens(at(json.loads(answer), text_at)) == 2


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
async def test_vllms_dialect_counts_on_every_chunk(path: str) -> None:
    body = {
        "messages": MESSAGES,
        "prompt": TEXT,
        "stream": True,
        "return_token_ids": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
    }
    async with engine() as e:
        _, stream = await e.answer(path, body, x_sim_dialect="vllm", x_sim_tokens_per_chunk="2")
        _, plain = await e.answer(path, body)
    events = json_events(stream)
    counts = [event["usage"]["completion_tokens"] for event in events]
    assert counts == ([0] if "chat" in path else []) + [2, 4, 5, 5]
    assert all(event["usage"]["prompt_tokens"] == TOKENS for event in events)
    shown = [event["choices"][0] for event in events[-4:-1]]
    assert shown[-1]["finish_reason"] == "stop", "the last tokens say how it ended"
    assert [len(choice["token_ids"]) for choice in shown] == [2, 2, 1]
    texts = [choice["delta"]["content"] if "delta" in choice else choice["text"] for choice in shown]
    assert [choice["token_ids"] for choice in shown] == [token_ids(text) for text in texts]
    x = explained(stream, path).exchange
    assert x.tokens.output == 5
    assert all(event["usage"] is None for event in json_events(plain)[:-1]), "OpenAI's has no running count"


async def test_anthropic_and_responses_tell_every_step() -> None:
    async with engine() as e:
        _, stream = await e.answer("/v1/messages", {"messages": MESSAGES, "stream": True, "max_tokens": 9})
        assert [event["type"] for event in json_events(stream)] == [
            "message_start",
            "content_block_start",
            *["content_block_delta"] * 5,
            "content_block_stop",
            "message_delta",
            "message_stop",
        ]
        _, stream = await e.answer(
            "/v1/responses", {"input": [{"role": "user", "content": TEXT}], "stream": True}
        )
    events = json_events(stream)
    assert [event["type"].removeprefix("response.") for event in events] == [
        "created",
        "in_progress",
        "output_item.added",
        "content_part.added",
        *["output_text.delta"] * 5,
        "output_text.done",
        "content_part.done",
        "output_item.done",
        "completed",
    ]
    assert [event["sequence_number"] for event in events] == list(range(13))
    names = [line.removeprefix(b"event: ") for line in stream.split(b"\n") if line.startswith(b"event: ")]
    assert names == [event["type"].encode() for event in events]

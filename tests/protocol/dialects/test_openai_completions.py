"""Invariant: no bytes make it raise, and a choice's text is the only thing that counts as content."""

import json
from typing import Any

import pytest

from llmtap.protocol.delta import Delta, EventClass, ServerTime, TokenSource, UsageCounts, Verdict
from llmtap.protocol.dialects.openai_completions import OpenAICompletions
from llmtap.protocol.sse import SseEvent

C = EventClass


def event(value: Any, name: bytes | None = None) -> SseEvent:
    data = value if isinstance(value, bytes) else json.dumps(value).encode()
    return SseEvent(0, len(data) + 8, data, name)


def chunk(text: Any, **choice: Any) -> dict[str, Any]:
    return {"object": "text_completion", "choices": [{"index": 0, "text": text, **choice}]}


def content(text: str, **more: Any) -> Delta:
    blank = not text.strip()
    return Delta(C.CONTENT, output=True, content=not blank, blank=blank, text=text, choices=(0,), **more)


@pytest.mark.parametrize(
    ("value", "delta"),
    [
        (chunk("hi"), content("hi")),
        (chunk(" \n"), content(" \n")),
        (chunk("hi", finish_reason="length"), content("hi", finish_reason="length")),
        (chunk(""), Delta(C.METADATA)),
        (chunk(None), Delta(C.METADATA)),
        (chunk("", finish_reason="stop"), Delta(C.METADATA, finish_reason="stop")),
        (
            chunk("", finish_reason="content_filter"),
            Delta(
                C.GUARDRAIL, finish_reason="content_filter",
                verdict=Verdict(
                    "finish_reason", "output_guardrail", "blocked", "output", value="content_filter"
                ),
            ),
        ),
        (
            chunk("canned", finish_reason="content_filter"),
            Delta(
                C.GUARDRAIL, finish_reason="content_filter",
                verdict=Verdict(
                    "finish_reason", "output_guardrail", "replaced", "output", value="content_filter",
                    substituted=True,
                ),
            ),
        ),
        (
            chunk(" a b", logprobs={"tokens": [" a", " b"]}),
            content(" a b", tokens=2, token_source=TokenSource.LOGPROBS),
        ),
        (chunk("a", token_ids=[4, 5]), content("a", tokens=2, token_source=TokenSource.TOKEN_IDS)),
        (
            {"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 2}},
            Delta(C.USAGE, usage={"prompt_tokens": 3, "completion_tokens": 2}, counts=UsageCounts(3, 2)),
        ),
        (chunk("a") | {"usage": {"completion_tokens": 0, "prompt_tokens": 0}}, content("a")),
        ({"error": {"message": "m", "type": "t"}}, Delta(C.ERROR, error_type="t", error_message="m")),
        (
            chunk("", finish_reason="length") | {"nvext": {"timing": {"total_time_ms": 54.61}}},
            Delta(
                C.METADATA, finish_reason="length",
                server_times=(
                    ServerTime("total", 54.61, "nvext.timing", "nvext.timing.total_time_ms"),
                ),
            ),
        ),
        (
            chunk("a", content_filter_results={"hate": {"filtered": True}}),
            content(
                "a",
                verdict=Verdict(
                    "content_filter_results.filtered", "output_guardrail", "blocked", "output",
                    category="hate",
                ),
            ),
        ),
        ({}, Delta(C.METADATA, parsed=False)),
        (b"[DONE]", Delta(C.DONE, done=True)),
        (b"{", Delta(C.METADATA, parsed=False)),
    ],
)  # fmt: skip
def test_what_a_chunk_says(value: Any, delta: Delta) -> None:
    told = OpenAICompletions().read_event(event(value))
    told.repeatable = False  # a promise about events to come, which is for test_repetition.py
    assert told == delta


def test_a_whole_answer() -> None:
    body = chunk("hi there", finish_reason="stop") | {"usage": {"completion_tokens": 2}, "model": "m"}
    delta = OpenAICompletions().read_body(json.dumps(body).encode())
    assert (delta.event_class, delta.also, delta.text) == (C.CONTENT, (C.USAGE,), "hi there")
    assert (delta.model, delta.finish_reason, delta.tokens) == ("m", "stop", -1)


@pytest.mark.parametrize(
    "data",
    [
        b'{"choices":[{"index":"0","text":"a"}]}',
        b'{"choices":[{"text":"a","logprobs":[],"finish_reason":1}],"model":3,"usage":[]}',
        b'{"choices":[{"text":"a","token_ids":"x"},3],"object":{}}',
    ],
)
def test_a_chunk_that_does_not_quite_fit_is_read_as_far_as_it_does(data: bytes) -> None:
    assert OpenAICompletions().read_event(event(data)).text == "a"

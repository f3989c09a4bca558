"""The service tier of a request and of its answer is a word of a closed set."""

import json
from typing import Any

import pytest

from llmtap.exchange.exchange import Exchange
from llmtap.exchange.observer import Observer
from llmtap.protocol.tiers import granted_tier, tier_of

CHAT = {"object": "chat.completion.chunk", "choices": []}
ECHO = {"tools": [{"parameters": {"properties": {"service_tier": {"type": "string"}}}}], "speed": "fast"}


@pytest.mark.parametrize(
    ("event", "tier"),
    [
        ({**CHAT, "service_tier": "default"}, "default"),
        ({**CHAT, "service_tier": None}, None),
        (CHAT, None),
        ({"type": "response.created", "response": {"service_tier": "auto", **ECHO}}, "auto"),
        ({"type": "message_start", "message": {"usage": {"service_tier": "priority"}}}, "priority"),
        (
            {"type": "message_start", "message": {"usage": {"service_tier": "standard", "speed": "fast"}}},
            "fast",
        ),
        ({"usage": {"service_tier": "standard", "speed": "standard"}}, "standard"),
        ({"choices": [{"delta": {"content": '"service_tier": "flex"'}}]}, None),
        ({"input": {"service_tier": "flex", "speed": "fast"}}, None),
        ({"service_tier": "x" * 999}, "other"),
        ({"service_tier": 7}, None),
        (["service_tier"], None),
    ],
)
def test_the_tier_of_an_answer(event: Any, tier: str | None) -> None:
    assert granted_tier(json.dumps(event).encode()) == tier


def test_the_tier_of_a_request() -> None:
    told = [
        tier_of("flex"),
        tier_of(None, "fast"),
        tier_of("auto", "standard"),
        tier_of(None, 1.5),
        tier_of(""),
    ]
    assert told == ["flex", "fast", "auto", None, None]


def observed(request: Any, *events: Any) -> Exchange:
    body = json.dumps(request).encode()
    head = b"POST /v1/responses HTTP/1.1\r\nHost: g\r\nContent-Length: %d\r\n\r\n" % len(body)
    observer = Observer("r", 1, 0, 0, head)
    observer.request_data(body, 0)
    observer.request_end(0)
    observer.response_head(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n", 1, 0)
    for t_ns, event in enumerate(events, 2):
        observer.response_data(b"data: %b\n\n" % json.dumps(event).encode(), t_ns, 0)
    return observer.finish(9, "complete", None, None, 0, 0, 0, 0)


def test_the_granted_tier_replaces_the_requested_one() -> None:
    created, completed = (
        {"type": f"response.{name}", "response": {"id": "r", "status": name, "service_tier": tier}}
        for name, tier in (("created", "auto"), ("completed", "priority"))
    )
    delta = {"type": "response.output_text.delta", "delta": "Hi"}
    x = observed({"model": "m", "service_tier": "auto"}, created, delta, delta, completed)
    assert (x.service_tier, x.service_tier_requested) == ("priority", "auto")
    x = observed({"model": "m", "service_tier": "flex"}, delta)
    assert (x.service_tier, x.service_tier_requested) == ("flex", "flex")
    x = observed({"model": "m"}, delta)
    assert (x.service_tier, x.service_tier_requested) == (None, None)

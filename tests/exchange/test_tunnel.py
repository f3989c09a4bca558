"""Invariant: the events of a tunnel are the messages that came down."""

import json
from typing import Any

import pytest

from llmtap.exchange.exchange import Exchange
from llmtap.exchange.observer import Observer
from llmtap.exchange.outcome import EventClass, Outcome, TokenSource

HEAD = b"GET /v1/realtime?model=m HTTP/1.1\r\nHost: g\r\nConnection: upgrade\r\nUpgrade: websocket\r\n\r\n"
SWITCHED = b"HTTP/1.1 101 Switching\r\nConnection: upgrade\r\nUpgrade: websocket\r\n\r\n"
USAGE = {"input_tokens": 4, "output_tokens": 6}


def message(kind: str, **fields: Any) -> bytes:
    payload = json.dumps({"type": kind, **fields}).encode()
    return b"\x81\x7e" + len(payload).to_bytes(2, "big") + payload


ASKED = b"\x81\x8a\x00\x00\x00\x00" + b'{"type":1}'
RESPONSE = [
    message("response.created"),
    message("response.output_item.added", item={"type": "message"}),
    message("response.output_text.delta", delta=" "),
    message("response.output_text.delta", delta="Hi"),
    message("response.output_audio.delta", delta="AAAA"),
    message("response.done", response={"status": "completed", "usage": USAGE}),
]
SESSION = [message("session.created", session={"model": "gpt-realtime"}), *RESPONSE, b"\x89\x00"]


def play(messages: list[bytes], *, size: int = 1 << 20, outcome: str = "complete") -> Exchange:
    observer = Observer("r", 1, 0, 0, HEAD)
    observer.submitted(5, 0)
    observer.response_head(SWITCHED, 40, 0)
    observer.upgraded(40)
    t_ns = 100
    for data in messages:
        observer.tunnel(ASKED, None, t_ns, 1)
        for at in range(0, len(data), size):
            observer.tunnel(None, data[at : at + size], t_ns, 1)
        t_ns += 10
    return observer.finish(t_ns, outcome, None, None, 0, 0, 9, 9)


@pytest.mark.parametrize("size", [1, 7, 1 << 20])
def test_the_events_of_a_response_are_timed(size: int) -> None:
    x = play(SESSION, size=size)
    t = x.timeline
    assert [EventClass(c).name.lower() for c in t.events.classes] == [
        "metadata", "metadata", "role", "content", "content", "content", "done", "keepalive",
    ]  # fmt: skip
    assert list(t.events.t_ns) == [100 + 10 * i for i in range(len(SESSION))]
    assert list(t.events.sizes) == [len(m) for m in SESSION]
    assert (t.first_byte_ns, t.first_any_ns, t.first_token_ns, t.first_content_ns) == (100, 100, 130, 140)
    assert (x.dialect, x.model, x.endpoint) == ("openai.realtime", "gpt-realtime", "realtime")
    assert (x.tokens.input, x.tokens.output, x.tokens.source) == (4, 6, TokenSource.USAGE)
    assert (x.usage, x.finish_reason, x.unparsed_events) == (USAGE, "completed", 0)
    assert (x.outcome, x.stream, x.status) == (Outcome.COMPLETE, False, 101)


def test_who_leaves_a_session_behind_an_answer_has_it_all() -> None:
    assert play(SESSION, outcome="client_cancelled").outcome is Outcome.COMPLETE
    assert play(SESSION[:3], outcome="client_cancelled").outcome is Outcome.CLIENT_CANCELLED


def test_only_what_the_session_cannot_survive_is_its_failure() -> None:
    asked = message("error", error={"type": "invalid_request_error", "message": "no such item"})
    broke = message("error", error={"type": "server_error", "message": "sorry"})
    assert play([*SESSION, asked]).outcome is Outcome.COMPLETE
    assert play([*SESSION, broke]).outcome is Outcome.UPSTREAM_ERROR


def test_messages_of_no_known_dialect_are_timed_and_counted() -> None:
    x = play([b"\x81\x02hi", b"\x82\x02\x00\x01"])
    assert ([EventClass(c) for c in x.timeline.events.classes], x.unparsed_events, x.dialect) == (
        [EventClass.METADATA] * 2, 2, None,
    )  # fmt: skip

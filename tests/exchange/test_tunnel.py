"""Invariant: a session is one exchange, and its events are the messages that came down."""

import gzip
import json
from typing import Any

import pytest

from llmtap.exchange.exchange import Exchange
from llmtap.exchange.observer import Observer
from llmtap.exchange.outcome import EventClass, Outcome, TokenSource
from llmtap.protocol.http1 import RequestHead

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
SESSION = [message("session.created", session={"model": "gpt-realtime"}), *RESPONSE, b"\x89\x00", *RESPONSE]


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
def test_a_session_of_two_responses(size: int) -> None:
    x = play(SESSION, size=size)
    t = x.timeline
    one = ["metadata", "role", "content", "content", "content", "done"]
    assert [EventClass(c).name.lower() for c in t.events.classes] == ["metadata", *one, "keepalive", *one]
    assert list(t.events.t_ns) == [100 + 10 * i for i in range(len(SESSION))]
    assert list(t.events.sizes) == [len(m) for m in SESSION]
    assert (t.first_byte_ns, t.first_any_ns, t.first_token_ns, t.first_content_ns) == (100, 100, 130, 140)
    assert t.last_token_ns == 220
    assert (x.dialect, x.model, x.endpoint) == ("openai.realtime", "gpt-realtime", "realtime")
    assert (x.tokens.input, x.tokens.output, x.tokens.source) == (8, 12, TokenSource.USAGE)
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


BODY = b'{"model":"m","messages":[{"role":"user","content":"hello"}]}'
ANSWER = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\n"


def head(*fields: str, length: int = len(BODY)) -> bytes:
    lines = ["POST /v1/chat/completions HTTP/1.1", "host: x", f"content-length: {length}", *fields, "", ""]
    return "\r\n".join(lines).encode()


class Ear:
    """Notes what it hears."""

    def __init__(self, *, wants: bool) -> None:
        self.wants = wants
        self.heard: list[tuple[Exchange, RequestHead, bytes]] = []

    def __call__(self, x: Exchange, head: RequestHead, body: bytes) -> bool:
        self.heard.append((x, head, body))
        return self.wants


def events(*choices: dict[str, Any]) -> bytes:
    return b"".join(
        b"data: " + json.dumps({"model": "m", "choices": [c]}).encode() + b"\n\n" for c in choices
    )


def said_play(ear: Ear, raw: bytes, body: bytes, answer: bytes) -> Exchange:
    observer = Observer("r", 1, 0, 0, raw, hear=ear)
    for at in range(0, len(body), 7):
        observer.request_data(body[at : at + 7], at)
    observer.request_end(50)
    observer.submitted(60, 1)
    observer.response_head(ANSWER, 70, 1)
    observer.response_data(answer, 80, 1)
    observer.response_end(90)
    return observer.finish(100, "complete", None, None, 0, 0, 0, 0)


def content(text: str, index: int = 0, **more: Any) -> dict[str, Any]:
    return {"index": index, "delta": {"content": text, **more}, "finish_reason": None}


def test_the_request_is_shown_once_and_whole() -> None:
    ear = Ear(wants=False)
    x = said_play(ear, head("x-session-id: s"), BODY, events(content("hi")))
    ((heard, seen, body),) = ear.heard
    assert heard is x and body == BODY and (b"x-session-id", b"s") in seen.headers
    assert x.said is None, "nobody asked for the text"


@pytest.mark.parametrize("whole", [True, False])
def test_the_text_of_the_first_choice_is_kept(whole: bool) -> None:
    ear = Ear(wants=True)
    answer = events(
        content("one "), content("two ", 1), content("three"), content("", reasoning_content="hm")
    )
    if whole:
        answer = b'{"model":"m","choices":[{"index":0,"message":{"role":"assistant","content":"one three"}}]}'
    x = said_play(ear, head(), BODY, answer)
    assert x.said is not None and x.said.response_text == "one three"
    assert x.said.request_body is None, "whoever keeps bodies redacts them first"


def test_a_compressed_request_is_shown_as_it_was_before() -> None:
    packed = gzip.compress(BODY)
    ear = Ear(wants=False)
    said_play(ear, head("content-encoding: gzip", length=len(packed)), packed, b"")
    assert [body for _, _, body in ear.heard] == [BODY]


def test_a_request_without_a_body_is_shown_and_a_broken_one_is_not() -> None:
    ear = Ear(wants=True)
    said_play(ear, b"GET /v1/models HTTP/1.1\r\nhost: x\r\n\r\n", b"", b"")
    assert [body for _, _, body in ear.heard] == [b""]
    said_play(ear, b"nonsense\r\n\r\n", b"", b"")
    assert len(ear.heard) == 1


def test_events_that_are_known_by_their_bytes_are_kept_as_well() -> None:
    ear = Ear(wants=True)
    words = [f"word{i} " for i in range(200)]
    observer = Observer("r", 1, 0, 0, head(), hear=ear)
    observer.request_data(BODY, 1)
    observer.request_end(1)
    observer.submitted(2, 1)
    observer.response_head(ANSWER, 3, 1)
    for i, word in enumerate(words):  # each in a read of its own, alike but for the word
        observer.response_data(events(content(word)), 10 + i, 1)
    observer.response_end(500)
    x = observer.finish(501, "complete", None, None, 0, 0, 0, 0)
    assert x.said is not None and x.said.response_text == "".join(words)

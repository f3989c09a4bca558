"""Who captures is shown each request once, whole, and gets the answer's text only where it was asked for."""

import gzip
import json
from typing import Any

import pytest

from llmtap.exchange.exchange import Exchange
from llmtap.exchange.observer import Observer
from llmtap.protocol.http1 import RequestHead

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


def play(ear: Ear, raw: bytes, body: bytes, answer: bytes) -> Exchange:
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
    x = play(ear, head("x-session-id: s"), BODY, events(content("hi")))
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
    x = play(ear, head(), BODY, answer)
    assert x.said is not None and x.said.response_text == "one three"
    assert x.said.request_body is None, "whoever keeps bodies redacts them first"


def test_a_compressed_request_is_shown_as_it_was_before() -> None:
    packed = gzip.compress(BODY)
    ear = Ear(wants=False)
    play(ear, head("content-encoding: gzip", length=len(packed)), packed, b"")
    assert [body for _, _, body in ear.heard] == [BODY]


def test_a_request_without_a_body_is_shown_and_a_broken_one_is_not() -> None:
    ear = Ear(wants=True)
    play(ear, b"GET /v1/models HTTP/1.1\r\nhost: x\r\n\r\n", b"", b"")
    assert [body for _, _, body in ear.heard] == [b""]
    play(ear, b"nonsense\r\n\r\n", b"", b"")
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

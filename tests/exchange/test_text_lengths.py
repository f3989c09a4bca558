"""Invariant: where a capture wants the text, each logged event has the length of the text that it adds."""

from typing import Any

import pytest

from llmtap.exchange.exchange import Exchange
from tests.exchange.streams import DONE, OK, ROLE, STOP, chunk, observe, sse

TEXTS = ["w", "or", "d\n", '"q"', "\u4f60\u597d", "\U0001f600", " "] * 12


def word(text: str) -> bytes:
    return chunk({"content": text}, model="m")


def wanted(*reads: tuple[int, bytes], **more: Any) -> Exchange:
    return observe(*reads, on_request=lambda x, head, body: True, **more)


def read_each(*blocks: bytes, **more: Any) -> Exchange:
    return wanted(*((50 + i, block) for i, block in enumerate(blocks)), **more)


def test_each_event_has_the_length_of_its_text() -> None:
    x = read_each(ROLE, *map(word, TEXTS), STOP, DONE)
    assert x.timeline.events.chars.tolist() == [0, *map(len, TEXTS), 0, 0]
    assert x.text is not None and x.text.response_text == "".join(TEXTS)


@pytest.mark.parametrize("size", [1, 7, 1_000])
def test_every_slicing_gives_the_same_lengths(size: int) -> None:
    body = b"".join([ROLE, *map(word, TEXTS), STOP, DONE])
    pieces = [body[i : i + size] for i in range(0, len(body), size)]
    assert read_each(*pieces).timeline.events.chars.tolist() == [0, *map(len, TEXTS), 0, 0]


def test_events_in_chunks_of_their_own_have_lengths() -> None:
    chunks = [b"%x\r\n%b\r\n" % (len(data), data) for data in [ROLE, *map(word, TEXTS), STOP, DONE]]
    x = read_each(*chunks, b"0\r\n\r\n", head=OK % b"Transfer-Encoding: chunked\r\n")
    assert x.timeline.events.chars.tolist() == [0, *map(len, TEXTS), 0, 0]


def test_only_content_of_the_first_choice_counts() -> None:
    reasoning = [chunk({"reasoning_content": "thought"}, model="m")] * 40
    second = word("other").replace(b'"index": 0', b'"index": 1')
    error = sse({"error": {"message": "m", "type": "t"}})
    x = read_each(*reasoning, word("one"), second, word("three"), error)
    assert x.timeline.events.chars.tolist() == [*[0] * 40, 3, 0, 5, 0]


def test_without_a_capture_of_the_text_there_are_no_lengths() -> None:
    x = observe(*((50 + i, word("a")) for i in range(40)))
    assert len(x.timeline.events) == 40 and not x.timeline.events.chars


def test_events_before_the_end_of_the_request_have_no_length() -> None:
    x = observe((50, word("early")))
    assert not x.timeline.events.chars

"""Invariant: what a block is known to say again is what its reader would have said."""

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmtap.wire.delta import Delta, EventClass
from llmtap.wire.dialects.anthropic import Anthropic
from llmtap.wire.dialects.openai_chat import OpenAIChat
from llmtap.wire.repetition import BLOCK_BYTES_MAX, Repetition, find_repetition
from llmtap.wire.sse import SseParser

UNTIMED = settings(deadline=None)  # a busy machine is no failure


def sse(value: Any, **how: Any) -> bytes:
    return b"data: %b\n\n" % json.dumps(value, **how).encode()


def chat(**delta: Any) -> dict[str, Any]:
    choice = {"index": 0, "delta": delta, "finish_reason": None}
    return {"object": "chat.completion.chunk", "model": "m", "choices": [choice]}


def call(arguments: str) -> dict[str, Any]:
    return chat(tool_calls=[{"index": 0, "function": {"arguments": arguments}}])


def piece(**delta: str) -> bytes:
    value = {"type": "content_block_delta", "index": 0, "delta": delta}
    return b"event: content_block_delta\n" + sse(value)


def reader(first: bytes) -> OpenAIChat | Anthropic:
    """One in the middle of an answer."""
    if b"content_block" in first:
        return Anthropic()
    dialect = OpenAIChat()
    tell(dialect, sse(chat(role="assistant", content="")))
    tell(dialect, sse(chat(content="so")))
    return dialect


def tell(dialect: OpenAIChat | Anthropic, block: bytes) -> Delta | None:
    """What a reader of the block says; None if it is more than one event, or less."""
    events = SseParser().feed(block)
    if len(events) != 1 or events[0].end != len(block):
        return None
    delta = dialect.read_event(events[0])
    delta.size = len(block)
    return delta


def framed(block: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(block), block)


def known(first: bytes) -> tuple[Repetition | None, OpenAIChat | Anthropic]:
    dialect = reader(first)
    delta = tell(dialect, first)
    assert delta is not None
    return find_repetition(first, delta, dialect.read_event) if delta.repeatable else None, dialect


REPEATED = {
    "content": sse(chat(content="hi")),
    "content, packed": sse(chat(content="hi"), separators=(",", ":")),
    "content, escaped": sse(chat(content="\u4f60\n")),
    "content, not escaped": sse(chat(content="\u4f60\n"), ensure_ascii=False),
    "content beside what never changes": sse({**chat(content="hi"), "usage": None, "logprobs": None}),
    "content with CR LF": sse(chat(content="hi")).replace(b"\n", b"\r\n"),
    "reasoning": sse(chat(reasoning_content="hm", content=None)),
    "reasoning by its other name": sse(chat(reasoning="hm")),
    "arguments": sse(call('{"a')),
    "text": piece(type="text_delta", text="hi"),
    "thinking": piece(type="thinking_delta", thinking="hm"),
    "partial JSON": piece(type="input_json_delta", partial_json='{"a'),
}

UNREPEATED = {
    "a role": sse(chat(role="assistant", content="")),
    "a running usage": sse({**chat(content="hi"), "usage": {"prompt_tokens": 1, "completion_tokens": 2}}),
    "its tokens": sse({**chat(), "choices": [{"index": 0, "delta": {"content": "hi"}, "token_ids": [5]}]}),
    "timings": sse({**chat(content="hi"), "timings": {"predicted_n": 2, "predicted_ms": 3.0}}),
    "an end": sse({"choices": [{"index": 0, "delta": {"content": "hi"}, "finish_reason": "stop"}]}),
    "a refusal": sse(chat(refusal="no")),
    "two texts": sse(chat(content="so", reasoning="hm")),
    "another choice, which may begin to think": sse(
        {**chat(), "choices": [{"index": 1, "delta": {"content": "hi"}, "finish_reason": None}]}
    ),
    "a text that stands there twice": sse({**chat(content="hi"), "obfuscation": "hi"}),
    "a text spelt in no way that we know": (
        b'data: {"model":"m","choices":[{"delta":{"content":"\\u0068i"}}]}\n\n'
    ),
    "a text that is read elsewhere": (
        b'data: {"x":{"content":"hi"},"model":"m","choices":[{"delta":{"content":"\\u0068i"}}]}\n\n'
    ),
    "a text that is overruled": (
        b'data: {"model":"m","choices":[{"delta":{"content":"hi","content":"\\u0068i"}}]}\n\n'
    ),
    "a text that is a name elsewhere": (
        b'data: {"model":"m","hi":1,"choices":[{"delta":{"content":"\\u0068i"}}]}\n\n'
    ),
    "a block": b"event: content_block_start\n"
    + sse({"type": "content_block_start", "content_block": {"type": "text", "text": "hi"}}),
}


@pytest.mark.parametrize("name", REPEATED)
def test_a_piece_of_text_comes_again_with_another_text(name: str) -> None:
    found, dialect = known(REPEATED[name])
    assert found is not None
    for text in ("x", "\n", '"}', "\\", "\u4f60", "\U0001f642", "\x7f\u2028"):
        for quoted in (json.dumps(text).encode(), msgspec.json.encode(text)):
            block = found.before[:-1] + quoted + found.behind[1:]
            assert found.text_in(block) == text
            said = tell(dialect, block)
            assert said is not None
            assert (said.text, said.event_class, said.repeatable) == (text, found.delta.event_class, True)


@pytest.mark.parametrize("name", UNREPEATED)
def test_what_may_be_read_otherwise_the_next_time_does_not(name: str) -> None:
    assert known(UNREPEATED[name])[0] is None
    delta = tell(reader(UNREPEATED[name]), UNREPEATED[name])
    assert delta is not None
    assert delta.repeatable == name.startswith("a text"), "the event itself, or where its text stands"


def test_no_text_is_kept() -> None:
    found, _ = known(sse(chat(content="secret")))
    assert found is not None
    assert "secret" not in repr(found)


@pytest.mark.parametrize(
    "text",
    [
        b"", b'"', b'\\\\"', b'a"', b'a","x":"b', b'"},"finish_reason":"stop","y":{"z":"', b"\\", b"\\x",
        b"a\nb", b"a\n\ndata: b", b"\r", b"\0", b"\xff", b"\xed\xa0\x80", b"\\ud800", b"x" * BLOCK_BYTES_MAX,
    ],
)  # fmt: skip
def test_what_is_no_single_text_is_left_to_the_reader(text: bytes) -> None:
    for first in REPEATED.values():
        found, _ = known(first)
        assert found is not None
        block = found.before + text + found.behind
        assert found.text_in(block) == found.text_in_chunk(framed(block)) == ""


def test_a_block_in_which_both_ends_overlap_is_left_to_the_reader() -> None:
    found = Repetition(b'data: {"text":"', b'"}\n\n', Delta(EventClass.CONTENT), b'"}\n\n\r\n')
    for block in (b'data: {"text":"}\n\n', b'data: {"text":"', b'"}\n\n', b"", b"\n"):
        assert found.text_in(block) == found.text_in_chunk(framed(block)) == ""


def test_the_framing_of_a_chunk_must_be_the_usual_one() -> None:
    found, _ = known(sse(chat(content="hi")))
    assert found is not None
    for text in ("x", "x" * 300, "\u4f60"):
        block = found.before + text.encode() + found.behind
        chunk = framed(block)
        assert found.text_in_chunk(chunk) == text
        assert found.sizes_in_chunks([len(chunk)]) == [len(block)]
        line = chunk.partition(b"\n")[0] + b"\n"
        for other in (
            block, chunk[1:], chunk[:-1], chunk + chunk, chunk + b"0\r\n\r\n", b"0" + chunk, line + chunk,
            chunk[:-2] + b"\n\n", chunk.replace(b"\r\n", b"\n"), chunk.replace(b"\r", b";x\r", 1),
            b"%x\r\n" % (len(block) + 1) + block + b"\r\n", b"%x\r\n" % (len(block) - 1) + block + b"\r\n",
        ):  # fmt: skip
            assert found.text_in_chunk(other) == ""


@pytest.mark.parametrize("size", [1, 15, 16, 17, 255, 256, 257, 4_094, 4_095, 4_096, 4_097, 5_000])
def test_a_chunk_of_any_size_is_read_or_left(size: int) -> None:
    found = Repetition(b'"', b'"\n', Delta(EventClass.CONTENT), b'"\n\r\n')
    text = "x" * (size - 3)
    chunk = framed(b'"%b"\n' % text.encode())
    assert found.text_in_chunk(chunk) == (text if size <= BLOCK_BYTES_MAX else "")


insides = st.lists(
    st.sampled_from(
        [b"a", b" ", b'"', b"\\", b"\\n", b"\\u0061", b"\\ud83d", b"\n", b"\r\n", b"\x00", b"\xc3", b"\xa9",
         b"}", b'","role":"x', b"{", b":", b",", b"[DONE]", b"<think>", b"\xe2\x80\xa8"]
    ),
    max_size=6,
).map(b"".join)  # fmt: skip


@UNTIMED
@given(st.sampled_from(sorted(REPEATED)), insides, st.integers(0), st.binary(max_size=2))
def test_any_block_that_is_known_says_what_its_reader_would_say(
    name: str, inside: bytes, at: int, other: bytes
) -> None:
    found, dialect = known(REPEATED[name])
    assert found is not None
    block = found.before + inside + found.behind
    at %= len(block) + 1
    for candidate in (block, block[:at] + other + block[at + len(other) :], block[:at] + other + block[at:]):
        text = found.text_in(candidate)
        assert found.text_in_chunk(framed(candidate)) == text
        if text:
            expected = msgspec.structs.replace(found.delta, text=text, size=len(candidate))
            if expected.event_class is EventClass.CONTENT and text.isspace():
                expected.content, expected.blank = False, True
            assert tell(dialect, candidate) == expected

"""Invariant: what a block is known to say again is what its reader would have said.

Long because its tables of events serve all of its invariants.
"""

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmtap.protocol.delta import Delta, EventClass
from llmtap.protocol.dialects.anthropic import Anthropic
from llmtap.protocol.dialects.openai_chat import OpenAIChat
from llmtap.protocol.dialects.openai_choices import OpenAICompletions
from llmtap.protocol.dialects.openai_responses import OpenAIResponses
from llmtap.protocol.repetition import BLOCK_BYTES_MAX, PythonTokenRun, Repetition, find_repetition
from llmtap.protocol.sse import SseParser


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


Reader = OpenAIChat | OpenAICompletions | OpenAIResponses | Anthropic


def completion(text: str, **choice: Any) -> dict[str, Any]:
    choice = {"index": 0, "text": text, "logprobs": None, "finish_reason": None, **choice}
    return {"object": "text_completion", "model": "m", "choices": [choice]}


def response(kind: str, delta: Any, **top: Any) -> bytes:
    value = {"type": f"response.{kind}", "item_id": "i", "output_index": 0, "delta": delta, **top}
    return f"event: response.{kind}\n".encode() + sse(value)


def reader(first: bytes) -> Reader:
    """One in the middle of an answer."""
    if b"content_block" in first:
        return Anthropic()
    if b"response." in first:
        return OpenAIResponses()
    if b"text_completion" in first:
        completions = OpenAICompletions()
        tell(completions, sse(completion("so")))
        return completions
    dialect = OpenAIChat()
    tell(dialect, sse(chat(role="assistant", content="")))
    tell(dialect, sse(chat(content="so")))
    return dialect


def tell(dialect: Reader, block: bytes) -> Delta | None:
    """What a reader of the block says; None if it is more than one event, or less."""
    events = SseParser().feed(block)
    if len(events) != 1 or events[0].end != len(block):
        return None
    delta = dialect.read_event(events[0])
    delta.size = len(block)
    return delta


def framed(block: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(block), block)


def known(first: bytes) -> tuple[Repetition | None, Reader]:
    dialect = reader(first)
    delta = tell(dialect, first)
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
    "text of a completion": sse(completion("hi")),
    "text of a response": response("output_text.delta", "hi", logprobs=[]),
    "text of a response, in an object": response("text.delta", {"text": "hi"}),
    "reasoning of a response": response("reasoning_summary_text.delta", "hm"),
    "arguments of a response": response("function_call_arguments.delta", '{"a'),
    "partial JSON": piece(type="input_json_delta", partial_json='{"a'),
}

UNREPEATED = {
    "a role": sse(chat(role="assistant", content="")),
    "a running usage": sse({**chat(content="hi"), "usage": {"prompt_tokens": 1, "completion_tokens": 2}}),
    "its tokens": sse({**chat(), "choices": [{"index": 0, "delta": {"content": "hi"}, "token_ids": [5]}]}),
    "timings": sse({**chat(content="hi"), "timings": {"predicted_n": 2, "predicted_ms": 3.0}}),
    "an end": sse({"choices": [{"index": 0, "delta": {"content": "hi"}, "finish_reason": "stop"}]}),
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
    "a completion with its tokens": sse(completion("hi", token_ids=[5])),
    "the end of a completion": sse(completion("hi", finish_reason="stop")),
    "a completion that was filtered": sse(completion("hi", content_filter_results={"hate": {}})),
    "a completion with a running usage": sse({**completion("hi"), "usage": {"completion_tokens": 2}}),
    "a completion of another model": sse({**completion("hi"), "model": "n"}),
    "a completion with a warning": sse({**completion("hi"), "warnings": []}),
    "two completions": sse({**completion("hi"), "choices": completion("hi")["choices"] * 2}),
    "a response with its tokens' chances": response("output_text.delta", "hi", logprobs=[{"token": "hi"}]),
    "a response that refuses": response("refusal.delta", "no"),
    "a call of another kind": response("new_call_arguments.delta", "hi"),
    "the end of a response": response("output_text.done", "hi"),
    "a block": b"event: content_block_start\n"
    + sse({"type": "content_block_start", "content_block": {"type": "text", "text": "hi"}}),
}


@pytest.mark.parametrize("name", REPEATED)
def test_a_piece_of_text_comes_again_with_another_text(name: str) -> None:
    found, dialect = known(REPEATED[name])
    assert found is not None
    for text in ("x", "\n", '"}', "\\", "\u4f60", "\U0001f642", "\x7f\u2028"):
        for quoted in (json.dumps(text).encode(), msgspec.json.encode(text)):
            block = found.opening[:-1] + quoted + found.closing[1:]
            assert found.text_in(block) == text
            said = tell(dialect, block)
            assert (said.text, said.event_class, said.repeatable) == (text, found.delta.event_class, True)


@pytest.mark.parametrize("name", UNREPEATED)
def test_what_may_be_read_otherwise_the_next_time_does_not(name: str) -> None:
    assert known(UNREPEATED[name])[0] is None
    delta = tell(reader(UNREPEATED[name]), UNREPEATED[name])
    assert delta.repeatable == name.startswith("a text"), "the event itself, or where its text stands"


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b'"',
        b'\\\\"',
        b'a"',
        b'a","x":"b',
        b'"},"finish_reason":"stop","y":{"z":"',
        b"\\",
        b"\\x",
        b"a\nb",
        b"a\n\ndata: b",
        b"\r",
        b"\0",
        b"\xff",
        b"\xed\xa0\x80",
        b"\\ud800",
        b"x" * BLOCK_BYTES_MAX,
    ],
)
def test_what_is_no_single_text_is_left_to_the_reader(text: bytes) -> None:
    for first in REPEATED.values():
        found, _ = known(first)
        block = found.opening + text + found.closing
        assert found.text_in(block) == found.text_in(framed(block), chunked=True) == ""


def test_the_framing_of_a_chunk_must_be_the_usual_one() -> None:
    found, _ = known(sse(chat(content="hi")))
    assert found is not None
    for text in ("x", "x" * 300, "\u4f60"):
        block = found.opening + text.encode() + found.closing
        chunk = framed(block)
        assert found.text_in(chunk, chunked=True) == text
        run = PythonTokenRun(found, chunked=True, keeps_texts=False)
        assert run.add(chunk, 0, 0) and list(run.take()[2]) == [len(block)]
        line = chunk.partition(b"\n")[0] + b"\n"
        for other in (
            block,
            chunk[1:],
            chunk[:-1],
            chunk + chunk,
            chunk + b"0\r\n\r\n",
            b"0" + chunk,
            line + chunk,
            chunk[:-2] + b"\n\n",
            chunk.replace(b"\r\n", b"\n"),
            chunk.replace(b"\r", b";x\r", 1),
            b"%x\r\n" % (len(block) + 1) + block + b"\r\n",
            b"%x\r\n" % (len(block) - 1) + block + b"\r\n",
        ):
            assert found.text_in(other, chunked=True) == ""


insides = st.lists(
    st.sampled_from(
        [
            b"a",
            b" ",
            b'"',
            b"\\",
            b"\\n",
            b"\\u0061",
            b"\\ud83d",
            b"\n",
            b"\r\n",
            b"\x00",
            b"\xc3",
            b"\xa9",
            b"}",
            b'","role":"x',
            b"{",
            b":",
            b",",
            b"[DONE]",
            b"<think>",
            b"\xe2\x80\xa8",
        ]
    ),
    max_size=6,
).map(b"".join)


@given(st.sampled_from(sorted(REPEATED)), insides, st.integers(0), st.binary(max_size=2))
def test_any_block_that_is_known_says_what_its_reader_would_say(
    name: str, inside: bytes, at: int, other: bytes
) -> None:
    found, dialect = known(REPEATED[name])
    block = found.opening + inside + found.closing
    at %= len(block) + 1
    for candidate in (block, block[:at] + other + block[at + len(other) :], block[:at] + other + block[at:]):
        text = found.text_in(candidate)
        assert found.text_in(framed(candidate), chunked=True) == text
        if text:
            expected = msgspec.structs.replace(found.delta, text=text, size=len(candidate))
            if expected.event_class is EventClass.CONTENT and text.isspace():
                expected.content, expected.blank = False, True
            assert tell(dialect, candidate) == expected


# Values that nobody reads.

CHOICE = '"choices":[{"index":0,"delta":{"content":"%s"},"finish_reason":null}]'


def top(*members: str) -> bytes:
    return b"data: {%b}\n\n" % ",".join(('"model":"m"', *members)).encode()


def loosened(first: bytes, second: bytes) -> tuple[Repetition | None, Reader]:
    """What is found in the second of two events."""
    last, dialect = known(first)
    assert last is not None
    delta = tell(dialect, second)
    assert delta is not None and delta.repeatable
    return find_repetition(second, delta, dialect.read_event, dialect.names_read, last), dialect


LOOSE = {
    "two numbers": (top('"t_ns":99', '"seq":0', CHOICE % "hi"), top('"t_ns":123', '"seq":1', CHOICE % "so")),
    "an id, a date and padding": (
        top('"id":"a1"', '"created":1', CHOICE % "hi", '"obfuscation":"Yp"'),
        top('"id":"b2"', '"created":2', CHOICE % "so", '"obfuscation":""'),
    ),
    "two behind the text": (
        top(CHOICE % "hi", '"seq":7', '"id":"a"'),
        top(CHOICE % "so", '"seq":8', '"id":"b"'),
    ),
    "not packed": (sse({**chat(content="hi"), "seq": 7}), sse({**chat(content="so"), "seq": 8})),
    "at the very end": (
        b'data: {"model":"m",%b,\ndata: "seq":7\ndata: }\n\n' % (CHOICE % "hi").encode(),
        b'data: {"model":"m",%b,\ndata: "seq":8\ndata: }\n\n' % (CHOICE % "so").encode(),
    ),
}

LOOSE["a response"] = (
    response("output_text.delta", "hi", logprobs=[], sequence_number=7, obfuscation="Yp"),
    response("output_text.delta", "so", logprobs=[], sequence_number=18, obfuscation="q"),
)
LOOSE["a completion"] = sse({**completion("hi"), "created": 7}), sse({**completion("so"), "created": 8})

TIGHT = {
    "a value inside one that is read": (
        top(CHOICE % "hi").replace(b'"finish_', b'"x":1,"finish_'),
        top(CHOICE % "so").replace(b'"finish_', b'"x":2,"finish_'),
    ),
    "a value inside another": (top('"a":{"seq":7}', CHOICE % "hi"), top('"a":{"seq":8}', CHOICE % "so")),
    "a fraction": (top('"s":0.5', CHOICE % "hi"), top('"s":1.5', CHOICE % "so")),
    "too many": (
        top('"a":1', '"b":1', '"c":1', '"d":1', CHOICE % "hi"),
        top('"a":2', '"b":2', '"c":2', '"d":2', CHOICE % "so"),
    ),
    "one that is spelt elsewhere": (
        top('"seq" :7', '"a":{"seq":8}', CHOICE % "hi"),
        top('"seq" :8', '"a":{"seq":8}', CHOICE % "so"),
    ),
    "one that is overruled": (
        top('"seq":7', '"seq" :7', CHOICE % "hi"),
        top('"seq":8', '"seq" :8', CHOICE % "so"),
    ),
    "one that has the text's name": (
        top('"content" :"a"', CHOICE % "hi"),
        top('"content" :""', CHOICE % "so"),
    ),
    "another member": (top('"a":1', CHOICE % "hi"), top('"b":2', CHOICE % "so")),
}


def filled(found: Repetition, values: list[bytes], text: bytes) -> bytes:
    """An event with these loose values, in their order, spelt as given without their quotes."""
    n = len(found.ahead)
    before = zip(values[:n], (value.fixed for value in found.ahead), strict=True)
    behind = zip((value.fixed for value in found.beyond[::-1]), values[n:], strict=True)
    return b"".join(
        [
            found.opening,
            *(part for pair in before for part in pair),
            text,
            *(part for pair in behind for part in pair),
            found.closing,
        ]
    )


def strings(found: Repetition) -> list[bool]:
    return [value.is_string for value in (*found.ahead, *found.beyond[::-1])]


@pytest.mark.parametrize("name", LOOSE)
def test_a_value_that_nobody_reads_may_change(name: str) -> None:
    found, dialect = loosened(*LOOSE[name])
    assert found is not None and found.names
    assert len(found.names) == len(strings(found))
    for value in (b"0", b"5", b"1000000007", b"9" * 400):
        for text in (b"x", b'\\"', b" ", b'"seq":'.replace(b'"', b'\\"')):
            block = filled(found, [value] * len(found.names), text)
            said = tell(dialect, block)
            assert said.text == found.text_in(block) == json.loads(b'"%b"' % text)
            assert found.text_in(framed(block), chunked=True) == said.text
    for block in LOOSE[name]:
        assert found.text_in(block), "both have the same shape"


@pytest.mark.parametrize("name", TIGHT)
def test_what_is_read_or_cannot_be_told_for_sure_may_not_change(name: str) -> None:
    first, second = TIGHT[name]
    found, _ = loosened(first, second)
    assert found is not None and not found.names
    assert found.text_in(second) and not found.text_in(first)


def test_what_was_loose_once_stays_so() -> None:
    found, dialect = loosened(
        top('"id":"a"', '"created":1', CHOICE % "hi"), top('"id":"b"', '"created":1', CHOICE % "so")
    )
    assert found is not None and found.names == {"id"}
    third = top('"id":"b"', '"created":2', CHOICE % "it")
    assert found.text_in(third) == ""
    delta = tell(dialect, third)
    assert delta is not None
    found = find_repetition(third, delta, dialect.read_event, dialect.names_read, found)
    assert found is not None and found.names == {"id", "created"}
    assert found.text_in(top('"id":"c"', '"created":3', CHOICE % "no")) == "no"


NO_NUMBERS = [
    b"",
    b"-1",
    b"01",
    b"00",
    b"1.5",
    b"1e999",
    b"1 ",
    b" 1",
    b"\n1",
    b"1\n",
    b"1\n\n",
    b"NaN",
    b"{",
    b"{}",
    b"[]",
    b"null",
    b'"1"',
    b'1,"a":2',
    b'1,"error":{}',
    b'1,"choices":[]',
    b"\xc2\xb2",
    b"+1",
    b"0x1",
]
NO_STRINGS = [
    b'"',
    b"\\",
    b'","error":{"a":"',
    b'","model":"n',
    b'a","choices":[],"b":"',
    b"\n",
    b"\r",
    b"\n\ndata: ",
    b"\xff",
    b"\\x",
    b"\\ud800",
    b"\0",
]


@pytest.mark.parametrize("name", LOOSE)
def test_what_is_no_single_value_is_left_to_the_reader(name: str) -> None:
    found, _ = loosened(*LOOSE[name])
    assert found is not None and found.names
    kinds = strings(found)
    for i, is_string in enumerate(kinds):
        for value in NO_STRINGS if is_string else NO_NUMBERS:
            values = [b"1"] * len(kinds)
            values[i] = value
            block = filled(found, values, b"hi")
            assert found.text_in(block) == found.text_in(framed(block), chunked=True) == ""


# Numbers of a running usage.

USAGE = '"usage":{"prompt_tokens":7,"completion_tokens":%s,"total_tokens":%s,"prompt_tokens_details":null}'


def counted(text: str, count: Any, total: Any, *, ahead: bool = False) -> bytes:
    members = [CHOICE % text, USAGE % (count, total)]
    return top(*(members[::-1] if ahead else members))


def counting(*events: bytes) -> tuple[Repetition | None, OpenAIChat]:
    """What is found in the last of these events, after a role whose usage counts no token yet."""
    dialect = OpenAIChat()
    tell(dialect, top(CHOICE.replace('"content"', '"role":"assistant","content"') % "", USAGE % (0, 7)))
    found = None
    for event in events:
        delta = tell(dialect, event)
        assert delta is not None
        if delta.repeatable:
            found = find_repetition(
                event, delta, dialect.read_event, dialect.names_read, found, dialect.running_total
            )
    return found, dialect


FIRST_COUNTED = (("so", 1, 8), ("hi", 2, 9), ("it", 3, 10))
"""The first text follows no other text, so it is read by the long path and not repeatable."""


@pytest.mark.parametrize("ahead", [False, True])
def test_the_numbers_of_a_running_usage_may_grow(*, ahead: bool) -> None:
    found, dialect = counting(*(counted(*event, ahead=ahead) for event in FIRST_COUNTED))
    assert found is not None and found.offsets == {"completion_tokens": 0, "total_tokens": 7}
    for count in (4, 5, 9, 10, 1_000, 99_999_992):
        block = counted("x", count, count + 7, ahead=ahead)
        assert found.read(block) == found.read(framed(block), chunked=True) == ("x", count)
        delta = tell(dialect, block)
        assert delta is not None and delta.repeatable and delta.usage_running
        assert (delta.counts.output, delta.usage) == (count, found.usage_at(count))


@pytest.mark.parametrize(
    ("count", "total"),
    [
        (4, 10),
        (4, 12),
        (0, 7),
        (-1, 6),
        (1.5, 8.5),
        ('"4"', 11),
        ("04", 11),
        (100_000_000, 100_000_007),
        (4, "null"),
    ],
)
@pytest.mark.parametrize("ahead", [False, True])
def test_numbers_that_do_not_grow_alike_are_left_to_the_reader(
    count: Any, total: Any, *, ahead: bool
) -> None:
    found, _ = counting(*(counted(*event, ahead=ahead) for event in FIRST_COUNTED))
    assert found is not None
    block = counted("x", count, total, ahead=ahead)
    assert found.text_in(block) == found.text_in(framed(block), chunked=True) == ""


def test_looking_for_running_counts_leaves_the_reader_as_it_was() -> None:
    events = [counted(*event) for event in FIRST_COUNTED]
    found, dialect = counting(*events)
    plain = OpenAIChat()
    tell(plain, top(CHOICE.replace('"content"', '"role":"assistant","content"') % "", USAGE % (0, 7)))
    for event in events:
        tell(plain, event)
    block = counted("x", 5, 12)
    assert found is not None and tell(dialect, block) == tell(plain, block)


def test_other_numbers_that_differ_in_a_usage_are_left_to_the_reader() -> None:
    cached = USAGE.replace('"prompt_tokens":7', '"prompt_tokens":7,"reasoning_tokens":%s')
    events = [top(CHOICE % text, cached % (n, n, n + 7)) for text, n, _ in FIRST_COUNTED]
    found, _ = counting(*events)
    assert found is not None and not found.offsets, "the reader reads the reasoning tokens, too"


scalars = st.one_of(
    st.integers(-5, 10**20), st.text(max_size=4), st.floats(), st.booleans(), st.none(), st.just({"a": 1})
)
names = st.sampled_from(
    [
        "seq",
        "t_ns",
        "id",
        "content",
        "text",
        "choices",
        "error",
        "usage",
        "model",
        "timings",
        "delta",
        "a b",
        '"',
        "",
    ]
)
members = st.lists(st.tuples(names, scalars), max_size=5)


@settings(max_examples=400)
@given(members, members, members, st.booleans(), st.lists(st.booleans(), min_size=3, max_size=3))
def test_whatever_two_events_were_a_third_one_that_is_known_says_what_its_reader_would_say(
    first: list[tuple[str, Any]],
    second: list[tuple[str, Any]],
    third: list[tuple[str, Any]],
    same: bool,
    ahead: list[bool],
) -> None:
    def block(text: str, beside: list[tuple[str, Any]], ahead: bool) -> bytes:
        spelt = [f"{json.dumps(name)}:{json.dumps(value)}" for name, value in beside]
        choice = CHOICE % text
        return top(*(*spelt, choice) if ahead else (choice, *spelt))

    if same:  # the same members with other values
        values = iter([*(value for _, value in second), *(value for _, value in third), *range(99)])
        second, third = ([(name, next(values)) for name, _ in first] for _ in range(2))
    dialect = reader(b"")
    found: Repetition | None = None
    for text, beside, where in (("so", first, ahead[0]), ("hi", second, ahead[1])):
        event = block(text, beside, ahead[0] if same else where)
        delta = tell(dialect, event)
        if delta is None or not delta.repeatable:
            return
        found = find_repetition(event, delta, dialect.read_event, dialect.names_read, found)
    if found is not None:
        event = block("it", third, ahead[0] if same else ahead[2])
        text = found.text_in(event)
        if text:
            assert tell(dialect, event) == msgspec.structs.replace(found.delta, text=text, size=len(event))

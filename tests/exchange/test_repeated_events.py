"""Invariant: an exchange is the same whether or not its events are recognised by their bytes."""

import json
import zlib
from collections.abc import Callable
from itertools import pairwise
from typing import Any
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmtap.exchange import answer
from llmtap.exchange.exchange import BLANK, Exchange
from llmtap.protocol import repetition
from tests.exchange.streams import DONE, OK, ROLE, STOP, chunk, observe, sse


def observe_slowly(*reads: tuple[int, bytes], **how: Any) -> Exchange:
    """The same without knowing any event again."""
    with mock.patch.object(repetition, "find_repetition", return_value=None):
        return observe(*reads, **how)


def in_chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def word(text: str, **top: Any) -> bytes:
    return chunk({"content": text}, **{"model": "acme-8b-0901", **top})


def call(arguments: str) -> bytes:
    return chunk({"tool_calls": [{"index": 0, "function": {"arguments": arguments}}]}, model="acme-8b-0901")


def counted(text: str, count: int, **usage: Any) -> bytes:
    usage = {"prompt_tokens": 5, "completion_tokens": count, "total_tokens": 5 + count, **usage}
    return word(text, usage=usage)


ROLE_COUNTED = chunk(
    {"role": "assistant", "content": ""},
    model="acme-8b-0901",
    usage={"prompt_tokens": 5, "completion_tokens": 0, "total_tokens": 5},
)
growths = st.sampled_from([1, 1, 1, 1, 2, 5, 0, -1, 10**6, 10**8])


def counted_run(run: list[tuple[str, int]]) -> list[bytes]:
    """Events with a running usage; the total of an event that adds five tokens is wrong."""
    count, out = 0, []
    for text, growth in run:
        count = max(0, count + growth)
        out.append(counted(text, count, **({"total_tokens": 1} if growth == 5 else {})))
    return out


def unescaped(text: str) -> bytes:
    return sse(json.dumps(json.loads(word(text)[6:]), ensure_ascii=False).encode("utf-8", "replace"))


texts = st.sampled_from(
    ["a", "tok", " ", "\n", "\u3000", '"', "\\", "\u4f60", "\ud800", "<think>", "", "I can't help"]
)
loose = st.sampled_from([1, 7, 10**9, -1, 1.5, "", "a", '"', "\u4f60", None, {"content": "a"}])
events = st.one_of(
    texts.map(word),
    texts.map(word),  # mostly
    texts.map(unescaped),
    st.tuples(texts, loose).map(lambda pair: word(pair[0], seq=pair[1])),
    st.tuples(texts, loose, loose).map(lambda three: word(three[0], id=three[1], obfuscation=three[2])),
    texts.map(lambda text: chunk({"reasoning_content": text}, model="acme-8b-0901")),
    texts.map(call),
    st.integers(0, 9).map(lambda n: word("a", usage={"prompt_tokens": 1, "completion_tokens": n})),
    st.sampled_from(
        [
            ROLE,
            STOP,
            DONE,
            b": alive\n\n",
            b"data:\n\n",
            word("x").replace(b"\n", b"\r\n"),
            word("x")[:-1],
            word("a") + word("b"),
            word("a").replace(b": ", b":"),
            word("a").replace(b'"a"', b'"\\x"'),
            chunk({"role": "assistant", "content": ""}, model="other", id="other"),
            chunk({"content": "a", "refusal": "no"}, model="acme-8b-0901"),
            word("a", model="other"),
            chunk({"content": "a"}),
            sse({"error": {"message": "m", "type": "t"}}),
            word("a").replace(b'"index": 0', b'"index": 1'),
            b"event: message\n" + word("a"),
            b"\n",
            b"\r",
            sse({"choices": [{"index": 0, "delta": {"content": "a"}, "token_ids": [5, 6]}]}),
            sse({"choices": [{"index": 0, "delta": {"content": "a"}, "finish_reason": "content_filter"}]}),
        ]
    ),
)


@settings(max_examples=200)
@given(
    st.lists(
        st.one_of(
            events,
            st.lists(texts, max_size=12).map(lambda run: list(map(word, run))),
            st.lists(texts, max_size=12).map(lambda run: [word(t, seq=i) for i, t in enumerate(run)]),
            st.lists(texts, max_size=12).map(
                lambda run: [word(t, created=i, id=f"chat-{i}", pad="x" * i) for i, t in enumerate(run)]
            ),
            st.lists(st.tuples(texts, growths), max_size=12).map(counted_run),
        ),
        max_size=12,
    ),
    st.lists(st.integers(0), max_size=2),
    st.booleans(),
    st.booleans(),
    st.booleans(),
    st.sampled_from([1, 3, repetition.ROOM]),
)
def test_a_stream_is_the_same_whether_or_not_its_events_are_known_again(
    parts: list[bytes | list[bytes]],
    cuts: list[int],
    count: bool,
    chunked: bool,
    running: bool,
    together: int,
) -> None:
    reads = [ROLE_COUNTED if running else ROLE]
    for part in parts:
        reads += [part] if isinstance(part, bytes) else part
    if chunked:
        reads = [*map(in_chunk, reads), b"0\r\n\r\n"]
    for cut in cuts:  # some events come in two reads
        i = cut % len(reads)
        at = cut % (len(reads[i]) + 1)
        reads[i : i + 1] = [reads[i][:at], reads[i][at:]]
    stamped = [(100 + i, read) for i, read in enumerate(reads)]
    how: dict[str, Any] = {"count_tokens": len} if count else {}
    how["head"] = OK % (b"Transfer-Encoding: chunked\r\n" if chunked else b"")
    with mock.patch.object(repetition, "ROOM", together):
        assert observe(*stamped, **how) == observe_slowly(*stamped, **how)


def test_most_of_a_stream_is_known_again_and_its_firsts_and_flags_are_right() -> None:
    words = ["a", " ", "b", '"', "\u4f60", *"cdef" * 5]
    events = [ROLE, *map(word, words), STOP, DONE]
    reads = [(100 + i, in_chunk(event)) for i, event in enumerate(events)]
    head = OK % b"Transfer-Encoding: chunked\r\n"
    with mock.patch.object(
        answer.SseParser, "feed", autospec=True, side_effect=answer.SseParser.feed
    ) as feed:
        x = observe(*reads, head=head)
    assert feed.call_count < 8, "the rest was not parsed"
    log = x.timeline.events
    assert list(log.t_ns) == [t_ns for t_ns, _ in reads]
    assert list(log.sizes) == [len(event) for event in events]
    assert [bool(f & BLANK) for f in log.flags[1:-2]] == [word == " " for word in words]
    assert (x.timeline.first_content_ns, x.timeline.last_token_ns) == (101, reads[-3][0])
    assert (x.tokens.output, x.finish_reason) == (len(words), "stop")
    assert (x.reads, list(x.added.chunks_ns)) == (len(reads), [t_ns // 10 for t_ns, _ in reads])
    assert x == observe_slowly(*reads, head=head)


def test_most_of_a_stream_with_a_running_usage_is_known_again() -> None:
    events = [ROLE_COUNTED, *(counted("a", 2 * n) for n in range(1, 26)), STOP, DONE]
    reads = [(100 + i, in_chunk(event)) for i, event in enumerate(events)]
    head = OK % b"Transfer-Encoding: chunked\r\n"
    with mock.patch.object(
        answer.SseParser, "feed", autospec=True, side_effect=answer.SseParser.feed
    ) as feed:
        x = observe(*reads, head=head)
    assert feed.call_count < 14, "the rest was not parsed"
    assert list(x.timeline.events.tokens) == [-1, *[2] * 25, -1, -1]
    assert (x.tokens.output, x.tokens.source, x.usage["total_tokens"]) == (50, "running_usage", 55)
    assert x == observe_slowly(*reads, head=head)


def test_a_coded_stream_is_decoded_first() -> None:
    """Stored: the bytes of each event stand alone in a read, and yet the decoder has to see them."""
    events = [ROLE, *map(word, "abcdef"), STOP, DONE]
    packer = zlib.compressobj(0, wbits=31)
    stored = packer.compress(b"".join(events)) + packer.flush()
    edges = [0, *(stored.index(event) + len(event) for event in events), len(stored)]
    reads = list(enumerate((stored[a:b] for a, b in pairwise(edges)), 100))
    x = observe(*reads, head=OK % b"Content-Encoding: gzip\r\n")
    assert (x.tokens.output, x.error) == (6, None)
    assert x == observe_slowly(*reads, head=OK % b"Content-Encoding: gzip\r\n")


def test_a_stream_whose_events_never_repeat_is_not_searched_for_ever() -> None:
    reads = [(i, word("a", made={"at": i})) for i in range(100)]
    with mock.patch.object(repetition, "find_repetition", wraps=repetition.find_repetition) as find:
        observe(*reads)
    assert find.call_count < 10


@pytest.mark.parametrize(
    "beside",
    [lambda i: {"created": i // 50}, lambda i: {"id": f"chat-{i}", "created": i // 50, "seq": i}],
    ids=["llama.cpp", "other"],
)
def test_a_value_that_nobody_reads_may_change(beside: Callable[[int], dict[str, Any]]) -> None:
    reads = [(i, in_chunk(word(f"tok{i}", **beside(i)))) for i in range(500)]
    head = OK % b"Transfer-Encoding: chunked\r\n"
    with mock.patch.object(
        answer.SseParser, "feed", autospec=True, side_effect=answer.SseParser.feed
    ) as feed:
        x = observe(*reads, head=head)
    assert feed.call_count < 30
    assert x == observe_slowly(*reads, head=head)


def completion(text: str, **choice: Any) -> bytes:
    value = {"index": 0, "text": text, "logprobs": None, "finish_reason": None, **choice}
    return sse({"id": "c", "object": "text_completion", "model": "m", "choices": [value]})


def response(kind: str, **members: Any) -> bytes:
    return f"event: response.{kind}\n".encode() + sse({"type": f"response.{kind}", **members})


def response_delta(kind: str, n: int, text: str) -> bytes:
    return response(
        f"{kind}.delta", item_id="i", output_index=0, delta=text, sequence_number=n, obfuscation="x" * (n % 9)
    )


OTHER_STREAMS = {
    "completions": [*(completion(f" t{i}") for i in range(99)), completion("", finish_reason="stop"), DONE],
    "responses": [
        response("created", response={"id": "r", "model": "m"}),
        *(response_delta("reasoning_summary_text", n, f" why{n}") for n in range(99)),
        *(response_delta("output_text", n, f" t{n}" if n % 7 else " ") for n in range(99)),
        response_delta("refusal", 99, "no"),
        *(response_delta("function_call_arguments", n, f'"{n}",') for n in range(99)),
        response("completed", response={"id": "r", "model": "m", "status": "completed"}),
    ],
}


@pytest.mark.parametrize("name", OTHER_STREAMS)
def test_events_of_other_dialects_are_known_again(name: str) -> None:
    reads = [(i, in_chunk(event)) for i, event in enumerate(OTHER_STREAMS[name])]
    head = OK % b"Transfer-Encoding: chunked\r\nContent-Type: text/event-stream\r\n"
    with mock.patch.object(
        answer.AnswerReader, "feed", autospec=True, side_effect=answer.AnswerReader.feed
    ) as feed:
        x = observe(*reads, head=head)
    assert feed.call_count < len(reads) / 8
    assert (x.dialect, x.unparsed_events) == (f"openai.{name}", 0)
    assert x == observe_slowly(*reads, head=head)

"""Invariant: however a body is cut, it turns out to be the same kind and says the same things."""

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmtap.record import answer
from llmtap.record.answer import AnswerReader, BodyKind
from llmtap.wire.delta import Delta, EventClass

UNTIMED = settings(deadline=None)  # a busy machine is no failure

CHAT = "/v1/chat/completions"
SSE, JSON = b"text/event-stream; charset=utf-8", b"application/json"
STREAM = b"".join([
    b'data: {"object":"chat.completion.chunk","choices":[{"delta":{"content":"hi"}}]}\n\n',
    b": k\n\n",
    b"data: [DONE]\n\n",
])  # fmt: skip
ANSWER = b'{"object":"chat.completion","choices":[{"message":{"content":"hi"},"finish_reason":"stop"}]}'
ERROR = b'{"error":{"message":"m","type":"t"}}'


def read(reader: AnswerReader, body: bytes, edges: list[int], *, whole: bool = True) -> list[Delta]:
    cuts = [0, *sorted(e % (len(body) + 1) for e in edges), len(body)]
    out = [d for a, b in pairwise(cuts) if a < b for d in reader.feed(body[a:b])]
    return out + reader.close(whole=whole)


@pytest.mark.parametrize(
    ("content_type", "body", "kind", "classes"),
    [
        (SSE, STREAM, BodyKind.SSE, ["content", "keepalive", "done"]),
        (SSE, b"\n\n" + STREAM, BodyKind.SSE, ["content", "keepalive", "done"]),
        (SSE, b"\xef\xbb\xbf" + STREAM, BodyKind.SSE, ["content", "keepalive", "done"]),
        (SSE, ANSWER, BodyKind.JSON, ["content"]),
        (SSE, b" " + ERROR, BodyKind.JSON, ["error"]),
        (JSON, ANSWER, BodyKind.JSON, ["content"]),
        (JSON, ANSWER + b"\n\n", BodyKind.JSON, ["content"]),
        (JSON, b"\n\r\n\n" + ANSWER, BodyKind.JSON, ["keepalive"] * 3 + ["content"]),
        (JSON, STREAM, BodyKind.SSE, ["content", "keepalive", "done"]),
        (b"application/problem+json", ERROR, BodyKind.JSON, ["error"]),
        (None, STREAM, BodyKind.SSE, ["content", "keepalive", "done"]),
        (None, ANSWER, BodyKind.JSON, ["content"]),
        (b"text/plain", b": k\n\n", BodyKind.SSE, ["keepalive"]),
        (b"text/plain", b"  \n", BodyKind.UNDECIDED, []),
        (SSE, b"data: [DONE]", BodyKind.SSE, ["done"]),
        (JSON, b"", BodyKind.UNDECIDED, []),
    ],
)
@UNTIMED
@given(edges=st.lists(st.integers(0, 300), max_size=6))
def test_the_body_tells_what_it_is(
    content_type: bytes | None, body: bytes, kind: BodyKind, classes: list[str], edges: list[int]
) -> None:
    for cut in (edges, list(range(len(body)))):
        reader = AnswerReader(content_type, CHAT)
        deltas = read(reader, body, cut)
        assert [d.event_class.name.lower() for d in deltas] == classes
        assert reader.kind is kind
        assert reader.streamed == (kind is BodyKind.SSE)


@pytest.mark.parametrize("body", [b"<html>502</html>", b"deep thoughts", b"event horizon, of sorts"])
def test_a_body_of_no_known_kind_is_timed_by_its_reads(body: bytes) -> None:
    reader = AnswerReader(b"text/html", CHAT)
    assert [(d.event_class, d.size, d.parsed) for d in reader.feed(body)] == [
        (EventClass.METADATA, len(body), False)
    ]
    assert len(reader.feed(b"x")) == 1
    assert reader.close(whole=True) == []


def test_a_short_body_of_no_known_kind_is_told_at_its_end() -> None:
    reader = AnswerReader(None, CHAT)
    assert reader.feed(b"ok") == []
    assert [d.size for d in reader.close(whole=True)] == [2]


def test_sizes_are_those_of_the_events_in_the_body() -> None:
    assert [d.size for d in read(AnswerReader(SSE, CHAT), STREAM, [])] == [len(STREAM) - 19, 5, 14]
    assert [d.size for d in read(AnswerReader(JSON, CHAT), b"\n\r\n" + ANSWER, [])] == [1, 2, len(ANSWER)]


def test_lines_of_json_are_not_one_json() -> None:
    reader = AnswerReader(b"application/x-ndjson", "/api/chat")
    assert len(reader.feed(b'{"done":false}\n')) == 1
    assert reader.kind is BodyKind.OPAQUE


@pytest.mark.parametrize(("whole", "n"), [(True, 1), (False, 0)])
def test_a_json_body_that_was_cut_off_says_nothing(whole: bool, n: int) -> None:
    deltas = read(AnswerReader(JSON, CHAT), ANSWER[:-9], [], whole=whole)
    assert [d.parsed for d in deltas] == [False] * n


def test_a_json_body_that_is_too_long_is_one_unparsed_event(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answer, "BODY_BYTES_MAX", 50)
    (delta,) = read(AnswerReader(JSON, CHAT), ANSWER, [20, 40, 60])
    assert (delta.event_class, delta.parsed, delta.size) == (EventClass.METADATA, False, len(ANSWER))


def test_endless_white_space_is_not_kept() -> None:
    reader = AnswerReader(None, CHAT)
    deltas = [d for _ in range(9) for d in reader.feed(b" " * 1000)]
    assert reader.kind is BodyKind.OPAQUE
    assert sum(d.size for d in deltas) == 9000
    reader = AnswerReader(SSE, CHAT)
    assert [d for _ in range(9) for d in reader.feed(b"\n" * 1000)] == []
    assert reader.feed(STREAM) != []


def test_after_giving_up_reads_are_all_there_is() -> None:
    reader = AnswerReader(SSE, CHAT)
    reader.feed(STREAM[:20])
    reader.give_up()
    assert [d.size for d in reader.feed(STREAM[20:])] == [len(STREAM) - 20]
    assert reader.close(whole=True) == []
    assert reader.streamed
    plain = AnswerReader(JSON, CHAT)
    plain.give_up()
    assert not plain.streamed


@UNTIMED
@given(st.lists(st.binary(min_size=1, max_size=30), max_size=6), st.sampled_from([None, SSE, JSON, b"x/y"]))
def test_no_bytes_raise(reads: list[bytes], content_type: bytes | None) -> None:
    reader = AnswerReader(content_type, CHAT)
    for data in reads:
        reader.feed(data)
    reader.close(whole=True)

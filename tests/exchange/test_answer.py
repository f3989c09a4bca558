"""Invariant: however a body is cut, it turns out to be the same kind and says the same things."""

import json
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmtap.exchange import answer
from llmtap.exchange.answer import AnswerReader, BodyKind
from llmtap.protocol.delta import Delta, EventClass, Reading

CHAT = "/v1/chat/completions"
SSE, JSON = b"text/event-stream; charset=utf-8", b"application/json"
STREAM = b"".join(
    [
        b'data: {"object":"chat.completion.chunk","choices":[{"delta":{"content":"hi"}}]}\n\n',
        b": k\n\n",
        b"data: [DONE]\n\n",
    ]
)
ANSWER = b'{"object":"chat.completion","choices":[{"message":{"content":"hi"},"finish_reason":"stop"}]}'
OLLAMA = b"".join(
    [
        b'{"model":"m","message":{"role":"assistant","content":"a"},"done":false}\n',
        b'{"model":"m","message":{"role":"assistant","content":"b"},"done":false}\n',
        b'{"model":"m","message":{"role":"assistant","content":""},"done":true,"done_reason":"stop"}\n',
    ]
)
LINES = b"application/x-ndjson"
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
        (SSE, ANSWER, BodyKind.JSON, ["content"]),
        (SSE, b" " + ERROR, BodyKind.JSON, ["error"]),
        (JSON, ANSWER, BodyKind.JSON, ["content"]),
        (JSON, b"\n\r\n\n" + ANSWER, BodyKind.JSON, ["keepalive"] * 3 + ["content"]),
        (JSON, STREAM, BodyKind.SSE, ["content", "keepalive", "done"]),
        (None, STREAM, BodyKind.SSE, ["content", "keepalive", "done"]),
        (b"text/plain", b": k\n\n", BodyKind.SSE, ["keepalive"]),
        (b"text/plain", b"  \n", BodyKind.UNDECIDED, []),
        (SSE, b"data: [DONE]", BodyKind.SSE, ["done"]),
        (LINES, OLLAMA, BodyKind.NDJSON, ["content", "content", "done"]),
        (
            b"application/jsonl; charset=utf-8",
            OLLAMA.rstrip(),
            BodyKind.NDJSON,
            ["content", "content", "done"],
        ),
        (LINES, b"\r\n" + OLLAMA, BodyKind.NDJSON, ["keepalive", "content", "content", "done"]),
        (LINES, OLLAMA[:-3], BodyKind.NDJSON, ["content", "content"]),
        (LINES, STREAM, BodyKind.SSE, ["content", "keepalive", "done"]),
        (JSON, OLLAMA.splitlines()[2] + b"\n", BodyKind.JSON, ["done"]),
        (JSON, ANSWER.replace(b",", b",\n"), BodyKind.JSON, ["content"]),
        (JSON, b"", BodyKind.UNDECIDED, []),
    ],
)
@given(edges=st.lists(st.integers(0, 300), max_size=6))
def test_the_body_tells_what_it_is(
    content_type: bytes | None, body: bytes, kind: BodyKind, classes: list[str], edges: list[int]
) -> None:
    for cut in (edges, list(range(len(body)))):
        reader = AnswerReader(content_type, CHAT)
        deltas = read(reader, body, cut)
        assert [d.event_class.name.lower() for d in deltas] == classes
        assert reader.kind is kind
        assert reader.streamed == (kind in (BodyKind.SSE, BodyKind.NDJSON))


@pytest.mark.parametrize("body", [b"<html>502</html>", b"deep thoughts", b"event horizon, of sorts"])
def test_a_body_of_no_known_kind_is_timed_by_its_reads(body: bytes) -> None:
    reader = AnswerReader(b"text/html", CHAT)
    assert [(d.event_class, d.size, d.parsed) for d in reader.feed(body)] == [
        (EventClass.METADATA, len(body), False)
    ]
    assert len(reader.feed(b"x")) == 1
    assert reader.close(whole=True) == []


def test_sizes_are_those_of_the_events_in_the_body() -> None:
    assert [d.size for d in read(AnswerReader(SSE, CHAT), STREAM, [])] == [len(STREAM) - 19, 5, 14]
    assert [d.size for d in read(AnswerReader(JSON, CHAT), b"\n\r\n" + ANSWER, [])] == [1, 2, len(ANSWER)]


def test_a_line_is_an_event_when_its_last_byte_is_there() -> None:
    reader = AnswerReader(LINES, "/api/chat")
    lines = OLLAMA.splitlines(keepends=True)
    assert [[d.size for d in reader.feed(line)] for line in lines] == [[len(line)] for line in lines]
    assert (reader.dialect.name, reader.close(whole=True)) == ("ollama.native", [])


def test_lines_of_no_known_dialect_are_timed_and_counted() -> None:
    reader = AnswerReader(LINES, "/api/pull")
    deltas = reader.feed(b'{"status":"pulling"}\nnot json\n') + reader.close(whole=True)
    assert [(d.event_class, d.parsed) for d in deltas] == [(EventClass.METADATA, False)] * 2
    reader.give_up()
    assert ([d.size for d in reader.feed(b"rest")], reader.streamed) == ([4], True)


def frame(payload: bytes, first: int = 0x81) -> bytes:
    return bytes([first, len(payload)]) + payload


def test_what_comes_down_a_tunnel_is_read_as_messages() -> None:
    reader = AnswerReader.of_tunnel("/v1/realtime")
    delta = frame(b'{"type":"response.text.delta","delta":"hi"}')
    stream = frame(b'{"type":"session.created"}') + delta + frame(b"", 0x89) + frame(b"\0\1", 0x82)
    stream += frame(b"plain") + frame(b"\x03\xe8", 0x88)
    deltas = read(reader, stream, [3, 30, 31, 99])
    assert [d.event_class.name.lower() for d in deltas] == [
        "metadata",
        "content",
        "keepalive",
        "metadata",
        "metadata",
        "metadata",
    ]
    assert [d.parsed for d in deltas] == [True, True, True, False, False, True]
    assert (deltas[1].text, deltas[1].size, sum(d.size for d in deltas)) == ("hi", len(delta), len(stream))
    assert (reader.dialect.name, reader.kind, reader.streamed) == (
        "openai.realtime",
        BodyKind.MESSAGES,
        False,
    )


def test_messages_of_an_unknown_api_are_read_by_structure() -> None:
    words = ["Moss", " grows", " slowly", " on", " stone", "."]
    messages = [{"op": "hello"}, *({"op": "asked", "who": "user", "d": word} for word in words)]
    messages += [{"op": "t", "d": word} for word in words]
    payloads = [json.dumps(message).encode() for message in messages]
    payloads[1:1] = [b"1"]
    stream = frame(b"", 0x89) + b"".join(map(frame, payloads)) + frame(b"\0\1", 0x82)
    for cuts in ([], [1, 9, 80, 81, 200], list(range(1, len(stream)))):
        reader = AnswerReader.of_tunnel("/assist")
        deltas = read(reader, stream, cuts)
        assert [i for i, delta in enumerate(deltas) if delta.output] == list(range(9, 15))
        assert "".join(delta.text for delta in deltas) == "".join(words)
        assert (reader.dialect.name, reader.dialect.reading) == (None, Reading.INFERRED)


def test_lines_of_text_that_name_their_events_are_read() -> None:
    lines = b'f:{"messageId":"m"}\n0:"Moss"\n0:" grows"\nd:{"finishReason":"stop"}\n'
    for cuts in ([], list(range(1, len(lines)))):
        reader = AnswerReader(b"text/plain; charset=utf-8", "/api/chat")
        deltas = read(reader, lines, cuts)
        assert [delta.text for delta in deltas] == ["", "Moss", " grows", ""]
        assert (reader.dialect.name, reader.framing, deltas[-1].finish_reason) == (
            "vercel.data",
            "ndjson",
            "stop",
        )
    plain = AnswerReader(b"text/plain", "/api/chat")
    assert [delta.parsed for delta in plain.feed(b"a: ok\n")] == [False]
    assert plain.kind is BodyKind.OPAQUE


def test_a_tunnel_of_anything_else_is_timed_by_its_reads() -> None:
    reader = AnswerReader.of_tunnel("/v1/realtime")
    assert [d.event_class for d in reader.feed(frame(b"", 0x89) + b"HTTP/2")] == [EventClass.KEEPALIVE]
    assert [(d.size, d.parsed) for d in reader.feed(b"more")] == [(4, False)]
    assert (reader.kind, reader.streamed, reader.close(whole=True)) == (BodyKind.OPAQUE, False, [])


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


UNKNOWN_LINES = b"".join(
    b'{"id":"a","answer":"%b","finished":%b}\n' % (text, last)
    for text, last in ((b"The lake", b"false"), (b"The lake is", b"false"), (b"The lake is deep.", b"true"))
)


@pytest.mark.parametrize("content_type", [LINES, JSON, b"text/plain", None])
@given(edges=st.lists(st.integers(0, 200), max_size=6))
def test_lines_of_an_unknown_api_are_lines_whatever_their_type(
    content_type: bytes | None, edges: list[int]
) -> None:
    reader = AnswerReader(content_type, "/x")
    texts = [delta.text for delta in read(reader, UNKNOWN_LINES, edges)]
    texts = [delta.text for _, delta in reader.take_late()] + texts
    assert (reader.kind, texts) == (BodyKind.NDJSON, ["The lake", " is", " deep."])


def test_a_line_keeps_the_time_of_the_read_that_ended_it() -> None:
    reader = AnswerReader(JSON, "/x")
    lines = UNKNOWN_LINES.splitlines(keepends=True)
    deltas = [(t_ns, delta) for t_ns, line in enumerate(lines) for delta in reader.feed(line, t_ns)]
    deltas += [(9, delta) for delta in reader.close(whole=True, t_ns=9)]
    assert [(t_ns, delta.text) for t_ns, delta in [*reader.take_late(), *deltas]] == [
        (0, "The lake"),
        (1, " is"),
        (2, " deep."),
    ]


@pytest.mark.parametrize(
    "body", [ANSWER + b"\n", ANSWER + b"\n\n  ", b'{\n  "a": {"b": 1}\n}\n', b'{"a": 1}\n' + b" " * 9_000]
)
def test_one_value_on_a_line_is_no_stream(body: bytes) -> None:
    reader = AnswerReader(JSON, "/x")
    for i in range(0, len(body), 5):
        assert reader.feed(body[i : i + 5]) == []
    assert len(reader.close(whole=True)) == 1 and reader.kind is BodyKind.JSON

"""Invariants: any cut of the bytes gives the same events, at the same offsets; what they say is what a
plain second implementation of the standard says; and no more than one event's bytes are ever kept.

Invariant of binary event streams and JSON arrays: any cut gives the same events; a wrong checksum ends the
stream; botocore's parser finds the same messages.
"""

import base64
import json
import re
import struct
from itertools import pairwise, product
from typing import Any
from zlib import crc32

import pytest
from botocore.eventstream import EventStreamBuffer
from hypothesis import example, given, settings
from hypothesis import strategies as st

from llmtap.protocol.sse import (
    ArrayParser,
    LineParser,
    MessageStreamParser,
    SseEvent,
    SseParser,
    is_message_stream,
)
from tests.support.data import CORPUS

PIECES = [
    b"data: x",
    b"data:y",
    b"data:  two spaces",
    b"data",
    b"data:",
    b"data: [DONE]",
    b'data: {"a":1}',
    b"data: {",
    b"data: }",
    b": comment",
    b":",
    b"event: ping",
    b"event",
    b"event:",
    b"id: 7",
    b"retry: 5",
    b"name",
    b"x:y",
    b" data: no",
    b"\xef\xbb\xbf",
    "\u2028\x85".encode(),
    b"\x0b\x0c",
    b"\x85",
    b"\n",
    b"\n",
    b"\n\n",
    b"\r",
    b"\r\n",
    b"\r\n\r\n",
    b"\r\r",
]
bodies = st.lists(st.sampled_from(PIECES), max_size=30).map(b"".join)


def play(body: bytes, edges: list[int], **options: int) -> list[SseEvent]:
    """The events of a body cut at `edges`, its end included."""
    parser = SseParser(**options)
    out = []
    at = 0
    for edge in [*sorted(e % (len(body) + 1) for e in edges), len(body)]:
        out += parser.feed(body[at:edge])
        at = edge
    return out + parser.close()


def standard(body: bytes) -> list[tuple[bytes | None, bytes | None, bool]]:
    """`(data, event, comment)` of each block, as the standard's prose has it, without any leniency."""
    lines = re.split(rb"\r\n|\r|\n", body.removeprefix(b"\xef\xbb\xbf"))
    blocks: list[list[bytes]] = [[]]
    for line in lines[:-1]:
        if line:
            blocks[-1].append(line)
        else:
            blocks.append([])
    tail = blocks.pop() + ([lines[-1]] if lines[-1] else [])
    out = [fields(b) for b in blocks if b]
    return out + [f for f in [fields(tail)] if f[0] is not None and f[0].strip() == b"[DONE]"]


def fields(block: list[bytes]) -> tuple[bytes | None, bytes | None, bool]:
    data, event, other = [], b"", False
    for line in block:
        name, _, value = line.partition(b":")
        value = value.removeprefix(b" ")
        if name == b"data":
            data.append(value)
        elif line[:1] != b":":
            other = True
            event = value if name == b"event" else event
    return (b"\n".join(data) if data else None), event or None, not data and not other


@given(bodies, st.lists(st.integers(0, 400), max_size=12))
@example(b"data: x\r\n\r\ndata: y\r\n\r\n", [8])
@example(b"data: x\r\n\r\n", [10])
@example(b"data: x\r\n\r", [8])
@example(b"\xef\xbb\xbfdata: x\n\n", [1, 2])
@example(b'data: {"a":1}\ndata: {"a":2}\n\ndata: {"a":3}\n\n', [29])
@example(b"data: x\r\rdata: y\n\n\ndata: z\n\r\n", [9, 18])
def test_every_cut_gives_the_same_events(body: bytes, edges: list[int]) -> None:
    whole = play(body, [])
    assert play(body, edges) == whole
    assert play(body, list(range(len(body)))) == whole
    assert play(body, [*edges, *edges]) == whole, "empty reads"


def test_every_cut_of_every_short_body_gives_the_same_events() -> None:
    for tokens in product([b"data: x", b'data: {"a":1}', b": c", b"\n", b"\r", b"\r\n"], repeat=5):
        body = b"".join(tokens)
        whole = play(body, [])
        assert play(body, list(range(len(body)))) == whole, body
        for edge in (len(tokens[0]), len(body) - len(tokens[4]), len(body) - 1, len(body) - 2):
            assert play(body, [edge]) == whole, (body, edge)


@given(bodies, st.lists(st.integers(0, 400), max_size=12), st.integers(1, 40))
def test_every_cut_skips_the_same_events(body: bytes, edges: list[int], event_bytes_max: int) -> None:
    whole = play(body, [], event_bytes_max=event_bytes_max)
    assert play(body, edges, event_bytes_max=event_bytes_max) == whole
    assert play(body, list(range(len(body))), event_bytes_max=event_bytes_max) == whole


@given(bodies)
@example(b"data: x\n\r\ndata: y\r\n\r\r\n")
@example(b"\xef\xbb")
@example(b"data: x\rdata: y\n\n")
def test_events_are_those_of_the_standard(body: bytes) -> None:
    # Without the line whose leniency is no part of the standard.
    body = body.replace(b'{"a":1}', b"1").replace(b"}", b"")
    assert [(e.data, e.event, e.comment) for e in play(body, [])] == standard(body)


def test_only_a_cr_lf_is_waited_for() -> None:
    assert SseParser().feed(b"data: x\r\r") == [SseEvent(0, 9, b"x")]
    parser = SseParser()
    assert parser.feed(b"data: x\r\n\r") == []
    assert parser.feed(b"\n") == [SseEvent(0, 11, b"x")]


@pytest.mark.parametrize(
    ("body", "event"),
    [
        (b"data: a\ndata: b\n\n", SseEvent(0, 17, b"a\nb")),
        (b"data\n\n", SseEvent(0, 6, b"")),
        (b"event: a\nevent: b\n\n", SseEvent(0, 19, None, b"b")),
        (b"event: a\nevent\n\n", SseEvent(0, 16, None, None)),
        (b": x\n: y\n\n", SseEvent(0, 9, None, None, True)),
        (b": x\nid: 1\n\n", SseEvent(0, 11, None)),
        (b"\n\n\ndata: a\n\n", SseEvent(3, 12, b"a")),
        (b"error: {}\nerror:x\n\n", SseEvent(0, 19, b"{}\nx", b"error")),
        (b'event: end\ndata: {"a":1}\n', SseEvent(0, 25, b'{"a":1}', b"end")),
        (b'data: {"a":\ndata: 1}', SseEvent(0, 20, b'{"a":\n1}')),
    ],
)
def test_what_a_block_says(body: bytes, event: SseEvent) -> None:
    assert play(body, []) == play(body, list(range(len(body)))) == [event]


@pytest.mark.parametrize("body", [b'data: {"a":1', b"data: a\n", b"data: 1", b'event: {"a":1}\n'])
def test_a_part_of_an_event_is_no_event(body: bytes) -> None:
    assert play(body, []) == play(body, list(range(len(body)))) == []


def test_one_newline_between_events_is_understood() -> None:
    body = b'data: {"a":1}\ndata: {"a":2}\ndata: {"a":3}\ndata: [DONE]\n'
    assert play(body, []) == [
        SseEvent(0, 14, b'{"a":1}'),
        SseEvent(14, 28, b'{"a":2}'),
        SseEvent(28, 42, b'{"a":3}'),
        SseEvent(42, 55, b"[DONE]"),
    ]
    parser = SseParser()
    assert parser.feed(body[:14]) == [], "it may go on"
    assert len(parser.feed(body[14:28])) == 2, "now it is known, and the line is an event at its end"
    assert len(parser.feed(body[28:42])) == 1


def test_an_event_that_is_too_long_is_counted_and_not_kept() -> None:
    """The bound is on the block, not on a line."""
    body = b"data: 0123456789\n" * 8 + b"\ndata: ok\n\n"
    for edges in ([], list(range(len(body))), [50, 136, 137]):
        parser = SseParser(event_bytes_max=136)
        cuts = [0, *edges, len(body)]
        assert [e for a, b in pairwise(cuts) for e in parser.feed(body[a:b])] == [SseEvent(137, 147, b"ok")]
        assert parser.skipped == 1
    assert len(play(body, [20, 90], event_bytes_max=137)) == 2


def parse(
    body: bytes, edges: list[int], line_bytes_max: int = 1 << 20
) -> tuple[list[tuple[int, int, bytes]], int]:
    parser = LineParser(line_bytes_max)
    cuts = [0, *sorted(e % (len(body) + 1) for e in edges), len(body)]
    events = [e for a, b in pairwise(cuts) for e in parser.feed(body[a:b])] + parser.close()
    assert parser.offset == len(body)
    return [(e.start, e.end, e.data or b"") for e in events], parser.skipped


@pytest.mark.parametrize(
    ("body", "lines"),
    [
        (b"", []),
        (b"{}\n[1]", [(0, 3, b"{}"), (3, 6, b"[1]")]),
        (b"{}\r\n{}\r\n", [(0, 4, b"{}"), (4, 8, b"{}")]),
        ('{"a":"\u2028\u0085"}\n'.encode(), [(0, 14, '{"a":"\u2028\u0085"}'.encode())]),
        (b"a\rb\n", [(0, 4, b"a\rb")]),
    ],
)
def test_a_line_ends_in_lf(body: bytes, lines: list[tuple[int, int, bytes]]) -> None:
    for edges in ([], list(range(len(body)))):
        assert parse(body, edges) == (lines, 0)


@given(
    st.lists(st.sampled_from([b"{}", b"\n", b"\r\n", b"x" * 9, b"\r"]), max_size=12).map(b"".join),
    st.lists(st.integers(0, 99), max_size=6),
)
def test_every_cut_gives_the_same_lines(body: bytes, edges: list[int]) -> None:
    assert parse(body, edges, 12) == parse(body, [], 12)


def test_a_line_that_is_too_long_is_passed_over() -> None:
    body = b"x" * 30 + b"\n{}\n" + b"y" * 30
    for edges in ([], [5, 20, 31], list(range(len(body)))):
        assert parse(body, edges, 10) == ([(31, 34, b"{}")], 2)


STREAMS = sorted(
    path.with_suffix(".sse").read_bytes()
    for path in CORPUS.glob("bedrock_*.json")
    if json.loads(path.read_text(encoding="utf-8"))["body"]["framing"] == "eventstream"
)
UNTIMED = settings(max_examples=200)


def fed(parser: ArrayParser | MessageStreamParser, body: bytes, edges: list[int]) -> list[SseEvent]:
    ends = [0, *sorted(edges), len(body)]
    events = [event for a, b in pairwise(ends) for event in parser.feed(body[a:b])]
    return events + parser.close()


def message(payload: bytes, headers: bytes = b"") -> bytes:
    prelude = struct.pack("!II", 16 + len(headers) + len(payload), len(headers))
    body = prelude + struct.pack("!I", crc32(prelude)) + headers + payload
    return body + struct.pack("!I", crc32(body))


@pytest.mark.parametrize("body", STREAMS)
def test_botocore_finds_the_same_messages(body: bytes) -> None:
    buffer = EventStreamBuffer()
    buffer.add_data(body)
    events = MessageStreamParser().feed(body)
    at = 0
    for event, theirs in zip(events, buffer, strict=True):
        assert (event.start, event.end) == (at, at + theirs.prelude.total_length)
        at = event.end
        told = theirs.to_response_dict()
        kind = told["headers"].get(":event-type")
        payload: Any = json.loads(told["body"])
        if kind == "chunk":
            assert event.data == base64.b64decode(payload["bytes"])
        elif kind is None:
            assert event.event == b"error"
        else:
            assert (event.event, json.loads(event.data or b"")) == (kind.encode(), payload)
    assert at == len(body)


@UNTIMED
@given(st.sampled_from(STREAMS), st.data())
def test_any_cut_of_a_binary_stream_gives_the_same_events(body: bytes, data: st.DataObject) -> None:
    edges = data.draw(st.lists(st.integers(0, len(body)), max_size=8))
    assert fed(MessageStreamParser(), body, edges) == fed(MessageStreamParser(), body, [])


@UNTIMED
@given(st.sampled_from(STREAMS), st.data())
def test_a_changed_byte_breaks_the_stream_there(body: bytes, data: st.DataObject) -> None:
    at = data.draw(st.integers(0, len(body) - 1))
    changed = bytearray(body)
    changed[at] ^= data.draw(st.integers(1, 255))
    whole = MessageStreamParser().feed(body)
    parser = MessageStreamParser()
    assert parser.feed(bytes(changed)) == [event for event in whole if event.end <= at]
    assert parser.broken
    assert parser.feed(body) == []


PART = bytes((11,)) + b":event-type" + b"\7" + (11).to_bytes(2, "big") + b"PayloadPart"
CONTAINERS = {
    "sse": b'event: token\ndata: {"t":"Hi"}\n\n: alive\n\ndata: {"t":" you"}\n\ndata: [DONE]\n\n',
    "lines": b'{"t":"Hi"}\n{"t":" you"}\n\n{"t":"."}',
}


@pytest.mark.parametrize("kind", CONTAINERS)
@given(data=st.data())
def test_parts_of_a_containers_stream_may_be_cut_anywhere(kind: str, data: st.DataObject) -> None:
    """Invariant: the parts, and the reads, may be cut anywhere; the events are those of the inner stream."""
    body = CONTAINERS[kind]
    inner: SseParser | LineParser = SseParser() if kind == "sse" else LineParser()
    expected = [(event.event, event.data) for event in inner.feed(body) + inner.close()]
    cuts = [0, *sorted(data.draw(st.lists(st.integers(1, len(body) - 1), unique=True))), len(body)]
    wire = b"".join(message(body[a:b], PART) for a, b in pairwise(cuts))
    edges = data.draw(st.lists(st.integers(0, len(wire)), max_size=8))
    parser = MessageStreamParser()
    events = [(event.event, event.data) for event in fed(parser, wire, edges)]
    blank = (None, b"")
    assert [e for e in events if e != blank] == [e for e in expected if e != blank]
    assert (parser.skipped, parser.broken) == (0, False)


def test_parts_that_are_json_values_are_events_each() -> None:
    wire = b"".join(message(b'{"t":"%d"}' % i, PART) for i in range(3)) + message(b"\x00\x01", PART)
    assert [event.data for event in MessageStreamParser().feed(wire)] == [
        b'{"t":"0"}',
        b'{"t":"1"}',
        b'{"t":"2"}',
        b"\x00\x01",
    ]


@given(st.binary(max_size=300))
def test_no_bytes_raise(body: bytes) -> None:
    MessageStreamParser().feed(body)
    MessageStreamParser().feed(message(body))
    MessageStreamParser().feed(message(b"{}", body))
    MessageStreamParser().feed(message(body, PART) * 2)
    ArrayParser().feed(b"[" + body)
    is_message_stream(body)


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)


@UNTIMED
@given(st.lists(st.dictionaries(st.text(max_size=4), VALUES), max_size=4), st.booleans(), st.data())
def test_any_cut_of_an_array_gives_its_elements(values: list[Any], pretty: bool, data: st.DataObject) -> None:
    body = json.dumps(values, indent=1 if pretty else None, ensure_ascii=False).encode("utf-8", "replace")
    edges = data.draw(st.lists(st.integers(0, len(body)), max_size=8))
    events = fed(ArrayParser(), body, edges)
    assert [json.loads(event.data or b"") for event in events] == json.loads(body)
    assert [event.start for event in events] == [0, *(event.end for event in events)][: len(events)]

"""Invariant: any cut of a binary event stream, or of a JSON array, gives the same events; a wrong checksum
ends the stream; botocore's parser finds the same messages."""

import base64
import json
import struct
from itertools import pairwise
from typing import Any
from zlib import crc32

import pytest
from botocore.eventstream import EventStreamBuffer
from hypothesis import given, settings
from hypothesis import strategies as st

from llmtap.protocol.sse import ArrayParser, MessageStreamParser, SseEvent, is_message_stream
from tests.support.data import CORPUS

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


@given(st.binary(max_size=300))
def test_no_bytes_raise(body: bytes) -> None:
    MessageStreamParser().feed(body)
    MessageStreamParser().feed(message(body))
    MessageStreamParser().feed(message(b"{}", body))
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

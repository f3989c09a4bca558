"""What a conversation or a tenant is known by, in every form a request may have."""

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmtap.protocol.http1 import parse_request_head
from llmtap.vantage.relay.experiment_router import (
    body_with,
    headers_with_length,
    named_unit,
    opening_unit,
    set_fields,
)

USER, ANSWER = {"role": "user", "content": "hello"}, {"role": "assistant", "content": "yes?"}
SYSTEM = {"role": "system", "content": "be kind"}
PARTS = {"role": "user", "content": [{"type": "text", "text": "hello"}]}


def opened(body: dict[str, Any], sender: bytes = b"") -> bytes | None:
    return opening_unit(json.dumps(body).encode(), sender)


@pytest.mark.parametrize(
    ("first", "later"),
    [
        ({"messages": [USER]}, {"messages": [USER, ANSWER, {"role": "user", "content": "more"}]}),
        ({"messages": [SYSTEM, USER], "model": "a"}, {"messages": [SYSTEM, USER, ANSWER], "stream": True}),
        ({"messages": [PARTS]}, {"messages": [PARTS, ANSWER]}),
        ({"system": "be kind", "messages": [USER]}, {"system": "be kind", "messages": [USER, ANSWER]}),
        ({"input": [USER]}, {"input": [USER, ANSWER]}),
        ({"instructions": "x", "input": "hello"}, {"instructions": "x", "input": "hello", "n": 1}),
        ({"prompt": "hello"}, {"prompt": "hello", "max_tokens": 1}),
    ],
)
def test_later_requests_of_a_conversation_are_known_by_its_opening(
    first: dict[str, Any], later: dict[str, Any]
) -> None:
    assert opened(first) == opened(later) is not None


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"messages": [USER]}, {"messages": [{"role": "user", "content": "hallo"}]}),
        ({"messages": [SYSTEM, USER]}, {"messages": [USER]}),
        ({"system": "a", "messages": [USER]}, {"system": "b", "messages": [USER]}),
        ({"prompt": "a"}, {"prompt": "b"}),
        ({"input": "a"}, {"input": "b"}),
        ({"instructions": "a", "input": "x"}, {"instructions": "b", "input": "x"}),
    ],
)
def test_other_openings_are_other_conversations(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert opened(one) != opened(other)


def test_two_senders_who_begin_alike_are_two_conversations() -> None:
    assert opened({"messages": [USER]}, b"a") != opened({"messages": [USER]}, b"b")


@pytest.mark.parametrize(
    "body",
    [
        b"", b"[]", b"{", b"{}", b'{"messages":[]}', b'{"messages":{}}', b'{"messages":[1]}',
        b'{"messages":[{"role":"assistant","content":"x"}]}', b'{"messages":' + b"[" * 50_000,
        b'{"input":[]}', b'{"input":""}', b'{"prompt":null}', b'{"input":[' + b"[" * 50_000, b"\xff",
    ],
)  # fmt: skip
def test_where_there_is_no_telling_there_is_none(body: bytes) -> None:
    assert opening_unit(body, b"s") is None


def test_a_named_unit_is_the_first_name_that_is_there() -> None:
    headers = [(b"Host", b"x"), (b"X-B", b" 2 "), (b"x-a", b""), (b"X-C", b"3")]
    assert named_unit(headers, ["x-a", "x-b", "x-c"]) == b"x-b\x002"
    assert named_unit(headers, ["x-c", "x-b"]) == b"x-c\x003"
    assert named_unit(headers, ["x-d"]) is None
    assert named_unit([(b"X-Aa", b"b")], ["x-aa"]) != named_unit([(b"X-A", b"ab")], ["x-a"])


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
SPACE = st.text(" \t\r\n", max_size=2)


@given(st.dictionaries(st.text(), JSON, max_size=5), st.dictionaries(st.text(), JSON, max_size=3), st.data())
def test_other_fields_keep_the_bytes_of_their_values(
    asked: dict[str, Any], fields: dict[str, Any], data: st.DataObject
) -> None:
    raws = {}
    pieces = []
    for name, value in asked.items():
        raw = json.dumps(
            value, ensure_ascii=data.draw(st.booleans()), indent=data.draw(st.sampled_from([None, 1]))
        )
        raws[name] = raw.encode("utf-8", "surrogatepass")
        pieces.append(json.dumps(name) + data.draw(SPACE) + ":" + data.draw(SPACE) + raw)
    try:
        body = ("{" + ",".join(pieces) + "}").encode()
    except UnicodeEncodeError:
        return  # half a surrogate pair is no text
    try:
        set_to = {name: msgspec.Raw(msgspec.json.encode(value)) for name, value in fields.items()}
        changed = body_with(body, set_to)
        assert changed is not None
        found = msgspec.json.decode(changed, type=dict[str, msgspec.Raw])
    except UnicodeEncodeError:
        return
    assert list(found) == [*asked, *(name for name in fields if name not in asked)]
    for name, raw in found.items():
        assert bytes(raw) == bytes(set_to[name]) if name in set_to else raws[name]


@pytest.mark.parametrize("body", [b"", b"[]", b"1", b"null", b'{"a":1', b'{"a":1}x', b"{'a':1}", b"\xff{}"])
def test_what_is_no_object_is_not_changed(body: bytes) -> None:
    assert body_with(body, {"a": msgspec.Raw(b"1")}) is None


def test_of_a_field_that_came_twice_the_last_value_counts() -> None:
    assert body_with(b'{"a":1,"b":2,"a":3}', {"c": msgspec.Raw(b"4")}) == b'{"a":3,"b":2,"c":4}'


def test_header_fields_are_set_whatever_their_case() -> None:
    lines = b"A: 1\r\nx-arm: 2\r\nB: 3\r\nX-ARM: 4\r\nA: 5\r\nConnection: b, X-Arm\r\n"
    head = parse_request_head(b"GET / HTTP/1.1\r\nHost: h\r\n" + lines + b"\r\n")
    set_fields(head, [(b"X-Arm", b"b")])
    assert head.headers == [
        (b"Host", b"h"), (b"A", b"1"), (b"B", b"3"), (b"A", b"5"), (b"Connection", b"b, X-Arm"),
        (b"X-Arm", b"b"),
    ]  # fmt: skip
    assert head.connection == (b"b",)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ([(b"A", b"1"), (b"content-LENGTH", b"9")], [(b"A", b"1"), (b"content-LENGTH", b"7")]),
        ([(b"Content-Length", b"9"), (b"B", b"2")], [(b"Content-Length", b"7"), (b"B", b"2")]),
        ([(b"Trailer", b"X"), (b"transfer-encoding", b"chunked")], [(b"Content-Length", b"7")]),
    ],
)  # fmt: skip
def test_the_length_takes_the_place_of_the_old_framing(
    before: list[tuple[bytes, bytes]], after: list[tuple[bytes, bytes]]
) -> None:
    assert headers_with_length(before, 7) == after

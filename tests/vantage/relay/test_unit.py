"""What a conversation or a tenant is known by, in every form a request may have."""

import json
from typing import Any

import pytest

from llmtap.vantage.relay.experiment_router import named_unit, opening_unit

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

"""Invariant: the pieces of a stream make up its text once, whichever way the server sends it."""

from itertools import accumulate
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmtap.protocol.delta import Delta, TokenSource
from llmtap.protocol.dialects.registry import TABLES
from tests.protocol.dialects.events import encode, event, told

SGLang = TABLES["sglang.native"]


def ev(text: Any, n: int | None = None, finish: Any = None, **more: Any) -> dict[str, Any]:
    return {"text": text, "meta_info": {"finish_reason": finish, "completion_tokens": n}, **more}


def read(*values: Any) -> list[Delta]:
    dialect = SGLang()
    return [dialect.read_event(event(v)) for v in values]


PIECES = st.lists(st.text("ab ", min_size=1, max_size=3), min_size=1, max_size=8)


@given(PIECES)
def test_a_text_that_is_repeated_is_counted_once(pieces: list[str]) -> None:
    assert [d.text for d in read(*(ev(text) for text in accumulate(pieces)))] == pieces


def test_increments_are_told_by_not_being_repeated() -> None:
    pieces = ["The", " cat", " sat", " The cat"]
    assert [d.text for d in read(*(ev(text) for text in pieces))] == pieces


def test_choices_are_kept_apart() -> None:
    deltas = read(ev("a", 1, index=0), ev("x", 1, index=1), ev("ab", 2, index=0), ev("xyz", 3, index=1))
    assert [(d.text, d.choices, d.tokens) for d in deltas] == [
        ("a", (0,), 1),
        ("x", (1,), 1),
        ("b", (0,), 1),
        ("yz", (1,), 2),
    ]


ONE = {"tokens": 1, "token_source": TokenSource.RUNNING_USAGE, "output": True, "choices": (0,)}


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (ev("Hi", 1), {"is": "content", "content": True, "text": "Hi", **ONE}),
        (ev("", 1), {"is": "metadata", **ONE}),
        (ev("", 0), {"is": "metadata"}),
        (ev(None, None, "stop"), {"is": "metadata", "finish_reason": "stop"}),
        (
            ev(
                "", None, {"type": "abort", "message": "m", "status_code": 400, "err_type": "BadRequestError"}
            ),
            {"is": "error", "finish_reason": "abort", "error_type": "BadRequestError", "error_message": "m"},
        ),
        (
            {"error": {"message": "m", "code": 400}},
            {"is": "error", "error_type": "400", "error_message": "m"},
        ),
        ({"text": "Hi"}, {"is": "metadata", "parsed": False}),
        (b"[DONE]", {"is": "done", "done": True}),
        (b"{", {"is": "metadata", "parsed": False}),
    ],
)
def test_what_an_event_says(value: Any, said: dict[str, Any]) -> None:
    assert told(SGLang().read_event(event(value))) == said


def test_whole_answers() -> None:
    one = ev("Hi", 6, {"type": "stop"})
    said = told(SGLang().read_body(encode(one)))
    assert (said["text"], said["finish_reason"], said["counts"]["output"]) == ("Hi", "stop", 6)
    assert "tokens" not in said
    said = told(SGLang().read_body(encode([one, ev("you", 2, {"type": "length"}), 3])))
    assert (said["text"], said["choices"], said["counts"]["output"]) == ("Hiyou", (0, 1), 8)
    assert told(SGLang().read_body(b'{"error":{"message":"m"}}'))["is"] == "error"
    assert [SGLang().read_body(b).parsed for b in (b"[]", b"{}", b"3")] == [False] * 3

"""Invariant: whatever is found, classes come in their order and nothing odd gets in."""

from typing import Any

import msgspec
import pytest

from llmtap.protocol.delta import Delta, EventClass, UsageCounts, Verdict
from llmtap.protocol.dialects.native_shapes import (
    Fields,
    counted,
    figures,
    gather,
    is_object,
    kind_of,
    piece,
)
from llmtap.protocol.dialects.openai_shapes import count
from tests.support.events import event, told

C = EventClass


class Shape(msgspec.Struct):
    type: Any = None
    odd_name: Any = msgspec.field(default=None, name="odd-name")


@pytest.mark.parametrize(
    ("data", "found"),
    [
        (b'{"type":"a","odd-name":[1],"other":{"x":[]}}', ("a", [1])),
        (b'{"type":NaN}', "a float"),
        (b'{"type":"\\ud800"}', ("?", None)),
        (b"{}", (None, None)),
        (b'{"type":' + b"[" * 100_000, None),
        (b'{"other":' + b"[" * 100_000 + b"]" * 100_000 + b"}", None),
        (b"[1]", None),
        (b'{"type":"\xff"}', None),
        (b'{"type":1' + b"0" * 5_000 + b"}", None),
        (b"{", None),
    ],
)
def test_fields_are_read_from_any_bytes(data: bytes, found: Any) -> None:
    shape = Fields(Shape).read(data)
    if found == "a float":
        assert shape is not None and isinstance(shape.type, float)
    else:
        assert (None if shape is None else (shape.type, shape.odd_name)) == found


def test_what_may_be_an_object() -> None:
    assert [is_object(d) for d in (b'{"a"', b" \n{", b"[", b"", b"[DONE]", None)] == [True, True] + [
        False
    ] * 4


def test_an_event_names_itself_or_its_line_does() -> None:
    assert kind_of("a", event({}, b"b")) == "a"
    assert [kind_of(k, event({}, b"b")) for k in (None, 3, "")] == ["b"] * 3
    assert kind_of(None, event({})) == ""


@pytest.mark.parametrize(
    ("value", "n"),
    [(3, 3), (6.0, 6), (0, 0), (-1, None), (1.5, None), (True, None), ("3", None), (1 << 50, None),
     (float("inf"), None), (float("nan"), None)],
)  # fmt: skip
def test_counts(value: Any, n: int | None) -> None:
    assert count(value) == n


def test_nothing_counted_is_no_usage() -> None:
    assert counted(0, None, 4, 4) is None
    assert counted(None, 3.0, cached=2) == UsageCounts(None, 3, None, 2)


def test_figures_leave_out_what_may_be_text() -> None:
    assert figures({"n": 1, "list": ["text"], "word": "eos", "text": "x" * 99, "dict": {"a": 1}}) == {
        "n": 1, "word": "eos", "dict": {"a": 1},
    }  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "text", "audio", "flags"),
    [
        (C.CONTENT, "a", False, {"content": True}),
        (C.CONTENT, " \u00a0\n", False, {"blank": True}),
        (C.CONTENT, "", True, {"content": True}),
        (C.REASONING, " ", False, {"reasoning": True}),
        (C.TOOL_CALL, "{", False, {"tool_call": True}),
        (C.REFUSAL, "no", False, {"refusal": True}),
    ],
)
def test_a_piece_says_the_same_alone_and_gathered(
    kind: EventClass, text: str, audio: bool, flags: dict[str, bool]
) -> None:
    alone = piece(kind, text, (2,), audio=audio)
    said = {"is": kind.name.lower(), "output": True, "choices": (2,), **({"text": text} if text else {})}
    assert told(alone) == said | flags
    if not audio:
        assert gather([(kind, text)], choices=(2,)) == alone


def test_classes_come_in_their_order() -> None:
    delta = gather([(C.REASONING, "r"), (C.CONTENT, "a"), (C.CONTENT, "b")], (C.USAGE, C.DONE))
    assert told(delta) == {
        "is": "content", "also": ["reasoning", "done", "usage"], "output": True, "content": True,
        "reasoning": True, "text": "ab", "choices": (0,),
    }  # fmt: skip
    assert gather() == Delta(C.METADATA)


def test_a_reason_may_be_a_verdict() -> None:
    assert told(gather(reason="stop")) == {"is": "metadata", "finish_reason": "stop"}
    assert told(gather(reason=["stop"])) == {"is": "metadata"}
    filtered, refused = (
        gather(reason="content_filter", signal="why"),
        gather((), (C.USAGE,), reason="refusal"),
    )
    assert (filtered.event_class, filtered.verdict and filtered.verdict.signal) == (C.GUARDRAIL, "why")
    assert (refused.event_class, refused.also) == (C.REFUSAL, (C.USAGE,))
    verdict = Verdict("other")
    assert gather((), (C.DONE,), reason="content_filter", verdict=verdict).verdict is verdict

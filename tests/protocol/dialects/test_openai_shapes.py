"""Invariant: whatever stands where a count, an error or a role is expected, reading it gives an answer."""

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmtap.protocol.delta import Delta, EventClass, TokenSource, UsageCounts, Verdict
from llmtap.protocol.dialects.openai_beside import Beside, add_beside, read_beside, read_failure
from llmtap.protocol.dialects.openai_shapes import (
    CHOICES_MAX,
    Findings,
    RunningCount,
    add_timings,
    read_error,
    read_frame,
    read_json,
    read_usage,
    to_raw,
)
from llmtap.protocol.dialects.shapes import (
    Fields,
    counted,
    figures,
    gather,
)
from llmtap.protocol.sse import SseEvent
from tests.protocol.dialects.events import told

anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


@pytest.mark.parametrize(
    ("usage", "counts"),
    [
        (None, None),
        ([], None),
        ({}, None),
        ({"prompt_tokens": 0, "completion_tokens": 0, "total_tokens": 0}, None),
        ({"prompt_tokens": None, "completion_tokens": None}, None),
        ({"prompt_tokens": 4, "completion_tokens": 0}, UsageCounts(4, 0)),
        ({"input_tokens": 4, "output_tokens": 2}, UsageCounts(4, 2)),
        ({"total_tokens": 6}, UsageCounts()),
        ({"completion_tokens": True, "prompt_tokens": 3.5}, UsageCounts(refused=2)),
        ({"completion_tokens": 10**8, "prompt_tokens": 10**8 + 1}, UsageCounts(None, 10**8, refused=1)),
        ({"completion_tokens": -2, "prompt_tokens": 3}, UsageCounts(3, refused=1)),
        (
            {
                "prompt_tokens": 9,
                "completion_tokens": 8,
                "completion_tokens_details": {"reasoning_tokens": 5},
                "prompt_tokens_details": {"cached_tokens": 0},
            },
            UsageCounts(9, 8, 5, 0),
        ),
        ({"completion_tokens": 8, "reasoning_tokens": 5}, UsageCounts(None, 8, 5)),
        ({"completion_tokens": 8, "prompt_cache_hit_tokens": 2}, UsageCounts(None, 8, None, 2)),
        ({"completion_tokens": 8, "completion_tokens_details": None}, UsageCounts(None, 8)),
    ],
)
def test_usage_under_one_set_of_names(usage: Any, counts: UsageCounts | None) -> None:
    assert read_usage(usage) == counts


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        ("boom", ("error", "boom")),
        ({"message": "m", "type": "t", "code": "c"}, ("c", "m")),
        ({"message": "m", "type": "t", "code": None}, ("t", "m")),
        ({"message": "m", "type": "t", "code": 500}, ("t", "m")),
        ({"message": "m", "code": 502}, ("502", "m")),
        ({"message": ["m"]}, ("error", None)),
        ([1], ("error", None)),
        (None, ("error", None)),
    ],
)
def test_the_telling_part_of_an_error(error: Any, expected: tuple[str, str | None]) -> None:
    assert read_error(error) == expected


def test_json_that_only_the_standard_library_reads() -> None:
    assert read_json(b'{"a": 1e999}') == {"a": float("inf")}
    assert read_json(b'{"a": "\\ud83d"}') == {"a": "?"}
    assert read_json(b'{"\\ud83d": [{"b": "\\udc00x"}]}') == {"?": [{"b": "?x"}]}


@pytest.mark.parametrize("data", [b"", b"{", b"\xff", b"[" * 100_000, b'{"a":' * 100_000])
def test_what_is_no_json_is_none(data: bytes) -> None:
    assert read_json(data) is None


@given(anything)
def test_json_is_read_as_written(value: Any) -> None:
    assert repr(read_json(json.dumps(value).encode())) == repr(json.loads(json.dumps(value)))


@pytest.mark.parametrize(
    ("event", "delta"),
    [
        (SseEvent(0, 9, None, None, True), Delta(EventClass.KEEPALIVE)),
        (SseEvent(0, 9, None, b"ping"), Delta(EventClass.KEEPALIVE)),
        (SseEvent(0, 9, None), Delta(EventClass.METADATA)),
        (SseEvent(0, 9, b""), Delta(EventClass.KEEPALIVE)),
        (SseEvent(0, 9, b" [DONE] "), Delta(EventClass.DONE, done=True)),
        (SseEvent(0, 9, b"[DONE]", b"done"), Delta(EventClass.DONE, done=True)),
        (SseEvent(0, 9, b"hello"), Delta(EventClass.METADATA, parsed=False)),
        (SseEvent(0, 9, b"oh", b"error"), Delta(EventClass.ERROR, error_type="error")),
    ],
)
def test_events_that_are_no_json_object(event: SseEvent, delta: Delta) -> None:
    assert read_frame(event) == delta


def test_token_ids_are_believed_before_logprobs_and_those_before_a_running_count() -> None:
    for ids, logprobs, expected in [
        (3, 2, (3, TokenSource.TOKEN_IDS)),
        (0, 2, (2, TokenSource.LOGPROBS)),
        (0, 0, (5, TokenSource.RUNNING_USAGE)),
    ]:
        findings = Findings()
        findings.choice(0, ids=ids, logprobs=logprobs)
        findings.usage({"completion_tokens": 5}, RunningCount())
        delta = findings.ranked()
        assert (delta.tokens, delta.token_source) == expected


def test_a_count_steps_for_each_choice() -> None:
    count = RunningCount()
    assert [count.step(c, n) for c, n in ((0, 2), (1, 5), (0, 3), (0, 1), (1, 5))] == [2, 5, 1, 0, 0]
    for choice in range(2 * CHOICES_MAX):
        count.step(choice, 1)
    assert count.step(CHOICES_MAX + 7, 4) == 4, "beyond the bound nothing is remembered"


@given(anything)
def test_no_timings_raise(timings: Any) -> None:
    add_timings(Delta(EventClass.CONTENT), timings, (0,), RunningCount())
    to_raw(timings)


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
        (b'{"type":"\xff"}', ("\ufffd", None)),
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


def test_nothing_counted_is_no_usage() -> None:
    assert counted(0, None, 4, 4) is None
    assert counted(None, 3.0, cached=2) == UsageCounts(None, 3, None, 2)


def test_figures_leave_out_what_may_be_text() -> None:
    assert figures({"n": 1, "list": ["text"], "word": "eos", "text": "x" * 99, "dict": {"a": 1}}) == {
        "n": 1, "word": "eos", "dict": {"a": 1},
    }  # fmt: skip


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


def beside(value: Any) -> Beside:
    return read_beside(json.dumps(value).encode())


@pytest.mark.parametrize(
    ("value", "error"),
    [
        ({"error": {"code": 500}}, {"code": 500}),
        ({"error": "m"}, "m"),
        ({"errors": [{"code": 2016}]}, [{"code": 2016}]),
        ({"x_groq": {"id": "r", "error": "over capacity"}}, "over capacity"),
        (
            {"object": "error", "message": "m", "type": "t"},
            {"code": None, "type": "t", "message": "m"},
        ),
        ({"code": "Bad", "message": "m"}, {"code": "Bad", "type": None, "message": "m"}),
        ({"type": "error", "message": "m"}, {"code": None, "type": "error", "message": "m"}),
        ({"code": 0, "message": "fine"}, None),
        ({"code": "success", "message": "fine"}, None),
        ({"code": "Bad", "message": "m", "choices": []}, None),
        ({"type": "message", "message": {"id": "m"}}, None),
        ({"error": None, "errors": []}, None),
        ({}, None),
    ],
)
def test_where_an_error_may_stand(value: dict[str, Any], error: Any) -> None:
    assert beside(value).failure() == error


@pytest.mark.parametrize(
    ("value", "classes"),
    [
        ({"error": {"message": "m"}}, (EventClass.ERROR,)),
        ({"error": {"message": "was flagged"}}, (EventClass.GUARDRAIL, EventClass.ERROR)),
        ({"code": "DataInspectionFailed", "message": "Input"}, (EventClass.GUARDRAIL, EventClass.ERROR)),
        ({"object": "error", "message": "m"}, (EventClass.ERROR,)),
        ({"code": 17, "message": "hello", "data": {}}, None),
        ({"status": "ok"}, None),
        ([1], None),
        (None, None),
    ],
)
def test_failures_of_unknown_dialects(value: Any, classes: tuple[EventClass, ...] | None) -> None:
    delta = read_failure(value)
    assert (None if delta is None else (delta.event_class, *delta.also)) == classes


def test_an_unknown_event_named_error_is_a_failure() -> None:
    for value in ({"code": 17, "message": "m"}, {}, None, "text"):
        delta = read_failure(value, b"error")
        assert delta is not None
        assert delta.event_class is EventClass.ERROR


names = st.sampled_from(
    ["error", "errors", "code", "type", "message", "object", "choices", "usage", "x_groq", "metrics", "nvext",
     "timing", "warnings", "detections", "hook_results", "promptFeedback", "prompt_filter_results",
     "moderation", "latency_checkpoint", "amazon-bedrock-guardrailAction", "time_info", "perf_metrics",
     "total_latency"]
)  # fmt: skip
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(names, inner, max_size=6),
    max_leaves=20,
)


@given(values | st.binary(max_size=20), st.sampled_from([None, b"error", b"x"]), st.booleans())
def test_nothing_beside_raises(value: Any, name: bytes | None, finished: bool) -> None:
    data = value if isinstance(value, bytes) else json.dumps(value).encode()
    findings = Findings()
    add_beside(findings, read_beside(data), data, name, finished=finished)
    assert findings.ranked().event_class not in findings.delta.also
    read_failure(value, name)

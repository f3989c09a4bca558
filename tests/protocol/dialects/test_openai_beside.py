"""Invariant: whatever stands beside the choices, reading it gives an answer; and no error is invented."""

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmtap.protocol.delta import EventClass
from llmtap.protocol.dialects.openai_beside import Beside, add_beside, read_beside, read_failure
from llmtap.protocol.dialects.openai_shapes import Findings

UNTIMED = settings(deadline=None)  # a busy machine is no failure


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


def test_an_event_named_error_is_one() -> None:
    assert beside({"message": "m"}).failure(b"error") == {"code": None, "type": None, "message": "m"}


@pytest.mark.parametrize(
    ("value", "known"),
    [({"hook_results": {}}, True), ({"nvext": {}}, True), ({"promptFeedback": {}}, True),
     ({"amazon-bedrock-invocationMetrics": {}}, True), ({"object": "x", "choices": []}, False), ({}, False)],
)  # fmt: skip
def test_what_is_known(value: dict[str, Any], known: bool) -> None:
    assert beside(value).known is known


def test_the_usage_of_groq_counts_where_there_is_no_other() -> None:
    groq = {"usage": {"completion_tokens": 2}}
    assert beside({"x_groq": groq}).counted() == ({"completion_tokens": 2}, "x_groq.usage")
    assert beside({"x_groq": groq, "usage": {"a": 1}}).counted() == ({"a": 1}, "usage")


def test_times_of_all_who_tell_them() -> None:
    value = {
        "usage": {"total_latency": 0.4, "latency_checkpoint": {"service_ttft_ms": 180}},
        "metrics": {"queue_time_ms": 12.3},
        "time_info": {"prompt_time": 0.003},
        "perf_metrics": {"server-processing-time": "0.139"},
        "nvext": {"timing": {"total_time_ms": 54.61}},
        "amazon-bedrock-invocationMetrics": {"firstByteLatency": 301},
    }
    assert [(t.name, t.ms) for t in beside(value).times()] == [
        ("total", 400.0), ("ttft", 180.0), ("queue", 12.3), ("prefill", 3.0), ("total", 139.0),
        ("total", 54.61), ("ttft", 301.0),
    ]  # fmt: skip


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


@UNTIMED
@given(values | st.binary(max_size=20), st.sampled_from([None, b"error", b"x"]), st.booleans())
def test_nothing_beside_raises(value: Any, name: bytes | None, finished: bool) -> None:
    data = value if isinstance(value, bytes) else json.dumps(value).encode()
    findings = Findings()
    add_beside(findings, read_beside(data), data, name, finished=finished)
    assert findings.ranked().event_class not in findings.delta.also
    read_failure(value, name)

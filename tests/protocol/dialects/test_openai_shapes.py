"""Invariant: whatever stands where a count, an error or a role is expected, reading it gives an answer."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmtap.protocol.delta import Delta, EventClass, UsageCounts
from llmtap.protocol.dialects.openai_choices import add_other_members, failure_of
from llmtap.protocol.dialects.openai_shapes import (
    CHOICES_MAX,
    Findings,
    RunningCount,
    add_timings,
    read_usage,
)
from llmtap.protocol.dialects.shapes import failure_in

anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


@pytest.mark.parametrize(
    ("usage", "counts"),
    [
        ({}, None),
        ({"prompt_tokens": 0, "completion_tokens": 0, "total_tokens": 0}, None),
        ({"input_tokens": 4, "output_tokens": 2}, UsageCounts(4, 2)),
        ({"total_tokens": 6}, UsageCounts()),
        (
            {"prompt_tokens": None, "completion_tokens": None, "input_tokens": 4, "output_tokens": 2},
            UsageCounts(4, 2),
        ),
        (
            {"prompt_tokens": 0, "completion_tokens": 0, "input_tokens": 4, "output_tokens": 2},
            UsageCounts(4, 2),
        ),
        (
            {
                "input_tokens": 4,
                "output_tokens": 2,
                "input_tokens_details": {"cached_tokens": 3},
                "output_tokens_details": {"reasoning_tokens": 1},
            },
            UsageCounts(4, 2, 1, 3),
        ),
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
    ],
)
def test_usage_under_one_set_of_names(usage: Any, counts: UsageCounts | None) -> None:
    assert read_usage(usage) == counts


def test_a_count_steps_for_each_choice() -> None:
    count = RunningCount()
    assert [count.growth(c, n) for c, n in ((0, 2), (1, 5), (0, 3), (0, 1), (1, 5))] == [2, 5, 1, 0, 0]
    for choice in range(2 * CHOICES_MAX):
        count.growth(choice, 1)
    assert count.growth(CHOICES_MAX + 7, 4) == 4, "beyond the bound nothing is remembered"


@given(anything)
def test_no_timings_raise(timings: Any) -> None:
    add_timings(Delta(EventClass.CONTENT), timings, (0,), RunningCount())


@pytest.mark.parametrize(
    ("value", "error"),
    [
        ({"error": {"code": 500}}, {"code": 500}),
        ({"errors": [{"code": 2016}]}, [{"code": 2016}]),
        ({"x_groq": {"id": "r", "error": "over capacity"}}, "over capacity"),
        (
            {"object": "error", "message": "m", "type": "t"},
            {"code": None, "type": "t", "message": "m"},
        ),
        ({"code": "Bad", "message": "m"}, {"code": "Bad", "type": None, "message": "m"}),
        ({"type": "error", "message": "m"}, {"code": None, "type": "error", "message": "m"}),
        ({"code": 0, "message": "fine"}, None),
        ({"code": "Bad", "message": "m", "choices": []}, None),
        ({"type": "message", "message": {"id": "m"}}, None),
        ({}, None),
    ],
)
def test_where_an_error_may_stand(value: dict[str, Any], error: Any) -> None:
    assert failure_of(value) == error


@pytest.mark.parametrize(
    ("value", "name", "classes"),
    [
        ({"error": {"message": "was flagged"}}, None, (EventClass.GUARDRAIL, EventClass.ERROR)),
        ({"object": "error", "message": "m"}, None, (EventClass.ERROR,)),
        ({"code": 17, "message": "hello", "data": {}}, None, None),
        ([1], None, None),
        ({"code": 17, "message": "m"}, b"error", (EventClass.ERROR,)),
        ("text", b"error", (EventClass.ERROR,)),
    ],
)
def test_failures_of_unknown_dialects(
    value: Any, name: bytes | None, classes: tuple[EventClass, ...] | None
) -> None:
    delta = failure_in(value, name)
    assert ((delta.event_class, *delta.also) if delta.parsed else None) == classes


names = st.sampled_from(
    [
        "error",
        "errors",
        "code",
        "type",
        "message",
        "object",
        "choices",
        "usage",
        "x_groq",
        "metrics",
        "nvext",
        "timing",
        "warnings",
        "detections",
        "hook_results",
        "promptFeedback",
        "prompt_filter_results",
        "moderation",
        "latency_checkpoint",
        "amazon-bedrock-guardrailAction",
        "time_info",
        "perf_metrics",
        "total_latency",
    ]
)
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(names, inner, max_size=6),
    max_leaves=20,
)


@given(st.dictionaries(names, values), st.sampled_from([None, b"error", b"x"]), st.booleans())
def test_nothing_beside_raises(value: dict[str, Any], name: bytes | None, finished: bool) -> None:
    findings = Findings()
    add_other_members(findings, value, 100, name, finished=finished)
    assert findings.to_delta().event_class not in findings.delta.also
    failure_in(value, name)

"""Invariant: whatever stands where a count, an error or a role is expected, reading it gives an answer."""

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmtap.protocol.delta import Delta, EventClass, TokenSource, UsageCounts
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
from llmtap.protocol.sse import SseEvent

UNTIMED = settings(deadline=None)  # a busy machine is no failure

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


@UNTIMED
@given(anything)
def test_any_value_can_stand_for_usage_and_error(value: Any) -> None:
    read_usage(value)
    assert isinstance(read_error(value)[0], str)


def test_json_that_only_the_standard_library_reads() -> None:
    assert read_json(b'{"a": 1e999}') == {"a": float("inf")}
    assert read_json(b'{"a": "\\ud83d"}') == {"a": "?"}
    assert read_json(b'{"\\ud83d": [{"b": "\\udc00x"}]}') == {"?": [{"b": "?x"}]}


@pytest.mark.parametrize("data", [b"", b"{", b"\xff", b'{"a":"\xff"}', b"[" * 100_000, b'{"a":' * 100_000])
def test_what_is_no_json_is_none(data: bytes) -> None:
    assert read_json(data) is None


@UNTIMED
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


def test_a_running_count_is_one_that_runs_from_the_first_chunk() -> None:
    count = RunningCount()
    assert count.added([0], UsageCounts(9, 1), running=True) == 1
    assert count.added([0], UsageCounts(9, 4), running=True) == 3
    assert count.added([1], UsageCounts(9, 2), running=True) == 2
    assert count.added([], UsageCounts(9, 6), running=True) == 0
    assert count.added([0, 1], UsageCounts(9, 8), running=True) == 0
    assert count.added([0], UsageCounts(9, 3), running=True) == 0, "it does not run backwards"
    assert count.several
    total = RunningCount()
    assert total.added([0], None, running=False) == 0
    assert total.added([0], UsageCounts(9, 4), running=True) == 0


def ranked(*kinds: EventClass, role: bool = False, reason: str | None = None) -> tuple[EventClass, ...]:
    findings = Findings()
    findings.choice(0, role=role)
    for kind in kinds:
        if kind is EventClass.ERROR:
            findings.error({})
        elif kind is EventClass.USAGE:
            findings.usage({"prompt_tokens": 1, "completion_tokens": 1}, RunningCount())
        else:
            findings.piece(0, kind, "x")
    if reason is not None:
        findings.finish(reason)
    delta = findings.ranked()
    return (delta.event_class, *delta.also)


def test_the_rank_of_classes() -> None:
    c = EventClass
    assert ranked() == (c.METADATA,)
    assert ranked(role=True) == (c.ROLE,)
    assert ranked(role=True, reason="stop") == (c.METADATA, c.ROLE)
    assert ranked(c.CONTENT, role=True) == (c.CONTENT, c.ROLE)
    assert ranked(c.REASONING, c.CONTENT) == (c.CONTENT, c.REASONING)
    assert ranked(c.USAGE, role=True) == (c.USAGE, c.ROLE)
    assert ranked(c.CONTENT, c.USAGE, reason="stop") == (c.CONTENT, c.USAGE)
    assert ranked(c.CONTENT, reason="content_filter") == (c.GUARDRAIL, c.CONTENT)
    assert ranked(c.TOOL_CALL, c.REFUSAL, c.ERROR) == (c.ERROR, c.REFUSAL, c.TOOL_CALL)


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


def test_timings_stamp_and_count_only_what_carries_output() -> None:
    timings = {"predicted_n": 3, "predicted_ms": 31.02, "prompt_ms": 20.1}
    bare, spoken = Delta(EventClass.USAGE), Delta(EventClass.CONTENT, output=True, choices=(0,))
    add_timings(bare, timings, (), RunningCount())
    add_timings(spoken, timings, (0,), RunningCount())
    assert (
        [t.name for t in bare.server_times] == [t.name for t in spoken.server_times] == ["prefill", "decode"]
    )
    assert (bare.server_clock_ns, bare.tokens) == (-1, -1)
    assert (spoken.server_clock_ns, spoken.tokens) == (31_020_000, 3)
    ids = Delta(EventClass.CONTENT, tokens=2, token_source=TokenSource.TOKEN_IDS)
    add_timings(ids, timings, (0,), RunningCount())
    assert (ids.tokens, ids.token_source) == (2, TokenSource.TOKEN_IDS)


@UNTIMED
@given(anything)
def test_no_timings_raise(timings: Any) -> None:
    add_timings(Delta(EventClass.CONTENT), timings, (0,), RunningCount())
    to_raw(timings)


def test_a_choice_that_sent_only_a_marker_is_named_without_output() -> None:
    findings = Findings()
    findings.choice(2)
    findings.marker(2)
    delta = findings.ranked()
    assert (delta.event_class, delta.choices, delta.output) == (EventClass.METADATA, (2,), False)

"""Invariant: only closed words get out of a body; and each form of dialects.md section 7 has its reading.

A time of a server that is no number is left out.
"""

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmtap.protocol.delta import Verdict
from llmtap.protocol.server_times import (
    clock_ns,
    header_times,
    object_times,
    rate_times,
    trailer_times,
)
from llmtap.protocol.verdicts import (
    azure_verdict,
    block_reason_verdict,
    error_verdict,
    filters_verdict,
    finish_reason_verdict,
    guardrail_action_verdict,
    hook_results_verdict,
    moderation_verdict,
    prompt_filter_verdict,
    warnings_verdict,
)


@pytest.mark.parametrize(
    ("reason", "action", "confidence"),
    [
        *(
            (reason, "blocked", "high")
            for reason in (
                "content_filter",
                "sensitive",
                "SAFETY",
                "PROHIBITED_CONTENT",
                "BLOCKLIST",
                "RECITATION",
                "SPII",
                "IMAGE_SAFETY",
                "ERROR_TOXIC",
                "refusal",
            )
        ),
        ("guardrail_intervened", "replaced", "medium"),
        ("content_filtered", "replaced", "medium"),
    ],
)
def test_finish_reasons_that_refuse(reason: str, action: str, confidence: str) -> None:
    verdict = finish_reason_verdict(reason)
    stage = ("output_guardrail", "output") if action == "blocked" else ("guardrail", "unknown")
    assert (verdict.signal, verdict.kind, verdict.phase) == ("finish_reason", *stage)
    assert (verdict.action, verdict.confidence, verdict.value) == (action, confidence, reason)
    assert verdict.substituted == (action == "replaced")


@pytest.mark.parametrize("reason", ["stop", "length", "tool_calls", "error", "network_error", "", "eos"])
def test_finish_reasons_that_do_not(reason: str) -> None:
    assert finish_reason_verdict(reason) is None


def error(**fields: Any) -> dict[str, Any]:
    return {"error": fields}


AZURE = {
    "message": "The response was filtered due to the prompt triggering the content management policy.",
    "code": "content_filter",
    "innererror": {
        "code": "ResponsibleAIPolicyViolation",
        "content_filter_result": {"hate": {"filtered": False}, "violence": {"filtered": True}},
    },
}


ASKED, ANSWERED = ([{"level": 1, "role": role}] for role in ("user", "assistant"))
NO = {"code": "1301", "message": "no"}
FAILING = {"before_request_hooks": [], "after_request_hooks": [{"verdict": False}]}
MODERATED = {"reasons": ["violence"], "flagged_input": "some words of the prompt"}


def known(verdict: Verdict | None) -> str:
    """Signal, phase, and what else a verdict says, as far as it says it."""
    assert verdict is not None and verdict.action == "blocked" and verdict.confidence == "high"
    assert verdict.kind == (verdict.phase and f"{verdict.phase}_guardrail")
    told = (verdict.phase, verdict.value, verdict.path, verdict.category, *(verdict.detail or {}).values())
    return " | ".join([verdict.signal, *(part for part in told if part)])


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (error(**AZURE), "error.code | content_filter | error.code | violence"),
        (
            error(**{**AZURE, "code": "400"}),
            "error.code | ResponsibleAIPolicyViolation | error.innererror.code | violence",
        ),
        (
            error(code="invalid_prompt", message="Invalid prompt: flagged as violating our policy"),
            "error.code | input | invalid_prompt | error.code",
        ),
        (
            error(code="data_inspection_failed", message="Output data may contain inappropriate content."),
            "error.code | output | data_inspection_failed | error.code",
        ),
        (
            {"code": "DataInspectionFailed", "message": "Input data may contain inappropriate content."},
            "error.code | input | DataInspectionFailed | code",
        ),
        ({"contentFilter": ASKED, "error": NO}, "error.code | input | 1301 | error.code"),
        ({"contentFilter": ANSWERED, "error": NO}, "error.code | output | 1301 | error.code"),
        (
            {"success": False, "error": [{"code": 2016, "message": "Prompt blocked due to security"}]},
            "error.code | input | 2016 | error[0].code",
        ),
        (
            {"errors": [{"code": 2017, "message": "Response blocked"}]},
            "error.code | output | 2017 | errors[0].code",
        ),
        (
            error(code=403, message="requires moderation", metadata=MODERATED),
            "error.metadata | input | error.metadata.reasons | violence",
        ),
        (
            {"code": "no permission", "error": "Content violates usage guidelines. SAFETY_CHECK_TYPE_BIO"},
            "error.message | Content violates usage guidelines | SAFETY_CHECK_TYPE_BIO",
        ),
        (
            {**error(type="hooks_failed", message="see hook_results"), "hook_results": FAILING},
            "error.type | output | hooks_failed | error.type",
        ),
        (
            {"code": "900514", "message": {"action": "GUARDRAIL_INTERVENED", "direction": "REQUEST"}},
            "error.message | input | GUARDRAIL_INTERVENED | message.action",
        ),
        (
            error(type="guardrails_violation", code="content_blocked", param="self check input", message="m"),
            "error.type | input | guardrails_violation | error.type | self check input",
        ),
        (
            error(type="guardrails_violation", param={"a": 1}, message="m"),
            "error.type | output | guardrails_violation | error.type",
        ),
        (
            error(message="{'error': 'Violated guardrail policy', 'outputs': ['Sorry']}", code="400"),
            "error.message | Violated guardrail policy",
        ),
        (error(message="Content blocked: keyword 'x'"), "error.message | content blocked"),
        (error(message="Your request was flagged"), "error.message | input | was flagged"),
        (error(message="answer replaced by policy"), "error.message | output | replaced by policy"),
    ],
)
def test_errors_that_are_a_guardrails(value: dict[str, Any], said: str) -> None:
    assert known(error_verdict(value)) == said


@pytest.mark.parametrize(
    "value",
    [
        error(message="Rate limit reached", type="tokens", code="rate_limit_exceeded"),
        error(code=403, metadata={"provider_name": "p"}, message="m"),
        {"error": None},
        {"error": "upstream closed"},
        [],
    ],
)
def test_errors_that_are_not(value: Any) -> None:
    assert error_verdict(value) is None


def test_filters() -> None:
    acting = {"hate": {"filtered": False}, "sexual": {"filtered": True, "detected": True}}
    assert filters_verdict(acting) == Verdict(
        "content_filter_results.filtered", "output_guardrail", "blocked", "output", category="sexual"
    )
    noting = {"a": {"detected": True, "filtered": False}}
    assert filters_verdict(noting) == Verdict(
        "content_filter_results.detected", None, "flagged", "output", category="a"
    )
    strange = filters_verdict({"words of somebody": {"filtered": True}})
    assert strange.category is None
    prompts = [{"content_filter_results": noting}, {"content_filter_results": acting}]
    assert prompt_filter_verdict(prompts) == Verdict(
        "prompt_filter_results.filtered", "input_guardrail", "blocked", "input", category="sexual"
    )
    blocked = [
        {"source_type": "completion", "content_filter_results": noting},
        {
            "source_type": "prompt",
            "blocked": True,
            "content_filter_results": {"jailbreak": {"detected": True}},
        },
    ]
    assert azure_verdict(blocked) == Verdict(
        "content_filters.blocked", "input_guardrail", "blocked", "input", category="jailbreak"
    )
    assert azure_verdict(blocked[:1]) == Verdict(
        "content_filters.detected", None, "flagged", "output", category="a"
    )
    for nothing in ({}, {"error": {"code": "content_filter_error"}}, None, [], {"a": {"filtered": "true"}}):
        assert filters_verdict(nothing) is None


def test_hooks_moderation_and_feedback() -> None:
    hooks = {"before_request_hooks": [{"verdict": True}, {"verdict": False}], "after_request_hooks": None}
    assert hook_results_verdict(hooks) == Verdict(
        "hook_results.before_request_hooks[1].verdict", None, "flagged", "input"
    )
    moderation = {"input": {"results": [{"flagged": True}]}, "output": {"results": [{"flagged": False}]}}
    assert moderation_verdict(moderation) == Verdict(
        "moderation.input.results[0].flagged", None, "flagged", "input"
    )
    assert block_reason_verdict({"blockReason": "SAFETY"}, "promptFeedback") == Verdict(
        "body_field", "input_guardrail", "blocked", "input", value="SAFETY", path="promptFeedback.blockReason"
    )
    assert block_reason_verdict({"block_reason": "BLOCK_REASON_UNSPECIFIED"}, "p") is None
    assert guardrail_action_verdict("NONE") is None
    acted = guardrail_action_verdict("GUARDRAIL_INTERVENED")
    assert acted.substituted


def test_warnings() -> None:
    detections = {"output": [{"results": [{"detection_type": "pii", "text": "a@b.c"}]}]}
    warnings = [{"type": "OTHER"}, {"type": "UNSUITABLE_OUTPUT"}]
    assert warnings_verdict(warnings, detections, answered=False) == Verdict(
        "body_field",
        "output_guardrail",
        "blocked",
        "output",
        value="UNSUITABLE_OUTPUT",
        category="pii",
        path="warnings[1].type",
    )
    flag = warnings_verdict([{"type": "UNSUITABLE_INPUT"}], detections, answered=True)
    assert (flag.kind, flag.action, flag.phase, flag.category) == (None, "flagged", "input", None)


NAMES = [
    "error",
    "errors",
    "code",
    "type",
    "message",
    "param",
    "innererror",
    "content_filter_result",
    "metadata",
    "reasons",
    "flagged_input",
    "hook_results",
    "after_request_hooks",
    "before_request_hooks",
    "verdict",
    "contentFilter",
    "role",
    "x_groq",
    "hate",
    "filtered",
    "detected",
    "results",
    "flagged",
    "input",
    "output",
    "detection_type",
    "blockReason",
    "direction",
    "action",
    "content_filter_results",
    "source_type",
    "blocked",
]
SECRET = "words of somebody"
values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.sampled_from(
        [SECRET, f"was flagged: {SECRET}", "content_filter", "hooks_failed", "REQUEST", "user"]
    ),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(NAMES), inner, max_size=5),
    max_leaves=20,
)


@given(values)
def test_nothing_raises_and_no_text_gets_out(value: Any) -> None:
    found = [
        error_verdict(value),
        filters_verdict(value),
        prompt_filter_verdict(value),
        azure_verdict(value),
        hook_results_verdict(value),
        moderation_verdict(value),
        warnings_verdict(value, value, answered=False),
        guardrail_action_verdict(value),
        block_reason_verdict(value, "p"),
    ]
    assert SECRET not in repr(found)


@pytest.mark.parametrize(
    ("place", "value", "expected"),
    [
        # Fixtures show the usual ones.
        ("usage", {"prompt_tokens": 5, "total_latency": 0.3774}, "total 377.4 usage"),
        ("perf_metrics", {"server-processing-time": "0.139"}, "total 139.0 perf_metrics"),
        (
            "metrics",
            {"queue_time_ms": None, "mean_itl_ms": True, "generation_time_ms": -1},
            "decode -1.0 metrics",
        ),
        (
            "metrics",
            {"queue_time_ms": "soon", "mean_itl_ms": -(10**400), "generation_time_ms": 10**400},
            "decode inf metrics, mean_itl -inf metrics",
        ),
        (
            "perf_metrics",
            {"server-processing-time": "inf", "server-time-to-first-token": "1" * 99},
            "total inf perf_metrics",
        ),
        ("metrics", "none", ""),
    ],
)
def test_objects(place: str, value: Any, expected: str) -> None:
    assert ", ".join(f"{t.name} {t.ms} {t.where}" for t in object_times(place, value)) == expected


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        (b"OpenAI-Processing-Ms", b"142", "total 142.0 ms openai-processing-ms"),
        (
            b"fireworks-server-time-to-first-token",
            b"0.121",
            "ttft 121.0 s fireworks-server-time-to-first-token",
        ),
        (b"x-queue-time", b"long", ""),
        (
            b"Server-Timing",
            b'queue;dur=3.5, cache;desc="hit", gfet4t7; dur=901, ttft;desc="x";dur="7"',
            "queue 3.5 ms server-timing, unnamed 901.0 ms server-timing, ttft 7.0 ms server-timing",
        ),
        (
            b"server-timing",
            b"a;dur=1e999, b;dur=, c;dur=-4, ;",
            "unnamed inf ms server-timing, unnamed -4.0 ms server-timing",
        ),
    ],
)
def test_headers(name: bytes, value: bytes, expected: str) -> None:
    times = header_times([(name, value)])
    told = ", ".join(f"{t.name} {t.ms} {t.unit} {t.where.removeprefix('header:')}" for t in times)
    assert told == expected


@pytest.mark.parametrize(
    ("timings", "clock"),
    [
        ({"predicted_ms": 31.02}, 31_020_000),
        (None, -1),
        ({"predicted_ms": math.nan}, -1),
        ({"predicted_ms": 10**400}, -1),
        ({"predicted_ms": 1e10}, 10**16),
        ({"predicted_ms": 1.1e10}, -1),
    ],
)
def test_the_clock_of_llamacpp(timings: Any, clock: int) -> None:
    assert clock_ns(timings) == clock


@given(st.lists(st.tuples(st.sampled_from([b"server-timing", b"x-queue-time"]), st.binary(max_size=60))))
def test_nothing_in_a_header_raises(headers: list[tuple[bytes, bytes]]) -> None:
    assert all(type(time.ms) is float for time in header_times(headers))
    trailer_times([name + b":" + value for name, value in headers])


STATS = {"prompt_tps": 200.0, "generation_tps": 40.0, "prompt_tokens": 60, "generation_tokens": 9}


@pytest.mark.parametrize(
    ("more", "cached", "expected"),
    [
        ({}, None, {"prefill": 300.0, "decode": 200.0}),
        ({"prefix_cache_hit": "partial"}, 20, {"prefill": 200.0, "decode": 200.0}),
        ({"prefix_cache_hit": "partial"}, None, {"decode": 200.0}),
        ({"prefix_cache_hit": ["none"]}, 0, {"decode": 200.0}),
        ({"generation_tokens": 1}, 0, {"prefill": 300.0}),
        ({"prompt_tps": True, "generation_tokens": "9"}, 0, {}),
        ({"prompt_tokens": 10**400, "generation_tps": 1e-300}, 0, {"decode": pytest.approx(8e303)}),
    ],
)
def test_rates_are_told_as_the_times_behind_them(
    more: dict[str, Any], cached: int | None, expected: dict[str, float]
) -> None:
    assert {t.name: t.ms for t in rate_times({**STATS, **more}, cached)} == expected

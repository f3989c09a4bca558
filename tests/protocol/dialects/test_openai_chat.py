"""Invariant: no bytes make it raise, and a chunk means the same by the short way and by the long one.

Long because one table a subject of a dialect with many vendors.
"""

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmtap.protocol.delta import Delta, EventClass, TokenSource, UsageCounts, Verdict
from llmtap.protocol.dialects.openai_chat import InlineThinking, OpenAIChat
from tests.protocol.dialects.events import event

C = EventClass


TOP = (
    "id",
    "usage",
    "error",
    "moderation",
    "model",
    "timings",
    "hook_results",
    "warnings",
    "x_groq",
    "nvext",
    "time_info",
    "perf_metrics",
    "metrics",
    "amazon-bedrock-guardrailAction",
    "prompt_filter_results",
)


def chunk(delta: Any = None, /, *, index: int = 0, **beside: Any) -> dict[str, Any]:
    """A chunk with one choice; what belongs beside the choices goes there."""
    top = {k: beside.pop(k) for k in TOP if k in beside}
    choice = {"index": index, "delta": {} if delta is None else delta, "finish_reason": None, **beside}
    return {"object": "chat.completion.chunk", "choices": [choice], **top}


def said(delta: Delta) -> Delta:
    """Without the promise about events to come, which is for test_repetition.py."""
    return msgspec.structs.replace(delta, repeatable=False)


def read(*values: Any) -> Delta:
    """What the last of these events says, after the others."""
    dialect = OpenAIChat()
    deltas = [dialect.read_event(event(v)) for v in values]
    return said(deltas[-1])


ROLE = chunk({"role": "assistant", "content": ""})


def thought(text: str) -> Delta:
    return Delta(C.REASONING, output=True, reasoning=True, text=text, choices=(0,))


def call(text: str) -> Delta:
    return Delta(C.TOOL_CALL, output=True, text=text, choices=(0,), tool_call=True)


def filtered(**known: Any) -> Verdict:
    return Verdict("finish_reason", "output_guardrail", "blocked", "output", value="content_filter", **known)


def flagged(signal: str, phase: str = "output", category: str | None = None) -> Verdict:
    return Verdict(signal, None, "flagged", phase, category=category)


def refused(**known: Any) -> Delta:
    verdict = Verdict("delta.refusal", "model_refusal", path="choices[0].delta.refusal")
    return Delta(C.REFUSAL, output=True, text="no", choices=(0,), refusal=True, verdict=verdict, **known)


COUNTED = {"prompt_tokens": 3, "completion_tokens": 2}


def content(text: str, *also: EventClass, choices: tuple[int, ...] = (0,)) -> Delta:
    blank = not text.strip()
    return Delta(C.CONTENT, 0, True, not blank, blank, False, text, choices, also)


@pytest.mark.parametrize(
    ("value", "delta"),
    [
        (ROLE, Delta(C.ROLE)),
        (chunk({"role": "assistant", "content": None}), Delta(C.ROLE)),
        (chunk({"content": "hi"}), content("hi")),
        (chunk({"content": " \n\u00a0\u3000"}), content(" \n\u00a0\u3000")),
        (chunk({"content": "hi", "role": "assistant"}), content("hi", C.ROLE)),
        (chunk({"content": None}), Delta(C.METADATA)),
        (chunk({}, finish_reason="stop"), Delta(C.METADATA, finish_reason="stop")),
        (
            chunk({}, finish_reason="content_filter"),
            Delta(C.GUARDRAIL, finish_reason="content_filter", verdict=filtered()),
        ),
        (chunk({"refusal": "no"}), refused()),
        (chunk({"reasoning": "hm"}), thought("hm")),
        (
            chunk({"reasoning_content": "hm", "content": None}),
            thought("hm"),
        ),
        (
            chunk({"reasoning_content": "hm", "content": "so"}),
            Delta(C.CONTENT, 0, True, True, False, True, "so", (0,), (C.REASONING,)),
        ),
        (
            chunk({"tool_calls": [{"index": 0, "function": {"name": "f", "arguments": ""}}]}),
            call(""),
        ),
        (
            chunk({"tool_calls": [{"function": {"arguments": "{"}}, {"function": {"arguments": "}"}}]}),
            call("{}"),
        ),
        (chunk({"tool_calls": [{"id": "call_1"}]}), Delta(C.TOOL_CALL)),
        (
            chunk({"content": [{"type": "refusal", "refusal": "no"}]}),
            Delta(
                C.REFUSAL,
                output=True,
                text="no",
                choices=(0,),
                refusal=True,
                verdict=Verdict(
                    "content.refusal", "model_refusal", path="choices[0].delta.content[0].refusal"
                ),
            ),
        ),
        (chunk({"function_call": {"arguments": "x"}}), call("x")),
        (chunk({"audio": {"id": "a"}}), Delta(C.METADATA)),
        (chunk({"audio": {"data": "AAAA"}}), Delta(C.CONTENT, output=True, content=True, choices=(0,))),
        (chunk({"audio": {"transcript": " "}}), Delta(C.CONTENT, 0, True, True, False, False, " ", (0,))),
        (
            chunk({"content": [{"type": "thinking", "thinking": [{"type": "text", "text": "hm"}]}]}),
            thought("hm"),
        ),
        (chunk({"content": [{"type": "text", "text": "hi"}]}), content("hi")),
        ({"choices": [], "usage": COUNTED}, Delta(C.USAGE, usage=COUNTED, counts=UsageCounts(3, 2))),
        ({"choices": [], "usage": {"prompt_tokens": 0}}, Delta(C.METADATA)),
        ({"choices": [{"index": 0, "content_filter_offsets": {}}]}, Delta(C.METADATA)),
        ({"choices": [], "moderation": {"input": {"results": [{"flagged": False}]}}}, Delta(C.METADATA)),
        (
            {"choices": [], "moderation": {"output": {"results": [{"flagged": True}]}}},
            Delta(C.GUARDRAIL, verdict=flagged("moderation.output.results[0].flagged")),
        ),
        (
            {"error": {"message": "m", "type": "server_error"}},
            Delta(C.ERROR, error_type="server_error", error_message="m"),
        ),
        ({"error": "m"}, Delta(C.ERROR, error_type="error", error_message="m")),
        (
            {"object": "error", "message": "m", "code": 400},
            Delta(C.ERROR, error_type="400", error_message="m"),
        ),
        (
            {"choices": [{"delta": {"content": ""}, "finish_reason": "error"}], "error": {"code": 502}},
            Delta(C.ERROR, finish_reason="error", error_type="502"),
        ),
        ({}, Delta(C.METADATA, parsed=False)),
        (b'{"choices":', Delta(C.METADATA, parsed=False)),
        (b"[DONE]", Delta(C.DONE, done=True)),
    ],
)
def test_what_a_chunk_says(value: Any, delta: Delta) -> None:
    assert read(value) == delta, "as the first of its stream"
    assert read(ROLE, ROLE, value) == delta, "after others"


def test_token_ids_count_behind_other_text() -> None:
    delta = read(ROLE, chunk({"content": "a"}), chunk({"content": "hi"}, token_ids=[5, 6]))
    assert (delta.text, delta.tokens, delta.token_source) == ("hi", 2, TokenSource.TOKEN_IDS)


def test_the_only_text_in_the_block_of_the_verdict_stands_in_for_the_answer() -> None:
    delta = read(ROLE, chunk({"content": "canned"}, finish_reason="sensitive"))
    assert (delta.event_class, delta.output, delta.text) == (C.GUARDRAIL, False, "")
    assert delta.verdict is not None and (delta.verdict.action, delta.verdict.substituted) == (
        "replaced",
        True,
    )
    after = read(ROLE, chunk({"content": "an"}), chunk({"content": " answer"}, finish_reason="sensitive"))
    assert (after.event_class, after.also, after.output) == (C.GUARDRAIL, (C.CONTENT,), True)
    assert after.verdict is not None and (after.verdict.action, after.verdict.substituted) == (
        "blocked",
        False,
    )


SAFE = {"hate": {"filtered": False, "severity": "safe"}}
DETECTED = {**SAFE, "protected_material_code": {"detected": True, "filtered": False}}
CUT = {**SAFE, "violence": {"filtered": True, "severity": "high"}}


def test_azures_filter() -> None:
    assert read(chunk({"content": "a"}, content_filter_results=SAFE)) == content("a")
    noted = read(ROLE, chunk({"content": "a"}), chunk({"content": "a"}, content_filter_results=DETECTED))
    assert noted.event_class is C.CONTENT
    assert noted.verdict == flagged("content_filter_results.detected", "output", "protected_material_code")
    late = {"choices": [{"index": 0, "finish_reason": None, "content_filter_results": CUT}]}
    for values in ([late], [ROLE, chunk({"content": "a"}), chunk({}, finish_reason="stop"), late]):
        delta = read(*values)
        assert (delta.event_class, delta.parsed) == (C.GUARDRAIL, True)
        assert delta.verdict == Verdict(
            "content_filter_results.filtered", "output_guardrail", "blocked", "output", category="violence"
        )
    cut = read(ROLE, chunk({}, finish_reason="content_filter", content_filter_results=CUT))
    assert cut.verdict == filtered(category="violence")
    prompts = {
        "choices": [],
        "prompt_filter_results": [{"prompt_index": 0, "content_filter_results": DETECTED}],
    }
    first = read(prompts)
    assert (first.event_class, first.parsed) == (C.METADATA, True)
    assert first.verdict == flagged("prompt_filter_results.detected", "input", "protected_material_code")
    failed = {"choices": [], "prompt_filter_results": [{"content_filter_results": {"error": {"code": "x"}}}]}
    assert read(failed).verdict is None


def test_an_error_behind_the_end_is_a_guardrail_that_came_too_late() -> None:
    failure = {"error": {"message": "whatever it says", "type": "None", "code": "400"}}
    early, late = read(ROLE, failure), read(ROLE, chunk({"content": "a"}, finish_reason="stop"), failure)
    assert (early.event_class, early.verdict) == (C.ERROR, None)
    assert (late.event_class, late.also) == (C.GUARDRAIL, (C.ERROR,))
    assert (late.verdict.kind, late.verdict.confidence) == ("output_guardrail", "medium")
    crash = read(ROLE, chunk({}, finish_reason="stop"), {"error": {"message": "m", "code": 500}})
    assert (crash.event_class, crash.verdict) == (C.ERROR, None)


def test_two_choices_in_one_chunk() -> None:
    value = chunk({"content": "a"}, finish_reason="")
    value["choices"].append({"index": 1, "delta": {"content": " "}, "finish_reason": "length"})
    assert read(value) == msgspec.structs.replace(content("a ", choices=(0, 1)), finish_reason="length")


# Thinking inside the content.


def kinds(*pieces: str, reason: str | None = "stop") -> list[str]:
    """Class of each event, with `+` where reasoning goes along and `.` where only a marker was sent."""
    dialect = OpenAIChat()
    values = [ROLE, *(chunk({"content": p}) for p in pieces), chunk({}, finish_reason=reason)]
    out = []
    for delta in (dialect.read_event(event(v)) for v in values):
        mark = "." if delta.choices and not delta.output else ""
        out.append(delta.event_class.name.lower() + "+" * (C.REASONING in delta.also) + mark)
    return out[1:]


@pytest.mark.parametrize(
    ("pieces", "expected"),
    [
        (["<think>", "a", "</think>", "b"], ["metadata.", "reasoning", "metadata.", "content", "metadata"]),
        (["<think>a</think>b", "c"], ["content+", "content", "metadata"]),
        (["\n", "<thought>a", "</thought>b"], ["content", "reasoning", "content", "metadata"]),
        (["<", "b>bold"], ["metadata.", "content", "metadata"]),
        (["<thin"], ["metadata.", "content"]),
        (["<think>a</thi"], ["reasoning", "reasoning"]),
        (["<think>a", "</think>", "<think>b"], ["reasoning", "metadata.", "content", "metadata"]),
    ],
)
def test_thinking_inside_the_content(pieces: list[str], expected: list[str]) -> None:
    assert kinds(*pieces) == expected


# One text, told twice; one answer, begun twice.


def test_a_message_that_repeats_the_deltas_is_passed_over() -> None:
    both = chunk({"content": "b"}, message={"role": "assistant", "content": "ab"})
    assert read(ROLE, chunk({"content": "a"}), both) == content("b")
    alone = {"choices": [{"index": 0, "message": {"content": "ab"}, "finish_reason": "stop"}]}
    assert not read(chunk({"content": "ab"}), alone).output


def again(**top: Any) -> dict[str, Any]:
    return chunk({"role": "assistant", "content": ""}, **top)


def test_another_role_with_another_id_or_model_is_another_attempt() -> None:
    first, text = again(id="A", model="m"), chunk({"content": "a"}, id="A", model="m")
    assert read(first, text, again(id="B", model="m")).retry
    assert read(first, text, again(id="A", model="n")).retry
    assert not read(first, text, again(id="A", model="m")).retry, "a role on every chunk"
    assert not read(first, again(id="B", model="m")).retry, "nothing had been said"
    assert not read(first, text, again(id="B", model="m"), again(id="B", model="m")).retry


# What servers tell of themselves.


def test_a_total_that_has_not_counted_the_first_text_does_not_run_with_it() -> None:
    def step(n: int) -> dict[str, Any]:
        return chunk({"content": "a"}, usage={"prompt_tokens": 1, "completion_tokens": n})

    assert [read(step(0), step(3)).tokens, read(step(1), step(4)).tokens] == [-1, 3]


def test_the_model_is_told_once_and_when_it_changes() -> None:
    first, again, other = (
        chunk({"content": "a"}, model="m"),
        chunk({"content": "b"}, model="m"),
        chunk({"content": "c"}, model="n"),
    )
    assert [read(*s).model for s in ([first], [first, again], [first, again, other])] == ["m", None, "n"]


deltas = st.fixed_dictionaries(
    {},
    optional={
        "content": st.sampled_from(["", " ", "a", "<think>", None]),
        "role": st.sampled_from(["assistant", None]),
        "reasoning_content": st.sampled_from(["", "hm", None]),
        "reasoning": st.sampled_from(["", "hm", None]),
        "refusal": st.sampled_from(["", "no", None]),
        "tool_calls": st.sampled_from(
            [
                None,
                [],
                [{"function": {"name": "f"}}],
                [{"function": {"name": "f", "arguments": "{"}}],
                [{"function": {"arguments": ""}}],
                [{"id": "c"}],
                [{"custom": {"name": "g"}}],
            ]
        ),
    },
)
besides = st.fixed_dictionaries(
    {},
    optional={
        "token_ids": st.sampled_from([None, [], [5, 6]]),
        "content_filter_results": st.sampled_from([{}, SAFE, DETECTED, CUT]),
        "usage": st.sampled_from([None, {}, {"completion_tokens": 0}, {"completion_tokens": 4}]),
        "timings": st.sampled_from([None, {}, {"predicted_n": 3, "predicted_ms": 7.5}]),
    },
)


@given(deltas, besides, st.integers(0, 2), st.booleans(), st.booleans())
def test_the_short_way_and_the_long_way_agree(
    delta: dict[str, Any], beside: dict[str, Any], index: int, spoken: bool, running: bool
) -> None:
    short, long = OpenAIChat(), OpenAIChat()
    usage = {"usage": {"prompt_tokens": 2, "completion_tokens": 0}} if running else {}
    for dialect in (short, long):
        dialect.read_event(event({**ROLE, **usage}))
        if spoken:
            dialect.read_event(event(chunk({"content": "a"}, index=index)))
    value = chunk(delta, index=index, **beside)
    # A moderation that says nothing changes nothing, but is off the short way.
    assert said(short.read_event(event(value))) == long.read_event(event({**value, "moderation": {}}))


def taken_apart(*pieces: str) -> tuple[str, str]:
    thinking = InlineThinking()
    parts = [*(thinking.feed(p) for p in pieces), thinking.close()]
    return "".join(r for r, _ in parts), "".join(c for _, c in parts)


@pytest.mark.parametrize(
    ("text", "reasoning", "content"),
    [
        ("", "", ""),
        ("<think>a</think>b", "a", "b"),
        ("\n <thinking>a</thinking>\n\nb", "a", "\n \n\nb"),
        ("<thought>a</think>b</thought>c", "a</think>b", "c"),
        ("<think>never closed", "never closed", ""),
        ("<think>almost</thin", "almost</thin", ""),
        ("<thin", "", "<thin"),
        ("say <think>b</think>", "", "say <think>b</think>"),
        ("<think>a</think><think>b</think>", "a", "<think>b</think>"),
    ],
)
def test_what_is_thought_and_what_is_said(text: str, reasoning: str, content: str) -> None:
    assert taken_apart(text) == (reasoning, content)
    assert taken_apart(*text) == (reasoning, content), "letter by letter"


pieces = st.lists(
    st.sampled_from(
        ["<think>", "</think>", "<thought>", "</thought>", "<", "</", "th", "ink>", " ", "\n", "a"]
    )
).map("".join)


@given(pieces)
def test_what_is_held_back_is_shorter_than_a_marker(text: str) -> None:
    thinking = InlineThinking()
    out = 0
    for fed, letter in enumerate(text, 1):
        out += sum(map(len, thinking.feed(letter)))
        assert fed - out <= len("<thinking></thinking>")


def test_figures_that_no_count_tells_are_kept_with_the_usage() -> None:
    usage, drafts = {"prompt_tokens": 3, "completion_tokens": 4}, {"num_draft_tokens": 9}
    value = {"choices": [], "usage": usage, "metrics": {"speculative_decoding": drafts}}
    assert OpenAIChat().read_event(event(value)).usage == usage | {"speculative_decoding": drafts}
    assert OpenAIChat().read_event(event(value | {"metrics": [drafts]})).usage == usage

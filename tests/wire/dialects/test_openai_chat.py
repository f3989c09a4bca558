"""Invariant: no bytes make it raise, and a chunk means the same by the short way and by the long one."""

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmtap.wire.delta import Delta, EventClass, TokenSource, UsageCounts
from llmtap.wire.dialects.openai_chat import OpenAIChat
from llmtap.wire.sse import SseEvent

UNTIMED = settings(deadline=None)  # a busy machine is no failure

C = EventClass


def event(value: Any, name: bytes | None = None) -> SseEvent:
    data = value if isinstance(value, bytes) else json.dumps(value).encode()
    return SseEvent(0, len(data) + 8, data, name)


def chunk(delta: Any = None, /, *, index: int = 0, **beside: Any) -> dict[str, Any]:
    """A chunk with one choice; what belongs beside the choices goes there."""
    top = {k: beside.pop(k) for k in ("usage", "error", "moderation", "model") if k in beside}
    choice = {"index": index, "delta": {} if delta is None else delta, "finish_reason": None, **beside}
    return {"object": "chat.completion.chunk", "choices": [choice], **top}


def read(*values: Any) -> Delta:
    """What the last of these events says, after the others."""
    dialect = OpenAIChat()
    deltas = [dialect.read_event(event(v)) for v in values]
    return deltas[-1]


ROLE = chunk({"role": "assistant", "content": ""})


def thought(text: str) -> Delta:
    return Delta(C.REASONING, output=True, reasoning=True, text=text, choices=(0,))


def call(text: str) -> Delta:
    return Delta(C.TOOL_CALL, output=True, text=text, choices=(0,))


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
        (chunk({"content": "hi"}, index=3), content("hi", choices=(3,))),
        (chunk({"content": " \n\u00a0\u3000"}), content(" \n\u00a0\u3000")),
        (chunk({"content": "hi", "role": "assistant"}), content("hi", C.ROLE)),
        (chunk({"content": ""}), Delta(C.METADATA)),
        (chunk({"content": None}), Delta(C.METADATA)),
        (chunk({}, finish_reason="stop"), Delta(C.METADATA, finish_reason="stop")),
        (chunk({}, finish_reason="content_filter"), Delta(C.GUARDRAIL, finish_reason="content_filter")),
        (
            chunk({"content": "canned"}, finish_reason="content_filter"),
            Delta(C.GUARDRAIL, finish_reason="content_filter"),
        ),
        (chunk({"refusal": "no"}), Delta(C.REFUSAL, output=True, text="no", choices=(0,))),
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
        (chunk({"tool_calls": []}), Delta(C.METADATA)),
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
        ({"choices": [], "prompt_filter_results": []}, Delta(C.METADATA)),
        ({"choices": [{"index": 0, "content_filter_offsets": {}}]}, Delta(C.METADATA)),
        ({"choices": [], "moderation": {"input": {"results": [{"flagged": False}]}}}, Delta(C.METADATA)),
        ({"choices": [], "moderation": {"output": {"results": [{"flagged": True}]}}}, Delta(C.GUARDRAIL)),
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
        ({"moderation": {"input": {}}}, Delta(C.METADATA)),
        ({"hook_results": {}}, Delta(C.METADATA, parsed=False)),
        (b'{"choices":', Delta(C.METADATA, parsed=False)),
        (b"[DONE]", Delta(C.DONE, done=True)),
    ],
)  # fmt: skip
def test_what_a_chunk_says(value: Any, delta: Delta) -> None:
    assert read(value) == delta, "as the first of its stream"
    assert read(ROLE, ROLE, value) == delta, "after others"


def test_the_model_is_told_once_and_when_it_changes() -> None:
    first, again, other = (
        chunk({"content": "a"}, model="m"),
        chunk({"content": "b"}, model="m"),
        chunk({"content": "c"}, model="n"),
    )
    assert [read(*s).model for s in ([first], [first, again], [first, again, other])] == ["m", None, "n"]


def test_two_choices_in_one_chunk() -> None:
    value = chunk({"content": "a"})
    value["choices"].append({"index": 1, "delta": {"content": " "}, "finish_reason": "length"})
    delta = read(value)
    assert (delta.event_class, delta.choices, delta.text) == (C.CONTENT, (0, 1), "a ")
    assert (delta.content, delta.blank, delta.finish_reason) == (True, False, "length")


def test_tokens_from_ids_logprobs_and_a_running_count() -> None:
    ids = read(chunk({"content": "a b"}, token_ids=[1, 2]))
    assert (ids.tokens, ids.token_source, ids.event_class) == (2, TokenSource.TOKEN_IDS, C.CONTENT)
    bare = read(ROLE, chunk({}, token_ids=[7]))
    assert (bare.tokens, bare.event_class, bare.output, bare.content) == (1, C.METADATA, True, False)
    together = read(ROLE, chunk({"content": "a", "token_id": 5}))
    assert (together.tokens, together.token_source) == (1, TokenSource.TOKEN_IDS)
    logprobs = read(ROLE, chunk({"content": "a b"}, logprobs={"content": [{"token": "a"}, {"token": " b"}]}))
    assert (logprobs.tokens, logprobs.token_source) == (2, TokenSource.LOGPROBS)
    refused = read(ROLE, chunk({"refusal": "no"}, logprobs={"content": None, "refusal": [{}]}))
    assert (refused.tokens, refused.token_source) == (1, TokenSource.LOGPROBS)
    one, two = (chunk({"content": "x"}, usage={"prompt_tokens": 1, "completion_tokens": n}) for n in (1, 4))
    running = read(one, two)
    assert (running.tokens, running.token_source, running.usage_running) == (
        3,
        TokenSource.RUNNING_USAGE,
        True,
    )
    total = read(ROLE, two)
    assert (total.tokens, total.usage_running) == (-1, False)
    assert total.also == (C.USAGE,)
    late = read(chunk({"content": "a"}), two)
    assert (late.tokens, late.usage_running) == (-1, False), "the first chunk had none"


def test_the_last_count_of_a_running_usage_is_the_total_for_a_single_choice_only() -> None:
    def step(n: int, index: int = 0, reason: str | None = None) -> dict[str, Any]:
        return chunk({"content": "x"}, index=index, usage={"completion_tokens": n}, finish_reason=reason)

    assert not read(step(1), step(2, reason="stop")).usage_running
    assert read(step(1), step(1, 1), step(2, reason="stop")).usage_running


def test_a_whole_answer() -> None:
    body = {
        "object": "chat.completion",
        "model": "m",
        "choices": [{"index": 0, "message": {"role": "assistant", "content": "hi"}, "finish_reason": "stop"}],
        "usage": {"prompt_tokens": 3, "completion_tokens": 2},
    }
    delta = OpenAIChat().read_body(json.dumps(body).encode())
    assert (delta.event_class, delta.also, delta.text) == (C.CONTENT, (C.USAGE, C.ROLE), "hi")
    assert (delta.counts, delta.usage_running, delta.tokens) == (UsageCounts(3, 2), False, -1)
    assert (delta.model, delta.finish_reason) == ("m", "stop")


def test_the_text_of_a_whole_answer_that_was_filtered_is_still_content() -> None:
    body = b'{"choices":[{"message":{"content":"partial"},"finish_reason":"content_filter"}]}'
    delta = OpenAIChat().read_body(body)
    assert (delta.event_class, delta.also, delta.content) == (C.GUARDRAIL, (C.CONTENT,), True)


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (b'{"choices":[{"index":"0","delta":{"content":"a"}}]}', "a"),
        (b'{"choices":[{"delta":{"content":"a"},"finish_reason":7}],"model":9,"usage":"none"}', "a"),
        (b'{"choices":[{"delta":{"content":"a"},"logprobs":[1]}],"big":1e999}', "a"),
        (b'{"choices":[{"delta":{"content":"\\ud83d"},"token_ids":{}}]}', "?"),
        (b'{"choices":[{"delta":{"content":"a"}},"x",null]}', "a"),
        (b' {"choices":[{"delta":{"content":"a"}}]}', "a"),
    ],
)
def test_a_chunk_that_does_not_quite_fit_is_read_as_far_as_it_does(data: bytes, text: str) -> None:
    delta = OpenAIChat().read_event(event(data))
    assert (delta.event_class, delta.text, delta.parsed) == (C.CONTENT, text, True)


def test_named_events() -> None:
    dialect = OpenAIChat()
    assert dialect.read_event(event({"type": "ping"}, b"ping")).event_class is C.KEEPALIVE
    failed = dialect.read_event(event({"message": "m"}, b"error"))
    assert (failed.event_class, failed.error_type) == (C.ERROR, "error")
    failed = dialect.read_event(event({"error": {"type": "t"}}, b"error"))
    assert (failed.event_class, failed.error_type) == (C.ERROR, "t")


FIELDS = [
    "choices", "model", "usage", "error", "moderation", "object", "message", "index", "delta", "content",
    "role", "reasoning_content", "reasoning", "tool_calls", "function", "function_call", "arguments", "name",
    "refusal", "audio", "data", "transcript", "finish_reason", "logprobs", "token_ids", "token_id",
    "completion_tokens", "prompt_tokens", "completion_tokens_details", "reasoning_tokens", "results",
    "flagged", "text", "thinking",
]  # fmt: skip
json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-9, 99)
    | st.floats()
    | st.sampled_from(["", " ", "a", "content_filter"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(FIELDS), inner, max_size=6),
    max_leaves=25,
)


@UNTIMED
@given(st.lists(json_values | st.binary(max_size=12), max_size=4))
def test_nothing_in_a_stream_raises(values: list[Any]) -> None:
    dialect = OpenAIChat()
    for value in values:
        delta = dialect.read_event(event(value))
        assert delta.blank + delta.content <= 1
        assert delta.output == bool(delta.choices)
        assert delta.event_class not in delta.also
        dialect.read_body(event(value).data or b"")


deltas = st.fixed_dictionaries(
    {},
    optional={
        "content": st.sampled_from(["", " ", "a", None]),
        "role": st.sampled_from(["assistant", None]),
        "reasoning_content": st.sampled_from(["", "hm", None]),
        "reasoning": st.sampled_from(["", "hm", None]),
        "refusal": st.sampled_from(["", "no", None]),
        "tool_calls": st.sampled_from([None, [], [{"function": {"name": "f"}}]]),
    },
)


@UNTIMED
@given(deltas, st.integers(0, 2))
def test_the_short_way_and_the_long_way_agree(delta: dict[str, Any], index: int) -> None:
    short, long = OpenAIChat(), OpenAIChat()
    for dialect in (short, long):
        dialect.read_event(event(ROLE))
    value = chunk(delta, index=index)
    # A moderation that says nothing changes nothing, but is off the short way.
    assert short.read_event(event(value)) == long.read_event(event({**value, "moderation": {}}))

"""Invariant: whatever names and shapes a server chooses, its stream gives the same classes and tokens.

A word for each event: its class, behind a colon the text, behind `=` the tokens it declares, `*` where it
carries output.
"""

import json
from typing import Any

import pytest

from llmtap.exchange.answer import AnswerReader
from llmtap.protocol.delta import Delta, EventClass
from tests.protocol.dialects.events import encode

CHAT, INVOKE = "/v1/chat/completions", "/model/x/invoke-with-response-stream"
COMPLETIONS = "/v1/completions"
GEMINI = "/v1beta/models/g:streamGenerateContent"


def word(delta: Delta) -> str:
    assert delta.parsed
    tokens = f"={delta.tokens}" if delta.tokens >= 0 else ""
    text = f":{delta.text}" if delta.text else ""
    return f"{delta.event_class.name.lower()}{text}{tokens}{'*' if delta.output else ''}"


def chunk(delta: dict[str, Any], reason: str | None = None, **beside: Any) -> dict[str, Any]:
    choice = {"index": 0, "delta": delta, "finish_reason": reason}
    return {"object": "chat.completion.chunk", "choices": [choice], **beside}


def text(piece: str | None, **choice: Any) -> dict[str, Any]:
    return {"object": "text_completion", "choices": [{"index": 0, "text": piece, **choice}]}


def counted(n: int, prompt: int = 9) -> dict[str, Any]:
    return {"usage": {"prompt_tokens": prompt if n else 0, "completion_tokens": n}}


def predicted(n: int) -> dict[str, Any]:
    return {"timings": {"predicted_n": n, "predicted_ms": 2.0 * n}}


def native(text: str, n: int, **beside: Any) -> dict[str, Any]:
    return {"content": text, "stop": bool(beside), "tokens": [], **predicted(n), **beside}


def part(**content: Any) -> dict[str, Any]:
    return {"candidates": [{"content": {"role": "model", "parts": [content]}}]}


ROLE = chunk({"role": "assistant", "content": ""})
A, B, END = chunk({"content": "A"}), chunk({"content": "B"}), chunk({}, "stop")
INTERVENED = {"amazon-bedrock-guardrailAction": "INTERVENED"}
NONE = {"amazon-bedrock-guardrailAction": "NONE"}
MARKED = chunk({"content": "A", "extra_content": {"google": {"thought": True}}})
BY_GEMINI = {"model": "google/gemini-3-pro"}
MASKED = {
    "guardrail": {
        "outputAssessments": {
            "g": [{"sensitiveInformationPolicy": {"regexes": [{"name": "email", "action": "ANONYMIZED"}]}}]
        }
    }
}
BLOCKED = {"guardrail": {"input": {"g": {"wordPolicy": {"customWords": [{"action": "BLOCKED"}]}}}}}
METRICS = "amazon-bedrock-invocationMetrics"
LLAMA = {"prompt_token_count": None, "stop_reason": None}


@pytest.mark.parametrize(
    ("path", "events", "words"),
    [
        (
            COMPLETIONS,
            [text("hi"), text(" \n"), text(""), text(None), text("", finish_reason="stop")],
            "content:hi* content: \n* metadata metadata metadata",
        ),
        (COMPLETIONS, [text("canned", finish_reason="content_filter")], "guardrail"),
        (COMPLETIONS, [text("a"), text("b", finish_reason="content_filter")], "content:a* guardrail:b*"),
        (
            COMPLETIONS,
            [
                text("a b", logprobs={"tokens": ["a", " b"]}),
                text("a", token_ids=[4, 5]),
                text("c", content_filter_results={"hate": {"filtered": True}}),
            ],
            "content:a b=2* content:a=2* content:c*",
        ),
        (
            COMPLETIONS,
            [text("a") | counted(0), counted(2), {"error": {"message": "m"}}, "[DONE]"],
            "content:a* usage error done",
        ),
        (
            COMPLETIONS,
            [
                b'{"choices":[{"index":"0","text":"a"}]}',
                b'{"choices":[{"text":"a","logprobs":[],"finish_reason":1}],"model":3,"usage":[]}',
                b'{"choices":[{"text":"a","token_ids":"x"},3],"object":{}}',
            ],
            "content:a* content:a* content:a*",
        ),
        # A count that runs along tells tokens that have no text; the role has none.
        (
            CHAT,
            [{**ROLE, **counted(1)}, {**A, **counted(1)}, chunk({}, **counted(3)), {**END, **counted(4)}],
            "usage content:A=1* usage=2* usage=1*",
        ),
        (
            CHAT,
            [{**A, **counted(0)}, {**B, **counted(0)}, {**END, **counted(3)}],
            "content:A* content:B* usage",
        ),
        (CHAT, [{**A, **counted(1), **BY_GEMINI}, {**B, **counted(4), **BY_GEMINI}], "content:A* content:B*"),
        (
            CHAT,
            [ROLE, {**A, **predicted(1)}, {**B, **predicted(4)}, {**END, **predicted(5)}],
            "role content:A=1* content:B=3* metadata=1*",
        ),
        (CHAT, [ROLE, A, B, {**END, **predicted(5)}], "role content:A* content:B* metadata"),
        (
            "/completion",
            [native("A", 1), native("BC", 3), native("", 4, stop_type="eos")],
            "content:A=1* content:BC=2* metadata=1*",
        ),
        (
            CHAT,
            [
                A,
                {"type": "ping"},
                ("ping", {"at": 1}),
                {"choices": [{"delta": {}, "finish_reason": "stop", **counted(3)}]},
            ],
            "content:A* keepalive keepalive usage",
        ),
        # What acts beside a piece of text is seen, and canned text is no content.
        (CHAT, [A, {**B, "x_groq": {"error": "over capacity"}}], "content:A* error:B*"),
        (CHAT, [A, {**B, **INTERVENED}], "content:A* guardrail"),
        # Masked text is the answer.
        (
            INVOKE,
            [{"outputText": "A {EMAIL}", **INTERVENED, "amazon-bedrock-trace": MASKED}],
            "guardrail:A {EMAIL}*",
        ),
        (CHAT, [{**A, **INTERVENED, "amazon-bedrock-trace": MASKED}], "guardrail:A*"),
        # A part of a call may be empty; audio has no text.
        (
            "/model/x/converse-stream",
            [("contentBlockDelta", {"delta": {"toolUse": {"input": ""}}})],
            "tool_call",
        ),
        (GEMINI, [part(inlineData={"mimeType": "audio/L16", "data": "AA"})], "content*"),
        # One candidate of several is filtered, and not the last one.
        (
            GEMINI,
            [{"candidates": [{"finishReason": "SAFETY"}, {"index": 1, "finishReason": "STOP"}]}],
            "guardrail",
        ),
        # InvokeModel: Nova, Titan, Llama, Mistral.
        (
            INVOKE,
            [
                {"messageStart": {"role": "assistant"}},
                {"contentBlockDelta": {"delta": {"text": "A"}}},
                {"messageStop": {"stopReason": "end_turn"}},
                {"metadata": {"usage": {"outputTokens": 3}}},
            ],
            "role content:A* done usage",
        ),
        (
            INVOKE,
            [
                {"outputText": "A", "inputTextTokenCount": 3},
                {"outputText": "B", "completionReason": "FINISH", "totalOutputTextTokenCount": 2},
            ],
            "content:A* content:B*",
        ),
        (
            INVOKE,
            [
                {**LLAMA, "generation": "A", "generation_token_count": 1},
                {**LLAMA, "generation": "", "generation_token_count": 2, "stop_reason": "stop"},
            ],
            "content:A=1* metadata=1*",
        ),
        (
            INVOKE,
            [{"outputs": [{"text": "A", "stop_reason": None}]}, {"outputText": "x", **INTERVENED}],
            "content:A* guardrail",
        ),
        # A guardrail's action in any of their events.
        (
            INVOKE,
            [
                {"messageStart": {}},
                {"messageStop": {"stopReason": "guardrail_intervened"}},
                {"metadata": {"usage": {"outputTokens": 3}}, **INTERVENED},
            ],
            "role guardrail guardrail",
        ),
        (
            INVOKE,
            [{"messageStart": {}}, {"messageStop": {"stopReason": "end_turn"}, **INTERVENED}],
            "role guardrail",
        ),
        (
            INVOKE,
            [{"messageStart": {}}, {"contentBlockDelta": {"delta": {"text": "A"}}, **INTERVENED}],
            "role guardrail",
        ),
        (
            INVOKE,
            [
                {"messageStart": {}},
                {"contentBlockDelta": {"delta": {"text": "A"}}, **INTERVENED, "amazon-bedrock-trace": MASKED},
            ],
            "role guardrail:A*",
        ),
        (
            INVOKE,
            [
                {"type": "content_block_delta", "delta": {"type": "text_delta", "text": "A"}, **INTERVENED},
                {"type": "message_stop", **INTERVENED},
                {"type": "message_stop", **NONE},
            ],
            "guardrail guardrail done",
        ),
        (INVOKE, [{**LLAMA, "generation": "A", "generation_token_count": 2, **INTERVENED}], "guardrail"),
        (
            INVOKE,
            [
                {"choices": [{"text": "A", "stop_reason": None}]},
                {"choices": [{"text": "", "stop_reason": "stop"}], METRICS: {"outputTokenCount": 2}},
            ],
            "content:A* usage",
        ),
        (INVOKE, [A, {**END, METRICS: {"inputTokenCount": 3, "outputTokenCount": 2}}], "content:A* usage"),
        # Thinking in every spelling; what is encrypted is no text.
        (
            CHAT,
            [
                chunk({"reasoning_text": "A"}),
                chunk({"thinking": "B"}),
                chunk({"reasoning": None, "reasoning_details": [{"text": "C"}, {"summary": "D"}, 3]}),
                chunk({"reasoning": "E", "reasoning_details": [{"text": "E"}]}),
                chunk({"content": "", "reasoning_details": [{"type": "reasoning.encrypted", "data": "x"}]}),
            ],
            "reasoning:A* reasoning:B* reasoning:CD* reasoning:E* metadata",
        ),
        (CHAT, [MARKED, A, MARKED], "reasoning:A* content:A* reasoning:A*"),
        # A tool that is no function has an input; a text that is not UTF-8 is text; an error may be wrapped.
        (
            CHAT,
            [
                chunk({"tool_calls": [{"type": "custom", "custom": {"name": "f", "input": ""}}]}),
                chunk({"tool_calls": [{"custom": {"input": "A"}}]}),
                [{"error": {"code": 503}}],
            ],
            "tool_call* tool_call:A* error",
        ),
        (CHAT, [A, b'{"choices":[{"delta":{"content":"\xff"}}]}'], "content:A* content:\ufffd*"),
        (
            "/v1/messages",
            [{"type": "content_block_delta", "delta": {"type": "compaction_delta", "text": "A"}}],
            "metadata",
        ),
        ("/v2/chat", [{"type": "message-end", "delta": {"finish_reason": "TIMEOUT"}}], "error"),
        # A part of a content that is an object counts once.
        (
            "/v1/conversations",
            [
                {
                    "type": "message.output.delta",
                    "content": {"type": "thinking", "thinking": [{"type": "text", "text": "A"}]},
                },
                {"type": "message.output.delta", "content": {"type": "text", "text": "B"}},
                {"type": "message.output.delta", "content": "C"},
            ],
            "reasoning:A* content:B* content:C*",
        ),
    ],
)
def test_what_a_stream_says(path: str, events: list[Any], words: str) -> None:
    reader = AnswerReader(b"text/event-stream", path)
    body = b""
    for value in events:
        name, said = value if isinstance(value, tuple) else (None, value)
        body += b"event: %b\n" % name.encode() if name else b""
        body += b"data: %b\n\n" % (said.encode() if isinstance(said, str) else encode(said))
    deltas = reader.feed(body) + reader.close(whole=True)
    assert " ".join(map(word, deltas)) == words
    first = next((d for d in deltas if d.output), None)
    assert first is None or first.blank is False


VECTOR = {"embedding": [0.1]}
HEARD = {"text": "Hi", "usage": {"type": "tokens", "input_tokens": 8, "output_tokens": 2}}


@pytest.mark.parametrize(
    ("path", "body", "words", "counts"),
    [
        (
            "/model/amazon.titan-embed-text-v2:0/invoke",
            {**VECTOR, "inputTextTokenCount": 8},
            "usage",
            (8, None),
        ),
        (
            "/api/v1/services/embeddings/text-embedding/text-embedding",
            {"output": {"embeddings": [VECTOR]}, "usage": {"total_tokens": 8}, "request_id": "r"},
            "usage",
            (8, None),
        ),
        (
            "/api/v1/services/rerank/text-rerank/text-rerank",
            {"output": {"results": [{"index": 0}]}, "usage": {"total_tokens": 8}, "request_id": "r"},
            "usage",
            (8, None),
        ),
        (
            "/ml/v1/text/embeddings",
            {"model_id": "m", "results": [VECTOR], "input_token_count": 8},
            "usage",
            (8, None),
        ),
        ("/v1/audio/transcriptions", HEARD, "content:Hi*", (8, 2)),
        (
            "/v1/audio/transcriptions",
            {"text": "Hi", "usage": {"type": "duration", "seconds": 3}},
            "content:Hi*",
            None,
        ),
        (
            "/v1/audio/translations",
            {"task": "translate", "duration": 2.9, "text": "Hi", "segments": []},
            "content:Hi*",
            None,
        ),
    ],
)
def test_the_counts_of_whole_answers_without_choices(
    path: str, body: dict[str, Any], words: str, counts: tuple[int, int | None] | None
) -> None:
    reader = AnswerReader(b"application/json", path)
    [delta] = [*reader.feed(json.dumps(body).encode()), *reader.close(whole=True)]
    assert word(delta) == words
    assert (delta.counts and (delta.counts.input, delta.counts.output)) == counts


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, [{"error": {"code": 400, "message": "no", "status": "INVALID_ARGUMENT"}}]),
        (GEMINI, [{"error": {"code": 400, "message": "no"}}]),
        ("/model/x/converse", {"message": "Too many requests"}),
        (CHAT, {"detail": [{"loc": ["body"], "msg": "field required"}]}),
        ("/x", {"detail": "no"}),
    ],
)
def test_the_body_of_an_error_is_an_error_in_whatever_shape(path: str, body: Any) -> None:
    reader = AnswerReader(b"application/json", path, failed=True)
    assert [word(d) for d in [*reader.feed(json.dumps(body).encode()), *reader.close(whole=True)]] == [
        "error"
    ]
    assert not reader.streamed


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/model/x/invoke", {"output": {"message": {"content": [{"text": "no"}]}}, "stopReason": "end_turn"}),
        ("/model/x/invoke", {"outputs": [{"text": "no", "stop_reason": "stop"}]}),
        ("/model/x/invoke", {"generations": [{"text": "no", "finish_reason": "COMPLETE"}]}),
    ],
)
def test_a_guardrail_acts_in_the_whole_answer_of_any_model(path: str, body: dict[str, Any]) -> None:
    reader = AnswerReader(b"application/json", path)
    (delta,) = [*reader.feed(encode({**body, **INTERVENED})), *reader.close(whole=True)]
    assert (delta.event_class, delta.output, delta.text) == (EventClass.GUARDRAIL, False, "")
    assert (delta.verdict.signal, delta.verdict.substituted) == ("body_field", True)


@pytest.mark.parametrize(
    ("reason", "trace", "signal"),
    [
        ("content_filter", {}, "finish_reason"),
        ("content_filter", BLOCKED, "body_field"),
        ("guardrail_intervened", MASKED, "body_field"),
    ],
)
def test_the_surer_sign_of_a_guardrail_counts(reason: str, trace: Any, signal: str) -> None:
    body = {**chunk({}, reason), **INTERVENED, "amazon-bedrock-trace": trace}
    (delta,) = AnswerReader(b"text/event-stream", CHAT).feed(b"data: %b\n\n" % encode(body))
    assert delta.verdict is not None and delta.verdict.signal == signal


@pytest.mark.parametrize(
    ("events", "usage"),
    [
        (
            [
                {"generation": "A", "prompt_token_count": 4, "generation_token_count": 1},
                {**LLAMA, "generation": "", "generation_token_count": 3, "stop_reason": "stop"},
            ],
            {"prompt_token_count": 4, "generation_token_count": 3},
        ),
        (
            [
                {"outputText": "A", "inputTextTokenCount": 3},
                {"outputText": "B", "completionReason": "FINISH", "totalOutputTextTokenCount": 2},
            ],
            {"inputTextTokenCount": 3, "totalOutputTextTokenCount": 2},
        ),
        (
            [{"inputTextTokenCount": 3, "results": [{"outputText": "A", "tokenCount": 2}]}],
            {"inputTextTokenCount": 3, "tokenCount": 2},
        ),
        (
            [{"outputText": "A", "totalOutputTextTokenCount": 2, METRICS: {"outputTokenCount": 2}}],
            {"outputTokenCount": 2},
        ),
    ],
)
def test_the_counts_of_llama_and_titan_are_a_usage(events: list[Any], usage: dict[str, int]) -> None:
    reader = AnswerReader(b"text/event-stream", INVOKE)
    deltas = reader.feed(b"".join(b"data: %b\n\n" % encode(e) for e in events))
    *_, last = deltas + reader.close(whole=True)
    assert last.usage == usage
    assert last.counts is not None and last.counts.output == list(usage.values())[-1]


def thinking(total: int, **counts: int) -> dict[str, Any]:
    return {
        "usageMetadata": {"promptTokenCount": 9, "thoughtsTokenCount": 8, "totalTokenCount": total, **counts}
    }


@pytest.mark.parametrize(
    ("events", "output"),
    [
        ([part(text="A", thought=True) | thinking(17)], None),
        ([part(text="A", thought=True), {"candidates": [{"finishReason": "MAX_TOKENS"}]} | thinking(17)], 0),
        ([part(text="A"), {"candidates": [{"finishReason": "STOP"}]} | thinking(17)], None),
        ([{"candidates": [{"finishReason": "STOP"}]} | thinking(19)], None),
        ([{"candidates": [{"finishReason": "STOP"}]} | thinking(19, candidatesTokenCount=2)], 2),
    ],
)
def test_gemini_leaves_out_the_count_of_an_answer_of_thoughts_only(
    events: list[Any], output: int | None
) -> None:
    *_, last = AnswerReader(b"text/event-stream", GEMINI).feed(
        b"".join(b"data: %b\n\n" % encode(e) for e in events)
    )
    assert last.counts is not None and (last.counts.output, last.counts.reasoning) == (output, 8)


@pytest.mark.parametrize(("trace", "said"), [({}, "guardrail"), (MASKED, "guardrail:no*")])
def test_a_whole_answer_of_a_guardrail_is_content_only_where_it_masked(trace: Any, said: str) -> None:
    message = {"type": "message", "content": [{"type": "text", "text": "no"}], "stop_reason": "end_turn"}
    body = encode({**message, **INTERVENED, "amazon-bedrock-trace": trace})
    reader = AnswerReader(b"application/json", "/v1/messages")
    (delta,) = [*reader.feed(body), *reader.close(whole=True)]
    assert word(delta) == said
    nova = {"output": {"message": {"content": [{"text": "no"}]}}, "stopReason": "guardrail_intervened"}
    reader = AnswerReader(b"application/json", "/model/x/invoke")
    whole = reader.feed(encode({**nova, **INTERVENED, "amazon-bedrock-trace": trace}))
    assert [word(d) for d in [*whole, *reader.close(whole=True)]] == [said]


def test_the_output_counted_last_is_that_of_a_message_whose_end_counts_none() -> None:
    reader = AnswerReader(b"text/event-stream", "/v1/messages")
    ends = [
        {"delta": {"stop_reason": None}, "usage": {"output_tokens": 3}},
        {"delta": {"stop_reason": "end_turn"}},
    ]
    events = [*({"type": "message_delta", **end} for end in ends), {"type": "message_stop"}]
    *_, stop = reader.feed(b"".join(b"data: %b\n\n" % encode(e) for e in events))
    assert (stop.done, stop.counts and stop.counts.output, stop.usage_running) == (True, 3, False)

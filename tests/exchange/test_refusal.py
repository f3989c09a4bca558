"""Invariant: what acts outranks what flags, signs outrank words, and no words of an answer are kept."""

import json
import re
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmtap.exchange.exchange import Exchange
from llmtap.exchange.interventions import BUILT_IN_SIGNS, TEXT_PATTERNS, RefusalSigns, TextPattern
from llmtap.exchange.observer import Observer
from llmtap.exchange.outcome import EventClass, Outcome
from llmtap.exchange.verdict import ServerTiming, figures_of
from llmtap.protocol.delta import Delta, ServerTime

ROLE = {"role": "assistant", "content": ""}
HOOKS = "hook_results"
APPLIED = {"x-litellm-applied-guardrails": "bedrock-post-call"}


def chunk(delta: dict[str, Any], reason: str | None = None, **beside: Any) -> dict[str, Any]:
    choice = {"index": 0, "delta": delta, "finish_reason": reason, **beside.pop("choice", {})}
    return {"object": "chat.completion.chunk", "choices": [choice], **beside}


def usage(n: int) -> dict[str, Any]:
    return {"choices": [], "usage": {"prompt_tokens": 9, "completion_tokens": n}}


def text(words: str, reason: str | None = None) -> dict[str, Any]:
    return chunk({"content": words}, reason)


STOP = chunk({}, "stop")


def observe(
    *values: Any,
    status: int = 200,
    headers: dict[str, str] | None = None,
    signs: RefusalSigns = BUILT_IN_SIGNS,
    json_body: bool = False,
    outcome: Outcome = Outcome.COMPLETE,
) -> Exchange:
    """The exchange of an event stream, `[DONE]` at its end, or of a JSON body."""
    request = b"POST /v1/chat/completions HTTP/1.1\r\nhost: g\r\ncontent-length: 0\r\n\r\n"
    observer = Observer("r", 1, 0, 0, request, refusal_signs=signs)
    observer.request_end(0)
    observer.on_submit(0, 0)
    fields = {"content-type": "application/json" if json_body else "text/event-stream", **(headers or {})}
    head = f"HTTP/1.1 {status} X\r\n" + "".join(f"{k}: {v}\r\n" for k, v in fields.items()) + "\r\n"
    observer.response_head(head.encode(), 1, 0)
    for i, value in enumerate(values):
        data = json.dumps(value)
        observer.response_data((data if json_body else f"data: {data}\n\n").encode(), 2 + i, 0)
    if outcome is Outcome.COMPLETE:
        if not json_body:
            observer.response_data(b"data: [DONE]\n\n", 90, 0)
        observer.response_end(99)
    return observer.finish(99, outcome.value, None, None, 0, 0, 0, 0)


def public(x: Exchange) -> str:
    """Kind, source and confidence; phase, action and whether it came late; `-` for what is not known."""
    refusal, guardrail = x.refusal or {}, x.guardrail or {}
    result = [refusal.get(key) for key in ("kind", "source", "confidence")]
    result += [guardrail.get(key) for key in ("phase", "action")]
    return " ".join(str(word or "-") for word in result) + " late" * bool(guardrail.get("late"))


BLOCK = {"error": {"message": "Content blocked: keyword", "type": "invalid_request_error", "code": "400"}}


DENIED = {HOOKS: {"before_request_hooks": [{"verdict": False}]}}
FILTERED = chunk({}, choice={"content_filter_results": {"hate": {"filtered": True}}})


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([text("fine"), STOP], "- - - - -"),
        ([chunk({}, "content_filter"), usage(7)], "output_guardrail finish_reason medium output blocked"),
        ([chunk({}, "content_filter"), usage(0)], "input_guardrail finish_reason medium input blocked"),
        # Without usage, the reason alone does not show the stage. Others name it, with and without usage.
        ([chunk({}, "content_filter")], "guardrail finish_reason medium unknown blocked"),
        ([chunk({}, "sensitive")], "output_guardrail finish_reason medium output blocked"),
        ([chunk({}, "sensitive"), usage(0)], "output_guardrail finish_reason medium output blocked"),
        (
            [text("canned"), chunk({}, "guardrail_intervened")],
            "guardrail finish_reason medium unknown replaced",
        ),
        ([text("a"), BLOCK], "output_guardrail stream_error.message high output blocked late"),
        # Before any text: what was asked.
        (
            [{"error": {"message": "m", "code": "1301"}}],
            "input_guardrail stream_error.code high input blocked",
        ),
        (
            [text("a"), {"error": {"message": "m", "code": "1301"}}],
            "output_guardrail stream_error.code high output blocked late",
        ),
        ([DENIED, text("a"), STOP], "- - - input flagged"),
        (
            [DENIED, text("a"), chunk({}, "sensitive")],
            "output_guardrail finish_reason high output blocked late",
        ),
        (
            [chunk({"refusal": "no"}), chunk({}, "content_filter")],
            "model_refusal delta.refusal high output blocked late",
        ),
        (
            [text("a"), FILTERED, STOP],
            "output_guardrail content_filter_results.filtered high output blocked late",
        ),
    ],
)
def test_what_a_stream_says(values: list[Any], expected: str) -> None:
    x = observe(chunk(ROLE), *values)
    assert public(x) == expected
    assert x.outcome is (Outcome.COMPLETE if expected.startswith("-") else Outcome.REFUSED)


def test_an_unknown_stage_has_its_reason() -> None:
    for reason in ("content_filter", "guardrail_intervened"):
        x = observe(chunk(ROLE), chunk({}, reason))
        assert x.refusal is not None and x.no_token_reason == "guardrail"
        assert x.refusal["detail"]["stage"] == "unknown" and x.refusal["detail"]["why"]


@pytest.mark.parametrize("reason", ["content_filter", "guardrail_intervened"])
@pytest.mark.parametrize(
    ("guardrails", "phase"), [("presidio-pre-call", "input"), ("bedrock-post-call", "output")]
)
def test_the_header_of_a_gateway_shows_the_stage_that_the_reason_does_not(
    reason: str, guardrails: str, phase: str
) -> None:
    header = "x-litellm-applied-guardrails"
    x = observe(chunk(ROLE), chunk({}, reason), headers={header: guardrails})
    assert x.refusal is not None and x.guardrail is not None
    assert (x.refusal["kind"], x.guardrail["phase"]) == (f"{phase}_guardrail", phase)
    assert x.refusal["detail"] == {"event": 1, "value": reason, "header": header} | (
        {"substituted": True} if reason == "guardrail_intervened" else {}
    )


def error(message: str = "m", **fields: Any) -> dict[str, Any]:
    return {"error": {"message": message, **fields}}


@pytest.mark.parametrize(
    ("status", "headers", "body", "expected"),
    [
        (400, {}, error(code="1301"), "input_guardrail http_status+code high input"),
        (
            400,
            {"x-litellm-applied-guardrails": "presidio"},
            error("Violated guardrail policy"),
            "input_guardrail error.message high input",
        ),
        (400, APPLIED, error("Content blocked"), "output_guardrail header+error.message high output"),
        (
            403,
            {},
            {"error": "Content violates usage guidelines."},
            "input_guardrail http_status+message high input",
        ),
        (403, {}, error(metadata={"reasons": ["hate"]}), "input_guardrail http_status+metadata high input"),
        (446, {}, {"who": "knows"}, "input_guardrail http_status high input"),
        (
            446,
            {},
            {**error(type="hooks_failed"), HOOKS: {"after_request_hooks": [{"verdict": False}]}},
            "output_guardrail http_status high output",
        ),
        (
            422,
            {},
            {
                "code": "900514",
                "type": "X",
                "message": {"action": "GUARDRAIL_INTERVENED", "direction": "RESPONSE"},
            },
            "output_guardrail error.message high output",
        ),
        (400, {}, error(code="context_length_exceeded"), "-"),
        (400, APPLIED, error("model not found"), "-"),
    ],
)
def test_what_a_status_and_a_body_say(status: int, headers: dict[str, str], body: Any, expected: str) -> None:
    x = observe(body, status=status, headers=headers, json_body=True)
    assert public(x).startswith(expected)
    assert x.outcome is (Outcome.CLIENT_ERROR if expected == "-" else Outcome.REFUSED)
    if x.refusal is not None:
        assert (x.refusal["detail"].get("http_status"), "header" in x.refusal["detail"]) == (
            status,
            bool(headers),
        )


def test_a_hook_that_failed_and_did_not_deny() -> None:
    passed = observe(text("a"), STOP, status=246)
    assert (passed.refusal, passed.outcome) == (None, Outcome.COMPLETE)
    assert passed.guardrail == {"phase": "input", "action": "flagged", "signal": "http_status", "event": 0}
    hooks = {HOOKS: {"after_request_hooks": [{"verdict": False}]}}
    result = observe(chunk(ROLE), text("a"), STOP, hooks, status=246)
    assert result.guardrail == {"phase": "output", "action": "flagged", "signal": "http_status", "event": 3}


def test_an_intervention_says_how_much_had_gone_out() -> None:
    x = observe(chunk(ROLE), text("a"), text("b"), text("c"), chunk({}, "content_filter"))
    assert x.guardrail == {
        "phase": "output",
        "action": "blocked",
        "signal": "finish_reason",
        "event": 4,
        "late": True,
        "tokens_before": 3,
    }
    ids = {"choice": {"token_ids": [1, 2, 3]}}
    x = observe(chunk({"content": "a"}, **ids), chunk({"content": "b"}, **ids), chunk({}, "sensitive"))
    assert x.guardrail["tokens_before"] == 6


# Words.


@pytest.mark.parametrize(
    ("words", "shown"),
    [
        ("I'm sorry, but I can't help with that.", "I'm sorry, but I can't help"),
        ("I\u2019m sorry, I can\u2019t respond to that.", "I\u2019m sorry, I can\u2019t respond to that"),
        ("Sorry, the model cannot answer this question.", "Sorry, the model cannot answer this question"),
        ("As an assistant, I cannot comply with it.", "I cannot comply"),
        ("This violates the acceptable use policy.", r"violates [^\n]{0,80}\b(?:policy|guidelines)\b"),
        ("I cannot find a bug in it.", None),
        ("I'm sorry to hear of your loss. These steps may help.", None),
        ("I am sorry for the confusion. The value is 7.", None),
        ("I'm sorry that you feel so. Please call a friend.", None),
        ("I can't help but admire the question.", None),
        ("I am sorry, that topic is closed.", "I am sorry"),
        ("x" * 200 + " I can't help with that", None),
    ],
)
def test_words_of_a_refusal(words: str, shown: str | None) -> None:
    for pieces in ([words], list(words)):
        x = observe(chunk(ROLE), *map(text, pieces), STOP)
        value = None if x.refusal is None else x.refusal["detail"]["value"]
        assert value == shown
        assert x.outcome is Outcome.COMPLETE


def test_words_count_only_where_the_answer_ended_by_itself() -> None:
    assert observe(text("I can't help you"), chunk({}, "length")).refusal is None
    assert observe(text("I can't help you"), chunk({}, "end_turn")).refusal is not None
    assert observe(chunk({"reasoning": "I can't help you"}), text("so I do"), STOP).refusal is None
    second = chunk({"content": "I can't help you"}, choice={"index": 1})
    assert observe(text("Gladly."), second, STOP).refusal is None


def test_words_are_configured() -> None:
    assert observe(text("I can't help you"), STOP, signs=RefusalSigns(patterns=())).refusal is None
    x = observe(text("nope, my secret"), STOP, signs=RefusalSigns((TextPattern(re.compile("nope, .*")),)))
    assert x.refusal is not None and x.refusal["detail"] == {"value": "nope, .*"}


@given(
    st.lists(
        st.sampled_from(
            [
                "Sorry,",
                "\u017forry, ",
                "I'm SORRY",
                "I am unable",
                " the model cannot answer this question",
                " I can\u2019t respond to that",
                "I cannot help",
                " I WON'T discuss",
                "Content Bloc\u212aed",
                "V\u0131olates our ",
                "policy",
                " guidelines",
                " but",
                " ",
                "\n",
                "\u0130",
                "s",
            ]
        ),
        max_size=6,
    ).map("".join)
)
def test_a_pattern_matches_only_texts_with_one_of_its_words(opening: str) -> None:
    for regex, words in TEXT_PATTERNS:
        if regex.search(opening):
            assert any(word in opening.casefold() for word in words), regex.pattern


OWN_ERRORS = RefusalSigns(error_types=frozenset({"policy_violation"}))
OWN_ERROR = {"error": {"message": "no", "type": "POLICY_violation"}}


@pytest.mark.parametrize(
    ("error", "source"),
    [
        (OWN_ERROR, "http_status+type"),
        ({"error": {"message": "no", "code": "policy_violation", "type": "x"}}, "http_status+type"),
        ({"error": {"message": "no", "code": "x", "type": "policy_violation"}}, "http_status+type"),
        ({"error": {"message": "no", "code": 422, "type": "policy_violation"}}, "http_status+type"),
        ({"error": {"message": "no", "type": "another"}}, None),
        # The guardrails that llmtap knows keep their own sign.
        ({"error": {"message": "no", "code": "content_filter"}}, "http_status+code"),
    ],
)
def test_errors_of_ones_own_guardrail_are_configured(error: Any, source: str | None) -> None:
    x = observe(error, status=422, json_body=True, signs=OWN_ERRORS)
    assert (None if x.refusal is None else x.refusal["source"]) == source
    assert x.outcome is (Outcome.CLIENT_ERROR if source is None else Outcome.REFUSED)
    assert observe(OWN_ERROR, status=422, json_body=True).refusal is None, "nobody named it"


def test_an_error_of_ones_own_guardrail_ends_a_stream() -> None:
    x = observe(text("Gladly"), OWN_ERROR, signs=OWN_ERRORS)
    assert x.refusal is not None and x.guardrail is not None
    assert (x.refusal["kind"], x.refusal["source"]) == ("output_guardrail", "stream_error.type")
    assert x.guardrail["late"]


@given(st.text(max_size=80), st.lists(st.integers(0, 80), max_size=4))
def test_no_words_of_an_answer_are_kept(words: str, edges: list[int]) -> None:
    secret = f"I'm sorry, but I can't help {words} SECRET"
    cuts = [0, *sorted(edges), len(secret)]
    x = observe(*(text(secret[a:b]) for a, b in pairwise(cuts)), STOP)
    assert x.refusal is not None
    assert "SECRET" not in json.dumps(x.to_dict({}, {}, events=True))


def test_of_a_usage_figures_and_words_are_kept() -> None:
    kept = {"prompt_tokens": 9, "share": 0.5, "tier": "default", "none": None, "a": {"b": {"c": {"d": 1}}}}
    dropped = {"note": "a text of several words", "not a name": 1, "huge": 1 << 60, "nan": float("nan")}
    assert figures_of({**kept, **dropped, "list": [1]}) == kept
    assert figures_of({"a": {"b": {"c": {"d": {"e": 1}}}}}) == {"a": {"b": {"c": {}}}}
    assert len(figures_of({f"n{i}": i for i in range(100)})) == 64


def result(*times: ServerTime, clock_ns: int = -1, tokens: int = -1) -> Delta:
    return Delta(EventClass.CONTENT, server_times=times, server_clock_ns=clock_ns, tokens=tokens)


def test_the_last_of_the_same_counts_and_all_places_are_kept() -> None:
    server = ServerTiming()
    server.read_head([(b"Server-Timing", b"queue;dur=3")])
    server.read_event(4, result(ServerTime("decode", 1.0, "timings", "timings.predicted_ms")))
    server.read_event(9, result(ServerTime("decode", 8.0, "timings", "timings.predicted_ms")))
    server.read_event(9, result(ServerTime("total", 9.0, "usage", "usage.total_latency", "s")))
    server.read_trailers([b"server-timing: total;dur=12\r\n"])
    assert server.entries() == [
        {"name": "queue", "ms": 3.0, "where": "header:server-timing", "unit": "ms"},
        {
            "name": "decode",
            "ms": 8.0,
            "where": "timings",
            "unit": "ms",
            "event": 9,
            "path": "timings.predicted_ms",
        },
        {
            "name": "total",
            "ms": 9.0,
            "where": "usage",
            "unit": "s",
            "event": 9,
            "path": "usage.total_latency",
        },
        {"name": "total", "ms": 12.0, "where": "trailer:server-timing", "unit": "ms"},
    ]


@pytest.mark.parametrize(
    ("steps", "gaps"),
    [
        # The clock that went back was set anew, and a thousand million tokens are no gap to share.
        (
            [(20, 1), (50, 1), (-1, -1), (91, 4), (91, -1), (5, 1), (6, 1), (7, 1 << 40)],
            [30, 10, 10, 10, 11, 0, 1],
        ),
        ([(i * 1_024, 1_024) for i in range(300)], [1] * (1 << 18)),
    ],
    ids=["a clock set anew", "too many"],
)
def test_gaps_by_the_servers_clock(steps: list[tuple[int, int]], gaps: list[int]) -> None:
    server = ServerTiming()
    for clock_ns, tokens in steps:
        server.read_event(0, result(clock_ns=clock_ns, tokens=tokens))
    assert list(server.gaps_ns() or ()) == gaps


@given(st.lists(st.text(max_size=4), max_size=200))
def test_a_talkative_server_is_cut_short(names: list[str]) -> None:
    server = ServerTiming()
    for i, name in enumerate(names):
        server.read_event(i, result(ServerTime(name, 1.0, "x")))
    assert len(server.entries() or ()) <= 64

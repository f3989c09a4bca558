"""Invariant: whatever numbers a server tells, no duration of an exchange exceeds the exchange's own, no count
of tokens is negative or above its bound, and no figure differs from that of an answer that tells nothing."""

import json
import math
from collections.abc import Iterator
from itertools import accumulate
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmtap.bench.exo.result import generation_tps, timing_of
from llmtap.exchange.exchange import Exchange
from llmtap.exchange.observer import Observer
from llmtap.exchange.verdict import NEGATIVE, NOT_FINITE, REMOVAL_REASONS, ROUNDING_NS, TOKEN_COUNT, TOO_LONG
from llmtap.metrics.latency import measure
from llmtap.metrics.summary import Summary, clock_disagreement
from llmtap.protocol import server_times
from llmtap.protocol.delta import USAGE_TOKENS_MAX, TokenSource

MS = 1_000_000
SUBMIT_NS, HEAD_NS, STEP_NS, END_NS = 5 * MS, 10 * MS, 20 * MS, 205 * MS
WORDS = ("one", " two", " three", " four")
VALUE = "VALUE"
"""Stands for a hostile value in an answer; hostile values are no JSON that `json.dumps` would write."""

NEVER_A_DURATION = {
    "-1": NEGATIVE,
    "9.9e9": TOO_LONG,
    "1e400": NOT_FINITE,
    "1" + "0" * 400: NOT_FINITE,
    "NaN": NOT_FINITE,
}
NEVER_A_COUNT = ["-1", "1e400", str(USAGE_TOKENS_MAX + 1), "0.5", "NaN", "true", chr(34) + "12" + chr(34)]


def nested(place: str, fields: dict[str, Any]) -> dict[str, Any]:
    for name in reversed(place.split(".")) if place else ():
        fields = {name: fields}
    return fields


def chat(end: dict[str, Any]) -> list[Any]:
    reported = [{"id": "1", "choices": [{"index": 0, "delta": {"content": word}}]} for word in WORDS]
    stop = {"id": "1", "choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}
    return [*reported, {**stop, **end}, "[DONE]"]


def completions(end: dict[str, Any]) -> list[Any]:
    reported = [{"choices": [{"index": 0, "text": word}]} for word in WORDS]
    return [*reported, {"choices": [{"index": 0, "text": "", "finish_reason": "stop"}], **end}, "[DONE]"]


def responses(end: dict[str, Any]) -> list[Any]:
    reported = [{"type": "response.output_text.delta", "delta": word} for word in WORDS]
    if any(key.endswith("_details") for key in end["usage"]):
        end["usage"]["output_tokens"] = 4
    return [*reported, {"type": "response.completed", "response": {"status": "completed", **end}}]


def anthropic(end: dict[str, Any], stop: dict[str, Any] | None = None) -> list[Any]:
    reported = [
        {"type": "content_block_delta", "delta": {"type": "text_delta", "text": word}} for word in WORDS
    ]
    ended = {"type": "message_delta", "delta": {"stop_reason": "end_turn"}, **end}
    return [*reported, ended, {"type": "message_stop", **(stop or {})}]


def bedrock(stop: dict[str, Any]) -> list[Any]:
    return anthropic({}, stop)


def llamacpp(end: dict[str, Any]) -> list[Any]:
    reported = [{"content": word, "stop": False} for word in WORDS]
    return [*reported, {"content": "", "stop": True, "stop_type": "eos", **end}]


def ollama(end: dict[str, Any]) -> list[Any]:
    reported: list[Any] = [
        {"created_at": "d", "message": {"role": "assistant", "content": word}, "done": False}
        for word in WORDS
    ]
    return [*reported, {**reported[0], "done": True, "done_reason": "stop", **end}]


def sglang(end: dict[str, Any]) -> list[Any]:
    reported = [{"text": text, "meta_info": {"finish_reason": None}} for text in accumulate(WORDS)]
    end["meta_info"]["finish_reason"] = {"type": "stop"}
    return [*reported, {"text": "".join(WORDS), **end}]


def lmstudio(end: dict[str, Any]) -> list[Any]:
    reported = [{"type": "message.delta", "content": word} for word in WORDS]
    return [*reported, {"type": "chat.end", **end}]


PATHS = {
    chat: "/v1/chat/completions",
    completions: "/v1/completions",
    responses: "/v1/responses",
    anthropic: "/v1/messages",
    bedrock: "/v1/messages",
    llamacpp: "/completion",
    ollama: "/api/chat",
    sglang: "/generate",
    lmstudio: "/api/v1/chat",
}
DIALECT_OF_PLACE = {
    "": ollama,
    "meta_info": sglang,
    "result.stats": lmstudio,
    "amazon-bedrock-invocationMetrics": bedrock,
}


def times() -> Iterator[Any]:
    """`(dialect, place, key)` of each duration in a body."""
    for place, fields in server_times._OBJECTS.items():
        dialect = DIALECT_OF_PLACE.get(place, chat)
        for key in fields:
            yield pytest.param(dialect, place, key, id=f"{dialect.__name__}-{place}.{key}")
    for key in ("prompt_ms", "predicted_ms"):
        yield pytest.param(llamacpp, "timings", key, id=f"llamacpp-timings.{key}")
    for key in ("prompt_ms", "predicted_ms", "predicted_per_token_ms"):
        yield pytest.param(completions, "timings", key, id=f"completions-timings.{key}")


COUNTS: list[tuple[Any, str, str, dict[str, int]]] = [
    (chat, "usage", "completion_tokens", {"prompt_tokens": 9}),
    (chat, "usage", "prompt_cache_hit_tokens", {"completion_tokens": 4}),
    (completions, "usage", "completion_tokens", {}),
    (responses, "usage.output_tokens_details", "reasoning_tokens", {}),
    (anthropic, "usage", "cache_read_input_tokens", {"output_tokens": 4}),
    (bedrock, "amazon-bedrock-invocationMetrics", "outputTokenCount", {"inputTokenCount": 9}),
    (llamacpp, "", "tokens_predicted", {"tokens_evaluated": 9}),
    (ollama, "", "prompt_eval_count", {"eval_count": 4}),
    (sglang, "meta_info", "cached_tokens", {"completion_tokens": 4}),
    (lmstudio, "result.stats", "total_output_tokens", {"input_tokens": 9}),
]


def observe(dialect: Any, events: list[Any], hostile: str = "0", head: bytes = b"", **ended: Any) -> Exchange:
    """The exchange of an answer whose events came one every 20 ms, from 10 ms to 205 ms after its request."""
    lines = dialect is ollama
    o = Observer("r", 1, 0, 0, f"POST {PATHS[dialect]} HTTP/1.1\r\nhost: g\r\n\r\n".encode())
    o.request_end(0)
    o.on_submit(ended.pop("submit_ns", SUBMIT_NS), 0)
    kind = b"application/x-ndjson" if lines else b"text/event-stream"
    o.response_head(b"HTTP/1.1 200 OK\r\ncontent-type: " + kind + b"\r\n" + head + b"\r\n", HEAD_NS, 0)
    for i, event in enumerate(events, 1):
        data = event if isinstance(event, str) else json.dumps(event).replace(f'"{VALUE}"', hostile)
        text = f"{data}\n" if lines else f"data: {data}\n\n"
        o.response_data(text.encode(), HEAD_NS + i * STEP_NS, 0)
    if (end_ns := ended.pop("end_ns", END_NS)) is not None:
        o.response_end(end_ns)
    outcome, lag_ns = ended.pop("outcome", "complete"), ended.pop("lag_ns", 0)
    assert not ended
    return o.finish(None, outcome, None, None, 0, lag_ns, 0, 0)


def summed(*exchanges: Exchange) -> dict[str, Any]:
    summary = Summary()
    for x in exchanges:
        summary.add(x)
    return summary.to_dict({}, 1.0)


HONEST = observe(
    chat,
    chat(
        {
            "usage": {"completion_tokens": 4, "prompt_tokens": 9},
            "metrics": {"queue_time_ms": 10, "generation_time_ms": 60, "mean_itl_ms": 20},
            "nvext": {"timing": {"ttft_ms": 15, "total_time_ms": 150}},
        }
    ),
)


def other(key: str) -> str:
    """A name of the same length that means nothing to anybody."""
    return "?" * len(key)


@pytest.mark.parametrize(("value", "reason"), list(NEVER_A_DURATION.items()))
@pytest.mark.parametrize(("dialect", "place", "key"), list(times()))
def test_a_duration_that_cannot_be_true_changes_no_figure(
    dialect: Any, place: str, key: str, value: str, reason: str
) -> None:
    summary_ = observe(dialect, dialect(nested(place, {key: VALUE})), value)
    silent = observe(dialect, dialect(nested(place, {other(key): VALUE})), value)
    assert summed(HONEST, summary_) == summed(HONEST, silent)
    assert summary_.server_timing is None and silent.invalid_values is None
    assert summary_.invalid_values == {reason: 1}


@pytest.mark.parametrize("value", ["-1", "NaN", "9.9e9"])
@pytest.mark.parametrize("name", [*server_times._HEADERS, b"server-timing"])
def test_a_header_that_cannot_be_true_changes_no_figure(name: bytes, value: str) -> None:
    text = f"decode;dur={value}" if name == b"server-timing" else value
    summary_ = observe(chat, chat({}), head=name + f": {text}\r\n".encode())
    assert summed(HONEST, summary_) == summed(HONEST, observe(chat, chat({})))
    assert summary_.server_timing is None
    if name != b"server-timing":
        assert sum((summary_.invalid_values or {}).values()) == 1


@pytest.mark.parametrize("value", NEVER_A_COUNT)
@pytest.mark.parametrize(("dialect", "place", "key", "beside"), COUNTS)
def test_a_count_that_is_none_changes_no_figure(
    dialect: Any, place: str, key: str, beside: dict[str, int], value: str
) -> None:
    summary_ = observe(dialect, dialect(nested(place, {**beside, key: VALUE})), value)
    silent = observe(dialect, dialect(nested(place, {**beside, other(key): VALUE})), value)
    assert summed(HONEST, summary_) == summed(HONEST, silent)
    assert summary_.tokens == silent.tokens
    assert (summary_.invalid_values, silent.invalid_values) == ({TOKEN_COUNT: 1}, None)


@pytest.mark.parametrize(
    ("dialect", "usage"),
    [
        (chat, {"usage": {"prompt_tokens": 9, "completion_tokens": 0}}),
        (completions, {"usage": {"prompt_tokens": 9, "completion_tokens": 0}}),
        (responses, {"usage": {"input_tokens": 9, "output_tokens": 0}}),
        (anthropic, {"usage": {"input_tokens": 9, "output_tokens": 0}}),
        (llamacpp, {"tokens_evaluated": 9, "tokens_predicted": 0}),
        (ollama, {"prompt_eval_count": 9, "eval_count": 0}),
        (sglang, {"meta_info": {"prompt_tokens": 9, "completion_tokens": 0}}),
    ],
)
def test_a_usage_without_output_is_no_count_of_an_answer_with_output(
    dialect: Any, usage: dict[str, Any]
) -> None:
    x = observe(dialect, dialect(usage))
    chunks = len(WORDS) + (dialect is ollama)  # The last line of `ollama` has a word, too.
    assert (x.tokens.output, x.tokens.source, x.tokens.input) == (chunks, TokenSource.CHUNKS, 9)
    assert x.invalid_values == {TOKEN_COUNT: 1}


def test_an_answer_without_output_may_have_a_usage_of_none() -> None:
    x = observe(chat, chat({"usage": {"prompt_tokens": 9, "completion_tokens": 0}})[-2:])
    assert (x.tokens.output, x.tokens.source, x.invalid_values) == (0, TokenSource.USAGE, None)


def test_a_sum_of_counts_is_bounded_too() -> None:
    head = b"POST /generate HTTP/1.1\r\nhost: g\r\n\r\n"
    o = Observer("r", 1, 0, 0, head)
    o.on_submit(0, 0)
    o.response_head(b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n\r\n", 1, 0)
    details = {"finish_reason": "length", "generated_tokens": USAGE_TOKENS_MAX, "input_length": 3}
    o.response_data(json.dumps([{"generated_text": "a", "details": details}] * 2).encode(), 2, 0)
    o.response_end(3)
    x = o.finish(None, "complete", None, None, 0, 0, 0, 0)
    assert (x.tokens.output, x.tokens.input, x.invalid_values) == (None, 6, {TOKEN_COUNT: 1})


def test_parts_that_do_not_fit_together_are_all_removed() -> None:
    fits = {"prefill_wait_time_ms": 60, "prefill_time_ms": 60}
    x = observe(chat, chat({"nvext": {"timing": fits}, "metrics": {"generation_time_ms": 80}}))
    assert (len(x.server_timing or ()), x.invalid_values) == (3, None)
    x = observe(
        chat,
        chat(
            {
                "nvext": {"timing": {**fits, "total_time_ms": 150}},
                "metrics": {"generation_time_ms": 84},
                "time_info": {"queue_time": 0.06},
            }
        ),
    )
    assert [entry["name"] for entry in x.server_timing or ()] == ["total"]
    assert x.invalid_values == {TOO_LONG: 4}


def test_a_server_clock_that_runs_ahead_gives_no_gaps() -> None:
    def at(*readings: float) -> Exchange:
        reported = chat({})
        for event, ms in zip(reported, readings, strict=False):
            event["timings"] = {"predicted_ms": ms}
        return observe(chat, reported)

    true = at(1, 21, 41, 61)
    assert list(true.server_gaps_ns or ()) == [20 * MS] * 3
    ahead = at(1, 21, 41, 9.9e9)
    assert ahead.server_gaps_ns is None
    assert ahead.invalid_values == {TOO_LONG: 2}, "the gaps, and the decode time that is the same value"
    assert summed(true, ahead)["metrics"]["itl_server"] == summed(true)["metrics"]["itl_server"]


@pytest.mark.parametrize(
    ("ms", "shown", "beside", "kept"),
    [
        (105.0, 5, {"end_ns": None, "outcome": "upstream_reset"}, True),
        (107.0, 5, {"end_ns": None, "outcome": "upstream_reset"}, False),
        (205.0, 6, {"submit_ns": 300 * MS}, True),
        (207.0, 6, {"submit_ns": 300 * MS}, False),
        (200.0 + ROUNDING_NS / MS, 6, {}, True),
        (201.1, 6, {}, False),
        (201.1, 6, {"lag_ns": MS}, True),
    ],
)
def test_a_duration_is_bounded_by_what_was_seen_and_the_uncertainty(
    ms: float, shown: int, beside: dict[str, Any], kept: bool
) -> None:
    """Without an end by the last event; before the end of the request from its arrival."""
    x = observe(chat, chat({"metrics": {"generation_time_ms": ms}})[:shown], **beside)
    assert (x.server_timing is not None) == kept == (x.invalid_values is None)


numbers = st.floats() | st.integers() | st.floats(0, 1_000) | st.integers(0, 300)


@given(st.data())
def test_no_number_makes_a_duration_longer_than_its_exchange(data: st.DataObject) -> None:
    place, fields = data.draw(st.sampled_from(sorted(server_times._OBJECTS.items(), key=lambda kv: kv[0])))
    dialect = DIALECT_OF_PLACE.get(place, chat)
    summary_ = {key: data.draw(numbers) for key in fields}
    counts = {key: data.draw(numbers) for key in ("prompt_tokens", "completion_tokens", "cached_tokens")}
    events = dialect(nested(place, summary_ | counts))
    if dialect is chat:
        events[-2] |= {"metrics": {key: data.draw(numbers) for key in server_times._OBJECTS["metrics"]}}
        for event in events[:-2]:
            event["timings"] = {"predicted_ms": data.draw(numbers), "predicted_n": data.draw(numbers)}
    x = observe(dialect, events, head=f"x-total-time: {data.draw(numbers)}\r\n".encode())
    lasted_ns = END_NS - SUBMIT_NS
    limit_ns = lasted_ns + ROUNDING_NS
    timing: list[Any] = x.server_timing or []
    assert all(0 <= entry["ms"] <= limit_ns / MS for entry in timing)
    first = {entry["name"]: entry["ms"] for entry in reversed(timing)}
    parts = sum(first.get(name, 0) for name in ("queue", "prefill", "decode"))
    assert parts <= (lasted_ns + 3 * ROUNDING_NS) / MS
    assert sum(x.server_gaps_ns or ()) <= limit_ns
    tokens = (x.tokens.input, x.tokens.output, x.tokens.cached, x.tokens.reasoning)
    assert all(n is None or 0 <= n <= USAGE_TOKENS_MAX for n in tokens)
    assert set(x.invalid_values or ()) <= set(REMOVAL_REASONS)
    m = measure(x)
    assert m.tpot_ns is None or (0 <= m.tpot_ns <= lasted_ns)
    assert all(ns >= -lasted_ns - 2 * ROUNDING_NS for ns in clock_disagreement(x, m).values())
    rate = generation_tps(x.tokens.output, timing_of(x).decode_s)
    assert rate is None or (rate > 0 and math.isfinite(rate))


@pytest.mark.parametrize(
    ("value", "ns"),
    [
        ("250", 250 * MS),
        ("0.5", MS // 2),
        ("3600000", 3_600_000 * MS),
        ("3600001", None),
        ("0", None),
        ("-1", None),
        ("1e-9", None),
        ("1e308", None),
        ("NaN", None),
        ("Infinity", None),
        ("soon", None),
        ("9" * 400, None),
    ],
)
def test_the_objectives_of_a_client_are_bounded(value: str, ns: int | None) -> None:
    head = (
        f"POST /x HTTP/1.1\r\nhost: g\r\nx-llm-d-slo-ttft-ms: {value}\r\nx-llm-d-slo-tpot-ms: {value}\r\n\r\n"
    )
    x = Observer("r", 1, 0, 0, head.encode()).finish(None, "complete", None, None, 0, 0, 0, 0)
    assert (x.slo_ttft_ns, x.slo_tpot_ns) == (ns, ns)

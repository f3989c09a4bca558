"""Every recorded dialect, played through the observer at every read size, against what it should say.

Invariant: only where blocks end and when their last byte came decides a time; how the bytes between
were cut does not.
"""

import json
import random
from functools import cache
from typing import Any
from unittest import mock

import pytest

from llmtap.exchange.exchange import Exchange
from llmtap.exchange.observer import Observer
from llmtap.exchange.outcome import UPSTREAM_FAILED, EventClass, Outcome, TokenSource
from llmtap.exchange.verdict import ROUNDING_NS
from llmtap.metrics.latency import measure
from llmtap.protocol import repetition
from llmtap.protocol.dialects.registry import DIALECTS
from tests.support.data import CORPUS

NAMES = sorted(p.stem for p in CORPUS.glob("*.json"))
MS = 1_000_000


@cache
def load(name: str) -> tuple[dict[str, Any], bytes]:
    doc = json.loads((CORPUS / f"{name}.json").read_text(encoding="utf-8"))
    return doc, (CORPUS / doc["body"]["file"]).read_bytes()


def reads_of(doc: dict[str, Any], body: bytes) -> list[tuple[int, bytes]]:
    """`(t_ns, bytes)` of the reads as recorded."""
    return [(round(c["t_ms"] * MS), body[c["off"] : c["off"] + c["n"]]) for c in doc["chunks"]]


def cut_every(size: int, reads: list[tuple[int, bytes]]) -> list[tuple[int, bytes]]:
    return [(t, data[i : i + size]) for t, data in reads for i in range(0, len(data), size)]


def cut_at_random(seed: int, reads: list[tuple[int, bytes]]) -> list[tuple[int, bytes]]:
    """Cut anywhere, some of the pieces empty."""
    rng = random.Random(seed)
    out = []
    for t, data in reads:
        edges = sorted(rng.choices(range(len(data) + 1), k=rng.randrange(5)))
        out += [(t, data[a:b]) for a, b in zip([0, *edges], [*edges, len(data)], strict=True)]
    return out


def play(doc: dict[str, Any], reads: list[tuple[int, bytes]], *, chunked: bool) -> Exchange:
    """The exchange of a fixture whose body came in these reads."""
    request, response = doc["request"], doc["response"]
    body = json.dumps(request["body"]).encode()
    head = (
        f"{request['method']} {request['path']} HTTP/1.1\r\nhost: gateway\r\ncontent-length: {len(body)}\r\n"
    )
    observer = Observer("relay", 1, 0, 0, head.encode() + b"\r\n")
    observer.request_data(body, 0)
    observer.request_end(0)
    observer.on_submit(0, 0)
    fields = [f"{k}: {v}\r\n" for k, v in response["headers"]]
    if chunked:
        fields.append("transfer-encoding: chunked\r\n")
    head = f"HTTP/1.1 {response['status']} {response['reason']}\r\n{''.join(fields)}\r\n"
    observer.response_head(head.encode(), round(response["headers_ms"] * MS), 0)
    for t_ns, data in reads:
        if chunked and data:
            # Extensions that are longer than the payload have a limit (`EXTENSION_BYTES_MAX`).
            extension = b";ext=1" if len(data) > 6 else b""
            data = b"%x%b\r\n%b\r\n" % (len(data), extension, data)
        observer.response_data(data, t_ns, 0)
    clean = response["end"] == "clean"
    end_ns = round(response["end_ms"] * MS)
    if clean:
        if chunked:
            trailers = "".join(f"{k}: {v}\r\n" for k, v in response.get("trailers", []))
            observer.response_data(b"0\r\nx-other: 1\r\n" + trailers.encode() + b"\r\n", end_ns, 0)
        observer.response_end(end_ns)
    outcome = Outcome.COMPLETE if clean else Outcome.UPSTREAM_RESET
    return observer.finish(end_ns, outcome.value, None, None, 0, 0, len(body), 0)


def ns(ms: float | None) -> int | None:
    return None if ms is None else round(ms * MS)


def classes(x: Exchange) -> list[str]:
    return [EventClass(c).name.lower() for c in x.timeline.events.classes]


def check(name: str, x: Exchange, doc: dict[str, Any], *, chunked: bool) -> None:
    expect = doc["expect"]
    events = expect["events"]
    t = x.timeline
    assert t.first_byte_ns == ns(expect["first_byte_ms"])
    assert classes(x) == [e["class"] for e in events]
    assert list(t.events.sizes) == [e["end"] - e["start"] for e in events]
    assert [n if n > 0 else None for n in t.events.tokens] == [e.get("tokens") or None for e in events]
    if name != "sse_single_newline":  # the corpus allows late_ok: a reader that waits for the blank line
        assert t.first_any_ns == ns(expect["first_any_ms"])
        assert list(t.events.t_ns) == [ns(e["t_ms"]) for e in events]
    for point, field in POINTS.items():
        assert getattr(t, field) == ns(expect[point]), point
    reason = expect["finish_reason"]
    assert x.finish_reason in (reason.values() if isinstance(reason, dict) else [reason])
    # Every request asks for a stream; an error in place of one counts as one.
    failed = x.outcome in UPSTREAM_FAILED and x.timeline.first_token_ns is None
    assert x.stream == (doc["body"]["framing"] != "json" or failed)
    assert x.unparsed_events == 0
    assert x.padded == (name in PADDED)
    assert (x.model is None) == (name in NAMELESS)
    check_tokens(name, x, expect)
    check_outcome(x, doc)
    check_refusal(x, expect)
    # Three of the files have chunk times that are shorter than what their server tells.
    limit_ms = doc["response"]["end_ms"] + ROUNDING_NS / MS
    due = [
        t
        for t in expect["server_timing"]
        if t["ms"] <= limit_ms and (chunked or not t["where"].startswith("trailer:"))
    ]
    assert (x.invalid_values is not None) == (name in TOO_SHORT)
    assert sorted(x.server_timing or [], key=in_order) == sorted(due, key=in_order)


TOO_SHORT = {"ollama_native_chat", "sambanova_usage_rates", "sglang_generate_cumulative"}
PADDED = {
    "openai_chat_basic",
    "responses_basic",
    "responses_function_call",
    "responses_hosted_tools",
    "responses_reasoning_summary",
}
END_CERTAIN = {dialect().name: getattr(dialect(), "end_certain", False) for dialect in DIALECTS}
NAMELESS = {
    "sglang_generate_cumulative",
    "sglang_generate_incremental",
    "tgi_generate_stream",
    "vercel_data",
}
"""Neither request nor answer names a model."""
INPUT_AT_THE_START = {
    "anthropic_basic": 12,
    "anthropic_refusal": 31,
    "anthropic_thinking_tool": 380,
    "anthropic_bedrock_guardrail": 14,
    "bedrock_invoke_anthropic": 14,
}
"""Tokens of input that the usage at the end leaves out, because the start had counted them."""
POINTS = {
    "first_token_ms": "first_token_ns",
    "first_reasoning_ms": "first_reasoning_ns",
    "first_content_ms": "first_content_ns",
    "first_tool_ms": "first_tool_call_ns",
    "first_refusal_ms": "first_refusal_ns",
    "last_token_ms": "last_token_ns",
}


def in_order(timing: dict[str, Any]) -> list[str]:
    return [timing["where"], timing["name"]]


SOURCES = {
    "usage.final": TokenSource.USAGE,
    "usage_delta": TokenSource.RUNNING_USAGE,
    "server_count": TokenSource.USAGE,
    "eval_count": TokenSource.USAGE,
    "details.generated_tokens": TokenSource.USAGE,
    "token_ids": TokenSource.TOKEN_IDS,
    "logprobs": TokenSource.LOGPROBS,
    "chunk_count": TokenSource.CHUNKS,
    "none": TokenSource.NONE,
}


def check_tokens(name: str, x: Exchange, expect: dict[str, Any]) -> None:
    count = expect["output_tokens_from"]
    if count is not None and count["from"] != "unknown":
        assert x.tokens.source is SOURCES[count["from"]]
        assert (x.tokens.output or 0) == count["n"] == expect["output_tokens"]
    usage = expect["usage"]
    if usage is None:
        assert x.usage is None
        return
    counts = usage["normalized"]
    assert x.tokens.input == counts.get("prompt_tokens", INPUT_AT_THE_START.get(name))
    assert (x.tokens.reasoning or 0) == counts.get("reasoning_tokens", 0)
    assert (x.tokens.cached or 0) == counts.get("cached_tokens", 0)


def check_outcome(x: Exchange, doc: dict[str, Any]) -> None:
    expect = doc["expect"]
    error = expect["error"]
    # Words alone are no proof: such an answer came about as any other.
    refused = expect["refusal"] != "none" and expect["refusal_detail"]["confidence"] != "low"
    if doc["response"]["end"] != "clean":
        assert x.outcome is Outcome.UPSTREAM_RESET
    elif refused:
        assert x.outcome is Outcome.REFUSED
    elif error:
        assert x.outcome is Outcome.UPSTREAM_ERROR
        assert x.error is not None
    else:
        assert x.outcome is Outcome.COMPLETE
        assert expect["end"] in ("done_marker", "eof_after_finish", "json", "eof")
        assert expect["end"] != "eof" or not END_CERTAIN[doc["dialect"]]
    known = (expect["refusal_detail"] or {}).get("value")  # a phrase known beforehand
    if error and error["message"] not in (None, known):
        assert error["message"] not in json.dumps(x.to_dict({}, {}, events=True)), "no text of a body"
    assert (x.no_token_reason is None) == (x.timeline.first_token_ns is not None or not x.stream)


def check_refusal(x: Exchange, expect: dict[str, Any]) -> None:
    told, detail = x.refusal, expect["refusal_detail"]
    kind = "none" if told is None else told["kind"]
    accepted = expect.get("refusal_accept", [])
    assert kind in (expect["refusal"], *accepted)
    if told is not None and kind == expect["refusal"]:
        found = {"signal": told["source"], "confidence": told["confidence"], **told["detail"]}
        assert found == detail or accepted
    guardrail = None
    if x.guardrail is not None:
        # How much the client had by then is ours to add.
        guardrail = {k: v for k, v in x.guardrail.items() if k not in ("late", "tokens_before")}
        assert ("late" in x.guardrail) == ("tokens_before" in x.guardrail)
    assert guardrail == expect["guardrail"] or accepted


@pytest.mark.parametrize("chunked", [False, True], ids=["identity", "chunked"])
@pytest.mark.parametrize("name", NAMES)
def test_a_recorded_answer_says_what_it_should_however_it_is_cut(name: str, chunked: bool) -> None:
    doc, body = load(name)
    reads = reads_of(doc, body)
    cuts = [reads, cut_at_random(1, reads), cut_at_random(2, reads)]
    if len(body) < 20_000:
        cuts += [cut_every(1, reads), cut_every(7, reads)]
    for cut in cuts:
        x = play(doc, cut, chunked=chunked)
        check(name, x, doc, chunked=chunked)


@pytest.mark.parametrize("name", NAMES)
def test_a_recorded_answer_is_the_same_whether_or_not_its_events_are_known_again(name: str) -> None:
    doc, body = load(name)
    blocks = body.replace(b"\n\n", b"\n\n\0").split(b"\0") * 3  # an event a read, and more of them
    reads = [(i * MS, block) for i, block in enumerate(blocks)]
    fast = play(doc, reads, chunked=True)
    with mock.patch.object(repetition, "find_repetition", return_value=None):
        assert play(doc, reads, chunked=True) == fast


@pytest.mark.parametrize("name", [n for n in NAMES if "raw" in load(n)[0]])
def test_a_recorded_response_with_its_framing_gives_the_same_exchange(name: str) -> None:
    doc, _ = load(name)
    raw = (CORPUS / doc["raw"]["file"]).read_bytes()
    request = doc["request"]
    observer = Observer("r", 1, 0, 0, f"POST {request['path']} HTTP/1.1\r\nhost: g\r\n\r\n".encode())
    stop = raw.index(b"\r\n\r\n") + 4
    while raw.startswith(b"HTTP/1.1 1"):
        observer.response_head(raw[:stop], 0, 0)
        raw = raw[stop:]
        stop = raw.index(b"\r\n\r\n") + 4
    observer.response_head(raw[:stop], 0, 0)
    at = len((CORPUS / doc["raw"]["file"]).read_bytes()) - len(raw)
    for read in doc["raw"]["reads"]:
        begin, end = max(read["off"] - at, stop), read["off"] - at + read["n"]
        if end > begin:
            observer.response_data(raw[begin:end], round(read["t_ms"] * MS), 0)
    clean = doc["response"]["end"] == "clean"
    if clean:
        observer.response_end(round(doc["response"]["end_ms"] * MS))
    x = observer.finish(None, "complete" if clean else "upstream_reset", None, None, 0, 0, 0, 0)
    check(name, x, doc, chunked=True)


@pytest.mark.parametrize(
    ("name", "apart"),
    [("xai_reasoning_beside", True), ("gemini_native_sse", True), ("responses_reasoning_summary", False)],
)
def test_reasoning_is_counted_beside_the_output_where_the_total_says_so(name: str, apart: bool) -> None:
    doc, body = load(name)
    x = play(doc, reads_of(doc, body), chunked=False)
    assert x.reasoning_is_separate is apart
    written = (x.tokens.output or 0) + (x.tokens.reasoning or 0 if apart else 0)
    t = x.timeline
    span_ns = (t.last_token_ns or 0) - (t.first_token_ns or 0)
    tpot_ns = measure(x).tpot_ns
    assert tpot_ns == pytest.approx(span_ns / (written - 1), abs=1)


def test_a_streamed_array_read_as_one_value_says_the_same() -> None:
    doc, body = load("gemini_native_array")
    doc = {**doc, "request": {**doc["request"], "path": "/elsewhere"}}
    x = play(doc, reads_of(doc, body), chunked=False)
    assert (x.dialect, x.stream, classes(x)) == ("gemini", False, ["content"])
    assert (x.tokens.input, x.tokens.output, x.tokens.reasoning, x.finish_reason) == (9, 10, 12, "STOP")

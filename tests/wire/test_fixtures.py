"""Every recorded dialect, played through the observer at every read size, against what it should say.

Invariant: only where blocks end and when their last byte came decides a time; how the bytes between
were cut does not.
"""

import json
import random
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from llmtap.record.exchange import Exchange
from llmtap.record.observer import Observer
from llmtap.record.outcome import EventClass, Outcome, TokenSource

CORPUS = Path(__file__).resolve().parents[3] / "shared" / "dialects" / "shared"
NAMES = sorted(p.stem for p in CORPUS.glob("*.json"))
MS = 1_000_000

pytestmark = pytest.mark.skipif(not NAMES, reason=f"the corpus is not beside the checkout: {CORPUS}")

OTHER_DIALECT = "a dialect of its own"
GUARDRAIL = "a guardrail other than finish_reason content_filter"
EXTRA = "a field or habit of one server (dialects.md section 3.5)"

LATER: dict[str, str] = {
    "anthropic_basic": OTHER_DIALECT,
    "anthropic_overloaded": OTHER_DIALECT,
    "anthropic_refusal": OTHER_DIALECT,
    "anthropic_thinking_tool": OTHER_DIALECT,
    "cohere_v2_chat": OTHER_DIALECT,
    "llamacpp_native_completion": OTHER_DIALECT,
    "lmstudio_native_events": OTHER_DIALECT,
    "ollama_native_chat": OTHER_DIALECT,
    "responses_basic": OTHER_DIALECT,
    "responses_error_nested": OTHER_DIALECT,
    "responses_failed_invalid_prompt": OTHER_DIALECT,
    "responses_function_call": OTHER_DIALECT,
    "responses_incomplete_filter": OTHER_DIALECT,
    "responses_reasoning_summary": OTHER_DIALECT,
    "responses_refusal": OTHER_DIALECT,
    "sglang_generate_cumulative": OTHER_DIALECT,
    "tgi_generate_stream": OTHER_DIALECT,
    "azure_prompt_400": GUARDRAIL,
    "bedrock_guardrail_intervened": GUARDRAIL,
    "fms_detections_warning": GUARDRAIL,
    "litellm_guardrail_http400": GUARDRAIL,
    "litellm_guardrail_sse400": GUARDRAIL,
    "nemo_guardrails_violation": GUARDRAIL,
    "openai_http400_invalid_prompt": GUARDRAIL,
    "portkey_446": GUARDRAIL,
    "portkey_hook_results_after_done": GUARDRAIL,
    "xai_403_safety": GUARDRAIL,
    "zhipu_sensitive": GUARDRAIL,
    "gemini_compat_thought": EXTRA,
    "groq_timing_usage": EXTRA,
    "inline_think_tags": EXTRA,
    "llamacpp_chat_progress_timings": EXTRA,
    "llamacpp_error_field": EXTRA,
}
"""Left to a later issue: here only first_byte and first_any have to be right, and nothing may raise."""


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
    observer.submitted(0, 0)
    fields = [f"{k}: {v}\r\n" for k, v in response["headers"]]
    if chunked:
        fields.append("transfer-encoding: chunked\r\n")
    head = f"HTTP/1.1 {response['status']} {response['reason']}\r\n{''.join(fields)}\r\n"
    observer.response_head(head.encode(), round(response["headers_ms"] * MS), 0)
    for t_ns, data in reads:
        if chunked and data:
            data = b"%x;ext=1\r\n%b\r\n" % (len(data), data)
        observer.response_data(data, t_ns, 0)
    clean = response["end"] == "clean"
    end_ns = round(response["end_ms"] * MS)
    if clean:
        if chunked:
            observer.response_data(b"0\r\nserver-timing: x;dur=1\r\n\r\n", end_ns, 0)
        observer.response_end(end_ns)
    outcome = Outcome.COMPLETE if clean else Outcome.UPSTREAM_RESET
    return observer.finish(end_ns, outcome.value, None, None, 0, 0, len(body), 0)


def ns(ms: float | None) -> int | None:
    return None if ms is None else round(ms * MS)


def classes(x: Exchange) -> list[str]:
    return [EventClass(c).name.lower() for c in x.timeline.events.classes]


def check_all(name: str, x: Exchange, expect: dict[str, Any]) -> None:
    """What has to be right for every dialect, known or not."""
    if name != "sse_single_newline":  # the corpus allows late_ok: a reader that waits for the blank line
        assert x.timeline.first_any_ns == ns(expect["first_any_ms"])
    assert x.timeline.first_byte_ns == ns(expect["first_byte_ms"])


def check(name: str, x: Exchange, doc: dict[str, Any]) -> None:
    expect = doc["expect"]
    events = expect["events"]
    t = x.timeline
    check_all(name, x, expect)
    assert classes(x) == [e["class"] for e in events]
    assert list(t.events.sizes) == [e["end"] - e["start"] for e in events]
    assert [n if n > 0 else None for n in t.events.tokens] == [e.get("tokens") or None for e in events]
    if name != "sse_single_newline":
        assert list(t.events.t_ns) == [ns(e["t_ms"]) for e in events]
    for point in ("first_token", "first_reasoning", "first_content", "last_token"):
        assert getattr(t, point + "_ns") == ns(expect[point + "_ms"]), point
    reason = expect["finish_reason"]
    assert x.finish_reason in (reason.values() if isinstance(reason, dict) else [reason])
    assert x.stream == (doc["body"]["framing"] == "sse")
    assert x.unparsed_events == 0
    assert x.model is not None
    check_tokens(x, expect)
    check_outcome(x, doc)


SOURCES = {
    "usage.final": TokenSource.USAGE,
    "token_ids": TokenSource.TOKEN_IDS,
    "logprobs": TokenSource.LOGPROBS,
    "chunk_count": TokenSource.CHUNKS,
    "none": TokenSource.NONE,
}


def check_tokens(x: Exchange, expect: dict[str, Any]) -> None:
    count = expect["output_tokens_from"]
    if count is not None and count["from"] != "unknown":
        assert x.tokens.source is SOURCES[count["from"]]
        assert (x.tokens.output or 0) == count["n"]
    usage = expect["usage"]
    if usage is None:
        assert x.usage is None
        return
    counts = usage["normalized"]
    assert x.tokens.input == counts.get("prompt_tokens")
    assert (x.tokens.reasoning or 0) == counts.get("reasoning_tokens", 0)
    assert (x.tokens.cached or 0) == counts.get("cached_tokens", 0)


def check_outcome(x: Exchange, doc: dict[str, Any]) -> None:
    expect = doc["expect"]
    if doc["response"]["end"] != "clean":
        assert x.outcome is Outcome.UPSTREAM_RESET
    elif x.finish_reason == "content_filter":
        assert x.outcome is Outcome.REFUSED
    elif expect["error"]:
        assert x.outcome is Outcome.UPSTREAM_ERROR
        assert x.error is not None
        message = expect["error"]["message"]
        assert message is None or message not in x.error, "no text of a body"
    else:
        assert x.outcome is Outcome.COMPLETE
        assert expect["end"] in ("done_marker", "eof_after_finish", "json")


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
        if name in LATER:
            check_all(name, x, doc["expect"])
        else:
            check(name, x, doc)


@pytest.mark.parametrize("name", [n for n in NAMES if n in LATER])
def test_what_is_left_for_later_is_still_wrong(name: str) -> None:
    doc, body = load(name)
    with pytest.raises(AssertionError):
        check(name, play(doc, reads_of(doc, body), chunked=False), doc)


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
    check(name, x, doc)

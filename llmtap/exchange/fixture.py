"""Make a fixture of a saved answer: its bytes, their times, and the expected result of parsing.

`llmtap inspect --fixture` writes it. `tests/protocol/test_fixtures.py` plays each fixture of
`tests/data/dialects`, cut in many ways, and compares. A saved answer has no times, so each event gets a read
of its own; a fixture that is read again keeps its times.

Source: tests/data/README.md describes the format.
"""

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any, Final

import msgspec

from llmtap.exchange.exchange import Exchange
from llmtap.exchange.outcome import Outcome, TokenSource
from llmtap.exchange.saved import Explained, Saved, SavedEvent, events_of
from llmtap.protocol.delta import EventClass
from llmtap.protocol.http1 import parse_request_head, parse_response_head

FORMAT: Final = "llmtap-dialect-fixture/1"
_HEADERS_MS: Final = 100.0
_FIRST_READ_MS: Final = 120.0
_BETWEEN_READS_MS: Final = 10.0
_NOT_KEPT: Final = (b"transfer-encoding", b"content-encoding", b"content-length", b"set-cookie")
_SOURCES: Final = {
    TokenSource.USAGE: "usage.final",
    TokenSource.RUNNING_USAGE: "usage_delta",
    TokenSource.TOKEN_IDS: "token_ids",
    TokenSource.LOGPROBS: "logprobs",
    TokenSource.CHUNKS: "chunk_count",
    TokenSource.NONE: "none",
}
_COUNTS: Final = {
    "input": "prompt_tokens",
    "output": "completion_tokens",
    "reasoning": "reasoning_tokens",
    "cached": "cached_tokens",
}
_TEXTS: Final = {
    "content_text": EventClass.CONTENT,
    "reasoning_text": EventClass.REASONING,
    "refusal_text": EventClass.REFUSAL,
}


def is_fixture(value: object) -> bool:
    """Return whether a JSON value is the description of a fixture."""
    return isinstance(value, dict) and value.get("format") == FORMAT


def saved_of(doc: dict[str, Any], body: bytes) -> Saved:
    """Return the answer of a fixture; `body`: decoded body."""
    request, response = doc["request"], doc["response"]
    request_body = msgspec.json.encode(request["body"])
    request_line = f"{request['method']} {request['path']} HTTP/1.1\r\n"
    head = f"{request_line}host: saved\r\ncontent-length: {len(request_body)}\r\n\r\n"
    fields = [f"{k}: {v}\r\n" for k, v in response["headers"] if k.lower().encode() not in _NOT_KEPT]
    status = f"HTTP/1.1 {response['status']} {response['reason']}\r\n{''.join(fields)}\r\n"
    return Saved(
        "fixture",
        status.encode("latin-1", "replace"),
        body,
        body,
        head.encode("latin-1", "replace"),
        request_body,
        whole=response["end"] == "clean",
    )


def make_fixture(
    name: str, saved: Saved, explained: Explained, source: str, known: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Return the description of a fixture whose body is that of `saved`.

    Args:
        source: where the bytes come from.
        known: description of the fixture that the answer is from; all but `expect` is copied.
    """
    framing, events = events_of(saved)
    doc = dict(known) if known is not None else _describe(name, saved, explained, framing, source)
    names = {event.start: event.event for event in events if event.event is not None and framing == "sse"}
    doc["expect"] = _expected_values(doc, saved, explained, names, framing)
    return doc


def _describe(name: str, saved: Saved, explained: Explained, framing: str, source: str) -> dict[str, Any]:
    body = saved.body
    request = parse_request_head(saved.request_head)
    response = parse_response_head(saved.head, b"POST")
    ends = [event.end for event in explained.events]
    cuts = [0, *dict.fromkeys(end for end in ends[:-1] if end < len(body)), len(body)]
    chunks = [
        {"t_ms": _FIRST_READ_MS + i * _BETWEEN_READS_MS, "off": a, "n": b - a}
        for i, (a, b) in enumerate(pairwise(cuts))
        if b > a
    ]
    end_ms = (chunks[-1]["t_ms"] if chunks else _FIRST_READ_MS) + 1.0
    try:
        request_body = msgspec.json.decode(saved.request_body) if saved.request_body else {}
    except (ValueError, RecursionError):
        request_body = {}
    headers = [
        [k.decode("latin-1").lower(), v.decode("latin-1")]
        for k, v in response.headers
        if k.lower() not in _NOT_KEPT
    ]
    return {
        "format": FORMAT,
        "name": name,
        "dialect": explained.exchange.dialect or name,
        "title": source,
        "tags": [],
        "source": [source],
        "request": {
            "method": request.method.decode("latin-1"),
            "path": request.target.decode("latin-1"),
            "headers": {"content-type": "application/json"},
            "body": request_body if isinstance(request_body, dict) else {},
        },
        "response": {
            "http_version": "1.1",
            "status": response.status,
            "reason": response.reason.decode("latin-1") or "OK",
            "headers": headers,
            "transfer": "chunked",
            "headers_ms": _HEADERS_MS,
            "end": "clean" if saved.whole else "reset",
            "end_ms": end_ms,
        },
        "body": {
            "file": f"{name}.sse",
            "len": len(body),
            "sha256": hashlib.sha256(body).hexdigest(),
            "framing": framing,
            "content_encoding": None,
        },
        "chunks": chunks,
    }


def _expected_values(
    doc: dict[str, Any], saved: Saved, explained: Explained, names: Mapping[int, bytes], framing: str
) -> dict[str, Any]:
    arrivals = [(c.get("decoded_after", c["off"] + c["n"]), c["t_ms"]) for c in doc["chunks"]]
    events = explained.events
    reads = [
        next((i for i, (end, _) in enumerate(arrivals) if end >= e.end), len(arrivals) - 1) for e in events
    ]
    times = [arrivals[read][1] for read in reads]
    x, response = explained.exchange, doc["response"]

    def first(test: Callable[[SavedEvent], bool], order: int = 1) -> float | None:
        return next((t for e, t in list(zip(events, times, strict=True))[::order] if test(e)), None)

    return {
        "events": [
            _event_document(i, e, reads[i], times[i], names.get(e.start)) for i, e in enumerate(events)
        ],
        "first_byte_ms": doc["chunks"][0]["t_ms"] if doc["chunks"] else None,
        "first_any_ms": times[0] if times else None,
        "first_token_ms": first(lambda e: e.delta.output),
        "first_reasoning_ms": first(lambda e: e.delta.output and e.delta.reasoning),
        "first_content_ms": first(lambda e: e.delta.output and e.delta.content),
        "first_tool_ms": first(lambda e: e.delta.output and e.delta.tool_call),
        "first_refusal_ms": first(lambda e: e.delta.output and e.delta.refusal),
        "last_token_ms": first(lambda e: e.delta.output, -1),
        "done_ms": first(lambda e: e.delta.done),
        "end_ms": response["end_ms"],
        **{key: _text_of(events, kind) for key, kind in _TEXTS.items()},
        "finish_reason": x.finish_reason,
        "output_tokens": x.tokens.output or 0,
        "output_tokens_from": _count_of(x),
        "usage": _usage_of(x, events),
        **_verdicts_of(x),
        "error": _error_of(events),
        "server_timing": x.server_timing or [],
        "end": _end_of(x, events, framing),
        "trailing": _trailing(saved, events, framing),
    }


def _event_document(i: int, event: SavedEvent, read: int, t_ms: float, name: bytes | None) -> dict[str, Any]:
    d = event.delta
    out: dict[str, Any] = {
        "i": i,
        "class": _class_name(d.event_class),
        "start": event.start,
        "end": event.end,
        "read": read,
        "t_ms": t_ms,
    }
    if d.output:
        out["choice"] = d.choices[0]
    if name is not None:
        out["sse_event"] = name.decode("latin-1")
    if d.text:
        out["text"] = d.text
    if d.tokens > 0:
        out |= {"tokens": d.tokens, "tokens_from": _SOURCES[d.token_source]}
    if d.also:
        out["also"] = [_class_name(also) for also in d.also]
    return out


def _text_of(events: Iterable[SavedEvent], kind: EventClass) -> str | dict[str, str] | None:
    texts: dict[int, str] = {}
    for event in events:
        d = event.delta
        if d.event_class is kind and d.text:
            choice = d.choices[0] if d.choices else 0
            texts[choice] = texts.get(choice, "") + d.text
    if texts.keys() <= {0}:
        return texts.get(0)
    return {str(choice): text for choice, text in texts.items()}


def _count_of(x: Exchange) -> dict[str, Any]:
    source = _SOURCES.get(x.tokens.source, "unknown")
    out: dict[str, Any] = {"n": x.tokens.output or 0, "from": source}
    return out | {"estimated": True} if source == "chunk_count" else out


def _usage_of(x: Exchange, events: Sequence[SavedEvent]) -> dict[str, Any] | None:
    last = next((i for i in reversed(range(len(events))) if events[i].delta.counts is not None), None)
    if last is None or x.usage is None:
        return None
    counts = {_COUNTS[name]: n for name in _COUNTS if (n := getattr(x.tokens, name))}
    return {"event": last, "normalized": counts}


def _verdicts_of(x: Exchange) -> dict[str, Any]:
    refusal: dict[str, Any] | None = x.refusal
    guardrail = None
    if x.guardrail is not None:
        guardrail = {k: v for k, v in x.guardrail.items() if k not in ("late", "tokens_before")}
    if refusal is None:
        return {"refusal": "none", "refusal_detail": None, "guardrail": guardrail}
    detail = {"signal": refusal["source"], "confidence": refusal["confidence"], **refusal["detail"]}
    return {"refusal": refusal["kind"], "refusal_detail": detail, "guardrail": guardrail}


def _error_of(events: Sequence[SavedEvent]) -> dict[str, Any] | None:
    for i, event in enumerate(events):
        d = event.delta
        if d.error_type is not None or d.error_message is not None:
            return {"event": i, "type": d.error_type, "message": d.error_message}
    return None


def _end_of(x: Exchange, events: Sequence[SavedEvent], framing: str) -> str:
    if framing == "json":
        return "json"
    if _error_of(events) is not None:
        return "error"
    if any(event.delta.done for event in events):
        return "done_marker"
    if x.outcome in (Outcome.TRUNCATED, Outcome.UPSTREAM_RESET):
        return "truncated"
    return "eof" if x.finish_reason is None else "eof_after_finish"


def _trailing(saved: Saved, events: Sequence[SavedEvent], framing: str) -> dict[str, int] | None:
    end = events[-1].end if events else 0
    if framing == "json" or not saved.body[end:].strip():
        return None
    return {"start": end, "end": len(saved.body)}


def _class_name(event_class: EventClass) -> str:
    return event_class.name.lower()

"""Make a fixture of a saved answer: its bytes, their times, and the expected result of parsing.

`llmtap inspect --fixture` writes it. `tests/protocol/test_fixtures.py` parses each fixture of
`tests/data/dialects`, cut in many ways, and compares the result with the expected one. A saved answer has no
times, so each event gets a read of its own; a fixture that is read again keeps its times.

Source: tests/data/README.md describes the format.
"""

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any, Final

import msgspec
from msgspec import UNSET, Struct, UnsetType, field, structs

from llmtap.exchange.exchange import Exchange
from llmtap.exchange.outcome import Outcome, TokenSource
from llmtap.exchange.saved import Explained, Saved, SavedEvent, events_of
from llmtap.protocol.delta import EventClass
from llmtap.protocol.http1 import parse_request_head, parse_response_head

FORMAT: Final = "llmtap-dialect-fixture/1"
_HEADERS_MS: Final = 100.0
_FIRST_READ_MS: Final = 120.0
_BETWEEN_READS_MS: Final = 10.0
_REMOVED_FIELDS: Final = (b"transfer-encoding", b"content-encoding", b"content-length", b"set-cookie")
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


class FixtureRequest(Struct, frozen=True):
    """Request of the fixture."""

    method: str
    path: str
    headers: dict[str, str]
    body: Any
    """JSON of the request."""


class FixtureResponse(Struct, frozen=True, kw_only=True):
    """Head of the answer, and its end. Times are in ms since the request was sent."""

    http_version: str
    status: int
    reason: str
    headers: list[list[str]]
    """Names and values of the header fields."""
    trailers: list[list[str]] | UnsetType = UNSET
    transfer: str
    """Framing of the body, such as `chunked`."""
    headers_ms: float
    """Time at which the head arrived."""
    end: str
    """End of the body: `clean`, or another word if the connection broke."""
    end_ms: float
    """Time at which the body ended."""


class FixtureBody(Struct, frozen=True):
    """Name of the file with the body and, if the body is compressed, of the file with the decoded body."""

    file: str
    len: int
    """Number of bytes in `file`."""
    sha256: str
    framing: str
    """Kind of the events in the body, as in `SavedEvents.framing`."""
    content_encoding: str | None
    """Value of the header field, such as `gzip`."""
    decoded_file: str | UnsetType = UNSET
    """File with the decompressed body."""
    decoded_len: int | UnsetType = UNSET
    """Number of bytes in `decoded_file`."""
    decoded_sha256: str | UnsetType = UNSET


class FixtureRead(Struct, frozen=True):
    """One read of `n` bytes, which begin at the offset `off` of the body."""

    t_ms: float
    """Time of the read since the request was sent."""
    off: int
    """Offset in the body, in bytes."""
    n: int
    """Number of bytes."""
    decoded_after: int | UnsetType = UNSET
    """Number of decoded bytes after this read."""

    @property
    def decoded_end(self) -> int:
        """Offset in the decoded body up to which this read completes it."""
        return self.off + self.n if self.decoded_after is UNSET else self.decoded_after


class FixtureRaw(Struct, frozen=True):
    """Bytes of the whole response with its framing."""

    file: str
    len: int
    """Number of bytes in `file`."""
    sha256: str
    """Digest of `file`."""
    reads: list[FixtureRead]
    """Reads of the connection; their offsets count the framing, too."""


class ExpectedEvent(Struct, frozen=True, kw_only=True):
    """Event that the parser must find between the bytes `start` and `end` of the decoded body."""

    i: int
    """Index of the event in the answer."""
    kind: str = field(name="class")
    """Name of the event's EventClass, in lower case."""
    start: int
    """First byte of the event in the decoded body."""
    end: int
    read: int
    """Index of the read that completes the event."""
    t_ms: float
    """Time of the read `read`."""
    choice: int | UnsetType = UNSET
    """Index of the answer, if the request has several."""
    sse_event: str | UnsetType = UNSET
    """Value of the event's `event:` line."""
    text: str | UnsetType = UNSET
    tokens: int | UnsetType = UNSET
    """Number of output tokens that the event declares."""
    tokens_from: str | UnsetType = UNSET
    """Source of `tokens`, such as log probabilities."""
    also: list[str] | UnsetType = UNSET
    """Further classes of an event that has several kinds of output."""


class ExpectedTokens(Struct, frozen=True):
    """Expected number of output tokens, and its source."""

    n: int
    """Number of output tokens."""
    source: str = field(name="from")
    """Source of the count, as in `Tokens.source`."""
    estimated: bool | UnsetType = UNSET
    """Whether chunks were counted as tokens, because the provider declared no number."""


class ExpectedUsage(Struct, frozen=True):
    """Expected token counts of the provider."""

    event: int
    """Index of the event with the usage."""
    normalized: dict[str, int]
    """Token counts by the names of OpenAI, also if the event has other names."""


class ExpectedError(Struct, frozen=True):
    """Expected error that an event reports."""

    event: int
    """Index of the event with the error."""
    type: str | None
    """Type of the error in the provider's words."""
    message: str | None


class ExpectedTrailing(Struct, frozen=True):
    """Range of the bytes after the last event."""

    start: int
    end: int


class Expected(Struct, frozen=True):
    """Result that parsing a fixture must give. Times are in ms since the request was sent."""

    events: list[ExpectedEvent]
    first_byte_ms: float | None
    first_any_ms: float | None
    """First output of any kind."""
    first_token_ms: float | None
    first_reasoning_ms: float | None
    first_content_ms: float | None
    first_tool_ms: float | None
    """First part of a tool call."""
    first_refusal_ms: float | None
    last_token_ms: float | None
    done_ms: float | None
    """Event that ends the stream, such as `[DONE]`."""
    end_ms: float
    content_text: str | dict[str, str] | None
    """Text of the only choice, or the text of each choice by its index (like the next two fields)."""
    reasoning_text: str | dict[str, str] | None
    refusal_text: str | dict[str, str] | None
    finish_reason: str | None
    output_tokens: int
    output_tokens_from: ExpectedTokens
    usage: ExpectedUsage | None
    refusal: str
    """Kind of a refusal; `none` if the answer is no refusal."""
    refusal_detail: dict[str, object] | None
    """Signs of the refusal, for example the finish reason."""
    guardrail: dict[str, object] | None
    """Action of a guardrail on the answer; None if none acted."""
    error: ExpectedError | None
    server_timing: list[dict[str, object]]
    """Durations that the server reported."""
    end: str
    """How the answer ended: `json`, `error`, or how its stream ended."""
    trailing: ExpectedTrailing | None
    """Bytes after the last event; None if there are none."""


class Fixture(Struct, frozen=True, kw_only=True):
    """Description of a saved answer: the file `NAME.json` of a fixture."""

    format: str = FORMAT
    """Name and version of this format."""
    name: str
    split: str | UnsetType = UNSET
    """Set to which the fixture belongs: `shared` or `own`."""
    dialect: str
    title: str
    tags: list[str]
    """Features of the answer, for tests that select fixtures."""
    source: list[str]
    """Origin of the bytes: documents, or a recorded server."""
    notes: str | UnsetType = UNSET
    request: FixtureRequest
    response: FixtureResponse
    body: FixtureBody
    chunks: list[FixtureRead]
    """Reads of the body with their times, without framing."""
    expect: Expected | None = None
    """Result of parsing. None until the answer has been parsed: the result in the file is not read."""
    raw: FixtureRaw | UnsetType = UNSET

    @property
    def body_file(self) -> str:
        """Name of the file with the decoded body."""
        return self.body.decoded_file or self.body.file


def fixture_of(value: object) -> Fixture | None:
    """Return the fixture that a JSON value describes, without its expected result; None if the value is not a
    fixture.

    Raises msgspec.ValidationError if a field is missing or has another type.
    """
    if not isinstance(value, dict) or value.get("format") != FORMAT:
        return None
    return msgspec.convert({name: part for name, part in value.items() if name != "expect"}, Fixture)


def saved_of(fixture: Fixture, body: bytes) -> Saved:
    """Return the saved answer that a fixture describes; `body`: its decoded body."""
    request, response = fixture.request, fixture.response
    request_body = msgspec.json.encode(request.body)
    request_line = f"{request.method} {request.path} HTTP/1.1\r\n"
    head = f"{request_line}host: saved\r\ncontent-length: {len(request_body)}\r\n\r\n"
    fields = [f"{k}: {v}\r\n" for k, v in response.headers if k.lower().encode() not in _REMOVED_FIELDS]
    status = f"HTTP/1.1 {response.status} {response.reason}\r\n{''.join(fields)}\r\n"
    return Saved(
        "fixture",
        status.encode("latin-1", "replace"),
        body,
        body,
        head.encode("latin-1", "replace"),
        request_body,
        whole=response.end == "clean",
    )


def make_fixture(
    name: str, saved: Saved, explained: Explained, source: str, known: Fixture | None = None
) -> Fixture:
    """Return the description of a fixture whose body is that of `saved`.

    Args:
        source: origin of the bytes, for the field `source`.
        known: description of the fixture that `saved` is from: all fields but `expect` are copied.
    """
    framing, events = events_of(saved)
    fixture = (
        _fixture_without_expectation(name, saved, explained, framing, source) if known is None else known
    )
    names = {event.start: event.event for event in events if event.event is not None and framing == "sse"}
    return structs.replace(fixture, expect=_expected_values(fixture, saved, explained, names, framing))


def _fixture_without_expectation(
    name: str, saved: Saved, explained: Explained, framing: str, source: str
) -> Fixture:
    """Return a fixture whose `chunks` end where events end, at evenly spaced times."""
    body = saved.body
    request = parse_request_head(saved.request_head)
    response = parse_response_head(saved.head, b"POST")
    ends = [event.end for event in explained.events]
    cuts = [0, *dict.fromkeys(end for end in ends[:-1] if end < len(body)), len(body)]
    chunks = [
        FixtureRead(_FIRST_READ_MS + i * _BETWEEN_READS_MS, a, b - a)
        for i, (a, b) in enumerate(pairwise(cuts))
        if b > a
    ]
    end_ms = (chunks[-1].t_ms if chunks else _FIRST_READ_MS) + 1.0
    try:
        request_body = msgspec.json.decode(saved.request_body) if saved.request_body else {}
    except (ValueError, RecursionError):
        request_body = {}
    headers = [
        [k.decode("latin-1").lower(), v.decode("latin-1")]
        for k, v in response.headers
        if k.lower() not in _REMOVED_FIELDS
    ]
    return Fixture(
        name=name,
        dialect=explained.exchange.dialect or name,
        title=source,
        tags=[],
        source=[source],
        request=FixtureRequest(
            request.method.decode("latin-1"),
            request.target.decode("latin-1"),
            {"content-type": "application/json"},
            request_body if isinstance(request_body, dict) else {},
        ),
        response=FixtureResponse(
            http_version="1.1",
            status=response.status,
            reason=response.reason.decode("latin-1") or "OK",
            headers=headers,
            transfer="chunked",
            headers_ms=_HEADERS_MS,
            end="clean" if saved.whole else "reset",
            end_ms=end_ms,
        ),
        body=FixtureBody(f"{name}.sse", len(body), hashlib.sha256(body).hexdigest(), framing, None),
        chunks=chunks,
    )


def _expected_values(
    fixture: Fixture, saved: Saved, explained: Explained, names: Mapping[int, bytes], framing: str
) -> Expected:
    arrivals = [(read.decoded_end, read.t_ms) for read in fixture.chunks]
    events = explained.events
    reads = [
        next((i for i, (end, _) in enumerate(arrivals) if end >= e.end), len(arrivals) - 1) for e in events
    ]
    times = [arrivals[read][1] for read in reads]
    x = explained.exchange

    def first(test: Callable[[SavedEvent], bool], order: int = 1) -> float | None:
        return next((t for e, t in list(zip(events, times, strict=True))[::order] if test(e)), None)

    refusal, refusal_detail, guardrail = _verdicts_of(x)
    return Expected(
        events=[_expected_event(i, e, reads[i], times[i], names.get(e.start)) for i, e in enumerate(events)],
        first_byte_ms=fixture.chunks[0].t_ms if fixture.chunks else None,
        first_any_ms=times[0] if times else None,
        first_token_ms=first(lambda e: e.delta.output),
        first_reasoning_ms=first(lambda e: e.delta.output and e.delta.reasoning),
        first_content_ms=first(lambda e: e.delta.output and e.delta.content),
        first_tool_ms=first(lambda e: e.delta.output and e.delta.tool_call),
        first_refusal_ms=first(lambda e: e.delta.output and e.delta.refusal),
        last_token_ms=first(lambda e: e.delta.output, -1),
        done_ms=first(lambda e: e.delta.done),
        end_ms=fixture.response.end_ms,
        content_text=_text_of(events, EventClass.CONTENT),
        reasoning_text=_text_of(events, EventClass.REASONING),
        refusal_text=_text_of(events, EventClass.REFUSAL),
        finish_reason=x.finish_reason,
        output_tokens=x.tokens.output or 0,
        output_tokens_from=_expected_tokens(x),
        usage=_usage_of(x, events),
        refusal=refusal,
        refusal_detail=refusal_detail,
        guardrail=guardrail,
        error=_error_of(events),
        server_timing=x.server_timing or [],
        end=_end_of(x, events, framing),
        trailing=_trailing_of(saved, events, framing),
    )


def _expected_event(i: int, event: SavedEvent, read: int, t_ms: float, name: bytes | None) -> ExpectedEvent:
    d = event.delta
    return ExpectedEvent(
        i=i,
        kind=_class_name(d.event_class),
        start=event.start,
        end=event.end,
        read=read,
        t_ms=t_ms,
        choice=d.choices[0] if d.output else UNSET,
        sse_event=UNSET if name is None else name.decode("latin-1"),
        text=d.text or UNSET,
        tokens=d.tokens if d.tokens > 0 else UNSET,
        tokens_from=_SOURCES[d.token_source] if d.tokens > 0 else UNSET,
        also=[_class_name(also) for also in d.also] or UNSET,
    )


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


def _expected_tokens(x: Exchange) -> ExpectedTokens:
    source = _SOURCES.get(x.tokens.source, "unknown")
    return ExpectedTokens(x.tokens.output or 0, source, True if source == "chunk_count" else UNSET)


def _usage_of(x: Exchange, events: Sequence[SavedEvent]) -> ExpectedUsage | None:
    """Return the token counts and the event that reported them last; None: none did."""
    last = next((i for i in reversed(range(len(events))) if events[i].delta.counts is not None), None)
    if last is None or x.usage is None:
        return None
    return ExpectedUsage(last, {_COUNTS[name]: n for name in _COUNTS if (n := getattr(x.tokens, name))})


def _verdicts_of(x: Exchange) -> tuple[str, dict[str, object] | None, dict[str, object] | None]:
    """Return the kind of the refusal, its details, and the guardrail's verdict."""
    guardrail = None
    if x.guardrail is not None:
        guardrail = {k: v for k, v in x.guardrail.items() if k not in ("late", "tokens_before")}
    if x.refusal is None:
        return "none", None, guardrail
    detail: Any = x.refusal["detail"]
    signals = {"signal": x.refusal["source"], "confidence": x.refusal["confidence"]}
    return str(x.refusal["kind"]), {**signals, **detail}, guardrail


def _error_of(events: Sequence[SavedEvent]) -> ExpectedError | None:
    for i, event in enumerate(events):
        d = event.delta
        if d.error_type is not None or d.error_message is not None:
            return ExpectedError(i, d.error_type, d.error_message)
    return None


def _end_of(x: Exchange, events: Sequence[SavedEvent], framing: str) -> str:
    """Return how the stream ends, as a fixture names it."""
    if framing == "json":
        return "json"
    if _error_of(events) is not None:
        return "error"
    if any(event.delta.done for event in events):
        return "done_marker"
    if x.outcome in (Outcome.TRUNCATED, Outcome.UPSTREAM_RESET):
        return "truncated"
    return "eof" if x.finish_reason is None else "eof_after_finish"


def _trailing_of(saved: Saved, events: Sequence[SavedEvent], framing: str) -> ExpectedTrailing | None:
    """Return the bytes after the last event; None: there are none, or only blanks."""
    end = events[-1].end if events else 0
    if framing == "json" or not saved.body[end:].strip():
        return None
    return ExpectedTrailing(end, len(saved.body))


def _class_name(event_class: EventClass) -> str:
    return event_class.name.lower()

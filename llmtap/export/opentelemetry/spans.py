"""One span for each exchange, made when it is over.

A span is kept as small data until its batch is sent: what it says is copied from the Exchange, whose event
log is too large to hold for a receiver that may be away. Nothing of a prompt or an answer is in it.

The caller's `traceparent` passes the relay unchanged, so our span is its child beside the spans of the
gateway behind us.
"""

from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Final

from llmtap.exchange.exchange import Exchange
from llmtap.export.opentelemetry.semconv import (
    ARM,
    DIALECT,
    ERROR_TYPE,
    EXCHANGE_ID,
    HTTP_METHOD,
    HTTP_STATUS,
    OUTCOME,
    REFUSAL_KIND,
    REQUEST_ID,
    SERVER_ADDRESS,
    SERVER_PORT,
    TENANT,
    TOKEN_SOURCE,
    UNCERTAINTY,
    URL_PATH,
    Semconv,
)
from llmtap.export.opentelemetry.terms import TEXT_MAX, Terms
from llmtap.export.trace_context import TraceParent

__all__ = ["Span", "Value", "ids_of", "is_sampled", "span_of"]

Value = str | bool | int | float | list[str]

SAMPLED: Final = 1
RANDOM: Final = 2
"""Flags of W3C Trace Context: a trace id made here is as good as random, being a hash."""


@dataclass(slots=True)
class Span:
    """A finished span; times in ns since the epoch."""

    trace_id: bytes
    span_id: bytes
    parent_id: bytes
    """Empty where we are the root."""
    flags: int
    name: str
    start_ns: int
    end_ns: int
    attributes: list[tuple[str, Value]] = field(default_factory=list)
    events: list[tuple[str, int]] = field(default_factory=list)
    error: str | None = None
    """The status is Error, with this as its message; None: unset."""


def ids_of(x: Exchange) -> tuple[bytes, bytes]:
    """Trace and span id of an exchange: 16 and 8 bytes, the same whoever asks.

    A hash, because then nothing need be stored to find the span of an exchange again.
    """
    digest = blake2b(f"{x.id} {x.arrival_wall_ns} {x.timeline.arrival_ns}".encode(), digest_size=24).digest()
    return digest[:16], digest[16:]


def is_sampled(trace_id: bytes, ratio: float) -> bool:
    """Whether a trace is among the share that is recorded: all who ask about one trace agree.

    Source: OpenTelemetry specification, TraceIdRatioBased: the id's lower 8 bytes against the ratio.
    """
    return int.from_bytes(trace_id[8:]) < round(ratio * 2**64)


def span_of(
    x: Exchange, terms: Terms, names: Semconv, parent: TraceParent | None, server: tuple[str, int] | None
) -> Span:
    """The exchange as a span of kind CLIENT, in the names of a version."""
    trace_id, span_id = ids_of(x)
    parent_id, flags = b"", SAMPLED | RANDOM
    if parent is not None:
        trace_id, parent_id = bytes.fromhex(parent.trace_id), bytes.fromhex(parent.span_id)
        flags = SAMPLED | parent.flags & RANDOM
    t = x.timeline
    to_wall = x.arrival_wall_ns - t.arrival_ns
    span = Span(
        trace_id=trace_id, span_id=span_id, parent_id=parent_id, flags=flags, name=_name(x, terms),
        start_ns=x.arrival_wall_ns, end_ns=terms.end_ns + to_wall,
        attributes=[(k, v) for k, v in _attributes(x, terms, names, server) if v is not None],
    )  # fmt: skip
    for name, t_ns in (
        ("llmtap.submit", t.submit_ns),
        ("llmtap.first_byte", t.first_byte_ns),
        ("llmtap.first_token", t.first_token_ns if x.stream else None),
        ("llmtap.first_content", t.first_content_ns if x.stream else None),
        ("llmtap.last_token", t.last_token_ns if x.stream else None),
    ):
        if t_ns is not None:
            span.events.append((name, t_ns + to_wall))
    if terms.error_type is not None:
        span.error = x.error or terms.error_type
    return span


def _name(x: Exchange, terms: Terms) -> str:
    if terms.operation is None:
        return x.method[:TEXT_MAX] or "HTTP"
    return terms.operation if terms.model is None else f"{terms.operation} {terms.model}"


def _attributes(
    x: Exchange, terms: Terms, names: Semconv, server: tuple[str, int] | None
) -> "list[tuple[str, Value | None]]":
    host, port = server or (None, None)
    out: list[tuple[str, Value | None]] = [
        (HTTP_METHOD, x.method[:TEXT_MAX] or None), (URL_PATH, x.path[:TEXT_MAX] or None),
        (HTTP_STATUS, x.status), (SERVER_ADDRESS, host), (SERVER_PORT, port), (ERROR_TYPE, terms.error_type),
        (EXCHANGE_ID, x.id), (OUTCOME, x.outcome.value), (TENANT, x.tenant[:TEXT_MAX]), (ARM, x.arm),
        (REQUEST_ID, x.request_id), (UNCERTAINTY, x.uncertainty_ns / 1e9),
    ]  # fmt: skip
    if terms.operation is None:
        return out
    kind = None if x.refusal is None else x.refusal.get("kind")
    tokens = x.tokens
    out += [
        (names.operation, terms.operation), (names.provider, terms.provider),
        (names.request_model, terms.model), (names.response_model, terms.response_model),
        (names.request_stream, True if x.stream else None),
        (names.finish_reasons, None if x.finish_reason is None else [x.finish_reason[:TEXT_MAX]]),
        (names.first_chunk, None if terms.first_chunk_ns is None else terms.first_chunk_ns / 1e9),
        (names.input_tokens, tokens.input), (names.output_tokens, terms.output_tokens),
        (names.cached_tokens, tokens.cached), (names.reasoning_tokens, tokens.reasoning),
        (DIALECT, x.dialect), (REFUSAL_KIND, None if kind is None else str(kind)),
        (TOKEN_SOURCE, tokens.source.value),
    ]  # fmt: skip
    return out

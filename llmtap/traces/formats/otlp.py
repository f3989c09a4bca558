"""The trace format `otlp`: OpenTelemetry GenAI spans, as written by the collector's file exporter. Read only.

A span of an inference (`gen_ai.operation.name` is chat, text_completion or generate_content, or it is absent
and the span has a count of tokens) becomes a row of a capture. Some tools also write such a span around
several inferences, with the sum of their tokens, or around the attempts of one inference. Of spans within
each other, only the innermost spans with a count of tokens become rows (`_without_containers`). The `session`
is the id of the conversation, or the id of the trace if the span has a parent. A nested agent (`invoke_agent`
within another) is a separate session; the `parent` of its first request is the latest request of the outer
agent that ended before it.

All spans of a file are in memory, because agents' spans come after those of their requests.

Source: OTLP 1.x JSON encoding; OpenTelemetry semantic conventions for generative AI v0.1.0 and 1.41; vLLM's
`vllm/tracing`.
"""

import re
from bisect import bisect_right, insort
from collections.abc import Collection, Iterator, Mapping, Sequence
from operator import itemgetter
from typing import Any, BinaryIO, Final

from msgspec import Struct

from llmtap.json_types import JsonObject
from llmtap.traces.bodies import compact_json
from llmtap.traces.format import (
    LATE_TOKENS,
    LENGTHS,
    FormatError,
    TraceFormat,
    TraceRow,
    remove_late_token,
    unit_notes,
)
from llmtap.traces.text import BODY_BYTES_MAX, COUNT_MAX, clip_value, json_rows, start_of

_OPERATIONS: Final = frozenset({"chat", "text_completion", "generate_content"})
_ENDPOINTS: Final = {"chat": "chat.completions", "text_completion": "completions"}
_TEXTS: Final = {
    "model": ("gen_ai.request.model", "gen_ai.response.model"),
    "response_model": ("gen_ai.response.model",),
    "tenant": ("llmtap.tenant",),
}
_COUNTS: Final = {
    "input_tokens": ("gen_ai.usage.input_tokens", "gen_ai.usage.prompt_tokens"),
    "output_tokens": ("gen_ai.usage.output_tokens", "gen_ai.usage.completion_tokens"),
    "cached_tokens": ("gen_ai.usage.cache_read.input_tokens",),
    "reasoning_tokens": ("gen_ai.usage.reasoning.output_tokens",),
    "max_tokens": ("gen_ai.request.max_tokens",),
    "status": ("http.response.status_code",),
}
_TOKEN_NAMES: Final = _COUNTS["input_tokens"] + _COUNTS["output_tokens"]
_COUNT_NAMES: Final = tuple(name for names in _COUNTS.values() for name in names)
_TTFT_NAMES: Final = ("gen_ai.response.time_to_first_chunk", "gen_ai.latency.time_to_first_token")
"""Attributes that have the TTFT in seconds."""
_STATUS_ERROR: Final = 2
_SpanKey = tuple[str, str]
"""Id of the trace and id of the span, because span ids are unique only within a trace."""


class _Attribute(Struct):
    """Name and value of an attribute."""

    key: str
    value: JsonObject = {}


class _Status(Struct, frozen=True):
    """Result of a span."""

    code: int = 0


class _Span(Struct, rename="camel"):
    """A span, with the fields that a trace of requests needs."""

    trace_id: str
    span_id: str
    start_time_unix_nano: int | str
    end_time_unix_nano: int | str = 0
    parent_span_id: str = ""
    attributes: list[_Attribute] = []
    status: _Status = _Status()


class _ScopeSpans(Struct):
    """Spans of one instrumentation library."""

    spans: list[_Span] = []


class _ResourceSpans(Struct, rename="camel"):
    """Spans of one service."""

    scope_spans: list[_ScopeSpans] = []


class _Line(Struct, rename="camel"):
    """One line of the file: an export request."""

    resource_spans: list[_ResourceSpans]


def _rows(stream: BinaryIO, notes: list[str]) -> Iterator[TraceRow]:
    parents: dict[_SpanKey, _SpanKey] = {}
    conversations: dict[_SpanKey, str | None] = {}  # Id of the conversation, by the span of its agent.
    spans: list[_Inference] = []
    others = repeated = unstarted = 0
    for line, number in json_rows(stream, _Line, notes, bytes_max=BODY_BYTES_MAX):
        for span in (s for r in line.resource_spans for scope in r.scope_spans for s in scope.spans):
            key = span.trace_id, span.span_id
            if key in parents:
                repeated += 1  # Skip the span: an exporter can send a batch again.
                continue
            values = {a.key: _attribute_value(a.value) for a in span.attributes}
            parents[key] = span.trace_id, span.parent_span_id
            operation = values.get("gen_ai.operation.name")
            if operation == "invoke_agent":
                conversations[key] = values.get("gen_ai.conversation.id")
            if operation in _OPERATIONS or (operation is None and _has_tokens(values)):
                start_ns, end_ns = (
                    _time_ns(t, number) for t in (span.start_time_unix_nano, span.end_time_unix_nano)
                )
                if start_ns == 0:
                    unstarted += 1  # Skip the span: 0 is the default of the field, so the time is not known.
                    continue
                spans.append((start_ns, end_ns, span, values))
            else:
                others += 1
    inferences = _without_containers(spans, parents)
    containers = len(spans) - len(inferences)
    inferences.sort(key=lambda one: one[:2])
    late = uncounted = reversed_ = untimed = 0
    ended: dict[str, list[tuple[int, str]]] = {}  # Sorted ends and ids of the requests of each session.
    for start_ns, end_ns, span, values in inferences:
        chain = _agents_of((span.trace_id, span.span_id), parents, conversations)
        named = (values.get("gen_ai.conversation.id"), *map(conversations.get, chain))
        base = next(filter(None, named), None) or (span.trace_id if span.parent_span_id else None)
        row = _row_of_span(start_ns, end_ns, span, values)
        untimed += row["first_token_us"] is None and not values.keys().isdisjoint(_TTFT_NAMES)
        late += remove_late_token(row)
        uncounted += any(name in values and _attribute_count(values[name]) is None for name in _COUNT_NAMES)
        reversed_ += end_ns < start_ns
        if base is not None:
            # A session's name is a path of agents, without the outermost, which is the conversation itself.
            path = [base, *(span_id for _, span_id in reversed(chain[:-1]))]
            sessions = ["/".join(path[: n + 1]) for n in range(len(path))]
            mine = ended.setdefault(sessions[-1], [])
            parent = _last_end_before(mine, start_ns)
            if not mine:
                starters = (_last_end_before(ended.get(name, ()), start_ns) for name in sessions[:-1])
                parent = max(filter(None, starters), default=None)
            row |= {"session": sessions[-1], "session_source": "explicit", "turn": len(mine)}
            if parent is not None:
                row |= {"parent": parent[1], "think_us": (start_ns - parent[0]) // 1_000}
            insort(mine, (end_ns, span.span_id))
        yield row
    counts = (
        (others, "spans are not inferences: left out"),
        (unstarted, "spans have no start time: left out"),
        (containers, "spans contain other inferences or repeat one: left out, so that no token counts twice"),
        (repeated, "spans are in the file more than once: read once"),
        (late, LATE_TOKENS),
        (
            untimed,
            "spans have a time to the first token that is no number of seconds from 0 on: it is not kept",
        ),
        (uncounted, "spans have a count that is no whole number from 0 on: it is not kept"),
        (reversed_, "spans have no end, or one before their start: the end of the answer is not known"),
    )
    notes += [f"{n:,} {what}" for n, what in counts if n]
    notes += unit_notes(inferences[0][0] if inferences else None)


_Inference = tuple[int, int, _Span, JsonObject]
"""Start and end of an inference in ns, its span, and the attributes of the span."""


def _has_tokens(values: Mapping[str, Any]) -> bool:
    return any(map(_attribute_count, map(values.get, _TOKEN_NAMES)))


def _without_containers(
    spans: Sequence[_Inference], parents: Mapping[_SpanKey, _SpanKey]
) -> list[_Inference]:
    """Return the innermost inferences that have a count of tokens. In a tree without counts, return the
    innermost inferences.

    If a span around the attempts of one request is the only span with a count, this span is returned.
    """
    counted = {(span.trace_id, span.span_id): _has_tokens(values) for *_, span, values in spans}
    around_counted: set[_SpanKey] = set()
    around: set[_SpanKey] = set()
    within_counted: set[_SpanKey] = set()
    ancestors_of = {key: [k for k in _ancestor_keys(key, parents) if k in counted] for key in counted}
    for key, ancestors in ancestors_of.items():
        around.update(ancestors)
        if counted[key]:
            around_counted.update(ancestors)
    for key, ancestors in ancestors_of.items():
        if not counted[key] and any(counted[k] and k not in around_counted for k in ancestors):
            within_counted.add(key)
    containers = around_counted | within_counted | {key for key in around if not counted[key]}
    return [one for one in spans if (one[2].trace_id, one[2].span_id) not in containers]


def _ancestor_keys(key: _SpanKey, parents: Mapping[_SpanKey, _SpanKey]) -> Iterator[_SpanKey]:
    """Yield the spans around a span, the innermost first. Stop if the spans form a circle."""
    visited = {key}
    while (parent := parents.get(key)) is not None and parent[1] and parent not in visited:
        visited.add(parent)
        yield parent
        key = parent


def _row_of_span(start_ns: int, end_ns: int, span: _Span, values: JsonObject) -> TraceRow:
    row: TraceRow = {
        "id": span.span_id,
        "arrival_ns": start_ns,
        "arrival": start_ns // 1_000,
        "response_end_us": (end_ns - start_ns) // 1_000 if end_ns >= start_ns else None,
        "endpoint": _ENDPOINTS.get(values.get("gen_ai.operation.name", "")),
        "outcome": "upstream_error" if span.status.code == _STATUS_ERROR else "complete",
    }
    for column, names in _TEXTS.items():
        row[column] = next((v for v in map(values.get, names) if isinstance(v, str)), None)
    for column, names in _COUNTS.items():
        row[column] = next((v for v in map(_attribute_count, map(values.get, names)) if v is not None), None)
    for column, name in (("temperature", "gen_ai.request.temperature"), ("top_p", "gen_ai.request.top_p")):
        if isinstance(values.get(name), int | float):
            row[column] = float(values[name])
    ttfts = (v for v in map(values.get, _TTFT_NAMES) if isinstance(v, int | float) and 0 <= v < 1e9)
    ttft_s = next(ttfts, None)
    row["first_token_us"] = None if ttft_s is None else round(ttft_s * 1e6)
    row["stream"] = bool(values.get("gen_ai.request.stream", ttft_s is not None))
    reasons = values.get("gen_ai.response.finish_reasons")
    if isinstance(reasons, list) and reasons:
        row["finish_reason"] = reasons[0] if isinstance(reasons[0], str) else compact_json(reasons[0])
    return row


def _last_end_before(ends: Sequence[tuple[int, str]], start_ns: int) -> tuple[int, str] | None:
    """Return the last of the sorted ends (with the request's id) up to `start_ns`; None if there is none."""
    n = bisect_right(ends, start_ns, key=itemgetter(0))
    return ends[n - 1] if n else None


def _agents_of(
    key: _SpanKey, parents: Mapping[_SpanKey, _SpanKey], agents: Collection[_SpanKey]
) -> list[_SpanKey]:
    """Return the agents among the spans around a span, the innermost first."""
    return [ancestor for ancestor in _ancestor_keys(key, parents) if ancestor in agents]


def _attribute_count(value: Any) -> int | None:
    """Return the value of an attribute as a count; None if it is not a whole number from 0 on. Some programs
    write counts as doubles or texts."""
    if isinstance(value, str) and value.isdecimal() and len(value) <= _COUNT_DIGITS:
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= COUNT_MAX:
        return None
    return int(value) if value == int(value) else None


_COUNT_DIGITS: Final = 18


def _attribute_value(value: Mapping[str, Any]) -> Any:
    """Return the value of an AnyValue of OTLP. Its JSON encoding has 64-bit integers as texts."""
    for kind, inner in value.items():
        if kind == "intValue":
            return int(inner) if isinstance(inner, int) or str(inner).lstrip("-").isdecimal() else None
        if kind == "arrayValue":
            return (
                [_attribute_value(one) for one in inner.get("values", [])]
                if isinstance(inner, dict)
                else None
            )
        return inner
    return None


def _time_ns(text: int | str, line: int) -> int:
    if not str(text).isdecimal() or int(text) >= 1 << 63:
        raise FormatError(
            f"line {line}: startTimeUnixNano or endTimeUnixNano of a span: expected nanoseconds below 2^63,"
            f" got {clip_value(str(text))}"
        )
    return int(text)


_BEGINNING: Final = re.compile(rb'\{\s*"resourceSpans"')

FORMAT: Final = TraceFormat(
    name="otlp",
    title="OpenTelemetry GenAI spans (OTLP JSON Lines)",
    extensions=(".jsonl", ".json"),
    aspects=LENGTHS
    | {"model", "tenant", "max_tokens", "session and turn", "think time", "end of the answer", "first token"}
    | {"outcome and status"},
    sniff=lambda head, name: _BEGINNING.match(start_of(head)) is not None,
    info={"arrivals": "wall"},
    rows=_rows,
)

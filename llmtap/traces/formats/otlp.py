"""The trace format `otlp`: OpenTelemetry GenAI spans, as written by the collector's file exporter. Read only.

A span of an inference (`gen_ai.operation.name` is chat, text_completion or generate_content, or it is absent
and the span has a count of tokens) is a row of a capture. The `session` is the conversation's id, or the
trace's if the span has a parent; a nested agent (`invoke_agent` within another) is a session of its own,
whose first request has as `parent` the latest request of the agent around it that ended before.

All spans of a file are in memory, because agents' spans come after those of their requests.

Source: OTLP 1.x JSON encoding; OpenTelemetry semantic conventions for generative AI v0.1.0 and 1.41; vLLM's
`vllm/tracing`.
"""

from bisect import bisect_right, insort
from collections.abc import Iterator, Mapping, Sequence
from operator import itemgetter
from typing import Any, BinaryIO, Final

from msgspec import Struct

from llmtap.traces.bodies import compact
from llmtap.traces.format import LENGTHS, FormatError, TraceFormat
from llmtap.traces.text import BODY_BYTES_MAX, COUNT_MAX, json_rows, start_of

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
_TOKENS: Final = _COUNTS["input_tokens"] + _COUNTS["output_tokens"]
_FIRST: Final = ("gen_ai.response.time_to_first_chunk", "gen_ai.latency.time_to_first_token")
"""In seconds."""
_ERROR: Final = 2


class _Attribute(Struct):
    key: str
    value: dict[str, Any] = {}


class _Status(Struct, frozen=True):
    code: int = 0


class _Span(Struct, rename="camel"):
    trace_id: str
    span_id: str
    start_time_unix_nano: int | str
    end_time_unix_nano: int | str = 0
    parent_span_id: str = ""
    attributes: list[_Attribute] = []
    status: _Status = _Status()


class _ScopeSpans(Struct):
    spans: list[_Span] = []


class _ResourceSpans(Struct, rename="camel"):
    scope_spans: list[_ScopeSpans] = []


class _Line(Struct, rename="camel"):
    resource_spans: list[_ResourceSpans]


def _rows(stream: BinaryIO, notes: list[str]) -> Iterator[Mapping[str, Any]]:
    agents: dict[str, str] = {}  # parents of all spans
    nested: dict[str, str | None] = {}  # of spans of agents: the conversation
    found: list[tuple[int, int, _Span, dict[str, Any]]] = []
    others = 0
    for line, number in json_rows(stream, _Line, notes, bytes_max=BODY_BYTES_MAX):
        for span in (s for r in line.resource_spans for scope in r.scope_spans for s in scope.spans):
            values = {a.key: _value(a.value) for a in span.attributes}
            agents[span.span_id] = span.parent_span_id
            operation = values.get("gen_ai.operation.name")
            if operation == "invoke_agent":
                nested[span.span_id] = values.get("gen_ai.conversation.id")
            if operation in _OPERATIONS or (operation is None and any(map(values.get, _TOKENS))):
                start_ns, end_ns = (
                    _ns(t, number) for t in (span.start_time_unix_nano, span.end_time_unix_nano)
                )
                found.append((start_ns, end_ns, span, values))
            else:
                others += 1
    found.sort(key=lambda one: one[:2])
    ended: dict[str, list[tuple[int, str]]] = {}  # of each session: ends and ids of its requests, sorted
    for start_ns, end_ns, span, values in found:
        chain = _agents_of(span.span_id, agents, nested)
        base = values.get("gen_ai.conversation.id") or next(filter(None, map(nested.get, chain)), None)
        base = base or (span.trace_id if span.parent_span_id else None)
        row = _row(start_ns, end_ns, span, values)
        if base is not None:
            path = [base, *reversed(chain[:-1])]  # the outermost agent is the conversation itself
            sessions = ["/".join(path[: n + 1]) for n in range(len(path))]
            mine = ended.setdefault(sessions[-1], [])
            parent = _latest(mine, start_ns)
            if not mine:
                starters = (_latest(ended.get(name, ()), start_ns) for name in sessions[:-1])
                parent = max(filter(None, starters), default=None)
            row |= {"session": sessions[-1], "session_source": "explicit", "turn": len(mine)}
            if parent is not None:
                row |= {"parent": parent[1], "think_us": (start_ns - parent[0]) // 1_000}
            insort(mine, (end_ns, span.span_id))
        yield row
    if others:
        notes.append(f"{others:,} spans are not inferences: left out")


def _row(start_ns: int, end_ns: int, span: _Span, values: dict[str, Any]) -> dict[str, Any]:
    row: dict[str, Any] = {
        "id": span.span_id, "arrival_ns": start_ns, "arrival": start_ns // 1_000,
        "response_end_us": (end_ns - start_ns) // 1_000 if end_ns >= start_ns else None,
        "endpoint": _ENDPOINTS.get(values.get("gen_ai.operation.name", "")),
        "outcome": "upstream_error" if span.status.code == _ERROR else "complete",
    }  # fmt: skip
    for column, names in _TEXTS.items():
        row[column] = next((v for v in map(values.get, names) if isinstance(v, str)), None)
    for column, names in _COUNTS.items():
        row[column] = next(
            (v for v in map(values.get, names) if type(v) is int and 0 <= v <= COUNT_MAX), None
        )
    for column, name in (("temperature", "gen_ai.request.temperature"), ("top_p", "gen_ai.request.top_p")):
        if isinstance(values.get(name), int | float):
            row[column] = float(values[name])
    first = next((v for v in map(values.get, _FIRST) if isinstance(v, int | float) and 0 <= v < 1e9), None)
    row["first_token_us"] = None if first is None else round(first * 1e6)
    row["stream"] = bool(values.get("gen_ai.request.stream", first is not None))
    reasons = values.get("gen_ai.response.finish_reasons")
    if isinstance(reasons, list) and reasons:
        row["finish_reason"] = reasons[0] if isinstance(reasons[0], str) else compact(reasons[0])
    return row


def _latest(ends: Sequence[tuple[int, str]], start_ns: int) -> tuple[int, str] | None:
    """Return the last of the sorted ends that is not after `start_ns`."""
    n = bisect_right(ends, start_ns, key=itemgetter(0))
    return ends[n - 1] if n else None


def _agents_of(span: str, parents: Mapping[str, str], agents: Mapping[str, str | None]) -> list[str]:
    """Return the spans of agents around a span, the innermost first."""
    found: list[str] = []
    seen = {span}
    while (span := parents.get(span, "")) and span not in seen:
        seen.add(span)
        found += [span] if span in agents else []
    return found


def _value(value: Mapping[str, Any]) -> Any:
    """Return an AnyValue of OTLP; 64-bit integers are texts in JSON."""
    for kind, inner in value.items():
        if kind == "intValue":
            return int(inner) if isinstance(inner, int) or str(inner).lstrip("-").isdecimal() else None
        if kind == "arrayValue":
            return [_value(one) for one in inner.get("values", [])] if isinstance(inner, dict) else None
        return inner
    return None


def _ns(text: int | str, line: int) -> int:
    if not str(text).isdecimal() or int(text) >= 1 << 63:
        raise FormatError(f"line {line}: a time of a span is not a number of nanoseconds")
    return int(text)


FORMAT: Final = TraceFormat(
    name="otlp",
    title="OpenTelemetry GenAI spans (OTLP JSON Lines)",
    extensions=(".jsonl", ".json"),
    holds=LENGTHS
    | {"model", "tenant", "max_tokens", "session and turn", "think time", "end of the answer", "first token"}
    | {"outcome and status"},
    sniff=lambda head, name: start_of(head).startswith(b'{"resourceSpans"'),
    info={"arrivals": "wall"},
    rows=_rows,
)

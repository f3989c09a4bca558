"""The trace format `dynamo`: request traces of NVIDIA Dynamo, JSON Lines with agent sessions. Read only.

A line is `{"timestamp": ms since the start, "event": record}`, or the record alone. Only records
`request_end` are read. `agent_context` names the session, and of a subagent the session that started it: the
first request of a subagent has the latest finished request of that session as `parent`. Block ids have 64
bits without a sign there, and with a sign in a capture.

Source: ai-dynamo/dynamo, lib/llm/src/request_trace/types.rs; its documentation, "Agent Tracing"; AIPerf's
reader of `dynamo.request.trace.v1`.
"""

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, BinaryIO, Final

from msgspec import Meta, Struct

from llmtap.traces.format import LENGTHS, FormatError, TraceFormat
from llmtap.traces.text import Count, JsonLines, first_objects

_SCHEMA: Final = "dynamo.request.trace.v1"
_Ms = Annotated[float, Meta(ge=0, le=1e15)]


class _Replay(Struct):
    trace_block_size: Annotated[int, Meta(ge=1, le=1 << 30)]
    input_length: Count
    input_sequence_hashes: list[Annotated[int, Meta(ge=0)]]


class _Request(Struct):
    request_id: str
    model: str | None = None
    input_tokens: Count | None = None
    output_tokens: Count | None = None
    cached_tokens: Count | None = None
    request_received_ms: Annotated[int, Meta(ge=0, le=(1 << 63) // 10**6 - 1)] | None = None
    ttft_ms: _Ms | None = None
    total_time_ms: _Ms | None = None
    replay: _Replay | None = None


class _Context(Struct):
    session_id: str
    parent_trajectory_id: str | None = None
    parent_session_id: str | None = None


class _Record(Struct):
    schema: str | None = None
    event_type: str | None = None
    event_time_unix_ms: int | None = None
    event_source: str | None = None
    agent_context: _Context | None = None
    request: _Request | None = None
    tool: dict[str, Any] | None = None


class _Line(_Record):
    timestamp: int | float | None = None
    event: _Record | None = None


def _rows(stream: BinaryIO, notes: list[str]) -> Iterator[Mapping[str, Any]]:
    lines, others = JsonLines(stream, _Line), 0
    last: dict[str, tuple[str, int]] = {}  # of each session: its latest request, and that one's turn
    for line, number in lines.rows():
        record = line if line.event is None else line.event
        if record.event_type != "request_end" or record.request is None:
            others += 1
            continue
        request, context = record.request, record.agent_context
        if request.request_received_ms is None:
            raise FormatError(f"line {number}: request.request_received_ms: is missing")
        row: dict[str, Any] = {
            "id": request.request_id, "arrival_ns": request.request_received_ms * 10**6,
            "model": request.model, "input_tokens": request.input_tokens,
            "output_tokens": request.output_tokens, "cached_tokens": request.cached_tokens,
            "first_token_us": _us(request.ttft_ms), "response_end_us": _us(request.total_time_ms),
        }  # fmt: skip
        if context is not None:
            session = context.session_id
            parent, turn = last.get(session, (None, -1))
            if parent is None:
                starter = context.parent_trajectory_id or context.parent_session_id
                parent = last[starter][0] if starter in last else None
            last[session] = request.request_id, turn + 1
            row |= {"session": session, "session_source": "explicit", "turn": turn + 1, "parent": parent}
        if (replay := request.replay) is not None:
            row |= {
                "blocks": [i - (1 << 64) if i >> 63 else i for i in replay.input_sequence_hashes],
                "block_size": replay.trace_block_size, "block_unit": "tokens",
            }  # fmt: skip
            if row["input_tokens"] is None:
                row["input_tokens"] = replay.input_length
        yield row
    if others:
        notes.append(f"{others} records that are not of finished requests")
    notes += lines.notes()


def _us(ms: float | None) -> int | None:
    return None if ms is None else round(ms * 1_000)


def _sniff(head: bytes, name: str) -> bool:
    events = [one.get("event", one) for one in first_objects(head)]
    return bool(events) and all(isinstance(e, dict) and e.get("schema") == _SCHEMA for e in events)


FORMAT: Final = TraceFormat(
    name="dynamo",
    title="Dynamo request trace (JSON Lines)",
    extensions=(".jsonl",),
    holds=LENGTHS | {"model", "session and turn", "prefix blocks", "end of the answer", "first token"},
    sniff=_sniff,
    info={"arrivals": "wall", "blocks": "trace", "block_unit": "tokens"},
    rows=_rows,
)

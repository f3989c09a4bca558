"""The trace formats `dynamo` (request traces of NVIDIA Dynamo) and `weka` (coding agents). Read only.

Files of the two formats are JSON Lines, and contain the tree of an agent's requests: a subagent is a separate
session. The `parent` of its first request is a request of the session that started the subagent.

`dynamo`: a line is `{"timestamp": ms since the start, "event": record}`, or the record alone. Only records of
the type `request_end` are read. An answer with `ttft_ms` is a stream, which ends after `total_time_ms`; the
latency model of an engine can be fitted to these two times. `agent_context` names the session; the parent of
a request is the latest finished request of its session. Block ids are unsigned 64-bit numbers, which become
signed numbers in a capture.

`weka` (kv-cache-tester): a line is one conversation. Times are seconds from its beginning. The `type` of an
entry is `s` (streamed) or `n` (not streamed). An entry of the type `subagent` has requests of its own, whose
parent is the latest request before the entry. Block ids of the scope `local` are unique only within one
conversation.

Source: ai-dynamo/dynamo, lib/llm/src/request_trace/types.rs; its documentation, "Agent Tracing";
callanjfox/kv-cache-tester, docs/trace_replay_tester.md and traces/; AIPerf's readers of both.
"""

from collections.abc import Iterator
from typing import Annotated, Any, BinaryIO, Final

from msgspec import Meta, Struct, field

from llmtap.json_types import JsonObject
from llmtap.traces.format import (
    LATE_TOKENS,
    LENGTHS,
    FormatError,
    TraceFormat,
    TraceRow,
    remove_late_token,
    unit_notes,
)
from llmtap.traces.text import (
    BODY_BYTES_MAX,
    Number,
    TokenCount,
    first_objects,
    json_rows,
    number_ns,
    start_of,
)

_SCHEMA: Final = "dynamo.request.trace.v1"
_Ms = Annotated[float, Meta(ge=0, le=1e15)]
"""Duration in milliseconds."""
_BlockSize = Annotated[int, Meta(ge=1, le=1 << 30)]


class _Replay(Struct):
    """Member `replay` of a record: length and block hashes of the prompt, from which it can be replayed."""

    trace_block_size: _BlockSize
    """Number of tokens in a block."""
    input_length: TokenCount
    input_sequence_hashes: list[Annotated[int, Meta(ge=0)]]


class _Request(Struct):
    """Member `request` of a Dynamo record."""

    request_id: str
    model: str | None = None
    input_tokens: TokenCount | None = None
    output_tokens: TokenCount | None = None
    cached_tokens: TokenCount | None = None
    request_received_ms: Number | None = None
    ttft_ms: _Ms | None = None
    total_time_ms: _Ms | None = None
    replay: _Replay | None = None


class _Context(Struct):
    """Member `agent_context` of a Dynamo record."""

    session_id: str
    parent_trajectory_id: str | None = None
    parent_session_id: str | None = None


class _Record(Struct):
    """One record of Dynamo's trace."""

    schema: str | None = None
    event_type: str | None = None
    event_time_unix_ms: Number | None = None
    event_source: str | None = None
    """Part of the system that wrote the record."""
    agent_context: _Context | None = None
    request: _Request | None = None
    tool: JsonObject | None = None


class _Line(_Record):
    """A line of the file: a record, alone or as the member `event`."""

    timestamp: int | float | None = None
    event: _Record | None = None


def _dynamo_rows(stream: BinaryIO, notes: list[str]) -> Iterator[TraceRow]:
    others = late = 0
    ids: set[int] = set()  # Hashes of the ids, which need less memory: about 60 bytes per record.
    repeated = 0
    latest: dict[str, tuple[str, int]] = {}  # Id and turn of the latest request of each session.
    first_ns: int | None = None
    for line, number in json_rows(stream, _Line, notes):
        record = line if line.event is None else line.event
        if record.event_type != "request_end" or record.request is None:
            others += 1
            continue
        request, context = record.request, record.agent_context
        repeated += hash(request.request_id) in ids
        ids.add(hash(request.request_id))
        if request.request_received_ms is None:
            raise FormatError(f"line {number}: request.request_received_ms: is missing, but required")
        row: TraceRow = {
            "id": request.request_id,
            "arrival_ns": number_ns(request.request_received_ms, 6, number, "request.request_received_ms"),
            "model": request.model,
            "input_tokens": request.input_tokens,
            "output_tokens": request.output_tokens,
            "cached_tokens": request.cached_tokens,
            "first_token_us": _ms_to_us(request.ttft_ms),
            "response_end_us": _ms_to_us(request.total_time_ms),
            "stream": request.ttft_ms is not None,
        }
        first_ns = row["arrival_ns"] if first_ns is None else first_ns
        late += remove_late_token(row)
        if context is not None:
            session = context.session_id
            parent, turn = latest.get(session, (None, -1))
            if parent is None:
                starter = context.parent_trajectory_id or context.parent_session_id
                parent = latest[starter][0] if starter in latest else None
            latest[session] = request.request_id, turn + 1
            row |= {"session": session, "session_source": "explicit", "turn": turn + 1, "parent": parent}
        if (replay := request.replay) is not None:
            row |= {
                "blocks": [i - (1 << 64) if i >> 63 else i for i in replay.input_sequence_hashes],
                "block_size": replay.trace_block_size,
                "block_unit": "tokens",
            }
            if row["input_tokens"] is None:
                row["input_tokens"] = replay.input_length
        yield row
    if others:
        notes.append(f"{others} records that are not of finished requests")
    if repeated:
        notes.append(f"{repeated:,} records have the request_id of an earlier one: all of them are rows")
    if late:
        notes.append(f"{late:,} {LATE_TOKENS}")
    notes += unit_notes(first_ns)


def _ms_to_us(ms: float | None) -> int | None:
    return None if ms is None else round(ms * 1_000)


def _is_dynamo(head: bytes, name: str) -> bool:
    events = [one.get("event", one) for one in first_objects(head)]
    return bool(events) and all(isinstance(e, dict) and e.get("schema") == _SCHEMA for e in events)


class _Entry(Struct):
    """One request or other event of a conversation in WEKA's format."""

    t: Number
    """Arrival in seconds since the conversation began."""
    type: str
    model: str | None = None
    input_tokens: TokenCount | None = field(default=None, name="in")
    output_tokens: TokenCount | None = field(default=None, name="out")
    hash_ids: list[Annotated[int, Meta(ge=0, lt=1 << 40)]] | None = None
    stop: str | None = None
    """Finish reason."""
    api_time: Number | None = None
    """Duration of the answer in seconds."""
    think_time: Number | None = None
    """Pause of the user before the request, in seconds."""
    ttft: Number | None = None
    agent_id: str | None = None
    """Name of the subagent that sent the request; None: the main agent."""
    requests: list["_Entry"] = []


class _Conversation(Struct):
    """One file of WEKA's format: a conversation with its subagents."""

    id: str
    block_size: _BlockSize
    requests: list[_Entry]
    hash_id_scope: str = "local"
    models: list[str] = []
    tool_tokens: int = 0
    system_tokens: int = 0
    totals: Any = None


def _weka_rows(stream: BinaryIO, notes: list[str]) -> Iterator[TraceRow]:
    late = 0
    conversations = json_rows(stream, _Conversation, notes, bytes_max=BODY_BYTES_MAX)
    for index, (one, number) in enumerate(conversations, 1):
        # Add a number larger than all ids of a conversation, so that ids of different conversations differ.
        shift = index << 40 if one.hash_id_scope == "local" else 0
        for row in _session_rows(one, one.requests, one.id, None, number, shift):
            late += remove_late_token(row)
            yield row
    if late:
        notes.append(f"{late:,} {LATE_TOKENS}")


def _session_rows(
    conversation: _Conversation,
    entries: list[_Entry],
    session: str,
    parent: str | None,
    number: int,
    shift: int,
) -> Iterator[TraceRow]:
    """Yield the rows of one session, and those of the sessions that it starts. `number`: line number, for
    errors. `shift`: number that is added to each block id."""
    turn = 0
    for i, entry in enumerate(entries):
        if entry.type == "subagent":
            child = f"{session}/{entry.agent_id or i}"
            yield from _session_rows(conversation, entry.requests, child, parent, number, shift)
            continue
        name = f"{session}#{turn}"
        row: TraceRow = {
            "id": name,
            "session": session,
            "session_source": "explicit",
            "turn": turn,
            "parent": parent,
            "arrival_ns": number_ns(entry.t, 9, number, "requests[...].t"),
            "model": entry.model,
            "stream": entry.type == "s",
            "input_tokens": entry.input_tokens,
            "output_tokens": entry.output_tokens,
            "finish_reason": entry.stop or None,
        }
        times = {
            "response_end_us": entry.api_time,
            "think_us": entry.think_time,
            "first_token_us": entry.ttft,
        }
        for column, seconds in times.items():
            if seconds is not None:
                row[column] = number_ns(seconds, 9, number, "requests[...]") // 1_000
        if entry.hash_ids is not None:
            ids = [shift + i for i in entry.hash_ids]
            row |= {"blocks": ids, "block_size": conversation.block_size, "block_unit": "tokens"}
        yield row
        parent, turn = name, turn + 1


def _is_weka(head: bytes, name: str) -> bool:
    text = start_of(head)
    keys = (b'"block_size"', b'"requests"', b'"hash_ids"')
    return text.startswith(b"{") and all(key in text for key in keys)


_HOLDS: Final = LENGTHS | {"model", "session and turn", "prefix blocks", "end of the answer", "first token"}
_BLOCKS: Final = {"blocks": "trace", "block_unit": "tokens"}

FORMATS: Final = (
    TraceFormat(
        name="dynamo",
        title="Dynamo request trace (JSON Lines)",
        extensions=(".jsonl",),
        aspects=_HOLDS,
        sniff=_is_dynamo,
        info={"arrivals": "wall", **_BLOCKS},
        rows=_dynamo_rows,
    ),
    TraceFormat(
        name="weka",
        title="Weka agentic coding trace (JSON)",
        extensions=(".json", ".jsonl"),
        aspects=_HOLDS | {"think time"},
        sniff=_is_weka,
        info=_BLOCKS,
        rows=_weka_rows,
    ),
)

"""The trace format `weka`: traces of coding agents (kv-cache-tester), JSON with nested subagents. Read only.

Each line of a file is one conversation. Times are seconds from its beginning. `type` is `s` (streamed) or
`n`. An entry of the type `subagent` has requests of its own: they become a session whose first request has
the latest one before the entry as `parent`. Block ids of the scope `local` are those of one conversation.

Source: callanjfox/kv-cache-tester, docs/trace_replay_tester.md and traces/; AIPerf's reader of `weka_trace`.
"""

from collections.abc import Iterator
from typing import Annotated, Any, BinaryIO, Final

from msgspec import Meta, Struct, field

from llmtap.traces.format import LENGTHS, TraceFormat
from llmtap.traces.text import BODY_BYTES_MAX, Count, JsonLines, Number, number_ns, start_of

_Id = Annotated[int, Meta(ge=0, lt=1 << 40)]


class _Entry(Struct):
    t: Number
    type: str
    model: str | None = None
    read: Count | None = field(default=None, name="in")
    made: Count | None = field(default=None, name="out")
    hash_ids: list[_Id] | None = None
    stop: str | None = None
    api_time: Number | None = None
    think_time: Number | None = None
    ttft: Number | None = None
    agent_id: str | None = None
    requests: list["_Entry"] = []


class _Trace(Struct):
    id: str
    block_size: Annotated[int, Meta(ge=1, le=1 << 30)]
    requests: list[_Entry]
    hash_id_scope: str = "local"
    models: list[str] = []
    tool_tokens: int = 0
    system_tokens: int = 0
    totals: Any = None


def _rows(stream: BinaryIO, notes: list[str]) -> Iterator[dict[str, Any]]:
    lines = JsonLines(stream, _Trace, bytes_max=BODY_BYTES_MAX)
    for trace, number in lines.rows():
        # Beyond all ids of a conversation, so that those of two are different.
        shift = number << 40 if trace.hash_id_scope == "local" else 0
        yield from _session(trace, trace.requests, trace.id, None, number, shift)
    notes += lines.notes()


def _session(
    trace: _Trace, entries: list[_Entry], session: str, parent: str | None, number: int, shift: int
) -> Iterator[dict[str, Any]]:
    turn = 0
    for i, entry in enumerate(entries):
        if entry.type == "subagent":
            child = f"{session}/{entry.agent_id or i}"
            yield from _session(trace, entry.requests, child, parent, number, shift)
            continue
        name = f"{session}#{turn}"
        row: dict[str, Any] = {
            "id": name, "session": session, "session_source": "explicit", "turn": turn, "parent": parent,
            "arrival_ns": number_ns(entry.t, 9, number, "requests[...].t"), "model": entry.model,
            "stream": entry.type == "s", "input_tokens": entry.read, "output_tokens": entry.made,
            "finish_reason": entry.stop or None,
        }  # fmt: skip
        for column, seconds in (
            ("response_end_us", entry.api_time),
            ("think_us", entry.think_time),
            ("first_token_us", entry.ttft),
        ):
            if seconds is not None:
                row[column] = number_ns(seconds, 9, number, "requests[...]") // 1_000
        if entry.hash_ids is not None:
            ids = [shift + i for i in entry.hash_ids]
            row |= {"blocks": ids, "block_size": trace.block_size, "block_unit": "tokens"}
        yield row
        parent, turn = name, turn + 1


def _sniff(head: bytes, name: str) -> bool:
    text = start_of(head)
    return text.startswith(b"{") and all(
        key in text for key in (b'"block_size"', b'"requests"', b'"hash_ids"')
    )


FORMAT: Final = TraceFormat(
    name="weka",
    title="Weka agentic coding trace (JSON)",
    extensions=(".json", ".jsonl"),
    holds=LENGTHS
    | {"model", "session and turn", "think time", "prefix blocks", "end of the answer", "first token"},
    sniff=_sniff,
    info={"blocks": "trace", "block_unit": "tokens"},
    rows=_rows,
)

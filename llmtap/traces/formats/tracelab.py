"""The trace formats `tracelab` (rounds of coding agents) and `tracelab-replay` (its replay table). Read only.

`tracelab`: JSON Lines, one call of a model per line. `input_tokens_total` is the number of all tokens of the
prompt, of which `prefix_tokens` came from the provider's cache. `timing_events` are entries of an agent's
log, in order. The last input (a user's message or a tool's result) before the first output is the arrival;
the last output (reasoning, text, a tool call) is the end of the answer. An agent logs a block when the block
is complete, so the time of the first token is not known. A file can have a session or a round more than once;
all rows are read.

`tracelab-replay`: CSV, one round per line. `prefix_len` is the number of tokens that the context keeps,
`input_len` is the number of new tokens, and `tool_wait_after_ms` is the time before the next round of the
session. The first round of a session can have an `arrival_time` in ms (default: 0); later rounds have no
arrival.

Source: uw-syfi/TraceLab 0b8a262, README.md, artifacts/utils/DB_SCHEMA.md and replay/README.md.
"""

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any, BinaryIO, Final

import pyarrow as pa
from msgspec import Struct

from llmtap.traces.format import LENGTHS, FormatError, TraceFormat, TraceRow, batch_of
from llmtap.traces.text import (
    BODY_BYTES_MAX,
    COUNT,
    SECONDS_US,
    TEXT,
    CsvColumn,
    CsvKind,
    TokenCount,
    clip_value,
    csv_header,
    first_objects,
    json_rows,
    read_csv,
    start_of,
)

_INPUTS: Final = frozenset({"user_message", "tool_result"})
_OUTPUTS: Final = frozenset({"reasoning", "text", "tool_call"})
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)


class _Event(Struct):
    """One event of an agent's log."""

    event_type: str
    timestamp: str | None = None


class _Round(Struct):
    """One round of an agent: a request and the tools after it."""

    session_id: str
    round_index: TokenCount
    input_tokens_total: TokenCount | None = None
    output_tokens: TokenCount | None = None
    prefix_tokens: TokenCount | None = None
    """Number of input tokens that came from a cache."""
    reasoning_output_tokens: TokenCount | None = None
    round_id: str | None = None
    model: str | None = None
    timing_events: list[_Event] = []
    # The following fields are not used; a note reports the number of rows that have them.
    tools: Any = None
    provider: Any = None
    project: Any = None
    session_file: Any = None
    store: Any = None
    home: Any = None
    user: Any = None
    cwd: Any = None
    turn_id: Any = None
    trace_key: Any = None
    newly_append_tokens: Any = None
    claude_uncached_input_tokens: Any = None
    claude_cache_creation_input_tokens: Any = None
    claude_cache_read_input_tokens: Any = None
    first_input_event_type: Any = None
    current_input_event_count: Any = None
    current_user_message_count: Any = None
    current_tool_result_count: Any = None
    current_user_message_chars: Any = None
    current_tool_result_chars: Any = None
    current_input_chars: Any = None


def _read_rounds(stream: BinaryIO, notes: list[str]) -> Iterator[TraceRow]:
    """Read the rounds of a `tracelab` file as rows."""
    timeless = endless = with_tools = count = 0
    for one, number in json_rows(stream, _Round, notes, bytes_max=BODY_BYTES_MAX):
        arrival_ns, end_ns = _arrival_and_end_ns(one.timing_events, number)
        timeless += arrival_ns is None
        endless += arrival_ns is not None and end_ns is None
        with_tools += bool(one.tools)
        count += 1
        row: TraceRow = {
            "id": one.round_id,
            "session": one.session_id,
            "session_source": "explicit",
            "turn": one.round_index,
            "model": one.model,
            "input_tokens": one.input_tokens_total,
            "output_tokens": one.output_tokens,
            "cached_tokens": one.prefix_tokens,
            "reasoning_tokens": one.reasoning_output_tokens,
            "arrival_ns": arrival_ns,
        }
        if arrival_ns is not None and end_ns is not None:
            row["response_end_us"] = (end_ns - arrival_ns) // 1_000
        yield row
    reported = (
        (timeless, "rows have no input before their first output: their arrival is not known"),
        (endless, "rows have no output, or one before their input: the end of the answer is not known"),
        (with_tools, "rows have tools: their times and sizes are not kept"),
        (count, "rows have sizes in characters, and names of projects and files: not kept"),
    )
    notes += [f"{n:,} {what}" for n, what in reported if n]


def _arrival_and_end_ns(events: list[_Event], number: int) -> tuple[int | None, int | None]:
    """Return the time of the last input before the first output, and the time of the last output. None for a
    time that is not known. `number`: line number, for errors."""
    arrival_ns = end_ns = None
    for i, event in enumerate(events):
        if event.timestamp is None or event.event_type not in _INPUTS | _OUTPUTS:
            continue
        time_ns = _date_ns(event.timestamp, f"line {number}: timing_events[{i}].timestamp")
        if event.event_type in _OUTPUTS:
            end_ns = time_ns if end_ns is None else max(end_ns, time_ns)
        elif end_ns is None:
            arrival_ns = time_ns
    if arrival_ns is not None and end_ns is not None and end_ns < arrival_ns:
        end_ns = None
    return arrival_ns, end_ns


def _date_ns(date: str, where: str) -> int:
    try:
        moment = datetime.fromisoformat(date)
    except ValueError:
        got = clip_value(date)
        raise FormatError(f"{where}: expected a date such as 2026-06-01T05:40:20.151Z, got {got}") from None
    moment = moment if moment.tzinfo else moment.replace(tzinfo=UTC)
    ns = (moment - _EPOCH) // timedelta(microseconds=1) * 1_000
    if ns < 0:
        raise FormatError(f"{where}: the date {date} is before 1970, the earliest possible year")
    return ns


def _is_rounds(head: bytes, name: str) -> bool:
    text = start_of(head)
    if not text.startswith(b"{"):
        return False
    keys = ("session_id", "round_index", "timing_events", "input_tokens_total")
    if objects := first_objects(head):
        return all({*keys} <= one.keys() for one in objects)
    # A first line that is longer than `head` cannot be decoded, so search it for the names of the fields.
    return b"\n" not in text and all(f'"{key}"'.encode() in text for key in keys[:2])


_MS: Final = CsvKind(
    SECONDS_US.pattern, "milliseconds, with at most nine digits after the point", SECONDS_US.parse, str
)
"""Kind of a column with milliseconds. The parser that reads s as us also reads ms as ns (factor 10**6)."""
_COLUMNS: Final = (
    CsvColumn("session_id", TEXT, "session", required=False),
    CsvColumn("id", TEXT, "other_session", required=False),
    CsvColumn("arrival_time", _MS, "arrival_ns", required=False, allows_empty=True),
    CsvColumn("round_idx", COUNT, "turn"),
    CsvColumn("prefix_len", COUNT, "prefix"),
    CsvColumn("input_len", COUNT, "appended"),
    CsvColumn("output_len", COUNT, "output_tokens"),
    CsvColumn("tool_wait_after_ms", _MS, "wait_ns", allows_empty=True),
)


def _read_replay_table(stream: BinaryIO, notes: list[str]) -> Iterator[pa.RecordBatch]:
    """Read the rounds of a `tracelab-replay` table as batches of rows."""
    waits_ns: dict[str, int] = {}  # Wait after the latest round of each session.
    turns: dict[str, int] = {}  # Turn of the latest round of each session.
    number = 0
    for rows, columns in read_csv(stream, _COLUMNS, notes):
        values = {name: column.to_pylist() for name, column in columns.items()}
        sessions = values.get("session") or values.get("other_session")
        if sessions is None:
            raise FormatError("line 1: session_id: the column is missing, but required")
        session_arrivals_ns = values.get("arrival_ns") or [None] * rows
        arrivals, think_us = [], []
        for session, turn, arrival_ns, wait_ns in zip(
            sessions, values["turn"], session_arrivals_ns, values["wait_ns"], strict=True
        ):
            number += 1
            if turn < turns.get(session, 0):
                raise FormatError(
                    f"row {number}: round_idx: {turn} follows {turns[session]} of the same session; the "
                    "rounds of a session must be in ascending order"
                )
            turns[session] = turn
            wait_before_ns = waits_ns.get(session)
            arrivals.append((arrival_ns or 0) if wait_before_ns is None else None)
            think_us.append(None if wait_before_ns is None else wait_before_ns // 1_000)
            waits_ns[session] = wait_ns or 0
        yield batch_of(
            rows,
            {
                "session": sessions,
                "session_source": ["explicit"] * rows,
                "turn": values["turn"],
                "arrival_ns": arrivals,
                "think_us": think_us,
                "output_tokens": values["output_tokens"],
                "input_tokens": [a + b for a, b in zip(values["prefix"], values["appended"], strict=True)],
            },
        )


_HOLDS: Final = LENGTHS | {"session and turn"}

FORMATS: Final = (
    TraceFormat(
        name="tracelab",
        title="TraceLab rounds of coding agents (JSON Lines)",
        extensions=(".jsonl",),
        aspects=_HOLDS | {"model", "end of the answer"},
        remarks={"first token": "the log has the times of complete blocks"},
        sniff=_is_rounds,
        info={"arrivals": "wall"},
        rows=_read_rounds,
    ),
    TraceFormat(
        name="tracelab-replay",
        title="TraceLab replay table (CSV)",
        extensions=(".csv",),
        aspects=_HOLDS | {"think time"},
        sniff=lambda head, name: {c.name for c in _COLUMNS if c.required} <= csv_header(head),
        batches=_read_replay_table,
    ),
)

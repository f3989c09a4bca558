"""The trace format `bailian`: Qwen-Bailian's traces, JSON Lines of chats that name their parents. Read only.

The fields of a line are `chat_id, parent_chat_id (-1: the first of its conversation), timestamp (seconds),
input_length, output_length, type (text, search, image or file), turn (from 1), hash_ids` (of 16-token
blocks). In the columns of a capture, `chat_id` is `id`, its parent `parent`, the chat at the root `session`,
`turn` counts from 0, and `type` is `route`.

Source: alibaba-edu/qwen-bailian-usagetraces-anon, README (Apache-2.0).
"""

from collections.abc import Iterator
from typing import Annotated, BinaryIO, Final

import msgspec
import pyarrow as pa

from llmtap.traces.blocks import block_columns
from llmtap.traces.format import LENGTHS, TraceFormat, batch_of
from llmtap.traces.text import Count, Id, JsonLines, Number, first_objects, numbers_ns

_SIZE: Final = 16


class _Row(msgspec.Struct):
    chat_id: Id
    timestamp: Number
    input_length: Count
    output_length: Count
    parent_chat_id: Id = -1
    type: str | None = None
    turn: Annotated[int, msgspec.Meta(ge=1, le=(1 << 31) - 1)] = 1
    hash_ids: list[Id] | None = None


def _batches(stream: BinaryIO, notes: list[str]) -> Iterator[pa.RecordBatch]:
    lines = JsonLines(stream, _Row)
    roots: dict[int, int] = {}  # of chats that have a parent
    for rows, numbers in lines:
        sessions = []
        for row in rows:
            root = row.chat_id
            if row.parent_chat_id != -1:
                root = roots.get(row.parent_chat_id, row.parent_chat_id)
                roots[row.chat_id] = root
            sessions.append(str(root))
        columns = {
            "id": [str(row.chat_id) for row in rows],
            "parent": [None if row.parent_chat_id == -1 else str(row.parent_chat_id) for row in rows],
            "session": sessions,
            "session_source": ["explicit"] * len(rows),
            "turn": [row.turn - 1 for row in rows],
            "route": [row.type for row in rows],
            "arrival_ns": numbers_ns([row.timestamp for row in rows], 9, numbers, "timestamp"),
            "input_tokens": [row.input_length for row in rows],
            "output_tokens": [row.output_length for row in rows],
            **block_columns([row.hash_ids for row in rows], _SIZE),
        }
        yield batch_of(len(rows), columns)
    notes += lines.notes()


FORMAT: Final = TraceFormat(
    name="bailian",
    title="Qwen-Bailian trace (JSON Lines)",
    extensions=(".jsonl",),
    holds=LENGTHS | {"session and turn", "prefix blocks"},
    sniff=lambda head, name: (
        bool(objects := first_objects(head))
        and all({"chat_id", "timestamp", "input_length"} <= o.keys() for o in objects)
    ),
    info={"blocks": "trace", "block_unit": "tokens", "block_size": _SIZE},
    batches=_batches,
)

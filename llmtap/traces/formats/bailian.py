"""Qwen-Bailian's traces: JSON Lines of chats that name their parents, with ids of 16-token blocks.

`chat_id, parent_chat_id (-1: the first of its conversation), timestamp (seconds), input_length,
output_length, type (text, search, image or file), turn (from 1), hash_ids`. In a capture, `chat_id` is `id`,
its parent `parent`, the chat at the root `session`, `turn` counts from 0, and `type` is `route`.

Of other sources, chats are numbered as they are written, a row without a known parent follows the last one of
its session, and ids of larger blocks are written unchanged: they cannot be cut. The numbers of sessions and
chats are in memory while a file is read or written.

Source: alibaba-edu/qwen-bailian-usagetraces-anon, README (Apache-2.0).
"""

from collections.abc import Iterator
from typing import Annotated, BinaryIO, Final

import msgspec
import pyarrow as pa

from llmtap.traces.blocks import BLOCK_COLUMNS, BlockIds, block_columns
from llmtap.traces.bodies import compact
from llmtap.traces.format import LENGTHS, NO_FAILED, TraceFormat, TraceWriter, batch_of
from llmtap.traces.text import Count, Id, JsonLines, Number, decimal_text, first_objects, numbers_ns

__all__ = ["FORMAT"]

_SIZE: Final = 16
_WANTED: Final = (
    "arrival_ns", "input_tokens", "output_tokens", "id", "parent", "session", "turn", "route", "images",
)  # fmt: skip


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


def _write(writer: TraceWriter) -> None:
    ids, chats = BlockIds(writer, _SIZE), _Chats()
    for batch in writer.outgoing((*_WANTED, *BLOCK_COLUMNS)):
        columns = [batch.column(name).to_pylist() for name in _WANTED]
        lines = []
        for row, blocks in zip(zip(*columns, strict=True), ids.of(batch), strict=True):
            arrival_ns, read, made, name, parent, session, turn, kind, images = row
            if writer.own:  # they have their numbers
                chat = int(name or -1), int(parent or -1), (turn or 0) + 1
            else:
                chat = chats.number(name, parent, session, turn)
                kind = "image" if images else "text"
            line = (
                f'{{"chat_id": {chat[0]}, "parent_chat_id": {chat[1]}, '
                f'"timestamp": {decimal_text(arrival_ns, 9, point=True)}, "input_length": {read}, '
                f'"output_length": {made}'
            )
            line += "" if kind is None else f', "type": {compact(kind)}'
            line += f', "turn": {chat[2]}'
            line += "" if blocks is None else f', "hash_ids": {blocks}'
            lines.append(line + "}\n")
        writer.out.write("".join(lines).encode())
    ids.report()
    writer.note(chats.lost, "rows follow an exchange that is not here: they begin a conversation")


class _Chats:
    """Numbers of the chats of other formats, in the order in which they are written."""

    def __init__(self) -> None:
        self._count = 0
        self._ids: dict[str, int] = {}
        self._last: dict[str, tuple[int, int]] = {}
        """Of each session: its last chat, and that chat's turn."""
        self.lost = 0
        """Rows whose parent is not in the file, nor any other of their session."""

    def number(
        self, name: str | None, parent: str | None, session: str | None, turn: int | None
    ) -> tuple[int, int, int]:
        """Return chat, parent and turn."""
        chat_id = self._count
        self._count += 1
        before, turns = self._last.get(session, (-1, 0)) if session is not None else (-1, 0)
        parent_id = before if parent is None else self._ids.get(parent, before)
        self.lost += parent is not None and parent_id == -1
        number = turns + 1 if turn is None else turn + 1
        if session is not None:
            self._last[session] = chat_id, number
            if name is not None:
                self._ids[name] = chat_id
        return chat_id, parent_id, number


FORMAT: Final = TraceFormat(
    name="bailian",
    title="Qwen-Bailian trace (JSON Lines)",
    extensions=(".jsonl",),
    holds=LENGTHS | {"session and turn", "prefix blocks"},
    needs=LENGTHS,
    why={
        "prefix blocks": "blocks of 16 tokens; the ids of larger ones go over as they are",
        **NO_FAILED,
        "think time": "only the times of the turns themselves",
    },
    sniff=lambda head, name: (
        bool(objects := first_objects(head))
        and all({"chat_id", "timestamp", "input_length"} <= o.keys() for o in objects)
    ),
    info={"blocks": "trace", "block_unit": "tokens", "block_size": _SIZE},
    batches=_batches,
    writes=_write,
)

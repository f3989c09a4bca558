"""Qwen-Bailian's traces: JSON Lines of chats that know their parents, with ids of 16-token blocks.

`chat_id, parent_chat_id (-1: the first of its conversation), timestamp (seconds), input_length,
output_length, type (text, search, image or file), turn (from 1), hash_ids`. What becomes what: `chat_id` is
`id`, its parent `parent`, the chat at the root `session`, `turn` counts from 0, `type` is `route`.

Of other sources, chats are numbered as they are written, a row without a known parent follows the last one of
its session, and ids of 512-token blocks stay what they are: a chain over small blocks cannot be had from one
over large ones. Numbers of sessions and chats are kept in memory while a file is read or written.

Style: `timestamp` (a spelling of `decimals.py`), `keys`, `json`, and those of `lines.py`.

Source: shared/traces/formats.md 1.4; alibaba-edu/qwen-bailian-usagetraces-anon, README (Apache-2.0).
"""

from collections.abc import Iterable, Iterator
from typing import Annotated, Any, BinaryIO, Final

import msgspec
import pyarrow as pa

from llmtap.capture.schema import CaptureInfo
from llmtap.traces.block_ids import BLOCK_COLUMNS, BlockIds
from llmtap.traces.format import TraceFormat, TraceSource, TraceWritten, WriteOptions, batch_of
from llmtap.traces.formats.timed_lengths import STYLES, Number, json_texts, number_ns
from llmtap.traces.text.decimals import checked_spelling, decimal_text, spelling_of
from llmtap.traces.text.jsonl import Count, Id, JsonLines, first_objects
from llmtap.traces.text.lines import LineWriter, Style
from llmtap.traces.writer import Outgoing

__all__ = ["FORMAT"]

_SIZE: Final = 16
_FIELDS: Final = (
    "chat_id", "parent_chat_id", "timestamp", "input_length", "output_length", "type", "turn", "hash_ids",
)  # fmt: skip
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


def _read(stream: BinaryIO) -> TraceSource:
    lines = JsonLines(stream, _Row)
    blocks = iter(lines)
    first = next(blocks, None)
    style = lines.style
    style["timestamp"] = spelling_of(str(row.timestamp) for row in first[0]) if first else "float"
    info = CaptureInfo(
        source="bailian", arrivals="trace", blocks="trace", block_unit="tokens", block_size=_SIZE, style=style
    )
    source = TraceSource(info, iter(()))

    def batches() -> Iterator[pa.RecordBatch]:
        roots: dict[int, int] = {}  # of chats that have a parent
        block = first
        while block is not None:
            rows, numbers = block
            sessions = []
            for row in rows:
                root = row.chat_id
                if row.parent_chat_id != -1:
                    root = roots.get(row.parent_chat_id, row.parent_chat_id)
                    roots[row.chat_id] = root
                sessions.append(str(root))
            ids = [row.hash_ids for row in rows]
            columns: dict[str, list[Any]] = {
                "id": [str(row.chat_id) for row in rows],
                "parent": [None if row.parent_chat_id == -1 else str(row.parent_chat_id) for row in rows],
                "session": sessions,
                "session_source": ["explicit"] * len(rows),
                "turn": [row.turn - 1 for row in rows],
                "route": [row.type for row in rows],
                "arrival_ns": [
                    number_ns(row.timestamp, 9, number, "timestamp")
                    for row, number in zip(rows, numbers, strict=True)
                ],
                "input_tokens": [row.input_length for row in rows],
                "output_tokens": [row.output_length for row in rows],
                "blocks": ids,
                "block_size": [None if i is None else _SIZE for i in ids],
                "block_unit": [None if i is None else "tokens" for i in ids],
            }
            yield batch_of(len(rows), columns)
            block = next(blocks, None)
        source.notes += lines.notes()

    source.batches = batches()
    return source


def _write(
    out: BinaryIO, info: CaptureInfo, batches: Iterable[pa.RecordBatch], options: WriteOptions
) -> TraceWritten:
    written, style = TraceWritten(), Style("bailian", info, options)
    spelling = checked_spelling(style.get("timestamp", "float"), "timestamp")
    keys, comma, colon = json_texts(style, _FIELDS)
    needs = {
        "arrival_ns": "no arrival time",
        "input_tokens": "no count of input tokens",
        "output_tokens": "no count of output tokens",
    }
    going = Outgoing("bailian", info, written, columns=(*_WANTED, *BLOCK_COLUMNS), needs=needs, times="zero")
    chats: _Own | _Numbered = _Own() if info.source == "bailian" else _Numbered()
    ids, lines = BlockIds(info, _SIZE), LineWriter(out, style)
    order = [*(key for key in keys if key in _FIELDS), *(key for key in _FIELDS if key not in keys)]
    for batch in going.batches(batches):
        columns = [batch.column(name).to_pylist() for name in _WANTED]
        texts = []
        for row, blocks in zip(zip(*columns, strict=True), ids.of(batch), strict=True):
            arrival_ns, read, made, name, parent, session, turn, route, images = row
            chat_id, parent_id, number = chats.of(name, parent, session, turn)
            kind = route if info.source == "bailian" else "image" if images else "text"
            fields = {
                "chat_id": chat_id, "parent_chat_id": parent_id,
                "timestamp": decimal_text(arrival_ns, 9, spelling), "input_length": read,
                "output_length": made, "turn": number,
                "type": None if kind is None else msgspec.json.encode(kind).decode(),
                "hash_ids": None if blocks is None else f"[{comma.join(map(str, blocks))}]",
            }  # fmt: skip
            pairs = (f'"{key}"{colon}{fields[key]}' for key in order if fields[key] is not None)
            texts.append(f"{{{comma.join(pairs)}}}")
        lines.add(texts)
    lines.close()
    ids.report(written)
    written.notes += chats.notes()
    return written


class _Own:
    """Chats of a file of this format: they have their numbers."""

    def of(
        self, name: str | None, parent: str | None, session: str | None, turn: int | None
    ) -> tuple[int, int, int]:
        """Chat, parent and turn."""
        return int(name or -1), -1 if parent is None else int(parent), (turn or 0) + 1

    def notes(self) -> list[str]:
        return []


class _Numbered:
    """Chats of others: numbered as they come."""

    def __init__(self) -> None:
        self._count = 0
        self._ids: dict[str, int] = {}
        self._last: dict[str, tuple[int, int]] = {}
        """Of each session: its last chat and that one's turn."""
        self.lost = 0
        """Rows whose parent is not in the file, nor any other of their session."""

    def of(
        self, name: str | None, parent: str | None, session: str | None, turn: int | None
    ) -> tuple[int, int, int]:
        """Chat, parent and turn."""
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

    def notes(self) -> list[str]:
        if not self.lost:
            return []
        return [f"{self.lost:,} rows follow an exchange that is not here: they begin a conversation"]


def _sniff(head: bytes, name: str) -> bool:
    objects = first_objects(head)
    return bool(objects) and all({"chat_id", "timestamp", "input_length"} <= o.keys() for o in objects)


FORMAT: Final = TraceFormat(
    name="bailian",
    title="Qwen-Bailian trace (JSON Lines)",
    extensions=(".jsonl",),
    holds=frozenset({"arrival", "input tokens", "output tokens", "session and turn", "prefix blocks"}),
    needs=frozenset({"arrival", "input tokens", "output tokens"}),
    why={
        "prefix blocks": "blocks of 16 tokens; the ids of larger ones go over as they are",
        "outcome and status": "a failed request has no place: it is left out, and counted",
        "think time": "only the times of the turns themselves",
    },
    styles=STYLES | {"keys": "order of the fields: " + ",".join(_FIELDS)},
    sniff=_sniff,
    read=_read,
    write=_write,
)

"""The trace format `mooncake`, and `LengthFields`: reader and writer of all formats with the same fields.

JSON Lines `{"timestamp": ms, "input_length": tokens, "output_length": tokens, "hash_ids": [int, ...]}` with
one id per block of 512 tokens, also for a partial last block. The traces of guidellm and vLLM (`guidellm.py`,
`vllm.py`) have times in seconds, those of vLLM also other block sizes. A file that could be any of them is
read as Mooncake's, or as guidellm's if times have fractions or a row has a `duration`.

Source: kvcache-ai/Mooncake, FAST25-release/traces.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from typing import Annotated, BinaryIO, Final

import msgspec
import pyarrow as pa
import pyarrow.compute as pc

from llmtap.capture.schema import CaptureInfo
from llmtap.traces import format
from llmtap.traces.blocks import BLOCK_COLUMNS, BlockIds, block_columns
from llmtap.traces.text import Count, Id, JsonLines, Number, decimal_text, first_objects, numbers_ns

_FIELDS: Final = ("timestamp", "input_length", "output_length", "hash_ids")
_NEEDS: Final = ("arrival_ns", "input_tokens", "output_tokens")
_COLUMNS: Final = ("arrival_ns", "input_tokens", "output_tokens", "response_end_us", *BLOCK_COLUMNS)


class _Row(msgspec.Struct):
    timestamp: Number
    input_length: Count
    output_length: Count
    hash_ids: Annotated[list[Id], msgspec.Meta(max_length=1 << 24)] | None = None


class _RowWithDuration(_Row):
    duration: Number | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LengthFields:
    name: str
    places: int
    """Digits from the unit of `timestamp` down to ns: 6 of milliseconds, 9 of seconds."""
    sizes: tuple[int, ...] = (512,)
    """Tokens in a block: the first size that the first rows agree with, or else the first."""
    durations: bool = False
    """Has `duration`, of the whole answer, in the same unit."""
    any_size: bool = False
    """Its reader can be told the size: blocks of any size are written unchanged."""
    blocks_needed: bool = False
    """Its reader makes the prompt of the ids alone: a row without ids would be an empty prompt."""

    def read(self, stream: BinaryIO) -> format.TraceSource:
        lines: JsonLines[_Row] = JsonLines(stream, _RowWithDuration if self.durations else _Row)
        blocks = iter(lines)
        first = next(blocks, ([], []))
        size = self._size_of(first[0])

        def batches(notes: list[str]) -> Iterator[pa.RecordBatch]:
            bare = broken = 0
            for rows, numbers in chain([first], blocks):
                ids = [row.hash_ids for row in rows]
                columns = {
                    "arrival_ns": numbers_ns(
                        [row.timestamp for row in rows], self.places, numbers, "timestamp"
                    ),
                    "input_tokens": [row.input_length for row in rows],
                    "output_tokens": [row.output_length for row in rows],
                    **block_columns(ids, size),
                }
                if self.durations:
                    ends = [getattr(row, "duration", None) for row in rows]
                    ends_ns = numbers_ns(ends, self.places, numbers, "duration")
                    columns["response_end_us"] = [None if ns is None else ns // 1_000 for ns in ends_ns]
                bare += ids.count(None)
                broken += sum(not _fits(row, size) for row in rows)
                yield format.batch_of(len(rows), columns)
            notes += lines.notes()
            if bare:
                notes.append(f"{bare:,} rows have no hash_ids")
            if broken:
                notes.append(f"{broken:,} rows have another number of hash_ids than blocks of {size} tokens")

        return format.trace_source(batches, self.name, blocks="trace", block_unit="tokens", block_size=size)

    def _size_of(self, rows: list[_Row]) -> int:
        return next((size for size in self.sizes if all(_fits(row, size) for row in rows)), self.sizes[0])

    def size_written(self, info: CaptureInfo) -> int:
        kept = info.block_unit == "tokens" and (self.any_size or info.source == self.name)
        return info.block_size if kept and info.block_size else self.sizes[0]

    def write(self, writer: format.TraceWriter) -> None:
        """Write a trace: times in seconds exactly, times in milliseconds whole, unless they are its own."""
        needs: tuple[str, ...] = _NEEDS
        if self.blocks_needed:
            needs = (*_NEEDS, "blocks")
            writer.batches = map(_empty_as_none, writer.batches)
        ids, cut = BlockIds(writer, self.size_written(writer.info)), 0
        seconds = self.places == 9
        whole_ns = 1 if seconds or writer.own else 10**self.places
        for batch in writer.outgoing(_COLUMNS, needs):
            columns = [batch.column(name).to_pylist() for name in _COLUMNS[:4]]
            lines = []
            for arrival, read, made, end, blocks in zip(*columns, ids.of(batch), strict=True):
                cut += arrival % whole_ns > 0
                time = decimal_text(arrival // whole_ns * whole_ns, self.places, point=seconds)
                line = f'{{"timestamp": {time}, "input_length": {read}, "output_length": {made}'
                if blocks is not None:
                    line += f', "hash_ids": {blocks}'
                if self.durations and end is not None:
                    line += f', "duration": {decimal_text(end * 1_000, self.places, point=True)}'
                lines.append(line + "}\n")
            writer.out.write("".join(lines).encode())
        ids.report()
        writer.note(cut, "arrivals lost what is finer than the format's digits")


def _fits(row: _Row, size: int) -> bool:
    """Whether a row has no ids, or as many as its prompt has blocks."""
    return row.hash_ids is None or len(row.hash_ids) == -(-row.input_length // size)


def _empty_as_none(batch: pa.RecordBatch) -> pa.RecordBatch:
    blocks = batch.column("blocks")
    bare = pc.and_(pc.equal(pc.list_value_length(blocks), 0), pc.greater(batch.column("input_tokens"), 0))
    return format.replaced(
        batch, "blocks", pc.if_else(pc.fill_null(bare, False), pa.scalar(None, blocks.type), blocks)
    )


def looks(head: bytes) -> tuple[bool, bool]:
    """Return whether the first rows have these fields alone, and whether their times have fractions."""
    objects = first_objects(head)
    if not objects or not all({*_FIELDS[:3]} <= o.keys() <= {*_FIELDS, "duration"} for o in objects):
        return False, False
    return True, any("duration" in o or isinstance(o["timestamp"], float) for o in objects)


_MOONCAKE: Final = LengthFields(name="mooncake", places=6)

FORMAT: Final = format.TraceFormat(
    name="mooncake",
    title="Mooncake trace (JSON Lines, milliseconds)",
    extensions=(".jsonl",),
    holds=format.LENGTHS | {"prefix blocks"},
    needs=format.LENGTHS,
    why={
        "arrival": "in whole milliseconds, from the first one",
        "prefix blocks": "blocks of 512 tokens; the ids of others go over, but readers that count them "
        "(guidellm) reject such rows",
        **format.NO_FAILED,
        "session and turn": "only shared blocks tell which requests belong together",
    },
    sniff=lambda head, name: looks(head) == (True, False),
    opens=_MOONCAKE.read,
    writes=_MOONCAKE.write,
)

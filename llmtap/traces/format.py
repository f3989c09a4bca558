"""What every trace format is to the rest: a name, what it can hold, a reader, a writer.

Between formats travel record batches in the capture's own columns (`capture/schema.py`), most of them null:
one row per Exchange, in the order of the source. A reader yields them as it goes, a writer takes them as they
come, so that a file of any length passes in bounded memory.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, BinaryIO, Final

import pyarrow as pa
import pyarrow.compute as pc

from llmtap.capture.schema import SCHEMA, CaptureInfo
from llmtap.errors import LlmtapError

__all__ = [
    "ASPECTS",
    "ROWS_PER_BATCH",
    "FormatError",
    "TraceFormat",
    "TraceSource",
    "TraceWritten",
    "WriteOptions",
    "batch_of",
    "telling",
]

ROWS_PER_BATCH: Final = 10_000
"""Of a reader: some MB of a trace without text. Readers of bodies use less."""

ASPECTS: Final[dict[str, tuple[str, ...]]] = {
    "arrival": ("arrival_ns",),
    "input tokens": ("input_tokens",),
    "output tokens": ("output_tokens",),
    "max_tokens": ("max_tokens",),
    "model": ("model",),
    "tenant": ("tenant",),
    "session and turn": ("session", "turn"),
    "think time": ("think_us",),
    "prefix blocks": ("blocks",),
    "message roles and sizes": ("message_roles",),
    "request body": ("request_body",),
    "response text": ("response_text",),
    "outcome and status": ("status", "outcome"),
    "end of the answer": ("response_end_us",),
    "first token": ("first_token_us", "first_content_us"),
    "times of events": ("event_us",),
    "usage": ("usage",),
    "guardrails": ("refusal_kind", "guardrail"),
}
"""What a row may tell, and the columns that tell it; it is there where any of them is not null."""


class FormatError(LlmtapError):
    """A file does not fit its format. Says where: `line 17: output_length: expected an integer, got "x"`."""


@dataclass(slots=True)
class TraceSource:
    """A trace being read."""

    info: CaptureInfo
    """Known before the first batch: how arrivals count, how the source spells."""
    batches: Iterator[pa.RecordBatch]
    """In SCHEMA. Raises FormatError where the file does not fit."""
    notes: list[str] = field(default_factory=list)
    """Told once the batches are through: what was odd, with counts (`3 rows without response tokens`)."""


@dataclass(frozen=True, slots=True)
class WriteOptions:
    """What a target wants that a source may lack."""

    model: str | None = None
    """Name to write where a row has none (or, with `override_model`, anyway)."""
    override_model: bool = False
    style: Mapping[str, str] = field(default_factory=dict)
    """Spellings, by name: of `Format.styles`. Without them the source's own (`CaptureInfo.style`)."""


@dataclass(slots=True)
class TraceWritten:
    """What came of writing."""

    rows: int = 0
    dropped: dict[str, int] = field(default_factory=dict)
    """Rows that the target has no place for, by reason."""
    notes: list[str] = field(default_factory=list)
    told: dict[str, int] = field(default_factory=dict)
    """By aspect, rows that were written with it. What the format does not hold may be among them."""
    changed: dict[str, str] = field(default_factory=dict)
    """Aspects that came out as something else than they were, and how."""

    def count(self, batch: pa.RecordBatch, *, sign: int = 1) -> None:
        """Rows are written that tell what this batch tells; with the sign -1, they are not after all."""
        for aspect in ASPECTS:
            self.told[aspect] = self.told.get(aspect, 0) + sign * telling(batch, aspect)

    def drop(self, reason: str, rows: int = 1) -> None:
        """So many rows are not written."""
        self.dropped[reason] = self.dropped.get(reason, 0) + rows


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceFormat:
    """One trace format."""

    name: str
    """As in `--from` and `--to`: lower case, with dashes."""
    title: str
    extensions: tuple[str, ...]
    """File name endings, with the dot; several formats may share one."""
    holds: frozenset[str]
    """Keys of ASPECTS that it has a place for."""
    needs: frozenset[str] = frozenset()
    """Keys of ASPECTS without which a row cannot be written: it is dropped, and counted."""
    why: Mapping[str, str] = field(default_factory=dict)
    """Why it cannot hold an aspect, or what is worth knowing of how it does."""
    styles: Mapping[str, str] = field(default_factory=dict)
    """What it can write in several ways, by name, with the ways there are."""
    sniff: Callable[[bytes, str], bool]
    """`(first 64 KiB, file name) -> it is this one`; strict enough that at most one format says so."""
    read: Callable[[BinaryIO], TraceSource] | None = None
    write: Callable[[BinaryIO, CaptureInfo, Iterable[pa.RecordBatch], WriteOptions], TraceWritten] | None = (
        None
    )


def telling(batch: pa.RecordBatch, aspect: str) -> int:
    """How many rows of the batch tell it. Columns that the batch does not have tell nothing."""
    columns = [batch.column(name) for name in ASPECTS[aspect] if name in batch.schema.names]
    counts = [len(column) - column.null_count for column in columns]
    if len(columns) < 2 or max(counts) in (0, batch.num_rows):
        return max(counts, default=0)
    valid = pc.is_valid(columns[0])
    for column in columns[1:]:
        valid = pc.or_(valid, pc.is_valid(column))
    n: int = valid.true_count
    return n


def batch_of(rows: int, columns: Mapping[str, Sequence[Any] | pa.Array]) -> pa.RecordBatch:
    """A batch in SCHEMA of so many rows: the columns given, and nulls.

    Raises pa.ArrowInvalid or pa.ArrowTypeError for values that do not fit their column.
    """
    arrays = []
    for column in SCHEMA:
        values = columns.get(column.name)
        if values is None:
            arrays.append(pa.nulls(rows, column.type))
        elif isinstance(values, pa.Array):
            arrays.append(values.cast(column.type))
        else:
            arrays.append(pa.array(values, column.type))
    return pa.RecordBatch.from_arrays(arrays, schema=SCHEMA)

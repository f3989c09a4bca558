"""Description of a trace format: its name, what it can hold, its reader and its writer.

Formats exchange record batches in the columns of a capture (`capture/schema.py`), most of them null: one row
per Exchange, in the order of the source. Readers and writers are streams, so files of any length need bounded
memory.
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
    "LENGTHS",
    "NO_FAILED",
    "ROWS_PER_BATCH",
    "FormatError",
    "TraceFormat",
    "TraceSource",
    "TraceWritten",
    "WriteOptions",
    "batch_of",
    "telling",
    "trace_source",
]

ROWS_PER_BATCH: Final = 10_000
"""Rows of a batch without text: some MB. Readers of bodies use fewer."""

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
"""Aspects of a row with their columns; a row has an aspect if any of its columns is not null."""
LENGTHS: Final = frozenset({"arrival", "input tokens", "output tokens"})
"""Aspects of the formats that hold times and lengths."""
NO_FAILED: Final = {
    "outcome and status": "a failed request has no place: it is left out, and counted",
}
"""`TraceFormat.why` of the formats that hold only complete requests."""


class FormatError(LlmtapError):
    """A file does not fit its format, and where: `line 17: output_length: expected an integer, got "x"`."""


@dataclass(slots=True)
class TraceSource:
    """A trace being read."""

    info: CaptureInfo
    """Known before the first batch."""
    batches: Iterator[pa.RecordBatch]
    """In SCHEMA. Raises FormatError where the file does not fit."""
    notes: list[str] = field(default_factory=list)
    """Irregularities with their counts, complete after the last batch (`3 rows without response tokens`)."""


def trace_source(
    batches: Callable[[list[str]], Iterator[pa.RecordBatch]], source: str, **info: Any
) -> TraceSource:
    """Return the source of a generator that takes the list of notes; `info`: fields of CaptureInfo."""
    opened = TraceSource(CaptureInfo(source=source, **{"arrivals": "trace", **info}), iter(()))
    opened.batches = batches(opened.notes)
    return opened


@dataclass(frozen=True, slots=True)
class WriteOptions:
    """Options of a writer."""

    model: str | None = None
    """Model of rows without one (with `override_model`: of all rows)."""
    override_model: bool = False
    style: Mapping[str, str] = field(default_factory=dict)
    """Values of `TraceFormat.styles`."""

    def choice(self, key: str, default: str, allowed: tuple[str, ...]) -> str:
        """Return the value of a style. Raises FormatError if it is not allowed."""
        value = self.style.get(key, default)
        if value not in allowed:
            raise FormatError(f"style {key}={value}: expected one of {', '.join(allowed)}")
        return value


@dataclass(slots=True)
class TraceWritten:
    """Result of writing."""

    rows: int = 0
    dropped: dict[str, int] = field(default_factory=dict)
    """Rows not written, by reason."""
    notes: list[str] = field(default_factory=list)
    told: dict[str, int] = field(default_factory=dict)
    """Written rows that had the aspect, by aspect; also of aspects that the format does not hold."""
    changed: dict[str, str] = field(default_factory=dict)
    """Aspects whose values were changed, and how."""

    def count(self, batch: pa.RecordBatch, *, sign: int = 1) -> None:
        """Count the aspects of written rows; `sign=-1` takes them back."""
        for aspect in ASPECTS:
            self.told[aspect] = self.told.get(aspect, 0) + sign * telling(batch, aspect)

    def drop(self, reason: str, rows: int = 1) -> None:
        """Count rows that are not written."""
        self.dropped[reason] = self.dropped.get(reason, 0) + rows

    def note(self, n: int, what: str) -> None:
        """Add a note that begins with a count, unless that is 0."""
        if n:
            self.notes.append(f"{n:,} {what}")


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceFormat:
    """One trace format."""

    name: str
    """As in `--from` and `--to`: lower case, with dashes."""
    title: str
    extensions: tuple[str, ...]
    """File name endings, with the dot; several formats may share one."""
    holds: frozenset[str]
    """Keys of ASPECTS that it can hold."""
    needs: frozenset[str] = frozenset()
    """Keys of ASPECTS without which a row cannot be written: it is dropped, and counted."""
    why: Mapping[str, str] = field(default_factory=dict)
    """Reason why it cannot hold an aspect, or a remark on how it holds it."""
    styles: Mapping[str, str] = field(default_factory=dict)
    """Choices of the writer, by name, with their values."""
    sniff: Callable[[bytes, str], bool] = lambda head, name: False
    """`(first 64 KiB, file name) -> it is this one`; strict enough that at most one format matches."""
    read: Callable[[BinaryIO], TraceSource]
    write: Callable[[BinaryIO, CaptureInfo, Iterable[pa.RecordBatch], WriteOptions], TraceWritten]


def telling(batch: pa.RecordBatch, aspect: str) -> int:
    """Return the number of rows that have the aspect. Absent columns count as null."""
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
    """Return a batch in SCHEMA with the given columns; the others are null.

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

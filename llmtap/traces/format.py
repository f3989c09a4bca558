"""Base of all trace formats: the declaration of a format, a trace that is read, and a trace that is written.

Each module of `formats/` defines a `TraceFormat`: its name, what it can hold, and its functions to read and
write. Reading returns a `TraceSource` (batches of rows, and notes on irregularities); a `TraceWriter` writes,
and drops and counts rows that do not fit. Formats exchange Arrow record batches in the columns of a capture
(`capture/schema.py`), as streams, so most formats read files of any length in bounded memory.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, BinaryIO, Final, TypeAlias

import pyarrow as pa
import pyarrow.compute as pc

from llmtap.capture.schema import SCHEMA, CaptureInfo
from llmtap.errors import LlmtapError
from llmtap.traces.sorting import sort_batches

TraceRow: TypeAlias = dict[str, Any]
"""A row of a trace that is read: values by the name of a column. The columns and their types are declared in
`capture/columns.py`, and `text_batches` checks the values against them."""
ROWS_PER_BATCH: Final = 10_000
"""Number of rows in a batch without text: some MB. Readers of bodies use smaller batches."""
TEXT_BYTES_PER_BATCH: Final = 8 << 20

ASPECTS: Final[dict[str, tuple[str, ...]]] = {
    "arrival": ("arrival_ns",),
    "input tokens": ("input_tokens",),
    "output tokens": ("output_tokens",),
    "max_tokens": ("max_tokens",),
    "model": ("model",),
    "tenant": ("tenant",),
    "label": ("label",),
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
"""Columns of each aspect (kind of data). A row has an aspect if one of its columns is not null."""
LENGTHS: Final = frozenset({"arrival", "input tokens", "output tokens"})
"""Aspects of formats that contain only times and lengths."""
NO_FAILED: Final = {"outcome and status": "a failed request has no place: it is left out, and counted"}
"""Entry in `TraceFormat.remarks` of formats that contain only complete requests."""
FAILED: Final = (
    "client_error",
    "upstream_error",
    "upstream_reset",
    "upstream_timeout",
    "truncated",
    "rejected",
)
"""Outcomes of requests that failed. A request that the client cancelled did not fail."""
BYTES_PER_TOKEN: Final = 4.0
"""Assumed number of bytes per token of a prompt, if no row of the trace has a token count. The value is that
of English text with common tokenizers."""
_DROP_REASONS: Final = {
    "arrival_ns": "no arrival time",
    "input_tokens": "no count of input tokens",
    "output_tokens": "no count of output tokens",
    "request_body": "no request body",
    "response_text": "no response text",
}
"""Reason why a row is dropped if a column is null, by the name of the column."""


class FormatError(LlmtapError):
    """A file does not fit its format.

    The message names the place in the file: `line 17: output_length: expected an integer`.
    """


# ---------------------------------------------------------------- traces that are read


@dataclass(slots=True)
class TraceSource:
    """A trace that is open for reading."""

    info: CaptureInfo
    batches: Iterator[pa.RecordBatch]
    """Batches in SCHEMA. Iteration raises FormatError if the file does not fit its format."""
    notes: list[str] = field(default_factory=list)
    """Irregularities with their counts, complete after the last batch (`3 rows without response tokens`)."""


LATE_TOKENS: Final = "times to the first token are longer than the whole answer (another unit?): not kept"


_DATES_NS: Final = range(1_420_070_400 * 10**9, 2_208_988_800 * 10**9)
"""The years 2015 to 2039, in ns since 1970."""


def unit_notes(first_ns: int | None) -> list[str]:
    """Return a note if the times probably have another unit: the first arrival is in 1970, but the same
    number in a larger unit would be a present date."""
    if first_ns is None or not any(first_ns * factor in _DATES_NS for factor in (1_000, 1_000_000)):
        return []
    return ["the first time is in 1970, and a date of today in a larger unit: all times may be too short"]


def remove_late_token(row: TraceRow) -> bool:
    """Remove the time of the first token if it is after the answer's end. Return whether it was removed."""
    first_us, end_us = row.get("first_token_us"), row.get("response_end_us")
    late: bool = first_us is not None and end_us is not None and first_us > end_us
    if late:
        row["first_token_us"] = None
    return late


def text_batches(rows: Iterable[TraceRow]) -> Iterator[pa.RecordBatch]:
    """Collect rows with text into batches. Raises FormatError for a value that does not fit its column."""
    pending: list[TraceRow] = []
    size = 0
    for row in rows:
        pending.append(row)
        size += len(row.get("request_body") or "") + len(row.get("response_text") or "")
        if size >= TEXT_BYTES_PER_BATCH or len(pending) >= ROWS_PER_BATCH:
            yield _text_batch(pending)
            pending, size = [], 0
    if pending:
        yield _text_batch(pending)


def _text_batch(rows: Sequence[TraceRow]) -> pa.RecordBatch:
    """Return rows as a batch of the columns that they have."""
    columns: dict[str, pa.Array] = {}
    for name in dict.fromkeys(name for row in rows for name in row):
        try:
            columns[name] = pa.array([row.get(name) for row in rows], SCHEMA.field(name).type)
        except (pa.ArrowException, UnicodeError, OverflowError, TypeError, ValueError):
            # Do not report the value, because it can be a user's text.
            raise FormatError(f"{name}: a value does not fit the type {SCHEMA.field(name).type}") from None
    return batch_of(len(rows), columns)


# ---------------------------------------------------------------- traces that are written


@dataclass(slots=True)
class TraceWriter:
    """A trace that is open for writing, and the counts of its rows."""

    name: str
    """Name of the format."""
    out: BinaryIO
    """Open target file."""
    info: CaptureInfo
    """Metadata of the source."""
    batches: Iterable[pa.RecordBatch]
    """Rows to write."""
    rows: int = 0
    """Number of written rows."""
    dropped: dict[str, int] = field(default_factory=dict)
    """Number of dropped rows, by reason."""
    notes: list[str] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=dict)
    """Number of written rows with each aspect, including aspects that the format cannot contain."""
    changed: dict[str, str] = field(default_factory=dict)
    """Aspects that were written with other values, each with the reason."""
    _prompt_totals: list[int] = field(default_factory=lambda: [0, 0, 0])
    """Bytes and tokens of the prompts that have a token count, and number of prompts without a count."""
    _zero_ns: int | None = None
    """Arrival of the first row, which is subtracted from each arrival; None before the first row."""

    @property
    def is_own_format(self) -> bool:
        """Whether the source has the format that is written."""
        return self.info.source == self.name

    def count(self, batch: pa.RecordBatch, *, sign: int = 1) -> None:
        for aspect in ASPECTS:
            self.counts[aspect] = self.counts.get(aspect, 0) + sign * count_rows_with(batch, aspect)

    def drop(self, reason: str, rows: int = 1) -> None:
        self.dropped[reason] = self.dropped.get(reason, 0) + rows

    def note(self, n: int, what: str) -> None:
        if n:
            self.notes.append(f"{n:,} {what}")

    def rows_to_write(
        self,
        columns: Sequence[str],
        needs: Sequence[str] = ("arrival_ns", "input_tokens", "output_tokens"),
        *,
        times: str = "zero",
        failed: bool = False,
        reasons: Callable[[pa.RecordBatch], list[str | None]] | None = None,
    ) -> Iterator[pa.RecordBatch]:
        """Yield the rows to write, in order of arrival and with times from 0. The notes are complete
        afterwards.

        A trace that is written in its own format keeps its order and its time zero. Failed requests, and rows
        without the columns that the format needs, are dropped. Missing input tokens are estimated from the
        size of the prompt.

        Args:
            columns: columns to yield.
            needs: columns without which a row is dropped.
            times: `zero` (times from 0), `date` (only rows with a date) or `none` (times are not needed).
            failed: whether the format can contain failed requests.
            reasons: function that returns for each row the reason why it cannot be written, or None.
        """
        columns = list(dict.fromkeys([*columns, "arrival_ns", "outcome", "prompt_bytes"]))
        selected = (self._select_rows(batch.select(columns), needs, failed) for batch in self.batches)
        for batch in selected if self.is_own_format else sort_batches("arrival_ns", selected):
            if times == "zero" and batch.num_rows:
                batch = self._shift_to_zero(batch)
            if reasons is not None:
                batch = self._drop_rows_with_reason(batch, reasons(batch))
            if batch.num_rows:
                self.rows += batch.num_rows
                self.count(batch)
                yield batch
        self.note(
            self._prompt_totals[2],
            "rows lack a count of input tokens: estimated from the bytes of the prompt",
        )
        if times == "date" and self.info.arrivals == "trace" and self.rows:
            self.notes.append("arrivals have no date: written as if the trace began with 1970")

    def _select_rows(self, batch: pa.RecordBatch, needs: Sequence[str], failed: bool) -> pa.RecordBatch:
        if not failed and batch.column("outcome").null_count < batch.num_rows:
            good = pc.invert(pc.is_in(batch.column("outcome"), pa.array(FAILED)))
            batch = self._drop_rows(batch, good, "failed request")
        if "input_tokens" in needs and not self.is_own_format:
            batch = self._estimate_tokens(batch)
        for column in needs:
            batch = self._drop_rows(batch, pc.is_valid(batch.column(column)), _DROP_REASONS[column])
        return batch

    def _estimate_tokens(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """Estimate missing input tokens by the mean bytes per token of the rows so far."""
        tokens, sizes = batch.column("input_tokens"), batch.column("prompt_bytes")
        known = pc.and_(pc.is_valid(sizes), pc.greater(pc.fill_null(tokens, 0), 0))
        for i, column in enumerate((sizes, tokens)):
            self._prompt_totals[i] += pc.sum(column.filter(known)).as_py() or 0
        is_missing = pc.and_(pc.is_null(tokens), pc.is_valid(sizes))
        if not is_missing.true_count:
            return batch
        self._prompt_totals[2] += is_missing.true_count
        known_bytes, known_tokens, _ = self._prompt_totals
        per_token = known_bytes / known_tokens if known_tokens else BYTES_PER_TOKEN
        estimates = pc.max_element_wise(pc.round(pc.divide(sizes.cast(pa.float64()), per_token)), 1.0)
        tokens = pc.if_else(is_missing, estimates.cast(pa.int64()), tokens)
        return replace_column(batch, "input_tokens", tokens)

    def _drop_rows(self, batch: pa.RecordBatch, good: pa.BooleanArray, reason: str) -> pa.RecordBatch:
        n = len(good) - good.true_count
        if not n:
            return batch
        self.drop(reason, n)
        return batch.filter(good)

    def _drop_rows_with_reason(self, batch: pa.RecordBatch, reasons: list[str | None]) -> pa.RecordBatch:
        for reason in filter(None, reasons):
            self.drop(reason)
        return batch.filter(pa.array([reason is None for reason in reasons], pa.bool_()))

    def _shift_to_zero(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        arrivals = batch.column("arrival_ns")
        if self._zero_ns is None and len(arrivals) > arrivals.null_count:
            keep = self.is_own_format and self.info.arrivals == "trace"
            self._zero_ns = 0 if keep else pc.min(arrivals).as_py()
            if self._zero_ns:
                self.notes.append(_zero_note(self.info, self._zero_ns))
        if not self._zero_ns:
            return batch
        return replace_column(batch, "arrival_ns", pc.subtract(arrivals, self._zero_ns))


def _zero_note(info: CaptureInfo, zero_ns: int) -> str:
    if info.arrivals == "wall":
        at = datetime.fromtimestamp(zero_ns // 1_000_000_000, UTC).isoformat().removesuffix("+00:00")
        zero = f"{at}.{zero_ns % 1_000_000_000:09}Z"
    else:
        zero = f"{zero_ns / 1e9:.9g} s of the source's own time"
    return f"arrivals count from the smallest one, {zero}"


# ---------------------------------------------------------------- declaration of a format


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceFormat:
    """Declaration of a trace format, with its functions to recognise, read and write a file."""

    name: str
    """Name for `--from` and `--to`: lower case, with dashes."""
    title: str
    extensions: tuple[str, ...]
    """Endings of file names by which the format of a new file is chosen."""
    aspects: frozenset[str]
    """Keys of ASPECTS that the format can contain."""
    required_aspects: frozenset[str] = frozenset()
    """Keys of ASPECTS without which a row cannot be written: the row is dropped, and counted."""
    remarks: Mapping[str, str] = field(default_factory=dict)
    """By aspect: reason why the format cannot contain it, or a remark on how the aspect is written."""
    sniff: Callable[[bytes, str], bool] = lambda head, name: False
    """Function that returns whether a file has this format, given its first 64 KiB and its name. The
    functions are so strict that, if possible, only one format matches a file."""
    info: Mapping[str, Any] = field(default_factory=dict)
    """Fields of the CaptureInfo of a trace that is read."""
    rows: Callable[[BinaryIO, list[str]], Iterator[TraceRow]] | None = None
    """Function that yields rows with text, by column, and adds to the notes of the source."""
    batches: Callable[[BinaryIO, list[str]], Iterator[pa.RecordBatch]] | None = None
    """Function that yields batches, used instead of `rows` for a format without text."""
    open_source: Callable[[BinaryIO], TraceSource] | None = None
    """Function that opens the file, used instead of `rows` and `batches` if `info` depends on the file."""
    write_rows: Callable[[TraceWriter], None] | None = None
    """Function that writes a trace; None: the format can only be read."""

    def read(self, stream: BinaryIO) -> TraceSource:
        """Open a trace. Raises FormatError, also while its batches are read."""
        if self.open_source is not None:
            return self.open_source(stream)
        notes: list[str] = []
        if self.rows is not None:
            batches = text_batches(self.rows(stream, notes))
        else:
            assert self.batches is not None
            batches = self.batches(stream, notes)
        return TraceSource(
            CaptureInfo(source=self.name, **{"arrivals": "trace", **self.info}), batches, notes
        )

    def write(self, out: BinaryIO, info: CaptureInfo, batches: Iterable[pa.RecordBatch]) -> TraceWriter:
        """Write the rows of a source that has this `info`, and return the writer with its counts.

        Raises FormatError.
        """
        assert self.write_rows is not None
        writer = TraceWriter(self.name, out, info, batches)
        self.write_rows(writer)
        return writer


# ---------------------------------------------------------------- operations on batches


def count_rows_with(batch: pa.RecordBatch, aspect: str) -> int:
    """Return the number of rows that have the aspect. A column that the batch lacks counts as null."""
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
    """Return a batch of SCHEMA with the given columns. All other columns are null.

    Raises pa.ArrowInvalid or pa.ArrowTypeError for values that do not fit the type of their column.
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


def replace_column(batch: pa.RecordBatch, name: str, values: pa.Array) -> pa.RecordBatch:
    index = batch.schema.get_field_index(name)
    return batch.set_column(index, batch.schema.field(index), values.cast(batch.schema.field(index).type))

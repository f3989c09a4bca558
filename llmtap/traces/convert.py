"""Convert a trace from one format to another, with a report on what was kept, changed and lost.

`llmtap convert` calls `convert`, which opens the source (`registry.py`), writes the target in its format,
redacts text if required, and returns a `Report`. The rows with each aspect (`ASPECTS`) are counted when they
are read, and again when they are written: the difference is lost.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Final

import pyarrow as pa
import pyarrow.compute as pc

from llmtap.capture.options import CaptureOptions
from llmtap.capture.privacy.redaction import Redactor
from llmtap.capture.read.streams import STANDARD_STREAM, new_file
from llmtap.capture.schema import back_rows_mask
from llmtap.clock import SystemClock
from llmtap.errors import ConfigError
from llmtap.traces import format, registry
from llmtap.traces.formats import parquet_capture
from llmtap.traces.registry import URL_MARK, open_trace, plain_name, reason_of, shown_name


@dataclass(frozen=True, slots=True)
class Aspect:
    """Result of a conversion for one aspect (kind of data) of the rows."""

    name: str
    """Name in `format.ASPECTS`, such as `input tokens`."""
    rows: int
    """Number of rows of the source that have the aspect."""
    written: int
    """Number of these rows that were written with the aspect."""
    fate: str
    """`kept`: written in all rows; `partly`: in some; `lost`: in none; `changed`: written with another value;
    `absent`: no row of the source has the aspect."""
    why: str | None = None
    """Reason why the aspect was lost or changed, or a remark on how the aspect was kept."""
    keep: str | None = None
    """Option `--to` with formats that can contain a lost aspect; None if none can, or if nothing was lost."""


@dataclass(slots=True)
class Report:
    """Result of a conversion."""

    source: str
    source_format: str
    target: str
    target_format: str
    rows_read: int = 0
    rows_written: int = 0
    aspects: list[Aspect] = field(default_factory=list)
    """What became of each kind of data."""
    dropped: dict[str, int] = field(default_factory=dict)
    """Number of rows that were not written, by reason."""
    notes_read: list[str] = field(default_factory=list)
    """Irregularities in the source."""
    notes_written: list[str] = field(default_factory=list)
    """Differences of the written rows from the rows of the source."""
    bytes_in: int = 0
    """Size of the source."""
    bytes_out: int = 0
    seconds: float = 0.0
    """Duration of the conversion."""


def convert(
    source: str,
    target: str,
    *,
    source_format: str | None = None,
    target_format: str | None = None,
    redact: tuple[str, ...] = (),
    force: bool = False,
    progress: Callable[[int, int | None], None] | None = None,
) -> Report:
    """Read `source`, write `target`, and report what was kept.

    Args:
        source: a file, `-` for standard input, or a capture as a folder.
        target: a file, which appears when it is complete, or `-` for standard output.
        source_format, target_format: names of formats; None: detect the format by content or file name.
        redact: redaction rules for text, as in `capture.redact`; empty: redact nothing.
        force: replace an existing file `target`.
        progress: called with the number of bytes read so far, and the source's size (None for a pipe).

    Raises ConfigError, which names the wrong file or format, and BrokenPipeError if the process that reads
    standard output has ended.
    """
    began_ns = SystemClock.mono_ns()
    write_format = _target_format(target, target_format)
    with open_trace(source, source_format=source_format, progress=progress) as trace:
        rows, read_format = trace.source, trace.format
        _check_formats(read_format, write_format)
        report = Report(
            shown_name(source), read_format.name, shown_name(target, output=True), write_format.name
        )
        counts = dict.fromkeys(format.ASPECTS, 0)
        batches = rows.batches
        if write_format.name != read_format.name:
            # Other tools expect each request once, so leave out the rows that were captured behind a gateway.
            batches = (batch.filter(pc.invert(back_rows_mask(batch))) for batch in batches)
        redacted = _RedactedBatches(_count_batches(batches, report, counts), redact)
        try:
            with new_file(target, replace=force) as out:
                written = write_format.write(out.stream, rows.info, redacted)
                own = write_format.name in (read_format.name, rows.info.source)
                _check_written_rows(counts, written, read_format, write_format, report, own=own)
            report.bytes_out = out.bytes_written
        except OSError as exc:
            if isinstance(exc, BrokenPipeError) and target == STANDARD_STREAM:
                raise
            hint = "check the permissions of the folder and the free space"
            raise ConfigError(report.target, f"cannot be written: {reason_of(exc)}", hint) from None
        except format.FormatError as exc:
            raise ConfigError(report.target, str(exc)) from None
        report.bytes_in = trace.size_bytes
    report.rows_written = written.rows
    redacted.report(written)
    report.aspects = [_aspect_of(name, n, write_format, written) for name, n in counts.items()]
    report.dropped = written.dropped
    report.notes_read, report.notes_written = rows.notes, written.notes
    report.seconds = (SystemClock.mono_ns() - began_ns) / 1e9
    return report


def _count_batches(
    batches: Iterator[pa.RecordBatch], report: Report, counts: dict[str, int]
) -> Iterator[pa.RecordBatch]:
    """Yield the batches; count their rows, and the rows with each aspect."""
    for batch in batches:
        report.rows_read += batch.num_rows
        for aspect in counts:
            counts[aspect] += format.count_rows_with(batch, aspect)
        yield batch


# ---------------------------------------------------------------- source and target


def _target_format(target: str, name: str | None) -> format.TraceFormat:
    if URL_MARK in target:
        raise ConfigError(
            target,
            "is a URL, and only local files can be written",
            "write a local file, and copy that file",
        )
    if name is None and target == STANDARD_STREAM:
        raise ConfigError("--to", "is required if the output is standard output", "such as --to mooncake")
    try:
        if name is not None:
            return registry.format_named(name, writing=True)
        return registry.format_for_file(plain_name(target))
    except format.FormatError as exc:
        raise ConfigError(target if name is None else "--to", str(exc)) from None


def _check_formats(read_format: format.TraceFormat, write_format: format.TraceFormat) -> None:
    """Raise ConfigError, before a row is read, if the source lacks an aspect that the target needs."""
    for aspect in format.ASPECTS:
        if aspect in write_format.required_aspects and aspect not in read_format.aspects:
            raise ConfigError(
                "--to",
                f"{write_format.name} requires {aspect}, which {read_format.name} does not contain",
                "`llmtap convert --list` shows what each format contains",
            )


_FULL_HINT: Final = (
    'a capture has text only if capture.level is "full", and only of the tenants in capture.full_tenants'
)
_COUNT_HINT: Final = (
    "before the capture, set meter.tokenizer, or let clients send stream_options.include_usage"
)
_HINTS: Final = {
    "input tokens": _COUNT_HINT,
    "output tokens": _COUNT_HINT,
    "request body": _FULL_HINT,
    "response text": _FULL_HINT,
    "prefix blocks": 'a capture has prefix blocks if capture.level is "shape" or "full"',
}
"""For each aspect that a target needs: a hint on the settings that add the aspect to a capture."""


def _check_written_rows(
    counts: dict[str, int],
    written: format.TraceWriter,
    read_format: format.TraceFormat,
    write_format: format.TraceFormat,
    report: Report,
    *,
    own: bool,
) -> None:
    """Raise ConfigError if no row could be written. The target file then does not appear.

    `own`: whether source and target have the same format.
    """
    if not report.rows_read or (own and written.rows):
        return
    for aspect in format.ASPECTS:
        if aspect in write_format.required_aspects and not counts[aspect] and not written.counts.get(aspect):
            hint = _HINTS.get(aspect) if read_format is parquet_capture.FORMAT else None
            raise ConfigError(
                "--to", f"{written.name} needs {aspect}, and no row of {report.source} has it", hint
            )
    if not written.rows:
        reasons = _reasons_text(written) or "no row fits"
        problem = f"{written.name} cannot hold any row of {report.source}: {reasons}"
        raise ConfigError("--to", problem, "choose another format")


def _reasons_text(written: format.TraceWriter) -> str:
    return ", ".join(f"{reason} ({n:,})" for reason, n in written.dropped.items())


def _aspect_of(name: str, rows: int, write_format: format.TraceFormat, written: format.TraceWriter) -> Aspect:
    """Return how many values of one kind the written format keeps, and why it loses the others."""
    if not rows:
        return Aspect(name, 0, 0, "absent")
    reason = write_format.remarks.get(name)
    if name not in write_format.aspects:
        reason = reason or f"{write_format.name} has no place for it"
        return Aspect(name, rows, 0, "lost", reason, _formats_with(write_format, name))
    # Count at most `rows`, because a writer can add values that the source lacks, such as 0 tokens of a
    # failed request.
    written_rows = min(rows, written.counts.get(name, 0))
    fate = "kept" if written_rows == rows else "partly" if written_rows else "lost"
    if written_rows and name in written.changed:
        fate, reason = "changed", written.changed[name]
    keep = None
    if written_rows < rows and written.dropped:
        reason = "; ".join(filter(None, (f"left out: {_reasons_text(written)}", reason)))
        keep = _formats_with(write_format, "outcome and status", name)
    elif not written_rows:
        keep = _formats_with(write_format, name)
    return Aspect(name, rows, written_rows, fate, reason, keep)


def _formats_with(write_format: format.TraceFormat, *aspects: str) -> str | None:
    others = (f for f in registry.FORMATS if f.write_rows and f is not write_format)
    names = [f.name for f in others if f.aspects >= {*aspects}]
    return f"--to {' or '.join(names[:_NAMED_MAX])}" if names else None


_NAMED_MAX: Final = 3
"""Maximum number of formats that are named as alternatives for a lost aspect."""

# ---------------------------------------------------------------- redaction

_TEXTS: Final = ("request_body", "response_text")
_ASPECTS: Final = ("request body", "response text")


class _RedactedBatches:
    """Iterable of batches with redacted texts. Without rules, it only counts rows with unredacted text."""

    def __init__(self, batches: Iterable[pa.RecordBatch], rules: tuple[str, ...]) -> None:
        """Raises ConfigError for an unknown rule."""
        self._batches = batches
        try:
            self._redactor = Redactor(CaptureOptions(redact=rules).redact) if rules else None
        except ConfigError as exc:
            raise ConfigError("--redact", exc.problem, exc.hint) from None
        self.hits = 0
        """Number of marks that replace a part of a text."""
        self.redacted_rows = 0
        self.unreadable_bodies = 0
        """Number of bodies that are not JSON, so were left out."""
        self.unredacted_rows = 0
        """Number of rows with text that was never redacted."""

    def __iter__(self) -> Iterator[pa.RecordBatch]:
        for batch in self._batches:
            texts = [pc.is_valid(batch.column(name)) for name in _TEXTS]
            with_text = pc.or_(*texts)
            if self._redactor is None:
                self.unredacted_rows += pc.and_(with_text, pc.is_null(batch.column("redactions"))).true_count
            elif with_text.true_count:
                batch = self._redact_batch(batch, self._redactor)
            yield batch

    def _redact_batch(self, batch: pa.RecordBatch, redactor: Redactor) -> pa.RecordBatch:
        names = (*_TEXTS, "redactions")
        rows = []
        for body, text, marks in zip(*(batch.column(name).to_pylist() for name in names), strict=True):
            body_, more = (None, 0) if body is None else redactor.body(body.encode())
            self.unreadable_bodies += body is not None and body_ is None
            text_, again = (None, 0) if text is None else redactor.text(text)
            self.hits += more + again
            self.redacted_rows += more + again > 0
            # Change the number of marks only in rows with text: in other rows it can be null.
            rows.append((body_, text_, marks if body is text is None else (marks or 0) + more + again))
        for name, values in zip(names, zip(*rows, strict=True), strict=True):
            batch = format.replace_column(batch, name, pa.array(values, batch.schema.field(name).type))
        return batch

    def report(self, written: format.TraceWriter) -> None:
        """Add the counts to the report on the written trace."""
        if self.hits:
            how = f"{self.hits:,} marks in {self.redacted_rows:,} rows stand for what --redact found"
            written.changed |= dict.fromkeys(_ASPECTS, how)
        elif self._redactor is not None:
            written.notes.append("--redact found nothing to redact")
        written.note(self.unreadable_bodies, "bodies are no JSON that --redact could read, and were left out")
        if self.unredacted_rows and any(written.counts.get(name) for name in _ASPECTS):
            written.notes.append(
                f"{self.unredacted_rows:,} rows have text that nobody redacted; "
                "--redact email,card,phone,key does"
            )

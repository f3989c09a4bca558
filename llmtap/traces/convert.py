"""Convert a trace from one format to another, with a report on what was kept, changed and lost.

For `llmtap convert`: `convert` opens the source (`registry.py`), writes the target in its format, redacts
text if required, and returns a `Report`. Each aspect of the rows (`ASPECTS`) is counted between reader and
writer, and once more by the writer.
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
from llmtap.traces.registry import URL, open_trace, plain_name, reason_of, shown_name


@dataclass(frozen=True, slots=True)
class Aspect:
    name: str
    rows: int
    written: int
    """Number of rows that were written with the aspect, of those that have it."""
    fate: str
    """`kept`: written in all rows; `partly`: in some; `lost`: in none; `changed`: written with another value;
    `absent`: no row of the source has the aspect."""
    why: str | None = None
    """Reason why the aspect was lost or changed, or a remark on how it was kept."""
    keep: str | None = None


@dataclass(slots=True)
class Report:
    source: str
    source_format: str
    target: str
    target_format: str
    rows_read: int = 0
    rows_written: int = 0
    aspects: list[Aspect] = field(default_factory=list)
    dropped: dict[str, int] = field(default_factory=dict)
    notes_read: list[str] = field(default_factory=list)
    notes_written: list[str] = field(default_factory=list)
    bytes_in: int = 0
    bytes_out: int = 0
    seconds: float = 0.0


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
        progress: called with the bytes read so far and their total, if known.

    Raises ConfigError naming the wrong file or format, and BrokenPipeError if the reader of standard output
    has ended.
    """
    began_ns = SystemClock.mono_ns()
    wanted = _target_format(target, target_format)
    with open_trace(source, source_format=source_format, progress=progress) as trace:
        rows, read_format = trace.source, trace.format
        _check_formats(read_format, wanted)
        report = Report(shown_name(source), read_format.name, shown_name(target, output=True), wanted.name)
        counts = dict.fromkeys(format.ASPECTS, 0)
        batches = rows.batches
        if wanted.name != read_format.name:
            # A trace of another tool has each request once: without those between a gateway and its engines.
            batches = (batch.filter(pc.invert(back_rows_mask(batch))) for batch in batches)
        redacted = _Redacted(_count_batches(batches, report, counts), redact)
        try:
            with new_file(target, replace=force) as out:
                written = wanted.write(out.stream, rows.info, redacted)
                own = wanted.name in (read_format.name, rows.info.source)
                _check_written_rows(counts, written, read_format, wanted, report, own=own)
            report.bytes_out = out.bytes_written
        except OSError as exc:
            if isinstance(exc, BrokenPipeError) and target == STANDARD_STREAM:
                raise
            raise ConfigError(report.target, f"cannot be written: {reason_of(exc)}") from None
        except format.FormatError as exc:
            raise ConfigError(report.target, str(exc)) from None
        report.bytes_in = trace.bytes
    report.rows_written = written.rows
    redacted.report(written)
    report.aspects = [_aspect_of(name, n, wanted, written) for name, n in counts.items()]
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
            counts[aspect] += format.rows_with(batch, aspect)
        yield batch


# ---------------------------------------------------------------- source and target


def _target_format(target: str, name: str | None) -> format.TraceFormat:
    if URL in target:
        raise ConfigError(
            target, "is a URL, and only local files can be written", "write a local file, and copy that file"
        )
    if name is None and target == STANDARD_STREAM:
        raise ConfigError("--to", "is required if the output is standard output")
    try:
        if name is not None:
            return registry.format_named(name, writing=True)
        return registry.format_for_file(plain_name(target))
    except format.FormatError as exc:
        raise ConfigError(target if name is None else "--to", str(exc)) from None


def _check_formats(read_format: format.TraceFormat, wanted: format.TraceFormat) -> None:
    """Raise ConfigError, before a row is read, if the source's format lacks an aspect
    that the target needs."""
    for aspect in format.ASPECTS:
        if aspect in wanted.needs and aspect not in read_format.holds:
            raise ConfigError(
                "--to", f"{wanted.name} requires {aspect}, which {read_format.name} does not contain"
            )


_FULL: Final = (
    'a capture has text only if capture.level is "full", and only of the tenants in capture.full_tenants'
)
_COUNTED: Final = "before the capture, set meter.tokenizer, or let clients send stream_options.include_usage"
_HINTS: Final = {
    "input tokens": _COUNTED,
    "output tokens": _COUNTED,
    "request body": _FULL,
    "response text": _FULL,
    "prefix blocks": 'a capture has prefix blocks if capture.level is "shape" or "full"',
}
"""Settings of a capture that add an aspect to it, by the aspect that a target needs."""


def _check_written_rows(
    counts: dict[str, int],
    written: format.TraceWriter,
    read_format: format.TraceFormat,
    wanted: format.TraceFormat,
    report: Report,
    *,
    own: bool,
) -> None:
    """Raise ConfigError, before the target file appears, if no row could be written.

    `own`: whether source and target have the same format.
    """
    if not report.rows_read or (own and written.rows):
        return
    for aspect in format.ASPECTS:
        if aspect in wanted.needs and not counts[aspect] and not written.counts.get(aspect):
            hint = _HINTS.get(aspect) if read_format is parquet_capture.FORMAT else None
            raise ConfigError(
                "--to", f"{written.name} needs {aspect}, and no row of {report.source} has it", hint
            )
    if not written.rows:
        reasons = _reasons_text(written) or "no row fits"
        raise ConfigError("--to", f"{written.name} cannot hold any row of {report.source}: {reasons}")


def _reasons_text(written: format.TraceWriter) -> str:
    return ", ".join(f"{reason} ({n:,})" for reason, n in written.dropped.items())


def _aspect_of(name: str, rows: int, wanted: format.TraceFormat, written: format.TraceWriter) -> Aspect:
    if not rows:
        return Aspect(name, 0, 0, "absent")
    reason = wanted.why.get(name)
    if name not in wanted.holds:
        reason = reason or f"{wanted.name} has no place for it"
        return Aspect(name, rows, 0, "lost", reason, _formats_with(wanted, name))
    # Count at most `rows`: a writer may add values that the source lacks, such as 0 tokens of a failed
    # request.
    written_rows = min(rows, written.counts.get(name, 0))
    fate = "kept" if written_rows == rows else "partly" if written_rows else "lost"
    if written_rows and name in written.changed:
        fate, reason = "changed", written.changed[name]
    keep = None
    if written_rows < rows and written.dropped:
        reason = "; ".join(filter(None, (f"left out: {_reasons_text(written)}", reason)))
        keep = _formats_with(wanted, "outcome and status", name)
    elif not written_rows:
        keep = _formats_with(wanted, name)
    return Aspect(name, rows, written_rows, fate, reason, keep)


def _formats_with(wanted: format.TraceFormat, *aspects: str) -> str | None:
    others = (f for f in registry.FORMATS if f.write_rows and f is not wanted)
    names = [f.name for f in others if f.holds >= {*aspects}]
    return f"--to {' or '.join(names[:_NAMED_MAX])}" if names else None


_NAMED_MAX: Final = 3
"""Maximum number of formats that are named as alternatives for a lost aspect."""

# ---------------------------------------------------------------- redaction

_TEXTS: Final = ("request_body", "response_text")
_ASPECTS: Final = ("request body", "response text")


class _Redacted:
    """Iterator over batches that redacts their texts by the rules of a capture. Without rules,
    it only counts the texts."""

    def __init__(self, batches: Iterable[pa.RecordBatch], rules: tuple[str, ...]) -> None:
        """Raises ConfigError for an unknown rule."""
        self._batches = batches
        try:
            self._redactor = Redactor(CaptureOptions(redact=rules).redact) if rules else None
        except ConfigError as exc:
            raise ConfigError("--redact", exc.problem, exc.hint) from None
        self.marks = 0
        self.rows = 0
        self.unreadable = 0
        self.raw = 0

    def __iter__(self) -> Iterator[pa.RecordBatch]:
        for batch in self._batches:
            texts = [pc.is_valid(batch.column(name)) for name in _TEXTS]
            with_text = pc.or_(*texts)
            if self._redactor is None:
                self.raw += pc.and_(with_text, pc.is_null(batch.column("redactions"))).true_count
            elif with_text.true_count:
                batch = self._redact_batch(batch, self._redactor)
            yield batch

    def _redact_batch(self, batch: pa.RecordBatch, redactor: Redactor) -> pa.RecordBatch:
        names = (*_TEXTS, "redactions")
        rows = []
        for body, text, marks in zip(*(batch.column(name).to_pylist() for name in names), strict=True):
            body_, more = (None, 0) if body is None else redactor.body(body.encode())
            self.unreadable += body is not None and body_ is None
            text_, again = (None, 0) if text is None else redactor.text(text)
            self.marks += more + again
            self.rows += more + again > 0
            # If the row has no text, keep its number of marks.
            rows.append((body_, text_, marks if body is text is None else (marks or 0) + more + again))
        for name, values in zip(names, zip(*rows, strict=True), strict=True):
            batch = format.replace_column(batch, name, pa.array(values, batch.schema.field(name).type))
        return batch

    def report(self, written: format.TraceWriter) -> None:
        if self.marks:
            how = f"{self.marks:,} marks in {self.rows:,} rows stand for what --redact found"
            written.changed |= dict.fromkeys(_ASPECTS, how)
        elif self._redactor is not None:
            written.notes.append("--redact found nothing to redact")
        written.note(self.unreadable, "bodies are no JSON that --redact could read, and were left out")
        if self.raw and any(written.counts.get(name) for name in _ASPECTS):
            written.notes.append(
                f"{self.raw:,} rows have text that nobody redacted; --redact email,card,phone,key does"
            )

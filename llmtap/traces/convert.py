"""From one trace format to another, in bounded memory, with an account of what became of everything.

Between reader and writer travel record batches; on the way past, what each row tells is counted, by aspect
(`formats/format.py`), and the writer counts what it puts down. So the report can say of each aspect how many
rows had it, how many were written with it, and why not the others.

Bodies go over as the source has them, unless rules to redact them by are given (`redaction.py`).
"""

import difflib
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from glob import has_magic
from pathlib import Path
from typing import Any, Final

import msgspec
import pyarrow as pa

from llmtap.capture.read.streams import STANDARD, InputFile, new_file, opened
from llmtap.clock import SystemClock
from llmtap.errors import ConfigError
from llmtap.traces import registry
from llmtap.traces.format import (
    ASPECTS,
    FormatError,
    TraceFormat,
    TraceSource,
    TraceWritten,
    WriteOptions,
    telling,
)
from llmtap.traces.formats import parquet_capture
from llmtap.traces.redacting import Redacted

__all__ = ["Aspect", "Report", "convert"]

_SPOOL_MEMORY_BYTES: Final = 32 << 20
"""Of Parquet that comes by a pipe, or compressed, before it goes to a file: it is read from its end."""
_COPY_BYTES: Final = 1 << 20
_COMPRESSED: Final = (".gz", ".zst")
_URL: Final = "://"


@dataclass(frozen=True, slots=True)
class Aspect:
    """What became of one thing that rows tell."""

    name: str
    rows: int
    """Rows of the source that tell it."""
    written: int
    """Of these, the rows that were written with it."""
    fate: str
    """`kept` with all of them, `partly` with some, `lost` with none; `changed` where it came out as something
    else; `absent` where no row told it."""
    why: str | None = None
    """Why it was lost or changed, or what is worth knowing of how it was kept."""


@dataclass(slots=True)
class Report:
    """What a conversion did."""

    source: str
    source_format: str
    target: str
    target_format: str
    rows_read: int = 0
    rows_written: int = 0
    aspects: list[Aspect] = field(default_factory=list)
    dropped: dict[str, int] = field(default_factory=dict)
    """Rows that were not written, by reason."""
    notes_read: list[str] = field(default_factory=list)
    notes_written: list[str] = field(default_factory=list)
    bytes_in: int = 0
    bytes_out: int = 0
    seconds: float = 0.0

    def to_dict(self) -> dict[str, Any]:
        """As public JSON."""
        return asdict(self)


class _Counted:
    """Batches passing by, and what they tell."""

    def __init__(self, batches: Iterator[pa.RecordBatch]) -> None:
        self._batches = batches
        self.rows = 0
        self.told = dict.fromkeys(ASPECTS, 0)

    def __iter__(self) -> Iterator[pa.RecordBatch]:
        for batch in self._batches:
            self.rows += batch.num_rows
            for aspect in ASPECTS:
                self.told[aspect] += telling(batch, aspect)
            yield batch


def convert(
    source: str,
    target: str,
    *,
    source_format: str | None = None,
    target_format: str | None = None,
    model: str | None = None,
    override_model: bool = False,
    style: Mapping[str, str] | None = None,
    redact: tuple[str, ...] = (),
    force: bool = False,
    progress: Callable[[int, int | None], None] | None = None,
) -> Report:
    """Reads `source`, writes `target`, and says what was kept.

    Args:
        source: a file, `-` for standard input, or a capture as a folder or a pattern of files.
        target: a file, or `-` for standard output. It appears when it is complete.
        source_format, target_format: names of formats, where content and file names do not tell.
        model: written where a row names none; with `override_model`, everywhere.
        style: spellings, by name, of those that the target has (`Format.styles`).
        redact: rules by which text is redacted, as in `capture.redact`.
        force: replace what is at `target`.
        progress: told the bytes read so far, and of how many.

    Raises ConfigError, whose place is the file or the format that is to blame, and BrokenPipeError where
    nobody reads standard output any more.
    """
    began_ns = SystemClock.mono_ns()
    wanted = _target_format(target, target_format)
    _check_style(wanted, style or {})
    options = WriteOptions(model, override_model, dict(style or {}))
    with ExitStack() as stack:
        file: InputFile | None = None
        size = 0
        try:
            if _is_many(source):
                given = parquet_capture.FORMAT
                if source_format not in (None, given.name):
                    raise ConfigError("--from", f"only {given.name} can be many files")
                rows, size = parquet_capture.read_many(source, progress)
            else:
                file = stack.enter_context(opened(source, registry.SNIFF_BYTES, progress))
                given = _source_format(source, source_format, file.head)
                rows = _read(given, file, stack)
        except OSError as exc:
            raise ConfigError(_shown(source), f"cannot be read: {_reason(exc)}") from None
        except FormatError as exc:
            raise ConfigError(_shown(source), str(exc)) from None
        needs = wanted.needs - ({"model"} if model is not None else set())
        _check_could(given, wanted, needs)
        counted = _Counted(_blamed(rows, source))
        redacted = Redacted(counted, redact)
        report = Report(_shown(source), given.name, _shown(target, output=True), wanted.name)
        try:
            with new_file(target, replace=force) as out:
                assert wanted.write is not None
                written = wanted.write(out.stream, rows.info, redacted, options)
                own = wanted.name in (given.name, rows.info.source)
                _check_did(counted, written, given, wanted, needs, source, own=own)
            report.bytes_out = out.bytes
        except OSError as exc:
            if isinstance(exc, BrokenPipeError) and target == STANDARD:
                raise
            raise ConfigError(report.target, f"cannot be written: {_reason(exc)}") from None
        except FormatError as exc:
            raise ConfigError(report.target, str(exc)) from None
        report.bytes_in = size if file is None else file.size
    report.rows_read, report.rows_written = counted.rows, written.rows
    redacted.report(written)
    report.aspects = [_aspect(name, n, wanted, written) for name, n in counted.told.items()]
    report.dropped = written.dropped
    report.notes_read, report.notes_written = rows.notes, written.notes
    report.seconds = (SystemClock.mono_ns() - began_ns) / 1e9
    return report


# ---------------------------------------------------------------- which formats


def _target_format(target: str, name: str | None) -> TraceFormat:
    if _URL in target:
        raise ConfigError(target, "is a URL", "write a local file, and copy that")
    try:
        if name is not None:
            return registry.by_name(name, writing=True)
    except FormatError as exc:
        raise ConfigError("--to", str(exc)) from None
    if target == STANDARD:
        raise ConfigError("--to", "is needed where the target is standard output")
    try:
        return registry.for_target(_plain_name(target))
    except FormatError as exc:
        raise ConfigError(target, str(exc)) from None


def _source_format(source: str, name: str | None, head: bytes) -> TraceFormat:
    if name is None:
        return registry.detect("" if source == STANDARD else _plain_name(source), head)
    try:
        return registry.by_name(name)
    except FormatError as exc:
        raise ConfigError("--from", str(exc)) from None


def _plain_name(path: str) -> str:
    """The file's name without the ending of its compression."""
    name = Path(path).name
    ending = next((e for e in _COMPRESSED if name.lower().endswith(e)), "")
    return name.removesuffix(name[len(name) - len(ending) :]) if ending else name


# ---------------------------------------------------------------- what is read


def _is_many(source: str) -> bool:
    """A folder, a pattern, or a URL: a capture, as `capture/reader.py` finds it."""
    if source == STANDARD:
        return False
    return _URL in source or Path(source).is_dir() or (has_magic(source) and not Path(source).exists())


def _read(given: TraceFormat, file: InputFile, stack: ExitStack) -> TraceSource:
    assert given.read is not None
    stream = file.stream
    if given is parquet_capture.FORMAT and not file.seekable:
        spool = tempfile.SpooledTemporaryFile(_SPOOL_MEMORY_BYTES)  # noqa: SIM115 (entered next)
        stream = stack.enter_context(spool)  # type: ignore[assignment]
        while data := file.stream.read(_COPY_BYTES):
            stream.write(data)
        stream.seek(0)
    return given.read(stream)


def _blamed(rows: TraceSource, source: str) -> Iterator[pa.RecordBatch]:
    """The batches; what goes wrong with them is the source's."""
    try:
        yield from rows.batches
    except FormatError as exc:
        raise ConfigError(_shown(source), str(exc)) from None
    except (OSError, EOFError) as exc:
        raise ConfigError(_shown(source), f"cannot be read: {_reason(exc)}") from None
    except (pa.ArrowException, msgspec.MsgspecError) as exc:
        raise ConfigError(_shown(source), f"does not fit its format: {str(exc).splitlines()[0]}") from None


# ---------------------------------------------------------------- what was asked for


def _check_style(wanted: TraceFormat, style: Mapping[str, str]) -> None:
    for key in style:
        if key not in wanted.styles:
            near = difflib.get_close_matches(key, wanted.styles, 1)
            known = f"known: {', '.join(wanted.styles)}" if wanted.styles else "it has none"
            meant = f"did you mean {near[0]}?" if near else known
            raise ConfigError("--style", f"{wanted.name} has no style {key!r}; {meant}")


# ---------------------------------------------------------------- what a target needs


def _check_could(given: TraceFormat, wanted: TraceFormat, needs: frozenset[str]) -> None:
    """Known before a row is read: what the source's format has no place for, no row has."""
    for aspect in ASPECTS:
        if aspect in needs and aspect not in given.holds:
            raise ConfigError("--to", f"{wanted.name} needs {aspect}, which {given.name} does not hold")


_HINTS: Final = {
    "input tokens": "clients must send stream_options.include_usage, or meter.tokenizer be set, "
    "before it is captured",
    "output tokens": "clients must send stream_options.include_usage, or meter.tokenizer be set, "
    "before it is captured",
    "request body": 'a capture has text only of the tenants for whom capture.level is "full"',
    "response text": 'a capture has text only of the tenants for whom capture.level is "full"',
    "prefix blocks": 'a capture has them with capture.level "shape" or "full"',
}
"""How a capture comes by what a target needs."""


def _check_did(
    counted: _Counted, written: TraceWritten, given: TraceFormat, wanted: TraceFormat, needs: frozenset[str],
    source: str,
    *, own: bool,
) -> None:  # fmt: skip
    """A file without rows is what nobody asked for, nor one of nothing but failed requests: it is not even
    begun to be there. `own`: what was written before comes back as it was."""
    if not counted.rows or (own and written.rows):
        return
    for aspect in ASPECTS:
        if aspect in needs and not counted.told[aspect]:
            problem = f"{wanted.name} needs {aspect}, and no row of {_shown(source)} has it"
            raise ConfigError(
                "--to", problem, _HINTS.get(aspect) if given is parquet_capture.FORMAT else None
            )
    if written.rows:
        return
    reasons = ", ".join(f"{reason} ({n:,})" for reason, n in written.dropped.items())
    raise ConfigError("--to", f"{wanted.name} can hold no row of {_shown(source)}: {reasons or 'none fits'}")


def _aspect(name: str, rows: int, wanted: TraceFormat, written: TraceWritten) -> Aspect:
    if not rows:
        return Aspect(name, 0, 0, "absent")
    why = wanted.why.get(name)
    if name not in wanted.holds:
        return Aspect(name, rows, 0, "lost", why or f"{wanted.name} has no place for it")
    # A writer may put something where nothing was, as a 0 for the tokens of a failed request.
    there = min(rows, written.told.get(name, 0))
    fate = "kept" if there == rows else "partly" if there else "lost"
    if there and name in written.changed:
        fate, why = "changed", written.changed[name]
    if there < rows and written.dropped:
        reasons = ", ".join(f"{reason} ({n:,})" for reason, n in written.dropped.items())
        why = "; ".join(filter(None, (f"left out: {reasons}", why)))
    return Aspect(name, rows, there, fate, why or ("not written in this style" if not there else None))


def _shown(path: str, *, output: bool = False) -> str:
    return path if path != STANDARD else ("standard output" if output else "standard input")


def _reason(exc: Exception) -> str:
    strerror = getattr(exc, "strerror", None)
    return strerror or str(exc).splitlines()[0] if str(exc) else type(exc).__name__

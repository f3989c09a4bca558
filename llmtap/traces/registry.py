"""List all trace formats, and open traces: a file, standard input, a folder or a URL.

`format_named`, `detect` (for reading) and `format_for_file` (for writing) return a `TraceFormat` of
`formats/`. `open_trace` detects the format unless it is given, and yields an `OpenedTrace`: batches of rows,
format, and the open file. Conversions, replays, simulations and fits read traces with `open_trace`.
"""

import difflib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec
import pyarrow as pa

from llmtap.capture.read.streams import STANDARD_STREAM, InputFile, open_input
from llmtap.errors import ConfigError
from llmtap.traces.format import FormatError, TraceFormat, TraceSource
from llmtap.traces.formats import (
    agents,
    aiperf,
    azure,
    burstgpt,
    har,
    mooncake,
    openai_batch,
    otlp,
    parquet_capture,
    servegen,
    sharegpt,
    tracelab,
    vllm,
)
from llmtap.traces.text import csv_columns, first_objects, first_problem

_READ_HINT: Final = "check the path and its permissions, and whether the file is complete"
_NAMES_SHOWN: Final = 8
_NAME_CHARS: Final = 32
"""Maximum number of characters of a JSON member's name that an error shows."""
SNIFF_BYTES: Final = 64 << 10
"""Number of decompressed bytes at the start of a file by which its format is recognised."""

FORMATS: Final[tuple[TraceFormat, ...]] = (
    parquet_capture.FORMAT,
    *mooncake.FORMATS,
    *azure.FORMATS,
    burstgpt.FORMAT,
    aiperf.FORMAT,
    vllm.FORMAT,
    sharegpt.FORMAT,
    openai_batch.FORMAT,
    har.FORMAT,
    otlp.FORMAT,
    *agents.FORMATS,
    *tracelab.FORMATS,
    servegen.FORMAT,
)


def format_named(name: str, *, writing: bool = False) -> TraceFormat:
    """Return the format of this name. Raises FormatError, which proposes the nearest name."""
    format_ = next((f for f in FORMATS if f.name == name), None)
    if format_ is not None:
        if writing and format_.write_rows is None:
            raise FormatError(f"llmtap can read the format {name}, but cannot write it; choose another one")
        return format_
    names = [f.name for f in FORMATS if not writing or f.write_rows is not None]
    near = [n for n in names if name and n.startswith(name)] or difflib.get_close_matches(name, names, 1)
    meant = f"did you mean {' or '.join(near)}?" if near else f"expected one of {', '.join(names)}"
    raise FormatError(f"no format to {'write' if writing else 'read'} is called {name!r}; {meant}")


def detect(name: str, head: bytes) -> TraceFormat:
    """Return a file's format by its beginning and name. Raises FormatError unless exactly one matches."""
    if not head.strip():
        raise FormatError(
            ("the file is empty" if not head else "the file has only white space") + "; give a file with rows"
        )
    if head.startswith(_UTF16):
        raise FormatError("the file is UTF-16 text; convert it to UTF-8 (`iconv -f UTF-16 -t UTF-8 FILE`)")
    claims = [f for f in FORMATS if f.sniff(head, name)]
    if not claims:
        problem = first_problem(head) or _member_names(head) or _column_names(head)
        raise FormatError(
            (f"{problem}; " if problem else "")
            + "the format of the file is not known; `llmtap convert --list` shows the known formats, and "
            "`--from FORMAT` selects one"
        )
    if len(claims) > 1:
        names = " or ".join(f"{f.name}: {f.title}" for f in claims)
        options = " or ".join(f"`--from {f.name}`" for f in claims)
        raise FormatError(f"the file fits several formats, {names}; select one with {options}")
    return claims[0]


def _member_names(head: bytes) -> str:
    """Return a text with the members of the first JSON objects, to show a misspelt name; "" without any."""
    members = list(dict.fromkeys(name[:_NAME_CHARS] for one in first_objects(head) for name in one))
    more = ", ..." if len(members) > _NAMES_SHOWN else ""
    shown = ", ".join(map(repr, members[:_NAMES_SHOWN]))
    return f"its first objects have the members {shown}{more}" if members else ""


def format_for_file(name: str) -> TraceFormat:
    """Return the format for a new file of this name. Raises FormatError unless exactly one matches."""
    written = [f for f in FORMATS if f.write_rows is not None]
    fits = [f for f in written if name.lower().endswith(f.extensions)]
    if len(fits) == 1:
        return fits[0]
    if not fits:
        raise FormatError(
            f"the file name does not show the format; set --to to one of {', '.join(f.name for f in written)}"
        )
    raise FormatError(
        f"the file name fits several formats; set --to to one of {', '.join(f.name for f in fits)}"
    )


def _column_names(head: bytes) -> str:
    """Return a text with the first columns of a CSV file; "" if it is no CSV file."""
    columns = csv_columns(head)
    if len(columns) < 2 or not all(name.isprintable() for name in columns):
        return ""
    more = ", ..." if len(columns) > _NAMES_SHOWN else ""
    shown = ", ".join(repr(name[:_NAME_CHARS]) for name in columns[:_NAMES_SHOWN])
    return f"its first row has the columns {shown}{more}"


_UTF16: Final = (b"\xff\xfe", b"\xfe\xff")
"""Byte order marks of UTF-16."""
URL_MARK: Final = "://"
"""Text that every URL contains."""
_COMPRESSED_ENDINGS: Final = (".gz", ".zst")


@dataclass(frozen=True, slots=True)
class OpenedTrace:
    """A trace that is open for reading. Errors in its batches are ConfigErrors that name the trace."""

    source: TraceSource
    format: TraceFormat
    file: InputFile | None
    """The open file; None for a capture of many files."""
    capture_bytes: int = 0
    """Total size of the files of a capture."""

    @property
    def size_bytes(self) -> int:
        return self.capture_bytes if self.file is None else self.file.size


@contextmanager
def open_trace(
    place: str,
    *,
    source_format: str | None = None,
    progress: Callable[[int, int | None], None] | None = None,
    option: str = "--from",
) -> Iterator[OpenedTrace]:
    """Open a trace or capture. Raises ConfigError, which names `option` if `source_format` is wrong."""
    with ExitStack() as stack:
        with _errors_naming(place):
            if _is_folder_or_url(place):
                trace_format = parquet_capture.FORMAT
                if source_format not in (None, trace_format.name):
                    raise ConfigError(
                        option,
                        f"a folder or URL can only be read as {trace_format.name}, got {source_format!r}",
                        f"leave out {option}",
                    )
                source, size = parquet_capture.read_files(place, progress)
                trace = OpenedTrace(source, trace_format, None, size)
            else:
                file = stack.enter_context(open_input(place, SNIFF_BYTES, progress))
                trace_format = _format_of(place, source_format, file.head, option)
                if trace_format is parquet_capture.FORMAT and file.seekable:
                    source, _ = parquet_capture.read_files(place, progress)
                else:
                    source = trace_format.read(file.stream)
                trace = OpenedTrace(source, trace_format, file)
        trace.source.batches = _read_batches(trace.source.batches, place)
        yield trace


def _is_folder_or_url(place: str) -> bool:
    """Return whether the source is a folder or a URL. Such a source is a capture."""
    return URL_MARK in place or Path(place).is_dir()


def _format_of(place: str, name: str | None, head: bytes, option: str) -> TraceFormat:
    if name is None:
        return detect("" if place == STANDARD_STREAM else plain_name(place), head)
    try:
        return format_named(name)
    except FormatError as exc:
        raise ConfigError(option, str(exc)) from None


def _read_batches(batches: Iterator[pa.RecordBatch], place: str) -> Iterator[pa.RecordBatch]:
    with _errors_naming(place):
        yield from batches


@contextmanager
def _errors_naming(place: str) -> Iterator[None]:
    """Convert errors in the block to ConfigErrors that name the place of the trace."""
    try:
        yield
    except FormatError as exc:
        raise ConfigError(shown_name(place), str(exc)) from None
    except (OSError, EOFError) as exc:
        raise ConfigError(shown_name(place), f"cannot be read: {reason_of(exc)}", _READ_HINT) from None
    except (pa.ArrowException, msgspec.MsgspecError, UnicodeError) as exc:
        problem = f"does not fit its format: {str(exc).splitlines()[0]}"
        raise ConfigError(shown_name(place), problem, "is the file damaged?") from None


def plain_name(path: str) -> str:
    """Return the file's name without folders and without the ending of its compression."""
    name = Path(path).name
    ending = next((e for e in _COMPRESSED_ENDINGS if name.lower().endswith(e)), "")
    return name[: len(name) - len(ending)]


def shown_name(path: str, *, output: bool = False) -> str:
    return path if path != STANDARD_STREAM else ("standard output" if output else "standard input")


def reason_of(exc: Exception) -> str:
    strerror = getattr(exc, "strerror", None)
    return strerror or str(exc).splitlines()[0] if str(exc) else type(exc).__name__

"""Open a trace or capture for reading: a file, standard input, a folder or a URL.

`open_trace` finds the format (`registry.py`) unless it is given, and yields an `OpenedTrace`: batches of
rows, format, and bytes read. Conversions, replays, simulations and fits read traces by it.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec
import pyarrow as pa

from llmtap.capture.read.streams import STANDARD, InputFile, opened
from llmtap.errors import ConfigError
from llmtap.traces import registry
from llmtap.traces.format import FormatError, TraceFormat, TraceSource
from llmtap.traces.formats import parquet_capture

URL: Final = "://"
_COMPRESSED: Final = (".gz", ".zst")


@dataclass(frozen=True, slots=True)
class OpenedTrace:
    """A trace being read. Its batches raise ConfigError whose place is the trace."""

    source: TraceSource
    format: TraceFormat
    file: InputFile | None
    """None for a capture of many files."""
    many_bytes: int = 0

    @property
    def bytes(self) -> int:
        return self.many_bytes if self.file is None else self.file.size


@contextmanager
def open_trace(
    place: str, *, source_format: str | None = None,
    progress: Callable[[int, int | None], None] | None = None, option: str = "--from",
) -> Iterator[OpenedTrace]:  # fmt: skip
    """Open a trace or capture; `option` is the place of errors of `source_format`. Raises ConfigError."""
    with ExitStack() as stack:
        with _blamed(place):
            if _is_many(place):
                given = parquet_capture.FORMAT
                if source_format not in (None, given.name):
                    raise ConfigError(option, f"only {given.name} can be many files")
                source, size = parquet_capture.read_many(place, progress)
                trace = OpenedTrace(source, given, None, size)
            else:
                file = stack.enter_context(opened(place, registry.SNIFF_BYTES, progress))
                given = _format_of(place, source_format, file.head, option)
                if given is parquet_capture.FORMAT and file.seekable:
                    source, _ = parquet_capture.read_many(place, progress)
                else:
                    source = given.read(file.stream)
                trace = OpenedTrace(source, given, file)
        trace.source.batches = _batches(trace.source.batches, place)
        yield trace


def _is_many(place: str) -> bool:
    """Whether it is a folder or a URL: a capture, as `capture/read/reader.py` finds it."""
    return URL in place or Path(place).is_dir()


def _format_of(place: str, name: str | None, head: bytes, option: str) -> TraceFormat:
    if name is None:
        return registry.detect("" if place == STANDARD else plain_name(place), head)
    try:
        return registry.by_name(name)
    except FormatError as exc:
        raise ConfigError(option, str(exc)) from None


def _batches(batches: Iterator[pa.RecordBatch], place: str) -> Iterator[pa.RecordBatch]:
    with _blamed(place):
        yield from batches


@contextmanager
def _blamed(place: str) -> Iterator[None]:
    """Turn errors of reading into ConfigErrors of the place."""
    try:
        yield
    except FormatError as exc:
        raise ConfigError(shown_name(place), str(exc)) from None
    except (OSError, EOFError) as exc:
        raise ConfigError(shown_name(place), f"cannot be read: {reason_of(exc)}") from None
    except (pa.ArrowException, msgspec.MsgspecError) as exc:
        raise ConfigError(shown_name(place), f"does not fit its format: {str(exc).splitlines()[0]}") from None


def plain_name(path: str) -> str:
    """Return the file's name without the ending of its compression."""
    name = Path(path).name
    ending = next((e for e in _COMPRESSED if name.lower().endswith(e)), "")
    return name[: len(name) - len(ending)]


def shown_name(path: str, *, output: bool = False) -> str:
    return path if path != STANDARD else ("standard output" if output else "standard input")


def reason_of(exc: Exception) -> str:
    strerror = getattr(exc, "strerror", None)
    return strerror or str(exc).splitlines()[0] if str(exc) else type(exc).__name__

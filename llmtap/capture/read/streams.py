"""Read and write any file, plain or compressed (`.gz`, `.zst`); a written file appears only when complete.

The module handles bytes of any format. The readers of traces and data sets read with it, `llmtap convert`
reads and writes with it, and captures are read by `reader.py`. A new file is readable by its owner alone,
unless it replaces a file: then it gets the mode of that file.
"""

import io
import os
import stat
import sys
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Final

import pyarrow as pa

from llmtap.errors import ConfigError
from llmtap.user_files import open_private

STANDARD_STREAM: Final = "-"
"""File name that stands for standard input or standard output."""
_BUFFER_BYTES: Final = 1 << 18
_CODECS: Final = {b"\x1f\x8b": "gzip", b"\x28\xb5\x2f\xfd": "zstd"}
"""By the first bytes of a compressed file: its codec (RFC 1952, RFC 8878)."""
_CODEC_OF_SUFFIX: Final = {".gz": "gzip", ".zst": "zstd"}

Progress = Callable[[int, int | None], None]
"""Function called with the number of bytes read from the disk, and the file's size (None for a pipe)."""


class _CountedInput(io.RawIOBase):
    """Raw input that counts the bytes read, and calls `progress` with their number."""

    def __init__(self, file: BinaryIO, total_bytes: int | None, progress: Progress | None) -> None:
        self._file = file
        self.total_bytes = total_bytes
        """Size of the file; None if it is not known."""
        self._progress = progress
        self.bytes_read = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return self._file.seekable()

    def seek(self, offset: int, whence: int = 0) -> int:
        return self._file.seek(offset, whence)

    def tell(self) -> int:
        return self._file.tell()

    def readinto(self, buffer: Any) -> int:
        data = self._file.read(len(buffer))
        buffer[: len(data)] = data
        self.bytes_read += len(data)
        if self._progress is not None:
            # Limit the sum: a reader that seeks, such as that of Parquet, reads some bytes twice.
            done = self.bytes_read if self.total_bytes is None else min(self.bytes_read, self.total_bytes)
            self._progress(done, self.total_bytes)
        return len(data)


class _PrefixedInput(io.RawIOBase):
    """Input that returns `head`, which was already read from the file, before the rest of the file."""

    def __init__(self, head: bytes, rest: BinaryIO) -> None:
        self._head = head
        """First bytes of the file, which were read to recognise its format."""
        self._file = rest

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        data, self._head = self._head[: len(buffer)], self._head[len(buffer) :]
        data = data or self._file.read(len(buffer))
        buffer[: len(data)] = data
        return len(data)


@dataclass(frozen=True, slots=True)
class InputFile:
    """A file that is open for reading."""

    _raw: _CountedInput
    """The file before decompression."""
    head: bytes
    """First bytes of the content, decompressed."""
    stream: BinaryIO
    """The decompressed content from its beginning."""
    seekable: bool
    """Whether `stream` can seek, which the reader of Parquet needs."""

    @property
    def size(self) -> int:
        """Size on disk in bytes; for a pipe, the number of bytes read so far."""
        return self._raw.bytes_read if self._raw.total_bytes is None else self._raw.total_bytes


@contextmanager
def open_input(source: str, head_bytes: int, progress: Progress | None = None) -> Iterator[InputFile]:
    """Return a context in which a file, or standard input, is open for reading. Raises OSError.

    `head_bytes`: number of decompressed bytes to read in advance, as `InputFile.head`.
    """
    with open(0 if source == STANDARD_STREAM else source, "rb", closefd=source != STANDARD_STREAM) as file:
        regular = source != STANDARD_STREAM and Path(source).is_file()
        raw = _CountedInput(file, os.fstat(file.fileno()).st_size if regular else None, progress)
        head = _read_up_to(raw, max(len(magic) for magic in _CODECS))
        codec = next((name for magic, name in _CODECS.items() if head.startswith(magic)), None)
        if codec is None and regular:
            raw.seek(0)
            raw.bytes_read = 0
            stream: BinaryIO = io.BufferedReader(raw, _BUFFER_BYTES)
            head = _read_up_to(stream, head_bytes)
            stream.seek(0)
            yield InputFile(raw, head, stream, True)
            return
        plain: Any = io.BufferedReader(_PrefixedInput(head, raw), _BUFFER_BYTES)  # type: ignore[arg-type]
        if codec is not None:
            # BufferedReader accepts pa.NativeFile, which has the methods of a raw file.
            plain = io.BufferedReader(pa.CompressedInputStream(plain, codec), _BUFFER_BYTES)
        head = _read_up_to(plain, head_bytes)
        yield InputFile(raw, head, io.BufferedReader(_PrefixedInput(head, plain), _BUFFER_BYTES), False)


def _read_up_to(file: Any, n: int) -> bytes:
    """Read n bytes, or all if there are fewer, by several calls: a pipe can return fewer bytes per call."""
    data = b""
    while len(data) < n and (more := file.read(n - len(data))):
        data += more
    return data


class NewFile(io.RawIOBase):
    """A file that is written through `stream`. `close` does nothing, because codecs call it too early."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.stream: Any = self
        """The file, or the codec that compresses into it."""
        self.bytes_written = 0
        """Number of bytes in the file so far, after compression."""

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        n = self._file.write(data)
        self.bytes_written += n
        return n

    def tell(self) -> int:
        return self.bytes_written


@contextmanager
def new_file(target: str, *, replace: bool) -> Iterator[NewFile]:
    """Return a context that writes a file, which appears at `target` only if the block raises no exception.

    The ending of the name selects the compression. Standard output gets the data immediately. Raises OSError,
    and ConfigError if `target` exists and `replace` is false.
    """
    if target == STANDARD_STREAM:
        yield NewFile(sys.stdout.buffer)
        sys.stdout.buffer.flush()
        return
    path = Path(target)
    _check_target(path, replace=replace)
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with open(part, "xb", opener=open_private) as file:
            if path.exists():
                os.fchmod(file.fileno(), stat.S_IMODE(path.stat().st_mode))
            output = NewFile(file)
            codec = _CODEC_OF_SUFFIX.get(path.suffix.lower())
            if codec is not None:
                output.stream = pa.CompressedOutputStream(pa.PythonFile(output, "w"), codec)
            # Close the codec before the file. Otherwise, it prints an error when it is garbage-collected.
            with closing(output.stream):
                yield output
            file.flush()
            os.fsync(file.fileno())
        _check_target(path, replace=replace)
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def _check_target(path: Path, *, replace: bool) -> None:
    if path.is_dir():
        raise ConfigError(str(path), "is a folder", "name a file to write")
    if path.exists() and not path.is_file():
        raise ConfigError(str(path), "is not a regular file", "to write to standard output, use -")
    if path.exists() and not replace:
        raise ConfigError(str(path), "already exists", "to replace the file, use --force")

"""Read and write any file, plain or compressed (`.gz`, `.zst`); a written file appears only when complete.

Bytes only, of any format: the readers of traces and data sets use it, and `llmtap convert` writes with it.
Captures are read by `reader.py`. A new file is readable by its owner alone; one that replaces a file keeps
its mode.
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

STANDARD: Final = "-"
"""Name that stands for standard input or standard output."""
_BUFFER_BYTES: Final = 1 << 18
_CODECS: Final = {b"\x1f\x8b": "gzip", b"\x28\xb5\x2f\xfd": "zstd"}
"""Codecs by the first bytes of a compressed file (RFC 1952, RFC 8878)."""
_ENDINGS: Final = {".gz": "gzip", ".zst": "zstd"}

Progress = Callable[[int, int | None], None]
"""Called with the bytes read so far, as stored on disk, and their total number, if known."""


class _CountedInput(io.RawIOBase):
    """Raw input that counts the bytes read."""

    def __init__(self, file: BinaryIO, total: int | None, progress: Progress | None) -> None:
        self._file = file
        self.total = total
        self._progress = progress
        self.bytes = 0

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
        self.bytes += len(data)
        if self._progress is not None:
            # A reader that seeks, such as that of Parquet, reads some bytes twice.
            done = self.bytes if self.total is None else min(self.bytes, self.total)
            self._progress(done, self.total)
        return len(data)


class _PrefixedInput(io.RawIOBase):
    """Input that first returns the bytes that were already read."""

    def __init__(self, head: bytes, rest: BinaryIO) -> None:
        self._head = head
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
    """A file being read."""

    _raw: _CountedInput
    head: bytes
    """First bytes of the content, decompressed."""
    stream: BinaryIO
    seekable: bool
    """Whether `stream` can seek, as Parquet needs it."""

    @property
    def size(self) -> int:
        """Size on disk in bytes; for a pipe, the bytes read so far."""
        return self._raw.bytes if self._raw.total is None else self._raw.total


@contextmanager
def open_input(source: str, head_bytes: int, progress: Progress | None = None) -> Iterator[InputFile]:
    """Context of a file, or standard input, that is open for reading from its beginning. Raises OSError."""
    with open(0 if source == STANDARD else source, "rb", closefd=source != STANDARD) as file:
        regular = source != STANDARD and Path(source).is_file()
        raw = _CountedInput(file, os.fstat(file.fileno()).st_size if regular else None, progress)
        head = _read_up_to(raw, max(len(magic) for magic in _CODECS))
        codec = next((name for magic, name in _CODECS.items() if head.startswith(magic)), None)
        if codec is None and regular:
            raw.seek(0)
            raw.bytes = 0
            stream: BinaryIO = io.BufferedReader(raw, _BUFFER_BYTES)
            head = _read_up_to(stream, head_bytes)
            stream.seek(0)
            yield InputFile(raw, head, stream, True)
            return
        plain: Any = io.BufferedReader(_PrefixedInput(head, raw), _BUFFER_BYTES)  # type: ignore[arg-type]
        if codec is not None:
            # pa.NativeFile has the interface of a raw file.
            plain = io.BufferedReader(pa.CompressedInputStream(plain, codec), _BUFFER_BYTES)
        head = _read_up_to(plain, head_bytes)
        yield InputFile(raw, head, io.BufferedReader(_PrefixedInput(head, plain), _BUFFER_BYTES), False)


def _read_up_to(file: Any, n: int) -> bytes:
    """Read up to n bytes; a pipe may return them in pieces."""
    data = b""
    while len(data) < n and (more := file.read(n - len(data))):
        data += more
    return data


class NewFile(io.RawIOBase):
    """A file being written, through `stream`; `bytes`: number of bytes on the disk so far. It ignores
    `close`, which codecs call."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.stream: Any = self
        self.bytes = 0

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        n = self._file.write(data)
        self.bytes += n
        return n

    def tell(self) -> int:
        return self.bytes


@contextmanager
def new_file(target: str, *, replace: bool) -> Iterator[NewFile]:
    """Context of a file that appears at `target` only if the block ends without an exception.

    The name's ending decides about compression. Standard output is written at once. Raises OSError, and
    ConfigError if `target` exists and is not to be replaced.
    """
    if target == STANDARD:
        yield NewFile(sys.stdout.buffer)
        sys.stdout.buffer.flush()
        return
    path = Path(target)
    _check_free(path, replace=replace)
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with open(part, "xb", opener=open_private) as file:
            if path.exists():
                os.fchmod(file.fileno(), stat.S_IMODE(path.stat().st_mode))
            output = NewFile(file)
            codec = _ENDINGS.get(path.suffix.lower())
            if codec is not None:
                output.stream = pa.CompressedOutputStream(pa.PythonFile(output, "w"), codec)
            # Close the codec before the file: otherwise it would complain on stderr when it is
            # garbage-collected.
            with closing(output.stream):
                yield output
            file.flush()
            os.fsync(file.fileno())
        _check_free(path, replace=replace)
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def _check_free(path: Path, *, replace: bool) -> None:
    if path.is_dir():
        raise ConfigError(str(path), "is a folder", "name a file to write")
    if path.exists() and not path.is_file():
        raise ConfigError(str(path), "is not a regular file", "to write to standard output, use -")
    if path.exists() and not replace:
        raise ConfigError(str(path), "already exists", "to replace the file, use --force")

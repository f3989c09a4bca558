"""Crash-safe, append-only file (spool) that holds rows until they are in a Parquet file.

`store.py` writes with `SpoolWriter`; `finisher.py` and `read/reader.py` (for the newest rows) call
`read_spool`. A spool is a sequence of frames:

    magic "LTSP" | kind u8, 0 | version u16 | batches before u32 | rows u32
    length u32 | unpacked length u32 | crc32 u32 | payload of `length` bytes

little-endian; the checksum covers the header before it and the payload, so that garbage never becomes a row.
The first frame is the head: the CaptureInfo as JSON and the Arrow schema, with which a newer llmtap reads the
spool of an older one. A batch frame holds one Arrow IPC message, packed by zstd as a whole: with Arrow's own
packing of single buffers, a batch of one row took 2.6 ms and 12 KB instead of 0.33 ms and 3 KB. A note frame
holds a ledger as JSON.

A reader skips a broken frame to the next whole one. Frames are read with `pread`: on a bad disk a memory
mapping kills the process (SIGBUS). One process writes to a spool's folder and holds its lock. A meter that
drains its relays while its successor continues the capture writes to `aside-<pid>` in it, with its own lock.
"""

import fcntl
import io
import os
import struct
import zlib
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from enum import IntEnum
from pathlib import Path
from typing import Final, NamedTuple

import msgspec
import pyarrow as pa

from llmtap.capture.options import CaptureOptions
from llmtap.capture.schema import SCHEMA, VERSION, CaptureInfo, CaptureLedger, CaptureVersionError, migrate
from llmtap.errors import LlmtapError

_MAGIC: Final = b"LTSP"
_HEADER: Final = struct.Struct("<4sBxHIIIII")
_CRC_AT: Final = _HEADER.size - 4
_PAYLOAD_BYTES_MAX: Final = 1 << 30
"""Maximum payload of a frame, packed or unpacked. A batch has a few MB; a longer frame is damaged."""
_SCAN_BYTES: Final = 1 << 20
"""Bytes read at once in the search for the next whole frame."""
_CODEC: Final = pa.Codec("zstd", compression_level=1)


class _Kind(IntEnum):
    HEAD = 1
    BATCH = 2
    NOTE = 3


_KINDS: Final = frozenset(int(k) for k in _Kind)


class SpoolError(LlmtapError):
    """A spool cannot be read at all."""


class SpoolWriter:
    """One spool being written. A method that raises OSError leaves the file as it was."""

    def __init__(self, path: Path, info: CaptureInfo, *, schema: pa.Schema = SCHEMA) -> None:
        """Create the file, which must not exist."""
        self.path = path
        self.rows = 0
        self.batches = 0
        self.notes = 0
        self.bytes = 0
        """End of the last whole frame."""
        self._version = info.schema_version
        self._ipc = io.BytesIO()
        self._stream = pa.ipc.new_stream(self._ipc, schema, options=pa.ipc.IpcWriteOptions(use_threads=False))
        # Arrow writes the schema before the first batch. Write an empty batch now and do not store it: the
        # head has the schema.
        self._stream.write_batch(pa.RecordBatch.from_pylist([], schema=schema))
        self._fd = _create_file(path)
        head = msgspec.json.encode(info)
        head = struct.pack("<I", len(head)) + head + schema.serialize().to_pybytes()
        try:
            self._write(self._frame(_Kind.HEAD, head), sync=False)
        except OSError:
            self.close()
            path.unlink(missing_ok=True)
            raise

    def append(
        self, batch: pa.RecordBatch, ledger: CaptureLedger | None = None, *, sync: bool = False
    ) -> None:
        """Append a batch and a ledger; with `sync`, durably. Raises OSError: the batch may be tried again."""
        self._ipc.seek(0)
        self._ipc.truncate(0)
        self._stream.write_batch(batch)
        message = self._ipc.getbuffer()
        try:
            data = self._frame(
                _Kind.BATCH, _CODEC.compress(message, asbytes=True), batch.num_rows, len(message)
            )
        finally:
            message.release()
        if ledger is not None:
            data += self._frame(_Kind.NOTE, msgspec.json.encode(ledger), before=self.batches + 1)
        self._write(data, sync=sync)
        self.batches += 1
        self.rows += batch.num_rows
        self.notes += ledger is not None

    def note(self, ledger: CaptureLedger, *, sync: bool = False) -> None:
        """Append a ledger. Raises OSError as `append` does."""
        self._write(self._frame(_Kind.NOTE, msgspec.json.encode(ledger)), sync=sync)
        self.notes += 1

    def sync(self) -> None:
        os.fdatasync(self._fd)

    @property
    def present(self) -> bool:
        """Whether neither the file nor its folder was removed."""
        try:
            at_path, opened = os.stat(self.path), os.fstat(self._fd)
        except (FileNotFoundError, NotADirectoryError):
            return False
        return (at_path.st_dev, at_path.st_ino) == (opened.st_dev, opened.st_ino)

    def restore(self) -> None:
        """Write the removed file again from its open descriptor. Raises OSError."""
        fd = _create_file(self.path)
        try:
            at = 0
            while at < self.bytes:
                part = os.pread(self._fd, min(_SCAN_BYTES, self.bytes - at), at)
                if not part:
                    raise OSError(f"{self.path.name}: is cut off at byte {at} of {self.bytes}")
                _write_all(fd, part, at)
                at += len(part)
            os.fdatasync(fd)
        except OSError:
            os.close(fd)
            self.path.unlink(missing_ok=True)
            raise
        os.close(self._fd)
        self._fd = fd

    def close(self) -> None:
        """Close the file; may be repeated."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _frame(
        self, kind: _Kind, payload: bytes, rows: int = 0, unpacked: int = 0, before: int | None = None
    ) -> bytes:
        assert max(len(payload), unpacked) <= _PAYLOAD_BYTES_MAX, "batches are bounded by the caller's memory"
        before = self.batches if before is None else before
        header = _HEADER.pack(_MAGIC, kind, self._version, before, rows, len(payload), unpacked, 0)[:_CRC_AT]
        return header + struct.pack("<I", zlib.crc32(payload, zlib.crc32(header))) + payload

    def _write(self, data: bytes, *, sync: bool) -> None:
        try:
            _write_all(self._fd, data, self.bytes)
            if sync:
                os.fdatasync(self._fd)
        except OSError:
            try:
                os.ftruncate(self._fd, self.bytes)
            except OSError:
                # The next write starts at the same place, and a reader skips the rest of this frame.
                pass
            raise
        self.bytes += len(data)


@dataclass(slots=True)
class SpoolContents:
    """The whole frames of a spool."""

    path: Path
    info: CaptureInfo
    """Metadata in the version of the spool. If the head is lost, the level is `full`, which covers all
    levels."""
    ledger: CaptureLedger
    rows: int = 0
    notes: int = 0
    damaged: dict[str, int] = field(default_factory=dict)
    """Lost `batches` (a broken end counts as one) and `bytes` that belong to no frame; empty if the file is
    undamaged."""
    _schema: pa.Schema = SCHEMA
    _frames: list[int] = field(default_factory=list)

    def batches(self) -> Iterator[pa.RecordBatch]:
        """Yield the rows in the present columns. Raises SpoolError if the file has changed or the disk
        fails."""
        with _File(self.path) as file:
            for at in self._frames:
                frame = _frame_at(file, at, file.size)
                if frame is None:
                    raise SpoolError(f"{self.path.name}: the frame at byte {at} is damaged")
                unpacked = _CODEC.decompress(frame.payload, decompressed_size=frame.unpacked)
                batch = pa.ipc.read_record_batch(pa.ipc.read_message(unpacked), self._schema)
                yield migrate(batch, self.info.schema_version, where=self.path.name)


def read_spool(path: Path) -> SpoolContents:
    """Find the whole frames of a spool.

    Raises CaptureVersionError if a newer llmtap wrote it, SpoolError if it cannot be read.
    """
    frames: list[int] = []
    head: tuple[CaptureInfo, pa.Schema] | None = None
    contents = SpoolContents(path, CaptureInfo(level="full"), CaptureLedger())
    lost_bytes = lost_batches = batches_before = version = 0
    with _File(path) as file:
        at = 0
        while at < file.size:
            frame = _frame_at(file, at, file.size)
            if frame is None:
                after = _next_frame_at(file, at + 1)
                if after == file.size:
                    lost_batches += _kind_at(file, at) not in (_Kind.HEAD, _Kind.NOTE)
                lost_bytes += after - at
                at = after
                continue
            if frame.version > VERSION:
                raise CaptureVersionError(path.name, frame.version)
            lost_batches += max(0, frame.before - batches_before)
            batches_before = frame.before
            match frame.kind:
                case _Kind.HEAD:
                    head = _read_head(frame.payload)
                case _Kind.NOTE:
                    contents.ledger = msgspec.json.decode(frame.payload, type=CaptureLedger)
                    contents.notes += 1
                case _:
                    batches_before += 1
                    frames.append(at)
                    contents.rows += frame.rows
            version = frame.version
            at += _HEADER.size + len(frame.payload)
    if head is not None:
        contents.info, contents._schema = head
    elif frames and version != VERSION:
        # The head with the columns of the older version is lost, so its batches cannot be read.
        lost_batches += len(frames)
        frames, contents.rows = [], 0
    contents._frames = frames
    if lost_bytes or lost_batches:
        contents.damaged = {"batches": lost_batches, "bytes": lost_bytes}
    return contents


class _Frame(NamedTuple):
    kind: int
    version: int
    before: int
    """Number of batches written before this frame. A gap in these numbers is the number of lost batches."""
    rows: int
    unpacked: int
    payload: bytes


class _File:
    """A file for reading at any place. Raises SpoolError if the disk fails."""

    def __init__(self, path: Path) -> None:
        self._name = path.name
        try:
            self._fd = os.open(path, os.O_RDONLY)
            self.size = os.fstat(self._fd).st_size
        except OSError as exc:
            raise SpoolError(f"{path.name} cannot be opened: {exc.strerror}") from None

    def at(self, at: int, length: int) -> bytes:
        """Return up to `length` bytes: fewer only at the end of the file."""
        parts = []
        while length:
            try:
                part = os.pread(self._fd, length, at)
            except OSError as exc:
                raise SpoolError(f"{self._name} cannot be read at byte {at}: {exc.strerror}") from None
            if not part:
                break
            parts.append(part)
            at += len(part)
            length -= len(part)
        return b"".join(parts)

    def __enter__(self) -> "_File":
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._fd)


def _frame_at(file: _File, at: int, end: int) -> _Frame | None:
    """Return the whole frame that begins at `at`, if any."""
    header = file.at(at, _HEADER.size)
    if len(header) < _HEADER.size or not header.startswith(_MAGIC):
        return None
    _, kind, version, before, rows, length, unpacked, crc = _HEADER.unpack(header)
    fits = at + _HEADER.size + length <= end and max(length, unpacked) <= _PAYLOAD_BYTES_MAX
    if kind not in _KINDS or not fits:
        return None
    payload = file.at(at + _HEADER.size, length)
    if zlib.crc32(payload, zlib.crc32(header[:_CRC_AT])) != crc:
        return None
    return _Frame(kind, version, before, rows, unpacked, payload)


def _next_frame_at(file: _File, start: int) -> int:
    """Return the offset of the next whole frame, or the end of the file."""
    at = start
    while at < file.size:
        part = file.at(at, _SCAN_BYTES)
        place = part.find(_MAGIC)
        while place >= 0:
            if _frame_at(file, at + place, file.size) is not None:
                return at + place
            place = part.find(_MAGIC, place + 1)
        # The magic bytes may lie across the border of two parts.
        at += max(1, len(part) - len(_MAGIC) + 1)
    return file.size


def _kind_at(file: _File, at: int) -> int:
    """Return the kind that a broken frame seems to have, or 0."""
    begin = file.at(at, len(_MAGIC) + 1)
    return begin[-1] if begin.startswith(_MAGIC) and len(begin) > len(_MAGIC) else 0


def _read_head(payload: bytes) -> tuple[CaptureInfo, pa.Schema]:
    (length,) = struct.unpack_from("<I", payload)
    info = msgspec.json.decode(payload[4 : 4 + length], type=CaptureInfo)
    return info, pa.ipc.read_schema(pa.py_buffer(payload[4 + length :]))


def _create_file(path: Path) -> int:
    # Open for reading, too: `restore` reads. Only the owner may read the file, because it describes the
    # traffic of users.
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)


def _write_all(fd: int, data: bytes, at: int) -> None:
    view = memoryview(data)
    while view:
        written = os.pwrite(fd, view, at)
        view, at = view[written:], at + written


LOCK: Final = "llmtap.lock"
_PREFIX: Final = "aside-"


def aside_of(options: CaptureOptions, folder: Path, pid: int) -> CaptureOptions:
    """Return options of the same capture whose spool folder is beside `folder`."""
    return msgspec.structs.replace(options, spool=str(folder / f"{_PREFIX}{pid}"))


def take_back(folder: Path) -> None:
    """Move the spools of dead meters into `folder`, which is ours. Raises OSError."""
    for aside in folder.glob(f"{_PREFIX}*"):
        fd = os.open(aside / LOCK, os.O_RDONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            continue  # The lock is held, so the meter of this folder still runs.
        else:
            for spool in aside.glob("llmtap-*.spool"):
                os.replace(spool, folder / spool.name)
            clear(aside)
        finally:
            os.close(fd)


def clear(aside: Path) -> None:
    """Remove the folder if only its lock is left in it."""
    with suppress(OSError):
        if [path.name for path in aside.iterdir()] == [LOCK]:
            (aside / LOCK).unlink()
            aside.rmdir()

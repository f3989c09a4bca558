"""Crash-safe, append-only file (spool) that holds rows until they are in a Parquet file.

`store.py` writes with `SpoolWriter`; `finisher.py` and `read/reader.py` (for the newest rows) call
`read_spool`. A spool is a sequence of frames:

    magic "LTSP" | kind u8, 0 | version u16 | batches before u32 | rows u32
    length u32 | unpacked length u32 | crc32 u32 | payload of `length` bytes

Integers are little-endian. The checksum covers the header before it and the payload, so that garbage never
becomes a row. The first frame is the head: the CaptureInfo as JSON and the Arrow schema, with which a newer
llmtap reads the spool of an older one. A batch frame holds one Arrow IPC message, compressed by zstd as a
whole: with Arrow's own compression of single buffers, a batch of one row took 2.6 ms and 12 KB instead of
0.33 ms and 3 KB. A note frame holds a ledger as JSON.

A reader skips a broken frame and continues at the next whole frame. Frames are read with `pread`, because on
a bad disk a memory mapping kills the process (SIGBUS). Only one process writes to a spool's folder: it holds
the lock file in it. A meter that drains its relays while its successor continues the capture writes to the
subfolder `aside-<pid>`, which has a lock file of its own.
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
_CRC_OFFSET: Final = _HEADER.size - 4
_PAYLOAD_BYTES_MAX: Final = 1 << 30
"""Maximum payload of a frame, compressed or not. A batch has a few MB, so a longer frame is damaged."""
_SCAN_BYTES: Final = 1 << 20
"""Number of bytes read at once, to search for the next whole frame or to copy a spool."""
_CODEC: Final = pa.Codec("zstd", compression_level=1)


class _Kind(IntEnum):
    """Kind of a frame, as stored."""

    HEAD = 1
    BATCH = 2
    NOTE = 3


_KINDS: Final = frozenset(int(k) for k in _Kind)


class SpoolError(LlmtapError):
    """A spool cannot be read at all."""


class SpoolWriter:
    """A spool that is open for writing. A method that raises OSError leaves the file as it was."""

    def __init__(self, path: Path, info: CaptureInfo, *, schema: pa.Schema = SCHEMA) -> None:
        """Create the file. Raises OSError, also if the file exists."""
        self.path = path
        self.rows = 0
        self.batches = 0
        self.notes = 0
        """Number of ledgers written."""
        self.size_bytes = 0
        """Size of the file up to the end of the last whole frame."""
        self._version = info.schema_version
        """Version of the schema, stored in each frame."""
        self._ipc_buffer = io.BytesIO()
        """Memory in which a batch is encoded before it is written."""
        self._ipc_stream = pa.ipc.new_stream(
            self._ipc_buffer, schema, options=pa.ipc.IpcWriteOptions(use_threads=False)
        )
        """Encoder of Arrow batches into `_ipc_buffer`."""
        # Arrow writes the schema before the first batch, but the head of the spool has it already. So write
        # the schema with an empty batch here, and do not store these bytes.
        self._ipc_stream.write_batch(pa.RecordBatch.from_pylist([], schema=schema))
        self._fd = _create_file(path)
        head = msgspec.json.encode(info)
        head = struct.pack("<I", len(head)) + head + schema.serialize().to_pybytes()
        try:
            self._write(self._encode_frame(_Kind.HEAD, head), sync=False)
        except OSError:
            self.close()
            path.unlink(missing_ok=True)
            raise

    def append(
        self, batch: pa.RecordBatch, ledger: CaptureLedger | None = None, *, sync: bool = False
    ) -> None:
        """Append a batch and a ledger; with `sync`, durably. After an OSError, the caller can try again."""
        self._ipc_buffer.seek(0)
        self._ipc_buffer.truncate(0)
        self._ipc_stream.write_batch(batch)
        message = self._ipc_buffer.getbuffer()
        try:
            data = self._encode_frame(
                _Kind.BATCH, _CODEC.compress(message, asbytes=True), batch.num_rows, len(message)
            )
        finally:
            message.release()
        if ledger is not None:
            note = msgspec.json.encode(ledger)
            data += self._encode_frame(_Kind.NOTE, note, batches_before=self.batches + 1)
        self._write(data, sync=sync)
        self.batches += 1
        self.rows += batch.num_rows
        self.notes += ledger is not None

    def note(self, ledger: CaptureLedger, *, sync: bool = False) -> None:
        """Append a ledger; with `sync`, durably. After an OSError, the caller can try again."""
        self._write(self._encode_frame(_Kind.NOTE, msgspec.json.encode(ledger)), sync=sync)
        self.notes += 1

    def sync(self) -> None:
        os.fdatasync(self._fd)

    @property
    def is_at_path(self) -> bool:
        """Whether the open file is still at its path. False if another program removed it or its folder."""
        try:
            at_path, opened = os.stat(self.path), os.fstat(self._fd)
        except (FileNotFoundError, NotADirectoryError):
            return False
        return (at_path.st_dev, at_path.st_ino) == (opened.st_dev, opened.st_ino)

    def restore(self) -> None:
        """Write the removed file again from its open descriptor. Raises OSError."""
        fd = _create_file(self.path)
        try:
            offset = 0
            while offset < self.size_bytes:
                part = os.pread(self._fd, min(_SCAN_BYTES, self.size_bytes - offset), offset)
                if not part:
                    raise OSError(
                        f"{self.path.name} was cut from {self.size_bytes} to {offset} bytes: check the disk"
                    )
                _write_all(fd, part, offset)
                offset += len(part)
            os.fdatasync(fd)
        except OSError:
            os.close(fd)
            self.path.unlink(missing_ok=True)
            raise
        os.close(self._fd)
        self._fd = fd

    def close(self) -> None:
        """Close the file. A second call does nothing."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _encode_frame(
        self,
        kind: _Kind,
        payload: bytes,
        rows: int = 0,
        unpacked_bytes: int = 0,
        batches_before: int | None = None,
    ) -> bytes:
        size = max(len(payload), unpacked_bytes)
        assert size <= _PAYLOAD_BYTES_MAX, f"a batch of {size} bytes is too large for a frame"
        before = self.batches if batches_before is None else batches_before
        header = _HEADER.pack(_MAGIC, kind, self._version, before, rows, len(payload), unpacked_bytes, 0)
        header = header[:_CRC_OFFSET]
        return header + struct.pack("<I", zlib.crc32(payload, zlib.crc32(header))) + payload

    def _write(self, data: bytes, *, sync: bool) -> None:
        try:
            _write_all(self._fd, data, self.size_bytes)
            if sync:
                os.fdatasync(self._fd)
        except OSError:
            try:
                os.ftruncate(self._fd, self.size_bytes)
            except OSError:
                # The next frame overwrites the incomplete one; readers skip what is left of it.
                pass
            raise
        self.size_bytes += len(data)


@dataclass(slots=True)
class SpoolContents:
    """Content of the undamaged frames of a spool, found by `read_spool`."""

    path: Path
    info: CaptureInfo
    """Metadata in the version of the spool. If the head is lost, the level is `full`, the highest level."""
    ledger: CaptureLedger
    """The latest ledger in the spool."""
    rows: int = 0
    """Number of rows in undamaged frames."""
    notes: int = 0
    """Number of ledgers in the spool."""
    damaged: dict[str, int] = field(default_factory=dict)
    """Number of lost `batches` (a broken end counts as one), and number of `bytes` that belong to no whole
    frame; empty if the file is undamaged."""
    _schema: pa.Schema = SCHEMA
    _batch_offsets: list[int] = field(default_factory=list)
    """Offset of each frame with rows."""

    def batches(self) -> Iterator[pa.RecordBatch]:
        """Yield the rows in the present columns. Raises SpoolError if the file changed or cannot be read."""
        with _SpoolFile(self.path) as file:
            for offset in self._batch_offsets:
                frame = _frame_at(file, offset)
                if frame is None:
                    raise SpoolError(f"{self.path.name} is damaged at byte {offset}: check the disk")
                unpacked = _CODEC.decompress(frame.payload, decompressed_size=frame.unpacked_bytes)
                batch = pa.ipc.read_record_batch(pa.ipc.read_message(unpacked), self._schema)
                yield migrate(batch, self.info.schema_version, where=self.path.name)


def read_spool(path: Path) -> SpoolContents:
    """Find the whole frames of a spool.

    Raises CaptureVersionError if a newer llmtap wrote the spool, SpoolError if it cannot be read.
    """
    batch_offsets: list[int] = []
    head: tuple[CaptureInfo, pa.Schema] | None = None
    contents = SpoolContents(path, CaptureInfo(level="full"), CaptureLedger())
    lost_bytes = lost_batches = batches_before = version = 0
    with _SpoolFile(path) as file:
        offset = 0
        while offset < file.size_bytes:
            frame = _frame_at(file, offset)
            if frame is None:
                next_offset = _next_frame_offset(file, offset + 1)
                if next_offset == file.size_bytes:
                    lost_batches += _kind_at(file, offset) not in (_Kind.HEAD, _Kind.NOTE)
                lost_bytes += next_offset - offset
                offset = next_offset
                continue
            if frame.version > VERSION:
                raise CaptureVersionError(path.name, frame.version)
            lost_batches += max(0, frame.batches_before - batches_before)
            batches_before = frame.batches_before
            match frame.kind:
                case _Kind.HEAD:
                    head = _read_head(frame.payload)
                case _Kind.NOTE:
                    contents.ledger = msgspec.json.decode(frame.payload, type=CaptureLedger)
                    contents.notes += 1
                case _:
                    batches_before += 1
                    batch_offsets.append(offset)
                    contents.rows += frame.rows
            version = frame.version
            offset += _HEADER.size + len(frame.payload)
    if head is not None:
        contents.info, contents._schema = head
    elif batch_offsets and version != VERSION:
        # The head with the columns of the older version is lost, so its batches cannot be read.
        lost_batches += len(batch_offsets)
        batch_offsets, contents.rows = [], 0
    contents._batch_offsets = batch_offsets
    if lost_bytes or lost_batches:
        contents.damaged = {"batches": lost_batches, "bytes": lost_bytes}
    return contents


class _Frame(NamedTuple):
    """One frame of a spool, as read."""

    kind: int
    version: int
    """Schema version of the spool."""
    batches_before: int
    """Number of batches written before this frame. If the reader has found fewer, the others are lost."""
    rows: int
    unpacked_bytes: int
    """Size of the payload after decompression; 0 if it is not compressed."""
    payload: bytes


class _SpoolFile:
    """A spool that is open for reading at any offset. Raises SpoolError if the disk fails."""

    def __init__(self, path: Path) -> None:
        self._name = path.name
        try:
            self._fd = os.open(path, os.O_RDONLY)
            self.size_bytes = os.fstat(self._fd).st_size
        except OSError as exc:
            raise SpoolError(f"{path.name} cannot be opened: {exc.strerror}; check its permissions") from None

    def read(self, offset: int, length: int) -> bytes:
        """Return `length` bytes from `offset` on, or fewer at the end of the file."""
        parts = []
        while length:
            try:
                part = os.pread(self._fd, length, offset)
            except OSError as exc:
                raise SpoolError(
                    f"{self._name} cannot be read at byte {offset} ({exc.strerror}): check the disk"
                ) from None
            if not part:
                break
            parts.append(part)
            offset += len(part)
            length -= len(part)
        return b"".join(parts)

    def __enter__(self) -> "_SpoolFile":
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._fd)


def _frame_at(file: _SpoolFile, offset: int) -> _Frame | None:
    """Return the frame that begins at `offset`; None if there is no whole frame with a correct checksum."""
    header = file.read(offset, _HEADER.size)
    if len(header) < _HEADER.size or not header.startswith(_MAGIC):
        return None
    _, kind, version, before, rows, length, unpacked, crc = _HEADER.unpack(header)
    payload_offset = offset + _HEADER.size
    fits = payload_offset + length <= file.size_bytes and max(length, unpacked) <= _PAYLOAD_BYTES_MAX
    if kind not in _KINDS or not fits:
        return None
    payload = file.read(payload_offset, length)
    if zlib.crc32(payload, zlib.crc32(header[:_CRC_OFFSET])) != crc:
        return None
    return _Frame(kind, version, before, rows, unpacked, payload)


def _next_frame_offset(file: _SpoolFile, start: int) -> int:
    """Return the offset of the next whole frame, or the end of the file."""
    offset = start
    while offset < file.size_bytes:
        part = file.read(offset, _SCAN_BYTES)
        index = part.find(_MAGIC)
        while index >= 0:
            if _frame_at(file, offset + index) is not None:
                return offset + index
            index = part.find(_MAGIC, index + 1)
        # Let the parts overlap, because the magic bytes can lie across the border of two parts.
        offset += max(1, len(part) - len(_MAGIC) + 1)
    return file.size_bytes


def _kind_at(file: _SpoolFile, offset: int) -> int:
    """Return the kind in the header of a broken frame, or 0 if the header is also broken."""
    begin = file.read(offset, len(_MAGIC) + 1)
    return begin[-1] if begin.startswith(_MAGIC) and len(begin) > len(_MAGIC) else 0


def _read_head(payload: bytes) -> tuple[CaptureInfo, pa.Schema]:
    (length,) = struct.unpack_from("<I", payload)
    info = msgspec.json.decode(payload[4 : 4 + length], type=CaptureInfo)
    return info, pa.ipc.read_schema(pa.py_buffer(payload[4 + length :]))


def _create_file(path: Path) -> int:
    # O_RDWR: `restore` also reads this file. 0o600: the file describes the traffic of users.
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)


def _write_all(fd: int, data: bytes, offset: int) -> None:
    view = memoryview(data)
    while view:
        written = os.pwrite(fd, view, offset)
        view, offset = view[written:], offset + written


LOCK_FILE: Final = "llmtap.lock"
"""Name of the file in a spool's folder that the writing process locks, so that no second process writes."""
_ASIDE_PREFIX: Final = "aside-"


def aside_options(options: CaptureOptions, folder: Path, pid: int) -> CaptureOptions:
    """Return the options of the same capture with the spool folder `aside-<pid>` in `folder`."""
    return msgspec.structs.replace(options, spool=str(folder / f"{_ASIDE_PREFIX}{pid}"))


def recover_aside_spools(folder: Path) -> None:
    """Move the spools of ended meters from `aside-<pid>` into `folder`, which is locked. Raises OSError."""
    for aside in folder.glob(f"{_ASIDE_PREFIX}*"):
        fd = os.open(aside / LOCK_FILE, os.O_RDONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            continue  # The lock is held, so the meter that writes to this folder still runs.
        else:
            for spool in aside.glob("llmtap-*.spool"):
                os.replace(spool, folder / spool.name)
            remove_empty_folder(aside)
        finally:
            os.close(fd)


def remove_empty_folder(folder: Path) -> None:
    """Remove a spool's folder if only the lock file is left in it."""
    with suppress(OSError):
        if [path.name for path in folder.iterdir()] == [LOCK_FILE]:
            (folder / LOCK_FILE).unlink()
            folder.rmdir()

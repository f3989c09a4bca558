"""Store of a capture: writes rows to the open spool, and passes closed spools to the finisher.

The meter's recorder has one `Store`; `check` tests the folders before the start. Once `append` returns
True, its rows survive a kill of the process (with `fsync = "batch"` also a power failure). A reason against
writing (a full disk, a folder that is gone or read-only, the limit of the total size) is a named `problem`:
the caller keeps the batch and tries again.

A lock in the spool's folder prevents that two processes recover each other's live spools. A file has the name
of its spool, `llmtap-<UTC time>-<capture>-<n>-<random>.parquet`, sorted by time and never used twice.

Disk space of the largest spool stays free, so that spools can become files. Spools and local files together
are bounded; the size of a batch is estimated by the compression of earlier ones. A ledger without rows is
written despite the limit and that reserve, so that a paused capture can report its losses; a spool of ledgers
alone is replaced when it has grown.
"""

import errno
import fcntl
import hashlib
import logging
import os
import secrets
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec
import pyarrow as pa

from llmtap.capture.options import CaptureOptions, redact_url
from llmtap.capture.schema import CaptureInfo, CaptureLedger
from llmtap.capture.store import parquet
from llmtap.capture.store.finisher import ClosedSpool, Finisher, LocalFiles
from llmtap.capture.store.spool import LOCK, SpoolWriter, take_back
from llmtap.clock import Clock
from llmtap.errors import ConfigError

log = logging.getLogger(__name__)

FULL_DISK_ERRORS: Final = frozenset((errno.ENOSPC, errno.EDQUOT, errno.EFBIG))
FULL_CHECK_NS: Final = 1_000_000_000
"""Interval at which the folders are measured while the total size is reached (otherwise FOLDER_CHECK_NS)."""
MARGIN_BYTES: Final = 128 << 10
"""Free disk space required in addition to the size of a spool, for ledgers and the 15 KB of any Parquet
file."""
NOTES_BYTES: Final = 32 << 10
"""Part of `total_bytes` that is reserved for ledgers without rows: the head of a spool takes 6 KB, a Parquet
file of it 3 KB."""
NOTES_SPOOL_BYTES: Final = 16 << 10
FOLDER_CHECK_NS: Final = 10_000_000_000
"""Interval at which the folders are measured."""
_HEAD_BYTES: Final = 6 << 10
_FRAME_BYTES: Final = 1 << 10
"""Bytes of a batch in addition to its rows: Arrow's description of 100 columns, packed, and the ledger after
the batch."""


@dataclass(frozen=True, slots=True)
class StoreState:
    """Counts of a store since its start, and sizes of its files."""

    rows_written: int
    bytes_written: int
    files: int
    files_waiting: int
    files_deleted: int
    """Files deleted at the limit of the total size, oldest first."""
    rows_deleted: int
    spool_bytes: int
    local_bytes: int
    """Size of spools and of our local files, which `total_bytes` limits."""
    failures: int
    recovered: int
    damaged: int
    lost_rows: int
    """Rows of spools that were removed before they became files."""
    problem: str | None
    files_problem: str | None


def spool_folder(options: CaptureOptions) -> Path:
    """Return the folder of the spools: the configured one, else one in the folder of the capture, or for a
    remote capture one in the user's state folder."""
    assert options.to is not None
    if options.spool is not None:
        return Path(options.spool)
    place = parquet.place_of(options.to)
    if place.folder is not None:
        return place.folder / ".spool"
    state = os.environ.get("XDG_STATE_HOME") or os.path.join(os.path.expanduser("~"), ".local", "state")
    name = hashlib.sha256(redact_url(options.to).encode()).hexdigest()[:12]
    return Path(state) / "llmtap" / f"spool-{name}"


def check(options: CaptureOptions, supervisor: int | None = None, in_use: bool = False) -> None:
    """Raise ConfigError if `Store.open` would raise it; leave no new folders and files.

    A child of process `supervisor` (or of this one) may hold the lock: the settings are for a running proxy.
    With `in_use`, any process may.
    """
    assert options.to is not None
    place, spool = parquet.place_of(options.to), spool_folder(options)
    made = []
    try:
        for key, folder in _folders(options, place, spool):
            made += _probe_folder(key, folder)
        if not in_use and (spool / LOCK).exists():
            holder = _lock_folder(options, spool, os.getpid() if supervisor is None else supervisor)
            if holder is not None:
                os.close(holder)
    finally:
        for folder in reversed(made):
            with suppress(OSError):
                folder.rmdir()


class Store:
    """One capture's spool and files.

    `append`, `tick` and `rotate` are for one thread; `state`, `ledger` and `problem` for any.
    """

    def __init__(self, options: CaptureOptions, info: CaptureInfo, clock: Clock) -> None:
        """Raises ConfigError for an invalid place. Does not touch the disk."""
        assert options.to is not None
        self.problem: str | None = None
        """Reason why rows cannot be written now: `disk_full`, `folder` or `total_bytes`; None: they can."""
        self.info = info
        """Metadata of files that begin from now on. Any thread may set it."""
        self._options = options
        self._clock = clock
        self._place = parquet.place_of(options.to)
        self._folder = spool_folder(options)
        self._capture = info.capture
        self._files = LocalFiles(self._place.folder, parquet.capture_tag(info.capture))
        self._finisher = Finisher(self._place, self._folder, self._files.add)
        self._lock: int | None = None
        self._writer: SpoolWriter | None = None
        self._began_ns = 0
        self._measured_ns = 0
        self._written_ledger: CaptureLedger | None = None
        self._spool_number = 0
        self._rows = self._bytes = 0
        self._packing_ratio = 0.5

    def open(self) -> None:
        """Create the folders, take the lock, recover spools of an earlier process. Raises ConfigError."""
        for key, folder in _folders(self._options, self._place, self._folder):
            _probe_folder(key, folder)
        self._lock = _lock_folder(self._options, self._folder)
        with suppress(OSError):  # The spools then wait for the next start.
            take_back(self._folder)
        self._measure_folders(self._clock.mono_ns())
        for path in sorted(self._folder.glob("llmtap-*.spool")):
            self._finisher.add(ClosedSpool(path, path.stat().st_size))
        self._finisher.start()
        options = self._options
        log.info(
            "event=capture_started to=%s spool=%s level=%s when_full=%s total_bytes=%d",
            self._place.name,
            self._folder,
            options.level,
            options.when_full,
            options.total_bytes,
        )
        if options.level == "full" and not options.redact:
            log.warning(
                "event=capture_unredacted tenants=%r reason='capture.redact is empty: nothing is redacted'",
                ",".join(options.full_tenants),
            )

    def append(self, batch: pa.RecordBatch, ledger: CaptureLedger) -> bool:
        """Write the rows, and the ledger if it is new; return False if that is not possible now."""
        assert self._lock is not None, "not open"
        deleted = self._files.deleted_rows
        if batch.num_rows and not self._has_room(batch):
            self._pause(
                "total_bytes",
                f"spools and files have reached capture.total_bytes ({self._options.total_bytes} bytes)",
            )
            is_stored = False
        else:
            is_stored = self._keep_batch(batch, ledger)
        if not is_stored and self._files.deleted_rows > deleted:
            # Files were deleted to make room, although the batch was not stored: record their loss.
            self._keep_batch(batch.slice(0, 0), ledger)
        return is_stored

    def tick(self) -> None:
        """Rotate an old spool, and look for files that other programs have moved away."""
        now_ns = self._clock.mono_ns()
        writer = self._writer
        # Without room for rows, do not rotate a spool that has only ledgers: it would become one more file.
        due = writer is not None and (writer.rows > 0 or self.problem is None)
        if due and now_ns - self._began_ns >= self._options.rotate_every:
            self.rotate()
        if now_ns - self._measured_ns >= FOLDER_CHECK_NS:
            self._measure_folders(now_ns)

    def rotate(self) -> None:
        """Hand the current spool to the finisher; the next batch begins another."""
        writer, self._writer = self._writer, None
        if writer is None:
            return
        if self._options.fsync != "never":
            try:
                writer.sync()
            except OSError as exc:
                log.warning("event=capture_not_synced spool=%s error=%r", writer.path.name, exc.strerror)
        writer.close()
        if writer.rows or writer.notes:
            self._finisher.add(ClosedSpool(writer.path, writer.bytes, writer.rows))
        else:
            _discard_spool(writer)

    def ledger(self) -> CaptureLedger:
        """Return the ledger of the newest file made here. Any thread may call this method."""
        return self._finisher.ledger

    def close(self, timeout_s: float) -> None:
        """Make files of all spools if the time allows; the next start recovers the others."""
        self.rotate()
        ended = self._finisher.close(timeout_s)
        if unfinished := self._finisher.waiting[0]:
            log.warning(
                "event=capture_files_left spools=%d spool=%s reason=%r hint='the next start tries again'",
                unfinished,
                self._folder,
                self._finisher.problem or "no time",
            )
        # If the thread hangs in an upload, it still reads its spool. Keep the lock until the process ends.
        if ended and self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def state(self) -> StoreState:
        """Return current counts and sizes, without disk access."""
        counts = self._finisher.counts
        waiting, waiting_bytes = self._finisher.waiting
        spool_bytes = waiting_bytes + self._open_bytes
        return StoreState(
            rows_written=self._rows,
            bytes_written=self._bytes,
            files=counts.files,
            files_waiting=waiting,
            files_deleted=self._files.deleted,
            rows_deleted=self._files.deleted_rows,
            spool_bytes=spool_bytes,
            local_bytes=spool_bytes + self._files.bytes,
            failures=counts.failures,
            recovered=counts.recovered_rows,
            damaged=counts.damaged_batches,
            lost_rows=counts.lost_rows,
            problem=self.problem,
            files_problem=self._finisher.problem,
        )

    # ---------------------------------------------------------------- writing

    def _keep_batch(self, batch: pa.RecordBatch, ledger: CaptureLedger) -> bool:
        """Write the batch to the spool. Return False if that is not possible now."""
        if self._files.deleted_rows:
            dropped = {**ledger.dropped, "deleted": self._files.deleted_rows}
            ledger = msgspec.structs.replace(ledger, dropped=dropped)
        if batch.num_rows == 0 and ledger == self._written_ledger:
            return True
        try:
            self._write(batch, ledger)
        except OSError as exc:
            full = exc.errno in FULL_DISK_ERRORS
            if batch.num_rows or not full:
                self._pause("disk_full" if full else "folder", exc.strerror or str(exc))
            return False
        self._rows += batch.num_rows
        # A ledger that fits does not show that rows fit, so only a batch with rows ends a pause for lack of
        # room.
        if self.problem is not None and (batch.num_rows or self.problem == "folder"):
            log.info("event=capture_resumed after=%s", self.problem)
            self.problem = None
            self._finisher.retry_soon()
        if self._writer is not None and self._writer.bytes >= self._options.rotate_bytes:
            self.rotate()
        return True

    def _write(self, batch: pa.RecordBatch, ledger: CaptureLedger) -> None:
        if self._writer is not None and not self._writer.present:
            self._restore_folder()
            self._writer.restore()
            log.warning("event=capture_spool_restored spool=%s rows=%d", self._writer.path, self._writer.rows)
        elif not (self._folder / LOCK).exists():
            self._restore_folder()
        if batch.num_rows:
            self._check_disk_space(batch)
        old = self._writer
        grown = old is not None and not (old.rows or batch.num_rows) and old.bytes >= NOTES_SPOOL_BYTES
        writer = self._begin_spool() if old is None or grown else old
        before = writer.bytes
        # Write the ledger to each spool, so that each file shows which exchanges are missing.
        new_ledger = ledger if ledger != self._written_ledger or not writer.notes else None
        sync = self._options.fsync == "batch"
        try:
            if batch.num_rows:
                writer.append(batch, new_ledger, sync=sync)
            elif new_ledger is not None:
                writer.note(new_ledger, sync=sync)
        except OSError:
            if writer is not old:
                _discard_spool(writer)
            raise
        self._writer, self._written_ledger = writer, ledger
        self._bytes += writer.bytes - before
        if batch.num_rows:
            # Use the worst ratio of the latest batches; the ratios of older batches lose weight.
            self._packing_ratio = min(
                1.0, max((writer.bytes - before) / batch.nbytes, 0.9 * self._packing_ratio)
            )
        if old is not None and old is not writer:
            _discard_spool(old)  # Only the last ledger counts, and the new spool has it.

    def _spool_bytes(self, batch: pa.RecordBatch) -> int:
        return _FRAME_BYTES + int(self._packing_ratio * batch.nbytes)

    def _begin_spool(self) -> SpoolWriter:
        """Begin a spool. Raises OSError."""
        self._spool_number += 1
        now_ns = self._clock.wall_ns()
        name = parquet.file_stem(self._capture, now_ns, self._spool_number) + ".spool"
        writer = SpoolWriter(self._folder / name, msgspec.structs.replace(self.info, began_ns=now_ns))
        if self._options.fsync == "batch":
            try:
                parquet.sync_folder(self._folder)
            except OSError:
                _discard_spool(writer)
                raise
        self._began_ns = self._clock.mono_ns()
        self._bytes += writer.bytes
        return writer

    def _restore_folder(self) -> None:
        """Create the removed folder and its lock again. Raises OSError."""
        parquet.make_folder(self._folder)
        old, self._lock = self._lock, None
        try:
            self._lock = _lock_folder(self._options, self._folder)
        except ConfigError as exc:
            self._lock = old
            raise OSError(errno.EBUSY, exc.problem) from None
        if old is not None:
            os.close(old)

    def _check_disk_space(self, batch: pa.RecordBatch) -> None:
        """Raise OSError if the batch would take the disk that spools need to become files."""
        disk = os.statvfs(self._folder)
        if not disk.f_blocks:
            return  # The file system does not report its size.
        largest = max(self._finisher.largest, 0 if self._writer is None else self._writer.bytes)
        # Count the batch twice: once for the spool, and at most as much again for the Parquet file.
        needed = MARGIN_BYTES + largest + 2 * self._spool_bytes(batch)
        if disk.f_bavail * disk.f_frsize < needed:
            self._rotate_rows()
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def _has_room(self, batch: pa.RecordBatch) -> bool:
        """Return whether the batch fits below `total_bytes`, if necessary after deletions that are
        allowed."""
        bound = self._options.total_bytes - NOTES_BYTES
        if self._writer is None:
            bound -= _HEAD_BYTES
        # Reserve at most half of total_bytes for a batch. A very large one would otherwise never fit, and all
        # later batches would wait behind it.
        bound -= min(self._spool_bytes(batch), self._options.total_bytes // 2 - NOTES_BYTES)
        if self._bytes_on_disk() <= bound:
            return True
        now_ns = self._clock.mono_ns()
        if self.problem != "total_bytes" or now_ns - self._measured_ns >= FULL_CHECK_NS:
            self._measure_folders(now_ns)
        if self._options.when_full == "oldest":
            while self._bytes_on_disk() > bound and self._files.delete_oldest():
                pass
        if self._bytes_on_disk() <= bound:
            return True
        # As a Parquet file, the spool is smaller and may be deleted at the limit.
        self._rotate_rows()
        return False

    def _bytes_on_disk(self) -> int:
        """Return the bytes of spools and of our local files."""
        return self._finisher.waiting[1] + self._files.bytes + self._open_bytes

    @property
    def _open_bytes(self) -> int:
        writer = self._writer
        return 0 if writer is None else writer.bytes

    def _rotate_rows(self) -> None:
        """Rotate, unless the spool has ledgers alone."""
        if self._writer is not None and self._writer.rows:
            self.rotate()

    def _measure_folders(self, now_ns: int) -> None:
        self._measured_ns = now_ns
        self._files.list_folder()
        self._finisher.forget_removed()

    def _pause(self, problem: str, reason: str) -> None:
        if problem != self.problem:
            log.warning("event=capture_paused problem=%s spool=%s reason=%r", problem, self._folder, reason)
        self.problem = problem


def _discard_spool(writer: SpoolWriter) -> None:
    writer.close()
    with suppress(OSError):
        writer.path.unlink(missing_ok=True)


def _folders(options: CaptureOptions, place: parquet.CapturePlace, spool: Path) -> list[tuple[str, Path]]:
    """Return the folders, with the config keys that name them."""
    spool_key = "capture.spool" if options.spool is not None or place.folder is None else "capture.to"
    folders = [(spool_key, spool)]
    return folders if place.folder is None else [("capture.to", place.folder), *folders]


def _probe_folder(key: str, folder: Path) -> list[Path]:
    """Create the folder, write to it, return the new folders. A full disk is not an error. Raises
    ConfigError."""
    made: list[Path] = []
    try:
        made = parquet.make_folder(folder)
        probe = folder / f".llmtap-probe-{secrets.token_hex(4)}"
        try:
            os.close(os.open(probe, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
        finally:
            probe.unlink(missing_ok=True)
    except OSError as exc:
        if exc.errno not in FULL_DISK_ERRORS:
            raise ConfigError(
                key,
                f"{folder} cannot be written: {exc.strerror}",
                "choose a folder that this user may write to",
            ) from None
    return made


def _lock_folder(options: CaptureOptions, folder: Path, supervisor: int | None = None) -> int | None:
    """Lock the folder until the descriptor is closed; None if a child of process `supervisor` holds the lock.

    Raises ConfigError if another llmtap holds it.
    """
    key = "capture.to" if options.spool is None else "capture.spool"
    path = folder / LOCK
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as exc:
        raise ConfigError(key, f"{path} cannot be opened: {exc.strerror}") from None
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        holder = os.read(fd, 64).split()
        os.close(fd)
        if supervisor is not None and holder[1:] == [b"%d" % supervisor]:
            return None
        raise ConfigError(
            key,
            f"another llmtap process writes its capture into {folder}",
            "give each process its own capture.to, or capture.spool",
        ) from None
    with suppress(OSError):  # On a full disk, only the pid of the holder is missing.
        path.write_bytes(b"%d %d\n" % (os.getpid(), os.getppid()))
    return fd

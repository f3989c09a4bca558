"""Store of a capture: writes rows to the open spool, and passes closed spools to the finisher.

The meter's recorder has one `Store`; `check_folders` tests the folders before the start. After `append` has
returned True, its rows survive a kill of the process (with `fsync = "batch"` also a power failure). If rows
cannot be written (the disk is full, the folder is gone or read-only, or the total size has reached its
limit), `problem` names the reason: the caller keeps the batch and tries again.

A lock file in the spool's folder prevents that two processes recover each other's live spools. A file has the
name of its spool, `llmtap-<UTC time>-<capture>-<n>-<random>.parquet`. Names sort by time, and no name is used
twice.

As much disk space as the largest spool needs stays free, so that spools can become files. The total size of
spools and local files is bounded; the size of a batch is estimated from the compression of earlier batches. A
ledger without rows is written even without this free space and above the bound, so that a paused capture can
report its losses. A spool that has only ledgers is replaced by a new one when it has grown.
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
from llmtap.capture.store.spool import LOCK_FILE, SpoolWriter, recover_aside_spools
from llmtap.clock import Clock
from llmtap.errors import ConfigError
from llmtap.units import format_bytes

log = logging.getLogger(__name__)

FULL_DISK_ERRORS: Final = frozenset((errno.ENOSPC, errno.EDQUOT, errno.EFBIG))
FULL_CHECK_NS: Final = 1_000_000_000
"""Interval at which file sizes are read again while `total_bytes` is reached, in case files were deleted."""
MARGIN_BYTES: Final = 128 << 10
"""Free disk space required beyond the size of a spool: for ledgers, and for the Parquet file's own 15 KB."""
NOTES_BYTES: Final = 32 << 10
"""Part of `total_bytes` reserved for spools with ledgers only: a head has 6 KB, and the Parquet file 3 KB."""
NOTES_SPOOL_BYTES: Final = 16 << 10
"""Size at which a spool with ledgers only is replaced by a new one, so that it cannot grow without limit."""
FOLDER_CHECK_NS: Final = 10_000_000_000
"""Interval at which file sizes are read again while `total_bytes` is not reached."""
_HEAD_BYTES: Final = 6 << 10
"""Approximate size of the first frame (head) of a spool, which counts for `total_bytes`."""
_FRAME_BYTES: Final = 1 << 10
"""Bytes of a batch in addition to its rows: Arrow's description of 100 columns, and a ledger."""


@dataclass(frozen=True, slots=True)
class StoreState:
    """Counts of a store since its start, and sizes of its files."""

    rows_written: int
    bytes_written: int
    files: int
    """Parquet files delivered to the place of the capture."""
    files_waiting: int
    """Closed spools that are not files yet."""
    files_deleted: int
    """Files deleted at the limit of the total size, oldest first."""
    rows_deleted: int
    """Rows in deleted files of this capture."""
    spool_bytes: int
    """Size of all spools."""
    local_bytes: int
    """Total size of spools and local files, which `total_bytes` limits."""
    failures: int
    """Failed attempts to make or deliver a file."""
    recovered: int
    """Rows of spools that an earlier process left."""
    damaged: int
    """Lost batches of damaged spools."""
    lost_rows: int
    """Rows of spools that another program removed before they became files."""
    problem: str | None
    """Reason why rows cannot be written now (`Store.problem`)."""
    files_problem: str | None
    """Reason why files cannot be delivered now (`Finisher.problem`)."""


def spool_folder(options: CaptureOptions) -> Path:
    """Return the folder of the spools: the configured one, or else a subfolder of the capture's folder; for a
    remote capture, a folder in the user's state folder."""
    assert options.to is not None
    if options.spool is not None:
        return Path(options.spool)
    place = parquet.place_of(options.to)
    if place.folder is not None:
        return place.folder / ".spool"
    state = os.environ.get("XDG_STATE_HOME") or os.path.join(os.path.expanduser("~"), ".local", "state")
    name = hashlib.sha256(redact_url(options.to).encode()).hexdigest()[:12]
    return Path(state) / "llmtap" / f"spool-{name}"


def check_folders(options: CaptureOptions, supervisor: int | None = None, in_use: bool = False) -> None:
    """Raise ConfigError if `Store.open` would raise it, and leave no new folders or files.

    A child of the process `supervisor` (default: this process) can hold the lock, because the settings are
    then for a running proxy. With `in_use`, any process can hold it.
    """
    assert options.to is not None
    place, spool = parquet.place_of(options.to), spool_folder(options)
    made = []
    try:
        for key, folder in _folders(options, place, spool):
            made += _probe_folder(key, folder)
        if not in_use and (spool / LOCK_FILE).exists():
            holder = _lock_folder(options, spool, os.getpid() if supervisor is None else supervisor)
            if holder is not None:
                os.close(holder)
    finally:
        for folder in reversed(made):
            with suppress(OSError):
                folder.rmdir()


class Store:
    """Spools and files of one capture.

    One thread calls `append`, `tick` and `rotate`. Any thread can use `state`, `ledger` and `problem`.
    """

    def __init__(
        self, options: CaptureOptions, info: CaptureInfo, clock: Clock, *, continues: bool = False
    ) -> None:
        """Raises ConfigError for an invalid place. Does not touch the disk. `continues`: whether another
        store has made files of this capture, so that its end must be stored even if no rows follow."""
        assert options.to is not None
        self.problem: str | None = None
        """Reason why rows cannot be written now: `disk_full`, `folder` or `total_bytes`; None if they can."""
        self.info = info
        """Metadata of the next files. Any thread can set it."""
        self._options = options
        self._clock = clock
        self._place = parquet.place_of(options.to)
        """Where finished files are delivered."""
        self._folder = spool_folder(options)
        self._capture = info.capture
        self._files = LocalFiles(self._place.folder, parquet.capture_tag(info.capture))
        """Files in the local folder, to delete the oldest at the limit."""
        self._finisher = Finisher(self._place, self._folder, self._files.add, stores_end=continues)
        """Thread that makes files of closed spools."""
        self._lock_fd: int | None = None
        """Descriptor of the lock file of the folder; None: the store is not open."""
        self._writer: SpoolWriter | None = None
        """Open spool; None before the first row."""
        self._spool_began_ns = 0
        """Time at which the open spool was created."""
        self._folders_measured_ns = 0
        """Time of the latest listing of the folders."""
        self._written_ledger: CaptureLedger | None = None
        """Latest counts in the open spool, to write only changes."""
        self._spool_number = 0
        """Number of spools so far, a part of the next one's name."""
        self._rows_written = self._bytes_written = 0
        self._packing_ratio = 0.5
        """Estimated size of a batch in the spool, divided by its size in memory."""

    def open(self) -> None:
        """Create the folders, take the lock, recover spools of an earlier process. Raises ConfigError."""
        for key, folder in _folders(self._options, self._place, self._folder):
            _probe_folder(key, folder)
        self._lock_fd = _lock_folder(self._options, self._folder)
        with suppress(OSError):  # Ignore the error: the next start tries it again.
            recover_aside_spools(self._folder)
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
        """Write the rows, and the ledger if it has changed; return False if this is not possible now."""
        assert self._lock_fd is not None, "the store is not open"
        deleted = self._files.deleted_rows
        if batch.num_rows and not self._has_room(batch):
            self._pause(
                "total_bytes",
                f"spools and files have reached capture.total_bytes ({self._options.total_bytes} bytes)",
            )
            is_stored = False
        else:
            is_stored = self._store_batch(batch, ledger)
        if not is_stored and self._files.deleted_rows > deleted:
            # Files were deleted for the batch, but it was not stored: write a ledger that counts their rows.
            self._store_batch(batch.slice(0, 0), ledger)
        return is_stored

    def tick(self) -> None:
        """Close a spool that is old enough, and look for files that other programs have moved away."""
        now_ns = self._clock.mono_ns()
        writer = self._writer
        # While rows cannot be written, do not rotate a spool with ledgers only: its file would have no rows.
        due = writer is not None and (writer.rows > 0 or self.problem is None)
        if due and now_ns - self._spool_began_ns >= self._options.rotate_every:
            self.rotate()
        if now_ns - self._folders_measured_ns >= FOLDER_CHECK_NS:
            self._measure_folders(now_ns)

    def rotate(self) -> None:
        """Pass the current spool to the finisher. The next batch begins a new spool."""
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
            self._finisher.add(ClosedSpool(writer.path, writer.size_bytes, writer.rows))
        else:
            _discard_spool(writer)

    def ledger(self) -> CaptureLedger:
        """Return the ledger of the newest file that this store made. Any thread can call this method."""
        return self._finisher.ledger

    def close(self, timeout_s: float) -> None:
        """Convert all spools to files. Spools left after `timeout_s` are recovered at the next start."""
        self.rotate()
        ended = self._finisher.close(timeout_s)
        if unfinished := self._finisher.backlog[0]:
            log.warning(
                "event=capture_files_left spools=%d spool=%s reason=%r hint='the next start tries again'",
                unfinished,
                self._folder,
                self._finisher.problem or "the time limit was reached",
            )
        # If the thread hangs in an upload, it still reads its spool, so keep the lock until the process ends.
        if ended and self._lock_fd is not None:
            os.close(self._lock_fd)
            self._lock_fd = None

    def state(self) -> StoreState:
        """Return current counts and sizes, without disk access."""
        counts = self._finisher.counts
        waiting, waiting_bytes = self._finisher.backlog
        spool_bytes = waiting_bytes + self._open_bytes
        return StoreState(
            rows_written=self._rows_written,
            bytes_written=self._bytes_written,
            files=counts.files,
            files_waiting=waiting,
            files_deleted=self._files.deleted_files,
            rows_deleted=self._files.deleted_rows,
            spool_bytes=spool_bytes,
            local_bytes=spool_bytes + self._files.total_bytes,
            failures=counts.failures,
            recovered=counts.recovered_rows,
            damaged=counts.damaged_batches,
            lost_rows=counts.lost_rows,
            problem=self.problem,
            files_problem=self._finisher.problem,
        )

    # ---------------------------------------------------------------- write batches and ledgers

    def _store_batch(self, batch: pa.RecordBatch, ledger: CaptureLedger) -> bool:
        """Write the batch and a new ledger to the spool. Return False if that is not possible now."""
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
        self._rows_written += batch.num_rows
        # A ledger is written even if there is no space for rows. So a written ledger ends only the problem
        # `folder`; a lack of space ends when rows are written.
        if self.problem is not None and (batch.num_rows or self.problem == "folder"):
            log.info("event=capture_resumed after=%s", self.problem)
            self.problem = None
            self._finisher.retry_soon()
        if self._writer is not None and self._writer.size_bytes >= self._options.rotate_bytes:
            self.rotate()
        return True

    def _write(self, batch: pa.RecordBatch, ledger: CaptureLedger) -> None:
        if self._writer is not None and not self._writer.is_at_path:
            self._restore_folder()
            self._writer.restore()
            log.warning("event=capture_spool_restored spool=%s rows=%d", self._writer.path, self._writer.rows)
        elif not (self._folder / LOCK_FILE).exists():
            self._restore_folder()
        if batch.num_rows:
            self._check_disk_space(batch)
        old = self._writer
        grown = old is not None and not (old.rows or batch.num_rows) and old.size_bytes >= NOTES_SPOOL_BYTES
        writer = self._begin_spool() if old is None or grown else old
        before = writer.size_bytes
        # Write a ledger to each new spool, even an unchanged ledger: each file must show missing exchanges.
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
        self._bytes_written += writer.size_bytes - before
        if batch.num_rows:
            # Estimate with caution: use the largest ratio of the latest batches; older ratios lose weight.
            self._packing_ratio = min(
                1.0, max((writer.size_bytes - before) / batch.nbytes, 0.9 * self._packing_ratio)
            )
        if old is not None and old is not writer:
            _discard_spool(old)  # It has only an older ledger, which the ledger in the new spool replaces.

    def _estimated_bytes(self, batch: pa.RecordBatch) -> int:
        """Return the estimated size of a batch in the spool."""
        return _FRAME_BYTES + int(self._packing_ratio * batch.nbytes)

    def _begin_spool(self) -> SpoolWriter:
        """Create a new spool and return its writer. Raises OSError."""
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
        self._spool_began_ns = self._clock.mono_ns()
        self._bytes_written += writer.size_bytes
        return writer

    def _restore_folder(self) -> None:
        """Create the removed folder and its lock file again. Raises OSError."""
        parquet.make_folder(self._folder)
        old_fd, self._lock_fd = self._lock_fd, None
        try:
            self._lock_fd = _lock_folder(self._options, self._folder)
        except ConfigError as exc:
            self._lock_fd = old_fd
            raise OSError(errno.EBUSY, exc.problem) from None
        if old_fd is not None:
            os.close(old_fd)

    def _check_disk_space(self, batch: pa.RecordBatch) -> None:
        """Raise OSError if the batch would use the free disk space that spools need to become files."""
        disk = os.statvfs(self._folder)
        if not disk.f_blocks:
            return  # The file system does not report its size, so the free space is unknown.
        largest = max(self._finisher.largest_bytes, 0 if self._writer is None else self._writer.size_bytes)
        # Count the batch twice: once for the spool, and once for the Parquet file, which is not larger.
        needed = MARGIN_BYTES + largest + 2 * self._estimated_bytes(batch)
        free = disk.f_bavail * disk.f_frsize
        if free < needed:
            self._rotate_rows()
            problem = f"{format_bytes(needed)} of disk space are needed, {format_bytes(free)} are free"
            raise OSError(errno.ENOSPC, problem)

    def _has_room(self, batch: pa.RecordBatch) -> bool:
        """Return whether the batch fits below `total_bytes`; delete files for it if `when_full` allows it."""
        bound = self._options.total_bytes - NOTES_BYTES
        if self._writer is None:
            bound -= _HEAD_BYTES
        # Reserve at most half of total_bytes for a batch. Otherwise, a very large batch would never fit, and
        # all later batches would wait behind it.
        bound -= min(self._estimated_bytes(batch), self._options.total_bytes // 2 - NOTES_BYTES)
        if self._bytes_on_disk() <= bound:
            return True
        now_ns = self._clock.mono_ns()
        if self.problem != "total_bytes" or now_ns - self._folders_measured_ns >= FULL_CHECK_NS:
            self._measure_folders(now_ns)
        if self._options.when_full == "oldest":
            while self._bytes_on_disk() > bound and self._files.delete_oldest():
                pass
        if self._bytes_on_disk() <= bound:
            return True
        # Convert the spool: as a Parquet file it is smaller, and it can be deleted at the limit.
        self._rotate_rows()
        return False

    def _bytes_on_disk(self) -> int:
        """Return the total size of spools and local files."""
        return self._finisher.backlog[1] + self._files.total_bytes + self._open_bytes

    @property
    def _open_bytes(self) -> int:
        """Return the size of the spool that is being written."""
        writer = self._writer
        return 0 if writer is None else writer.size_bytes

    def _rotate_rows(self) -> None:
        """Rotate the spool if it has rows. A spool with ledgers only would become a file without rows."""
        if self._writer is not None and self._writer.rows:
            self.rotate()

    def _measure_folders(self, now_ns: int) -> None:
        """Read the sizes of the files again, because others can remove them."""
        self._folders_measured_ns = now_ns
        self._files.list_folder()
        self._finisher.forget_removed()

    def _pause(self, problem: str, reason: str) -> None:
        """Log that the capture cannot write now, once per problem."""
        if problem != self.problem:
            log.warning("event=capture_paused problem=%s spool=%s reason=%r", problem, self._folder, reason)
        self.problem = problem


def _discard_spool(writer: SpoolWriter) -> None:
    writer.close()
    with suppress(OSError):
        writer.path.unlink(missing_ok=True)


def _folders(options: CaptureOptions, place: parquet.CapturePlace, spool: Path) -> list[tuple[str, Path]]:
    """Return the folders of a capture, each with the option that an error names."""
    spool_key = "capture.spool" if options.spool is not None or place.folder is None else "capture.to"
    folders = [(spool_key, spool)]
    return folders if place.folder is None else [("capture.to", place.folder), *folders]


def _probe_folder(key: str, folder: Path) -> list[Path]:
    """Create the folder and try to write to it. Return the created folders. Raises ConfigError, except if the
    disk is full."""
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
    """Lock the folder. Return the file descriptor that holds the lock until the caller closes it.

    Return None if a child of the process `supervisor` holds the lock. Raises ConfigError if another llmtap
    holds it.
    """
    key = "capture.to" if options.spool is None else "capture.spool"
    path = folder / LOCK_FILE
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as exc:
        hint = "choose a folder that this user may write to"
        raise ConfigError(key, f"{path} cannot be opened: {exc.strerror}", hint) from None
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
    with suppress(OSError):  # The lock works without the process ids, which cannot be written to a full disk.
        path.write_bytes(b"%d %d\n" % (os.getpid(), os.getppid()))
    return fd

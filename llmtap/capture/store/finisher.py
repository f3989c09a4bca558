"""Thread that converts closed spools (crash-safe row files) to Parquet and delivers the files.

`store.py` adds each closed spool to a `Finisher`. A spool is removed only after its file is durable. Until
then, the work can be repeated under the same file name, so a kill at any point stores no row twice. If the
disk or the object store does not accept files, spools wait, and the first spool is tried again with growing
pauses. A faulty spool (unreadable, or of a newer llmtap) is reported once and stays where it is. A spool
without rows becomes a file only if its ledger or its damage shows missing exchanges, or if it closes a
capture that has earlier files.

`LocalFiles` deletes the oldest files of a local folder when the store reaches the limit of the total size.
"""

import logging
import os
import re
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq

from llmtap.capture.schema import VERSION, CaptureLedger, CaptureVersionError
from llmtap.capture.store.parquet import CapturePlace, PlaceError, make_folder, sync_folder, write_parquet
from llmtap.capture.store.spool import SpoolContents, SpoolError, read_spool

log = logging.getLogger(__name__)

BACK_OFF_S: Final = 0.5
"""First pause before a failed spool is tried again; it doubles up to BACK_OFF_S_MAX."""
BACK_OFF_S_MAX: Final = 30.0


@dataclass(slots=True)
class ClosedSpool:
    """A spool that is complete: it gets no more rows, and waits to become a Parquet file."""

    path: Path
    size_bytes: int
    rows: int | None = None
    """Number of rows; None if an earlier process left the spool and the spool has not been read yet."""
    parquet_path: Path | None = None
    """Path of its Parquet file, if the file has been made but not delivered yet."""


@dataclass(slots=True)
class FinisherCounts:
    """Counts of a finisher since its start."""

    files: int = 0
    """Files that were delivered."""
    failures: int = 0
    """Failed attempts to make or deliver a file."""
    recovered_rows: int = 0
    """Rows of spools that an earlier process left."""
    damaged_batches: int = 0
    """Number of batches that could not be read from spools."""
    lost_rows: int = 0
    """Rows of spools that another program removed before they became files."""


class Finisher:
    """The thread that converts closed spools to Parquet files, with its queue and its counts."""

    def __init__(
        self,
        place: CapturePlace,
        spool_folder: Path,
        on_delivered: Callable[[str, int], None],
        *,
        stores_end: bool = False,
    ) -> None:
        """`on_delivered(name, bytes)` is called for each delivered file. `stores_end`: make a file of a spool
        without rows, too, if its ledger closes the capture."""
        self.counts = FinisherCounts()
        self.ledger = CaptureLedger()
        """Ledger of the newest file of this capture; files of recovered spools can be of another capture."""
        self.problem: str | None = None
        """Reason why files cannot be delivered now: one sentence, without secrets. None if they can."""
        self._place = place
        self._folder = place.folder or spool_folder
        self._on_delivered = on_delivered
        """Function that is called with the name and size of each delivered file."""
        self._stores_end = stores_end
        """Whether a spool without rows becomes a file, too, if its ledger closes the capture."""
        self._queue: deque[ClosedSpool] = deque()
        """Closed spools, the oldest first."""
        self._faulty_spools: list[ClosedSpool] = []
        """Faulty spools, which stay in their folder."""
        self._wake = threading.Condition()
        """Notified when there is a spool, a reason to retry, or the end."""
        self._is_stopping = self._is_abandoned = self._must_retry = False
        """`_is_stopping`: no spool will be added. `_is_abandoned`: end without converting the rest.
        `_must_retry`: try again now, without waiting after a failure."""
        self._thread = threading.Thread(target=self._run, name="llmtap-capture", daemon=True)

    @property
    def backlog(self) -> tuple[int, int]:
        """Number and total bytes of closed spools that are not files yet, including faulty spools."""
        with self._wake:
            spools = (*self._queue, *self._faulty_spools)
            return len(spools), sum(spool.size_bytes for spool in spools)

    @property
    def largest_bytes(self) -> int:
        """Size of the largest spool in the queue."""
        with self._wake:
            return max((spool.size_bytes for spool in self._queue), default=0)

    def start(self) -> None:
        self._thread.start()

    def add(self, spool: ClosedSpool) -> None:
        """Queue a closed spool."""
        with self._wake:
            self._queue.append(spool)
            self._wake.notify()

    def retry_soon(self) -> None:
        """End the pause before the next attempt, because the reason of the failure is possibly gone."""
        with self._wake:
            self._must_retry = True
            self._wake.notify()

    def forget_removed(self) -> None:
        """Forget faulty spools that another program removed."""
        with self._wake:
            self._faulty_spools = [spool for spool in self._faulty_spools if spool.path.exists()]

    def close(self, timeout_s: float) -> bool:
        """Convert spools until the time-out or the first failure, and return whether the thread has ended."""
        with self._wake:
            self._is_stopping = True
            self._wake.notify()
        if self._thread.is_alive():
            self._thread.join(timeout_s)
        with self._wake:
            self._is_abandoned = True
        return not self._thread.is_alive()

    def _run(self) -> None:
        """Turn spools into Parquet files. After an error, try again later."""
        pause_s = BACK_OFF_S
        while (spool := self._next_spool()) is not None:
            delivered = None
            try:
                delivered = self._finish_spool(spool)
            except (PlaceError, OSError) as exc:
                self._note_failure(spool, exc)
                if self._pause(pause_s):
                    return
                pause_s = min(2 * pause_s, BACK_OFF_S_MAX)
                continue
            except (SpoolError, CaptureVersionError, pa.ArrowException, msgspec.MsgspecError) as exc:
                self._leave_spool(spool, exc)
            if self.problem is not None:
                log.info("event=capture_files_resumed place=%s", self._place.name)
                self.problem = None
            pause_s = BACK_OFF_S
            # Remove the spool and count its file under one lock. Otherwise, the total size could contain both
            # or neither of them for a moment.
            with self._wake:
                self._queue.popleft()
                if delivered is not None:
                    self.counts.files += 1
                    self._on_delivered(*delivered)

    def _next_spool(self) -> ClosedSpool | None:
        """Wait for a spool, and return the oldest one. Return None if the thread must stop."""
        with self._wake:
            self._wake.wait_for(lambda: self._queue or self._is_stopping)
            return self._queue[0] if self._queue and not self._is_abandoned else None

    def _pause(self, pause_s: float) -> bool:
        """Wait before the next attempt. If the thread must stop, return True without a pause."""
        with self._wake:
            if not self._is_stopping:
                self._wake.wait_for(lambda: self._is_stopping or self._must_retry, pause_s)
                self._must_retry = False
                return False
            parquet_path = self._queue[0].parquet_path
        if parquet_path is not None:
            parquet_path.unlink(missing_ok=True)
        return True

    def _note_failure(self, spool: ClosedSpool, exc: PlaceError | OSError) -> None:
        reason = str(exc) if isinstance(exc, PlaceError) else f"{self._folder}: {exc.strerror or exc}"
        self.counts.failures += 1
        if self.problem is None:
            log.warning(
                "event=capture_files_wait place=%s spool=%s reason=%r",
                self._place.name,
                spool.path.name,
                reason,
            )
        self.problem = reason

    def _leave_spool(self, spool: ClosedSpool, exc: Exception) -> None:
        """Report a faulty spool, which stays in its folder."""
        hint = "llmtap cannot make a capture file of this spool: keep it for an analysis, or delete it"
        log.error("event=capture_spool_left spool=%s reason=%r hint=%r", spool.path, str(exc), hint)
        with self._wake:
            self.counts.failures += 1
            self._faulty_spools.append(spool)

    def _finish_spool(self, spool: ClosedSpool) -> tuple[str, int] | None:
        """Convert and deliver a spool, then remove it. Return name and size of the file, if there is one."""
        if not spool.path.exists():
            self.counts.lost_rows += spool.rows or 0
            hint = "these exchanges are lost: check which program removes files from the folder"
            text = "event=capture_spool_removed spool=%s exchanges_lost=%s hint=%r"
            log.error(text, spool.path, spool.rows, hint)
            return None
        file = None
        contents = read_spool(spool.path)
        name = f"{spool.path.stem}.parquet"
        if contents.rows or _shows_losses(contents) or (self._stores_end and contents.ledger.closed):
            if spool.parquet_path is None or not spool.parquet_path.exists():
                spool.parquet_path = self._make_file(contents, name)
            size = spool.parquet_path.stat().st_size
            self._place.put(spool.parquet_path, name)
            file = name, size
            log.info("event=capture_file file=%s rows=%d bytes=%d", name, contents.rows, size)
            if spool.rows is not None:
                self.ledger = contents.ledger
            if self._place.folder is None:
                spool.parquet_path.unlink(missing_ok=True)
        if contents.damaged:
            self.counts.damaged_batches += contents.damaged["batches"]
            log.warning(
                "event=capture_spool_damaged spool=%s rows=%d batches_lost=%d bytes_lost=%d",
                spool.path.name,
                contents.rows,
                contents.damaged["batches"],
                contents.damaged["bytes"],
            )
        if spool.rows is None:
            self.counts.recovered_rows += contents.rows
            log.info("event=capture_recovered spool=%s rows=%d", spool.path.name, contents.rows)
        spool.path.unlink(missing_ok=True)
        sync_folder(spool.path.parent)
        return file

    def _make_file(self, contents: SpoolContents, name: str) -> Path:
        """Write the Parquet file under a temporary name. If that fails, remove the incomplete file."""
        info = msgspec.structs.replace(
            contents.info, schema_version=VERSION, ledger=contents.ledger, damaged=contents.damaged
        )
        parquet_path = self._folder / f".{name}.tmp"
        make_folder(self._folder)
        try:
            write_parquet(parquet_path, info, contents.batches())
        except BaseException:
            parquet_path.unlink(missing_ok=True)
            raise
        return parquet_path


def _shows_losses(contents: SpoolContents) -> bool:
    """Return whether the ledger or damage of a spool without rows shows missing exchanges."""
    ledger = contents.ledger
    return bool(
        ledger.dropped
        or any(relay.opened for relay in ledger.relays.values())
        or contents.damaged.get("batches")
    )


_OWN_NAME: Final = re.compile(r"llmtap-\d{8}T\d{9}Z-[A-Za-z0-9_]+-\d{4,}-[0-9a-f]{4,8}\.parquet")
"""Matches the name of a capture file of llmtap. Only such files count for the limit and are deleted at it."""


class LocalFiles:
    """Capture files in a local folder, with their total size; deletes the oldest of them.

    The names of the files sort by age. The folder can also have files of other captures and programs. The
    store's thread calls `list_folder` and `delete_oldest`, the finisher's thread calls `add`.
    """

    def __init__(self, folder: Path | None, tag: str) -> None:
        """`folder`: None for a remote place. `tag`: part of the names of this capture's files."""
        self.total_bytes = 0
        self.deleted_files = 0
        """Number of deleted files of all captures in the folder."""
        self.deleted_rows = 0
        """Number of rows in deleted files of this capture."""
        self._folder = folder
        self._tag = f"-{tag}-"
        """Part of the names of this capture's files, by which its deleted rows are counted."""
        self._sizes: dict[str, int] = {}
        """By name: size of each file in bytes."""
        self._new_files: dict[str, int] = {}
        """By name: size of each file added while `list_folder` runs, because the listing can lack it."""
        self._lock = threading.Lock()

    def list_folder(self) -> None:
        """List the folder again, because other programs can have moved files away."""
        sizes = {}
        with self._lock:
            self._new_files = {}
        if self._folder is not None:
            with suppress(OSError), os.scandir(self._folder) as entries:
                for entry in entries:
                    if _OWN_NAME.fullmatch(entry.name):
                        with suppress(OSError):
                            sizes[entry.name] = entry.stat().st_size
        with self._lock:
            self._sizes = sizes | self._new_files
            self.total_bytes = sum(self._sizes.values())

    def add(self, name: str, size: int) -> None:
        if self._folder is not None:
            with self._lock:
                self._sizes[name] = self._new_files[name] = size
                self.total_bytes = sum(self._sizes.values())

    def delete_oldest(self) -> bool:
        """Delete the oldest file. Return whether a file was deleted. Never raises."""
        with self._lock:
            if not self._sizes or self._folder is None:
                return False
            name = min(self._sizes)
            rows = 0
            if self._tag in name:
                with suppress(OSError, pa.ArrowException):
                    rows = pq.read_metadata(self._folder / name).num_rows
            try:
                (self._folder / name).unlink(missing_ok=True)
            except OSError as exc:
                log.warning("event=capture_not_deleted file=%s error=%r", name, exc.strerror)
                return False
            size = self._sizes.pop(name)
            self.total_bytes -= size
            self.deleted_files += 1
            self.deleted_rows += rows
        log.warning("event=capture_deleted file=%s bytes=%d", name, size)
        return True

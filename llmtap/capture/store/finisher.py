"""From a closed spool to a Parquet file in its place, in a thread of its own.

One spool at a time, oldest first. A spool is removed only when its file lasts; until then everything may be
done again, and ends under the same name: a kill at any point leaves no row twice. While the disk or the store
does not take files, spools wait, and the first is tried again with growing pauses. A spool that is itself at
fault (a newer llmtap's, unreadable) is told of once and left where it is, and the next one has its turn.

A spool without rows becomes a file only if its last note, or what is damaged in it, tells of exchanges that
are nowhere: readers sum those up over all files. Otherwise it just goes.
"""

import errno
import logging
import os
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec
import pyarrow as pa

from llmtap.capture.schema import VERSION, CaptureLedger
from llmtap.capture.store.migrations import CaptureVersionError
from llmtap.capture.store.parquet import write_parquet
from llmtap.capture.store.places import Place, PlaceError, sync_folder
from llmtap.capture.store.spool import SpoolContents, SpoolError, read_spool

__all__ = ["ClosedSpool", "Finished", "Finisher", "make_folder"]

log = logging.getLogger(__name__)

BACK_OFF_S: Final = 0.5
BACK_OFF_S_MAX: Final = 30.0


@dataclass(slots=True)
class ClosedSpool:
    """A spool that nobody writes to any more."""

    path: Path
    bytes: int
    rows: int | None = None
    """None for one that was found: it is yet to be looked through."""
    made: Path | None = None
    """Its Parquet file, made and not handed over yet."""


@dataclass(slots=True)
class Finished:
    """What came of spools so far."""

    files: int = 0
    failures: int = 0
    """Tries that did not succeed."""
    recovered_rows: int = 0
    damaged_batches: int = 0
    damaged_bytes: int = 0
    lost_rows: int = 0
    """In spools that somebody removed."""


def make_folder(folder: Path) -> list[Path]:
    """Makes the folder, for us alone, and those above it that are missing; which were made, outermost first.

    Raises OSError.
    """
    missing = []
    for each in (folder, *folder.parents):
        if each.exists():
            break
        missing.append(each)
    made = []
    for each in reversed(missing):
        with suppress(FileExistsError):
            each.mkdir(mode=0o700)
            made.append(each)
    if not folder.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(folder))
    return made


class Finisher:
    """The thread, its queue, and its counts."""

    def __init__(self, place: Place, spool_folder: Path, kept: Callable[[str, int], None]) -> None:
        """`kept(name, bytes)` is told of each file that is in its place."""
        self.counts = Finished()
        self.told = CaptureLedger()
        """What the newest file tells, of those made of our own spools: one that was found may be of another
        capture."""
        self.problem: str | None = None
        """Why files do not get to their place now: one sentence, without secrets."""
        self._place = place
        self._folder = place.folder or spool_folder
        self._kept = kept
        self._queue: deque[ClosedSpool] = deque()
        self._left: list[ClosedSpool] = []
        """Those that are themselves at fault, and stay where they are."""
        self._wake = threading.Condition()
        self._stopping = self._abandoned = self._kicked = False
        self._thread = threading.Thread(target=self._run, name="llmtap-capture", daemon=True)

    @property
    def waiting(self) -> tuple[int, int]:
        """Spools, and their bytes, that are not files yet; those at fault too."""
        with self._wake:
            spools = (*self._queue, *self._left)
            return len(spools), sum(spool.bytes for spool in spools)

    @property
    def largest(self) -> int:
        """Bytes of the largest spool that is yet to become a file."""
        with self._wake:
            return max((spool.bytes for spool in self._queue), default=0)

    def start(self) -> None:
        self._thread.start()

    def add(self, spool: ClosedSpool) -> None:
        with self._wake:
            self._queue.append(spool)
            self._wake.notify()

    def kick(self) -> None:
        """Something may be better now: try again at once."""
        with self._wake:
            self._kicked = True
            self._wake.notify()

    def look(self) -> None:
        """Somebody may have taken away those at fault."""
        with self._wake:
            self._left = [spool for spool in self._left if spool.path.exists()]

    def close(self, timeout_s: float) -> bool:
        """Finish what can be in that time, at the first failure no more; whether the thread has ended."""
        with self._wake:
            self._stopping = True
            self._wake.notify()
        if self._thread.is_alive():
            self._thread.join(timeout_s)
        with self._wake:
            self._abandoned = True
        return not self._thread.is_alive()

    def _run(self) -> None:
        pause_s = BACK_OFF_S
        while (spool := self._next()) is not None:
            made = None
            try:
                made = self._finish(spool)
            except (PlaceError, OSError) as exc:
                self._failed(spool, exc)
                if self._wait(pause_s):
                    return
                pause_s = min(2 * pause_s, BACK_OFF_S_MAX)
                continue
            except (SpoolError, CaptureVersionError, pa.ArrowException, msgspec.MsgspecError) as exc:
                self._leave(spool, exc)
            if self.problem is not None:
                log.info("event=capture_files_resumed place=%s", self._place.name)
                self.problem = None
            pause_s = BACK_OFF_S
            # At once, or its bytes would count twice, or not at all, for the bound on the total.
            with self._wake:
                self._queue.popleft()
                if made is not None:
                    self.counts.files += 1
                    self._kept(*made)

    def _next(self) -> ClosedSpool | None:
        """The oldest spool, when there is one; None when it is time to go."""
        with self._wake:
            self._wake.wait_for(lambda: self._queue or self._stopping)
            return self._queue[0] if self._queue and not self._abandoned else None

    def _wait(self, pause_s: float) -> bool:
        """Pause before the next try; whether it is time to go instead."""
        with self._wake:
            if not self._stopping:
                self._wake.wait_for(lambda: self._stopping or self._kicked, pause_s)
                self._kicked = False
                return False
            made = self._queue[0].made
        if made is not None:
            made.unlink(missing_ok=True)
        return True

    def _failed(self, spool: ClosedSpool, exc: PlaceError | OSError) -> None:
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

    def _leave(self, spool: ClosedSpool, exc: Exception) -> None:
        log.error("event=capture_spool_left spool=%s reason=%r", spool.path, str(exc))
        with self._wake:
            self.counts.failures += 1
            self._left.append(spool)

    def _finish(self, spool: ClosedSpool) -> tuple[str, int] | None:
        """The file's name and bytes, where there was something to make one of."""
        if not spool.path.exists():
            self.counts.lost_rows += spool.rows or 0
            log.error("event=capture_spool_removed spool=%s rows=%s", spool.path, spool.rows)
            return None
        file = None
        contents = read_spool(spool.path)
        name = f"{spool.path.stem}.parquet"
        if contents.rows or _tells(contents):
            if spool.made is None or not spool.made.exists():
                spool.made = self._make(contents, name)
            size = spool.made.stat().st_size
            self._place.put(spool.made, name)
            file = name, size
            log.info("event=capture_file file=%s rows=%d bytes=%d", name, contents.rows, size)
            if spool.rows is not None:
                self.told = contents.ledger
            if self._place.folder is None:
                spool.made.unlink(missing_ok=True)
        if contents.damaged:
            self.counts.damaged_batches += contents.damaged["batches"]
            self.counts.damaged_bytes += contents.damaged["bytes"]
            log.warning(
                "event=capture_spool_damaged spool=%s rows=%d batches_lost=%d bytes_lost=%d",
                spool.path.name, contents.rows, contents.damaged["batches"], contents.damaged["bytes"],
            )  # fmt: skip
        if spool.rows is None:
            self.counts.recovered_rows += contents.rows
            log.info("event=capture_recovered spool=%s rows=%d", spool.path.name, contents.rows)
        spool.path.unlink(missing_ok=True)
        sync_folder(spool.path.parent)
        return file

    def _make(self, contents: SpoolContents, name: str) -> Path:
        """The Parquet file under its temporary name, or nothing at all."""
        info = msgspec.structs.replace(
            contents.info, schema_version=VERSION, ledger=contents.ledger, damaged=contents.damaged
        )
        made = self._folder / f".{name}.tmp"
        make_folder(self._folder)
        fd = os.open(made, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        try:
            with os.fdopen(fd, "wb") as file:
                write_parquet(file, info, contents.batches())
        except BaseException:
            made.unlink(missing_ok=True)
            raise
        return made


def _tells(contents: SpoolContents) -> bool:
    """Whether a spool without rows says something that no other may say."""
    ledger = contents.ledger
    return bool(
        ledger.dropped
        or any(relay.opened for relay in ledger.relays.values())
        or contents.damaged.get("batches")
    )

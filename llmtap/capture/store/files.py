"""The files of a capture that lie in a local folder: how much they take, and which is the oldest.

By name: a folder may be shared with other captures, and hold what is not ours. A file's name begins with its
time. `look` and `delete_oldest` are for the store's thread, `add` is for the finisher's.
"""

import logging
import os
import re
import threading
from contextlib import suppress
from pathlib import Path
from typing import Final

import pyarrow as pa
import pyarrow.parquet as pq

__all__ = ["LocalFiles"]

log = logging.getLogger(__name__)

_OURS: Final = re.compile(r"llmtap-\d{8}T\d{9}Z-[A-Za-z0-9_]+-\d{4,}-[0-9a-f]{4,8}\.parquet")
"""Only what we may have made is counted, and deleted at the bound."""


class LocalFiles:
    """Our files in a local folder, by name, which is by age. Of a remote place: none."""

    def __init__(self, folder: Path | None, tag: str) -> None:
        """`tag`: what the names of this capture's files have in them."""
        self.bytes = 0
        self.deleted = 0
        self.deleted_rows = 0
        """Of this capture alone: an earlier one's are nobody's to count any more."""
        self._folder = folder
        self._tag = f"-{tag}-"
        self._sizes: dict[str, int] = {}
        self._new: dict[str, int] = {}
        """Those that came while `look` looked."""
        self._guard = threading.Lock()

    def look(self) -> None:
        """See what is there: others may have moved files away."""
        found = {}
        with self._guard:
            self._new = {}
        if self._folder is not None:
            with suppress(OSError), os.scandir(self._folder) as entries:
                for entry in entries:
                    if _OURS.fullmatch(entry.name):
                        with suppress(OSError):
                            found[entry.name] = entry.stat().st_size
        with self._guard:
            self._sizes = found | self._new
            self.bytes = sum(self._sizes.values())

    def add(self, name: str, size: int) -> None:
        if self._folder is not None:
            with self._guard:
                self._sizes[name] = self._new[name] = size
                self.bytes = sum(self._sizes.values())

    def delete_oldest(self) -> bool:
        """Whether there was one, and it is gone. Raises nothing."""
        with self._guard:
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
            self.bytes -= size
            self.deleted += 1
            self.deleted_rows += rows
        log.warning("event=capture_deleted file=%s bytes=%d", name, size)
        return True

"""The results of a sweep on disk: JSON lines, one for each attempt, as they come.

A line is written and synced before anything else is done with a result, so a kill costs what was under way
and no more. If it tore the last line, that is cut off when the file is opened again. Jobs that are there are
not run again, unless they failed. Any number of sweeps may share a file, one at a time.
"""

import fcntl
import os
import stat
from pathlib import Path
from typing import Final

import msgspec

from llmtap.errors import ConfigError
from llmtap.sim.sweep.sweep import SweepAttempt
from llmtap.user_files import decode_json

__all__ = ["Results"]

_PLACE: Final = "--results"
_BEGIN: Final = b'{"id":'
"""Of each line: what does not begin so is not ours to cut."""


class Results:
    """An open results file, which nobody else can open meanwhile."""

    def __init__(self, path: Path) -> None:
        """Reads what is there; makes the file where there is none. Raises ConfigError."""
        self.path = path
        self.done: dict[str, SweepAttempt] = {}
        """By job: those that went well."""
        self.torn = False
        """Whether a last line had to be cut off."""
        try:
            self._file = open(path, "a+b", buffering=0)  # noqa: SIM115 (held open on purpose)
        except OSError as exc:
            raise ConfigError(_PLACE, f"cannot open {path}: {exc.strerror}") from None
        try:
            if not stat.S_ISREG(os.fstat(self._file.fileno()).st_mode):
                raise ConfigError(_PLACE, f"{path} is no file that could be read again")
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._read()
        except BlockingIOError:
            self._file.close()
            raise ConfigError(_PLACE, f"{path} is being written by another run") from None
        except ConfigError:
            self._file.close()
            raise

    def add(self, attempt: SweepAttempt) -> None:
        """Writes an attempt down for good. Raises ConfigError where the disk does not take it."""
        line = msgspec.json.encode(attempt) + b"\n"
        try:
            # A part of a line that a full disk takes is what `_read` cuts off.
            while line:
                line = line[self._file.write(line) :]
            os.fsync(self._file.fileno())
        except OSError as exc:
            raise ConfigError(_PLACE, f"cannot write {self.path}: {exc.strerror}") from None
        self._keep(attempt)

    def close(self) -> None:
        self._file.close()

    def _read(self) -> None:
        self._file.seek(0)
        data = self._file.read()
        whole = data.rfind(b"\n") + 1
        for number, line in enumerate(data[:whole].split(b"\n")[:-1], 1):
            try:
                self._keep(decode_json(line, SweepAttempt))
            except msgspec.DecodeError:
                raise ConfigError(_PLACE, f"{self.path}, line {number}: is no result of a sweep") from None
        if whole < len(data):
            if not whole and not _BEGIN.startswith(data[: len(_BEGIN)]):
                raise ConfigError(_PLACE, f"{self.path} is no file of results")
            self.torn = True
            self._file.truncate(whole)

    def _keep(self, attempt: SweepAttempt) -> None:
        if attempt.summary is not None:
            self.done[attempt.id] = attempt

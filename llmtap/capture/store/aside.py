"""Spools beside the spools: of a meter that lets its relays drain while another one goes on with the capture.

One process writes to a spool's folder, and its lock says who. The meter that goes leaves the folder to the
one that comes, and keeps what still ends in a folder in it, `aside-<pid>`, with a lock of its own. Its spools
become files in the same place under the same kind of name. What a killed one left there is taken back at the
next start.
"""

import fcntl
import os
from contextlib import suppress
from pathlib import Path
from typing import Final

import msgspec

from llmtap.capture.options import CaptureOptions

__all__ = ["LOCK", "aside_of", "clear", "take_back"]

LOCK: Final = "llmtap.lock"
"""The name of a folder's lock."""
_PREFIX: Final = "aside-"


def aside_of(options: CaptureOptions, folder: Path, pid: int) -> CaptureOptions:
    """The same capture, with spools beside those in `folder`."""
    return msgspec.structs.replace(options, spool=str(folder / f"{_PREFIX}{pid}"))


def take_back(folder: Path) -> None:
    """Move the spools of those that are no more into `folder`, which is ours. Raises OSError."""
    for aside in folder.glob(f"{_PREFIX}*"):
        fd = os.open(aside / LOCK, os.O_RDONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            continue  # its meter lives
        else:
            for spool in aside.glob("llmtap-*.spool"):
                os.replace(spool, folder / spool.name)
            clear(aside)
        finally:
            os.close(fd)


def clear(aside: Path) -> None:
    """Remove the folder, where nothing is left in it but its lock."""
    with suppress(OSError):
        if [path.name for path in aside.iterdir()] == [LOCK]:
            (aside / LOCK).unlink()
            aside.rmdir()

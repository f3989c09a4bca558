"""Files of the meter's state: content (`SavedState`), reading and writing. `state.py` decides when."""

import errno
import os
import stat
from collections.abc import Mapping
from contextlib import suppress
from hashlib import blake2b
from pathlib import Path
from typing import Final

import msgspec

from llmtap.errors import LlmtapError
from llmtap.meter.relays import RelayAccount

FORMAT: Final = 4
"""Version of the form of state files. Increase it with every change; other versions cannot be read."""
FILE: Final = "meter.state"
FILE_BYTES_MAX: Final = 256 << 20
"""Maximum size of a file. A large state has about 40 MB: 20,000 units in each of four arms."""
_MAGIC: Final = b"llmtap state "
_DIGEST_BYTES: Final = 16


class SavedState(msgspec.Struct, array_like=True):
    """Content of a state file, with the version of llmtap and both clocks at the time of the write.

    `parts`: bytes of `StatePart.export`, by name of the part.
    """

    version: str
    mono_ns: int
    wall_ns: int
    parts: dict[str, bytes]
    """By name: packed part of the meter's state."""
    ended: bool = False
    """Whether this is the meter's last write: at its end, or just before another meter replaced it."""
    crashes: int = 0
    """Number of earlier meters that ended without a last write of their state."""
    absorbed: list[str] = []
    """Files of the same folder whose content this file includes; they are removed after it is written."""
    relays: list[RelayAccount] = []


class StateError(LlmtapError):
    """A file or folder of the state cannot be used. `MeterState` adds the path and a hint to the message."""


def check_folder(folder: Path) -> None:
    """Raise StateError if other users can put files into a folder, OSError if it cannot be read."""
    status = os.stat(folder)
    if status.st_uid != os.geteuid():
        raise StateError(
            f"user {status.st_uid} owns the folder, and the meter runs as user {os.geteuid()}."
            " Hint: set meter.state to another folder, which llmtap makes if it does not exist"
        )
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise StateError(
            f"other users can write to the folder (mode {stat.S_IMODE(status.st_mode):04o})."
            f" Hint: chmod 700 {folder}"
        )


def write_state(path: Path, saved: SavedState) -> None:
    """Write a file that only this user can read. If the write fails, the old file stays. Raises OSError."""
    body = msgspec.msgpack.encode(saved)
    data = b"%b%d\n%b%b" % (_MAGIC, FORMAT, blake2b(body, digest_size=_DIGEST_BYTES).digest(), body)
    if len(data) > FILE_BYTES_MAX:
        raise OSError(
            errno.EFBIG,
            f"the state has {len(data)} bytes; at most {FILE_BYTES_MAX} are stored",
        )
    new = path.with_name(f"{path.name}.{os.getpid()}.new")
    fd = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600)
    try:
        with open(fd, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(fd)
        os.replace(new, path)
    except BaseException:
        with suppress(OSError):
            new.unlink()
        raise


def read_state(path: Path) -> SavedState | None:
    """Return the content of a file, or None if the file does not exist. Raises StateError and OSError.

    The caller logs the error with the path and the hint that the meter continues without the file.
    """
    try:
        # O_NONBLOCK, because the open of a FIFO would otherwise wait until another process writes to it.
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    with open(fd, "rb") as file:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            raise StateError("the path is not a regular file")
        if status.st_uid != os.geteuid():
            raise StateError(f"user {status.st_uid} owns the file, and the meter runs as user {os.geteuid()}")
        if status.st_size > FILE_BYTES_MAX:
            raise StateError(f"the file has {status.st_size} bytes; the limit is {FILE_BYTES_MAX}")
        data = file.read(status.st_size)
    head, _, rest = data.partition(b"\n")
    if not head.startswith(_MAGIC):
        raise StateError("the file is not a state file of llmtap")
    number = head.removeprefix(_MAGIC).decode(errors="replace")
    if number != str(FORMAT):
        raise StateError(f"another version of llmtap wrote the file (format {number}, expected {FORMAT})")
    digest, body = rest[:_DIGEST_BYTES], rest[_DIGEST_BYTES:]
    if blake2b(body, digest_size=_DIGEST_BYTES).digest() != digest:
        raise StateError("the file is damaged: its checksum is wrong")
    try:
        return msgspec.msgpack.decode(body, type=SavedState)
    except msgspec.MsgspecError as exc:
        raise StateError(f"the file cannot be decoded: {exc}") from None


def contained_files(files: Mapping[str, SavedState | str]) -> set[str]:
    """Return the names of the files whose content another file already includes. They are left over if a
    meter was killed after it had written the other file, and before it removed these.

    `meter.state` is not returned if it is newer than the other file, which then includes an earlier version.
    """
    state = files.get(FILE)
    ours = state if isinstance(state, SavedState) else None
    contained = set() if ours is None else set(ours.absorbed)
    for name, saved in files.items():
        if name != FILE and name not in contained and isinstance(saved, SavedState):
            is_newer = ours is not None and saved.wall_ns >= ours.wall_ns
            contained.update(other for other in saved.absorbed if other != FILE or is_newer)
    return contained


def problem_of(exc: Exception) -> str:
    return str((isinstance(exc, OSError) and exc.strerror) or exc or type(exc).__name__)


def remove_file(path: Path) -> bool:
    """Remove a file. Return False if that failed."""
    try:
        path.unlink(missing_ok=True)
    except OSError:
        return False
    return True

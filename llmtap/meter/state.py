"""State of the meter that outlives its process: windows, history, burn rates and experiment (`MeterState`).

The meter writes it to `meter.state` in the state folder every minute and at its end. The next meter adds it
to its own figures, so that it does not matter when it reads the file. A part whose settings have changed is
left out.

A meter that another one replaces (reload, hot restart) measures its relays to their end. It writes its state
to a file of its own, and from then on each half second what was added since (`rest-ID-N.state`), with the
accounts of its relays. The other meter adds these files to its figures and removes them. Whoever holds the
lock of the folder reads and writes `meter.state`. Counters of `/metrics` are not part of the state: a counter
that continued with an older value would look like a reset.
"""

import asyncio
import fcntl
import logging
import os
import secrets
from collections.abc import Callable, Mapping
from contextlib import suppress
from hashlib import blake2b
from pathlib import Path
from typing import Final, Protocol

import msgspec

from llmtap.errors import LlmtapError
from llmtap.meter.pipeline.pipeline import ExchangePipeline
from llmtap.meter.relays import RelayAccount
from llmtap.meter.tenants import Labels
from llmtap.units import NS_PER_S
from llmtap.version import __version__

FORMAT: Final = 1
"""Version of the files; increased with every change of what they contain."""
FILE: Final = "meter.state"
WRITE_NS: Final = 60 * NS_PER_S
"""Interval of the writes: a crash loses what came after the last one."""
TURN_S: Final = 0.5
AGE_NS_MAX: Final = 6 * 3_600 * NS_PER_S
"""Age from which a file is not read: the longest window of burn rates."""
_MAGIC: Final = b"llmtap state "
_DIGEST_BYTES: Final = 16

log = logging.getLogger(__name__)


class StatePart(Protocol):
    """Part of the state: windows, history, burn rates or experiment."""

    def export(self) -> Callable[[], bytes]:
        """Return the part, packed, as work for any thread."""

    def clear(self) -> None:
        """Forget what was exported."""

    def absorb(self, packed: bytes, shift_ns: int, labels: Labels) -> list[str]:
        """Add the part of another meter; return what was left out, as texts.

        `shift_ns`: our monotonic time minus the other's. Raises msgspec.MsgspecError.
        """


class SavedState(msgspec.Struct, array_like=True):
    """Content of a file."""

    version: str
    mono_ns: int
    wall_ns: int
    parts: dict[str, bytes]
    ended: bool = False
    """The meter wrote the file at its end, or before another one replaced it."""
    crashes: int = 0
    """Number of meters before that ended without this."""
    absorbed: list[str] = []
    """Files whose content is in this one; they are removed after it is written."""
    relays: list[RelayAccount] = []


class StateError(LlmtapError):
    """A file that cannot be used; says what is wrong and what happens."""


def write_state(path: Path, saved: SavedState) -> None:
    """Write a file that only this user can read; it is complete, or as before. Raises OSError."""
    body = msgspec.msgpack.encode(saved)
    data = b"%b%d\n%b%b" % (_MAGIC, FORMAT, blake2b(body, digest_size=_DIGEST_BYTES).digest(), body)
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
    """Return the content of a file, None without one. Raises StateError and OSError."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return None
    head, _, rest = data.partition(b"\n")
    if not head.startswith(_MAGIC):
        raise StateError("it is not a state file of llmtap")
    number = head.removeprefix(_MAGIC).decode(errors="replace")
    if number != str(FORMAT):
        raise StateError(f"another version of llmtap wrote it (format {number}; this one reads {FORMAT})")
    digest, body = rest[:_DIGEST_BYTES], rest[_DIGEST_BYTES:]
    if blake2b(body, digest_size=_DIGEST_BYTES).digest() != digest:
        raise StateError("it is damaged: its checksum is wrong")
    try:
        return msgspec.msgpack.decode(body, type=SavedState)
    except msgspec.MsgspecError as exc:
        raise StateError(f"it cannot be decoded: {exc}") from None


class MeterState:
    """Keeper of the state of one meter.

    Args:
        folder: state folder, which is made if it does not exist.
    """

    def __init__(self, folder: str, pipeline: ExchangePipeline) -> None:
        self._folder = Path(folder)
        self._pipeline = pipeline
        self._clock = pipeline.clock
        self._parts: Mapping[str, StatePart] = {
            "windows": pipeline.windows,
            "history": pipeline.history,
            "slo": pipeline.slos,
            "experiment": pipeline.experiments,
        }
        self._lock_fd: int | None = None
        self._absorbed: list[str] = []
        """Files that were added to our figures and are not removed yet."""
        self._left_out: set[str] = set()
        self._busy = asyncio.Lock()
        self._look_at_ns = 0
        self._due_ns = self._clock.mono_ns() + WRITE_NS
        self._switched = pipeline.experiments.switched
        self._task: asyncio.Task[None] | None = None
        self._next_folder: Path | None = None
        """State folder of the meter that replaces this one."""
        self._id = secrets.token_hex(4)
        """Part of the names of our files: process ids repeat in containers."""
        self._rests = 0

    @property
    def is_read(self) -> bool:
        """The state of the meter before is known, as far as there is one."""
        return self._lock_fd is not None

    def start(self, *, takes_over: bool) -> None:
        """Read the state; `takes_over`: another meter has the folder until it is replaced."""
        if takes_over:
            # The first relays must not use an experiment that is switched off.
            with suppress(StateError, OSError, msgspec.MsgspecError, KeyError):
                saved = read_state(self._folder / FILE)
                if saved is not None:
                    self._pipeline.experiments.absorb_switch(saved.parts["experiment"])
        else:
            self._look()
        self._task = asyncio.get_running_loop().create_task(self._run())

    async def hand_over(self, folder: str) -> None:
        """Leave the state to the meter with this state folder, and continue to send it what is added."""
        await self._stop_task()
        self._look()
        if self._lock_fd is None and Path(folder) == self._folder:
            return  # the folder belongs to another proxy, which must not get our figures
        self._next_folder = Path(folder)
        await self._turn()
        self._task = asyncio.get_running_loop().create_task(self._run())

    async def close(self) -> None:
        """Write the state for the last time."""
        await self._stop_task()
        await self._turn(ended=True)
        self._unlock()

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(TURN_S)
            async with self._busy:
                await self._turn()

    async def _stop_task(self) -> None:
        if self._task is not None:
            async with self._busy:  # a thread that writes cannot be cancelled
                self._task.cancel()
            await asyncio.wait([self._task])

    async def _turn(self, *, ended: bool = False) -> None:
        """Read and write what is due; `ended`: for the last time."""
        try:
            if self._next_folder is not None:
                if await self._write_rest() and self._lock_fd is not None:
                    self._remove(FILE, *self._absorbed)  # their content is in what was just written
                    self._unlock()
                return
            self._look()
            is_due = ended or self._clock.mono_ns() >= self._due_ns
            is_switched = self._switched != self._pipeline.experiments.switched
            if is_due or (is_switched and self._lock_fd is not None):
                await self._write(ended=ended)
        except Exception as error:  # an error of the state must not affect the measurement
            self._pipeline.on_error("state", error)

    # ---------------------------------------------------------------- reading

    def _look(self) -> None:
        """Read what other meters have left."""
        now_ns = self._clock.mono_ns()
        if now_ns < self._look_at_ns:
            return
        try:
            if self._lock_fd is None:
                if not self._lock():
                    return
                self._due_ns = now_ns  # from now on, the next meter can see that this one crashed
                saved = self._read(self._folder / FILE)
                if saved is not None:
                    self._absorbed = list(saved.absorbed)
                    self._pipeline.crashes += not saved.ended
            for path in sorted(self._folder.glob("rest-*.state"), key=_order):
                if path.name not in self._absorbed:
                    self._read(path)
                    self._absorbed.append(path.name)
        except OSError as exc:
            self._look_at_ns = now_ns + WRITE_NS
            self._fail("state_not_read", self._folder, exc.strerror)

    def _lock(self) -> bool:
        """Take the lock of the folder; return False if another meter has it. Raises OSError."""
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        fd = os.open(self._folder / "meter.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(fd)
            return False
        self._lock_fd = fd
        return True

    def _unlock(self) -> None:
        if self._lock_fd is not None:
            os.close(self._lock_fd)
            self._lock_fd = None

    def _read(self, path: Path) -> SavedState | None:
        """Add the content of a file to our figures, and return it; None if it cannot be used."""
        try:
            saved = read_state(path)
        except (StateError, OSError) as exc:
            self._fail("state_not_read", path, str(exc))
            with suppress(OSError):
                os.replace(path, path.with_name(f"{FILE}.bad"))
            return None
        if saved is None:
            return None
        age_ns = self._clock.wall_ns() - saved.wall_ns
        if age_ns > AGE_NS_MAX:
            log.warning(
                "event=state_not_read file=%s error='it is too old' age_hours=%.1f age_hours_max=%d",
                path, age_ns / 3_600e9, AGE_NS_MAX // (3_600 * NS_PER_S),
            )  # fmt: skip
            return None
        shift_ns = self._clock.mono_ns() - max(0, age_ns) - saved.mono_ns
        for name, part in self._parts.items():
            try:
                left_out = part.absorb(saved.parts[name], shift_ns, self._pipeline.labels)
            except Exception as exc:  # a file must not stop the meter
                self._fail("state_not_read", path, f"its part {name} cannot be decoded: {exc}")
                continue
            for text in set(left_out) - self._left_out:
                log.info("event=state_left_out file=%s what=%r", path, text)
            self._left_out.update(left_out)
        self._pipeline.relays.absorb(saved.relays, self._clock.mono_ns())
        self._pipeline.crashes += saved.crashes
        if path.name == FILE:
            log.info("event=state_read file=%s age_s=%.1f version=%s", path, age_ns / 1e9, saved.version)
        return saved

    # ---------------------------------------------------------------- writing

    async def _write(self, *, ended: bool = False) -> None:
        self._due_ns = self._clock.mono_ns() + WRITE_NS
        self._switched = self._pipeline.experiments.switched
        if self._lock_fd is None:
            self._fail("state_not_written", self._folder, "another meter uses the folder")
            return
        if await self._save(self._folder / FILE, ended=ended):
            self._remove(*self._absorbed)
            self._absorbed.clear()

    def _remove(self, *names: str) -> None:
        for name in names:
            with suppress(FileNotFoundError):
                (self._folder / name).unlink()

    async def _write_rest(self) -> bool:
        """Write what was added since the last time; return False if it cannot be written and stays here."""
        assert self._next_folder is not None
        path = self._next_folder / f"rest-{self._id}-{self._rests}.state"
        works = {name: part.export() for name, part in self._parts.items()}
        for part in self._parts.values():
            part.clear()
        if await self._save(path, ended=True, works=works):
            self._pipeline.crashes = 0
            self._rests += 1
            return True
        for name, work in works.items():
            self._parts[name].absorb(work(), 0, self._pipeline.labels)
        return False

    async def _save(
        self, path: Path, *, ended: bool, works: Mapping[str, Callable[[], bytes]] | None = None
    ) -> bool:
        if works is None:
            works = {name: part.export() for name, part in self._parts.items()}
        saved = SavedState(
            version=__version__,
            mono_ns=self._clock.mono_ns(),
            wall_ns=self._clock.wall_ns(),
            parts={},
            ended=ended,
            crashes=self._pipeline.crashes,
            absorbed=list(self._absorbed),
            relays=[] if self._next_folder is None else self._pipeline.relays.accounts(),
        )

        def work() -> None:
            saved.parts = {name: pack() for name, pack in works.items()}
            write_state(path, saved)

        try:
            await asyncio.to_thread(work)
        except OSError as exc:
            self._fail("state_not_written", path, exc.strerror)
            return False
        return True

    def _fail(self, kind: str, path: Path, problem: str | None) -> None:
        """Count a problem, and log the first of its kind."""
        hint = "the meter goes on without it" if kind == "state_not_read" else "check meter.state"
        self._pipeline.on_error(kind, f"{path}: {problem}. Hint: {hint}")


def _order(path: Path) -> tuple[int, str]:
    """Return the key that sorts the files of one meter by number."""
    *_, number = path.stem.split("-")
    return (int(number) if number.isdigit() else 0), path.name

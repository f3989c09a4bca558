"""State of the meter that outlives its process: `MeterState`, with windows, history, burn rates, experiment,
silences, and the history by which steps of TTFT are judged.

The meter writes it to `meter.state` in the state folder every minute and at its end. The next meter adds it
to its own figures, so that it does not matter when it reads the file. A part whose settings have changed is
left out.

A meter that another one replaces (reload, hot restart) measures its relays until they end. It writes its
state to a file of its own (`rest-ID-0.state`), and then, every half second, the figures that were added
since the previous file, with the accounts of its relays. The other meter adds these files to its figures and
removes them. Only the meter that holds the lock of the folder reads and writes `meter.state`. Counters of
`/metrics` are not part of the state: a counter that continued with an older value would look like a reset.

A folder that other users can write is refused. Threads read and write the files, and nothing waits for them
longer than `DISK_S`.
"""

import asyncio
import fcntl
import logging
import os
import secrets
import time
from collections.abc import Callable, Collection, Coroutine, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Final, Protocol

import msgspec

from llmtap.meter.pipeline.pipeline import ExchangePipeline
from llmtap.meter.state_file import (
    FILE,
    SavedState,
    StateError,
    check_folder,
    contained_files,
    problem_of,
    read_state,
    remove_file,
    write_state,
)
from llmtap.meter.tenants import Labels
from llmtap.units import NS_PER_S
from llmtap.version import __version__

WRITE_NS: Final = 60 * NS_PER_S
"""Interval between two writes of the state. A crash loses the figures since the last write."""
TURN_S: Final = 0.5
RETRY_NS: Final = 10 * NS_PER_S
"""Time until a failed write to the folder of the next meter is tried again."""
DISK_S: Final = 3.0
"""Maximum time that the start, the handover and the end of a meter wait for the disk."""
LEFTOVER_S: Final = 600.0
"""Age from which an incomplete file is removed, because the meter that wrote it was certainly killed."""
AGE_NS_MAX: Final = 6 * 3_600 * NS_PER_S
"""Age from which a file is ignored; equal to the longest window of burn rates, 6 hours."""

log = logging.getLogger(__name__)


class StatePart(Protocol):
    """Part of the meter's state that can be saved, such as windows or burn rates."""

    def export(self) -> Callable[[], bytes]:
        """Return a thread-safe function that packs the part as bytes."""

    def clear(self) -> None:
        """Forget the figures that were exported, so that the next export has only new figures."""

    def absorb(self, packed: bytes, shift_ns: int, labels: Labels) -> list[str]:
        """Add the packed part of another meter. Return a text for each group of figures that was left out.

        `shift_ns`: our monotonic time minus the other meter's. Raises msgspec.MsgspecError.
        """


class MeterState:
    """Reads the state of earlier meters from files, and writes the state of this meter.

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
            "silences": pipeline.silences,
            "steps": pipeline.steps,
        }
        """By name: part of the meter's state."""
        self._is_read = False
        """Whether the state of earlier meters was read."""
        self._lock_fd: int | None = None
        """Descriptor of the lock file of the folder; None: another meter owns the state."""
        self._used_files: list[str] = []
        """Names of files to remove, because their content was added to the figures, or cannot be used."""
        self._left_out_texts: set[str] = set()
        """Problems that are logged already, to log each only once."""
        self._turn_lock = asyncio.Lock()
        """Held during a read or write of the files, so that two never overlap."""
        self._next_read_ns = 0
        self._next_write_ns = self._clock.mono_ns() + WRITE_NS
        self._written_switch_state = pipeline.experiments.switch_state
        """State of the experiment in the latest file: a switch is written at once."""
        self._periodic_task: asyncio.Task[None] | None = None
        """Task that reads and writes files at intervals; None after the end."""
        self._late_tasks: list[asyncio.Task[None]] = []
        """Reads and writes that took longer than `DISK_S` and continue in the background."""
        self._refusal: str | None = None
        """Reason why the folder cannot be used; None if it can, or if another meter holds its lock."""
        self._next_folder: Path | None = None
        """State folder of the meter that replaces this one."""
        self._id = secrets.token_hex(4)
        """Random part of the names of this meter's files. Process ids are not unique across containers."""
        self._rest_count = 0
        """Number of files of changes that this meter wrote after another one had taken over the state
        file."""

    @property
    def is_read(self) -> bool:
        """Whether the state of the previous meter has been read, or there is none."""
        return self._is_read

    async def start(self, *, takes_over: bool) -> None:
        """Read the state, and begin regular reads and writes. `takes_over`: another meter has the folder."""
        await self._run_limited("state_not_read", self._take_initial_state(takes_over=takes_over))
        self._periodic_task = asyncio.get_running_loop().create_task(self._run())

    async def hand_over(self, folder: str) -> None:
        """Write the state, and then new figures, to `folder`: that of the meter that replaces this one."""
        await self._run_limited("state_not_written", self._leave_state_to(Path(folder)))

    async def close(self) -> None:
        """Write the state for the last time, and release the folder."""
        await self._run_limited("state_not_written", self._write_last_state())

    async def _run_limited(self, kind: str, work: Coroutine[None, None, None]) -> None:
        """Run `work`, but wait for its end at most `DISK_S`: the meter must not hang if its disk hangs.
        `kind`: kind of the error that is then counted."""

        async def run() -> None:
            async with self._turn_lock:
                try:
                    await work
                except Exception as error:  # an error of the state must not affect the measurement
                    self._pipeline.on_error("state", error)

        task = asyncio.get_running_loop().create_task(run())
        await asyncio.wait([task], timeout=DISK_S)
        if not task.done():
            self._late_tasks.append(task)
            self._report_problem(kind, self._folder, f"the disk has not answered within {DISK_S:g} s")

    async def _take_initial_state(self, *, takes_over: bool) -> None:
        """Read the state of earlier meters or, if the meter takes over, only whether the experiment is on."""
        if not takes_over:
            await self._absorb_new_files()
            return
        # Read the experiment's switch now: the first relays must not use an experiment that is switched off.
        with suppress(StateError, OSError, msgspec.MsgspecError, KeyError):
            saved = await asyncio.to_thread(self._read_without_lock)
            if saved is not None:
                self._pipeline.experiments.absorb_switch(saved.parts["experiment"])

    def _read_without_lock(self) -> SavedState | None:
        check_folder(self._folder)
        return read_state(self._folder / FILE)

    async def _leave_state_to(self, folder: Path) -> None:
        """Write later figures for the next meter, which uses a folder, instead of the own files."""
        await self._absorb_new_files()
        if self._lock_fd is None and folder == self._folder:
            # Another proxy has locked this folder: stop, so that it does not get the figures of this proxy.
            self._stop_periodic_task()
            return
        self._next_folder = folder
        self._next_write_ns = self._clock.mono_ns()
        await self._turn()

    async def _write_last_state(self) -> None:
        """Write the state for the last time, and release the folder."""
        self._stop_periodic_task()
        await self._turn(ended=True)
        self._unlock()

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(TURN_S)
            async with self._turn_lock:
                await self._turn()

    def _stop_periodic_task(self) -> None:
        """End the regular reads and writes. The caller must hold `_turn_lock`, so that no thread writes now:
        it could not be cancelled."""
        if self._periodic_task is not None:
            self._periodic_task.cancel()

    async def _turn(self, *, ended: bool = False) -> None:
        """Read the files of other meters. Write the state if this is due, or for the last time (`ended`)."""
        try:
            if self._next_folder is not None:
                if ended or self._clock.mono_ns() >= self._next_write_ns:
                    await self._write_rest()
                return
            await self._absorb_new_files()
            is_due = ended or self._clock.mono_ns() >= self._next_write_ns
            is_switched = self._written_switch_state != self._pipeline.experiments.switch_state
            if is_due or (is_switched and self._lock_fd is not None):
                await self._write(ended=ended)
        except Exception as error:  # an error of the state must not affect the measurement
            self._pipeline.on_error("state", error)

    async def _absorb_new_files(self) -> None:
        """Read the files that other meters have left in the folder."""
        now_ns = self._clock.mono_ns()
        if now_ns < self._next_read_ns:
            return
        had_lock = self._lock_fd is not None
        try:
            files = await asyncio.to_thread(self._read_folder, set(self._used_files))
        except (StateError, OSError) as exc:
            if not had_lock:
                self._unlock()
            self._next_read_ns = now_ns + WRITE_NS
            self._refusal = problem_of(exc)
            self._report_problem("state_not_read", self._folder, self._refusal)
            return
        self._refusal = None
        if self._lock_fd is None:
            return
        if not had_lock:
            # Write `meter.state` at once, without `ended`: the next meter then sees if this one has crashed.
            self._next_write_ns = now_ns
        contained = contained_files(files)
        for name, saved in files.items():
            if isinstance(saved, str):
                self._report_problem("state_not_read", self._folder / name, saved)
            elif name not in contained:
                self._absorb_file(self._folder / name, saved)
        # `meter.state` is not removed, since the next write replaces the file.
        self._used_files += [name for name in files if name != FILE]
        self._is_read = True

    def _read_folder(self, known: Collection[str]) -> dict[str, SavedState | str]:
        """Take the lock, and return the content of the new files by name: `meter.state`, then the files of
        each meter in the order in which it wrote them.

        If a file cannot be used, it is renamed, and the value is the reason as text. Runs in a thread. Raises
        StateError and OSError.
        """
        names = []
        if self._lock_fd is None:
            if not self._lock():
                return {}
            names = [FILE]
            self._remove_leftovers()
        names += [path.name for path in sorted(self._folder.glob("rest-*.state"), key=_file_order)]
        files: dict[str, SavedState | str] = {}
        for name in names:
            if name in known:
                continue
            path = self._folder / name
            try:
                saved = read_state(path)
            except (StateError, OSError) as exc:
                files[name] = problem_of(exc)
                with suppress(OSError):
                    os.replace(path, path.with_name(f"{FILE}.bad"))
            else:
                if saved is not None:
                    files[name] = saved
        return files

    def _remove_leftovers(self) -> None:
        for path in self._folder.glob("*.state.*.new"):
            with suppress(OSError):
                if time.time() - path.lstat().st_mtime > LEFTOVER_S:
                    path.unlink()

    def _lock(self) -> bool:
        """Take the lock of the folder; return False if another meter holds it. Raises StateError, OSError."""
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        check_folder(self._folder)
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        fd = os.open(self._folder / "meter.lock", flags, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as exc:
            os.close(fd)
            if isinstance(exc, BlockingIOError):
                return False
            raise
        self._lock_fd = fd
        return True

    def _unlock(self) -> None:
        if self._lock_fd is not None:
            os.close(self._lock_fd)
            self._lock_fd = None

    def _absorb_file(self, path: Path, saved: SavedState) -> None:
        """Add the content of a file to the figures of this meter; skip a file that is too old."""
        age_ns = self._clock.wall_ns() - saved.wall_ns
        if age_ns > AGE_NS_MAX:
            log.warning(
                "event=state_not_read file=%s error='the file is too old' age_hours=%.1f age_hours_max=%d",
                path,
                age_ns / 3_600e9,
                AGE_NS_MAX // (3_600 * NS_PER_S),
            )
            return
        shift_ns = self._clock.mono_ns() - max(0, age_ns) - saved.mono_ns
        for name, part in self._parts.items():
            try:
                left_out = part.absorb(saved.parts[name], shift_ns, self._pipeline.labels)
            except Exception as exc:  # a damaged file must not stop the meter
                self._report_problem("state_not_read", path, f"the part {name!r} cannot be decoded: {exc}")
                continue
            for text in set(left_out) - self._left_out_texts:
                log.info("event=state_left_out file=%s what=%r", path, text)
            self._left_out_texts.update(left_out)
        self._pipeline.relays.absorb(saved.relays, self._clock.mono_ns())
        self._pipeline.crashes += saved.crashes
        if path.name == FILE:
            if not saved.ended:
                self._pipeline.crashes += 1
                self._pipeline.windows.on_crash(saved.mono_ns + shift_ns)
            log.info("event=state_read file=%s age_s=%.1f version=%s", path, age_ns / 1e9, saved.version)

    async def _write(self, *, ended: bool = False) -> None:
        self._next_write_ns = self._clock.mono_ns() + WRITE_NS
        self._written_switch_state = self._pipeline.experiments.switch_state
        if self._lock_fd is None:
            problem = self._refusal or "another meter uses the folder"
            self._report_problem("state_not_written", self._folder, problem)
            return
        await self._save(self._folder, FILE, ended=ended, absorbed=self._used_files, remove=self._used_files)

    async def _write_rest(self) -> None:
        """Write the figures added since the previous write for the next meter, and release the own folder. If
        the write fails, keep the figures for the next attempt."""
        assert self._next_folder is not None
        remove = [] if self._lock_fd is None else [FILE, *self._used_files]
        packers = {name: part.export() for name, part in self._parts.items()}
        for part in self._parts.values():
            part.clear()
        if await self._save(
            self._next_folder,
            f"rest-{self._id}-{self._rest_count}.state",
            ended=True,
            absorbed=remove if self._next_folder == self._folder else [],
            remove=remove,
            packers=packers,
        ):
            self._pipeline.crashes = 0
            self._rest_count += 1
            self._unlock()
            return
        self._next_write_ns = self._clock.mono_ns() + RETRY_NS
        for name, work in packers.items():
            try:
                self._parts[name].absorb(work(), 0, self._pipeline.labels)
            except Exception as error:  # the other parts can still be restored
                self._pipeline.on_error("state", error)
        if not self._rest_count:
            self._pipeline.experiments.keep_units()

    async def _save(
        self,
        folder: Path,
        name: str,
        *,
        ended: bool,
        absorbed: list[str],
        remove: list[str],
        packers: Mapping[str, Callable[[], bytes]] | None = None,
    ) -> bool:
        """Write a file, and remove the files `remove` from the own folder. Return False if the file cannot be
        written. `packers`: by name of a part, the function that packs it; None: export the parts now."""
        if packers is None:
            packers = {name: part.export() for name, part in self._parts.items()}
        saved = SavedState(
            version=__version__,
            mono_ns=self._clock.mono_ns(),
            wall_ns=self._clock.wall_ns(),
            parts={},
            ended=ended,
            crashes=self._pipeline.crashes,
            absorbed=list(absorbed),
            relays=[] if self._next_folder is None else self._pipeline.relays.accounts(),
        )

        def work() -> list[str]:
            saved.parts = {name: pack() for name, pack in packers.items()}
            folder.mkdir(mode=0o700, exist_ok=True)
            check_folder(folder)
            if name == FILE and self._lock_fd is not None and not os.fstat(self._lock_fd).st_nlink:
                # The folder was removed and made again, so our lock is on a deleted file: take a new lock.
                self._unlock()
                if not self._lock():
                    raise StateError(
                        "another meter uses the folder. Hint: give each meter its own meter.state"
                    )
            write_state(folder / name, saved)
            return [name for name in remove if not remove_file(self._folder / name)]

        try:
            left = await asyncio.to_thread(work)
        except Exception as exc:  # for example, the disk is full
            self._report_problem("state_not_written", folder / name, problem_of(exc))
            return False
        self._used_files = [name for name in left if name != FILE]
        return True

    def _report_problem(self, kind: str, path: Path, problem: str) -> None:
        """Count a problem, and log the first of its kind."""
        if "Hint: " not in problem:
            hint = "the meter continues without it" if kind == "state_not_read" else "check meter.state"
            problem = f"{problem}. Hint: {hint}"
        self._pipeline.on_error(kind, f"{path}: {problem}")


def _file_order(path: Path) -> tuple[int, str]:
    """Return a key that sorts files `rest-ID-N.state` by the number N, so that 10 comes after 9."""
    *_, number = path.stem.split("-")
    return (int(number) if number.isdigit() else 0), path.name

"""Start, signal and stop one child process of the supervisor (relay, meter or watcher).

A child reads its setup as one line of JSON from stdin, and writes the line `ready` to stdout. `Child.adopt`
takes over a process that was started before a hot restart. `back_off` waits after the death of a child,
before the caller starts the next one.
"""

import asyncio
import contextlib
import logging
import os
import signal
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Final, Literal, Protocol

import msgspec

from llmtap.meter.setup import MeterSetup
from llmtap.units import encode_special

BACKOFF_S: Final = (0.0, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)
"""Pauses before a child is started again, indexed by the number of successive failures; the last repeats."""
HEALTHY_S: Final = 10.0
"""A child that ran for this time before it died is restarted at once."""
READY_S: Final = 30.0
"""Maximum time to wait for the `ready` line of a child; after it, the child counts as not ready."""
EXIT_CHECK_S: Final = 0.05
"""Time between two checks whether a child that was started before a hot restart has ended."""

Kind = Literal["relay", "meter", "watch"]
PACKAGES: Final[dict[Kind, str]] = {
    "relay": "llmtap.vantage.relay",
    "meter": "llmtap.meter",
    "watch": "llmtap.vantage.passive",
}

encode_setup = msgspec.json.Encoder(enc_hook=encode_special).encode

log = logging.getLogger(__name__)


class ChildState(msgspec.Struct, kw_only=True):
    """State of a child, which a hot restart passes to the next program."""

    kind: Kind
    name: str
    index: int
    """Index of a relay, which selects its sockets; 0 for other children."""
    pid: int
    stdin: int
    """Descriptor of the writing end of the child's stdin; the child ends when this descriptor is closed."""
    ready: bool
    """Whether the process has reported that it is ready."""
    until_s: float | None
    """Monotonic time in seconds at which the child is killed; None: nobody stopped it."""


class _Process(Protocol):
    """A process that this program started, or took over at a hot restart."""

    @property
    def pid(self) -> int: ...
    async def wait(self) -> int:
        """Return the exit status when the process ends."""
        ...

    def send_signal(self, signal: int) -> None: ...


class Child:
    """A running child process. It ends when its stdin is closed, and so also when this process ends."""

    def __init__(self, kind: Kind, name: str, index: int, process: _Process, stdin: int) -> None:
        self.kind = kind
        self.name = name
        self.index = index
        """Position among the processes of its kind, which a replacement takes over."""
        self.began_s = time.monotonic()
        """Time of the start, to judge whether it ended too soon."""
        self.is_ready = False  # whether the child has reported `ready`
        self.until_s: float | None = None  # monotonic time at which it is killed, as in `ChildState`
        self.drain_s = 0.0
        """Time limit for draining, in seconds, with which a relay was started."""
        self.settings: MeterSetup | None = None
        """Setup of a meter; None if an earlier supervisor started the meter."""
        self.capture_id = ""
        """Id of the capture that a meter writes."""
        self._process = process
        """The process, of asyncio or adopted after a hot restart."""
        self._stdin = stdin
        """Descriptor of the pipe to the process; -1: it is closed, so the process ends."""
        self._stdout: asyncio.StreamReader | None = None

    @classmethod
    async def start(
        cls, kind: Kind, name: str, index: int, setup: msgspec.Struct, fds: Sequence[int]
    ) -> "Child":
        """Run the package of this kind by `python -m`. The child gets `setup` as JSON, and inherits `fds`."""
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-P",  # do not import modules from the current folder
            "-m",
            PACKAGES[kind],
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            pass_fds=fds,
        )
        assert process.stdin is not None
        with contextlib.suppress(ConnectionError):
            process.stdin.write(encode_setup(setup) + b"\n")
            await process.stdin.drain()
        # Keep a copy of the descriptor, because asyncio closes its own one when the child ends.
        child = cls(kind, name, index, process, os.dup(process.stdin.get_extra_info("pipe").fileno()))
        child._stdout = process.stdout
        return child

    @classmethod
    def adopt(cls, state: ChildState) -> "Child":
        """Return a child that was started before a hot restart, by the previous program in this process."""
        os.set_inheritable(state.stdin, False)
        child = cls(state.kind, state.name, state.index, _AdoptedProcess(state.pid), state.stdin)
        child.is_ready = state.ready
        return child

    def to_state(self) -> ChildState:
        """Return the state from which `adopt` makes this child again in the next program."""
        return ChildState(
            kind=self.kind,
            name=self.name,
            index=self.index,
            pid=self.pid,
            stdin=self._stdin,
            ready=self.is_ready,
            until_s=self.until_s,
        )

    @property
    def pid(self) -> int:
        return self._process.pid

    async def read_ready_line(self) -> bool:
        """Wait until the child reports `ready`. Return False if it ends, or takes longer than READY_S."""
        assert self._stdout is not None
        try:
            # Do not use `wait_for`: before Python 3.12, it loses a cancellation that arrives together with
            # the line.
            async with asyncio.timeout(READY_S):
                line = await self._stdout.readline()
        except TimeoutError:
            return False
        self.is_ready = line == b"ready\n"
        return self.is_ready

    def not_ready_reason(self) -> str:
        """Return the reason why `read_ready_line` returned False."""
        assert self._stdout is not None
        has_ended = self._stdout.at_eof()
        return "it ended" if has_ended else f"it did not report `ready` within {READY_S:g} s"

    async def wait(self) -> int:
        """Wait for the end of the child. Return its exit status."""
        return await self._process.wait()

    async def wait_and_close(self) -> None:
        """Wait for the end of the child, and close its stdin."""
        await self._process.wait()
        stdin, self._stdin = self._stdin, -1
        os.close(stdin)

    def signal(self, number: signal.Signals) -> None:
        """Send a signal if the child still runs."""
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(number)

    def write_line(self, word: bytes) -> None:
        """Write a line to the child's stdin if the child still runs. A line is short, so it never blocks."""
        with contextlib.suppress(OSError):
            os.write(self._stdin, word + b"\n")

    async def end_within(self, seconds: float) -> None:
        """Wait for the end of a child that was stopped. Kill it if it still runs after `seconds`."""
        self.until_s = time.monotonic() + seconds
        try:
            await asyncio.wait_for(self._process.wait(), seconds)
        except TimeoutError:
            log.warning("event=child_killed child=%s pid=%d limit_s=%.1f", self.name, self.pid, seconds)
            self.signal(signal.SIGKILL)
            await self._process.wait()

    async def stop(self, timeout_s: float) -> None:
        """Send SIGTERM to the child, and SIGKILL if it still runs after `timeout_s` seconds."""
        self.signal(signal.SIGTERM)
        await self.end_within(timeout_s)


class _AdoptedProcess:
    """Process that was started before a hot restart, so that asyncio cannot wait for it."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._status: int | None = None
        """Exit code; None while the process runs."""
        self._check_exit()

    @property
    def pid(self) -> int:
        return self._pid

    async def wait(self) -> int:
        # Poll instead of using a pidfd, which kernels before 5.3 do not have.
        while self._status is None:
            await asyncio.sleep(EXIT_CHECK_S)
            self._check_exit()
        return self._status

    def send_signal(self, signal: int) -> None:
        self._check_exit()
        if self._status is None:
            os.kill(self._pid, signal)

    def _check_exit(self) -> None:
        """Store the exit status if the process has ended."""
        if self._status is not None:
            return
        try:
            pid, status = os.waitpid(self._pid, os.WNOHANG)
        except ChildProcessError:  # the previous program has already read the exit status, which is lost
            pid, status = self._pid, 0
        if pid:
            self._status = os.waitstatus_to_exitcode(status)


async def wait_until_ready(child: Child) -> bool:
    """Wait until a child is ready. If it does not become ready, log the reason and return False."""
    ready = await child.read_ready_line()
    if not ready:
        reason, hint = child.not_ready_reason(), "see the log lines of this process"
        text = "event=%s_not_ready name=%s pid=%d reason=%r hint=%r"
        log.error(text, child.kind, child.name, child.pid, reason, hint)
    return ready


def log_not_started(kind: str, exc: OSError) -> None:
    """Log that the system could not start a child."""
    hint = "the system lacks memory, processes or file descriptors"
    log.error("event=%s_not_started error=%r hint=%r", kind, str(exc), hint)


async def start_with_retries(kind: str, start: Callable[[], Awaitable[Child]]) -> Child:
    """Start a child and return it. Retry while the system has no memory, descriptors or process ids left."""
    failures = 0
    while True:
        try:
            return await start()
        except OSError as exc:
            log_not_started(kind, exc)
        failures += 1
        await asyncio.sleep(_pause_s(failures))


async def back_off(child: Child, status: int, failures: int) -> int:
    """Log that a child died, and wait before the next start. Return the number of consecutive failures."""
    failures = 0 if time.monotonic() - child.began_s > HEALTHY_S else failures + 1
    log.error(
        "event=%s_died name=%s pid=%d status=%d restart_s=%s hint=%r",
        child.kind,
        child.name,
        child.pid,
        status,
        _pause_s(failures),
        "see its last log lines; -9 can mean that the system had too little memory",
    )
    await asyncio.sleep(_pause_s(failures))
    return failures


def _pause_s(failures: int) -> float:
    return BACKOFF_S[min(failures, len(BACKOFF_S) - 1)]

"""One child process: started with a line on its stdin, ready when it says so, ended when asked."""

import asyncio
import contextlib
import logging
import os
import signal
import sys
import time
from collections.abc import Sequence
from typing import Final, Literal, Protocol

import msgspec

from llmtap.meter.setup import MeterSetup

__all__ = ["Child", "HandedChild", "Kind"]

READY_S: Final = 30.0
LOOK_S: Final = 0.05
"""How often to see whether an adopted child has ended."""

Kind = Literal["relay", "meter"]
PACKAGES: Final[dict[Kind, str]] = {"relay": "llmtap.vantage.relay", "meter": "llmtap.meter"}

log = logging.getLogger(__name__)


class HandedChild(msgspec.Struct, kw_only=True):
    """A child as one supervisor leaves it to the next in the same process."""

    kind: Kind
    name: str
    index: int
    pid: int
    stdin: int
    """Our end of its stdin: while it is open, the child lives."""
    ready: bool
    until_s: float | None
    """Monotonic: the child is on its way out, and has until then. None: it is at work."""


class _Process(Protocol):
    @property
    def pid(self) -> int: ...
    async def wait(self) -> int: ...
    def send_signal(self, signal: int) -> None: ...


class Child:
    """A running child. Its stdin stays open while we live: when it closes, the child ends by itself."""

    def __init__(self, kind: Kind, name: str, index: int, process: _Process, stdin: int) -> None:
        self.kind = kind
        self.name = name
        self.index = index
        """Which of the relays; of a meter, 0."""
        self.began_s = time.monotonic()
        self.is_ready = False
        self.until_s: float | None = None
        """It has been told to go, and is killed then (monotonic)."""
        self.drain_s = 0.0
        """A relay: how long it lets streams finish, as it was told when it was started."""
        self.told: MeterSetup | None = None
        """A meter: what it goes by; None where the supervisor before us started it."""
        self.makes_way = False
        """A meter: it was told to end because another one is to follow; that is no crash."""
        self._process = process
        self._stdin = stdin
        self._stdout: asyncio.StreamReader | None = None

    @classmethod
    async def start(cls, kind: Kind, name: str, index: int, line: bytes, fds: Sequence[int]) -> "Child":
        """Run the package of this kind with `python -m`, hand it `line`, let it inherit `fds`."""
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-P",  # whatever lies in the current folder is none of our modules
            "-m",
            PACKAGES[kind],
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            pass_fds=fds,
        )
        assert process.stdin is not None
        with contextlib.suppress(ConnectionError):
            process.stdin.write(line + b"\n")
            await process.stdin.drain()
        # One of our own: asyncio closes its as soon as it sees the child go, which may be before we do.
        child = cls(kind, name, index, process, os.dup(process.stdin.get_extra_info("pipe").fileno()))
        child._stdout = process.stdout
        return child

    @classmethod
    def adopt(cls, handed: HandedChild) -> "Child":
        """One that the supervisor before us started."""
        os.set_inheritable(handed.stdin, False)
        child = cls(handed.kind, handed.name, handed.index, _Adopted(handed.pid), handed.stdin)
        child.is_ready = handed.ready
        return child

    def to_hand(self) -> HandedChild:
        """For `adopt`."""
        return HandedChild(
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

    async def ready(self) -> bool:
        """Wait until the child says it is ready; False when it ends or takes too long instead."""
        assert self._stdout is not None
        try:
            # Not `wait_for`, which before Python 3.12 misses a cancel that comes together with the line.
            async with asyncio.timeout(READY_S):
                line = await self._stdout.readline()
        except TimeoutError:
            return False
        self.is_ready = line == b"ready\n"
        return self.is_ready

    async def wait(self) -> int:
        """The exit status, once there is one."""
        return await self._process.wait()

    async def buried(self) -> None:
        """Until it has ended, and nothing of it is left with us."""
        await self._process.wait()
        stdin, self._stdin = self._stdin, -1
        os.close(stdin)

    def signal(self, number: signal.Signals) -> None:
        """Send a signal, if it still runs."""
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(number)

    def tell(self, word: bytes) -> None:
        """A line on its stdin, if it still runs: a few bytes, for which there is always room."""
        with contextlib.suppress(OSError):
            os.write(self._stdin, word + b"\n")

    async def end_within(self, seconds: float) -> None:
        """Wait for its end, which has been asked for; SIGKILL when it has not come in time."""
        self.until_s = time.monotonic() + seconds
        try:
            await asyncio.wait_for(self._process.wait(), seconds)
        except TimeoutError:
            log.warning("event=child_killed child=%s pid=%d", self.name, self.pid)
            self.signal(signal.SIGKILL)
            await self._process.wait()

    async def stop(self, timeout_s: float) -> None:
        """SIGTERM, then SIGKILL when it has not ended in time."""
        self.signal(signal.SIGTERM)
        await self.end_within(timeout_s)


class _Adopted:
    """A child of this process from before its program was replaced: asyncio knows nothing of it."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._status: int | None = None
        self._look()

    @property
    def pid(self) -> int:
        return self._pid

    async def wait(self) -> int:
        # Looking now and then costs a system call, and no file descriptor of a process, which kernels
        # before 5.3 do not have.
        while self._status is None:
            await asyncio.sleep(LOOK_S)
            self._look()
        return self._status

    def send_signal(self, signal: int) -> None:
        self._look()
        if self._status is None:
            os.kill(self._pid, signal)

    def _look(self) -> None:
        """Bury it, if it has ended. Until then its number is nobody else's."""
        if self._status is not None:
            return
        try:
            pid, status = os.waitpid(self._pid, os.WNOHANG)
        except ChildProcessError:  # it was buried just before the change
            pid, status = self._pid, 0
        if pid:
            self._status = os.waitstatus_to_exitcode(status)

"""One child process: started with a line on its stdin, ready when it says so, ended when asked."""

import asyncio
import contextlib
import logging
import signal
import sys
from collections.abc import Sequence

__all__ = ["Child"]

READY_S = 30.0

log = logging.getLogger(__name__)


class Child:
    """A running child. Its stdin stays open while we live: when it closes, the child ends by itself."""

    def __init__(self, name: str, process: asyncio.subprocess.Process) -> None:
        self.name = name
        self._process = process

    @classmethod
    async def start(cls, name: str, module: str, line: bytes, fds: Sequence[int]) -> "Child":
        """Run `python -m module`, hand it `line`, let it inherit `fds`."""
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-P",  # whatever lies in the current folder is none of our modules
            "-m",
            module,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            pass_fds=fds,
        )
        assert process.stdin is not None
        with contextlib.suppress(ConnectionError):
            process.stdin.write(line + b"\n")
            await process.stdin.drain()
        return cls(name, process)

    @property
    def pid(self) -> int:
        return self._process.pid

    async def ready(self) -> bool:
        """Wait until the child says it is ready; False when it ends or takes too long instead."""
        assert self._process.stdout is not None
        try:
            line = await asyncio.wait_for(self._process.stdout.readline(), READY_S)
        except TimeoutError:
            return False
        return line == b"ready\n"

    async def wait(self) -> int:
        """The exit status, once there is one."""
        return await self._process.wait()

    def signal(self, number: signal.Signals) -> None:
        """Send a signal, if it still runs."""
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(number)

    async def stop(self, timeout_s: float) -> None:
        """SIGTERM, then SIGKILL when it has not ended in time."""
        self.signal(signal.SIGTERM)
        try:
            await asyncio.wait_for(self._process.wait(), timeout_s)
        except TimeoutError:
            log.warning("event=child_killed child=%s pid=%d", self.name, self.pid)
            self.signal(signal.SIGKILL)
            await self._process.wait()

"""One sending process of a crew, wherever it runs: started, told, heard, and its end.

Here the one that runs beside us; `ray_member.py` has the one on a node of a cluster.
"""

import asyncio
import contextlib
import subprocess
import sys
import tempfile
from typing import BinaryIO, Final, Protocol

import msgspec

from llmtap.errors import LlmtapError
from llmtap.load.workers.host_clock import HostClock
from llmtap.load.workers.messages import WorkerScript, WorkerSetup
from llmtap.units import encode_special

__all__ = ["LocalMember", "Member", "wired"]

LEAD_NS: Final = 100_000_000
"""From the word to the start: time for all to hear it."""
_READ_BYTES: Final = 1 << 18


class Member(Protocol):
    """A sending process. Only `start` raises: LlmtapError, where there is none."""

    lead_ns: int
    """How long before the start it has to be told."""
    spill_error: str | None
    """Why what it had put aside is not all there."""

    @property
    def pid(self) -> int | None:
        """Of the process, on its own host; None before it was started."""
        ...

    @property
    def clock(self) -> HostClock:
        """Its host's; from the start on."""
        ...

    async def start(self, setup: WorkerSetup, script: WorkerScript, spill: BinaryIO | None) -> None:
        """Start it. What it puts aside is in `spill` when it has ended."""
        ...

    def tell(self, words: str) -> None:
        """Say a line to it; nothing where it has ended."""
        ...

    async def read(self) -> bytes:
        """What it says next; b"" when it says no more."""
        ...

    async def ended(self) -> int | None:
        """Its exit status, a signal's number below 0; None where its host was lost with it."""
        ...

    async def kill(self) -> None:
        """Nothing of it is left afterwards."""
        ...


def wired(setup: WorkerSetup, script_fd: int, bodies_fd: int, spill_fd: int | None) -> bytes:
    """The first line that a process is told, with its own descriptors."""
    own = msgspec.structs.replace(setup, script_fd=script_fd, bodies_fd=bodies_fd, spill_fd=spill_fd)
    return msgspec.json.encode(own, enc_hook=encode_special)


class LocalMember:
    """A process of this host."""

    lead_ns = LEAD_NS
    spill_error: str | None = None

    def __init__(self) -> None:
        self.clock = HostClock.of_this_host()
        self._proc: subprocess.Popen[bytes] | None = None
        self._said: asyncio.StreamReader | None = None
        self._pipe: asyncio.ReadTransport | None = None

    @property
    def pid(self) -> int | None:
        return None if self._proc is None else self._proc.pid

    async def start(self, setup: WorkerSetup, script: WorkerScript, spill: BinaryIO | None) -> None:
        spill_fd = None if spill is None else spill.fileno()
        with tempfile.TemporaryFile() as file:
            file.write(msgspec.msgpack.encode(script))
            file.flush()
            line = wired(setup, file.fileno(), setup.bodies_fd, spill_fd)
            fds = [file.fileno(), setup.bodies_fd, *([] if spill_fd is None else [spill_fd])]
            try:
                # Not by the loop: uvloop runs Python between fork and exec, which hangs where other threads
                # were at work (gRPC's, NumPy's).
                self._proc = subprocess.Popen(  # noqa: ASYNC220 (a few ms, before anything is due)
                    [sys.executable, "-m", "llmtap.load"], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                    pass_fds=fds, bufsize=0,
                )  # fmt: skip
            except OSError as exc:
                raise LlmtapError(f"no sending process can be started: {exc.strerror}") from None
        loop = asyncio.get_running_loop()
        said = self._said = asyncio.StreamReader(limit=_READ_BYTES)
        self._pipe, _ = await loop.connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(said), self._proc.stdout
        )
        self.tell(line.decode())

    def tell(self, words: str) -> None:
        stdin = None if self._proc is None else self._proc.stdin
        if stdin is not None and not stdin.closed:
            # A pipe holds 64 KiB; the first line is the longest, and it is read at once.
            with contextlib.suppress(BrokenPipeError):
                stdin.write(words.encode() + b"\n")

    async def read(self) -> bytes:
        assert self._said is not None
        return await self._said.read(_READ_BYTES)

    async def ended(self) -> int | None:
        assert self._proc is not None
        return await asyncio.get_running_loop().run_in_executor(None, self._proc.wait)

    async def kill(self) -> None:
        if self._proc is None:
            return
        if self._proc.poll() is None:
            self._proc.kill()
        await self.ended()
        if self._pipe is not None:
            self._pipe.close()
        if self._proc.stdin is not None:
            self._proc.stdin.close()

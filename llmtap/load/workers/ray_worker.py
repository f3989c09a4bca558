"""Run a sending process on a node of a Ray cluster: an actor there forwards its commands and output.

`RayMember` is the parent's side, used by `worker_pool.py` like a local process; `RemoteProcess` is the actor
on the node, which starts `worker.py` there. Each node gets all bodies; exchanges are fetched after the run.
If an actor is lost, its process ends and is not restarted. Ray sends prompts and API keys unencrypted unless
RAY_USE_TLS is set.
"""

import asyncio
import contextlib
import os
import socket
import subprocess
import tempfile
import threading
from typing import Any, BinaryIO, Final

import msgspec

import llmtap
from llmtap.clock import Clock, SystemClock
from llmtap.errors import ConfigError, LlmtapError
from llmtap.load.workers.worker_handle import (
    ClockReading,
    HostClock,
    Trip,
    WorkerScript,
    WorkerSetup,
    read_clocks,
    spawn_worker,
)
from llmtap.units import decode_special, encode_special

LEAD_NS: Final = 1_000_000_000
"""Time from the command `go` to the start of the run: a call to a node takes 1 ms, or 20 ms on a busy one."""
STARTED_WITHIN_S: Final = 120
"""Maximum time to wait for the actor: the node needs a free CPU, and possibly loads llmtap first."""
CLOSED_WITHIN_S: Final = 5
TRIPS: Final = 30
"""Number of round trips to a node; the offset of the node's clock is computed from the fastest one."""
PIECE_BYTES: Final = 8 << 20
_READ_BYTES: Final = 1 << 18
_CALLS: Final = 4
"""Maximum number of concurrent calls of an actor, such as read, send_commands and kill."""


class RemoteProcess:
    """Ray actor that starts the sending process on its node; the methods of the actor run in threads."""

    def __init__(self) -> None:
        self._bodies = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115 (the file ends with the actor)
        """File of the request bodies, which the process reads."""
        self._spill = tempfile.TemporaryFile()  # noqa: SIM115
        """File of the finished exchanges, which the parent reads at the end."""
        self._process: subprocess.Popen[bytes] | None = None
        self._command_lock = threading.Lock()
        self._commands_sent = 0
        """Number of commands that the process got: a call with all commands can come twice."""

    def describe_node(self) -> tuple[str, ClockReading]:
        return llmtap.__version__, read_clocks()

    def add_bodies(self, piece: bytes) -> None:
        self._bodies.write(piece)

    def start(self, setup: bytes, script: bytes, keep: bool) -> int:
        own = msgspec.json.decode(setup, type=WorkerSetup, dec_hook=decode_special)
        spill_fd = self._spill.fileno() if keep else None
        self._process = spawn_worker(own, script, self._bodies.fileno(), spill_fd)
        return self._process.pid

    def send_commands(self, commands: list[str]) -> None:
        """Send the new commands. Each call has all commands so far, because calls can arrive out of order."""
        with self._command_lock:
            for command in commands[self._commands_sent :]:
                self._write_line(command.encode())
            self._commands_sent = max(self._commands_sent, len(commands))

    def read(self) -> bytes:
        assert self._process is not None and self._process.stdout is not None
        return os.read(self._process.stdout.fileno(), _READ_BYTES)

    def wait_end(self) -> int:
        assert self._process is not None
        return self._process.wait()

    def read_spill(self, begin: int) -> bytes:
        return os.pread(self._spill.fileno(), PIECE_BYTES, begin)

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def _write_line(self, line: bytes) -> None:
        assert self._process is not None and self._process.stdin is not None
        # A broken pipe means that the process has ended; the call that reads its output reports this.
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(line + b"\n")


class RayMember:
    """A sending process on a node of a Ray cluster, used like a `LocalMember`."""

    lead_ns = LEAD_NS

    def __init__(self, ray: Any, clock: Clock | None = None) -> None:
        self._ray = ray
        """Python module `ray`."""
        self._clock = SystemClock() if clock is None else clock
        self._actor: Any = None
        """Handle of the `RemoteProcess` on the node."""
        self._commands: list[str] = []
        """All commands so far: each call sends all, because calls can change their order."""
        self._spill: BinaryIO | None = None
        """Local copy of the finished exchanges; None: they are not stored."""
        self.clock = HostClock(socket.gethostname())
        self.pid: int | None = None
        self.spill_error: str | None = None
        """Why the exchanges could not be stored; None: they are."""

    async def start(self, setup: WorkerSetup, script: WorkerScript, spill: BinaryIO | None) -> None:
        """Start the process, as `LocalMember.start` does.

        Raises ConfigError if the cluster has no free CPU, or another version of llmtap.
        """
        if setup.load.target.ca is not None:
            raise ConfigError(
                "--ca",
                "cannot be combined with --ray",
                "each node of Ray trusts the CAs of its own system: add the CA there",
            )
        self._spill = spill
        # SPREAD uses as many nodes as possible.
        self._actor = (
            self._ray.remote(RemoteProcess)
            .options(num_cpus=1, max_concurrency=_CALLS, max_restarts=0, scheduling_strategy="SPREAD")
            .remote()
        )
        try:
            version, reading = await asyncio.wait_for(self._call_actor("describe_node"), STARTED_WITHIN_S)
            if version != llmtap.__version__:
                raise ConfigError(
                    "--ray",
                    f"the node {reading.host} has llmtap {version}, this machine has {llmtap.__version__}",
                    "install the same version on all nodes",
                )
            # Measure the clock in a thread: on the loop, other tasks could make the round trip longer.
            self.clock = await asyncio.get_running_loop().run_in_executor(None, self._measure_clock)
            offset = 0
            while piece := os.pread(setup.bodies_fd, PIECE_BYTES, offset):
                await self._call_actor("add_bodies", piece)
                offset += len(piece)
            line = msgspec.json.encode(setup, enc_hook=encode_special)
            packed = msgspec.msgpack.encode(script)
            self.pid = await self._call_actor("start", line, packed, spill is not None)
        except TimeoutError:
            raise ConfigError(
                "--ray",
                f"no node had a CPU for a sending process within {STARTED_WITHIN_S} s",
                "use fewer --processes",
            ) from None
        except self._ray.exceptions.RayError as exc:
            reason = f"{_last_line(exc)}; check that llmtap is installed on it"
            raise LlmtapError(f"a node of --ray cannot run a sending process: {reason}") from None

    def send_command(self, command: str) -> None:
        self._commands.append(command)
        self._actor.send_commands.remote(list(self._commands))

    async def read(self) -> bytes:
        try:
            data: bytes = await self._call_actor("read")
        except self._ray.exceptions.RayError:
            return b""
        return data

    async def wait_end(self) -> int | None:
        try:
            status: int = await self._call_actor("wait_end")
            await self._fetch_spill()
        except self._ray.exceptions.RayError as exc:
            self.spill_error = f"the node of the process was lost: {_last_line(exc)}"
            return None
        return status

    async def kill(self) -> None:
        if self._actor is None:
            return
        actor, self._actor = self._actor, None
        with contextlib.suppress(self._ray.exceptions.RayError, TimeoutError):
            if self.pid is not None:
                await asyncio.wait_for(_result_of(actor.kill.remote()), CLOSED_WITHIN_S)
        self._ray.kill(actor)

    async def _call_actor(self, name: str, *args: Any) -> Any:
        return await _result_of(getattr(self._actor, name).remote(*args))

    def _measure_clock(self) -> HostClock:
        trips: list[Trip] = []
        for _ in range(TRIPS):
            request_ns = self._clock.mono_ns()
            reading = self._ray.get(self._actor.describe_node.remote())[1]
            trips.append((request_ns, self._clock.mono_ns(), reading))
        return HostClock.from_trips(read_clocks(self._clock), trips)

    async def _fetch_spill(self) -> None:
        if self._spill is None:
            return
        try:
            while piece := await self._call_actor("read_spill", self._spill.tell()):
                self._spill.write(piece)
        except OSError as exc:
            self.spill_error = exc.strerror


async def _result_of(ref: Any) -> Any:
    return await asyncio.wrap_future(ref.future())


def _last_line(exc: BaseException) -> str:
    return str(exc).strip().splitlines()[-1].strip()

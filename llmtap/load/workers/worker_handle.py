"""Parent's side of one sending process: the process, its messages, and the clock of its host.

`LocalMember` is a process on this machine; `RayMember` (`ray_worker.py`) is a process on another machine. The
setup, the rows and the reports of a process are defined here and are also used by `worker.py`; commands are
lines of text. `HostClock` converts the times of another host to times of this host. `worker_pool.py` controls
several processes.
"""

import asyncio
import contextlib
import os
import socket
import struct
import subprocess
import sys
import tempfile
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import BinaryIO, Final

import msgspec

from llmtap.clock import Clock, SystemClock, WallAnchor
from llmtap.errors import LlmtapError
from llmtap.exchange.exchange import Exchange, Timeline
from llmtap.load.options import LoadPlan
from llmtap.units import encode_special, to_seconds

_LENGTH: Final = struct.Struct("<I")


class WorkerSetup(msgspec.Struct, kw_only=True):
    """Configuration of a sending process: sent in a file, because headers can contain API keys."""

    load: LoadPlan
    """Options of the load; `closed` is the number of requests in flight of this process alone."""
    name: str = "load"
    """Name of the process, a part of the exchanges' ids."""
    exact_output: bool = False
    """For Realtime and gRPC: request exactly the planned number of tokens. HTTP bodies have fields for it."""
    bodies_fd: int
    """Descriptor of the file with the request bodies."""
    spill_fd: int | None
    """File for the exchanges; None: they are not stored."""
    open: int = 0
    """Number of connections opened before the start."""
    check_endpoint: bool = False
    """Whether to stop if the first answers show that the target lacks the endpoint or rejects the key."""

    @property
    def headers(self) -> list[tuple[bytes, bytes]]:
        return [(name.encode(), value.encode()) for name, value in self.load.target.headers]

    @property
    def endpoint(self) -> str:
        """Endpoint or path of the requests."""
        return self.load.target.path or self.load.bodies.endpoint


class WorkerScript(msgspec.Struct, array_like=True):
    """Rows of one sending process. Each column has the values of all rows of the load, as bytes of int64."""

    rows: bytes
    """Numbers of the rows that this process sends."""
    arrival_ns: bytes
    after: bytes
    """Row after whose end each row is sent; -1: it waits for none."""
    think_ns: bytes
    """Pause of each row after the end of that row."""
    tenants: list[str]
    """Tenant of each row; empty without tenants."""
    body_begins: bytes
    """Start of each row's body in the file of bodies; `body_ends` has the ends."""
    body_ends: bytes
    """End of each row's body in the file of bodies."""
    joins: dict[int, tuple[int, ...]] = {}
    """For each row that waits for several rows: the rows in addition to the one in `after`."""
    paths: list[str] = []
    """Path of each row, "" for the path of the endpoint; the list is empty if all rows have this path."""
    labels: list[str | None] = []
    """Label of each row (`exchange/label.py`); None: it has none. The list is empty if no row has a label."""


class WorkerReady(msgspec.Struct, tag=True):
    """Report that connections are open and bodies are available, so that the parent can send `go`."""

    connections: int


class Progress(msgspec.Struct, tag=True):
    """Counts since the start of the run, and times in ns of the latest exchanges and gaps."""

    sent: int
    under_way: int
    """Number of requests in flight; `left`: number of requests that were not sent yet."""
    ended: int
    """Number of requests that have ended."""
    failed: int
    left: int
    """Number of requests that were not sent yet."""
    tokens: int
    lateness_p99_ns: float | None
    """P99 of the delays after the scheduled times."""
    ttft_p50_ns: float | None
    ttft_p99_ns: float | None
    tbc_p50_ns: float | None
    tbc_p99_ns: float | None
    retries: int = 0
    give_up_reason: str | None = None
    """Reason why all processes must stop, such as too many errors; None if they need not stop."""
    waiting: int = 0
    """Number of requests that wait for their first token."""


class WorkerDone(msgspec.Struct, tag=True):
    """Last report of a sending process."""

    tally: bytes
    """Packed counts of the process (`LoadTally`)."""
    stopped: str | None
    """Why the load ended early; None: it ended as planned."""
    connects: int
    """Number of connections that were opened."""
    reuses: int
    """Number of requests on an open connection."""
    cpu_ns: int
    rss_bytes: int
    """Largest resident memory during the run."""
    lag_max_ns: int
    """Largest delay of the event loop."""
    began_ns: int
    ended_ns: int
    spill_error: str | None = None
    """Reason why exchanges could not be stored, such as a full disk. The counts still include them."""
    opened_before: int = 0
    """Number of connections opened before the start; the parent sets it."""


_encode = msgspec.msgpack.Encoder(enc_hook=encode_special).encode
_decode = msgspec.msgpack.Decoder(WorkerReady | Progress | WorkerDone).decode


def frame(message: WorkerReady | Progress | WorkerDone) -> bytes:
    """Encode a message with its length before it."""
    packed = _encode(message)
    return _LENGTH.pack(len(packed)) + packed


class FrameDecoder:
    """Parser of the messages of a sending process."""

    def __init__(self) -> None:
        self._unread_bytes = bytearray()

    def feed(self, data: bytes) -> Iterator[WorkerReady | Progress | WorkerDone]:
        rest = self._unread_bytes
        rest += data
        while len(rest) >= 4:
            end = 4 + _LENGTH.unpack_from(rest)[0]
            if end > len(rest):
                break
            packed = bytes(rest[4:end])
            del rest[:end]
            yield _decode(packed)


_TIMES: Final = tuple(f.name for f in fields(Timeline) if f.name.endswith("_ns") and f.name != "paused_ns")
"""Fields of a Timeline that are times; `paused_ns` is a duration, which needs no conversion."""


@dataclass(frozen=True, slots=True)
class ClockReading:
    """Monotonic and wall clock of a host at one moment."""

    host: str
    boot: str
    """Identifier of the monotonic clock: equal in two processes that share it; empty if unknown."""
    mono_ns: int
    wall_ns: int


Trip = tuple[int, int, ClockReading]
"""Times of a request and of its answer on this host's monotonic clock, and the reading in the answer."""


def read_clocks(clock: Clock | None = None) -> ClockReading:
    anchor = WallAnchor.sample(SystemClock() if clock is None else clock)
    return ClockReading(socket.gethostname(), _boot_id(), anchor.mono_ns, anchor.wall_ns)


@dataclass(frozen=True, slots=True)
class HostClock:
    """Offset of a host's clocks from those of this process; converts times between the two hosts."""

    host: str
    shared: bool = True
    """Whether the host has the same monotonic clock as this process."""
    mono_ahead_ns: int = 0
    """Time of the host's monotonic clock minus that of this process."""
    wall_ahead_ns: int = 0
    """Wall clock of the host minus that of this process."""
    rtt_ns: int = 0
    """Round-trip time of the comparison: the error of both offsets is at most half of it."""

    @classmethod
    def from_trips(cls, local: ClockReading, trips: Sequence[Trip]) -> "HostClock":
        """Return the clock of a host, computed from the fastest of several round trips to it.

        Hosts with the same boot id count as different if their clocks differ by more than the round trip.
        """
        request_ns, answer_ns, reading = min(trips, key=lambda trip: trip[1] - trip[0])
        at_ns, rtt_ns = (request_ns + answer_ns) // 2, answer_ns - request_ns
        mono_ahead_ns = reading.mono_ns - at_ns
        if local.boot and local.boot == reading.boot and abs(mono_ahead_ns) <= rtt_ns:
            return cls(reading.host, rtt_ns=rtt_ns)
        wall_ahead_ns = reading.wall_ns - (local.wall_ns + at_ns - local.mono_ns)
        return cls(reading.host, False, mono_ahead_ns, wall_ahead_ns, rtt_ns)

    def to_host_ns(self, local_ns: int) -> int:
        return local_ns + self.mono_ahead_ns

    def to_local_ns(self, host_ns: int) -> int:
        return host_ns - self.mono_ahead_ns

    def convert(self, x: Exchange) -> Exchange:
        """Convert all times of an exchange to the clocks of this host."""
        if self.shared:
            return x
        t = x.timeline
        for name in _TIMES:
            ns = getattr(t, name)
            if ns is not None:
                setattr(t, name, self.to_local_ns(ns))
        t.events.t_ns = array("q", map(self.to_local_ns, t.events.t_ns))
        if x.scheduled_ns is not None:
            x.scheduled_ns = self.to_local_ns(x.scheduled_ns)
        x.arrival_wall_ns -= self.wall_ahead_ns
        return x

    def to_dict(self) -> dict[str, object]:
        """Return public JSON in seconds.

        `rtt`: round-trip time of the comparison, which has an error of up to half of it. `offset`: offset of
        the wall clock; all reported times are corrected for it.
        """
        return {
            "host": self.host,
            "shared": self.shared,
            "offset": to_seconds(self.wall_ahead_ns),
            "rtt": to_seconds(self.rtt_ns),
        }


def _boot_id() -> str:
    """Return the boot id of the kernel and the time namespace (Linux); empty if unknown."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text("ascii").strip()
        # Add the namespace: a container can have its own monotonic clock (time_namespaces(7)).
        return f"{boot} {os.readlink('/proc/self/ns/time')}"
    except OSError:
        return ""


LEAD_NS: Final = 100_000_000
"""Time from the command `go` to the start of the run, so that every process gets the command in time."""
_READ_BYTES: Final = 1 << 18


def spawn_worker(
    setup: WorkerSetup, script: bytes, bodies_fd: int, spill_fd: int | None
) -> subprocess.Popen[bytes]:
    """Start a sending process. It reads its setup (a line of JSON) and the packed script from a file.

    Do not start it with the event loop: uvloop runs Python code between fork and exec, which can hang if
    other threads run.
    """
    own = msgspec.structs.replace(setup, bodies_fd=bodies_fd, spill_fd=spill_fd)
    with tempfile.TemporaryFile() as file:
        file.write(msgspec.json.encode(own, enc_hook=encode_special) + b"\n" + script)
        file.flush()
        fds = [file.fileno(), bodies_fd, *([] if spill_fd is None else [spill_fd])]
        return subprocess.Popen(
            [sys.executable, "-m", "llmtap.load.workers.worker", str(file.fileno())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            pass_fds=fds,
            bufsize=0,
        )


class LocalMember:
    """A sending process on this host. Only `start` raises LlmtapError."""

    lead_ns = LEAD_NS
    """Time from the command `go` to the start time that the command contains."""
    spill_error: str | None = None
    """Reason why the stored exchanges are incomplete; None if they are complete."""

    def __init__(self) -> None:
        self.clock = HostClock(socket.gethostname())
        self._proc: subprocess.Popen[bytes] | None = None
        self._output: asyncio.StreamReader | None = None
        """Messages of the process; None before its start."""
        self._pipe: asyncio.ReadTransport | None = None
        """Pipe from the process, closed at the end."""

    @property
    def pid(self) -> int | None:
        return None if self._proc is None else self._proc.pid

    async def start(self, setup: WorkerSetup, script: WorkerScript, spill: BinaryIO | None) -> None:
        """Start the process. After it has ended, `spill` contains its stored exchanges."""
        spill_fd = None if spill is None else spill.fileno()
        packed = msgspec.msgpack.encode(script)
        try:
            # This blocks the loop for a few ms, which is harmless: no request is due yet.
            self._proc = spawn_worker(setup, packed, setup.bodies_fd, spill_fd)
        except OSError as exc:
            raise LlmtapError(
                f"cannot start a sending process: {exc.strerror}; use fewer --processes, or raise the user's"
                " limits of processes, open files and memory (ulimit)"
            ) from None
        loop = asyncio.get_running_loop()
        output = self._output = asyncio.StreamReader(limit=_READ_BYTES)
        self._pipe, _ = await loop.connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(output), self._proc.stdout
        )

    def send_command(self, command: str) -> None:
        """Send a command line; this has no effect after the process has ended."""
        stdin = None if self._proc is None else self._proc.stdin
        if stdin is not None and not stdin.closed:
            with contextlib.suppress(BrokenPipeError):
                stdin.write(command.encode() + b"\n")

    async def read(self) -> bytes:
        """Return the next output of the process; b"" at the end."""
        assert self._output is not None
        return await self._output.read(_READ_BYTES)

    async def wait_end(self) -> int | None:
        """Wait for the end. Return the exit status, negative for a signal; None if the host was lost."""
        assert self._proc is not None
        return await asyncio.get_running_loop().run_in_executor(None, self._proc.wait)

    async def kill(self) -> None:
        if self._proc is None:
            return
        if self._proc.poll() is None:
            self._proc.kill()
        await self.wait_end()
        if self._pipe is not None:
            self._pipe.close()
        if self._proc.stdin is not None:
            self._proc.stdin.close()

"""One sending process of a crew, wherever it runs: started, told, heard, and its end.

Here the one that runs beside us; `ray_member.py` has the one on a node of a cluster.
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
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Final, Protocol

import msgspec

from llmtap.clock import Clock, SystemClock, WallAnchor
from llmtap.errors import LlmtapError
from llmtap.exchange.exchange import Exchange
from llmtap.load.http import SenderOptions
from llmtap.load.run import StopErrors
from llmtap.units import NEVER, encode_special, to_seconds

__all__ = [
    "ClockReading", "Compared", "Done", "Frames", "HostClock", "LocalMember", "Member", "Progress",
    "Trip", "WorkerReady", "WorkerScript", "WorkerSetup", "compared", "frame", "read_clocks", "wired",
]  # fmt: skip

_LENGTH: Final = struct.Struct("<I")


class WorkerSetup(msgspec.Struct, kw_only=True):
    """What a sending process needs to know. Headers may hold keys: they travel by pipe, by Ray to the nodes
    of its cluster, and nowhere else."""

    sender: SenderOptions
    url: str
    endpoint: str
    headers: list[tuple[str, str]] = []
    tenant_header: str | None = None
    exact_output: bool = False
    """Realtime, gRPC: answers are to have as many tokens as asked for. Bodies of HTTP say so themselves."""
    request_ids: str = ""
    """What each X-Request-Id begins with, before a hyphen and the row; empty: none is sent."""
    ca: str | None = None
    verify: bool = True
    script_fd: int
    bodies_fd: int
    spill_fd: int | None
    slots: int | None = None
    """Closed loop with so many; None: open loop."""
    open: int = 0
    """Connections to open before the start."""
    duration_ns: int = NEVER
    drain_ns: int = NEVER
    limit_in_flight: int | None = None
    """Open loop: a request that is due while so many are under way is skipped, and counted."""
    stop_errors: StopErrors | None = None
    slo: str | None = None
    priority: bool = False
    """Ask for real-time priority."""


class WorkerScript(msgspec.Struct, array_like=True):
    """The rows of one sender; columns are those of all rows, as bytes of int64."""

    rows: bytes
    arrival_ns: bytes
    after: bytes
    think_ns: bytes
    tenants: list[str]
    body_begins: bytes
    """Of each row, where its body begins and ends in the file of bodies."""
    body_ends: bytes


class WorkerReady(msgspec.Struct, tag=True):
    """Connections are open, bodies at hand: `go` may come."""

    connections: int


class Progress(msgspec.Struct, tag=True):
    """Now. Counts are since the start; times are ns, of the latest exchanges and of the latest gaps alone."""

    sent: int
    under_way: int
    ended: int
    failed: int
    left: int
    tokens: int
    lateness_p99_ns: float | None
    ttft_p50_ns: float | None
    ttft_p99_ns: float | None
    tbc_p50_ns: float | None
    tbc_p99_ns: float | None
    skipped: int = 0
    retries: int = 0
    gave_up: str | None = None
    """Why it sends no more, and nobody else should: too many errors."""


class Done(msgspec.Struct, tag=True):
    """The last word."""

    tally: bytes
    stopped: str | None
    connects: int
    reuses: int
    cpu_ns: int
    rss_bytes: int
    """Largest."""
    lag_max_ns: int
    began_ns: int
    ended_ns: int
    realtime: bool
    """It had real-time priority."""
    spill_error: str | None = None
    """Why exchanges could not be put aside any more (a full disk); they are counted all the same."""
    opened_before: int = 0
    """Of `connects`: those that stood when it was ready. Its parent fills this in."""


_encode = msgspec.msgpack.Encoder(enc_hook=encode_special).encode
_decode = msgspec.msgpack.Decoder(WorkerReady | Progress | Done).decode


def frame(message: WorkerReady | Progress | Done) -> bytes:
    """A message as it travels."""
    packed = _encode(message)
    return _LENGTH.pack(len(packed)) + packed


class Frames:
    """Puts messages together from whatever pieces come."""

    def __init__(self) -> None:
        self._rest = bytearray()

    def feed(self, data: bytes) -> Iterator[WorkerReady | Progress | Done]:
        """The messages that are complete with `data`."""
        rest = self._rest
        rest += data
        while len(rest) >= 4:
            end = 4 + _LENGTH.unpack_from(rest)[0]
            if end > len(rest):
                break
            packed = bytes(rest[4:end])
            del rest[:end]
            yield _decode(packed)


_MOVED: Final = (
    "arrival_ns", "request_end_ns", "submit_ns", "head_ns", "first_byte_ns", "first_any_ns", "first_token_ns",
    "first_reasoning_ns", "first_tool_call_ns", "first_refusal_ns", "first_content_ns", "last_token_ns",
    "response_end_ns", "delivered_ns",
)  # fmt: skip
"""Of a Timeline."""


@dataclass(frozen=True, slots=True)
class ClockReading:
    """Both clocks of a host at one moment."""

    host: str
    """Its name."""
    boot: str
    """The same of two processes: they read the same monotonic clock. Empty: nobody knows."""
    mono_ns: int
    wall_ns: int


@dataclass(frozen=True, slots=True)
class Trip:
    """A reading, and when we asked for it and heard it, by our monotonic clock."""

    asked_ns: int
    heard_ns: int
    reading: ClockReading


@dataclass(frozen=True, slots=True)
class Compared:
    """How far the clocks of another host are ahead of ours."""

    at_ns: int
    """When, by our monotonic clock."""
    mono_ahead_ns: int
    wall_ahead_ns: int
    rtt_ns: int
    """Both are right within half of it."""


def read_clocks(clock: Clock | None = None) -> ClockReading:
    """This host's."""
    anchor = WallAnchor.sample(SystemClock() if clock is None else clock)
    return ClockReading(socket.gethostname(), _boot(), anchor.mono_ns, anchor.wall_ns)


def compared(trips: Sequence[Trip], anchor: WallAnchor) -> Compared:
    """By the quickest of them; `anchor` is of our clocks."""
    best = min(trips, key=lambda trip: trip.heard_ns - trip.asked_ns)
    at_ns = (best.asked_ns + best.heard_ns) // 2
    return Compared(
        at_ns, best.reading.mono_ns - at_ns, best.reading.wall_ns - anchor.to_wall_ns(at_ns),
        best.heard_ns - best.asked_ns,
    )  # fmt: skip


class HostClock:
    """The monotonic clock of a host, and its times on our axis."""

    def __init__(self, host: str, before: Compared, *, shared: bool) -> None:
        """`shared`: its monotonic clock is ours."""
        self.host = host
        self.shared = shared
        self.before = before
        self.after: Compared | None = None
        """After the run."""

    @classmethod
    def of_this_host(cls) -> "HostClock":
        return cls(socket.gethostname(), Compared(0, 0, 0, 0), shared=True)

    @classmethod
    def met(cls, ours: ClockReading, theirs: ClockReading, before: Compared) -> "HostClock":
        """That of a host whose clocks were compared. Where both say they had the same boot and are further
        apart than the round trip allows, they are two all the same."""
        same = bool(ours.boot) and ours.boot == theirs.boot and abs(before.mono_ahead_ns) <= before.rtt_ns
        return cls(theirs.host, before, shared=same)

    def theirs(self, ours_ns: int) -> int:
        """Our time by their clock, as far as is known before the run."""
        return ours_ns if self.shared else ours_ns + self.before.mono_ahead_ns

    def ahead_ns(self, theirs_ns: int) -> int:
        """How far their clock was ahead of ours at a time of theirs."""
        before, after = self.before, self.after
        if self.shared:
            return 0
        if after is None or after.at_ns <= before.at_ns:
            return before.mono_ahead_ns
        drift_ns = after.mono_ahead_ns - before.mono_ahead_ns
        passed_ns = theirs_ns - before.mono_ahead_ns - before.at_ns
        return before.mono_ahead_ns + drift_ns * passed_ns // (after.at_ns - before.at_ns)

    def ours(self, theirs_ns: int) -> int:
        """Their time by our clock."""
        return theirs_ns - self.ahead_ns(theirs_ns)

    def place(self, x: Exchange) -> Exchange:
        """The exchange with its times on our axis; each by the same amount."""
        if self.shared:
            return x
        t = x.timeline
        ahead_ns = self.ahead_ns(t.arrival_ns)
        for name in _MOVED:
            ns = getattr(t, name)
            if ns is not None:
                setattr(t, name, ns - ahead_ns)
        t.events.t_ns = array("q", (ns - ahead_ns for ns in t.events.t_ns))
        if x.scheduled_ns is not None:
            x.scheduled_ns -= ahead_ns
        x.arrival_wall_ns -= self.before.wall_ahead_ns
        return x

    def to_dict(self) -> dict[str, Any]:
        """As public JSON, in seconds. `rtt`: the round trip by which it was compared, of the worse of both
        comparisons; they may be off by half of it. `offset`: how far its wall clock was ahead, which is what
        NTP is to keep below 10 ms; it is allowed for. `drift`: how much further its monotonic clock was ahead
        at the end; None where nobody looked."""
        after = self.after
        drift_ns = None if after is None else after.mono_ahead_ns - self.before.mono_ahead_ns
        return {
            "host": self.host,
            "shared": self.shared,
            "offset": to_seconds(self.before.wall_ahead_ns),
            "rtt": to_seconds(max(self.before.rtt_ns, 0 if after is None else after.rtt_ns)),
            "drift": None if drift_ns is None else 0.0 if self.shared else to_seconds(drift_ns),
        }


def _boot() -> str:
    """What kernel this is, since when it runs, and whose view of its clock we have: on Linux."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text("ascii").strip()
        # A container may have a monotonic clock of its own (time_namespaces(7)).
        return f"{boot} {os.readlink('/proc/self/ns/time')}"
    except OSError:
        return ""


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

"""What the parent of a run and its sending processes tell each other.

Down, on stdin: one line of JSON with the Setup, then lines: `go NS`, `stop WHY`, `cut WHY`. Up, on
stdout: frames of four bytes of length and msgpack. Progress is less than PIPE_BUF, so the pipe takes it whole
or, when the parent does not read, not at all: nobody's stall may delay a request.
"""

import struct
from collections.abc import Iterator
from typing import Final

import msgspec

from llmtap.load.error_limit import StopErrors
from llmtap.load.http.sender import SenderOptions
from llmtap.units import NEVER, encode_special

__all__ = ["Done", "Frames", "Progress", "WorkerReady", "WorkerScript", "WorkerSetup", "frame"]

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

"""Clocks whose wall time a test can set."""

import socket
import struct
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from llmtap.clock import SystemClock
from llmtap.net.stream import SO_TIMESTAMPNS

MS = 1_000_000
HOUR_NS = 3_600_000_000_000
STEPS_NS = (HOUR_NS, -HOUR_NS, 200 * MS, -200 * MS)
"""What a wall clock may be set by: more than any read waits, and less."""


@dataclass
class SettableClock:
    """The machine's clocks, the wall one off by `ahead_ns`."""

    ahead_ns: int = 0

    def mono_ns(self) -> int:
        return SystemClock.mono_ns()

    def wall_ns(self) -> int:
        return SystemClock.wall_ns() + self.ahead_ns


class KernelStamps:
    """In place of `llmtap.net.stream._TIMESPEC`: the kernel's stamps as on a machine with that wall clock."""

    def __init__(self, clock: SettableClock) -> None:
        self._clock = clock

    def unpack(self, data: bytes) -> tuple[int, int]:
        seconds, ns = struct.unpack("@ll", data)
        return divmod(seconds * 1_000_000_000 + ns + self._clock.ahead_ns, 1_000_000_000)


@contextmanager
def kernel_stamps() -> Iterator[None]:
    """Wait until the kernel stamps what arrives: Linux begins a moment after the first socket asks for it.

    Until then, and after the last such socket is closed, a packet gets the time at which it is read, which is
    later than the end of the call that sent it.
    """
    with socket.socket(type=socket.SOCK_DGRAM) as near, socket.socket(type=socket.SOCK_DGRAM) as far:
        near.bind(("127.0.0.1", 0))
        near.setsockopt(socket.SOL_SOCKET, SO_TIMESTAMPNS, 1)
        stamp_ns, sent_ns = 1, 0
        while stamp_ns > sent_ns:
            far.sendto(b"x", near.getsockname())
            sent_ns = time.time_ns()
            ((_, _, data),) = near.recvmsg(1, 64)[1]
            seconds, ns = struct.unpack("@ll", data)
            stamp_ns = seconds * 1_000_000_000 + ns
        yield

"""Clocks whose wall time a test can set."""

import struct
from dataclasses import dataclass

from llmtap.clock import SystemClock

__all__ = ["HOUR_NS", "STEPS_NS", "KernelStamps", "SettableClock"]

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

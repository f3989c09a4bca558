"""Clocks for measurements: real clocks (`SystemClock`, `AdapterClock`) and a clock that a caller moves.

This `ManualClock` is used in tests, and for recorded packets, whose file has their times. This module also
returns the resident memory of this process, which relays and the meter report together with their CPU time.
All code that measures reads time from these classes; only `native/reading.c` reads a clock itself. Durations
are measured with monotonic time: integer nanoseconds of CLOCK_MONOTONIC, which all processes of a host share.
Wall time is for dates. Only a WallAnchor converts monotonic time to wall time.
"""

import resource
import time
from dataclasses import dataclass
from typing import Protocol


class Clock(Protocol):
    """Source of timestamps, all in nanoseconds."""

    def mono_ns(self) -> int:
        """Return the time of CLOCK_MONOTONIC in nanoseconds."""
        ...

    def wall_ns(self) -> int:
        """Return the time of CLOCK_REALTIME in nanoseconds since 1970 UTC."""
        ...

    def thread_cpu_ns(self) -> int:
        """Return the CPU time that the calling thread has used, in nanoseconds."""
        ...


class SystemClock:
    """The clocks of this machine."""

    # Use the functions themselves as methods: this saves one of two calls (about 50 ns) for each timestamp.
    mono_ns = staticmethod(time.monotonic_ns)
    wall_ns = staticmethod(time.time_ns)
    thread_cpu_ns = staticmethod(time.thread_time_ns)


class AdapterClock:
    """The clocks of this machine, with the clock of a network card (which stamps packets) as the wall clock.

    Args:
        fd: file descriptor of the network card's /dev/ptpN.
    """

    mono_ns = staticmethod(time.monotonic_ns)
    thread_cpu_ns = staticmethod(time.thread_time_ns)

    def __init__(self, fd: int) -> None:
        # The clock id of an open device: FD_TO_CLOCKID of linux/posix-timers.h.
        self._clock_id = ~fd << 3 | 3

    def wall_ns(self) -> int:
        return time.clock_gettime_ns(self._clock_id)


@dataclass(slots=True)
class ManualClock:
    """A clock that moves forward only by `advance`."""

    now_ns: int = 0
    wall_offset_ns: int = 1_700_000_000_000_000_000
    """Wall time minus monotonic time."""
    cpu_ns: int = 0

    def mono_ns(self) -> int:
        return self.now_ns

    def wall_ns(self) -> int:
        return self.now_ns + self.wall_offset_ns

    def thread_cpu_ns(self) -> int:
        return self.cpu_ns

    def advance(self, delta_ns: int) -> None:
        assert delta_ns >= 0, "time does not go back"
        self.now_ns += delta_ns


@dataclass(frozen=True, slots=True)
class WallAnchor:
    """Readings of the monotonic and the wall clock at the same time, to convert monotonic to wall time."""

    mono_ns: int
    wall_ns: int
    width_ns: int
    """Time between the monotonic readings before and after the wall reading: the largest possible error."""

    @classmethod
    def sample(cls, clock: Clock, tries: int = 5) -> "WallAnchor":
        """Return the anchor with the smallest `width_ns` of several tries."""
        best: WallAnchor | None = None
        for _ in range(tries):
            before = clock.mono_ns()
            wall = clock.wall_ns()
            after = clock.mono_ns()
            if best is None or after - before < best.width_ns:
                best = cls((before + after) // 2, wall, after - before)
        assert best is not None
        return best

    def to_wall_ns(self, mono_ns: int) -> int:
        return self.wall_ns + (mono_ns - self.mono_ns)


def resident_bytes() -> int:
    """Return the resident memory of this process in bytes, or its peak where /proc does not exist."""
    try:
        with open("/proc/self/statm", "rb") as statm:
            return int(statm.read().split()[1]) * resource.getpagesize()
    except OSError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # getrusage(2): ru_maxrss is in KiB.

"""The clocks of another host against ours, so that a load sent by several has one start and one time axis.

Monotonic clocks count from each host's own boot. A reading of the other's clock, asked for and heard, is
right within half of the round trip (Cristian's algorithm: it was taken somewhere in between), so the quickest
of a few is used, before the run and again after it: between the two, whatever the clocks drift apart is taken
to be even. Whole exchanges are moved, so that no latency changes.

Between processes of one host there is nothing to measure: they share one monotonic clock, to the ns.

Source: F. Cristian, Probabilistic clock synchronization (1989); IETF seed 000, 4.7: what synchronises the
clocks of a distributed test, and how well, is told with it.
"""

import os
import socket
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from llmtap.clock import Clock, SystemClock, WallAnchor
from llmtap.exchange.exchange import Exchange
from llmtap.units import to_seconds

__all__ = ["ClockReading", "Compared", "HostClock", "Trip", "compared", "read_clocks"]

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

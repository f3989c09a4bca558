"""Record event-loop lags: the times that bytes waited in the kernel before this process read them.

A lag meter does not measure: its owner passes the lateness of a timer or, with the kernel's timestamps,
the waiting time of each read (`note`). The worst lag during an exchange (`worst_since`) bounds the error of
its timestamps. `make_lag_meter` chooses the compiled implementation or the Python one.
"""

from bisect import bisect_left
from collections import deque
from typing import Final

from llmtap import native
from llmtap.channel.status import LAG_EDGES_NS

PEAKS_MAX: Final = 4_096
"""Maximum number of peaks remembered; beyond it the two oldest become one, which can only make a reported lag
longer."""


class PythonLagMeter:
    """Event-loop lags of one process, in ns; the reference of the compiled one.

    `buckets`: number of lags in each bucket of LAG_EDGES_NS, and beyond; `max_ns`: worst since `take_max`.
    """

    __slots__ = ("_blind_ns", "_floor_ns", "_peaks", "_turns", "buckets", "max_ns", "sum_ns")

    def __init__(self, floor_ns: int, *, blind_ns: int = 0, turns: int = 1) -> None:
        self._turns = turns
        """Number of turns of the loop that a read can wait."""
        self._blind_ns = blind_ns
        """Delay that the probes cannot see, added to each result."""
        self._floor_ns = floor_ns
        """Smallest result: lags up to this value are not stored."""
        self.buckets = [0] * (len(LAG_EDGES_NS) + 1)
        self.sum_ns = 0
        """Sum of all lags."""
        self.max_ns = 0
        # Entries (time, lag) with falling lags: the first entry after a time has the longest lag since then.
        self._peaks: deque[tuple[int, int]] = deque()
        """Times and sizes of lags to which no later one is larger."""

    def note(self, t_ns: int, lag_ns: int) -> None:
        """Record an event that was due at `t_ns - lag_ns` and handled at `t_ns`."""
        self.buckets[bisect_left(LAG_EDGES_NS, lag_ns)] += 1
        self.sum_ns += lag_ns
        if lag_ns > self.max_ns:
            self.max_ns = lag_ns
        if lag_ns > self._floor_ns:
            peaks = self._peaks
            while peaks and peaks[-1][1] <= lag_ns:
                peaks.pop()
            peaks.append((t_ns, lag_ns))
            if len(peaks) > PEAKS_MAX:
                _, lag_old = peaks.popleft()
                peaks[0] = (peaks[0][0], lag_old)

    def worst_since(self, t_ns: int) -> int:
        """Return the worst lag recorded at or after `t_ns`; at least the `floor_ns` of this meter."""
        first = bisect_left(self._peaks, (t_ns,))
        worst = self._peaks[first][1] * self._turns if first < len(self._peaks) else self._floor_ns
        return worst + self._blind_ns

    def forget_before(self, t_ns: int) -> None:
        """Drop older peaks: no open exchange began before `t_ns`."""
        peaks = self._peaks
        while len(peaks) > 1 and peaks[0][0] < t_ns:
            peaks.popleft()

    def take_max(self) -> int:
        """Return the worst lag since the last call."""
        worst, self.max_ns = self.max_ns, 0
        return worst


def make_lag_meter(floor_ns: int, *, blind_ns: int = 0, turns: int = 1) -> PythonLagMeter:
    """Make a meter for one process.

    Args:
        floor_ns: minimum lag (a timer's resolution, the error of a clock's mapping).
        blind_ns: part of a stall that two probes can miss; added to each worst lag.
        turns: factor of each worst lag, because a byte can wait longer than a timer: a byte that comes when
        one turn of the loop begins is possibly read at the end of the next turn.
    """
    kind: type[PythonLagMeter] = PythonLagMeter if native.compiled is None else native.compiled.LagMeter
    return kind(floor_ns, blind_ns=blind_ns, turns=turns)

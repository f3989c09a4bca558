"""Rolling windows that cost nothing per event: time is cut into slices, and slices are merged on reading.

A slice holds one Summary for each tenant, model and arm. The newest slice is written; older ones are
sealed and never change again, so that a reader may merge them in another thread. What leaves the window
goes into the totals since the start.
"""

from collections import deque
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Final

from llmtap.clock import Clock, WallAnchor
from llmtap.metrics.latency import Measured
from llmtap.metrics.summary import Summary
from llmtap.record.exchange import Exchange
from llmtap.units import NS_PER_S

__all__ = ["FrozenWindow", "Windows", "window_name"]

SLICES: Final = 12
"""Slices of a window: it moves in steps of 1/12 of its length (5 s of a minute)."""

Who = tuple[str, str, str | None]
"""Tenant, model, arm."""


@dataclass(slots=True)
class _Slice:
    start_ns: int
    opened: int = 0
    """Exchanges begun, and below how late the relays ran: what belongs to no tenant."""
    lag_ns: int = 0
    parts: dict[Who, Summary] = field(default_factory=dict)


class Windows:
    """The last `window_ns`, and everything since the start."""

    def __init__(self, window_ns: int, clock: Clock) -> None:
        self.window_ns = window_ns
        self._slice_ns = window_ns // SLICES
        self._clock = clock
        self._anchor = WallAnchor.sample(clock)
        self._start_ns = clock.mono_ns()
        self._now = _Slice(self._start_ns)
        self._sealed: deque[_Slice] = deque()
        self._old = _Slice(self._start_ns)
        """The sum of all slices that left the window."""

    def add(self, x: Exchange, m: Measured, tenant: str, model: str) -> None:
        """Counts an exchange that ended just now."""
        current = self._current()
        who = (tenant, model, x.arm)
        summary = current.parts.get(who)
        if summary is None:
            summary = current.parts[who] = Summary()
        summary.add(x, m)

    def opened(self) -> None:
        """An exchange began just now."""
        self._current().opened += 1

    def lagged(self, lag_ns: int) -> None:
        """A relay's event loop ran this late."""
        current = self._current()
        current.lag_ns = max(current.lag_ns, lag_ns)

    def smooth_goodput(self) -> float | None:
        """Tokens per second of the window; None before any stream ended in it."""
        current = self._current()
        summaries = [s for piece in (*self._sealed, current) for s in piece.parts.values()]
        span_ns = self._clock.mono_ns() - self._window_start_ns()
        if span_ns <= 0 or not any(s.benefit_n for s in summaries):
            return None
        return sum(s.benefit for s in summaries) / (span_ns / NS_PER_S)

    def freeze(self, everything: bool = False) -> "FrozenWindow":
        """What the window (or, with `everything`, the time since the start) holds now."""
        current = self._current()
        pieces = [*self._sealed, _copy(current)]
        start_ns = self._window_start_ns()
        if everything:
            pieces.append(_copy(self._old))
            start_ns = self._start_ns
        return FrozenWindow(
            name="all" if everything else window_name(self.window_ns),
            start=self._date(start_ns),
            end=self._date(self._clock.mono_ns()),
            seconds=(self._clock.mono_ns() - start_ns) / NS_PER_S,
            pieces=pieces,
        )

    def _window_start_ns(self) -> int:
        # Also where nothing passed and no slice was made: quiet time is part of a rate.
        return max(self._start_ns, self._now.start_ns - (SLICES - 1) * self._slice_ns)

    def _current(self) -> _Slice:
        """The slice that is written now; seals and retires slices when their time has come."""
        now_ns = self._clock.mono_ns()
        current = self._now
        if now_ns - current.start_ns < self._slice_ns:
            return current
        for summary in current.parts.values():
            summary.fold()
        self._sealed.append(current)
        # Slices begin at whole steps from the start, also after a quiet hour.
        steps = (now_ns - self._start_ns) // self._slice_ns
        self._now = _Slice(self._start_ns + steps * self._slice_ns)
        while self._sealed and self._sealed[0].start_ns <= self._now.start_ns - self.window_ns:
            _add(self._old, self._sealed.popleft())
        return self._now

    def _date(self, mono_ns: int) -> str:
        seconds = self._anchor.to_wall_ns(mono_ns) / NS_PER_S
        return datetime.fromtimestamp(seconds, UTC).isoformat().replace("+00:00", "Z")


@dataclass(frozen=True, slots=True)
class FrozenWindow:
    """A window's slices at one moment; nothing changes them any more."""

    name: str
    start: str
    end: str
    seconds: float
    pieces: list[_Slice]

    def to_dict(self) -> dict[str, object]:
        """The merged Summary as public JSON, with `by` tenant, model and (where there are any) arm."""
        merged = _Slice(0)
        for piece in self.pieces:
            _add(merged, piece)
        total = Summary()
        total.opened = merged.opened
        total.saw_uncertainty(merged.lag_ns)
        by: dict[str, dict[str, Summary]] = {"tenant": {}, "model": {}, "arm": {}}
        for (tenant, model, arm), summary in merged.parts.items():
            total.merge(summary)
            for label, name in (("tenant", tenant), ("model", model), ("arm", arm)):
                if name is not None:
                    by[label].setdefault(name, Summary()).merge(summary)
        window = {"name": self.name, "seconds": self.seconds, "start": self.start, "end": self.end}
        return total.to_dict(
            window,
            self.seconds,
            by={
                label: {
                    name: summary.to_dict(window, self.seconds) for name, summary in sorted(parts.items())
                }
                for label, parts in by.items()
            },
        )


def window_name(window_ns: int) -> str:
    """`1m`, `90s`, `1h`: the shortest whole form of a window's length."""
    for unit, ns in (("h", 3_600 * NS_PER_S), ("m", 60 * NS_PER_S), ("s", NS_PER_S)):
        if window_ns % ns == 0:
            return f"{window_ns // ns}{unit}"
    return f"{window_ns / NS_PER_S:g}s"


def _add(into: _Slice, piece: _Slice) -> None:
    into.opened += piece.opened
    into.lag_ns = max(into.lag_ns, piece.lag_ns)
    for who, summary in piece.parts.items():
        target = into.parts.get(who)
        if target is None:
            target = into.parts[who] = Summary()
        target.merge(summary)


def _copy(piece: _Slice) -> _Slice:
    twin = _Slice(piece.start_ns)
    _add(twin, piece)
    return twin

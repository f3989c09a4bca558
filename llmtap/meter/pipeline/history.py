"""Key figures of the last hour and the last 24 hours, for the charts of the dashboard (`/api/v1/history`).

`History` is a sink of the pipeline. It counts the exchanges that end in a step of 10 s, and of 5 minutes, and
keeps the figures of each complete step: 360 and 288 points of FIGURES. They take less than 300 KB at any
rate of requests. A point covers all tenants and models together; the windows (`windows.py`) have separate
series, but at most the last hour. The history is part of the saved state.
"""

from collections import deque
from collections.abc import Callable
from typing import Final, NamedTuple

from msgspec import Struct, msgpack

from llmtap.clock import Clock, WallAnchor
from llmtap.exchange.exchange import Exchange
from llmtap.exchange.outcome import Reading
from llmtap.export.sinks import SeriesKey
from llmtap.meter.tenants import Labels
from llmtap.metrics.histogram import Histogram
from llmtap.metrics.latency import Measured
from llmtap.units import NS_PER_S


class HistoryStep(NamedTuple):
    """Length of a step, and the number of complete steps that are kept."""

    step_ns: int
    points_max: int


STEPS: Final = {"10s": HistoryStep(10 * NS_PER_S, 360), "5m": HistoryStep(300 * NS_PER_S, 288)}
"""Steps by name, the shortest first. Each length is a multiple of the previous one, so steps can be added."""
FIGURES: Final = (
    "ttft_p50",
    "ttft_p99",
    "itl_p50",
    "itl_p99",
    "achieved_rps",
    "goodput_rps",
    "smooth_goodput_tps",
)
"""Figures of a point. Latencies are in seconds, `_rps` in exchanges per second (that ended, or that met their
objectives), `_tps` in tokens per second."""
_PERCENTILES: Final = (0.5, 0.99)
_Point = tuple[float | None, ...]
_UNMEASURED_POINT: Final = (None,) * len(FIGURES)
_SUM_FIELDS: Final = ("n", "counted", "met", "benefit_n", "benefit")


class _SavedStep(Struct, array_like=True):
    """Saved form of a `_Step`."""

    ttft: bytes
    """Histogram of times to first token."""
    itl: bytes
    """Histogram of times between tokens."""
    sums: list[float]
    """Values of `_SUM_FIELDS`, in their order."""


class _SavedLevel(Struct, array_like=True):
    """Saved form of a `_Level`."""

    end_ns: int
    """Monotonic time of the end of the latest complete step."""
    points: list[_Point]
    """Figures of the complete steps, the oldest first."""
    open: _SavedStep
    """Sums of the present step, which is not complete yet."""


_encode: Final = msgpack.Encoder().encode
_decode: Final = msgpack.Decoder(dict[str, _SavedLevel]).decode


class _Step:
    """Sums over the `n` exchanges that ended in one step: `counted` of them were judged by objectives, `met`
    of these met them; `benefit` is the sum over the `benefit_n` streams that have one."""

    __slots__ = ("benefit", "benefit_n", "counted", "itl", "met", "n", "ttft")

    def __init__(self) -> None:
        self.ttft = Histogram()
        self.itl = Histogram()
        self.n = self.counted = self.met = self.benefit_n = 0
        """`n`: number of exchanges; `counted`: of those that objectives judged; `met`: of those that met
        all; `benefit_n`: of streams with a benefit."""
        self.benefit = 0.0

    def add(self, x: Exchange, m: Measured, met: bool | None) -> None:
        """Add an ended exchange. `met`: whether it met its objectives; None: not judged."""
        self.n += 1
        if met is not None:
            self.counted += 1
            self.met += met
        if not x.stream or x.reading is Reading.INFERRED:
            return
        if m.ttft_ns is not None:
            self.ttft.record(m.ttft_ns)
        self.itl.record_many(m.tbc_ns if m.itl_even_ns is None else m.itl_even_ns)
        if m.smooth_benefit is not None:
            self.benefit_n += 1
            self.benefit += m.smooth_benefit

    def merge(self, other: "_Step") -> None:
        self.ttft.merge(other.ttft)
        self.itl.merge(other.itl)
        for name in _SUM_FIELDS:
            setattr(self, name, getattr(self, name) + getattr(other, name))

    def to_saved(self) -> "_SavedStep":
        rest = [getattr(self, name) for name in _SUM_FIELDS]
        return _SavedStep(self.ttft.to_bytes(), self.itl.to_bytes(), rest)

    def merge_saved(self, saved: "_SavedStep") -> None:
        self.ttft.merge_bytes(saved.ttft)
        self.itl.merge_bytes(saved.itl)
        for name, value in zip(_SUM_FIELDS, saved.sums, strict=True):
            setattr(self, name, getattr(self, name) + value)

    def point(self, seconds: float) -> _Point:
        """Return the values of FIGURES; None for a figure without samples. `seconds`: length of the step."""
        latencies = (
            None if ns is None else ns / NS_PER_S
            for histogram in (self.ttft, self.itl)
            for ns in histogram.percentiles(_PERCENTILES)
        )
        return (
            *latencies,
            self.n / seconds,
            self.met / seconds if self.counted else None,
            self.benefit / seconds if self.benefit_n else None,
        )


class _Level:
    """The points of one kind of step, and the sums of the present step, which is not complete yet."""

    def __init__(self, step: HistoryStep, now_ns: int) -> None:
        self.step = step
        self.points: deque[_Point] = deque(maxlen=step.points_max)
        self.index = now_ns // step.step_ns
        """Index of the open step: its start on the monotonic clock, divided by its length."""
        self.open_step = _Step()
        """Sums of the present step."""
        self._is_whole = now_ns % step.step_ns == 0
        """Whether the open step was measured from its start. If not, its figures are discarded at its end."""

    def advance(self, now_ns: int) -> _Step | None:
        """If the open step is over, close it and return its sums; else return None. The steps between it and
        the present one had no exchanges, and get empty points."""
        index = now_ns // self.step.step_ns
        if index == self.index:
            return None
        closed, seconds = self.open_step, self.step.step_ns / NS_PER_S
        if self._is_whole:
            self.points.append(closed.point(seconds))
        self._is_whole = True
        empty = _Step().point(seconds)
        self.points.extend([empty] * min(index - self.index - 1, self.step.points_max))
        self.index, self.open_step = index, _Step()
        return closed

    def export(self) -> _SavedLevel:
        return _SavedLevel(self.index * self.step.step_ns, list(self.points), self.open_step.to_saved())

    def absorb(self, saved: _SavedLevel, shift_ns: int) -> None:
        """Add the points of another meter that are older than the own ones, and the sums of its open step."""
        index = min(round((saved.end_ns + shift_ns) / self.step.step_ns), self.index)
        own, first = list(self.points), self.index - len(self.points)
        older = saved.points[: max(0, len(saved.points) - max(0, index - first))]
        # Add points without values for the time between the end of the other meter and the start of this one.
        gap = [_UNMEASURED_POINT] * min(max(0, first - index), self.step.points_max) if older else []
        self.points.clear()
        self.points.extend([*older, *gap, *own])
        self.open_step.merge_saved(saved.open)
        self._is_whole |= index == self.index


class History:
    """History of all traffic. One thread writes; readers get copies."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._wall_anchor = WallAnchor.sample(clock)
        self._levels = {name: _Level(step, clock.mono_ns()) for name, step in STEPS.items()}
        """By name of a step: its points."""

    def on_end(self, x: Exchange, m: Measured, key: SeriesKey, met: bool | None) -> None:
        self._advance()
        next(iter(self._levels.values())).open_step.add(x, m, met)

    def export(self) -> Callable[[], bytes]:
        """Return a thread-safe function that packs the history, so that another meter can continue it."""
        self._advance()
        packed = _encode({name: level.export() for name, level in self._levels.items()})
        return lambda: packed

    def clear(self) -> None:
        for level in self._levels.values():
            level.points.clear()
            level.open_step = _Step()

    def absorb(self, packed: bytes, shift_ns: int, labels: Labels) -> list[str]:
        """Add the packed history of another meter. Return no texts, since all parts can be added.

        `shift_ns`: our monotonic time minus the other meter's. Raises msgspec.MsgspecError.
        """
        saved = _decode(packed)
        self._advance()
        for name, level in self._levels.items():
            level.absorb(saved[name], shift_ns)
        return []

    def to_dict(self, step: str) -> Callable[[], dict[str, object]]:
        """Return a thread-safe function that makes public JSON of complete steps. `step`: a key of STEPS."""
        self._advance()
        level = self._levels[step]
        points, step_ns = list(level.points), level.step.step_ns
        end_ns = self._wall_anchor.to_wall_ns(level.index * step_ns)

        def make_document() -> dict[str, object]:
            columns = zip(*points, strict=True) if points else ([] for _ in FIGURES)
            return {
                "step": step_ns / NS_PER_S,
                "end": end_ns / NS_PER_S,
                "figures": dict(zip(FIGURES, columns, strict=True)),
            }

        return make_document

    def _advance(self) -> None:
        """Close the steps that are over, the shortest first; add a closed step to the next longer one."""
        now_ns = self._clock.mono_ns()
        closed: _Step | None = None
        for level in self._levels.values():
            if closed is not None:
                level.open_step.merge(closed)
            closed = level.advance(now_ns)

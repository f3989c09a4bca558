"""Arrival processes: from a seed to offsets in whole ns.

Gaps are drawn as floats; the fraction of a ns is carried to the next gap, so an offset is the sum of its gaps
rounded down once. Constant gaps are computed as fractions: row k is at k / rate.

Changing rates are followed by inversion. L(t) is the integral of the rate r(t). If u_0 < u_1 < ... is a
Poisson stream of rate 1, the times at which L reaches u_k are one of rate r(t) (time change: Cinlar 1975,
"Introduction to Stochastic Processes", 4.7). Unlike thinning this discards no draws, so time k depends on the
first k draws alone. With u_k = k the times are as even as the rate allows. Time is divided into pieces with L
in closed form; a position is the start of its piece in whole ns plus the part of the piece, so rounding does
not add up.

All processes raise ValueError naming the field for values that make no endless stream.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from itertools import count
from math import cos, log, pi, sin, sqrt
from random import Random
from typing import Final, Protocol

from llmtap.units import NS_PER_S

__all__ = [
    "ArrivalProcess", "Diurnal", "Gamma", "Intensity", "OnOff", "Piece", "Poisson", "Ramp", "Slope",
    "Steps", "UniformArrivals", "Wave",
]  # fmt: skip


_STEPS_MAX: Final = 100
"""Of Newton's method; bisection, its fallback, has all bits of a float after 60."""
_NEAR: Final = 1e-15


class Piece(Protocol):
    """A stretch of time and its rate."""

    @property
    def length_ns(self) -> int: ...

    @property
    def mass(self) -> float:
        """Expected number of arrivals."""
        ...

    def at_ns(self, mass: float) -> float:
        """Return the time from its start until `mass` arrivals are expected; below its own mass."""
        ...


@dataclass(frozen=True, slots=True)
class Slope:
    """A rate that changes linearly or stays."""

    length_ns: int
    from_rps: float
    to_rps: float

    @property
    def mass(self) -> float:
        return (self.from_rps + self.to_rps) / 2 * self.length_ns / NS_PER_S

    def at_ns(self, mass: float) -> float:
        """Solve a x + (b - a) x^2 / 2 = mass, in the form that also holds for b = a.

        Times are in lengths and rates in shares of the higher one, so that no rate is too small to be
        squared.
        """
        most = max(self.from_rps, self.to_rps)
        mass = mass / most * NS_PER_S / self.length_ns if mass else 0.0
        if not mass:
            return 0.0
        a, b = self.from_rps / most, self.to_rps / most
        # Below 0 by rounding only: at the very end of a ramp that goes down to 0.
        return 2 * mass / (a + sqrt(max(0.0, a * a + 2 * mass * (b - a)))) * self.length_ns


@dataclass(frozen=True, slots=True)
class Wave:
    """One period of a sinusoid: mean (1 + amplitude sin(2 pi t / period)); amplitude in 0 to 1."""

    length_ns: int
    mean_rps: float
    amplitude: float

    @property
    def mass(self) -> float:
        return self.mean_rps * self.length_ns / NS_PER_S

    def at_ns(self, mass: float) -> float:
        """Newton's method on x + amplitude (1 - cos x), x the angle, with bisection as fallback."""
        wanted, a = 2 * pi * mass / self.mass, self.amplitude
        low, high = max(0.0, wanted - 2 * a), wanted
        x = min(high, max(low, wanted - a * (1 - cos(wanted))))
        for _ in range(_STEPS_MAX):
            over, slope = x + a * (1 - cos(x)) - wanted, 1 + a * sin(x)
            if over > 0:
                high = x
            else:
                low = x
            better = x - over / slope if slope > _NEAR else low
            if not low <= better <= high:
                better = (low + high) / 2
            moved, x = abs(better - x), better
            if moved <= _NEAR * (1 + x):
                break
        return x / (2 * pi) * self.length_ns


@dataclass(frozen=True, slots=True)
class Intensity:
    """Lead pieces, then cycle pieces over and over; the cycle's mass is above 0."""

    lead: tuple[Piece, ...]
    cycle: tuple[Piece, ...]

    def moments(self, units: Iterator[float]) -> Iterator[int]:
        """Yield the times at which L reaches the running sums of `units`, in whole ns, never decreasing.

        Where L is constant, as between bursts, it is the end of that time.
        """
        cycle_mass = sum(piece.mass for piece in self.cycle)
        cycle_ns = sum(piece.length_ns for piece in self.cycle)
        assert cycle_mass > 0
        pieces, n_lead = (*self.lead, *self.cycle), len(self.lead)
        masses = [piece.mass for piece in pieces]
        here, begin_ns, used, last_ns = 0, 0, 0.0, 0
        for unit in units:
            used += unit
            while used >= masses[here]:
                used -= masses[here]
                begin_ns += pieces[here].length_ns
                here += 1
                if here == len(pieces):
                    here = n_lead
                if here == n_lead and used >= cycle_mass:
                    # Of cycles that are passed by whole there may be very many.
                    rounds = int(used // cycle_mass)
                    begin_ns += rounds * cycle_ns
                    used = max(0.0, used - rounds * cycle_mass)
            # The next draw may be nearer than a float can tell.
            last_ns = max(last_ns, begin_ns + round(pieces[here].at_ns(used)))
            yield last_ns


def evenly() -> Iterator[float]:
    """Distances of 0, 1, 2, ...: the first arrival is at 0."""
    return (1.0 if k else 0.0 for k in count())


_RATE_MIN: Final = 1e-6
"""Requests per second: one in eleven days."""
_RATE_MAX: Final = 1e9
"""One per ns, the resolution of offsets."""
_STAY_NS: Final = 3_600 * NS_PER_S
"""A constant rate is repeated in pieces of an hour, so that positions keep their precision."""
_LENGTH_NS_MAX: Final = 1_000 * 86_400 * NS_PER_S
"""Limit of a phase: longer than any run."""
_UNITS: Final = {
    "h": 3_600 * NS_PER_S, "m": 60 * NS_PER_S, "s": NS_PER_S, "ms": 1_000_000, "us": 1_000, "ns": 1,
}  # fmt: skip


class ArrivalProcess(Protocol):
    """An arrival process, without its seed."""

    @property
    def rate_rps(self) -> float | None:
        """Overall mean; None if the process names its rates itself."""
        ...

    def text(self) -> str:
        """Return it as `parse_arrivals` reads it."""
        ...

    def offsets(self, random: Random) -> Iterator[int]:
        """Yield offsets in ns, never decreasing; endless."""
        ...


# ---------------------------------------------------------------- gaps of one kind


@dataclass(frozen=True, slots=True)
class Poisson:
    """Exponential gaps."""

    rate_rps: float

    def __post_init__(self) -> None:
        _check_rate("rate", self.rate_rps)

    def text(self) -> str:
        return "poisson"

    def offsets(self, random: Random) -> Iterator[int]:
        return _summed(_exponential(random), NS_PER_S / self.rate_rps)


@dataclass(frozen=True, slots=True)
class Gamma:
    """Gamma gaps of shape `burstiness`. With a low burstiness many gaps are below one ns and become ties.

    Source: seed 002; `vllm bench serve` uses shape burstiness and scale 1 / (rate burstiness).
    """

    rate_rps: float
    burstiness: float

    def __post_init__(self) -> None:
        _check_rate("rate", self.rate_rps)
        _check("burstiness", self.burstiness, 1e-6, 1e6)

    @classmethod
    def by_cv(cls, rate_rps: float, cv: float) -> "Gamma":
        """Create it from the gaps' coefficient of variation: shape = 1 / cv^2."""
        _check("cv", cv, 1e-3, 1e3)
        return cls(rate_rps, cv**-2)

    @property
    def cv(self) -> float:
        return 1 / sqrt(self.burstiness)

    def text(self) -> str:
        return f"gamma:burstiness={_plain(self.burstiness)}"

    def offsets(self, random: Random) -> Iterator[int]:
        shape = self.burstiness
        return _summed((random.gammavariate(shape, 1 / shape) for _ in count()), NS_PER_S / self.rate_rps)


@dataclass(frozen=True, slots=True)
class UniformArrivals:
    """Constant gaps: row k at k / rate, to the nearest ns."""

    rate_rps: float

    def __post_init__(self) -> None:
        _check_rate("rate", self.rate_rps)

    def text(self) -> str:
        return "uniform"

    def offsets(self, random: Random) -> Iterator[int]:
        gap = NS_PER_S / Fraction(self.rate_rps)
        n, d = gap.numerator, gap.denominator
        return ((2 * k * n + d) // (2 * d) for k in count())


def _exponential(random: Random) -> Iterator[float]:
    """Exponential draws of mean 1."""
    draw = random.random
    while True:
        yield -log(1.0 - draw())


def _summed(gaps: Iterator[float], mean_ns: float) -> Iterator[int]:
    """Running sum of gaps given in means, rounded down."""
    at_ns, carry = 0, 0.0
    for gap in gaps:
        exact = gap * mean_ns + carry
        whole = int(exact)
        carry = exact - whole
        at_ns += whole
        yield at_ns


# ---------------------------------------------------------------- rates that change


def _following(intensity: Intensity, even: bool, random: Random) -> Iterator[int]:
    """Random (inhomogeneous Poisson), or as even as the rate allows."""
    return intensity.moments(evenly() if even else _exponential(random))


@dataclass(frozen=True, slots=True, kw_only=True)
class OnOff:
    """Bursts: alternating high and low rate.

    `rate_rps` is the mean of a cycle, `idle_rps` the rate while off; the rate while on follows from them.
    """

    rate_rps: float
    on_ns: int
    off_ns: int
    idle_rps: float = 0.0
    even: bool = False

    def __post_init__(self) -> None:
        _check_rate("rate", self.rate_rps)
        _check_length("on", self.on_ns)
        _check_length("off", self.off_ns)
        _check("idle", self.idle_rps, 0.0, _RATE_MAX)
        if self.idle_rps > self.rate_rps:
            raise ValueError(f"idle: {self.idle_rps:g} is above the mean rate of {self.rate_rps:g}")

    @property
    def on_rps(self) -> float:
        return (self.rate_rps * (self.on_ns + self.off_ns) - self.idle_rps * self.off_ns) / self.on_ns

    def text(self) -> str:
        idle = (f"idle={_plain(self.idle_rps)}",) if self.idle_rps else ()
        return _text(
            "onoff", self.even, f"on={_duration(self.on_ns)}", f"off={_duration(self.off_ns)}", *idle
        )

    def intensity(self) -> Intensity:
        on = Slope(self.on_ns, self.on_rps, self.on_rps)
        return Intensity((), (on, Slope(self.off_ns, self.idle_rps, self.idle_rps)))

    def offsets(self, random: Random) -> Iterator[int]:
        return _following(self.intensity(), self.even, random)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ramp:
    """A rate that changes linearly and then stays."""

    from_rps: float
    to_rps: float
    over_ns: int
    even: bool = False

    def __post_init__(self) -> None:
        _check("from", self.from_rps, 0.0, _RATE_MAX)
        _check_rate("to", self.to_rps)
        _check_length("over", self.over_ns)

    @property
    def rate_rps(self) -> None:
        return None

    def text(self) -> str:
        return _text(
            "ramp",
            self.even,
            f"from={_plain(self.from_rps)}",
            f"to={_plain(self.to_rps)}",
            f"over={_duration(self.over_ns)}",
        )

    def intensity(self) -> Intensity:
        stay = Slope(_STAY_NS, self.to_rps, self.to_rps)
        return Intensity((Slope(self.over_ns, self.from_rps, self.to_rps),), (stay,))

    def offsets(self, random: Random) -> Iterator[int]:
        return _following(self.intensity(), self.even, random)


@dataclass(frozen=True, slots=True, kw_only=True)
class Steps:
    """One rate after the other, each for its time; the last one stays."""

    steps: tuple[tuple[float, int], ...]
    """Rate, and duration in ns."""
    even: bool = False

    def __post_init__(self) -> None:
        if not self.steps:
            raise ValueError("no step is given")
        for i, (rate_rps, length_ns) in enumerate(self.steps, 1):
            _check(f"step {i}", rate_rps, 0.0, _RATE_MAX)
            _check_length(f"step {i}", length_ns)
        _check_rate("last step", self.steps[-1][0])

    @property
    def rate_rps(self) -> None:
        return None

    def text(self) -> str:
        return _text(
            "steps", self.even, *(f"{_plain(rate)}x{_duration(length_ns)}" for rate, length_ns in self.steps)
        )

    def intensity(self) -> Intensity:
        last_rps = self.steps[-1][0]
        lead = tuple(Slope(length_ns, rate, rate) for rate, length_ns in self.steps)
        return Intensity(lead, (Slope(_STAY_NS, last_rps, last_rps),))

    def offsets(self, random: Random) -> Iterator[int]:
        return _following(self.intensity(), self.even, random)


@dataclass(frozen=True, slots=True, kw_only=True)
class Diurnal:
    """A sinusoid around `rate_rps`, rising at first; `amplitude` as a share of the mean."""

    rate_rps: float
    amplitude: float
    period_ns: int
    even: bool = False

    def __post_init__(self) -> None:
        _check_rate("rate", self.rate_rps)
        _check("amplitude", self.amplitude, 0.0, 1.0)
        _check_length("period", self.period_ns)

    def text(self) -> str:
        return _text(
            "diurnal", self.even, f"amplitude={_plain(self.amplitude)}", f"period={_duration(self.period_ns)}"
        )

    def intensity(self) -> Intensity:
        return Intensity((), (Wave(self.period_ns, self.rate_rps, self.amplitude),))

    def offsets(self, random: Random) -> Iterator[int]:
        return _following(self.intensity(), self.even, random)


# ---------------------------------------------------------------- saying and checking


def _text(name: str, even: bool, *fields: str) -> str:
    return f"{name}:" + ",".join((*fields, *(("spacing=even",) if even else ())))


def _plain(value: float) -> str:
    """Format with all digits."""
    return repr(value).removesuffix(".0")


def _duration(ns: int) -> str:
    """Format exactly, in the largest unit without a fraction."""
    unit, per = next((unit, per) for unit, per in _UNITS.items() if ns % per == 0)
    return f"{ns // per}{unit}"


def _check_rate(name: str, rate_rps: float) -> None:
    if not _RATE_MIN <= rate_rps <= _RATE_MAX:
        raise ValueError(
            f"{name}: expected requests per second from {_RATE_MIN:g} to {_RATE_MAX:g}, got {rate_rps:g}"
        )


def _check_length(name: str, length_ns: int) -> None:
    if not 0 < length_ns <= _LENGTH_NS_MAX:
        raise ValueError(f"{name}: expected a time above 0, at most 1,000 days")


def _check(name: str, value: float, least: float, most: float) -> None:
    if not least <= value <= most:
        raise ValueError(f"{name}: expected a number from {least:g} to {most:g}, got {value:g}")

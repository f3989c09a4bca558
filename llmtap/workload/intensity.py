"""Arrival times of a process whose rate changes with time, such as bursts, ramps and day curves.

`arrivals.py` builds an `Intensity` from pieces (`Slope`, `Wave`) and passes gaps of mean 1 (`evenly`,
`exponential`); `moments` yields the times in ns.

L(t) is the integral of the rate r(t). If u_0 < u_1 < ... is a Poisson stream of rate 1, the times at which L
reaches u_k are one of rate r(t) (time change: Cinlar 1975, "Introduction to Stochastic Processes", 4.7). With
u_k = k the times are as even as the rate allows. Time is divided into pieces with L in closed form.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count
from math import cos, log, pi, sqrt
from random import Random
from typing import Final

from llmtap.units import NS_PER_S

__all__ = ["Intensity", "Piece", "Slope", "Wave", "evenly", "exponential"]

_HALVINGS: Final = 60
"""Bisection steps: all bits of a float."""


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
        """Solve a x + (b - a) x^2 / 2 = mass, x in lengths, rates as shares of the higher one; also for a =
        b."""
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
        """Solve x + amplitude (1 - cos x) = mass by bisection, x the angle."""
        wanted, a = 2 * pi * mass / self.mass, self.amplitude
        low, high = max(0.0, wanted - 2 * a), wanted
        for _ in range(_HALVINGS):
            x = (low + high) / 2
            if x + a * (1 - cos(x)) > wanted:
                high = x
            else:
                low = x
        return low / (2 * pi) * self.length_ns


Piece = Slope | Wave
"""A stretch of time and its rate. `mass`: expected arrivals; `at_ns(mass)`: time from its start until that
many are expected, below its own mass."""


@dataclass(frozen=True, slots=True)
class Intensity:
    """Lead pieces, then cycle pieces over and over; the cycle's mass is above 0."""

    lead: tuple[Piece, ...]
    cycle: tuple[Piece, ...]

    def moments(self, units: Iterator[float]) -> Iterator[int]:
        """Yield the times at which L reaches the running sums of `units`, in whole ns, never decreasing."""
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


def exponential(random: Random) -> Iterator[float]:
    """Yield exponential draws of mean 1."""
    draw = random.random
    while True:
        yield -log(1.0 - draw())

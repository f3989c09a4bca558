"""Arrival processes: make offsets in ns from a text such as `gamma:cv=2`, a mean rate and a seed.

`parse_arrivals` returns an `Arrivals`, which yields the offset of each request; replays, benchmarks and
workload files use it.

- The offset of a row depends only on the seed and the row; each sending process iterates over all rows.
- Random processes begin with a gap; `uniform` begins at 0.
- Offsets are sums of unrounded gaps: rounding errors do not add up.
- Burstiness is the shape of gamma gaps, as in `vllm bench serve`: their coefficient of variation is
  1 / sqrt(burstiness).

The given rate is the mean of a cycle (`onoff`) or a period (`diurnal`). The texts of `ramp` and `steps`
contain their rates.

An `Intensity` is a rate r(t) that changes with time (bursts, ramps, day curves). It consists of pieces of
which the integral L(t) has a closed form. If u_0 < u_1 < ... is a Poisson stream of rate 1, then the times at
which L reaches u_k are a Poisson stream of rate r(t) (time change: Cinlar 1975, "Introduction to Stochastic
Processes", 4.7).
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from difflib import get_close_matches
from fractions import Fraction
from itertools import count
from math import cos, log, pi, sqrt
from random import Random
from typing import Final

from llmtap.errors import ConfigError
from llmtap.units import NS_PER_S, parse_duration_ns

_HALVINGS: Final = 60
"""Number of bisection steps: enough for all bits of a float."""


@dataclass(frozen=True, slots=True)
class Slope:
    """A rate that changes linearly or is constant. `mass` is the expected number of arrivals."""

    length_ns: int
    from_rps: float
    to_rps: float

    @property
    def mass(self) -> float:
        """Expected number of arrivals."""
        return (self.from_rps + self.to_rps) / 2 * self.length_ns / NS_PER_S

    def reach_time_ns(self, mass: float) -> float:
        """Return the time x at which the expected number of arrivals reaches `mass`.

        It solves a x + (b - a) x^2 / 2 = mass, in a form that is also correct for a = b. In the equation, x
        is a share of the length, and the rates a and b are shares of the higher one.
        """
        rate_max = max(self.from_rps, self.to_rps)
        mass = mass / rate_max * NS_PER_S / self.length_ns if mass else 0.0
        if not mass:
            return 0.0
        a, b = self.from_rps / rate_max, self.to_rps / rate_max
        # At the end of a ramp that falls to 0, rounding can make the number under the root negative.
        return 2 * mass / (a + sqrt(max(0.0, a * a + 2 * mass * (b - a)))) * self.length_ns


@dataclass(frozen=True, slots=True)
class Wave:
    """One period of a rate mean * (1 + amplitude * sin(2 pi t / period)); the amplitude is from 0 to 1."""

    length_ns: int
    mean_rps: float
    amplitude: float

    @property
    def mass(self) -> float:
        """Expected number of arrivals."""
        return self.mean_rps * self.length_ns / NS_PER_S

    def reach_time_ns(self, mass: float) -> float:
        """Return the time at which the expected number of arrivals reaches `mass`.

        It solves x + amplitude (1 - cos x) = wanted for the angle x by bisection.
        """
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
"""A period with its rate. `mass`: expected number of arrivals in it. `reach_time_ns(mass)`: time from its
start until the expected number reaches `mass`, which must be less than the `mass` of the piece."""


@dataclass(frozen=True, slots=True)
class Intensity:
    """A rate over time: the pieces of `lead`, followed by those of `cycle`, which repeat without end.

    The mass of the cycle must be above 0.
    """

    lead: tuple[Piece, ...]
    """Pieces before the cycle, which come once."""
    cycle: tuple[Piece, ...]
    """Pieces that repeat without end."""

    def arrival_times_ns(self, units: Iterator[float]) -> Iterator[int]:
        """Yield the times in ns at which the integral of the rate reaches the running sums of `units`."""
        cycle_mass = sum(piece.mass for piece in self.cycle)
        cycle_ns = sum(piece.length_ns for piece in self.cycle)
        assert cycle_mass > 0
        pieces, n_lead = (*self.lead, *self.cycle), len(self.lead)
        masses = [piece.mass for piece in pieces]
        index, begin_ns, used, last_ns = 0, 0, 0.0, 0
        for unit in units:
            used += unit
            while used >= masses[index]:
                used -= masses[index]
                begin_ns += pieces[index].length_ns
                index += 1
                if index == len(pieces):
                    index = n_lead
                if index == n_lead and used >= cycle_mass:
                    # Skip whole cycles in one step, because there can be very many.
                    rounds = int(used // cycle_mass)
                    begin_ns += rounds * cycle_ns
                    used = max(0.0, used - rounds * cycle_mass)
            # Times must not decrease, which rounding could cause if two draws are very close to each other.
            last_ns = max(last_ns, begin_ns + round(pieces[index].reach_time_ns(used)))
            yield last_ns


def exponential_draws(random: Random) -> Iterator[float]:
    """Yield exponential draws of mean 1."""
    draw = random.random
    while True:
        yield -log(1.0 - draw())


_RATE_MIN: Final = 1e-6
"""Smallest rate in requests per second: one request in eleven days."""
_RATE_MAX: Final = 1e9
"""Largest rate: one request per ns, which is the resolution of offsets."""
_CONSTANT_NS: Final = 3_600 * NS_PER_S
"""Length of the piece that is repeated for a constant rate: short, so that times within it are precise."""
_LENGTH_NS_MAX: Final = 1_000 * 86_400 * NS_PER_S
"""Maximum length of a phase: longer than any run."""
Offsets = Callable[[Random], Iterator[int]]
"""Function that yields the offsets in ns which a random generator gives."""


@dataclass(frozen=True, slots=True)
class Arrivals:
    """An arrival process with its parameters and its seed. Each iteration yields the same offsets."""

    text: str
    """Text of the process, in the form that `parse_arrivals` reads."""
    rate_rps: float | None
    """Mean rate; None if the text of the process contains its rates."""
    seed: int
    offsets: Offsets

    def __iter__(self) -> Iterator[int]:
        """Yield offsets from the start in ns without end. They never decrease."""
        # Use the same random stream for all processes, so that gamma gaps of burstiness 1 give the Poisson
        # arrivals of the same seed.
        return self.offsets(Random(f"{self.seed}/arrivals"))

    def describe(self) -> dict[str, object]:
        """Return the arguments of `parse_arrivals` for the same arrivals, as JSON."""
        return {"arrivals": self.text, "rate_rps": self.rate_rps, "seed": self.seed}


def parse_arrivals(text: str, *, rate_rps: float | None, seed: int, place: str = "--arrivals") -> Arrivals:
    """Parse a text of FORMS. `rate_rps`: mean rate; None for OWN_RATES. Raises ConfigError naming `place`."""
    name, _, rest = text.partition(":")
    name = name.strip()
    if name not in FORMS:
        near = get_close_matches(name, FORMS, 1)
        meant = f"did you mean {FORMS[near[0]]}?" if near else f"expected one of {', '.join(FORMS)}"
        raise ConfigError(place, f"no arrival process is called {name!r}", meant)
    own_rates = name in OWN_RATES
    try:
        if own_rates and rate_rps is not None:
            raise ValueError(
                f"the arrival process contains its own rates: leave out the mean rate ({rate_rps:g})"
            )
        if not own_rates and rate_rps is None:
            problem = f"{name}: no mean rate is given, and this arrival process needs one"
            raise ConfigError(place, problem, "set the mean rate with --rate")
        if rate_rps is not None:
            _check_rate("rate", rate_rps)
        words = _Parameters(rest)
        offsets = _PROCESSES[name](words, rate_rps or 0.0)
        words.check_all_read()
    except ValueError as exc:
        more = "" if own_rates else ", with a mean rate"
        raise ConfigError(place, f"{name}: {exc}", f"the syntax is {FORMS[name]}{more}") from None
    return Arrivals(text.strip(), rate_rps, seed, offsets)


class _Parameters:
    """Parameters: comma-separated `name=value` pairs and words. Errors begin with the parameter's name."""

    def __init__(self, text: str) -> None:
        self._known_names: list[str] = []
        """Names of the settings read so far, to report unknown ones."""
        self._values: dict[str, str] = {}
        self.bare_words: list[str] = []
        """Words without `=`."""
        for part in text.split(",") if text.strip() else ():
            name, equals, value = (word.strip() for word in part.partition("="))
            if not equals:
                self.bare_words.append(name)
            elif name in self._values:
                raise ValueError(f"{name}: is given twice; give it once")
            else:
                self._values[name] = value

    def get(self, name: str) -> str | None:
        self._known_names.append(name)
        return self._values.get(name)

    def number(
        self, name: str, minimum: float = 0.0, maximum: float = _RATE_MAX, default: str | None = None
    ) -> float:
        text = self.get(name)
        value = _read_number(name, _required_text(name, default if text is None else text))
        if not minimum <= value <= maximum:
            raise ValueError(f"{name}: expected a number from {minimum:g} to {maximum:g}, got {value:g}")
        return value

    def length_ns(self, name: str) -> int:
        return _length_ns(name, _required_text(name, self.get(name)))

    def check_all_read(self) -> None:
        """Raise ValueError if there is a name or a word that was not read."""
        for name in [name for name in self._values if name not in self._known_names]:
            near = get_close_matches(name, self._known_names, 1)
            meant = (
                f"did you mean {near[0]}?"
                if near
                else f"known fields: {', '.join(self._known_names) or 'none'}"
            )
            raise ValueError(f"{name}: unknown field ({meant})")
        if self.bare_words:
            raise ValueError(f"expected name=value, got {self.bare_words[0]!r}")


def _required_text(name: str, text: str | None) -> str:
    if text is None:
        raise ValueError(f"{name}: is missing; add {name}=VALUE")
    return text


def _read_number(name: str, text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ValueError(f"{name}: expected a number, got {text!r}") from None


def _length_ns(name: str, text: str) -> int:
    try:
        length_ns = parse_duration_ns(text)
    except ValueError as exc:
        raise ValueError(f"{name}: {exc}") from None
    if not 0 < length_ns <= _LENGTH_NS_MAX:
        raise ValueError(f"{name}: expected a time above 0 and at most 1,000 days, got {text}")
    return length_ns


def _check_rate(name: str, rate_rps: float) -> None:
    if not _RATE_MIN <= rate_rps <= _RATE_MAX:
        raise ValueError(
            f"{name}: expected requests per second from {_RATE_MIN:g} to {_RATE_MAX:g}, got {rate_rps:g}"
        )


# ---------------------------------------------------------------- the processes of FORMS


def _running_sum(gaps: Iterator[float], mean_ns: float) -> Iterator[int]:
    """Yield the running sum of gaps in whole ns, rounded down. `gaps`: as multiples of the mean gap."""
    at_ns, carry = 0, 0.0
    for gap in gaps:
        exact = gap * mean_ns + carry
        whole = int(exact)
        carry = exact - whole
        at_ns += whole
        yield at_ns


def _poisson(words: _Parameters, rate_rps: float) -> Offsets:
    return lambda random: _running_sum(exponential_draws(random), NS_PER_S / rate_rps)


def _uniform(words: _Parameters, rate_rps: float) -> Offsets:
    gap = NS_PER_S / Fraction(rate_rps)
    n, d = gap.numerator, gap.denominator
    return lambda random: ((2 * k * n + d) // (2 * d) for k in count())


def _gamma(words: _Parameters, rate_rps: float) -> Offsets:
    """Return arrivals with gamma gaps, as in vLLM's bench: shape = burstiness, scale = 1 / (rate * shape)."""
    if (words.get("burstiness") is None) == (words.get("cv") is None):
        raise ValueError("expected either burstiness or cv, got none of them or both")
    if words.get("cv") is None:
        shape = words.number("burstiness", 1e-6, 1e6)
    else:
        shape = words.number("cv", 1e-3, 1e3) ** -2
    return lambda random: _running_sum(
        (random.gammavariate(shape, 1 / shape) for _ in count()), NS_PER_S / rate_rps
    )


def _on_off(words: _Parameters, rate_rps: float) -> Offsets:
    """Return bursts. Their rate is computed from the mean rate of a cycle and the rate between bursts."""
    on_ns, off_ns, idle_rps = words.length_ns("on"), words.length_ns("off"), words.number("idle", default="0")
    if idle_rps > rate_rps:
        raise ValueError(f"idle: expected at most the mean rate ({rate_rps:g}), got {idle_rps:g}")
    on_rps = (rate_rps * (on_ns + off_ns) - idle_rps * off_ns) / on_ns
    return _poisson_arrivals((), (Slope(on_ns, on_rps, on_rps), Slope(off_ns, idle_rps, idle_rps)))


def _ramp(words: _Parameters, rate_rps: float) -> Offsets:
    """Return arrivals at a rate that changes linearly and is constant afterwards."""
    from_rps, to_rps = words.number("from"), words.number("to")
    _check_rate("to", to_rps)
    lead = Slope(words.length_ns("over"), from_rps, to_rps)
    return _poisson_arrivals((lead,), (Slope(_CONSTANT_NS, to_rps, to_rps),))


def _steps(words: _Parameters, rate_rps: float) -> Offsets:
    """Return arrivals with several constant rates in turn, such as `10x30s 20x30s`."""
    steps: list[Slope] = []
    for i, word in enumerate(words.bare_words, 1):
        rate, times, length = word.partition("x")
        if not times:
            raise ValueError(f"step {i}: expected a rate, x and a time such as 10x30s, got {word!r}")
        step_rps = _read_number(f"step {i}", rate)
        if not 0 <= step_rps <= _RATE_MAX:
            raise ValueError(f"step {i}: expected a number from 0 to {_RATE_MAX:g}, got {step_rps:g}")
        steps.append(Slope(_length_ns(f"step {i}", length), step_rps, step_rps))
    words.bare_words = []
    if not steps:
        raise ValueError("expected at least one step such as 10x30s, got none")
    _check_rate("last step", steps[-1].to_rps)
    return _poisson_arrivals(tuple(steps), (replace(steps[-1], length_ns=_CONSTANT_NS),))


def _diurnal(words: _Parameters, rate_rps: float) -> Offsets:
    """Return arrivals at a sinusoidal rate, which rises at first. The amplitude is a share of the mean."""
    return _poisson_arrivals(
        (), (Wave(words.length_ns("period"), rate_rps, words.number("amplitude", maximum=1.0)),)
    )


def _poisson_arrivals(lead: tuple[Piece, ...], cycle: tuple[Piece, ...]) -> Offsets:
    return lambda random: Intensity(lead, cycle).arrival_times_ns(exponential_draws(random))


_PROCESSES: Final[dict[str, Callable[[_Parameters, float], Offsets]]] = {
    "poisson": _poisson,
    "uniform": _uniform,
    "gamma": _gamma,
    "onoff": _on_off,
    "ramp": _ramp,
    "steps": _steps,
    "diurnal": _diurnal,
}
FORMS: Final = {
    "poisson": "poisson",
    "uniform": "uniform",
    "gamma": "gamma:burstiness=0.5 or gamma:cv=2",
    "onoff": "onoff:on=2s,off=8s[,idle=RPS]",
    "ramp": "ramp:from=1,to=50,over=60s",
    "steps": "steps:10x30s,20x30s",
    "diurnal": "diurnal:amplitude=0.8,period=24h",
}
"""Syntax of each process, for help and hints."""
OWN_RATES: Final = frozenset({"ramp", "steps"})
"""Processes whose syntax contains the rates."""

"""Arrival processes: from a text such as `gamma:cv=2`, a mean rate and a seed to offsets in ns.

`parse_arrivals` returns an `Arrivals`, which yields the offset of each request; replays, benchmarks and
workload files use it.

- The offset of a row depends on seed and row alone; each sending process iterates over all rows.
- Random processes begin with a gap; even ones (`uniform`, `spacing=even`) begin at 0.
- Offsets are sums of unrounded gaps: rounding errors do not add up.
- Burstiness is the shape of gamma gaps, as in `vllm bench serve`: their coefficient of variation is
  1 / sqrt(burstiness).

The rate is the mean of a cycle (`onoff`) or period (`diurnal`). `ramp` and `steps` contain their rates.

An `Intensity` is a rate r(t) that changes with time (bursts, ramps, day curves), in pieces whose integral
L(t) has a closed form. If u_0 < u_1 < ... is a Poisson stream of rate 1, the times at which L reaches u_k are
one of rate r(t) (time change: Cinlar 1975, "Introduction to Stochastic Processes", 4.7). With u_k = k the
times are as even as the rate allows.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from fractions import Fraction
from itertools import count
from math import cos, log, pi, sqrt
from random import Random
from typing import Any, Final, Literal

from llmtap.errors import ConfigError
from llmtap.units import NS_PER_S, parse_duration_ns

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


@dataclass(frozen=True, slots=True)
class Arrivals:
    """An arrival process with its parameters and its seed. Each iteration yields the same offsets."""

    name: str
    rate_rps: float | None
    """Overall mean; None if the process names its rates itself."""
    values: Mapping[str, Any]
    even: bool
    """As even as the rate allows instead of random."""
    seed: int

    def __iter__(self) -> Iterator[int]:
        """Yield offsets from the start in ns, never decreasing; endless."""
        # One stream of numbers for all processes: a burstiness of 1 is the very Poisson stream of this seed.
        random = Random(f"{self.seed}/arrivals")
        made = _KINDS[self.name].make(self.values, self.rate_rps or 0.0)
        if isinstance(made, Intensity):
            return made.moments(evenly() if self.even else exponential(random))
        return made(random)

    def text(self) -> str:
        """Return the process as `parse_arrivals` reads it."""
        fields = _KINDS[self.name].fields
        parts = [f"{f.name}={f.text(v)}" for f in fields if (v := self.values[f.name]) != f.default]
        parts += [f"{_plain(rate)}x{_duration(ns)}" for rate, ns in self.values.get("steps", ())]
        parts += ["spacing=even"] if self.even else []
        return f"{self.name}:{','.join(parts)}" if parts else self.name

    def describe(self) -> dict[str, object]:
        """Return JSON from which `parse_arrivals` makes the same arrivals."""
        return {"arrivals": self.text(), "rate_rps": self.rate_rps, "seed": self.seed}


def parse_arrivals(text: str, *, rate_rps: float | None, seed: int, place: str = "--arrivals") -> Arrivals:
    """Parse one of FORMS. `rate_rps`: overall mean; None for OWN_RATES. Raises ConfigError of `place`."""
    name, _, rest = text.partition(":")
    name = name.strip()
    kind = _KINDS.get(name)
    if kind is None:
        near = get_close_matches(name, _KINDS, 1)
        meant = f"did you mean {FORMS[near[0]]}?" if near else f"one of {', '.join(FORMS)}"
        raise ConfigError(place, f"no arrival process is called {name!r}", meant)
    try:
        words = _Words(rest)
        if kind.own_rates and rate_rps is not None:
            told = f"it names its rates itself, and takes none beside them (got {rate_rps:g})"
            raise ValueError(f"rate: {told}")
        if not kind.own_rates:
            if rate_rps is None:
                raise ValueError("rate: is not given, and it needs a mean rate")
            _check_rate("rate", rate_rps)
        values = {f.name: f.read(words) for f in kind.fields} if kind.read is None else kind.read(words)
        even = kind.spacing and words.even()
        for field in kind.fields:
            field.check(values[field.name])
        kind.make(values, rate_rps or 0.0)
        words.check_all_read()
    except ValueError as exc:
        beside = "" if kind.own_rates else ", with a mean rate beside it"
        raise ConfigError(place, f"{name}: {exc}", f"it is written {FORMS[name]}{beside}") from None
    return Arrivals(name, rate_rps, values, even, seed)


# ---------------------------------------------------------------- fields


class _Words:
    """Comma-separated `name=value` pairs and bare words."""

    def __init__(self, text: str) -> None:
        self._known: list[str] = []
        self.named: dict[str, str] = {}
        self.bare: list[str] = []
        for part in text.split(",") if text.strip() else ():
            name, equals, value = (word.strip() for word in part.partition("="))
            if not equals:
                self.bare.append(name)
            elif name in self.named:
                raise ValueError(f"{name}: is given twice")
            else:
                self.named[name] = value

    def get(self, name: str) -> str | None:
        self._known.append(name)
        return self.named.get(name)

    def even(self) -> bool:
        value = self.get("spacing")
        if value not in (None, "even", "poisson"):
            raise ValueError(f"spacing: expected even or poisson, got {value!r}")
        return value == "even"

    def check_all_read(self) -> None:
        """Raise ValueError if there is anything else."""
        for name in self.named:
            if name not in self._known:
                near = get_close_matches(name, self._known, 1)
                known = ", ".join(self._known) or "none"
                raise ValueError(
                    f"{name}: is no field of it ({f'did you mean {near[0]}?' if near else f'it has {known}'})"
                )
        if self.bare:
            raise ValueError(f"expected name=value, got {self.bare[0]!r}")


@dataclass(frozen=True, slots=True)
class _Field:
    name: str
    kind: Literal["number", "rate", "length"] = "number"
    least: float = 0.0
    most: float = _RATE_MAX
    default: float | None = None
    """None: it must be given."""

    def read(self, words: _Words) -> float | None:
        text = words.get(self.name)
        if text is None:
            if self.default is None:
                raise ValueError(f"{self.name}: is not given")
            return self.default
        return _length_ns(self.name, text) if self.kind == "length" else _number(self.name, text)

    def check(self, value: Any) -> None:
        if self.kind == "rate":
            _check_rate(self.name, value)
        elif self.kind == "length":
            _check_length(self.name, value)
        else:
            _check(self.name, value, self.least, self.most)

    def text(self, value: Any) -> str:
        return _duration(value) if self.kind == "length" else _plain(value)


def _number(name: str, text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ValueError(f"{name}: expected a number, got {text!r}") from None


def _length_ns(name: str, text: str) -> int:
    try:
        return parse_duration_ns(text)
    except ValueError as exc:
        raise ValueError(f"{name}: {exc}") from None


def _plain(value: float) -> str:
    """Format with all digits."""
    return repr(float(value)).removesuffix(".0")


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


# ---------------------------------------------------------------- processes

Offsets = Callable[[Random], Iterator[int]]
Values = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Kind:
    """A process: its syntax, its fields, and how offsets follow from their values and the mean rate."""

    form: str
    make: Callable[[Values, float], Offsets | Intensity]
    """Raises ValueError for values that do not go together."""
    fields: tuple[_Field, ...] = ()
    read: Callable[[_Words], dict[str, Any]] | None = None
    own_rates: bool = False
    spacing: bool = False


def _summed(gaps: Iterator[float], mean_ns: float) -> Iterator[int]:
    """Yield the running sum of gaps given in means, rounded down."""
    at_ns, carry = 0, 0.0
    for gap in gaps:
        exact = gap * mean_ns + carry
        whole = int(exact)
        carry = exact - whole
        at_ns += whole
        yield at_ns


def _poisson(values: Values, rate_rps: float) -> Offsets:
    return lambda random: _summed(exponential(random), NS_PER_S / rate_rps)


def _uniform(values: Values, rate_rps: float) -> Offsets:
    gap = NS_PER_S / Fraction(rate_rps)
    n, d = gap.numerator, gap.denominator
    return lambda random: ((2 * k * n + d) // (2 * d) for k in count())


def _gamma(values: Values, rate_rps: float) -> Offsets:
    """Gamma gaps of shape burstiness and scale 1 / (rate burstiness), as in `vllm bench serve`."""
    shape = values["burstiness"]
    return lambda random: _summed(
        (random.gammavariate(shape, 1 / shape) for _ in count()), NS_PER_S / rate_rps
    )


def _read_gamma(words: _Words) -> dict[str, Any]:
    burstiness, cv = words.get("burstiness"), words.get("cv")
    if (burstiness is None) == (cv is None):
        raise ValueError("burstiness or cv: exactly one of them must be given")
    if cv is None:
        return {"burstiness": _number("burstiness", burstiness or "")}
    value = _number("cv", cv)
    _check("cv", value, 1e-3, 1e3)
    return {"burstiness": value**-2}


def _on_off(values: Values, rate_rps: float) -> Intensity:
    """Bursts: the rate while on follows from the mean of a cycle and the rate while off."""
    on_ns, off_ns, idle_rps = values["on"], values["off"], values["idle"]
    if idle_rps > rate_rps:
        raise ValueError(f"idle: {idle_rps:g} is above the mean rate of {rate_rps:g}")
    on_rps = (rate_rps * (on_ns + off_ns) - idle_rps * off_ns) / on_ns
    return Intensity((), (Slope(on_ns, on_rps, on_rps), Slope(off_ns, idle_rps, idle_rps)))


def _ramp(values: Values, rate_rps: float) -> Intensity:
    """A rate that changes linearly and then stays."""
    to_rps = values["to"]
    return Intensity((Slope(values["over"], values["from"], to_rps),), (Slope(_STAY_NS, to_rps, to_rps),))


def _steps(values: Values, rate_rps: float) -> Intensity:
    last_rps = values["steps"][-1][0]
    lead = tuple(Slope(length_ns, rate, rate) for rate, length_ns in values["steps"])
    return Intensity(lead, (Slope(_STAY_NS, last_rps, last_rps),))


def _read_steps(words: _Words) -> dict[str, Any]:
    steps = []
    for i, word in enumerate(words.bare, 1):
        rate, times, length = word.partition("x")
        if not times:
            raise ValueError(f"step {i}: expected a rate, x and a time such as 10x30s, got {word!r}")
        steps.append((_number(f"step {i}", rate), _length_ns(f"step {i}", length)))
    words.bare = []
    if not steps:
        raise ValueError("no step is given")
    for i, (rate_rps, length_ns) in enumerate(steps, 1):
        _check(f"step {i}", rate_rps, 0.0, _RATE_MAX)
        _check_length(f"step {i}", length_ns)
    _check_rate("last step", steps[-1][0])
    return {"steps": tuple(steps)}


def _diurnal(values: Values, rate_rps: float) -> Intensity:
    """A sinusoid around the rate, rising at first; the amplitude is a share of the mean."""
    return Intensity((), (Wave(values["period"], rate_rps, values["amplitude"]),))


_KINDS: Final = {
    "poisson": _Kind(form="poisson", make=_poisson),
    "uniform": _Kind(form="uniform", make=_uniform),
    "gamma": _Kind(
        form="gamma:burstiness=0.5 or gamma:cv=2", make=_gamma, read=_read_gamma,
        fields=(_Field("burstiness", least=1e-6, most=1e6),),
    ),
    "onoff": _Kind(
        form="onoff:on=2s,off=8s[,idle=RPS][,spacing=even]", make=_on_off, spacing=True,
        fields=(_Field("on", "length"), _Field("off", "length"), _Field("idle", default=0.0)),
    ),
    "ramp": _Kind(
        form="ramp:from=1,to=50,over=60s[,spacing=even]", make=_ramp, spacing=True, own_rates=True,
        fields=(_Field("from"), _Field("to", "rate"), _Field("over", "length")),
    ),
    "steps": _Kind(
        form="steps:10x30s,20x30s[,spacing=even]", make=_steps, spacing=True, own_rates=True,
        read=_read_steps,
    ),
    "diurnal": _Kind(
        form="diurnal:amplitude=0.8,period=24h[,spacing=even]", make=_diurnal, spacing=True,
        fields=(_Field("amplitude", most=1.0), _Field("period", "length")),
    ),
}  # fmt: skip
FORMS: Final = {name: kind.form for name, kind in _KINDS.items()}
"""Syntax of each process, for help and hints."""
OWN_RATES: Final = frozenset(name for name, kind in _KINDS.items() if kind.own_rates)
"""Processes that name their rates themselves."""

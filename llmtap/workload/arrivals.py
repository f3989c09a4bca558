"""Parse arrival processes, and iterate over their seeded offsets.

- The offset of a row depends on seed and row alone. Each sending process iterates over all rows and takes its
  own.
- Random processes begin with a gap, so that the number of arrivals before t is Poisson (rate t). Even ones
  (`uniform`, `spacing=even`) begin at 0.
- Burstiness is the shape of gamma gaps, as in `vllm bench serve` (seed 002): 1 is Poisson, less is burstier;
  the gaps' coefficient of variation is 1 / sqrt(burstiness).

The rate is given separately, so that processes are compared at one load: it is the mean of a cycle (`onoff`)
or period (`diurnal`). `ramp` and `steps` name their rates themselves.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from difflib import get_close_matches
from random import Random
from typing import Final

from llmtap.errors import ConfigError
from llmtap.units import parse_duration_ns
from llmtap.workload.arrival_processes import (
    ArrivalProcess,
    Diurnal,
    Gamma,
    OnOff,
    Poisson,
    Ramp,
    Steps,
    UniformArrivals,
)

__all__ = ["FORMS", "OWN_RATES", "Arrivals", "parse_arrivals"]

FORMS: Final = {
    "poisson": "poisson",
    "uniform": "uniform",
    "gamma": "gamma:burstiness=0.5 or gamma:cv=2",
    "onoff": "onoff:on=2s,off=8s[,idle=RPS][,spacing=even]",
    "ramp": "ramp:from=1,to=50,over=60s[,spacing=even]",
    "steps": "steps:10x30s,20x30s[,spacing=even]",
    "diurnal": "diurnal:amplitude=0.8,period=24h[,spacing=even]",
}
"""Syntax of each process, for help and hints."""
OWN_RATES: Final = frozenset({"ramp", "steps"})
"""Processes that name their rates themselves."""


@dataclass(frozen=True, slots=True)
class Arrivals:
    """A process and its seed. Each iteration yields the same offsets."""

    process: ArrivalProcess
    seed: int

    def __iter__(self) -> Iterator[int]:
        """Yield offsets from the start in ns, never decreasing; endless."""
        # One stream of numbers for all processes: a burstiness of 1 is the very Poisson stream of this seed.
        return self.process.offsets(Random(f"{self.seed}/arrivals"))

    def describe(self) -> dict[str, object]:
        """Return JSON from which `parse_arrivals` makes the same arrivals."""
        return {"arrivals": self.process.text(), "rate_rps": self.process.rate_rps, "seed": self.seed}


def parse_arrivals(text: str, *, rate_rps: float | None, seed: int, place: str = "--arrivals") -> Arrivals:
    """Parse one of FORMS.

    `rate_rps`: overall mean; None for OWN_RATES. Raises ConfigError of `place` naming the process and its
    field.
    """
    name, _, rest = text.partition(":")
    name = name.strip()
    if name not in _READERS:
        near = get_close_matches(name, _READERS, 1)
        meant = f"did you mean {FORMS[near[0]]}?" if near else f"one of {', '.join(FORMS)}"
        raise ConfigError(place, f"no arrival process is called {name!r}", meant)
    try:
        fields = _Fields(rest)
        process = _READERS[name](fields, rate_rps)
        fields.check_all_read()
    except ValueError as exc:
        beside = "" if name in OWN_RATES else ", with a mean rate beside it"
        raise ConfigError(place, f"{name}: {exc}", f"it is written {FORMS[name]}{beside}") from None
    return Arrivals(process, seed)


class _Fields:
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

    def number(self, name: str, default: float | None = None) -> float:
        value = self._value(name, default is None)
        return default if value is None and default is not None else _number(name, value or "")

    def length_ns(self, name: str) -> int:
        return _length_ns(name, self._value(name) or "")

    def has(self, name: str) -> bool:
        self._known.append(name)
        return name in self.named

    def even(self) -> bool:
        value = self._value("spacing", needed=False)
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

    def _value(self, name: str, needed: bool = True) -> str | None:
        self._known.append(name)
        if needed and name not in self.named:
            raise ValueError(f"{name}: is not given")
        return self.named.get(name)


def _read_gamma(fields: _Fields, rate_rps: float | None) -> ArrivalProcess:
    by_burstiness, by_cv = fields.has("burstiness"), fields.has("cv")
    if by_burstiness == by_cv:
        raise ValueError("burstiness or cv: exactly one of them must be given")
    rate = _needed(rate_rps)
    if by_cv:
        return Gamma.by_cv(rate, fields.number("cv"))
    return Gamma(rate, fields.number("burstiness"))


def _read_on_off(fields: _Fields, rate_rps: float | None) -> ArrivalProcess:
    return OnOff(
        rate_rps=_needed(rate_rps), on_ns=fields.length_ns("on"), off_ns=fields.length_ns("off"),
        idle_rps=fields.number("idle", 0.0), even=fields.even(),
    )  # fmt: skip


def _read_ramp(fields: _Fields, rate_rps: float | None) -> ArrivalProcess:
    _none(rate_rps)
    return Ramp(
        from_rps=fields.number("from"), to_rps=fields.number("to"), over_ns=fields.length_ns("over"),
        even=fields.even(),
    )  # fmt: skip


def _read_steps(fields: _Fields, rate_rps: float | None) -> ArrivalProcess:
    _none(rate_rps)
    steps = []
    for i, word in enumerate(fields.bare, 1):
        rate, times, length = word.partition("x")
        if not times:
            raise ValueError(f"step {i}: expected a rate, x and a time such as 10x30s, got {word!r}")
        steps.append((_number(f"step {i}", rate), _length_ns(f"step {i}", length)))
    fields.bare = []
    return Steps(steps=tuple(steps), even=fields.even())


def _read_diurnal(fields: _Fields, rate_rps: float | None) -> ArrivalProcess:
    return Diurnal(
        rate_rps=_needed(rate_rps), amplitude=fields.number("amplitude"),
        period_ns=fields.length_ns("period"), even=fields.even(),
    )  # fmt: skip


_READERS: Final[dict[str, Callable[[_Fields, float | None], ArrivalProcess]]] = {
    "poisson": lambda _, rate_rps: Poisson(_needed(rate_rps)),
    "uniform": lambda _, rate_rps: UniformArrivals(_needed(rate_rps)),
    "gamma": _read_gamma,
    "onoff": _read_on_off,
    "ramp": _read_ramp,
    "steps": _read_steps,
    "diurnal": _read_diurnal,
}


def _needed(rate_rps: float | None) -> float:
    if rate_rps is None:
        raise ValueError("rate: is not given, and it needs a mean rate")
    return rate_rps


def _none(rate_rps: float | None) -> None:
    if rate_rps is not None:
        raise ValueError(f"rate: it names its rates itself, and takes none beside them (got {rate_rps:g})")


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

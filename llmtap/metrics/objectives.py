"""Objectives: bounds that an exchange must meet all at once, and which exchanges they judge.

Written `ttft:200ms tpot:50ms e2e:30s`. A conjunction, not an average: one bound broken and the exchange
is bad, however well it kept the others. A bound holds when the figure is at most the bound (`<=`).

Which exchanges count, by `Objectives.meets`:

| exchange | verdict |
|---|---|
| refused by the tap itself (`rejected`) | does not count: the gateway never saw it |
| lost with a relay that died (`tap_error`) | does not count: the failure is ours |
| `upstream_error` by a status of 400 to 499, but 408, 425 and 429 | does not count: the request was wrong |
| `upstream_error` otherwise, `upstream_timeout`, `upstream_reset`, `truncated` | bad |
| `client_cancelled` | bad if a bound was already past saving when the client left, else does not count |
| a stream that ended well and brought nothing | bad |
| `complete`, `refused` otherwise | by its figures |

A bound whose figure does not apply (TPOT of a one-token answer, TTFT of a pure tool call) is taken as
met. The bounds of streaming do not apply to an answer in one piece; one that no bound applies to does not
count, nor does a GET or HEAD that was not streamed (a model list is no answer).

Whose fault a status is: RFC 9110 15.5. 408, 425 and 429 ask for the same request again: it was right, and
was not served.

Source: seed 002 (goodput as a conjunction), seed 001 section 2.2 (attainment, goodput).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

from llmtap.errors import ConfigError
from llmtap.exchange.exchange import Exchange
from llmtap.exchange.outcome import Outcome
from llmtap.metrics.latency import Measured
from llmtap.metrics.statistics import percentile
from llmtap.units import parse_duration_ns

__all__ = ["BOUNDS", "STREAMED_BOUNDS", "Objectives"]


def _tbc_p99_ns(m: Measured) -> float | None:
    return percentile(sorted(m.tbc_ns), 0.99)


_FIGURES: Final[Mapping[str, Callable[[Measured], float | None]]] = {
    "ttft": lambda m: m.ttft_ns,
    "ttft_any": lambda m: m.ttft_any_ns,
    "ttfb": lambda m: m.ttfb_ns,
    "tpot": lambda m: m.tpot_ns,
    "e2e": lambda m: m.e2e_ns,
    "user_idle": lambda m: m.user_idle_ns,
    "tbc_max": lambda m: m.tbc_max_ns,
    "tbc_p99": _tbc_p99_ns,
    "jitter": lambda m: m.jitter_ns,
}
BOUNDS: Final = tuple(_FIGURES)
"""Every name a bound can have, in the order of the canonical text."""
STREAMED_BOUNDS: Final = frozenset(BOUNDS) - {"ttfb", "e2e"}
"""Those that say something about streams only."""

_WAITS: Final = frozenset({"ttft", "ttft_any", "ttfb", "e2e", "user_idle"})
"""Bounds that time alone breaks: an exchange that still lacks the point at bound + 1 ns can never meet it."""
_FINAL: Final = frozenset({"ttft", "ttft_any", "ttfb", "user_idle", "tbc_max"})
"""Figures that can only grow while a stream goes on, so that what is over the bound stays over it."""
_FAILED: Final = frozenset(
    {Outcome.UPSTREAM_ERROR, Outcome.UPSTREAM_TIMEOUT, Outcome.UPSTREAM_RESET, Outcome.TRUNCATED}
)
_OURS: Final = frozenset({Outcome.REJECTED, Outcome.TAP_ERROR})
_NOT_SERVED: Final = frozenset({408, 425, 429})
"""Statuses from 400 to 499 that a right request can get."""
_NO_INFERENCE: Final = frozenset({"GET", "HEAD", "OPTIONS", "DELETE"})
_UNITS: Final = (("s", 1_000_000_000), ("ms", 1_000_000), ("us", 1_000), ("ns", 1))


@dataclass(frozen=True, slots=True)
class Objectives:
    """Bounds in ns by name, in the order of `BOUNDS`, each name at most once."""

    bounds: tuple[tuple[str, int], ...]

    @classmethod
    def parse(cls, text: str, place: str = "objectives") -> "Objectives":
        """Objectives from `name:duration` pairs, separated by blanks or commas.

        Every duration needs its unit: `ttft:200` means milliseconds to vLLM and seconds elsewhere.

        Raises:
            ConfigError: naming `place`, the bad pair and the known names.
        """
        known = ", ".join(BOUNDS)
        bounds: dict[str, int] = {}
        for pair in text.replace(",", " ").split():
            name, colon, duration = pair.partition(":")
            if name not in _FIGURES:
                raise ConfigError(place, f"unknown objective {name!r} in {pair!r}", f"known are {known}")
            if name in bounds:
                raise ConfigError(place, f"objective {name!r} is given twice")
            if not colon or duration[-1:].isdigit() or not duration:
                raise ConfigError(
                    place, f"{pair!r} needs a duration with a unit", f"such as {name}:200ms, without a blank"
                )
            try:
                bounds[name] = parse_duration_ns(duration)
            except ValueError as exc:
                raise ConfigError(place, f"objective {name!r}: {exc}") from None
            if bounds[name] == 0:
                raise ConfigError(place, f"objective {name!r} must be above 0")
        if not bounds:
            raise ConfigError(
                place, "no objective is given", f"such as ttft:200ms tpot:50ms; known are {known}"
            )
        return cls(_ordered(bounds))

    @property
    def text(self) -> str:
        """The canonical form: names in a fixed order, each duration in its largest whole unit."""
        return " ".join(f"{name}:{_duration(ns)}" for name, ns in self.bounds)

    def replaced(self, **bounds_ns: int | None) -> "Objectives":
        """The same with some bounds set (ns); None leaves a bound as it is.

        For what a request asks for itself, such as `replaced(ttft=x.slo_ttft_ns, tpot=x.slo_tpot_ns)`.
        """
        given = {name: ns for name, ns in bounds_ns.items() if ns is not None}
        assert given.keys() <= _FIGURES.keys()
        return Objectives(_ordered(dict(self.bounds) | given)) if given else self

    def broken(self, m: Measured, x: Exchange) -> tuple[str, ...]:
        """The bounds that the exchange's own figures break, by name; whether it counts is not asked here."""
        return tuple(
            name
            for name, bound_ns in self.bounds
            if (x.stream or name not in STREAMED_BOUNDS)
            and (figure := _FIGURES[name](m)) is not None
            and figure > bound_ns
        )

    def meets(self, m: Measured, x: Exchange) -> bool | None:
        """Whether the exchange met every bound; None if it does not count (see the module)."""
        outcome = x.outcome
        if outcome in _OURS or (x.method in _NO_INFERENCE and not x.stream):
            return None
        if outcome is Outcome.UPSTREAM_ERROR and _is_wrong_request(x.status):
            return None
        if outcome in _FAILED:
            return False
        if outcome is Outcome.CLIENT_CANCELLED:
            return False if self._lost_by_waiting(m, x) else None
        if x.no_token_reason in _NOTHING:
            return False
        if not x.stream and all(name in STREAMED_BOUNDS for name, _ in self.bounds):
            return None
        return not self.broken(m, x)

    def _lost_by_waiting(self, m: Measured, x: Exchange) -> bool:
        """Whether a bound could not be met any more at the moment the client left.

        Means (`tpot`) and shares (`tbc_p99`, `jitter`) can recover, so they decide nothing here.
        """
        t = x.timeline
        left_ns, submit_ns = t.delivered_ns, t.submit_ns
        waited_ns = None if left_ns is None or submit_ns is None else left_ns - submit_ns
        silent_ns = None if left_ns is None or t.last_token_ns is None else left_ns - t.last_token_ns
        for name, bound_ns in self.bounds:
            if not x.stream and name in STREAMED_BOUNDS:
                continue
            figure = _FIGURES[name](m)
            if figure is not None and name in _FINAL and figure > bound_ns:
                return True
            if figure is None and name in _WAITS and waited_ns is not None and waited_ns > bound_ns:
                return True
            if name == "tbc_max" and silent_ns is not None and silent_ns > bound_ns:
                return True
        return False


_NOTHING: Final = frozenset({"empty", "only_metadata"})
"""Streams that ended well and brought nothing: they meet no one's objectives."""


def _is_wrong_request(status: int | None) -> bool:
    return status is not None and 400 <= status < 500 and status not in _NOT_SERVED


def _ordered(bounds: Mapping[str, int]) -> tuple[tuple[str, int], ...]:
    return tuple((name, bounds[name]) for name in BOUNDS if name in bounds)


def _duration(ns: int) -> str:
    unit, scale = next((unit, scale) for unit, scale in _UNITS if ns % scale == 0)
    return f"{ns // scale}{unit}"

"""What is asked of whoever watches the objectives, however it is written: windows, alarms, recordings.

A Promise is a class of tenants with the alarms that can ring at its target: for pages those that the meter
watches itself, with the class's own burn rates, for tickets the Workbook's. An alarm that cannot ring is kept
apart, so that whoever writes the rules down can say that it is missing.

Source: SRE Workbook, chapter 5; `metrics/burn.py` has the arithmetic.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from llmtap.meter.slo import SloClass
from llmtap.metrics.burn import PERIOD_NS, STANDARD_ALARMS, Alarm, burn_rate_max, reachable

__all__ = [
    "BURN",
    "EVENTS",
    "GOOD",
    "LONG",
    "PERIOD_DAYS",
    "SHORT",
    "Alert",
    "Objective",
    "Recording",
    "missing",
    "promises",
    "runbook_url",
    "window",
]

BURN: Final = "LlmtapErrorBudgetBurn"
"""The alert of every alarm."""
EVENTS: Final = "llmtap_slo_events_total"
GOOD: Final = "llmtap_slo_good_total"
"""The counters of `/metrics`, by class and tenant."""
SHORT: Final = ("5m", "30m", "1h", "2h", "6h")
LONG: Final = ("1d", "3d", "30d")
"""The windows of Sloth's recordings: those of the alarms, and the period."""
_DAY_NS: Final = 86_400_000_000_000
_HOUR_NS: Final = 3_600_000_000_000
_MINUTE_NS: Final = 60_000_000_000
PERIOD_DAYS: Final = PERIOD_NS // _DAY_NS
_TICKETS: Final = tuple(alarm for alarm in STANDARD_ALARMS if alarm.severity == "ticket")


@dataclass(frozen=True, slots=True)
class Objective:
    """A class of tenants, what it was promised, and the alarms about it."""

    name: str
    bounds: str
    """What an exchange must meet, as text: `ttft:500ms tpot:50ms`."""
    bounds_ns: tuple[tuple[str, int], ...]
    """The same by objective."""
    target: float
    alarms: tuple[Alarm, ...]
    unreachable: tuple[Alarm, ...]
    """Standard alarms that can never ring at this target, and are left out."""

    @classmethod
    def of(cls, slo: SloClass) -> "Objective":
        """What the meter judges by, with the tickets that it leaves to others."""
        tickets = [alarm for alarm in _TICKETS if reachable(slo.target, alarm.factor)]
        return cls(
            slo.name,
            slo.objectives.text,
            slo.objectives.bounds,
            slo.target,
            (*slo.alarms, *tickets),
            (*slo.unreachable, *(alarm for alarm in _TICKETS if alarm not in tickets)),
        )

    @property
    def budget(self) -> float:
        """The share of exchanges that may be bad, without the noise of 1 - 0.99."""
        return round(1 - self.target, 12)


@dataclass(frozen=True, slots=True)
class Recording:
    """An expression whose value is kept as a series of its own."""

    record: str
    expr: str
    labels: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Alert:
    """An expression that somebody is told of while it has a value."""

    name: str
    """Also that of its page in `deploy/runbooks/`."""
    severity: str
    """`page`: somebody looks now; `ticket`: this week."""
    expr: str
    summary: str
    description: str
    wait: str | None = None
    """How long it must hold first, as Prometheus writes durations."""
    labels: Mapping[str, str] | None = None


def promises(classes: Iterable[SloClass]) -> list[Objective]:
    """One for each class, in their order."""
    return [Objective.of(slo) for slo in classes]


def missing(promise: Objective) -> list[str]:
    """A sentence for each alarm that is left out because it can never ring."""
    most = burn_rate_max(promise.target)
    return [
        f"slo.{promise.name}: no {alarm.severity} over {window(alarm.long_ns)} and {window(alarm.short_ns)}:"
        f" a burn rate above {alarm.factor:g} can't be seen at the target {promise.target:g}, where it is"
        f" {most:.4g} with every exchange bad{_instead(alarm, most)}"
        for alarm in promise.unreachable
    ]


def _instead(alarm: Alarm, most: float) -> str:
    if alarm.severity != "page":
        return ""
    return f'; burn = {{ "{window(alarm.long_ns)}" = N }} sets one below {most:.4g}'


def runbook_url(runbooks: str, alert: str) -> str:
    """An alert's page: a file of its name below `runbooks`, or what that says with `{alert}` in it."""
    if "{alert}" in runbooks:
        return runbooks.replace("{alert}", alert)
    return f"{runbooks.rstrip('/')}/{alert}.md"


def window(ns: int) -> str:
    """A window's name, as Prometheus writes durations: `5m`, `6h`, `3d`."""
    for unit, scale in (("d", _DAY_NS), ("h", _HOUR_NS)):
        if ns % scale == 0:
            return f"{ns // scale}{unit}"
    return f"{ns // _MINUTE_NS}m"

"""Classes of tenants with objectives: their options, and the burn-rate alarms that each can raise."""

import re
from dataclasses import dataclass, replace
from typing import Annotated, Final

from msgspec import Meta, Struct

from llmtap.errors import ConfigError
from llmtap.metrics.burn import STANDARD_ALARMS, Alarm, check_objective, check_reachable, reachable
from llmtap.metrics.objectives import Objectives

__all__ = ["SloClass", "SloOptions", "check_slos"]

ALARMS: Final = {"1h": STANDARD_ALARMS[0], "6h": STANDARD_ALARMS[1]}
"""The burn-rate alarms that the meter evaluates itself, by their long window."""
_TICKETS: Final = tuple(alarm for alarm in STANDARD_ALARMS if alarm.severity == "ticket")
_CLASS: Final = re.compile(r"[A-Za-z0-9_.-]{1,64}")


class SloOptions(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Objectives of one class of tenants; validated by `check_slos`, which knows the names."""

    objectives: Annotated[
        str, Meta(description="Bounds that an exchange must meet all at once: `ttft:500ms tpot:50ms`.")
    ]
    target: Annotated[float, Meta(description="Share of the exchanges that must meet them.")] = 0.99
    tenants: Annotated[
        tuple[str, ...],
        Meta(description="Names, or patterns with * and ?; none: the class of all who are in no other."),
    ] = ()
    burn: Annotated[
        dict[str, float],
        Meta(description='Burn rates that ring, by long window (short: a twelfth): { "1h" = 14.4 }.'),
    ] = {}

    @property
    def parsed(self) -> Objectives:
        return Objectives.parse(self.objectives)


@dataclass(frozen=True, slots=True)
class SloClass:
    """One class of tenants with validated objectives."""

    name: str
    objectives: Objectives
    target: float
    tenants: tuple[str, ...]
    alarms: tuple[Alarm, ...]
    """Pages that can ring at this target, which the meter evaluates itself."""
    unreachable: tuple[Alarm, ...]
    """Standard pages that cannot ring."""

    @classmethod
    def of(cls, name: str, options: SloOptions) -> "SloClass":
        alarms: list[Alarm] = []
        unreachable: list[Alarm] = []
        for window, alarm in ALARMS.items():
            if options.burn and window not in options.burn:
                continue
            alarm = replace(alarm, factor=options.burn.get(window, alarm.factor))
            (alarms if reachable(options.target, alarm.factor) else unreachable).append(alarm)
        return cls(name, options.parsed, options.target, options.tenants, tuple(alarms), tuple(unreachable))

    @property
    def budget(self) -> float:
        """Share of exchanges that may be bad, without the noise of 1 - 0.99."""
        return round(1 - self.target, 12)

    def with_tickets(self) -> "SloClass":
        """The same class with the tickets of the SRE Workbook, which the meter leaves to Prometheus."""
        tickets = [alarm for alarm in _TICKETS if reachable(self.target, alarm.factor)]
        silent = [alarm for alarm in _TICKETS if alarm not in tickets]
        return replace(
            self, alarms=(*self.alarms, *tickets), unreachable=(*self.unreachable, *silent)
        )  # fmt: skip


def check_slos(classes: dict[str, SloOptions]) -> None:
    """Validate all classes together: names, objectives, burn rates, no tenant twice. Raises ConfigError."""
    default: str | None = None
    owner: dict[str, str] = {}
    for name, slo in classes.items():
        place = f"slo.{name}"
        if not _CLASS.fullmatch(name):
            raise ConfigError(place, f"{name!r} is no name for a class", "letters, digits and _ . - only")
        Objectives.parse(slo.objectives, f"{place}.objectives")
        check_objective(slo.target, f"{place}.target")
        for window, factor in slo.burn.items():
            if window not in ALARMS:
                raise ConfigError(
                    f"{place}.burn", f"no alarm has a long window of {window!r}", f"use {' or '.join(ALARMS)}"
                )
            check_reachable(slo.target, factor, f"{place}.burn.{window}")
        if not slo.tenants and default is not None:
            raise ConfigError(
                f"{place}.tenants", f"is empty, as that of slo.{default}: both are of all others", "name some"
            )
        default = default if slo.tenants else name
        for tenant in slo.tenants:
            if owner.setdefault(tenant, name) != name:
                raise ConfigError(f"{place}.tenants", f"{tenant!r} is in slo.{owner[tenant]} already")

"""Service level objectives of classes of tenants: options, burn rates of the error budget, and alarms.

Definitions and arithmetic only: the options of a class and their check (`check_slos`, for the configuration),
and the class of a tenant (`TenantClasses`). Nothing is counted here. `meter/slo.py` counts exchanges in
windows, `export/rules.py` writes alert rules. The latency bounds that make an exchange good are in
`objectives.py`.

An objective is the share of exchanges that must be good (0.99); the error budget is the rest. Burn rate 1
uses exactly the budget of the period. An alarm watches a long window and a short one of a twelfth of its
length.

Source: SRE Workbook, chapter 5 (multi-window, multi-burn-rate alerts).
"""

import fnmatch
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from math import ceil
from typing import Annotated, Final, Literal

from msgspec import Meta, Struct

from llmtap.errors import ConfigError, errors_of_check, raise_all
from llmtap.metrics.deadlines import Benefit
from llmtap.metrics.idle_cost import check_idle_cost
from llmtap.metrics.objectives import SCHEDULED_BOUNDS, Objectives
from llmtap.options.fields import opt

_HOUR_NS: Final = 3_600_000_000_000
_DAY_NS: Final = 24 * _HOUR_NS
PERIOD_NS: Final = 30 * _DAY_NS
"""Period of the standard factors."""


@dataclass(frozen=True, slots=True)
class Alarm:
    """Burn-rate alarm, which rings while the burn rate over both windows is above `factor`."""

    severity: str
    long_ns: int
    short_ns: int
    budget: float
    """Share of the period's budget that is used when the long window burns at `factor` throughout."""
    factor: float

    def rings(self, long_rate: float | None, short_rate: float | None) -> bool:
        """Return whether the alarm rings at these burn rates of the long and short window; None: unknown."""
        return (
            long_rate is not None
            and short_rate is not None
            and long_rate > self.factor
            and short_rate > self.factor
        )


STANDARD_ALARMS: Final = tuple(
    Alarm(severity, long_ns, long_ns // 12, budget, budget * PERIOD_NS / long_ns)
    for severity, long_ns, budget in (
        ("page", _HOUR_NS, 0.02),
        ("page", 6 * _HOUR_NS, 0.05),
        ("ticket", _DAY_NS, 0.10),
        ("ticket", 3 * _DAY_NS, 0.10),
    )
)
"""The four alarms of the Workbook: burn rates 14.4, 6, 3 and 1 over 30 days."""


def error_ratio(good: int, counted: int) -> float | None:
    """Return the share of bad exchanges among those that counted; None if none did."""
    return None if counted == 0 else (counted - good) / counted


def burn_rate(ratio: float | None, objective: float) -> float | None:
    """Return the burn rate: error ratio / (1 - objective). At 1, the budget is used exactly as fast as
    allowed."""
    return None if ratio is None else ratio / (1 - objective)


def burn_rate_max(objective: float) -> float:
    """Return the burn rate if every exchange is bad: 1 / (1 - objective). No alarm above it can ring."""
    return 1 / (1 - objective)


def reachable(objective: float, factor: float) -> bool:
    """Return whether a burn rate *above* `factor` is possible: factor (1 - objective) < 1."""
    return factor * (1 - objective) < 1 - 1e-9  # 1e-9: rounding errors, as of 14.4 x 0.0694..., which is 1


def check_objective(objective: float, place: str) -> None:
    """Check that an objective is above 0 and below 1. Raises ConfigError naming `place`."""
    if not 0 < objective < 1:
        hint = f"for {objective:g} %, write {objective / 100:g}" if 2 <= objective < 100 else None
        raise ConfigError(place, f"expected a share between 0 and 1, got {objective!r}", hint)


def check_reachable(objective: float, factor: float, place: str) -> None:
    """Refuse a burn-rate factor that the objective can never exceed. Raises ConfigError naming `place`."""
    check_objective(objective, place)
    if factor <= 0:
        raise ConfigError(place, f"expected a burn-rate factor above 0, got {factor:g}")
    if not reachable(objective, factor):
        factor_max = burn_rate_max(objective)
        raise ConfigError(
            place,
            f"a burn rate above {factor:g} is impossible with the target {objective:g}: "
            f"with every exchange bad it is 1 / (1 - {objective:g}) = {factor_max:.4g}",
            f"use a factor below {factor_max:.4g}, or a target above {1 - 1 / factor:.4g}"
            if factor > 1
            else f"use a factor below {factor_max:.4g}",
        )


def events_min(objective: float, factor: float) -> int:
    """Return the number of exchanges that a window needs so that a single bad one cannot make the alarm ring:

    1 / (factor (1 - objective)).
    """
    return max(1, ceil(1 / (factor * (1 - objective)) - 1e-9))


ALARMS: Final = {"1h": STANDARD_ALARMS[0], "6h": STANDARD_ALARMS[1]}
_TICKETS: Final = tuple(alarm for alarm in STANDARD_ALARMS if alarm.severity == "ticket")
_CLASS: Final = re.compile(r"[A-Za-z0-9_.-]{1,64}")


class SloOptions(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Objectives of one class of tenants; validated by `check_slos`, which knows the names."""

    objectives: Annotated[str, opt("Bounds that a good exchange meets, all of them: `ttft:500ms tpot:50ms`.")]
    target: Annotated[float, opt("Fraction of exchanges that must meet the objectives.")] = 0.99
    tenants: Annotated[
        tuple[str, ...],
        opt("Tenant names or patterns with * and ?; none: all tenants that are in no other class."),
    ] = ()
    per: Annotated[
        Literal["class", "tenant"],
        opt(
            "Owner of an error budget: the class, or each of its tenants, which then have alarms "
            "of their own."
        ),
    ] = "class"
    count_own_faults: Annotated[
        bool,
        opt(
            "Count exchanges in which llmtap itself failed (`rejected`, `tap_error`) as bad; "
            "false: they are left out and counted separately."
        ),
    ] = False
    burn: Annotated[
        dict[str, float],
        opt('Burn-rate limit of each alert, by its long window: { "1h" = 14.4 }; the short window is 1/12.'),
    ] = {}
    reader_tokens_per_second: Annotated[
        Annotated[float, Meta(gt=0, le=1e6)] | None,
        opt("Reading speed of these tenants (default: the meter's)."),
    ] = None
    alpha: Annotated[
        Annotated[float, Meta(ge=0)] | None,
        opt("Penalty in smooth goodput of these tenants (default: the meter's)."),
    ] = None
    idle_cost: Annotated[
        str | None, opt("Cost of idle latency of these tenants, as `meter.idle_cost` (default: the meter's).")
    ] = None

    def reader(self, usual: Benefit) -> Benefit:
        """Return speed and idle cost of a user in this class; `usual` has the values that it leaves out."""
        speed = self.reader_tokens_per_second
        return Benefit(
            usual.alpha if self.alpha is None else self.alpha,
            usual.reader_ns_per_token if speed is None else round(1e9 / speed),
            self.idle_cost or usual.f,
            usual.grace_tokens,
        )

    @property
    def parsed_objectives(self) -> Objectives:
        return replace(Objectives.parse(self.objectives), count_own_faults=self.count_own_faults)


@dataclass(frozen=True, slots=True)
class SloClass:
    name: str
    objectives: Objectives
    target: float
    tenants: tuple[str, ...]
    alarms: tuple[Alarm, ...]
    """Pages that can ring at this target, evaluated by the meter."""
    unreachable: tuple[Alarm, ...]
    """Standard pages that cannot ring."""
    per_tenant: bool = False
    """Whether each tenant has an error budget of its own. An alarm of the class is then silent if exactly one
    tenant's alarm rings, so that one cause raises one alarm."""

    @classmethod
    def of(cls, name: str, options: SloOptions) -> "SloClass":
        """Return the class of validated options."""
        objectives = options.parsed_objectives
        alarms: list[Alarm] = []
        unreachable: list[Alarm] = []
        for window, alarm in ALARMS.items():
            if options.burn and window not in options.burn:
                continue
            alarm = replace(alarm, factor=options.burn.get(window, alarm.factor))
            (alarms if reachable(options.target, alarm.factor) else unreachable).append(alarm)
        return cls(
            name,
            objectives,
            options.target,
            options.tenants,
            tuple(alarms),
            tuple(unreachable),
            options.per == "tenant",
        )

    @property
    def budget(self) -> float:
        """Share of exchanges that may be bad, rounded: 1 - 0.99 is not exactly 0.01 in binary."""
        return round(1 - self.target, 12)

    def with_tickets(self) -> "SloClass":
        """Return the same class with the tickets of the SRE Workbook, which the meter leaves to
        Prometheus."""
        tickets = [alarm for alarm in _TICKETS if reachable(self.target, alarm.factor)]
        silent = [alarm for alarm in _TICKETS if alarm not in tickets]
        return replace(self, alarms=(*self.alarms, *tickets), unreachable=(*self.unreachable, *silent))


TENANTS_CACHED: Final = 10_000
"""Maximum number of tenants whose class is cached."""


_WILDCARDS: Final = "*?["


class TenantClasses:
    """Finds the class of a tenant: by name, else by pattern, else the one without tenants."""

    def __init__(self, classes: Iterable[SloClass]) -> None:
        self.named: dict[str, SloClass] = {}
        self._patterns: list[tuple[Callable[[str], object], SloClass]] = []
        self._default: SloClass | None = None
        self._cached: dict[str, SloClass | None] = {}
        for slo in classes:
            for tenant in slo.tenants:
                if any(sign in tenant for sign in _WILDCARDS):
                    self._patterns.append((re.compile(fnmatch.translate(tenant)).match, slo))
                else:
                    self.named[tenant] = slo
            if not slo.tenants and self._default is None:
                self._default = slo

    def of(self, tenant: str) -> SloClass | None:
        """Return the class of a tenant; None if it has none."""
        try:
            return self._cached[tenant]
        except KeyError:
            pass
        chosen = self.named.get(tenant)
        if chosen is None:
            chosen = next((slo for match, slo in self._patterns if match(tenant)), self._default)
        if len(self._cached) >= TENANTS_CACHED:
            self._cached.clear()
        self._cached[tenant] = chosen
        return chosen


def check_slos(classes: dict[str, SloOptions]) -> None:
    """Validate all classes together: names, objectives, burn rates, no tenant twice.

    Raises ConfigError, which lists all mistakes.
    """
    raise_all(_problems(classes))


def _check_objectives(text: str, place: str) -> None:
    bounds = dict(Objectives.parse(text, place).bounds)
    for name, scheduled in SCHEDULED_BOUNDS.items():
        if scheduled in bounds:
            raise ConfigError(
                place,
                f"{scheduled} applies only to a load generator, which has scheduled times",
                f"for traffic of clients, use {name}",
            )


def _problems(classes: dict[str, SloOptions]) -> Iterator[ConfigError]:
    default: str | None = None
    owner: dict[str, str] = {}
    all_others: str | None = None
    for name, slo in classes.items():
        place = f"slo.{name}"
        if not _CLASS.fullmatch(name):
            yield ConfigError(
                place, f"{name!r} is not a valid name of a class", "use only letters, digits and _ . -"
            )
        yield from errors_of_check(_check_objectives, slo.objectives, f"{place}.objectives")
        if slo.idle_cost is not None:
            yield from errors_of_check(check_idle_cost, slo.idle_cost, f"{place}.idle_cost")
        wrong_target = list(errors_of_check(check_objective, slo.target, f"{place}.target"))
        yield from wrong_target
        for window, factor in slo.burn.items():
            if window not in ALARMS:
                hint = f"use {' or '.join(ALARMS)}"
                yield ConfigError(f"{place}.burn", f"no alarm has a long window of {window!r}", hint)
            elif not wrong_target:
                yield from errors_of_check(check_reachable, slo.target, factor, f"{place}.burn.{window}")
        if not slo.tenants and default is not None:
            yield ConfigError(
                f"{place}.tenants",
                f"is empty, and so is slo.{default}.tenants: only one class can be that of all other tenants",
                "name the tenants of one of them",
            )
        default = default if slo.tenants else name
        for tenant in slo.tenants:
            if owner.setdefault(tenant, name) != name:
                yield ConfigError(f"{place}.tenants", f"{tenant!r} is in slo.{owner[tenant]} already")
            elif all_others not in (None, name) and any(sign in tenant for sign in _WILDCARDS):
                yield ConfigError(
                    f"{place}.tenants",
                    f"{tenant!r} never applies: slo.{all_others}.tenants has '*', and comes first",
                    f"move [slo.{all_others}] to the end",
                )
        if "*" in slo.tenants:
            all_others = all_others or name

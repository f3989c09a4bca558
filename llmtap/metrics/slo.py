"""Service level objectives of classes of tenants: options, burn rates of the error budget, and alarms.

This module has the options of a class and their check (`check_slos`, for the configuration), the class of a
tenant (`TenantClasses`), and the arithmetic. It counts nothing: `meter/slo.py` counts exchanges in windows,
and `export/rules.py` writes alert rules. The latency bounds that make an exchange good are in
`objectives.py`.

An objective is the share of exchanges that must be good (0.99); the error budget is the share that may be bad
(0.01). At a burn rate of 1, the errors use exactly the budget of the period. An alarm watches a long window
and a short window, which has a twelfth of the length.

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
"""Period of the error budget for which the factors of STANDARD_ALARMS are computed."""


@dataclass(frozen=True, slots=True)
class Alarm:
    """Burn-rate alarm: it rings while the burn rates of two windows, long and short, exceed `factor`."""

    severity: str
    """`page`, evaluated by the meter, or `ticket`, evaluated by Prometheus."""
    long_ns: int
    """Length of the long window, which decides that errors are many."""
    short_ns: int
    """Length of the short window, which ends the alarm soon after the cause."""
    budget: float
    """Share of the period's error budget that errors use in one long window at a burn rate of `factor`."""
    factor: float
    """Burn rate above which the alarm rings, if both windows exceed it."""

    def rings(self, long_rate: float | None, short_rate: float | None) -> bool:
        """Return whether the alarm rings at these burn rates; False if a rate is unknown (None)."""
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
"""The four alarms of the SRE Workbook; their factors are 14.4, 6, 3 and 1."""


def error_ratio(good: int, counted: int) -> float | None:
    """Return the share of bad exchanges among the `counted` exchanges; None if `counted` is 0."""
    return None if counted == 0 else (counted - good) / counted


def error_budget(objective: float) -> float:
    """Return the share of exchanges that are allowed to be bad: 1 - objective, without errors of floats."""
    return round(1 - objective, 12)


def burn_rate(ratio: float | None, objective: float) -> float | None:
    """Return the burn rate, error ratio / (1 - objective): 1 if the errors use exactly the error budget.

    It is rounded to remove errors of floats: an alarm with factor 5 must not ring at a rate of exactly 5.
    """
    return None if ratio is None else round(ratio / error_budget(objective), 12)


def burn_rate_max(objective: float) -> float:
    """Return the highest burn rate, 1 / (1 - objective), which occurs if every exchange is bad."""
    return round(1 / error_budget(objective), 12)


def reachable(objective: float, factor: float) -> bool:
    """Return whether a burn rate above `factor` is possible: factor (1 - objective) < 1."""
    # 1e-9 allows for errors of floats: 14.4 x 0.0694... is 1, but its float can be slightly below 1.
    return factor * (1 - objective) < 1 - 1e-9


def check_objective(objective: float, place: str) -> None:
    """Raise ConfigError naming `place` unless the objective is above 0 and below 1."""
    if not 0 < objective < 1:
        hint = f"for {objective:g} %, write {objective / 100:g}" if 2 <= objective < 100 else "such as 0.99"
        raise ConfigError(place, f"expected a share between 0 and 1, got {objective!r}", hint)


def check_reachable(objective: float, factor: float, place: str) -> None:
    """Raise ConfigError naming `place` if the burn rate can never exceed `factor` with this objective."""
    check_objective(objective, place)
    if factor <= 0:
        raise ConfigError(place, f"expected a burn-rate factor above 0, got {factor:g}", "such as 14.4")
    if not reachable(objective, factor):
        factor_max = burn_rate_max(objective)
        raise ConfigError(
            place,
            f"a burn rate above {factor:g} is impossible with the target {objective:g}: "
            f"if every exchange is bad, the rate is 1 / (1 - {objective:g}) = {factor_max:.4g}",
            f"use a factor below {factor_max:.4g}, or a target above {1 - 1 / factor:.4g}"
            if factor > 1
            else f"use a factor below {factor_max:.4g}",
        )


def events_min(objective: float, factor: float) -> int:
    """Return the minimum number of exchanges in a window in which one bad exchange does not ring the alarm.

    It is 1 / (factor (1 - objective)), rounded up.
    """
    return max(1, ceil(1 / (factor * (1 - objective)) - 1e-9))


ALARMS: Final = {"1h": STANDARD_ALARMS[0], "6h": STANDARD_ALARMS[1]}
"""Alarms that the meter evaluates (pages), by their long window."""
_TICKETS: Final = tuple(alarm for alarm in STANDARD_ALARMS if alarm.severity == "ticket")
_CLASS: Final = re.compile(r"[A-Za-z0-9_.-]{1,64}")


class SloOptions(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Options of one class of tenants, as in the configuration. `check_slos` validates them."""

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
        """Return the reader's parameters of this class; `usual`: values for omitted options."""
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
    """A class of tenants with one service level objective: the share `target` of exchanges must be good."""

    name: str
    objectives: Objectives
    target: float
    """Share of exchanges that should be good."""
    tenants: tuple[str, ...]
    """Names or patterns of the tenants in the class."""
    alarms: tuple[Alarm, ...]
    """Alarms that can ring at this target: those of the meter; after `with_tickets`, also the tickets."""
    unreachable_alarms: tuple[Alarm, ...]
    """Alarms that cannot ring at this target, because the burn rate never exceeds their factor."""
    per_tenant: bool = False
    """Whether each tenant has its own error budget. The alarm of the class is then silent while exactly one
    tenant's alarm rings, so that one cause raises one alarm."""

    @classmethod
    def of(cls, name: str, options: SloOptions) -> "SloClass":
        """Return the class with these options, which must be valid (`check_slos`)."""
        objectives = options.parsed_objectives
        alarms: list[Alarm] = []
        unreachable_alarms: list[Alarm] = []
        for window, alarm in ALARMS.items():
            if options.burn and window not in options.burn:
                continue
            alarm = replace(alarm, factor=options.burn.get(window, alarm.factor))
            (alarms if reachable(options.target, alarm.factor) else unreachable_alarms).append(alarm)
        return cls(
            name,
            objectives,
            options.target,
            options.tenants,
            tuple(alarms),
            tuple(unreachable_alarms),
            options.per == "tenant",
        )

    @property
    def budget(self) -> float:
        """Error budget: share of exchanges that are allowed to be bad."""
        return error_budget(self.target)

    def with_tickets(self) -> "SloClass":
        """Return a copy with the ticket alarms of the SRE Workbook, which only Prometheus evaluates."""
        tickets = [alarm for alarm in _TICKETS if reachable(self.target, alarm.factor)]
        silent = [alarm for alarm in _TICKETS if alarm not in tickets]
        return replace(
            self, alarms=(*self.alarms, *tickets), unreachable_alarms=(*self.unreachable_alarms, *silent)
        )


TENANTS_CACHED_MAX: Final = 10_000
"""Maximum number of tenants whose class is cached; then the cache is emptied."""


_WILDCARDS: Final = "*?["


class TenantClasses:
    """Finds the class of a tenant: by name, else by pattern, else the class that lists no tenants."""

    def __init__(self, classes: Iterable[SloClass]) -> None:
        self.by_tenant: dict[str, SloClass] = {}
        """Classes by the tenants that the configuration names, without patterns."""
        self._patterns: list[tuple[Callable[[str], object], SloClass]] = []
        """For each pattern of tenants: a function that returns whether a name matches, and the class."""
        self._default_class: SloClass | None = None
        """Class of all tenants that no other class lists; None: there is none."""
        self._class_cache: dict[str, SloClass | None] = {}
        """By tenant: class found earlier."""
        for slo in classes:
            for tenant in slo.tenants:
                if any(sign in tenant for sign in _WILDCARDS):
                    self._patterns.append((re.compile(fnmatch.translate(tenant)).match, slo))
                else:
                    self.by_tenant[tenant] = slo
            if not slo.tenants and self._default_class is None:
                self._default_class = slo

    def of(self, tenant: str) -> SloClass | None:
        """Return the class of a tenant; None if it is in no class."""
        try:
            return self._class_cache[tenant]
        except KeyError:
            pass
        chosen = self.by_tenant.get(tenant)
        if chosen is None:
            chosen = next((slo for match, slo in self._patterns if match(tenant)), self._default_class)
        if len(self._class_cache) >= TENANTS_CACHED_MAX:
            self._class_cache.clear()
        self._class_cache[tenant] = chosen
        return chosen


def check_slos(classes: dict[str, SloOptions]) -> None:
    """Validate all classes together: names, objectives, burn rates, and that no tenant is in two classes.

    Raises a ConfigError that lists all mistakes.
    """
    raise_all(_problems(classes))


def _check_objectives(text: str, place: str) -> None:
    bounds = dict(Objectives.parse(text, place).bounds)
    for name, scheduled in SCHEDULED_BOUNDS.items():
        if scheduled in bounds:
            raise ConfigError(
                place,
                f"{scheduled!r} needs scheduled times, which only requests of the load generator have",
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
                place, f"{name!r} is not a valid class name", "use 1 to 64 letters, digits and _ . -"
            )
        yield from errors_of_check(_check_objectives, slo.objectives, f"{place}.objectives")
        if slo.idle_cost is not None:
            yield from errors_of_check(check_idle_cost, slo.idle_cost, f"{place}.idle_cost")
        wrong_target = list(errors_of_check(check_objective, slo.target, f"{place}.target"))
        yield from wrong_target
        for window, factor in slo.burn.items():
            if window not in ALARMS:
                hint = f"use {' or '.join(ALARMS)}"
                yield ConfigError(f"{place}.burn", f"no alarm has the long window {window!r}", hint)
            elif not wrong_target:
                yield from errors_of_check(check_reachable, slo.target, factor, f"{place}.burn.{window}")
        if not slo.tenants and default is not None:
            yield ConfigError(
                f"{place}.tenants",
                f"is empty, like slo.{default}.tenants, but only one class can apply to all unlisted tenants",
                f"list the tenants of slo.{name} or slo.{default}",
            )
        default = default if slo.tenants else name
        for tenant in slo.tenants:
            if owner.setdefault(tenant, name) != name:
                problem = f"{tenant!r} is already in slo.{owner[tenant]}.tenants"
                yield ConfigError(f"{place}.tenants", problem, "remove it from one of the two lists")
            elif all_others not in (None, name) and any(sign in tenant for sign in _WILDCARDS):
                yield ConfigError(
                    f"{place}.tenants",
                    f"{tenant!r} has no effect: slo.{all_others}.tenants has '*' and is before it",
                    f"move [slo.{all_others}] to the end",
                )
        if "*" in slo.tenants:
            all_others = all_others or name

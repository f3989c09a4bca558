"""Burn rates: how many times faster than allowed an error budget is spent, and which alarms can ring.

An objective is the share of exchanges that must be good (0.99); its budget is the rest (0.01). Spending
at rate 1 uses the budget up exactly at the end of the period. An alarm watches a long window, so that it
is about something, and a short one of a twelfth of its length, so that it ends soon after the trouble.

Source: SRE Workbook, chapter 5 (multi-window, multi-burn-rate alerts).
"""

from dataclasses import dataclass
from math import ceil
from typing import Final

from llmtap.errors import ConfigError

__all__ = [
    "PERIOD_NS", "STANDARD_ALARMS", "Alarm", "burn_rate", "burn_rate_max", "check_objective",
    "check_reachable", "error_ratio", "events_min", "factor", "reachable",
    "standard_alarms",
]  # fmt: skip

_HOUR_NS: Final = 3_600_000_000_000
_DAY_NS: Final = 24 * _HOUR_NS
PERIOD_NS: Final = 30 * _DAY_NS
"""What the standard factors are reckoned over."""


@dataclass(frozen=True, slots=True)
class Alarm:
    """Rings while the burn rate over both windows is above `factor`."""

    severity: str
    """`page` or `ticket`."""
    long_ns: int
    short_ns: int
    budget: float
    """Share of the period's budget that is gone when the long window burns at `factor` throughout."""
    factor: float

    def rings(self, long_rate: float | None, short_rate: float | None) -> bool:
        """Whether it rings at these burn rates; never on a window in which nothing counted."""
        return (
            long_rate is not None
            and short_rate is not None
            and long_rate > self.factor
            and short_rate > self.factor
        )


def factor(budget: float, long_ns: int, period_ns: int = PERIOD_NS) -> float:
    """The burn rate that spends the share `budget` of a period's budget in one long window."""
    return budget * period_ns / long_ns


def standard_alarms(period_ns: int = PERIOD_NS) -> tuple[Alarm, ...]:
    """The four alarms of the Workbook for a period of any length (14.4, 6, 3 and 1 over 30 days)."""
    return tuple(
        Alarm(severity, long_ns, short_ns, budget, factor(budget, long_ns, period_ns))
        for severity, long_ns, short_ns, budget in (
            ("page", _HOUR_NS, _HOUR_NS // 12, 0.02),
            ("page", 6 * _HOUR_NS, _HOUR_NS // 2, 0.05),
            ("ticket", _DAY_NS, 2 * _HOUR_NS, 0.10),
            ("ticket", 3 * _DAY_NS, 6 * _HOUR_NS, 0.10),
        )
    )


STANDARD_ALARMS: Final = standard_alarms()


def error_ratio(good: int, counted: int) -> float | None:
    """The share of bad exchanges among those that counted; None when none did."""
    return None if counted == 0 else (counted - good) / counted


def burn_rate(ratio: float | None, objective: float) -> float | None:
    """How many times faster than allowed the budget goes: error ratio / (1 - objective)."""
    return None if ratio is None else ratio / (1 - objective)


def burn_rate_max(objective: float) -> float:
    """The burn rate when every exchange is bad: 1 / (1 - objective). No alarm above it can ring."""
    return 1 / (1 - objective)


def reachable(objective: float, factor: float) -> bool:
    """Whether a burn rate *above* `factor` is possible: factor (1 - objective) < 1."""
    return factor * (1 - objective) < 1 - 1e-9  # 14.4 x 0.0694... is 1 within rounding


def check_objective(objective: float, place: str) -> None:
    """An objective is a share between 0 and 1, both excluded: at 1 there is no budget to burn.

    Raises:
        ConfigError: naming `place`.
    """
    if not 0 < objective < 1:
        hint = f"{objective:g} % is written {objective / 100:g}" if 2 <= objective < 100 else None
        raise ConfigError(place, f"an objective is a share between 0 and 1, got {objective!r}", hint)


def check_reachable(objective: float, factor: float, place: str) -> None:
    """Refuses a burn-rate factor that the objective can never exceed, with the arithmetic.

    Raises:
        ConfigError: naming `place`.
    """
    check_objective(objective, place)
    if factor <= 0:
        raise ConfigError(place, f"a burn-rate factor is above 0, got {factor:g}")
    if not reachable(objective, factor):
        most = burn_rate_max(objective)
        raise ConfigError(
            place,
            f"a burn rate above {factor:g} can never be seen at the objective {objective:g}: "
            f"with every exchange bad it is 1 / (1 - {objective:g}) = {most:.4g}",
            f"use a factor below {most:.4g}, or an objective above {1 - 1 / factor:.4g}"
            if factor > 1
            else f"use a factor below {most:.4g}",
        )


def events_min(objective: float, factor: float) -> int:
    """Exchanges a window needs so that one bad one alone cannot ring: 1 / (factor (1 - objective)), or more.

    Below it an alarm says more about how quiet it is than about the service.
    """
    return max(1, ceil(1 / (factor * (1 - objective)) - 1e-9))

"""Burn rates against the SRE Workbook's own numbers."""

import pytest

from llmtap.errors import ConfigError
from llmtap.metrics.slo import (
    STANDARD_ALARMS,
    burn_rate,
    burn_rate_max,
    check_objective,
    check_reachable,
    error_ratio,
    events_min,
    reachable,
)

HOUR = 3_600 * 10**9
DAY = 24 * HOUR


def test_the_standard_alarms_are_the_workbooks() -> None:
    assert [(a.severity, a.long_ns, a.short_ns, a.factor) for a in STANDARD_ALARMS] == [
        ("page", HOUR, HOUR // 12, pytest.approx(14.4)),
        ("page", 6 * HOUR, HOUR // 2, pytest.approx(6)),
        ("ticket", DAY, 2 * HOUR, pytest.approx(3)),
        ("ticket", 3 * DAY, 6 * HOUR, pytest.approx(1)),
    ]
    assert all(a.long_ns == 12 * a.short_ns for a in STANDARD_ALARMS)


def test_a_rate_is_the_error_ratio_over_the_budget() -> None:
    assert error_ratio(good=985, counted=1000) == 0.015
    assert burn_rate(0.015, 0.99) == pytest.approx(1.5)
    assert burn_rate(1.0, 0.99) == pytest.approx(burn_rate_max(0.99)) == pytest.approx(100)
    assert error_ratio(0, 0) is None
    assert burn_rate(None, 0.99) is None


@pytest.mark.parametrize(
    ("bad", "counted", "objective", "rate"),
    [(17, 34, 0.9, 5), (1, 2, 0.95, 10), (3, 10, 0.95, 6), (36, 50, 0.95, 14.4), (7, 7, 0.99, 100)],
)
def test_a_rate_at_a_factor_is_not_above_it(bad: int, counted: int, objective: float, rate: float) -> None:
    assert burn_rate(error_ratio(counted - bad, counted), objective) == rate


def test_an_alarm_needs_both_windows() -> None:
    page = STANDARD_ALARMS[0]
    assert page.rings(14.5, 14.5)
    assert not page.rings(14.4, 20)
    assert not page.rings(20, 14.4)
    assert not page.rings(20, None)
    assert not page.rings(None, 20)


@pytest.mark.parametrize(
    ("objective", "factor", "possible"),
    [
        (0.99, 14.4, True),
        (0.95, 14.4, True),
        (0.93, 14.4, False),
        (0.9, 14.4, False),
        (0.9, 10, False),
        (0.9, 9.99, True),
        (0.5, 2, False),
        (0.5, 1, True),
        (0.01, 1, True),
    ],
)
def test_some_factors_can_never_be_reached(objective: float, factor: float, possible: bool) -> None:
    assert reachable(objective, factor) is possible
    if possible:
        check_reachable(objective, factor, "slo.gold")
    else:
        with pytest.raises(ConfigError, match=r"slo\.gold: "):
            check_reachable(objective, factor, "slo.gold")


@pytest.mark.parametrize("objective", [0.0, 1.0, -0.1, float("nan")])
def test_an_objective_is_a_share_and_a_factor_above_zero(objective: float) -> None:
    with pytest.raises(ConfigError, match="between 0 and 1"):
        check_objective(objective, "slo.gold")
    with pytest.raises(ConfigError, match="above 0"):
        check_reachable(0.99, 0.0, "slo.gold")


@pytest.mark.parametrize(
    ("objective", "factor", "least"), [(0.99, 14.4, 7), (0.99, 1, 100), (0.999, 1, 1000), (0.5, 2, 1)]
)
def test_a_single_bad_one_must_not_ring(objective: float, factor: float, least: int) -> None:
    assert events_min(objective, factor) == least
    assert 1 / least <= factor * (1 - objective) + 1e-9

"""The draft's Table 5, by hand: TTFT P50 and P99 in ms."""

from math import isnan

import pytest

from llmtap.metrics.saturation import (
    SaturationLevel,
    capacity,
    fit_linear,
    fit_power,
    fit_quadratic,
    heavy_tail,
    incomplete,
    knee,
    local_exponents,
    operating_point,
    peak,
    r_squared,
    saturation_point,
)

TABLE_5 = [
    SaturationLevel(2, 284, 95, 142),
    SaturationLevel(6, 852, 102, 178),
    SaturationLevel(10, 1420, 128, 267),
    SaturationLevel(14, 1988, 198, 512),
    SaturationLevel(18, 2534, 378, 1234, 0.998),
    SaturationLevel(22, 2712, 823, 3456, 0.941),
]


def test_the_operating_point_is_the_best_level_that_meets_the_objectives() -> None:
    assert operating_point(TABLE_5, lambda level: level.p99 <= 500) == 10
    assert operating_point(TABLE_5, lambda level: level.p99 <= 1) is None


def test_capacity_is_the_highest_level_that_completes() -> None:
    # Table 7.
    table = [(8, 1.0), (16, 1.0), (32, 1.0), (64, 0.997), (128, 0.972)]
    assert capacity(table) == 64
    assert capacity(table, 0.9999) == 32
    assert capacity([]) is None


def test_no_levels_have_no_points() -> None:
    assert [rule([]) for rule in (knee, saturation_point, peak, incomplete, heavy_tail)] == [None] * 5


LENGTHS = [1024.0, 4096.0, 16384.0, 65536.0, 131072.0]


def test_an_exact_power_is_found() -> None:
    fit = fit_power(LENGTHS, [0.3 * x**1.7 for x in LENGTHS])
    assert (fit.k, fit.a, fit.r2, fit.r2_log) == pytest.approx((1.7, 0.3, 1.0, 1.0))


def test_an_exact_line_and_parabola_are_found() -> None:
    line = fit_linear(LENGTHS, [0.07 * x + 12 for x in LENGTHS])
    assert (line.slope, line.intercept, line.r2) == pytest.approx((0.07, 12, 1.0))
    curve = fit_quadratic(LENGTHS, [3e-8 * x * x + 0.07 * x + 12 for x in LENGTHS])
    assert (curve.c2, curve.c1, curve.c0, curve.r2) == pytest.approx((3e-8, 0.07, 12, 1.0))


def test_two_points_have_an_exponent_and_no_interval() -> None:
    fit = fit_power([1, 10], [2, 200])
    assert (fit.k, fit.k_error, fit.k_interval) == (pytest.approx(2.0), None, None)


def test_local_exponents_show_where_it_bends() -> None:
    assert local_exponents([1, 10, 100], [1, 10, 1000]) == pytest.approx([1.0, 2.0])
    assert local_exponents([5], [5]) == []


def test_r_squared_may_be_worse_than_the_mean() -> None:
    assert r_squared([1, 2, 3], [1, 2, 3]) == 1.0
    assert r_squared([1, 2, 3], [3, 2, 1]) == -3.0
    assert isnan(r_squared([2, 2], [2, 2]))

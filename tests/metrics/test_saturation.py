"""The draft's Table 5, by hand: TTFT P50 and P99 in ms."""

from math import isnan

import pytest

from llmtap.metrics.saturation import (
    fit_power,
    heavy_tail,
    incomplete,
    knee,
    peak,
    r_squared,
    saturation_point,
)


def test_no_levels_have_no_points() -> None:
    assert [rule([]) for rule in (knee, saturation_point, peak, incomplete, heavy_tail)] == [None] * 5


LENGTHS = [1024.0, 4096.0, 16384.0, 65536.0, 131072.0]


def test_an_exact_power_is_found() -> None:
    fit = fit_power(LENGTHS, [0.3 * x**1.7 for x in LENGTHS])
    assert (fit.k, fit.a, fit.r2, fit.r2_log) == pytest.approx((1.7, 0.3, 1.0, 1.0))


def test_two_points_have_an_exponent_and_no_interval() -> None:
    fit = fit_power([1, 10], [2, 200])
    assert (fit.k, fit.k_error, fit.k_interval) == (pytest.approx(2.0), None, None)


def test_r_squared_may_be_worse_than_the_mean() -> None:
    assert r_squared([1, 2, 3], [1, 2, 3]) == 1.0
    assert r_squared([1, 2, 3], [3, 2, 1]) == -3.0
    assert isnan(r_squared([2, 2], [2, 2]))

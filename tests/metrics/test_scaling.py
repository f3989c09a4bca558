"""Fits find what made the points, and the draft's Table 12."""

from math import isnan

import pytest

from llmtap.metrics.saturation import (
    fit_linear,
    fit_power,
    fit_quadratic,
    local_exponents,
    per_thousand_tokens,
    r_squared,
)

LENGTHS = [1024.0, 4096.0, 16384.0, 65536.0, 131072.0]
TTFT_MS = [89.0, 289.0, 1023.0, 4234.0, 9123.0]


def test_an_exact_power_is_found() -> None:
    fit = fit_power(LENGTHS, [0.3 * x**1.7 for x in LENGTHS])
    assert (fit.k, fit.a, fit.r2, fit.r2_log) == pytest.approx((1.7, 0.3, 1.0, 1.0))


def test_an_exact_line_and_parabola_are_found() -> None:
    line = fit_linear(LENGTHS, [0.07 * x + 12 for x in LENGTHS])
    assert (line.slope, line.intercept, line.r2) == pytest.approx((0.07, 12, 1.0))
    curve = fit_quadratic(LENGTHS, [3e-8 * x * x + 0.07 * x + 12 for x in LENGTHS])
    assert (curve.c2, curve.c1, curve.c0, curve.r2) == pytest.approx((3e-8, 0.07, 12, 1.0))


def test_table_12_is_nearly_linear() -> None:
    fit = fit_power(LENGTHS, TTFT_MS)
    assert fit.k == pytest.approx(0.953633334274, abs=1e-12)
    assert fit.k_interval == pytest.approx((0.870275608436, 1.03699106011), abs=1e-11)
    line = fit_linear(LENGTHS, TTFT_MS)
    assert line.r2 == pytest.approx(0.99857690983, abs=1e-11)  # the draft prints 0.9987
    assert line.slope * 1e3 == pytest.approx(69.2037413468, abs=1e-10)


def test_two_points_have_an_exponent_and_no_interval() -> None:
    fit = fit_power([1, 10], [2, 200])
    assert (fit.k, fit.k_error, fit.k_interval) == (pytest.approx(2.0), None, None)


def test_local_exponents_show_where_it_bends() -> None:
    assert local_exponents([1, 10, 100], [1, 10, 1000]) == pytest.approx([1.0, 2.0])
    assert local_exponents([5], [5]) == []


def test_per_thousand_names_its_thousand() -> None:
    assert per_thousand_tokens([2048], [178]) == [86.9140625]
    assert per_thousand_tokens([2048], [178], 1024) == [89.0]


def test_r_squared_may_be_worse_than_the_mean() -> None:
    assert r_squared([1, 2, 3], [1, 2, 3]) == 1.0
    assert r_squared([1, 2, 3], [3, 2, 1]) == -3.0
    assert isnan(r_squared([2, 2], [2, 2]))

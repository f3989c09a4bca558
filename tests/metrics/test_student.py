"""Student's t against printed tables and closed forms."""

from math import atan, pi, sqrt

import pytest

from llmtap.metrics.experiment import t_quantile, t_tail


@pytest.mark.parametrize(
    ("alpha", "df", "t"),
    [
        # Abramowitz and Stegun, table 26.10 (A = 1 - alpha).
        (0.05, 1, 12.706), (0.05, 2, 4.303), (0.05, 5, 2.571), (0.05, 10, 2.228), (0.05, 30, 2.042),
        (0.05, 120, 1.980), (0.01, 5, 4.032), (0.01, 30, 2.750), (0.1, 10, 1.812), (0.001, 60, 3.460),
    ],
)  # fmt: skip
def test_quantiles_are_those_of_the_table(alpha: float, df: int, t: float) -> None:
    assert t_quantile(alpha, df) == pytest.approx(t, abs=6e-4)


@pytest.mark.parametrize("t", [0.01, 0.5, 1, 3, 40, 1e4])
def test_with_one_and_two_degrees_of_freedom_there_are_closed_forms(t: float) -> None:
    assert t_tail(t, 1) == pytest.approx(1 - 2 / pi * atan(t), rel=1e-9)
    assert t_tail(-t, 2) == pytest.approx(1 - t / sqrt(2 + t * t), rel=1e-6)


@pytest.mark.parametrize("df", [1, 1.7, 6, 99.5, 1e4, 1e7])
@pytest.mark.parametrize("alpha", [0.5, 0.05, 1e-3])
def test_quantile_and_tail_undo_each_other(df: float, alpha: float) -> None:
    assert t_tail(t_quantile(alpha, df), df) == pytest.approx(alpha, rel=1e-8)


def test_with_many_degrees_of_freedom_it_is_normal() -> None:
    assert t_quantile(0.05, 1e9) == pytest.approx(1.959964, abs=1e-6)

"""Rows of percentiles, texts of tables and points of charts, against values worked out by hand."""

from itertools import pairwise
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmtap.bench.run.figures import (
    IntervalFigure,
    cdf_series,
    clustered_row,
    histogram_series,
    latency_row,
    line_series,
    mean_over_repeats,
    ms_with_interval,
    paired_values,
    quantile_ratio,
)
from tests.bench.support import measured

_SECONDS = st.lists(st.floats(0, 100), min_size=1, max_size=700)


def test_a_row_has_percentiles_with_intervals_and_the_plain_figures() -> None:
    # 1 to 101 ms: rank (n - 1) p is a whole number for every p but the last.
    row = latency_row([i / 1_000 for i in range(101, 0, -1)])
    assert row.n == 101
    assert (row.min, row.max) == (0.001, 0.101)
    assert row.mean == pytest.approx(0.051)
    figures = {name: row.percentile(name) for name in ("p50", "p90", "p95", "p99", "p999")}
    values = {name: figure.value for name, figure in figures.items() if figure is not None}
    assert values == pytest.approx({"p50": 0.051, "p90": 0.091, "p95": 0.096, "p99": 0.1, "p999": 0.1009})
    for name, figure in figures.items():
        assert figure is not None and figure.low is not None and figure.value is not None
        assert figure.low <= figure.value
        # Of 101 values none tells how high P99 may be.
        if name in ("p99", "p999"):
            assert figure.high is None
        else:
            assert figure.high is not None and figure.high >= figure.value
        assert (figure.n, figure.level) == (101, 0.95)
    assert row.marks == ["p95", "p99", "p999"]


def test_the_interval_of_groups_is_that_of_so_many_groups() -> None:
    """Gaps of a request are alike: 100 values of each of 20 requests say little more than 20 values."""
    random = Random(3)
    groups = [
        [random.gauss(level, 0.001) for _ in range(100)] for level in (random.random() for _ in range(20))
    ]
    alike, apart = clustered_row(groups), latency_row([value for group in groups for value in group])
    medians = [row.percentile("p50") for row in (alike, apart)]
    assert medians[0] is not None and medians[1] is not None
    assert medians[0].value == pytest.approx(medians[1].value)
    widths = [(one.high or 0) - (one.low or 0) for one in medians if one is not None]
    assert widths[0] > 2 * widths[1]


@pytest.mark.parametrize(
    ("value", "low", "high", "text"),
    [
        (0.2009, 0.2005, 0.2016, "200.9 ms (200.5 to 201.6)"),
        (0.501, 0.470, 0.532, "501 ms (470 to 532)"),
        (0.00342, 0.0034, 0.00345, "3.42 ms (3.40 to 3.45)"),
        (0.24, 0.233, None, "240 ms (233 ms or more)"),
        (0.04, None, 0.05, "40.0 ms (50.0 ms or less)"),
        (0.04, None, None, "40.0 ms"),
        (-0.06, -0.0712, -0.0488, "-60.0 ms (-71.2 to -48.8)"),
        (0.05, 0.05, 0.05, "50.0 ms (50.0 to 50.0)"),
        (0.2, 0.2, 0.2 + 1e-12, "200.00 ms (200.00 to 200.00)"),
        (None, None, None, "-"),
        (2.547, 2.5, 2.6, "2,547 ms (2,500 to 2,600)"),
    ],
)
def test_a_figure_is_told_with_its_interval_and_digits_that_tell_its_ends_apart(
    value: float | None, low: float | None, high: float | None, text: str
) -> None:
    assert ms_with_interval(IntervalFigure(value=value, low=low, high=high, n=9)) == text


@given(_SECONDS)
def test_a_cdf_rises_to_1_in_few_points(values: list[float]) -> None:
    series = cdf_series("c", values)
    assert len(series.x) == len(series.y) == min(len(values), 500)
    assert series.x == sorted(series.x)  # type: ignore[type-var]
    assert series.y == sorted(series.y)  # type: ignore[type-var]
    assert series.x[0] == min(values) * 1e3
    assert (series.x[-1], series.y[-1]) == (max(values) * 1e3, 1)
    for x, y in zip(series.x, series.y, strict=True):
        assert y is not None and isinstance(x, float)
        below = sum(value * 1e3 <= x for value in values) / len(values)
        assert y <= below + 1e-12  # of equal values one is told, which may be any of them


@pytest.mark.parametrize("n", [500, 501, 12_345])
def test_a_cdf_of_many_values_is_thinned_and_its_tail_is_whole(n: int) -> None:
    series = cdf_series("c", [i / 1e3 for i in range(1, n + 1)])
    assert len(series.x) == 500
    assert series.x[0] == pytest.approx(1)
    assert series.x[-100:] == pytest.approx([float(i) for i in range(n - 99, n + 1)])
    assert series.y == pytest.approx([x / n for x in series.x if isinstance(x, float)])
    steps = [b - a for a, b in pairwise(x for x in series.x if isinstance(x, float))]
    assert max(steps) <= n / 399 + 1


@given(_SECONDS)
def test_a_histogram_has_every_value_in_one_bin(values: list[float]) -> None:
    series = histogram_series("h", values, bins=7)
    assert len(series.x) == len(series.y) == 7
    assert sum(share or 0 for share in series.y) == pytest.approx(1)


def test_a_histogram_leaves_out_what_is_beyond_its_span() -> None:
    series = histogram_series("h", [0.001, 0.001, 0.003, 9.0], bins=2, span=(0.0, 0.004))
    assert series.x == pytest.approx([1.0, 3.0])
    assert series.y == [0.5, 0.25]


def test_a_line_has_its_intervals_in_ms_and_gaps_where_nothing_is_known() -> None:
    figure = IntervalFigure(value=0.002, low=0.001, high=None, n=9)
    series = line_series("l", [1, 2], [figure, None])
    assert (series.x, series.y, series.low, series.high) == ([1, 2], [2.0, None], [1.0, None], [None, None])


def test_only_rows_that_both_answered_completely_are_pairs() -> None:
    ms = 1_000_000
    a = measured(
        "a",
        [
            {"row": 3, "ttft_ns": 10 * ms},
            {"row": 1, "ttft_ns": 20 * ms},
            {"row": 2, "ttft_ns": 30 * ms},
            {"row": 4, "ttft_ns": 40 * ms},
        ],
    )
    b = measured(
        "b",
        [
            {"row": 1, "ttft_ns": 25 * ms},
            {"row": 2, "ttft_ns": 1 * ms, "outcome": "refused"},
            {"row": 3, "ttft_ns": 17 * ms},
            {"row": 4},
            {"row": 5, "ttft_ns": 50 * ms},
        ],
    )
    assert paired_values([(a, b)], "ttft_ns") == ([0.02, 0.01], [0.025, 0.017])
    assert paired_values([(a, b), (b, a)], "ttft_ns") == (
        [0.02, 0.01, 0.025, 0.017],
        [0.025, 0.017, 0.02, 0.01],
    )
    assert b.values_by_row("ttft_ns") == {1: 0.025, 3: 0.017, 5: 0.05}


def test_a_ratio_is_that_of_the_quantiles_with_its_interval() -> None:
    base = [0.01 * i for i in range(1, 201)]
    exact = quantile_ratio(base, [2 * x for x in base], 0.5, paired=True)
    assert exact is not None
    assert [exact.value, exact.low, exact.high] == pytest.approx([2, 2, 2])
    loose = quantile_ratio(base, [2 * x for x in base], 0.5, paired=False)
    assert loose is not None
    assert (loose.low or 2) < 2 < (loose.high or 2)
    # So few values say where a quantile is, and not how sure that is.
    few = quantile_ratio([1.0, 2.0], [3.0, 6.0], 0.99, paired=False)
    assert few is not None
    assert (few.value, few.low, few.high) == (pytest.approx(3), None, None)
    assert quantile_ratio([], [1.0], 0.5, paired=False) is None
    assert quantile_ratio([0.0, 1.0], [1.0, 2.0], 0.5, paired=True) is None


def test_repeats_have_student_s_interval() -> None:
    """40, 41 and 42: 41 +- 4.303 / sqrt(3); against 0, t = 41 sqrt(3)."""
    result = mean_over_repeats([40.0, 41.0, 42.0])
    assert result is not None
    assert result.value == pytest.approx(41)
    assert (result.high or 0) - (result.value or 0) == pytest.approx(4.3027 / 3**0.5, rel=1e-4)
    # Of Student's t with two degrees of freedom, in closed form.
    t = 41 * 3**0.5
    assert result.p == pytest.approx(1 - t / (2 + t * t) ** 0.5, rel=1e-4)
    assert mean_over_repeats([1.0, 2.0]) is None
    same = mean_over_repeats([2.0] * 3)
    assert same is not None
    assert same.p == 0.0

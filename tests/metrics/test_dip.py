"""The dip is the least distance to a unimodal distribution, found by linear programs that know only what that
is."""

from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import linprog

from llmtap.metrics.modality import DIP_SHARES, DIP_SIZES, dip, dip_p


def by_definition(values: list[float]) -> float:
    """The dip: min over unimodal G of sup |F - G|, and at least 1 / (2 n)."""
    distinct = len(np.unique(values))
    return max(min(with_mode(values, mode) for mode in range(distinct)), 1 / (2 * len(values)))


def with_mode(values: list[float], mode: int) -> float:
    """The distance of F to the nearest G with its mode at this distinct value: a linear program.

    Unknown are G at each distinct value, once more just below the mode, where it may jump, and the distance
    t. F jumps at each value, so G is within t of both ends of the step; at the mode, each end has its own.
    Slopes of G grow up to the mode and shrink after.
    """
    xs, counts = np.unique(values, return_counts=True)
    upto = np.concatenate(([0], np.cumsum(counts))) / len(values)
    k = len(xs)
    below, t = k, k + 1  # after G at xs
    rows: list[np.ndarray] = []
    limits: list[float] = []

    def at_most(terms: list[tuple[int, float]], limit: float) -> None:
        row = np.zeros(k + 2)
        for place, factor in terms:
            row[place] += factor
        rows.append(row)
        limits.append(limit)

    def slope(i: int, of: int, sign: float) -> list[tuple[int, float]]:
        """sign times that from i to i + 1; `of` stands for the mode's own place."""
        step = sign / (xs[i + 1] - xs[i])
        return [(of if i + 1 == mode else i + 1, step), (of if i == mode else i, -step)]

    for i in range(k):
        for place, level in ((below if i == mode else i, upto[i]), (i, upto[i + 1])):
            at_most([(place, 1), (t, -1)], level)
            at_most([(place, -1), (t, -1)], -level)
    at_most([(below, 1), (mode, -1)], 0)
    for first, last, of, sign in ((0, mode, below, 1.0), (mode, k - 1, mode, -1.0)):
        for i in range(first, last):
            at_most(slope(i, of, -1.0), 0)
            if i + 1 < last:
                at_most(slope(i, of, sign) + slope(i + 1, of, -sign), 0)
    target = np.eye(k + 2)[t]
    found = linprog(target, A_ub=np.array(rows), b_ub=limits, bounds=[(0, 1)] * (k + 2), method="highs")
    return float(found.fun)


@pytest.mark.parametrize(
    ("values", "expected"),
    # What R's diptest says of these.
    [([0, 1, 3, 6], 1 / 8), ([1, 1, 2, 2], 1 / 4), ([0, 2, 3, 5, 6], 2 / 15), ([0, 1, 3, 4, 6], 2 / 15),
     ([1, 2, 2, 2, 2, 2, 2, 2, 2, 2], 1 / 20), ([1, 1, 1, 1, 1, 1, 1, 1, 1, 2], 1 / 20),
     ([7, 7, 7, 7], 1 / 8), ([5], 1 / 2)],
)  # fmt: skip
def test_small_samples_have_the_published_dip(values: list[float], expected: float) -> None:
    assert dip(values) == pytest.approx(expected)


@given(st.lists(st.integers(0, 30), min_size=2, max_size=11))
@settings(max_examples=60, deadline=None)
def test_with_ties_it_is_what_the_definition_says(values: list[int]) -> None:
    assert dip([float(v) for v in values]) == pytest.approx(
        by_definition([float(v) for v in values]), abs=1e-7
    )


@pytest.mark.parametrize("seed", range(25))
def test_without_ties_it_is_what_the_definition_says(seed: int) -> None:
    random = Random(seed)
    values = [
        random.choice((random.gauss(0, 1), random.gauss(4, 1), random.expovariate(1))) for _ in range(16)
    ]
    assert dip(values) == pytest.approx(by_definition(values), abs=1e-7)


@given(st.lists(st.floats(-100, 100).map(lambda x: round(x, 6)), min_size=1, max_size=80))
@settings(max_examples=80, deadline=None)
def test_it_is_the_same_mirrored_and_in_any_unit_and_has_its_bounds(values: list[float]) -> None:
    found = dip(values)
    assert 1 / (2 * len(values)) <= found + 1e-12
    assert found <= max(0.25, 1 / (2 * len(values))) + 1e-12
    assert dip([-value for value in values]) == pytest.approx(found, abs=1e-9)
    assert dip([1e-3 * value + 7 for value in values]) == pytest.approx(found, abs=1e-6)


@pytest.mark.parametrize(
    ("n", "p95", "p99"),
    # R's qDiptab (diptest, Maechler), of 1,000,001 samples each.
    [(10, 0.139611, 0.159684), (50, 0.070274, 0.081200), (100, 0.051128, 0.059024), (200, 0.036842, 0.042686),
     (500, 0.023729, 0.027452), (1_000, 0.016934, 0.019608)],
)  # fmt: skip
def test_its_chances_are_those_of_the_published_table(n: int, p95: float, p99: float) -> None:
    assert dip_p(p95, n) == pytest.approx(0.05, rel=0.06)
    assert dip_p(p99, n) == pytest.approx(0.01, rel=0.12)


def test_between_the_rows_of_the_table_it_goes_on_evenly() -> None:
    by_n = [dip_p(0.5 / n**0.5, n) for n in (200, 250, 320, 400, 500)]
    assert by_n == sorted(by_n) or by_n == sorted(by_n, reverse=True)
    by_dip = [dip_p(found, 700) for found in np.linspace(0.001, 0.1, 60)]
    assert by_dip == sorted(by_dip, reverse=True)


def test_its_ends() -> None:
    assert dip_p(0.125, 4) == 1.0
    assert dip_p(0.25, 1_000) == pytest.approx(1 - DIP_SHARES[-1])
    assert dip_p(1 / 6, 3) == 1.0
    # Beyond the last row, as in it: it is of sqrt(n) dip.
    assert dip_p(0.5 / 1e6**0.5, 1_000_000) == pytest.approx(dip_p(0.5 / DIP_SIZES[-1] ** 0.5, DIP_SIZES[-1]))


def test_the_table_can_be_made_again() -> None:
    """A fresh simulation of one row, small."""
    random = np.random.default_rng(5)
    n = 200
    found = [dip(random.random(n)) for _ in range(1_500)]
    assert np.mean([dip_p(one, n) < 0.05 for one in found]) == pytest.approx(0.05, abs=0.019)
    assert np.mean([dip_p(one, n) < 0.5 for one in found]) == pytest.approx(0.5, abs=0.043)

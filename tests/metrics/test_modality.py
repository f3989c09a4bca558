"""Planted shapes are found: one mode or several, where they are, and what kind of tail."""

from collections.abc import Callable
from math import log

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import linprog

from llmtap.metrics.modality import DIP_SHARES, DIP_SIZES, Tail, dip, dip_p, dip_test, modes, tail

Draw = Callable[[np.random.Generator, int], "np.ndarray"]

ONE_MODE: dict[str, Draw] = {
    "normal": lambda random, n: random.normal(30, 2, n),
    "exponential": lambda random, n: random.exponential(0.03, n),
    "constant and exponential": lambda random, n: 0.02 + random.exponential(0.005, n),
    "lognormal": lambda random, n: random.lognormal(-3, 0.5, n),
    "wide lognormal": lambda random, n: random.lognormal(0, 1.5, n),
}


def decoding(random: np.random.Generator, n: int, share: float = 0.2) -> "np.ndarray":
    """Gaps of 20 ms, and of 60 ms beside a prefill."""
    return np.where(random.random(n) < share, random.normal(60, 4, n), random.normal(20, 1.5, n))


# ---------------------------------------------------------------- one or several


@pytest.mark.parametrize("draw", ONE_MODE.values(), ids=ONE_MODE)
@pytest.mark.parametrize("n", [100, 30_000])
def test_one_mode_is_one_mode(draw: Draw, n: int) -> None:
    found = dip_test(draw(np.random.default_rng(n), n))
    assert (found.unimodal, found.n) == (True, min(n, 20_000))


@pytest.mark.parametrize(("n", "share"), [(100, 0.5), (400, 0.2), (5_000, 0.05)])
def test_two_planted_modes_are_found(n: int, share: float) -> None:
    found = dip_test(decoding(np.random.default_rng(3), n, share))
    assert not found.unimodal
    assert found.p < 0.05


def test_few_values_say_nothing_and_equal_ones_are_modes() -> None:
    assert dip_test([1.0, 2.0, 3.0]) is None
    one = dip_test([0.02] * 500)
    assert one is not None and (one.dip, one.p, one.unimodal) == (0.001, 1.0, True)
    # An engine in virtual time has no gaps but equal ones.
    two = dip_test([0.020] * 900 + [0.035] * 100)
    assert two is not None and not two.unimodal


def test_a_coarse_clock_makes_modes_unless_its_grain_is_told() -> None:
    exact = np.random.default_rng(6).normal(0.040, 0.002, 5_000)
    two = np.round(decoding(np.random.default_rng(7), 2_000))
    found = [
        dip_test(np.round(exact, 3)),
        dip_test(np.round(exact, 3), grain=0.001),
        dip_test(two, grain=1.0),
    ]
    assert [one is not None and one.unimodal for one in found] == [False, True, False]


def test_of_many_values_some_are_drawn_and_the_same_again() -> None:
    values = decoding(np.random.default_rng(8), 3_000).tolist()
    one = dip_test(values, n_max=500, seed=1)
    assert one.n == 500
    assert one == dip_test(values, n_max=500, seed=1)
    assert one != dip_test(values, n_max=500, seed=2)


# ---------------------------------------------------------------- where


@pytest.mark.parametrize("draw", ONE_MODE.values(), ids=ONE_MODE)
def test_one_mode_is_in_one_place(draw: Draw) -> None:
    for seed in range(3):
        assert len(modes(draw(np.random.default_rng(seed), 1_000))) == 1


@pytest.mark.parametrize("share", [0.5, 0.2, 0.05])
def test_two_planted_modes_are_where_they_were_planted(share: float) -> None:
    assert modes(decoding(np.random.default_rng(3), 4_000, share)) == [
        pytest.approx(20, abs=1),
        pytest.approx(60, abs=4),
    ]


def test_modes_far_apart_are_found_on_a_logarithmic_scale() -> None:
    random = np.random.default_rng(9)
    values = [*random.lognormal(log(0.01), 0.2, 3_000), *random.lognormal(log(1.0), 0.2, 150)]
    assert modes(values) == [pytest.approx(0.01, rel=0.15), pytest.approx(1.0, rel=0.15)]


def test_a_stall_does_not_hide_the_modes() -> None:
    values = [*decoding(np.random.default_rng(11), 3_000), 40_000.0, 90_000.0]
    assert modes(values) == [pytest.approx(20, abs=1), pytest.approx(60, abs=2)]


def test_gaps_of_nothing_are_a_place_of_their_own() -> None:
    random = np.random.default_rng(10)
    values = [0.0] * 500 + list(random.normal(0.040, 0.002, 1_500))
    assert modes(values) == [0.0, pytest.approx(0.040, abs=0.001)]
    found = [modes(values) for values in ([], [3.0], [3.0, 3.0, 3.0], [0.0] * 20)]
    assert found == [[], [3.0], [3.0], [0.0]]


@given(st.lists(st.floats(0, 1e3, allow_nan=False, allow_subnormal=False), min_size=1, max_size=60))
@settings(max_examples=80)
def test_modes_lie_within_the_values(values: list[float]) -> None:
    found = modes(values)
    assert found == sorted(found)
    assert found
    width = max(values) - min(values)
    assert all(min(values) - width <= mode <= max(values) + width for mode in found)


# ---------------------------------------------------------------- tails


@pytest.mark.parametrize(
    ("kind", "draw"),
    [
        ("light", lambda random, n: random.uniform(20, 40, n)),
        ("exponential", lambda random, n: random.exponential(5, n)),
        ("exponential", lambda random, n: 20 + random.exponential(5, n)),
        ("heavy", lambda random, n: 1 + random.pareto(1.5, n)),
        ("heavy", lambda random, n: random.lognormal(0, 1.5, n)),
    ],
)
def test_tails_of_known_laws(kind: str, draw: Draw) -> None:
    found = tail(draw(np.random.default_rng(1), 10_000))
    assert found.kind == kind
    assert found.low < found.shape < found.high
    assert found.n == 1_000


def test_shape_and_ratio_of_known_tails() -> None:
    power = tail((1 + np.random.default_rng(2).pareto(2, 20_000)).tolist())
    assert (power.shape, power.n) == (pytest.approx(0.5, abs=0.08), 2_000)  # the exponent's inverse
    exponential = tail(np.random.default_rng(3).exponential(1, 200_000))
    assert exponential.ratio == pytest.approx(log(100) / log(2), rel=0.02)
    constant = tail([0.02] * 1_000)
    assert (constant.kind, constant.ratio, constant.shape) == ("light", 1.0, None)


def test_too_few_values_have_a_ratio_and_no_kind() -> None:
    found = tail([1.0, 2.0, 3.0])
    assert (found.kind, found.shape, found.ratio) == (None, None, pytest.approx(1.49))
    assert tail([]) == Tail(None, None, None, None, None, None, 0)
    assert tail([0.0] * 600).ratio is None


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
@settings(max_examples=60)
def test_with_ties_it_is_what_the_definition_says(values: list[int]) -> None:
    assert dip([float(v) for v in values]) == pytest.approx(
        by_definition([float(v) for v in values]), abs=1e-7
    )


@given(st.lists(st.floats(-100, 100).map(lambda x: round(x, 6)), min_size=1, max_size=80))
@settings(max_examples=80)
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


def test_its_ends() -> None:
    assert dip_p(0.125, 4) == 1.0
    assert dip_p(0.25, 1_000) == pytest.approx(1 - DIP_SHARES[-1])
    assert dip_p(1 / 6, 3) == 1.0
    # Beyond the last row, as in it: it is of sqrt(n) dip.
    assert dip_p(0.5 / 1e6**0.5, 1_000_000) == pytest.approx(dip_p(0.5 / DIP_SIZES[-1] ** 0.5, DIP_SIZES[-1]))

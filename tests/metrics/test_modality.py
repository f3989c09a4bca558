"""Planted shapes are found: one mode or several, where they are, and what kind of tail."""

from collections.abc import Callable
from math import log

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmtap.metrics.modality import Tail, dip_test, modes, tail
from llmtap.metrics.statistics import EXPONENTIAL_TAIL_RATIO

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
@pytest.mark.parametrize("n", [100, 2_000, 30_000])
def test_one_mode_is_one_mode(draw: Draw, n: int) -> None:
    found = dip_test(draw(np.random.default_rng(n), n))
    assert found is not None
    assert found.unimodal
    assert found.n == min(n, 20_000)


@pytest.mark.parametrize(("n", "share"), [(100, 0.5), (400, 0.2), (5_000, 0.05)])
def test_two_planted_modes_are_found(n: int, share: float) -> None:
    found = dip_test(decoding(np.random.default_rng(3), n, share))
    assert found is not None
    assert not found.unimodal
    assert found.p < 0.05


def test_few_values_say_nothing_and_equal_ones_have_one_mode() -> None:
    assert dip_test([1.0, 2.0, 3.0]) is None
    found = dip_test([0.02] * 500)
    assert found is not None
    assert (found.dip, found.p, found.unimodal) == (0.001, 1.0, True)


def test_two_paces_are_two_modes() -> None:
    """Equal gaps are not jittered away: an engine in virtual time has no others."""
    found = dip_test([0.020] * 900 + [0.035] * 100)
    assert found is not None
    assert not found.unimodal


def test_a_coarse_clock_makes_modes_unless_its_grain_is_told() -> None:
    exact = np.random.default_rng(6).normal(0.040, 0.002, 5_000)
    rounded = np.round(exact, 3)
    found, fair, before = dip_test(rounded), dip_test(rounded, grain=0.001), dip_test(exact)
    assert found is not None and fair is not None and before is not None
    assert (found.unimodal, fair.unimodal, before.unimodal) == (False, True, True)
    still = dip_test(np.round(decoding(np.random.default_rng(7), 2_000)), grain=1.0)
    assert still is not None
    assert not still.unimodal


def test_of_many_values_some_are_drawn_and_the_same_again() -> None:
    values = decoding(np.random.default_rng(8), 3_000).tolist()
    one = dip_test(values, n_max=500, seed=1)
    assert one is not None
    assert one.n == 500
    assert one == dip_test(values, n_max=500, seed=1)
    assert one != dip_test(values, n_max=500, seed=2)


# ---------------------------------------------------------------- where


@pytest.mark.parametrize("draw", ONE_MODE.values(), ids=ONE_MODE)
@pytest.mark.parametrize("n", [60, 1_000, 20_000])
def test_one_mode_is_in_one_place(draw: Draw, n: int) -> None:
    for seed in range(5):
        assert len(modes(draw(np.random.default_rng(seed), n))) == 1


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
    wide = [0.0] * 500 + list(random.lognormal(-3, 0.9, 1_500))
    assert len(modes(wide)) == 2
    assert modes(wide)[0] == 0.0


def test_places_of_little() -> None:
    assert modes([]) == []
    assert modes([3.0]) == [3.0]
    assert modes([3.0, 3.0, 3.0]) == [3.0]
    assert modes([0.0] * 20) == [0.0]


@given(st.lists(st.floats(0, 1e3, allow_nan=False, allow_subnormal=False), min_size=1, max_size=60))
@settings(max_examples=80, deadline=None)
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
    assert found.shape is not None and found.low is not None and found.high is not None
    assert found.low < found.shape < found.high
    assert found.n == 1_000


def test_the_shape_of_a_power_law_is_its_exponents_inverse() -> None:
    found = tail((1 + np.random.default_rng(2).pareto(2, 20_000)).tolist())
    assert found.shape == pytest.approx(0.5, abs=0.08)
    assert found.n == 2_000


def test_the_ratio_is_the_drafts() -> None:
    found = tail(np.random.default_rng(3).exponential(1, 200_000))
    assert found.ratio == pytest.approx(EXPONENTIAL_TAIL_RATIO, rel=0.02)
    shifted = tail(100 + np.random.default_rng(3).exponential(1, 20_000))
    assert shifted.ratio is not None
    assert shifted.ratio < 1.05
    assert shifted.kind == "exponential"


def test_shapes_do_not_depend_on_the_unit() -> None:
    values = np.random.default_rng(4).exponential(1, 5_000)
    one, other = tail(values), tail(values / 1e3)
    assert one.shape == pytest.approx(other.shape, abs=1e-3)
    assert one.ratio == pytest.approx(other.ratio)


def test_too_few_values_have_a_ratio_and_no_kind() -> None:
    found = tail([1.0, 2.0, 3.0])
    assert (found.kind, found.shape) == (None, None)
    assert found.ratio == pytest.approx(1.49)
    assert tail([]) == Tail(None, None, None, None, None, None, 0)
    assert tail([0.0] * 600).ratio is None


def test_a_constant_has_a_tail_that_ends() -> None:
    found = tail([0.02] * 1_000)
    assert (found.kind, found.ratio, found.shape) == ("light", 1.0, None)

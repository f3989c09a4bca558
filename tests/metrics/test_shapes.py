"""Planted shapes are found: one mode or several, where they are, and what kind of tail."""

from collections.abc import Callable
from math import log

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmtap.metrics.intervals import Tail, modes, tail

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

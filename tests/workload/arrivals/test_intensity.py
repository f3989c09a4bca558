"""Inverting the integral of a rate gives it back: what `at_ns` answers is where so many were expected."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmtap.units import NS_PER_S as S
from llmtap.workload.arrival_processes import Intensity, Slope, Wave, evenly

LENGTHS = st.integers(1, 100 * 86_400 * S)
RATES = st.one_of(st.just(0.0), st.floats(1e-12, 1e6))


@given(RATES, RATES, LENGTHS, st.floats(0, 0.999_999))
def test_a_slope_is_inverted(from_rps: float, to_rps: float, length_ns: int, share: float) -> None:
    piece = Slope(length_ns, from_rps, to_rps)
    mass = share * piece.mass
    at_ns = piece.at_ns(mass) if piece.mass else 0.0
    assert 0 <= at_ns <= length_ns * (1 + 1e-12)
    x_s = at_ns / S
    expected = from_rps * x_s + (to_rps - from_rps) * x_s**2 / (2 * length_ns / S)
    assert expected == pytest.approx(mass, rel=1e-9, abs=1e-9 * piece.mass)


@given(st.floats(1e-6, 1e6), st.floats(0, 1), LENGTHS, st.floats(0, 0.999_999))
def test_a_wave_is_inverted(mean_rps: float, amplitude: float, length_ns: int, share: float) -> None:
    piece = Wave(length_ns, mean_rps, amplitude)
    at_ns = piece.at_ns(share * piece.mass)
    assert 0 <= at_ns <= length_ns
    angle = 2 * math.pi * at_ns / length_ns
    # The share of a period's arrivals up to an angle.
    found = (angle + amplitude * (1 - math.cos(angle))) / (2 * math.pi)
    assert found == pytest.approx(share, rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("mass", [0.0, 5e-324])
def test_next_to_nothing_is_expected_at_once(mass: float) -> None:
    assert Slope(S, 0, 1_000).at_ns(mass) == pytest.approx(0, abs=1e-6)
    assert Slope(S, 1e-200, 0).at_ns(mass) == pytest.approx(0, abs=1e-6)


def test_a_wave_without_amplitude_is_flat() -> None:
    assert Wave(100, 1e9, 0).at_ns(25) == pytest.approx(25)


def test_pieces_follow_each_other_and_then_the_cycle_again() -> None:
    lead = (Slope(10 * S, 1, 1), Slope(5 * S, 0, 0))
    intensity = Intensity(lead, (Slope(2 * S, 1, 1), Slope(2 * S, 0, 0)))
    moments = intensity.moments(evenly())
    found = [next(moments) / S for _ in range(16)]
    # Ten in the lead, nothing for 5 s, then two in each cycle of 4 s.
    assert found == [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 15, 16, 19, 20, 23, 24]


def test_many_cycles_at_once_are_passed_by_to_the_right_place() -> None:
    intensity = Intensity((Slope(S, 3, 3),), (Slope(2 * S, 1, 1), Slope(2 * S, 0, 0)))
    far = 3 + 2 * 10**9 + 1.5
    assert list(intensity.moments(iter([far, 0.25, 0.25]))) == [
        S + 10**9 * 4 * S + round(x * S) for x in (1.5, 1.75, 4)
    ]

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmtap.metrics.cost import (
    Energy,
    Price,
    average_power_w,
    cost_of,
    energy_of,
    joules_per_token,
    tokens_per_gpu_second,
)


def test_tokens_per_gpu_second_is_the_drafts() -> None:
    # Table 3: 2,847 tok/s on 8 GPUs are printed as 356.
    assert tokens_per_gpu_second(2847 * 60, 60.0, 8) == pytest.approx(355.875)
    assert tokens_per_gpu_second(5, 60.0, 0) is None
    assert tokens_per_gpu_second(5, 0.0, 8) is None


def test_gpus_cost_their_time_busy_or_idle() -> None:
    # Two GPUs at 3.60 an hour for 500 s: 1,000 GPU-seconds at 0.001 are 1.
    cost = cost_of(Price(gpus=2, per_gpu_hour=3.60), 500.0, output_tokens=10_000, good_tokens=4_000)
    assert cost.gpu_seconds == 1_000.0
    assert cost.spent == pytest.approx(1.0)
    assert cost.per_gpu_second == pytest.approx(0.001)
    assert cost.per_output_token == pytest.approx(1e-4)
    assert cost.per_good_token == pytest.approx(2.5e-4)
    assert cost.output_tokens_per_gpu_second == 10.0
    assert cost.output_tokens_per_unit == pytest.approx(10_000)


def test_tokens_may_be_what_is_paid_for() -> None:
    price = Price(per_million_input=2.0, per_million_output=10.0, currency="EUR")
    cost = cost_of(price, 60.0, output_tokens=100_000, good_tokens=None, input_tokens=1_000_000)
    assert (cost.currency, cost.spent) == ("EUR", 3.0)
    assert cost.per_output_token == pytest.approx(3e-5)
    assert (cost.per_good_token, cost.per_gpu_second, cost.output_tokens_per_gpu_second) == (None, None, None)


def test_nothing_served_has_no_cost_per_token() -> None:
    cost = cost_of(Price(gpus=1, per_gpu_hour=3600), 1.0, 0, 0)
    assert (cost.spent, cost.per_output_token, cost.per_good_token) == (1.0, None, None)
    assert cost.output_tokens_per_unit == 0.0


def test_a_price_is_not_below_zero() -> None:
    with pytest.raises(ValueError, match="per_gpu_hour: expected 0 or more, got -1"):
        Price(gpus=1, per_gpu_hour=-1)


S = 1_000_000_000


def energy(
    samples: list[tuple[float, float | None]],
    from_s: float | None = None,
    to_s: float | None = None,
    gap_s: float = 3.0,
) -> Energy | None:
    return energy_of(
        [round(t * S) for t, _ in samples],
        [watt for _, watt in samples],
        from_ns=None if from_s is None else round(from_s * S),
        to_ns=None if to_s is None else round(to_s * S),
        gap_ns_max=round(gap_s * S),
    )


STEADY: list[tuple[float, float | None]] = [(0, 100), (1, 100), (2, 100)]
RAMP: list[tuple[float, float | None]] = [(0, 0), (1, 100), (2, 200)]


@pytest.mark.parametrize(
    ("samples", "window", "joules", "known_s", "missing_s"),
    [
        (RAMP, (None, None), 200, 2, 0),
        # The trapezoids of seed 003: (100 + 300) / 2 + (300 + 200) / 2.
        ([(0, 100), (1, 300), (2, 200)], (None, None), 450, 2, 0),
        # Uneven times weigh as long as they last.
        ([(0, 100), (0.5, 100), (2.5, 300)], (None, None), 450, 2.5, 0),
        # A window inside one interval, over a sample, and one that ends on samples.
        (RAMP, (0.5, 1.5), 100, 1, 0),
        # Beyond the ends power is held, for as long as samples may be apart.
        (RAMP, (-1, 3), 400, 4, 0),
        (STEADY, (-5, 10), 800, 8, 7),
        # One sample is held on both sides, and alone has no duration.
        ([(5, 40)], (4, 6), 80, 2, 0),
        ([(5, 40)], (0, 20), 240, 6, 14),
        # A failed sample is none: its neighbours are joined while they are near enough.
        ([(0, 100), (1, None), (2, 200)], (None, None), 300, 2, 0),
        ([(0, 100), (1, None), (2, None), (3, None), (4, 100)], (None, None), None, None, None),
        ([(0, 100), (1, 100), (5, 900), (6, 900)], (None, None), 1_000, 2, 4),
        # At the very limit they are still joined.
        ([(0, 100), (3, 100)], (None, None), 300, 3, 0),
        # Two samples at one moment: no interval, no division by 0.
        ([(0, 100), (1, 100), (1, 300), (2, 300)], (None, None), 400, 2, 0),
        # Nothing near.
        (STEADY, (20, 30), None, None, None),
        ([], (0, 1), None, None, None),
    ],
)
def test_energy_of_a_window(
    samples: list[tuple[float, float | None]],
    window: tuple[float | None, float | None],
    joules: float | None,
    known_s: float,
    missing_s: float,
) -> None:
    found = energy(samples, *window)
    if joules is None:
        assert found is None
    else:
        assert found.joules == pytest.approx(joules)
        assert (found.known_ns, found.missing_ns) == (round(known_s * S), round(missing_s * S))


POWER = st.floats(0, 1_000)
GAPS = st.lists(st.integers(1, 4 * S), min_size=1, max_size=20)


@given(GAPS, st.data())
def test_a_window_that_is_cut_has_the_energy_of_its_parts(gaps: list[int], data: st.DataObject) -> None:
    times_ns = [0]
    for gap in gaps:
        times_ns.append(times_ns[-1] + gap)
    watts = data.draw(st.lists(POWER, min_size=len(times_ns), max_size=len(times_ns)))
    edges = sorted(data.draw(st.lists(st.integers(-2 * S, times_ns[-1] + 2 * S), min_size=2, max_size=6)))
    whole = energy_of(times_ns, watts, from_ns=edges[0], to_ns=edges[-1])
    parts = [energy_of(times_ns, watts, from_ns=a, to_ns=b) for a, b in pairwise(edges)]
    known = [part for part in parts if part is not None]
    assert sum(part.known_ns for part in known) == (whole.known_ns if whole else 0)
    assert sum(part.joules for part in known) == pytest.approx(whole.joules if whole else 0, abs=1e-6)
    if whole is not None:
        assert whole.known_ns + whole.missing_ns == edges[-1] - edges[0]


def test_average_power_is_all_joules_over_all_seconds() -> None:
    # A short window at 1,000 W and a long one at 100 W: not the mean of 550.
    windows = [Energy(1_000, 1 * S), Energy(900, 9 * S, missing_ns=5 * S)]
    assert average_power_w(windows) == pytest.approx(190)
    assert average_power_w([]) is None


@pytest.mark.parametrize(
    ("joules", "tokens", "expected"),
    [(500.0, 1_000, 0.5), (0.0, 10, 0.0), (None, 10, None), (5.0, None, None), (5.0, 0, None)],
)
def test_energy_per_token(joules: float | None, tokens: int | None, expected: float | None) -> None:
    assert joules_per_token(joules, tokens) == expected

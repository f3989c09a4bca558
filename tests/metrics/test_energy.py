"""Energy from power: exact for straight lines, the same however a window is cut, and honest about gaps."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmtap.metrics.cost import GAP_NS_MAX, Energy, average_power_w, energy_of, joules_per_token

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
        (STEADY, (None, None), 200, 2, 0),
        (RAMP, (None, None), 200, 2, 0),
        # The trapezoids of seed 003: (100 + 300) / 2 + (300 + 200) / 2.
        ([(0, 100), (1, 300), (2, 200)], (None, None), 450, 2, 0),
        # Uneven times weigh as long as they last.
        ([(0, 100), (0.5, 100), (2.5, 300)], (None, None), 450, 2.5, 0),
        # A window inside one interval, over a sample, and one that ends on samples.
        (RAMP, (0.25, 0.75), 25, 0.5, 0),
        (RAMP, (0.5, 1.5), 100, 1, 0),
        (RAMP, (1, 2), 150, 1, 0),
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
        ([(5, 40)], (None, None), None, None, None),
        ([(0, None), (1, None)], (0, 1), None, None, None),
        ([], (0, 1), None, None, None),
    ],
)  # fmt: skip
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
        assert found is not None
        assert found.joules == pytest.approx(joules)
        assert (found.known_ns, found.missing_ns) == (round(known_s * S), round(missing_s * S))


def test_the_default_bound_is_three_samples_at_1_hz() -> None:
    assert GAP_NS_MAX == 3 * S
    assert energy_of([0, 3 * S], [1.0, 1.0]) == Energy(3.0, 3 * S)
    assert energy_of([0, 3 * S + 1], [1.0, 1.0]) is None


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


@given(POWER, POWER, st.integers(2, 30))
def test_samples_on_a_straight_line_change_nothing(first: float, last: float, n: int) -> None:
    line = [first + (last - first) * i / n for i in range(n + 1)]
    found = energy_of([round(i * 3 * S / n) for i in range(n + 1)], line)
    assert found is not None
    assert found.joules == pytest.approx((first + last) / 2 * 3, rel=1e-6, abs=1e-6)


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

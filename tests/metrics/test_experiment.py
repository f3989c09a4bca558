"""Arms in numbers: exact where it can be worked out, honest where it has to be simulated."""

import random
from collections.abc import Callable, Iterator
from math import comb, exp, isclose, log, sqrt
from statistics import mean, stdev, variance

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmtap.metrics import experiment
from llmtap.metrics.experiment import (
    ArmSample,
    Figure,
    mean_difference,
    mean_interval,
    quantile_difference,
    quantile_interval,
    share_difference,
    share_interval,
)
from llmtap.metrics.histogram import RELATIVE_ERROR
from llmtap.metrics.statistics import (
    count_range,
    mixture_e_log,
    mixture_width,
    multinomial_e_log,
    t_quantile,
)

ALPHA = 0.05
MS = 1_000_000


def figure(units: list[list[int]]) -> Figure:
    made = Figure()
    ids = random.Random(3)
    for values in units:
        made.add(ids.getrandbits(64), values)
    return made


def figure_of(values: list[int]) -> Figure:
    return figure([[v] for v in values])


# ---------------------------------------------------------------- means


@given(st.lists(st.integers(0, 10**12), min_size=2, max_size=40))
def test_of_single_values_the_standard_error_is_the_usual_one(values: list[int]) -> None:
    error = figure_of(values).error()
    assert error is not None
    assert isclose(error, sqrt(variance(values) / len(values)), rel_tol=1e-9, abs_tol=1e-9)


@given(st.lists(st.lists(st.integers(0, 10**9), min_size=1, max_size=5), min_size=2, max_size=20))
def test_of_units_it_is_that_of_a_ratio(units: list[list[int]]) -> None:
    """A second implementation, in floats and unit by unit."""
    k, n = len(units), sum(map(len, units))
    mean = sum(map(sum, units)) / n
    expected = sqrt(k / (k - 1) * sum((sum(u) - mean * len(u)) ** 2 for u in units)) / n
    error = figure(units).error()
    assert error is not None
    assert isclose(error, expected, rel_tol=1e-6, abs_tol=1e-3)


@given(st.lists(st.tuples(st.integers(0, 4), st.lists(st.integers(0, 10**9), max_size=4)), min_size=1))
def test_a_unit_that_comes_piece_by_piece_counts_as_one(visits: list[tuple[int, list[int]]]) -> None:
    sample = ArmSample(["x"], single=False)
    whole: dict[int, list[int]] = {}
    for unit, values in visits:
        sample.add(unit, {"x": values})
        whole.setdefault(unit, []).extend(values)
    found, expected = sample.figures["x"], Figure()
    for unit, values in whole.items():
        expected.add(unit, values)
    assert (found.n, found.units, found.units_with) == (expected.n, expected.units, expected.units_with)
    assert (found.mean, found.error()) == (expected.mean, expected.error())


def test_welch_by_hand() -> None:
    """Two small samples, worked out on paper: means 30 and 22, variances 100 and 16, 5 units each."""
    arm, control = figure_of([20, 25, 25, 35, 45]), figure_of([17, 20, 22, 24, 27])
    d = mean_difference(arm, control, ALPHA)
    va, vc = variance([20, 25, 25, 35, 45]) / 5, variance([17, 20, 22, 24, 27]) / 5
    assert (va, vc) == (20.0, 2.9)
    df = 22.9**2 / (20**2 / 4 + 2.9**2 / 4)
    assert df == pytest.approx(5.1361, abs=1e-4)
    assert d.estimate == 8
    assert d.interval == pytest.approx((8 - 2.5507 * sqrt(22.9), 8 + 2.5507 * sqrt(22.9)), abs=0.01)
    assert (d.anytime, d.p) == (None, None), "five units are too few to be watched"


def test_too_little_to_say_is_none_and_never_0() -> None:
    one, two, none = figure_of([5]), figure_of([5, 6]), Figure()
    assert mean_difference(one, none, ALPHA) is None
    assert quantile_difference(one, none, 0.5, ALPHA) is None
    assert share_difference(one, none, (1, 1), ALPHA) is None
    assert (mean_interval(one, ALPHA), share_interval(one, ALPHA)) == (None, None)
    assert quantile_interval(two, 0.99, ALPHA) is None
    d = mean_difference(one, two, ALPHA)
    assert (d.estimate, d.interval, d.anytime, d.p) == (-0.5, None, None, None)
    same = mean_difference(figure_of([5] * 99), figure_of([5] * 99), ALPHA)
    assert (same.estimate, same.interval, same.p) == (0, None, None)


# ---------------------------------------------------------------- quantiles


def test_an_interval_of_a_median_stands_at_its_order_statistics() -> None:
    values = list(range(250))  # below 256 the histogram keeps each number
    interval = quantile_interval(figure_of(values), 0.5, ALPHA)
    reach = 1.9695 * sqrt(0.25 / 250)  # t with 249 degrees of freedom
    low, high = 249 * (0.5 - reach), 249 * (0.5 + reach)
    assert interval == pytest.approx((low * (1 - RELATIVE_ERROR), high * (1 + RELATIVE_ERROR)), abs=0.01)


def test_quantiles_of_alike_values_are_less_certain() -> None:
    """100 units of 20 values each: if a unit's values are all the same, 100 values are all there is."""
    r = random.Random(11)
    alone = [[r.randrange(250)] for _ in range(100)]
    apart = [[r.randrange(250) for _ in range(20)] for _ in range(100)]
    alike = [values * 20 for values in alone]
    effects = [figure(units).design_effect(125) for units in (alone, apart, alike)]
    assert effects[0] == 1
    assert effects[1] < 1.5
    assert effects[2] == pytest.approx(20, rel=0.1)
    one, many = (quantile_interval(figure(units), 0.5, ALPHA) for units in (alone, alike))
    assert many[1] - many[0] == pytest.approx(one[1] - one[0], rel=0.15)


def test_the_sample_of_units_is_bounded_and_fair() -> None:
    made = Figure()
    r = random.Random(2)
    for i in range(3_000):
        value = 1 if i % 4 == 0 else 3
        made.add(r.getrandbits(64), [value] * r.choice([1, 400]))
    kept = made._sampled
    assert len(kept) == experiment.SAMPLE_UNITS
    assert max(len(values) for _, values in kept.values()) == experiment.SAMPLE_VALUES
    assert {n for (n,), _ in kept.values()} == {1, 400}
    share = sum(values[0] == 1 for _, values in kept.values()) / len(kept)
    assert abs(share - 0.25) < 5 * sqrt(0.25 * 0.75 / len(kept))


# ---------------------------------------------------------------- shares


def test_wilsons_interval_by_the_book() -> None:
    """Newcombe 1998, table I: 15 of 148 gives 0.0624 to 0.1605, with z for t."""
    interval = share_interval(figure_of([1] * 15 + [0] * 133), ALPHA)
    assert interval == pytest.approx((0.0624, 0.1605), abs=0.001)
    none = share_interval(figure_of([0] * 1_000), ALPHA)
    assert none[0] == 0
    assert 0.003 < none[1] < 0.005, "none of a thousand is not never"


def test_a_share_counts_units_in_which_it_happened() -> None:
    """One client that retries a refused request a hundred times is no hundred refusals."""
    retried = figure([[1] * 100] + [[0]] * 200)
    d = share_difference(retried, figure([[0]] * 200), (1, 1), ALPHA)
    assert d.p > 0.99
    spread = figure([[1]] * 100 + [[0]] * 100)
    d = share_difference(spread, figure([[0]] * 200), (1, 1), ALPHA)
    assert d.p < 1e-6
    assert d.estimate == 0.5
    assert d.anytime[0] > 0.3


def test_an_event_in_almost_every_unit_is_compared_by_the_units_without_it() -> None:
    """A guardrail refuses 70 % of what it should; without it, each of these requests is answered."""
    r = random.Random(3)
    guarded = figure([[int(r.random() < 0.3) for _ in range(3)] for _ in range(34)])
    plain = figure([[1, 1, 1]] * 26)
    assert (plain.units_with, plain.units_without) == (26, 0)
    assert guarded.units_with > 18 and guarded.units_without > 30
    d = share_difference(guarded, plain, (1, 1), ALPHA)
    assert d.estimate < -0.5
    assert d.p < 1e-4


def test_few_events_of_one_arm_show_a_difference() -> None:
    assert share_difference(figure_of([1] * 12 + [0] * 80), figure_of([0] * 90), (1, 1), ALPHA).p < 0.05
    assert (
        share_difference(figure_of([1] * 12 + [0] * 80), figure_of([1] * 8 + [0] * 80), (1, 1), 0.05).p == 1
    )


@pytest.mark.parametrize("rate", [0.05, 0.5, 0.95])
def test_equal_shares_are_seldom_different_at_any_look(rate: float) -> None:
    """Conversations of one to six requests, whose own rates differ; twenty looks."""
    runs, alarms = 120, 0
    for seed in range(runs):
        r = random.Random(f"{rate} {seed}")
        sample = ArmSample(["x"], single=False), ArmSample(["x"], single=False)
        open_units: list[tuple[int, int, float, int]] = []
        smallest = 1.0
        for i in range(300):
            if not open_units or r.random() < 0.3:
                own = r.betavariate(2 * rate, 2 * (1 - rate))
                open_units.append((r.getrandbits(64), r.randrange(2), own, r.randrange(1, 7)))
            unit, arm, own, left = open_units.pop(r.randrange(len(open_units)))
            sample[arm].add(unit, {"x": [int(r.random() < own)]})
            if left > 1:
                open_units.append((unit, arm, own, left - 1))
            if i % 15 == 14:
                d = share_difference(sample[1].figures["x"], sample[0].figures["x"], (1, 1), ALPHA)
                smallest = min(smallest, 1.0 if d is None else d.p)
        alarms += smallest <= ALPHA
    assert alarms <= ALPHA * runs


def test_a_difference_of_shares_is_at_most_one() -> None:
    d = share_difference(figure_of([0] * 9), figure_of([1] * 9), (1, 1), ALPHA)
    assert d.interval[0] == -1 < d.interval[1] < 0
    d = share_difference(figure_of([1] * 7 + [0] * 53), figure_of([1] * 59 + [0]), (1, 1), ALPHA)
    assert d.anytime is not None and d.anytime[0] == -1


def test_weights_are_what_shares_are_held_against() -> None:
    arm, control = figure_of([1] * 30 + [0] * 70), figure_of([1] * 270 + [0] * 630)
    fair = share_difference(arm, control, (0.1, 0.9), ALPHA)
    unfair = share_difference(arm, control, (0.5, 0.5), ALPHA)
    assert fair.p is not None and fair.p > 0.99
    assert unfair.p < 1e-6


# ---------------------------------------------------------------- memory


def test_units_are_forgotten_beyond_the_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(experiment, "UNITS_MAX", 10)
    sample = ArmSample(["x"], single=False)
    for i in range(25):
        sample.add(i, {"x": [1]})
        sample.add(0, {"x": [1]})
    assert sample.forgotten_units == 15
    assert sample.figures["x"].n == 50
    assert sample.figures["x"].units == 25, "who comes often is not forgotten"


def test_a_copy_is_not_moved_by_what_comes_later() -> None:
    r = random.Random(4)
    made = figure([[r.randrange(100) for _ in range(5)] for _ in range(100)])
    twin = made.copy()
    before = (twin.n, twin.mean, twin.error(), twin.units, twin.design_effect(50))
    assert before == (made.n, made.mean, made.error(), made.units, made.design_effect(50))
    made.add(1, [10**9] * 500)
    assert (twin.n, twin.mean, twin.error(), twin.units, twin.design_effect(50)) == before


# ---------------------------------------------------------------- looking all the time


def lognormal(r: random.Random) -> list[int]:
    """A time to first token: skewed, as they are."""
    return [round(r.lognormvariate(0, 1) * 100 * MS)]


def conversation(r: random.Random) -> list[int]:
    """Several requests of one user, alike among themselves."""
    base = r.lognormvariate(0, 0.8)
    return [round(base * r.lognormvariate(0, 0.2) * 100 * MS) for _ in range(r.randrange(1, 8))]


def watched(
    draw: Callable[[random.Random], list[int]], seed: int, shift: int = 0
) -> Iterator[tuple[Figure, Figure]]:
    """Control and arm at each look."""
    r = random.Random(seed)
    figures = Figure(), Figure()
    for n in range(1, 1_201):
        arm = r.random() < 0.5
        figures[arm].add(r.getrandbits(64), [v + shift * arm for v in draw(r)])
        if n > 100 and n % 50 == 0:
            yield figures


def test_watching_means_of_equal_arms_seldom_raises_an_alarm() -> None:
    """A/A: 60 experiments, looked at 22 times each."""
    runs, alarms, naive = 60, 0, 0
    for seed in range(runs):
        rang = single = False
        for control, arm in watched(conversation, seed):
            d = mean_difference(arm, control, ALPHA)
            rang |= d.p <= ALPHA
            single |= not d.interval[0] <= 0 <= d.interval[1]
        alarms += rang
        naive += single
    assert alarms <= ALPHA * runs
    assert naive >= 4 * ALPHA * runs, "the test for a single look, looked at again and again"


SHARES_OF_TTFT = {0.5: 0.0, 0.95: 1.6448536269514722, 0.99: 2.3263478740408408}
"""Quantiles, and the normal ones that `lognormal` draws by."""


def test_intervals_of_quantiles_hold_at_every_look() -> None:
    runs, missed = 120, dict.fromkeys(SHARES_OF_TTFT, 0)
    naive, alarms, widths = 0, 0, []
    for seed in range(runs):
        out = dict.fromkeys(SHARES_OF_TTFT, False)
        single = rang = False
        for control, arm in watched(lognormal, seed):
            for share, normal in SHARES_OF_TTFT.items():
                truth, found = exp(normal) * 100 * MS, quantile_interval(control, share, ALPHA, anytime=True)
                out[share] |= found is not None and not found[0] <= truth <= found[1]
            d = quantile_difference(arm, control, 0.5, ALPHA)
            single |= not d.interval[0] <= 0 <= d.interval[1]
            rang |= not d.anytime[0] <= 0 <= d.anytime[1]
        widths.append(d.anytime[1] - d.anytime[0])
        naive, alarms = naive + single, alarms + rang
        for share, wrong in out.items():
            missed[share] += wrong
    assert max(missed.values()) <= ALPHA * runs
    assert alarms <= ALPHA * runs < naive / 2
    assert max(widths) < 120 * MS, "and they say something: the median is 100 ms"


@given(st.integers(10, 3_000), st.sampled_from([0.5, 0.95, 0.99]), st.sampled_from([0.2, 0.05, 0.001]))
def test_the_range_of_counts_ends_where_the_e_value_does(n: int, share: float, alpha: float) -> None:
    low, high = count_range(n, share, alpha)
    assert 0 <= low <= n * share <= high <= n
    for k in range(n + 1):
        e_log = multinomial_e_log((k, n - k), (share, 1 - share))
        if e_log <= log(1 / alpha):
            assert low <= k <= high
        elif not low - 0.02 < k < high + 0.02:
            assert k < low or k > high


# ---------------------------------------------------------------- a covariate


def prompted(seed: int, shift: int = 0, looks: int = 50) -> Iterator[tuple[Figure, Figure]]:
    """Control and arm at each look; the time follows the length of the prompt, which is the covariate."""
    r = random.Random(seed)
    figures = Figure(), Figure()
    for n in range(1, 1_201):
        arm = r.random() < 0.5
        length = round(r.lognormvariate(7, 0.8))
        time = round((20 + length / 20) * MS * r.lognormvariate(0, 0.25)) + shift * arm
        figures[arm].add(r.getrandbits(64), [time], covariate=length)
        if n > 100 and n % looks == 0:
            yield figures


def test_a_covariate_narrows_the_interval_and_moves_no_truth() -> None:
    shift, estimates, plain, covered = 15 * MS, [], [], 0
    for seed in range(60):
        *_, (control, arm) = prompted(seed, shift, looks=600)
        adjusted = mean_difference(arm, control, ALPHA, adjust=True)
        raw = mean_difference(arm, control, ALPHA)
        assert raw.unadjusted is None and adjusted.unadjusted == raw.estimate
        assert adjusted.variance_left < 0.3
        covered += adjusted.interval[0] <= shift <= adjusted.interval[1]
        estimates.append(adjusted.estimate)
        plain.append(raw.estimate)
    assert covered >= 52, "95 % of 60 are 57"
    assert stdev(estimates) < 0.6 * stdev(plain)
    assert abs(mean(estimates) - shift) < 3 * stdev(estimates) / 60**0.5


def test_the_slope_is_that_of_least_squares() -> None:
    r = random.Random(3)
    data = [(arm, r.randrange(1_000), r.randrange(10_000)) for arm in (0, 1) for _ in range(80)]
    figures = Figure(), Figure()
    for unit, (arm, x, y) in enumerate(data):
        figures[arm].add(unit, [y], covariate=x)
    d = mean_difference(figures[1], figures[0], ALPHA, adjust=True)
    design = np.array([[1, arm, x] for arm, x, _ in data], dtype=float)
    fit, *_ = np.linalg.lstsq(design, np.array([y for *_, y in data], dtype=float), rcond=None)
    assert d is not None and d.estimate == pytest.approx(fit[1])


def test_a_unit_that_comes_piece_by_piece_has_one_covariate() -> None:
    whole, pieces = ArmSample(["x"], single=True), ArmSample(["x"], single=False)
    for unit, size, values in ((1, 10, [3, 4]), (2, 30, [5]), (3, 20, [9, 9, 1])):
        whole.add(unit, {"x": values}, size)
        for i, value in enumerate(values):
            pieces.add(unit, {"x": [value]}, size + i)
    assert pieces.figures["x"].covariate_moments() == whole.figures["x"].covariate_moments()


def test_a_difference_is_found_while_watching() -> None:
    found = 0
    for seed in range(20):
        for control, arm in watched(lognormal, seed, shift=80 * MS):
            d = mean_difference(arm, control, ALPHA)
        found += d.p <= ALPHA
        assert d.anytime[0] < 80 * MS < d.anytime[1]
    assert found >= 19


@pytest.mark.parametrize("alpha", [0.1, 0.05, 0.001])
@pytest.mark.parametrize("n", [1, 50, 5_000, 10**7])
def test_interval_and_e_value_say_the_same(alpha: float, n: int) -> None:
    assert mixture_e_log(mixture_width(n, alpha), n, alpha) == pytest.approx(log(1 / alpha))
    assert mixture_e_log(-mixture_width(n, alpha), n, alpha) == pytest.approx(log(1 / alpha))


def test_the_e_value_is_the_mixture_it_claims_to_be() -> None:
    """Against numerical integration of the likelihood ratio over a normal prior of the effect."""
    n, z = 400, 2.5
    spread = (2 * mixture_e_log_spread(n, z)) ** 0.5
    step = spread / 500
    total = 0.0
    for i in range(-4_000, 4_001):
        delta = i * step  # the effect in standard deviations; S_n = z sqrt(n)
        prior = exp(-(delta**2) / (2 * spread**2)) / (spread * sqrt(2 * 3.141592653589793))
        total += prior * exp(delta * z * sqrt(n) - n * delta**2 / 2) * step
    assert log(total) == pytest.approx(mixture_e_log(z, n, ALPHA), rel=1e-6)


def mixture_e_log_spread(n: int, z: float) -> float:
    """rho^2 / 2, found from the e-value at z = 0: -log(n rho^2 + 1) / 2."""
    return (exp(-2 * mixture_e_log(0, n, ALPHA)) - 1) / n / 2


@pytest.mark.parametrize("shares", [(0.5, 0.5), (0.9, 0.1), (0.2, 0.3, 0.5)])
def test_the_multinomial_e_value_is_fair_after_any_number_of_units(shares: tuple[float, ...]) -> None:
    """Its expectation under the null hypothesis is 1, by adding up every outcome."""
    for n in (1, 2, 7):
        total = 0.0
        for counts in compositions(n, len(shares)):
            ways, left = 1, n
            for c in counts:
                ways *= comb(left, c)
                left -= c
            p = ways * exp(sum(c * log(s) for c, s in zip(counts, shares, strict=True)))
            total += p * exp(multinomial_e_log(counts, shares))
        assert total == pytest.approx(1)


def compositions(n: int, parts: int) -> list[tuple[int, ...]]:
    if parts == 1:
        return [(n,)]
    return [(i, *rest) for i in range(n + 1) for rest in compositions(n - i, parts - 1)]


@pytest.mark.parametrize(
    ("alpha", "df", "t"),
    [
        # Abramowitz and Stegun, table 26.10 (A = 1 - alpha).
        (0.05, 1, 12.706),
        (0.05, 2, 4.303),
        (0.05, 5, 2.571),
        (0.05, 10, 2.228),
        (0.05, 30, 2.042),
        (0.05, 120, 1.980),
        (0.01, 5, 4.032),
        (0.01, 30, 2.750),
        (0.1, 10, 1.812),
        (0.001, 60, 3.460),
    ],
)
def test_quantiles_are_those_of_the_table(alpha: float, df: int, t: float) -> None:
    assert t_quantile(alpha, df) == pytest.approx(t, abs=6e-4)

"""Figures of arrivals: by hand where they are few, worked out a second way where they are many."""

import math
from fractions import Fraction
from itertools import pairwise
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmtap.metrics.statistics import (
    KS_95,
    KS_95_OWN_MEAN,
    Autocorrelation,
    arrival_figures,
    ks_exponential,
    punctuality,
    strongest_autocorrelation,
)
from tests.support.workloads.arrival_theory import KS_999, Z_999

S = 1_000_000_000
TIMES = st.lists(st.integers(0, 10**12), max_size=60)


def test_figures_by_hand() -> None:
    found = arrival_figures([5 * S, 0, S, S, 5 * S])
    assert (found.n, found.span_ns, found.rate_rps) == (5, 5 * S, 0.8)
    # Gaps of 1, 0, 4 and 0 s.
    assert (found.gap_mean_ns, found.gap_min_ns, found.ties) == (1.25 * S, 0, 0.5)
    assert found.gap_cv == pytest.approx(math.sqrt((17 / 4) - 1.25**2) / 1.25, rel=1e-12)
    # The largest distance is at the gaps of 0: a half, and the exponential has nothing there.
    assert found.ks == 0.5
    assert found.ks_rate_rps == 0.8
    assert found.ks_own_mean
    assert found.ks_limit == KS_95_OWN_MEAN / 2
    assert found.autocorrelation is None  # four gaps are too few for twenty lags


def test_a_given_rate_has_the_limit_of_a_law_known_beforehand() -> None:
    found = arrival_figures([0, S, 2 * S, 3 * S, 4 * S], rate_rps=2)
    assert not found.ks_own_mean
    assert found.ks_limit == KS_95 / 2
    # No gap is below 1 s, where 1 - exp(-2) of them should be.
    assert found.ks == pytest.approx(1 - math.exp(-2), rel=1e-12)
    assert found.to_dict()["ks"] == {
        "distance": found.ks,
        "limit_95": KS_95 / 2,
        "rate_rps": 2,
        "rate_from": "what was asked",
    }


@pytest.mark.parametrize("times", [[], [7]])
def test_without_gaps_there_are_no_figures_of_gaps(times: list[int]) -> None:
    for rate_rps in (None, 5.0):
        found = arrival_figures(times, rate_rps=rate_rps).to_dict()
        assert found.pop("n") == len(times)
        assert found.pop("span") == 0
        assert set(found.values()) == {None}


def test_all_at_once_has_ties_and_no_rate() -> None:
    found = arrival_figures([3, 3, 3])
    assert (found.ties, found.gap_min_ns, found.gap_mean_ns) == (1, 0, 0)
    assert (found.rate_rps, found.gap_cv, found.ks, found.ks_limit) == (None, None, None, None)
    assert arrival_figures([3, 3, 3], rate_rps=5).ks == 1


@given(TIMES.filter(lambda t: len(t) > 1), st.floats(1e-3, 1e3))
def test_figures_agree_with_their_definitions(times: list[int], rate_rps: float) -> None:
    found = arrival_figures(times, rate_rps=rate_rps)
    ordered = sorted(times)
    gaps = [b - a for a, b in pairwise(ordered)]
    n = len(gaps)
    assert found == arrival_figures(ordered, rate_rps=rate_rps)
    assert found.gap_mean_ns == pytest.approx(sum(gaps) / n)
    assert found.ties == sum(gap == 0 for gap in gaps) / n
    if found.span_ns:
        mean = Fraction(sum(gaps), n)
        variance = sum((gap - mean) ** 2 for gap in gaps) / n
        assert found.gap_cv == pytest.approx(math.sqrt(variance) / float(mean), rel=1e-9, abs=1e-12)
    # The distance, by looking at each gap and just below it.
    law = {gap: 1 - math.exp(-rate_rps * gap / S) for gap in gaps}
    far = max(
        max(abs(sum(g <= gap for g in gaps) / n - law[gap]), abs(sum(g < gap for g in gaps) / n - law[gap]))
        for gap in gaps
    )
    assert found.ks == pytest.approx(far, abs=1e-12)


@given(st.lists(st.integers(0, 10**6), min_size=6, max_size=40), st.integers(1, 5))
def test_the_strongest_autocorrelation_is_that_of_its_definition(gaps: list[int], lags: int) -> None:
    found = strongest_autocorrelation(gaps, lags)
    if max(gaps) - min(gaps) <= 1:
        assert found is None
        return
    mean = Fraction(sum(gaps), len(gaps))
    whole = sum((gap - mean) ** 2 for gap in gaps)
    by_lag = [
        float(sum((gaps[i] - mean) * (gaps[i + lag] - mean) for i in range(len(gaps) - lag)) / whole)
        for lag in range(1, lags + 1)
    ]
    assert found.value == pytest.approx(by_lag[found.lag - 1], abs=1e-9)
    assert abs(found.value) == pytest.approx(max(map(abs, by_lag)), abs=1e-9)


def test_the_limit_of_the_largest_of_twenty_is_bonferronis() -> None:
    found = strongest_autocorrelation([*range(100)])
    assert isinstance(found, Autocorrelation)
    assert found.limit == pytest.approx(3.0233 / 10, abs=1e-5)  # normal quantile of 1 - 0.05 / 40


def test_a_constant_rate_has_no_autocorrelation_of_its_rounding() -> None:
    times = [round(k * S / 3) for k in range(100)]
    assert arrival_figures(times).autocorrelation is None


def test_both_limits_are_exceeded_once_in_twenty_times() -> None:
    n, trials = 200, 1_500
    random = Random(42)
    given_beyond = own_beyond = 0
    for _ in range(trials):
        gaps = [round(random.expovariate(1e-7)) for _ in range(n)]
        distance = ks_exponential(gaps, 100.0)
        given_beyond += distance > KS_95 / math.sqrt(n)
        distance = ks_exponential(gaps, n * S / sum(gaps))
        own_beyond += distance > KS_95_OWN_MEAN / math.sqrt(n)
    # 99.9 %; and both limits are for large n, of 200 the true share is between 4 and 5 %.
    room = Z_999 * math.sqrt(0.05 * 0.95 / trials)
    for beyond in (given_beyond, own_beyond):
        assert 0.04 - room <= beyond / trials <= 0.05 + room
    assert KS_95 < KS_999


def test_a_plan_that_is_kept_has_a_ratio_of_one() -> None:
    planned = [0, S, 3 * S, 4 * S]
    found = punctuality(planned, [t + 2_000_000 for t in planned])
    assert (found.planned, found.sent, found.planned_rps, found.achieved_rps) == (4, 4, 0.75, 0.75)
    assert (found.ratio, found.early) == (1, 0)
    assert set(found.late_ns.values()) == {2_000_000}


def test_who_falls_behind_or_leaves_out_achieves_less() -> None:
    found = punctuality([0, S, 2 * S, 3 * S], [-5, 2 * S, None, 6 * S])
    assert (found.planned, found.sent, found.early) == (4, 3, 1)
    assert (found.planned_rps, found.achieved_rps) == (1, pytest.approx(2 / 6))
    assert found.ratio == pytest.approx(1 / 3)
    assert (found.late_ns["min"], found.late_ns["p50"], found.late_ns["max"]) == (-5, S, 3 * S)
    assert found.late_ns["mean"] == pytest.approx((4 * S - 5) / 3)


@pytest.mark.parametrize(
    ("planned", "sent", "ratio"), [([], [], None), ([5], [None], None), ([5, 5], [5, 6], None)]
)
def test_what_cannot_be_told_is_none(planned: list[int], sent: list[int | None], ratio: float | None) -> None:
    found = punctuality(planned, sent)
    assert found.ratio is ratio
    assert bool(found.late_ns) == any(t is not None for t in sent)


def test_rows_must_be_the_same() -> None:
    with pytest.raises(ValueError, match="shorter"):
        punctuality([1, 2], [1])

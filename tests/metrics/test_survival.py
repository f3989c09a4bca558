"""Kaplan-Meier estimates: a worked example with censoring, and bands that cover known laws."""

from bisect import bisect_right
from collections.abc import Callable
from itertools import pairwise
from math import exp, log, sqrt
from random import Random

import pytest

from llmtap.metrics.silences import EDGES_NS
from llmtap.metrics.survival import SurvivalCounts, ended_share, first_share_below, survival_curve

WEEKS = tuple(range(1, 41))
RELAPSED = (6, 6, 6, 7, 10, 13, 16, 22, 23)
CENSORED = (6, 9, 10, 11, 17, 19, 20, 25, 32, 32, 34, 35)
"""Weeks in remission of the 21 patients with 6-mercaptopurine: Freireich et al. 1963, the example of most
textbooks."""
S = 1_000_000_000


def remissions() -> SurvivalCounts:
    counts = SurvivalCounts(WEEKS)
    for week in RELAPSED:
        counts.add(week, ended=True)
    for week in CENSORED:
        counts.add(week, ended=False)
    return counts


def test_the_textbook_example_has_the_shares_worked_by_hand() -> None:
    shares = {point.duration: (point.n, point.share) for point in survival_curve(remissions())}
    # The share at an edge is that of the events before it; the textbooks print the share after each event.
    after_6, after_7, after_10 = 18 / 21, 18 / 21 * 16 / 17, 18 / 21 * 16 / 17 * 14 / 15
    after_13, after_16 = after_10 * 11 / 12, after_10 * 11 / 12 * 10 / 11
    assert [round(share, 3) for share in (after_6, after_7, after_10, after_13, after_16)] == [
        0.857,
        0.807,
        0.753,
        0.690,
        0.627,
    ]
    assert shares[6] == (21, 1.0)
    assert shares[7] == (17, pytest.approx(after_6))
    assert shares[10] == (15, pytest.approx(after_7))
    assert shares[13] == (12, pytest.approx(after_10))
    assert shares[16] == (11, pytest.approx(after_13))
    assert shares[17] == (10, pytest.approx(after_16))
    assert max(shares) == 17, "fewer than 10 patients were observed for longer"


def test_the_interval_of_one_point_is_the_log_log_interval_of_the_textbooks() -> None:
    found = ended_share(remissions(), 1)
    assert (found.since, found.until, found.n, found.ended) == (1, 17, 21, 9)
    assert found.share == pytest.approx(1 - 0.627451)
    # Greenwood: 3/(21 x 18) + 1/(17 x 16) + 1/(15 x 14) + 1/(12 x 11) + 1/(11 x 10) = 0.0330416.
    reach = exp(1.959964 * sqrt(0.0330416) / -log(0.627451))
    assert reach == pytest.approx(2.1476, abs=2e-4)
    assert (found.low, found.high) == (
        pytest.approx(1 - 0.627451 ** (1 / reach), abs=1e-5),
        pytest.approx(1 - 0.627451**reach, abs=1e-5),
    )
    # As printed by other programs: 0.368 to 0.805 survive.
    assert (round(1 - (found.high or 0), 3), round(1 - (found.low or 0), 3)) == (0.368, 0.805)


def test_of_those_that_lasted_for_some_time_only_the_later_events_count() -> None:
    found = ended_share(remissions(), 10)
    assert (found.n, found.ended, found.until) == (15, 5, 17)
    assert found.share == pytest.approx(1 - 14 / 15 * 11 / 12 * 10 / 11)
    assert ended_share(remissions(), 16).share == pytest.approx(1 / 11)


def test_where_all_are_cut_off_at_once_nothing_is_known_of_what_would_have_followed() -> None:
    counts = SurvivalCounts(WEEKS)
    for _ in range(240):
        counts.add(30, ended=False)
    found = ended_share(counts, 30)
    assert (found.n, found.ended, found.share, found.until) == (240, 0, None, None)
    known = ended_share(counts, 20)
    assert (known.share, known.until) == (0.0, 30)
    # None of 240: the exact upper limit of a share is 1 - 0.025^(1 / 240).
    assert known.high == pytest.approx(1 - 0.025 ** (1 / 240))


def test_events_behind_the_last_edge_that_enough_durations_reached_count() -> None:
    """115 streams wait 9 weeks for the event, and all have it: none of them was silent for good."""
    counts = SurvivalCounts(WEEKS)
    for _ in range(125):
        counts.add(1, ended=True)
    for _ in range(115):
        counts.add(9, ended=True)
    found = ended_share(counts, 3)
    assert (found.n, found.share, found.until, found.high) == (115, 1.0, 10, 1.0)
    assert found.low == pytest.approx(0.025 ** (1 / 115))
    below = first_share_below(counts, 0.01, 100, 2)
    assert below is not None
    assert (below.since, below.share) == (5, 1.0), "no edge from which on few end"
    counts.add(9, ended=False)
    assert ended_share(counts, 9).share == pytest.approx(115 / 116)


def test_durations_count_in_their_cell_and_shorter_ones_not_at_all() -> None:
    counts = SurvivalCounts((10, 20, 40))
    for duration in (9, 10, 19, 20, 39, 40, 10**15):
        counts.add(duration, ended=duration % 2 == 0)
    assert (list(counts.ended), list(counts.censored)) == ([1, 1, 2], [1, 1, 0])
    assert (counts.at_risk(), counts.n) == ([6, 4, 2], 6)
    copied = counts.copy()
    counts.add(10, ended=True)
    assert (list(copied.ended), counts.ended[0]) == ([1, 1, 2], 2)


def ladder(*, resumed_late: int) -> SurvivalCounts:
    """1,000 events in the first cell; 200 durations of 40 units that are cut off, and some that end at 12."""
    counts = SurvivalCounts(WEEKS)
    for _ in range(1_000):
        counts.add(1, ended=True)
    for _ in range(200):
        counts.add(40, ended=False)
    for _ in range(resumed_late):
        counts.add(12, ended=True)
    return counts


def test_the_first_edge_from_which_on_few_durations_end() -> None:
    # Of 1,200 that reach 1, 1,000 end. None of the 200 that reach 2 ends.
    found = first_share_below(ladder(resumed_late=0), 0.01, 100, 2)
    assert found is not None
    assert (found.since, found.n, found.share) == (2, 200, 0.0)
    # 5 of 205 end at 12: 2.4 % from 2 to 12, none from 13 on.
    found = first_share_below(ladder(resumed_late=5), 0.01, 100, 2)
    assert found is not None
    assert (found.since, found.n, found.share) == (13, 200, 0.0)
    # 1 of 201 is below 1 % already.
    found = first_share_below(ladder(resumed_late=1), 0.01, 100, 2)
    assert found is not None
    assert (found.since, found.share) == (2, pytest.approx(1 / 201))


def test_without_enough_durations_there_is_no_such_edge() -> None:
    assert first_share_below(ladder(resumed_late=0), 0.01, 2_000, 2) is None
    short = SurvivalCounts(WEEKS)
    for _ in range(500):
        short.add(1, ended=False)
    assert first_share_below(short, 0.01, 100, 2) is None, "nothing was observed for longer than 1"
    # Half of those that reach any edge end later: the last edge that is known well enough is returned.
    steady = SurvivalCounts(WEEKS)
    for week in range(1, 11):
        for _ in range(2_048 >> week):
            steady.add(week, ended=True)
    found = first_share_below(steady, 0.01, 100, 2)
    assert found is not None
    assert found.share is not None
    assert found.share > 0.5


def exponential(rng: Random) -> float:
    return rng.expovariate(1 / 8)


def heavy(rng: Random) -> float:
    return 0.2 * rng.paretovariate(0.8)


LAWS: dict[str, tuple[Callable[[Random], float], Callable[[float], float]]] = {
    "exponential": (exponential, lambda t: exp(-t / 8)),
    "heavy": (heavy, lambda t: (0.2 / t) ** 0.8 if t > 0.2 else 1.0),
}
"""Durations in seconds, and the probability that one lasts longer than t."""
RUNS = 100


def run_of(law: str, seed: int, n: int = 1_000) -> SurvivalCounts:
    """Durations of a law, cut off at times between 1 and 90 s."""
    draw = LAWS[law][0]
    rng = Random(f"{law} {seed}")
    counts = SurvivalCounts(EDGES_NS)
    for _ in range(n):
        duration, cut = draw(rng), rng.uniform(1, 90)
        counts.add(round(min(duration, cut) * S), ended=duration <= cut)
    return counts


@pytest.mark.parametrize("law", LAWS)
def test_the_band_holds_the_whole_curve_of_a_known_law_in_95_of_100_runs(law: str) -> None:
    lasts = LAWS[law][1]
    covered = 0
    for seed in range(RUNS):
        points = survival_curve(run_of(law, seed))
        assert len(points) > 40
        truth = [lasts(point.duration / S) / lasts(EDGES_NS[0] / S) for point in points]
        covered += all(point.low <= share <= point.high for point, share in zip(points, truth, strict=True))
    assert covered >= 95


@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize("since_s", [0.5, 2, 5, 10])
def test_the_interval_of_a_share_holds_it_in_most_runs(law: str, since_s: float) -> None:
    lasts = LAWS[law][1]
    covered = 0
    for seed in range(RUNS):
        found = ended_share(run_of(law, seed), round(since_s * S))
        assert found.low is not None
        assert found.high is not None
        assert found.until is not None
        truth = 1 - lasts(found.until / S) / lasts(found.since / S)
        covered += found.low <= truth <= found.high
    # 95 are expected. With an exact interval, 88 or fewer have a probability of 0.4 %.
    assert covered >= 89


def test_the_grid_has_round_durations_and_steps_of_an_eighth_at_most() -> None:
    assert (EDGES_NS[0], EDGES_NS[-1]) == (S // 10, 600 * S)
    assert all(a < b <= a * 1.125 for a, b in pairwise(EDGES_NS))
    for seconds in (1, 2, 5, 10, 15, 30, 60, 90, 120, 300):
        assert EDGES_NS[bisect_right(EDGES_NS, seconds * S) - 1] == seconds * S

"""The answer of a search is the limit that was planted, wherever it begins and however coarse it is; what it
says is left is enough; and the same verdicts lead the same way."""

from random import Random

from hypothesis import given
from hypothesis import strategies as st

from llmtap.bench.run.search import RateSearch


def played(search: RateSearch, limit: int) -> list[int]:
    """Tries levels, of which those above `limit` break, until the search is over; the levels in order."""
    asked = []
    while (level := search.next) is not None:
        asked.append(level)
        search.tell(level, level <= limit)
    return asked


def test_doubling_then_halving_by_hand() -> None:
    """Table 7's shape: 8 to 128 doubled, then between 64 and 128 to the last one."""
    search = RateSearch(low=1, high=512, start=8)
    assert played(search, 70) == [8, 16, 32, 64, 128, 96, 80, 72, 68, 70, 71]
    assert (search.best, search.limit, search.contradictions) == (70, 71, [])


def test_below_its_start_it_halves_down_to_the_lowest() -> None:
    search = RateSearch(low=1, high=512, start=8)
    assert played(search, 2) == [8, 4, 2, 3]
    assert search.best == 2


def test_where_nothing_holds_there_is_no_best() -> None:
    search = RateSearch(low=1, high=64, start=8, resolution=4)
    assert played(search, 0) == [8, 4, 2, 1]
    assert (search.best, search.limit) == (None, 1)


def test_where_all_holds_the_range_ends_it() -> None:
    search = RateSearch(low=1, high=100, start=1)
    assert played(search, 1_000) == [1, 2, 4, 8, 16, 32, 64, 100]
    assert (search.best, search.limit) == (100, None)


def test_a_coarse_resolution_ends_sooner() -> None:
    assert played(RateSearch(low=1, high=512, start=8, resolution=16), 70) == [8, 16, 32, 64, 128, 96, 80]


@given(
    low=st.integers(1, 20), above=st.integers(0, 300), begin=st.integers(0, 300), limit=st.integers(0, 400),
    resolution=st.integers(1, 9), votes=st.sampled_from([1, 3, 5]),
)  # fmt: skip
def test_a_planted_limit_is_found(
    low: int, above: int, begin: int, limit: int, resolution: int, votes: int
) -> None:
    high = low + above
    search = RateSearch(low=low, high=high, start=min(high, low + begin), resolution=resolution, votes=votes)
    lefts = []
    while (level := search.next) is not None:
        assert low <= level <= high
        lefts.append(search.left)
        search.tell(level, level <= limit)
    tries = len(lefts)
    for done, left in enumerate(lefts):
        assert left >= tries - done, "no more is left than it said"
    assert search.left == 0
    if limit < low:
        assert search.best is None
    elif limit >= high:
        assert search.best == high
    else:
        assert search.best is not None
        assert search.best <= limit < search.best + resolution


@given(limit=st.integers(1, 64), votes=st.sampled_from([1, 3, 5]), seed=st.integers(0, 10_000))
def test_noisy_verdicts_end_and_what_is_told_is_what_was_found(limit: int, votes: int, seed: int) -> None:
    """Each verdict is wrong with 20 %; both levels at the limit have a majority of all votes."""
    random = Random(seed)
    search = RateSearch(low=1, high=64, start=1, votes=votes)
    tried: dict[int, list[bool]] = {}
    while (level := search.next) is not None:
        holds = (level <= limit) != (random.random() < 0.2)
        tried.setdefault(level, []).append(holds)
        search.tell(level, holds)
        assert sum(map(len, tried.values())) <= 64 * votes
    for level in (search.best, search.limit):
        if level is not None:
            assert max(tried[level].count(True), tried[level].count(False)) > votes // 2
            assert len(tried[level]) <= votes
    if search.best is not None and search.limit is not None:
        assert search.limit == search.best + 1
    for level in search.contradictions:
        assert search.limit is not None
        assert level > search.limit


def test_votes_find_the_limit_more_often_than_single_verdicts() -> None:
    """Verdicts within 2 of the limit are wrong in a quarter of the cases."""

    def found(votes: int, seed: int) -> int | None:
        random = Random(seed)
        search = RateSearch(low=1, high=64, start=1, votes=votes)
        while (level := search.next) is not None:
            near = abs(level - 20.5) < 2
            search.tell(level, (level <= 20) != (near and random.random() < 0.25))
        return search.best

    right = {votes: sum(found(votes, seed) == 20 for seed in range(300)) for votes in (1, 5)}
    assert right[5] > right[1] + 30


def test_a_limit_that_is_overturned_moves_the_search_on() -> None:
    search = RateSearch(low=1, high=8, start=1, votes=3)
    verdicts = {1: [True, True], 2: [True], 4: [False, True, True], 8: [False, False], 6: [False, False],
                3: [True, True], 5: [False, False]}  # fmt: skip
    asked = []
    while (level := search.next) is not None:
        asked.append(level)
        search.tell(level, verdicts[level].pop(0))
    # 4 broke, and 3 held; tried again, 4 holds after all, so the limit is above it.
    assert asked[:4] == [1, 2, 4, 3]
    assert (search.best, search.limit) == (4, 5)


def test_the_same_verdicts_lead_the_same_way() -> None:
    """What one that was interrupted rests on: told again what it was told, it goes on as it would have."""
    whole = played(RateSearch(low=1, high=512, start=8, votes=3), 45)
    for cut in range(len(whole)):
        again = RateSearch(low=1, high=512, start=8, votes=3)
        for level in whole[:cut]:
            assert again.next == level
            again.tell(level, level <= 45)
        assert played(again, 45) == whole[cut:]

"""The answer of a search is the limit that was planted, wherever it begins and however coarse it is; what it
says is left is enough; and the same verdicts lead the same way."""

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
    assert (search.best, search.limit) == (70, 71)


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
    resolution=st.integers(1, 9),
)  # fmt: skip
def test_a_planted_limit_is_found(low: int, above: int, begin: int, limit: int, resolution: int) -> None:
    high = low + above
    search = RateSearch(low=low, high=high, start=min(high, low + begin), resolution=resolution)
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


def test_the_same_verdicts_lead_the_same_way() -> None:
    """What one that was interrupted rests on: told again what it was told, it goes on as it would have."""
    whole = played(RateSearch(low=1, high=512, start=8), 45)
    for cut in range(len(whole)):
        again = RateSearch(low=1, high=512, start=8)
        for level in whole[:cut]:
            assert again.next == level
            again.tell(level, level <= 45)
        assert played(again, 45) == whole[cut:]

"""The answer of a search is the limit that was planted, wherever it begins and however coarse it is; what it
says is left is enough; and the same verdicts lead the same way."""

from hypothesis import given
from hypothesis import strategies as st

from llmtap.bench.run.levels import RateSearch


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
        assert (search.best, search.limit) == (None, low)
    elif limit >= high:
        assert (search.best, search.limit) == (high, None)
    else:
        assert search.best is not None
        assert search.best <= limit < search.best + resolution

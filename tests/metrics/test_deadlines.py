"""User idle latency: for any stream, the closed form equals the simulation."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmtap.metrics.deadlines import Benefit, user_idle_ns
from tests.support.traffic.streams import reader_wait_ns

MS = 1_000_000
times = st.lists(st.integers(0, 5_000 * MS), min_size=1, max_size=60).map(sorted)


class TestUserIdle:
    def test_is_never_below_zero_when_clamped(self) -> None:
        assert user_idle_ns([0], 0) == 0
        assert user_idle_ns([5, 6], 10) == 0
        assert user_idle_ns([5, 6], 10, clamped=False) == -5

    def test_needs_an_origin_and_output(self) -> None:
        assert user_idle_ns([], 0) is None
        assert user_idle_ns([5], None) is None

    def test_tokens_of_earlier_chunks_keep_the_reader_busy(self) -> None:
        # Ten tokens at 100 ms last until 600: the chunk at 550 comes in time, that at 1,200 finds
        # eleven tokens read, so 550 ms of reading.
        chunks = [100 * MS, 550 * MS, 1_200 * MS]
        assert user_idle_ns(chunks, 0, [10, 1, 5]) == 1_200 * MS - 11 * 50 * MS
        assert user_idle_ns(chunks, 0, 10) == 200 * MS
        assert user_idle_ns(chunks, 0) == 1_100 * MS

    @given(times, st.integers(0, 200 * MS))
    def test_equals_the_simulated_reader(self, times: list[int], v: int) -> None:
        assert user_idle_ns(times, 0, 1, v) == reader_wait_ns(times, 0, v)

    @given(st.lists(st.tuples(st.integers(0, 5_000 * MS), st.integers(1, 6)), min_size=1, max_size=40))
    def test_of_chunks_equals_the_simulated_reader_of_their_tokens(
        self, chunks: list[tuple[int, int]]
    ) -> None:
        chunks.sort()
        tokens = [t for t, k in chunks for _ in range(k)]
        assert user_idle_ns([t for t, _ in chunks], 0, [k for _, k in chunks]) == reader_wait_ns(tokens, 0)

    @given(times, st.integers(1, 200 * MS))
    def test_the_papers_reading_is_smaller_by_one_token(self, times: list[int], v: int) -> None:
        ours = user_idle_ns(times, 0, 1, v, clamped=False)
        assert user_idle_ns(times, 0, 1, v, grace_tokens=1, clamped=False) == ours - v


class TestBenefit:
    def test_takes_five_tokens_for_a_second(self) -> None:
        assert Benefit().tokens(100, 2_000 * MS) == 90.0
        assert Benefit().tokens(1, 2_000 * MS) == -9.0
        assert Benefit().tokens(None, 5) is None
        assert Benefit().tokens(5, None) is None

    def test_says_its_parameters(self) -> None:
        assert Benefit().speed == 20.0
        assert Benefit.at_speed(10).reader_ns_per_token == 100 * MS
        assert Benefit().f_text == "f(l) = l in seconds"
        assert Benefit(f="tokens").f_text == "f(l) = l / V in tokens"
        assert [Benefit(grace_tokens=n).due_text for n in range(3)] == ["V(i-1)", "V i", "V(i+1)"]
        with pytest.raises(ValueError, match="unknown variable 'minutes'"):
            Benefit(f="minutes")

    @pytest.mark.parametrize("speed", [0.0, -1.0, float("nan")])
    def test_a_reader_reads(self, speed: float) -> None:
        with pytest.raises(ValueError, match="more than 0"):
            Benefit.at_speed(speed)

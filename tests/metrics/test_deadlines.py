"""Waiting readers: the closed form equals the simulation, whatever the stream; the output delay trick."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmtap.metrics.deadlines import (
    Benefit,
    attainment,
    e2e_deadlines_ns,
    idle_ns,
    meets_deadlines,
    output_delay_ns,
    reader_wait_ns,
    reading_deadlines_ns,
    smooth_goodput,
    tokens_in_time,
    ttft_tbt_deadlines_ns,
    user_idle_ns,
)
from llmtap.metrics.latency import tbc_max_ns, tbc_ns

MS = 1_000_000
V = 50 * MS
times = st.lists(st.integers(0, 5_000 * MS), min_size=1, max_size=60).map(sorted)

# A stream of the paper's introduction and of oracle S5, in ms.
STALL_AFTER_8 = [t * MS for t in (100, 110, 120, 130, 140, 150, 160, 170, 670, 680, 690, 700)]


class TestPolicies:
    def test_each_sets_its_own_deadlines(self) -> None:
        assert ttft_tbt_deadlines_ns([100, 120, 200], 10, 300, 50) == [310, 150, 170]
        assert e2e_deadlines_ns(3, 10, 300) == [310, 310, 310]
        assert reading_deadlines_ns(3, 10, 50) == [10, 60, 110]
        assert reading_deadlines_ns(3, 10, 50, grace_tokens=1) == [60, 110, 160]
        assert ttft_tbt_deadlines_ns([], 10, 300, 50) == []

    def test_a_deadline_met_exactly_is_met(self) -> None:
        assert meets_deadlines([100, 200], [100, 200])
        assert not meets_deadlines([100, 201], [100, 200])
        assert tokens_in_time([100, 201], [100, 200]) == 1

    def test_idle_is_the_longest_delay_under_any_policy(self) -> None:
        assert idle_ns([100, 300], [150, 250]) == 50
        assert idle_ns([100], [150]) == -50
        assert idle_ns([], []) is None


class TestUserIdle:
    def test_is_the_longest_wait_of_the_reader(self) -> None:
        # Reads at 50 ms a token: token 1 at 100 (waits 100), token 3 is due at 100 and comes at 400.
        assert user_idle_ns([100 * MS, 110 * MS, 400 * MS], 0) == 300 * MS

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
        assert ours is not None
        assert user_idle_ns(times, 0, 1, v, grace_tokens=1, clamped=False) == ours - v
        assert idle_ns(times, reading_deadlines_ns(len(times), 0, v, 1)) == ours - v

    @given(times)
    def test_is_zero_just_when_every_deadline_is_met(self, times: list[int]) -> None:
        in_time = meets_deadlines(times, reading_deadlines_ns(len(times), times[0]))
        assert (user_idle_ns(times, times[0]) == 0) is in_time


class TestOutputDelay:
    """The trick of seed 001, 5.3, replayed: the figures improve and the reader waits as before."""

    def test_slower_than_reading_is_worse(self) -> None:
        delivered = output_delay_ns(STALL_AFTER_8, 100 * MS)
        assert tbc_max_ns(tbc_ns(delivered)) == 100 * MS
        bound = ttft_tbt_deadlines_ns(delivered, 0, 300 * MS, 100 * MS)
        assert meets_deadlines(delivered, bound)  # the stream with the stall missed it, this one is "good"
        assert user_idle_ns(delivered, 0) == 650 * MS

    @given(times, st.integers(0, V))
    def test_up_to_the_readers_pace_the_wait_stays(self, times: list[int], pace: int) -> None:
        assert user_idle_ns(output_delay_ns(times, pace), 0) == user_idle_ns(times, 0)

    @given(times, st.integers(V, 5 * V))
    def test_beyond_it_the_wait_grows_by_a_bounded_amount(self, times: list[int], pace: int) -> None:
        waited, longer = user_idle_ns(times, 0), user_idle_ns(output_delay_ns(times, pace), 0)
        assert waited is not None
        assert longer is not None
        assert waited <= longer <= waited + (len(times) - 1) * (pace - V)

    @given(times, st.data())
    def test_the_longest_gap_never_rises(self, times: list[int], data: st.DataObject) -> None:
        worst = tbc_max_ns(tbc_ns(times)) or 0
        pace = data.draw(st.integers(0, worst))
        delivered = output_delay_ns(times, pace)
        assert (tbc_max_ns(tbc_ns(delivered)) or 0) <= worst
        assert all(q >= t for q, t in zip(delivered, times, strict=True))


class TestBenefit:
    def test_takes_five_tokens_for_a_second(self) -> None:
        assert Benefit().tokens(100, 2_000 * MS) == 90.0
        assert Benefit().tokens(1, 2_000 * MS) == -9.0
        assert Benefit().tokens(None, 5) is None
        assert Benefit().tokens(5, None) is None

    def test_f_may_be_any_function(self) -> None:
        square = Benefit(alpha=3, f=lambda idle_s: idle_s**2)
        assert square.tokens(10, 2_000 * MS) == -2.0

    def test_says_its_parameters(self) -> None:
        def log_wait(idle_s: float) -> float:
            return idle_s

        assert Benefit().speed == 20.0
        assert Benefit.at_speed(10).reader_ns_per_token == 100 * MS
        assert Benefit().f_text == "f(l) = l in seconds"
        assert Benefit(f="tokens").f_text == "f(l) = l / V in tokens"
        assert Benefit(f=log_wait).f_text == "f(l) = log_wait(l in seconds)"

    @pytest.mark.parametrize("speed", [0.0, -1.0, float("nan")])
    def test_a_reader_reads(self, speed: float) -> None:
        with pytest.raises(ValueError, match="above 0"):
            Benefit.at_speed(speed)

    def test_refuses_an_f_it_does_not_know(self) -> None:
        with pytest.raises(ValueError, match="'minutes'"):
            Benefit(f="minutes")
        with pytest.raises(ValueError, match="above 0"):
            Benefit(reader_ns_per_token=0)


def test_goodputs_of_nothing_are_none() -> None:
    assert smooth_goodput([1.0], 0.0) is None
    assert attainment([]) is None

"""Every term against cases worked by hand, and against the oracles where those are at hand."""

import json
import random
from pathlib import Path

import pytest

from llmtap.metrics.latency import (
    chunking_of,
    e2e_ns,
    itl_even_ns,
    itl_ns,
    jitter_ns,
    measure,
    metrics_of,
    output_times_ns,
    smooth_benefit,
    tbc_max_ns,
    tbc_ns,
    tokens_per_chunk,
    tpot_ns,
    ttfb_ns,
    ttft_any_ns,
    ttft_ns,
    user_idle_ns,
)
from llmtap.record.exchange import EventLog, Exchange, Timeline, Tokens
from llmtap.record.outcome import EventClass, TokenSource

MS = 1_000_000
ORACLE = Path(__file__).resolve().parents[3] / "shared" / "oracle"
needs_oracle = pytest.mark.skipif(not ORACLE.exists(), reason="the oracle is not at hand")


def exchange(
    events: list[tuple[int, EventClass, int]],
    *,
    output: int | None = None,
    source: TokenSource = TokenSource.USAGE,
    reasoning: int | None = None,
    submit_ns: int | None = 0,
) -> Exchange:
    """An exchange with these events, `(t in ms, class, tokens)`, submitted at 0."""
    log = EventLog()
    for t_ms, event_class, tokens in events:
        log.add(t_ms * MS, event_class, 100, tokens, False)
    carrying = output_times_ns(log)
    return Exchange(
        relay="r", seq=1, arrival_wall_ns=0, stream=True,
        timeline=Timeline(
            arrival_ns=0, submit_ns=submit_ns, events=log,
            first_token_ns=carrying[0] if carrying else None,
            last_token_ns=carrying[-1] if carrying else None,
        ),
        tokens=Tokens(output=output, reasoning=reasoning, source=source),
    )  # fmt: skip


def content(*times_ms: int, tokens: int = -1) -> list[tuple[int, EventClass, int]]:
    return [(t, EventClass.CONTENT, tokens) for t in times_ms]


class TestPointsSinceSubmit:
    t = Timeline(
        arrival_ns=0, submit_ns=10, first_byte_ns=25, first_token_ns=30, first_content_ns=47,
        response_end_ns=110,
    )  # fmt: skip

    def test_each_is_its_point_minus_submit(self) -> None:
        assert (ttfb_ns(self.t), ttft_any_ns(self.t), ttft_ns(self.t), e2e_ns(self.t)) == (15, 20, 37, 100)

    @pytest.mark.parametrize("term", [ttfb_ns, ttft_any_ns, ttft_ns, e2e_ns])
    def test_a_point_never_reached_gives_none(self, term) -> None:  # type: ignore[no-untyped-def]
        assert term(Timeline(arrival_ns=0, submit_ns=10)) is None
        assert term(Timeline(arrival_ns=0, first_byte_ns=1, first_token_ns=1, first_content_ns=1)) is None

    def test_an_answer_before_the_request_was_out_has_no_latency(self) -> None:
        assert ttfb_ns(Timeline(arrival_ns=0, submit_ns=10, first_byte_ns=9)) is None

    def test_an_instant_answer_is_zero_and_not_none(self) -> None:
        assert ttfb_ns(Timeline(arrival_ns=0, submit_ns=10, first_byte_ns=10)) == 0


class TestGaps:
    def test_only_events_that_carry_output_count(self) -> None:
        x = exchange([
            (5, EventClass.ROLE, -1), (10, EventClass.REASONING, -1), (12, EventClass.KEEPALIVE, -1),
            (30, EventClass.CONTENT, -1), (31, EventClass.METADATA, -1), (70, EventClass.TOOL_CALL, -1),
            (71, EventClass.REFUSAL, -1), (90, EventClass.USAGE, -1), (95, EventClass.DONE, -1),
        ])  # fmt: skip
        assert tbc_ns(output_times_ns(x.timeline.events)) == [20 * MS, 40 * MS, 1 * MS]

    def test_events_of_one_read_are_zero_apart(self) -> None:
        assert tbc_ns([7, 7, 7, 9]) == [0, 0, 2]

    @pytest.mark.parametrize("times", [[], [5]])
    def test_fewer_than_two_events_have_no_gap(self, times: list[int]) -> None:
        assert tbc_ns(times) == []
        assert tbc_max_ns(tbc_ns(times)) is None
        assert jitter_ns(tbc_ns(times)) is None

    def test_option_b_gives_every_token_its_chunks_stamp(self) -> None:
        assert itl_ns([0, 100, 160], [2, 3, 1]) == [0, 100, 0, 0, 60]

    def test_even_spread_divides_a_gap_among_the_arriving_tokens(self) -> None:
        assert itl_even_ns([0, 100, 160], [2, 4, 3]) == [25, 25, 25, 25, 20, 20, 20]

    def test_even_spread_loses_no_nanosecond(self) -> None:
        shares = itl_even_ns([0, 100], [1, 7])
        assert sum(shares) == 100
        assert max(shares) - min(shares) == 1

    def test_a_chunk_without_tokens_leaves_its_gap_to_the_next(self) -> None:
        assert itl_even_ns([0, 100, 160], [1, 0, 2]) == [80, 80]
        assert itl_ns([0, 100, 160], [1, 0, 2]) == [160, 0]

    def test_jitter_is_the_populations_deviation(self) -> None:
        assert jitter_ns([2, 4, 4, 4, 5, 5, 7, 9]) == 2.0
        assert jitter_ns([5, 5]) == 0.0
        assert jitter_ns([5]) is None

    def test_jitter_does_not_cancel_far_from_zero(self) -> None:
        assert jitter_ns([10**15, 10**15 + 2]) == 1.0


class TestTpot:
    def test_counts_from_first_to_last_token(self) -> None:
        t = exchange([*content(100, 120, 200), (900, EventClass.USAGE, -1)]).timeline
        assert tpot_ns(t, 11) == 10 * MS

    @pytest.mark.parametrize("tokens", [None, 0, 1])
    def test_needs_two_tokens(self, tokens: int | None) -> None:
        assert tpot_ns(exchange(content(100, 120)).timeline, tokens) is None

    def test_of_one_event_with_many_tokens_is_none(self) -> None:
        assert tpot_ns(exchange(content(100)).timeline, 50) is None


class TestUserIdle:
    def test_is_the_longest_wait_of_the_reader(self) -> None:
        # Reads at 50 ms a token: token 1 at 100 (waits 100), token 3 is due at 100 and comes at 400.
        assert user_idle_ns([100 * MS, 110 * MS, 400 * MS], 0) == 300 * MS

    def test_is_never_below_zero(self) -> None:
        assert user_idle_ns([0], 0) == 0
        assert user_idle_ns([5, 6], 10) == 0

    def test_needs_an_origin_and_output(self) -> None:
        assert user_idle_ns([], 0) is None
        assert user_idle_ns([5], None) is None

    def test_tokens_of_earlier_chunks_keep_the_reader_busy(self) -> None:
        # Ten tokens at 100 ms last until 600: the chunk at 550 comes in time, that at 1,200 finds
        # eleven tokens read, so 550 ms of reading.
        times = [100 * MS, 550 * MS, 1_200 * MS]
        assert user_idle_ns(times, 0, [10, 1, 5]) == 1_200 * MS - 11 * 50 * MS
        assert user_idle_ns(times, 0, 10) == 200 * MS
        assert user_idle_ns(times, 0) == 1_100 * MS

    def test_equals_the_simulated_reader(self) -> None:
        rng = random.Random(7)
        for _ in range(200):
            times = sorted(rng.randrange(3_000 * MS) for _ in range(rng.randrange(1, 40)))
            tokens = [rng.randrange(1, 6) for _ in times]
            free_ns = idle_ns = 0
            for t_ns, k in zip(times, tokens, strict=True):
                idle_ns += max(0, t_ns - free_ns)
                free_ns = max(free_ns, t_ns) + k * 50 * MS
            assert user_idle_ns(times, 0, tokens) == idle_ns

    def test_benefit_takes_five_tokens_for_a_second(self) -> None:
        assert smooth_benefit(100, 2_000 * MS) == 90.0
        assert smooth_benefit(1, 2_000 * MS) == -9.0
        assert smooth_benefit(None, 5) is None
        assert smooth_benefit(5, None) is None


@needs_oracle
def test_idle_and_benefit_agree_with_the_oracle() -> None:
    cases = json.loads((ORACLE / "smooth_goodput.json").read_text())["cases"]
    cases = [case for case in cases if "token_times" in case["input"]]
    assert len(cases) >= 6
    for case in cases:
        given, expected = case["input"], case["expected"]
        origin = round(given["arrival"] * 1e9)
        times = [round(t * 1e9) for t in given["token_times"]]
        v = round(given["V_seconds_per_token"] * 1e9)
        idle = user_idle_ns(times, origin, 1, v)
        assert idle is not None
        assert idle / 1e9 == pytest.approx(expected["idle"]["A0_arrival_V(i-1)"], abs=1e-9)
        from_first = user_idle_ns(times, times[0], 1, v)
        assert from_first is not None
        assert from_first / 1e9 == pytest.approx(expected["idle"]["F_first_V(i-1)"], abs=1e-9)
        benefit = smooth_benefit(len(times), idle, given["alpha"])
        assert benefit == pytest.approx(expected["benefit_seconds"]["A0_arrival_V(i-1)"], abs=1e-9)
        gaps = tbc_ns(times)
        assert (tbc_max_ns(gaps) or 0) / 1e9 == pytest.approx(expected["tbt_max"], abs=1e-9)


@needs_oracle
def test_the_three_itl_rules_agree_with_the_oracle() -> None:
    cases = {c["id"]: c for c in json.loads((ORACLE / "ietf_cases.json").read_text())["cases"]}
    case = cases["S7_chunk_timing_and_golden_workload"]
    times = [round(t * 1e9) for t, _ in case["input"]["chunks"]]
    tokens = [k for _, k in case["input"]["chunks"]]
    for gaps, name in (
        (tbc_ns(times), "optionA_time_between_chunks"),
        (itl_ns(times, tokens), "optionB_assign_T_to_all"),
        (itl_even_ns(times, tokens), "even_spread"),
    ):
        expected = case["expected"][name]
        assert len(gaps) == expected["samples"]
        assert sum(gaps) / len(gaps) / 1e9 == pytest.approx(expected["mean"], abs=1e-9)
        assert (jitter_ns(gaps) or 0) / 1e9 == pytest.approx(expected["std_pop"], abs=1e-9)
        assert max(gaps) / 1e9 == pytest.approx(expected["max"], abs=1e-9)
    jitters = [jitter_ns(p) for p in cases["S6_tail_ratio"]["input"]["pauses_per_request_ms"]]
    assert jitters == pytest.approx(cases["S6_tail_ratio"]["expected"]["jitter_std_pop"])


class TestTokensPerChunk:
    def test_declared_ones_win(self) -> None:
        assert tokens_per_chunk(exchange(content(1, 2, tokens=3), output=99)) == [3, 3]

    def test_one_event_that_does_not_declare_leaves_it_unknown(self) -> None:
        assert tokens_per_chunk(exchange(content(1, tokens=3) + content(2), output=99)) is None

    def test_as_many_tokens_as_events_means_one_each(self) -> None:
        assert tokens_per_chunk(exchange(content(1, 2, 3), output=3)) == [1, 1, 1]

    def test_a_count_of_chunks_is_no_knowledge_of_tokens(self) -> None:
        assert tokens_per_chunk(exchange(content(1, 2, 3), output=3, source=TokenSource.CHUNKS)) is None

    def test_hidden_reasoning_is_no_part_of_the_chunks(self) -> None:
        assert tokens_per_chunk(exchange(content(1, 2, 3), output=10, reasoning=7)) == [1, 1, 1]
        seen = [(0, EventClass.REASONING, -1), *content(1, 2, 3)]
        assert tokens_per_chunk(exchange(seen, output=8, reasoning=4)) is None

    def test_no_output_has_no_chunks(self) -> None:
        assert tokens_per_chunk(exchange([(1, EventClass.KEEPALIVE, -1)], output=0)) is None
        assert tokens_per_chunk(exchange(content(1, 2, tokens=0), output=2)) is None


class TestMeasured:
    def test_metrics_are_seconds_under_the_public_names(self) -> None:
        x = exchange(content(100, 150, 250), output=3)
        x.timeline.first_byte_ns = 90 * MS
        x.timeline.first_content_ns = 150 * MS
        x.timeline.response_end_ns = 300 * MS
        assert metrics_of(x) == {
            "ttft": 0.15, "ttft_any": 0.1, "ttfb": 0.09, "tpot": 0.075, "e2e": 0.3, "user_idle": 0.15,
            "tbc_max": 0.1, "jitter": 0.025, "smooth_benefit": 2.25,
        }  # fmt: skip

    def test_an_exchange_without_an_answer_has_only_nones(self) -> None:
        x = Exchange(relay="r", seq=1, arrival_wall_ns=0, timeline=Timeline(arrival_ns=0))
        assert set(metrics_of(x).values()) == {None}
        assert chunking_of(x) == {
            "events": 0, "content_events": 0, "reads": 0, "tokens_per_chunk_mean": None,
            "single_token_share": None,
        }  # fmt: skip

    def test_single_token_chunks_make_the_options_agree(self) -> None:
        m = measure(exchange(content(100, 150, 250), output=3))
        assert m.itl_b_ns == m.itl_even_ns == m.tbc_ns == [50 * MS, 100 * MS]

    def test_unknown_chunks_have_no_option_b(self) -> None:
        m = measure(exchange(content(100, 150, 250), output=12))
        assert m.itl_b_ns is None
        assert m.itl_even_ns is None

    def test_the_reader_of_unknown_chunks_gets_the_mean(self) -> None:
        # 12 tokens in 3 chunks: 4 each, 200 ms of reading; the third is due at 400 and comes at 450.
        assert measure(exchange(content(10, 20, 450), output=12)).user_idle_ns == 50 * MS

    def test_chunking_counts_what_carries_output(self) -> None:
        events = [(1, EventClass.ROLE, -1), *content(2, 3, tokens=1), *content(4, 5, tokens=4)]
        x = exchange(events, output=10)
        x.reads = 2
        assert chunking_of(x) == {
            "events": 5, "content_events": 4, "reads": 2, "tokens_per_chunk_mean": 2.5,
            "single_token_share": 0.5,
        }  # fmt: skip

    def test_a_mean_comes_from_the_total_and_a_share_does_not(self) -> None:
        chunking = chunking_of(exchange(content(1, 2, 3, 4), output=10))
        assert (chunking["tokens_per_chunk_mean"], chunking["single_token_share"]) == (2.5, None)

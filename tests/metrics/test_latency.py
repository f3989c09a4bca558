"""Every term against cases worked by hand."""

from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmtap.exchange.exchange import OUTPUT, EventLog, Exchange, Timeline, Tokens
from llmtap.exchange.outcome import EventClass, TokenSource
from llmtap.metrics.deadlines import user_idle_ns
from llmtap.metrics.latency import (
    EVENTS_MIN,
    HOLD_NS,
    NO_BURSTS,
    SPREAD_NS,
    Bursts,
    arrives_in_bursts,
    bursts_of,
    chunking_of,
    chunks_at_a_time,
    e2e_ns,
    first_event_ns,
    itl_c_ns,
    itl_even_ns,
    itl_ns,
    jitter_ns,
    measure,
    metrics_of,
    output_times_ns,
    tbc_max_ns,
    tbc_ns,
    tokens_per_chunk,
    tpot_ns,
    tpot_to_end_ns,
    ttfb_ns,
    ttft_any_ns,
    ttft_ns,
    ttft_reasoning_ns,
    ttft_tool_call_ns,
)

MS = 1_000_000
CARRYING = (EventClass.CONTENT, EventClass.REASONING, EventClass.TOOL_CALL, EventClass.REFUSAL)


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
        log.add(t_ms * MS, event_class, 100, tokens, OUTPUT if event_class in CARRYING else 0)
    carrying = output_times_ns(log)
    return Exchange(
        relay="r",
        seq=1,
        arrival_wall_ns=0,
        stream=True,
        timeline=Timeline(
            arrival_ns=0,
            submit_ns=submit_ns,
            events=log,
            first_token_ns=carrying[0] if carrying else None,
            last_token_ns=carrying[-1] if carrying else None,
        ),
        tokens=Tokens(output=output, reasoning=reasoning, source=source),
    )


def content(*times_ms: int, tokens: int = -1) -> list[tuple[int, EventClass, int]]:
    return [(t, EventClass.CONTENT, tokens) for t in times_ms]


class TestPointsSinceSubmit:
    t = Timeline(
        arrival_ns=0,
        submit_ns=10,
        first_byte_ns=25,
        first_any_ns=26,
        first_token_ns=30,
        first_reasoning_ns=31,
        first_tool_call_ns=33,
        first_content_ns=47,
        response_end_ns=110,
    )
    TERMS = (ttfb_ns, first_event_ns, ttft_any_ns, ttft_reasoning_ns, ttft_tool_call_ns, ttft_ns, e2e_ns)

    def test_each_is_its_point_minus_submit(self) -> None:
        assert [term(self.t) for term in self.TERMS] == [15, 16, 20, 21, 23, 37, 100]

    @pytest.mark.parametrize("term", TERMS)
    def test_a_point_never_reached_gives_none(self, term) -> None:  # type: ignore[no-untyped-def]
        assert term(Timeline(arrival_ns=0, submit_ns=10)) is None
        assert term(Timeline(arrival_ns=0, first_byte_ns=1, first_token_ns=1, first_content_ns=1)) is None

    def test_an_answer_before_the_request_was_out_has_no_latency(self) -> None:
        assert ttfb_ns(Timeline(arrival_ns=0, submit_ns=10, first_byte_ns=9)) is None


class TestGaps:
    def test_only_events_that_carry_output_count(self) -> None:
        x = exchange(
            [
                (5, EventClass.ROLE, -1),
                (10, EventClass.REASONING, -1),
                (12, EventClass.KEEPALIVE, -1),
                (30, EventClass.CONTENT, -1),
                (31, EventClass.METADATA, -1),
                (70, EventClass.TOOL_CALL, -1),
                (71, EventClass.REFUSAL, -1),
                (90, EventClass.USAGE, -1),
                (95, EventClass.DONE, -1),
            ]
        )
        assert tbc_ns(output_times_ns(x.timeline.events)) == [20 * MS, 40 * MS, 1 * MS]

    @pytest.mark.parametrize("times", [[], [5]])
    def test_fewer_than_two_events_have_no_gap(self, times: list[int]) -> None:
        gaps = tbc_ns(times)
        assert (gaps, tbc_max_ns(gaps), jitter_ns(gaps)) == ([], None, None)

    def test_a_gap_belongs_to_the_tokens_that_come_after_it(self) -> None:
        assert itl_even_ns([0, 100], [1, 7]) == [14, 14, 14, 14, 14, 15, 15]
        assert itl_even_ns([0, 100, 160], [1, 0, 2]) == [80, 80]
        assert itl_ns([0, 100, 160], [1, 0, 2]) == [160, 0]

    def test_jitter_does_not_cancel_far_from_zero(self) -> None:
        assert jitter_ns([10**15, 10**15 + 2]) == 1.0


class TestTpot:
    def test_counts_from_first_to_last_token(self) -> None:
        t = exchange([*content(100, 120, 200), (900, EventClass.USAGE, -1)]).timeline
        assert tpot_ns(t, 11) == 10 * MS

    def test_to_the_end_of_the_response_is_e2e_less_ttft_over_the_other_tokens(self) -> None:
        """Seed 002: TPOT = (L - TTFT) / (N - 1), with L = 1,000, TTFT = 100 and N = 11."""
        t = exchange([*content(100, 120, 200), (900, EventClass.USAGE, -1)]).timeline
        t.response_end_ns = 1_000 * MS
        assert tpot_to_end_ns(t, 11) == 90 * MS
        assert tpot_to_end_ns(t, 1) is None and tpot_to_end_ns(t, None) is None
        t.response_end_ns = None
        assert tpot_to_end_ns(t, 11) is None

    @pytest.mark.parametrize(("times", "tokens"), [((100, 120), None), ((100, 120), 1), ((100,), 50)])
    def test_needs_two_tokens_at_two_times(self, times: tuple[int, ...], tokens: int | None) -> None:
        assert tpot_ns(exchange(content(*times)).timeline, tokens) is None


@pytest.mark.parametrize(
    ("x", "expected"),
    [
        (exchange(content(1, 2, tokens=3), output=99), [3, 3]),
        (exchange(content(1, tokens=3) + content(2), output=99), None),
        (exchange(content(1, 2, 3), output=3), [1, 1, 1]),
        (exchange(content(1, 2, 3), output=3, source=TokenSource.CHUNKS), None),
        (exchange(content(1, 2, 3), output=10, reasoning=7), [1, 1, 1]),
        (exchange([(0, EventClass.REASONING, -1), *content(1, 2, 3)], output=8, reasoning=4), None),
        (exchange([(1, EventClass.KEEPALIVE, -1)], output=0), None),
        (exchange(content(1, 2, tokens=0), output=2), None),
    ],
    ids=[
        "declared",
        "partly declared",
        "one each",
        "counted chunks",
        "hidden reasoning",
        "visible reasoning",
        "no output",
        "declared none",
    ],
)
def test_tokens_per_chunk(x: Exchange, expected: list[int] | None) -> None:
    assert tokens_per_chunk(x) == expected


class TestMeasured:
    def test_metrics_are_seconds_under_the_public_names(self) -> None:
        x = exchange(content(100, 150, 250), output=3)
        x.timeline.first_byte_ns = 90 * MS
        x.timeline.first_any_ns = 95 * MS
        x.timeline.first_content_ns = 150 * MS
        x.timeline.response_end_ns = 300 * MS
        assert metrics_of(x) == {
            "ttft": 0.15,
            "ttft_any": 0.1,
            "ttft_reasoning": None,
            "ttft_tool_call": None,
            "first_event": 0.095,
            "ttfb": 0.09,
            "tpot": 0.075,
            "e2e": 0.3,
            "user_idle": 0.15,
            "user_idle_eq4": 0.1,
            "user_idle_from_first_token": 0.05,
            "tbc_max": 0.1,
            "jitter": 0.025,
            "smooth_benefit": 2.25,
        }

    def test_an_exchange_without_an_answer_has_only_nones(self) -> None:
        x = Exchange(relay="r", seq=1, arrival_wall_ns=0, timeline=Timeline(arrival_ns=0))
        assert set(metrics_of(x).values()) == {None}
        assert chunking_of(x) == {
            "events": 0,
            "content_events": 0,
            "reads": 0,
            "events_per_read": None,
            "bytes_per_event_mean": None,
            "tokens_per_chunk_mean": None,
            "single_token_share": None,
            "bursts": 0,
            "burst_events": 0,
            "burst_hold_max": None,
        }

    def test_the_reader_of_unknown_chunks_gets_the_mean(self) -> None:
        # 12 tokens in 3 chunks: 4 each, 200 ms of reading; the third is due at 400 and comes at 450.
        assert measure(exchange(content(10, 20, 450), output=12)).user_idle_ns == 50 * MS

    def test_chunking_counts_what_carries_output(self) -> None:
        events = [(1, EventClass.ROLE, -1), *content(2, 3, tokens=1), *content(4, 5, tokens=4)]
        x = exchange(events, output=10)
        x.reads = 2
        assert chunking_of(x) == {
            "events": 5,
            "content_events": 4,
            "reads": 2,
            "events_per_read": 2.5,
            "bytes_per_event_mean": 100.0,
            "tokens_per_chunk_mean": 2.5,
            "single_token_share": 0.5,
            "bursts": 0,
            "burst_events": 0,
            "burst_hold_max": None,
        }
        of_a_total = chunking_of(exchange(content(1, 2, 3, 4), output=10))
        assert (of_a_total["tokens_per_chunk_mean"], of_a_total["single_token_share"]) == (2.5, None)

    @given(
        st.lists(st.tuples(st.integers(0, 2_000), st.integers(-1, 3)), min_size=1, max_size=12),
        st.none() | st.integers(0, 2_000),
        st.none() | st.integers(0, 30),
    )
    def test_both_waits_of_a_reader_are_those_of_their_origins(
        self, events: list[tuple[int, int]], submit_ms: int | None, output: int | None
    ) -> None:
        submit_ns = None if submit_ms is None else submit_ms * MS
        chunks = [(t_ms, EventClass.CONTENT, tokens) for t_ms, tokens in sorted(events)]
        x = exchange(chunks, output=output, submit_ns=submit_ns)
        m, times = measure(x), output_times_ns(x.timeline.events)
        pace: list[int] | float = max(1.0, (output or 0) / len(times))
        if m.tokens_per_chunk is not None:
            pace = m.tokens_per_chunk
        assert m.user_idle_ns == user_idle_ns(times, submit_ns, pace)
        assert m.user_idle_from_first_token_ns == user_idle_ns(times, times[0], pace)

    @pytest.mark.parametrize(
        ("events", "output", "policy"),
        [
            (content(1, 2), 2, "direct (single-token chunks)"),
            (content(1, 2), 9, "A (time between chunks)"),
            (content(1, 2, tokens=3), 9, "B-even (gaps spread over the tokens of a chunk)"),
            # 10 of 11 single: above 90 %, and so direct (IETF B.2.1).
            ([*content(*range(10), tokens=1), *content(11, tokens=2)], 12, "direct (single-token chunks)"),
        ],
    )
    def test_each_itl_says_how_it_is_to_be_read(
        self, events: list[tuple[int, EventClass, int]], output: int, policy: str
    ) -> None:
        x = exchange(events, output=output)
        assert (measure(x).itl_policy, itl_c_ns(x)) == (f"{policy}; tokens by usage", None)
        x.server_gaps_ns = array("q", [3 * MS, 4 * MS])
        m = measure(x)
        assert m.itl_policy == f"C (the server's stamps) beside {policy}; tokens by usage"
        assert m.itl_c_ns == [3 * MS, 4 * MS]


@given(st.lists(st.sampled_from([0.0, 0.4, 1.1, 10.0, 49.9, 50.0, 300.0]), max_size=60))
def test_equals_the_definition_word_by_word(gaps_ms: list[float]) -> None:
    times = [0]
    for gap in gaps_ms:
        times.append(times[-1] + round(gap * MS))
    gaps = tbc_ns(times)
    median = sorted(gaps)[(len(gaps) - 1) // 2] if gaps else 0
    found = []
    for i in range(1, len(times)):
        hold = times[i] - times[i - 1]
        together = [t for t in times[i:] if t - times[i] <= SPREAD_NS]
        if hold >= HOLD_NS and hold >= 5 * median and len(together) >= EVENTS_MIN:
            found.append((hold, len(together)))
    expected = Bursts(len(found), sum(k for _, k in found), max(h for h, _ in found)) if found else NO_BURSTS
    assert bursts_of(times, gaps, tbc_max_ns(gaps) or 0) == expected


def test_chunks_at_a_time_are_events_of_a_read_or_of_a_burst() -> None:
    def chunking(each: float | None, chunks: int, bursts: int, events: int) -> dict[str, object]:
        return {"events_per_read": each, "content_events": chunks, "bursts": {"n": bursts, "events": events}}

    assert chunks_at_a_time(chunking(8.1, 800, 100, 800)) == 8.1
    # Bursts whose events came in several reads.
    assert chunks_at_a_time(chunking(1.5, 800, 50, 400)) == 8
    assert chunks_at_a_time(chunking(1.5, 800, 50, 399)) == 1.5
    assert chunks_at_a_time(chunking(1.0, 0, 0, 0)) == 1.0
    assert chunks_at_a_time(chunking(None, 0, 0, 0)) is chunks_at_a_time({}) is None
    assert [arrives_in_bursts(n, 1.1) for n in (None, 2.1, 2.2)] == [False, False, True]
    assert not arrives_in_bursts(8, None)

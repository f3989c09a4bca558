"""Objectives: what they are written as, and which exchanges they judge."""

from collections import Counter
from dataclasses import replace

import pytest

from llmtap.errors import ConfigError
from llmtap.exchange.exchange import OUTPUT, EventLog, Exchange, Timeline, Tokens
from llmtap.exchange.outcome import EventClass, Outcome, Reading, TokenSource
from llmtap.metrics.latency import measure
from llmtap.metrics.objectives import (
    BOUNDS,
    REQUESTED,
    Goodput,
    Judgement,
    Objectives,
    experience_of,
    fluidity,
    judge,
    qoe_area_step,
)

MS = 1_000_000


def exchange(
    *times_ms: int,
    tokens: int = 1,
    outcome: Outcome = Outcome.COMPLETE,
    left_ms: int | None = None,
    stream: bool = True,
) -> Exchange:
    """Submitted at 0, so many tokens at each time, ended at the last."""
    log = EventLog()
    for t in times_ms:
        log.add(t * MS, EventClass.CONTENT, 100, tokens, OUTPUT)
    t = Timeline(
        arrival_ns=0, submit_ns=0, events=log, delivered_ns=None if left_ms is None else left_ms * MS
    )
    if times_ms:
        t.first_byte_ns = t.first_any_ns = t.first_token_ns = t.first_content_ns = times_ms[0] * MS
        t.last_token_ns = times_ms[-1] * MS
        if outcome in (Outcome.COMPLETE, Outcome.REFUSED):
            t.response_end_ns = times_ms[-1] * MS
    x = Exchange(relay="r", seq=1, arrival_wall_ns=0, timeline=t, stream=stream, outcome=outcome)
    x.method = "POST"
    x.tokens = Tokens(output=tokens * len(times_ms), source=TokenSource.TOKEN_IDS)
    return x


def verdict(text: str, x: Exchange) -> bool | None:
    return Objectives.parse(text).meets(measure(x), x)


class TestText:
    @pytest.mark.parametrize(
        ("written", "canonical"),
        [
            ("e2e:30000ms,tpot:0.05s, ttft:0.2s", "ttft:200ms tpot:50ms e2e:30s"),
            ("jitter:1.5ms user_idle:2m tbc_p99:1500us", "user_idle:120s tbc_p99:1500us jitter:1500us"),
        ],
    )
    def test_is_brought_into_one_form(self, written: str, canonical: str) -> None:
        objectives = Objectives.parse(written)
        assert objectives.text == canonical
        assert Objectives.parse(canonical) == objectives

    @pytest.mark.parametrize(
        "written",
        [
            "ttf:200ms",
            "200ms",
            "ttft",
            "ttft:",
            "ttft:200",
            "ttft:-2ms",
            "ttft:soon",
            "ttft:0ms",
            "ttft:1s ttft:2s",
            " , ",
        ],
    )
    def test_what_is_wrong_is_refused(self, written: str) -> None:
        with pytest.raises(ConfigError, match=r"^slo\.gold: "):
            Objectives.parse(written, "slo.gold")

    def test_a_request_may_bring_its_own(self) -> None:
        objectives = Objectives.parse("ttft:200ms e2e:30s")
        assert objectives.with_bounds(ttft=90 * MS, tpot=7 * MS).text == "ttft:90ms tpot:7ms e2e:30s"
        assert objectives.with_bounds(ttft=None, tpot=None) is objectives


class TestFigures:
    VALUES_US = {
        "ttft": 100_000,
        "ttft_any": 100_000,
        "ttfb": 100_000,
        "tpot": 50_000,
        "e2e": 200_000,
        "user_idle": 100_000,
        "tbc_max": 80_000,
        "tbc_p99": 79_400,
        "jitter": 30_000,
        "ttft_scheduled": 100_000,
        "e2e_scheduled": 200_000,
    }

    @pytest.mark.parametrize("name", BOUNDS)
    def test_each_bound_is_inclusive(self, name: str) -> None:
        x, value_us = exchange(100, 120, 200), self.VALUES_US[name]
        assert verdict(f"{name}:{value_us}us", x) is True
        assert verdict(f"{name}:{value_us - 1}us", x) is False

    def test_all_must_hold_at_once(self) -> None:
        x = exchange(100, 120, 200)
        assert verdict("ttft:100ms tpot:50ms e2e:200ms", x) is True
        objectives = Objectives.parse("ttft:99ms tpot:50ms e2e:199ms")
        assert objectives.broken_bounds(measure(x), x) == ("ttft", "e2e")

    def test_a_figure_that_does_not_apply_is_met(self) -> None:
        assert verdict("tpot:1ns tbc_max:1ns jitter:1ns", exchange(100)) is True


def judged_as(
    text: str, *times_ms: int, outcome: Outcome = Outcome.COMPLETE, stream: bool = True
) -> bool | None:
    return verdict(text, exchange(*times_ms, outcome=outcome, stream=stream))


class TestWhatCounts:
    @pytest.mark.parametrize(
        ("outcome", "without_output", "with_output"),
        [
            (Outcome.COMPLETE, True, True),
            (Outcome.REFUSED, None, True),
            (Outcome.UPSTREAM_ERROR, False, False),
            (Outcome.UPSTREAM_TIMEOUT, False, False),
            (Outcome.UPSTREAM_RESET, False, False),
            (Outcome.TRUNCATED, False, False),
            (Outcome.CLIENT_ERROR, None, None),
            (Outcome.REJECTED, None, None),
            (Outcome.TAP_ERROR, None, None),
        ],
    )
    def test_by_outcome(
        self, outcome: Outcome, without_output: bool | None, with_output: bool | None
    ) -> None:
        """The upstream's failures are bad; a guardrail's block, a wrong request and our own do not count."""
        x = exchange(outcome=outcome, stream=False)
        assert Goodput().add(Objectives.parse("ttft:1s e2e:1s"), measure(x), x) is without_output
        assert judged_as("ttft:1s", 1, outcome=outcome) is with_output

    @pytest.mark.parametrize(
        "outcome",
        [Outcome.UPSTREAM_ERROR, Outcome.UPSTREAM_TIMEOUT, Outcome.UPSTREAM_RESET, Outcome.TRUNCATED],
    )
    def test_bounds_of_streams_do_not_judge_a_failed_request_for_one_piece(self, outcome: Outcome) -> None:
        x = exchange(outcome=outcome, stream=False)
        assert verdict("ttft:500ms tpot:50ms", x) is None
        assert verdict("ttft:500ms tpot:50ms", exchange(outcome=outcome)) is False

    def test_a_refusal_with_output_counts_by_its_figures(self) -> None:
        assert judged_as("ttft:99ms", 100, outcome=Outcome.REFUSED) is False

    @pytest.mark.parametrize("reason", ["empty", "only_metadata"])
    def test_a_stream_that_brought_nothing_is_bad(self, reason: str) -> None:
        x = exchange()
        x.no_token_reason = reason
        assert verdict("ttft:200ms tpot:50ms", x) is False

    def test_an_answer_in_one_piece_has_no_bounds_of_streams(self) -> None:
        x = exchange(900, stream=False)
        assert verdict("ttft:1ms tbc_max:1ms", x) is None
        assert verdict("ttft:1ms e2e:1s", x) is True
        assert Objectives.parse("ttft:1ms ttfb:2ms").broken_bounds(measure(x), x) == ("ttfb",)

    def test_failures_and_successes_of_one_piece_count_by_the_same_bounds(self) -> None:
        """297 answers in one piece and 32 of status 503, beside 8 streams of which 2 failed."""
        streams_only, with_e2e = Goodput(), Goodput()
        for x, n in (
            (exchange(900, stream=False), 297),
            (exchange(outcome=Outcome.UPSTREAM_ERROR, stream=False), 32),
            (exchange(100, 120), 6),
            (exchange(outcome=Outcome.UPSTREAM_ERROR), 2),
        ):
            for _ in range(n):
                streams_only.add(Objectives.parse("ttft:500ms tpot:50ms"), measure(x), x)
                with_e2e.add(Objectives.parse("ttft:500ms tpot:50ms e2e:2s"), measure(x), x)
        assert (streams_only.total().met, streams_only.total().counted) == (6, 8)
        assert (with_e2e.total().met, with_e2e.total().counted) == (303, 337)  # 297 + 6 of 297 + 32 + 6 + 2

    def test_a_list_of_models_is_no_answer(self) -> None:
        x = exchange(5, stream=False)
        x.method = "GET"
        assert verdict("e2e:1s", x) is None
        x.stream = True
        assert verdict("e2e:1s", x) is True


class TestClientsThatLeft:
    """Bad if a bound could not be met any more when the client left; otherwise they do not count."""

    @pytest.mark.parametrize(
        ("text", "times", "left_ms", "met"),
        [
            # Left before the bound of the first token had passed, at it, and after it.
            ("ttft:200ms", (), 150, None),
            ("ttft:200ms", (), 200, None),
            ("ttft:200ms", (), 201, False),
            # The first token had come, in time or late.
            ("ttft:200ms", (100,), 5_000, None),
            ("ttft:200ms", (300,), 5_000, False),
            # All in time so far; the end was still to come, in time or not.
            ("ttft:200ms e2e:1s", (100, 200), 900, None),
            ("ttft:200ms e2e:1s", (100, 200), 1_001, False),
            # A pause that is over the bound, seen or still going on.
            ("tbc_max:100ms", (100, 250), 260, False),
            ("tbc_max:100ms", (100, 150), 250, None),
            ("tbc_max:100ms", (100, 150), 251, False),
            ("user_idle:90ms", (100,), 110, False),
            ("user_idle:90ms", (), 91, False),
            # A mean may still recover.
            ("tpot:10ms", (100, 200), 210, None),
            ("jitter:10ms tbc_p99:10ms", (100, 200, 210), 220, None),
        ],
    )
    def test_count_when_a_bound_was_lost(
        self, text: str, times: tuple[int, ...], left_ms: int, met: bool | None
    ) -> None:
        assert verdict(text, exchange(*times, outcome=Outcome.CLIENT_CANCELLED, left_ms=left_ms)) is met

    @pytest.mark.parametrize(
        ("text", "times", "left_ms", "stream", "met"),
        [
            ("ttft:1ms", (), 900, False, None),
            ("ttft:1ms e2e:899ms", (), 900, False, False),
            ("ttft:1ms", (), None, True, None),
            ("ttft:1ms", (2,), None, True, False),
        ],
        ids=["bound of streams", "end of one piece", "no stamp", "no stamp, late"],
    )
    def test_in_one_piece_or_without_a_stamp(
        self, text: str, times: tuple[int, ...], left_ms: int | None, stream: bool, met: bool | None
    ) -> None:
        x = exchange(*times, outcome=Outcome.CLIENT_CANCELLED, left_ms=left_ms, stream=stream)
        assert verdict(text, x) is met


GOLD = Objectives.parse("ttft:200ms e2e:1s")
FREE = Objectives.parse("ttft:900ms")


def judged(ttft_ms: int, tokens: int = 10, outcome: Outcome = Outcome.COMPLETE) -> Exchange:
    return exchange(ttft_ms, tokens=tokens, outcome=outcome)


def tally(objectives: Objectives | None, *exchanges: Exchange) -> Goodput:
    goodput = Goodput()
    for x in exchanges:
        goodput.add(objectives, measure(x), x)
    return goodput


def test_good_ones_count_by_the_request_and_by_the_token() -> None:
    goodput = tally(
        GOLD,
        judged(100),
        judged(300, tokens=30),
        judged(1_100, tokens=20),
        judged(50, tokens=40, outcome=Outcome.UPSTREAM_RESET),
        judged(1, outcome=Outcome.REJECTED),
    )
    out = goodput.to_dict(2.0)
    assert out == {
        "objectives": "ttft:200ms e2e:1s",
        "met": 1,
        "counted": 4,
        "not_judged": 0,
        "own_faults": 1,
        "attainment": 0.25,
        "requests_per_second": 0.5,
        "tokens_per_second": 5.0,
        "token_attainment": 0.1,
        "broken": {"e2e": 1, "ended": 1, "ttft": 2},
        "by": out["by"],
    }


def test_a_request_is_judged_by_what_it_asked_for() -> None:
    x = judged(250)
    x.slo_ttft_ns = 300 * MS
    assert judge(GOLD, measure(x), x) == (Objectives.parse("ttft:300ms e2e:1s"), Judgement.GOOD)
    x.slo_ttft_ns = 249 * MS
    assert judge(None, measure(x), x) == (Objectives.parse("ttft:249ms"), Judgement.BAD)
    # Under the class's name, or one for all: a client cannot make names without end.
    assert tally(GOLD, x).by_objectives.keys() == {GOLD.text}
    x.slo_tpot_ns = 7
    assert tally(None, x).by_objectives.keys() == {REQUESTED}


def test_each_is_kept_under_its_own_objectives() -> None:
    goodput = tally(GOLD, judged(100), judged(300))
    goodput.merge(tally(FREE, judged(300)))
    out = goodput.to_dict(1.0)
    assert (out["objectives"], out["met"], out["counted"]) == ("those of each class", 2, 3)
    assert isinstance(out["by"], dict)
    assert {name: (c["met"], c["counted"]) for name, c in out["by"].items()} == {
        "ttft:200ms e2e:1s": (1, 2),
        "ttft:900ms": (1, 1),
    }


def test_merging_equals_adding_together() -> None:
    exchanges = [judged(t, tokens=t) for t in (100, 150, 300, 2_000)]
    merged = Goodput()
    for x in exchanges:
        merged.merge(tally(GOLD, x))
    assert merged.to_dict(3.0) == tally(GOLD, *exchanges).to_dict(3.0)
    assert merged.total().broken == Counter({"ttft": 2, "e2e": 1})


STALL_AFTER_2_MS = (100, 120, 1120, 1140, 1160, 1180, 1200, 1220, 1240, 1260)


def test_fluidity_carries_slack_over_and_a_late_token_loses_it() -> None:
    # Gaps 10, 30, 30, 60 at a bound of 20: the first leaves 10, which the second uses up.
    counted = fluidity([10, 40, 70, 130], 0, 20, 20)
    assert (counted.tokens_in_time, counted.missed_deadlines) == (2, 1 + 3)
    assert fluidity([], 0, 1, 1) is None


@pytest.mark.parametrize(
    ("times", "expected"),
    # Expected 10, 20; digested 20, 40; until 40: (20 + 0) / (30 + 20).
    [([20, 40], 0.4), ([10], 1.0), ([], None)],
)
def test_qoe_is_a_ratio_of_areas(times: list[int], expected: float | None) -> None:
    assert qoe_area_step(times, 0, 10, 10) == expected


class TestOfAnExchange:
    objectives = Objectives.parse("ttft:300ms tpot:100ms")

    def test_takes_its_bounds_from_the_objectives(self) -> None:
        x = exchange(*STALL_AFTER_2_MS)
        experience = experience_of(x, measure(x), self.objectives)
        assert experience.fluidity.index_of_code == 0.5625
        assert experience.qoe_area_step == pytest.approx(0.390476190476, abs=1e-12)
        x.timeline.submit_ns = None
        assert experience_of(x, measure(x), self.objectives) is None

    def test_counts_the_tokens_of_a_chunk(self) -> None:
        x = exchange(100, 200, tokens=3)
        experience = experience_of(x, measure(x), self.objectives)
        assert (experience.fluidity.tokens, experience.fluidity.tokens_in_time) == (6, 6)

    @pytest.mark.parametrize("text", ["ttft:1s", "tpot:1s", "tbc_max:1s e2e:1s"])
    def test_needs_both_bounds(self, text: str) -> None:
        x = exchange(*STALL_AFTER_2_MS)
        assert experience_of(x, measure(x), Objectives.parse(text)) is None


# ------------------------------------------------------------------ answers that were not understood


def reading(of: Reading, outcome: Outcome = Outcome.COMPLETE) -> Exchange:
    """A stream of which only bytes are known."""
    t = Timeline(0, submit_ns=0, first_byte_ns=50 * MS, first_any_ns=50 * MS, response_end_ns=500 * MS)
    x = Exchange("r", 1, 0, t, outcome, "POST", "/api/chat", status=200, stream=True, reading=of)
    x.no_token_reason = "only_metadata"
    return x


@pytest.mark.parametrize("of", [Reading.NONE, Reading.INFERRED])
@pytest.mark.parametrize(
    ("text", "judgement"),
    [
        ("e2e:1s", Judgement.GOOD),
        ("ttfb:100ms e2e:1s", Judgement.GOOD),
        ("e2e:100ms", Judgement.BAD),
        ("ttfb:10ms", Judgement.BAD),
        ("ttft:1s", Judgement.NOT_JUDGED),
        ("ttft:1s e2e:1s", Judgement.NOT_JUDGED),
        ("tpot:1ms ttfb:100ms", Judgement.NOT_JUDGED),
        ("ttft:1s e2e:100ms", Judgement.BAD),
        ("tbc_max:1ms", Judgement.NOT_JUDGED),
    ],
)
def test_a_stream_that_was_not_understood_is_judged_by_its_known_bounds(
    of: Reading, text: str, judgement: Judgement
) -> None:
    x = reading(of)
    assert Objectives.parse(text).judge(measure(x), x) is judgement
    x.reading = Reading.DIALECT
    assert Objectives.parse(text).judge(measure(x), x) is Judgement.BAD, "a dialect knows that nothing came"


def test_what_is_known_of_a_stream_that_was_not_understood_stays_what_it_is() -> None:
    bounds = Objectives.parse("ttft:1s e2e:1s")
    x = reading(Reading.NONE)
    x.no_token_reason = "empty"
    assert bounds.judge(measure(x), x) is Judgement.BAD
    for outcome in (Outcome.UPSTREAM_ERROR, Outcome.UPSTREAM_RESET, Outcome.UPSTREAM_TIMEOUT):
        x = reading(Reading.NONE, outcome)
        assert bounds.judge(measure(x), x) is Judgement.BAD
    x = reading(Reading.NONE)
    x.stream = False
    assert bounds.judge(measure(x), x) is Judgement.GOOD, "only ttfb and e2e apply to one in one piece"


@pytest.mark.parametrize(
    ("output", "reasoning", "text", "judgement"),
    [
        (4_160, None, "e2e:1s", Judgement.GOOD),
        (4_160, None, "ttft:1s e2e:1s", Judgement.NOT_JUDGED),
        (4_160, None, "ttft:1s e2e:100ms", Judgement.BAD),
        (64, 64, "e2e:1s", Judgement.BAD),
        (None, None, "e2e:1s", Judgement.BAD),
    ],
)
def test_a_picture_is_output_without_tokens(
    output: int | None, reasoning: int | None, text: str, judgement: Judgement
) -> None:
    x = reading(Reading.DIALECT)
    x.tokens.output, x.tokens.reasoning = output, reasoning
    assert Objectives.parse(text).judge(measure(x), x) is judgement


def test_a_client_that_leaves_an_unknown_stream_shows_nothing_of_its_tokens() -> None:
    x = reading(Reading.NONE, Outcome.CLIENT_CANCELLED)
    x.timeline.delivered_ns = 5_000 * MS
    assert Objectives.parse("ttft:1s").judge(measure(x), x) is Judgement.NOT_JUDGED
    assert Objectives.parse("ttft:1s e2e:9s").judge(measure(x), x) is Judgement.NOT_JUDGED
    x.timeline.response_end_ns = None
    assert Objectives.parse("e2e:1s").judge(measure(x), x) is Judgement.BAD


@pytest.mark.parametrize("silent", [False, True])
def test_the_stream_of_an_agents_task_is_judged_by_its_first_byte_and_end(silent: bool) -> None:
    x = judged(900)
    x.endpoint = "a2a"
    if silent:  # changes of its state alone
        x.no_token_reason = "only_metadata"
    for text, judgement in (
        ("ttft:200ms tpot:1ms", Judgement.NOT_COUNTED),
        ("ttft:200ms e2e:9s", Judgement.GOOD),
        ("ttft:200ms e2e:500ms", Judgement.BAD),
    ):
        assert Objectives.parse(text).judge(measure(x), x) is judgement
    x.outcome = Outcome.UPSTREAM_ERROR
    assert Objectives.parse("ttft:200ms e2e:9s").judge(measure(x), x) is Judgement.BAD


def test_inferred_times_are_judged_if_the_operator_says_so() -> None:
    x = judged(100)
    x.reading = Reading.INFERRED
    bounds = Objectives.parse("ttft:200ms e2e:1s")
    assert bounds.judge(measure(x), x) is Judgement.NOT_JUDGED
    assert bounds.judge(measure(x, judge_inferred=True), x) is Judgement.GOOD
    x.reading = Reading.NONE
    assert bounds.judge(measure(x, judge_inferred=True), x) is Judgement.NOT_JUDGED


@pytest.mark.parametrize("outcome", [Outcome.REJECTED, Outcome.TAP_ERROR])
def test_a_fault_of_llmtap_is_left_out_and_counted_or_bad_if_the_class_counts_it(outcome: Outcome) -> None:
    good, fault = judged(100), judged(100)
    fault.outcome = outcome
    for count_own_faults, expected in ((False, (1, 1, 1, 1.0)), (True, (1, 2, 0, 0.5))):
        bounds = replace(Objectives.parse("ttft:200ms"), count_own_faults=count_own_faults)
        count = Goodput()
        for x in (good, fault):
            count.add(bounds, measure(x), x)
        out = count.total().to_dict(1)
        assert (out["met"], out["counted"], out["own_faults"], out["attainment"]) == expected
        stricter = bounds.with_bounds(ttft=1)
        assert stricter.judge(measure(fault), fault) is (
            Judgement.BAD if count_own_faults else Judgement.OWN_FAULT
        )
    whole = judged(100)
    whole.stream, whole.outcome = False, outcome
    bounds = Objectives.parse("ttft:200ms")
    assert bounds.judge(measure(whole), whole) is Judgement.NOT_COUNTED, "the class judges streams only"


def test_exchanges_that_are_not_judged_stand_beside_the_share() -> None:
    goodput = tally(GOLD, judged(100), reading(Reading.NONE), reading(Reading.INFERRED))
    more = tally(GOLD, reading(Reading.NONE))
    goodput.merge(more)
    out = goodput.to_dict(1.0)
    assert out is not None
    assert (out["met"], out["counted"], out["not_judged"], out["attainment"]) == (1, 1, 3, 1.0)


def test_bounds_from_the_schedule_count_the_wait_before_a_retry() -> None:
    x = exchange(100, 120, 200)
    assert x.timeline.submit_ns is not None
    bounds = Objectives.parse("ttft:500ms e2e:1s")
    assert bounds.meets(measure(x), x)
    x.scheduled_ns = x.timeline.submit_ns - 2_000_000_000
    assert bounds.meets(measure(x), x), "from the submission of the last attempt"
    scheduled = bounds.from_schedule()
    assert scheduled.text == "ttft_scheduled:500ms e2e_scheduled:1s"
    assert scheduled.broken_bounds(measure(x), x) == ("ttft_scheduled", "e2e_scheduled")
    x.scheduled_ns = None
    assert scheduled.meets(measure(x), x), "without a schedule, from the submission"

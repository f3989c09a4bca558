"""Figures of a gateway whose delays, holds, retries and changes of the text are known."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmtap.pairing.alignment import TextRelation
from llmtap.pairing.attempts import Role
from llmtap.pairing.clock import SAME_CLOCK, VantageOffset, offset_from_traffic
from llmtap.pairing.figures import BoundedValue, MeasuredPair, figures_of
from llmtap.pairing.matching import match
from tests.support.traffic.gateway import MS, SEND_NS, US, Crossing, Failed, words


def measured(crossing: Crossing, clock: VantageOffset = SAME_CLOCK) -> MeasuredPair:
    front, backs = crossing.play(1)
    (pair,) = match([front], backs, clock).pairs
    assert len(pair.matches) == len(backs)
    return figures_of(pair, clock)


def value(figures: MeasuredPair, name: str) -> float:
    (bounded,) = figures.values[name]
    assert bounded.low <= bounded.value <= bounded.high
    return bounded.value


def test_a_gateway_that_holds_nothing_back_adds_its_delays_only() -> None:
    figures = measured(Crossing())
    assert value(figures, "request") == 8 * MS
    # The back's own relay takes SEND_NS between its arrival and its submission.
    assert value(figures, "ttft") == 8 * MS + SEND_NS + 5 * MS
    assert value(figures, "first_token") == 5 * MS
    assert figures.token_delays_ns is not None
    assert figures.token_delays_ns.tolist() == [5 * MS] + [400 * US] * 11
    assert value(figures, "tokens_held") == 1
    assert value(figures, "tokens_per_event_back") == value(figures, "tokens_per_event_front") == 1
    assert figures.text is TextRelation.EQUAL
    assert not {"retries", "tokens_undelivered", "side_call"} & set(figures.values)


def test_a_hold_of_four_tokens_delays_the_first_of_them_by_three_gaps() -> None:
    figures = measured(Crossing(group=4, first_ns=400 * US))
    assert figures.token_delays_ns is not None
    gap, delay = 10 * MS, 400 * US
    assert figures.token_delays_ns.tolist() == [3 * gap + delay, 2 * gap + delay, gap + delay, delay] * 3
    assert value(figures, "token_hold_max") == 3 * gap + delay
    assert value(figures, "tokens_held") == 4
    assert (value(figures, "tokens_per_event_back"), value(figures, "tokens_per_event_front")) == (1, 4)
    assert value(figures, "first_token") == 3 * gap + delay


@pytest.mark.parametrize("uncertainty_ns", [0, MS])
@pytest.mark.parametrize("spread_ns", [None, 0, 50 * US])
def test_the_stages_of_a_guardrail_add_up_to_what_it_adds_to_the_first_token(
    uncertainty_ns: int, spread_ns: int | None
) -> None:
    """It checks the prompt for 40 ms, and blocks of 8 tokens, 20 ms apart, for 20 ms each."""
    figures = measured(
        Crossing(
            tokens=words(24),
            engine_gap_ns=20 * MS,
            request_ns=40 * MS,
            group=8,
            first_ns=20 * MS,
            delay_ns=20 * MS,
            spread_ns=spread_ns,
            uncertainty_ns=uncertainty_ns,
        )
    )
    stages = {name: value(figures, name) for name in ("request", "block_wait", "block_check")}
    assert stages == {"request": 40 * MS, "block_wait": 7 * 20 * MS, "block_check": 20 * MS}
    assert value(figures, "first_token") == stages["block_wait"] + stages["block_check"]
    assert value(figures, "ttft") == sum(stages.values()) + SEND_NS
    assert all(_width(figures.values[name][0]) <= 5 * MS for name in stages)


@pytest.mark.parametrize(("uncertainty_ns", "is_certain"), [(MS, True), (20 * MS, False)])
def test_events_that_a_late_read_can_have_merged_are_perhaps_no_block(
    uncertainty_ns: int, is_certain: bool
) -> None:
    figures = measured(Crossing(group=2, engine_gap_ns=20 * MS, uncertainty_ns=uncertainty_ns))
    (wait,) = figures.values["block_wait"]
    assert wait.value == 20 * MS
    assert (wait.low > 0) == is_certain


def test_tokens_of_a_fast_engine_are_no_block_if_each_is_delivered_at_once() -> None:
    figures = measured(Crossing(engine_gap_ns=500 * US, first_ns=300 * US, delay_ns=300 * US))
    assert (value(figures, "block_wait"), value(figures, "block_check")) == (0, 300 * US)


def test_a_clock_that_is_ahead_changes_no_figure_if_its_offset_is_stated() -> None:
    crossing = Crossing(back_clock_ns=-70 * MS)
    plain, moved = measured(Crossing()), measured(crossing, VantageOffset(-70 * MS, 2 * MS))
    for name in ("request", "ttft", "first_token", "token_hold_max"):
        assert value(moved, name) == value(plain, name)
    assert _width(moved.values["request"][0]) == _width(plain.values["request"][0]) + 2 * 2 * MS
    # TTFT is a difference of durations, in which the offset cancels out.
    assert _width(moved.values["ttft"][0]) == _width(plain.values["ttft"][0])


def _width(bounded: BoundedValue) -> float:
    return bounded.high - bounded.low


@given(st.integers(-50 * MS, 50 * MS), st.integers(0, 20 * MS), st.integers(0, 20 * MS))
def test_the_offset_that_the_traffic_allows_contains_the_true_one(
    offset_ns: int, request_ns: int, first_ns: int
) -> None:
    front, backs = Crossing(back_clock_ns=offset_ns, request_ns=request_ns, first_ns=first_ns).play(1)
    clock = offset_from_traffic([(front, backs[0])])
    assert clock is not None
    assert abs(clock.offset_ns - offset_ns) <= clock.uncertainty_ns
    assert clock.uncertainty_ns <= (request_ns + first_ns) // 2 + 1


@pytest.mark.parametrize(
    ("deliver", "relation", "equal_chars"),
    [
        (lambda tokens: tokens, TextRelation.EQUAL, None),
        (lambda tokens: tokens[:20], TextRelation.CUT, 96),
        (lambda tokens: [*tokens, " and more"], TextRelation.EXTENDED, None),
        (lambda tokens: [*tokens[:15], "[redacted] ", *tokens[16:]], TextRelation.CHANGED, 64),
        (lambda tokens: ["Sorry, but I will not say more about it."], TextRelation.CHANGED, 0),
        (lambda tokens: ["Sorry, "], TextRelation.UNKNOWN, 0),
    ],
)
def test_a_text_that_differs_is_known_by_its_place_and_lengths(
    deliver: Any, relation: TextRelation, equal_chars: int | None
) -> None:
    tokens = words(40)
    figures = measured(Crossing(tokens=tokens, deliver=deliver))
    assert figures.delivered_attempt is not None
    text = figures.delivered_attempt.text
    assert (figures.text, text.relation) == (relation, relation)
    sent, received = "".join(tokens), "".join(deliver(tokens))
    assert (text.back_chars, text.front_chars) == (len(sent), len(received))
    truly_equal = next(
        (i for i, (a, b) in enumerate(zip(sent, received, strict=False)) if a != b),
        min(len(sent), len(received)),
    )
    assert text.common_chars <= truly_equal < text.common_chars + 32 or text.common_chars == len(sent)
    if equal_chars is not None:
        assert text.common_chars == equal_chars


def test_only_the_text_that_is_equal_is_aligned() -> None:
    tokens = words(40)
    figures = measured(Crossing(tokens=tokens, deliver=lambda all: [*all[:15], "[redacted] ", *all[16:]]))
    assert figures.token_delays_ns is not None
    ends = [len("".join(tokens[: i + 1])) for i in range(40)]
    assert len(figures.token_delays_ns) == sum(end <= 64 for end in ends)


def test_the_end_of_an_answer_that_was_cut_is_counted_as_not_delivered() -> None:
    figures = measured(Crossing(tokens=words(40), deliver=lambda tokens: tokens[:25]))
    assert value(figures, "tokens_undelivered") == 15


def test_a_client_that_leaves_has_not_received_the_tokens_after_it() -> None:
    figures = measured(
        Crossing(tokens=words(40), deliver=lambda tokens: tokens[:30], front_outcome="client_cancelled")
    )
    assert value(figures, "tokens_undelivered") == 10


def test_retries_and_fallbacks_are_told_apart_and_cost_time_and_tokens() -> None:
    figures = measured(Crossing(failed=[Failed(), Failed(model="other", tokens=3, lasts_ns=20 * MS)]))
    assert [one.role for one in figures.attempts] == [Role.RETRY, Role.FALLBACK, Role.DELIVERED]
    assert value(figures, "retries") == (30 + 20) * MS
    assert value(figures, "tokens_undelivered") == 3
    assert value(figures, "request") == 8 * MS
    assert value(figures, "ttft") == 8 * MS + 50 * MS + SEND_NS + 5 * MS


def test_a_call_with_another_prompt_is_no_retry() -> None:
    ids = {"front_fields": ["X-Request-Id: r1"], "back_fields": ["X-Request-Id: r1"]}
    figures = measured(Crossing(side_prompt="is this safe?", **ids))
    assert [one.role for one in figures.attempts] == [Role.SIDE_CALL, Role.DELIVERED]
    assert value(figures, "side_call") == 15 * MS
    assert value(figures, "request") == (8 + 15) * MS
    assert "retries" not in figures.values and "tokens_undelivered" not in figures.values


def test_without_hashes_a_guardrail_that_is_asked_last_is_not_taken_for_the_answer() -> None:
    ids = {"front_fields": ["X-Request-Id: r1"], "back_fields": ["X-Request-Id: r1"]}
    front, (check, answer) = Crossing(side_prompt="is this safe?", **ids).play(1)
    check.timeline.arrival_ns = answer.timeline.arrival_ns + 1
    for x in (front, check, answer):
        x.text_blocks = None
    (pair,) = match([front], [check, answer], comparable=False).pairs
    assert [one.role for one in figures_of(pair).attempts] == [Role.DELIVERED, Role.SIDE_CALL]


def test_without_hashes_tokens_are_aligned_by_their_counts() -> None:
    front, backs = Crossing().play(1)
    for x in (front, *backs):
        x.text_blocks = None
        del x.timeline.events.chars[:]
    (pair,) = match([front], backs).pairs
    figures = figures_of(pair)
    assert figures.text is TextRelation.UNKNOWN
    assert figures.token_delays_ns is not None
    assert figures.token_delays_ns.tolist() == [5 * MS] + [400 * US] * 11


def test_without_hashes_a_changed_chunking_leaves_the_delays_of_tokens_unknown() -> None:
    front, backs = Crossing(group=4).play(1)
    for x in (front, *backs):
        x.text_blocks = None
        del x.timeline.events.chars[:]
    (pair,) = match([front], backs).pairs
    figures = figures_of(pair)
    assert figures.token_delays_ns is None
    assert value(figures, "tokens_per_event_front") == 4


@given(
    tokens=st.lists(st.text("ab é", min_size=1, max_size=9), min_size=1, max_size=30),
    group=st.integers(1, 7),
    delay_us=st.integers(0, 30_000),
    uncertainty_us=st.integers(0, 20_000),
    offset_ms=st.integers(-5, 5),
)
def test_the_range_of_each_figure_contains_the_truth(
    tokens: list[str], group: int, delay_us: int, uncertainty_us: int, offset_ms: int
) -> None:
    # The stated offset is wrong by at most its uncertainty.
    delay = delay_us * US
    crossing = Crossing(
        tokens=tokens, group=group, delay_ns=delay, first_ns=delay, uncertainty_ns=uncertainty_us * US
    )
    figures = measured(crossing, VantageOffset(offset_ms * MS, abs(offset_ms) * MS))
    assert figures.text is TextRelation.EQUAL
    (request,) = figures.values["request"]
    assert request.low <= 8 * MS <= request.high
    below, above = figures.token_range_ns
    assert figures.token_delays_ns is not None and len(figures.token_delays_ns) == len(tokens)
    for i, delay_ns in enumerate(figures.token_delays_ns.tolist()):
        last = min(i - i % group + group, len(tokens)) - 1
        assert delay_ns - below <= (last - i) * 10 * MS + delay <= delay_ns + above

"""Between the engine and the socket: no token lost, none before its time, whatever stages stand between; and
the writes are the same however late anybody asks for them."""

import random
from itertools import accumulate, islice, pairwise
from statistics import fmean, stdev

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmtap.sim.server.delivery import (
    BREAKS,
    Chunk,
    DeliveredText,
    Delivery,
    PlannedSource,
    Write,
    fixed_schedule,
)
from llmtap.sim.server.options import FaultKind, FaultOptions, GuardrailOptions, PacingOptions, SimOptions
from llmtap.units import NEVER, Duration

times = st.lists(st.integers(0, 50), min_size=1, max_size=30).map(lambda gaps: list(accumulate(gaps)))
options_of = st.builds(
    SimOptions,
    pacing=st.builds(
        PacingOptions,
        tokens_per_chunk=st.integers(1, 7),
        coalesce=st.integers(0, 60).map(Duration),
        keepalive=st.integers(0, 40).map(Duration),
    ),
    guardrails=st.builds(
        GuardrailOptions,
        input_filter=st.integers(0, 60).map(Duration),
        output_hold=st.one_of(st.integers(0, 9), st.just("all")),
        output_filter=st.integers(0, 9).map(Duration),
    ),
    faults=st.builds(FaultOptions, fault_after=st.integers(0, 40), stall=st.integers(0, 99).map(Duration)),
)


def writes(
    made: list[list[int]],
    options: SimOptions,
    fault: FaultKind | None = None,
    *,
    block_after: int | None = None,
    looks: list[int] | None = None,
) -> list[Write]:
    """All writes of choices whose tokens are made at these times. Without `looks` somebody asks at each
    moment at which something may be due, else at these only, and then at the end."""
    delivery = Delivery([DeliveredText(len(one), block_after) for one in made], options, fault)
    tokens = sorted((at, choice) for choice, one in enumerate(made) for at in one)
    found: list[Write] = []
    while True:
        if looks is None:
            now_ns = min(tokens[0][0] if tokens else NEVER, delivery.next_ns())
        else:
            now_ns = looks.pop(0) if looks else NEVER - 1
        while tokens and tokens[0][0] <= now_ns:
            at, choice = tokens.pop(0)
            delivery.on_token(choice, at)
        while (write := delivery.take(now_ns)) is not None:
            found.append(write)
        if delivery.all_taken:
            assert delivery.take(NEVER - 1) is None
            assert delivery.next_ns() == NEVER
            return found


def tokens_of(found: list[Write], choice: int) -> list[tuple[int, int]]:
    """(token, due) of all that was sent of a choice."""
    return [
        (token, write.due_ns)
        for write in found
        for chunk in write.chunks
        if chunk.choice == choice and not chunk.breaks_off
        for token in range(chunk.first, chunk.end)
    ]


@given(st.lists(times, min_size=1, max_size=3), options_of, st.sampled_from(["stall", "slow", None]))
def test_every_token_leaves_once_in_order_and_not_before_it_is_made(
    made: list[list[int]], options: SimOptions, fault: FaultKind | None
) -> None:
    found = writes(made, options, fault)
    assert all(b.due_ns >= a.due_ns for a, b in pairwise(found))
    for choice, one in enumerate(made):
        sent = tokens_of(found, choice)
        assert [token for token, _ in sent] == list(range(len(one)))
        assert all(due >= one[token] for token, due in sent)
        finals = [
            chunk for write in found for chunk in write.chunks if chunk.choice == choice and chunk.is_final
        ]
        assert [chunk.end for chunk in finals] == [len(one)]
    size = options.pacing.tokens_per_chunk
    assert all(chunk.end - chunk.first <= size for write in found for chunk in write.chunks)
    if every := options.pacing.keepalive:
        edges = [options.faults.slow if fault == "slow" else 0, *(write.due_ns for write in found)]
        assert all(b - a <= every for a, b in pairwise(edges))
    else:
        assert all(write.chunks for write in found)


@given(times, options_of, st.integers(0, 40))
def test_what_the_filter_blocks_is_never_sent(made: list[int], options: SimOptions, after: int) -> None:
    found = writes([made], options, block_after=after)
    sent = len(tokens_of(found, 0))
    hold = options.guardrails.output_hold
    size = len(made) if hold == "all" else max(1, hold)
    assert sent == (len(made) if after >= len(made) else after // size * size)
    assert found[-1].chunks[-1].is_final


@given(
    st.lists(times, min_size=1, max_size=3),
    options_of,
    st.sampled_from(["stall", "slow", None, *sorted(BREAKS)]),
    st.one_of(st.none(), st.integers(0, 40)),
    st.lists(st.integers(0, 900), max_size=8).map(sorted),
)
def test_how_late_anybody_asks_changes_nothing(
    made: list[list[int]],
    options: SimOptions,
    fault: FaultKind | None,
    block_after: int | None,
    looks: list[int],
) -> None:
    assert writes(made, options, fault, block_after=block_after, looks=looks) == writes(
        made, options, fault, block_after=block_after
    )


@given(st.lists(times, min_size=1, max_size=3), options_of, st.integers(0, 900))
def test_who_is_given_up_gets_what_was_let_go_and_breaks_off(
    made: list[list[int]], options: SimOptions, at_ns: int
) -> None:
    delivery = Delivery([DeliveredText(len(one) + 1) for one in made], options, None)
    for at, choice in sorted((at, choice) for choice, one in enumerate(made) for at in one if at <= at_ns):
        delivery.on_token(choice, at)
    delivery.give_up(at_ns)
    delivery.on_token(0, at_ns + 1)
    found = []
    while (write := delivery.take(NEVER - 1)) is not None:
        found.append(write)
    assert delivery.all_taken
    chunks = [chunk for write in found for chunk in write.chunks]
    assert [chunk.breaks_off for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
    assert all(b.due_ns >= a.due_ns for a, b in pairwise(found))
    assert found[-1].due_ns >= at_ns
    hold, size = options.guardrails.output_hold, options.pacing.tokens_per_chunk
    for choice, one in enumerate(made):
        by_then = sum(at <= at_ns for at in one)
        let_go = 0 if hold == "all" else by_then // max(1, hold) * max(1, hold)
        assert len(tokens_of(found, choice)) == let_go // size * size


def test_a_choice_of_a_batch_ends_when_the_batch_is_over() -> None:
    options = SimOptions(guardrails=GuardrailOptions(output_filter=Duration(3)))
    delivery = Delivery([DeliveredText(2, ends_separately=True)], options, None)
    delivery.on_token(0, 5)
    delivery.on_token(0, 6)
    assert [delivery.take(20), delivery.take(20), delivery.take(20)] == [
        Write(8, (Chunk(8, 0, 0, 1, False),)),
        Write(9, (Chunk(9, 0, 1, 2, False),)),
        None,
    ]
    assert not delivery.all_taken
    delivery.on_choice_end(0, 50)
    delivery.on_choice_end(0, 51)
    assert delivery.take(60) == Write(53, (Chunk(53, 0, 2, 2, True),))
    assert delivery.all_taken


@pytest.mark.parametrize(
    ("window", "expected"),
    [(0, [(1, 2), (2, 1), (9, 1), (10, 1)]), (1, [(2, 3), (10, 2)]), (20, [(10, 5)])],
)
def test_coalescing_collects_for_a_window_and_the_end_empties_it(
    window: int, expected: list[tuple[int, int]]
) -> None:
    options = SimOptions(pacing=PacingOptions(coalesce=Duration(window)))
    found = writes([[1, 1, 2, 9, 10]], options)
    assert [(write.due_ns, len(write.chunks)) for write in found] == expected


MS = 1_000_000


def due(options: SimOptions, seed: int, tokens: int) -> list[int]:
    return list(islice(fixed_schedule(options, random.Random(seed)), tokens))


def test_without_chance_it_is_ttft_and_then_itl() -> None:
    options = SimOptions(ttft=Duration(30 * MS), itl=Duration(5 * MS))
    assert due(options, 1, 4) == due(options, 2, 4) == [30 * MS, 35 * MS, 40 * MS, 45 * MS]


def test_spread_is_of_the_whole_answer_and_stays_within_its_share() -> None:
    options = SimOptions(ttft=Duration(100 * MS), itl=Duration(10 * MS), spread=0.3)
    for seed in range(200):
        first, *rest = due(options, seed, 5)
        assert 70 * MS <= first <= 130 * MS
        gaps = {b - a for a, b in pairwise([first, *rest])}
        assert len(gaps) == 1 and 7 * MS <= gaps.pop() <= 13 * MS
    assert due(options, 3, 5) == due(options, 3, 5) != due(options, 4, 5)


def test_jitter_is_lognormal_with_the_mean_of_the_gap() -> None:
    options = SimOptions(itl=Duration(10 * MS), pacing=PacingOptions(jitter=0.5))
    stamps = due(options, 5, 50_001)
    gaps = [b - a for a, b in pairwise(stamps)]
    assert stamps[0] == options.ttft, "the first token has no gap"
    assert all(gap > 0 for gap in gaps)
    assert abs(fmean(gaps) / (10 * MS) - 1) < 0.02
    # The coefficient of variation of a lognormal is sqrt(exp(sigma^2) - 1) = 0.533 for 0.5.
    assert abs(stdev(gaps) / fmean(gaps) - 0.533) < 0.02
    assert due(options, 5, 100) == stamps[:100]


def test_choices_are_told_of_in_the_order_of_their_tokens_and_no_further_than_asked() -> None:
    delivery = Delivery([DeliveredText(2), DeliveredText(0), DeliveredText(3)], SimOptions(), None, 1_000)
    delivery.take(1_000)  # of the choice of nothing
    made: list[list[int]] = [[], [], []]
    plans = [(iter([5, 20]), 2), (iter(()), 0), (iter([7, 9, 30, 40]), 3)]
    planned = PlannedSource(delivery, plans, made, 1_000, 100)
    assert planned.next_ns == 1_105
    planned.advance(1_109)
    assert (made, planned.next_ns) == ([[1_005], [], [1_007, 1_009]], 1_120)
    found = [delivery.take(1_109) for _ in range(3)]
    assert found == [
        Write(1_105, (Chunk(1_105, 0, 0, 1, False),)),
        Write(1_107, (Chunk(1_107, 2, 0, 1, False),)),
        Write(1_109, (Chunk(1_109, 2, 1, 2, False),)),
    ]
    planned.advance(2_000)
    assert (made[2], planned.next_ns) == ([1_007, 1_009, 1_030], NEVER)

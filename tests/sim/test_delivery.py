"""Between the engine and the socket: no token lost, none before its time, whatever stages stand between."""

from itertools import accumulate, count, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmtap.sim.delivery import BREAKS, Chunk, Said, Write, writes
from llmtap.sim.options import FaultOptions, GuardrailOptions, PacingOptions, SimOptions
from llmtap.units import Duration

times = st.lists(st.integers(0, 50), min_size=1, max_size=30).map(lambda gaps: list(accumulate(gaps)))
options_of = st.builds(
    SimOptions,
    pacing=st.builds(
        PacingOptions, tokens_per_chunk=st.integers(1, 7), coalesce=st.integers(0, 60).map(Duration),
        keepalive=st.integers(0, 40).map(Duration),
    ),
    guardrails=st.builds(
        GuardrailOptions, input_filter=st.integers(0, 60).map(Duration), input_beside=st.booleans(),
        output_hold=st.one_of(st.integers(0, 9), st.just("all")),
        output_filter=st.integers(0, 9).map(Duration),
    ),
    faults=st.builds(FaultOptions, fault_after=st.integers(0, 40), stall=st.integers(0, 99).map(Duration)),
)  # fmt: skip


def said_of(made: list[list[int]], block_after: int | None = None) -> list[Said]:
    return [Said(iter(one), len(one), block_after) for one in made]


def tokens_of(found: list[Write], choice: int) -> list[tuple[int, int]]:
    """(token, due) of all that was sent of a choice."""
    return [
        (token, write.due_ns)
        for write in found
        for chunk in write.chunks
        if chunk.choice == choice and not chunk.breaks
        for token in range(chunk.first, chunk.last)
    ]


@given(st.lists(times, min_size=1, max_size=3), options_of, st.sampled_from([None, "stall", "slow"]))
def test_every_token_leaves_once_in_order_and_not_before_it_is_made(
    made: list[list[int]], options: SimOptions, fault: str | None
) -> None:
    found = list(writes(said_of(made), options, fault))  # type: ignore[arg-type]
    assert all(b.due_ns >= a.due_ns for a, b in pairwise(found))
    for choice, one in enumerate(made):
        sent = tokens_of(found, choice)
        assert [token for token, _ in sent] == list(range(len(one)))
        assert all(due >= one[token] for token, due in sent)
        finals = [
            chunk for write in found for chunk in write.chunks if chunk.choice == choice and chunk.final
        ]
        assert [chunk.last for chunk in finals] == [len(one)]
    size = options.pacing.tokens_per_chunk
    assert all(chunk.last - chunk.first <= size for write in found for chunk in write.chunks)
    if every := options.pacing.keepalive:
        edges = [options.faults.slow if fault == "slow" else 0, *(write.due_ns for write in found)]
        assert all(b - a <= every for a, b in pairwise(edges))
    else:
        assert all(write.chunks for write in found)


@given(times, options_of, st.sampled_from(sorted(BREAKS)))
def test_a_break_comes_last_and_nothing_is_sent_from_the_token_on(
    made: list[int], options: SimOptions, fault: str
) -> None:
    found = list(writes(said_of([made]), options, fault))  # type: ignore[arg-type]
    chunks = [chunk for write in found for chunk in write.chunks]
    assert [chunk.breaks for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
    after = min(options.faults.fault_after, len(made) - 1)
    assert len(tokens_of(found, 0)) <= after
    assert chunks[-1].last > after >= chunks[-1].first


@given(times, options_of, st.integers(0, 40))
def test_what_the_filter_blocks_is_never_sent(made: list[int], options: SimOptions, after: int) -> None:
    found = list(writes(said_of([made], after), options, None))
    sent = len(tokens_of(found, 0))
    hold = options.guardrails.output_hold
    size = len(made) if hold == "all" else max(1, hold)
    assert sent == (len(made) if after >= len(made) else after // size * size)
    assert found[-1].chunks[-1].final


def test_an_answer_of_nothing_ends_when_the_filter_has_spoken() -> None:
    options = SimOptions(guardrails=GuardrailOptions(input_filter=Duration(7)))
    assert list(writes([Said(iter(()), 0)], options, None)) == [Write(7, (Chunk(7, 0, 0, 0, True),))]


def test_a_long_answer_is_read_no_further_than_it_is_sent() -> None:
    read: list[int] = []

    def made() -> "count[int]":
        for i in count():
            read.append(i)
            yield i

    going = writes([Said(made(), 100_000)], SimOptions(), None)
    for _ in range(5):
        next(going)
    assert len(read) <= 7


@pytest.mark.parametrize(
    ("window", "expected"),
    [(0, [(1, 2), (2, 1), (9, 1), (10, 1)]), (1, [(2, 3), (10, 2)]), (20, [(10, 5)])],
)
def test_coalescing_collects_for_a_window_and_the_end_empties_it(
    window: int, expected: list[tuple[int, int]]
) -> None:
    options = SimOptions(pacing=PacingOptions(coalesce=Duration(window)))
    found = writes(said_of([[1, 1, 2, 9, 10]]), options, None)
    assert [(write.due_ns, len(write.chunks)) for write in found] == expected

"""The fixed schedule: exact without chance, and with it the same for the same seed and of the right mean."""

import random
from itertools import count, islice, pairwise
from statistics import fmean, stdev

from llmtap.sim.server.delivery import (
    Chunk,
    DeliveredText,
    Delivery,
    FixedSchedule,
    PlannedSource,
    PlannedWork,
    Write,
)
from llmtap.sim.server.options import PacingOptions, SimOptions
from llmtap.units import NEVER, Duration

MS = 1_000_000


def due(options: SimOptions, seed: int, tokens: int) -> list[int]:
    plan = FixedSchedule().plan(PlannedWork(8, tokens, options), random.Random(seed))
    return list(islice(plan.due_ns, tokens))


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
        Write(1_105, (Chunk(1_105, 0, 0, 1, False),)), Write(1_107, (Chunk(1_107, 2, 0, 1, False),)),
        Write(1_109, (Chunk(1_109, 2, 1, 2, False),)),
    ]  # fmt: skip
    planned.advance(2_000)
    assert (made[2], planned.next_ns) == ([1_007, 1_009, 1_030], NEVER)


def test_a_long_answer_is_read_no_further_than_it_is_sent() -> None:
    read = count()
    planned = PlannedSource(
        Delivery([DeliveredText(100_000)], SimOptions(), None), [(read, 100_000)], [[]], 0, 0
    )
    planned.advance(5)
    assert next(read) == 7

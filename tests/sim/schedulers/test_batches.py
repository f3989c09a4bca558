"""Algorithms 1 and 2 of seed 004, a step at a time."""

from collections import deque

import pytest

from llmtap.sim.latency import SEED_MODEL
from llmtap.sim.model_options import read_model_options
from llmtap.sim.schedulers.batching import BatchFormer, BatchSize
from tests.support.flights import MODEL, workload

MS = 1_000_000


def size(*, limit: int = 128, **settings: str) -> BatchSize:
    return BatchSize(SEED_MODEL, read_model_options(settings), limit)


@pytest.mark.parametrize(
    ("settings", "limit", "low_high_next"),
    [
        # Too quick at tau 0: low = min(64, 124), and memory for 38,400 / 500 requests.
        ({}, 128, (64, 128, 76)),
        ({"lengths_start": "limit"}, 128, (64, 128, 96)),
        ({"b_start": "one", "lengths_start": "limit"}, 128, (1, 128, 64)),
        ({"b_start": "first-batch", "lengths_start": "limit"}, 128, (1, 128, 64)),
        # A tau of 5.7 ms is within 10 +- 5 ms, and not within 10 +- 1.
        ({"tau_start": "beta"}, 128, (62, 66, 64)),
        ({"tau_start": "beta", "eps": "1ms"}, 128, (64, 128, 76)),
        ({"tau_start": "beta", "band": "delta"}, 128, (63, 65, 64)),
        # Warm-up, and steps that wait for an update: the interval is where it was.
        ({"guards": "authors"}, 128, (1, 128, 64)),
        ({"sla_step": "update"}, 128, (1, 128, 64)),
        # A bin's limit is that of its batches; whether its controller knows it is a reading.
        ({}, 8, (64, 128, 8)),
        ({"controller_limit": "bin"}, 8, (4, 8, 6)),
    ],
)
def test_the_first_size(
    settings: dict[str, str], limit: int, low_high_next: tuple[float, float, int]
) -> None:
    one = size(limit=limit, **settings)
    found = one.next()
    assert (one.low, one.high, found) == low_high_next


@pytest.mark.parametrize(
    ("tau_ms", "b_avg", "low", "high", "then"),
    [
        # Case 1, too slow: high = max(b_avg, low + 4), low = max(low - 2, 1).
        (15.1, 30, 20, 60, (18, 30, 24)),
        (15.1, 10, 20, 60, (18, 24, 21)),
        (15.1, 30, 2, 60, (1, 30, 15)),
        # Case 2, too quick: low = min(b_avg, high - 4), high = min(high + 2, 128).
        (4.9, 30, 20, 60, (30, 62, 46)),
        (4.9, 59, 20, 60, (56, 62, 59)),
        (4.9, 30, 20, 127, (30, 128, 79)),
        # Case 3: around the average, which need not be whole.
        (15.0, 30.5, 20, 60, (28.5, 32.5, 30)),
        (5.0, 127, 20, 60, (125, 128, 126)),
        (10.0, 1.5, 20, 60, (1, 3.5, 2)),
    ],
)
def test_the_interval_moves_by_the_time_between_tokens(
    tau_ms: float, b_avg: float, low: float, high: float, then: tuple[float, float, int]
) -> None:
    one = size(lengths_start="limit")
    one.tau_ns, one.b_avg, one.low, one.high = tau_ms * MS, b_avg, low, high
    found = one.next()
    assert (one.low, one.high, found) == then


@pytest.mark.parametrize(
    ("tau_ms", "b_avg", "low", "high", "then"),
    [
        # high only shrinks, low only rises, and averages are cut to whole numbers.
        (15.1, 70.9, 20, 60, (18, 60)),
        (4.9, 10.9, 20, 60, (20, 62)),
        (4.9, 30.9, 20, 60, (30, 62)),
        (10.0, 30.9, 20, 60, (28, 32)),
    ],
)
def test_the_authors_guards(
    tau_ms: float, b_avg: float, low: float, high: float, then: tuple[float, float]
) -> None:
    one = size(guards="authors")
    for _ in range(3):
        one.saw(10 * MS, 8, 1, 1)
    one.tau_ns, one.b_avg, one.low, one.high = tau_ms * MS, b_avg, low, high
    one.next()
    assert (one.low, one.high) == then


def test_averages_move_by_a_fifth() -> None:
    one = size()
    one.saw(6.0 * MS, 14, 1_300, 700)
    assert (one.tau_ns, one.b_avg) == pytest.approx((1.2 * MS, 0.2 * 14 + 0.8 * 64))
    # 0.2 x 2,000 + 0.8 x 500 tokens are expected.
    assert one.by_memory() == int(38_400 / 800)


def test_the_first_batch_can_be_the_average() -> None:
    one = size(b_start="first-batch")
    one.saw(6.0 * MS, 14, 100, 100)
    assert one.b_avg == 14


def test_steps_by_update_are_taken_when_a_batch_is_done() -> None:
    one = size(sla_step="update")
    one.saw(6.0 * MS, 64, 100, 100)
    moved = one.low, one.high
    assert moved == (64, 128)
    assert {one.next() for _ in range(5)} == {int(38_400 / 440)}
    assert (one.low, one.high) == moved


def test_memory_is_never_less_than_one_and_never_more_than_the_limit() -> None:
    one = size(limit=50)
    for _ in range(100):
        one.saw(6.0 * MS, 1, 0, 0)
    assert one.by_memory() == 50
    for _ in range(100):
        one.saw(6.0 * MS, 1, 10**6, 0)
    assert (one.by_memory(), one.next()) == (1, 1)


def test_with_a_band_of_5_ms_sizes_can_only_fall_and_with_one_of_1_ms_they_rise() -> None:
    """Every step of the seed's model is within 10 +- 5 ms: case 3, a size that is the average or less."""
    wide, narrow = size(tau_start="beta"), size(tau_start="beta", eps="1ms")
    sizes: dict[BatchSize, list[int]] = {wide: [], narrow: []}
    for one, seen in sizes.items():
        for _ in range(200):
            seen.append(one.next())
            one.saw(SEED_MODEL.step_ns(seen[-1]), seen[-1], 100, 100)
        waiting = 3  # the queue runs nearly dry for a while, and fills again
        for _ in range(50):
            one.next()
            one.saw(SEED_MODEL.step_ns(waiting), waiting, 100, 100)
        for _ in range(200):
            seen.append(one.next())
            one.saw(SEED_MODEL.step_ns(seen[-1]), seen[-1], 100, 100)
    falling = sizes[wide]
    assert falling == sorted(falling, reverse=True)
    assert (falling[0], falling[-1]) == (64, 3)
    # low is never more than high - 4, so 128 is never reached.
    assert sizes[narrow][-1] == 126


@pytest.mark.parametrize(
    ("settings", "taken", "left"),
    [
        ({}, [0, 1, 2], [3]),
        # 7 GB are 37,333 tokens: the third does not fit, and goes back to where it was.
        ({"memory_check": "hard"}, [0, 1], [2, 3]),
        # One stays, however large.
        ({"memory_check": "hard", "memory_gb": "5.1"}, [0], [1, 2, 3]),
    ],
)
def test_a_formed_batch_can_be_cut_to_fit(
    settings: dict[str, str], taken: list[int], left: list[int]
) -> None:
    requests = workload([(0, 10_000, 5_000), (0, 20_000, 1_000), (0, 2_000, 0), (0, 1, 1)])
    queue = deque(range(4))
    batch = BatchFormer(requests, MODEL, read_model_options(settings)).take(queue, 3, 5)
    assert (batch.members, list(queue), batch.queue) == (taken, left, 5)


def test_a_batch_larger_than_any_that_a_controller_makes_still_has_its_time() -> None:
    requests = workload([(0, 10, 0)] * 200)
    batch = BatchFormer(requests, MODEL, read_model_options({"static_batch": "200"})).take(
        deque(range(200)), 200
    )
    assert batch.duration_ns == MODEL.batch_ns(200, 10)

"""Algorithms 1 and 2 of seed 004, a step at a time."""

from bisect import bisect_left
from collections import deque

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmtap.sim.model_options import SEED_MODEL, ModelOptions, read_model_options
from llmtap.sim.schedulers.batching import BatchFormer, BatchSize, Bins, batch_limits, equal_mass_bins
from tests.support.workloads.batch_runs import MODEL, Row, served, simulated, workload

MS = 1_000_000


def size(*, limit: int = 128, **settings: str) -> BatchSize:
    return BatchSize(SEED_MODEL, read_model_options(settings), limit)


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
    found = one.next_size()
    assert (one.low, one.high, found) == then


@pytest.mark.parametrize(
    ("tau_ms", "b_avg", "low", "high", "then"),
    [
        # alpha 8, delta 3 and B_MIN 5: high = max(b_avg, low + 8), low = max(low - 3, 5).
        (15.1, 10, 20, 60, (17, 28, 22)),
        (15.1, 30, 7, 60, (5, 30, 17)),
        # low = min(b_avg, high - 8), high = high + 3.
        (4.9, 59, 20, 60, (52, 63, 57)),
        # b_avg - 4 and b_avg + 4, but at least 5.
        (10.0, 30, 20, 60, (26, 34, 30)),
        (10.0, 6, 20, 60, (5, 10, 7)),
    ],
)
def test_the_steps_of_algorithm_2_are_options(
    tau_ms: float, b_avg: float, low: float, high: float, then: tuple[float, float, int]
) -> None:
    one = size(lengths_start="limit", alpha_step="8", delta_step="3", b_min="5")
    one.tau_ns, one.b_avg, one.low, one.high = tau_ms * MS, b_avg, low, high
    found = one.next_size()
    assert (one.low, one.high, found) == then


def test_the_constants_of_the_algorithms_are_those_of_the_seed() -> None:
    """004, 5.3: alpha 4, delta 2, EMA 0.2, rho 10 %; 7.1: B_MIN 1."""
    read = ModelOptions()
    assert (read.alpha_step, read.delta_step, read.alpha_ema, read.rho, read.b_min) == (4, 2, 0.2, 0.1, 1)


def test_the_weight_of_the_moving_averages_is_an_option() -> None:
    one = size(alpha_ema="0.5", b_start="one")
    one.learn(6.0 * MS, 9, 100, 50)
    assert (one.tau_ns, one.b_avg) == (3.0 * MS, 5)
    # (300 + 100) / 2 + (200 + 50) / 2 = 325 tokens; 8 GB less 10 % are 38,400.
    assert one.size_by_memory() == 38_400 // 325


def test_the_minimum_holds_where_the_limit_of_a_bin_allows_it() -> None:
    for limit, least in ((50, 5), (3, 3)):
        one = size(limit=limit, b_min="5")
        for _ in range(100):
            one.learn(60.0 * MS, 1, 10**6, 0)
        assert (one.size_by_memory(), one.next_size()) == (least, least)


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
        one.learn(10 * MS, 8, 1, 1)
    one.tau_ns, one.b_avg, one.low, one.high = tau_ms * MS, b_avg, low, high
    one.next_size()
    assert (one.low, one.high) == then


def test_the_first_batch_can_be_the_average() -> None:
    one = size(b_start="first-batch")
    one.learn(6.0 * MS, 14, 100, 100)
    assert one.b_avg == 14


def test_steps_by_update_are_taken_when_a_batch_is_done() -> None:
    one = size(sla_step="update")
    one.learn(6.0 * MS, 64, 100, 100)
    moved = one.low, one.high
    assert moved == (64, 128)
    assert {one.next_size() for _ in range(5)} == {int(38_400 / 440)}
    assert (one.low, one.high) == moved


def test_memory_is_never_less_than_one_and_never_more_than_the_limit() -> None:
    one = size(limit=50)
    for _ in range(100):
        one.learn(6.0 * MS, 1, 0, 0)
    assert one.size_by_memory() == 50
    for _ in range(100):
        one.learn(6.0 * MS, 1, 10**6, 0)
    assert (one.size_by_memory(), one.next_size()) == (1, 1)


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
    batch = BatchFormer(requests, MODEL, read_model_options(settings)).make_batch(queue, 3, 5)
    assert (batch.members, list(queue), batch.queue) == (taken, left, 5)


@pytest.mark.parametrize(
    ("lengths", "count", "edges"),
    [
        ([5, 7, 10, 20, 30, 50, 60, 80, 150, 200, 300, 400], 4, [5, 17, 55, 162]),
        ([1, 2, 3, 4], 1, [1]),
        ([9], 3, [9, 9, 9]),
        ([1, 1, 1, 1, 8], 4, [1, 1, 1, 1]),
        ([3, 1, 2], 2, [1, 2]),
        # The quantile is 10 + 1/3 x 10 to the last digit, which no double is: floored, 13.
        ([10, 20], 3, [10, 13, 16]),
    ],
)
def test_edges_are_floored_linear_quantiles(lengths: list[int], count: int, edges: list[int]) -> None:
    assert equal_mass_bins(lengths, count, ModelOptions()).edges == edges


@given(st.lists(st.integers(0, 300), min_size=1, max_size=200), st.integers(1, 12), st.integers(0, 400))
def test_a_bin_is_the_first_whose_span_has_the_length_as_the_seed_searches_it(
    lengths: list[int], count: int, length: int
) -> None:
    bins = equal_mass_bins(lengths, count, ModelOptions())
    spans = [(low, 10**9 if high is None else high) for low, high in bins.spans]
    wanted = next((i for i, (low, high) in enumerate(spans) if low <= length < high), count - 1)
    assert bins.find(length) == wanted
    assert bins.edges[0] == min(lengths)
    # Of each bin's mass: no more of the lengths lie below its edge than there should.
    ordered = sorted(lengths)
    assert all(
        bisect_left(ordered, edge) <= -(-(len(ordered) - 1) * i // count) for i, edge in enumerate(bins.edges)
    )


@pytest.mark.parametrize(
    ("setting", "limits"),
    [
        # The seed's own table of 8.2 has 83 and 8 for the last two.
        ("7gb", [128, 128, 128, 128, 128, 128, 83, 8]),
        ("8gb", [128, 128, 128, 128, 128, 128, 95, 9]),
        ("none", [128] * 8),
    ],
)
def test_long_bins_have_smaller_batches(setting: str, limits: list[int]) -> None:
    bins = Bins([1, 30, 42, 56, 80, 117, 167, 281])
    assert batch_limits(bins, read_model_options({"bin_limit": setting})) == limits


def test_a_bin_of_nothing_has_no_limit_of_its_own() -> None:
    assert batch_limits(Bins([0, 0]), ModelOptions())[0] == 128


FIFO_ROWS: list[Row] = [(0, 5, 5), (1, 10, 10), (1, 2, 3), (2, 20, 10), (100, 0, 0)]


@pytest.mark.parametrize(
    ("settings", "starts_ends_sizes"),
    [
        (
            # The first leaves alone and takes 1 + 10 x 0.1; then two by two, the longest decides.
            {"static_batch": "2"},
            [(0, 2, 1), (2, 5.5, 2), (2, 5.5, 2), (5.5, 9.5, 1), (100, 101, 1)],
        ),
        (
            # The request of the second 2 is there before the server is free.
            {"static_batch": "3"},
            [(0, 2, 1), (2, 7, 3), (2, 7, 3), (2, 7, 3), (100, 101, 1)],
        ),
        (
            # It is not: the server takes two, then it.
            {"static_batch": "3", "tie": "gpu-first"},
            [(0, 2, 1), (2, 5.5, 2), (2, 5.5, 2), (5.5, 9.5, 1), (100, 101, 1)],
        ),
        (
            # Two are waited for; the last one goes when no more will come.
            {"static_batch": "2", "partial": "wait"},
            [(1, 4.5, 2), (1, 4.5, 2), (4.5, 9.25, 2), (4.5, 9.25, 2), (100, 101, 1)],
        ),
        (
            # Only outputs count as length: 5, then 10 in a batch of three.
            {"static_batch": "3", "length": "output"},
            [(0, 1.5, 1), (1.5, 3.75, 2), (1.5, 3.75, 2), (3.75, 5.75, 1), (100, 101, 1)],
        ),
    ],
)
def test_the_oldest_are_served_so_many_at_a_time(
    settings: dict[str, str], starts_ends_sizes: list[tuple[float, float, int]]
) -> None:
    assert served(simulated("static_fifo", FIFO_ROWS, **settings)) == starts_ends_sizes


def test_more_servers_share_a_queue() -> None:
    result = simulated("static_fifo", FIFO_ROWS, servers=2, static_batch="2")
    # The second server takes the first that comes at 1 s; the other of that moment waits for the first.
    assert served(result) == [(0, 2, 1), (1, 4, 1), (2, 6.75, 2), (2, 6.75, 2), (100, 101, 1)]
    assert result.record.busy_ns == [7_750_000_000, 3_000_000_000]


ROWS: list[Row] = [(0, 5, 5), (0, 0, 20), (0, 0, 5), (0, 0, 30), (1, 0, 8)]
QUEUED: list[Row] = [
    (0, 0, 5),  # alone, until 1.5
    (0.5, 0, 6),
    (0.6, 0, 20),
    (0.7, 0, 25),
    (0.8, 0, 15),
]


def test_a_batch_is_of_one_bin_and_bins_take_turns() -> None:
    result = simulated("multi_bin_dynamic", ROWS, bin_edges="0,10", same_instant="all-first")
    # 1 + 10 x 0.125 for the two short ones, 1 + 30 x 0.125 for the long ones, then what came meanwhile.
    assert served(result) == [(0, 2.25, 2), (2.25, 7, 2), (0, 2.25, 2), (2.25, 7, 2), (7, 8.8, 1)]
    assert result.bins == [(0, 10), (10, None)]


@pytest.mark.parametrize(
    ("choice", "starts"),
    [
        # Bins from 0, 10 and 20: the turn is the second's, the longest queue the third, the oldest the first.
        ("round-robin", [0, 8.125, 4, 4, 1.5]),
        ("longest-queue", [0, 5.625, 1.5, 1.5, 7.225]),
        ("oldest-head", [0, 1.5, 3.1, 3.1, 7.225]),
    ],
)
def test_which_bin_is_next(choice: str, starts: list[float]) -> None:
    result = simulated("multi_bin_dynamic", QUEUED, bin_edges="0,10,20", bin_choice=choice)
    assert [start for start, _, _ in served(result)] == starts


@pytest.mark.parametrize(
    ("controllers", "sizes"), [("bin", [1, 5, 5, 5, 5, 5]), ("global", [1, 2, 2, 2, 2, 1])]
)
def test_one_controller_learns_from_all_bins(controllers: str, sizes: list[int]) -> None:
    """A batch of one short request makes the average of its controller 1; another one starts at 5."""
    rows: list[Row] = [(0, 0, 5), *[(0, 0, 30)] * 5]
    steady = {"token_sla": "160ms", "eps": "100ms", "tau_start": "beta", "alpha_ema": "1", "b_max": "9"}
    result = simulated(
        "multi_bin_dynamic",
        rows,
        bin_edges="0,10",
        same_instant="all-first",
        controllers=controllers,
        **steady,
    )
    assert [size for _, _, size in served(result)] == sizes


def test_a_bin_keeps_its_limit_under_one_controller() -> None:
    # The bin from 281 holds 8 requests of at most 4,096 output tokens (8.2); 65 are half of 1 to 128.
    rows: list[Row] = [(0, 0, 300)] * 20
    result = simulated(
        "multi_bin_dynamic", rows, bin_edges="1,281", same_instant="all-first", controllers="global"
    )
    assert max(size for _, _, size in served(result)) == 8

"""Against the standard library, and by hand."""

import random
import statistics

from tests.traces.formats import trace_stats


def test_counts_are_those_of_the_standard_library() -> None:
    rng = random.Random(5)
    values = [rng.randrange(10_000) for _ in range(999)]
    found = trace_stats.counts(values)
    cuts = statistics.quantiles(values, n=100, method="inclusive")
    assert found["mean"] == trace_stats.twelve_digits(statistics.fmean(values))
    assert found["std_pop"] == trace_stats.twelve_digits(statistics.pstdev(values))
    assert (found["p25"], found["p50"], found["p99"]) == tuple(
        trace_stats.twelve_digits(cuts[i - 1]) for i in (25, 50, 99)
    )


def test_arrivals_by_hand() -> None:
    found = trace_stats.arrivals([s * 10**9 // 2 for s in (0, 0, 4, 2)])
    assert found["span_s"] == 2.0
    assert found["out_of_order_rows"] == 1
    assert found["mean_rate_rps_(n-1)/span"] == 1.5
    assert found["zero_gap_fraction"] == 0.333333333333
    assert found["peak_1s_count"] == 2
    assert found["dispersion_index_1s_bins"] == 0.166666666667


def test_a_prefix_by_hand() -> None:
    found = trace_stats.prefix([[1, 2], [1, 3], [4, 2]], [1024, 600, 600], 512)
    assert found["blocks_unique"] == 4
    assert found["infinite_cache_prefix_block_hit_ratio"] == 0.166666666667
    assert found["infinite_cache_membership_block_ratio"] == 0.333333333333
    assert found["infinite_cache_prefix_token_hit_ratio"] == 0.230215827338

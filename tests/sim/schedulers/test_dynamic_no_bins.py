"""Worked by hand; the model is in tests/support/flights.py."""

import pytest

from tests.support.flights import Row, flown, served

ROWS: list[Row] = [(0, 5, 5)] * 6
"""Of length 10: batches of one to four take 2, 2.25, 2.333 and 2.375 s."""


@pytest.mark.parametrize(
    ("settings", "starts_ends_sizes"),
    [
        (
            # Within the band (0.1 s between tokens, 0.16 +- 0.1): as many as the average, (1 + 4) // 2.
            {"token_sla": "160ms", "eps": "100ms", "tau_start": "beta"},
            [*[(0, 2.25, 2)] * 2, *[(2.25, 4.5, 2)] * 2, *[(4.5, 6.75, 2)] * 2],
        ),
        (
            # Too quick: low = min(1, 4 - 4) = 0, high 4: 2. Then low = min(0.2 x 2 + 0.8 x 1, 0) = 0: 2.
            {"token_sla": "1s", "eps": "0s", "b_start": "one"},
            [*[(0, 2.25, 2)] * 2, *[(2.25, 4.5, 2)] * 2, *[(4.5, 6.75, 2)] * 2],
        ),
        (
            # Too slow: high = max(2, 1 + 4) = 5, low = 1: 3. Then the same from low 1, high 5: 3.
            {"token_sla": "1ms", "eps": "0s", "tau_start": "beta"},
            [*[(0, 2.333333333, 3)] * 3, *[(2.333333333, 4.666666666, 3)] * 3],
        ),
        (
            # The same, but no more than one is looked at.
            {"token_sla": "1ms", "eps": "0s", "tau_start": "beta", "candidates": "1"},
            [(2.0 * i, 2.0 * i + 2, 1) for i in range(6)],
        ),
    ],
)
def test_as_many_as_the_controller_says(
    settings: dict[str, str], starts_ends_sizes: list[tuple[float, float, int]]
) -> None:
    result = flown("dynamic_no_bins", ROWS, b_max="4", same_instant="all-first", **settings)
    assert served(result) == starts_ends_sizes


def test_memory_limits_a_batch_and_learns_from_the_last() -> None:
    # 0.9 x 4 GB / 0.0036 GB are 1,000 tokens: 2 of 500 to begin with. Then 0.2 x 10 + 0.8 x 500 are expected.
    settings = {"memory_gb": "8", "kv_gb_per_token": "0.0036", "same_instant": "all-first"}
    result = flown("dynamic_no_bins", ROWS, **settings)
    assert [n for _, _, n in served(result)] == [2, 2, 2, 2, 2, 2]
    result = flown("dynamic_no_bins", ROWS, lengths_start="limit", **settings)
    assert [n for _, _, n in served(result)] == [6] * 6
    long: list[Row] = [(0, 1_000, 1_000)] * 3
    result = flown("dynamic_no_bins", [*ROWS, *long], **settings)
    # After six short ones in three batches 258 tokens are expected, and three long ones do fit.
    assert [n for _, _, n in served(result)] == [2, 2, 2, 2, 3, 3, 3, 2, 2]

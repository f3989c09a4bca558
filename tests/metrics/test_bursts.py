"""What counts as events held back and let go together."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmtap.metrics.latency import (
    EVENTS_MIN,
    HOLD_NS,
    NO_BURSTS,
    SPREAD_NS,
    Bursts,
    bursts_of,
    tbc_max_ns,
    tbc_ns,
)

MS = 1_000_000


def bursts(times_ms: list[float]) -> Bursts:
    times = [round(t * MS) for t in times_ms]
    gaps = tbc_ns(times)
    return bursts_of(times, gaps, tbc_max_ns(gaps) or 0)


@pytest.mark.parametrize(
    ("times_ms", "expected"),
    [
        # A steady stream, and a slow but steady one.
        ([0, 10, 20, 30, 40], NO_BURSTS),
        ([0, 100, 200, 300, 400], NO_BURSTS),
        # Three in one read after a hold, once and twice.
        ([0, 10, 20, 30, 130, 130, 130, 140, 150], Bursts(1, 3, 100 * MS)),
        ([0, 0, 0, 80, 80, 80, 80, 300, 300, 300], Bursts(2, 7, 220 * MS)),
        # Only two together; three, but 1.1 ms apart; and just 1 ms apart.
        ([0, 10, 20, 30, 130, 130, 140, 150], NO_BURSTS),
        ([0, 10, 20, 30, 130, 130.5, 131.1, 140], NO_BURSTS),
        ([0, 10, 20, 30, 130, 130.5, 131, 140], Bursts(1, 3, 100 * MS)),
        # A hold just long enough, and just too short: by itself, and against the median of 12 ms.
        ([0, 1, 2, 3, 53, 53, 53], Bursts(1, 3, 50 * MS)),
        ([0, 1, 2, 3, 52.9, 52.9, 52.9], NO_BURSTS),
        ([0, 12, 24, 36, 48, 60, 120, 120, 120], Bursts(1, 3, 60 * MS)),
        ([0, 12, 24, 36, 48, 60, 119, 119, 119], NO_BURSTS),
        # All at once: no hold was seen.
        ([700] * 40, NO_BURSTS),
        ([], NO_BURSTS),
        ([5], NO_BURSTS),
    ],
)
def test_a_burst_is_events_together_after_a_hold(times_ms: list[float], expected: Bursts) -> None:
    assert bursts(times_ms) == expected


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

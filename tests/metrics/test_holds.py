"""Streams that their client held, by hand; times in ms."""

from array import array
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmtap.metrics.holds import delivered_times_ns, held_figures, server_gaps_ns
from llmtap.metrics.latency import measure
from tests.support.traffic.streams import streamed

MS = 1_000_000


@pytest.mark.parametrize(
    ("times", "holds", "delivered", "gaps"),
    [
        # The relay read again at 600, and found the third chunk: the server may have sent it at 140.
        ([100, 120, 601], [130, 600], [100, 120, 601], [20, 11]),
        # The kernel's stamps show that two chunks came during the pause.
        ([100, 140, 180, 620], [130, 600], [100, 600, 600, 620], [30, 0, 20]),
        # Two pauses in one gap, and one that begins before the first chunk.
        ([100, 300], [90, 110, 150, 170, 200, 240], [110, 300], [130]),
        # A pause after the last chunk changes nothing.
        ([100, 120], [130, 600], [100, 120], [20]),
        ([100, 120], [], [100, 120], [20]),
    ],
)
def test_chunks_as_delivered_and_gaps_of_the_server(
    times: list[int], holds: list[int], delivered: list[int], gaps: list[int]
) -> None:
    assert delivered_times_ns(times, holds) == delivered
    assert server_gaps_ns(times, holds) == gaps


def held(*times_ms: int, holds_ms: tuple[int, ...], paused_ms: int) -> dict[str, Any] | None:
    x = streamed(*times_ms)
    x.timeline.holds = array("q", [ms * MS for ms in holds_ms])
    x.timeline.paused_ns = paused_ms * MS
    return held_figures(x, measure(x))


def test_the_figures_stand_apart() -> None:
    assert held(100, 140, 180, 620, holds_ms=(130, 600), paused_ms=470) == {
        "pauses": 1,
        "tbc_max_delivered": 0.5,
        "tbc_max_server": 0.03,
        "tpot_delivered": pytest.approx(0.52 / 3),
        "tpot_server": pytest.approx(0.05 / 3),
    }


def test_a_stream_that_was_not_held_has_none_and_one_with_unknown_holds_no_figures() -> None:
    assert held(100, 140, holds_ms=(), paused_ms=0) is None
    for unknown in (
        held(100, 140, holds_ms=(), paused_ms=5),
        held(100, 140, holds_ms=(130, 140), paused_ms=11),
    ):
        assert unknown is not None
        assert [value for name, value in unknown.items() if name != "pauses"] == [None] * 4
    single = held(100, holds_ms=(130, 140), paused_ms=10)
    assert single is not None and single["tbc_max_server"] is None


_times = st.lists(st.integers(0, 1_000), min_size=2, max_size=30).map(sorted)
_holds = st.lists(st.integers(0, 1_000), max_size=20, unique=True).map(
    lambda ms: sorted(ms)[: len(ms) // 2 * 2]
)


@given(_times, _holds)
def test_the_server_is_never_slower_than_observed_and_delivery_never_faster(
    times: list[int], holds: list[int]
) -> None:
    gaps = server_gaps_ns(times, holds)
    assert all(0 <= gap <= b - a for gap, (a, b) in zip(gaps, pairwise(times), strict=True))
    free = [not any(b <= ms < e for b, e in zip(holds[::2], holds[1::2], strict=True)) for ms in range(1_001)]
    assert gaps == [sum(free[a:b]) for a, b in pairwise(times)], "counted millisecond by millisecond"
    delivered = delivered_times_ns(times, holds)
    assert delivered == sorted(delivered)
    assert all(a <= b for a, b in zip(times, delivered, strict=True))

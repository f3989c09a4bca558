"""The draft's Table 5, by hand: TTFT P50 and P99 in ms."""

from llmtap.metrics.saturation import (
    SaturationLevel,
    capacity,
    delivered_shares,
    heavy_tail,
    incomplete,
    knee,
    operating_point,
    peak,
    saturation_point,
    undelivered,
)

TABLE_5 = [
    SaturationLevel(2, 284, 95, 142),
    SaturationLevel(6, 852, 102, 178),
    SaturationLevel(10, 1420, 128, 267),
    SaturationLevel(14, 1988, 198, 512),
    SaturationLevel(18, 2534, 378, 1234, 0.998),
    SaturationLevel(22, 2712, 823, 3456, 0.941),
]


def test_the_knee_is_past_twice_the_smallest_p99() -> None:
    assert knee(TABLE_5) == 14  # 512 > 284, 267 is not
    assert knee(TABLE_5[:3]) is None


def test_saturation_is_the_first_fall_of_throughput_and_the_peak_is_another_thing() -> None:
    assert saturation_point(TABLE_5) is None
    assert peak(TABLE_5) == 22
    falling = [*TABLE_5, SaturationLevel(26, 2650, 900, 4000)]
    assert (saturation_point(falling), peak(falling)) == (26, 22)


def test_completion_by_requests_and_by_tokens() -> None:
    assert incomplete(TABLE_5) is None
    assert incomplete(TABLE_5, 0.95) == 22
    shares = delivered_shares(TABLE_5)
    assert shares[:4] == [1.0] * 4
    assert round(shares[5], 12) == 0.868117797695
    assert undelivered(TABLE_5) == 22


def test_a_tail_is_measured_against_a_lower_load() -> None:
    assert heavy_tail(TABLE_5) == 18  # 1,234 > 950
    assert heavy_tail(TABLE_5, of="previous") is None


def test_the_operating_point_is_the_best_level_that_meets_the_objectives() -> None:
    assert operating_point(TABLE_5, lambda level: level.p99 <= 500) == 10
    assert operating_point(TABLE_5, lambda level: level.p99 <= 1) is None


def test_capacity_is_the_highest_level_that_completes() -> None:
    # Table 7.
    table = [(8, 1.0), (16, 1.0), (32, 1.0), (64, 0.997), (128, 0.972)]
    assert capacity(table) == 64
    assert capacity(table, 0.9999) == 32
    assert capacity([]) is None


def test_no_levels_have_no_points() -> None:
    assert [rule([]) for rule in (knee, saturation_point, peak, incomplete, undelivered, heavy_tail)] == [
        None
    ] * 6
    assert delivered_shares([]) == []

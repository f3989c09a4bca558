"""The duration of loads follows from the measured ones: from the rate of the server by its concurrency."""

import pytest

from llmtap.bench.run.pace import (
    REPORT_DEFAULT_S,
    SLOTS_DEFAULT,
    ExpectedLoad,
    ExpectedLoads,
    MeasuredLoad,
    Pace,
    RequestKind,
    doublings,
    open_loops,
)

KIND = RequestKind("synthetic-uniform", 100)


def closed(slots: int, rate_rps: float, seconds: float = 100.0) -> MeasuredLoad:
    """A closed loop of `slots` that completed requests at this rate."""
    return MeasuredLoad(round(rate_rps * seconds), seconds, slots / rate_rps, 100)


def saturated() -> Pace:
    """A server of 10 requests/s and 8 at a time, whose loads take 3 s of preparation."""
    pace = Pace()
    for slots, rate in ((2, 2.5), (8, 10.0), (16, 10.0)):
        pace.add_load(KIND, closed(slots, rate), 103.0)
    return pace


def seconds(pace: Pace, *loads: ExpectedLoad, kind: RequestKind = KIND) -> float:
    """Return the estimated time of the loads, without their preparation and the report."""
    none = pace.seconds(kind, ExpectedLoads([], warmups=0))
    return pace.seconds(kind, ExpectedLoads([*loads], warmups=0)) - none - 3.0 * len(loads)


def test_nothing_is_known_before_the_first_load() -> None:
    pace = Pace()
    assert not pace.has_measured_load
    assert pace.capacity_rps(KIND) is pace.saturation_slots(KIND) is pace.rate_rps(KIND, 4) is None
    assert pace.seconds(KIND, ExpectedLoads([ExpectedLoad(seconds=60.0)])) == 60.0 + REPORT_DEFAULT_S
    pace.add_load(KIND, MeasuredLoad(0, 5.0, 0.0, None), 6.0)
    assert not pace.has_measured_load, "no request succeeded"


def test_warm_ups_preparations_and_the_report_are_as_measured() -> None:
    pace = saturated()
    pace.add_warmup(40.0)
    pace.add_warmup(50.0)
    pace.add_report(7.0)
    assert pace.seconds(KIND, ExpectedLoads([], warmups=2)) == 2 * 45 + 7
    load = ExpectedLoad(requests=80, slots=8)
    assert pace.seconds(KIND, ExpectedLoads([load, load], warmups=0)) == pytest.approx(2 * (8 + 3) + 7)


def test_a_closed_loop_takes_its_requests_at_the_rate_of_its_concurrency() -> None:
    pace = saturated()
    assert seconds(pace, ExpectedLoad(10, slots=1)) == pytest.approx(8)  # 0.8 s for each
    assert seconds(pace, ExpectedLoad(50, slots=4)) == pytest.approx(10)  # between 2 and 8 at a time
    assert seconds(pace, ExpectedLoad(1_000, slots=64)) == pytest.approx(100)
    # After the duration, the requests in flight are completed.
    assert seconds(pace, ExpectedLoad(seconds=60, slots=64)) == pytest.approx(60 + 6.4)


def test_an_open_loop_above_the_capacity_takes_as_long_as_the_server_needs() -> None:
    pace = saturated()
    assert seconds(pace, ExpectedLoad(seconds=60, rate_rps=5)) == pytest.approx(60 + 0.8)
    assert seconds(pace, ExpectedLoad(seconds=60, rate_rps=20)) == pytest.approx(120 + 0.8)
    assert seconds(pace, ExpectedLoad(200, share=0.5)) == pytest.approx(40 + 0.8)
    assert seconds(pace, ExpectedLoad(600, seconds=60, rate_rps=5)) == pytest.approx(120 + 0.8)
    assert open_loops(100, [0.5], None) == [ExpectedLoad(100, share=0.5)]
    assert open_loops(100, [0.5], 10.0) == [ExpectedLoad(100, share=0.5, rate_rps=5.0)]


def test_a_server_that_is_not_saturated_is_taken_as_proportional() -> None:
    pace = Pace()
    pace.add_load(KIND, closed(2, 2.5), 103.0)
    pace.add_load(KIND, closed(4, 5.0), 103.0)
    assert pace.capacity_rps(KIND) == pytest.approx(SLOTS_DEFAULT * 1.25)
    assert pace.rate_rps(KIND, 32) == pytest.approx(40)
    # Nothing shows that 30 requests/s are too many.
    assert seconds(pace, ExpectedLoad(seconds=60, rate_rps=30)) == pytest.approx(60.8)


def test_requests_of_another_length_are_estimated_by_their_tokens() -> None:
    pace = saturated()
    half = RequestKind("synthetic-uniform", 50)
    assert pace.capacity_rps(half) == pytest.approx(20)
    assert seconds(pace, ExpectedLoad(20, slots=1), kind=half) == pytest.approx(8)
    assert pace.saturation_slots(half) == pytest.approx(pace.saturation_slots(KIND) or 0)
    assert pace.capacity_rps(RequestKind("other", None)) == pytest.approx(10)


def test_a_load_that_an_earlier_command_measured_has_no_preparation() -> None:
    pace = Pace()
    pace.add_load(KIND, closed(8, 10.0), None)
    assert not pace.has_measured_load
    pace.add_load(KIND, closed(8, 10.0), 104.0)
    assert pace.has_measured_load


def test_a_search_replaces_its_loads_and_goes_before_the_others() -> None:
    expected = ExpectedLoads([ExpectedLoad(1, search="a"), ExpectedLoad(2), ExpectedLoad(3, search="b")])
    expected.replace_search("a", [ExpectedLoad(4), ExpectedLoad(5)])
    assert [load.requests for load in expected.loads] == [4, 5, 2, 3]
    expected.end_load()
    expected.replace_search("a", [])
    assert [load.requests for load in expected.loads] == [2, 3]


def test_a_search_for_the_capacity_doubles_until_half_of_it_saturates() -> None:
    assert doublings(8, 512, 8) == [8, 16]
    assert doublings(8, 512, 20) == [8, 16, 32, 64]
    assert doublings(8, 20, 20) == [8, 16, 20]
    assert doublings(8, 512, None) == [8, 16, 32]
    assert doublings(64, 512, 8) == [64]

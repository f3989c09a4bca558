from array import array

from llmtap.exchange.exchange import Exchange
from llmtap.metrics.objectives import Objectives
from llmtap.metrics.summary import Summary
from llmtap.sim.sweep.exchanges import ExchangeMaker, VirtualMeter
from llmtap.workload.requests import Requests

MS = 1_000_000
WINDOW = {"name": "all"}


def three() -> ExchangeMaker:
    columns = (array("q", [0, 10 * MS, 20 * MS]), *(array("q", [n] * 3) for n in (5, 4, 4)))
    return ExchangeMaker("x", Requests(*columns))


def test_it_sums_up_and_hands_on_what_is_over_in_the_order_of_ends() -> None:
    kept: list[Exchange] = []
    objectives = Objectives.parse("ttft:35ms")
    meter = VirtualMeter(three(), objectives=objectives, gap_max_ns=10 * MS, keep=kept.append)
    meter.ended(1, [40 * MS, 50 * MS], 50 * MS, served=True)
    meter.ended(2, (), 60 * MS, served=False)
    meter.ended(0, range(50 * MS, 90 * MS, 11 * MS), 90 * MS, served=True)
    assert [x.seq for x in kept] == [2, 3, 1]
    again = Summary(objectives)
    for x in kept:
        again.add(x)
    assert meter.summary.to_dict(WINDOW, 1.0) == again.to_dict(WINDOW, 1.0)
    goodput = meter.summary.goodput.total()
    assert (goodput.counted, goodput.met, dict(goodput.broken)) == (3, 1, {"ended": 1, "ttft": 1})


def test_slow_is_who_had_any_gap_above_the_bound() -> None:
    meter = VirtualMeter(three(), gap_max_ns=10 * MS)
    meter.ended(0, [100 * MS], 100 * MS, served=True)  # one token has no gap, however late
    meter.ended(1, [100 * MS, 110 * MS, 120 * MS], 500 * MS, served=True)
    assert meter.slow == 0
    meter.ended(2, [100 * MS, 110 * MS, 120 * MS + 1, 121 * MS], 121 * MS, served=False)
    assert meter.slow == 1

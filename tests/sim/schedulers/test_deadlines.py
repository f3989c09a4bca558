"""The first token is to be there in time, and each of the others in time after the one before."""

from llmtap.sim.schedulers.roster import Deadlines


def test_a_token_is_late_after_its_bound_and_not_at_it() -> None:
    deadlines = Deadlines(ttft_ns=100, tbt_ns=10)
    deadlines.arrived(5, 0)
    assert deadlines.missed(105) == []
    assert deadlines.missed(106) == [0]
    deadlines.made(105, [0])
    assert deadlines.missed(115) == []
    assert deadlines.missed(116) == [0]
    deadlines.made(115, [0])
    assert deadlines.missed(125) == []


def test_who_was_late_once_is_late() -> None:
    deadlines = Deadlines(ttft_ns=100, tbt_ns=10)
    deadlines.arrived(0, 1)
    deadlines.arrived(0, 0)
    deadlines.arrived(0, 2)
    deadlines.made(90, [2])
    deadlines.made(101, [1, 2])
    assert deadlines.missed(101) == [1, 0, 2]
    deadlines.over(0)
    deadlines.over(2)
    assert deadlines.missed(101) == [1]
    deadlines.over(1)
    assert deadlines.missed(10**9) == []


def test_a_token_that_leaves_later_is_waited_for_until_then() -> None:
    deadlines = Deadlines(ttft_ns=100, tbt_ns=10)
    deadlines.arrived(0, 0)
    deadlines.made(50, [0])
    deadlines.delayed({0: 80, 7: 80})
    assert deadlines.missed(90) == []
    assert deadlines.missed(91) == [0]

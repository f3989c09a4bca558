"""Nothing is lost and nothing counted twice; in flight is what one gets who looks at every moment."""

from hypothesis import given
from hypothesis import strategies as st

from llmtap.load.replay.result import PERIODS_MAX, timeline_of
from llmtap.units import NS_PER_S

S = NS_PER_S
BEGAN_NS = 7 * S


def test_three_requests_of_two_seconds() -> None:
    sent = [BEGAN_NS + t * S // 10 for t in (1, 9, 12)]
    ended = [BEGAN_NS + t * S // 10 for t in (11, 15, 23)]
    told = timeline_of(
        sent, ended, began_ns=BEGAN_NS, until_ns=BEGAN_NS + 24 * S // 10, planned_ns=[0, S // 2, S]
    )
    assert told == {
        "period": 1.0, "t": [0, 1, 2], "asked": [2, 1, 0], "sent": [2, 1, 0], "ended": [0, 2, 1],
        "in_flight": [2, 2, 1],
    }  # fmt: skip


def test_what_is_not_known_is_null() -> None:
    told = timeline_of([BEGAN_NS], None, began_ns=BEGAN_NS, until_ns=BEGAN_NS)
    assert told == {
        "period": 1.0, "t": [0], "asked": None, "sent": [1], "ended": None, "in_flight": None,
    }  # fmt: skip


def test_what_was_planned_behind_the_end_was_not_asked() -> None:
    planned = [0, S // 2, 3 * S // 2, 9 * S]
    told = timeline_of([], [], began_ns=BEGAN_NS, until_ns=BEGAN_NS + 2 * S, planned_ns=planned)
    assert told["asked"] == [2, 1]
    # The last of a plan is due at its end, and a run has no end before that.
    told = timeline_of([], [], began_ns=BEGAN_NS, until_ns=BEGAN_NS + 2 * S, planned_ns=[0, 2 * S])
    assert told["asked"] == [1, 1]


def test_a_long_run_has_longer_periods() -> None:
    hours = 12 * 3_600
    sent = [BEGAN_NS + s * S for s in range(0, hours, 100)]
    told = timeline_of(sent, sent, began_ns=BEGAN_NS, until_ns=BEGAN_NS + hours * S)
    assert told["period"] == 5
    assert len(told["t"]) == len(told["sent"]) <= PERIODS_MAX
    assert told["t"][-1] == hours - 5
    assert sum(told["sent"]) == len(sent)


@given(
    st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40)), max_size=30),
    st.integers(0, 80),
)
def test_as_if_looked_at_every_moment(requests: list[tuple[int, int]], more: int) -> None:
    """A request is in flight from its sending to its end, both included."""
    tenth = S // 10
    sent = [BEGAN_NS + at * tenth for at, _ in requests]
    ended = [BEGAN_NS + (at + lasts) * tenth for at, lasts in requests]
    until_ns = max([*ended, BEGAN_NS]) + more * tenth
    told = timeline_of(sent, ended, began_ns=BEGAN_NS, until_ns=until_ns)
    assert sum(told["sent"]) == sum(told["ended"]) == len(requests)
    periods = len(told["t"])
    for period in range(periods):
        last = period == periods - 1
        ticks = range(period * 10, 10**3 if last else period * 10 + 10)
        flying = [
            sum(s <= BEGAN_NS + k * tenth <= e for s, e in zip(sent, ended, strict=True)) for k in ticks
        ]
        assert told["in_flight"][period] == max(flying)

"""Merging is adding; and corrected - uncorrected = submit - scheduled, for every latency from submit."""

from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmtap.exchange.exchange import Exchange
from llmtap.exchange.outcome import Outcome
from llmtap.load.tally import CORRECTED, LoadTally
from tests.support.traffic.streams import MS, streamed


def shifted(x: Exchange, submit_ms: int, late_ms: int, dispatch_late_ms: int | None = None) -> Exchange:
    """An exchange submitted at `submit_ms`, `late_ms` after it was scheduled."""
    t, ns = x.timeline, submit_ms * MS
    for name in ("first_byte_ns", "first_token_ns", "first_content_ns", "last_token_ns", "response_end_ns"):
        value = getattr(t, name)
        if value is not None:
            setattr(t, name, value + ns)
    t.events.t_ns = array("q", [stamp + ns for stamp in t.events.t_ns])
    t.submit_ns = ns
    x.scheduled_ns = ns - late_ms * MS
    dispatch_late_ns = (late_ms if dispatch_late_ms is None else dispatch_late_ms) * MS
    x.dispatch_late_ns = dispatch_late_ns
    t.arrival_ns = x.scheduled_ns + dispatch_late_ns
    return x


def told(*exchanges: Exchange) -> LoadTally:
    tally = LoadTally()
    for x in exchanges:
        tally.add(x)
    return tally


streams = st.builds(
    lambda first, gaps, outcome, submit, late: shifted(
        streamed(*[first + sum(gaps[:i]) for i in range(len(gaps) + 1)], outcome=outcome), submit, late
    ),
    st.integers(1, 500),
    st.lists(st.integers(0, 300), max_size=5),
    st.sampled_from([Outcome.COMPLETE, Outcome.REFUSED, Outcome.TRUNCATED, Outcome.UPSTREAM_TIMEOUT]),
    st.integers(0, 10_000),
    st.integers(0, 5_000),
)


@given(st.lists(streams, min_size=1, max_size=6))
def test_theory(xs: list[Exchange]) -> None:
    """A latency L counts from submit S. From the schedule P it is L + (S - P): nothing else changes. So over
    any set the sums differ by the sum of S - P, of those that have this latency."""
    tally = told(*xs)
    for name in CORRECTED:
        plain, corrected = tally.summary.histogram(name), tally.corrected[name]
        assert corrected.n == plain.n
        if plain.n:
            late_ns = sum(
                (x.timeline.submit_ns or 0) - (x.scheduled_ns or 0)
                for x in xs
                if name != "e2e" or x.outcome in (Outcome.COMPLETE, Outcome.REFUSED)
            )
            assert (corrected.mean - plain.mean) * plain.n == pytest.approx(late_ns, abs=1_000)


@given(st.lists(st.tuples(streams, st.integers(0, 2)), max_size=8))
def test_what_three_counted_is_what_one_would_have(dealt: list[tuple[Exchange, int]]) -> None:
    whole, parts = LoadTally(), [LoadTally(), LoadTally(), LoadTally()]
    for x, hand in dealt:
        whole.add(x)
        parts[hand].add(x)
    for i, part in enumerate(parts):
        part.planned, part.dropped, part.summary.opened = 10 * i + 5, i, i
        part.retries.update({"429": i, "closed": 1})
    merged = LoadTally()
    for part in parts:
        merged.merge_bytes(part.to_bytes())
    assert merged.summary.to_dict({}, 1)["metrics"] == whole.summary.to_dict({}, 1)["metrics"]
    assert merged.summary.to_dict({}, 1)["outcomes"] == whole.summary.to_dict({}, 1)["outcomes"]
    assert merged.corrected_dict() == whole.corrected_dict()
    assert merged.lateness.percentiles((0, 0.5, 1)) == whole.lateness.percentiles((0, 0.5, 1))
    assert sorted(merged.sent_ns) == sorted(whole.sent_ns)
    plan = merged.plan_dict()
    counts = tuple(plan[name] for name in ("planned", "sent", "dropped", "unsent"))
    assert counts == (45, 3, 3, 39)
    assert plan["retries"] == {"n": 6, "reasons": {"429": 3, "closed": 3}}


def test_a_closed_loop_corrects_nothing_and_what_was_never_submitted_has_no_latency() -> None:
    tally = told(streamed(100, 120))
    assert (tally.corrected_dict(), tally.plan_dict()["lateness"], tally.summary.n) == (None, None, 1)
    x = streamed(100)
    x.timeline.submit_ns = None
    x.scheduled_ns, x.dispatch_late_ns = 0, 5 * MS
    x.outcome = Outcome.UPSTREAM_ERROR
    tally = told(x)
    assert tally.lateness.n == 1
    assert all(not histogram.n for histogram in tally.corrected.values())


def test_what_was_sent_again_was_sent_and_late_when_it_left_first() -> None:
    """Two seconds later: what it waited for is in what counts from the schedule."""
    x = shifted(streamed(100, 120), submit_ms=2_030, late_ms=2_030, dispatch_late_ms=30)
    assert x.scheduled_ns == 0
    x.timeline.arrival_ns = 2_029 * MS
    tally = told(x)
    assert list(tally.sent_ns) == [30 * MS]
    assert tally.lateness.max == 30 * MS
    assert tally.summary.histogram("ttft").max == 100 * MS
    assert tally.corrected["ttft"].max == 2_130 * MS

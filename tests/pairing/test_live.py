"""Pairs found while exchanges end are those of a capture of the same traffic."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import pytest

from llmtap.exchange.exchange import Exchange
from llmtap.pairing import live as live_module
from llmtap.pairing import matching
from llmtap.pairing.live import SLACK_NS, Leftover, LiveMatcher, OpenExchange, Unpaired, open_exchange
from llmtap.pairing.matching import Evidence, Pair, end_ns, match
from tests.support.traffic.gateway import MS, Crossing, Failed, played, traffic, words

TICK_NS = 250 * MS


@dataclass(slots=True)
class Decisions:
    pairs: list[Pair] = field(default_factory=list)
    left: dict[str, Leftover] = field(default_factory=dict)
    decided_ns: dict[str, int] = field(default_factory=dict)

    def take(self, decided: Iterable[Pair | Unpaired | None], now_ns: int) -> None:
        for one in filter(None, decided):
            if isinstance(one, Pair):
                self.pairs.append(one)
                self.decided_ns[one.front.id] = now_ns
            else:
                assert one.exchange.id not in self.left
                self.left[one.exchange.id] = one.reason
                self.decided_ns[one.exchange.id] = now_ns

    @property
    def owners(self) -> dict[str, tuple[str, tuple[Evidence, ...]]]:
        return {one.back.id: (pair.front.id, one.evidence) for pair in self.pairs for one in pair.matches}


def live(
    fronts: Sequence[Exchange], backs: Sequence[Exchange], exchanges_max: int = 10_000
) -> tuple[Decisions, LiveMatcher]:
    """Play the exchanges to a matcher in the order of their ends, with a report every TICK_NS."""
    matcher, decisions = LiveMatcher(exchanges_max), Decisions()
    sides = ((fronts, matcher.add_front), (backs, matcher.add_back))
    ended = sorted(((end_ns(x), x.id, add, x) for xs, add in sides for x in xs), key=lambda one: one[:2])
    now_ns = min(x.timeline.arrival_ns for x in fronts)
    while ended:
        while ended and ended[0][0] <= now_ns:
            _, _, add, x = ended.pop(0)
            add(x)
        open_now = [_under_way(xs, now_ns) for xs, _ in sides]
        decisions.take(matcher.advance(now_ns, *open_now), now_ns)
        now_ns += TICK_NS
    decisions.take(matcher.close(), now_ns)
    return decisions, matcher


def _under_way(xs: Sequence[Exchange], now_ns: int) -> list[OpenExchange]:
    return [open_exchange(x, x.shape) for x in xs if x.timeline.arrival_ns <= now_ns < end_ns(x)]


def assert_as_in_a_capture(
    decisions: Decisions, fronts: Sequence[Exchange], backs: Sequence[Exchange]
) -> None:
    result = match(fronts, backs)
    assert decisions.owners == {
        one.back.id: (pair.front.id, one.evidence) for pair in result.pairs for one in pair.matches
    }
    expected = {x.id: Leftover.UNPAIRED for x in (*result.unpaired_front, *result.unpaired_back)}
    expected |= {x.id: Leftover.AMBIGUOUS for x in (*result.ambiguous_front, *result.ambiguous_back)}
    assert decisions.left == expected


@pytest.mark.parametrize("seed", range(4))
def test_200_streams_give_the_same_pairs_as_their_capture(seed: int) -> None:
    fronts, backs, truth = played(*traffic(600, seed=seed, faults=seed % 2 == 0))
    decisions, matcher = live(fronts, backs)
    assert_as_in_a_capture(decisions, fronts, backs)
    assert all(truth[back] == front for back, (front, _) in decisions.owners.items())
    assert len(decisions.owners) >= 0.98 * len(backs)
    assert not len(matcher)


def test_prompts_that_the_gateway_changes_are_paired_by_text_as_in_a_capture() -> None:
    fronts, backs, truth = played(*traffic(300, seed=5))
    for i, back in enumerate(backs):
        assert back.shape is not None
        back.shape.blocks[-1] = i
    decisions, _ = live(fronts, backs)
    assert_as_in_a_capture(decisions, fronts, backs)
    assert {evidence[0] for _, evidence in decisions.owners.values()} == {Evidence.TEXT}
    assert all(truth[back] == front for back, (front, _) in decisions.owners.items())


def test_a_pair_by_its_id_does_not_wait_for_other_streams() -> None:
    name = ["X-Request-Id: mine"]
    short = Crossing(at_ns=2_000 * MS, front_fields=name, back_fields=name)
    fronts, backs, _ = played(short, Crossing(prompt="long", tokens=words(2_000)))
    decisions, _ = live(fronts, backs)
    assert_as_in_a_capture(decisions, fronts, backs)
    assert end_ns(fronts[1]) - end_ns(fronts[0]) > 10_000 * MS
    assert decisions.decided_ns[fronts[0].id] <= end_ns(fronts[0]) + SLACK_NS + TICK_NS


def test_a_front_waits_for_an_attempt_that_lasts_longer() -> None:
    fronts, backs, _ = played(Crossing(failed=[Failed(tokens=3, lasts_ns=5 * MS)]))
    late = Crossing(at_ns=1_010 * MS, tokens=words(600)).play(2)[1]  # the same prompt, six seconds
    decisions, _ = live(fronts, [*backs, *late])
    assert_as_in_a_capture(decisions, fronts, [*backs, *late])
    assert len(decisions.pairs[0].matches) == 3
    assert decisions.decided_ns[fronts[0].id] >= end_ns(late[0])


def test_what_waits_is_bounded_and_what_is_left_out_is_counted() -> None:
    fronts, _, _ = played(*(Crossing(prompt=f"question {i}") for i in range(300)))
    matcher, decisions = LiveMatcher(100), Decisions()
    for front in fronts:
        matcher.add_front(front)
        assert len(matcher) <= 100
    decisions.take(matcher.close(), 0)
    reasons = list(decisions.left.values())
    assert (reasons.count(Leftover.LEFT_OUT), reasons.count(Leftover.UNPAIRED)) == (200, 100)
    assert not len(matcher)


def test_an_exchange_with_uncertain_times_is_left_out() -> None:
    fronts, backs, _ = played(Crossing(uncertainty_ns=2 * SLACK_NS))
    decisions, _ = live(fronts, backs)
    assert set(decisions.left.values()) == {Leftover.LEFT_OUT}


class Count:
    """Number of calls of a function of `matching.py`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
        self.calls, self._function = 0, getattr(matching, name)
        for module in (matching, live_module):
            if hasattr(module, name):
                monkeypatch.setattr(module, name, self._call)

    def _call(self, *args: Any) -> Any:
        self.calls += 1
        return self._function(*args)


def probes(n: int, *, named: bool) -> tuple[list[Exchange], list[Exchange]]:
    """The same prompt and the same answer, `n` times at once; `named`: each with its own request id."""
    names = [[f"X-Request-Id: {i}"] if named else [] for i in range(n)]
    crossings = (
        Crossing(at_ns=1_000 * MS + i, front_fields=one, back_fields=one) for i, one in enumerate(names)
    )
    return played(*crossings)[:2]


def test_equal_prompts_with_ids_are_not_compared_with_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    n = 60
    fronts, backs = probes(n, named=True)
    ends = Count(monkeypatch, "end_ns")
    decisions, _ = live(fronts, backs)
    assert ends.calls < 60 * n
    assert_as_in_a_capture(decisions, fronts, backs)
    assert len(decisions.pairs) == n


def test_of_equal_prompts_and_answers_two_that_fit_suffice(monkeypatch: pytest.MonkeyPatch) -> None:
    n = 60
    fronts, backs = probes(n, named=False)
    alignments = Count(monkeypatch, "align")
    decisions, _ = live(fronts, backs)
    assert 0 < alignments.calls <= 4 * n
    assert_as_in_a_capture(decisions, fronts, backs)
    assert set(decisions.left.values()) == {Leftover.AMBIGUOUS}


def test_a_failed_search_affects_one_exchange_and_is_no_longer_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fronts, backs, _ = played(*(Crossing(prompt=f"question {i}") for i in range(3)))

    def narrow(finder: matching.Finder, candidates: list[Exchange], back: Exchange, kind: Evidence) -> Any:
        if back is backs[1]:
            raise ValueError("a bug")
        return candidates, (kind,)

    monkeypatch.setattr(matching.Finder, "_exclude_candidates", narrow)
    decisions, matcher = live(fronts, backs)
    assert decisions.left == {backs[1].id: Leftover.LEFT_OUT, fronts[1].id: Leftover.UNPAIRED}
    assert len(decisions.pairs) == 2
    assert not len(matcher)


def test_what_was_left_out_is_yielded_once_also_after_an_interruption() -> None:
    fronts, _, _ = played(*(Crossing(prompt=f"question {i}") for i in range(103)))
    matcher = LiveMatcher(100)
    for front in fronts:
        matcher.add_front(front)
    first = next(matcher.advance(0, (), ()))
    assert [first, *matcher.take_left_out()] == [Unpaired(x, Leftover.LEFT_OUT) for x in fronts[:3]]


def test_exchanges_may_be_added_and_left_out_between_two_steps() -> None:
    fronts, backs, _ = played(*(Crossing(prompt=f"question {i}") for i in range(240)))
    matcher, decisions = LiveMatcher(100), Decisions()
    for front, back in zip(fronts[:50], backs[:50], strict=True):
        matcher.add_front(front)
        matcher.add_back(back)
    more = iter([*fronts[50:], *backs[50:]])
    for one in matcher.advance(max(map(end_ns, fronts)) + SLACK_NS, (), ()):
        decisions.take([one], 0)
        for x in islice(more, 3):
            (matcher.add_front if x.id.startswith("front") else matcher.add_back)(x)
        assert len(matcher) <= 100
    decisions.take(matcher.close(), 0)
    decided = [x.id for pair in decisions.pairs for x in (pair.front, *pair.backs)] + list(decisions.left)
    rest = {x.id for x in more}
    assert sorted(decided) == sorted({x.id for x in (*fronts, *backs)} - rest)
    assert not len(matcher)

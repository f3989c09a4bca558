"""Pairs found while exchanges end are those of a capture of the same traffic."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import pytest

from llmtap.exchange.exchange import Exchange
from llmtap.pairing.live import SLACK_NS, Leftover, LiveMatcher, OpenExchange, Unpaired, open_exchange
from llmtap.pairing.matching import Evidence, Pair, end_ns, match
from tests.support.traffic.gateway import MS, Crossing, Failed, played, traffic, words

TICK_NS = 250 * MS


@dataclass(slots=True)
class Decisions:
    pairs: list[Pair] = field(default_factory=list)
    left: dict[str, Leftover] = field(default_factory=dict)
    decided_ns: dict[str, int] = field(default_factory=dict)

    def take(self, decided: Iterable[Pair | Unpaired], now_ns: int) -> None:
        for one in decided:
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
    matching = match(fronts, backs)
    assert decisions.owners == {
        one.back.id: (pair.front.id, one.evidence) for pair in matching.pairs for one in pair.matches
    }
    expected = {x.id: Leftover.UNPAIRED for x in (*matching.unpaired_front, *matching.unpaired_back)}
    expected |= {x.id: Leftover.AMBIGUOUS for x in (*matching.ambiguous_front, *matching.ambiguous_back)}
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

"""Which exchanges belong together: all that can be known, and nothing that is guessed."""

from llmtap.pairing.clock import VantageOffset
from llmtap.pairing.matching import Evidence, Matching, match
from llmtap.pairing.summary import summarise
from tests.support.traffic.gateway import MS, Crossing, Failed, played, traffic, words


def found(matching: Matching) -> dict[str, str]:
    return {one.back.id: pair.front.id for pair in matching.pairs for one in pair.matches}


def evidence(matching: Matching) -> list[tuple[Evidence, ...]]:
    return [one.evidence for pair in matching.pairs for one in pair.matches]


def test_every_exchange_is_in_one_list() -> None:
    fronts, backs, _ = played(Crossing(prompt="a"), Crossing(prompt="b"), Crossing(prompt="b"))
    matching = match(fronts, [*backs[:2], Crossing(prompt="elsewhere").play(9)[1][0]])
    counts = summarise(matching, VantageOffset()).counts
    assert (counts.front, counts.back) == (3, 3)
    assert (counts.pairs, counts.unpaired_back) == (1, 1)


def test_an_id_that_both_carry_needs_no_hash() -> None:
    ids = [f"X-Request-Id: r{i}" for i in range(3)]
    fronts, backs, truth = played(*(Crossing(front_fields=[one], back_fields=[one]) for one in ids))
    matching = match(fronts, backs, comparable=False)
    assert found(matching) == truth
    assert set(evidence(matching)) == {(Evidence.REQUEST_ID,)}


def test_calls_of_one_trace_are_told_apart_by_their_prompts() -> None:
    trace = "traceparent: 00-0af7651916cd43dd8448eb211c80319c-b7ad6b716920333{}-01"
    crossings = [
        Crossing(prompt=prompt, front_fields=[trace.format(i)], back_fields=[trace.format(i + 4)])
        for i, prompt in enumerate(("one question", "another question"))
    ]
    fronts, backs, truth = played(*crossings)
    matching = match(fronts, backs)
    assert found(matching) == truth
    assert {one[:2] for one in evidence(matching)} == {(Evidence.TRACE_ID, Evidence.PROMPT)}
    assert not match(fronts, backs, comparable=False).pairs


def test_an_id_that_is_used_again_later_belongs_to_the_request_under_way() -> None:
    probe = {"front_fields": ["X-Request-Id: probe"], "back_fields": ["X-Request-Id: probe"]}
    fronts, backs, truth = played(*(Crossing(at_ns=at * 1_000 * MS, **probe) for at in range(1, 5)))
    assert found(match(fronts, backs)) == truth


def test_equal_prompts_and_equal_texts_at_one_time_are_ambiguous() -> None:
    fronts, backs, _ = played(Crossing(), Crossing())
    matching = match(fronts, backs)
    assert not matching.pairs
    assert (len(matching.ambiguous_front), len(matching.ambiguous_back)) == (2, 2)


def test_a_token_cannot_be_delivered_before_it_was_generated() -> None:
    early, late = (Crossing(at_ns=at_ms * MS, request_ns=60 * MS) for at_ms in (1_000, 1_040))
    fronts, backs, truth = played(early, late)
    matching = match(fronts, backs)
    # The later one of the back can only be that of the later request. The earlier one may be of both.
    assert found(matching) == {backs[1].id: truth[backs[1].id]}
    assert matching.ambiguous_back == [backs[0]]
    assert Evidence.ORDER in evidence(matching)[0]


def test_a_failed_attempt_without_text_is_ambiguous_between_equal_prompts() -> None:
    fronts, backs, truth = played(
        Crossing(tokens=words(40), failed=[Failed()]), Crossing(tokens=words(40, 50))
    )
    matching = match(fronts, backs)
    assert [back.id for back in matching.ambiguous_back] == [backs[0].id]
    assert found(matching) == {back.id: truth[back.id] for back in backs[1:]}


def test_a_beginning_that_two_answers_share_does_not_decide() -> None:
    common = words(20)
    fronts, backs, _ = played(
        Crossing(tokens=[*common, *words(40, 100)], deliver=lambda tokens: [*common[:10], "changed"]),
        Crossing(tokens=[*common, *words(40, 200)]),
    )
    matching = match(fronts, backs)
    assert [back.id for back in matching.ambiguous_back] == [backs[0].id]
    assert found(matching) == {backs[1].id: fronts[1].id}


def test_a_prompt_that_the_gateway_extends_is_found_by_the_text() -> None:
    fronts, backs, truth = played(*(Crossing(tokens=words(60, 100 * i)) for i in range(5)))
    for i, back in enumerate(backs):
        assert back.shape is not None
        back.shape.blocks[-1] = i
    matching = match(fronts, backs)
    assert found(matching) == truth
    assert {one[0] for one in evidence(matching)} == {Evidence.TEXT}


def test_a_request_that_ended_is_no_candidate() -> None:
    fronts, backs, _ = played(Crossing(at_ns=1_000 * MS), Crossing(at_ns=9_000 * MS))
    matching = match(fronts[:1], backs[1:])
    assert (matching.unpaired_front, matching.unpaired_back) == (fronts[:1], backs[1:])


def test_a_prompt_of_very_many_requests_at_one_time_is_ambiguous() -> None:
    fronts, backs, _ = played(Crossing())
    many = [Crossing(tokens=words(12, 20)).play(2)[0]] * 1_200
    matching = match([*fronts, *many], backs)
    assert matching.ambiguous_back == backs


def test_with_faults_no_pair_is_wrong_and_only_equal_prompts_are_ambiguous() -> None:
    crossings = traffic(1_000, seed=11, faults=True)
    fronts, backs, truth = played(*crossings)
    matching = match(fronts, backs)
    result = found(matching)
    assert all(truth[back] == front for back, front in result.items())
    common = {front.id for front, one in zip(fronts, crossings, strict=True) if "common" in one.prompt}
    assert matching.ambiguous_back
    assert {truth[back.id] for back in matching.ambiguous_back} <= common
    assert not matching.unpaired_back


def test_content_pairs_200_streams_with_a_fifth_of_equal_prompts() -> None:
    fronts, backs, truth = played(*traffic(1_000, seed=7))
    matching = match(fronts, backs)
    result = found(matching)
    assert all(truth[back] == front for back, front in result.items())
    assert len(result) >= 0.999 * len(backs)
    assert len(result) + len(matching.ambiguous_back) + len(matching.unpaired_back) == len(backs)

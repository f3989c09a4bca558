"""A row depends on the seed and its number alone; texts can be fitted without losing what they share."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmtap.units import Duration
from llmtap.workload.composed import Composed, RandomIds
from llmtap.workload.lengths import LogNormal, UniformLengths
from llmtap.workload.plan import Conversations, Sharing, Speaker, ThinkFixed
from llmtap.workload.programs import Code
from llmtap.workload.prompts.prompt import ElasticSource, Workload
from llmtap.workload.prompts.prose import Document, ProseWords
from llmtap.workload.prompts.text import count_tokens

TALK = Conversations(turns=UniformLengths(min=1, max=4), think=ThinkFixed(time=Duration(1_000)))
SHARING = Sharing(fraction=0.6, tokens=UniformLengths(min=20, max=90), contexts=3)
SHORT = LogNormal(median=40, p95=200)
MANY = {
    "plain": Composed("plain", SHORT, SHORT),
    "shared": Composed("shared", SHORT, SHORT, ProseWords(), SHARING),
    "code": Composed("code", SHORT, SHORT, Code(), SHARING),
    "document": Composed("document", SHORT, SHORT, Document()),
    "turns": Composed("turns", SHORT, SHORT, ProseWords(), SHARING, TALK),
    "ids": Composed("ids", SHORT, SHORT, RandomIds(), SHARING, TALK),
}


@settings(max_examples=40)
@given(
    st.sampled_from(sorted(MANY)), st.integers(0, 2**32), st.integers(1, 60), st.integers(1, 60), st.randoms()
)
def test_rows_are_the_same_whatever_count_and_order(
    name: str, seed: int, a: int, b: int, chance: object
) -> None:
    workload: Workload = MANY[name]
    few, many = sorted((a, b))
    less, more = workload.requests(few, seed), workload.requests(many, seed)
    assert less == more.taken(range(few))
    straight = [workload.prompts(less, seed).prompt(row) for row in range(few)]
    source = workload.prompts(more, seed)
    rows = list(range(few))
    chance.shuffle(rows)  # type: ignore[attr-defined]
    assert {row: source.prompt(row) for row in rows} == dict(enumerate(straight))


@pytest.mark.parametrize("name", ["plain", "shared", "code", "document", "turns"])
def test_a_prompt_can_be_asked_for_in_another_size(name: str) -> None:
    requests = MANY[name].requests(30, 3)
    source = MANY[name].prompts(requests, 3)
    assert isinstance(source, Speaker)
    elastic: ElasticSource = source
    for row in range(30):
        plain = elastic.prompt(row)
        for more in (-3, 0, 5, 300):
            prompt = elastic.sized(row, requests.input[row] + more)
            assert (prompt.system, prompt.history) == (plain.system, plain.history)
            assert count_tokens(prompt.text) == max(1, count_tokens(plain.text) + more)
        assert count_tokens(elastic.sized(row, 0).text) == 1

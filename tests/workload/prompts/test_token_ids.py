"""Ids by the batch are the ids that `randint` gives, and leave the generator where it would."""

from random import Random

from hypothesis import given
from hypothesis import strategies as st

from llmtap.workload.prompts.prompt import CL100K_IDS, random_ids, skip_ids

BELOW = st.one_of(st.just(CL100K_IDS), st.integers(2, 1 << 31))


@given(st.integers(), st.integers(0, 300), BELOW)
def test_they_are_those_of_randint(seed: int, count: int, below: int) -> None:
    one, other = Random(seed), Random(seed)
    assert random_ids(one, count, below) == [other.randint(0, below - 1) for _ in range(count)]
    assert one.getstate() == other.getstate()


@given(st.integers(), st.integers(0, 300), BELOW)
def test_counting_them_leaves_the_generator_at_the_same_place(seed: int, count: int, below: int) -> None:
    one, other = Random(seed), Random(seed)
    skip_ids(one, count, below)
    random_ids(other, count, below)
    assert one.getstate() == other.getstate()

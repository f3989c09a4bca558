"""The reference workloads have the figures that seed 000 documents, as near as a sample can tell: 4 sigma."""

import json
import math
from collections.abc import Iterator
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmtap.workload.ietf import (
    CODE_COMPLETION,
    CONVERSATION,
    LONG_CONTEXT,
    LONG_CONTEXT_UNIFORM,
    SKEWED,
    TARGETS,
    UNIFORM,
    SyntheticWorkload,
)
from llmtap.workload.plan import ComposedWorkload
from llmtap.workload.prompts.prose import QUESTION
from llmtap.workload.prompts.text import count_tokens
from llmtap.workload.registry import report_of
from tests.support.data import ORACLE

N = 10_000
ALL = [UNIFORM, SKEWED, CONVERSATION, CODE_COMPLETION, LONG_CONTEXT, LONG_CONTEXT_UNIFORM]
IDS = [workload.name for workload in ALL]


def sigma_of_share(share: float, n: int) -> float:
    return math.sqrt(n * share * (1 - share))


@pytest.mark.parametrize("workload", ALL, ids=IDS)
def test_lengths_are_those_of_the_distribution_that_is_described(
    workload: ComposedWorkload | SyntheticWorkload,
) -> None:
    plan = workload.plan(N, 42)
    for values, lengths in ((plan.messages, workload.input), (plan.requests.output, workload.output)):
        for p in (0.02, 0.1, 0.25, 0.5, 0.75, 0.9, 0.98):
            at, slack = lengths.quantile(p), 4 * sigma_of_share(p, N)
            assert sum(value <= at for value in values) >= N * p - slack
            assert sum(value < at for value in values) <= N * p + slack


def test_long_contexts_are_a_document_and_a_question() -> None:
    requests = LONG_CONTEXT.requests(N, 42)
    for target in TARGETS:
        assert requests.input.count(target) == pytest.approx(N / 5, abs=4 * sigma_of_share(0.2, N))
    assert set(requests.output) == {256}
    assert count_tokens(QUESTION) == 100
    some = LONG_CONTEXT.requests(8, 42)
    prompts = LONG_CONTEXT.prompts(some, 42)
    for row in range(8):
        text = prompts.prompt(row).text
        assert text.endswith(QUESTION)
        assert count_tokens(text.removesuffix(QUESTION)) == some.input[row] - 100
    assert not some.blocks, "nothing is shared"


SEQUENCES = {
    # As first published by this project: a change means that reports of before cannot be made again.
    "synthetic-uniform": "572d760e2451a9d5",
    "synthetic-skewed": "19d958c290bb244e",
    "conversation": "c15e1734ff294a62",
    "code-completion": "42119ac1bbd252a1",
    "long-context": "1244d3ed7541dbf9",
    "long-context-uniform": "a63df05a7639c697",
}


@pytest.mark.parametrize("workload", ALL, ids=IDS)
def test_the_first_thousand_of_seed_42_stay_what_they_are(
    workload: ComposedWorkload | SyntheticWorkload,
) -> None:
    result = report_of(workload, workload.requests(1_000, 42), 42)
    assert result["sha256"][:16] == SEQUENCES[workload.name]
    assert (result["seed"], result["requests"]) == (42, 1_000)


def by_the_draft(count: int, seed: int) -> Iterator[tuple[int, int, list[int]]]:
    """A.1.4 in its own terms: nothing but `randint` of one generator."""
    rng = Random(seed)
    for _ in range(count):
        given, made = rng.randint(128, 512), rng.randint(64, 256)
        yield given, made, [rng.randint(0, 100_255) for _ in range(given)]


def rows(workload: SyntheticWorkload, count: int, seed: int) -> list[tuple[int, int, list[int]]]:
    requests = workload.requests(count, seed)
    prompts = workload.prompts(requests, seed)
    return [(requests.input[i], requests.output[i], list(prompts.prompt(i).ids)) for i in range(count)]


@pytest.mark.parametrize("seed", [42, 2**70])
def test_the_whole_sequence_is_that_of_the_draft(seed: int) -> None:
    assert rows(UNIFORM, 200, seed) == list(by_the_draft(200, seed))


def test_it_is_the_oracles() -> None:
    cases = {case["id"]: case for case in json.loads((ORACLE / "ietf_cases.json").read_text())["cases"]}
    known = cases["S7_chunk_timing_and_golden_workload"]["expected"]
    golden = known["golden_first5_(input_len,output_len,first_token_id,last_token_id)"]
    assert [[given, made, ids[0], ids[-1]] for given, made, ids in rows(UNIFORM, 5, 42)] == golden
    requests = UNIFORM.requests(1_000, 42)
    assert sum(requests.input) == known["golden_sum_input_len_1000"]
    assert sum(requests.output) == known["golden_sum_output_len_1000"]


@settings(max_examples=20)
@given(st.lists(st.integers(0, 139), min_size=1, max_size=8), st.sampled_from([UNIFORM, SKEWED]))
def test_rows_may_be_asked_for_in_any_order(order: list[int], workload: SyntheticWorkload) -> None:
    requests = workload.requests(140, 5)
    prompts = workload.prompts(requests, 5)
    request = {row: list(prompts.prompt(row).ids) for row in order}
    straight = workload.prompts(requests, 5)
    in_order = [list(straight.prompt(row).ids) for row in range(max(order) + 1)]
    assert all(ids == in_order[row] for row, ids in request.items())
    assert all(len(ids) == requests.input[row] for row, ids in request.items())


def test_prompts_of_other_requests_are_refused() -> None:
    with pytest.raises(ValueError, match="not those of this workload"):
        UNIFORM.prompts(UNIFORM.requests(5, 1), seed=2)
    with pytest.raises(ValueError, match="not those of this workload"):
        UNIFORM.prompts(SKEWED.requests(5, 1), seed=1)

"""Synthetic-Uniform is the very sequence of A.1.4; a prompt is the same in whatever order rows come."""

import json
from collections.abc import Iterator
from pathlib import Path
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmtap.workload.ietf import SKEWED, UNIFORM, SyntheticWorkload

ORACLE = Path(__file__).parents[4] / "shared" / "oracle" / "ietf_cases.json"

FIRST = [
    # input, output, first id, last id; seed 42
    (455, 92, 3_278, 17_146),
    (454, 131, 21_178, 25_042),
    (171, 125, 94_381, 34_816),
    (200, 82, 7_816, 85_823),
    (207, 83, 61_537, 5_943),
]


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


def test_seed_42_begins_as_known() -> None:
    assert [(given, made, ids[0], ids[-1]) for given, made, ids in rows(UNIFORM, 5, 42)] == FIRST


@pytest.mark.parametrize("seed", [42, 0, 7, 2**70])
def test_the_whole_sequence_is_that_of_the_draft(seed: int) -> None:
    assert rows(UNIFORM, 200, seed) == list(by_the_draft(200, seed))


def test_sums_of_a_thousand_are_as_known() -> None:
    requests = UNIFORM.requests(1_000, 42)
    assert (sum(requests.input), sum(requests.output)) == (315_346, 160_203)
    prompts = UNIFORM.prompts(requests, 42)
    assert sum(sum(prompts.prompt(row).ids) for row in range(10)) == 138_314_867


@pytest.mark.skipif(not ORACLE.exists(), reason="the shared oracle is not here")
def test_it_is_the_oracles() -> None:
    cases = {case["id"]: case for case in json.loads(ORACLE.read_text())["cases"]}
    known = cases["S7_chunk_timing_and_golden_workload"]["expected"]
    golden = known["golden_first5_(input_len,output_len,first_token_id,last_token_id)"]
    assert [[given, made, ids[0], ids[-1]] for given, made, ids in rows(UNIFORM, 5, 42)] == golden
    requests = UNIFORM.requests(1_000, 42)
    assert sum(requests.input) == known["golden_sum_input_len_1000"]
    assert sum(requests.output) == known["golden_sum_output_len_1000"]


@settings(deadline=None)
@given(st.lists(st.integers(0, 299), min_size=1, max_size=8), st.sampled_from([UNIFORM, SKEWED]))
def test_rows_may_be_asked_for_in_any_order(order: list[int], workload: SyntheticWorkload) -> None:
    requests = workload.requests(300, 5)
    prompts = workload.prompts(requests, 5)
    asked = {row: list(prompts.prompt(row).ids) for row in order}
    straight = workload.prompts(requests, 5)
    in_order = [list(straight.prompt(row).ids) for row in range(max(order) + 1)]
    assert all(ids == in_order[row] for row, ids in asked.items())
    assert all(len(ids) == requests.input[row] for row, ids in asked.items())


@pytest.mark.parametrize("workload", [UNIFORM, SKEWED])
def test_more_requests_begin_as_fewer_do(workload: SyntheticWorkload) -> None:
    few, many = workload.requests(20, 3), workload.requests(90, 3)
    assert (few.input, few.output) == (many.input[:20], many.output[:20])
    assert set(many.arrival_ns) == {0}
    assert few.input != workload.requests(20, 4).input


def test_prompts_of_other_requests_are_refused() -> None:
    with pytest.raises(ValueError, match="not the first requests"):
        UNIFORM.prompts(UNIFORM.requests(5, 1), seed=2)
    with pytest.raises(ValueError, match="not the first requests"):
        UNIFORM.prompts(SKEWED.requests(5, 1), seed=1)


def test_floors_and_caps_are_those_of_the_appendix() -> None:
    requests = SKEWED.requests(5_000, 42)
    assert (min(requests.input), max(requests.input)) == (32, 4_096)
    assert (min(requests.output), max(requests.output)) == (16, 2_048)
    sections = [deviation["section"] for deviation in SKEWED.about["deviations"]]
    assert "4.3.2.2" in sections, "the section has no floors: said so"

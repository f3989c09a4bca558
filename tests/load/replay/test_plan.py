"""What is to be sent: traces and workloads as plans, and what is refused."""

from array import array
from collections import Counter
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from llmtap.bench.run.loads import make_load
from llmtap.errors import ConfigError
from llmtap.load.replay.perform import planned_within
from llmtap.load.replay.plan import ReplayPlan, ReplayQuestion, make_plan, other_words
from llmtap.workload.prompts.prompt import Prompt
from llmtap.workload.prompts.text import count_tokens
from llmtap.workload.requests import Requests

MS = 1_000_000
ROWS = [(0, 30, 5), (100, 40, 6), (100, 50, 7), (400, 60, 8)]
"""ms, tokens of the prompt, tokens of the answer."""


@pytest.fixture
def trace(tmp_path: Path) -> str:
    lines = [f'{{"timestamp": {t}, "input_length": {i}, "output_length": {o}}}' for t, i, o in ROWS]
    file = tmp_path / "trace.jsonl"
    file.write_text("\n".join(lines) + "\n")
    return str(file)


def plan_of(source: str, **more: Any) -> ReplayPlan:
    return make_plan(ReplayQuestion(source=source, **more))


def test_a_trace_as_it_is(trace: str) -> None:
    plan = plan_of(trace)
    assert list(plan.requests.arrival_ns) == [t * MS for t, _, _ in ROWS]
    assert list(plan.requests.input) == [i for _, i, _ in ROWS]
    assert list(plan.requests.output) == [o for _, _, o in ROWS]
    assert plan.needs_model
    assert plan.describe()["arrivals"] == {
        "arrivals": "recorded", "scale": 1.0, "speed": None, "recorded_rps": 7.5, "rate_rps": 7.5,
    }  # fmt: skip


def test_speed_and_rate_scale_and_keep_ties(trace: str) -> None:
    assert list(plan_of(trace, speed=2.0).requests.arrival_ns) == [0, 50 * MS, 50 * MS, 200 * MS]
    assert list(plan_of(trace, rate_rps=15.0).requests.arrival_ns) == [0, 50 * MS, 50 * MS, 200 * MS]


def test_arrivals_replace_the_trace_s_own(trace: str) -> None:
    plan = plan_of(trace, arrivals="uniform", rate_rps=10.0)
    assert list(plan.requests.arrival_ns) == [0, 100 * MS, 200 * MS, 300 * MS]
    assert plan.describe()["arrivals"] == {
        "arrivals": "uniform", "given": "uniform", "rate_rps": 10.0, "seed": 42,
    }  # fmt: skip


def test_a_workload_is_poisson_unless_told() -> None:
    plan = plan_of("synthetic-skewed", rate_rps=100.0, requests=50)
    gaps = [b - a for a, b in pairwise(plan.requests.arrival_ns)]
    assert len(plan.requests) == 50
    assert len(set(gaps)) == 49
    told = plan.describe()
    assert told["arrivals"] == {"arrivals": "poisson", "given": None, "rate_rps": 100.0, "seed": 42}
    workload = told["workload"]
    assert isinstance(workload, dict)
    assert (workload["name"], workload["seed"], workload["requests"]) == ("synthetic-skewed", 42, 50)


@pytest.mark.parametrize(
    ("source", "more", "place"),
    [
        ("TRACE", {"speed": 2.0, "rate_rps": 1.0}, "--speed"),
        ("TRACE", {"closed": True, "rate_rps": 1.0}, "--rate"),
        ("TRACE", {"closed": True, "arrivals": "poisson"}, "--arrivals"),
        ("TRACE", {"window_from_ns": 10**12}, "--window"),
        ("TRACE", {"share": 2.0}, "--share"),
        ("TRACE", {"arrivals": "at-once", "rate_rps": 1.0}, "--rate"),
        ("TRACE", {"arrivals": "poison", "rate_rps": 1.0}, "--arrivals"),
        ("conversation", {"speed": 2.0}, "--speed"),
        ("conversation", {"share": 0.5}, "--share"),
        ("conversation", {}, "--rate"),
        ("conversation", {"arrivals": "gamma:cv=2"}, "--rate"),
        ("conversation", {"arrivals": "gamma:cv=two", "rate_rps": 1.0}, "--arrivals"),
        ("conversation", {"arrivals": "steps:10x30s", "rate_rps": 1.0}, "--rate"),
        ("conversation", {"arrivals": "poison"}, "--arrivals"),
        ("TRACE", {"arrivals": "poisson"}, "--rate"),
        ("conversation", {"rate_rps": 1.0, "tokenizer": "nowhere/at/all"}, "--tokenizer"),
        ("nothing-like-it", {}, "nothing-like-it"),
    ],
)
def test_what_does_not_fit_is_refused(trace: str, source: str, more: dict[str, Any], place: str) -> None:
    with pytest.raises(ConfigError) as caught:
        plan_of(trace if source == "TRACE" else source, **more)
    assert caught.value.place == place


SHAREGPT = (
    '[{"id": "a", "conversations": [{"from": "human", "value": "What is a tap?"}, {"from": "gpt", "value":'
    ' "It watches."}]}, {"id": "b", "conversations": [{"from": "human", "value": "And a relay?"}, {"from":'
    ' "gpt", "value": "It forwards."}]}]'
)


def test_a_trace_without_times_is_told_how_to_give_it_some(tmp_path: Path) -> None:
    file = tmp_path / "sharegpt.json"
    file.write_text(SHAREGPT)
    with pytest.raises(ConfigError) as caught:
        plan_of(str(file))
    assert caught.value.place == str(file)
    assert caught.value.hint == "say how they arrive: --arrivals poisson --rate R, or --closed N"
    # And that works.
    assert len(plan_of(str(file), arrivals="poisson", rate_rps=5.0).requests) == 2
    assert len(plan_of(str(file), closed=True).requests) == 2


@dataclass
class Said:
    """Prompts that are known."""

    prompts: list[Prompt]

    def prompt(self, row: int) -> Prompt:
        return self.prompts[row]


def mixed(prompt: Prompt) -> Prompt:
    requests = Requests(array("q", [0]), array("q", [9]), array("q", [3]))
    found = other_words(ReplayPlan(requests, Said([prompt]), {}))
    assert found.prompts is not None
    return found.prompts.prompt(0)


def shared(one: str, other: str) -> int:
    """Letters at the beginning that are the same."""
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), len(one))


@pytest.mark.parametrize("workload", ["conversation", "code-completion", "long-context"])
def test_texts_are_as_long_and_no_prefix_is_that_of_a_measured_one(workload: str) -> None:
    plan = make_load(workload, slots=2, seed=7, requests=8).plan
    warm = other_words(plan)
    assert plan.prompts is not None and warm.prompts is not None
    measured = [plan.prompts.prompt(row) for row in range(8)]
    for row in range(8):
        sent = warm.prompts.prompt(row)
        own = measured[row]
        assert sorted(sent.text.split()) == sorted(own.text.split())
        assert count_tokens(sent.text) == pytest.approx(count_tokens(own.text), rel=0.02, abs=3)
        assert bool(sent.system) == bool(own.system)
        begins = sent.system or sent.text
        assert max(shared(begins, one.system or one.text) for one in measured) < 40
    assert list(warm.requests.output) == list(plan.requests.output)
    assert list(warm.requests.input) == list(plan.requests.input)


def test_token_ids_are_the_same_ones_in_another_order() -> None:
    plan = make_load("synthetic-uniform", slots=2, seed=7, requests=4).plan
    warm = other_words(plan)
    assert plan.prompts is not None and warm.prompts is not None
    for row in range(4):
        own, sent = plan.prompts.prompt(row).ids, warm.prompts.prompt(row).ids
        assert Counter(own) == Counter(sent)
        assert list(own[:16]) != list(sent[:16])


def test_every_part_of_a_prompt_is_another_one() -> None:
    prompt = Prompt("what is a hill", system="be brief and kind", history=(("user", "one two three"),))
    found = mixed(prompt)
    assert (found.text.split()[-1], found.system.split()[-1]) == ("what", "be")
    ((role, said),) = found.history
    assert (role, said.split()[-1]) == ("user", "one")


def test_turns_wait_for_nobody_and_tenants_stay() -> None:
    requests = Requests(
        array("q", [5, 6]), array("q", [3, 4]), array("q", [1, 2]), after=array("q", [-1, 0]),
        think_ns=array("q", [0, 1]), tenants=["a", "b"],
    )  # fmt: skip
    found = other_words(ReplayPlan(requests, Said([Prompt("a b"), Prompt("c d")]), {})).requests
    assert (list(found.after), found.tenants, list(found.arrival_ns)) == ([], ["a", "b"], [0, 0])


def test_a_duration_bounds_the_planned_requests_of_an_open_loop() -> None:
    requests = Requests(array("q", [0, 5, 10, 15]))
    assert planned_within(requests, None, closed=True) == 4
    assert planned_within(requests, 10, closed=False) == 2
    assert planned_within(requests, 10, closed=True) is None

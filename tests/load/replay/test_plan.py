"""What is to be sent: traces and workloads as plans, and what is refused."""

import json
from array import array
from collections import Counter
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from llmtap.bench.run.session import make_load
from llmtap.errors import ConfigError
from llmtap.load.options import ScheduleOptions, Window
from llmtap.load.replay.perform import planned_within
from llmtap.load.replay.plan import ReplayPlan, make_plan, reverse_words
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


def plan_of(source: str, *, tokenizer: str | None = None, **more: Any) -> ReplayPlan:
    return make_plan(ScheduleOptions(source=source, **more), tokenizer=tokenizer)


def test_a_trace_as_it_is(trace: str) -> None:
    plan = plan_of(trace)
    assert list(plan.requests.arrival_ns) == [t * MS for t, _, _ in ROWS]
    assert list(plan.requests.input) == [i for _, i, _ in ROWS]
    assert list(plan.requests.output) == [o for _, _, o in ROWS]
    assert plan.needs_model
    assert plan.describe()["arrivals"] == {
        "arrivals": "recorded",
        "scale": 1.0,
        "speed": None,
        "recorded_rps": 7.5,
        "rate_rps": 7.5,
    }


@pytest.mark.parametrize(
    ("more", "arrivals_ms"),
    [
        ({"speed": 2.0}, [0, 50, 50, 200]),
        ({"rate": 15.0}, [0, 50, 50, 200]),
        ({"arrivals": "uniform", "rate": 10.0}, [0, 100, 200, 300]),
    ],
)
def test_arrivals_are_scaled_or_replaced(trace: str, more: dict[str, Any], arrivals_ms: list[int]) -> None:
    assert [t // MS for t in plan_of(trace, **more).requests.arrival_ns] == arrivals_ms


def test_a_workload_is_poisson_unless_told() -> None:
    plan = plan_of("synthetic-skewed", rate=100.0, requests=50)
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
        ("TRACE", {"speed": 2.0, "rate": 1.0}, "--speed"),
        ("TRACE", {"closed": 4, "rate": 1.0}, "--rate"),
        ("TRACE", {"closed": 4, "arrivals": "poisson"}, "--arrivals"),
        ("TRACE", {"window": Window(10**12)}, "--window"),
        ("TRACE", {"share": 2.0}, "--share"),
        ("TRACE", {"arrivals": "at-once", "rate": 1.0}, "--rate"),
        ("TRACE", {"arrivals": "poison", "rate": 1.0}, "--arrivals"),
        ("conversation", {"speed": 2.0}, "--speed"),
        ("conversation", {"share": 0.5}, "--share"),
        ("conversation", {}, "--rate"),
        ("conversation", {"arrivals": "gamma:cv=2"}, "--rate"),
        ("conversation", {"arrivals": "steps:10x30s", "rate": 1.0}, "--rate"),
        ("TRACE", {"arrivals": "poisson"}, "--rate"),
        ("conversation", {"rate": 1.0, "tokenizer": "nowhere/at/all"}, "--tokenizer"),
        ("nothing-like-it", {}, "nothing-like-it"),
    ],
)
def test_what_does_not_fit_is_refused(trace: str, source: str, more: dict[str, Any], place: str) -> None:
    with pytest.raises(ConfigError) as caught:
        plan_of(trace if source == "TRACE" else source, **more)
    assert caught.value.place == place


def test_a_trace_without_times_is_told_how_to_give_it_some(tmp_path: Path) -> None:
    turns = [{"from": "human", "value": "What is a tap?"}, {"from": "gpt", "value": "It watches."}]
    file = tmp_path / "sharegpt.json"
    file.write_text(json.dumps([{"id": name, "conversations": turns} for name in "ab"]))
    with pytest.raises(ConfigError) as caught:
        plan_of(str(file))
    assert caught.value.place == str(file)
    assert caught.value.hint == "set the arrivals: --arrivals poisson --rate R, or --closed N"
    plan = plan_of(str(file), arrivals="poisson", rate=5.0)
    assert len(plan.requests) == 2


@pytest.mark.parametrize("more", [{"arrivals": "uniform", "rate": 10.0}, {"closed": 2}])
@pytest.mark.parametrize("rows", [1, 3])
def test_rows_without_times_are_repeated_if_their_times_are_not_used(
    tmp_path: Path, rows: int, more: dict[str, Any]
) -> None:
    file = tmp_path / "labelled.jsonl"
    file.write_text("".join(f'{{"prompt": "{i}", "label": "should-answer"}}\n' for i in range(rows)))
    requests = plan_of(str(file), requests=5, **more).requests
    assert len(requests) == len(requests.bodies) == len(requests.labels) == 5
    assert requests.bodies[rows] == requests.bodies[0]
    assert [t // MS for t in requests.arrival_ns] == ([0, 100, 200, 300, 400] if "rate" in more else [0] * 5)


def test_rows_that_all_arrive_at_once_cannot_be_repeated_at_their_times(tmp_path: Path) -> None:
    file = tmp_path / "trace.jsonl"
    file.write_text('{"timestamp": 0, "input_length": 3, "output_length": 5}\n' * 2)
    with pytest.raises(ConfigError) as caught:
        plan_of(str(file), requests=5)
    assert (caught.value.place, "--closed" in (caught.value.hint or "")) == ("--requests", True)


@dataclass
class Said:
    """Prompts that are known."""

    prompts: list[Prompt]

    def prompt(self, row: int) -> Prompt:
        return self.prompts[row]


def shared(one: str, other: str) -> int:
    """Letters at the beginning that are the same."""
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), len(one))


@pytest.mark.parametrize("workload", ["conversation", "long-context"])
def test_texts_are_as_long_and_no_prefix_is_that_of_a_measured_one(workload: str) -> None:
    plan = make_load(workload, slots=2, seed=7, requests=8).plan
    warm = reverse_words(plan)
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
    warm = reverse_words(plan)
    for row in range(4):
        own, sent = plan.prompts.prompt(row).ids, warm.prompts.prompt(row).ids
        assert Counter(own) == Counter(sent)
        assert list(own[:16]) != list(sent[:16])


def test_turns_wait_for_nobody_tenants_stay_and_every_part_has_other_words() -> None:
    requests = Requests(
        array("q", [5, 6]),
        array("q", [3, 4]),
        array("q", [1, 2]),
        after=array("q", [-1, 0]),
        think_ns=array("q", [0, 1]),
        tenants=["a", "b"],
    )
    prompt = Prompt("what is a hill", system="be brief and kind", history=(("user", "one two three"),))
    warm = reverse_words(ReplayPlan(requests, Said([prompt, Prompt("c d")]), {}))
    found = warm.requests
    assert (list(found.after), found.tenants, list(found.arrival_ns)) == ([], ["a", "b"], [0, 0])
    sent = warm.prompts.prompt(0)
    ((role, said),) = sent.history
    assert role == "user"
    assert [text.split()[-1] for text in (sent.text, sent.system, said)] == ["what", "be", "one"]


def test_a_duration_bounds_the_planned_requests_of_an_open_loop() -> None:
    requests = Requests(array("q", [0, 5, 10, 15]))
    assert planned_within(requests, None, closed=True) == 4
    assert planned_within(requests, 10, closed=False) == 2
    assert planned_within(requests, 10, closed=True) is None

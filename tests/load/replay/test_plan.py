"""What is to be sent: traces and workloads as plans, and what is refused."""

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from llmtap.errors import ConfigError
from llmtap.load.replay.plan import REQUESTS, ReplayPlan, ReplayQuestion, make_plan

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
    assert plan.describe()["arrivals"] == {"arrivals": "recorded", "scale": 1.0, "rate_rps": 7.5}


def test_speed_and_rate_scale_and_keep_ties(trace: str) -> None:
    assert list(plan_of(trace, speed=2.0).requests.arrival_ns) == [0, 50 * MS, 50 * MS, 200 * MS]
    assert list(plan_of(trace, rate_rps=15.0).requests.arrival_ns) == [0, 50 * MS, 50 * MS, 200 * MS]


def test_a_rate_is_that_of_the_rows_that_are_taken(trace: str) -> None:
    # Two gaps in 100 ms are 20/s; at 10/s they take 200.
    assert list(plan_of(trace, requests=3, rate_rps=10.0).requests.arrival_ns) == [0, 200 * MS, 200 * MS]


def test_a_window_begins_at_its_first_row(trace: str) -> None:
    plan = plan_of(trace, window_from_ns=100 * MS)
    assert list(plan.requests.arrival_ns) == [0, 0, 300 * MS]
    assert list(plan.requests.input) == [40, 50, 60]


def test_arrivals_replace_the_trace_s_own(trace: str) -> None:
    plan = plan_of(trace, arrivals="uniform", rate_rps=10.0)
    assert list(plan.requests.arrival_ns) == [0, 100 * MS, 200 * MS, 300 * MS]
    assert plan.describe()["arrivals"] == {
        "arrivals": "uniform", "given": "uniform", "rate_rps": 10.0, "seed": 42,
    }  # fmt: skip


def test_all_at_once(trace: str) -> None:
    assert list(plan_of(trace, arrivals="at-once").requests.arrival_ns) == [0] * 4


def test_a_closed_loop_has_no_arrivals(trace: str) -> None:
    assert plan_of(trace, closed=True).describe()["arrivals"] is None


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


def test_a_workload_has_a_number_of_requests() -> None:
    assert len(plan_of("conversation", closed=True).requests) == REQUESTS


def test_the_same_seed_gives_the_same_plan_and_another_one_does_not() -> None:
    one, two, other = (plan_of("conversation", rate_rps=5.0, requests=20, seed=seed) for seed in (7, 7, 8))
    assert one.requests == two.requests
    assert one.prompts is not None and two.prompts is not None
    assert [one.prompts.prompt(row) for row in range(20)] == [two.prompts.prompt(row) for row in range(20)]
    assert one.requests.input != other.requests.input


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


def test_a_process_is_told_as_it_was_given_and_by_its_own_parameters() -> None:
    plan = plan_of("synthetic-skewed", arrivals="gamma:cv=2", rate_rps=10.0, requests=5)
    told = plan.describe()["arrivals"]
    assert told == {
        "arrivals": "gamma:burstiness=0.25", "given": "gamma:cv=2", "rate_rps": 10.0, "seed": 42,
    }  # fmt: skip


def test_processes_that_name_their_rates_need_none_beside_them() -> None:
    plan = plan_of("synthetic-skewed", arrivals="steps:10x30s", requests=5)
    told = plan.describe()["arrivals"]
    assert isinstance(told, dict)
    assert (told["given"], told["rate_rps"]) == ("steps:10x30s", None)


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({}, "--rate: is missing: conversation is a workload, which has no times of its own"),
        ({"arrivals": "onoff:on=2s,off=8s"}, "--rate: is missing: onoff arrivals need a mean rate"),
    ],
)
def test_a_missing_rate_is_said_with_what_to_write(more: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        plan_of("conversation", **more)
    assert str(caught.value) == f"{said}\nhint: such as --rate 4; or --closed 8, which needs none"


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


def test_a_trace_tells_its_lengths_as_a_workload_does(trace: str) -> None:
    told: Any = plan_of(trace).describe()["lengths"]
    assert {name: told["input"][name] for name in ("distribution", "unit", "n", "mean", "min", "max")} == {
        "distribution": "empirical", "unit": "tokens", "n": 4, "mean": 45.0, "min": 30, "max": 60,
    }  # fmt: skip
    assert (told["output"]["mean"], told["output"]["control"]) == (6.5, "max_tokens")
    assert "lengths" not in plan_of("conversation", closed=True).describe()


def test_a_format_that_nobody_knows_is_the_option_s_fault(trace: str) -> None:
    with pytest.raises(ConfigError, match="--from: no format to read is called 'junk'"):
        plan_of(trace, source_format="junk")

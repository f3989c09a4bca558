"""A name is a workload, or an error that says which there are; a report tells the sequence by its digest."""

import json
from typing import Any

import pytest

from llmtap.errors import ConfigError
from llmtap.workload.registry import REFERENCE, report_of, workload_named
from llmtap.workload.synthetic import WORKLOADS, draw


@pytest.mark.parametrize("name", [*REFERENCE, *WORKLOADS])
def test_a_name_is_its_workload(name: str) -> None:
    workload = workload_named(name, "--workload")
    assert workload.name == name
    requests = workload.requests(40, 3)
    assert len(requests.input) == len(requests.output) == len(requests.arrival_ns) == 40
    assert set(requests.arrival_ns) == {0}
    json.dumps(report_of(workload, requests, 3))
    elastic: Any = workload.prompts(requests, 3)
    prompt = elastic.prompt(39)
    assert (
        elastic.sized(39, requests.input[39]) == elastic.fitted(lambda made, n: made(n)).prompt(39) == prompt
    )
    assert (elastic.sized(39, requests.input[39] + 9) == prompt) == bool(prompt.ids)


@pytest.mark.parametrize(
    ("text", "problem", "hint"),
    [
        ("synthetic-unifrom", "no workload is called", "did you mean 'synthetic-uniform'?"),
        ("?", "no workload is called '?'", "one of synthetic-uniform, synthetic-skewed"),
        ("sharegpt", "is the workload of a file, and none is named", "sharegpt:FILE"),
        ("stack:", "cannot be read", None),
        ("code-completion:none.jsonl", "none.jsonl cannot be read", None),
    ],
)
def test_no_name_is_an_error_of_its_place(text: str, problem: str, hint: str | None) -> None:
    with pytest.raises(ConfigError) as caught:
        workload_named(text, "--workload")
    assert caught.value.place == "--workload"
    assert problem in caught.value.problem
    assert hint is None or hint in (caught.value.hint or "")


@pytest.mark.parametrize("name", WORKLOADS)
def test_those_of_sim_run_have_its_very_rows(name: str) -> None:
    workload = workload_named(name, "")
    ours, theirs = workload.requests(200, 9), draw(WORKLOADS[name], 200, 9)
    assert (ours.input, ours.output) == (theirs.input, theirs.output)
    told = workload.describe()
    assert told["arrivals"] == ("gamma:cv=13.28" if name == "bursty" else "poisson")
    assert told["rate_rps"] == WORKLOADS[name].rate_rps

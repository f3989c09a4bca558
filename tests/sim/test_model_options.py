"""Options of the engine's model and of serving."""

from math import log
from statistics import mean, stdev

import pytest

from llmtap.sim.model_options import PREDICTORS, predict, read_model_options
from tests.support.workloads.batch_runs import workload


@pytest.mark.parametrize(
    ("name", "value", "problem"),
    [
        ("epsilon", "1ms", "no reading is called 'epsilon'"),
        ("bin_chioce", "x", "did you mean bin_choice?"),
        ("eps", "soon", "eps: expected a duration such as 30, 0.5 or '500ms', got 'soon'"),
        ("bin_choice", "random", "bin_choice: expected one of round-robin, longest-queue, oldest-head, got"),
        ("bins", "0", "bins: expected a whole number from 1 to 1,024, got '0'"),
        ("bins", "many", "bins: expected a whole number from 1 to 1,024, got 'many'"),
        ("bin_edges", "5,5", "bin_edges: expected ascending numbers >= 0, got '5,5'"),
        ("bin_edges", "5,a", "bin_edges: expected a whole number, got 'a'"),
        ("memory_gb", "4.5", "memory_gb: expected more than"),
    ],
)
def test_what_cannot_be_read_is_named(name: str, value: str, problem: str) -> None:
    with pytest.raises(ValueError, match=problem.replace("?", r"\?")):
        read_model_options({name: value})


REQUESTS = workload([(0, n, n % 97) for n in range(1, 3_000)])


@pytest.mark.parametrize(("prompt", "result"), [(0, 1), (1, 1), (10, 7), (251, 71), (100_000, 4_096)])
def test_prompt_is_a_power_of_the_prompt_whole_and_in_bounds(prompt: int, result: int) -> None:
    assert list(predict(workload([(0, prompt, 5)]), "prompt", 1)) == [result]


def test_noisy_is_that_with_noise_of_a_tenth() -> None:
    result, plain = predict(REQUESTS, "noisy", 1), predict(REQUESTS, "prompt", 1)
    # Long ones, where cutting to whole tokens is little.
    errors = [log(a / b) for a, b in list(zip(result, plain, strict=True))[1_000:]]
    assert stdev(errors) == pytest.approx(0.1, rel=0.1)
    assert mean(errors) == pytest.approx(0, abs=0.01)


def test_shuffled_are_the_true_lengths_of_others() -> None:
    result = predict(REQUESTS, "shuffled", 1)
    assert sorted(result) == sorted(REQUESTS.output)
    assert sum(a == b for a, b in zip(result, REQUESTS.output, strict=True)) < 100


@pytest.mark.parametrize("name", PREDICTORS)
def test_a_seed_decides_it_all(name: str) -> None:
    assert predict(REQUESTS, name, 5) == predict(REQUESTS, name, 5)
    guesses = name in ("noisy", "shuffled")
    assert (predict(REQUESTS, name, 5) != predict(REQUESTS, name, 6)) is guesses

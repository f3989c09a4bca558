"""A name is a workload, or an error that says which there are; a report tells the sequence by its digest."""

import json
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median, pstdev, quantiles
from typing import Any

import pytest

from llmtap.errors import ConfigError
from llmtap.workload.prompts.text import count_tokens
from llmtap.workload.registry import (
    REFERENCE,
    SIMULATED,
    draw_requests,
    load_workload,
    report_of,
    workload_named,
)


@pytest.mark.parametrize("name", [*REFERENCE, *SIMULATED])
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
        elastic.resized_prompt(39, requests.input[39])
        == elastic.with_fit(lambda made, n: made(n)).prompt(39)
        == prompt
    )
    assert (elastic.resized_prompt(39, requests.input[39] + 9) == prompt) == bool(prompt.ids)


@pytest.mark.parametrize(
    ("text", "problem", "hint"),
    [
        ("synthetic-unifrom", "no workload is called", "did you mean 'synthetic-uniform'?"),
        ("?", "no workload is called '?'", "one of synthetic-uniform, synthetic-skewed"),
        ("conversation:", "cannot be read", None),
        ("code-completion:none.jsonl", "there is no file none.jsonl", "bigcode/the-stack"),
    ],
)
def test_no_name_is_an_error_of_its_place(text: str, problem: str, hint: str | None) -> None:
    with pytest.raises(ConfigError) as caught:
        workload_named(text, "--workload")
    assert caught.value.place == "--workload"
    assert problem in caught.value.problem
    assert hint is None or hint in (caught.value.hint or "")


N = 40_000


@pytest.mark.parametrize(
    ("name", "input_median", "output_median"),
    [("chat", 156, 234), ("long-chat", 1_400, 234), ("bursty", 251, 34)],
)
def test_medians_are_those_of_the_source(name: str, input_median: int, output_median: int) -> None:
    requests = draw_requests(name, N, 42, "")
    # The standard error of a median of N lognormal values is 1.25 sigma / sqrt(N): below 1 % of it here.
    assert median(requests.input) == pytest.approx(input_median, rel=0.03)
    assert median(requests.output) == pytest.approx(output_median, rel=0.03)


def test_tails_and_means_are_those_of_the_source() -> None:
    chat = draw_requests("chat", N, 1, "")
    assert quantiles(chat.input, n=20)[-1] == pytest.approx(892, rel=0.05)
    assert quantiles(chat.output, n=20)[-1] == pytest.approx(789, rel=0.05)
    long = draw_requests("long-chat", N, 1, "")
    assert fmean(long.input) == pytest.approx(1_600, rel=0.02)


@pytest.mark.parametrize("seed", [1, 42])
def test_bursty_has_the_statistics_of_burstgpt_within_3_percent(seed: int) -> None:
    """004, 3.1: mean, median and p95 of prompts, outputs and totals; 80 % ChatGPT and 20 % GPT-4."""
    n = 100_000
    requests = workload_named("bursty", "").requests(n, seed)
    totals = [given + made for given, made in zip(requests.input, requests.output, strict=True)]
    for column, stated in (
        (requests.input, (611, 251, 2_461)),
        (requests.output, (123, 34, 460)),
        (totals, (734, 327, 2_801)),
    ):
        found = (fmean(column), median(column), quantiles(column, n=20)[-1])
        assert found == pytest.approx(stated, rel=0.03)
    assert requests.models.count("ChatGPT") / n == pytest.approx(0.8, rel=0.03)
    assert requests.models.count("GPT-4") / n == pytest.approx(0.2, rel=0.03)


def test_arrivals_have_their_rate_and_their_burstiness() -> None:
    arrivals = draw_requests("chat", N, 3, "").arrival_ns
    gaps = [b - a for a, b in pairwise(arrivals)]
    assert fmean(gaps) == pytest.approx(1e9, rel=0.03)
    assert pstdev(gaps) / fmean(gaps) == pytest.approx(1, rel=0.03)
    bursts = draw_requests("bursty", N, 3, "").arrival_ns
    gaps = [b - a for a, b in pairwise(bursts)]
    assert min(gaps) >= 0
    assert pstdev(gaps) / fmean(gaps) > 8  # of a tail so heavy a sample seldom has all
    assert sum(gap < 1_000_000 for gap in gaps) > 0.9 * N


EXAMPLE = Path(__file__).parents[2] / "config" / "workload.toml"
LEAST = "input = 100\noutput = 20\n"
A = "output = 1\ninput = {distribution = "


def written(folder: Path, text: str) -> Path:
    file = folder / "mine.toml"
    file.write_text(text)
    return file


def test_the_example_is_a_workload() -> None:
    workload = load_workload(EXAMPLE)
    result = workload.describe()
    assert result["name"] == "support-chat"
    assert result["arrivals"] == "gamma:cv=2"
    assert result["request"] == {"temperature": 0.7, "max_tokens": "output", "stop": None}
    requests = workload.requests(300, 1)
    assert any(before >= 0 for before in requests.after)
    assert requests.blocks
    prompt = workload.prompts(requests, 1).prompt(7)
    message = (prompt.system, prompt.text, *(text for _, text in prompt.history))
    assert sum(map(count_tokens, message)) == requests.input[7]


@pytest.mark.parametrize(
    "result",
    [
        line.strip("# ").partition("   #")[0]
        for line in EXAMPLE.read_text().splitlines()
        if line.strip().startswith("#   { distribution")
    ],
)
def test_each_distribution_of_the_example_loads(tmp_path: Path, result: str) -> None:
    workload = load_workload(written(tmp_path, f"input = {result}\noutput = 5\n"))
    assert min(workload.requests(50, 1).input) >= 1


def test_contents_are_of_their_kind(tmp_path: Path) -> None:
    for kind in ("words", "code", "document"):
        workload = load_workload(written(tmp_path, f'{LEAST}[content]\nkind = "{kind}"\n'))
        requests = workload.requests(3, 1)
        assert count_tokens(workload.prompts(requests, 1).prompt(2).text) == 100
        assert workload.describe()["content"]["kind"] == kind  # type: ignore[index]
    workload = load_workload(written(tmp_path, f'{LEAST}[content]\nkind = "ids"\nvocabulary = 50\n'))
    ids = workload.prompts(workload.requests(3, 1), 1).prompt(2).ids
    assert len(ids) == 100
    assert max(ids) < 50


@pytest.mark.parametrize(
    ("text", "place", "problem"),
    [
        ("input = 3", "output", "is missing"),
        (LEAST + "inptu = 3", "inptu", "there is no such key"),
        ("input = {}\noutput = 1", "input.distribution", "is missing"),
        (A + '"fixed", tokns = 1}', "input.tokns", "no such key"),
        (A + '"empirical", values = []}', "input.values", "length >= 1"),
        (A + '"uniform", min = 5, max = 3}', "input", "min: expected at most max (3), got 5"),
        ('input = 1\noutput = {distribution = "lognormal", mu = 1.0}', "output", "mu and sigma, or"),
        (LEAST + "[sharing]\nfraction = 0.5", "sharing.tokens", "is missing"),
        (
            LEAST + '[conversations]\nturns = 3\nthink = {distribution = "exponential", mean = "8 potatoes"}',
            "conversations.think.mean",
            "expected a duration",
        ),
        (LEAST + '[content]\nkind = "poem"', "content.kind", "Invalid"),
        (LEAST + 'arrivals = "poison"', "arrivals", "'poison'"),
        ("input = ", "", "is not TOML"),
    ],
)
def test_what_is_wrong_is_told_by_its_key(tmp_path: Path, text: str, place: str, problem: str) -> None:
    file = written(tmp_path, text)
    with pytest.raises(ConfigError) as caught:
        load_workload(file)
    assert caught.value.place == (f"{place} in {file}" if place else str(file))
    assert problem in caught.value.problem
    assert caught.value.hint or not place

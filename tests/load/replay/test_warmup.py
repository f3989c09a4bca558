"""A warm-up's prompts are as long as those that are measured, and begin like none of them."""

from array import array
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import pytest

import llmtap
from llmtap.bench.run.loads import closed_load
from llmtap.load.bodies import BodyOptions
from llmtap.load.replay.options import ReplayOptions
from llmtap.load.replay.perform import Replay
from llmtap.load.replay.plan import ROWS_MAX, ReplayPlan, ReplayQuestion, make_plan, other_words
from llmtap.units import NS_PER_S, Duration
from llmtap.workload.prompts.prompt import Prompt
from llmtap.workload.prompts.text import count_tokens
from llmtap.workload.requests import Requests
from tests.bench.support import Silent, sim
from tests.support.peer import play


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
    plan = closed_load(workload, slots=2, seed=7, requests=8).plan
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
    plan = closed_load("synthetic-uniform", slots=2, seed=7, requests=4).plan
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


def test_a_text_without_spaces_is_mixed_by_its_letters() -> None:
    text = "\u6c34\u6d41\u5c71\u9ad8" * 30
    found = mixed(Prompt(text)).text
    assert found != text
    assert Counter(found) == Counter(text)


@pytest.mark.parametrize("prompt", [Prompt(), Prompt("word"), Prompt(ids=[7])])
def test_what_has_no_order_stays_as_it_is(prompt: Prompt) -> None:
    found = mixed(prompt)
    assert (found.text, list(found.ids)) == (prompt.text, list(prompt.ids))


def test_it_is_of_so_many_at_most_and_the_same_each_time() -> None:
    plan = closed_load("conversation", slots=2, seed=7, requests=300).plan
    one, two = other_words(plan), other_words(plan)
    assert len(one.requests) == ROWS_MAX
    assert one.prompts is not None and two.prompts is not None
    assert one.prompts.prompt(5) == two.prompts.prompt(5)


def test_turns_wait_for_nobody_and_tenants_stay() -> None:
    requests = Requests(
        array("q", [5, 6]), array("q", [3, 4]), array("q", [1, 2]), after=array("q", [-1, 0]),
        think_ns=array("q", [0, 1]), tenants=["a", "b"],
    )  # fmt: skip
    found = other_words(ReplayPlan(requests, Said([Prompt("a b"), Prompt("c d")]), {})).requests
    assert (list(found.after), found.tenants, list(found.arrival_ns)) == ([], ["a", "b"], [0, 0])


def test_recorded_bodies_without_prompts_are_what_there_is() -> None:
    plan = ReplayPlan(Requests(array("q", [0]), bodies=[b"{}"]), None, {})
    assert other_words(plan) is plan


def test_a_replay_is_warmed_up_by_none_of_its_own_prompts(tmp_path: Path) -> None:
    """A server that keeps prefixes would answer those from its cache."""
    second, minute = Duration(NS_PER_S), Duration(60 * NS_PER_S)
    plan = make_plan(ReplayQuestion(source="synthetic-uniform", requests=8, rate_rps=40.0, chat=False))
    with sim("--scheduler", "continuous_batching", "--serving", "prefix_cache=true") as url:
        options = ReplayOptions(
            target=url, timeout=minute, connect_timeout=minute, retry_wait=second,
            endpoint="completions", warmup="8", capture=str(tmp_path),
        )  # fmt: skip
        result = play(
            Replay(plan, options, BodyOptions(endpoint="completions", temperature=0.0), Silent()).run(),
            limit_s=60,
        )
    assert (result["warmup"]["requests"], result["outcomes"]) == (8, {"complete": 8})
    assert set(llmtap.read(tmp_path).table().column("cached_tokens").to_pylist()) <= {0, None}

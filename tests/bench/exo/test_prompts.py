"""Prompts of the exo benchmark have the tokens that are wanted, and begin as they should."""

from pathlib import Path

import pytest

from llmtap.bench.exo.mode import Prompts
from llmtap.workload.prompts.counter import load_counter
from llmtap.workload.prompts.tokenizer import OWN
from tests.support.model_folder import model_folder

SEED = 11


@pytest.mark.parametrize("alike", [False, True])
@pytest.mark.parametrize("model", [False, True])
def test_prompts_have_their_tokens_by_the_chat_template(tmp_path: Path, alike: bool, model: bool) -> None:
    counter = load_counter(
        str(model_folder(tmp_path / "m")) if model else OWN, chat=True, place="--tokenizer"
    )
    prompts = Prompts(counter, alike=alike, seed=SEED)
    smallest = prompts.smallest()
    assert smallest == (1 if not model else min(counter.count([prompts.make(1, 1)[0][0]])))
    for pp in (smallest, smallest + 1, 33, 128, 1_000):
        made = prompts.make(pp, 3)
        assert counter.count([prompt for prompt, _ in made]) == [pp] * 3
        assert [fitted.tokens for _, fitted in made] == [pp] * 3


def test_prompts_that_are_not_alike_differ_from_their_first_word() -> None:
    counter = load_counter(OWN, chat=True, place="")
    prompts = Prompts(counter, alike=False, seed=SEED)
    texts = [prompt.text for _ in range(4) for prompt, _ in prompts.make(64, 50)]
    in_a_row = counter.words.distinct // 2  # the other half begin blocks of traces
    assert in_a_row == 128
    for begin in range(200 - in_a_row):
        assert len({text.split()[0] for text in texts[begin : begin + in_a_row]}) == in_a_row
    assert len({tuple(text.split()[:2]) for text in texts}) == 200
    other = Prompts(counter, alike=False, seed=SEED + 1).make(64, 50)
    assert not {prompt.text for prompt, _ in other} & set(texts), "another seed, other prompts"


def test_prompts_that_are_alike_are_each_other_s_beginning() -> None:
    prompts = Prompts(load_counter(OWN, chat=True, place=""), alike=True, seed=SEED)
    short, again, long = (prompts.make(pp, 1)[0][0].text for pp in (100, 100, 500))
    assert short == again
    assert long.startswith(short)

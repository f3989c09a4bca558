"""Loads written anew: other words, the same work; a primer has a load's prefixes and nothing else of it."""

from array import array
from pathlib import Path

import pytest

from llmtap.bench.run.loads import Load
from llmtap.bench.tests.mixes import PRIMER_TOKENS, prefixes_of
from llmtap.errors import ConfigError
from llmtap.workload.prompts.counter import as_text
from llmtap.workload.prompts.prompt import Prompt
from llmtap.workload.prompts.words import count_tokens
from llmtap.workload.sharing import NO_CONTEXT

CODE = prefixes_of("code-completion")


def prompts(load: Load) -> list[Prompt]:
    assert load.plan.prompts is not None
    return [load.plan.prompts.prompt(row) for row in range(len(load.plan.requests))]


def test_other_words_are_the_same_work() -> None:
    first, again, other = (CODE.open(40, 7, texts, 3.0) for texts in (1, 1, 2))
    for load in (again, other):
        assert load.plan.requests.input == first.plan.requests.input
        assert load.plan.requests.output == first.plan.requests.output
        assert load.plan.requests.arrival_ns == first.plan.requests.arrival_ns
        assert load.plan.requests.blocks == first.plan.requests.blocks
    ours, same, others = prompts(first), prompts(again), prompts(other)
    assert ours == same
    contexts, _ = CODE.shared(40, 7)
    for a, b, context in zip(ours, others, contexts, strict=True):
        assert a.text[:30] != b.text[:30]
        assert bool(a.system) == bool(b.system) == (context != NO_CONTEXT)
        # The first words already: a cache finds not even one block.
        assert not a.system or a.system[:30] != b.system[:30]
    assert first.fingerprint() == again.fingerprint() != other.fingerprint()


def test_prefixes_have_their_lengths_and_are_one_text_each() -> None:
    load = CODE.closed(60, 3, 9, slots=4)
    contexts, lengths = CODE.shared(60, 3)
    assert len(lengths) == 10
    assert all(512 <= tokens <= 1_024 for tokens in lengths)
    seen: dict[int, str] = {}
    for prompt, context, tokens in zip(prompts(load), contexts, load.plan.requests.input, strict=True):
        if context != NO_CONTEXT:
            assert seen.setdefault(context, prompt.system) == prompt.system
            assert count_tokens(prompt.system) == lengths[context]
        assert count_tokens(as_text(prompt)) == tokens
    assert len(set(seen.values())) == len(seen) > 3


def test_a_primer_has_each_prefix_once_and_no_message_of_the_load() -> None:
    load, primer = CODE.open(60, 3, 9, 5.0), CODE.primer(3, 9)
    contexts, lengths = CODE.shared(60, 3)
    primed = prompts(primer)
    assert primer.closed == 1
    assert list(primer.plan.requests.input) == [tokens + PRIMER_TOKENS for tokens in lengths]
    assert set(primer.plan.requests.output) == {1}
    of_load = prompts(load)
    for prompt, context in zip(of_load, contexts, strict=True):
        if context != NO_CONTEXT:
            assert primed[context].system == prompt.system
    assert not {p.text[:20] for p in primed} & {p.text[:20] for p in of_load}


def test_sharing_and_lengths_may_be_others() -> None:
    work = prefixes_of("conversation", fraction=1.0, tokens=(64, 64), contexts=2, output_tokens=5)
    contexts, lengths = work.shared(50, 1)
    assert list(lengths) == [64, 64]
    assert set(contexts) == {0, 1}
    assert work.open(50, 1, 1, 2.0).plan.requests.output == array("q", [5]) * 50


def test_a_workload_of_ones_own_gets_prefixes(tmp_path: Path) -> None:
    file = tmp_path / "plain.toml"
    file.write_text("input = 40\noutput = 8\n")
    work = prefixes_of(str(file), tokens=(128, 128))
    assert set(work.closed(10, 1, 1, 2).plan.requests.input) == {168}
    with pytest.raises(ConfigError, match="share no prefix") as caught:
        prefixes_of(str(file))
    assert caught.value.place == "prefix_tokens"


@pytest.mark.parametrize("name", ["synthetic-uniform", "no-such-workload", "trace.csv"])
def test_texts_that_cannot_be_written_anew_are_refused(name: str) -> None:
    with pytest.raises(ConfigError) as caught:
        prefixes_of(name, tokens=(16, 16))
    assert caught.value.place == "workload"


def test_conversations_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "talk.toml"
    file.write_text(
        'input = 40\noutput = 8\n[conversations]\nturns = { distribution = "fixed", tokens = 3 }\n'
    )
    with pytest.raises(ConfigError, match="conversations"):
        prefixes_of(str(file), tokens=(16, 16))

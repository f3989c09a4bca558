"""A fitted prompt has the tokens it says, by the tokenizer's own count of the whole; if not those wanted,
then as near as could be.

With three tokenizers: a model's with its chat template, our own, and tiktoken's engine.
"""

from array import array
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmtap.workload.prompts.fitting import (
    BATCH_ROWS,
    BATCH_TOKENS,
    ElasticPrompts,
    FittedSource,
    RowPrompts,
    row_batches,
)
from llmtap.workload.prompts.prompt import Fit, Prompt
from llmtap.workload.prompts.prose import prose
from llmtap.workload.prompts.text import count_tokens
from llmtap.workload.prompts.tokenizer import (
    OwnTokenizer,
    TokenCounter,
    Tokenizer,
    as_text,
    load_counter,
)
from llmtap.workload.requests import Requests
from tests.support.workloads.model_folder import model_folder, ours_in_tiktoken

tokenizers = pytest.importorskip("tokenizers", reason="the extra `tokenizers` is not installed")
tiktoken = pytest.importorskip("tiktoken", reason="the extra `tokenizers` is not installed")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model_folder(tmp_path_factory.mktemp("model"))


Counters = dict[str, tuple[TokenCounter, Callable[[Prompt], int]]]


@pytest.fixture(scope="module")
def counters(folder: Path) -> Counters:
    """By name: the counter, and a judge that counts without any of our code."""
    model = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    encoding = tiktoken.Encoding(**ours_in_tiktoken("ours"))

    class InTiktoken(OwnTokenizer):
        name = "tiktoken:ours"

        def counts(self, texts: Sequence[str]) -> list[int]:
            return [len(ids) for ids in encoding.encode_ordinary_batch(list(texts))]

        def encode(self, text: str) -> Sequence[int]:
            return encoding.encode_ordinary(text)

        def decode(self, ids: Sequence[int]) -> str | None:
            return encoding.decode(list(ids))

    def by_template(prompt: Prompt) -> int:
        output = [("system", prompt.system)] if prompt.system else []
        output += [*prompt.history, ("user", prompt.text)]
        text = "".join(f"<|im_start|>{role}\n{content}<|im_end|>\n" for role, content in output)
        return len(model.encode(text + "<|im_start|>assistant\n", add_special_tokens=False).ids)

    return {
        "chat": (load_counter(str(folder), chat=True, place="--tokenizer"), by_template),
        "own": (load_counter("sim", chat=True, place="--tokenizer"), lambda p: count_tokens(as_text(p))),
        "tiktoken": (TokenCounter(InTiktoken()), lambda p: len(encoding.encode_ordinary(as_text(p)))),
    }


def rows_of(inputs: Sequence[int]) -> Requests:
    n = len(inputs)
    return Requests(array("q", range(n)), array("q", inputs), array("q", [1] * n))


WAYS = {"chat": "chat template", "own": "reference tokenizer", "tiktoken": "reference tokenizer"}


@pytest.mark.parametrize("name", WAYS)
@settings(max_examples=25)
@given(
    system=st.sampled_from(["", "suza broxi is what you are"]),
    inputs=st.lists(st.integers(1, 700), min_size=1, max_size=6),
    seed=st.integers(0, 99),
)
def test_rows_have_exactly_their_tokens(
    counters: Counters, name: str, system: str, inputs: list[int], seed: int
) -> None:
    counter, judge = counters[name]
    least = judge(Prompt(text=counter.words.table[0], system=system))
    made = RowPrompts(rows_of(inputs), counter, seed=seed, system=system).prompts(range(len(inputs)))
    for wanted, (prompt, fitted) in zip(inputs, made, strict=True):
        assert fitted.tokens == judge(prompt) == max(wanted, least)
        assert (fitted.wanted_tokens, fitted.method, fitted.text) == (wanted, WAYS[name], prompt.text)
        assert (fitted.is_exact, fitted.excess_tokens) == (wanted >= least, max(0, least - wanted))
        assert prompt.system == system


def test_a_row_is_the_same_whoever_is_asked_with_it(counters: Counters) -> None:
    counter, _ = counters["chat"]
    inputs = [300, 20, 300, 64, 500]
    source = RowPrompts(rows_of(inputs), counter, seed=5)
    together = [prompt for prompt, _ in source.prompts(range(5))]
    assert [source.prompt(row) for row in (4, 3, 2, 1, 0)] == together[::-1]
    assert together[0] != together[2]
    assert isinstance(source, FittedSource)


def test_blocks_are_shared_by_the_servers_count(counters: Counters, folder: Path) -> None:
    """The server cuts what the template made into blocks of 64: rows share just those that the trace says."""
    counter, _ = counters["chat"]
    blocks = [(1, 2, 3), (1, 2, 4), (1, 2, 3, 5), (6, 7)]
    requests = rows_of([64 * len(ids) + 30 for ids in blocks])
    requests.blocks, requests.block_tokens = blocks, 64
    source = RowPrompts(requests, counter, seed=3)
    seen: list[list[int]] = []
    for prompt, fitted in source.prompts(range(4)):
        rendered = counter._render(prompt)
        seen.append(list(counter.tokenizer.encode(rendered)))
        assert len(seen[-1]) == fitted.tokens == fitted.wanted_tokens

    def whole_blocks_shared(a: int, b: int) -> int:
        alike = next(i for i, (x, y) in enumerate(zip(seen[a], seen[b], strict=False)) if x != y)
        return alike // 64

    pairs = ((0, 1), (0, 2), (1, 2), (0, 3))
    assert [whole_blocks_shared(*pair) for pair in pairs] == [2, 3, 2, 0]


class _ThreeAWord(OwnTokenizer):
    """A word is three tokens, and `a` is one."""

    def counts(self, texts: Sequence[str]) -> list[int]:
        return [sum(1 if word == "a" else 3 for word in text.split()) for text in texts]


class _Counting(TokenCounter):
    """Counts how often it is asked, and for how much."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        super().__init__(tokenizer)
        self.asked: list[int] = []

    def count(self, prompts: Sequence[Prompt]) -> list[int]:
        self.asked.append(len(prompts))
        return super().count(prompts)


def test_where_words_are_tokens_all_is_counted_once() -> None:
    counter = _Counting(OwnTokenizer())
    RowPrompts(rows_of([100, 200, 300]), counter).prompts(range(3))
    assert counter.asked == [3]


def test_where_words_are_several_tokens_atoms_fill_what_is_left() -> None:
    counter = _Counting(_ThreeAWord())
    source = RowPrompts(rows_of([100, 101, 102, 3, 2]), counter)
    made = [fitted for _, fitted in source.prompts(range(5))]
    assert [fitted.tokens for fitted in made] == [100, 101, 102, 3, 3]
    assert made[0].text.endswith(" a")
    assert [fitted.is_exact for fitted in made] == [True, True, True, True, False]
    assert len(counter.asked) <= 5


class _Even(OwnTokenizer):
    """All texts have an even count."""

    def counts(self, texts: Sequence[str]) -> list[int]:
        return [2 * len(text.split()) for text in texts]


def test_what_cannot_be_met_comes_as_near_as_it_can() -> None:
    made = RowPrompts(rows_of([101, 100]), TokenCounter(_Even())).prompts(range(2))
    assert [abs(fitted.excess_tokens) for _, fitted in made] == [1, 0]


class _Elastic:
    """A conversation of any length, by our own tokenizer, as the workloads write them."""

    def __init__(self, requests: Requests, fit: Fit | None = None) -> None:
        self._requests = requests
        self._fit: Fit = fit or (lambda made, n: made(n))

    def prompt(self, row: int) -> Prompt:
        return self.resized_prompt(row, self._requests.input[row])

    def resized_prompt(self, row: int, tokens: int) -> Prompt:
        turns = row % 3
        history = tuple(
            (("user", "assistant")[i % 2], self._fit(partial(prose, key=f"{row}/{i}"), 11))
            for i in range(2 * turns)
        )
        message = max(1, tokens - 22 * turns - 40)
        return Prompt(
            text=self._fit(lambda n: prose(n, f"{row}"), message),
            system=self._fit(lambda n: prose(n, "context"), 40),
            history=history,
        )

    def with_fit(self, fit: Fit) -> "_Elastic":
        return _Elastic(self._requests, fit)


@pytest.mark.parametrize("name", WAYS)
def test_a_workloads_own_texts_get_their_lengths_and_keep_their_context(
    counters: Counters, name: str
) -> None:
    counter, judge = counters[name]
    requests = rows_of([300, 301, 302, 303, 304, 200, 450, 299])
    made = ElasticPrompts(_Elastic(requests), requests, counter).prompts(range(8))
    assert [judge(prompt) for prompt, _ in made] == list(requests.input)
    assert all(fitted.is_exact for _, fitted in made)
    assert len({prompt.system for prompt, _ in made}) == 1
    assert counter.tokenizer.counts([made[0][0].system]) == [40]


def test_a_completion_by_the_models_tokenizer_has_its_special_tokens(tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "bos")
    tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
        single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", 0)]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    counter = load_counter(str(folder), chat=False, place="--tokenizer")
    [(prompt, fitted)] = RowPrompts(rows_of([50]), counter).prompts([0])
    assert (fitted.tokens, fitted.method) == (50, "model tokenizer")
    assert len(tokenizer.encode(prompt.text).ids) == 50
    reference = load_counter(str(folder / "tokenizer.json"), chat=False, place="--tokenizer")
    assert reference.count([prompt]) == [49]


@given(st.lists(st.integers(0, 200_000), max_size=600))
def test_batches_are_bounded_and_lose_nobody(tokens: list[int]) -> None:
    batches = list(row_batches(range(len(tokens)), tokens))
    assert [row for batch in batches for row in batch] == list(range(len(tokens)))
    for batch in batches:
        assert 1 <= len(batch) <= BATCH_ROWS
        assert len(batch) == 1 or sum(tokens[row] for row in batch) <= BATCH_TOKENS

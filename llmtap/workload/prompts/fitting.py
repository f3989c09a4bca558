"""Make prompts of an exact number of tokens for any tokenizer, with only a few counts of tokens.

`fit` takes drafts and a `TokenCounter` and returns a prompt and its real length for each. `RowPrompts` makes
the prompts of traces without text, `ElasticPrompts` fits the texts of a workload; the bodies of a replay are
made from these prompts.

The counts so far give the tokens per word, from which the next number of words is guessed; the missing tokens
are filled with a repeated word. If a prompt cannot be fitted (the template alone is longer), the nearest
possible length is used, and the difference is reported.

Source: exo-bench's methodology, "Prompt Construction".
"""

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final, Protocol, runtime_checkable

from llmtap.workload.prompts.prompt import ElasticSource, Fit, Prompt
from llmtap.workload.prompts.text import RowText
from llmtap.workload.prompts.tokenizer import OWN, TokenCounter, Tokenizer, cut_text
from llmtap.workload.requests import Requests

ROUNDS: Final = 4
"""Maximum number of times that the number of words is guessed, from the tokens per word counted so far."""
SINGLE_TOKEN_WORDS_MAX: Final = 1.5
"""With fewer tokens per word, each word probably is one token, and only the assumed overhead is wrong."""
ATOM: Final = " a"
"""Word with which a prompt is filled up, mostly one token at a time."""
BATCH_TOKENS: Final = 100_000
"""Maximum number of tokens counted in one call, so that the memory of the tokenizer is bounded."""
BATCH_ROWS: Final = 256


@dataclass(frozen=True, slots=True)
class FittedPrompt:
    """A prompt with its number of tokens."""

    text: str
    tokens: int
    wanted_tokens: int
    """Number of tokens that the prompt should have."""
    method: str
    """Method of counting the tokens, see `TokenCounter.method`."""

    @property
    def is_exact(self) -> bool:
        return self.tokens == self.wanted_tokens

    @property
    def excess_tokens(self) -> int:
        """Difference from the planned length; negative if the prompt is too short."""
        return self.tokens - self.wanted_tokens


@dataclass(frozen=True, slots=True)
class Draft:
    """Wanted length of a prompt, and the function that makes it."""

    tokens: int
    """Number of tokens that the prompt should have."""
    make: Callable[[int], Prompt]
    """Function that makes a prompt with a number of words. More words must not give fewer tokens."""
    overhead: int = 0
    """Expected number of tokens in addition to the words. A wrong value only costs one more count."""


def fit(drafts: Sequence[Draft], counter: TokenCounter) -> list[tuple[Prompt, FittedPrompt]]:
    """Return a prompt for each draft. It has at least one word, because servers refuse empty messages."""
    searches = [_Search(draft) for draft in drafts]
    for guess in (*[_Search.guess] * ROUNDS, *[_Search.guess_atoms] * 2):
        open_ones = [search for search in searches if guess(search)]
        counts = counter.count([search.prompt for search in open_ones]) if open_ones else []
        for search, count in zip(open_ones, counts, strict=True):
            search.record_count(count)
    return [search.result(counter.method) for search in searches]


class _Search:
    """Search of the number of words that gives a prompt the wanted number of tokens."""

    def __init__(self, draft: Draft) -> None:
        self._draft = draft
        """What the prompt should be."""
        self._words = self._atoms = 0
        """Number of words and of atoms (short words that fill the rest) of the present prompt."""
        self.prompt = Prompt()
        self._tokens_by_size: dict[tuple[int, int], int] = {}
        """Counted tokens by the number of words and atoms (filling words)."""
        self._best_prompt: tuple[Prompt, int] | None = None
        """Prompt whose length is nearest to the wanted one, with its number of tokens."""
        self._longest_too_short: tuple[int, int, int] | None = None
        """Words, atoms and tokens of the longest prompt that is too short."""

    @property
    def _is_exact(self) -> bool:
        return self._best_prompt is not None and self._best_prompt[1] == self._draft.tokens

    def guess(self) -> bool:
        """Choose the next number of words. Return False if the length is exact or the number was tried."""
        if self._is_exact:
            return False
        wanted, overhead = self._draft.tokens, self._draft.overhead
        if not self._tokens_by_size:
            return self._set_size(wanted - overhead, 0)
        (words, last), *earlier = [(n, tokens) for (n, _), tokens in reversed(self._tokens_by_size.items())]
        by_word = (last - overhead) / words
        if earlier and earlier[0][1] != last:
            by_word = (earlier[0][1] - last) / (earlier[0][0] - words)
        if by_word <= 0 or (not earlier and by_word < SINGLE_TOKEN_WORDS_MAX):
            by_word = 1.0
        words += round((wanted - last) / by_word)
        if (words, 0) in self._tokens_by_size and self._longest_too_short is None:
            words = min(words for words, _ in self._tokens_by_size) - 1  # Shorter, so that atoms can fill it.
        return self._set_size(words, 0)

    def guess_atoms(self) -> bool:
        """Fill the longest prompt that is too short with atoms."""
        if self._is_exact or self._longest_too_short is None:
            return False
        words, atoms, tokens = self._longest_too_short
        return self._set_size(words, atoms + self._draft.tokens - tokens)

    def _set_size(self, words: int, atoms: int) -> bool:
        """Make the prompt of another size. Return False if this size was already tried."""
        words = max(1, words)
        if (words, atoms) in self._tokens_by_size:
            return False
        self._words, self._atoms = words, atoms
        prompt = self._draft.make(words)
        self.prompt = replace(prompt, text=prompt.text + ATOM * atoms) if atoms else prompt
        return True

    def record_count(self, count: int) -> None:
        wanted = self._draft.tokens
        self._tokens_by_size[self._words, self._atoms] = count
        if self._best_prompt is None or abs(count - wanted) < abs(self._best_prompt[1] - wanted):
            self._best_prompt = (self.prompt, count)
        if count <= wanted and (self._longest_too_short is None or self._longest_too_short[2] < count):
            self._longest_too_short = (self._words, self._atoms, count)

    def result(self, method: str) -> tuple[Prompt, FittedPrompt]:
        assert self._best_prompt is not None
        prompt, tokens = self._best_prompt
        return prompt, FittedPrompt(prompt.text, tokens, self._draft.tokens, method)


def row_batches(rows: Iterable[int], tokens: Sequence[int]) -> Iterator[list[int]]:
    """Yield lists of rows with a limited sum of tokens. Each list has at least one row."""
    batch: list[int] = []
    total = 0
    for row in rows:
        if batch and (len(batch) == BATCH_ROWS or total + tokens[row] > BATCH_TOKENS):
            yield batch
            batch, total = [], 0
        batch.append(row)
        total += tokens[row]
    if batch:
        yield batch


TOKEN_IDS: Final = "token ids"
"""Method of counting a prompt of token ids, which needs no tokenizer."""
TEXTS_CACHED_MAX: Final = 1_024
"""Maximum number of cached texts: each turn of a conversation contains the earlier texts again."""


@runtime_checkable
class FittedSource(Protocol):
    """PromptSource that makes many prompts in one call and returns their real lengths."""

    def prompt(self, row: int) -> Prompt: ...

    def prompts(self, rows: Sequence[int]) -> list[tuple[Prompt, FittedPrompt]]:
        """Return the prompts of these rows. This is faster than one call for each row."""
        ...


class RowPrompts:
    """Prompts with the lengths and shared blocks of a trace's rows. Each depends only on seed and row."""

    def __init__(self, requests: Requests, counter: TokenCounter, *, seed: int = 0, system: str = "") -> None:
        """`system`: system prompt of all rows. The lengths of the rows include it."""
        self._requests = requests
        self._counter = counter
        self._rows = RowText(requests, seed)
        self._system = system
        self._tokens_before, behind = counter.overhead(Prompt(system=system))
        self._overhead = self._tokens_before + behind
        """Number of tokens that the chat template and the system prompt add."""

    def prompt(self, row: int) -> Prompt:
        return self.prompts([row])[0][0]

    def prompts(self, rows: Sequence[int]) -> list[tuple[Prompt, FittedPrompt]]:
        return fit([self._draft(row) for row in rows], self._counter)

    def _draft(self, row: int) -> Draft:
        """Return what is needed to fit the length of a row's prompt."""
        text_of, key_of, before, system = (
            self._counter.words.text,
            self._rows.key,
            self._tokens_before,
            self._system,
        )
        return Draft(
            self._requests.input[row],
            lambda words: Prompt(text=text_of(key_of(row, words, before)), system=system),
            self._overhead,
        )


class ElasticPrompts:
    """Prompts with the texts of a workload, fitted to the rows' lengths.

    Each part is fitted separately, so that contexts stay shared. The message is shortened by the overhead
    (tokens of the chat template).
    """

    def __init__(self, source: ElasticSource, requests: Requests, counter: TokenCounter) -> None:
        tokenizer = counter.tokenizer
        self._source = source if tokenizer.name == OWN else source.with_fit(text_fit(tokenizer))
        self._requests = requests
        self._counter = counter
        self._overheads: dict[tuple[bool, int], int] = {}
        """Known overheads, by whether there is a system prompt and by the number of turns."""
        self._overhead = 0
        """Tokens of the latest prompt in addition to its words: the first guess for the next prompt."""

    def prompt(self, row: int) -> Prompt:
        return self.prompts([row])[0][0]

    def prompts(self, rows: Sequence[int]) -> list[tuple[Prompt, FittedPrompt]]:
        """Return the prompts of rows, with their numbers of tokens."""
        prompts_: dict[int, tuple[Prompt, FittedPrompt]] = {}
        makers: dict[int, _PromptMaker] = {}
        drafts: list[Draft] = []
        for row in rows:
            wanted, maker = self._requests.input[row], _PromptMaker(self._source, row)
            first = maker.make(max(1, wanted - self._overhead))
            if first.ids:
                prompts_[row] = (first, FittedPrompt("", len(first.ids), wanted, TOKEN_IDS))
            else:
                makers[row] = maker
                drafts.append(
                    Draft(wanted, maker.make, self._overheads.get(_prompt_shape(first), self._overhead))
                )
        for (row, maker), (prompt, fitted) in zip(makers.items(), fit(drafts, self._counter), strict=True):
            prompts_[row] = (prompt, fitted)
            if fitted.is_exact and prompt is maker.prompt:
                self._overhead = self._overheads[_prompt_shape(prompt)] = fitted.tokens - maker.words
        return [prompts_[row] for row in rows]


class _PromptMaker:
    """Makes the prompt of a row in any length, and keeps the latest one."""

    def __init__(self, source: ElasticSource, row: int) -> None:
        self._source = source
        self._row = row
        self.words = 0
        """Number of words of the latest prompt."""
        self.prompt = Prompt()

    def make(self, words: int) -> Prompt:
        if words != self.words:
            self.prompt = self._source.resized_prompt(self._row, words)
            self.words = words
        return self.prompt


def _prompt_shape(prompt: Prompt) -> tuple[bool, int]:
    """Return what the number of extra tokens (of a chat template) depends on."""
    return bool(prompt.system), len(prompt.history)


def text_fit(tokenizer: Tokenizer) -> Fit:
    """Return a function that makes texts of n tokens of this tokenizer, by cutting a longer text."""

    @functools.lru_cache(TEXTS_CACHED_MAX)
    def cut(text: str, tokens: int) -> tuple[str, int]:
        return cut_text(tokenizer, text, tokens)

    def fit_text(made: Callable[[int], str], tokens: int) -> str:
        size = tokens + tokens // 16 + 4
        best, count = cut(made(size), tokens)
        if count < tokens:
            # This tokenizer counts fewer tokens than `made` expects, so make a longer text.
            size = size * tokens // max(1, count) + 4
            again, more = cut(made(size), tokens)
            if more > count:
                best = again
        return best

    return fit_text

"""Prompts of exactly so many tokens, by any counter, in few countings.

Where each word is a token, as many words as are wanted without the overhead are the answer, and one counting
proves it. Where it is not, the countings so far say how many tokens a word has, and the next guess is by
that; what is left at last is filled with a repeated atom, as seed 003 does. What cannot be fitted (a template
that is longer than the whole prompt, a tokenizer in which the atom is several tokens) comes as near as it can
and says by how much it missed.

Source: seed 003, "Prompt Construction", which searches by bisection over the atom alone.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final

from llmtap.workload.prompts.counter import TokenCounter
from llmtap.workload.prompts.prompt import Prompt

__all__ = ["ATOM", "Draft", "Fitted", "fit", "in_batches"]

ROUNDS: Final = 4
"""Guesses by the tokens of a word; the second is right where only the overhead was unknown."""
ONE_A_WORD: Final = 1.5
"""Below so many tokens a word it is probably one each, and the overhead is more than was guessed."""
ATOM: Final = " a"
BATCH_TOKENS: Final = 100_000
"""Counted at a time: tokenizers keep a record of each token for as long."""
BATCH_ROWS: Final = 256


@dataclass(frozen=True, slots=True)
class Fitted:
    """A text, and how long the prompt is of which it is the user's part."""

    text: str
    tokens: int
    """Of the whole prompt, as it was counted."""
    wanted: int
    way: str
    """How it was counted: `TokenCounter.way`."""

    @property
    def exact(self) -> bool:
        return self.tokens == self.wanted

    @property
    def missed(self) -> int:
        """Tokens too many; too few, where it is negative."""
        return self.tokens - self.wanted


@dataclass(frozen=True, slots=True)
class Draft:
    """A prompt that is wanted."""

    tokens: int
    """Of the whole prompt."""
    make: Callable[[int], Prompt]
    """The prompt of so many words. More words are never fewer tokens."""
    overhead: int = 0
    """What the counter probably adds to the words. A wrong guess costs a counting."""


def fit(drafts: Sequence[Draft], counter: TokenCounter) -> list[tuple[Prompt, Fitted]]:
    """A prompt for each draft. None has less than one word: servers refuse a message of nothing."""
    searches = [_Search(draft) for draft in drafts]
    for guess in (*[_Search.guess] * ROUNDS, *[_Search.guess_filled] * 2):
        open_ones = [search for search in searches if guess(search)]
        counts = counter.count([search.prompt for search in open_ones]) if open_ones else []
        for search, count in zip(open_ones, counts, strict=True):
            search.hear(count)
    return [search.found(counter.way) for search in searches]


class _Search:
    """The guesses for one draft."""

    def __init__(self, draft: Draft) -> None:
        self._draft = draft
        self._words = self._atoms = 0
        self.prompt = Prompt()
        self._tried: dict[tuple[int, int], int] = {}
        """Tokens by words and atoms."""
        self._best: tuple[Prompt, int] | None = None
        self._below: tuple[int, int, int] | None = None
        """Words, atoms and tokens of what came nearest from below."""

    @property
    def _done(self) -> bool:
        return self._best is not None and self._best[1] == self._draft.tokens

    def guess(self) -> bool:
        """Takes as many words as should do. False where that is done, or was tried."""
        if self._done:
            return False
        wanted, overhead = self._draft.tokens, self._draft.overhead
        if not self._tried:
            return self._take(wanted - overhead, 0)
        (words, last), *earlier = [(n, tokens) for (n, _), tokens in reversed(self._tried.items())]
        by_word = (last - overhead) / words
        if earlier and earlier[0][1] != last:
            by_word = (earlier[0][1] - last) / (earlier[0][0] - words)
        if by_word <= 0 or (not earlier and by_word < ONE_A_WORD):
            by_word = 1.0
        words += round((wanted - last) / by_word)
        if (words, 0) in self._tried and self._below is None:
            words = min(words for words, _ in self._tried) - 1  # so that there is something to be filled
        return self._take(words, 0)

    def guess_filled(self) -> bool:
        """Takes what came nearest from below, and fills it with atoms."""
        if self._done or self._below is None:
            return False
        words, atoms, tokens = self._below
        return self._take(words, atoms + self._draft.tokens - tokens)

    def _take(self, words: int, atoms: int) -> bool:
        words = max(1, words)
        if (words, atoms) in self._tried:
            return False
        self._words, self._atoms = words, atoms
        prompt = self._draft.make(words)
        self.prompt = replace(prompt, text=prompt.text + ATOM * atoms) if atoms else prompt
        return True

    def hear(self, count: int) -> None:
        wanted = self._draft.tokens
        self._tried[self._words, self._atoms] = count
        if self._best is None or abs(count - wanted) < abs(self._best[1] - wanted):
            self._best = (self.prompt, count)
        if count <= wanted and (self._below is None or self._below[2] < count):
            self._below = (self._words, self._atoms, count)

    def found(self, way: str) -> tuple[Prompt, Fitted]:
        assert self._best is not None
        prompt, tokens = self._best
        return prompt, Fitted(prompt.text, tokens, self._draft.tokens, way)


def in_batches(rows: Iterable[int], tokens: Sequence[int]) -> Iterator[list[int]]:
    """The rows in lists of a bounded sum of tokens, at least one each."""
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

"""Sources of prompts whose lengths were counted: for traces, and for workloads that write their own texts."""

import functools
from collections.abc import Callable, Sequence
from typing import Final, Protocol, runtime_checkable

from llmtap.workload.prompts.counter import TokenCounter
from llmtap.workload.prompts.fitting import Draft, Fitted, fit
from llmtap.workload.prompts.prompt import ElasticSource, Fit, Prompt
from llmtap.workload.prompts.text import RowText
from llmtap.workload.prompts.tokenizer import OWN, Tokenizer, cut_text
from llmtap.workload.requests import Requests

__all__ = ["TOKEN_IDS", "ElasticPrompts", "FittedSource", "RowPrompts", "text_fit"]

TOKEN_IDS: Final = "token ids"
TEXTS_KEPT: Final = 1_024
"""Conversations say what was said before again with each turn."""


@runtime_checkable
class FittedSource(Protocol):
    """A PromptSource that says how long its prompts are, and makes many at once."""

    def prompt(self, row: int) -> Prompt: ...

    def prompts(self, rows: Sequence[int]) -> list[tuple[Prompt, Fitted]]:
        """Those of these rows, in this order. Costs less than one by one."""
        ...


class RowPrompts:
    """Prompts of the lengths that the rows of a trace have, with the sharing that their blocks tell.

    A row's text depends on the seed, its number, its blocks and its length alone.
    """

    def __init__(self, requests: Requests, counter: TokenCounter, *, seed: int = 0, system: str = "") -> None:
        """`system` stands before all of them, and counts."""
        self._requests = requests
        self._counter = counter
        self._rows = RowText(requests, seed)
        self._system = system
        self._before, behind = counter.overhead(Prompt(system=system))
        self._overhead = self._before + behind

    @property
    def sharing_exact(self) -> bool:
        """Blocks have as many tokens as the trace says. Not so where no word is one token."""
        return self._counter.words.exact

    def prompt(self, row: int) -> Prompt:
        return self.prompts([row])[0][0]

    def prompts(self, rows: Sequence[int]) -> list[tuple[Prompt, Fitted]]:
        return fit([self._draft(row) for row in rows], self._counter)

    def _draft(self, row: int) -> Draft:
        text_of, key_of, before, system = self._counter.words.text, self._rows.key, self._before, self._system
        return Draft(
            self._requests.input[row],
            lambda words: Prompt(text=text_of(key_of(row, words, before)), system=system),
            self._overhead,
        )


class ElasticPrompts:
    """Prompts of a workload that writes its own texts, made as long as its rows say by a counter.

    First each part is fitted by itself, so that contexts stay shared; then the message takes up what the
    counter adds. Prompts of token ids stay as they are.
    """

    def __init__(self, source: ElasticSource, requests: Requests, counter: TokenCounter) -> None:
        tokenizer = counter.tokenizer
        self._source = source if tokenizer.name == OWN else source.fitted(text_fit(tokenizer))
        self._requests = requests
        self._counter = counter
        self._overheads: dict[tuple[bool, int], int] = {}
        """What was seen to be added, by whether there is a system prompt and how many turns went before."""
        self._overhead = 0
        """What was seen last."""

    def prompt(self, row: int) -> Prompt:
        return self.prompts([row])[0][0]

    def prompts(self, rows: Sequence[int]) -> list[tuple[Prompt, Fitted]]:
        found: dict[int, tuple[Prompt, Fitted]] = {}
        makers: dict[int, _Maker] = {}
        drafts: list[Draft] = []
        for row in rows:
            wanted, maker = self._requests.input[row], _Maker(self._source, row)
            first = maker.make(max(1, wanted - self._overhead))
            if first.ids:
                found[row] = (first, Fitted("", len(first.ids), wanted, TOKEN_IDS))
            else:
                makers[row] = maker
                drafts.append(Draft(wanted, maker.make, self._overheads.get(_shape(first), self._overhead)))
        for (row, maker), (prompt, fitted) in zip(makers.items(), fit(drafts, self._counter), strict=True):
            found[row] = (prompt, fitted)
            if fitted.exact and prompt is maker.prompt:
                self._overhead = self._overheads[_shape(prompt)] = fitted.tokens - maker.words
        return [found[row] for row in rows]


class _Maker:
    """Makes one row's prompt in several sizes, and keeps the last."""

    def __init__(self, source: ElasticSource, row: int) -> None:
        self._source = source
        self._row = row
        self.words = 0
        self.prompt = Prompt()

    def make(self, words: int) -> Prompt:
        if words != self.words:
            self.prompt = self._source.sized(self._row, words)
            self.words = words
        return self.prompt


def _shape(prompt: Prompt) -> tuple[bool, int]:
    return bool(prompt.system), len(prompt.history)


def text_fit(tokenizer: Tokenizer) -> Fit:
    """Makes texts of n tokens by this tokenizer of such that were made by the project's own.

    A text that is a little too long is cut between two of its tokens, which takes a cutting and a counting
    whatever its length is.
    """

    @functools.lru_cache(TEXTS_KEPT)
    def cut(text: str, tokens: int) -> tuple[str, int]:
        return cut_text(tokenizer, text, tokens)

    def fitted(made: Callable[[int], str], tokens: int) -> str:
        size = tokens + tokens // 16 + 4
        best, count = cut(made(size), tokens)
        if count < tokens:
            # Our own tokenizer takes this text for longer than theirs does.
            size = size * tokens // max(1, count) + 4
            again, more = cut(made(size), tokens)
            if more > count:
                best = again
        return best

    return fitted

"""Prompts of the exo benchmark: an atom, repeated until the chat template's whole text has so many tokens.

The atom is seed 003's `a`, or where that is not one token a word that is.

All alike, or each with words of its own at its beginning, which count: then no two share more than what the
template puts in front, and no prefix cache is of use. Prompts that are alike begin alike at every length, as
seed 003's do, so that a longer one finds a shorter one's prefix.

Source: seed 003, "Prompt Construction", "Prefix Cache Mode".
"""

from collections.abc import Callable, Sequence
from typing import Final

from llmtap.workload.prompts.fitting import ATOM, Draft, Fitted, fit
from llmtap.workload.prompts.prompt import Prompt
from llmtap.workload.prompts.text import NAME_BYTES, Numbers
from llmtap.workload.prompts.tokenizer import TokenCounter

__all__ = ["Made", "PreparedPrompts", "Prompts"]

Made = tuple[Prompt, Fitted]
_IN_A_ROW: Final = 8
"""Atoms, to see whether each is a token."""


class Prompts:
    """Makes them, each anew, or always the same of a length."""

    def __init__(self, counter: TokenCounter, *, alike: bool, seed: int) -> None:
        self.alike = alike
        self._counter = counter
        self._numbers = Numbers(seed)
        self._given = 0
        self._overhead = sum(counter.overhead(Prompt()))
        self._atom = _atom(counter)
        self._known: dict[int, Made] = {}

    def smallest(self) -> int:
        """Tokens of the shortest prompt there is: one word in the template."""
        return fit([Draft(1, self._maker(0))], self._counter)[0][1].tokens

    def make(self, pp: int, n: int) -> list[Made]:
        """So many prompts of `pp` tokens each, as near as can be."""
        if self.alike:
            if pp not in self._known:
                self._known[pp] = self._fit(pp, [0])[0]
            return [self._known[pp]] * n
        first, self._given = self._given, self._given + n
        return self._fit(pp, range(first, first + n))

    def _fit(self, pp: int, numbers: Sequence[int]) -> list[Made]:
        return fit([Draft(pp, self._maker(number), self._overhead) for number in numbers], self._counter)

    def _maker(self, number: int) -> Callable[[int], Prompt]:
        if self.alike:
            return lambda words: Prompt(text=self._atom.lstrip() + self._atom * (words - 1))

        def begun(words: int) -> Prompt:
            name = self._numbers.row(number, min(words, NAME_BYTES))
            return Prompt(text=self._counter.words.text(name) + self._atom * (words - len(name)))

        return begun


def _atom(counter: TokenCounter) -> str:
    """With what stands before it."""
    if counter.tokenizer.counts([ATOM.lstrip() + ATOM * (_IN_A_ROW - 1)]) == [_IN_A_ROW]:
        return ATOM
    return counter.words.separator + counter.words.table[0]


class PreparedPrompts:
    """Prompts that are there, as a source of a plan: row by row."""

    def __init__(self, made: Sequence[Made]) -> None:
        self._made = made

    def prompt(self, row: int) -> Prompt:
        return self._made[row][0]

    def prompts(self, rows: Sequence[int]) -> list[Made]:
        return [self._made[row] for row in rows]

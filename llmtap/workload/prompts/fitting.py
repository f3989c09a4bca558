"""Prompts of exactly so many tokens, by any counter, in few countings.

Where each word is a token, as many words as are wanted without the overhead are the answer, and one counting
proves it. Where it is not, the countings so far say how many tokens a word has, and the next guess is by
that; what is left at last is filled with a repeated atom, as seed 003 does. What cannot be fitted (a template
that is longer than the whole prompt, a tokenizer in which the atom is several tokens) comes as near as it can
and says by how much it missed.

Source: seed 003, "Prompt Construction", which searches by bisection over the atom alone.
"""

import functools
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any, Final, Protocol, runtime_checkable

from llmtap.errors import ConfigError
from llmtap.workload.prompts.prompt import ElasticSource, Fit, Prompt
from llmtap.workload.prompts.text import COMMON, Numbers, RowText, Words
from llmtap.workload.prompts.tokenizer import (
    OWN,
    OwnTokenizer,
    TextCounter,
    TokenCounter,
    Tokenizer,
    cut_text,
)
from llmtap.workload.requests import Requests

__all__ = [
    "ATOM",
    "TOKEN_IDS",
    "USAGE",
    "Ask",
    "Calibration",
    "Draft",
    "ElasticPrompts",
    "Fitted",
    "FittedSource",
    "RowPrompts",
    "UsageCounter",
    "calibrate",
    "fit",
    "fit_by_usage",
    "in_batches",
    "input_tokens",
    "text_fit",
]


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


USAGE = "usage of the server"
PROBES: Final = (32, 128, 400)
"""Words of the texts that a line is laid through."""
CHECKS: Final = (64, 256)
"""Tokens of the prompts that are then aimed at, to see whether the line holds."""

Ask = Callable[[bytes], Awaitable[Mapping[str, Any]]]
"""Sends a body, and gives the `usage` of the answer."""


def input_tokens(usage: Mapping[str, Any], place: str = "usage") -> int:
    """The prompt's tokens. Raises ConfigError where the server does not tell them."""
    told = next((usage[key] for key in ("prompt_tokens", "input_tokens") if usage.get(key)), None)
    if not isinstance(told, int):
        raise ConfigError(
            place, "the server does not say how many tokens a prompt has",
            "give a tokenizer by which they can be counted",
        )  # fmt: skip
    return told


@dataclass(frozen=True, slots=True)
class Calibration:
    """prompt tokens = overhead + ratio x text tokens, the latter by our own counting."""

    overhead: Fraction
    ratio: Fraction
    samples: tuple[tuple[int, int], ...]
    """Text tokens as we count, prompt tokens as the server does."""

    @classmethod
    def of(cls, samples: Sequence[tuple[int, int]]) -> "Calibration":
        """The line of least squares; exactly of slope 1 where all samples lie on one.

        Raises ValueError for samples of less than two lengths.
        """
        if len({x for x, _ in samples}) < 2:
            raise ValueError("a line needs texts of at least two lengths")
        kept = tuple(samples)
        differences = {y - x for x, y in samples}
        if len(differences) == 1:
            return cls(Fraction(differences.pop()), Fraction(1), kept)
        n = len(samples)
        mean_x, mean_y = (Fraction(sum(column), n) for column in zip(*samples, strict=True))
        spread = sum(((x - mean_x) ** 2 for x, _ in samples), Fraction())
        ratio = sum(((x - mean_x) * (y - mean_y) for x, y in samples), Fraction()) / spread
        if ratio <= 0:
            raise ValueError("longer texts have no more tokens: the server does not count them")
        return cls(mean_y - ratio * mean_x, ratio, kept)

    @property
    def exact(self) -> bool:
        """Every sample is what the line says."""
        return self.missed_max == 0

    @property
    def missed_max(self) -> int:
        """By how much the line misses its samples at most, in tokens."""
        return max(abs(self.predicted(x) - y) for x, y in self.samples)

    def predicted(self, text_tokens: int) -> int:
        """What the server will say."""
        return round(self.overhead + self.ratio * text_tokens)

    def aim(self, prompt_tokens: int) -> int:
        """Text tokens for so many of the prompt; at least 1."""
        return max(1, round((prompt_tokens - self.overhead) / self.ratio))

    def with_samples(self, samples: Sequence[tuple[int, int]]) -> "Calibration":
        """Corrected by what was seen since."""
        return Calibration.of((*self.samples, *samples))

    def describe(self) -> dict[str, object]:
        """For the result: what the lengths rest on."""
        return {
            "way": USAGE, "overhead": float(self.overhead), "ratio": float(self.ratio), "exact": self.exact,
            "missed_max": self.missed_max, "samples": [list(sample) for sample in self.samples],
        }  # fmt: skip


class UsageCounter:
    """Counts as a calibrated server is expected to, a TokenCounter."""

    way = USAGE

    def __init__(self, calibration: Calibration) -> None:
        self.calibration = calibration
        self.tokenizer: Tokenizer = OwnTokenizer()
        self.words: Words = COMMON
        self._inner = TextCounter(self.tokenizer)

    def count(self, prompts: Sequence[Prompt]) -> list[int]:
        """By the texts of all messages. The calibration knows a single one: what further ones add, nobody
        measured."""
        counts = self._inner.count(prompts)
        return [len(p.ids) or self.calibration.predicted(n) for p, n in zip(prompts, counts, strict=True)]

    def overhead(self, like: Prompt) -> tuple[int, int]:
        # Where it stands is not known. Most of it stands before the text: a system prompt, the date, roles.
        before = self._inner.overhead(like)[0]
        return before + self.calibration.predicted(0), 0


async def calibrate(
    ask: Ask,
    body: Callable[[Prompt], bytes],
    *,
    text: Callable[[int, int], str] | None = None,
    lengths: Sequence[int] = (),
    rounds: int = 2,
    seed: int = 0,
) -> Calibration:
    """Asks the server about a few texts, then whether it was understood.

    Args:
        ask: sends one body at a time.
        body: makes one of a prompt; one token of output is enough.
        text: of a probe's number and its tokens by our own tokenizer, where the workload writes other texts
            than the common words that a trace's rows are made of.
        lengths: of prompts, in tokens, at which it is checked beside CHECKS.
        rounds: of checks; each corrects the line by what it saw.

    Raises:
        ConfigError: the server tells no prompt tokens, or the same for texts of all lengths.
    """
    numbers = Numbers(f"{seed}/probes")
    text_of = text or (lambda number, count: COMMON.text(numbers.row(number, count)))
    asked = 0

    async def tokens(count: int) -> int:
        nonlocal asked
        asked += 1
        return input_tokens(await ask(body(Prompt(text=text_of(asked, count)))))

    try:
        found = Calibration.of([(count, await tokens(count)) for count in PROBES])
        for _ in range(rounds):
            aims = {found.aim(wanted) for wanted in (*CHECKS, *lengths)}
            found = found.with_samples([(count, await tokens(count)) for count in sorted(aims)])
            if found.exact:
                break
    except ValueError as exc:
        raise ConfigError("usage", str(exc), "give a tokenizer by which prompts can be counted") from None
    return found


async def fit_by_usage(
    ask: Ask,
    body: Callable[[Prompt], bytes],
    draft: Draft,
    calibration: Calibration,
    *,
    rounds: int = 4,
) -> tuple[Prompt, Fitted]:
    """One prompt, tried on the server and corrected until its own count is the wanted one.

    The server has then seen it: for one prompt that many requests share (a barrier), not for a run that
    is to meet a cold cache.
    """
    words, atoms = calibration.aim(draft.tokens), 0
    best: tuple[Prompt, Fitted] | None = None
    for _ in range(rounds):
        prompt = draft.make(words)
        prompt = replace(prompt, text=prompt.text + ATOM * atoms)
        fitted = Fitted(prompt.text, input_tokens(await ask(body(prompt))), draft.tokens, USAGE)
        if best is None or abs(fitted.missed) < abs(best[1].missed):
            best = prompt, fitted
        missed = fitted.missed
        if not missed:
            break
        if missed <= atoms:
            atoms -= missed
        elif words > 1:
            # A little shorter than the line says, so that atoms, of which one is one token, can fill it.
            words = max(1, words - int((missed - atoms) / calibration.ratio) - 1)
            atoms = 0
        else:
            break
    assert best is not None
    return best

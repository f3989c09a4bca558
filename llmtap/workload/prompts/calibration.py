"""Lengths by the server's own word: what `usage` says of a few texts tells what it will say of all.

For words that are one token each the server's count is the words plus what its chat template adds, and two
texts of different length show it: the slope is exactly 1, and all that comes is exact. For others it is a
line through the samples, right but for what words differ in; then each prompt that must be exact is tried
and corrected, or the miss is told.

Probes have texts of their own, so that they warm no cache for what is measured afterwards.
"""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any, Final

from llmtap.errors import ConfigError
from llmtap.workload.prompts.counter import TextCounter
from llmtap.workload.prompts.fitting import ATOM, Draft, Fitted
from llmtap.workload.prompts.prompt import Prompt
from llmtap.workload.prompts.text import COMMON, Numbers, Words
from llmtap.workload.prompts.tokenizer import OwnTokenizer, Tokenizer

__all__ = ["USAGE", "Ask", "Calibration", "UsageCounter", "calibrate", "fit_by_usage", "input_tokens"]

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

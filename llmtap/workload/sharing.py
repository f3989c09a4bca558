"""Prompts that begin alike: a share of the requests starts with one of some contexts.

A context (a system prompt, the files of a repository) comes before the message, and its tokens on top of the
message's. Which context it is, is uniform or Zipf's: the k-th has a share proportional to k^-s.

A simulator sees the sharing as blocks (`Requests.blocks`), a server as the context's text, of exactly so many
tokens; both are made from the same numbers.
"""

import itertools
from bisect import bisect_right
from collections.abc import Iterator, Mapping
from random import Random
from typing import Annotated, Any, Final

import msgspec

from llmtap.workload.lengths import Fixed, Lengths, described, drawn

__all__ = ["BLOCK_TOKENS", "NO_CONTEXT", "SharedBlocks", "Sharing", "zipf_shares"]

BLOCK_TOKENS: Final = 16
"""As vLLM's; the block of a prefix cache, of which only whole ones are found again."""
NO_CONTEXT: Final = -1
_CONTEXTS_MAX: Final = 100_000
"""Each one's text stays in memory once it was made: of 1,000 tokens, half a GB of them."""


class Sharing(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Who shares what."""

    fraction: Annotated[float, msgspec.Meta(ge=0, le=1)]
    """Of the requests, or of the conversations where there are any."""
    tokens: Annotated[int, msgspec.Meta(ge=1, le=1 << 24)] | Lengths
    """Length of a context."""
    contexts: Annotated[int, msgspec.Meta(ge=1, le=_CONTEXTS_MAX)] = 1
    zipf: Annotated[float, msgspec.Meta(ge=0)] = 0.0
    """The exponent s; 0 makes all contexts as likely."""

    @property
    def tokens_drawn(self) -> Lengths:
        """The distribution of the contexts' lengths."""
        return Fixed(tokens=self.tokens) if isinstance(self.tokens, int) else self.tokens

    def lengths(self, seed: int) -> tuple[int, ...]:
        """Tokens of each context, from the most popular."""
        random = Random(f"{seed}/context lengths")
        return tuple(drawn(self.tokens_drawn, random) for _ in range(self.contexts))

    def choices(self, random: Random) -> Iterator[int]:
        """The context of one request after the other, NO_CONTEXT where it shares none; endless.

        Each takes one number of `random`.
        """
        ends = [self.fraction * end for end in itertools.accumulate(zipf_shares(self.contexts, self.zipf))]
        while True:
            u = random.random()
            # The last end is the fraction but for rounding.
            yield min(bisect_right(ends, u), self.contexts - 1) if u < self.fraction else NO_CONTEXT

    def describe(self) -> Mapping[str, Any]:
        return {
            "fraction": self.fraction,
            "contexts": self.contexts,
            "popularity": {"distribution": "zipf", "s": self.zipf}
            if self.zipf
            else {"distribution": "uniform"},
            "tokens": described(self.tokens_drawn),
            "block_tokens": BLOCK_TOKENS,
        }


def zipf_shares(count: int, s: float) -> list[float]:
    """The share of each of `count`, from the most popular: k^-s / sum of all."""
    weights = [k**-s for k in range(1, count + 1)]
    whole = sum(weights)
    return [weight / whole for weight in weights]


class SharedBlocks:
    """Numbers for the whole blocks of prompts: the same where, and as far as, prompts begin alike."""

    def __init__(self, lengths: tuple[int, ...] = ()) -> None:
        """`lengths`: tokens of each context."""
        self._next = itertools.count()
        self._contexts = [self._new(tokens // BLOCK_TOKENS) for tokens in lengths]

    def _new(self, count: int) -> tuple[int, ...]:
        return tuple(itertools.islice(self._next, max(0, count)))

    def of(self, tokens: int, context: int = NO_CONTEXT, before: tuple[int, ...] = ()) -> tuple[int, ...]:
        """A prompt's blocks, which begins with those `before`, else with its context's."""
        begun = before or (() if context == NO_CONTEXT else self._contexts[context])
        # A block that is partly the context's is the prompt's own: the numbers say what all of it holds.
        return begun + self._new(tokens // BLOCK_TOKENS - len(begun))

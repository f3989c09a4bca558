"""What a request says, before it is anybody's JSON."""

import sys
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Final, Protocol

from llmtap.workload.requests import Requests

__all__ = [
    "CL100K_IDS", "ElasticSource", "Fit", "Prompt", "PromptSource", "Workload", "count_ids", "random_ids",
]  # fmt: skip


Fit = Callable[[Callable[[int], str], int], str]
"""`fit(made, n)`: the text of n tokens by the tokenizer in use, where `made(k)` is a text of k tokens by the
project's own, and of more tokens the longer k is. For the same text and n it gives the same always."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """One of `text` and `ids`, and what stands before it."""

    text: str = ""
    """The user's message."""
    ids: Sequence[int] = ()
    """The prompt as tokens, where a workload prescribes them (IETF seed 000, A.1.4)."""
    system: str = ""
    """The system prompt; most shared prefixes are one."""
    history: tuple[tuple[str, str], ...] = ()
    """Earlier turns of the conversation: role and text, from the first."""


class PromptSource(Protocol):
    """Makes prompts; the same for a row always, in whatever order it is asked."""

    def prompt(self, row: int) -> Prompt:
        """The prompt of a row, of as many tokens as its `Requests.input` says by the tokenizer in use."""
        ...


class ElasticSource(PromptSource, Protocol):
    """One whose texts are made, and so can be made longer or shorter."""

    def sized(self, row: int, tokens: int) -> Prompt:
        """The row's prompt of `tokens` in all; contexts and history stay, the message has what is left, and
        one token at least. A prompt of ids stays as it is."""
        ...

    def fitted(self, fit: Fit) -> "ElasticSource":
        """The same source with each of its parts (system prompt, message, earlier turn) made by `fit`.

        What several prompts share they still share, which they would not if each were cut as a whole.
        """
        ...


class Workload(Protocol):
    """Requests as somebody described them: lengths, sharing, conversations. Arrivals are told apart."""

    @property
    def name(self) -> str: ...

    def describe(self) -> Mapping[str, object]:
        """All that makes it again, as JSON: distributions, caps, sharing, sources with their versions."""
        ...

    def requests(self, count: int, seed: int) -> Requests:
        """So many of them; `arrival_ns` is all 0."""
        ...

    def prompts(self, requests: Requests, seed: int) -> PromptSource:
        """What those requests say."""
        ...


CL100K_IDS: Final = 100_256
"""Ids of cl100k_base without the special ones: seed 000, A.1.4 draws from 0 to 100255."""
_WORD_BITS: Final = 32


def random_ids(random: Random, count: int, below: int = CL100K_IDS) -> list[int]:
    """What `[random.randint(0, below - 1) for _ in range(count)]` gives; `below` is at most 2^32 - 1."""
    shift = _WORD_BITS - below.bit_length()
    ids: list[int] = []
    while len(ids) < count:
        ids += [i for word in _words(random, count - len(ids)) if (i := word >> shift) < below]
    return ids


def count_ids(random: Random, count: int, below: int = CL100K_IDS) -> None:
    """Leaves the generator where `random_ids` would."""
    limit = below << (_WORD_BITS - below.bit_length())
    while count:
        count -= sum(word < limit for word in _words(random, count))


def _words(random: Random, count: int) -> "array[int]":
    # The first word drawn is the lowest of the number.
    words = array("I", random.getrandbits(_WORD_BITS * count).to_bytes(4 * count, "little"))
    if sys.byteorder == "big":
        words.byteswap()
    return words

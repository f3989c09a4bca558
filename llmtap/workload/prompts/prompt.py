"""The type of prompts (`Prompt`), the interfaces of workloads and of their prompts, and random token ids.

`workload/registry.py` returns a `Workload` for a name; a `PromptSource` or an `ElasticSource` makes the
prompt of a row. `random_ids` draws ids for prompts that are sent as tokens.
"""

import sys
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Final, Protocol

from llmtap.workload.requests import Requests

Fit = Callable[[Callable[[int], str], int], str]
"""Function `fit(made, n)` that returns a text of n tokens of the tokenizer in use. `made(k)` returns a text
of k tokens of llmtap's own tokenizer; a larger k gives a longer text. Equal arguments give equal texts."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt: either `text` or `ids`, with system prompt and earlier turns."""

    text: str = ""
    ids: Sequence[int] = ()
    """The prompt as token ids, if the workload defines them (IETF draft, A.1.4)."""
    system: str = ""
    """System prompt; most shared prefixes are system prompts."""
    history: tuple[tuple[str, str], ...] = ()
    """Role and text of each earlier turn, from the first one."""


class PromptSource(Protocol):
    """Makes the prompts of rows, in any order; a row always has the same prompt."""

    def prompt(self, row: int) -> Prompt:
        """Return the prompt of a row. It has `Requests.input` tokens of the tokenizer in use."""
        ...


class ElasticSource(PromptSource, Protocol):
    """PromptSource whose texts can be made longer or shorter."""

    def resized_prompt(self, row: int, tokens: int) -> Prompt:
        """Return the row's prompt with `tokens` tokens in total. Prompts of ids do not change.

        Only the length of the message changes; it has at least one token.
        """
        ...

    def with_fit(self, fit: Fit) -> "ElasticSource":
        """Return this source with each part made by `fit`. Prompts that share a part still share it."""
        ...


class Workload(Protocol):
    """Requests with their lengths, shared prefixes and conversations. Arrivals are separate."""

    @property
    def name(self) -> str: ...

    def describe(self) -> Mapping[str, object]:
        """Return all parameters as JSON: distributions, limits, sharing, sources with versions."""
        ...

    def requests(self, count: int, seed: int) -> Requests:
        """Return `count` requests without arrivals; the same seed makes the same ones."""
        ...

    def prompts(self, requests: Requests, seed: int) -> PromptSource:
        """Return what makes the texts of the prompts."""
        ...


CL100K_IDS: Final = 100_256
"""Number of ids of cl100k_base without special tokens: the IETF draft, A.1.4, draws from 0 to 100255."""
_WORD_BITS: Final = 32


def random_ids(random: Random, count: int, below: int = CL100K_IDS) -> list[int]:
    """Return the same ids as `[random.randint(0, below - 1) for _ in range(count)]`, but faster.

    `below` must be at most 2^32 - 1.
    """
    shift = _WORD_BITS - below.bit_length()
    ids: list[int] = []
    while len(ids) < count:
        ids += [i for word in _random_words(random, count - len(ids)) if (i := word >> shift) < below]
    return ids


def skip_ids(random: Random, count: int, below: int = CL100K_IDS) -> None:
    """Draw the same random numbers as `random_ids`, but do not make the ids."""
    limit = below << (_WORD_BITS - below.bit_length())
    while count:
        count -= sum(word < limit for word in _random_words(random, count))


def _random_words(random: Random, count: int) -> "array[int]":
    # getrandbits() puts the first 32-bit word into the lowest bits: little-endian order is the drawing order.
    words = array("I", random.getrandbits(_WORD_BITS * count).to_bytes(4 * count, "little"))
    if sys.byteorder == "big":
        words.byteswap()
    return words

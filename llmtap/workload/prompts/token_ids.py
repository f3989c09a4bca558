"""Random token ids, as many `randint(0, n - 1)` of one generator would give, by the batch.

CPython's `randint` takes a word of 32 bits of the generator for each number, of which the highest bits count,
and takes another where the number is too large. Here as many words are taken as ids are missing, until none
is: never one too many, so the generator is then where `randint` would have left it. That `randint` goes on to
do so is a test's business.
"""

import sys
from array import array
from random import Random
from typing import Final

__all__ = ["CL100K_IDS", "count_ids", "random_ids"]

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

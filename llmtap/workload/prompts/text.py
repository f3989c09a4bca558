"""Text by number: the same words always, for a block of a trace, for a row, for a probe.

A text is a string of bytes first, a byte for each word, and a table of 256 words makes text of it. Tables are
chosen so that a word is one token, whatever stands before it (`vocabulary.py`), so n bytes are n tokens, two
texts share as many leading tokens as their bytes do, and cutting a text to a length is cutting bytes.

The bytes of number x begin with its name: NAME_BYTES of it, multiplied by an odd constant modulo 2^72, the
lowest first. Two numbers never have the same name, and 256 numbers in a row differ in the first word already,
65,536 in the first two: no prefix is shared that was not to be. Then SHAKE128 goes on for as long as wanted.
Nothing here depends on the process (PYTHONHASHSEED) or on Python's own generators.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import shake_128
from typing import Final

from llmtap.workload.requests import Requests

__all__ = ["COMMON", "NAME_BYTES", "Numbers", "RowText", "Words"]

NAME_BYTES: Final = 9
"""Enough for ids of 64 bits and what kind of number it is."""
_SPACE: Final = 1 << 8 * NAME_BYTES
_ODD: Final = 0x9E3779B97F4A7C15F5 | 1
"""2^72 by the golden ratio: names of neighbours lie far apart."""

_COMMON: Final = """
about after all also am an and any are as ask at away back be before best big black blue book build but by
call can case change city clear close come country course cut day do done door down draw each end even
ever example eye face fall far fast field fill find fire first fish fly food foot for form found friend
from full get go good got green ground group had hand hard has he head help her here high hold home house
how if in into is it its just keep kind king land language large last late learn left less let letter life
light like line list long look low make man map mark may me mean men more most move my name need new next
night no not note now number of off old on once one only open or order other our out over own page paper
part pass people piece place plain plan plant play point port power press question ran reach read ready
real red rest river road rock room round run second see set shall ship short should show side since small
so some space stand star start state step stone stop strong system table ten that the then there thing
this though through time to token top tree true try turn under up us use very voice wait walk was watch
water way we week well west what when where which while white who will wind with wood word work world
write year yes you
"""


@dataclass(frozen=True, slots=True)
class Words:
    """A word for each byte, and what stands between two of them."""

    table: tuple[str, ...]
    separator: str = " "
    exact: bool = True
    """Each is one token by the tokenizer that they were chosen for, so that words are tokens."""

    def __post_init__(self) -> None:
        assert len(self.table) == 256

    @classmethod
    def made_of(cls, words: Sequence[str], separator: str = " ", *, exact: bool = True) -> "Words":
        """Of at least one word: as many as the largest power of two in their number, at most 256.

        Fewer than 256 come again and again in the table: names then differ by fewer bits of each byte, from
        the lowest, so that what was said of neighbours holds for as many of them as there are words.
        """
        size = min(256, 1 << (len(words).bit_length() - 1))
        return cls(tuple(words[:size]) * (256 // size), separator, exact)

    @property
    def distinct(self) -> int:
        return len(set(self.table))

    def text(self, key: bytes) -> str:
        """The words of those bytes."""
        return self.separator.join(map(self.table.__getitem__, key))


COMMON: Final = Words.made_of(_COMMON.split())
"""Words that are one token each, after a space and without one, by cl100k, o200k, by Anthropic's published
tokenizer and by our own; so most probably by others, too."""


class Numbers:
    """The bytes of numbers, under a seed: another one gives all of them another text."""

    def __init__(self, seed: int | str = 0) -> None:
        self._seed = f"{seed}/".encode()
        self._offset = int.from_bytes(shake_128(b"llmtap text " + self._seed).digest(NAME_BYTES))

    def block(self, number: int, tokens: int) -> bytes:
        """The block of this id (of a signed or an unsigned 64-bit number)."""
        return self._bytes((number & 0xFFFF_FFFF_FFFF_FFFF) << 1, tokens)

    def row(self, number: int, tokens: int) -> bytes:
        """What is this row's alone. Never begins with the word that a block begins with."""
        return self._bytes(number << 1 | 1, tokens)

    def _bytes(self, x: int, tokens: int) -> bytes:
        name = ((x * _ODD + self._offset) % _SPACE).to_bytes(NAME_BYTES, "little")
        if tokens <= NAME_BYTES:
            return name[: max(0, tokens)]
        return name + shake_128(self._seed + b"%d" % x).digest(tokens - NAME_BYTES)


class RowText:
    """The bytes of each row of a workload: those of its blocks, then its own.

    Rows share as many leading bytes as they share leading blocks, and differ from then on.
    """

    def __init__(self, requests: Requests, seed: int = 0) -> None:
        self._requests = requests
        self._numbers = Numbers(seed)

    def key(self, row: int, tokens: int, before: int = 0) -> bytes:
        """So many words of a row.

        Args:
            before: tokens that the server puts before the text (the chat template's). They count for the
                first block, whose end is left out for them, so that the blocks end for the server where
                they end in the trace.
        """
        requests, numbers = self._requests, self._numbers
        pieces: list[bytes] = []
        if requests.blocks and (size := requests.block_tokens):
            lost, cut = divmod(before, size)
            pieces = [numbers.block(block, size) for block in requests.blocks[row][lost:]]
            if pieces and cut:
                pieces[0] = pieces[0][:-cut]
        left = tokens - sum(map(len, pieces))
        if left > 0:
            pieces.append(numbers.row(row, left))
        # The blocks may be more than the prompt: where what the template puts behind it is longer than what
        # follows the last whole block. Then the end of that one gives way, and the length stays exact.
        return b"".join(pieces)[: max(0, tokens)]

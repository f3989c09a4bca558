"""Reproducible texts of n tokens, and the vocabulary and tokenizer of the simulated engine.

For prompts that are made for a trace, `NumberedBytes` and `RowText` return the bytes of a block or row, and
`Words` turns the bytes into words. `answer_tokens` writes the answers of the simulated engine, and
`count_tokens` counts its prompts.

A text is made from bytes. Each byte selects a word from a table of 256 words, each of which is one token at
any position. The bytes of the block or row with number x begin with a unique name: NAME_BYTES bytes of x
times an odd constant modulo 2^72. So the texts of consecutive numbers differ in the first words, and no
prefix is shared by accident. The bytes after the name come from SHAKE128.

The engine's tokenizer is a byte-level BPE. A regular expression cuts a text into pieces of at most nine
characters. A piece in the vocabulary is one token; any other piece has a token for each byte, but
neighbouring letters are joined in pairs. `tokenizer_json` returns the same tokenizer as a file for Hugging
Face's `tokenizers`.
"""

import functools
import itertools
import random
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import shake_128
from typing import Final
from zlib import crc32

from llmtap.json_types import JsonObject
from llmtap.workload.requests import Requests

NAME_BYTES: Final = 9
"""Number of bytes of a name: enough for a 64-bit id and a bit for its kind (block or row)."""
_NAMES: Final = 1 << 8 * NAME_BYTES
"""Number of different names of NAME_BYTES bytes."""
_NAME_FACTOR: Final = 0x9E3779B97F4A7C15F5 | 1
"""2^72 divided by the golden ratio, so that names of consecutive numbers differ widely."""

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
    """Table with a word for each byte, and the separator between words."""

    table: tuple[str, ...]
    separator: str = " "

    def __post_init__(self) -> None:
        assert len(self.table) == 256

    @classmethod
    def from_words(cls, words: Sequence[str], separator: str = " ") -> "Words":
        """Return a table of these words. The number of words used is the largest possible power of two, up to
        256; if it is smaller, the words repeat in the table."""
        size = min(256, 1 << (len(words).bit_length() - 1))
        return cls(tuple(words[:size]) * (256 // size), separator)

    def text(self, key: bytes) -> str:
        return self.separator.join(map(self.table.__getitem__, key))


COMMON: Final = Words.from_words(_COMMON.split())
"""Words that are one token each, with and without a leading space, in cl100k, o200k, Anthropic's published
tokenizer and llmtap's own tokenizer."""


class NumberedBytes:
    """Makes the bytes of numbered blocks and rows: each byte selects a word. They depend on the seed."""

    def __init__(self, seed: int | str = 0) -> None:
        self._seed = f"{seed}/".encode()
        self._offset = int.from_bytes(shake_128(b"llmtap text " + self._seed).digest(NAME_BYTES))
        """Number that is added to each name, so that seeds have different names."""

    def block(self, number: int, tokens: int) -> bytes:
        """Return the bytes of a block id (signed or unsigned 64-bit)."""
        return self._bytes((number & 0xFFFF_FFFF_FFFF_FFFF) << 1, tokens)

    def row(self, number: int, tokens: int) -> bytes:
        """Return the bytes of a row, whose first word differs from that of every block."""
        return self._bytes(number << 1 | 1, tokens)

    def _bytes(self, x: int, tokens: int) -> bytes:
        """Return random bytes, one for each token; the first ones differ for every `x`."""
        name = ((x * _NAME_FACTOR + self._offset) % _NAMES).to_bytes(NAME_BYTES, "little")
        if tokens <= NAME_BYTES:
            return name[: max(0, tokens)]
        return name + shake_128(self._seed + b"%d" % x).digest(tokens - NAME_BYTES)


class RowText:
    """Makes the bytes that select the words of each row: first for its blocks, then for the row itself."""

    def __init__(self, requests: Requests, seed: int = 0) -> None:
        self._requests = requests
        self._numbers = NumberedBytes(seed)
        """Makes the bytes that select words."""

    def key(self, row: int, tokens: int, before: int = 0) -> bytes:
        """Return `tokens` bytes of a row, one for each word.

        `before`: number of tokens that the chat template adds before the text. The first block is shorter by
        this number, so that on the server the blocks end at the same positions as in the trace.
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
        # The blocks of the trace also cover the tokens that the chat template adds after the text: cut them
        # to `tokens`.
        return b"".join(pieces)[: max(0, tokens)]


# Words of at most eight letters: PATTERN would cut a longer word into two tokens.
_COMMON_WORDS: Final = """
a about above across after again against all almost along already also always am among an and another any
are around as ask at away back be because been before began being below best better between big black blue
book both bring build but by call came can carry case change city clear close cold come could country course
cut dark day deep did do does done door down draw each early earth east end enough even ever every example
eye face fact fall far farm fast father few field fill find fire first fish five fly follow food foot for
form found four friend from full gave get girl give go gold good got great green ground group grow had half
hand hard has have he head hear heat help her here high him his hold home horse hour house how hundred i
idea if in into is island it its just keep kind king know land language large last late later learn leave
left less let letter life light like line list listen little live long look low made make man many map mark
may me mean men might mile mind minute moon more morning most mother mountain move much must my name near
need never new next night no north not note nothing now number of off often old on once one only open or
order other our out over own page paper part pass people perhaps piece place plain plan plant play please
point port power press question quick quiet rain ran reach read ready real red rest river road rock room
round run said same sand saw say school sea second see seem set seven shall she ship short should show side
simple since sing six sky sleep slow small snow so some song soon sound south space stand star start state
stay step still stone stop story strong study such summer sun system table take talk tell ten than that the
their them then there these they thing think this those though thought thousand three through time to token
together too took top toward town tree true try turn two under until up upon us use very voice wait walk
want warm was watch water way we week well went were west what wheel when where which while white who whole
why will wind winter with without woman wonder wood word work world would write year yes yet you young your
"""
_WORDS: Final = tuple(_COMMON_WORDS.split())
_MARKS: Final = (".", ",", "?", "!", ";", ":", "'", '"', "(", ")", "-")
_SPACES: Final = ("\n\n", "  ", "    ")
_LETTERS: Final = "abcdefghijklmnopqrstuvwxyz"
_PUNCTUATION: Final = r"!-/:-@\[-`{-~"
PATTERN: Final = (
    rf" ?[A-Za-z]{{1,8}}| ?[0-9]{{1,3}}| ?[{_PUNCTUATION}]|[ \t\n\r]{{1,8}}|[^A-Za-z0-9{_PUNCTUATION} \t\n\r]"
)
"""Regular expression that cuts any text completely into pieces. It has only ASCII ranges, because all regex
engines interpret these in the same way."""
_PIECE: Final = re.compile(PATTERN)

SENTENCES: Final = 400
"""Number of sentences after which the text of an answer repeats: about 4,000 tokens."""


def _byte_letters() -> list[str]:
    """Return a printable letter for each byte, the same as in GPT-2's byte-level BPE."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = itertools.count(0x100)
    return [chr(b) if b in printable else chr(next(others)) for b in range(256)]


_BYTE_LETTERS: Final = _byte_letters()


def _byte_spelling(text: str) -> str:
    return "".join(_BYTE_LETTERS[b] for b in text.encode())


_PAIRS: Final = [(a, b) for a in (*_LETTERS, _BYTE_LETTERS[0x20]) for b in _LETTERS]
"""Merges of the tokenizer, in their order."""


def _word_ids() -> dict[str, int]:
    whole = [
        form for word in _WORDS for form in (word, " " + word, word.capitalize(), " " + word.capitalize())
    ]
    texts = [*_BYTE_LETTERS, *(a + b for a, b in _PAIRS), *map(_byte_spelling, (*_MARKS, *_SPACES, *whole))]
    return {text: i for i, text in enumerate(dict.fromkeys(texts))}


VOCABULARY: Final = _word_ids()
_SPELLINGS: Final = list(VOCABULARY)
_RANKS: Final = {pair: rank for rank, pair in enumerate(_PAIRS)}


def pieces_of(text: str) -> list[str]:
    """Return the pieces of a text which the tokenizer encodes separately."""
    return _PIECE.findall(text)


@functools.lru_cache(1 << 16)
def _ids_of_piece(piece: str) -> tuple[int, ...]:
    spelt = _byte_spelling(piece)
    if (known := VOCABULARY.get(spelt)) is not None:
        return (known,)
    parts = list(spelt)
    while True:
        ranked = [(_RANKS[pair], i) for i, pair in enumerate(itertools.pairwise(parts)) if pair in _RANKS]
        if not ranked:
            return tuple(VOCABULARY[part] for part in parts)
        i = min(ranked)[1]
        parts[i : i + 2] = [parts[i] + parts[i + 1]]


def token_ids(text: str) -> list[int]:
    return [i for piece in pieces_of(text) for i in _ids_of_piece(piece)]


def count_tokens(text: str) -> int:
    return sum(len(_ids_of_piece(piece)) * n for piece, n in Counter(pieces_of(text)).items())


def token_texts(text: str) -> list[str]:
    """Return the text of each token."""
    ends = itertools.accumulate(len(_SPELLINGS[i]) for i in token_ids(text))
    return [text[begin:end] for begin, end in itertools.pairwise([0, *ends])]


@functools.cache
def _story_tokens() -> tuple[list[str], list[int]]:
    """Return the tokens of SENTENCES random sentences, and the index at which each sentence begins."""
    chance = random.Random("llmtap")
    tokens: list[str] = []
    starts: list[int] = []
    words = [word for word in _WORDS if len(word) > 1]
    for _ in range(SENTENCES):
        starts.append(len(tokens))
        length = chance.randint(4, 14)
        words_ = chance.sample(words, length)
        tokens.append(" " + words_[0].capitalize())
        for i, word in enumerate(words_[1:], 1):
            if i % 6 == 0:
                tokens.append(",")
            tokens.append(" " + word)
        tokens.append(".")
    return tokens, starts


def answer_tokens(count: int, key: str) -> Sequence[str]:
    """Return the tokens of a text of `count` tokens. A shorter text of the same key is its prefix."""
    tokens, starts = _story_tokens()
    start = starts[crc32(key.encode()) % len(starts)]
    tokens_ = tokens[start : start + count]
    while len(tokens_) < count:
        tokens_ += tokens[: count - len(tokens_)]
    if tokens_:
        tokens_[0] = tokens_[0].removeprefix(" ")
    return tokens_


def tokenizer_json() -> JsonObject:
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [
                {"type": "Split", "pattern": {"Regex": PATTERN}, "behavior": "Isolated", "invert": False},
                {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False},
            ],
        },
        "post_processor": None,
        "decoder": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": True,
            "vocab": VOCABULARY,
            "merges": [list(pair) for pair in _PAIRS],
        },
    }

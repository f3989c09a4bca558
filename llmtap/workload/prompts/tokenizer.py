"""Tokenizers as prompts need them: many texts counted at once, ids back to text, and words of one token each.

`tiktoken:NAME`, the path of a `tokenizer.json`, a model's folder that has one, or `sim` for the simulated
engine's own. All are local; the packages come with the extra `tokenizers`.
"""

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final, Protocol

from llmtap.capture.tokenizer import load_tokenizer
from llmtap.workload.prompts import words as own
from llmtap.workload.prompts.text import COMMON, Words

__all__ = ["OWN", "OwnTokenizer", "Tokenizer", "cut_text", "fitting_words", "open_tokenizer"]

OWN: Final = "sim"
WORDS_MIN: Final = 16
"""With fewer of one token each, texts would be all alike: then words count as they may."""
_CANDIDATES_MAX: Final = 4_000
_plain_word = re.compile(r"[a-z]{2,9}").fullmatch


class Tokenizer(Protocol):
    """Cuts texts into tokens, without the special ones of a model."""

    @property
    def name(self) -> str: ...

    @property
    def specials(self) -> int:
        """Tokens that a completion's text gets before or behind it, as a beginning of sequence."""
        ...

    def counts(self, texts: Sequence[str]) -> list[int]:
        """How many tokens each text has."""
        ...

    def encode(self, text: str) -> Sequence[int]: ...

    def decode(self, ids: Sequence[int]) -> str | None:
        """The text of those tokens; None where this tokenizer cannot say."""
        ...

    def vocabulary(self) -> Sequence[str]:
        """Plain lower-case words of its own, the first ones best; empty where it does not tell."""
        ...


def open_tokenizer(text: str, place: str) -> Tokenizer:
    """The tokenizer of that name or path. Raises ConfigError that names `place`."""
    if text == OWN:
        return OwnTokenizer()
    path = Path(text)
    if path.is_dir():
        path /= "tokenizer.json"
    load = load_tokenizer(text if text.startswith("tiktoken:") else str(path), place)
    return _Tiktoken(text, load) if text.startswith("tiktoken:") else _HuggingFace(path)


class OwnTokenizer:
    """The simulated engine's."""

    name = OWN
    specials = 0

    def counts(self, texts: Sequence[str]) -> list[int]:
        return [own.count_tokens(text) for text in texts]

    def encode(self, text: str) -> Sequence[int]:
        return own.token_ids(text)

    def decode(self, ids: Sequence[int]) -> str | None:
        return None

    def vocabulary(self) -> Sequence[str]:
        return ()


class _Tiktoken:
    specials = 0

    def __init__(self, name: str, encode: Callable[[str], Sequence[int]]) -> None:
        import tiktoken

        self.name = name
        self.encode = encode
        self._encoding: Any = tiktoken.get_encoding(name.removeprefix("tiktoken:"))  # it is loaded already

    def counts(self, texts: Sequence[str]) -> list[int]:
        return [len(self.encode(text)) for text in texts]

    def decode(self, ids: Sequence[int]) -> str | None:
        text: str = self._encoding.decode(ids)
        return text

    def vocabulary(self) -> Sequence[str]:
        return _plain_words(token.decode("latin-1") for token in self._encoding.token_byte_values())


class _HuggingFace:
    def __init__(self, path: Path) -> None:
        from tokenizers import Tokenizer

        self.name = str(path)
        self._tokenizer: Any = Tokenizer.from_file(str(path))
        # Some files say that texts are to be cut or filled up to a length, for training.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self.specials = int(self._tokenizer.num_special_tokens_to_add(False))
        # Without offsets, where the package has it (0.20.1): a third less work.
        self._encode_all: Any = getattr(self._tokenizer, "encode_batch_fast", self._tokenizer.encode_batch)

    def counts(self, texts: Sequence[str]) -> list[int]:
        return [len(encoding) for encoding in self._encode_all(list(texts), add_special_tokens=False)]

    def encode(self, text: str) -> Sequence[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def decode(self, ids: Sequence[int]) -> str | None:
        text: str = self._tokenizer.decode(list(ids), skip_special_tokens=False)
        return text

    def vocabulary(self) -> Sequence[str]:
        ids: dict[str, int] = self._tokenizer.get_vocab()
        return _plain_words(sorted(ids, key=ids.__getitem__))


def _plain_words(tokens: Any) -> list[str]:
    """Words among tokens as vocabularies spell them: with a space before, or the sign that stands for one."""
    bare = (token.lstrip(" \u0120\u2581") for token in tokens)
    return list(dict.fromkeys(word for word in bare if _plain_word(word)))[:_CANDIDATES_MAX]


def fitting_words(tokenizer: Tokenizer) -> Words:
    """Words of one token each by this tokenizer, wherever they stand: the common ones, or some of its own.

    `Words.exact` is False where there are too few: texts then have to be fitted by counting.
    """
    common = list(dict.fromkeys(COMMON.table))
    if _all_single(tokenizer, common):
        return COMMON
    found = _single(tokenizer, [*common, *tokenizer.vocabulary()], " ")
    if len(found) >= WORDS_MIN:
        return Words.made_of(found)
    letters = _single(tokenizer, list("abcdefghijklmnopqrstuvwxyz0123456789"), "")  # a token a letter
    if len(letters) >= WORDS_MIN:
        return Words.made_of(letters, "")
    return Words(COMMON.table, COMMON.separator, exact=False)


def _all_single(tokenizer: Tokenizer, words: Sequence[str]) -> bool:
    joined = " ".join(words)
    return tokenizer.counts([joined, *words]) == [len(words)] + [1] * len(words)


def _single(tokenizer: Tokenizer, words: Sequence[str], separator: str) -> list[str]:
    """Those that are one token alone and in a row of their kind."""
    words = list(dict.fromkeys(words))
    alone = tokenizer.counts(words)
    in_a_row = tokenizer.counts([separator.join([word] * 8) for word in words])
    return [word for word, one, eight in zip(words, alone, in_a_row, strict=True) if (one, eight) == (1, 8)]


def cut_text(tokenizer: Tokenizer, text: str, tokens: int) -> tuple[str, int]:
    """The beginning of any text, of so many tokens if it has them, and how many it really has.

    The ids are cut and made text again. Where a word that was cut in two has other tokens than it had whole,
    or a token ends within a character, some more or some less are tried until the count holds; if it never
    does, what came nearest from below is returned.
    """
    ids = tokenizer.encode(text)
    if len(ids) <= tokens:
        return text, len(ids)
    best = ("", 0)
    for size in sorted(range(max(0, tokens - 8), tokens + 4), key=lambda size: abs(size - tokens)):
        cut = tokenizer.decode(ids[:size])
        if cut is None:
            raise ValueError(f"the tokenizer {tokenizer.name} does not give text back")
        cut = cut.rstrip("\ufffd")
        if not text.startswith(cut):
            continue
        count = tokenizer.counts([cut])[0]
        if count == tokens:
            return cut, count
        if best[1] < count < tokens:
            best = (cut, count)
    return best

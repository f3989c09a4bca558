"""Write messages with an exact number of tokens and a unique beginning: words, documents, source code.

`ProseWriter` is the interface of all generated texts of workloads: random words (`ProseWords`), documents
with a question (`Document`), and functions in Python, JavaScript and TypeScript (`Code`). A file of code
begins with a comment unique to its key, and is cut at its length, mostly within a function. Tokens are those
of the simulated engine's tokenizer (`text.py`). With `prose`, a shorter text is a prefix of a longer text of
the same key.
"""

import functools
import random
from collections.abc import Iterator, Mapping
from string import Template
from typing import Any, Final, Protocol
from zlib import crc32

from llmtap.workload.prompts.text import VOCABULARY, answer_tokens, count_tokens, pieces_of, token_ids

WORDS: Final = tuple(
    word[1:] for word in VOCABULARY if len(word) > 2 and word[0] == "Ġ" and word[1:].islower()
)
"""Common words that are one token each, both with and without a leading space."""
_OPENING_TOKENS: Final = 8
"""Number of tokens in the opening sentence: seven words and a full stop."""
_FILLER: Final = "."
"""Single token that fills a text up to its length; `_FILLERS`: those of source code, by language."""

QUESTION: Final = (
    "\n\nQuestion: what does the text above say about the river, the house on the hill, and the people who"
    " came there before the winter? Tell it in your own words, from the first page to the last, and show"
    " which lines of the text you took it from. Name each place only once, in the order in which they were"
    " found, and say so where the text does not tell what you want to know at all."
)
"""Question at the end of a document: 100 tokens (IETF draft, A.5)."""


class ProseWriter(Protocol):
    """Writes messages of an exact length."""

    def text(self, tokens: int, key: str, topic: str) -> str:
        """Return the text of `tokens` tokens for a key. Texts of one topic have one subject."""
        ...

    def describe(self) -> Mapping[str, Any]:
        """Return the domain and the language of the texts (IETF draft, 4.3.1)."""
        ...


def prose(tokens: int, key: str) -> str:
    """Return a text of `tokens` tokens with a beginning that is unique to `key`."""
    opening = _opening_words(key)
    if tokens <= len(opening):
        return "".join(opening[:tokens])
    words = answer_tokens(tokens - len(opening), key)
    return "".join(opening) + " " + "".join(words)


def _opening_words(key: str) -> list[str]:
    first, *others = random.Random(key).choices(WORDS, k=_OPENING_TOKENS - 1)
    return [first.capitalize(), *(" " + word for word in others), "."]


def fitted_text(text: str, tokens: int, filler: str = _FILLER, more: str = "") -> str:
    """Cut or extend a text to `tokens` tokens: whole pieces of the text, then of `more`, then the filler."""
    if more and count_tokens(text) == tokens:
        return text  # Do not append `more`: it could change the last piece.
    pieces: list[str] = []
    left = tokens
    for piece in pieces_of(text + more):
        n = _tokens_of(piece)
        if n > left:
            break
        pieces.append(piece)
        left -= n
    # Remove spaces at the end: together with the filler, they would become one token.
    while left and pieces and pieces[-1].isspace():
        left += _tokens_of(pieces.pop())
    return "".join(pieces) + filler * left


@functools.lru_cache(1 << 15)
def _tokens_of(piece: str) -> int:
    return len(token_ids(piece))


class ProseWords:
    """Writes random words."""

    def text(self, tokens: int, key: str, topic: str) -> str:
        return prose(tokens, key)

    def describe(self) -> Mapping[str, Any]:
        return {"kind": "words", "domain": "general", "language": "English words without meaning"}


class Document:
    """Writes documents of random words that end with a question of 100 tokens (IETF draft, A.5)."""

    def text(self, tokens: int, key: str, topic: str) -> str:
        document = tokens - _question_tokens()
        if document < 1:
            return fitted_text(QUESTION.lstrip(), tokens)
        return prose(document, key) + QUESTION

    def describe(self) -> Mapping[str, Any]:
        return {
            "kind": "document",
            "domain": "document and question",
            "language": "English words without meaning",
            "structure": "[document][question]",
            "question_tokens": _question_tokens(),
        }


@functools.cache
def _question_tokens() -> int:
    return count_tokens(QUESTION)


# ---------------------------------------------------------------- source code: files of functions

LANGUAGES: Final = ("python", "javascript", "typescript")
"""Languages of the IETF draft, 4.3.2.4."""
_FUNCTIONS_PER_LANGUAGE: Final = 600
"""Number of different functions for each language: more than 80,000 tokens."""
_FILLERS: Final = {"python": "#", "javascript": "/", "typescript": "/"}


class Code:
    """Writes files of functions. All messages of one topic have the same language."""

    def text(self, tokens: int, key: str, topic: str) -> str:
        language = LANGUAGES[crc32(topic.encode()) % len(LANGUAGES)]
        parts: list[str] = []
        left = tokens
        for part, n in program(key, language):
            if n >= left:
                parts.append(fitted_text(part, left, _FILLERS[language]))
                break
            parts.append(part)
            left -= n
        return "".join(parts)

    def describe(self) -> Mapping[str, Any]:
        return {"kind": "code", "domain": "code", "language": list(LANGUAGES)}


def program(key: str, language: str) -> Iterator[tuple[str, int]]:
    """Yield the parts of an endless file, with their numbers of tokens: a unique comment, then functions."""
    chance = random.Random(key)
    comment = "#" if language == "python" else "//"
    path, words = chance.choices(WORDS, k=3), chance.choices(WORDS, k=5)
    head = f"{comment} {'/'.join(path)}: {' '.join(words)}\n\n"
    yield head, count_tokens(head)
    known = _code_functions(language)
    while True:
        yield chance.choice(known)


@functools.cache
def _code_functions(language: str) -> list[tuple[str, int]]:
    chance = random.Random(language)
    templates = _PYTHON if language == "python" else _SCRIPT
    made = [templates[i % 2].substitute(_Names(chance, language)) for i in range(_FUNCTIONS_PER_LANGUAGE)]
    return [(text, count_tokens(text)) for text in made]


_TYPES: Final = {
    "t_numbers": ": number[]",
    "t_text": ": string",
    "t_rows": ": Record<string, number>[]",
    "t_promise": ": Promise<number>",
}


class _Names(dict[str, str]):
    """Values of the fields of a code template, each drawn when it is first used.

    A field such as `n1` is a number, `w7` is a text of seven words. The fields of `_TYPES` are empty except
    in TypeScript. Any other field is a name of two words, which is never a keyword.
    """

    def __init__(self, chance: random.Random, language: str) -> None:
        super().__init__(_TYPES if language == "typescript" else dict.fromkeys(_TYPES, ""))
        self._chance = chance
        """Random generator."""
        self._uses_snake_case = language == "python"

    def __missing__(self, field: str) -> str:
        kind, number = field[0], field[1:]
        if kind == "n" and number.isdecimal():
            value = str(self._chance.randint(2, 999))
        elif kind == "w" and number.isdecimal():
            value = " ".join(self._chance.choices(WORDS, k=int(number)))
        else:
            first, second = self._chance.choices(WORDS, k=2)
            value = f"{first}_{second}" if self._uses_snake_case else first + second.capitalize()
        self[field] = value
        return value


_PYTHON: Final = (
    Template("""\
def $function($items, $limit=$n1):
    # $w7
    $found = []
    for $item in $items:
        if $item.$field > $limit:
            $found.append($item.$other)
    return $found


"""),
    Template("""\
def $function($table, $key, default=None):
    # $w6
    $value = $table.get($key)
    if $value is None:
        return default
    return $value * $n1 + len($table)


"""),
)
_SCRIPT: Final = (
    Template("""\
export function $function($items$t_rows)$t_numbers {
  // $w6
  return $items
    .filter(($item) => $item.$field > $n1)
    .map(($item) => $item.$other);
}

"""),
    Template("""\
export async function $function($url$t_text)$t_promise {
  const $answer = await fetch(`$${$url}/$path`);
  if (!$answer.ok) {
    throw new Error("$w5");
  }
  const $value = await $answer.json();
  return $value.$field ?? $n1;
}

"""),
)

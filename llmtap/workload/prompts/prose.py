"""Write messages with an exact number of tokens and a unique beginning: English words, documents, a file.

`ProseWriter` is the interface of all generated texts of workloads, also of `workload/programs.py`; here are
random words, documents with a question, and passages of a text file. Counts are by the simulated engine's
tokenizer (`text.py`). For `prose`, a shorter text of a key is a prefix of a longer one.
"""

import functools
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, Protocol

from llmtap.errors import ConfigError
from llmtap.workload.prompts.text import VOCABULARY, count_tokens, cut, say, token_ids

WORDS: Final = tuple(
    word[1:] for word in VOCABULARY if len(word) > 2 and word[0] == "Ġ" and word[1:].islower()
)
"""Common words of one token each, with a leading space or without."""
_OPENING: Final = 8
"""Tokens of the opening sentence: seven words and a full stop."""
_FILLER: Final = "."

QUESTION: Final = (
    "\n\nQuestion: what does the text above say about the river, the house on the hill, and the people who"
    " came there before the winter? Tell it in your own words, from the first page to the last, and show"
    " which lines of the text you took it from. Name each place only once, in the order in which they were"
    " found, and say so where the text does not tell what you want to know at all."
)
"""Question of the IETF draft, A.5: 100 tokens."""


class ProseWriter(Protocol):
    """Writes messages of an exact length."""

    def text(self, tokens: int, key: str, topic: str) -> str:
        """Return a text of `tokens`, always the same for a key; messages of one topic share a subject."""
        ...

    def describe(self) -> Mapping[str, Any]:
        """Domain and language (IETF draft, 4.3.1)."""
        ...


def prose(tokens: int, key: str) -> str:
    """Return a text of `tokens` with a beginning unique to `key`."""
    opening = _opening(key)
    if tokens <= len(opening):
        return "".join(opening[:tokens])
    said = say(tokens - len(opening), key)
    return "".join(opening) + " " + "".join(said)


def _opening(key: str) -> list[str]:
    first, *others = random.Random(key).choices(WORDS, k=_OPENING - 1)
    return [first.capitalize(), *(" " + word for word in others), "."]


def fitted_text(text: str, tokens: int, filler: str = _FILLER, more: str = "") -> str:
    """Cut or extend a text to `tokens`: whole pieces of it, then of `more`, then the filler."""
    if more and count_tokens(text) == tokens:
        return text  # with `more` behind it, its last piece could differ
    kept: list[str] = []
    left = tokens
    for piece in cut(text + more):
        n = _tokens_of(piece)
        if n > left:
            break
        kept.append(piece)
        left -= n
    # The filler would become one piece with a space before it.
    while left and kept and kept[-1].isspace():
        left += _tokens_of(kept.pop())
    return "".join(kept) + filler * left


@functools.lru_cache(1 << 15)
def _tokens_of(piece: str) -> int:
    return len(token_ids(piece))


class ProseWords:
    def text(self, tokens: int, key: str, topic: str) -> str:
        return prose(tokens, key)

    def describe(self) -> Mapping[str, Any]:
        return {"kind": "words", "domain": "general", "language": "English words without meaning"}


class Document:
    """[document][question]: words, and the same question of 100 tokens at the end (IETF draft, A.5)."""

    def text(self, tokens: int, key: str, topic: str) -> str:
        document = tokens - _question_tokens()
        if document < 1:
            return fitted_text(QUESTION.lstrip(), tokens)
        return prose(document, key) + QUESTION

    def describe(self) -> Mapping[str, Any]:
        return {
            "kind": "document",
            "domain": "document and question", "language": "English words without meaning",
            "structure": "[document][question]", "question_tokens": _question_tokens(),
        }  # fmt: skip


@functools.cache
def _question_tokens() -> int:
    return count_tokens(QUESTION)


class FileText:
    """Passages of a text file from a line chosen by the key, after a unique opening."""

    def __init__(self, path: Path, place: str) -> None:
        """Raises ConfigError with `place` if the file cannot be read or has no text."""
        import hashlib

        try:
            data = path.read_bytes()
            text = data.decode()
        except OSError as exc:
            raise ConfigError(place, f"{path} cannot be read: {exc.strerror}") from None
        except UnicodeDecodeError as exc:
            raise ConfigError(place, f"{path} is not UTF-8: byte {exc.start}") from None
        self._lines = [line for line in text.splitlines(keepends=True) if line.strip()]
        if not self._lines:
            raise ConfigError(place, f"{path} has no text")
        self._name = path.name
        self._sha256 = hashlib.sha256(data).hexdigest()

    def text(self, tokens: int, key: str, topic: str) -> str:
        lines = self._lines
        start = random.Random(f"line/{key}").randrange(len(lines))
        parts = ["".join(_opening(key)), "\n"]
        have = _OPENING
        while have < tokens:
            # The sum may be too large by white space at line ends; the excess is cut.
            stretch = "".join(lines[start : start + 64])
            parts.append(stretch)
            have += count_tokens(stretch)
            start = (start + 64) % len(lines) if start + 64 < len(lines) else 0
        return fitted_text("".join(parts), tokens)

    def describe(self) -> Mapping[str, Any]:
        return {
            "kind": "file", "file": self._name, "sha256": self._sha256, "lines": len(self._lines),
            "preprocessing": "empty lines left out; a message is a stretch from a line of the seed's choice,"
            " after an opening sentence of its own",
        }  # fmt: skip

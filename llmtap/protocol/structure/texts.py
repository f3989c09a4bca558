"""Compare the texts of one place in a stream, to find whether they are pieces of one text, each repeat the
text so far, or are separate texts."""

import re
from collections.abc import Sequence
from itertools import pairwise
from typing import Final, NamedTuple
from unicodedata import category

_OPENS_WITH: Final = frozenset(".,;:!?)]}'\"\u2019\u201d\u2026-*`_/\n<>=@%&|+~\\$^(")
_CLOSES_WITH: Final = frozenset("([{\"'\u201c\u2018-/*`#<>=_@$\\|&+~")
_FULL_STOPS: Final = frozenset("\u3002\uff01\uff1f")
_PROGRESS_SIGNS: Final = ".#=-*+>\u2026\u2588"
_QUOTES: Final = frozenset("\"'`")
_NO_TEXT: Final = re.compile(
    r"""
    [0-9a-fA-F]{8}-[0-9a-fA-F-]{8,}              # UUID
    | (?=[^\s]*[0-9])[A-Za-z0-9+/_=.:~-]{20,}    # identifier, hash, base64
    | [A-Za-z0-9+/=_-]{44,}                      # base64
    | [a-z]+://\S+ | data:\S+
    | \d{4}-\d\d-\d\d([T ]\S*)?                  # date
    | [-+]?[0-9][0-9.,:e]*\s*(%|[a-zA-Z/]{1,4})? # number, with a unit
    | (image|audio|video|application|text)/\S+
    | [0-9a-z]{1,2}:["{\[].*                     # short name, colon and JSON
    """,
    re.VERBOSE | re.DOTALL,
)
_NO_ANSWER: Final = re.compile(r"\r|\x1b|\x08|^@@ -\d+[, ]", re.MULTILINE)
"""Finds output of a terminal, and the head of a hunk in a diff."""
_VOCABULARY: Final = re.compile(r"[\u0120\u2581]\S*|\S+\u0120\S*|##\w+|</?(unk|s|pad|mask)>|<\|\w+\|>")
"""Fits entries of a tokenizer's vocabulary, which have marks in place of spaces."""
_ENCODED: Final = re.compile(r"(?=[A-Za-z_-]*[0-9+/=])(?=[^A-Za-z]*[A-Za-z])[A-Za-z0-9+/=_-]{40,}")
_DATA_LINE: Final = re.compile(
    r"""
    .{0,60}(\d{4}-\d\d-\d\d|\d\d:\d\d:\d\d|\b(DEBUG|INFO|WARN|WARNING|ERROR)\b).* # line of a log
    | [\w:]+({[^}]*})?\s+[-+]?[0-9][0-9.eE+]*                                      # metric
    """,
    re.VERBOSE,
)
_NUMBER: Final = re.compile(r"\s*[-+]?[0-9][0-9.,:/]*\s*%?\s*")
_LETTER: Final = re.compile(r"[^\W\d_]")
_PREFIX_CHARS: Final = 4
"""Minimum length of a beginning that texts have in common because a program writes them by a pattern."""
_WHOLE_CHARS_MAX: Final = 4_096
_NO_SPACES: Final = 0x2E80
"""First code point of the scripts that put no spaces between words, such as Chinese."""
_WORD: Final = re.compile(r"[^\W_]")


class Sequel(NamedTuple):
    """Result of comparing the texts of one place, in their order."""

    are_cumulative: bool
    """Each text begins with the previous text and adds letters."""
    are_pieces: bool
    """Put together, the texts read as one text."""
    joining_pairs: int
    """Number of pairs of successive texts in which the second continues the first."""
    are_separate: bool
    """The texts do not read as one text: each is a separate line, message or notice."""
    are_lines: bool
    """Almost all texts end in a line end."""
    are_constant: bool
    """The texts are always the same, or repeat a few values."""
    are_no_text: bool
    """The texts are identifiers, numbers, dates, addresses, encoded bytes, or output of a terminal."""


def compare_texts(texts: Sequence[str]) -> Sequel:
    """Compare the texts of one place, which are in their order and not empty."""
    n = len(texts)
    no_text = sum(_is_no_text(text) for text in texts)
    cumulative = _is_cumulative(texts)
    typed = cumulative and _are_typed(texts)
    divided = any(map(_are_divided, texts, texts[1:]))
    joins = [_continuation(a, b, divided=divided) for a, b in pairwise(texts)]
    good, bad = joins.count(1), joins.count(-1)
    pairs = len(joins)
    of_words = sum(" " in text.strip() for text in texts)
    strangers = n >= 3 and of_words >= n / 2 and good <= pairs / 5
    distinct = len(set(texts))
    alike = distinct >= 3 and len(_common_beginning(texts).strip()) >= _PREFIX_CHARS
    return Sequel(
        are_cumulative=cumulative and not typed,
        are_pieces=pairs >= 2 and good >= pairs / 2 and bad <= pairs / 5,
        joining_pairs=good,
        are_separate=not cumulative and ((pairs >= 2 and bad >= pairs / 2) or strangers or alike),
        are_lines=n >= 2 and sum(text.endswith("\n") for text in texts) >= 0.8 * n,
        are_constant=(n >= 2 and distinct == 1 and len(texts[0]) > 1) or (n >= 6 and distinct <= n / 3),
        are_no_text=no_text >= 0.8 * n
        or typed
        or any(map(_NO_ANSWER.search, texts))
        or (n >= 2 and not any(map(_WORD.search, texts)))
        or (n >= 3 and all(map(_NUMBER.fullmatch, texts)))
        or (n >= 4 and max(map([text.strip() for text in texts].count, _PROGRESS_SIGNS)) >= n / 2)
        or (n >= 4 and not cumulative and _are_data(texts)),
    )


def _common_beginning(texts: Sequence[str]) -> str:
    first, last = min(texts), max(texts)
    return first[: next((i for i, (a, b) in enumerate(zip(first, last, strict=False)) if a != b), len(first))]


def _are_typed(texts: Sequence[str]) -> bool:
    """Return whether a cumulative text grows letter by letter, as a person types it. In scripts that put no
    spaces between words, one letter is often a token."""
    letters = [len(b) - len(a) == 1 and ord(b[-1]) < _NO_SPACES for a, b in pairwise(texts)]
    return len(letters) >= 3 and sum(letters) >= 0.8 * len(letters)


def _are_data(texts: Sequence[str]) -> bool:
    """Return whether pieces are entries of a vocabulary, or are together encoded bytes, a log or metrics."""
    if sum(_VOCABULARY.fullmatch(text.strip()) is not None for text in texts) > 0.2 * len(texts):
        return True
    whole = "".join(texts)[:_WHOLE_CHARS_MAX]
    if _ENCODED.fullmatch(whole):
        return True
    lines = whole.split("\n")[:-1]
    return len(lines) >= 3 and sum(map(bool, map(_DATA_LINE.fullmatch, lines))) >= 0.7 * len(lines)


def _is_no_text(text: str) -> bool:
    """Return whether a value looks like an id, a date or a similar value, not like a piece of an answer."""
    text = text.strip()
    return len(text) > 3 and _NO_TEXT.fullmatch(text) is not None


def _is_cumulative(texts: Sequence[str]) -> bool:
    """Return whether each text repeats the text before and adds to it."""
    last = texts[-1].strip()
    if last.isascii() and " " not in last:
        return False  # A single word that grows letter by letter is typed by a user, so it is no answer.
    grows = 0
    for before, text in pairwise(texts):
        if not text.startswith(before):
            return False
        grows += _LETTER.search(text, len(before)) is not None
    return grows >= 2 or (grows == 1 and len(texts) == 2 and len(texts[0]) > 3)


def _have_no_spaces(a: str, b: str) -> bool:
    """Return whether two successive texts are in a script without spaces where they meet."""
    return ord(a[-1]) >= _NO_SPACES or ord(b[0]) >= _NO_SPACES


def _are_divided(a: str, b: str) -> bool:
    """Return whether two successive texts in such a script are one text that was divided at a sign."""
    is_open = category(a[-1])[0] == "P" and a[-1] not in _FULL_STOPS
    return _have_no_spaces(a, b) and (is_open or category(b[0])[0] == "P")


def _continuation(a: str, b: str, *, divided: bool) -> int:
    """Return 1 if `b` can continue `a` in one text, -1 if a separator between them is missing, else 0.
    `divided`: some of the texts are in a script without spaces, and were divided at a sign."""
    last, first = a[-1], b[0]
    if last.isspace() or first.isspace():
        is_indented = b.startswith("  ") and not last.isspace()  # An indent shows that a line end is missing.
        return -1 if is_indented else 1
    if _have_no_spaces(a, b):
        # Any two texts join, also messages of people; but a single letter is seldom a message.
        return 1 if divided or len(a) == 1 or len(b) == 1 else 0
    if last == ">" and first == "<":
        return 0  # Unknown: two elements of HTML can belong to one text, or to two.
    is_closed = last in _QUOTES and a[-2:-1].isalnum()
    if first in _OPENS_WITH or (last in _CLOSES_WITH and not is_closed):
        return 1
    if not last.isalnum():
        return -1
    return -1 if first.isupper() and last.islower() else 0

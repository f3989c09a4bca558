"""Compare the texts of one place in a stream, to find whether they are pieces of one text, each repeat the
text so far, or are separate texts."""

import re
from collections.abc import Sequence
from itertools import pairwise
from typing import Final, NamedTuple

_OPENS_WITH: Final = frozenset(".,;:!?)]}'\"\u2019\u201d\u2026-*`_/\n<>=@%&|+~\\$^(")
_CLOSES_WITH: Final = frozenset("([{\"'\u201c\u2018-/*`#<>=_@$\\|&+~")
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
_TERMINAL: Final = re.compile(r"\r|\x1b|\x08")
_LETTER: Final = re.compile(r"[^\W\d_]")
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
    joins = [_continuation(a, b) for a, b in pairwise(texts)]
    good, bad = joins.count(1), joins.count(-1)
    pairs = len(joins)
    of_words = sum(" " in text.strip() for text in texts)
    strangers = n >= 3 and of_words >= n / 2 and good <= pairs / 5
    distinct = len(set(texts))
    return Sequel(
        are_cumulative=cumulative,
        are_pieces=pairs >= 2 and good >= pairs / 2 and bad <= pairs / 5,
        joining_pairs=good,
        are_separate=not cumulative and ((pairs >= 2 and bad >= pairs / 2) or strangers),
        are_lines=n >= 2 and sum(text.endswith("\n") for text in texts) >= 0.8 * n,
        are_constant=(n >= 2 and distinct == 1 and len(texts[0]) > 1) or (n >= 6 and distinct <= n / 3),
        are_no_text=no_text >= 0.8 * n
        or any(map(_TERMINAL.search, texts))
        or (n >= 3 and not any(map(_WORD.search, texts))),
    )


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


def _continuation(a: str, b: str) -> int:
    """Return 1 if `b` can continue `a` in one text, -1 if a separator between them is missing, else 0."""
    last, first = a[-1], b[0]
    if last.isspace() or first.isspace():
        is_indented = b.startswith("  ") and not last.isspace()  # An indented text begins a new line.
        return -1 if is_indented else 1
    if ord(last) >= 0x2E80 or ord(first) >= 0x2E80:
        return 1  # In a script without spaces, any two texts join.
    if last == ">" and first == "<":
        return 0  # Unknown: two elements of HTML can belong to one text, or to two.
    is_closed = last in _QUOTES and a[-2:-1].isalnum()
    if first in _OPENS_WITH or (last in _CLOSES_WITH and not is_closed):
        return 1
    if not last.isalnum():
        return -1
    return -1 if first.isupper() and last.islower() else 0

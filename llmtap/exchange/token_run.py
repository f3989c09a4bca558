"""The token events of one exchange that differ only in their text, set aside to be logged together.

There is a compiled implementation and a Python one; `make_token_run` chooses. The compiled one is also filled
by the compiled `FrameBatch` (tap/frames.py), which leaves the event that would fill it to the Observer.
"""

from array import array
from typing import Final, Protocol

from llmtap import native
from llmtap.protocol.repetition import Repetition

__all__ = ["PythonTokenRun", "Taken", "TokenRun", "make_token_run"]

ROOM: Final = 64
"""Events that the Python implementation sets aside: enough to make logging them cheap."""

Taken = tuple["array[int]", "array[int]", "array[int]", bytes, list[str]]
"""Of each event: `t_ns` and `added_ns` of its read, bytes of its block, 1 if its text is only white space;
and its text, if texts are kept."""


class TokenRun(Protocol):
    """The events set aside. They are logged as soon as `full`, or as something else comes."""

    keeps_texts: bool
    """To be changed only while it is empty."""

    def __len__(self) -> int: ...

    @property
    def full(self) -> bool: ...

    def add(self, data: bytes, t_ns: int, added_ns: int) -> bool:
        """Set a read aside if it is exactly one such event with a text that is not empty. Return whether."""

    def take(self) -> Taken:
        """Return the columns of the events, at least one, and forget them."""


class PythonTokenRun:
    """The reference."""

    __slots__ = ("_chunked", "_events", "_repetition", "_text_in", "keeps_texts")

    def __init__(self, repetition: Repetition, *, chunked: bool, keeps_texts: bool) -> None:
        self._repetition = repetition
        self._chunked = chunked
        self._text_in = repetition.text_in_chunk if chunked else repetition.text_in
        self._events: list[tuple[int, int, int, str]] = []
        self.keeps_texts = keeps_texts

    def __len__(self) -> int:
        return len(self._events)

    @property
    def full(self) -> bool:
        return len(self._events) >= ROOM

    def add(self, data: bytes, t_ns: int, added_ns: int) -> bool:
        text = self._text_in(data)
        if not text:
            return False
        self._events.append((t_ns, added_ns, len(data), text))
        return True

    def take(self) -> Taken:
        times, added_ns, read_sizes, texts = zip(*self._events, strict=True)
        self._events.clear()
        sizes = self._repetition.sizes_in_chunks(read_sizes) if self._chunked else read_sizes
        blanks = bytes(map(str.isspace, texts))
        kept = list(texts) if self.keeps_texts else []
        return array("q", times), array("q", added_ns), array("l", sizes), blanks, kept


def make_token_run(repetition: Repetition, *, chunked: bool, keeps_texts: bool) -> TokenRun:
    """Return an empty run of events that are this repetition.

    Args:
        chunked: each read is one chunk that holds the event, with the framing around it.
        keeps_texts: whether the texts are wanted.
    """
    if native.compiled is None:
        return PythonTokenRun(repetition, chunked=chunked, keeps_texts=keeps_texts)
    run: TokenRun = native.compiled.TokenRun(repetition.fixed, chunked, keeps_texts)
    return run

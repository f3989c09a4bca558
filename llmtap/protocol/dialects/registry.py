"""The known dialects, in the order in which they are tried; `chooser.py` chooses among them."""

import tomllib
from bisect import insort
from collections.abc import Iterable, Iterator
from functools import lru_cache
from importlib import resources
from typing import Any, Final, Protocol

from llmtap.json_types import JsonObject
from llmtap.protocol.delta import Delta
from llmtap.protocol.dialects.anthropic import Anthropic
from llmtap.protocol.dialects.bedrock import BedrockText
from llmtap.protocol.dialects.llamacpp import LlamaCpp
from llmtap.protocol.dialects.openai_chat import OpenAIChat
from llmtap.protocol.dialects.openai_choices import OpenAICompletions
from llmtap.protocol.dialects.openai_responses import OpenAIRealtime, OpenAIResponses
from llmtap.protocol.dialects.table.declaration import DialectTable, decode_table
from llmtap.protocol.dialects.table.reader import TableDialect
from llmtap.protocol.sse import SseEvent


class Reader(Protocol):
    """Reads the events of one answer, and can store values of earlier events. Invalid bytes raise nothing.

    Optional attributes: `names_read` (members that it reads at the top of an event), `running_total` (total
    that it counts by a running usage), `answer_id` (id by which a later request can name the answer),
    `shape_certain` (whether no other API has events of this shape) and `end_certain` (whether a stream
    without an end mark or finish reason was cut off).
    """

    @property
    def name(self) -> str | None:
        """Name of the dialect; None: the reader only infers the form of the answer."""
        ...

    def read_event(self, event: SseEvent) -> Delta:
        """Return what an event of a stream contains."""
        ...

    def read_body(self, body: bytes) -> Delta:
        """Return what a body that is no stream contains."""
        ...


class Dialect(Protocol):
    """Makes a reader for each answer, and claims answers. If a claim can be 4, `claim_max` is 4."""

    def __call__(self) -> Reader: ...

    def claim(self, value: JsonObject, path: str) -> int:
        """Return how certainly an object (an event or a whole answer) belongs to the dialect: 3 if it names
        the dialect (4 if other dialects have the same names, and the path decides), 2 if its shape fits, 1 if
        only the path fits, 0 if nothing fits."""


_FOLDER: Final = resources.files("llmtap.protocol.dialects") / "tables"
TABLES: Final = {
    dialect.name: dialect
    for file in sorted(_FOLDER.iterdir(), key=lambda file: file.name)
    if file.name.endswith(".toml")
    for dialect in (TableDialect(decode_table(tomllib.loads(file.read_text(encoding="utf-8")))),)
}
"""Dialects of the tables that llmtap ships, by their names. Tables of users have the same form."""
DIALECTS: Final[tuple[Dialect, ...]] = (
    OpenAIChat,
    OpenAICompletions,
    OpenAIResponses,
    OpenAIRealtime,
    Anthropic,
    LlamaCpp,
    BedrockText,
    *TABLES.values(),
)

_PATHS_CACHED: Final = 256
_FITS: Final = 2
"""Claim of a dialect if the shape of the object fits."""
_OFF_PATH: Final = 3
_ON_PATH: Final = 4
"""Maximum claim of a table on one of its own paths; `_OFF_PATH` is the maximum on other paths."""


class Dialects:
    """Dialects that an answer can have: the tables of the user, and the dialects that llmtap knows. A table
    of the user wins over other dialects if it fits, and replaces a dialect of the same name."""

    __slots__ = ("_claim_limits", "_own_table_count", "_pathless_tables", "entries", "owners")

    def __init__(self, tables: Iterable[DialectTable] = ()) -> None:
        own = [TableDialect(table) for table in tables]
        names = {dialect.name for dialect in own}
        self.entries: Final = (*own, *(d for d in DIALECTS if getattr(d, "name", None) not in names))
        self._own_table_count = len(own)
        """Number of the user's tables, which come first in `entries`."""
        self._pathless_tables = frozenset(i for i, dialect in enumerate(own) if not dialect.table.paths)
        """Positions of the user's tables that apply to all paths."""
        self.owners = lru_cache(_PATHS_CACHED)(self._find_owners)
        """By path: positions of the dialects that name it."""
        self._claim_limits = lru_cache(_PATHS_CACHED)(self._find_limits)
        """By path: largest claim that each dialect can make."""

    def claims_of(self, value: Any, path: str, name: bytes | None = None) -> Iterator[tuple[int, int]]:
        """Yield the position in `entries` and the claim of each dialect that claims this JSON, the most
        certain first. `name`: value of the `event:` line.

        A dialect is tried only while its claim can exceed the claims so far, because most answers name their
        dialect and no other claim is used.
        """
        # The answer to a request with several prompts is a list: use its first element.
        first = value[0] if isinstance(value, list) and value else value
        claims: list[tuple[bool, int, int]] = []
        """Claims so far, the least certain first: `(is it a table of the user, claim, -position)`."""
        for limit in self._claim_limits(path):
            while claims and claims[-1] > limit:
                _, claim, place = claims.pop()
                yield -place, claim
            position = -limit[-1]
            dialect = self.entries[position]
            if isinstance(dialect, TableDialect):
                claim = dialect.claim(value, path, name)
            else:
                claim = dialect.claim(first, path) if isinstance(first, dict) else 0
            if claim:
                insort(claims, (self.is_own(position, claim), claim, -position))
        for _, claim, place in reversed(claims):
            yield -place, claim

    def is_own(self, position: int, claim: int) -> bool:
        """Return whether the dialect at this position is a table of the user that fits by its claim."""
        return position < self._own_table_count and claim >= _FITS

    def is_on_path(self, position: int, path: str) -> bool:
        """Return whether the path belongs to this dialect. A user's table without paths owns all paths."""
        return position in self.owners(path) or position in self._pathless_tables

    def _find_limits(self, path: str) -> list[tuple[bool, int, int]]:
        """Return the maximum claim of each dialect on this path, the most certain first, as
        `(is it a table of the user, maximum claim, -position)`."""
        owners = self.owners(path)
        limits = []
        for position, dialect in enumerate(self.entries):
            limit = getattr(dialect, "claim_max", _OFF_PATH)
            if isinstance(dialect, TableDialect) and position in owners:
                limit = _ON_PATH
            limits.append((position < self._own_table_count, limit, -position))
        return sorted(limits, reverse=True)

    def _find_owners(self, path: str) -> tuple[int, ...]:
        """Return the positions of the dialects that own the path: on it, they claim even a plain failure."""
        failure = {"error": "failure"}
        return tuple(position for position, d in enumerate(self.entries) if d.claim(failure, path))


BUILT_IN: Final = Dialects()

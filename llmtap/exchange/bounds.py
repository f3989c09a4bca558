"""Maximum length of every string in an Exchange, its memory size, and the memory limit of open bodies.

`bounded` cuts a string where it enters, `bound` all of a complete exchange, `memory_bytes` measures one.
Names and words chosen by clients and upstreams are cut KEY_CHARS behind their bound and searched for keys
before they are cut at it; tenants and captured texts are only cut. `Budget` limits the bytes of bodies that
all open exchanges keep; each takes a `Share`. SECURITY.md shows BOUNDS as a table, which a test compares.
"""

from array import array
from collections.abc import Callable
from dataclasses import is_dataclass
from enum import Enum
from operator import attrgetter
from sys import getsizeof
from typing import Any, Final, NamedTuple, get_args

from llmtap.exchange.exchange import Exchange
from llmtap.exchange.paths import NAME_CHARS_MAX, PATH_CHARS_MAX, clean_name, clean_path
from llmtap.protocol.http1 import METHOD_CHARS_MAX

_WORD_CHARS_MAX: Final = 64
"""Of a reason, a code or a category, as programs write them."""
_NUMBER_BYTES: Final = 32
_HEADER_BYTES: Final = 16
"""Of the garbage collector, before each object."""
_SEEN_MAX: Final = 1_024
_SEEN_CHARS_MAX: Final = 64
_NUMBERS: Final = frozenset({int, float, bool, type(None)})
_FIXED_BYTES: Final = {type(None): 0, bool: 0, int: _NUMBER_BYTES, float: _NUMBER_BYTES, type: 0}
_FLAT: Final = frozenset({str, bytes, bytearray, array})


def _cut(text: str, chars_max: int) -> str:
    return text[:chars_max]


def _cut_path(path: str, chars_max: int) -> str:
    return clean_path(path)[:chars_max]


class Bound(NamedTuple):
    """Limits of one field; of each string in it where the field is a list or an object."""

    chars: int
    chosen_by: str
    """`client`, `upstream`, `operator` or `llmtap`."""
    fit: Callable[[str, int], str] = _cut
    members: int = 1
    """Maximum number of members, those of nested lists and objects included."""


BOUNDS: Final = {
    "relay": Bound(64, "llmtap"),
    "method": Bound(METHOD_CHARS_MAX, "client", clean_name),
    "path": Bound(PATH_CHARS_MAX, "client", _cut_path),
    "endpoint": Bound(32, "llmtap"),
    "dialect": Bound(32, "llmtap"),
    "call": Bound(160, "client", clean_name),
    "model": Bound(NAME_CHARS_MAX, "client", clean_name),
    "response_model": Bound(NAME_CHARS_MAX, "upstream", clean_name),
    # `meter/tenants.py` replaces a key by its hash; the operator's names stay as they are.
    "tenant": Bound(64, "client"),
    "route": Bound(256, "operator"),
    "arm": Bound(64, "operator"),
    "unit": Bound(64, "llmtap"),
    "excluded": Bound(64, "llmtap"),
    "trace_parent": Bound(256, "client", clean_name),
    "request_id": Bound(256, "client", clean_name),
    "finish_reason": Bound(_WORD_CHARS_MAX, "upstream", clean_name),
    "refusal": Bound(128, "upstream", clean_name, 32),
    "guardrail": Bound(128, "upstream", clean_name, 32),
    "no_token_reason": Bound(32, "llmtap"),
    "usage": Bound(_WORD_CHARS_MAX, "upstream", clean_name, 256),
    "server_timing": Bound(64, "llmtap", members=2_048),
    "invalid_values": Bound(32, "llmtap", members=16),
    "error": Bound(512, "llmtap"),
    "clock": Bound(16, "llmtap"),
    # Set while a capture runs, each where it is read.
    "asked.response_format": Bound(32, "client", clean_name),
    "asked.roles": Bound(32, "client", clean_name, 10_016),
    "asked.block_unit": Bound(16, "llmtap"),
    "turn.session": Bound(64, "llmtap"),
    "turn.source": Bound(16, "llmtap"),
    "turn.parent": Bound(128, "llmtap"),
    "turn.by": Bound(16, "llmtap"),
    # At level `full` alone, redacted, until the row is written.
    "said.request_body": Bound(8 << 20, "client"),
    "said.response_text": Bound(4 << 20, "upstream"),
}

_WHOLE: Final = {name: limits for name, limits in BOUNDS.items() if "." not in name}
_read_whole: Final = attrgetter(*_WHOLE)
_seen: Final[dict[str, set[str]]] = {name: set() for name in BOUNDS}
"""By field: short strings that need no change. Most come again, and the search for keys takes 1 us."""
_readers: dict[type, tuple[int, Callable[[object], Any]]] = {}


def bounded(field: str, text: str) -> str:
    seen = _seen[field]
    if text in seen:
        return text
    limits = BOUNDS[field]
    fitted = limits.fit(text, limits.chars)
    if fitted == text and len(text) <= _SEEN_CHARS_MAX:
        if len(seen) >= _SEEN_MAX:
            seen.clear()
        seen.add(text)
    return fitted


def bound(x: Exchange) -> None:
    """Bound the exchange's own strings, also those in lists and objects; not those that a capture adds."""
    for (name, limits), value in zip(_WHOLE.items(), _read_whole(x), strict=True):
        if type(value) is str:
            fitted = bounded(name, value)
            if fitted is not value:
                setattr(x, name, fitted)
        elif value is not None:
            setattr(x, name, _fitted(name, value, [limits.members]))


def _fitted(field: str, value: Any, room: list[int]) -> Any:
    if isinstance(value, str):
        return bounded(field, value)
    if isinstance(value, dict):
        kept = {}
        for name, one in value.items():
            if not room[0]:
                break
            room[0] -= 1
            kept[bounded(field, name)] = _fitted(field, one, room)
        return kept
    if isinstance(value, list):
        listed = []
        for one in value:
            if not room[0]:
                break
            room[0] -= 1
            listed.append(_fitted(field, one, room))
        return listed
    return value


def memory_bytes(value: object) -> int:
    """Return the bytes that an Exchange, or any value in one, takes with all that it holds. Shared values
    count twice."""
    kind = type(value)
    fixed = _FIXED_BYTES.get(kind)
    if fixed is not None:
        return fixed
    size = getsizeof(value)
    if kind in _FLAT or isinstance(value, Enum):
        return size
    if isinstance(value, dict):
        return size + sum(map(memory_bytes, value)) + sum(map(memory_bytes, value.values()))
    if isinstance(value, list):
        return size + sum(map(memory_bytes, value))
    reader = _readers.get(kind)
    if reader is None:
        reader = _readers[kind] = _reader_of(kind)
    fixed_bytes, read = reader
    size += fixed_bytes
    for one in read(value):
        if one is not None:
            size += getsizeof(one) if type(one) in _FLAT else memory_bytes(one)
    return size


def _reader_of(kind: type) -> tuple[int, Callable[[object], Any]]:
    """Return the bytes of a class's fixed parts, and a reader of all else (and of the class, twice:
    attrgetter makes a tuple only of two names and more)."""
    fixed_bytes, names = _parts_of(kind, "")
    return fixed_bytes, attrgetter("__class__", "__class__", *names)


def _parts_of(kind: type, prefix: str) -> tuple[int, list[str]]:
    fixed_bytes, names = 0, list[str]()
    for name, field in getattr(kind, "__dataclass_fields__", {}).items():
        if is_dataclass(field.type) and isinstance(field.type, type):
            within_bytes, within = _parts_of(field.type, f"{prefix}{name}.")
            fixed_bytes += field.type.__basicsize__ + _HEADER_BYTES + within_bytes
            names += within
        elif set(get_args(field.type) or [field.type]) <= _NUMBERS:
            fixed_bytes += _NUMBER_BYTES
        else:
            names.append(prefix + name)
    return fixed_bytes, names


class Budget:
    """Bytes that all exchanges may keep together; `left` of `bytes_max` can still be taken. `short` is called
    for each body that finds no room."""

    __slots__ = ("_short", "left")

    def __init__(self, bytes_max: int, short: Callable[[], None]) -> None:
        self.left = bytes_max
        self._short = short

    def take(self, n: int) -> bool:
        if n > self.left:
            self._short()
            return False
        self.left -= n
        return True

    def give(self, n: int) -> None:
        self.left += n


class Share:
    """What one exchange has taken of a budget; without a budget there is always room."""

    __slots__ = ("_budget", "_taken")

    def __init__(self, budget: Budget | None = None) -> None:
        self._budget = budget
        self._taken = 0

    def take(self, n: int) -> bool:
        if self._budget is not None and not self._budget.take(n):
            return False
        self._taken += n
        return True

    def give(self, n: int) -> None:
        if self._budget is not None:
            self._budget.give(n)
        self._taken -= n

    def close(self) -> None:
        """Gives back what is left: the exchange is over. A second call does nothing."""
        self.give(self._taken)

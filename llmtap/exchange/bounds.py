"""Limits of an Exchange: the length of its strings, and the memory of the exchange and its unfinished bodies.

`bounded` cuts one string before it is stored, `bound` cuts all strings of a complete exchange, and
`memory_bytes` returns the memory of an exchange. The fields of the Exchange declare their bounds (`BOUNDS`),
and functions in `strings.py` apply them. SECURITY.md shows BOUNDS as a table, which a test rewrites. `Budget`
limits the bytes of bodies that all open exchanges keep; each exchange takes its bytes through a `Share`.
"""

from array import array
from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass
from enum import Enum
from operator import attrgetter
from sys import getsizeof
from typing import Any, Final, get_args

from llmtap.exchange.exchange import Exchange
from llmtap.exchange.strings import Bound

_NUMBER_BYTES: Final = 32
_HEADER_BYTES: Final = 16
"""Bytes that the garbage collector adds to each object, which `__basicsize__` does not include."""
_UNCHANGED_MAX: Final = 1_024
"""Maximum number of strings in each set of `_unchanged`."""
_UNCHANGED_CHARS_MAX: Final = 64
_NUMBERS: Final = frozenset({int, float, bool, type(None)})
_FIXED_BYTES: Final = {type(None): 0, bool: 0, int: _NUMBER_BYTES, float: _NUMBER_BYTES, type: 0}
_FLAT: Final = frozenset({str, bytes, bytearray, array})


def _bounds_of(kind: type, prefix: str = "") -> Iterator[tuple[str, Bound]]:
    """Yield the path of each field that has a length limit, with the limit."""
    for field in fields(kind):
        for about in getattr(field.type, "__metadata__", ()):
            if isinstance(about, Bound):
                yield prefix + field.name, about
        for part in get_args(field.type):
            if is_dataclass(part) and isinstance(part, type):
                yield from _bounds_of(part, f"{prefix}{field.name}.")


BOUNDS: Final = dict(_bounds_of(Exchange))
"""Limits by field of an Exchange; a name with a dot is a part of a field."""
_unchanged: Final[dict[str, set[str]]] = {name: set() for name in BOUNDS}
"""Cache of short strings that need no change, by field: most strings are repeated, and the search for keys in
a string takes 1 us."""
_WHOLE: Final = [(name, limits, _unchanged[name]) for name, limits in BOUNDS.items() if "." not in name]
"""Fields of an Exchange that have a bound (without parts of fields), each with its set of `_unchanged`."""
_read_whole: Final = attrgetter(*(name for name, _, _ in _WHOLE))
_readers: dict[type, tuple[int, Callable[[object], Any]]] = {}  # results of `_reader_of`, by class


def bounded(field: str, text: str) -> str:
    """Return a string, cut at the bound of its field, or replaced if the field must not contain it."""
    unchanged = _unchanged[field]
    if text in unchanged:
        return text
    limits = BOUNDS[field]
    fitted = limits.fit(text, limits.chars)
    if fitted == text and len(text) <= _UNCHANGED_CHARS_MAX:
        if len(unchanged) >= _UNCHANGED_MAX:
            unchanged.clear()
        unchanged.add(text)
    return fitted


def bound(x: Exchange) -> None:
    """Cut all strings of an exchange at their bounds, also in lists and objects, except captured fields."""
    for (name, limits, unchanged), value in zip(_WHOLE, _read_whole(x), strict=True):
        if value is None:
            continue
        if type(value) is not str:
            setattr(x, name, _fitted_value(name, value, [limits.members]))
        elif value not in unchanged and (fitted := bounded(name, value)) is not value:
            setattr(x, name, fitted)


def _fitted_value(field: str, value: Any, members_left: list[int]) -> Any:
    """Return a value with all its strings cut. `members_left[0]`: number of members that are still kept."""
    if isinstance(value, str):
        return bounded(field, value)
    if isinstance(value, dict):
        fitted = {}
        for name, item in value.items():
            if not members_left[0]:
                break
            members_left[0] -= 1
            fitted[bounded(field, name)] = _fitted_value(field, item, members_left)
        return fitted
    if isinstance(value, list | tuple):
        listed = []
        for item in value:
            if not members_left[0]:
                break
            members_left[0] -= 1
            listed.append(_fitted_value(field, item, members_left))
        return listed
    return value


def memory_bytes(value: object) -> int:
    """Return the memory in bytes of an Exchange, or of any value in one, with all objects that it refers to.
    An object with two references counts twice."""
    kind = type(value)
    fixed = _FIXED_BYTES.get(kind)
    if fixed is not None:
        return fixed
    size = getsizeof(value)
    if kind in _FLAT or isinstance(value, Enum):
        return size
    if isinstance(value, dict):
        return size + sum(map(getsizeof, value)) + sum(map(memory_bytes, value.values()))
    if isinstance(value, list | tuple):
        return size + sum(map(memory_bytes, value))
    reader = _readers.get(kind)
    if reader is None:
        reader = _readers[kind] = _reader_of(kind)
    fixed_bytes, read = reader
    size += fixed_bytes
    for part in read(value):
        if part is not None:
            size += getsizeof(part) if type(part) in _FLAT else memory_bytes(part)
    return size


def _reader_of(kind: type) -> tuple[int, Callable[[object], Any]]:
    """Return the bytes of a class's fixed parts, and a function that returns all other parts as a tuple."""
    fixed_bytes, names = _parts_of(kind, "")
    # attrgetter returns a tuple only for two names or more, so add `__class__`, which counts as 0 bytes.
    return fixed_bytes, attrgetter(*names, *["__class__"] * (2 - len(names)))


def _parts_of(kind: type, prefix: str) -> tuple[int, list[str]]:
    """Return the fixed size of a class, and the names of its parts of variable size."""
    fixed_bytes, names = 0, list[str]()
    for name, field in getattr(kind, "__dataclass_fields__", {}).items():
        if is_dataclass(field.type) and isinstance(field.type, type):
            within_bytes, within = _parts_of(field.type, f"{prefix}{name}.")
            fixed_bytes += field.type.__basicsize__ + _HEADER_BYTES + within_bytes
            names += within
        elif set(get_args(field.type) or [field.type]) <= _NUMBERS:
            fixed_bytes += _NUMBER_BYTES
        elif not (isinstance(field.type, type) and issubclass(field.type, Enum)):
            # Members of an Enum are not counted: each exists only once in the process.
            names.append(prefix + name)
    return fixed_bytes, names


class Budget:
    """Memory limit of all exchanges together, `bytes_max`; `free_bytes` is the part that is not taken.

    `on_shortage` is called for each body for which there is no memory.
    """

    __slots__ = ("_on_shortage", "free_bytes")

    def __init__(self, bytes_max: int, on_shortage: Callable[[], None]) -> None:
        self.free_bytes = bytes_max
        """Part of the limit that is not taken."""
        self._on_shortage = on_shortage
        """Function that is called when the budget has too few bytes."""

    def take(self, n: int) -> bool:
        """Take `n` bytes. Return False, without a change, if fewer are free."""
        if n > self.free_bytes:
            self._on_shortage()
            return False
        self.free_bytes -= n
        return True

    def give(self, n: int) -> None:
        """Return `n` bytes that were taken."""
        self.free_bytes += n


class Share:
    """Bytes that one exchange has taken from a budget; without a budget there is no limit."""

    __slots__ = ("_budget", "_taken_bytes")

    def __init__(self, budget: Budget | None = None) -> None:
        self._budget = budget
        self._taken_bytes = 0

    def take(self, n: int) -> bool:
        """Take `n` bytes from the budget; return False if it has too few."""
        if self._budget is not None and not self._budget.take(n):
            return False
        self._taken_bytes += n
        return True

    def give(self, n: int) -> None:
        """Return `n` bytes to the budget."""
        if self._budget is not None:
            self._budget.give(n)
        self._taken_bytes -= n

    def resize(self, n: int) -> bool:
        """Take or return bytes so that `n` are taken. Return False, without a change, if too few are free."""
        return self.change(n - self._taken_bytes)

    def change(self, more: int) -> bool:
        """Take `more` bytes (negative: return). Return False, without a change, if too few are free."""
        if more > 0:
            return self.take(more)
        self.give(-more)
        return True

    def close(self) -> None:
        """Return all bytes at the end of the exchange. A second call does nothing."""
        self.give(self._taken_bytes)

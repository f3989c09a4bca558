"""Refuse JSON whose value would take too much memory: `{},` of 3 bytes becomes an object of 64.

All JSON of clients and upstreams is decoded through `bounded_decoder` or behind `check_memory`. The memory is
estimated from the number of brackets, commas and quotes. Those inside strings do not count: long texts hold
many of them.
"""

from collections.abc import Callable
from typing import Any, Final, TypeVar, overload

import msgspec

VALUE_BYTES_MAX: Final = 64 << 20
"""Maximum estimated memory of one decoded value. Embeddings take 3 bytes for each byte of JSON,
log-probabilities 9, `{},{},` 35; an event or body has at most 16 MiB."""
_FREE_BYTES: Final = 1 << 20
"""Length up to which JSON is not checked: so short a text cannot take VALUE_BYTES_MAX."""
_BRACKET_BYTES: Final = 72
_COMMA_BYTES: Final = 32
_STRING_BYTES: Final = 32
_WINDOW_BYTES: Final = 1 << 16
_ALL_BUT_STRUCTURE: Final = bytes(set(range(256)) - set(b'{[,"'))

T = TypeVar("T")


class JsonTooLarge(ValueError):
    """A JSON text whose value would take more than VALUE_BYTES_MAX."""


def check_memory(data: bytes) -> None:
    """Raise JsonTooLarge if the decoded value would take more than VALUE_BYTES_MAX."""
    if (
        len(data) > _FREE_BYTES
        and value_bytes(data) > VALUE_BYTES_MAX
        and exact_value_bytes(data) > VALUE_BYTES_MAX
    ):
        raise JsonTooLarge(f"its values would take more than {VALUE_BYTES_MAX >> 20} MiB of memory")


def value_bytes(data: bytes) -> int:
    """Return an upper limit of the memory, in which brackets and commas in strings count, too."""
    return _memory_bytes(data.count(b"{") + data.count(b"["), data.count(b","), data.count(b'"'))


def exact_value_bytes(data: bytes) -> int:
    """Return the estimated memory, in which brackets and commas inside strings do not count."""
    # Remove escaped quotes first: then each quote begins or ends a string.
    structure = data.replace(b"\\\\", b"").replace(b'\\"', b"").translate(None, _ALL_BUT_STRUCTURE)
    brackets = commas = quotes = 0
    inside = False
    for i in range(0, len(structure), _WINDOW_BYTES):
        parts = structure[i : i + _WINDOW_BYTES].split(b'"')
        bare = b"".join(parts[inside::2])
        quotes += len(parts) - 1
        inside ^= bool(len(parts) % 2 == 0)
        commas += (n := bare.count(b","))
        brackets += len(bare) - n
    return _memory_bytes(brackets, commas, quotes)


def _memory_bytes(brackets: int, commas: int, quotes: int) -> int:
    return _BRACKET_BYTES * brackets + _COMMA_BYTES * commas + _STRING_BYTES * (quotes // 2)


@overload
def bounded_decoder(kind: type[T]) -> Callable[[bytes], T]: ...
@overload
def bounded_decoder() -> Callable[[bytes], Any]: ...
def bounded_decoder(kind: Any = Any) -> Callable[[bytes], Any]:
    """Return a decoder of JSON to `kind`.

    The decoder raises ValueError if the data are invalid, JsonTooLarge (a ValueError) if the decoded value
    would take too much memory, and RecursionError if it is nested too deeply.
    """
    decode = msgspec.json.Decoder(kind).decode

    def read(data: bytes) -> Any:
        if len(data) > _FREE_BYTES:
            check_memory(data)
        return decode(data)

    return read

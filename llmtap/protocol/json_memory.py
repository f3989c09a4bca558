"""Refuse JSON whose value would take too much memory: the 3 bytes `{},` become an object of 64 bytes.

All JSON of clients and upstreams is decoded by a `bounded_decoder`, or after `check_memory`. The memory is
estimated from the number of brackets, commas and quotes. Brackets and commas inside strings do not count,
because long texts have many of them.
"""

from collections.abc import Callable
from typing import Any, Final, TypeVar, overload

import msgspec

VALUE_BYTES_MAX: Final = 64 << 20
"""Maximum estimated memory of one decoded value. One byte of JSON takes 3 bytes of memory in embeddings, 9 in
log probabilities, and 35 in `{},{},`. An event or body has at most 16 MiB of JSON."""
_FREE_BYTES: Final = 1 << 20
"""Length up to which JSON is not checked, because a value of this length cannot take VALUE_BYTES_MAX."""
_BRACKET_BYTES: Final = 72
_COMMA_BYTES: Final = 32
_STRING_BYTES: Final = 32
_WINDOW_BYTES: Final = 1 << 16
_ALL_BUT_STRUCTURE: Final = bytes(set(range(256)) - set(b'{[,"'))

T = TypeVar("T")


class JsonTooLarge(ValueError):
    """The value of a JSON text would take more than VALUE_BYTES_MAX of memory."""


def check_memory(data: bytes) -> None:
    """Raise JsonTooLarge if the decoded value would take more than VALUE_BYTES_MAX."""
    if (
        len(data) > _FREE_BYTES
        and value_bytes(data) > VALUE_BYTES_MAX
        and exact_value_bytes(data) > VALUE_BYTES_MAX
    ):
        raise JsonTooLarge(
            f"the JSON values would take more than {VALUE_BYTES_MAX >> 20} MiB of memory, the maximum"
        )


def value_bytes(data: bytes) -> int:
    """Return an upper limit of the memory of the decoded value: brackets and commas in strings count, too."""
    return _memory_bytes(data.count(b"{") + data.count(b"["), data.count(b","), data.count(b'"'))


def exact_value_bytes(data: bytes) -> int:
    """Return the estimated memory of the decoded value: brackets and commas in strings do not count."""
    # Remove escaped quotes first, so that each quote begins or ends a string.
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
